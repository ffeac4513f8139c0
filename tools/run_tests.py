"""What continuous integration runs: `make test`, and once more, alone, the few tests that failed.

    python3 tools/run_tests.py

Some tests are about processes, sockets and browsers, and a busy machine can make one of them lose a
race. A test that passes when it runs again is named as flaky at the end; one that fails twice fails
the run. So does at once whatever is no flaky test: an export or ruff that complains, a test file
that cannot be imported, a worker that crashed, a test that ran into its time limit, and more
than five failures.

This file is a plugin of pytest as well (`-p tools.run_tests`), which writes down what became of
each test, where the variable PYTEST_OUTCOMES says. It needs nothing but Python.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = "tools.run_tests"
MOST_FAILURES = 5
LINES_SHOWN = 12  # of a failure, when it happens
TESTS_FAILED = 1  # pytest's exit status; the others are no failures of tests
# pytest-xdist's words about a worker that died, and pytest-timeout's about a test that hung
NOT_FLAKY = ("crashed while running", "Timeout (>")


class Outcomes:
    "What became of each test of a run: 'passed', 'failed', 'skipped' or 'xfailed', by its id."

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.tests: dict[str, str] = {}
        self.hopeless: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        "A test has three reports: what comes before it, itself, what comes after. One can fail."
        test = report.nodeid
        if report.failed:
            self.tests[test] = "failed"
            # at once: a run that is cut off never comes to pytest's summary
            last_lines = "\n".join(str(report.longrepr).splitlines()[-LINES_SHOWN:])
            print(
                f"\nFAILED {test} ({report.when}, {report.duration:.0f} s)\n{last_lines}",
                flush=True,
            )
            if any(words in str(report.longrepr) for words in NOT_FLAKY):
                self.hopeless.append(test)
        elif self.tests.get(test) != "failed" and (report.when == "call" or report.skipped):
            self.tests[test] = "xfailed" if hasattr(report, "wasxfail") else report.outcome

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.hopeless.append(report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        result = {"status": int(exitstatus), "tests": self.tests, "hopeless": self.hopeless}
        self.file.write_text(json.dumps(result), encoding="utf-8")


def pytest_configure(config: Any) -> None:
    "Of pytest-xdist's processes, only the one that hears of all tests writes."
    file = os.environ.get("PYTEST_OUTCOMES")
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(file))


def run(command: list[str], folder: Path) -> tuple[int, dict[str, Any] | None]:
    "Run a command that runs pytest; its exit status, and what pytest wrote down, if it came so far."
    outcomes = folder / "outcomes.json"
    outcomes.unlink(missing_ok=True)
    status = subprocess.call(command, env={**os.environ, "PYTEST_OUTCOMES": str(outcomes)})
    return status, json.loads(outcomes.read_text(encoding="utf-8")) if outcomes.exists() else None


def failures_of(result: dict[str, Any]) -> list[str]:
    return [test for test, outcome in result["tests"].items() if outcome == "failed"]


def main(all_tests: list[str], pytest: list[str]) -> int:
    """Run `all_tests`, and what failed once more with the command `pytest`; the exit status.

    The closing line is like pytest's: each test counts once, by its last run.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        status, first = run(all_tests, Path(folder))
        if status == 0 or first is None or first["status"] != TESTS_FAILED or first["hopeless"]:
            return status
        failed = failures_of(first)
        if not 0 < len(failed) <= MOST_FAILURES:
            return status
        print(f"\nonce more, alone: {' '.join(failed)}", flush=True)
        again, second = run([*pytest, *failed], Path(folder))
    if second is None or set(second["tests"]) != set(failed):  # it broke off
        return again or status
    for test, outcome in second["tests"].items():
        if outcome == "passed":
            print(f"FLAKY {test}: it failed, and passed when it ran again, alone")
    counts = Counter({**first["tests"], **second["tests"]}.values())
    words = [f"{counts[kind]} {kind}" for kind in ("failed", "passed", "skipped", "xfailed")]
    words = [word for word in words if not word.startswith("0 ")] + [f"{len(failed)} rerun"]
    print(f"==== {', '.join(words)} in {time.monotonic() - start:.2f}s ====", flush=True)
    return again


if __name__ == "__main__":
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PIP_NO_COMPILE"] = "1"  # a minute: of what is installed, little is imported
    python = str(ROOT / ".venv" / "bin" / "python")
    sys.exit(
        main(["make", "test", f"PYTEST_FLAGS=-p {PLUGIN}"], [python, "-m", "pytest", "-p", PLUGIN])
    )
