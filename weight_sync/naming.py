"""The names that a model's tensors have without the wrappers a trainer puts around its modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from stoker.kernels.errors import UnsupportedModelError

_IDLE = (nn.Dropout, nn.Identity)
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """A dotted name without the wrappers' parts."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DDP, FSDP, DeepSpeed's engine, ``torch.compile``, activation checkpointing and ``PeftModel``."""
    while (inner := inside(model)) is not None:
        model = inner
    return model


def inside(module: nn.Module) -> nn.Module | None:
    """What a wrapper wraps; None for any other module."""
    children = module._modules
    for name in _WRAPPED:
        if isinstance(inner := children.get(name), nn.Module):
            return inner
    if _is_of_peft(type(module)):
        # A whole model, PEFT's tuner in it, a layer with adapters, and a module that adapters have copies or tokens of.
        for name in ("base_model", "model", "base_layer", "original_module", "token_adapter"):
            if isinstance(inner := children.get(name), nn.Module):
                return inner
    is_wrapper = isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
    if is_wrapper or type(module).__module__.partition(".")[0] == "deepspeed":
        return children.get("module")
    return None


def _is_of_peft(kind: type) -> bool:
    """Whether PEFT made the class, or what it derives from: FSDP2 puts a class of its own in front."""
    return any(base.__module__.partition(".")[0] == "peft" for base in kind.__mro__)


def walk(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module with its name in the plain model; a wrapper has the name of what it wraps, and comes first."""
    yield path, model
    inner = inside(model)
    if inner is not None:
        yield from walk(inner, path)
        return
    for name, child in model._modules.items():
        if child is not None:
            yield from walk(child, f"{path}.{name}" if path else name)


def kinds(model: nn.Module) -> dict[str, type]:
    """Of which class each module of the plain model is."""
    return {path: type(module) for path, module in walk(model)}  # a wrapper's place is taken by what it wraps


def check_kinds(model: nn.Module, before: Mapping[str, type]) -> None:
    """Raise ``UnsupportedModelError`` where a module has become one of another class, though it may hold the same tensors.

    Of a class that one derives from the other may take its place: FSDP2 makes such, and trainers in 8 bits. So may what
    does nothing in ``eval()``.
    """
    for path, now in kinds(model).items():
        then = before.get(path, now)
        idle = issubclass(then, _IDLE) and issubclass(now, _IDLE)
        if not (idle or issubclass(now, then) or issubclass(then, now)):
            raise UnsupportedModelError(
                f"{path or 'the model'} was a {then.__name__}, and is a {now.__name__} now: the engine runs what the "
                "model's class is made of. Put it back; where it computes the same, build a new engine"
            )


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, tensor, whether a checkpoint has it) of every parameter and buffer, tied ones under each name."""
    for path, module in walk(model):
        if inside(module) is not None:
            continue
        for registry in (module._parameters, module._buffers):
            for leaf, tensor in registry.items():
                if tensor is not None and not getattr(
                    tensor, "_is_flat_param", False
                ):  # FSDP1's own, which it describes
                    yield f"{path}.{leaf}" if path else leaf, tensor, leaf not in module._non_persistent_buffers_set


def engine_dtypes(
    model: nn.Module, dtypes: Mapping[str, torch.dtype], parameters: Set[str], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """The dtype each tensor has in the engine. dtypes: the trainer's, of every tensor; parameters: which are parameters.

    With a dtype, floating-point parameters get it, but for those the model's class keeps in float32; buffers (rotary
    frequencies, router biases) and all else keep their own.
    """
    module: Any = unwrap(model)
    kept: set[str] = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        kept |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    return {
        name: own
        if dtype is None or name not in parameters or not own.is_floating_point or any(k in name for k in kept)
        else dtype
        for name, own in dtypes.items()
    }
