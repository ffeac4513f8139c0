"""Prompts and parameters on their way in: what is refused and in which words, what a chat becomes,
where EOS comes from.
"""

import asyncio
import itertools
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from helpers import make_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from teachvllm import LLM, EngineArgs, SamplingParams
from teachvllm.config import NotSupportedYet
from teachvllm.engine.llm_engine import Processor
from teachvllm.entrypoints.protocol import ChatCompletionRequest, CompletionRequest
from teachvllm.entrypoints.serving import OpenAIServing
from teachvllm.inputs import (
    IncrementalDetokenizer,
    InputProcessor,
    apply_chat_template,
    get_default_sampling_params,
    get_eos_token_ids,
    get_tokenizer,
)
from teachvllm.outputs import CompletionOutput, RequestOutput
from teachvllm.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    StructuredOutputsParams,
)

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 16,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def smollm():
    "Configuration and tokenizer of the default model."
    config = EngineArgs(max_model_len=1024).create_engine_config().model_config
    return config, get_tokenizer(config.tokenizer)


def model_config(folder: Path, generation: dict | None = None, **config):
    "A folder without weights, and the configuration of a model in it."
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return (
        EngineArgs(str(folder), load_format="dummy", skip_tokenizer_init=True)
        .create_engine_config()
        .model_config
    )


# Words that people search for


def test_refusals_have_the_phrases_that_vllm_has(smollm) -> None:
    process = InputProcessor(*smollm)
    for prompt, phrase in (
        ("", "The decoder prompt cannot be empty"),
        ([], "The decoder prompt cannot be empty"),
        ([1] * 1024, "longer than the maximum model length of 1024"),
        ([10**6], "out of vocabulary"),
        ([-1], "out of vocabulary"),
    ):
        with pytest.raises(ValueError, match=phrase):
            process(prompt, SamplingParams())


def test_a_far_too_long_prompt_is_refused_by_its_beginning(smollm) -> None:
    """All of it would take about twenty seconds: the tokenizer sees some characters for each token
    that would fit.
    """
    config, tokenizer = smollm
    seen = []

    def counting(text: str, **options):
        seen.append(len(text))
        return tokenizer(text, **options)

    process = InputProcessor(config, counting)
    with pytest.raises(ValueError, match="maximum model length of 1024"):
        process("word " * 3_000_000, SamplingParams())
    assert sum(seen) <= 32 * 1024
    assert len(process("word " * 20_000, SamplingParams(truncate_prompt_tokens=8))[1]) == 8
    assert seen[-1] == 100_000, "of a text that is truncated the end counts: all of it is tokenized"
    text = " " * 40_000 + "a"  # runs of spaces are few tokens: not refused by their characters
    assert len(process(text, SamplingParams())[1]) < 1024


def test_a_cache_salt_is_carried_to_the_core(smollm) -> None:
    "By a prompt of either kind, whatever the request asks for; not into the log."
    config = EngineArgs(max_model_len=1024).create_engine_config()
    process = Processor(config, smollm[1])
    salted: list[Any] = [{"prompt": "Hi"}, {"prompt_token_ids": [5, 6]}]
    for params in (SamplingParams(), BeamSearchParams(beam_width=2, max_tokens=3)):
        for prompt in salted:
            request, _ = process("a", prompt | {"cache_salt": "tenant"}, params)
            assert request.cache_salt == "tenant"
            assert process("a", prompt, params)[0].cache_salt is None
    for wrong in ("", 5, b"tenant", "\ud800"):
        with pytest.raises(ValueError, match="cache_salt"):
            process("a", {"prompt": "Hi", "cache_salt": wrong}, SamplingParams())


@pytest.mark.parametrize("chat", [True, False])
def test_a_served_cache_salt_is_in_the_prompt_and_not_in_the_log(
    smollm, chat: bool, caplog: pytest.LogCaptureFixture
) -> None:
    "And a request id with a new line makes no second line in the log."
    sent = []

    class Engine:
        model_config = smollm[0]
        tokenizer = smollm[1]
        processor = SimpleNamespace(input_processor=InputProcessor(*smollm))

        async def generate(self, prompt: Any, *args: Any, **options: Any):
            sent.append(prompt)
            answer = CompletionOutput(0, "yes", [5], finish_reason="stop")
            yield RequestOutput("a", None, [6], [answer], True)

    serving = OpenAIServing(Engine(), log_requests=True)  # type: ignore[arg-type]
    common = {"cache_salt": "tenant 7", "request_id": "a\nINFO forged", "max_tokens": 2}
    make: Any = serving.create_chat_completion if chat else serving.create_completion
    request: Any
    if chat:
        request = ChatCompletionRequest(messages=[{"role": "user", "content": "Hi"}], **common)
    else:
        request = CompletionRequest(prompt=["Hi", "Ho"], **common)
    logger = logging.getLogger("teachvllm")
    logger.addHandler(caplog.handler)  # also where another test has ended its propagation
    try:
        with caplog.at_level(logging.INFO, "teachvllm"):
            asyncio.run(make(request))
    finally:
        logger.removeHandler(caplog.handler)
    assert sent and all(prompt["cache_salt"] == "tenant 7" for prompt in sent)
    lines = {record.getMessage() for record in caplog.records}
    assert len(lines) == len(sent)
    assert not any("\n" in line or "tenant 7" in line for line in lines)


# Parameters


def test_params_survive_msgpack() -> None:
    params = SamplingParams(
        n=2,
        best_of=3,
        temperature=0.5,
        top_k=7,
        seed=3,
        stop="x",
        stop_token_ids=(5, 6),
        max_tokens=None,
        min_tokens=2,
        output_kind=RequestOutputKind.FINAL_ONLY,
        truncate_prompt_tokens=9,
        presence_penalty=0.5,
        bad_words="no",
        logprobs=-1,
        bad_words_token_ids=[[1, 2]],
        all_stop_token_ids=[3],
        logit_bias={3: 1.5},
        allowed_token_ids=(3, 4),
        extra_args={"a": 1},
    )
    assert msgspec.msgpack.Decoder(SamplingParams).decode(msgspec.msgpack.encode(params)) == params
    beam = BeamSearchParams(beam_width=3, max_tokens=7, length_penalty=0.5)
    assert msgspec.msgpack.Decoder(BeamSearchParams).decode(msgspec.msgpack.encode(beam)) == beam


def test_greedy_sampling_has_one_answer() -> None:
    for options in ({"n": 2}, {"best_of": 2}, {"n": 2, "best_of": 2}):
        with pytest.raises(ValueError, match="n must be 1 when using greedy sampling, got 2"):
            SamplingParams(temperature=0, **options)
    with pytest.raises(
        ValueError, match="best_of must be greater than or equal to n, got n=3 and best_of=2"
    ):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(ValueError, match="must be greater than or equal to 0"):
        SamplingParams(min_tokens=-1)


def test_what_is_not_there_is_refused_by_name() -> None:
    asking = {"thinking_token_budget": 100, "repetition_detection": {"max_pattern_size": 8}}
    for name, value in asking.items():
        with pytest.raises(NotSupportedYet, match=f"`{name}="):
            SamplingParams(**{name: value})
    neutral = SamplingParams(
        thinking_token_budget=None, guided_decoding=None, bad_words=[], logit_bias={}, logprobs=None
    )
    assert neutral.temperature == 1 and not hasattr(neutral, "thinking_token_budget")


def test_what_an_answer_must_be_is_said_once() -> None:
    regex = StructuredOutputsParams(regex="a+")
    assert SamplingParams(guided_decoding=regex).constraint is regex
    assert SamplingParams(structured_outputs=regex).constraint is regex
    assert StructuredOutputsParams(json=False).kind == "json"  # a schema, which nothing fits
    with pytest.raises(ValueError, match="give one of them"):
        SamplingParams(guided_decoding=regex, structured_outputs=regex)
    with pytest.raises(ValueError, match="must be a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a+"})
    wrong: dict[str, dict[str, Any]] = {
        "use one kind of structured outputs constraint": {},
        "only use one kind of structured outputs, not json, regex": {"regex": "a", "json": {}},
        "choice='yes' must be a list of texts": {"choice": "yes"},
        "must be a list of texts, at least one": {"choice": []},
        "regex='' must be a text": {"regex": ""},
        "must be a JSON schema": {"json": 5},
        "whitespace_pattern=5 must be a regex": {"json": {}, "whitespace_pattern": 5},
        "structural_tag=5 must be a dict": {"structural_tag": 5},
        "not JSON": {"structural_tag": {"structures": {1}}},
    }
    for words, asked in wrong.items():
        with pytest.raises(ValueError, match=words):
            StructuredOutputsParams(**asked)


def test_recommendations_are_followed(tmp_path: Path) -> None:
    "Qwen2.5 recommends a repetition penalty: `generate()` without parameters must have it."
    config = model_config(tmp_path, {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05})
    params = get_default_sampling_params(config)
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.7, 20, 1.05)


# EOS


def test_eos_is_what_the_files_say_not_transformers_default(tmp_path: Path) -> None:
    assert LlamaConfig().eos_token_id == 2, "transformers' default for a Llama"
    assert get_eos_token_ids(model_config(tmp_path)) == frozenset()
    config = model_config(tmp_path, {"eos_token_id": [5, 6]}, eos_token_id=7)
    assert get_eos_token_ids(config) == {5, 6, 7}


@pytest.mark.parametrize(
    ("overrides", "ends"),
    [
        ({"eos_token_id": 9}, {5, 9}),
        ({"eos_token_id": [9, 10]}, {5, 9, 10}),
        ({"eos_token_id": None}, {5}),
        ({}, {5, 7}),
        (
            lambda hf_config: (
                setattr(hf_config, "eos_token_id", hf_config.eos_token_id + 1) or hf_config
            ),
            {5, 8},
        ),
    ],
)
def test_eos_may_be_overridden(tmp_path: Path, overrides: Any, ends: set[int]) -> None:
    "In place of what config.json says; the other places count beside it."
    model_config(tmp_path, {"eos_token_id": 5}, eos_token_id=7)
    args = EngineArgs(
        str(tmp_path), load_format="dummy", skip_tokenizer_init=True, hf_overrides=overrides
    )
    assert get_eos_token_ids(args.create_engine_config().model_config) == ends


def test_an_overridden_eos_ends_an_answer(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    options: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "num_gpu_blocks_override": 8,
    }
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(str(tmp_path), generation_config="vllm", **options) as llm:
        whole = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0].token_ids
    end = whole[5]
    overrides = {"eos_token_id": end}
    with LLM(str(tmp_path), generation_config="vllm", hf_overrides=overrides, **options) as llm:
        answer = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0]
    assert answer.token_ids == whole[: whole.index(end) + 1] and answer.finish_reason == "stop"
    for wrong in ("</s>", [1, "2"], 1.5, "", {}, 0.0):
        with pytest.raises(ValueError, match="hf_overrides: eos_token_id="):
            LLM(str(tmp_path), hf_overrides={"eos_token_id": wrong}, **options)


def test_eos_of_a_gguf_file_is_its_headers(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from teachvllm.transformers_utils import load_hf_config

    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for name, value in (
        ("context_length", 64),
        ("block_count", 1),
        ("feed_forward_length", 16),
        ("embedding_length", 16),
    ):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_uint32("llama.vocab_size", 32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = load_hf_config(tmp_path / "a.gguf")
    assert config.eos_token_id is None
    assert config.architectures == ["LlamaForCausalLM"]  # as the converted folder's
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] is None


# Text that grows


class Bytes:
    "A tokenizer whose tokens are bytes; 256 is a special token. It counts the ids that it decodes."

    num_decoded = 0

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True, **_: Any) -> str:
        self.num_decoded += len(token_ids)
        special = "" if skip_special_tokens else "<end>"
        pieces = []
        for is_special, run in itertools.groupby(token_ids, key=lambda i: i == 256):
            count = list(run)
            pieces.append(special * len(count) if is_special else count)
        if skip_special_tokens:  # they do not divide what stands to their left and right
            return self.text_of([i for i in token_ids if i != 256])
        return "".join(p if isinstance(p, str) else self.text_of(p) for p in pieces)

    def text_of(self, data: list[int]) -> str:
        return bytes(data).decode("utf-8", "replace")


class ByteFallback(Bytes):
    "As Llama's: of a run of bytes that is no text, every byte is U+FFFD."

    def text_of(self, data: list[int]) -> str:
        try:
            return bytes(data).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(data)


def streamed(
    tokenizer: Any, prompt: list[int], pieces: list[list[int]], **options: bool
) -> tuple[str, str]:
    "The text that pieces of an output bring one by one, and the one that they have at last."
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **options)
    shown = ""
    for piece in pieces:
        detokenizer.append(piece)
        shown += detokenizer.update()
    return shown + detokenizer.update(last=True), detokenizer.text


ANY_BYTES = st.lists(
    st.sampled_from([0x61, 0x20, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x8E, 0x89, 0xFF, 256]),
    max_size=40,
)


@given(
    st.text("a é€🎉\ufffd", max_size=4),
    ANY_BYTES,
    st.lists(st.integers(1, 5), min_size=40, max_size=40),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_any_bytes_stream_to_the_text_that_they_have_at_once(
    prompt: str, output: list[int], sizes: list[int], skip: bool
) -> None:
    ids = [*prompt.encode()]
    cuts = [0, *itertools.accumulate(sizes)]
    pieces = [output[a:b] for a, b in itertools.pairwise(cuts)]
    before = Bytes().decode(ids)
    whole = Bytes().decode(ids + output, skip_special_tokens=skip)[len(before) :]
    for parts in ([[i] for i in output], pieces, [output]):
        assert streamed(Bytes(), ids, parts, skip_special_tokens=skip) == (whole, whole)


@given(
    st.text("a é€🎉\ufffd", max_size=8),
    st.text("a é€🎉\ufffd", min_size=1, max_size=30),
    st.integers(1, 5),
)
@settings(max_examples=150, deadline=None)
def test_text_in_single_bytes_is_shown_as_it_is(prompt: str, text: str, size: int) -> None:
    "Also U+FFFD itself, which a text may have, in rows."
    output = [*text.encode()]
    for tokenizer in (Bytes(), ByteFallback()):
        for parts in ([[i] for i in output], [output[i : i + size] for i in range(0, 120, size)]):
            assert streamed(tokenizer, [*prompt.encode()], parts) == (text, text)


@pytest.mark.parametrize("tokenizer", [Bytes, ByteFallback])
@pytest.mark.parametrize("output", [[0xFF], [0x20, 256], [256], [0xEF, 0xBF, 0xBD], [0xC3, 256]])
def test_work_grows_with_the_length_where_no_text_comes(tokenizer: Any, output: list[int]) -> None:
    "Bytes that are no text, and special tokens, both of which show nothing for long."
    work = {}
    for length in (250, 2000):
        counting = tokenizer()
        ids = (output * length)[:length]
        streamed(counting, [0x61], [[i] for i in ids])
        work[length] = counting.num_decoded
    assert work[2000] < 10 * work[250]
    assert work[2000] < 2000 * 200


def test_nonsense_is_shown_before_the_end() -> None:
    detokenizer = IncrementalDetokenizer(Bytes(), [0x61])
    shown = []
    for _ in range(12):
        detokenizer.append([0xFF])
        shown.append(detokenizer.update())
    assert "".join(shown[:6]) != "" and len("".join(shown)) >= 8


# Chat


def test_a_message_in_openais_parts_is_its_text(smollm) -> None:
    tokenizer = smollm[1]
    parts = [
        {"type": "text", "text": "What is the capital of France?"},
        {"type": "text", "text": "In one word."},
    ]
    plain = [{"role": "user", "content": "What is the capital of France?\nIn one word."}]
    assert apply_chat_template(
        tokenizer, [{"role": "user", "content": parts}]
    ) == apply_chat_template(tokenizer, plain)
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(ValueError, match="'image_url'.*not a multimodal model"):
        apply_chat_template(tokenizer, picture)


def test_tools_that_the_template_ignores_are_refused(smollm) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "now"}}]
    with pytest.raises(ValueError, match="tools= has no effect"):
        apply_chat_template(smollm[1], messages, tools=tools)
    knows = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}"
    assert smollm[1].decode(apply_chat_template(smollm[1], messages, knows, tools=tools)) == "nowHi"
    assert apply_chat_template(smollm[1], messages, tools=[]) == apply_chat_template(
        smollm[1], messages
    )


def test_a_template_that_fails_without_tools_uses_them(smollm) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    template = "{% for t in tools %}{{t.function.name}}{% endfor %}{{messages[0].content}}"
    ids = apply_chat_template(smollm[1], [{"role": "user", "content": "Hi"}], template, tools=tools)
    assert smollm[1].decode(ids) == "fHi"
    with pytest.raises(ValueError, match="the chat template cannot take these messages"):
        apply_chat_template(smollm[1], [{"role": "user", "content": "Hi"}], template)


def test_a_tokenizer_that_needs_sentencepiece_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "A folder with a tokenizer.model only: the library that reads it is an extra."
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr("teachvllm.inputs.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"teachvllm\[sentencepiece\]"):
        get_tokenizer(tmp_path)
