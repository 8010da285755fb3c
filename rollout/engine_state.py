"""Whether an engine may do what it is asked for: not where it is closed, asleep, or has requests in the way."""

from __future__ import annotations

from stoker.kernels.errors import EngineStateError
from stoker.rollout.loop import Loop
from stoker.rollout.memory import EngineMemory


class EngineState:
    """What each call of an engine asks before it begins. Every check raises ``EngineStateError``."""

    def __init__(self, loop: Loop, memory: EngineMemory) -> None:
        self._loop, self._memory = loop, memory
        self.closed = False

    def check_open(self) -> None:
        if self.closed:
            raise EngineStateError("the engine is closed: build a new one")

    def check_ready(self) -> None:
        """Open, and awake."""
        self.check_open()
        if self._memory.asleep:
            raise EngineStateError(f"the engine is asleep ({', '.join(self._memory.asleep)}): call wake_up() first")

    def check_weights(self, action: str, *, idle: bool = True) -> None:
        """Open, with weights that are awake. idle: and with no requests under way, but paused ones."""
        self.check_open()
        if idle:
            self._loop.check_idle(action)
        if "weights" in self._memory.asleep:
            raise EngineStateError("the weights are asleep: call wake_up(['weights']) first")
