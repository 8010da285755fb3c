"""The bytes that each token of a tokenizer adds to a completion's text. Bytes, since a character may be split between tokens."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.kernels.errors import InvalidRequestError
from stoker.rollout.user_values import shown

_CUT = "\N{REPLACEMENT CHARACTER}"  # in place of what is no whole character
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
_CHECKED = 64  # sequences
_CLEANED = "a . b ? c ! d , e ' f n't 'm 's 've 're"  # where a tokenizer that cleans up text takes spaces out


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """The bytes of each of V tokens, one behind the other: where they start and how many they are."""

    data: NDArray[np.uint8]
    start: NDArray[np.int64]  # [V]
    length: NDArray[np.int64]  # [V]

    @classmethod
    def of(cls, texts: list[bytes]) -> Texts:
        length = np.array([len(text) for text in texts])
        return cls(np.frombuffer(b"".join(texts), dtype=np.uint8), length.cumsum() - length, length)


class TokenTexts:
    """The bytes of each token of the vocabulary, at the beginning of a completion and after other tokens.

    The two differ where a tokenizer drops a leading space, or puts spaces between tokens. A token without bytes adds no text,
    as a special one. ``first`` and ``later``: [vocab]. Raises ``InvalidRequestError`` where the text of tokens is not
    that of each, one after the other.
    """

    def __init__(self, tokenizer: Any, vocab: int) -> None:
        self._tokenizer = tokenizer
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):  # which those of some kinds take no notice of
            written = tokenizer(_CLEANED, add_special_tokens=False)["input_ids"]
            if tokenizer.decode(written, skip_special_tokens=True) != self._decode(written):
                raise self._refused("spaces are taken out (set tokenizer.clean_up_tokenization_spaces to False)")
        # By a token's name, which of some tokenizers is its bytes, and of special tokens among these a string.
        named = sorted(tokenizer.get_vocab().items(), key=lambda item: str(item[0]))
        names = {token: name for name, token in named if token < vocab}
        alone = {token: self._decode([token]) for token in names}
        letters = (t for t, text in sorted(alone.items()) if text.isascii() and text.isalnum())
        anchor = next((t for t in letters if not _is_fallback(names[t])), None)  # bytes may make a character
        if anchor is None:
            raise self._refused("no token is a letter or digit")
        known = [(b"", b"")] * vocab
        for token, name in names.items():
            after = self._decode([anchor, token])
            first = _bytes(name, alone[token])
            later = _bytes(name, after[len(alone[anchor]) :]) if after.startswith(alone[anchor]) else None
            if first is not None and later is not None:
                known[token] = first, later
        self._check(known)
        self.first, self.later = (Texts.of(list(texts)) for texts in zip(*known, strict=True))

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _check(self, known: list[tuple[bytes, bytes]]) -> None:
        """Check on random sequences that they decode to the bytes found, one token after the other. Only of whole characters."""
        whole = [t for t, (first, later) in enumerate(known) if later and not _is_cut(first) and not _is_cut(later)]
        draw = random.Random(0)
        for _ in range(_CHECKED if whole else 0):
            tokens = draw.choices(whole, k=8)
            text = known[tokens[0]][0] + b"".join(known[t][1] for t in tokens[1:])
            if self._decode(tokens) != text.decode():
                raise self._refused(
                    f"tokens {tokens} decode to {shown(self._decode(tokens))}, each by itself to other text"
                )

    def _refused(self, why: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"regex needs a tokenizer whose text is that of its tokens one after the other, and of this "
            f"{type(self._tokenizer).__name__} {why}: sample without regex"
        )


def _bytes(name: str | bytes, text: str) -> bytes | None:
    """The bytes of a token that decodes to ``text``; None where that is cut, and its name does not say what there was."""
    if _CUT not in text:
        return text.encode()
    cut = _cut_bytes(name)
    return cut if cut is not None and cut.decode(errors="replace") == text else None


def _is_cut(text: bytes) -> bool:
    try:
        return _CUT in text.decode()
    except UnicodeDecodeError:
        return True


def _is_fallback(name: str | bytes) -> bool:
    return isinstance(name, str) and _FALLBACK.fullmatch(name) is not None


def _cut_bytes(name: str | bytes) -> bytes | None:
    """The bytes that a token's name stands for: itself, a number as in "<0x0A>", or one character a byte in byte-level vocabularies."""
    if isinstance(name, bytes):
        return name
    if (number := _FALLBACK.fullmatch(name)) is not None:
        return bytes([int(number[1], 16)])
    try:
        return bytes(_BYTE_OF[character] for character in name)
    except KeyError:
        return None


def _byte_characters() -> dict[str, int]:
    """The bytes by their characters in byte-level vocabularies: printable Latin-1 as it is, all others from 256 on."""
    shown_as_they_are = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(shown_as_they_are))
    return {chr(b): b for b in shown_as_they_are} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_characters()
