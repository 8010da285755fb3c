"""Where CPython keeps the frames of what runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SLOTS = 8192  # of 8 bytes: more than is left of any piece, so that a new one is taken, with about as many behind them


def in_one_piece(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function, with the frames of all that it calls in one piece of memory.

    CPython 3.11 to 3.13 keeps frames in pieces of 16 KB. It maps one when a call finds no room, and unmaps it when that call is
    over: 10 microseconds, and a caller as deep as that some small function of a step finds none pays them at every call of that.
    On a CPU such steps took 1.3 times as long. A piece of its own costs as much as one such call.
    """

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_SLOTS)
    return wraps(function)(call)
