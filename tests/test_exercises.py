"""The book's exercises: stubs fail kindly, solutions pass and run in the engine, known mistakes are
recognised.
"""

import ast
import contextlib
import importlib.util
import io
import json
import linecache
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from teachvllm.exercises import check as checks
from teachvllm.exercises.check import EXERCISES, Report, check, find_exercise
from tools.chapters import chapters, name_of, solutions

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = chapters()
# it runs without the package, so its own cells try what a reader wrote
OWN_CHECKS = {
    "01_one_page",
    "lora/01_adapter",
    "speculative/02_rejection",
    "multimodal/03_encoder_cache",
    "multimodal/04_vision_tower",
    "multimodal/05_llava",
    "multimodal/06_mrope",
    "multimodal/07_gemma3",
    "multimodal/08_shapes",
}
SOLUTIONS = solutions()
with contextlib.suppress(ValueError):
    find_exercise("")  # imports the modules that register exercises
NAMES = sorted(EXERCISES)
LEADS = re.compile(
    r"\*\*Exercise, (predict|write|design) \(\d+ min, (easy|medium|hard), (first|second) "
    r"reading\)\.\*\*"
)


def cells(notebook: Path, kind: str = "code") -> Iterator[str]:
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == kind:
            yield "".join(cell["source"])


def checked(source: str) -> str | None:
    "The name in the last line `check(name)` of a cell, if that is what it ends with."
    with contextlib.suppress(SyntaxError, IndexError):
        last = ast.parse(source).body[-1]
        if (
            isinstance(last, ast.Expr)
            and isinstance(last.value, ast.Call)
            and ast.unparse(last.value.func) == "check"
        ):
            return ast.unparse(last.value.args[0])
    return None


# chapters whose exercises are to predict, to measure, or to use what other chapters asked for
NOTHING_TO_WRITE = {
    "20_kernels",
    "93_your_engine",
    "94_confusions",
    "95_to_vllm",
    "package/08_processes",
    "gpu/04_pretend_device",
    "gpu/05_pretend",
    "gpu/09_mixed_graphs",
    "gpu/11_lora",
    "cpu/09_numba_lora",
    "lora/02_layers",
    "lora/03_manager",
    "structured_output/03_grammar",
    "structured_output/04_json_schema",
    "structured_output/05_tools",
    "structured_output/06_reasoning",
    "structured_output/07_manager",
    "structured_output/08_chat",
    "speculative/01_idea",
    "speculative/03_ngram",
    "speculative/04_draft_model",
    "speculative/05_eagle",
    "speculative/06_policy",
    "multimodal/01_images",
    "multimodal/02_processor",
    "cpu/10_numba_rejection",
    "cpu/11_numba_ngram",
    "cpu/12_tiles",
    "gpu/12_rejection",
}


@pytest.fixture(autouse=True)
def environment_stays() -> Iterator[None]:
    "Solutions set variables for their own notebook: other tests have theirs."
    with patch.dict(os.environ):
        yield


def run_cells(sources: list[str]) -> Iterator[tuple[str, Any]]:
    """Run cells in one namespace; yields the name and the report of each that ends with
    `check(name)`.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(sources):
        label = f"<cell {number}>"
        linecache.cache[label] = (len(source), None, source.splitlines(True), label)
        tree = ast.parse(source)
        name = checked(source)
        last = tree.body.pop() if name else None
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(tree, label, "exec"), names)
        if isinstance(last, ast.Expr):
            yield str(name), eval(compile(ast.Expression(last.value), label, "eval"), names)


def stubs(notebook: Path) -> dict[str, str]:
    found = {
        checked(source): source
        for source in cells(notebook)
        if "raise NotImplementedError" in source
    }
    return {name: source for name, source in found.items() if name in EXERCISES}


def imports_of(notebook: Path) -> list[str]:
    "What a notebook imports, statement by statement; its cell for Colab left out."
    found = []
    for source in cells(notebook):
        with contextlib.suppress(SyntaxError):
            body = [] if "eval: false" in source else ast.parse(source).body
            found += [
                ast.unparse(node) for node in body if isinstance(node, ast.Import | ast.ImportFrom)
            ]
    # an alias that chapter package/06 makes as it goes
    return [line for line in found if "vllm" not in re.split(r"\W", line)]


@pytest.mark.parametrize("name", NAMES)
def test_a_stub_waits_in_its_chapter(name: str) -> None:
    chapter = ROOT / "nbs" / f"{EXERCISES[name].chapter}.ipynb"
    source = stubs(chapter)[name]
    exports = [re.match(r"#\| default_exp (\S+)", text) for text in cells(chapter)]
    own = [
        f"from teachvllm.{found[1]} import *" for found in exports if found
    ]  # a stub may extend a class of its chapter
    reports = dict(run_cells([*imports_of(chapter), *own, source]))
    assert isinstance(reports[name], Report) and not reports[name].passed
    assert "not written yet" in reports[name].text


@pytest.mark.parametrize("name", NAMES)
def test_usual_mistakes_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "PATIENCE", 1.0)  # on a busy machine, too
    exercise = EXERCISES[name]
    assert len(exercise.mistakes) >= 4
    for mistake, sentence in exercise.mistakes.items():
        mistake.__name__ = name  # by which `check` finds the exercise
        report = check(mistake, engine=False)
        assert not report.passed and sentence in report.text, f"{name}: {sentence}\n{report.text}"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_answer_gets_words(name: str) -> None:
    answers = [
        lambda *args, **kwargs: None,
        lambda *args, **kwargs: "seven",
        lambda: None,
        lambda *args, **kwargs: 1 / 0,
    ]
    for answer in answers:
        answer.__name__ = name
        report = check(answer, engine=False)
        assert not report.passed and "hint" in report.text, report.text


@pytest.mark.parametrize("notebook", SOLUTIONS, ids=name_of)
def test_solutions_pass_and_serve(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ROUNDS", 1)  # how fast it is does not matter here
    reports = dict(run_cells([source for source in cells(notebook) if "eval: false" not in source]))
    asked = {name for name, exercise in EXERCISES.items() if exercise.chapter == name_of(notebook)}
    assert asked <= set(reports), f"no solution for {asked - set(reports)}"
    for name in asked:
        assert reports[name].passed, reports[name].text
        assert EXERCISES[name].engine is None or "in the engine" in reports[name].text.lower()


@pytest.mark.parametrize(
    "notebook",
    [c for c in CHAPTERS if c.parent.name != "exercises" and c.stem[:2] != "96"],
    ids=name_of,
)
def test_every_chapter_has_exercises_of_three_kinds(notebook: Path) -> None:
    kinds = [lead[0] for text in cells(notebook, "markdown") for lead in LEADS.findall(text)]
    text = "\n".join(cells(notebook, "markdown"))
    assert len(re.findall(r"\*\*Exercise", text)) == len(kinds), (
        "a lead that is not of the usual form"
    )
    assert {"predict", "design"} <= set(kinds)
    if name_of(notebook) in OWN_CHECKS:
        written = [source for source in cells(notebook) if "raise NotImplementedError" in source]
        assert len(written) == kinds.count("write") > 0
        assert all("print(" in source and "check_" in source for source in written)
        return
    assert ("write" in kinds) == bool(stubs(notebook)) and (
        "write" in kinds or name_of(notebook) in NOTHING_TO_WRITE
    )
    assert "**After this chapter you can**" in text and "**Time**" in text


def test_an_endless_loop_is_ended_and_unknown_names_are_refused() -> None:
    name = NAMES[0]

    def endless(*args: Any, **kwargs: Any) -> None:
        while True:
            pass

    endless.__name__ = name
    exercise = EXERCISES[name]
    EXERCISES[name] = checks.Exercise(**{**vars(exercise), "seconds": 2.0})
    try:
        assert "never ends" in check(endless, engine=False).text
    finally:
        EXERCISES[name] = exercise
    with pytest.raises(ValueError, match="no exercise is called"):
        check(test_an_endless_loop_is_ended_and_unknown_names_are_refused)


def test_a_partly_written_class_is_told_how_far_it_came() -> None:
    right = EXERCISES["CountedBlocks"].right_answer()

    def free(self: Any, block_id: int) -> None:
        raise NotImplementedError

    text = check(type("CountedBlocks", (right,), {"free": free}), engine=False).text
    assert "`free` is not written yet" in text and re.search(
        r"[1-9] of \d+ tries are right", text
    ), text
    with pytest.raises(ValueError, match="itself, uncalled"):
        check(right(4))


def test_slips_that_any_exercise_may_see_are_named() -> None:
    def kv_blocks(*numbers: Any) -> float:
        return float(EXERCISES["kv_blocks"].right_answer()(*numbers))

    def attend_tiles(q: Any, k: Any) -> Any:
        return q

    def reserves_all(self: Any, group: Any) -> bool:
        return True

    reserves_all.__name__ = "ReservesAll"
    no_admission = type("ReservesAll", (), {"can_admit": reserves_all})
    for answer, words in (
        (kv_blocks, "`//` an int"),
        (attend_tiles, "keep those of the stub"),
        (reserves_all, "a class is asked for"),
        (no_admission, "class ReservesAll(Admission):"),
    ):
        text = check(answer, engine=False).text
        assert words in text, text


def test_requests_that_wait_behind_are_not_counted_by_the_one_that_asks() -> None:
    from teachvllm.core.block_manager import AllocStatus, num_blocks_for
    from teachvllm.core.scheduler import Admission

    class ReservesAll(Admission):
        def can_admit(self, group: Any, *freed: Any) -> AllocStatus:
            groups = [*self.running, *self.waiting]
            manager = self.block_manager
            size = sum(num_blocks_for(g.first_seq.max_len or 0, manager.block_size) for g in groups)
            full = self.running and size > manager.num_gpu_blocks
            return AllocStatus.LATER if full else super().can_admit(group, *freed)

    assert "only `group` asks" in check(ReservesAll, engine=False).text


def test_speed_is_compared_only_beyond_noise() -> None:
    assert (
        checks.compare_speed(2.9, 1.0) == checks.compare_speed(0.1, 1.0) == "its speed is like ours"
    )
    assert checks.compare_speed(6.0, 1.5) == "serving took 4.0 times as long"


def test_an_answer_that_holds_all_text_back_does_not_pass_in_the_engine() -> None:
    with pytest.raises(AssertionError, match="differ from ours"):
        EXERCISES["new_text"].engine(lambda decode, shown, new: "")  # type: ignore[operator, misc]


def test_a_size_that_fits_exactly_is_asked_for_first() -> None:
    """An answer that takes `>` for `>=` finds another size in the first case, so that it is told
    what is wrong.
    """

    def pad_to_bucket(inputs: Any, sizes: list[int], width: int) -> Any:
        size = next(size for size in sorted(sizes) if size > len(inputs["token_ids"]))
        return EXERCISES["pad_to_bucket"].right_answer()(inputs, [size], width)

    assert "Is it `>` or `>=`?" in check(pad_to_bucket, engine=False).text


def test_data_offsets_from_the_beginning_of_the_file_are_named() -> None:
    import torch

    def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
        data = path.read_bytes()
        found = {}
        for name, entry in json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).items():
            begin, end = entry["data_offsets"]
            found[name] = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32).view(
                entry["shape"]
            )
        return found

    assert "count from the end of the header" in check(read_safetensors, engine=False).text


def test_a_stand_in_is_gone_afterwards_and_must_have_been_called() -> None:
    from teachvllm.core import block_manager

    for target in (
        "teachvllm.core.block_manager:num_blocks_for",
        "teachvllm.core.block_manager:BlockSpaceManager.free",
    ):
        ours = checks.find_target(target)[2]
        with pytest.raises(ZeroDivisionError), checks.stand_in(target, lambda *args: 1 / 0):
            assert checks.find_target(target)[2] is not ours
            block_manager.num_blocks_for(
                1, 1
            ) if "num_blocks" in target else block_manager.BlockSpaceManager.free(None, None)
        assert checks.find_target(target)[2] is ours
    with (
        pytest.raises(ValueError, match="never called"),
        checks.stand_in(target, lambda *args: None),
    ):
        pass


def test_a_time_limit_keeps_the_one_around_it() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(checks.TookTooLong), checks.limit_time(0.5):
        with pytest.raises(checks.TookTooLong), checks.limit_time(0.1):
            time.sleep(5)
        time.sleep(5)
    assert signal.getsignal(signal.SIGALRM) is before


COMPILE = """
import torch
from answers import add_norm_rows, decode_group, masked_copy, softmax_rows
from teachvllm.gpu_kernels.ladder import compiling_for

for capability in (75, 80, 90):
    for dtype in (torch.float32, torch.float16):
        row = torch.empty(4, 100, dtype=dtype)
        q = torch.empty(3, 8, 64, dtype=dtype)
        cache = torch.empty(5, 16, 2, 64, dtype=dtype)
        with compiling_for(capability) as made:
            masked_copy(row[0], row[1])
            softmax_rows(row, row)
            decode_group(q, q, cache, cache, torch.zeros(3, 2).int(), torch.ones(3).long(), 0.1)
            add_norm_rows(row, row, row, row, row[0], 1e-5)
        print(*(kernel.metadata.name for kernel in made if kernel.asm["cubin"]))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_worked_kernels_compile_for_real_cards(tmp_path: Path) -> None:
    "Those of gpu/08: the interpreter does not look at types, the compiler does."
    (path,) = (path for path in SOLUTIONS if name_of(path) == "gpu/08_write_triton")
    answers = [source for source in cells(path) if not source.startswith("#|")]
    text = re.sub(r"^check\(.*\)$", "", "\n\n".join(answers), flags=re.MULTILINE)
    (tmp_path / "answers.py").write_text(text)
    (tmp_path / "compile.py").write_text(COMPILE)
    made = subprocess.run(
        [sys.executable, tmp_path / "compile.py"],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    kernels = "copy_kernel softmax_kernel decode_kernel add_norm_kernel"
    assert made.stdout.split("\n")[:-1] == 6 * [kernels]
