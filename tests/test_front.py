"""Several tokens at once, texts that cannot be decoded, two threads that generate, and steps decided ahead while a request
is swapped out.
"""

import threading
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teachvllm.config import SchedulerConfig
from teachvllm.core.block_manager import BlockSpaceManager
from teachvllm.core.extensions import LookAhead, Swapping
from teachvllm.core.orders import SchedulerOutput
from teachvllm.core.scheduler import Scheduler
from teachvllm.engine.output_processor import OutputProcessor
from teachvllm.llm import LLM
from teachvllm.messages import EngineCoreOutput, EngineCoreRequest
from teachvllm.outputs import CompletionOutput
from teachvllm.sampling_params import RequestOutputKind, SamplingParams
from teachvllm.sequence import SequenceGroup, SequenceStatus

# Several tokens of a sequence in one message

PIECES = ["a", "b", "ab", "ba", " ", "abc", "<end>"]
END = PIECES.index("<end>")


class Pieces:
    "Tokens are the short texts above, the last of them a special token."

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True, **_: Any) -> str:
        return "".join(PIECES[i] for i in token_ids if i != END or not skip_special_tokens)


class Bytes:
    "Tokens are bytes."

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


def messages(token_ids: list[int], sizes: list[int], reason: str | None) -> list[EngineCoreOutput]:
    """What the core says of one sequence, in messages of these sizes. The last has the reason, and
    a log-probability stands beside each token.
    """
    outputs = []
    total = 0.0
    at = 0
    while at < len(token_ids):
        new = token_ids[at : at + sizes[len(outputs) % len(sizes)]]
        values = [-0.1 * (at + i + 1) for i in range(len(new))]
        scores = [(value, 1, [(i, value)]) for i, value in zip(new, values)]
        for score in scores:
            total += score[0]
        at += len(new)
        output = EngineCoreOutput("a", 0, new, cumulative_logprob=total, new_logprobs=scores)
        if at == len(token_ids) and reason:
            output.finish_reason = reason
            output.request_finished = True
        outputs.append(output)
    return outputs


def answer(
    tokenizer: Any, arriving: list[EngineCoreOutput], params: SamplingParams
) -> tuple[list[CompletionOutput], list[tuple[str, int | None]]]:
    "What a user gets of these messages, and what the core is told to end."
    processor = OutputProcessor(tokenizer)
    processor.add_request(EngineCoreRequest("a", [0], params, seed=0), None)
    found = []
    ended: list[tuple[str, int | None]] = []
    for output in arriving:
        outputs, aborts = processor.process_outputs([output])
        found += [part for one in outputs for part in one.outputs]
        ended += aborts
        if found and found[-1].finish_reason:
            break
    return found, ended


def joined(pieces: list[CompletionOutput]) -> CompletionOutput:
    "The answer that the pieces of a stream are."
    return replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        token_ids=[i for piece in pieces for i in piece.token_ids],
        logprobs=[entry for piece in pieces for entry in piece.logprobs or ()],
    )


def oracle(token_ids: list[int], stops: list[str]) -> tuple[str, int, str] | None:
    "The text, the number of tokens and the stop string where the first is complete; None: none is."
    for num in range(1, len(token_ids) + 1):
        text = Pieces().decode(token_ids[:num])
        if found := [(text.find(stop), stop) for stop in stops if stop in text]:
            place, stop = min(found)
            return text[:place], num, stop
    return None


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=30),
    st.lists(st.integers(1, 5), min_size=1, max_size=8),
    st.lists(st.text("abc ", min_size=1, max_size=4), max_size=3),
    st.sampled_from(["stop", "length"]),
)
@settings(max_examples=200, deadline=None)
def test_a_stop_string_cuts_within_a_message(
    token_ids: list[int], sizes: list[int], stops: list[str], reason: str
) -> None:
    "The text, the tokens and the log-probabilities, also where EOS or the length's end is there."
    if reason == "stop":
        token_ids = [*token_ids, END]
    params = SamplingParams(
        max_tokens=99, stop=stops, logprobs=1, output_kind=RequestOutputKind.FINAL_ONLY
    )
    [end], ended = answer(Pieces(), messages(token_ids, sizes, reason), params)
    expected = oracle(token_ids, stops)
    if expected is None:
        assert (end.text, end.finish_reason) == (Pieces().decode(token_ids), reason)
        assert end.token_ids == token_ids and ended == []
    else:
        text, num, stop = expected
        assert (end.text, end.finish_reason, end.stop_reason) == (text, "stop", stop)
        assert end.token_ids == token_ids[:num]
    assert end.logprobs is not None and len(end.logprobs) == len(end.token_ids)
    values = [entry[i].logprob for i, entry in zip(end.token_ids, end.logprobs)]
    assert end.cumulative_logprob == pytest.approx(sum(values))


@given(
    st.lists(st.sampled_from([0x61, 0x62, 0x20, 0xC3, 0xA9, 0xF0, 0x9F, 0x8E, 0x89]), max_size=30),
    st.lists(st.integers(1, 5), min_size=1, max_size=8),
    st.lists(st.text("ab é🎉\ufffd", min_size=1, max_size=3), max_size=3),
    st.integers(0, 8),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
)
@settings(max_examples=200, deadline=None)
def test_messages_of_any_size_are_one_answer(
    token_ids: list[int],
    sizes: list[int],
    stops: list[str],
    min_tokens: int,
    include: bool,
    reason: str,
) -> None:
    "Bytes, of which many are half characters: the same answer, and pieces that add up to it."
    token_ids = [0x61, *token_ids, 0x62]
    params = SamplingParams(
        max_tokens=99,
        min_tokens=min_tokens,
        stop=stops,
        include_stop_str_in_output=include,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    [single], _ = answer(Bytes(), messages(token_ids, [1], reason), params)
    [whole], _ = answer(Bytes(), messages(token_ids, sizes, reason), params)
    assert asdict(whole) == asdict(single)
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        streaming = replace(params, output_kind=kind)
        pieces, _ = answer(Bytes(), messages(token_ids, sizes, reason), streaming)
        last = joined(pieces) if kind is RequestOutputKind.DELTA else pieces[-1]
        assert asdict(last) == asdict(single)
        if kind is RequestOutputKind.CUMULATIVE:
            assert all(single.text.startswith(piece.text) for piece in pieces)


def test_the_end_token_is_searched_only_where_it_is_shown() -> None:
    "As in vLLM: a stop string in the text of a stop token counts with include_stop_str_in_output."
    for include, expected in ((False, ("ab", None)), (True, ("ab<end>", "<end>"))):
        params = SamplingParams(
            stop="<end>",
            skip_special_tokens=False,
            include_stop_str_in_output=include,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        [end], ended = answer(Pieces(), messages([0, 1, END], [3], "stop"), params)
        assert (end.text, end.stop_reason) == expected and end.finish_reason == "stop"
        assert end.token_ids == [0, 1, END] and ended == []


def test_the_core_is_told_when_its_last_news_is_of_another_sequence() -> None:
    """n=2: a stop string ends one sequence, and before the core hears of it, a stop token ends the
    other. The core will not say that the request has ended: its client must be told.
    """
    for together in (False, True):
        processor = OutputProcessor(Pieces())
        params = SamplingParams(n=2, stop="b", temperature=1)
        processor.add_request(EngineCoreRequest("a", [0], params, seed=0), None)
        first = EngineCoreOutput("a", 0, [1])
        second = EngineCoreOutput("a", 1, [0, END], "stop")
        steps = [[first, second]] if together else [[first], [second]]
        found = [processor.process_outputs(step) for step in steps]
        assert [abort for _, aborts in found for abort in aborts] == [("a", 0), ("a", None)]
        assert found[-1][0][0].finished and not processor.request_states


# What one request must not do to the others


class PickyTokenizer:
    "Decodes ids below 100 only, as a tokenizer does whose model has a padded vocabulary."

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return "".join("abcdefghij"[i % 10] for i in token_ids if i < 100 or [][i])


def test_a_text_that_cannot_be_decoded_ends_its_own_request_only() -> None:
    for more in ({}, {"stop": ["zz"]}, {"output_kind": RequestOutputKind.DELTA}):
        processor = OutputProcessor(PickyTokenizer())
        for name in ("bad", "good"):
            processor.add_request(
                EngineCoreRequest(name, [1, 2], SamplingParams(max_tokens=9, **more), seed=0), "bc"
            )
        outputs = []
        aborts = []
        for token_ids in ((3, 3), (500, 4), (5, 5)):
            news = [
                EngineCoreOutput(n, 0, [i])
                for n, i in zip(("bad", "good"), token_ids)
                if n in processor.request_states
            ]
            made, ended = processor.process_outputs(news)
            outputs = outputs + made
            aborts = aborts + ended
        [end] = [output for output in outputs if output.request_id == "bad" and output.finished]
        assert end.outputs[0].finish_reason == "error" and "IndexError" in str(
            end.outputs[0].stop_reason
        )
        texts = [output.outputs[0].text for output in outputs if output.request_id == "good"]
        assert ("".join(texts) if "output_kind" in more else texts[-1]) in (
            "def",
            "de",
        )  # a stop string holds text back
        assert list(processor.request_states) == ["good"]
        assert aborts == [("bad", None)]


def test_a_second_thread_in_generate_is_refused(folder: str) -> None:
    with LLM(folder, skip_tokenizer_init=True, dtype="float32", num_gpu_blocks_override=32) as llm:
        started = threading.Event()
        refused = []

        def slow_hook(*_: Any) -> None:
            if not started.is_set():
                started.set()
                thread.join()

        def second() -> None:
            started.wait()
            try:
                llm.generate([1, 2], SamplingParams(max_tokens=2), use_tqdm=False)
            except ValueError as error:
                refused.append(str(error))

        thread = threading.Thread(target=second)
        thread.start()
        llm.collective_rpc(
            lambda worker: worker.model_runner.model.register_forward_pre_hook(slow_hook)
        )
        [output] = llm.generate(
            [[3, 4]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False
        )
        assert len(output.outputs[0].token_ids) == 3 and "another thread" in refused[0]
        assert llm.generate([5], SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


def test_requests_share_cached_blocks_with_their_own_salt_only(folder: str) -> None:
    sizes = {"num_gpu_blocks_override": 32, "block_size": 8}
    how = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
    ids = list(range(5, 45))
    params = SamplingParams(temperature=0, max_tokens=2)
    with LLM(folder, **sizes, **how, enable_prefix_caching=True) as llm:
        found = []
        texts = set()
        for salt in (None, None, "a", "a", "b", None):
            salted = {} if salt is None else {"cache_salt": salt}
            prompt = {"prompt_token_ids": ids, **salted}
            [output] = llm.generate(prompt, params, use_tqdm=False)
            found.append(output.num_cached_tokens)
            texts.add(tuple(output.outputs[0].token_ids))
    assert found == [0, 32, 0, 32, 0, 32] and len(texts) == 1


@pytest.mark.parametrize("num_tokens, ahead", [(8, True), (24, False)])
def test_no_step_ahead_that_would_preempt_for_a_swapped_request(
    num_tokens: int, ahead: bool
) -> None:
    "A request that is swapped out outranks the running one: it needs that one's blocks, or not."
    manager = BlockSpaceManager(4, 8, 8)
    config = SchedulerConfig(max_model_len=64, policy="priority")
    scheduler = Scheduler(config, manager, Swapping(manager, "swap"))

    def add(name: str, priority: int, num_tokens: int = 8) -> SequenceGroup:
        group = SequenceGroup(
            name, scheduler.make_seq([1] * num_tokens, 0, 40), SamplingParams(), priority=priority
        )
        scheduler.add_request(group)
        return group

    high = add("high", 0)
    scheduler.schedule()
    scheduler.preemption.preempt(high, SchedulerOutput())
    assert high.status is SequenceStatus.SWAPPED
    prompt = [1] * num_tokens
    low = SequenceGroup("low", scheduler.make_seq(prompt, 0, 40), SamplingParams(), priority=5)
    scheduler.add_request(low)
    scheduler.swapped.remove(high)  # hidden for one step, so that the other one runs
    look_ahead = LookAhead(scheduler)
    look_ahead.expect(scheduler.schedule())
    scheduler.swapped.add(high)
    add("waits", 9, num_tokens=28)
    assert low.status is SequenceStatus.RUNNING and scheduler.waiting.peek().request_id == "waits"  # type: ignore[union-attr]
    assert look_ahead.can_run_ahead() is ahead
    out = scheduler.schedule()
    assert out.preempted_request_ids == ([] if ahead else ["low"])
