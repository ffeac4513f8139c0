"""Gemma 3 with pictures: the tokens of an image see each other, whatever the chunks, the windows and
the cache are. Against transformers, in float32.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import picture
from safetensors.torch import load_file, save_file
from test_multimodal_engine import Family, check, engine, greedy, prompt
from tiny_eyes import gemma3, put, save_family
from transformers import (
    CLIPVisionConfig,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
)

from teachvllm import LLM, EngineArgs
from teachvllm.config import NotSupportedYet
from teachvllm.distributed.parallel_state import ParallelState, run_ranks
from teachvllm.model_executor.loader import get_model, make_context
from teachvllm.model_executor.models.gemma3_mm import image_mask, pool_patches

TOKENS = 16  # of a picture: 8 x 8 patches, in squares of 2 x 2
FULL, SLIDING = "full_attention", "sliding_attention"
KINDS: dict[str, dict[str, Any]] = {
    "long window": {"sliding_window": 40, "layer_types": [SLIDING, FULL]},
    # an image's last tokens do not see its first ones
    "short window": {"sliding_window": 7, "layer_types": [SLIDING, FULL]},
    "windows only": {"sliding_window": 21, "layer_types": [SLIDING, SLIDING]},
    "no window": {"layer_types": [FULL, FULL]},
}
PLACE = "<start_of_image>"


def make(kind: str) -> tuple[Any, Any]:
    "Configuration and processor of a model whose pictures have more tokens than patches in a row."
    config, processor = gemma3()
    for name, value in KINDS[kind].items():
        setattr(config.text_config, name, value)
    config.mm_tokens_per_image = TOKENS
    config.vision_config.image_size = 112
    image_processor = Gemma3ImageProcessorPil(size={"height": 112, "width": 112})
    return config, Gemma3Processor(image_processor, processor.tokenizer, image_seq_length=TOKENS)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    made: dict[str, Family] = {}

    def get(kind: str) -> Family:
        if kind not in made:
            made[kind] = Family("gemma3", tmp_path_factory.mktemp("gemma"), make(kind))
        return made[kind]

    return get


def load(family: Family, parallel: ParallelState = ParallelState(), **options: Any) -> Any:
    "Our model, as the worker loads it."
    options = {"dtype": "float32", "device": "cpu", **options}
    config = EngineArgs(str(family.folder), **options).create_engine_config()
    return get_model(config, make_context(config, parallel))


def some_requests(family: Family) -> list[tuple[str, list[Any]]]:
    odd = [picture(70, 45, 1), picture(31, 90, 2), picture(13, 9, 3)]
    return [
        (f"{PLACE}what is it?", odd[:1]),
        ("a red circle, " * 5, []),
        (f"a {PLACE} b {PLACE}{PLACE} Answer:", odd),
        ("the blue square. " * 4 + f"{PLACE} yes", odd[1:2]),
        (f"no {PLACE}" + "the blue square. " * 4, odd[2:]),
    ]


@pytest.mark.parametrize("budget", [512, 30, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(families: Any, kind: str, budget: int) -> None:
    "Prompts longer than the window, alone and together; then again, from the cache."
    family = families(kind)
    requests = some_requests(family)
    with engine(family, max_num_batched_tokens=budget) as llm:
        check(llm, family, requests[2:3], 8)
        check(llm, family, requests, 8)
        assert all(output.num_cached_tokens for output in check(llm, family, requests, 8))


@torch.inference_mode()
def test_both_directions_matter(families: Any) -> None:
    "The tests above would fail with a causal mask, and with another window."
    for kind in KINDS:
        family = families(kind)
        different = 0
        for text, images in some_requests(family):
            made = family.processor(text=text, images=images or None, return_tensors="pt")
            size = made["input_ids"].shape[1]
            made["token_type_ids"] = torch.zeros_like(made["token_type_ids"])
            causal = family.model.generate(
                **made, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            different += causal[0, size:].tolist() != family.expected(text, images, 8)
        assert different >= 2, kind
    texts = some_requests(families("no window"))
    written = [[tuple(families(kind).expected(*one, 8)) for one in texts] for kind in KINDS]
    assert len(set(map(tuple, written))) == len(KINDS)


@pytest.mark.parametrize("kind", ["short window", "long window"])
def test_no_chunk_ends_inside_an_image(families: Any, kind: str) -> None:
    "Whatever budget a step has; and the steps are as long as that lets them be."
    family = families(kind)
    request = some_requests(family)[2]
    for budget in range(TOKENS, 2 * TOKENS + 3):
        with engine(
            family, max_num_batched_tokens=budget, max_num_seqs=2, enable_prefix_caching=False
        ) as llm:
            core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
            assert core.config.multimodal_config.disable_chunked_mm_input
            ends = spy_ends(core)
            check(llm, family, [request], 4)
            seq_ends = next(iter(ends.values()))
            ranges = [r for item in ends.items_of for r in item.ranges]  # type: ignore
            assert len(ranges) == 3 and len(seq_ends) > 3
            assert not any(a < end < a + n for end in seq_ends for a, n in ranges)


class Ends(dict[int, list[int]]):
    "By sequence: where its chunks ended. And the images of the last one."

    items_of: list[Any]


def spy_ends(core: Any) -> Ends:
    ends = Ends()
    schedule = core.scheduler.schedule

    def spied() -> Any:
        out = schedule()
        for seq_id in out.num_scheduled_tokens:
            _, seq = core.scheduler.seqs[seq_id]
            ends.setdefault(seq_id, []).append(seq.num_computed_tokens)
            ends.items_of = seq.mm_items
        return out

    core.scheduler.schedule = spied
    return ends


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [4, 16])
def test_a_hit_may_end_inside_an_image(families: Any, kind: str, block_size: int) -> None:
    """The rest of it is computed, and sees all of it: what is in the cache has seen all of it, too.
    Nor is the rest cut, should another request leave less of the step.
    """
    family = families(kind)
    image = picture(70, 45, 1)
    inside = set()
    with engine(family, block_size=block_size, max_num_batched_tokens=TOKENS + 4) as llm:
        core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        for lead in range(block_size):
            text = "w" * lead + PLACE
            check(llm, family, [(text + "red", [image])], 3)
            ends = spy_ends(core)
            tails = ("blue square", "yes, blue", "what is it?")
            outputs = check(llm, family, [(text + tail, [image]) for tail in tails], 3)
            ((begin, number),) = ends.items_of[0].ranges
            for output in outputs:
                hit = output.num_cached_tokens
                if begin < hit < begin + number:
                    inside.add(hit - begin)
            assert not any(begin < end < begin + number for one in ends.values() for end in one)
    assert len(inside) >= (4 if block_size == 16 else 1)


@pytest.mark.parametrize("kind", ["long window", "windows only"])
def test_few_blocks_and_swaps(families: Any, kind: str) -> None:
    family = families(kind)
    requests = some_requests(family)
    for mode in ("recompute", "swap"):
        with engine(
            family,
            num_gpu_blocks_override=24,
            preemption_mode=mode,
            swap_space=0.01 if mode == "swap" else 0,
            max_num_batched_tokens=40,
        ) as llm:
            check(llm, family, [*requests, *requests], 16)
            assert llm.get_metrics()["num_preemptions"] > 0


@pytest.mark.parametrize(
    "shared",
    [
        {"max_num_partial_prefills": 3, "max_long_partial_prefills": 3},
        {"max_num_partial_prefills": 2, "long_prefill_token_threshold": 5},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512, "max_model_len": 512},
    ],
)
def test_a_share_of_a_step_is_never_less_than_an_image(families: Any, shared: Any) -> None:
    "Else two prompts that stand before their images would wait for each other for ever."
    family = families("long window")
    requests = some_requests(family)
    with engine(family, **{"max_num_batched_tokens": 20, **shared}) as llm:
        core = llm.llm_engine
        for i, (text, images) in enumerate(requests):
            core.add_request(str(i), prompt(text, images), greedy(4))
        done: dict[str, Any] = {}
        for _ in range(200):
            done |= {one.request_id: one for one in core.step() if one.finished}
        for i, (text, images) in enumerate(requests):
            assert done[str(i)].outputs[0].token_ids == family.expected(text, images, 4)


def test_an_image_that_no_step_can_hold_is_refused(families: Any) -> None:
    family = families("long window")
    text, images = some_requests(family)[0]
    with engine(family, max_num_batched_tokens=TOKENS - 1) as llm:
        with pytest.raises(ValueError, match="16 tokens.*max_num_batched_tokens=15"):
            llm.generate([prompt(text, images)], greedy(2), use_tqdm=False)
        check(llm, family, some_requests(family)[1:2])


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_several_workers(families: Any, sizes: dict[str, int]) -> None:
    family = families("short window")
    options = {"distributed_executor_backend": "mp", "max_num_batched_tokens": 40}
    with engine(family, **options, **sizes) as llm:
        check(llm, family, some_requests(family))


@pytest.mark.parametrize("backend", ["reference", "torch_sdpa", "numba"])
def test_every_backend(families: Any, backend: str) -> None:
    "Their caches lie in memory in different ways."
    family = families("short window")
    with engine(family, attention_backend=backend, max_num_batched_tokens=48) as llm:
        check(llm, family, some_requests(family))


def written(llm: LLM, family: Family) -> list[list[int]]:
    requests = [prompt(*request) for request in some_requests(family)]
    outputs = llm.generate(requests, greedy(6), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_an_8_bit_cache(families: Any) -> None:
    "Chunks and backends make no difference; and it is not what 32 bits give."
    family = families("short window")
    found = []
    for backend in ("reference", "torch_sdpa"):
        for budget in (512, 17):
            options = {"kv_cache_dtype": "fp8", "attention_backend": backend}
            with engine(family, max_num_batched_tokens=budget, **options) as llm:
                found.append(written(llm, family))
    assert all(one == found[0] for one in found)
    assert found[0] != [family.expected(*one, 6) for one in some_requests(family)]


def test_with_drafts(families: Any) -> None:
    "In a step with drafts, queries are not sequences."
    family = families("long window")
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    requests = some_requests(family)
    options = {"max_num_batched_tokens": 40, "max_num_seqs": 2, "enable_prefix_caching": False}
    with engine(family, speculative_config=speculative, **options) as llm:
        (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        find_spans = runner.encoders.find_spans
        mixed = 0

        def spied(state: Any, batch: Any) -> None:
            nonlocal mixed
            find_spans(state, batch)
            mixed += bool(batch.drafts) and "image_spans" in batch.extras

        runner.encoders.find_spans = spied
        check(llm, family, [*requests, *requests[::-1]], 24)
        assert mixed


def test_pan_and_scan(families: Any) -> None:
    "A long picture is several runs of tokens, with text between; each run sees itself only."
    family = families("long window")
    options = {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 20,
        "pan_and_scan_max_num_crops": 3,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    images = [picture(160, 45, 1), picture(30, 40, 2)]
    text = f"a {PLACE} b {PLACE} what?"
    made = family.processor(text=text, images=images, return_tensors="pt", **options)
    size = made["input_ids"].shape[1]
    assert (made["token_type_ids"] == 1).sum() >= 5 * TOKENS
    right = family.model.generate(
        **made, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, size:]
    for budget in (512, 240):
        with engine(
            family, mm_processor_kwargs=options, max_num_batched_tokens=budget, block_size=16
        ) as llm:
            for _ in range(2):
                (output,) = llm.generate([prompt(text, images)], greedy(8), use_tqdm=False)
                assert list(output.prompt_token_ids) == made["input_ids"][0].tolist()
                assert output.outputs[0].token_ids == right.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_random_loads(families: Any, seed: int) -> None:
    rng = random.Random(seed)
    family = families(rng.choice(list(KINDS)))
    pictures = [picture(rng.randint(9, 80), rng.randint(9, 80), i) for i in range(3)]
    with engine(
        family,
        max_num_batched_tokens=rng.choice([TOKENS, 24, 50, 120]),
        num_gpu_blocks_override=rng.choice([30, 120]),
        block_size=rng.choice([8, 16]),
        max_num_seqs=rng.choice([2, 5]),
        max_model_len=240,
        enable_prefix_caching=rng.random() < 0.7,
    ) as llm:
        requests = []
        for _ in range(12):
            images = rng.choices(pictures, k=rng.choice([0, 1, 1, 2]))
            words = rng.choices(["a red", "the blue", "yes", "circle ,"], k=rng.randint(1, 5))
            for _ in images:
                words.insert(rng.randint(0, len(words)), PLACE)
            requests.append((" ".join(words), images))
        check(llm, family, requests, rng.randint(1, 8))


# The parts


def test_the_mask_is_that_of_transformers() -> None:
    "Of whole prompts, for both kinds of layers."
    config, _ = make("short window")
    config._attn_implementation = config.text_config._attn_implementation = "sdpa"
    types = torch.tensor([[0, 0, 0, *[1] * 11, 0, *[1] * 9, 0, 0]])
    number = types.shape[1]
    masks = Gemma3ForConditionalGeneration.create_masks_for_generate(
        config=config,
        inputs_embeds=torch.zeros(1, number, 32),
        attention_mask=torch.ones(1, number),
        past_key_values=None,
        position_ids=torch.arange(number)[None],
        token_type_ids=types,
    )
    for begin, last in ((3, 14), (15, 24)):
        for kind, window in ((FULL, None), (SLIDING, 7)):
            theirs = masks[kind][0, 0]
            assert theirs.dtype == torch.bool
            for first in range(begin, last):
                ours = image_mask(first, last, window)
                assert torch.equal(ours, theirs[first:last, :last])
                assert not theirs[first:last, last:].any()


def test_means_of_squares() -> None:
    x = torch.randn(2, 36, 5, generator=torch.Generator().manual_seed(0))
    pooled = pool_patches(x, 3)
    wanted = torch.nn.functional.avg_pool2d(x.mT.view(2, 5, 6, 6), 2).flatten(2).mT
    torch.testing.assert_close(pooled, wanted)
    for patches, side in ((35, 5), (36, 4)):
        with pytest.raises(ValueError, match=f"{patches} patches .* divides by {side}"):
            pool_patches(torch.zeros(1, patches, 5), side)


@pytest.fixture(scope="module")
def pixels() -> list[dict[str, torch.Tensor]]:
    "Two pictures, and one with two crops."
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 3, 112, 112), (1, 3, 112, 112), (3, 3, 112, 112))
    return [{"pixel_values": torch.randn(*shape, generator=generator)} for shape in shapes]


@torch.inference_mode()
def theirs(family: Family, features: dict[str, torch.Tensor]) -> torch.Tensor:
    rows = family.model.get_image_features(**features, return_dict=True).pooler_output
    return torch.cat(list(rows))


@torch.inference_mode()
def test_rows_are_those_of_transformers(
    families: Any, pixels: Any, caplog: pytest.LogCaptureFixture
) -> None:
    family = families("long window")
    with caplog.at_level("WARNING", "teachvllm"):
        model = load(family)
    assert not caplog.records
    together = model.get_multimodal_embeddings(pixels)
    for features, rows in zip(pixels, together, strict=True):
        right = theirs(family, features)
        (alone,) = model.get_multimodal_embeddings([features])
        assert rows.shape == (TOKENS * len(features["pixel_values"]), 32) and right.abs().max() > 1
        torch.testing.assert_close(rows, right, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(alone, right, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(together[0], together[1], atol=0.1)


def older(name: str) -> str:
    "What checkpoints on the hub call a tensor."
    name = name.removeprefix("model.").replace("vision_tower.", "vision_tower.vision_model.")
    return name.replace("language_model.", "language_model.model.")


def layouts(family: Family) -> Iterator[dict[str, torch.Tensor]]:
    "The tensors of one checkpoint under the names of several versions."
    memory = {n: x for n, x in family.model.state_dict().items() if n != "lm_head.weight"}
    yield memory
    yield {older(name): tensor for name, tensor in memory.items()}


@torch.inference_mode()
def test_names_of_other_versions(
    families: Any, pixels: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family = families("long window")
    first = dict(load(family).named_parameters())
    caplog.clear()
    saved = set(load_file(family.folder / "model.safetensors"))
    for i, tensors in enumerate(layouts(family)):
        folder = tmp_path / str(i)
        folder.mkdir()
        for file in family.folder.glob("*.json"):
            (folder / file.name).write_text(file.read_text())
        save_file(
            {name: x.contiguous().clone() for name, x in tensors.items()},
            folder / "model.safetensors",
        )
        config = EngineArgs(str(folder), dtype="float32", device="cpu").create_engine_config()
        with caplog.at_level("WARNING", "teachvllm"):
            model = get_model(config, make_context(config))
        assert not caplog.records
        again = dict(model.named_parameters())
        assert again.keys() == first.keys()
        assert all(torch.equal(again[name], first[name]) for name in first)
        assert set(tensors) != saved or i == 0


@torch.inference_mode()
def test_the_tower_is_whole_on_every_rank(families: Any, pixels: Any) -> None:
    "The language model is shared; of a pipeline, the first stage alone sees."
    family = families("long window")
    (wanted,) = load(family).get_multimodal_embeddings(pixels[:1])

    def rows(parallel: ParallelState) -> Any:
        model = load(family, parallel)
        if not parallel.is_first_stage:
            assert not any("vision_tower" in name for name, _ in model.named_parameters())
            return None
        return model.get_multimodal_embeddings(pixels[:1])[0]

    assert all(torch.equal(found, wanted) for found in run_ranks(rows, 2))
    first, last = run_ranks(rows, 1, 2)
    assert torch.equal(first, wanted) and last is None


WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    "model_type='clip_vision_model'": (put("", vision_config=CLIPVisionConfig()), NotSupportedYet),
    "use_bidirectional_attention=True": (
        put("text_config", use_bidirectional_attention=True),
        NotSupportedYet,
    ),
    "attn_logit_softcapping=30.0": (
        put("text_config", attn_logit_softcapping=30.0),
        NotSupportedYet,
    ),
    "mm_tokens_per_image=15 must be a square": (put("", mm_tokens_per_image=15), ValueError),
}


@pytest.mark.parametrize("why", WRONG)
def test_what_is_not_served_is_refused_by_name(families: Any, why: str) -> None:
    change, error = WRONG[why]
    with pytest.raises(error, match=why):
        load(families("long window"), hf_overrides=change)


@torch.inference_mode()
def test_squares_that_do_not_fill_the_picture(families: Any, pixels: Any) -> None:
    model = load(families("long window"), hf_overrides=put("", mm_tokens_per_image=9))
    with pytest.raises(ValueError, match="64 patches .* mm_tokens_per_image"):
        model.get_multimodal_embeddings(pixels[:1])


def test_who_may_be_cut(families: Any, tmp_path: Path) -> None:
    "The configuration forbids it for Gemma 3, whatever the user says, and for no other family."
    folder = str(families("no window").folder)
    config = EngineArgs(folder, disable_chunked_mm_input=False).create_engine_config()
    assert config.multimodal_config and config.multimodal_config.disable_chunked_mm_input
    llava, _ = save_family("llava", tmp_path / "llava")
    for asked in (False, True):
        config = EngineArgs(str(llava), disable_chunked_mm_input=asked).create_engine_config()
        assert config.multimodal_config
        assert config.multimodal_config.disable_chunked_mm_input is asked
