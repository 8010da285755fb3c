"""Values that a user gave: turns numbers of numpy and torch into Python's, and shortens values for error messages."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from reprlib import Repr
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_INTEGERS = {"int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"}
_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 80


def shown(value: object) -> str:
    """``repr``, shortened: a whole prompt or tokenizer would fill the screen."""
    return _REPR.repr(value)


def holds_integers(values: Tensor | NDArray[Any] | np.generic) -> bool:
    return str(values.dtype).removeprefix("torch.") in _INTEGERS


def as_int(value: Any) -> Any:
    """An integer of numpy or torch as Python's; anything else as it is."""
    if isinstance(value, (np.generic, np.ndarray, Tensor)) and not value.ndim:
        return int(value) if holds_integers(value) else value
    return value


def as_real(value: Any) -> Any:
    """A number of numpy or torch, as a schedule computes it, as Python's; anything else as it is, a truth value too."""
    if isinstance(value, (np.generic, np.ndarray, Tensor)) and not value.ndim and "bool" not in str(value.dtype):
        return value.item()
    return value


def as_ints(values: Iterable[Any]) -> list[Any]:
    """``as_int`` of each. Fast where all are Python's own already, as they mostly are."""
    found = list(values)
    return found if set(map(type, found)) <= {int} else list(map(as_int, found))


def as_ids(value: Any) -> list[Any]:
    """A list of the one id or several that a configuration or a tokenizer has; empty for None."""
    if isinstance(value, (np.generic, np.ndarray, Tensor)):
        value = value.tolist()
    if value is None:
        return []
    return as_ints(value) if isinstance(value, Iterable) else [value]


def is_int(value: Any) -> TypeGuard[int]:
    """Whether what ``as_int`` gave is an integer. True and False do not count as numbers, here and below."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: Any) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
