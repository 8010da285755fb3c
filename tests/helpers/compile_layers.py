"""Compiles a step's kernels except attention for an H200, without one, in the forms Gemma needs. Prints what each takes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent))
from compile_attention import Recorder, as_on, build, launches

from stoker.kernels import checksum, copies, fp8, grouping, norm_rotary
from stoker.kernels.attention import latent as latent_attention
from stoker.kernels.experts import moe, routing
from stoker.kernels.linear import cuts as linear_cuts
from stoker.kernels.linear import invariant as linear_invariant
from stoker.kernels.linear import linear
from stoker.kernels.linear import streamed as linear_streamed
from stoker.kernels.lora import lora
from stoker.kernels.lora import tiles as lora_tiles
from stoker.kernels.recurrent import causal_conv, gates, recurrent
from stoker.kernels.recurrent import chunks as recurrent_chunks
from stoker.kernels.reference.adapter_weights import LoraWeights
from stoker.kernels.reference.adjustments import Banned, Bias, Penalties
from stoker.kernels.reference.constraints import ConstraintRows
from stoker.kernels.reference.decode_window import Record
from stoker.kernels.reference.lora import AdapterRows, LoraTable
from stoker.kernels.reference.moe import Gate
from stoker.kernels.reference.norm_rotary import Norm, QKNorm
from stoker.kernels.reference.recurrent import StateRows
from stoker.kernels.reference.routing import Choice
from stoker.kernels.sampling import adjustments, constraints, decode_window, sampling, truncation


def zeros(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.bfloat16)


def outermost(tokens: int, weight: tuple[int, int], gated: bool = False) -> list[linear_cuts.Cut]:
    """Of the cuts that are tried: the one with the widest tiles and most splits, and of ungated products the one with the narrowest."""
    cuts = linear_cuts.cuts_to_try(tokens, weight, 2, gated, 132)
    return [*(() if gated else cuts[:1]), cuts[-1]]


def launch(dim: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
    norm = Norm(zeros(dim), 1e-6, offset=True)
    norm_rotary.rms_norm(zeros(8, dim), *norm, residual=zeros(8, dim))
    norm_rotary.act_mul(zeros(8, 2 * hidden), "gelu_tanh")
    for last in (False, True):
        norm_rotary.qk_norm_rotary_write(
            zeros(8, heads + 2 * kv_heads, head_dim),
            heads,
            kv_heads,
            QKNorm(zeros(head_dim), zeros(head_dim), 1e-6, offset=not last, last=last),
            (torch.zeros(8, head_dim), torch.zeros(8, head_dim)),
            *(zeros(4, 16, kv_heads, head_dim) for _ in range(2)),
            torch.zeros(8, dtype=torch.long),
        )
    for tokens in (1, 4):
        linear.linear(zeros(tokens, dim), zeros(2 * hidden, dim), norm=norm, gated="gelu_tanh")
    arrived = torch.zeros(256, dtype=torch.int32)
    for tokens in (16, 40, 128):
        streamed = partial(linear_streamed.streamed, arrived=arrived)
        down = {"norm": None, "gated": None, "residual": zeros(tokens, dim), "scale": 0.3}
        for cut in outermost(tokens, (dim, hidden)):
            streamed(zeros(tokens, hidden), zeros(dim, hidden), None, **down, cut=cut)
        gate_up = {"norm": norm, "gated": "gelu_tanh", "residual": None, "scale": 1.0}
        for cut in outermost(tokens, (2 * hidden, dim), gated=True):
            streamed(zeros(tokens, dim), zeros(2 * hidden, dim), zeros(2 * hidden), **gate_up, cut=cut)
    for tokens in (4, 200):
        linear_invariant.linear(zeros(tokens, hidden), zeros(dim, hidden), residual=zeros(tokens, dim), scale=0.3)
    linear_invariant.linear(zeros(200, dim), zeros(2 * hidden, dim), gated="gelu")
    names = ("token_ids", "positions", "slots", "seq_lens", "last_lens")
    rows = torch.zeros(64, 3, dtype=torch.long)
    for record in (None, Record(rows[:, 0], rows, torch.zeros(64, 3), rows[:, 0], rows[:, 0])):
        fields = dict.fromkeys(names, rows[:, 0]) | {"logprobs": torch.zeros(64), "record": record}
        decode_window.advance(rows[:, 0], rows, rows[:, 0], rows, 16, **fields)
    decode_window.advance(rows[:, 0], rows, rows[:, 0], rows, 16, **fields, window_tables=rows, window_slots=rows[:, 0])
    checksum.checksums([zeros(dim, hidden), zeros(dim)])
    for source, target in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)):
        weights = zeros(dim, hidden).to(source)
        checksum.checksums([weights], [weights.to(target)])
        copies.copy_each([weights.to(target)], [weights])
    experts = torch.zeros(4, 512, dim), torch.zeros(4, dim, 256)
    moe.experts(torch.zeros(1024, dim), torch.zeros(1024, 2, dtype=torch.long), zeros(8, 2), *experts, gate=Gate())
    greedy, ones = torch.zeros(8, dtype=torch.bool), torch.ones(8)
    noise = sampling.gumbel_noise(*torch.zeros(3, 8, dtype=torch.long), vocab=256000)
    sampling.sample(torch.zeros(8, 256000, dtype=torch.bfloat16), ones, greedy, noise)
    slots = torch.zeros(8, dtype=torch.long)
    truncation.truncate(torch.zeros(8, 256000, dtype=torch.bfloat16), ones, slots, ones, ones)
    followed = ConstraintRows(torch.zeros(1 << 20, dtype=torch.int16), *torch.zeros(3, 9, dtype=torch.long))
    penalties = Penalties(torch.zeros(9, 256000, dtype=torch.int32), slots, ones, ones, ones)
    listed = slots[:, None].expand(8, 4).contiguous()
    for logits in (torch.zeros(8, 256000), torch.zeros(8, 256000, dtype=torch.bfloat16)):
        for p in (None, penalties):
            adjustments.adjust(logits, Bias(listed, listed.float()), p, None)
            adjustments.adjust(logits, None, p, Banned(listed, slots, slots))
    adjustments.adjust(logits, Bias(listed, listed.float()), penalties, Banned(listed, slots, slots))
    adjustments.count(penalties.seen, slots, slots)
    constraints.constrain(torch.zeros(8, 256000), followed, slots, slots)
    constraints.follow(slots, followed, slots, 256000)


def launch_fp8(dim: int, hidden: int) -> None:
    """Weights in fp8: of gate and up, and of down."""
    plain, arrived = zeros(2 * hidden, dim), torch.zeros(512, dtype=torch.int32)
    wide = {"weight": plain.to(torch.float8_e4m3fn), "row_scales": torch.zeros(2 * hidden)}
    deep = {"weight": wide["weight"].view(dim, -1)[:, :hidden].contiguous(), "row_scales": torch.zeros(dim)}
    fp8.quantise_rows(plain, *wide.values())
    fp8.dequantise_rows(*wide.values(), torch.bfloat16)
    norm = Norm(zeros(dim), 1e-6)
    for tokens in (1, 4):
        linear.linear(zeros(tokens, dim), **wide, norm=norm, gated="silu")
        linear.linear(zeros(tokens, hidden), **deep, residual=zeros(tokens, dim))
    for tokens in (16, 40, 128):
        common = {"bias": None, "norm": None, "scale": 1.0, "arrived": arrived}
        up, residual = {"gated": "silu", "residual": None}, zeros(tokens, dim)
        for cut in outermost(tokens, (2 * hidden, dim), gated=True):
            linear_streamed.streamed(zeros(tokens, dim), **wide, **common, **up, cut=cut)
        for cut in outermost(tokens, (dim, hidden)):
            linear_streamed.streamed(zeros(tokens, hidden), **deep, **common, gated=None, residual=residual, cut=cut)
    for tokens in (4, 256):
        linear_invariant.linear(zeros(tokens, dim), **wide, gated="silu")
        linear_invariant.linear(zeros(tokens, hidden), **deep, residual=zeros(tokens, dim))


def launch_others(dim: int, heads: int, kv_heads: int, head_dim: int) -> None:
    """Of Gemma 4: keys that are values, values with a norm, inputs and a factor of each layer; of Llama 4: queries with one."""
    norm_rotary.rms_norm(zeros(8, dim), zeros(dim), 1e-6, residual=zeros(8, dim), scale=zeros(1))
    norm_rotary.act_mul(zeros(8, 256), "gelu_tanh", up=zeros(8, 30, 256)[:, 1])
    norm = QKNorm(zeros(head_dim), zeros(head_dim), 1e-6, values=True)
    tables, slots = (torch.zeros(8, head_dim), torch.zeros(8, head_dim)), torch.zeros(8, dtype=torch.long)
    for written, factor in ((0, None), (kv_heads, None), (2 * kv_heads, torch.ones(8, 1))):
        norm_rotary.qk_norm_rotary_write(
            zeros(8, heads + written, head_dim),
            heads,
            min(written, kv_heads),
            norm,
            tables,
            *(zeros(4, 16, kv_heads, head_dim) for _ in range(2)),
            slots,
            factor=factor,
        )


def launch_centred(dim: int, heads: int, kv_heads: int, head_dim: int, rotated: int, grouped: bool) -> None:
    """Of GPT-NeoX, with heads by group, and of Cohere: LayerNorms with a bias and without."""
    norm_rotary.rms_norm(zeros(8, dim), *Norm(zeros(dim), 1e-5, centred=True, bias=zeros(dim) if grouped else None))
    norm_rotary.qk_norm_rotary_write(
        zeros(8, heads + 2 * kv_heads, head_dim),
        heads,
        kv_heads,
        None,
        (zeros(8, rotated), zeros(8, rotated)),
        *(zeros(4, 16, kv_heads, head_dim) for _ in range(2)),
        torch.zeros(8, dtype=torch.long),
        interleaved=not grouped,
        grouped=grouped,
    )


def launch_latent(heads: int, plain: int, rotated: int, value: int) -> None:
    projected, slots = zeros(8, 1536 + 512 + rotated), torch.zeros(8, dtype=torch.long)
    tables = torch.zeros(8, rotated), torch.zeros(8, rotated)
    inputs = zeros(8, heads, plain + rotated), zeros(8, heads, plain + value), projected[:, 2048:]
    caches = zeros(4, 16, heads, plain + rotated), zeros(4, 16, heads, value)
    for interleaved, factor in ((True, None), (False, torch.ones(8, 1))):
        latent_attention.latent_heads_write(*inputs, tables, *caches, slots, interleaved=interleaved, factor=factor)
    latent_attention.latent_heads_write(*inputs, None, *caches, slots)


def launch_routed() -> None:
    """Routers and sums of Qwen3-MoE, gpt-oss, DeepSeek-V2 and V3, Qwen3.5-MoE, Gemma 4 and Llama 4, in a decode step and a
    prompt, and experts of the last two and of Nemotron-H."""
    in_groups = {"groups": 8, "wide_logits": True, "wide_weights": True}
    qwen3 = Choice(per_token=8, score="softmax", normalise=True)
    v2 = Choice(per_token=6, score="softmax", scale=16.0, kept_groups=3, **in_groups)
    v3 = Choice(per_token=8, score="sigmoid", normalise=True, kept_groups=4, best_of_group=2, **in_groups)
    for experts, dim, bias, choice in (
        (128, 2048, None, qwen3),
        (32, 2880, zeros(32), Choice(per_token=4, score="chosen")),
        (160, 5120, None, v2),
        (512, 4096, None, Choice(per_token=10, score="softmax", normalise=True)),
        (256, 7168, None, v3),
    ):
        correction = torch.zeros(experts) if choice is v3 else None
        for tokens in (1, 200) if choice is qwen3 else (1,) if choice is v3 else (16,):
            routing.route(zeros(tokens, dim), zeros(experts, dim), bias, correction, None, choice)
    routing.route_invariant(zeros(4, dim), zeros(experts, dim), None, correction, None, v3)
    routing.route(zeros(4, 2048).float(), zeros(128, 2048).float(), None, None, None, qwen3)
    ids, weights, parameters = (
        torch.zeros(4, 8, dtype=torch.long),
        zeros(4, 8),
        (zeros(128, 1536, 2048), zeros(128, 2048, 768)),
    )
    groups = torch.zeros(32, dtype=torch.int32), torch.zeros(129, dtype=torch.int32)
    for gate in (None, zeros(1, 2048)):
        added = {"shared": zeros(4, 2048), "shared_gate": gate, "residual": zeros(4, 2048), "in_place": True}
        moe.experts(zeros(4, 2048), ids, weights, *parameters, gate=Gate(), groups=groups, **added)
    gemma4, llama4 = replace(qwen3, wide_weights=True), Choice(per_token=1, score="chosen_sigmoid")
    routing.route(zeros(16, 2816), zeros(128, 2816), None, None, zeros(128), gemma4)
    routing.route(zeros(16, 5120), zeros(16, 5120), None, None, None, llama4)
    x, ids, weights = zeros(512, 512), torch.zeros(512, 1, dtype=torch.long), zeros(512, 1)
    moe.experts(x, ids, weights, zeros(16, 512, 1024).mT, zeros(16, 512, 512).mT, gate=Gate(), weigh_input=True)
    moe.experts(x, ids, weights, zeros(128, 1408, 512), zeros(128, 512, 704), gate=Gate(act="gelu_tanh"))
    moe.experts(x, ids, weights, zeros(128, 704, 512), zeros(128, 512, 704), gate=Gate(gated=False))


def adapt(
    tokens: int,
    rank: int,
    dtype: torch.dtype,
    experts: int = 1,
    op: Any = lora.lora,
    widths: Sequence[int] = (2048,),
    columns: bool = False,
    model: torch.dtype = torch.bfloat16,
    depth: int = 2048,
) -> None:
    """As of a model with 1B parameters. columns: matrices lie column after column."""
    table = LoraTable(widths, [None for _ in widths], 16, torch.device("cpu"), experts)
    for index, width in enumerate(widths):
        a, b = (torch.zeros(experts, *size, dtype=dtype) for size in ((rank, depth), (width, rank)))
        if columns:
            a, b = (matrix.mT.contiguous().mT for matrix in (a, b))
        table.put(index, 1, LoraWeights(a, b, 1.0) if experts > 1 else LoraWeights(a[0], b[0], 1.0))
    assert table.pointers.any()  # and on the device, as the first step finds them
    rows = AdapterRows(torch.zeros(tokens, dtype=torch.long))
    x = zeros(tokens, depth).to(model) if op is not lora.lora_embedding else rows.slots
    op(x, zeros(tokens, sum(widths)).to(model), table, rows)


def around(x: torch.Tensor, out: torch.Tensor, table: LoraTable, rows: AdapterRows) -> None:
    """The shrink for before a product, and what expands its result."""
    lora.lora(x, out, table, rows, shrunk=lora.shrink(x, table, rows))


def launch_adapters() -> None:
    """Those that take the most registers, and those of a decode step that begin beside a product."""
    gated = partial(lora.lora, gated="silu")
    of = lora.Tiles.of
    lora.Tiles.of = lambda *given, **kind: of(*given, **kind)._replace(fresh=False)  # type: ignore[method-assign,assignment]
    for tokens, rank in ((64, 16), (4096, 64)):
        adapt(tokens, rank, torch.bfloat16, op=partial(lora.lora, deterministic=True), widths=(2048, 512, 512))
    adapt(128, 16, torch.bfloat16, op=partial(lora.lora, settled=True), widths=(2048, 512, 512))
    for rank, dtype in ((16, torch.bfloat16), (32, torch.bfloat16), (16, torch.float32)):
        adapt(128, rank, dtype, op=partial(gated, settled=True), widths=(8192, 8192))
    adapt(128, 64, torch.bfloat16, op=partial(lora.lora, settled=True), depth=8192)
    adapt(64, 16, torch.float32, depth=8192)  # in 16 splits
    adapt(64, 64, torch.bfloat16, widths=(8192, 8192), op=gated)
    adapt(256, 16, torch.bfloat16, widths=(2048, 512, 512))
    adapt(4096, 64, torch.bfloat16, widths=(8192, 8192), op=gated)
    adapt(256, 512, torch.float32, widths=(8192, 8192), op=gated)
    adapt(256, 3, torch.float32, widths=(2048, 512, 512))
    adapt(64, 16, torch.bfloat16, experts=4)
    adapt(256, 16, torch.bfloat16, op=lora.lora_embedding)
    for dtype in (torch.float32, torch.float16):
        adapt(2048, 64, dtype, columns=True, model=torch.float16)
    for dtype, model in ((torch.float32, torch.bfloat16), (torch.float16, torch.float16)):
        adapt(512, 512, dtype, columns=True, model=model, widths=(8192, 8192), op=gated)
    few, half, two = (linear_cuts.Cut(*cut) for cut in ((32, 1, 1), (64, 1, 1), (32, 2, 1)))
    launch_ahead(16, 8192, 8192, depth=2048, cuts=[half])
    launch_ahead(64, 8192, 8192, depth=2048, cuts=[few._replace(rooms=2), half])
    launch_ahead(128, 8192, 8192, depth=2048, cuts=[few._replace(rooms=2), half])
    launch_ahead(128, 2048, 512, 512, depth=2048, cuts=[few, half._replace(splits=2)])
    launch_ahead(128, 2048, depth=8192, cuts=[two], residual=True)
    launch_ahead(128, 8192, 8192, depth=2048, cuts=[half], dtype=torch.float32)
    adapt(16, 16, torch.bfloat16, op=around, widths=(2048, 512, 512))
    adapt(128, 32, torch.float32, op=around, depth=8192)
    lora.Tiles.of = of  # type: ignore[method-assign]


def launch_ahead(
    tokens: int,
    *widths: int,
    depth: int,
    cuts: Sequence[linear_cuts.Cut],
    dtype: torch.dtype = torch.bfloat16,
    residual: bool = False,
    rank: int = 16,
) -> None:
    """Sixteen adapters ahead of products of a model of a billion parameters, of gate and up if of two widths."""
    table = LoraTable(widths, [None] * len(widths), 16, torch.device("cpu"))
    for slot in range(1, 17):
        for index, width in enumerate(widths):
            table.put(index, slot, LoraWeights(zeros(rank, depth).to(dtype), zeros(width, rank).to(dtype), 2.0))
    assert table.pointers is not None  # sent before
    x, weight, arrived = zeros(tokens, depth), zeros(sum(widths), depth), torch.zeros(1024, dtype=torch.int32)
    rows, gated = AdapterRows(torch.zeros(tokens, dtype=torch.long)), "silu" if len(widths) == 2 else None
    settings = {"norm": None, "gated": gated, "residual": None, "scale": 1.0, "beside": lora.AHEAD_SHARED[0]}
    onto = zeros(tokens, sum(widths)) if residual else None
    for cut in cuts:
        sums = linear_streamed.sums_of_splits(x, weight, cut, gated=gated is not None, beside=lora.AHEAD_SHARED[0])
        settings["added"] = lora.ahead(x, onto, table, rows)
        linear_streamed.streamed(x, weight, None, cut=cut, arrived=arrived, sums=sums, **settings)


def launch_recurrent() -> None:
    """A decode step and prompts, of Qwen3-Next, OLMo-hybrid, Falcon-H1, Nemotron-H, Kimi Linear, Ling 3 and Jamba, and LFM2's with
    more taps. Of shapes whose kernels differ in sizes alone, those that take the most registers."""
    for heads, dim in ((32, 128), (30, 192)):
        for weight in (zeros(dim), torch.zeros(dim)):
            gates.gated_rms_norm(zeros(64, heads, dim), zeros(64, heads, dim), weight, 1e-6)
        gates.gated_rms_norm(zeros(64, 1, 3072), zeros(64, 1, 3072), None, 0.0)
        for groups, dim in ((1, 8192), (8, 1024)):
            x, gate = zeros(64, groups, dim), zeros(64, 2 * groups * dim)[:, : groups * dim].view(64, groups, dim)
            gates.gated_rms_norm(x, gate, zeros(groups, dim), 1e-5, True)
        gates.delta_gates(zeros(64, heads), zeros(64, heads), torch.zeros(heads), zeros(heads), 2.0)
    rows_of, by_row = zeros(64, 32, 128), (zeros(64, 32), torch.zeros(32), torch.zeros(4096))
    gates.gated_rms_norm(rows_of, rows_of, zeros(128), 1e-6, sigmoid=True)
    for bound in (None, -5.0):
        gates.delta_gates(rows_of, *by_row, bound=bound, rounded=bound is not None)
    for longest in (1, 100):
        rows = StateRows(*(torch.arange(n) for n in (64, 65)), longest)
        before, after, x = zeros(64, 3 * 2048).chunk(3, dim=1)
        causal_conv.causal_conv(x, zeros(2048, 7), None, zeros(4, 6, 2048), rows, gates=(before, after))
        for channels, bias in ((8192, zeros(8192)), (200, None)):
            x, kept = zeros(64, 2 * channels)[:, :channels], zeros(4, 3, channels)
            causal_conv.causal_conv(x, zeros(channels, 4), bias, kept, rows, activation="silu")
        for key_heads, heads, key_dim, dim in ((16, 32, 128, 128), (30, 30, 96, 192), (4, 4, 256, 256)):
            q, k = (zeros(64, 2, key_heads, key_dim)[:, part] for part in range(2))
            decay, state = torch.zeros(64, heads), torch.zeros(2, heads, key_dim, dim)
            inputs = q, k, zeros(64, heads, dim), decay, zeros(64, heads)
            recurrent.gated_delta_rule(*inputs, state, rows, normalise=True)
        heads, state = zeros(64, 32, 128), torch.zeros(2, 32, 128, 128)
        recurrent.gated_delta_rule(heads, heads, heads, heads.float(), zeros(64, 32), state, rows, normalise=True)
        x, rates, b = zeros(64, 1, 8192), torch.zeros(1, 8192, 16), zeros(64, 1, 16)
        options = {"dt_bias": zeros(1, 8192), "dt_limit": (0.0, float("inf")), "a_log": True}
        recurrent.selective_scan(x, x, rates, b, b, zeros(1, 8192), torch.zeros(2, 1, 8192, 16), rows, **options)
        for heads, groups, dim, size in ((24, 1, 128, 256), (96, 8, 80, 128)):
            x, b, c = (zeros(64, n, size) for n, size in ((heads, dim), (groups, size), (groups, size)))
            a_log, state = size == 256, torch.zeros(2, heads, dim, size)
            a, options = zeros(heads) if a_log else torch.zeros(heads), {"dt_limit": (0.0, float("inf"))}
            options |= {"dt_bias": zeros(heads), "a_log": a_log}
            recurrent.selective_scan(x, zeros(64, heads), a, b, c, zeros(heads), state, rows, **options)
        half = partial(torch.zeros, dtype=torch.float16)
        q, v, state = half(64, 16, 128), half(64, 32, 128), torch.zeros(2, 32, 128, 128)
        recurrent.gated_delta_rule(q, q, v, torch.zeros(64, 32), half(64, 32), state, rows, normalise=True)
        x, b, dt, state = half(64, 24, 128), half(64, 1, 256), half(64, 24), torch.zeros(2, 24, 128, 256)
        options = {"dt_bias": half(24), "dt_limit": (0.0, 1.0)}
        recurrent.selective_scan(x, dt, torch.zeros(24), b, b, half(24), state, rows, **options)


if __name__ == "__main__":
    as_on(90)
    of_layers = [
        fp8,
        norm_rotary,
        latent_attention,
        linear,
        linear_invariant,
        linear_streamed,
        decode_window,
        checksum,
        copies,
        sampling,
        truncation,
        adjustments,
        constraints,
        grouping,
        moe,
        routing,
        lora,
        lora_tiles,
    ]
    of_layers += [causal_conv, gates, recurrent, recurrent_chunks]
    for module in of_layers:
        for name in [
            n for n in vars(module) if n.endswith(("_kernel", "_sample_splits", "_sample_rows", "_thresholds"))
        ]:
            setattr(module, name, Recorder(getattr(module, name)))
    launch(2304, 9216, 8, 4, 256)  # Gemma 2 2B
    launch_fp8(4096, 12288)  # Qwen3 8B
    launch_others(5376, 32, 4, 512)  # Gemma 4 31B
    launch_centred(2048, 8, 8, 256, 64, grouped=True)  # Pythia 1B
    launch_centred(4096, 32, 8, 128, 128, grouped=False)  # Command R7B
    launch_latent(128, 128, 64, 128)  # DeepSeek V3
    launch_latent(20, 192, 64, 256)  # GLM-4.7-Flash
    launch_routed()
    launch_adapters()
    launch_recurrent()
    print(json.dumps([build(*recorded) for recorded in launches]))
