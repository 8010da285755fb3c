"""Finds stop strings in a growing completion, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopStringChecker:
    """Decodes only what is new: a call costs a few tokens' decoding, however long the completion is.

    Text is decoded with special tokens left in, so that one may be a stop string.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.stops = tuple(stops)
        self._keep = max(map(len, self.stops)) - 1  # characters of old text a stop string may begin in
        self._tail = ""
        self._context: list[int] = []  # tokens whose text is out: how a token decodes may depend on those before it
        self._pending: list[int] = []  # tokens that do not make whole characters yet
        self._searched = 0  # characters they make already

    def __call__(self, token: int) -> str | None:
        """Take the next token; returns the stop string that it completed, the earliest in the text, or None."""
        self._pending.append(token)
        before = self._decode(self._context)
        after = self._decode(self._context + self._pending)
        new = after[len(before) :]
        whole = new.rstrip("�")  # a token may end one character and begin the next
        text = self._tail + whole
        # Only a match that ends in the new text: one in the old text was reported when it was new.
        old = len(self._tail) + self._searched
        found = [(at, s) for s in self.stops if (at := text.find(s, max(0, old - len(s) + 1))) >= 0]
        self._searched = len(whole)
        if whole == new:  # not inside a multi-byte character
            self._searched = 0
            self._context, self._pending = self._pending[-4:], []
            self._tail = text[-self._keep :] if self._keep else ""
        return min(found)[1] if found else None

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


def completion_text(tokenizer: Any, token_ids: list[int], stop_reason: int | str | None) -> str:
    """The completion without special tokens, and without the stop string that ended it."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
    if isinstance(stop_reason, str):
        # The last token completed it; an occurrence further up came before min_tokens and belongs to the text.
        before = tokenizer.decode(token_ids[:-1], skip_special_tokens=True).rstrip("�")
        at = text.find(stop_reason, max(0, len(before) - len(stop_reason) + 1))
        text = text[:at] if at >= 0 else text
    return text
