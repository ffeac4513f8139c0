"""Norm, gate, rotation and the write into the cache in Triton: equal to torch for whatever the
layers hand over, fewer launches a layer, the same tokens from an engine, compiled for real chips.
"""

import os
import subprocess
import sys
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen3Config

if not torch.cuda.is_available():  # Triton must know before it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")


from helpers import from_chapter, run_compiling  # noqa: E402

from teachvllm import LLM, SamplingParams  # noqa: E402
from teachvllm.attention.backend import AttentionMetadata  # noqa: E402
from teachvllm.attention.cpu import TorchSDPABackend  # noqa: E402
from teachvllm.gpu_kernels import fused_ops  # noqa: E402
from teachvllm.gpu_kernels import utils as triton_utils  # noqa: E402
from teachvllm.gpu_kernels.attention import TritonBackend  # noqa: E402
from teachvllm.gpu_kernels.utils import interpreted  # noqa: E402
from teachvllm.kernels import KERNELS, KernelTable, platform_kernels  # noqa: E402
from teachvllm.model_executor.layers import (  # noqa: E402
    ActAndMul,
    ModelContext,
    RMSNorm,
    get_act_fn,
    use_kernels,
)
from teachvllm.model_executor.models.gemma import GemmaRMSNorm  # noqa: E402
from teachvllm.model_executor.models.llama import (  # noqa: E402
    LlamaDecoderLayer,
)
from teachvllm.model_executor.models.qwen import Qwen3DecoderLayer  # noqa: E402
from teachvllm.model_executor.rotary_embedding import ApplyRotaryEmb, apply_rotary_emb  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUSED = dict(KERNELS["cuda"])
NAMES = {name: where for name, where in FUSED.items() if ".fused_ops." in where}
BEFORE = {name: where for name, where in FUSED.items() if name not in NAMES}


# Equal to torch

DTYPE = st.sampled_from(fused_ops.DTYPES)
TOKENS = st.sampled_from([1, 2, 5, 17])


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def assert_rounded_once(got: torch.Tensor, exact: torch.Tensor, scale: Any = None) -> None:
    """Off by half a step of its dtype; in float32 by a few, for sums are rounded on the way.

    The interpreter cuts bfloat16 off instead of rounding it. `scale`: what the step is a share of.
    """
    eps = torch.finfo(got.dtype).eps
    if got.dtype == torch.float32:
        eps *= 8
    elif not (interpreted() and got.dtype == torch.bfloat16):
        eps *= 0.55
    else:
        eps *= 1.1
    least = torch.finfo(got.dtype).tiny + (1e-7 if got.dtype != torch.float32 else 1e-6)
    limit = eps * (exact.abs() if scale is None else scale) + least
    assert ((got.double() - exact).abs() <= limit).all()  # False for NaN


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    DTYPE,
    TOKENS,
    st.sampled_from([1, 16, 33, 100, 576, 1000]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.01, 1.0, 300.0]),
)
def test_norm(dtype, n, size, with_residual, sliced, spread):
    "Squares of 300 are more than float16 can hold; a row may be part of a wider one."
    x = randn(n, size + 7, dtype=dtype) * spread
    x = x[:, 3 : size + 3] if sliced else x[:, :size].contiguous()
    added = randn(n, size + 2, seed=1, dtype=dtype)[:, :size] * spread if with_residual else None
    weight = randn(size, seed=2, dtype=dtype)
    assert fused_ops.rms_norm.serves(x, weight, added)
    normed, total = fused_ops.rms_norm(x, weight, 1e-5, added)
    assert normed.dtype == total.dtype == dtype and normed.is_contiguous()
    if added is None:
        assert total is x
    else:
        assert_rounded_once(total, x.double() + added.double(), (x.abs() + added.abs()).double())
    exact = F.rms_norm(total.double(), (size,), weight.double(), 1e-5)
    assert_rounded_once(normed, exact)


@pytest.mark.parametrize("dtype", fused_ops.DTYPES)
@pytest.mark.parametrize("size", [16, 33])
def test_norm_of_heads_that_lie_between_others(dtype, size):
    "As Qwen3's queries and keys do: parts of one tensor, with the values behind them."
    qkv = randn(5, 8, size, dtype=dtype)
    weight = randn(size, seed=1, dtype=dtype)
    for heads in (slice(0, 4), slice(4, 6), slice(0, 1), slice(0, 8)):
        x = qkv[:, heads]
        assert fused_ops.rms_norm.serves(x, weight)
        normed, same = fused_ops.rms_norm(x, weight, 1e-6)
        assert same is x and normed.shape == x.shape
        assert_rounded_once(normed, F.rms_norm(x.double(), (size,), weight.double(), 1e-6))


@pytest.mark.parametrize("dtype", fused_ops.DTYPES)
def test_gemmas_norm_has_a_weight_in_float32(dtype):
    "Its layer asks for the same kernel, and what comes is rounded once, as by torch's form."
    norm = GemmaRMSNorm(40, 1e-6).to(DEVICE)
    norm.weight.data.copy_(1 + randn(40, seed=1) / 1000)  # 16 bits would lose most of it
    x, added = randn(5, 40, dtype=dtype), randn(5, 40, seed=2, dtype=dtype)
    assert fused_ops.rms_norm.serves(x, norm.weight, added)
    for table in (KernelTable(), KernelTable(NAMES)):
        norm.kernels = table
        normed, total = norm(x, added)
        assert_rounded_once(total, x.double() + added.double(), (x.abs() + added.abs()).double())
        exact = F.rms_norm(total.double(), (40,), norm.weight.double(), 1e-6)
        assert normed.dtype == dtype
        assert_rounded_once(normed, exact)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    DTYPE,
    TOKENS,
    st.sampled_from([1, 16, 33, 1500]),
    st.sampled_from(sorted(fused_ops.GATES)),
    st.booleans(),
)
def test_gate(dtype, n, size, name, sliced):
    x = 3 * randn(n, 2 * size + 8, dtype=dtype)
    x = x[:, 8:] if sliced else x[:, 8:].contiguous()
    assert fused_ops.sigmoid_and_mul.serves(x, name)
    gate, up = x.double().chunk(2, dim=-1)
    exact = get_act_fn(name)(gate) * up
    with np.errstate(over="ignore"):  # what the interpreter computes with
        got = fused_ops.sigmoid_and_mul(x, name)
    assert got.dtype == dtype and got.is_contiguous()
    assert_rounded_once(got, exact, exact.abs() + 1e-6 * (gate * up).abs())


def test_numbers_at_the_ends():
    "Infinite powers do no harm; NaN stays NaN, and in its row."
    gates = torch.tensor([-1e30, -200.0, 200.0, 1e30, torch.nan, 0.0], device=DEVICE)
    x = torch.cat((gates, torch.ones(6, device=DEVICE)))[None]
    with np.errstate(over="ignore", invalid="ignore"):
        got = fused_ops.sigmoid_and_mul(x, "silu")
    torch.testing.assert_close(got, F.silu(gates)[None], equal_nan=True)
    rows = randn(3, 40)
    rows[1, 7] = torch.nan
    normed, _ = fused_ops.rms_norm(rows, rows.new_ones(40), 1e-5, rows)
    assert normed[[0, 2]].isfinite().all() and normed[1].isnan().all()


def angles_of(n: int, rotary_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    "Cosine, and sine with its sign, as chapter 31 has them; scaled as YaRN's."
    angles = randn(n, 1, rotary_dim // 2, seed=3)
    cos, sin = 1.2 * angles.cos(), 1.2 * angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    DTYPE,
    TOKENS,
    st.sampled_from([(16, 16), (20, 12), (33, 32), (80, 32), (64, 64), (6, 2)]),
    st.sampled_from([(1, 1), (4, 4), (6, 2), (9, 3), (8, 1)]),
    st.sampled_from([(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (4, 3, 0, 2, 1)]),
    st.sampled_from([1, 3, 16]),
)
def test_rotation_and_write(dtype, n, sizes, heads, order, block_size):
    """Alone, and with the write: into slots anywhere in a cache of any memory order, and nowhere
    else; padding, of slot -1, nowhere.
    """
    size, rotary_dim = sizes
    num_heads, num_kv_heads = heads
    wide = randn(n, num_heads + 2 * num_kv_heads + 1, size, dtype=dtype)
    qkv = wide[:, 1:]  # rows are further apart than they are long
    qk, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), 1)
    cos, sin = angles_of(n, rotary_dim, dtype)
    exact = apply_rotary_emb(qk.double(), (cos.double(), sin.double()))
    scale = apply_rotary_emb(qk.double().abs(), (cos.double().abs(), sin.double().abs()))
    assert fused_ops.rotary_embedding.serves(qk, cos, sin)
    turned = fused_ops.rotary_embedding(qk, cos, sin)
    assert turned.is_contiguous() and turned.dtype == dtype
    assert_rounded_once(turned, exact, scale)
    assert torch.equal(turned[..., rotary_dim:], qk[..., rotary_dim:])

    shape = (2, n // block_size + 2, block_size, num_kv_heads, size)
    cache = torch.full([shape[axis] for axis in order], torch.nan, device=DEVICE, dtype=dtype)
    cache = cache.permute([order.index(axis) for axis in range(5)])
    places = torch.randperm(shape[1] * block_size, generator=torch.Generator().manual_seed(n))
    slots = places[:n].to(DEVICE)
    slots[n // 2 :: 4] = -1
    expected, used = cache.clone().flatten(1, 2), slots >= 0
    expected[0, slots[used]], expected[1, slots[used]] = turned[used, num_heads:], v[used]
    assert fused_ops.rotary_and_cache.serves(qkv, cos, sin, cache, slots)
    query = fused_ops.rotary_and_cache(qkv, cos, sin, cache, slots)
    assert torch.equal(query, turned[:, :num_heads]) and query.is_contiguous()
    torch.testing.assert_close(cache.flatten(1, 2), expected, rtol=0, atol=0, equal_nan=True)


def test_nothing_to_do():
    "A step may have no tokens for a worker."
    if not interpreted():
        pytest.skip("no launch is asked for on a GPU without a token")
    cos, sin = angles_of(0, 16, torch.float32)
    assert fused_ops.rms_norm(randn(0, 8), randn(8), 1e-5, randn(0, 8))[0].shape == (0, 8)
    assert fused_ops.sigmoid_and_mul(randn(0, 8), "silu").shape == (0, 4)
    assert fused_ops.rotary_embedding(randn(0, 3, 16), cos, sin).shape == (0, 3, 16)


# What they refuse


def test_what_a_kernel_cannot_do_is_left_to_torch():
    table = KernelTable(NAMES)
    x, weight = randn(3, 40), randn(40)
    assert table.get("rms_norm", x, weight, x) and table.get("rms_norm", x, weight, None)
    for args in (
        (x.double(), weight.double()),
        (x, weight.half()),
        (x, weight[:20]),
        (x[:, ::2], weight[:20]),
        (x, weight, x.half()),
        (x, weight, x[:2]),
        (x, randn(80)[::2]),
        (randn(1, 2, 40).transpose(1, 2), randn(2)),
        (randn(1, fused_ops.MAX_SIZE + 1), randn(fused_ops.MAX_SIZE + 1)),
        (randn(3, 2, 40), weight, randn(3, 2, 40)),
    ):
        assert table.get("rms_norm", *args) is None, [a.shape for a in args]
    for gate in ((x, "relu"), (x.double(), "silu"), (x.T, "silu"), (randn(3, 41), "silu")):
        assert table.get("act_and_mul", *gate) is None
    qkv, (cos, sin) = randn(3, 8, 16), angles_of(3, 16, torch.float32)
    assert table.get("rotary_embedding", qkv, cos, sin)
    for args in (
        (qkv.half(), cos, sin),
        (qkv, cos[:2], sin[:2]),
        (qkv, cos[..., :3], sin[..., :3]),
        (qkv[..., :8], cos, sin),
        (qkv.transpose(0, 1), *angles_of(8, 16, torch.float32)),
        (qkv[:, 0], cos, sin),
    ):
        assert table.get("rotary_embedding", *args) is None
    cache, slots = torch.zeros(2, 2, 4, 2, 16, device=DEVICE), torch.arange(3, device=DEVICE)
    assert table.get("rotary_and_cache", qkv, cos, sin, cache, slots)
    for more in (
        (cache.to(torch.float8_e5m2), slots),
        (cache.half(), slots),
        (cache, slots[:2]),
        (cache[..., :8], slots),
        (cache[:, :, :, :, None].squeeze(4)[0], slots),
        (torch.zeros(2, 2, 4, 4, 16, device=DEVICE), slots),
    ):
        assert table.get("rotary_and_cache", qkv, cos, sin, *more) is None


@torch.inference_mode()
def test_the_layers_use_them():
    "Through the doors that they have: the same numbers with the table as without."
    for layer, args in (
        (RMSNorm(40, 1e-5), (randn(3, 40),)),
        (RMSNorm(40, 1e-5), (randn(3, 40), randn(3, 40, seed=1))),
        (ActAndMul("silu"), (randn(3, 40),)),
        (ActAndMul("relu"), (randn(3, 40),)),
        (ApplyRotaryEmb(), (randn(3, 4, 16), angles_of(3, 8, torch.float32))),
    ):
        for parameter in layer.parameters():
            parameter.data = randn(*parameter.shape, seed=2)
        plain = layer(*args)
        use_kernels(layer, KernelTable(NAMES))
        torch.testing.assert_close(layer(*args), plain)


# Launches


# how the chapter counts
*_, Launches = from_chapter("gpu/03_fused_ops", "Launches")

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@torch.inference_mode()
def decode_step(
    layer_cls: type, names: dict[str, str], config: Any, is_first: bool = False
) -> tuple[list[str], torch.Tensor]:
    "What a layer launches for three sequences with one new token each, and the stream behind it."
    table = KernelTable(names)
    context = ModelContext(TritonBackend, 16, torch.float32, kernels=table)
    with torch.device(DEVICE):
        layer = layer_cls(config, context, 0)
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(0.1 * randn(*parameter.shape, seed=i))
        starts, lens = torch.arange(4), torch.tensor([3, 20, 7])
        blocks = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32)
        slots = torch.tensor([2, 51, 70])
        cache = torch.zeros(2, 8, 2, 16, 16).transpose(2, 3)
    host = starts.cpu().numpy(), lens.cpu().numpy()
    meta = AttentionMetadata(starts, lens, blocks, slots, 3, *host)
    use_kernels(layer, table)
    x = randn(3, 64)
    residual = None if is_first else randn(3, 64, seed=1)
    cos_sin = angles_of(3, 16, torch.float32)
    with Launches() as seen:
        pair = layer(x, residual, cos_sin, cache, meta)
    return seen.names, sum(pair)


@pytest.mark.parametrize("is_first", [False, True])
def test_launches_of_a_layer(is_first):
    "15 by torch, and 9 fused; the first has no sum of the layer before it to add."
    config = LlamaConfig(**SIZES)
    before, plain = decode_step(LlamaDecoderLayer, BEFORE, config, is_first)
    after, fused = decode_step(LlamaDecoderLayer, FUSED, config, is_first)
    if interpreted():  # on a GPU attention may be split, and merged: one more
        assert (len(before), len(after)) == (15 - is_first, 9)
    assert len(before) - len(after) == 6 - is_first
    assert set(after) - {"merge_splits"} == {
        "norm_kernel",
        "linear",
        "rotary_kernel",
        "unified_attention",
        "gate_kernel",
    }
    torch.testing.assert_close(fused, plain)


def test_launches_of_a_relative():
    """Qwen3's norms of heads go through the same kernel; it turns heads behind them, and so writes
    apart: 18, then 13.
    """
    config = Qwen3Config(**SIZES)
    before, plain = decode_step(Qwen3DecoderLayer, BEFORE, config)
    after, fused = decode_step(Qwen3DecoderLayer, FUSED, config)
    assert len(before) - len(after) == 5 and after.count("norm_kernel") == 4
    torch.testing.assert_close(fused, plain)


def test_a_backend_that_writes_in_its_own_way_is_asked():
    "The kernel writes to plain slots; a backend must say that its cache has them."
    config = LlamaConfig(**SIZES)
    with patch.object(TritonBackend, "fused_rope_kvcache_supported", False):
        apart, plain = decode_step(LlamaDecoderLayer, FUSED, config)
    together, fused = decode_step(LlamaDecoderLayer, FUSED, config)
    assert "write_kernel" in apart and len(apart) == len(together) + 1
    torch.testing.assert_close(fused, plain)


# In an engine

OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "device": DEVICE,
    "num_gpu_blocks_override": 16,
    "enforce_eager": True,
}


def serve(path: Any, names: dict[str, str]) -> Any:
    "The tokens that an engine writes whose table has these names, and how often it launched ours."
    params = [
        SamplingParams(temperature=heat, seed=1, max_tokens=6, ignore_eos=True)
        for heat in (0.0, 0.0, 0.8)
    ]
    counts = {"norm_kernel": 0, "gate_kernel": 0, "rotary_kernel": 0}

    class Counting:
        def __init__(self, name: str):
            self.name = name
            self.kernel = getattr(fused_ops, name)

        def __getitem__(self, grid):
            counts[self.name] += 1
            return self.kernel[grid]

    with (
        patch.dict(KERNELS, {DEVICE: names}),
        patch.multiple(fused_ops, **{name: Counting(name) for name in counts}),
        LLM(str(path), **OPTIONS) as llm,
    ):
        (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        assert runner.context.attn_backend is TritonBackend
        counts.update(dict.fromkeys(counts, 0))  # what it launched to be ready
        prompts = [[1, 2, 3], [5], [*range(8, 29)]]
        answers = llm.generate(prompts, params, use_tqdm=False)
        assert not runner.context.kernels.given_up
    return [answer.outputs[0].token_ids for answer in answers], counts


def test_an_engine_writes_the_same_tokens(tmp_path):
    "Prompts and decodes together, greedy and sampled."
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    plain, none = serve(tmp_path, BEFORE)
    assert not any(none.values())
    table, counts = serve(tmp_path, FUSED)
    assert table == plain
    steps = counts["gate_kernel"] // 2  # two layers
    expected = {"norm_kernel": 5 * steps, "gate_kernel": 2 * steps, "rotary_kernel": 2 * steps}
    assert steps >= 6 and counts == expected


def test_a_relative_writes_the_same_tokens(tmp_path):
    Qwen3Config(**SIZES).save_pretrained(tmp_path)
    plain, _ = serve(tmp_path, BEFORE)
    table, counts = serve(tmp_path, FUSED)
    assert table == plain and counts["norm_kernel"] == 9 * counts["gate_kernel"] // 2


def test_triton_that_cannot_launch_is_given_up(tmp_path):
    "It is imported, and finds no C compiler at its first launch: the engine starts with torch."

    class CannotLaunch:
        def __getitem__(self, grid):
            raise RuntimeError("Failed to find C compiler")

    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    with (
        patch.dict(KERNELS, {DEVICE: FUSED}),
        patch.object(fused_ops, "rotary_kernel", CannotLaunch()),
    ):
        with LLM(str(tmp_path), **OPTIONS) as llm:
            (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
            assert runner.context.attn_backend is TorchSDPABackend
            assert not any(runner.context.kernels.find(name) for name in FUSED)
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            (output,) = llm.generate([1, 2, 3], params, use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 3


# Who can run them


def test_who_can_run_them():
    "A CPU's table is as it was; a GPU's has them if Triton can run there."
    assert not any("gpu_kernels" in name for name in platform_kernels("cpu").names.values())
    with patch.object(triton_utils, "interpreted", lambda: False):
        for capability, runs in (((7, 0), False), ((7, 5), True), ((9, 0), True)):
            with patch("torch.cuda.get_device_capability", return_value=capability):
                found = {name: platform_kernels("cuda:0").find(name) for name in NAMES}
                assert all(found.values()) == any(found.values()) == runs
        with patch.dict(sys.modules, {"teachvllm.gpu_kernels.fused_ops": None}):
            assert platform_kernels("cuda:0").find("rms_norm") is None


def test_without_the_interpreter_a_tensor_on_the_cpu_is_refused():
    with patch.object(fused_ops, "interpreted", lambda: False):
        x = torch.zeros(2, 8)
        assert not fused_ops.rms_norm.serves(x, x[0]) and not fused_ops.sigmoid_and_mul.serves(
            x, "silu"
        )


# Real chips

COMPILE = """
import torch
from teachvllm.gpu_kernels import fused_ops
from teachvllm.gpu_kernels.ladder import compiling_for
from teachvllm.gpu_kernels.sass import machine_code

def launch(dtype):
    for size in (576, 4096, fused_ops.MAX_SIZE):
        row = torch.empty(3, size, dtype=dtype)
        fused_ops.rms_norm(row, row[0], 1e-5, row)
    heads = torch.empty(3, 6, 64, dtype=dtype)[:, :4]
    fused_ops.rms_norm(heads, heads[0, 0], 1e-5)
    fused_ops.sigmoid_and_mul(torch.empty(3, 2 * 14336, dtype=dtype), "silu")
    fused_ops.sigmoid_and_mul(torch.empty(3, 2 * 1530, dtype=dtype), "gelu_new")
    for heads, kv_heads, size, rotary_dim in ((32, 8, 128, 128), (9, 3, 64, 64), (8, 2, 80, 32)):
        qkv = torch.empty(3, heads + 2 * kv_heads, size, dtype=dtype)
        angle = torch.empty(3, 1, rotary_dim, dtype=dtype)
        cache = torch.empty(2, 4, kv_heads, 16, size, dtype=dtype).transpose(2, 3)
        slots = torch.zeros(3, dtype=torch.int64)
        fused_ops.rotary_embedding(qkv[:, : heads + kv_heads], angle, angle)
        fused_ops.rotary_and_cache(qkv, angle, angle, cache, slots)

for capability in (75, 80, 89, 90):
    for dtype in (torch.float32, torch.float16 if capability == 75 else torch.bfloat16):
        if capability == 89 and dtype == torch.float32:
            continue  # as for 80
        with compiling_for(capability) as made:
            launch(dtype)
        for kernel in made:
            assert len(kernel.asm["cubin"]) > 1000 and kernel.metadata.shared <= 48 * 1024
            name = kernel.metadata.name
            read = capability in (75, 90) and dtype != torch.float32 and name != "rotary_kernel"
            print("made", name, machine_code(kernel).load_width if read else "")
"""


def test_they_compile_for_real_chips_and_spill_nothing(tmp_path):
    "The assembler's own words, from a cache that is empty, so that it assembles every kernel."
    child = run_compiling("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path), TRITON_DUMP_PTXAS_LOG="1")
    lines = (child.stdout + child.stderr).splitlines()
    spills = [line for line in lines if "spill stores" in line]
    assert sum(line.startswith("made ") for line in lines) == len(spills) == 7 * 12
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in spills)
    # a row of 4,096 or of 14,336 comes 16 bytes at a time
    for name in ("norm_kernel", "gate_kernel"):
        assert sum(line == f"made {name} 16" for line in lines) >= 2


def test_nothing_imports_triton_for_them():
    code = (
        "import sys; sys.modules['triton'] = None; import teachvllm.worker.model_runner; from "
        "teachvllm.kernels import platform_kernels; "
        "assert platform_kernels('cuda:0').find('rms_norm') is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=800)
