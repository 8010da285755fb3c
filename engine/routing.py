"""Mixtures of experts on few operations: the router as one, and what is added to the experts' sum as part of theirs.

A block is taken over where its parts are known ones: experts that run on the engine's operation, the weight of a router
with what biases it has, and maybe an MLP that every token goes through, with a gate. How its router chooses is found by
logits that tell the ways apart, and the whole is compared with the block's own forward. Any other block runs as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stoker.engine.experts import is_taken_over, run_experts
from stoker.engine.layer_structure import Branch, mlp_of
from stoker.engine.lora import LoraLayers
from stoker.engine.probe import POSITIONS, TOLERANCE
from stoker.kernels.ops import Ops
from stoker.kernels.reference.routing import Choice, route

_STATE = "stoker_mixture"  # of a block that was taken over
_EPSILONS = (1e-20, 1e-6)  # that sums of weights are kept off zero by
_ROWS = 12  # of each kind of logits
_CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1.6e-2}  # relative, of weights


@dataclass(frozen=True, slots=True)
class _Parts:
    """Of a block, by name."""

    experts: str
    weight: str  # of the router
    biases: tuple[str, ...]  # of its logits or of what it ranks
    shared: Branch | None
    shared_gate: str | None


def _parts_of(block: nn.Module) -> _Parts | None:
    """The parts, where there are no others. It holds on the meta device too."""
    found = [name for name, module in block.named_children() if hasattr(type(module), "_apply_gate")]
    if len(found) != 1 or not hasattr(block.get_submodule(found[0]), "gate_up_proj"):
        return None
    experts: Any = block.get_submodule(found[0])
    count = experts.gate_up_proj.shape[0]
    gates = [n for n, m in block.named_children() if type(m) is nn.Linear and m.out_features == 1 and m.bias is None]
    branches = [mlp_of(block, name) for name, _ in block.named_children() if name not in (*found, *gates)]
    shared = [branch for branch in branches if branch.act is not None and branch.gate_scale == branch.scale == 1.0]
    known = (*found, *gates, *(branch.path for branch in shared))
    rest = {n: t for n, t in _tensors(block).items() if not n.startswith(tuple(f"{path}." for path in known))}
    weights = [name for name, tensor in rest.items() if tensor.dim() == 2]
    biases = [name for name, tensor in rest.items() if tensor.shape == (count,)]
    if (
        len(weights) != 1
        or len(biases) > 2
        or len(rest) > 1 + len(biases)
        or len(shared) > 1
        or len(gates) > len(shared)
    ):
        return None
    depth = rest[weights[0]].shape[1]
    if rest[weights[0]].shape[0] != count or depth < count:
        return None
    return _Parts(found[0], weights[0], tuple(biases), next(iter(shared), None), next(iter(gates), None))


def _tensors(block: nn.Module) -> dict[str, Tensor]:
    return {**dict(block.named_parameters()), **dict(block.named_buffers())}


def shared_mlps(model: nn.Module) -> Iterator[tuple[str, nn.Module, Branch]]:
    """Path, block and the MLP in it that every token goes through. It holds on the meta device too."""
    for path, block in model.named_modules():
        parts = _parts_of(block)
        if parts is not None and parts.shared is not None:
            yield path, block, parts.shared


class Mixture:
    """Stands in for the forward of a block. Refers to its tensors and owns none."""

    def __init__(
        self,
        block: Any,
        parts: _Parts,
        choice: Choice,
        biases: Sequence[Tensor | None],
        shared: Any,
        ops: Ops,
        lora: LoraLayers,
    ) -> None:
        """biases: of the logits, and of what is ranked; shared: what to run for the MLP of all tokens, if there is one."""
        self.choice, self.ops, self.lora = choice, ops, lora
        self.original: Callable[..., Any] = block.forward
        self.experts = block.get_submodule(parts.experts)
        self.router = _tensors(block)[parts.weight], *biases
        self.shared = shared
        self.shared_module = None if parts.shared is None else block.get_submodule(parts.shared.path)
        self.shared_gate = None if parts.shared_gate is None else block.get_submodule(parts.shared_gate)
        beside = {m for part in (self.shared_module, self.shared_gate) if part is not None for m in part.modules()}
        self.modules = [module for module in block.modules() if module not in beside]
        self.returns_weights = False

    @property
    def applies(self) -> bool:
        """Whether no adapter of this step is over the router, or any of the modules as a whole."""
        return self.lora.rows is None or not _hooked(self.modules)

    def __call__(self, x: Tensor, **add: Any) -> tuple[Tensor, Tensor]:
        """x: [T, D]; add: ``residual`` and what belongs to it, as of ``Ops.experts``. Returns [T, D], and weights: [T, K]."""
        adapted, shared, shared_gate = self.lora.rows is not None, None, None
        if (module := self.shared_module) is not None:
            shared = module(x) if adapted and _hooked(module.modules()) else self.shared(x)
        if (gate := self.shared_gate) is not None:
            if adapted and _hooked([gate]):
                shared = gate(x).sigmoid() * shared
            else:
                shared_gate = gate.weight
        ids, weights, groups = self.ops.route(x, *self.router, self.choice)
        out = run_experts(self.experts, x, ids, weights, groups=groups, shared=shared, shared_gate=shared_gate, **add)
        return out, weights

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """As the block's own. hidden_states: [1, T, D]."""
        if args or options or not self.applies:
            return self.original(hidden_states, *args, **options)
        out, weights = self(hidden_states.reshape(-1, hidden_states.shape[-1]))
        out = out.view(hidden_states.shape)
        return (out, weights) if self.returns_weights else out


def _hooked(modules: Any) -> bool:
    return any(module._forward_hooks for module in modules)


def is_mixture(module: Any) -> bool:
    """Whether a block was taken over."""
    return hasattr(module, _STATE)


def mixture_of(module: Any) -> Mixture | None:
    """What a block runs as, where it was taken over and nothing of the step that runs is against it."""
    mixture: Mixture | None = getattr(module, _STATE, None)
    return mixture if mixture is not None and mixture.applies else None


def take_over_mixtures(model: nn.Module, ops: Ops, lora: LoraLayers, shared: Callable[[str, Any, Branch], Any]) -> int:
    """Replace the forward of the blocks whose numbers are found again. Returns how many were.

    shared: makes what to run for the MLP of all tokens, of the block's path, the block and the branch in it.
    """
    count, likely = 0, None
    strange: set[type] = set()
    for path, block in list(model.named_modules()):
        parts = None if type(block) in strange else _parts_of(block)
        if parts is None or not is_taken_over(block.get_submodule(parts.experts)):
            continue
        found = _choice_of(block, parts, likely)
        if found is None:
            strange.add(type(block))
            continue
        likely, names = found
        tensors = _tensors(block)
        biases = [None if name is None else tensors[name] for name in names]
        run = None if parts.shared is None else shared(path, block, parts.shared)
        mixture = Mixture(block, parts, likely, biases, run, ops, lora)
        if _agrees(mixture, tensors[parts.weight]):
            setattr(block, _STATE, mixture)
            block.forward = mixture.forward
            count += 1
    return count


def _agrees(mixture: Mixture, like: Tensor) -> bool:
    """On a few random tokens; and note what the block returns besides."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(POSITIONS.numel(), like.shape[1], generator=generator, device="cpu").to(like)
    x = x.to(mixture.experts.gate_up_proj.dtype)
    returned = mixture.original(x[None])
    expected, *besides = returned if isinstance(returned, tuple) else (returned,)
    actual, weights = mixture(x)
    if expected.shape != x[None].shape or len(besides) > 1 or any(t.shape != weights.shape for t in besides):
        return False
    mixture.returns_weights = bool(besides)
    errors = (actual.float() - expected[0].float()).abs().amax(-1)
    # One rounding may give a token other experts.
    return bool(errors.median() <= TOLERANCE.get(x.dtype, 0.0) * expected.float().abs().max())


_Router = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # what ``route`` takes
_Names = tuple[str | None, str | None]  # of the tensors that are the biases of the logits, and of what is ranked


def _choice_of(block: nn.Module, parts: _Parts, likely: Choice | None) -> tuple[Choice, _Names] | None:
    """How the router chooses, and by what biases. likely: what is tried first."""
    probes = list(_probes(block, parts))
    try:
        seen = [_seen(block, parts, *probe) for probe in probes]
    except Exception:  # of any kind: it wants more than hidden states
        return None
    ids, weights = seen[0]
    x, given = probes[0]
    if weights.dtype not in (x.dtype, torch.float32):
        return None
    first = Choice(per_token=ids.shape[1], score="softmax", wide_weights=weights.dtype != x.dtype)
    ways = itertools.chain([] if likely is None else [likely], _ways(block, first, len(given[parts.weight])))
    names = list(itertools.permutations([*parts.biases, *[None] * (2 - len(parts.biases))]))
    for way, (bias, correction) in itertools.product(ways, dict.fromkeys(names)):
        if (way.per_token, way.wide_weights) != (first.per_token, first.wide_weights):
            continue
        routers = [(x, g[parts.weight], g.get(bias or ""), g.get(correction or "")) for x, g in probes]
        if all(_same(router, way, found) for router, found in zip(routers, seen, strict=True)):
            return way, (bias, correction)
    return None


def _ways(block: nn.Module, first: Choice, count: int) -> Iterator[Choice]:
    """How a router may choose, what most do first. Scales of weights, and how many groups of experts there are and are taken,
    are numbers that modules of the block have as attributes."""
    numbers = {value for module in block.modules() for value in vars(module).values() if type(value) in (int, float)}
    whole = sorted(n for n in numbers if isinstance(n, int) and 0 < n < count and count % n == 0)
    groups = [(1, 1, 1)]
    groups += [(g, k, n) for g in whole for k in whole if g > k for n in (1, 2) if n <= count // g]
    scales = [1.0, *sorted(n for n in numbers if isinstance(n, float) and n > 0 and n != 1.0)]
    kinds: list[dict[str, Any]] = [{"score": "softmax", "normalise": True}, {"score": "softmax"}, {"score": "chosen"}]
    kinds += [{"score": "sigmoid"}, *({"score": "sigmoid", "normalise": True, "eps": eps} for eps in _EPSILONS)]
    for (g, kept, best), scale, wide, kind in itertools.product(groups, scales, (False, True), kinds):
        if kept * count // g >= first.per_token:
            yield replace(first, scale=scale, wide=wide, groups=g, kept_groups=kept, best_of_group=best, **kind)


def _probes(block: nn.Module, parts: _Parts) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
    """Hidden states and tensors of the router with which its logits are known numbers."""
    tensors = _tensors(block)
    weight = tensors[parts.weight]
    count = weight.shape[0]
    generator = torch.Generator().manual_seed(0)

    def shuffled() -> Tensor:
        return torch.stack([torch.randperm(count, generator=generator, device="cpu") for _ in range(_ROWS)]).float()

    step = 8.0 / 2 ** (count - 1).bit_length()  # a number of bf16 each
    near, low, far = step * shuffled() - 4.0, step * shuffled() - 20.0, -128.0 - shuffled()
    # Low: scores near zero, with which an epsilon shows. Far: probabilities that are zero, of logits that differ.
    logits = torch.cat([near, low, far.where(far < -128.0, 0.0)])
    biases = {name: shuffled()[0] / count - 0.5 for name in parts.biases}
    # A product with other factors than one has more digits than half precision: whether it is rounded shows.
    of_others = 1 + torch.randint(128, (count,), generator=generator, device="cpu") / 128
    for factors in (torch.ones(count, device="cpu"), of_others):
        rows = logits.new_zeros(len(logits), weight.shape[1])
        rows[:, :count] = logits
        matrix = logits.new_zeros(weight.shape)
        matrix[:, :count] = factors.diag()
        values = biases | {parts.weight: matrix}
        yield (
            rows.to(device=weight.device, dtype=block.get_submodule(parts.experts).gate_up_proj.dtype),  # type: ignore[arg-type]
            {name: value.to(tensors[name]) for name, value in values.items()},
        )


def _seen(block: nn.Module, parts: _Parts, x: Tensor, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Expert ids and weights, [T, K] each, that a block makes of ``x`` with other tensors for its router."""
    seen: list[tuple[Tensor, Tensor]] = []

    def note(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        seen.append((top_k_index, top_k_weights))
        return torch.zeros_like(hidden_states)

    with ExitStack() as stack:
        stack.enter_context(_instead(block.get_submodule(parts.experts), note))
        if parts.shared is not None:
            stack.enter_context(_instead(block.get_submodule(parts.shared.path), torch.zeros_like))
        functional_call(block, dict(given), (x[None],))
    ((ids, weights),) = seen
    return ids.view(len(x), -1), weights.view(len(x), -1)


@contextmanager
def _instead(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Within, what runs as the forward of a module."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _same(router: _Router, way: Choice, theirs: tuple[Tensor, Tensor]) -> bool:
    """Whether a way of choosing gives the same experts with the same weights, in any order. theirs: ids and weights, [T, K]."""
    try:
        mine = route(*router, way)
    except RuntimeError:  # dtypes that only go together where all is fp32
        return False
    (ids, places), (other, others) = (t[0].sort(dim=1) for t in (mine, theirs))
    if ids.shape != other.shape or mine.weights.dtype != theirs[1].dtype or not torch.equal(ids, other):
        return False
    weights, expected = mine.weights.gather(1, places).float(), theirs[1].gather(1, others).float()
    return torch.allclose(weights, expected, rtol=_CLOSE.get(theirs[1].dtype, 0.0), atol=0.0, equal_nan=True)
