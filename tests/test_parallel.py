"""Several ranks have one model between them: groups, shards, stages. Ranks are threads here;
nothing else is different.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import greedy
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, MistralConfig, OPTConfig, Phi3Config

from teachvllm.arg_utils import EngineArgs
from teachvllm.attention.cpu import TorchSDPABackend
from teachvllm.distributed.parallel_state import (
    GroupCoordinator,
    ParallelState,
    host_store,
    init_distributed_environment,
    initialize_model_parallel,
    run_ranks,
)
from teachvllm.model_executor import loader
from teachvllm.model_executor.layers import (
    ColumnParallelLinear,
    ForwardContext,
    LinearBase,
    ModelContext,
    ParallelLMHead,
    PPMissingLayer,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    WeightsError,
    attention_layers,
    equal_part,
    get_pp_indices,
    load_weights,
    vocab_part,
)
from teachvllm.model_executor.loader import get_model, make_context, save_sharded_state
from teachvllm.model_executor.models.parity import (
    Paged,
    flat_batch,
    paged_logits,
    random_sequences,
    tiny_model,
)
from teachvllm.model_executor.models.registry import get_model_class

SIZES: dict[str, Any] = {
    "vocab_size": 97,
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
    "vocab_size": 97,
    "hidden_size": 48,
    "ffn_dim": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 48,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "one KV head": lambda: LlamaConfig(**SIZES | {"num_key_value_heads": 1}),
    "four KV heads": lambda: LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "tied, biases, head_dim": lambda: LlamaConfig(
        **SIZES | {"tie_word_embeddings": True}, attention_bias=True, mlp_bias=True, head_dim=20
    ),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=6),
    "phi3": lambda: Phi3Config(**SIZES, sliding_window=6, partial_rotary_factor=0.5),
    "opt": lambda: OPTConfig(**OPT_SIZES),
    "opt-350m": lambda: OPTConfig(
        **OPT_SIZES | {"word_embed_proj_dim": 24}, do_layer_norm_before=False
    ),
    "opt, untied, no biases": lambda: OPTConfig(
        **OPT_SIZES, tie_word_embeddings=False, enable_bias=False
    ),
}
# tensor_parallel_size, pipeline_parallel_size
SPLITS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (2, 2)]
PROMPT = [5, 40, 3, 77, 12, 9, 61, 30, 8]


# Groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("size", [2, 4])
def test_collectives(size: int, dtype: torch.dtype) -> None:
    rows = [torch.arange(12).view(3, 4) * (rank + 1) for rank in range(size)]

    @torch.inference_mode()
    def check(parallel: ParallelState) -> None:
        group = parallel.tp
        mine = rows[parallel.rank].to(dtype)
        assert group is not None and group.rank_in_group == parallel.tp_rank == parallel.rank
        assert torch.equal(group.all_reduce(mine.clone()), sum(rows).to(dtype))  # type: ignore[union-attr,arg-type]
        for dim in (0, 1, -1):
            assert torch.equal(group.all_gather(mine, dim), torch.cat(rows, dim).to(dtype))
        for src in range(size):
            assert torch.equal(group.broadcast(mine.clone(), src), rows[src].to(dtype))
            assert group.broadcast_object({"from": group.rank, "a": [1.5, None]}, src) == {
                "from": src,
                "a": [1.5, None],
            }
        group.send_tensor_dict({"hidden": mine, "turned": mine.T, "none": mine[:0]})
        got = group.recv_tensor_dict()
        before = rows[group.rank - 1].to(dtype)
        assert torch.equal(got["hidden"], before) and torch.equal(got["turned"], before.T)
        assert got["none"].shape == (0, 4) and got["hidden"].dtype == dtype
        group.barrier()

    run_ranks(check, size)


def test_a_sender_does_not_wait_for_the_receiver() -> None:
    "The first stage goes on to its next step while the second is still busy."
    sent = threading.Event()

    def send_or_wait(parallel: ParallelState) -> Any:
        assert parallel.pp is not None
        got = {}
        if parallel.is_first_stage:
            parallel.pp.send_tensor_dict({"x": torch.arange(300_000)})
            sent.set()
        else:
            assert sent.wait(30)
            got = parallel.pp.recv_tensor_dict()
        parallel.pp.barrier()  # what is on its way is lost with its sender
        return got.get("x")

    assert torch.equal(run_ranks(send_or_wait, 1, 2)[1], torch.arange(300_000))


def test_all_ranks_get_the_same_bits() -> None:
    def sums(parallel: ParallelState) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(parallel.rank)
        assert parallel.tp is not None
        xs = [
            torch.randn(n, generator=generator).to(dtype)
            for n in (1, 7, 5000)
            for dtype in (torch.float32, torch.bfloat16)
        ]
        return [parallel.tp.all_reduce(x) for x in xs]

    first, *others = run_ranks(sums, 4)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_ranks_are_numbered_as_in_vllm() -> None:
    def where(parallel: ParallelState) -> tuple:
        assert parallel.tp and parallel.pp
        return parallel.tp.ranks, parallel.tp_rank, parallel.pp.ranks, parallel.pp_rank

    assert run_ranks(where, 2, 2) == [
        ([0, 1], 0, [0, 2], 0),
        ([0, 1], 1, [1, 3], 0),
        ([2, 3], 0, [0, 2], 1),
        ([2, 3], 1, [1, 3], 1),
    ]
    alone = run_ranks(lambda parallel: parallel)[0]
    assert alone.tp is None and alone.pp is None and (alone.rank, alone.size) == (0, 1)


def test_two_engines_in_one_process() -> None:
    "Of different sizes, at the same time, and beside torch's own global group."
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:

        def engine(size: int) -> list[int]:
            def sums(parallel: ParallelState) -> int:
                assert parallel.world
                for _ in range(20):
                    total = parallel.world.all_reduce(torch.tensor([size * 10 + parallel.rank]))
                return int(total)

            return run_ranks(sums, size)

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(engine, (2, 4))) == [[41, 41], [166] * 4]
    finally:
        torch.distributed.destroy_process_group()


def test_env_is_what_a_launcher_gave() -> None:
    """Two engines, one after the other, of two ranks as torchrun starts them: the second reads
    nothing that the first left.
    """
    store, init_method = host_store()
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": init_method.rpartition(":")[2],
        "WORLD_SIZE": "2",
    }
    code = """
import sys, torch
from teachvllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
rank = int(sys.argv[1])
for i in range(2):
    world = init_distributed_environment(2, rank, rank, "env://", "cpu", 60)
    parallel = initialize_model_parallel(world, 2)
    assert parallel.tp.all_reduce(torch.tensor([rank + 1])).item() == 3
    world.barrier()
    parallel.destroy()
assert not torch.distributed.is_initialized()
"""
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", **os.environ}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(i)],
            env=env | {"RANK": str(i)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=100)
        assert rank.returncode == 0, errors
    with (
        mock.patch.dict(os.environ, WORLD_SIZE="4"),
        pytest.raises(ValueError, match="is 2, but 4 processes were launched"),
    ):
        init_distributed_environment(2, 0, 0, "env://", "cpu")
    del store


def test_what_does_not_meet_is_said() -> None:
    _, init_method = meeting = host_store()
    with pytest.raises(RuntimeError, match=f"rank 0 of 2 did not meet the others at {init_method}"):
        init_distributed_environment(2, 0, 0, init_method, "cpu", timeout=0.5)
    del meeting
    with pytest.raises(RuntimeError, match="did not meet"):  # nothing listens there any more
        init_distributed_environment(2, 0, 0, init_method, "cpu", timeout=0.5)
    with pytest.raises(
        ValueError, match="tensor_parallel_size=3 .* is not the number of workers, 2"
    ):
        initialize_model_parallel(mock.Mock(world_size=2, rank=0), 3)
    with pytest.raises(ValueError, match="choose tcp://host:port or env://"):
        init_distributed_environment(2, 0, 0, "file:///x", "cpu")


def test_a_rank_that_fails_ends_the_others_wait() -> None:
    def fail(parallel: ParallelState) -> None:
        if parallel.rank == 1:
            raise KeyError("rank 1's own error")
        assert parallel.tp
        with pytest.raises(RuntimeError):
            parallel.tp.all_reduce(torch.ones(1))
        raise RuntimeError("a consequence")

    with pytest.raises(KeyError, match="rank 1's own error"):
        run_ranks(fail, 3, timeout=600)  # longer than the test may take


# Models


class Ranked(Paged):
    "A rank's part of a model on pages. Stages hand their hidden states on."

    def __init__(self, hf_model: Any, parallel: ParallelState, block_size: int = 4):
        self.parallel = parallel

        def model_class(config: Any, context: ModelContext) -> nn.Module:
            model: Any = get_model_class(config)(config, replace(context, parallel=parallel))
            self.stage = model.forward
            model.forward = self.forward
            self.head = model.compute_logits
            model.compute_logits = self.compute_logits
            return model

        super().__init__(model_class, hf_model, block_size=block_size)
        self.vocab_size = hf_model.config.vocab_size

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        pp = self.parallel.pp
        got = pp.recv_tensor_dict()["hidden"] if pp and not self.parallel.is_first_stage else None
        hidden = self.stage(input_ids, replace(context, hidden_states=got))
        if pp and not self.parallel.is_last_stage:
            pp.send_tensor_dict({"hidden": hidden})
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        "The last stage's, on all stages, so that each can go on with the same token."
        pp = self.parallel.pp
        last = self.parallel.is_last_stage
        logits = self.head(hidden) if last else torch.empty(len(hidden), self.vocab_size)
        return pp.broadcast(logits.contiguous(), pp.world_size - 1) if pp else logits

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        self.start([prompt + [0] * num_tokens])
        done = len(prompt)
        (logits,) = self.step([(0, 0, len(prompt))])
        while done < len(prompt) + num_tokens:
            self.sequences[0][done] = int(logits[-1].argmax())
            done += 1
            (logits,) = self.step([(0, done - 1, done)])
        return self.sequences[0][len(prompt) :]


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_every_split_gives_the_logits_of_transformers(name: str) -> None:
    hf_model = tiny_model(CONFIGS[name]())
    sequences = random_sequences(97)
    wanted = torch.cat([hf_model(torch.tensor([ids])).logits[0] for ids in sequences])
    tokens = greedy(hf_model, PROMPT, 12)

    def run(parallel: ParallelState) -> tuple[list[torch.Tensor], list[int]]:
        paged = Ranked(hf_model, parallel)
        return [
            torch.cat(paged_logits(paged, sequences, chunk)) for chunk in (64, 5)
        ], paged.greedy(PROMPT, 12)

    for split in SPLITS:
        results = run_ranks(run, *split)
        for logits, chosen in results:
            assert (
                all((got - wanted).abs().max() < 1e-4 for got in logits) and wanted.abs().max() > 1
            ), split
            assert chosen == tokens, split
            # the same on all ranks
            assert all(torch.equal(a, b) for a, b in zip(logits, results[0][0], strict=True))


@torch.inference_mode()
def test_bfloat16_is_as_near_as_with_one_rank() -> None:
    "Sums are rounded in another order, so the bits differ; the error is of the same size."
    hf_model = tiny_model(CONFIGS["llama"]())
    sequences = random_sequences(97)
    exact = torch.cat([hf_model(torch.tensor([ids])).logits[0] for ids in sequences])
    half = hf_model.bfloat16()
    errors = {}
    for size in (1, 2, 4):
        paged = lambda parallel: torch.cat(paged_logits(Ranked(half, parallel), sequences, 64))  # noqa: E731
        first, *others = run_ranks(paged, size)
        assert all(torch.equal(first, other) for other in others)
        errors[size] = float((first - exact).norm() / exact.norm())
    assert max(errors.values()) < 1.5 * errors[1] + 0.01, errors


def test_one_rank_has_no_group_and_no_other_path() -> None:
    "No collective is called, and every layer has the weights and loaders that it always had."
    hf_model = tiny_model(CONFIGS["llama"]())
    names = ("all_reduce", "all_gather", "broadcast", "send_tensor_dict", "recv_tensor_dict")
    with mock.patch.multiple(
        GroupCoordinator, **{name: mock.Mock(side_effect=AssertionError(name)) for name in names}
    ):
        paged = Paged(get_model_class(hf_model.config), hf_model)
        paged_logits(paged, [PROMPT], 4)
    assert all(layer.tp is None for layer in paged.model.modules() if isinstance(layer, LinearBase))
    assert paged.model.lm_head.weight.shape == (97, 48)  # not padded


@pytest.mark.parametrize("name", ["llama", "one KV head", "phi3", "opt-350m"])
def test_the_parts_are_the_whole(name: str) -> None:
    "All parts together are the checkpoint's numbers, repeated where they should be."
    hf_model = tiny_model(CONFIGS[name]())
    sizes = {}
    for size in (1, 2, 4):
        models = run_ranks(lambda parallel: Ranked(hf_model, parallel).model, size)
        sizes[size] = [sum(p.numel() for p in model.parameters()) for model in models]
        specs = [
            [layer.kv_cache_spec.num_kv_heads for layer in attention_layers(model).values()]
            for model in models
        ]
        kv_heads = getattr(hf_model.config, "num_key_value_heads", 4)
        assert specs == [[max(1, kv_heads // size)] * 3] * size
        if name == "one KV head":
            layers = [model.model.layers[0].self_attn.qkv_proj for model in models]
            q, k, _ = zip(*(layer.weight.split(layer.output_partition_sizes) for layer in layers))
            state = hf_model.state_dict()
            assert torch.equal(torch.cat(q), state["model.layers.0.self_attn.q_proj.weight"])
            assert all(
                torch.equal(part, state["model.layers.0.self_attn.k_proj.weight"]) for part in k
            )
    assert len(set(sizes[2])) == len(set(sizes[4])) == 1
    assert sizes[4][0] < 0.75 * sizes[2][0] < 0.6 * sizes[1][0]


def test_stages_have_global_names_and_only_their_layers() -> None:
    hf_model = tiny_model(CONFIGS["tied, biases, head_dim"]())
    first, last = run_ranks(lambda parallel: Ranked(hf_model, parallel).model, 1, 2)
    names = [list(attention_layers(model)) for model in (first, last)]
    assert names == [
        ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"],
        ["model.layers.2.self_attn.attn"],
    ]
    assert isinstance(first.lm_head, PPMissingLayer) and isinstance(
        first.model.norm, PPMissingLayer
    )
    assert (
        last.lm_head.weight is last.model.embed_tokens.weight
    )  # tied: the head reads the embedding, on the last stage too
    assert isinstance(last.model.layers[0], PPMissingLayer) and len(last.model.layers) == 3


@pytest.mark.parametrize(
    "stages, counts", [(1, [7]), (2, [4, 3]), (3, [2, 3, 2]), (4, [2, 2, 2, 1]), (7, [1] * 7)]
)
def test_layers_are_shared_out(stages: int, counts: list[int]) -> None:
    indices = [get_pp_indices(7, mock.Mock(pp_rank=rank, pp_size=stages)) for rank in range(stages)]
    assert [end - start for start, end in indices] == counts
    assert [i for start, end in indices for i in range(start, end)] == list(range(7))


# Sizes that do not divide


def context(size: int, rank: int = 0) -> ModelContext:
    return ModelContext(TorchSDPABackend, 4, torch.float32, parallel=pretend(size, rank))


def pretend(size: int, rank: int = 0) -> ParallelState:
    "A rank's state without the others."
    return ParallelState(tp=mock.Mock(world_size=size, rank_in_group=rank))


REFUSED = [
    (3, 4, 2, "1, 2, 4"),
    (2, 9, 3, "1, 3, 9"),
    (3, 12, 2, "1, 2, 4, 6, 12"),
    (8, 4, 4, "1, 2, 4"),
    (4, 12, 6, "1, 2, 3, 6, 12"),
]


@pytest.mark.parametrize("size, heads, kv_heads, choices", REFUSED)
def test_heads_that_cannot_be_shared(size: int, heads: int, kv_heads: int, choices: str) -> None:
    said = (
        f"tensor_parallel_size={size} does not divide the model's {heads} heads and {kv_heads} "
        f"KV heads: choose {choices}$"
    )
    with pytest.raises(ValueError, match=said):
        QKVParallelLinear(48, 8, heads, kv_heads, context(size))


def test_matrices_that_cannot_be_cut() -> None:
    for make in (
        lambda: ColumnParallelLinear(4, 10, context(4)),
        lambda: RowParallelLinear(10, 4, context(4)),
    ):
        with pytest.raises(
            ValueError,
            match="tensor_parallel_size=4 does not divide a matrix of 10 .*: choose 1, 2, 5, 10$",
        ):
            make()
    with pytest.raises(ValueError, match="pipeline_parallel_size=4: the model has only 3 layers"):
        get_pp_indices(3, mock.Mock(pp_rank=0, pp_size=4))


@pytest.mark.parametrize("vocab", [1, 5, 7, 8, 97])
def test_a_vocabulary_is_padded(vocab: int) -> None:
    "Parts are equal, and together they are the vocabulary; more ranks than ids is right, too."
    weight = torch.randn(vocab, 6)
    ids = torch.randint(vocab, (20,))
    x = torch.randn(3, 6)

    def run(parallel: ParallelState) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own = ModelContext(TorchSDPABackend, 4, torch.float32, parallel=parallel)
        embedding = VocabParallelEmbedding(vocab, 6, own)
        head = ParallelLMHead(6, vocab, own, bias=True)
        model = nn.ModuleDict({"embedding": embedding, "head": head})
        state = {"embedding.weight": weight, "head.weight": weight, "head.bias": weight[:, 0]}
        load_weights(model, state.items())
        return embedding.weight, embedding(ids), head(x)

    results = run_ranks(run, 4)
    parts = torch.cat([part for part, _, _ in results])
    assert (
        torch.equal(parts[:vocab], weight)
        and (parts[vocab:] == 0).all()
        and len(parts) == -(-vocab // 4) * 4
    )
    for _, embedded, logits in results:
        assert torch.equal(embedded, weight[ids])
        torch.testing.assert_close(logits, x @ weight.T + weight[:, 0])


def test_parts_cover_the_whole() -> None:
    for size, count in ((12, 4), (12, 3), (12, 1)):
        assert [i for rank in range(count) for i in equal_part(size, pretend(count, rank))] == list(
            range(size)
        )
    assert {len(vocab_part(50_000, pretend(7, rank))) for rank in range(7)} == {-(-50_000 // 7)}


# From the disk


def config_of(folder: Path, **options: Any) -> Any:
    options = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, **options}
    return EngineArgs(model=str(folder), **options).create_engine_config()


def loaded(folder: Path, tp: int = 1, pp: int = 1, **options: Any) -> list[Any]:
    config = config_of(folder, **options)
    return run_ranks(
        lambda parallel: loader._filled_model(config, make_context(config, parallel), "cpu"), tp, pp
    )


def same(models: list[Any], others: list[Any]) -> bool:
    pairs = [
        zip(a.named_parameters(), b.named_parameters(), strict=True)
        for a, b in zip(models, others, strict=True)
    ]
    return all(na == nb and torch.equal(a, b) for pair in pairs for (na, a), (nb, b) in pair)


@pytest.fixture(scope="module", params=["llama", "tied, biases, head_dim", "phi3", "opt-350m"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    hf_model = tiny_model(CONFIGS[request.param]())
    folder = tmp_path_factory.mktemp("model")
    hf_model.save_pretrained(folder)
    return folder, hf_model


@pytest.mark.parametrize("split", [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_each_rank_loads_its_part(saved: tuple[Path, Any], split: tuple[int, int]) -> None:
    "From a file, slice by slice, the same as from tensors in memory."
    folder, hf_model = saved
    from_memory = run_ranks(lambda parallel: Ranked(hf_model, parallel).model, *split)
    with mock.patch.object(loader.logger, "warning") as warning:
        assert same(loaded(folder, *split), from_memory)
    # nothing is left over
    assert not [call for call in warning.call_args_list if "not used" in call.args[0]]
    torch.save(hf_model.state_dict(), folder / "pytorch_model.bin")
    assert same(loaded(folder, *split, load_format="pt"), from_memory)
    (folder / "pytorch_model.bin").unlink()


@pytest.mark.parametrize("split", [(2, 1), (4, 1), (2, 2)])
def test_a_rank_reads_only_its_part(saved: tuple[Path, Any], split: tuple[int, int]) -> None:
    folder, _ = saved
    read: dict[int, int] = {}
    index = loader.TensorSlice.__getitem__

    def counted(self: Any, key: Any) -> torch.Tensor:
        tensor = index(self, key)
        read[threading.get_ident()] = read.get(threading.get_ident(), 0) + tensor.nbytes
        return tensor

    with mock.patch.object(loader.TensorSlice, "__getitem__", counted):
        models = loaded(folder, *split)
    parts = [sum(p.nbytes for p in model.parameters()) for model in models]
    assert len(read) == len(models) and max(read.values()) <= max(parts)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-4), ("bfloat16", 0.3)])
@torch.inference_mode()
def test_get_model_is_ready_to_run(saved: tuple[Path, Any], dtype: str, tolerance: float) -> None:
    "With packed weights, in the dtype asked for."
    folder, hf_model = saved
    config = config_of(folder, dtype=dtype)
    prompt = torch.tensor(PROMPT)
    wanted = hf_model(prompt[None]).logits[0]
    positions, meta = flat_batch([(0, 0, len(prompt))], torch.zeros(1, 1, dtype=torch.int64), 16)

    @torch.inference_mode()
    def logits(parallel: ParallelState) -> torch.Tensor:
        context = make_context(config, parallel)
        caches = []
        step = replace(meta, plans={})
        model = get_model(config, context)
        for layer in attention_layers(model).values():
            spec = layer.kv_cache_spec
            shape = layer.backend.get_kv_cache_shape(1, 16, spec.num_kv_heads, spec.head_size)
            order = layer.backend.get_kv_cache_stride_order()
            caches.append(torch.empty_permuted(shape, order, dtype=context.dtype).zero_())
            layer.backend.build(step, 16)
        return model.compute_logits(model(prompt, ForwardContext(positions, step, caches)))

    one, other = run_ranks(logits, 2)
    assert torch.equal(one, other) and (one - wanted).abs().max() < tolerance * max(
        1, float(wanted.abs().max()) / 10
    )


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    hf_model = tiny_model(CONFIGS["llama"]())
    state = dict(hf_model.state_dict())
    name = "model.layers.0.self_attn.k_proj.weight"
    larger = {name: torch.zeros(25, 48), "model.layers.1.mlp.down_proj.weight": torch.zeros(48, 65)}
    for name, wrong in larger.items():

        def run(parallel: ParallelState, name: str = name, wrong: torch.Tensor = wrong) -> None:
            own = ModelContext(TorchSDPABackend, 4, torch.float32, parallel=parallel)
            load_weights(
                get_model_class(hf_model.config)(hf_model.config, own),
                (state | {name: wrong}).items(),
            )

        with pytest.raises(
            WeightsError,
            match=rf"{name} has shape \({wrong.shape[0]}, {wrong.shape[1]}\), the model needs",
        ):
            run_ranks(run, 2)


@pytest.mark.parametrize("split", [(1, 1), (2, 1), (2, 2)])
def test_sharded_state(saved: tuple[Path, Any], split: tuple[int, int], tmp_path: Path) -> None:
    folder, _ = saved
    config = config_of(folder)
    run_ranks(
        lambda parallel: save_sharded_state(config, make_context(config, parallel), tmp_path),
        *split,
    )
    size = split[0] * split[1]
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-rank-{rank}-part-0.safetensors" for rank in range(size)]
    assert (tmp_path / "config.json").is_file()
    assert same(loaded(tmp_path, *split, load_format="sharded_state"), loaded(folder, *split))
    with pytest.raises(ValueError, match=f"= {size} and cannot be loaded for {size * 2}"):
        loaded(tmp_path, split[0] * 2, split[1], load_format="sharded_state")
    with pytest.raises(ValueError, match="needs load_format='sharded_state'"):
        loaded(tmp_path, *split)
    with pytest.raises(ValueError, match="no model-rank-0-part-0.safetensors in"):
        loaded(folder, *split, load_format="sharded_state")
    with pytest.raises(ValueError, match="need another folder"):
        run_ranks(
            lambda parallel: save_sharded_state(config, make_context(config, parallel), folder),
            *split,
        )
    if split == (2, 1):
        with pytest.raises(WeightsError, match="the model needs|has no place in this rank's part"):
            loaded(tmp_path, 1, 2, load_format="sharded_state")  # as many ranks, cut in another way
        (tmp_path / files[1]).write_bytes(b"damaged")
        with pytest.raises(
            WeightsError, match="model-rank-1-part-0.safetensors is corrupt or cut short"
        ):
            loaded(tmp_path, 2, load_format="sharded_state")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_a_part_takes_little_more_than_the_part(tmp_path: Path) -> None:
    "Own memory at its peak: the part and a tensor. In a process for each rank, as in an engine."
    config = LlamaConfig(
        **SIZES
        | {
            "vocab_size": 4000,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 6,
        }
    )
    tiny_model(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    largest = max(tensor.nbytes for tensor in tensors.values())
    code = """
import sys, threading, torch
from teachvllm.arg_utils import EngineArgs
from teachvllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from teachvllm.model_executor import loader
from teachvllm.worker.memory_profiling import process_memory, release_memory
folder, init_method, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
config = EngineArgs(model=folder, dtype="float32", device="cpu", skip_tokenizer_init=True).create_engine_config()
parallel = initialize_model_parallel(init_distributed_environment(2, rank, rank, init_method, "cpu", 100), 2)
context = loader.make_context(config, parallel)
release_memory()
before, peak, plain = process_memory("RssAnon"), 0, loader.TensorSlice.__getitem__
def watched(self, index):
    global peak
    tensor = plain(self, index)
    peak = max(peak, process_memory("RssAnon") - before)
    return tensor
loader.TensorSlice.__getitem__ = watched
model = loader._filled_model(config, context, "cpu")
peak = max(peak, process_memory("RssAnon") - before)
print(sum(p.nbytes for p in model.parameters()), peak)
parallel.world.barrier()
"""
    store, init_method = host_store()
    command = [sys.executable, "-c", code, str(tmp_path), init_method]
    ranks = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(2)
    ]
    for rank in ranks:
        output, _ = rank.communicate(timeout=200)
        part, peak = map(int, output.split())
        print(f"part {part >> 20} MiB, peak {peak >> 20} MiB, largest tensor {largest >> 20} MiB")
        assert rank.returncode == 0 and peak < part + largest + 2**23, (part, peak, largest)
        assert part < 0.6 * sum(tensor.nbytes for tensor in tensors.values())
    del store
