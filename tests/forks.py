"""Workers and cores that start at once in tests: forks of one process that has imported torch.

A new Python imports for three seconds before a worker or an engine's core does anything, and the
tests start some hundreds of them. Here one process for each of pytest's imports what they need,
nothing of this project's. What `start_process` asks `subprocess.Popen` for is then a fork of it that
runs the same code, with the same files, variables and signals; and a child of the test's process,
as with Popen: while it begins, that process adopts orphans (prctl(2), PR_SET_CHILD_SUBREAPER).

What a fork hides: all of them have one secret of hashing, and find modules imported. Notebooks,
`teachvllm serve`, every script that a test runs, and one test of test_parallel_engine.py start new
Pythons.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Sequence
from typing import Any, NoReturn

IMPORTED = [
    "numpy",
    "torch",
    "torch.distributed",
    "transformers.models.llama.configuration_llama",
    "transformers.models.auto.configuration_auto",
    "numba",
]
PR_SET_CHILD_SUBREAPER = 36
PYTHON = sys.executable
# as pytest got them, whatever a test has set; with more threads NumPy would begin some
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


class ForkServer:
    "The process that is forked, as pytest's process sees it."

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.prctl = ctypes.CDLL(None).prctl
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(60)
        with theirs:
            fd = theirs.fileno()
            self.process = subprocess.Popen(
                [PYTHON, __file__, str(fd)], env=ENV, stdin=subprocess.DEVNULL, pass_fds=[fd]
            )
        assert self.sock.recv(100) == b"ready", "the fork server ended"

    def fork(self, code: str, argv: list[str], env: dict[str, str], fds: Sequence[int]) -> int:
        "The process id of a new child of this process that runs `code`."
        request = pickle.dumps((os.getpid(), code, argv, env, os.getcwd(), list(fds)))
        with self.lock:
            assert self.prctl(PR_SET_CHILD_SUBREAPER, 1) == 0, "this process cannot adopt"
            try:
                socket.send_fds(self.sock, [request], [1, 2, *fds])
                pid = int(self.sock.recv(100))
                self.sock.send(b"born")
                assert self.sock.recv(100) == b"adopted"
            except BaseException:  # the next to ask gets a new one
                self.close()
                raise
            finally:
                self.prctl(PR_SET_CHILD_SUBREAPER, 0)
        return pid

    def close(self) -> None:
        ForkedPopen.server = None
        self.sock.close()
        self.process.kill()  # it may hang, and has nothing to put in order
        self.process.wait()


class ForkedPopen(subprocess.Popen):
    "A fork, with Popen's methods: it is a child of this process, as any."

    server: ForkServer | None = None
    _sigint_wait_secs = 0.25

    def __init__(self, code: str, argv: list[str], env: dict[str, str], fds: Sequence[int]) -> None:
        if ForkedPopen.server is None:  # the first
            ForkedPopen.server = ForkServer()
        self.args = [PYTHON, "-c", code, *argv]
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock = threading.Lock()
        self.pid = self.server.fork(code, argv, env, fds)
        self._child_created = True

    @classmethod
    def server_pids(cls) -> set[int]:
        "For tests that count processes: the server's is no process of an engine."
        return {cls.server.process.pid} if cls.server else set()


def popen(args: list[str], **options: Any) -> subprocess.Popen:
    "A fork in place of `Popen([python, '-c', code, ...], env=, stdin=DEVNULL, pass_fds=)`."
    python, flag, code, *argv = args
    if (python, flag) != (PYTHON, "-c"):  # a test of what happens without a Python
        return subprocess.Popen(args, **options)
    assert options.keys() == {"env", "stdin", "pass_fds"}
    return ForkedPopen(code, argv, options["env"], options["pass_fds"])


def run(request: tuple[Any, ...], fds: list[int], sock: socket.socket) -> NoReturn:
    "The life of a fork, once its first parent is gone."
    parent, code, argv, env, folder, numbers = request
    end = time.monotonic() + 10
    while os.getppid() != parent:
        if time.monotonic() > end:  # it is gone, or did not adopt
            os._exit(1)
        time.sleep(0.001)
    sock.send(b"adopted")
    sock.close()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1000) for fd in fds]
    os.closerange(3, 1000)
    for fd, number in zip(high, [1, 2, *numbers]):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = ["-c", *argv]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as `start_process` lets it be born
    random.seed()
    sys.modules["numpy"].random.seed()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if threads := env.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))
    status = 0
    try:
        exec(code, main.__dict__)
    except SystemExit as leaves:
        status = leaves.code if isinstance(leaves.code, int) else int(leaves.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def serve(sock: socket.socket) -> NoReturn:
    "Fork for each request, until no one can ask any more."
    del sys.path[0]  # this file's folder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in IMPORTED:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # forks share it, and need not look through it
    assert len(os.listdir("/proc/self/task")) == 1, "of several threads, a fork would have one"
    sock.send(b"ready")
    while True:
        data, fds, *_ = socket.recv_fds(sock, 1 << 20, 64)
        if not data:
            os._exit(0)
        if (first := os.fork()) == 0:
            if child := os.fork():
                sock.send(b"%d" % child)
                sock.recv(100)  # the asker has heard it
                os._exit(0)
            run(pickle.loads(data), fds, sock)
        os.waitpid(first, 0)
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
