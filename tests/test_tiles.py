"""Products by tiles (AMX). Most processors have none: there a processor in Python runs the kernel,
on the same memory, and LLVM compiles it for one that has them.
"""

import ctypes
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("numba")

from helpers import make_tiny

from teachvllm.attention.backend import AttentionMetadata
from teachvllm.attention.cpu import HEAD_FIRST
from teachvllm.cpu_kernels import chunks, linear, tiles
from teachvllm.cpu_kernels.attention import NumbaBackend
from teachvllm.cpu_kernels.utils import Kernel
from teachvllm.kernels import platform_kernels
from teachvllm.llm import LLM
from teachvllm.model_executor.layers import use_kernels

SIZE = 128
POISON = -1  # as bfloat16: NaN


def numbers_at(address: int, count: int) -> np.ndarray:
    "bfloat16 at an address, as float32."
    bits = (ctypes.c_uint16 * count).from_address(address)
    return (np.array(bits, dtype=np.uint32) << 16).view(np.float32)


class Processor:
    "The tiles of one thread, and the operations of chapter cpu/12."

    def __init__(self, thread: int, threads: int) -> None:
        self.thread = thread, threads
        self.rows = 0
        self.sums: list[np.ndarray] = []
        self.room = ctypes.create_string_buffer(4096)
        self.num_products = 0

    def share(self, n: int) -> tuple[int, int]:
        thread, threads = self.thread
        return n * thread // threads, n * (thread + 1) // threads

    def set_rows(self, rows: int) -> None:
        assert 1 <= rows <= 16
        self.rows = rows

    def let_tiles_go(self) -> None:
        assert self.rows, "no tiles are set up"
        self.rows = 0

    def clear_sums(self) -> None:
        self.sums = [np.zeros((self.rows, 16), np.float32) for _ in range(4)]

    def add_tiles(self, high: int, x: int, second: int, stride: int, panel: int) -> None:
        wide = 4 // high
        for j in range(wide):
            weights = np.stack([numbers_at(panel + 64 * j + 256 * k, 32) for k in range(16)])
            for i, first in enumerate((x, second)[:high]):
                rows = np.stack([numbers_at(first + stride * r, 32) for r in range(self.rows)])
                pairs = rows.reshape(-1, 16, 2)
                products = np.einsum("rkp,kop->ro", pairs, weights.reshape(16, 16, 2))
                self.sums[i * wide + j] += products
                self.num_products += 1

    def room_for_sums(self) -> int:
        return ctypes.addressof(self.room)

    def keep_sums(self, high: int, where: int) -> None:
        wide = 4 // high
        for tile, sums in enumerate(self.sums):
            for r, row in enumerate(sums):
                at = where + (tile // wide * 16 + r) * 64 * wide + tile % wide * 64
                assert self.room_for_sums() <= at <= self.room_for_sums() + 4096 - 64
                ctypes.memmove(at, row.tobytes(), 64)

    def keep_rows(self, where: int, stride: int) -> None:
        for tile, sums in enumerate(self.sums):
            for r, row in enumerate(sums):
                ctypes.memmove(where + r * stride + 64 * tile, row.tobytes(), 64)

    def put_row(self, high: int, sums: int, bias: int, out: int) -> None:
        count = 64 // high
        row = torch.from_numpy(np.array((ctypes.c_float * count).from_address(sums)))
        if bias:
            row = row + torch.from_numpy(numbers_at(bias, count))
        bits = row.bfloat16().view(torch.int16).numpy()
        ctypes.memmove(out, bits.tobytes(), 2 * count)

    @staticmethod
    def array_at(address: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        assert dtype is np.float32
        floats = (ctypes.c_float * int(np.prod(shape))).from_address(address)
        return np.ctypeslib.as_array(floats).reshape(shape)

    @staticmethod
    def arguments(words: np.ndarray) -> list[list[int]]:
        return [[int(word) for word in words]]

    @staticmethod
    def prefetch(address: int, num_bytes: int) -> None:
        assert num_bytes == 4096


OPERATIONS = [name for name in vars(Processor) if not name.startswith("_")]
IN_PYTHON = {name: getattr(tiles, name).py_func for name in ("few_rows", "many_rows")}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("near", [1 << 19, 1])  # all panels together, or one by one
@pytest.mark.parametrize("n", [1, 5, 16, 17, 31, 32, 33, 48, 49, 70])
def test_a_processor_in_python(n: int, near: int, threads: int) -> None:
    torch.manual_seed(n)
    width = 96
    weight, bias = torch.randn(SIZE, width).bfloat16(), torch.randn(SIZE).bfloat16()
    panels = linear.pack(weight)
    x = torch.randn(n, width).bfloat16()
    for b in (None, bias):
        around = torch.full((n + 2, SIZE), POISON, dtype=torch.int16)  # a row before, one behind
        out = around[1:-1].view(torch.bfloat16)
        bias_at = 0 if b is None else b.data_ptr()
        words = [n, SIZE, width, x.data_ptr(), panels.data_ptr(), bias_at, out.data_ptr()]
        num_products = 0
        for thread in range(threads):
            processor = Processor(thread, threads)
            operations = {name: getattr(processor, name) for name in OPERATIONS}
            with patch.multiple(tiles, NEAR=near, **IN_PYTHON, **operations):
                tiles.multiply_tiles(np.array(words))
            assert not processor.rows, "tiles are kept"
            num_products += processor.num_products
        right = F.linear(x.float(), weight.float(), None if b is None else b.float())
        torch.testing.assert_close(out.float(), right, atol=0.05, rtol=2**-7)
        assert (around[[0, -1]] == POISON).all()
        of_a_block = width // 32 * SIZE // 16
        assert num_products == of_a_block * -(-n // 16), "some tiles are computed twice"


def as_bits(x: torch.Tensor) -> np.ndarray:
    "bfloat16 as kernels see it."
    return x.bfloat16().contiguous().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("rows", [1, 16, 17, 48])
def test_attention_by_a_processor_in_python(rows: int) -> None:
    "The two products; three tiles of keys, and heads of 96 numbers, whose values are two panels."
    torch.manual_seed(rows)
    num, width, tokens = 3, 96, chunks.TOKENS
    keys, values = torch.randn(2, num * tokens, width)
    padded = torch.zeros(num * tokens, 128)
    padded[:, :width] = values
    panels = []
    for i in range(num):
        some = slice(i * tokens, (i + 1) * tokens)
        of_values = padded[some].view(tokens // 2, 2, 2, 64).permute(2, 0, 3, 1)
        panels += [linear.pack(keys[some].bfloat16()).flatten().float(), of_values.flatten()]
    packed = as_bits(torch.cat(panels))
    tile_bytes = 2 * (width + 128) * tokens
    q, weights = torch.randn(48, width), torch.rand(48, chunks.SCORES)
    scores = np.full((48, chunks.SCORES), np.nan, np.float32)
    sums, stats = np.ones((48, 128), np.float32), np.full((48, 4), 0.5, np.float32)
    processor = Processor(0, 1)
    operations = {name: getattr(processor, name) for name in OPERATIONS}
    with patch.multiple(tiles, **operations):
        processor.set_rows(16)
        at = packed.ctypes.data
        tiles.score_tiles.py_func(as_bits(q), rows, at, tile_bytes, num, scores, np.uint16)
        at += 2 * width * tokens
        tiles.add_value_tiles.py_func(
            as_bits(weights), rows, at, tile_bytes, num, sums, stats, None, np.uint16
        )
    q, keys, weights, padded = (x.bfloat16().float()[:, :512] for x in (q, keys, weights, padded))
    found = torch.from_numpy(scores)[:rows, : num * tokens]
    torch.testing.assert_close(found, (q @ keys.T)[:rows], atol=1e-4, rtol=1e-5)
    right = 0.5 + weights[:, : num * tokens] @ padded
    torch.testing.assert_close(torch.from_numpy(sums)[:rows], right[:rows], atol=1e-4, rtol=1e-5)


COMPILE = """
import numba
from numba import types
from teachvllm.cpu_kernels import tiles, utils
utils.find_openmp()
for kernel in tiles.multiply_tiles, tiles._attend_tiles:
    function = numba.cfunc(types.void(types.voidptr), **utils.FAST)(kernel)
    print("KERNEL", function._library.get_asm_str())
"""


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not linear.find_openmp(),
    reason="no processor of this kind, or no threads of GNU OpenMP",
)
def test_compiles_for_a_processor_with_tiles(tmp_path) -> None:
    "Two loops of products, 1 x 4 and 2 x 2 tiles, nothing of which LLVM moves or drops."
    features = "+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512bf16,+amx-tile,+amx-bf16"
    processor = {"NUMBA_CPU_NAME": "sapphirerapids", "NUMBA_CPU_FEATURES": features}
    env = os.environ | processor | {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = "tdpbf16ps|tileloadd|tilestored|ldtilecfg|tilerelease"
    products, attention = (
        Counter(re.findall(rf"^\s+({names})", text, re.M))
        for text in done.stdout.split("KERNEL")[1:]
    )
    for counts in products, attention:
        assert counts["tilestored"] % 4 == 0 and counts["ldtilecfg"] and counts["tilerelease"]
        # LLVM has a loop's body several times, with and without asking ahead
        bodies = counts["tdpbf16ps"] // 4
        of_one_by_four = counts["tileloadd"] - 4 * bodies  # it loads five tiles, the other four
        assert counts["tdpbf16ps"] == 4 * bodies
        assert 0 < of_one_by_four < bodies if counts is products else of_one_by_four == bodies


@pytest.mark.skipif(not tiles.has_tiles(), reason="a processor without tiles")
def test_this_processor() -> None:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    weight, bias = torch.randn(192, 608).bfloat16(), torch.randn(192).bfloat16()
    product = tiles.packed_linear(weight)
    assert isinstance(product, tiles.TiledLinear)
    x = torch.randn(70, 608).bfloat16()
    right = F.linear(x.float(), weight.float(), bias.float())
    try:
        for torch_threads in (1, 2):
            torch.set_num_threads(torch_threads)
            alone = torch.cat([product(row[None], bias) for row in x])
            torch.testing.assert_close(alone.float(), right, atol=0.05, rtol=2**-7)
            for n in (1, 15, 16, 17, 31, 32, 33, 49, 70):
                assert torch.equal(product(x[:n], bias), alone[:n])  # not by the neighbours
    finally:
        torch.set_num_threads(threads)
    for wrong in (
        lambda: product(torch.randn(2, 600).bfloat16()),
        lambda: product(torch.randn(2, 608)),
        lambda: product(x, bias[:64]),
    ):
        with pytest.raises(AssertionError):
            wrong()
    assert product(x[:0]).shape == (0, 192)
    wide = torch.randn(20, 1216).bfloat16()
    assert torch.equal(product(wide[:, ::2]), product(wide[:, ::2].contiguous()))
    x[3, 5] = float("nan")
    assert product(x).isnan().all(1).nonzero().flatten().tolist() == [3]


@pytest.mark.skipif(not tiles.has_tiles(), reason="a processor without tiles")
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("rules", [{}, {"window": 30}, {"soft_cap": 2.0}, {"v_scale": 0.5}])
@pytest.mark.parametrize(
    "size, heads, kv_heads",
    [(64, 9, 3), (96, 2, 2), (128, 8, 1), (20, 3, 1), (64, 10, 2), (256, 7, 1), (32, 48, 1)],
)
def test_chunks(
    size: int, heads: int, kv_heads: int, rules: dict[str, Any], cache_dtype: torch.dtype
) -> None:
    """As by the kernel of registers; several chunks, some of which begin in the middle. What lies
    behind the last query in a thread's room is NaN, and nobody reads it.
    """
    torch.manual_seed(0)
    news, lens = (5, 1, 70, 300), (5, 130, 70, 530)
    bounds = np.cumsum([0, *news]).tolist()
    jobs = list(zip(bounds, bounds[1:], lens, range(4)))
    table = torch.randperm(4 * 34).view(4, 34).int()
    groups, left = chunks.group_chunks(jobs, table, rules.get("window"), 1 << 20)
    assert not left
    q = torch.randn(bounds[-1], heads, size).bfloat16()
    pages = torch.randn(2, kv_heads, 4 * 34, 16, size).to(cache_dtype)
    assert tiles.attends(torch.bfloat16, size)
    found = []
    for kernel in (None, tiles.ATTEND_TILES):
        out = torch.full_like(q, torch.nan)
        with patch.object(chunks.torch, "empty", lambda *size, **of: torch.full(size, 255, **of)):
            for group in groups:
                chunks.attend_chunks(q, out, pages, group, size**-0.5, kernel=kernel, **rules)
        found.append(out.float())
    torch.testing.assert_close(*found, atol=0.01, rtol=2**-7)


@pytest.mark.skipif(not linear.dtypes_served(), reason="a processor without the registers")
@pytest.mark.parametrize("found, size", [(True, 64), (True, 80), (False, 64)])
def test_the_backend_asks_the_engines_table(found: bool, size: int) -> None:
    backend = NumbaBackend(2, size, 2, 1.0)
    layer = torch.nn.Module()
    layer.backend = backend
    table = platform_kernels("cpu")
    use_kernels(layer, table)
    assert backend.kernels is table and not NumbaBackend.kernels.names
    starts, lens = torch.tensor([0, 40]), torch.tensor([40])
    slots = torch.zeros(40, dtype=torch.int64)
    cache = torch.empty_permuted((2, 3, 16, 2, size), HEAD_FIRST, dtype=torch.bfloat16)
    q = torch.zeros(40, 2, size, dtype=torch.bfloat16)
    calls: list = []
    for given_up in (False, True):
        if given_up:
            table.give_up("attend_chunks", OSError("for a test"))
        meta = AttentionMetadata(starts, lens, torch.arange(3).int()[None], slots, 0)
        with (
            patch.object(tiles, "has_tiles", lambda: found),
            patch.object(Kernel.recorded, "calls", calls),
        ):
            backend.build(meta, 16)
            backend.forward(q, cache, meta)
        tiled = found and size == 64 and not given_up
        right = tiles.ATTEND_TILES if tiled else chunks.ATTEND[torch.bfloat16]
        assert [kernel for kernel, _ in calls][-1] is right


def test_which_chunks() -> None:
    for found in (False, True):
        with patch.object(tiles, "has_tiles", lambda found=found: found):
            for size, whole in ((64, True), (96, True), (20, True), (80, False), (16, False)):
                assert tiles.attends(torch.bfloat16, size) == (found and whole)
                assert not tiles.attends(torch.float32, size)


@pytest.mark.skipif(not tiles.has_tiles(), reason="a processor without tiles")
def test_beside_other_users_of_tiles() -> None:
    "oneDNN sets tiles up for itself, in the same threads."
    torch.manual_seed(0)
    weight = torch.randn(256, 256).bfloat16()
    product = tiles.packed_linear(weight)
    x = torch.randn(40, 256).bfloat16()
    query = torch.randn(1, 4, 64, 64).bfloat16()
    before = product(x), x @ weight.T, F.scaled_dot_product_attention(query, query, query)
    for _ in range(3):
        after = product(x), x @ weight.T, F.scaled_dot_product_attention(query, query, query)
        assert all(map(torch.equal, before, after))


@pytest.mark.skipif(not tiles.has_tiles(), reason="a processor without tiles")
def test_a_step_is_recorded(tmp_path) -> None:
    make_tiny("llama", tmp_path)
    limits = {"max_model_len": 64, "block_size": 16, "num_gpu_blocks_override": 40}
    llm = LLM(str(tmp_path), dtype="bfloat16", device="cpu", skip_tokenizer_init=True, **limits)
    [kernels] = llm.collective_rpc(lambda worker: Counter(worker.model_runner.graphs.kernels))
    llm.close()
    assert kernels[tiles.MULTIPLY] >= 4


FOUND = {"amx-tile": True, "amx-bf16": True, "avx512f": True}


@pytest.mark.skipif(not linear.find_openmp(), reason="no threads of GNU OpenMP")
@pytest.mark.parametrize(
    "found, system, machine, answer, has",
    [
        (FOUND, "linux", "x86_64", 0, True),
        (FOUND, "linux", "x86_64", -1, False),  # refused, or unknown to this Linux
        (FOUND | {"amx-bf16": False}, "linux", "x86_64", 0, False),
        (FOUND, "darwin", "x86_64", 0, False),
        (FOUND, "linux", "aarch64", 0, False),
        ({}, "linux", "x86_64", 0, False),  # Numba was told what to use
    ],
)
def test_has_tiles(found: dict, system: str, machine: str, answer: int, has: bool) -> None:
    asked = []
    library = SimpleNamespace(syscall=lambda *words: asked.append(words) or answer)
    with (
        patch.object(tiles, "host_features", lambda: found),
        patch.object(tiles.sys, "platform", system),
        patch.object(tiles.platform, "machine", lambda: machine),
        patch.object(tiles.ctypes, "CDLL", lambda name: library),
        patch.object(tiles, "find_openmp", object),
    ):
        assert tiles.has_tiles.__wrapped__() == has
    assert asked == ([(158, 0x1023, 18)] if has or answer else [])


@pytest.mark.parametrize("has", [True, False])
def test_what_is_compiled(has: bool) -> None:
    compiled: list = []
    with (
        patch.object(tiles, "has_tiles", lambda: has),
        patch.object(tiles, "compile_all", lambda kernels, what: compiled.extend(kernels)),
        patch.object(linear, "compile", compiled.append),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            tiles.compile(dtype)
    with_tiles = [tiles.MULTIPLY, tiles.ATTEND_TILES]
    assert compiled == [torch.float32, *(with_tiles if has else [torch.bfloat16])]


def test_which_product_a_matrix_gets() -> None:
    whole = torch.ones(64, 64)
    odd = torch.ones(64, 40).bfloat16()  # in steps of registers, and not of tiles
    for found in (False, True):
        with patch.object(tiles, "has_tiles", lambda found=found: found):
            assert tiles.serves(whole) == linear.serves(whole)
            assert tiles.serves(odd) == (linear.serves(odd) and not found)
            served = tiles.serves(whole.bfloat16())
            assert served == linear.serves(whole.bfloat16())
            if served:
                kind = tiles.TiledLinear if found else linear.PackedLinear
                assert type(tiles.packed_linear(whole.bfloat16())) is kind
