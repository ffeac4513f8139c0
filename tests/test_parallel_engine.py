"""One engine over several worker processes: the tokens that one worker gives, for requests of all
kinds.
"""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fake_worker import SOON, is_alive, named_memory, wait_for, wait_until
from forks import ForkedPopen
from helpers import VOCAB, make_tiny
from test_async_scheduling import EOS, GREEDY, Answers, Told, core_of, make_requests

from teachvllm import LLM
from teachvllm.executor import multiproc_executor
from teachvllm.executor.executor_base import EngineDeadError
from teachvllm.executor.multiproc_executor import PACKAGE_ROOT

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "device": "cpu",
    "block_size": 4,
}
SPLITS = [
    (1, 1, True),
    (2, 1, False),
    (2, 1, True),
    (1, 2, False),
    (2, 2, False),
    (4, 1, False),
]  # ranks, stages, look-ahead


def answer(llm: LLM) -> Answers:
    "Half of the requests come at once, the others one a step."
    requests = make_requests()
    engine = llm.llm_engine
    told = Told(requests)
    todo = list(requests)
    engine.processor.eos_token_ids = EOS
    while todo or engine.has_unfinished_requests():
        for name in todo[: len(requests) // 2 if len(todo) == len(requests) else 1]:
            engine.add_request(name, *requests[todo.pop(0)])
        told.take(engine.step())
    return told.answers


def check_nothing_left(llm: LLM) -> None:
    core = core_of(llm)
    for _ in range(2 * len(core.schedulers)):  # a step tells the workers which sequences ended last
        assert not llm.llm_engine.step()
    for scheduler in core.schedulers:
        manager = scheduler.block_manager
        manager.check_integrity()
        assert manager.get_num_free_gpu_blocks() == manager.num_gpu_blocks and not scheduler.seqs
    assert not core.in_flight


@pytest.fixture(scope="module")
def expected(folder: str) -> Iterator[Answers]:
    with LLM(folder, num_gpu_blocks_override=400, **OPTIONS) as llm:
        yield answer(llm)


@pytest.mark.parametrize("tp, pp, ahead", SPLITS)
def test_the_tokens_of_one_worker(
    folder: str,
    expected: Answers,
    tp: int,
    pp: int,
    ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forks, beams and all kinds of sampling; with a pool so small that requests are preempted,
    swapped and computed again. Four workers are new Pythons, as outside of tests.
    """
    if tp * pp == 4:
        monkeypatch.setattr(multiproc_executor, "subprocess", subprocess)
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "async_scheduling": ahead}
    more = {
        "swap_space": 0.001,
        "max_num_seqs": 12,
        "distributed_executor_backend": "mp",
        "num_gpu_blocks_override": 18 * pp,
    }
    with LLM(folder, **OPTIONS, **sizes, **more) as llm:
        assert len(llm.collective_rpc("get_kv_cache_spec")) == tp * pp
        for _ in range(2):  # the second time with prompts that are found in the prefix cache
            assert answer(llm) == expected
            check_nothing_left(llm)
        metrics = llm.get_metrics()
        assert (
            metrics["num_preemptions"] > 0
            and metrics["num_cow_copies"] > 0
            and metrics["prefix_cache_hits"] > 0
        )
        left = llm.collective_rpc(lambda worker: len(worker.model_runner.input_batch.slot_of))
        assert left == [0] * (tp * pp)


def test_a_failed_step_ends_the_requests_that_ran(folder: str, expected: Answers) -> None:
    "All workers fail alike, are reset, and go on."

    def spoil(worker: Any) -> None:
        def fail(*_: Any) -> None:
            hook.remove()
            raise ZeroDivisionError("spoilt")

        hook = worker.model_runner.model.register_forward_pre_hook(fail)

    with LLM(folder, num_gpu_blocks_override=100, tensor_parallel_size=2, **OPTIONS) as llm:
        llm.llm_engine.add_request("a", *make_requests()["greedy"])
        llm.llm_engine.step()
        llm.collective_rpc(spoil)
        with pytest.raises(ZeroDivisionError, match="spoilt"):
            llm.llm_engine.step()
        [output] = llm.llm_engine.step()
        assert (
            output.outputs[0].finish_reason == "error" and "spoilt" in output.outputs[0].stop_reason
        )
        assert answer(llm) == expected
        check_nothing_left(llm)


@pytest.mark.parametrize("stage, where", [(1, "submit"), (0, "submit"), (1, "sample")])
def test_one_stage_fails(folder: str, expected: Answers, stage: int, where: str) -> None:
    """Hidden states that were on their way are not taken for the next step's; or no stage can be
    reset, and all says so.
    """

    def spoil(worker: Any) -> None:
        owner = worker if where == "submit" else worker.model_runner
        call = getattr(owner, where)

        def fail(*args: Any) -> Any:
            setattr(owner, where, call)
            raise ZeroDivisionError("spoilt")

        if worker.rank == stage:
            setattr(owner, where, fail)

    with LLM(folder, num_gpu_blocks_override=200, pipeline_parallel_size=2, **OPTIONS) as llm:
        llm.generate([[1, 2, 3], [7]], GREEDY, use_tqdm=False)
        llm.collective_rpc(spoil)
        if stage == 0:  # the other one waits for what never comes
            core_of(llm).executor.reset_timeout = 2.0
            with pytest.raises((ZeroDivisionError, EngineDeadError)):
                llm.generate([[4, 5, 6], [8]], GREEDY, use_tqdm=False)
            with pytest.raises(EngineDeadError, match="spoilt"):
                llm.generate([[4, 5, 6]], GREEDY, use_tqdm=False)
        else:
            with pytest.raises(ZeroDivisionError):
                llm.generate([[4, 5, 6], [8]], GREEDY, use_tqdm=False)
            assert answer(llm) == expected
            check_nothing_left(llm)


def test_no_step_takes_what_was_sent_for_another(folder: str, expected: Answers) -> None:
    """Two batches are in the pipeline when the last stage fails at the first. It has not fetched
    that one's hidden states; the second batch's come behind them.
    """
    prompts = [list(range(1, 60)), [8]]

    def spoil(worker: Any) -> None:
        if worker.rank == 0:
            return
        submit, model = worker.submit, worker.model_runner.model
        worker.seen = []

        def fail(out: Any) -> None:
            worker.submit = submit
            time.sleep(0.5)  # the second batch is on its way
            raise ZeroDivisionError("spoilt")

        worker.submit = fail
        model.register_forward_pre_hook(
            lambda _, args: worker.seen.append((len(args[0]), len(args[1].hidden_states)))
        )

    with LLM(folder, num_gpu_blocks_override=200, pipeline_parallel_size=2, **OPTIONS) as llm:
        llm.generate(prompts, GREEDY, use_tqdm=False)
        llm.collective_rpc(spoil)
        with pytest.raises(ZeroDivisionError):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        assert answer(llm) == expected
        _, seen = llm.collective_rpc(lambda worker: getattr(worker, "seen", None))
        assert seen and all(rows == sent for rows, sent in seen), seen
        check_nothing_left(llm)


def test_a_pipeline_sleeps(folder: str, expected: Answers) -> None:
    "The last tokens of what ended before are not sent to workers that have forgotten it."
    with LLM(folder, num_gpu_blocks_override=200, pipeline_parallel_size=2, **OPTIONS) as llm:
        llm.generate([[1, 2, 3], [7]], GREEDY, use_tqdm=False)
        llm.sleep()
        llm.wake_up()
        assert answer(llm) == expected


def test_ctrl_c_in_a_long_step(folder: str, expected: Answers, tmp_path: Path) -> None:
    """It is taken while the engine waits for the workers; they finish the step, and the engine goes
    on.
    """
    go = tmp_path / "go"

    def be_slow(worker: Any) -> None:
        submit = worker.submit

        def slow(out: Any) -> None:
            worker.submit = submit
            wait_for(str(go))
            submit(out)

        worker.submit = slow

    with LLM(folder, num_gpu_blocks_override=200, tensor_parallel_size=2, **OPTIONS) as llm:
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        llm.collective_rpc(be_slow)
        llm.llm_engine.add_request("a", [1, 2, 3], GREEDY)

        def press() -> None:
            wait_until(lambda: bool(core_of(llm).in_flight))
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        thread = threading.Thread(target=press)
        thread.start()
        with (
            pytest.raises(KeyboardInterrupt),
            patch.object(core_of(llm), "_recover", lambda message: None),
        ):
            llm.llm_engine.step()
        thread.join()
        [call] = core_of(llm).executor.group.calls.values()
        assert len(core_of(llm).in_flight) == 1 and not call.answers, (
            "it was held until the step was over"
        )
        go.touch()
        core_of(llm)._recover("KeyboardInterrupt")
        [output] = llm.llm_engine.step()
        assert (
            output.outputs[0].finish_reason == "error"
            and "KeyboardInterrupt" in output.outputs[0].stop_reason
        )
        assert answer(llm) == expected
        check_nothing_left(llm)


def test_more_gpus_than_there_are(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from teachvllm.executor.multiproc_executor import MultiprocExecutor

    parallel = SimpleNamespace(world_size=4, tensor_parallel_size=2)
    scheduler = SimpleNamespace(async_scheduling=True)
    device = SimpleNamespace(device="cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"= 4 needs 4 GPUs, this machine has 2"):
        MultiprocExecutor(
            SimpleNamespace(
                parallel_config=parallel, scheduler_config=scheduler, device_config=device
            )
        )  # type: ignore[arg-type]


def test_more_stages_than_layers_is_said(folder: str) -> None:
    with pytest.raises(ValueError, match=r"pipeline_parallel_size=4.*3 layers"):
        LLM(folder, num_gpu_blocks_override=16, pipeline_parallel_size=4, **OPTIONS)


def test_kv_heads_are_repeated(tmp_path: Path) -> None:
    "Two ranks share the one KV head of a model whose vocabulary does not divide either."
    from transformers import LlamaConfig

    from teachvllm import SamplingParams

    make_tiny("llama", tmp_path)
    config = LlamaConfig.from_pretrained(tmp_path)
    config.num_key_value_heads = 1
    config.vocab_size = VOCAB - 1
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=20, ignore_eos=True)
    answers = []
    for size in (1, 2):
        with LLM(
            str(tmp_path), num_gpu_blocks_override=64, tensor_parallel_size=size, **OPTIONS
        ) as llm:
            outputs = llm.generate([[1, 2, 3], [5] * 20], params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


# Faults of real workers. After each nothing is left, and the next engine starts.


def processes() -> dict[int, int]:
    "The processes of this machine that run, and the parent of each."
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            parents |= {int(path.name): int(parent)} if state != "Z" else {}
    return parents


def listening(pids: Iterable[int]) -> set[str]:
    "The sockets on which processes listen for TCP connections, by their inodes."
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    found = {f"socket:[{line[9]}]" for line in lines if line[3] == "0A"}
    held = set()
    for pid in pids:
        with suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    held.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found & held


def traces() -> set[str]:
    "What an engine of this process could leave: processes, ports."
    if sys.platform != "linux":
        return set()
    children = {pid for pid, parent in processes().items() if parent == os.getpid()}
    children -= ForkedPopen.server_pids()
    return {f"process {pid}" for pid in children} | listening([os.getpid()])


def make_dying_worker(phase: str) -> type:
    """A worker whose rank 1 is killed when it comes to `phase`. Made in a function, so it travels
    by value.
    """
    from teachvllm.worker.worker import Worker

    class DyingWorker(Worker):
        def __getattribute__(self, name: str) -> Any:
            if name == phase and object.__getattribute__(self, "rank") == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getattribute__(name)

    return DyingWorker


def make_fault(where: str) -> Callable[[Any], None]:
    """For `collective_rpc`: let rank 1 be killed in it, or in a step; or hang there. Rank 0 waits
    for it in an all_reduce.
    """

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def spoil(worker: Any) -> None:
        tp = worker.parallel.tp
        if where == "collective_rpc":
            die() if worker.rank == 1 else tp.all_reduce(torch.ones(1))
        elif worker.rank == 1 and where == "all_reduce":
            shared = tp.device_communicator
            owner, name = (shared, "_wait") if shared else (tp, "all_reduce")
            wait = getattr(owner, name)
            calls = itertools.count()
            setattr(owner, name, lambda *args: wait(*args) if next(calls) < 2 else die())
        elif worker.rank == 1:
            worker.submit = die if where == "submit" else lambda out: time.sleep(3600)

    return spoil


PAIRS = [
    ("init_device", "submit"),
    ("load_model", "all_reduce"),
    ("determine_num_available_blocks", "collective_rpc"),
    ("initialize_cache", "hang"),
]


@pytest.mark.parametrize("phase, where", PAIRS)
def test_faults(folder: str, expected: Answers, phase: str, where: str) -> None:
    """A worker is killed while it starts; the next engine starts and serves, until its worker is
    killed or hangs in `where`.

    The other worker waits for it in shared memory. After the last fault the tests below start
    engines.
    """
    killed = r"worker rank=1 \(process \d+\) was killed by SIGKILL"
    options = {
        **OPTIONS,
        "tensor_parallel_size": 2,
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
    }
    before = traces()
    with pytest.raises(EngineDeadError, match=killed):
        LLM(
            folder, worker_cls=make_dying_worker(phase), **options
        )  # it is not said how many blocks: they are found out
    wait_until(lambda: traces() <= before)

    with LLM(folder, num_gpu_blocks_override=100, **options) as llm:
        [output] = llm.generate([make_requests()["greedy"][0]], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected["greedy"][0][0]
        executor = core_of(llm).executor
        fault = make_fault(where)
        workers = executor.group.workers
        assert not named_memory([os.getpid(), *(worker.process.pid for worker in workers)])
        assert {
            f"process {worker.process.pid}" for worker in workers
        } <= traces() or sys.platform != "linux"
        if where == "hang":
            executor.step_timeout = executor.reset_timeout = 0.5
        if where == "collective_rpc":
            with pytest.raises(EngineDeadError, match=killed):
                llm.collective_rpc(fault)
        else:
            llm.collective_rpc(fault)
            # which waits for rank 1
            hangs = TimeoutError, "execute_model: no answer from worker rank=0"
            error, says = hangs if where == "hang" else (EngineDeadError, killed)
            with pytest.raises(error, match=says):
                llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        says = "could not be reset .TimeoutError" if where == "hang" else killed
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=says):
                llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        wait_until(lambda: traces() <= before)  # before it is closed
        assert all(worker.process.returncode is not None for worker in workers)
    wait_until(lambda: traces() <= before)


SCRIPT = """
    import sys
    from teachvllm import LLM, SamplingParams

    options = {"dtype": "float32", "skip_tokenizer_init": True, "device": "cpu", "block_size": 4}
    llm = LLM(sys.argv[1], num_gpu_blocks_override=64, tensor_parallel_size=2, **options)
    while True:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=40, ignore_eos=True), use_tqdm=False)
        print("served", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_parent_is_killed(folder: str, tmp_path: Path) -> None:
    "While it serves with two workers: they end, and with them all that they held."
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    env = {**os.environ, "PYTHONPATH": PACKAGE_ROOT}
    script = subprocess.Popen(
        [sys.executable, str(path), folder], stdout=subprocess.PIPE, text=True, env=env
    )
    assert script.stdout and [script.stdout.readline() for _ in range(2)] == ["served\n"] * 2
    workers = [pid for pid, parent in processes().items() if parent == script.pid]
    sockets = listening([script.pid, *workers])
    assert len(workers) == 2 and sockets, "two workers, and at least the address at which they met"
    assert not named_memory([script.pid, *workers])
    script.kill()
    assert script.wait(SOON) == -signal.SIGKILL
    script.stdout.close()
    wait_until(lambda: not any(map(is_alive, workers)))
    assert not sockets & listening(processes())


def make_mistral(path: Path) -> None:
    "A tiny model with a window, whose heads and layers can be cut in two."
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        sliding_window=9,
    )
    MistralForCausalLM(config).save_pretrained(path)


def test_sharded_state_of_a_windowed_model(tmp_path: Path) -> None:
    """Four workers write their parts, four others read them, and say what one worker says. With a
    part that is damaged the engine does not start, says which file it is, and leaves nothing.
    """
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    make_mistral(whole)
    small = {**OPTIONS, "num_gpu_blocks_override": 96}
    with LLM(str(whole), **small) as llm:
        alone = answer(llm)
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with LLM(str(whole), **small, **sizes) as llm:
        llm.collective_rpc("save_sharded_state", args=(str(parts),))
    with LLM(str(parts), load_format="sharded_state", **small, **sizes) as llm:
        assert answer(llm) == alone
        check_nothing_left(llm)
    damaged = sorted(parts.glob("*.safetensors"))[-1]
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    with pytest.raises(Exception, match=damaged.name) as failed:
        LLM(str(parts), load_format="sharded_state", **small, **sizes)
    assert "rank=" in str(failed.value.__cause__)
