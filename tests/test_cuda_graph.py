"""Decode steps through graphs give what eager steps give: on a CPU, whatever the machine has, through
stand-ins that run the same code path; under "On a GPU", in tests marked so, through CUDA's.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

from helpers import TINY, VOCAB, random_prompts
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from teachvllm import LLM, EngineArgs, SamplingParams
from teachvllm.attention.backend import ReferenceBackend
from teachvllm.core.orders import NewSequenceData, SchedulerOutput
from teachvllm.sampling_params import BeamSearchParams
from teachvllm.worker.cuda_graph import (
    CudaGraph,
    CudaGraphRunner,
    StandInGraph,
    StaticInputs,
    graph_memory,
    graph_sizes,
    pad_inputs,
)
from teachvllm.worker.model_runner import Batch, ModelRunner, to_device
from teachvllm.worker.worker import Worker

NAN = float("nan")


class PoisonedOracle(ReferenceBackend):
    """The plain attention, in which slots of -1 are written nowhere, and a row that only pads gets
    NaN. Stand-ins alone can record it: it looks at values on the host, which no CUDA graph can.
    """

    supports_graphs = True

    def do_kv_cache_update(self, key: Any, value: Any, kv_cache: Any, meta: Any) -> None:
        real = meta.slot_mapping >= 0
        slots = meta.slot_mapping[real]
        block_size = kv_cache.shape[2]
        kv_cache[0, slots // block_size, slots % block_size] = key[real]
        kv_cache[1, slots // block_size, slots % block_size] = value[real]

    def forward(self, q: Any, kv_cache: Any, meta: Any) -> Any:
        out = super().forward(q, kv_cache, meta)
        out[torch.repeat_interleave(meta.seq_lens == 0, meta.query_start_loc.diff())] = NAN
        return out


class Poison(StandInGraph):
    "Between replays the output holds NaN: who kept it, or takes a row too many, would notice."

    def replay(self) -> torch.Tensor:
        self.output.fill_(NAN)
        return super().replay()


class StandInWorker(Worker):
    """Records stand-ins, and notes of each step how many sequences it had, how long the longest
    was, and what ran.
    """

    def compile_or_warm_up_model(self) -> None:
        super().compile_or_warm_up_model()
        scheduler = self.config.scheduler_config
        sizes = graph_sizes(min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens))
        if not self.config.model_config.enforce_eager:
            self.model_runner.graphs = CudaGraphRunner(
                self.model_runner, sizes, self.cache_engine.gpu_cache, Poison
            )
        # scheduled tokens, longest text, graph (0: eager)
        self.steps: list[tuple[dict[int, int], int, int]] = []

    def submit(self, out: SchedulerOutput) -> None:
        ran = [0]
        replay = Poison.replay

        def noted(graph: StandInGraph) -> torch.Tensor:
            ran.append(len(graph.output))
            return replay(graph)

        with patch.object(Poison, "replay", noted):
            super().submit(out)
        if out.num_scheduled_tokens:
            state = self.model_runner.input_batch
            longest = max(
                int(state.num_computed_tokens[state.slot_of[i]]) for i in out.num_scheduled_tokens
            )
            self.steps.append((dict(out.num_scheduled_tokens), longest, ran[-1]))


# Sizes and padding


@given(st.integers(1, 600))
def test_every_batch_has_a_graph_that_is_not_much_larger(max_num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes), reverse=True) and sizes[0] == max_num_seqs and sizes[-1] == 1
    for n in range(1, max_num_seqs + 1):
        smallest = min(size for size in sizes if size >= n)
        assert smallest - n < min(n, 16)
    assert len(sizes) <= 5 + max_num_seqs // 16


@given(st.integers(1, 9), st.integers(0, 7), st.integers(0, 6), st.randoms(use_true_random=False))
def test_padding(num_seqs: int, more_seqs: int, more_blocks: int, rng: Any) -> None:
    """What was there stays; a sequence that was added has no tokens, nothing to write and nothing
    to look up.
    """
    size = num_seqs + more_seqs
    width = 3 + more_blocks
    inputs = {
        name: np.array([rng.randrange(1, 99) for _ in range(num_seqs)]) for name in Batch.NAMES
    }
    inputs["block_table"] = np.array(
        [[rng.randrange(99) for _ in range(3)] for _ in range(num_seqs)], np.int32
    )
    inputs["query_start_loc"] = np.arange(num_seqs + 1)
    names = list(inputs)
    rng.shuffle(names)
    padded = pad_inputs({name: inputs[name] for name in names}, size, width)
    # however they came
    assert list(padded) == [name for name in Batch.NAMES if name != "query_start_loc"]
    for name, array in padded.items():
        assert array.dtype == inputs[name].dtype and len(array) == size
        assert np.array_equal(array[tuple(map(slice, inputs[name].shape))], inputs[name])
    assert padded["block_table"].shape == (size, width)
    assert (padded["slot_mapping"][num_seqs:] == -1).all() and (
        padded["token_indices"][num_seqs:] == -1
    ).all()
    assert not any(padded[name][num_seqs:].any() for name in ("token_ids", "positions", "seq_lens"))


# The static buffer


class Copies(TorchDispatchMode):
    "Counts copies between tensors."

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.__name__.startswith(("copy_", "_to_copy"))
        return func(*args, **(kwargs or {}))


def decodes(num_seqs: int, first: int = 1) -> dict[str, np.ndarray]:
    inputs = {name: np.arange(first, first + num_seqs) for name in Batch.NAMES}
    inputs |= {"block_table": np.arange(num_seqs * 2, dtype=np.int32).reshape(num_seqs, 2)}
    return inputs | {"query_start_loc": np.arange(num_seqs + 1)}


@pytest.mark.parametrize("num_banned", [0, 5, 10_000])
def test_one_copy_into_the_same_buffer(num_banned: int) -> None:
    """Addresses stay; a step is one copy, and where the sampling part is too large, it goes another
    way and is right.
    """
    static = StaticInputs(16, 4, "cpu")
    views = {size: static.views(size) for size in graph_sizes(16)}
    addresses = {
        size: {name: x.data_ptr() for name, x in seen.items()} for size, seen in views.items()
    }
    for step, num_seqs in enumerate((16, 3, 1, 8, 7)):
        size = min(size for size in views if size >= num_seqs)
        inputs = decodes(num_seqs, first=step)
        sampling = {
            "top_p": np.linspace(0, 1, num_seqs, dtype=np.float32),
            "banned_ids": np.arange(num_banned),
        }
        with Copies() as copies:
            x = static.load(size, inputs, sampling)
        assert copies.count == 1
        for name, array in (
            pad_inputs(inputs, size, 4) | {"query_start_loc": np.arange(size + 1)}
        ).items():
            assert np.array_equal(views[size][name].numpy(), array)
        assert all(
            np.array_equal(x[name].numpy(), array) and x[name].dtype
            for name, array in sampling.items()
        )
        in_buffer = x["top_p"].untyped_storage().data_ptr() == static.buffer.data_ptr()
        assert in_buffer == (num_banned < 10_000)
    assert addresses == {
        size: {name: x.data_ptr() for name, x in seen.items()} for size, seen in views.items()
    }


@pytest.mark.parametrize("max_num_seqs", [1, 2, 64])
def test_usual_sampling_fits_the_buffer(max_num_seqs: int) -> None:
    "Thirteen arrays for every sequence, and a stop id to ban for each."
    static = StaticInputs(max_num_seqs, 1, "cpu")
    n = max_num_seqs
    sampling: dict[str, np.ndarray] = {f"long {i}": np.zeros(n, np.int64) for i in range(9)}
    sampling |= {f"float {i}": np.zeros(n, np.float32) for i in range(4)}
    inputs = decodes(n) | {"block_table": np.zeros((n, 1), np.int32)}
    x = static.load(n, inputs, sampling)
    assert x["float 3"].untyped_storage().data_ptr() == static.buffer.data_ptr()


def test_an_output_lives_until_the_next_replay_of_any_graph() -> None:
    x = torch.arange(4.0)
    pool = StandInGraph.new_pool()
    four, two = (StandInGraph(lambda rows=x[:n]: rows + 1, pool) for n in (4, 2))
    kept = four.replay()
    assert kept.tolist() == [1, 2, 3, 4] and four.replay() is kept
    x.fill_(10)
    assert two.replay().tolist() == [11, 11] and kept.tolist() == [11, 11, 3, 4]


# One step by hand


class Runner:
    """A runner whose sequences have computed their prompts, with a graph for each size, and a cache
    poisoned elsewhere.
    """

    def __init__(
        self,
        folder: str,
        lengths: list[int],
        sizes: list[int],
        graph_class: Any = Poison,
        **options: Any,
    ):
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "block_size": 4,
            "attention_backend": PoisonedOracle,
            "device": "cpu",
        }
        options = {**defaults, **options, "skip_tokenizer_init": True, "max_model_len": 64}
        config = EngineArgs(model=folder, **options).create_engine_config()
        self.runner = ModelRunner(
            config, "cuda:0" if config.device_config.device == "cuda" else "cpu"
        )
        self.runner.load_model()
        self.block_size = config.cache_config.block_size
        each = 64 // self.block_size
        pool = each * (len(lengths) + 1)
        self.cache = self.runner.make_cache(pool).gpu_cache
        for layer in self.cache:
            layer.fill_(NAN)
        rng = np.random.default_rng(0)
        blocks = rng.permutation(pool).tolist()  # the last ones belong to no sequence
        prompts = [rng.integers(3, VOCAB, n).tolist() for n in lengths]
        greedy = SamplingParams(temperature=0)
        new = [
            NewSequenceData(
                i, prompt, len(prompt), 0, blocks[each * i : each * (i + 1)], greedy, [], 0
            )
            for i, prompt in enumerate(prompts)
        ]
        scheduled = {i: len(prompt) for i, prompt in enumerate(prompts)}
        self.runner.execute_model(
            SchedulerOutput(num_scheduled_tokens=scheduled, new_seqs=new), self.cache
        )
        self.graphs = CudaGraphRunner(self.runner, sizes, self.cache, graph_class)

    def batch(self, scheduled: dict[int, int]) -> Batch:
        return Batch(self.runner.input_batch, scheduled)

    def check(self, seqs: list[int], tolerance: float = 1e-4) -> None:
        """A decode of `seqs` through a graph: rows as of an eager step, and the cache changes in
        the new slots only.
        """
        batch = self.batch(dict.fromkeys(seqs, 1))
        before = [layer.clone() for layer in self.cache]
        hidden = self.graphs.run(batch.arrays(), {})[0].clone()
        after = [layer.clone() for layer in self.cache]
        for layer, old in zip(self.cache, before, strict=True):
            layer.copy_(old)
        x = to_device(batch.arrays(), self.runner.device)
        eager = self.runner.forward(x, batch.num_decodes, self.cache, batch)
        # NaN is not close to NaN
        torch.testing.assert_close(hidden, eager, atol=tolerance, rtol=tolerance)
        slots = torch.from_numpy(batch.slot_mapping).to(hidden.device)
        where = slice(None), slots // self.block_size, slots % self.block_size
        for new, old, wanted in zip(after, before, self.cache, strict=True):
            torch.testing.assert_close(new[where], wanted[where], atol=tolerance, rtol=tolerance)
            new[where] = old[where]
            assert torch.equal(new.isnan(), old.isnan()) and torch.equal(
                new.nan_to_num(), old.nan_to_num()
            )
        for layer, old in zip(self.cache, before, strict=True):
            layer.copy_(old)


@torch.inference_mode()
def test_padded_rows_touch_nothing(folder: str) -> None:
    "Batches of every size, in any order."
    on = Runner(folder, [5, 1, 9, 16, 3, 30, 4], [7, 4, 2, 1])
    rng = np.random.default_rng(1)
    for num_seqs in (7, 1, 3, 6, 2, 5, 4, 7):
        on.check(rng.permutation(7)[:num_seqs].tolist())


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)
@torch.inference_mode()
def test_padded_rows_touch_nothing_in_triton_kernels(folder: str) -> None:
    on = Runner(folder, [5, 9, 2], [4, 2, 1], attention_backend="triton", block_size=16)
    for seqs in ([0, 2, 1], [2]):
        on.check(seqs)


def test_can_run(folder: str) -> None:
    on = Runner(folder, [5, 1, 9, 3], [1, 3], max_seq_len_to_capture=9)
    assert on.graphs.longest == 9 and on.graphs.inputs.width == 3
    for scheduled, covered in (
        ({0: 1}, True),
        ({0: 1, 1: 1, 3: 1}, True),
        ({1: 1}, True),
        ({2: 1}, False),
        ({0: 1, 2: 1}, False),  # ten tokens
        ({0: 1, 1: 1, 2: 1, 3: 1}, False),  # more than three
    ):
        assert bool(on.graphs.can_run(on.batch(scheduled))) == covered, scheduled
    state = on.runner.input_batch
    state.num_computed_tokens[state.slot_of[0]] = 3  # two tokens of its prompt are missing
    assert not on.graphs.can_run(on.batch({1: 1, 0: 2})) and not on.graphs.can_run(on.batch({0: 2}))
    assert on.graphs.can_run(on.batch({1: 1, 0: 1}))


def test_recorded_from_the_largest_down_in_one_pool(folder: str) -> None:
    made = []

    class Noted(StandInGraph):
        def __init__(self, run: Any, pool: Any):
            super().__init__(run, pool)
            made.append((len(self.output), id(pool)))

    Runner(folder, [4], [1, 8, 2], Noted)
    assert [size for size, _ in made] == [8, 2, 1] and len({pool for _, pool in made}) == 1


# The engine


LIMITS = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 8,
    "max_num_seqs": 6,
    "max_model_len": 128,
    "swap_space": 0.01,
}
PROMPTS = random_prompts(7, longest=40, seed=5)
# they begin alike
PROMPTS += [PROMPTS[0] + [7, 8, 9], (PROMPTS[1] * 40)[:32], (PROMPTS[1] * 40)[:33]]
TOKENS = range(4, 4 + len(PROMPTS))
PARAMS: dict[str, Any] = {
    "greedy": [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in TOKENS],
    "seeds": [SamplingParams(top_p=0.9, seed=n, max_tokens=n, ignore_eos=True) for n in TOKENS],
    "n=3": [SamplingParams(n=3, top_k=20, seed=n, max_tokens=n, ignore_eos=True) for n in TOKENS],
    "banned": [
        SamplingParams(
            temperature=0, stop_token_ids=list(range(0, VOCAB, 2)), min_tokens=n, max_tokens=20
        )
        for n in TOKENS
    ],
    "beams": BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True),
}


def answers(llm: LLM, params: Any, prompts: Any = PROMPTS) -> list[list[list[int]]]:
    if isinstance(params, BeamSearchParams):
        outputs = llm.beam_search(prompts, params)
    else:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    manager = llm.llm_engine.engine_core.engine_core.scheduler.block_manager
    manager.check_integrity()
    assert manager.get_num_free_gpu_blocks() == manager.num_gpu_blocks
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def steps_of(llm: LLM) -> list[tuple[dict[int, int], int, int]]:
    return llm.collective_rpc(lambda worker: worker.steps)[0]


@contextmanager
def stand_in(folder: str, **options: Any) -> Iterator[LLM]:
    mine = {
        "worker_cls": StandInWorker,
        "attention_backend": PoisonedOracle,
        "num_gpu_blocks_override": 100,
    }
    with LLM(folder, **{**LIMITS, **mine, **options}) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(folder: str) -> dict[str, list[list[list[int]]]]:
    "What the engine says on a CPU, with its own backend and no graphs."
    with LLM(folder, num_gpu_blocks_override=100, enforce_eager=True, **LIMITS) as llm:
        return {name: answers(llm, params) for name, params in PARAMS.items()}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_equals_eager(folder: str, expected: dict, asynchronous: bool) -> None:
    """Greedy, seeded, several answers, banned tokens (too many for the buffer), beams: decodes
    through graphs, the rest eagerly.
    """
    with stand_in(folder, async_scheduling=asynchronous) as llm:
        for name, params in PARAMS.items():
            assert answers(llm, params) == expected[name], name
        steps = steps_of(llm)
        for scheduled, _, graph in steps:
            assert graph == (0 if max(scheduled.values()) > 1 else fitting(len(scheduled)))
        assert {graph for *_, graph in steps} == {0, *graph_sizes(LIMITS["max_num_seqs"])}
        # mixed
        assert any(not graph and min(scheduled.values()) == 1 for scheduled, _, graph in steps)
        assert llm.get_metrics()["prefix_cache_hits"] > 0 == llm.get_metrics()["num_preemptions"]


def fitting(num_seqs: int) -> int:
    return min(size for size in graph_sizes(LIMITS["max_num_seqs"]) if size >= num_seqs)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_equals_eager_when_preempted(
    folder: str, expected: dict, mode: str, asynchronous: bool
) -> None:
    metrics = ["num_preemptions"] + ["num_swapped_in_blocks"] * (mode == "swap")
    for name, num_blocks in (("seeds", 12), ("n=3", 14), ("beams", 11)):
        options = {"num_gpu_blocks_override": num_blocks, "preemption_mode": mode}
        with stand_in(folder, async_scheduling=asynchronous, **options) as llm:
            assert answers(llm, PARAMS[name]) == expected[name]
            assert all(llm.get_metrics()[metric] > 0 for metric in metrics), (
                name,
                llm.get_metrics(),
            )
            assert any(graph for *_, graph in steps_of(llm))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_long_texts_run_eagerly(folder: str, expected: dict, asynchronous: bool) -> None:
    with stand_in(folder, max_seq_len_to_capture=44, async_scheduling=asynchronous) as llm:
        assert answers(llm, PARAMS["greedy"]) == expected["greedy"]
        steps = [
            (longest, graph)
            for scheduled, longest, graph in steps_of(llm)
            if max(scheduled.values()) == 1
        ]
        assert all((longest <= 44) == bool(graph) for longest, graph in steps)
        assert len({bool(graph) for _, graph in steps}) == 2


def test_enforce_eager(folder: str, expected: dict) -> None:
    with stand_in(folder, enforce_eager=True) as llm:
        assert answers(llm, PARAMS["greedy"]) == expected["greedy"]
        assert not any(graph for *_, graph in steps_of(llm))


def test_a_budget_below_the_number_of_sequences(folder: str, expected: dict) -> None:
    with stand_in(folder, max_num_batched_tokens=3) as llm:
        assert answers(llm, PARAMS["greedy"]) == expected["greedy"]
        assert {1, 2, 3} == {graph for *_, graph in steps_of(llm)} - {0}


def test_random_state_does_not_depend_on_graphs(folder: str) -> None:
    states = []
    for eager in (True, False):
        torch.rand(3 + eager)
        with stand_in(folder, enforce_eager=eager, seed=11):
            states.append(torch.random.get_rng_state())
    assert torch.equal(*states)


def test_a_failed_step_leaves_the_graphs_usable(folder: str, expected: dict) -> None:
    "An error inside a replay sets the requests back; the next run is right."
    with stand_in(folder) as llm:
        with patch.object(Poison, "replay", side_effect=RuntimeError("the device is lost")):
            with pytest.raises(RuntimeError, match="the device is lost"):
                llm.generate(PROMPTS, PARAMS["greedy"], use_tqdm=False)
        assert answers(llm, PARAMS["greedy"]) == expected["greedy"]


# What can be known of the real thing without a GPU


def test_a_graph_is_warmed_up_recorded_and_sent_to_the_device() -> None:
    "In this order; the tensor that was made while recording is what every replay returns."
    done: list[Any] = []

    @contextmanager
    def recording(graph: Any, pool: Any) -> Iterator[None]:
        done.append(("begin", pool))
        yield
        done.append("end")

    def run() -> torch.Tensor:
        done.append("run")
        return torch.tensor(len(done))

    recorded = SimpleNamespace(replay=lambda: done.append("replay"))
    with patch.multiple(
        torch.cuda,
        CUDAGraph=lambda: recorded,
        graph=recording,
        graph_pool_handle=lambda: "the pool",
    ):
        graph = CudaGraph(run, "the pool")
        assert done == ["run", ("begin", "the pool"), "run", "end", "replay"]
        assert graph.replay() is graph.replay() and int(graph.replay()) == 3
    assert done[5:] == ["replay"] * 3


@pytest.mark.parametrize("name", TINY)
def test_a_decode_step_reads_no_values_on_the_host(name: str) -> None:
    """On the meta device tensors have no contents: whatever reads one on the host, or has a shape
    that depends on it, fails.

    Model, runner and `TritonBackend` do not. Kernels are counted instead of launched: their grid
    comes from the shapes.
    """
    from triton.runtime.jit import KernelInterface

    from teachvllm.distributed.parallel_state import ParallelState
    from teachvllm.gpu_kernels.attention import TritonBackend
    from teachvllm.model_executor.layers import ModelContext, attention_layers
    from teachvllm.model_executor.loader import default_tensors
    from teachvllm.model_executor.models.registry import get_model_class

    config = TINY[name]()
    grids = []
    config.architectures = ["OPTForCausalLM" if name.startswith("opt") else "LlamaForCausalLM"]
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads

    def step(backend_class: type, num_seqs: int) -> torch.Tensor:
        with default_tensors(torch.float16, "meta"), torch.inference_mode():
            model = get_model_class(config)(config, ModelContext(backend_class, 16, torch.float16))
            caches = [torch.zeros(2, 8, 16, kv_heads, head_size)] * config.num_hidden_layers
            last = torch.zeros(9, dtype=torch.int64)
            x = {
                name: torch.from_numpy(array).to("meta")
                for name, array in decodes(num_seqs).items()
            }
            layers = attention_layers(model)
            parts = {
                "model": model,
                "planners": [layer.backend for layer in layers.values()],
                "last_sampled_token_ids": last,
            }
            runner = SimpleNamespace(**parts, block_size=16, parallel=ParallelState())
            runner.model_inputs = partial(ModelRunner.model_inputs, runner)
            return ModelRunner.forward(runner, x, num_seqs, caches)  # type: ignore[arg-type]

    def counted(kernel: Any, grid: Any) -> Callable:
        return lambda *args, **options: grids.append(grid)

    with patch.object(KernelInterface, "__getitem__", counted):
        assert step(TritonBackend, 5).shape[0] == 5
        assert len(grids) >= 2 * config.num_hidden_layers and all(
            isinstance(n, int) for grid in grids for n in grid
        )
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        step(ReferenceBackend, 5)


class Pretended:
    """Graphs on a pretended device, which shares scratch in a pool as CUDA does; `common` is taken
    once and stays.
    """

    def __init__(self, common: int, scratch: int, output: int, launches: int):
        self.taken = 0
        self.stays = common
        device = self

        class Graph(StandInGraph):
            def __init__(self, run: Any, pool: Any):
                first = not pool
                super().__init__(run, pool)
                rows = len(self.output)
                self.bytes = first * rows * scratch + rows * output + launches
                device.taken += self.bytes + device.stays
                device.stays = 0

            def __del__(self) -> None:
                device.taken -= self.bytes

        self.graph_class = Graph

    def mem_get_info(self, device: str) -> tuple[int, int]:
        return 10**9 - self.taken, 10**9


@pytest.mark.parametrize("max_num_seqs", [1, 2, 8, 40])
def test_graph_memory(folder: str, max_num_seqs: int) -> None:
    """Not less than what is taken in the end, and not much more; nothing is kept of the trial but
    what stays anyway.
    """
    on = Runner(folder, [4], [1])
    sizes = graph_sizes(max_num_seqs)
    device = Pretended(common=5000, scratch=1000, output=10, launches=300)
    with patch.object(torch.cuda, "mem_get_info", device.mem_get_info):
        guess = graph_memory(on.runner, sizes, device.graph_class)
    assert device.taken == 5000
    graphs = CudaGraphRunner(on.runner, sizes, on.cache, device.graph_class)
    assert device.taken <= guess <= device.taken + 10 * max_num_seqs * len(sizes)
    assert len(graphs.graphs) == len(sizes) and graph_memory(on.runner, []) == 0


def test_a_neighbour_that_leaves_makes_no_negative_memory(folder: str) -> None:
    on = Runner(folder, [4], [1])
    free = iter([100, 200, 300])
    with patch.object(torch.cuda, "mem_get_info", lambda device: (next(free), 1000)):
        assert graph_memory(on.runner, [2, 1], StandInGraph) == 0


# On a GPU


GPU = {"attention_backend": "triton", "dtype": "float32", "block_size": 16, "device": "cuda"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "half"])
@torch.inference_mode()
def test_replay_equals_eager(folder: str, dtype: str) -> None:
    "Real rows as eagerly, poison and padding touch nothing."
    on = Runner(
        folder, [5, 1, 9, 16, 3, 30, 4, 47], [8, 4, 2, 1], CudaGraph, **{**GPU, "dtype": dtype}
    )
    for num_seqs in (8, 1, 3, 6, 2, 5, 7, 4):
        on.check(list(range(num_seqs)), tolerance=1e-3 if dtype == "float32" else 5e-2)


@pytest.mark.gpu
@torch.inference_mode()
def test_a_replay_waits_for_nothing(folder: str) -> None:
    on = Runner(folder, [5, 6, 7], [4], CudaGraph, **GPU)
    inputs = on.batch({0: 1, 1: 1, 2: 1}).arrays()
    torch.cuda.set_sync_debug_mode("error")
    try:
        hidden, x = on.graphs.run(inputs, {"top_k": np.arange(3)})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not hidden.isnan().any() and x["top_k"].tolist() == [0, 1, 2]


class CountCopies(TorchDispatchMode):
    "Counts the copies to the host, while it is entered."

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        moves = func.overloadpacket in (torch.ops.aten.to, torch.ops.aten._to_copy)
        self.count += moves and args[0].is_cuda and str(options.get("device")) == "cpu"
        return func(*args, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    "asked",
    [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}, {"num_logprobs": 3}],
    ids=lambda asked: "-".join(asked) or "greedy",
)
def test_a_decode_step_waits_for_nothing(
    folder: str, asked: dict[str, float], graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of `execute_model`: orders, inputs, model, sampler, and the tokens' way back, which alone
    may be waited for, and which is one copy.
    """
    monkeypatch.setattr("teachvllm.model_executor.sampler.MAX_CANDIDATES", 8)
    on = Runner(folder, [5, 6, 7], [4], CudaGraph, **GPU)
    on.runner.graphs = on.graphs if graphs else None
    for name, value in asked.items():
        getattr(on.runner.input_batch, name)[:] = value
    # each has its blocks for 64 tokens already
    out = SchedulerOutput(num_scheduled_tokens={0: 1, 1: 1, 2: 1})
    # warm-up: compiles, takes memory
    on.runner.execute_model(out, on.cache).to_model_runner_output()
    torch.cuda.synchronize()
    with patch.object(on.graphs, "run", wraps=on.graphs.run) as replayed:
        torch.cuda.set_sync_debug_mode("error")
        try:
            with CountCopies() as copies:
                steps = [on.runner.execute_model(out, on.cache) for _ in range(2)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert replayed.call_count == (len(steps) if graphs else 0) and copies.count == len(steps)
    for step in steps:
        sampled = step.to_model_runner_output()
        assert sampled.seq_ids == [0, 1, 2] and all(
            0 <= token_id < VOCAB for [token_id] in sampled.sampled_token_ids
        )
        assert len(sampled.logprobs) == (3 if "num_logprobs" in asked else 0)


@pytest.mark.gpu
def test_replays_follow_inputs_and_overwrite_outputs(folder: str) -> None:
    on = Runner(folder, [5, 6, 7, 8], [4, 2], CudaGraph, **GPU)
    batches = [Batch(on.runner.input_batch, {a: 1, b: 1}) for a, b in ((0, 1), (2, 3))]
    with torch.inference_mode():
        first = on.graphs.run(batches[0].arrays(), {})[0]
        kept = first.clone()
        second = on.graphs.run(batches[1].arrays(), {})[0]
        assert (
            second.data_ptr() == first.data_ptr()
            and torch.equal(first, second)
            and not torch.equal(first, kept)
        )
        assert torch.equal(on.graphs.run(batches[0].arrays(), {})[0], kept)


@pytest.mark.gpu(real=True)  # `on_a_card.py` is its like where the card is pretended
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", PARAMS)
def test_engine_on_a_gpu(folder: str, name: str, asynchronous: bool) -> None:
    "With graphs and without: the same tokens, where no two are so likely that rounding decides."
    options = {
        **LIMITS,
        "device": "cuda",
        "num_gpu_blocks_override": 100,
        "block_size": 16,
        "async_scheduling": asynchronous,
    }
    got = []
    for eager in (True, False):
        with LLM(folder, enforce_eager=eager, **options) as llm:
            got.append(answers(llm, PARAMS[name]))
            assert (
                llm.collective_rpc(lambda worker: worker.model_runner.graphs)[0] is None
            ) == eager
    pairs = [
        (a, b) for one, other in zip(*got, strict=True) for a, b in zip(one, other, strict=True)
    ]
    assert sum(a == b for a, b in pairs) >= 0.9 * len(pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_replay_leaves_the_graphs_usable(folder: str, asynchronous: bool) -> None:
    """An error after a real replay, whose keys, values and hidden states are written: the requests
    end with it, and the same graphs give the right tokens afterwards.
    """
    options = LIMITS | {"device": "cuda", "num_gpu_blocks_override": 16, "block_size": 16}
    options |= {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 32}
    few = PARAMS["greedy"][:2], [prompt[:9] for prompt in PROMPTS[:2]]
    with LLM(folder, async_scheduling=asynchronous, **options) as llm:
        expected = answers(llm, *few)
        replay, replayed = CudaGraph.replay, []

        def failing(graph: CudaGraph) -> torch.Tensor:
            hidden = replay(graph)
            replayed.append(graph)
            if len(replayed) == 3:
                raise RuntimeError("the device is lost")
            return hidden

        with patch.object(CudaGraph, "replay", failing):
            with pytest.raises(RuntimeError, match="the device is lost"):
                answers(llm, *few)
        assert len(replayed) >= 3 and answers(llm, *few) == expected


@pytest.mark.gpu
def test_memory_of_graphs_is_what_was_expected(folder: str) -> None:
    on = Runner(folder, [4], [1], CudaGraph, **GPU)
    sizes = graph_sizes(64)
    guess = graph_memory(on.runner, sizes)
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    graphs = CudaGraphRunner(on.runner, sizes, on.cache)
    torch.cuda.empty_cache()
    taken = before - torch.cuda.mem_get_info()[0]
    assert len(graphs.graphs) == len(sizes) and taken <= guess + (64 << 20)
