"""Runs the experts of mixture-of-experts layers on the engine's own operation, through transformers' ``ExpertsInterface``.

A module is taken over only where the operation knows the activation between its projections, which is tried out on a few
numbers. Others run by transformers' default, which does not wait for the device either.

Some experts do not use that interface, as Llama 4's: each runs over every token, most of which the router has set to zero. They
run on the operation where their whole block does (``fused_moe``); elsewhere they run their own code, until they get an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from stoker.engine.layers.probe import FAR, has_tensors
from stoker.kernels.ops import Ops
from stoker.kernels.reference.adapter_weights import LoraWeights
from stoker.kernels.reference.lora import AdapterRows, LoraTable, expert_slots
from stoker.kernels.reference.moe import ExpertAdapters, Gate
from stoker.kernels.reference.norm_rotary import ACTIVATIONS

EXPERTS = "stoker_experts"
_DEFAULT = "grouped_mm"
_STATE = "stoker_experts"  # of a module that was taken over
_GATES = tuple(Gate(act=act) for act in ACTIVATIONS)
_BIAS = "_bias"  # ends the names that transformers gives to biases of projections


@dataclass(slots=True)
class _State:
    ops: Ops
    gate: Gate
    dense: bool = False  # every expert runs over every token, times its weight
    adapters: Callable[[], ExpertAdapters | None] = lambda: None  # of the step that runs
    # What is used in place of the module's own, by name: the two projections, in order, each with its scales if it is in fp8; and
    # their biases.
    replaced: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    biases: dict[str, Tensor | None] = field(default_factory=dict)


def _experts_interface(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Called by transformers. hidden_states: [T, D]; top_k_index, top_k_weights: [T, K]; returns [T, D]."""
    if not is_taken_over(module):
        return ALL_EXPERTS_FUNCTIONS[_DEFAULT](module, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
    return run_experts(module, hidden_states, top_k_index, top_k_weights)


def is_taken_over(module: Any) -> bool:
    """Whether experts may run on the engine's operation."""
    return hasattr(module, _STATE)


@contextmanager
def run_on(modules: Iterable[Any], ops: Ops) -> Iterator[None]:
    """Context manager: experts that were taken over, among these modules, run on other operations."""
    states: list[_State] = [getattr(module, _STATE) for module in modules if is_taken_over(module)]
    before = [state.ops for state in states]
    for state in states:
        state.ops = ops
    try:
        yield
    finally:
        for state, own in zip(states, before, strict=True):
            state.ops = own


def run_experts(module: Any, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, **options: Any) -> Tensor:
    """``Ops.experts`` with the parameters and the adapters of a module that was taken over. options: of the operation."""
    state: _State = getattr(module, _STATE)
    if state.replaced:
        (gate_up, down), scales = zip(*state.replaced.values(), strict=True)
        options["scales"] = None if scales[0] is None else scales
    else:
        gate_up, down = _matrices(module).values()
    own = biases_of(module)
    biases = [state.biases.get(name, own.get(name)) for name in _projections(module)]
    options |= {"gate": state.gate, "weigh_input": state.dense, "adapters": state.adapters()}
    return state.ops.experts(x, expert_ids, expert_weights, gate_up, down, *biases, **options)


def _matrices(module: Any) -> dict[str, Tensor]:
    """The two projections of experts that were taken over, by name: [E, N, D], with any strides."""
    weights = {name: getattr(module, name) for name in _projections(module)}
    return {name: weight.transpose(1, 2) for name, weight in weights.items()} if _is_transposed(module) else weights


def matrices(module: nn.Module, *, in_mixture: bool = False) -> dict[str, Tensor]:
    """The weights that only ``run_experts`` reads; none of other modules. in_mixture: whether a ``FusedMoe`` runs the experts,
    without which those that get every token run their own code."""
    return _matrices(module) if is_taken_over(module) and (in_mixture or not _is_dense(module)) else {}


def may_be_replaced(module: nn.Module, *, in_mixture: bool = False) -> tuple[str, ...]:
    """Names of what ``matrices`` may become once experts are taken over. Works on the meta device too."""
    return _projections(module) if are_experts(module) and (in_mixture or knows_interface(module)) else ()


def biases_of(module: Any) -> dict[str, Tensor]:
    """The biases of the projections of experts that were taken over, [E, N], by the projection's name, if they have any."""
    return {name: getattr(module, name + _BIAS) for name in _projections(module)} if _has_bias(module) else {}


def activation_of(module: Any) -> Gate:
    """The activation of experts that were taken over."""
    state: _State = getattr(module, _STATE)
    return state.gate


def multiply_by(module: Any, name: str, weight: Tensor, scales: Tensor | None = None) -> None:
    """Let experts use a weight, [E, N, D], in place of the one in their ``matrices``. scales: [E, N], if it is in fp8.

    To be called for both projections before the experts run.
    """
    getattr(module, _STATE).replaced[name] = weight, scales


def add_biases(module: Any, biases: Mapping[str, Tensor | None]) -> None:
    """Let experts add other biases than their own, by the projection's name; None: none."""
    getattr(module, _STATE).biases.update(biases)


def _dense_experts(module: Any, hidden_states: Tensor) -> Tensor:
    """The module's own forward, with adapters. hidden_states: [E * T, D], all tokens for each expert; returns the same shape."""
    state: _State = getattr(module, _STATE)
    adapters, experts = state.adapters(), module.num_experts
    x = hidden_states.view(experts, -1, hidden_states.shape[-1])

    def project(x: Tensor, weight: Tensor, tables: Sequence[LoraTable]) -> Tensor:
        out = torch.bmm(x, weight)
        for table in tables:
            state.ops.lora(x.flatten(0, 1), out.flatten(0, 1), table, rows)
        return out

    gate_up_tables: Sequence[LoraTable] = ()
    down_tables: Sequence[LoraTable] = ()
    if adapters is not None:
        gate_up_tables, down_tables = adapters.gate_up, adapters.down
        ids = torch.arange(experts, device=x.device).repeat_interleave(x.shape[1])
        rows = AdapterRows(expert_slots(adapters.slots.repeat(experts), ids, experts))
    hidden = state.gate(project(x, module.gate_up_proj, gate_up_tables))
    return project(hidden, module.down_proj, down_tables).flatten(0, 1)


ExpertsInterface.register(EXPERTS, _experts_interface)


def take_over_experts(model: nn.Module, ops: Ops) -> None:
    """Let the experts of a model run on ``ops``, as far as their activation is a known one."""
    for module in filter(are_experts, model.modules()):
        dense = not knows_interface(module)
        gate = _gate_of_dense(module) if dense else _gate_of(module)
        if gate is not None:
            setattr(module, _STATE, _State(ops, gate, dense))


def knows_interface(module: nn.Module) -> bool:
    """Whether experts run what transformers' ``ExpertsInterface`` says. Some have all that takes, and do not (Step 3.7's)."""
    return hasattr(module, "has_gate")


def are_experts(module: nn.Module) -> bool:
    """Whether a module has the two projections of experts. Works on the meta device too."""
    return all(getattr(module._parameters.get(name), "ndim", 0) == 3 for name in _projections(module))


def repeats_tokens(module: nn.Module) -> bool:
    """Whether a module is experts that each get all tokens (Llama 4's)."""
    return are_experts(module) and not knows_interface(module) and not hasattr(type(module), "_apply_gate")


def expert_tables(module: Any) -> dict[str, tuple[int, int, int]]:
    """(experts, outputs, inputs) of each projection by name, of experts that were taken over; empty for any other module."""
    if not is_taken_over(module):
        return {}
    shapes = {name: getattr(module, name).shape for name in _projections(module)}
    return {n: (s[0], s[2], s[1]) if _is_transposed(module) else tuple(s) for n, s in shapes.items()}


def bias_tables(module: Any) -> dict[str, tuple[int, int]]:
    """(experts, outputs) of the biases of each projection of ``expert_tables``, by name."""
    return {f"{name}{_BIAS}": shape[:2] for name, shape in expert_tables(module).items() if _has_bias(module)}


def projection_of(key: str) -> str:
    """The parameter of experts that an adapter is over, or whose biases it is over."""
    return key.removesuffix(_BIAS)


def as_run(module: nn.Module, weights: LoraWeights) -> LoraWeights:
    """An adapter of experts as it runs: for dense ones PEFT has A and B swapped."""
    return weights._replace(a=weights.b.mT, b=weights.a.mT) if _is_dense(module) else weights


def with_biases(module: nn.Module, key: str, adapters: Mapping[str, LoraWeights]) -> LoraWeights:
    """What adapters do to a projection of experts and to its biases. key: the projection's; adapters: by parameter."""
    if (weights := adapters.get(key)) is not None:
        weights = as_run(module, weights)
    biases = adapters.get(f"{key}{_BIAS}")
    if biases is None:
        assert weights is not None
        return weights
    if weights is None:
        experts, outputs, inputs = expert_tables(module)[key.rpartition(".")[2]]
        weights = LoraWeights(biases.a.new_empty(experts, 0, inputs), biases.a.new_empty(experts, outputs, 0), 1.0)
    return weights._replace(shift=biases.scale * (biases.b.float() @ biases.a.float()))


def adapt_experts(module: Any, adapters: Callable[[], ExpertAdapters | None]) -> None:
    """Let experts that were taken over have adapters."""
    getattr(module, _STATE).adapters = adapters
    if _is_dense(module):
        module.forward = partial(_dense_experts, module)


def _projections(module: nn.Module) -> tuple[str, str]:
    """The names of the parameters that are the two projections."""
    return "gate_up_proj" if "gate_up_proj" in module._parameters else "up_proj", "down_proj"


def _is_dense(module: Any) -> bool:
    """Whether experts that were taken over each run over every token (Llama 4's)."""
    state: _State = getattr(module, _STATE)
    return state.dense


def _is_transposed(module: Any) -> bool:
    return _is_dense(module) or module.is_transposed


def _has_bias(module: Any) -> bool:
    return getattr(module, "has_bias", False)


def _gate_of_dense(module: Any) -> Gate | None:
    """The activation of experts over [E * T, D], with projections [E, D, 2 * I] and [E, I, D]; None where they do something else."""
    if set(module.state_dict()) != {"gate_up_proj", "down_proj"}:
        return None
    depth, generator = module.down_proj.shape[2], torch.Generator().manual_seed(0)
    sizes = (2, 3, depth), (2, depth, 16), (2, 8, depth)
    x, gate_up, down = (torch.randn(size, generator=generator, device="cpu") for size in sizes)
    gate_up *= depth**-0.5
    x[:, -1] *= FAR
    try:
        found = functional_call(module, {"gate_up_proj": gate_up, "down_proj": down}, (x.flatten(0, 1),))
    except Exception:  # of any kind: it wants something else
        return None
    for gate in _GATES:
        expected = torch.bmm(gate(torch.bmm(x, gate_up)), down).flatten(0, 1)
        if found.shape == expected.shape:
            off, most = ((t.abs().amax(-1)) for t in (found - expected, expected))
            if bool((off <= 1e-4 * most + 1e-4).all()):
                return gate
    return None


def _gate_of(module: Any) -> Gate | None:
    """The activation of an experts module, or None where it is not one the operation knows."""
    if getattr(module, "has_post_expert_norm", False) or has_tensors(getattr(module, "act_fn", None)):
        return None
    known = [*_GATES] if module.has_gate else [Gate(gated=False)]
    if hasattr(module, "alpha") and hasattr(module, "limit"):
        known.append(Gate(interleaved=True, alpha=module.alpha, limit=module.limit, offset=1.0))
    # Numbers of both signs and beyond any limit, in both places: the gate may be the first half or every other number.
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(128, generator=generator, device="cpu").view(2, 64)
    near, far = torch.linspace(-12, 12, 128, device="cpu"), torch.linspace(-FAR, FAR, 128, device="cpu")
    probe = torch.cat((near[order], far[order]))
    expected = module._apply_gate(probe) if module.has_gate else module.act_fn(probe)
    for gate in known:
        actual = gate(probe)
        if actual.shape == expected.shape and torch.allclose(actual, expected, rtol=1e-5, atol=1e-6):
            return gate
    return None
