"""The text of a completion while it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TextStream:
    """The text of a growing completion, as much of it as stays whatever comes next."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._keep = max(map(len, stops), default=1) - 1  # characters a stop string may begin in
        self._context: list[int] = []  # tokens whose text is known: how a token decodes may depend on those before it
        self._pending: list[int] = []
        self._held = ""
        self._sent = 0

    def add(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        self._pending += ids
        before, after = self._decode(self._context), self._decode(self._context + self._pending)
        new = after[len(before) :]
        if new and not new.endswith("�"):  # special tokens have no text, and are no context
            self._held += new
            self._context, self._pending = self._pending, []
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        sure = max(0, min([len(self._held) - self._keep, *found]))
        text, self._held = self._held[:sure], self._held[sure:]
        self._sent += sure
        return text

    def rest(self, text: str) -> str:
        """What is left of ``text``, the whole completion's."""
        return text[self._sent :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True) if ids else ""
