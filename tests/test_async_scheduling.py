"""With `async_scheduling` a step is decided while the one before it runs: every answer is the same,
whatever comes between.

First on a simulated worker, which is as late or as early as can be; then on tiny models whose
worker has a thread.
"""

import gc
import pickle
import random
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import test_blocks
from helpers import TINY, VOCAB, make_tiny, random_prompts, runner_of
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from test_blocks import (
    EngineMachine,
    SimulatedExecutor,
    SimulatedWorker,
    Simulation,
    Torn,
    finish_torn,
    interrupt_after,
    load,
    random_options,
)

from teachvllm import LLM, RequestOutputKind, SamplingParams
from teachvllm.core.block_manager import BlockSpaceManager
from teachvllm.core.orders import SchedulerOutput
from teachvllm.executor.dummy_executor import DummyExecutor
from teachvllm.executor.executor_base import UniProcExecutor
from teachvllm.messages import ModelRunnerOutput
from teachvllm.sampling_params import BeamSearchParams
from teachvllm.sequence import Sequence, SequenceGroup
from teachvllm.trace import Trace, host_phases

# On a simulated worker that is as late, or as early, as can be


class LateWorker(SimulatedWorker):
    "One that may be behind the scheduler by a step."

    just_sent: SchedulerOutput | None = None

    def compare_with_scheduler(self, out: SchedulerOutput) -> None:
        """At the moment at which the step was decided the worker knows what the scheduler knows,
        and tokens still on their way.
        """
        if out is not self.just_sent:
            return
        scheduler = self.scheduler
        assert set(self.rows) == set(scheduler.block_manager.block_tables)
        for seq_id, row in self.rows.items():
            group, seq = scheduler.seqs[seq_id]
            assert row.token_ids[: seq.get_len()] == seq.token_ids and row.seed == seq.seed
            assert row.computed + out.num_scheduled_tokens.get(seq_id, 0) == seq.num_computed_tokens
            unforeseen = len(row.token_ids) - seq.num_tokens
            waits = group.fork_rule or group.grammar is not None or group.wants_drafts
            assert unforeseen in ((0, 1) if waits else (0,))
            assert seq.max_len is None or len(row.token_ids) <= seq.max_len


class LateExecutor(SimulatedExecutor):
    """Carries out each step when it is sent, or not before its result is asked for; no orders may
    change meanwhile.
    """

    def _init_executor(self) -> None:
        self.worker = LateWorker(self.config, self.num_cpu_blocks)
        self.orders: deque[tuple[Future, SchedulerOutput, bytes]] = deque()
        self.rng = random.Random(0)

    def submit(self, out: SchedulerOutput) -> None:
        result: Future[ModelRunnerOutput] = Future()
        self.orders.append((result, out, pickle.dumps(out)))
        if self.rng.random() < 0.5:
            self.worker.just_sent = out
            self.work_until(result)
            self.worker.just_sent = None
        self.in_flight.append(lambda: self.work_until(result))

    def work_until(self, result: Future) -> Any:
        while not result.done():
            one, out, sent = self.orders.popleft()
            assert pickle.dumps(out) == sent, "orders were changed after they were sent"
            try:
                self.worker.submit(out)
                one.set_result(self.worker.collect())
            except Exception as error:
                one.set_exception(error)
        return result.result() if self.worker.just_sent is None else None

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: tuple = (), kwargs: Any = None
    ) -> list[Any]:
        assert not self.orders, "not all that was sent has been done"
        return super().collective_rpc(method, timeout, args, kwargs)


class AheadOfTime(Simulation):
    "A simulation with `async_scheduling`."

    executor_class = LateExecutor

    def __init__(self, **options: Any):
        super().__init__(**options, async_scheduling=True)
        self.core.executor.rng.seed(repr(options))
        self.num_failures = 0
        recover = self.scheduler.recover
        self.scheduler.recover = lambda message: self.check_recovery(message, recover)

    def check_recovery(self, message: str, recover: Callable[[str], None]) -> None:
        self.may_fail |= {group.request_id for group in self.scheduler.running}
        recover(message)

    def check_schedule(self, schedule: Callable[[], SchedulerOutput]) -> SchedulerOutput:
        """A sequence that decodes gets a token if it can have one more; no request is preempted
        while tokens are on their way.
        """
        scheduler = self.scheduler
        ahead = bool(self.core.in_flight)
        decoding = self.decoding()
        full = {seq.seq_id for _, seq in decoding if seq.is_full}
        out = schedule()
        for group, seq in decoding:
            gone = group.request_id in out.preempted_request_ids or seq.status.finished
            num_drafts = len(out.scheduled_spec_decode_tokens.get(seq.seq_id, ()))
            wanted = 0 if seq.seq_id in full else 1 + num_drafts
            assert gone or out.num_scheduled_tokens.get(seq.seq_id, 0) == wanted
        if ahead:  # with a window, the blocks for a prompt's next tokens may not be free yet
            assert not out.preempted_request_ids and (
                out.num_scheduled_tokens or self.options["window"]
            )
        assert out.total_num_scheduled_tokens <= self.options["max_num_batched_tokens"]
        assert (
            sum(len(group.unfinished) for group in scheduler.running)
            <= self.options["max_num_seqs"]
        )
        assert set(out.num_scheduled_tokens) <= set(scheduler.block_manager.block_tables)
        self.check()
        return out

    def failing(self) -> None:
        self.num_failures += 1
        raise RuntimeError("boom")

    def step(self, fail: str | None = None, abort: str | None = None) -> None:
        "As before; but what fails may be known one step later."
        if fail:
            {"before": self.worker.before, "after": self.worker.after}[fail].append(self.failing)
        if abort:
            self.abort(abort)
        try:
            outputs = self.engine.step()
        except RuntimeError as error:
            assert str(error) == "boom" and self.num_failures > 0
            self.num_failures = 0
            outputs = []
        self.worker.before.clear()
        self.worker.after.clear()
        self.num_steps += 1
        self.take(outputs)
        self.check()
        assert len(self.core.in_flight) <= 1

    def check_nothing_left(self) -> None:
        assert self.engine.step() == []  # what was in flight when the last request ended
        super().check_nothing_left()


@pytest.mark.parametrize("seed", range(40))
def test_random_loads_on_a_simulated_worker(seed: int) -> None:
    rng = random.Random(seed)
    load(AheadOfTime(**random_options(rng)), rng, 20)


class AheadMachine(EngineMachine):
    "Any order of calls."

    def did(self) -> None:
        "Another file counts its own."

    @initialize(seed=st.integers(0, 10**6))
    def begin(self, seed: int) -> None:
        self.simulation = AheadOfTime(**random_options(random.Random(seed)))


def test_any_order_of_calls() -> None:
    test_blocks.run(AheadMachine, 60)


@pytest.mark.parametrize(
    "num_steps, error", [(1, Torn), (3, None), (3, Torn), (5, Torn), (6, None), (6, Torn)]
)
def test_a_step_torn_at_any_line(num_steps: int, error: type | None) -> None:
    """With a step in flight or without, in a pool that is full or not: what ran ends, with its
    answer or with an error.
    """
    torn = in_flight = 0
    for line in range(1, 4000, 17):
        simulation = AheadOfTime(num_gpu_blocks=12, max_num_seqs=8)
        for i, (length, n) in enumerate(((9, 3), (5, 1), (11, 1))):
            params = SamplingParams(
                temperature=int(n > 1), seed=i, max_tokens=12, ignore_eos=True, n=n
            )
            simulation.add([i] * length, params)
        for _ in range(num_steps):
            simulation.step()
        # An interrupt shall not come in the checks.
        del simulation.scheduler.schedule, simulation.scheduler.recover
        simulation.may_fail = set(simulation.open())
        in_flight += len(simulation.core.in_flight)
        if not interrupt_after(line, simulation.engine.step, error):
            break
        torn += 1
        finish_torn(simulation)
    assert torn > 5 and in_flight in (0, torn + 1)


# On tiny models, whose worker has a thread

Params = SamplingParams | BeamSearchParams
# of each: tokens, finish_reason and stop_reason
Answers = dict[str, list[tuple[list[int], str | None, Any]]]
EOS = frozenset(range(0, VOCAB, 7))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def make_requests() -> dict[str, tuple[list[int], Params]]:
    "One of each kind, some of which begin alike."
    p = random_prompts(6, longest=24, seed=3)
    hot = replace(GREEDY, temperature=1)
    stops = list(range(0, VOCAB, 5))
    delta = RequestOutputKind.DELTA
    final = RequestOutputKind.FINAL_ONLY
    return {
        "greedy": (p[0], GREEDY),
        "seeded": (p[1], replace(hot, seed=1)),
        "top_p": (p[2], replace(hot, seed=2, top_p=0.8, output_kind=final)),
        "filtered": ([*p[0], 7], replace(hot, seed=3, top_k=5, min_p=0.05)),
        "stops": (p[3], replace(hot, seed=4, stop_token_ids=stops, output_kind=delta)),
        "stops late": (p[3], replace(hot, seed=5, stop_token_ids=stops, min_tokens=6)),
        "eos": (p[4], replace(hot, seed=6, ignore_eos=False)),
        "eos late": (p[5], replace(hot, seed=7, ignore_eos=False, min_tokens=9)),
        "one token": (p[5], replace(GREEDY, max_tokens=1)),
        "two": (p[1], replace(hot, seed=8, max_tokens=2, output_kind=delta)),
        "forks": (p[2], replace(hot, n=3, seed=9, stop_token_ids=stops, output_kind=delta)),
        "alike": ([*p[0], 9], replace(hot, n=2, seed=11)),
        "best": (p[4], replace(hot, n=2, best_of=4, seed=10, output_kind=final)),
        "beams": ([*p[0], 9, 9], BeamSearchParams(3, 8)),
        "more beams": (p[5], BeamSearchParams(2, 5, True)),
    }


def tiny(folder: str, num_blocks: int = 400, **options: Any) -> LLM:
    defaults = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "block_size": 4,
        "swap_space": 0.001,
    }
    llm = LLM(
        folder,
        num_gpu_blocks_override=num_blocks,
        **{**defaults, "async_scheduling": True, **options},
    )
    llm.llm_engine.processor.eos_token_ids = EOS
    return llm


def core_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core


class Told:
    "What the users were told, put together by the kind of output they asked for."

    def __init__(self, requests: dict[str, tuple[Any, Params]]):
        self.requests = requests
        self.answers: Answers = {}
        self.finished: set[str] = set()

    def take(self, outputs: list[Any]) -> None:
        for output in outputs:
            name = output.request_id
            (_, params) = self.requests[output.request_id]
            assert name not in self.finished, "told after its end"
            delta = getattr(params, "output_kind", None) is RequestOutputKind.DELTA
            answers = self.answers.setdefault(name, []) if delta else []
            answers += [([], None, None)] * (
                1 + max(o.index for o in output.outputs) - len(answers)
            )
            for o in output.outputs:
                assert answers[o.index][1] is None, "an answer's end is told once"
                answers[o.index] = answers[o.index][0] + o.token_ids, o.finish_reason, o.stop_reason
            self.answers[name] = answers
            self.finished |= {name} if output.finished else set()


def answer(
    llm: LLM, requests: dict[str, tuple[Any, Params]], error: Any = ZeroDivisionError
) -> Answers:
    """Half of the requests come at once, the others one a step; if a step raises `error`, the next
    is tried.
    """
    engine = llm.llm_engine
    core = core_of(llm)
    told = Told(requests)
    todo = deque(requests)
    by_priority = engine.config.scheduler_config.policy == "priority"
    while todo or engine.has_unfinished_requests():
        for _ in range((len(todo) + 1) // 2 if len(todo) == len(requests) else min(1, len(todo))):
            name = todo.popleft()
            engine.add_request(name, *requests[name], priority=len(name) % 3 if by_priority else 0)
        try:
            told.take(engine.step())
        except error:
            pass
        core.scheduler.block_manager.check_integrity()
        assert len(core.in_flight) <= 1
    check_nothing_left(llm)
    return told.answers


def check_but_for_errors(
    answers: Answers,
    expected: Answers,
    requests: dict[str, tuple[Any, Params]],
    error: str = "ZeroDivisionError",
) -> set[str]:
    """Requests that ended with an error say which, and have no wrong token; the others are as
    expected. Returns the former.
    """
    failed = {
        name for name, many in answers.items() if any(reason == "error" for _, reason, _ in many)
    }
    assert {name: many for name, many in answers.items() if name not in failed} == {
        name: many for name, many in expected.items() if name not in failed
    }
    for name in failed:
        few = getattr(requests[name][1], "best_of", None)  # its best at the end may be others
        for tokens, reason, says in answers[name]:
            assert few or any(tokens == whole[: len(tokens)] for whole, *_ in expected[name])
            assert (
                (error in says)
                if reason == "error"
                else few or (tokens, reason, says) in expected[name]
            )
    return failed


def check_nothing_left(llm: LLM) -> None:
    "No request, no sequence, no step, no block, and no slot."
    engine = llm.llm_engine
    core = core_of(llm)
    # a step that was in flight, and one that tells the worker which sequences ended last
    for _ in range(2):
        assert not engine.step()
    manager = core.scheduler.block_manager
    state = runner_of(llm).input_batch
    manager.check_integrity()
    assert manager.get_num_free_gpu_blocks() == manager.num_gpu_blocks
    assert manager.cpu_allocator.get_num_free_blocks() == manager.num_cpu_blocks
    assert not engine.has_unfinished_requests()
    assert (
        not core.scheduler.seqs
        and not core.scheduler.has_unfinished_requests()
        and not core.in_flight
    )
    assert not state.slot_of and sorted(state.free_slots) == list(range(state.num_slots))


def num_ahead(trace: Trace) -> int:
    "Steps that were decided before the one before them was there."
    return sum(
        b.start < a.process_start for a, b in pairwise(trace.steps) if a.process_start is not None
    )


def worker_threads() -> list[threading.Thread]:
    return [
        thread for thread in threading.enumerate() if thread.name.startswith("teachvllm-worker")
    ]


@pytest.fixture(scope="module")
def expected(folder: str) -> Answers:
    "What the synchronous engine answers."
    with tiny(folder, async_scheduling=False) as llm, llm.record() as trace:
        answers = answer(llm, make_requests())
        assert num_ahead(trace) == 0 and not worker_threads()
    assert {reason for many in answers.values() for _, reason, _ in many} == {"stop", "length"}
    assert set(answers) == set(make_requests())
    return answers


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 1, "num_blocks": 2000},
        {"block_size": 16},
        {"max_num_batched_tokens": 6},
        {"max_num_seqs": 4},
        {"enable_prefix_caching": False},
        {"num_blocks": 22},
        {"num_blocks": 22, "preemption_mode": "swap"},
        {"num_blocks": 22, "preemption_mode": "recompute"},
        {"num_blocks": 22, "enable_prefix_caching": False, "max_num_seqs": 8},
        {
            "num_blocks": 22,
            "preemption_mode": "swap",
            "scheduling_policy": "priority",
            "max_num_batched_tokens": 9,
        },
        {"num_blocks": 22, "preemption_mode": "recompute", "scheduling_policy": "priority"},
        {"num_blocks": 22, "async_scheduling": False},
        {"num_blocks": 22, "async_scheduling": False, "preemption_mode": "swap"},
        {
            "num_blocks": 22,
            "async_scheduling": False,
            "preemption_mode": "recompute",
            "max_num_batched_tokens": 9,
        },
        {
            "num_blocks": 26,
            "enable_chunked_prefill": False,
            "max_model_len": 64,
            "max_num_batched_tokens": 64,
        },
    ],
)
def test_the_same_answers(folder: str, expected: Answers, options: dict[str, Any]) -> None:
    """Every kind of request, in pools that hold them all or hardly one, with any budget; and once
    more from the cache.
    """
    with tiny(folder, **options) as llm, llm.record() as trace:
        assert answer(llm, make_requests()) == expected
        metrics = llm.get_metrics()
        if options.get("num_blocks", 400) < 100:
            assert metrics["num_preemptions"] >= 2
            assert (metrics["num_swapped_out_blocks"] > 0) == (
                options.get("preemption_mode") != "recompute"
            )
        assert (num_ahead(trace) > len(trace.steps) // 5) == options.get("async_scheduling", True)
        assert answer(llm, make_requests()) == expected
        hits = llm.get_metrics()["prefix_cache_hits"] - metrics["prefix_cache_hits"]
        assert (hits > 0) == options.get("enable_prefix_caching", True)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7},
        {"num_blocks": 20},
        {"num_blocks": 20, "preemption_mode": "swap"},
    ],
)
def test_a_sliding_window(tmp_path: Path, options: dict[str, Any]) -> None:
    from transformers import MistralConfig

    config = MistralConfig(
        **{**TINY["llama"]().to_dict(), "architectures": None, "sliding_window": 16, "head_dim": 16}
    )
    with patch.dict(TINY, window=lambda: config):
        make_tiny("window", tmp_path)
    requests = {
        name: (prompt, replace(params, max_tokens=30))
        for name, (prompt, params) in make_requests().items()
    }
    for name in ("best", "forks"):  # too large for the pool
        del requests[name]
    with tiny(str(tmp_path), async_scheduling=False) as llm:
        expected = answer(llm, requests)
    with tiny(str(tmp_path), **options) as llm, llm.record() as trace:
        assert llm.llm_engine.config.model_config.sliding_window == 16
        assert answer(llm, requests) == expected and num_ahead(trace) > len(trace.steps) // 5
        assert (llm.get_metrics()["num_preemptions"] > 0) == ("num_blocks" in options)


def test_texts() -> None:
    "SmolLM2's: stop strings, streamed or whole, with characters of several tokens."
    prompts = ["The capital of France is", "A short poem about emoji 🙂 and Zürich:", "1 2 3 4"]
    params = SamplingParams(temperature=0, max_tokens=24)

    def texts(llm: LLM, many: list[SamplingParams]) -> list[tuple[str, list[int], Any, Any]]:
        pieces: list[Any] = [("", [], None, None)] * len(many)
        for i, one in enumerate(many):
            llm.llm_engine.add_request(str(i), prompts[i % 3], one)
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                i = int(output.request_id)
                o = output.outputs[0]
                delta = many[i].output_kind is RequestOutputKind.DELTA
                text, ids = pieces[i][:2] if delta else ("", [])
                pieces[i] = text + o.text, ids + o.token_ids, o.finish_reason, o.stop_reason
        return pieces

    options = {"dtype": "float32", "num_gpu_blocks_override": 64}
    with (
        LLM(**options, async_scheduling=False) as llm,
        LLM(**options, async_scheduling=True) as ahead,
    ):
        free = texts(llm, [params] * 3)
        stops = [text[len(text) // 2 :][:5] for text, *_ in free]
        many = [
            replace(
                params,
                stop=stop,
                include_stop_str_in_output=include,
                min_tokens=few,
                output_kind=kind,
            )
            for kind in RequestOutputKind
            for include, few in ((False, 0), (True, 8))
            for stop in stops
        ]
        expected = texts(llm, many)
        assert texts(ahead, many) == expected and {reason for _, _, reason, _ in expected} == {
            "stop"
        }
        cut = [text[: text.index(stop)] for (text, *_), stop in zip(free, stops, strict=True)]
        assert [text for text, *_ in expected[:3]] == cut
        for one in (llm, ahead):  # the core was told to end them
            assert not core_of(one).scheduler.seqs


# That it runs ahead, and when it does not


def test_the_next_step_is_decided_while_one_runs(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's thread goes on with a step only when the next has been decided; the last step
    has none.
    """
    with tiny(folder) as llm:
        expected = (
            llm.generate([5, 6, 7], replace(GREEDY, max_tokens=6), use_tqdm=False)[0]
            .outputs[0]
            .token_ids
        )
        scheduler = core_of(llm).scheduler
        forward = runner_of(llm).model_inputs
        schedule = scheduler.schedule
        decided = threading.Semaphore(0)
        steps = count(1)

        def deciding() -> SchedulerOutput:
            decided.release()
            return schedule()

        def waiting(*args: Any) -> Any:
            assert threading.current_thread() in worker_threads()
            assert decided.acquire(timeout=20) and (next(steps) == 6 or decided.acquire(timeout=20))
            decided.release()
            return forward(*args)

        monkeypatch.setattr(scheduler, "schedule", deciding)
        monkeypatch.setattr(runner_of(llm), "model_inputs", waiting)
        assert (
            llm.generate([5, 6, 7], replace(GREEDY, max_tokens=6), use_tqdm=False)[0]
            .outputs[0]
            .token_ids
            == expected
        )
        assert next(steps) == 7, (
            "no step in vain: where the end is known, nothing is decided after it"
        )


def test_on_a_cpu_it_must_be_asked_for(folder: str) -> None:
    for asked in (None, False):
        with tiny(folder, async_scheduling=asked) as llm:
            llm.llm_engine.add_request("a", [5, 6, 7], GREEDY)
            llm.llm_engine.step()
            assert not core_of(llm).in_flight and not worker_threads()


def test_only_a_stop_costs_a_token(folder: str) -> None:
    """As many tokens are computed as without; one more for each answer that ends before its last
    possible token.
    """
    for stops in ([], list(range(0, VOCAB, 8))):
        params = [
            replace(GREEDY, temperature=1, seed=i, stop_token_ids=stops, max_tokens=i + 1)
            for i in range(16)
        ]
        totals = []
        for ahead in (False, True):
            with tiny(folder, async_scheduling=ahead) as llm, llm.record() as trace:
                outputs = llm.generate(random_prompts(16, seed=4), params, use_tqdm=False)
                ends = sum(o.outputs[0].finish_reason == "stop" for o in outputs)
                totals.append(sum(sum(step.num_scheduled_tokens.values()) for step in trace.steps))
        assert totals[0] <= totals[1] <= totals[0] + ends and (ends > 3) == bool(stops)


def test_the_cache_knows_as_much(folder: str) -> None:
    "Whatever the length of an answer, what comes back of it is found."
    found = []
    for ahead in (False, True):
        with tiny(folder, async_scheduling=ahead) as llm:
            cached = []
            for n in range(1, 10):
                prompt = [n] * 16
                tokens = (
                    llm.generate(prompt, replace(GREEDY, max_tokens=n), use_tqdm=False)[0]
                    .outputs[0]
                    .token_ids
                )
                cached.append(
                    llm.generate([*prompt, *tokens, 9, 8], GREEDY, use_tqdm=False)[
                        0
                    ].num_cached_tokens
                )
            found.append(cached)
    assert found[0] == found[1] and found[0][-1] == 24


def test_what_was_swapped_out_can_be_found_again() -> None:
    """Its blocks are others when it comes back; no other request had them meanwhile, and they are
    shared from then on.
    """
    manager = BlockSpaceManager(2, 6, 6, enable_caching=True)
    seq = Sequence(0, list(range(7)))
    other = Sequence(1, [9] * 12)
    like_it = Sequence(2, list(range(8)))
    group, others = (SequenceGroup(str(one.seq_id), one, GREEDY) for one in (seq, other))
    manager.allocate(seq)
    seq.num_computed_tokens = 7
    manager.cache_full_blocks(seq)
    manager.swap_out(group)
    manager.allocate(other)  # takes all, and what could be found is forgotten
    assert manager.get_computed_blocks(like_it) == []
    manager.free(other)
    manager.swap_in(group)
    assert manager.get_computed_blocks(like_it) == manager.get_block_table(seq)[:3]
    manager.check_integrity()


def test_blocks_change_hands_while_a_step_is_in_flight(folder: str) -> None:
    """Each request fills the pool; it stops while its next step runs, and its blocks go to the one
    that waits.
    """
    stops = list(range(0, VOCAB, 4))
    requests = {
        str(i): (
            prompt,
            replace(GREEDY, temperature=1, seed=i, stop_token_ids=stops, max_tokens=10),
        )
        for i, prompt in enumerate(random_prompts(24, longest=22, seed=8))
    }
    with tiny(folder, async_scheduling=False) as llm:
        expected = answer(llm, requests)
    for caching in (False, True):
        with tiny(folder, 8, enable_prefix_caching=caching) as llm, llm.record() as trace:
            assert answer(llm, requests) == expected and num_ahead(trace) > 30


# What goes wrong


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("failing", [1, 2, 3, 10, 17])
@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_fails_in_the_thread(
    folder: str, expected: Answers, mode: str, failing: int, late: bool
) -> None:
    """Before the model or after it, with the next step waiting behind: what ran ends with an error,
    the others do not notice.
    """
    with tiny(folder, 24, preemption_mode=mode) as llm:
        runner = runner_of(llm)
        running = set()
        calls = count(1)
        forward = runner.model_inputs

        def failing_once(*args: Any) -> Any:
            fails = next(calls) == failing
            result = forward(*args) if late or not fails else None
            if fails:
                running.update(group.request_id for group in core_of(llm).scheduler.running)
                raise ZeroDivisionError(f"step {failing}")
            return result

        runner.model_inputs = failing_once
        failed = check_but_for_errors(
            answer(llm, make_requests()), expected, make_requests(), f"step {failing}"
        )
        assert 0 < len(failed) < len(expected) and running
        assert answer(llm, make_requests()) == expected


def test_a_call_comes_after_the_steps_that_were_sent(folder: str) -> None:
    "What the core asks of the worker is asked in its order, though steps are in a thread."
    with tiny(folder) as llm:
        executor = llm.llm_engine.engine_core.engine_core.executor
        runner = runner_of(llm)
        run = runner.execute_model
        may_run = threading.Event()
        done = []

        def noted(*args: Any) -> Any:
            done.append("step")
            return run(*args)

        executor.thread.submit(may_run.wait, 60)
        with patch.object(runner, "execute_model", noted):
            executor.submit(SchedulerOutput())
            threading.Timer(0.2, may_run.set).start()
            executor.collective_rpc(lambda worker: done.append("call"))
        assert done == ["step", "call"]
        executor.collect()


def test_every_step_fails_now_and_then(folder: str, expected: Answers) -> None:
    """In the worker, in the scheduler, on the way between them, and among the outputs before any of
    them is touched.
    """
    rng = random.Random(0)
    failures = 0
    failed = set()
    with tiny(folder, 24) as llm:
        engine = llm.llm_engine
        core = core_of(llm)
        runner = runner_of(llm)

        def now_and_then(call: Callable) -> Callable:
            def maybe(*args: Any) -> Any:
                nonlocal failures
                if rng.random() < 0.02:
                    failures += 1
                    raise ZeroDivisionError
                return call(*args)

            return maybe

        for owner, name in (
            (runner, "model_inputs"),
            (core.executor, "submit"),
            (core.scheduler, "schedule"),
            (core.scheduler, "update_from_output"),
            (core.look_ahead, "can_run_ahead"),
        ):
            setattr(owner, name, now_and_then(getattr(owner, name)))
        for _ in range(6):
            told = Told(make_requests())
            for name, request in make_requests().items():
                engine.add_request(name, *request)
            while engine.has_unfinished_requests():
                try:
                    told.take(engine.step())
                except ZeroDivisionError:
                    pass
                core.scheduler.block_manager.check_integrity()
            failed |= check_but_for_errors(told.answers, expected, make_requests())
        assert len(failed) > 3 and failures > 5
        rng.random = lambda: 1.0  # type: ignore[method-assign]
        check_nothing_left(llm)
        assert answer(llm, make_requests()) == expected


def collecting(collect: Callable[[], Any], waits: threading.Event) -> Callable[[], Any]:
    "An executor's `collect`; `waits` is set while the host is in it."

    def waiting() -> Any:
        waits.set()
        try:
            return collect()
        finally:
            waits.clear()

    return waiting


@pytest.mark.parametrize("step", [1, 2, 5, 12])
def test_ctrl_c_while_the_host_waits(folder: str, expected: Answers, step: int) -> None:
    "A real signal, which comes while the worker's thread is in the midst of a step."
    seen = threading.Event()
    waits = threading.Event()
    calls = count(1)
    default = signal.getsignal(signal.SIGINT)

    def interrupt(*args: Any) -> None:
        if waits.is_set() and not seen.is_set():
            seen.set()
            raise KeyboardInterrupt

    with tiny(folder, 24) as llm:
        runner = runner_of(llm)
        executor = core_of(llm).executor
        forward = runner.model_inputs
        executor.collect = collecting(executor.collect, waits)

        def interrupted(*args: Any) -> Any:
            tries = 3000 if next(calls) == step else 0
            # one that comes before the host waits for a step is passed over
            while tries and not seen.wait(0.02):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                tries -= 1
            return forward(*args)

        runner.model_inputs = interrupted
        signal.signal(signal.SIGINT, interrupt)
        try:
            answers = answer(llm, make_requests(), KeyboardInterrupt)
        finally:
            signal.signal(signal.SIGINT, default)
        failed = check_but_for_errors(answers, expected, make_requests(), "KeyboardInterrupt")
        assert seen.is_set() and 0 < len(failed) < len(expected)
        assert answer(llm, make_requests()) == expected


@pytest.mark.parametrize("where", ["recover", "reset", "drain"])
def test_ctrl_c_twice(folder: str, expected: Answers, where: str) -> None:
    "A step fails, and Ctrl-C comes in the recovery: it is held until that is over."
    with tiny(folder, 24) as llm:
        core = core_of(llm)
        runner = runner_of(llm)
        owner: Any = {"recover": core.scheduler, "reset": runner, "drain": core.executor}[where]
        forward = runner.model_inputs
        call = getattr(owner, where)
        calls = count(1)
        interrupts = count()

        def interrupted(*args: Any) -> None:
            if next(interrupts) == 0:
                signal.raise_signal(signal.SIGINT)
            call(*args)

        setattr(owner, where, interrupted)
        runner.model_inputs = lambda *args: forward(*args) if next(calls) != 9 else 1 / 0
        answers = answer(llm, make_requests(), (ZeroDivisionError, KeyboardInterrupt))
        failed = check_but_for_errors(answers, expected, make_requests(), "ZeroDivisionError")
        assert 0 < len(failed) < len(expected) and next(interrupts) > 0
        assert answer(llm, make_requests()) == expected


@pytest.mark.parametrize("step", [1, 4, 9, 15])
def test_aborts_in_flight(folder: str, expected: Answers, step: int) -> None:
    """Of all kinds and in all states; one comes again at once, under its old name, while its old
    tokens are on their way.
    """
    with tiny(folder, 24) as llm:
        engine = llm.llm_engine
        requests = make_requests()
        manager = core_of(llm).scheduler.block_manager
        told = Told(requests)
        leaving = ["seeded", "forks", "beams", "eos late", "best", "greedy"]
        for name, request in requests.items():
            engine.add_request(name, *request)
        for _ in range(step):
            told.take(engine.step())
        leaving = [name for name in leaving if name not in told.finished]
        engine.abort_request([*leaving, "unknown"])
        manager.check_integrity()
        for name in leaving:
            told.answers.pop(name, None)
        for name in leaving[-1:]:
            engine.add_request(name, *requests[name])
        while engine.has_unfinished_requests():
            told.take(engine.step())
            manager.check_integrity()
        check_nothing_left(llm)
        assert len(leaving) > 1 and told.answers == {
            name: expected[name] for name in expected if name not in leaving[:-1]
        }


def test_generate_works_after_what_was_given_up(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborted with a step in flight, or by Ctrl-C between two steps: the engine is free for others
    at once.
    """
    with tiny(folder) as llm:
        engine = llm.llm_engine
        expected = llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        for num_steps in (0, 1, 2, 5):
            engine.add_request("a", [5, 6], GREEDY)
            engine.add_request("b", [9] * 20, replace(GREEDY, temperature=1, n=2))
            for _ in range(num_steps):
                engine.step()
            ahead = num_steps > 0  # the fork waits for its tokens, the other request goes on
            assert bool(core_of(llm).in_flight) == ahead
            engine.abort_request(["a", "b"])
            assert (
                llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
            )
            check_nothing_left(llm)
        with monkeypatch.context() as patched:
            patched.setattr(
                "teachvllm.llm.ProgressBar.update", lambda *args: signal.raise_signal(signal.SIGINT)
            )
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[5, 6], [7]], [replace(GREEDY, max_tokens=3), GREEDY], use_tqdm=False)
        assert llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
        check_nothing_left(llm)


@pytest.mark.parametrize("fails", [False, True])
def test_close_with_a_step_in_flight(folder: str, fails: bool) -> None:
    "It waits for it, whatever becomes of it, and the thread is gone."
    with tiny(folder) as llm:
        engine = llm.llm_engine
        forward = runner_of(llm).model_inputs
        calls = count(1)
        begun = threading.Event()
        may_end = threading.Event()

        def third_waits(*args: Any) -> Any:
            if next(calls) == 3:
                begun.set()
                assert may_end.wait(20)
                return 1 / 0 if fails else forward(*args)
            return forward(*args)

        runner_of(llm).model_inputs = third_waits
        engine.add_request("a", [5, 6, 7], GREEDY)
        engine.step()
        engine.step()
        assert begun.wait(20) and core_of(llm).in_flight
        threading.Timer(0.2, may_end.set).start()
        engine.close()
        assert may_end.is_set() and not worker_threads() and not engine.has_unfinished_requests()
        engine.close()
        for call in (
            lambda: llm.collective_rpc("reset"),
            lambda: engine.add_request("b", [5], GREEDY),
        ):
            with pytest.raises(ValueError, match="closed"):
                call()


def gone(thread: threading.Thread) -> bool:
    thread.join(timeout=20)
    return not thread.is_alive()


def test_a_dropped_engine_is_collected_and_its_thread_ends(folder: str) -> None:
    for num_steps in (0, 1, 3):
        llm = tiny(folder)
        llm.llm_engine.add_request("a", [5, 6, 7], GREEDY)
        for _ in range(num_steps):
            llm.llm_engine.step()
        threads = worker_threads()
        assert len(threads) == (num_steps > 0)  # it begins with the first step
        engine = weakref.ref(llm.llm_engine)
        del llm
        gc.collect()
        assert engine() is None and all(gone(thread) for thread in threads)
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        tiny(folder, None, gpu_memory_utilization=1e-6)  # type: ignore[arg-type]
    gc.collect()
    assert all(gone(thread) for thread in worker_threads())


def test_two_engines(folder: str, expected: Answers) -> None:
    "Step by step in turn: each has a thread, and keeps to its own requests."
    with tiny(folder) as a, tiny(folder, 24, block_size=2, max_num_batched_tokens=9) as b:
        requests = {
            name: request
            for name, request in make_requests().items()
            if name not in ("best", "forks")
        }
        both = [(llm, Told(requests)) for llm in (a, b)]
        for llm, _ in both:
            for name, request in requests.items():
                llm.llm_engine.add_request(name, *request)
        while any(llm.llm_engine.has_unfinished_requests() for llm, _ in both):
            for llm, told in both:
                told.take(llm.llm_engine.step())
        assert len(worker_threads()) == 2
        for llm, told in both:
            check_nothing_left(llm)
            assert told.answers == {name: expected[name] for name in requests}


# Other executors


class Counting(UniProcExecutor):
    "A reader's executor, which counts its steps."

    num_steps = 0

    def collect(self) -> ModelRunnerOutput:
        self.num_steps += 1
        return super().collect()


@pytest.mark.parametrize("executor, counter", [(Counting, "num_steps"), (DummyExecutor, "seconds")])
def test_a_readers_executor(folder: str, executor: type, counter: str) -> None:
    answers = []
    counts = []
    params = replace(GREEDY, stop_token_ids=list(range(9)), temperature=1, seed=1)
    for ahead in (False, True):
        with tiny(folder, async_scheduling=ahead, distributed_executor_backend=executor) as llm:
            outputs = llm.generate(random_prompts(5), params, use_tqdm=False)
            answers.append([o.outputs[0].token_ids for o in outputs])
            counts.append(getattr(core_of(llm).executor, counter))
    assert answers[0] == answers[1] and 0 < counts[0] <= counts[1]


# Numbers and recordings


def test_metrics(folder: str) -> None:
    counted = []
    for ahead in (False, True):
        with tiny(folder, async_scheduling=ahead) as llm:
            outputs = llm.generate(random_prompts(6), GREEDY, use_tqdm=False)
            for m in (output.metrics for output in outputs):
                assert (
                    m.arrival_time
                    <= m.first_scheduled_time
                    <= m.first_token_time
                    <= m.finished_time
                )
                assert m.num_preemptions == 0
            metrics = llm.get_metrics()
            assert metrics["num_gpu_blocks_used"] == 0 < metrics["peak_gpu_blocks_used"] <= 400
            assert metrics["num_preemptions"] == metrics["num_evicted_blocks"] == 0
            counted.append(metrics)
    assert counted[0] == counted[1]


def test_a_recording(folder: str, expected: Answers, tmp_path: Path) -> None:
    """Every sequence that finished is listed once; host and device do one thing at a time, and
    steps come in order.
    """
    waits = threading.Event()
    moments = list[float]()
    with tiny(folder, 24) as llm:
        forward = runner_of(llm).model_inputs
        executor = core_of(llm).executor
        executor.collect = collecting(executor.collect, waits)

        def held(*args: Any) -> Any:
            assert waits.wait(60)
            moments.append(time.perf_counter())
            return forward(*args)

        with llm.record() as trace:
            begin = core_of(llm).recorder.begin
            runner_of(llm).model_inputs = held
            assert answer(llm, make_requests()) == expected
    listed = [name for step in trace.steps for name in step.finished]
    assert len(listed) == len(set(listed)) and set(listed) <= set(trace.num_prompt_tokens)
    # a beam's own name may be given up
    assert {name.partition(".")[0] for name in listed} == set(make_requests())
    ended: dict[str, int] = {}
    for i, step in enumerate(trace.steps):
        assert all(ended.get(name, i) >= i - 1 for name in step.num_scheduled_tokens), (
            "computed long after its end"
        )
        ended |= dict.fromkeys(step.finished, i)
        held = {block for table in step.block_tables.values() for block in table}
        assert step.num_free_blocks == trace.num_blocks - len(held)
    spans = sorted(
        (begin, begin + seconds) for step in trace.steps for _, begin, seconds in host_phases(step)
    )
    assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans)), "the host does two things at once"
    device = [
        (s.device_start, s.device_start + s.device_seconds)
        for s in trace.steps
        if s.num_scheduled_tokens
    ]
    assert all(a[0] < a[1] <= b[0] for a, b in pairwise(device)), (
        "the device does two things at once"
    )
    assert all(
        s.start < s.device_start + s.device_seconds <= s.process_start
        for s in trace.steps
        if s.num_scheduled_tokens
    )
    assert all(0 <= s.wait_seconds <= s.execute_seconds for s in trace.steps)
    waited = [
        phase[1:] for step in trace.steps for phase in host_phases(step) if phase[0] == "wait"
    ]
    met = [
        start <= moment - begin <= start + seconds
        for moment in moments
        for start, seconds in waited
    ]
    assert any(met), "the host never waited"
    assert Trace.load(trace.save(tmp_path / "trace.json")).steps == trace.steps


@pytest.mark.parametrize("gap", [0, 1])
def test_a_recording_that_begins_or_ends_in_the_middle(folder: str, gap: int) -> None:
    "What is in flight then belongs to neither."
    with tiny(folder) as llm:
        engine = llm.llm_engine
        params = replace(GREEDY, temperature=1, stop_token_ids=list(range(0, VOCAB, 2)))
        for i in range(4):
            engine.add_request(str(i), [i + 3] * 5, replace(params, seed=i))
        traces = []
        while engine.has_unfinished_requests():
            for _ in range(gap):
                engine.step()
            with llm.record() as trace:
                engine.step()
                engine.step()
            traces.append((trace, repr(trace.steps)))
        assert all(repr(trace.steps) == steps for trace, steps in traces), "changed after its end"
        for trace, _ in traces:
            finished = [name for step in trace.steps for name in step.finished]
            assert len(set(finished)) == len(finished)
            for step in trace.steps:
                assert step.process_start is None or step.process_start >= step.start


# Everything at once


@pytest.mark.parametrize("seed", range(6))
def test_random_loads_on_a_model(folder: str, alone: LLM, seed: int) -> None:
    """Small engines of random sizes, requests of all kinds that come and are aborted at any time,
    and steps that fail.
    """
    rng = random.Random(seed)
    options = {
        "block_size": (size := rng.choice([1, 2, 4, 16])),
        "num_blocks": 100 // size + 6,
        "max_num_seqs": rng.choice([3, 5, 20]),
        "max_num_batched_tokens": rng.choice([3, 8, 64]),
        "enable_prefix_caching": rng.random() < 0.5,
        "preemption_mode": rng.choice([None, "recompute", "swap"]),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
    }
    requests = {str(i): random_request_of(rng) for i in range(16)}
    told = Told(requests)
    todo = deque(requests)
    aborted = set()
    with tiny(folder, **options) as llm:
        engine = llm.llm_engine
        runner = runner_of(llm)
        forward = runner.model_inputs
        runner.model_inputs = lambda *args: forward(*args) if rng.random() > 0.03 else 1 / 0
        while todo or engine.has_unfinished_requests():
            if todo and rng.random() < 0.5:
                name = todo.popleft()
                priority = rng.randrange(3) if options["scheduling_policy"] == "priority" else 0
                engine.add_request(name, *requests[name], priority=priority)
            if rng.random() < 0.04:
                name = rng.choice(sorted(requests))
                aborted |= {name} - set(todo) - told.finished
                engine.abort_request(name)
            try:
                told.take(engine.step())
            except ZeroDivisionError:
                pass
            core_of(llm).scheduler.block_manager.check_integrity()
        runner.model_inputs = forward
        check_nothing_left(llm)
    assert told.finished | aborted == set(requests) and not told.finished & aborted
    wanted = {name: answer(alone, {name: requests[name]})[name] for name in told.finished}
    failed = check_but_for_errors(
        {name: told.answers[name] for name in told.finished}, wanted, requests
    )
    assert len(failed) < len(wanted), options


@pytest.fixture(scope="module")
def alone(folder: str) -> Iterator[LLM]:
    "A synchronous engine with all the room it wants."
    with tiny(folder, async_scheduling=False) as llm:
        yield llm


def random_request_of(rng: random.Random) -> tuple[list[int], Params]:
    prompt = [rng.randrange(3, 6)] * rng.choice([0, 8, 16]) + [
        rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 12))
    ]
    if rng.random() < 0.2:
        return prompt, BeamSearchParams(rng.choice([2, 3]), rng.choice([1, 8]), rng.random() < 0.5)
    n = rng.choice([1, 1, 1, 2, 3])
    return prompt, SamplingParams(
        n=n,
        best_of=3 if n == 2 else None,
        temperature=rng.choice([0, 1.0]) if n == 1 else 1.0,
        top_p=rng.choice([1, 0.8]),
        top_k=rng.choice([-1, 5]),
        seed=rng.randrange(100),
        max_tokens=rng.choice([1, 2, 5, 15]),
        ignore_eos=rng.random() < 0.5,
        min_tokens=rng.choice([0, 1]),
        stop_token_ids=rng.choice([[], [7], [1, 2, 3, 4]]),
        output_kind=rng.choice(
            [k for k in RequestOutputKind if n != 2 or k is not RequestOutputKind.DELTA]
        ),
    )
