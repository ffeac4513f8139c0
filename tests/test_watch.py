"""The page that shows a living engine: its frames agree with the engine's own trace, it costs
nothing unseen, and it plays.
"""

import asyncio
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from browser import CHROMIUM, Browser
from fake_worker import slow_down
from helpers import random_prompts

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("zmq")

import uvicorn
from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from teachvllm import LLM, EngineArgs, SamplingParams
from teachvllm.config import NotSupportedYet
from teachvllm.engine.async_llm import AsyncLLM
from teachvllm.entrypoints.watch import (
    Feed,
    StepDecoder,
    StepEncoder,
    Watcher,
    id_pairs,
    ids_of,
    is_loopback,
    make_watch_router,
    watch,
    watch_page,
)
from teachvllm.trace import StepTrace, Trace, request_phases

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "num_gpu_blocks_override": 24,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "max_model_len": 96,
    "disable_log_stats": True,
}
FIELDS = (
    "step",
    "num_scheduled_tokens",
    "num_computed_tokens",
    "block_tables",
    "waiting",
    "running",
    "swapped",
    "preempted",
    "num_free_blocks",
    "copied_blocks",
    "swapped_out_blocks",
    "swapped_in_blocks",
)


def sampling(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def same(shown: StepTrace, real: StepTrace) -> None:
    "What a frame carries is what the trace has."
    for name in FIELDS:
        assert getattr(shown, name) == getattr(real, name), (real.step, name)
    assert shown.cached_blocks == sorted(real.cached_blocks)
    assert set(shown.finished) == set(real.finished)
    assert abs(shown.start - real.start) < 1e-3 and abs(shown.seconds - real.seconds) < 1e-4


# Frames


def record(folder: str, prompts: list[list[int]], params: Any, **options: Any) -> Trace:
    with LLM(folder, **{**SMALL, **options}) as llm, llm.record() as trace:
        llm.generate(prompts, params, use_tqdm=False)
    return trace


LOADS: dict[str, dict[str, Any]] = {
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap", "swap_space": 0.001},
    "ahead": {"async_scheduling": True},
    "no cache": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("load", LOADS)
def test_frames_are_the_trace(folder: str, load: str) -> None:
    """Through JSON and back, whatever happens: preemption, swaps, forks, prefixes found, and key
    frames in between.
    """
    prompts = [
        *random_prompts(8, 40),
        [5, 6, 7, 8, 9, 10, 11, 12, 13],
        [5, 6, 7, 8, 9, 10, 11, 12, 14, 15],
    ] * 2
    params = [sampling(24)] * 19 + [
        SamplingParams(n=3, temperature=1, seed=1, max_tokens=12, ignore_eos=True)
    ]
    trace = record(folder, prompts, params, **LOADS[load])
    assert any(step.preempted for step in trace.steps) and len(trace.steps) > StepEncoder.KEY_EVERY
    if load == "swap":
        assert any(step.swapped for step in trace.steps)
    encoder = StepEncoder(trace)
    decoder = StepDecoder(
        {
            "num_blocks": trace.num_blocks,
            "block_size": trace.block_size,
            "block_bytes": trace.block_bytes,
        }
    )
    phases = request_phases(trace)
    sizes = []
    for step, now in zip(trace.steps, phases, strict=True):
        data = json.dumps(encoder(step))
        sizes.append(len(data))
        decoder(json.loads(data))
        same(decoder.trace.steps[-1], step)
        prefill = {name for name, phase in now.items() if phase == "prefill"}
        preempted = {name for name, phase in now.items() if phase == "preempted"}
        assert {decoder.names[i] for i in decoder.state["prefill"]} == prefill
        assert {decoder.names[i] for i in decoder.state["lost"]} - set(step.swapped) == preempted
    assert decoder.trace.num_prompt_tokens == trace.num_prompt_tokens
    assert not set(encoder.ids) - {
        n for s in trace.steps[-1:] for n in [*s.waiting, *s.running, *s.swapped, *s.block_tables]
    }
    decoder(json.loads(json.dumps(encoder.idle())))
    assert (
        decoder.is_idle
        and decoder.state["tables"] == {}
        and decoder.state["free"] == trace.num_blocks
    )
    assert encoder.is_idle
    assert sum(sizes) / len(sizes) < 600, "a step is told in few bytes"


def test_pairs_of_ids() -> None:
    for ids in (set(), {0}, {3, 4, 5, 9}, {1, 3, 5}, set(range(100))):
        assert ids_of(id_pairs(ids)) == ids
    assert id_pairs({9, 3, 5, 4}) == [3, 5, 9, 9]


def test_two_living_sequences_have_two_looks() -> None:
    """A colour is free again when its sequence has ended, also for a request that comes under the
    same name.
    """

    def step(number: int, names: list[str]) -> StepTrace:
        tables = {name: [i] for i, name in enumerate(names)}
        one = dict.fromkeys(names, 1)
        prompts = {"num_prompt_tokens": dict.fromkeys(names, 3)}
        return StepTrace(
            number, number, 0, 0, 0, one, one, tables, [], names, [], [], [], 9, **prompts
        )

    encoder = StepEncoder(Trace(16, 4, 64))
    assert encoder(step(0, ["a", "b"]))["new"] == [[0, "a", 3, 0], [1, "b", 3, 1]]
    assert encoder(step(1, ["b", "c"]))["new"] == [[2, "c", 3, 0]]
    assert encoder(step(2, ["b", "c", "a"]))["new"] == [[3, "a", 3, 2]]
    assert set(encoder.trace.num_prompt_tokens) == {"a", "b", "c"}, (
        "and what has ended is forgotten"
    )


# Feeds


def feed_of(num_steps: int, **options: Any) -> tuple[Feed, Callable[[int], None]]:
    feed = Feed(lambda: None, **options)
    trace = Trace(64, 4, 64)

    def add(number: int) -> None:
        table = [block % 64 for block in range(number % 30 + 1)]
        names = {"a": number % 7 + 1}
        feed.add(
            StepTrace(
                number,
                number / 100,
                0,
                0,
                0,
                names,
                names,
                {"a": table},
                [],
                ["a"],
                [],
                [],
                [],
                64 - len(table),
            )
        )

    feed.begin(trace, model="m", max_num_batched_tokens=32)
    for number in range(num_steps):
        add(number)
    return feed, add


def parse(message: bytes) -> list[tuple[str, Any]]:
    "The events of a stream, as a browser reads them."
    events = []
    for part in message.decode().split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in part.split("\n") if line and not line.startswith(":")
        )
        if "data" in fields:
            events.append((fields.get("event", "message"), json.loads(fields["data"])))
    return events


def follow(decoder: StepDecoder | None, message: bytes) -> StepDecoder | None:
    for kind, data in parse(message):
        if kind == "pool":
            decoder = StepDecoder(data)
        elif kind == "message":
            assert decoder
            for frame in data:
                decoder(frame)
    return decoder


def test_a_slow_page_drops_frames_and_stays_right() -> None:
    """It goes on with a key frame: the last state is the true one, and nothing was kept for it
    meanwhile.
    """

    async def run() -> None:
        feed, add = feed_of(10)
        reader = feed.read()
        decoder = follow(None, await anext(reader))
        assert decoder and len(decoder.trace.steps) == 10
        for number in range(10, 1500):
            add(number)
        decoder = follow(decoder, await anext(reader))
        assert decoder
        steps = [step.step for step in decoder.trace.steps]
        assert steps[:10] == list(range(10)) and steps[-1] == 1499
        assert len(steps) < 10 + StepEncoder.KEY_EVERY + 1, "the frames in between were dropped"
        assert len(decoder.trace.steps[-1].block_tables["a"]) == 1499 % 30 + 1
        add(1500)
        decoder = follow(decoder, await anext(reader))
        assert decoder and decoder.trace.steps[-1].step == 1500
        await reader.aclose()
        assert not feed.readers

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_late_page_gets_the_last_minute_and_no_more() -> None:
    async def run() -> None:
        feed, _ = feed_of(3000, seconds=5.0)
        reader = feed.read()
        decoder = follow(None, await anext(reader))
        assert decoder
        steps = decoder.trace.steps
        assert [step.step for step in steps] == list(range(steps[0].step, 3000))
        assert 500 <= len(steps) <= 500 + StepEncoder.KEY_EVERY
        await reader.aclose()
        feed, _ = feed_of(3000, max_bytes=20_000)
        assert feed.num_bytes == sum(len(data) for _, _, data in feed.frames) < 40_000
        assert feed.frames[0][1], "the first is a key frame"

    asyncio.run(asyncio.wait_for(run(), 20))


def test_readers_are_told_the_end() -> None:
    async def run() -> None:
        feed, _ = feed_of(3)
        readers = [feed.read() for _ in range(3)]
        for reader in readers:
            await anext(reader)
        feed.end("it is over")
        for reader in readers:
            assert parse(await anext(reader)) == [("end", "it is over")]
            with pytest.raises(StopAsyncIteration):
                await anext(reader)
        assert not feed.readers

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("ticks", range(6))
def test_a_page_that_leaves_when_news_comes_has_left(ticks: int) -> None:
    "Its task ends, whichever of the two is first (`asyncio.wait_for` once lost the cancellation)."

    async def run() -> None:
        feed, add = feed_of(3)

        async def read() -> None:
            async for _ in feed.read():
                pass

        page = asyncio.create_task(read())
        await asyncio.sleep(3 * Feed.INTERVAL)
        add(3)
        for _ in range(ticks):
            await asyncio.sleep(0)
        page.cancel()
        await asyncio.wait([page], timeout=10)
        assert page.cancelled() and not feed.readers

    asyncio.run(asyncio.wait_for(run(), 20))


# An engine and its server


class Server:
    """An AsyncLLM behind uvicorn, in a loop of its own in a thread: the test does the browser's
    part.
    """

    def __init__(self, folder: str, **options: Any):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.engine: AsyncLLM = AsyncLLM.from_engine_args(
            EngineArgs(model=folder, **{**SMALL, **options})
        )
        self.steps: list[StepTrace] = []  # the engine's own
        self.engine.stat_loggers.append(self)  # type: ignore[arg-type]
        self.call(self._start())

    async def _start(self) -> None:
        app = FastAPI()
        app.include_router(make_watch_router(self.engine))
        [self.watcher] = [one for one in self.engine.stat_loggers if isinstance(one, Watcher)]
        self.watcher.linger = 0.1
        self.server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=10)
        )
        self.serving = asyncio.create_task(self.server.serve())
        while not self.server.started:
            await asyncio.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/watch"

    def call(self, coroutine: Any, timeout: float = 240.0) -> Any:
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()  # else its requests would be in the next test's recording
            raise

    def add_request(self, request: Any) -> None: ...

    def abort_request(self, request_id: str) -> None: ...

    def record(self, arrived: Any, outputs: list[Any]) -> None:
        if arrived.trace:
            self.steps.append(arrived.trace)

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 24, name: str = "r", pause: float = 0.0
    ) -> list[Any]:
        "Run requests together; `pause` seconds between their arrivals."

        async def one(i: int) -> Any:
            await asyncio.sleep(i * pause)
            async for output in self.engine.generate(
                prompts[i], sampling(max_tokens), f"{name}{i}"
            ):
                last = output
            return last

        async def run() -> list[Any]:
            return await asyncio.gather(
                *[one(i) for i in range(len(prompts))], return_exceptions=True
            )

        return self.call(run())

    def until(self, there: Callable[[], Any], what: str, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not there():
            assert time.monotonic() < end, what
            time.sleep(0.01)

    def close(self) -> None:
        async def end() -> None:
            self.watcher.close()
            self.server.should_exit = True
            await self.serving
            self.engine.shutdown()

        self.call(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)
        self.loop.close()


@contextmanager
def served(folder: str, **options: Any) -> Iterator[Server]:
    server = Server(folder, **options)
    try:
        yield server
    finally:
        server.close()


class Page:
    "What reads the stream, in place of a browser."

    opened: ClassVar[list["Page"]] = []

    def __init__(self, url: str):
        self.response = urllib.request.urlopen(f"{url}/events", timeout=30)
        assert self.response.headers["content-type"].startswith("text/event-stream")
        self.decoder: StepDecoder | None = None
        self.num_bytes = 0
        self.ended = ""
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
        self.opened.append(self)

    def _read(self) -> None:
        part = b""
        with suppress(OSError, ValueError, AttributeError):
            for line in self.response:
                part += line
                if line == b"\n":
                    self.num_bytes += len(part)
                    self.ended = next(
                        (data for kind, data in parse(part) if kind == "end"), self.ended
                    )
                    self.decoder = follow(self.decoder, part)
                    part = b""

    def close(self) -> None:
        with suppress(OSError, AttributeError):  # it may have ended
            self.response.fp.raw._sock.shutdown(socket.SHUT_RDWR)
        self.thread.join(60)
        self.response.close()


@pytest.fixture(autouse=True)
def no_page_stays() -> Iterator[None]:
    "A test that failed leaves no page open: the next one would wait for the recording's end."
    yield
    while Page.opened:
        Page.opened.pop().close()


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[Server]:
    with served(folder) as server:
        yield server


def is_recording(server: Server) -> bool:
    return server.watcher.is_recording and server.watcher.early is None


def test_a_page_sees_what_the_trace_has(server: Server) -> None:
    """Two pages, one of which comes in the middle; a load that does not fit, so requests are
    preempted.
    """
    server.steps.clear()
    first = Page(server.url)
    server.until(lambda: is_recording(server), "the recording has begun")
    server.generate(random_prompts(12, 40, seed=1), name="a")
    second = Page(server.url)
    server.until(lambda: second.decoder and second.decoder.trace.steps, "the last minute was sent")
    server.generate(random_prompts(3, 40, seed=2), name="b")
    assert any(step.preempted for step in server.steps) and any(
        step.waiting for step in server.steps
    )
    for page in (first, second):
        server.until(
            lambda page=page: (
                page.decoder
                and page.decoder.is_idle
                and len(page.decoder.trace.steps) == len(server.steps)
            ),
            "an idle engine is shown as idle, with all its steps",
        )
        for shown, real in zip(page.decoder.trace.steps, server.steps, strict=True):
            same(shown, real)
        assert any("takes block" in line for texts in page.decoder.event_texts for line in texts)
        page.close()
    print(f"{first.num_bytes / len(server.steps):.0f} bytes a step")


def test_it_records_only_while_there_is_a_page(server: Server) -> None:
    server.until(lambda: not server.watcher.is_recording, "the last page has left")
    server.steps.clear()
    server.generate(random_prompts(3), name="u")
    assert server.steps == [] and not server.watcher.feed.frames
    for _ in range(3):
        page = Page(server.url)
        server.until(lambda: is_recording(server), "recording")
        server.generate([[5, 6, 7]], max_tokens=4, name="v")
        server.until(lambda page=page: page.decoder and page.decoder.trace.steps, "it is shown")
        assert page.decoder and page.decoder.trace.steps[0].step == 0, "a new recording"
        page.close()
        server.until(lambda: not server.watcher.is_recording, "no page, no recording")
    assert not server.watcher.feed.readers and server.watcher.num_pages == 0
    server.until(lambda: not server.watcher.tasks, "no task is left")


def test_a_page_that_is_loaded_again_keeps_the_last_minute(server: Server) -> None:
    server.until(lambda: not server.watcher.is_recording, "no recording")
    server.watcher.linger = 10.0
    page = Page(server.url)
    server.until(lambda: is_recording(server), "recording")
    server.generate([[5, 6, 7]], max_tokens=4, name="w")
    server.until(lambda: page.decoder and len(page.decoder.trace.steps) >= 4, "it is shown")
    page.close()
    server.until(lambda: server.watcher.num_pages == 0, "it has left")
    again = Page(server.url)
    server.until(lambda: again.decoder and len(again.decoder.trace.steps) >= 4, "and is back")
    server.watcher.linger = 0.1
    again.close()
    server.until(
        lambda: not server.watcher.tasks and not server.watcher.is_recording, "nothing is left"
    )


def test_an_engine_that_cannot_be_recorded_says_why(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse() -> Trace:
        raise NotSupportedYet("a pipeline cannot be recorded yet")

    server.until(lambda: not server.watcher.is_recording, "no other page is open")
    monkeypatch.setattr(server.engine, "start_trace", refuse)
    page = Page(server.url)
    server.until(lambda: page.ended, "the page is told")
    assert page.ended == "a pipeline cannot be recorded yet"
    page.close()
    monkeypatch.undo()
    server.until(lambda: server.watcher.num_pages == 0, "it has left")
    page = Page(server.url)
    server.until(lambda: is_recording(server) and page.decoder, "and the next page is not")
    assert not page.ended
    page.close()


def test_a_page_that_reads_nothing_holds_nothing_up(server: Server) -> None:
    """Its connection is full at some time; requests go on, memory stays, and when it is gone
    nothing is left of it.
    """
    server.until(lambda: not server.watcher.is_recording, "no other page is open")
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        stuck.connect(("127.0.0.1", server.port))
        stuck.sendall(
            f"GET /watch/events HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode()
        )
        server.until(lambda: is_recording(server), "recording")
        for number in range(2000):  # much to say: more than the connection takes
            step = StepTrace(
                number, 0, 0, 0, 0, {}, {}, {}, [f"{number:05}" * 2000], [], [], [], [], 24
            )
            server.loop.call_soon_threadsafe(server.watcher.feed.add, step)
        outputs = server.generate(random_prompts(4, 30, seed=5), name="s")
        assert all(output.finished for output in outputs)
        assert server.watcher.feed.num_bytes <= server.watcher.feed.max_bytes + 1_000_000
    server.until(lambda: server.watcher.num_pages == 0, "it is forgotten")
    server.until(
        lambda: not server.watcher.tasks and not server.watcher.feed.readers, "and nothing is left"
    )


ELSEWHERE = [
    {"Host": "engine.example"},
    {"Host": "10.0.0.7:8000"},
    {"Host": "127.evil.example"},
    {"Host": "127.evil.example:8000"},
    {"Host": "localhost.evil.example"},
    {"X-Forwarded-For": "1.2.3.4"},
    {"Forwarded": "for=1.2.3.4"},
]


@pytest.mark.parametrize("headers", ELSEWHERE)
def test_only_this_machine_is_answered(server: Server, headers: dict[str, str]) -> None:
    """A page of another site whose name was made to point here has its own name in `Host`; a proxy
    here says for whom it asks.
    """
    for path in ("", "/events"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(
                urllib.request.Request(server.url + path, headers=headers), timeout=60
            )
        assert refused.value.code == 403 and "127.0.0.1" in refused.value.read().decode()


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "127.0.0.2", "localhost:9", "[::1]:8000", "[::ffff:127.0.0.1]"]
)
def test_this_machine_is_answered_under_each_of_its_names(server: Server, host: str) -> None:
    with urllib.request.urlopen(
        urllib.request.Request(server.url, headers={"Host": host}), timeout=60
    ) as response:
        assert response.status == 200


def test_what_is_an_address_of_this_machine() -> None:
    ours = ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1", "localhost"]
    others = [
        "127.evil.example",
        "127.0.0.1.evil.example",
        "localhost.",
        "10.0.0.7",
        "::ffff:10.0.0.7",
        "fe80::1",
        "",
        None,
    ]
    assert all(map(is_loopback, ours)) and not any(map(is_loopback, others))


def test_the_page_needs_nothing_else(server: Server) -> None:
    with urllib.request.urlopen(server.url, timeout=60) as response:
        text = response.read().decode()
        policy = response.headers["content-security-policy"]
    assert text == watch_page() and "default-src 'none'" in policy
    assert (
        "http://" not in text.replace("http://www.w3.org", "")
        and "https://" not in text
        and "#0072B2" in text
    )


def test_closing_ends_the_streams(folder: str) -> None:
    "A server that stops does not wait for pages, and nothing is left."
    gc.collect()
    num_files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    with served(folder) as server:
        pages = [Page(server.url) for _ in range(3)]
        server.until(lambda: is_recording(server), "recording")
    for page in pages:
        page.thread.join(60)
        assert not page.thread.is_alive() and page.ended == "the server stops"
        page.close()
    gc.collect()
    if num_files:
        assert len(os.listdir("/proc/self/fd")) <= num_files
    assert not [thread for thread in threading.enumerate() if "watch" in thread.name]


# A notebook


def test_watching_an_llm(folder: str) -> None:
    """The same page for an LLM in this process, from a thread; steps of both calls, and the
    recording by `record` in between.
    """
    with LLM(folder, **SMALL) as llm:
        with watch(llm) as shown:
            page = Page(shown.url)
            llm.generate(random_prompts(10, 40, seed=1), sampling(16), use_tqdm=False)
            steps = list(shown.trace.steps)
            end = time.monotonic() + 120
            while not (page.decoder and page.decoder.is_idle and page.decoder.trace.steps):
                assert time.monotonic() < end, "an idle engine is shown as idle"
                time.sleep(0.01)
            assert any(step.preempted for step in steps)
            assert len(page.decoder.trace.steps) == len(steps) > 16
            for mine, real in zip(page.decoder.trace.steps, steps, strict=True):
                same(mine, real)
            assert (
                shown.url in shown._repr_html_()
                and "iframe" in shown._repr_html_()
                and shown.url in repr(shown)
            )
            assert "Step 1 of" in shown.player() and len(shown.player()) > 1000
            with llm.record() as trace:
                llm.generate([[5, 6, 7]], sampling(4), use_tqdm=False)
            assert len(trace.steps) >= 4 and len(shown.trace.steps) == len(steps)
            while llm.llm_engine.trace is None:
                assert time.monotonic() < end + 20, "the page looks, and the recording goes on"
                time.sleep(0.01)
            llm.generate([[5, 6, 7]], sampling(4), use_tqdm=False)
            assert len(shown.trace.steps) >= 4
        assert llm.llm_engine.trace is None
        page.thread.join(60)
        assert page.ended == "closed" and not page.thread.is_alive()
        page.close()
        with pytest.raises(OSError):
            urllib.request.urlopen(shown.url, timeout=60)
        assert not [thread for thread in threading.enumerate() if thread.name == "teachvllm-watch"]
        shown.close()
        with watch(llm) as again, pytest.raises(OSError):
            watch(llm, port=int(again.url.split(":")[2].split("/")[0]))
    with pytest.raises(ValueError, match="closed"):
        watch(llm)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_page_whose_server_does_not_start_is_refused(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    "There is no page with a dead address; the socket is closed, and the engine is not recorded."

    async def startup(self: uvicorn.Server, sockets: Any = None) -> None:
        raise SystemExit(1)  # as uvicorn does where it cannot listen

    with LLM(folder, **SMALL) as llm, monkeypatch.context() as patched:
        patched.setattr(uvicorn.Server, "startup", startup)
        with pytest.raises(
            ValueError, match=r"did not start at http://127.0.0.1:\d+/watch: try another port"
        ):
            watch(llm)
        assert llm.llm_engine.trace is None
        patched.undo()
        with watch(llm) as shown:
            assert urllib.request.urlopen(shown.url, timeout=60).status == 200


def test_a_watched_llm_forgets_what_no_kept_step_names(folder: str) -> None:
    """A recording that lasts for days has the names, texts and prompts of its last steps, and of no
    others.
    """
    with LLM(folder, **SMALL) as llm, watch(llm) as shown:
        shown.trace.steps.seconds = 0.02  # type: ignore[attr-defined]
        for i in range(6):
            shown.trace.texts[str(2 * i)] = ["a text"]
            params = SamplingParams(n=2, seed=i, max_tokens=4, ignore_eos=True)
            llm.generate([[5, 6, 7, i + 1]] * 2, params, use_tqdm=False)
            time.sleep(0.03)
        steps = shown.trace.steps
        listed = {
            name
            for s in steps
            for name in (*s.waiting, *s.running, *s.finished, *s.block_tables, *s.num_prompt_tokens)
        }
        names = {name.partition(".")[0] for name in listed}
        known = set(shown.trace.num_prompt_tokens) | set(shown.trace.texts)
        assert names and listed <= set(steps.seen)  # type: ignore[attr-defined]
        assert {name.partition(".")[0] for name in known} <= names and len(known) <= 4 * len(
            names
        ) < 24


def test_a_page_that_looks_takes_no_recording_away(folder: str) -> None:
    """`LLM.record` begins between the page's question whether anything is recorded and its own
    start: the recording stays.
    """
    with LLM(folder, **SMALL) as llm, watch(llm) as shown:
        engine = llm.llm_engine
        started = threading.Event()
        began = shown.trace
        with engine._lock:
            engine.stop_trace()
            looks = threading.Thread(target=lambda: (started.set(), shown._look()))
            looks.start()
            started.wait(60)
            time.sleep(0.05)  # it has seen that nothing is recorded, and waits
            trace = engine.start_trace()
        looks.join(60)
        assert engine.trace is trace and shown.trace is began
        engine.stop_trace()
        shown._look()
        assert engine.trace is shown.trace is not began, "but it records where nothing else does"


def test_on_colab_the_recorded_player_is_shown(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(folder, **SMALL) as llm, watch(llm) as shown:
        monkeypatch.setitem(sys.modules, "google.colab", object())  # type: ignore[arg-type]
        assert "player()" in shown._repr_html_() and "iframe" not in shown._repr_html_()
        llm.generate([[5, 6, 7]], sampling(4), use_tqdm=False)
        assert "Block player" in shown._repr_html_()


# A browser


STATES = """frames.map((_, k) => stateAt(k)).filter(s => !s.idle).map(s => ({step: s.step, free: s.free, words: sentence(s),
  tables: [...s.tables].map(([i, t]) => [who.get(i).name, t]), computed: [...s.computed].map(([i, n]) => [who.get(i).name, n]),
  tokens: [...s.tokens].map(([i, n]) => [who.get(i).name, n]), cached: [...s.cached].sort((a, b) => a - b),
  waiting: s.waiting.map(i => who.get(i).name), running: s.running.map(i => who.get(i).name),
  swapped: s.swapped.map(i => who.get(i).name)}))"""


def words(step: StepTrace, phases: dict[str, str]) -> str:
    "What the page says of a step."

    def some(n: int, one: str) -> str:
        return f"{n} {one}" + "s" * (n != 1)

    decode = sum(phases[name] == "decode" for name in step.num_scheduled_tokens)
    prefill = [n for name, n in step.num_scheduled_tokens.items() if phases[name] == "prefill"]
    parts = [f"{some(decode, 'request')} decode{'s' * (decode == 1)}"] if decode else []
    if prefill:
        who = str(len(prefill)) if decode else some(len(prefill), "request")
        parts.append(f"{who} prefill{'s' * (len(prefill) == 1)} {some(sum(prefill), 'token')}")
    wait = f"; {len(step.waiting)} wait{'s' * (len(step.waiting) == 1)}" if step.waiting else ""
    return f"Step {step.step:,}: {', '.join(parts) or 'no request computes'}{wait}"


def start_page(server: Server, browser: Browser, width: int = 1280, height: int = 900) -> None:
    browser.open("about:blank")  # a test that failed may have left its page open
    server.until(lambda: not server.watcher.is_recording, "no other page is open")
    server.steps.clear()
    browser.events.clear()
    browser.size(width, height)
    browser.open(server.url)
    browser.until("document.getElementById('state')?.textContent === 'Waiting for a step'")


@contextmanager
def slow_steps(server: Server) -> Iterator[None]:
    server.call(server.engine.collective_rpc(slow_down, args=(0.02,)))
    try:
        yield
    finally:
        server.call(server.engine.collective_rpc(slow_down, args=(0,)))


def paused_at(browser: Browser) -> str:
    "What a paused page says, as soon as the pause is drawn."
    drawn = "document.getElementById('state').textContent === 'Paused'"
    return str(browser.until(f"{drawn} && document.getElementById('headline').textContent"))


def end_page(browser: Browser) -> None:
    assert browser.errors() == []
    browser.open("about:blank")


def test_the_page_plays(server: Server, browser: Browser) -> None:
    """Live while requests run; then step by step, each state the trace's; a click on a request
    shows its blocks.
    """
    for _ in range(5):  # a busy machine draws a few times a second
        start_page(server, browser)
        browser.js("""window.states = []; window.most = 0;
            new MutationObserver(() => {
                states.push(document.getElementById('state').textContent);
                most = Math.max(most, document.querySelectorAll('.rows button').length);
            }).observe(document.body, {subtree: true, childList: true, characterData: true}); 0""")
        with slow_steps(server):  # on a fast one, too, many requests run at once
            server.generate(random_prompts(14, 40, seed=1), max_tokens=40, name="req-", pause=0.1)
        browser.until("document.getElementById('state').textContent === 'Idle'")
        if drawn := "Live" in browser.js("states") and browser.js("most") > 0:
            break
    assert drawn, "it was drawn while requests ran"
    assert "24 blocks free" in browser.js("document.getElementById('headline').textContent")
    trace = Trace(24, 4, 0, num_prompt_tokens={}, steps=server.steps)
    for step in server.steps:
        trace.num_prompt_tokens |= step.num_prompt_tokens
    phases = request_phases(trace)
    shown = browser.js(STATES)
    assert len(shown) == len(server.steps) > 50 and any(step.preempted for step in server.steps)
    for page, step, now in zip(shown, server.steps, phases, strict=True):
        assert (
            dict(page["tables"]) == step.block_tables
            and dict(page["computed"]) == step.num_computed_tokens
        )
        assert dict(page["tokens"]) == step.num_scheduled_tokens and page["cached"] == sorted(
            step.cached_blocks
        )
        assert [page[queue] for queue in ("waiting", "running", "swapped")] == [
            step.waiting,
            step.running,
            step.swapped,
        ]
        assert (page["step"], page["free"], page["words"]) == (
            step.step,
            step.num_free_blocks,
            words(step, now),
        )

    browser.click("#pause")
    browser.until("document.getElementById('state').textContent === 'Paused'")
    busy = max(range(len(server.steps)), key=lambda i: len(server.steps[i].running))
    browser.js(f"show(frames.findIndex(frame => frame.step === {busy} && !frame.idle))")
    headline = "document.getElementById('headline').textContent"
    browser.until(f"{headline}.startsWith('Step {busy}:')")
    for button, step in (
        ("#back", busy - 1),
        ("#back", busy - 2),
        ("#next", busy - 1),
        ("#next", busy),
    ):
        browser.click(button)
        browser.until(f"{headline} === {words(server.steps[step], phases[step])!r}")

    name = server.steps[busy].running[1]
    number = browser.js(
        f"[...document.querySelectorAll('.rows .who')].findIndex(e => e.textContent === {name!r})"
    )
    browser.js(f"document.querySelectorAll('.rows button')[{number}].id = 'this-one'")
    browser.click("#this-one")
    browser.until("!document.getElementById('one').hidden")
    assert browser.js("document.getElementById('one-name').textContent") == f"Request {name}"
    boxes = browser.js(
        "[...document.querySelectorAll('#one-table span')].map(e => parseInt(e.textContent))"
    )
    assert boxes == server.steps[busy].block_tables[name]
    assert browser.js("document.getElementById('this-one').getAttribute('aria-pressed')") == "true"

    # a block chooses who holds it
    browser.js("document.getElementById('pool').scrollIntoView({block: 'center'})")
    other, table = next((n, t) for n, t in server.steps[busy].block_tables.items() if n != name)
    place = f"""((r, b) => [r.x + b % grid.columns * grid.w + 20, r.y + Math.floor(b / grid.columns) * grid.h + 25])(
        document.getElementById('pool').getBoundingClientRect(), {table[-1]})"""
    browser.click_at(*browser.js(place))
    browser.until(f"document.getElementById('one-name').textContent === 'Request {other}'")
    browser.key("Escape")
    browser.until("document.getElementById('one').hidden")
    browser.js("document.activeElement.blur()")
    browser.key("Home")
    browser.until(f"{headline}.startsWith('Step 0:') && document.getElementById('back').disabled")
    browser.key("ArrowRight")
    browser.until(f"{headline}.startsWith('Step 1:')")
    browser.key(" ")
    browser.until("document.getElementById('state').textContent === 'Idle'")
    end_page(browser)


def test_a_pause_holds_while_the_engine_goes_on(server: Server, browser: Browser) -> None:
    start_page(server, browser)
    server.generate(random_prompts(2, 20), max_tokens=8, name="p")
    browser.until("frames.length > 5 && !document.getElementById('pause').disabled")
    browser.click("#pause")
    held = paused_at(browser)
    server.generate(random_prompts(6, 20, seed=3), max_tokens=20, name="q")
    browser.until(f"frames.at(-1).step >= {len(server.steps) - 1}")
    assert browser.js("document.getElementById('headline').textContent") == held
    browser.click("#pause")
    browser.until(
        "document.getElementById('headline').textContent.includes('after step "
        f"{len(server.steps) - 1}')"
    )
    end_page(browser)


def test_a_page_that_comes_back_keeps_what_it_shows(server: Server, browser: Browser) -> None:
    """The connection is lost while the page is paused: the recording is the same, so its frames and
    the pause stay.
    """
    start_page(server, browser)
    other = Page(server.url)  # so that the recording goes on
    server.generate(random_prompts(2, 20), max_tokens=8, name="k")
    browser.until("frames.length > 5 && live.idle")
    browser.js(
        "window.sources = []; window.Real = EventSource; EventSource = class extends Real {"
        " constructor(url) { super(url); sources.push(this); } }; show(3); 0"
    )
    said = paused_at(browser)
    num_frames = browser.js("frames.length")
    browser.js("connect(); 0")  # as after a lost connection: the same recording from its beginning
    server.generate(random_prompts(2, 20, seed=7), max_tokens=8, name="l")
    browser.until(
        f"sources.length === 1 && sources[0].readyState === 1 && frames.length > {num_frames} + 5"
    )
    steps = browser.js("frames.filter(frame => !frame.idle).map(frame => frame.step)")
    assert steps == sorted(set(steps)), "no step is there twice"
    assert browser.js("document.getElementById('headline').textContent") == said and browser.js(
        "paused && frames.length"
    )
    other.close()
    end_page(browser)


def test_a_refused_page_tries_again(server: Server, browser: Browser) -> None:
    "After an answer other than 200 the browser's EventSource gives up; the page does not."
    start_page(server, browser)
    browser.js(
        "window.tries = 0; EventSource = class { static CLOSED = 2; readyState = 2; "
        "addEventListener() {}"
        " constructor() { tries++; setTimeout(() => this.onerror()); } }; connect(); 0"
    )
    browser.until(
        (
            "lost && document.getElementById('state').textContent.startsWith('Connection "
            "lost') && tries > 1"
        ),
        30,
    )
    end_page(browser)


def test_what_a_screen_reader_gets(server: Server, browser: Browser) -> None:
    """Regions that scroll can be reached and have names; what is announced is a change of state, or
    a step that one goes to.
    """
    start_page(server, browser)
    server.generate(random_prompts(8, 40, seed=1), name="h")
    browser.until(
        "live?.idle && document.getElementById('spoken').textContent.startsWith('Idle. "
        "Idle after step')"
    )
    browser.js("show(5)")
    browser.until("document.getElementById('spoken').textContent.startsWith('Paused. Step ')")
    browser.until("document.getElementById('time').ariaLabel.startsWith('The last minute: ')")
    browser.js("choose([...live.tables.keys(), ...shown.tables.keys()][0])")
    browser.until("!!document.getElementById('one-table')")
    regions = """[...document.querySelectorAll('.scroll, .boxes')]
        .every(e => e.tabIndex === 0 && e.role === 'region' && e.ariaLabel)"""
    assert browser.js(regions) and browser.js("document.querySelector('.tiles').role") == "group"
    said = browser.js("[...document.querySelectorAll('#events li')].map(e => e.textContent)")
    assert len(said) == len(set(said))
    twice = """frames.map((_, k) => stateAt(k)).filter(s => s.preempted.length).map(s => { paintEvents(s);
        const told = document.getElementById('events').textContent;
        return s.preempted.map(i => told.split(`${nameOf(i)} is preempted`).length - 1); }).flat()"""
    assert set(browser.js(twice)) == {1}, "each preemption is told, and told once"
    browser.js("document.getElementById('pause').click()")
    browser.until("document.getElementById('state').textContent === 'Idle'")
    end_page(browser)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_the_page_reads_at_every_width(
    server: Server, browser: Browser, width: int, dark: bool
) -> None:
    """Nothing sticks out sideways, whatever is shown; and what is drawn is drawn in the scheme's
    colours.
    """
    start_page(server, browser, width, 844)
    browser.size(width, 844, dark)
    server.generate(
        random_prompts(10, 40, seed=1), name="chatcmpl-0123456789abcdef0123456789abcdef-"
    )
    browser.until("frames.length > 40")
    browser.js("show(30)")
    browser.until("document.querySelectorAll('.rows button').length > 2")
    # wherever a busy machine has drawn it by now
    browser.js("document.querySelector('.rows button').click()")
    browser.until("!document.getElementById('one').hidden")
    assert browser.js("document.documentElement.scrollWidth") <= width
    inside = """[...document.querySelectorAll('section, canvas, button, .tile')].filter(e => e.offsetParent)
        .map(e => e.getBoundingClientRect().right)"""
    assert max(browser.js(inside)) <= width
    back = browser.js("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(16, 19, 23)") is dark
    colors = """(c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size)(
        document.getElementById('%s'))"""
    for name in ("pool", "budget", "time"):  # something is drawn
        browser.until(f"{colors % name} > 4")
    small = (
        "[...document.querySelectorAll('button')].filter(e => e.offsetParent && "
        "e.getBoundingClientRect().height < 24).length"
    )
    unnamed = (
        "[...document.querySelectorAll('button, input, canvas')].filter(e => !(e.ariaLabel || "
        "e.textContent.trim())).length"
    )
    assert browser.js(small) == browser.js(unnamed) == 0, "all can be hit, and have names"
    end_page(browser)


def test_a_dead_engine_is_said_to_be_dead(folder: str, request: pytest.FixtureRequest) -> None:
    "In the stream, and on the page, which can still go back; and to a page that comes later."
    browser: Browser | None = request.getfixturevalue("browser") if CHROMIUM else None
    with served(folder) as server:
        if browser:
            start_page(server, browser)
        page = Page(server.url)
        server.until(lambda: is_recording(server), "recording")
        server.generate([[5, 6, 7]], max_tokens=8)
        server.until(lambda: page.decoder and page.decoder.trace.steps, "it is shown")
        if browser:
            browser.until("frames.length > 5")
        os.kill(server.engine.engine_core.process.pid, signal.SIGKILL)
        server.until(lambda: page.ended, "the page was told")
        assert "SIGKILL" in page.ended
        page.thread.join(60)
        assert not page.thread.is_alive(), "the stream has ended"
        later = Page(server.url)
        server.until(lambda: later.ended, "so is one that comes later")
        for one in (page, later):
            one.close()
        if browser:
            browser.until("document.getElementById('state').textContent === 'Ended'")
            assert "SIGKILL" in browser.js("document.getElementById('headline').textContent")
            browser.click("#back")
            browser.until("!document.getElementById('next').disabled")
            end_page(browser)


def test_the_frame_in_a_notebook(folder: str, browser: Browser) -> None:
    "What Jupyter is given is a frame with the page in it, which reads the stream."
    with LLM(folder, **SMALL) as llm, watch(llm) as shown:
        shown.app.add_api_route("/cell", lambda: HTMLResponse(shown._repr_html_()))
        browser.open(shown.url.replace("/watch", "/cell"))
        end = time.monotonic() + 120
        while not shown.feed.readers:
            assert time.monotonic() < end, "the frame's page reads the stream"
            browser.js("0")
            time.sleep(0.05)
        browser.open("about:blank")
