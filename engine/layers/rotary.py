"""Rotary embeddings: the cosines and sines that layers get for positions, and a factor for queries where a model has one."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from stoker.engine.layers.probe import POSITIONS, Recorder
from stoker.engine.model import ModelShell

_NAMES = ("rotary_emb", "pos_emb")
_NONE = "none"  # the kind of layers without rotary embeddings


class Rotary:
    """The rotary embeddings of a model, of as many kinds as it has, in the form that ``Ops.qk_norm_rotary_write`` takes.

    Models give their layers cosines and sines in different forms: all angles, and then all again (Llama), each angle twice
    (Cohere), once (gpt-oss), or complex numbers (Llama 4).
    """

    def __init__(self, shell: ModelShell) -> None:
        """Raises an exception of any kind where they depend on more than positions."""
        found = (getattr(shell.text, name, None) for name in _NAMES)
        self.module: Any = next((module for module in found if module is not None), None)
        # The kind that each layer takes; None where all take the same.
        self.kinds: list[str | None] = [None] * shell.num_layers
        if self.module is not None and "layer_type" in inspect.signature(self.module.forward).parameters:
            known = getattr(self.module, "layer_types", shell.config.layer_types)  # some layers may have none (LFM3)
            self.kinds = [kind if kind in known else _NONE for kind in shell.config.layer_types]
        for index in set() if self.module is None else _without(shell):
            self.kinds[index] = _NONE
        self.tabled = set() if self.module is None else {kind for kind in self.kinds if kind != _NONE}
        self._factor = _factor_of(shell.config)
        self._longest = shell.max_model_len
        self._backwards = _turns_backwards(shell.text)
        like = shell.module.get_input_embeddings().weight[None, :1]
        self._strides = {kind: _stride(self.given(like, POSITIONS.to(like.device), kind)) for kind in self.tabled}

    def probed(self, device: torch.device) -> Tensor:
        """Positions for a probe, up to the longest sequence's last: a factor may be 1 for the first ten thousand."""
        last = int(POSITIONS.max())
        return POSITIONS.to(device) * max(self._longest - 1, last) // last

    def given(self, x: Tensor, positions: Tensor, kind: str | None) -> Any:
        """What the model gives its layers; None where that is nothing. x: of their dtype; positions: int64 [T], or [3, T]."""
        if kind not in self.tabled:
            return None
        positions = positions.view(-1, 1, positions.shape[-1])
        # Positions in time, height and width, which are equal for text.
        positions = positions.expand(3, -1, -1) if hasattr(self.module, "mrope_section") else positions[0]
        return self.module(x, position_ids=positions, **({} if kind is None else {"layer_type": kind}))

    def tables(self, given: Any, positions: Tensor, kind: str | None) -> tuple[Tensor, ...] | None:
        """Cosines and sines, [T, R], and the factor, [T, 1], where there is one. given: what the model gives its layers."""
        if given is None:
            return None
        cos, sin = (angles[0] for angles in ((given.real, given.imag) if isinstance(given, Tensor) else given))
        if (stride := self._strides[kind]) is not None:
            cos, sin = (torch.cat((angles, angles), dim=-1) for angles in (cos[..., ::stride], sin[..., ::stride]))
        if self._backwards:
            sin = -sin
        if self._factor is None:
            return cos, sin
        offset, step, scale = self._factor
        places = positions.view(-1, positions.shape[-1], 1)[0]
        steps = torch.floor((places.float() + offset) / step)
        return cos, sin, torch.log1p(steps) * scale + 1.0

    def at(self, x: Tensor, positions: Tensor, kind: str | None) -> tuple[Tensor, ...] | None:
        """``tables`` of positions. A model without rotary embeddings has none."""
        return self.tables(self.given(x, positions, kind), positions, kind)


def _without(shell: ModelShell) -> set[int]:
    """Layers that get no rotary embeddings though others do (Lara): found by running two tokens."""
    found = set[int]()

    def note(layer: nn.Module, _: Any, given: dict[str, Any]) -> None:
        if given.get("position_embeddings", found) is None:
            modules: list[Any] = [module for module in layer.modules() if hasattr(module, "layer_idx")]
            found.update(module.layer_idx for module in modules)

    lists = [module for module in shell.text.modules() if isinstance(module, nn.ModuleList)]
    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layers in lists for layer in layers]
    positions = torch.arange(2, device=shell.device)
    try:
        shell.hidden(torch.zeros_like(positions), positions, Recorder(shell.same_keys))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _turns_backwards(text: Any) -> bool:
    """Whether a model's own code rotates the other way (NanoChat)."""
    rotate = getattr(sys.modules.get(type(text).__module__), "rotate_half", None)
    return rotate is not None and rotate(torch.tensor([1.0, 2.0], device="cpu")).tolist() == [2.0, -1.0]


def _factor_of(config: Any) -> tuple[int, float, float] | None:
    """For attention with a temperature: (what is added to a position, positions in a step, what the factor gains by a step)."""
    if getattr(config, "attn_temperature_tuning", False):  # Llama 4
        return 1, config.floor_scale, config.attn_scale
    rope = getattr(config, "rope_parameters", None) or {}
    if (scale := rope.get("llama_4_scaling_beta")) is not None:  # Ministral 3
        return 0, rope["original_max_position_embeddings"], scale
    return None


def _stride(given: Any) -> int | None:
    """At every how many numbers each angle comes once; None where all angles come, and then all again."""
    if given is None:
        return None
    cos, sin = (given.real, given.imag) if isinstance(given, Tensor) else given
    if cos.shape[-1] % 2 or isinstance(given, Tensor):
        return 1
    if all(torch.equal(*angles.chunk(2, dim=-1)) for angles in (cos, sin)):
        return None
    return 2 if all(torch.equal(angles[..., ::2], angles[..., 1::2]) for angles in (cos, sin)) else 1
