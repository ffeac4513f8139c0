"""Tool calls and reasoning in a model's answer: what is found, and that no way to cut a stream
changes it.
"""

import json
import random
import string
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teachvllm.structured_output.automaton import Automaton
from teachvllm.structured_output.json_schema import tag_to_rules
from teachvllm.structured_output.reasoning import (
    REASONING_PARSERS,
    ReasoningParser,
    get_reasoning_parser,
    register_reasoning_parser,
)
from teachvllm.structured_output.tools import (
    MAX_DEPTH,
    TOOL_PARSERS,
    Delta,
    HermesToolParser,
    NamedToolParser,
    RequiredToolParser,
    ToolCall,
    ToolCallDelta,
    ToolParser,
    calls_of,
    check_tools,
    forced_parser,
    gather,
    get_tool_parser,
    python_arguments,
    register_tool_parser,
    template_has_tools,
    tools_schema,
)

# arguments, as a model may write them
ARGUMENTS = [
    "{}",
    "{ }",
    '{"a": 1}',
    '{"city":"Paris","days":3.5e-1,"metric":true,"none":null}',
    '{"a": {"b": [1, [2, {"c": "}"}], []]}, "d": {}}',
    '{"code": "if (x) { return \\"}\\"; } // \\\\"}',
    '{"t": "</tool_call> [TOOL_CALLS] <|python_tag|> ; ] )"}',
    '{"t": "Zürich, 東京 🗼", "e": "\\u00e9\\ud83d\\uddfc"}',
    '{\n  "a": [\n    -0,\n    1\n  ]\n}',
]


def form(name: str, kind: str, arguments: str) -> str:
    "A call in a form, without what stands around several."
    if kind == "hermes":
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    if kind == "llama3_json":
        return f'{{"name": "{name}", "parameters": {arguments}}}'
    if kind == "mistral":
        return f'{{"name": "{name}", "arguments": {arguments}}}'
    if kind == "required":
        return f'{{"name": "{name}", "parameters": {arguments}}}'
    values = json.loads(arguments)
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def answer(kind: str, calls: list[tuple[str, str]]) -> str:
    "Several calls in a form."
    parts = [form(name, kind, arguments) for name, arguments in calls]
    if kind == "hermes":
        return "\n".join(parts)
    if kind == "llama3_json":
        return "; ".join(parts)
    text = f"[{', '.join(parts)}]"
    return f"[TOOL_CALLS] {text}" if kind == "mistral" else text


def numbered() -> Any:
    "A function that gives ids."
    numbers = iter(range(1000))
    return lambda: f"call_{next(numbers)}"


def parser_of(kind: str) -> ToolParser:
    if kind == "required":
        return RequiredToolParser(numbered())
    if kind == "named":
        return NamedToolParser("f", numbered())
    return get_tool_parser(kind)(numbered())


def streamed(kind: str, pieces: list[str], eager: bool) -> tuple[list[Delta], Any]:
    stream = parser_of(kind).stream(eager)
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += stream.push(piece)
    deltas += stream.finish()
    return deltas, gather(deltas)


def random_pieces(text: str, rng: random.Random) -> list[str]:
    pieces = []
    while text:
        size = min(rng.choice((1, 1, 2, 3, 5, 8, 13)), len(text))
        pieces.append(text[:size])
        text = text[size:]
        if rng.random() < 0.1:
            pieces.append("")
    return pieces


def splits(text: str, seed: int = 0, num_random: int = 12) -> Iterator[list[str]]:
    "Every split in two, all characters apart, and random ones."
    for at in range(len(text) + 1):
        yield [text[:at], text[at:]]
    yield list(text)
    rng = random.Random(seed)
    for _ in range(num_random):
        yield random_pieces(text, rng)


def order_is_right(deltas: list[Delta]) -> bool:
    "Calls begin in order, each with its id and name, and pieces belong to the last that began."
    last = -1
    for delta in deltas:
        if isinstance(delta, str):
            assert delta
        elif delta.id is None:
            assert delta.index == last and delta.name is None and delta.arguments
        else:
            last += 1
            assert delta.index == last and delta.name and delta.arguments == ""
    return True


def check_splits(kind: str, text: str, complete: bool) -> tuple[str | None, list[ToolCall]]:
    "Whatever the split: lazily what `parse` says; eagerly always the same, and if complete that too."
    whole = parser_of(kind).parse(text)
    _, eager_whole = streamed(kind, [text], eager=True)
    if complete:
        assert eager_whole == whole
    for pieces in splits(text):
        for eager, expected in ((False, whole), (True, eager_whole)):
            deltas, found = streamed(kind, pieces, eager)
            assert found == expected, (pieces, eager)
            assert order_is_right(deltas)
    return whole


KINDS = ("hermes", "llama3_json", "mistral", "pythonic", "required")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_one_call(kind: str, arguments: str) -> None:
    content, calls = check_splits(kind, answer(kind, [("get_weather", arguments)]), True)
    assert content is None
    assert [(call.id, call.name) for call in calls] == [("call_0", "get_weather")]
    if kind == "pythonic":
        assert json.loads(calls[0].arguments) == json.loads(arguments)
    else:
        assert calls[0].arguments == arguments


@pytest.mark.parametrize("kind", KINDS)
def test_several_calls(kind: str) -> None:
    content, calls = check_splits(
        kind, answer(kind, [("f", ARGUMENTS[3]), ("g", "{}"), ("h", ARGUMENTS[4])]), True
    )
    assert content is None
    assert [call.name for call in calls] == ["f", "g", "h"]
    assert [call.id for call in calls] == ["call_0", "call_1", "call_2"]
    assert [json.loads(call.arguments) for call in calls] == [
        json.loads(ARGUMENTS[3]),
        {},
        json.loads(ARGUMENTS[4]),
    ]


F = '{"name": "f", "arguments": {"a": 1}}'
P = '{"name": "f", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    "kind, text, content, names",
    [
        ("hermes", f"Let me see.\n<tool_call>{F}</tool_call>", "Let me see.\n", "f"),
        ("hermes", f"A < B <tool <tool_call>{F}</tool_call>", "A < B <tool ", "f"),
        ("hermes", f"\n\n<tool_call>{F}</tool_call>\n", None, "f"),
        ("hermes", f"<tool_call>{F}</tool_call> and <tool_call>{F}</tool_call>.", " and .", "ff"),
        ("hermes", f"<tool_call>{F}<tool_call>{F}", None, "ff"),
        ("hermes", f"<tool_call>{F} ok", " ok", "f"),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "id": [7], "name": "f"}</tool_call>', None, "f"),
        ("llama3_json", P, None, "f"),
        ("llama3_json", f"  {P} ; {P}", None, "ff"),
        ("llama3_json", f"{P}\n{P}\n", None, "ff"),
        ("llama3_json", f"<|python_tag|>{P}", None, "f"),
        ("llama3_json", f"I call: <|python_tag|>{P}; {P}", "I call: ", "ff"),
        ("llama3_json", F, None, "f"),
        ("llama3_json", f"{P} That is it.", " That is it.", "f"),
        ("mistral", f"[TOOL_CALLS] [{F}, {F}]", None, "ff"),
        ("mistral", f"[TOOL_CALLS][{F},{F}", None, "ff"),
        ("mistral", f"See: [TOOL_CALLS][{F}] there", "See:  there", "f"),
        ("mistral", '[TOOL_CALLS]f{"a": 1}', None, "f"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', None, "fg"),
        ("mistral", 'x[1] [TOOL_CALLS] f{}', "x[1] ", "f"),
        ("pythonic", "[f(), g(b='x')]", None, "fg"),
        ("pythonic", "\n[f(a=[1, (2, 3)], b={'x': None})]\n", None, "f"),
        ("pythonic", "[f(a=true, b=null)] done", " done", "f"),
    ],
)  # fmt: skip
def test_text_around(kind: str, text: str, content: str | None, names: str) -> None:
    found, calls = check_splits(kind, text, True)
    assert found == content
    assert "".join(call.name for call in calls) == names


@pytest.mark.parametrize(
    "kind, text",
    [
        ("hermes", ""),
        ("hermes", " \n"),
        ("hermes", "Only text, with <b>tags</b> and {braces}; [1]."),
        ("hermes", "<tool_call"),
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", "<tool_call>{}</tool_call>"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call> so.'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "name": "g"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"city": "Par'),
        ("hermes", "<tool_call>" * 3),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("llama3_json", '{"answer": {"name": "f", "parameters": {}}}'),
        ("llama3_json", f"Here: {P}"),
        ("llama3_json", '{"name": "Anna", "age": 3}'),
        ("llama3_json", '{"name": "f", "parameters": {"a": '),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", "[TOOL_CALLS] nothing"),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": '),
        ("mistral", "[TOOL_"),
        ("pythonic", "[]"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(a=open('x'))]"),
        ("pythonic", "[f(a=1"),
        ("pythonic", "[f(a='x"),
        ("pythonic", "[f(a='x\\"),
        ("pythonic", "[f(**{'a': 1})]"),
        ("pythonic", "[f(a={1})]"),
        ("pythonic", "[f(a=1e999)]"),
        ("pythonic", "[f(a='\\ud800')]"),
        ("pythonic", "[(a=1)]"),
        ("pythonic", "text [f(a=1)]"),
        ("required", ""),
        ("required", "[]"),
        ("required", '[{"name": "f", "parameters": {"a": 1'),
        ("named", '{"a": "cut'),
    ],
)  # fmt: skip
def test_what_is_no_call_is_content(kind: str, text: str) -> None:
    content, calls = check_splits(kind, text, False)
    assert (content, calls) == (text or None, [])


@pytest.mark.parametrize("kind", KINDS)
def test_cut_off_anywhere(kind: str) -> None:
    """Complete calls stand, and the rest is content; in an eager stream, the last call's arguments
    are a beginning of the whole's.
    """
    text = answer(kind, [("f", ARGUMENTS[5]), ("g", ARGUMENTS[7])])
    _, whole = parser_of(kind).parse(text)
    for end in range(len(text)):
        content, calls = parser_of(kind).parse(text[:end])
        assert calls == whole[: len(calls)]
        if not calls:
            assert (content or "") == text[:end]
        deltas, (eager_content, eager_calls) = streamed(kind, list(text[:end]), True)
        assert order_is_right(deltas)
        assert len(calls) <= len(eager_calls) <= len(calls) + 1
        for call, full in zip(eager_calls, whole):
            assert (call.name, call.id) == (full.name, full.id)
            assert full.arguments.startswith(call.arguments)
        if len(eager_calls) == len(calls):
            assert eager_content == content


def test_a_good_call_after_a_broken_one() -> None:
    text = f'<tool_call>{{"name": oops}}</tool_call><tool_call>{F}</tool_call>'
    content, calls = check_splits("hermes", text, False)
    assert content == '<tool_call>{"name": oops}</tool_call>'
    assert [call.name for call in calls] == ["f"]
    text = f'[TOOL_CALLS][{F}, {{"name": "g"}}] [TOOL_CALLS]h{{}}'
    content, calls = check_splits("mistral", text, False)
    assert content == ', {"name": "g"}] '
    assert [call.name for call in calls] == ["f", "h"]


def test_a_broken_call_in_an_eager_stream() -> None:
    "What has left stays; the rest is content; the next call has the next index."
    text = f'<tool_call>{{"name": "g", "arguments": {{"a": oops}}}}</tool_call>\n<tool_call>{F}</tool_call>'
    check_splits("hermes", text, False)
    _, (content, calls) = streamed("hermes", list(text), True)
    assert [(call.name, call.arguments) for call in calls] == [
        ("g", '{"a": oops'),
        ("f", '{"a": 1}'),
    ]
    assert content == "}}</tool_call>\n"


def test_content_leaves_at_once_and_a_marker_s_beginning_does_not() -> None:
    stream = HermesToolParser(numbered()).stream()
    assert stream.push("Hello") == ["Hello"]
    assert stream.push(" a <") == [" a "]
    assert stream.push("b <tool_") == ["<b "]
    assert stream.push("kit") == ["<tool_kit"]
    assert stream.push("<tool_call>{") == []
    assert stream.push('"name": "f", "arguments": ') == []
    assert stream.push('{"a') == [
        ToolCallDelta(0, "call_0", "f"),
        ToolCallDelta(0, arguments='{"a'),
    ]
    assert stream.push('": 1') == [ToolCallDelta(0, arguments='": 1')]
    assert stream.push("}}</tool") == [ToolCallDelta(0, arguments="}")]
    assert stream.push("_call>") == []
    assert stream.finish() == []


def test_the_json_of_a_stream() -> None:
    first = ToolCallDelta(0, "call_0", "f").to_json()
    assert first == {
        "index": 0,
        "id": "call_0",
        "type": "function",
        "function": {"name": "f", "arguments": ""},
    }
    assert ToolCallDelta(0, arguments='{"a').to_json() == {
        "index": 0,
        "function": {"arguments": '{"a'},
    }
    call = ToolCall("call_0", "f", "{}").to_json()
    assert call == {
        "id": "call_0",
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
    }


def test_ids() -> None:
    _, calls = get_tool_parser("hermes")().parse(f"<tool_call>{F}<tool_call>{F}")
    assert len({call.id for call in calls}) == 2
    assert all(call.id.startswith("call_") and len(call.id) > 20 for call in calls)
    _, (call,) = get_tool_parser("mistral")().parse("[TOOL_CALLS]f{}")
    assert len(call.id) == 9 and set(call.id) <= set(string.ascii_letters + string.digits)


@pytest.mark.parametrize(
    "depth, is_call", [(MAX_DEPTH, True), (MAX_DEPTH + 1, False), (100000, False)]
)
def test_depth(depth: int, is_call: bool) -> None:
    text = (
        f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * depth}{"]" * depth}}}}}</tool_call>'
    )
    content, calls = HermesToolParser().parse(text)
    assert bool(calls) == is_call
    assert content == (None if is_call else text)


def test_deep_python() -> None:
    for depth in (10, 150, 5000):
        text = f"[f(a={'[' * depth}{']' * depth})]"
        content, calls = get_tool_parser("pythonic")().parse(text)
        assert (content == text) != bool(calls)


ALPHABET = ['<tool_call>', '</tool_call>', '<|python_tag|>', '[TOOL_CALLS]', '[ARGS]', '{', '}', '[', ']', '(', ')', '"', "'", '\\', ',', ':', ';', ' ', '\n', 'f', '=', '1', '-', 'é', '"name"', '"arguments"', '"parameters"', '"f"', '{"name": "f", "arguments": {', '[f(a=', 'true', '\\u', '"a": ']  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from((*KINDS, "named")),
    st.lists(st.sampled_from(ALPHABET), max_size=25),
    st.randoms(),
)
def test_any_text(kind: str, parts: list[str], rng: random.Random) -> None:
    "No exception; the same for every split; complete calls have arguments that are JSON objects."
    text = "".join(parts)
    content, calls = whole = parser_of(kind).parse(text)
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    if not calls:
        assert (content or "") == text
    _, eager_whole = streamed(kind, [text], True)
    for pieces in (parts, list(text), random_pieces(text, rng)):
        assert streamed(kind, pieces, False)[1] == whole
        deltas, found = streamed(kind, pieces, True)
        assert found == eager_whole
        assert order_is_right(deltas)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.lists(
        st.dictionaries(st.from_regex(r"\A[a-z]{2,5}[0-9]\Z"), VALUES, max_size=3),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
    st.randoms(),
)
def test_any_arguments(
    kind: str, many: list[dict[str, Any]], escaped: bool, rng: random.Random
) -> None:
    text = answer(kind, [("f", json.dumps(arguments, ensure_ascii=escaped)) for arguments in many])
    content, calls = parser_of(kind).parse(text)
    assert content is None
    assert [json.loads(call.arguments) for call in calls] == many
    assert streamed(kind, random_pieces(text, rng), True)[1] == (content, calls)


def test_arguments_are_never_run() -> None:
    for source in (
        "a=__import__('os')",
        "a=[x for x in 'a']",
        "a=b",
        "a=f'{1}'",
        "a=(lambda: 1)()",
    ):
        with pytest.raises(ValueError):
            python_arguments(source)
    assert python_arguments("a=-1, b=(1, 'é'), c=true") == '{"a": -1, "b": [1, "é"], "c": true}'


def test_long_arguments_are_read_once() -> None:
    "A thousand times as long takes about a thousand times as many reads: nothing is read again."
    reads = 0

    class Counting(HermesToolParser):
        def read_calls(self, stream: Any) -> Any:
            nonlocal reads
            for _ in super().read_calls(stream):
                reads += 1
                yield

    stream = Counting().stream()
    stream.push('<tool_call>{"name": "f", "arguments": {"a": "')
    for _ in range(5000):
        (delta,) = stream.push("word ")
        assert delta == ToolCallDelta(0, arguments="word ")
    assert reads == 5001


def test_plugins() -> None:
    with pytest.raises(
        ValueError,
        match="tool_call_parser='x' is not known: choose of hermes, llama3_json, mistral, pythonic",
    ):
        get_tool_parser("x")
    with pytest.raises(
        ValueError, match="reasoning_parser='x' is not known: choose of deepseek_r1, qwen3"
    ):
        get_reasoning_parser("x")

    class Mine(HermesToolParser):
        markers = ("<call>",)

    class Aloud(ReasoningParser):
        start = "<aloud>"

    try:
        register_tool_parser("mine", Mine)
        register_reasoning_parser("aloud", Aloud)
        assert get_tool_parser("mine")().parse(f"<call>{F}")[1][0].name == "f"
        assert get_reasoning_parser("aloud")().split("<aloud>a</think>b") == ("a", "b")
    finally:
        del TOOL_PARSERS["mine"]
        del REASONING_PARSERS["aloud"]


# What a request asks

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"$ref": "#/$defs/Place"},
                "default": {"$ref": "#/$defs/Place"},
                "$ref": {"type": "string", "default": {"$ref": "#/data"}},
            },
            "required": ["place"],
            "$defs": {"Place": {"type": "string", "minLength": 2}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def test_the_schema_of_a_forced_call() -> None:
    tools = [CLOCK, WEATHER]
    assert tools_schema(tools, "auto") is None and tools_schema(tools, "none") is None
    assert tools_schema(tools, NAMED) is WEATHER["function"]["parameters"]
    schema = tools_schema(tools, "required")
    jsonschema.Draft202012Validator.check_schema(schema)
    good = {"name": "get_weather", "parameters": {"place": "Oslo", "default": "Rome"}}
    clock = {"name": "clock", "parameters": {}}

    def fits(value: Any, schema: Any = schema) -> bool:
        return jsonschema.Draft202012Validator(schema).is_valid(value)

    assert fits([good]) and fits([good, clock])
    assert not fits([]) and not fits([{"name": "other", "parameters": {}}])
    assert not fits([{"name": "get_weather", "parameters": {"place": "O"}}])
    assert not fits([{"name": "get_weather", "parameters": {"place": "Oslo", "default": "R"}}])
    assert fits([{"name": "clock", "parameters": {"a": 1}}])  # any object
    assert not fits([{"name": "clock", "parameters": 1}])
    one = tools_schema(tools, "required", parallel=False)
    assert fits([good], one) and not fits([good, clock], one)
    inner = schema["items"]["anyOf"][1]["properties"]["parameters"]["properties"]["$ref"]
    assert inner["default"] == {"$ref": "#/data"}


def test_forced_calls() -> None:
    text = '[{"name": "get_weather", "parameters": {"place": "Oslo"}}, {"name": "clock", "parameters": {}}]'
    content, calls = calls_of(text, "required")
    assert content is None
    assert [(call.name, call.arguments) for call in calls] == [
        ("get_weather", '{"place": "Oslo"}'),
        ("clock", "{}"),
    ]
    content, (call,) = calls_of(' {"place": "Oslo"}', NAMED)
    assert (content, call.name, call.arguments) == (None, "get_weather", '{"place": "Oslo"}')
    assert calls_of("free", "auto") == ("free", [])
    assert forced_parser("none") is None
    stream = forced_parser(NAMED, numbered()).stream()
    assert stream.push('{"pl') == [
        ToolCallDelta(0, "call_0", "get_weather"),
        ToolCallDelta(0, arguments='{"pl'),
    ]
    check_splits("named", '{"a": {"b": []}}', True)


def test_a_tag_for_strict_calls() -> None:
    "What it lets through the parser reads as calls; what does not fit a strict tool it does not."
    name = 'get "it"'
    strict = {"name": name, "strict": True, "parameters": {"properties": {"a": {"enum": [1, 2]}}}}
    tools = [{"type": "function", "function": strict}, CLOCK]
    parser = parser_of("hermes")
    automaton = Automaton(tag_to_rules(parser.structural_tag(tools, True)))

    def fits(text: str) -> bool:
        state = automaton.advance(automaton.start, text.encode())
        return state >= 0 and automaton.is_final(state)

    def call(name: str, arguments: str) -> str:
        start = f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": '
        return f"{start}{arguments}}}\n</tool_call>"

    first, second = call(name, '{"a": 1}'), call("clock", '{"zone": [1]}')
    good = f"Well. {first} and {second}."
    assert fits(good) and fits("no call") and fits("")
    content, calls = parser.parse(good)
    assert content is not None and content.startswith("Well.")
    assert [one.name for one in calls] == [name, "clock"]
    for text in (call(name, '{"a": 3}'), call("other", "{}"), call("clock", "[]"), "<tool_call>x"):
        assert not fits(text)
    automaton = Automaton(tag_to_rules(parser.structural_tag(tools, False)))
    assert fits("Well. " + call("clock", "{}")) and not fits(call("clock", "{}") + "x")
    for kind in ("llama3_json", "mistral", "pythonic"):
        assert get_tool_parser(kind)().structural_tag(tools, True) is None


def test_check_tools() -> None:
    assert check_tools(None, None, False) == "none"
    assert check_tools([], None, False) == "none"
    assert check_tools([CLOCK], None, True) == "auto"
    assert check_tools([CLOCK], "none", False) == "none"
    assert check_tools([CLOCK], "required", False) == "required"
    assert check_tools([WEATHER], NAMED, False) == NAMED
    strict = {"type": "function", "function": {"name": "s", "strict": True}}
    assert check_tools([strict], "required", False) == "required"
    assert check_tools([strict], "auto", True) == "auto"
    for tools, choice, has_parser, message in [
        (
            [CLOCK],
            None,
            False,
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
        ),
        (
            [CLOCK],
            "auto",
            False,
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
        ),
        (None, "auto", True, "When using `tool_choice`, `tools` must be set."),
        (None, NAMED, True, "When using `tool_choice`, `tools` must be set."),
        ([], "required", True, "When using `tool_choice`, `tools` must be set."),
        (
            [CLOCK],
            NAMED,
            True,
            "The tool specified in `tool_choice` does not match any of the specified `tools`",
        ),
    ]:
        with pytest.raises(ValueError) as error:
            check_tools(tools, choice, has_parser)
        assert str(error.value) == message
    for tools, choice, message in [
        ([CLOCK], "always", "tool_choice='always': choose"),
        ([CLOCK], {"type": "function", "function": "clock"}, "tool_choice="),
        ([CLOCK], {"type": "function"}, "tool_choice="),
        ([{"type": "function"}], "auto", "tools: each needs a function with a name"),
        (
            [{"type": "function", "function": {"name": ""}}],
            "auto",
            "tools: each needs a function with a name",
        ),
    ]:
        with pytest.raises(ValueError) as error:
            check_tools(tools, choice, True)
        assert message in str(error.value)


@pytest.mark.parametrize(
    "template, has",
    [
        ("", False),
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        ("{%- for tool in tools -%}{{ tool }}{%- endfor %}", True),
        ("{{ 'tools' }}", False),
        ("{{ message.tools }}{{ message['tools'] }}{{ builtin_tools }}", False),
        ("You have tools. {{ messages }} Don't use tools.", False),
        ("{# {{ tools }} #}", False),
        ("Don't {{ '}}' + tools | tojson }}", True),
        ('{{ "a\\"}}" }}{% if tools is defined %}x{% endif %}', True),
        ("{{ " + "'" * 5001, False),
    ],
)  # fmt: skip
def test_templates(template: str, has: bool) -> None:
    assert template_has_tools(template) == has


# Reasoning


def streamed_reasoning(name: str, pieces: list[str]) -> tuple[str, str]:
    stream = get_reasoning_parser(name)().stream()
    found = [*map(stream.push, pieces), stream.finish()]
    return "".join(reasoning for reasoning, _ in found), "".join(content for _, content in found)


@pytest.mark.parametrize(
    "name, text, reasoning, content",
    [
        ("deepseek_r1", "<think>a</think>b", "a", "b"),
        ("deepseek_r1", "a < b </ think </thin </think>\n\nb", "a < b </ think </thin ", "\n\nb"),
        ("deepseek_r1", "all of it", "all of it", None),
        ("deepseek_r1", "cut </thi", "cut </thi", None),
        ("deepseek_r1", "<thi", "<thi", None),
        ("deepseek_r1", "<think></think>b", None, "b"),
        ("deepseek_r1", "a</think>b</think>c<think>", "a", "b</think>c<think>"),
        ("deepseek_r1", "a <think> b</think>c", "a <think> b", "c"),
        ("deepseek_r1", "", None, None),
        ("qwen3", "<think>\na\n</think>\n\nb", "\na\n", "\n\nb"),
        ("qwen3", "\n<think>a</think>b", "a", "b"),
        ("qwen3", "no thought", None, "no thought"),
        ("qwen3", "b</think>c", None, "b</think>c"),
        ("qwen3", "b <think>a</think>", None, "b <think>a</think>"),
        ("qwen3", "<think>cut", "cut", None),
        ("qwen3", " <thin", None, " <thin"),
        ("qwen3", " \n", None, " \n"),
    ],
)  # fmt: skip
def test_reasoning(name: str, text: str, reasoning: str | None, content: str | None) -> None:
    assert get_reasoning_parser(name)().split(text) == (reasoning, content)
    for pieces in splits(text):
        assert streamed_reasoning(name, pieces) == (reasoning or "", content or "")


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(("deepseek_r1", "qwen3")),
    st.lists(
        st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a"]), max_size=12
    ),
)
def test_reasoning_of_any_text(name: str, parts: list[str]) -> None:
    reasoning, content = get_reasoning_parser(name)().split("".join(parts))
    for pieces in (parts, list("".join(parts))):
        assert streamed_reasoning(name, pieces) == (reasoning or "", content or "")


@pytest.mark.parametrize(
    "ids", [{"<think>": [1], "</think>": [2]}, {"<think>": [3, 4, 5], "</think>": [3, 6, 4, 5]}]
)
def test_where_reasoning_ends(ids: dict[str, list[int]]) -> None:
    parser = get_reasoning_parser("qwen3")(ids.__getitem__)
    start, end = ids["<think>"], ids["</think>"]
    assert not parser.is_reasoning_end([])
    assert not parser.is_reasoning_end(start + [9, 3, 6, 4])
    assert parser.is_reasoning_end(start + [9] + end)
    assert parser.is_reasoning_end(start + [9] + end + [7, 8])
    assert parser.is_reasoning_end(tuple(end))
    assert not parser.is_reasoning_end(start + end + [9] + start)  # an earlier answer's
    assert not parser.is_reasoning_end(end[:-1])
    with pytest.raises(ValueError, match="encode="):
        get_reasoning_parser("qwen3")().is_reasoning_end([2])
