"""What continuous integration does about a test that fails: it runs it once more, alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

FLAKY = """
from pathlib import Path
def test_flaky():
    tries = Path(__file__).with_name("tries")
    tries.open("a").write("x")
    assert tries.read_text() != "x"
"""
FINE = "def test_fine(): pass\n"
WRONG = "def test_wrong(): assert 1 > 2\n"
SIX_WRONG = """
import pytest
@pytest.mark.parametrize("number", range(6))
def test_six(number): assert not number + 1
"""
SETUP = """
from pathlib import Path
import pytest
@pytest.fixture
def server():
    tries = Path(__file__).with_name("tries")
    tries.open("a").write("x")
    assert tries.read_text() != "x"
def test_served(server): pass
def test_other(): pytest.skip("not here")
"""
CRASH = "import os\ndef test_crash(): os._exit(3)\n"
HANG = """
import time, pytest
@pytest.mark.timeout(0.2)
def test_hang(): time.sleep(60)
"""
DRIVER = """
import sys
from tools.run_tests import PLUGIN, main
pytest = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "pytest_timeout", "-p", PLUGIN]
everything = "import sys, subprocess; sys.exit(subprocess.call(sys.argv[1:]) and 2)"
sys.exit(main([sys.executable, "-c", everything, *pytest, "-n", "1"], pytest))
"""


def run(folder: Path, **files: str) -> tuple[int, str]:
    "Run the tests in `files` as .ci/run runs ours, by a command that exits with make's status."
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def closing_line(output: str) -> str:
    "The last line that tells how many tests passed or failed, without its time."
    lines = [line for line in output.splitlines() if line.startswith("=") and " in " in line]
    return lines[-1].strip("= ").rpartition(" in ")[0]


def test_nothing_runs_twice_where_all_pass(tmp_path: Path) -> None:
    status, output = run(tmp_path, fine=FINE)
    assert status == 0 and "once more" not in output
    assert closing_line(output) == "1 passed"


@pytest.mark.parametrize(
    "text, test, closing",
    [
        (FLAKY, "test_flaky", "2 passed, 1 rerun"),
        (SETUP, "test_served", "2 passed, 1 skipped, 1 rerun"),
    ],
)
def test_a_flaky_test_is_named_and_costs_nothing(
    text: str, test: str, closing: str, tmp_path: Path
) -> None:
    status, output = run(tmp_path, flaky=text, fine=FINE)
    assert status == 0, output
    (named,) = [line for line in output.splitlines() if line.startswith("FLAKY")]
    assert f"::{test}: " in named
    assert closing_line(output) == closing


def test_what_fails_twice_fails_the_run(tmp_path: Path) -> None:
    status, output = run(tmp_path, flaky=FLAKY, fine=FINE, wrong=WRONG)
    assert status == 1
    assert "FLAKY" in output and "test_wrong: it failed, and passed" not in output
    assert closing_line(output) == "1 failed, 2 passed, 2 rerun"


@pytest.mark.parametrize(
    "text, closing",
    [(SIX_WRONG, "6 failed, 1 passed"), (CRASH, "1 failed, 1 passed"), (HANG, "1 failed, 1 passed")]
    + [("import nothing_like_it", "1 passed, 1 error")],
    ids=["six failures", "a crash", "a hang", "no import"],
)
def test_what_is_no_race_fails_at_once(text: str, closing: str, tmp_path: Path) -> None:
    status, output = run(tmp_path, bad=text, fine=FINE)
    assert status == 2 and "once more" not in output, output
    assert closing_line(output) == closing


def test_what_fails_before_any_test_fails_at_once() -> None:
    "An export or ruff that complains."
    code = "from tools.run_tests import main; main(['false'], ['true']) and exit(7)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 7
