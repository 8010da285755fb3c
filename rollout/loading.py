"""Reads models, or only their tensors, from folders. Transformers does it, since it maps names in files to those of modules."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.integrations import deepspeed

from stoker.kernels.errors import InvalidConfigError, WeightsMismatchError, WeightTransferError
from stoker.rollout.config import EngineConfig
from stoker.weight_sync.naming import named_tensors

_log = logging.getLogger("stoker")


@contextmanager
def _whole_models() -> Iterator[None]:
    """Context manager: ``from_pretrained`` loads whole models, even where a trainer has told transformers to shard them (ZeRO-3)."""
    settings: Any = deepspeed
    trainers = settings._hf_deepspeed_config_weak_ref
    settings.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        settings._hf_deepspeed_config_weak_ref = trainers


def load_model(path: str | os.PathLike[str], config: EngineConfig, tokenizer: Any) -> tuple[Any, Any, EngineConfig]:
    """The model of a local folder, in evaluation mode; its tokenizer, or its processor where it takes images; and the config.

    A model that several ranks run together stays in its files, of which each rank's device gets its part: then the config names
    the device. Raises ``InvalidConfigError``.
    """
    from transformers import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    if not os.path.isfile(os.path.join(path, "config.json")):
        raise InvalidConfigError(f"{path} is no model folder (no config.json in it): give a local folder")
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if config.tensor_parallel_size > 1:
        config, device = replace(config, device=device), "cpu"
    try:
        with _whole_models():
            of_images = (
                type(AutoConfig.from_pretrained(path, local_files_only=True)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            )
            kind = AutoModelForImageTextToText if of_images else AutoModelForCausalLM
            model, info = kind.from_pretrained(
                path, dtype=config.dtype, device_map={"": device}, local_files_only=True, output_loading_info=True
            )
    except Exception as error:  # many kinds: files, quantisers' packages, a device that torch was not built for
        raise InvalidConfigError(f"{path} cannot be loaded on {device}: {error}") from error
    if info["missing_keys"]:
        lacking = ", ".join(sorted(info["missing_keys"])[:4])
        raise InvalidConfigError(f"{path} lacks {len(info['missing_keys'])} of the model's tensors: {lacking}")
    return model.eval(), _reader(path, of_images) if tokenizer == "auto" else tokenizer, config


def _reader(path: str | os.PathLike[str], of_images: bool) -> Any:
    """The folder's processor, or its tokenizer, or None."""
    from transformers import AutoProcessor, AutoTokenizer

    def has(*files: str) -> bool:
        return any(os.path.isfile(os.path.join(path, file)) for file in files)

    if of_images and has("processor_config.json", "preprocessor_config.json"):
        try:
            return AutoProcessor.from_pretrained(path, local_files_only=True)
        except Exception as error:  # damaged files, or a package it wants, such as torchvision
            _log.warning("the processor in %s cannot be loaded, so chats with images cannot be read: %s", path, error)
    try:
        has_one = has("tokenizer.json", "tokenizer_config.json")
        return AutoTokenizer.from_pretrained(path, local_files_only=True) if has_one else None
    except Exception as error:  # damaged files end in whatever their reader raises
        raise InvalidConfigError(f"the tokenizer in {path} cannot be loaded: {error}. Mend it, or give one") from error


def checkpoint(kind: Any, folder: str) -> dict[str, Tensor]:
    """The tensors of a model of that class by name, memory-mapped.

    Raises ``WeightTransferError`` where they cannot be read, ``WeightsMismatchError`` where they are not all of them.
    """
    # Without config.json transformers would make a model of its class's default size.
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise WeightTransferError(
            f"{folder} cannot be loaded: no config.json in it. Give a folder that save_pretrained wrote. The engine keeps its "
            "weights"
        )
    try:
        with _whole_models():
            model, info = kind.from_pretrained(
                folder,
                dtype="auto",
                device_map={"": "cpu"},
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception as error:  # transformers raises many kinds over damaged files and missing packages
        raise WeightTransferError(f"{folder} cannot be loaded: {error}. The engine keeps its weights") from error
    wrong = [f"missing {name}" for name in sorted(info["missing_keys"])]
    wrong += [f"unknown {name}" for name in sorted(info["unexpected_keys"])]
    wrong += [f"{name} has shape {tuple(a)}, not {tuple(b)}" for name, a, b in sorted(info["mismatched_keys"])]
    if wrong:
        raise WeightsMismatchError(f"{folder} does not fit: {'; '.join(wrong)}. No weight was changed")
    return {name: tensor for name, tensor, in_checkpoints in named_tensors(model) if in_checkpoints}
