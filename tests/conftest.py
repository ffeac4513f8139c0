"""Options and marks of the test suite: `gpu` tests need a CUDA device, `slow` ones need --slow. A pretended
device will do (`python -m teachvllm.pretend T4 pytest -m gpu`), but for those marked `gpu(real=True)`.
"""

import gc
import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import torch
from browser import CHROMIUM, Browser

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network
# Ray's processes are as urgent as others: at its default they starve beside the other tests
os.environ.setdefault("RAY_worker_niceness", "0")
PRETENDED = "TEACHVLLM_PRETEND" in os.environ
if not torch.cuda.is_available():
    # kernels run in Python; it counts when Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

# files that take minutes; beside the first, which runs notebooks two at a time, goes all the rest
LONGEST = ["test_notebooks", "test_equals_transformers", "test_exercises", "test_watch"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        mark = item.get_closest_marker("gpu")
        if mark and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        elif mark and PRETENDED and mark.kwargs.get("real"):
            item.add_marker(pytest.mark.skip(reason="a pretended CUDA device shows nothing here"))
    if hasattr(config, "workerinput"):  # with `pytest -n` the longest files begin first
        order = {stem: place for place, stem in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: runs with --slow"))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    "With --durations, the seconds of whole files and of notebooks as well, most first."
    number = config.getoption("durations")
    if number is None:
        return
    files: Any = Counter()
    notebooks: Any = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            files[report.location[0]] += report.duration
            own: Any = dict(report.user_properties).get("seconds")
            if own:  # which began before its test waits for it
                notebooks[report.location[2]] = own
    for title, seconds in {"files": files, "notebooks": notebooks}.items():
        terminalreporter.section(f"slowest {title}")
        for name, total in seconds.most_common(number or None):
            terminalreporter.write_line(f"{total:7.1f}s {name}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    "A tiny Llama with random weights, as a folder in Hugging Face's format."
    from helpers import make_tiny  # imports torch

    path = tmp_path_factory.mktemp("llama")
    make_tiny("llama", path)
    return str(path)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    "Headless Chromium; what asks for it is skipped where there is none."
    if not CHROMIUM:
        pytest.skip("Chromium is not installed")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture(scope="module", autouse=True)
def quick_collection() -> Iterator[None]:
    "Every engine collects garbage twice: it need not look through all modules each time."
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def forked_processes() -> Iterator[None]:
    "Workers and cores are forks of a process that has imported torch: see `forks.py`."
    if sys.platform != "linux" or torch.cuda.is_available():  # CUDA does not survive a fork
        yield
        return
    from teachvllm.executor import multiproc_executor

    forked = SimpleNamespace(**{**vars(subprocess), "Popen": forks.popen})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiproc_executor, "subprocess", forked)
        yield
    if server := forks.ForkedPopen.server:
        server.close()
