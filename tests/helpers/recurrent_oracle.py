"""Layers with a state for each sequence: random packed batches, and their results in fp64, token after token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton_oracle import DEVICE, assert_close, randn, unwatched

from stoker.kernels.ops import Ops
from stoker.kernels.reference.recurrent import StateRows

PADDING_SLOT = 2  # of rows without tokens
# Tokens of each sequence: decode steps, one sequence, and chunks beside single tokens and padding.
BATCHES = [[1], [1, 1, 1, 1], [7], [5, 1, 0, 70, 1, 2, 0, 0]]
OPERATIONS = ["causal_conv", "gated_delta_rule", "selective_scan"]


def make_rows(lengths: Sequence[int], slots: Sequence[int] | None = None) -> StateRows:
    """Slots are anywhere; those of rows without tokens are the same."""
    own = [slot for slot in torch.randperm(len(lengths) + 1).tolist() if slot != PADDING_SLOT]
    slots = own[: len(lengths)] if slots is None else slots
    slots = [slot if length else PADDING_SLOT for slot, length in zip(slots, lengths, strict=False)]
    starts = torch.tensor([0, *accumulate(lengths)], device=DEVICE)
    return StateRows(torch.tensor(slots, device=DEVICE), starts, max(lengths))


def apart(tensor: Tensor) -> Tensor:
    """The same numbers as part of a wider projection."""
    flat = tensor.flatten(1)
    wide = torch.full((len(flat), flat.shape[1] + 48), float("nan"), dtype=tensor.dtype, device=tensor.device)
    return wide[:, 16:-32].copy_(flat).view(tensor.shape)


# Of each operation: its inputs by token, what it knows besides them, and the state of as many slots.
Case = tuple[dict[str, Tensor], dict[str, Any], Callable[[int], Tensor]]


def conv_case(
    tokens: int,
    dtype: torch.dtype,
    channels: int = 40,
    width: int = 4,
    bias: bool = True,
    activation: str | None = "silu",
    gated: bool = False,
) -> Case:
    given = {
        "weight": randn(channels, width, dtype=dtype, scale=width**-0.5),
        "bias": randn(channels, dtype=dtype) if bias else None,
        "activation": activation,
    }
    names = ("x", "before", "after") if gated else ("x",)
    by_token = {name: apart(randn(tokens, channels, dtype=dtype)) for name in names}
    return by_token, given, lambda slots: randn(slots, width - 1, channels, dtype=dtype)


def delta_case(
    tokens: int,
    dtype: torch.dtype,
    key_heads: int = 2,
    heads: int = 4,
    dims: tuple[int, int] = (16, 24),
    normalise: bool = True,
    decay: float = 1.0,
    alike: bool = False,
    large: bool = False,
    by_row: bool = False,
) -> Case:
    """by_row: each row of a state has a decay of its own; alike: keys of all tokens are the same and nothing is forgotten, as of a token said again and again; large: states are
    beyond what fp16 holds, and results are not."""
    key_dim, value_dim = dims
    by_token = {
        "query": apart(randn(tokens, key_heads, key_dim, dtype=dtype)),
        "key": apart(randn(tokens, key_heads, key_dim, dtype=dtype, scale=1.0 if normalise else key_dim**-0.5)),
        "value": apart(randn(tokens, heads, value_dim, dtype=dtype)),
        "decay": -decay * F.softplus(randn(tokens, heads, *((key_dim,) if by_row else ()))),
        "beta": apart(randn(tokens, heads, dtype=dtype).sigmoid()),
    }
    if alike:
        by_token["key"][1:] = by_token["key"][:1]
        by_token["beta"].mul_(2.0)
    if large:
        by_token["value"].mul_(1e4)
        by_token["query"].mul_(1e-3)
    of_states = 1e5 if large else 1.0
    return by_token, {"normalise": normalise}, lambda slots: randn(slots, heads, key_dim, value_dim, scale=of_states)


def keep_from_ties(dt: Tensor, bias: Tensor | None) -> None:
    """Draw anew those whose steps lie so near the middle of two numbers of their dtype that the last bits of fp32 decide.

    A step is rounded, and states are compared as fp32: who rounds the other way is as right.
    """
    while dt.dtype != torch.float32:
        step = F.softplus((dt if bias is None else dt + bias).double())
        tied = (step * (1 - 1e-6)).to(dt.dtype) != (step * (1 + 1e-6)).to(dt.dtype)
        if not tied.any():
            return
        dt[tied] = randn(int(tied.sum()), dtype=dt.dtype)


def scan_case(
    tokens: int,
    dtype: torch.dtype,
    groups: int = 2,
    heads: int = 4,
    dims: tuple[int, int] = (12, 16),
    biases: bool = True,
    limit: tuple[float, float] = (0.0, float("inf")),
    decay: float = 1.0,
    a_log: bool = False,
    large: bool = False,
    by_row: bool = False,
) -> Case:
    """by_row: each row of a state has a step of its own, and each number a rate; large: states, and steps times inputs, are beyond what fp16 holds, and results are not."""
    dim, size = dims
    of_step, of_rate = ((heads, dim), (heads, dim, size)) if by_row else ((heads,), (heads,))
    by_token = {
        "x": apart(randn(tokens, heads, dim, dtype=dtype)),
        "dt": apart(randn(tokens, *of_step, dtype=dtype)),
        "B": apart(randn(tokens, groups, size, dtype=dtype)),
        "C": apart(randn(tokens, groups, size, dtype=dtype)),
    }
    given = {
        "A": -decay * (0.1 + torch.rand(of_rate, device=DEVICE)),
        "D": randn(*of_step, dtype=dtype) if biases else None,
        "dt_bias": randn(*of_step, dtype=dtype) if biases else None,
        "dt_limit": limit,
    }
    if a_log:
        given |= {"A": (-given["A"]).log().to(dtype), "a_log": True}
    keep_from_ties(by_token["dt"], given["dt_bias"])
    if large:
        by_token["x"].mul_(1e4)
        by_token["C"].mul_(1e-3)
    return by_token, given, lambda slots: randn(slots, heads, dim, size, scale=1e5 if large else 1.0)


CASES: dict[str, Callable[..., Case]] = dict(zip(OPERATIONS, (conv_case, delta_case, scan_case), strict=True))


def run(
    ops: Ops, name: str, by_token: dict[str, Tensor], given: dict[str, Any], state: Tensor, rows: StateRows
) -> Tensor:
    for inputs in by_token.values():  # as in a layer, they are what the last launch made, and not the state
        inputs.mul_(1)
    if "before" in by_token:
        by_token = dict(by_token)
        given = given | {"gates": (by_token.pop("before"), by_token.pop("after"))}
    out: Tensor = {
        "causal_conv": lambda: ops.causal_conv(**by_token, **given, state=state, rows=rows),
        "gated_delta_rule": lambda: ops.gated_delta_rule(**by_token, **given, state=state, rows=rows),
        "selective_scan": lambda: ops.selective_scan(**by_token, **given, state=state, rows=rows),
    }[name]()
    return out


def conv_step(
    state: Tensor,
    x: Tensor,
    before: Tensor | float = 1.0,
    after: Tensor | float = 1.0,
    *,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    window = torch.cat((state, (x * before)[None]))
    out = (window * weight.T).sum(0) + (0.0 if bias is None else bias)
    return (F.silu(out) if activation else out) * after, window[1:]


def delta_step(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, *, normalise: bool
) -> tuple[Tensor, Tensor]:
    if normalise:
        query, key = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (query, key))
    q, k = (t.repeat_interleave(len(value) // len(key), 0) for t in (query, key))
    state = state * (decay.exp()[..., None] if decay.dim() == 2 else decay.exp()[:, None, None])
    change = beta[:, None] * (value - torch.einsum("hk,hkv->hv", k, state))
    state = state + torch.einsum("hk,hv->hkv", k, change)
    return torch.einsum("hk,hkv->hv", q, state) * query.shape[-1] ** -0.5, state


def scan_step(
    state: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, *, A: Tensor, D: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor]:
    """dt: with its bias and within its limit."""
    b, c = (t.repeat_interleave(len(x) // len(B), 0) for t in (B, C))
    if dt.dim() == 1:  # of each head
        dt, A = dt[:, None], A[:, None, None]
        D = None if D is None else D[:, None]
    state = (dt[..., None] * A).exp() * state + torch.einsum("hp,hs->hps", dt * x, b)
    out = torch.einsum("hps,hs->hp", state, c)
    return out if D is None else out + D * x, state


STEPS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = dict(
    zip(OPERATIONS, (conv_step, delta_step, scan_step), strict=True)
)


@unwatched
def expected(
    name: str, by_token: dict[str, Tensor], given: dict[str, Any], state: Tensor, rows: StateRows
) -> tuple[Tensor, Tensor]:
    """Results and states, in fp64."""
    if name == "selective_scan":  # the step is rounded on its way, as transformers does
        dt, bias = by_token["dt"], given["dt_bias"]
        dt = F.softplus(dt if bias is None else dt + bias).clamp(*given["dt_limit"])
        by_token = by_token | {"dt": dt}
        if given.get("a_log"):
            given = given | {"A": -given["A"].double().exp()}
    if "before" in by_token:  # what it gates is rounded, as it is kept
        by_token = by_token | {"x": by_token["x"] * by_token["before"], "before": torch.ones_like(by_token["x"])}
    by_token = {key: t.double() for key, t in by_token.items()}
    given = {key: t.double() if isinstance(t, Tensor) else t for key, t in given.items()}
    state, out = state.double(), None
    starts = rows.starts.tolist()
    for slot, first, last in zip(rows.slots.tolist(), starts, starts[1:], strict=False):
        for t in range(first, last):
            y, state[slot] = STEPS[name](state[slot], **{key: x[t] for key, x in by_token.items()}, **given)
            out = y.new_zeros(len(next(iter(by_token.values()))), *y.shape) if out is None else out
            out[t] = y
    assert out is not None
    return out, state


def check(
    ops: Ops, name: str, lengths: Sequence[int], dtype: torch.dtype, kept: torch.dtype = torch.float32, **options: Any
) -> None:
    """The operation gives what it has to, and leaves what is not its own: of tokens of no sequence it says 0.

    kept: what states of fp32 are as exact as.
    """
    nobodys = 0 if max(lengths) == 1 else 3
    by_token, given, make_state = CASES[name](sum(lengths) + nobodys, dtype, **options)
    for tensor in by_token.values():
        tensor[sum(lengths) :] = float("nan")
    rows, state = make_rows(lengths), make_state(len(lengths) + 4)
    wanted, wanted_state = expected(name, by_token, given, state, rows)
    before = {key: t.clone() for key, t in by_token.items()}
    out = run(ops, name, by_token, given, state, rows)
    assert_close(out, wanted, dtype)
    assert not out[sum(lengths) :].any()
    same(state, wanted_state, kept)
    others = torch.ones(len(state), dtype=torch.bool, device=DEVICE)
    others[rows.slots] = False
    assert torch.equal(state[others].double(), wanted_state[others])
    for key, tensor in by_token.items():
        assert torch.equal(tensor.nan_to_num(7.0), before[key].nan_to_num(7.0)), "an input was changed"


# What they may be besides: convolutions of other widths, as many key heads as heads, steps within limits, and so on.
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("causal_conv", {"bias": False, "activation": None, "width": 3}),
    ("causal_conv", {"bias": False, "width": 2, "channels": 300}),
    ("causal_conv", {"gated": True, "activation": None, "width": 3}),
    ("causal_conv", {"gated": True, "bias": False, "channels": 300}),
    ("gated_delta_rule", {"normalise": False}),
    ("gated_delta_rule", {"key_heads": 3, "heads": 3, "dims": (40, 20)}),
    ("gated_delta_rule", {"key_heads": 1, "heads": 2, "dims": (128, 128)}),
    ("gated_delta_rule", {"decay": 30.0}),
    ("gated_delta_rule", {"large": True, "normalise": False, "decay": 0.1}),
    ("gated_delta_rule", {"decay": 0.0, "alike": True}),
    ("gated_delta_rule", {"by_row": True}),
    ("gated_delta_rule", {"by_row": True, "key_heads": 3, "heads": 3, "dims": (40, 20), "decay": 30.0}),
    ("gated_delta_rule", {"by_row": True, "decay": 0.0, "alike": True}),
    ("selective_scan", {"biases": False, "groups": 1}),
    ("selective_scan", {"decay": 30.0}),
    ("selective_scan", {"limit": (0.5, 1.1), "groups": 4}),
    ("selective_scan", {"a_log": True}),
    ("selective_scan", {"by_row": True, "heads": 1, "groups": 1, "dims": (40, 16)}),
    ("selective_scan", {"by_row": True, "heads": 2, "dims": (130, 10), "biases": False, "decay": 30.0}),
    ("selective_scan", {"by_row": True, "heads": 1, "groups": 1, "a_log": True, "limit": (0.5, 1.1)}),
    ("selective_scan", {"large": True, "biases": False, "decay": 0.1}),
    ("selective_scan", {"heads": 2, "groups": 1, "dims": (64, 128)}),
    ("selective_scan", {"heads": 2, "groups": 1, "dims": (20, 80)}),
]


def split(
    by_token: dict[str, Tensor], lengths: Sequence[int], pieces: Sequence[Sequence[int]]
) -> list[dict[str, Tensor]]:
    """Tokens of sequences as they come in steps. pieces: of each step, how many tokens of each sequence."""
    starts, batches = [0, *accumulate(lengths)], []
    done = [0] * len(lengths)
    for step in pieces:
        at = [t for first, n, new in zip(starts, done, step, strict=False) for t in range(first + n, first + n + new)]
        batches.append({key: apart(tensor[at]) for key, tensor in by_token.items()})
        done = [n + new for n, new in zip(done, step, strict=True)]
    return batches


def check_pieces(
    ops: Ops,
    name: str,
    dtype: torch.dtype,
    exact: bool,
    kept: torch.dtype = torch.float32,
    longest: int = 72,
    **options: Any,
) -> None:
    """Sequences that come in pieces give what they give whole; with the same bits where that is promised."""
    lengths = [9, 3, longest]
    pieces = [[5, 0, longest - 2], [2, 1, 0], [1, 1, 1], [1, 1, 1]]
    by_token, given, make_state = CASES[name](sum(lengths), dtype, **options)
    whole, rows = make_state(6), make_rows(lengths, [4, 0, 5])
    piecewise, parts = whole.clone(), [[] for _ in lengths]  # type: ignore[var-annotated]
    out = run(ops, name, by_token, given, whole, rows).split(lengths)
    for step, batch in zip(pieces, split(by_token, lengths, pieces), strict=True):
        took = run(ops, name, batch, given, piecewise, make_rows(step, [4, 0, 5])).split(step)
        for part, new in zip(parts, took, strict=True):
            part.append(new)
    for sequence, part in zip(out, parts, strict=True):
        if exact:
            assert torch.equal(torch.cat(part), sequence)
        else:
            same(torch.cat(part), sequence.double())
    if exact:
        assert torch.equal(piecewise, whole)
    else:
        same(piecewise, whole.double(), kept)


def same(actual: Tensor, wanted: Tensor, kept: torch.dtype = torch.float32) -> None:
    """kept: what numbers of fp32 are as exact as."""
    actual = actual.to(kept) if actual.dtype == torch.float32 else actual
    assert_close(actual, wanted, actual.dtype)


def check_alone(ops: Ops, name: str, dtype: torch.dtype, longest: tuple[int, int] = (30, 66), **options: Any) -> None:
    """A sequence gives the same bits among any others, wherever its state lies."""
    lengths = [longest[0], 2, 1, longest[1], 0, 1]
    by_token, given, make_state = CASES[name](sum(lengths), dtype, **options)
    states, rows = make_state(8), make_rows(lengths)
    before = states.clone()
    out = run(ops, name, by_token, given, states, rows).split(lengths)
    for row, slot in enumerate(rows.slots.tolist()):
        if lengths[row]:
            alone = before[slot : slot + 1].clone()
            (batch,) = split(by_token, lengths, [[n if i == row else 0 for i, n in enumerate(lengths)]])
            took = run(ops, name, batch, given, alone, make_rows(lengths[row : row + 1], [0]))
            assert torch.equal(took, out[row]) and torch.equal(alone[0], states[slot])


def check_padding(ops: Ops, name: str, dtype: torch.dtype) -> None:
    """Rows of a decode step that pad it share a slot; whatever is in it, and in their tokens, changes no other's."""
    by_token, given, make_state = CASES[name](6, dtype)
    states, slots = make_state(6), torch.tensor([3, 0, 5, 4], device=DEVICE)
    alone = states.clone()
    first = {key: tensor[:4] for key, tensor in by_token.items()}
    wanted = run(ops, name, first, given, alone, StateRows(slots, torch.arange(5, device=DEVICE), 1))
    for tensor in by_token.values():
        tensor[4:] = float("nan")
    states[PADDING_SLOT] = float("nan")
    slots = torch.cat((slots, torch.tensor([PADDING_SLOT] * 2, device=DEVICE)))
    out = run(ops, name, by_token, given, states, StateRows(slots, torch.arange(7, device=DEVICE), 1))
    others = torch.arange(6, device=DEVICE) != PADDING_SLOT
    assert torch.equal(out[:4], wanted) and torch.equal(states[others], alone[others])
