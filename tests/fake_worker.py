"""Stand-ins for tests of executors: a worker that computes nothing, and what is asked of processes."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOON = 60.0  # seconds: much more than anything here needs, and much less than for ever


def make_worker_cls() -> type:
    """A worker that computes nothing and does what it is told to. Made in a function, so it travels
    by value.
    """

    class FakeWorker:
        def __init__(
            self, vllm_config, rank, local_rank, is_driver_worker, distributed_init_method=None
        ):
            self.config = vllm_config
            self.rank = rank
            self.init_method = distributed_init_method
            self.is_driver_worker = is_driver_worker
            self.local_rank = local_rank
            self.launched = []
            self.steps = []
            self.calls = []

        def _act(self, name, what=None):
            self.calls.append(name)
            what = what or self.config.faults.get((name, self.rank), "")
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "exit":
                # at once: Python's own end may take longer than one waits for the exit code
                os._exit(7)
            if what == "hang":
                time.sleep(3600)
            if what.startswith("sleep"):
                time.sleep(float(what[5:]))
            if what.startswith("wait"):  # for a file, and not for ever
                end = time.monotonic() + SOON
                while not os.path.exists(what[5:]) and time.monotonic() < end:
                    time.sleep(0.01)
            if what.startswith("raise"):
                raise LookupError(what)
            return what

        def init_device(self):
            self._act("init_device")

        def load_model(self):
            self._act("load_model")

        def reset(self):
            self.launched.clear()
            self.steps.clear()
            self._act("reset")

        def execute_model(self, out):
            "`out`: a number, or {rank: what that rank does}."
            self.steps.append(out)
            if isinstance(out, dict):
                self._act("step", out.get(self.rank, "nothing"))
            return self.rank, out

        def submit(self, out):
            self.launched.append(self.execute_model(out))

        def collect(self):
            return self.launched.pop(0)

    return FakeWorker


def make_config(
    size: int = 2, tp_size: int | None = None, faults: dict | None = None, **options: Any
) -> Any:
    parallel = {
        "world_size": size,
        "tensor_parallel_size": tp_size or size,
        "worker_cls": make_worker_cls(),
    }
    parallel |= {"worker_extension_cls": "", **options}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        device_config=SimpleNamespace(device="cpu"),
        faults=faults or {},
    )


def slow_down(worker: Any, seconds: float) -> None:
    """For `collective_rpc`: each step takes so much longer, until 0 ends it. What a test finds
    running then still runs.
    """
    submit = type(worker).submit
    worker.submit = lambda out: (time.sleep(seconds), submit(worker, out))[1]


def wait_for(path: str) -> None:
    "For what a worker does: go on when there is such a file."
    wait_until(lambda: os.path.exists(path))


def named_memory(pids: Iterable[int]) -> set[str]:
    """Shared memory that these processes hold under a name, which could outlive them. Ours has none
    (`os.memfd_create`).
    """
    found = set()
    for pid in pids:
        with suppress(OSError):
            found |= {
                line.split(maxsplit=5)[-1]
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
            }
    return {
        name for name in found if name.startswith("/dev/shm/") and not name.endswith(" (deleted)")
    }


def is_alive(pid: int) -> bool:
    "Whether a process runs. One that is dead, but whose parent has not taken note, does not."
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
