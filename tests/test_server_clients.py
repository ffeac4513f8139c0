"""Clients of the server: OpenAI's Python package, LangChain and lm-eval get the answers that the
engine gives offline.
"""

import base64
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("zmq")

from speaker import make_speaker  # noqa: E402

from teachvllm import LLM, EngineArgs, SamplingParams  # noqa: E402
from teachvllm.entrypoints.api_server import ServerArgs, serve_in_background  # noqa: E402
from teachvllm.sampling_params import BeamSearchParams  # noqa: E402

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 256}
PROMPTS = ["The capital of France is", "Water is made of hydrogen and", "Two plus two is"]
CHAT: list[Any] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is a river?"},
]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("speaker")
    make_speaker(folder)
    return str(folder)


@pytest.fixture(scope="module")
def url(speaker: str) -> Iterator[str]:
    with serve_in_background(
        EngineArgs(speaker, **OPTIONS), ServerArgs(port=0, api_key="k", served_model_name="tiny")
    ) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", timeout=60, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llm(speaker: str) -> Iterator[LLM]:
    with LLM(speaker, **OPTIONS) as llm:
        yield llm


def offline(llm: LLM, prompts: Any, **params: Any) -> list[Any]:
    return [
        output.outputs for output in llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
    ]


def texts(outputs: list[Any]) -> list[str]:
    return [one.text for one in outputs]


# OpenAI's client: completions


def test_completions_are_the_offline_ones(client: Any, llm: LLM) -> None:
    expected = [one for (one,) in offline(llm, PROMPTS, temperature=0, max_tokens=24)]
    answer = client.completions.create(model="tiny", prompt=PROMPTS, temperature=0, max_tokens=24)
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (i, one.text, one.finish_reason) for i, one in enumerate(expected)
    ]
    num_prompt = sum(len(llm.get_tokenizer()(prompt).input_ids) for prompt in PROMPTS)
    num_output = sum(len(one.token_ids) for one in expected)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        num_prompt,
        num_output,
        num_prompt + num_output,
    )
    ids = llm.get_tokenizer()(PROMPTS).input_ids
    for prompt in ids, ids[0], PROMPTS[0]:
        again = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=24)
        assert [c.text for c in again.choices] == texts(expected)[: len(again.choices)]
    assert (
        answer.object == "text_completion"
        and answer.id.startswith("cmpl-")
        and answer.model == "tiny"
    )


def test_streams_add_up_to_the_same(client: Any, llm: LLM) -> None:
    expected = [one for (one,) in offline(llm, PROMPTS, temperature=0, max_tokens=24)]
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(
        model="tiny",
        prompt=PROMPTS,
        temperature=0,
        max_tokens=24,
        stream=True,
        extra_body={"stream_options": options},
    )
    chunks = list(stream)
    found = [
        "".join(c.text for chunk in chunks for c in chunk.choices if c.index == i) for i in range(3)
    ]
    reasons = {
        c.index: c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason
    }
    assert found == texts(expected) and reasons == {
        i: one.finish_reason for i, one in enumerate(expected)
    }
    assert len({chunk.id for chunk in chunks}) == 1
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert (
        counts == sorted(counts)
        and counts[-1] == sum(len(one.token_ids) for one in expected)
        and not chunks[-1].choices
    )


def test_seeds_penalties_and_several_answers(client: Any, llm: LLM) -> None:
    asked: list[tuple[dict, dict]] = [  # OpenAI's own fields, vLLM's
        ({"seed": 3, "temperature": 0.8, "top_p": 0.9}, {"top_k": 20, "min_p": 0.01}),
        ({"seed": 4, "n": 3}, {}),
        ({"seed": 5, "n": 1, "best_of": 3}, {}),
        (
            {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
            {"repetition_penalty": 1.3},
        ),
        ({"temperature": 0, "logit_bias": {"28": 100}}, {"ignore_eos": True, "min_tokens": 9}),
        ({"temperature": 0}, {"allowed_token_ids": [28, 30, 32], "bad_words": ["."]}),
    ]
    for fields, extra in asked:
        bias = {int(i): float(b) for i, b in fields.get("logit_bias", {}).items()} or None
        [expected] = offline(
            llm, PROMPTS[:1], **{**fields, "logit_bias": bias}, **extra, max_tokens=10
        )
        answer = client.completions.create(
            model="tiny", prompt=PROMPTS[0], max_tokens=10, **fields, extra_body=extra
        )
        assert [c.text for c in answer.choices] == texts(expected), fields
        stream = client.completions.create(
            model="tiny", prompt=PROMPTS[0], max_tokens=10, stream=True, **fields, extra_body=extra
        )
        found = [""] * fields.get("n", 1)
        for chunk in stream:
            for c in chunk.choices:
                found[c.index] += c.text
        assert found == texts(expected), fields


@pytest.mark.parametrize("keep", [False, True])
def test_stop_strings(client: Any, llm: LLM, keep: bool) -> None:
    [(whole,)] = offline(llm, PROMPTS[:1], temperature=0, max_tokens=24)
    stop = whole.text[len(whole.text) // 2 :][:5]
    fields: dict = {"temperature": 0, "max_tokens": 24, "stop": ["never there", stop]}
    [(expected,)] = offline(llm, PROMPTS[:1], include_stop_str_in_output=keep, **fields)
    extra = {"include_stop_str_in_output": keep}
    for stream in False, True:
        answer = client.completions.create(
            model="tiny", prompt=PROMPTS[0], stream=stream, extra_body=extra, **fields
        )
        choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
        assert (
            "".join(c.text for c in choices) == expected.text
            and expected.text.endswith(stop) == keep
        )
        assert choices[-1].finish_reason == "stop" and choices[-1].stop_reason == stop


def test_logprobs_and_echo(client: Any, llm: LLM) -> None:
    prompt = PROMPTS[0]
    tokenizer = llm.get_tokenizer()
    [output] = llm.generate(
        [prompt],
        SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=3),
        use_tqdm=False,
    )
    one = output.outputs[0]
    ids = tokenizer(prompt).input_ids
    fields: dict = {
        "model": "tiny",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 6,
        "logprobs": 3,
        "echo": True,
    }
    answer = client.completions.create(**fields).choices[0]
    chunks = [
        c for chunk in client.completions.create(stream=True, **fields) for c in chunk.choices
    ]
    told = answer.logprobs
    assert answer.text == prompt + one.text == "".join(c.text for c in chunks)
    assert told.tokens == [tokenizer.decode([i]) for i in [*ids, *one.token_ids]]
    values = [None, *(e[i].logprob for i, e in zip(ids[1:], output.prompt_logprobs[1:]))]
    values += [e[i].logprob for i, e in zip(one.token_ids, one.logprobs)]
    assert told.token_logprobs[0] is None and told.token_logprobs[1:] == pytest.approx(
        values[1:], abs=1e-4
    )
    assert told.text_offset == [len("".join(told.tokens[:i])) for i in range(len(told.tokens))]
    assert told.top_logprobs[0] is None and all(3 <= len(top) <= 4 for top in told.top_logprobs[1:])
    for name in "tokens", "token_logprobs", "text_offset", "top_logprobs":
        joined = [x for c in chunks if c.logprobs for x in getattr(c.logprobs, name)]
        assert json.dumps(joined) == json.dumps(getattr(told, name)), name
    alone = client.completions.create(**{**fields, "max_tokens": 0})
    assert (
        alone.choices[0].text == prompt
        and alone.choices[0].logprobs.tokens == told.tokens[: len(ids)]
    )
    assert alone.usage.completion_tokens == 0
    named = (
        client.completions.create(**fields, extra_body={"return_tokens_as_token_ids": True})
        .choices[0]
        .logprobs
    )
    assert named.tokens == [f"token_id:{i}" for i in [*ids, *one.token_ids]]
    # as in vLLM
    assert named.text_offset == [len("".join(named.tokens[:i])) for i in range(len(named.tokens))]
    extra = client.completions.create(
        **{**fields, "echo": False, "logprobs": None}, extra_body={"prompt_logprobs": 0}
    )
    assert [list(entry) for entry in extra.choices[0].prompt_logprobs[1:]] == [
        [str(i)] for i in ids[1:]
    ]


def test_truncated_prompts_and_special_tokens(client: Any, llm: LLM) -> None:
    ids = llm.get_tokenizer()(PROMPTS[0]).input_ids
    [(expected,)] = offline(llm, [ids[-3:]], temperature=0, max_tokens=5)
    answer = client.completions.create(
        model="tiny",
        prompt=PROMPTS[0],
        temperature=0,
        max_tokens=5,
        extra_body={"truncate_prompt_tokens": 3},
    )
    assert answer.choices[0].text == expected.text and answer.usage.prompt_tokens == 3
    long = client.completions.create(
        model="tiny",
        prompt="a " * 500,
        temperature=0,
        max_tokens=1,
        extra_body={"truncate_prompt_tokens": -1},
    )
    assert long.usage.prompt_tokens == 255


def test_beams(client: Any, llm: LLM) -> None:
    [expected] = llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=3, max_tokens=6))
    answer = client.completions.create(
        model="tiny", prompt=PROMPTS[0], n=3, max_tokens=6, extra_body={"use_beam_search": True}
    )
    assert [c.text for c in answer.choices] == texts(expected.outputs)


# Chats


def test_chats_are_the_offline_ones(client: Any, llm: LLM) -> None:
    [output] = llm.chat(
        CHAT, SamplingParams(temperature=0, max_tokens=12, logprobs=2), use_tqdm=False
    )
    one = output.outputs[0]
    fields: dict = {
        "model": "tiny",
        "messages": CHAT,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    answer = client.chat.completions.create(**fields, max_completion_tokens=12)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        one.text,
        one.finish_reason,
    )
    assert (
        answer.usage.completion_tokens == len(one.token_ids) and answer.object == "chat.completion"
    )
    texts: list[str] = []
    for entry, i, expected in zip(
        choice.logprobs.content, one.token_ids, one.logprobs, strict=True
    ):
        assert entry.logprob == pytest.approx(expected[i].logprob, abs=1e-4)
        assert bytes(entry.bytes).decode() == entry.token == expected[i].decoded_token
        texts.append(entry.token)
        assert [top.token for top in entry.top_logprobs] == [
            e.decoded_token for e in sorted(expected.values(), key=lambda e: e.rank)[:2]
        ]
    by_id = client.chat.completions.create(
        **fields, max_tokens=12, extra_body={"return_tokens_as_token_ids": True}
    )
    named = by_id.choices[0].logprobs.content  # the bytes are those of the text in any case
    assert [entry.token for entry in named] == [f"token_id:{i}" for i in one.token_ids]
    assert [bytes(entry.bytes).decode() for entry in named] == texts
    chunks = list(
        client.chat.completions.create(
            **fields, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [c for chunk in chunks for c in chunk.choices]
    assert deltas[0].delta.role == "assistant" and deltas[0].delta.content == ""
    assert (
        "".join(c.delta.content or "" for c in deltas) == one.text
        and deltas[-1].finish_reason == one.finish_reason
    )
    assert not [c for c in deltas[1:] if c.delta.role]
    tokens = [e.token for c in deltas if c.logprobs for e in c.logprobs.content]
    assert tokens == [e.token for e in choice.logprobs.content] and chunks[
        -1
    ].usage.completion_tokens == len(one.token_ids)


def test_chat_continues_repeats_and_fills_the_model(client: Any, llm: LLM) -> None:
    begun = [*CHAT, {"role": "assistant", "content": [{"type": "text", "text": "A river is"}]}]
    plain = [*CHAT, {"role": "assistant", "content": "A river is"}]
    params = SamplingParams(temperature=0, max_tokens=6)
    [expected] = llm.chat(plain, params, use_tqdm=False, continue_final_message=True)
    for messages, echo, head in (begun, False, ""), (plain, True, "A river is"):
        answer = client.chat.completions.create(
            model="tiny",
            messages=messages,
            temperature=0,
            max_tokens=6,
            extra_body={"continue_final_message": True, "echo": echo},
        )
        assert answer.choices[0].message.content == head + expected.outputs[0].text
    whole = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, extra_body={"ignore_eos": True}
    )
    assert whole.usage.total_tokens == 256 and whole.choices[0].finish_reason == "length"
    several = client.chat.completions.create(
        model="tiny", messages=CHAT, n=3, seed=1, max_tokens=5, stream=True
    )
    pieces = ["", "", ""]
    for chunk in several:
        for c in chunk.choices:
            pieces[c.index] += c.delta.content or ""
    [expected] = llm.chat(CHAT, SamplingParams(n=3, seed=1, max_tokens=5), use_tqdm=False)
    assert pieces == texts(expected.outputs)


def test_the_clients_errors(client: Any, url: str) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens") as caught:
        client.completions.create(model="tiny", prompt="a", max_tokens=5000)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-5", messages=CHAT)
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        client.chat.completions.create(
            model="tiny", messages=CHAT, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    with (
        pytest.raises(openai.AuthenticationError),
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong") as other,
    ):
        other.models.list()
    assert [model.id for model in client.models.list()] == ["tiny"] and client.models.retrieve(
        "tiny"
    ).max_model_len == 256


# Embeddings


def test_embeddings_are_the_offline_ones(speaker: str) -> None:
    options = {**OPTIONS, "task": "embed"}
    with LLM(speaker, **options) as llm:
        expected = [output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)]
    with serve_in_background(EngineArgs(speaker, **options), ServerArgs(port=0)) as url:
        with openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0
        ) as client:
            answer = client.embeddings.create(model=speaker, input=PROMPTS)  # asks for base64
            for entry, vector in zip(answer.data, expected, strict=True):
                assert entry.embedding == pytest.approx(vector, abs=1e-5)
            plain = client.embeddings.create(
                model=speaker, input=PROMPTS[0], encoding_format="float"
            )
            packed = client.embeddings.with_raw_response.create(
                model=speaker, input=PROMPTS[0], encoding_format="base64"
            )
            data = base64.b64decode(packed.http_response.json()["data"][0]["embedding"])
            assert list(struct.unpack(f"<{len(data) // 4}f", data)) == pytest.approx(
                plain.data[0].embedding
            )
            assert answer.usage.prompt_tokens == answer.usage.total_tokens > 9
            with pytest.raises(openai.BadRequestError, match='task="embed"'):
                client.completions.create(model=speaker, prompt="a")
            with pytest.raises(openai.BadRequestError, match="dimensions"):
                client.embeddings.create(model=speaker, input="a", dimensions=3)
            with pytest.raises(openai.BadRequestError, match="256"):
                client.embeddings.create(model=speaker, input="a " * 500)
            cut = client.embeddings.create(
                model=speaker, input="a " * 500, extra_body={"truncate_prompt_tokens": -1}
            )
            assert cut.usage.prompt_tokens == 256


# LangChain


def test_langchain_chats(url: str, llm: LLM) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        base_url=f"{url}/v1", api_key="k", model="tiny", temperature=0, max_tokens=12, max_retries=0
    )
    messages = [("system", "You are brief."), ("user", "What is a river?")]
    [expected] = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    text = expected.outputs[0].text
    answer = model.invoke(messages)
    assert answer.content == text and answer.usage_metadata["output_tokens"] == len(
        expected.outputs[0].token_ids
    )
    assert "".join(chunk.content for chunk in model.stream(messages)) == text
    assert [one.content for one in model.batch([messages] * 4)] == [text] * 4
    completions = langchain.OpenAI(
        base_url=f"{url}/v1", api_key="k", model="tiny", temperature=0, max_tokens=9, max_retries=0
    )
    assert completions.batch(PROMPTS) == [
        one.text for (one,) in offline(llm, PROMPTS, temperature=0, max_tokens=9)
    ]


# lm-eval

QUESTIONS = [
    ("The capital of France is", ["Paris", "London"], 0),
    ("Two plus two is", ["four", "five", "eleven"], 0),
]
TASK = """
task: served_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
{rest}
"""
TASKS = {
    "write": """
output_type: generate_until
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["\\n", " e"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "choose": """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
}


def test_lm_eval_gets_what_the_engine_gives(
    url: str, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`local-completions`: texts until a stop string, and log-likelihoods by `echo`. Nothing is
    asked of the network.
    """
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    lm_eval = pytest.importorskip("lm_eval")
    tasks = pytest.importorskip("lm_eval.tasks")
    pytest.importorskip("tenacity")
    lines = [
        json.dumps({"question": q, "choices": choices, "gold": gold})
        for q, choices, gold in QUESTIONS
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    for name, rest in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(
            TASK.format(name=name, file=tmp_path / "questions.jsonl", rest=rest)
        )
    folder = llm.llm_engine.model_config.model
    args = {
        "base_url": f"{url}/v1/completions",
        "model": "tiny",
        "tokenizer": folder,
        "max_length": 200,
        "num_concurrent": 1,
    }
    result = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=args,
        tasks=["served_write", "served_choose"],
        batch_size=2,
        bootstrap_iters=0,
        task_manager=tasks.TaskManager(include_path=str(tmp_path), include_defaults=False),
        log_samples=True,
    )
    written = sorted(result["samples"]["served_write"], key=lambda sample: sample["doc_id"])
    expected = offline(
        llm, [q for q, _, _ in QUESTIONS], temperature=0, max_tokens=24, stop=["\n", " e"]
    )
    assert [sample["filtered_resps"] for sample in written] == [[one.text] for (one,) in expected]
    chosen = sorted(result["samples"]["served_choose"], key=lambda sample: sample["doc_id"])
    tokenizer = llm.get_tokenizer()
    for sample, (question, choices, _) in zip(chosen, QUESTIONS, strict=True):
        for (value, _), choice in zip(sample["filtered_resps"], choices, strict=True):
            ids = tokenizer(f"{question} {choice}").input_ids
            num_context = len(tokenizer(question).input_ids)
            [output] = llm.generate(
                [ids], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
            )
            told = zip(ids[num_context:], output.prompt_logprobs[num_context:])
            assert float(value) == pytest.approx(
                sum(entry[i].logprob for i, entry in told), abs=1e-3
            )
