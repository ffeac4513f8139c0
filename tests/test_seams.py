"""What is to come needs no change of the core: drafts, grammars, adapters and images, each as a few
lines over the engine's public places, with nothing of the part under test replaced.
"""

import random
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import TINY, VOCAB, make_tiny, random_prompts
from test_async_scheduling import num_ahead
from test_seams_worker import AddsPerAdapter
from transformers import MistralConfig

from teachvllm import LLM, SamplingParams
from teachvllm.core.block_manager import BlockSpaceManager
from teachvllm.core.scheduler import Scheduler
from teachvllm.messages import EngineCoreRequest, ModelRunnerOutput, PromptEmbedding
from teachvllm.sampling_params import BeamSearchParams
from teachvllm.sequence import Sequence, SequenceGroup

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 80,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_model_len": 100,
    "disable_log_stats": True,
    "device": "cpu",
}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
RANDOM = SamplingParams(temperature=1, max_tokens=20, ignore_eos=True, seed=3)
PROMPTS = random_prompts(5, longest=20, seed=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    "A tiny Llama: its folder, and transformers' model."
    path = tmp_path_factory.mktemp("llama")
    return str(path), make_tiny("llama", path)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    "The same with a sliding window."
    path = tmp_path_factory.mktemp("window")
    llama = TINY["llama"]().to_dict() | {"architectures": None, "head_dim": 16}
    with patch.dict(TINY, window=lambda: MistralConfig(**{**llama, "sliding_window": 9})):
        return str(path), make_tiny("window", path)


def core_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]


@contextmanager
def engine(tiny: tuple[str, Any], **options: Any) -> Any:
    "An engine that leaves no block behind."
    with LLM(tiny[0], **{**OPTIONS, **options}) as llm:
        yield llm
        manager = core_of(llm).scheduler.block_manager
        manager.check_integrity()
        assert manager.get_num_free_gpu_blocks() == manager.num_gpu_blocks


def answers(llm: LLM, params: Any, prompts: list[list[int]] = PROMPTS) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def num_steps(llm: LLM, run: Callable[[], Any]) -> tuple[Any, int]:
    with llm.record() as trace:
        result = run()
    return result, sum(1 for step in trace.steps if step.num_scheduled_tokens)


# Drafts


class Oracle:
    "Knows what each sequence will write, and is right about each of the next tokens so often."

    def __init__(self, texts: list[list[int]], num_drafts: int, share: float, seed: int = 0):
        self.texts = texts
        self.num_drafts = num_drafts
        self.share = share
        self.rng = random.Random(seed)

    def __call__(self, scheduler: Scheduler) -> dict[int, list[int]]:
        return {seq_id: self.next_of(seq.token_ids) for seq_id, (_, seq) in scheduler.seqs.items()}

    def next_of(self, token_ids: list[int]) -> list[int]:
        known = len(token_ids)
        whole = next((text for text in self.texts if text[:known] == token_ids), token_ids)
        right = whole[known : known + self.num_drafts]
        return [t if self.rng.random() < self.share else self.rng.randrange(VOCAB) for t in right]


def draft_in_workers(core: Any, guess: Callable[[list[int]], list[int]]) -> None:
    "The step's tokens bring drafts with them, as from a model beside the model."
    collect = core.executor.collect

    def with_drafts() -> ModelRunnerOutput:
        out = collect()
        for seq_id, token_ids in zip(out.seq_ids, out.sampled_token_ids, strict=True):
            if seq_id in core.scheduler.seqs:
                _, seq = core.scheduler.seqs[seq_id]
                out.draft_token_ids[seq_id] = guess(seq.token_ids + token_ids)
        return out

    core.executor.collect = with_drafts


def want_drafts(core: Any, names: str | None = None) -> None:
    "The requests whose names end so want drafts; None: all."
    core.preparers.append(
        lambda request, group: setattr(
            group, "wants_drafts", names is None or request.request_id[-1] in names
        )
    )


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
@pytest.mark.parametrize("source", ["drafter", "workers"])
def test_drafts_that_are_right_save_steps(
    tiny: tuple[str, Any], source: str, params: SamplingParams, asynchronous: bool
) -> None:
    "All are accepted: a quarter of the steps, and the same tokens."
    with engine(tiny, async_scheduling=asynchronous) as llm:
        expected, steps = num_steps(llm, lambda: answers(llm, params))
        texts = [p + tokens for p, [tokens] in zip(PROMPTS, expected, strict=True)]
        oracle = Oracle(texts, num_drafts=3, share=1)
        want_drafts(core_of(llm))
        if source == "drafter":
            core_of(llm).drafter = oracle
        else:
            draft_in_workers(core_of(llm), oracle.next_of)
        got, fewer = num_steps(llm, lambda: answers(llm, params))
    assert got == expected
    # a prompt's step brings one token, each later one four
    assert fewer <= 1 + -(-(params.max_tokens - 1) // 4) + 1 < steps


@pytest.mark.parametrize("source", ["drafter", "workers"])
def test_requests_without_drafts_run_ahead_of_those_with(
    tiny: tuple[str, Any], source: str
) -> None:
    "A drafter alone holds up none; of two requests only the one that wants drafts waits for them."
    with engine(tiny, async_scheduling=True) as llm:
        core = core_of(llm)
        with llm.record() as plain:
            expected = answers(llm, GREEDY, PROMPTS[:2])
        texts = [p + tokens for p, [tokens] in zip(PROMPTS, expected, strict=False)]
        oracle = Oracle(texts, num_drafts=3, share=1)
        if source == "drafter":
            core.drafter = oracle
        else:
            draft_in_workers(core, oracle.next_of)
        with llm.record() as unwanted:
            assert answers(llm, GREEDY, PROMPTS[:2]) == expected
        assert num_ahead(unwanted) == num_ahead(plain) > 10
        want_drafts(core, "w")
        with_drafts = []
        schedule = core.scheduler.schedule

        def watched() -> Any:
            out = schedule()
            with_drafts.extend(core.scheduler.seqs[i][0] for i in out.scheduled_spec_decode_tokens)
            return out

        core.scheduler.schedule = watched
        for name, prompt in zip(("w", "-"), PROMPTS, strict=False):
            llm.llm_engine.add_request(name, prompt, GREEDY)
        done = {}
        with llm.record() as both:
            while llm.llm_engine.has_unfinished_requests():
                done |= {o.request_id: o for o in llm.llm_engine.step() if o.finished}
    assert [[done[name].outputs[0].token_ids] for name in ("w", "-")] == expected
    assert len(with_drafts) >= 4 and {group.request_id for group in with_drafts} == {"w"}
    assert num_ahead(both) > 10


FAULTY: dict[str, Callable[[list[int]], Any]] = {
    "raises": lambda token_ids: 1 // 0,
    "no list": lambda token_ids: 5,
    "no ids": lambda token_ids: ["a", None],
    "beyond the vocabulary": lambda token_ids: [VOCAB, 5],
    "negative": lambda token_ids: [7, -3, 2],
    "some": lambda token_ids: [7] if len(token_ids) % 3 else 1 // 0,
}


@pytest.mark.parametrize("source", ["drafter", "workers"])
@pytest.mark.parametrize("fault", FAULTY)
def test_a_fault_in_drafts_costs_no_request(tiny: tuple[str, Any], fault: str, source: str) -> None:
    "Nor an output that is complete in that step: the requests end one after the other."
    if source == "workers" and fault in ("raises", "some"):
        pytest.skip("that is a fault of the step")
    params = [replace(GREEDY, max_tokens=n) for n in (3, 5, 9, 9, 13)]
    with engine(tiny) as llm:
        expected = answers(llm, params)
        if source == "drafter":
            core_of(llm).drafter = lambda scheduler: {
                seq_id: FAULTY[fault](seq.token_ids) for seq_id, (_, seq) in scheduler.seqs.items()
            }
        else:
            draft_in_workers(core_of(llm), FAULTY[fault])
        assert answers(llm, params) == expected


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("share", [0, 0.5])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("model", ["tiny", "windowed"])
def test_drafts_at_random_change_no_token(
    request: Any, model: str, share: float, full: bool, asynchronous: bool
) -> None:
    "Beside prompts in chunks, several answers, beams and stops, also where requests are preempted."
    tiny = request.getfixturevalue(model)
    blocks = {"tiny": 22, "windowed": 13}[model] if full else 80
    params = [
        replace(GREEDY, logprobs=2),
        RANDOM,
        replace(RANDOM, n=3, seed=5),
        replace(GREEDY, max_tokens=3),
        replace(RANDOM, top_p=0.9, seed=6),
    ]
    options = {"async_scheduling": asynchronous, "max_num_batched_tokens": 16}
    with engine(tiny, **options) as llm:
        expected = answers(llm, params)
        stops = [replace(one, stop_token_ids=expected[i][0][5:6]) for i, one in enumerate(params)]
        stopped = answers(llm, stops)
        scores = llm.generate(PROMPTS[0], params[0], use_tqdm=False)[0].outputs[0].logprobs
    texts = [p + t for p, tokens in zip(PROMPTS, expected, strict=True) for t in tokens]
    with engine(tiny, num_gpu_blocks_override=blocks, **options) as llm:
        want_drafts(core_of(llm), "02468")
        core_of(llm).drafter = Oracle(texts, num_drafts=4, share=share)
        assert answers(llm, params) == expected
        assert answers(llm, stops) == stopped
        again = llm.generate(PROMPTS[0], params[0], use_tqdm=False)[0].outputs[0].logprobs
        assert [list(one) for one in again] == [list(one) for one in scores]
        assert bool(llm.get_metrics()["num_preemptions"]) == full


# Grammars


class Compilation:
    "Takes so many steps."

    name = "grammar"

    def __init__(self, num_steps: int):
        self.num_steps = num_steps

    def is_ready(self) -> bool:
        self.num_steps -= 1
        return self.num_steps < 0


class EvenIds:
    "A grammar whose sentences are even numbers."

    MASK = bytes([0b01010101]) * (-(-VOCAB // 8))

    def bitmask(self, output_token_ids: list[int], drafts: list[int]) -> list[bytes]:
        return [self.MASK] * (1 + len(drafts))


def test_a_beam_search_with_a_grammar_is_refused(tiny: tuple[str, Any]) -> None:
    "It chooses among scores that no mask has seen; a grammar is never passed over silently."
    with LLM(tiny[0], **OPTIONS) as llm:
        core_of(llm).preparers.append(lambda _, group: setattr(group, "grammar", EvenIds()))
        with pytest.raises(ValueError, match="beam search with a grammar"):
            llm.beam_search([[5, 6, 7]], BeamSearchParams(2, 8, True))
        (answer,) = llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
        assert not any(token_id % 2 for token_id in answer.outputs[0].token_ids)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("blocks", [80, 22])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_grammar_that_is_compiled_while_others_go_on(
    tiny: tuple[str, Any], drafts: bool, blocks: int, asynchronous: bool
) -> None:
    "Its requests are passed over for two steps, write even ids only, forked or preempted; others any."

    def prepare(request: EngineCoreRequest, group: SequenceGroup) -> None:
        if request.request_id.startswith("even"):
            group.grammar = EvenIds()
            group.prerequisites = [Compilation(2)]

    # the last is preempted first
    params = {"even": RANDOM, "any": RANDOM, "any2": GREEDY, "even2": replace(RANDOM, n=3)}
    requests = dict(zip(params, PROMPTS, strict=False))

    def run(llm: LLM) -> tuple[dict[str, list[list[int]]], Any]:
        with llm.record() as trace:
            for name, prompt in requests.items():
                llm.llm_engine.add_request(name, prompt, params[name])
            done = {}
            while llm.llm_engine.has_unfinished_requests():
                done |= {o.request_id: o for o in llm.llm_engine.step() if o.finished}
        return {name: [a.token_ids for a in done[name].outputs] for name in params}, trace

    with engine(tiny, num_gpu_blocks_override=blocks, async_scheduling=asynchronous) as llm:
        alone = [answers(llm, params[name], [requests[name]])[0] for name in ("any", "any2")]
        core_of(llm).preparers.append(prepare)
        tokens, trace = run(llm)
        if drafts:
            texts = [requests[name] + ids for name in params for ids in tokens[name]]
            core_of(llm).drafter = Oracle(texts, 3, 0.8)
            want_drafts(core_of(llm), "n2")  # "any" runs ahead
            expected = tokens
            tokens, trace = run(llm)
            assert tokens == expected
    assert [tokens["any"], tokens["any2"]] == alone
    assert all(t % 2 == 0 for name in ("even", "even2") for ids in tokens[name] for t in ids)
    assert any(t % 2 for t in tokens["any"][0]) and len(tokens["even2"]) == 3
    waiting = [step.not_ready for step in trace.steps if step.not_ready]
    assert waiting and set(waiting[0]) == {"even", "even2"}
    assert set(waiting[0].values()) == {"grammar"}
    assert {"any", "any2"} <= set(trace.steps[0].num_scheduled_tokens)
    preempted = {name for step in trace.steps for name in step.preempted}
    assert ({"even2", "even2.1", "even2.2"} <= preempted) == (blocks == 22)


class MasksOf:
    "A grammar whose masks are wrong."

    def __init__(self, num_bytes: int, count: int | None = None):
        self.num_bytes = num_bytes
        self.count = count

    def bitmask(self, output_token_ids: list[int], drafts: list[int]) -> list[bytes]:
        count = 1 + len(drafts) if self.count is None else self.count
        return [b"\x55" * self.num_bytes] * count


@pytest.mark.parametrize("grammar", [MasksOf(3), MasksOf(16, 0), MasksOf(16, 2)])
def test_masks_of_a_wrong_size_end_their_request_only(
    tiny: tuple[str, Any], grammar: MasksOf
) -> None:
    "Too few bytes for the vocabulary, no mask for a token, or one too many."
    with engine(tiny) as llm:
        expected = answers(llm, GREEDY, PROMPTS[:1])
        core_of(llm).preparers.append(
            lambda request, group: setattr(
                group, "grammar", grammar if request.request_id == "bad" else None
            )
        )
        for name in ("good", "bad", "good too"):
            llm.llm_engine.add_request(name, PROMPTS[0], GREEDY)
        done = {}
        while llm.llm_engine.has_unfinished_requests():
            done |= {o.request_id: o for o in llm.llm_engine.step() if o.finished}
    bad = done.pop("bad").outputs[0]
    assert bad.finish_reason == "error" and "mask" in bad.stop_reason
    assert [[o.outputs[0].token_ids] for o in done.values()] == expected * 2


def test_a_grammar_that_cannot_be_compiled_ends_its_request_only(tiny: tuple[str, Any]) -> None:
    class Broken:
        name = "grammar"

        def is_ready(self) -> bool:
            raise ValueError("no such rule: root")

    def prepare(request: EngineCoreRequest, group: SequenceGroup) -> None:
        if request.request_id == "broken":
            group.prerequisites = [Broken()]

    with engine(tiny) as llm:
        core_of(llm).preparers.append(prepare)
        for name in ("broken", "sound"):
            llm.llm_engine.add_request(name, [5, 6, 7], GREEDY)
        done = {}
        while llm.llm_engine.has_unfinished_requests():
            done |= {o.request_id: o for o in llm.llm_engine.step() if o.finished}
    broken, sound = (done[name].outputs[0] for name in ("broken", "sound"))
    assert broken.finish_reason == "error" and "no such rule: root" in broken.stop_reason
    assert sound.finish_reason == "length" and len(sound.token_ids) == 20


# Adapters


def test_each_request_of_a_batch_has_its_adapter(tiny: tuple[str, Any]) -> None:
    "Each answers as alone, and no prefix is shared between two adapters, or with none."
    prompt = [7] * 20

    def prepare(request: EngineCoreRequest, group: SequenceGroup) -> None:
        group.first_seq.adapter_id = int(request.request_id[-1])

    def run(llm: LLM, names: list[str]) -> dict[str, Any]:
        for name in names:
            llm.llm_engine.add_request(name, prompt, replace(GREEDY, max_tokens=6))
        done = {}
        while llm.llm_engine.has_unfinished_requests():
            done |= {o.request_id: o for o in llm.llm_engine.step() if o.finished}
        return done

    with engine(tiny, enable_prefix_caching=True, enforce_eager=True) as llm:
        [model] = llm.collective_rpc(lambda worker: worker.model_runner.model)
        last = model.model.layers[-1].mlp.down_proj
        last.linear_method = AddsPerAdapter(last.linear_method, model.lm_head.input_size)
        core_of(llm).preparers.append(prepare)
        alone = {}
        for i in range(3):
            llm.reset_prefix_cache()
            alone |= run(llm, [f"alone {i}"])
        llm.reset_prefix_cache()
        first = run(llm, ["a 0", "b 1", "c 2"])
        again = run(llm, ["d 0", "e 1", "f 2"])
    for done in (first, again):
        tokens = [output.outputs[0].token_ids for output in done.values()]
        assert tokens == [alone[f"alone {i}"].outputs[0].token_ids for i in range(3)]
    assert len({str(alone[name].outputs[0].token_ids) for name in alone}) == 3
    assert [output.num_cached_tokens for output in first.values()] == [0, 0, 0]
    assert [output.num_cached_tokens for output in again.values()] == [16, 16, 16]


# Images


def test_embeddings_in_place_of_placeholder_tokens(tiny: tuple[str, Any]) -> None:
    """Three tokens' places hold a picture's vectors: transformers with these embeddings writes the
    same. The same picture is found in the cache, another one shares nothing behind it.
    """
    prompt = [11, 12, 13, 14, 15, 0, 0, 0, 16, 17, 18, 19, 20]
    generator = torch.Generator().manual_seed(0)
    embed = tiny[1].get_input_embeddings()
    pictures = [torch.randn(3, embed.embedding_dim, generator=generator) for _ in range(2)]
    expected = []
    for picture in pictures:
        inputs = embed(torch.tensor([prompt])).detach().clone()
        inputs[0, 5:8] = picture
        with torch.no_grad():
            ids = tiny[1].generate(
                inputs_embeds=inputs,
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=6,
                min_new_tokens=6,
                do_sample=False,
            )
        expected.append(ids[0].tolist())

    def prepare(request: EngineCoreRequest, group: SequenceGroup) -> None:
        which = int(request.request_id[-1])
        values = pictures[which].numpy().tobytes()
        group.first_seq.prompt_embeddings = [PromptEmbedding(5, f"picture {which}", values, 3)]

    with engine(tiny, enable_prefix_caching=True, max_num_batched_tokens=8) as llm:
        core_of(llm).preparers.append(prepare)
        cached = []
        for name in ("a 0", "b 1", "c 0", "d 1"):
            llm.llm_engine.add_request(name, prompt, replace(GREEDY, max_tokens=6))
            while llm.llm_engine.has_unfinished_requests():
                done = llm.llm_engine.step()
            assert done[0].outputs[0].token_ids == expected[int(name[-1])], name
            cached.append(done[0].num_cached_tokens)
    assert cached == [0, 4, 12, 12]  # the first block of four is before the picture


WRONG_VECTORS = {
    "values has 9": [PromptEmbedding(1, "x", b"123456789", 1)],
    "values has 512": [PromptEmbedding(1, "x", bytes(2 * 4 * 64), 1)],
    "places 3 to 6": [PromptEmbedding(3, "x", bytes(3 * 4 * 64), 3)],
    "places -1 to 1": [PromptEmbedding(-1, "x", bytes(2 * 4 * 64), 2)],
    "places 2 to 2": [PromptEmbedding(2, "x", b"", 0)],
    "before it ends at 3": [PromptEmbedding(i, "x", bytes(2 * 4 * 64), 2) for i in (1, 2)],
}


@pytest.mark.parametrize("why", WRONG_VECTORS)
def test_embeddings_that_do_not_fit_are_refused(tiny: tuple[str, Any], why: str) -> None:
    "With the field's name, before they can fail a step; a request beside it notices nothing."

    def prepare(request: EngineCoreRequest, group: SequenceGroup) -> None:
        group.first_seq.prompt_embeddings = WRONG_VECTORS[why] * (request.request_id == "bad")

    with engine(tiny) as llm:
        core_of(llm).preparers.append(prepare)
        llm.llm_engine.add_request("good", [5, 6, 7, 8], GREEDY)
        with pytest.raises(ValueError, match=rf"prompt_embeddings\[[01]\]: .*{why}"):
            llm.llm_engine.add_request("bad", [5, 6, 7, 8], GREEDY)
        while llm.llm_engine.has_unfinished_requests():
            done = llm.llm_engine.step()
    assert [o.request_id for o in done] == ["good"] and len(done[0].outputs[0].token_ids) == 20


# Layers of two kinds


@pytest.mark.xfail(
    reason="the block manager has one block table a sequence, for all layers", strict=True
)
def test_layers_with_a_window_hold_fewer_blocks_than_those_without() -> None:
    """A model in which some layers have a window keeps all blocks for all of them today. It needs a
    table for each kind of layer (vLLM: KV cache groups), each with its window and its own ids; a
    prefix is found only where all kinds have it, and a block's bytes are those of one kind.
    """
    manager = BlockSpaceManager(4, 40, window=(None, 8))  # type: ignore[arg-type]
    seq = Sequence(0, [1] * 32)
    manager.allocate(seq)
    full, windowed = manager.block_tables[seq.seq_id]
    assert len(full) == 8 and sum(i >= 0 for i in windowed) <= 3


def test_beams_go_on_beside_drafts_and_grammars(tiny: tuple[str, Any]) -> None:
    "A beam search, whose sequences have neither, beside a request with drafts."
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    with engine(tiny) as llm:
        expected = answers(llm, GREEDY, PROMPTS[:1])
        beams = [o.token_ids for o in llm.beam_search([PROMPTS[1]], params)[0].outputs]
        core_of(llm).drafter = Oracle([PROMPTS[0] + expected[0][0]], 3, 1)
        llm.llm_engine.add_request("beams", PROMPTS[1], params)
        llm.llm_engine.add_request("drafts", PROMPTS[0], GREEDY)
        done = {}
        while llm.llm_engine.has_unfinished_requests():
            done |= {o.request_id: o for o in llm.llm_engine.step() if o.finished}
    assert [o.token_ids for o in done["beams"].outputs] == beams
    assert [o.token_ids for o in done["drafts"].outputs] == expected[0]
