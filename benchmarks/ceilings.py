"""What the machine could do: copy bandwidth and matmul rate, measured now, and what they allow a rollout."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], object], device: str) -> float:
    """Of one call, until the device is through with it."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def timed(call: Callable[[], object], device: str) -> float:
    """``seconds``, with the garbage of what was before collected first."""
    gc.collect()
    return seconds(call, device)


def best_time(call: Callable[[], object], device: str, budget_s: float = 0.5) -> float:
    """Seconds of the fastest of many calls: a ceiling is what the machine does when nothing disturbs it."""
    call()
    synchronize(device)
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 3 or time.perf_counter() < end:
        times.append(seconds(call, device))
    return min(times)


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """bandwidth: bytes/s, read plus written. flops: FLOP/s of the fastest of ``matmuls``."""

    bandwidth: float
    flops: float
    matmuls: dict[str, float]
    weight_bytes: int  # of the parameters a decode step reads
    linear_params: int  # with those of the head, which
    head_params: int  # only what is sampled or scored needs
    kv_bytes: int  # of one token, all layers
    state_bytes: int  # of one sequence, all layers; read and written by each step

    def step_s(self, rows: int, context_tokens: int) -> float:
        """Shortest decode step of ``rows`` sequences that hold ``context_tokens`` keys between them."""
        matmuls = max(self.weight_bytes / self.bandwidth, 2 * self.linear_params * rows / self.flops)
        return matmuls + (context_tokens * self.kv_bytes + 2 * rows * self.state_bytes) / self.bandwidth

    def rollout_s(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], slots: int) -> float:
        """Shortest rollout: each different prompt computed once, up to the logits that its samples draw their first tokens
        from; then a full set of slots as long as requests wait."""
        body = self.linear_params - self.head_params
        seconds = sum(2 * (body * len(p) + self.head_params) / self.flops for p in {tuple(p) for p in prompts})
        waiting = [(len(p), n) for p, n in zip(prompts, lengths, strict=True)][::-1]
        running: list[list[int]] = []  # [context, tokens left]
        while waiting or running:
            while waiting and len(running) < slots:
                context, left = waiting.pop()
                if left > 1:
                    running.append([context + 1, left - 1])
            if running:
                seconds += self.step_s(len(running), sum(context for context, _ in running))
            running = [[context + 1, left - 1] for context, left in running if left > 1]
        return seconds


def kv_token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers that attend. config: of a model of images, too."""
    config = config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = config.num_hidden_layers - _delta_nets(config)
    return int(2 * layers * config.num_key_value_heads * head_dim * dtype.itemsize)


def state_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes that gated delta nets keep of one sequence: a state in fp32, and the last inputs of the convolution."""
    if not (layers := _delta_nets(config)):
        return 0
    key_dim = config.linear_num_key_heads * config.linear_key_head_dim
    value_dim = config.linear_num_value_heads * config.linear_value_head_dim
    inputs = (config.linear_conv_kernel_dim - 1) * (2 * key_dim + value_dim)
    return int(layers * (config.linear_key_head_dim * value_dim * 4 + inputs * dtype.itemsize))


def _delta_nets(config: Any) -> int:
    """How many layers are such, and do not attend."""
    return int((getattr(config, "layer_types", None) or []).count("linear_attention"))


def _multiply(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    for weight in weights:
        F.linear(x, weight)


def measure(model: PreTrainedModel, device: str, rows: Sequence[int], kv_tokens: int) -> Ceiling:
    """Ceilings for the text part of a model: matmuls of its shapes with ``rows`` rows, and copies of what a step reads.

    kv_tokens: about how many tokens a full step of the fewest ``rows`` attends to. On a CPU they decide, with the weights,
    which cache level the bandwidth is that of.
    """
    modules: list[nn.Module] = [*model.get_decoder().modules(), model.get_output_embeddings()]
    weights = [m.weight for m in modules if isinstance(m, nn.Linear)]
    weight_bytes = sum(w.numel() * w.element_size() for w in weights)
    # All layers in turn, so that no cache serves one weight again and again.
    params = sum(w.numel() for w in weights)
    matmuls = {}
    for count in rows:
        seconds = 0.0
        for shape in {tuple(w.shape) for w in weights}:
            same = [w for w in weights if tuple(w.shape) == shape]
            x = torch.randn(count, shape[1], device=device, dtype=same[0].dtype)
            seconds += best_time(partial(_multiply, x, same), device, 0.2)
        matmuls[f"model shapes, {count} rows"] = 2 * params * count / seconds
    big = max(weights, key=torch.Tensor.numel)
    x = torch.randn(4096 if device == "cuda" else 512, big.shape[1], device=device, dtype=big.dtype)
    matmuls[f"{x.shape[0]} rows of the largest"] = (
        2 * big.numel() * x.shape[0] / best_time(lambda: F.linear(x, big), device)
    )
    kv_bytes, of_states = (count(model.config, weights[0].dtype) for count in (kv_token_bytes, state_bytes))
    read = weight_bytes + kv_tokens * kv_bytes + min(rows) * of_states
    return Ceiling(
        bandwidth=copy_bandwidth(2**30 if device == "cuda" else read, device),
        flops=max(matmuls.values()),
        matmuls=matmuls,
        weight_bytes=weight_bytes,
        linear_params=params,
        head_params=model.get_output_embeddings().weight.numel(),
        kv_bytes=kv_bytes,
        state_bytes=of_states,
    )


def copy_bandwidth(size: int, device: str) -> float:
    """Bytes/s, read plus written, of copies of so many bytes."""
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / best_time(lambda: target.copy_(source), device)
