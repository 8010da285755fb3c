"""Finds out how a router chooses experts, with logits on which all known ways differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stoker.engine.layers.layer_structure import norm_of
from stoker.engine.layers.moe_structure import MoeParts, tensors_of
from stoker.kernels.reference.routing import Choice, route

_EPSILONS = (1e-20, 1e-6)  # that may be added to sums of weights
_SMALL = 1e-3  # a smaller number may be the least that such a sum is taken for
_ROWS = 12  # of each kind of logits
_CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1.6e-2}  # relative, of weights
_Names = tuple[str | None, str | None, str | None]
# The arguments of ``route``, without the choice.
_Router = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


class RouterInput(NamedTuple):
    """What a router does to its input first: a norm without weights, then a product with ``MoeParts.scale`` and a factor."""

    norm: str  # by its path
    eps: float
    factor: float


class RouterRule(NamedTuple):
    """How a router chooses. names: of the tensors with biases of its logits, biases of what it ranks by, and factors of weights."""

    choice: Choice
    names: _Names
    entry: RouterInput | None


def router_rule_of(block: nn.Module, parts: MoeParts, likely: RouterRule | None) -> RouterRule | None:
    """The known way in which a block's router chooses; None where it is none of these. likely: which is tried first."""
    roles = list(dict.fromkeys(itertools.permutations([*parts.biases, *[None] * (3 - len(parts.biases))], 3)))
    for entry in sorted(_entries(block, parts), key=lambda entry: likely is None or entry != likely.entry):
        tried = list(probes(block, parts, entry))
        try:
            seen = [_seen(block, parts, entry, *probe) for probe in tried]
        except Exception:  # of any kind: it takes more than hidden states
            return None
        ids, weights = seen[0]
        x, given = tried[0]
        if weights.dtype not in (x.dtype, torch.float32):
            return None
        first = Choice(per_token=ids.shape[1], score="softmax", wide_weights=weights.dtype != x.dtype)
        choices = itertools.chain(
            [] if likely is None else [likely.choice], _choices(block, first, len(given[parts.weight]))
        )
        entered = [x if entry is None else x * g[parts.scale or ""] * entry.factor for x, g in tried]
        routers = {
            names: [(x, g[parts.weight], *biases_of(g, names)) for x, (_, g) in zip(entered, tried, strict=True)]
            for names in roles
        }
        # Ways that choose other experts, as most do: whatever the weights, they need no second look.
        others = set[Any]()
        for choice, names in itertools.product(choices, roles):
            chosen = replace(choice, normalise=False, eps=0.0, least=0.0, scale=1.0), names[:2]
            if chosen in others:
                continue
            for router, found in zip(routers[names], seen, strict=True):
                same_experts, same = _compared(router, choice, found)
                if not same_experts:
                    others.add(chosen)
                if not same:
                    break
            else:
                return RouterRule(choice, names, entry)
    return None


def biases_of(tensors: Mapping[str, Tensor], names: _Names) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The biases as ``route`` takes them, [E] each. (ERNIE's has two dimensions.)"""
    bias, correction, gain = (None if name is None else tensors[name].view(-1) for name in names)
    return bias, correction, gain


def _entries(block: nn.Module, parts: MoeParts) -> Sequence[RouterInput | None]:
    """What the router may do to its input. The factor is one of the numbers that its modules have as attributes."""
    if parts.scale is None:
        return [None]
    like = tensors_of(block)[parts.scale]
    bare = {name: module for name, module in block.named_modules() if not module.state_dict()}
    norms = [(name, norm.eps) for name, m in bare.items() if (norm := norm_of(m, like.numel(), like)) is not None]
    least = 1 / torch.finfo(like.dtype).max  # of a smaller one, the inverse is infinite
    factors = [1.0, *sorted(n for n in _numbers(block) if isinstance(n, float) and n > least and n != 1.0)]
    return [
        RouterInput(name, eps, factor) for (name, eps), factor in itertools.product(norms, factors) if len(norms) == 1
    ]


def _numbers(block: nn.Module) -> set[float]:
    return {value for module in block.modules() for value in vars(module).values() if type(value) in (int, float)}


def _choices(block: nn.Module, first: Choice, count: int) -> Iterator[Choice]:
    """The ways in which a router may choose, the most common first.

    Scales of weights, the number of groups of experts, and how many of these are taken are found among the numbers that the
    block's modules have as attributes.
    """
    numbers = _numbers(block)
    whole = sorted(n for n in numbers if isinstance(n, int) and 0 < n < count)
    groups = [(1, 1, 1)]
    groups += [(g, k, n) for g in whole if count % g == 0 for k in whole if g > k for n in (1, 2) if n <= count // g]
    scales = [1.0, *sorted(n for n in numbers if isinstance(n, float) and n > 0 and n != 1.0)]
    kinds: list[dict[str, Any]] = [{"score": "softmax", "normalise": True}, {"score": "softmax"}, {"score": "chosen"}]
    kinds += [{"score": "sigmoid"}, *({"score": "sigmoid", "normalise": True, "eps": eps} for eps in _EPSILONS)]
    kinds += [{"score": "sigmoid", "normalise": True}, {"score": "chosen_sigmoid"}]
    kinds += [{"score": "softmax", "normalise": True, "least": n} for n in sorted(numbers) if 0 < n < _SMALL]
    widths: list[dict[str, Any]] = [{}, {"wide_scores": True}, {"wide_logits": True}]
    for (g, kept, best), scale, width, kind in itertools.product(groups, scales, widths, kinds):
        if kept * count // g >= first.per_token and (kind["score"] == "sigmoid" or width != {"wide_scores": True}):
            yield replace(first, scale=scale, groups=g, kept_groups=kept, best_of_group=best, **width, **kind)


def probes(
    block: nn.Module, parts: MoeParts, entry: RouterInput | None
) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
    """Pairs of hidden states, and tensors for the router, that give known logits."""
    tensors = tensors_of(block)
    weight = tensors[parts.weight]
    count = weight.shape[0]
    generator = torch.Generator().manual_seed(0)

    def shuffled() -> Tensor:
        return torch.stack([torch.randperm(count, generator=generator, device="cpu") for _ in range(_ROWS)]).float()

    step = 8.0 / 2 ** (count - 1).bit_length()  # so that bf16 holds each number exactly
    near, low, far = step * shuffled() - 4.0, step * shuffled() - 20.0, -128.0 - shuffled()
    # Near each other: a group's largest probability does not outweigh the sum of two. Low: scores near zero, where an epsilon
    # shows. Far: different logits whose probabilities are all zero. Its negative: logits whose sigmoid is one for all.
    logits = torch.cat([near, near / 8, low, far.where(far < -128.0, 0.0), -far])
    biases = {name: shuffled()[0] / count for name in parts.biases}
    # With factors other than one, logits have more digits than half precision: this shows whether they are rounded.
    of_others = 1 + torch.randint(1024, (count,), generator=generator, device="cpu") / 1024
    ones = torch.ones(count, device="cpu")
    # The last: corrections larger than any score, so that the scores of the chosen experts may all be zero.
    for factors, spread in ((ones, 1.0), (of_others, 1.0), (ones, 3.0)):
        rows = logits.new_zeros(len(logits), weight.shape[1])
        rows[:, :count], rows[:, -1] = logits, 1.0
        matrix = logits.new_zeros(weight.shape)
        matrix[:, :count] = factors.diag()
        values = {name: spread * bias + 0.5 for name, bias in biases.items()} | {parts.weight: matrix}
        if entry is not None:
            values[parts.scale or ""] = matrix.new_full((weight.shape[1],), 1 / entry.factor)
        yield (
            rows.to(device=weight.device, dtype=block.get_submodule(parts.experts).down_proj.dtype),  # type: ignore[arg-type]
            {name: value.view(tensors[name].shape).to(tensors[name]) for name, value in values.items()},
        )


def _seen(
    block: nn.Module, parts: MoeParts, entry: RouterInput | None, x: Tensor, given: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """The expert ids and weights, [T, K] each, that a block chooses with these tensors for its router.

    x: its last number is 1. Raises an exception of any kind where the block does something else.
    """
    seen: list[tuple[Tensor, Tensor]] = []

    def note(hidden_states: Tensor, *chosen: Tensor) -> Tensor:
        if not chosen:  # each expert gets all tokens, times its weight
            weighed = hidden_states.view(-1, *x.shape)
            weights = weighed[..., -1].T
            assert torch.equal(weighed, x * weighed[..., -1:])
            chosen = weights.topk(int((weights != 0).sum(1).max()), dim=1)[::-1]
        ids, weights = chosen
        seen.append((ids, weights))
        return torch.zeros_like(hidden_states)

    with ExitStack() as stack:
        stack.enter_context(_instead(block.get_submodule(parts.experts), note))
        if parts.shared is not None:
            stack.enter_context(_instead(block.get_submodule(parts.shared.path), torch.zeros_like))
        if entry is not None:
            stack.enter_context(_instead(block.get_submodule(entry.norm), lambda x: x))
        functional_call(block, dict(given), (x[None],))
    ((ids, weights),) = seen
    return ids.view(len(x), -1), weights.view(len(x), -1)


@contextmanager
def _instead(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Context manager: ``forward`` runs in place of the module's."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _compared(router: _Router, choice: Choice, theirs: tuple[Tensor, Tensor]) -> tuple[bool, bool]:
    """Whether a choice gives the same experts, in any order; and with the same weights. theirs: ids and weights, [T, K]."""
    try:
        mine = route(*router, choice)
    except RuntimeError:  # dtypes that do not go together
        return True, False
    (ids, places), (other, others) = (t[0].sort(dim=1) for t in (mine, theirs))
    if not torch.equal(ids, other):
        return False, False
    if mine.weights.dtype != theirs[1].dtype:
        return True, False
    weights, expected = mine.weights.gather(1, places).float(), theirs[1].gather(1, others).float()
    return True, torch.allclose(weights, expected, rtol=_CLOSE.get(theirs[1].dtype, 0.0), atol=0.0, equal_nan=True)
