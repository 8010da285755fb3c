"""Memory: what was configured is what is held, sleep gives it back to the system, and nothing grows with use."""

import gc
import json
import os
import weakref
from functools import cache

import oracle
import pytest
import ranks
import torch
from adapted import two_adapters
from families import make_model
from peft import get_peft_model_state_dict
from transformers import PreTrainedModel

from stoker.engine.device import CpuRuntime
from stoker.engine.request import Request
from stoker.kernels.errors import InvalidConfigError, InvalidRequestError
from stoker.kernels.host_memory import free_host_memory, host_memory
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

MIB = 2**20


@cache
def llama() -> PreTrainedModel:
    return make_model("llama")


TOKEN_BYTES = 2 * 2 * (16 + 16) * 4  # layers, KV heads, key and value, fp32


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


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # the latter's windows have blocks of their own
@pytest.mark.parametrize("memory", ["auto", 500_000])
def test_what_could_never_run_takes_no_memory(family, memory, monkeypatch):
    """Rows beyond the blocks there are, each of which has a sequence of its own, and tokens beyond their places."""
    monkeypatch.setattr(CpuRuntime, "free_memory", lambda self: 1_600_000)
    many = {"max_num_seqs": 2_000_000, "max_num_batched_tokens": 2_000_000}
    prompts = [[token, *([7] * (token % 9))] for token in range(1, 120)]
    found = []
    for sizes in (many, {"max_num_seqs": 120, "max_num_batched_tokens": 2048}):
        config = EngineConfig(kv_cache_memory=memory, block_size=4, max_model_len=64, **sizes)
        with RolloutEngine(make_model(family), config=config) as engine:
            inputs, peak = engine.core.inputs, 0
            handles = [engine.submit(prompt, SamplingParams(temperature=0, max_tokens=6)) for prompt in prompts]
            while any(not handle.done for handle in handles):
                engine.wait(handles, share=0)
                engine.core.scheduler.check()
                peak = max(peak, len(engine.core.scheduler.running))
            found.append((peak, [handle.result().completions[0].token_ids for handle in handles]))
            if sizes is many:
                assert engine.config.max_num_seqs == 2_000_000, "as it was given"
                pages = engine._kv.num_blocks
                assert inputs.max_rows < 2 * pages and inputs.max_tokens <= 8 * pages
    assert found[0] == found[1] and peak > 20, "and what runs at a time is what ran"


@pytest.mark.parametrize("amount", ["auto", 900_000])
def test_what_torch_holds_and_nobody_uses_is_free_for_the_kv_cache(amount, monkeypatch):
    """Of a device, whose driver gives the cache its memory and knows of none that torch could do without."""
    held = 800_000
    allocate = CpuRuntime.allocate

    def give_back(self):
        nonlocal held
        held = 0

    def take(self, nbytes):
        if nbytes > self.free_memory():
            raise RuntimeError("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY")
        return allocate(self, nbytes)

    monkeypatch.setattr(CpuRuntime, "free_memory", lambda self: 1_000_000 - held)
    monkeypatch.setattr(CpuRuntime, "release_memory", give_back)
    monkeypatch.setattr(CpuRuntime, "allocate", take)
    with RolloutEngine(llama(), config=EngineConfig(kv_cache_memory=amount)) as engine:
        wanted, stats = 300_000 if amount == "auto" else amount, engine.stats()
        assert wanted - stats.kv_block_bytes < stats.kv_cache_bytes <= wanted
        assert engine.core.scheduler.max_num_seqs == wanted // stats.kv_block_bytes, "so many run as there are blocks"


def test_the_smallest_kv_cache_has_a_block_beside_the_null_block() -> None:
    with pytest.raises(InvalidConfigError, match=rf"holds no block: two blocks of 16 tokens take {32 * TOKEN_BYTES} "):
        RolloutEngine(llama(), config=EngineConfig(kv_cache_memory=32 * TOKEN_BYTES - 1))
    with RolloutEngine(llama(), config=EngineConfig(kv_cache_memory=32 * TOKEN_BYTES)) as engine:
        assert engine.stats().num_kv_blocks == 1
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (output,) = engine.generate_batch([list(range(1, 11))], params)
        assert len(output.completions[0].token_ids) == 6


def test_the_longest_request_that_is_taken_runs_to_its_end() -> None:
    """Windows hold more while a prompt is computed than later, and there is no room beyond."""
    model, params = make_model("gemma2"), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    config = EngineConfig(max_num_seqs=1, block_size=4, max_num_batched_tokens=64, kv_cache_memory=64_000)
    with RolloutEngine(model, config=config) as engine:
        longest, while_decoding = engine._kv.most_tokens(64), engine._kv.most_tokens(4)
        assert 16 < longest < while_decoding <= engine.max_model_len
        prompt = [3 + i * i % 89 for i in range(longest - 5)]
        with pytest.raises(
            InvalidRequestError, match=rf"may grow to {longest + 1} tokens and the KV cache holds {longest}"
        ):
            engine.generate_batch([prompt], params)
        (output,) = engine.generate_batch([prompt[1:]], params)
        tokens = output.completions[0].token_ids
        assert tokens == oracle.greedy(model, prompt[1:], 6, tokens)


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # whose windows hold more while a prompt is computed than later
def test_auto_has_room_for_the_longest_sequence_where_one_runs_at_a_time(family: str) -> None:
    model, prompt = make_model(family), [3 + i * i % 89 for i in range(90)]
    config = EngineConfig(max_num_seqs=1, max_model_len=96, block_size=4)
    with RolloutEngine(model, config=config) as engine:
        (output,) = engine.generate_batch([prompt], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        tokens = output.completions[0].token_ids
        assert tokens == oracle.greedy(model, prompt, 6, tokens)


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.mark.parametrize(
    ("groups", "folder", "files", "limit", "free"),
    [
        ("0::/pod/box", "sys/fs/cgroup/pod/box", V2, "600000", 600_000 - 500_000 + 100_000),
        ("0::/pod/box", "sys/fs/cgroup/pod", V2, "600000", 200_000),  # of a group above
        ("0::/pod/box", "sys/fs/cgroup", V2, "600000", 200_000),  # its own is the root, as a container sees it
        ("0::/", "sys/fs/cgroup", V2, "400000", 0),  # more is taken than it may take
        ("0::/pod/box", "sys/fs/cgroup/pod/box", V2, "max", 1_024_000),
        ("0::/pod/box", "sys/fs/cgroup/other", V2, "600000", 1_024_000),
        ("5:cpu,cpuacct:/\n4:memory:/box\n0::/", "sys/fs/cgroup/memory/box", V1, "600000", 200_000),
        ("4:memory:/docker/1f", "sys/fs/cgroup/memory", V1, "9223372036854771712", 1_024_000),
        (None, "sys/fs/cgroup", V2, "600000", 1_024_000),
    ],
)
def test_free_memory_is_the_system_s_within_the_limit_of_a_container(groups, folder, files, limit, free, tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:  1000 kB\n")
    if groups is not None:
        (tmp_path / "proc/self/cgroup").write_text(groups + "\n")
    (tmp_path / folder).mkdir(parents=True)
    for name, text in zip((*files[:2], "memory.stat"), (limit, "500000", f"anon 4\n{files[2]} 100000"), strict=True):
        (tmp_path / folder / name).write_text(text + "\n")
    assert free_host_memory(tmp_path) == free


def test_a_system_that_does_not_tell_counts_as_free(tmp_path):
    assert free_host_memory(tmp_path) >= free_host_memory() > 0


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


def bytes_held() -> int:
    """Of all tensors there are, each memory once."""
    gc.collect()
    storages = [t.untyped_storage() for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@pytest.mark.parametrize("settings", [{}, {"dtype": "float64"}, {"quantization": "fp8"}], ids=str)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("asleep", [False, True])
def test_a_closed_engine_holds_no_memory(settings: dict, lora: bool, asleep: bool) -> None:
    """Whoever still has it goes on training: neither the storages that weights lay side by side in nor copies of any kind."""
    model = two_adapters() if lora else make_model("llama")
    before = bytes_held()
    engine = RolloutEngine(model, config=EngineConfig(kv_cache_memory="1MiB", **settings))
    if lora:
        engine.load_adapter("more", (get_peft_model_state_dict(model), model.peft_config["default"]))
    handle = engine.submit([1, 2, 3], SamplingParams(max_tokens=4), **({"adapter": "more"} if lora else {}))
    tokens = handle.result().completions[0].token_ids
    if asleep:
        engine.sleep(2)
    engine.close()
    assert bytes_held() - before < 100, repr(engine)
    assert handle.result().completions[0].token_ids == tokens and engine.stats().num_layers == 2


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "lfm2"])
def test_nothing_holds_what_sleep_gives_back(family: str) -> None:
    with RolloutEngine(make_model(family), config=EngineConfig(kv_cache_memory="4MiB", max_num_seqs=8)) as engine:
        engine.generate_batch([[1, 2, 3]], SamplingParams(max_tokens=4))
        kv = engine.core.runner.kv
        held = [weakref.ref(t) for tensors in (*kv.layers, *kv.states) for t in tensors]
        engine.sleep()
        gc.collect()
        assert held and not any(ref() is not None for ref in held)


# -- resident memory, in a process of its own --------------------------------------------------------------------

_SLEEP = """
import gc, json, os, sys, time
import torch
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
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams
import transformers.models.llama.modeling_llama

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon:"))

def run(path):
    engine = RolloutEngine.from_pretrained(path, config=EngineConfig(kv_cache_memory="1MiB", max_num_seqs=4))
    return engine, engine.generate_batch([[1, 2, 3, 4]], SamplingParams(temperature=0, max_tokens=8))

run(sys.argv[2])[0].close()  # what is imported and set up once would count as well
before = anonymous()
engine, batch = run(sys.argv[1])
print(json.dumps({
    "grown": anonymous() - before,
    "weights": sum(p.nbytes for p in engine._binding.source.module.parameters()),
    "tokens": batch[0].completions[0].token_ids,
}))
"""


@pytest.fixture(scope="module")
def sleeper() -> dict:
    return json.loads(ranks.run_script(_SLEEP))


def test_sleep_gives_memory_back_to_the_system(sleeper):
    assert sleeper["given_back"] > 290_000_000
    assert sleeper["same"]


def test_two_hundred_cycles_of_sleep_and_update_leave_nothing_behind(sleeper):
    assert sleeper["version"] == 240
    assert sleeper["grown"] < 3 * MIB, f"grown by {sleeper['grown']} bytes"
    assert sleeper["last"]


def test_weights_from_a_file_stay_in_the_file(tmp_path):
    model = make_model(
        "llama", hidden_size=512, intermediate_size=1536, num_hidden_layers=6, vocab_size=4096, num_attention_heads=8
    )
    model.save_pretrained(tmp_path, max_shard_size="20MB")
    make_model("llama").save_pretrained(tmp_path / "small")
    seen = json.loads(ranks.run_script(_MAPPED, str(tmp_path), str(tmp_path / "small")))
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
