"""Models on pages equal transformers, layer by layer as configured; what a configuration asks for
is served or refused.
"""

import importlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import greedy
from safetensors.torch import load_file
from test_parallel import Ranked
from torch import nn
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.activations import ACT2FN

from teachvllm import LLM, EngineArgs, SamplingParams
from teachvllm.attention.backend import AttentionMetadata, KVCacheSpec, ReferenceBackend
from teachvllm.attention.cpu import TorchSDPABackend
from teachvllm.config import NotSupportedYet
from teachvllm.distributed.parallel_state import run_ranks
from teachvllm.kernels import KernelTable
from teachvllm.model_executor.layers import (
    ACTIVATIONS,
    Attention,
    ColumnParallelLinear,
    LinearBase,
    LinearMethod,
    MergedColumnParallelLinear,
    ModelContext,
    ParallelLMHead,
    RowParallelLinear,
    UnquantizedLinearMethod,
    VocabParallelEmbedding,
    WeightsError,
    attention_layers,
    create_named_weights,
    get_act_fn,
    load_weights,
    pack_weight,
    plain_weights,
)
from teachvllm.model_executor.loader import LayOut, convert_gguf
from teachvllm.model_executor.models import registry
from teachvllm.model_executor.models.gemma import Gemma3ForCausalLM, GemmaEmbedding, GemmaRMSNorm
from teachvllm.model_executor.models.llama import LlamaForCausalLM, layer_types
from teachvllm.model_executor.models.opt import OPTForCausalLM
from teachvllm.model_executor.models.parity import (
    Paged,
    flat_batch,
    largest_difference,
    paged_logits,
    random_sequences,
    tiny_model,
)
from teachvllm.model_executor.models.registry import check_forward, get_model_class
from teachvllm.model_executor.rotary_embedding import (
    ROPE_KINDS,
    default_frequencies,
    get_rope,
    llama3_frequencies,
    rope_parameters,
)
from teachvllm.transformers_utils import cache_folder

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
OPT_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 48,
}
NEOX: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rotary_pct": 0.5,
}
CONTEXT = ModelContext(TorchSDPABackend, 4, torch.float32)


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**SIZES | changes)


def scaled(kind: str, **more: Any) -> LlamaConfig:
    return llama(rope_scaling={"rope_type": kind, "rope_theta": 10000.0, **more})


def ministral() -> Any:
    "Windows in the outer layers only."
    transformers = pytest.importorskip("transformers", minversion="5")
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return transformers.MinistralConfig(**SIZES, head_dim=12, sliding_window=6, layer_types=kinds)


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS = {
    "llama": llama,
    "one KV head": lambda: llama(num_key_value_heads=1),
    "head_dim, biases, tied": lambda: llama(
        head_dim=20, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "gelu": lambda: llama(hidden_act="gelu"),
    "gelu_pytorch_tanh": lambda: llama(hidden_act="gelu_pytorch_tanh"),
    "relu2": lambda: llama(hidden_act="relu2"),
    "linear": lambda: scaled("linear", factor=3.0),
    "dynamic": lambda: scaled("dynamic", factor=3.0),
    "llama3": lambda: scaled("llama3", factor=8.0, **LLAMA3),
    "yarn": lambda: scaled("yarn", **YARN),
    "yarn with everything": lambda: scaled(
        "yarn", **YARN, mscale=1.3, mscale_all_dim=0.7, beta_fast=8, beta_slow=2
    ),
    "yarn, attention_factor": lambda: scaled("yarn", **YARN, attention_factor=0.9),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=6),
    "mistral without window": lambda: MistralConfig(**SIZES, sliding_window=None),
    "ministral": ministral,
    "phi3": lambda: Phi3Config(**SIZES, sliding_window=6),
    "phi3, partial rotation": lambda: Phi3Config(**SIZES, partial_rotary_factor=0.5),
    # transformers keeps fields that its class does not know, and reads none of them
    "a Llama's window": lambda: llama(sliding_window=3, layer_types=["sliding_attention"] * 3),
    "a Mistral's biases": lambda: MistralConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "opt": lambda: OPTConfig(**OPT_SIZES),
    "opt-350m": lambda: OPTConfig(
        **OPT_SIZES | {"word_embed_proj_dim": 24}, do_layer_norm_before=False
    ),
    "opt, gelu, untied": lambda: OPTConfig(
        **OPT_SIZES, activation_function="gelu", tie_word_embeddings=False
    ),
    "opt, galactica's": lambda: OPTConfig(
        **OPT_SIZES, enable_bias=False, layer_norm_elementwise_affine=False
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str) -> None:
    config = CONFIGS[name]()
    assert largest_difference(get_model_class(config), config) < 1e-4


# Qwen and Gemma: alone, on two ranks, as a pipeline of two

ODD: dict[str, Any] = SIZES | {"vocab_size": 97}  # which two ranks do not share equally
GEMMA: dict[str, Any] = ODD | {
    "head_dim": 20,
    "sliding_window": 7,
    "query_pre_attn_scalar": 10,
    "attn_implementation": "eager",
    "bos_token_id": 1,
}
CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0}
WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
LONGROPE = {
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0],
}


def phi3_longrope(trained_for: int = 16) -> Phi3Config:
    return Phi3Config(
        **ODD,
        original_max_position_embeddings=trained_for,
        rope_scaling={"type": "longrope", **LONGROPE},
    )


FAMILIES = {
    "qwen2": lambda: Qwen2Config(**ODD),
    "qwen2, tied, one KV head": lambda: Qwen2Config(
        **ODD | {"tie_word_embeddings": True, "num_key_value_heads": 1}
    ),
    "qwen2, windows": lambda: Qwen2Config(**ODD, **WINDOWS),
    "qwen3": lambda: Qwen3Config(**ODD, head_dim=20),
    "qwen3, tied, biases, windows": lambda: Qwen3Config(
        **ODD | {"tie_word_embeddings": True}, head_dim=8, attention_bias=True, **WINDOWS
    ),
    "gemma2": lambda: Gemma2Config(**GEMMA, **CAPS),
    "gemma2, tied, no caps": lambda: Gemma2Config(
        **GEMMA | {"tie_word_embeddings": True} | dict.fromkeys(CAPS)
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **GEMMA,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        final_logit_softcapping=3.0,
    ),
    "gemma3, tied, squeezed": lambda: Gemma3TextConfig(
        **GEMMA | {"num_hidden_layers": 7, "tie_word_embeddings": True},
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "phi3, longrope, short texts": lambda: phi3_longrope(128),
}


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_families_equal_transformers(name: str) -> None:
    config = FAMILIES[name]()
    assert largest_difference(get_model_class(config), config) < 1e-4
    hf_model = tiny_model(config)
    sequences = random_sequences(97)
    wanted = torch.cat([hf_model(torch.tensor([ids])).logits[0] for ids in sequences])
    for split in ((2, 1), (1, 2)):
        ranks = run_ranks(
            lambda parallel: torch.cat(paged_logits(Ranked(hf_model, parallel), sequences, 5)),
            *split,
        )
        assert max((logits - wanted).abs().max() for logits in ranks) < 1e-4, split


@pytest.mark.parametrize(
    "name", ["qwen2, windows", "qwen3", "gemma2", "gemma3", "phi3, longrope, short texts"]
)
@pytest.mark.parametrize("workers", [1, 2])
def test_families_in_the_engine(name: str, workers: int, tmp_path: Path) -> None:
    hf_model = tiny_model(FAMILIES[name]())
    prompts = random_sequences(97)
    hf_model.save_pretrained(tmp_path)
    options: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "num_gpu_blocks_override": 64,
        "block_size": 4,
    }
    with LLM(
        str(tmp_path), max_num_batched_tokens=16, tensor_parallel_size=workers, **options
    ) as llm:
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False
        )
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    assert tokens == [greedy(hf_model, prompt, 8) for prompt in prompts]
    assert len({token for answer in tokens for token in answer}) > 4  # no loop of one token


def limited(max_model_len: int) -> Any:
    "The class that serves a configuration, in an engine for texts of that length."

    def make(config: Any, context: ModelContext) -> nn.Module:
        object.__setattr__(context, "max_model_len", max_model_len)
        return get_model_class(config)(config, context)

    return make


@torch.inference_mode()
def test_longrope_is_chosen_once_for_the_engine() -> None:
    """Its keys stay in the cache, so a text that grows cannot change lists; transformers computes
    it anew.
    """
    hf_model = tiny_model(phi3_longrope())
    short = random_sequences(97, (13, 1, 16))
    long = random_sequences(97, (30, 17, 41))
    for max_model_len, sequences, equal in (
        (16, short, True),
        (128, long, True),
        (128, short, False),
    ):
        got = paged_logits(Paged(limited(max_model_len), hf_model), sequences, 5)
        wanted = [hf_model(torch.tensor([ids])).logits[0] for ids in sequences]
        worst = max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True))
        assert (worst < 1e-4) == equal, (max_model_len, worst)


@pytest.mark.skipif(
    "max_model_len" not in ModelContext.__dataclass_fields__,
    reason="the layers are not told it yet",
)
def test_longrope_in_the_engine(tmp_path: Path) -> None:
    hf_model = tiny_model(phi3_longrope())
    hf_model.save_pretrained(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for max_model_len, lengths in ((16, (9, 1, 10)), (None, (30, 17))):
        prompts = random_sequences(97, lengths)
        with LLM(
            str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_model_len=max_model_len
        ) as llm:
            tokens = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        assert tokens == [greedy(hf_model, prompt, 6) for prompt in prompts]


@pytest.mark.parametrize(
    "make, longest",
    [
        (lambda: scaled("linear", factor=3.0), 384),
        (lambda: scaled("yarn", factor=8.0, original_max_position_embeddings=32), 256),
        (lambda: GPTNeoXConfig(**NEOX, rope_scaling={"rope_type": "linear", "factor": 2.0}), 256),
    ],
)
def test_squeezed_positions_serve_longer_texts(make: Any, longest: int, tmp_path: Path) -> None:
    """As long as vLLM derives: factor times what it was trained for. There, too, tokens equal
    transformers'.
    """
    hf_model = tiny_model(make())
    hf_model.save_pretrained(tmp_path)
    options: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "num_gpu_blocks_override": 64,
    }
    prompts = random_sequences(96, (longest - 8, 140, 3))
    with LLM(str(tmp_path), **options) as llm:
        assert llm.llm_engine.model_config.max_model_len == longest
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False
        )
    assert [o.outputs[0].token_ids for o in outputs] == [
        greedy(hf_model, prompt, 6) for prompt in prompts
    ]
    with pytest.raises(ValueError, match=f"the derived max_model_len={longest}"):
        EngineArgs(str(tmp_path), max_model_len=longest + 1).create_engine_config()
    config = AutoConfig.from_pretrained(tmp_path)
    for _ in range(2):  # a function may return the same object each time
        args = EngineArgs(str(tmp_path), hf_overrides=lambda _: config)
        assert args.create_engine_config().model_config.max_model_len == longest


def test_dynamic_scaling_is_refused_where_it_acts(tmp_path: Path) -> None:
    tiny_model(scaled("dynamic", factor=3.0)).save_pretrained(tmp_path)
    assert EngineArgs(str(tmp_path)).create_engine_config().model_config.max_model_len == 128
    with pytest.raises(
        NotSupportedYet,
        match='rope_type="dynamic" .* beyond 128 positions all frequencies would change',
    ):
        LLM(str(tmp_path), max_model_len=129)


@torch.inference_mode()
def test_gemmas_norm_and_embedding_in_bfloat16() -> None:
    "To the last bit: the sum 1 + weight and the factor are rounded where transformers rounds them."
    hf_model = tiny_model(Gemma3TextConfig(**GEMMA)).bfloat16()
    norm = GemmaRMSNorm(48, 1e-6)
    theirs = hf_model.model.norm
    norm.weight.weight_loader(norm.weight, theirs.weight)  # type: ignore[operator]
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(norm(x), theirs(x)) and norm.weight.dtype == torch.float32
    embedding = GemmaEmbedding(97, 48).bfloat16()
    ids = torch.arange(97)
    embedding.weight.data.copy_(hf_model.model.embed_tokens.weight)
    assert torch.equal(
        embedding(ids[:30]),
        hf_model.model(ids[None, :30], output_hidden_states=True).hidden_states[0][0],
    )


def test_which_layers_have_windows() -> None:
    "Also as versions of transformers before 4.53 said it, which had no `layer_types`."

    def old(kind: str, **fields: Any) -> Any:
        def init(self: Any) -> None:
            PretrainedConfig.__init__(self)
            vars(self).update(fields | {"num_hidden_layers": 6})

        return type("Old", (PretrainedConfig,), {"model_type": kind, "__init__": init})()

    configs = {
        "ssssss": old("mistral"),
        "sfsfsf": old("gemma2"),
        "ssfssf": old("gemma3_text", sliding_window_pattern=3),
    }
    for marks, config in (configs | {"ffffss": old("qwen2", max_window_layers=4)}).items():
        assert "".join(kind[0] for kind in layer_types(config)) == marks
    assert layer_types(ministral()) == ["sliding_attention", "full_attention", "sliding_attention"]
    new = Gemma3TextConfig(**GEMMA | {"num_hidden_layers": 7})
    windows = [
        layer.kv_cache_spec.window
        for layer in attention_layers(Gemma3ForCausalLM(new, CONTEXT)).values()
    ]
    assert windows == [7, 7, 7, 7, 7, None, 7]


def test_gemma_3s_two_tables_in_either_version() -> None:
    old = SimpleNamespace(
        max_position_embeddings=128,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    new = Gemma3TextConfig(**GEMMA, rope_scaling={"rope_type": "linear", "factor": 8.0})
    for config in (old, new):
        local, whole = (
            rope_parameters(config, f"{kind}_attention") for kind in ("sliding", "full")
        )
        assert (local["rope_type"], local["rope_theta"]) == ("default", 1e4)
        assert (whole["rope_type"], whole["rope_theta"], whole["factor"]) == ("linear", 1e6, 8.0)


@pytest.mark.parametrize("architecture", registry.ARCHITECTURES)
def test_every_architecture_has_its_class(architecture: str) -> None:
    name = registry.ARCHITECTURES[architecture]
    assert isinstance(name, str)
    module, _, cls = name.rpartition(".")
    assert isinstance(getattr(importlib.import_module(module), cls), type)


# GGUF


def byte_letters() -> list[str]:
    "GPT-2's way to write each byte as a visible letter."
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in kept] + [chr(256 + i) for i in range(256 - len(kept))]


GGUF_SIZES: dict[str, Any] = SIZES | {
    "vocab_size": 260,
    "eos_token_id": 259,
    "bos_token_id": 258,
    "head_dim": 16,
}
WITH_WINDOW: dict[str, Any] = GGUF_SIZES | {
    "num_hidden_layers": 7,
    "sliding_window": 5,
    "query_pre_attn_scalar": 16,
    "attn_implementation": "eager",
    "tie_word_embeddings": True,
}
SCALED = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, **LLAMA3}
SHARED_OUT = {name: value for name, value in GGUF_SIZES.items() if name != "head_dim"}
GGUF_CONFIGS = {
    "llama": lambda: LlamaConfig(**SHARED_OUT, rope_scaling=SCALED),
    "qwen2": lambda: Qwen2Config(**SHARED_OUT),
    "qwen3": lambda: Qwen3Config(
        **GGUF_SIZES, rope_scaling={"rope_type": "yarn", "rope_theta": 5e5, **YARN}
    ),
    "gemma2": lambda: Gemma2Config(**WITH_WINDOW, **CAPS),
    "gemma3": lambda: Gemma3TextConfig(
        **WITH_WINDOW, rope_scaling={"rope_type": "linear", "factor": 8.0}
    ),
    "phi3": lambda: Phi3Config(
        **SHARED_OUT,
        original_max_position_embeddings=20,
        rope_scaling={"type": "longrope", **LONGROPE},
        sliding_window=9,
    ),
    "mixtral": lambda: MixtralConfig(**SHARED_OUT, num_local_experts=3, num_experts_per_tok=2),
    "qwen3moe": lambda: Qwen3MoeConfig(
        **GGUF_SIZES,
        moe_intermediate_size=40,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=260,
        n_embd=48,
        n_layer=3,
        n_head=4,
        n_positions=64,
        n_inner=80,
        eos_token_id=259,
        bos_token_id=258,
    ),
    "gptneox": lambda: GPTNeoXConfig(
        **{k: v for k, v in SHARED_OUT.items() if k != "num_key_value_heads"},
        rotary_pct=0.5,
        use_parallel_residual=False,
    ),
}


def gguf_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of a layer in three tensors, whichever way transformers has them: 4 one by one, 5
    gate and up together.
    """
    parts = {}
    stacks = {}
    for name, tensor in state.items():
        expert = re.search(r"experts\.\d+", name)
        if expert:
            stacks.setdefault(name.replace(expert[0], "experts"), []).append(tensor)
        elif name.endswith("experts.gate_up_proj"):
            for kind, part in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1)):
                parts[name.replace("gate_up_proj", kind) + ".weight"] = part.contiguous()
        else:
            parts[name + ".weight" if name.endswith("experts.down_proj") else name] = tensor
    return parts | {name: torch.stack(tensors) for name, tensors in stacks.items()}


def write_gguf(
    path: Path,
    architecture: str,
    hf_model: Any,
    store: Callable[[str, Any], tuple[Any, Any]] = lambda base, array: (array, None),
) -> None:
    """As llama.cpp's converter does: its names, Gemma's norms plus one, Llama's rows of q and k in
    another order, GPT-2's matrices upright, GPT-NeoX's queries, keys and values each together.
    `store` makes of a module's name and array what is written, and of which type it is.
    """
    import gguf

    architecture = "llama" if architecture == "mixtral" else architecture

    config = hf_model.config
    writer = gguf.GGUFWriter(path, architecture)
    rope = rope_parameters(config, "full_attention")
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    more = {
        "head_count_kv": "num_key_value_heads",
        "layer_norm_rms_eps": "rms_norm_eps",
        "key_length": "head_dim",
        "parallel_residual": "use_parallel_residual",
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    }
    values = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", None) or config.n_inner,
        "embedding_length": config.hidden_size,
        "head_count": heads,
        "rope_freq_base": rope["rope_theta"],
        "rope_dimension_count": int(size * rope["partial_rotary_factor"]),
        "layer_norm_eps": getattr(config, "layer_norm_epsilon", None)
        or getattr(config, "layer_norm_eps", None),
        "vocab_size": config.vocab_size,
        "tokenizer_model": "gpt2",
        "token_list": [*byte_letters(), "th", "the", "<s>", "</s>"],
        "token_types": [1] * 258 + [3] * 2,
        "token_merges": ["t h", "th e"],
        "bos_token_id": 258,
        "eos_token_id": 259,
        "sliding_window": getattr(config, "sliding_window", None),
        **{name: getattr(config, name, None) for name in CAPS},
        **{name: getattr(config, field, None) for name, field in more.items()},
    }
    state = {
        k: v
        for k, v in hf_model.state_dict().items()
        if not (k == "lm_head.weight" and config.tie_word_embeddings)
    }
    if rope["rope_type"] in ("linear", "yarn"):
        kind = gguf.RopeScalingType(rope["rope_type"])
        values |= {"rope_scaling_type": kind, "rope_scaling_factor": rope["factor"]}
    if rope["rope_type"] in ("yarn", "longrope"):
        values["rope_scaling_orig_ctx_len"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "longrope":
        state |= {
            f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"])
            for kind in ("short", "long")
        }
        values["rope_scaling_attn_factors"] = ROPE_KINDS["longrope"](
            size, rope | {"max_position": 1}
        )[1]
    if rope["rope_type"] == "llama3":
        state["rope_freqs.weight"] = (
            default_frequencies(size, rope)[0] / llama3_frequencies(size, rope)[0]
        )
    for name, value in values.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        config.num_hidden_layers,
    )
    for name, tensor in gguf_state(state).items():
        base, _, leaf = name.rpartition(".")
        if architecture == "gpt2" and ".c_" in base and leaf == "weight":
            tensor = tensor.T.contiguous()
        if base.endswith("query_key_value"):
            tensor = torch.cat(tensor.unflatten(0, (heads, 3, -1)).unbind(1)).flatten(0, 1)
        if architecture == "llama" and base.endswith(("q_proj", "k_proj")):
            tensor = (
                tensor.view(-1, 2, size // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
            )
        if architecture.startswith("gemma") and "norm" in base:
            tensor = tensor + 1
        data, kind = store(base, tensor.numpy())
        writer.add_tensor(f"{names.get_name(base) or base}.{leaf}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", GGUF_CONFIGS)
@torch.inference_mode()
def test_gguf(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configuration, weights and tokenizer of a file, converted to a folder: transformers' logits,
    and the text's tokens.
    """
    pytest.importorskip("gguf")
    # earlier versions of transformers read no tokenizer from such a file
    if architecture == "gptneox":
        pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    monkeypatch.setenv("TEACHVLLM_CACHE", str(tmp_path / "cache"))
    hf_model = tiny_model(GGUF_CONFIGS[architecture]())
    write_gguf(tmp_path / "model.gguf", architecture, hf_model)
    folder = convert_gguf(tmp_path / "model.gguf")
    config = AutoConfig.from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    assert config.eos_token_id == 259 and get_model_class(config).__module__.startswith("teachvllm")
    stored = SimpleNamespace(config=config, dtype=torch.float32, state_dict=lambda: weights)
    sequences = random_sequences(260, (30, 21, 25))
    logits = paged_logits(Paged(get_model_class(config), stored), sequences, 64)
    for got, ids in zip(logits, sequences, strict=True):
        assert (got - hf_model(torch.tensor([ids])).logits[0]).abs().max() < 1e-4


def test_an_edited_gguf_file_has_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "Wherever it is edited, however fast; and the same content, elsewhere, has the same."
    monkeypatch.setenv("TEACHVLLM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    size = 40_000_000
    path.write_bytes(b"GGUF" + bytes(size - 4))
    unchanged = cache_folder(path)
    names = {unchanged}
    for start in range(4, size, size // 20):
        with path.open("r+b") as file:
            file.seek(start)
            file.write(b"x" * 300_000)
        names.add(cache_folder(path))
    assert len(names) == 21 and path.stat().st_size == size
    copy = tmp_path / "another place" / "model.gguf"
    copy.parent.mkdir()
    copy.write_bytes(b"GGUF" + bytes(size - 4))
    assert cache_folder(copy) == unchanged


def later(monkeypatch: pytest.MonkeyPatch) -> None:
    "Let a file that has just changed have changed long ago: only then is its hash noted."
    clock = SimpleNamespace(time=lambda: time.time() + 10)
    monkeypatch.setattr("teachvllm.transformers_utils.time", clock)


def test_a_gguf_files_hash_is_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as path, size and times stay. A note that is half written, and a folder that cannot
    be made, are passed over.
    """
    monkeypatch.setenv("TEACHVLLM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(1000))
    first = cache_folder(path)
    assert not (tmp_path / "cache" / "hashes").exists()  # it has just changed
    later(monkeypatch)
    assert cache_folder(path) == first
    (note,) = (tmp_path / "cache" / "hashes").iterdir()
    digest = note.read_text()
    note.write_text("0" * 64)  # so that one sees that it is read
    assert cache_folder(path).name == "model-" + "0" * 32
    note.write_text(digest[:10])
    assert cache_folder(path) == first and note.read_text() == digest
    note.write_text("0" * 64)
    os.utime(path, (1e9, 1e9))
    assert cache_folder(path) == first
    (tmp_path / "file").touch()
    monkeypatch.setenv("TEACHVLLM_CACHE", str(tmp_path / "file"))
    assert cache_folder(path).name == first.name


def test_a_gguf_file_whose_mtime_was_restored_is_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "An edit in place, and another file in its place: the size and the mtime are as before."
    monkeypatch.setenv("TEACHVLLM_CACHE", str(tmp_path / "cache"))
    later(monkeypatch)
    path = tmp_path / "model.gguf"
    names = set()
    for number in range(3):
        time.sleep(0.05)  # the ctime has ticks
        target = path if number < 2 else tmp_path / "new.gguf"
        target.write_bytes(bytes([number] * 1000))
        os.utime(target, (1e9, 1e9))
        target.replace(path)
        names.add(cache_folder(path))
        assert cache_folder(path) in names
    assert len(names) == 3


@pytest.mark.parametrize("room", [300, 20_000, 100_000])
def test_a_full_disk_while_a_gguf_file_is_converted(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "Whichever file is cut short, the message says what to do, and nothing half done is left."
    pytest.importorskip("gguf")
    resource = pytest.importorskip("resource")
    monkeypatch.setenv("TEACHVLLM_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "model.gguf", "llama", tiny_model(GGUF_CONFIGS["llama"]()))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))  # for every file, in bytes
    try:
        with pytest.raises(ValueError, match="cannot keep the converted model.*TEACHVLLM_CACHE"):
            convert_gguf(tmp_path / "model.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    left = [path for path in (tmp_path / "cache").iterdir() if path.name != "hashes"]
    assert [path.name for path in left] == ["tokenizers"]
    assert all(json.loads(path.read_text()) for path in left[0].iterdir())
    assert convert_gguf(tmp_path / "model.gguf").is_dir()


def test_a_gguf_file_that_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from teachvllm.transformers_utils import load_hf_config

    for architecture, key, said in (
        (
            "mamba",
            "block_count",
            (
                "architecture 'mamba' are not supported; only llama, qwen2, qwen3, gemma2, "
                "gemma3, phi3, gpt2, gptneox, qwen3moe are"
            ),
        ),
        (
            "qwen2",
            "rope.scaling.yarn_ext_factor",
            "scaled positions of kind 'none'.*not supported yet",
        ),
    ):
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", architecture)
        for name, value in {
            "block_count": 1,
            "embedding_length": 16,
            "attention.head_count": 2,
            key: 1,
        }.items():
            writer.add_uint32(f"{architecture}.{name}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ValueError, match=said):
            load_hf_config(tmp_path / "a.gguf")


# Configurations


def test_what_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="hidden_act.*'tanhshrink' is not supported.*silu"):
        LlamaForCausalLM(llama(hidden_act="tanhshrink"), CONTEXT)
    with pytest.raises(ValueError, match="activation_function.*'mish'"):
        OPTForCausalLM(OPTConfig(**OPT_SIZES, activation_function="mish"), CONTEXT)
    with pytest.raises(
        NotSupportedYet,
        match="rope_type='spiral' is not supported yet; supported are default, linear",
    ):
        get_rope(12, 128, {"rope_type": "spiral"})
    with pytest.raises(NotSupportedYet, match="use_bidirectional_attention=True"):
        get_model_class(Gemma3TextConfig(**GEMMA, use_bidirectional_attention=True))
    # which transformers reads, and leaves out
    with pytest.raises(NotSupportedYet, match="attn_logit_softcapping=5.0"):
        get_model_class(Gemma3TextConfig(**GEMMA, attn_logit_softcapping=5.0))
    with pytest.raises(NotSupportedYet, match="quantization_config="):
        get_model_class(llama(quantization_config={"quant_method": "hqq", "bits": 4}))


def test_a_field_of_the_configurations_class_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    "Granite is a Llama with four factors: said to be one, it would be run without them."
    from transformers import GraniteConfig

    granite = GraniteConfig(**SIZES, embedding_multiplier=12.0)
    granite.architectures = ["GraniteForCausalLM"]
    monkeypatch.setitem(registry.ARCHITECTURES, "GraniteForCausalLM", LlamaForCausalLM)
    with pytest.raises(NotSupportedYet, match="attention_multiplier=1.0|embedding_multiplier=12.0"):
        get_model_class(granite)

    class Own(nn.Module):
        "A reader's model, which does not say what it serves."

        def forward(self, input_ids: Any, context: Any) -> Any:
            return input_ids

    monkeypatch.setitem(registry.ARCHITECTURES, "GraniteForCausalLM", Own)
    assert get_model_class(granite) is Own


class OldForward(LlamaForCausalLM):
    "Written when each part of the step was a parameter."

    def forward(self, ids, positions, kv_caches, meta, intermediate=None):  # type: ignore[override]
        raise AssertionError("never called")


def test_a_model_with_the_old_forward_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(llama()).save_pretrained(tmp_path)
    monkeypatch.setitem(registry.ARCHITECTURES, "LlamaForCausalLM", OldForward)
    shown = r"OldForward\.forward\(self, ids, .* forward\(self, input_ids, context\)"
    with pytest.raises(ValueError, match=shown):
        LLM(str(tmp_path), skip_tokenizer_init=True, num_gpu_blocks_override=4, dtype="float32")


EMBEDDING = {
    "llama": llama,
    "opt-350m": CONFIGS["opt-350m"],  # its embeddings are narrower than its hidden states
    "gpt2": lambda: GPT2Config(vocab_size=97, n_embd=48, n_layer=2, n_head=4),
    "neox": lambda: GPTNeoXConfig(**NEOX),
    "gemma3": FAMILIES["gemma3"],
}


@pytest.mark.parametrize("name", EMBEDDING)
@torch.inference_mode()
def test_embeddings_in_place_of_tokens(name: str) -> None:
    """Rows with an embedding of their own: as if it were the embedding of a token, in every family;
    and what the rows' ids are makes no difference.
    """
    config = EMBEDDING[name]()
    hf_model = tiny_model(config)
    (ids,) = random_sequences(config.vocab_size, (13,))
    rows = torch.tensor([2, 3, 7])
    paged = Paged(get_model_class(config), hf_model)
    table = next(m for m in paged.model.modules() if isinstance(m, VocabParallelEmbedding))
    values = table(torch.tensor(ids)[rows])

    def logits(sequence: list[int], input_embeds: Any = None) -> torch.Tensor:
        paged.start([sequence])
        forward = type(paged.model).forward
        paged.model.forward = lambda input_ids, context: forward(
            paged.model, input_ids, replace(context, input_embeds=input_embeds)
        )
        return paged.step([(0, 0, len(sequence))])[0]

    wanted = logits(ids)
    others = [5 if i in rows.tolist() else token for i, token in enumerate(ids)]
    assert torch.equal(logits(others, (rows, values)), wanted)
    assert not torch.allclose(logits(others), wanted)
    assert not torch.allclose(logits(ids, (rows, 2 * values)), wanted)


@pytest.mark.parametrize(
    "changes", [{"pretraining_tp": 2}, {"attention_dropout": 0.1}, {"use_cache": False}]
)
def test_fields_without_effect_are_accepted(changes: dict[str, Any]) -> None:
    assert get_model_class(llama(**changes)) is LlamaForCausalLM


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_transformers(name: str) -> None:
    x = torch.randn(200, generator=torch.Generator().manual_seed(0)) * 3
    torch.testing.assert_close(get_act_fn(name)(x), ACT2FN[name](x), atol=1e-6, rtol=1e-5)


# Layers that differ


def test_every_layer_has_its_own_window_and_spec() -> None:
    model = LlamaForCausalLM(ministral(), CONTEXT)
    layers = attention_layers(model)
    assert list(layers) == [f"model.layers.{i}.self_attn.attn" for i in range(3)]
    assert [layer.kv_cache_spec.window for layer in layers.values()] == [6, None, 6]
    assert [layer.backend.window for layer in layers.values()] == [6, None, 6]
    spec = next(iter(layers.values())).kv_cache_spec
    assert spec == KVCacheSpec(num_kv_heads=2, head_size=12, dtype="float32", window=6)
    assert spec.page_bytes(16) == 2 * 16 * 2 * 12 * 4


def test_layers_of_one_window_share_a_steps_plan() -> None:
    "What to gather is worked out once a step and window, not once a layer."
    paged = Paged(LlamaForCausalLM, tiny_model(ministral()))
    paged.start([[5, 6, 7, 8, 9]])
    _, meta = flat_batch([(0, 0, 5)], paged.tables, paged.block_size)
    for layer in paged.layers:
        layer.backend.build(meta, paged.block_size)
    assert set(meta.plans) == {None, 6}
    first = dict(meta.plans)
    for layer in paged.layers:
        layer.backend.build(meta, paged.block_size)
    assert all(meta.plans[window] is plan for window, plan in first.items())


def test_soft_cap_and_scale_are_a_layers_own() -> None:
    heads = 2
    size = 8
    context = ModelContext(TorchSDPABackend, 4, torch.float32)
    layers = [
        Attention(heads, size, 1, 0.3, context),
        Attention(heads, size, 2, 0.1, context, window=2, soft_cap=1.5),
    ]
    table = torch.tensor([[1, 0]])
    meta = AttentionMetadata(
        torch.tensor([0, 6]), torch.tensor([6]), table, torch.tensor([4, 5, 6, 7, 0, 1])
    )
    for layer in layers:
        layer.backend.build(meta, 4)
    g = torch.Generator().manual_seed(0)
    for layer in layers:
        kv_heads = layer.kv_cache_spec.num_kv_heads
        q = torch.randn(6, heads, size, generator=g)
        k, v = torch.randn(2, 6, kv_heads, size, generator=g)
        order = layer.backend.get_kv_cache_stride_order()
        cache = torch.empty_permuted((2, 2, 4, kv_heads, size), order).fill_(torch.nan)
        got = layer(q, k, v, cache, meta)
        own = layer.backend
        oracle = ReferenceBackend(heads, size, kv_heads, own.scale, own.window, own.soft_cap)
        torch.testing.assert_close(got, oracle.forward(q, cache, meta).flatten(1))


# Checkpoints


def fused(state: dict[str, torch.Tensor], joined: dict[str, list[str]]) -> dict[str, torch.Tensor]:
    "The same weights, with the parts of each of `joined` stored as one tensor."
    out = dict(state)
    for whole, parts in joined.items():
        for name in [name for name in state if f".{parts[0]}." in name]:
            out[name.replace(parts[0], whole)] = torch.cat(
                [out.pop(name.replace(parts[0], part)) for part in parts]
            )
    return out


@pytest.mark.parametrize("wholes", [("qkv_proj",), ("gate_up_proj",), ("qkv_proj", "gate_up_proj")])
def test_a_checkpoint_may_store_what_the_model_stacks(wholes: tuple[str, ...]) -> None:
    hf_model = tiny_model(llama(attention_bias=True))
    mapping = {whole: LlamaForCausalLM.packed_modules_mapping[whole] for whole in wholes}
    one, other = (LlamaForCausalLM(hf_model.config, CONTEXT) for _ in range(2))
    load_weights(one, hf_model.state_dict().items())
    state = fused(hf_model.state_dict(), mapping)
    assert any(".qkv_proj." in name or ".gate_up_proj." in name for name in state)
    load_weights(other, state.items())
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_checkpoint_that_does_not_fit_is_refused_by_name() -> None:
    hf_model = tiny_model(llama())
    model = LlamaForCausalLM(hf_model.config, CONTEXT)
    state = dict(hf_model.state_dict())
    short = {
        name: tensor for name, tensor in state.items() if "layers.1.self_attn.k_proj" not in name
    }
    with pytest.raises(WeightsError, match="lacks 1 of .*layers.1.self_attn.qkv_proj.weight"):
        load_weights(model, short.items())
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(
        WeightsError,
        match=r"0.self_attn.k_proj.weight has shape \(3, 48\), the model needs \(24, 48\)",
    ):
        load_weights(model, (state | {name: state[name][:3]}).items())
    name = "model.layers.0.self_attn.qkv_proj.weight"
    with pytest.raises(
        WeightsError,
        match=r"0.self_attn.qkv_proj.weight has shape \(24, 48\), the model needs \(96, 48\)",
    ):
        load_weights(model, (state | {name: torch.zeros(24, 48)}).items())


def test_a_module_is_handed_over_when_it_is_filled() -> None:
    "Once, with all of its matrices, whatever their order; then nothing more may come for it."
    hf_model = tiny_model(llama())
    state = list(hf_model.state_dict().items())
    for order in (state, state[::-1]):
        model = LlamaForCausalLM(hf_model.config, CONTEXT)
        names = {module: name for name, module in model.named_modules()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        filled = []

        def note(module: torch.nn.Module, seen: list[str] = filled, names: Any = names) -> None:
            seen.append(names[module])
            assert not any(torch.isnan(p).any() for p in module.parameters(recurse=False))

        load_weights(model, order, note)
        owners = {
            name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)
        }
        assert sorted(filled) == sorted(owners)
    twice = [state[0], ("model.embed_tokens.weight", state[0][1]), *state[1:]]
    with pytest.raises(WeightsError, match="embed_tokens.weight comes twice"):
        load_weights(LlamaForCausalLM(hf_model.config, CONTEXT), twice, lambda module: None)


def test_a_tied_head_with_a_bias_waits_for_the_embedding() -> None:
    "Its own parameter comes first, the matrix that it shares later."

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = VocabParallelEmbedding(64, 32)
            self.head = ParallelLMHead(32, 64, CONTEXT, bias=True)
            self.head.tie_weights(self.embed)

    model = Tied()
    create_named_weights(model, None)
    bias, matrix, x = torch.randn(64), torch.randn(64, 32), torch.randn(3, 32)
    load_weights(model, [("head.bias", bias), ("embed.weight", matrix)], LayOut())
    torch.testing.assert_close(model.head(x), x @ matrix.T + bias)


def test_every_parameter_is_loaded_through_its_weight_loader() -> None:
    """A parameter with a loader of its own gets the checkpoint's tensor and the number of the
    matrix.
    """
    hf_model = tiny_model(llama(num_hidden_layers=1))
    calls = []
    model = LlamaForCausalLM(hf_model.config, CONTEXT)
    parameter = model.model.layers[0].self_attn.qkv_proj.weight
    parameter.weight_loader = lambda param, weight, shard_id=None: calls.append(
        (param, tuple(weight.shape), shard_id)
    )
    load_weights(model, hf_model.state_dict().items())
    shapes = {(shape, shard) for _, shape, shard in calls}
    assert shapes == {((48, 48), 0), ((24, 48), 1), ((24, 48), 2)} and all(
        p is parameter for p, *_ in calls
    )


# Linear methods


class Int8Rows(LinearMethod):
    "Each row as int8 and a scale; quantized while it is loaded."

    def create_weights(self, layer, input_size, output_sizes, bias, dtype):
        rows = sum(output_sizes)
        layer.weight = nn.Parameter(
            torch.empty(rows, input_size, dtype=torch.int8), requires_grad=False
        )
        layer.scale = nn.Buffer(torch.empty(rows, 1, dtype=dtype))

        def quantize(param, weight, shard_id=None):
            rows = slice(None) if shard_id is None else slice(sum(output_sizes[:shard_id]), None)
            scale = weight.abs().amax(1, keepdim=True) / 127
            layer.scale[rows][: len(weight)] = scale
            param.data[rows][: len(weight)] = (weight / scale).round().to(torch.int8)

        layer.weight.weight_loader = quantize

    def apply(self, layer, x):
        return x @ (layer.weight * layer.scale).T


class Quantize:
    "A `quant_config` that quantizes the MLP's matrices."

    def get_quant_method(self, layer: LinearBase, prefix: str) -> LinearMethod:
        mlp = (
            isinstance(layer, MergedColumnParallelLinear)
            or layer.input_size == SIZES["intermediate_size"]
        )
        return Int8Rows() if mlp else UnquantizedLinearMethod()


def test_a_quantized_model_differs_in_its_linear_methods_only() -> None:
    hf_model = tiny_model(llama())
    plain = Paged(LlamaForCausalLM, hf_model)
    ids = [list(range(5, 25))]
    expected = paged_logits(plain, ids, 8)[0]
    context = ModelContext(TorchSDPABackend, 4, torch.float32, Quantize())
    quantized = Paged(lambda config, _: LlamaForCausalLM(config, context), hf_model)
    kinds = {type(m.linear_method) for m in quantized.model.modules() if isinstance(m, LinearBase)}
    assert kinds == {Int8Rows, UnquantizedLinearMethod}
    error = (paged_logits(quantized, ids, 8)[0] - expected).abs().max()
    assert 0 < error < 0.1 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_processed_weights_multiply_the_same(bias: bool, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    layer = RowParallelLinear(64, 96, ModelContext(TorchSDPABackend, 4, dtype), bias)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=g))
    x = torch.randn(5, 64, generator=g).to(dtype)
    before = layer(x)
    layer.linear_method.process_weights_after_loading(layer)
    torch.testing.assert_close(layer(x), before)
    assert layer.packed is None or layer.weight.numel() == 0


def test_a_shared_weight_survives_processing() -> None:
    model = LlamaForCausalLM(llama(tie_word_embeddings=True), CONTEXT)
    model.lm_head.linear_method.process_weights_after_loading(model.lm_head)
    assert model.model.embed_tokens.weight.shape == (96, 48)
    other = ColumnParallelLinear(48, 96, CONTEXT)
    other.linear_method.process_weights_after_loading(other)
    assert other.packed is None or other.weight.numel() == 0


# Rotary embeddings


def test_a_model_builds_without_memory() -> None:
    "On the meta device: to count its parameters, and to see whether its configuration is served."
    with torch.device("meta"):
        model = LlamaForCausalLM(scaled("yarn", **YARN), CONTEXT)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}


@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_cosine_and_sine_are_transformers(kind: str) -> None:
    "Every position, in float32, to the last digits: logits alone would forgive a small error."
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    long = LONGROPE | {"original_max_position_embeddings": 32}
    more = {"default": {}, "llama3": {"factor": 8.0, **LLAMA3}, "yarn": YARN, "longrope": long}.get(
        kind, {"factor": 3.0}
    )
    config = scaled(kind, **more) if kind != "default" else llama()
    positions = torch.arange(128)
    rope = get_rope(12, 128, rope_parameters(config))
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0), positions[None])
    got_cos, got_sin = (x[:, 0] for x in rope(positions))
    got_sin = torch.cat((-got_sin[:, :6], got_sin[:, 6:]), -1)
    torch.testing.assert_close(got_cos, cos[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(got_sin, sin[0], atol=2e-5, rtol=0)


class VllmsOwn(torch.nn.Module):
    def forward(
        self, input_ids: Any, positions: Any, intermediate_tensors: Any = None, embeds: Any = None
    ) -> Any:
        raise AssertionError("it is refused before it is called")


class WithDefaults(torch.nn.Module):
    def forward(
        self, ids: Any, positions: Any, kv: Any = None, meta: Any = None, before: Any = None
    ) -> Any:
        raise AssertionError("it is refused before it is called")


class AnyArguments(torch.nn.Module):
    def forward(self, *args: Any) -> Any:
        raise AssertionError("it is refused before it is called")


class NoForward(torch.nn.Module):
    pass


@pytest.mark.parametrize("model_class", [VllmsOwn, WithDefaults, AnyArguments, NoForward])
def test_a_model_that_takes_no_context_is_refused(model_class: type) -> None:
    "At the start, with the signature that it needs; not in the first step."
    with pytest.raises(ValueError, match=r"forward\((self, )?input_ids, context\)"):
        check_forward(model_class)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_packed_can_be_packed(dtype: torch.dtype) -> None:
    "oneDNN takes bfloat16 on some processors only; on the others the weights stay as they are."
    weight = torch.randn(64, 64).to(dtype)
    packed = pack_weight(weight, KernelTable())
    assert packed is None or torch.equal(packed.unpack(), weight)


def test_a_weight_may_be_made_of_others() -> None:
    "A parametrization: then the layer has no parameter of that name, and `weight` is computed."
    layer = ColumnParallelLinear(48, 96, CONTEXT)
    layer.weight.data = torch.randn(96, 48)
    layer.linear_method.process_weights_after_loading(layer)

    class Doubles(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    x = torch.randn(5, 48)
    plain = layer(x)
    with plain_weights(layer):
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", Doubles())
    torch.testing.assert_close(layer(x), 2 * plain)
