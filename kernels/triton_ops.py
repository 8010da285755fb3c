"""The tables of operations by Triton's kernels. Importing this file imports Triton."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from stoker.kernels import checksum, copies, fp8, launch, norm_rotary
from stoker.kernels.attention import latent, paged, plan
from stoker.kernels.experts import moe, routing
from stoker.kernels.linear import invariant, linear
from stoker.kernels.linear.measured import MeasuredLinear
from stoker.kernels.lora import lora
from stoker.kernels.ops import REFERENCE, Ops
from stoker.kernels.recurrent import causal_conv, chunks, gates, recurrent
from stoker.kernels.sampling import adjustments, constraints, decode_window, sampling, truncation

TRITON = replace(
    REFERENCE,
    rms_norm=norm_rotary.rms_norm,
    act_mul=norm_rotary.act_mul,
    linear=linear.linear,
    quantise_rows=fp8.quantise_rows,
    lora=lora.lora,
    lora_embedding=lora.lora_embedding,
    adapter_dtypes=frozenset(launch.TYPES),
    route=routing.route,
    experts=moe.experts,
    qk_norm_rotary_write=norm_rotary.qk_norm_rotary_write,
    latent_heads_write=latent.latent_heads_write,
    gated_rms_norm=gates.gated_rms_norm,
    delta_gates=gates.delta_gates,
    plan_attention=plan.plan_attention,
    write_kv=paged.write_kv,
    paged_attention=paged.paged_attention,
    causal_conv=causal_conv.causal_conv,
    gated_delta_rule=recurrent.gated_delta_rule,
    selective_scan=recurrent.selective_scan,
    gumbel_noise=sampling.gumbel_noise,
    sample=sampling.sample,
    token_logprobs=sampling.token_logprobs,
    score_tokens=sampling.score_tokens,
    adjust=adjustments.adjust,
    count=adjustments.count,
    truncate=truncation.truncate,
    constrain=constraints.constrain,
    follow=constraints.follow,
    advance=decode_window.advance,
    checksums=checksum.checksums,
    prepare_checksums=checksum.prepare_checksums,
    copy_each=copies.copy_each,
    prepare_copies=copies.prepare_copies,
    static_plans=True,
    shared_from=plan.LEAST_SHARED,
    attention_workspace=plan.workspace_bytes,
    recurrent_workspace=chunks.workspace_bytes,
)


def measured() -> Ops:
    """TRITON, with matmuls of some dozens of rows by what one engine finds to be the fastest."""
    linear = MeasuredLinear()
    return replace(TRITON, linear=linear, adapted_linear=linear.adapted, matmuls=linear.chosen)


# The same bits for a row alone and among any others, and in any pieces, where TRITON's depend on how many there are.
DETERMINISTIC = replace(
    TRITON,
    linear=invariant.linear,
    lora=partial(lora.lora, deterministic=True),
    lora_embedding=partial(lora.lora_embedding, deterministic=True),
    route=routing.route_invariant,
    experts=partial(moe.experts, deterministic=True),
    gated_delta_rule=partial(recurrent.gated_delta_rule, deterministic=True),
    selective_scan=partial(recurrent.selective_scan, deterministic=True),
    plan_attention=partial(plan.plan_attention, deterministic=True),
    shared_from=None,
    recurrent_workspace=None,  # these go token after token
)
