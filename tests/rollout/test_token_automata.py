"""Which tokens a constraint lets come next, against every sequence of tokens whose text matches."""

from __future__ import annotations

import copy
import json
import random
import re
from functools import partial
from itertools import product

import pytest
from tokenizer_kinds import KINDS, tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from stoker.engine.constraints import Constraint
from stoker.kernels.errors import InvalidRequestError
from stoker.kernels.reference.constraints import FIRST, HEADER, MAY_END, REFUSED
from stoker.rollout import constraints
from stoker.rollout.constraints import ConstraintMaker
from stoker.rollout.token_texts import TokenTexts

PADDING = 5  # ids of a model that its tokenizer knows nothing of


def taken(constraint: Constraint, tokens: list[int]) -> set[int]:
    """The ids that may follow, None of them where the text has ended."""
    state, count = constraint.after(tokens), int(constraint.table[0])
    assert state >= FIRST
    row = constraint.table[HEADER + constraint.vocab + (state - FIRST) * count :][:count]
    return {t for t in range(constraint.vocab) if row[constraint.table[HEADER + t]] != REFUSED}


class NamedByBytes(PreTrainedTokenizerFast):
    """Its vocabulary has the bytes of tokens, and special ones by a string, as of tokenizers over tiktoken."""

    def get_vocab(self) -> dict[str | bytes, int]:  # type: ignore[override]
        texts = [b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", b" ", b" a", b"\xa9b", b"b\xc3"]
        return {text: token for token, text in enumerate(texts)} | {"</s>": len(texts)}


def small(kind: str) -> PreTrainedTokenizerFast:
    """A vocabulary of few tokens, so that all of their sequences can be looked at. Its last one is the EOS."""
    if kind in ("byte-level", "bytes"):  # é is two of these
        core = Tokenizer(
            models.BPE(dict(zip(["a", "b", "ab", "ba", "Ã", "©", "Ġ", "Ġa", "©b", "bÃ"], range(10), strict=True)), [])
        )
        core.decoder = decoders.ByteLevel()
    elif kind == "words":
        core = Tokenizer(models.WordLevel({"a": 0, "b": 1, "ab": 2, "é": 3}, unk_token="a"))
    else:
        pieces = ["a", "b", "ab", "▁", "▁a", "▁▁", "<0xC3>", "<0xA9>", "<0x61>", "é"]
        core = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces]))
        end = [decoders.Strip(" ", 1, 0)] if kind == "llama" else []
        core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end])
    return (NamedByBytes if kind == "bytes" else PreTrainedTokenizerFast)(tokenizer_object=core, eos_token="</s>")


FINITE = [
    "a|b",
    "(ab|ba){1,2}",
    "[ab]{2}é?",
    "é{1,2}",
    " a",
    " ?ab?",
    "",
    "(a|é)? ?b?",
    "a{0,3}",
    "b(a|b)?",
    "  a",
    "a b",
]


@pytest.mark.parametrize("pattern", FINITE)
@pytest.mark.parametrize("kind", ["byte-level", "bytes", "llama", "gemma", "words"])
def test_exactly_those_tokens_come_next_that_can_end_in_a_match(kind: str, pattern: str) -> None:
    one = small(kind)
    eos = one.eos_token_id
    decode = partial(one.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    texts = ["".join(letters) for length in range(6) for letters in product("abé ", repeat=length)]
    wanted = {text for text in texts if re.fullmatch(pattern, text)}
    ways: dict[tuple[int, ...], set[int]] = {}  # by tokens so far, those that may follow

    def grow(tokens: list[int]) -> bool:
        """Whether these, or more, make a wanted text. A token that leaves no text goes nowhere, but for a first space."""
        text = decode(tokens)
        found = set()
        if text in wanted:
            found.add(eos)
        whole = text.rstrip("�")
        if len(tokens) < 7 and any(other.startswith(whole) for other in wanted):
            found |= {t for t in range(eos) if grow([*tokens, t])}
        if found:
            ways[tuple(tokens)] = found
        return bool(found)

    can = grow([])
    make = ConstraintMaker(one, eos + 1 + PADDING)
    if not can:
        with pytest.raises(InvalidRequestError, match="matched by no sequence of tokens"):
            make(pattern, frozenset([eos]), frozenset())
        return
    constraint = make(pattern, frozenset([eos]), frozenset())
    for tokens, after in ways.items():
        if len(tokens) < 5:  # beyond it sequences were cut off
            assert taken(constraint, list(tokens)) == after, one.convert_ids_to_tokens(list(tokens))


PATTERNS = [
    "yes|no",
    r"<answer>\n.*\n</answer>",
    r" ?\d+( \d+)*",
    r"[^\d]{3,8}",
    r"(日本|naïve)\w*",
    "(?i)the cat.*",
    r"\w+",
    r"(?s).{0,20}",
    r'\{"name": "[^"]*", "age": \d{1,3}\}',
    r"(<think>)?[ab ]{0,3}</answer>\d",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_walk_can_end_and_what_ends_matches(kind: str, pattern: str) -> None:
    one, source = tokenizer(kind), random.Random(0)
    eos, make = one.eos_token_id, ConstraintMaker(tokenizer(kind), len(tokenizer(kind)) + PADDING)
    if kind == "words" and re.search('<|"', pattern):
        with pytest.raises(InvalidRequestError, match="matched by no sequence of tokens"):
            make(pattern, frozenset([eos]), frozenset())
        return
    constraint = make(pattern, frozenset([eos]), frozenset())
    ended = 0
    for _ in range(200):  # of which few may end, where a string has no bound
        tokens: list[int] = []
        while constraint.after(tokens) >= FIRST and len(tokens) < 60:
            may = sorted(taken(constraint, tokens))
            assert may, "nothing may come next"
            assert all(t == eos or t not in one.all_special_ids for t in may)
            tokens.append(eos if eos in may and source.random() < 0.5 else source.choice(may))
        if constraint.after(tokens) < FIRST:
            text = one.decode(tokens, skip_special_tokens=True)
            assert re.fullmatch(pattern, text), text
            ended += 1
            if ended == 10:
                return
    assert ended


# What outlines_core 0.2.14 makes of a schema with an integer, a string, an enumeration and an array of numbers.
OF_A_SCHEMA = (
    r'\{[ ]?"a"[ ]?:[ ]?(-)?(0|[1-9][0-9]*)[ ]?,[ ]?"b"[ ]?:[ ]?"([^"\\\x00-\x1F\x7F-\x9F]|\\["\\/bfnrt])*"'
    r'([ ]?,[ ]?"c"[ ]?:[ ]?("x"|"y"))?([ ]?,[ ]?"d"[ ]?:[ ]?\[[ ]?((((-)?(0|[1-9][0-9]*))(\.[0-9]+)?([eE][+-][0-9]+)?)'
    r"(,[ ]?(((-)?(0|[1-9][0-9]*))(\.[0-9]+)?([eE][+-][0-9]+)?)){0,})?[ ]?\])?[ ]?\}"
)


def test_what_a_package_makes_of_a_json_schema_is_followed() -> None:
    one = tokenizer("byte-level")
    constraint = ConstraintMaker(one, len(one))(OF_A_SCHEMA, frozenset([one.eos_token_id]), frozenset())
    for value in ({"a": 3, "b": "x y"}, {"a": -10, "b": 'é"\\', "c": "y", "d": [0.5, 1, -2.25]}):
        ids = one(json.dumps(value, ensure_ascii=False), add_special_tokens=False)["input_ids"]
        for at, token in enumerate([*ids, one.eos_token_id]):
            assert token in taken(constraint, ids[:at])
    assert not {"a", "}"} & set(one.convert_ids_to_tokens(sorted(taken(constraint, one('{"a')["input_ids"]))))


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_s_own_tokens_are_taken(kind: str) -> None:
    texts = ["the cat sat on the mat, and 17 dogs ran", "abab baba abba", "10 20 30"]
    for text, one in [(text, tokenizer(kind)) for text in texts]:
        eos = one.eos_token_id
        ids = one(text, add_special_tokens=False)["input_ids"]
        text = one.decode(ids)
        constraint = ConstraintMaker(one, len(one))(re.escape(text) + "|other", frozenset([eos]), frozenset())
        assert constraint.after(ids) >= FIRST and taken(constraint, ids) == {eos}


def test_ids_that_end_are_no_text_and_excluded_ones_are_never_taken() -> None:
    one = small("byte-level")
    eos, (a, b, ab) = one.eos_token_id, one.convert_tokens_to_ids(["a", "b", "ab"])
    make = ConstraintMaker(one, eos + 1)
    constraint = make("a(ab|b)*", frozenset([eos, b]), frozenset([a]))
    # The stop id "b" stands for an end, and so for no text.
    assert taken(constraint, []) == {ab} and taken(constraint, [ab]) == {eos, b, ab}
    assert constraint.after([ab, b]) == constraint.after([ab, eos]) == MAY_END
    with pytest.raises(InvalidRequestError, match="suppress fewer"):
        make("a", frozenset([eos]), frozenset([a]))
    with pytest.raises(InvalidRequestError, match="leave ignore_eos out"):
        make("a", frozenset(), frozenset())
    with pytest.raises(InvalidRequestError, match="leave ignore_eos out"):
        make("a", frozenset([eos]), frozenset([eos]))
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        ConstraintMaker(None, 10)("a", frozenset([1]), frozenset())


def test_a_constraint_is_made_once_and_anew_where_the_tokenizer_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    one = small("byte-level")
    eos = one.eos_token_id
    make = ConstraintMaker(one, eos + 1 + PADDING)
    first = make("a+", frozenset([eos]), frozenset())
    assert make("a+", frozenset([eos]), frozenset()) is first
    assert make("a+", frozenset([eos]), frozenset([2])) is not first
    one.add_tokens(["aaa"])
    (token,) = one.convert_tokens_to_ids(["aaa"])
    grown = make("a+", frozenset([eos]), frozenset())
    assert token in taken(grown, []) and token not in taken(first, [])
    names = ["a" * n for n in range(4, 6 + PADDING)]
    one.add_tokens(names)
    known = [t for t in one.convert_tokens_to_ids(["a", "aaa", *names]) if t < make.vocab]
    assert len(one) > make.vocab and taken(make("a+", frozenset([eos]), frozenset()), []) == set(
        known
    )  # the model's own


def test_patterns_together_keep_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    one = tokenizer("byte-level")
    maker = ConstraintMaker(one, len(one))
    make = partial(maker, ends=frozenset([one.eos_token_id]), excluded=frozenset())
    size = max(make(f"[a-z]{{{n}}}").table.nbytes for n in (4, 5, 6))
    monkeypatch.setattr(constraints, "MOST_TOGETHER", 3 * size)
    for _ in range(2):
        for n in (1, 2, 3, 4, 5, 6):  # of which nobody holds one
            make(f"[a-z]{{{n}}}")
            assert sum(kept.table.nbytes for kept in maker._made.values()) <= 3 * size
        held = [make(f"[a-z]{{{n}}}") for n in (4, 5, 6)]
        assert [make(f"[a-z]{{{n}}}") for n in (4, 5, 6)] == held
        with pytest.raises(
            InvalidRequestError, match=r"'\[a-z\]\{3\}'.* 0 MiB together: give fewer different patterns"
        ):
            make("[a-z]{3}")
        held.append(held)  # as requests of a group do, which go where garbage is collected
        del held


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
def test_tokens_that_are_bytes_are_those_bytes(kind: str) -> None:
    """Though two of them in a row may be decoded together, and to nothing they are where that is no character."""
    made = tokenizer(kind)
    texts = TokenTexts(made, len(made))
    names = bytes_to_unicode() if kind == "byte-level" else {byte: f"<0x{byte:02X}>" for byte in range(256)}
    for byte, name in names.items():
        token = made.convert_tokens_to_ids(name)
        for found in (
            (texts.later,) if byte == 0x20 else (texts.first, texts.later)
        ):  # one of them leaves a first space out
            assert found.data[found.start[token] :][: found.length[token]].tolist() == [byte]


def test_a_tokenizer_whose_tokens_make_other_text_together_is_refused() -> None:
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    core.decoder = decoders.CTC(pad_token="c")  # letters that follow themselves are one
    with pytest.raises(InvalidRequestError, match="text is that of its tokens one after the other"):
        ConstraintMaker(PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>"), 4)(
            "a", frozenset([3]), frozenset()
        )


@pytest.mark.parametrize(("kind", "refused"), [("gemma", True), ("words", True), ("byte-level", False)])
def test_a_tokenizer_that_cleans_up_text_is_refused(kind: str, refused: bool) -> None:
    """Where it does, that is: spaces before punctuation would be in the tokens, and not in the text."""
    one = copy.deepcopy(tokenizer(kind))
    one.clean_up_tokenization_spaces = True
    make = partial(ConstraintMaker(one, len(one)), "(cat|,)( (cat|,))*", frozenset([one.eos_token_id]), frozenset())
    if refused:
        with pytest.raises(InvalidRequestError, match="clean_up_tokenization_spaces to False"):
            make()
        one.clean_up_tokenization_spaces = False
    ids = one("cat , cat", add_special_tokens=False)["input_ids"]
    assert one.decode(ids) == "cat , cat" and one.eos_token_id in taken(make(), ids)


def test_a_table_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "MOST_BYTES", 1 << 16)
    one = tokenizer("byte-level")
    words = "|".join("".join(random.Random(n).choices("abcdefgh", k=9)) for n in range(900))
    with pytest.raises(InvalidRequestError, match="takes a table of more than 0 MiB"):
        ConstraintMaker(one, len(one))(words, frozenset([one.eos_token_id]), frozenset())
