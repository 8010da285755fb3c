"""What a run of ``benchmarks.rollout`` says about its targets, and how it tells of start-up."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from stoker.benchmarks import phases, report


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
