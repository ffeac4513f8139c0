"""Products of quantized weights in Triton: equal to the plain forms for each layout, the same tokens
from an engine on a pretended card, and compiled for four chips.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():  # Triton must know before it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from helpers import answers_on_card, run_compiling  # noqa: E402

from teachvllm.gpu_kernels import attention, grouped  # noqa: E402
from teachvllm.gpu_kernels.utils import interpreted  # noqa: E402
from teachvllm.kernels import KERNELS, KernelTable, platform_kernels  # noqa: E402
from teachvllm.quantization.grouped import GroupedWeight  # noqa: E402
from teachvllm.quantization.scaled import ScaledWeight  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.inference_mode():
        yield


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def randint(low: int, high: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(high + sum(shape))
    return torch.randint(low, high, shape, generator=generator).to(DEVICE)


def make_weight(
    n: int, k: int, bits: int, group: int, kind: str, dtype: torch.dtype = HALF
) -> GroupedWeight:
    "Random numbers, with what a checkpoint of that kind has beside its scales."
    numbers = randint(0, 1 << bits, n, k).to(torch.uint8)
    scales = randn(n, k // group).abs().add(0.1).to(dtype)
    zeros: Any = 1 << bits - 1
    more = {}
    if kind == "zeros":  # GPTQ's are up to 256
        zeros = randint(0, (1 << bits) + 1, n, k // group).short()
    elif kind == "minima":
        more["minima"] = randn(n, k // group, seed=1).to(dtype)
    elif kind == "order":
        order = torch.randperm(k, generator=torch.Generator().manual_seed(k))
        more["groups"] = order.to(DEVICE) // group
    return GroupedWeight(numbers, scales, zeros, bits, **more)


def assert_close(got: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, bias: Any) -> None:
    """That `got` is x times the matrix, both float64, summed in float32 and rounded once; a step of
    its dtype, or of float32 a few for what is added up.
    """
    exact = x @ matrix.T + bias
    sums = x.abs() @ matrix.abs().T + bias.abs()
    step = torch.finfo(got.dtype).eps
    if got.dtype != FLOAT:
        step *= 1.1 if interpreted() and got.dtype == BRAIN else 0.6
    # numbers that are larger than they should be, and what takes that away, cost some digits
    limit = step * exact.abs() + 64 * torch.finfo(FLOAT).eps * sums + 1e-6
    assert got.dtype in (HALF, BRAIN, FLOAT) and got.is_contiguous()
    assert ((got.double() - exact).abs() <= limit).all()  # False for NaN


# Whole numbers of four and eight bits in groups

LAYOUTS = [
    (100, 576, 32),
    (64, 576, 64),
    (33, 576, 576),
    (80, 1536, 128),
    (64, 1536, 1536),
    (16, 64, 16),
    (40, 96, 48),
]


@pytest.mark.parametrize("kind", ["one", "zeros", "minima", "order"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("n, k, group", LAYOUTS)
def test_products(n: int, k: int, group: int, bits: int, kind: str) -> None:
    "Few rows and many, each dtype, rows that lie in wider ones."
    weight = make_weight(n, k, bits, group, kind)
    table = KernelTable(KERNELS["cuda"])
    if k == 96 and bits == 4:  # 64 columns are no part of it
        assert table.get("grouped_linear", weight, HALF) is None
        return
    order = slice(None) if weight.order is None else weight.order
    plain = weight.dequantize(torch.float64)
    for rows, dtype in ((1, HALF), (3, BRAIN), (16, HALF), (33, BRAIN), (1, FLOAT)):
        kernel = table.get("grouped_linear", weight, dtype)
        assert kernel is grouped.TritonGroups
        packed = kernel(weight, dtype)
        bias = randn(n, seed=2, dtype=dtype)
        x = randn(rows, k + 16, dtype=dtype)[:, 8 : k + 8]
        assert_close(packed(x, bias), x[:, order].double(), plain, bias.double())
    assert_close(packed(x), x[:, order].double(), plain, torch.zeros_like(bias).double())


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_that_need_32_bits(bits: int) -> None:
    weight = make_weight(48, 128, bits, 32, "minima", FLOAT)
    packed = grouped.TritonGroups(weight, HALF)
    assert packed.pairs.dtype == torch.int64
    x = randn(3, 128, dtype=HALF)
    none = torch.zeros(48, device=DEVICE).double()
    assert_close(packed(x), x.double(), weight.dequantize(torch.float64), none)
    narrow = grouped.TritonGroups(make_weight(48, 128, bits, 32, "minima"), HALF)
    assert narrow.pairs.dtype == torch.int32 and narrow.nbytes < packed.nbytes


@pytest.mark.parametrize("bits, kind", [(4, "zeros"), (8, "one"), (4, "minima")])
def test_the_matrix_and_its_rows(bits: int, kind: str) -> None:
    "Unpacked it is the same, bit for bit but for a minimum; and so is a product of many rows."
    weight = make_weight(100, 192, bits, 64, kind)
    for dtype in (HALF, FLOAT):
        packed = grouped.TritonGroups(weight, dtype)
        plain = weight.dequantize(dtype)
        exactly = {} if kind == "minima" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(packed.dequantize(dtype), plain, **exactly)
        ids = torch.tensor([99, 0, 7, 7, 50], device=DEVICE)
        assert torch.equal(packed.rows(ids), packed.dequantize(dtype)[ids])
        assert packed.rows(ids[:0]).shape == (0, 192)
        outside = torch.tensor([-5, 100, 1 << 40], device=DEVICE)
        assert torch.equal(packed.rows(outside), packed.dequantize(dtype)[[0, 99, 99]])
        many = randn(packed.most_rows + 1, 192, dtype=dtype)
        bias = randn(100, dtype=dtype)
        expected = nn.functional.linear(many, packed.dequantize(dtype), bias)
        torch.testing.assert_close(packed(many, bias), expected, rtol=1e-2, atol=1e-1)
    in_order = grouped.TritonGroups(make_weight(64, 128, 4, 32, "order"), HALF)
    assert in_order.order is not None
    moved = in_order.to(torch.device(DEVICE))  # a module: its tensors go where the model goes
    assert {"words", "pairs", "order"} <= dict(moved.named_buffers()).keys()


def test_splits_of_the_columns() -> None:
    "On a card with more multiprocessors programs share a row; the same sums each time."
    weight = make_weight(100, 1536, 4, 128, "zeros")
    packed = grouped.TritonGroups(weight, HALF)
    x = randn(3, 1536, dtype=HALF)
    bias = randn(100, dtype=HALF)
    whole = packed(x, bias)
    found = {packed.tiles(3).splits}
    device = attention.get_device_properties()
    for num_sms in (2, 3, 132):
        chip = attention.DeviceProperties(device.capability, num_sms, device.shared_memory)
        with patch.object(attention, "get_device_properties", lambda chip=chip: chip):
            found.add(packed.tiles(3).splits)
            split = packed(x, bias)
            assert torch.equal(split, packed(x, bias))
            assert_close(split, x.double(), weight.dequantize(torch.float64), bias.double())
            torch.testing.assert_close(split, whole, rtol=2e-3, atol=2e-2)
    if interpreted():
        assert found == {2, 4, 6}


def test_what_it_does_not_take() -> None:
    table = KernelTable(KERNELS["cuda"])
    weight = make_weight(16, 64, 4, 32, "one")
    assert table.get("grouped_linear", weight, HALF)
    assert table.get("grouped_linear", weight, torch.float64) is None
    for k, group in ((64, 8), (48, 16), (96, 32)):
        assert table.get("grouped_linear", make_weight(16, k, 4, group, "one"), HALF) is None
    mixed = make_weight(16, 64, 4, 32, "one")
    mixed.groups = torch.arange(64, device=DEVICE) // 40
    assert table.get("grouped_linear", mixed, HALF) is None
    old = attention.DeviceProperties((7, 5), 40, 64 * 1024)
    with patch.object(attention, "get_device_properties", lambda: old):
        assert table.get("grouped_linear", weight, HALF)
        assert table.get("grouped_linear", weight, BRAIN) is None
    packed = grouped.TritonGroups(weight, HALF)
    for x in (randn(2, 64), randn(2, 32, dtype=HALF)):
        with pytest.raises(AssertionError):
            packed(x)
    if DEVICE == "cpu":
        with patch.object(grouped, "interpreted", lambda: False):
            assert table.get("grouped_linear", weight, HALF) is None
    assert "gpu_kernels" not in str(platform_kernels("cpu").names.get("scaled_linear"))


def test_each_kind_of_launch_is_made_beforehand() -> None:
    "Whatever number of rows comes, one like it has been launched."
    for cores, most, num_sms in ((True, 256, 132), (False, 16, 40), (True, 1 << 30, 108)):
        for size, steps in ((64, 9), (576, 24), (4096, 32), (28672, 32), (4096, 112)):
            tiles = partial(grouped.product_tiles, size=size, steps=steps, tensor_cores=cores)
            tiles = partial(tiles, num_sms=num_sms, tallest=128 if most > 256 else 64)
            beforehand = [n for n in grouped.row_counts(most, tiles) if n <= most]
            asked = range(1, min(most, 20_000) + 1)
            kinds = [
                {(t.block_m, t.splits > 1) for t in map(tiles, n)} for n in (beforehand, asked)
            ]
            assert kinds[0] == kinds[1] and len(beforehand) == len(kinds[0])
            for rows in (1, 5, 64, 1000):
                t = tiles(rows)
                assert (t.splits - 1) * t.each < steps <= t.splits * t.each  # none has nothing


# Both in eight bits


def scaled_weight(
    n: int, k: int, dtype: torch.dtype, block: Any = None, input_scale: float | None = None
) -> ScaledWeight:
    codes = randn(n, k) * (40 if dtype == torch.int8 else 100)
    codes = codes.round().clamp(-127, 127) if dtype == torch.int8 else codes
    shape = (n, 1) if block is None else (-(-n // block[0]), -(-k // block[1]))
    static = None if input_scale is None else torch.tensor(input_scale, device=DEVICE)
    scales = randn(*shape, seed=3).abs() / 100 + 1e-3
    return ScaledWeight(codes.to(dtype), scales, block, static)


def matrix_of(weight: ScaledWeight) -> torch.Tensor:
    codes = weight.weight.float().double()
    scales = weight.scales.double()
    if weight.block is not None:
        tall, wide = weight.block
        scales = scales.repeat_interleave(tall, 0)[: codes.shape[0]]
        scales = scales.repeat_interleave(wide, 1)[:, : codes.shape[1]]
    return codes * scales


def rounded(
    x: torch.Tensor, dtype: torch.dtype, static: Any = None, span: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    "The plain form: codes [n, k], and scales [n, spans]."
    top = 127.0 if dtype == torch.int8 else 448.0
    codes, scales = [], []
    for part in x.float().split(span or x.shape[1], 1):
        poison = (part * 0).sum(1, keepdim=True)
        if static is None:
            largest = part.abs().amax(1, keepdim=True)
            turn = torch.where(largest > 1e-30, torch.full_like(largest, top) / largest, 0)
            scale = largest * (1 / top)
        else:
            turn = 1 / static
            scale = static
        code = part * turn
        code = code.round().clamp(-128, 127) if dtype == torch.int8 else code.clamp(-top, top)
        codes.append(code.to(dtype))
        scales.append(scale + poison)
    return torch.cat([c.view(torch.uint8) for c in codes], 1).view(dtype), torch.cat(scales, 1)


@pytest.mark.parametrize("target", [torch.int8, E4M3])
@pytest.mark.parametrize("static", [None, 0.02])
def test_rows_are_rounded_as_torch_does_it(target: torch.dtype, static: float | None) -> None:
    "Bit for bit: ties, tiny numbers, rows of zeros, numbers that a static scale makes too large."
    scale = None if static is None else torch.tensor(static, device=DEVICE)
    for dtype in (HALF, BRAIN, FLOAT):
        for rows, k in ((1, 576), (3, 1536), (2, 5000)):
            x = randn(rows, k, dtype=dtype)
            x[0] = torch.arange(k, device=DEVICE).remainder(255).sub(127).to(dtype) / 2  # ties
            x[-1, :9] = torch.tensor([2.0**-p for p in range(9)]).to(x)
            for span in (None, 128):
                found = grouped.round_on_gpu(x, target, scale, span)
                expected = rounded(x, target, scale, span)
                assert torch.equal(found[0].float(), expected[0].float())
                assert torch.equal(found[1], expected[1])
    zero = torch.zeros(2, 64, device=DEVICE)
    codes, scales = grouped.round_on_gpu(zero, target)
    assert not codes.float().any() and not scales.any()
    for poison in (torch.inf, torch.nan):
        bad = randn(2, 64)
        bad[1, 5] = poison
        _, scales = grouped.round_on_gpu(bad, target)
        assert scales[0].isfinite() and scales[1].isnan()


def test_every_e4m3_is_its_own_nearest() -> None:
    "And between two neighbours torch rounds alike."
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    numbers = codes[codes.isfinite()].unique().to(DEVICE)
    between = (numbers[1:] + numbers[:-1]) / 2
    for x in (numbers, between, between * 0.9999, between * 1.0001):
        one = torch.ones([], device=DEVICE)
        found, _ = grouped.round_on_gpu(x[None], E4M3, one)
        assert torch.equal(found[0].float(), x.to(E4M3).float())


@pytest.mark.parametrize("n, k", [(100, 576), (300, 256), (64, 1536), (24, 48)])
def test_sums_of_int8_are_torchs(n: int, k: int) -> None:
    "Bit for bit: in one program, in splits, and where int8 is multiplied as float16."
    weight = scaled_weight(n, k, torch.int8)
    product = grouped.TritonScaled(weight, FLOAT)
    ones = torch.ones(33, device=DEVICE)
    product.scales.fill_(1)
    none = torch.zeros(n, device=DEVICE)
    for rows in (1, 3, 16, 33):
        codes = randint(-127, 128, rows, k).to(torch.int8)
        expected = (codes.double() @ weight.weight.double().T).to(torch.int32)
        for num_sms, cores in ((1, True), (132, True), (1, False), (132, False)):
            if rows == 33 and not cores:
                continue  # torch's product
            chip = attention.DeviceProperties((9, 0), num_sms, 227 * 1024)
            product.tensor_cores = cores
            with patch.object(attention, "get_device_properties", lambda chip=chip: chip):
                parts = product._multiply(codes, ones[:rows], none)
            assert parts.dtype == (torch.int32 if parts.dim() == 3 else FLOAT)
            sums = parts.sum(0, dtype=torch.int32) if parts.dim() == 3 else parts
            assert torch.equal(sums, expected.to(sums.dtype))


@pytest.mark.parametrize(
    "target, block, static",
    [
        (torch.int8, None, None),
        (torch.int8, None, 0.02),
        (E4M3, None, None),
        (E4M3, None, 0.01),
        (E4M3, (128, 128), None),
    ],
)
@pytest.mark.parametrize("n, k", [(100, 576), (300, 256), (64, 1536), (24, 48)])
def test_scaled_products(n: int, k: int, target: torch.dtype, block: Any, static: Any) -> None:
    weight = scaled_weight(n, k, target, block, static)
    table = KernelTable(KERNELS["cuda"])
    matrix = matrix_of(weight)
    many = 70 if k == 256 else 20  # the tallest tile takes the interpreter long
    for rows, dtype in ((1, HALF), (3, BRAIN), (16, FLOAT), (33, BRAIN), (many, HALF)):
        kernel = table.get("scaled_linear", weight, dtype)
        assert kernel is grouped.TritonScaled
        product = kernel(weight, dtype)
        x = randn(rows, k + 16, dtype=dtype)[:, 8 : k + 8]
        bias = randn(n, seed=2, dtype=dtype)
        span = block[1] if block else None
        codes, scales = rounded(x, target, weight.input_scale, span)
        scales = scales.double().repeat_interleave(span or k, 1)[:, :k]
        exact = codes.float().double() * scales
        assert_close(product(x, bias), exact, matrix, bias.double())
    torch.testing.assert_close(product.dequantize(FLOAT), matrix.float())
    none = torch.zeros(n, dtype=torch.float64, device=DEVICE)
    assert_close(product(x), exact, matrix, none)


@pytest.mark.parametrize(
    "n, k, block", [(100, 576, None), (300, 256, (128, 128)), (64, 1536, None)]
)
def test_e4m3_without_a_product_of_it(n: int, k: int, block: Any) -> None:
    "Below compute capability 8.9 weights become float16, and activations stay as they are."
    weight = scaled_weight(n, k, E4M3, block)
    matrix = matrix_of(weight)
    old = attention.DeviceProperties((8, 0), 4, 163 * 1024)
    with patch.object(attention, "get_device_properties", lambda: old):
        for rows, dtype in ((1, HALF), (3, BRAIN), (33, HALF), (16, FLOAT)):
            assert grouped.TritonScaled.serves(weight, dtype)
            product = grouped.TritonScaled(weight, dtype)
            assert product.words is not None
            x = randn(rows, k, dtype=dtype)
            bias = randn(n, seed=2, dtype=dtype)
            assert_close(product(x, bias), x.double(), matrix, bias.double())
        torch.testing.assert_close(product.dequantize(FLOAT), matrix.float())
        odd = scaled_weight(16, 48, E4M3)
        assert not grouped.TritonScaled.serves(odd, HALF)


@pytest.mark.parametrize("target", [torch.int8, E4M3])
def test_weights_alone_in_eight_bits(target: torch.dtype) -> None:
    "A weight may ask for activations as they are, whatever the GPU can do."
    weight = scaled_weight(100, 192, target)
    weight.weight_only = True
    product = grouped.TritonScaled(weight, HALF)
    x = randn(3, 192, dtype=HALF)
    none = torch.zeros(100, dtype=torch.float64, device=DEVICE)
    assert_close(product(x), x.double(), matrix_of(weight), none)
    narrow = ScaledWeight(weight.weight[:, :16], weight.scales, weight_only=True)
    assert not grouped.TritonScaled.serves(narrow, HALF)


def test_each_byte_of_e4m3_is_widened() -> None:
    "All that are numbers, in both halves of a word, subnormal ones and signed zeros included."
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 127 != 127].repeat(4)[:992].view(31, 32).to(DEVICE)
    layout = grouped.layout_of(32, 32, 8, True)
    assert layout is not None
    one = torch.ones(31, 1, device=DEVICE)
    product = grouped.WordProduct(codes, one, 0 * one, layout, 32, FLOAT)
    assert torch.equal(product.dequantize(FLOAT), codes.view(E4M3).float())


def test_what_scaled_products_refuse() -> None:
    serves = grouped.TritonScaled.serves
    assert serves(scaled_weight(24, 48, torch.int8), HALF)
    assert not serves(scaled_weight(24, 40, torch.int8), HALF)
    assert not serves(scaled_weight(24, 48, torch.int8, (128, 128)), HALF)
    assert not serves(scaled_weight(128, 128, E4M3, (64, 64)), HALF)
    assert not serves(scaled_weight(24, 48, torch.float8_e5m2), HALF)
    assert not serves(scaled_weight(24, 48, torch.int8), torch.float64)


@pytest.mark.parametrize("target", [torch.int8, E4M3])
def test_a_row_that_is_no_number_is_none_afterwards(target: torch.dtype) -> None:
    product = grouped.TritonScaled(scaled_weight(24, 64, target), HALF)
    x = randn(3, 64, dtype=HALF)
    x[1, 3] = torch.nan
    y = product(x)
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


# On a card


@pytest.mark.parametrize("card", ["T4", pytest.param("H100", marks=pytest.mark.slow)])
def test_an_engine_on_a_pretended_card(card: str) -> None:
    "Eagerly and in recorded steps: the CPU's tokens, by these products."
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is in the way")
    wrong = answers_on_card(card, "products_on_a_card.py")
    assert len(wrong) >= 8 and not any(wrong.values()), wrong


@pytest.mark.gpu
def test_products_are_recorded() -> None:
    "A replay computes with what lies there now; nothing waits while it is recorded."
    for product in (
        grouped.TritonGroups(make_weight(100, 576, 4, 64, "order"), HALF),
        grouped.TritonScaled(scaled_weight(104, 576, torch.int8), HALF),
        grouped.TritonScaled(scaled_weight(104, 576, E4M3), HALF),
    ):
        for rows in (1, 20):
            x = torch.zeros(rows, 576, dtype=HALF, device="cuda")
            product(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = product(x)
            x.copy_(randn(rows, 576, dtype=HALF))
            graph.replay()
            assert torch.equal(y, product(x)) and y.abs().max() > 0


# Real chips

COMPILE = """
import json
from types import SimpleNamespace
from unittest.mock import patch

import torch
from teachvllm.gpu_kernels import attention, grouped
from teachvllm.gpu_kernels.ladder import compiling_for
from teachvllm.gpu_kernels.sass import CARDS, machine_code
from teachvllm.quantization.grouped import GroupedWeight

def weight(n, k, bits, group):
    scales = torch.ones(n, k // group)
    numbers = torch.zeros(n, k, dtype=torch.uint8)
    return GroupedWeight(numbers, scales, 8, bits, minima=-scales if group == 32 else None)

def scaled(n, k, dtype, block):
    scales = torch.ones((n, 1) if block is None else (n // 128, -(-k // 128)))
    codes = torch.zeros(n, k).to(dtype)
    return SimpleNamespace(weight=codes, scales=scales, block=block, input_scale=None)

for card in CARDS:
    capability = divmod(card.capability, 10)
    chip = attention.DeviceProperties(capability, card.num_sms, card.max_shared)
    half = torch.float16 if card.capability == 75 else torch.bfloat16
    with (
        patch.object(attention, "get_device_properties", lambda: chip),
        compiling_for(card.capability) as made,
    ):
        if card.capability != 89:  # as 80
            wide = grouped.TritonGroups(weight(8192, 512, 4, 128), half)
            wide.rows(torch.zeros(3, dtype=torch.int64))
            grouped.TritonGroups(weight(256, 576, 4, 32), half)
            grouped.TritonGroups(weight(256, 576, 8, 576), half)
            grouped.TritonGroups(weight(256, 576, 4, 64), torch.float32)
        grouped.TritonScaled(scaled(256, 576, torch.int8, None), half)
        grouped.TritonScaled(scaled(256, 512, torch.float8_e4m3fn, None), half)
        grouped.TritonScaled(scaled(256, 576, torch.float8_e4m3fn, (128, 128)), half)
    seen = set()
    for kernel in made:
        if kernel.hash in seen:
            continue
        seen.add(kernel.hash)
        code = machine_code(kernel)
        names = kernel.src.fn.arg_names
        known = {names[place[0]]: value for place, value in kernel.src.constants.items()}
        widest = max(one.loaded_bytes for one in code.body)
        print("made", json.dumps([card.name, code.name, code.spilled, card.max_shared - code.shared,
              widest, code.num_warps, code.tensor_core, known]))
"""


def test_they_compile_for_real_chips() -> None:
    "None spills or takes more shared memory than there is; weights come 16 bytes at a time."
    child = run_compiling("-c", COMPILE)
    lines = [line[5:] for line in child.stdout.splitlines() if line.startswith("made ")]
    found = [json.loads(line) for line in lines]
    cores: dict[str, set[str]] = {}
    for card, name, spilled, room, widest, num_warps, core, known in found:
        assert not spilled and room >= 0, (card, name, known)
        tile = {
            "grouped_kernel": lambda c: c["BLOCK_N"] * c["PART"] * 2,
            "scaled_kernel": lambda c: c["BLOCK_N"] * c["BLOCK_K"],
            "round_kernel": lambda c: c["BLOCK"] * 2,
        }.get(name)
        if tile is not None:  # 16 bytes, unless a thread has fewer
            assert widest == min(16, tile(known) // (32 * num_warps)), (card, name, known)
            cores.setdefault(f"{card} {name.removesuffix('_kernel')}", set()).add(core)
    assert cores == {
        "T4 grouped": {""},
        "T4 scaled": {""},
        "T4 round": {""},
        "A100 grouped": {"HMMA", ""},  # float32 is none of theirs
        "A100 scaled": {"IMMA"},
        "A100 round": {""},
        "RTX 4090 scaled": {"IMMA", "QMMA"},
        "RTX 4090 round": {""},
        "H100 grouped": {"HGMMA", ""},
        "H100 scaled": {"IGMMA", "QGMMA"},
        "H100 round": {""},
    }
    assert len(found) > 50
