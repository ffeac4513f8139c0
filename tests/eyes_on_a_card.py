"""Engines of models that see, on a card and on this machine's CPU: the same tokens, and no wait but the
one for the tokens. Prints a JSON object, family -> what went wrong, or "".

    python -m teachvllm.pretend --num-sms 4 T4 python tests/eyes_on_a_card.py llava
"""

import json
import logging
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from pictures import picture
from tiny_eyes import PLACEHOLDERS, save_family

from teachvllm.llm import LLM
from teachvllm.pretend import gpu
from teachvllm.sampling_params import SamplingParams
from teachvllm.worker.worker import Worker

LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 24,
    "block_size": 16,
}


def answers(folder: Path, place: str, waits: list[str] | None = None, **options: Any) -> Any:
    "Greedy tokens of prompts with pictures and without; what a step waits for before its tokens."
    from transformers import AutoConfig, AutoModelForImageTextToText

    if not (folder / "model.safetensors").exists():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
        model.float().save_pretrained(folder)
    submit = Worker.submit

    def watched(self: Any, out: Any) -> Any:
        start = len(gpu().log) if waits is not None else 0
        answer = submit(self, out)
        if waits is not None:
            waits.extend(f"{h.name} at {h.where}" for h in gpu().log[start:] if h.kind == "wait")
        return answer

    prompts = [
        {"prompt": f"a {place} b", "multi_modal_data": {"image": picture(40, 30, 1)}},
        {"prompt": "the red circle"},
    ]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with patch.object(Worker, "submit", watched), LLM(str(folder), **LIMITS | options) as llm:
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


def attempt(family: str) -> str:
    try:
        with tempfile.TemporaryDirectory() as name:
            folder, _ = save_family(family, Path(name))
            waits: list[str] = []
            wanted = answers(folder, PLACEHOLDERS[family], device="cpu")
            got = answers(folder, PLACEHOLDERS[family], waits)
            if got != wanted:
                return f"{got} where the CPU writes {wanted}"
            return f"steps wait: {sorted(set(waits))}" if waits else ""
    except Exception:
        return traceback.format_exc()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(json.dumps({name: attempt(name) for name in sys.argv[1:] or PLACEHOLDERS}))
