"""`AsyncLLM`: outputs as they come, requests that are given up, readers that are slow, and the ways
in which it ends.
"""

import asyncio
import os
import random
import signal
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from fake_worker import SOON, slow_down, wait_until
from helpers import random_prompts

from teachvllm import LLM, SamplingParams
from teachvllm.arg_utils import EngineArgs
from teachvllm.engine.async_llm import AsyncLLM, RequestOutputCollector, merge_outputs
from teachvllm.executor.executor_base import EngineClosedError, EngineDeadError
from teachvllm.outputs import CompletionOutput, RequestOutput
from teachvllm.sampling_params import PoolingParams, RequestOutputKind

OPTIONS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 24,
    "max_num_batched_tokens": 64,
}
PROMPTS = random_prompts(6, longest=40)
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def run(what: Callable[[], Awaitable]) -> Any:
    "In an event loop of its own; never for ever."
    return asyncio.run(asyncio.wait_for(what(), SOON))


@pytest.fixture(scope="module")
def engine(folder: str) -> Iterator[AsyncLLM]:
    "One for all tests that leave it alive. Each test has an event loop of its own."
    engine = AsyncLLM.from_engine_args(EngineArgs(folder, **OPTIONS))
    yield engine
    assert engine.is_running, "a test has killed it"
    engine.shutdown()
    engine.shutdown()
    assert engine.engine_core.process.returncode == 0


@pytest.fixture(scope="module")
def expected(folder: str) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    with LLM(folder, **OPTIONS) as llm:
        return [
            list(output.outputs[0].token_ids)
            for output in llm.generate(PROMPTS, params, use_tqdm=False)
        ]


def greedy(kind: RequestOutputKind = DELTA, max_tokens: int = 32) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=kind)


async def read(
    engine: AsyncLLM, prompt: Any, params: SamplingParams, request_id: str, pause: float = 0.0
) -> list[Any]:
    "All outputs of a request."
    outputs = []
    async for output in engine.generate(prompt, params, request_id):
        outputs.append(output)
        await asyncio.sleep(pause)
    return outputs


def in_slow_steps(engine: AsyncLLM, what: Callable[[], Awaitable]) -> Callable[[], Awaitable]:
    """A request of 200 tokens then takes four seconds at least, however long this process waits for
    its turn.
    """

    async def main() -> None:
        await engine.collective_rpc(slow_down, args=(0.02,))
        try:
            await what()
        finally:
            if engine.is_running:
                await engine.collective_rpc(slow_down, args=(0,))

    return main


async def blocks_used(engine: AsyncLLM) -> int:
    stats = await engine.engine_core.call_utility_async("get_stats")
    return stats.num_gpu_blocks_used


async def all_blocks_are_free(engine: AsyncLLM) -> bool:
    "After at most the step that runs."
    for _ in range(200):
        if not await blocks_used(engine):
            return True
        await asyncio.sleep(0.01)
    return False


def test_kinds_of_outputs(engine: AsyncLLM, expected: list[list[int]]) -> None:
    """`CUMULATIVE` grows, `DELTA` adds up, `FINAL_ONLY` comes once; together they give what `LLM`
    gives.
    """

    async def main() -> None:
        kinds = [CUMULATIVE, DELTA, FINAL_ONLY] * 2
        reading = [
            read(engine, prompt, greedy(kind), f"r{i}")
            for i, (prompt, kind) in enumerate(zip(PROMPTS, kinds))
        ]
        for kind, outputs, tokens in zip(kinds, await asyncio.gather(*reading), expected):
            pieces = [output.outputs[0].token_ids for output in outputs]
            assert outputs[-1].finished and not any(output.finished for output in outputs[:-1])
            if kind is DELTA:
                assert sum(pieces, []) == tokens and len(pieces) > 1
            else:
                assert pieces[-1] == tokens and all(
                    tokens[: len(piece)] == piece for piece in pieces
                )
                assert len(pieces) > 1 if kind is CUMULATIVE else len(pieces) == 1
        assert await all_blocks_are_free(engine)

    run(main)
    run(main)  # another loop, the same ids


def test_a_slow_reader_holds_nothing_up(engine: AsyncLLM, expected: list[list[int]]) -> None:
    "Its outputs are merged: few come, none is lost; meanwhile a quick reader gets all of its own."

    async def main() -> None:
        outputs = []
        quick_is_done = asyncio.Event()

        async def read_slowly() -> None:
            async for output in engine.generate(PROMPTS[0], greedy(), "slow"):
                outputs.append(output)
                await quick_is_done.wait()

        slow = asyncio.create_task(read_slowly())
        while not outputs:
            await asyncio.sleep(0.01)
        quick = await read(engine, PROMPTS[1], greedy(), "quick")
        assert quick[-1].finished and len(outputs) == 1
        while engine.output_processor.request_states:
            await asyncio.sleep(0.01)
        quick_is_done.set()
        await slow
        assert (
            len(outputs) <= 2
            and sum((output.outputs[0].token_ids for output in outputs), []) == expected[0]
        )

    run(main)


def test_requests_that_are_given_up(engine: AsyncLLM) -> None:
    """A cancelled task, a reader that stops, a call of `abort`: the blocks are free, and the id may
    be used again.
    """
    long = greedy(max_tokens=200)

    async def main() -> None:
        task = asyncio.create_task(read(engine, PROMPTS[0], long, "a"))
        while not await blocks_used(engine):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await all_blocks_are_free(engine) and not engine.collectors

        reader = engine.generate(PROMPTS[0], long, "a")
        await anext(reader)
        assert await blocks_used(engine) > 0
        await reader.aclose()
        assert await all_blocks_are_free(engine) and not engine.output_processor.request_states

        reader = engine.generate(PROMPTS[0], long, "a")
        await anext(reader)
        await engine.abort("a")
        await engine.abort(["a", "unknown"])
        rest = [output async for output in reader]
        assert rest[-1].finished and rest[-1].outputs[0].finish_reason == "abort"
        assert await all_blocks_are_free(engine)

        outputs = await read(engine, PROMPTS[1], greedy(max_tokens=3), "a")
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == 3

    run(in_slow_steps(engine, main))


def test_many_come_and_go(engine: AsyncLLM, expected: list[list[int]]) -> None:
    """A hundred requests, a third given up at random times: every complete answer is right, nothing
    is left.
    """
    rng = random.Random(0)

    async def client(i: int) -> bool:
        await asyncio.sleep(rng.random())
        kind = rng.choice([CUMULATIVE, DELTA, FINAL_ONLY])
        task = asyncio.create_task(read(engine, PROMPTS[i % 6], greedy(kind), f"client{i}"))
        if i % 3 == 0:
            await asyncio.sleep(rng.random() * 0.3)
            task.cancel()
        (outputs,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outputs, asyncio.CancelledError):
            return False
        pieces = [output.outputs[0].token_ids for output in outputs]
        assert (sum(pieces, []) if kind is DELTA else pieces[-1]) == expected[i % 6]
        return True

    async def main() -> None:
        num_tasks = len(asyncio.all_tasks())
        finished = await asyncio.gather(*[client(i) for i in range(100)])
        assert 66 <= sum(finished) < 100
        assert await all_blocks_are_free(engine)
        assert (
            not engine.collectors
            and not engine.output_processor.request_states
            and not engine.engine_core.live_request_ids
        )
        assert len(asyncio.all_tasks() - {engine.output_handler}) == num_tasks

    files = len(os.listdir("/proc/self/fd"))
    run(main)
    run(main)
    assert len(os.listdir("/proc/self/fd")) <= files + 1


def test_refused(engine: AsyncLLM) -> None:
    """By the front or by the core: `ValueError` from the first step of the generator, and the
    engine goes on.
    """

    async def refused(prompt: Any, params: Any, match: str, request_id: str = "x") -> None:
        with pytest.raises(ValueError, match=match):
            await read(engine, prompt, params, request_id)

    async def main() -> None:
        await refused("text", greedy(), "skip_tokenizer_init")
        await refused([10**6], greedy(), "outside|vocabulary")
        # a message would hold it as text, and the answer's id would be another one
        await refused(PROMPTS[0], greedy(), "request_id", uuid.UUID(int=7))  # type: ignore[arg-type]
        await refused(PROMPTS[0], SamplingParams(n=70), "70 sequences")
        with pytest.raises(ValueError, match='task="generate"'):
            async for _ in engine.encode(PROMPTS[0], PoolingParams(), "y"):
                pass
        reader = engine.generate(PROMPTS[0], greedy(), "same")
        await anext(reader)
        await refused(PROMPTS[1], greedy(), "request_id='same' is in use", "same")
        await reader.aclose()
        assert not engine.collectors and not engine.output_processor.request_states
        await engine.check_health()
        assert await engine.collective_rpc(lambda worker: worker.rank) == [0]
        assert await engine.reset_prefix_cache() is True

    run(in_slow_steps(engine, main))


class Told:
    "A stat logger that knows of aborts only."

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.failed: list[str] = []

    def add_request(self, request: Any) -> None: ...

    def record(self, arrived: Any, outputs: list[Any]) -> None: ...

    def abort_request(self, request_id: str) -> None:
        self.aborted.append(request_id)


class ToldOfFailures(Told):
    "And one that tells failed requests apart."

    def fail_request(self, request_id: str) -> None:
        self.failed.append(request_id)


def test_the_core_dies(folder: str) -> None:
    """While requests run: each ends with the reason, as does every later call; stat loggers hear of
    each request.
    """
    told = Told()
    failed = ToldOfFailures()
    engine = AsyncLLM.from_engine_args(EngineArgs(folder, **OPTIONS), stat_loggers=[told, failed])

    async def main() -> None:
        reading = [
            asyncio.create_task(read(engine, prompt, greedy(max_tokens=200), f"r{i}"))
            for i, prompt in enumerate(PROMPTS)
        ]
        while not await blocks_used(engine):
            await asyncio.sleep(0.01)
        os.kill(engine.engine_core.process.pid, signal.SIGKILL)
        errors = await asyncio.gather(*reading, return_exceptions=True)
        for error in errors:
            assert isinstance(error, EngineDeadError) and "was killed by SIGKILL" in str(error)
        assert len(set(map(id, errors))) == len(PROMPTS), "two tasks raise the same exception"
        ids = sorted(f"r{i}" for i in range(len(PROMPTS)))
        assert (sorted(told.aborted), failed.aborted, sorted(failed.failed)) == (ids, [], ids)
        assert (
            engine.errored
            and not engine.is_running
            and isinstance(engine.dead_error, EngineDeadError)
        )
        for call in (
            engine.check_health,
            engine.reset_prefix_cache,
            lambda: read(engine, PROMPTS[0], greedy(), "late"),
        ):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await call()
        await engine.abort("r0")
        engine.shutdown()

    run(in_slow_steps(engine, main))


def test_closed_while_requests_run(folder: str) -> None:
    "They end with `EngineClosedError`; the processes end, here also two workers'."
    args = EngineArgs(folder, tensor_parallel_size=2, distributed_executor_backend="mp", **OPTIONS)
    engine = AsyncLLM.from_engine_args(args)

    async def main() -> None:
        task = asyncio.create_task(read(engine, PROMPTS[0], greedy(max_tokens=200), "a"))
        while not await blocks_used(engine):
            await asyncio.sleep(0.01)
        engine.shutdown()
        with pytest.raises(EngineClosedError, match="the engine is closed"):
            await task
        with pytest.raises(EngineClosedError, match="the engine is closed"):
            await read(engine, PROMPTS[0], greedy(), "b")

    run(in_slow_steps(engine, main))
    wait_until(lambda: engine.engine_core.process.returncode is not None)


class Fails:
    "A stat logger with a fault."

    def __getattr__(self, event: str) -> Any:
        raise LookupError(event)


def test_faults_of_our_own(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stat logger that raises is passed over; where outputs cannot be processed, the requests end
    with that error.
    """

    async def main() -> None:
        engine.stat_loggers.append(Fails())
        outputs = await read(engine, PROMPTS[0], greedy(max_tokens=3), "a")
        assert outputs[-1].finished
        engine.stat_loggers.clear()
        with monkeypatch.context() as patch:
            patch.setattr(engine.output_processor, "process_outputs", lambda news: 1 / 0)
            reading = [read(engine, PROMPTS[i], greedy(), f"r{i}") for i in range(3)]
            errors = await asyncio.gather(*reading, return_exceptions=True)
            assert {str(error) for error in errors} == {
                "outputs could not be processed: ZeroDivisionError: division by zero"
            }
            assert {type(error) for error in errors} == {RuntimeError} and len(
                set(map(id, errors))
            ) == 3
        assert await all_blocks_are_free(engine)
        assert len(await read(engine, PROMPTS[0], greedy(FINAL_ONLY, 5), "a")) == 1

    run(main)


def test_the_output_handler_is_gone(engine: AsyncLLM) -> None:
    "Cancelled by a stranger, say: the next request starts another, and those that wait are served."

    async def main() -> None:
        waiting = asyncio.create_task(read(engine, PROMPTS[0], greedy(max_tokens=40), "waits"))
        while not engine.collectors:
            await asyncio.sleep(0.01)
        assert engine.output_handler
        engine.output_handler.cancel()
        await asyncio.sleep(0.01)
        assert len(await read(engine, PROMPTS[1], greedy(FINAL_ONLY, 3), "next")) == 1
        assert sum(len(output.outputs[0].token_ids) for output in await waiting) == 40

    run(in_slow_steps(engine, main))


def test_merged_outputs() -> None:
    """Text, tokens and log-probabilities of each sequence are joined, whichever of the two pieces
    has it.
    """

    def piece(index: int, text: str, reason: str | None = None) -> CompletionOutput:
        return CompletionOutput(
            index,
            text,
            [ord(c) for c in text],
            None,
            logprobs=[{} for _ in text],
            finish_reason=reason,
        )

    first = RequestOutput("r", None, [1], [piece(0, "ab"), piece(1, "x", "stop")], False)
    second = RequestOutput("r", None, [1], [piece(0, "c"), piece(2, "y")], False)
    merged = merge_outputs(first, second)
    assert [(part.index, part.text, len(part.logprobs or ())) for part in merged.outputs] == [
        (0, "abc", 3),
        (1, "x", 1),
        (2, "y", 1),
    ]
    assert merged.outputs[1].finish_reason == "stop" and merged.outputs[0].token_ids == [97, 98, 99]

    async def main() -> None:
        for is_delta, text in ((True, "abc"), (False, "c")):
            collector = RequestOutputCollector(is_delta)
            collector.put(first)
            collector.put(second)
            assert (await collector.get()).outputs[0].text == text
        collector.put(ValueError("refused"))
        collector.put(second)  # comes too late
        with pytest.raises(ValueError, match="refused"):
            await collector.get()

    run(main)
