"""The text of a completion as it grows: pieces that make the whole."""

from types import SimpleNamespace

import pytest
import torch
from tokenizer_kinds import CORPUS, KINDS, tokenizer

from stoker.integrations.text_stream import TextStream


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [1, 3])
def test_text_as_it_grows(kind: str, step: int) -> None:
    """Pieces make the whole text, whatever a tokenizer does with spaces, bytes and special tokens."""
    made = tokenizer(kind)
    draws = torch.Generator().manual_seed(step)
    pieces_of = [token for text in CORPUS[:10] for token in [made(text)["input_ids"]]]
    for _ in range(30):
        order = torch.randint(0, len(pieces_of), (6,), generator=draws).tolist()
        ids = [token for at in order for token in pieces_of[at]]
        if kind not in ("llama", "gemma"):  # whose bytes in a row are all lost where one of them is wrong
            ids += torch.randint(0, len(made), (60,), generator=draws).tolist()
        stream, pieces = TextStream(made, ["never there"]), []
        for at in range(0, len(ids), step):
            pieces.append(stream.add(ids[at : at + step]))
        whole = made.decode(ids, skip_special_tokens=True)
        assert "".join(pieces) == whole[: sum(map(len, pieces))]
        assert "".join(pieces) + stream.rest(whole) == whole
    assert sum(map(len, pieces)) > len(whole) // 2  # and not all of it at the end


def test_bytes_that_make_no_character_are_sent_as_they_come() -> None:
    """And cost the same at each token, however many there are."""
    made = tokenizer("byte-level")
    half = made.convert_ids_to_tokens(made("Ω")["input_ids"])
    assert len(half) == 2, "a character of two tokens is asked for"
    ids = made.convert_tokens_to_ids(half[:1]) * 300 + made("and text Ω")["input_ids"]

    lengths = []

    def decode(ids: list[int], **options: bool) -> str:
        lengths.append(len(ids))
        return str(made.decode(ids, **options))

    stream, pieces = TextStream(SimpleNamespace(decode=decode), []), []
    for token in ids:
        pieces.append(stream.add([token]))
    whole = made.decode(ids)
    assert "".join(pieces) == whole and whole.endswith("�and text Ω")
    assert sum(map(len, pieces[:300])) > 250
    assert max(lengths) < 100


def test_a_stop_string_that_ended_nothing_holds_nothing_back() -> None:
    """One before ``min_tokens`` is a part of the text, which goes on."""
    made = tokenizer("byte-level")
    text = "10 20. 17 dogs. a cat. yes or no and no more of either kind"
    ids = made(text)["input_ids"]
    for step in (1, 3):
        stream = TextStream(made, [". ", ".?"])
        pieces = [stream.add(ids[at : at + step]) for at in range(0, len(ids), step)]
        assert "".join(pieces) == text[:-1]
    for stops, first, second in (
        ([". "], "17 dogs", ". a ca"),
        (["s. a"], "17 dog", ""),
        (["7 d"], "1", "7 dogs. a c"),
    ):
        stream = TextStream(made, stops)
        assert [stream.add(made(text)["input_ids"]) for text in ("17 dogs. ", "a cat")] == [first, second], stops
        assert first + second + stream.rest("17 dogs. a cat") == "17 dogs. a cat"


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_many_bytes_at_once_of_which_the_last_begin_a_character(kind: str) -> None:
    """For all that is decoded then, none of them makes a character."""
    made = tokenizer(kind)
    ids = made("日本語と英語" * 4)["input_ids"]
    whole = made.decode(ids, skip_special_tokens=True)
    for first in range(36, 48):
        stream = TextStream(made, [])
        assert "".join(stream.add(some) for some in (ids[:first], *([t] for t in ids[first:]))) == whole


def test_what_is_left_is_what_was_not_sent() -> None:
    stream = TextStream(tokenizer("byte-level"), [])
    assert stream.add(tokenizer("byte-level")("yes")["input_ids"]) == "yes" and stream.rest("yes or no") == " or no"
    assert TextStream(None, []).add([3, 4]) == "", "of an engine without a tokenizer"
