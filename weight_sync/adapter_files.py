"""Adapters from elsewhere than the live model: another PEFT model, a state dict in memory, or a folder that PEFT saved."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from stoker.kernels.errors import UnsupportedModelError
from stoker.kernels.reference.lora import AdapterWeights, LoraWeights
from stoker.weight_sync.adapters import check_adapters, check_config, live_adapters
from stoker.weight_sync.naming import unwrap

_PART = re.compile(r"(?P<path>.+)\.lora_(?P<kind>A|B|magnitude_vector)(\.(?!weight$)[^.]+)?(\.weight)?")
_SAVED = re.compile(r"(?P<path>.+?)(\.modules_to_save\.[^.]+)?\.(?P<leaf>[^.]+)")
# These change the base's weights too, which a file of the adapter alone does not have.
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def adapter_reader(name: str, source: Any) -> tuple[Callable[[], AdapterWeights], bool]:
    """What reads an adapter as it is now, and whether it may read another one later.

    source: a ``PeftModel`` (its active adapter), or it and the name of one, whose tensors stay the owner's; a state dict and
    its ``LoraConfig``, or a folder with ``adapter_config.json`` and ``adapter_model.safetensors``, which are copied.

    Raises ``UnsupportedModelError`` for what the engine does not run and for what does not belong together.
    """
    if isinstance(source, str | os.PathLike):
        adapter = _from_folder(name, os.fspath(source))
        return lambda: adapter, False
    first, second = source if isinstance(source, tuple) and len(source) == 2 else (source, None)
    if isinstance(first, nn.Module) and hasattr(first, "peft_config"):
        return _reader_of_live(name, first, second), True
    if isinstance(first, Mapping) and second is not None:
        adapter = from_state_dict(name, first, second)
        return lambda: adapter, False
    raise UnsupportedModelError(
        f"adapter {name!r}: give a PeftModel, (PeftModel, adapter name), (state dict, LoraConfig) or a folder"
    )


def _reader_of_live(name: str, model: Any, theirs: str | None) -> Callable[[], AdapterWeights]:
    wanted = theirs if theirs is not None else model.active_adapter

    def read() -> AdapterWeights:
        module = unwrap(model)
        check_adapters(module)
        found = live_adapters(module)
        if wanted not in found:
            raise UnsupportedModelError(f"adapter {name!r}: the model has {sorted(found)}, and no {wanted!r}")
        return found[wanted]

    read()
    return read


def _from_folder(name: str, folder: str) -> AdapterWeights:
    file = os.path.join(folder, "adapter_model.safetensors")
    try:
        with open(os.path.join(folder, "adapter_config.json"), encoding="utf-8") as text:
            config = SimpleNamespace(**json.load(text))
        return from_state_dict(name, load_file(file), config)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise UnsupportedModelError(
            f"adapter {name!r} cannot be loaded from {folder}: {error}. Give a folder that save_pretrained wrote, with "
            "adapter_config.json and adapter_model.safetensors"
        ) from error


def from_state_dict(name: str, tensors: Mapping[str, Tensor], config: Any) -> AdapterWeights:
    """A copy of an adapter by PEFT's names. Raises ``UnsupportedModelError``."""
    config = SimpleNamespace(**config) if isinstance(config, Mapping) else config
    check_config(config)
    init = getattr(config, "init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_OTHER_BASE):
        raise UnsupportedModelError(
            f"adapter {name!r} was made by {init}, which changes the base's weights too: save it with "
            "save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    parts: dict[str, dict[str, Tensor]] = {}
    saved: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        plain = key.removeprefix("base_model.model.")
        copy = tensor.detach().clone()
        if not bool(copy.isfinite().all()):
            raise UnsupportedModelError(
                f"adapter {name!r} has NaN or Inf in {key}: it was not trained to an end, or is damaged"
            )
        if match := _PART.fullmatch(plain):
            parts.setdefault(match["path"], {})[match["kind"]] = copy
        elif "lora_" not in plain and (match := _SAVED.fullmatch(plain)) and _is_saved(match["path"], config):
            saved.setdefault(match["path"], {})[match["leaf"]] = copy
        else:
            raise UnsupportedModelError(
                f"adapter {name!r} has {key}, which is neither LoRA of a linear layer nor in modules_to_save: leave its "
                "module out of target_modules"
            )
    if not parts and not saved:
        raise UnsupportedModelError(f"adapter {name!r} is empty: give the tensors of get_peft_model_state_dict")
    linears, magnitudes = {}, {}
    for path, part in parts.items():
        if "A" not in part or "B" not in part:
            raise UnsupportedModelError(
                f"adapter {name!r} has only one of A and B for {path}: its tensors are incomplete"
            )
        if getattr(config, "use_dora", False) != ("magnitude_vector" in part):
            raise UnsupportedModelError(f"adapter {name!r}: use_dora and the magnitudes of {path} do not agree")
        rank = int(_pattern(getattr(config, "rank_pattern", None), path, config.r))
        if part["A"].shape[0] != rank:
            raise UnsupportedModelError(
                f"adapter {name!r} has rank {part['A'].shape[0]} for {path}, and its config says {rank}: give its own config"
            )
        alpha = _pattern(getattr(config, "alpha_pattern", None), path, config.lora_alpha)
        scale = alpha / math.sqrt(rank) if getattr(config, "use_rslora", False) else alpha / rank
        linears[path] = LoraWeights(part["A"], part["B"], float(scale))
        if "magnitude_vector" in part:
            magnitudes[path] = part["magnitude_vector"]
    return AdapterWeights(linears, magnitudes, saved)


def _is_saved(path: str, config: Any) -> bool:
    return any(path == m or path.endswith(f".{m}") for m in getattr(config, "modules_to_save", None) or ())


def _pattern(patterns: Mapping[str, Any] | None, path: str, default: Any) -> Any:
    """The value of the first pattern that the end of the path matches, as PEFT chooses it."""
    return next((v for key, v in (patterns or {}).items() if re.fullmatch(rf"(.*\.)?({key})", path)), default)
