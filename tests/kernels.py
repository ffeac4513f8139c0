"""Jupyter kernels that start at once: forks of one process that has imported torch and the like.

A kernel that `python -m ipykernel_launcher` starts imports for five seconds before a notebook's
first cell does anything, and there are more than ninety notebooks. Here one process imports what
most of them need, nothing of this project's, and each kernel is a fork of it: a process of its own
with the environment, the folder and the arguments that Jupyter gives it.

Two commands, which `Kernels` puts together:

    python kernels.py serve ADDRESS            the process that is forked
    python kernels.py kernel ADDRESS ARGS...   what Jupyter runs, and ends, in place of a kernel
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

IMPORTED = [
    "torch",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "matplotlib.pyplot",
    "matplotlib_inline.backend_inline",
    "numba",
    "ipykernel.ipkernel",
    "ipykernel.debugger",
    "ipykernel.kernelapp",
]


class Kernels:
    "A running server, and the kernel spec of Jupyter's that uses it."

    name = "forked"

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.address = str(folder / "socket")
        self.specs = folder / "kernels"
        own = self.specs / self.name
        own.mkdir(parents=True)
        # neither site-packages nor the variables of Python: it only passes things on
        argv = [sys.executable, "-I", "-S", __file__, "kernel", self.address, "-f"]
        spec = {"argv": [*argv, "{connection_file}"], "display_name": "", "language": "python"}
        (own / "kernel.json").write_text(json.dumps(spec))
        command = [sys.executable, __file__, "serve", self.address]
        self.server = subprocess.Popen(command, env=env, stdin=subprocess.PIPE)
        while not Path(self.address).exists():  # it imports first
            assert self.server.poll() is None, "the server of kernels ended"
            time.sleep(0.05)

    def close(self) -> None:
        assert self.server.stdin
        self.server.stdin.close()
        self.server.wait(timeout=60)


def be_kernel(request: dict[str, Any]) -> None:
    "Become, in a fork, the process that Jupyter asked for."
    from ipykernel.kernelapp import IPKernelApp

    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    sys.argv = ["ipykernel_launcher", *request["args"]]
    IPKernelApp.launch_instance(parent_handle=os.getppid())  # it ends where its parent does


def serve(address: str) -> None:
    """Fork a kernel for each connection, until nothing can come from stdin any more. A connection
    that closes ends its kernel; a kernel that ends closes its connection.
    """
    del sys.path[0]  # this file's folder
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # forks share it, and need not look through it
    assert len(os.listdir("/proc/self/task")) == 1, "of several threads, a fork would have one"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen()
    os.rename(address + ".new", address)
    kernels: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([sys.stdin, listener, *kernels.values()], [], [], 0.05)
        for pid, connection in list(kernels.items()):
            if connection in ready or sys.stdin in ready:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        if sys.stdin in ready:
            return
        if listener in ready:
            connection, _ = listener.accept()
            request = json.loads(connection.makefile().readline())
            if (pid := os.fork()) == 0:
                for other in [listener, connection, *kernels.values()]:
                    other.close()
                be_kernel(request)
                sys.exit()
            kernels[pid] = connection
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                with contextlib.suppress(OSError), kernels.pop(pid) as connection:
                    connection.sendall(b"%d" % (os.waitstatus_to_exitcode(status) & 255))


def ask_for_kernel(address: str, args: list[str]) -> int:
    "What Jupyter sees as the kernel: it lives as long, and its end is the kernel's end."
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        request = {"env": dict(os.environ), "folder": os.getcwd(), "args": args}
        connection.sendall(json.dumps(request).encode() + b"\n")
        return int(connection.recv(100) or 1)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(ask_for_kernel(sys.argv[2], sys.argv[3:]))
