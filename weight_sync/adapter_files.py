"""Reads adapters that are given to the engine: of another PEFT model, as a state dict, or from a folder that PEFT saved."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from stoker.kernels.errors import UnsupportedModelError
from stoker.kernels.reference.adapter_weights import AdapterWeights, LoraWeights, TokenRows
from stoker.weight_sync.other_model_adapters import AdapterOfModel
from stoker.weight_sync.peft_adapters import by_expert, changes_base, check_config

_PART = re.compile(
    r"(?P<path>.+)\.lora_(?P<kind>A|B|embedding_A|embedding_B|magnitude_vector)(\.(?!weight$|bias$)[^.]+)?"
    r"(\.(?P<leaf>weight|bias))?"
)
_TOKENS = re.compile(r"(?P<path>.+)\.token_adapter\.trainable_tokens_delta(\.[^.]+)?")
_COPY = re.compile(r"\.modules_to_save\.[^.]+(?=\.)")  # in names that are not of a file, but of the model
_BASE = re.compile(r"(?P<path>.+?)(\.base_layer)*\.(?P<leaf>weight|bias)")
# What is raised by tensors and settings that PEFT did not write, as in files that were cut off or written by hand.
_MALFORMED = (AttributeError, TypeError, ValueError, LookupError, RuntimeError, re.error)
_DEFAULTS = {  # for settings that configs of older versions do not have
    "bias": "none",
    "ensure_weight_tying": False,
    "init_lora_weights": True,
    "modules_to_save": None,
    "alpha_pattern": None,
    "rank_pattern": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_dora": False,
    "use_rslora": False,
}


def _split(source: Any) -> tuple[Any, Any]:
    return source if isinstance(source, tuple) and len(source) == 2 else (source, None)


def model_of(source: Any) -> nn.Module | None:
    """The ``PeftModel`` of a source that has one."""
    first, _ = _split(source)
    return first if isinstance(first, nn.Module) and hasattr(first, "peft_config") else None


def read_adapter(
    name: str, source: Any, parameters: Mapping[str, int], device: torch.device, options: Mapping[str, Any]
) -> AdapterWeights | AdapterOfModel:
    """The adapter that ``source`` gives. One that belongs to a model may change later.

    source: a ``PeftModel`` (its active adapter), or it and the name of one, whose tensors stay the owner's; a state
    dict and its ``LoraConfig``, or a folder with ``adapter_config.json`` and ``adapter_model.safetensors``, which are
    copied. parameters: those of experts in the base, with their numbers of dimensions: files do not tell them from linears.
    device, options: as for ``AdapterOfModel``.

    Raises ``UnsupportedModelError`` for what the engine does not run and for what does not belong together.
    """
    if isinstance(source, str | os.PathLike):
        return _from_folder(name, os.fspath(source), parameters)
    first, second = _split(source)
    if (model := model_of(source)) is not None:
        return AdapterOfModel(name, model, second, device, options)
    if isinstance(first, Mapping) and second is not None:
        try:
            return from_state_dict(name, first, second, parameters)
        except UnsupportedModelError:
            raise
        except _MALFORMED as error:
            raise UnsupportedModelError(
                f"adapter {name!r} cannot be read: {error!r}. Give the tensors, which have to be in memory, and the LoraConfig of "
                "one adapter"
            ) from error
    raise UnsupportedModelError(
        f"adapter {name!r}: give a PeftModel, (PeftModel, adapter name), (state dict, LoraConfig) or a folder"
    )


def _from_folder(name: str, folder: str, parameters: Mapping[str, int]) -> AdapterWeights:
    file = os.path.join(folder, "adapter_model.safetensors")
    try:
        with open(os.path.join(folder, "adapter_config.json"), encoding="utf-8") as text:
            config = SimpleNamespace(**json.load(text))
        return from_state_dict(name, load_file(file), config, parameters)
    except UnsupportedModelError:
        raise
    except (OSError, SafetensorError, *_MALFORMED) as error:
        raise UnsupportedModelError(
            f"adapter {name!r} cannot be loaded from {folder}: {error}. Give a folder that save_pretrained wrote, with "
            "adapter_config.json and adapter_model.safetensors"
        ) from error


def from_state_dict(
    name: str, tensors: Mapping[str, Tensor], config: Any, parameters: Mapping[str, int]
) -> AdapterWeights:
    """A copy of an adapter whose tensors have PEFT's names. Raises ``UnsupportedModelError``."""
    config = SimpleNamespace(**_DEFAULTS | dict(config if isinstance(config, Mapping) else vars(config)))
    check_config(config)
    if changes_base(config):
        raise UnsupportedModelError(
            f"adapter {name!r} was made by {config.init_lora_weights}, which changes the base's weights too: save it with "
            "save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    parts: dict[str, dict[str, Tensor]] = {}
    adapter = AdapterWeights()
    for key, tensor in tensors.items():
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        if not bool(copy.isfinite().all()):
            raise UnsupportedModelError(
                f"adapter {name!r} has NaN or Inf in {key}: it was not trained to an end, or is damaged"
            )
        where, what, value = _place(adapter, parts, name, key, copy, config)
        if what in where:  # the names differ only in that of the adapter
            raise UnsupportedModelError(
                f"adapter {name!r} has {key}, and the same of another adapter: give the tensors and the config of one adapter, "
                "as get_peft_model_state_dict does"
            )
        where[what] = value
    if config.ensure_weight_tying:
        _take_tied(adapter, parts)
    if not parts and not adapter.saved and not adapter.tokens:
        raise UnsupportedModelError(f"adapter {name!r} is empty: give the tensors of get_peft_model_state_dict")
    if unknown := sorted(path for path in adapter.bases if path not in parts):
        raise UnsupportedModelError(
            f"adapter {name!r} has a weight of {unknown[0]}, which is neither LoRA of a layer nor in modules_to_save: give the "
            "tensors and the config of one adapter"
        )
    for path, part in parts.items():
        _take(adapter, name, path, part, config, parameters)
    return adapter


def _place(
    adapter: AdapterWeights, parts: dict[str, dict[str, Tensor]], name: str, key: str, tensor: Tensor, config: Any
) -> tuple[dict[str, Any], str, Any]:
    """Where a tensor belongs by its key: (dictionary, key in it, value to put there). parts: of LoRA layers, by path."""
    plain = key.removeprefix("base_model.model.")
    if match := _PART.fullmatch(plain):
        kind = "offset" if match["leaf"] == "bias" else match["kind"].removeprefix("embedding_")
        return parts.setdefault(match["path"], {}), kind, tensor
    if match := _TOKENS.fullmatch(plain):
        ids = _token_indices(match["path"], config)
        if len(ids) != len(tensor):
            raise UnsupportedModelError(
                f"adapter {name!r} has {len(tensor)} tokens of {match['path']}, and its config {len(ids)} "
                "trainable_token_indices: give its own config"
            )
        return adapter.tokens, match["path"], TokenRows(ids, tensor)
    if saved := _saved(plain, config.modules_to_save):
        path, what = saved
        return adapter.saved.setdefault(path, {}), what, tensor
    if (match := _BASE.fullmatch(plain)) and (match["leaf"] == "weight" or config.bias != "none"):
        return adapter.bases if match["leaf"] == "weight" else adapter.biases, match["path"], tensor
    raise UnsupportedModelError(
        f"adapter {name!r} has {key}, which is neither LoRA of a layer nor in modules_to_save, biases or tokens "
        "that its config names: give the tensors and the config of one adapter"
    )


def _take_tied(adapter: AdapterWeights, parts: Iterable[str]) -> None:
    """Take modules that are tied to one that was saved whole: PEFT saves them too, but the config does not name them."""
    weights = [state["weight"] for state in adapter.saved.values() if "weight" in state]
    for path in adapter.bases.keys() - set(parts):
        if (same := next((w for w in weights if torch.equal(w, adapter.bases[path])), None)) is not None:
            adapter.saved[path] = {"weight": same}
            del adapter.bases[path]


def _take(
    adapter: AdapterWeights, name: str, key: str, part: Mapping[str, Tensor], config: Any, parameters: Mapping[str, int]
) -> None:
    """Take one layer's part. key: its path, with a ``base_layer`` for each layer of another parameter that is around it."""
    path, *around = key.split(".base_layer")
    if "A" not in part or "B" not in part:
        raise UnsupportedModelError(f"adapter {name!r} has only one of A and B for {path}: its tensors are incomplete")
    if config.use_dora != ("magnitude_vector" in part):
        raise UnsupportedModelError(f"adapter {name!r}: use_dora and the magnitudes of {path} do not agree")
    parameter = _targeted_parameter(path, len(around), config, parameters)
    weight = f"{path}.weight"
    target = parameter or (weight if _is_named(weight, config.target_parameters or ()) else path)
    rank = int(_pattern(config.rank_pattern, target, config.r))
    found = part["A"].shape[0]
    if found % rank if parameter else found != rank:
        raise UnsupportedModelError(
            f"adapter {name!r} has rank {found} for {path}, and its config says {rank}: give its own config"
        )
    alpha = _pattern(config.alpha_pattern, target, config.lora_alpha)
    scale = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
    if not math.isfinite(scale):  # which json takes too, and every token would be NaN
        raise ValueError(f"lora_alpha={alpha} for {path}")
    weights = LoraWeights(part["A"], part["B"], float(scale))
    if parameter:
        adapter.experts[parameter] = by_expert(weights, found // rank) if parameters[parameter] == 3 else weights
    else:
        adapter.linears[path] = weights
    if "offset" in part:
        adapter.offsets[path] = part["offset"]
    if "magnitude_vector" in part:
        adapter.magnitudes[path] = part["magnitude_vector"]


def _targeted_parameter(path: str, around: int, config: Any, parameters: Iterable[str]) -> str | None:
    """The parameter of a module that a layer is over, if ``around`` other layers are around it; None where it is over a linear."""
    targets = config.target_parameters or ()
    own = [p for p in parameters if p.rpartition(".")[0] == path and _is_named(p, targets)]
    return own[-1 - around] if around < len(own) else None  # PEFT wraps the first one first


def _token_indices(path: str, config: Any) -> tuple[int, ...]:
    """The ids of an embedding's trained tokens; none where the config does not name it."""
    indices = config.trainable_token_indices or {}
    if not isinstance(indices, Mapping):
        return tuple(indices)
    return next((tuple(ids) for module, ids in indices.items() if path.endswith(module)), ())


def _saved(name: str, modules: Iterable[str] | None) -> tuple[str, str] | None:
    """The path of the saved module that a tensor belongs to, and its name there. As in PEFT, "norm" means "input_layernorm" too."""
    parts = _COPY.sub("", name, count=1).split(".")
    splits = ((".".join(parts[:n]), ".".join(parts[n:])) for n in range(1, len(parts)))
    return next(((path, leaf) for path, leaf in splits if path.endswith(tuple(modules or ()))), None)


def _is_named(path: str, names: Iterable[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def _pattern(patterns: Mapping[str, Any] | None, path: str, default: Any) -> Any:
    """The value of the first pattern that the end of the path matches, as PEFT chooses it."""
    return next((v for key, v in (patterns or {}).items() if re.fullmatch(rf"(.*\.)?({key})", path)), default)
