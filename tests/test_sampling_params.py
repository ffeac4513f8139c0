"""What a request may ask of its tokens, through the whole engine, against transformers' logits and
plain loops.

The oracle reads each text token by token: transformers' logits of the token before, changed as
vLLM's documentation says, in float64 and without a batch. A greedy request must have taken the
largest; every log-probability must be transformers' own.
"""

import re
import threading
import uuid
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from helpers import VOCAB, make_tiny, random_prompts
from test_cuda_graph import PoisonedOracle, StandInWorker

from teachvllm import LLM, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from teachvllm.inputs import IncrementalDetokenizer, InputProcessor
from teachvllm.messages import EngineCoreRequest
from teachvllm.model_executor.sampler import Sampler
from teachvllm.outputs import Logprob
from teachvllm.sampling_params import BeamSearchParams
from teachvllm.sequence import sequence_seed


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    return str(folder), make_tiny("llama", folder)


def words_tokenizer(text: str, **options: Any) -> SimpleNamespace:
    """`3 14` is two tokens; with a space in front the first of them is another one, as it is in
    real tokenizers.
    """
    ids = [int(word) for word in text.split()]
    return SimpleNamespace(
        input_ids=[(ids[0] + 1) % VOCAB, *ids[1:]] if text.startswith(" ") else ids
    )


def make_llm(folder: str, **options: Any) -> LLM:
    options = {"num_gpu_blocks_override": 256, "block_size": 4, "max_model_len": 128} | options
    llm = LLM(folder, dtype="float32", device="cpu", skip_tokenizer_init=True, **options)
    llm.llm_engine.processor.input_processor.tokenizer = words_tokenizer
    return llm


# The oracle


def without_repeat(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    if output:
        logits[output[-1]] = -torch.inf
    return logits


def not_from_prompt(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    changed = logits.clone()
    changed[prompt[0]] -= 3 + len(output)
    return changed


def changed_logits(
    row: np.ndarray, prompt: list[int], output: list[int], p: SamplingParams, eos: int
) -> np.ndarray:
    "One row of logits as vLLM documents the parameters: plain loops."
    row = row.astype(np.float64).copy()
    for function in p.logits_processors or []:
        args = (prompt, output) if function is not_from_prompt else (output,)
        row = function(*args, torch.from_numpy(row)).numpy().copy()
    for i in range(len(row)):
        if p.allowed_token_ids is not None and i not in p.allowed_token_ids:
            row[i] = -np.inf
        row[i] += (p.logit_bias or {}).get(i, 0.0)
    for word in p.bad_words:
        for text in (word, " " + word):
            *before, last = words_tokenizer(text).input_ids
            if len(before) <= len(output) and output[len(output) - len(before) :] == before:
                row[last] = -np.inf
    if len(output) < p.min_tokens:
        row[[eos, *p.stop_token_ids]] = -np.inf
    for i in {*prompt, *output}:
        row[i] = row[i] / p.repetition_penalty if row[i] > 0 else row[i] * p.repetition_penalty
    for i, count in Counter(output).items():
        row[i] -= p.frequency_penalty * count + p.presence_penalty
    return row


def check_logprobs(given: dict[int, Logprob], row: np.ndarray, token_id: int, asked: int) -> None:
    "vLLM: the token itself and the `asked` likeliest, with their log-probabilities and ranks."
    assert (
        next(iter(given)) == token_id
        and len(given) in (asked, asked + 1)
        and all(x.decoded_token is None for x in given.values())
    )
    ranked = sorted(range(len(row)), key=lambda i: -row[i])
    assert {*given} == {token_id, *ranked[:asked]}
    for i, entry in given.items():
        assert abs(entry.logprob - row[i]) < 1e-4 and entry.rank == ranked.index(i) + 1


def check(model: Any, prompt: list[int], output: Any, p: SamplingParams, eos: int = 2) -> None:
    "All that was given out for one prompt."
    assert (output.prompt_logprobs is None) == (p.prompt_logprobs is None)
    for answer in output.outputs:
        ids = answer.token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + ids])).logits[0].float()
        raw = logits.numpy()
        logprobs = logits.double().log_softmax(-1).numpy()
        for i, token_id in enumerate(ids):
            row = changed_logits(raw[len(prompt) + i - 1], prompt, ids[:i], p, eos)
            assert row[token_id] > -np.inf
            assert not p.greedy or row[token_id] >= row.max() - 1e-3, (i, token_id, row.argmax())
        assert (answer.logprobs is None) == (p.logprobs is None)
        if p.logprobs is not None:
            for i, (token_id, given) in enumerate(zip(ids, answer.logprobs, strict=True)):
                check_logprobs(given, logprobs[len(prompt) + i - 1], token_id, p.logprobs)
            total = sum(given[token_id].logprob for token_id, given in zip(ids, answer.logprobs))
            assert answer.cumulative_logprob == pytest.approx(total, abs=1e-3)
        if p.prompt_logprobs is not None:
            first, *others = output.prompt_logprobs
            assert first is None and len(others) == len(prompt) - 1
            for i, given in enumerate(others):
                check_logprobs(given, logprobs[i], prompt[i + 1], p.prompt_logprobs)


ASKING: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7, "logprobs": 2},
    {"repetition_penalty": 1.4, "prompt_logprobs": 1},
    {},
    {"presence_penalty": -0.5, "frequency_penalty": -0.2, "repetition_penalty": 0.8, "logprobs": 0},
    {"logit_bias": {5: 4.0, 77: 100.0, 9: -100.0}, "frequency_penalty": 2.0},
    {"allowed_token_ids": list(range(20, 60))},
    {
        "bad_words": [str(i) for i in range(0, 128, 3)]
        + [f"{i} {i + 1}" for i in range(30)]
        + ["7 8 9"],
        "logprobs": 5,
    },
    {"logits_processors": [without_repeat, not_from_prompt]},
    {"logits_processors": [not_from_prompt], "presence_penalty": 1.0},
    {"min_tokens": 4, "stop_token_ids": list(range(3, 60))},
    {"prompt_logprobs": 3, "logprobs": 3},
    {
        "min_tokens": 3,
        "stop_token_ids": [9, 10, 11],
        "allowed_token_ids": [9, 10, 11, 12, 13],
        "repetition_penalty": 1.2,
    },
]


def requests(num: int, **more: Any) -> list[SamplingParams]:
    "Greedy requests that ask for different things, and some that ask for nothing."
    some = [ASKING[i % len(ASKING)] for i in range(num)]
    return [
        SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True} | asked | more)
        for asked in some
    ]


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks of 1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunks of 4": {"max_num_batched_tokens": 4, "max_num_seqs": 4},
    "chunks of 16": {"max_num_batched_tokens": 16, "max_num_seqs": 16, "async_scheduling": True},
    "async": {"async_scheduling": True},
    "recompute": {
        "num_gpu_blocks_override": 24,
        "preemption_mode": "recompute",
        "max_num_batched_tokens": 16,
        "max_num_seqs": 8,
    },
    "graphs": {
        "worker_cls": StandInWorker,
        "attention_backend": PoisonedOracle,
        "async_scheduling": True,
    },
    "swap": {"num_gpu_blocks_override": 24, "preemption_mode": "swap", "swap_space": 0.01},
    "async, preempted": {
        "num_gpu_blocks_override": 24,
        "async_scheduling": True,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 16,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_texts_and_logprobs_are_the_oracles(tiny: tuple[str, Any], name: str) -> None:
    folder, model = tiny
    few = CONFIGS[name].get("max_num_batched_tokens") == 1
    prompts = random_prompts(len(ASKING) * (1 if few else 2), 8 if few else 24, seed=len(name))
    params = requests(len(prompts))
    with make_llm(folder, **CONFIGS[name]) as llm:
        for _ in range(2):  # the second time the prefix cache has the prompts
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for prompt, output, p in zip(prompts, outputs, params, strict=True):
                assert output.outputs[0].finish_reason in ("length", "stop"), output.outputs[
                    0
                ].stop_reason
                check(model, prompt, output, p)
                assert p.prompt_logprobs is None or output.num_cached_tokens == 0, (
                    "it is computed, so that it can be scored"
                )
            if "preempt" in name or name in ("recompute", "swap"):
                assert llm.get_metrics()["num_preemptions"] > 0
        small = "num_gpu_blocks_override" in CONFIGS[name]  # a pool that holds nothing from before
        assert few or small or any(output.num_cached_tokens for output in outputs)


@pytest.mark.parametrize("kind", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_workers_give_the_same(tiny: tuple[str, Any], kind: str) -> None:
    folder, model = tiny
    prompts = random_prompts(len(ASKING), 24)
    params = requests(len(ASKING))
    with make_llm(
        folder, **{kind: 2}, distributed_executor_backend="mp", max_num_batched_tokens=16
    ) as llm:
        for prompt, output, p in zip(
            prompts, llm.generate(prompts, params, use_tqdm=False), params, strict=True
        ):
            check(model, prompt, output, p)
        p = SamplingParams(logits_processors=[partial(without_repeat, threading.Lock())])
        with pytest.raises(ValueError, match="logits_processors.*pickle"):
            llm.generate(prompts[:2], [params[0], p], use_tqdm=False)


@pytest.mark.parametrize("ahead", [False, True])
def test_several_answers_are_single_requests(tiny: tuple[str, Any], ahead: bool) -> None:
    "n samples are forked after their first token: each counts its own tokens, from the first on."
    folder, model = tiny
    more = {
        "temperature": 1.0,
        "ignore_eos": True,
        "max_tokens": 10,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.3,
        "logprobs": 2,
        "bad_words": [f"{i} {j}" for i in range(0, 128, 5) for j in range(0, 128, 7)],
    }
    prompts = random_prompts(4, 20)
    with make_llm(
        folder, async_scheduling=ahead, num_gpu_blocks_override=40, max_num_seqs=8
    ) as llm:
        several = llm.generate(
            prompts, SamplingParams(n=3, seed=5, prompt_logprobs=1, **more), use_tqdm=False
        )
        for prompt, output in zip(prompts, several, strict=True):
            check(model, prompt, output, SamplingParams(n=3, prompt_logprobs=1, **more))
            singles = [SamplingParams(seed=sequence_seed(5, i), **more) for i in range(3)]
            for answer, single in zip(
                output.outputs, llm.generate([prompt] * 3, singles, use_tqdm=False), strict=True
            ):
                assert answer.token_ids == single.outputs[0].token_ids
        best = llm.generate(prompts, SamplingParams(n=2, best_of=3, seed=5, **more), use_tqdm=False)
        for output, all_three in zip(best, several, strict=True):
            ranked = sorted(all_three.outputs, key=lambda answer: -answer.cumulative_logprob)
            assert [answer.token_ids for answer in output.outputs] == [
                answer.token_ids for answer in ranked[:2]
            ]


def test_a_seeded_request_is_the_same_in_any_company(tiny: tuple[str, Any]) -> None:
    folder, _ = tiny
    prompts = random_prompts(12, 24, seed=3)
    params = [
        SamplingParams(**{"seed": i, "max_tokens": 8, "ignore_eos": True} | ASKING[i])
        for i in range(12)
    ]
    with make_llm(folder, async_scheduling=True) as llm:
        together = [
            output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)
        ]
        alone = [
            llm.generate(prompt, p, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, p in zip(prompts, params)
        ]
    assert together == alone


@pytest.mark.parametrize(
    "asked",
    [
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.6, "temperature": 0.8},
        {"repetition_penalty": 1.8, "temperature": 1.5},
        {"logit_bias": {7: 2.0, 8: -1.0}},
    ],
)
def test_draws_follow_the_changed_distribution(
    tiny: tuple[str, Any], asked: dict[str, Any]
) -> None:
    """Chi-square over the second token of many seeded requests, whose first one is given: the
    penalties count it.
    """
    folder, model = tiny
    prompt = [5, 9, 9, 30]
    num = 1500
    model_rows = {}
    with make_llm(folder, max_num_seqs=128, max_num_batched_tokens=2048) as llm:
        first = SamplingParams(temperature=0, max_tokens=1)
        token = llm.generate(prompt, first, use_tqdm=False)[0].outputs[0].token_ids[0]
        params = [
            SamplingParams(
                seed=i,
                max_tokens=2,
                ignore_eos=True,
                logits_processors=[start_with(token)],
                **asked,
            )
            for i in range(num)
        ]
        outputs = llm.generate([prompt] * num, params, use_tqdm=False)
    drawn = np.bincount([output.outputs[0].token_ids[1] for output in outputs], minlength=VOCAB)
    assert {output.outputs[0].token_ids[0] for output in outputs} == {token}
    with torch.inference_mode():
        model_rows[0] = model(torch.tensor([[*prompt, token]])).logits[0, -1].numpy()
    p = SamplingParams(**asked)
    row = changed_logits(model_rows[0], prompt, [token], p, 2) / p.temperature
    expected = num * np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    unchanged = model_rows[0].astype(np.float64) / p.temperature
    other = num * np.exp(unchanged - unchanged.max()) / np.exp(unchanged - unchanged.max()).sum()
    assert chi_square(drawn, expected) < 1 < chi_square(drawn, other)


def start_with(token: int) -> Any:
    "A processor that leaves the first token no choice."

    def force(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if not output:
            logits[torch.arange(len(logits)) != token] = -torch.inf
        return logits

    return force


def chi_square(drawn: np.ndarray, expected: np.ndarray) -> float:
    """The statistic over its 99.99 % limit; tokens that are expected less than five times are taken
    together.
    """
    rare = expected < 5
    seen = np.append(drawn[~rare], drawn[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    freedom = len(seen) - 1
    # Wilson and Hilferty 1931
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3
    return float(((seen - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum() / limit)


# Bad input


def test_what_depends_on_the_model_is_refused_by_name(tiny: tuple[str, Any]) -> None:
    folder, _ = tiny
    with make_llm(folder) as llm:
        for name, value, said in (
            ("logprobs", 21, "max_logprobs=20"),
            ("prompt_logprobs", 21, "max_logprobs=20"),
            ("logprobs", -1, "max_logprobs=20"),
            ("logit_bias", {VOCAB: 1.0}, "out of vocabulary"),
            ("allowed_token_ids", [3, -1], "out of vocabulary"),
            ("bad_words", ["3 500"], "out of vocabulary"),
        ):
            with pytest.raises(ValueError, match=f"{name}.*{said}"):
                llm.generate([5, 6], SamplingParams(**{name: value}), use_tqdm=False)
    with make_llm(folder, max_logprobs=-1) as llm:
        output = llm.generate(
            [5, 6], SamplingParams(logprobs=-1, prompt_logprobs=-1, max_tokens=2), use_tqdm=False
        )[0]
        assert [len(row) for row in output.outputs[0].logprobs] == [VOCAB] * 2 and len(
            output.prompt_logprobs[1]
        ) == VOCAB
        llm.llm_engine.processor.input_processor.tokenizer = None
        with pytest.raises(ValueError, match="bad_words"):
            llm.generate([5, 6], SamplingParams(bad_words=["no"]), use_tqdm=False)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_processor_that_raises_ends_its_request_only(tiny: tuple[str, Any], ahead: bool) -> None:
    folder, _ = tiny

    def fails(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) == 3:
            raise KeyError("no such token")
        return logits

    wrong = {
        "KeyError": fails,
        "returned no tensor": lambda output, logits: None,
        "shape": lambda output, logits: logits[:5],
        "leave no token": lambda output, logits: torch.full_like(logits, -torch.inf),
    }
    prompts = random_prompts(6, 10)
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with make_llm(folder, async_scheduling=ahead) as llm:
        healthy = [
            output.outputs[0].token_ids for output in llm.generate(prompts, plain, use_tqdm=False)
        ]
        for said, function in wrong.items():
            params = [plain] * 6
            params[2] = SamplingParams(
                temperature=0, max_tokens=8, ignore_eos=True, logits_processors=[function]
            )
            outputs = llm.generate(prompts, params, use_tqdm=False)
            broken = outputs[2].outputs[0]
            assert (
                broken.finish_reason == "error"
                and "logits_processors" in broken.stop_reason
                and said in broken.stop_reason
            )
            assert broken.token_ids == healthy[2][: 3 if function is fails else 0]
            for i in (0, 1, 3, 4, 5):
                assert outputs[i].outputs[0].token_ids == healthy[i]
        nothing = SamplingParams(allowed_token_ids=[9], min_tokens=1, stop_token_ids=[9])
        with pytest.raises(ValueError, match="leave none of them"):
            llm.generate(prompts[0], nothing, use_tqdm=False)
        again = llm.generate(prompts[1], plain, use_tqdm=False)
        assert again[0].outputs[0].token_ids == healthy[1]


def test_a_processor_that_remembers_is_cloned_for_each_request(tiny: tuple[str, Any]) -> None:
    class Once:
        "Allows its token once."

        def __init__(self) -> None:
            self.used = False

        def clone(self) -> "Once":
            return Once()

        def __call__(self, output: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[50] = -torch.inf if self.used else 1000.0
            self.used = True
            return logits

    folder, _ = tiny
    with make_llm(folder) as llm:
        params = SamplingParams(
            temperature=0, max_tokens=3, ignore_eos=True, logits_processors=[Once()]
        )
        for output in llm.generate(random_prompts(3), params, use_tqdm=False):
            assert (
                output.outputs[0].token_ids.count(50) == 1 and output.outputs[0].token_ids[0] == 50
            )


# Batches in which no request asks


def test_nothing_is_done_where_no_request_asks(
    tiny: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = tiny
    seen = []
    choose = Sampler.__call__

    def spy(self: Sampler, logits: torch.Tensor, meta: Any) -> Any:
        seen.append((meta.process is not None, len(meta.scored_rows)))
        return choose(self, logits, meta)

    monkeypatch.setattr(Sampler, "__call__", spy)
    with make_llm(folder) as llm:
        seen.clear()  # the warm-up
        prompts = random_prompts(4)
        asking = SamplingParams(presence_penalty=1.0, logprobs=1, max_tokens=2, ignore_eos=True)
        plain = SamplingParams(max_tokens=6, ignore_eos=True, min_tokens=2, top_p=0.9)
        llm.generate(prompts, [asking, plain, plain, plain], use_tqdm=False)
        assert seen[0] == (True, 1) and seen[-1] == (False, 0), (
            "the step after the last that asks is as if none had"
        )
        state = llm.llm_engine.engine_core.engine_core.executor.driver_worker.worker.model_runner.input_batch
        assert not state.logits_processors.requests and not state.prompt_logprobs


def test_a_long_prompts_logits_are_computed_in_pieces(
    tiny: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from teachvllm.model_executor.models.llama import LlamaForCausalLM
    from teachvllm.worker import model_runner

    folder, model = tiny
    rows = []
    compute = LlamaForCausalLM.compute_logits

    def spy(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return compute(self, hidden)

    monkeypatch.setattr(model_runner, "MAX_LOGITS", 7 * VOCAB)
    monkeypatch.setattr(LlamaForCausalLM, "compute_logits", spy)
    prompt = random_prompts(1, 60, seed=1)[0]
    p = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, ignore_eos=True)
    with make_llm(folder) as llm:
        llm.llm_engine.step()
        rows.clear()
        check(model, prompt, llm.generate(prompt, p, use_tqdm=False)[0], p)
        assert max(rows) <= 7 and sum(rows) == len(prompt) - 1 + 2
        rows.clear()
        llm.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        assert rows == [1, 1], (
            "a request that does not ask computes the logits of its last token only"
        )


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_prompt_that_is_preempted_halfway_is_scored_once(
    tiny: tuple[str, Any], mode: str
) -> None:
    folder, model = tiny
    prompts = [*random_prompts(3, 8, seed=1), sum(random_prompts(9, 40, seed=2), [])[:49]]
    others = SamplingParams(temperature=0, max_tokens=28, ignore_eos=True)
    p = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2, ignore_eos=True)
    pool = {
        "num_gpu_blocks_override": 22,
        "max_num_batched_tokens": 5,
        "max_num_seqs": 4,
        "preemption_mode": mode,
        "enable_prefix_caching": False,
    }
    with make_llm(folder, swap_space=0.01, **pool) as llm:
        output = llm.generate(prompts, [others] * 3 + [p], use_tqdm=False)[3]
        check(model, prompts[3], output, p)
        assert output.metrics.num_preemptions > 0


# Outputs as they are streamed


def test_deltas_have_each_logprob_once(tiny: tuple[str, Any]) -> None:
    folder, _ = tiny
    given: dict[str, list] = {kind.name: [] for kind in RequestOutputKind}
    prompts = []
    with make_llm(folder) as llm:
        engine = llm.llm_engine
        for kind in RequestOutputKind:
            p = SamplingParams(
                temperature=0,
                max_tokens=4,
                logprobs=1,
                prompt_logprobs=0,
                ignore_eos=True,
                output_kind=kind,
            )
            engine.add_request(kind.name, [5, 6, 7], p)
        while engine.has_unfinished_requests():
            for output in engine.step():
                given[output.request_id].append(output.outputs[0].logprobs)
                prompts += [output.prompt_logprobs] if output.request_id == "DELTA" else []
    (final,) = given["FINAL_ONLY"]
    assert (
        len(final) == 4
        and given["CUMULATIVE"] == [final[:i] for i in range(1, 5)]
        and sum(given["DELTA"], []) == final
    )
    assert [x is None for x in prompts] == [False, True, True, True] and prompts[0][0] is None


# Text


def test_bad_words_have_the_forms_that_vllm_forbids() -> None:
    forms = {
        "ab": [5],
        " ab": [6],
        "cd": [7, 8],
        " cd": [9, 8],
        "ef": [1],
        " ef": [2, 3],
        "gh": [4],
        " gh": [4],
    }
    config = SimpleNamespace(vocab_size=50, max_model_len=64, max_logprobs=20)
    process = InputProcessor(config, lambda text, **options: SimpleNamespace(input_ids=forms[text]))
    params = SamplingParams(bad_words=["ab", " cd", "ef", "gh"])
    process.prepare(params)
    assert params.bad_words_token_ids == [[5], [6], [7, 8], [9, 8], [1], [4]]


def test_spaces_between_special_tokens() -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens([AddedToken("<x>", special=True), AddedToken("<y>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    texts = {}
    for skip, spaces in ((False, True), (False, False), (True, False)):
        detokenizer = IncrementalDetokenizer(tokenizer, [0], skip, spaces)
        for token_id in (3, 4, 1, 3, 3, 4):
            detokenizer.append([token_id])
            detokenizer.update()
        detokenizer.update(last=True)
        texts[skip, spaces] = detokenizer.text.strip()
    assert texts == {
        (False, True): "<x> <y> b <x> <x> <y>",
        (False, False): "<x><y> b <x><x><y>",
        (True, False): "b",
    }


def test_without_detokenizing_there_is_no_text(smol: LLM) -> None:
    p = SamplingParams(temperature=0, max_tokens=3, logprobs=2)
    shown = smol.generate("Hello, my name is", p, use_tqdm=False)[0].outputs[0]
    for token_id, row in zip(shown.token_ids, shown.logprobs):
        assert (
            all(entry.decoded_token == smol.get_tokenizer().decode([i]) for i, entry in row.items())
            and token_id in row
        )
    p.detokenize = False
    hidden = smol.generate("Hello, my name is", p, use_tqdm=False)[0].outputs[0]
    assert hidden.text == "" and hidden.token_ids == shown.token_ids
    assert all(entry.decoded_token is None for row in hidden.logprobs for entry in row.values())


@pytest.fixture(scope="module")
def smol() -> Any:
    with LLM(dtype="float32", device="cpu", num_gpu_blocks_override=64, max_model_len=256) as llm:
        yield llm


def test_min_tokens_bans_eos_even_where_eos_would_not_end(
    tiny: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's documentation: EOS and stop ids cannot be generated before; `ignore_eos` says only
    that EOS does not end.
    """
    folder, _ = tiny
    prompts = random_prompts(3)
    with make_llm(folder) as llm:
        p = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        first = [
            output.outputs[0].token_ids[0] for output in llm.generate(prompts, p, use_tqdm=False)
        ]
        monkeypatch.setattr(llm.llm_engine.processor, "eos_token_ids", frozenset(first))
        p.min_tokens = 2
        for output in llm.generate(prompts, p, use_tqdm=False):
            assert not {*output.outputs[0].token_ids[:2]} & {*first}


class Remembers:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits

    def clone(self) -> "Remembers":
        return Remembers()


def test_a_clone_shares_nothing_but_plain_processors() -> None:
    original = SamplingParams(
        stop=["a"],
        bad_words=["b"],
        logit_bias={3: 1.0},
        allowed_token_ids=[3],
        extra_args={"deep": [1]},
        seed=7,
        logits_processors=[without_repeat, Remembers()],
    )
    copied = original.clone()
    assert copied.logits_processors[0] is without_repeat
    assert isinstance(copied.logits_processors[1], Remembers)
    assert copied.logits_processors[1] is not original.logits_processors[1]
    copied.logits_processors = original.logits_processors
    assert copied == original and original.clone() is not original
    for changed in (
        copied.stop,
        copied.bad_words,
        copied.allowed_token_ids,
        copied.extra_args["deep"],
    ):
        changed.append("more")
    copied.logit_bias[4] = 2.0
    assert (original.stop, original.bad_words, original.logit_bias) == (["a"], ["b"], {3: 1.0})
    assert (original.allowed_token_ids, original.extra_args) == ([3], {"deep": [1]})


def test_from_optional_reads_what_json_holds() -> None:
    names = (
        "n",
        "presence_penalty",
        "repetition_penalty",
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "min_tokens",
        "detokenize",
    )
    assert (
        SamplingParams.from_optional(**dict.fromkeys(names))
        == SamplingParams.from_optional()
        == SamplingParams()
    )
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    given = SamplingParams.from_optional(
        logit_bias={"3": 500, 4: -1000.0, "5": 0.5}, temperature=0.5
    )
    assert given == SamplingParams(logit_bias={3: 100.0, 4: -100.0, 5: 0.5}, temperature=0.5)
    for wrong in ({"x": 1.0}, {"3": "much"}, {"3": float("nan")}, [3]):
        with pytest.raises(ValueError, match="logit_bias="):
            SamplingParams.from_optional(logit_bias=wrong)


WRONG_TYPES: list[dict[str, Any]] = [
    {"temperature": True},
    {"temperature": 10**400},
    {"presence_penalty": False},
    {"n": True},
    {"seed": True},
    {"logprobs": True},
    {"stop_token_ids": [True]},
    {"stop_token_ids": True},
    {"allowed_token_ids": [True]},
    {"logit_bias": {True: 1.0}},
    {"logit_bias": {5: True}},
    {"extra_args": {1: 2}},
    {"extra_args": 5},
    {"stop": "\ud800"},
    {"repetition_penalty": 1e-320},
    {"repetition_penalty": 1e300},
]


@pytest.mark.parametrize("wrong", WRONG_TYPES, ids=str)
def test_wrong_types_are_refused_by_name(wrong: dict[str, Any]) -> None:
    "What a message to the core could not hold, or would arrive as something else."
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        stop_token_ids=[np.int64(4)],
        allowed_token_ids=np.int32(5),
        logit_bias={np.int64(6): np.float32(1)},
    )
    request = EngineCoreRequest("a", [1], params, seed=0)
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineCoreRequest)
    assert arrived == request
    assert params.logit_bias == {6: 1.0} and params.allowed_token_ids == [5]


@pytest.mark.parametrize("penalty", [1e308, -1e308, 1e5, float("nan")])
def test_a_length_penalty_that_overflows_is_refused(penalty: float) -> None:
    with pytest.raises(ValueError, match="length_penalty=.* must be between -10 and 10"):
        BeamSearchParams(beam_width=2, max_tokens=4, length_penalty=penalty)


WRONG_REQUESTS: list[dict[str, Any]] = [
    {"request_id": 7},
    {"request_id": None},
    {"request_id": b"7"},
    {"request_id": ("7",)},
    {"request_id": uuid.UUID(int=7)},
    {"request_id": "\ud800"},
    {"priority": True},
    {"priority": 2**63},
    {"extra_args": {"a": object()}},
    {"extra_args": {"a": 2**70}},
    {"prompt": [True, 5]},
]


@pytest.mark.parametrize("in_process", [True, False])
def test_wrong_requests_are_refused_alike_by_every_client(
    tiny: tuple[str, Any], in_process: bool
) -> None:
    "By name, before anything is sent; the engine goes on."
    sizes = {"num_gpu_blocks_override": 64, "max_model_len": 128}
    how = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
    args = EngineArgs(tiny[0], **sizes, **how, scheduling_policy="priority")
    engine = LLMEngine.from_engine_args(args, enable_multiprocessing=not in_process)
    try:
        for wrong in WRONG_REQUESTS:
            fields = {"request_id": "a", "prompt": [5, 6], "priority": 0, "extra_args": None}
            fields |= wrong
            params = SamplingParams(max_tokens=2, extra_args=fields.pop("extra_args"))
            with pytest.raises(ValueError, match=next(iter(wrong))):
                engine.add_request(**fields, params=params)
        assert not engine.has_unfinished_requests()
        engine.add_request("a", [5, 6], SamplingParams(max_tokens=2, ignore_eos=True))
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert outputs[-1].finished and len(outputs[-1].outputs[0].token_ids) == 2
    finally:
        engine.close()


def test_values_out_of_range_name_their_field() -> None:
    nan = float("nan")
    for wrong in (
        {"presence_penalty": 2.1},
        {"presence_penalty": nan},
        {"frequency_penalty": -2.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": nan},
        {"logprobs": -2},
        {"prompt_logprobs": -2},
        {"bad_words": [""]},
        {"bad_words": ["a", "  "]},
        {"bad_words": [3]},
        {"allowed_token_ids": []},
        {"allowed_token_ids": ["3"]},
        {"logit_bias": {"3": 1.0}},
        {"logit_bias": {3: nan}},
        {"logit_bias": [3]},
        {"logits_processors": ["f"]},
        {"logits_processors": without_repeat},
    ):
        with pytest.raises(ValueError, match=re.escape(next(iter(wrong)))):
            SamplingParams(**wrong)
