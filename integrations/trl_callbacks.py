"""The callback that tells a backend when a trainer's run begins and ends."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback


def remove_callback(trainer: Any, callback: TrainerCallback) -> None:
    """Remove a callback. Makes a new list, so that a loop over the old one, from which this may be called, skips none."""
    handler = trainer.callback_handler
    handler.callbacks = [other for other in handler.callbacks if other is not callback]


class Listener(TrainerCallback):  # type: ignore[misc]
    """Tells a backend when a run begins and ends, and when an evaluation has ended."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self._backend.is_attached:  # another callback may have detached it just now
            self._backend.begin()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._backend.is_attached:
            self._backend.end()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        if self._backend.is_attached:
            self._backend.forget_step()

    on_predict = on_evaluate
