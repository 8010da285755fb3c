"""Memory: what was configured is what is held, sleep gives it back to the system, and nothing grows with use."""

import gc
import json
import os
import subprocess
import sys
import weakref
from functools import cache

import pytest
import torch
from families import make_model
from transformers import PreTrainedModel

from stoker.engine.device import CpuRuntime
from stoker.engine.request import Request
from stoker.engine.virtual_memory import PlainBuffer
from stoker.kernels.errors import EngineStateError, InvalidRequestError
from stoker.kernels.host_memory import host_memory
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

MIB = 2**20


@cache
def llama() -> PreTrainedModel:
    return make_model("llama")


TOKEN_BYTES = 3 * 2 * (16 + 16) * 4  # layers, KV heads, key and value, fp32


@pytest.mark.parametrize("block_size", [1, 7, 16, 256])
@pytest.mark.parametrize("amount", [600_000, "1MiB", 1_048_577, "3 MB"])
def test_the_kv_cache_takes_what_was_configured(amount, block_size):
    config = EngineConfig(kv_cache_memory=amount, block_size=block_size)
    with RolloutEngine(llama(), config=config) as engine:
        stats = engine.stats()
        assert stats.kv_block_bytes == block_size * TOKEN_BYTES
        assert config.kv_cache_memory - stats.kv_block_bytes < stats.kv_cache_bytes <= config.kv_cache_memory
        assert stats.kv_cache_bytes == (stats.num_kv_blocks + 1) * stats.kv_block_bytes
        assert stats.num_free_kv_blocks == stats.num_kv_blocks
        assert len({t.untyped_storage().data_ptr() for pair in engine.core.runner.kv.layers for t in pair}) == 1
        assert engine.core.runner.kv.layers[0][0].untyped_storage().nbytes() == stats.kv_cache_bytes
        assert sum(t.nbytes for pair in engine.core.runner.kv.layers for t in pair) == stats.kv_cache_bytes
        engine.sleep()
        assert engine.stats().kv_cache_bytes == 0 and engine.stats().is_sleeping
        engine.wake_up()
        assert engine.stats() == stats
    assert engine.stats().kv_cache_bytes == 0


def test_auto_takes_what_the_configured_sequences_need_or_a_share_of_what_is_free(monkeypatch):
    config = EngineConfig(max_num_seqs=3, max_model_len=100)
    with RolloutEngine(llama(), config=config) as engine:
        assert engine.stats().num_kv_blocks == 3 * 7
    monkeypatch.setattr(CpuRuntime, "free_memory", lambda self: 1_000_000)
    with RolloutEngine(llama(), config=EngineConfig()) as engine:
        assert 300_000 - engine.stats().kv_block_bytes < engine.stats().kv_cache_bytes <= 300_000


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


def test_requests_do_not_outlive_their_call():
    others = {
        id(o): o for o in gc.get_objects() if type(o) is Request
    }  # of earlier tests; held, as they may go any time

    def requests() -> int:
        gc.collect()
        return sum(type(o) is Request and id(o) not in others for o in gc.get_objects())

    with RolloutEngine(llama(), config=EngineConfig(kv_cache_memory="1MiB", block_size=4)) as engine:
        for i in range(20):
            batch = engine.generate_batch([[1 + i, 2, 3]] * 3, SamplingParams(n=2, max_tokens=6, logprobs=2))
        assert len(batch) == 3 and requests() == 0
        with pytest.raises(ValueError, match="prompt 0"):
            engine.generate_batch([[]])
        assert requests() == 0


def test_an_engine_that_is_dropped_is_gone():
    engine = RolloutEngine(make_model("llama"), config=EngineConfig(kv_cache_memory="1MiB"))
    engine.generate_batch([[1, 2, 3]], SamplingParams(max_tokens=4))
    kv = weakref.ref(engine.core.runner.kv.layers[0][0])
    shell = weakref.ref(engine._binding.shell.module)
    model = weakref.ref(engine._binding.source.module)
    del engine
    gc.collect()
    assert (kv(), shell(), model()) == (None, None, None)


# -- levels, tags, a context ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("what", "operation"), [("weights", "copy_"), ("kv_cache", "zero_")])
def test_a_wake_that_is_interrupted_can_be_tried_again(monkeypatch, what, operation):
    """Memory that was taken, and not filled yet, counts as asleep."""
    with in_double(make_model("llama")) as engine:
        expected = first_tokens(engine)
        engine.sleep(level=2)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, operation, _strike)
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


def test_levels_and_tags_there_are_not():
    with RolloutEngine(llama(), config=EngineConfig(kv_cache_memory="1MiB")) as engine:
        for level in (0, 4, None):
            with pytest.raises(InvalidRequestError, match="give 1 .*, 2 .* or 3"):
                engine.sleep(level)
        for call in (lambda: engine.sleep(tags=["kv"]), lambda: engine.wake_up("kv")):
            with pytest.raises(InvalidRequestError, match=r"tags=\['kv'\]: there are weights, kv_cache, graphs"):
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
        engine.wake_up()


_CYCLES = """
import gc, os
import torch
torch.set_num_threads(1)
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
    env = os.environ | {"PYTHONPATH": os.path.dirname(os.path.abspath(__file__)), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-P", "-c", _CYCLES], check=True, env=env, timeout=300)


# -- resident memory, in a process of its own --------------------------------------------------------------------

_SLEEP = """
import gc, json, os, sys, time
import torch
torch.set_num_threads(1)
from families import make_model
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

params = SamplingParams(seed=1, max_tokens=4, n=2, repetition_penalty=1.1)
prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
out = {}
engine = RolloutEngine(make_model("llama"), config=EngineConfig(kv_cache_memory=300_000_000, max_num_seqs=8))
before = engine.generate_batch(prompts, params)
for pair in engine.core.runner.kv.layers:
    for cache in pair:
        cache.fill_(1.0)
del pair, cache
awake = resident()
engine.sleep()
out["given_back"] = awake - resident()
engine.wake_up()
after = engine.generate_batch(prompts, params)
out["same"] = [o.completions for o in after] == [o.completions for o in before]
engine.close()

model = make_model("llama")
engine = RolloutEngine(model, config=EngineConfig(kv_cache_memory="8MiB", max_num_seqs=8))
weight = model.model.layers[0].mlp.up_proj.weight
expected = [o.completions for o in engine.generate_batch(prompts, params)]
def cycle(i):
    engine.sleep()
    if i % 10 == 0:
        weight.data = weight.detach().clone()
    elif i % 3 == 0:
        with torch.no_grad():
            weight.add_(0.0)
    engine.update_weights()
    engine.wake_up()
    batch = engine.generate_batch([[*p, i % 100] for p in prompts] if i % 2 else prompts, params)
    batch.raise_for_errors()
    return [[(c.token_ids, c.logprobs) for c in o.completions] for o in batch]

for i in range(40):
    cycle(i)
gc.collect()
start = resident()
for i in range(200):
    last = cycle(i + 1)
gc.collect()
out["grown"] = resident() - start
out["version"] = engine.weight_version
out["last"] = cycle(240) == [[(c.token_ids, c.logprobs) for c in o] for o in expected]
engine.core.scheduler.check()
print(json.dumps(out))
"""

_MAPPED = """
import json, sys
import torch
torch.set_num_threads(1)
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams
import transformers.models.llama.modeling_llama

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon:"))

before = anonymous()
engine = RolloutEngine.from_pretrained(sys.argv[1], config=EngineConfig(kv_cache_memory="1MiB", max_num_seqs=4))
batch = engine.generate_batch([[1, 2, 3, 4]], SamplingParams(temperature=0, max_tokens=8))
print(json.dumps({
    "grown": anonymous() - before,
    "weights": sum(p.nbytes for p in engine._binding.source.module.parameters()),
    "tokens": batch[0].completions[0].token_ids,
}))
"""


def in_another_process(code: str, *arguments: str) -> dict:
    env = os.environ | {"PYTHONPATH": os.path.dirname(os.path.abspath(__file__)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def sleeper() -> dict:
    return in_another_process(_SLEEP)


def test_sleep_gives_memory_back_to_the_system(sleeper):
    assert sleeper["given_back"] > 290_000_000
    assert sleeper["same"]


def test_two_hundred_cycles_of_sleep_and_update_leave_nothing_behind(sleeper):
    assert sleeper["version"] == 240
    assert sleeper["grown"] < 3 * MIB, f"grown by {sleeper['grown']} bytes"
    assert sleeper["last"]


def test_weights_from_a_file_stay_in_the_file(tmp_path):
    model = make_model(
        "llama", hidden_size=512, intermediate_size=1536, num_hidden_layers=4, vocab_size=4096, num_attention_heads=8
    )
    model.save_pretrained(tmp_path, max_shard_size="20MB")
    seen = in_another_process(_MAPPED, str(tmp_path))
    assert seen["weights"] == sum(p.nbytes for p in model.parameters()) > 50 * MIB
    with RolloutEngine(model, config=EngineConfig(kv_cache_memory="1MiB")) as engine:
        (c,) = engine.generate_batch([[1, 2, 3, 4]], SamplingParams(temperature=0, max_tokens=8))[0].completions
    assert seen["tokens"] == c.token_ids
    assert seen["grown"] < 0.3 * seen["weights"], seen


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_large_host_memory_is_given_back_with_its_last_view() -> None:
    before = resident()
    memory = host_memory(64 * 2**20)
    assert resident() - before < 8 * 2**20, "memory nobody has written to"
    memory.fill_(1)
    view = memory[64:128].view(torch.float32)
    del memory
    assert resident() - before > 56 * 2**20 and view.shape == (16,)
    del view
    assert resident() - before < 8 * 2**20
    with pytest.raises(MemoryError, match=r"^\d+ bytes: "):
        host_memory(2**62)
