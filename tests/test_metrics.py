"""The metrics count what happened, under the names that vLLM's dashboard asks for, and forget every
request.
"""

import asyncio
import logging
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest

prometheus_client = pytest.importorskip("prometheus_client")

from prometheus_client.openmetrics import exposition as openmetrics  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from teachvllm import EngineArgs, SamplingParams  # noqa: E402
from teachvllm.engine import metrics as module  # noqa: E402
from teachvllm.engine.async_llm import AsyncLLM  # noqa: E402
from teachvllm.engine.metrics import GAUGES, LoggingStatLogger, PrometheusStatLogger, one_two_five  # noqa: E402
from teachvllm.executor.executor_base import get_executor_class  # noqa: E402
from teachvllm.messages import (  # noqa: E402
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    SchedulerStats,
)
from teachvllm.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput  # noqa: E402
from teachvllm.sampling_params import PoolingParams, RequestOutputKind  # noqa: E402

# What vLLM's examples/…/prometheus_grafana/grafana.json queries, in its newest version and in those
# before it. Beside these, every query has {model_name="…"}, and Finish Reason is summed by
# finished_reason.
HISTOGRAMS_SHOWN = [
    "e2e_request_latency_seconds",
    "inter_token_latency_seconds",
    "time_to_first_token_seconds",
]
DASHBOARD = [
    *(f"vllm:{name}_{part}" for name in HISTOGRAMS_SHOWN for part in ("bucket", "sum", "count")),
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_success_total",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_max_num_generation_tokens_sum",
    # older versions of the same file:
    *(f"vllm:time_per_output_token_seconds_{part}" for part in ("bucket", "sum", "count")),
    "vllm:gpu_cache_usage_perc",
    "vllm:num_requests_swapped",
]
# Beside the dashboard, what vLLM's documentation lists and this engine has.
DOCUMENTED = [
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:iteration_tokens_total_bucket",
    "vllm:request_params_n_bucket",
    "vllm:request_params_max_tokens_bucket",
    "vllm:request_inference_time_seconds_sum",
    "vllm:cache_config_info",
]


@pytest.fixture(scope="module")
def config(folder: str) -> Any:
    args = EngineArgs(
        folder, skip_tokenizer_init=True, dtype="float32", device="cpu", num_gpu_blocks_override=64
    )
    return args.create_engine_config()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    "Time stands still, until a test moves `clock.now`."
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def request(request_id: str, num_tokens: int = 3, **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, [5] * num_tokens, SamplingParams(**params), seed=0)


def output(request_id: str, *reasons: str | None, finished: bool = True) -> RequestOutput:
    parts = [CompletionOutput(i, "", [], finish_reason=reason) for i, reason in enumerate(reasons)]
    return RequestOutput(request_id, None, [], parts, finished)


def stats(**values: int) -> SchedulerStats:
    names = dict.fromkeys(SchedulerStats.__struct_fields__, 0) | {"num_gpu_blocks": 64}
    return SchedulerStats(**(names | values))


def sample(metrics: PrometheusStatLogger, name: str, **labels: str) -> float:
    value = metrics.registry.get_sample_value(
        f"vllm:{name}", {"model_name": metrics.model_name, **labels}
    )
    assert value is not None, name
    return value


def ended(metrics: PrometheusStatLogger) -> dict[str, float]:
    reasons = ("stop", "length", "abort", "error")
    return {
        r: n for r in reasons if (n := sample(metrics, "request_success_total", finished_reason=r))
    }


def test_the_dashboard_finds_its_metrics(config: Any) -> None:
    metrics = PrometheusStatLogger(config, "my-model")
    text = prometheus_client.generate_latest(metrics.registry).decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert all(s.labels["model_name"] == "my-model" for s in samples)
    assert set(DASHBOARD) <= {s.name for s in samples}  # before the first request, too
    reasons = {
        s.labels["finished_reason"] for s in samples if s.name == "vllm:request_success_total"
    }
    assert reasons >= {"stop", "length", "abort"}
    metrics.record(
        EngineCoreOutputs(stats=stats(num_gpu_blocks=64)), []
    )  # from now on it is known how many blocks there are
    text = prometheus_client.generate_latest(metrics.registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    names = {s.name for family in families.values() for s in family.samples}
    assert set(DASHBOARD) | set(DOCUMENTED) <= names
    (info,) = families["vllm:cache_config_info"].samples
    assert (
        info.value == 1
        and info.labels["num_gpu_blocks"] == "64"
        and info.labels["block_size"] == "16"
    )
    assert openmetrics.generate_latest(metrics.registry).endswith(
        b"# EOF\n"
    )  # the other format that a scraper may ask for


def test_boundaries_are_those_of_vllm(config: Any) -> None:
    metrics = PrometheusStatLogger(config)

    def bounds(name: str) -> list[float]:
        samples = [s for family in metrics.registry.collect() for s in family.samples]
        found = [float(s.labels["le"]) for s in samples if s.name == f"vllm:{name}_bucket"]
        assert found[-1] == float("inf")
        return found[:-1]

    first = bounds("time_to_first_token_seconds")
    request_time = bounds("e2e_request_latency_seconds")
    assert (
        first[:4] == [0.001, 0.005, 0.01, 0.02]
        and first[-3:] == [160, 640, 2560]
        and len(first) == 22
    )
    assert (
        request_time[:4] == [0.3, 0.5, 0.8, 1.0]
        and request_time[-1] == 7680
        and len(request_time) == 21
    )
    next_token = bounds("inter_token_latency_seconds")
    assert next_token == bounds("time_per_output_token_seconds") and (
        next_token[0],
        next_token[-1],
    ) == (0.01, 80)
    assert bounds("request_params_n") == [1, 2, 5, 10, 20]
    assert bounds("request_prompt_tokens") == one_two_five(256) == [1, 2, 5, 10, 20, 50, 100, 200]
    assert bounds("iteration_tokens_total") == [1, *(2**i for i in range(3, 15))]


def test_tokens_of_one_message_share_the_time_since_the_last(
    config: Any, clock: SimpleNamespace
) -> None:
    "The mean is the time for a token, and the sum that of the decoding, however many come at once."
    metrics = PrometheusStatLogger(config)
    metrics.add_request(request("a", 40, max_tokens=9))
    for now, num_tokens in ((103.0, 2), (104.0, 4), (104.5, 1)):
        clock.now = now
        arrived = EngineCoreOutput("a", 0, [1] * num_tokens, "length" if now == 104.5 else None)
        ends = [output("a", "length")] if arrived.finish_reason else []
        metrics.record(EngineCoreOutputs([arrived]), ends)
    assert sample(metrics, "inter_token_latency_seconds_sum") == 1.5
    assert sample(metrics, "inter_token_latency_seconds_count") == 5
    assert sample(metrics, "inter_token_latency_seconds_bucket", le="0.3") == 4
    assert sample(metrics, "request_decode_time_seconds_sum") == 1.5
    assert sample(metrics, "generation_tokens_total") == 7
    assert sample(metrics, "request_generation_tokens_sum") == 7


def test_latencies_are_exact(config: Any, clock: SimpleNamespace) -> None:
    metrics = PrometheusStatLogger(config)
    metrics.add_request(request("a", 40, max_tokens=7))
    clock.now = 103.0  # it was scheduled after 2 s
    metrics.record(
        EngineCoreOutputs([EngineCoreOutput("a", 0, [1], first_scheduled_time=102.0)]), []
    )
    for now in (103.5, 105.5):
        clock.now = now
        metrics.record(
            EngineCoreOutputs([EngineCoreOutput("a", 0, [1])]), [output("a", None, finished=False)]
        )
    clock.now = 106.0
    metrics.record(
        EngineCoreOutputs([EngineCoreOutput("a", 0, [1], "length")]), [output("a", "length")]
    )
    seconds = {
        "time_to_first_token": 3.0,
        "e2e_request_latency": 6.0,
        "request_queue_time": 2.0,
        "request_prefill_time": 1.0,
        "request_decode_time": 3.0,
        "request_inference_time": 4.0,
        "inter_token_latency": 3.0,
        "time_per_output_token": 3.0,
    }
    assert {name: sample(metrics, f"{name}_seconds_sum") for name in seconds} == seconds
    assert sample(metrics, "inter_token_latency_seconds_count") == 3
    # two of half a second, one of two
    assert sample(metrics, "inter_token_latency_seconds_bucket", le="0.5") == 2
    assert (
        sample(metrics, "prompt_tokens_total") == sample(metrics, "request_prompt_tokens_sum") == 40
    )
    assert (
        sample(metrics, "generation_tokens_total")
        == sample(metrics, "request_generation_tokens_sum")
        == 4
    )
    assert (
        sample(metrics, "request_params_max_tokens_sum") == 7
        and sample(metrics, "request_params_n_sum") == 1
    )
    assert (
        sample(metrics, "iteration_tokens_total_sum") == 44
        and sample(metrics, "iteration_tokens_total_count") == 4
    )
    assert ended(metrics) == {"length": 1} and metrics.requests == {}


def test_answers_of_a_request_are_counted_one_by_one(config: Any, clock: SimpleNamespace) -> None:
    metrics = PrometheusStatLogger(config)
    metrics.add_request(request("a", n=3, output_kind=RequestOutputKind.DELTA))
    metrics.record(EngineCoreOutputs([EngineCoreOutput("a", i, [1]) for i in range(3)]), [])
    # a stop string: the core's news do not say so
    part = CompletionOutput(1, "", [], finish_reason="stop")
    metrics.record(
        EngineCoreOutputs([EngineCoreOutput("a", 1, [2])]),
        [RequestOutput("a", None, [], [part], finished=False)],
    )
    last = [CompletionOutput(i, "", [], finish_reason="length") for i in (0, 2)]
    metrics.record(
        EngineCoreOutputs([EngineCoreOutput("a", i, [2, 3], "length") for i in (0, 2)]),
        [RequestOutput("a", None, [], last, finished=True)],
    )
    # the core was a step ahead
    metrics.record(EngineCoreOutputs([EngineCoreOutput("a", 1, [9])]), [])
    assert ended(metrics) == {"stop": 1, "length": 2}
    assert (
        sample(metrics, "time_to_first_token_seconds_count")
        == sample(metrics, "e2e_request_latency_seconds_count")
        == 1
    )
    assert (
        sample(metrics, "request_generation_tokens_count") == 3
        and sample(metrics, "generation_tokens_total") == 8
    )
    assert (
        sample(metrics, "request_max_num_generation_tokens_sum") == 3
        and sample(metrics, "request_params_n_sum") == 3
    )


def test_vectors(config: Any, clock: SimpleNamespace) -> None:
    metrics = PrometheusStatLogger(config)
    for name in "ab":
        metrics.add_request(
            EngineCoreRequest(name, [1, 2], SamplingParams(), 0, pooling_params=PoolingParams())
        )
    outputs = [
        PoolingRequestOutput(name, PoolingOutput(None), [1, 2], True, error)
        for name, error in (("a", None), ("b", "x"))
    ]
    news = [EngineCoreOutput(name, 0, [], "stop", first_scheduled_time=100.0) for name in "ab"]
    metrics.record(EngineCoreOutputs(news), outputs)
    assert ended(metrics) == {"stop": 1, "error": 1} and metrics.requests == {}
    assert (
        sample(metrics, "prompt_tokens_total") == 2
        and sample(metrics, "request_queue_time_seconds_count") == 1
    )
    assert sample(metrics, "request_params_max_tokens_count") == 0  # a vector has none


def test_totals_become_differences_and_idle_gauges_are_zero(config: Any) -> None:
    metrics = PrometheusStatLogger(config)
    other = PrometheusStatLogger(config)
    metrics.add_request(request("a"))
    for total in (3, 3, 10):
        said = stats(
            num_running=1,
            num_waiting=2,
            num_swapped=3,
            num_gpu_blocks_used=16,
            num_preemptions=total,
            prefix_cache_queries=10 * total,
            prefix_cache_hits=5 * total,
        )
        metrics.record(EngineCoreOutputs(stats=said), [])
    assert (metrics.value("num_preemptions"), metrics.value("prefix_cache_queries")) == (10, 100)
    assert (
        metrics.value("prefix_cache_hits") == sample(metrics, "gpu_prefix_cache_hits_total") == 50
    )
    assert [metrics.value(name) for name in GAUGES] == [1, 2, 3, 0.25]
    assert sample(metrics, "gpu_cache_usage_perc") == 0.25
    assert [other.value(name) for name in GAUGES] == [0, 0, 0, 0]  # two engines in one process
    metrics.abort_request("a")
    assert [metrics.value(name) for name in GAUGES] == [0, 0, 0, 0]
    metrics.record(EngineCoreOutputs(stats=said), [])  # a step that was on its way
    assert [metrics.value(name) for name in GAUGES] == [0, 0, 0, 0] and metrics.value(
        "num_preemptions"
    ) == 10
    assert sample(metrics, "iteration_tokens_total_count") == 0  # no step brought anything


def test_every_way_out_forgets_the_request(config: Any) -> None:
    "Random lives: what is remembered is what runs, and each answer is counted once."
    rng = random.Random(0)
    metrics = PrometheusStatLogger(config)
    alive: list[str] = []
    expected = {"stop": 0, "length": 0, "abort": 0, "error": 0}
    tokens = num_first = 0
    for i in range(2000):
        what = rng.choice(["add", "add", "step", "step", "finish", "refuse", "abort", "fail"])
        one = (
            alive.pop(rng.randrange(len(alive)))
            if alive and what in ("finish", "refuse", "abort", "fail")
            else None
        )
        if what == "add":
            metrics.add_request(request(f"r{i}"))
            alive.append(f"r{i}")
        elif what == "step":
            chosen = rng.sample(alive, min(len(alive), 5))
            num_first += sum(metrics.requests[name].first_token_time is None for name in chosen)
            metrics.record(
                EngineCoreOutputs([EngineCoreOutput(n, 0, [1]) for n in [*chosen, "unknown"]]), []
            )
            tokens += len(chosen)
        elif one and what == "finish":
            reason = rng.choice(["stop", "length", "error"])
            expected[reason] += 1
            metrics.record(EngineCoreOutputs(), [output(one, reason), output("unknown", "stop")])
        elif one and what == "refuse":
            metrics.record(EngineCoreOutputs(refused=[(one, "too long"), ("unknown", "")]), [])
        elif one and what == "fail":
            expected["error"] += 1
            metrics.fail_request(one)
            metrics.fail_request(one)
        elif one:
            expected["abort"] += 1
            metrics.abort_request(one)
            metrics.abort_request(one)
        assert sorted(metrics.requests) == sorted(alive)
    assert ended(metrics) == expected and sample(metrics, "generation_tokens_total") == tokens
    assert (
        sample(metrics, "e2e_request_latency_seconds_count")
        == expected["stop"] + expected["length"]
    )
    assert sample(metrics, "time_to_first_token_seconds_count") == num_first


def test_lines_in_the_log(
    config: Any, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = PrometheusStatLogger(config)
    lines = LoggingStatLogger(metrics, interval=10.0)

    def step(tokens: int, total: int = 0) -> None:
        said = stats(
            num_running=1,
            num_gpu_blocks_used=32,
            prefix_cache_queries=total,
            prefix_cache_hits=total // 4,
        )
        arrived = EngineCoreOutputs([EngineCoreOutput("a", 0, [1] * tokens)], stats=said)
        for observer in (metrics, lines):
            observer.record(arrived, [])

    with caplog.at_level(logging.INFO, "teachvllm"):
        clock.now += 1000  # idle: it does not count
        for observer in (metrics, lines):
            observer.add_request(request("a", 100))
        clock.now += 4
        step(20, 100)
        assert not caplog.messages
        clock.now += 6
        step(20, 100)
        clock.now += 20
        step(20, 100)
    first, second = caplog.messages
    assert first.startswith(
        "prompt 10 tokens/s, generation 4 tokens/s; running 1, waiting 0, swapped 0; KV "
        "cache 50% used"
    )
    assert "prefix cache hits 25%; 0 preemptions" in first
    assert (
        second.startswith("prompt 0 tokens/s, generation 1 tokens/s")
        and "prefix cache hits 0%" in second
    )
    lines.abort_request("a")


def test_without_the_library(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install 'teachvllm\[serve\]'"):
        PrometheusStatLogger(config)


def test_an_engine_under_observation(config: Any) -> None:
    """A real engine: counters are what its users got; readers that leave and requests that cannot
    run leave nothing behind.
    """
    pytest.importorskip("zmq")
    metrics = PrometheusStatLogger(config)
    engine = AsyncLLM(config, get_executor_class(config), stat_loggers=[metrics])
    rng = random.Random(1)

    async def ask(i: int) -> tuple[int, int, int]:
        """Tokens of the prompt and of the answers, and how many answers; zeros if the reader has
        left.
        """
        n = rng.choice([1, 1, 2])
        kind = rng.choice(list(RequestOutputKind))
        params = SamplingParams(
            n=n, max_tokens=rng.randint(2, 12), ignore_eos=True, output_kind=kind, seed=i
        )
        prompt = [rng.randrange(3, 100) for _ in range(rng.randint(1, 40))]
        leaves = i % 5 == 0
        await asyncio.sleep(rng.random() / 10)
        tokens = dict.fromkeys(range(n), 0)
        async for got in engine.generate({"prompt_token_ids": prompt}, params, str(i)):
            if leaves:
                return 0, 0, 0
            for part in got.outputs:
                before = tokens[part.index] if kind is RequestOutputKind.DELTA else 0
                tokens[part.index] = before + len(part.token_ids)
        return len(prompt), sum(tokens.values()), n

    async def main() -> list[tuple[int, int, int]]:
        return await asyncio.wait_for(asyncio.gather(*(ask(i) for i in range(40))), 120)

    try:
        got = asyncio.run(main())
    finally:
        engine.shutdown()
    served = [one for one in got if one[2]]
    assert metrics.requests == {} and [metrics.value(name) for name in GAUGES] == [0, 0, 0, 0]
    answers = sum(n for *_, n in served)
    assert sum(count for reason, count in ended(metrics).items() if reason != "abort") >= answers
    assert sample(metrics, "request_prompt_tokens_sum") >= sum(prompt for prompt, *_ in served)
    # else one that left had ended by then
    if ended(metrics).get("abort") == len(got) - len(served):
        assert ended(metrics)["length"] == answers
        assert sample(metrics, "request_prompt_tokens_sum") == sum(prompt for prompt, *_ in served)
        assert sample(metrics, "request_generation_tokens_sum") == sum(
            tokens for _, tokens, _ in served
        )
    assert sample(metrics, "e2e_request_latency_seconds_count") >= len(served)
    queued = sample(metrics, "request_queue_time_seconds_sum")
    prefill = sample(metrics, "request_prefill_time_seconds_sum")
    assert 0 <= queued and 0 < prefill <= sample(metrics, "request_inference_time_seconds_sum")
    with pytest.raises(ValueError):  # the observer hears of the end, too
        asyncio.run(ask(99))
    assert metrics.requests == {}
