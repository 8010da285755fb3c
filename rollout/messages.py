"""What a user gave, as error messages show it."""

from __future__ import annotations

from reprlib import Repr

_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 80


def shown(value: object) -> str:
    """``repr``, and of something long not more than its beginning: a prompt or a tokenizer would fill the screen."""
    return _REPR.repr(value)
