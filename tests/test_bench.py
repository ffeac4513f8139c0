"""`teachvllm bench`: the line it prints, a peer in turn, what is refused, and that no process is
left. Never how long.
"""

import json
import os
import signal
import time
from pathlib import Path
from threading import Thread

import pytest

from teachvllm import LLM, SamplingParams
from teachvllm.__main__ import main
from teachvllm.benchmarks.throughput import (
    PARTS,
    WORKLOADS,
    EngineProcess,
    Limits,
    Workload,
    profile_steps,
    show_profile,
)
from teachvllm.model_executor.layers import LinearBase

TINY = {
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 64,
    "max_model_len": 256,
    "device": "cpu",
}
JOB = {"model": "any", "dtype": "float32", "max_model_len": 99, "requests": [([5, 6], 3)]}
NO_CORE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
VLLM = r"""
import os, time
from pathlib import Path

class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        self.max_tokens = max_tokens

class Output:
    def __init__(self, n):
        self.outputs = [self]
        self.token_ids = [0] * n

class LLM:
    def __init__(self, model, enable_prefix_caching, dtype, max_model_len):
        print("what a library prints is no answer")
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and not enable_prefix_caching
        Path("pids").write_text(f"{os.getpid()}\n")
        if os.environ.get("STAND_IN") == "hang":
            time.sleep(600)
    def generate(self, prompts, params, use_tqdm):
        Path("turns").open("a").write(f"{len(prompts)} ")
        return [Output(each.max_tokens - (os.environ.get("STAND_IN") == "short")) for each in params]
"""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    "A folder, now the current one, with a module that is called vllm: engines' processes find it."
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def options_of(folder: str) -> list[str]:
    return [
        "--model",
        folder,
        "--skip-tokenizer-init",
        "--num-gpu-blocks-override",
        "64",
        "--max-model-len",
        "256",
    ]


def test_workloads_are_the_same_everywhere_and_within_the_vocabulary() -> None:
    for workload in WORKLOADS.values():
        requests = workload.requests(49152, seed=3)
        assert (
            requests == workload.requests(49152, seed=3) and len(requests) == workload.num_requests
        )
        for ids, n in requests:
            assert workload.prompt_len[0] <= len(ids) <= workload.prompt_len[1]
            assert workload.output_len[0] <= n <= workload.output_len[1]
    assert all(0 < i < 128 for ids, _ in Workload(5, (4, 24), (4, 24)).requests(128) for i in ids)


def test_a_profile_is_printed_before_the_line(folder: str, capsys: pytest.CaptureFixture) -> None:
    assert (
        main(["bench", "--workload", "single", "--profile", "--device", "cpu", *options_of(folder)])
        == 0
    )
    *table, line = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert report["steps"] == 128 and list(report["profile"]) == list(PARTS)
    assert sum(row["share"] for row in report["profile"].values()) == pytest.approx(1, abs=0.01)
    assert set(report["limits"]) == {"gbytes_per_s", "gflops_per_s"}
    assert [row[:16].strip() for row in table[1:10]] == list(PARTS) and table[-1].startswith(
        "the machine"
    )


# Peers


def test_vllm_in_turn_is_one_line_of_json(
    folder: str, stand_in: Path, capsys: pytest.CaptureFixture
) -> None:
    words = [
        "bench",
        "--workload",
        "single",
        "--repeat",
        "2",
        "--vs",
        "vllm",
        "--load-format",
        "dummy",
    ]
    assert main([*words, *options_of(folder)]) == 0
    out, error = capsys.readouterr()
    report = json.loads(out)
    turns = [line.split(":")[0] for line in error.splitlines() if "repetition" in line]
    assert turns == ["teachvllm", "vllm"] * 2, "A B A B"
    assert report["workload"] == "single" and report["faster"] == (
        "teachvllm" if report["ratio"] > 1 else "vllm"
    )
    assert len(report["ratios"]) == 2 and report["ratio"] == pytest.approx(
        sum(report["ratios"]) / 2, abs=0.002
    )
    for row, name in zip(report["engines"], ("teachvllm", "vllm"), strict=True):
        assert row["engine"] == name and row["output_tokens"] == 128 and len(row["seconds"]) == 2
        assert (
            row["threads"] == 1
            and row["torch"]
            and min(row["load_seconds"], row["warm_up_seconds"]) >= 0
        )
        assert row["tokens_per_s_min"] <= row["tokens_per_s"] <= row["tokens_per_s_max"]
    assert (stand_in / "turns").read_text() == "1 1 1 ", "a warm-up, two repetitions"
    assert gone(int((stand_in / "pids").read_text()))


def test_a_peer_that_makes_too_few_tokens_is_refused(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "short")
    with (
        EngineProcess("vllm", JOB, env=os.environ | NO_CORE_PROCESS) as peer,
        pytest.raises(ValueError, match="vllm made 2 tokens where 3 were asked for"),
    ):
        peer.run()
    assert gone(peer.process.pid)


def test_ctrl_c_leaves_no_process(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN", "hang")
    pids = stand_in / "pids"

    def press_when_it_loads() -> None:
        while not (pids.exists() and pids.read_text().endswith("\n")):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    Thread(target=press_when_it_loads, daemon=True).start()
    with (
        pytest.raises(KeyboardInterrupt),
        EngineProcess("vllm", JOB, env=os.environ | NO_CORE_PROCESS),
    ):
        pass
    assert gone(int(pids.read_text()))


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--workload", "huge"], 2, "invalid choice: 'huge'"),
        (
            ["--vs", "vllm", "--peer-python", "/no/such/python"],
            1,
            "peer_python='/no/such/python' is no program",
        ),
        (["--repeat", "0"], 1, "repeat=0 must be at least 1"),
        (["--vs", "vllm", "--profile"], 1, "choose one"),
        (
            ["--profile", "--device", "cpu", "--async-scheduling"],
            1,
            "async_scheduling: a profile of steps needs it off",
        ),
        (["throughput"], 2, "unknown: throughput"),
    ],
)
def test_mistakes_are_named(
    words: list[str], status: int, says: str, folder: str, capsys: pytest.CaptureFixture
) -> None:
    try:
        ended = main(["bench", *words, *options_of(folder)])
    except SystemExit as end:
        ended = end.code  # type: ignore[assignment]
    out, error = capsys.readouterr()
    assert ended == status and says in error and not out and "Traceback" not in error


def test_a_peer_that_is_not_installed_is_one_line() -> None:
    with (
        pytest.raises(
            ValueError, match="vllm failed in .*exit status 1.*No module named 'vllm'"
        ) as refused,
        EngineProcess("vllm", JOB),
    ):
        pass
    assert "\n" not in str(refused.value)


# The profile


def test_a_profile_restores_the_engine_and_changes_no_token(folder: str) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    params = SamplingParams(temperature=0, max_tokens=6)
    with (
        LLM(folder, **TINY, dtype="float32", enable_prefix_caching=False) as llm,
        LLM(folder, **TINY) as other,
    ):
        engine = llm.llm_engine
        runner = engine.engine_core.engine_core.executor.driver_worker.worker.model_runner
        watched = [engine, engine.output_processor, runner, runner.model, *runner.model.modules()]
        watched += [m.linear_method for m in runner.model.modules() if isinstance(m, LinearBase)]
        before = [set(vars(one)) for one in watched]
        plain = [
            output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)
        ]
        with pytest.raises(KeyError), profile_steps(llm) as profile:
            timed = [
                output.outputs[0].token_ids
                for output in llm.generate(prompts, params, use_tqdm=False)
            ]
            steps = profile.num_steps
            other.generate(prompts, params, use_tqdm=False)
            raise KeyError
    assert plain == timed and steps == profile.num_steps == 6, "the other engine is not timed"
    assert [set(vars(one)) for one in watched[1:]] == before[1:] and "step" not in vars(engine)
    assert all(profile.seconds[part] > 0 for part in PARTS)
    # FLOPs of a token: three layers' four matrices
    model = 3 * 2 * (64 * 128 + 64 * 64 + 64 * 2 * 96 + 96 * 64)
    assert profile.flops["linears"] == (5 + 5 * 2) * model, (
        "five tokens of the prompts, then two a step"
    )
    assert profile.flops["logits"] == 6 * 2 * (2 * 64 * 128)
    assert "least time" in show_profile(profile.as_dict(), Limits(10.0, 100.0))
