"""Swaps beside a GPU's steps: which blocks go where, and what waits for what."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import greedy, make_tiny, random_prompts

from teachvllm import LLM, EngineArgs, SamplingParams
from teachvllm.attention.backend import AttentionBackend, KVCacheSpec, ReferenceBackend
from teachvllm.attention.cpu import TorchSDPABackend
from teachvllm.model_executor.layers import Attention
from teachvllm.worker.cache_engine import CacheEngine, consecutive_runs, swap_blocks
from teachvllm.worker.cuda_graph import CudaGraphRunner, StandInGraph
from teachvllm.worker.model_runner import ModelRunner, dummy_batch
from teachvllm.worker.worker import Worker

SPEC = KVCacheSpec(2, 8, "float32")
GPU_IDS = [2, 17, 8, 11, 5, 20]
# two runs and a block of its own
CPU_IDS = [3, 4, 7, 9, 10, 11]


@pytest.mark.parametrize("backend_cls", [ReferenceBackend, TorchSDPABackend])
def test_blocks_go_by_runs(backend_cls: type[AttentionBackend]) -> None:
    "Out and in again elsewhere, into a pool whose blocks are one piece each; the rest is untouched."
    engine = CacheEngine([SPEC], 4, backend_cls, "cpu", 24, 12)
    gpu = engine.gpu_cache[0].normal_(generator=torch.Generator().manual_seed(0))
    cpu = engine._allocate_pinned(0)[0]
    assert cpu.shape == (2, 0, *gpu.shape[2:])  # no blocks: nothing is pinned
    cpu = torch.zeros(12, *cpu.transpose(0, 1).shape[1:]).transpose(0, 1)
    runs = consecutive_runs(CPU_IDS)
    assert [here for here, _ in runs] == [slice(0, 2), slice(2, 3), slice(3, 6)]
    before = gpu.clone()
    swap_blocks(gpu, cpu, torch.tensor(GPU_IDS), runs, swap_in=False)
    assert torch.equal(gpu, before) and torch.equal(cpu[:, CPU_IDS], before[:, GPU_IDS])
    assert not cpu[:, [i for i in range(12) if i not in CPU_IDS]].any()
    back = [3, 23, 9, 2, 14, 6]
    swap_blocks(gpu, cpu, torch.tensor(back), runs, swap_in=True)
    assert torch.equal(gpu[:, back], before[:, GPU_IDS])
    others = [i for i in range(24) if i not in back]
    assert torch.equal(gpu[:, others], before[:, others])


@pytest.mark.parametrize("way", ["eager", "graph", "copy"])
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_a_layer_waits_for_its_own_swap(name: str, way: str, tmp_path: Path) -> None:
    "Just before its attention; a graph, or copies between blocks, before all of it; and only once."
    make_tiny(name, tmp_path)
    options = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "device": "cpu"}
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, **options)
    config = args.create_engine_config()
    runner = ModelRunner(config, "cpu")
    runner.load_model()
    engine = runner.make_cache(4)
    layers = list(runner.attention_layers.values())
    notes: list[tuple[str, int]] = []

    def noted(layer: Attention, *args: Any) -> torch.Tensor:
        notes.append(("attend", layers.index(layer)))
        return attend(layer, *args)

    attend = Attention.forward
    graphs = CudaGraphRunner(runner, [2, 1], engine.gpu_cache, StandInGraph)
    runner.graphs = graphs if way == "graph" else None
    engine.gpu_cache.events = {
        i: SimpleNamespace(wait=lambda i=i: notes.append(("wait", i))) for i in range(len(layers))
    }
    with patch.object(Attention, "forward", noted):
        for _ in range(2):
            engine.copy([(1, 2)] if way == "copy" else [])
            runner.execute_model(dummy_batch(config, 2, 2, max_len=8), engine.gpu_cache)
            runner.reset()
    waits = [("wait", i) for i in range(len(layers))]
    calls = [("attend", i) for i in range(len(layers))]
    first = waits + calls
    if way == "eager":
        first = [note for pair in zip(waits, calls, strict=True) for note in pair]
    assert notes == first + calls
    assert not engine.gpu_cache.events


@contextmanager
def waiting_refused() -> Iterator[None]:
    "Inside, it is an error if the host waits for the GPU."
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class NeverWaits(Worker):
    def submit(self, out: Any) -> None:
        with waiting_refused():
            super().submit(out)


@pytest.mark.gpu
@pytest.mark.parametrize("staged", [2, 256])
@pytest.mark.parametrize("backend_cls", [ReferenceBackend, TorchSDPABackend])
def test_swaps_beside_late_steps(
    backend_cls: type[AttentionBackend], staged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a late step wrote goes out; a step that comes later overwrites it no earlier than it is
    read, and finds what comes in. In one piece or in several.
    """
    monkeypatch.setattr(CacheEngine, "STAGED", staged)
    engine = CacheEngine([SPEC] * 3, 4, backend_cls, "cuda:0", 24, 12)
    pairs = list(zip(GPU_IDS, CPU_IDS[::-1], strict=True))
    back = [3, 23, 9, 2, 14, 6]
    for layer in engine.gpu_cache:
        layer.normal_()
    before = [layer.clone() for layer in engine.gpu_cache]
    engine.swap_out(pairs)  # takes memory, loads kernels
    torch.cuda.synchronize()
    engine.swap_in([(cpu, gpu) for gpu, cpu in pairs])
    torch.cuda.synchronize()
    with waiting_refused():
        torch.cuda._sleep(10**8)
        for layer in engine.gpu_cache:
            layer.add_(1)
        with torch.cuda.stream(engine.cache_stream):
            torch.cuda._sleep(2 * 10**8)
        engine.swap_out(pairs)
        for layer in engine.gpu_cache:
            layer.fill_(torch.nan)
    torch.cuda.synchronize()
    with waiting_refused():
        with torch.cuda.stream(engine.cache_stream):
            torch.cuda._sleep(10**8)
        engine.swap_in([(cpu, gpu) for (_, cpu), gpu in zip(pairs, back, strict=True)])
        engine.copy([(3, 0)])
        after = [layer.clone() for layer in engine.gpu_cache]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[:, back], old[:, GPU_IDS] + 1)
        assert torch.equal(new[:, 0], new[:, 3]) and new[:, 1].isnan().all()


@pytest.mark.gpu(real=True)  # `on_a_card.py` is its like where the card is pretended
@pytest.mark.parametrize("eager", [True, False])
def test_preempted_requests_on_a_gpu(eager: bool, tmp_path: Path) -> None:
    "Swapped out and in, while steps run ahead: transformers' tokens, and no step waits."
    model = make_tiny("llama", tmp_path)
    prompts = random_prompts(5, longest=40, seed=5)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(
        str(tmp_path),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=6,
        enforce_eager=eager,
        async_scheduling=True,
        worker_cls=NeverWaits,
        num_gpu_blocks_override=9,
        preemption_mode="swap",
        swap_space=0.01,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.llm_engine.engine_core.engine_core.scheduler.num_preemptions > 0
    assert [output.outputs[0].token_ids for output in outputs] == [
        greedy(model, prompt, 24) for prompt in prompts
    ]
