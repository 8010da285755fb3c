"""The parts of a mixture of experts: of a block, or of a router and experts that a layer has beside other modules (Gemma 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stoker.engine.layers.experts import are_experts
from stoker.engine.layers.layer_structure import Branch, mlp_of


@dataclass(frozen=True, slots=True)
class MoeParts:
    """The parts of a mixture of experts, by name."""

    experts: str
    weight: str  # of the router
    scale: str | None  # that its input is multiplied by, after a norm
    biases: tuple[str, ...]  # of its logits or of what it ranks, or what its weights are multiplied by
    shared: Branch | None
    shared_gate: str | None


def parts_of(block: nn.Module) -> MoeParts | None:
    """The parts of a block; None where it is no mixture, or has other parts too. Works on the meta device too."""
    found = [name for name, module in block.named_children() if are_experts(module)]
    if len(found) != 1:
        return None
    experts: Any = block.get_submodule(found[0])
    count = experts.down_proj.shape[0]
    gates = [n for n, m in block.named_children() if type(m) is nn.Linear and m.out_features == 1 and m.bias is None]
    branches = [mlp_of(block, name) for name, _ in block.named_children() if name not in (*found, *gates)]
    shared = [branch for branch in branches if branch.inputs and branch.gate_scale == branch.scale == 1.0]
    known = (*found, *gates, *(branch.path for branch in shared))
    rest = {n: t for n, t in tensors_of(block).items() if not n.startswith(tuple(f"{path}." for path in known))}
    weights = [name for name, tensor in rest.items() if tensor.dim() == 2 and len(tensor) > 1]
    biases = [name for name, tensor in rest.items() if tensor.shape[-1:].numel() == tensor.numel() == count]
    if len(weights) != 1 or len(biases) > 3 or len(shared) > 1 or len(gates) > len(shared):
        return None
    depth = rest[weights[0]].shape[1]
    scales = [name for name, tensor in rest.items() if tensor.shape == (depth,)]
    if (
        rest[weights[0]].shape[0] != count
        or depth <= count
        or depth not in experts.down_proj.shape[1:]
        or len(scales) > 1
        or len(rest) > 1 + len(biases) + len(scales)
    ):
        return None
    scale, gate = (next(iter(names), None) for names in (scales, gates))
    return MoeParts(found[0], weights[0], scale, tuple(biases), next(iter(shared), None), gate)


def tensors_of(block: nn.Module) -> dict[str, Tensor]:
    return {**dict(block.named_parameters()), **dict(block.named_buffers())}


class RouterAndExperts(nn.Module):
    """A layer's router and experts, as one block."""

    def __init__(self, router: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = router, experts

    def forward(self, hidden_states: Tensor) -> Any:
        """hidden_states: [1, T, D]; returns [T, D]."""
        _, weights, ids = self.router(hidden_states[0])
        return self.experts(hidden_states[0], ids, weights)


def blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, MoeParts]]:
    """(path, block, its parts) of each mixture in a model. The path of a pair is that of its experts."""
    for path, module in list(model.named_modules()):
        if (parts := parts_of(module)) is not None:
            yield path, module, parts
            continue
        for name, experts in module.named_children():
            if are_experts(experts):
                pairs = [RouterAndExperts(router, experts) for router in module.children() if router is not experts]
                found = [(pair, parts) for pair in pairs if (parts := parts_of(pair)) is not None]
                yield from ((f"{path}.{name}", *pair) for pair in found if len(found) == 1)
