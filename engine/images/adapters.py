"""Adapters on modules that only images go through: vision towers, and what connects them to the text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stoker.engine.adapters.checks import is_linear, states_of
from stoker.engine.model import ModelShell
from stoker.kernels.errors import UnsupportedModelError
from stoker.kernels.reference.adapter_weights import AdapterWeights, LoraWeights


@dataclass(frozen=True, slots=True)
class ImageAdapter:
    """An adapter's part that only images go through.

    linears: by module, what is added to its output, in that order. states: by name, what stands in place of parameters.
    """

    linears: Mapping[str, Sequence[LoraWeights]] = field(default_factory=dict)
    states: Mapping[str, Tensor] = field(default_factory=dict)

    @contextmanager
    def over(self, module: nn.Module) -> Iterator[None]:
        """Context manager: the linears of a model have the adapter."""
        hooks = [
            module.get_submodule(path).register_forward_hook(partial(_after_linear, chain))
            for path, chain in self.linears.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@torch.no_grad()
def image_adapter(shell: ModelShell, name: str, adapter: AdapterWeights) -> ImageAdapter:
    """The part of an adapter that no text goes through.

    Raises ``UnsupportedModelError`` naming what of it images cannot go through.
    """
    modules: dict[str, Any] = dict(shell.module.named_modules())
    linears: dict[str, list[LoraWeights]] = {}
    states: dict[str, Tensor] = {}
    for link in shell.lora.beside(adapter):
        odd = [*link.experts, *link.tokens, *(path for path in link.linears if not is_linear(modules.get(path)))]
        if odd:
            raise UnsupportedModelError(
                f"adapter {name!r} changes {odd[0]}, which only images go through, and there the engine takes adapters over "
                "linear layers, biases and modules saved whole: leave it out of target_modules"
            )
        for path in dict.fromkeys((*link.linears, *link.biases)):
            if is_linear(modules[path]):
                linears.setdefault(path, []).append(_on(shell.device, shell.lora.complete(path, link)))
        for path, state in states_of(link, modules).items():
            own = modules[path].state_dict(keep_vars=True)
            states |= {f"{path}.{key}": tensor.to(own[key]) for key, tensor in state.items()}
    return ImageAdapter(linears, states)


def _on(device: torch.device, weights: LoraWeights) -> LoraWeights:
    a, b, scale, *rest = weights
    return LoraWeights(a.to(device), b.to(device), scale, *(None if t is None else t.to(device) for t in rest))


def _after_linear(chain: Sequence[LoraWeights], linear: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    for a, b, scale, gain, shift in chain:
        added = (args[0].to(a.dtype) @ a.T @ b.T * scale).to(out.dtype)
        if gain is None:
            out = out + added
        else:  # which is over all but the bias
            bias = 0 if linear.bias is None else linear.bias
            out = ((out - bias + added) * gain + bias).to(out.dtype)
        if shift is not None:
            out = out + shift.to(out.dtype)
    return out
