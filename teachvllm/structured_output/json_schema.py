import json
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NoReturn
from urllib.parse import unquote

from teachvllm.structured_output.automaton import (
    Bytes,
    Choice,
    Concat,
    Expr,
    Repeat,
    Rule,
    characters,
    complement,
    literal,
    parse_regex,
)
from teachvllm.structured_output.grammar import json_rules


EMPTY = Concat(())
COMMA, COLON, SPACE = Rule("comma"), Rule("colon"), Rule("ws")


def refuse(path: str, why: str) -> NoReturn:
    "Raise `ValueError`: a schema, or what is at this place of it, is not served."
    raise ValueError(f"JSON schema, at {path}: {why}")


def joined(parts: Sequence[Expr]) -> Expr | None:
    "These, with commas between; None of none."
    pieces = tuple(piece for part in parts for piece in (COMMA, part))[1:]
    return Concat(pieces) if pieces else None


def enclosed(begin: str, inner: Expr | None, end: str, may_be_empty: bool = False) -> Expr:
    "Brackets with this inside; None: with nothing, which `may_be_empty` allows beside the other."
    body = () if inner is None else (Repeat(Concat((inner, SPACE)), int(not may_be_empty), 1),)
    return Concat((literal(begin), SPACE, *body, literal(end)))


def constant(value: Any) -> Expr:
    "One value: strings and numbers as `json.dumps` writes them, whitespace as it may be."
    if isinstance(value, dict):
        members = [Concat((constant(key), COLON, constant(v))) for key, v in value.items()]
        return enclosed("{", joined(members), "}")
    if isinstance(value, list):
        return enclosed("[", joined([constant(v) for v in value]), "]")
    return literal(json.dumps(value, ensure_ascii=False, allow_nan=False))


def escaped(point: int) -> bytes:
    "A character as `json.dumps` writes it inside a string."
    return json.dumps(chr(point), ensure_ascii=False)[1:-1].encode()


MUST_ESCAPE = {*range(0x20), ord('"'), ord("\\")}
PLAIN = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xFF))  # all other bytes


def in_string(expr: Expr) -> Expr:
    "What fits an expression of plain text, as it is written inside a JSON string."
    match expr:
        case Bytes(ranges):
            has = {byte for low, high in ranges for byte in range(low, high + 1)}
            escapes = [literal(escaped(byte)) for byte in sorted(MUST_ESCAPE & has)]
            ends = [(max(a, c), min(b, d)) for a, b in ranges for c, d in PLAIN]
            plain = Bytes(tuple((low, high) for low, high in ends if low <= high))
            return Choice((plain, *escapes)) if escapes else expr
        case Concat(parts):
            return Concat(tuple(map(in_string, parts)))
        case Choice(options):
            return Choice(tuple(map(in_string, options)))
        case Repeat(part, low, high):
            return Repeat(in_string(part), low, high)
    return expr


def quoted(inner: Expr) -> Expr:
    "A JSON string with this between its quotes."
    return Concat((literal('"'), inner, literal('"')))


DATE = (
    r"[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8]))"
    r"|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29"
)
CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{CLOCK}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{CLOCK})"
LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,28}[A-Za-z0-9])?"  # eight of 30 characters: within 253
HOST = rf"{LABEL}(\.{LABEL}){{0,7}}"
OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
MAIL = r"[A-Za-z0-9_+-]{1,20}(\.[A-Za-z0-9_+-]{1,20}){0,2}"  # a name of 64 characters at most
SIGN = r"([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": rf"({DATE})T{TIME}",
    "email": rf"{MAIL}@{HOST}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{OCTET}(\.{OCTET}){{3}}",
    "hostname": HOST,
    "uri": rf"[a-z][a-z0-9+.-]*://{HOST}(:[0-9]{{1,5}})?(/{SIGN}*)*(\?({SIGN}|[/?])*)?(#({SIGN}|[/?])*)?",
}


def string_of(schema: dict[str, Any], path: str) -> Expr:
    "The strings of a schema: of a pattern, a format, or a length in characters."
    asked = [key for key in ("pattern", "format", "minLength", "maxLength") if key in schema]
    if {"pattern", "format"} & set(asked):
        if len(asked) > 1:
            refuse(path, f"{asked[0]} beside {asked[1]}: one regex cannot hold both")
        name = schema[asked[0]]
        if not isinstance(name, str):
            refuse(f"{path}/{asked[0]}", f"{name!r} is no text")
        if asked == ["format"] and name not in FORMATS:
            refuse(path, f"format {name!r} is not served; served are {', '.join(FORMATS)}")
        try:
            return quoted(in_string(parse_regex(FORMATS[name] if asked == ["format"] else name)))
        except ValueError as error:
            refuse(f"{path}/pattern", str(error))
    low, high = size_of(schema, "Length", path)
    return quoted(Repeat(Rule("character"), low, high))


def size_of(schema: dict[str, Any], what: str, path: str) -> tuple[int, int | None]:
    "The values of `minLength` and `maxLength`, or of `minItems` and `maxItems`."
    low, high = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    for key, value in ((f"min{what}", low), (f"max{what}", high)):
        if value is not None and (type(value) is not int or value < 0):
            refuse(f"{path}/{key}", f"{value!r} is no count")
    if high is not None and low > high:
        refuse(path, f"nothing fits: min{what} {low} is more than max{what} {high}")
    return low, high


DIGIT = Bytes(((0x30, 0x39),))


def digit(low: int, high: int) -> Expr:
    return Bytes(((0x30 + low, 0x30 + high),))


def fraction(places: int) -> Expr:
    "A point and up to so many digits behind it, or nothing."
    if not places:
        return EMPTY
    return Repeat(Concat((literal("."), Repeat(DIGIT, 1, places))), 0, 1)


def digits_between(low: str, high: str, places: int) -> Expr:
    """As many digits as `low` and `high` have, no smaller and no larger than they.

    The last `places` of them stand behind a point, and may be left out where they are zeros.
    """
    if not low:
        return EMPTY
    left = len(low)
    if set(low) == {"0"} and set(high) == {"9"}:
        whole = max(left - places, 0)
        if left < places:
            return Repeat(DIGIT, 0, left)
        return Concat((Repeat(DIGIT, whole, whole), fraction(places)))
    first, last = int(low[0]), int(high[0])
    least, most = "0" * (left - 1), "9" * (left - 1)
    if first == last:
        spans = [(first, last, low[1:], high[1:])]
    else:
        spans = [(first, first, low[1:], most), (last, last, least, high[1:])]
        if first + 1 < last:
            spans.append((first + 1, last - 1, least, most))
    body: Expr = Choice(
        tuple(Concat((digit(a, b), digits_between(x, y, places))) for a, b, x, y in spans)
    )
    if left == places:
        body = Concat((literal("."), body))
    may_stop = left <= places and set(low) == {"0"}
    return Repeat(body, 0, 1) if may_stop else body


def magnitude(low: int, high: int | None, places: int) -> Expr:
    "The numbers from `low` to `high`, both at least 0 and counted in units of the last place."
    low_text = str(low).zfill(places + 1)
    high_text = None if high is None else str(high).zfill(places + 1)
    options = []
    longest = len(low_text) if high_text is None else len(high_text)
    for length in dict.fromkeys((len(low_text), longest)):
        least = low_text if length == len(low_text) else "1" + "0" * (length - 1)
        most = high_text if high_text and length == len(high_text) else "9" * length
        options.append(digits_between(least, most, places))
    shortest = len(low_text) - places
    between = (shortest, None if high is None else longest - places - 2)
    if between[1] is None or between[0] <= between[1]:
        options.append(Concat((digit(1, 9), Repeat(DIGIT, *between), fraction(places))))
    return Choice(tuple(options))


def between(low: int | None, high: int | None, places: int) -> Expr:
    "The numbers from `low` to `high`, in units of the last place; None: no bound."
    options = []
    if high is None or high >= 0:
        options.append(magnitude(max(low or 0, 0), high, places))
    if low is None or low < 0:
        least = max(-high, 0) if high is not None else 0
        below = magnitude(least, None if low is None else -low, places)
        options.append(Concat((literal("-"), below)))
    return Choice(tuple(options))


BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
MAX_DIGITS = 15  # that many, a float tells apart


def bound_of(value: Any, path: str) -> Fraction:
    "A bound, as the schema writes it."
    is_number = type(value) is int or type(value) is float and math.isfinite(value)
    if not is_number:
        refuse(path, f"{value!r} is no number")
    return Fraction(str(value))


def number_of(schema: dict[str, Any], path: str, is_integer: bool) -> Expr:
    """The numbers of a schema. With bounds, they come without an exponent and, unless whole, with
    so few digits that a float keeps them.
    """
    found = {key: bound_of(schema[key], f"{path}/{key}") for key in BOUNDS if key in schema}
    if not found:
        return Rule("integer" if is_integer else "number")
    places = 0
    if not is_integer:
        longest = max(len(str(abs(int(bound)))) for bound in found.values())
        places = max(MAX_DIGITS - longest, 0)
    low: int | None = None
    high: int | None = None
    for key, bound in found.items():
        scaled = bound * 10**places
        exclusive = key.startswith("exclusive")
        if key.lower().endswith("minimum"):
            least = math.floor(scaled) + 1 if exclusive else math.ceil(scaled)
            low = least if low is None else max(low, least)
        else:
            most = math.ceil(scaled) - 1 if exclusive else math.floor(scaled)
            high = most if high is None else min(high, most)
    if low is not None and high is not None and low > high:
        refuse(path, f"nothing fits: no number within {', '.join(found)}")
    return between(low, high, places)


def key_character(but: Iterable[int]) -> Expr:
    "A character of a key in its shortest spelling, but none of these code points."
    barred = set(but)
    plain = characters(*complement((point, point) for point in MUST_ESCAPE | barred))
    if not barred & MUST_ESCAPE:
        return Choice((plain, Rule("key escape")))
    escapes = [literal(escaped(point)) for point in sorted(MUST_ESCAPE - barred)]
    return Choice((plain, *escapes))


KEY_RULES = {
    "key escape": Choice(tuple(literal(escaped(point)) for point in sorted(MUST_ESCAPE))),
    "key character": key_character(()),
}


def other_than(names: Iterable[str]) -> Expr:
    "The inside of every key but these: a tree of the names' characters, left where a key differs."
    behind: dict[int, set[str]] = {}
    may_end = True
    for name in names:
        if name:
            behind.setdefault(ord(name[0]), set()).add(name[1:])
        else:
            may_end = False
    leaves = Concat((key_character(behind), Repeat(Rule("key character"), 0, None)))
    follows = [Concat((literal(escaped(p)), other_than(rest))) for p, rest in behind.items()]
    options = (leaves, *follows)
    return Choice((EMPTY, *options)) if may_end else Choice(options)


def some_required(parts: Sequence[Expr], required: Sequence[bool]) -> Expr:
    "Parts in order, one of them required: others bring a comma along, behind or before them."
    first = required.index(True)
    before = [Repeat(Concat((part, COMMA)), 0, 1) for part in parts[:first]]
    behind = [
        Repeat(Concat((COMMA, part)), int(needed), 1)
        for part, needed in zip(parts[first + 1 :], required[first + 1 :])
    ]
    return Concat((*before, parts[first], *behind))


ANNOTATIONS = set(
    "title description default examples example deprecated readOnly writeOnly discriminator"
    " contentEncoding contentMediaType contentSchema $schema $id $comment $defs definitions".split()
)
OF_TYPE = {
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": BOUNDS,
    "integer": BOUNDS,
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "boolean": (),
    "null": (),
}
ANY_TYPE = {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}
SERVED = ANY_TYPE.union(*OF_TYPE.values())


def keywords_of(schema: Any, path: str) -> dict[str, Any]:
    "What a schema asks for, without what only describes; `ValueError` names what is not served."
    if isinstance(schema, bool):
        return {} if schema else refuse(path, "nothing fits `false`")
    if not isinstance(schema, dict):
        refuse(path, f"{schema!r} is no schema")
    found = {k: v for k, v in schema.items() if k not in ANNOTATIONS and not k.startswith("x-")}
    for key in found:
        if key not in SERVED:
            refuse(f"{path}/{key}", f"the keyword {key!r} is not served")
    return found


READ_TOGETHER = (("additionalProperties", "properties"), ("items", "prefixItems"))


def merged(parts: Sequence[dict[str, Any]], path: str) -> dict[str, Any]:
    "One schema that asks for all that these ask for; `ValueError` where that takes more than a union."
    for key, other in READ_TOGETHER:  # the first means what the second of its own schema leaves
        has, has_other = ([key in part for part in parts] for key in (key, other))
        if any(has) and any(b and not a for a, b in zip(has, has_other)):
            refuse(path, f"{key!r} and {other!r} of different schemas cannot be put together")
    found: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key == "properties" and key in found:
                value = merged([found[key], value], f"{path}/properties")
            elif key == "required" and key in found:
                value = list(dict.fromkeys([*found[key], *value]))
            elif key in found and found[key] != value:
                refuse(path, f"two different values of {key!r} cannot be put together")
            found[key] = value
    return found


LITERALS = {"boolean": ("true", "false"), "null": ("null",)}


def step(key: str) -> str:
    "A key as it stands in a path."
    return key.replace("~", "~0").replace("/", "~1")


def listed(found: dict[str, Any], key: str, path: str) -> list[Any]:
    "The schemas of a keyword that has a list of them."
    if not isinstance(found[key], list) or not found[key]:
        refuse(f"{path}/{key}", "nothing fits: a list of schemas, and not an empty one, stands here")
    return list(found[key])


def is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def is_of_type(value: Any, name: str) -> bool:
    "Whether a value has a type of JSON schema; 1.0 is an integer, too."
    if name in ("integer", "number"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_whole = isinstance(value, int) or is_number and value.is_integer()
        return is_number and (name == "number" or is_whole)
    kinds = {"string": str, "object": dict, "array": list, "boolean": bool, "null": type(None)}
    return isinstance(value, kinds[name])


def types_of(found: dict[str, Any], path: str) -> list[str]:
    "The types that `type` allows; without it, those that the other keywords are for."
    asked = found.get("type")
    if asked is None:
        names = [name for name, keys in OF_TYPE.items() if any(key in found for key in keys)]
    else:
        names = asked if isinstance(asked, list) else [asked]
    if not names or not all(isinstance(name, str) and name in OF_TYPE for name in names):
        refuse(f"{path}/type", f"nothing fits {asked!r}; the types are {', '.join(OF_TYPE)}")
    return [name for name in names if name != "integer" or "number" not in names]


def values_of(found: dict[str, Any], path: str) -> Expr:
    "The values of `enum` or `const`, of those types that `type` allows."
    key = "enum" if "enum" in found else "const"
    others = [name for name in found if name not in ("type", key)]
    if others:
        refuse(f"{path}/{others[0]}", f"{others[0]!r} beside {key!r} is not served")
    values = [found["const"]] if key == "const" else found["enum"]
    if not isinstance(values, list):
        refuse(f"{path}/enum", f"{values!r} is no list")
    if "type" in found:
        types = types_of(found, path)
        values = [value for value in values if any(is_of_type(value, name) for name in types)]
    if not values:
        refuse(f"{path}/{key}", "nothing fits: no value is left")
    return Choice(tuple(map(constant, values)))


MAX_PARTS = 10_000


class SchemaTranslator:
    """Turns a schema into rules; the rule of a part of it has the part's path as its name, such as
    `#/properties/name`, which is what `$ref` calls it, too.
    """

    def __init__(self, schema: Any, rules: dict[str, Expr]) -> None:
        self.schema = schema
        self.rules = rules
        self.made: dict[str, Any] = {}  # the schema of each path that has a rule
        self.num_parts = 0

    def rule(self, schema: Any, path: str) -> Rule:
        while self.made.setdefault(path, schema) != schema:
            path += "+"  # what stands here was put together with something else
        if path not in self.rules:
            self.rules[path] = EMPTY  # so that a schema inside that leads back here ends there
            self.rules[path] = self.translate(schema, path)
        return Rule(path)

    def resolve(self, pointer: Any, path: str) -> tuple[Any, str]:
        "The schema at a `$ref`, and its path."
        if not isinstance(pointer, str) or not (pointer + "/").startswith("#/"):
            refuse(f"{path}/$ref", f"{pointer!r} is no place in this schema, such as #/$defs/name")
        found, name = self.schema, unquote(pointer)
        for step in name.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                refuse(f"{path}/$ref", f"{pointer!r} leads nowhere")
        return found, name

    def keywords(self, schema: Any, path: str) -> dict[str, Any]:
        self.num_parts += 1  # `allOf` of two places that lead to one place each, 30 times over ...
        if self.num_parts > MAX_PARTS:
            refuse(path, f"more than {MAX_PARTS:,} schemas within each other")
        return keywords_of(schema, path)

    def translate(self, schema: Any, path: str) -> Expr:
        found = self.keywords(schema, path)
        if not found:
            return Rule("value")
        if list(found) == ["$ref"]:
            return self.rule(*self.resolve(found["$ref"], path))
        if list(found) == ["allOf"] and len(listed(found, "allOf", path)) == 1:
            return self.translate(found["allOf"][0], f"{path}/allOf/0")
        found = self.flat(found, path)
        if not found:
            return Rule("value")
        for key in ("anyOf", "oneOf"):
            if key in found:
                return self.options(found, key, path)
        if "enum" in found or "const" in found:
            return values_of(found, path)
        makers = {"string": string_of, "object": self.object_of, "array": self.array_of}
        options: list[Expr] = []
        for name in types_of(found, path):
            if name in makers:
                options.append(makers[name](found, path))
            elif name in ("integer", "number"):
                options.append(number_of(found, path, name == "integer"))
            else:
                options += [literal(text) for text in LITERALS[name]]
        return Choice(tuple(options))

    def flat(self, found: dict[str, Any], path: str) -> dict[str, Any]:
        "Keywords without `$ref` and `allOf`: what these lead to is put together with the others."
        own = {key: value for key, value in found.items() if key not in ("$ref", "allOf")}
        others = []
        if "$ref" in found:
            others.append(self.resolve(found["$ref"], path))
        if "allOf" in found:
            others += [(s, f"{path}/allOf/{i}") for i, s in enumerate(listed(found, "allOf", path))]
        if not others:
            return own
        parts = [self.flat(self.keywords(schema, place), place) for schema, place in others]
        return merged([own, *parts], path)

    def options(self, found: dict[str, Any], key: str, path: str) -> Expr:
        "One of the schemas of `anyOf` or `oneOf`, each with the keywords beside it."
        beside = {name: value for name, value in found.items() if name != key}
        options = []
        for index, schema in enumerate(listed(found, key, path)):
            place = f"{path}/{key}/{index}"
            if beside:
                part = self.flat(self.keywords(schema, place), place)
                options.append(self.translate(merged([beside, part], place), place))
            else:
                options.append(self.translate(schema, place))
        return Choice(tuple(options))

    def object_of(self, found: dict[str, Any], path: str) -> Expr:
        "Members in the schema's order; others, where they are allowed, behind them."
        properties = found.get("properties", {})
        required = found.get("required", [])
        if not isinstance(properties, dict) or not is_names(required):
            refuse(path, "properties is an object, and required a list of names")
        others = found.get("additionalProperties", "properties" not in found)
        rest = f"{path}/additionalProperties"
        schemas = {key: (s, f"{path}/properties/{step(key)}") for key, s in properties.items()}
        for key in required:
            if key not in schemas and others is False:
                refuse(path, f"nothing fits: {key!r} is required, and no property")
            schemas.setdefault(key, (others, rest))
        parts = [
            Concat((constant(key), COLON, self.rule(*place))) for key, place in schemas.items()
        ]
        needed = [key in required for key in schemas]
        if others is not False:
            key = quoted(other_than(schemas))
            self.rules.update(KEY_RULES)
            other = Concat((key, COLON, self.rule(others, rest)))
            parts.append(Concat((other, Repeat(Concat((COMMA, other)), 0, None))))
            needed.append(False)
        if any(needed):
            return enclosed("{", some_required(parts, needed), "}")
        return enclosed("{", self.none_required(parts, path), "}", may_be_empty=True)

    def none_required(self, parts: Sequence[Expr], path: str) -> Expr | None:
        "Some of the parts in order, at least one: a rule for what may follow each of them."
        while f"from 0 of {path}" in self.rules:
            path += "+"
        found: list[Expr] = []
        behind: Expr = EMPTY
        for index in reversed(range(len(parts))):
            found.append(Concat((parts[index], behind)))
            name = f"from {index} of {path}"
            self.rules[name] = Concat((Repeat(Concat((COMMA, parts[index])), 0, 1), behind))
            behind = Rule(name)
        return Choice(tuple(reversed(found))) if found else None

    def array_of(self, found: dict[str, Any], path: str) -> Expr:
        "Items by their places, then others; `items` is nothing where `prefixItems` stands alone."
        low, high = size_of(found, "Items", path)
        firsts = listed(found, "prefixItems", path) if "prefixItems" in found else []
        others = found.get("items", not firsts)
        if isinstance(others, list):
            refuse(f"{path}/items", "a list of schemas is called prefixItems since 2020-12")
        parts = [self.rule(s, f"{path}/prefixItems/{i}") for i, s in enumerate(firsts[:high])]
        tail: Expr | None = None
        if others is not False and (high is None or high > len(parts)):
            other = self.rule(others, f"{path}/items")
            if not parts:
                parts = [other]
            most = None if high is None else high - len(parts)
            tail = Repeat(Concat((COMMA, other)), max(low - len(parts), 0), most)
        elif low > len(parts):
            refuse(path, f"nothing fits: minItems {low}, and {len(parts)} items at most")
        inner = tail
        for index in reversed(range(len(parts))):
            comma = (COMMA,) if index else ()
            inner = Concat((*comma, parts[index], inner or EMPTY))
            if 0 < index and low <= index:
                inner = Repeat(inner, 0, 1)
        return enclosed("[", inner, "]", may_be_empty=low == 0)


def schema_to_rules(
    schema: dict[str, Any] | str | bool,
    *,
    any_whitespace: bool = True,
    whitespace_pattern: str | None = None,
) -> dict[str, Expr]:
    """Rules of which `root` is the JSON values that a schema, or the text of one, allows.

    Every text that fits is valid; not every valid text fits: members come in the schema's order,
    others than those in `properties` only if `additionalProperties` asks for them, `oneOf` is read
    as `anyOf`, a `pattern` holds for the whole string, and constants and keys have one spelling.
    Whitespace is `json_rules`'s. `ValueError` names the place of what is not served and of what
    nothing can fit. vLLM has this from XGrammar's `json_schema_converter.cc`.
    """
    rules = json_rules(any_whitespace=any_whitespace, whitespace_pattern=whitespace_pattern)
    try:
        schema = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"JSON schema: not JSON: {error}") from None
    try:
        rules["root"] = SchemaTranslator(schema, rules).rule(schema, "#")
    except RecursionError:
        refuse("#", "schemas lie too deep within each other, or lead back without an end")
    except UnicodeEncodeError as error:
        refuse("#", f"half of a pair of surrogates is no character: {error}")
    return rules
