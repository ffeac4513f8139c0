"""Models on pages equal transformers, layer by layer as configured; what a configuration asks for is served or refused."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, MistralConfig, OPTConfig, Phi3Config
from transformers.activations import ACT2FN

from teachvllm.attention.backend import AttentionMetadata, KVCacheSpec, ReferenceBackend
from teachvllm.attention.cpu import TorchSDPABackend
from teachvllm.config import NotSupportedYet
from teachvllm.model_executor.layers import (
    ACTIVATIONS,
    Attention,
    ColumnParallelLinear,
    LinearBase,
    LinearMethod,
    MergedColumnParallelLinear,
    ModelContext,
    RowParallelLinear,
    UnquantizedLinearMethod,
    WeightsError,
    attention_layers,
    get_act_fn,
    load_weights,
)
from teachvllm.model_executor.models import registry
from teachvllm.model_executor.models.llama import LlamaForCausalLM
from teachvllm.model_executor.models.opt import OPTForCausalLM
from teachvllm.model_executor.models.parity import Paged, flat_batch, largest_difference, paged_logits, tiny_model
from teachvllm.model_executor.models.registry import get_model_class
from teachvllm.model_executor.rotary_embedding import ROPE_KINDS, get_rope, rope_parameters

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
OPT_SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 48, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "word_embed_proj_dim": 48,
}  # fmt: skip
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
    "head_dim, biases, tied": lambda: llama(head_dim=20, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "gelu": lambda: llama(hidden_act="gelu"),
    "gelu_pytorch_tanh": lambda: llama(hidden_act="gelu_pytorch_tanh"),
    "relu2": lambda: llama(hidden_act="relu2"),
    "linear": lambda: scaled("linear", factor=3.0),
    "dynamic": lambda: scaled("dynamic", factor=3.0),
    "llama3": lambda: scaled("llama3", factor=8.0, **LLAMA3),
    "yarn": lambda: scaled("yarn", **YARN),
    "yarn with everything": lambda: scaled("yarn", **YARN, mscale=1.3, mscale_all_dim=0.7, beta_fast=8, beta_slow=2),
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
    "opt-350m": lambda: OPTConfig(**OPT_SIZES | {"word_embed_proj_dim": 24}, do_layer_norm_before=False),
    "opt, gelu, untied": lambda: OPTConfig(**OPT_SIZES, activation_function="gelu", tie_word_embeddings=False),
    "opt, galactica's": lambda: OPTConfig(**OPT_SIZES, enable_bias=False, layer_norm_elementwise_affine=False),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str) -> None:
    config = CONFIGS[name]()
    assert largest_difference(get_model_class(config), config) < 1e-4


# Configurations


def test_what_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="hidden_act.*'tanhshrink' is not supported.*silu"):
        LlamaForCausalLM(llama(hidden_act="tanhshrink"), CONTEXT)
    with pytest.raises(ValueError, match="activation_function.*'mish'"):
        OPTForCausalLM(OPTConfig(**OPT_SIZES, activation_function="mish"), CONTEXT)
    with pytest.raises(
        NotSupportedYet, match="rope_type='longrope' is not supported yet; supported are default, linear"
    ):
        LlamaForCausalLM(scaled("longrope", short_factor=[1.0] * 6, long_factor=[2.0] * 6), CONTEXT)
    with pytest.raises(NotSupportedYet, match="quantization_config="):
        get_model_class(llama(quantization_config={"quant_method": "gptq", "bits": 4}))


def test_a_field_of_the_configurations_class_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    "Granite is a Llama with four factors: said to be one, it would be run without them."
    from transformers import GraniteConfig

    granite = GraniteConfig(**SIZES, embedding_multiplier=12.0)
    granite.architectures = ["GraniteForCausalLM"]
    monkeypatch.setitem(registry.ARCHITECTURES, "GraniteForCausalLM", LlamaForCausalLM)
    with pytest.raises(NotSupportedYet, match="attention_multiplier=1.0|embedding_multiplier=12.0"):
        get_model_class(granite)

    class Own(nn.Module):
        "A reader's model, which does not say what it serves."

    monkeypatch.setitem(registry.ARCHITECTURES, "GraniteForCausalLM", Own)
    assert get_model_class(granite) is Own


@pytest.mark.parametrize("changes", [{"pretraining_tp": 2}, {"attention_dropout": 0.1}, {"use_cache": False}])
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
    heads, size = 2, 8
    context = ModelContext(TorchSDPABackend, 4, torch.float32)
    layers = [
        Attention(heads, size, 1, 0.3, context),
        Attention(heads, size, 2, 0.1, context, window=2, soft_cap=1.5),
    ]
    table = torch.tensor([[1, 0]])
    meta = AttentionMetadata(torch.tensor([0, 6]), torch.tensor([6]), table, torch.tensor([4, 5, 6, 7, 0, 1]))
    for layer in layers:
        layer.backend.build(meta, 4)
    g = torch.Generator().manual_seed(0)
    for layer in layers:
        kv_heads = layer.kv_cache_spec.num_kv_heads
        q = torch.randn(6, heads, size, generator=g)
        k, v = torch.randn(2, 6, kv_heads, size, generator=g)
        order = layer.backend.get_kv_cache_stride_order()
        cache = torch.empty_permuted((2, 2, 4, kv_heads, size), order).fill_(torch.nan)
        got, own = layer(q, k, v, cache, meta), layer.backend
        oracle = ReferenceBackend(heads, size, kv_heads, own.scale, own.window, own.soft_cap)
        torch.testing.assert_close(got, oracle.forward(q, cache, meta).flatten(1))


# Checkpoints


def fused(state: dict[str, torch.Tensor], joined: dict[str, list[str]]) -> dict[str, torch.Tensor]:
    "The same weights, with the parts of each of `joined` stored as one tensor."
    out = dict(state)
    for whole, parts in joined.items():
        for name in [name for name in state if f".{parts[0]}." in name]:
            out[name.replace(parts[0], whole)] = torch.cat([out.pop(name.replace(parts[0], part)) for part in parts])
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
    model, state = LlamaForCausalLM(hf_model.config, CONTEXT), dict(hf_model.state_dict())
    short = {name: tensor for name, tensor in state.items() if "layers.1.self_attn.k_proj" not in name}
    with pytest.raises(WeightsError, match="lacks 1 of .*layers.1.self_attn.qkv_proj.weight"):
        load_weights(model, short.items())
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(
        WeightsError, match=r"0.self_attn.k_proj.weight has shape \(3, 48\), the model needs \(24, 48\)"
    ):
        load_weights(model, (state | {name: state[name][:3]}).items())
    name = "model.layers.0.self_attn.qkv_proj.weight"
    with pytest.raises(
        WeightsError, match=r"0.self_attn.qkv_proj.weight has shape \(24, 48\), the model needs \(96, 48\)"
    ):
        load_weights(model, (state | {name: torch.zeros(24, 48)}).items())


def test_every_parameter_is_loaded_through_its_weight_loader() -> None:
    "A parameter with a loader of its own gets the checkpoint's tensor and the number of the matrix."
    hf_model, calls = tiny_model(llama(num_hidden_layers=1)), []
    model = LlamaForCausalLM(hf_model.config, CONTEXT)
    parameter = model.model.layers[0].self_attn.qkv_proj.weight
    parameter.weight_loader = lambda param, weight, shard_id=None: calls.append((param, tuple(weight.shape), shard_id))
    load_weights(model, hf_model.state_dict().items())
    shapes = {(shape, shard) for _, shape, shard in calls}
    assert shapes == {((48, 48), 0), ((24, 48), 1), ((24, 48), 2)} and all(p is parameter for p, *_ in calls)


# Linear methods


class Int8Rows(LinearMethod):
    "Each row as int8 and a scale; quantized while it is loaded."

    def create_weights(self, layer, input_size, output_sizes, bias, dtype):
        rows = sum(output_sizes)
        layer.weight = nn.Parameter(torch.empty(rows, input_size, dtype=torch.int8), requires_grad=False)
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

    def get_quant_method(self, layer: LinearBase) -> LinearMethod:
        mlp = isinstance(layer, MergedColumnParallelLinear) or layer.input_size == SIZES["intermediate_size"]
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

    more = {"default": {}, "llama3": {"factor": 8.0, **LLAMA3}, "yarn": YARN}.get(kind, {"factor": 3.0})
    config = scaled(kind, **more) if kind != "default" else llama()
    positions = torch.arange(128)
    rope = get_rope(12, 128, rope_parameters(config))
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0), positions[None])
    got_cos, got_sin = (x[:, 0] for x in rope(positions))
    got_sin = torch.cat((-got_sin[:, :6], got_sin[:, 6:]), -1)
    torch.testing.assert_close(got_cos, cos[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(got_sin, sin[0], atol=2e-5, rtol=0)
