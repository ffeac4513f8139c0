"""Quantized checkpoints, written here by packers that share nothing with what reads them, and
computed by transformers with the same numbers unpacked.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import VOCAB, greedy, make_tiny
from safetensors.torch import load_file, save_file
from test_parallel import Ranked
from test_worker import make_config
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from teachvllm import LLM
from teachvllm.config import NotSupportedYet
from teachvllm.distributed.parallel_state import ParallelState, run_ranks
from teachvllm.kernels import KernelTable
from teachvllm.model_executor.layers import LinearBase, attention_layers
from teachvllm.model_executor.loader import get_model, make_context, quant_config_of
from teachvllm.model_executor.models.parity import random_sequences
from teachvllm.quantization import grouped
from teachvllm.sampling_params import SamplingParams

GROUP = 8
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "num_gpu_blocks_override": 64,
}
Parts = tuple[np.ndarray, np.ndarray, np.ndarray]  # numbers [n, k], scales and zeros [n, groups]
Writer = Callable[..., dict[str, np.ndarray]]


def words(numbers: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    "Rows of numbers, 32 / bits to an int32, the first in the lowest bits."
    in_one = 32 // bits
    packed = np.zeros((numbers.shape[0], numbers.shape[1] // in_one), np.uint32)
    for row in range(packed.shape[0]):
        for column in range(packed.shape[1]):
            for place, source in enumerate(order or range(in_one)):
                number = int(numbers[row, column * in_one + source])
                packed[row, column] |= np.uint32(number << bits * place)
    return packed.view(np.int32)


def awq(parts: Parts, **_: Any) -> dict[str, np.ndarray]:
    numbers, scales, zeros = parts
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        "qweight": words(numbers.T, 4, order),
        "qzeros": words(zeros.T, 4, order),
        "scales": scales.T.astype(np.float16),
    }


def gptq(
    parts: Parts, bits: int = 4, g_idx: np.ndarray | None = None, v2: bool = False
) -> dict[str, np.ndarray]:
    numbers, scales, zeros = parts
    k = numbers.shape[1]
    if g_idx is None:
        g_idx = np.arange(k) * scales.shape[1] // k
    return {
        "qweight": words(numbers, bits).T,
        "qzeros": words(zeros.T - (0 if v2 else 1), bits),
        "scales": scales.T.astype(np.float16),
        "g_idx": g_idx.astype(np.int32),
    }


def packed_tensors(
    parts: Parts, bits: int = 4, g_idx: np.ndarray | None = None, symmetric: bool = False
) -> dict[str, np.ndarray]:
    numbers, scales, zeros = parts
    tensors = {
        "weight_packed": words(numbers, bits),
        "weight_scale": scales.astype(np.float32),
        "weight_shape": np.array(numbers.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.T, bits).T
    if g_idx is not None:
        tensors["weight_g_idx"] = g_idx.astype(np.int32)
    return tensors


def scheme(bits: int = 4, **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | changes}},
        "ignore": ["lm_head"],
    }


def gptq_config(bits: int = 4, **changes: Any) -> dict[str, Any]:
    fields = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False}
    return fields | changes


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
# name -> its quantization_config, who writes it, and how; "order": columns are sorted into groups
FORMATS: dict[str, tuple[dict[str, Any], Writer, dict[str, Any]]] = {
    "awq": (AWQ, awq, {}),
    "awq by row": (AWQ | {"group_size": -1}, awq, {}),
    "gptq": (gptq_config(), gptq, {}),
    "gptq v2": (gptq_config(checkpoint_format="gptq_v2"), gptq, {"v2": True}),
    "gptq in order": (gptq_config(desc_act=True), gptq, {"order": True}),
    "gptq 8 bits": (gptq_config(8), gptq, {"bits": 8}),
    "gptq by row": (gptq_config(group_size=-1), gptq, {}),
    "compressed": (scheme(symmetric=False), packed_tensors, {}),
    "compressed symmetric": (scheme(symmetric=True), packed_tensors, {"symmetric": True}),
    "compressed in order": (
        scheme(symmetric=False, actorder="group"),
        packed_tensors,
        {"order": True},
    ),
    "compressed 8 bits": (scheme(8, symmetric=False), packed_tensors, {"bits": 8}),
    "compressed by row": (
        scheme(strategy="channel", group_size=None, symmetric=True),
        packed_tensors,
        {"symmetric": True},
    ),
}


def round_matrix(weight: torch.Tensor, group: int, bits: int, symmetric: bool, g_idx: Any) -> Parts:
    "The numbers, scales and zero points nearest to a matrix, column by column."
    w = weight.double().numpy()
    n, k = w.shape
    count = k // group
    numbers = np.zeros((n, k), np.int64)
    scales = np.zeros((n, count))
    zeros = np.zeros((n, count), np.int64)
    top = (1 << bits) - 1
    for g in range(count):
        columns = np.flatnonzero(g_idx == g)
        low = np.minimum(w[:, columns].min(1), 0)
        high = np.maximum(w[:, columns].max(1), 0)
        if symmetric:
            high = np.maximum(high, -low)
            low = -high
        scales[:, g] = ((high - low) / top).astype(np.float16)
        zeros[:, g] = (top + 1) // 2 if symmetric else np.rint(-low / scales[:, g]).clip(1, top)
        found = np.rint(w[:, columns] / scales[:, g, None] + zeros[:, g, None])
        numbers[:, columns] = found.clip(0, top)
    return numbers, scales, zeros


def quantize(
    folder: Path, name: str, left_out: tuple[str, ...] = ("lm_head",), size: int = GROUP
) -> Any:
    """Round the matrices of a checkpoint in groups of `size` columns, and write it in the format of
    that name; returns transformers' model with the rounded numbers.
    """
    config, write, how = FORMATS[name]
    how = dict(how)
    in_order = how.pop("order", False)
    rng = np.random.default_rng(0)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    packed = dict(tensors)
    orders: dict[int, np.ndarray] = {}  # matrices with the same input have the same
    for key, tensor in tensors.items():
        path = key.removesuffix(".weight")
        if tensor.dim() < 2 or path.endswith((*left_out, "embed_tokens")):
            continue
        k = tensor.shape[1]
        group = k if "by row" in name else size
        g_idx = np.arange(k) // group
        if in_order:
            g_idx = orders.setdefault(k, rng.permutation(g_idx))
        parts = round_matrix(tensor, group, how.get("bits", 4), how.get("symmetric", False), g_idx)
        numbers, scales, zeros = parts
        rounded = torch.from_numpy((numbers - zeros[:, g_idx]) * scales[:, g_idx])
        tensors[key] = rounded.float().contiguous()
        stored = write(parts, **how, **({"g_idx": g_idx} if in_order else {}))
        del packed[key]
        for kind, array in stored.items():
            packed[f"{path}.{kind}"] = torch.from_numpy(np.ascontiguousarray(array))
    save_file(tensors, file, {"format": "pt"})
    hf_model = AutoModelForCausalLM.from_pretrained(folder).eval().float()
    save_file(packed, file, {"format": "pt"})
    in_groups = json.loads(
        json.dumps(config).replace(f'"group_size": {GROUP}', f'"group_size": {size}')
    )
    change_config(folder, quantization_config=in_groups)
    return hf_model


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def texts(folder: Path, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), **OPTIONS | options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


PROMPTS = random_sequences(VOCAB, (5, 11))


@pytest.fixture(scope="module", params=list(FORMATS))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, str]:
    "A folder in a format, and transformers' model with the same numbers."
    folder = tmp_path_factory.mktemp("quantized")
    make_tiny("llama", folder)
    hf_model = quantize(folder, request.param)
    return folder, hf_model, request.param


def test_tokens_are_those_of_the_unpacked_model(checkpoint: tuple[Path, Any, str]) -> None:
    folder, hf_model, name = checkpoint
    method = FORMATS[name][0]["quant_method"]
    expected = [greedy(hf_model, prompt, 8) for prompt in PROMPTS]
    assert texts(folder, PROMPTS, quantization=method) == expected


@pytest.mark.parametrize("name", ["awq", "gptq in order", "gptq 8 bits", "compressed by row"])
def test_the_product_of_a_cpu(tmp_path: Path, name: str) -> None:
    "In float32 it is exact. In bfloat16 activations are of eight bits, and close."
    served = pytest.importorskip("teachvllm.cpu_kernels.grouped")
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **shape, **heads))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    hf_model = quantize(tmp_path, name, size=32)
    expected = [greedy(hf_model, prompt, 8) for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCAB)
    scores = {}
    for dtype in ("float32", "bfloat16"):
        with LLM(str(tmp_path), **OPTIONS | {"dtype": dtype, "max_logprobs": -1}) as llm:
            kinds = llm.apply_model(kinds_of_products)[0]
            (output,) = llm.generate([PROMPTS[1]], params, use_tqdm=False)
        weight = grouped.GroupedWeight(
            torch.zeros(64, 32, dtype=torch.uint8), torch.ones(64, 1), 8, 8
        )
        if served.form_of(weight, getattr(torch, dtype)) is None:
            continue
        assert kinds == {"PackedGroups"}
        rows = [
            [row[token].logprob for token in range(VOCAB)] for row in output.prompt_logprobs[1:]
        ]
        scores[dtype] = torch.tensor(rows)
    assert texts(tmp_path, PROMPTS) == expected
    with torch.inference_mode():
        right = hf_model(torch.tensor([PROMPTS[1]])).logits[0, :-1].log_softmax(-1)
    for dtype, found in scores.items():
        tolerance = 1e-3 if dtype == "float32" else 0.15
        torch.testing.assert_close(found, right, atol=tolerance, rtol=0)


def kinds_of_products(model: nn.Module) -> set[str]:
    "The classes by which a worker's quantized layers multiply."
    packed = [m.packed for m in model.modules() if isinstance(m, LinearBase) and m.weight is None]
    return {type(p).__name__ for p in packed}


@torch.inference_mode()
def test_two_ranks(checkpoint: tuple[Path, Any, str]) -> None:
    "Each reads its part of the packed tensors, and of the head its rows."
    folder, hf_model, _ = checkpoint
    config = make_config(str(folder))

    def tokens(parallel: ParallelState) -> tuple[list[int], int]:
        ranked = Ranked(hf_model, parallel)  # for its pages; the weights are those of the file
        model = get_model(config, make_context(config, parallel))
        ranked.model = model
        ranked.layers = list(attention_layers(model).values())
        layers = [m for m in model.modules() if isinstance(m, LinearBase)]
        kept = [m.packed for m in layers if m.weight is None]
        packed = [p.dequantize(torch.float32).numel() for p in kept]
        assert len(packed) == len(layers) - 1
        return ranked.greedy(PROMPTS[0], 8), sum(packed)

    ((alone, whole),) = run_ranks(tokens, 1)
    halves = run_ranks(tokens, 2)
    assert alone == greedy(hf_model, PROMPTS[0], 8)
    assert halves == [(alone, whole // 2)] * 2


def test_tied_heads_biases_and_what_is_left_out(tmp_path: Path) -> None:
    make_tiny("llama-tied-biased", tmp_path)
    hf_model = quantize(tmp_path, "compressed", left_out=("lm_head", "0.mlp.down_proj"))
    config = scheme(symmetric=False)
    config["ignore"] = ["lm_head", "re:.*layers.0.mlp.down_proj"]
    change_config(tmp_path, quantization_config=config)
    assert texts(tmp_path, PROMPTS) == [greedy(hf_model, prompt, 8) for prompt in PROMPTS]


def test_a_quantized_head(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    hf_model = quantize(tmp_path, "gptq", left_out=())
    change_config(tmp_path, quantization_config=gptq_config(lm_head=True))
    assert texts(tmp_path, PROMPTS) == [greedy(hf_model, prompt, 8) for prompt in PROMPTS]


def make_mixtral(folder: Path) -> Any:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=256,
    )
    model = MixtralForCausalLM(config).eval().float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return model


def test_experts(tmp_path: Path) -> None:
    make_mixtral(tmp_path)
    hf_model = quantize(tmp_path, "gptq", left_out=("lm_head", ".gate"))
    assert "model.layers.1.block_sparse_moe.experts.3.w2.qweight" in load_file(
        tmp_path / "model.safetensors"
    )
    assert texts(tmp_path, PROMPTS) == [greedy(hf_model, prompt, 8) for prompt in PROMPTS]


def test_a_stack_is_cut_into_experts() -> None:
    numbers = torch.randint(16, (96, 64), dtype=torch.uint8)
    scales, zeros = torch.rand(96, 2).half(), torch.randint(16, (96, 2), dtype=torch.uint8)
    for more in ({}, {"minima": torch.rand(96, 2)}, {"groups": torch.randperm(64) // 32}):
        stack = grouped.GroupedWeight(numbers, scales, zeros, 4, **more)
        parts = stack.chunk(3)
        whole = torch.cat([part.dequantize(torch.float32) for part in parts])
        assert torch.equal(whole, stack.dequantize(torch.float32))
        x = torch.randn(2, 64)
        assert torch.equal(torch.cat([part(x) for part in parts], 1), stack(x))


def test_only_chosen_experts_are_unpacked(tmp_path: Path) -> None:
    make_mixtral(tmp_path)
    quantize(tmp_path, "awq", left_out=("lm_head", ".gate"))
    config = make_config(tmp_path, dtype="float32")
    context = make_context(config)
    model = get_model(config, replace(context, kernels=KernelTable()))
    experts = model.model.layers[0].mlp.experts
    called: list[int] = []
    for i, packed in enumerate(experts.w13.packed):
        packed.register_forward_hook(lambda *_, i=i: called.append(i))
    logits = torch.tensor([[0.0, 5.0, 0.0, 4.0], [0.0, 4.0, 0.0, 5.0]])
    experts(torch.randn(2, 64), logits)
    assert called == [1, 3]


def round_like_int8(matrix: torch.Tensor) -> torch.Tensor:
    "What eight bits leave of a matrix, by rows, in groups of 32 where they are whole."
    w = matrix.numpy().astype(np.float64)
    group = 32 if w.shape[1] % 32 == 0 else w.shape[1]
    out = np.empty_like(w)
    for row in range(w.shape[0]):
        for first in range(0, w.shape[1], group):
            part = w[row, first : first + group]
            scale = np.float64(np.float16(np.abs(part).max() / 127))
            out[row, first : first + group] = np.rint(part / scale).clip(-127, 127) * scale
    return torch.from_numpy(out).float()


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "mixtral"])
def test_rounded_while_loaded(tmp_path: Path, name: str) -> None:
    "Layers, but not the embedding, the head, a router and experts."
    hf_model = make_mixtral(tmp_path) if name == "mixtral" else make_tiny(name, tmp_path)
    for path, parameter in hf_model.named_parameters():
        if parameter.dim() < 2 or any(
            part in path for part in ("embed", "lm_head", ".gate.", "experts")
        ):
            continue
        parameter.data = round_like_int8(parameter.data)
    found = texts(tmp_path, PROMPTS, quantization="int8")
    assert found == [greedy(hf_model, prompt, 8) for prompt in PROMPTS]


def test_rounded_weights_can_be_changed(tmp_path: Path) -> None:
    "`apply_model` gets them laid out plainly; afterwards they are rounded again."
    make_tiny("llama", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(str(tmp_path), **OPTIONS, quantization="int8") as llm:
        before = llm.generate([PROMPTS[0]], params, use_tqdm=False)[0].outputs[0].token_ids
        llm.apply_model(lambda model: model.model.layers[0].mlp.down_proj.weight.data.mul_(-30))
        after = llm.generate([PROMPTS[0]], params, use_tqdm=False)[0].outputs[0].token_ids
        llm.apply_model(lambda model: model.model.layers[0].mlp.down_proj.weight.data.div_(-30))
        again = llm.generate([PROMPTS[0]], params, use_tqdm=False)[0].outputs[0].token_ids
    assert before == again != after


def test_what_int8_is_not_for(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    with pytest.raises(NotSupportedYet, match="plain weights are rounded .* only to fp8 and int8"):
        texts(tmp_path, PROMPTS, quantization="awq")
    quantize(tmp_path, "awq")
    with pytest.raises(ValueError, match="does not match the quantization method"):
        texts(tmp_path, PROMPTS, quantization="int8")


def test_a_method_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny("llama", tmp_path)
    quantize(tmp_path, "awq")
    config = make_config(tmp_path, dtype="float32")
    assert quant_config_of(config).get_name() == "awq"
    halves = classmethod(lambda cls: [torch.float16])
    monkeypatch.setattr(grouped.AWQConfig, "get_supported_act_dtypes", halves)
    with pytest.raises(
        ValueError, match="dtype=float32 is not supported for quantization method a"
    ):
        quant_config_of(config)
    monkeypatch.undo()
    object.__setattr__(config.device_config, "device", "cuda")
    for capability, enough in (((6, 1), False), ((7, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        if enough:
            assert quant_config_of(config).get_name() == "awq"
        else:
            with pytest.raises(ValueError, match="Minimum capability: 70. Current capability: 61"):
                quant_config_of(config)


def test_a_sharded_state_stays_packed(tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    folder.mkdir()
    make_tiny("llama", folder)
    hf_model = quantize(folder, "awq")
    with LLM(str(folder), **OPTIONS) as llm:
        llm.collective_rpc("save_sharded_state", args=(str(tmp_path / "parts"),))
    (file,) = (tmp_path / "parts").glob("*.safetensors")
    assert any(name.endswith("qkv_proj.qweight") for name in load_file(file))
    found = texts(tmp_path / "parts", PROMPTS, load_format="sharded_state")
    assert found == [greedy(hf_model, prompt, 8) for prompt in PROMPTS]


MOVED: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "an older name": ("compressed symmetric", None, {}),
    "GPTQ's file": ("gptq", "quantize_config.json", {"quantization": "gptq_marlin"}),
    "AWQ's file": ("awq", "quant_config.json", {"quantization": "awq"}),
}


@pytest.mark.parametrize("case", list(MOVED))
def test_where_older_tools_wrote_it(tmp_path: Path, case: str) -> None:
    kind, file, options = MOVED[case]
    make_tiny("llama", tmp_path)
    hf_model = quantize(tmp_path, kind)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    stored = config.pop("quantization_config")
    if file:
        del stored["quant_method"]
        (tmp_path / file).write_text(json.dumps(stored))
    else:
        config["compression_config"] = stored
    path.write_text(json.dumps(config))
    found = texts(tmp_path, PROMPTS, **options)
    assert found == [greedy(hf_model, prompt, 8) for prompt in PROMPTS]


def test_what_says_nothing_of_the_numbers(tmp_path: Path) -> None:
    "Weights that are quantized, in a configuration that does not say it."
    make_tiny("llama", tmp_path)
    quantize(tmp_path, "gptq")
    change_config(tmp_path, quantization_config=None)
    with pytest.raises(ValueError, match="has no place: the model's configuration does not say"):
        LLM(str(tmp_path), **OPTIONS)
    make_tiny("llama", tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        ValueError, match="up_proj.weight is torch.float8_e4m3fn, a quantized weigh"
    ):
        LLM(str(tmp_path), **OPTIONS)


@pytest.mark.parametrize("kind", ["gptq", "compressed symmetric"])
def test_what_is_said_of_nothing(tmp_path: Path, kind: str) -> None:
    "Keys that change nothing, and a module that is left out."
    make_tiny("llama", tmp_path)
    hf_model = quantize(tmp_path, kind)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    if kind == "gptq":
        more = {"checkpoint_format": None, "dynamic": {"-:.*no_such_module": {}}}
    else:
        cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
        more = {"sparsity_config": {"format": "dense"}, "kv_cache_scheme": cache}
    change_config(tmp_path, quantization_config=config | more)
    found = texts(tmp_path, PROMPTS)
    assert found == [greedy(hf_model, prompt, 8) for prompt in PROMPTS]


def test_weights_stay_small() -> None:
    "In groups of 64: less than 0.31 of 16 bits."
    numbers = torch.randint(16, (64, 512), dtype=torch.uint8)
    zeros = torch.randint(16, (64, 8), dtype=torch.uint8)
    weight = grouped.GroupedWeight(numbers, torch.rand(64, 8).half(), zeros, 4)
    assert weight.nbytes < 0.31 * numbers.numel() * 2
    weight.to("meta")  # as a GPU's weights go to the host when the engine sleeps
    assert {weight.numbers.device.type, weight.scales.device.type} == {"meta"}


@pytest.mark.parametrize("bits", [4, 8])
def test_all_numbers_of_a_format(bits: int) -> None:
    numbers = np.arange(1 << bits).reshape(2, -1)
    unpacked = grouped.unpack_int32(torch.from_numpy(words(numbers, bits)), bits, 1)
    assert unpacked.tolist() == numbers.tolist()
    down = torch.from_numpy(words(numbers, bits).T.copy())
    assert grouped.unpack_int32(down, bits, 0).T.tolist() == numbers.tolist()


def test_the_packers_of_compressed_tensors() -> None:
    "Its own library packs, this one reads: signed numbers, along either dimension."
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    for bits in (4, 8):
        half = 1 << bits - 1
        signed = torch.randint(-half, half, (16, 24), dtype=torch.int8)
        for dim in (0, 1):
            packed = helpers.pack_to_int32(signed, bits, packed_dim=dim)
            assert (grouped.unpack_int32(packed, bits, dim).short() - half).equal(signed.short())


# What is refused


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bits": (gptq_config(3), "bits=3 is not supported yet, only 4, 8"),
    "group": (gptq_config(group_size=0), "group_size=0 is no group's size"),
    "no group": (gptq_config(group_size=None), "group_size=None is no group's size"),
    "a group that does not divide": (gptq_config(group_size=40), "qkv_proj: an element for 40"),
    "no bits": ({k: v for k, v in gptq_config().items() if k != "bits"}, "bits=None"),
    "dynamic": (gptq_config(dynamic={"+:.*up.*": {"bits": 8}}), "dynamic="),
    "a pattern": (gptq_config(dynamic={"-:(": {}}), r"dynamic has 're:\('"),
    "a list": (AWQ | {"modules_to_not_convert": "lm_head"}, "='lm_head' is no list of names"),
    "weights": (scheme() | {"config_groups": {"a": {"weights": [8]}}}, r"a: weights=\[8\]"),
    "a cache": (scheme() | {"kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme: num_bits=4"),
    "sparse": (scheme() | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config="),
    "version": (AWQ | {"version": "gemv"}, "version='gemv'"),
    "zero point": (AWQ | {"zero_point": False}, "zero_point=False"),
    "format": (scheme() | {"format": "marlin-24"}, "format='marlin-24'"),
    "no groups": (scheme() | {"config_groups": {}}, "config_groups is empty"),
    "strategy": (scheme(strategy="tensor"), "strategy='tensor'"),
    "parts of a stack": (scheme() | {"ignore": ["re:.*q_proj"]}, "qkv_proj"),
    "method": ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    make_tiny("llama", folder)
    quantize(folder, "gptq")
    return folder


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_config_that_is_refused(good: Path, case: str) -> None:
    config, message = REFUSED[case]
    change_config(good, quantization_config=config)
    with pytest.raises(ValueError, match=message):
        LLM(str(good), **OPTIONS)


def test_the_argument_must_agree(good: Path, tmp_path: Path) -> None:
    change_config(good, quantization_config=gptq_config())
    with pytest.raises(ValueError, match=r"model config \(gptq\) does not match .*\(awq\)"):
        LLM(str(good), quantization="awq", **OPTIONS)
    make_tiny("llama", tmp_path)
    with pytest.raises(NotSupportedYet, match="quantization='gptq': .* no quantization_config"):
        LLM(str(tmp_path), quantization="gptq", **OPTIONS)


def without(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


def as_float(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name].float()


def cut(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name][:-1].contiguous()


def beyond(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name] + 100


def nan(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name][0, 0] = torch.nan


def named_otherwise(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name.replace("scales", "weight_zero_point")] = tensors[name].clone()


SPOILED: dict[str, tuple[Callable[..., None], str, str]] = {
    "missing": (without, "mlp.down_proj.qzeros", "lacks 1 of .*down_proj.qzeros"),
    "a dtype": (as_float, "mlp.down_proj.qweight", "down_proj.qweight is torch.float32"),
    "a shape": (cut, "mlp.down_proj.scales", "down_proj.scales has shape"),
    "groups": (
        beyond,
        "mlp.down_proj.g_idx",
        "down_proj: columns belong to groups that are not there",
    ),
    "stacked": (beyond, "self_attn.k_proj.g_idx", "g_idx differs among matrices"),
    "a scale": (nan, "mlp.down_proj.scales", "down_proj: has scales that are NaN"),
    "surplus": (named_otherwise, "mlp.down_proj.scales", "weight_zero_point has no place"),
}


@pytest.mark.parametrize("case", list(SPOILED))
def test_a_checkpoint_that_is_spoiled(tmp_path: Path, case: str) -> None:
    make_tiny("llama", tmp_path)
    quantize(tmp_path, "gptq in order")
    tensors = load_file(tmp_path / "model.safetensors")
    spoil, name, message = SPOILED[case]
    spoil(tensors, f"model.layers.1.{name}")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        LLM(str(tmp_path), **OPTIONS)
