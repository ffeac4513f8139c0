"""Quantized checkpoints served on a card and on this machine's CPU: the same tokens, by the products
of `gpu_kernels.grouped`; and those products recorded in a CUDA graph. Prints a JSON object, task ->
what went wrong, or "".

    python -m teachvllm.pretend --num-sms 4 T4 python tests/products_on_a_card.py
"""

import json
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from helpers import make_wide
from test_quantization import OPTIONS, PROMPTS, kinds_of_products, quantize

from teachvllm.gpu_kernels import grouped
from teachvllm.llm import LLM
from teachvllm.quantization.online import round_to_nearest
from teachvllm.sampling_params import SamplingParams

LIMITS = OPTIONS | {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 64}


def tokens(folder: str, **options: Any) -> tuple[list[list[int]], set[str]]:
    "What an engine writes, and by which classes it multiplied."
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with LLM(folder, **LIMITS | options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        kinds = llm.apply_model(kinds_of_products)[0]
    return [list(output.outputs[0].token_ids) for output in outputs], kinds


def serve(name: str, **options: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        make_wide(Path(folder))
        quantize(Path(folder), name, size=32)
        expected, _ = tokens(folder, device="cpu")
        found, kinds = tokens(folder, **options)
    if kinds != {"TritonGroups"}:
        return f"multiplied by {kinds}"
    return "" if found == expected else f"{found} where the CPU writes {expected}"


def record(make: Any) -> str:
    "A product in a CUDA graph, replayed with other numbers."
    with torch.inference_mode():
        product = make()
        for rows in (1, 20):
            x = torch.zeros(rows, 192, dtype=torch.float16, device="cuda")
            product(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = product(x)
            x.copy_(torch.randn(rows, 192, generator=torch.manual_seed(rows)).half().to("cuda"))
            graph.replay()
            if not torch.equal(y.cpu(), product(x).cpu()) or not y.abs().max().item() > 0:
                return f"{rows} rows differ"
    return ""


def grouped_product() -> Any:
    weight = round_to_nearest(torch.randn(72, 192, generator=torch.manual_seed(0)), 4, 32)
    return grouped.TritonGroups(weight.to("cuda"), torch.float16)


def scaled_product(dtype: torch.dtype) -> Any:
    codes = (40 * torch.randn(72, 192, generator=torch.manual_seed(0))).round().clamp(-127, 127)
    weight = SimpleNamespace(
        weight=codes.to(dtype).to("cuda"),
        scales=torch.full((72, 1), 0.01).to("cuda"),
        block=None,
        input_scale=None,
    )
    assert grouped.TritonScaled.serves(weight, torch.float16)
    return grouped.TritonScaled(weight, torch.float16)


TASKS = {
    "awq": partial(serve, "awq", enforce_eager=True),
    "awq, graphs": partial(serve, "awq"),
    "gptq in order": partial(serve, "gptq in order", enforce_eager=True),
    "gptq 8 bits": partial(serve, "gptq 8 bits", enforce_eager=True),
    "compressed by row": partial(serve, "compressed by row", enforce_eager=True),
    "groups, recorded": partial(record, grouped_product),
    "int8, recorded": partial(record, partial(scaled_product, torch.int8)),
    "e4m3, recorded": partial(record, partial(scaled_product, torch.float8_e4m3fn)),
}


def attempt(name: str) -> str:
    try:
        return TASKS[name]()
    except Exception:
        return traceback.format_exc()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: attempt(name) for name in sys.argv[1:] or TASKS}))
