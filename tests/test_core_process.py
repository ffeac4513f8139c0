"""The core in a process of its own: the same answers, every way in which either side can end, and
nothing left behind.
"""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fake_worker import SOON, is_alive, slow_down, wait_until
from helpers import random_prompts

from teachvllm import LLM, SamplingParams
from teachvllm.arg_utils import EngineArgs
from teachvllm.engine.core_proc import MPClient, drop_stale
from teachvllm.engine.llm_engine import LLMEngine
from teachvllm.executor.executor_base import EngineDeadError
from teachvllm.llm import run_requests
from teachvllm.messages import EngineCoreOutput, EngineCoreRequest
from teachvllm.sampling_params import BeamSearchParams
from teachvllm.worker.worker import Worker

OPTIONS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 20,
    "max_num_batched_tokens": 64,
}
PROMPTS = random_prompts(8, longest=40)
BEGAN = time.time()


def make_engine(folder: str, **options: Any) -> LLMEngine:
    return LLMEngine.from_engine_args(
        EngineArgs(folder, **OPTIONS | options), enable_multiprocessing=True
    )


@pytest.fixture(scope="module")
def engine(folder: str) -> Iterator[LLMEngine]:
    "One for all tests that leave it alive."
    engine = make_engine(folder)
    yield engine
    assert not engine.engine_core.dead, "a test has killed it"
    engine.close()
    check_gone(engine)


def check_gone(engine: LLMEngine) -> None:
    "No process, no socket, no file."
    client = engine.engine_core
    assert (
        client.process.returncode is not None and client.sock.closed and client.sock.context.closed
    )
    assert client.life.fileno() == -1 and not Path(client.folder).exists()


def at_even_positions(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    "Only even ids; a function that only this file knows."
    logits[1::2] = float("-inf")
    return logits


def half_of(factor: float) -> Any:
    return lambda output, logits: logits * factor  # a closure: it travels by value


MANY = [
    SamplingParams(temperature=0, max_tokens=24, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=20),
    SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=1),
    SamplingParams(temperature=0, max_tokens=16, logits_processors=[at_even_positions]),
    SamplingParams(
        temperature=1, seed=5, max_tokens=16, logits_processors=[half_of(0.5)], min_p=0.01
    ),
    SamplingParams(temperature=0.5, seed=7, best_of=4, n=2, max_tokens=10),
    BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True),
    SamplingParams(
        temperature=0, max_tokens=30, stop_token_ids=list(range(3, 40)), presence_penalty=0.5
    ),
]


def answers(outputs: list[Any]) -> list[Any]:
    return [[(c.token_ids, c.finish_reason, c.stop_reason) for c in o.outputs] for o in outputs]


def logprobs(outputs: list[Any]) -> list[float]:
    "All that were asked for."
    found = [position for o in outputs for c in o.outputs for position in c.logprobs or []]
    found += [position for o in outputs for position in o.prompt_logprobs or [] if position]
    return [token.logprob for position in found for token in position.values()]


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="only Linux has such names")
def test_the_core_has_a_name(engine: LLMEngine) -> None:
    comm = Path(f"/proc/{engine.engine_core.process.pid}/comm")
    assert comm.read_text() == "teachvllm:core\n"


def test_the_same_answers(folder: str, engine: LLMEngine) -> None:
    """Forks, beams, penalties, functions, log-probabilities, in a pool so small that requests are
    preempted.
    """
    requests = {str(i): (prompt, params) for i, (prompt, params) in enumerate(zip(PROMPTS, MANY))}
    got = run_requests(engine, requests)
    assert engine.get_metrics()["num_preemptions"] > 0 and not engine.engine_core.live_request_ids
    with LLM(folder, **OPTIONS) as llm:
        expected = run_requests(llm.llm_engine, requests)
    assert answers(expected) == answers(got)
    assert len(logprobs(got)) > 100 and logprobs(got) == pytest.approx(
        logprobs(expected), abs=1e-4
    )  # other steps, other sums
    assert all(o.finished for o in got) and engine.get_metrics()["num_gpu_blocks_used"] == 0


def test_utilities_and_trace(engine: LLMEngine) -> None:
    "Functions go to the workers, errors come back as they were raised, a recording has all steps."
    assert engine.collective_rpc(lambda worker: (worker.rank, os.getpid())) == [
        (0, engine.engine_core.process.pid)
    ]
    with pytest.raises(ValueError, match="no method 'make_coffee'") as caught:
        engine.collective_rpc("make_coffee")
    assert "in the engine core" in str(caught.value.__cause__)
    trace = engine.start_trace()
    run_requests(
        engine, {"traced": ([9] * 10, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))}
    )
    engine.stop_trace()
    assert [
        step.num_scheduled_tokens["traced"]
        for step in trace.steps
        if "traced" in step.num_scheduled_tokens
    ] == [10, 1, 1, 1, 1]
    # it does not wait for what never comes
    assert engine.step() == [] and not engine.has_unfinished_requests()


def test_an_id_is_used_again_at_once(engine: LLMEngine) -> None:
    "What the core had sent of the aborted request is not taken for news of the new one."
    for length in (3, 5, 7):
        for _ in range(3):
            engine.add_request(
                "again", PROMPTS[0], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
            )
            engine.step()
            engine.abort_request("again")
        (output,) = run_requests(
            engine,
            {"again": ([9], SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))},
        )
        assert len(output.outputs[0].token_ids) == length


def test_stale_news() -> None:
    "News of an id are dropped until the core has seen its last abort; what was passed in stays."
    news = [EngineCoreOutput(name, 0, [i]) for i, name in enumerate("abca")]
    aborted = {"a": 3, "b": 2}
    for num_seen, kept, waiting in (
        (0, "c", {"a": 3, "b": 2}),
        (2, "bc", {"a": 3}),
        (3, "abca", {}),
        (9, "abca", {}),
    ):
        found, left = drop_stale(news, aborted, num_seen)
        assert ("".join(one.request_id for one in found), left) == (kept, waiting)
    assert aborted == {"a": 3, "b": 2} and len(news) == 4


def test_refused_requests_end_with_an_error(engine: LLMEngine) -> None:
    """The front cannot know that a request never fits; the core says so, and the other requests go
    on.
    """
    short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    wide = SamplingParams(n=70, max_tokens=3)
    refused, fine = run_requests(engine, {"wide": (PROMPTS[0], wide), "fine": (PROMPTS[1], short)})
    assert (
        refused.finished
        and refused.outputs[0].finish_reason == "error"
        and "70 sequences" in refused.outputs[0].stop_reason
    )
    assert fine.outputs[0].finish_reason == "length"
    lock = SamplingParams(logits_processors=[sys.stdout.write], max_tokens=3)
    with pytest.raises(ValueError, match="logits_processors cannot be sent to the core's process"):
        engine.add_request("unsendable", PROMPTS[0], lock)
    assert lock.logits_processors and not engine.has_unfinished_requests()


# Fields of the wrong type, as a caller of the client or a front that checks less could send them.
WRONG_FIELDS: list[dict[str, Any]] = [
    {"priority": True},
    {"stop_token_ids": [True]},
    {"prompt_token_ids": ["7"]},
    {"sampling_params": {"temperature": True}},
    {"sampling_params": {"allowed_token_ids": [True]}},
    {"sampling_params": {"logit_bias": {True: 1.0}}},
    {"sampling_params": {"logit_bias": {5: True}}},
    {"sampling_params": {"extra_args": {1: 2}}},
    # what is encoded, and cannot be decoded
    {"sampling_params": {"extra_args": {"a": msgspec.Raw(b"\xc1")}}},
]


def test_a_wrongly_typed_request_is_refused_alone(engine: LLMEngine) -> None:
    "The core answers for this request, goes on with the others, and is alive."
    client = engine.engine_core
    engine.add_request(
        "fine", PROMPTS[0], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    )
    refused = {}
    for i, changes in enumerate(WRONG_FIELDS):
        request = EngineCoreRequest(f"wrong-{i}", [5, 6], SamplingParams(max_tokens=3), seed=0)
        for name, value in changes.get("sampling_params", {}).items():
            setattr(request.sampling_params, name, value)
        for name in changes.keys() - {"sampling_params"}:
            setattr(request, name, changes[name])
        client.add_request(request)
    for wrong_id in (5, None, b"5", (5,)):
        with pytest.raises(ValueError, match="must be a string"):
            client.add_request(
                EngineCoreRequest(wrong_id, [5, 6], SamplingParams(max_tokens=3), seed=0)
            )
    client.abort_requests([(5, None), ((5, 6), 0)])  # nobody has such an id
    num_tokens = 0
    while client.live_request_ids:
        outputs = client.get_output()
        refused |= dict(outputs.refused)
        num_tokens += sum(len(one.new_token_ids) for one in outputs.outputs)
    assert refused.keys() == {f"wrong-{i}" for i in range(len(WRONG_FIELDS))}
    unreadable = refused.pop(f"wrong-{len(WRONG_FIELDS) - 1}")
    assert "MessagePack data is malformed" in unreadable, unreadable
    assert all("Expected `" in why for why in refused.values()) and num_tokens == 20
    engine.abort_request("fine")
    client.call_utility("get_stats")


class UnpickledOnlyHere:
    "It can be sent; what receives it fails, in a way that is no `Exception`."

    def __reduce__(self) -> Any:
        return sys.exit, ("no such module",)

    def __call__(self, output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits


def test_what_cannot_be_unpickled_ends_nothing(engine: LLMEngine) -> None:
    with pytest.raises(RuntimeError, match="SystemExit: no such module"):
        engine.engine_core.call_utility("collective_rpc", UnpickledOnlyHere())
    broken = SamplingParams(max_tokens=3, logits_processors=[UnpickledOnlyHere()])
    request = EngineCoreRequest("broken", [5, 6], broken, seed=0)
    engine.engine_core.add_request(request)
    refused: list[tuple[str, str]] = []
    while not refused:  # the last test's abort may still have an answer on its way
        refused = engine.engine_core.get_output().refused
    assert refused == [("broken", "no such module")]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_users_function_says_exit(folder: str, workers: int) -> None:
    """`sys.exit()` in a logits processor ends its request, as any other error there would;
    `KeyboardInterrupt`, which may be the user's own Ctrl-C, fails the step. Neither the core nor a
    worker ends.
    """

    def leave(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise SystemExit(3)

    def interrupt(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt(3)

    engine = make_engine(folder, tensor_parallel_size=workers)
    processes = engine.collective_rpc(lambda worker: os.getpid())
    leaves = SamplingParams(max_tokens=4, logits_processors=[leave])
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    ended, neighbour = run_requests(engine, {"a": (PROMPTS[0], leaves), "b": (PROMPTS[1], plain)})
    assert ended.outputs[0].finish_reason == "error"
    assert "SystemExit: 3" in str(ended.outputs[0].stop_reason)
    assert len(neighbour.outputs[0].token_ids) == 4
    engine.add_request("c", PROMPTS[0], SamplingParams(max_tokens=4, logits_processors=[interrupt]))
    with pytest.raises(RuntimeError, match="KeyboardInterrupt: 3"):
        while True:
            engine.step()
    (ended,) = engine.step()
    assert ended.request_id == "c" and ended.outputs[0].finish_reason == "error"
    assert len(run_requests(engine, {"d": (PROMPTS[1], plain)})[0].outputs[0].token_ids) == 4
    assert engine.collective_rpc(lambda worker: os.getpid()) == processes
    engine.close()
    check_gone(engine)


def test_over_ray(folder: str, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    "The core's workers are actors then. What a launcher starts has a core already."
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    requests = {"a": ([5, 6, 7], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))}
    over_ray = make_engine(folder, distributed_executor_backend="ray", tensor_parallel_size=2)
    assert answers(run_requests(over_ray, requests)) == answers(run_requests(engine, requests))
    assert over_ray.collective_rpc(lambda worker: worker.rank) == [0, 1]
    over_ray.close()
    check_gone(over_ray)
    with pytest.raises(ValueError, match="external_launcher: its processes are the workers"):
        make_engine(folder, distributed_executor_backend="external_launcher")


class FailsOnce(Worker):
    "A worker whose step fails when it is told to."

    fails = False

    def execute_model(self, out: Any) -> Any:
        if self.fails and out.num_scheduled_tokens:
            self.fails = False
            raise LookupError("lost the weights")
        return super().execute_model(out)

    def submit(self, out: Any) -> Any:
        if self.fails and out.num_scheduled_tokens:
            self.fails = False
            raise LookupError("lost the weights")
        return super().submit(out)


def set_fails(worker: Any) -> None:
    worker.fails = True


def test_a_step_fails(folder: str) -> None:
    """Its error is raised with the traceback of the other process, its requests end with an error,
    the next ones are answered.
    """
    engine = make_engine(folder, worker_cls=FailsOnce)
    engine.collective_rpc(set_fails)
    engine.add_request("a", PROMPTS[0], SamplingParams(max_tokens=4))
    with pytest.raises(LookupError, match="lost the weights") as caught:
        engine.step()
    assert "in the engine core" in str(caught.value.__cause__)
    ended = engine.step()[0]
    assert ended.finished and ended.outputs[0].finish_reason == "error"
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    assert len(run_requests(engine, {"b": (PROMPTS[1], params)})[0].outputs[0].token_ids) == 4
    process = engine.engine_core.process
    del engine, caught  # and with it the process
    gc.collect()
    wait_until(lambda: process.poll() is not None)


def test_the_core_is_killed(folder: str) -> None:
    "Each call says why; with it go the workers that it had started, and a new engine starts."
    engine = make_engine(folder, tensor_parallel_size=2, distributed_executor_backend="mp")
    workers = engine.collective_rpc(lambda worker: os.getpid())
    assert len(set(workers)) == 2
    engine.collective_rpc(slow_down, args=(0.5,))  # all tokens would take 50 s
    engine.add_request("a", PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
    engine.step()
    for pid in (engine.engine_core.process.pid, *workers):
        os.kill(pid, signal.SIGTERM)  # as a service manager does: it is for the engine to act on
    engine.step()
    os.kill(engine.engine_core.process.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="the engine core .* was killed by SIGKILL"):
            while True:
                engine.step()
    with pytest.raises(EngineDeadError):
        engine.add_request("b", PROMPTS[1], SamplingParams())
    with pytest.raises(EngineDeadError):
        engine.get_metrics()
    engine.close()
    check_gone(engine)
    wait_until(lambda: not any(map(is_alive, workers)))


def test_an_idle_core_is_killed(folder: str) -> None:
    "The first call after it does not wait for ever, whichever it is."
    for call in (
        lambda engine: engine.add_request(os.urandom(4).hex(), PROMPTS[0], SamplingParams()),
        lambda engine: engine.get_metrics(),
    ):
        engine = make_engine(folder)
        engine.engine_core.process.kill()
        engine.engine_core.process.wait(SOON)
        with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
            while True:  # what was sent before the system closed the connection is lost
                call(engine)
        engine.abort_request("a")
        engine.close()
        check_gone(engine)


def test_stop_strings_leave_nothing(folder: str) -> None:
    "The front ends such a request; the core hears of it, and its id can be used at once."
    llm = LLMEngine.from_engine_args(
        EngineArgs(**OPTIONS | {"skip_tokenizer_init": False}), enable_multiprocessing=True
    )
    stops = SamplingParams(
        temperature=0, max_tokens=60, ignore_eos=True, stop=[" the", " a", "."], n=1
    )
    for length in (2, 4, 6):
        (stopped,) = run_requests(llm, {"again": ("The capital of France is", stops)})
        assert stopped.outputs[0].finish_reason == "stop" and not llm.engine_core.live_request_ids
        assert llm.step() == []  # it waits for nothing
        exact = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        assert (
            len(
                run_requests(llm, {"again": ("The future of AI is", exact)})[0].outputs[0].token_ids
            )
            == length
        )
    llm.close()


def test_a_worker_of_the_core_is_killed(folder: str) -> None:
    "The core ends, and says which worker it was."
    engine = make_engine(folder, tensor_parallel_size=2, distributed_executor_backend="mp")
    workers = engine.collective_rpc(lambda worker: os.getpid())
    engine.collective_rpc(slow_down, args=(0.5,))
    engine.add_request("a", PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
    engine.step()
    os.kill(workers[1], signal.SIGKILL)
    with pytest.raises(
        Exception, match=rf"worker rank=1 \(process {workers[1]}\) was killed by SIGKILL"
    ):
        while True:
            engine.step()
    with pytest.raises(EngineDeadError, match="worker rank=1"):
        while True:
            engine.step()
    check_gone(engine)
    wait_until(lambda: not any(map(is_alive, workers)))
    engine.close()


def test_it_does_not_start(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    "The core's own error comes, and no process is left."
    found: list[Any] = []
    plain = MPClient._start_process
    monkeypatch.setattr(
        MPClient, "_start_process", lambda self, address: (found.append(self), plain(self, address))
    )
    with pytest.raises(ValueError, match="no memory for the KV cache") as caught:
        make_engine(folder, num_gpu_blocks_override=None, kv_cache_memory_bytes=1000)
    assert "in the engine core" in str(caught.value.__cause__)
    assert (
        found[0].process.returncode == 0
        and found[0].sock.closed
        and not Path(found[0].folder).exists()
    )


PROGRAM = """
    import os, sys
    from teachvllm import LLM, SamplingParams
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    llm = LLM(sys.argv[1], dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=40)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    try:
        print(llm.llm_engine.engine_core.process.pid, flush=True)
        while True:
            llm.generate([5, 6, 7], params, use_tqdm=False)
    except KeyboardInterrupt:
        print("interrupted", llm.llm_engine.get_num_unfinished_requests(), flush=True)
    outputs = llm.generate([5, 6, 7], params, use_tqdm=False)
    print("answered", len(outputs[0].outputs[0].token_ids), flush=True)
"""  # no __main__ guard: the core's process does not run the program again


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_the_program_is_stopped(folder: str, tmp_path: Path, how: int) -> None:
    """Killed: the core goes, too. Ctrl-C, which a terminal sends to both processes: the request is
    dropped, the next one answered.
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, str(tmp_path / "program.py"), folder]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=env
    ) as program:
        assert program.stdout is not None
        core = int(program.stdout.readline())
        time.sleep(0.3)
        if how == signal.SIGKILL:
            program.kill()
        else:
            os.killpg(program.pid, how)
            assert program.stdout.readline() == "interrupted 0\n"
            assert program.stdout.readline() == "answered 200\n"
            assert program.wait(SOON) == 0
    wait_until(lambda: not is_alive(core))
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


DYING = """
import os, random, signal, socket, time, weakref
from contextlib import suppress
from types import SimpleNamespace
import zmq
from teachvllm.engine.core_proc import RESULT, UTILITY, MPClient, logger, stop_core
from teachvllm.executor.executor_base import EngineDeadError

class Process:
    "A core that only answers: a fork of this process."
    returncode = None

    def __init__(self, address):
        self.pid = os.fork()
        if not self.pid:
            with zmq.Context() as context, context.socket(zmq.PAIR) as sock:
                sock.connect(address)
                for number in (b"connect", b"start"):
                    sock.send_multipart([RESULT, number, b"", b"N."])
                while sock.recv_multipart():
                    sock.send_multipart([RESULT, b"more", b"", bytes(1000)])

    def poll(self):
        return self.returncode

    def wait(self, timeout):
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def send_signal(self, number): ...

class Client(MPClient):
    def _start_process(self, address):
        self.life, theirs = socket.socketpair()
        self.process = Process(address)
        theirs.close()
        self.stop = weakref.finalize(self, stop_core, os.getpid(), self.process, self.sock, [self.life])
        self.poller.register(self.sock, zmq.POLLIN)
        self.poller.register(self.life, zmq.POLLIN)

logger.disabled = True
for i in range(250):
    client = Client(SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend=None)), None)
    for _ in range(i % 6):
        client._send(UTILITY, b"more", bytes(100))
    time.sleep(random.choice([0, random.uniform(0, 0.003)]))
    os.kill(client.process.pid, signal.SIGKILL)
    with suppress(EngineDeadError):
        while True:
            client._receive(None)
            if random.random() < 0.3:
                client._send(UTILITY, b"more", bytes(100))
    assert client.process.returncode == -signal.SIGKILL
"""


def test_a_dead_core_does_not_hold_up_the_end() -> None:
    """What was on its way to the core when it died is dropped. With a socket that lingers, ZMQ on a
    busy machine waited for ever.
    """
    # which make the machine busy
    programs = [subprocess.Popen([sys.executable, "-c", DYING]) for _ in range(4)]
    try:
        assert [program.wait(300) for program in programs] == [0] * 4
    finally:
        for program in programs:
            program.kill()


def test_no_folder_is_left() -> None:
    "The private folder of each socket was deleted as soon as both sides were connected."
    for path in Path(tempfile.gettempdir()).glob("teachvllm-*"):
        with suppress(FileNotFoundError):  # another test's may go at any time
            stat = path.stat()
            bound = (path / "core").exists()
            old = BEGAN < stat.st_mtime < time.time() - 3 * SOON
            assert not (bound and old and stat.st_uid == os.getuid()), path
