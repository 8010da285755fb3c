"""Memory that comes back at the same addresses, on a driver that is strict about every call."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from families import make_model
from pretend_device import PretendDevice, build, close
from tokenizer_kinds import tokenizer
from torch import Tensor

from stoker.engine import device as device_module
from stoker.engine import virtual_memory
from stoker.engine.device import CpuRuntime
from stoker.engine.graphs import GraphStep
from stoker.engine.layers import derived_weights
from stoker.engine.virtual_memory import DeviceBuffer, PlainBuffer, VirtualBuffer
from stoker.kernels.errors import EngineStateError
from stoker.kernels.triton_ops import TRITON
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams, binding
from stoker.rollout import engine as engine_module

KIB = 2**10


@dataclass
class StrictDriver:
    """Keeps the books of a CUDA driver and raises where they would not balance. Its memory is host memory."""

    granularity: int = 4 * KIB
    ranges: dict[int, int] = field(default_factory=dict)
    mapped: dict[int, int] = field(default_factory=dict)
    fail_at: int = -1  # the call to fail, counted over reserve and map
    calls: int = 0
    stuck: int = -1  # an address that cannot be unmapped
    interrupted: int = -1  # the call of map or unmap, counted over both, at whose end Ctrl-C comes
    changes: int = 0
    running: bool = False  # whether kernels that were launched may still read the memory
    bytes_of: dict[int, Tensor] = field(default_factory=dict)

    def _count(self) -> None:
        self.calls += 1
        if self.calls - 1 == self.fail_at:
            raise RuntimeError("out of memory")

    def _changed(self) -> None:
        self.changes += 1
        if self.changes - 1 == self.interrupted:
            signal.raise_signal(signal.SIGINT)

    def reserve(self, size: int) -> int:
        assert size > 0 and size % self.granularity == 0
        self._count()
        address = 2**40 + 2**33 * len(self.bytes_of)
        self.ranges[address] = size
        self.bytes_of[address] = torch.zeros(size, dtype=torch.uint8)
        return address

    def free(self, address: int, size: int) -> None:
        assert self.ranges.pop(address) == size
        assert not any(address <= a < address + size for a in self.mapped), "freed with memory in it"

    def map(self, address: int, size: int) -> None:
        assert size > 0 and size % self.granularity == address % self.granularity == 0
        assert any(a <= address and address + size <= a + n for a, n in self.ranges.items()), "outside of any range"
        assert all(address + size <= a or a + n <= address for a, n in self.mapped.items()), "mapped twice"
        self._count()
        self.mapped[address] = size
        base = max(a for a in self.ranges if a <= address)
        self.bytes_of[base][address - base : address - base + size] = 255  # garbage, and as a float NaN
        self._changed()

    def unmap(self, address: int, size: int) -> None:
        if address == self.stuck:
            raise RuntimeError("cannot unmap")
        assert not self.running, "given back under a kernel that reads it"
        assert self.mapped.pop(address) == size, "not what was mapped there"
        self._changed()

    def synchronize(self) -> None:
        self.running = False

    def tensor(self, address: int, size: int, owner: object) -> Tensor:
        assert sum(self.mapped.values()) >= size
        tensor = self.bytes_of[address][:size]
        tensor.owner = owner  # type: ignore[attr-defined]
        return tensor


@pytest.mark.parametrize("nbytes", [1, 4 * KIB, 10 * KIB, 64 * KIB + 1])
def test_memory_is_given_back_and_comes_back_where_it_was(nbytes: int) -> None:
    driver = StrictDriver()
    buffer = VirtualBuffer(nbytes, driver, chunk=16 * KIB)
    whole = -(-nbytes // driver.granularity) * driver.granularity
    place = buffer.tensor.data_ptr()
    for _ in range(3):
        assert sum(driver.mapped.values()) == whole and buffer.tensor.shape == (nbytes,)
        buffer.restore()  # it is there already
        driver.running = True
        buffer.release()
        assert not driver.mapped and driver.ranges
        buffer.release()
        buffer.restore()
        assert buffer.tensor.data_ptr() == place
    del buffer
    gc.collect()
    assert not driver.mapped and not driver.ranges


def test_what_fails_half_way_leaves_nothing_behind() -> None:
    for fail_at in range(6):
        driver = StrictDriver(fail_at=fail_at)
        if fail_at < 5:
            with pytest.raises(RuntimeError, match="out of memory"):
                VirtualBuffer(64 * KIB, driver, chunk=16 * KIB)
            gc.collect()
            assert not driver.mapped and not driver.ranges
    for fail_at in range(5, 9):
        driver = StrictDriver()
        buffer = VirtualBuffer(64 * KIB, driver, chunk=16 * KIB)
        buffer.release()
        driver.fail_at = fail_at
        for _ in range(2):
            if driver.calls <= fail_at:
                with pytest.raises(RuntimeError, match="out of memory"):
                    buffer.restore()
                assert not driver.mapped
        buffer.restore()
        assert sum(driver.mapped.values()) == 64 * KIB


def test_after_an_unmap_that_failed_the_missing_pieces_are_mapped_again() -> None:
    driver = StrictDriver()
    buffer = VirtualBuffer(64 * KIB, driver, chunk=16 * KIB)
    driver.stuck = min(driver.mapped) + 16 * KIB
    with pytest.raises(RuntimeError, match="cannot unmap"):
        buffer.release()
    assert 0 < sum(driver.mapped.values()) < 64 * KIB
    driver.stuck = -1
    buffer.restore()
    assert sum(driver.mapped.values()) == 64 * KIB
    buffer.release()
    assert not driver.mapped


# -- an engine on it -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VirtualRuntime(CpuRuntime):
    driver: StrictDriver = field(default_factory=StrictDriver)
    graphs: bool = True

    def allocate(self, nbytes: int) -> DeviceBuffer:
        return VirtualBuffer(nbytes, self.driver, chunk=64 * KIB)


def test_an_engine_sleeps_and_wakes_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[VirtualRuntime] = []
    monkeypatch.setattr(engine_module, "runtime_for", lambda device: made.append(VirtualRuntime(device)) or made[-1])
    prompts, params = [[1, 2, 3], [7] * 20], SamplingParams(temperature=0, max_tokens=12)
    with RolloutEngine(make_model("llama"), config=EngineConfig(kv_cache_memory="1MiB")) as engine:
        driver = made[0].driver
        expected = [o.completions[0].token_ids for o in engine.generate_batch(prompts, params)]
        places = [t.data_ptr() for pair in engine._kv.layers for t in pair]
        for _ in range(3):
            driver.running = True
            engine.sleep()
            assert not driver.mapped and engine.stats().kv_cache_bytes == 0
            driver.fail_at = driver.calls + 3
            with pytest.raises(EngineStateError, match="no memory for the KV cache"):
                engine.wake_up()
            assert not driver.mapped and engine.is_sleeping
            engine.wake_up()
            assert [t.data_ptr() for pair in engine._kv.layers for t in pair] == places
            assert [o.completions[0].token_ids for o in engine.generate_batch(prompts, params)] == expected
    gc.collect()
    assert not driver.mapped


def test_ctrl_c_between_the_driver_and_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[VirtualRuntime] = []
    monkeypatch.setattr(engine_module, "runtime_for", lambda device: made.append(VirtualRuntime(device)) or made[-1])
    params = SamplingParams(temperature=0, max_tokens=12)
    with RolloutEngine(make_model("llama"), config=EngineConfig(kv_cache_memory="1MiB")) as engine:
        driver, (expected,) = made[0].driver, engine.generate_batch([[1, 2, 3]], params)
        for asleep, action in ((True, engine.sleep), (False, engine.wake_up)) * 2:
            driver.interrupted = driver.changes + 3
            with pytest.raises(KeyboardInterrupt):
                action()
            assert engine.is_sleeping is asleep
        (again,) = engine.generate_batch([[1, 2, 3]], params)
        assert again.completions == expected.completions
    gc.collect()
    assert not driver.mapped


def test_graphs_outlive_a_sleep_where_addresses_do(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr(GraphStep, "release_graphs", lambda self: released.append(1))
    for runtime, lasting in ((VirtualRuntime, True), (CpuRuntime, False)):
        monkeypatch.setattr(engine_module, "runtime_for", runtime)
        with RolloutEngine(make_model("llama"), config=EngineConfig(kv_cache_memory="1MiB")) as engine:
            core = engine.core
            core.runner = GraphStep(core.runner, 4)  # type: ignore[arg-type]
            released.clear()
            for kind, kept in (("kv_cache", lasting), ("graphs", False), ("weights", True)):
                engine.sleep(tags=[kind])
                assert bool(released) != kept
                released.clear()
                engine.wake_up()
            engine.generate_batch([[1, 2]], SamplingParams(max_tokens=2, repetition_penalty=1.2))
            engine.sleep()
            assert released, "they remember the penalties' counts, which are gone"
            assert core.runner.sampler.penalties is None
            engine.wake_up()


@pytest.mark.parametrize("fields", [{"dtype": "float64"}, {"quantization": "fp8"}], ids=["mirror", "fp8"])
@pytest.mark.parametrize("lasting", [True, False])
def test_graphs_outlive_copies_of_weights_that_sleep_where_addresses_do(
    fields: dict[str, Any], lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = StrictDriver()
    if lasting:
        make = lambda nbytes, device: VirtualBuffer(nbytes, driver, chunk=64 * KIB)  # noqa: E731
        for module in (binding, derived_weights):
            monkeypatch.setattr(module, "virtual_buffer", make)
    released: list[int] = []
    monkeypatch.setattr(GraphStep, "release_graphs", lambda self: released.append(1))
    model = make_model("llama")
    config = EngineConfig(kv_cache_memory="1MiB", **fields)
    with RolloutEngine(model, config=config) as engine:
        core = engine.core
        params = SamplingParams(max_tokens=4, temperature=0)
        expected = engine.generate_batch([[1, 2]], params)
        core.runner = GraphStep(core.runner, 4)  # type: ignore[arg-type]
        for level in (2, 3):
            engine.sleep(level, tags=["weights"])
            assert bool(released) != lasting and not driver.mapped
            assert not engine._binding.resident
            released.clear()
            engine.wake_up()
            if level == 3:
                engine.update_weights()
                released.clear()
            assert engine.verify_weights().ok
        core.runner = core.runner.eager  # type: ignore[attr-defined]
        (again,) = engine.generate_batch([[1, 2]], params)[0].completions
        assert again.token_ids == expected[0].completions[0].token_ids


@dataclass(frozen=True)
class VirtualDevice(PretendDevice):
    driver: StrictDriver = field(default_factory=StrictDriver)

    def allocate(self, nbytes: int) -> DeviceBuffer:
        return VirtualBuffer(nbytes, self.driver, chunk=64 * KIB)


def test_what_requests_follow_is_given_back_when_no_graph_remembers_it() -> None:
    one = tokenizer("byte-level")
    model = make_model("llama", vocab_size=len(one), num_hidden_layers=1)
    params = SamplingParams(regex="(yes|no), [0-9]{2}", max_tokens=9, seed=1)
    with build(model, runtime=VirtualDevice, decode_window=2) as engine:
        engine._requests.tokenizer = engine._requests.constraint.tokenizer = one
        engine._requests.find_eos_ids = lambda: frozenset([one.eos_token_id])
        inputs, runner = engine.core.inputs, engine.core.runner
        assert isinstance(runner, GraphStep)
        expected = engine.generate_batch([[5, 6, 7]] * 2, params)
        captured = len(runner._graphs)
        for level, kept in ((1, True), (2, False), (1, True)):
            rows = inputs.constraints.rows
            engine.sleep(level=level)
            assert (inputs.constraints.rows is rows) == kept == runner.has_graphs
            engine.wake_up()
            close(engine.generate_batch([[5, 6, 7]] * 2, params), expected)
            assert len(runner._graphs) == captured


def workspace_of(engine: RolloutEngine) -> weakref.ref[Tensor]:
    (partials,) = engine.core.inputs._workspace["buffers"]._partials.values()
    return weakref.ref(partials[0])


@pytest.mark.parametrize("graphs", [True, False])
def test_the_workspace_of_attention_is_given_back_when_no_graph_remembers_it(graphs: bool) -> None:
    prompts, params = [[1, 2, 3], [7] * 5], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    levels = [(1, True), (2, False)] if graphs else [(1, False)]
    with build(ops=TRITON, runtime=VirtualDevice, num_layers=1, max_num_seqs=2, use_graphs=graphs) as engine:
        before = engine.generate_batch(prompts, params)
        for level, kept in levels:
            workspace = workspace_of(engine)
            assert workspace() is not None and engine.core.runner.has_graphs == graphs
            engine.sleep(level)
            assert (workspace() is not None) == engine.core.runner.has_graphs == kept
            engine.wake_up()
            close(engine.generate_batch(prompts, params), before)
            assert (workspace_of(engine)() is workspace()) == kept
        workspace = workspace_of(engine)
        engine.close()
        assert workspace() is None and not hasattr(engine.core, "runner")


def test_without_the_driver_module_the_cache_is_an_ordinary_tensor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent(device: torch.device) -> None:
        raise ImportError("No module named 'cuda'")

    monkeypatch.setattr(virtual_memory, "CudaDriver", absent)
    monkeypatch.setattr(device_module, "PlainBuffer", lambda nbytes, device: PlainBuffer(nbytes, torch.device("cpu")))
    buffer = device_module.CudaRuntime(torch.device("cuda")).allocate(100)
    assert not buffer.stable_addresses and buffer.tensor.shape == (100,)
    assert "captured again after sleep: No module named 'cuda'" in caplog.text


def test_a_fork_leaves_the_memory_to_the_process_that_has_it(monkeypatch):
    driver = StrictDriver()
    buffer = VirtualBuffer(64 * KIB, driver, chunk=16 * KIB)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        del buffer
        gc.collect()
    assert sum(driver.mapped.values()) == 64 * KIB and driver.ranges


def test_nothing_is_given_back_at_exit_when_the_driver_may_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.finalize] = []
    finalize = weakref.finalize

    def noted(*arguments: object) -> weakref.finalize:
        made.append(finalize(*arguments))
        return made[-1]

    monkeypatch.setattr(weakref, "finalize", noted)
    buffer = VirtualBuffer(64 * KIB, StrictDriver())
    assert [finalizer.atexit for finalizer in made] == [False] and made[0].alive
    del buffer
    gc.collect()
    assert not made[0].alive, "but as soon as nobody has it"
