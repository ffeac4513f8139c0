"""An engine in each of its settings, on a card and on this machine's CPU: the same tokens, and how often each kind
of step waited. Prints a JSON object, setting -> what went wrong, or "".

    python -m teachvllm.pretend --num-sms 4 --count 2 T4 python tests/on_a_card.py
"""

import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from helpers import make_tiny

from teachvllm.llm import LLM
from teachvllm.pretend import gpu
from teachvllm.sampling_params import BeamSearchParams, SamplingParams
from teachvllm.worker.worker import Worker

LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 40,
    "block_size": 16,
}
COMMON: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": 5,
    "ignore_eos": True,
    "detokenize": False,
}
PROMPTS = [list(range(3 * i, 3 * i + 5 * i)) for i in (1, 2, 3)]
# number of layers -> a model: no two of its tokens are so likely that rounding decides
FOLDERS = {layers: tempfile.mkdtemp() for layers in (1, 2)}


def generate(llm: LLM, **asked: Any) -> list[list[list[int]]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, SamplingParams(**COMMON | asked), use_tqdm=False)
    scores = [
        [sorted(step) for step in completion.logprobs]
        for output in outputs
        for completion in output.outputs
        if completion.logprobs
    ]
    return [[list(c.token_ids) for c in output.outputs] for output in outputs] + scores


def beams(llm: LLM) -> list[list[list[int]]]:
    asked = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in PROMPTS], asked)
    return [[list(c.token_ids) for c in output.outputs] for output in outputs]


def embed(llm: LLM) -> list[list[int]]:
    "The five largest of each embedding's numbers."
    outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in PROMPTS], use_tqdm=False)
    return [torch.tensor(o.outputs.embedding).topk(5).indices.tolist() for o in outputs]


def replace_weights(model: torch.nn.Module) -> None:
    "Put other tensors in the place of some weights: a recorded step must not go on with the old."
    for layer in model.model.layers:
        weight = -layer.mlp.down_proj.weight.data
        layer.mlp.down_proj.weight = torch.nn.Parameter(weight, requires_grad=False)


def lengths(answers: list[list[list[int]]]) -> list[list[int]]:
    "Of what was sampled: the device's random numbers are not the CPU's."
    return [[len(ids) for ids in answer] for answer in answers]


# what an engine is asked for
TASKS: dict[str, Callable[[LLM], Any]] = {
    "greedy": generate,
    "long": lambda llm: generate(llm, max_tokens=14),
    "log-probabilities": lambda llm: generate(llm, logprobs=2),
    "scored prompts": lambda llm: generate(llm, prompt_logprobs=1),
    "penalties": lambda llm: generate(llm, repetition_penalty=1.3, presence_penalty=0.5),
    "biases": lambda llm: generate(llm, logit_bias={5: 2.0}, min_tokens=3, stop_token_ids=[7]),
    "sampled": lambda llm: lengths(generate(llm, temperature=0.8, seed=1, top_p=0.9)),
    "n": lambda llm: lengths(generate(llm, temperature=0.8, seed=1, top_k=9, n=2)),
    "beams": beams,
    "embed": embed,
}
EAGER = {"enforce_eager": True}
E4M3 = EAGER | {"kv_cache_dtype": "fp8", "attention_backend": "triton"}
FEW_BLOCKS = {"num_gpu_blocks_override": 5, "max_num_seqs": 3}
DRAFTS = {"model": FOLDERS[1], "num_speculative_tokens": 3, "adaptive": False}
# setting -> options of the engine, and its tasks
SETTINGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "eager": (EAGER, ["greedy"]),
    "graphs": ({"async_scheduling": False}, ["greedy"]),
    "a step ahead": (
        {"async_scheduling": True},
        [name for name in TASKS if name not in ("long", "embed")],
    ),
    "swapped": (EAGER | FEW_BLOCKS | {"preemption_mode": "swap", "swap_space": 0.01}, ["long"]),
    "swapped, graphs": (FEW_BLOCKS | {"preemption_mode": "swap", "swap_space": 0.01}, ["long"]),
    "preempted": (FEW_BLOCKS, ["long"]),
    "other weights": ({}, ["greedy", "other weights", "greedy", "other weights"]),
    "chunks": (EAGER | {"max_num_batched_tokens": 8}, ["greedy"]),
    "cached prefixes": (EAGER | {"enable_prefix_caching": True}, ["greedy", "greedy"]),
    "asleep": ({"enable_sleep_mode": True}, ["greedy", "asleep", "greedy"]),
    "8-bit cache": (E4M3, ["greedy"]),
    "8-bit cache, e5m2": (EAGER | {"kv_cache_dtype": "fp8_e5m2"}, ["greedy"]),
    "embeddings": ({"task": "embed"}, ["embed"]),
    "two cards": ({"tensor_parallel_size": 2}, ["greedy"]),
    "drafts": ({"speculative_config": DRAFTS}, ["greedy", "sampled", "log-probabilities"]),
    "reference": (EAGER | {"attention_backend": "reference"}, ["greedy"]),
}
# of two cards they are in other processes; with drafts a sequence computes several tokens
WITHOUT_DECODES = ("embeddings", "two cards", "drafts")
ANSWER_DEPENDS_ON = ("kv_cache_dtype", "task")
ON_EACH_CARD = ("eager", "graphs", "8-bit cache")
TWO_LAYERS = ("eager", "swapped", "swapped, graphs")  # others: one, since interpreters are slow


@cache
def oracle(layers: int, **options: Any) -> LLM:
    "An engine on the CPU, with room for everything."
    return LLM(FOLDERS[layers], device="cpu", **LIMITS | options)


@cache
def expected(task: str, layers: int, /, **options: Any) -> Any:
    return TASKS[task](oracle(layers, **options))


def waits_of(step: list[Any]) -> list[str]:
    return [f"{h.name} at {h.where}" for h in step if h.kind == "wait"]


def run(name: str) -> str:
    "What went wrong in a setting."
    options, tasks = SETTINGS[name]
    layers = 2 if name in TWO_LAYERS else 1
    same = {key: value for key, value in options.items() if key in ANSWER_DEPENDS_ON}
    decodes: list[list[str]] = []  # the waits of each decode step, before its tokens are collected
    others: list[list[str]] = []
    submit = Worker.submit

    def watched(self: Any, out: Any) -> Any:
        start = len(gpu().log)
        answer = submit(self, out)
        numbers = out.num_scheduled_tokens.values()
        if self.device != "cpu" and numbers:
            steps = decodes if set(numbers) == {1} else others
            steps.append(waits_of(gpu().log[start:]))
        return answer

    with patch.object(Worker, "submit", watched), LLM(FOLDERS[layers], **LIMITS | options) as llm:
        for task in tasks:
            if task == "asleep":
                llm.sleep()
                llm.wake_up()
            elif task == "other weights":
                for engine in (llm, oracle(layers, **same)):
                    engine.apply_model(replace_weights)
                expected.cache_clear()
            elif (got := TASKS[task](llm)) != (wanted := expected(task, layers, **same)):
                return f"{task}: {got} where the CPU writes {wanted}"
    # who guesses must know what was sampled
    if name not in ("reference", "drafts") and any(decodes + others):
        return f"steps wait: {sorted({line for step in decodes + others for line in step})}"
    return "" if decodes or name in WITHOUT_DECODES else "it made no decode step"


def attempt(name: str) -> str:
    try:
        return run(name)
    except Exception:
        return traceback.format_exc()


if __name__ == "__main__":
    for layers, folder in FOLDERS.items():
        make_tiny("llama", folder, layers=layers)
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(SETTINGS)
    print(json.dumps({name: attempt(name) for name in names}))
