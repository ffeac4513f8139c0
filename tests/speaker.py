"""A tiny model that speaks: random weights, and SmolLM2's tokenizer."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from teachvllm.inputs import get_tokenizer
from teachvllm.transformers_utils import DEFAULT_MODEL, find_model

EOS = 2  # <|im_end|>


def make_speaker(folder: Path, **config: Any) -> Any:
    "Write it into `folder`; returns transformers' model. No two of its tokens tie."
    tokenizer = get_tokenizer(find_model(DEFAULT_MODEL, weights=False))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    options = (
        sizes | {"max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": EOS} | config
    )
    model = (
        AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(tokenizer), **options))
        .eval()
        .float()
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return model
