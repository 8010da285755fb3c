"""What each rank does where models, adapters, settings or calls are refused to ranks that run a model together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import sharded
import torch
from families import make_model
from ranks import noted
from together import PARAMS, SHARED, adapted, all_free, assert_matches, parallel

from stoker.integrations.server import serve
from stoker.rollout import (
    LIVE,
    EngineStateError,
    InvalidConfigError,
    InvalidRequestError,
    RolloutEngine,
    UnsupportedModelError,
    shell_builder,
    sizing,
)

REFUSED_ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "DoRA over model.layers.0": ("llama", {"use_dora": True}),
    "changes model.layers.0.mlp.gate": ("qwen3_moe", {}),
    "changes model.layers.0.mlp.experts": (
        "qwen3_moe",
        {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
    ),
    "changes model.layers.0.input_layernorm": ("llama", {"modules_to_save": ["input_layernorm"]}),
}


def refused_adapters(rank: int) -> None:
    for message, (family, options) in REFUSED_ADAPTERS.items():
        with noted(message), pytest.raises(UnsupportedModelError, match=message):
            RolloutEngine(adapted(family, **options), config=parallel())


def refusals(rank: int) -> None:
    """What cannot be had is refused on all ranks, before anything is changed; an engine that refuses a call goes on."""
    wide_head = make_model("llama").bfloat16()
    wide_head.lm_head.float()
    for message, model, fields in (
        (
            "query heads, 3, cannot be shared by 2",
            make_model("llama", num_attention_heads=3, num_key_value_heads=3),
            {},
        ),
        ("width of an MLP, 61", make_model("llama", intermediate_size=61), {}),
        ("has layers that run the model's own code", wide_head, {}),
        ("width of an MLP, 7", make_model("gemma4", hidden_size_per_layer_input=7), {}),
        ("give a divisor", make_model("llama"), {"tensor_parallel_size": 3}),
    ):
        with noted(message):
            before = {name: (t.data_ptr(), t.clone()) for name, t in model.named_parameters()}
            error = InvalidConfigError if "tensor_parallel_size" in fields else UnsupportedModelError
            with pytest.raises(error, match=message):
                RolloutEngine(model, config=replace(parallel(), **fields))
            for name, t in model.named_parameters():
                assert t.data_ptr() == before[name][0] and torch.equal(t, before[name][1])
    model = make_model("llama")
    with pytest.raises((InvalidConfigError, EngineStateError), match="differ in block_size|differ in max_num_seqs"):
        RolloutEngine(model, config=parallel(block_size=4 + 4 * rank))
    with RolloutEngine(model, config=parallel()) as engine:
        with pytest.raises(InvalidConfigError, match="calls of submit"):
            engine.submit(SHARED)
        with pytest.raises(InvalidConfigError, match="servers begin requests"):
            serve(engine, port=0)
        bad: list[tuple[str, Callable[[], Any]]] = [
            ("has 0 tokens|is empty|prompt 0", lambda: engine.generate_batch([[]] if rank else [SHARED], PARAMS)),
            ("max_model_len", lambda: engine.generate_batch([[1] * 5000] if rank else [SHARED], PARAMS)),
            ("adapter='none'", lambda: engine.generate_batch([SHARED], PARAMS, adapter="none" if rank else LIVE)),
            ("start=0", lambda: engine.score([SHARED], start=0 if rank else 1)),
        ]
        for cause, call in bad:
            with noted(cause):
                error = InvalidRequestError if rank else EngineStateError
                told = (
                    cause if rank else rf"rank 1, which runs this model together with this one, cannot \w+: .*({cause})"
                )
                with pytest.raises(error, match=told):
                    call()
                assert_matches(engine, model)
        with pytest.raises(EngineStateError, match="differ in call: generate_batch and score"):
            engine.score([SHARED]) if rank else engine.generate_batch([SHARED], PARAMS)
        if rank:
            engine.update_weights()
        with pytest.raises(EngineStateError, match="differ in weight version: 0 and 1"):
            engine.generate_batch([SHARED], PARAMS)
        if not rank:
            engine.update_weights()
        assert_matches(engine, model)
        if rank:
            engine.sleep()
        with pytest.raises(EngineStateError, match="the engine is asleep"):
            engine.generate_batch([SHARED], PARAMS)
        if rank:
            engine.wake_up()
        assert_matches(engine, model)
        assert all_free(engine)


def one_fails_to_build(rank: int) -> None:
    """Where the one rank has no memory, for its part of the weights or for its KV cache, the other does not wait for it."""
    model, wrapped = make_model("llama"), sharded.by_fsdp2(make_model("llama"))
    for what, kind, name in (("the KV cache", sizing, "KVCache"), ("weights", shell_builder, "CutWeights")):
        for given in (model, wrapped):
            with noted(what), pytest.MonkeyPatch.context() as patch:
                if rank:
                    patch.setattr(kind, name, mock.Mock(side_effect=MemoryError(what), wraps=getattr(kind, name)))
                with pytest.raises(
                    Exception, match=what if rank else "another rank refused|rank 1, which runs this model"
                ):
                    RolloutEngine(given, config=parallel())
    for given in (model, wrapped):
        with RolloutEngine(given, config=parallel()) as engine:
            assert_matches(engine, model)
