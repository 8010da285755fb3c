"""Finds stop strings in a growing completion, token by token.

They are looked for in a completion's text, which leaves special tokens out. Only a stop string that names a special token is
looked for in the text with special tokens, so that "<|im_end|>" ends a completion, and "<|im" does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

LONGEST_CHARACTER = 16  # tokens of one character, which has four bytes at the most


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The special tokens that a text is decoded without, by id."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    others = zip(getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "all_special_tokens", ()), strict=False)
    found = {**dict(others), **{number: token.content for number, token in added if token.special}}
    return {number: text for number, text in found.items() if text}


def _names_one(stop: str, special: Iterable[str]) -> bool:
    return any(token in stop for token in special)


class StopStringChecker:
    """Decodes only what is new: a call costs a few tokens' decoding, however long the completion is."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], special: Mapping[int, str]) -> None:
        """special: of ``special_tokens``."""
        named = [s for s in stops if _names_one(s, special.values())]
        plain = [s for s in stops if s not in named]
        self._searches = [_Search(tokenizer, plain, special.keys())] if plain else []
        self._searches += [_Search(tokenizer, named)] if named else []

    def __call__(self, token: int) -> str | None:
        """Take the next token; returns the stop string that it completed, the earliest in the text, or None."""
        found = [match for search in self._searches if (match := search(token)) is not None]
        return min(found)[1] if found else None


class _Search:
    """Looks for stop strings in the text of all tokens but those ``left_out``."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], left_out: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._left_out = left_out
        self._keep = max(map(len, stops)) - 1  # characters of old text in which a stop string may have begun
        self._tail = ""
        self._context: list[int] = []  # tokens searched already: how a token decodes may depend on those before it
        self._pending: list[int] = []  # tokens that do not make whole characters yet
        self._searched = 0  # characters they make already

    def __call__(self, token: int) -> tuple[int, str] | None:
        """The stop string that the token completed, the earliest one, and where it begins, counted from the end."""
        if token in self._left_out:
            return None
        self._pending.append(token)
        before = self._decode(self._context)
        after = self._decode(self._context + self._pending)
        new = after[len(before) :]
        # A token may end one character and begin the next. Tokens that make no character for long never will.
        whole = new if len(self._pending) > LONGEST_CHARACTER else new.rstrip("�")
        text = self._tail + whole
        # Only a match that ends in the new text: one in the old text was reported when it was new.
        old = len(self._tail) + self._searched
        found = [(at - len(text), s) for s in self._stops if (at := text.find(s, max(0, old - len(s) + 1))) >= 0]
        self._searched = len(whole)
        if whole == new:  # not inside a multi-byte character
            self._searched = 0
            self._context, self._pending = self._pending[-4:], []
            self._tail = text[-self._keep :] if self._keep else ""
        return min(found, default=None)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


def completion_text(tokenizer: Any, token_ids: list[int], stop_reason: int | str | None) -> str:
    """The completion without special tokens, and without the stop string that ended it."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
    if not isinstance(stop_reason, str):
        return text
    # The last token completed it; an occurrence further up came before min_tokens and belongs to the text.
    before = tokenizer.decode(token_ids[:-1], skip_special_tokens=True).rstrip("�")
    at = text.find(stop_reason, max(0, len(before) - len(stop_reason) + 1))
    if at < 0:  # it names special tokens, which the text is without
        special = [token for token in special_tokens(tokenizer).values() if token in stop_reason]
        rest = stop_reason
        for token in sorted(special, key=len, reverse=True):
            rest = rest.replace(token, "")
        first = len(before) - len(rest) + (not stop_reason.endswith(tuple(special)))
        at = text.find(rest, max(0, first)) if rest else -1
    return text[:at] if at >= 0 else text
