"""``EngineStats``: what an engine holds now, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.rollout.memory import EngineMemory
from stoker.rollout.updates import WeightUpdates


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """What the engine holds now, and counters since it was built. Tokens are counts, memory is bytes.

    weight_version, is_sleeping: as the engine's. num_kv_blocks: of ``kv_block_bytes`` each, without the null block;
    num_free_kv_blocks: of these. A block holds ``block_size`` tokens for all layers; where layers with a window have blocks of
    their own, a sequence gives up their part of it once nothing sees it any more. kv_cache_bytes: 0 while asleep;
    recurrent_state_bytes of these are states, and no blocks.
    fused_layers: how many of ``num_layers`` run in their fused form. matmuls: for each kind of product (its rows, its weight,
    and what is done with it) the ways that were measured on the device, fastest first. mirror_bytes: the engine's own
    copies of weights: a mirror, those in fp8, and a rank's parts of a model that several run. last_update_seconds: of
    ``update_weights``; last_update_bytes: what that wrote, 0 where the engine runs on the trainer's tensors alone.

    num_preemptions: requests put back for want of blocks. prompt_tokens: of prompts, and of sequences to score; of
    these prefix_cache_hit_tokens the prefix cache had, and shared_prompt_tokens another sample of the prompt had
    computed. generated_tokens, scored_tokens: what came of them. finished_requests: samples and scored sequences.
    """

    weight_version: int
    is_sleeping: bool
    num_kv_blocks: int
    num_free_kv_blocks: int
    kv_block_bytes: int
    kv_cache_bytes: int
    recurrent_state_bytes: int
    num_preemptions: int
    prompt_tokens: int
    prefix_cache_hit_tokens: int
    shared_prompt_tokens: int
    generated_tokens: int
    scored_tokens: int
    finished_requests: int
    fused_layers: int
    num_layers: int
    matmuls: dict[str, str]
    last_update_seconds: float
    last_update_bytes: int
    mirror_bytes: int


def stats_of(memory: EngineMemory, updates: WeightUpdates) -> EngineStats:
    """As ``RolloutEngine.stats``."""
    kv, binding, scheduler = memory.kv, memory.binding, memory.core.scheduler
    layout = kv.block_layout
    pages = layout.pages + layout.window_pages
    counters = scheduler.counters
    return EngineStats(
        weight_version=updates.version,
        is_sleeping=bool(memory.asleep),
        num_kv_blocks=(kv.num_blocks - layout.span) // pages,
        num_free_kv_blocks=scheduler.tables.pool.num_free // pages,
        kv_block_bytes=pages * kv.block_bytes(kv.shapes, kv.block_size, layout),
        kv_cache_bytes=kv.nbytes,
        recurrent_state_bytes=kv.state_bytes(kv.shapes, kv.state_layout) if kv.layers else 0,
        num_preemptions=counters.preemptions,
        prompt_tokens=counters.prompt_tokens,
        prefix_cache_hit_tokens=counters.prefix_hit_tokens,
        shared_prompt_tokens=counters.shared_tokens,
        generated_tokens=counters.generated_tokens,
        scored_tokens=counters.scored_tokens,
        finished_requests=counters.finished_requests,
        fused_layers=binding.fused_layers,
        num_layers=len(binding.shapes),
        matmuls=dict(binding.ops.matmuls),
        last_update_seconds=updates.last_seconds,
        last_update_bytes=updates.last_bytes,
        mirror_bytes=binding.nbytes,
    )
