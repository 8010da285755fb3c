"""Builds the parts of an engine from its configuration and its model, and sizes them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from stoker.engine.cache.kv_cache import KVCache, block_layout
from stoker.engine.cache.state_cache import StateLayout
from stoker.engine.core import EngineCore
from stoker.engine.device import Runtime
from stoker.engine.graphs import GraphStep
from stoker.engine.images.reader import ImageReader
from stoker.engine.layers.quantised import finds_outliers
from stoker.engine.model import decoder_of
from stoker.engine.runner import EagerStep, Runner
from stoker.engine.sampler import Sampler
from stoker.engine.scheduler import Scheduler
from stoker.engine.scorer import Scorer
from stoker.engine.step_inputs import StepInputs
from stoker.kernels.errors import InvalidConfigError, UnsupportedModelError
from stoker.kernels.reference.fp8 import FP8
from stoker.rollout.adapters import Adapters
from stoker.rollout.binding import ModelBinding
from stoker.rollout.config import EngineConfig
from stoker.rollout.constraints import ConstraintMaker
from stoker.rollout.loop import Loop
from stoker.rollout.requests import RequestMaker
from stoker.rollout.user_values import as_ids
from stoker.weight_sync.rank_agreement import agree, ranks_of, telling

_log = logging.getLogger("stoker")
_SHARE_OF_FREE_MEMORY = 0.3  # for an "auto" KV cache: the trainer's activations and gradients are still to come


def check_arguments(model: Any, config: Any, tokenizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"model is a {type(model).__name__}: give a transformers model, or RolloutEngine.from_pretrained(folder)"
        )
    if not isinstance(config, EngineConfig | None):
        raise InvalidConfigError(f"config is a {type(config).__name__}: give EngineConfig(...)")
    if tokenizer is not None and not callable(tokenizer):
        raise InvalidConfigError(
            f"tokenizer is a {type(tokenizer).__name__}: give one that is loaded, as by AutoTokenizer.from_pretrained"
        )


def bind(config: EngineConfig, model: nn.Module) -> ModelBinding:
    """The model bound to a shell. Raises ``InvalidConfigError`` where it is on another device than the configured one."""
    bound = ModelBinding(
        model,
        config.dtype,
        config.device,
        check_finite=config.check_finite_weights,
        gather_bytes=int(config.gather_memory),
        kv_dtype=FP8 if config.kv_cache_dtype == "fp8" else None,
        in_fp8=config.quantization == "fp8",
        deterministic=config.deterministic,
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
    )
    if config.device != "auto":
        wanted, actual = torch.device(config.device), bound.source.device
        if wanted.type != actual.type or wanted.index not in (None, actual.index or 0):
            raise InvalidConfigError(f"device={config.device} and the model is on {actual}: set device='auto'")
    return bound


@contextmanager
def on_all_ranks(model: nn.Module, config: EngineConfig) -> Iterator[None]:
    """Context manager: where the model is sharded and one rank fails within, all do."""
    ranks = ranks_of(model, None if config.device == "auto" else torch.device(config.device))
    with telling(*ranks):
        yield
    dtype = str(config.dtype).removeprefix("torch.")
    sent = f"{dtype}, {config.quantization}, {config.gather_memory}"  # what a gather sends, and how much at a time
    agree(*ranks, alike=(sent,))


def max_model_len(config: EngineConfig, binding: ModelBinding) -> int:
    """The most tokens that prompt and completion may have together."""
    limit = getattr(decoder_of(binding.source.module).config, "max_position_embeddings", None)
    if config.max_model_len is None:
        if limit is None:
            raise InvalidConfigError("the model's config has no max_position_embeddings: set max_model_len")
        return int(limit)
    if limit is not None and config.max_model_len > limit:
        raise InvalidConfigError(f"max_model_len={config.max_model_len} is beyond the model's {limit} positions")
    return config.max_model_len


def with_room_for_states(config: EngineConfig, binding: ModelBinding, runtime: Runtime, model_len: int) -> EngineConfig:
    """The config with fewer sequences at a time, where their states would take over half of an "auto" KV cache."""
    wanted = states = KVCache.state_bytes(binding.shapes, _state_layout(config, binding))
    if config.kv_cache_memory != "auto" or not wanted:
        return config
    runtime.release_memory()
    fewer = config
    while fewer.max_num_seqs > 1 and states > _budget(fewer, binding, runtime, model_len) // 2:
        fewer = replace(fewer, max_num_seqs=fewer.max_num_seqs // 2)
        states = KVCache.state_bytes(binding.shapes, _state_layout(fewer, binding))
    if fewer is not config:
        _log.warning(
            "max_num_seqs is %d instead of %d: the states of so many sequences would take %d bytes, most of what an 'auto' "
            "kv_cache_memory comes to; set it to have more",
            fewer.max_num_seqs,
            config.max_num_seqs,
            wanted,
        )
    return fewer


def with_rows_that_can_run(
    config: EngineConfig, binding: ModelBinding, runtime: Runtime, model_len: int
) -> EngineConfig:
    """The config with no more sequences at a time than there are blocks for: each that runs has one of its own.

    Whatever has a row for each would take memory for nothing. States, where there are such, take more and bound it before.
    """
    if any(shape.states for shape in binding.shapes):
        return config
    runtime.release_memory()  # as for the cache
    layout = block_layout(binding.shapes, config.block_size, model_len)
    memory = config.kv_cache_memory
    nbytes = int(_SHARE_OF_FREE_MEMORY * runtime.free_memory()) if isinstance(memory, str) else memory
    blocks = nbytes // KVCache.block_bytes(binding.shapes, config.block_size, layout)
    return replace(config, max_num_seqs=max(1, min(config.max_num_seqs, blocks)))


def kv_cache(config: EngineConfig, binding: ModelBinding, runtime: Runtime, model_len: int) -> KVCache:
    """The KV cache in the configured memory, the null block included.

    Raises ``InvalidConfigError`` where it cannot be had.
    """
    runtime.release_memory()  # what torch's allocator holds and nobody uses counts as free, and is not to be had otherwise
    layout = block_layout(binding.shapes, config.block_size, model_len)
    block_bytes = KVCache.block_bytes(binding.shapes, config.block_size, layout)
    least = layout.span * (1 + layout.needed(1, config.block_size, 1))
    states = _state_layout(config, binding)
    state_bytes = KVCache.state_bytes(binding.shapes, states)
    if config.kv_cache_memory == "auto":
        # Of one sequence while it decodes, and while many tokens of its prompt are computed at a time.
        chunks = config.block_size, config.max_num_batched_tokens
        decoding, prompt = (layout.needed(model_len, config.block_size, chunk) for chunk in chunks)
        slabs = (config.max_num_seqs - 1) * decoding + prompt + 1
        budget = _budget(config, binding, runtime, model_len)
        num_blocks = max(least, min(slabs * layout.span, (budget - state_bytes) // block_bytes))
    else:
        assert isinstance(config.kv_cache_memory, int)
        num_blocks = (config.kv_cache_memory - state_bytes) // block_bytes
        if num_blocks < least:
            besides = f", and the states of max_num_seqs={config.max_num_seqs} sequences take {state_bytes}"
            raise InvalidConfigError(
                f"kv_cache_memory={config.kv_cache_memory} holds no block: two blocks of {config.block_size} tokens take "
                f"{least * block_bytes} bytes{besides if states else ''}"
            )
    num_blocks -= num_blocks % layout.span
    try:
        return KVCache(binding.shapes, num_blocks, config.block_size, runtime, states, layout)
    except (RuntimeError, MemoryError) as error:
        wanted, free = num_blocks * block_bytes + state_bytes, runtime.free_memory()
        raise InvalidConfigError(
            f"no memory for the KV cache: {wanted} bytes wanted, {free} free. Free some or set a smaller "
            "EngineConfig.kv_cache_memory"
        ) from error


def _state_layout(config: EngineConfig, binding: ModelBinding) -> StateLayout | None:
    """The rows for recurrent layers' states, with copies for the prompts of groups of four, and at least a few."""
    if not any(shape.states for shape in binding.shapes):
        return None
    kept = max(8, config.max_num_seqs // 4) if config.enable_prefix_caching else 0
    return StateLayout(num_slots=config.max_num_seqs, num_kept=kept)


def _budget(config: EngineConfig, binding: ModelBinding, runtime: Runtime, model_len: int) -> int:
    """Bytes of an "auto" KV cache."""
    return int(_SHARE_OF_FREE_MEMORY * runtime.free_memory()) - _workspace_bytes(config, binding, model_len)


def _workspace_bytes(config: EngineConfig, binding: ModelBinding, model_len: int) -> int:
    """Bytes that attention sets aside on the device when layers first run, and that recurrences take while they run."""
    of_attention, of_recurrence = binding.ops.attention_workspace, binding.ops.recurrent_workspace
    taken = 0
    if of_attention is not None:
        columns, heads = -(-model_len // config.block_size), binding.shell.config.num_attention_heads
        value_dims = {shape.value_dim for shape in binding.shapes if shape.heads}
        taken = sum(of_attention(config.max_num_seqs, columns, config.block_size, heads, dim) for dim in value_dims)
    if of_recurrence is None:
        return taken
    most = 0
    for layer in binding.shapes:
        for state in layer.states[1:]:
            rule = state.operation == "gated_delta_rule"
            heads, key_dim = state.size[0], state.size[1 if rule else 2]
            size = config.max_num_batched_tokens, heads, key_dim, layer.states[0].dtype
            most = max(most, of_recurrence(*size, rule=rule))
    return taken + most


def core(
    config: EngineConfig,
    binding: ModelBinding,
    runtime: Runtime,
    kv: KVCache,
    model_len: int,
    adapters: Adapters,
) -> EngineCore:
    """The core: scheduler, static inputs and runner, over a KV cache."""
    block_size, vocab = config.block_size, binding.shell.vocab
    scheduler = Scheduler(
        num_blocks=kv.num_blocks,
        block_size=block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        decode_window=config.decode_window,
        enable_prefix_caching=config.enable_prefix_caching,
        adapter_slots=adapters.slots,
        block_layout=kv.block_layout,
        state_layout=kv.state_layout,
    )
    inputs = StepInputs(
        binding.ops,
        runtime,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=min(config.max_num_batched_tokens, kv.num_blocks * block_size),  # each has a place there
        max_blocks=min(-(-model_len // block_size), kv.num_blocks),
        block_size=block_size,
        token_bytes=max(shape.token_bytes for shape in binding.shapes),
        vocab=vocab,
        beside=kv.block_layout.beside[: 2 if kv.block_layout.window_pages else 1],
    )
    sampler = Sampler(binding.ops, runtime, config.max_num_seqs, vocab)
    scorer = Scorer(binding.ops, runtime, config.score_chunk_tokens)
    eager = EagerStep(binding.shell, sampler, scorer, kv, binding.ops, runtime)
    runner: Runner = GraphStep(eager, config.decode_window) if _captures(config, binding, runtime) else eager
    images = ImageReader(adapters.over_images, config.max_num_batched_tokens, alone=config.deterministic)
    return EngineCore(scheduler, inputs, runner, place_adapter=adapters.place, images=images, ahead=runtime.ahead)


def _captures(config: EngineConfig, binding: ModelBinding, runtime: Runtime) -> bool:
    """Whether decode steps run as CUDA graphs."""
    if not config.use_graphs:
        return False
    if not (runtime.graphs and binding.ops.static_plans):
        if config.use_graphs is True:
            raise InvalidConfigError(
                f"use_graphs=True: CUDA graphs need a CUDA device, and the model is on {runtime.device}; leave it at 'auto'"
            )
        return False
    if finds_outliers(binding.shell.module):
        why = (
            "bitsandbytes looks for outliers in 8 bits (llm_int8_threshold above 0), and waits for the device to find them. "
            "4 bits have none"
        )
        if config.use_graphs is True:
            raise InvalidConfigError(f"use_graphs=True: {why}; leave it at 'auto'")
        _log.warning("decode steps run without CUDA graphs, which is slow: %s", why)
        return False
    return True


def requests(
    config: EngineConfig,
    binding: ModelBinding,
    kv: KVCache,
    model_len: int,
    core: EngineCore,
    loop: Loop,
    tokenizer: Any,
) -> RequestMaker:
    """What makes requests of prompts, and outputs of requests."""
    vocab = binding.shell.vocab
    return RequestMaker(
        tokenizer=tokenizer,
        vocab=vocab,
        constraint=ConstraintMaker(tokenizer, vocab),
        find_eos_ids=partial(_eos_ids, binding, tokenizer),
        max_model_len=model_len,
        kv_tokens=kv.most_tokens(config.max_num_batched_tokens),
        token_bytes=kv.token_bytes,
        share=config.block_size,
        seed=config.seed,
        encoder=core.encoder,
        attempt=loop.attempt,
    )


def _eos_ids(binding: ModelBinding, tokenizer: Any) -> frozenset[int]:
    """The ids that end a completion: the tokenizer's and the generation config's, as they are now."""
    module: Any = binding.source.module
    found: set[Any] = set()
    for owner in (tokenizer, getattr(module, "generation_config", None)):
        found.update(as_ids(getattr(owner, "eos_token_id", None)))
    # A tokenizer may know more tokens than the model, and has None for one that it does not know.
    return frozenset(t for t in found if t is not None and 0 <= t < binding.shell.vocab)
