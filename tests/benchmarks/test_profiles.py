"""Where a step's time went: profiles of kernels, and the host's part in it."""

from __future__ import annotations

import importlib
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.benchmarks import ceilings, overhead, step_profile
from stoker.benchmarks.ceilings import best_time
from stoker.benchmarks.workloads import TOY, TOY_HYBRID, ModelSpec
from stoker.engine.device import CpuRuntime, HostCopy
from stoker.rollout import SamplingParams, engine


@pytest.fixture
def _ceilings_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about how long anything takes: the fastest of three calls, where a benchmark makes calls for half a second."""
    monkeypatch.setattr(ceilings, "best_time", lambda call, device, _=0.5: best_time(call, device, 0))


@pytest.mark.usefixtures("_ceilings_are_found_at_once")
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("spec", "adapters"), [(TOY, 0), (TOY_HYBRID, 0), (TOY, 2)], ids=["toy", "hybrid", "adapters"])
def test_a_profile_s_steps_are_those_it_saw(
    spec: ModelSpec, adapters: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of before, in which sequences that were through with their prompts went on."""
    monkeypatch.setattr(engine, "runtime_for", partial(CpuRuntime, ahead=ahead))
    traces: list[Any] = []

    class Kept(step_profile.profile):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            traces.append(self)

    monkeypatch.setattr(step_profile, "profile", Kept)
    found = list(step_profile.measure(spec.name, "cpu", [4, 2], 16, 4, adapters))
    of_each = [0, adapters] if adapters else [0]
    assert [(each["batch"], each["adapters"]) for each in found] == [(batch, n) for batch in (4, 2) for n in of_each]
    for each, trace in zip(found, traces, strict=True):
        assert each["steps"] == sum(event.name == "aten::embedding" for event in trace.events()) >= 4
        assert each["largest"].get("aten::embedding", {"count": 1})["count"] == 1
        assert sum(each["parts_us"].values()) == pytest.approx(each["step_us"], rel=0.02)
        assert any(name in line for name in each["largest"] for line in step_profile.table(each))


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_profile_without_kernels_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no device that was always at work."""
    monkeypatch.setattr(step_profile, "MODELS", {"toy": replace(TOY, name="toy")})
    monkeypatch.setattr(
        ModelSpec, "build", lambda spec, device, dtype, build=ModelSpec.build: build(spec, "cpu", dtype)
    )
    monkeypatch.setattr(step_profile, "dtype_of", lambda device: torch.float32)
    monkeypatch.setattr(ceilings, "synchronize", lambda device: None)
    monkeypatch.setattr(ceilings, "measure", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="saw no kernels"):
        list(step_profile.measure("toy", "cuda", [2], 8, 4))


def test_waiting_for_the_device_is_no_time_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(copy: HostCopy) -> torch.Tensor:
        time.sleep(0.01)
        return copy.tensor

    monkeypatch.setattr(HostCopy, "wait", slow)
    live = engine.RolloutEngine(TOY.build("cpu", torch.float32))
    with overhead.timed_steps(live) as times:
        live.generate_batch([[1, 2, 3]], SamplingParams(max_tokens=12, ignore_eos=True))
    live.close()
    assert len(times.steps) > 1
    for step in times.steps:  # of which each reads tokens and their log-probabilities
        assert step.wait >= 0.02 and step.host <= step.total - step.run - 0.02
    assert overhead.breakdown(times, 1)["wait"] >= 0.02e6 / max(step.num_steps for step in times.steps)


def test_a_step_s_time_is_kernels_short_gaps_and_waits() -> None:
    spans = [("nvjet_gemm", 0.0, 5.0), ("attention.fwd", 7.0, 10.0), ("memcpy", 9.0, 12.0), ("norm", 42.0, 43.0)]
    assert step_profile.attribute(reversed(spans)) == {
        "matmul": 5.0,
        "gaps": 2.0,
        "attention": 3.0,
        "copies": 2.0,  # from the end of the kernel before, which it waited for
        "waits": 30.0,
        "norm, rotary, KV write": 1.0,
    }


@pytest.mark.parametrize(
    ("module", "kinds"),
    [
        ("attention.decode", {"attention"}),
        ("attention.prefill", {"attention"}),
        ("attention.splits", {"attention"}),
        ("attention.write", {"norm, rotary, KV write"}),
        ("linear.linear", {"matmul"}),
        ("linear.invariant", {"matmul"}),
        ("grouping", {"experts"}),
        ("lora.shrink", {"adapters"}),
        ("lora.expand", {"adapters"}),
        ("experts.moe", {"experts"}),
        ("recurrent.causal_conv", {"states"}),
        ("recurrent.gates", {"states", "norm, rotary, KV write"}),
        ("recurrent.recurrent", {"states"}),
        ("recurrent.chunks", {"states"}),
        ("norm_rotary", {"norm, rotary, KV write", "activation"}),
        ("sampling.sampling", {"sampling"}),
        ("sampling.truncation", {"sampling"}),
    ],
)
def test_the_engine_s_own_kernels_are_known_to_profiles(module: str, kinds: set[str]) -> None:
    source = Path(importlib.import_module(f"stoker.kernels.{module}").__file__ or "").read_text()
    defined = re.findall(r"^def (\w+)\(", source, re.M)
    launched = {name for name in defined if name.endswith("_kernel") or re.search(rf"^    {name}\[", source, re.M)}
    assert {step_profile.kind_of(name) for name in launched} == kinds, launched
