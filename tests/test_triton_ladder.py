"""Each rung of the Triton ladder equals the oracle on ragged batches in poisoned caches, and
compiles for real chips.

Run as a program, without TRITON_INTERPRET, this file compiles the rungs and prints what became of
them as JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

# Triton must know before it is imported
if __name__ != "__main__" and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton")

from helpers import run_compiling  # noqa: E402

from teachvllm.attention.backend import AttentionMetadata, ReferenceBackend  # noqa: E402
from teachvllm.gpu_kernels import ladder  # noqa: E402
from teachvllm.gpu_kernels import utils as triton_utils  # noqa: E402

LATE = "Triton was imported before TRITON_INTERPRET was set: set it in conftest.py"
assert isinstance(triton.language.cdiv, triton.JITFunction) != triton_utils.interpreted(), LATE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
RUNGS = {n: getattr(ladder, f"paged_attention_v{n}") for n in (1, 2, 3, 4)}
# bytes of shared memory that a program can have, by CUDA's documentation
SHARED = {75: 65536, 80: 166912, 90: 232448}


# Batches


def poisoned(shape: tuple[int, ...], order: list[int], dtype: torch.dtype) -> torch.Tensor:
    "A cache full of NaN whose axes lie in memory in the given order."
    stored = torch.full([shape[axis] for axis in order], torch.nan, dtype=dtype, device=DEVICE)
    return stored.permute([order.index(axis) for axis in range(5)])


def make_batch(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Queries, a cache in which all that belongs to no sequence is NaN, and metadata with absurd
    ids past each table's end.
    """
    g = torch.Generator().manual_seed(case["seed"])
    kv_heads = case["kv_heads"]
    head_size = case["head_size"]
    block_size = case["block_size"]
    seq_lens = case["seq_lens"]
    query_lens = case["query_lens"]
    need = [-(-n // block_size) for n in seq_lens]
    ids = torch.randperm(sum(need) + 2, generator=g).tolist()
    table = torch.full((len(need), max(need) + 1), 10**9, dtype=torch.int32)
    cache = poisoned((2, len(ids), block_size, kv_heads, head_size), case["order"], case["dtype"])
    for i, n in enumerate(seq_lens):
        for page in range(need[i]):
            table[i, page] = block = ids.pop()
            tokens = min(block_size, n - page * block_size)
            cache[:, block, :tokens] = torch.randn(2, tokens, kv_heads, head_size, generator=g).to(
                DEVICE, case["dtype"]
            )
    whole = torch.randn(sum(query_lens), case["group"] * kv_heads + 2, head_size, generator=g).to(
        DEVICE, case["dtype"]
    )
    start = torch.tensor([0, *query_lens]).cumsum(0)
    slots = torch.full((sum(query_lens),), -1)
    decodes = next((i for i, m in enumerate(query_lens) if m > 1), len(query_lens))
    meta = AttentionMetadata(
        *(t.to(DEVICE) for t in (start, torch.tensor(seq_lens), table, slots)), decodes
    )
    return whole[:, 1:-1], cache, meta  # queries are a slice of something larger, as in a model


def check(rung: Callable, case: dict[str, Any], **options: Any) -> None:
    """Two roundings to the dtype, of weights and output, and float32 scores: no more may lie
    between rung and oracle.

    The interpreter cuts a bfloat16 number's digits off where a GPU rounds, so there its roundings
    count double.
    """
    q, cache, meta = make_batch(case)
    oracle = ReferenceBackend(q.shape[1], q.shape[2], cache.shape[3], q.shape[2] ** -0.5)
    out = rung(q, cache, meta, oracle.scale, **options)
    (k, v) = cache.float()
    size = oracle.forward(q.float(), torch.stack((k, v.abs())), meta)
    u = torch.finfo(q.dtype).eps / (
        1 if triton_utils.interpreted() and q.dtype == torch.bfloat16 else 2
    )
    assert out.shape == q.shape and out.dtype == q.dtype
    off = (out.float() - oracle.forward(q.float(), cache.float(), meta)).abs()
    # a NaN is not below it either
    assert (off <= 2.1 * u * size + 1e-5).all(), f"off by {off.max():.1e}"


@st.composite
def batches(
    draw: st.DrawFn, longest: int, max_heads: int = 8, decode: bool = True, in_pages: bool = False
) -> dict[str, Any]:
    "A shape and ragged lengths; `longest` counts tokens, or pages if `in_pages`."
    kv_heads = draw(st.integers(1, 3))
    block_size = draw(st.integers(1, 32))
    lengths = st.integers(1, longest * block_size if in_pages else longest)
    seq_lens = draw(st.lists(lengths, min_size=1, max_size=3))
    return {
        "kv_heads": kv_heads,
        "group": draw(st.integers(1, max_heads // kv_heads)),
        "head_size": draw(st.integers(16, 96)),
        "block_size": block_size,
        "dtype": draw(st.sampled_from(DTYPES)),
        "order": draw(st.permutations(range(5))),
        "seq_lens": seq_lens,
        "query_lens": [1 if decode else draw(st.integers(1, n)) for n in seq_lens],
        "seed": draw(st.integers(0, 1000)),
    }


few = settings(max_examples=20, deadline=None, derandomize=True)


# The rungs


@few
@given(batches(longest=3, max_heads=6, in_pages=True))
def test_v1_equals_the_oracle(case: dict[str, Any]) -> None:
    check(RUNGS[1], case)


@few
@given(batches(longest=150))
def test_v2_equals_the_oracle(case: dict[str, Any]) -> None:
    check(RUNGS[2], case)


@settings(few, max_examples=30)
@given(batches(longest=120, decode=False))
def test_v3_equals_the_oracle(case: dict[str, Any]) -> None:
    check(RUNGS[3], case)


@few
@given(batches(longest=150, max_heads=4), st.sampled_from([1, 2, 4, 8]))
def test_v4_equals_the_oracle(case: dict[str, Any], num_splits: int) -> None:
    check(RUNGS[4], case, num_splits=num_splits)


PLAIN = {
    "kv_heads": 2,
    "group": 3,
    "head_size": 64,
    "block_size": 16,
    "dtype": torch.float32,
    "order": range(5),
    "seed": 0,
}


@pytest.mark.parametrize("number", RUNGS)
def test_a_group_of_20_heads_and_head_size_256(number: int) -> None:
    "More rows than the 16 that a product needs, and the largest heads."
    shape = {**PLAIN, "kv_heads": 1, "group": 20, "head_size": 256, "dtype": torch.float16}
    check(RUNGS[number], {**shape, "seq_lens": [33], "query_lens": [1]})


@pytest.mark.parametrize("number", [1, 2, 4])
def test_decode_rungs_refuse_prompts(number: int) -> None:
    with pytest.raises(ValueError, match="4 new tokens of 2 sequences"):
        RUNGS[number](*make_batch({**PLAIN, "seq_lens": [5, 9], "query_lens": [1, 3]}), 0.125)


@pytest.mark.parametrize("num_splits", [0, 3, 12])
def test_splits_are_a_power_of_two(num_splits: int) -> None:
    with pytest.raises(ValueError, match=f"num_splits={num_splits} is no power of two"):
        RUNGS[4](
            *make_batch({**PLAIN, "seq_lens": [5], "query_lens": [1]}), 0.125, num_splits=num_splits
        )


# What they read


def reads(
    number: int, seq_lens: list[int], query_lens: list[int] | None = None, **options: Any
) -> torch.Tensor:
    """How many tokens each program read of each block: [num_blocks, *grid from its last axis to its
    first].
    """
    batch = make_batch(
        {**PLAIN, "seq_lens": seq_lens, "query_lens": query_lens or [1] * len(seq_lens)}
    )
    log = []
    RUNGS[number](*batch, 0.125, log, **options)
    assert len(log) == 1 and len(log[0]) == batch[1].shape[1]
    return log[0].cpu()


def test_decode_rungs_read_each_token_once_a_program_row() -> None:
    """Rung 1 reads a token once for each query head; rungs 2, 3 and 4 once for each KV head,
    whoever the programs are.
    """
    lens = [1, 16, 40, 100]
    assert int(reads(1, lens).sum()) == 6 * sum(lens)
    for number in (2, 3, 4):
        assert int(reads(number, lens).sum()) == 2 * sum(lens)
    assert reads(4, [200], num_splits=4).sum(0).amax() < reads(2, [200]).sum(0).amax() == 200


def test_prefill_stops_at_the_diagonal() -> None:
    "A block of 21 tokens reads the keys up to its last token; two KV heads."
    log = reads(3, [50], [50])
    assert sorted(log.sum(0).flatten().tolist(), reverse=True)[:6] == [50, 50, 42, 42, 21, 21]


def test_the_grid_depends_on_counts_alone() -> None:
    "However 60 new tokens are shared among 4 sequences, the launch is the same."
    grids = {
        tuple(reads(3, lens, news).shape[1:])
        for lens, news in [([90, 9, 9, 9], [57, 1, 1, 1]), ([15] * 4, [15] * 4)]
    }
    assert len(grids) == 1


# The write


@few
@given(
    st.permutations(range(5)),
    st.sampled_from(DTYPES),
    st.integers(1, 4),
    st.integers(1, 96),
    st.integers(1, 32),
    st.randoms(),
)
def test_reshape_and_cache(
    order: list[int], dtype: torch.dtype, heads: int, head_size: int, block_size: int, rng: Any
) -> None:
    """What goes in is in its slot, in any memory order; -1 is written nowhere, and nothing else
    changes.
    """
    cache = poisoned((2, 3, block_size, heads, head_size), order, dtype)
    num_tokens = min(6, 3 * block_size)
    slots = torch.tensor(
        [rng.choice([slot, -1]) for slot in rng.sample(range(3 * block_size), num_tokens)]
    )
    key, value = torch.randn(2, num_tokens, heads + 1, head_size).to(DEVICE, dtype)[:, :, 1:]
    triton_utils.reshape_and_cache(key, value, cache, slots.to(DEVICE))
    flat = cache.flatten(1, 2).cpu()
    kept = slots >= 0
    assert torch.equal(flat[:, slots[kept]], torch.stack((key, value))[:, kept].cpu())
    untouched = torch.ones(3 * block_size, dtype=torch.bool).index_fill_(0, slots[kept], False)
    assert flat[:, untouched].isnan().all()


# Real chips


def compile_everything() -> Iterator[dict[str, Any]]:
    """Every rung and the write, through the launchers themselves: for each chip in 16 bits, once in
    float32 with a log.
    """
    in_16_bits = {75: torch.float16, 80: torch.bfloat16, 90: torch.bfloat16}
    for capability, dtype, log in [
        *((c, dtype, None) for c, dtype in in_16_bits.items()),
        (80, torch.float32, []),
    ]:
        shape = {**PLAIN, "dtype": dtype, "head_size": 96}
        q, cache, meta = make_batch({**shape, "seq_lens": [40] * 4, "query_lens": [1] * 4})
        with ladder.compiling_for(capability) as made:
            for rung in RUNGS.values():
                rung(q, cache, meta, 0.1, log)
            triton_utils.reshape_and_cache(
                cache[0, 0, :4], cache[1, 0, :4], cache, meta.slot_mapping
            )
        yield from (describe(kernel, capability, dtype) for kernel in made)
    q, cache, meta = make_batch(
        {**PLAIN, "head_size": 256, "seq_lens": [40] * 4, "query_lens": [1] * 4}
    )
    with ladder.compiling_for(75) as made:  # the largest rows on the smallest chip
        RUNGS[3](q, cache, meta, 0.1)
    yield describe(made[0], 75, torch.float32)


def describe(kernel: Any, capability: int, dtype: torch.dtype) -> dict[str, Any]:
    ptx = kernel.asm["ptx"]
    cores = next((name for name in ("wgmma", "mma.sync") if name in ptx), "fma")
    return {
        "capability": capability,
        "dtype": str(dtype),
        "name": kernel.metadata.name,
        "cores": cores,
        "shared": kernel.metadata.shared,
        "code": len(kernel.asm["cubin"]),
    }


def test_the_interpreter_compiles_nothing() -> None:
    if not triton_utils.interpreted():
        pytest.skip("Triton is not interpreted here")
    with pytest.raises(ValueError, match="TRITON_INTERPRET"), ladder.compiling_for(90):
        pass


QUICKENED = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import numpy as np, torch, triton
import triton.language as tl

@triton.jit
def weigh(x, row, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    return tl.where(column[None, :] <= row[:, None], x * 0.5 + column, 1 - x)

@triton.jit
def kernel(out, x, y, n, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    where = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = row[:, None] < n
    a = tl.load(x + where, mask=inside, other=1).to(tl.float32)
    b = tl.load(y + where, mask=inside, other=2)
    acc = tl.zeros((ROWS, ROWS), tl.float32)
    for i in range(2):
        acc += tl.dot(weigh(a, row, WIDTH), tl.trans(b.to(tl.float32) + i))
    total = tl.sum(acc, 1) + tl.max(weigh(a, row, WIDTH).to(tl.float16), 1) - (row // 3 % 2 << 1)
    tl.store(out + row, total, mask=row < n)

@triton.jit
def odd(out):
    tl.store(out + tl.arange(0, 3), weigh(1.0, tl.arange(0, 4), 4))

def run():
    "What kernels write from each dtype, and what is said of a shape that is refused."
    found = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64):
        x = torch.arange(-40, 40).view(5, 16).to(dtype)
        out = torch.full((8,), torch.nan)
        kernel[(2,)](out, x, x.flip(0).to(torch.int8), 5, 4, 16)
        found.append(out.numpy().tobytes())
        for _ in range(2):
            try:
                odd[(1,)](out)
            except Exception as error:
                found.append(repr(error))
        assert tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.core.tensor.to)
        assert not isinstance(tl.range, type(run))
    return found

plain = run()
from teachvllm.gpu_kernels.utils import interpreted, quicken_interpreter
quicken_interpreter()
assert interpreted() and "power of 2" in plain[1]
quick = [run() for _ in range(2)]
assert quick == [plain, plain], (plain, quick)
"""


def test_a_quick_interpreter_computes_the_same(tmp_path: Path) -> None:
    "Bit for bit, with the same errors, and the language is its own again after each launch."
    (tmp_path / "quickened.py").write_text(QUICKENED)
    command = [sys.executable, "-W", "ignore", str(tmp_path / "quickened.py")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_rung_compiles_and_fits() -> None:
    """For sm_75, sm_80 and sm_90, in a process whose Triton compiles; a program's shared memory
    fits the chip.
    """
    done = run_compiling(__file__)
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    names = {"v1_kernel", "v2_kernel", "v3_kernel", "v4_kernel", "merge_splits", "write_kernel"}
    for capability, most in SHARED.items():
        mine = [kernel for kernel in kernels if kernel["capability"] == capability]
        assert {kernel["name"] for kernel in mine} == names
        assert all(kernel["shared"] <= min(most, 65536) and kernel["code"] > 0 for kernel in mine)
    cores = {
        k["capability"]: k["cores"]
        for k in kernels
        if k["name"] == "v3_kernel" and k["dtype"] != "torch.float32"
    }
    assert cores == {75: "fma", 80: "mma.sync", 90: "wgmma"}


if __name__ == "__main__":
    for description in compile_everything():
        print(json.dumps(description))
