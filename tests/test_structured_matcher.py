"Structured output: expressions, regexes, the automaton, and the masks of tokens that it allows."

import gc
import itertools
import random
import re
import sys
import weakref
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from teachvllm.inputs import get_tokenizer, whole_tokenizer
from teachvllm.structured_output.automaton import (
    Automaton,
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
from teachvllm.structured_output.token_masks import TokenMasks, vocabulary_of
from teachvllm.transformers_utils import bundled_model


def automaton_of(pattern: str) -> Automaton:
    return Automaton({"root": parse_regex(pattern)})


def fits(automaton: Automaton, text: str | bytes) -> bool:
    data = text.encode() if isinstance(text, str) else text
    state = automaton.advance(automaton.start, data)
    return state >= 0 and automaton.is_final(state)


# expressions


def test_what_is_no_expression() -> None:
    for ranges in (((3, 2),), ((-1, 2),), ((0, 256),)):
        with pytest.raises(ValueError, match="range of bytes"):
            Bytes(ranges)
    for low, high in ((-1, None), (3, 2)):
        with pytest.raises(ValueError, match="repeated"):
            Repeat(literal("a"), low, high)
    for pair in ((5, 4), (-1, 4), (0, 0x110000)):
        with pytest.raises(ValueError, match="code points"):
            characters(pair)


def random_ranges(rng: random.Random) -> list[tuple[int, int]]:
    borders = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xD800, 0xDFFF, 0xE000, 0xFFFF]
    borders += [0x10000, 0x3FFFF, 0x40000, 0xFFFFF, 0x100000, 0x10FFFF]
    found = []
    for _ in range(rng.randint(1, 4)):
        ends = [
            min(max(rng.choice(borders) + rng.randint(-70, 70), 0), 0x10FFFF)
            if rng.random() < 0.7
            else rng.randrange(0x110000)
            for _ in range(2)
        ]
        found.append((min(ends), max(ends)))
    return found


def code_points_of(automaton: Automaton) -> set[int]:
    "All characters that an automaton takes, by walking all of its texts."
    found = set()
    todo = [(automaton.start, b"")]
    while todo:
        state, text = todo.pop()
        assert len(text) <= 4
        if text and automaton.is_final(state):
            found.add(ord(text.decode()))
        row = automaton.row(state)
        todo += [(int(row[byte]), text + bytes([byte])) for byte in np.flatnonzero(row >= 0)]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_characters_are_utf8(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(3):
        low = rng.choice([0, 0x60, 0x7C0, 0xD000, 0xF800, 0x10F000])
        ranges = [
            (begin := low + rng.randrange(4000), min(begin + rng.randrange(3000), 0x10FFFF))
            for _ in range(2)
        ]
        wanted = {code for a, b in ranges for code in range(a, b + 1)}
        wanted -= set(range(0xD800, 0xE000))
        if wanted:
            assert code_points_of(Automaton({"root": characters(*ranges)})) == wanted


def test_every_character_is_in_one_of_two_complements() -> None:
    rng = random.Random(0)
    for _ in range(5):
        ranges = random_ranges(rng)
        other = complement(ranges)
        assert other == complement(complement(other))
        here, there = (
            Automaton({"root": characters(*some)}) if some else None for some in (ranges, other)
        )
        for code in [*range(0, 0x110000, 997), *(end for pair in ranges for end in pair)]:
            if 0xD800 <= code < 0xE000:
                continue
            inside = any(low <= code <= high for low, high in ranges)
            assert here is None or fits(here, chr(code)) == inside
            assert there is None or fits(there, chr(code)) != inside


def test_what_is_not_utf8_does_not_fit() -> None:
    every = automaton_of(r"[\d\D]")
    for text in (b"\x80", b"\xc0\x80", b"\xc1\xbf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xf5"):
        assert every.advance(every.start, text) == -1


# regexes

PATTERNS = """
a*|b+ ^a$|^b$ (ab|a)(bc|c)? (a|b)*abb (?:a?b)+?c* [^a]b[a-c]{2} (?P<x>a){2,3}b{,2} (?<y>a|)b{1,}
((a*)*)* (a|)* (a?){3,5}b ((ab?){2}c){2} \\d\\d|\\w|\\s \\.a\\* [\\]a-]+ []a]b* [a\\-c]+ [^\\Wb]+ a{b {}a a{,}
.a. [\\x61-\\u0063]+ é+a ((((a+)+)+)+)+ (ab{0,3}){0,2} a??b*?c+? (|a|b) [a-]c [\\w-]+ \\Sa a\\/b
(?:a|(?:b|(?:c))) x{0} (abc){0}a (a{2,3}){2} \\D{2} a{2}{b c\\{1\\} [.]a|. (a*b*)*c (a|b){3}(b|c){1,2}
""".split()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_regexes_are_those_of_re(pattern: str) -> None:
    automaton = automaton_of(pattern)
    known = re.compile(pattern.replace("(?<y>", "(?P<y>"), re.ASCII)
    alphabet = "abc"
    rng = random.Random(len(pattern))
    texts = ["".join(t) for n in range(6) for t in itertools.product(alphabet, repeat=n)]
    texts += [
        "".join(rng.choices("abc1 -_.]\\/{}*é\n€😀", k=rng.randint(1, 7))) for _ in range(300)
    ]
    for text in texts:
        assert fits(automaton, text) == bool(known.fullmatch(text)), text


def random_regex(rng: random.Random, depth: int = 3) -> str:
    kind = rng.randrange(7 if depth else 2)
    if kind == 0:
        return rng.choice("ab")
    if kind == 1:
        return rng.choice(["[ab]", "[^a]", "a", "b", "[^ab]", "."])
    if kind == 2:
        return f"({random_regex(rng, depth - 1)}|{random_regex(rng, depth - 1)})"
    if kind in (3, 4):
        return random_regex(rng, depth - 1) + random_regex(rng, depth - 1)
    times = rng.choice(["*", "+", "?", "{2}", "{1,2}", "{,2}", "{2,}", "*?", "{0}"])
    return f"(?:{random_regex(rng, depth - 1)}){times}"


@pytest.mark.parametrize("seed", range(8))
def test_random_regexes_and_their_prefixes(seed: int) -> None:
    "A prefix is alive if and only if a text completes it; all texts are short, so all are tried."
    rng = random.Random(seed)
    texts = ["".join(t) for n in range(8) for t in itertools.product("ab", repeat=n)]
    for _ in range(25):
        pattern = random_regex(rng)
        automaton = automaton_of(pattern)
        known = re.compile(pattern)
        matching = {text for text in texts if known.fullmatch(text)}
        for text in texts:
            assert fits(automaton, text) == (text in matching), (pattern, text)
        completed = {text[:n] for text in matching for n in range(len(text) + 1)}
        others = set(texts) - completed
        assert all(automaton.advance(automaton.start, text.encode()) >= 0 for text in completed)
        for text in others:  # what completes it is longer than 7 or has other letters, if it lives
            state = automaton.advance(automaton.start, text.encode())
            assert state < 0 or known.fullmatch(shortest(automaton, state, text)), (pattern, text)


def shortest(automaton: Automaton, state: int, begin: str) -> str:
    "A text that begins so, and fits."
    todo = [(state, begin.encode())]
    seen = {state}
    for state, text in todo:
        if automaton.is_final(state):
            return text.decode()
        row = automaton.row(state)
        for byte in np.flatnonzero(row >= 0):
            if row[byte] not in seen:
                seen.add(int(row[byte]))
                todo.append((int(row[byte]), text + bytes([byte])))
    raise AssertionError(f"nothing completes {begin!r}")


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        (r"a(?=b)", "lookahead"),
        (r"a(?!b)", "lookahead"),
        (r"(?<=a)b", "lookbehind"),
        (r"(?<!a)b", "lookbehind"),
        (r"(?>a)", "atomic"),
        (r"(?P<x>a)(?P=x)", "back-reference"),
        (r"(a)\1", "back-reference"),
        (r"(?<x>a)\k<x>", "back-reference"),
        (r"(a)?(?(1)b|c)", "condition"),
        (r"(?#why)", "comment"),
        (r"(?i)a", "inline flags"),
        (r"(?s:.)", "inline flags"),
        (r"(?P<1>a)", r"\(\?"),
        (r"\bword", "word boundary"),
        (r"\B", "word boundary"),
        (r"a*+", "possessive"),
        (r"a{2}+", "possessive"),
        (r"a**", "two quantifiers"),
        (r"a{2}{3}", "two quantifiers"),
        (r"*a", "nothing before it"),
        (r"a|+", "nothing before it"),
        (r"{2}", "nothing before it"),
        (r"(?:)a(^b)", r"anchor \^"),
        (r"a^", r"anchor \^"),
        (r"a$b", r"anchor \$"),
        (r"(a$)", r"anchor \$"),
        (r"[a", "not closed"),
        (r"[]", "not closed"),
        (r"[a\\", "not closed"),
        (r"(a", "not closed"),
        (r"a)", "closes nothing"),
        (r"a)$", "closes nothing"),
        (r"[z-a]", "smaller one first"),
        (r"[a-\d]", "two characters"),
        (r"[\w-z]", "two characters"),
        (r"a{3,2}", "smaller number"),
        (r"a{9999999999}", "too often"),
        ("a\\", "backslash at the end"),
        (r"\xg1", "hexadecimal"),
        (r"\u12", "hexadecimal"),
        (r"\ud83d\ude00", "surrogates"),
        (r"\p{L}", r"escape \\p"),
        (r"\Z", r"escape \\Z"),
        (r"\01", "octal"),
        ("(" * 101 + ")" * 101, "more than 100 groups"),
    ],
)
def test_what_is_not_served_is_named(pattern: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse_regex(pattern)


@pytest.mark.parametrize("seed", range(5))
def test_any_pattern_is_served_as_re_has_it_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [*"ab|()[]{}*+?^$.\\-,12", "(?:", "\\d", "[^", "{1,2}", "\\n", "(?=", "\\b"]
    for _ in range(1000):
        pattern = "".join(rng.choices(pieces, k=rng.randint(1, 8)))
        try:
            automaton = automaton_of(pattern)
        except ValueError:
            continue
        known = re.compile(pattern)
        for _ in range(8):
            text = "".join(rng.choices("ab12{},-^$ \n", k=rng.randint(0, 4)))
            assert fits(automaton, text) == bool(known.fullmatch(text)), (pattern, text)


# recursion


def test_balanced_brackets() -> None:
    rules: dict[str, Expr] = {
        "root": Repeat(Rule("pair"), 0, None),
        "pair": Choice(
            (
                Concat((literal("("), Rule("root"), literal(")"))),
                Concat((literal("["), Rule("root"), literal("]"))),
            )
        ),
    }
    automaton = Automaton(rules)

    def check(text: str) -> bool:
        open_ones = []
        for c in text:
            if c in "([":
                open_ones.append(c)
            elif not open_ones or open_ones.pop() + c not in ("()", "[]"):
                return False
        return not open_ones

    for n in range(7):
        for t in itertools.product("()[]", repeat=n):
            assert fits(automaton, "".join(t)) == check("".join(t))
    deep = automaton.advance(automaton.start, b"([" * 500)
    assert automaton.is_final(automaton.advance(deep, b"])" * 500))
    assert automaton.advance(deep, b"])" * 500 + b")") == -1
    assert not automaton.is_final(automaton.advance(deep, b"])" * 499))


def test_nested_lists() -> None:
    rules: dict[str, Expr] = {
        "root": Choice((Rule("list"), parse_regex("[0-9]+"))),
        "list": Concat(
            (
                literal("["),
                Repeat(
                    Concat((Rule("root"), Repeat(literal(",") and Rule("more"), 0, None))), 0, 1
                ),
                literal("]"),
            )
        ),
        "more": Concat((literal(","), Rule("root"))),
    }
    automaton = Automaton(rules)

    def value(text: str, i: int) -> int:
        "Where the value that begins at i ends; -1: nowhere."
        if i < len(text) and text[i].isdigit():
            while i < len(text) and text[i].isdigit():
                i += 1
            return i
        if i >= len(text) or text[i] != "[":
            return -1
        if text[i + 1 : i + 2] == "]":
            return i + 2
        i = value(text, i + 1)
        while i >= 0 and text[i : i + 1] == ",":
            i = value(text, i + 1)
        return i + 1 if i >= 0 and text[i : i + 1] == "]" else -1

    for n in range(7):
        for t in itertools.product("[],1", repeat=n):
            text = "".join(t)
            assert fits(automaton, text) == (value(text, 0) == n and n > 0), text


def test_a_rule_that_ends_with_itself_keeps_no_stack() -> None:
    automaton = Automaton(
        {"root": Concat((literal("a"), Choice((Rule("root"), literal("b"))))), "unused": Rule("x")}
    )
    assert fits(automaton, "a" * 5000 + "b")
    assert automaton.num_states <= 3


def test_states_are_numbered_once_and_rows_agree_with_advance() -> None:
    automaton = automaton_of(r"(ab|ac)*d{2,40}é?")
    for text in (b"", b"a", b"abac", b"dd", b"d" * 39, b"dd\xc3"):
        state = automaton.advance(automaton.start, text)
        row = automaton.row(state)
        assert row.shape == (256,) and row.dtype == np.int32
        assert [automaton.advance(state, bytes([byte])) for byte in range(256)] == row.tolist()
        known = automaton.num_states
        assert (automaton.row(state) == row).all() and automaton.num_states == known
    assert automaton.advance(-1, b"a") == -1
    with pytest.raises(IndexError):
        automaton.row(automaton.num_states)


# what is refused


def test_unknown_and_endless_rules() -> None:
    a = literal("a")
    with pytest.raises(ValueError, match="no rule 'other'"):
        Automaton({"root": Concat((a, Rule("other")))})
    with pytest.raises(ValueError, match="no rule 'root'"):
        Automaton({"main": a})
    assert fits(Automaton({"main": a}, start="main"), "a")
    with pytest.raises(ValueError, match="finish the rule 'endless'"):
        Automaton({"root": Choice((a, Rule("endless"))), "endless": Concat((a, Rule("endless")))})
    with pytest.raises(ValueError, match="finish the rule 'root'"):
        Automaton({"root": Choice(())})
    with pytest.raises(ValueError, match="finish the rule 'root'"):
        Automaton({"root": Repeat(Bytes(()), 2, 3)})


@pytest.mark.parametrize(
    "rules",
    [
        {"root": Choice((Rule("root"), literal("a")))},
        {"root": Concat((Repeat(literal("b"), 0, 1), Rule("root2"))), "root2": Rule("root")},
        {"root": Repeat(Rule("root"), 0, None)},
        {"root": Repeat(Concat((Rule("root"), literal("a"))), 0, 3)},
        {"root": Concat((Rule("empty"), Rule("root"), literal("a"))), "empty": Concat(())},
    ],
)
def test_left_recursion_is_refused_by_name(rules: dict[str, Expr]) -> None:
    rules = {
        "root": Choice((rules["root"], literal("z"))),
        **{n: rules[n] for n in rules if n != "root"},
    }
    with pytest.raises(ValueError, match="left recursion.*'root'") as error:
        Automaton(rules)
    assert "\0" not in str(error.value)


def test_dead_ends_are_no_ways() -> None:
    "An option that nothing fits is left out, and so is what leads to it."
    dead = Concat((literal("ab"), Choice(())))
    automaton = Automaton({"root": Choice((dead, literal("ac"), Repeat(dead, 2, 4)))})
    state = automaton.advance(automaton.start, b"a")
    assert np.flatnonzero(automaton.row(state) >= 0).tolist() == [ord("c")]


def test_sizes() -> None:
    assert fits(automaton_of("((a{1,1000}b){1000}c){1,5}"), ("aab" * 1000) + "c")
    for pattern in ("a{300000}", "(ab?){999999}"):
        with pytest.raises(ValueError, match="max_size=300000"):
            automaton_of(pattern)
    rules = {"root": parse_regex("[ab]{400}(c|d{400})")}
    assert fits(Automaton(rules), "a" * 400 + "d" * 400)
    with pytest.raises(ValueError, match="max_size=2000"):
        Automaton(rules, max_size=2000)
    with pytest.raises(ValueError, match="max_size=20"):
        Automaton({"root": literal("a" * 20)}, max_size=20)
    deep: Expr = literal("a")
    for _ in range(2 * sys.getrecursionlimit()):
        deep = Repeat(Concat((literal("b"), deep)), 0, 1)
    assert fits(Automaton({"root": deep}), "b" * 100 + "")


def test_too_many_stacks() -> None:
    "Each rule calls the next one in two places: there are twice as many stacks at each level."
    rules: dict[str, Expr] = {
        f"r{i}": Choice(
            (
                Concat((Rule(f"r{i + 1}"), literal("x"))),
                Concat((Rule(f"r{i + 1}"), literal("y"))),
            )
        )
        for i in range(20)
    }
    rules |= {"r20": literal("z")}
    assert fits(Automaton(rules, start="r12"), "zxyxyxyxy")
    with pytest.raises(ValueError, match="max_stacks=10000"):
        Automaton(rules, start="r0")
    later = Automaton({"root": Concat((literal("!"), Rule("r0"))), **rules})
    with pytest.raises(ValueError, match="max_stacks"):
        later.row(later.start)


# tokens


@lru_cache(maxsize=1)
def default_tokenizer() -> Any:
    return get_tokenizer(bundled_model())


def test_the_default_tokenizers_bytes() -> None:
    tokenizer = default_tokenizer()
    vocabulary = vocabulary_of(tokenizer)
    assert len(vocabulary) == len(tokenizer) and vocabulary[tokenizer.eos_token_id] is None
    for token, data in enumerate(vocabulary):
        shown = tokenizer.decode([token], skip_special_tokens=True)
        assert shown == (data or b"").decode("utf-8", "replace")
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices('ab  \n\té日🎉{}"\\0', k=20))
        assert b"".join(vocabulary[i] or b"" for i in tokenizer(text).input_ids).decode() == text
    whole = whole_tokenizer(tokenizer)
    assert vocabulary_of(whole) == vocabulary_of(whole.backend_tokenizer) == vocabulary


def test_bytes_of_other_tokenizers() -> None:
    tokens = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁the",
        "é▁",
        "▁",
        "<0x1>",
    ]
    core = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True)
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.add_special_tokens([AddedToken("<unk>"), AddedToken("</s>")])
    core.add_tokens([AddedToken("<tool call>", normalized=False)])
    vocabulary = vocabulary_of(core)
    assert vocabulary[:2] == [None, None]
    assert vocabulary[2:258] == [bytes([byte]) for byte in range(256)]
    assert vocabulary[258:] == [b" the", "é ".encode(), b" ", b"<0x1>", b"<tool call>"]
    for token in range(258, len(vocabulary)):
        assert core.decode([token]).encode() == vocabulary[token]
    assert core.decode([2 + byte for byte in "é🎉".encode()]) == "é🎉"
    core.decoder = decoders.Metaspace()
    assert vocabulary_of(core)[258] == b" the" and vocabulary_of(core)[2] == b"<0x00>"
    core.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        vocabulary_of(core)
    for unknown in (object(), None):
        with pytest.raises(ValueError, match="not known"):
            vocabulary_of(unknown)


SMALL: list[bytes | None] = [bytes([byte]) for byte in range(256)]
SMALL += [None, b"", b"ab", b"ba", b"abc", b"ab", b'"a', b'a"', b'",', b"[[", b"]]", b"],[", b"12"]
SMALL += ["é".encode(), "é".encode()[:1] + b"\xa9", b'"\xc3', b"\xa9a", b"\x82\xac", b"\xe2\x82"]
SMALL += [
    "🎉".encode()[:3],
    "a🎉".encode()[:4],
    "🎉é".encode(),
    b"  ",
    b" a",
    b"\xff\xfe",
    b"aaaaaaaaaaaa",
]
SMALL += [None] * (300 - len(SMALL) - 1) + [b"!"]


def bits(mask: bytes, vocab_size: int) -> list[bool]:
    assert len(mask) == -(-vocab_size // 8)
    found = [bool(mask[token // 8] >> token % 8 & 1) for token in range(8 * len(mask))]
    assert not any(found[vocab_size:])
    return found[:vocab_size]


def brute_force(
    automaton: Automaton, state: int, vocabulary: list[bytes | None], eos: list[int]
) -> list[bool]:
    found = []
    for token, data in enumerate(vocabulary):
        here = state
        for byte in data or b"":
            here = int(automaton.row(here)[byte]) if here >= 0 else -1
        found.append(bool(data) and here >= 0)
        if token in eos:
            found[-1] = automaton.is_final(state)
    return found


NESTED: dict[str, Expr] = {
    "root": Choice((Rule("list"), parse_regex(r"[0-9]+|\"[^\"]*\""))),
    "list": Concat(
        (
            literal("["),
            Repeat(
                Concat((Rule("root"), Repeat(Concat((literal(","), Rule("root"))), 0, None))), 0, 1
            ),
            literal("]"),
        )
    ),
}


@pytest.mark.parametrize(
    "rules",
    [
        NESTED,
        {"root": parse_regex(r"(ab|[^a]c)*é{1,3}🎉?")},
        {"root": parse_regex(r"(.a?){0,3}")},
        {"root": parse_regex(r"\"(a|é|€|🎉)*\"")},
        {"root": Repeat(Bytes(((0, 255),)), 0, None)},
        {"root": Concat(())},
    ],
)
def test_masks_are_those_of_brute_force(rules: dict[str, Expr]) -> None:
    eos = [256, 299]
    automaton, other = Automaton(rules), Automaton(rules)
    masks = TokenMasks(SMALL, eos)
    rng = random.Random(0)
    for _ in range(6):
        state, text = automaton.start, b""
        for _ in range(12):
            found = bits(masks.mask(automaton, state), 300)
            assert found == brute_force(other, other.advance(other.start, text), SMALL, eos), text
            assert masks.allowed(automaton, state).tolist() == found
            tokens = [i for i, allowed in enumerate(found) if allowed and i not in eos]
            assert tokens or found[256]
            if not tokens:
                break
            data = SMALL[rng.choice(tokens)] or b""
            state, text = automaton.advance(state, data), text + data
            assert state >= 0


def test_masks_of_the_default_vocabulary() -> None:
    tokenizer = default_tokenizer()
    vocabulary = vocabulary_of(tokenizer)
    eos = tokenizer.eos_token_id
    masks = TokenMasks(vocabulary, [eos])
    automaton = Automaton(NESTED)
    for text in ("", "[", '[["a b', "12", '["é'):
        for cut in (0, 1) if text.endswith("é") else (0,):
            data = text.encode()[: len(text.encode()) - cut]
            state = automaton.advance(automaton.start, data)
            found = bits(masks.mask(automaton, state), len(vocabulary))
            wanted = [bool(t) and automaton.advance(state, t or b"") >= 0 for t in vocabulary]
            wanted[eos] = text == "12"
            assert found == wanted


def test_more_logits_than_tokens() -> None:
    masks = TokenMasks([b"a", None, b"b"], [1], vocab_size=13)
    automaton = Automaton({"root": Repeat(literal("b"), 0, 1)})
    assert bits(masks.mask(automaton, automaton.start), 13) == [False, True, True] + [False] * 10
    with pytest.raises(ValueError, match="3 tokens for 2 logits"):
        TokenMasks([b"a", None, b"b"], [1], vocab_size=2)
    with pytest.raises(ValueError, match="EOS"):
        TokenMasks([b"a"], [1])
    with pytest.raises(ValueError, match="does not fit"):
        masks.mask(automaton, automaton.advance(automaton.start, b"c"))
    empty = TokenMasks([None, None], [0])
    assert bits(empty.mask(automaton, automaton.start), 2) == [True, False]


def test_masks_are_kept_up_to_so_many_bytes() -> None:
    "Of all automata together, the latest used; an automaton that is gone is not held by them."
    masks = TokenMasks([b"a", None], [1], max_bytes=3)
    automaton = Automaton({"root": parse_regex("a{0,20}")})
    first = masks.mask(automaton, automaton.start)
    assert masks.mask(automaton, automaton.start) is first
    state = automaton.start
    for _ in range(20):
        state = automaton.advance(state, b"a")
        assert bits(masks.mask(automaton, state), 2)[1]
        masks.mask(automaton, automaton.start)
    assert len(masks._masks) == 3
    assert masks.mask(automaton, automaton.start) is first
    gone = weakref.ref(automaton)
    del automaton
    gc.collect()
    assert gone() is None
    for _ in range(5):
        other = Automaton({"root": parse_regex("b")})
        assert bits(masks.mask(other, other.start), 2) == [False, False]
    assert len(masks._masks) == 3


def test_a_table_has_a_bound_in_bytes() -> None:
    automaton = Automaton({"root": parse_regex("[ab]*a[ab]{12}")}, max_table=1000)
    before = automaton.num_bytes
    with pytest.raises(ValueError, match="a table of over 1000 bytes"):
        for i in range(10_000):
            automaton.advance(
                automaton.start, f"{i:b}".replace("1", "a").replace("0", "b").encode()
            )
    assert automaton.num_bytes > before > 1000
    assert automaton.advance(automaton.start, b"ab") >= 0


def test_every_byte_may_be_a_class_of_its_own() -> None:
    options = tuple(
        Concat((Bytes(((byte, byte),)), Bytes((((byte * 7) % 256, (byte * 7) % 256),))))
        for byte in range(256)
    )
    automaton = Automaton({"root": Choice(options)})
    for byte in range(256):
        assert fits(automaton, bytes([byte, byte * 7 % 256]))
        assert not fits(automaton, bytes([byte, (byte * 7 + 1) % 256]))


def test_a_message_shows_the_place_and_not_all_of_a_regex() -> None:
    for before, behind in ((0, 500), (500, 0), (500, 500), (3, 3)):
        pattern = "a" * before + "(?=b)" + "c" * behind
        with pytest.raises(ValueError, match=f"at {before}: lookahead") as caught:
            parse_regex(pattern)
        shown = str(caught.value).split("'")[1]
        assert len(shown) <= 80 and "(?=b)" in shown and shown in pattern
        assert ("…" in str(caught.value)) == (len(pattern) > 80)


def test_the_largest_repetition_is_named() -> None:
    with pytest.raises(ValueError, match=r"rule 'root': \{7,400000\} as a quantifier"):
        Automaton({"root": parse_regex("a{3}(bc){7,400000}d{9}")})
