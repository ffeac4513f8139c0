"""Adapters in Triton: shrink and expand equal torch's form whatever the mixture; graphs of steps with
adapters and without; the same tokens from an engine on a pretended card.
"""

import os
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

if not torch.cuda.is_available():  # Triton must know before it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from helpers import answers_on_card, make_wide, write_adapter  # noqa: E402
from test_cuda_graph import Poison, PoisonedOracle  # noqa: E402

from teachvllm import LLM, SamplingParams  # noqa: E402
from teachvllm.attention.backend import ReferenceBackend  # noqa: E402
from teachvllm.gpu_kernels import attention, lora  # noqa: E402
from teachvllm.gpu_kernels.graph import MixedGraphRunner  # noqa: E402
from teachvllm.gpu_kernels.utils import interpreted  # noqa: E402
from teachvllm.lora.layers import LoRAStack, add_stacked  # noqa: E402
from teachvllm.messages import LoRARequest  # noqa: E402
from teachvllm.worker.cuda_graph import AnyOf, CudaGraphRunner, record_graphs  # noqa: E402
from teachvllm.worker.worker import Worker  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGE = attention.DeviceProperties((9, 0), 132, 227 * 1024)
OLD = attention.DeviceProperties((7, 5), 40, 64 * 1024)


def stacks_of(
    width: int, sizes: list[int], rank: int, dtype: torch.dtype, places: int = 4
) -> tuple[LoRAStack, lora.TritonLoRA]:
    "Random adapters in some places, some of which change some of the matrices; the last has none."
    plain = LoRAStack(width, sizes, places, rank, dtype=dtype, device=DEVICE)
    packed = lora.TritonLoRA(width, sizes, places, rank, dtype, DEVICE)
    for place in range(places - 1):
        small = max(1, rank - 2 * place)
        pairs = {
            i: (torch.randn(width, small) / width**0.5, torch.randn(small, size))
            for i, size in enumerate(sizes)
            if len(sizes) == 1 or i != place
        }
        pairs = {i: (a.to(dtype), b.to(dtype)) for i, (a, b) in pairs.items()}
        plain.set(place, pairs)
        packed.set(place, pairs)
    return plain, packed


@pytest.mark.parametrize("chip", [LARGE, OLD], ids=["H100", "T4"])
@pytest.mark.parametrize(
    "width, sizes, rank, rows",
    [
        (64, [64], 1, 1),
        (576, [576, 192, 192], 16, 33),
        (100, [60, 37], 8, 17),
        (48, [64, 128], 64, 3),
        (33, [5], 320, 2),
        (1024, [64], 16, 70),
    ],
)
def test_it_adds_what_torch_adds(
    width: int, sizes: list[int], rank: int, rows: int, chip: Any
) -> None:
    torch.manual_seed(rows)
    properties = chip if interpreted() else attention.get_device_properties()
    with patch.object(attention, "get_device_properties", lambda: properties):
        plain, packed = stacks_of(width, sizes, rank, torch.float32)
        for highest in (4, 1, 0):
            ids = torch.randint(0, highest + 1, (rows,), device=DEVICE)
            wide = torch.randn(rows, 2 * width, device=DEVICE)
            x = wide[:, :width]  # rows further apart than they are long
            y = torch.randn(rows, sum(sizes), device=DEVICE)
            expected = add_stacked(y, x, plain, ids)
            x[ids == 0] = torch.nan  # not looked at
            got = packed(y.clone(), x, ids)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            assert torch.equal(got[ids == 0], y[ids == 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    if not lora.serves(96, [64, 64], 8, dtype):
        pytest.skip("not on this GPU")
    torch.manual_seed(0)
    plain, packed = stacks_of(96, [64, 64], 8, dtype)
    ids = torch.randint(0, 5, (20,), device=DEVICE)
    x = torch.randn(20, 96, device=DEVICE).to(dtype)
    y = torch.randn(20, 128, device=DEVICE).to(dtype)
    exact = add_stacked(y.float(), x.float(), plain.float(), ids)
    got = packed(y.clone(), x, ids).float()
    assert (got - exact).norm() / exact.norm() < (0.01 if dtype == torch.bfloat16 else 0.001)


def test_a_place_is_filled_again() -> None:
    "Nothing of the adapter before is left, and other places stay as they are."
    torch.manual_seed(0)
    plain, packed = stacks_of(64, [64, 64], 8, torch.float32)
    pairs = {1: (torch.randn(64, 2), torch.randn(2, 64))}
    x = torch.randn(4, 64, device=DEVICE)
    y = torch.zeros(4, 128, device=DEVICE)
    ids = torch.tensor([1, 2, 3, 0], device=DEVICE)
    before = packed(y.clone(), x, ids)
    for stack in (plain, packed):
        stack.set(0, pairs)
    got = packed(y.clone(), x, ids)
    torch.testing.assert_close(got, add_stacked(y, x, plain, ids), rtol=1e-4, atol=1e-4)
    assert torch.equal(got[1:], before[1:]) and not torch.equal(got[0], before[0])
    packed.set(0, {})
    assert not packed(y.clone(), x, ids)[0].any()


def test_bfloat16_needs_a_newer_chip() -> None:
    with patch.object(attention, "get_device_properties", lambda: OLD):
        assert not lora.serves(64, [64], 8, torch.bfloat16)
        assert lora.serves(64, [64], 8, torch.float16)


class MixedOracle(PoisonedOracle):
    "For steps with tokens that belong to no sequence, as well."

    supports_mixed_graphs = True

    def forward(self, q: Any, kv_cache: Any, meta: Any) -> Any:
        out = torch.full_like(q, torch.nan)
        known = int(meta.query_start_loc[-1])
        out[:known] = ReferenceBackend.forward(self, q[:known], kv_cache, meta)
        return out


class StandInWorker(Worker):
    "Records stand-ins, and notes of each step which of the recordings ran."

    runner_class: Any = CudaGraphRunner
    backend: Any = PoisonedOracle

    def record_steps(self) -> None:
        runner = self.model_runner
        sizes = self.runner_class.sizes_for(runner)
        cache = self.cache_engine.gpu_cache
        runner.graphs = record_graphs(runner, sizes, cache, Poison, self.runner_class)
        self.recorded = getattr(self, "recorded", 0) + 1
        self.ran: list[Any] = getattr(self, "ran", [])

    def submit(self, out: Any) -> None:
        graphs = self.model_runner.graphs
        with patch.object(AnyOf, "run", lambda *args: self.ran.append(graphs.chosen) or run(*args)):
            super().submit(out)


class MixedWorker(StandInWorker):
    runner_class = MixedGraphRunner
    backend = MixedOracle


run = AnyOf.run


@pytest.mark.parametrize("worker_cls", [StandInWorker, MixedWorker])
@pytest.mark.parametrize("embedding", [False, True])
def test_steps_with_adapters_are_recorded(
    worker_cls: type[StandInWorker], embedding: bool, tmp_path: Path
) -> None:
    """Each kind of steps is run by its own recording; the tokens are those of eager steps. A stack that
    is made later is recorded, too.
    """
    make_wide(tmp_path / "model", layers=3)
    loras: list[LoRARequest | None] = [None]
    for i in (1, 2):
        write_adapter(tmp_path / str(i), i, embedding=embedding and i == 2)
        loras.append(LoRARequest(f"number {i}", i, str(tmp_path / str(i))))
    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(5, 120) for _ in range(rng.randint(1, 20))]}
        for _ in range(12)
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=rng.randint(1, 9), ignore_eos=True)
        for _ in prompts
    ]
    chosen = [rng.choice(loras) for _ in prompts]
    options: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "skip_tokenizer_init": True,
        "num_gpu_blocks_override": 100,
        "swap_space": 0.01,
        "enable_lora": True,
        "max_loras": 2,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 40,
        "attention_backend": worker_cls.backend,
    }
    written = []
    for more in ({"enforce_eager": True}, {"worker_cls": worker_cls}):
        with LLM(str(tmp_path / "model"), **options, **more) as llm:
            for some in (chosen, [None] * len(prompts)):
                outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=some)
                written.append([list(output.outputs[0].token_ids) for output in outputs])
            if "worker_cls" in more:
                [seen] = llm.collective_rpc(
                    lambda worker: (
                        worker.recorded,
                        [one.extras for one in worker.ran],
                        [one.extras for one in worker.model_runner.graphs.recordings],
                    )
                )
    assert written[:2] == written[2:] and written[0] != written[1]
    recorded, ran, kinds = seen
    assert recorded == 1 + embedding and kinds == [set(), {"adapter_ids"}]
    assert set() in ran and {"adapter_ids"} in ran


def test_an_engine_on_a_pretended_card() -> None:
    "Eagerly and in recorded steps: the CPU's tokens."
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is in the way")
    wrong = answers_on_card("T4", "adapters_on_a_card.py")
    assert len(wrong) == 2 and not any(wrong.values()), wrong
