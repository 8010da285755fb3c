"""What modules compute with besides tensors: scales, bounds, how many experts. And whether it is what it was."""

from __future__ import annotations

import operator
import re
from typing import Any

# What a trainer may change all the time, and no rollout reads; a kept length is of the rotary embeddings' own.
_NOT_OF_ROLLOUTS = re.compile(
    r"_.*|p|name_or_path|.*(dropout|jitter|loss|_coef|checkpointing|initializer|seq_len_cached|token_id).*"
)


def is_setting(value: Any) -> bool:
    """Whether an attribute of a module may be what it computes with."""
    return value is None or isinstance(value, int | float | str)


class Settings:
    """Settings of modules and numbers of configurations, compared by calls that never come back to Python: 50 ns each."""

    def __init__(self) -> None:
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._values: list[Any] = []

    def watch(self, owner: dict[str, Any], name: str) -> None:
        if not _NOT_OF_ROLLOUTS.fullmatch(name):
            self._owners.append(owner)
            self._names.append(name)
            self._values.append(owner.get(name))

    def watch_numbers(self, config: Any) -> None:
        """Of a model's configuration, some of which its forward reads: a softcap, say. Switches are the trainer's."""
        for name, value in vars(config).items():
            if type(value) in (int, float):
                self.watch(vars(config), name)

    @property
    def changed(self) -> bool:
        now = list(map(dict.get, self._owners, self._names))
        if all(map(operator.is_, now, self._values)):
            return False
        others = ((a, b) for a, b in zip(now, self._values, strict=True) if a is not b)  # a NaN is not even itself
        # What a forward keeps where there was nothing, such as positions of a sequence's images, is none.
        return any(a != b if is_setting(a) else b is not None for a, b in others)
