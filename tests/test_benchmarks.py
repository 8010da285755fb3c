"""The benchmarks at their smallest: they run, write what they promise, and are all found by the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.integrations.cli import main

ROOT = Path(__file__).resolve().parents[1]


def run(tmp_path: Path, name: str, *flags: str) -> dict:
    """What ``stoker bench NAME --quick`` writes to its one JSON file."""
    assert main(["bench", name, "--quick", "--output", str(tmp_path), *flags]) == 0
    (path,) = tmp_path.glob("*.json")
    return json.loads(path.read_text())


def test_rollouts_against_their_ceiling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run(tmp_path, "rollout", "--only", "toy", "--peers", "generate")
    (rollout,) = results["rollouts"]
    assert rollout["gate"]["max_abs_diff"] < rollout["gate"]["limit"]
    assert set(rollout["engines"]) == {"stoker", "generate"}
    assert all(0 < engine["of_ceiling"] < 1 for engine in rollout["engines"].values())
    assert list(tmp_path.glob("*.png"))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rollouts"][0]["x_generate"] > 0


def test_updates_from_every_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_of_toy,) = run(tmp_path, "weights", "--only", "toy")["weights"]
    ways, size = run_of_toy["ways"], run_of_toy["model"]["bytes"]
    written = {name: way["bytes"] for name, way in ways.items()}
    whole = ("named tensors", "file", "shared memory", "broadcast", "gathered", "load_state_dict")
    assert all(written[name] == size for name in (*whole, "adapter, merge and push"))
    assert written["aliased"] == written["adapter, live"] == 0 and written["mirror"] == size // 2
    assert 0 < written["mirror, one layer changed"] < size // 4
    assert all(way["median_s"] > 0 for way in ways.values())
    assert ways["gathered"]["ranks"] == 2
    assert list(tmp_path.glob("*.png"))
    (summary,) = json.loads(capsys.readouterr().out.splitlines()[-1])["weights"]
    assert summary["model"] == "qwen3-toy" and len(summary) == 1 + len(ways)


def test_memory_that_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (of_toy,) = run(tmp_path, "memory")["memory"]
    for level in of_toy["levels"].values():
        assert level["given_back"]["resident"] > 0.9 * of_toy["kv_cache_bytes"] > level["residual"]["resident"]
    assert of_toy["cycles"]["identical_output"] and len(of_toy["cycles"]["held"]) == 20
    assert of_toy["cycles"]["outputs_differ_with_weights"]
    assert list(tmp_path.glob("*.png"))
    (summary,) = json.loads(capsys.readouterr().out.splitlines()[-1])["memory"]
    assert summary["cycles"] == 20


def test_the_command_knows_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    for file in (ROOT / "benchmarks").glob("*.py"):
        if '__name__ == "__main__"' in file.read_text():
            assert main(["bench", file.stem, "--help"]) == 0
            assert f"stoker bench {file.stem}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_an_unknown_program_is_refused_with_those_there_are(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "nothing"]) == 2
    assert "choose from" in capsys.readouterr().err
