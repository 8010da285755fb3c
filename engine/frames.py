"""Keeps CPython from mapping memory for the frames of every call: a speed-up of steps, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SLOTS = 8192  # of 8 bytes: more than any piece has left, so CPython takes a new one, which has room for as many again


def in_one_piece(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function, with the frames of all that it calls in one piece of memory.

    CPython 3.11 to 3.13 keeps frames in pieces of 16 KB. It maps a piece when a call finds no room, and unmaps it when that call
    returns, which takes 10 microseconds. At some depths of the caller, a small function that a step calls all the time falls on
    such a border and pays that at every call: on a CPU such steps took 1.3 times as long. One piece for the whole step costs as
    much as one such call.
    """

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_SLOTS)
    return wraps(function)(call)
