"""`bench serve` against a small server that behaves as told: what is counted, when requests are
sent, and what fails.
"""

import argparse
import asyncio
import json
import math
import random
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from teachvllm.benchmarks import serve as module  # noqa: E402
from teachvllm.benchmarks.serve import (  # noqa: E402
    Load,
    RequestFuncOutput,
    add_bench_serve_args,
    arrival_times,
    calculate_metrics,
    parse_goodput,
    run_bench_serve,
    run_load,
    sample_requests,
    send_request,
    show_table,
)

# characters at which Python splits lines, and JSON does not escape them
ODD = "a\u2028b\u2029\x85\u00a0é"


class FakeServer:
    """Streams as many chunks as are asked for. `mode` says what goes wrong; with `every` only in
    each so-manieth request.

    The first `together` requests after the warm-up are held until so many are there.
    """

    def __init__(self) -> None:
        self.mode = ""
        self.every = 1
        self.delay = 0.002
        self.has_usage = True
        self.takes_ids = True
        self.bodies: list[dict] = []
        self.received: list[float] = []
        self.headers: list[dict] = []
        self.ports: list[int] = []
        self.num_now = 0
        self.num_most = 0
        self.together = 1

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        if scope["path"] == "/v1/models":
            return await self.reply(send, 200, {"data": [{"id": "fake-model"}]})
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        body = json.loads(raw)
        self.received.append(time.perf_counter())
        self.bodies.append(body)
        self.ports.append(scope["client"][1])
        self.headers.append({k.decode(): v.decode() for k, v in scope["headers"]})
        mode = self.mode if len(self.bodies) % self.every == 0 else ""
        if mode == "500" or (isinstance(body.get("prompt"), list) and not self.takes_ids):
            return await self.reply(
                send, 500 if mode else 400, {"error": {"message": "no ids here, please"}}
            )
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        while self.num_most < min(self.together, len(self.bodies)):
            await asyncio.sleep(0.001)
        await self.stream(send, body, "chat" in scope["path"], mode)

    async def reply(self, send: Any, status: int, body: dict) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"content-type", b"application/json")],
            }
        )
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    async def stream(self, send: Any, body: dict, chat: bool, mode: str) -> None:
        async def event(text: str) -> None:
            data = f"data: {text}\n\n".encode()
            if mode == "pieces":  # of any size, with a comment before
                data = b": ping\r\n\r\n" + data.replace(b"\n", b"\r\n")
                for i in range(0, len(data), 7):
                    await send(
                        {"type": "http.response.body", "body": data[i : i + 7], "more_body": True}
                    )
            else:
                await send({"type": "http.response.body", "body": data, "more_body": True})

        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream")],
            }
        )
        num = body["max_tokens"]
        for i in range(num):
            await asyncio.sleep(self.delay)
            if mode in ("cut", "short", "error", "nonsense") and i == num // 2:
                break
            choice = {"delta": {"content": ODD}} if chat else {"text": "" if i % 3 else ODD}
            choice["finish_reason"] = "length" if i == num - 1 else None
            await event(json.dumps({"choices": [choice]}, ensure_ascii=False))
        if mode == "cut":
            self.num_now -= 1
            raise RuntimeError("the server breaks")
        if mode == "error":
            await event(json.dumps({"error": {"message": "the step failed", "code": 500}}))
        elif mode == "nonsense":
            await event("{")
        elif mode != "short":
            if self.has_usage:
                await event(
                    json.dumps(
                        {
                            "choices": [],
                            "usage": {"prompt_tokens": 11, "completion_tokens": 2 * num},
                        }
                    )
                )
            await event("[DONE]")
        self.num_now -= 1
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[FakeServer, str]]:
    app = FakeServer()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level=60, lifespan="off", ws="none", timeout_keep_alive=60)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started
    yield app, f"http://127.0.0.1:{sock.getsockname()[1]}"
    server.should_exit = True
    thread.join(20)
    sock.close()


@pytest.fixture
def fake(running: tuple[FakeServer, str]) -> FakeServer:
    app, _ = running
    app.__init__()  # type: ignore[misc]
    return app


@pytest.fixture
def url(running: tuple[FakeServer, str]) -> str:
    return running[1]


def run(url: str, load: Load, **more: Any) -> tuple[list[RequestFuncOutput], float]:
    return asyncio.run(asyncio.wait_for(module.bench_serve(url, load, **more), 60))


def command(url: str, *options: str) -> int:
    parser = argparse.ArgumentParser()
    add_bench_serve_args(parser)
    return run_bench_serve(parser.parse_args(["--base-url", url, *options]))


def test_metrics_are_those_of_the_times(fake: FakeServer, url: str) -> None:
    load = Load(
        num_prompts=12,
        request_rate=200,
        random_input_len=9,
        random_output_len=6,
        random_range_ratio=0.5,
        seed=3,
    )
    outputs, duration = run(url, load)
    assert len(fake.bodies) == 13  # with the warm-up
    # none is in the prefix cache
    assert fake.bodies[0]["prompt"] not in [body["prompt"] for body in fake.bodies[1:]]
    result = calculate_metrics(outputs, duration, percentiles=(50, 99))
    ttft = []
    tpot = []
    itl = []
    e2el = []
    asked = sorted(body["max_tokens"] for body in fake.bodies[1:])
    assert sorted(len(one.chunk_times) for one in outputs) == asked  # a chunk without text counts
    for one in outputs:
        times = one.chunk_times
        assert (
            one.success
            and one.due <= one.start_time <= times[0]
            and times == sorted(times)
            and times[-1] <= duration
        )
        assert one.usage_tokens == 2 * len(times) and one.prompt_len == 11  # as the server counts
        ttft.append(1000 * (times[0] - one.start_time))
        e2el.append(1000 * (times[-1] - one.start_time))
        tpot.append(1000 * (times[-1] - times[0]) / (2 * len(times) - 1))
        itl += [1000 * (b - a) for a, b in zip(times, times[1:])]
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", itl), ("e2el", e2el)):
        assert result[f"mean_{name}_ms"] == pytest.approx(statistics.mean(values))
        assert (
            result[f"median_{name}_ms"]
            == result[f"p50_{name}_ms"]
            == pytest.approx(statistics.median(values))
        )
        assert result[f"std_{name}_ms"] == pytest.approx(statistics.pstdev(values))
        ordered = sorted(values)
        at = 0.99 * (len(ordered) - 1)
        low = math.floor(at)
        expected = ordered[low] + (at - low) * (
            ordered[min(low + 1, len(ordered) - 1)] - ordered[low]
        )
        assert result[f"p99_{name}_ms"] == pytest.approx(expected)
    assert result["completed"] == 12 and result["failed"] == 0 and result["duration"] == duration
    assert result["total_input_tokens"] == 132 and result["total_output_tokens"] == 2 * sum(asked)
    assert result["output_throughput"] == pytest.approx(2 * sum(asked) / duration)
    assert result["total_token_throughput"] == pytest.approx((132 + 2 * sum(asked)) / duration)


def test_arrivals_follow_the_seed(fake: FakeServer, url: str) -> None:
    times = arrival_times(20, 100, 0.5, seed=7)
    assert times == arrival_times(20, 100, 0.5, seed=7) != arrival_times(20, 100, 0.5, seed=8)
    assert times == sorted(times) and times[-1] == pytest.approx(0.2) and times[0] >= 0
    bodies = [{"max_tokens": 2, "number": i} for i in range(20)]
    begin = time.perf_counter()
    outputs, _ = asyncio.run(asyncio.wait_for(run_load(url, "/v1/completions", bodies, times), 60))
    assert [one.due for one in outputs] == times and all(
        one.start_time >= one.due for one in outputs
    )
    assert len(fake.bodies) == 20
    for body, received in zip(fake.bodies, fake.received):
        assert received - begin >= times[body["number"]]  # none was sent before its time
    gaps = [b - a for a, b in zip([0.0, *times], times)]
    # burstiness 0.5: more uneven than a Poisson process
    assert statistics.pstdev(gaps) > 1.05 * statistics.mean(gaps)
    even = arrival_times(200, 10, burstiness=100.0)
    assert max(b - a for a, b in zip(even, even[1:])) < 0.2
    assert arrival_times(3, math.inf) == [0, 0, 0]


def test_the_same_seed_sends_the_same(fake: FakeServer, url: str) -> None:
    load = Load(
        num_prompts=6,
        random_input_len=20,
        random_output_len=3,
        random_range_ratio=0.9,
        seed=5,
        ignore_eos=True,
    )
    run(url, load, model="named")
    first = sorted(fake.bodies, key=json.dumps)
    fake.bodies = []
    run(url, load, model="named")
    assert sorted(fake.bodies, key=json.dumps) == first
    assert all(body["model"] == "named" and body["ignore_eos"] and body["stream"] for body in first)
    assert (
        all(0 < token < 1000 for body in first for token in body["prompt"])
        and len({len(b["prompt"]) for b in first}) > 2
    )
    assert first[0]["stream_options"] == {"include_usage": True} and first[0]["temperature"] == 0
    fake.bodies = []
    run(url, Load(**{**vars(load), "ignore_eos": False, "seed": 6}))
    assert "ignore_eos" not in fake.bodies[0] and fake.bodies[0]["model"] == "fake-model"
    assert all(body["prompt"] != one["prompt"] for body, one in zip(fake.bodies, first))


def test_lengths(url: str) -> None:
    requests = sample_requests(500, 10, 20, range_ratio=0.3, vocab_size=50, seed=1)
    assert {one.prompt_len for one in requests} == set(range(7, 14))
    assert {one.expected_output_len for one in requests} == set(range(14, 27))
    assert {token for one in requests for token in one.prompt} == set(range(12, 50))  # type: ignore[union-attr]
    assert all(
        one.prompt_len == 10 and one.expected_output_len == 1 for one in sample_requests(9, 10, 1)
    )


def test_concurrency_is_limited_in_the_client(fake: FakeServer, url: str) -> None:
    fake.together = 3
    outputs, _ = run(url, Load(num_prompts=12, max_concurrency=3, random_output_len=4))
    assert fake.num_most == 3 and fake.num_now == 0 and all(one.success for one in outputs)
    held_back = [
        one for one in outputs if one.start_time > min(other.chunk_times[-1] for other in outputs)
    ]
    assert len(held_back) >= 9  # and that wait is in no latency
    assert all(one.ttft == one.chunk_times[0] - one.start_time for one in outputs)
    fake.bodies = []
    fake.together = 4
    run(url, Load(num_prompts=12))
    assert fake.num_most > 3


def test_idle_connections_are_not_used_again(
    fake: FakeServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server, uvicorn say, closes them after 5 s: a request sent at that moment would fail, for
    no fault of the server.
    """
    outputs = list[RequestFuncOutput]()
    now = time.monotonic
    ahead = [0.0]

    async def main() -> None:
        async with module.make_client(url) as client:
            for ahead[0] in (0.0, 3.0):  # seconds that pass for the client's clock
                outs = [RequestFuncOutput(0) for _ in range(10)]
                outputs.extend(outs)
                sent = [
                    send_request(client, "/v1/completions", {"max_tokens": 2}, out, now)
                    for out in outs
                ]
                await asyncio.gather(*sent)

    monkeypatch.setattr(time, "monotonic", lambda: now() + ahead[0])
    asyncio.run(asyncio.wait_for(main(), 60))
    assert len(fake.ports) == len(outputs) == 20 and all(one.success for one in outputs)
    assert not set(fake.ports[:10]) & set(fake.ports[10:])


@pytest.mark.parametrize(
    ("mode", "what"),
    [
        ("500", "HTTP 500"),
        ("cut", "RemoteProtocolError"),
        ("short", "before the answer did"),
        ("error", "the step failed"),
        ("nonsense", "JSONDecodeError"),
    ],
)
def test_failures_are_counted(
    fake: FakeServer, url: str, mode: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.mode = mode
    fake.every = 4
    assert command(url, "--num-prompts", "11", "--random-output-len", "6", "--json") == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert (result["completed"], result["failed"]) == (8, 3) and what in result["first_error"]
    assert (
        "3 requests failed; the first: " in err
        and what in err
        and "Failed requests:                         3" in out
    )
    assert result["total_output_tokens"] == 8 * 12  # of those that succeeded


def test_pieces_of_events(fake: FakeServer, url: str) -> None:
    fake.mode = "pieces"
    outputs, _ = run(url, Load(num_prompts=3, random_output_len=7))
    assert [(one.error, len(one.chunk_times), one.usage_tokens) for one in outputs] == [
        ("", 7, 14)
    ] * 3


def test_words_where_ids_are_refused(
    fake: FakeServer, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.takes_ids = False
    said: list[str] = []
    outputs, _ = run(url, Load(num_prompts=3, random_input_len=5), say=said.append)
    assert "no ids here, please" in said[0] and "random words" in said[1]
    assert all(one.success for one in outputs) and all(
        len(body["prompt"].split()) == 5 for body in fake.bodies[2:]
    )
    assert command(url, "--backend", "openai-chat", "--num-prompts", "2") == 0
    assert (
        fake.bodies[-1]["messages"][0]["role"] == "user"
        and "random words" in capsys.readouterr().err
    )


def test_without_usage_chunks_are_counted(
    fake: FakeServer, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.has_usage = False
    assert (
        command(
            url,
            "--num-prompts",
            "3",
            "--random-input-len",
            "9",
            "--random-output-len",
            "5",
            "--json",
        )
        == 0
    )
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert (
        result["total_output_tokens"] == 15
        and result["total_input_tokens"] == 27
        and "without usage" in err
    )


def made(ttft: float, chunks: int, itl: float, **more: Any) -> RequestFuncOutput:
    times = [1.0 + ttft + i * itl for i in range(chunks)]
    return RequestFuncOutput(start_time=1.0, chunk_times=times, prompt_len=10, is_done=True, **more)


def test_goodput_is_exact() -> None:
    outputs = [
        made(0.125, 5, 0.25),  # TTFT 125, TPOT 250, E2EL 1125
        made(0.5, 5, 0.0625),  # TTFT 500, TPOT 62.5, E2EL 750
        made(0.5, 1, 0.0),  # one token: no TPOT
        made(2.0, 3, 0.0625),  # TTFT 2000
        made(0.125, 5, 0.0625, error="broken"),
    ]

    def good(*texts: str) -> float:
        return calculate_metrics(outputs, 4.0, parse_goodput(list(texts)))["request_goodput"]

    assert good("ttft:500") == 3 / 4 and good("ttft:499") == 1 / 4  # the bound itself is kept
    assert good("tpot:62.5") == 3 / 4 and good("tpot:62.4") == 1 / 4  # one token keeps any TPOT
    assert (
        good("ttft:500", "tpot:62.5") == 2 / 4 and good("e2el:750") == 2 / 4 and good("e2el:0") == 0
    )
    result = calculate_metrics(outputs, 4.0)
    assert (
        result["request_goodput"] is None
        and result["request_throughput"] == 1
        and result["failed"] == 1
    )
    assert (
        result["mean_tpot_ms"] == pytest.approx((250 + 62.5 + 62.5) / 3)
        and result["first_error"] == "broken"
    )
    assert result["median_itl_ms"] == pytest.approx(62.5)  # four of 250, six of 62.5
    nothing = calculate_metrics([RequestFuncOutput(error="x")], 1.0)
    assert (
        nothing["completed"] == 0
        and nothing["p99_ttft_ms"] == 0
        and nothing["output_throughput"] == 0
    )
    for text in ("ttft", "ttft:", "ttft:fast", "itl:5", "tpot:-1"):
        with pytest.raises(ValueError, match="goodput"):
            parse_goodput([text])


def test_the_table_is_that_of_vllm() -> None:
    result = calculate_metrics([made(0.5, 5, 0.25)] * 3, 4.0, {"ttft": 500.0}, (90, 99.9))
    lines = show_table(
        result | {"request_rate": "2.0", "max_concurrency": 5}, (90, 99.9)
    ).splitlines()
    assert (
        lines[0] == "============ Serving Benchmark Result ============" and lines[-1] == "=" * 50
    )
    assert "Request goodput (req/s):                 0.75      " in lines
    assert "---------------Time to First Token----------------" in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    rows = {line.split(":")[0]: float(line.split(":")[1]) for line in lines if ":" in line}
    assert rows["Successful requests"] == 3 and rows["Maximum request concurrency"] == 5
    assert rows["Mean TTFT (ms)"] == rows["P90 TTFT (ms)"] == 500 and rows["P99.9 ITL (ms)"] == 250
    assert rows["Total generated tokens"] == 15 and rows["Request rate configured (RPS)"] == 2
    assert rows["Median E2EL (ms)"] == 1500 and rows["Output token throughput (tok/s)"] == 3.75


def test_the_command(
    fake: FakeServer, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        "--num-prompts 5 --request-rate 100 --burstiness 2 --max-concurrency 4 "
        "--random-input-len 6 --seed 4"
    )
    options += (
        " --random-output-len 4 --goodput ttft:60000 tpot:60000 --percentile-metrics ttft,e2el"
    )
    where = [
        "--metric-percentiles",
        "50,90",
        "--save-result",
        "--save-detailed",
        "--result-dir",
        str(tmp_path / "new"),
    ]
    assert command(url + "/v1/", *options.split(), *where, "--json") == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert (
        "P90 E2EL (ms)" in out
        and "TPOT" not in out
        and "5 prompts of random token ids to fake-model" in err
    )
    assert (
        result["request_goodput"] == pytest.approx(result["request_throughput"])
        and result["max_concurrency"] == 4
    )
    (path,) = (tmp_path / "new").iterdir()
    saved = json.loads(path.read_text())
    assert path.name.startswith("openai-100.0qps-fake-model-") and result.items() <= saved.items()
    assert (
        saved["output_lens"] == [8] * 5
        and len(saved["ttfts"]) == 5
        and [len(itls) for itls in saved["itls"]] == [3] * 5
    )
    assert (
        command(
            url,
            "--num-prompts",
            "1",
            "--save-result",
            "--result-dir",
            str(tmp_path),
            "--result-filename",
            "r.json",
        )
        == 0
    )
    assert "ttfts" not in json.loads((tmp_path / "r.json").read_text())


def test_the_key_is_sent_and_a_proxy_is_not_used(
    fake: FakeServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    run(url, Load(num_prompts=1))
    assert fake.headers[-1]["authorization"] == "Bearer secret-key"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--request-rate", "0"], "request_rate"),
        (["--burstiness", "-1"], "burstiness"),
        (["--num-prompts", "0"], "num_prompts"),
        (["--max-concurrency", "0"], "max_concurrency"),
        (["--random-input-len", "0"], "random_input_len"),
        (["--random-range-ratio", "1"], "random_range_ratio"),
        (["--random-vocab-size", "1"], "random_vocab_size"),
        (["--goodput", "speed:9"], "goodput"),
        (["--percentile-metrics", "ttft,speed"], "percentile_metrics"),
        (["--metric-percentiles", "101"], "metric_percentiles"),
        (["--metric-percentiles", "most"], "metric_percentiles"),
    ],
)
def test_what_makes_no_sense_is_refused(
    fake: FakeServer, url: str, options: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(url, *options) == 1
    assert what in capsys.readouterr().err and len(fake.bodies) == 0


def test_no_server_and_no_answers(
    fake: FakeServer, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert command(f"http://127.0.0.1:{closed.getsockname()[1]}") == 1  # nothing listens
    assert "no model at /v1/models (ConnectError" in capsys.readouterr().err
    fake.mode = "500"
    assert command(url) == 1
    assert "did not answer the warm-up request: HTTP 500" in capsys.readouterr().err
    fake.mode = "short"
    fake.every = 1
    seen = RequestFuncOutput()
    seen.end()
    assert not seen.success

    fake.mode = ""
    real = module.run_load

    async def fails_later(*args: Any) -> Any:
        outputs = await real(*args)
        fake.mode = "500"
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run_load", fails_later)
        # the warm-up was answered, and nothing after it
        assert command(url, "--num-prompts", "4") == 1
    assert "4 requests failed" in capsys.readouterr().err


def test_random_event_streams() -> None:
    """However events are cut into chunks, times and tokens are those of the events that have a
    choice.
    """
    rng = random.Random(0)
    for _ in range(200):
        seen = RequestFuncOutput()
        expected = []
        now = 0.0
        usage = None
        for _ in range(rng.randint(0, 12)):
            now += rng.random()
            choices = [{"text": rng.choice(["", "a"]), "finish_reason": None}] * rng.randint(0, 1)
            event: dict[str, Any] = {"choices": choices}
            if rng.random() < 0.2:
                usage = rng.randint(1, 9)
                event["usage"] = {"completion_tokens": usage, "prompt_tokens": 3}
            expected += [now] * len(choices)
            seen.take(json.dumps(event), now)
        done = rng.random() < 0.5
        if done:
            seen.take("[DONE]", now)
        seen.end()
        assert seen.chunk_times == expected and seen.output_tokens == (
            len(expected) if usage is None else usage
        )
        assert seen.success == (done and bool(expected))
