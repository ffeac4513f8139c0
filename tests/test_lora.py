"""LoRA adapters: PEFT writes them and is the oracle. Alone and in one batch, on one worker and on
several, and what happens to those that are broken, changed, pinned, or too many.
"""

import gc
import json
import random
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TINY, VOCAB, runner_of, write_adapter
from safetensors.torch import load_file, save_file
from test_models import FAMILIES
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig

from teachvllm import LLM, BeamSearchParams, SamplingParams
from teachvllm.config import LoRAConfig, NotSupportedYet
from teachvllm.core.scheduler import WorkersFailed
from teachvllm.lora.adapter import LoRAModel
from teachvllm.lora.layers import (
    AdapterReader,
    LoRAStack,
    add_by_segments,
    add_lora,
    add_stacked,
)
from teachvllm.lora.manager import LoRAManager
from teachvllm.messages import LoRARequest

peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")
PROMPT = list(range(5, 41))
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 200,
    "swap_space": 0.01,
    "enable_lora": True,
    "max_lora_rank": 8,
}
KINDS: dict[str, dict[str, Any]] = {
    "all": {"target_modules": "all-linear"},
    "some": {"target_modules": ["q_proj", "v_proj"]},
    "regex": {"target_modules": r".*layers\.[12]\.mlp\.(up|down)_proj"},
    "rslora": {"target_modules": "all-linear", "use_rslora": True, "r": 4},
    "patterns": {
        "target_modules": "all-linear",
        "rank_pattern": {"down_proj": 2, r"layers\.1\.self_attn\.q_proj": 5},
        "alpha_pattern": {"up_proj": 3, "layers.0.mlp.gate_proj": 40},
    },
    "head": {"target_modules": ["lm_head", "k_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "o_proj"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A tiny Llama whose layers come in whole panels, so that a processor's kernel serves them."
    folder = tmp_path_factory.mktemp("base")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)  # so that no two tokens tie
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    "For each kind the folder that PEFT wrote, and PEFT's model."
    made = {}
    for seed, (kind, options) in enumerate(KINDS.items(), 1):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        options = {"r": 8, "lora_alpha": 12} | options
        config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
        adapted = peft.get_peft_model(model, config).eval()
        folder = tmp_path_factory.mktemp(kind)
        adapted.save_pretrained(folder)
        made[kind] = folder, adapted
    return made


def requests_for(adapters: dict[str, tuple[Path, Any]]) -> dict[str, LoRARequest]:
    "A request for each, with numbers from 1 on."
    return {
        kind: LoRARequest(kind, i, str(folder))
        for i, (kind, (folder, _)) in enumerate(adapters.items(), 1)
    }


@torch.no_grad()
def logprobs_by(model: Any, prompt: list[int]) -> torch.Tensor:
    "[tokens, vocabulary] log-probabilities of a transformers model."
    logprobs: torch.Tensor = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    return logprobs


@torch.no_grad()
def tokens_by(model: Any, prompt: list[int], n: int) -> list[int]:
    "Greedy tokens of a transformers model."
    ids = list(prompt)
    for _ in range(n):  # `generate` would end at EOS, or write another token
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def run(llm: LLM, lora: Any, prompts: Any = None, params: Any = GREEDY) -> list[Any]:
    "Outputs for one prompt each, with these adapters."
    loras = lora if isinstance(lora, list) else [lora]
    given = [{"prompt_token_ids": one} for one in prompts or [PROMPT] * len(loras)]
    return llm.generate(given, params, use_tqdm=False, lora_request=loras)


def tokens(output: Any) -> list[list[int]]:
    return [list(one.token_ids) for one in output.outputs]


def manager_of(llm: LLM) -> LoRAManager:
    manager: LoRAManager = llm.llm_engine.engine_core.engine_core.lora
    return manager


# One adapter


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["recorded", "eager"])
def test_each_adapter_is_what_peft_makes_of_it(
    base: Path, adapters: dict[str, tuple[Path, Any]], options: dict[str, Any]
) -> None:
    "Log-probabilities of all tokens, and greedy tokens, before and after PEFT merges it."
    scoring = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=-1)
    wanted = requests_for(adapters)
    with LLM(str(base), max_logprobs=-1, max_loras=2, **OPTIONS, **options) as llm:
        for kind, (_, adapted) in adapters.items():
            [output] = run(llm, wanted[kind], params=scoring)
            got = torch.tensor(
                [[row[i].logprob for i in range(VOCAB)] for row in output.prompt_logprobs[1:]]
            )
            expected = logprobs_by(adapted, PROMPT)[:-1]
            assert (got - expected).abs().max() < 1e-4, kind
            assert tokens(output) == [tokens_by(adapted, PROMPT, 6)], kind
            assert output.lora_request == wanted[kind]
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        assert tokens(run(llm, None)[0]) == [tokens_by(plain, PROMPT, 6)]


OTHERS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2Config(vocab_size=97, n_embd=48, n_layer=2, n_head=4, n_positions=128),
    "gpt_neox": lambda: GPTNeoXConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    ),
    "opt": TINY["opt"],
    **{name: FAMILIES[name] for name in ("qwen2", "qwen3", "gemma2", "gemma3")},
    "phi3": FAMILIES["phi3, longrope, short texts"],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name: str, tmp_path: Path) -> None:
    """Matrices that a checkpoint has fused, in another order, or lying the other way: all linear
    layers adapted, log-probabilities of the prompt by PEFT.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(OTHERS[name]()).eval().float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "base")
    plain = logprobs_by(model, PROMPT[:20])[:-1]
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    expected = logprobs_by(adapted, PROMPT[:20])[:-1]
    assert (expected - plain).abs().max() > 0.5
    scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    options = OPTIONS | {"max_logprobs": -1, "max_model_len": 128}
    with LLM(str(tmp_path / "base"), **options) as llm:
        lora = LoRARequest("one", 1, str(tmp_path / "adapter"))
        [output] = run(llm, lora, [PROMPT[:20]], scoring)
    size = expected.shape[1]
    got = torch.tensor(
        [[row[i].logprob for i in range(size)] for row in output.prompt_logprobs[1:]]
    )
    assert (got - expected).abs().max() < 1e-4


def test_a_merged_adapter_is_the_same(base: Path, adapters: dict[str, tuple[Path, Any]]) -> None:
    folder, _ = adapters["patterns"]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(model, folder).merge_and_unload()
    with LLM(str(base), **OPTIONS) as llm:
        [output] = run(llm, LoRARequest("one", 1, str(folder)))
    assert tokens(output) == [tokens_by(merged, PROMPT, 6)]


def test_a_pickled_adapter(
    base: Path, adapters: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    "Weights only: what would run code is refused."
    folder, adapted = adapters["all"]
    shutil.copy(folder / "adapter_config.json", tmp_path)
    torch.save(load_file(folder / "adapter_model.safetensors"), tmp_path / "adapter_model.bin")
    with LLM(str(base), **OPTIONS) as llm:
        [output] = run(llm, LoRARequest("pickled", 1, str(tmp_path)))
        assert tokens(output) == [tokens_by(adapted, PROMPT, 6)]
        torch.save({"x": open}, tmp_path / "adapter_model.bin")
        with pytest.raises(ValueError, match="Loading lora other failed"):
            run(llm, LoRARequest("other", 2, str(tmp_path)))


# Many


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"enforce_eager": True},
    "chunked": {"max_num_batched_tokens": 16},
    "preempted": {"num_gpu_blocks_override": 16, "max_model_len": 128},
    "swapped": {
        "num_gpu_blocks_override": 16,
        "max_model_len": 128,
        "preemption_mode": "swap",
    },
    "no cache": {"enable_prefix_caching": False},
    "two places": {"max_loras": 2, "max_cpu_loras": 3},
    "two workers": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "ahead": {"async_scheduling": True},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_batch_of_all_equals_each_alone(
    base: Path, adapters: dict[str, tuple[Path, Any]], name: str
) -> None:
    "Each adapter twice, and the base, in one batch; then the same again, from the cache."
    options = OPTIONS | {"max_loras": len(KINDS)} | CONFIGURATIONS[name]
    kinds = [None, *adapters, *reversed(adapters)]
    wanted = requests_for(adapters)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = [tokens_by(adapters[k][1] if k else plain, PROMPT, 20) for k in kinds]
    with LLM(str(base), **options) as llm:
        for _ in range(2):
            outputs = run(llm, [wanted[k] if k else None for k in kinds], params=params)
            assert [tokens(one)[0] for one in outputs] == expected
        if name == "preempted":
            assert llm.get_metrics()["num_preemptions"] > 0
        if name == "swapped":
            assert llm.get_metrics()["num_swapped_in_blocks"] > 0
        manager = manager_of(llm)
        assert not manager.parked and len(manager.places.place_of) <= options["max_loras"]


def test_several_answers_and_beams_keep_their_adapter(
    base: Path, adapters: dict[str, tuple[Path, Any]]
) -> None:
    "Forks of one request, in a batch with another adapter's: as alone."
    wanted = requests_for(adapters)
    loras = [wanted["all"], wanted["some"], None]
    params = SamplingParams(n=3, temperature=1, seed=5, max_tokens=8, ignore_eos=True)
    with LLM(str(base), max_loras=2, **OPTIONS) as llm:
        alone = [tokens(run(llm, lora, params=params)[0]) for lora in loras]
        assert [tokens(one) for one in run(llm, loras, params=params)] == alone
        assert len({str(one) for one in alone}) == 3
        beam = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
        prompts = [{"prompt_token_ids": PROMPT}]
        single = [llm.beam_search(prompts, beam, lora_request=lora)[0] for lora in loras]
        together = llm.beam_search(prompts * 3, beam, lora_request=loras)
        for a, b in zip(single, together, strict=True):
            assert [one.tokens for one in a.sequences] == [one.tokens for one in b.sequences]


def test_two_hundred_adapters_in_four_places(base: Path, tmp_path: Path) -> None:
    "Random requests in random order: no wrong token, and nothing is left behind."
    rng = random.Random(3)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = []
    for i in range(200):
        added = write_adapter(tmp_path / str(i), i)
        weights = dict(model.named_parameters())
        for sign in (1, -1):
            for name, delta in added.items():
                weights[name].data += sign * delta
            if sign == 1:
                expected.append(tokens_by(model, PROMPT[: 5 + i % 20], 4))
    options = OPTIONS | {"max_loras": 4, "max_cpu_loras": 10, "max_num_seqs": 16}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(str(base), **options) as llm:
        for _ in range(2):
            chosen = [rng.randrange(200) for _ in range(200)]
            loras = [LoRARequest(f"lora {i}", i + 1, str(tmp_path / str(i))) for i in chosen]
            outputs = run(llm, loras, [PROMPT[: 5 + i % 20] for i in chosen], params)
            assert [tokens(one)[0] for one in outputs] == [expected[i] for i in chosen]
        manager = manager_of(llm)
        assert len(manager.places.place_of) == 4 and len(manager.host.numbers) <= 10
        assert not manager.parked and not any(map(manager.places.is_used, range(1, 500)))
        [(on_host, placed)] = llm.collective_rpc(
            lambda worker: (set(worker.model_runner.lora.host), worker.model_runner.lora.places)
        )
        assert on_host == set(manager.host.numbers) and placed == dict(manager.places.place_of)


def test_a_request_without_a_place_stops_no_other(
    base: Path, adapters: dict[str, tuple[Path, Any]]
) -> None:
    "One place: the request for the second adapter waits, and one behind it, for the first, runs."
    wanted = requests_for(adapters)
    long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(str(base), **OPTIONS) as llm:
        engine = llm.llm_engine
        for name, kind, params in (
            ("first", "all", long),
            ("second", "some", GREEDY),
            ("third", "all", GREEDY),
            ("plain", None, GREEDY),
        ):
            lora = wanted[kind] if kind else None
            engine.add_request(name, {"prompt_token_ids": PROMPT}, params, lora_request=lora)
        order = []
        while engine.has_unfinished_requests():
            order += [output.request_id for output in engine.step() if output.finished]
    assert {*order[:2]} == {"third", "plain"} and order[2:] == ["first", "second"]


def test_no_request_is_overtaken_for_ever(
    base: Path, adapters: dict[str, tuple[Path, Any]]
) -> None:
    "Requests for the adapter that has the place come without end; the other one's turn comes."
    wanted = requests_for(adapters)
    with LLM(str(base), **OPTIONS | {"max_num_seqs": 2}) as llm:
        engine = llm.llm_engine
        limit = manager_of(llm).max_overtaken
        engine.add_request("0", PROMPT, GREEDY, lora_request=wanted["all"])
        engine.step()
        engine.add_request("other", PROMPT, GREEDY, lora_request=wanted["some"])
        done: list[str] = []
        sent = 0
        while "other" not in done:
            while engine.get_num_unfinished_requests() < 4:
                sent += 1
                engine.add_request(str(sent), PROMPT, GREEDY, lora_request=wanted["all"])
            done += [output.request_id for output in engine.step() if output.finished]
            assert len(done) <= limit + 4


# What must not mix


def test_a_reload_computes_anew(base: Path, tmp_path: Path) -> None:
    "The same name and number, other weights: no block that the old ones computed is found."
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = dict(model.named_parameters())["model.layers.0.self_attn.q_proj.weight"].clone()
    answers = []
    for seed in (1, 2):
        added = write_adapter(tmp_path / str(seed), seed)
        adapted = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        for name, parameter in adapted.named_parameters():
            parameter.data += added.get(name, 0)
        answers.append(tokens_by(adapted, PROMPT, 6))
    assert before.equal(dict(model.named_parameters())["model.layers.0.self_attn.q_proj.weight"])
    first = LoRARequest("mine", 1, str(tmp_path / "1"))
    with LLM(str(base), **OPTIONS) as llm:
        engine = llm.llm_engine
        for cached in (0, 32):
            [output] = run(llm, first)
            assert (tokens(output), output.num_cached_tokens) == ([answers[0]], cached)
        with pytest.raises(ValueError, match="lora_int_id=1 is 'mine' in .*call remove_lora"):
            run(llm, LoRARequest("mine", 1, str(tmp_path / "2")))
        assert engine.remove_lora(1) and not engine.remove_lora(1)
        for cached in (0, 32):
            [output] = run(llm, LoRARequest("mine", 1, str(tmp_path / "2")))
            assert (tokens(output), output.num_cached_tokens) == ([answers[1]], cached)
        # and in its place, on the disk
        second = LoRARequest("mine", 1, str(tmp_path / "2"), load_inplace=True)
        assert not engine.add_lora(second)
        write_adapter(tmp_path / "2", 1)
        assert engine.add_lora(second) and engine.list_loras() == {1}
        [output] = run(llm, second)
        assert (tokens(output), output.num_cached_tokens) == ([answers[0]], 0)


def test_a_file_that_changed_while_it_was_away(base: Path, tmp_path: Path) -> None:
    "It was dropped from the host's memory, and is another one now: its request ends, once."
    loras = []
    for i in (1, 2):
        write_adapter(tmp_path / str(i), i)
        loras.append(LoRARequest(str(i), i, str(tmp_path / str(i))))
    with LLM(str(base), **OPTIONS) as llm:
        run(llm, loras[0])
        run(llm, loras[1])
        write_adapter(tmp_path / "1", 3)
        [output] = run(llm, loras[0])
        assert output.outputs[0].finish_reason == "error"
        assert "has changed" in str(output.outputs[0].stop_reason)
        assert run(llm, loras[0])[0].outputs[0].finish_reason == "length"


def test_pinned_adapters_stay(base: Path, adapters: dict[str, tuple[Path, Any]]) -> None:
    wanted = list(requests_for(adapters).values())
    with LLM(str(base), **OPTIONS | {"max_loras": 2, "max_cpu_loras": 4}) as llm:
        engine = llm.llm_engine
        with pytest.raises(ValueError, match="LoRA 1 is not registered"):
            engine.pin_lora(1)
        assert engine.add_lora(wanted[0]) and not engine.add_lora(wanted[0])
        assert engine.pin_lora(1)
        for lora in wanted:
            run(llm, lora)
        assert 1 in manager_of(llm).places.place_of
        assert engine.list_loras() == set(range(1, len(wanted) + 1))
        engine.pin_lora(2)
        with pytest.raises(ValueError, match="All places are pinned"):
            engine.pin_lora(3)
        [output] = run(llm, wanted[2])
        assert "All places are pinned" in str(output.outputs[0].stop_reason)
        assert engine.remove_lora(2)
        assert run(llm, wanted[2])[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("kinds", [("all", "some"), ("head", "embedding")], ids=str)
@pytest.mark.parametrize("level", [1, 2])
def test_sleep(
    base: Path, adapters: dict[str, tuple[Path, Any]], level: int, kinds: tuple[str, str]
) -> None:
    "The adapters that had places have them again, also where the model is loaded anew."
    loras = [requests_for(adapters)[kind] for kind in kinds]
    with LLM(str(base), **OPTIONS | {"max_loras": 2}) as llm:
        before = [tokens(one) for one in run(llm, loras)]
        model = weakref.ref(runner_of(llm).model)
        llm.sleep(level)
        if level == 2:
            gc.collect()
            assert model() is None  # nothing else holds the weights
            with pytest.raises(ValueError, match="the worker sleeps"):
                llm.llm_engine.add_lora(LoRARequest("late", 9, loras[0].lora_path))
        llm.wake_up()
        assert [tokens(one) for one in run(llm, loras)] == before


def test_a_core_of_its_own_process(
    base: Path, adapters: dict[str, tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    wanted = requests_for(adapters)
    with LLM(str(base), **OPTIONS) as llm:
        [output] = run(llm, wanted["all"])
        assert tokens(output) == [tokens_by(adapters["all"][1], PROMPT, 6)]
        assert llm.llm_engine.list_loras() == {1}
        lost = LoRARequest("lost", 9, "/nowhere")
        [output] = run(llm, lost)
        assert output.outputs[0].finish_reason == "error"
        assert "No adapter found for /nowhere" in output.outputs[0].stop_reason


# What is refused


def break_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def break_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        tensors = change(tensors) or tensors
        save_file({name: x.contiguous() for name, x in tensors.items()}, file)

    return rewrite


def truncate(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def first_of(tensors: dict[str, torch.Tensor], matrix: str) -> str:
    return next(name for name in sorted(tensors) if f"lora_{matrix}" in name)


def make_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[first_of(tensors, "B")][0, 0] = float("nan")


def narrow(tensors: dict[str, torch.Tensor]) -> None:
    name = first_of(tensors, "A")
    tensors[name] = tensors[name][:, :-2]


def other_rank(tensors: dict[str, torch.Tensor]) -> None:
    a = first_of(tensors, "A")
    b = first_of(tensors, "B")
    tensors[a] = tensors[a][:3]
    tensors[b] = tensors[b][:, :3]


def halve(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[first_of(tensors, "B")]


def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("layers", "blocks"): x for name, x in tensors.items()}


BROKEN = [
    (truncate, "Loading lora broken failed"),
    (break_tensors(make_nan), "down_proj: lora_B has numbers that are not finite"),
    (break_tensors(narrow), r"is for a matrix of \(190, 128\) inputs and outputs, this one has"),
    (break_tensors(other_rank), "lora_A is of rank 3, adapter_config.json says 4"),
    (break_tensors(halve), "has lora_A alone"),
    (break_tensors(rename), "expected target modules in .* but received .*down_proj"),
    (break_tensors(lambda tensors: tensors.update(x=torch.ones(1))), "x is no matrix of LoRA"),
    (break_config(r=16), "LoRA rank 16 is greater than max_lora_rank 8"),
    (break_config(rank_pattern={"q_proj": 9}), "LoRA rank 9 is greater than max_lora_rank 8"),
    (break_config(r="many"), "r='many' must be a number above 0"),
    (break_config(r=4.5), "r=4.5 must be a number above 0"),
    (break_config(lora_alpha=float("inf")), "lora_alpha=inf must be a number above 0"),
    (break_config(lora_alpha=1e300), "lora_B has numbers that are not finite"),
    (break_config(init_lora_weights="pissa"), "PEFT changes the model's own weights"),
    (break_config(use_dora=True), "vLLM does not yet support DoRA"),
    (break_config(modules_to_save=["lm_head"]), "only supports modules_to_save being None"),
    (break_config(bias="all"), "Adapter bias is not supported"),
    (break_config(peft_type="IA3"), "peft_type='IA3' is not LoRA"),
    (lambda folder: (folder / "adapter_config.json").write_text("{"), "Loading lora broken failed"),
    (lambda folder: (folder / "adapter_config.json").unlink(), "No adapter found for"),
    (lambda folder: (folder / "adapter_model.safetensors").unlink(), "No adapter found for"),
]


@pytest.fixture(scope="module")
def llm(base: Path) -> Iterator[LLM]:
    with LLM(str(base), **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_a_broken_adapter_is_refused_and_the_engine_goes_on(
    llm: LLM, base: Path, tmp_path: Path, number: int
) -> None:
    change, message = BROKEN[number]
    write_adapter(tmp_path, 1)
    change(tmp_path)
    before = tokens(run(llm, None)[0])
    with pytest.raises(ValueError, match=message):
        run(llm, LoRARequest("broken", 100 + number, str(tmp_path)))
    assert tokens(run(llm, None)[0]) == before
    assert 100 + number not in llm.llm_engine.list_loras()


def test_a_part_that_does_not_match_is_said(
    llm: LLM, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        more = {name.replace("layers.0", "layers.7"): x.clone() for name, x in tensors.items()}
        return tensors | more

    write_adapter(tmp_path, 1)
    break_tensors(add)(tmp_path)
    caplog.set_level("WARNING", "teachvllm")
    run(llm, LoRARequest("half", 200, str(tmp_path)))
    assert "2 modules are not in the model" in caplog.text
    assert "model.layers.7.self_attn.q_proj" in caplog.text


def test_arguments(base: Path) -> None:
    for options, message in (
        ({"max_loras": 0}, r"max_loras \(0\) must be >= 1"),
        ({"max_loras": 4, "max_cpu_loras": 2}, r"max_cpu_loras \(2\) must be >= max_loras \(4\)"),
        ({"max_lora_rank": 7}, r"max_lora_rank \(7\) must be one of"),
        ({"lora_dtype": "int8"}, "lora_dtype='int8': choose auto"),
    ):
        with pytest.raises(ValueError, match=message):
            LoRAConfig(**options)
    with pytest.raises(NotSupportedYet, match="fully_sharded_loras=True"):
        LoRAConfig(fully_sharded_loras=True)
    for name, path, number, message in (
        ("a", "", 1, "lora_path cannot be empty"),
        ("a", "/x", 0, "id must be > 0, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            LoRARequest(name, number, path)
    lora = LoRARequest("a", 1, "/x")
    with LLM(str(base), **OPTIONS | {"enable_lora": False}) as plain:
        with pytest.raises(ValueError, match="but LoRA is not enabled"):
            run(plain, lora)
        with pytest.raises(ValueError, match="LoRA is not enabled"):
            plain.llm_engine.add_lora(lora)
        for wrong, message in (("mine", "must be a LoRARequest"), ([lora] * 2, "2 lora_requests")):
            with pytest.raises(ValueError, match=message):
                plain.generate([[1, 2]], GREEDY, use_tqdm=False, lora_request=wrong)


# Products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[64], [128, 64, 64], [64, 32, 32], [300, 7]])
def test_all_forms_of_the_product_agree(sizes: list[int], dtype: torch.dtype) -> None:
    "Segments, stacked, and what the table has, against a loop over rows in float64."
    from teachvllm.kernels import platform_kernels

    torch.manual_seed(0)
    width = 48
    stack = LoRAStack(width, sizes, 5, 8, dtype=dtype, device="cpu")
    filled = []
    for place in range(4):  # the last one is empty
        some = [i for i in range(len(sizes)) if place != i]
        rank = 8 - place
        pairs = {i: (torch.randn(width, rank), torch.randn(rank, sizes[i])) for i in some}
        stack.set(place, pairs)
        filled.append(pairs)
    packed = platform_kernels("cpu").get("lora_stack", width, sizes, 8, dtype)
    if packed:
        packed = packed(width, sizes, 5, 8, dtype, "cpu")
        for place, pairs in enumerate(filled):
            packed.set(place, pairs)
    for n in (1, 2, 7, 40):
        x = torch.randn(n, width, dtype=dtype)
        y = torch.randn(n, sum(sizes), dtype=dtype)
        ids = torch.randint(0, 6, (n,))
        expected = y.double()
        for row, i in enumerate(ids.tolist()):
            if i:
                low = x[row].double() @ stack.a[i - 1].double()
                for part, begin in enumerate([sum(sizes[:i]) for i in range(len(sizes))]):
                    some_low = low[part * 8 : part * 8 + 8]
                    out = slice(begin, begin + sizes[part])
                    expected[row, out] += some_low @ stack.b[i - 1][:, out].double()
        most = expected.abs().max()
        close = (1e-5 if dtype == torch.float32 else 0.03) * most
        forms = [partial(form, stack=stack) for form in (add_by_segments, add_stacked, add_lora)]
        forms += [packed] if packed else []
        for form in forms:
            got = form(y.clone(), x, adapter_ids=ids)
            assert got.dtype == dtype and (got.double() - expected).abs().max() < close, form


def test_what_is_replaced_or_removed_makes_room(base: Path, tmp_path: Path) -> None:
    "A pin ends with what was pinned, and nothing that no request can ask for keeps a place."
    write_adapter(tmp_path, 1)
    lora = LoRARequest("mine", 1, str(tmp_path))
    with LLM(str(base), **OPTIONS | {"max_loras": 1, "max_cpu_loras": 4}) as llm:
        engine = llm.llm_engine
        run(llm, lora)
        engine.pin_lora(1)
        write_adapter(tmp_path, 2)
        assert engine.add_lora(LoRARequest("mine", 1, str(tmp_path), load_inplace=True))
        manager = manager_of(llm)
        assert not manager.places.pinned and len(manager.host.numbers) == 1
        [output] = run(llm, lora)
        assert output.outputs[0].finish_reason == "length"
        engine.remove_lora(1)
        assert not manager.host.numbers and not manager.places.place_of
        assert len(manager.places.free) == 1
        broken = tmp_path / "broken"
        write_adapter(broken, 3)
        run(llm, lora)
        (broken / "adapter_model.safetensors").write_bytes(b"no")
        with pytest.raises(ValueError, match="Loading lora broken failed"):
            engine.add_lora(LoRARequest("broken", 2, str(broken)))
        assert len(manager.host.numbers) == 1


def test_an_adapter_is_read_while_others_run(
    base: Path, adapters: dict[str, tuple[Path, Any]], tmp_path: Path, monkeypatch: Any
) -> None:
    "They get their tokens meanwhile; a broken adapter ends its own request, then and later."
    may_read = threading.Event()
    read = AdapterReader.read

    def slow(self: Any, request: LoRARequest) -> Any:
        assert may_read.wait(60)
        return read(self, request)

    write_adapter(tmp_path, 1)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no")
    wanted = {**requests_for(adapters), "broken": LoRARequest("broken", 9, str(tmp_path))}
    kinds = {"plain": None, "all": "all", "some": "some", "first": "broken", "second": "broken"}
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with LLM(str(base), **OPTIONS | {"max_loras": 2, "max_num_seqs": 4}) as llm:
        expected = [run(llm, wanted[kind])[0] for kind in ("all", "some")]
        for lora in ("all", "some"):
            llm.llm_engine.remove_lora(wanted[lora].lora_int_id)
        monkeypatch.setattr(AdapterReader, "read", slow)
        engine = llm.llm_engine
        ended: dict[str, Any] = {}

        def step() -> None:
            ended.update({one.request_id: one for one in engine.step() if one.finished})

        for name, kind in kinds.items():
            lora = wanted[kind] if kind else None
            params = GREEDY if kind else long
            engine.add_request(name, {"prompt_token_ids": PROMPT}, params, lora_request=lora)
            for _ in range(4):
                step()
        assert not ended and engine.get_num_unfinished_requests() == 5
        may_read.set()
        while engine.has_unfinished_requests():
            step()
        assert [tokens(ended[name]) for name in ("all", "some")] == list(map(tokens, expected))
        assert len(tokens(ended["plain"])[0]) == 30
        for name in ("first", "second"):
            answer = ended[name].outputs[0]
            assert answer.finish_reason == "error"
            assert "Loading lora broken failed" in str(answer.stop_reason)
        assert manager_of(llm).host.reading is None and engine.list_loras() == {
            wanted[kind].lora_int_id for kind in ("all", "some")
        }
        with pytest.raises(ValueError, match="Loading lora broken failed"):
            run(llm, wanted["broken"])


def test_what_goes_wrong_while_an_adapter_is_read(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are written meanwhile are half of each, and end the request. A question to the workers
    that fails is no request's fault.
    """
    write_adapter(tmp_path, 1)
    lora = LoRARequest("mine", 1, str(tmp_path))
    read = AdapterReader.read
    begun = threading.Event()
    may_end = threading.Event()

    def slow(self: Any, request: LoRARequest) -> Any:
        begun.set()
        assert may_end.wait(60)
        return read(self, request)

    with LLM(str(base), **OPTIONS) as llm:
        engine = llm.llm_engine
        [expected] = run(llm, lora)
        engine.remove_lora(1)
        long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        monkeypatch.setattr(AdapterReader, "read", slow)
        ended = {}
        for name in ("first", "second"):
            engine.add_request(f"plain, {name}", {"prompt_token_ids": PROMPT}, long)
            engine.step()
            prompt = {"prompt_token_ids": PROMPT}
            engine.add_request(name, prompt, GREEDY, lora_request=lora)
            engine.step()
            assert begun.wait(60)
            if name == "first":
                write_adapter(tmp_path, 2)
                write_adapter(tmp_path, 1)
            else:
                host = manager_of(llm).host
                call = host._call
                host.next_poll = 0.0
                monkeypatch.setattr(host, "_call", lambda *_: 1 / 0)
                with pytest.raises(WorkersFailed, match="ZeroDivisionError"):
                    engine.step()
                monkeypatch.setattr(host, "_call", call)
            may_end.set()
            while engine.has_unfinished_requests():
                ended.update({one.request_id: one for one in engine.step() if one.finished})
            begun.clear()
            may_end.clear()
        answer = ended["first"].outputs[0]
        assert answer.finish_reason == "error" and "has changed" in str(answer.stop_reason)
        assert tokens(ended["second"]) == tokens(expected)
        assert ended["plain, second"].outputs[0].finish_reason == "error"


def test_adapters_of_experts_are_refused(base: Path, tmp_path: Path) -> None:
    "Without a part of it, an adapter would write other tokens than it was trained to."
    write_adapter(tmp_path, 1)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    for name in ("mlp.experts.0.down_proj", "mlp.gate"):
        more = {
            f"base_model.model.model.layers.0.{name}.lora_{side}.weight": torch.ones(shape)
            for side, shape in {"A": (4, 128), "B": (192, 4)}.items()
        }
        save_file(tensors | more, file)
        with LLM(str(base), **OPTIONS) as llm:
            with pytest.raises(ValueError, match="expected target modules in .* but received"):
                run(llm, LoRARequest("one", 1, str(tmp_path)))


def test_no_adapters_where_nothing_is_generated(base: Path) -> None:
    with pytest.raises(NotSupportedYet, match="enable_lora=True with a pooling task"):
        LLM(str(base), task="embed", **OPTIONS)


def test_reading_alone(base: Path, tmp_path: Path) -> None:
    "The scaling is in the second matrix."
    added = write_adapter(tmp_path, 1)
    adapter = LoRAModel.from_local_checkpoint(tmp_path, LoRAConfig())
    assert not adapter.embeddings and {f"{name}.weight" for name in adapter.layers} == set(added)
    for name, one in adapter.layers.items():
        assert (one.lora_b @ one.lora_a - added[f"{name}.weight"]).abs().max() < 1e-5
        assert one.rank == 4


# The server


def test_adapters_by_name_at_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "One is there from the start, others come and go; each answers as it does offline."
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("prometheus_client")
    from speaker import make_speaker

    from teachvllm import EngineArgs
    from teachvllm.engine.async_llm import AsyncLLM
    from teachvllm.engine.metrics import PrometheusStatLogger
    from teachvllm.entrypoints.api_server import ServerArgs, serve_in_background

    make_speaker(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    for i in (1, 2):
        torch.manual_seed(i)
        config = peft.LoraConfig(
            r=4, lora_alpha=64, target_modules=["q_proj", "up_proj"], init_lora_weights=False
        )
        peft.get_peft_model(model, config, adapter_name="default").save_pretrained(
            tmp_path / str(i)
        )
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    options = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 64}
    options |= {"enable_lora": True, "max_lora_rank": 8, "max_model_len": 128}
    folder = str(tmp_path / "base")
    loras = [None, *(LoRARequest(str(i), i, str(tmp_path / str(i))) for i in (1, 2))]
    with LLM(folder, **options) as llm:
        outputs = llm.generate(["Hello"] * 3, GREEDY, use_tqdm=False, lora_request=loras)
    expected = [output.outputs[0].text for output in outputs]
    assert len(set(expected)) == 3

    engine = AsyncLLM.from_engine_args(EngineArgs(folder, **options))
    metrics = PrometheusStatLogger(engine.config)
    engine.stat_loggers.append(metrics)
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    args = ServerArgs(port=0, served_model_name="base", lora_modules=[f"one={tmp_path / '1'}"])
    body = {"prompt": "Hello", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    try:
        with (
            serve_in_background(engine, args, metrics.registry) as url,
            httpx.Client(base_url=url, timeout=200) as client,
        ):

            def answer(name: str) -> str:
                done = client.post("/v1/completions", json=body | {"model": name})
                assert done.status_code == 200, done.text
                assert done.json()["model"] == name
                text: str = done.json()["choices"][0]["text"]
                return text

            def ids() -> list[str]:
                return [card["id"] for card in client.get("/v1/models").json()["data"]]

            assert ids() == ["base", "one"]
            card = client.get("/v1/models/one").json()
            assert (card["parent"], card["root"]) == ("base", str(tmp_path / "1"))
            assert [answer("base"), answer("one")] == expected[:2]
            missing = client.post("/v1/completions", json=body | {"model": "two"})
            assert missing.status_code == 404 and "base, one" in missing.text
            new = {"lora_name": "two", "lora_path": str(tmp_path / "2")}
            loaded = client.post("/v1/load_lora_adapter", json=new)
            assert (loaded.status_code, loaded.text) == (
                200,
                "Success: LoRA adapter 'two' added successfully.",
            )
            again = client.post("/v1/load_lora_adapter", json=new)
            assert again.status_code == 400 and "already been loaded" in again.text
            broken = client.post(
                "/v1/load_lora_adapter", json={"lora_name": "no", "lora_path": "/nowhere"}
            )
            assert broken.status_code == 400 and "No adapter found for /nowhere" in broken.text
            assert ids() == ["base", "one", "two"]
            assert [answer("two"), answer("one")] == [expected[2], expected[1]]
            text = client.get("/metrics").text
            assert 'vllm:lora_requests_info{max_lora="1",running_lora_adapters=""' in text
            gone = client.post("/v1/unload_lora_adapter", json={"lora_name": "two"})
            assert gone.status_code == 200 and ids() == ["base", "one"]
            assert client.post("/v1/completions", json=body | {"model": "two"}).status_code == 404
            gone = client.post("/v1/unload_lora_adapter", json={"lora_name": "two"})
            assert gone.status_code == 404 and "cannot be found" in gone.text
        monkeypatch.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
        with (
            serve_in_background(engine, ServerArgs(port=0)) as url,
            httpx.Client(base_url=url, timeout=200) as client,
        ):
            assert client.post("/v1/load_lora_adapter", json=new).status_code in (404, 405)
    finally:
        engine.shutdown()


def test_arguments_of_the_server() -> None:
    pytest.importorskip("fastapi")
    from teachvllm.entrypoints.api_server import ServerArgs

    args = ServerArgs(lora_modules=["a=/x/a", '{"name": "b", "path": "/x/b"}'])
    assert args.lora_modules == {"a": "/x/a", "b": "/x/b"}
    for wrong in (["a"], ["=x"], ['{"name": "a"}'], ["{"], ["a=x", "a=y"]):
        with pytest.raises(ValueError, match="lora_modules"):
            ServerArgs(lora_modules=wrong)
