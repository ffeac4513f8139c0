"""Paged memory end to end, on tiny models: preempted, swapped, forked, cached or none of it, the
tokens are the same.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TINY, VOCAB, greedy, make_tiny, random_prompts

from teachvllm import LLM, RequestOutputKind, SamplingParams
from teachvllm.core.request_queue import FCFSPolicy
from teachvllm.sampling_params import BeamSearchParams
from teachvllm.sequence import sequence_seed

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SWAP = 0.001  # GiB of host memory: far more than a tiny model's blocks need


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Any]]:
    "name -> where it lies, and transformers' model."
    from transformers import MistralConfig

    window = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        sliding_window=16,
        head_dim=16,
    )
    TINY.setdefault("mistral", lambda: window)
    made = {}
    for name in ("llama", "opt", "mistral"):
        path = tmp_path_factory.mktemp(name)
        made[name] = str(path), make_tiny(name, path)
    return made


@pytest.fixture(scope="module")
def folder(models: dict[str, tuple[str, Any]]) -> str:
    return models["llama"][0]


def tiny(folder: str, num_blocks: int = 400, **options: Any) -> LLM:
    defaults = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "block_size": 4,
        "swap_space": SWAP,
    }
    return LLM(folder, num_gpu_blocks_override=num_blocks, **{**defaults, **options})


def samples(llm: LLM, prompts: list, params: Any = GREEDY, **more: Any) -> list[list[list[int]]]:
    "The token ids of all outputs of all prompts; afterwards every block is free."
    outputs = llm.generate(prompts, params, use_tqdm=False, **more)
    check_all_free(llm)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def several(n: int, **more: Any) -> SamplingParams:
    """Parameters of n answers. They are random in name only, each is the greedy one: of greedy
    requests no more than one is given.
    """
    return replace(GREEDY, n=n, temperature=1, top_k=1, **more)


def core_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]


def just_enough(prompts: list[list[int]], num_seqs: int, num_tokens: int, block_size: int) -> int:
    """The smallest pool in which the largest of these requests, with all its sequences, can finish
    alone.
    """

    def needed(length: int) -> int:
        shared = length // block_size
        return shared + num_seqs * (-(-(length + num_tokens) // block_size) - shared)

    return max(needed(len(prompt)) for prompt in prompts)


def check_all_free(llm: LLM) -> None:
    manager = core_of(llm).scheduler.block_manager
    manager.check_integrity()
    assert manager.get_num_free_gpu_blocks() == manager.num_gpu_blocks
    assert manager.cpu_allocator.get_num_free_blocks() == manager.num_cpu_blocks


def run(llm: LLM, finished: dict[str, Any] | None = None) -> dict[str, Any]:
    "Step to the end; the finished outputs by id."
    finished = {} if finished is None else finished
    while llm.llm_engine.has_unfinished_requests():
        finished |= {
            output.request_id: output for output in llm.llm_engine.step() if output.finished
        }
    return finished


# The same tokens, whatever happens


@pytest.fixture(scope="module")
def wanted(models: dict[str, tuple[str, Any]]) -> tuple[list[list[int]], list[list[int]]]:
    "Prompts, some of which begin alike, and transformers' greedy continuations."
    prompts = random_prompts(3, longest=40, seed=3)
    prompts += [prompts[0] + [7, 8, 9], prompts[0] + [7, 8, 10], (prompts[1] * 40)[:32]]
    return prompts, [greedy(models["llama"][1], prompt, 16) for prompt in prompts]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("budget", [7, 256])
@pytest.mark.parametrize("mode", ["roomy", "recompute", "swap"])
def test_equals_transformers(
    folder: str, wanted: Any, block_size: int, budget: int, mode: str
) -> None:
    """With caching and without, one sample or three, in a pool that holds them all or one that
    hardly holds one request.
    """
    prompts, expected = wanted
    num_blocks = just_enough(prompts, 3, 16, block_size) if mode != "roomy" else 2000 // block_size
    for caching in (False, True):
        options = {
            "block_size": block_size,
            "max_num_batched_tokens": budget,
            "enable_prefix_caching": caching,
        }
        with tiny(
            folder, num_blocks, preemption_mode=None if mode == "roomy" else mode, **options
        ) as llm:
            params = [*[GREEDY] * len(prompts), *[several(3)] * len(prompts)]
            got = samples(llm, prompts * 2, params)
            assert got == [[tokens] * p.n for tokens, p in zip(expected * 2, params, strict=True)]
            metrics = llm.get_metrics()
            assert (
                metrics["num_preemptions"] >= 3
                if mode != "roomy"
                else metrics["num_preemptions"] == 0
            ), metrics
            assert (metrics["num_swapped_out_blocks"] > 0) == (mode == "swap")
            assert metrics["num_swapped_in_blocks"] == metrics["num_swapped_out_blocks"]
            assert (metrics["prefix_cache_hits"] > 0) == caching
            assert mode != "roomy" or (metrics["num_cow_copies"] > 0) == (block_size > 1)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_without_chunked_prefill(folder: str, wanted: Any, mode: str) -> None:
    prompts, expected = wanted
    options = {"enable_chunked_prefill": False, "max_model_len": 80, "max_num_batched_tokens": 80}
    with tiny(folder, just_enough(prompts, 2, 16, 4), preemption_mode=mode, **options) as llm:
        assert samples(llm, prompts) == [[tokens] for tokens in expected]
        assert samples(llm, prompts, several(2)) == [[tokens] * 2 for tokens in expected]
        assert llm.get_metrics()["num_preemptions"] >= 3


@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 7}, {"num_blocks": 20}, {"num_blocks": 20, "mode": "swap"}],
)
def test_sliding_window(models: dict[str, tuple[str, Any]], options: dict[str, Any]) -> None:
    """Blocks behind the window are let go: a text longer than the pool goes on, and no later token
    needs them.
    """
    folder, model = models["mistral"]
    options = dict(options)
    num_blocks = options.pop("num_blocks", 400)
    mode = options.pop("mode", None)
    prompts = [*random_prompts(7, longest=8, seed=5), random_prompts(1, seed=5)[0]]
    expected = [greedy(model, prompt, 40) for prompt in prompts]
    with tiny(folder, num_blocks, preemption_mode=mode, **options) as llm:
        assert samples(llm, prompts, replace(GREEDY, max_tokens=40)) == [
            [tokens] for tokens in expected
        ]
        assert (llm.get_metrics()["num_preemptions"] > 0) == (num_blocks < 100)
    with tiny(folder, 10, **options) as llm:
        assert samples(llm, [prompts[0][:8]], replace(GREEDY, max_tokens=60)) == [
            [greedy(model, prompts[0][:8], 60)]
        ]


def test_default_model_with_a_long_shared_prefix() -> None:
    """SmolLM2: two samples of two prompts that begin alike, cached or not, roomy or not, are the
    same text.
    """
    start = (
        "The following is a list of the largest cities of Europe, with a sentence about "
        "each of them. "
    ) * 4
    prompts = [start + "Paris", start + "Zürich"]
    params = SamplingParams(n=2, top_k=1, max_tokens=12)
    texts = []
    for options in (
        {"enable_prefix_caching": False, "num_gpu_blocks_override": 64},
        {"num_gpu_blocks_override": 8},
    ):
        with LLM(dtype="float32", max_num_batched_tokens=64, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            texts.append([[completion.text for completion in output.outputs] for output in outputs])
            check_all_free(llm)
            hits = llm.get_metrics()["prefix_cache_hits"]
    assert texts[0] == texts[1] and all(a == b and a for a, b in texts[0])
    assert hits > 0


# Beam search


@torch.inference_mode()
def beams_of_transformers(
    model: Any, prompt: list[int], params: BeamSearchParams, eos: list[int]
) -> list[list[int]]:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        do_sample=False,
        length_penalty=params.length_penalty,
        early_stopping=False,
        eos_token_id=eos,
        pad_token_id=0,
    )
    answers = [tokens[len(prompt) :].tolist() for tokens in out]
    ends = [
        next((i + 1 for i, token_id in enumerate(tokens) if token_id in eos), len(tokens))
        for tokens in answers
    ]
    return [tokens[:end] for tokens, end in zip(answers, ends, strict=True)]


@pytest.mark.parametrize("name", ["llama", "opt"])
@pytest.mark.parametrize(
    "pool", [{}, {"num_blocks": 24}, {"num_blocks": 24, "preemption_mode": "recompute"}]
)
def test_beam_search_equals_transformers(
    models: dict[str, tuple[str, Any]], name: str, pool: dict[str, Any]
) -> None:
    folder, model = models[name]
    prompts = random_prompts(4, longest=30, seed=7)
    with tiny(folder, **pool) as llm:
        for eos, width, penalty in (
            ([10**9], 3, 1.0),
            ([2, 5, 17, 40], 4, 0.0),
            ([2, 5, 17, 40], 2, 2.0),
        ):
            llm.llm_engine.processor.eos_token_ids = frozenset(eos)
            params = BeamSearchParams(beam_width=width, max_tokens=14, length_penalty=penalty)
            outputs = llm.beam_search(prompts, params)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert [o.token_ids for o in output.outputs] == beams_of_transformers(
                    model, prompt, params, eos
                )
            check_all_free(llm)
        metrics = llm.get_metrics()
        assert metrics["num_cow_copies"] > 0 and (metrics["num_preemptions"] >= 3) == bool(pool)
        assert (metrics["num_swapped_in_blocks"] > 0) == (
            bool(pool) and "preemption_mode" not in pool
        )


# Several answers


def test_four_samples_share_their_prompt(tmp_path: Path) -> None:
    "What the engine counts: blocks of the prompt once, of the answers each."
    from transformers import LlamaConfig

    TINY["long"] = lambda: LlamaConfig(
        **{**TINY["llama"]().to_dict(), "max_position_embeddings": 1024}
    )
    make_tiny("long", tmp_path)
    prompt = random_prompts(1, seed=1)[0][:1] * 512
    peaks = []
    for n in (1, 4):
        with tiny(str(tmp_path), 400, block_size=16, enable_prefix_caching=False) as llm:
            got = samples(
                llm, [prompt], SamplingParams(n=n, seed=1, max_tokens=32, ignore_eos=True)
            )[0]
            assert len(got) == n and all(len(tokens) == 32 for tokens in got)
            peaks.append(llm.get_metrics()["peak_gpu_blocks_used"])
    assert peaks[0] == 34 and peaks[1] < 1.3 * peaks[0], peaks


@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 21}, {"num_blocks": 21, "preemption_mode": "recompute"}]
)
def test_sample_j_has_a_seed_of_its_own(folder: str, options: dict[str, Any]) -> None:
    prompts = random_prompts(3, longest=20, seed=2)
    params = SamplingParams(temperature=1, seed=12, max_tokens=12, ignore_eos=True)
    with tiny(folder) as llm:
        seeds = [sequence_seed(12, j) for j in range(4)]
        alone = [
            [samples(llm, [prompt], replace(params, seed=seed))[0][0] for seed in seeds]
            for prompt in prompts
        ]
    with tiny(folder, **options) as llm:
        assert samples(llm, prompts, replace(params, n=4)) == alone
        assert samples(llm, prompts, replace(params, n=4, top_p=0.9, top_k=20)) != alone
        assert (llm.get_metrics()["num_preemptions"] > 0) == bool(options)
    assert seeds[0] == 12 and len({tuple(tokens) for tokens in alone[0]}) == 4


def test_the_second_answer_of_seed_0_is_not_the_first_of_seed_1(folder: str) -> None:
    params = SamplingParams(n=3, temperature=1, max_tokens=12, ignore_eos=True)
    with tiny(folder) as llm:
        got = [samples(llm, [[5, 6, 7]], replace(params, seed=seed))[0] for seed in range(4)]
    assert len({tuple(tokens) for answers in got for tokens in answers}) == 12


def test_best_of_gives_the_likeliest(folder: str) -> None:
    prompt = random_prompts(1, seed=4)[0]
    params = SamplingParams(temperature=1, seed=5, max_tokens=6, ignore_eos=True)
    with tiny(folder) as llm:
        every = llm.generate(prompt, replace(params, n=6, best_of=6), use_tqdm=False)[0].outputs
        best = llm.generate(prompt, replace(params, n=2, best_of=6), use_tqdm=False)[0].outputs
        scores = {}
        # the log-probabilities, from the model's own logits
        for tokens in [output.token_ids for output in every]:
            scores[tuple(tokens)] = logprob_of(folder, prompt, tokens)
    assert [output.index for output in best] == [0, 1]
    likeliest = sorted(scores, key=lambda tokens: -scores[tokens])[:2]
    assert [tuple(output.token_ids) for output in best] == likeliest
    for output in best:
        assert output.cumulative_logprob == pytest.approx(scores[tuple(output.token_ids)], abs=1e-3)


@torch.inference_mode()
def logprob_of(folder: str, prompt: list[int], tokens: list[int]) -> float:
    from transformers import AutoModelForCausalLM

    logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
        torch.tensor([prompt + tokens])
    ).logits[0]
    scores = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return scores[range(len(tokens)), tokens].sum().item()


def test_samples_end_each_on_its_own_and_stream(folder: str) -> None:
    params = SamplingParams(
        n=3, temperature=1, seed=3, max_tokens=20, ignore_eos=True, stop_token_ids=list(range(40))
    )
    with tiny(folder) as llm:
        whole = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs
        assert len({len(output.token_ids) for output in whole}) > 1
        pieces: dict[int, list[int]] = {0: [], 1: [], 2: []}
        llm.llm_engine.add_request(
            "a", [5, 6, 7], replace(params, output_kind=RequestOutputKind.DELTA)
        )
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                for completion in output.outputs:
                    pieces[completion.index] += completion.token_ids
        assert [pieces[i] for i in range(3)] == [output.token_ids for output in whole]
        assert all(output.token_ids[-1] < 40 or len(output.token_ids) == 20 for output in whole)
        check_all_free(llm)


# Leaving


def test_two_hundred_random_requests_and_aborts(folder: str) -> None:
    rng = random.Random(0)
    with tiny(folder, 24, max_num_seqs=8, max_num_batched_tokens=48) as llm:
        engine = llm.llm_engine
        open_ids = set()
        ended = set()
        todo = [str(i) for i in range(200)]
        while todo or engine.has_unfinished_requests():
            while todo and len(open_ids) < 12:
                name = todo.pop()
                end = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 9))]
                prompt = [rng.randrange(3) + 3] * rng.choice([0, 8, 16]) + end
                kind = rng.randrange(3)
                sampling = replace(
                    GREEDY,
                    n=rng.choice([1, 3]) if kind else 1,
                    temperature=kind,
                    seed=kind,
                    max_tokens=rng.randint(1, 20),
                )
                engine.add_request(name, prompt, BeamSearchParams(3, 8) if kind == 2 else sampling)
                open_ids.add(name)
            if rng.random() < 0.15:
                name = rng.choice(sorted(open_ids))
                engine.abort_request(name)
                open_ids.remove(name)
            for output in engine.step():
                if output.finished:
                    ended.add(output.request_id)
                    open_ids.discard(output.request_id)
            core_of(llm).scheduler.block_manager.check_integrity()
        engine.step()
        check_all_free(llm)
        runner = llm.collective_rpc(lambda worker: worker.model_runner)[0]
        assert not runner.input_batch.slot_of and len(ended) > 100
        assert llm.get_metrics()["num_preemptions"] > 0


@pytest.mark.parametrize("state", ["waiting", "running", "swapped", "computed again"])
def test_abort_of_a_forked_request_in_every_state(folder: str, state: str) -> None:
    options = {
        "preemption_mode": "swap" if state == "swapped" else "recompute",
        "max_num_batched_tokens": 16,
        "async_scheduling": False,  # else some states are over before `step` returns
    }
    with tiny(folder, 24, **options) as llm:
        engine = llm.llm_engine
        scheduler = core_of(llm).scheduler
        alone = samples(llm, [[5] * 20], replace(GREEDY, max_tokens=30))[0]
        engine.add_request("first", [5] * 20, several(2, max_tokens=30))
        engine.add_request("forked", [6] * 21, several(3, max_tokens=30))
        group = scheduler.groups["forked"]
        done = {}

        def now() -> str:
            if group in scheduler.running:
                prefill = any(seq.num_new_tokens > 1 for seq in group.unfinished)
                return (
                    "prompt"
                    if len(group.unfinished) == 1
                    else "computed again"
                    if prefill
                    else "running"
                )
            return "swapped" if group in scheduler.swapped else "waiting"

        while now() != state:
            done |= {output.request_id: output for output in engine.step() if output.finished}
            assert "forked" not in done, f"it was never {state}"
        engine.abort_request("forked")
        scheduler.block_manager.check_integrity()
        done = run(llm, done)
        assert [o.token_ids for o in done["first"].outputs] == alone * 2 and "forked" not in done
        check_all_free(llm)


@pytest.mark.parametrize(
    "params", [replace(GREEDY, max_tokens=3), several(3, max_tokens=3), BeamSearchParams(3, 3)]
)
@pytest.mark.parametrize("step", [1, 2, 3])
def test_abort_while_a_step_runs(
    folder: str, params: Any, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another thread: it waits for the step, which may bring the last token; then the request
    is gone.
    """
    with tiny(folder) as llm:
        engine = llm.llm_engine
        executor = core_of(llm).executor
        steps = count(1)
        threads = []
        collect = executor.collect

        def aborting() -> Any:
            if next(steps) == step:
                threads.append(threading.Thread(target=engine.abort_request, args=("a",)))
                threads[0].start()
                threads[0].join(0.05)
                assert threads[0].is_alive(), "it did not wait"
            return collect()

        monkeypatch.setattr(executor, "collect", aborting)
        engine.add_request("a", [5] * 9, params)
        outputs = [engine.step() for _ in range(step)]
        threads[0].join()
        assert bool(outputs[-1]) == (step == 3 or isinstance(params, SamplingParams)) and not any(
            run(llm)
        )
        assert not engine.has_unfinished_requests()
        engine.step()
        check_all_free(llm)
        monkeypatch.undo()
        assert samples(llm, [[5] * 9])[0] == samples(llm, [[5] * 9])[0]


def test_requests_come_and_go_from_other_threads(folder: str) -> None:
    """While one thread steps, others add requests, abort some, and read the metrics; each answer is
    right.
    """
    prompts = random_prompts(24, longest=20, seed=8)
    with tiny(folder) as llm:
        expected = samples(llm, prompts)
    with tiny(folder, 30, max_num_seqs=8) as llm:
        engine = llm.llm_engine
        done = {}
        errors = []

        def client(number: int) -> None:
            try:
                for i in range(number, len(prompts), 4):
                    engine.add_request(str(i), prompts[i], GREEDY)
                    engine.add_request(f"gone {i}", prompts[i], several(2, max_tokens=30))
                    assert engine.get_metrics()["num_gpu_blocks"] == 30
                    engine.abort_request(f"gone {i}")
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or engine.has_unfinished_requests():
            done |= {output.request_id: output for output in engine.step() if output.finished}
        assert not errors  # one of those that go may have ended before it is aborted
        assert {name for name in done if not name.startswith("gone")} == {
            str(i) for i in range(len(prompts))
        }
        assert [done[str(i)].outputs[0].token_ids for i in range(len(prompts))] == [
            answer for (answer,) in expected
        ]
        engine.step()
        check_all_free(llm)


# Order


def test_no_request_starves_under_a_stream_of_short_ones(folder: str) -> None:
    """A long prompt with forks waits only for requests that came before it, though short ones keep
    coming.
    """
    for options in (
        {},
        {"enable_chunked_prefill": False, "max_model_len": 120, "max_num_batched_tokens": 120},
    ):
        with tiny(folder, 40, max_num_seqs=6, **options) as llm:
            engine = llm.llm_engine
            done = {}
            for i in range(4):
                engine.add_request(f"early{i}", [i + 3] * 10, GREEDY)
            engine.add_request("long", [9] * 100, several(3, max_tokens=6))
            for step in range(150):
                engine.add_request(
                    f"short{step}", [step % 50 + 3] * 5, replace(GREEDY, max_tokens=4)
                )
                done |= {output.request_id: step for output in engine.step() if output.finished}
            assert done["long"] < 60, done.get("long")
            engine.abort_request(list(engine.output_processor.request_states))
            check_all_free(llm)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_request_with_forks_comes_back_before_later_ones(
    folder: str, mode: str
) -> None:
    with tiny(folder, 40, max_num_seqs=8, preemption_mode=mode, max_num_batched_tokens=24) as llm:
        engine = llm.llm_engine
        done = {}
        engine.add_request("first", [4] * 60, several(2, max_tokens=40))
        engine.add_request("second", [5] * 50, several(3, max_tokens=40))
        for step in range(300):
            engine.add_request(f"short{step}", [step % 50 + 3] * 5, replace(GREEDY, max_tokens=4))
            done |= {output.request_id: step for output in engine.step() if output.finished}
        assert done["first"] < done["second"] < 150 and llm.get_metrics()["num_preemptions"] > 0
        engine.abort_request(list(engine.output_processor.request_states))
        check_all_free(llm)


def test_a_sequence_that_decodes_gets_a_token_in_every_step(folder: str) -> None:
    "However long the prompts are that come in meanwhile."
    with tiny(folder, max_num_batched_tokens=12) as llm:
        engine = llm.llm_engine
        lengths = []
        engine.add_request("decodes", [5, 6, 7], replace(GREEDY, max_tokens=40))
        for i in range(4):
            engine.add_request(str(i), [i + 3] * 100, several(2))
        for _ in range(40):
            lengths += [
                len(o.outputs[0].token_ids) for o in engine.step() if o.request_id == "decodes"
            ]
        assert lengths == list(range(1, 41))
        run(llm)
        check_all_free(llm)


@pytest.mark.parametrize("mode", [None, "recompute", "swap"])
def test_priorities_hold(folder: str, mode: str | None) -> None:
    """The more important requests finish first, though they come last; the others are preempted,
    and answered all the same.
    """
    prompts = [[i + 3] * 20 for i in range(6)]
    with tiny(folder) as llm:
        expected = samples(llm, prompts, several(2))
    with tiny(folder, 20, scheduling_policy="priority", preemption_mode=mode) as llm:
        engine = llm.llm_engine
        order = []
        done = {}
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, several(2), priority=-(i // 2))
            for _ in range(3):
                order += [output for output in engine.step() if output.finished]
        while engine.has_unfinished_requests():
            order += [output for output in engine.step() if output.finished]
        done = {output.request_id: [o.token_ids for o in output.outputs] for output in order}
        assert [done[str(i)] for i in range(6)] == expected
        finished = [int(output.request_id) for output in order]
        assert finished == [4, 5, 2, 3, 0, 1], finished
        assert llm.get_metrics()["num_preemptions"] > 0
        check_all_free(llm)
        assert [len(s) for s in samples(llm, prompts, GREEDY, priority=[2, 1, 0, 2, 1, 0])] == [
            1
        ] * 6
        with pytest.raises(ValueError, match="priority"):
            llm.generate(prompts, GREEDY, use_tqdm=False, priority=[1])


def test_a_priority_that_nothing_would_read_is_refused(folder: str) -> None:
    with tiny(folder) as llm:
        expected = samples(llm, [[5, 6], [7, 8]])
        with pytest.raises(ValueError, match=r"priority=1.*scheduling_policy"):
            llm.generate([[5, 6], [7, 8]], GREEDY, use_tqdm=False, priority=[0, 1])
        with pytest.raises(ValueError, match="priority=-1"):
            llm.llm_engine.add_request("a", [5, 6], GREEDY, priority=-1)
        assert not llm.llm_engine.has_unfinished_requests()
        assert samples(llm, [[5, 6], [7, 8]], priority=[0, 0]) == expected  # asks for nothing


def test_a_policy_of_ones_own(folder: str) -> None:
    class ShortestFirst(FCFSPolicy):
        "A reader's policy: the shortest prompt first."

        def key(self, group: Any) -> tuple:
            return (group.first_seq.num_prompt_tokens, group.arrival)

    prompts = [[5] * length for length in (30, 10, 20)]
    for policy in (ShortestFirst, FCFSPolicy, "teachvllm.core.request_queue.PriorityPolicy"):
        with tiny(folder, max_num_seqs=1, scheduling_policy=policy) as llm:
            for i, prompt in enumerate(prompts):
                llm.llm_engine.add_request(str(i), prompt, GREEDY)
            assert list(run(llm)) == (
                ["1", "2", "0"] if policy is ShortestFirst else ["0", "1", "2"]
            )
            check_all_free(llm)


# Steps that fail


def fail_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, when: Callable[[], bool]
) -> list[set[str]]:
    """The first step in which `when()` holds, once the model has run, raises; the requests that it
    ran are in what is returned.
    """
    core = core_of(llm)
    failed = []
    execute = core.executor.collect

    def failing() -> Any:
        sampled = execute()
        if not failed and when():
            failed.append({group.request_id for group in core.scheduler.running})
            raise RuntimeError("boom")
        return sampled

    monkeypatch.setattr(core.executor, "collect", failing)
    return failed


def run_failing(llm: LLM) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    "Step to the end: all outputs by id, and what the steps after a failed one returned."
    engine = llm.llm_engine
    done = {}
    after = []
    failed = False
    while engine.has_unfinished_requests():
        try:
            outputs = {output.request_id: output for output in engine.step() if output.finished}
        except RuntimeError:
            core_of(llm).scheduler.block_manager.check_integrity()
            failed = True
            continue
        after += [outputs] if failed else []
        failed = False
        assert not done.keys() & outputs.keys()
        done |= outputs
    return done, after


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("failing", [2, 9, 14, 20])
def test_a_failed_step_ends_what_it_ran_and_nothing_else(
    folder: str, mode: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    "Forks, beams and swapped requests are around: those that waited finish with the right tokens."
    requests = {
        "forks": ([5] * 17, several(3)),
        "beams": ([6] * 14, BeamSearchParams(3, 10, True)),
        "plain": ([7] * 19, GREEDY),
        "more": ([5] * 18, several(2)),
        "late": ([8] * 9, GREEDY),
    }
    with tiny(folder) as llm:
        for name, request in requests.items():
            llm.llm_engine.add_request(name, *request)
        expected = {
            name: [o.token_ids for o in output.outputs] for name, output in run(llm).items()
        }
    with tiny(folder, 22, preemption_mode=mode, max_num_batched_tokens=32, max_num_seqs=6) as llm:
        calls = count(1)
        failed = fail_once(llm, monkeypatch, lambda: next(calls) == failing)
        for name, request in requests.items():
            llm.llm_engine.add_request(name, *request)
        done, (after,) = run_failing(llm)
        ended = {
            name
            for name, output in done.items()
            if any(o.finish_reason == "error" for o in output.outputs)
        }
        assert failed == [ended] and ended <= set(after) and len(ended) < len(requests) == len(done)
        for name, output in done.items():
            if name in ended:
                said = [o.stop_reason for o in output.outputs if o.finish_reason == "error"]
                assert said and all("RuntimeError: boom" in why for why in said)
            else:
                assert [o.token_ids for o in output.outputs] == expected[name]
        llm.llm_engine.step()
        check_all_free(llm)
        assert samples(llm, [[7] * 19]) == [expected["plain"]]


@pytest.mark.parametrize("swap_space, mode", [(SWAP, "recompute"), (SWAP, "swap"), (0, None)])
@pytest.mark.parametrize("fails", [False, True])
def test_a_window_request_longer_than_the_pool_is_computed_again(
    models: dict[str, tuple[str, Any]],
    swap_space: float,
    mode: str | None,
    fails: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunk by chunk, in few blocks, when it was preempted, or when another request's step failed
    meanwhile.
    """
    folder, model = models["mistral"]
    prompts = [random_prompts(1, seed=seed)[0][:8] for seed in range(3)]
    expected = [greedy(model, prompt, 100) for prompt in prompts]
    options = {
        "scheduling_policy": "priority",
        "preemption_mode": mode,
        "swap_space": swap_space,
        "max_num_seqs": 2,
    }
    with tiny(folder, 12, **options) as llm:  # 48 slots; each request writes 108 tokens
        engine = llm.llm_engine
        scheduler = core_of(llm).scheduler
        begun = lambda: any(g.num_preemptions for g in [*scheduler.waiting, *scheduler.swapped])  # noqa: E731
        failed = fail_once(llm, monkeypatch, lambda: fails and begun())
        engine.add_request("0", prompts[0], replace(GREEDY, max_tokens=100), 1)
        engine.add_request("1", prompts[1], replace(GREEDY, max_tokens=100), 1)
        for _ in range(70):
            engine.step()
        engine.add_request("2", prompts[2], replace(GREEDY, max_tokens=100))
        done, _ = run_failing(llm)
        ended = failed[0] if fails else set()
        assert scheduler.num_preemptions > 0 and len(ended) == 2 * fails
        for name in {"0", "1", "2"} - ended:
            assert done[name].outputs[0].token_ids == expected[int(name)], name
        check_all_free(llm)


def test_requests_with_a_window_are_not_swapped_again_and_again(
    models: dict[str, tuple[str, Any]],
) -> None:
    """Four of them on 14 blocks, of which each wants five: of those, one was swapped 33 times
    before.
    """
    folder, model = models["mistral"]
    prompts = random_prompts(4, longest=8, seed=5)
    expected = [greedy(model, prompt, 80) for prompt in prompts]
    with tiny(folder, 14) as llm:
        scheduler = core_of(llm).scheduler
        times = Counter()
        schedule = scheduler.schedule

        def counting() -> Any:
            out = schedule()
            times.update(out.preempted_request_ids)
            return out

        scheduler.schedule = counting
        assert samples(llm, prompts, replace(GREEDY, max_tokens=80)) == [
            [tokens] for tokens in expected
        ]
        metrics = llm.get_metrics()
        assert 0 < max(times.values()) <= 3, times
        assert metrics["num_swapped_out_blocks"] <= 6 * sum(times.values())


# Logits that are not numbers


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> str:
    "A tiny Llama in which token 9 stands for numbers that are none."
    path = tmp_path_factory.mktemp("nan")
    make_poisoned(path, lambda model: model.get_input_embeddings().weight[9])
    return str(path)


def make_poisoned(path: Path, weights: Callable[[Any], torch.Tensor]) -> None:
    model = make_tiny("llama", path)
    with torch.no_grad():
        weights(model).fill_(float("nan"))
    model.save_pretrained(path)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        several(3),
        BeamSearchParams(3, 8),
        replace(GREEDY, temperature=1),
        replace(GREEDY, temperature=1, top_p=0.5),
        replace(GREEDY, n=2, best_of=3, temperature=1),
        replace(GREEDY, stop_token_ids=[3], min_tokens=4),
    ],
)
def test_nan_logits_end_a_request_with_an_error(tmp_path: Path, params: Any) -> None:
    "A model whose head is broken answers nothing, and says why."
    make_poisoned(tmp_path, lambda model: model.get_output_embeddings().weight)
    with tiny(str(tmp_path)) as llm:
        ask = llm.beam_search if isinstance(params, BeamSearchParams) else llm.generate
        for output in ask([[5, 6, 7], [8] * 20], params, use_tqdm=False):
            assert output.finished and output.outputs
            for answer in output.outputs:
                assert (
                    answer.finish_reason == "error"
                    and "NaN" in answer.stop_reason
                    and answer.token_ids == []
                )
        check_all_free(llm)


def test_nan_logits_of_one_request_are_no_other_requests_fault(poisoned: str) -> None:
    "Not in its batch, and not in the blocks that it leaves behind."
    prompts = [[9] * 20, [5] * 20, [5, 6, 7], [7, 9], [8] * 33]
    # their answers have no token 9
    sound = [1, 2, 4]
    params = replace(GREEDY, max_tokens=8)
    with tiny(poisoned) as llm:
        expected = samples(llm, [prompts[i] for i in sound], params)
    with tiny(poisoned, 30, enable_prefix_caching=False) as llm:
        for _ in range(3):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [o.outputs[0].finish_reason == "error" for o in outputs] == [
                i not in sound for i in range(5)
            ]
            assert [[outputs[i].outputs[0].token_ids] for i in sound] == expected
            check_all_free(llm)
        assert not any(9 in tokens for (tokens,) in expected)


# Numbers


METRICS = {
    "num_waiting",
    "num_running",
    "num_swapped",
    "num_gpu_blocks",
    "num_cpu_blocks",
    "num_gpu_blocks_used",
    "peak_gpu_blocks_used",
    "num_preemptions",
    "num_swapped_out_blocks",
    "num_swapped_in_blocks",
    "num_cow_copies",
    "num_evicted_blocks",
    "prefix_cache_queries",
    "prefix_cache_hits",
}


@pytest.mark.parametrize(
    "block_size, length",
    [(1, 1), (1, 17), (4, 1), (4, 15), (4, 16), (4, 17), (16, 16), (16, 17), (16, 64)],
)
def test_a_repeated_prompt_is_found(folder: str, block_size: int, length: int) -> None:
    prompt = (random_prompts(1, seed=9)[0] * 64)[:length]
    known = (length - 1) // block_size * block_size
    with tiny(folder, block_size=block_size) as llm:
        first, again = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, known)
        assert first.outputs[0].token_ids == again.outputs[0].token_ids
        metrics = llm.get_metrics()
        assert set(metrics) == METRICS and all(isinstance(value, int) for value in metrics.values())
        assert (metrics["prefix_cache_queries"], metrics["prefix_cache_hits"]) == (
            2 * length,
            known,
        )
        assert (
            metrics["num_gpu_blocks"] == 400
            and metrics["num_gpu_blocks_used"] == 0 < metrics["peak_gpu_blocks_used"]
        )
        # admitted in one step
        both = llm.generate([prompt[::-1] + [3]] * 2, GREEDY, use_tqdm=False)
        assert both[1].num_cached_tokens == length // block_size * block_size
        assert both[0].outputs[0].token_ids == both[1].outputs[0].token_ids
        llm.reset_prefix_cache()
        assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    with tiny(folder, block_size=block_size, enable_prefix_caching=False) as llm:
        outputs = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2)]
        assert [output.num_cached_tokens for output in outputs] == [0, 0]
        assert [output.outputs[0].token_ids for output in outputs] == [
            first.outputs[0].token_ids
        ] * 2
        assert llm.get_metrics()["prefix_cache_hits"] == 0


def test_a_conversation_finds_its_own_answers(folder: str) -> None:
    "The blocks of an answer are found when it comes back as part of the next prompt."
    with tiny(folder) as llm:
        answer = llm.generate([5] * 16, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        again = llm.generate([5] * 16 + answer + [9, 8, 7], GREEDY, use_tqdm=False)[0]
        assert again.num_cached_tokens == 28  # 31 of the 32 tokens were computed: seven full blocks
        assert again.outputs[0].token_ids != answer


def test_the_cache_evicts_and_stays_right(folder: str) -> None:
    prompts = random_prompts(30, longest=30, seed=6)
    with tiny(folder, enable_prefix_caching=False) as llm:
        expected = samples(llm, prompts)
    with tiny(folder, 16) as llm:
        for _ in range(2):
            assert samples(llm, prompts) == expected
        assert llm.get_metrics()["num_evicted_blocks"] > 100


# What is refused


@pytest.mark.parametrize(
    "options, says",
    [
        ({"swap_space": 1e6}, "swap_space"),
        ({"swap_space": -1}, "swap_space"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy"),
        ({"scheduling_policy": "nowhere.Policy"}, "nowhere"),
        ({"preemption_mode": "kill"}, "preemption_mode"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching"),
    ],
)
def test_refused_arguments(folder: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tiny(folder, **options)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: SamplingParams(n=0), "n=0"),
        (lambda: SamplingParams(n=3, best_of=2), "best_of=2"),
        (lambda: SamplingParams(n=2, temperature=0), "greedy"),
        (lambda: SamplingParams(n=1, best_of=2, output_kind=RequestOutputKind.DELTA), "best_of=2"),
        (lambda: BeamSearchParams(beam_width=0, max_tokens=5), "beam_width=0"),
        (lambda: BeamSearchParams(beam_width=2, max_tokens=0), "max_tokens=0"),
        (lambda: BeamSearchParams(beam_width=2, max_tokens=5, temperature=1.0), "temperature"),
        (
            lambda: BeamSearchParams(beam_width=2, max_tokens=5, length_penalty=float("nan")),
            "length_penalty",
        ),
    ],
)
def test_refused_parameters(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    "prompt, params, says",
    [
        ([5] * 41, GREEDY, "num_gpu_blocks_override"),
        ([5] * 30, several(5), "n, best_of or beam_width"),
        ([5] * 30, several(2, best_of=5), "n, best_of or beam_width"),
        ([5] * 30, BeamSearchParams(5, 10), "n, best_of or beam_width"),
        ([5] * 3, several(9), "max_num_seqs"),
    ],
)
def test_refused_prompts(folder: str, prompt: list[int], params: Any, says: str) -> None:
    "A request that can never run is refused; the others go on."
    with tiny(folder) as llm:
        expected = samples(llm, [[5, 6, 7]])
    with tiny(folder, 10, max_num_seqs=8) as llm:
        engine = llm.llm_engine
        engine.add_request("good", [5, 6, 7], GREEDY)
        engine.step()
        with pytest.raises(ValueError, match=says):
            engine.add_request("bad", prompt, params)
        assert [o.token_ids for o in run(llm)["good"].outputs] == expected[0]
        with pytest.raises(ValueError, match="BeamSearchParams"):
            llm.beam_search([[5]], GREEDY)  # type: ignore[arg-type]
        assert samples(llm, [[5, 6, 7]]) == expected


def test_the_largest_forked_request_that_is_not_refused_gets_answers(folder: str) -> None:
    "It ends early, for want of blocks, but it ends, and every sample has a token."
    with tiny(folder, 10) as llm:
        alone = samples(llm, [[5] * 30], replace(GREEDY, max_tokens=2))[0][0]
        for params in (several(3, max_tokens=50), several(3, max_tokens=None)):
            outputs = llm.generate([5] * 30, params, use_tqdm=False)[0].outputs
            assert [o.finish_reason for o in outputs] == ["length"] * 3
            assert all(o.token_ids[:2] == alone for o in outputs)
        outputs = llm.beam_search([[5] * 30], BeamSearchParams(3, 50, True))[0].outputs
        assert len(outputs) == 3 and {o.finish_reason for o in outputs} == {"length"}
        check_all_free(llm)
