"""Grammars and JSON schemas as rules: what the automaton writes is valid by `jsonschema`, what is
valid and in the schema's order it accepts, and what isn't served is named.
"""

import ipaddress
import itertools
import json
import random
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
import pytest

from teachvllm.sampling_params import StructuredOutputsParams
from teachvllm.structured_output.automaton import Automaton
from teachvllm.structured_output.grammar import json_rules, parse_ebnf
from teachvllm.structured_output.json_schema import (
    check_for_library,
    schema_to_rules,
    tag_to_rules,
)
from teachvllm.structured_output.manager import XGRAMMAR_FORMATS, XGRAMMAR_KEYWORDS

jsonschema = pytest.importorskip("jsonschema")

CLOSERS = b'"}]'
WORDS = ["a", "ab", "name", "é", 'q"', "b\\", "x/y", "~", "", "日本"]


def accepts(automaton: Automaton, text: str) -> bool:
    state = automaton.advance(automaton.start, text.encode())
    return state >= 0 and automaton.is_final(state)


def automaton_of(schema: Any, **options: Any) -> Automaton:
    return Automaton(schema_to_rules(schema, **options))


@lru_cache(maxsize=4096)
def allowed_bytes(automaton: Automaton, state: int) -> dict[int, int]:
    "The state behind each byte that may come."
    row = automaton.row(state).tolist()
    return {byte: after for byte, after in enumerate(row) if after >= 0}


def walk(automaton: Automaton, rng: random.Random) -> str:
    "A text: any allowed byte each time, but often one that closes something."
    text, state = bytearray(), automaton.start
    while len(text) < 20_000:
        after = allowed_bytes(automaton, state)
        if automaton.is_final(state) and (not after or rng.random() < 0.3):
            return text.decode()
        closers = [byte for byte in CLOSERS if byte in after]
        text.append(rng.choice(closers if closers and rng.random() < 0.4 else list(after)))
        state = after[text[-1]]
    raise AssertionError("endless")


def is_valid(schema: Any, text: str) -> bool:
    checker = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.FormatChecker(["date", "uuid", "ipv4", "email"])
    )
    return checker.is_valid(json.loads(text))


# Each maker gives a schema and a function that makes one of its instances.
Made = tuple[Any, Callable[[], Any]]


def make_string(rng: random.Random) -> Made:
    kind = rng.randrange(4)
    if kind == 0:
        low, high = sorted(rng.choices(range(6), k=2))
        schema = {"type": "string", "minLength": low, "maxLength": high}
        return schema, lambda: "".join(rng.choices('aé😀"\\\n', k=rng.randint(low, high)))
    if kind == 1:
        pattern, texts = rng.choice(
            [
                ("^[a-z]{2,3}$", ["ab", "abc"]),
                ('"[^x]*"|\\\\', ['""', '"\n\\é"', "\\"]),
                (r"^\d+(\.\d+)?$", ["1", "20.5"]),
            ]
        )
        return {"type": "string", "pattern": pattern}, lambda: rng.choice(texts)
    if kind == 2:
        name, text = rng.choice(
            [
                ("date", "2024-02-29"),
                ("time", "23:59:00.5+01:00"),
                ("date-time", "2000-12-31T00:00:00Z"),
                ("email", "a.b+c@d-e.org"),
                ("uuid", "123e4567-e89b-12d3-a456-426614174000"),
                ("ipv4", "255.0.10.9"),
                ("hostname", "a.example.org"),
                ("uri", "https://a.org:80/b/c%20d?e=f#g"),
            ]
        )
        return {"type": "string", "format": name}, lambda: text
    return {"type": "string"}, lambda: "".join(rng.choices('aé😀"\\\n\x01/', k=rng.randint(0, 5)))


def make_number(rng: random.Random) -> Made:
    low, high = sorted(rng.choices(range(-1200, 1200), k=2))
    name = rng.choice(["integer", "number"])
    if rng.random() < 0.3:
        return {"type": name}, lambda: rng.choice([0, -7, 123456, 10**20])
    schema: dict[str, Any] = {"type": name}
    least, most = low - 1000, high + 1000
    if rng.random() < 0.7:
        least = low
        schema["minimum"] = low if rng.random() < 0.5 or name == "integer" else low - 0.25
    if rng.random() < 0.7:
        most = high
        schema["exclusiveMaximum"] = high + 1 if name == "integer" else high + 0.125
    if name == "integer":
        return schema, lambda: rng.randint(least, most)
    return schema, lambda: rng.choice(
        [rng.randint(least, most), round(rng.uniform(least, most), 3)]
    )


def make_values(rng: random.Random) -> Made:
    values = rng.sample([1, -2.5, "x", 'é"', None, True, [1, "a"], {"k": [], "é": {}}], 3)
    if rng.random() < 0.5:
        return {"const": values[0]}, lambda: values[0]
    return {"enum": values}, lambda: rng.choice(values)


def make_plain(rng: random.Random) -> Made:
    return rng.choice(
        [
            ({"type": "boolean"}, lambda: rng.random() < 0.5),
            ({"type": "null"}, lambda: None),
            ({"type": ["null", "integer"]}, lambda: rng.choice([None, 3])),
            ({}, lambda: {"any": [1, {"thing": None}]}),
            (True, lambda: [[], {}, ""]),
        ]
    )


def make_object(rng: random.Random, depth: int) -> Made:
    names = rng.sample(WORDS, rng.randint(0, 5))
    parts = {name: make(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.4]
    schema: dict[str, Any] = {
        "type": "object",
        "title": "any",
        "properties": {name: part for name, (part, _) in parts.items()},
        "required": required,
    }
    more: Made | None = None
    if rng.random() < 0.3:
        more = make(rng, 0)
        schema["additionalProperties"] = more[0]

    def instance() -> Any:
        chosen = [n for n in names if n in required or rng.random() < 0.5]
        found = {name: parts[name][1]() for name in chosen}
        if more:
            found |= {f"{key}!": more[1]() for key in rng.sample(WORDS, rng.randint(0, 2))}
        return found

    return schema, instance


def make_array(rng: random.Random, depth: int) -> Made:
    firsts = [make(rng, depth - 1) for _ in range(rng.randint(0, 2))]
    rest, make_rest = make(rng, depth - 1)
    low, high = sorted(rng.choices(range(4), k=2))
    schema: dict[str, Any] = {"type": "array", "items": rest, "minItems": low, "maxItems": high}
    if firsts:
        schema["prefixItems"] = [part for part, _ in firsts]
    makers = [instance for _, instance in firsts]
    return schema, lambda: [
        makers[i]() if i < len(makers) else make_rest() for i in range(rng.randint(low, high))
    ]


def make_options(rng: random.Random, depth: int) -> Made:
    if rng.random() < 0.5:
        text, number = make_string(rng), make_number(rng)
        return {"oneOf": [text[0], number[0]]}, lambda: rng.choice([text, number])[1]()
    options = [make(rng, depth - 1) for _ in range(2)]
    return {"anyOf": [part for part, _ in options]}, lambda: rng.choice(options)[1]()


def make(rng: random.Random, depth: int) -> Made:
    makers: list[Callable[[], Made]] = [
        lambda: make_string(rng),
        lambda: make_number(rng),
        lambda: make_values(rng),
        lambda: make_plain(rng),
    ]
    if depth > 0:
        makers += 2 * [
            lambda: make_object(rng, depth),
            lambda: make_array(rng, depth),
            lambda: make_options(rng, depth),
        ]
    return rng.choice(makers)()


@pytest.mark.parametrize("part", range(5))
def test_what_it_writes_is_valid_and_what_is_valid_it_accepts(part: int) -> None:
    for seed in range(100 * part, 100 * part + 100):
        rng = random.Random(seed)
        schema, instance = make(rng, 3)
        free, strict = automaton_of(schema), automaton_of(schema, any_whitespace=False)
        for _ in range(3):
            for automaton in (free, strict):
                text = walk(automaton, rng)
                assert is_valid(schema, text), (seed, schema, text)
            value = instance()
            plain = json.dumps(value, ensure_ascii=False)
            assert is_valid(schema, plain), "the test itself"
            assert accepts(strict, plain), (seed, schema, plain)
            for options in ({}, {"separators": (",", ":")}, {"indent": 2}, {"indent": "\t"}):
                text = json.dumps(value, ensure_ascii=False, **options)
                assert accepts(free, text), (seed, schema, text)


def test_a_text_with_a_wrong_byte_is_accepted_only_if_it_is_valid() -> None:
    tried = accepted = 0
    for seed in range(150):
        rng = random.Random(seed)
        schema, instance = make(rng, 2)
        automaton = automaton_of(schema)
        text = json.dumps(instance(), ensure_ascii=False)
        for _ in range(20):
            at = rng.randrange(len(text) + 1)
            wrong = (
                text[:at] + rng.choice(["", *'"{}[],:0-.1ea\\']) + text[at + rng.randint(0, 1) :]
            )
            tried += 1
            if accepts(automaton, wrong):
                accepted += 1
                assert is_valid(schema, wrong), (seed, schema, wrong)
    assert 0 < accepted < tried / 2


def test_numbers_within_bounds() -> None:
    ends = [None, -120, -11, -10, -1, 0, 1, 9, 10, 99, 101, 1000]
    for low, high in itertools.product(ends, ends):
        if low is not None and high is not None and low > high:
            continue
        bounds = {"minimum": low, "maximum": high}
        schema = {"type": "integer"} | {k: v for k, v in bounds.items() if v is not None}
        automaton = automaton_of(schema)
        for number in [*range(-130, 130), 999, 1000, 1001, -(10**9), 10**9]:
            fits = (low is None or low <= number) and (high is None or number <= high)
            assert accepts(automaton, str(number)) == fits, (schema, number)
        assert not accepts(automaton, "01") and not accepts(automaton, "-")


def test_fractions_within_bounds() -> None:
    rng = random.Random(0)
    ends = [-10.5, -1, -0.25, 0, 0.1, 0.75, 1.5, 99.99, 100]
    for low, high in itertools.combinations(ends, 2):
        for least, most in itertools.product(
            ["minimum", "exclusiveMinimum"], ["maximum", "exclusiveMaximum"]
        ):
            schema = {"type": "number", least: low, most: high}
            automaton = automaton_of(schema)
            texts = [str(end) for end in ends] + ["0.10", "1.50", "1.500001", "-0.25000", "0.0"]
            texts += [f"{rng.uniform(low - 1, high + 1):.{rng.randint(1, 5)}f}" for _ in range(20)]
            for text in texts:
                if float(text) != 0 or text[0] != "-":  # -0 is written only below zero
                    assert accepts(automaton, text) == is_valid(schema, text), (schema, text)
            for _ in range(5):
                assert is_valid(schema, walk(automaton, rng))


def test_optional_members_in_all_combinations() -> None:
    names = "abcd"
    for required in itertools.chain.from_iterable(
        itertools.combinations(names, n) for n in range(5)
    ):
        schema = {"properties": {name: {"type": "null"} for name in names}, "required": required}
        strict = automaton_of(schema, any_whitespace=False)
        for count in range(5):
            for chosen in itertools.permutations(names, count):
                text = json.dumps(dict.fromkeys(chosen))
                fits = list(chosen) == sorted(chosen) and set(required) <= set(chosen)
                assert accepts(strict, text) == fits, (required, text)
        for wrong in ('{, "a": null}', '{"a": null, }', '{"a": null "b": null}', '{"a":null}'):
            assert not accepts(strict, wrong)


def test_size_is_linear_in_optional_members() -> None:
    def size(count: int) -> int:
        schema = {"properties": {f"p{i}": {"type": "null"} for i in range(count)}}
        return len(repr(schema_to_rules(schema))) - len(repr(schema_to_rules(True)))

    assert size(400) < 4.5 * size(100)


def test_other_members_have_other_names() -> None:
    schema = {
        "properties": {"a": {"type": "null"}, "ab": {"type": "null"}, 'q"': {"type": "null"}},
        "additionalProperties": {"type": "integer"},
    }
    automaton = automaton_of(schema)
    for name in ("", "b", "aa", "abc", "ac", "q", 'q""', "é", "\n", "\\", "日本"):
        assert accepts(automaton, json.dumps({name: 1}, ensure_ascii=False)), name
    for text in ('{"a":1}', '{"ab":1}', '{"q\\"":1}', '{"\\u0061":1}', '{"x":1, "a":null}'):
        assert not accepts(automaton, text), text
    assert accepts(automaton, '{"a":null, "x":1, "y":2}')
    assert accepts(automaton_of({"type": "object"}), '{"x": [1]}')
    assert not accepts(automaton_of({"type": "object", "properties": {}}), '{"x": [1]}')
    only = automaton_of({"required": ["a"], "additionalProperties": {"type": "integer"}})
    assert accepts(only, '{"a":1}') and accepts(only, '{"a":1,"b":2}') and not accepts(only, "{}")


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "description": "of this node"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value", "children"],
        }
    },
    "$ref": "#/$defs/node",
}


def test_a_tree() -> None:
    automaton = automaton_of(TREE)
    tree: Any = {"value": 0, "children": []}
    for depth in range(50):
        assert accepts(automaton, json.dumps(tree))
        tree = {"value": depth, "children": [tree, {"value": -1, "children": []}]}
    assert not accepts(automaton, json.dumps(tree)[:-1])
    assert not accepts(automaton, json.dumps(tree) + "}")
    rng = random.Random(1)
    for _ in range(20):
        assert is_valid(TREE, walk(automaton, rng))


def test_references() -> None:
    schema = {
        "definitions": {"a/b": {"type": "integer"}, "list": {"items": {"$ref": "#"}}},
        "anyOf": [{"$ref": "#/definitions/a~1b"}, {"$ref": "#/definitions/list"}],
    }
    automaton = automaton_of(schema)
    assert accepts(automaton, "[1, [], [[2]]]") and not accepts(automaton, '["a"]')
    place = {"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}}
    assert accepts(automaton_of(place), '{"a": 1, "b": 2}')
    beside = {
        "$defs": {"a": {"properties": {"x": {"type": "null"}}, "required": ["x"]}},
        "properties": {"one": {"$ref": "#/$defs/a", "properties": {"y": {"type": "null"}}}},
    }
    assert accepts(automaton_of(beside), '{"one": {"y": null, "x": null}}')


def test_schemas_that_are_put_together() -> None:
    both = {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
            {"properties": {"b": {"type": "integer"}}},
        ]
    }
    assert accepts(automaton_of(both), '{"a": null, "b": 1}')
    assert not accepts(automaton_of(both), '{"b": 1}')
    either = {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
        "additionalProperties": False,
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    }
    automaton = automaton_of(either)
    assert accepts(automaton, '{"a": null}') and accepts(automaton, '{"b": null}')
    assert not accepts(automaton, "{}")
    # a branch that is called by its place has not what stands beside the others
    schema = {
        "properties": {
            "p": {
                "type": "object",
                "required": ["b"],
                "anyOf": [{"properties": {"b": {}, "a": {}}}],
            },
            "q": {"$ref": "#/properties/p/anyOf/0"},
        }
    }
    automaton = automaton_of(schema)
    assert accepts(automaton, '{"p": {"b": 1}, "q": {"a": 1}}')
    assert not accepts(automaton, '{"p": {"a": 1}}')


def test_strings_and_unicode() -> None:
    short = automaton_of({"type": "string", "minLength": 2, "maxLength": 2})
    for text in ('"ab"', '"é😀"', '"\\n\\""', '"\\u00e9x"', '"\\ud83d\\ude00x"', '"\x7f "'):
        assert accepts(short, text), text
    for text in ('"a"', '"abc"', '"\n\n"', '"\\ud83dx"', '"\\x41a"', '"\x1f "', '"\\ude00x"'):
        assert not accepts(short, text), text
    rng = random.Random(0)
    for text in (walk(automaton_of({"type": "string"}), rng) for _ in range(200)):
        assert isinstance(json.loads(text), str)
        json.loads(text).encode()  # no half of a pair
    pattern = automaton_of({"pattern": '^[^a]"\\\\$'})
    assert accepts(pattern, json.dumps('\n"\\')) and accepts(
        pattern, json.dumps('é"\\', ensure_ascii=False)
    )
    assert not accepts(pattern, json.dumps('a"\\'))


def test_formats() -> None:
    good_and_bad = {
        "date": (
            ["2024-02-29", "2000-02-29", "1999-12-31"],
            ["2023-02-29", "1900-02-29", "2024-04-31"],
        ),
        "time": (["00:00:00Z", "23:59:59.123+01:30"], ["24:00:00Z", "00:00:00", "1:00:00Z"]),
        "date-time": (["2024-01-01T00:00:00Z"], ["2024-01-01 00:00:00Z", "2024-01-01"]),
        "email": (["a@b.c", "x.y+z@host"], ["a@", "@b", "a b@c", "a..b@c"]),
        "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
        "ipv6": (
            ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "fe80::a:B", "1::8", "1:2:3:4:5:6:7::"],
            ["", ":", "1", "1:2:3:4:5:6:7", "1::2::3", "12345::", "1:2:3:4:5:6:7:8:9", "g::"],
        ),
        "duration": (
            ["P1Y2M3DT4H5M6S", "P3W", "PT1H", "P1D", "PT30S", "P1M", "P2DT1M"],
            ["P", "PT", "1D", "P1", "P1S", "PT1D", "P1YT", "P1Y3D", "-P1D"],
        ),
        "ipv4": (["0.0.0.0", "255.255.255.255"], ["256.0.0.1", "01.2.3.4", "1.2.3"]),
        "hostname": (["a", "a-b.example"], ["-a", "a-", "a..b", "a" * 31]),
        "uri": (["http://a/b?c=d#e", "ftp://h:21"], ["a", "http:/a", "http://a b"]),
    }
    for name, (good, bad) in good_and_bad.items():
        automaton = automaton_of({"type": "string", "format": name})
        assert all(accepts(automaton, json.dumps(text)) for text in good), name
        assert not any(accepts(automaton, json.dumps(text)) for text in bad), name


def test_any_ipv6_is_what_python_reads() -> None:
    automaton = automaton_of({"format": "ipv6"})
    rng = random.Random(0)
    num_good = 0
    for _ in range(5000):
        text = "".join(rng.choice(["1", "0a:", ":", "f", "::", "12:"]) for _ in range(8))
        try:
            ipaddress.IPv6Address(text)
            is_good = True
        except ValueError:
            is_good = False
        num_good += is_good
        assert accepts(automaton, json.dumps(text)) == is_good, text
    assert num_good > 50


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 10, 64, 99, 100])
def test_multiples(divisor: int) -> None:
    for bounds in (
        {},
        {"minimum": 0},
        {"exclusiveMinimum": 0},
        {"maximum": 0},
        {"exclusiveMaximum": 0},
        {"minimum": -150, "maximum": 333},
    ):
        schema = {"type": "integer", "multipleOf": divisor} | bounds
        automaton = automaton_of(schema)
        for k in range(-500, 500):
            assert accepts(automaton, str(k)) == is_valid(schema, str(k)), (schema, k)
        assert not accepts(automaton, "00") and not accepts(automaton, "-0")
    big = 10**40 - 10**40 % divisor
    automaton = automaton_of({"multipleOf": divisor})
    assert accepts(automaton, str(big)) and accepts(automaton, str(big + 1)) == (divisor == 1)


def test_values_beside_what_they_must_be() -> None:
    schema = {"enum": ["a", "bcd", "é", 3, 10, 12.5, True, None], "maxLength": 1, "minimum": 5}
    automaton = automaton_of(schema)
    for value in schema["enum"]:  # type: ignore[attr-defined]
        text = json.dumps(value, ensure_ascii=False)
        assert accepts(automaton, text) == is_valid(schema, text), value
    assert accepts(automaton_of({"enum": [4, 6], "multipleOf": 3}), "6")
    assert not accepts(automaton_of({"enum": [4, 6], "multipleOf": 3}), "4")


NEVER: Any = {"type": "object", "properties": {"n": {"$ref": "#/$defs/never"}}, "required": ["n"]}


@pytest.mark.parametrize(
    "nothing", [False, {"minLength": 3, "maxLength": 2}, {"$ref": "#/$defs/never"}]
)
def test_what_has_no_value_is_left_out(nothing: Any) -> None:
    "A member, an item, an option, a type: whatever may be absent."
    defs = {"$defs": {"never": NEVER}}
    one = automaton_of(defs | {"properties": {"a": nothing, "b": {"const": 1}}})
    assert accepts(one, "{}") and accepts(one, '{"b": 1}')
    assert not any(accepts(one, text) for text in ('{"a": 1}', '{"a": "x", "b": 1}', '{"a":', "["))
    assert one.advance(one.start, b'{"a') == -1
    none = automaton_of(defs | {"properties": {"a": nothing}})
    assert accepts(none, "{}") and none.advance(none.start, b'{"') == -1
    others = automaton_of(defs | {"type": "object", "additionalProperties": nothing})
    assert accepts(others, "{}") and others.advance(others.start, b'{"') == -1
    items = automaton_of(defs | {"type": "array", "items": nothing})
    assert accepts(items, "[]") and items.advance(items.start, b"[1") == -1
    places = automaton_of(defs | {"prefixItems": [{"const": 1}, nothing], "items": {"const": 2}})
    assert accepts(places, "[1]") and places.advance(places.start, b"[1,") == -1
    option = automaton_of(defs | {"anyOf": [nothing, {"const": 1}]})
    assert accepts(option, "1") and not accepts(option, '"abc"')
    with pytest.raises(ValueError, match="nothing fits|ever finish"):
        automaton_of(defs | {"properties": {"a": nothing}, "required": ["a"]})


def test_types_of_which_one_has_no_value() -> None:
    automaton = automaton_of({"type": ["string", "null"], "minLength": 2, "maxLength": 1})
    assert accepts(automaton, "null") and automaton.advance(automaton.start, b'"') == -1


def test_integers_as_long_as_they_like() -> None:
    many = 10**40
    for schema, text in (
        ({"const": many}, str(many)),
        ({"type": "integer", "minimum": many}, str(many + 7)),
        ({"enum": [-many]}, str(-many)),
    ):
        asked = StructuredOutputsParams(json=schema)
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=StructuredOutputsParams)
        assert accepts(automaton_of(again.json), text)
        assert not accepts(automaton_of(again.json), "5")
    with pytest.raises(ValueError, match="not JSON"):
        StructuredOutputsParams(json={"a": {1}})
    with pytest.raises(ValueError, match="not JSON"):
        schema_to_rules('{"const": 1' + "0" * 5000 + "}")


def test_whitespace() -> None:
    schema = {"properties": {"a": {"items": {"type": "integer"}}}}
    free, strict = automaton_of(schema), automaton_of(schema, any_whitespace=False)
    own = automaton_of(schema, whitespace_pattern=r"[ \n]*")
    loose = '{ "a": [ 1, 2 ] }'
    assert accepts(free, loose) and accepts(own, loose) and not accepts(strict, loose)
    assert accepts(strict, '{"a": [1, 2]}') and not accepts(strict, '{"a":[1,2]}')
    assert accepts(own, '{\n\n\n  "a":[]}') and not accepts(free, '{\n\n"a":[]}')
    assert not accepts(free, '{"a" :[]}') and not accepts(free, '{"a":[1 ,2]}')
    assert not accepts(free, '{  "a":[]}') and not accepts(free, ' {"a":[]}')
    state = free.advance(free.start, b"{\n" + 32 * b" ")
    assert free.row(state)[ord(" ")] == -1
    with pytest.raises(ValueError, match="no whitespace in JSON"):
        schema_to_rules(schema, whitespace_pattern=r"\s*")  # \v and \f are none
    assert accepts(automaton_of({"const": {"a": []}}, any_whitespace=False), '{"a": []}')


REFUSED = [
    (False, "at #: nothing fits"),
    ({"enum": []}, "at #/enum: nothing fits"),
    ({"type": "string", "enum": [1]}, "at #/enum: nothing fits"),
    ({"type": []}, "at #/type"),
    ({"type": "text"}, "at #/type: nothing fits 'text'"),
    ({"minLength": 3, "maxLength": 2}, "at #: nothing fits"),
    (
        {"items": {"minItems": 3, "maxItems": 2}, "minItems": 1},
        "at #/items: nothing fits",
    ),
    ({"prefixItems": [{}], "minItems": 2}, "at #: nothing fits"),
    ({"type": "integer", "minimum": 3.2, "maximum": 3.8}, "at #: nothing fits"),
    (
        {"properties": {"a": {}}, "required": ["b"], "additionalProperties": False},
        "required 'b' is not among properties",
    ),
    ({"const": float("nan")}, "at #/const: .*neither NaN nor infinity"),
    ({"items": {"enum": [1, [float("inf")]]}}, "at #/items/enum: .*neither NaN"),
    ({"properties": {"a/b": {"not": {}}}}, "at #/properties/a~1b/not: the keyword 'not'"),
    ({"type": "array", "uniqueItems": True}, "at #/uniqueItems"),
    ({"type": "number", "multipleOf": 0.01}, "at #/multipleOf: .*from 1 to 100"),
    ({"type": "integer", "multipleOf": 101}, "at #/multipleOf"),
    ({"type": "integer", "multipleOf": -2}, "at #/multipleOf"),
    ({"type": "integer", "multipleOf": True}, "at #/multipleOf"),
    ({"multipleOf": 3, "minimum": 10}, "too far apart"),
    ({"multipleOf": 3, "minimum": 10, "maximum": 10**6}, "too far apart"),
    ({"multipleOf": 9, "minimum": 10, "maximum": 17}, "no multiple of 9"),
    ({"patternProperties": {}}, "at #/patternProperties"),
    ({"if": {}, "then": {}}, "at #/if"),
    ({"dependentRequired": {}}, "at #/dependentRequired"),
    ({"propertyNames": {}}, "at #/propertyNames"),
    ({"contains": {}}, "at #/contains"),
    ({"minProperties": 1}, "at #/minProperties"),
    ({"requried": []}, "at #/requried"),
    ({"items": [{}]}, "at #/items"),
    ({"format": "iri"}, "format 'iri' is not served"),
    ({"pattern": "(?=a)"}, "at #/pattern: .*lookahead"),
    ({"pattern": 5}, "at #/pattern"),
    ({"pattern": "a", "maxLength": 3}, "pattern beside maxLength"),
    ({"enum": ["a"], "pattern": "a"}, "'pattern' beside 'enum'"),
    ({"enum": ["a", "bc"], "minLength": 3}, "at #/enum: nothing fits"),
    ({"const": 3, "exclusiveMaximum": 3}, "at #/const: nothing fits"),
    ({"anyOf": [False, {"minLength": 2, "maxLength": 1}]}, "nothing fits"),
    ({"properties": {"a": False}, "required": ["a"]}, "at #/properties/a: nothing fits"),
    ({"properties": {"a": {"type": "text"}}}, "nothing fits 'text'"),
    ({"$ref": "#/$defs/none"}, "leads nowhere"),
    ({"$ref": "other.json"}, "no place in this schema"),
    ({"$ref": 3}, "no place in this schema"),
    ({"$ref": "#", "type": "object"}, "without an end"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "two different values of 'type'"),
    (
        {"allOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"properties": {}}]},
        "'additionalProperties' and 'properties' of different schemas",
    ),
    ({"anyOf": []}, "at #/anyOf"),
    ({"minimum": True}, "at #/minimum"),
    ({"minimum": "3"}, "at #/minimum"),
    ({"maximum": float("inf")}, "at #/maximum"),
    ({"minLength": -1}, "at #/minLength"),
    ({"properties": []}, "properties is an object"),
    ({"enum": 3}, "is no list"),
    ({"enum": [float("nan")]}, "neither NaN"),
    ({"enum": ["\ud800"]}, "surrogates"),
    ({"properties": {"\ud800": {}}}, "surrogates"),
    (3, "is no schema"),
    ("{", "not JSON"),
    ({"a": {1}}, "not JSON"),
    ({"minimum": 10**400, "maximum": 0}, "nothing fits"),
    ({"type": "integer", "enum": [float("inf")]}, "nothing fits"),
]


@pytest.mark.parametrize("schema, message", REFUSED, ids=lambda value: str(value)[:50])
def test_what_is_not_served_is_named(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schema_to_rules(schema)


def test_small_schemas_that_ask_for_much_are_refused() -> None:
    defs: dict[str, Any] = {"d0": {"type": "object"}}
    for i in range(1, 40):
        defs[f"d{i}"] = {"allOf": [{"$ref": f"#/$defs/d{i - 1}"}] * 2}
    with pytest.raises(ValueError, match="more than 10,000 schemas"):
        schema_to_rules({"$defs": defs, "$ref": "#/$defs/d39"})
    deep: Any = {}
    for _ in range(3000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="deep|recursion"):
        schema_to_rules(deep)
    with pytest.raises(ValueError, match="max_size"):
        automaton_of({"type": "string", "minLength": 10**9})
    with pytest.raises(ValueError, match="ever finish"):
        automaton_of({"properties": {"a": {"$ref": "#"}}, "required": ["a"]})


def test_annotations_ask_for_nothing() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "x",
        "title": "T",
        "description": "D",
        "default": 1,
        "examples": [1],
        "deprecated": True,
        "x-own": 3,
    }
    assert schema_to_rules(schema)["#"] == schema_to_rules(True)["#"]
    assert schema_to_rules(json.dumps(schema)) == schema_to_rules(schema)


# --- EBNF


def ebnf(text: str) -> Automaton:
    return Automaton(parse_ebnf(text))


def test_ebnf_notation() -> None:
    cases = [
        ('root ::= "a" | "b" "c"', ["a", "bc"], ["b", "ac", ""]),
        ('root ::= ("a" | "b")* "c"+ "d"?', ["c", "abccd"], ["d", "ab"]),
        ('root ::= "a"{2} "b"{1,} "c"{0,2}', ["aab", "aabbcc"], ["ab", "aabccc"]),
        ("root ::= [a-c_-]+", ["a-_c"], ["d", ""]),
        ("root ::= [^a-c\\]]", ["d", "é", "😀", "\n"], ["a", "]", "dd"]),
        ('root ::= "\\x41\\u00e9\\U0001f600\\"\\\\\\n"', ['Aé😀"\\\n'], ["A"]),
        ("root ::= .{2}", ["é😀", "\n\n"], ["a", "abc"]),
        ('# first\nroot ::= x  # a rule\n  | y\nx ::=\n  "x"\ny ::= "y" # last', ["x", "y"], ["z"]),
        ('root ::= ws "a"\nws ::= | " " ws', ["a", "   a"], [" "]),
        ('root ::= "(" root ")" | ""', ["", "((()))"], ["(()", ")("]),
        ('root ::= "a"?{2}', ["", "a", "aa"], ["aaa"]),
        ("root ::= [\\^\\-\\\\]", ["^", "-", "\\"], ["a"]),
        ('root ::= a-b.c_1\na-b.c_1 ::= "x"', ["x"], []),
    ]
    for grammar, good, bad in cases:
        automaton = ebnf(grammar)
        assert all(accepts(automaton, text) for text in good), grammar
        assert not any(accepts(automaton, text) for text in bad), grammar


@pytest.mark.parametrize(
    "grammar, message",
    [
        ('root ::= "a', "line 1, column 10: a literal without its closing"),
        ('root ::= "a"\n\n  x ::= [a', "line 3, column 9: a class without its closing"),
        ("root ::= x", "line 1, column 10: there is no rule 'x'"),
        ('a ::= "b"', "no rule 'root'"),
        ("", "no rule 'root'"),
        ("root ::= [z-a]", "the range z-a is empty"),
        ("root ::= []", "a class of no characters"),
        ('root ::= ("a"', "would close a group"),
        ('root ::= "a" )', "column 14: '\\)' where a rule"),
        ('root ::= "\\d"', "the escape .d is not served"),
        ('root ::= "\\ud800"', "is no character"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule 'root' is there already"),
        ('root ::= "a"{3,1}', "asks for more than it allows"),
        ('root ::= "a"{,1}', "a count is"),
        ("root ::= *", "'\\*' where a rule"),
        ('start: "a"', "Lark's `name: ...` is not served"),
        ('root ::= (="a")', "'=' begins nothing"),
        ("root ::= <think>", "'<' begins nothing"),
        ("root ::= " + "(" * 500, "more than 100 groups"),
    ],
)
def test_ebnf_errors(grammar: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_ebnf(grammar)


def test_left_recursion_is_named() -> None:
    with pytest.raises(ValueError, match="left recursion.*expr"):
        ebnf('root ::= expr\nexpr ::= expr "+" expr | [0-9]')


def test_any_json() -> None:
    rules = json_rules()
    rng = random.Random(0)
    for start in ("root", "value"):
        automaton = Automaton(rules, start)
        for _ in range(100):
            json.loads(walk(automaton, rng))
    value = Automaton(rules, "value")
    good = ["1", "-0.5e+10", '"a"', "null", "[]", '[{"a": [true]}]', '{"a":{"b":{}}}']
    bad = ["01", "+1", ".5", "1.", "'a'", "nul", "[1,]", "{a:1}", '{"a"}', "", "NaN", "[1 2]"]
    assert all(accepts(value, text) for text in good)
    assert not any(accepts(value, text) for text in bad)
    assert not accepts(Automaton(rules), "[]") and accepts(Automaton(rules), "{}")
    assert re.fullmatch(
        r"\{.*\}", walk(Automaton(json_rules(any_whitespace=False)), rng), re.DOTALL
    )


# --- Structural tags


OLD: Any = {
    "structures": [
        {"begin": "<f=a>", "schema": {"enum": [1, 2]}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def triggered(**options: Any) -> Any:
    tags = [
        {
            "type": "tag",
            "begin": one["begin"],
            "content": {"type": "json_schema", "json_schema": one["schema"]},
            "end": one["end"],
        }
        for one in OLD["structures"]
    ]
    return {"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": tags} | options}


def judge(text: str, at_least_one: bool = False, stop_after_first: bool = False) -> bool:
    "By `re`: free text without the trigger, and tags."
    free = "(?:(?!<f=).)*"
    tag = "(?:<f=a>[12]</f>|<f=b>(?:true|false)</f>)"
    if stop_after_first:
        pattern = f"{free}{tag}" if at_least_one else f"{free}(?:{tag})?"
    else:
        pattern = f"{free}(?:{tag}{free}){'+' if at_least_one else '*'}"
    return re.fullmatch(pattern, text, re.S) is not None


@pytest.mark.parametrize("at_least_one", [False, True])
@pytest.mark.parametrize("stop_after_first", [False, True])
def test_tags_in_free_text(at_least_one: bool, stop_after_first: bool) -> None:
    how = {"at_least_one": at_least_one, "stop_after_first": stop_after_first}
    automaton = Automaton(tag_to_rules(triggered(**how)))
    rng = random.Random(0)
    pieces = ["<", "f", "=", "<f=", "<f=a>", "<f=b>", "1", "true", "</f>", "é", "<<f=a>2</f>", "\n"]
    num_good = 0
    for _ in range(4000):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(8)))
        good = judge(text, **how)
        num_good += good and "</f>" in text
        assert accepts(automaton, text) == good, text
    assert num_good > 20


def test_both_forms_of_a_tag_are_one() -> None:
    old, new = Automaton(tag_to_rules(OLD)), Automaton(tag_to_rules(json.dumps(triggered())))
    for text in ("", "x <f=a>1</f> y <f=b>false</f>", "<f=a>3", "<f=c", "<f=b>true</f"):
        assert accepts(old, text) == accepts(new, text) == judge(text)


def test_triggers_that_share_their_ends() -> None:
    "Which is met first counts, and none is missed."
    triggers = ["aab", "ab!", "b?", "caa"]
    tags = [
        {"type": "tag", "begin": t, "content": {"type": "const_string", "value": "0"}, "end": ""}
        for t in triggers
    ]
    automaton = Automaton(
        tag_to_rules({"format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}})
    )
    either = "|".join(map(re.escape, triggers))
    pattern = re.compile(f"(?:(?!{either}).)*(?:(?:{either})0(?:(?!{either}).)*)*")
    rng = random.Random(1)
    for _ in range(5000):
        text = "".join(rng.choice("aabc!?0") for _ in range(rng.randrange(9)))
        seen, place, good = "", 0, True
        while place < len(text) and good:  # read from the left, as a model writes
            seen += text[place]
            place += 1
            if seen.endswith(tuple(triggers)):
                good = text[place : place + 1] == "0"
                seen, place = "", place + 1
        assert accepts(automaton, text) == good, (text, pattern)


def test_formats_within_each_other() -> None:
    tag = {
        "type": "sequence",
        "elements": [
            {
                "type": "tag",
                "begin": "<think>",
                "content": {"type": "any_text"},
                "end": "</think>",
            },
            {
                "type": "or",
                "elements": [
                    {"type": "regex", "pattern": "[a-c]{2}"},
                    {"type": "grammar", "grammar": 'root ::= "(" root? ")"'},
                    {"type": "json_schema", "json_schema": {"enum": ["x"]}},
                ],
            },
        ],
    }
    automaton = Automaton(tag_to_rules({"type": "structural_tag", "format": tag}))
    for text in ("<think></think>ab", "<think>a</thin</think>(())", '<think>é<</think>"x"'):
        assert accepts(automaton, text), text
    for text in ("ab", "<think></think>", "<think></think>abc", "<think></think>(", "<think>"):
        assert not accepts(automaton, text), text


@pytest.mark.parametrize(
    "tag, words",
    [
        ("{", "not JSON"),
        ([], "type structural_tag is expected"),
        ({"type": "other", "format": {}}, "type structural_tag is expected"),
        ({"format": {}}, "at #/format"),
        ({"format": {"type": "qwen_xml_parameter"}}, "'qwen_xml_parameter' is not served"),
        ({"format": {"type": "any_text"}}, "'any_text' is not served"),
        ({"structures": []}, "at #/structures"),
        ({"structures": [{"begin": "a"}], "triggers": ["a"]}, "begin, schema and end"),
        (OLD | {"triggers": ["<g"]}, "begins with no trigger"),
        (OLD | {"triggers": []}, "at #/format/triggers"),
        (OLD | {"triggers": [""]}, "an empty one"),
        ({"structures": OLD["structures"]}, "at #/format/triggers"),
        (
            {"structures": [{"begin": "<", "schema": {"not": {}}, "end": ">"}], "triggers": ["<"]},
            "'not' is not served",
        ),
        ({"format": {"type": "const_string", "value": "\ud800"}}, "surrogates"),
        ({"format": {"type": "tag", "begin": "a", "content": 3, "end": "b"}}, "format None"),
        ({"format": {"type": "tag", "begin": "a", "content": {}, "end": None}}, "is no text"),
    ],
)
def test_tags_that_are_refused(tag: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tag_to_rules(tag)


def test_what_is_required_may_be_no_property() -> None:
    "Nothing is said of it, so it may be anything; others still do not come."
    automaton = Automaton(schema_to_rules({"properties": {"a": {}}, "required": ["b"]}))

    def is_whole(text: str) -> bool:
        state = automaton.advance(automaton.start, text.encode())
        return state >= 0 and automaton.is_final(state)

    assert is_whole('{"b": [1]}') and is_whole('{"a": 1, "b": null}')
    assert not is_whole("{}") and not is_whole('{"a": 1}') and not is_whole('{"b": 1, "c": 2}')


def test_a_schema_without_an_end_is_no_json() -> None:
    endless: dict[str, Any] = {"type": "object"}
    endless["properties"] = {"a": endless}
    with pytest.raises(ValueError, match="Circular"):
        schema_to_rules(endless)
    for kind in ("json", "structural_tag"):
        with pytest.raises(ValueError, match="Circular"):
            StructuredOutputsParams(**{kind: endless})


@pytest.mark.parametrize("key", ["maxLength", "maxItems"])
def test_what_is_too_large_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=r"rule '#/properties/a'.*\{0,(400000|399999)\}.*" + key):
        Automaton(schema_to_rules({"properties": {"a": {key: 400_000}}, "required": ["a"]}))


# What a library leaves out

DROPPED: list[tuple[Any, str]] = [
    ({"not": {}}, "at #/not"),
    (
        {"properties": {"a": {"type": "array", "uniqueItems": True}}},
        "at #/properties/a/uniqueItems",
    ),
    ({"type": "string", "format": "nonsense"}, "format 'nonsense'"),
    ({"type": "string", "format": ["date"]}, "format"),
    ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"contains": {}}}}, "at #/\\$defs/a/contains"),
    ({"type": "string", "pattern": "a", "minLength": 2}, "'minLength' beside 'pattern'"),
    ({"type": "string", "pattern": "a", "format": "date"}, "'format' beside 'pattern'"),
    ({"anyOf": [{"type": "null"}], "minimum": 3}, "'minimum' beside 'anyOf'"),
    ({"enum": ["a", 1], "type": "string"}, "at #/type"),
    ({"enum": [3], "minimum": 4}, "'minimum' beside 'enum'"),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "at #/allOf"),
    ({"type": "integer", "multipleOf": 3, "minimum": 4}, "'minimum' beside 'multipleOf'"),
    ({"type": "number", "multipleOf": 3}, "at #/multipleOf"),
    ({"properties": {"a": {}}, "required": ["b"]}, "required 'b' is not among properties"),
    ({"minimum": 3}, "without a type"),
    ({"pattern": "a"}, "without a type"),
    (3, "is no schema"),
]
KEPT: list[Any] = [
    True,
    {},
    {"type": "string", "enum": ["a"], "description": "x"},
    {"properties": {"a": {"$ref": "#"}, "b": False}, "required": ["a"]},
    {"type": "integer", "minimum": 3, "exclusiveMaximum": 9},
    {"type": "object", "minProperties": 1, "additionalProperties": True},
    {"type": "string", "format": "uri-reference"},
    {"anyOf": [{"type": "integer"}, {"type": "array", "minItems": 2, "items": {}}]},
]


@pytest.mark.parametrize("schema, words", DROPPED)
def test_what_xgrammar_would_drop_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_for_library(schema, XGRAMMAR_KEYWORDS, XGRAMMAR_FORMATS)


@pytest.mark.parametrize("schema", KEPT)
def test_what_xgrammar_keeps_is_served(schema: Any) -> None:
    check_for_library(schema, XGRAMMAR_KEYWORDS, XGRAMMAR_FORMATS)
