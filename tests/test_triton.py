"""The Triton backend: equal to the oracle on any batch, and compiled, without a GPU, for the chips
that it ships for.

Without a GPU the kernels run in Triton's interpreter, and a child process (this file, started as a
program) compiles.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and __name__ != "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
triton = pytest.importorskip("triton")

import numpy as np  # noqa: E402
from helpers import TINY, VOCAB, compiling_env, make_tiny, random_prompts  # noqa: E402
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import teachvllm  # noqa: E402
from teachvllm.attention.backend import AttentionMetadata, ReferenceBackend, get_attn_backend  # noqa: E402
from teachvllm.gpu_kernels import attention as ours  # noqa: E402
from teachvllm.gpu_kernels import utils as triton_utils  # noqa: E402
from teachvllm.gpu_kernels.attention import (  # noqa: E402
    DeviceProperties,
    TritonBackend,
    choose_tiles,
    num_splits,
)
from teachvllm.gpu_kernels.ladder import compiling_for  # noqa: E402
from teachvllm.gpu_kernels.sass import machine_code, resources  # noqa: E402
from teachvllm.gpu_kernels.utils import interpreted  # noqa: E402

# bytes a program can have
SHARED_MEMORY = {(7, 5): 65536, (8, 0): 166912, (8, 9): 101376, (9, 0): 232448}


class WithoutSplits(TritonBackend):
    max_splits = 1


class Unpacked(TritonBackend):
    pack_heads = False


# Equal to the oracle


@dataclass(frozen=True)
class Case:
    "A batch: decodes first, then sequences with any number of new tokens."

    query_lens: list[int]
    past: list[int]  # tokens that each sequence has in the cache already
    heads: tuple[int, int] = (4, 2)
    head_size: int = 64
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    dtype: torch.dtype = torch.float32
    cls: type[TritonBackend] = TritonBackend
    # whose tiles are taken; None: the real GPU's, and interpreted (9, 0)
    capability: tuple[int, int] | None = None
    num_padding: int = 0  # rows that only fill up the batch (of nothing but decodes)
    seed: int = 0


@dataclass
class Batch:
    "Its tensors. `clean` and `clean_table` have no poison, for the oracle."

    q: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cache: torch.Tensor
    meta: AttentionMetadata
    clean: torch.Tensor
    clean_meta: AttentionMetadata


def make_batch(case: Case, beyond: int | None = None) -> Batch:
    """Random tensors of a case, in a cache that is NaN wherever the kernel has nothing to look for.

    That is past a sequence's end, in free blocks and, under a window, in blocks that have left it.
    Block tables name the block `beyond` (None: one that is NaN) where no entry must be used.
    """
    g = torch.Generator().manual_seed(case.seed)
    seq_lens = [n + past for n, past in zip(case.query_lens, case.past, strict=True)]
    need = [-(-n // case.block_size) for n in seq_lens]
    size = case.block_size
    ids = torch.randperm(sum(need) + 2, generator=g)
    order = TritonBackend.get_kv_cache_stride_order()
    shape = TritonBackend.get_kv_cache_shape(len(ids), size, case.heads[1], case.head_size)
    clean = torch.randn([shape[a] for a in order], generator=g).to(DEVICE, case.dtype)
    clean = clean.permute([order.index(a) for a in range(5)])
    cache = torch.full_like(clean, torch.nan)
    never = int(ids[-1]) if beyond is None else beyond
    clean_table = torch.zeros(len(need), max(need) + 2, dtype=torch.int32)
    table = torch.full_like(clean_table, never)
    slots = []
    at = 0
    for i, (n, new) in enumerate(zip(seq_lens, case.query_lens, strict=True)):
        clean_table[i, : need[i]] = ids[at : at + need[i]]
        at += need[i]
        # blocks given away
        behind = 0 if case.window is None else max(0, n - new + 1 - case.window) // size
        table[i, behind : need[i]] = clean_table[i, behind : need[i]]
        token = torch.arange(behind * size, n)
        where = clean_table[i, token // size].long().to(DEVICE), (token % size).to(DEVICE)
        cache[:, where[0], where[1]] = clean[:, where[0], where[1]]
        slots += (clean_table[i, token // size].long() * size + token % size)[
            len(token) - new :
        ].tolist()
    qkv = torch.randn(
        len(slots) + case.num_padding,
        case.heads[0] + 2 * case.heads[1],
        case.head_size,
        generator=g,
    )
    qkv[len(slots) :] = torch.nan
    decodes = next((i for i, n in enumerate(case.query_lens) if n != 1), len(need))
    metas = []
    for blocks in (table, clean_table):
        rows = [*case.query_lens, *[1] * case.num_padding]
        start = torch.tensor([0, *rows]).cumsum(0)
        lens = torch.tensor([*seq_lens, *[0] * case.num_padding])
        blocks = torch.cat(
            (blocks, torch.full((case.num_padding, blocks.shape[1]), never, dtype=torch.int32))
        )
        tensors = (start, lens, blocks, torch.tensor(slots + [-1] * case.num_padding))
        cpu: dict[str, Any] = {"query_start_loc_cpu": start.numpy(), "seq_lens_cpu": lens.numpy()}
        metas.append(
            AttentionMetadata(*(t.to(DEVICE) for t in tensors), decodes + case.num_padding, **cpu)
        )
    q, key, value = qkv.to(DEVICE, case.dtype).split(
        (case.heads[0], case.heads[1], case.heads[1]), 1
    )
    return Batch(q, key, value, cache, metas[0], clean, metas[1])


def device_of(case: Case) -> DeviceProperties:
    """The real one on a GPU, so that keys are split as they are there; if asked, with tiles of
    another capability.
    """
    if interpreted():
        capability = case.capability or (9, 0)
        return DeviceProperties(capability, 1, SHARED_MEMORY[capability])
    real = ours.get_device_properties()
    if case.capability is None:
        return real
    memory = min(real.shared_memory, SHARED_MEMORY[case.capability])
    return replace(real, capability=case.capability, shared_memory=memory)


def bits(x: torch.Tensor) -> torch.Tensor:
    "Numbers as they lie in memory, so that NaN equals NaN."
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def check(case: Case, beyond: int | None = None) -> None:
    """Write and attend as the engine does, and compare with the oracle.

    Weights and output are rounded to the dtype: 2.1 u Σ p·|v| bounds that (notebook 22). The
    interpreter cuts bfloat16 off instead of rounding it.
    """
    batch = make_batch(case, beyond)
    n = len(batch.q) - case.num_padding
    size = case.block_size
    config = (
        case.heads[0],
        case.head_size,
        case.heads[1],
        case.head_size**-0.5,
        case.window,
        case.soft_cap,
    )
    chip = device_of(case)
    with mock.patch.object(ours, "get_device_properties", lambda: chip):
        backend = case.cls(*config)
        oracle = ReferenceBackend(*config)
    where = batch.meta.slot_mapping[:n] // size, batch.meta.slot_mapping[:n] % size
    expected = batch.cache.clone()
    expected[:, where[0], where[1]] = torch.stack((batch.key[:n], batch.value[:n]))
    backend.build(batch.meta, size)
    backend.do_kv_cache_update(batch.key, batch.value, batch.cache, batch.meta)
    assert torch.equal(bits(batch.cache), bits(expected)), (
        "written elsewhere than into the slots, or not all"
    )
    out = backend.forward(batch.q, batch.cache, batch.meta)
    assert out.shape == batch.q.shape and out.dtype == case.dtype
    assert torch.equal(bits(batch.cache), bits(expected)), "attention wrote into the cache"
    batch.clean[:, where[0], where[1]] = torch.stack((batch.key[:n], batch.value[:n]))
    clean = batch.clean.float()
    q = batch.q[:n].float()
    meta = batch.clean_meta
    meta.query_start_loc = meta.query_start_loc[: len(case.past) + 1]
    meta.seq_lens = meta.seq_lens[: len(case.past)]
    want, spread = (
        oracle.forward(q, kv, meta) for kv in (clean, torch.stack((clean[0], clean[1].abs())))
    )
    u = torch.finfo(case.dtype).eps / (1 if interpreted() and case.dtype == torch.bfloat16 else 2)
    assert ((out[:n].float() - want).abs() <= 2.1 * u * spread + 5e-6).all()  # False for NaN


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_decodes = draw(st.integers(0, 3))
    others = draw(st.lists(st.integers(1, 45), min_size=num_decodes == 0, max_size=2))
    query_lens = [1] * num_decodes + others
    lengths = st.sampled_from([0, 1, 64, 140]) | st.integers(0, 140)
    past = draw(st.lists(lengths, min_size=len(query_lens), max_size=len(query_lens)))
    return Case(
        query_lens,
        past,
        heads=draw(st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 2), (8, 1)])),
        head_size=draw(st.sampled_from([64, 16, 80, 33])),
        block_size=draw(st.sampled_from([16, 1, 3, 32])),
        window=draw(st.sampled_from([None, 1, 7, 40])),
        soft_cap=draw(st.sampled_from([None, 2.0])),
        cls=draw(st.sampled_from([TritonBackend, WithoutSplits, Unpacked])),
        # a T4 has smaller tiles, and gathers prompts
        capability=draw(st.sampled_from([None, (7, 5)])),
        seed=draw(st.integers(0, 99)),
    )


@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # the interpreter is too slow to look for a smaller example
)
@given(cases())
def test_equals_the_oracle_on_random_batches(case: Case) -> None:
    check(case)


MIXED = {"query_lens": [1, 1, 5, 40], "past": [90, 0, 30, 0]}
HEAD_SIZES = [64, 80, 96, 112, 128, 192, 256, 1, 5, 40]
BLOCK_SIZES = [16, 32, 64, 128, 1, 7]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("index", range(12))
def test_head_sizes_block_sizes_dtypes(index: int) -> None:
    sizes = (HEAD_SIZES[index % 10], BLOCK_SIZES[index % 6])
    check(
        Case(
            **MIXED,
            head_size=sizes[0],
            block_size=sizes[1],
            dtype=DTYPES[index % 3],
            window=[None, 20][index % 2],
        )
    )


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("cls", [TritonBackend, WithoutSplits, Unpacked])
def test_ablations_in_16_bits(cls: type[TritonBackend], dtype: torch.dtype) -> None:
    check(Case([1, 3], [150, 20], (6, 2), soft_cap=3.0, dtype=dtype, cls=cls))


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 12])
def test_a_t4_gathers_prompts(window: int | None, soft_cap: float | None) -> None:
    check(Case(**MIXED, window=window, soft_cap=soft_cap, capability=(7, 5), block_size=8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_that_start_in_a_later_tile(dtype: torch.dtype) -> None:
    "A program's last tokens see nothing of the first tile that it reads."
    check(Case([120], [10], (2, 2), head_size=128, window=5, dtype=dtype))


def test_many_query_heads_share_a_kv_head() -> None:
    check(Case([1, 9], [40, 3], (71, 1), head_size=16))


def test_block_ids_beyond_the_cache_are_not_followed() -> None:
    check(Case(**MIXED), beyond=10**6)
    check(Case(**MIXED, window=10, block_size=4), beyond=-1)


@pytest.mark.parametrize("cls", [TritonBackend, WithoutSplits])
def test_padding_rows_write_nowhere_and_disturb_nobody(cls: type[TritonBackend]) -> None:
    "A CUDA graph of five rows, replayed for two sequences: slots of -1, lengths of 0."
    check(Case([1, 1], [40, 7], num_padding=3, cls=cls), beyond=10**6)


@pytest.mark.gpu(real=True)  # too large to be interpreted
@pytest.mark.parametrize("seed", range(20))
def test_large_batches_on_a_gpu(seed: int) -> None:
    rng = np.random.default_rng(seed)
    query_lens = [1] * int(rng.integers(0, 30)) + [
        int(n) for n in rng.integers(1, 500, rng.integers(1, 5))
    ]
    past = [int(n) for n in rng.integers(0, 3000, len(query_lens))]
    real = ours.get_device_properties().capability
    dtype = DTYPES[seed % 3] if real >= (8, 0) else DTYPES[2 * (seed % 2)]
    heads = [(32, 8), (9, 3), (16, 16)][seed % 3]
    head_size = [128, 64, 80, 256][seed % 4]
    check(
        Case(query_lens, past, heads, head_size, 16, [None, 700][seed % 2], dtype=dtype, seed=seed)
    )


@pytest.mark.gpu(real=True)  # too large to be interpreted
@pytest.mark.parametrize("window", [None, 4500])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("num_seqs", [1, 2, 3, 4])
def test_split_keys_on_a_gpu(num_seqs: int, dtype: torch.dtype, window: int | None) -> None:
    """A few long sequences cannot fill a chip: several programs share the keys of each, and short
    ones leave splits empty.
    """
    with mock.patch.object(ours, "num_splits", wraps=num_splits) as asked:
        check(
            Case(
                [1] * num_seqs,
                [5000, 17, 4999, 0][:num_seqs],
                (8, 2),
                128,
                window=window,
                dtype=dtype,
            )
        )
    assert asked.call_count and all(num_splits(*call.args) > 1 for call in asked.call_args_list)


# In models


@pytest.mark.skipif(DEVICE != "cpu", reason="the comparison with transformers runs on the CPU")
def test_layers_with_and_without_windows_equal_transformers() -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    from teachvllm.model_executor.models.llama import LlamaForCausalLM
    from teachvllm.model_executor.models.parity import largest_difference

    config = transformers.MinistralConfig(
        vocab_size=96,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=128,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=False,
    )
    assert largest_difference(LlamaForCausalLM, config, (11,), (TritonBackend,)) < 1e-4


# In the engine


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_engine_gives_the_oracles_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks beside decodes; the Mistral's blocks leave its window of 16 tokens and
    serve others.
    """
    from transformers import MistralConfig

    from teachvllm import LLM, SamplingParams

    window = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=20,
        max_position_embeddings=128,
        sliding_window=16,
    )
    monkeypatch.setitem(TINY, "mistral", lambda: window)
    make_tiny(name, tmp_path)
    prompts = random_prompts(3, 50, seed=1)
    greedy = SamplingParams(temperature=0, max_tokens=5)
    answers = {}
    for backend in ("reference", "triton"):
        with LLM(
            str(tmp_path),
            dtype="float32",
            skip_tokenizer_init=True,
            attention_backend=backend,
            block_size=4,
            num_gpu_blocks_override=60,
            max_num_batched_tokens=48,
            enable_chunked_prefill=True,
            max_num_seqs=4,
        ) as llm:
            answers[backend] = [
                o.outputs[0].token_ids for o in llm.generate(prompts, greedy, use_tqdm=False)
            ]
    assert answers["triton"] == answers["reference"]


# What it refuses, and how it cuts


def test_what_it_refuses() -> None:
    def reason(
        device: str = "cuda", dtype: torch.dtype = torch.float16, head_size: int = 64
    ) -> str:
        with pytest.raises(ValueError) as error:
            get_attn_backend("triton", device, dtype, head_size, 16)
        return str(error.value)

    with mock.patch.object(triton_utils, "interpreted", lambda: False):
        assert "TRITON_INTERPRET=1" in reason("cpu")
        with mock.patch("torch.cuda.get_device_capability", lambda: (7, 0)):
            assert "compute capability 7.0" in reason()
    with mock.patch.object(ours, "no_triton", lambda device: None):
        assert "float64" in reason(dtype=torch.float64) and "head_size=257" in reason(head_size=257)
        assert get_attn_backend("triton", "cuda", torch.bfloat16, 256, 1) is TritonBackend


def test_the_chip_is_asked_through_tritons_driver() -> None:
    found = {"multiprocessor_count": 40, "max_shared_mem": 65536}
    driver = SimpleNamespace(utils=SimpleNamespace(get_device_properties={0: found}.__getitem__))
    with (
        mock.patch.object(ours, "interpreted", lambda: False),
        mock.patch.object(triton.runtime, "driver", SimpleNamespace(active=driver)),
        mock.patch("torch.cuda.current_device", lambda: 0),
        mock.patch("torch.cuda.get_device_capability", {0: (7, 5)}.__getitem__),
    ):
        assert ours.get_device_properties.__wrapped__() == DeviceProperties((7, 5), 40, 65536)


def test_tiles_fit() -> None:
    for (capability, limit), itemsize, head, group, decode in itertools.product(
        SHARED_MEMORY.items(), (2, 4), (16, 32, 64, 128, 256), (1, 3, 8, 16), (False, True)
    ):
        tiles = choose_tiles(decode, capability, limit, itemsize, head, group)
        assert (tiles.block_m + (tiles.num_stages + 1) * tiles.tile) * head * itemsize <= limit
        assert tiles.block_m >= max(16, group) and tiles.tile >= 16 and tiles.num_stages >= 1
        assert tiles.block_m & (tiles.block_m - 1) == tiles.tile & (tiles.tile - 1) == 0


def test_splits_fill_the_chip_and_no_more() -> None:
    for programs, sms, most in itertools.product((1, 3, 8, 100, 5000), (1, 40, 132), (1, 8, 64)):
        splits = num_splits(programs, DeviceProperties((9, 0), sms, 0), most)
        assert splits & (splits - 1) == 0 and 1 <= splits <= most
        assert splits == 1 or programs * splits <= 8 * sms
        assert splits == most or 2 * splits * programs > 8 * sms


# Compiled for chips that are not here
#
# What must be compiled? Tiles, and so shared memory and the size of everything, depend on the chip,
# on 2 or 4 bytes an element, on the head size as a power of two, on decode or not, and on the group
# where it is above
# 16. So each combination of the first four that some model has is in the set for each chip, and one
# large group. Everything else changes instructions but no sizes: bfloat16 for float16, a head size
# that is masked, block size, window, soft cap, splits, small groups, a cache of bytes. Each of these
# occurs for each chip at least once. An RTX 4090 has an A100's instructions and less shared memory,
# and e4m3. Every row compiles the kernel for decodes, the one for all else (on a T4 only under a soft
# cap: else prompts are gathered), `merge_splits` where there are splits, and `write_kernel`.

# dtype, head size, query heads a KV head, block size, window, soft cap, most splits, cache
ROWS = [
    ("float16", 64, 4, 16, None, None, 64, None),
    ("bfloat16", 80, 1, 32, None, None, 64, None),
    ("bfloat16", 128, 4, 16, None, None, 64, None),
    ("float16", 128, 8, 128, 4096, None, 1, None),
    ("float16", 256, 2, 64, 4096, 50.0, 64, None),  # as in Gemma 2
    ("float32", 64, 3, 16, None, 30.0, 1, None),
    ("float32", 128, 4, 1, 100, None, 64, None),
    ("float32", 256, 8, 16, None, None, 1, None),
    ("float16", 64, 71, 16, None, None, 64, None),  # as in Falcon 7B
]
MATRIX: list[Any] = [(chip, *row) for chip in ((7, 5), (8, 0), (9, 0)) for row in ROWS]
MATRIX += [((8, 9), *ROWS[4])]
MATRIX += [
    (chip, "bfloat16", 128, 4, 16, None, 50.0 if chip < (8, 0) else None, 64, cache)
    for chip, cache in (
        ((7, 5), "float8_e5m2"),
        ((8, 0), "float8_e5m2"),
        ((8, 9), "float8_e4m3fn"),
        ((9, 0), "float8_e4m3fn"),
    )
]
# mixed steps that are recorded: chapter gpu/09
RECORDED = [
    ((7, 5), *ROWS[0]),
    ((7, 5), *ROWS[2]),
    ((8, 0), *ROWS[0]),
    ((9, 0), *ROWS[2]),
]
MATRIX = [(c, "float16" if c < (8, 0) and d == "bfloat16" else d, *more) for c, d, *more in MATRIX]


def compile_row(
    capability: tuple[int, int],
    dtype: str,
    head_size: int,
    group: int,
    block_size: int,
    *cut: Any,
    recorded: bool = False,
) -> list[Any]:
    "The kernels that a step with a decode and a prompt would launch."
    window, soft_cap, max_splits, cache_dtype = cut
    heads = (2 * group, 2)
    chip = DeviceProperties(capability, 40, SHARED_MEMORY[capability])
    with (
        mock.patch.object(ours, "get_device_properties", lambda: chip),
        compiling_for(10 * capability[0] + capability[1]) as made,
    ):
        backend = TritonBackend(heads[0], head_size, heads[1], head_size**-0.5, window, soft_cap)
        backend.max_splits = max_splits
        if recorded:
            step = getattr(torch, dtype), block_size, 1, 40
            run_step(backend, heads, *step, recorded=True)
            return made
        for num_decodes, num_tokens in ((1, 1), (0, 40)):
            if num_decodes or backend.tensor_cores or soft_cap is not None:
                run_step(
                    backend,
                    heads,
                    getattr(torch, dtype),
                    block_size,
                    num_decodes,
                    num_tokens - num_decodes,
                    cache_dtype,
                )
    return made


def run_step(
    backend: TritonBackend,
    heads: tuple[int, int],
    dtype: torch.dtype,
    block_size: int,
    num_decodes: int,
    others: int,
    cache_dtype: str | None = None,
    recorded: bool = False,
) -> None:
    """Decodes, and a prompt of `others` tokens if there are any; the arrays are slices that begin
    anywhere. In a recorded step the host knows nothing of the sequences.
    """
    size = backend.head_size
    n = num_decodes + (others > 0)
    order = backend.get_kv_cache_stride_order()
    shape = backend.get_kv_cache_shape(4, block_size, heads[1], size)
    cache = torch.empty(
        [shape[a] for a in order], dtype=getattr(torch, cache_dtype) if cache_dtype else dtype
    ).permute([order.index(a) for a in range(5)])
    qkv = torch.empty(num_decodes + others, heads[0] + 2 * heads[1], size, dtype=dtype)
    q, key, value = qkv.split((heads[0], heads[1], heads[1]), 1)
    start = torch.tensor([*range(num_decodes + 1), *[num_decodes + others] * (others > 0)])
    table = torch.zeros(n, 8, dtype=torch.int32)
    slots = torch.zeros(len(q), dtype=torch.int64)
    lens = torch.full((n,), 40)
    known = (num_decodes, start.numpy(), lens.numpy())
    meta = AttentionMetadata(start, lens, table, slots, *(known if not recorded else (-1,)))
    backend.do_kv_cache_update(key.to(cache.dtype), value.to(cache.dtype), cache, meta)
    backend.forward(q, cache, meta)


def describe(kernel: Any) -> dict[str, Any]:
    "What the assembler made of it: of the long kernels what they load and multiply with, too."
    name, shared = kernel.metadata.name, kernel.metadata.shared
    if name != "unified_attention":
        return {"name": name, "shared": shared, "spilled": resources(kernel.asm["cubin"])[1]}
    code = machine_code(kernel)
    loads = [one.loaded_bytes for one in code.body]
    return {
        "name": name,
        "shared": shared,
        "spilled": code.spilled,
        "in loops": code.spills_in_loops,
        "width": code.load_width,
        # bytes that a pass of the main loop loads by so many at least
        **{str(n): 32 * code.num_warps * sum(x for x in loads if x >= n) for n in (8, 16)},
        "core": code.tensor_core,
        "ffma": code.count("FFMA"),
    }


def compile_all(part: int) -> Iterator[dict[str, Any]]:
    """What a child process reports: every second row of the matrix, and how often a kernel is
    compiled as batches change.
    """
    for row in range(part, len(MATRIX), 2):
        yield {"row": row, "kernels": [describe(kernel) for kernel in compile_row(*MATRIX[row])]}
    for row in range(part, len(RECORDED), 2):
        made = compile_row(*RECORDED[row], recorded=True)
        yield {"row": f"recorded {row}", "kernels": [describe(kernel) for kernel in made]}
    if part == 0:
        chip = DeviceProperties((8, 0), 108, SHARED_MEMORY[8, 0])
        with (
            mock.patch.object(ours, "get_device_properties", lambda: chip),
            compiling_for(80) as made,
        ):
            backend = WithoutSplits(8, 64, 2, 0.125)
            for num_decodes in (1, 2, 3, 4, 5):
                run_step(backend, (8, 2), torch.float16, 16, num_decodes, 40 + num_decodes)
        kernels = {id(k): k.metadata.name for k in made}
        yield {"row": -1, "kernels": [{"name": name} for name in kernels.values()]}


@pytest.fixture(scope="session")
def compiled() -> dict[Any, list[dict[str, Any]]]:
    "Row of the matrix -> its kernels, from two child processes that don't interpret."
    env = compiling_env()
    root = str(Path(teachvllm.__file__).resolve().parents[1])  # the same package as here
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    command = [sys.executable, "-W", "ignore", __file__]
    pipes: dict[str, Any] = {
        "env": env,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    children = [subprocess.Popen([*command, str(part)], **pipes) for part in (0, 1)]
    found = {}
    try:
        for child in children:
            out, error = child.communicate(timeout=800)
            assert child.returncode == 0, error[-3000:]
            found |= {line["row"]: line["kernels"] for line in map(json.loads, out.splitlines())}
    finally:
        for child in children:
            child.kill()
    return found


def test_the_matrix_covers() -> None:
    for chip in ((7, 5), (8, 0), (9, 0)):
        rows = [row[1:] for row in MATRIX if row[0] == chip]
        sizes = {
            (dtype == "float32", max(16, triton.next_power_of_2(head))) for dtype, head, *_ in rows
        }
        assert sizes == set(itertools.product((False, True), (64, 128, 256)))
        dtypes, heads, groups, blocks, windows, caps, splits, caches = map(
            set, zip(*rows, strict=True)
        )
        assert dtypes == {"float16", "float32"} | ({"bfloat16"} if chip >= (8, 0) else set())
        assert (
            80 in heads
            and max(groups) > 16
            and {1, 3, 4, 8} <= groups
            and {1, 16, 32, 64, 128} <= blocks
        )
        assert len(windows) > 1 < len(caps) and None in windows & caps and splits == {1, 64}
        assert len(caches) == 2


@pytest.mark.parametrize(
    "row", range(len(MATRIX)), ids=lambda i: "-".join(map(str, MATRIX[i])).replace(" ", "")
)
def test_compiles_and_fits(row: int, compiled: dict[int, list[dict[str, Any]]]) -> None:
    """Into shared memory and into registers; with wide loads, and tensor cores where Triton has
    them.
    """
    chip, dtype, head_size, group, _, _, soft_cap, splits, cache = MATRIX[row]
    names = [kernel["name"] for kernel in compiled[row]]
    prefills = chip >= (8, 0) or soft_cap is not None
    assert (
        names.count("unified_attention") == 1 + prefills
        and names.count("write_kernel") == 1 + prefills
    )
    assert names.count("merge_splits") == (splits > 1)
    for kernel in compiled[row]:
        assert kernel["shared"] <= SHARED_MEMORY[chip]
        # the assembler may keep a number or two in memory while the loops run, so that another
        # program fits: of all these kernels it does so where it is allowed here
        around = 16 if dtype == "float32" or chip == (8, 9) else 0
        if kernel["name"] == "unified_attention":
            assert kernel["in loops"] == 0 and kernel["spilled"] <= around
        else:
            assert kernel["spilled"] == 0
    attention = [kernel for kernel in compiled[row] if kernel["name"] == "unified_attention"]
    for kernel, decode in zip(attention, (True, False)[: len(attention)], strict=True):
        itemsize = 4 if dtype == "float32" else 2
        padded = triton.next_power_of_2(head_size)
        tiles = choose_tiles(decode, chip, SHARED_MEMORY[chip], itemsize, padded, group)
        pair = 2 * tiles.tile * padded * (1 if cache else itemsize)  # a tile of keys, one of values
        # 128 bits at a time, but for values that are widened from bytes, where Triton takes 64,
        # and for a tile (on a T4, for 71 heads) that is not enough for all threads
        width = min(8 if cache else 16, pair // 2 // (32 * tiles.num_warps))
        assert kernel[str(width)] >= pair and kernel["width"] >= width >= 8
        if dtype == "float32" or chip < (8, 0):  # to multiply and add, one at a time
            assert kernel["core"] == "" and kernel["ffma"] > 100
        else:
            assert kernel["core"] == ("HGMMA" if chip == (9, 0) and tiles.block_m > 32 else "HMMA")


@pytest.mark.parametrize("row", range(len(RECORDED)))
def test_recorded_steps_compile_and_fit(
    row: int, compiled: dict[Any, list[dict[str, Any]]]
) -> None:
    "Both launches of attention, each with its own tiles; no keys are split."
    kernels = compiled[f"recorded {row}"]
    assert sorted(kernel["name"] for kernel in kernels) == ["unified_attention"] * 2 + [
        "write_kernel"
    ]
    chip = RECORDED[row][0]
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_MEMORY[chip] and kernel["spilled"] == 0
        if kernel["name"] == "unified_attention":
            assert kernel["width"] == 16 and bool(kernel["core"]) == (chip >= (8, 0))


def test_batches_of_other_sizes_compile_nothing_new(
    compiled: dict[int, list[dict[str, Any]]],
) -> None:
    "However many decodes come first: one narrow kernel, one wide one, one that writes."
    names = [kernel["name"] for kernel in compiled[-1]]
    assert sorted(names) == ["unified_attention"] * 2 + ["write_kernel"]


if __name__ == "__main__":
    for line in compile_all(int(sys.argv[1])):
        print(json.dumps(line))
