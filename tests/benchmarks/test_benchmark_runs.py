"""What benchmarks leave behind when something fails, is interrupted, or has no room."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.benchmarks import command, footprint, memory, report, rollout, weight_updates
from stoker.benchmarks.gate import GateError
from stoker.benchmarks.scoring import SCENARIOS
from stoker.weight_sync.change_detection import Changes, Look


def test_what_is_left_out_or_fails_is_written_beside_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("an illegal address")

    def parts(*_: Any) -> list[rollout.Part]:
        return [
            rollout.Part("growth", 1, fail),
            rollout.Part("sweep", 1000, fail),
            rollout.Part("prefill", 1, lambda: [{"found": 1}]),
            rollout.Part("prefill", 1, lambda: [{"found": 1}]),
        ]

    monkeypatch.setattr(rollout, "parts", parts)
    monkeypatch.setattr(sys, "argv", ["rollout", "--budget", "100", "--output", str(tmp_path)])
    assert rollout.main() == 1
    results = json.loads(next(tmp_path.glob("*.json")).read_text())
    failed, late = results["left_out"]
    assert failed == "growth: RuntimeError: an illegal address" and late.endswith("s were left, it needs 1000 s")
    assert results["prefill"] == [{"found": 1}] * 2
    assert "left out, growth: RuntimeError: an illegal address" in capsys.readouterr().out


def test_what_a_part_had_found_before_it_failed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parts(*given: Any) -> list[rollout.Part]:
        note = given[-1]

        def points() -> Iterator[Any]:
            yield {"batch": 1}
            note({"gate": 1})
            raise RuntimeError("out of memory")

        def rollouts() -> Iterator[Any]:
            note({"gate": 2})
            yield {"whole": 1}

        return [rollout.Part("points", 1, points), rollout.Part("others", 1, rollouts)]

    monkeypatch.setattr(rollout, "parts", parts)
    monkeypatch.setattr(report, "table", lambda results: "")
    monkeypatch.setattr(sys, "argv", ["rollout", "--output", str(tmp_path)])
    assert rollout.main() == 1
    results = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert results["points"] == [{"batch": 1}] and results["others"] == [{"whole": 1}]
    assert results["broken_off"] == [{"gate": 1}] and "unfinished" not in results


def test_another_process_goes_on_where_one_has_lost_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def parts(*_: Any) -> list[rollout.Part]:
        def part(name: str, fails: bool) -> rollout.Part:
            def measure() -> Iterator[Any]:
                begun.append(name)
                yield name
                if fails:
                    raise RuntimeError("an illegal address")

            return rollout.Part(name, 1, measure)

        return [part("one", False), part("other", True), part("last", False)]

    def execute(program: str, command: list[str]) -> None:
        flags = command[command.index("stoker.benchmarks.rollout") + 1 :]
        assert flags[:4] == ["--only", "toy", "--output", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["rollout", *flags])
        monkeypatch.setattr(rollout, "answers", lambda device: True)
        raise SystemExit(rollout.main())

    monkeypatch.setattr(rollout, "parts", parts)
    monkeypatch.setattr(rollout, "answers", lambda device: "other" not in begun)
    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.setattr(sys, "argv", ["rollout", "--only", "toy", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as done:
        rollout.main()
    assert done.value.code == 1 and begun == ["one", "other", "last"]
    (path,) = tmp_path.glob("*.json")
    results = json.loads(path.read_text())
    assert [results[name] for name in begun] == [["one"], ["other"], ["last"]]
    assert results["left_out"] == ["other: RuntimeError: an illegal address"] and results["seconds"] > 0


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_a_run_to_go_on_with_that_is_none(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    monkeypatch.setattr(sys, "argv", ["rollout", "--output", str(tmp_path), "--resume", str(tmp_path / "run.json")])
    with pytest.raises(SystemExit) as done:
        rollout.main()
    assert done.value.code == 2 and "run.json is no file of a run" in capsys.readouterr().err


def test_a_run_that_breaks_off_leaves_what_it_had_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(scenario: Any, device: str) -> dict[str, Any]:
        if scenario is SCENARIOS[device, True][1]:
            raise KeyboardInterrupt
        return {"model": {"name": scenario.spec.name}}

    monkeypatch.setattr("sys.argv", ["name", "--quick", "--output", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        command.run("name", None, SCENARIOS, measure, lambda run: [run["model"]["name"]], lambda run: {})
    (path,) = tmp_path.glob("*")
    assert json.loads(path.read_text())["name"] == [{"model": {"name": "qwen3-toy"}}]


def test_a_scenario_that_breaks_off_leaves_what_it_had_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(scenario: Any, device: str) -> Iterator[dict[str, Any]]:
        found: dict[str, Any] = {"model": {"name": scenario.spec.name}, "ways": {}}
        for way in ("one", "other"):
            found["ways"][way] = 1
            yield found
        if scenario is SCENARIOS[device, True][1]:
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["name", "--quick", "--output", str(tmp_path)])
    tables: list[dict[str, Any]] = []
    with pytest.raises(KeyboardInterrupt):
        command.run("name", None, SCENARIOS, measure, lambda run: tables.append(run) or [], lambda run: {})
    (path,) = tmp_path.glob("*")
    written = json.loads(path.read_text())["name"]
    assert [run["ways"] for run in written] == 2 * [{"one": 1, "other": 1}] and tables == written[:1]


@pytest.mark.parametrize("error", [GateError("log-probabilities differ"), MemoryError("no room")])
def test_after_a_scenario_that_fails_the_others_go_on(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(scenario: Any, device: str) -> Iterator[dict[str, Any]]:
        yield {"model": {"name": scenario.spec.name}}
        if scenario is SCENARIOS[device, True][0]:
            raise error

    monkeypatch.setattr("sys.argv", ["name", "--quick", "--output", str(tmp_path)])
    assert command.run("name", None, SCENARIOS, measure, lambda run: [run["model"]["name"]], lambda run: {}) == 1
    (path,) = tmp_path.glob("*")
    written = json.loads(path.read_text())
    assert [run["model"]["name"] for run in written["name"]] == ["qwen3-toy", "llama-30m"]
    assert written["failed"] == [f"qwen3-toy: {type(error).__name__}: {error}"]
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["name"] == [{"model": "llama-30m"}] and str(error) in err


def test_updates_from_where_they_can_be_had_are_timed_though_one_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one process may not open another's memory."""
    weights = importlib.import_module("stoker.benchmarks.weights")

    def fail(*_: Any) -> None:
        raise RuntimeError("invalid device pointer")

    monkeypatch.setattr(weights, "of_one_dtype", fail)
    for name in ("of_masters", "of_rounded", "of_elsewhere", "of_shards"):
        way = weight_updates.entry([1e-3], 0)
        monkeypatch.setattr(weights, name, lambda *_, name=name, way=way: {name: way})
    # One that its race has left out is no less a failure; one that cannot be had there is none.
    raced = {"live": {"skipped": "ValueError: gone", "failed": True}, "other": {"skipped": "peft is not installed"}}
    monkeypatch.setattr(weights, "of_adapter", lambda *_: raced)
    *_, found = weights.measure(weights.SCENARIOS["cpu", True][0], "cpu")
    assert set(found["ways"]) == {"of_masters", "of_rounded", "of_elsewhere", "of_shards", *raced}
    assert found["failed"] == ["live: ValueError: gone", "one dtype: RuntimeError: invalid device pointer"]
    assert weights.headline(found)["of_masters_ms"] == 1.0 and len(weights.table(found)) == 8


def test_a_way_that_fails_is_left_out_of_the_race() -> None:
    turns: list[str] = []

    def way(name: str) -> Any:
        def update() -> int:
            turns.append(name)
            if name == "bad":
                raise RuntimeError("invalid device pointer")
            return 7

        return weight_updates.Way(prepare=list, update=update, check=lambda: True)

    found = weight_updates.race({name: way(name) for name in ("one", "bad", "other")}, "cpu", 2, 1.0)
    assert turns == ["one", "bad", "other", *["one", "other"] * 3]
    assert found["bad"] == {"skipped": "RuntimeError: invalid device pointer", "failed": True}
    assert [len(found[name]["seconds"]) for name in ("one", "other")] == [2, 2] and found["one"]["bytes"] == 7


@torch.no_grad()
def test_updates_of_a_mirror_are_timed_where_each_is_like_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that changes is written in one pass, by what an update before has made."""
    weights = importlib.import_module("stoker.benchmarks.weights")
    scenario, pulls, made = weights.SCENARIOS["cpu", True][0], list[tuple[int, int, int]](), list[Look]()
    make, find = Look.__init__, Look.find_changes

    def making(look: Look, *arguments: Any) -> None:
        made.append(look)
        make(look, *arguments)

    def finding(look: Look, *arguments: Any) -> Changes:
        found = find(look, *arguments)
        pulls.append((len(found.changed), len(found.written), len(made)))
        made.clear()
        return found

    monkeypatch.setattr(Look, "__init__", making)
    monkeypatch.setattr(Look, "find_changes", finding)
    weight_updates.of_masters(scenario, "cpu", 1.0)
    (_, *in_full), in_part = pulls[: -weight_updates.WARM_UP - 1], pulls[-weight_updates.WARM_UP - 1 :]
    layer = len(weight_updates.weight_ranks.first_layer(model := scenario.spec.build("meta", torch.float32)))
    assert [*in_full[weight_updates.WARM_UP :], *in_part[weight_updates.WARM_UP :]] == [
        (count, count, 0) for count in (len(list(model.parameters())), layer)
    ]


def test_a_cache_is_as_large_as_wanted_or_as_a_device_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (80 * 10**9, 85 * 10**9))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert footprint.room("cuda", 10**9) == 10**9
    assert footprint.room("cuda", 100 * 10**9, besides=2 * 10**9) == 70 * 10**9
    assert footprint.room("cuda", 100 * 10**9, besides=90 * 10**9) == 0
    assert footprint.room("cpu", 100 * 10**9, besides=90 * 10**9) == 100 * 10**9


def test_memory_between_rollouts_fits_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, small = memory.TOY, 2**20
    monkeypatch.setattr(memory, "room", lambda device, wanted, besides: small)
    scenario = memory.Scenario(spec=spec, kv_cache_memory="1000GB", repeats=1, cycles=40, limit_s=0.0)
    *_, found = memory.measure(scenario, "cpu")
    assert small // 2 < found["kv_cache_bytes"] <= small and found["kv_cache_wanted_bytes"] == 10**12
    assert found["cycles"]["cycles"] == len(found["cycles"]["held"]) == 20 and found["cycles"]["cycles_wanted"] == 40
