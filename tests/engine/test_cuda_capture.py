"""A capture on CUDA, and what it leaves behind: modes, memory pools, garbage; and a capture that cannot be ended."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stoker.engine.device import CudaRuntime


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, noted: Callable[[str], Callable[..., None]]) -> None:
    """As much of ``torch.cuda`` as a capture calls."""
    stream, streams = SimpleNamespace(wait_stream=lambda other: None), iter(range(1))
    pools: dict[Any, weakref.WeakSet[Any]] = {}  # every one ever used, and its graphs

    class Graph:
        def capture_begin(self, pool: Any, **options: Any) -> None:
            noted("begin")(self)
            if pool in pools and not pools[pool]:
                raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
            pools.setdefault(pool, weakref.WeakSet()).add(self)

        def capture_end(self) -> None:
            noted("end")(self)

        def replay(self) -> None:
            noted("replay")(self)

    for name, value in {
        "graph_pool_handle": object,
        "CUDAGraph": Graph,
        "current_stream": lambda device: stream,
        "Stream": lambda device: next(streams) or stream,  # one, for it may be a stream that somebody uses
        "stream": lambda chosen: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", noted("clear"), raising=False)


@pytest.mark.parametrize("error", [None, RuntimeError("not while capturing")])
def test_a_capture_leaves_nothing_of_inference_mode(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch keeps from a capture would be written to long after it."""
    done: list[tuple[str, bool]] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda *_, **__: done.append((name, torch.is_inference_mode_enabled()))

    def body() -> None:
        noted("body")()
        if error is not None:
            raise error

    pretend_cuda(monkeypatch, noted)
    with torch.inference_mode(), nullcontext() if error is None else pytest.raises(RuntimeError, match="capturing"):
        CudaRuntime(torch.device("cuda")).capture(body)
    assert done == [("begin", False), ("body", True), ("end", True)]


def test_a_pool_serves_as_long_as_it_has_graphs_and_leaves_nothing_of_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses a pool whose graphs are gone. The workspaces of other graphs go with those in ours: never without need."""
    done: list[str] = []

    def fail() -> None:
        raise RuntimeError("not while capturing")

    pretend_cuda(monkeypatch, lambda name: lambda *_, **__: done.append(name))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty"))
    runtime = CudaRuntime(torch.device("cuda"))
    replays = [runtime.capture(lambda: None) for _ in range(3)]
    del replays[1:]
    replays.append(runtime.capture(lambda: None))
    assert "clear" not in done and len(runtime._pool) == 1
    (pool,) = runtime._pool
    replays.clear()
    with pytest.raises(RuntimeError, match="^not while capturing$"):
        runtime.capture(fail)
    replays.append(runtime.capture(lambda: None))  # neither with the pool before nor with that of the failed capture
    assert runtime._pool != [pool] and done.count("clear") == 2
    done.clear()
    replays.clear()
    for _ in range(2):
        runtime.release_graph_memory()
    assert done == ["clear", "empty", "empty"]
    runtime.capture(lambda: None)


@pytest.mark.parametrize("error", [None, RuntimeError("not while capturing")])
def test_no_garbage_is_collected_inside_a_capture(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finalisers, of a KV cache that is unmapped above all, may synchronise, and no capture survives that."""
    done: list[str] = []

    class Cycle:
        def __init__(self) -> None:
            self.own = self
            weakref.finalize(self, done.append, "finalised").atexit = False

    def body() -> None:
        Cycle()
        kept = [[i] for i in range(1000)]  # any of them could start a collection
        done.append(f"body {len(kept)}")
        if error is not None:
            raise error

    pretend_cuda(monkeypatch, lambda name: lambda *_, **__: done.append(name))
    runtime, threshold = CudaRuntime(torch.device("cuda")), gc.get_threshold()
    for enabled in (False, True):
        done.clear()
        try:
            gc.set_threshold(10)
            (gc.enable if enabled else gc.disable)()
            with nullcontext() if error is None else pytest.raises(RuntimeError, match="capturing"):
                runtime.capture(body)
            assert gc.isenabled() == enabled
        finally:
            gc.set_threshold(*threshold)
            gc.enable()
        gc.collect()
        seen = [what for what in done if what != "clear"]
        assert seen[:2] == ["begin", "body 1000"] and seen.index("finalised") > seen.index("end")


@pytest.mark.parametrize("known", [False, True], ids=["as torch 2.11", "as later ones"])
@pytest.mark.parametrize("where", ["begin", "body", "end"])
def test_a_capture_that_cannot_be_ended_is_over_for_the_allocator_too(
    where: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its share of the pool is given back, by torch or here, or the pool would stay for ever."""

    def failing(name: str) -> Callable[..., None]:
        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError(name)

        return fail if name in ("end", where) else lambda *_, **__: None

    def end_allocation(*args: Any) -> None:
        done.append(("end", *args))
        if known:
            raise RuntimeError("not currently recording")

    def body() -> None:
        if where == "body":
            raise RuntimeError("body")

    done: list[Any] = []
    pretend_cuda(monkeypatch, failing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocation, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *args: done.append(("release", *args)), raising=False)
    pools = iter([(0, 7), (0, 8)])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    runtime = CudaRuntime(torch.device("cuda"))
    with pytest.raises(RuntimeError, match=f"^{where}$"):
        runtime.capture(body)
    # What still takes the capture to be under way looks at its graph, and lets no other one have its pool.
    assert len(runtime._abandoned) == (not known) and runtime._pool == ([(0, 7)] if known else [])
    assert done == [("end", 3, (0, 7))] + ([] if known else [("release", 3, (0, 7))])
