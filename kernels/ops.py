"""The tables of device operations. An engine picks one when it is built, and never asks again what device it is on.

``reference`` has each operation in plain torch. It is the oracle for all others, and most of what a CPU runs; what is faster
there is in ``cpu``: ``attention``, ``linear``, ``recurrent``, ``sampling``. ``triton_ops`` has the tables of Triton's kernels:

- ``attention``: ``paged`` launches it, ``config`` says how, ``plan`` and ``splits`` divide the work. Its kernels: ``decode``,
  ``prefill``, ``tiles``, ``write``; ``latent`` for latent attention's heads. Before it: ``norm_rotary``.
- ``linear``, the projections: ``linear`` by the vendor's library, ``streamed`` with ``cuts`` for few rows, ``measured`` for the
  fastest, ``invariant`` for the same bits in any batch. Weights in ``fp8``.
- ``lora``, adapters over them: ``lora`` launches ``tiles``, ``shrink``, ``expand``; ``ahead`` runs before the product.
- ``experts``: ``routing``, ``moe``, and ``grouping``, which adapters use too.
- ``recurrent``, layers that keep states: ``causal_conv``, ``gates``, ``recurrent`` token by token, ``chunks``.
- ``sampling``: ``adjustments``, ``constraints``, ``truncation``, ``sampling``, and ``decode_window`` for the next step.
- Weights: ``checksum``, ``copies``. How any kernel is launched: ``launch``.

``collectives``, ``errors``, ``host_memory`` and ``interrupts`` are here because every folder may import from this one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from stoker.kernels.cpu import attention as cpu_attention
from stoker.kernels.cpu import linear as cpu_linear
from stoker.kernels.cpu import recurrent as cpu_recurrent
from stoker.kernels.cpu import sampling as cpu_sampling
from stoker.kernels.errors import InvalidConfigError
from stoker.kernels.reference import (
    adjustments,
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
from stoker.kernels.reference.adjustments import Banned, Bias, Penalties
from stoker.kernels.reference.constraints import ConstraintRows
from stoker.kernels.reference.fp8 import FP8
from stoker.kernels.reference.lora import AdapterRows, LoraTable
from stoker.kernels.reference.routing import Routing

_log = logging.getLogger("stoker")


@dataclass(frozen=True, kw_only=True)
class Ops:
    """One implementation of every operation. ``kernels/reference/`` documents signatures and shapes."""

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
    adjust: Callable[[Tensor, Bias | None, Penalties | None, Banned | None], Tensor]
    count: Callable[[Tensor, Tensor, Tensor], None]
    truncate: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    constrain: Callable[[Tensor, ConstraintRows, Tensor, Tensor], Tensor]
    follow: Callable[[Tensor, ConstraintRows, Tensor, int], None]
    # From one decode step to the next.
    advance: Callable[..., None]
    # Weights.
    checksums: Callable[..., Tensor]
    prepare_checksums: Callable[..., Callable[[], Tensor]]
    copy_each: Callable[[Sequence[Tensor], Sequence[Tensor]], None]
    prepare_copies: Callable[..., Callable[[Sequence[Tensor], Sequence[Tensor]], None]]
    quantise_rows: Callable[[Tensor, Tensor, Tensor], None]

    # -- what an implementation says about itself -------------------------------------------------------------------

    # Whether plans of decode rows are the same tensors for every batch with that many rows. A captured step then serves
    # all such batches.
    static_plans: bool = False
    # From how many shared first keys on attention reads them once for neighbouring decode rows. ``plan_attention`` is then
    # told whether to look for such rows. None: it always looks.
    shared_from: int | None = None
    # How many rows of logits over so many tokens are sampled at a time; None: all of a step.
    rows_together: Callable[[int], int] | None = None
    # Bytes of attention's workspace on the device, as a function of (most rows, columns of the block table, block size, query
    # heads, value dimension). There is one workspace for each pair of the last two that occurs among the layers.
    attention_workspace: Callable[..., int] | None = None
    # Bytes that a layer with recurrent states takes while it runs, as a function of (most tokens, heads, state's key dimension,
    # dtype, whether it is the gated delta rule). Layers take them one after the other.
    recurrent_workspace: Callable[..., int] | None = None
    # The dtypes in which ``lora`` takes an adapter's matrices; None: any.
    adapter_dtypes: frozenset[torch.dtype] | None = None
    # ``linear`` followed by ``lora``, in one operation where that is faster: (x, weight, bias, table, rows, and the options of
    # both).
    adapted_linear: Callable[..., Tensor] | None = None
    # What was measured so far. Key: rows, weight and what else the operation does. Value: the ways to multiply with their
    # times, first the one that is used.
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
    adjust=adjustments.adjust,
    count=adjustments.count,
    truncate=sampling.truncate,
    constrain=constraints.constrain,
    follow=constraints.follow,
    advance=decode_window.advance,
    checksums=checksum.checksums,
    prepare_checksums=checksum.prepare_checksums,
    copy_each=copies.copy_each,
    prepare_copies=copies.prepare_copies,
)

CPU = replace(
    REFERENCE,
    linear=cpu_linear.linear,
    adapted_linear=cpu_linear.adapted,
    plan_attention=cpu_attention.plan_attention,
    paged_attention=cpu_attention.paged_attention,
    gated_delta_rule=cpu_recurrent.gated_delta_rule,
    selective_scan=cpu_recurrent.selective_scan,
    rows_together=cpu_sampling.rows_together,
    adjust=cpu_sampling.adjust,
    truncate=cpu_sampling.truncate,
)


def check_gpu(device: torch.device) -> None:
    """Raise ``InvalidConfigError`` where the kernels cannot run: on GPUs before Ampere, and on GPUs of other makers."""
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
    """The operations for a device: Triton's kernels on CUDA, ``CPU`` on a CPU, the reference elsewhere.

    layers: key dimension, value dimension and dtype of each attention layer. kv_dtype: dtype of the KV cache, where it is
    another. in_fp8: whether weights are in fp8. deterministic: a row's result has the same bits alone and in any batch.
    Where Triton's kernels cannot run a layer, attention is the torch reference, and the log says why. Raises
    ``InvalidConfigError`` where the device has no fp8, or no kernels that are deterministic.
    """
    if device.type != "cuda":
        if deterministic:
            raise InvalidConfigError(
                f"deterministic=True needs CUDA kernels, and the model is on {device}: leave it out; in fp32 a request's "
                "tokens do not depend on its neighbours there either"
            )
        return CPU if device.type == "cpu" else REFERENCE
    from stoker.kernels import triton_ops  # here, because Triton is not installed everywhere
    from stoker.kernels.attention.config import unsupported

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
