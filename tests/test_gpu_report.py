"""tools/gpu_report.py: its page is what it would write, toy sizes run all of it, and failures are
written down.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import compiling_env

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "gpu_report.py"
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_report", TOOL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*options: str) -> str:
    "The tool's output, on a machine without a GPU."
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, TOOL, *options],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "The folder that a toy run wrote."
    out = tmp_path_factory.mktemp("report")
    run("--toy", "--out", str(out))
    return out


def test_the_page_is_what_the_results_say(tool: ModuleType) -> None:
    raw = DOCS / "gpu-report.json"
    report = json.loads(raw.read_text()) if raw.exists() else None
    assert (DOCS / "gpu-report.md").read_text() == tool.page(report), (
        "run `python tools/gpu_report.py --render`"
    )
    assert report is None or not report["toy"]


def test_without_a_gpu_nothing_is_measured_and_nothing_lost(
    tool: ModuleType, tmp_path: Path, toy: Path
) -> None:
    assert "no CUDA device" in run("--out", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["gpu-report.md"]
    page = (tmp_path / "gpu-report.md").read_text()
    assert (
        page == tool.page(None)
        and page.count("not measured") == len(tool.BARS)
        and "make gpu-report" in page
    )
    raw = (toy / "gpu-report.json").read_text()
    assert "stay" in run("--out", str(toy)) and (toy / "gpu-report.json").read_text() == raw


def test_toy_sizes_run_every_benchmark(toy: Path) -> None:
    report = json.loads((toy / "gpu-report.json").read_text())
    failed = [
        (row["bench"], row["args"], row["error"]) for row in report["results"] if "error" in row
    ]
    assert not failed
    ran = {row["bench"] for row in report["results"]}
    assert ran == {
        "copy_bandwidth",
        "matmul_rate",
        "bench_decode",
        "bench_prefill",
        "bench_engine",
        "bench_transformers",
    }
    for row in report["results"]:
        for name, result in row.get("results", {}).items():
            assert "seconds" in result or name in ("sdpa_efficient", "sdpa_cudnn"), (name, result)
            if name == "triton" or name.startswith("v"):
                assert result["deviation"] < 1e-3
    from teachvllm.benchmarks.gpu import ABLATIONS

    assert [
        row["turned_off"] for row in report["results"] if row["bench"] == "bench_engine"
    ] == list(ABLATIONS)


def test_a_toy_is_never_taken_for_a_measurement(tool: ModuleType, toy: Path) -> None:
    page = (toy / "gpu-report.md").read_text()
    report = json.loads((toy / "gpu-report.json").read_text())
    assert "its figures mean nothing" in page and {bar["verdict"] for bar in report["bars"]} == {
        "not measured"
    }
    assert page == tool.page(report)
    for name in ("decode", "prefill", "engine"):
        assert (toy / "gpu-report" / f"{name}.png").read_bytes().startswith(
            b"\x89PNG"
        ) and f"gpu-report/{name}.png" in page
    done = subprocess.run([sys.executable, TOOL, "--toy"], capture_output=True, text=True)
    assert done.returncode == 2 and "needs --out" in done.stderr


def test_what_a_pretended_card_has_no_figure_for_is_a_dash(tool: ModuleType, toy: Path) -> None:
    report = json.loads((toy / "gpu-report.json").read_text())
    rows = [tool.without_times(row) for row in report["results"]]
    kept = {name for row in rows for name, x in row.items() if isinstance(x, float)}
    assert not kept and all(row["seconds"] is None for row in rows if "output_tokens" in row)
    page = tool.page(report | {"toy": False, "machine": {"pretended": True}, "results": rows})
    for line in page.partition("## Decode")[2].partition("## Machine")[0].splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        assert not any(re.fullmatch(r"[\d,]*\d\.\d+|\d+%", cell) for cell in cells), line
    for name in ("everything on", "fused kernels off"):
        assert f"| {name} | — | — | — | — | — | 0 | — |" in page
    assert "has no speed" in page and ".png" not in page and page.count("not measured") == 5


PRETENDED = """
import sys
sys.path.insert(0, "tools")
import gpu_report
first, _, _, prompt, *_ = gpu_report.toy_tasks()
gpu_report.toy_tasks = lambda: [first, prompt]
sys.exit(gpu_report.main())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is in the way")
def test_a_run_on_a_pretended_card_ends_with_a_page(tmp_path: Path) -> None:
    card = [sys.executable, "-m", "teachvllm.pretend", "--num-sms", "4", "T4"]
    command = [*card, sys.executable, "-c", PRETENDED, "--no-tests"]
    options = {"env": compiling_env(PYTHONPATH=str(ROOT)), "cwd": ROOT, "text": True}
    done = subprocess.run(command, **options, capture_output=True)
    assert done.returncode == 2 and "a pretended card needs --out" in done.stderr
    done = subprocess.run([*command, "--out", str(tmp_path)], **options, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu-report.json").read_text())
    assert report["machine"]["device"] == "Tesla T4 (pretended)"
    copied, prompt = report["results"]
    assert copied["bytes"] and copied["seconds"] is copied["bytes_per_second"] is None
    ours = prompt["results"]["triton"]
    assert ours["deviation"] < 1e-2 and ours["seconds"] is None and ours["repeats"] == 1
    assert "Run on Tesla T4 (pretended)" in (tmp_path / "gpu-report.md").read_text()


def attention(
    bench: str, share: float | None = None, ratio: float | None = None, **size: int
) -> dict[str, Any]:
    "A result as benchmarks give it, with a made-up share and ratio, to test the verdicts."
    timing = (
        {"seconds": 1.0, "share_of_copy": share, "share_of_roofline": 0.5}
        if share
        else {"error": "broken"}
    )
    row = {"bench": bench, "args": size, "num_heads": 16, "num_kv_heads": 8, "batch": 1, **size}
    return {**row, "results": {"triton": timing}, **({"ratio_to_sdpa": ratio} if ratio else {})}


def verdicts(
    tool: ModuleType, *results: dict[str, Any], device: str = "NVIDIA H100 80GB HBM3"
) -> list[str]:
    report = {"toy": False, "machine": {"device": device}, "results": list(results)}
    return [bar["verdict"] for bar in tool.judge(report)]


def test_verdicts(tool: ModuleType) -> None:
    "Results made up on both sides of each bar."
    engine = {"bench": "bench_engine", "turned_off": "everything on", "requests": 256}
    other = {
        "bench": "bench_transformers",
        "method": "generate",
        "batch_size": 8,
        "tokens_per_second": 4000,
    }
    batched = {**other, "method": "generate_batch", "batch_size": None, "tokens_per_second": 3000}
    shapes = [(b, c, h) for b in (32, 128, 256) for c in (4096, 16384) for h in tool.HEADS.values()]
    good = [
        *(attention("bench_decode", 0.76, batch=b, context=c, **h) for b, c, h in shapes),
        *(attention("bench_decode", 0.61, context=16384, **h) for h in tool.HEADS.values()),
        attention("bench_decode", 0.1, batch=8, context=4096),  # no bar
        *(
            attention("bench_prefill", 0.5, 0.61, length=n, **h)
            for n in tool.LENGTHS
            for h in tool.HEADS.values()
        ),
        {**engine, "tokens_per_second": 15001},
        other,
        batched,
    ]
    assert verdicts(tool, *good) == ["met"] * 5
    assert verdicts(tool) == ["not measured"] * 5
    assert verdicts(tool, *good, device="Tesla T4")[3] == "not an H100"
    worse = [
        attention("bench_decode", 0.74, batch=256, context=16384),
        attention("bench_prefill", 0.5, 0.59, length=8192),
        {**batched, "tokens_per_second": 5001},
    ]
    assert verdicts(tool, *worse, *good) == ["not met", "met", "not met", "met", "not met"]
    bar_of = {"bench_prefill": 2, "bench_engine": 3, "bench_transformers": 4}
    for i, row in enumerate(good):  # a bar is not judged while anything is missing that it compares
        if row.get("batch") != 8:
            at = bar_of.get(row["bench"], int(row.get("batch") == 1))
            missing = {at, 4} if row is not good[-1] and row["bench"] == "bench_engine" else {at}
            want = ["not measured" if bar in missing else "met" for bar in range(5)]
            assert verdicts(tool, *good[:i], *good[i + 1 :]) == want, row
    assert verdicts(tool, attention("bench_decode", batch=32, context=4096))[0] == "not measured", (
        "it failed"
    )


def test_what_a_bar_compares_is_measured_early(tool: ModuleType) -> None:
    tasks = tool.full_tasks(256, 80 << 30)
    methods = [i for i, item in enumerate(tasks) if item["bench"] == "bench_transformers"][:2]
    assert methods[1] == methods[0] + 1 and tasks[methods[1]]["args"]["batch_size"] is None
    names = [tool.describe_fully(item) for item in tasks]
    assert len(set(names)) == len(names)


def test_resume_runs_what_is_missing_or_failed(
    tool: ModuleType, monkeypatch, tmp_path: Path
) -> None:
    tasks = [tool.task("copy_bandwidth", 0, num_bytes=i) for i in range(4)]
    ran: list[int] = []

    def run_tasks(todo: list, deadline: float, toy: bool, save: Any) -> None:
        ran[:] = [item["args"]["num_bytes"] for item in todo]
        save([{"bench": item["bench"], "args": item["args"], "new": True} for item in todo])

    monkeypatch.setattr(tool, "run_tasks", run_tasks)
    monkeypatch.setattr(tool, "toy_tasks", lambda: tasks)
    machine = subprocess.CompletedProcess([], 0, stdout=b'{"device": "a GPU"}')
    monkeypatch.setattr(tool.subprocess, "run", lambda *args, **options: machine)
    # 7 is no task any more
    rows = [{"bench": "copy_bandwidth", "args": {"num_bytes": i}} for i in (2, 0, 7)]
    rows.append({"bench": "copy_bandwidth", "args": {"num_bytes": 1}, "error": "not begun"})
    old = {
        "toy": True,
        "machine": {"device": "a GPU"},
        "results": rows,
        "tests": None,
        "took": 50.0,
        "budget": 60,
    }
    tool.save(old, tmp_path)
    report = tool.measure(tmp_path, 60, toy=True, tests=False, resume=True)
    assert ran == [1, 3] and report["budget"] == 120 and report["took"] >= 50
    assert [(row["args"]["num_bytes"], "new" in row) for row in report["results"]] == [
        (0, False),
        (1, True),
        (2, False),
        (3, True),
    ]
    assert json.loads((tmp_path / "gpu-report.json").read_text())["results"] == report["results"]
    tool.measure(tmp_path, 60, toy=True, tests=False)
    assert ran == [0, 1, 2, 3]
    tool.save({**old, "machine": {"device": "another"}}, tmp_path)
    with pytest.raises(SystemExit, match="another machine"):
        tool.measure(tmp_path, 60, toy=True, tests=False, resume=True)


def test_failures_are_written_down_and_the_rest_goes_on(tool: ModuleType) -> None:
    tasks = [
        tool.task("bench_engine", 0, turned_off="gravity"),
        tool.task("copy_bandwidth", 1e6, num_bytes=1024),  # no budget is that large
        tool.task("copy_bandwidth", 0, num_bytes=1024, device="cpu"),
    ]
    saved: list[int] = []
    rows = tool.run_tasks(
        tasks, time.time() + 120, toy=True, save=lambda rows: saved.append(len(rows))
    )
    assert rows[0]["error"].startswith("ValueError: turned_off='gravity': choose one of")
    assert rows[1]["error"] == "not begun: the time budget was spent"
    assert rows[2]["bytes_per_second"] > 0 and saved[-1] == 3
    text = "\n".join(tool.failures_section({"results": rows}))
    assert "gravity" in text and "not begun" in text


def test_a_child_that_dies_or_hangs_takes_one_task_with_it(
    tool: ModuleType, monkeypatch, tmp_path: Path
) -> None:
    "Children that die at their second task, until the third one sleeps beyond the deadline."
    script = tmp_path / "child.py"
    script.write_text(
        "import json, os, sys, time\n"
        "tasks = json.load(open(sys.argv[2]))\n"
        "if len(tasks) < 4:\n"
        f"    open({str(tmp_path / 'asleep')!r}, 'w').close()\n"
        "    time.sleep(600)\n"
        "open(sys.argv[3], 'a').write(json.dumps(tasks[0]) + '\\n')\n"
        f"os._exit({tool.GPU_LOST} if len(tasks) == 6 else 9)\n"
    )
    monkeypatch.setattr(tool, "__file__", str(script))
    clock = SimpleNamespace(time=lambda: float((tmp_path / "asleep").exists()), sleep=time.sleep)
    # the deadline, 0.5, has passed once the third one sleeps
    monkeypatch.setattr(tool, "time", clock)
    tasks = [tool.task("copy_bandwidth", 0, num_bytes=i) for i in range(6)]
    rows = tool.run_tasks(tasks, 0.5, toy=True, save=lambda rows: None)
    assert [row["args"]["num_bytes"] for row in rows] == list(range(6))
    late = "stopped: the time budget was spent"
    assert [row.get("error") for row in rows] == [
        None,
        None,
        "its process died with status 9",
        late,
        late,
        late,
    ]


def test_only_files_with_gpu_tests_are_collected(tool: ModuleType) -> None:
    names = {Path(path).name for path in tool.gpu_test_files()}
    assert {"test_triton.py", "test_cuda_graph.py"} <= names and "test_notebooks.py" not in names


def test_gpu_tests_are_counted(tool: ModuleType, tmp_path: Path) -> None:
    marked = "import pytest\n\n@pytest.mark.gpu\n"
    (tmp_path / "test_a.py").write_text(
        marked + "@pytest.mark.parametrize('x', [1, 1, 0])\ndef test_x(x):\n    assert x\n"
    )
    (tmp_path / "test_b.py").write_text(marked + "def test_y():\n    pytest.skip()\n")
    (tmp_path / "test_c.py").write_text("import a_module_that_is_not_here\n")
    row = tool.run_gpu_tests(60, str(tmp_path))
    assert [row[name] for name in ("passed", "failed", "errors", "skipped")] == [2, 1, 1, 1]
    assert any("test_x[0]" in name for name in row["not passed"])


def test_the_single_stream_figure_is_without_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is divided by is the time after the first token. Here a quarter of a second passes
    before it, on any machine.
    """
    from teachvllm.benchmarks import gpu as bench_gpu

    shape = {
        **bench_gpu.QWEN3_0_6B,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 128,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 256,
    }
    options = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": "cpu",
        "num_gpu_blocks_override": 32,
    }
    with bench_gpu.model_folder(shape) as folder, bench_gpu.LLM(folder, **options) as llm:
        bench_gpu.run_timed(llm, [([1, 2], 2)])
        add_request = llm.llm_engine.add_request

        def slow(*args: Any, **options: Any) -> None:
            time.sleep(0.25)
            add_request(*args, **options)

        monkeypatch.setattr(llm.llm_engine, "add_request", slow)
        seconds, decode_seconds = bench_gpu.run_timed(llm, [([1, 2, 3], 4)])
    assert 0 < decode_seconds <= seconds - 0.25


def test_on_a_gpu_the_l2_is_flushed_before_each_run_and_only_the_run_is_timed(monkeypatch) -> None:
    "On stand-ins for CUDA's events: a run that takes long to queue gets more flushes before it."
    from teachvllm.benchmarks import gpu as bench_gpu

    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: "Event") -> float:
            return 2.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench_gpu, "l2_flusher", lambda: (lambda: log.append("flush"), 0.01))
    timing = bench_gpu.measure(lambda: (time.sleep(0.02), log.append("run")), "cuda", repeats=4)
    assert timing == {"seconds": 0.002, "fastest": 0.002, "slowest": 0.002, "repeats": 4}
    assert log[:4] == ["run"] * 4, "three to warm up, one to see how long it takes to queue"
    rounds = " ".join(log[4:]).split(" wait")[:-1]
    assert len(rounds) == 4 and all(part.strip().endswith("event run event") for part in rounds)
    assert all(5 <= part.count("flush") <= 51 for part in rounds), (
        "1 + 2 × 0.02 s / 0.01 s, or more on a busy machine"
    )
