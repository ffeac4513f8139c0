"""One engine over several worker processes: the tokens that one worker gives, for requests of all kinds."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from fake_worker import is_alive, wait_until
from helpers import VOCAB, make_tiny
from test_async_scheduling import EOS, GREEDY, Answers, Told, core_of, make_requests

from teachvllm import LLM
from teachvllm.executor.executor_base import EngineDeadError

OPTIONS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "device": "cpu", "block_size": 4}
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
    engine, told, todo = llm.llm_engine, Told(requests), list(requests)
    engine.eos_token_ids = EOS
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
def test_the_tokens_of_one_worker(folder: str, expected: Answers, tp: int, pp: int, ahead: bool) -> None:
    "Forks, beams and all kinds of sampling; with a pool so small that requests are preempted, swapped and computed again."
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
        assert metrics["num_preemptions"] > 0 and metrics["num_cow_copies"] > 0 and metrics["prefix_cache_hits"] > 0
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
        assert output.outputs[0].finish_reason == "error" and "spoilt" in output.outputs[0].stop_reason
        assert answer(llm) == expected
        check_nothing_left(llm)


@pytest.mark.parametrize("stage, where", [(1, "submit"), (0, "submit"), (1, "sample")])
def test_one_stage_fails(folder: str, expected: Answers, stage: int, where: str) -> None:
    "Hidden states that were on their way are not taken for the next step's; or no stage can be reset, and all says so."

    def spoil(worker: Any) -> None:
        owner = worker if where == "submit" else worker.model_runner
        call = getattr(owner, where)

        def fail(*args: Any) -> Any:
            setattr(owner, where, call)
            raise ZeroDivisionError("spoilt")

        if worker.rank == stage:
            setattr(owner, where, fail)

    with LLM(folder, num_gpu_blocks_override=200, pipeline_parallel_size=2, **OPTIONS) as llm:
        core_of(llm).executor.reset_timeout = 2.0
        llm.generate([[1, 2, 3], [7]], GREEDY, use_tqdm=False)
        llm.collective_rpc(spoil)
        if stage == 0:  # the other one waits for what never comes
            with pytest.raises((ZeroDivisionError, EngineDeadError)):
                llm.generate([[4, 5, 6], [8]], GREEDY, use_tqdm=False)
            with pytest.raises(EngineDeadError, match="spoilt"):
                llm.generate([[4, 5, 6]], GREEDY, use_tqdm=False)
        else:
            with pytest.raises(ZeroDivisionError):
                llm.generate([[4, 5, 6], [8]], GREEDY, use_tqdm=False)
            assert answer(llm) == expected
            check_nothing_left(llm)


def test_ctrl_c_in_a_long_step(folder: str, expected: Answers) -> None:
    "It is taken while the engine waits for the workers; they finish the step, and the engine goes on."

    def be_slow(worker: Any) -> None:
        submit = worker.submit

        def slow(out: Any) -> None:
            worker.submit = submit
            time.sleep(4)
            submit(out)

        worker.submit = slow

    with LLM(folder, num_gpu_blocks_override=200, tensor_parallel_size=2, **OPTIONS) as llm:
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        llm.collective_rpc(be_slow)
        llm.llm_engine.add_request("a", [1, 2, 3], GREEDY)
        waits = []

        def press() -> None:
            time.sleep(1)
            waits.append(len(core_of(llm).in_flight))
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        thread = threading.Thread(target=press)
        thread.start()
        with pytest.raises(KeyboardInterrupt), patch.object(core_of(llm), "_recover", lambda message: None):
            llm.llm_engine.step()
        thread.join()
        [call] = core_of(llm).executor.group.calls.values()
        assert waits == [1] and not call.answers, "it was held until the step was over"
        core_of(llm)._recover("KeyboardInterrupt")
        [output] = llm.llm_engine.step()
        assert output.outputs[0].finish_reason == "error" and "KeyboardInterrupt" in output.outputs[0].stop_reason
        assert answer(llm) == expected
        check_nothing_left(llm)


def test_more_gpus_than_there_are(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from teachvllm.executor.multiproc_executor import MultiprocExecutor

    parallel = SimpleNamespace(world_size=4, tensor_parallel_size=2)
    scheduler = SimpleNamespace(async_scheduling=True)
    device = SimpleNamespace(device="cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"= 4 needs 4 GPUs, this machine has 2"):
        MultiprocExecutor(SimpleNamespace(parallel_config=parallel, scheduler_config=scheduler, device_config=device))  # type: ignore[arg-type]


def test_more_stages_than_layers_is_said(folder: str) -> None:
    with pytest.raises(ValueError, match=r"pipeline_parallel_size=4.*3 layers"):
        LLM(folder, num_gpu_blocks_override=16, pipeline_parallel_size=4, **OPTIONS)


def test_kv_heads_are_repeated(tmp_path: Path) -> None:
    "Two ranks share the one KV head of a model whose vocabulary does not divide either."
    from transformers import LlamaConfig

    from teachvllm import SamplingParams

    make_tiny("llama", tmp_path)
    config = LlamaConfig.from_pretrained(tmp_path)
    config.num_key_value_heads, config.vocab_size = 1, VOCAB - 1
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=20, ignore_eos=True)
    answers = []
    for size in (1, 2):
        with LLM(str(tmp_path), num_gpu_blocks_override=64, tensor_parallel_size=size, **OPTIONS) as llm:
            outputs = llm.generate([[1, 2, 3], [5] * 20], params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


# Faults of real workers


def make_dying_worker(phase: str) -> type:
    "A worker whose rank 1 is killed when it comes to `phase`. Made in a function, so it travels by value."
    from teachvllm.worker.worker import Worker

    class DyingWorker(Worker):
        def __getattribute__(self, name: str) -> Any:
            if name == phase and object.__getattribute__(self, "rank") == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getattribute__(name)

    return DyingWorker


@pytest.mark.parametrize("phase", ["init_device", "initialize_cache", "submit"])
def test_a_worker_is_killed(folder: str, phase: str) -> None:
    "In the middle of the start, at its end, or in a step, while the other one waits for it in shared memory."
    before = {*Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()
    workers: list[int] = []
    with pytest.raises(EngineDeadError, match=r"worker rank=1 \(process \d+\) was killed by SIGKILL") as died:
        with LLM(
            folder, num_gpu_blocks_override=64, tensor_parallel_size=2, worker_cls=make_dying_worker(phase), **OPTIONS
        ) as llm:
            assert phase == "submit", "it should not have started"
            executor = core_of(llm).executor
            workers = [worker.process.pid for worker in executor.group.workers]
            began = time.monotonic()
            llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    if phase == "submit":
        assert time.monotonic() - began < 30
    pid = int(str(died.value).partition("process ")[2].partition(")")[0])
    wait_until(lambda: not any(map(is_alive, [pid, *workers])))
    assert not before or {*Path("/dev/shm").iterdir()} <= before


def make_mistral(path: Path) -> None:
    "A tiny model with a window, whose heads and layers can be cut in two."
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, sliding_window=9,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(path)


def test_sharded_state_of_a_windowed_model(tmp_path: Path) -> None:
    """Four workers write their parts, four others read them, and say what one worker says. With a part that is damaged the engine
    does not start, says which file it is, and leaves nothing."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
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
