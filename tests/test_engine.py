"""The engine as its users meet it: what it is given, what it refuses, and that nothing stops it or
is left behind.
"""

import gc
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import VOCAB, make_tiny, random_prompts, runner_of

from teachvllm import LLM, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from teachvllm.executor.executor_base import EngineClosedError, EngineDeadError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def tiny(folder: str, **options: Any) -> LLM:
    defaults = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "num_gpu_blocks_override": 64,
        "swap_space": 0.001,
    }
    return LLM(folder, **{**defaults, **options})


def texts(llm: LLM, prompts: list, params: Any = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def core_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core


def all_blocks_free(llm: LLM) -> bool:
    manager = core_of(llm).scheduler.block_manager
    manager.check_integrity()
    return manager.get_num_free_gpu_blocks() == manager.num_gpu_blocks


# What is refused, and that the engine goes on


@pytest.mark.parametrize(
    "options, says",
    [
        ({"max_model_length": 64}, "max_model_len"),
        ({"dtype": "float8"}, "dtype"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 257}, "block_size"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        (
            {"gpu_memory_utilization": 1e-6, "num_gpu_blocks_override": None},
            "gpu_memory_utilization",
        ),
        ({"kv_cache_memory_bytes": 1000, "num_gpu_blocks_override": None}, "kv_cache_memory_bytes"),
        ({"max_model_len": 100_000}, "max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 8}, "max_num_batched_tokens"),
        ({"load_format": "floppy"}, "load_format"),
        ({"generation_config": "mine"}, "generation_config"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size"),
        ({"swap_space": 1e6}, "swap_space"),
        ({"distributed_executor_backend": "mpi"}, "distributed_executor_backend"),
        (
            {"distributed_executor_backend": "uni", "tensor_parallel_size": 2},
            "distributed_executor_backend",
        ),
        ({"quantization": "awq"}, "quantization"),
        ({"attention_backend": "flash"}, "attention_backend"),
        ({"scheduler_cls": "nowhere.Scheduler"}, "nowhere"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_refused_arguments(folder: str, options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tiny(folder, **options)


def test_unknown_argument_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean `gpu_memory_utilization`"):
        EngineArgs(gpu_memory_utilisation=0.5)
    with pytest.raises(ValueError, match="did you mean `temperature`"):
        SamplingParams(temprature=0.5)


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing.gguf", "nobody/no-such-model"])
def test_missing_model(model: str) -> None:
    with pytest.raises(ValueError, match="no-such|does not exist"):
        LLM(model)


def test_unsupported_architecture_lists_the_supported(tmp_path: Path) -> None:
    from transformers import GPTJConfig

    GPTJConfig(architectures=["GPTJForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="GPTJForCausalLM.*LlamaForCausalLM"):
        LLM(str(tmp_path), skip_tokenizer_init=True, load_format="dummy", num_gpu_blocks_override=4)


@pytest.mark.parametrize(
    "prompt, params, says",
    [
        ([], GREEDY, "empty"),
        ([1] * 256, GREEDY, "max_model_len"),
        ([1] * 200, GREEDY, "pool"),
        ([VOCAB], GREEDY, "vocabulary"),
        ([-1], GREEDY, "vocabulary"),
        ("text", GREEDY, "skip_tokenizer_init"),
        ({"text": "?"}, GREEDY, "prompt_token_ids"),
        ([1, 2], SamplingParams(stop_token_ids=[VOCAB]), "vocabulary"),
    ],
)
def test_refused_prompts(folder: str, prompt: Any, params: SamplingParams, says: str) -> None:
    "The one is refused when it is added; the other finishes, and so does the next."
    with tiny(folder, num_gpu_blocks_override=12) as llm:
        expected = texts(llm, [[5, 6, 7]])
        engine = llm.llm_engine
        engine.add_request("good", [5, 6, 7], GREEDY)
        engine.step()
        with pytest.raises(ValueError, match=says):
            engine.add_request("bad", prompt, params)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += [output for output in engine.step() if output.finished]
        assert [output.outputs[0].token_ids for output in outputs] == expected
        with pytest.raises(ValueError, match=says):
            llm.generate([{"prompt_token_ids": [5]}, prompt], params, use_tqdm=False)
        assert texts(llm, [[5, 6, 7]]) == expected
        assert all_blocks_free(llm)


def test_wrong_number_of_params(folder: str) -> None:
    with tiny(folder) as llm, pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        llm.generate([[1], [2], [3]], [GREEDY, GREEDY])


@pytest.mark.parametrize("damage", ["cut", "garbage", "gone", "incomplete"])
def test_damaged_weights(tmp_path: Path, damage: str) -> None:
    make_tiny("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:5000])
    elif damage == "garbage":
        path.write_bytes(b"not weights at all" * 100)
    elif damage == "gone":
        path.unlink()
    else:
        from safetensors.torch import load_file, save_file

        tensors = load_file(path)
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match="corrupt|cut short|no weights|lacks"):
        tiny(str(tmp_path))


# Weights in every format


@pytest.mark.parametrize("form", ["sharded", "bin", "dummy"])
def test_formats(tmp_path: Path, folder: str, form: str) -> None:
    with tiny(folder) as llm:
        expected = texts(llm, [[5, 6, 7]])
    if form == "sharded":
        make_tiny("llama", tmp_path, max_shard_size="100KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
        options: dict = {}
    elif form == "bin":
        model = make_tiny("llama", tmp_path)
        (tmp_path / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        options = {"load_format": "pt"}
    else:
        (tmp_path / "config.json").write_text((Path(folder) / "config.json").read_text())
        options = {"load_format": "dummy"}
    with tiny(str(tmp_path), **options) as llm:
        got = texts(llm, [[5, 6, 7]])
        assert len(got[0]) == 8
        assert (got == expected) == (form != "dummy")


# Requests


def test_prompt_forms_and_order(folder: str) -> None:
    prompts = random_prompts(5)
    with tiny(folder) as llm:
        one_by_one = [texts(llm, prompt)[0] for prompt in prompts]
        assert texts(llm, prompts) == one_by_one
        assert texts(llm, [{"prompt_token_ids": p} for p in prompts]) == one_by_one
        many = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (5, 1, 4, 2, 3)
        ]
        assert [len(t) for t in texts(llm, prompts, many)] == [5, 1, 4, 2, 3]
        assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_output_fields(folder: str) -> None:
    with tiny(folder) as llm:
        output = llm.generate([1, 2, 3], GREEDY, use_tqdm=False)[0]
    assert output.finished and output.prompt is None and output.prompt_token_ids == [1, 2, 3]
    assert output.outputs[0].finish_reason == "length" and output.outputs[0].finished()
    assert (
        output.num_cached_tokens == 0
        and output.metrics.finished_time >= output.metrics.first_token_time
    )
    assert "RequestOutput" in output._repr_html_()


def test_seeds_do_not_see_their_neighbours(folder: str) -> None:
    """A seeded request draws the same tokens alone, in a batch, in another order and when it is
    preempted.
    """
    prompts = random_prompts(6)
    params = [
        SamplingParams(temperature=1, top_p=0.9, seed=i, max_tokens=20, ignore_eos=True)
        for i in range(6)
    ]
    with tiny(folder) as llm:
        together = texts(llm, prompts, params)
        assert [texts(llm, [p], [q])[0] for p, q in zip(prompts, params, strict=True)] == together
        assert texts(llm, prompts[::-1], params[::-1]) == together[::-1]
    with tiny(folder, num_gpu_blocks_override=26, block_size=4) as llm, llm.record() as trace:
        assert texts(llm, prompts, params) == together
    assert any(step.preempted for step in trace.steps)


def test_unseeded_engines_repeat_with_their_seed(folder: str) -> None:
    params = SamplingParams(temperature=1, max_tokens=16, ignore_eos=True)
    runs = []
    for seed in (0, 0, 1):
        with tiny(folder, seed=seed) as llm:
            runs.append(texts(llm, [[1, 2, 3]] * 3, params))
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(t) for t in runs[0]}) == 3, "requests without a seed must not share one"


def test_max_model_len_is_the_boundary(folder: str) -> None:
    with tiny(folder, max_model_len=32) as llm:
        unlimited = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        assert [len(t) for t in texts(llm, [[1] * 31, [1] * 30, [1]], unlimited)] == [1, 2, 31]


def test_alone_in_a_full_pool_ends_with_length(folder: str) -> None:
    "No other request will ever free a block: it must end, not hang."
    with tiny(folder, num_gpu_blocks_override=2) as llm:
        output = llm.generate(
            [1] * 20, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), use_tqdm=False
        )[0]
        assert (
            output.outputs[0].finish_reason == "length"
            and len(output.outputs[0].token_ids) == 2 * 16 - 20 + 1
        )
        assert all_blocks_free(llm)


def test_min_tokens_and_stop_token_ids(folder: str) -> None:
    with tiny(folder) as llm:
        free = texts(
            llm, [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        )[0]
        stop = free[3]
        params = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop]
        )
        output = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0]
        assert output.token_ids == free[: free.index(stop) + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        later = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop], min_tokens=10
        )
        output = llm.generate([5, 6, 7], later, use_tqdm=False)[0].outputs[0]
        assert len(output.token_ids) >= 10 and stop not in output.token_ids[:10]


def test_delta_is_cumulative_in_pieces(folder: str) -> None:
    with tiny(folder) as llm:
        engine = llm.llm_engine
        pieces = []
        last = []
        for name, kind in (
            ("delta", RequestOutputKind.DELTA),
            ("all", RequestOutputKind.CUMULATIVE),
        ):
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, output_kind=kind)
            engine.add_request(name, [5, 6, 7], params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.request_id == "delta":
                    pieces += output.outputs[0].token_ids
                else:
                    last = output.outputs[0].token_ids
    assert pieces == last and len(last) == 8


# Stopping, failing, leaving


def test_abort_in_every_state(folder: str) -> None:
    with tiny(folder, max_num_seqs=2) as llm:
        engine = llm.llm_engine
        for i in range(4):
            engine.add_request(str(i), [i + 1] * 20, GREEDY)
        engine.abort_request("3")  # waiting, never scheduled
        engine.step()
        engine.abort_request(["0", "2", "unknown"])  # running, and waiting
        finished = []
        while engine.has_unfinished_requests():
            finished += [output.request_id for output in engine.step() if output.finished]
        assert finished == ["1"] and engine.get_num_unfinished_requests() == 0
        assert all_blocks_free(llm)


@contextmanager
def failing(
    owner: Any, name: str, error: BaseException, after: int = 0, calls: Iterator[int] | None = None
) -> Iterator[None]:
    "Inside, one call of a method raises `error`, after `after` that do not; `calls` counts them."
    method = getattr(owner, name)
    calls = calls or count()

    def maybe(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == after:
            raise error
        return method(*args, **kwargs)

    with patch.object(owner, name, maybe):
        yield


@contextmanager
def failing_model(llm: LLM, error: BaseException, after: int = 0) -> Iterator[None]:
    """Inside, the model of one step raises `error`, after `after` that do not: run eagerly, or
    recorded, as decode steps are on a GPU (a CUDA graph) and with compiled kernels on a CPU.
    """
    runner, calls = runner_of(llm), count()
    with ExitStack() as stack:
        stack.enter_context(failing(runner, "forward", error, after, calls))
        if runner.graphs:
            stack.enter_context(failing(runner.graphs, "run", error, after, calls))
        yield
        assert next(calls) > after, "no step failed"


@pytest.mark.parametrize("error", [RuntimeError("the device fell over"), KeyboardInterrupt()])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_failed_step_leaves_a_usable_engine(
    folder: str, error: BaseException, after: int
) -> None:
    prompts = random_prompts(4)
    with tiny(folder) as llm:
        expected = texts(llm, prompts)
        with failing_model(llm, error, after), pytest.raises(type(error)):
            texts(llm, prompts)
        assert all_blocks_free(llm) and not llm.llm_engine.has_unfinished_requests()
        assert texts(llm, prompts) == expected


@pytest.mark.parametrize(
    "error, where, asynchronous",
    [
        (error, where, asynchronous)
        for asynchronous in (False, True)
        for where in ("schedule", "model", "update_from_output")
        for error in (RuntimeError("the device fell over"), KeyboardInterrupt())
        # Ctrl-C never comes in a thread:
        if not (asynchronous and where == "model" and isinstance(error, KeyboardInterrupt))
    ],
)
def test_a_failed_step_ends_the_requests_that_ran(
    folder: str, error: BaseException, where: str, asynchronous: bool
) -> None:
    """The next call says so, with the tokens they had; requests that waited answer as if nothing
    had been.
    """
    prompts = random_prompts(4)
    with tiny(folder, max_num_seqs=2, async_scheduling=asynchronous) as llm:
        expected = texts(llm, prompts)
        engine = llm.llm_engine
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, GREEDY)
        known: dict[str, Any] = {}
        for _ in range(3):
            known |= {output.request_id: output for output in engine.step()}
        in_model = where == "model"
        with (
            failing_model(llm, error) if in_model else failing(core_of(llm).scheduler, where, error)
        ):
            with pytest.raises(type(error)):
                # a worker in a thread may have done the step before: then the next one fails
                for _ in range(2):
                    known |= {output.request_id: output for output in engine.step()}
        assert engine.get_num_unfinished_requests() == 4, "how they ended was not reported yet"
        ended = {output.request_id: output for output in engine.step()}
        for name in "01":
            output = ended[name].outputs[0]
            assert ended[name].finished and output.finish_reason == "error"
            assert type(error).__name__ in output.stop_reason
            tokens = known[name].outputs[0].token_ids
            assert (
                output.token_ids[: len(tokens)] == tokens
                and expected[int(name)][: len(tokens)] == tokens
            )
        while engine.has_unfinished_requests():
            ended |= {output.request_id: output for output in engine.step() if output.finished}
        assert [ended[name].outputs[0].token_ids for name in "23"] == expected[2:]
        assert all_blocks_free(llm) and texts(llm, prompts) == expected


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_preempted_request_survives_a_failed_step(folder: str, mode: str) -> None:
    "Only what ran ends with an error: a request that was preempted goes on where it was."
    prompts = [[3] * 30, [4] * 30]
    params = replace(GREEDY, max_tokens=24)
    with tiny(folder) as llm:
        expected = texts(llm, prompts, params)
    with tiny(folder, num_gpu_blocks_override=10, block_size=8, preemption_mode=mode) as llm:
        engine = llm.llm_engine
        outputs = []
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, params)
        while not llm.get_metrics()["num_preemptions"]:
            outputs += engine.step()
        with (
            failing_model(llm, RuntimeError("the device fell over")),
            pytest.raises(RuntimeError),
        ):
            for _ in range(2):  # a step ahead, on a GPU the default, has it a call later
                outputs += engine.step()
        while engine.has_unfinished_requests():
            outputs += engine.step()
        ended = {output.request_id: output.outputs[0] for output in outputs if output.finished}
        assert (
            ended["0"].finish_reason == "error" and "the device fell over" in ended["0"].stop_reason
        )
        assert ended["1"].token_ids == expected[1] and ended["1"].finish_reason == "length"
        assert all_blocks_free(llm) and texts(llm, prompts, params) == expected


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_engine_is_dead_when_the_workers_cannot_be_reset(
    folder: str, asynchronous: bool
) -> None:
    """What ran ended with an error, as always; every later call says why nothing runs any more. It
    can still be closed.
    """
    with tiny(folder, max_num_seqs=1, async_scheduling=asynchronous) as llm:
        engine = llm.llm_engine
        runner = runner_of(llm)
        engine.add_request("ran", [5, 6], GREEDY)
        engine.add_request("waited", [5, 6], GREEDY)
        engine.step()
        with (
            failing_model(llm, RuntimeError("a cable")),
            failing(runner, "reset", OSError("no device")),
        ):
            with pytest.raises(RuntimeError, match="a cable"):
                for _ in range(2):  # a worker in a thread may have done the step before
                    engine.step()
        for call in (
            engine.step,
            lambda: engine.add_request("next", [7], GREEDY),
            lambda: llm.generate([7], GREEDY, use_tqdm=False),
            lambda: llm.reset_prefix_cache(),
            lambda: llm.collective_rpc("get_kv_cache_spec"),
            lambda: llm.get_metrics(),
        ):
            engine.abort_request(["ran", "waited"] if call is not engine.step else [])
            with pytest.raises(EngineDeadError, match="a cable.*no device"):
                call()
        assert not engine.has_unfinished_requests()
    with tiny(folder) as llm:
        assert len(texts(llm, [[5, 6]])[0]) == 8


def test_logits_that_are_not_numbers(folder: str) -> None:
    """The request that they were computed for ends with an error that says so; its neighbours do
    not notice.
    """
    prompts = random_prompts(4)
    with tiny(folder) as llm:
        expected = texts(llm, prompts)
        model = runner_of(llm).model
        compute_logits = model.compute_logits
        calls = count()

        def spoilt(hidden: torch.Tensor) -> torch.Tensor:
            logits = compute_logits(hidden)
            logits[1 if next(calls) == 3 else []] = float("nan")
            return logits

        with patch.object(model, "compute_logits", spoilt):
            outputs = [
                output.outputs[0] for output in llm.generate(prompts, GREEDY, use_tqdm=False)
            ]
        assert [o.finish_reason for o in outputs] == ["length", "error", "length", "length"]
        assert "NaN" in outputs[1].stop_reason and outputs[1].token_ids == expected[1][:3]
        assert [o.token_ids for o in outputs if o is not outputs[1]] == [
            expected[i] for i in (0, 2, 3)
        ]
        assert all_blocks_free(llm) and texts(llm, prompts) == expected


def test_two_engines_in_one_process(folder: str) -> None:
    prompts = random_prompts(3)
    with tiny(folder) as a, tiny(folder, block_size=4) as b:
        assert texts(a, prompts) == texts(b, prompts) == texts(a, prompts)


def test_a_dropped_engine_is_collected(folder: str) -> None:
    llm = tiny(folder)
    texts(llm, [[1, 2, 3]])
    engine = weakref.ref(llm.llm_engine)
    del llm
    gc.collect()
    assert engine() is None


def test_closed_engine_says_so(folder: str) -> None:
    llm = tiny(folder)
    llm.close()
    llm.close()
    for call in (
        lambda: texts(llm, [[1, 2, 3]]),
        lambda: llm.get_metrics(),
        lambda: llm.llm_engine.get_metrics(),
        lambda: llm.reset_prefix_cache(),
        lambda: llm.llm_engine.step(),
    ):
        with pytest.raises(EngineClosedError):
            call()


@pytest.mark.parametrize(
    "call", [lambda engine: engine.get_metrics(), lambda engine: engine.set_tokenizer(None)]
)
def test_what_asks_the_core_waits_for_the_step(folder: str, call: Any) -> None:
    """Two threads must not read one socket: a call waits while another thread is in `step`, and
    does not wait for itself.
    """
    with tiny(folder) as llm:
        engine = llm.llm_engine
        with engine._lock:
            call(engine)
            thread = threading.Thread(target=call, args=(engine,))
            thread.start()
            thread.join(0.2)
            assert thread.is_alive(), "it waits"
        thread.join(60)
        assert not thread.is_alive()


def test_another_tokenizer_does_not_begin_the_seeds_again(folder: str) -> None:
    with tiny(folder) as llm:
        processor = llm.llm_engine.processor
        before = [processor(str(i), [5, 6], SamplingParams())[0].seed for i in range(3)]
        llm.llm_engine.set_tokenizer(None)
        processor = llm.llm_engine.processor
        after = [processor(str(i), [5, 6], SamplingParams())[0].seed for i in range(3)]
        assert len({*before, *after}) == 6


def test_memory_comes_back() -> None:
    """With the default model, in a process of its own: after `close` within 5 % of what it was
    before the engine.
    """
    code = """
import json
from teachvllm import LLM, SamplingParams
from teachvllm.worker.memory_profiling import process_memory, release_memory
def engine():
    with LLM(kv_cache_memory_bytes=1 << 29) as llm:
        llm.generate(["Hello, my name is"] * 8, SamplingParams(max_tokens=16), use_tqdm=False)
        return process_memory()
engine()  # the first one leaves Python's modules and the tokenizer behind
release_memory()
before = process_memory()
print(json.dumps([before, engine(), process_memory()]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    before, during, after = json.loads(done.stdout.splitlines()[-1])
    assert during > 1.3 * before, "the engine must have been seen"
    assert after < 1.05 * before, f"{before:,} bytes before, {after:,} after"


# The text side, on the default model


@pytest.fixture(scope="module")
def smol():
    with LLM(num_gpu_blocks_override=256, dtype="float32") as llm:
        yield llm


def test_chat_knows_paris(smol: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    output = smol.chat(question, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)[
        0
    ].outputs[0]
    assert "Paris" in output.text and output.finish_reason == "stop" and output.stop_reason is None
    assert "<|im_end|>" not in output.text


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(smol: LLM, include: bool) -> None:
    params = {"temperature": 0, "max_tokens": 40}
    free = (
        smol.generate("The capital of France is", SamplingParams(**params), use_tqdm=False)[0]
        .outputs[0]
        .text
    )
    stop = free[len(free) // 2 : len(free) // 2 + 4]
    stopping = SamplingParams(**params, stop=[stop], include_stop_str_in_output=include)
    output = smol.generate("The capital of France is", stopping, use_tqdm=False)[0].outputs[0]
    assert output.text == free[: free.index(stop) + len(stop) * include]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_a_stop_string_ends_one_sample_of_several(smol: LLM) -> None:
    "The core is told to end that one; the others go on, and no block is left."
    params = SamplingParams(n=4, seed=3, temperature=1, max_tokens=24, ignore_eos=True)
    free = [o.text for o in smol.generate("Once upon a time", params, use_tqdm=False)[0].outputs]
    stop = free[2][len(free[2]) // 3 :][:6]
    outputs = smol.generate("Once upon a time", replace(params, stop=[stop]), use_tqdm=False)[
        0
    ].outputs
    assert [o.text for o in outputs] == [text.partition(stop)[0] for text in free]
    reasons = [("stop", stop) if stop in text else ("length", None) for text in free]
    assert [(o.finish_reason, o.stop_reason) for o in outputs] == reasons and len(set(reasons)) == 2
    assert all_blocks_free(smol)


@pytest.mark.parametrize("stop", [None, [" the", "\n\n"]])
def test_streamed_text_is_the_whole_text(smol: LLM, stop: list[str] | None) -> None:
    params = {"temperature": 0, "max_tokens": 40, "stop": stop}
    prompt = "A short poem about emoji 🙂 and Zürich:"
    whole = smol.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs[0].text
    engine = smol.llm_engine
    pieces = []
    engine.add_request(
        "stream", prompt, SamplingParams(**params, output_kind=RequestOutputKind.DELTA)
    )
    while engine.has_unfinished_requests():
        pieces += [output.outputs[0].text for output in engine.step()]
    assert "".join(pieces) == whole and "\ufffd" not in whole


def test_command_line(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "teachvllm"]
    generate = [
        *run,
        "generate",
        "The capital of France is",
        "--max-tokens=4",
        "--num-gpu-blocks-override=64",
        "--dtype=float32",
    ]
    done = subprocess.run(generate, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout.startswith("The capital of France is Paris"), (
        done.stderr
    )
    bad = subprocess.run(
        [*run, "generate", "Hi", "--model=/no/such"], capture_output=True, text=True, timeout=200
    )
    assert bad.returncode == 1 and "does not exist" in bad.stderr and "Traceback" not in bad.stderr
    chat = [
        *run,
        "chat",
        "What is the capital of France?",
        "--max-tokens=20",
        "--num-gpu-blocks-override=64",
        "--dtype=float32",
    ]
    done = subprocess.run(
        chat, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0 and "Paris" in done.stdout, done.stderr


def test_engine_from_args_and_custom_classes(folder: str) -> None:
    "Whatever a reader may replace is an argument: a class, or its qualified name."
    from teachvllm.core.scheduler import Scheduler
    from teachvllm.worker.worker import Worker

    class MyScheduler(Scheduler):
        steps = 0

        def schedule(self):
            MyScheduler.steps += 1
            return super().schedule()

    class MyWorker(Worker):
        def hello(self) -> str:
            return f"hello from rank {self.rank}"

    args = EngineArgs(
        model=folder,
        dtype="float32",
        skip_tokenizer_init=True,
        num_gpu_blocks_override=64,
        scheduler_cls=MyScheduler,
        worker_cls=MyWorker,
        attention_backend="teachvllm.attention.backend.ReferenceBackend",
        distributed_executor_backend="uni",
    )
    engine = LLMEngine.from_engine_args(args)
    engine.add_request("a", [1, 2, 3], GREEDY)
    while engine.has_unfinished_requests():
        engine.step()
    assert MyScheduler.steps == 8 and engine.collective_rpc("hello") == ["hello from rank 0"]
    engine.close()
