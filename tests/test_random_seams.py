"""Drafts, grammars and requests that are not ready yet, at random, on the simulated worker of
`test_blocks`: every answer is complete, and the one that the request gets alone.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import test_blocks
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from test_async_scheduling import AheadOfTime
from test_blocks import (
    VOCAB,
    EngineMachine,
    Simulation,
    draw,
    load,
    random_options,
    read_text,
    with_tokens,
    write_alone,
)

from teachvllm.core.block_manager import block_extra_keys, hash_block_tokens
from teachvllm.core.orders import SchedulerOutput
from teachvllm.core.scheduler import Scheduler
from teachvllm.engine.core_proc import ABORT, ADD, OUTPUTS, STOP, EngineCoreProc, import_zmq
from teachvllm.messages import EngineCoreOutputs, EngineCoreRequest
from teachvllm.sampling_params import SamplingParams
from teachvllm.sequence import Sequence, SequenceGroup

SEEN: Counter[str] = Counter()  # what the loads below came to


class NoRepeats:
    "A grammar whose sentences have no token twice in a row."

    def allowed(self, output_token_ids: list[int]) -> list[int]:
        return [token_id for token_id in range(VOCAB) if output_token_ids[-1:] != [token_id]]

    def bitmask(self, output_token_ids: list[int], drafts: list[int]) -> list[bytes]:
        SEEN["masks behind drafts"] += len(drafts)
        texts = [output_token_ids + drafts[:i] for i in range(1 + len(drafts))]
        return [bytes([sum(1 << token_id for token_id in self.allowed(t))]) for t in texts]


class Compilation:
    "Takes so many steps, and may fail then."

    name = "grammar"

    def __init__(self, num_steps: int, fail: Any = None):
        self.num_steps = num_steps
        self.fail = fail

    def is_ready(self) -> bool:
        self.num_steps -= 1
        if self.num_steps < 0 and self.fail:
            self.fail()
        return self.num_steps < 0


class ChecksHashes(Simulation):
    "A simulation that looks at what blocks are found by."

    def check(self) -> None:
        "Hashes are those of a sequence's own full blocks, and only such blocks can be found."
        super().check()
        manager = self.scheduler.block_manager
        size = manager.block_size
        for seq_id, (_, seq) in self.scheduler.seqs.items():
            hashes: list[bytes] = []
            for end in range(size, seq.get_len() + 1, size):
                parent = hashes[-1] if hashes else b""
                keys = block_extra_keys(seq, end - size, end)
                hashes.append(hash_block_tokens(parent, seq.token_ids[end - size : end], keys))
            assert seq.block_hashes == hashes[: len(seq.block_hashes)], "hashes of another text"
            assert seq.num_cached_blocks <= len(seq.block_hashes)
            for i, block_id in enumerate(manager.block_tables.get(seq_id, [])):
                key = manager.gpu_allocator._hash_of.get(block_id)
                assert key is None or key == dict(enumerate(hashes)).get(i), (
                    "a block can be found under another text, or with drafts in it"
                )


class WithSeams(ChecksHashes):
    "What stands beside the core, which does as it likes; and what must hold all the same."

    def __init__(self, rng: random.Random, **options: Any):
        super().__init__(**options)
        self.rng = rng
        self.share_right = rng.choice([0, 0.5, 0.9, 1])  # of the drafts
        self.most_drafts = rng.choice([1, 2, 5, 9])
        self.core.preparers.append(self.prepare)
        self.core.drafter = self.guess

    def prepare(self, request: EngineCoreRequest, group: SequenceGroup) -> None:
        name = request.request_id
        if self.rng.random() < 0.3:
            fail = (lambda: self.compilation_fails(name)) if self.rng.random() < 0.1 else None
            group.prerequisites = [Compilation(self.rng.randint(0, 4), fail)]
            self.late.add(name)
        if self.rng.random() < 0.3 and request.beam_search_params is None:
            group.grammar = NoRepeats()
        self.grammars[name] = group.grammar  # a refused request may have had the same name
        group.wants_drafts = self.rng.random() < 0.7

    def compilation_fails(self, name: str) -> None:
        self.may_fail.add(name)
        SEEN["failed compilations"] += 1
        raise RuntimeError("boom")

    def guess(self, scheduler: Scheduler) -> dict[int, list[int]]:
        "Drafts of some of the sequences; now and then the drafter fails, or talks nonsense."
        if self.rng.random() < 0.02:
            raise RuntimeError("no idea")
        return {
            seq_id: self.drafts_of(group, seq)
            for seq_id, (group, seq) in scheduler.seqs.items()
            if self.rng.random() < 0.85
        }

    def drafts_of(self, group: SequenceGroup, seq: Sequence) -> list[int]:
        text = list(seq.token_ids)
        for _ in range(self.rng.randint(0, self.most_drafts)):
            grammar = self.grammars.get(group.request_id)
            allowed = grammar.allowed(text[seq.num_prompt_tokens :]) if grammar else range(VOCAB)
            right = draw(read_text(text)[-1], group.sampling_params, seq.seed, allowed)
            wrong = self.rng.randrange(-1, VOCAB + 1)
            text.append(right if self.rng.random() < self.share_right else wrong)
        return text[seq.get_len() :]

    def check_schedule(self, schedule: Any) -> Any:
        "A step without tokens has a reason."
        scheduler = self.scheduler
        live = [group for group in self.groups() if group not in scheduler.not_ready]
        ahead = bool(self.core.in_flight)
        out = super().check_schedule(schedule)
        ended = any(group.is_finished() for group in live)
        assert out.num_scheduled_tokens or out.new_seqs or ahead or ended or not live, "no progress"
        for seq_id in out.scheduled_spec_decode_tokens:
            SEEN["drafts"] += 1
            SEEN["drafts beside a sibling's"] += len(scheduler.seqs[seq_id][0].unfinished) > 1
        with_grammar = {name for name, grammar in self.grammars.items() if grammar}
        SEEN["preempted grammars"] += len(with_grammar & set(out.preempted_request_ids))
        SEEN["steps without ready requests"] += bool(scheduler.not_ready and not live)
        return out


class AheadWithSeams(WithSeams, AheadOfTime):
    "The same with `async_scheduling`."


def options_of(rng: random.Random) -> dict[str, Any]:
    "Of an engine of a random size, whose prompts may share a step."
    options = random_options(rng)
    if rng.random() < 0.4 and options["chunked"]:
        most = rng.choice([1, 2, 3])
        options |= {
            "max_num_partial_prefills": most,
            "max_long_partial_prefills": rng.randint(1, most),
            "long_prefill_token_threshold": rng.choice([0, 1, 3, 10]),
        }
    return options


KINDS = {"waits": WithSeams, "ahead": AheadWithSeams}


@pytest.mark.parametrize("seed", [*range(30), 58, 84, 167, 190, 228, 242, 283])
@pytest.mark.parametrize("kind", KINDS)
def test_random_loads(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    load(KINDS[kind](rng, **options_of(rng)), rng, 20)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_answers_of_different_lengths_are_computed_again(seed: int, caching: bool) -> None:
    "Of three answers one has drafts, all right; then more important requests take the blocks."
    simulation = ChecksHashes(
        num_gpu_blocks=20,
        num_cpu_blocks=0,
        max_num_batched_tokens=80,
        policy="priority",
        caching=caching,
    )

    def guess(scheduler: Scheduler) -> dict[int, list[int]]:
        [seq, *_] = scheduler.groups[name].seqs if name in scheduler.groups else [None]
        if seq is None or seq.seq_id not in scheduler.seqs:
            return {}
        text = write_alone(seq.token_ids, with_tokens(3, temperature=1), seq.seed, 64)
        return {seq.seq_id: text[0]}

    simulation.core.drafter = guess
    name = simulation.add([seed % VOCAB] * (4 + seed // 2), with_tokens(14, n=3, seed=seed), 1)
    for _ in range(3 + seed % 2):
        simulation.step()
    lengths = {seq.get_len() for seq in simulation.scheduler.groups[name].unfinished}
    for prompt in ([1] * 60, [2] * 60):
        simulation.add(prompt, with_tokens(1), 0)
        for _ in range(6):
            simulation.step()
    simulation.finish()
    assert len(lengths) == 2 and name in simulation.preempted


class Until:
    "Ready when it is told so."

    name = "grammar"
    ready = False

    def is_ready(self) -> bool:
        return self.ready


def test_nothing_is_sent_while_no_request_is_ready() -> None:
    "Neither to the workers, nor, but for a sign of life, to the front; a message is heard at once."
    simulation = Simulation(num_gpu_blocks=40)
    core = simulation.core
    compiled = Until()
    core.preparers.append(
        lambda request, group: setattr(
            group, "prerequisites", [compiled] if request.request_id == "slow" else []
        )
    )
    num_submitted = 0
    submit = core.executor.submit

    def counting(out: SchedulerOutput) -> None:
        nonlocal num_submitted
        num_submitted += 1
        submit(out)

    core.executor.submit = counting

    def add(sock: Any, name: str) -> None:
        request = EngineCoreRequest(name, [1, 2], SamplingParams(max_tokens=1), seed=0)
        sock.send_multipart([ADD, b"a", msgspec.msgpack.encode(request)])

    def receive(sock: Any, until: Callable[[EngineCoreOutputs], Any]) -> EngineCoreOutputs:
        while sock.poll(20_000):
            kind, data, _ = sock.recv_multipart()
            assert kind == OUTPUTS
            outputs = msgspec.msgpack.decode(data, type=EngineCoreOutputs)
            if until(outputs):
                return outputs
        raise TimeoutError

    zmq = import_zmq()
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours:
        with context.socket(zmq.PAIR) as theirs:
            ours.bind("inproc://core")
            theirs.connect("inproc://core")
            loop = threading.Thread(target=EngineCoreProc(theirs, core).run_busy_loop)
            loop.start()
            add(ours, "slow")
            idle = []
            end = time.monotonic() + 0.5
            receive(ours, lambda o: idle.append(o) or time.monotonic() > end)
            assert len(idle) <= 8 and {o.stats.num_waiting for o in idle} == {1}
            assert num_submitted == 0
            add(ours, "quick")
            assert receive(ours, lambda o: o.outputs).outputs[0].request_id == "quick"
            ours.send_multipart([ABORT, msgspec.msgpack.encode([("slow", None)])])
            receive(ours, lambda o: o.stats.num_waiting == 0)
            add(ours, "slow")
            receive(ours, lambda o: o.stats.num_waiting == 1)
            compiled.ready = True
            assert receive(ours, lambda o: o.outputs).outputs[0].request_id == "slow"
            ours.send_multipart([STOP])
            loop.join()
    assert num_submitted <= 4


def test_an_engine_in_this_process_sends_nothing_either() -> None:
    simulation = Simulation(num_gpu_blocks=40)
    compilation = Compilation(30)
    simulation.core.preparers.append(
        lambda request, group: setattr(group, "prerequisites", [compilation])
    )
    submitted = []
    submit = simulation.core.executor.submit
    simulation.core.executor.submit = lambda out: (submitted.append(out), submit(out))
    simulation.add([1, 2], with_tokens(1))
    for _ in range(29):
        simulation.step()
        assert not submitted
    simulation.finish()
    assert len(submitted) == 2  # its only step, and that it has ended


class SeamsMachine(EngineMachine):
    "Any order of calls."

    def did(self) -> None:
        "Another file counts its own."

    @initialize(seed=st.integers(0, 10**6), kind=st.sampled_from(list(KINDS)))
    def begin(self, seed: int, kind: str) -> None:  # type: ignore[override]
        rng = random.Random(seed)
        self.simulation = KINDS[kind](rng, **options_of(rng))


def test_any_order_of_calls() -> None:
    test_blocks.run(SeamsMachine, 60)


def test_that_was_everything() -> None:
    if sum(SEEN.values()) < 1000:
        pytest.skip("counts what the tests before it did")
    assert len(SEEN) == 6 and min(SEEN.values()) > 3, SEEN
