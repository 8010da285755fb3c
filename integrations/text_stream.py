"""Streams the text of a growing completion, holding back what later tokens may still change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoker.rollout.stop_strings import LONGEST_CHARACTER


class TextStream:
    """Gives as much of a growing completion's text as cannot change any more."""

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
        before, whole = self._decode(self._context), self._decode(self._context + self._pending)
        known, text = len(self._pending), whole
        if whole.endswith("�"):  # a character to be, or bytes that make none
            known, text = self._broken(whole)
        new, old = text[len(before) :], len(self._held)
        if new:  # special tokens have no text, and are no context
            self._held += new
            self._context, self._pending = self._pending[:known], self._pending[known:]
        # Only stop strings that end in the new text: an earlier one came before ``min_tokens``, and did not end it.
        found = [at for s in self._stops if (at := self._held.find(s, max(0, old - len(s) + 1))) >= 0]
        sure = max(0, min([len(self._held) - self._keep, *found]))
        text, self._held = self._held[:sure], self._held[sure:]
        self._sent += sure
        return text

    def rest(self, text: str) -> str:
        """What has not been given yet of ``text``, the whole completion's."""
        return text[self._sent :]

    def _broken(self, whole: str) -> tuple[int, str]:
        """How many pending tokens are so far back that their text is final, and that text; 0 where it may still change.

        Some tokenizers give no text for a row of bytes until all of them make characters; one of the next four then does.
        """
        known = len(self._pending) - LONGEST_CHARACTER - 4
        if known < LONGEST_CHARACTER:
            return 0, ""
        texts = [self._decode(self._context + self._pending[: known + more]) for more in range(4)]
        return (known, texts[0]) if all(map(whole.startswith, texts)) else (0, "")

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True) if ids else ""
