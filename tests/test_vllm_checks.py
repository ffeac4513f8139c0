"""What vLLM's documentation promises of a request, checked afresh: why it ends, how long it may be,
what is left behind.

The model is a tiny one with random weights and SmolLM2's tokenizer. Where a test needs certain
words, a logits processor makes the model say them. What other files check already (ranks,
penalties, preemption, aborts) is not repeated here.
"""

import gc
import inspect
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import greedy, make_tiny, random_prompts
from speaker import EOS, make_speaker

from teachvllm import LLM, CompletionOutput, RequestOutputKind, SamplingParams
from teachvllm.config import NotSupportedYet
from teachvllm.sampling_params import BeamSearchParams
from teachvllm.worker import memory_profiling

BASE = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 128}
# bytes of the speaker's block: layers, keys and values, tokens, four heads of 16, float32
BLOCK = 2 * 2 * 16 * 64 * 4
PROMPT = "The president of the United States is"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("speaker")
    make_speaker(path)
    return str(path)


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, **BASE) as llm:
        yield llm


# The methods' arguments

# those of vLLM 0.8.5's LLM with the names of their parameters, and (after a bar) what 0.33.0 has
# beside
METHODS = {
    "generate": "prompts sampling_params prompt_token_ids use_tqdm lora_request prompt_adapter_request "
    "guided_options_request "
    "priority | tokenization_kwargs mm_processor_kwargs",
    "chat": "messages sampling_params use_tqdm lora_request chat_template "
    "chat_template_content_format add_generation_prompt "
    "continue_final_message tools mm_processor_kwargs | chat_template_kwargs tokenization_kwargs",
    "beam_search": "prompts params | lora_request use_tqdm concurrency_limit",
    "encode": "prompts pooling_params prompt_token_ids use_tqdm lora_request prompt_adapter_request "
    "| pooling_task "
    "tokenization_kwargs",
    "embed": (
        "prompts use_tqdm pooling_params lora_request prompt_adapter_request | tokenization_kwargs"
    ),
    "classify": "prompts use_tqdm lora_request prompt_adapter_request | tokenization_kwargs",
    "score": (
        "text_1 text_2 truncate_prompt_tokens use_tqdm lora_request prompt_adapter_request | "
        "tokenization_kwargs"
    ),
    "get_tokenizer": "lora_request",
    "set_tokenizer": "tokenizer",
    "get_default_sampling_params": "",
    "collective_rpc": "method timeout args kwargs",
    "apply_model": "func",
    "start_profile": "",
    "stop_profile": "",
    "reset_prefix_cache": "device | reset_running_requests reset_connector",
    "sleep": "level",
    "wake_up": "tags",
}
NEUTRAL = {
    "chat_template_content_format": "auto",
    "reset_running_requests": False,
    "reset_connector": False,
}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_knows_vllms_arguments(method: str) -> None:
    parameters = inspect.signature(getattr(LLM, method)).parameters
    takes_others = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = set(METHODS[method].replace("|", "").split())
    assert names <= parameters.keys() | (LLM.NOT_YET.keys() if takes_others else set())


def test_arguments_that_ask_for_nothing_are_accepted_and_others_refused_by_name(
    llm: LLM, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    short = SamplingParams(max_tokens=1)
    with LLM(folder, task="embed", **BASE) as embedder:
        calls: dict[str, Callable] = {
            "generate": lambda **more: llm.generate("Hi", short, False, **more),
            "chat": lambda **more: llm.chat(chat, short, False, **more),
            "beam_search": lambda **more: llm.beam_search("Hi", BeamSearchParams(1, 1), **more),
            "encode": lambda **more: embedder.encode("Hi", use_tqdm=False, **more),
            "embed": lambda **more: embedder.embed("Hi", use_tqdm=False, **more),
            "score": lambda **more: embedder.score("Hi", "you", use_tqdm=False, **more),
            "get_tokenizer": llm.get_tokenizer,
            "reset_prefix_cache": llm.reset_prefix_cache,
        }
        seen: set[str] = set()
        for method, call in calls.items():
            takes = inspect.signature(getattr(LLM, method)).parameters
            others = [
                name
                for name in METHODS[method].replace("|", "").split()
                if name in LLM.NOT_YET and name not in takes
            ]
            assert call(**{name: NEUTRAL.get(name) for name in others})
            assert call(**dict.fromkeys(others))
            seen |= {*others}
            for name in others:
                with pytest.raises(
                    NotSupportedYet, match=f"LLM: vLLM's `{name}='mine'` is not in teachvllm yet: "
                ):
                    call(**{name: "mine"})
                with pytest.raises(TypeError, match="lora_reqest"):
                    call(lora_reqest=None)
        assert seen >= {"lora_request", "prompt_adapter_request", "device"}
        monkeypatch.setattr("teachvllm.llm.require_pooler", lambda *_, **__: None)
        with pytest.raises(NotSupportedYet, match="prompt_adapter_request"):
            embedder.classify("Hi", prompt_adapter_request=1)


def test_token_ids_in_place_of_use_tqdm_are_refused(llm: LLM) -> None:
    """vLLM 0.8.5 has `prompt_token_ids` third, today's vLLM `use_tqdm`; a list must not count as
    True.
    """
    short = SamplingParams(temperature=0, max_tokens=2)
    for third in ([1, 2], [[1, 2]], None, "yes"):
        with pytest.raises(
            ValueError, match="use_tqdm=.*; token ids go by name: prompt_token_ids="
        ):
            llm.generate(None, short, third)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="use_tqdm="):
            llm.beam_search("Hi", BeamSearchParams(1, 1), third)  # type: ignore[arg-type]
    by_name = llm.generate(None, short, False, prompt_token_ids=[1, 2])
    by_place = llm.generate([1, 2], short, False)
    assert by_name[0].outputs == by_place[0].outputs


def forced(token_ids: list[int]) -> Callable:
    "A logits processor with which the model says `token_ids`."

    def only_the_next(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits = torch.full_like(logits, -torch.inf)
        logits[token_ids[min(len(output_ids), len(token_ids) - 1)]] = 0.0
        return logits

    return only_the_next


def ids_of(llm: LLM, text: str) -> list[int]:
    return llm.get_tokenizer()(text, add_special_tokens=False).input_ids


def say(llm: LLM, said: str | list[int], prompt: Any = PROMPT, **params: Any) -> CompletionOutput:
    "The output of a request whose model says `said`, a text or token ids, after `prompt`."
    token_ids = ids_of(llm, said) if isinstance(said, str) else said
    options = {
        "temperature": 0,
        "max_tokens": len(token_ids),
        "logits_processors": [forced(token_ids)],
    } | params
    return llm.generate(prompt, SamplingParams(**options), use_tqdm=False)[0].outputs[0]


def stream(llm: LLM, said: list[int], **params: Any) -> list[str]:
    "The same, in pieces: what each step gave out."
    options = {
        "temperature": 0,
        "max_tokens": len(said),
        "ignore_eos": True,
        "logits_processors": [forced(said)],
    }
    engine = llm.llm_engine
    pieces = []
    engine.add_request(
        "stream", PROMPT, SamplingParams(**options | params, output_kind=RequestOutputKind.DELTA)
    )
    while engine.has_unfinished_requests():
        pieces += [output.outputs[0].text for output in engine.step()]
    return pieces


# Why a request ends (vLLM: stop_reason is the stop string or token id that was found, None for EOS
# and for a length)

SAID = "one two three, four five"


@pytest.mark.parametrize(
    "params, text, why",
    [
        ({}, SAID, ("length", None)),
        ({"stop": " four"}, "one two three,", ("stop", " four")),
        # the first that is complete
        ({"stop": [" five", "ee,", "three"]}, "one two ", ("stop", "three")),
        ({"stop": "e, f"}, "one two thre", ("stop", "e, f")),  # parts of three tokens
        (
            {"stop": " four", "include_stop_str_in_output": True},
            "one two three, four",
            ("stop", " four"),
        ),
        # found in the last token that it may have
        ({"stop": " five"}, "one two three, four", ("stop", " five")),
        ({"stop": "is one"}, SAID, ("length", None)),  # begins in the prompt, which does not count
        ({"stop": "ONE"}, SAID, ("length", None)),
        ({"stop": " two", "min_tokens": 3}, SAID, ("length", None)),
        ({"max_tokens": 2}, "one two", ("length", None)),
    ],
)
def test_a_stop_string_or_the_length(llm: LLM, params: dict, text: str, why: tuple) -> None:
    output = say(llm, SAID, **params)
    assert (output.text, (output.finish_reason, output.stop_reason)) == (text, why)


@pytest.mark.parametrize(
    "params, text, why",
    [
        ({}, "one two", ("stop", None)),
        (
            {"include_stop_str_in_output": True, "skip_special_tokens": False},
            "one two<|im_end|>",
            ("stop", None),
        ),
        ({"ignore_eos": True}, "one two three", ("length", None)),
        (
            {"ignore_eos": True, "skip_special_tokens": False},
            "one two<|im_end|> three",
            ("length", None),
        ),
        pytest.param({"stop_token_ids": [EOS]}, "one two", ("stop", None)),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, "one two", ("stop", EOS)),
        (
            {"ignore_eos": True, "skip_special_tokens": False, "stop": "<|im_end|>"},
            "one two",
            ("stop", "<|im_end|>"),
        ),
        ({"detokenize": False}, "", ("stop", None)),
    ],
)
def test_eos(llm: LLM, params: dict, text: str, why: tuple) -> None:
    output = say(llm, "one two<|im_end|> three", **params)
    assert (output.text, (output.finish_reason, output.stop_reason)) == (text, why)
    assert (output.token_ids[-1] == EOS) == (why[0] == "stop"), (
        "the token that ended it is among its tokens"
    )


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_kept_and_its_text_is_not(llm: LLM, include: bool) -> None:
    two, three = ids_of(llm, " two three")
    output = say(
        llm, SAID, stop_token_ids=[three, two], stop=["three"], include_stop_str_in_output=include
    )
    assert output.text == ("one two" if include else "one") and output.token_ids == ids_of(
        llm, "one two"
    )
    assert (output.finish_reason, output.stop_reason) == ("stop", two)


def test_the_models_own_eos_ends_it_and_ignore_eos_does_not(
    llm: LLM, folder: str, tmp_path: Path
) -> None:
    "A model whose EOS is a token that it says by itself; it has two, as chat models have."
    free = (
        llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0]
        .outputs[0]
        .token_ids
    )
    make_speaker(tmp_path, eos_token_id=[EOS, free[4]])
    first = free.index(free[4])
    with LLM(str(tmp_path), **BASE) as other:
        for ignore in (False, True):
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=ignore)
            output = other.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
            assert output.token_ids == (free if ignore else free[: first + 1])
            assert (output.finish_reason, output.stop_reason) == (
                "length" if ignore else "stop",
                None,
            )


# Seeds


def test_seeds_repeat_and_what_has_none_does_not(llm: LLM) -> None:
    "In one batch and in the next, with several answers each."
    options = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}
    params = [SamplingParams(**options, seed=seed, n=2) for seed in (7, None, 7, None, 8)]

    def run() -> list[tuple[tuple[int, ...], ...]]:
        outputs = llm.generate([PROMPT] * 5, params, use_tqdm=False)
        return [tuple(tuple(o.token_ids) for o in output.outputs) for output in outputs]

    first = run()
    second = run()
    assert first[0] == first[2] == second[0] == second[2] and first[4] == second[4]
    different = {first[0], first[1], first[3], first[4], second[1], second[3]}
    assert len(different) == 6, "requests without a seed are like no other"
    assert all(a != b for a, b in different), "nor are the two answers of one request"


# The context's length, at 2,047 and 2,048


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    "A tiny model for 2,048 tokens, and transformers' own."
    path = tmp_path_factory.mktemp("long")
    make_tiny("llama", path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    from transformers import AutoModelForCausalLM

    return str(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_context_ends_at_2048(long: tuple[str, Any], asynchronous: bool) -> None:
    path, model = long
    prompt = (random_prompts(1, seed=1)[0] * 2048)[:2049]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    options = {
        "dtype": "float32",
        "device": "cpu",
        "skip_tokenizer_init": True,
        "async_scheduling": asynchronous,
    }
    with LLM(path, num_gpu_blocks_override=400, **options) as llm:
        lengths = [2047, 2040, 2000]
        outputs = llm.generate([prompt[:n] for n in lengths], params, use_tqdm=False)
        for n, output in zip(lengths, outputs, strict=True):
            answer = output.outputs[0]
            room = min(100, 2048 - n)
            assert answer.token_ids == greedy(model, prompt[:n], room), n
            assert (answer.finish_reason, answer.stop_reason) == ("length", None)
        for n in (2048, 2049):
            with pytest.raises(
                ValueError, match=f"{n} tokens.*maximum model length of 2048.*max_model_len"
            ):
                llm.generate(prompt[:n], params, use_tqdm=False)
        cut = replace(params, truncate_prompt_tokens=2047)
        output = llm.generate(prompt, cut, use_tqdm=False)[0]
        assert output.prompt_token_ids == prompt[2:] and len(output.outputs[0].token_ids) == 1
        assert (
            llm.generate([1, 2], replace(params, max_tokens=3), use_tqdm=False)[0]
            .outputs[0]
            .finished()
        )
    with pytest.raises(ValueError, match="max_model_len=2049"):
        LLM(path, max_model_len=2049, num_gpu_blocks_override=400, **options)


# Chunks


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 16, 30])
def test_chunks_change_no_token(long: tuple[str, Any], chunk: int, caching: bool) -> None:
    """As vLLM's test of them: as many sequences as tokens in a step. 30 does not divide a block;
    the second time all is cached.
    """
    path, model = long
    shared = random_prompts(1, seed=2)[0][:1] * 33
    prompts = [shared + prompt for prompt in random_prompts(5, longest=20, seed=3)] + [shared[:32]]
    expected = [greedy(model, prompt, 6) for prompt in prompts]
    sizes = {
        "max_num_seqs": chunk,
        "max_num_batched_tokens": chunk,
        "num_gpu_blocks_override": 200,
        "max_model_len": 200,
    }
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    options = {
        "dtype": "float32",
        "device": "cpu",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": caching,
    }
    with LLM(path, **sizes, **options) as llm:
        for time in (1, 2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            if time == 2:
                assert all((output.num_cached_tokens > 0) == caching for output in outputs)


def test_what_was_written_is_as_likely_as_what_is_read(llm: LLM) -> None:
    "Log-probabilities of decoded tokens equal those of the same tokens in a prompt."
    written = llm.generate(
        PROMPT, SamplingParams(temperature=1, seed=1, max_tokens=12, logprobs=0), use_tqdm=False
    )[0]
    answer = written.outputs[0]
    text = written.prompt_token_ids + answer.token_ids
    read = llm.generate(text, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[
        0
    ].prompt_logprobs
    assert read is not None and answer.logprobs is not None
    for token_id, one, other in zip(
        answer.token_ids, answer.logprobs, read[-len(answer.token_ids) :], strict=True
    ):
        assert one[token_id].logprob == pytest.approx(other[token_id].logprob, abs=1e-3)
        assert (
            abs(one[token_id].rank - other[token_id].rank) <= 2
        )  # far down the list, neighbours differ in the last bits


# Text


TEXTS = {
    "family": "a 👩‍👩‍👧‍👦 family",
    "flags": "🇩🇪🇫🇷🇯🇵 flags",
    "skin": "👍🏽👍🏿 and ❤️‍🔥",
    "devanagari": "नमस्ते दुनिया",
    "hangul": "안녕하세요 한국",
    "thai and combining": "สวัสดี e\u0301 n\u0303 Z\u0351\u036b\u0343",
    "replacement": "a real \ufffd sign \ufffd\ufffd, twice",
    "spaces": "  two  spaces\n\n\n   and\ttabs ",
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_in_a_stream_is_the_text(llm: LLM, name: str) -> None:
    text = TEXTS[name]
    pieces = stream(llm, ids_of(llm, text))
    assert "".join(pieces) == text == say(llm, text).text


def byte_ids(llm: LLM, data: bytes) -> list[int]:
    "A token for each byte, as byte-level BPE has them."
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return llm.get_tokenizer().convert_tokens_to_ids([bytes_to_unicode()[byte] for byte in data])


@pytest.mark.parametrize(
    "data",
    [
        b"\xf4\xef ok",  # beginnings of characters that do not go on
        b"ok \x80\x80\x80 ok",  # continuations of nothing
        b"ok \xf0\x9f\x98 ok",  # three quarters of an emoji
        "🚀".encode()[:3],  # ends inside
        b"\xe6\x97" + "日".encode() + b"\xe6",
        b"\xc3" * 6 + b"\xa9 end",
        b"\xed\xa0\x80 a surrogate, which UTF-8 may not hold",
        # an emoji of seven code units, byte by byte
        b"\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x9a\x80" * 2,
    ],
)
def test_bytes_that_are_no_text_do_no_harm(llm: LLM, data: bytes) -> None:
    """The stream ends with the whole text, as the tokenizer decodes it at once; no piece is taken
    back, nothing raises.
    """
    ids = byte_ids(llm, data)
    assert 0 not in ids, "the tokenizer has no token for one of the bytes"
    pieces = stream(llm, ids)
    whole = say(llm, ids, ignore_eos=True).text
    assert "".join(pieces) == whole == llm.get_tokenizer().decode(ids)


def test_an_emoji_can_be_a_stop_string(llm: LLM) -> None:
    ids = byte_ids(llm, "go 🚀🚀 on".encode())
    output = say(llm, ids, stop="🚀")
    assert (output.text, output.stop_reason) == ("go ", "🚀") and output.token_ids == ids[:7]


# Several answers


def test_answers_have_their_numbers_and_their_own_ends(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=1, temperature=1.0, max_tokens=10, logprobs=0)
    free = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs
    assert [o.index for o in free] == [0, 1, 2, 3] and len({tuple(o.token_ids) for o in free}) == 4
    stop = free[2].token_ids[3]
    outputs = llm.generate(PROMPT, replace(params, stop_token_ids=[stop]), use_tqdm=False)[
        0
    ].outputs
    for before, after in zip(free, outputs, strict=True):
        ends = stop in before.token_ids
        assert (
            after.token_ids
            == before.token_ids[: before.token_ids.index(stop) + 1 if ends else None]
        )
        assert (after.finish_reason, after.stop_reason) == (
            ("stop", stop) if ends else (before.finish_reason, None)
        )
        total = sum(
            entry[i].logprob for i, entry in zip(after.token_ids, after.logprobs, strict=True)
        )
        assert after.cumulative_logprob == pytest.approx(total, abs=1e-4)
    best = llm.generate(PROMPT, replace(params, n=2, best_of=4), use_tqdm=False)[0].outputs
    ranked = sorted(free, key=lambda o: -o.cumulative_logprob)
    assert [o.token_ids for o in best] == [o.token_ids for o in ranked[:2]] and [
        o.index for o in best
    ] == [0, 1]
    assert (
        llm.generate(PROMPT, replace(params, n=1, best_of=1), use_tqdm=False)[0]
        .outputs[0]
        .token_ids
        == free[0].token_ids
    )


def test_more_answers_than_may_run_at_once_are_written_or_refused(folder: str) -> None:
    "Never a request that waits for ever."
    params = SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=4, ignore_eos=True)
    with LLM(folder, **BASE | {"max_num_seqs": 2}) as llm:
        try:
            outputs = llm.generate([PROMPT] * 2, params, use_tqdm=False)
        except ValueError as error:
            assert "max_num_seqs" in str(error)
        else:
            assert [len(output.outputs) for output in outputs] == [3, 3]
        assert llm.generate(PROMPT, replace(params, n=2), use_tqdm=False)[0].finished


# What is left behind


def test_three_engines_side_by_side_and_one_leaves(folder: str) -> None:
    """Each has the memory that it was given, and answers alone, in turns, and after another one was
    closed.
    """
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    options = {"dtype": "float32", "device": "cpu", "max_num_batched_tokens": 64}
    sizes = [1 << 20, 2 << 20, 3 << 20]
    engines = [LLM(folder, kv_cache_memory_bytes=size, **options) for size in sizes]
    try:
        num_blocks = [llm.llm_engine.get_metrics()["num_gpu_blocks"] for llm in engines]
        assert num_blocks == [size // BLOCK for size in sizes]
        expected = [
            llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids for llm in engines
        ]
        assert expected[0] == expected[1] == expected[2]
        for llm in engines:
            llm.llm_engine.add_request("turns", PROMPT, params)
        engines[0].llm_engine.step()
        engines[0].close()
        found = []
        while any(llm.llm_engine.has_unfinished_requests() for llm in engines[1:]):
            for llm in engines[1:]:
                found += [o.outputs[0].token_ids for o in llm.llm_engine.step() if o.finished]
        assert found == expected[1:]
    finally:
        for llm in engines:
            llm.close()


def test_a_fraction_of_the_memory_each(folder: str) -> None:
    "On a CPU `gpu_memory_utilization` is a fraction of what is free, here of one GiB."
    params = SamplingParams(temperature=0, max_tokens=6)
    options = {"dtype": "float32", "device": "cpu", "max_num_batched_tokens": 32, "max_num_seqs": 2}
    with ExitStack() as stack:
        stack.enter_context(patch.object(memory_profiling, "available_memory", lambda: 1 << 30))
        engines = [
            stack.enter_context(LLM(folder, gpu_memory_utilization=part, **options))
            for part in (0.1, 0.2, 0.3)
        ]
        sizes = [llm.llm_engine.get_metrics()["num_gpu_blocks"] * BLOCK / 2**30 for llm in engines]
        # each has a tenth more, whatever else it needs
        for one, next in zip(sizes, sizes[1:], strict=False):
            assert next - one == pytest.approx(0.1, abs=0.02)
        answers = [
            llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids for llm in engines
        ]
        assert answers[0] == answers[1] == answers[2]


def test_del_leaves_no_object_and_no_thread(folder: str) -> None:
    "As vLLM's users do it: without `close`."
    threads = threading.active_count()
    llm = LLM(folder, **BASE)
    llm.generate([PROMPT] * 3, SamplingParams(max_tokens=4), use_tqdm=False)
    worker = llm.collective_rpc(lambda worker: worker)[0]
    parts = [llm.llm_engine, worker, worker.model_runner, worker.model_runner.model]
    left = [weakref.ref(part) for part in [*parts, *worker.model_runner.model.parameters()]]
    del llm, worker, parts
    gc.collect()
    alive = [type(ref()).__name__ for ref in left if ref() is not None]
    assert not alive and threading.active_count() <= threads


def test_del_gives_the_memory_back(folder: str) -> None:
    "In a process of its own; half a GiB of cache, every block of it written."
    code = f"""
import gc, json
import torch
from teachvllm import LLM, SamplingParams
from teachvllm.worker.memory_profiling import process_memory
def use(size):
    llm = LLM({folder!r}, dtype="float32", device="cpu", kv_cache_memory_bytes=size, max_num_batched_tokens=64)
    llm.generate(["{PROMPT}"] * 4, SamplingParams(max_tokens=4), use_tqdm=False)
    llm.collective_rpc(lambda worker: [cache.fill_(1) for cache in worker.cache_engine.gpu_cache] and None)
    during = process_memory()
    del llm
    gc.collect()
    return during
use(1 << 20)
before = process_memory()
print(json.dumps([before, use(1 << 29), process_memory()]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    before, during, after = json.loads(done.stdout.splitlines()[-1])
    assert during - before > 0.4 * 2**30, "the engine must have been seen"
    assert after - before < 50 * 2**20, f"{(after - before) / 2**20:.0f} MiB are left"
