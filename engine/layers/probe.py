"""What all probes of a model's parts need: positions, tolerances, noise for weights, and a stand-in for a step's context."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from stoker.kernels.reference.norm_rotary import latent_heads, qk_norm_rotary
from stoker.kernels.reference.recurrent import StateRows, causal_conv, gated_delta_rule, selective_scan

# Relative to the most that a part adds to its input: a few roundings of the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
POSITIONS = torch.tensor([0, 1, 2, 5, 11, 30, 31], device="cpu")
FAR = 1e4  # beyond any bound that a module may put on its numbers
_LOW_BOUND = 0.3
_DRAWN = 1_000_003  # random numbers that are drawn; a prime, so that rows differ where they are repeated


def has_tensors(activation: Any) -> bool:
    """Whether an activation has parameters, as xIELU: training would turn it into another one."""
    return isinstance(activation, nn.Module) and any(
        True for _ in itertools.chain(activation.parameters(), activation.buffers())
    )


def clipping_of(module: nn.Module) -> Any:
    """The configuration that has the bound ``clip_qkv`` of what a module projects; None where it clips nothing."""
    config = getattr(module, "config", None)
    return None if getattr(config, "clip_qkv", None) is None else config


@contextmanager
def clipping_within_reach(model: nn.Module) -> Iterator[None]:
    """Context manager: a model clips at so low a bound that it matters. At its own none may be clipped, and no fault would show."""
    bounds = {id(c): (c, c.clip_qkv) for c in map(clipping_of, model.modules()) if c is not None}
    try:
        for config, _ in bounds.values():
            config.clip_qkv = _LOW_BOUND
        yield
    finally:
        for config, bound in bounds.values():
            config.clip_qkv = bound


@contextmanager
def in_full_precision() -> Iterator[None]:
    """Context manager: fp32 is multiplied in fp32. A trainer may allow TF32, whose rounding would look like a fault."""
    matmul: Any = torch.backends.cuda.matmul
    before, older = matmul.fp32_precision, None
    with suppress(RuntimeError):  # torch's older setting cannot be read where the newer one says otherwise
        older = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        matmul.fp32_precision = before


@contextmanager
def on_noise(module: nn.Module, beside: nn.Module | None) -> Iterator[None]:
    """Context manager: a module and all below it have noise for weights; ``beside`` keeps its own. All in fp32, on the CPU.

    The noise is about as large as weights are, and shows what a module computes whatever its weights are now.
    """
    parts: list[tuple[Any, bool]] = [(part, True) for part in module.modules()]
    parts += [(part, False) for part in (() if beside is None else beside.modules())]
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    generator, made = torch.Generator().manual_seed(0), dict[int, Tensor]()
    by_default = torch.get_default_device().type == "cpu"  # a mode of torch's functions costs as much as they do here
    with nullcontext() if by_default else torch.device("cpu"), torch.autocast("cpu", enabled=False):
        try:
            for part, noisy in parts:
                for registry in (part._parameters, part._buffers):
                    before.append((registry, dict(registry)))
                    for name, tensor in registry.items():
                        if tensor is None:
                            continue
                        if id(tensor) not in made:
                            computed = not tensor.is_floating_point() or name in part._non_persistent_buffers_set
                            made[id(tensor)] = (
                                _noise(tensor.shape, generator) if noisy and not computed else _as_fp32(tensor)
                            )
                        registry[name] = made[id(tensor)]
            yield
        finally:
            for registry, tensors in before:
                registry.update(tensors)


def _noise(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Noise in fp32: around 1 for norms, as large as a linear's weights for others. All of many experts get the same."""
    each = shape if shape.numel() <= _DRAWN else shape[-2:]
    noise = torch.randn(min(each.numel(), _DRAWN), generator=generator, device="cpu", dtype=torch.float32)
    noise = noise * shape[-1] ** -0.5 if len(shape) > 1 else 1.0 + 0.3 * noise
    if each.numel() > len(noise):
        noise = noise.repeat(-(-each.numel() // len(noise)))[: each.numel()]
    return noise.view(each).expand(shape)


def _as_fp32(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype)


def _one_sequence(x: Tensor) -> StateRows:
    starts = torch.tensor([0, x.shape[0]], device=x.device)
    return StateRows(starts[:1], starts, x.shape[0])


class Recorder:
    """Stands in for a step's context: mixes query, key and value so that a fault in any of them shows, and notes its arguments."""

    images = None
    rotary = None

    def __init__(self, same_keys: Mapping[int, int]) -> None:
        """same_keys: of layers that attend to the keys of another, which one."""
        self.options: list[dict[str, Any]] = []
        self.same_keys = same_keys
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        self.options.append(options)
        self.kept[self.same_keys.get(layer, layer)] = key, value
        group = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
        weights = torch.einsum("thd,shd->hts", query, key).mul(options["scale"]).softmax(-1)
        return torch.einsum("hts,shd->thd", weights, value).contiguous()  # as a step's

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        state = x.new_zeros(1, weight.shape[1] - 1, x.shape[1])
        return causal_conv(x, weight, bias, state, _one_sequence(x), **options)

    def delta_rule(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, *, normalise: bool
    ) -> Tensor:
        size = (1, value.shape[1], key.shape[2], value.shape[2])
        state = torch.zeros(size, dtype=torch.float32, device=value.device)
        return gated_delta_rule(query, key, value, decay, beta, state, _one_sequence(value), normalise=normalise)

    def scan(
        self,
        layer: int,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        **options: Any,
    ) -> Tensor:
        state = torch.zeros((1, *x.shape[1:], B.shape[2]), dtype=torch.float32, device=x.device)
        return selective_scan(x, dt, A, B, C, D, state, _one_sequence(x), **options)

    def attend_projected(
        self,
        layer: int,
        qkv: Tensor,
        heads: int,
        kv_heads: int,
        norm: Any,
        cos_sin: Any,
        *,
        interleaved: bool,
        factor: Tensor | None,
        grouped: bool,
        **options: Any,
    ) -> Tensor:
        query, *own = qk_norm_rotary(qkv, heads, kv_heads, norm, cos_sin, interleaved, factor, grouped)
        return self.attend(layer, query, *(own if kv_heads else self.kept[self.same_keys[layer]]), **options)

    def attend_latent(
        self,
        layer: int,
        query: Tensor,
        key_value: Tensor,
        key_rotary: Tensor,
        cos_sin: Any,
        *,
        interleaved: bool,
        factor: Tensor | None,
        **options: Any,
    ) -> Tensor:
        return self.attend(layer, *latent_heads(query, key_value, key_rotary, cos_sin, interleaved, factor), **options)
