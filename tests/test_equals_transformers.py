"""transformers in float32 is the oracle: the same greedy tokens, whatever the engine does to
compute them.
"""

from pathlib import Path

import pytest
import torch
from helpers import TINY, greedy, make_tiny, random_prompts
from transformers import AutoModelForCausalLM

from teachvllm import LLM, SamplingParams
from teachvllm.inputs import gguf_tokenizer
from teachvllm.model_executor.loader import convert_gguf, gguf_weights
from teachvllm.transformers_utils import bundled_model

NUM_PROMPTS = 8
NUM_TOKENS = 40
TEXTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
    "Water boils at a temperature of",
    "In the beginning, there was a small village where",
    "def fibonacci(n):\n    ",
    "Sehr geehrte Damen und Herren, leider muss ich Ihnen",
]

# everything that must not change a token; 16 blocks of 16 hold half of what eight
# requests grow to
WAYS = {
    "default": {},
    "block_size=1": {"block_size": 1},
    "block_size=64": {"block_size": 64},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "chunks of 64": {"max_num_batched_tokens": 64},
    "chunks of 4096": {"max_num_batched_tokens": 4096},
    "few blocks": {"num_gpu_blocks_override": 16},
    "few blocks, small chunks": {"num_gpu_blocks_override": 16, "max_num_batched_tokens": 7},
    "few small blocks": {
        "num_gpu_blocks_override": 300,
        "block_size": 1,
        "max_num_batched_tokens": 64,
    },
    "whole prompts": {"enable_chunked_prefill": False, "max_model_len": 512},
}


def tokens(llm: LLM, prompts: list, num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def smollm2() -> tuple[list[list[int]], list[list[int]]]:
    "The prompts' ids, and what transformers writes after each, with the numbers of the file's blocks."
    path = bundled_model()
    model = AutoModelForCausalLM.from_pretrained(convert_gguf(path), dtype=torch.float32).eval()
    exact = dict(gguf_weights(path, model.config))
    assert model.load_state_dict(exact, strict=False) == (["lm_head.weight"], [])  # it is tied
    tokenizer = gguf_tokenizer(path)
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    return prompts, [greedy(model, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("way", WAYS)
def test_smollm2_in_one_batch(way: str, smollm2: tuple) -> None:
    prompts, expected = smollm2
    options = {"num_gpu_blocks_override": 4000, **WAYS[way]}
    with LLM(dtype="float32", **options) as llm, llm.record() as trace:
        assert tokens(llm, prompts, NUM_TOKENS) == expected
    preempted = sum(len(step.preempted) for step in trace.steps)
    assert (preempted > 0) == ("few" in way), f"{preempted} preemptions"


def test_smollm2_alone(smollm2: tuple) -> None:
    prompts, expected = smollm2
    with LLM(dtype="float32", num_gpu_blocks_override=64) as llm:
        assert [tokens(llm, [prompt], NUM_TOKENS)[0] for prompt in prompts] == expected


@pytest.mark.parametrize("name", TINY)
def test_tiny_models(name: str, tmp_path: Path) -> None:
    "Each architecture, batched, chunked, preempted, and on the reference attention."
    model = make_tiny(name, tmp_path)
    prompts = random_prompts(7)
    expected = [greedy(model, prompt, 24) for prompt in prompts]
    for way in (
        {},
        {"block_size": 1, "max_num_batched_tokens": 7},
        {"block_size": 4, "num_gpu_blocks_override": 22, "max_num_batched_tokens": 64},
        {"attention_backend": "reference", "max_num_batched_tokens": 50},
    ):
        options = {"num_gpu_blocks_override": 400, **way}
        with LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, **options) as llm:
            assert tokens(llm, prompts, 24) == expected, way
