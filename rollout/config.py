"""``EngineConfig``: an engine's settings, validated once and then frozen."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch

from stoker.kernels.errors import InvalidConfigError
from stoker.rollout.user_values import as_int, is_int, shown

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of a ``RolloutEngine``.

    - dtype: compute dtype, a ``torch.dtype`` of 16 bits or more, or its name. ``"auto"`` is the model's own. For any other
      the engine keeps a copy of the weights, which ``update_weights`` refreshes. device: ``"auto"`` is where the
      model is (``from_pretrained``: CUDA if there is one).
    - max_num_seqs: most sequences in one step. max_num_batched_tokens: most tokens in one step (the prefill chunk).
    - max_model_len: most tokens of prompt plus completion; None is the model's ``max_position_embeddings``.
    - block_size: tokens in one KV block.
    - kv_cache_memory: bytes of the KV cache, recurrent states among them, as an int or as text such as ``"4GiB"``.
      ``"auto"`` takes what ``max_num_seqs`` sequences of ``max_model_len`` need, and at most 30 % of the memory that is free
      at the time (host memory on CPU, device memory on CUDA, where attention's workspace counts in); where states would
      take over half of that, ``max_num_seqs`` is lowered, with a warning.
    - kv_cache_dtype: ``"auto"`` keeps keys and values as the model computes them, ``"fp8"`` in 8 bits (e4m3), so that a
      block takes half the memory of one in 16 bits. All that is sampled and scored is then of a model that sees rounded keys
      and values; log-probabilities are its own. On CUDA from compute capability 8.9 on.
    - quantization: ``"fp8"`` has decoder layers multiply by weights that are rounded to 8 bits (e4m3, each row times a power
      of two), which are kept beside the trainer's, or in place of a mirror of these, and made anew when they change. A decode
      step then reads half of what one in 16 bits does; prompts are computed on the same rounded weights, and
      log-probabilities are those of that model. Embeddings, head, routers and norms stay as they are, and so does a layer
      that runs the model's own code. On CUDA from compute capability 8.9 on; on a CPU it works, and slows down.
    - enable_prefix_caching: reuse the blocks of a prompt for others that begin with the same tokens, also after it has ended.
    - decode_window: most decode steps that run before the scheduler plans again.
    - use_graphs: capture decode steps in CUDA graphs. ``"auto"`` does so where possible; True raises an error where it is not.
    - deterministic: a request's tokens and log-probabilities are the same to the last bit alone and among any others,
      chunked, preempted or found in the prefix cache. On CUDA, for models whose layers are all fused, with experts where
      their router is a known one; somewhat slower.
    - score_chunk_tokens: most tokens whose logits exist at one time while given tokens are scored: this many times the
      vocabulary, in the dtype, twice where the model's class scales or caps them. More than some hundreds gain no speed.
    - check_finite_weights: refuse an update whose weights hold NaN or Inf, naming the tensors; one more pass over them.
    - gather_memory: the most that gathering the weights of a sharded trainer takes on each rank besides the engine's copy,
      as ``kv_cache_memory``: buckets of which two are under way, with the memory Gloo needs for them. Those in fp8 take
      one layer's besides.
    - tensor_parallel_size: how many consecutive ranks run one model together, each with a share of every layer's heads and
      widths. All of them make the same calls of ``generate_batch`` and ``score``, each with prompts of its own (or none). For
      models whose layers are all fused.
    - max_loras: most adapters in use at one time. max_lora_rank: most rank one of them may have.
    - seed: where requests without a seed of their own draw theirs from.

    Raises ``InvalidConfigError`` naming the field.
    """

    dtype: str | torch.dtype = "auto"
    device: str | torch.device = "auto"
    max_num_seqs: int = 256
    max_model_len: int | None = None
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    kv_cache_memory: int | str = "auto"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    quantization: Literal["fp8"] | None = None
    enable_prefix_caching: bool = True
    decode_window: int = 8
    use_graphs: bool | Literal["auto"] = "auto"
    deterministic: bool = False
    score_chunk_tokens: int = 512
    check_finite_weights: bool = False
    gather_memory: int | str = "256MiB"
    tensor_parallel_size: int = 1
    max_loras: int = 8
    max_lora_rank: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("max_num_seqs", "max_num_batched_tokens", "block_size", "decode_window", "score_chunk_tokens")
        for name in (*counts, "tensor_parallel_size", "max_loras", "max_lora_rank"):
            self._at_least_one(name)
        if self.max_model_len is not None:
            self._at_least_one("max_model_len")
        for name in ("enable_prefix_caching", "deterministic", "check_finite_weights"):
            if not isinstance(getattr(self, name), bool):  # "False" is true
                raise InvalidConfigError(f"{name}={shown(getattr(self, name))}: give True or False")
        if not isinstance(self.use_graphs, bool) and self.use_graphs != "auto":
            raise InvalidConfigError(f"use_graphs={shown(self.use_graphs)}: give True or False, or 'auto'")
        if self.kv_cache_dtype not in ("auto", "fp8"):
            raise InvalidConfigError(f"kv_cache_dtype={shown(self.kv_cache_dtype)}: give 'auto' or 'fp8'")
        if self.quantization not in (None, "fp8"):
            raise InvalidConfigError(
                f"quantization={shown(self.quantization)}: give 'fp8', or None for weights as they are"
            )
        if self.tensor_parallel_size > 1 and (self.deterministic or self.quantization):
            other = "deterministic=True" if self.deterministic else f"quantization={shown(self.quantization)}"
            raise InvalidConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size} and {other} do not go together: leave one of them out"
            )
        object.__setattr__(self, "seed", as_int(self.seed))
        if not is_int(self.seed):
            raise InvalidConfigError(f"seed={shown(self.seed)} is not an integer")
        if self.dtype != "auto":
            dtype = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else self.dtype
            if dtype not in _DTYPES:
                raise InvalidConfigError(
                    f"dtype={shown(self.dtype)} is no floating-point torch dtype of 16 bits or more: 'bfloat16', say"
                )
            object.__setattr__(self, "dtype", dtype)
        if self.device != "auto":
            try:
                object.__setattr__(self, "device", torch.device(self.device))
            except (RuntimeError, TypeError) as error:
                raise InvalidConfigError(f"device={shown(self.device)} is no torch device: use 'cuda', say") from error
        if self.kv_cache_memory != "auto":
            object.__setattr__(self, "kv_cache_memory", parse_bytes(self.kv_cache_memory, "kv_cache_memory"))
        object.__setattr__(self, "gather_memory", parse_bytes(self.gather_memory, "gather_memory"))

    def _at_least_one(self, name: str) -> None:
        value = as_int(getattr(self, name))
        if not is_int(value) or value < 1:
            raise InvalidConfigError(f"{name}={shown(value)}: it has to be a positive integer")
        object.__setattr__(self, name, value)


def check_alone(config: EngineConfig, what: str) -> None:
    """Raise ``InvalidConfigError`` where several ranks run the model together, and ``what`` would run it on one. what: in the plural."""
    if config.tensor_parallel_size > 1:
        raise InvalidConfigError(
            f"{what} begin requests on each process by itself, and with tensor_parallel_size={config.tensor_parallel_size} several "
            "run them together: leave it at 1, or have all of them call generate_batch"
        )


def parse_bytes(amount: int | str, name: str) -> int:
    """Bytes from an int or from text such as ``"4GiB"``, ``"512 MB"``."""
    if isinstance(amount, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMG]?i?B?)\s*", amount, re.IGNORECASE)
        unit = (match.group(2).upper() or "B") if match else ""
        unit = unit if unit.endswith("B") else unit + "B"
        if match and unit in _UNITS:
            amount = int(float(match.group(1)) * _UNITS[unit])
    amount = as_int(amount)
    if not is_int(amount) or amount < 1:
        auto = ", or 'auto'" if name == "kv_cache_memory" else ""
        raise InvalidConfigError(f"{name}={shown(amount)}: give positive bytes, or text such as '4GiB'{auto}")
    return amount
