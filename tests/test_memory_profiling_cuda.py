"""A GPU's memory, shared by engines and neighbours: every byte is charged to whom it belongs.
torch.cuda is mocked.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachvllm.config import CacheConfig
from teachvllm.worker.memory_profiling import (
    GiB,
    MemoryProfile,
    MemoryProfiler,
    MemorySnapshot,
    process_gpu_memory,
)

MiB = 1 << 20
PIECE = 2 << 20
BLOCK = 589_824
NEIGHBOUR = 999
GPU = "cuda:1"
MODEL = torch.nn.Module()  # on a GPU the allocator knows what the weights took


def in_pieces(num_bytes: int) -> int:
    return -(-num_bytes // PIECE) * PIECE


class FakeCard:
    """Keeps books of a GPU: tensors by name, memory reserved for tensors, and other memory, of each
    process.
    """

    def __init__(self, total: int, nvml: bool = True):
        self.total = total
        self.nvml = nvml
        self.now = NEIGHBOUR
        self.tensors: dict[int, dict[str, int]] = {}
        self.reserved: dict[int, int] = {}
        self.non_torch: dict[int, int] = {}
        self.peak: dict[int, int] = {}

    def used(self, pid: int) -> int:
        return self.reserved[pid] + self.non_torch[pid]

    def free(self) -> int:
        return self.total - sum(map(self.used, self.non_torch))

    def allocated(self) -> int:
        return sum(self.tensors[self.now].values())

    def take(self, name: str, num_bytes: int) -> None:
        more = in_pieces(max(0, self.allocated() + num_bytes - self.reserved[self.now]))
        if more > self.free():
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {num_bytes / GiB:.2f} GiB. GPU 0 has"
            )
        self.reserved[self.now] += more
        self.tensors[self.now][name] = num_bytes
        self.peak[self.now] = max(self.peak[self.now], self.allocated())

    def listed(self) -> list[Any]:
        pids = {pid: os.getpid() if pid == self.now else pid for pid in self.non_torch}
        return [SimpleNamespace(pid=pids[pid], usedGpuMemory=self.used(pid)) for pid in pids]

    @contextmanager
    def as_process(self, pid: int, context: int = 0) -> Iterator[None]:
        self.now = pid
        self.tensors.setdefault(pid, {})
        for counts, first in ((self.reserved, 0), (self.non_torch, context), (self.peak, 0)):
            counts.setdefault(pid, first)
        of_gpu = {  # asked for this worker's GPU, whichever is the current one
            "get_device_properties": lambda: SimpleNamespace(uuid="fake"),
            "mem_get_info": lambda: (self.free(), self.total),
            "memory_allocated": self.allocated,
            "memory_reserved": lambda: self.reserved[pid],
            "max_memory_allocated": lambda: self.peak[pid],
            "reset_peak_memory_stats": lambda: self.peak.update({pid: self.allocated()}),
        }
        functions: dict[str, Any] = {
            name: lambda gpu, ask=ask: {GPU: ask}[gpu]() for name, ask in of_gpu.items()
        }
        functions["is_available"] = lambda: True
        functions["empty_cache"] = lambda: self.reserved.update({pid: in_pieces(self.allocated())})
        nvml = SimpleNamespace(
            nvmlInit=lambda: None,
            nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-fake": 0}[uuid],
            nvmlDeviceGetComputeRunningProcesses=lambda handle: self.listed(),
        )
        modules = {"pynvml": nvml if self.nvml else None}  # None: importing it fails
        with patch.multiple("torch.cuda", **functions), patch.dict(sys.modules, modules):
            yield


def start_engine(
    card: FakeCard,
    pid: int,
    utilization: float,
    weights: int = GiB,
    activations: int = 300 * MiB + 5,
    context: int = 300 * MiB,
    libraries: int = 100 * MiB,
    graphs: int = 0,
    meanwhile: int = 0,
) -> MemoryProfile:
    """The worker's steps; while the largest step runs, a neighbour takes `meanwhile` bytes (or
    gives them back).
    """

    def largest_step() -> None:
        card.take("activations", activations)
        del card.tensors[pid]["activations"]
        card.non_torch[pid] += libraries
        if meanwhile:
            card.non_torch[NEIGHBOUR] += meanwhile

    with card.as_process(pid, context), patch("gc.collect"):  # slow, and nothing to collect
        profiler = MemoryProfiler(GPU, CacheConfig(gpu_memory_utilization=utilization))
        with profiler.explain_out_of_memory("loading the weights"):
            card.take("weights", weights)
        profiler.weights_loaded(MODEL)
        with profiler.explain_out_of_memory("running the largest step"):
            profiler.run_at_limits(largest_step)
        profiler.graphs = graphs
        num_blocks = profiler.num_gpu_blocks(BLOCK, 1024)
        with profiler.explain_out_of_memory("allocating the KV cache"):
            card.take("KV cache", num_blocks * BLOCK)
        card.non_torch[pid] += graphs
    return profiler.profile


def with_neighbour(total: int, taken: int, nvml: bool = True) -> FakeCard:
    card = FakeCard(total, nvml)
    with card.as_process(NEIGHBOUR, taken):
        return card


def test_a_snapshot_tells_tensors_cache_and_the_rest_apart():
    card = with_neighbour(8 * GiB, GiB)
    with card.as_process(1, 200 * MiB):
        card.take("a", 3 * MiB + 1)
        card.take("b", 10 * MiB)
        del card.tensors[1]["b"]
        now = MemorySnapshot.take(GPU)
        others = GiB + 200 * MiB
        assert now == MemorySnapshot(
            8 * GiB,
            8 * GiB - others - (3 * MiB + 1),
            3 * MiB + 1,
            13 * MiB + 1,
            others,
            non_torch_memory=200 * MiB,
        )
        # with what its cache keeps
        assert process_gpu_memory(GPU) == card.used(1) > 200 * MiB + now.torch_memory
        MemorySnapshot.reset_peak(GPU)
        assert MemorySnapshot.take(GPU).torch_peak == 3 * MiB + 1


@pytest.mark.parametrize(
    "fault",
    [
        "not installed",
        "not listed",
        "no number",
        "less than its tensors",
        "more than is used",
        "raises",
    ],
)
def test_without_a_usable_answer_of_nvml_nothing_is_claimed(fault: str):
    card = with_neighbour(8 * GiB, GiB, nvml=fault != "not installed")
    me = SimpleNamespace(pid=os.getpid(), usedGpuMemory=None)
    me.usedGpuMemory = {"less than its tensors": MiB, "more than is used": 3 * GiB}.get(fault)
    with card.as_process(1, 200 * MiB):
        card.take("a", 100 * MiB)
        card.listed = lambda: [] if fault == "not listed" else [me]  # type: ignore[method-assign]
        if fault == "raises":
            sys.modules["pynvml"].nvmlInit = None  # type: ignore[attr-defined]
        assert MemorySnapshot.take(GPU) == MemorySnapshot(
            8 * GiB,
            7 * GiB - 300 * MiB,
            100 * MiB,
            100 * MiB,
            GiB + 200 * MiB,
            non_torch_memory=None,
        )


@pytest.mark.parametrize("nvml", [True, False])
def test_two_engines_and_a_neighbour_to_the_byte(nvml: bool):
    total = 24 * GiB
    weights = GiB
    activations = 300 * MiB + 5
    context = 300 * MiB
    libraries = 100 * MiB
    graphs = 64 * MiB
    card = with_neighbour(total, 2 * GiB, nvml)
    of_first = 0
    for pid in (1, 2):
        profile = start_engine(card, pid, 0.4, graphs=graphs)
        non_torch = libraries + (context if nvml else 0)
        others = 2 * GiB + of_first + (0 if nvml else context)
        assert profile == MemoryProfile(
            total, int(0.4 * total), weights, activations, non_torch, graphs, others
        )
        assert (
            profile.available_kv_cache
            == int(0.4 * total) - weights - activations - non_torch - graphs
        )
        used = card.used(pid) + activations - (0 if nvml else context)
        assert -BLOCK < used - profile.budget < 2 * PIECE
        of_first = card.used(1)


def test_what_a_neighbour_takes_meanwhile_is_not_ours_if_that_can_be_known():
    calm = start_engine(with_neighbour(24 * GiB, GiB), 1, 0.4)
    assert start_engine(with_neighbour(24 * GiB, GiB), 1, 0.4, meanwhile=GiB) == replace(
        calm, other_memory=2 * GiB
    )
    left = start_engine(with_neighbour(24 * GiB, GiB), 1, 0.4, meanwhile=-GiB // 2)
    assert left == calm  # what a neighbour gives back is not ours either
    guessed = start_engine(with_neighbour(24 * GiB, GiB, nvml=False), 1, 0.4, meanwhile=GiB)
    assert (
        guessed.non_torch == GiB + 100 * MiB
        and guessed.available_kv_cache < calm.available_kv_cache
    )


sizes = st.integers(0, 3 * GiB)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    total=st.integers(8 * GiB, 40 * GiB),
    nvml=st.booleans(),
    neighbour=st.integers(0, 6 * GiB),
    meanwhile=sizes,
    engines=st.lists(
        st.fixed_dictionaries(
            {
                "utilization": st.floats(0.05, 1.0),
                "weights": st.integers(1, 4 * GiB),
                "activations": sizes,
                "context": st.integers(1, GiB),
                "libraries": st.integers(0, GiB),
                "graphs": st.integers(0, GiB),
            }
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_an_engine_fits_into_its_budget_or_is_refused(total, nvml, neighbour, meanwhile, engines):
    "With numbers and knobs, never by running out of memory later."
    card = with_neighbour(total, neighbour, nvml)
    for pid, engine in enumerate(engines, start=1):
        before = total - card.free()
        room = card.free() - engine["context"] - engine["libraries"]
        grows = min(
            meanwhile, max(0, room - in_pieces(engine["weights"] + engine["activations"]) - 1)
        )
        if room < 0:
            break
        try:
            profile = start_engine(card, pid, **engine, meanwhile=grows)
        except ValueError as error:
            assert "GiB" in str(error) and (
                "gpu_memory_utilization" in str(error) or "processes" in str(error)
            )
            # that would have been promised and not kept
            assert "allocating the KV cache" not in str(error)
            break
        assert card.free() >= 0
        kv_cache = card.tensors[pid]["KV cache"]
        waterfall = profile.waterfall(card.tensors[pid]["KV cache"])
        assert sum(waterfall.values()) == total and min(waterfall.values()) >= 0
        assert waterfall.get("graphs", 0) == engine["graphs"]
        assert profile.available_kv_cache - BLOCK < kv_cache <= profile.available_kv_cache
        assert profile.weights == engine["weights"] and profile.activations == engine["activations"]
        known = engine["context"] + engine["libraries"] if nvml else engine["libraries"] + grows
        assert (
            profile.non_torch == known
            and profile.other_memory + known
            == before + grows + engine["context"] + engine["libraries"]
        )
        with card.as_process(pid):
            card.take("activations", engine["activations"])  # the step that was measured still fits
            del card.tensors[pid]["activations"]
            torch.cuda.empty_cache()


def test_graphs_are_shown_only_where_there_are_any():
    profile = MemoryProfile(10 * GiB, 2 * GiB, GiB, graphs=GiB // 2)
    assert profile.available_kv_cache == GiB // 2 and profile.waterfall(0)["graphs"] == GiB // 2
    assert "graphs" not in replace(profile, graphs=0).waterfall(0)
    with pytest.raises(ValueError, match=r"graphs 1\.00"):
        start_engine(with_neighbour(10 * GiB, MiB), 1, 0.2, weights=GiB, graphs=GiB)
    with pytest.raises(ValueError, match=r"^(?!.*graphs)"):
        start_engine(with_neighbour(10 * GiB, MiB), 1, 0.2, weights=2 * GiB)


@pytest.mark.parametrize("encoding", [50 * MiB, 900 * MiB])
def test_an_encoder_is_counted_once(encoding: int):
    """What it keeps comes on top of the largest step. What it needs meanwhile does not: it counts
    only where it is more than the step needs.
    """
    step, kept, total = 300 * MiB, 20 * MiB, 24 * GiB
    card = FakeCard(total)

    def largest_step() -> None:
        card.take("activations", step)
        del card.tensors[1]["activations"]

    def encode() -> int:
        card.take("encoder's activations", encoding)
        card.take("embeddings", kept)
        del card.tensors[1]["encoder's activations"]
        return kept

    with card.as_process(1, 100 * MiB), patch("gc.collect"):
        profiler = MemoryProfiler(GPU, CacheConfig())
        card.take("weights", GiB)
        profiler.weights_loaded(MODEL)
        profiler.run_at_limits(largest_step)
        assert profiler.profile.encoder == 0 and "encoder" not in profiler.profile.waterfall(0)
        without = profiler.profile
        profiler.run_at_limits(largest_step, encode)
    profile = profiler.profile
    highest = max(encoding + kept, step + kept)
    assert profile.activations == without.activations == step
    assert profile.encoder == highest - step >= kept
    assert profile.available_kv_cache == without.available_kv_cache - profile.encoder
    waterfall = profile.waterfall(profile.available_kv_cache)
    assert waterfall["encoder"] == profile.encoder and sum(waterfall.values()) == total


def test_a_refusal_names_what_others_hold():
    with pytest.raises(
        ValueError, match=r"asks for 7\.20, but others hold 6\.50.*end other processes"
    ):
        start_engine(with_neighbour(8 * GiB, 6 * GiB + GiB // 2), 1, 0.9, weights=700 * MiB)
    with pytest.raises(
        ValueError, match="no memory for the KV cache.*raise gpu_memory_utilization"
    ):
        start_engine(with_neighbour(8 * GiB, GiB), 1, 0.2)


def test_out_of_memory_gives_numbers_and_knobs():
    card = with_neighbour(8 * GiB, 5 * GiB)
    with card.as_process(1, 512 * MiB), pytest.raises(ValueError) as caught:
        card.take("weights", 2 * GiB)
        with MemoryProfiler(GPU, CacheConfig()).explain_out_of_memory("doing too much"):
            card.take("more", GiB)
    message = str(caught.value)
    for part in (
        "doing too much (tried to allocate 1.00 GiB)",
        "holds 2.50 GiB",
        "others 5.00",
        "free are 0.50 of 8.00",
        "max_num_seqs",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "model",
        "dtype",
        "processes",
    ):
        assert part in message, part
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize(
    ("error", "explained"),
    [
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate "
                "1125899906842624 bytes."
            ),
            True,
        ),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyError("out of memory"), False),
    ],
)
def test_only_running_out_of_memory_is_explained(error: Exception, explained: bool):
    profiler = MemoryProfiler("cpu", CacheConfig())
    with (
        pytest.raises(ValueError if explained else type(error)) as caught,
        profiler.explain_out_of_memory("trying"),
    ):
        raise error
    assert (caught.value is error) != explained
    if "1125899906842624" in str(error):
        assert "tried to allocate 1125899906842624 bytes" in str(caught.value)


def test_a_cpu_knows_nothing_of_it():
    profiler = MemoryProfiler("cpu", CacheConfig(gpu_memory_utilization=1.0))
    now = profiler.start
    assert now.non_torch_memory is None and now.other_memory == 0 and now.total == now.free
    profile = profiler.profile
    assert (
        profile.budget == now.total
        and profile.non_torch == profile.graphs == profile.other_memory == 0
    )
