"""Cuts what a branch has between its projections into the shares of ranks: heads of attention, with their keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from stoker.engine.cache.kv_cache import LayerShape
from stoker.engine.layers.fused_branches import MixerBranch
from stoker.engine.layers.fused_mixers import Attention, LatentAttention
from stoker.engine.layers.fused_recurrent import DeltaNet, KimiDelta, Mamba, Mamba2, ShortConvolution
from stoker.engine.layers.linears import matrix_of
from stoker.engine.parallel.cuts import Span
from stoker.engine.parallel.norms import AttentionNormedTogether
from stoker.engine.parallel.recurrent import (
    cut_delta_net,
    cut_kimi_delta,
    cut_mamba,
    cut_mamba2,
    cut_short_convolution,
    states_of,
)
from stoker.engine.parallel.shares import (
    CutBranch,
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

_HEADS, _KEY_HEADS = "query heads", "key heads"


def share_of(shape: LayerShape, parallel: TensorParallel) -> LayerShape:
    """What a rank keeps of a token, and of a sequence. Raises ``UnsupportedModelError`` where heads cannot be shared out."""
    if shape.states:
        shape = replace(shape, states=states_of(shape.states, parallel))
    if not shape.heads:
        return shape
    first, last = share(shape.query_heads, _HEADS, parallel)
    begin, end = share_keys(shape.heads, _KEY_HEADS, parallel)
    return replace(shape, query_heads=last - first, heads=end - begin)


def cut_mixer(branch: MixerBranch, parallel: TensorParallel, remade: Remade) -> CutBranch:
    """A branch with this rank's heads, and where to cut its linears, which is left to the caller.

    remade: takes what has to be done when weights have changed.
    """
    mixer = branch.mixer
    if isinstance(mixer, Attention):
        return _cut_attention(branch, mixer, parallel, remade)
    if isinstance(mixer, LatentAttention):
        return _cut_latent(branch, mixer, parallel)
    if isinstance(mixer, DeltaNet):
        return cut_delta_net(branch, mixer, parallel, remade)
    if isinstance(mixer, KimiDelta):
        return cut_kimi_delta(branch, mixer, parallel, remade)
    if isinstance(mixer, Mamba2):
        return cut_mamba2(branch, mixer, parallel, remade)
    if isinstance(mixer, Mamba):
        return cut_mamba(branch, mixer, parallel, remade)
    if isinstance(mixer, ShortConvolution):
        return cut_short_convolution(branch, mixer, parallel, remade)
    raise refused(f"layers with {type(mixer).__name__} run whole")


def _cut_attention(branch: MixerBranch, attention: Attention, parallel: TensorParallel, remade: Remade) -> CutBranch:
    heads, all_keys, dim = attention.heads, attention.kv_heads, attention.head_dim
    mine, keys = share(heads, _HEADS, parallel), (0, 0)
    if all_keys:
        keys = share_keys(all_keys, _KEY_HEADS, parallel)
    width = sum(len(matrix_of(m)) for m in branch.inputs.linears) - attention.gate_width
    rows = Rows()
    if attention.grouped:
        each = heads // all_keys
        for key in range(all_keys):
            rows.take_units(each, dim, within(mine, key * each, each))
            rows.take(2 * dim, (0, 2 * dim) if keys[0] <= key < keys[1] else (0, 0))
    else:
        rows.take_units(heads, dim * (1 + attention.gated), mine)
        while rows.end < width:  # keys, and values where these have a projection of their own
            rows.take_units(all_keys, dim, keys)
    gate = attention.gate_width // heads
    rows.take_units(heads, gate, mine)
    cut = replace(
        attention,
        heads=mine[1] - mine[0],
        kv_heads=keys[1] - keys[0],
        gate_width=gate * (mine[1] - mine[0]),
        options=_options_of(attention.options, mine),
    )
    if attention.whole_norms is not None:
        of_queries, of_keys = attention.whole_norms
        of_queries = of_queries._replace(weight=part_of(of_queries.weight, [scaled(mine, dim)], remade))
        of_keys = of_keys._replace(weight=part_of(of_keys.weight, [scaled(keys, dim)], remade))
        cut = AttentionNormedTogether.of(replace(cut, whole_norms=(of_queries, of_keys)), parallel)
    return CutBranch.of(branch, cut, rows, scaled(mine, dim))


def _cut_latent(branch: MixerBranch, attention: LatentAttention, parallel: TensorParallel) -> CutBranch:
    """Latent vectors are whole on every rank, and so is the part of keys that all heads share."""
    *query, key_value = (len(matrix_of(group.linears[0])) for group in branch.inner)
    first, latent, shared, *gate = attention.widths
    heads = (query[0] if query else first) // attention.head_dim
    mine = share(heads, _HEADS, parallel)
    rows, dim = Rows(), matrix_of(branch.out.linears[0]).shape[1] // heads
    rows.take(first, (0, first) if query else scaled(mine, attention.head_dim))
    rows.take(latent + shared, (0, latent + shared))
    for width in gate:
        rows.take_units(heads, width // heads, mine)
    cut = replace(
        attention,
        widths=(first if query else first // parallel.size, latent, shared, *(w // parallel.size for w in gate)),
        options=_options_of(attention.options, mine),
    )
    inner = [
        (group, [scaled(mine, width // heads)]) for group, width in zip(branch.inner, (*query, key_value), strict=True)
    ]
    return CutBranch.of(branch, cut, rows, scaled(mine, dim), inner)


def _options_of(options: Mapping[str, Any], mine: Span) -> Mapping[str, Any]:
    """Arguments of attention for some of its query heads."""
    sinks = options.get("sinks")
    if others := [name for name, value in options.items() if isinstance(value, Tensor) and value is not sinks]:
        raise refused(f"attention has {others}")
    return options if sinks is None else {**options, "sinks": sinks[slice(*mine)]}
