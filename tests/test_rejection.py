"""Drafts are kept by rejection sampling: the text has the target's distribution, whatever drafts,
and the forms in torch, Numba and Triton say the same, bit for bit.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

if not torch.cuda.is_available():  # Triton must know before it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from helpers import run_compiling

from teachvllm.kernels import KernelTable
from teachvllm.model_executor.sampler import keep_mask
from teachvllm.speculative.rejection import (
    Rejected,
    accepts,
    draw_whole,
    reject_batch,
    rejection_kernels,
    rejection_sample,
    residual,
    whole_weights,
)

FORMS = ["torch", "numba", "triton"]
Form = Callable[..., Rejected]


def form_of(name: str) -> Form:
    if name == "torch":
        return reject_batch
    kernel = rejection_kernels({"numba": "cpu", "triton": "cuda"}[name]).find("reject")
    if kernel is None:
        pytest.skip(f"no {name} here")
    on = "cuda" if name == "triton" and torch.cuda.is_available() else "cpu"

    def run(*args: Any) -> Rejected:
        moved = [x.to(on) if isinstance(x, torch.Tensor) else x for x in args]
        assert kernel.serves(*moved)
        return Rejected(*(x.cpu() for x in kernel(*moved)))

    return run


def random_probs(generator: torch.Generator, rows: int, vocab_size: int, heat: float = 1.0) -> Any:
    return (torch.randn(rows, vocab_size, generator=generator) / heat).softmax(-1)


def numbers(generator: torch.Generator, count: int) -> torch.Tensor:
    return torch.rand(count, generator=generator)


def chi_square(observed: torch.Tensor, probs: torch.Tensor) -> None:
    "Counts [n] are as probable as not under `probs`: within five standard deviations of chi-square."
    total = observed.sum()
    possible = probs > 0
    assert observed[~possible].sum() == 0  # what cannot come did not
    expected = probs[possible].double() * total
    assert expected.min() >= 5
    distance = ((observed[possible] - expected) ** 2 / expected).sum()
    freedom = int(possible.sum()) - 1
    assert distance < freedom + 5 * (2 * max(freedom, 1)) ** 0.5, float(distance)


P = torch.tensor([0.4, 0.05, 0.25, 0.1, 0.2, 0.0])
FILTERED = (
    P
    * keep_mask(
        P.sort(descending=True).values[None],
        torch.tensor([3]),
        torch.tensor([1.0]),
        torch.tensor([0.0]),
    )[0][P.argsort(descending=True).argsort()]
)
TARGETS = {
    "plain": P,
    "greedy": F.one_hot(torch.tensor(2), 6).float(),
    "top_k": FILTERED / FILTERED.sum(),
}
DRAFTS = {
    "equal": P,
    "near": torch.tensor([0.3, 0.1, 0.3, 0.1, 0.15, 0.05]),
    "disjoint": F.one_hot(torch.tensor(5), 6).float(),
    "half": torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0, 0.0]),
    "certain": None,
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", FORMS)
def test_each_token_has_the_targets_distribution(form: str, target: str, draft: str) -> None:
    "Whatever the drafts. Two drafts a sequence, and the target's three rows differ."
    interpreted = form == "triton" and not torch.cuda.is_available()
    n = 250 if interpreted else 40_000
    generator = torch.Generator().manual_seed(1)
    p = TARGETS[target]
    rows = torch.stack([p, p.roll(1), p.roll(2)])
    q = DRAFTS[draft]
    source = torch.tensor([0.3, 0.1, 0.3, 0.1, 0.15, 0.05]) if q is None else q
    ids = torch.multinomial(source, 2 * n, replacement=True, generator=generator)
    out = form_of(form)(
        rows.repeat(n, 1),
        None if q is None else q.expand(2 * n, -1).contiguous(),
        ids,
        [2] * n,
        numbers(generator, 2 * n),
        numbers(generator, n),
    )
    assert out.token_ids.shape == (n, 3)
    chi_square(out.token_ids[:, 0].bincount(minlength=6), p)
    for accepted in (1, 2):
        some = out.token_ids[out.num_accepted >= accepted, accepted]
        if len(some) >= 200:
            chi_square(some.bincount(minlength=6), rows[accepted])
    shares = torch.arange(3) < out.num_accepted[:, None]
    assert torch.equal(out.token_ids[:, :2][shares[:, :2]], ids.view(n, 2)[shares[:, :2]])
    if q is not None:
        expected = torch.minimum(p, q).sum()  # 1 - TV
        assert (shares[:, 0].float().mean() - expected).abs() < 4 * (0.25 / n) ** 0.5
    if draft == "equal" and target == "plain":
        assert shares[:, 0].all()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_forms_agree_bit_for_bit(data: st.DataObject) -> None:
    "Ragged batches, over vocabularies of one block and of several; rows of zeros and of NaN too."
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    vocab_size = data.draw(st.sampled_from([1, 2, 7, 64, 1000]))
    counts = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    num_drafts = sum(counts)
    heat = data.draw(st.sampled_from([0.1, 1.0, 5.0]))
    target = random_probs(generator, num_drafts + len(counts), vocab_size, heat)
    kind = data.draw(st.sampled_from(["other", "near", "equal", "certain"]))
    rows = [row + seq for seq, row in _rows_of(counts)]
    draft = random_probs(generator, num_drafts, vocab_size, heat)
    if kind == "near":
        draft = (target[rows].log() + 0.3 * draft).softmax(-1)
    elif kind == "equal":
        draft = target[rows]
    ids = torch.zeros(0, dtype=torch.int64)
    if num_drafts:
        ids = torch.multinomial(draft, 1, generator=generator)[:, 0]
    if broken := data.draw(st.sampled_from(["", "zeros", "nan"])):
        target[-1] = {"zeros": 0.0, "nan": torch.nan}[broken]
    uniform = numbers(generator, num_drafts)
    resample = data.draw(st.sampled_from([0.0, 1 - 2**-24, None]))
    resample = (
        numbers(generator, len(counts)).fill_(resample)
        if resample is not None
        else numbers(generator, len(counts))
    )
    probs = None if kind == "certain" else draft
    args = target, probs, ids, counts, uniform, resample
    expected = []
    first = 0
    for seq, count in enumerate(counts):
        mine = slice(first, first + count)
        expected.append(
            rejection_sample(
                target[first + seq : first + seq + count + 1],
                None if probs is None else probs[mine],
                ids[mine],
                uniform[mine],
                resample[seq : seq + 1],
            )
        )
        first += count
    batch = reject_batch(*args)
    assert batch.tolists() == expected
    if kind == "equal" and not broken:
        assert batch.num_accepted.tolist() == counts
    for name in available():
        with patch_block(name):
            got = form_of(name)(*args)
        assert torch.equal(got.num_accepted, batch.num_accepted), name
        assert torch.equal(got.token_ids, batch.token_ids), name


def _rows_of(counts: list[int]) -> Iterator[tuple[int, int]]:
    first = 0
    for seq, count in enumerate(counts):
        yield from ((seq, first + j) for j in range(count))
        first += count


def available() -> list[str]:
    devices = {"numba": "cpu", "triton": "cuda"}
    return [name for name, device in devices.items() if rejection_kernels(device).find("reject")]


def patch_block(name: str) -> Any:
    "Small blocks, so that a vocabulary of a thousand has several."
    if name == "triton":
        from teachvllm.gpu_kernels import rejection

        return patch.object(rejection, "BLOCK", 256)
    return patch.dict({})


def test_one_number_decides() -> None:
    "p = q stays even for the largest number below 1; what the target does not know never does."
    largest = torch.tensor([1 - 2**-24])
    for x in (1.0, 0.3, 1e-30, 1e-38):
        p = torch.tensor([x])
        assert accepts(p, p, largest)
        assert not accepts(p * 0, p, largest * 0)
    assert accepts(torch.tensor([0.5]), torch.tensor([1.0]), torch.tensor([0.5 - 2**-24]))
    assert not accepts(torch.tensor([0.5]), torch.tensor([1.0]), torch.tensor([0.5]))
    assert not accepts(torch.tensor([torch.nan]), torch.tensor([1.0]), torch.tensor([0.0]))


def test_a_weight_of_zero_is_never_drawn() -> None:
    weights = torch.tensor([[0, 5, 0, 3, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]])
    for u, expected in ((0.0, [1, 4, -1]), (0.62, [1, 4, -1]), (0.63, [3, 4, -1])):
        assert draw_whole(weights, torch.full((3,), u)).tolist() == expected
    assert draw_whole(weights, torch.full((3,), 1 - 2**-24)).tolist() == [3, 4, -1]


def test_where_nothing_is_left_the_row_itself_is() -> None:
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    q = torch.tensor([[0.25, 0.75], [0.0, 1.0]])
    assert torch.equal(residual(p, q)[0], whole_weights(p)[0])
    assert residual(p, q)[1].tolist() == [2**37, 0]


def test_whole_weights_lose_next_to_nothing() -> None:
    "The sum of a row of 150,000 is right to a millionth, and it does not depend on the order."
    probs = torch.randn(2, 151_936, generator=torch.Generator().manual_seed(0)).softmax(-1)
    weights = whole_weights(probs)
    assert (weights.sum(-1) / 2**38 - 1).abs().max() < 1e-6
    assert torch.equal(weights.flip(-1).cumsum(-1)[:, -1], weights.sum(-1))
    assert whole_weights(torch.tensor([torch.nan, -1.0, 0.0, 2**-38])).tolist() == [0, 0, 0, 1]


def test_threads_share_the_sequences() -> None:
    "More threads than sequences, and fewer."
    form = form_of("numba")
    generator = torch.Generator().manual_seed(5)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for counts in ([2, 3], [1, 0, 4, 2, 2, 1, 3]):
            num_drafts = sum(counts)
            target = random_probs(generator, num_drafts + len(counts), 20_000)
            draft = random_probs(generator, num_drafts, 20_000)
            ids = torch.multinomial(draft, 1, generator=generator)[:, 0]
            uniforms = numbers(generator, num_drafts) / 100, numbers(generator, len(counts))
            args = target, draft, ids, counts, *uniforms
            assert form(*args).tolists() == reject_batch(*args).tolists()
    finally:
        torch.set_num_threads(before)


def test_who_has_a_fused_form() -> None:
    assert isinstance(rejection_kernels("mps"), KernelTable)
    assert rejection_kernels("mps").find("reject") is None
    if (kernel := rejection_kernels("cpu").find("reject")) is not None:
        p = torch.full((2, 4), 0.25)
        args = [p, p[:1], torch.tensor([1]), [1], torch.tensor([0.5]), torch.tensor([0.5])]
        assert kernel.serves(*args)
        assert not kernel.serves(p.double(), *args[1:])
        assert not kernel.serves(torch.empty(4, 2).T, *args[1:])
        assert not kernel.serves(*args[:2], torch.tensor([1], dtype=torch.int32), *args[3:])


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from teachvllm.gpu_kernels.rejection import BLOCK, reject_kernel
from teachvllm.gpu_kernels.sass import resources

types = ["*i64", "*i64", "*fp32", "*fp32", "*i64", "*i64", "*fp32", "*fp32", "i32", "i32"]
for capability in (75, 80, 90):
    for with_draft in (True,) if capability > 75 else (True, False):
        names = reject_kernel.arg_names
        signature = dict(zip(names, [*types, "constexpr", "constexpr"]))
        source = ASTSource(reject_kernel, signature, {"WITH_DRAFT": with_draft, "BLOCK": BLOCK})
        target = GPUTarget("cuda", capability, 32)
        kernel = triton.compile(source, target=target, options={"num_warps": 4})
        assert resources(kernel.asm["cubin"])[1] == 0  # nothing is spilled
        print(capability, with_draft, kernel.metadata.shared)
"""


def test_it_compiles_for_real_chips() -> None:
    pytest.importorskip("triton")
    child = run_compiling("-c", COMPILE)
    assert len(child.stdout.splitlines()) == 4
