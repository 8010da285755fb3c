"""The table of device operations. An engine picks one table when it is built and never asks again what device it is on.

``reference`` has each operation in plain torch: the oracle, and most of what a CPU runs, which has ``cpu_attention``,
``cpu_linear`` and ``cpu_recurrent`` besides. ``triton_ops`` has the tables of Triton's kernels:

- Attention: ``attention``, launched as ``attention_config`` says and planned by ``attention_plan`` and ``attention_splits``, in
  ``attention_decode``, ``attention_prefill``, ``attention_tiles`` and ``attention_write``; ``latent_attention``; ``norm_rotary``.
- Projections: ``linear``, ``linear_measured``, ``linear_streamed`` with ``linear_cuts``, ``linear_invariant``; ``fp8``; ``lora``,
  ``lora_shrink``, ``lora_expand``, ``lora_inside``.
- Experts: ``routing``, ``moe``, ``grouping``. Recurrences: ``recurrent``, ``recurrent_chunks``, ``causal_conv``, ``gates``.
- Sampling: ``sampling``, ``truncation``, ``constraints``, ``decode_window``.
- ``checksum`` of weights, and ``copies``; ``launch``, how kernels are launched.

``errors``, ``host_memory`` and ``interrupts`` are here because all rooms may import them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from stoker.kernels import cpu_attention, cpu_linear, cpu_recurrent
from stoker.kernels.errors import InvalidConfigError
from stoker.kernels.reference import (
    attention,
    attention_plan,
    checksum,
    constraints,
    copies,
    decode_window,
    fp8,
    gates,
    linear,
    lora,
    moe,
    norm_rotary,
    recurrent,
    routing,
    sampling,
)
from stoker.kernels.reference.constraints import ConstraintRows
from stoker.kernels.reference.fp8 import FP8
from stoker.kernels.reference.lora import AdapterRows, LoraTable
from stoker.kernels.reference.routing import Routing

_log = logging.getLogger("stoker")


@dataclass(frozen=True, kw_only=True)
class Ops:
    """One implementation of every operation; the signatures and shapes are those of ``kernels/reference/``."""

    # Decoder layers.
    rms_norm: Callable[..., Tensor]
    act_mul: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    # LoRA.
    lora: Callable[..., Tensor]
    lora_embedding: Callable[[Tensor, Tensor, LoraTable, AdapterRows], Tensor]
    # Mixtures of experts.
    route: Callable[..., Routing]
    experts: Callable[..., Tensor]
    # Attention over the paged KV cache.
    qk_norm_rotary_write: Callable[..., Tensor]
    latent_heads_write: Callable[..., Tensor]
    plan_attention: Callable[..., Any]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    paged_attention: Callable[..., Tensor]
    # Layers with recurrent states.
    causal_conv: Callable[..., Tensor]
    gated_delta_rule: Callable[..., Tensor]
    selective_scan: Callable[..., Tensor]
    gated_rms_norm: Callable[..., Tensor]
    delta_gates: Callable[..., tuple[Tensor, Tensor]]
    # Sampling and scoring.
    gumbel_noise: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    sample: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]
    token_logprobs: Callable[[Tensor, Tensor, Tensor], Tensor]
    score_tokens: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    truncate: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    constrain: Callable[[Tensor, ConstraintRows, Tensor, Tensor], Tensor]
    follow: Callable[[Tensor, ConstraintRows, Tensor, int], None]
    # From one decode step to the next.
    advance: Callable[..., None]
    # Weights.
    checksums: Callable[..., Tensor]
    prepare_checksums: Callable[..., Callable[[], Tensor]]
    copy_each: Callable[[Sequence[Tensor], Sequence[Tensor]], None]
    quantise_rows: Callable[[Tensor, Tensor, Tensor], None]

    # -- what an implementation tells of itself ---------------------------------------------------------------------

    # Whether a plan of decode rows is the same tensors for every batch with as many rows, so that a captured step that
    # uses one serves them all.
    static_plans: bool = False
    # How many keys neighbouring rows of a decode step have in common from the first on where attention reads those together;
    # ``plan_attention`` is then told whether to look for such rows. None: it always is to.
    shared_from: int | None = None
    # Bytes of attention's workspace on the device, of (most rows, columns of the block table, block size, query heads, value
    # dimension): it takes so much for each pair of the last two that there is among the layers.
    attention_workspace: Callable[..., int] | None = None
    # Bytes that a layer with recurrent states takes while it runs, of (most tokens, heads, state's key dimension, dtype) and
    # whether it is the gated delta rule; layers take them one after the other.
    recurrent_workspace: Callable[..., int] | None = None
    # The dtypes in which ``lora`` takes an adapter's matrices; None: any.
    adapter_dtypes: frozenset[torch.dtype] | None = None
    # ``lora`` of ``linear``, of (x, weight, bias, table, rows) and what else both take, as fast as they can be together.
    adapted_linear: Callable[..., Tensor] | None = None
    # What was measured so far: by rows, weight and what else the operation does, the ways to multiply and their times, the
    # one that is taken first.
    matmuls: Mapping[str, str] = field(default_factory=dict)


REFERENCE = Ops(
    rms_norm=norm_rotary.rms_norm,
    act_mul=norm_rotary.act_mul,
    linear=linear.linear,
    quantise_rows=fp8.quantise_rows,
    lora=lora.lora,
    lora_embedding=lora.lora_embedding,
    route=routing.route,
    experts=moe.experts,
    qk_norm_rotary_write=attention.qk_norm_rotary_write,
    latent_heads_write=attention.latent_heads_write,
    gated_rms_norm=gates.gated_rms_norm,
    delta_gates=gates.delta_gates,
    plan_attention=attention_plan.plan_attention,
    write_kv=attention.write_kv,
    paged_attention=attention.paged_attention,
    causal_conv=recurrent.causal_conv,
    gated_delta_rule=recurrent.gated_delta_rule,
    selective_scan=recurrent.selective_scan,
    gumbel_noise=sampling.gumbel_noise,
    sample=sampling.sample,
    token_logprobs=sampling.token_logprobs,
    score_tokens=sampling.score_tokens,
    truncate=sampling.truncate,
    constrain=constraints.constrain,
    follow=constraints.follow,
    advance=decode_window.advance,
    checksums=checksum.checksums,
    prepare_checksums=checksum.prepare_checksums,
    copy_each=copies.copy_each,
)

CPU = replace(
    REFERENCE,
    linear=cpu_linear.linear,
    plan_attention=cpu_attention.plan_attention,
    paged_attention=cpu_attention.paged_attention,
    gated_delta_rule=cpu_recurrent.gated_delta_rule,
    selective_scan=cpu_recurrent.selective_scan,
)


def check_gpu(device: torch.device) -> None:
    """Raises ``InvalidConfigError`` where an engine's kernels cannot run: on GPUs before Ampere, and on other makers'."""
    if device.type != "cuda":
        return
    if torch.version.hip is not None:
        needed = "are for GPUs of NVIDIA"
    elif torch.cuda.get_device_capability(device) < (8, 0):
        needed = "need a GPU of compute capability 8.0 or more (Ampere)"
    else:
        return
    raise InvalidConfigError(
        f"the engine's kernels {needed}, and {device} is {torch.cuda.get_device_name(device)}: use another GPU, or set "
        "EngineConfig(device='cpu')"
    )


def ops_for(
    device: torch.device,
    layers: Iterable[tuple[int, int, torch.dtype]] = (),
    *,
    kv_dtype: torch.dtype | None = None,
    in_fp8: bool = False,
    deterministic: bool = False,
) -> Ops:
    """The operations for a device: Triton's on CUDA; a CPU has attention, projections and recurrences of its own, all else
    the torch reference.

    layers: key dimension, value dimension and dtype of what attention layers compute; kv_dtype: of what is kept of it, where
    it is another; in_fp8: whether weights are in fp8. Raises ``InvalidConfigError`` where the device has no such numbers.
    Where Triton's kernels do not run a layer, attention is the torch reference, and the log says why. deterministic: a row's
    result has the same bits alone and among any others; raises ``InvalidConfigError`` where there are no kernels for that.
    """
    if device.type != "cuda":
        if deterministic:
            raise InvalidConfigError(
                f"deterministic=True needs CUDA kernels, and the model is on {device}: leave it out; in fp32 a request's "
                "tokens do not depend on its neighbours there either"
            )
        return CPU if device.type == "cpu" else REFERENCE
    from stoker.kernels import triton_ops  # here, because Triton is not to be had everywhere
    from stoker.kernels.attention_config import unsupported

    narrow = {"kv_cache_dtype": kv_dtype == FP8, "quantization": in_fp8}
    for name in (name for name, is_asked in narrow.items() if is_asked):
        if torch.cuda.get_device_capability(device) < (8, 9):
            raise InvalidConfigError(
                f"{name}='fp8' needs a GPU of compute capability 8.9 or more, and {device} has "
                f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}: leave it out"
            )
    table = triton_ops.DETERMINISTIC if deterministic else triton_ops.measured()
    reason = next(filter(None, (unsupported(*layer) for layer in layers)), None)
    if reason is None:
        return table
    if deterministic:
        raise InvalidConfigError(f"deterministic=True cannot be had: {reason}")
    _log.warning("attention runs as torch operations, without CUDA graphs, which is slow: %s", reason)
    names = ("plan_attention", "write_kv", "paged_attention")
    return replace(
        table, static_plans=False, attention_workspace=None, **{name: getattr(REFERENCE, name) for name in names}
    )
