"""Speculative decoding: whatever is guessed, the text is what it would have been, seeds included."""

import random
from typing import Any

import pytest
from helpers import make_tiny

from teachvllm import LLM, SamplingParams
from teachvllm.speculative.policy import DraftPolicy
from teachvllm.worker.model_runner import DraftStep, Proposer

LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 200,
}
TRUE: dict[tuple[int, ...], list[int]] = {}  # a prompt -> its whole text


class Oracle(Proposer):
    "Knows the text, and says a wrong token now and then."

    wrong = 0.3
    rng = random.Random(0)

    def propose(self, step: DraftStep) -> list[list[int]]:
        found = []
        for known, most in zip(step.token_ids, step.num_drafts, strict=True):
            text = next(
                (t for p, t in TRUE.items() if tuple(known[: len(p)].tolist()) == p), known.tolist()
            )
            drafts = text[len(known) : len(known) + self.rng.randint(0, most)]
            found.append([x if self.rng.random() > self.wrong else 7 for x in drafts])
        return found


class Broken(Proposer):
    def propose(self, step: DraftStep) -> list[list[int]]:
        return [[10**9, -5, 3] for _ in step.seq_ids]


def speculate(
    method: str = "custom_class", model: str | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "method": method,
        "model": model,
        "num_speculative_tokens": 4,
        "adaptive": False,
        **more,
    }


def make(folder: str, **more: Any) -> LLM:
    return LLM(folder, **{**LIMITS, **more})


def policy_of(llm: LLM) -> DraftPolicy:
    policy = llm.llm_engine.engine_core.engine_core.draft_policy
    assert isinstance(policy, DraftPolicy)
    return policy


def random_requests(rng: random.Random, number: int) -> list[tuple[list[int], SamplingParams]]:
    "Prompts in which things repeat, with all kinds of parameters."
    requests = []
    for _ in range(number):
        part = [rng.randrange(128) for _ in range(rng.randint(1, 6))]
        prompt = part * rng.randint(1, 4) + [rng.randrange(128) for _ in range(rng.randint(1, 9))]
        params: dict[str, Any] = {"max_tokens": rng.randint(1, 20), "seed": rng.randrange(10**6)}
        kind = rng.random()
        if kind < 0.4:
            params["temperature"] = 0
        elif kind < 0.7:
            params |= {"temperature": 0.8, "top_p": 0.9, "top_k": rng.choice([0, 5])}
        if rng.random() < 0.15:
            params["repetition_penalty"] = 1.3
        if rng.random() < 0.15:
            params["n"] = 2
            params["temperature"] = 0.9
        if rng.random() < 0.2:
            params["logprobs"] = 2
        if rng.random() < 0.2:
            params |= {"stop_token_ids": [rng.randrange(128) for _ in range(20)], "min_tokens": 1}
        requests.append((prompt, SamplingParams(**params)))
    return requests


def answers(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    outputs = llm.generate(prompts, [params for _, params in requests], use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        TRUE[tuple(prompt["prompt_token_ids"])] = [
            *prompt["prompt_token_ids"],
            *output.outputs[0].token_ids,
        ]
    return [
        [
            (
                tuple(one.token_ids),
                one.finish_reason,
                one.stop_reason,
                one.logprobs and [sorted(scores) for scores in one.logprobs],
            )
            for one in output.outputs
        ]
        for output in outputs
    ]


WORLDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 9},
    "few_blocks": {"num_gpu_blocks_override": 34},
    "swap": {"num_gpu_blocks_override": 34, "preemption_mode": "swap", "swap_space": 0.01},
    "eager": {"enforce_eager": True, "enable_prefix_caching": False},
    "ahead": {"async_scheduling": True},
}
METHODS: dict[str, dict[str, Any]] = {
    "oracle": speculate(model="test_speculative.Oracle"),
    "broken": speculate(model="test_speculative.Broken"),
    "self_quantized": speculate("self_quantized"),
    "adaptive": speculate(model="test_speculative.Oracle", adaptive=True),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("method", METHODS)
def test_no_token_changes(folder: str, method: str, world: str) -> None:
    "Greedy and sampled, whole and in chunks, preempted, swapped, forked, with penalties."
    rng = random.Random(f"{method} {world}")
    requests = random_requests(rng, 24)
    expected = answers(make(folder, **WORLDS[world]), requests)
    llm = make(folder, **WORLDS[world], speculative_config=METHODS[method])
    assert answers(llm, requests) == expected
    stats = policy_of(llm).stats
    if method in ("oracle", "self_quantized"):
        assert stats.num_accepted_tokens > 0
        assert stats.num_accepted_tokens_per_pos[0] >= stats.num_accepted_tokens_per_pos[-1]
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    free = scheduler.block_manager.get_num_free_gpu_blocks()
    assert free == scheduler.block_manager.num_gpu_blocks


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["itself", "another"])
def test_a_draft_model(folder: str, tmp_path: Any, kind: str, world: str) -> None:
    "With places of its own in the cache. The target as its own draft is always right."
    draft = folder
    if kind == "another":
        make_tiny("llama", tmp_path, layers=1)
        draft = str(tmp_path)
    requests = random_requests(random.Random(f"{kind} {world}"), 24)
    expected = answers(make(folder, **WORLDS[world]), requests)
    llm = make(folder, **WORLDS[world], speculative_config=speculate("draft_model", draft))
    assert answers(llm, requests) == expected
    stats = policy_of(llm).stats
    assert stats.num_drafts > 0
    if kind == "itself":
        assert stats.acceptance == 1
