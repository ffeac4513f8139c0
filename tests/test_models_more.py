"""GPT-2, GPT-NeoX, Mixtral and Qwen3-MoE equal transformers: on one rank and on several, from
memory and from a folder.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import greedy, random_prompts
from safetensors.torch import save_file
from test_parallel import Ranked, loaded, same
from torch.nn import functional as F
from transformers import GPT2Config, GPTNeoXConfig, MixtralConfig, Qwen3MoeConfig

from teachvllm import LLM, SamplingParams
from teachvllm.attention.cpu import TorchSDPABackend
from teachvllm.config import NotSupportedYet
from teachvllm.distributed.parallel_state import ParallelState, run_ranks
from teachvllm.model_executor import layers, loader
from teachvllm.model_executor.layers import Attention, ModelContext, WeightsError, load_weights
from teachvllm.model_executor.models import moe
from teachvllm.model_executor.models.gpt2 import GPT2LMHeadModel, TransposedSlice
from teachvllm.model_executor.models.gpt_neox import GPTNeoXAttention
from teachvllm.model_executor.models.moe import FusedMoE, MixtralForCausalLM, select_experts
from teachvllm.model_executor.models.parity import (
    Paged,
    largest_difference,
    paged_logits,
    random_sequences,
    tiny_model,
)
from teachvllm.model_executor.models.registry import get_model_class

CONTEXT = ModelContext(TorchSDPABackend, 4, torch.float32)
# transformers 4's other one forgets GPT-2's scales
EAGER: dict[str, Any] = {"attn_implementation": "eager"}
IDS: dict[str, Any] = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2(**changes: Any) -> GPT2Config:
    return GPT2Config(
        **IDS | {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128} | changes
    )


def neox(**changes: Any) -> GPTNeoXConfig:
    sizes = {
        "hidden_size": 72,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
    }
    return GPTNeoXConfig(
        **IDS | sizes | {"max_position_embeddings": 128, "rotary_pct": 0.5} | changes
    )


LLAMA = IDS | {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


def mixtral(**changes: Any) -> MixtralConfig:
    experts = {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 40,
        "max_position_embeddings": 128,
    }
    return MixtralConfig(**LLAMA | experts | changes)


def qwen(**changes: Any) -> Qwen3MoeConfig:
    experts = {
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "intermediate_size": 80,
    }
    more = {
        "head_dim": 16,
        "max_position_embeddings": 128,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    }
    return Qwen3MoeConfig(**LLAMA | experts | more | changes)


CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "gpt2, n_inner, relu, untied": lambda: gpt2(
        n_inner=52, activation_function="relu", tie_word_embeddings=False
    ),
    "gpt2, scaled by layer": lambda: gpt2(
        scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True, **EAGER
    ),
    "gpt2, no scale": lambda: gpt2(scale_attn_weights=False, **EAGER),
    "gpt_neox": neox,
    "gpt_neox, one after the other": lambda: neox(
        use_parallel_residual=False, hidden_act="gelu_new"
    ),
    "gpt_neox, no biases, tied": lambda: neox(
        attention_bias=False, tie_word_embeddings=True, rotary_pct=0.25
    ),
    "gpt_neox, all turned": lambda: neox(
        rotary_pct=1.0, rotary_emb_base=500, num_attention_heads=2
    ),
    "gpt_neox, linear": lambda: neox(rope_scaling={"rope_type": "linear", "factor": 3.0}),
    "mixtral": mixtral,
    "mixtral, window, one expert, tied": lambda: mixtral(
        sliding_window=6, num_experts_per_tok=1, tie_word_embeddings=True
    ),
    "mixtral, all experts, gelu": lambda: mixtral(num_experts_per_tok=5, hidden_act="gelu"),
    "qwen3_moe": qwen,
    "qwen3_moe, not to one": lambda: qwen(
        norm_topk_prob=False, mlp_only_layers=None, tie_word_embeddings=True
    ),
    "qwen3_moe, every second": lambda: qwen(
        decoder_sparse_step=2, mlp_only_layers=[], attention_bias=True
    ),
    "qwen3_moe, window": lambda: qwen(use_sliding_window=True, sliding_window=6),
    "qwen3_moe, no experts": lambda: qwen(num_experts=0, num_experts_per_tok=0),
}
MAIN = {"gpt2": gpt2, "gpt_neox": neox, "mixtral": mixtral, "qwen3_moe": qwen}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str) -> None:
    config = CONFIGS[name]()
    assert largest_difference(get_model_class(config), config) < 1e-4


@pytest.mark.parametrize(
    "name",
    [
        *MAIN,
        "gpt2, n_inner, relu, untied",
        "gpt_neox, no biases, tied",
        "mixtral, window, one expert, tied",
    ],
)
@torch.inference_mode()
def test_every_split_gives_the_logits_of_transformers(name: str) -> None:
    hf_model = tiny_model(CONFIGS[name]())
    sequences = random_sequences(97)
    wanted = torch.cat([hf_model(torch.tensor([ids])).logits[0] for ids in sequences])
    tokens = greedy(hf_model, sequences[0], 8)

    def run(parallel: ParallelState) -> tuple[torch.Tensor, list[int]]:
        paged = Ranked(hf_model, parallel)
        return torch.cat(paged_logits(paged, sequences, 5)), paged.greedy(sequences[0], 8)

    for split in ((2, 1), (1, 2), (2, 2)):
        results = run_ranks(run, *split)
        for logits, chosen in results:
            assert (
                (logits - wanted).abs().max() < 1e-4 and wanted.abs().max() > 1 and chosen == tokens
            ), split
            assert torch.equal(logits, results[0][0])  # the same on all ranks


@pytest.mark.parametrize("config", [gpt2, neox, lambda: neox(num_attention_heads=1), mixtral, qwen])
def test_the_heads_of_a_token_lie_together(config: Callable[[], Any]) -> None:
    "As the kernels that write the cache want keys and values."
    hf_model = tiny_model(config())
    seen = []

    def look(layer: Attention, args: tuple) -> None:
        _, k, v, *_ = args
        seen.append(k.stride()[1:] == v.stride()[1:] == (layer.kv_cache_spec.head_size, 1))

    paged = Paged(get_model_class(hf_model.config), hf_model)
    for layer in paged.layers:
        layer.register_forward_pre_hook(look)
    paged_logits(paged, [[5, 6, 7, 8]], 3)
    assert seen == [True] * 6


# Checkpoints


@pytest.fixture(scope="module", params=MAIN)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    "As save_pretrained writes it: in transformers 5 with other names than the model's own."
    hf_model = tiny_model(MAIN[request.param]())
    for parameter in hf_model.parameters():
        parameter.data *= 2.5 if parameter.dim() > 1 else 1  # so that greedy tokens differ
    folder = tmp_path_factory.mktemp("model")
    hf_model.save_pretrained(folder)
    return folder, hf_model


def test_each_rank_reads_its_part_and_no_more(saved: tuple[Path, Any]) -> None:
    folder, hf_model = saved
    read: dict[int, int] = {}
    index = loader.TensorSlice.__getitem__

    def counted(self: Any, key: Any) -> torch.Tensor:
        tensor = index(self, key)
        read[threading.get_ident()] = read.get(threading.get_ident(), 0) + tensor.nbytes
        return tensor

    for split in ((1, 1), (2, 1), (1, 2)):
        from_memory = run_ranks(lambda parallel: Ranked(hf_model, parallel).model, *split)
        read.clear()
        with (
            mock.patch.object(layers.logger, "warning") as warning,
            mock.patch.object(loader.TensorSlice, "__getitem__", counted),
        ):
            models = loaded(folder, *split)
        assert same(models, from_memory), split
        assert not warning.called, warning.call_args  # nothing is left over
        parts = [sum(p.nbytes for p in model.parameters()) for model in models]
        assert max(read.values(), default=0) <= max(parts), split


def test_greedy_tokens_equal_transformers(saved: tuple[Path, Any]) -> None:
    "Through the whole engine: batched, chunked, preempted."
    folder, hf_model = saved
    prompts = [[token % 97 for token in prompt] for prompt in random_prompts(5, longest=30)]
    expected = [greedy(hf_model, prompt, 16) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 10
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    options: dict[str, Any] = {
        "block_size": 4,
        "num_gpu_blocks_override": 24,
        "max_num_batched_tokens": 16,
    }
    with LLM(
        folder, dtype="float32", device="cpu", skip_tokenizer_init=True, max_model_len=64, **options
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_gpt2_as_the_hub_has_it() -> None:
    """Names without `transformer.`, causal masks beside the weights; a matrix that is square can
    lie on its side unseen.
    """
    hf_model = tiny_model(gpt2())
    hub = {
        name.removeprefix("transformer."): tensor for name, tensor in hf_model.state_dict().items()
    }
    hub |= {
        f"h.{i}.attn.{name}": torch.ones(1, 1, 128, 128)
        for i in range(3)
        for name in ("bias", "masked_bias")
    }
    one = GPT2LMHeadModel(hf_model.config, CONTEXT)
    other = GPT2LMHeadModel(hf_model.config, CONTEXT)
    load_weights(one, hf_model.state_dict().items())
    with mock.patch.object(layers.logger, "warning") as warning:
        load_weights(other, hub.items())
    assert not warning.called and same([one], [other])
    square = hf_model.transformer.h[1].attn.c_proj.weight
    assert torch.equal(one.transformer.h[1].attn.c_proj.weight, square.T) and not torch.equal(
        square, square.T
    )
    with pytest.raises(
        WeightsError, match=r"h.0.mlp.c_fc.weight has shape \(5, 48\), the model needs \(192, 48\)"
    ):
        load_weights(other, (hub | {"h.0.mlp.c_fc.weight": torch.zeros(48, 5)}).items())


def test_a_transposed_slice_reads_the_part_asked_for() -> None:
    matrix = torch.arange(35.0).view(5, 7)
    turned = TransposedSlice(matrix)
    assert turned.shape == (7, 5)
    for rows, columns in (
        (slice(2, 4), slice(None)),
        (slice(None), slice(1, 3)),
        (slice(0, 0), slice(None)),
    ):
        assert torch.equal(turned[rows, columns], matrix.T[rows, columns])


def test_the_second_name_of_a_head() -> None:
    """embed_out in files and in transformers 4, lm_head in the memory of transformers 5; without it
    a checkpoint is refused.
    """
    hf_model = tiny_model(neox())
    state = {
        name: tensor
        for name, tensor in hf_model.state_dict().items()
        if name not in ("lm_head.weight", "embed_out.weight")
    }
    head = hf_model.get_output_embeddings().weight.data
    models = []
    for name in ("embed_out.weight", "lm_head.weight"):
        models.append(get_model_class(hf_model.config)(hf_model.config, CONTEXT))
        load_weights(models[-1], (state | {name: head}).items())
    assert same(models[:1], models[1:]) and torch.equal(models[0].embed_out.weight, head)
    with pytest.raises(WeightsError, match="lacks 1 of .*embed_out.weight"):
        load_weights(models[0], state.items())


@pytest.mark.parametrize("lost", ["experts.3.w1", "experts.0.w2", "gate"])
def test_every_experts_matrices_must_come(lost: str, tmp_path: Path) -> None:
    hf_model = tiny_model(mixtral(num_hidden_layers=1))
    hf_model.save_pretrained(tmp_path)
    state = [
        (name, tensor)
        for name, tensor in loader.find_weights(tmp_path, "auto")
        if f"moe.{lost}." not in name
    ]
    with pytest.raises(WeightsError, match="lacks 1 of "):
        load_weights(MixtralForCausalLM(hf_model.config, CONTEXT), state)


@pytest.mark.parametrize("config", [mixtral, qwen])
def test_a_file_may_have_the_experts_in_one_tensor(
    config: Callable[[], Any], tmp_path: Path
) -> None:
    "As transformers 5 has them in memory, and as it writes them if it is told to."
    hf_model = tiny_model(config())
    hf_model.config.save_pretrained(tmp_path)
    save_file(hf_model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    for split in ((1, 1), (2, 1), (1, 2)):
        assert same(
            loaded(tmp_path, *split),
            run_ranks(lambda parallel: Ranked(hf_model, parallel).model, *split),
        )


# What is refused


def test_what_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(NotSupportedYet, match="quantization_config="):
        get_model_class(
            mixtral(
                quantization_config={"quant_method": "hqq", "bits": 4},
                architectures=["MixtralForCausalLM"],
            )
        )
    two = ModelContext(
        TorchSDPABackend, 4, torch.float32, parallel=mock.Mock(ParallelState, tp_size=2, tp_rank=0)
    )
    with pytest.raises(
        ValueError, match="tensor_parallel_size=2 does not divide the model's 3 heads"
    ):
        GPTNeoXAttention(neox(num_attention_heads=3), two)  # its 216 rows would divide
    with pytest.raises(ValueError, match="tensor_parallel_size=2 does not divide a matrix of 25"):
        FusedMoE(3, 2, 48, 25, two)


# Experts


def loop_over_tokens(layer: FusedMoE, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    "From the definition, token by token."
    w13, w2 = (
        stack.weight.unflatten(0, (layer.num_experts, -1)) for stack in (layer.w13, layer.w2)
    )
    out = torch.zeros_like(x)
    for token, row in enumerate(x):
        shares = logits[token].softmax(0)
        best = shares.argsort(descending=True)[: layer.top_k]
        for expert in best:
            gate, up = (w13[expert] @ row).chunk(2)
            share = shares[expert] / (shares[best].sum() if layer.renormalize else 1)
            out[token] += share * (w2[expert] @ (F.silu(gate) * up))
    return out


def filled_experts(num_experts: int, top_k: int, renormalize: bool = True) -> FusedMoE:
    layer = FusedMoE(num_experts, top_k, 24, 20, CONTEXT, renormalize=renormalize)
    g = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=g) / 4)
    return layer


@pytest.mark.parametrize("num_tokens", [1, 2, 33])
@pytest.mark.parametrize("num_experts, top_k", [(1, 1), (5, 2), (5, 5), (40, 3)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_experts_equal_a_loop_over_tokens(
    num_experts: int, top_k: int, renormalize: bool, num_tokens: int
) -> None:
    g = torch.Generator().manual_seed(num_tokens)
    layer = filled_experts(num_experts, top_k, renormalize)
    x = torch.randn(num_tokens, 24, generator=g)
    logits = torch.randn(num_tokens, num_experts, generator=g)
    torch.testing.assert_close(
        layer(x, logits), loop_over_tokens(layer, x, logits), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    "way", ["rows_of_each_expert", "all_rows_for_each_expert", "torch_grouped_mm", "grouped_linear"]
)
@pytest.mark.parametrize(
    "lengths",
    [[0, 3, 0, 0, 2], [0] * 5, [0, 0, 7, 0, 0], [7, 0, 0, 0, 0], [0, 0, 0, 0, 7], [1] * 5],
)
def test_all_ways_of_a_grouped_product_agree(way: str, lengths: list[int]) -> None:
    if way == "torch_grouped_mm" and not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has none")
    g = torch.Generator().manual_seed(0)
    x = torch.randn(sum(lengths), 8, generator=g)
    weight = torch.randn(5, 6, 8, generator=g)
    wanted = torch.cat([rows @ matrix.T for rows, matrix in zip(x.split(lengths), weight)])
    got = getattr(moe, way)(x, weight, torch.tensor(lengths).cumsum(0).int())
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    "dtype, size, capability, capturing, way",
    [
        (torch.bfloat16, 8, (9, 0), False, "torch_grouped_mm"),
        (torch.bfloat16, 8, (9, 0), True, "torch_grouped_mm"),
        (torch.bfloat16, 6, (9, 0), False, "rows_of_each_expert"),
        (torch.bfloat16, 8, (8, 0), False, "rows_of_each_expert"),
        (torch.float16, 8, (9, 0), True, "all_rows_for_each_expert"),
        (torch.bfloat16, 8, (8, 0), True, "all_rows_for_each_expert"),
    ],
)
def test_nothing_leaves_a_gpu_while_a_graph_is_recorded(
    dtype: torch.dtype, size: int, capability: tuple[int, int], capturing: bool, way: str
) -> None:
    "Which way is chosen; there is no GPU here to take it."
    ways = {
        name: mock.Mock()
        for name in ("rows_of_each_expert", "all_rows_for_each_expert", "torch_grouped_mm")
    }
    with (
        mock.patch.multiple(moe, **ways),
        mock.patch.object(moe.F, "grouped_mm", create=True),
        mock.patch("torch.cuda.get_device_capability", lambda device: capability),
        mock.patch("torch.cuda.is_current_stream_capturing", lambda: capturing),
    ):
        moe.grouped_linear(
            mock.Mock(is_cuda=True, dtype=dtype), torch.zeros(5, size, 8), torch.zeros(5)
        )
    assert [name for name, called in ways.items() if called.called] == [way]


def test_an_expert_without_tokens_costs_nothing() -> None:
    "And there is one product for each of the others, however many tokens there are."
    order, ends = moe.group_by_expert(torch.tensor([[6, 1]] * 50), 8)
    product = mock.Mock(wraps=F.linear)
    moe.rows_of_each_expert(torch.randn(100, 24), torch.randn(8, 5, 24), ends, product)
    assert [len(call.args[0]) for call in product.call_args_list] == [50, 50]
    assert (order[:50] % 2 == 1).all() and (order[50:] % 2 == 0).all()


def test_a_token_does_not_depend_on_the_others() -> None:
    "Nor a row of padding, which may hold anything, on CUDA graphs."
    layer = filled_experts(6, 2)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(20, 24, generator=g)
    logits = torch.randn(20, 6, generator=g)
    whole = layer(x, logits)
    torch.testing.assert_close(
        torch.cat([layer(x[i : i + 1], logits[i : i + 1]) for i in range(20)]), whole
    )
    poisoned = x.clone()
    wild = logits.clone()
    poisoned[15:] = torch.nan
    wild[15:] = torch.nan
    torch.testing.assert_close(layer(poisoned, wild)[:15], whole[:15])


def test_routing_is_in_float32() -> None:
    "Two experts that bfloat16 cannot tell apart once softmax has made shares of them."
    logits = torch.tensor([[8.0, 1.0, 1.0078125]]).bfloat16()
    weights, experts = select_experts(logits, 2, renormalize=False)
    assert experts.tolist() == [[0, 2]] and weights.dtype == torch.float32
    torch.testing.assert_close(weights[0], logits.float().softmax(1)[0, [0, 2]])


@pytest.mark.parametrize("num_tokens", [0, 1, 30])
def test_processed_experts_multiply_the_same(num_tokens: int) -> None:
    layer = filled_experts(6, 2)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, 24, generator=g)
    logits = torch.randn(num_tokens, 6, generator=g)
    before = layer(x, logits)
    with mock.patch("torch.backends.mkldnn.is_available", lambda: False):
        layer.w13.linear_method.process_weights_after_loading(layer.w13)
    assert layer.w13.packed is None and len(layer.w13.weight)
    for stack in (layer.w13, layer.w2):
        stack.linear_method.process_weights_after_loading(stack)
        assert (stack.packed is None) == bool(stack.weight.numel())
    torch.testing.assert_close(layer(x, logits), before)
