"""Block allocator, block manager and scheduler without a model: whatever happens, each sequence
reads what it wrote.

A simulated worker carries out the scheduler's orders on slots that remember which text was computed
into them. It has no tensors and no weights; its next token is a hash of what it reads. So a wrong
hit, copy or swap shows at once.
"""

import linecache
import random
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from teachvllm import LLMEngine, RequestOutputKind, SamplingParams
from teachvllm.attention.backend import KVCacheSpec
from teachvllm.config import (
    CacheConfig,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from teachvllm.core.beam_search import BeamSearch
from teachvllm.core.block_allocator import BlockAllocator, NoFreeBlocksError
from teachvllm.core.block_manager import NULL_BLOCK, AllocStatus, BlockSpaceManager, num_blocks_for
from teachvllm.core.orders import SchedulerOutput
from teachvllm.executor.executor_base import EngineDeadError, ExecutorBase
from teachvllm.messages import ModelRunnerOutput
from teachvllm.sampling_params import BeamSearchParams
from teachvllm.sequence import Sequence, SequenceGroup, SequenceStatus, sequence_seed

OPERATIONS: Counter[str] = Counter()  # what the three state machines did, by machine


# A worker without a model

VOCAB = 6
STOP = VOCAB - 1  # the token that ends a request that does not ignore it


def read_text(token_ids: list[int]) -> list[int]:
    "What a slot remembers: for each position, a hash of all tokens up to there."
    states = []
    state = 0
    for token_id in token_ids:
        state = hash((state, token_id))
        states.append(state)
    return states


def likeliest(state: int, count: int) -> list[tuple[int, float]]:
    """The simulated model's next tokens after the text `state`, the likeliest first, with their
    log-probabilities.
    """
    scored = [
        (token_id, -5 * (hash((state, token_id, 1)) % 2**48) / 2**48) for token_id in range(VOCAB)
    ]
    return sorted(scored, key=lambda pair: (-pair[1], pair[0]))[:count]


def draw(
    state: int, params: SamplingParams, seed: int, allowed: Iterable[int] = range(VOCAB)
) -> int:
    "The simulated model's next token, of those that are allowed."
    allowed = list(allowed)
    if params.temperature == 0:
        return next(t for t, _ in likeliest(state, VOCAB) if t in allowed)
    return allowed[hash((state, seed, 2)) % len(allowed)]


class Row:
    "What the simulated worker knows of a sequence."

    def __init__(self, token_ids: list[int], computed: int, table: list[int], seed: int, new: Any):
        self.token_ids = token_ids
        self.computed = computed
        self.table = table
        self.seed = seed
        self.new = new
        self.num_samples = new.num_samples
        self.num_known = len(token_ids)  # the rest it has sampled
        self.drafts: list[int] = []  # in this step, behind its tokens

    def fork(self, seed: int) -> "Row":
        "One with the same past."
        child = Row(list(self.token_ids), self.computed, list(self.table), seed, self.new)
        child.num_samples = self.num_samples
        child.num_known = self.num_known
        return child

    def set_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        "(Index in the table, block) of each block that is another one, or new at its end."
        for index, block_id in pairs:
            assert index <= len(self.table), "a hole in a block table"
            self.table[index : index + 1] = [block_id]


class SimulatedWorker:
    "Carries out orders exactly, and asserts that no sequence reads what another one wrote."

    def __init__(self, config: VllmConfig, num_cpu_blocks: int):
        self.config = config
        self.num_cpu_blocks = num_cpu_blocks
        self.block_size = config.cache_config.block_size
        self.num_gpu_blocks = config.cache_config.num_gpu_blocks_override
        self.window = config.model_config.sliding_window or 10**9
        self.scheduler: Any = None
        self.before: list[Callable[[], None]] = []  # called once, between schedule and execute
        self.after: list[Callable[[], None]] = []  # called once, between execute and update
        self.reset()

    def reset(self) -> None:
        "Forget all sequences; the cache holds garbage."
        self.rows: dict[int, Row] = {}
        self.gpu = [[-1] * self.block_size for _ in range(self.num_gpu_blocks)]
        self.cpu = [[-1] * self.block_size for _ in range(self.num_cpu_blocks)]
        self.sampled: deque[ModelRunnerOutput] = deque()

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return {"layer": KVCacheSpec(1, 1, "float32", self.config.model_config.sliding_window)}

    def submit(self, out: SchedulerOutput) -> None:
        while self.before:
            self.before.pop()()
        self.move(out)
        self.update(out)
        self.compare_with_scheduler(out)
        self.write(out)
        for seq_id, num_tokens in out.num_scheduled_tokens.items():
            row = self.rows[seq_id]
            states = read_text(row.token_ids + row.drafts)
            self.check_reads(states, row.computed, row.table, self.gpu, num_tokens)
        self.sampled.append(self.sample(out))
        while self.after:
            self.after.pop()()

    def collect(self) -> ModelRunnerOutput:
        return self.sampled.popleft()

    def move(self, out: SchedulerOutput) -> None:
        "Swap out, swap in, copy: each as one gather and one scatter."
        assert not (out.blocks_to_swap_out and out.blocks_to_swap_in), "copies in and out cross"
        moves = (
            (out.blocks_to_swap_out, self.gpu, self.cpu),
            (out.blocks_to_swap_in, self.cpu, self.gpu),
            (out.blocks_to_copy, self.gpu, self.gpu),
        )
        for pairs, source, target in moves:
            assert len({to for _, to in pairs}) == len(pairs), "two blocks are copied to one place"
            assert source is not target or not {a for a, _ in pairs} & {b for _, b in pairs}, (
                "a copy of a copy"
            )
            contents = [list(source[a]) for a, _ in pairs]
            for (_, b), content in zip(pairs, contents, strict=True):
                target[b] = content

    def update(self, out: SchedulerOutput) -> None:
        rows = self.rows
        for fork in out.forked_seqs:
            parent = rows[fork.parent_seq_id]
            assert fork.seq_id not in rows
            rows[fork.seq_id] = parent.fork(fork.seed)
        for seq_id, token_ids in out.new_token_ids.items():
            row = rows[seq_id]
            row.token_ids[row.num_known :] = token_ids
            row.num_known = len(row.token_ids)
            # drafts behind them were wrong: their slots are written again
            row.computed = min(row.computed, row.num_known - 1)
            # and blocks behind them are free
            del row.table[num_blocks_for(row.num_known, self.block_size) :]
        for seq_id in out.finished_seq_ids:
            assert rows.pop(seq_id, None), (
                "the worker is told to forget a sequence that it does not know"
            )
        for new in out.new_seqs:
            assert new.seq_id not in rows, "a sequence comes twice"
            rows[new.seq_id] = Row(
                list(new.token_ids), new.num_computed_tokens, list(new.block_ids), new.seed, new
            )
        for seq_id, block_ids in out.new_block_ids.items():
            rows[seq_id].set_blocks(enumerate(block_ids, len(rows[seq_id].table)))
        for seq_id, copies in out.copied_block_ids.items():
            rows[seq_id].set_blocks(copies)
        for seq_id, row in rows.items():
            row.drafts = out.scheduled_spec_decode_tokens.get(seq_id, [])
            num_computed = row.computed + out.num_scheduled_tokens.get(seq_id, 0)
            assert not row.drafts or num_computed == len(row.token_ids) + len(row.drafts), (
                "drafts without the token before them"
            )

    def compare_with_scheduler(self, out: SchedulerOutput) -> None:
        """The worker knows exactly what the scheduler knew before it decided the step, and what was
        computed is still there.

        The scheduler counts this step's tokens as computed, the worker does not yet.
        """
        manager = self.scheduler.block_manager
        assert set(self.rows) == set(manager.block_tables)
        for seq_id, row in self.rows.items():
            group, seq = self.scheduler.seqs[seq_id]
            known = row.token_ids
            if seq_id in getattr(group.fork_rule, "samples", ()):
                # a beam, which goes on when the others are computed, too
                known = known[: seq.get_len()]
            assert known == seq.token_ids and row.seed == seq.seed
            assert row.computed + out.num_scheduled_tokens.get(seq_id, 0) == seq.num_computed_tokens
            table = manager.block_tables[seq_id]
            assert len(row.table) == len(table)
            assert all(known in (NULL_BLOCK, here) for known, here in zip(table, row.table))
        for seq_id, table in manager.cpu_block_tables.items():
            _, seq = self.scheduler.seqs[seq_id]
            states = read_text(seq.token_ids)
            self.check_reads(states, seq.num_computed_tokens, table, self.cpu)

    def write(self, out: SchedulerOutput) -> None:
        written = set()
        for seq_id, num_tokens in out.num_scheduled_tokens.items():
            row = self.rows[seq_id]
            states = read_text(row.token_ids + row.drafts)
            assert 0 < num_tokens <= len(states) - row.computed
            for position in range(row.computed, row.computed + num_tokens):
                slot = row.table[position // self.block_size], position % self.block_size
                assert slot not in written and slot[0] != NULL_BLOCK, "two write to one slot"
                written.add(slot)
                self.gpu[slot[0]][slot[1]] = states[position]
            row.computed += num_tokens

    def check_reads(
        self,
        states: list[int],  # of the whole text
        num_computed: int,
        table: list[int],
        pool: list[list[int]],
        num_queries: int = 0,
    ) -> None:
        "All that the queries look at is what belongs to this text."
        size = self.block_size
        for position in range(max(0, num_computed - num_queries - self.window + 1), num_computed):
            block_id = table[position // size]
            assert block_id != NULL_BLOCK and pool[block_id][position % size] == states[position], (
                f"wrong at {position}"
            )

    def sample(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """For each sequence whose tokens are all computed a token, or several first ones, or one
        behind each draft that is right, and one more.
        """
        out = ModelRunnerOutput([], [])
        for seq_id in step.num_scheduled_tokens:
            row = self.rows[seq_id]
            if row.computed < len(row.token_ids):
                continue
            masks = step.grammar_bitmask.get(seq_id, [])
            group, _ = self.scheduler.seqs.get(seq_id, (None, None))
            assert group is None or len(masks) == (
                1 + len(row.drafts) if group.grammar is not None else 0
            )
            first = len(out.seq_ids)
            for j in range(row.num_samples):
                tokens, scores = self.write_on(row, sequence_seed(row.seed, j), masks)
                if row.new.num_logprobs is not None:
                    out.logprobs[len(out.seq_ids)] = scores
                out.seq_ids.append(seq_id)
                out.sampled_token_ids.append(tokens)
            row.num_known = len(row.token_ids)
            if not row.drafts:  # else it is told how many were right
                row.token_ids += out.sampled_token_ids[first]
            row.num_samples = 1
        return out

    def write_on(
        self, row: Row, seed: int, masks: list[bytes]
    ) -> tuple[list[int], list[tuple[float, int, list[tuple[int, float]]]]]:
        "The next tokens of a text, as far as its drafts are right, and what they are worth."
        text = list(row.token_ids)
        tokens = []
        scores = []
        for i, draft in enumerate([*row.drafts, None]):
            state = read_text(text)[-1]
            allowed = range(VOCAB)
            if masks:
                bits = int.from_bytes(masks[i], "little")
                allowed = [t for t in range(VOCAB) if bits >> t & 1]
            tokens.append(draw(state, row.new.sampling_params, seed, allowed))
            everything = likeliest(state, VOCAB)
            rank = 1 + [one for one, _ in everything].index(tokens[-1])
            num_top = row.new.num_logprobs or 0
            scores.append((dict(everything)[tokens[-1]], rank, everything[:num_top]))
            if tokens[-1] != draft:
                break
            text.append(draft)
        return tokens, scores


class SimulatedExecutor(ExecutorBase):
    """One simulated worker; `num_cpu_blocks` is a class attribute so that an engine can be given a
    class.
    """

    num_cpu_blocks = 0

    def _init_executor(self) -> None:
        self.worker = SimulatedWorker(self.config, self.num_cpu_blocks)

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: tuple = (), kwargs: Any = None
    ) -> list[Any]:
        return [getattr(self.worker, method)(*args)] if hasattr(self.worker, method) else [None]

    def determine_num_available_blocks(self) -> tuple[int, int]:
        return self.worker.num_gpu_blocks, self.num_cpu_blocks

    def shutdown(self) -> None:
        pass


# What the answers must be, without an engine

Params = SamplingParams | BeamSearchParams


def write_alone(
    prompt: list[int], params: SamplingParams, seed: int, longest: int, grammar: Any = None
) -> tuple[list[int], float]:
    "One sample of the simulated model, and its log-probability."
    text = list(prompt)
    total = 0.0
    while len(text) < min(longest, len(prompt) + (params.max_tokens or longest)):
        state = read_text(text)[-1]
        allowed = grammar.allowed(text[len(prompt) :]) if grammar else range(VOCAB)
        text.append(draw(state, params, seed, allowed))
        total += dict(likeliest(state, VOCAB))[text[-1]]
        if text[-1] in params.stop_token_ids:
            break
    return text[len(prompt) :], total


def search_alone(prompt: list[int], params: BeamSearchParams, longest: int) -> list[list[int]]:
    "Beam search over plain lists."
    stops = frozenset() if params.ignore_eos else frozenset({STOP})
    search = BeamSearch(params, stops, min(params.max_tokens, longest - len(prompt)))
    beams = [Sequence(0, prompt)]
    while beams:
        tops = [likeliest(read_text(beam.token_ids)[-1], search.num_candidates) for beam in beams]
        chosen = search.choose(beams, tops)
        parents = beams
        beams = []
        for i, token_id, logprob in chosen:
            beam = parents[i].fork(0, 0, 0)
            beam.token_ids.append(token_id)
            beam.cumulative_logprob = logprob
            beams.append(beam)
    return [found.token_ids for found in search.hypotheses]


def answers(
    prompt: list[int], params: Params, longest: int, grammar: Any = None
) -> list[list[int]]:
    "The token ids of all outputs of a request, if there is memory for it."
    if isinstance(params, BeamSearchParams):
        return search_alone(prompt, params, longest)
    seeds = [sequence_seed(params.seed or 0, j) for j in range(params.num_seqs)]
    samples = [write_alone(prompt, params, seed, longest, grammar) for seed in seeds]
    if params.num_seqs > params.n:
        samples = sorted(samples, key=lambda sample: -sample[1])[: params.n]
    return [token_ids for token_ids, _ in samples]


# An engine around it

DEFAULTS: dict[str, Any] = {
    "block_size": 4,
    "num_gpu_blocks": 12,
    "num_cpu_blocks": 12,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 16,
    "caching": True,
    "policy": "fcfs",
    "preemption_mode": None,
    "chunked": True,
    "window": None,
    "max_model_len": 64,
    "async_scheduling": False,
    "max_num_partial_prefills": 1,
    "max_long_partial_prefills": 1,
    "long_prefill_token_threshold": 0,
    "pipeline_parallel_size": 1,
}


class Simulation:
    """An engine with a simulated worker, and what its users were told; after each step everything
    is checked.
    """

    executor_class: type[SimulatedExecutor] = SimulatedExecutor

    def __init__(self, **options: Any):
        self.options = o = {**DEFAULTS, **options}
        if not o["chunked"]:
            o["max_num_batched_tokens"] = max(o["max_num_batched_tokens"], o["max_model_len"])
        hf = SimpleNamespace(
            max_position_embeddings=o["max_model_len"],
            vocab_size=VOCAB,
            sliding_window=o["window"],
            num_hidden_layers=2,
        )
        config = VllmConfig(
            ModelConfig(
                "none",
                Path("/"),
                hf,
                Path(),
                o["max_model_len"],
                skip_tokenizer_init=True,
                generation_config="vllm",
            ),
            CacheConfig(
                o["block_size"],
                num_gpu_blocks_override=o["num_gpu_blocks"],
                enable_prefix_caching=o["caching"],
            ),
            SchedulerConfig(
                o["max_model_len"],
                o["max_num_seqs"],
                o["max_num_batched_tokens"],
                o["chunked"],
                o["policy"],
                o["preemption_mode"],
                o["async_scheduling"],
                max_num_partial_prefills=o["max_num_partial_prefills"],
                max_long_partial_prefills=o["max_long_partial_prefills"],
                long_prefill_token_threshold=o["long_prefill_token_threshold"],
            ),
            ParallelConfig(pipeline_parallel_size=o["pipeline_parallel_size"]),
            DeviceConfig("cpu"),
            LoadConfig(),
        )
        executor_class = type(
            "Executor", (self.executor_class,), {"num_cpu_blocks": o["num_cpu_blocks"]}
        )
        self.engine = LLMEngine(config, executor_class)
        self.engine.processor.eos_token_ids = frozenset({STOP})
        self.core = self.engine.engine_core.engine_core  # type: ignore[attr-defined]
        self.scheduler = self.core.scheduler
        self.worker = self.core.executor.worker
        self.worker.scheduler = self.scheduler
        self.requests: dict[str, tuple[list[int], Params]] = {}
        self.told: dict[str, list[list[int]]] = {}
        self.reasons: dict[str, list[str]] = {}  # of the finished ones
        self.gone: set[str] = set()  # aborted
        self.grammars: dict[str, Any] = {}  # of those requests that have one
        self.late: set[str] = set()  # requests that were not ready when they came
        self.may_fail: set[str] = set()  # requests that were in a step that failed
        # by request and answer, of those that tell deltas
        self.ends: dict[str, dict[int, str]] = {}
        self.preempted: list[str] = []  # requests, as often as they were
        self.num_steps = 0
        schedule = self.scheduler.schedule
        self.scheduler.schedule = lambda: self.check_schedule(schedule)

    def add(self, prompt: list[int], params: Params, priority: int = 0) -> str | None:
        "The new request's id, or None if it was refused because it can never run."
        name = str(len(self.requests))
        try:
            self.engine.add_request(
                name, prompt, params, priority if self.options["policy"] == "priority" else 0
            )
        except ValueError as error:
            assert "blocks" in str(error) or "max_num_seqs" in str(error)
            return None
        self.requests[name] = prompt, params
        self.told[name] = []
        return name

    def abort(self, name: str) -> None:
        self.gone |= {name} - set(self.reasons)
        self.engine.abort_request(name)
        self.scheduler.block_manager.check_integrity()

    def reset_prefix_cache(self) -> None:
        "As a user may at any time: nothing happens while requests hold blocks."
        busy = bool(self.scheduler.running or self.scheduler.swapped)
        assert self.engine.reset_prefix_cache() is not busy

    def open(self) -> list[str]:
        "The requests that are neither finished nor aborted."
        return [
            name for name in self.requests if name not in self.reasons and name not in self.gone
        ]

    def groups(self) -> list[SequenceGroup]:
        queues = ("running", "waiting", "swapped", "not_ready")
        return [group for name in queues for group in getattr(self.scheduler, name)]

    def decoding(self) -> list[tuple[SequenceGroup, Sequence]]:
        "The sequences that lack their newest token, and drafts perhaps, like all of their request."
        return [
            (group, seq)
            for group in self.scheduler.running
            if all(s.num_new_tokens - len(s.spec_token_ids) == 1 for s in group.unfinished)
            for seq in group.unfinished
        ]

    def check_schedule(self, schedule: Callable[[], SchedulerOutput]) -> SchedulerOutput:
        """A sequence that decodes gets a token; the first request by the policy is never preempted;
        none overtakes.
        """
        scheduler = self.scheduler
        key = scheduler.policy.key
        groups = self.groups()
        first = min(groups, key=key, default=None)
        decoding = self.decoding()
        out = schedule()
        self.preempted += out.preempted_request_ids
        for group, seq in decoding:
            gone = group.request_id in out.preempted_request_ids or seq.status.finished
            num_drafts = len(out.scheduled_spec_decode_tokens.get(seq.seq_id, ()))
            assert gone or out.num_scheduled_tokens.get(seq.seq_id) == 1 + num_drafts, (
                "a sequence that decodes got no token"
            )
        assert first is None or first.request_id not in out.preempted_request_ids, (
            "the first was preempted"
        )
        assert out.total_num_scheduled_tokens <= self.options["max_num_batched_tokens"]
        running = sum(len(group.unfinished) for group in scheduler.running)
        assert running <= self.options["max_num_seqs"]
        assert set(out.num_scheduled_tokens) <= set(scheduler.block_manager.block_tables)
        for queue in (scheduler.running, scheduler.waiting, scheduler.swapped):
            assert [key(group) for group in queue] == sorted(key(group) for group in queue)
        if not self.options["caching"]:
            assert not any(group.num_cached_tokens for group in groups), (
                "a hit, though there is no prefix cache"
            )
        if self.options["policy"] == "fcfs" and self.options["max_num_partial_prefills"] == 1:
            begun = [group.arrival for group in groups if group.num_cached_tokens is not None]
            waiting = [
                group.arrival
                for group in scheduler.waiting
                if group.num_cached_tokens is None and group.request_id not in self.late
            ]
            assert not begun or not waiting or max(begun) < min(waiting), "a request was overtaken"
        self.check()
        return out

    def failing(self) -> None:
        "Raised in the worker; the requests that run then are those that may end with an error."
        self.may_fail |= {group.request_id for group in self.scheduler.running}
        raise RuntimeError("boom")

    def step(self, fail: str | None = None, abort: str | None = None) -> None:
        """One step of the engine, which may fail `before` or `after` the worker's part.

        `abort`: meanwhile another thread aborts that request; it must wait until the step is done.
        """
        threads: list[threading.Thread] = []
        open_before = set(self.open())

        def aborting() -> None:
            threads.append(threading.Thread(target=self.engine.abort_request, args=(abort,)))
            threads[0].start()

        if fail:
            {"before": self.worker.before, "after": self.worker.after}[fail].append(self.failing)
        elif abort:
            self.worker.before.append(aborting)
        outputs = []
        failed = False
        try:
            outputs = self.engine.step()
        except RuntimeError as error:
            assert fail and str(error) == "boom"
            failed = True
        for thread in threads:
            thread.join()
        self.worker.before.clear()
        self.worker.after.clear()
        self.num_steps += 1
        self.take(outputs)
        if threads:
            self.gone |= {abort} - set(self.reasons)  # type: ignore[arg-type]
        if not failed:
            assert not self.may_fail & open_before & set(self.open()), (
                "a request in a failed step has not ended"
            )
        self.check()

    def take(self, outputs: list[Any]) -> None:
        for output in outputs:
            name = output.request_id
            (_, params) = self.requests[output.request_id]
            assert name not in self.reasons and name not in self.gone, "told after its end"
            delta = (
                isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA
            )
            ends = self.ends.setdefault(name, {}) if delta else {}
            told = self.told[name] if delta else []
            told += [[] for _ in range(max(o.index for o in output.outputs) + 1 - len(told))]
            for o in output.outputs:
                assert o.index not in ends, "an answer's end is told once"
                told[o.index] = told[o.index] + o.token_ids
                if o.finish_reason is not None:
                    ends[o.index] = o.finish_reason
                if o.finish_reason == "error":
                    assert name in self.may_fail and "boom" in o.stop_reason
            self.told[name] = told
            if output.finished:
                self.reasons[name] = [ends[i] for i in range(len(told))]
                self.check_answer(name)

    def may_fill_the_pool(self, name: str) -> bool:
        """Whether the request, if nothing but its prompt is shared, is too large for the pool: then
        it may end early.

        With a sliding window it is only if what its sequences see at once is.
        """
        prompt, params = self.requests[name]
        width = params.beam_width if isinstance(params, BeamSearchParams) else params.num_seqs
        most = min(self.options["max_model_len"], len(prompt) + (params.max_tokens or 10**9)) + 1
        size = self.options["block_size"]
        window = self.options["window"] or 10**9
        shared = len(prompt) // size
        needed = 0
        for position in range(most):
            # the blocks that its token looks at
            first = max(0, position - window + 1) // size
            end = position // size + 1
            num_shared = max(0, min(shared, end) - first)
            num_seqs = width if position >= len(prompt) else 1
            needed = max(needed, num_shared + num_seqs * (end - first - num_shared))
        return needed > self.options["num_gpu_blocks"]

    def check_answer(self, name: str) -> None:
        prompt, params = self.requests[name]
        grammar = self.grammars.get(name)
        wanted = answers(prompt, params, self.options["max_model_len"], grammar)
        got = self.told[name]
        error = "error" in self.reasons[name]
        if not error and not self.may_fill_the_pool(name):
            assert got == wanted, (name, self.options)
        elif isinstance(params, SamplingParams) and params.num_seqs == params.n:
            for short, whole, reason in zip(got, wanted, self.reasons[name], strict=not error):
                assert short == whole[: len(short)] and (
                    short == whole or reason in ("length", "error")
                )

    def check(self) -> None:
        manager = self.scheduler.block_manager
        scheduler = self.scheduler
        manager.check_integrity()
        here = {
            s.seq_id
            for g in scheduler.running
            for s in g.unfinished
            if s.status is SequenceStatus.RUNNING
        }
        there = {s.seq_id for g in scheduler.swapped for s in g.unfinished}
        # a sequence that waits for those of its group before it has no blocks yet
        tables = {*manager.block_tables, *manager.cpu_block_tables}
        assert set(manager.block_tables) <= here and set(manager.cpu_block_tables) <= there
        assert not any(scheduler.seqs[i][1].num_computed_tokens for i in (here | there) - tables)
        assert all(
            s.status is SequenceStatus.WAITING for g in scheduler.waiting for s in g.unfinished
        )
        groups = self.groups()
        assert all(len(g.unfinished) <= g.get_max_num_running_seqs() for g in groups), (
            "more sequences than were admitted"
        )

    def finish(self) -> None:
        "Run to the end: each request that was not aborted is answered, and nothing is left behind."
        limit = self.num_steps + 200 + 100 * len(self.open())
        while self.engine.has_unfinished_requests():
            self.step()
            assert self.num_steps < limit, f"no end: {self.options}"
        self.check_nothing_left()

    def check_nothing_left(self) -> None:
        assert not self.open()
        self.engine.step()  # tells the worker which sequences ended last
        manager = self.scheduler.block_manager
        manager.check_integrity()
        assert (
            manager.get_num_free_gpu_blocks() == manager.num_gpu_blocks
            and not manager.cpu_block_tables
        )
        assert manager.cpu_allocator.get_num_free_blocks() == manager.num_cpu_blocks
        assert not self.worker.rows and not self.scheduler.seqs and not self.scheduler.groups
        assert not self.engine.output_processor.request_states and not self.core.get_request_ids()


def random_options(rng: random.Random) -> dict[str, Any]:
    return {
        "block_size": rng.choice([1, 2, 4, 8]),
        "num_gpu_blocks": rng.choice([4, 8, 12, 20, 40]),
        "num_cpu_blocks": rng.choice([0, 5, 40]),
        "max_num_seqs": rng.choice([1, 3, 5, 8]),
        "max_num_batched_tokens": rng.choice([1, 3, 4, 7, 32]),
        "caching": rng.random() < 0.5,
        "policy": rng.choice(["fcfs", "priority"]),
        "preemption_mode": rng.choice([None, "recompute", "swap"]),
        "chunked": rng.random() < 0.75,
        "window": rng.choice([None, None, 1, 3, 8]),
        "max_model_len": rng.choice([24, 48]),
    }


def random_request(rng: random.Random, options: dict[str, Any]) -> tuple[list[int], Params, int]:
    most = min(options["max_num_seqs"], options["max_num_batched_tokens"])
    longest = options["max_model_len"] - 1
    if not options["window"]:
        longest = min(longest, options["block_size"] * options["num_gpu_blocks"])
    start = [rng.randrange(3)] * rng.choice([0, 4, 8, 9, 20])  # prompts that begin alike
    prompt = (start + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))])[:longest]
    width = rng.randint(1, most)
    max_tokens = rng.choice([1, 2, 5, 12, 30])
    if rng.random() < 0.25:
        params: Params = BeamSearchParams(
            width, max_tokens, rng.random() < 0.5, length_penalty=rng.choice([0.0, 1.0])
        )
    else:
        n = rng.choice([1, width])
        best_of = rng.randint(n, most) if rng.random() < 0.3 else None
        kinds = [
            kind
            for kind in RequestOutputKind
            if best_of in (None, n) or kind is not RequestOutputKind.DELTA
        ]
        temperature = rng.choice([0, 1]) if max(n, best_of or n) == 1 else 1
        params = SamplingParams(
            n=n,
            best_of=best_of,
            temperature=temperature,
            seed=rng.randrange(50),
            max_tokens=max_tokens,
            stop_token_ids=rng.choice([[], [STOP]]),
            output_kind=rng.choice(kinds),
            ignore_eos=True,
        )
    return prompt, params, rng.randrange(3)


# Three state machines: any order of calls


def run(machine: type[RuleBasedStateMachine], examples: int, steps: int = 60) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    options = {
        "derandomize": True,
        "database": None,
        "deadline": None,
        "suppress_health_check": checks,
    }
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps, **options)
    )


class Counting(RuleBasedStateMachine):
    "Counts what it does, over all examples."

    def did(self) -> None:
        OPERATIONS[type(self).__name__] += 1


class AllocatorMachine(Counting):
    "`BlockAllocator` beside a model that is a few dictionaries."

    @initialize(num_blocks=st.integers(0, 6))
    def begin(self, num_blocks: int) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.held: Counter[int] = Counter()
        self.keys: dict[int, bytes] = {}  # block -> the key it can be found by
        # free blocks with a key, in the order in which they became free
        self.cached: list[int] = []
        self.emptied: list[int] = []  # free blocks without, in the same order

    @rule()
    def allocate(self) -> None:
        self.did()
        if len(self.held) == self.allocator.num_blocks:
            with pytest.raises(NoFreeBlocksError):
                self.allocator.allocate()
            return
        block_id = self.allocator.allocate()
        assert 0 <= block_id < self.allocator.num_blocks and block_id not in self.held
        if self.emptied:
            assert block_id == self.emptied.pop()
        elif len(self.held) + len(self.cached) == self.allocator.num_blocks:  # nothing else is free
            assert block_id == self.cached.pop(0)
            del self.keys[block_id]
        self.held[block_id] = 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.did()
        block_id = data.draw(st.sampled_from(sorted(self.held)))
        self.allocator.free(block_id)
        self.held[block_id] -= 1
        if not self.held[block_id]:
            del self.held[block_id]
            (self.cached if block_id in self.keys else self.emptied).append(block_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def cache(self, data: st.DataObject, key: bytes) -> None:
        self.did()
        block_id = data.draw(st.sampled_from(sorted(self.held)))
        self.allocator.cache_full_block(block_id, key)
        known = next((i for i, k in self.keys.items() if k == key), None)
        if block_id not in self.keys and known not in self.held:
            if known is not None:  # free, with the same content: the one in use is found instead
                self.cached.remove(known)
                self.emptied.append(known)
                del self.keys[known]
            self.keys[block_id] = key

    @rule(key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def find_and_touch(self, key: bytes) -> None:
        self.did()
        block_id = self.allocator.get_cached_block(key)
        assert block_id == next((known for known, k in self.keys.items() if k == key), None)
        if block_id is not None:
            assert self.allocator.touch(block_id) == block_id
            self.held[block_id] += 1
            if block_id in self.cached:
                self.cached.remove(block_id)

    @precondition(lambda self: self.emptied)
    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        self.did()
        block_id = data.draw(st.sampled_from(self.emptied))
        for call in (
            self.allocator.free,
            self.allocator.touch,
            lambda i: self.allocator.cache_full_block(i, b"x"),
        ):
            with pytest.raises(AssertionError):
                call(block_id)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.did()
        self.allocator.reset_prefix_cache()
        self.emptied += self.cached
        self.keys = {}
        self.cached = []

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "allocator"):
            self.allocator.check_integrity()
            assert self.allocator.get_num_free_blocks() == self.allocator.num_blocks - len(
                self.held
            )
            assert self.allocator.get_cached_blocks() == self.cached
            assert all(
                self.allocator.ref_count(i) == self.held[i]
                for i in range(self.allocator.num_blocks)
            )


class ManagerMachine(Counting):
    """`BlockSpaceManager` beside two pools of slots: whatever happens to a sequence, its slots hold
    its text.
    """

    @initialize(
        block_size=st.integers(1, 4),
        num_gpu_blocks=st.integers(1, 12),
        num_cpu_blocks=st.integers(0, 8),
        watermark=st.sampled_from([0.0, 0.2]),
        window=st.sampled_from([None, 1, 3, 6]),
        caching=st.booleans(),
    )
    def begin(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        watermark: float,
        **options: Any,
    ) -> None:
        pools = (block_size, num_gpu_blocks, num_cpu_blocks, watermark)
        self.manager = BlockSpaceManager(*pools, options["window"], options["caching"])
        self.gpu = [[-1] * block_size for _ in range(num_gpu_blocks)]
        self.cpu = [[-1] * block_size for _ in range(num_cpu_blocks)]
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        self.num_seqs = 0

    def pick(self, data: st.DataObject, groups: list[SequenceGroup]) -> SequenceGroup:
        return groups[data.draw(st.integers(0, len(groups) - 1))]

    @rule(
        prefix=st.sampled_from([[0] * 4, [0] * 8, [0, 1] * 4]),
        end=st.lists(st.integers(0, 2), max_size=6),
    )
    def allocate(self, prefix: list[int], end: list[int]) -> None:
        """A group gets blocks for all its tokens, with a window for none yet; what is cached counts
        as computed.
        """
        self.did()
        manager = self.manager
        seq = Sequence(self.num_seqs, prefix + end)
        free = self.manager.get_num_free_gpu_blocks()
        group = SequenceGroup(str(self.num_seqs), seq, SamplingParams())
        total, needed = manager.num_needed_blocks(group)
        status = manager.can_allocate(group)
        in_window = num_blocks_for((manager.window or 10**9) - 1, manager.block_size) + 1
        assert total == min(in_window, num_blocks_for(seq.get_len(), manager.block_size))
        assert (status is AllocStatus.NEVER) == (total > manager.num_gpu_blocks)
        if not manager.block_tables and total <= manager.num_gpu_blocks:
            assert status is AllocStatus.OK
        if status is AllocStatus.OK:
            found = manager.get_computed_blocks(seq)
            manager.allocate(seq)
            assert seq.num_computed_tokens == len(found) * manager.block_size < seq.get_len()
            taken = free - manager.get_num_free_gpu_blocks()
            assert taken == needed if manager.window is None else taken <= needed
            self.running.append(group)
            self.num_seqs += 1

    def write(self, seq: Sequence, num_tokens: int) -> None:
        "As in a step: computed, to be found by others, then what is behind the window is let go."
        states = read_text(seq.token_ids)
        table = self.manager.block_tables[seq.seq_id]
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens):
            block_id = table[position // self.manager.block_size]
            offset = position % self.manager.block_size
            assert self.manager.gpu_allocator.ref_count(block_id) == 1, (
                "another sequence holds what is written"
            )
            self.gpu[block_id][offset] = states[position]
        seq.num_computed_tokens += num_tokens
        self.manager.cache_full_blocks(seq)
        self.manager.remove_skipped_blocks(seq)
        hidden = (
            max(0, seq.num_computed_tokens + 1 - (self.manager.window or 10**9))
            // self.manager.block_size
        )
        assert set(self.manager.block_tables[seq.seq_id][:hidden]) <= {NULL_BLOCK}, (
            "a block behind the window is held"
        )

    def begun(self) -> list[SequenceGroup]:
        return [
            group
            for group in self.running
            if len(group.unfinished) == 1 and group.first_seq.num_new_tokens
        ]

    @precondition(lambda self: self.begun())
    @rule(data=st.data(), headroom=st.integers(0, 2))
    def prefill(self, data: st.DataObject, headroom: int) -> None:
        """A chunk: of at most as many tokens as there are blocks for, which leaves `headroom`
        blocks free.
        """
        self.did()
        group = self.pick(data, self.begun())
        manager = self.manager
        seq = group.unfinished[0]
        most = min(seq.num_new_tokens, manager.max_new_tokens(seq, headroom))
        if most > 0:
            num_tokens = data.draw(st.integers(1, most))
            free = manager.get_num_free_gpu_blocks()
            new, copies = manager.allocate_slots(seq, num_tokens)
            assert free - manager.get_num_free_gpu_blocks() == len(new) <= max(0, free - headroom)
            assert not copies
            self.write(seq, num_tokens)

    def complete(self) -> list[SequenceGroup]:
        return [
            group
            for group in self.running
            if not any(seq.num_new_tokens for seq in group.unfinished)
        ]

    @precondition(lambda self: self.complete())
    @rule(data=st.data(), token_ids=st.lists(st.integers(0, 2), min_size=4, max_size=4))
    def decode(self, data: st.DataObject, token_ids: list[int]) -> None:
        """Each sequence of a group gets a token, if there are blocks: exactly as many as were
        foretold.
        """
        self.did()
        group = self.pick(data, self.complete())
        manager = self.manager
        missing = manager.num_missing_blocks(group)
        free = manager.get_num_free_gpu_blocks()
        if missing > free:
            return
        for seq in group.unfinished:
            for _, source, target in manager.allocate_slots(seq, 1).copies:
                self.gpu[target] = list(self.gpu[source])
        assert free - manager.get_num_free_gpu_blocks() == missing
        for seq, token_id in zip(group.unfinished, token_ids):
            seq.token_ids.append(token_id)
        for seq in group.unfinished:
            self.write(seq, 1)

    @precondition(lambda self: any(len(group.unfinished) < 4 for group in self.complete()))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.did()
        group = self.pick(data, [group for group in self.complete() if len(group.unfinished) < 4])
        free = self.manager.get_num_free_gpu_blocks()
        parent = group.unfinished[data.draw(st.integers(0, len(group.unfinished) - 1))]
        self.manager.fork(parent, group.fork(parent, self.num_seqs))
        assert self.manager.get_num_free_gpu_blocks() == free
        self.num_seqs += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        self.did()
        group = self.pick(data, self.running)
        manager = self.manager
        if manager.can_swap_out(group):
            free = manager.get_num_free_gpu_blocks()
            freed = len(manager.get_freed_blocks([group]))
            pairs = manager.swap_out(group)
            assert manager.get_num_free_gpu_blocks() == free + freed
            self.running.remove(group)
            self.swapped.append(group)
            for here, there in pairs:
                self.cpu[there] = list(self.gpu[here])

    @precondition(lambda self: self.swapped)
    @rule(data=st.data(), headroom=st.integers(0, 2))
    def swap_in(self, data: st.DataObject, headroom: int) -> None:
        self.did()
        group = self.pick(data, self.swapped)
        manager = self.manager
        if manager.can_swap_in(group, headroom) is AllocStatus.OK:
            pairs = manager.swap_in(group)
            self.swapped.remove(group)
            self.running.append(group)
            for there, here in pairs:
                self.gpu[here] = list(self.cpu[there])

    @precondition(lambda self: self.running + self.swapped)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.did()
        group = self.pick(data, self.running + self.swapped)
        seq = group.unfinished[data.draw(st.integers(0, len(group.unfinished) - 1))]
        self.manager.free(seq)
        group.drop(seq)
        self.running = [group for group in self.running if group.unfinished]
        self.swapped = [group for group in self.swapped if group.unfinished]

    @rule()
    def reset_prefix_cache(self) -> None:
        self.did()
        self.manager.reset_prefix_cache()

    @invariant()
    def each_sequence_reads_its_text(self) -> None:
        if not hasattr(self, "swapped"):
            return
        manager = self.manager
        manager.check_integrity()
        places = (
            (self.running, manager.block_tables, self.gpu),
            (self.swapped, manager.cpu_block_tables, self.cpu),
        )
        for groups, tables, pool in places:
            assert set(tables) == {seq.seq_id for group in groups for seq in group.unfinished}
            for seq in (seq for group in groups for seq in group.unfinished):
                table = tables[seq.seq_id]
                states = read_text(seq.token_ids)
                begin = max(0, seq.num_computed_tokens + 1 - (manager.window or 10**9))
                for position in range(begin, seq.num_computed_tokens):
                    block_id = table[position // manager.block_size]
                    offset = position % manager.block_size
                    assert block_id != NULL_BLOCK and pool[block_id][offset] == states[position]


class EngineMachine(Counting):
    "The whole engine on a simulated worker: `Simulation` checks every step, and every answer."

    @initialize(seed=st.integers(0, 10**6))
    def begin(self, seed: int) -> None:
        self.simulation = Simulation(**random_options(random.Random(seed)))

    @rule(seed=st.integers(0, 10**6))
    def add(self, seed: int) -> None:
        self.did()
        self.simulation.add(*random_request(random.Random(seed), self.simulation.options))

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.did()
            self.simulation.step()

    @rule(when=st.sampled_from(["before", "after"]))
    def failing_step(self, when: str) -> None:
        self.did()
        self.simulation.step(fail=when)

    @precondition(lambda self: self.simulation.open())
    @rule(data=st.data(), meanwhile=st.booleans())
    def abort(self, data: st.DataObject, meanwhile: bool) -> None:
        self.did()
        name = data.draw(st.sampled_from(self.simulation.open()))
        self.simulation.step(abort=name) if meanwhile else self.simulation.abort(name)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.did()
        self.simulation.reset_prefix_cache()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.finish()


def test_any_order_of_calls_allocator() -> None:
    run(AllocatorMachine, 60)


def test_any_order_of_calls_manager() -> None:
    run(ManagerMachine, 100)


def test_any_order_of_calls_engine() -> None:
    run(EngineMachine, 80)


def test_that_was_ten_thousand_operations() -> None:
    if len(OPERATIONS) < 3:
        pytest.skip("counts what the three tests before it did")
    assert sum(OPERATIONS.values()) >= 10_000 and min(OPERATIONS.values()) >= 2000, OPERATIONS


# Random loads


def load(simulation: Simulation, rng: random.Random, num_requests: int) -> None:
    "Random requests, which are aborted and fail at random times, to their end."
    for _ in range(num_requests):
        while simulation.add(*random_request(rng, simulation.options)) is None:
            pass
        for _ in range(rng.choice([0, 1, 1, 4])):
            chance = rng.random()
            waiting = simulation.open()
            if waiting and chance < 0.1:
                simulation.abort(rng.choice(waiting))
            elif chance < 0.15:
                simulation.step(fail=rng.choice(["before", "after"]))
            elif chance < 0.2:
                simulation.step(abort=rng.choice(waiting) if waiting else None)
            elif chance < 0.22:
                simulation.reset_prefix_cache()
            else:
                simulation.step()
    simulation.finish()


@pytest.mark.parametrize("seed", [*range(100), 416, 1249, 1412, 1571])
def test_two_thousand_random_requests(seed: int) -> None:
    "A hundred small engines with twenty requests each, and some that found a fault."
    rng = random.Random(seed)
    load(Simulation(**random_options(rng)), rng, 20)


# Cases that once went wrong, and promises

ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


def with_tokens(max_tokens: int, **more: Any) -> SamplingParams:
    several = {"temperature": 1, "seed": 7} if more.get("n", 1) > 1 else {"temperature": 0}
    return SamplingParams(**{**several, "max_tokens": max_tokens, "ignore_eos": True, **more})


def test_two_that_come_back_into_a_full_pool() -> None:
    """Each fills the pool alone, so each ends as soon as it is back: but not in the step that
    brings it back.
    """
    simulation = Simulation(
        block_size=2, num_gpu_blocks=4, policy="priority", preemption_mode="swap"
    )
    for priority in (2, 1):
        assert simulation.add([priority] * 7, ENDLESS, priority)
        simulation.step()
        simulation.step()
    simulation.add([0, 0], with_tokens(1), 0)
    simulation.step()
    assert len(simulation.scheduler.swapped) == 2
    simulation.finish()
    assert simulation.reasons == {name: ["length"] for name in "012"}
    assert [len(simulation.told[name][0]) for name in "012"] == [2, 2, 1]


def test_beams_that_the_pool_ended_do_not_come_back() -> None:
    "A search that lost a beam to the full pool goes on with fewer."
    simulation = Simulation(num_gpu_blocks=8, max_num_seqs=3, window=None)
    name = simulation.add([0] * 8, BeamSearchParams(3, 50, True))
    other = simulation.add([1] * 4, with_tokens(8))
    simulation.finish()
    assert simulation.reasons[name] == ["length"] * 3 and len(simulation.told[other][0]) == 8


def test_beams_that_come_back_decode_in_one_step() -> None:
    """All that they computed is cached, so each lacks one token; the step that admits them has one
    left, and they are three.
    """
    options = {
        "policy": "priority",
        "preemption_mode": "recompute",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
    }
    simulation = Simulation(block_size=1, num_gpu_blocks=60, **options)
    name = simulation.add([0, 1, 2], BeamSearchParams(3, 12, True), 1)
    for _ in range(4):
        simulation.step()
    simulation.add([1, 2], with_tokens(1, n=2), 0)
    simulation.step()  # takes two of the four places: the beams are preempted
    assert [group.request_id for group in simulation.scheduler.waiting] == [name]
    simulation.add([2] * 7, with_tokens(1), 0)
    simulation.step()
    assert simulation.worker.rows and name not in simulation.reasons
    simulation.finish()


def test_a_search_that_is_computed_again_keeps_its_beams() -> None:
    """The pool holds it exactly. While the first beam's prompt is computed, the others share blocks
    with it: none is missing.
    """
    options = {
        "policy": "priority",
        "preemption_mode": "recompute",
        "max_num_batched_tokens": 3,
        "max_model_len": 24,
    }
    simulation = Simulation(block_size=8, num_gpu_blocks=4, **options)
    name = simulation.add([2] * 15 + [5], BeamSearchParams(2, 5, False), 1)
    while not simulation.scheduler.running or len(simulation.scheduler.running[0].unfinished) < 2:
        simulation.step()
    simulation.step()
    simulation.add([1] * 9, with_tokens(3), 0)
    simulation.step()
    assert simulation.scheduler.waiting[0].request_id == name
    simulation.finish()


@pytest.mark.parametrize("mode", [None, "recompute", "swap"])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("width", [1, 3])
def test_no_request_starves(mode: str | None, chunked: bool, width: int) -> None:
    """A long request, preempted or not, is done in bounded time, though short ones never stop
    coming.
    """
    options = {
        "max_model_len": 40,
        "max_num_batched_tokens": 40 if not chunked else 8,
        "num_gpu_blocks": 20,
    }
    simulation = Simulation(preemption_mode=mode, chunked=chunked, max_num_seqs=8, **options)
    for i in range(3):
        simulation.add([i] * 12, with_tokens(12))
    name = simulation.add([4] * 30, with_tokens(8, n=width))
    for _ in range(120):
        simulation.add([3, 3, 3], with_tokens(3))
        simulation.step(fail="after" if simulation.num_steps == 2 else None)
    assert name in simulation.reasons and (
        mode == "swap" or simulation.scheduler.num_preemptions >= 0
    )
    simulation.finish()


def test_a_window_lets_a_text_outgrow_the_pool() -> None:
    simulation = Simulation(window=6, num_gpu_blocks=4, max_model_len=64)
    name = simulation.add([1, 2, 3], with_tokens(60))
    simulation.finish()
    assert (
        len(simulation.told[name][0]) == 60
        and simulation.engine.get_metrics()["peak_gpu_blocks_used"] == 3
    )


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "num_cpu_blocks, mode", [(12, "recompute"), (0, None), (1, None), (12, "swap")]
)
def test_no_window_request_ends_early(mode: str | None, num_cpu_blocks: int, caching: bool) -> None:
    """Texts of several times the pool, preempted and computed again chunk by chunk, to their last
    token.
    """
    simulation = Simulation(
        window=6,
        block_size=2,
        num_gpu_blocks=8,
        num_cpu_blocks=num_cpu_blocks,
        preemption_mode=mode,
        policy="priority",
        max_model_len=120,
        caching=caching,
    )
    names = [
        simulation.add([i] * length, with_tokens(50), 2) for i, length in enumerate((60, 3, 33))
    ]
    for i in range(60):
        simulation.step()
        if i % 15 == 14:
            names.append(simulation.add([i % VOCAB] * 20, with_tokens(5), i % 2))
    simulation.finish()
    assert all(simulation.reasons[name] == ["length"] for name in names)
    assert [len(simulation.told[name][0]) for name in names] == [50] * 3 + [5] * 4
    preempted = [group for group in simulation.preempted if group in names[:3]]
    assert len(preempted) >= 2, "nothing was tested"


def test_prompts_with_a_window_that_fill_the_pool_together() -> None:
    "Each holds a part of the pool and lacks a block: the first by the policy goes on."
    simulation = Simulation(
        window=1, block_size=1, num_gpu_blocks=4, max_num_batched_tokens=7, max_model_len=120
    )
    names = [simulation.add([i] * 30, with_tokens(3)) for i in range(4)]
    simulation.finish()
    assert all(len(simulation.told[name][0]) == 3 for name in names)


@pytest.mark.parametrize("mode", [None, "recompute"])
def test_requests_are_not_preempted_again_and_again(mode: str | None) -> None:
    """Four requests with a window on 14 blocks, of which each wants up to five: one was swapped 33
    times before.
    """
    simulation = Simulation(
        window=16, num_gpu_blocks=14, num_cpu_blocks=40, max_model_len=120, preemption_mode=mode
    )
    names = [simulation.add([i] * 8, with_tokens(100)) for i in range(4)]
    simulation.finish()
    times = Counter(simulation.preempted)
    assert 0 < max(times.values()) <= 4 and all(
        len(simulation.told[name][0]) == 100 for name in names
    ), times


def test_forks_of_two_requests_share_nothing_without_prefix_caching() -> None:
    "What a preempted request finds again of its own, no other request finds."
    simulation = Simulation(caching=False, num_gpu_blocks=40)
    for _ in range(2):
        simulation.add([1] * 8, with_tokens(8, n=2))
        simulation.step()
    tables = list(simulation.scheduler.block_manager.block_tables.values())
    assert len(tables) >= 3 and not set(tables[0]) & set(tables[-1])
    simulation.finish()


def test_samples_of_neighbouring_seeds_differ() -> None:
    """The second answer of seed 0 is not the first of seed 1; and the first is that of the seed
    alone.
    """
    simulation = Simulation(num_gpu_blocks=60)
    names = [simulation.add([1, 2, 3], with_tokens(20, n=3, seed=seed)) for seed in range(3)]
    alone = [
        simulation.add([1, 2, 3], with_tokens(20, temperature=1, seed=seed)) for seed in range(3)
    ]
    simulation.finish()
    assert [simulation.told[name][0] for name in names] == [
        simulation.told[name][0] for name in alone
    ]
    assert len({tuple(tokens) for name in names for tokens in simulation.told[name]}) == 9
    seeds = {sequence_seed(seed, j) for seed in range(100) for j in range(100)}
    assert len(seeds) == 10_000 and all(0 <= seed < 2**64 for seed in seeds)
    assert sequence_seed(-1, 0) == 2**64 - 1 and sequence_seed(2**64 - 1, 5) == sequence_seed(-1, 5)


def test_writers_of_a_shared_block() -> None:
    """The last of the sequences that share a block writes into it; if another request holds it too,
    all of them copy.
    """
    manager = BlockSpaceManager(4, 8)
    group = SequenceGroup("a", Sequence(0, [1, 2]), SamplingParams())
    parent = group.first_seq
    manager.allocate(parent)
    parent.num_computed_tokens = 2
    children = [group.fork(parent, seq_id) for seq_id in (1, 2)]
    for child in children:
        manager.fork(parent, child)
    assert manager.num_missing_blocks(group) == 2
    group.unfinished.remove(parent)
    assert manager.num_missing_blocks(group) == 2
    for child, copy in zip(children, (1, 2)):
        child.num_computed_tokens = 1  # it writes over the second token
        assert manager.allocate_slots(child, 1) == ([], [(0, 0, copy)])
    group.unfinished[:] = [parent]
    parent.num_computed_tokens = 1
    assert manager.allocate_slots(parent, 1) == ([], []) and manager.num_missing_blocks(group) == 0


def test_the_tail_of_a_prefix_is_evicted_first() -> None:
    manager = BlockSpaceManager(2, 4, enable_caching=True)
    first = Sequence(0, list(range(8)))
    second = Sequence(1, [9, 9, 9, 9])
    manager.allocate(first)
    first.num_computed_tokens = 8
    manager.cache_full_blocks(first)
    manager.free(first)
    manager.allocate(second)
    assert (
        len(manager.get_computed_blocks(Sequence(2, list(range(8)))))
        == manager.gpu_allocator.num_evictions
        == 2
    )


def test_what_is_not_computed_yet_is_not_found() -> None:
    """A fork that is computed again begins when its parent is through, and shares its full blocks
    then: also after a swap.
    """
    manager = BlockSpaceManager(2, 12, 12, enable_caching=True)
    group = SequenceGroup("a", Sequence(0, [1] * 9), SamplingParams())
    parent = group.first_seq
    child = group.fork(parent, 1)
    manager.allocate(parent)
    parent.num_computed_tokens = 4
    manager.cache_full_blocks(parent)
    other = Sequence(2, [1] * 9)
    assert len(manager.get_computed_blocks(other)) == 2
    manager.swap_out(group)
    manager.reset_prefix_cache()
    manager.swap_in(group)
    assert len(manager.get_computed_blocks(other)) == 2
    parent.num_computed_tokens = 9
    manager.cache_full_blocks(parent)
    manager.allocate(child)
    assert child.num_computed_tokens == 8
    tables = [manager.get_block_table(seq) for seq in (parent, child)]
    assert tables[0][:4] == tables[1][:4] and tables[0][4] != tables[1][4]


# Steps that fail


def test_only_the_requests_in_a_failed_step_end() -> None:
    """They say why in the next call; one that waits, and one that is swapped out with an answer
    complete, are answered.
    """
    simulation = Simulation(
        num_gpu_blocks=12, max_num_seqs=4, policy="priority", preemption_mode="swap"
    )
    swapped = simulation.add([0] * 9, with_tokens(12, n=3, stop_token_ids=[0, 1, 2]), 2)
    while (
        not 0
        < len(simulation.scheduler.groups[swapped].unfinished)
        < len(simulation.scheduler.groups[swapped].seqs)
    ):
        simulation.step()
    runs = [simulation.add([i] * 9, with_tokens(6, n=2), 1) for i in (3, 4)]
    waits = simulation.add([5] * 9, with_tokens(5), 3)
    simulation.step()
    simulation.step(fail="after")
    assert sorted(simulation.may_fail) == sorted(runs) and not simulation.reasons
    simulation.step()
    assert set(simulation.reasons) == set(runs) and all(
        set(simulation.reasons[name]) == {"error"} for name in runs
    )
    simulation.finish()
    assert (
        "error" not in simulation.reasons[swapped] + simulation.reasons[waits]
        and len(simulation.told[swapped]) == 3
    )


def test_a_step_that_always_fails_ends() -> None:
    """Each failure ends the requests that ran, so an engine with a fault does not try the same ones
    for ever.
    """
    simulation = Simulation(max_num_seqs=2)
    names = [simulation.add([1, 2, i], with_tokens(5)) for i in range(6)]
    for _ in range(3):
        simulation.step(fail="before")
    simulation.finish()
    assert simulation.reasons == {name: ["error"] for name in names}


def test_a_scheduler_that_makes_no_progress_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    "No output that was there is lost, and the requests that wait go on when it can."
    simulation = Simulation(max_num_seqs=1)
    first, second = (simulation.add([1, 2, i], with_tokens(1)) for i in range(2))
    monkeypatch.setattr(simulation.scheduler.admission, "can_admit", lambda *_: AllocStatus.LATER)
    for _ in range(2):
        with pytest.raises(AssertionError, match="no request makes progress"):
            simulation.engine.step()
    monkeypatch.undo()
    simulation.finish()
    assert simulation.reasons == {first: ["length"], second: ["length"]}


def test_an_engine_whose_workers_cannot_be_reset_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    "Every later call says why; it can be closed."
    simulation = Simulation()
    simulation.add([1, 2, 3], with_tokens(5))

    def broken() -> None:
        raise ValueError("the device is lost")

    monkeypatch.setattr(simulation.worker, "reset", broken)
    simulation.step(fail="after")
    engine = simulation.engine
    for call in (
        engine.step,
        lambda: engine.add_request("b", [1, 2], with_tokens(5)),
        engine.reset_prefix_cache,
        engine.start_trace,
        lambda: engine.collective_rpc("reset"),
        engine.step,
    ):
        with pytest.raises(EngineDeadError, match=r"boom.*the device is lost"):
            call()
    engine.abort_request("0")
    assert not engine.has_unfinished_requests()
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.step()


# Torn steps

CORE = (
    "scheduler.py",
    "extensions.py",
    "request_queue.py",
    "block_manager.py",
    "block_allocator.py",
    "beam_search.py",
    "sequence.py",
)
CONTROL_PLANE = (*CORE, "core.py", "output_processor.py", "llm_engine.py")


class Torn(Exception):
    "A fault in the core, in any line of a step."


def interrupt_after(num_lines: int, call: Callable[[], Any], error: type | None = None) -> bool:
    """Run `call`, and press Ctrl-C in that line of the control plane, as they are reached; False if
    there were fewer.

    It is a real signal, which may be held until the call is over. With `error` that is raised
    instead.
    """
    left = num_lines

    def in_line(frame: Any, event: str, arg: Any) -> Any:
        nonlocal left
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        # a list is handed over in three lines that cannot fail; from there on the news is taken
        taking = line in ("outputs = self.outputs", "self.outputs = []", "return outputs")
        left -= event == "line" and not (error and taking)
        if left == 0:
            sys.settrace(None)
            if error:
                raise error
            signal.raise_signal(signal.SIGINT)
        return in_line

    def in_call(frame: Any, event: str, arg: Any) -> Any:
        path = Path(frame.f_code.co_filename)
        return (
            in_line
            if path.name in (CORE if error else CONTROL_PLANE) and "teachvllm" in path.parts
            else None
        )

    sys.settrace(in_call)
    try:
        call()
    except (KeyboardInterrupt, Torn):
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(
    "num_steps, error", [(0, None), (1, Torn), (2, None), (2, Torn), (4, Torn)]
)
def test_a_step_torn_at_any_line_ends_the_requests_that_ran(
    policy: str, num_steps: int, error: type | None
) -> None:
    """Each gets one last output, or had its last token; the others get their answers; no block, row
    or sequence is left.

    So it is with a fault in the core, and with Ctrl-C anywhere.
    """
    torn = 0
    for line in range(1, 4000, 29):
        simulation = Simulation(
            num_gpu_blocks=9 if policy == "priority" else 12, max_num_seqs=6, policy=policy
        )
        for prompt, params, priority in (
            ([0] * 9, with_tokens(6, n=3), 1),
            ([1] * 6, BeamSearchParams(2, 5, True), 1),
            ([0] * 9 + [1], with_tokens(5), 0),
            ([2] * 5, with_tokens(4), 2),
        ):
            simulation.add(prompt, params, priority)
        for _ in range(num_steps):
            simulation.step()
        # the one that checks: an interrupt would come in the checks
        del simulation.scheduler.schedule
        waiting = "3" in simulation.told and num_steps <= 2
        simulation.may_fail = set("0123")
        if not interrupt_after(line, simulation.engine.step, error):
            break
        torn += 1
        finish_torn(simulation)
        if waiting and policy == "fcfs":
            assert simulation.reasons["3"] == ["length"], "it waited while the step was torn"
    assert torn > 5


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("torn", ["add", "abort"])
def test_a_call_torn_at_any_line_leaves_a_usable_engine(torn: str, num_steps: int) -> None:
    "At worst the requests that run end with an error."
    for line in range(1, 400, 3):
        simulation = Simulation(num_gpu_blocks=12, max_num_seqs=5)
        for prompt, params in (
            ([0] * 9, with_tokens(6, n=3)),
            ([1] * 6, with_tokens(5)),
            ([2] * 5, with_tokens(4, n=2)),
        ):
            simulation.add(prompt, params)
        for _ in range(num_steps):
            simulation.step()
        del simulation.scheduler.schedule
        engine = simulation.engine
        simulation.may_fail = set("012")
        call = (
            partial(engine.abort_request, "0")
            if torn == "abort"
            else partial(engine.add_request, "3", [1], with_tokens(1))
        )
        if not interrupt_after(line, call):
            assert line > 10
            return
        simulation.gone |= {"0"} if torn == "abort" else set()
        # what the user of an interrupted call does
        engine.abort_request(["0"] if torn == "abort" else "3")
        for _ in range(60):
            simulation.take([output_of(output) for output in engine.step()])
        simulation.check_nothing_left()


MOST_STEPS = 300  # far more than the requests' tokens: a request that is left never ends


def finish_torn(simulation: Simulation) -> None:
    "To the end, with one more request, which notices nothing."
    last = simulation.add([3, 4, 5], with_tokens(3), 3)
    for _ in range(MOST_STEPS):
        if not simulation.engine.has_unfinished_requests():
            break
        simulation.take([output_of(output) for output in simulation.engine.step()])
        simulation.scheduler.block_manager.check_integrity()
    simulation.check_nothing_left()
    assert simulation.reasons[last] == ["length"]


def output_of(output: Any) -> Any:
    "An output in which what went wrong is the interrupt, as `Simulation.take` knows failures."
    for one in output.outputs:
        if one.finish_reason == "error":
            assert (
                "the step failed: KeyboardInterrupt" in one.stop_reason
                or "the step failed: Torn" in one.stop_reason
            )
            one.stop_reason = "boom"
    return output
