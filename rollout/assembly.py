"""Builds the parts of a ``RolloutEngine`` from its configuration and its model, and checks what it was given."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from stoker.engine.cache.kv_cache import KVCache
from stoker.engine.core import EngineCore
from stoker.engine.device import Runtime
from stoker.engine.graphs import GraphStep
from stoker.engine.images.reader import ImageReader
from stoker.engine.layers.quantised import finds_outliers
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
from stoker.rollout.lockstep import Lockstep
from stoker.rollout.loop import Loop
from stoker.rollout.requests import RequestMaker
from stoker.rollout.user_values import as_ids
from stoker.weight_sync.rank_agreement import agree, ranks_of, telling

_log = logging.getLogger("stoker")
BUILDING = "build an engine"


def check_arguments(model: Any, tokenizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"model is a {type(model).__name__}: give a transformers model, or RolloutEngine.from_pretrained(folder)"
        )
    if tokenizer is not None and not callable(tokenizer):
        raise InvalidConfigError(
            f"tokenizer is a {type(tokenizer).__name__}: give one that is loaded, as by AutoTokenizer.from_pretrained"
        )


def check_config(config: Any) -> EngineConfig | None:
    if not isinstance(config, EngineConfig | None):
        raise InvalidConfigError(f"config is a {type(config).__name__}: give EngineConfig(...)")
    return config


def bind(config: EngineConfig, model: nn.Module, ranks: Lockstep) -> ModelBinding:
    """The model bound to a shell. Raises ``InvalidConfigError`` where it is on another device than the configured one."""
    bound = ModelBinding(
        model,
        config.dtype,
        config.device,
        check_finite=config.check_finite_weights,
        gather_bytes=int(config.gather_memory),
        kv_dtype=FP8 if config.kv_cache_dtype == "fp8" else None,
        in_fp8=config.quantization == "fp8",
        parallel=ranks.parallel,
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
def on_all_ranks(model: nn.Module, config: EngineConfig, together: Lockstep) -> Iterator[None]:
    """Context manager: where one rank of a sharded model fails within, or one that runs it together with others, all do."""
    ranks = ranks_of(model, None if config.device == "auto" else torch.device(config.device))
    with together.together(BUILDING):
        with telling(*ranks):
            yield
        dtype = str(config.dtype).removeprefix("torch.")
        # Ranks have to gather the same, in the same pieces.
        agree(*ranks, alike=(f"{dtype}, {config.quantization}, {config.gather_memory}",))
        own = {"seed", "device"}  # the first rank's seed counts
        together.exchange(BUILDING, None, **{n: v for n, v in vars(config).items() if n not in own})


def settled(config: EngineConfig, binding: ModelBinding, runtime: Runtime, together: Lockstep) -> EngineConfig:
    """The config with the first rank's seed, of those that run the model together; and the least memory that one of them has."""
    if together.parallel is None:
        return config
    runtime.release_memory()
    with together.together(BUILDING):
        seeds, free = zip(*together.exchange(BUILDING, (config.seed, runtime.free_memory())), strict=True)
    binding.free_memory = min(free)
    return replace(config, seed=seeds[0])


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
        max_num_batched_tokens=min(
            config.max_num_batched_tokens, kv.num_blocks * block_size
        ),  # no more fit in the cache
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
    """What turns prompts into requests, and requests into outputs."""
    vocab = binding.shell.vocab
    return RequestMaker(
        tokenizer=tokenizer,
        vocab=vocab,
        embedded=binding.shell.embedded,
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
