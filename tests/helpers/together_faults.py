"""What goes wrong on one of the ranks that run a model together, between their calls and in them. The processes import it by name."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import sharded
import torch
import torch.distributed as dist
from families import make_model
from ranks import noted
from together import CONFIG, PARAMS, SHARED, adapted, all_free, assert_matches, parallel, worst

from stoker.rollout import (
    LIVE,
    EngineConfig,
    EngineStateError,
    InvalidRequestError,
    RolloutEngine,
    SamplingParams,
    UnsupportedModelError,
)

OTHER_CANNOT = "rank 1, which runs this model together with this one, cannot"


def adapters_of_one_rank(rank: int) -> None:
    """A rank without an adapter refuses for all; one that took its adapter anew finds nothing in its prefix cache, and nor do others."""
    model, other = adapted("llama"), adapted("llama", seed=8, r=3)
    with RolloutEngine(model, config=parallel()) as engine:
        assert_matches(engine, model)
        if rank == 0:
            engine.load_adapter("other", other)
        for call in (engine.generate_batch, engine.score):
            error = InvalidRequestError if rank else EngineStateError
            with pytest.raises(
                error, match="'other' is not known" if rank else f"{OTHER_CANNOT} .*'other' is not known"
            ):
                call([SHARED], adapter=LIVE if rank else "other")
            assert_matches(engine, model)  # with the same numbers for the seeds of prompts
        if rank:
            engine.load_adapter("other", other)
        for again in range(3):
            assert worst(engine.generate_batch([SHARED], PARAMS, adapter="other"), other) < 1e-4
            if again == rank:  # under its name, or after it was forgotten
                if rank:
                    engine.unload_adapter("other")
                engine.load_adapter("other", other)
        assert all_free(engine)


def weights_found_at_different_times(rank: int) -> None:
    """A rank that refuses a call has not looked at its weights, others have: they count more changes, and go on together."""
    model = make_model("llama")

    def change() -> None:
        with torch.no_grad():
            model.model.layers[0].self_attn.o_proj.weight.mul_(1.5)

    with RolloutEngine(model, config=parallel()) as engine:
        assert_matches(engine, model)
        change()
        with pytest.raises(InvalidRequestError if rank else EngineStateError, match="is empty"):
            engine.generate_batch([[]] if rank else [SHARED], PARAMS)
        change()
        assert_matches(engine, model)
        assert engine.weight_version == 2
        if rank:
            change()
        for _ in range(2):  # weights that one rank alone has changed
            with pytest.raises(EngineStateError, match=r"differ in weight version: 2 and 3.*update_weights\(\) on all"):
                engine.generate_batch([SHARED], PARAMS)
        if not rank:
            change()
        engine.update_weights()
        assert_matches(engine, model)
        assert engine.weight_version == 4


def call_before_any_prompt_was_read(rank: int) -> None:
    model = make_model("llama")
    model.generation_config.eos_token_id = 2
    with RolloutEngine(model, config=parallel()) as engine:
        with pytest.raises(InvalidRequestError if rank else EngineStateError, match="prompts is one str"):
            engine.generate_batch("text" if rank else [SHARED], PARAMS)
        assert len(engine.score([SHARED])) == 1


def fail_while_requests_are_made(rank: int) -> None:
    """What cannot be sent, memory that is short, and another tokenizer: no rank waits for one that does not begin."""
    model = make_model("llama")

    class Unsendable(SamplingParams):
        pass

    with RolloutEngine(model, config=parallel()) as engine:
        with pytest.raises(AttributeError if rank else EngineStateError, match="pickle local object"):
            engine.generate_batch([SHARED], Unsendable() if rank else PARAMS)
        assert_matches(engine, model)
        for name, call in (("for_generation", engine.generate_batch), ("for_scoring", engine.score)):
            with noted(name), pytest.MonkeyPatch.context() as patch:
                if rank:
                    patch.setattr(type(engine._requests), name, mock.Mock(side_effect=MemoryError("short")))
                with pytest.raises(MemoryError if rank else EngineStateError, match="short"):
                    call([SHARED])
            assert_matches(engine, model)
        assert all_free(engine)
    tokenizer = mock.Mock(spec=["__call__", "eos_token_id"], eos_token_id=None) if rank else None
    with (
        RolloutEngine(model, config=parallel(), tokenizer=tokenizer) as engine,
        pytest.raises(EngineStateError, match="differ in tokenizer: NoneType and Mock"),
    ):
        engine.generate_batch([SHARED], PARAMS)


def bad_arguments_of_one_rank(rank: int) -> None:
    model = make_model("llama")
    error, told = (UnsupportedModelError, "model is a NoneType") if rank else (EngineStateError, OTHER_CANNOT)
    with pytest.raises(error, match=told):
        RolloutEngine(None if rank else model, config=parallel())  # type: ignore[arg-type]
    with RolloutEngine(model, config=parallel()) as engine:
        assert_matches(engine, model)


def threads(rank: int) -> None:
    """Several threads call an engine: one after the other, as ranks could not tell which step belongs to which."""
    model, wrong = make_model("llama"), list[Any]()
    with RolloutEngine(model, config=parallel()) as engine:

        def call(number: int) -> None:
            try:
                for _ in range(6):
                    params = SamplingParams(max_tokens=6 + 3 * number, ignore_eos=True)
                    assert worst(engine.generate_batch([[5 + number, 6, 7]], params), model) < 1e-4
            except BaseException as error:
                wrong.append(error)

        several = [threading.Thread(target=call, args=(number,)) for number in range(2)]
        for thread in several:
            thread.start()
        for thread in several:
            thread.join()
        assert not wrong and all_free(engine)


def pauses(rank: int) -> None:
    """A thread of one rank pauses the engine in the middle of a call: the other one waits. Ending requests alone is refused."""
    model = make_model("llama")
    with RolloutEngine(model, config=parallel()) as engine:
        step, begun, refused = engine.core.step, threading.Event(), list[str]()

        def step_and_tell() -> Any:
            begun.set()
            return step()

        def pause() -> None:
            begun.wait()
            try:
                engine.pause("abort")
            except InvalidRequestError as error:
                refused.append(str(error))
            engine.pause("keep")
            time.sleep(0.2)
            engine.resume()

        engine.core.step = step_and_tell  # type: ignore[method-assign]
        thread = threading.Thread(target=pause)
        if rank:
            thread.start()
        batch = engine.generate_batch([SHARED], SamplingParams(max_tokens=40, ignore_eos=True))
        assert worst(batch, model) < 1e-4 and len(batch[0].completions[0].token_ids) == 40
        if rank:
            thread.join()
            assert "give 'keep' or 'wait'" in refused[0]
        assert_matches(engine, model)
        assert all_free(engine)


def two_engines(rank: int) -> None:
    """On one model, one in another dtype: one rank's call of the one does not pass for a call of the other."""
    model = make_model("llama")
    with (
        RolloutEngine(model, config=parallel()) as one,
        RolloutEngine(model, config=parallel(dtype="float64")) as other,
    ):
        assert_matches(one, model)
        assert_matches(other, model)
        with pytest.raises(EngineStateError, match="differ in engine: 1 and 0"):
            (one if rank else other).generate_batch([SHARED], PARAMS)
        sharded.train(model, sharded.sgd(model), 1)
        for engine in (other, one):
            engine.update_weights()
            assert_matches(engine, model)


def stay_away(rank: int) -> None:
    """The others wait as long as ``init_process_group`` was told, in a call too."""
    model = make_model("llama")
    engine = RolloutEngine(model, config=parallel())
    assert_matches(engine, model)
    begin = time.monotonic()
    if rank:
        time.sleep(12)
        return
    with pytest.raises(EngineStateError, match="rank 0 lost touch"):
        engine.generate_batch([SHARED], PARAMS)
    assert 3 < time.monotonic() - begin < 10


def build_alone(rank: int) -> None:
    """The setting is on one rank only."""
    if rank:
        return
    with pytest.raises(EngineStateError, match="rank 0 waited in vain for others to build an engine"):
        RolloutEngine(make_model("llama"), config=parallel())


def lose_a_rank(rank: int) -> str:
    """The last rank dies in the middle of a rollout."""
    model = make_model("llama")
    engine = RolloutEngine(model, config=parallel())
    assert_matches(engine, model)
    if rank == dist.get_world_size() - 1:
        steps = iter(range(1))  # each is of several tokens
        step = engine.core.step

        def die() -> Any:
            if next(steps, None) is None:
                os._exit(1)
            return step()

        engine.core.step = die  # type: ignore[method-assign]
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5))
    begin = time.monotonic()
    with pytest.raises(EngineStateError) as caught:
        engine.generate_batch([SHARED], SamplingParams(max_tokens=12))
    assert time.monotonic() - begin < 30
    return str(caught.value)


def two_models(rank: int) -> None:
    """Four ranks, of which two each run a model, over a trainer that shards one over all: they call at their own times."""
    config = replace(CONFIG, tensor_parallel_size=2)
    twin, model = make_model("qwen3"), sharded.by_fsdp2(make_model("qwen3"))
    theirs, ours = sharded.sgd(twin), sharded.sgd(model)
    assert isinstance(config, EngineConfig)
    with RolloutEngine(model, config=config) as engine:
        for _ in range(2):
            for _ in range(1 + rank // 2):
                assert_matches(engine, twin)
            if rank < 2:
                with pytest.raises(InvalidRequestError if rank else EngineStateError, match="is empty"):
                    engine.generate_batch([[]] if rank else [SHARED], PARAMS)
            sharded.train(twin, theirs, 1)
            sharded.train(model, ours, 1)
            engine.update_weights()
        assert_matches(engine, twin)
        assert engine.verify_weights().ok and all_free(engine)
    dist.barrier()


def odd_vocabulary(rank: int) -> None:
    """One that cannot be shared out evenly, with a head of its own and with a tied one: all of its logits, on both ranks."""
    for tied in (False, True):
        model = make_model("llama", vocab_size=101, tie_word_embeddings=tied)
        with RolloutEngine(model, config=parallel()) as engine:
            assert_matches(engine, model)
            (scores,) = engine.score([SHARED], top_k=101, entropy=True)
            logprobs = model(input_ids=torch.tensor([SHARED])).logits[0, :-1].double().log_softmax(-1).detach()
            assert scores.top_ids is not None and scores.top_logprobs is not None and scores.entropy is not None
            torch.testing.assert_close(
                scores.top_logprobs.double(), logprobs.gather(1, scores.top_ids), rtol=0, atol=1e-4
            )
            expected = -(logprobs.exp() * logprobs).sum(-1)
            torch.testing.assert_close(scores.entropy.double(), expected, rtol=0, atol=1e-4)


def unequal_memory(rank: int) -> list[int]:
    """How many blocks an "auto" KV cache has: where the second rank has more memory, and where both have as little, or as much."""
    model, blocks = make_model("llama"), []
    runtime = type(RolloutEngine(model, config=parallel()).runtime)
    for sizes in ((1, 2), (1, 1), (2, 2)):
        with mock.patch.object(runtime, "free_memory", lambda self, size=sizes[rank]: size * 2**18):
            engine = RolloutEngine(model, config=parallel(kv_cache_memory="auto", max_num_seqs=200))
        assert_matches(engine, model)
        blocks.append(engine.stats().num_kv_blocks)
        engine.close()
    return blocks
