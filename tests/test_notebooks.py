"""Every notebook runs top to bottom where the package came from its wheel, and there is no nbdev
and no compiler: on Colab.

Each is executed by nbclient, as `jupyter nbconvert --execute` does, from an empty folder. Two run
at a time, each with one thread. How long each took is printed; only one that is stuck is ended.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(ROOT.glob("nbs/*.ipynb"))
# a part of their story is C++, where there is a compiler; all others do without
COMPILE = {"21f", "30b"}
LIMIT = float(os.environ.get("NOTEBOOK_SECONDS", "300"))

NO_NBDEV = """
import sys

class NoNbdev:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"nbdev", "fastcore", "execnb", "ghapi"}:
            raise ModuleNotFoundError(f"No module named {name!r}: a reader has none", name=name)

sys.meta_path.insert(0, NoNbdev())
"""

NO_TRITON = importlib.util.find_spec("triton") is None
IMPORTS_TRITON = re.compile(
    r"^(import triton|from triton|from teachvllm\.attention\.triton|.*\bbenchmarks(\.| import )gpu\b)",
    re.MULTILINE,
)


def imports_triton(notebook: Path) -> bool:
    "Whether a cell of it imports Triton, or a module of ours that does, whatever machine it is on."
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return any(
        IMPORTS_TRITON.search("".join(cell["source"]))
        for cell in cells
        if cell["cell_type"] == "code"
    )


def parameter(notebook: Path) -> Any:
    "The notebook, to be skipped where it cannot run."
    skip = NO_TRITON and imports_triton(notebook)
    marks = (
        [pytest.mark.skip(reason="imports Triton, which exists on Linux only and is not installed")]
        if skip
        else []
    )
    return pytest.param(notebook, id=notebook.stem, marks=marks)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as `pip install` puts it on Colab: from a wheel, which has only
    what is packed.
    """
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT], check=True
    )
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "site", wheel], check=True)
    return folder / "site"


def execute(notebook: Path, folder: Path, installed: Path) -> tuple[str, float]:
    """Run `notebook` in the empty `folder`; what went wrong ('' if nothing did) and the seconds
    that it took.
    """
    blocked = folder / "blocked"
    work = folder / "work"
    for path in (blocked, work):
        path.mkdir(parents=True)
    (blocked / "sitecustomize.py").write_text(NO_NBDEV)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(blocked), str(installed), os.environ.get("PYTHONPATH")])
        ),
        "PYTHONHASHSEED": "0",
        "IPYTHONDIR": str(folder / "ipython"),
        "OMP_NUM_THREADS": "1",
    }
    if notebook.stem.partition("_")[0] not in COMPILE:
        env["CXX"] = "no-compiler"
        if not torch.cuda.is_available():  # on a GPU, Triton compiles its launcher
            env["CC"] = "no-compiler"
    client = NotebookClient(
        nbformat.read(notebook, as_version=4), timeout=LIMIT, kernel_name="python3"
    )
    start = time.perf_counter()
    problem = ""
    try:
        client.execute(env=env, cwd=str(work), stderr=subprocess.DEVNULL)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        problem = f"{notebook.name}: {error}"
    return problem, time.perf_counter() - start


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, installed: Path
) -> Iterator[dict[Path, Future[tuple[str, float]]]]:
    "All the notebooks that were asked for, two running at a time, in the order of their tests."
    items = [
        item
        for item in request.session.items
        if "runs" in item.fixturenames and not item.get_closest_marker("skip")
    ]
    asked = [item.callspec.params["notebook"] for item in items]
    pool = ThreadPoolExecutor(max_workers=2)
    yield {
        path: pool.submit(execute, path, tmp_path_factory.mktemp(path.stem), installed)
        for path in asked
    }
    pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(2 * LIMIT + 60)
@pytest.mark.parametrize("notebook", list(map(parameter, NOTEBOOKS)))
def test_notebook_runs(notebook: Path, runs: dict[Path, Future[tuple[str, float]]], capsys) -> None:
    problem, seconds = runs[notebook].result()
    with capsys.disabled():
        print(f"\n  {notebook.stem:<24}{seconds:5.1f} s ", end="", flush=True)
    assert not problem, problem


def test_which_need_triton() -> None:
    "Those that are skipped without it; all others run without it, too."
    needing = {
        notebook.stem.partition("_")[0] for notebook in NOTEBOOKS if imports_triton(notebook)
    }
    assert needing == {"21a", "22", "23", "32a", "43", "91"}


@pytest.mark.parametrize(
    "code, says",
    [
        (
            (
                "import teachvllm; assert '-packages' not in teachvllm.__file__ and 'wheel' in "
                "teachvllm.__file__"
            ),
            "",
        ),
        ("import nbdev", "No module named 'nbdev'"),
        ("assert 1 > 2", "AssertionError"),
    ],
)
def test_the_runner_tells(code: str, says: str, tmp_path: Path, installed: Path) -> None:
    """The wheel's package can be imported in that kernel, nbdev cannot, and a cell that fails is
    noticed.
    """
    notebook = tmp_path / "cell.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]), notebook)
    problem, _ = execute(notebook, tmp_path, installed)
    assert says in problem if says else not problem
