"""An 8-bit KV cache: the backends against the oracle, and the engine against transformers with the
same rounded cache.
"""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import FOR_TWO, greedy, random_prompts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from teachvllm import LLM, EngineArgs, SamplingParams
from teachvllm.arg_utils import resolve_dtype
from teachvllm.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    ReferenceBackend,
    find_backend,
    from_float8,
    get_attn_backend,
    to_float8,
)
from teachvllm.attention.cpu import TorchSDPABackend
from teachvllm.kernels import platform_kernels
from teachvllm.model_executor.layers import Attention, ModelContext, WeightsError

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
FORMATS = {"fp8": E4M3, "fp8_e5m2": E5M2}
PROMPTS = random_prompts(6, 50, seed=3)
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def backends() -> list[type[AttentionBackend]]:
    numba = find_backend("numba", "cpu", torch.float32, 64, 16)
    return [TorchSDPABackend] + ([numba[0]] if numba[1] is None else [])


# The numbers


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rounding_is_to_the_nearest_number_and_stops_at_the_largest(dtype: torch.dtype) -> None:
    "Against a search among all numbers of the format; halfway between two, either."
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()].unique()
    x = torch.cat(
        (
            torch.randn(300) * 10.0 ** torch.randint(-4, 6, (300,)),
            torch.tensor([0.0, 1e30, -1e30, torch.inf]),
        )
    )
    got = to_float8(x, dtype).float()
    nearest = (x.clamp(every.min(), every.max())[:, None] - every).abs().min(1).values
    torch.testing.assert_close(
        (got - x.clamp(every.min(), every.max())).abs(), nearest, atol=0, rtol=1e-6
    )
    assert (
        got.max() == torch.finfo(dtype).max
        and to_float8(torch.tensor([torch.nan]), dtype).float().isnan()
    )
    torch.testing.assert_close(
        to_float8(x, dtype, 0.5).float(), to_float8(x * 2, dtype).float(), atol=0, rtol=0
    )


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", backends())
def test_all_numbers_are_read_as_they_are(
    dtype: torch.dtype, wide: torch.dtype, cls: type[AttentionBackend]
) -> None:
    """256 sequences of one token, whose value is one of the 256 numbers eight times: attention
    gives it back.
    """
    bits = torch.arange(256, dtype=torch.uint8)
    order = cls.get_kv_cache_stride_order()
    cache = torch.empty_permuted((2, 256, 1, 1, 8), order, dtype=torch.uint8).zero_()
    cache[1] = bits.view(256, 1, 1, 1)
    meta = AttentionMetadata(
        torch.arange(257),
        torch.ones(256, dtype=torch.int64),
        bits[:, None].long(),
        bits.long(),
        256,
    )
    backend = cls(1, 8, 1, 1.0)
    expected = bits.view(dtype).float()
    backend.build(meta, 1)
    out = backend.forward(torch.ones(256, 1, 8, dtype=wide), cache.view(dtype), meta)[:, 0].float()
    finite = expected.isfinite()
    assert (out[finite] == expected[finite, None]).all() and not out[~finite].isfinite().any()
    assert torch.equal(from_float8(bits.view(dtype), wide).float()[finite], expected[finite])


# The backends


def ragged(
    rng: random.Random, sizes: tuple[int, int, int], block_size: int, order: Any, longest: int
) -> tuple[Any, ...]:
    """q, k, v of some decodes and chunks, a poisoned cache in float32 that lacks their own keys and
    values, and the metadata.
    """
    heads, kv_heads, size = sizes
    lens = [
        rng.choice([rng.randint(1, 40), rng.randint(1, longest)])
        for _ in range(rng.choice([1, 2, 5]))
    ]
    new = [1 if i < len(lens) // 2 + 1 else rng.randint(1, n) for i, n in enumerate(lens)]
    width = -(-max(lens) // block_size)
    total = sum(new)
    table = torch.randperm(len(lens) * width).view(len(lens), width)
    cache = torch.empty_permuted((2, len(lens) * width, block_size, kv_heads, size), order).fill_(
        torch.nan
    )
    slots = []
    for row, n, m in zip(table, lens, new, strict=True):
        at = row[torch.arange(n) // block_size], torch.arange(n) % block_size
        cache[:, at[0][: n - m], at[1][: n - m]] = 3 * torch.randn(2, n - m, kv_heads, size)
        slots.append((at[0] * block_size + at[1])[n - m :])
    decodes = next((i for i, m in enumerate(new) if m > 1), len(new))
    meta = AttentionMetadata(
        torch.tensor([0, *new]).cumsum(0), torch.tensor(lens), table, torch.cat(slots), decodes
    )
    q, k, v = torch.randn(total, heads, size), *(3 * torch.randn(2, total, kv_heads, size))
    return q, k, v, cache, meta


@pytest.mark.parametrize("cls", [*backends(), "triton"])
def test_a_layer_equals_the_oracle_over_the_same_rounded_cache(cls: Any) -> None:
    """The expected cache is rounded by torch alone, then widened to float32: the oracle knows
    nothing of 8 bits.
    """
    rng = random.Random(0)
    torch.manual_seed(0)
    trials = 40
    longest = 600
    if cls == "triton":  # in Triton's interpreter
        cls = pytest.importorskip("teachvllm.gpu_kernels.attention").TritonBackend
        trials = 10
        longest = 80
        if cls.validate_configuration("cpu", torch.float32, 64, 16):
            pytest.skip("Triton compiles here")
    for _ in range(trials):
        kv_heads = rng.choice([1, 2, 3])
        group = rng.choice([1, 2, 3, 5])
        size = rng.choice([8, 20, 64])
        sizes = (kv_heads * group, kv_heads, size)
        block_size = rng.choice([1, 4, 16])
        dtype = rng.choice([E4M3, E5M2])
        q, k, v, cache, meta = ragged(
            rng, sizes, block_size, cls.get_kv_cache_stride_order(), longest
        )
        options = {
            "window": rng.choice([None, None, 1, 30]),
            "soft_cap": rng.choice([None, None, 2.0]),
        }
        scales = (rng.choice([1.0, 0.25, 1.7]), rng.choice([1.0, 0.25, 1.7]))
        context = ModelContext(cls, block_size, torch.float32, kv_cache_dtype=dtype)
        layer = Attention(*sizes[:1], size, kv_heads, 0.1, context, **options)
        layer.backend.k_scale, layer.backend.v_scale = scales
        assert layer.kv_cache_spec.page_bytes(block_size) == 2 * block_size * kv_heads * size
        kv_cache = cache.to(dtype)
        limit = torch.finfo(dtype).max
        wide = kv_cache.float()
        where = meta.slot_mapping // block_size, meta.slot_mapping % block_size
        for i, (x, scale) in enumerate(zip((k, v), scales, strict=True)):
            wide[i, where[0], where[1]] = (x / scale).clamp(-limit, limit).to(dtype).float()
            wide[i] *= scale
        layer.backend.build(meta, block_size)
        with torch.inference_mode():
            out = layer(q, k, v, kv_cache, meta).view_as(q)
            oracle = ReferenceBackend(kv_heads * group, size, kv_heads, 0.1, **options)
            expected = oracle.forward(q, wide, meta)
        assert expected.isfinite().all()
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-5)


# The whole engine


def rounded(dtype: torch.dtype, scales: dict[tuple[int, str], float]) -> type[DynamicCache]:
    """transformers' cache, which rounds what it is given and gives back the rounded, the newest
    included.
    """

    class RoundedCache(DynamicCache):
        def update(self, key: Any, value: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
            limit = torch.finfo(dtype).max
            both = []
            for name, x in (("k", key), ("v", value)):
                scale = scales.get((layer, name), 1.0)
                both.append((x / scale).clamp(-limit, limit).to(dtype).float() * scale)
            return super().update(*both, layer, *args, **kwargs)

    return RoundedCache


@torch.inference_mode()
def oracle_tokens(
    model: Any, dtype: torch.dtype, scales: dict[tuple[int, str], float] | None = None
) -> list[list[int]]:
    answers = []
    for prompt in PROMPTS:
        cache = rounded(dtype, scales or {})()
        ids = torch.tensor([prompt])
        answer = []
        for _ in range(NUM_TOKENS):
            answer.append(
                int(model(ids, past_key_values=cache, use_cache=True).logits[0, -1].argmax())
            )
            ids = torch.tensor([answer[-1:]])
        answers.append(answer)
    return answers


@pytest.fixture(scope="module")
def expected(folder: str) -> Iterator[dict[str, list[list[int]]]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    yield {
        "auto": [greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS],
        **{name: oracle_tokens(model, dtype) for name, dtype in FORMATS.items()},
    }


def engine(folder: Any, **options: Any) -> LLM:
    return LLM(
        str(folder),
        **{
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "num_gpu_blocks_override": 64,
            **options,
        },
    )


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


WAYS: dict[str, dict[str, Any]] = {
    "reference": {"attention_backend": "reference"},
    "torch": {"attention_backend": "torch_sdpa"},
    "the best": {},
    "small chunks": {
        "max_num_batched_tokens": 8,
        "max_num_seqs": 4,
        "enable_chunked_prefill": True,
    },
    "no prefix cache": {"enable_prefix_caching": False, "block_size": 4},
    "swap": {
        "num_gpu_blocks_override": 20,
        "block_size": 4,
        "preemption_mode": "swap",
        "swap_space": 0.001,
    },
    "recompute": {"num_gpu_blocks_override": 20, "block_size": 4, "preemption_mode": "recompute"},
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_the_tokens_of_transformers_with_a_rounded_cache(
    folder: str, expected: Any, way: str, name: str
) -> None:
    """However prompts are cut, and wherever blocks go meanwhile. The second time prompts are found
    in the cache.
    """
    with engine(folder, kv_cache_dtype=name, **WAYS[way]) as llm:
        assert tokens(llm) == tokens(llm) == expected[name]
        metrics = llm.get_metrics()
        assert (metrics["num_preemptions"] > 0) == (way in ("swap", "recompute"))
        assert (metrics["prefix_cache_hits"] > 0) == (way != "no prefix cache") or way in (
            "swap",
            "recompute",
        )
        [caches] = llm.collective_rpc(
            lambda worker: {cache.dtype for cache in worker.cache_engine.gpu_cache}
        )
        assert caches == {FORMATS[name]}


def test_it_is_another_model_than_without(expected: Any) -> None:
    "Else the test above would show nothing: some tokens differ, most do not."
    for name in FORMATS:
        pairs = [
            (a, b)
            for one, two in zip(expected["auto"], expected[name], strict=True)
            for a, b in zip(one, two)
        ]
        assert 0 < sum(a != b for a, b in pairs) < len(pairs)


def test_two_workers(folder: str, expected: Any) -> None:
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(folder, kv_cache_dtype="fp8", device=FOR_TWO, **options) as llm:
        assert tokens(llm) == expected["fp8"]


def test_forks_copy_bytes(folder: str) -> None:
    """Samples of one prompt share its blocks until they write: the same tokens as alone, and as the
    oracle's backend.
    """
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=10, ignore_eos=True)
    answers = []
    for backend in ("reference", None):
        with engine(folder, kv_cache_dtype="fp8", attention_backend=backend, block_size=8) as llm:
            answers.append(
                [o.token_ids for o in llm.generate(PROMPTS[:2], params, use_tqdm=False)[0].outputs]
            )
            assert llm.get_metrics()["num_cow_copies"] > 0
    assert answers[0] == answers[1]


def test_it_buys_blocks(folder: str) -> None:
    "Of the same bytes: four times as many as in float32, twice as many as in 16 bits."
    blocks = {}
    on_gpu = torch.cuda.is_available()
    narrow = resolve_dtype("auto", "cuda", "bfloat16") if on_gpu else "bfloat16"
    for dtype, name in (
        ("float32", "auto"),
        ("float32", "fp8_e4m3"),
        (narrow, "auto"),
        (narrow, "fp8_e5m2"),
    ):
        with engine(
            folder,
            dtype=dtype,
            kv_cache_dtype=name,
            num_gpu_blocks_override=None,
            kv_cache_memory_bytes=3 << 20,
        ) as llm:
            blocks[dtype, name] = (
                llm.llm_engine.engine_core.engine_core.scheduler.block_manager.num_gpu_blocks
            )
            assert all(len(answer) == NUM_TOKENS for answer in tokens(llm))
    assert (
        blocks["float32", "fp8_e4m3"] == 4 * blocks["float32", "auto"] == blocks[narrow, "fp8_e5m2"]
    )
    assert blocks[narrow, "fp8_e5m2"] == 2 * blocks[narrow, "auto"]


# Scales in the checkpoint


def with_scales(folder: str, path: Path, scales: dict[str, Any]) -> Path:
    shutil.copytree(folder, path)
    weights = load_file(path / "model.safetensors") | {
        name: torch.as_tensor(x) for name, x in scales.items()
    }
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def scales_of(llm: LLM) -> list[list[tuple[float, float]]]:
    def read(worker: Any) -> list[tuple[float, float]]:
        layers = worker.model_runner.attention_layers.values()
        return [(layer.backend.k_scale, layer.backend.v_scale) for layer in layers]

    return llm.collective_rpc(read)


def test_scales_of_a_checkpoint(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    "Under each of their names, for one worker and two; without an 8-bit cache they are left alone."
    part = "model.layers.{}.self_attn.{}".format
    names = {
        part(0, "attn.k_scale"): 0.3,
        part(0, "attn.v_scale"): [0.5],
        part(1, "k_proj.k_scale"): 2.5,
        part(1, "v_proj.v_scale"): 1.5,
        part(2, "kv_scale"): 0.75,
    }
    path = with_scales(folder, tmp_path / "scaled", names)
    wanted = [(0.3, 0.5), (2.5, 1.5), (0.75, 0.75)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    by_layer = {
        (i, kind): x for i, pair in enumerate(wanted) for kind, x in zip("kv", pair, strict=True)
    }
    answers = oracle_tokens(
        model, E4M3, {key: float(torch.tensor(x)) for key, x in by_layer.items()}
    )
    for options in (
        {},
        {"attention_backend": "torch_sdpa"},
        {"tensor_parallel_size": 2, "device": FOR_TWO},
    ):
        with engine(path, kv_cache_dtype="fp8", **options) as llm:
            for found in scales_of(llm):
                assert found == pytest.approx([pytest.approx(pair) for pair in wanted])
            assert tokens(llm) == answers
    with engine(path) as llm:
        assert scales_of(llm) == [[(1.0, 1.0)] * 3] and tokens(llm) == [
            greedy(model, p, NUM_TOKENS) for p in PROMPTS
        ]
    assert "not used" not in caplog.text


def test_shards_keep_their_scales(folder: str, tmp_path: Path) -> None:
    path = with_scales(folder, tmp_path / "scaled", {"model.layers.1.self_attn.attn.v_scale": 0.5})
    with engine(path, kv_cache_dtype="fp8") as llm:
        expected = tokens(llm)
        scales = scales_of(llm)
        llm.collective_rpc("save_sharded_state", args=(str(tmp_path / "shards"),))
    assert scales == [[(1.0, 1.0), (1.0, 0.5), (1.0, 1.0)]]
    for name in ("fp8", "auto"):
        with engine(tmp_path / "shards", kv_cache_dtype=name, load_format="sharded_state") as llm:
            assert scales_of(llm) == (scales if name == "fp8" else [[(1.0, 1.0)] * 3])
            assert (tokens(llm) == expected) == (name == "fp8")


@pytest.mark.parametrize("bad", [[0.5, 0.5], 0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_must_be_one_positive_number(folder: str, tmp_path: Path, bad: Any) -> None:
    path = with_scales(folder, tmp_path / "bad", {"model.layers.0.self_attn.attn.k_scale": bad})
    with pytest.raises(
        WeightsError, match=r"layers\.0\.self_attn\.attn\.k_scale is .* one positive number"
    ):
        engine(path, kv_cache_dtype="fp8")


# What is refused


def test_what_is_refused(folder: str) -> None:
    with pytest.raises(
        ValueError, match="kv_cache_dtype='int8': choose auto, fp8, fp8_e4m3, fp8_e5m2"
    ):
        EngineArgs(folder, kv_cache_dtype="int8").create_engine_config()

    class Plain(AttentionBackend):
        "A backend that was written before there were 8-bit caches."

        name = "plain"

        def forward(self, q: Any, kv_cache: Any, meta: Any) -> Any:
            raise AssertionError

    what = ("cpu", torch.float32, 16, 16)
    assert get_attn_backend(Plain, *what) is get_attn_backend(Plain, *what, torch.float32) is Plain
    with pytest.raises(ValueError, match="Plain: it reads no 8-bit cache"):
        get_attn_backend(Plain, *what, E4M3)
    with pytest.raises(ValueError, match="it reads no 8-bit cache"):
        engine(folder, kv_cache_dtype="fp8", attention_backend=Plain)


def test_a_gpu_that_cannot_widen_e4m3(caplog: pytest.LogCaptureFixture) -> None:
    """Triton is refused by name and with the way out; where nothing was asked for, torch's
    operations serve, slower, and a warning says so.
    """
    caplog.set_level("WARNING", "teachvllm")
    ours = pytest.importorskip("teachvllm.gpu_kernels.attention")
    what = ("cuda", torch.bfloat16, 64, 16)
    kernels = platform_kernels("cuda")
    for capability, serves in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        chip = ours.DeviceProperties(capability, 1, 1 << 16)
        with (
            patch.object(ours, "get_device_properties", lambda chip=chip: chip),
            patch.object(ours, "no_triton", lambda _: None),
        ):
            assert (
                get_attn_backend(None, *what, E5M2, kernels)
                is get_attn_backend(None, *what, kernels=kernels)
                is ours.TritonBackend
            )
            assert get_attn_backend(None, *what, E4M3, kernels) is (
                ours.TritonBackend if serves else TorchSDPABackend
            )
            warned = [record.getMessage() for record in caplog.records]
            assert all("torch_sdpa; not" in line and "try fp8_e5m2" in line for line in warned)
            assert bool(warned) != serves
            caplog.clear()
            if not serves:
                with pytest.raises(
                    ValueError,
                    match=r"needs compute capability 8\.9, this GPU has 8\.0: try fp8_e5m2",
                ):
                    get_attn_backend("triton", *what, E4M3)
