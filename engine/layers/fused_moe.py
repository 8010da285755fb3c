"""Mixtures of experts in few operations: one for the router, and the experts', which also adds what else is to be added.

A block is taken over where it has known parts only: experts that run on the engine's operation, a router's weight and biases,
and maybe an MLP that all tokens go through, with a gate. How the router chooses is found by trying, and the whole is compared
with the block's own forward. Any other block runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stoker.engine.adapters.lora import LoraLayers
from stoker.engine.layers.experts import is_taken_over, run_experts
from stoker.engine.layers.layer_structure import Branch
from stoker.engine.layers.moe_structure import MoeParts, RouterAndExperts, blocks_of, parts_of, tensors_of
from stoker.engine.layers.probe import POSITIONS, TOLERANCE
from stoker.engine.layers.router_probe import RouterRule, biases_of, router_rule_of
from stoker.kernels.ops import Ops
from stoker.kernels.reference.norm_rotary import Norm

_STATE = "stoker_mixture"  # of a block that was taken over


def shared_mlps(model: nn.Module) -> Iterator[tuple[str, nn.Module, Branch]]:
    """(path, block, the MLP in it that every token goes through) of each mixture. Works on the meta device too."""
    for path, block in model.named_modules():
        parts = parts_of(block)
        if parts is not None and parts.shared is not None:
            yield path, block, parts.shared


class FusedMoe:
    """Stands in for the forward of a mixture of experts. Refers to its tensors and owns none but a number."""

    def __init__(self, block: Any, parts: MoeParts, rule: RouterRule, shared: Any, ops: Ops, lora: LoraLayers) -> None:
        """shared: what to run for the MLP of all tokens, if there is one."""
        self.choice, self.ops, self.lora = rule.choice, ops, lora
        self.original: Callable[..., Any] = block.forward
        self.experts = block.get_submodule(parts.experts)
        tensors = tensors_of(block)
        self.weight = tensors[parts.weight]
        self.biases = biases_of(tensors, rule.names)
        self.norm: Norm | None = None
        self.factor: Tensor | None = None
        if (entry := rule.entry) is not None and parts.scale is not None:
            self.norm = Norm(tensors[parts.scale], entry.eps)
            self.factor = self.norm.weight.new_tensor([entry.factor], dtype=torch.float32)
        self.shared = shared
        self.shared_module = None if parts.shared is None else block.get_submodule(parts.shared.path)
        self.shared_gate = None if parts.shared_gate is None else block.get_submodule(parts.shared_gate)
        beside = {m for part in (self.shared_module, self.shared_gate) if part is not None for m in part.modules()}
        self.modules = [module for module in block.modules() if module not in beside]
        self.returns_weights = self.returns_rows = False

    @property
    def applies(self) -> bool:
        """Whether it can run in this step: no adapter is over the router, or replaces one of the modules."""
        return self.lora.rows is None or not _hooked(self.modules)

    def __call__(self, x: Tensor, given: Tensor | None = None, **add: Any) -> tuple[Tensor, Tensor]:
        """x: [T, D]; given: the experts' input, where it is not ``x``; add: ``residual`` and what belongs to it, as for
        ``Ops.experts``. Returns [T, D] and the weights, [T, K]."""
        adapted, shared, shared_gate = self.lora.rows is not None, None, None
        if (module := self.shared_module) is not None:
            shared = module(x) if adapted and _hooked(module.modules()) else self.shared(x)
        if (gate := self.shared_gate) is not None:
            if adapted and _hooked([gate]):
                shared = gate(x).sigmoid() * shared
            else:
                shared_gate = gate.weight
        read = x if self.norm is None else self.ops.rms_norm(x, *self.norm, scale=self.factor)
        ids, weights, groups = self.ops.route(read, self.weight, *self.biases, self.choice)
        options = {"groups": groups, "shared": shared, "shared_gate": shared_gate} | add
        return run_experts(self.experts, x if given is None else given, ids, weights, **options), weights

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """As the block's own. hidden_states: [1, T, D]."""
        if args or options or not self.applies:
            return self.original(hidden_states, *args, **options)
        out, weights = self(hidden_states.reshape(-1, hidden_states.shape[-1]))
        out = out if self.returns_rows else out.view(hidden_states.shape)
        return (out, weights) if self.returns_weights else out


def _hooked(modules: Any) -> bool:
    return any(module._forward_hooks for module in modules)


def is_mixture(module: Any) -> bool:
    """Whether a block was taken over."""
    return hasattr(module, _STATE)


def mixture_of(module: Any) -> FusedMoe | None:
    """The ``FusedMoe`` of a block; None where it was not taken over, or cannot run with the adapters of this step."""
    mixture: FusedMoe | None = getattr(module, _STATE, None)
    return mixture if mixture is not None and mixture.applies else None


def take_over_mixtures(model: nn.Module, ops: Ops, lora: LoraLayers, shared: Callable[[str, Any, Branch], Any]) -> None:
    """Replace the forward of each block that a ``FusedMoe`` agrees with.

    A router and experts that are no block of their own have no forward to replace: the fused layer finds the ``FusedMoe`` on
    the experts, by ``mixture_of``. shared: given a block's path, the block, and the branch in it that is the MLP of all tokens,
    makes what to run for that; None where the MLP does something else, too.
    """
    likely: RouterRule | None = None
    strange: set[type] = set()
    for path, block, parts in blocks_of(model):
        experts: Any = block.get_submodule(parts.experts)
        if type(block) in strange or not is_taken_over(experts):
            continue
        rule = router_rule_of(block, parts, likely)
        if rule is None:
            strange.add(type(block))
            continue
        likely = rule
        run = None if parts.shared is None else shared(path, block, parts.shared)
        if parts.shared is not None and run is None:
            continue
        mixture = FusedMoe(block, parts, rule, run, ops, lora)
        if _agrees(mixture):
            if isinstance(block, RouterAndExperts):
                setattr(experts, _STATE, mixture)
            else:
                setattr(block, _STATE, mixture)
                block.forward = mixture.forward


def _agrees(mixture: FusedMoe) -> bool:
    """Whether it gives the block's numbers on a few random tokens.

    Notes in which shape the block returns them, and whether the router's weights come with them.
    """
    generator, like = torch.Generator().manual_seed(0), mixture.weight
    x = torch.randn(POSITIONS.numel(), like.shape[1], generator=generator, device="cpu").to(like)
    x = x.to(mixture.experts.down_proj.dtype)
    try:
        returned = mixture.original(x[None])
        actual, _ = mixture(x)
    except RuntimeError:  # sizes that do not go together, or with the operation
        return False
    expected, *besides = returned if isinstance(returned, tuple) else (returned,)
    if len(besides) > 1 or not all(isinstance(part, Tensor) for part in (expected, *besides)):
        return False
    if expected.shape not in (x.shape, x[None].shape) or any(part.shape[:1] != x.shape[:1] for part in besides):
        return False
    mixture.returns_weights, mixture.returns_rows = bool(besides), expected.shape == x.shape
    errors = (actual.float() - expected.view(x.shape).float()).abs().amax(-1)
    # One rounding may give a token other experts.
    return bool(errors.median() <= TOLERANCE.get(x.dtype, 0.0) * expected.float().abs().max())
