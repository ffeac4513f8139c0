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

import numba
from helpers import make_tiny

from teachvllm.attention.backend import AttentionMetadata
from teachvllm.attention.cpu import HEAD_FIRST
from teachvllm.cpu_kernels import chunks, grouped, linear, tiles
from teachvllm.cpu_kernels.attention import NumbaBackend
from teachvllm.cpu_kernels.utils import Kernel
from teachvllm.kernels import platform_kernels
from teachvllm.llm import LLM
from teachvllm.model_executor.layers import use_kernels
from teachvllm.quantization.scaled import ScaledWeight, round_rows

SIZE = 128
POISON = -1  # as bfloat16: NaN


def numbers_at(address: int, count: int, kind: Any) -> np.ndarray:
    "A copy of so many numbers at an address."
    return np.array((kind * count).from_address(address))


def bfloats_at(address: int, count: int) -> np.ndarray:
    "bfloat16 at an address, as float32."
    bits = numbers_at(address, count, ctypes.c_uint16).astype(np.uint32)
    return (bits << 16).view(np.float32)


def codes_at(address: int, count: int) -> np.ndarray:
    "Bytes at an address, whole numbers without a sign, as float32."
    return numbers_at(address, count, ctypes.c_uint8).astype(np.float32)


def weights_at(address: int, count: int) -> np.ndarray:
    "The same with a sign."
    return numbers_at(address, count, ctypes.c_int8).astype(np.float32)


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

    def begin_sums(self, bits: int, high: int, starts: int) -> None:
        self.sums = [np.zeros((self.rows, 16), np.float32) for _ in range(4)]
        self.whole = bits == 8
        if self.whole:
            for tile, sums in enumerate(self.sums):
                sums[:] = numbers_at(starts + tile % (4 // high) * 64, 16, ctypes.c_int32)

    def add_tiles(self, bits: int, high: int, x: int, second: int, stride: int, panel: int) -> None:
        wide = 4 // high
        together = 32 // bits  # numbers
        of_rows, of_weights = (bfloats_at,) * 2 if bits == 16 else (codes_at, weights_at)
        count = 16 * together
        for j in range(wide):
            weights = np.stack([of_weights(panel + 64 * j + 256 * k, count) for k in range(16)])
            for i, first in enumerate((x, second)[:high]):
                rows = np.stack([of_rows(first + stride * r, count) for r in range(self.rows)])
                lanes = rows.reshape(-1, 16, together)
                products = np.einsum("rkp,kop->ro", lanes, weights.reshape(16, 16, together))
                self.sums[i * wide + j] += products
                self.num_products += 1

    def room_for_sums(self) -> int:
        return ctypes.addressof(self.room)

    def keep_sums(self, high: int, where: int, stride: int) -> None:
        wide = 4 // high
        for tile, sums in enumerate(self.sums):
            kept = sums.astype(np.int32) if self.whole else sums
            for r, row in enumerate(kept):
                at = where + (tile // wide * 16 + r) * stride + tile % wide * 64
                if where == self.room_for_sums():
                    assert where <= at <= where + 4096 - 64
                ctypes.memmove(at, row.tobytes(), 64)

    def put_row(
        self, bits: int, high: int, sums: int, of_row: int, bias: int, scales: int, out: int
    ) -> None:
        count = 64 // high
        row = numbers_at(sums, count, ctypes.c_float)
        if bits == 8:
            scale = numbers_at(of_row, 1, ctypes.c_float)
            row = numbers_at(sums, count, ctypes.c_int32).astype(np.float32)
            row *= scale * numbers_at(scales, count, ctypes.c_float)
        if bias:
            row = row + bfloats_at(bias, count)
        rounded = torch.from_numpy(row).bfloat16().view(torch.int16).numpy()
        ctypes.memmove(out, rounded.tobytes(), 2 * count)

    @staticmethod
    def array_at(address: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        assert dtype is np.float32
        floats = (ctypes.c_float * int(np.prod(shape))).from_address(address)
        return np.ctypeslib.as_array(floats).reshape(shape)

    @staticmethod
    def arguments(words: Any) -> Any:
        return words

    @staticmethod
    def prefetch(address: int, num_bytes: int) -> None:
        assert num_bytes == 4096


OPERATIONS = [name for name in vars(Processor) if not name.startswith("_")]
IN_PYTHON = {name: getattr(tiles, name).py_func for name in ("few_rows", "many_rows", "multiply")}


def run_in_python(kernel: Any, words: Any, threads: int, near: int) -> int:
    "Run a kernel, thread by thread; how many products of tiles it took."
    num_products = 0
    for thread in range(threads):
        processor = Processor(thread, threads)
        operations = {name: getattr(processor, name) for name in OPERATIONS}
        with patch.multiple(tiles, NEAR=near, **IN_PYTHON, **operations):
            kernel(words)
        assert not processor.rows, "tiles are kept"
        num_products += processor.num_products
    return num_products


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
        num_products = run_in_python(tiles.multiply_tiles, [words], threads, near)
        right = F.linear(x.float(), weight.float(), None if b is None else b.float())
        torch.testing.assert_close(out.float(), right, atol=0.05, rtol=2**-7)
        assert (around[[0, -1]] == POISON).all()
        of_a_block = width // 32 * SIZE // 16
        assert num_products == of_a_block * -(-n // 16), "some tiles are computed twice"


@pytest.mark.parametrize("near", [1 << 19, 1])
@pytest.mark.parametrize("n", [1, 16, 17, 33, 49])
def test_bytes_by_a_processor_in_python(n: int, near: int) -> None:
    "To the bit what the slow form says."
    torch.manual_seed(n)
    width = 128
    weight = ScaledWeight(*round_rows(torch.randn(SIZE, width), torch.int8))
    x, bias = torch.randn(n, width).bfloat16(), torch.randn(SIZE).bfloat16()
    codes, of_x = round_rows(x, torch.int8)
    codes = (codes.int() + 128).to(torch.uint8)
    panels = grouped.pack_numbers(weight.weight.view(torch.uint8), 8)
    starts = -128 * weight.weight.sum(1, dtype=torch.int32)
    for b in (None, bias):
        around = torch.full((n + 2, SIZE), POISON, dtype=torch.int16)
        out = around[1:-1].view(torch.bfloat16)
        tensors = [x, codes, of_x, panels, starts, weight.scales, b, out]
        words = [n, SIZE, width, *(0 if t is None else t.data_ptr() for t in tensors)]
        kernel = tiles.multiply_tiles_of_bytes
        with patch.object(tiles, "code_rows", lambda *args: None):
            num_products = run_in_python(kernel, (words, []), 2, near)
        assert torch.equal(out, weight(x, b))
        assert (around[[0, -1]] == POISON).all()
        assert num_products == width // 64 * SIZE // 16 * -(-n // 16)


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
for kernel in tiles.multiply_tiles, tiles.multiply_tiles_of_bytes, tiles._attend_tiles:
    function = numba.cfunc(types.void(types.voidptr), **utils.FAST)(kernel)
    print("KERNEL", function._library.get_asm_str())
"""


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not linear.find_openmp(),
    reason="no processor of this kind, or no threads of GNU OpenMP",
)
def test_compiles_for_a_processor_with_tiles(tmp_path) -> None:
    "Two loops of products, 1 x 4 and 2 x 2 tiles, nothing of which LLVM moves or drops."
    features = "+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512bf16,+amx-tile,+amx-bf16,+amx-int8"
    processor = {"NUMBA_CPU_NAME": "sapphirerapids", "NUMBA_CPU_FEATURES": features}
    env = os.environ | processor | {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = "tdpbf16ps|tdpbusd|tilezero|tileloadd|tilestored|ldtilecfg|tilerelease"
    pairs, in_bytes, attention = (
        Counter(re.findall(rf"^\s+({names})", text, re.M))
        for text in done.stdout.split("KERNEL")[1:]
    )
    assert not in_bytes["tdpbf16ps"] and not pairs["tdpbusd"] and not attention["tdpbusd"]
    for counts in pairs, in_bytes, attention:
        assert counts["tilestored"] % 4 == 0 and counts["ldtilecfg"] and counts["tilerelease"]
        # LLVM has a loop's body several times, with and without asking ahead
        products = counts["tdpbusd" if counts is in_bytes else "tdpbf16ps"]
        bodies = products // 4
        loads = counts["tileloadd"]
        if counts is in_bytes:  # sums begin with a load
            assert not counts["tilezero"]
            loads -= pairs["tilezero"]
        of_one_by_four = loads - 4 * bodies  # it loads five tiles, the other four
        assert products == 4 * bodies
        if counts is attention:
            assert of_one_by_four == bodies
        else:
            assert 0 < of_one_by_four < bodies


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
@pytest.mark.parametrize("static", [None, 0.013])
@pytest.mark.parametrize("size, width", [(192, 576), (100, 64), (130, 2048)])
def test_bytes_on_this_processor(size: int, width: int, static: float | None) -> None:
    torch.manual_seed(0)
    input_scale = None if static is None else torch.tensor(static)
    numbers, scales = round_rows(torch.randn(size, width), torch.int8)
    numbers[0] = -128
    numbers[1] = 127
    slow = ScaledWeight(numbers, scales, input_scale=input_scale)
    fast = tiles.packed_scaled(slow, torch.bfloat16)
    assert isinstance(fast, tiles.TiledScaled)
    assert torch.equal(fast.dequantize(torch.bfloat16), slow.dequantize(torch.bfloat16))
    bias = torch.randn(size).bfloat16()
    for n in (0, 1, 15, 16, 17, 31, 32, 33, 70):
        x = torch.randn(n, width).bfloat16()
        x[: n // 3] *= 3
        x[n // 3 : n // 2] = 0
        x[n - n // 4 :] = 1.6
        assert torch.equal(fast(x), slow(x)) and torch.equal(fast(x, bias), slow(x, bias))
    x[3, 5] = torch.inf
    y = fast(x)
    assert not y[3].isfinite().any() and fast(x).isfinite().all(1).sum() == 69


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


FOUND = {"amx-tile": True, "amx-bf16": True, "amx-int8": True, "avx512f": True}


@pytest.mark.skipif(not linear.find_openmp(), reason="no threads of GNU OpenMP")
@pytest.mark.parametrize(
    "found, system, machine, answer, has",
    [
        (FOUND, "linux", "x86_64", 0, True),
        (FOUND, "linux", "x86_64", -1, False),  # refused, or unknown to this Linux
        (FOUND | {"amx-bf16": False}, "linux", "x86_64", 0, False),
        (FOUND | {"amx-int8": False}, "linux", "x86_64", 0, False),
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


def test_which_product_bytes_get() -> None:
    weights = {
        width: ScaledWeight(*round_rows(torch.randn(64, width), torch.int8)) for width in (64, 48)
    }
    assert tiles.packed_scaled.serves is grouped.serves_scaled
    with patch.object(grouped, "compile_all", lambda kernels, what: None):
        for found in (False, True):
            with patch.object(tiles, "has_tiles", lambda found=found: found):
                for width, weight in weights.items():
                    for dtype in (torch.bfloat16, torch.float32):
                        product = tiles.packed_scaled(weight, dtype)
                        tiled = found and width == 64 and dtype == torch.bfloat16
                        kind = tiles.TiledScaled if tiled else grouped.PackedScaled
                        assert type(product) is kind
                        right = tiles.MULTIPLY_BYTES if tiled else grouped.SCALED[dtype]
                        assert product.kernel is right


ROUND = """
@numba.njit
def run(sums, of_row, bias, scales, out):
    b = bias.ctypes.data if len(bias) else 0
    for i in range(len(sums)):
        at, to = of_row[i:].ctypes.data, out[i].ctypes.data
        put_row({bits}, {high}, sums[i].ctypes.data, at, b, scales.ctypes.data, to)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a processor of another kind")
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("bits, high", [(16, 1), (16, 2), (8, 1), (8, 2)])
def test_the_end_of_a_sum(bits: int, high: int, biased: bool) -> None:
    "Compiled for whatever processor this is: each operation rounds once, and in its place."
    names: dict[str, Any] = {"numba": numba, "put_row": tiles.put_row}
    exec(ROUND.format(bits=bits, high=high), names)
    torch.manual_seed(0)
    count = 64 // high
    of_row, scales = torch.rand(40), torch.rand(count)
    bias = torch.randn(count if biased else 0).bfloat16()
    sums = torch.randn(40, count) * 100
    right = sums.clone()
    if bits == 8:
        sums = (sums * 1000).int()
        right = sums.float() * (of_row[:, None] * scales)
    if biased:
        right += bias.float()
    out = torch.zeros(40, count, dtype=torch.int16)
    names["run"](*(t.numpy() for t in (sums, of_row, bias.view(torch.int16), scales, out)))
    assert torch.equal(out.view(torch.bfloat16), right.bfloat16())
