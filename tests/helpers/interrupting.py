"""Ctrl-C at any point of what Python runs."""

from __future__ import annotations

import signal
import sys
from types import FrameType


class InterruptAt:
    """Within it SIGINT comes at one of the calls and returns of Python, or returns of C; ``count`` is how many there were."""

    def __init__(self, event: int = -1) -> None:
        self.event, self.count = event, 0

    def __call__(self, frame: FrameType, kind: str, argument: object) -> None:
        if kind == "c_call":  # Python looks for signals when a call of C is over, and not before it
            return
        self.count += 1
        if self.count == self.event:
            signal.raise_signal(signal.SIGINT)

    def __enter__(self) -> InterruptAt:
        sys.setprofile(self)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)
