"""Whether `torch_forms` leaves in memory what Triton's interpreter leaves there, launch by launch. Prints a JSON
object, kernel -> what differed, or "".

    python -m teachvllm.pretend --num-sms 4 H100 python tests/forms_on_a_card.py
"""

import json
import tempfile
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from helpers import make_tiny
from on_a_card import LIMITS, generate
from torch_forms import FORMS, Grid, merged

from teachvllm.llm import LLM
from teachvllm.pretend import interpret

FOLDER = tempfile.mkdtemp()
wrong = dict.fromkeys(FORMS, "never launched")


def tensors(a: SimpleNamespace) -> dict[str, torch.Tensor]:
    return {name: x for name, x in vars(a).items() if isinstance(x, torch.Tensor)}


def results(a: SimpleNamespace, memory: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    "What must be the same. Splits may share their work otherwise: their sum is compared."
    found = {key: x.float() if x.is_floating_point() else x for key, x in memory.items()}
    if vars(a).get("SPLIT"):
        found["out"] = found["out"].sum(0)
    elif vars(a).get("NUM_SPLITS", 1) > 1 and "query_start_loc" in found:
        found["merged"] = merged(found.pop("partial"), found.pop("stats"))[:, : a.HEAD_SIZE]
    return found


def compare(function: Any, args: Any, grid: Grid) -> None:
    "Compute it both ways on the same memory, and keep the interpreter's numbers."
    name = f"{function.__module__}.{function.__name__}"
    if name not in FORMS:
        return interpret(function, args, grid)
    a = SimpleNamespace(**dict(zip(signature(function).parameters, args, strict=True)))
    before = {key: x.clone() for key, x in tensors(a).items()}
    declined = FORMS[name](a, grid) is NotImplemented
    by_torch = {key: x.clone() for key, x in tensors(a).items()}
    for key, x in tensors(a).items():
        x.copy_(before[key])
    interpret(function, args, grid)
    if declined:
        return None
    wrong[name] = "" if wrong[name] == "never launched" else wrong[name]
    found = results(a, tensors(a))
    for key, x in results(a, by_torch).items():
        close = torch.equal
        if x.is_floating_point():
            close = partial(torch.allclose, rtol=2e-3, atol=2e-3, equal_nan=True)
        if not close(x, found[key]):
            off = (x.float() - found[key].float()).nan_to_num().abs().max()
            wrong[name] = f"{key} {list(x.shape)} differs by {off}"
    return None


def products() -> None:
    "Of each kind of words, with few rows and more, split and whole."
    from teachvllm.gpu_kernels.grouped import WordProduct, layout_of

    torch.manual_seed(0)
    for bits, float8, minimum in (
        (4, False, True),
        (4, False, False),
        (8, False, False),
        (8, True, False),
    ):
        layout = layout_of(256, 32, bits, float8)
        numbers = torch.randint(1 << bits, (40, 256), dtype=torch.uint8, device="cuda")
        numbers[numbers & 127 == 127] = 0  # of e4m3 that is no number
        scales, seconds = torch.rand(2, 40, 8, device="cuda").div(16).half().float()
        seconds = seconds * (not float8)
        product = WordProduct(numbers, scales, seconds, layout, 32, torch.float16, minimum)
        for rows in (1, 5, 20):
            product(torch.randn(rows, 256, device="cuda", dtype=torch.float16))
        product.rows(torch.tensor([3, 39], device="cuda"))


def engine(**options: Any) -> None:
    with LLM(FOLDER, **LIMITS | options) as llm:
        generate(llm, max_tokens=3)
        generate(llm, max_tokens=3, temperature=1.0, top_p=0.9, seed=1)


def draws() -> None:
    from teachvllm.gpu_kernels.sampler import sample_rows, sample_sorted

    logits = torch.randn(3, 700, device="cuda")
    logits[2, 5] = torch.nan
    heat, uniform = torch.tensor([[0.0, 0.7, 0.7], [0.3, 0.6, 0.1]], device="cuda")
    ids = sample_rows(logits, heat, uniform)
    rows = torch.arange(2, device="cuda")
    top_k, top_p = torch.tensor([700, 400], device="cuda"), torch.tensor([0.9, 1.0], device="cuda")
    probs = logits[:2].softmax(-1)
    sample_sorted(ids[:2], rows < 0, probs, rows, top_k, top_p, uniform * 0, uniform)


if __name__ == "__main__":
    make_tiny("llama", FOLDER, layers=1)
    torch.set_num_threads(1)
    with torch.inference_mode(), patch("teachvllm.pretend.compute", compare):
        products()
        draws()
    with patch("teachvllm.pretend.compute", compare):
        engine(enforce_eager=True)
        engine(enforce_eager=True, max_num_batched_tokens=8)
    print(json.dumps(wrong))
