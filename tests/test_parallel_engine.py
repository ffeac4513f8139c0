"""One engine over several worker processes: the tokens that one worker gives, for requests of all kinds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import VOCAB, make_tiny
from test_async_scheduling import EOS, Answers, Told, core_of, make_requests

from teachvllm import LLM

OPTIONS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "device": "cpu", "block_size": 4}
SPLITS = [(2, 1), (1, 2), (2, 2), (4, 1)]  # tensor-parallel ranks, pipeline stages


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


@pytest.mark.parametrize("tp, pp", SPLITS)
def test_the_tokens_of_one_worker(folder: str, expected: Answers, tp: int, pp: int) -> None:
    "Forks, beams and all kinds of sampling; with a pool so small that requests are preempted, swapped and computed again."
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    with LLM(folder, num_gpu_blocks_override=18, swap_space=0.001, max_num_seqs=12, **OPTIONS, **sizes) as llm:
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
