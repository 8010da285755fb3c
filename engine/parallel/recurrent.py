"""Cuts mixers that keep states into the shares of ranks: heads, with the channels of the convolution before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from stoker.engine.cache.kv_cache import StateShape
from stoker.engine.layers.fused_branches import MixerBranch
from stoker.engine.layers.fused_recurrent import DeltaNet, KimiDelta, Mamba, Mamba2, ShortConvolution
from stoker.engine.layers.linears import Linears
from stoker.engine.parallel.cuts import Span
from stoker.engine.parallel.norms import gated_rms_norm
from stoker.engine.parallel.shares import (
    CutBranch,
    PartOf,
    Remade,
    Rows,
    part_of,
    refused,
    scaled,
    share,
    share_keys,
    within,
)
from stoker.engine.parallel.tensor_parallel import TensorParallel

_CONVOLUTION, _DELTA_RULE = "causal_conv", "gated_delta_rule"
_HEADS, _KEY_HEADS, _CHANNELS = "heads with a state", "key heads of states", "channels of a convolution"


@dataclass(frozen=True, slots=True)
class Summed:
    """A linear whose columns ranks share, added up over them."""

    linear: Linears
    parallel: TensorParallel

    def __call__(self, x: Tensor) -> Tensor:
        return self.parallel.add_up(self.linear(x))


def states_of(states: Sequence[StateShape], parallel: TensorParallel) -> tuple[StateShape, ...]:
    """What a rank keeps of a sequence."""
    by_operation = {state.operation: state for state in states}
    if (convolved := by_operation.pop(_CONVOLUTION, None)) is None:
        raise refused("layers keep states that no convolution comes before")
    (before, channels), after = convolved.size, next(iter(by_operation.values()), None)
    if after is None:
        return (replace(convolved, size=(before, _length(share(channels, _CHANNELS, parallel)))),)
    heads, rows, columns = after.size
    if (heads, rows) == (1, channels):  # Mamba's, whose channels are rows of one head
        rows = channels = _length(share(channels, _CHANNELS, parallel))
    else:
        # Two keys, or B and C, for each key head, or group, and the rest is of heads.
        width, of_key = (columns, rows) if after.operation == _DELTA_RULE else (rows, columns)
        keys, heads = (channels - heads * width) // (2 * of_key), _length(share(heads, _HEADS, parallel))
        keys = _length(share_keys(keys, _KEY_HEADS, parallel))
        channels = heads * width + 2 * keys * of_key
    return replace(convolved, size=(before, channels)), replace(after, size=(heads, rows, columns))


def cut_delta_net(branch: MixerBranch, net: DeltaNet, parallel: TensorParallel, remade: Remade) -> CutBranch:
    m = net.module
    all_keys, heads, key_dim, dim = m.num_k_heads, m.num_v_heads, m.head_k_dim, m.head_v_dim
    mine, keys = share(heads, _HEADS, parallel), share_keys(all_keys, _KEY_HEADS, parallel)
    rows = Rows()
    if net.by_key_head:
        each = heads // all_keys
        of_key = [within(mine, key * each, each) for key in range(all_keys)]
        of_keys = [[(0, key_dim)] if keys[0] <= key < keys[1] else [] for key in range(all_keys)]
        for values, of_both in zip(of_key, of_keys, strict=True):
            for _ in range(2):
                rows.take(key_dim, *of_both)
            for _ in range(2):
                rows.take_units(each, dim, values)
        for values in of_key:
            for _ in range(2):
                rows.take_units(each, 1, values)
    else:
        for _ in range(2):
            rows.take_units(all_keys, key_dim, keys)
        for unit in (dim, dim, 1, 1):
            rows.take_units(heads, unit, mine)
    channels = Rows()
    for _ in range(2):
        channels.take_units(all_keys, key_dim, keys)
    channels.take_units(heads, dim, mine)
    module = PartOf(
        m,
        conv1d=_convolution(m.conv1d, channels.spans, remade),
        num_k_heads=_length(keys),
        num_v_heads=_length(mine),
        key_dim=_length(keys) * key_dim,
        value_dim=_length(mine) * dim,
        A_log=part_of(m.A_log, [mine], remade),
        dt_bias=part_of(m.dt_bias, [mine], remade),
    )
    return CutBranch.of(branch, replace(net, module=module), rows, scaled(mine, dim))


def cut_mamba2(branch: MixerBranch, mamba: Mamba2, parallel: TensorParallel, remade: Remade) -> CutBranch:
    """Where one group of B and C is for the heads of several ranks, each of them has it."""
    m = mamba.module
    heads, dim, all_groups, state = m.num_heads, m.head_dim, m.n_groups, m.ssm_state_size
    mine, groups = share(heads, _HEADS, parallel), share_keys(all_groups, _KEY_HEADS, parallel)
    channels, rows = Rows(), Rows()
    rows.take_units(heads, dim, mine)  # the gate
    for of_channel in (channels, rows):
        of_channel.take_units(heads, dim, mine)
        for _ in range(2):
            of_channel.take_units(all_groups, state, groups)
    rows.take_units(heads, 1, mine)
    columns = scaled(mine, dim)
    parts: dict[str, Any] = {name: part_of(getattr(m, name), [mine], remade) for name in ("A_log", "D", "dt_bias")}
    if (scales := getattr(m, "mup_vector", None)) is not None:
        parts["mup_vector"] = part_of(scales.flatten(), rows.spans, remade)[None]
    module = PartOf(
        m,
        conv1d=_convolution(m.conv1d, channels.spans, remade),
        num_heads=_length(mine),
        n_groups=_length(groups),
        intermediate_size=_length(columns),
        conv_dim=sum(high - low for low, high in channels.spans),
        **parts,
    )
    norm, ops, normed = mamba.norm, mamba.ops, share_keys(mamba.groups, "groups of heads normed together", parallel)
    if norm is not None:
        norm = part_of(norm[0], [columns], remade), norm[1]
        if mamba.groups < parallel.size:
            ops = replace(ops, gated_rms_norm=partial(gated_rms_norm, parallel, mamba.groups))
    cut = replace(mamba, module=module, norm=norm, groups=_length(normed), ops=ops)
    return CutBranch.of(branch, cut, rows, columns)


def cut_mamba(branch: MixerBranch, mamba: Mamba, parallel: TensorParallel, remade: Remade) -> CutBranch:
    """Step, B and C, which each channel's input is a part of, are whole on every rank."""
    m = mamba.module
    channels, rows = len(m.conv1d.weight), Rows()
    mine = share(channels, _CHANNELS, parallel)
    for _ in range(2):
        rows.take_units(channels, 1, mine)
    bias = None if m.dt_proj.bias is None else part_of(m.dt_proj.bias, [mine], remade)
    module = PartOf(
        m,
        conv1d=_convolution(m.conv1d, [mine], remade),
        dt_proj=PartOf(m.dt_proj, weight=part_of(m.dt_proj.weight, [mine], remade), bias=bias),
        A_log=part_of(m.A_log, [mine], remade),
        D=None if m.D is None else part_of(m.D, [mine], remade),
    )
    (of_step,) = branch.inner
    cut = replace(mamba, module=module, of_step=Summed(of_step, parallel))
    return CutBranch.of(branch, cut, rows, mine, summed=[(of_step, mine)])


def cut_short_convolution(
    branch: MixerBranch, convolution: ShortConvolution, parallel: TensorParallel, remade: Remade
) -> CutBranch:
    m = convolution.module
    channels, rows = len(m.conv.weight), Rows()
    mine = share(channels, _CHANNELS, parallel)
    for _ in range(3):
        rows.take_units(channels, 1, mine)
    module = PartOf(m, conv=_convolution(m.conv, [mine], remade))
    return CutBranch.of(branch, replace(convolution, module=module), rows, mine)


def cut_kimi_delta(branch: MixerBranch, delta: KimiDelta, parallel: TensorParallel, remade: Remade) -> CutBranch:
    """Latent vectors, of which decay and gate may be made, are whole on every rank."""
    m, forget = delta.module, delta.module.forget_gate
    three, heads, *beside = delta.widths
    dim, mine = three // (3 * heads), share(delta.widths[1], _HEADS, parallel)
    columns, rows, channels = scaled(mine, dim), Rows(), Rows()
    for _ in range(3):
        rows.take_units(heads, dim, mine)
        channels.take_units(heads, dim, mine)
    rows.take_units(heads, 1, mine)
    widths = [3 * _length(columns), _length(mine)]
    for width, inner in zip(beside, (delta.decay, delta.gate), strict=True):
        of_it = columns if inner is None else (0, width)
        rows.take(width, of_it)
        widths.append(_length(of_it))
    of_gate = PartOf(
        forget,
        A_log=part_of(forget.A_log.flatten(), [mine], remade),
        dt_bias=part_of(forget.dt_bias.flatten(), [columns], remade),
    )
    module = PartOf(m, conv1d=_convolution(m.conv1d, channels.spans, remade), forget_gate=of_gate)
    cut = replace(delta, module=module, widths=tuple(widths))
    return CutBranch.of(branch, cut, rows, columns, [(group, [columns]) for group in branch.inner])


def _length(span: Span) -> int:
    return span[1] - span[0]


def _convolution(conv: Any, channels: Sequence[Span], remade: Remade) -> PartOf:
    bias = None if conv.bias is None else part_of(conv.bias, channels, remade)
    return PartOf(conv, weight=part_of(conv.weight, channels, remade), bias=bias)
