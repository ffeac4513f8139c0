"""Adapters served on a card and on this machine's CPU: the same tokens, eagerly and by recorded steps,
by `gpu_kernels.lora`. Prints a JSON object, task -> what went wrong, or "".

    python -m teachvllm.pretend --num-sms 4 T4 python tests/adapters_on_a_card.py
"""

import json
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from helpers import make_wide, write_adapter

from teachvllm.llm import LLM
from teachvllm.messages import LoRARequest
from teachvllm.sampling_params import SamplingParams

PROMPTS = [list(range(5, 5 + n)) for n in (7, 12, 3)]
LIMITS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enable_lora": True,
    "max_loras": 2,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "num_gpu_blocks_override": 40,
    "swap_space": 0.01,
    "dtype": "float32",
}


def look(worker: Any) -> tuple[str, bool]:
    "By what adapters are added, and whether steps were recorded."
    runner = worker.model_runner
    layer = next(iter(runner.lora.layers.values()))
    return type(layer.lora).__name__, runner.graphs is not None


def serve(embedding: bool, **options: Any) -> str:
    "Two adapters and none in one batch, twice; then a third adapter in the place of one."
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_wide(folder / "model")
        loras: list[LoRARequest | None] = []
        for i in (1, 2, 3):
            write_adapter(folder / str(i), i, embedding=embedding and i == 2, layers=1)
            loras.append(LoRARequest(f"number {i}", i, str(folder / str(i))))
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        found = []
        for where in ({"device": "cpu", "enforce_eager": True}, options):
            with LLM(str(folder / "model"), **LIMITS | where) as llm:
                written = []
                for some in ([None, loras[0], loras[1]], [loras[2], None, None]):
                    outputs = llm.generate(given, params, use_tqdm=False, lora_request=some)
                    written += [list(output.outputs[0].token_ids) for output in outputs]
                found.append(written)
                [(kind, recorded)] = llm.collective_rpc(look)
    if (kind, recorded) != ("TritonLoRA", not options.get("enforce_eager")):
        return f"added by {kind}, recorded: {recorded}"
    return "" if found[0] == found[1] else f"{found[1]} where the CPU writes {found[0]}"


TASKS = {
    "eager": partial(serve, False, enforce_eager=True),
    "recorded, an embedding": partial(serve, True),
}


if __name__ == "__main__":
    wrong = {}
    for name, task in TASKS.items():
        try:
            wrong[name] = task()
        except Exception:
            wrong[name] = traceback.format_exc()
        print(name, wrong[name] or "ok", file=sys.stderr)
    print(json.dumps(wrong))
