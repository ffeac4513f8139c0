"""Every notebook runs top to bottom where the package came from its wheel, and there is no nbdev
and no compiler: on Colab.

Each is executed by nbclient, as `jupyter nbconvert --execute` does, from an empty folder. Two run
at a time, each with one thread. How long each took is printed; only one that is stuck is ended.
What they printed is kept in the folder that NOTEBOOK_OUTPUTS names (tools/stale.py reads it).
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
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from kernels import Kernels
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from tools.chapters import name_of, notebooks, number_of

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = notebooks()
# a part of their story is C++, where there is a compiler; all others do without
COMPILE = {"cpu/05", "cpu/06"}
# their Triton must not have been imported with TRITON_INTERPRET: no fork of a process that has
NOT_INTERPRETED = {"gpu/05", "gpu/06", "gpu/07", "gpu/09"}
LIMIT = float(os.environ.get("NOTEBOOK_SECONDS", "300"))
KEEP = os.environ.get("NOTEBOOK_OUTPUTS")

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
    r"^(import triton|from triton|from teachvllm\.(attention\.triton|gpu_kernels)|.*\bbenchmarks(\.| import )gpu\b)",
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
    return pytest.param(notebook, id=name_of(notebook), marks=marks)


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
    share_compiled(folder / "site" / "teachvllm")
    return folder / "site"


def share_compiled(package: Path) -> None:
    """Let the wheel's `package` keep what Numba compiles where the repository's keeps it: the files
    are the same, and what one of this run's tests has compiled no other need compile again.
    """
    try:
        from numba.core.caching import UserProvidedCacheLocator

        from teachvllm.cpu_kernels.utils import kernel_folder
    except ImportError:  # there is no Numba, or it is another one: it compiles twice
        return

    def place(folder: Path) -> str:
        path: str = UserProvidedCacheLocator.get_suitable_cache_subpath(str(folder / "utils.py"))
        return path

    ours = ROOT / "teachvllm" / "cpu_kernels"
    theirs = package / "cpu_kernels"
    for path in ours.glob("*.py"):
        assert (theirs / path.name).read_bytes() == path.read_bytes()
        times = path.stat()  # by which Numba knows a file, too
        os.utime(theirs / path.name, ns=(times.st_atime_ns, times.st_mtime_ns))
    kept = Path(kernel_folder())
    compiled = kept / place(ours)
    compiled.mkdir(parents=True, exist_ok=True)
    link = package / "__pycache__" / kept.name / place(theirs)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(compiled, target_is_directory=True)


@pytest.fixture(scope="module")
def env(installed: Path) -> dict[str, str]:
    "The variables of every notebook's process: it finds the wheel's package, and no nbdev."
    blocked = installed.with_name("blocked")
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(NO_NBDEV)
    paths = [str(blocked), str(installed), os.environ.get("PYTHONPATH")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "TEACHVLLM_QUICK": "1",  # cells that only measure take fewer rounds
    }


@pytest.fixture(scope="module")
def kernels(
    tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]
) -> Iterator[Kernels | None]:
    "On Linux, forks; elsewhere a process that has threads, or Apple's libraries, is not forked."
    if sys.platform != "linux":
        yield None
        return
    kernels = Kernels(tmp_path_factory.mktemp("kernels"), env)
    yield kernels
    kernels.close()


def execute(
    notebook: Path, folder: Path, env: dict[str, str], kernels: Kernels | None
) -> tuple[str, float]:
    """Run `notebook` in the empty `folder`; what went wrong ('' if nothing did) and the seconds
    that it took.
    """
    work = folder / "work"
    work.mkdir(parents=True)
    env = {**env, "IPYTHONDIR": str(folder / "ipython")}
    if number_of(notebook) not in COMPILE:
        env["CXX"] = "no-compiler"
        if not torch.cuda.is_available():  # on a GPU, Triton compiles its launcher
            env["CC"] = "no-compiler"
    if number_of(notebook) in NOT_INTERPRETED:
        env.pop("TRITON_INTERPRET", None)
        kernels = None
    manager = AsyncKernelManager(kernel_name="python3")
    if kernels:
        manager.kernel_name = kernels.name
        manager.kernel_spec_manager = KernelSpecManager(kernel_dirs=[str(kernels.specs)])
    nb = nbformat.read(notebook, as_version=4)
    client = NotebookClient(nb, timeout=LIMIT, km=manager)
    start = time.perf_counter()
    problem = ""
    try:
        client.execute(cleanup_kc=True, env=env, cwd=str(work), stderr=subprocess.DEVNULL)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        problem = f"{name_of(notebook)}: {error}"
    if KEEP and not problem:
        kept = Path(KEEP, f"{name_of(notebook)}.ipynb")
        kept.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(nb, kept)
    return problem, time.perf_counter() - start


def is_running(pid: str) -> bool:
    "Whether there is such a process, other than one that has ended and is still in the table."
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout
    return bool(state.strip()) and "Z" not in state


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    env: dict[str, str],
    kernels: Kernels | None,
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
        path: pool.submit(execute, path, tmp_path_factory.mktemp(path.stem), env, kernels)
        for path in asked
    }
    pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(2 * LIMIT + 60)
@pytest.mark.parametrize("notebook", list(map(parameter, NOTEBOOKS)))
def test_notebook_runs(
    notebook: Path, runs: dict[Path, Future[tuple[str, float]]], capsys, record_property
) -> None:
    problem, seconds = runs[notebook].result()
    record_property("seconds", seconds)  # of its own, which the test only waits for
    with capsys.disabled():
        print(f"\n  {name_of(notebook):<32}{seconds:5.1f} s ", end="", flush=True)
    assert not problem, problem


def test_which_need_triton() -> None:
    "Those that are skipped without it; all others run without it, too."
    needing = {number_of(notebook) for notebook in NOTEBOOKS if imports_triton(notebook)}
    side_road = {f"gpu/{n:02}" for n in (1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12)}
    assert needing == {"23", "24", "25", "43", "exercises/21"} | side_road


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
        ("import os; os._exit(1)", "Kernel died"),
    ],
)
def test_the_runner_tells(
    code: str, says: str, tmp_path: Path, env: dict[str, str], kernels: Kernels | None
) -> None:
    """The wheel's package can be imported in that kernel, nbdev cannot, and a cell that fails is
    noticed.
    """
    notebook = tmp_path / "cell.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]), notebook)
    problem, _ = execute(notebook, tmp_path, env, kernels)
    assert says in problem if says else not problem


def test_a_stuck_notebook_is_ended(
    tmp_path: Path,
    env: dict[str, str],
    kernels: Kernels | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    "With the processes that it has started, wherever the kernel comes from."
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 5.0)
    code = f"""import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
while True: pass"""
    notebook = tmp_path / "cell.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]), notebook)
    problem, _ = execute(notebook, tmp_path, env, kernels)
    assert "timed out" in problem
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.1)
