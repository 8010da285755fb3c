"""Sizes an engine: how long sequences may be, how many run at a time, and how much memory the KV cache takes."""

from __future__ import annotations

import logging
from dataclasses import replace

from stoker.engine.cache.kv_cache import KVCache, block_layout
from stoker.engine.cache.state_cache import StateLayout
from stoker.engine.device import Runtime
from stoker.engine.supported_models import decoder_of
from stoker.kernels.errors import InvalidConfigError
from stoker.rollout.binding import ModelBinding
from stoker.rollout.config import EngineConfig

_log = logging.getLogger("stoker")
_SHARE_OF_FREE_MEMORY = 0.3  # for an "auto" KV cache: the trainer's activations and gradients are still to come
_MOST_COUNTED = (
    2**20
)  # blocks of models without attention, which take nothing of the device; the host keeps a list of them


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
    """The config, with fewer sequences at a time where their states would take more than half of an "auto" KV cache."""
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
    """The config with no more sequences at a time than there are blocks, of which each needs at least one.

    More could never run, and the rows set aside for them would be memory for nothing. Where layers keep states, these have
    bounded the number already.
    """
    if any(shape.states for shape in binding.shapes):
        return config
    runtime.release_memory()  # as for the cache
    layout = block_layout(binding.shapes, config.block_size, model_len)
    memory = config.kv_cache_memory
    nbytes = int(_SHARE_OF_FREE_MEMORY * _free_memory(binding, runtime)) if isinstance(memory, str) else memory
    blocks = nbytes // KVCache.block_bytes(binding.shapes, config.block_size, layout)
    return replace(config, max_num_seqs=max(1, min(config.max_num_seqs, blocks)))


def kv_cache(config: EngineConfig, binding: ModelBinding, runtime: Runtime, model_len: int) -> KVCache:
    """The KV cache in the configured memory, the null block included.

    Raises ``InvalidConfigError`` where there is no memory for it.
    """
    runtime.release_memory()  # or memory that torch's allocator holds unused could not be taken
    layout = block_layout(binding.shapes, config.block_size, model_len)
    block_bytes = KVCache.block_bytes(binding.shapes, config.block_size, layout)
    least = layout.span * (1 + layout.needed(1, config.block_size, 1))
    states = _state_layout(config, binding)
    state_bytes = KVCache.state_bytes(binding.shapes, states)
    # What one sequence needs while it decodes, and while many tokens of its prompt are computed at a time.
    chunks = config.block_size, config.max_num_batched_tokens
    decoding, prompt = (layout.needed(model_len, config.block_size, chunk) for chunk in chunks)
    most = ((config.max_num_seqs - 1) * decoding + prompt + 1) * layout.span

    def blocks_in(memory: int) -> int:
        """Without attention in any layer, blocks only count tokens, and take nothing but the host's memory."""
        if block_bytes:
            return (memory - state_bytes) // block_bytes
        return min(most, _MOST_COUNTED) * (memory >= state_bytes)

    if config.kv_cache_memory == "auto":
        num_blocks = max(least, min(most, blocks_in(_budget(config, binding, runtime, model_len))))
    else:
        assert isinstance(config.kv_cache_memory, int)
        num_blocks = blocks_in(config.kv_cache_memory)
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
    """How many rows recurrent layers' states have: one a sequence, and copies for a prompt in four, but at least eight."""
    if not any(shape.states for shape in binding.shapes):
        return None
    kept = max(8, config.max_num_seqs // 4) if config.enable_prefix_caching else 0
    return StateLayout(num_slots=config.max_num_seqs, num_kept=kept)


def _budget(config: EngineConfig, binding: ModelBinding, runtime: Runtime, model_len: int) -> int:
    """Bytes of an "auto" KV cache."""
    return int(_SHARE_OF_FREE_MEMORY * _free_memory(binding, runtime)) - _workspace_bytes(config, binding, model_len)


def _free_memory(binding: ModelBinding, runtime: Runtime) -> int:
    """Bytes of the device that are free; of several ranks that run a model together, what the one with the least has."""
    return runtime.free_memory() if binding.free_memory is None else binding.free_memory


def _workspace_bytes(config: EngineConfig, binding: ModelBinding, model_len: int) -> int:
    """Bytes that attention sets aside on the device when layers first run, and that recurrences take while they run."""
    of_attention, of_recurrence = binding.ops.attention_workspace, binding.ops.recurrent_workspace
    taken = 0
    if of_attention is not None:
        table = config.max_num_seqs, -(-model_len // config.block_size), config.block_size
        sizes = {
            (shape.query_heads, shape.value_dim) for shape in binding.shapes if shape.heads
        }  # a workspace for each
        taken = sum(of_attention(*table, heads, value_dim) for heads, value_dim in sizes)
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
