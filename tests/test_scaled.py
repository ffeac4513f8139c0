"""Checkpoints with eight bits on both sides, written here by rounding of the tests' own, beside
transformers' models with the same numbers, whose layers round their inputs where a format does.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import VOCAB, greedy, make_tiny, runner_of
from safetensors.torch import load_file, save_file
from test_parallel import Ranked
from test_quantization import (
    OPTIONS,
    PROMPTS,
    change_config,
    kinds_of_products,
    make_mixtral,
    texts,
)
from test_worker import make_config
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from teachvllm import LLM
from teachvllm.config import NotSupportedYet
from teachvllm.distributed.parallel_state import ParallelState, run_ranks
from teachvllm.kernels import KERNELS
from teachvllm.model_executor.layers import LinearBase, attention_layers
from teachvllm.model_executor.loader import get_model, make_context
from teachvllm.quantization import scaled
from teachvllm.sampling_params import SamplingParams

INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn


def e4m3_values() -> np.ndarray:
    "What the bytes 0 to 126 mean: four bits of exponent, three of mantissa, no infinity."
    values = []
    for byte in range(127):
        exponent, mantissa = byte >> 3, byte & 7
        values.append((1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 / 64)
    return np.array(values)


E4M3 = e4m3_values()


def to_e4m3(x: np.ndarray) -> np.ndarray:
    "The bytes of the nearest values; of two that are as near, the even one."
    size = np.minimum(np.abs(x), 448)
    above = np.searchsorted(E4M3, size)
    below = np.maximum(above - 1, 0)
    to_above, to_below = E4M3[above] - size, size - E4M3[below]
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return (np.where(up, above, below) | np.where(x < 0, 128, 0)).astype(np.uint8)


def values_of(codes: np.ndarray) -> np.ndarray:
    "What int8, or e4m3's bytes, mean."
    if codes.dtype == np.int8:
        return codes.astype(np.float64)
    return E4M3[codes & 127] * np.where(codes > 127, -1, 1)


def to_codes(x: np.ndarray, scale: Any, dtype: torch.dtype) -> np.ndarray:
    if dtype == INT8:
        return np.rint(x / scale).clip(-128, 127).astype(np.int8)
    return to_e4m3(x / scale)


def largest(dtype: torch.dtype) -> int:
    return 127 if dtype == INT8 else 448


Parts = tuple[np.ndarray, np.ndarray]  # codes [n, k]; scales, of float32's precision


def round_matrix(w: np.ndarray, dtype: torch.dtype, strategy: str) -> tuple[Parts, np.ndarray]:
    "Codes and scales of a matrix; and what they mean together."
    top = largest(dtype)
    if strategy == "block":
        n, k = (-(-size // 128) for size in w.shape)
        scales = np.array(
            [
                [
                    np.abs(w[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]).max()
                    for j in range(k)
                ]
                for i in range(n)
            ]
        )
        scales = (scales / top).astype(np.float32)
        each = scales.repeat(128, 0)[: w.shape[0]].repeat(128, 1)[:, : w.shape[1]]
    else:
        axes = {"tensor": None, "channel": 1}
        each = np.abs(w).max(axes[strategy], keepdims=True) / top
        scales = each = each.astype(np.float32)
    codes = to_codes(w, each, dtype)
    return (codes, scales), values_of(codes) * each


class RoundedLinear(nn.Module):
    "A linear layer that rounds its input, in numpy."

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, way: str, scale: float):
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.dtype = dtype
        self.way = way
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numpy().astype(np.float64).reshape(-1, x.shape[-1])
        if self.way == "tensor":
            rounded = values_of(to_codes(rows, self.scale, self.dtype)) * self.scale
        else:
            width = 128 if self.way == "group" else rows.shape[1]
            parts = np.split(rows, range(width, rows.shape[1], width), 1)
            scales = [np.abs(part).max(1, keepdims=True) / largest(self.dtype) for part in parts]
            codes = [to_codes(part, s, self.dtype) for part, s in zip(parts, scales)]
            rounded = np.concatenate([values_of(c) * s for c, s in zip(codes, scales)], 1)
        y = rounded @ self.weight.detach().numpy().astype(np.float64).T
        y = y if self.bias is None else y + self.bias.detach().numpy()
        return torch.from_numpy(y).float().reshape(*x.shape[:-1], -1)


def scheme(
    kind: str, strategy: str, inputs: str | None, layout: str = "", **changes: Any
) -> dict[str, Any]:
    "compressed-tensors' words for it, as its package writes them."
    common = {"num_bits": 8, "type": kind, "symmetric": True, "group_size": None, "actorder": None}
    weights = common | {"strategy": strategy, "dynamic": False, "block_structure": None}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    activations = None
    if inputs is not None:
        activations = common | {"strategy": inputs, "dynamic": inputs != "tensor"}
        activations["group_size"] = 128 if inputs == "group" else None
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout or f"{kind}-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
    } | changes


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {"weight_block_size": [128, 128], "fmt": "e4m3"}
# name -> its quantization_config
FORMATS: dict[str, dict[str, Any]] = {
    "int8 channel token": scheme("int", "channel", "token"),
    "int8 tensor token": scheme("int", "tensor", "token"),
    "int8 channel static": scheme("int", "channel", "tensor"),
    "int8 tensor static": scheme("int", "tensor", "tensor"),
    "int8 channel": scheme("int", "channel", None),
    "int8 tensor": scheme("int", "tensor", None),
    "int8 naive": scheme("int", "channel", "token", "naive-quantized"),
    "float8 channel token": scheme("float", "channel", "token"),
    "float8 tensor static": scheme("float", "tensor", "tensor"),
    "float8 block": scheme("float", "block", "group"),
    "float8 channel": scheme("float", "channel", None),
    "float8 tensor": scheme("float", "tensor", None),
    "float8 weights in blocks": scheme("float", "block", None),
    "fp8": FP8,
    "fp8 static": FP8 | {"activation_scheme": "static"},
    "fp8 block": FP8 | BLOCKS,
}


def words_of(config: dict[str, Any]) -> tuple[torch.dtype, str, str | None]:
    "The dtype, what has a scale in a matrix, and how inputs are rounded."
    if config["quant_method"] == "fp8":
        if "weight_block_size" in config:
            return FLOAT8, "block", "group"
        static = config["activation_scheme"] == "static"
        return FLOAT8, "tensor", "tensor" if static else "token"
    (group,) = config["config_groups"].values()
    weights, inputs = group["weights"], group["input_activations"]
    dtype = INT8 if weights["type"] == "int" else FLOAT8
    return dtype, weights["strategy"], inputs and inputs["strategy"]


STACKED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "up", "up_proj": "up"}


@torch.inference_mode()
def input_sizes(model: Any) -> dict[str, float]:
    "The largest input that each linear layer sees for the prompts, by name."
    found: dict[str, float] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: found.update(
                {name: max(found.get(name, 0), args[0].abs().max().item())}
            )
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    for prompt in PROMPTS:
        model(torch.tensor([prompt]))
    for hook in hooks:
        hook.remove()
    return found


def quantize(folder: Path, name: str, left_out: tuple[str, ...] = ("lm_head",)) -> Any:
    """Round the matrices of a checkpoint, and write it in the format of that name; returns
    transformers' model with the rounded numbers, which rounds inputs as the format asks for.
    """
    config = FORMATS[name]
    dtype, strategy, inputs = words_of(config)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    plain = AutoModelForCausalLM.from_pretrained(folder).eval().float()
    sizes = input_sizes(plain) if inputs == "tensor" else {}
    stored = dict(tensors)
    scales: dict[str, float] = {}  # of inputs, of what is stacked together the largest
    for key, tensor in tensors.items():
        path = key.removesuffix(".weight")
        if tensor.dim() < 2 or path.endswith((*left_out, "embed_tokens")):
            continue
        (codes, of_weights), rounded = round_matrix(tensor.double().numpy(), dtype, strategy)
        tensors[key] = torch.from_numpy(rounded).float().contiguous()
        as_stored = torch.from_numpy(codes)
        stored[key] = as_stored if dtype == INT8 else as_stored.view(FLOAT8)
        shape = (1,) if strategy == "tensor" else of_weights.shape
        inverse = "_inv" if "weight_block_size" in config else ""
        stored[f"{path}.weight_scale{inverse}"] = torch.from_numpy(of_weights).reshape(shape)
        if inputs == "tensor":
            parent, _, leaf = path.rpartition(".")
            # each has one of its own; k's is the largest of those that are stacked
            factor = {"q_proj": 1.1, "k_proj": 1.5}.get(leaf, 1.0)
            scale = np.float32(factor * sizes[path] / largest(dtype))
            stored[f"{path}.input_scale"] = torch.tensor([scale])
            stack = f"{parent}.{STACKED.get(leaf, leaf)}"
            scales[stack] = max(scales.get(stack, 0), float(scale))
            scales[path] = scales[stack]
    for path in list(scales):
        parent, _, leaf = path.rpartition(".")
        scales[path] = scales[f"{parent}.{STACKED.get(leaf, leaf)}"]
    save_file(tensors, file, {"format": "pt"})
    hf_model = AutoModelForCausalLM.from_pretrained(folder).eval().float()
    if inputs is not None:
        for path, module in list(hf_model.named_modules()):
            plain = path.endswith((*left_out, "embed_tokens")) or ".experts." in path
            if isinstance(module, nn.Linear) and not plain:
                rounding = RoundedLinear(module, dtype, inputs, scales.get(path, 0))
                hf_model.set_submodule(path, rounding)
    save_file(stored, file, {"format": "pt"})
    change_config(folder, quantization_config=config)
    return hf_model


def make_model(folder: Path, blocks: bool) -> None:
    """A tiny Llama. In blocks of 128, columns of all layers, and rows of those that are not stacked,
    end in the middle of one.
    """
    if not blocks:
        make_tiny("llama", folder)
        return
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, **heads))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


@pytest.fixture(scope="module", params=list(FORMATS))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, str]:
    "A folder in a format, and transformers' model with the same numbers."
    folder = tmp_path_factory.mktemp("scaled")
    make_model(folder, "block" in request.param)
    return folder, quantize(folder, request.param), request.param


@torch.inference_mode()
def test_tokens_and_scores(checkpoint: tuple[Path, Any, str]) -> None:
    """Greedy tokens, and the scores of all tokens after a prompt. Inputs are rounded in float32 here
    and in float64 there: a few numbers of thousands come out on the other side.
    """
    folder, hf_model, name = checkpoint
    method = FORMATS[name]["quant_method"]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=VOCAB)
    with LLM(str(folder), **OPTIONS, max_logprobs=-1, quantization=method) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [
        greedy(hf_model, prompt, 8) for prompt in PROMPTS
    ]
    rows = [[row[t].logprob for t in range(VOCAB)] for row in outputs[1].prompt_logprobs[1:]]
    right = hf_model(torch.tensor([PROMPTS[1]])).logits[0, :-1].log_softmax(-1)
    off = (torch.tensor(rows) - right).abs()
    rounds_inputs = words_of(FORMATS[name])[2] is not None
    assert off.max() < (0.05 if rounds_inputs else 1e-3)
    assert off.median() < (1e-3 if rounds_inputs else 1e-4)
    if rounds_inputs:  # with inputs as they are it is another model
        with mock.patch.object(RoundedLinear, "forward", plain_forward):
            plain = hf_model(torch.tensor([PROMPTS[1]])).logits[0, :-1].log_softmax(-1)
        assert (plain - right).abs().median() > 5 * off.median()


def plain_forward(self: RoundedLinear, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, self.weight, self.bias)


@torch.inference_mode()
def test_two_ranks(checkpoint: tuple[Path, Any, str]) -> None:
    "Each reads its part of the weights, and of scales that belong to rows or to blocks."
    folder, hf_model, _ = checkpoint
    config = make_config(str(folder))

    def tokens(parallel: ParallelState) -> tuple[list[int], int]:
        ranked = Ranked(hf_model, parallel)  # for its pages; the weights are those of the file
        model = get_model(config, make_context(config, parallel))
        ranked.model = model
        ranked.layers = list(attention_layers(model).values())
        layers = [m for m in model.modules() if isinstance(m, LinearBase) and m.weight is None]
        numbers = [m.packed.dequantize(torch.float32).numel() for m in layers]
        return ranked.greedy(PROMPTS[0], 8), sum(numbers)

    ((alone, whole),) = run_ranks(tokens, 1)
    halves = run_ranks(tokens, 2)
    assert alone == greedy(hf_model, PROMPTS[0], 8)
    # a rank's tokens of a rounding layer's half have scales of their own
    halved = [tokens for tokens, _ in halves]
    assert halved[0] == halved[1] and [numbers for _, numbers in halves] == [whole // 2] * 2
    if words_of(FORMATS[checkpoint[2]])[2] in (None, "tensor", "group"):
        assert halved[0] == alone


def test_blocks_that_ranks_cannot_share(tmp_path: Path) -> None:
    make_model(tmp_path, blocks=True)
    quantize(tmp_path, "fp8 block")
    config = make_config(str(tmp_path))
    with pytest.raises(ValueError, match="qkv_proj: an element for 128 rows .* divide 64 of them"):
        run_ranks(lambda parallel: get_model(config, make_context(config, parallel)), 4)


def with_left_out(name: str, ignored: list[str]) -> dict[str, Any]:
    config = FORMATS[name]
    return config | {"ignored_layers" if config["quant_method"] == "fp8" else "ignore": ignored}


@pytest.mark.parametrize("name", ["int8 channel token", "float8 tensor static", "fp8 static"])
def test_tied_heads_biases_and_what_is_left_out(tmp_path: Path, name: str) -> None:
    make_tiny("llama-tied-biased", tmp_path)
    hf_model = quantize(tmp_path, name, left_out=("lm_head", "layers.0.mlp.down_proj"))
    left_out = ["lm_head", "model.layers.0.mlp.down_proj"]
    change_config(tmp_path, quantization_config=with_left_out(name, left_out))
    assert texts(tmp_path, PROMPTS) == [greedy(hf_model, prompt, 8) for prompt in PROMPTS]


def test_another_key_for_what_is_left_out(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    hf_model = quantize(tmp_path, "fp8", left_out=("lm_head", "layers.1.mlp.down_proj"))
    left_out = {"modules_to_not_convert": ["model.layers.1.mlp.down_proj"]}
    change_config(tmp_path, quantization_config=FORMATS["fp8"] | left_out)
    assert texts(tmp_path, PROMPTS) == [greedy(hf_model, prompt, 8) for prompt in PROMPTS]


def test_a_head_of_eight_bits(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    hf_model = quantize(tmp_path, "float8 channel token", left_out=())
    change_config(tmp_path, quantization_config=with_left_out("float8 channel token", []))
    assert texts(tmp_path, PROMPTS) == [greedy(hf_model, prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["int8 channel token", "int8 tensor", "fp8"])
def test_experts(tmp_path: Path, name: str) -> None:
    "Their inputs are not rounded, as each call unpacks the stack of their matrices."
    make_mixtral(tmp_path)
    hf_model = quantize(tmp_path, name, left_out=("lm_head", ".gate"))
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight_scale" in load_file(
        tmp_path / "model.safetensors"
    )
    assert texts(tmp_path, PROMPTS) == [greedy(hf_model, prompt, 8) for prompt in PROMPTS]


def test_groups_of_several_formats(tmp_path: Path) -> None:
    "Attention has whole numbers, MLPs have floats; the groups say so, one of them by names."
    both = tmp_path / "both"
    models = []
    for name in ("int8 channel", "float8 channel"):
        folder = tmp_path / name.split()[0]
        folder.mkdir()
        make_tiny("llama", folder)
        models.append(quantize(folder, name))
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("int8", "float8")]
    both.mkdir()
    chosen = {key: files["mlp" in key][key] for key in files[0] | files[1]}
    save_file(chosen, both / "model.safetensors", {"format": "pt"})
    (both / "config.json").write_text((tmp_path / "int8" / "config.json").read_text())
    kinds = {name: FORMATS[f"{name} channel"] for name in ("int8", "float8")}
    groups = {
        name: kind["config_groups"]["group_0"] | {"format": kind["format"]}
        for name, kind in kinds.items()
    }
    groups["float8"]["targets"] = ["re:.*mlp.*"]
    mixed = kinds["int8"] | {"format": "mixed-precision", "config_groups": groups}
    change_config(both, quantization_config=mixed)
    hf_model = models[0]
    for layer, other in zip(hf_model.model.layers, models[1].model.layers):
        layer.mlp = other.mlp
    assert texts(both, PROMPTS) == [greedy(hf_model, prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["int8 channel static", "fp8 block"])
def test_a_sharded_state_stays_in_eight_bits(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "whole"
    folder.mkdir()
    make_model(folder, "block" in name)
    hf_model = quantize(folder, name)
    with LLM(str(folder), **OPTIONS) as llm:
        llm.collective_rpc("save_sharded_state", args=(str(tmp_path / "parts"),))
    (file,) = (tmp_path / "parts").glob("*.safetensors")
    dtypes = {key: tensor.dtype for key, tensor in load_file(file).items()}
    assert dtypes["model.layers.0.self_attn.qkv_proj.weight"] == words_of(FORMATS[name])[0]
    found = texts(tmp_path / "parts", PROMPTS, load_format="sharded_state")
    assert found == [greedy(hf_model, prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["int8 tensor static", "float8 channel token", "fp8 block"])
def test_random_weights(tmp_path: Path, name: str) -> None:
    "A load format of dummies fills numbers and scales with what it likes."
    make_model(tmp_path, "block" in name)
    change_config(tmp_path, quantization_config=FORMATS[name])
    assert all(len(one) == 8 for one in texts(tmp_path, PROMPTS, load_format="dummy"))


# Rounded while they are loaded

ONLINE = {"quant_method": "fp8", "online": True}


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "mixtral"])
def test_rounded_while_loaded(tmp_path: Path, name: str) -> None:
    "A scale for each row and each token; embedding, head, router and experts stay as they are."
    hf_model = make_mixtral(tmp_path) if name == "mixtral" else make_tiny(name, tmp_path)
    change_config(tmp_path, quantization_config=ONLINE)
    for path, module in list(hf_model.named_modules()):
        left_out = any(part in path for part in ("lm_head", ".gate", "experts"))
        if isinstance(module, nn.Linear) and (not left_out or "gate_proj" in path):
            _, rounded = round_matrix(module.weight.detach().double().numpy(), FLOAT8, "channel")
            module.weight.data = torch.from_numpy(rounded).float()
            hf_model.set_submodule(path, RoundedLinear(module, FLOAT8, "token", 0))
    assert texts(tmp_path, PROMPTS) == [greedy(hf_model, prompt, 8) for prompt in PROMPTS]


def test_rounded_weights_can_be_changed(tmp_path: Path) -> None:
    "`apply_model` gets them laid out plainly; afterwards they are rounded again."
    make_tiny("llama", tmp_path)
    change_config(tmp_path, quantization_config=ONLINE)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    found = []
    with LLM(str(tmp_path), **OPTIONS) as llm:
        for factor in (1, -32, -1 / 32):
            llm.apply_model(
                lambda model, f=factor: model.model.layers[0].mlp.down_proj.weight.data.mul_(f)
            )
            (output,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
            found.append(output.outputs[0].token_ids)
    assert found[0] == found[2] != found[1]


# The slow form


def test_all_bytes_of_e4m3() -> None:
    "What torch takes for the values of the bytes, and what rounding makes of what lies between."
    numbers = torch.arange(127, dtype=torch.uint8).view(FLOAT8).double().numpy()
    assert (numbers == E4M3).all()
    between = np.concatenate([(E4M3[1:] + E4M3[:-1]) / 2, E4M3 * 1.03, -E4M3, [500.0, -1e9, 0]])
    rounded = torch.from_numpy(between).float().clamp(-448, 448).to(FLOAT8)
    assert (rounded.view(torch.uint8).numpy() & 127 == to_e4m3(between) & 127).all()


@pytest.mark.parametrize("vnni", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 40, 7), (5, 2050, 9), (2, 5000, 4)])
def test_whole_sums(shape: tuple[int, int, int], vnni: bool) -> None:
    "Of the largest products, too, and by each of the two ways."
    if vnni and not torch.cpu._is_vnni_supported():
        pytest.skip("a processor without VNNI")
    n, k, size = shape
    torch.manual_seed(0)
    codes = torch.randint(-128, 128, (n, k), dtype=INT8)
    numbers = torch.randint(-128, 128, (size, k), dtype=INT8)
    codes[0], numbers[0] = -128, -128
    with mock.patch.object(torch.cpu, "_is_vnni_supported", lambda: vnni):
        sums = scaled.whole_sums(codes, numbers)
    assert sums.dtype == torch.int32 and torch.equal(sums.long(), codes.long() @ numbers.long().T)


@pytest.mark.parametrize("dtype", [INT8, FLOAT8])
def test_what_is_not_finite_is_seen(dtype: torch.dtype) -> None:
    "In its row, and in no other, also where all rows have one scale."
    weight, scales = scaled.round_rows(torch.randn(6, 32), dtype)
    for input_scale in (None, torch.tensor(0.02)):
        product = scaled.ScaledWeight(weight, scales, input_scale=input_scale)
        for bad in (torch.nan, torch.inf, -torch.inf):
            x = torch.randn(3, 32)
            x[1, 5] = bad
            y = product(x)
            assert not y[1].isfinite().any() and y[[0, 2]].isfinite().all()
        assert product(torch.zeros(2, 32)).abs().max() == 0
        assert product(torch.full((1, 32), 1e-37)).isfinite().all()


def test_weights_stay_small() -> None:
    for dtype in (INT8, FLOAT8):
        weight = scaled.ScaledWeight(*scaled.round_rows(torch.randn(64, 512), dtype))
        assert weight.nbytes == 64 * 512 + 64 * 4
        weight.to("meta")  # as a GPU's weights go to the host when the engine sleeps
        assert {buffer.device.type for buffer in weight.buffers()} == {"meta"}


# The product of a CPU


def products(dtype: torch.dtype) -> Any:
    "The module of our product for CPUs; skips where it does not serve."
    module = pytest.importorskip("teachvllm.cpu_kernels.grouped")
    weight = scaled.ScaledWeight(*scaled.round_rows(torch.ones(64, 32), INT8))
    if not module.serves_scaled(weight, dtype):
        pytest.skip("no AVX-512 VNNI, or no threads of GNU OpenMP")
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("static", [None, 0.013])
@pytest.mark.parametrize(
    "shape", [(1, 64, 576), (4, 192, 1536), (5, 100, 48), (6, 130, 2064), (33, 64, 16)]
)
def test_a_product_is_the_slow_one_bit_for_bit(
    shape: tuple[int, int, int], static: float | None, dtype: torch.dtype
) -> None:
    "Also of rows of zeros, of halves that are rounded, and of numbers that are cut off."
    module = products(dtype)
    n, size, width = shape
    torch.manual_seed(0)
    numbers, scales = scaled.round_rows(torch.randn(size, width), INT8)
    numbers[0] = -128
    input_scale = None if static is None else torch.tensor(static)
    slow = scaled.ScaledWeight(numbers, scales, input_scale=input_scale)
    fast = module.PackedScaled(slow, dtype)
    x = torch.randn(n, width) * torch.rand(n, 1) * 3
    x[0] = x[0].abs().max() * torch.randint(-254, 255, (width,)) / 254
    x[n // 2] = 0
    x = x.to(dtype)
    assert torch.equal(fast(x), slow(x))
    bias = torch.randn(size).to(dtype)
    torch.testing.assert_close(fast(x, bias), slow(x, bias))
    assert torch.equal(fast.dequantize(dtype), slow.dequantize(dtype))
    for bad in (torch.nan, torch.inf, -torch.inf):
        x[-1, 3] = bad
        y = fast(x)
        assert not y[-1].isfinite().any() and y[:-1].isfinite().all()


def test_what_a_cpu_has_no_product_for() -> None:
    module = products(torch.float32)
    numbers, scales = scaled.round_rows(torch.randn(64, 32), INT8)
    floats = scaled.ScaledWeight(*scaled.round_rows(torch.randn(64, 32), FLOAT8))
    odd = scaled.ScaledWeight(numbers[:, :30].contiguous(), scales)
    blocks = scaled.ScaledWeight(numbers, scales[:1], (64, 32))
    for weight in (floats, odd, blocks):
        assert not module.serves_scaled(weight, torch.float32)
    assert not module.serves_scaled(scaled.ScaledWeight(numbers, scales), torch.float16)


@pytest.mark.parametrize("name", ["int8 channel token", "int8 tensor static"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_steps(tmp_path: Path, dtype: str, name: str) -> None:
    "The layers have our product, steps are recorded, and tokens those of torch alone, or close."
    products(getattr(torch, dtype))
    tiles = pytest.importorskip("teachvllm.cpu_kernels.tiles")
    tiled = dtype == "bfloat16" and tiles.has_tiles()
    make_tiny("llama", tmp_path)
    quantize(tmp_path, name)
    options = OPTIONS | {"dtype": dtype, "device": "cpu", "max_num_seqs": 4}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = []
    for eager in (True, False):
        with LLM(str(tmp_path), **options, enforce_eager=eager) as llm:
            layers = llm.apply_model(kinds_of_products)[0]
            # the model's widths are 48 and 64, and tiles take whole ones
            assert layers == {"PackedScaled", *(["TiledScaled"] if tiled else [])}
            graphs = runner_of(llm).graphs
            assert (graphs is None) == eager
            assert eager or tiled == (tiles.MULTIPLY_BYTES in graphs.kernels)
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]
    with mock.patch.dict(KERNELS["cpu"]):
        del KERNELS["cpu"]["scaled_linear"]
        slow = texts(tmp_path, PROMPTS, dtype=dtype)
    assert slow == found[0]


# Another writer


@pytest.mark.parametrize("preset", ["W8A8", "FP8_DYNAMIC", "FP8", "FP8_BLOCK"])
def test_the_compressors_of_compressed_tensors(tmp_path: Path, preset: str) -> None:
    """Its own library writes, with its own words for each preset of its schemes; what is read here
    are the weights that it reads, and the scheme it meant.
    """
    library = pytest.importorskip("compressed_tensors.quantization")
    base = pytest.importorskip("compressed_tensors.compressors")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    make_model(tmp_path, blocks=True)
    (file,) = tmp_path.glob("*.safetensors")
    preset_scheme = library.preset_name_to_scheme(preset, ["Linear"])
    layout = "int-quantized" if preset == "W8A8" else "float-quantized"
    preset_scheme.format = layout
    compressor = base.BaseCompressor.get_value_from_registry(layout)
    tensors, right = load_file(file), {}
    for key, weight in list(tensors.items()):
        path = key.removesuffix(".weight")
        if not path.endswith("_proj"):
            continue
        strategy = preset_scheme.weights.strategy
        low, high = weight.amin(1, True), weight.amax(1, True)
        if strategy == "tensor":
            low, high = weight.min()[None], weight.max()[None]
        if strategy == "block":
            (_, largest), _ = round_matrix(weight.double().numpy(), FLOAT8, "block")
            high = torch.from_numpy(largest) * 448
            low = -high
        scale, _ = helpers.calculate_qparams(low, high, preset_scheme.weights)
        state = {"weight": weight, "weight_scale": scale}
        state = compressor.compress(state, preset_scheme)
        right[path] = compressor.decompress(state, preset_scheme)["weight"].float()
        tensors |= {f"{path}.{kind}": tensor.contiguous() for kind, tensor in state.items()}
        if preset == "FP8":
            tensors[f"{path}.input_scale"] = torch.tensor([0.02])
    save_file(tensors, file, {"format": "pt"})
    config = library.QuantizationConfig(
        config_groups={"group_0": preset_scheme}, format=layout, ignore=["lm_head"]
    )
    written = json.loads(json.dumps(config.model_dump(), default=str))
    change_config(tmp_path, quantization_config=written)
    served = make_config(str(tmp_path))
    layer = get_model(served, make_context(served)).model.layers[1]
    packed = layer.self_attn.qkv_proj.packed
    paths = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    matrix = torch.cat([right[path] for path in paths])
    torch.testing.assert_close(packed.dequantize(torch.float32), matrix, rtol=1e-6, atol=0)
    of_o_proj = layer.self_attn.o_proj.packed.dequantize(torch.float32)
    torch.testing.assert_close(
        of_o_proj, right["model.layers.1.self_attn.o_proj"], rtol=1e-6, atol=0
    )
    found = layer.self_attn.qkv_proj.linear_method.scheme
    kinds = {"W8A8": (None, False, "dynamic"), "FP8_DYNAMIC": (None, False, "dynamic")}
    kinds |= {"FP8": (None, True, "static"), "FP8_BLOCK": ((128, 128), False, "dynamic")}
    assert (found.block, found.of_matrix, found.activations) == kinds[preset]


# What is refused


def changed(kind: str, strategy: str, inputs: str | None, part: str, **words: Any) -> Any:
    "A config with other words for weights, or for inputs."
    config = scheme(kind, strategy, inputs)
    config["config_groups"]["group_0"][part] |= words
    return config


def with_words(config: dict[str, Any], **words: Any) -> dict[str, Any]:
    group = config["config_groups"]["group_0"] | words
    return config | {"config_groups": {"group_0": group}}


INPUTS = "input_activations"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "zero points": (
        changed("int", "channel", "token", INPUTS, symmetric=False),
        "input_activations: symmetric=False is not supported yet",
    ),
    "zero points of weights": (
        changed("int", "channel", "token", "weights", symmetric=False),
        "weights: symmetric=False",
    ),
    "tokens without a scale": (
        changed("int", "channel", "token", INPUTS, dynamic=False),
        "strategy='token' is not supported yet, only 'tensor'",
    ),
    "a scale for all tokens at once": (
        changed("float", "channel", "tensor", INPUTS, dynamic=True),
        "strategy='tensor' is not supported yet, only 'token'",
    ),
    "local": (changed("int", "channel", "token", INPUTS, dynamic="local"), "dynamic='local'"),
    "four bits": (changed("int", "channel", "token", INPUTS, num_bits=4), "num_bits=4"),
    "both kinds": (changed("int", "channel", "token", INPUTS, type="float"), "type='float'"),
    "another kind": (scheme("int", "channel", "token", "float-quantized"), "type='int'"),
    "groups of weights": (scheme("int", "group", "token"), "weights: strategy='group'"),
    "whole numbers in blocks": (scheme("int", "block", "group"), "weights: strategy='block'"),
    "other blocks": (
        changed("float", "block", "group", "weights", block_structure=[64, 64]),
        r"block_structure=\[64, 64\] is not supported yet, only \[128, 128\]",
    ),
    "blocks and tokens": (scheme("float", "block", "token"), "strategy='token'"),
    "outputs": (
        with_words(scheme("int", "channel", "token"), output_activations={"num_bits": 8}),
        "output_activations=",
    ),
    "a cache": (
        scheme("float", "channel", "token", kv_cache_scheme={"type": "int"}),
        "kv_cache_scheme: type='int'",
    ),
    "format": (scheme("int", "channel", "token", "marlin-24"), "format='marlin-24'"),
    "a scheme": (FP8 | {"activation_scheme": "token"}, "activation_scheme='token'"),
    "static blocks": (
        FP8 | BLOCKS | {"activation_scheme": "static"},
        "weight_block_size: activation_scheme='static' is not supported yet, only 'dynamic'",
    ),
    "small blocks": (FP8 | {"weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]"),
    "e5m2": (FP8 | {"fmt": "e5m2"}, "fmt='e5m2'"),
    "rows of a block": (FP8 | BLOCKS, "qkv_proj: an element for 128 rows .* divide 64 of them"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    make_tiny("llama", folder)
    return folder


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_config_that_is_refused(plain: Path, case: str) -> None:
    config, message = REFUSED[case]
    change_config(plain, quantization_config=config)
    with pytest.raises(ValueError, match=message) as refused:
        LLM(str(plain), **OPTIONS)
    assert isinstance(refused.value, NotSupportedYet) or case == "rows of a block"


Tensors = dict[str, torch.Tensor]


def without(tensors: Tensors, name: str) -> None:
    del tensors[name]


def as_bfloat16(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].to(torch.bfloat16)


def as_bytes(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].view(torch.uint8)


def as_other_floats(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].to(torch.float8_e5m2)


def cut(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name][:-1].contiguous()


def doubled(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].repeat(2)


def zero(tensors: Tensors, name: str) -> None:
    tensors[name] = torch.zeros_like(tensors[name])


def not_finite(tensors: Tensors, name: str) -> None:
    tensors[name][0] = torch.nan


# what was done, to which format and tensor, and the error
SPOILED: dict[str, tuple[Callable[..., None], str, str, str]] = {
    "no scale": (without, "int8 channel token", "q_proj.weight_scale", "lacks 1 of .*weight_scale"),
    "no scale of inputs": (without, "fp8 static", "k_proj.input_scale", "lacks 1 of .*input_scale"),
    "plain": (
        as_bfloat16,
        "fp8",
        "q_proj.weight",
        "q_proj.weight is torch.bfloat16, .*float8_e4m3",
    ),
    "unsigned": (as_bytes, "int8 channel token", "q_proj.weight", "weight is torch.uint8, .*int8"),
    "bytes": (as_bytes, "fp8", "q_proj.weight", "q_proj.weight is torch.uint8, .*float8_e4m3fn"),
    "e5m2": (as_other_floats, "fp8", "v_proj.weight", "v_proj.weight is torch.float8_e5m2"),
    "a shape": (cut, "int8 channel token", "q_proj.weight_scale", "weight_scale has shape"),
    "too many": (doubled, "fp8", "q_proj.weight_scale", "weight_scale has 2 elements, .* needs 1"),
    "nan": (not_finite, "fp8", "q_proj.weight_scale", "qkv_proj: weight_scale has numbers that"),
    "zero": (zero, "fp8 static", "o_proj.input_scale", "o_proj: input_scale is 0.0, which"),
}


@pytest.mark.parametrize("case", list(SPOILED))
def test_a_checkpoint_that_is_spoiled(tmp_path: Path, case: str) -> None:
    spoil, name, leaf, message = SPOILED[case]
    make_tiny("llama", tmp_path)
    quantize(tmp_path, name)
    tensors = load_file(tmp_path / "model.safetensors")
    spoil(tensors, f"model.layers.1.self_attn.{leaf}")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        LLM(str(tmp_path), **OPTIONS)
