"""The worker without an engine: orders written by hand, tokens as transformers' say; slots, memory,
graphs and executors.
"""

import logging
import os
import pickle
import random
import re
import sys
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers import TINY, VOCAB, greedy, make_tiny, random_prompts

from teachvllm.arg_utils import EngineArgs
from teachvllm.attention.backend import AttentionBackend, KVCacheSpec, ReferenceBackend
from teachvllm.attention.cpu import TorchSDPABackend
from teachvllm.config import CacheConfig
from teachvllm.core.orders import ForkedSequenceData, NewSequenceData, SchedulerOutput
from teachvllm.executor.executor_base import UniProcExecutor
from teachvllm.model_executor.sampler import Sampler, SamplingMetadata, inverse_cdf
from teachvllm.sampling_params import SamplingParams
from teachvllm.sequence import sequence_seed
from teachvllm.worker import memory_profiling
from teachvllm.worker.cache_engine import CacheEngine
from teachvllm.worker.memory_profiling import GiB, MemoryProfiler, MemorySnapshot, model_bytes
from teachvllm.worker.model_runner import Batch, InputBatch, ModelRunner, dummy_batch
from teachvllm.worker.worker import Worker, WorkerWrapperBase

GREEDY = SamplingParams(temperature=0)
NAN = float("nan")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    "A tiny Llama: its folder, and transformers' model."
    path = tmp_path_factory.mktemp("llama")
    return str(path), make_tiny("llama", path)


def make_config(folder: str, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 4,
        "max_num_seqs": 4,
        "swap_space": 0.001,
    }
    options = {"device": "cpu", "skip_tokenizer_init": True, **defaults, **options}
    return EngineArgs(model=folder, **options).create_engine_config()


def start(folder: str, num_blocks: int = 64, **options: Any) -> Worker:
    worker = Worker(make_config(folder, num_gpu_blocks_override=num_blocks, **options))
    worker.init_device()
    worker.load_model()
    worker.initialize_cache(*worker.determine_num_available_blocks())
    worker.compile_or_warm_up_model()
    return worker


def new(
    seq_id: int,
    tokens: list[int],
    blocks: list[int],
    params: Any = GREEDY,
    computed: int = 0,
    **more: Any,
) -> Any:
    return NewSequenceData(
        seq_id, tokens, len(tokens), computed, blocks, params, [], **{"seed": 0, **more}
    )


def sampled(worker: Worker, **orders: Any) -> dict[int, int]:
    out = worker.execute_model(pickle.loads(pickle.dumps(SchedulerOutput(**orders))))
    assert pickle.loads(pickle.dumps(out)) == out and out.device_span is None
    assert all(type(x) is int for x in out.seq_ids + sum(out.sampled_token_ids, []))
    return {i: token_id for i, [token_id] in zip(out.seq_ids, out.sampled_token_ids, strict=True)}


def test_chunks_decodes_forks_copies_swaps_and_reset_equal_transformers(
    tiny: tuple[str, Any],
) -> None:
    """One text goes through all that a scheduler may order; its blocks come chunk by chunk, and its
    slot stays the same.
    """
    folder, model = tiny
    prompt = random_prompts(2, longest=9, seed=4)[0][:1] * 2 + [7, 8, 9, 10, 11, 12, 13]
    other = [20, 21, 22]
    expected = greedy(model, prompt, 12)
    of_other = greedy(model, other, 12)
    worker = start(folder)
    state = worker.model_runner.input_batch
    assert not sampled(worker, new_seqs=[new(1, prompt, [5])], num_scheduled_tokens={1: 4})
    assert not sampled(worker, new_block_ids={1: [9]}, num_scheduled_tokens={1: 3})
    got = sampled(
        worker,
        new_block_ids={1: [2]},
        new_seqs=[new(2, other, [30])],
        num_scheduled_tokens={1: 2, 2: 3},
    )
    assert got == {1: expected[0], 2: of_other[0]}
    slots = dict(state.slot_of)
    for step in (1, 2):
        got = sampled(
            worker, new_block_ids={2: [31]} if step == 2 else {}, num_scheduled_tokens={1: 1, 2: 1}
        )
        assert got == {1: expected[step], 2: of_other[step]}
    # A fork shares block 2, which is not full: the child gets a copy, and then another last token
    # than its parent.
    child = [t for t in range(3, VOCAB) if t != expected[2]][0]
    text = prompt + expected[:2] + [child]
    of_child = greedy(model, text, 6)
    got = sampled(
        worker,
        blocks_to_copy=[(2, 40)],
        forked_seqs=[ForkedSequenceData(3, 1, 5)],
        new_token_ids={3: [child], 1: [expected[2]]},
        finished_seq_ids=[2],
        copied_block_ids={3: [(2, 40)]},
        num_scheduled_tokens={1: 1, 3: 1},
    )
    assert got == {1: expected[3], 3: of_child[0]}
    assert (
        state.slot_of[1] == slots[1]
        and set(state.slot_of) == {1, 3}
        and state.seed[state.slot_of[3]] == 5
    )
    got = sampled(worker, new_block_ids={1: [6], 3: [41]}, num_scheduled_tokens={3: 1, 1: 1})
    assert got == {1: expected[4], 3: of_child[1]}
    # Sequence 1 is swapped out, its blocks are overwritten, and it comes back in other blocks, with
    # a slot of its own.
    done = prompt + expected[:5]
    got = sampled(
        worker,
        blocks_to_swap_out=[(5, 0), (9, 1), (2, 2), (6, 3)],
        finished_seq_ids=[1],
        num_scheduled_tokens={3: 1},
    )
    assert got == {3: of_child[2]}
    for block in (2, 6):
        worker.cache_engine.gpu_cache[0][:, block] = NAN
    back = replace(
        new(1, done, [50, 51, 52, 53], computed=len(done) - 1), num_prompt_tokens=len(prompt)
    )
    orders = {"blocks_to_swap_in": [(0, 50), (1, 51), (2, 52), (3, 53)], "new_seqs": [back]}
    assert sampled(worker, **orders, num_scheduled_tokens={1: 1, 3: 1}) == {
        1: expected[5],
        3: of_child[3],
    }
    assert state.slot_of[3] != state.slot_of[1]
    # After a reset the worker knows nothing, and computes it all again.
    worker.reset()
    state = worker.model_runner.input_batch
    assert not state.slot_of and sorted(state.free_slots) == list(range(state.num_slots))
    again = prompt + expected[:6]
    blocks = list(range(10, 10 + -(-len(again) // 4)))
    assert sampled(
        worker, new_seqs=[new(9, again, blocks)], num_scheduled_tokens={9: len(again)}
    ) == {9: expected[6]}


def test_tokens_stay_on_the_device(tiny: tuple[str, Any]) -> None:
    """A step is submitted before the one before it is collected: the worker has the token, and the
    order does not name it.
    """
    folder, model = tiny
    prompt = [5, 6, 7, 8]
    worker = start(folder)
    worker.submit(
        SchedulerOutput(new_seqs=[new(1, prompt, [0, 1, 2])], num_scheduled_tokens={1: 4})
    )
    for _ in range(6):
        worker.submit(SchedulerOutput(num_scheduled_tokens={1: 1}))
    state = worker.model_runner.input_batch
    assert not state.token_ids[state.slot_of[1], 4:].any()  # the host never saw them
    assert [worker.collect().sampled_token_ids for _ in range(7)] == [
        [[t]] for t in greedy(model, prompt, 7)
    ]
    assert not worker.in_flight


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_logits_have_the_models_dtype(name: str, tmp_path: Path) -> None:
    "No float32 copy of them is made before the sampler has seen which rows need one."
    make_tiny(name, tmp_path)
    model = start(str(tmp_path), dtype="bfloat16").model_runner.model
    hidden = torch.zeros(2, TINY[name]().hidden_size, dtype=torch.bfloat16)
    assert model.compute_logits(hidden).dtype == torch.bfloat16


# Slots


def test_a_sequence_keeps_its_slot(tiny: tuple[str, Any]) -> None:
    """Ten thousand random orders against plain lists: every gathered array is as written out by
    hand.
    """
    rng = random.Random(0)
    block_size = 4
    most = 6
    state = InputBatch(most, 40, block_size, VOCAB)
    # tokens (None: on the device), computed, blocks, slot
    texts: dict[int, tuple[list[int], int, list[int], int]] = {}
    next_id = 0
    for _ in range(2500):
        out = SchedulerOutput()
        for seq_id in [
            i for i in texts if rng.random() < 0.3 and len(texts) + len(out.forked_seqs) < 2 * most
        ][:2]:
            tokens, computed, blocks, _ = texts[seq_id]
            if computed == len(tokens) - 1 and tokens[-1] is None:
                out.forked_seqs.append(ForkedSequenceData(next_id, seq_id, rng.randrange(2**63)))
                out.new_token_ids[next_id] = [rng.randrange(VOCAB)]
                texts[next_id] = (
                    [*tokens[:-1], *out.new_token_ids[next_id]],
                    computed,
                    list(blocks),
                    -1,
                )
                next_id += 1
        for seq_id in rng.sample(sorted(texts), max(0, len(texts) - rng.randint(0, most))):
            out.finished_seq_ids.append(seq_id)
            del texts[seq_id]
        while len(texts) < most and rng.random() < 0.5:
            tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
            num_blocks = rng.randint(0, min(2, -(-len(tokens) // block_size)))  # none in vain
            out.new_seqs.append(
                new(next_id, tokens, [rng.randrange(99) for _ in range(num_blocks)])
            )
            texts[next_id] = tokens, 0, list(out.new_seqs[-1].block_ids), -1
            next_id += 1
        ended = [i for i, (tokens, *_) in texts.items() if len(tokens) >= 39]
        for seq_id, (tokens, computed, blocks, _) in texts.items():
            num_new = len(tokens) - computed
            if seq_id in ended or rng.random() < 0.2:
                continue
            out.num_scheduled_tokens[seq_id] = (
                num_new if rng.random() < 0.6 else rng.randint(1, num_new)
            )
            missing = -(-(computed + out.num_scheduled_tokens[seq_id]) // block_size) - len(blocks)
            if missing > 0:
                out.new_block_ids[seq_id] = [rng.randrange(99) for _ in range(missing)]
                blocks += out.new_block_ids[seq_id]
            if rng.random() < 0.1:
                index = rng.randrange(len(blocks))
                blocks[index] = rng.randrange(99)
                out.copied_block_ids[seq_id] = [(index, blocks[index])]
        out.num_scheduled_tokens = dict(
            sorted(out.num_scheduled_tokens.items(), key=lambda item: item[1] > 1)
        )
        state.update(out)
        assert state.slot_of.keys() == texts.keys()
        assert sorted([*state.slot_of.values(), *state.free_slots]) == list(range(2 * most))
        for seq_id, text in texts.items():
            assert text[3] in (-1, state.slot_of[seq_id])
            texts[seq_id] = (*text[:3], state.slot_of[seq_id])
        if not out.num_scheduled_tokens:
            continue
        batch = Batch(state, out.num_scheduled_tokens)
        check_batch(batch, out, texts, block_size)
        state.advance(batch)
        for seq_id, num in out.num_scheduled_tokens.items():
            tokens, computed, blocks, slot = texts[seq_id]
            # sampled: the host does not know it
            more = [None] if computed + num == len(tokens) else []
            texts[seq_id] = [*tokens, *more], computed + num, blocks, slot  # type: ignore[list-item]


def check_batch(batch: Batch, out: SchedulerOutput, texts: dict, block_size: int) -> None:
    at = 0
    for i, (seq_id, num) in enumerate(out.num_scheduled_tokens.items()):
        tokens, computed, blocks, slot = texts[seq_id]
        assert batch.req_indices[i] == slot and batch.seq_lens[i] == computed + num
        assert batch.query_start_loc[i : i + 2].tolist() == [at, at + num]
        for position in range(computed, computed + num):
            assert batch.positions[at] == position
            assert (
                batch.slot_mapping[at]
                == blocks[position // block_size] * block_size + position % block_size
            )
            on_device = tokens[position] is None
            assert batch.token_indices[at] == (slot if on_device else -1)
            assert on_device or batch.token_ids[at] == tokens[position]
            at += 1
        used = -(-(computed + num) // block_size)
        assert batch.block_table[i, :used].tolist() == blocks[:used]
    done = [
        i
        for i, (s, n) in enumerate(out.num_scheduled_tokens.items())
        if texts[s][1] + n == len(texts[s][0])
    ]
    assert batch.sample_indices.tolist() == batch.req_indices[done].tolist()
    assert batch.logits_indices.tolist() == (batch.query_start_loc[1:][done] - 1).tolist()
    ones = [n == 1 for n in out.num_scheduled_tokens.values()]
    assert batch.num_decodes == (ones.index(False) if False in ones else len(ones))


# Seeds


def test_the_first_samples_of_forks_have_mixed_seeds(tiny: tuple[str, Any]) -> None:
    """Sample j of n is that of a request whose seed is `sequence_seed(seed, j)`; seed 0's second is
    not seed 1's first.
    """
    folder = tiny[0]
    prompt = [5, 6, 7, 8, 9]
    n = 6
    params = SamplingParams(temperature=3.0)

    def first(seed: int, num_samples: int) -> list[int]:
        worker.reset()
        order = SchedulerOutput(
            new_seqs=[new(1, prompt, [1, 2], params, seed=seed, num_samples=num_samples)],
            num_scheduled_tokens={1: 5},
        )
        out = worker.execute_model(order)
        assert out.seq_ids == [1] * num_samples
        return [token_id for [token_id] in out.sampled_token_ids]

    worker = start(folder)
    for seed in (0, 11, 2**64 - 1, -3):
        assert first(seed, n) == [first(sequence_seed(seed, j), 1)[0] for j in range(n)]
    assert first(0, n)[1:] != [first(j, 1)[0] for j in range(1, n)]


# Logits that are no numbers


def test_nan_is_told_and_hurts_its_sequence_only(tiny: tuple[str, Any]) -> None:
    """Token 98 makes all of its sequence NaN. Its tokens are -1; a step that was already launched
    finds a token to compute.
    """
    folder, model = tiny
    worker = start(folder, enforce_eager=True)
    worker.model_runner.model.model.embed_tokens.weight.data[98] = NAN
    healthy = [5, 6, 7]
    expected = greedy(model, healthy, 3)
    for params in (
        GREEDY,
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_p=0.5, min_p=0.1),
    ):
        worker.reset()
        for layer in worker.cache_engine.gpu_cache:
            layer.zero_()
        news = [
            new(1, [5, 98, 6], [0, 1, 2], params, num_logprobs=2),
            new(2, healthy, [3, 4, 5], num_logprobs=1),
        ]
        worker.submit(SchedulerOutput(new_seqs=news, num_scheduled_tokens={1: 3, 2: 3}))
        for _ in range(2):
            worker.submit(SchedulerOutput(num_scheduled_tokens={1: 1, 2: 1}))
        for token_id in expected:
            out = worker.collect()
            assert out.seq_ids == [1, 2] and out.sampled_token_ids == [[-1], [token_id]]
            [(logprob, _, likeliest)] = out.logprobs[1]
            assert likeliest[0] == (token_id, logprob) and logprob < 0


@pytest.mark.parametrize("position", [0, 1, 255, 256, 299])
def test_the_sampler_says_minus_one_for_nan(position: int) -> None:
    """Greedy, plain and filtered rows, wherever the NaN is; infinities and rows of nothing but bans
    are no NaN.
    """
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(0))
    logits[:3, position] = NAN
    logits[3:6, 7] = torch.inf
    logits[6:] = -torch.inf
    meta = SamplingMetadata(
        False,
        torch.tensor([0.0, 1.0, 1.0] * 3),
        torch.tensor([1.0, 1.0, 0.5] * 3),
        torch.full((9,), 300),
        torch.zeros(9),
        torch.full((9,), 0.3),
        torch.tensor([1, 4, 7]),
        torch.tensor([2, 5, 8]),
        torch.arange(9),
        num_top=1,
    )
    ids, logprobs = Sampler()(logits, meta)
    assert (
        ids[:3].tolist() == [-1] * 3 and (ids[3:] >= 0).all() and (ids < 300).all() and ids[3] == 7
    )
    assert logprobs is not None and logprobs.logprobs[:3].isnan().all()


@pytest.mark.parametrize("size", [1, 7, 255, 256, 257, 700, 5000])
def test_inverse_cdf_in_two_levels(size: int) -> None:
    "Drawn by the law for any size, zeros are never drawn, and the ends hold."
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(400, size, generator=generator) ** 8
    weights[torch.rand(weights.shape, generator=generator) < 0.7] = 0
    weights[:, size // 2] += 1e-3
    uniform = torch.rand(400, generator=generator)
    uniform[:5] = 0.0
    uniform[5:10] = 1 - 2**-23
    index = inverse_cdf(weights, uniform)[:, None]
    ends = weights.double().cumsum(-1) / weights.double().sum(-1, keepdim=True)
    end = ends.gather(1, index)[:, 0]
    share = (weights / weights.sum(-1, keepdim=True)).gather(1, index)[:, 0]
    assert (
        (share > 0).all()
        and (uniform <= end + 1e-6).all()
        and (uniform >= end - share - 1e-6).all()
    )


# Memory


def test_the_profile_does_not_count_the_cache(tiny: tuple[str, Any]) -> None:
    """However long a sequence may be, the largest step's cache is one block: what is measured is
    activations.
    """
    for longest in (32, 256):
        worker = Worker(make_config(tiny[0], max_model_len=longest))
        worker.init_device()
        worker.load_model()
        runner = worker.model_runner
        with patch.object(runner, "forward", wraps=runner.forward) as forward:
            runner.profile_run()
        x, _, kv_caches, _ = forward.call_args.args
        page_bytes = next(iter(worker.get_kv_cache_spec().values())).page_bytes(4)
        assert x["seq_lens"].max() == longest - 1 and len(kv_caches) == 2
        assert all(cache.nbytes == page_bytes for cache in kv_caches)
        assert not worker.model_runner.input_batch.slot_of


def weights_said(folder: str, caplog: pytest.LogCaptureFixture) -> tuple[Worker, str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "teachvllm"):
        worker = start(folder)
    return worker, re.search(r"weights take (\S+) GiB", caplog.text)[1]  # type: ignore[index]


def test_weights_are_what_the_model_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the third engine of a process as in the first, whatever memory was freed between them;
    never negative.
    """
    from transformers import LlamaConfig

    TINY["wide"] = lambda: LlamaConfig(
        **{**TINY["llama"]().to_dict(), "hidden_size": 512, "intermediate_size": 4096}
    )
    wanted = 4 * sum(p.numel() for p in make_tiny("wide", tmp_path).parameters())
    first, said = weights_said(str(tmp_path), caplog)
    weights = first.memory_profile.weights
    assert wanted <= weights < 1.1 * wanted and said == f"{weights / GiB:.2f}" == "0.07"
    del first
    kept = [np.ones(1 << 18) for _ in range(200)]  # freed, and not given back to the system
    del kept
    for _ in range(2):
        worker, again = weights_said(str(tmp_path), caplog)
        assert worker.memory_profile.weights == weights and again == said
        assert worker.memory_profile.available_kv_cache == worker.memory_profile.budget - weights


def test_a_shared_tensor_is_counted_once() -> None:
    layer = torch.nn.Linear(4, 8, bias=False)
    tied = torch.nn.Linear(4, 8, bias=False)
    tied.weight = layer.weight
    layer.register_buffer("first_rows", layer.weight.data[:4])
    layer.packed = torch.zeros(10)
    assert model_bytes(torch.nn.ModuleList([layer, tied])) == 4 * 8 * 4 + 40


@pytest.mark.parametrize(
    ("options", "free", "expected"),
    [
        ({}, 100 * GiB, 4 * GiB),  # a CPU's default
        ({}, 3 * GiB, int(0.9 * 3 * GiB)),  # not more than is free
        ({"kv_cache_memory_bytes": 6 * GiB}, 100 * GiB, 6 * GiB),
        ({"gpu_memory_utilization": 0.5}, 100 * GiB, 50 * GiB),
        ({"num_gpu_blocks_override": 7 * 1024}, 100 * GiB, 7 * GiB),
    ],
)
def test_the_size_of_a_cpus_cache(options: dict[str, Any], free: int, expected: int) -> None:
    block = 1 << 20
    with patch.object(memory_profiling, "available_memory", lambda: free):
        profiler = MemoryProfiler("cpu", CacheConfig(**options))
        assert expected - block < block * profiler.num_gpu_blocks(block, 1000) <= expected


def test_a_cpus_default_that_is_too_small_names_the_knob() -> None:
    with patch.object(memory_profiling, "available_memory", lambda: 100 * GiB):
        profiler = MemoryProfiler("cpu", CacheConfig())
        with pytest.raises(
            ValueError, match=r"131072 .* the 65536 .*default of 4 GiB.*raise kv_cache_memory_bytes"
        ):
            profiler.num_gpu_blocks(1 << 20, 131072)


# Warm-up and devices


def test_the_warm_up_runs_a_prompt_and_a_decode_even_where_nothing_is_profiled(
    tiny: tuple[str, Any],
) -> None:
    """On the real cache, through model and sampler; no sequence, result or random state is left of
    it.
    """
    batches = []
    for option in (
        ("num_gpu_blocks_override", 8),
        ("kv_cache_memory_bytes", 1 << 20),
        ("gpu_memory_utilization", 0.01),
    ):
        worker = Worker(make_config(tiny[0], seed=3, max_model_len=32, **dict([option])))
        worker.init_device()
        worker.load_model()
        worker.initialize_cache(*worker.determine_num_available_blocks())
        # type: ignore[union-attr]
        runner = worker.model_runner
        kv_caches = worker.cache_engine.gpu_cache
        with (
            patch.object(runner, "execute_model", wraps=runner.execute_model) as ran,
            patch.object(runner, "sampler", wraps=runner.sampler) as sampler,
        ):
            worker.compile_or_warm_up_model()
        assert (
            all(call.args[1] is kv_caches for call in ran.call_args_list)
            and sampler.call_count == ran.call_count
        )
        batches.append(
            [list(call.args[0].num_scheduled_tokens.values()) for call in ran.call_args_list]
        )
        assert torch.equal(torch.random.get_rng_state(), torch.manual_seed(3).get_state())
        assert not worker.in_flight and not runner.input_batch.slot_of
    assert batches == [[[1, 31], [1]]] * 3


@pytest.mark.parametrize("at_a_time", [None, 128])
@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 16},
        {"max_num_seqs": 256},
        {"max_num_batched_tokens": 1},
        {"max_model_len": 2},
        {},
    ],
)
def test_dummy_batches_keep_to_the_limits_and_reach_them(
    tiny: tuple[str, Any], limits: dict[str, int], at_a_time: int | None
) -> None:
    scheduler = (config := make_config(tiny[0], **limits)).scheduler_config
    for sizes in ((None, None, None), (32, 2, 64), (1, 1, 64)):
        out = dummy_batch(config, *sizes, at_a_time=at_a_time)
        scheduled = list(out.num_scheduled_tokens.values())
        most = scheduler.max_num_batched_tokens, scheduler.max_num_seqs, scheduler.max_model_len
        tokens, seqs, longest = (min(a or b, b) for a, b in zip(sizes, most, strict=True))
        seqs = min(tokens, seqs)
        assert (sum(scheduled), len(scheduled)) == (min(tokens, seqs * (longest - 1)), seqs)
        assert scheduled == sorted(scheduled, key=lambda n: n > 1) and min(scheduled) > 0
        lengths = [len(new.token_ids) for new in out.new_seqs]
        assert max(lengths) == longest - 1
        assert all(new.num_computed_tokens >= 0 and not any(new.block_ids) for new in out.new_seqs)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak cannot be reset")
@pytest.mark.parametrize("backend", ["torch_sdpa", "reference"])
@pytest.mark.parametrize("max_num_seqs", [16, 64])
def test_no_step_takes_more_memory_than_the_largest(
    tiny: tuple[str, Any], backend: str, max_num_seqs: int
) -> None:
    "A chunk of one long prompt beside long decodes, and decodes alone."
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 1024}
    longer = {"max_position_embeddings": 2048}
    config = make_config(tiny[0], hf_overrides=longer, attention_backend=backend, **limits)
    runner = ModelRunner(config, "cpu")
    runner.load_model()
    caches = runner.make_cache(1).gpu_cache[:2]

    def peak(out: SchedulerOutput | None = None) -> int:
        memory_profiling.release_memory()
        MemorySnapshot.reset_peak("cpu")
        before = MemorySnapshot.take("cpu").torch_memory
        runner._dummy_run(out, caches) if out else runner.profile_run()
        return MemorySnapshot.take("cpu").torch_peak - before

    steps = dummy_batch(config), dummy_batch(config, max_num_seqs)
    for step in steps:
        runner._dummy_run(step, caches)  # the first one loads code
    largest = peak()
    for step in steps:
        assert peak(step) < 1.15 * largest + (8 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="only the peak is known")
@pytest.mark.parametrize("backend", [TorchSDPABackend, ReferenceBackend])
def test_the_first_block_of_a_large_cache_takes_little(backend: type[AttentionBackend]) -> None:
    "Huge pages, of 2 MiB or more, would be 32 or 96."

    def grown(num_blocks: int) -> int:
        memory_profiling.release_memory()
        before = memory_profiling.process_memory()
        engine = CacheEngine([KVCacheSpec(3, 64, "bfloat16")] * 16, 16, backend, "cpu", num_blocks)
        for layer in engine.gpu_cache:
            layer[:, 0] = 1
        return memory_profiling.process_memory() - before

    grown(1)  # loads code
    assert grown(4096) < 4 << 20


def test_a_cache_that_the_system_refuses(tiny: tuple[str, Any]) -> None:
    worker = Worker(make_config(tiny[0]))
    worker.init_device()
    worker.load_model()
    with (
        patch("mmap.mmap", side_effect=OSError(12, "Cannot allocate memory")),
        pytest.raises(ValueError, match=r"allocating the KV cache \(tried to allocate \d+ bytes\)"),
    ):
        worker.initialize_cache(8, 0)


def test_rank_one_works_on_its_own_gpu_in_any_thread() -> None:
    "The current device belongs to a thread, so each call sets it and sets it back."
    current: list[str] = []

    @contextmanager
    def device(name: str) -> Any:
        current.append(name)
        yield
        current.append("back")

    worker = Worker(
        SimpleNamespace(device_config=SimpleNamespace(device="cuda")), local_rank=1, rank=1
    )  # type: ignore[arg-type]
    assert worker.device == "cuda:1"
    worker.cache_engines = [SimpleNamespace(swap_out=len, swap_in=len, copy=len, gpu_cache=[])]  # type: ignore[list-item]
    runs = lambda *_: current.append("runs")  # noqa: E731
    compiled = SimpleNamespace(compile=lambda *_: None, version=0)
    context = SimpleNamespace(
        attn_backend=compiled, kernels=compiled, dtype=None, kv_cache_dtype=None
    )
    worker.model_runner = SimpleNamespace(
        execute_model=runs, load_model=runs, model=None, context=context
    )  # type: ignore[assignment]
    worker.memory_profiler = SimpleNamespace(explain_out_of_memory=lambda doing: nullcontext())  # type: ignore[assignment]
    with patch("torch.cuda.device", device):
        thread = threading.Thread(target=worker.submit, args=(SchedulerOutput(),))
        thread.start()
        thread.join()
        with pytest.raises(AttributeError):  # there is no model to measure
            worker.load_model()
    assert current == ["cuda:1", "runs", "back"] * 2 and len(worker.in_flight) == 1
    with patch.object(Worker, "init_device", lambda self: None):
        assert (
            Worker(
                SimpleNamespace(device_config=SimpleNamespace(device="cpu")), local_rank=1
            ).device
            == "cpu"
        )  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_a_gpus_worker_drops_rays_setting_for_nccl(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    "And it does so before the groups are made, which read it."
    monkeypatch.setenv("NCCL_ASYNC_ERROR_HANDLING", "1")
    seen: list[str | None] = []

    def meet(*_: Any) -> None:
        seen.append(os.environ.get("NCCL_ASYNC_ERROR_HANDLING"))
        raise EOFError

    config = SimpleNamespace(
        device_config=SimpleNamespace(device=device), model_config=SimpleNamespace(dtype="float16")
    )
    with (
        patch("torch.cuda.device", lambda name: nullcontext()),
        patch("torch.cuda.get_device_capability", lambda name: (7, 5)),
        patch("teachvllm.worker.worker.keep_freed_memory"),
        patch("teachvllm.worker.worker.init_worker_distributed_environment", meet),
        pytest.raises(EOFError),
    ):
        Worker(config).init_device()  # type: ignore[arg-type]
    assert seen == ["1" if device == "cpu" else None]


def test_the_device_is_timed_only_when_asked(tiny: tuple[str, Any]) -> None:
    worker = start(tiny[0])
    with patch.object(worker.clock, "mark", wraps=worker.clock.mark) as mark:
        order = SchedulerOutput(new_seqs=[new(1, [5, 6], [0, 1])], num_scheduled_tokens={1: 2})
        assert worker.execute_model(order).device_span is None and not mark.called
        span = worker.execute_model(
            SchedulerOutput(num_scheduled_tokens={1: 1}, timed=True)
        ).device_span
        assert span is not None and 0 < span[1] - span[0] < 60 and mark.call_count == 2


# Executors


class FlakyWorker(Worker):
    "Fails in the steps that it is told to."

    fails: Any = ()

    def submit(self, out: SchedulerOutput) -> None:
        if out.total_num_scheduled_tokens in self.fails:
            raise RuntimeError(f"{out.total_num_scheduled_tokens} tokens: the device is lost")
        super().submit(out)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_results_come_in_order_and_errors_with_their_step(
    tiny: tuple[str, Any], asynchronous: bool
) -> None:
    folder, model = tiny
    config = make_config(
        folder, num_gpu_blocks_override=32, async_scheduling=asynchronous, worker_cls=FlakyWorker
    )
    executor = UniProcExecutor(config)
    assert (executor.thread is not None) == asynchronous
    executor.initialize_cache(*executor.determine_num_available_blocks())
    expected = greedy(model, [5, 6, 7], 4)
    first = SchedulerOutput(new_seqs=[new(1, [5, 6, 7], [0, 1, 2])], num_scheduled_tokens={1: 3})
    decode = SchedulerOutput(num_scheduled_tokens={1: 1})
    for out in (first, decode, decode):
        executor.submit(out)
    assert [executor.collect().sampled_token_ids[0][0] for _ in range(3)] == expected[:3]
    executor.driver_worker.worker.fails = [1]  # type: ignore[union-attr]
    executor.submit(decode)
    with pytest.raises(RuntimeError, match="1 tokens: the device is lost"):
        executor.collect()
    executor.submit(decode)
    executor.drain()
    assert not executor.in_flight
    executor.submit(decode)
    executor.reset()
    executor.driver_worker.worker.fails = ()  # type: ignore[union-attr]
    assert executor.execute_model(first).sampled_token_ids == [expected[:1]]
    executor.submit(decode)
    executor.reset()  # a result that nobody collected is not the next one
    assert executor.execute_model(first).sampled_token_ids == [expected[:1]]
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(ValueError, match="closed"):
        executor.collective_rpc("reset")


def test_after_ctrl_c_a_step_is_still_in_flight(tiny: tuple[str, Any]) -> None:
    "So a reset waits for the worker's thread, and forgets what that step has left."
    config = make_config(tiny[0], num_gpu_blocks_override=32, async_scheduling=True)
    executor = UniProcExecutor(config)
    executor.initialize_cache(*executor.determine_num_available_blocks())
    go = threading.Event()
    presses = iter([KeyboardInterrupt])
    runner = executor.driver_worker.worker.model_runner  # type: ignore[union-attr]
    run = runner.execute_model
    with patch.object(runner, "execute_model", lambda *args: go.wait(60) and run(*args)):
        executor.submit(
            SchedulerOutput(new_seqs=[new(1, [5, 6, 7], [0])], num_scheduled_tokens={1: 3})
        )
        wait = executor.in_flight[0]

        def interrupted() -> Any:
            for press in presses:
                raise press
            go.set()
            return wait()

        executor.in_flight[0] = interrupted
        with pytest.raises(KeyboardInterrupt):
            executor.collect()
        assert len(executor.in_flight) == 1
        executor.reset()
    assert go.is_set() and not executor.in_flight and not runner.input_batch.slot_of
    executor.shutdown()


def test_the_wrapper_is_the_door(tiny: tuple[str, Any]) -> None:
    wrapper = WorkerWrapperBase()
    wrapper.execute_method("init_worker", make_config(tiny[0]), local_rank=0, is_driver_worker=True)
    assert (
        isinstance(wrapper.worker, Worker)
        and wrapper.execute_method(lambda worker: worker.device) == "cpu"
    )
    with pytest.raises(ValueError, match="no method 'fly'"):
        wrapper.execute_method("fly")
