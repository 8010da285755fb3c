"""Regular expressions as automata over bytes, against Python's own ``re.fullmatch``."""

from __future__ import annotations

import random
import re
from functools import cache
from itertools import product

import pytest

from stoker.kernels.errors import InvalidRequestError
from stoker.rollout.regex import START, ByteAutomaton
from stoker.rollout.regex import byte_automaton as made

LETTERS = [
    "a",
    "b",
    "c",
    "é",
    "ß",
    "😀",
    "\n",
    " ",
    "0",
    "A",
    "\u017f",
    "İ",
    "٣",
    "\ud7ff",
    "\ue000",
    "\U0010ffff",
    "\0",
]
ATOMS = [
    "a",
    "b",
    "c",
    "ab",
    "é",
    "ß",
    "😀",
    ".",
    r"\d",
    r"\w",
    r"\s",
    "[ab]",
    "[^a]",
    "[a-c]",
    r"[^\w]",
    "[é😀]",
    r"\n",
]
ATOMS += [r"\W", "[A-Z]", r"\S", r"\D", r"[^é\d]", "[\ud000-\uf000]", "\\x00"]
REPEATS = ["*", "+", "?", "{2}", "{1,3}", "{0,2}", "*?", "+?", "??", "{,2}", "{2,}"]


@cache
def byte_automaton(pattern: str) -> ByteAutomaton:
    return made(pattern)


def matches(pattern: str, text: str) -> bool:
    automaton, state = byte_automaton(pattern), START
    for byte in text.encode():
        state = int(automaton.following[state, byte])
    return bool(automaton.accepting[state])


def draw(random: random.Random, depth: int) -> str:
    kind = random.random()
    if depth == 0 or kind < 0.3:
        return random.choice(ATOMS)
    if kind < 0.55:
        return draw(random, depth - 1) + draw(random, depth - 1)
    if kind < 0.7:
        return f"(?:{draw(random, depth - 1)}|{random.choice(['', draw(random, depth - 1)])})"
    if kind < 0.95:
        return f"({draw(random, depth - 1)}){random.choice(REPEATS)}"
    return f"(?{random.choice(['i', 's', 'a', 'ia', 'is'])}:{draw(random, depth - 1)})"


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_it_matches_what_python_s_fullmatch_matches(seed: int) -> None:
    source = random.Random(seed)
    found = [0, 0]
    for _ in range(150):
        begin, end = source.choice(["", "", "(?i)", "(?s)", "^", "(?a)", "(?x) "]), source.choice(["", "", "$", r"\Z"])
        pattern = begin + draw(source, 4) + end
        wanted = re.compile(pattern)
        for _ in range(30):
            text = "".join(source.choices(LETTERS, k=source.randrange(7)))
            match = wanted.fullmatch(text) is not None
            assert matches(pattern, text) == match, (pattern, text)
            found[match] += 1
    assert min(found) > 300


@pytest.mark.parametrize("pattern", [".", r"\w", r"[^\d]", "(?s).", r"(?i)k", r"[\x7f-\u0800]", "[\uffff-\U00010000]"])
def test_it_knows_every_character(pattern: str) -> None:
    """All that have an encoding, by the bytes of it."""
    automaton, wanted = byte_automaton(pattern), re.compile(pattern)
    following, accepting = automaton.following.tolist(), automaton.accepting.tolist()
    near = [
        at + step
        for at in (0xD7F0, 0xE000, 0xFF00, 0x10000, 0x10FF80)
        for step in range(0x80)
        if at + step < 0xD800 or at > 0xD800
    ]
    for number in [*range(0x1000), *near, *random.Random(0).sample(range(0xE000, 0x110000), 2000)]:
        state = START
        for byte in chr(number).encode():
            state = following[state][byte]
        assert accepting[state] == (wanted.fullmatch(chr(number)) is not None), hex(number)


@pytest.mark.parametrize(
    "pattern", [r"(?a)\w(?u:\w)", r"(?a:\w(?u:\w))", r"(?u:\w(?a:\w))", r"(?a:(?i:[a-z])(?iu:[a-z]))"]
)
def test_flags_inside_take_the_place_of_those_outside(pattern: str) -> None:
    for text in map("".join, product("aé\u017f", repeat=2)):
        assert matches(pattern, text) == (re.fullmatch(pattern, text) is not None), text


@pytest.mark.parametrize(
    "raw", [b"\xc0\x80", b"\xc1\xbf", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xff"]
)
def test_bytes_that_are_no_utf8_lead_nowhere(raw: bytes) -> None:
    automaton, state = byte_automaton("(?s).*"), START
    for byte in raw:
        state = int(automaton.following[state, byte])
    assert state == 0 and not automaton.following[0].any() and not automaton.accepting[0]


@pytest.mark.parametrize(
    "pattern", ["^a|b$", "^^a$$", "(^a|^b)c", "a(b$|c$)", "^$", "$", "(?m)^a$", r"\Aa\Z", "(?:^)a"]
)
def test_anchors_at_the_ends_say_nothing_new(pattern: str) -> None:
    for text in ["", "a", "b", "c", "ac", "bc", "ab", "a\n", "abc"]:
        assert matches(pattern, text) == (re.fullmatch(pattern, text) is not None)


def test_states_that_do_the_same_are_one() -> None:
    assert (
        len(byte_automaton("(foo|bar|qux)baz").following) == 12
    )  # the dead one, the first, six within words, four behind
    assert len(byte_automaton("ax.*|bx.*").following) == len(byte_automaton("[ab]x.*").following)
    assert len(byte_automaton("[a-z]{1,500}").following) == 502


@pytest.mark.parametrize("pattern", [r"[^\s\S]", r"a[^\s\S]b", "[\ud800-\udfff]", "a\ud800"])
def test_a_pattern_that_matches_nothing_accepts_nothing(pattern: str) -> None:
    assert not byte_automaton(pattern).accepting[START]
    assert not matches(pattern, "a") and not matches(pattern, "ab")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a(?=b)b", "has a look-around"),
        ("a(?!b)", "has a look-around"),
        ("(?<=a)b", "has a look-around"),
        ("(?!)", "has a look-around"),
        (r"(a)\1", "has a back-reference"),
        (r"(?i)(a)\1", "has a back-reference"),
        (r"(a)?(?(1)b|c)", "has a condition on a group"),
        ("(?>a)", "has an atomic group"),
        ("a++", "has a possessive repeat"),
        (r"\bab", "has a word boundary"),
        ("a$b", r"has \$ elsewhere than at its ends"),
        ("a^b", r"has \^ elsewhere than at its ends"),
        ("(^a)*", r"has \^ elsewhere than at its ends"),
        (r"a\Zb?", r"has \\Z elsewhere than at its ends"),
        ("(", "is no regular expression: missing \\)"),
        ("[z-a]", "is no regular expression"),
        ("a{2,1}", "is no regular expression"),
        ("(" * 5000 + ")" * 5000, "is no regular expression"),
        ("(a|b)*a(a|b){20}", "more than 30000 states"),
        ("(?:a{1000}){1000}", "more than 30000 states"),
        (r"\w{1,400}", "more than 30000 states"),
        ("a?" * 150_001, "has 300002 characters, and at most 300000 are read"),
        ("(a?){0,30}" * 5, None),
        ("(?:){0,4000000}a", None),
    ],
)
def test_what_it_cannot_do_is_named(pattern: str, words: str | None) -> None:
    if words is None:
        assert matches(pattern, "a")
        return
    with pytest.raises(InvalidRequestError, match=words):
        byte_automaton(pattern)
