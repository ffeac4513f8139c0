"""Tools, thoughts and forms at the server, through the OpenAI client and LangChain, on a random model that would write anything."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
jsonschema = pytest.importorskip("jsonschema")
from pydantic import BaseModel, Field  # noqa: E402
from speaker import make_speaker  # noqa: E402

from teachvllm import EngineArgs  # noqa: E402
from teachvllm.engine.async_llm import AsyncLLM  # noqa: E402
from teachvllm.entrypoints.api_server import ServerArgs, serve_in_background  # noqa: E402
from teachvllm.structured_output.chat import ChatAnswers  # noqa: E402

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 512}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)
HELLO: Any = [{"role": "user", "content": "Hello"}]
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 9},
                "unit": {"$ref": "#/$defs/unit"},
            },
            "required": ["a", "unit"],
            "$defs": {"unit": {"enum": ["m", "kg"]}},
        },
    },
}
NONE: Any = {"type": "object", "properties": {}}  # no arguments
STOP: Any = {"type": "function", "function": {"name": "stop", "parameters": NONE}}
NAMED: Any = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    folder = tmp_path_factory.mktemp("speaker")
    make_speaker(folder, max_position_embeddings=2048)
    engine = AsyncLLM.from_engine_args(EngineArgs(str(folder), **OPTIONS))
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def client(engine: AsyncLLM) -> Iterator[Any]:
    args = ServerArgs(
        port=0,
        chat_template=TEMPLATE,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        served_model_name="tiny",
    )
    with (
        serve_in_background(engine, args) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client


def ask(client: Any, **options: Any) -> Any:
    settings = {"model": "tiny", "messages": HELLO, "max_tokens": 200, "seed": 1} | options
    return client.chat.completions.create(**settings)


def together(chunks: Any) -> tuple[str, list[dict[str, str]], str | None]:
    "Content, calls and the last reason of a stream, as a client adds them up."
    content = ""
    calls: dict[int, dict[str, str]] = {}
    reason = None
    for chunk in chunks:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            known = calls.setdefault(
                call.index, {"id": call.id, "name": call.function.name, "arguments": ""}
            )
            assert call.id is None or known["id"] == call.id
            known["arguments"] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    return content, [calls[i] for i in sorted(calls)], reason


@pytest.mark.parametrize("choice, reason", [("required", "tool_calls"), (NAMED, "stop")])
def test_forced_calls(client: Any, choice: Any, reason: str) -> None:
    options = {"tools": [ADD, STOP], "tool_choice": choice, "parallel_tool_calls": False}
    for seed in range(4):
        [whole] = ask(client, seed=seed, **options).choices
        assert whole.finish_reason == reason and not whole.message.content
        [call] = whole.message.tool_calls
        assert call.function.name in ("add", "stop") and call.id.startswith("call_")
        tool = {"add": ADD, "stop": STOP}[call.function.name]["function"]
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, tool["parameters"])
        assert call.function.name == "add" or arguments == {}
        content, [streamed], last = together(ask(client, seed=seed, stream=True, **options))
        assert (content, last) == ("", reason)
        assert streamed["name"] == call.function.name
        assert streamed["arguments"] == call.function.arguments


def test_several_calls(client: Any) -> None:
    "As many as the model likes; and of two sequences each its own."
    answer = ask(client, tools=[STOP], tool_choice="required", max_tokens=1500, n=2)
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.finish_reason == "length" or choice.message.tool_calls


@pytest.mark.parametrize("parameters", [{}, {"parameters": {}}])
def test_a_tool_that_says_nothing_of_its_arguments(client: Any, parameters: Any) -> None:
    "Any object: a random model writes one that is cut off, if it does not end it."
    tool = {"type": "function", "function": {"name": "any"} | parameters}
    named = {"type": "function", "function": {"name": "any"}}
    choices = ask(client, tools=[tool], tool_choice=named, n=8, max_tokens=40).choices
    for choice in choices:
        if choice.finish_reason == "stop":
            [call] = choice.message.tool_calls
            assert isinstance(json.loads(call.function.arguments), dict)
        else:
            assert choice.message.content.startswith("{")


def test_strict_calls_that_the_model_chooses(client: Any) -> None:
    """A random model does not write the tag: what binds it is asked for. Its own choice is bound by
    a tag with a trigger that it does write.
    """
    strict = {"type": "function", "function": ADD["function"] | {"strict": True}}
    for choice in ask(client, tools=[strict], n=4, max_tokens=60).choices:
        assert "<tool_call>" not in (choice.message.content or "") or choice.message.tool_calls
    wrong = {
        "type": "function",
        "function": {"name": "f", "strict": True, "parameters": {"not": {}}},
    }
    with pytest.raises(openai.BadRequestError, match="tools: .*'not' is not served"):
        ask(client, tools=[wrong])
    free = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
    assert ask(client, tools=[free], max_tokens=1).choices
    # what the request says of its answer comes first
    [choice] = ask(client, tools=[strict], extra_body={"guided_choice": ["yes"]}).choices
    assert choice.message.content == "yes"


def test_a_response_format_of_structural_tags(client: Any) -> None:
    form = {
        "type": "structural_tag",
        "structures": [{"begin": "e=", "schema": {"enum": [1, 22]}, "end": ";"}],
        "triggers": ["e"],
    }
    tags = 0
    for seed in range(4):
        [choice] = ask(client, response_format=form, seed=seed, max_tokens=80).choices
        rest = re.sub("e=(1|22);", "", choice.message.content)
        tags += rest != choice.message.content
        assert "e" not in rest[:-4]
    assert tags
    with pytest.raises(openai.BadRequestError, match="begins with no trigger"):
        ask(client, response_format=form | {"triggers": ["a"]})


def test_integers_of_any_length(client: Any) -> None:
    many = 10**30
    schema = {"type": "object", "properties": {"n": {"const": many}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "big", "schema": schema}}
    [choice] = ask(client, response_format=form).choices
    assert json.loads(choice.message.content) == {"n": many}
    with pytest.raises(openai.BadRequestError, match="multipleOf"):
        ask(client, extra_body={"guided_json": {"type": "integer", "multipleOf": many}})


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "unit": "m"}}</tool_call>'


def test_a_call_that_the_model_chooses(client: Any) -> None:
    "This one can only write what the regex says: text, and a call in its format."
    bound = {"structured_outputs": {"regex": re.escape(f"Well. {CALL}")}}
    options = {"tools": [ADD], "extra_body": bound}
    [whole] = ask(client, **options).choices
    assert (whole.message.content, whole.finish_reason) == ("Well. ", "tool_calls")
    [call] = whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1, "unit": "m"}')
    content, [streamed], reason = together(ask(client, stream=True, **options))
    assert (content, reason) == ("Well. ", "tool_calls")
    assert streamed["arguments"] == call.function.arguments
    # the same text of a client that has no tools is content
    [plain] = ask(client, extra_body=bound).choices
    assert plain.message.content == f"Well. {CALL}" and plain.message.tool_calls is None
    [none] = ask(client, extra_body=bound, tools=[ADD], tool_choice="none").choices
    assert none.message.content == f"Well. {CALL}" and none.finish_reason == "stop"


def test_a_conversation_with_calls_goes_on(client: Any) -> None:
    [first] = ask(client, tools=[ADD], tool_choice="required").choices
    told = [
        *HELLO,
        first.message,
        *(
            {"role": "tool", "tool_call_id": call.id, "content": "3"}
            for call in first.message.tool_calls
        ),
    ]
    [second] = ask(client, messages=told, tools=[ADD], max_tokens=5).choices
    assert second.finish_reason in ("length", "stop", "tool_calls")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "`tools` must be set"),
    ({"tools": [STOP], "tool_choice": NAMED}, "does not match any of the specified"),
    ({"tools": [STOP], "tool_choice": "clock"}, "choose"),
    ({"tools": [{"type": "function"}]}, "a function with a name"),
    (
        {
            "tools": [STOP],
            "tool_choice": "required",
            "response_format": {"type": "json_object"},
        },
        "not with a tool_choice that forces",
    ),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
            "tool_choice": "required",
        },
        "'not' is not served",
    ),
    (
        {
            "tools": [ADD],
            "extra_body": {"chat_template_kwargs": {"tools": []}},
        },
        "no variable of a template",
    ),
]


@pytest.mark.parametrize("options, words", WRONG)
def test_tools_that_are_refused(client: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        ask(client, **options)
    if "choose" in words or "match any" in words:
        assert caught.value.param == "tool_choice"
    if "function with" in words:
        assert caught.value.param == "tools"
    assert ask(client, max_tokens=1).choices


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_grammar_without_a_token_is_a_bad_request(client: Any, is_stream: bool) -> None:
    for body, words in (
        ({"guided_choice": ["yes"], "allowed_token_ids": [3]}, "tokens that the grammar allows"),
        ({"guided_choice": ["a\u0004"]}, "no token of the model"),
    ):
        with pytest.raises((openai.BadRequestError, openai.APIError), match=words) as caught:
            answer = client.chat.completions.create(
                model="tiny", messages=HELLO, extra_body=body, stream=is_stream
            )
            print([*answer])
        assert str(caught.value.code) == "400" and caught.value.type == "BadRequestError"


def test_servers_without_tools(engine: AsyncLLM) -> None:
    "No parser, and a template that leaves tools out."
    args = ServerArgs(port=0, chat_template="{{ messages[0].content }}")
    with (
        serve_in_background(engine, args) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        model = client.models.list().data[0].id
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser to be set"):
            ask(client, model=model, tools=[ADD])
        with pytest.raises(openai.BadRequestError, match="no effect.*--chat-template FILE"):
            ask(client, model=model, tools=[ADD], tool_choice="required")
    with pytest.raises(ValueError, match="needs a tool_call_parser"):
        ChatAnswers(None, None, enable_auto_tool_choice=True)
    with pytest.raises(ValueError, match="hermes, llama3_json, mistral, pythonic"):
        ChatAnswers(None, "gpt")


# Forms


class Answer(BaseModel):
    is_true: bool
    unit: Literal["m", "kg"]
    digit: int = Field(ge=0, le=9)


def test_the_clients_parse(client: Any) -> None:
    for seed in range(3):
        done = client.chat.completions.parse(
            model="tiny", messages=HELLO, response_format=Answer, seed=seed, max_tokens=200
        )
        assert isinstance(done.choices[0].message.parsed, Answer)
    [choice] = ask(client, response_format={"type": "json_object"}, max_tokens=60).choices
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    else:
        assert choice.message.content.startswith("{")
    done = client.completions.create(
        model="tiny", prompt="a", extra_body={"guided_choice": ["yes", "no"]}
    )
    assert done.choices[0].text in ("yes", "no")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchains_structured_output(client: Any, method: str) -> None:
    chat_models = pytest.importorskip("langchain_openai")
    model = chat_models.ChatOpenAI(
        model="tiny", base_url=str(client.base_url), api_key="x", seed=1, max_tokens=200
    )
    found = model.with_structured_output(Answer, method=method).invoke("Hello")
    assert isinstance(found, Answer)


# Thoughts


@pytest.fixture(scope="module")
def thinker(engine: AsyncLLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder: Path = tmp_path_factory.mktemp("thinker")
    make_speaker(folder, max_position_embeddings=2048)
    args = ServerArgs(port=0, chat_template=TEMPLATE, served_model_name="tiny")
    with (
        serve_in_background(
            EngineArgs(str(folder), reasoning_parser="deepseek_r1", **OPTIONS), args
        ) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client


def test_reasoning_is_told_from_the_answer(thinker: Any) -> None:
    "A random model never ends it: all that it writes is reasoning, and no grammar binds it."
    [whole] = ask(thinker, max_tokens=9, temperature=0).choices
    assert whole.message.content is None and whole.message.reasoning_content
    bound = {"guided_choice": ["yes", "no"]}
    [same] = ask(thinker, max_tokens=9, temperature=0, extra_body=bound).choices
    assert same.message.reasoning_content == whole.message.reasoning_content
    stream = ask(thinker, max_tokens=9, temperature=0, stream=True)
    pieces = [chunk.choices[0].delta for chunk in stream]
    text = "".join(getattr(delta, "reasoning_content", None) or "" for delta in pieces)
    assert text == whole.message.reasoning_content == whole.message.reasoning
    [without] = ask(
        thinker, max_tokens=9, temperature=0, extra_body={"include_reasoning": False}
    ).choices
    assert not hasattr(without.message, "reasoning_content")


def test_the_grammar_begins_where_reasoning_ends(thinker: Any) -> None:
    "A prompt whose reasoning is over: the answer is bound from its first token."
    done: list[dict[str, str]] = [{"role": "user", "content": "<think>so</think>"}]
    bound = {"guided_choice": ["yes", "no"]}
    [choice] = ask(thinker, messages=done, extra_body=bound).choices
    assert choice.message.content in ("yes", "no")
    assert not hasattr(choice.message, "reasoning_content")
