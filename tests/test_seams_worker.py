"""What a worker does for drafts, grammars, adapters, embeddings and packed weights: orders written
by hand, with no scheduler.
"""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import VOCAB, greedy, make_tiny
from safetensors.torch import save_file
from test_parallel import Ranked
from test_worker import GREEDY, make_config, new, start
from torch import nn
from transformers import LlamaConfig

from teachvllm import LLM
from teachvllm.attention.cpu import TorchSDPABackend
from teachvllm.config import NotSupportedYet
from teachvllm.core.orders import ForkedSequenceData, SchedulerOutput
from teachvllm.distributed.parallel_state import ParallelState, run_ranks
from teachvllm.messages import ModelRunnerOutput, PromptEmbedding
from teachvllm.model_executor.layers import (
    LinearBase,
    LinearMethod,
    MergedColumnParallelLinear,
    ModelContext,
    Partition,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
    WeightsError,
    attention_layers,
    default_weight_loader,
    get_forward_context,
    set_weight_attrs,
)
from teachvllm.model_executor.loader import get_model, make_context
from teachvllm.model_executor.models import registry
from teachvllm.model_executor.models.moe import FusedMoE, rows_of_each_expert
from teachvllm.model_executor.models.parity import random_sequences
from teachvllm.model_executor.sampler import SamplerOutput, accepted_rows, apply_grammar_bitmask
from teachvllm.sampling_params import SamplingParams
from teachvllm.worker.worker import Worker

PROMPT = [5, 6, 7, 8, 9]
RANDOM = SamplingParams(temperature=1.5)
BLOCK = 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    "A tiny Llama: its folder, and transformers' model."
    path = tmp_path_factory.mktemp("llama")
    return str(path), make_tiny("llama", path)


@pytest.fixture(scope="module")
def running(tiny: tuple[str, Any]) -> Worker:
    return start(tiny[0], max_num_seqs=6)


@pytest.fixture
def worker(running: Worker) -> Worker:
    running.reset()
    return running


def step(worker: Worker, **orders: Any) -> ModelRunnerOutput:
    return worker.execute_model(SchedulerOutput(**orders))


def tokens_of(out: ModelRunnerOutput) -> dict[int, list[int]]:
    assert len(set(out.seq_ids)) == len(out.seq_ids)
    return dict(zip(out.seq_ids, out.sampled_token_ids, strict=True))


def blocks(seq_id: int, num_tokens: int = 40) -> list[int]:
    "As many as a short text may need, from the start."
    each = -(-num_tokens // BLOCK)
    return list(range(10 * seq_id, 10 * seq_id + each))


def alone(
    worker: Worker, prompt: list[int], num_tokens: int, params: Any, **more: Any
) -> list[int]:
    "What the worker samples token by token."
    worker.reset()
    (first,) = tokens_of(
        step(
            worker,
            new_seqs=[new(1, prompt, blocks(1), params, **more)],
            num_scheduled_tokens={1: len(prompt)},
        )
    )[1]
    tokens = [first]
    while len(tokens) < num_tokens:
        tokens += tokens_of(step(worker, num_scheduled_tokens={1: 1}))[1]
    worker.reset()
    return tokens


# Drafts


def test_accepted_rows() -> None:
    drafts = {0: [4, 5], 2: [7, 7, 7]}
    # entry 0 is right in its first draft, entry 1 has none, all of entry 2's are right
    sampled = [4, 6, 9, 1, 7, 7, 7, 3]
    assert accepted_rows(sampled, 3, drafts) == [range(2), range(3, 4), range(4, 8)]
    assert accepted_rows([2, 4, 5], 1, {0: [4, 5]}) == [range(1)]  # right behind what is wrong


def with_drafts(
    worker: Worker,
    prompt: list[int],
    params: Any,
    wanted: list[int],
    guess: Any,
    **more: Any,
) -> tuple[list[int], int]:
    "The tokens, and in how many steps, where `guess(done)` gives the drafts behind `done` tokens."
    out = step(
        worker,
        new_seqs=[new(1, prompt, blocks(1), params, **more)],
        num_scheduled_tokens={1: len(prompt)},
    )
    tokens = list(tokens_of(out)[1])
    told = 0  # how many of them the worker was told
    steps = 1
    while len(tokens) < len(wanted):
        drafts = guess(len(tokens))
        known = {1: tokens[told:]} if told < len(tokens) else {}
        got = tokens_of(
            step(
                worker,
                new_token_ids=known,
                scheduled_spec_decode_tokens={1: drafts} if drafts else {},
                num_scheduled_tokens={1: 1 + len(drafts)},
            )
        )[1]
        assert 1 <= len(got) <= 1 + len(drafts)
        told = len(tokens)
        tokens += got
        steps += 1
        state = worker.model_runner.input_batch
        assert not state.on_device[state.slot_of[1]] or not drafts
    return tokens, steps


@pytest.mark.parametrize("params", [GREEDY, RANDOM, SamplingParams(temperature=1, top_p=0.7)])
@pytest.mark.parametrize("num_drafts", [1, 3, 6])
@pytest.mark.parametrize("kind", ["right", "wrong", "half", "random", "sometimes"])
def test_drafts_never_change_a_token(
    worker: Worker, params: Any, num_drafts: int, kind: str
) -> None:
    """Any drafts, over many block edges: the same tokens as without; where they are right, in fewer
    steps.
    """
    wanted = alone(worker, PROMPT, 24, params, seed=3)
    rng = random.Random(num_drafts)

    def guess(done: int) -> list[int]:
        right = (wanted + [0] * num_drafts)[done : done + num_drafts]
        wrong = [(token + 1) % VOCAB for token in right]
        if kind == "sometimes" and rng.random() < 0.5:
            return []
        kinds = {
            "right": right,
            "wrong": wrong,
            "half": right[: num_drafts // 2] + wrong[num_drafts // 2 :],
            "random": [rng.choice(pair) for pair in zip(right, wrong, strict=True)],
        }
        return kinds.get(kind, right)

    tokens, steps = with_drafts(worker, PROMPT, params, wanted, guess, seed=3)
    assert tokens[: len(wanted)] == wanted
    if kind == "right":
        assert steps == 1 + -(-(len(wanted) - 1) // (num_drafts + 1))
    if kind == "wrong":
        assert steps == len(wanted)


def test_greedy_drafts_equal_transformers(worker: Worker, tiny: tuple[str, Any]) -> None:
    wanted = greedy(tiny[1], PROMPT, 16)
    tokens, steps = with_drafts(worker, PROMPT, GREEDY, wanted, lambda n: wanted[n : n + 4])
    assert tokens[:16] == wanted and steps == 4


def test_drafts_in_a_batch_with_prompts_and_decodes(worker: Worker) -> None:
    "Sequences with drafts right, wrong and none, a prompt's chunk and a whole prompt in one step."
    prompts = {i: [10 + i, 20 + i, 30 + i] for i in range(1, 6)}
    params = {i: RANDOM if i % 2 else GREEDY for i in prompts}
    wanted = {i: alone(worker, prompts[i], 6, params[i], seed=i) for i in prompts}
    firsts = step(
        worker,
        new_seqs=[new(i, prompts[i], blocks(i), params[i], seed=i) for i in (1, 2, 3)],
        num_scheduled_tokens=dict.fromkeys((1, 2, 3), 3),
    )
    assert tokens_of(firsts) == {i: wanted[i][:1] for i in (1, 2, 3)}
    wrong = (wanted[2][2] + 1) % VOCAB
    out = step(
        worker,
        new_seqs=[new(i, prompts[i], blocks(i), params[i], seed=i) for i in (4, 5)],
        scheduled_spec_decode_tokens={1: wanted[1][1:3], 2: [wanted[2][1], wrong, wanted[2][3]]},
        num_scheduled_tokens={3: 1, 1: 3, 2: 4, 4: 2, 5: 3},
    )
    assert tokens_of(out) == {
        3: wanted[3][1:2],
        1: wanted[1][1:4],
        2: wanted[2][1:3],
        5: wanted[5][:1],
    }
    # and on: those with drafts are told, the others' tokens are on the device
    out = step(
        worker,
        new_token_ids={1: wanted[1][1:4], 2: wanted[2][1:3]},
        scheduled_spec_decode_tokens={5: wanted[5][1:2]},
        num_scheduled_tokens={1: 1, 2: 1, 3: 1, 4: 1, 5: 2},
    )
    assert tokens_of(out) == {
        1: wanted[1][4:5],
        2: wanted[2][3:4],
        3: wanted[3][2:3],
        4: wanted[4][:1],
        5: wanted[5][1:3],
    }


def test_drafts_behind_a_prompts_end(worker: Worker) -> None:
    "As after a preemption: all known tokens and the drafts in one step, or in two."
    wanted = alone(worker, PROMPT, 8, RANDOM, seed=5)
    text = PROMPT + wanted[:3]
    order = new(1, text, blocks(1), RANDOM, seed=5)
    order.num_prompt_tokens = len(PROMPT)
    for first in (0, 6):
        worker.reset()
        if first:
            assert not step(worker, new_seqs=[order], num_scheduled_tokens={1: first}).seq_ids
        out = step(
            worker,
            new_seqs=[] if first else [order],
            scheduled_spec_decode_tokens={1: [*wanted[3:5], 99]},
            num_scheduled_tokens={1: len(text) + 3 - first},
        )
        assert tokens_of(out) == {1: wanted[3:6]}


def test_penalties_and_minimums_count_for_each_row(worker: Worker) -> None:
    """A row is shaped as if the drafts before it were written, and knows how long its text would
    be. A function of the request's own sees each token once: its first row only.
    """
    penalized = SamplingParams(temperature=0, repetition_penalty=1.8)
    wanted = alone(worker, PROMPT, 8, penalized)
    tokens, steps = with_drafts(worker, PROMPT, penalized, wanted, lambda n: wanted[n : n + 2])
    assert tokens[:8] == wanted and steps < 5
    worker.reset()
    shaped = SamplingParams(temperature=0, logits_processors=[lambda output, logits: -logits])
    wanted = alone(worker, PROMPT, 8, shaped)
    tokens, steps = with_drafts(worker, PROMPT, shaped, wanted, lambda n: wanted[n : n + 2])
    assert tokens == wanted and steps == len(wanted)

    worker.reset()
    likeliest = alone(worker, PROMPT, 6, GREEDY)
    stop = likeliest[2]
    at_least = SamplingParams(temperature=0, min_tokens=4, all_stop_token_ids=[stop])
    wanted = alone(worker, PROMPT, 6, at_least)
    assert stop not in wanted[:4]
    drafts = [[], wanted[1:5]]
    tokens, _ = with_drafts(worker, PROMPT, at_least, wanted, lambda n: drafts[n] if n < 2 else [])
    assert tokens[:6] == wanted
    # the draft that must not come yet is refused in its row
    worker.reset()
    tokens, _ = with_drafts(worker, PROMPT, at_least, wanted, lambda n: [*wanted[n:2], stop])
    assert tokens[:6] == wanted


def test_log_probabilities_of_several_tokens(worker: Worker) -> None:
    "One for each accepted token, the same as token by token; entries without are left out."
    wanted = alone(worker, PROMPT, 6, GREEDY)
    one_by_one = []
    step(
        worker,
        new_seqs=[new(1, PROMPT, blocks(1), num_logprobs=3)],
        num_scheduled_tokens={1: len(PROMPT)},
    )
    for _ in range(4):
        one_by_one += step(worker, num_scheduled_tokens={1: 1}).logprobs[0]
    worker.reset()
    step(
        worker,
        new_seqs=[new(2, [3, 4], blocks(2)), new(1, PROMPT, blocks(1), num_logprobs=3)],
        num_scheduled_tokens={2: 2, 1: len(PROMPT)},
    )
    out = step(
        worker,
        scheduled_spec_decode_tokens={1: [*wanted[1:4], 98]},
        num_scheduled_tokens={2: 1, 1: 5},
    )
    assert out.sampled_token_ids[1] == wanted[1:5] and list(out.logprobs) == [1]
    for ours, theirs in zip(out.logprobs[1], one_by_one, strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-5) and ours[1] == theirs[1] == 1
        assert [i for i, _ in ours[2]] == [i for i, _ in theirs[2]]


def test_a_broken_row_behind_a_draft_ends_the_list() -> None:
    "What was sampled before it stands, with its scores; what is wrong is told where it counts."
    out = SamplerOutput(
        [7, 8],
        torch.tensor([4, 5, -1, -1, 9]),
        errors={2: "broken", 3: "not reached", 4: "right"},
        drafts={0: [4, 5, 6]},
    ).to_model_runner_output()
    assert out == ModelRunnerOutput([7, 8], [[4, 5, -1], [9]], errors={0: "broken", 1: "right"})


# Grammars


def bits_of(allowed: Any) -> bytes:
    "A row of a bitmask that allows these tokens."
    row = np.zeros(VOCAB, np.bool_)
    row[list(allowed)] = True
    return np.packbits(row, bitorder="little").tobytes()


EVEN = bits_of(range(0, VOCAB, 2))


def test_apply_grammar_bitmask() -> None:
    logits = torch.randn(3, 21)
    kept = logits.clone()
    logits[2, 5] = torch.nan
    bits = np.packbits(np.arange(21) % 3 == 0, bitorder="little")
    rows = torch.tensor([1, 2])
    apply_grammar_bitmask(logits, rows, torch.from_numpy(np.stack([bits, bits])))
    assert torch.equal(logits[0], kept[0])
    assert torch.equal(logits[1, ::3], kept[1, ::3]) and logits[1].isneginf().sum() == 14
    assert logits[2, 5].isnan()  # a broken row stays broken
    none = torch.zeros(1, 3, dtype=torch.uint8)
    apply_grammar_bitmask(logits, torch.tensor([0]), none)
    assert logits[0].isnan().any()


@pytest.mark.parametrize("params", [GREEDY, RANDOM, SamplingParams(temperature=1, top_k=9)])
def test_a_bitmask_holds_for_its_sequence_only(worker: Worker, params: Any) -> None:
    wanted = alone(worker, PROMPT, 8, params, seed=2)
    assert any(token % 2 for token in wanted)
    order = {
        "new_seqs": [new(i, PROMPT, blocks(i), params, seed=2) for i in (1, 2)],
        "num_scheduled_tokens": {1: 5, 2: 5},
    }
    got: dict[int, list[int]] = {1: [], 2: []}
    for _ in range(8):
        out = tokens_of(step(worker, **order, grammar_bitmask={2: [EVEN]}))
        for i, tokens in out.items():
            got[i] += tokens
        order = {"num_scheduled_tokens": {1: 1, 2: 1}}
    assert got[1] == wanted
    assert not any(token % 2 for token in got[2])


def test_each_row_behind_a_draft_has_its_own_bits(worker: Worker) -> None:
    "Only 40, then only 41, then only 42: a draft of 40 and 41 is accepted, and 42 follows."
    step(worker, new_seqs=[new(1, PROMPT, blocks(1))], num_scheduled_tokens={1: 5})
    rows = [bits_of([token]) for token in (40, 41, 42)]
    out = step(
        worker,
        scheduled_spec_decode_tokens={1: [40, 41]},
        grammar_bitmask={1: rows},
        num_scheduled_tokens={1: 3},
    )
    assert tokens_of(out) == {1: [40, 41, 42]}


def test_bits_with_log_probabilities_bans_and_several_samples(worker: Worker) -> None:
    """Scores are the model's own; min_tokens and allowed ids hold beside the grammar; n samples
    share one row of bits; nothing left is an error of that request.
    """
    (plain,) = step(
        worker,
        new_seqs=[new(1, PROMPT, blocks(1), num_logprobs=VOCAB)],
        num_scheduled_tokens={1: 5},
    ).logprobs[0]
    scores = dict(plain[2])
    worker.reset()
    likeliest = sorted(range(0, VOCAB, 2), key=scores.__getitem__)[::-1]
    no_stop = SamplingParams(temperature=0, min_tokens=3, all_stop_token_ids=[likeliest[0]])
    odd = SamplingParams(temperature=0, allowed_token_ids=[1, 3, 5])
    out = step(
        worker,
        new_seqs=[
            new(1, PROMPT, blocks(1), num_logprobs=1),
            new(2, PROMPT, blocks(2), no_stop),
            new(3, PROMPT, blocks(3), odd),
            new(4, PROMPT, blocks(4), RANDOM, num_samples=3),
        ],
        grammar_bitmask={i: [EVEN] for i in (1, 2, 3, 4)},
        num_scheduled_tokens={1: 5, 2: 5, 3: 5, 4: 5},
    )
    assert out.sampled_token_ids[:3] == [[likeliest[0]], [likeliest[1]], [-1]]
    assert "grammar" in out.errors[2]
    assert out.logprobs[0][0][0] == pytest.approx(scores[likeliest[0]], abs=1e-5)
    assert len(out.sampled_token_ids) == 6 and all(t % 2 == 0 for [t] in out.sampled_token_ids[3:])


# Adapters


class AddsPerAdapter(LinearMethod):
    "Another method's product, and a vector for each adapter: it asks the step which token has which."

    def __init__(self, method: LinearMethod, size: int):
        self.method = method
        self.vectors = 5 * torch.randn(4, size, generator=torch.Generator().manual_seed(1))
        self.vectors[0] = 0

    def create_weights(self, *args: Any) -> None:
        raise AssertionError("the weights are there")

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.method.apply(layer, x)
        ids = get_forward_context().adapter_ids
        return y if ids is None else y + self.vectors[ids]


def test_each_token_has_the_adapter_of_its_request(tiny: tuple[str, Any]) -> None:
    """A batch of adapters 0, 1 and 2, prompts beside decodes and a fork: each as alone. A plain
    step after it is one without adapters.
    """
    worker = start(tiny[0], max_num_seqs=6)
    model = worker.model_runner.model
    recorded = worker.model_runner.graphs
    last = model.model.layers[-1].mlp.down_proj
    last.linear_method = AddsPerAdapter(last.linear_method, model.lm_head.input_size)
    wanted = {i: alone(worker, PROMPT, 5, RANDOM, seed=9, adapter_id=i) for i in range(4)}
    assert len({tuple(tokens) for tokens in wanted.values()}) == 4
    got: dict[int, list[int]] = {i: [] for i in range(1, 5)}
    orders: list[dict[str, Any]] = [
        {"num_scheduled_tokens": {2: 5, 1: 5}, "new_seqs": [1, 2]},
        {"num_scheduled_tokens": {1: 1, 2: 1, 3: 2}, "new_seqs": [3]},
        {"num_scheduled_tokens": {1: 1, 2: 1, 3: 3, 4: 5}, "new_seqs": [4]},
        {"num_scheduled_tokens": {1: 1, 2: 1, 3: 1, 4: 1}, "new_seqs": []},
    ]
    for order in orders:
        # sequence i has adapter i - 1
        order["new_seqs"] = [
            new(i, PROMPT, blocks(i), RANDOM, seed=9, adapter_id=i - 1) for i in order["new_seqs"]
        ]
        for i, tokens in tokens_of(step(worker, **order)).items():
            got[i] += tokens
    assert got == {i: wanted[i - 1][: len(tokens)] for i, tokens in got.items()}
    out = step(
        worker,
        forked_seqs=[ForkedSequenceData(7, 4, 9)],
        new_token_ids={7: got[4][-1:]},
        finished_seq_ids=[1, 2, 3, 4],
        num_scheduled_tokens={7: 1},
    )
    assert tokens_of(out) == {7: wanted[3][2:3]}
    state = worker.model_runner.input_batch
    assert state.adapter_ids[state.slot_of[7]] == 3
    if recorded:  # no recording knows adapters
        assert worker.model_runner.graphs is recorded


# Embeddings


def embedding(worker: Worker, tokens: list[int], offset: int) -> PromptEmbedding:
    "These tokens' own embeddings, as if they came from elsewhere."
    values = worker.model_runner.model.model.embed_tokens(torch.tensor(tokens)).float().numpy()
    return PromptEmbedding(offset, "", values.tobytes(), len(tokens))


@pytest.mark.parametrize("chunks", [[9], [3, 6], [4, 1, 4], [1] * 9])
def test_embeddings_in_place_of_prompt_tokens(worker: Worker, chunks: list[int]) -> None:
    """Two pieces of a prompt are embeddings, whatever ids stand there: as if they were these
    tokens, however the prompt is cut, beside other requests, and again after a preemption.
    """
    text = [11, 12, 13, 14, 15, 16, 17, 18, 19]
    wanted = alone(worker, text, 6, GREEDY)
    other = alone(worker, PROMPT, 12, GREEDY)
    placeholder = [11, 12, 0, 0, 0, 16, 17, 0, 0]
    assert alone(worker, placeholder, 6, GREEDY) != wanted
    parts = [embedding(worker, text[2:5], 2), embedding(worker, text[7:], 7)]
    beside = step(worker, new_seqs=[new(2, PROMPT, blocks(2))], num_scheduled_tokens={2: 5})
    of_other = list(tokens_of(beside)[2])
    for _ in range(2):  # preempted after it began, and computed again
        tokens = []
        order: dict[str, Any] = {
            "new_seqs": [new(1, placeholder, blocks(1), prompt_embeddings=parts)],
        }
        for num_tokens in [*chunks, 1]:
            out = tokens_of(step(worker, **order, num_scheduled_tokens={2: 1, 1: num_tokens}))
            order = {}
            tokens += out.get(1, [])
            of_other += out[2]
        assert tokens == wanted[:2]
        assert not worker.model_runner.input_batch.prompt_embeddings  # they are in the cache now
        step(worker, finished_seq_ids=[1])
    assert of_other[:12] == other[: len(of_other)]


def test_a_fork_inherits_embeddings(worker: Worker) -> None:
    text = [11, 12, 13, 14, 15]
    wanted = alone(worker, text, 3, GREEDY)
    parts = [embedding(worker, text[3:], 3)]
    order = new(1, [11, 12, 13, 0, 0], blocks(1), prompt_embeddings=parts)
    step(worker, new_seqs=[order], num_scheduled_tokens={1: 2})
    out = step(
        worker,
        forked_seqs=[ForkedSequenceData(2, 1, 0)],
        finished_seq_ids=[1],
        num_scheduled_tokens={2: 3},
    )
    assert tokens_of(out) == {2: wanted[:1]}


# Weights that are packed two to an element


class PackedLinearMethod(LinearMethod):
    "Weights are whole numbers from -128 to 127 over 64; two neighbours of a row are one int16."

    def create_weights(
        self,
        layer: LinearBase,
        input_size: int,
        output_sizes: list[int],
        bias: bool,
        dtype: torch.dtype,
    ) -> None:
        shape = (sum(output_sizes), input_size // 2)
        layer.qweight = nn.Parameter(torch.empty(shape, dtype=torch.int16), requires_grad=False)
        set_weight_attrs(
            layer.qweight,
            {
                "output_dim": 0,
                "input_dim": 1,
                "pack_factors": {1: 2},
                "weight_loader": partial(default_weight_loader, output_sizes=output_sizes),
            },
        )

    def apply(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        return x @ (layer.qweight.view(torch.int8).to(x.dtype) / 64).T


class PackedByRows(PackedLinearMethod):
    "The same, but two rows of a matrix share an element."

    def create_weights(
        self,
        layer: LinearBase,
        input_size: int,
        output_sizes: list[int],
        bias: bool,
        dtype: torch.dtype,
    ) -> None:
        halves = [size // 2 for size in output_sizes]
        shape = (sum(halves), input_size)
        layer.qweight = nn.Parameter(torch.empty(shape, dtype=torch.int16), requires_grad=False)
        set_weight_attrs(
            layer.qweight,
            {
                "output_dim": 0,
                "input_dim": 1,
                "pack_factors": {0: 2},
                "weight_loader": partial(default_weight_loader, output_sizes=halves),
            },
        )

    def apply(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        pairs = layer.qweight.view(torch.int8).unflatten(1, (-1, 2))
        return x @ (pairs.transpose(1, 2).flatten(0, 1).to(x.dtype) / 64).T


class PackedConfig:
    "Packs the matrices of attention and MLP; the head stays as it is."

    def __init__(self, method: type[LinearMethod]):
        self.method = method

    def get_quant_method(self, layer: LinearBase, prefix: str) -> LinearMethod:
        packed = (QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear)
        return self.method() if isinstance(layer, packed) else UnquantizedLinearMethod()


def pack(weight: torch.Tensor, method: type[LinearMethod]) -> torch.Tensor:
    "[rows, columns] of multiples of 1/64 as int16."
    numbers = (weight * 64).round().to(torch.int8)
    if method is PackedByRows:
        numbers = numbers.unflatten(0, (-1, 2)).transpose(1, 2).flatten(1)
    return numbers.contiguous().view(torch.int16)


METHODS = {"columns": PackedLinearMethod, "rows": PackedByRows}
PACKED_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class PackedCheckpoint:
    "What the registry makes of a `quantization_config`."

    @classmethod
    def from_config(cls, fields: dict[str, Any]) -> PackedConfig:
        return PackedConfig(METHODS[fields["packed"]])


@pytest.fixture(scope="module", params=list(METHODS))
def packed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    "A checkpoint with packed weights, and transformers' model with the same ones unpacked."
    path = tmp_path_factory.mktemp("packed")
    hf_model = make_tiny("llama", path)
    state = hf_model.state_dict()
    for name in [name for name in state if name.split(".")[-2] in PACKED_NAMES]:
        state[name].copy_((state[name] * 64).round().clamp(-128, 127) / 64)
        state[name.replace(".weight", ".qweight")] = pack(state.pop(name), METHODS[request.param])
    for file in path.glob("*.safetensors"):
        file.unlink()
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, path / "model.safetensors"
    )
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "two_to_one", "packed": request.param}
    (path / "config.json").write_text(json.dumps(config))
    return path, hf_model


@pytest.fixture(autouse=True)
def two_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.QUANTIZATION_METHODS, "two_to_one", PackedCheckpoint)


def test_packed_weights_in_the_engine(packed: tuple[Path, Any]) -> None:
    "Through the registry and the loader: the tokens of the unpacked model."
    path, hf_model = packed
    prompts = random_sequences(VOCAB, (5, 11))
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 4}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(path), num_gpu_blocks_override=64, **options) as llm:
        kinds = llm.apply_model(
            lambda model: {
                type(m.linear_method).__name__ for m in model.modules() if isinstance(m, LinearBase)
            }
        )[0]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert len(kinds) == 2 and "UnquantizedLinearMethod" in kinds
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    assert tokens == [greedy(hf_model, prompt, 8) for prompt in prompts]


@torch.inference_mode()
def test_packed_weights_on_two_ranks(packed: tuple[Path, Any]) -> None:
    "Each rank reads its half of every packed matrix from the file; the tokens are the same."
    path, hf_model = packed
    config = make_config(str(path))
    prompt = random_sequences(VOCAB, (6,))[0]

    def tokens(parallel: ParallelState) -> tuple[list[int], int]:
        ranked = Ranked(hf_model, parallel)  # for its pages; the weights are those of the file
        model = get_model(config, make_context(config, parallel))
        ranked.model = model
        ranked.layers = list(attention_layers(model).values())
        size = sum(p.nbytes for name, p in model.named_parameters() if "qweight" in name)
        return ranked.greedy(prompt, 8), size

    ((alone, whole),) = run_ranks(tokens, 1)
    halves = run_ranks(tokens, 2)
    assert alone == greedy(hf_model, prompt, 8)
    assert [text for text, _ in halves] == [alone] * 2
    assert [size for _, size in halves] == [whole // 2] * 2


def test_a_part_of_an_element_is_refused() -> None:
    "Three columns for each of two ranks, two to an element."
    linear = Partition(6, [4], range(3), [range(4)])
    param = nn.Parameter(torch.zeros(4, 1, dtype=torch.int16), requires_grad=False)
    set_weight_attrs(param, {"output_dim": 0, "input_dim": 1, "pack_factors": {1: 2}})
    linear.attach([param])
    with pytest.raises(WeightsError, match="each 2 rows .* tensor_parallel_size"):
        param.weight_loader(param, torch.zeros(4, 3, dtype=torch.int16))
    with pytest.raises(WeightsError, match=r"has shape \(4, 6\), the model needs \(4, 4\)"):
        whole = Partition(8, [4], range(4), [range(4)])
        whole.load(default_weight_loader, param, torch.zeros(4, 6))


def test_an_unknown_quantization_is_refused_by_name() -> None:
    config = LlamaConfig(quantization_config={"quant_method": "one_to_two"})
    with pytest.raises(NotSupportedYet, match="one_to_two"):
        registry.get_model_class(config)


class PackedExperts(PackedLinearMethod):
    "Experts' matrices, packed."

    def apply_grouped(self, layer: Any, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        matrices = layer.qweight.view(torch.int8).to(x.dtype) / 64
        num_experts = len(ends)
        return rows_of_each_expert(x, matrices.unflatten(0, (num_experts, -1)), ends)


@torch.inference_mode()
def test_experts_are_packed_where_a_method_can_multiply_them() -> None:
    "Of a method without `apply_grouped` they stay plain; on one rank and on two."
    generator = torch.Generator().manual_seed(0)
    whole = {
        "w13": torch.randint(-99, 99, (4 * 2 * 12, 16), generator=generator) / 64,
        "w2": torch.randint(-99, 99, (4 * 16, 12), generator=generator) / 64,
    }
    x = torch.randn(9, 16, generator=generator)
    logits = torch.randn(9, 4, generator=generator)

    def run(method: type[LinearMethod] | None, parallel: ParallelState) -> torch.Tensor:
        quant = PackedConfig(method) if method else None
        context = ModelContext(TorchSDPABackend, 4, torch.float32, quant, parallel)
        experts = FusedMoE(4, 2, 16, 12, context)
        for name, weight in whole.items():
            layer = getattr(experts, name)
            if method is PackedExperts:
                param = layer.qweight
                param.weight_loader(param, pack(weight, PackedLinearMethod))
            else:
                layer.weight.weight_loader(layer.weight, weight)
        return experts(x, logits)

    plain = run(None, ParallelState())
    assert torch.equal(run(PackedLinearMethod, ParallelState()), plain)
    torch.testing.assert_close(run(PackedExperts, ParallelState()), plain)
    for half in run_ranks(partial(run, PackedExperts), 2):
        torch.testing.assert_close(half, plain)
