"""Images through the whole engine: greedy tokens are those that transformers writes for the same
texts and pictures, in float32, whatever the batch, the chunks, the cache and the blocks do.
"""

import base64
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from io import BytesIO
from typing import Any

import msgspec
import pytest
import torch
from pictures import picture
from PIL import Image
from tiny_eyes import PLACEHOLDERS, save_family
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.utils import logging as hf_logging

from teachvllm import LLM, LoRARequest, SamplingParams
from teachvllm.messages import EngineCoreOutputs

hf_logging.disable_progress_bar()
SEEING = ("llava", "idefics3", "smolvlm", "qwen2_vl", "gemma3")
Request = tuple[str, list[Image.Image]]


def fill_gemma(name: str, parameter: torch.Tensor) -> None:
    """Weights with which pictures, and what is around a token, matter: with those that it begins with
    all pictures are zeros, and a text repeats its last token.
    """
    if parameter.dim() > 1:
        torch.nn.init.normal_(parameter, std=0.2 if "embed_tokens" in name else 0.3)
    elif name.endswith("norm.weight") and "language_model" in name:
        torch.nn.init.normal_(parameter, std=2)


class Family:
    "A tiny random model that sees, in a folder, and what transformers writes with it."

    def __init__(self, name: str, folder: Any, made: Any = None):
        self.name = name
        self.folder, self.processor = save_family(name, folder, made)
        self.place = PLACEHOLDERS[name]
        torch.manual_seed(0)
        hf_config = AutoConfig.from_pretrained(self.folder)
        self.model = AutoModelForImageTextToText.from_config(hf_config).float().eval()
        with torch.no_grad():
            for weight_name, parameter in self.model.named_parameters():
                if name == "gemma3":
                    fill_gemma(weight_name, parameter)
                else:
                    parameter.mul_(1.5)  # a flat distribution has near ties
        self.model.save_pretrained(self.folder)
        self.written: dict[tuple[str, tuple[bytes, ...], int], list[int]] = {}

    @torch.inference_mode()
    def expected(self, text: str, images: list[Image.Image], number: int) -> list[int]:
        "Greedy tokens of transformers."
        key = (text, tuple(image.tobytes() for image in images), number)
        if key not in self.written:
            made = self.processor(text=text, images=images or None, return_tensors="np")
            inputs = {
                name: torch.from_numpy(value)
                for name, value in made.items()
                if name != "mm_token_type_ids" or self.name == "qwen2_vl"
            }
            size = inputs["input_ids"].shape[1]
            made_ids = self.model.generate(
                **inputs,
                max_new_tokens=number,
                min_new_tokens=number,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            self.written[key] = made_ids[0, size:].tolist()
        return self.written[key]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    made: dict[str, Family] = {}

    def get(name: str) -> Family:
        if name not in made:
            made[name] = Family(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@contextmanager
def engine(family: Family, **options: Any) -> Iterator[LLM]:
    settled = {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "block_size": 8,
        "num_gpu_blocks_override": 400,
    }
    llm = LLM(str(family.folder), **{**settled, **options})
    try:
        yield llm
    finally:
        llm.close()


def prompt(text: str, images: list[Image.Image]) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": images}} if images else {"prompt": text}


def greedy(number: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=number, ignore_eos=True)


def check(llm: LLM, family: Family, requests: list[Request], number: int = 6) -> list[Any]:
    "Side by side."
    outputs = llm.generate(
        [prompt(*request) for request in requests], greedy(number), use_tqdm=False
    )
    for (text, images), output in zip(requests, outputs, strict=True):
        assert output.outputs[0].token_ids == family.expected(text, images, number), text
    manager = llm.llm_engine.engine_core.engine_core.scheduler.block_manager  # type: ignore
    assert manager.get_num_free_gpu_blocks() == manager.num_gpu_blocks
    return outputs


def some_requests(family: Family) -> list[Request]:
    place = family.place
    odd = [picture(70, 45, 1), picture(31, 90, 2), picture(13, 9, 3)]
    return [
        ("what is red?", []),
        (f"{place}\nwhat is in this picture?", odd[:1]),
        (f"a {place} b {place} c\n{place} Answer:", odd),
        (f"{place}\nwhat is in this picture?", odd[1:2]),
        ("the blue square. " * 6, []),
        (f"yes {place} no", odd[2:]),
    ]


@pytest.mark.parametrize("budget", [512, 29])
@pytest.mark.parametrize("name", SEEING)
def test_mixed_batches(families: Any, name: str, budget: int) -> None:
    "None, one and three images of odd sizes, alone and beside text; then again, from the cache."
    family = families(name)
    with engine(family, max_num_batched_tokens=budget) as llm:
        requests = some_requests(family)
        check(llm, family, requests[1:2])
        check(llm, family, requests)
        for output in check(llm, family, requests):
            assert output.num_cached_tokens > 0 or len(output.prompt_token_ids) <= 8
        schedule = llm.llm_engine.engine_core.engine_core.scheduler.orders.encoders  # type: ignore
        assert not any(schedule.cache.users.values())
        assert schedule.num_encoded >= 3  # each picture at least once


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "gemma3"])
def test_a_chunk_may_end_anywhere(families: Any, name: str) -> None:
    family = families(name)
    request = some_requests(family)[1]
    for budget in range(4 if name == "gemma3" else 3, 26, 2):  # its images are 4 tokens
        with engine(
            family,
            max_num_batched_tokens=budget,
            max_num_seqs=2,
            enable_prefix_caching=False,
        ) as llm:
            check(llm, family, [request], 3)


def test_no_chunk_ends_inside_an_image(families: Any) -> None:
    family = families("llava")
    with engine(family, max_num_batched_tokens=40, disable_chunked_mm_input=True) as llm:
        check(llm, family, some_requests(family))


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "gemma3"])
def test_one_text_under_two_pictures(families: Any, name: str) -> None:
    "The prefix cache tells them apart, and finds each again."
    family = families(name)
    text = f"the red circle {family.place}\nwhat is in this picture?"
    first, second = picture(56, 56, 5), picture(56, 56, 6)
    with engine(family) as llm:
        (one,) = check(llm, family, [(text, [first])])
        (other,) = check(llm, family, [(text, [second])])
        (again,) = check(llm, family, [(text, [first])])
        assert one.num_cached_tokens == 0
        # what comes before the picture is the same
        assert other.num_cached_tokens < again.num_cached_tokens
        assert one.outputs[0].token_ids != other.outputs[0].token_ids


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "gemma3"])
def test_preempted(families: Any, name: str, mode: str) -> None:
    family = families(name)
    requests = some_requests(family)
    longest = 110 // 8 if name == "llava" else 200 // 8
    with engine(
        family,
        num_gpu_blocks_override=longest + 3,
        preemption_mode=mode,
        swap_space=0.01 if mode == "swap" else 0,
        max_num_batched_tokens=64,
    ) as llm:
        check(llm, family, [*requests, *requests], 24)
        assert llm.get_metrics()["num_preemptions"] > 0


@pytest.mark.parametrize("name", ["smolvlm", "qwen2_vl", "gemma3"])
def test_two_workers(families: Any, name: str) -> None:
    family = families(name)
    with engine(
        family, tensor_parallel_size=2, distributed_executor_backend="mp", max_num_batched_tokens=64
    ) as llm:
        check(llm, family, some_requests(family))


def test_forks_of_a_prompt_with_a_picture(families: Any) -> None:
    family = families("llava")
    text, images = some_requests(family)[1]
    with engine(family) as llm:
        params = SamplingParams(temperature=0.8, n=3, seed=3, max_tokens=5, ignore_eos=True)
        (several,) = llm.generate([prompt(text, images)], params, use_tqdm=False)
        assert len({tuple(one.token_ids) for one in several.outputs}) > 1
        check(llm, family, [(text, images)])


@pytest.mark.parametrize("seed", range(len(SEEING)))
def test_random_loads(families: Any, seed: int) -> None:
    "Small caches of every kind, requests that are aborted: nothing stays behind."
    rng = random.Random(seed)
    family = families(SEEING[seed])
    pictures = [picture(rng.randint(9, 80), rng.randint(9, 80), i) for i in range(4)]
    with engine(
        family,
        max_num_batched_tokens=rng.choice([24, 48, 96]),
        num_gpu_blocks_override=rng.choice([60, 120]),
        max_num_seqs=rng.choice([2, 5]),
        enable_prefix_caching=rng.random() < 0.7,
    ) as llm:
        requests = []
        for _ in range(12):
            images = rng.choices(pictures, k=rng.choice([0, 1, 1, 2]))
            words = rng.choices(["a red", "the blue", "yes", "circle ,"], k=rng.randint(1, 5))
            for _ in images:
                words.insert(rng.randint(0, len(words)), family.place)
            requests.append((" ".join(words), images))
        for i, request in enumerate(requests):  # these are aborted
            llm.llm_engine.add_request(f"gone {i}", prompt(*request), greedy(20))
        for _ in range(rng.randint(1, 6)):
            llm.llm_engine.step()
        for i in range(len(requests)):
            llm.llm_engine.abort_request(f"gone {i}")
        check(llm, family, requests, rng.randint(1, 8))
        encoders = llm.llm_engine.engine_core.engine_core.scheduler.orders.encoders  # type: ignore
        assert not any(encoders.cache.users.values())
        (kept,) = llm.collective_rpc(
            lambda worker: {
                name for one in worker.model_runner.encoders.embeddings.values() for name in one
            }
        )
        assert kept == set(encoders.cache.sizes)


def test_bad_requests_leave_the_engine_as_it_was(families: Any) -> None:
    family = families("llava")
    text, images = some_requests(family)[1]
    wrong: list[tuple[dict[str, Any], str]] = [
        (prompt(text, images * 2), "Expected there to be 2 prompt updates"),
        (prompt("no place", images), "instead found 0"),
        ({"prompt": text, "multi_modal_data": {"audio": [1]}}, "At most 0 audio"),
        ({"prompt": text, "multi_modal_data": {"image": b"no picture"}}, "image"),
        ({"prompt": text, "multi_modal_data": {"image": ["data:image/png;base64,AAAA"]}}, "image"),
    ]
    with engine(family, limit_mm_per_prompt={"image": 3}) as llm:
        place = family.place
        wrong.append((prompt(place * 4, images * 4), "At most 3 image"))
        for bad, says in wrong:
            with pytest.raises(ValueError, match=says):
                llm.generate([bad], greedy(2), use_tqdm=False)
        check(llm, family, some_requests(family))


def test_a_chat_with_a_picture(families: Any) -> None:
    family = families("llava")
    image = picture(40, 70, 8)
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "image_pil", "image_pil": image},
                {"type": "text", "text": "what is in this picture?"},
            ],
        }
    ]
    with engine(family) as llm:
        (output,) = llm.chat(messages, greedy(6), use_tqdm=False)
        rendered = family.processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, messages[0]["content"][1]]}],
            tokenize=False,
            add_generation_prompt=True,
        )
        made = family.processor(
            text=rendered, images=[image], add_special_tokens=False, return_tensors="np"
        )
        inputs = {name: torch.from_numpy(value) for name, value in made.items()}
        ids = inputs["input_ids"]
        assert list(output.prompt_token_ids) == ids[0].tolist() and ids.shape[1] > 16
        written = family.model.generate(
            **inputs, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert output.outputs[0].token_ids == written[0, ids.shape[1] :].tolist()


def test_memory_is_measured_with_the_largest_picture(families: Any) -> None:
    "Encoded and kept while the largest step runs; afterwards nothing of it is there."
    family = families("smolvlm")
    with engine(family, num_gpu_blocks_override=None, kv_cache_memory_bytes=None) as llm:
        config = llm.llm_engine.engine_core.engine_core.config  # type: ignore[attr-defined]
        runner = llm.collective_rpc(lambda worker: worker.model_runner)[0]
        assert not any(runner.encoders.embeddings.values())
        runner.encoders.profile_run()
        (kept,) = runner.encoders.embeddings[0].values()
        largest = llm.llm_engine.processor.input_processor.multimodal.max_tokens_per_image()
        assert config.encoder_budget >= largest
        assert len(kept) == max(1, config.encoder_budget // largest) * largest
        runner.reset()
        check(llm, family, some_requests(family)[:2])


@pytest.mark.parametrize("name", ["smolvlm", "llava"])
def test_a_trace_says_where_images_lie(families: Any, name: str) -> None:
    """At the placeholders; which are encoded before they are computed, and forgotten only afterwards.
    A core in a process of its own sends it as a message.
    """
    family = families(name)
    with engine(family, max_num_batched_tokens=24) as llm:
        requests = [prompt(*request) for request in some_requests(family)]
        with llm.record() as trace:
            outputs = llm.generate(requests, greedy(3), use_tqdm=False)
    placeholder = family.processor.image_token_id
    for i, (output, request) in enumerate(zip(outputs, requests, strict=True)):
        ids = output.prompt_token_ids
        found = [trace.image_at(str(i), position) for position in range(len(ids))]
        assert [one is not None for one in found] == [token_id == placeholder for token_id in ids]
        places = trace.mm_places.get(str(i), [])
        assert len(places) == len(request.get("multi_modal_data", {}).get("image", []))
        numbers = [(h, n) for h, ranges in places for n in range(sum(n for _, n in ranges))]
        assert [one for one in found if one] == numbers
    kept: set[str] = set()
    num_slots = 0
    for step in trace.steps:
        sent = msgspec.msgpack.encode(EngineCoreOutputs(trace=step))
        assert msgspec.msgpack.decode(sent, type=EngineCoreOutputs).trace == step
        kept = (kept - set(step.freed_mm_hashes)) | set(step.encoder_inputs)
        for seq, number in step.num_scheduled_tokens.items():
            end = step.num_computed_tokens[seq]
            found = [trace.image_at(seq, position) for position in range(end - number, end)]
            assert {mm_hash for mm_hash, _ in filter(None, found)} <= kept
            # each token has a slot of a block
            assert -(-end // trace.block_size) <= len(step.block_tables[seq])
            num_slots += len([one for one in found if one])
    assert num_slots > 0 and sum(len(step.encoder_inputs) for step in trace.steps) >= 3


def test_openais_client_sends_pictures(families: Any) -> None:
    "As data URLs, in streams and whole; what is wrong is a 400 that says why, and the next is served."
    openai = pytest.importorskip("openai")
    pytest.importorskip("fastapi")
    from teachvllm import EngineArgs
    from teachvllm.engine.async_llm import AsyncLLM
    from teachvllm.entrypoints.api_server import ServerArgs, serve_in_background

    family = families("llava")
    image = picture(40, 70, 8)
    file = BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

    def messages(*urls: str) -> Any:
        parts = [{"type": "image_url", "image_url": {"url": one}} for one in urls]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}]

    args = EngineArgs(
        str(family.folder),
        dtype="float32",
        device="cpu",
        max_model_len=1024,
        num_gpu_blocks_override=400,
        limit_mm_per_prompt={"image": 2},
    )
    engine = AsyncLLM.from_engine_args(args)
    options: Any = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    options["extra_body"] = {"ignore_eos": True}
    try:
        with (
            serve_in_background(engine, ServerArgs(port=0, served_model_name="tiny")) as address,
            openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client,
        ):
            chat = client.chat.completions.create
            whole = chat(messages=messages(url), **options)
            assert whole.usage.prompt_tokens > 16 and whole.usage.completion_tokens == 8
            pieces = chat(messages=messages(url), stream=True, **options)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
            assert streamed == whole.choices[0].message.content
            two = chat(messages=messages(url, url), **options)
            assert two.usage.prompt_tokens > whole.usage.prompt_tokens + 15
            for wrong, says in (
                ([url] * 3, "At most 2 image"),
                (["data:image/png;base64,AAAA"], "image"),
                (["file:///etc/passwd"], "allowed-local-media-path"),
                (["http://127.0.0.1:9/a.png"], ""),
                (["data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode()], "image"),
            ):
                with pytest.raises(openai.BadRequestError, match=says):
                    chat(messages=messages(*wrong), **options)
            again = chat(messages=messages(url), **options)
            assert again.choices[0].message.content == whole.choices[0].message.content
    finally:
        engine.shutdown()


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_what_was_seen_before_a_sleep(families: Any, name: str) -> None:
    "Core and workers forget it together, at a sleep and with the prefix cache."
    family = families(name)
    requests = some_requests(family)[1:3]
    with engine(family, enable_prefix_caching=False) as llm:
        check(llm, family, requests)
        llm.sleep(1)
        llm.wake_up()
        check(llm, family, requests)
        assert llm.reset_prefix_cache()
        check(llm, family, requests)
        encoders = llm.llm_engine.engine_core.engine_core.scheduler.orders.encoders  # type: ignore
        (kept,) = llm.collective_rpc(
            lambda worker: {
                name for one in worker.model_runner.encoders.embeddings.values() for name in one
            }
        )
        assert kept == set(encoders.cache.sizes) and encoders.num_encoded == 3 * len(kept)


def test_adapters_of_the_language_model(families: Any, tmp_path: Any) -> None:
    "With pictures and without: the tokens of transformers with the adapter merged into its weights."
    peft = pytest.importorskip("peft")
    family = families("llava")
    requests = some_requests(family)
    places = r".*language_model.*\.(q_proj|v_proj|up_proj)"
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=places, init_lora_weights=False)
    torch.manual_seed(1)
    adapted = peft.get_peft_model(deepcopy(family.model), config)
    adapted.save_pretrained(tmp_path)
    merged = copy(family)
    merged.model, merged.written = adapted.merge_and_unload().eval(), {}
    with engine(family, enable_lora=True, max_lora_rank=8) as llm:
        check(llm, family, requests)
        outputs = llm.generate(
            [prompt(*request) for request in requests],
            greedy(6),
            use_tqdm=False,
            lora_request=LoRARequest("shapes", 1, str(tmp_path)),
        )
    got = [output.outputs[0].token_ids for output in outputs]
    assert got == [merged.expected(text, images, 6) for text, images in requests]
    assert got != [family.expected(text, images, 6) for text, images in requests]


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_drafts_do_not_look(families: Any, name: str) -> None:
    "The rounded model drafts on pages that have the images: it needs no tower of its own."
    family = families(name)
    speculative_config = {"method": "self_quantized", "num_speculative_tokens": 3}
    with engine(family, speculative_config=speculative_config) as llm:
        check(llm, family, some_requests(family))
        (shared,) = llm.collective_rpc(
            lambda worker: [
                getattr(worker.model_runner.proposer.drafter.model, name)
                is getattr(worker.model_runner.model, name)
                for name in worker.model_runner.model.encoder_modules
            ]
        )
        assert shared and all(shared)


def test_one_square_and_whole_numbers(families: Any) -> None:
    "Sizes below a square, and options that are whole numbers."
    family = families("smolvlm")
    with engine(family) as llm:
        for options in ({"size": {"longest_edge": 40}}, {"rescale_factor": 1}):
            request = prompt(f"a {family.place} b", [picture(70, 45, 1)])
            request["mm_processor_kwargs"] = options
            (output,) = llm.generate([request], greedy(2), use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 2
