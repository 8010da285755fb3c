"""Notices when settings of modules change: numbers they compute with that are no tensors (scales, bounds, numbers of experts)."""

from __future__ import annotations

import operator
import re
from typing import Any

import numpy as np
from torch import Tensor

from stoker.kernels.errors import UnsupportedModelError

# What a trainer may change at any time, and no rollout reads. ``seq_len_cached`` is rotary embeddings' own book-keeping.
_NOT_OF_ROLLOUTS = re.compile(
    r"_.*|p|name_or_path|padding_idx|.*(drop|jitter|loss|_coef|checkpointing|initializer|seq_len_cached|token_id).*"
)


def is_setting(value: Any) -> bool:
    """Whether an attribute of a module may be a setting."""
    return value is None or isinstance(value, int | float | str)


class Settings:
    """Settings of modules and numbers in configurations. They are compared without a line of Python for each: 50 ns each."""

    def __init__(self) -> None:
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._values: list[Any] = []

    def taken_over(self, path: str, owner: dict[str, Any], name: str, own: Any) -> Any:
        """A setting's value in the model's module, ``owner``, which is watched from now on; where it has none, the class's ``own``.

        Raises ``UnsupportedModelError`` for an array in place of a number.
        """
        value = owner.get(name, ...)
        if own is not None:
            value = _plain(value)
        if is_setting(value):
            self.watch(owner, name)
            return value
        if isinstance(own, float) and isinstance(value, np.ndarray | Tensor):
            raise UnsupportedModelError(
                f"{path}.{name} is an array of shape {tuple(value.shape)}, and a number where the model's class makes it: give it "
                "one"
            )
        return own

    def watch(self, owner: dict[str, Any], name: str) -> None:
        if not _NOT_OF_ROLLOUTS.fullmatch(name):
            self._owners.append(owner)
            self._names.append(name)
            self._values.append(owner.get(name))

    def watch_numbers(self, config: Any) -> None:
        """Watch the numbers in a model's configuration: its forward may read them (a softcap). Switches are left to the trainer."""
        for name, value in vars(config).items():
            if value is None or type(value) in (int, float):
                self.watch(vars(config), name)

    @property
    def changed(self) -> bool:
        now = list(map(dict.get, self._owners, self._names))
        if all(map(operator.is_, now, self._values)):
            return False
        return any(a is not b and _differs(a, b) for a, b in zip(now, self._values, strict=True))


def _plain(value: Any) -> Any:
    """One number of numpy's or torch's as Python has it; anything else as it is."""
    return value.item() if isinstance(value, np.generic | Tensor) and value.ndim == 0 else value


def _differs(now: Any, before: Any) -> bool:
    if before is None:  # what a forward leaves there (positions of images, say) is no setting
        return type(now) in (int, float)
    now = _plain(now)
    return not is_setting(now) or bool(now != _plain(before))
