"""Checkpoints in folders, read by transformers, which knows how the names in its files became those of its models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.integrations import deepspeed

from stoker.kernels.errors import WeightsMismatchError, WeightTransferError
from stoker.weight_sync.files import not_rewritten
from stoker.weight_sync.naming import named_tensors


@contextmanager
def whole_models() -> Iterator[None]:
    """Within, ``from_pretrained`` loads whole models, also where a trainer has told transformers to part them (ZeRO-3)."""
    settings: Any = deepspeed
    trainers = settings._hf_deepspeed_config_weak_ref
    settings.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        settings._hf_deepspeed_config_weak_ref = trainers


def checkpoint(kind: Any, folder: str) -> dict[str, Tensor]:
    """The tensors of a model of that class by name, memory-mapped.

    Raises ``WeightTransferError`` where they cannot be read, ``WeightsMismatchError`` where they are not all of them.
    """
    # Without one, transformers would make a model of its class's usual size.
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise WeightTransferError(
            f"{folder} cannot be loaded: no config.json in it. Give a folder that save_pretrained wrote. The engine keeps its "
            "weights"
        )
    with not_rewritten(folder):
        try:
            with whole_models():
                model, info = kind.from_pretrained(
                    folder,
                    dtype="auto",
                    device_map={"": "cpu"},
                    local_files_only=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                )
        except Exception as error:  # transformers raises many kinds over damaged files and packages that lack
            raise WeightTransferError(f"{folder} cannot be loaded: {error}. The engine keeps its weights") from error
    wrong = [f"missing {name}" for name in sorted(info["missing_keys"])]
    wrong += [f"unknown {name}" for name in sorted(info["unexpected_keys"])]
    wrong += [f"{name} has shape {tuple(a)}, not {tuple(b)}" for name, a, b in sorted(info["mismatched_keys"])]
    if wrong:
        raise WeightsMismatchError(f"{folder} does not fit: {'; '.join(wrong)}. No weight was changed")
    return {name: tensor for name, tensor, in_checkpoints in named_tensors(model) if in_checkpoints}
