"""What the kernels of an engine's step compute, by torch: on a pretended card, `--forms torch_forms` takes these in
the place of Triton's interpreter, which takes minutes for a model of 30 layers. Launches are compiled and written
down as ever. That both give the same is `forms_on_a_card.py`'s to show.

    PYTHONPATH=tests python -m teachvllm.pretend --num-sms 4 --forms torch_forms T4 python a_script.py
"""

import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from teachvllm.model_executor import sampler

LN_2 = 0.6931471805599453
Grid = tuple[int, int, int]


def strided(x: torch.Tensor, *shape_and_strides: int) -> torch.Tensor:
    "What a kernel reads from x's address on: so many numbers in each direction, so far apart."
    half = len(shape_and_strides) // 2
    shape, strides = shape_and_strides[:half], shape_and_strides[half:]
    return torch.as_strided(x, shape, strides, x.storage_offset())


def norm_kernel(a: SimpleNamespace, grid: Grid) -> None:
    heads, size = a.HEADS, a.size
    num_tokens = grid[0] // heads
    value = strided(a.x, num_tokens, heads, size, a.x_stride, size, 1).flatten(0, 1).float()
    if a.ADD:
        value = value + strided(a.added, num_tokens, size, a.added_stride, 1).float()
        a.total.view(-1, size).copy_(value)
        value = a.total.view(-1, size).float()
    factor = 1 / (value.square().sum(-1, keepdim=True) / size + a.eps).sqrt()
    a.out.view(-1, size).copy_(value * factor * a.weight.float())


def gate_kernel(a: SimpleNamespace, grid: Grid) -> None:
    gate, up = strided(a.x, grid[0], 2, a.size, a.x_stride, a.size, 1).float().unbind(1)
    z = gate * a.A
    if a.B:  # else what is infinite would become no number
        z = z + gate * gate * gate * a.B
    a.out.copy_(gate / (1 + torch.exp2(-z)) * up)


def rotary_kernel(a: SimpleNamespace, grid: Grid) -> None:
    heads, kv_heads, size, half = a.NUM_HEADS, a.NUM_KV_HEADS, a.SIZE, a.ROTARY // 2
    every = heads + 2 * kv_heads
    x = strided(a.x, grid[0], every, size, a.x_stride, size, 1)
    cos, sin = (
        strided(t, grid[0], 1, a.ROTARY, a.ROTARY, 0, 1)[..., half:] for t in (a.cos, a.sin)
    )
    turned = x.clone()
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned[..., :half] = (first * cos - second * sin).to(x.dtype)
    turned[..., half : 2 * half] = (second * cos + first * sin).to(x.dtype)
    a.out.copy_(turned[:, :heads])
    if kv_heads:
        slots = a.slot_mapping.long()
        live = slots >= 0
        block, offset = slots[live] // a.BLOCK_SIZE, slots[live] % a.BLOCK_SIZE
        a.k_cache[block, offset] = turned[live, heads : heads + kv_heads]
        a.v_cache[block, offset] = x[live, heads + kv_heads :]


def unified_attention(a: SimpleNamespace, grid: Grid) -> Any:
    "With splits the first of them has all keys."
    if a.k_cache.dtype != a.q.dtype:
        return NotImplemented
    starts, lengths = a.query_start_loc.tolist(), a.seq_lens.tolist()
    for i in range(a.num_seqs):
        start, end = starts[i : i + 2]
        if end == start or not lengths[i] or a.SELECT and (end - start == 1) != a.DECODE:
            continue
        y = attend(a, i, slice(start, end), lengths[i])
        if a.NUM_SPLITS == 1:
            a.out[start:end] = y.to(a.out.dtype)
            continue
        some = slice(start * y.shape[1], end * y.shape[1])
        a.partial[some] = 0
        a.partial[some, 0, : a.HEAD_SIZE] = y.flatten(0, 1)
        a.stats[some] = torch.tensor([-torch.inf, 0])  # the largest score, and the sum
        a.stats[some, 0] = torch.tensor([0.0, 1.0])
    return None


def attend(a: SimpleNamespace, i: int, rows: slice, length: int) -> torch.Tensor:
    "Sequence i's new tokens: [tokens, heads, head_size] float32."
    position = torch.arange(length)[-(rows.stop - rows.start) :, None]
    low = max(0, int(position[0]) + 1 - a.WINDOW) // a.BLOCK_SIZE if a.WINDOW else 0  # a block
    blocks = a.block_table[i, low : -(-length // a.BLOCK_SIZE)].long()
    place = torch.arange(low * a.BLOCK_SIZE, length)
    seen = place <= position
    if a.WINDOW:
        seen &= place > position - a.WINDOW
    read = seen.any(0)  # other keys may be another sequence's by now
    keys, values = (
        cache[blocks].flatten(0, 1)[: len(place)][read].float().repeat_interleave(a.HEADS_PER_KV, 1)
        for cache in (a.k_cache, a.v_cache)
    )
    scores = torch.einsum("mhd,nhd->hmn", a.q[rows].float(), keys) * a.scale
    if a.SOFT_CAP:
        scores = torch.tanh(scores / a.soft_cap) * a.soft_cap
    weights = (scores * LN_2).masked_fill(~seen[:, read], -torch.inf).softmax(-1)
    return torch.einsum("hmn,nhd->mhd", weights, values)


def merged(partial: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    "Splits' sums [rows, splits, size], and their largest scores and totals: one softmax's [rows, size]."
    largest, total = stats.unbind(-1)
    weight = torch.exp2(largest - largest.amax(-1, keepdim=True))
    return (partial * weight[..., None]).sum(1) / (total * weight).sum(1, keepdim=True)


def merge_splits(a: SimpleNamespace, grid: Grid) -> None:
    result = merged(a.partial[: grid[0]], a.stats[: grid[0]])[:, : a.HEAD_SIZE]
    a.out.view(-1, a.HEAD_SIZE)[: grid[0]] = result.to(a.out.dtype)


def matrix(a: SimpleNamespace) -> torch.Tensor:
    "What words and pairs stand for: [outputs, columns] float32."
    sums = (zlib.crc32(x.view(torch.uint8).numpy()) for x in (a.words, a.pairs))
    how = a.BITS, a.FLOAT8, a.MINIMUM, a.group
    key = (a.words.shape, a.pairs.dtype, *how, *sums)
    if key not in matrices:
        if len(matrices) > 250:  # of two models
            matrices.clear()
        matrices[key] = unpack(a)
    return matrices[key]


matrices: dict[Any, torch.Tensor] = {}


def unpack(a: SimpleNamespace) -> torch.Tensor:
    words = a.words.int() & 0xFFFF
    parts = [(words >> a.BITS * i) & ((1 << a.BITS) - 1) for i in range(16 // a.BITS)]
    numbers = torch.stack(parts, 1).permute(2, 0, 1, 3).flatten(1)  # [outputs, columns]
    if a.FLOAT8:
        numbers = numbers.to(torch.uint8).view(torch.float8_e4m3fn).float() / 256
    dtype = torch.float16 if a.pairs.dtype == torch.int32 else torch.float32
    two = a.pairs[..., None].contiguous().view(dtype).float()
    scale, second = (x.T.repeat_interleave(a.group, 1) for x in two.unbind(-1))
    if a.FLOAT8:
        return numbers * scale
    return numbers * scale + second if a.MINIMUM else (numbers - second) * scale


def grouped_kernel(a: SimpleNamespace, grid: Grid) -> None:
    "With splits the first of them has all columns."
    weight = matrix(a)
    y = strided(a.x, a.rows, weight.shape[1], a.x_stride, 1).float() @ weight.T
    if a.SPLIT:
        a.out.zero_()
        a.out[0] = y
    else:
        a.out.copy_(y + a.bias.float())


def take_kernel(a: SimpleNamespace, grid: Grid) -> None:
    weight = matrix(a)
    rows = weight if a.ids is None else weight[a.ids[: a.count].long().clamp(0, a.size - 1)]
    a.out.view(-1)[: rows.numel()] = rows.flatten().to(a.out.dtype)


def sample_kernel(a: SimpleNamespace, grid: Grid) -> None:
    logits = strided(a.logits, grid[0], a.vocab_size, a.row_stride, 1).float()
    likeliest = sampler.Sampler.greedy(logits)
    heat = a.temperature[: grid[0], None]
    weights = (logits / torch.where(heat > 0, heat, 1)).softmax(-1)
    drawn = sampler.inverse_cdf(weights.nan_to_num(0), a.uniform[: grid[0]])
    drawn = torch.where(weights.isnan().any(-1), 0, drawn)  # no token may come, or one must
    a.ids.copy_(torch.where((heat[:, 0] > 0) & (likeliest >= 0), drawn, likeliest))


def sample_sorted_kernel(a: SimpleNamespace, grid: Grid) -> None:
    probs = strided(a.probs, grid[0], a.vocab_size, a.row_stride, 1)
    for i in (~a.enough).nonzero()[:, 0].tolist():  # few at a time: a profile has hundreds
        rows = a.rows[i : i + 1]
        a.chosen[i : i + 1] = sampler._draw(*sampler.sort_falling(probs[i : i + 1]), a, rows)


# by where they are: a chapter's own kernels of these names are interpreted
KERNELS: dict[str, tuple[Callable[..., Any], ...]] = {
    "fused_ops": (norm_kernel, gate_kernel, rotary_kernel),
    "attention": (unified_attention,),
    "utils": (merge_splits,),
    "grouped": (grouped_kernel, take_kernel),
    "sampler": (sample_kernel, sample_sorted_kernel),
}
FORMS = {
    f"teachvllm.gpu_kernels.{module}.{form.__name__}": form
    for module, forms in KERNELS.items()
    for form in forms
}
