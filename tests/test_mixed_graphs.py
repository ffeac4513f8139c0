"""Small steps with prompts through graphs give what eager ones give: by stand-ins on a CPU; under "On a GPU" by CUDA's."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

from helpers import VOCAB, make_tiny, random_prompts
from hypothesis import given
from hypothesis import strategies as st
from transformers import MixtralConfig, MixtralForCausalLM

from teachvllm import LLM, EngineArgs, SamplingParams
from teachvllm.config import VllmConfig
from teachvllm.core.orders import NewSequenceData, SchedulerOutput
from teachvllm.gpu_kernels.graph import (
    PER_TOKEN,
    GraphSize,
    MixedGraphRunner,
    MixedInputs,
    mixed_sizes,
)
from teachvllm.worker.cuda_graph import CudaGraph, StandInGraph, graph_memory
from teachvllm.worker.model_runner import Batch, ModelRunner, to_device
from teachvllm.worker.worker import Worker

LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "attention_backend": "triton",
    "block_size": 16,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 40,
    "num_gpu_blocks_override": 24,
}
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
GRAPH = CudaGraph if torch.cuda.is_available() else StandInGraph


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("tiny"))
    make_tiny("llama", path)
    return path


@given(st.integers(1, 600))
def test_sizes_fall_and_waste_little(most: int) -> None:
    sizes = mixed_sizes(most)
    counts = [size.num_tokens for size in sizes]
    assert all(size.mixed for size in sizes)
    assert counts == sorted(set(counts), reverse=True) and counts[0] == most
    for n in range(1, most + 1):
        smallest = min(count for count in counts if count >= n)
        assert smallest - n < 64 and smallest <= max(32, 2 * n)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(0, 5),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_padding(new_tokens: list[int], more_tokens: int, more_seqs: int, rng: Any) -> None:
    "What was there stays; a token that was added is in no sequence and has no slot."
    num_tokens = sum(new_tokens)
    num_seqs = len(new_tokens)
    inputs = {
        name: np.array([rng.randrange(1, 99) for _ in range(num_tokens)]) for name in PER_TOKEN
    }
    inputs["seq_lens"] = np.array(new_tokens) + rng.randrange(9)
    inputs["block_table"] = np.full((num_seqs, 2), rng.randrange(99), np.int32)
    inputs["query_start_loc"] = np.cumsum([0, *new_tokens])
    extras = ("adapter_ids",)
    static = MixedInputs(num_tokens + more_tokens, num_seqs + more_seqs, 3, "cpu", extras)
    size = num_tokens + more_tokens
    more_seqs = min(more_seqs, size - num_seqs)  # there is no room for more than tokens
    seen = static.views(size)
    assert seen["slot_mapping"].tolist() == [-1] * size and not seen["seq_lens"].any()
    on_device = static.load(size, inputs, {"top_k": np.arange(3)})
    assert on_device["top_k"].tolist() == [0, 1, 2]
    assert list(seen) == [*Batch.NAMES, *extras]
    for name, array in inputs.items():
        kept = seen[name].numpy()[tuple(map(slice, array.shape))]
        assert np.array_equal(kept, array)
    assert seen["slot_mapping"][num_tokens:].tolist() == [-1] * more_tokens
    assert seen["token_indices"][num_tokens:].tolist() == [-1] * more_tokens
    assert seen["query_start_loc"].diff().tolist() == new_tokens + [0] * more_seqs
    assert seen["seq_lens"][num_seqs:].tolist() == [0] * more_seqs


class RecordingWorker(Worker):
    "Records stand-ins, where `Worker` would record graphs on a GPU."

    def compile_or_warm_up_model(self) -> None:
        super().compile_or_warm_up_model()
        runner = self.model_runner
        if not self.config.model_config.enforce_eager:
            sizes = MixedGraphRunner.sizes_for(runner)
            cache = self.cache_engine.gpu_cache
            runner.graphs = MixedGraphRunner(runner, sizes, cache, StandInGraph)


ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1, "seed": 3, "top_k": 20},
    "scored": {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
    "several": {"temperature": 1, "seed": 4, "n": 2},
}


def answers(llm: LLM) -> list[Any]:
    "What requests of four kinds get, and their scores, rounded."
    prompts = [{"prompt_token_ids": ids} for ids in random_prompts(5, 24, seed=1)]
    asked = [
        SamplingParams(max_tokens=2 + i % 3, ignore_eos=True, detokenize=False, **kind)
        for i, kind in enumerate([*ASKED.values(), ASKED["greedy"]])
    ]
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    return [
        (
            [list(one.token_ids) for one in output.outputs],
            [
                {token: round(score.logprob, 3) for token, score in (step or {}).items()}
                for step in (output.prompt_logprobs or [])
            ],
        )
        for output in outputs
    ]


def test_engine(folder: str) -> None:
    options = LIMITS | {"device": "cpu", "worker_cls": RecordingWorker}
    got = []
    for eager in (True, False):
        ran: list[int] = []
        replay = StandInGraph.replay

        def noted(graph: StandInGraph, ran: list[int] = ran, replay: Any = replay) -> torch.Tensor:
            ran.append(len(graph.output))
            return replay(graph)

        with (
            patch.object(StandInGraph, "replay", noted),
            LLM(folder, enforce_eager=eager, async_scheduling=True, **options) as llm,
        ):
            got.append(answers(llm))
        assert eager != bool(ran)
    assert got[0] == got[1]
    assert {32, 40} & set(ran)  # with prompts
    assert {1, 2, 4} & set(ran)  # decodes


class Recorded:
    "A runner with a sequence that decodes, one whose prompt waits, and their mixed step."

    def __init__(self, folder: str, graph_class: Any):
        options = LIMITS | {"device": DEVICE.partition(":")[0]}
        self.runner = ModelRunner(EngineArgs(folder, **options).create_engine_config(), DEVICE)
        self.runner.load_model()
        self.cache = self.runner.make_cache(8).gpu_cache
        greedy = SamplingParams(temperature=0)
        new = [
            NewSequenceData(i, list(range(3, 3 + n)), n, 0, [i + 2], greedy, [], 0)
            for i, n in enumerate((9, 5))
        ]
        first = SchedulerOutput(num_scheduled_tokens={0: 9}, new_seqs=new)
        self.runner.execute_model(first, self.cache)
        self.graphs = MixedGraphRunner(
            self.runner, [GraphSize(32, True), GraphSize(1, False)], self.cache, graph_class
        )
        self.batch = Batch(self.runner.input_batch, {0: 1, 1: 5})

    def eager(self) -> torch.Tensor:
        x = to_device(self.batch.arrays(), DEVICE)
        return self.runner.forward(x, self.batch.num_decodes, self.cache, self.batch)


@pytest.fixture
def recorded(folder: str) -> Iterator[Recorded]:
    with torch.inference_mode():
        yield Recorded(folder, GRAPH)


def check_a_mixed_step(recorded: Recorded) -> None:
    "Like eager rows; slots of no sequence are neither read nor written."
    expected = recorded.eager().cpu()
    used = torch.zeros(8, 16, dtype=torch.bool)
    used[2, :10] = used[3, :5] = True
    for layer in recorded.cache:
        layer[:, (~used).to(DEVICE)] = torch.nan
    before = [layer.cpu().clone() for layer in recorded.cache]
    rows, _ = recorded.graphs.run(recorded.batch.arrays(), {}, recorded.batch)
    torch.testing.assert_close(rows.cpu(), expected, atol=1e-5, rtol=1e-5)
    for layer, kept in zip(recorded.cache, before, strict=True):
        torch.testing.assert_close(layer.cpu(), kept, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_a_mixed_step(recorded: Recorded) -> None:
    check_a_mixed_step(recorded)


def test_what_is_not_run(recorded: Recorded) -> None:
    graphs = recorded.graphs
    batch = recorded.batch
    assert graphs.can_run(batch) and graphs.can_run(Batch(recorded.runner.input_batch, {0: 1}))
    with patch.object(batch, "extras", {"adapter_ids": np.array([1])}):
        assert not graphs.can_run(batch)
    for name, value in (("longest", 9), ("num_seqs", 1), ("graphs", {4: None})):
        with patch.object(graphs, name, value):
            assert not graphs.can_run(batch), name
    # all decode: a graph of decodes, or none
    alone = Batch(recorded.runner.input_batch, {0: 1})
    with patch.object(graphs.decodes, "longest", 9):
        assert not graphs.can_run(alone)
    with patch.object(graphs, "decodes", None):
        assert not graphs.can_run(alone)


def limited(config: VllmConfig, **limits: int) -> VllmConfig:
    "The same with other limits of the scheduler."
    return replace(config, scheduler_config=replace(config.scheduler_config, **limits))


def test_which_sizes(recorded: Recorded) -> None:
    "The largest first, whichever kind it is; decodes only where the backend asks for `num_decodes`."
    runner = recorded.runner
    for max_num_seqs in (4, 100, 600):
        limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 2048}
        with patch.object(runner, "config", limited(runner.config, **limits)):
            sizes = MixedGraphRunner.sizes_for(runner)
        assert sizes == sorted(sizes, reverse=True)
        mixed = [size.num_tokens for size in sizes if size.mixed]
        assert mixed[0] == 512 and sizes[0] == (max(512, max_num_seqs), max_num_seqs <= 512)
        assert {max_num_seqs, 1} <= {size.num_tokens for size in sizes if not size.mixed}
    backend = runner.context.attn_backend
    with patch.object(backend, "supports_mixed_graphs", False):
        assert not any(size.mixed for size in MixedGraphRunner.sizes_for(runner))


def test_decodes_may_be_the_largest(recorded: Recorded) -> None:
    "Then they are recorded first, so that the pool has room for all."
    sizes = [GraphSize(4, False), GraphSize(3, True), GraphSize(2, False)]
    config = limited(recorded.runner.config, max_num_seqs=4)
    with patch.object(recorded.runner, "config", config):
        graphs = MixedGraphRunner(recorded.runner, sizes, recorded.cache, GRAPH)
    assert list(graphs.graphs) == [3] and graphs.decodes.sizes == [2, 4]  # type: ignore[union-attr]


def test_experts_are_recorded_for_decodes_only(tmp_path: Any) -> None:
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    options = LIMITS | {"device": "cpu"}
    runner = ModelRunner(EngineArgs(str(tmp_path), **options).create_engine_config(), "cpu")
    runner.load_model()
    assert [size.mixed for size in MixedGraphRunner.sizes_for(runner)] == [False] * 3


def test_graph_memory_counts_both_kinds(recorded: Recorded) -> None:
    "On a device where a graph takes a MiB a row at first, and a KiB a row afterwards."
    taken = [0]

    class Counted(StandInGraph):
        def __init__(self, run: Any, pool: list[torch.Tensor]):
            first = not pool
            super().__init__(run, pool)
            self.bytes = len(self.output) << (20 if first else 10)
            taken[0] += self.bytes

        def __del__(self) -> None:
            taken[0] -= self.bytes

    runner = recorded.runner
    with patch.object(torch.cuda, "mem_get_info", lambda device: ((1 << 30) - taken[0], 1 << 30)):
        sizes = MixedGraphRunner.sizes_for(runner)
        guess = graph_memory(runner, sizes, Counted, MixedGraphRunner)
        assert taken[0] == 0
        graphs = MixedGraphRunner(runner, sizes, recorded.cache, Counted)
        assert 0 <= guess - taken[0] < 0.1 * guess
        assert len(graphs.graphs) + len(graphs.decodes.graphs) == len(sizes)  # type: ignore[union-attr]


# On a GPU


@pytest.mark.gpu
def test_a_mixed_replay_waits_for_nothing(recorded: Recorded) -> None:
    arrays = recorded.batch.arrays()
    torch.cuda.set_sync_debug_mode("error")
    try:
        hidden, x = recorded.graphs.run(arrays, {"top_k": np.arange(2)}, recorded.batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not hidden.isnan().any() and x["top_k"].tolist() == [0, 1]
    check_a_mixed_step(recorded)
