"""Decode steps that were recorded on a CPU give what steps operation by operation give, and nothing
of them stays behind.
"""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import VOCAB, make_tiny, random_prompts, runner_of
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from teachvllm import LLM, BeamSearchParams, SamplingParams
from teachvllm.kernels import platform_kernels
from teachvllm.model_executor.layers import LinearBase, LinearMethod, UnquantizedLinearMethod

if platform_kernels("cpu").find("record") is None:
    pytest.skip("no Numba, or no threads of GNU OpenMP", allow_module_level=True)

from teachvllm.cpu_kernels import linear
from teachvllm.cpu_kernels.graph import CpuGraphRunner, ModelWatch

# looked up before a test changes what is served: that kernels are compiled for it, see cpu/05's `WIDE`
SERVED = linear.dtypes_served()

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "block_size": 4,
}
OPTIONS |= {"max_num_seqs": 6, "device": "cpu", "num_gpu_blocks_override": 150, "swap_space": 0.001}
PROMPTS = random_prompts(9, 40)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PARAMS = {
    "greedy": GREEDY,
    "seeds": SamplingParams(seed=3, max_tokens=12, ignore_eos=True),
    "n=3": SamplingParams(n=3, seed=1, max_tokens=9, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0, max_tokens=12, repetition_penalty=1.3, logprobs=2, ignore_eos=True
    ),
}


@pytest.fixture(scope="module", autouse=True)
def float32_is_served() -> Iterator[None]:
    """Our product of float32 also runs without AVX-512: LLVM cuts its vectors in two. Only the engine
    does not take it there, because oneDNN is faster; here it does.
    """
    if torch.float32 in SERVED:
        yield
        return
    if not linear.host_features().get("fma"):
        pytest.skip("a processor without fused multiply-add")
    with patch.object(linear, "host_features", lambda: {"avx512f": True}):
        linear.dtypes_served.cache_clear()
        yield
    linear.dtypes_served.cache_clear()


def answers(llm: LLM, params: SamplingParams) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


def replays(llm: LLM) -> Any:
    "Counts the steps that are replayed."
    graphs = runner_of(llm).graphs
    return patch.object(graphs, "run", wraps=graphs.run)


@pytest.fixture(scope="module")
def expected(folder: str) -> dict[str, list]:
    with LLM(folder, enforce_eager=True, **OPTIONS) as llm:
        assert runner_of(llm).graphs is None
        return {name: answers(llm, params) for name, params in PARAMS.items()}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_equals_eager(folder: str, expected: dict, asynchronous: bool) -> None:
    with LLM(folder, async_scheduling=asynchronous, **OPTIONS) as llm:
        for name, params in PARAMS.items():
            with replays(llm) as run:
                assert answers(llm, params) == expected[name], name
            assert run.call_count > 5, name


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_equals_eager_when_preempted(folder: str, expected: dict, mode: str) -> None:
    options = OPTIONS | {"num_gpu_blocks_override": 36, "preemption_mode": mode}
    with LLM(folder, **options) as llm:
        for name in ("greedy", "n=3"):
            with replays(llm) as run:
                assert answers(llm, PARAMS[name]) == expected[name]
            assert run.call_count > 5
        assert llm.get_metrics()["num_preemptions"] > 0


def test_beams(folder: str) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    found = []
    for eager in (True, False):
        with LLM(folder, enforce_eager=eager, **OPTIONS) as llm:
            outputs = llm.beam_search(PROMPTS[:3], params)
            found.append([[list(one.token_ids) for one in output.outputs] for output in outputs])
    assert found[0] == found[1]


CONFIGS = {
    "qwen2": lambda sizes: Qwen2Config(**sizes),  # biases
    "qwen3": lambda sizes: Qwen3Config(head_dim=16, **sizes),  # norms of queries and keys
    "window": lambda sizes: MistralConfig(sliding_window=7, **sizes),
    "one head": lambda sizes: MistralConfig(
        **(sizes | {"num_key_value_heads": 1, "head_dim": 64}), sliding_window=None
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def other(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
    }
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param](sizes)).float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    path = tmp_path_factory.mktemp("other")
    model.save_pretrained(path)
    yield str(path)


def test_other_models(other: str, request: pytest.FixtureRequest) -> None:
    "Qwen3 puts queries and keys together with torch, so it is not recorded."
    found = []
    torch_too = request.node.callspec.params["other"] == "qwen3"
    for eager in (True, False):
        with LLM(other, enforce_eager=eager, **OPTIONS) as llm:
            assert (runner_of(llm).graphs is None) == (eager or torch_too)
            found.append([answers(llm, params) for params in PARAMS.values()])
    assert found[0] == found[1]


def test_a_model_with_operations_of_torchs_runs_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    "OPT has torch's layer norms: the log says so, and the engine answers."
    make_tiny("opt", tmp_path)
    with caplog.at_level("INFO", logger="teachvllm"), LLM(str(tmp_path), **OPTIONS) as llm:
        assert runner_of(llm).graphs is None
        assert "operation by operation" in caplog.text and "is done by torch" in caplog.text
        assert all(len(one[0]) == 20 for one in answers(llm, GREEDY))


@pytest.mark.parametrize(
    "options",
    [{"attention_backend": "torch_sdpa"}, {"kv_cache_dtype": "fp8"}, {"dtype": "float16"}],
)
def test_what_is_not_recorded(folder: str, options: dict) -> None:
    with LLM(folder, **(OPTIONS | options)) as llm:
        assert runner_of(llm).graphs is None
        assert all(len(one[0]) == 20 for one in answers(llm, GREEDY))


def test_workers_in_a_group_do_not_record(folder: str, expected: dict) -> None:
    with LLM(folder, tensor_parallel_size=2, distributed_executor_backend="mp", **OPTIONS) as llm:
        assert llm.collective_rpc(lambda worker: worker.model_runner.graphs is None) == [True, True]
        assert answers(llm, GREEDY) == expected["greedy"]


@pytest.mark.parametrize("level", [1, 2])
def test_it_is_recorded_again_after_a_sleep(folder: str, expected: dict, level: int) -> None:
    with LLM(folder, **OPTIONS) as llm:
        before = runner_of(llm).graphs
        llm.sleep(level)
        assert runner_of(llm).graphs is None
        llm.wake_up()
        assert runner_of(llm).graphs is not before
        assert answers(llm, GREEDY) == expected["greedy"]


def test_a_failed_step_leaves_the_recording_usable(folder: str, expected: dict) -> None:
    with LLM(folder, **OPTIONS) as llm:
        graphs = runner_of(llm).graphs
        with (
            patch.object(graphs, "run", side_effect=RuntimeError("a cable")),
            pytest.raises(RuntimeError, match="a cable"),
        ):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert answers(llm, GREEDY) == expected["greedy"]


def test_engines_in_threads(folder: str, expected: dict) -> None:
    """One engine answers while others record: what one thread records, no other thread's kernels
    get into.
    """
    found: list[Any] = []

    def make_and_ask() -> None:
        for _ in range(3):
            with LLM(folder, **OPTIONS) as llm:
                found.append(answers(llm, GREEDY))

    threads = [threading.Thread(target=make_and_ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    with LLM(folder, **OPTIONS) as llm:
        while any(thread.is_alive() for thread in threads):
            assert answers(llm, GREEDY) == expected["greedy"]
    for thread in threads:
        thread.join()
    assert found == [expected["greedy"]] * 6


def test_the_number_of_threads_may_change(folder: str, expected: dict) -> None:
    threads = torch.get_num_threads()
    try:
        with LLM(folder, **OPTIONS) as llm:
            for number in (1, 3, 2):
                torch.set_num_threads(number)
                assert answers(llm, GREEDY) == expected["greedy"]
    finally:
        torch.set_num_threads(threads)


def test_the_pool_does_not_grow_with_the_layers(folder: str, tmp_path: Path) -> None:
    "A layer's memory is the next one's: twice the layers, the same pool."
    config = json.loads((Path(folder) / "config.json").read_text())
    sizes = []
    for layers in (2, 8):
        path = tmp_path / str(layers)
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
        with LLM(str(path), load_format="dummy", **OPTIONS) as llm:
            sizes.append(runner_of(llm).graphs.pool.num_bytes)
    assert sizes[0] == sizes[1]


# A model that changes while its steps are recorded. Keys and values of before are of no use then.

CHANGING = OPTIONS | {"enable_prefix_caching": False}


class Twice(LinearMethod):
    "Another linear layer's method, and its output doubled."

    def __init__(self, inner: LinearMethod):
        self.inner = inner

    def create_weights(self, *args: Any) -> None:
        raise AssertionError("the layer has its weights")

    def apply(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner.apply(layer, x)


def down(model: Any) -> Any:
    return model.model.layers[0].mlp.down_proj


def double_weights(model: Any) -> None:
    down(model).weight.data *= 2


def new_parameter(model: Any) -> None:
    down(model).weight = torch.nn.Parameter(2 * down(model).weight.data, requires_grad=False)


def other_memory(model: Any) -> None:
    down(model).weight.data = 2 * down(model).weight.data


def other_method(model: Any) -> None:
    down(model).linear_method = Twice(down(model).linear_method)


def other_forward(model: Any) -> None:
    forward = down(model).forward
    down(model).forward = lambda x: 2 * forward(x)


def hook(model: Any) -> None:
    down(model).register_forward_hook(lambda module, args, output: 2 * output)


def double_method(model: Any) -> None:
    "A kind of linear method that packs, with plain weights twice as large."
    down(model).linear_method = UnquantizedLinearMethod()
    double_weights(model)


def oracle(folder: str, change: Any) -> list[list[list[int]]]:
    "What transformers answers when `change` was done to its model."
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    change(model)
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(20):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        found.append([ids[len(prompt) :]])
    return found


@pytest.fixture(scope="module")
def doubled(folder: str, expected: dict) -> list[list[list[int]]]:
    "The tokens with the first `down_proj` doubled, which are others."
    found = oracle(folder, double_weights)
    assert found != expected["greedy"]
    return found


@pytest.mark.parametrize(
    "change, recorded",
    [
        (double_weights, True),
        (new_parameter, True),
        (other_memory, True),
        (double_method, True),
        (other_method, False),  # it doubles with torch
        (other_forward, False),
        (hook, False),
    ],
)
def test_apply_model_changes_what_is_recorded(
    folder: str, doubled: list, change: Any, recorded: bool
) -> None:
    with LLM(folder, **CHANGING) as llm:
        answers(llm, GREEDY)
        llm.apply_model(change)
        graphs = runner_of(llm).graphs
        assert (graphs is not None) == recorded
        assert answers(llm, GREEDY) == doubled


@pytest.mark.parametrize("change", [other_method, other_forward, hook])
def test_a_change_behind_the_engines_back_is_seen(
    folder: str, expected: dict, doubled: list, change: Any
) -> None:
    "While requests run, too: and what is undone is recorded again."
    with LLM(folder, **CHANGING) as llm:
        model = runner_of(llm).model
        before = dict(vars(down(model)))
        with replays(llm) as run:
            assert answers(llm, GREEDY) == expected["greedy"]
            assert run.call_count > 5
        change(model)
        with replays(llm) as run:
            assert answers(llm, GREEDY) == doubled
            assert run.call_count == 0
        vars(down(model)).clear()
        vars(down(model)).update(before)
        down(model)._forward_hooks.clear()
        with replays(llm) as run:
            assert answers(llm, GREEDY) == expected["greedy"]
            assert run.call_count > 5


def test_a_new_weight_behind_the_engines_back_is_packed(folder: str, doubled: list) -> None:
    with LLM(folder, **CHANGING) as llm:
        model = runner_of(llm).model
        whole = llm.apply_model(lambda model: down(model).weight.data.clone())[0]
        down(model).weight = torch.nn.Parameter(2 * whole, requires_grad=False)
        with replays(llm) as run:
            assert answers(llm, GREEDY) == doubled
            assert run.call_count > 5
        assert down(model).packed is not None and not down(model).weight.numel()


def test_a_packed_weight_that_is_written_to_is_an_error(folder: str) -> None:
    "It is empty: nothing would happen. The message says where weights can be changed."
    with LLM(folder, **CHANGING) as llm:
        model = runner_of(llm).model
        down(model).weight.mul_(2)
        with pytest.raises(RuntimeError, match="apply_model"):
            llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)


def test_apply_model_sees_the_checkpoints_weights(folder: str, expected: dict) -> None:
    "All of them, in their shapes; and to look changes nothing."
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    with LLM(folder, **CHANGING) as llm:
        (ours,) = llm.apply_model(
            lambda model: {name: p.detach().clone() for name, p in model.named_parameters()}
        )
        for i in range(2):
            layer = f"model.layers.{i}."
            parts = [theirs[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv"]
            assert torch.equal(ours[f"{layer}self_attn.qkv_proj.weight"], torch.cat(parts))
            name = f"{layer}mlp.down_proj.weight"
            assert torch.equal(ours[name], theirs[name])
        assert all(parameter.numel() for parameter in ours.values())
        with replays(llm) as run:
            assert answers(llm, GREEDY) == expected["greedy"]
            assert run.call_count > 5


@pytest.mark.parametrize("by_apply_model", [True, False])
def test_a_tied_head_is_doubled_with_its_embedding(tmp_path: Path, by_apply_model: bool) -> None:
    "Its packed copy is made again. A norm doubled in place is seen, too."
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(tie_word_embeddings=True, max_position_embeddings=256, **sizes)
    model = AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(tmp_path)

    def change(model: Any) -> None:
        with torch.no_grad():
            model.model.embed_tokens.weight[: VOCAB // 2].mul_(2)
            model.model.norm.weight[:32].mul_(-3)

    with LLM(str(tmp_path), **CHANGING) as llm:
        assert answers(llm, GREEDY) == oracle(str(tmp_path), lambda model: None)
        if by_apply_model:
            llm.apply_model(change)
        else:
            change(runner_of(llm).model)
        wanted = oracle(str(tmp_path), change)
        with replays(llm) as run:
            assert answers(llm, GREEDY) == wanted
            assert run.call_count > 5


# What the watch sees, and what it costs


class Doubled(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Packed:
    def __init__(self) -> None:
        self.panels = torch.ones(4, 2)


def layers() -> Any:
    part = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(70)])
    part.requires_grad_(False)
    part[40].packed = Packed()
    part[40].flag = 1
    return part


CHANGES: dict[str, Any] = {
    "written to": lambda m: m[40].weight.mul_(2),
    "other memory": lambda m: setattr(m[40].weight, "data", torch.ones(2, 2)),
    "another parameter": lambda m: setattr(m[40], "weight", m[1].weight),
    "no parameter": lambda m: setattr(m[40], "bias", None),
    "another layer": lambda m: m.insert(1, torch.nn.Identity()),
    "an attribute": lambda m: setattr(m[40], "scale", 2),
    "its value": lambda m: setattr(m[40], "flag", 2),
    "no attribute": lambda m: delattr(m[40], "flag"),
    "a method": lambda m: setattr(m[40], "forward", m[2].forward),
    "a class": lambda m: setattr(m[40], "__class__", Doubled),
    "what was packed": lambda m: setattr(m[40].packed, "panels", torch.zeros(4, 2)),
    "a hook": lambda m: m[40].register_forward_hook(print),
    "a hook before": lambda m: m[40].register_forward_pre_hook(print),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_watch_sees(name: str) -> None:
    "Looking at everything, at once; looking at a share, when its turn has come."
    for everything, calls in ((True, 1), (False, ModelWatch.SHARES)):
        model = layers()
        watch = ModelWatch(model)
        assert not any(watch.changed(everything) for _ in range(2 * ModelWatch.SHARES))
        CHANGES[name](model)
        assert any(watch.changed(everything) for _ in range(calls))


def test_a_changed_class_is_seen_and_a_hook_at_once() -> None:
    model = layers()
    model[3] = Doubled(2, 2)
    watch = ModelWatch(model)
    with patch.object(Doubled, "forward", torch.nn.Linear.forward):
        assert watch.changed()
    model[40].register_forward_hook(print)
    assert watch.changed(everything=False)


def test_a_step_looks_at_a_share_of_the_model(folder: str) -> None:
    "At everything only after a step that was none of these: with a prompt in it, say."
    with LLM(folder, **OPTIONS) as llm:
        watch = runner_of(llm).graphs.watch
        for _ in range(2):
            with patch.object(watch, "changed", wraps=watch.changed) as changed:
                llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
            looked = [call.args[0] for call in changed.call_args_list]
            assert looked[0] and not any(looked[1:]) and len(looked) > 10


def test_a_replaced_kernel_is_seen(folder: str, expected: dict) -> None:
    "One that is switched off in the table is not in recorded steps either; and on again."
    with LLM(folder, **CHANGING) as llm:
        table = runner_of(llm).context.kernels
        name = table.names["rms_norm"]
        table.register("rms_norm", f"{__name__}.not_there")
        for recorded in (False, True):
            with replays(llm) as run:
                assert answers(llm, GREEDY) == expected["greedy"]
            assert (run.call_count > 5) == recorded
            table.given_up.clear()
            table.register("rms_norm", name)


def test_a_forward_that_changes_the_model_is_not_recorded(
    folder: str, expected: dict, caplog: pytest.LogCaptureFixture
) -> None:
    "A counter: replays would not raise it. After some tries it is let be, and the log warns once."
    with LLM(folder, **CHANGING) as llm:
        layer = down(runner_of(llm).model)
        forward = layer.forward

        def counted(x: torch.Tensor) -> torch.Tensor:
            layer.calls = getattr(layer, "calls", 0) + 1
            return forward(x)

        layer.forward = counted
        graphs = runner_of(llm).graphs
        with replays(llm) as run, patch.object(graphs, "record", wraps=graphs.record) as record:
            for _ in range(5):
                before = getattr(layer, "calls", 0)
                assert answers(llm, GREEDY) == expected["greedy"]
                assert layer.calls >= before + 20
        assert run.call_count == 0 and record.call_count == CpuGraphRunner.TRIES
        assert caplog.text.count("each forward changes the model") == 1


# Chunks of prompts that chapter cpu/04's loops do not take


@pytest.mark.parametrize("most_bytes", [0, 1 << 15])
def test_nothing_is_compiled_in_a_step(folder: str, expected: dict, most_bytes: int) -> None:
    "Chunks with too many keys for the loops go torch's way, which needs no kernel."
    with LLM(folder, **OPTIONS) as llm:
        with (
            patch("teachvllm.cpu_kernels.attention.MOST_BYTES", most_bytes),
            patch("teachvllm.cpu_kernels.utils.Kernel.compile", side_effect=AssertionError),
        ):
            assert answers(llm, GREEDY) == expected["greedy"]
