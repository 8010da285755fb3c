"""Finds the plain model inside a trainer's wrappers, and the names that its modules and tensors have there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from stoker.kernels.errors import UnsupportedModelError

_IDLE = (nn.Dropout, nn.Identity)
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DDP, FSDP, DeepSpeed's engine, ``torch.compile``, activation checkpointing and ``PeftModel``."""
    while (inner := inside(model)) is not None:
        model = inner
    return model


def inside(module: nn.Module) -> nn.Module | None:
    """What a wrapper wraps; None for any other module."""
    children = module._modules
    if children:
        for name in _wrapped_as(type(module)):
            if (inner := children.get(name)) is not None:
                return inner
    return None


def _names_in(kind: type) -> tuple[str, ...]:
    """The attributes under which a wrapper of this class may have what it wraps."""
    names: tuple[str, ...] = _WRAPPED
    if is_of_peft(kind):
        # A whole model, PEFT's tuner in it, a layer with adapters, and a module that adapters have copies or tokens of.
        names += ("base_model", "model", "base_layer", "original_module", "token_adapter")
    is_wrapper = issubclass(kind, nn.parallel.DistributedDataParallel | nn.DataParallel)
    if is_wrapper or kind.__module__.partition(".")[0] == "deepspeed":
        names += ("module",)
    return names


# Every module of a model is looked at before each rollout, so a class is only once. mypy takes no class of modules for a key.
_wrapped_as: Callable[[type], tuple[str, ...]] = cache(_names_in)


def _is_of_peft(kind: type) -> bool:
    """Whether PEFT made the class, or what it derives from: FSDP2 puts a class of its own in front."""
    return any(base.__module__.partition(".")[0] == "peft" for base in kind.__mro__)


is_of_peft: Callable[[type], bool] = cache(_is_of_peft)  # as for ``_wrapped_as``


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


def walk_adapters(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module that PEFT put beside one of the model's, as ``q_proj.lora_A.default`` beside ``q_proj``."""
    for path, module in walk(model):
        inner = inside(module)
        if inner is not None and is_of_peft(type(module)):
            for name, child in module._modules.items():
                if child is not None and child is not inner:
                    yield from walk(child, f"{beside(path, module)}.{name}")


def beside(path: str, module: nn.Module) -> str:
    """The prefix of the names of a PEFT module's tensors: the path of what it stands in front of.

    Those in front of single parameters of a module stand one in front of the other.
    """
    parameter = getattr(module, "parameter_name", None)
    return f"{path}.{parameter}" if isinstance(parameter, str) else path


def plain_name(path: str, module: nn.Module, name: str) -> str:
    """What ``walk`` or ``walk_adapters`` calls the tensor that has a dotted name in a module at ``path``, with wrappers in it."""
    *parts, leaf = name.split(".")
    for part in parts:
        while part not in module._modules and (inner := inside(module)) is not None:
            module = inner  # of a wrapper that came later than the name
        child, wrapped = module.get_submodule(part), inside(module)
        if child is not wrapped:
            path = f"{path if wrapped is None else beside(path, module)}.{part}".removeprefix(".")
        module = child
    return f"{path}.{leaf}".removeprefix(".")


def kinds(model: nn.Module) -> dict[str, type]:
    """The class of each module of the plain model, by name."""
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
    """(name, tensor, whether a checkpoint has it) of every parameter and buffer, tied ones under each name.

    Those of adapters are not among them.
    """
    return tensors_of(walk(model))


def tensors_of(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor, bool]]:
    """``named_tensors`` of modules with their names."""
    for path, module in modules:
        if inside(module) is not None:
            continue
        for registry in (module._parameters, module._buffers):
            for leaf, tensor in registry.items():
                is_flat = getattr(tensor, "_is_flat_param", False)  # FSDP1's own, which it describes
                if tensor is not None and not is_flat:
                    yield f"{path}.{leaf}" if path else leaf, tensor, leaf not in module._non_persistent_buffers_set


def main_dtype(sizes: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    """The dtype that most of the numbers are in, of tensors' dtypes and how many numbers each has."""
    numbers = Counter[torch.dtype]()
    for dtype, count in sizes:
        numbers[dtype] += count
    return max(numbers, key=numbers.__getitem__, default=torch.float32)


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
