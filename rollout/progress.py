"""The bar that shows on stderr how far a call is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from stoker.kernels.interrupts import uninterrupted


@contextmanager
def progress(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Context manager for a function to tell of how many of ``total`` sequences have finished. shown: else it does nothing.

    tqdm takes one lock for all bars of all threads, also for a bar that is disabled, and an interrupt (Ctrl-C) within it leaves
    that taken: other threads would wait forever. So interrupts wait for tqdm, and without a bar it is not called.
    """
    if not shown:
        yield lambda finished: None
        return
    bar: tqdm[Any] | None = None

    def show(finished: int) -> None:
        assert bar is not None
        with uninterrupted():
            bar.update(finished - bar.n)

    try:
        with uninterrupted():
            bar = tqdm(total=total, unit="sequence")
        yield show
    finally:
        if bar is not None:
            with uninterrupted():
                bar.close()
