"""Workers in processes of their own: calls and steps, and every fault that can be injected. After
each nothing is left.
"""

import gc
import logging
import os
import random
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_worker import SOON, is_alive, make_config, named_memory, wait_until

from teachvllm import LLM, SamplingParams
from teachvllm.executor import multiproc_executor
from teachvllm.executor.executor_base import EngineDeadError
from teachvllm.executor.multiproc_executor import MultiprocExecutor, WorkerProcess


@pytest.fixture(scope="module")
def shared() -> Iterator[MultiprocExecutor]:
    "Two workers for all tests that leave them alive."
    executor = MultiprocExecutor(make_config())
    yield executor
    assert not executor.group.dead, "a test has killed them"
    executor.shutdown()
    check_gone(executor)


def check_gone(executor: MultiprocExecutor) -> None:
    "No process, no connection."
    assert executor.group.workers and all(
        worker.process.returncode is not None for worker in executor.group.workers
    )
    assert all(worker.sock.fileno() == -1 for worker in executor.group.workers)


@contextmanager
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[WorkerProcess]]:
    "The worker processes that are started inside, also by an executor that fails on its way."
    found: list[WorkerProcess] = []
    plain = WorkerProcess.__init__

    def init(self: WorkerProcess, *args: Any) -> None:
        plain(self, *args)
        found.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(WorkerProcess, "__init__", init)
        yield found


def causes(error: BaseException) -> str:
    return f"{error.__cause__}"


# Calls


def test_calls(shared: MultiprocExecutor) -> None:
    "Names and functions, positional and keyword arguments; one answer each, by rank."
    assert shared.collective_rpc("execute_model", args=("x",)) == [(0, "x"), (1, "x")]
    assert shared.collective_rpc(
        lambda worker, a, b=0: (worker.rank, a, b), args=(1,), kwargs={"b": 2}
    ) == [(0, 1, 2), (1, 1, 2)]
    offset = 10
    assert shared.collective_rpc(lambda worker: worker.rank + offset) == [10, 11]  # a closure
    assert shared.collective_rpc(lambda w: (w.local_rank, w.is_driver_worker)) == [
        (0, True),
        (1, False),
    ]
    urls = shared.collective_rpc(lambda w: w.init_method)
    assert urls[0] == urls[1] and urls[0].startswith("tcp://127.0.0.1:")
    assert shared.collective_rpc(lambda w: w.calls[:2]) == [["init_device", "load_model"]] * 2

    class Local:
        def __init__(self, x):
            self.x = x

    found = shared.collective_rpc(lambda w, y: Local(y.x + w.rank), args=(Local(5),))
    assert [y.x for y in found] == [5, 6] and all(type(y) is Local for y in found)
    with pytest.raises(ValueError, match="no method 'make_coffee'"):
        shared.collective_rpc("make_coffee")
    with pytest.raises((TypeError, AttributeError)):
        shared.collective_rpc("execute_model", args=(shared.lock,))  # cannot be sent
    assert (
        shared.collective_rpc("execute_model", args=(1,)) == [(0, 1), (1, 1)]
        and not shared.group.calls
    )


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="only Linux has such names")
def test_processes_have_names(shared: MultiprocExecutor) -> None:
    "In `top`, of at most 15 bytes, each worker's own; and ours is as it was."
    names = [
        Path(f"/proc/{worker.process.pid}/comm").read_text().strip()
        for worker in shared.group.workers
    ]
    assert names == ["teachvllm:w0", "teachvllm:w1"]
    assert not Path("/proc/self/comm").read_text().startswith("teachvllm:")


def test_large_messages_both_ways(shared: MultiprocExecutor) -> None:
    """Larger than a connection's buffers, in both directions at once: neither side waits for the
    other for ever.
    """
    big = random.Random(0).randbytes(3_000_000)
    assert shared.collective_rpc("execute_model", args=(big,)) == [(0, big), (1, big)]
    for i in range(3):
        shared.submit((i, big))
    assert [shared.collect() for _ in range(3)] == [(0, (i, big)) for i in range(3)]
    assert not shared.in_flight


def test_several_threads(shared: MultiprocExecutor) -> None:
    "Each gets its own answers."
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda i: shared.collective_rpc("execute_model", args=(i,)), range(100))
        assert list(answers) == [[(0, i), (1, i)] for i in range(100)]


def test_timeout(shared: MultiprocExecutor, tmp_path: Path) -> None:
    "Who did not answer is said, the answer that comes later is dropped, and all goes on."
    go = tmp_path / "go"
    with pytest.raises(
        TimeoutError, match=r"execute_model: no answer from worker rank=(0, )?1 after 2 s"
    ):
        shared.collective_rpc("execute_model", timeout=2.0, args=({1: f"wait {go}"},))
    with pytest.raises(TimeoutError):
        # no call waits for this error
        shared.collective_rpc("execute_model", timeout=0.0, args=({1: "raise late"},))
    go.touch()
    assert shared.collective_rpc("execute_model", args=(2,)) == [(0, 2), (1, 2)]
    assert shared.execute_model(3) == (0, 3)


class Extension:
    "Methods that a worker gets beside its own."

    def greet(self, whom):
        return f"rank {self.rank} greets {whom}"


def test_worker_extension_cls_and_environment(capfd: pytest.CaptureFixture) -> None:
    """`collective_rpc` finds an extension's methods. Workers have the engine's variables and paths;
    their prints and logs are seen, and logs carry the rank.
    """
    import torch

    executor = MultiprocExecutor(make_config(worker_extension_cls=Extension))
    assert executor.collective_rpc("greet", args=("you",)) == [
        "rank 0 greets you",
        "rank 1 greets you",
    ]
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, torch.get_num_threads() // 2))
    assert executor.collective_rpc(lambda w: os.environ["OMP_NUM_THREADS"]) == [threads] * 2
    assert (
        executor.collective_rpc(lambda w: os.environ["HF_HUB_OFFLINE"])
        == [os.environ["HF_HUB_OFFLINE"]] * 2
    )
    assert executor.collective_rpc(lambda w: sys.path[: len(sys.path)])[0][: len(sys.path)] == [
        *map(str, sys.path)
    ]
    executor.collective_rpc(
        lambda w: logging.getLogger("teachvllm").error("something from %d", w.rank)
    )
    executor.collective_rpc(lambda w: print(f"printed by {w.rank}"))
    written = capfd.readouterr()
    executor.shutdown()
    for rank in (0, 1):
        assert f"ERROR teachvllm rank={rank}: something from {rank}" in written.err
        assert f"printed by {rank}\n" in written.out


# Steps


def test_steps(shared: MultiprocExecutor) -> None:
    """The output rank answers, in the order of the steps; one that fails raises in its own
    `collect`, and only there.
    """
    for step in (1, {0: "raise A"}, 3):
        shared.submit(step)
    assert shared.collect() == (0, 1)
    with pytest.raises(LookupError, match="raise A") as failed:
        shared.collect()
    assert "worker rank=0" in causes(failed.value) and "execute_model" in causes(failed.value)
    assert shared.collect() == (0, 3)
    shared.reset()
    for step in (1, 2, 3):
        shared.submit(step)
    shared.drain()
    assert not shared.in_flight and shared.execute_model(4) == (0, 4)
    assert shared.collective_rpc(lambda w: w.steps) == [[1, 2, 3, 4]] * 2
    shared.reset()
    assert shared.collective_rpc(lambda w: w.steps) == [[], []]


def test_an_error_of_a_worker_that_was_not_to_answer(
    shared: MultiprocExecutor, tmp_path: Path
) -> None:
    """It is raised, though the output rank is well: at once if it waits, else by the next call.
    After a reset all is forgotten.
    """
    first, second, third = (tmp_path / name for name in "BCD")
    with pytest.raises(LookupError, match="raise B") as failed:
        shared.execute_model({0: f"wait {first}", 1: "raise B"})
    assert "worker rank=1" in causes(failed.value)
    first.touch()
    shared.reset()
    assert shared.execute_model({1: f"wait {second}"})[0] == 0  # rank 1 is not done yet
    assert shared.execute_model({1: "raise C"}) == (0, {1: "raise C"})
    second.touch()
    # what it answers has come
    wait_until(lambda: bool(select.select([shared.group.workers[1].sock], [], [], 0)[0]))
    with pytest.raises(LookupError, match="raise C") as failed:
        shared.execute_model(5)
    assert "worker rank=1" in causes(failed.value)
    shared.reset()
    assert shared.execute_model({1: f"wait {third}"})[0] == 0
    assert shared.execute_model({1: "raise D"}) == (0, {1: "raise D"})
    third.touch()
    with pytest.raises(LookupError, match="raise D"):
        shared.collective_rpc("execute_model", args=(6,))
    shared.reset()
    assert shared.execute_model(7) == (0, 7)


def test_a_step_on_a_gpu_is_launched_before_the_last_is_fetched(
    shared: MultiprocExecutor, tmp_path: Path
) -> None:
    "There a step is two orders. An error when it is launched is raised when it is fetched."
    shared.reset()
    shared.is_ahead = True
    try:
        for step in (1, 2):
            shared.submit(step)
        assert shared.collective_rpc(lambda w: list(w.steps)) == [[1, 2]] * 2
        assert [shared.collect(), shared.collect()] == [(0, 1), (0, 2)]
        assert shared.collective_rpc(lambda w: w.launched) == [[], []]
        for rank in (0, 1):
            go = tmp_path / f"{rank}"
            shared.submit({0: f"wait {go}"} | {rank: "raise E"})
            with pytest.raises(LookupError, match="raise E") as failed:
                shared.collect()
            assert f"worker rank={rank}" in causes(failed.value)
            go.touch()
            shared.reset()
        assert shared.execute_model(3) == (0, 3)
    finally:
        shared.is_ahead = False


def test_who_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two pipeline stages, the first rank of the last one. Also: one worker has no store; and
    executors live side by side.
    """
    executors = [MultiprocExecutor(make_config(2, tp_size=1)), MultiprocExecutor(make_config(1))]
    assert executors[0].execute_model(1) == (1, 1)
    assert executors[0].collective_rpc(lambda w: w.is_driver_worker) == [True, True]
    assert executors[1].execute_model(2) == (0, 2)
    assert executors[1].collective_rpc(lambda w: w.init_method) == [None]
    pids = [worker.process.pid for executor in executors for worker in executor.group.workers]
    assert all(map(is_alive, pids))
    executors[0].shutdown()
    executors[0].shutdown()
    check_gone(executors[0])
    with pytest.raises(ValueError, match="closed"):
        executors[0].collective_rpc("reset")
    assert executors[1].execute_model(3) == (0, 3)
    executors.clear()  # the other one is dropped
    gc.collect()
    assert not any(map(is_alive, pids))


# Errors


class Unruly(Exception):
    "Cannot be pickled: it has a lock."

    def __init__(self, a, b):
        super().__init__(f"unruly {a} {b}")
        self.lock = __import__("threading").Lock()


class Peculiar(Exception):
    "Can be pickled, and not be unpickled."

    def __init__(self, a, b):
        super().__init__(f"peculiar {a} {b}")


@pytest.mark.parametrize("kind", [Unruly, Peculiar])
def test_an_error_that_cannot_be_sent(shared: MultiprocExecutor, kind: type) -> None:
    "becomes a RuntimeError with its name, its text and its traceback."

    def fail(worker):
        if worker.rank == 1:
            raise kind(1, 2)

    with pytest.raises(
        RuntimeError, match=rf"{kind.__name__}: {kind.__name__.lower()} 1 2"
    ) as failed:
        shared.collective_rpc(fail)
    assert "worker rank=1" in causes(failed.value) and "in fail" in causes(failed.value)


def test_a_result_that_cannot_be_sent(shared: MultiprocExecutor) -> None:
    with pytest.raises(TypeError, match="pickle"):
        shared.collective_rpc(lambda worker: __import__("threading").Lock())
    with pytest.raises(Exception, match="cannot be understood"):

        class Vicious:
            def __reduce__(self):
                return eval, ("(_ for _ in ()).throw(KeyError('cannot be understood'))",)

        shared.collective_rpc("execute_model", args=(Vicious(),))
    assert shared.collective_rpc("execute_model", args=(1,)) == [(0, 1), (1, 1)]


def test_a_fork_of_the_engine_leaves_the_workers_alone(shared: MultiprocExecutor) -> None:
    pid = os.fork()
    if pid == 0:
        shared.group.stop()
        os._exit(0)
    os.waitpid(pid, 0)
    assert shared.collective_rpc("execute_model", args=(1,)) == [(0, 1), (1, 1)]


# Ctrl-C


def test_workers_ignore_ctrl_c(shared: MultiprocExecutor) -> None:
    for worker in shared.group.workers:
        os.kill(worker.process.pid, signal.SIGINT)
    assert shared.collective_rpc(lambda w: signal.getsignal(signal.SIGINT) is signal.SIG_IGN) == [
        True,
        True,
    ]


@pytest.mark.parametrize("seed", range(2))
def test_ctrl_c_at_any_time(shared: MultiprocExecutor, seed: int) -> None:
    """Interrupted anywhere, a step is sent to all workers or to none, and its result is still
    there, or dropped by `reset`.
    """
    rng = random.Random(seed)
    interrupted = 0
    shared.reset()

    def interrupt(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    def attempt(call: Callable[[], Any]) -> Any:
        "`call()`, interrupted after up to 300 µs; None if it was."
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 3e-4))
            try:
                return call()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            return None

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for step in range(1500):
            payload = rng.randbytes(rng.choice((10, 1000, 400_000)) if step % 20 == 0 else 10)
            attempt(lambda: shared.submit((step, payload)))  # noqa: B023
            if shared.in_flight:
                result = attempt(shared.collect)
                interrupted += result is None
                if shared.in_flight and rng.random() < 0.5:
                    result = shared.collect()  # still in flight: ask again
                assert result in (None, (0, (step, payload)))
            if shared.in_flight or rng.random() < 0.1:
                attempt(lambda: shared.collective_rpc("execute_model", args=("rpc",)))
                shared.reset()
        shared.reset()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted, "on the fastest machine, too"
    assert shared.collective_rpc("execute_model", args=(1,)) == [(0, 1), (1, 1)]
    assert not shared.group.calls


# Faults. After each nothing is left.


@pytest.mark.parametrize("where", ["before init", "init_device", "load_model"])
def test_killed_while_it_starts(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with noted(monkeypatch) as workers:
        plain = WorkerProcess.__init__

        def init(self: WorkerProcess, *args: Any) -> None:
            plain(self, *args)
            if self.rank == 1 and where == "before init":
                self.process.kill()

        monkeypatch.setattr(WorkerProcess, "__init__", init)
        with pytest.raises(
            EngineDeadError, match=r"worker rank=1 \(process \d+\) was killed by SIGKILL"
        ):
            MultiprocExecutor(make_config(faults={(where, 1): "kill"}))
    assert len(workers) == 2 and all(worker.process.returncode is not None for worker in workers)


def test_fails_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    "Its own error is raised; likewise if it exits, hangs, or cannot be started at all."
    with noted(monkeypatch) as workers:
        with pytest.raises(LookupError, match="raise no memory") as failed:
            MultiprocExecutor(
                make_config(
                    faults={("load_model", 1): "raise no memory", ("load_model", 0): "hang"}
                )
            )
        assert "worker rank=1" in causes(failed.value)
        with pytest.raises(EngineDeadError, match="exited with code 7"):
            MultiprocExecutor(make_config(1, faults={("init_device", 0): "exit"}))
        monkeypatch.setattr(MultiprocExecutor, "start_timeout", 1.0)
        with pytest.raises(TimeoutError, match="no answer from worker rank=0"):
            MultiprocExecutor(make_config(1, faults={("init_device", 0): "hang"}))
        monkeypatch.setattr(sys, "executable", "/no/such/python")
        with pytest.raises(FileNotFoundError):
            MultiprocExecutor(make_config())
    assert len(workers) == 4 and all(worker.process.returncode is not None for worker in workers)


def check_dead(executor: MultiprocExecutor, says: str) -> None:
    "Every call says why; nothing is left."
    for call in (
        lambda: executor.submit(1),
        lambda: executor.collective_rpc("reset"),
        executor.reset,
    ):
        with pytest.raises(EngineDeadError, match=says):
            call()
    check_gone(executor)
    executor.shutdown()


def test_killed_in_a_step() -> None:
    """Also if the other one waits for it, and if a process that the dead one has started keeps its
    connection open.
    """
    executor = MultiprocExecutor(make_config())
    children = executor.collective_rpc(lambda w: os.fork() or time.sleep(60))
    executor.submit(1)
    executor.submit({0: "hang", 1: "kill"})
    executor.submit(3)
    assert executor.collect() == (0, 1)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=r"worker rank=1 .* was killed by SIGKILL"):
            executor.collect()
    check_dead(executor, "SIGKILL")
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def test_dies_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of one worker is often the echo of another one's death. And what the dead one said
    last is told.
    """
    executor = MultiprocExecutor(make_config())
    with pytest.raises(LookupError):
        executor.collective_rpc("execute_model", args=({1: "raise its last words"},))
    # the death may come long after the echo
    monkeypatch.setattr(multiproc_executor.WorkerGroup, "grace", SOON)
    with pytest.raises(EngineDeadError, match=r"(?s)rank=1.*exited with code 7.*its last words"):
        executor.execute_model({0: "raise lost the connection", 1: "exit"})
    check_dead(executor, "code 7")


def test_hangs_after_another_one_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    "It waits for the one that failed, so it cannot be reset. The first failure is told."
    monkeypatch.setattr(MultiprocExecutor, "reset_timeout", 0.5)
    executor = MultiprocExecutor(make_config())
    with pytest.raises(LookupError):
        executor.execute_model({0: "hang", 1: "raise F"})
    with pytest.raises(
        EngineDeadError, match=r"reset.*rank=0.*before that, worker rank=1: LookupError: .*raise F"
    ):
        executor.reset()
    check_dead(executor, "raise F")


def test_hangs_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MultiprocExecutor, "step_timeout", 0.5)
    monkeypatch.setattr(MultiprocExecutor, "reset_timeout", 0.5)
    executor = MultiprocExecutor(make_config())
    with pytest.raises(TimeoutError, match=r"execute_model: no answer from worker rank=0"):
        executor.execute_model({0: "hang"})
    with pytest.raises(EngineDeadError, match="TimeoutError"):
        executor.reset()
    check_dead(executor, "TimeoutError")


def test_shutdown_while_a_worker_hangs() -> None:
    executor = MultiprocExecutor(make_config())
    executor.submit({1: "hang"})
    executor.drain()
    executor.shutdown()
    check_gone(executor)
    assert executor.group.workers[1].process.returncode == -signal.SIGKILL


# Scripts

SCRIPT = """
    import os, sys
    from types import SimpleNamespace as NS
    from teachvllm.executor.multiproc_executor import MultiprocExecutor

    print("a script begins")

    class MyWorker:
        def __init__(self, vllm_config, rank, distributed_init_method, **where):
            self.rank, self.url = rank, distributed_init_method
        def init_device(self): pass
        def load_model(self): pass
        def execute_model(self, out): return out.x + 1

    class Order:
        x = 41

    parallel = NS(world_size=2, tensor_parallel_size=2, worker_cls=MyWorker, worker_extension_cls="")
    executor = MultiprocExecutor(
        NS(parallel_config=parallel, scheduler_config=NS(async_scheduling=False), device_config=NS(device="cpu"))
    )
    assert executor.execute_model(Order()) == 42
    print(*executor.collective_rpc(lambda w: os.getpid()), executor.collective_rpc(lambda w: w.url)[0], flush=True)
    sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("end", ["killed", "ends", "raises"])
def test_a_script_without_a_guard(end: str, tmp_path: Path) -> None:
    """It is not run again by the workers, and however it ends, nothing is left: no process, shared
    memory or port.
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT) + ("raise SystemExit(3)" if end == "raises" else ""))
    env = {**os.environ, "PYTHONPATH": str(Path(multiproc_executor.PACKAGE_ROOT))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    script = subprocess.Popen([sys.executable, str(path)], **pipes, text=True, env=env)
    assert script.stdin and script.stdout and script.stdout.readline() == "a script begins\n"
    *pids, url = script.stdout.readline().split()
    assert not named_memory([script.pid, *map(int, pids)])
    assert all(is_alive(int(pid)) for pid in pids)
    socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=SOON).close()
    if end == "killed":
        script.kill()
    script.stdin.close()
    assert script.wait(SOON) == {"killed": -signal.SIGKILL, "ends": 0, "raises": 3}[end]
    wait_until(lambda: not any(is_alive(int(pid)) for pid in pids))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=SOON)
    assert script.stdout.read() == ""
    script.stdout.close()


# With a model


def test_an_engine(folder: str) -> None:
    """It says what one worker in this process says; and when its worker is killed it says so, and a
    new one starts.
    """
    options = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "num_gpu_blocks_override": 64,
        "device": "cpu",
    }
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    answers = []
    for backend in ("uni", "mp"):
        with LLM(folder, distributed_executor_backend=backend, **options) as llm:
            outputs = llm.generate([[5, 6, 7], [9, 8]], params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
            if backend == "mp":
                executor = llm.llm_engine.engine_core.engine_core.executor
                assert isinstance(executor, MultiprocExecutor)
                executor.group.workers[0].process.kill()
                for _ in range(2):
                    with pytest.raises(EngineDeadError, match="worker rank=0 .*SIGKILL"):
                        llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert answers[0] == answers[1]
    check_gone(executor)
