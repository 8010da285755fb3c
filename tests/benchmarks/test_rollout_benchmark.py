"""The comparison with other engines, the budget of a run, and what a run says about its targets."""

from __future__ import annotations

import copy
import importlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import other_engines
import pytest
import torch

from stoker.benchmarks import (
    ceilings,
    comparison,
    outside,
    overhead,
    peers,
    phases,
    report,
    scoring,
    step_profile,
    sweeps,
)
from stoker.benchmarks.ceilings import Ceiling, best_time, kv_token_bytes, state_bytes
from stoker.benchmarks.scenarios import Scenario
from stoker.benchmarks.workloads import TOY, TOY_HYBRID, ModelSpec, Workload
from stoker.engine.device import CpuRuntime, HostCopy
from stoker.rollout import SamplingParams, engine

TINY = Workload(name="tiny", prompts=2, samples=3, prompt_tokens=(4, 9), median=6, sigma=0.7, cap=12, slots=4)


# -- other engines ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stoker() -> Iterator[peers.Stoker]:
    engine = peers.Stoker(TOY, TINY, "cpu", torch.float32)
    yield engine
    engine.close()


@pytest.fixture
def both_installed() -> Iterator[None]:
    with other_engines.installed():
        yield


def test_vllm_gets_the_same_weights_kv_cache_and_requests(stoker: peers.Stoker, both_installed: None) -> None:
    peer = outside.Vllm(TOY, TINY, "cpu", torch.float32)
    llm: Any = peer.llm
    for name, tensor in stoker.model.state_dict().items():
        assert torch.equal(llm.model.state_dict()[name], tensor)
    assert llm.settings["kv_cache_memory_bytes"] == stoker.engine.config.kv_cache_memory
    assert (llm.settings["max_num_seqs"], llm.settings["max_model_len"]) == (4, 21)
    assert llm.settings["enable_prefix_caching"] and llm.settings["skip_tokenizer_init"]
    prompts = TINY.draw(100, 0)
    for _ in range(2):
        with comparison.running(peer):
            found = peer.rollout(prompts, TINY.lengths)
    assert found == [[p[0]] * n for p, n in zip(prompts, TINY.lengths, strict=True)]
    assert llm.calls == ["reset", "generate", "reset", "generate"]
    peer.close()
    assert not hasattr(peer, "llm")


def test_lmdeploy_gets_the_same_kv_cache_and_requests_and_no_more_at_a_time_than_slots(both_installed: None) -> None:
    peer = outside.LMDeploy(TOY, TINY, "cpu", torch.bfloat16)
    pipeline: Any = peer.pipe
    config = pipeline.backend_config
    token_bytes = kv_token_bytes(TOY.config, torch.bfloat16)
    assert token_bytes == 2 * 4 * 2 * 16 * 2  # keys and values, layers, heads, head size, bytes
    assert 0 <= peers.kv_budget(TOY, TINY, torch.bfloat16) - config.num_gpu_blocks * 64 * token_bytes < 64 * token_bytes
    assert (config.max_batch_size, config.session_len, config.enable_prefix_caching) == (4, 21, True)
    prompts = TINY.draw(100, 0)
    for _ in range(2):
        with comparison.running(peer):
            found = peer.rollout(prompts, TINY.lengths)
    assert found == [[p[0]] * n for p, n in zip(prompts, TINY.lengths, strict=True)]
    assert pipeline.most_running == 4
    peer.close()


generate = other_engines.LLM.generate


def no_such_module(self: Any, **settings: Any) -> None:
    import stoker.nothing  # noqa: F401


def old_transformers(self: Any, **settings: Any) -> None:
    raise ImportError("cannot import name 'AutoModelForVision2Seq' from 'transformers'")


def three_rollouts(self: Any, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
    if self.calls.count("generate") == 3:  # a warm-up, and two rounds
        raise RuntimeError("out of memory\nat some line")
    return generate(self, prompts, params, use_tqdm=use_tqdm)


def one_short(self: Any, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
    params[0].max_tokens -= 1
    return generate(self, prompts, params, use_tqdm=use_tqdm)


@pytest.mark.parametrize(
    ("method", "replacement", "why"),
    [
        ("__init__", no_such_module, "ModuleNotFoundError: No module named 'stoker.nothing'"),
        ("__init__", old_transformers, "ImportError: cannot import name 'AutoModelForVision2Seq' from 'transformers'"),
        ("generate", three_rollouts, "RuntimeError: out of memory"),
        ("generate", one_short, "RuntimeError: vllm did not run every request to its length"),
        (None, None, "vllm is not installed"),
    ],
)
def test_an_engine_that_fails_is_left_out_and_the_others_go_on(
    stoker: peers.Stoker,
    method: str | None,
    replacement: Callable[..., Any],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if method:
        monkeypatch.setitem(sys.modules, "vllm", other_engines.modules()["vllm"])
        monkeypatch.setattr(other_engines.LLM, method, replacement)
    scenario = Scenario(spec=TOY, workload=TINY, repeats=4)
    engines = comparison.race(stoker, scenario, "cpu", torch.float32, ["vllm"])
    assert engines["vllm"]["skipped"] == why
    assert len(engines["stoker"]["seconds"]) == 4


def test_slow_engines_sit_out(stoker: peers.Stoker) -> None:
    slow = Scenario(spec=TOY, workload=TINY, repeats=3, peer_limit_s=1e-9, budget_s=0.0)
    patient = Scenario(spec=TOY, workload=TINY, repeats=3, budget_s=0.0)
    with other_engines.installed():
        engines = comparison.race(stoker, slow, "cpu", torch.float32, ["generate", "vllm"])
        assert "unfinished after 0 s" in engines["generate"]["skipped"]
        assert "its warm-up took" in engines["vllm"]["skipped"]
        assert len(engines["stoker"]["seconds"]) == 1
        engines = comparison.race(stoker, patient, "cpu", torch.float32, ["vllm"])
        assert len(engines["vllm"]["seconds"]) == len(engines["stoker"]["seconds"]) == 1
        assert engines["vllm"]["version"] == "0"


def test_decode_points_that_need_too_much_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    token_bytes = kv_token_bytes(TOY.config, torch.float32)
    # Nothing here is about how long anything takes.
    monkeypatch.setattr(ceilings, "best_time", lambda call, device, _=0: best_time(call, device, 0))
    monkeypatch.setattr(sweeps, "STEPS", 8)
    monkeypatch.setattr(sweeps, "_MOST_KV_BYTES", 8 * (16 + 2 * sweeps.STEPS) * token_bytes)
    monkeypatch.setattr(sweeps, "_REPEATS", 1)
    points = ((2, 16), (9, 16), (8, 16), (1, 32))
    found = list(sweeps.decode(TOY, "cpu", points, float("inf")))
    assert [(p["batch"], p["context"]) for p in found] == [(2, 16), (8, 16), (1, 32)]
    (narrow,) = sweeps.decode(TOY, "cpu", points[1:2], 0.0, kv_cache_dtype="fp8")
    assert narrow["batch"] == 9 and narrow["kv_cache_dtype"] == "fp8"
    plain, (rounded,) = found[0], sweeps.decode(TOY, "cpu", points[:1], 0.0, quantization="fp8")
    assert rounded["quantization"] == "fp8" and plain["quantization"] is None
    assert len(list(sweeps.decode(TOY, "cpu", points, 0.0))) == 1
    monkeypatch.setattr(sweeps, "room", lambda device, wanted, besides: wanted - besides - 1)
    assert [(p["batch"], p["context"]) for p in sweeps.decode(TOY, "cpu", points, 1e9)] == [(2, 16), (1, 32)]
    monkeypatch.setattr(sweeps, "room", lambda *_, **__: 0)
    with pytest.raises(MemoryError, match=r"none of 4 points fits into 0.0 GB"):
        list(sweeps.decode(TOY, "cpu", points, 1e9))


# -- what a machine allows --------------------------------------------------------------------------------------------


def test_a_step_reads_and_writes_the_states_of_all_its_rows() -> None:
    config = TOY_HYBRID.config
    assert kv_token_bytes(config, torch.bfloat16) == 2 * 2 * 16 * 2  # of the one layer that attends
    of_state, of_inputs = 4 * 16 * 16 * 4, 3 * (2 * 32 + 64) * 2  # a state a head, in fp32; three inputs a channel
    assert state_bytes(config, torch.bfloat16) == 3 * (of_state + of_inputs)
    assert state_bytes(TOY.config, torch.bfloat16) == 0

    sizes = {"weight_bytes": 10**6, "linear_params": 10**6, "head_params": 10**5, "kv_bytes": 128, "state_bytes": 5000}
    ceiling = Ceiling(bandwidth=1e9, flops=1e12, matmuls={}, **sizes)
    assert ceiling.step_s(8, 300) == pytest.approx(1e-9 * (10**6 + 300 * 128 + 8 * 2 * 5000))
    # A prompt, whose last logits give each of its samples a token; then steps of two sequences, and of one.
    prompt = 2 * (9 * 10**5 * 10 + 10**5) / 1e12
    assert ceiling.rollout_s([[7] * 10] * 2, [1, 1], 2) == pytest.approx(prompt)
    steps = [ceiling.step_s(2, 22), ceiling.step_s(1, 12)]
    assert ceiling.rollout_s([[7] * 10] * 3, [1, 3, 2], 2) == pytest.approx(prompt + sum(steps))
    scored = 2 * (9 * 10**5 * (10 + 1 + 3 - 2) + 10**5 * 4) / 1e12
    assert scoring.best_s(ceiling, [[7] * 10] * 2, [[5], [6] * 3]) == pytest.approx(scored)


def test_the_cache_of_a_hybrid_has_room_for_all_slots_and_their_states() -> None:
    peer = peers.Stoker(TOY_HYBRID, TINY, "cpu", torch.float32)
    found = peer.engine.stats()
    states = state_bytes(TOY_HYBRID.config, torch.float32)
    assert found.recurrent_state_bytes == (4 + 8 + 2) * states  # of slots, copies, padding and zeros
    assert found.kv_cache_bytes == peers.kv_budget(TOY_HYBRID, TINY, torch.float32)
    assert found.num_kv_blocks + 1 == 4 * (-(-TINY.max_len // 16) + 1)  # with that of padding
    peer.close()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("spec", [TOY, TOY_HYBRID], ids=lambda spec: spec.name)
def test_a_profile_s_steps_are_those_it_saw(spec: ModelSpec, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none of before, in which sequences that were through with their prompts went on."""
    monkeypatch.setattr(engine, "runtime_for", partial(CpuRuntime, ahead=ahead))
    traces: list[Any] = []

    class Kept(step_profile.profile):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            traces.append(self)

    monkeypatch.setattr(step_profile, "profile", Kept)
    found = step_profile.measure(spec.name, "cpu", 4, 16, 12)
    assert found["steps"] == sum(event.name == "aten::embedding" for event in traces[0].events()) >= 12


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
        step_profile.measure("toy", "cuda", 2, 8, 4)


# -- a run and what it says ------------------------------------------------------------------------------------------


def point(model: str, batch: int, context: int, of_ceiling: float, step_ms: float, exact: bool = False) -> dict:
    return {
        "model": model,
        "batch": batch,
        "context": context,
        "of_ceiling": of_ceiling,
        "step_ms": step_ms,
        "tokens_per_s": batch / step_ms * 1e3,
        "deterministic": exact,
        "kv_cache_dtype": "auto",
    }


FAST: dict[str, Any] = {
    "environment": {"device": "cuda", "gpu": "NVIDIA H200"},
    "configuration": {"quick": False},
    "rollouts": [
        {
            "model": {"name": "llama-3.2-1b"},
            "workload": {"name": "ii"},
            "capture_ms": [20.0, 100.0],
            "engines": {
                "stoker": {"of_ceiling": 0.6, "times_stoker": 1.0},
                "generate_batch, tuned": {"times_stoker": 5.0},
                "generate_batch": {"skipped": "slow"},
                "vllm": {"times_stoker": 1.0},
            },
        }
    ],
    "sweep": [
        point("llama-3.2-1b", 1, 512, 0.1, 1.0),
        point("llama-3.2-1b", 64, 512, 0.7, 17.0),
        point("qwen2.5-7b", 512, 2048, 0.7, 2.0),
        point("llama-3.2-1b", 64, 512, 0.3, 20.0, exact=True),
    ],
    "profiles": [{"batch": 1, "idle_share": 0.5}, {"batch": 64, "idle_share": 0.03}],
    "start_up": {"llama-3.2-1b": {"cold_s": 15.0, "warm_s": 3.0}},
}


def verdicts(results: dict) -> dict[str, bool | None]:
    return {target["what"]: target["reached"] for target in report.targets(results)}


def test_targets_that_are_just_reached() -> None:
    found = verdicts(FAST)
    assert list(found.values()).count(True) == 11 and False not in found.values()
    assert found["qwen2.5-7b, 64 x 512: of its ceiling"] is None  # not measured
    assert found["GRPO workload ii: times generate_batch"] is None


def test_another_gpu_is_asked_for_the_same_share_of_what_its_memory_allows() -> None:
    other = copy.deepcopy(FAST)
    other["environment"]["gpu"] = "NVIDIA H100 80GB HBM3"
    other["sweep"][0].update(tokens_per_s=700.0, of_ceiling=0.58)
    assert verdicts(other)["1B, batch 1, context 512: of its ceiling"] is True
    other["sweep"][0].update(of_ceiling=0.57)
    assert verdicts(other)["1B, batch 1, context 512: of its ceiling"] is False


def test_a_cold_start_that_takes_too_long_is_told_and_no_warm_one_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = []

    def run(*_: Any, timeout: float, **__: Any) -> Any:
        starts.append(timeout)
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(subprocess, "run", run)
    found = phases.start_up("qwen3-toy", "cuda", limit_s=60.0)
    assert found == {"cold_over_s": 60.0} and starts == [60.0]
    told = FAST | {"rollouts": [], "sweep": [], "profiles": [], "left_out": [], "start_up": {"toy": found}}
    assert "toy: no first token of a new process after 60 s" in report.table(told)
    assert not any("first token" in target["what"] and target["reached"] for target in report.targets(told))


def test_a_start_of_milliseconds_is_not_told_as_none_at_all() -> None:
    quick = FAST | {
        "rollouts": [],
        "sweep": [],
        "profiles": [],
        "left_out": [],
        "start_up": {"toy": {"warm_s": 0.0234}},
    }
    assert "toy: first token of a new process after 0.0234 s" in report.table(quick)


def missed(change: Callable[[dict], object]) -> list[str]:
    results = copy.deepcopy(FAST)
    change(results)
    return [what for what, reached in verdicts(results).items() if reached is False]


def test_each_target_depends_on_its_own_figure() -> None:
    def engines(results: dict) -> dict:
        return results["rollouts"][0]["engines"]

    assert missed(lambda r: r["sweep"][0].update(tokens_per_s=999)) == ["1B, batch 1, context 512: tokens/s"]
    assert missed(lambda r: r["sweep"][1].update(of_ceiling=0.69)) == ["llama-3.2-1b, 64 x 512: of its ceiling"]
    assert missed(lambda r: r["sweep"][2].update(of_ceiling=0.69)) == ["qwen2.5-7b, 512 x 2048: of its ceiling"]
    assert missed(lambda r: r["sweep"][3].update(tokens_per_s=3190)) == ["deterministic over fast, 64 x 512"]
    assert missed(lambda r: r["profiles"][1].update(idle_share=0.031)) == ["device at work, batch 64"]
    assert missed(lambda r: engines(r)["stoker"].update(of_ceiling=0.59)) == ["GRPO workload ii: of its ceiling"]
    assert missed(lambda r: engines(r)["generate_batch, tuned"].update(times_stoker=4.9)) == [
        "GRPO workload ii: times generate_batch, tuned"
    ]
    assert missed(lambda r: engines(r)["vllm"].update(times_stoker=0.99)) == ["GRPO workload ii: times vllm"]
    assert missed(lambda r: r["start_up"]["llama-3.2-1b"].update(warm_s=3.1)) == ["first token, warm_s: 3 s over it"]
    assert missed(lambda r: r["start_up"]["llama-3.2-1b"].update(cold_s=15.1)) == ["first token, cold_s: 15 s over it"]
    assert missed(lambda r: r["rollouts"][0]["capture_ms"].append(101.0)) == ["graph capture: 100 ms over the slowest"]


def test_a_cpu_and_a_quick_run_have_no_targets() -> None:
    assert report.targets(FAST | {"environment": {"device": "cpu"}}) == []
    assert report.targets(FAST | {"configuration": {"quick": True}}) == []
    empty = {"environment": {"device": "cuda"}, "configuration": {"quick": False}, "rollouts": []}
    assert all(target["reached"] is None for target in report.targets(empty))


def test_waiting_for_the_device_is_no_time_of_the_host(stoker: peers.Stoker, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(copy: HostCopy) -> torch.Tensor:
        time.sleep(0.01)
        return copy.tensor

    monkeypatch.setattr(HostCopy, "wait", slow)
    with overhead.timed_steps(stoker.engine) as times:
        stoker.engine.generate_batch([[1, 2, 3]], SamplingParams(max_tokens=12, ignore_eos=True))
    assert len(times.steps) > 1
    for step in times.steps:  # of which each reads tokens and their log-probabilities
        assert step.wait >= 0.02 and step.host <= step.total - step.run - 0.02
    assert overhead.breakdown(times, 1)["wait"] >= 0.02e6 / max(step.num_steps for step in times.steps)


def test_a_step_s_time_is_kernels_short_gaps_and_waits() -> None:
    spans = [("nvjet_gemm", 0.0, 5.0), ("attention_fwd", 7.0, 10.0), ("memcpy", 9.0, 12.0), ("norm", 42.0, 43.0)]
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
        ("attention_decode", {"attention"}),
        ("attention_prefill", {"attention"}),
        ("attention_splits", {"attention"}),
        ("attention_write", {"norm, rotary, KV write"}),
        ("linear", {"matmul"}),
        ("linear_invariant", {"matmul"}),
        ("grouping", {"experts"}),
        ("lora_shrink", {"adapters"}),
        ("lora_expand", {"adapters"}),
        ("moe", {"experts"}),
        ("causal_conv", {"states"}),
        ("gates", {"states", "norm, rotary, KV write"}),
        ("recurrent", {"states"}),
        ("recurrent_chunks", {"states"}),
        ("norm_rotary", {"norm, rotary, KV write", "activation"}),
        ("sampling", {"sampling"}),
        ("truncation", {"sampling"}),
    ],
)
def test_the_engine_s_own_kernels_are_known_to_profiles(module: str, kinds: set[str]) -> None:
    source = Path(importlib.import_module(f"stoker.kernels.{module}").__file__ or "").read_text()
    defined = re.findall(r"^def (\w+)\(", source, re.M)
    launched = {name for name in defined if name.endswith("_kernel") or re.search(rf"^    {name}\[", source, re.M)}
    assert {step_profile.kind_of(name) for name in launched} == kinds, launched
