"""Sleep and wake: what each level and tag gives back, and that what wakes is as it was, or asleep as before."""

import weakref
from functools import cache

import pytest
import ranks
import torch
from families import make_model
from torch import nn
from transformers import PreTrainedModel

from stoker.engine.virtual_memory import PlainBuffer
from stoker.kernels.errors import EngineStateError, InvalidRequestError, UnsupportedModelError
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams
from stoker.weight_sync.mirror import Mirror


@cache
def llama() -> PreTrainedModel:
    return make_model("llama")


def test_a_wake_up_without_memory_can_be_tried_again(monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=6)
    with RolloutEngine(llama(), config=EngineConfig(kv_cache_memory="1MiB")) as engine:
        expected = engine.generate_batch([[1, 2, 3]], params)[0].completions
        engine.sleep()
        with monkeypatch.context() as patch:

            def refuse(self):
                raise RuntimeError("out of memory")

            patch.setattr(PlainBuffer, "restore", refuse)
            for _ in range(2):
                with pytest.raises(EngineStateError, match=r"\d+ bytes wanted, \d+ free. Free some and call wake_up"):
                    engine.wake_up()
                assert engine.is_sleeping
                with pytest.raises(EngineStateError, match="asleep"):
                    engine.generate_batch([[1, 2, 3]])
        engine.wake_up()
        assert engine.generate_batch([[1, 2, 3]], params)[0].completions == expected


def test_results_are_the_same_after_waking():
    params = [SamplingParams(n=2, seed=i, max_tokens=12, repetition_penalty=1.1) for i in range(3)]
    prompts = [[1, 2, 3], [4] * 40, [5, 6] * 9]
    with RolloutEngine(llama(), config=EngineConfig(kv_cache_memory="1MiB", block_size=4)) as engine:
        before = engine.generate_batch(prompts, params)
        engine.sleep()
        engine.wake_up()
        assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks
        after = engine.generate_batch(prompts, params)
        assert [o.completions for o in after] == [o.completions for o in before]
        assert [o.cached_tokens for o in after] == [0, 0, 0], "what sleep gave back cannot be in the prefix cache"


def in_double(model) -> RolloutEngine:
    """An engine with weights of its own."""
    return RolloutEngine(model, config=EngineConfig(kv_cache_memory="1MiB", dtype="float64"))


def first_tokens(engine: RolloutEngine) -> list[int]:
    return engine.generate_batch([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8))[0].completions[0].token_ids


def test_levels_say_how_much_sleeps():
    model = make_model("llama")
    with in_double(model) as engine:
        mirror, expected = engine._binding.source.mirror, first_tokens(engine)
        for level, weights_stay in ((1, True), (2, False), (3, False)):
            engine.sleep(level)
            engine.sleep(level)
            assert mirror.resident == weights_stay and engine.is_sleeping
            if not weights_stay:
                with pytest.raises(
                    EngineStateError, match=r"the weights are asleep: call wake_up\(\['weights'\]\) first"
                ):
                    engine.update_weights()
            for call in (
                lambda: engine.generate_batch([[1]]),
                lambda: engine.score([[1, 2]]),
                lambda: engine.submit([1]),
            ):
                asleep = "kv_cache" if weights_stay else "weights, kv_cache"
                with pytest.raises(
                    EngineStateError, match=rf"the engine is asleep \({asleep}\): call wake_up\(\) first"
                ):
                    call()
            engine.wake_up()
            if level == 3:  # the numbers are gone
                engine.update_weights()
            assert first_tokens(engine) == expected


def test_what_weights_leave_in_the_allocator_is_given_back_too(monkeypatch):
    seen: list[tuple[bool, int]] = []
    with in_double(make_model("llama")) as engine:
        mirror = engine._binding.source.mirror
        monkeypatch.setattr(
            type(engine.runtime), "release_memory", lambda self: seen.append((mirror.resident, engine._kv.nbytes))
        )
        for arguments, left in (
            ({"level": 1}, (True, 0)),
            ({"level": 2}, (False, 0)),
            ({"tags": "weights"}, (False, None)),
        ):
            kv = engine._kv.nbytes
            engine.sleep(**arguments)
            assert seen[-1] == (left[0], kv if left[1] is None else 0)
            engine.wake_up()


def test_counts_of_penalties_go_with_the_cache():
    """A number for each token of the vocabulary, and that for each place in a batch."""
    params = SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.5)
    with RolloutEngine(llama(), config=EngineConfig(kv_cache_memory="1MiB")) as engine:
        before = engine.generate_batch([[1, 2, 3]], params)[0].completions[0].token_ids
        counts = weakref.ref(engine.core.runner.sampler.penalties)
        engine.sleep()
        assert counts() is None
        engine.wake_up()
        assert engine.generate_batch([[1, 2, 3]], params)[0].completions[0].token_ids == before


def test_memory_that_was_taken_again_is_written_before_anything_else_is_launched(monkeypatch):
    """Whoever generates next may do so under another stream."""
    with in_double(make_model("llama")) as engine:
        engine.sleep(level=2)
        seen: list[tuple[bool, bool]] = []
        mirror = engine._binding.source.mirror
        wait = lambda device=None: seen.append((mirror.complete, bool(engine._kv.layers)))  # noqa: E731
        monkeypatch.setattr(torch.cpu, "synchronize", wait)
        engine.wake_up("weights")
        assert seen[-1] == (True, False)
        engine.wake_up()
        assert seen[-1] == (True, True)


def test_staged_waking_lets_an_update_come_before_the_kv_cache():
    model, other = make_model("llama"), make_model("llama", seed=5)
    with in_double(other) as engine:
        expected = first_tokens(engine)
    with in_double(model) as engine:
        engine.sleep(level=3)
        engine.wake_up("weights")
        assert engine.is_sleeping and engine.stats().kv_cache_bytes == 0
        model.load_state_dict(other.state_dict())
        engine.update_weights()
        engine.wake_up(["kv_cache"])
        assert not engine.is_sleeping and first_tokens(engine) == expected


def test_dropped_weights_that_come_from_elsewhere():
    """Not all of them do: no checkpoint has the frequencies of rotary embeddings."""
    model, other = make_model("llama"), make_model("llama", seed=5)
    with in_double(other) as engine:
        expected = first_tokens(engine)
    with in_double(model) as engine:
        engine.sleep(3)
        for name, tensor in engine._binding.source.tensors().items():
            assert tensor.untyped_storage().nbytes() == 0, name
        engine.wake_up()
        for tensor in engine._binding.source.tensors().values():
            tensor.fill_(0.5)  # whatever the memory held
        engine.update_weights(other.state_dict())
        assert first_tokens(engine) == expected
        model.load_state_dict(other.state_dict())
        assert engine.verify_weights().ok


@pytest.mark.parametrize(
    ("what", "elsewhere", "owner", "operation"),
    [
        ("weights", False, torch, "_foreach_copy_"),
        ("weights", True, torch.Tensor, "copy_"),
        ("kv_cache", False, torch.Tensor, "zero_"),
    ],
)
def test_a_wake_that_is_interrupted_can_be_tried_again(monkeypatch, what, elsewhere, owner, operation):
    """Memory that was taken, and not filled yet, counts as asleep. elsewhere: the weights came from there."""
    with in_double(make_model("llama")) as engine:
        if elsewhere:
            engine.update_weights(make_model("llama", seed=1).state_dict())
        expected = first_tokens(engine)
        engine.sleep(level=2)
        with monkeypatch.context() as patch:
            patch.setattr(owner, operation, _strike)
            with pytest.raises(KeyboardInterrupt):
                engine.wake_up(what)
        with pytest.raises(EngineStateError, match=r"the engine is asleep \(weights, kv_cache\)"):
            first_tokens(engine)
        engine.wake_up()
        assert first_tokens(engine) == expected


def test_weights_that_find_no_memory_keep_their_numbers_and_what_was_woken_before_stays_awake(monkeypatch):
    model = make_model("llama")
    with in_double(model) as engine:
        expected, resize = first_tokens(engine), torch.UntypedStorage.resize_
        engine.sleep(level=2)

        def refuse(storage, nbytes):
            if nbytes:
                raise torch.OutOfMemoryError("out of memory")
            return resize(storage, nbytes)

        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(torch.UntypedStorage, "resize_", refuse)
                wanted = rf"no memory for the weights: {engine.stats().mirror_bytes} bytes wanted, \d+ free. Free some"
                with pytest.raises(EngineStateError, match=wanted):
                    engine.wake_up()
            with pytest.raises(EngineStateError, match=r"the engine is asleep \(weights, kv_cache\)"):
                first_tokens(engine)
        with monkeypatch.context() as patch:
            patch.setattr(PlainBuffer, "restore", lambda self: refuse(self, 1))
            with pytest.raises(EngineStateError, match="no memory for the KV cache"):
                engine.wake_up()
            with pytest.raises(EngineStateError, match=r"the engine is asleep \(kv_cache\)"):
                first_tokens(engine)
            assert engine.update_weights() == 1 and engine.stats().last_update_bytes == 0, "they are what they were"
        engine.wake_up()
        assert first_tokens(engine) == expected


def _strike(*_, **__):
    raise KeyboardInterrupt


def test_a_mirror_of_weights_that_are_at_hand_is_filled_anew(monkeypatch):
    """And not kept in host memory meanwhile. Whoever wakes it meets no old weights, and no new ones under an old version."""
    model, other = make_model("llama"), make_model("llama", seed=1)
    prompt, params = [1, 2, 3] * 20, SamplingParams(temperature=0, max_tokens=8)
    with in_double(other) as engine:
        (expected,) = engine.generate_batch([prompt], params)[0].completions
    monkeypatch.setattr(Mirror, "offload", lambda _: pytest.fail("a copy is kept"))
    with in_double(model) as engine:
        (before,) = engine.generate_batch([prompt], params)[0].completions
        handle = engine.submit(prompt, params)
        engine.pause()
        for tags in (["weights"], ["weights", "kv_cache"]):
            engine.sleep(tags=tags)
            engine.wake_up()
        assert engine.verify_weights().ok
        engine.resume()
        assert handle.result().completions[0].token_ids == before.token_ids and engine.weight_version == 0
        engine.sleep(tags="weights")  # so that the KV cache is there, and what it knows of the old weights
        engine.wake_up()
        assert engine.generate_batch([prompt], params)[0].cached_tokens > 0 == engine.weight_version
        engine.sleep(tags="weights")
        model.load_state_dict(other.state_dict())
        engine.wake_up()
        (output,) = engine.generate_batch([prompt], params)
        assert output.completions[0].token_ids == expected.token_ids
        assert output.cached_tokens == 0 and engine.weight_version == 1
        assert engine.generate_batch([prompt], params)[0].cached_tokens > 0, "they changed once"
        assert engine.weight_version == 1
        assert engine.update_weights() == 2 and engine.stats().last_update_bytes == 0


def test_a_mirror_of_weights_that_cannot_be_had_again_is_kept():
    """Neither are weights from elsewhere those of the model, nor may the model be asked for what does not fit any more."""
    model = make_model("llama")
    with in_double(model) as engine:
        engine.update_weights(make_model("llama", seed=1).state_dict())
        expected = first_tokens(engine)
        with engine.sleeping(level=2):
            assert engine._binding.source.mirror.data.untyped_storage().nbytes() == 0
        assert first_tokens(engine) == expected
        engine.update_weights()
        engine.sleep(level=2)
        head, model.lm_head.weight = model.lm_head.weight, nn.Parameter(torch.zeros(3, 3))
        engine.wake_up()
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match=r"another shape than the engine was built for.*lm_head"):
                first_tokens(engine)
        model.lm_head.weight = head
        assert len(first_tokens(engine)) == 8


@pytest.mark.parametrize("level", [1, 2, 3])
def test_paused_requests_go_on_when_all_that_they_need_is_there_again(level):
    with in_double(make_model("llama")) as engine:
        expected = first_tokens(engine)
        handle = engine.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=8))
        engine.pause()
        engine.sleep(level)
        with pytest.raises(EngineStateError, match=r"the engine is asleep .*: call wake_up\(\) first"):
            engine.resume()
        engine.wake_up()
        if level == 3:
            with pytest.raises(EngineStateError, match=r"sleep\(level=3\) dropped them: call update_weights\(\)"):
                engine.resume()
            assert engine.is_paused and engine.update_weights() == 1
        engine.resume()
        assert handle.result().completions[0].token_ids == expected


def test_levels_and_tags_there_are_not():
    with RolloutEngine(llama(), config=EngineConfig(kv_cache_memory="1MiB")) as engine:
        for level in (0, 4, None, [2], "2"):
            with pytest.raises(InvalidRequestError, match="give 1 .*, 2 .* or 3"):
                engine.sleep(level)
        for call in (lambda: engine.sleep(tags=["kv"]), lambda: engine.wake_up("kv")):
            with pytest.raises(InvalidRequestError, match=r"tags=\['kv'\]: there are weights, kv_cache, graphs"):
                call()
        for call in (lambda: engine.sleep(tags=3), lambda: engine.wake_up(3)):
            with pytest.raises(InvalidRequestError, match=r"tags=\[3\]: there are weights, kv_cache, graphs"):
                call()
        engine.sleep(tags=["graphs", "weights"])
        assert not engine.is_sleeping, "the weights are the trainer's, and graphs wake by themselves"


def test_asleep_within_a_block(monkeypatch):
    with RolloutEngine(llama(), config=EngineConfig(kv_cache_memory="1MiB")) as engine:
        with engine.sleeping():
            assert engine.is_sleeping
        assert not engine.is_sleeping
        with pytest.raises(ZeroDivisionError), engine.sleeping(level=2):
            raise ZeroDivisionError
        assert not engine.is_sleeping
        with monkeypatch.context() as patch:
            patch.setattr(PlainBuffer, "restore", lambda self: (_ for _ in ()).throw(MemoryError()))
            with pytest.raises(ZeroDivisionError) as caught, engine.sleeping():
                raise ZeroDivisionError
            assert "still asleep: no memory for the KV cache" in caught.value.__notes__[0]
            with pytest.raises(EngineStateError, match="no memory"), engine.sleeping():
                pass
        with monkeypatch.context() as patch, pytest.raises(KeyError), engine.sleeping():
            patch.setattr(engine, "wake_up", lambda: 1 // 0)  # whatever it may raise
            raise KeyError
        engine.wake_up()


_CYCLES = """
import gc, os
from families import make_model
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

model = make_model("llama")
params = SamplingParams(temperature=0, max_tokens=3, repetition_penalty=1.1)
config = EngineConfig(kv_cache_memory="48MiB", block_size=16, dtype="float64")
with RolloutEngine(model, config=config) as engine:
    expected, sizes = None, []
    for cycle in range(230):
        tokens = [o.completions[0].token_ids for o in engine.generate_batch([[1, 2, 3], [9] * 20], params)]
        expected = expected or tokens
        assert tokens == expected
        engine.sleep(level=1 + cycle % 3)
        engine.wake_up("weights")
        engine.update_weights()
        engine.wake_up()
        if cycle % 10 == 0:
            gc.collect()
        sizes.append(resident())
    drift = max(sizes[-30:]) - max(sizes[20:50])
    assert drift < 3 * 2**20, (drift, sizes[::20])
"""


def test_cycles_of_sleep_update_wake_and_rollout_leave_nothing_behind():
    ranks.run_script(_CYCLES)
