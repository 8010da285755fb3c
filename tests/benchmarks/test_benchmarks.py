"""The benchmarks at their smallest: they run, write what they promise, and the command finds all of them."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stoker.benchmarks import ceilings, images, overhead, sweeps
from stoker.benchmarks.ceilings import best_time
from stoker.benchmarks.overhead import growth
from stoker.benchmarks.scenarios import SCENARIOS
from stoker.engine.images import reader as image_reader
from stoker.integrations.cli import main

ROOT = Path(__file__).resolve().parents[2]


def run(tmp_path: Path, name: str, *flags: str) -> dict:
    """What ``stoker bench NAME --quick`` writes to its one JSON file."""
    assert main(["bench", name, "--quick", "--output", str(tmp_path), *flags]) == 0
    (path,) = tmp_path.glob("*.json")
    return json.loads(path.read_text())


@pytest.fixture(autouse=True)
def _little_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings are looked for a tenth as long, as engines are far below them; of steps, half as many, and once."""
    monkeypatch.setattr(
        ceilings, "best_time", lambda call, device, budget_s=0.5: best_time(call, device, budget_s / 10)
    )
    monkeypatch.setattr(sweeps, "TOKENS", 40)
    monkeypatch.setattr(sweeps, "_REPEATS", 1)
    monkeypatch.setattr(overhead, "growth", lambda *given, rounds: growth(*given, rounds=min(rounds, 2)))


def test_rollouts_against_their_ceiling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one round of short completions: ``test_rollout_benchmark.py`` has those of several."""
    once = tuple(
        replace(scenario, repeats=1, workload=replace(scenario.workload, median=10, cap=24, prompt_tokens=(8, 32)))
        for scenario in SCENARIOS["cpu", True]
    )
    monkeypatch.setitem(SCENARIOS, ("cpu", True), once)
    results = run(tmp_path, "rollout", "--only", "toy", "--peers", "generate")
    assert [found["model"]["name"] for found in results["rollouts"]] == ["qwen3-toy", "qwen3.5-toy"]
    for found in results["rollouts"]:
        assert found["gate"]["max_abs_diff"] < found["gate"]["limit"]
        assert set(found["engines"]) == {"stoker", "generate"}
        assert all(0 < share["of_ceiling"] < 1 for share in [*found["engines"].values(), found["prefill"]])
        assert found["running"]["rows"][-1] == 0 and max(found["running"]["rows"]) == 64
        assert all(found["cycle"][f"{part}_s"] > 0 for part in ("wake_up", "update_weights", "rollout", "sleep"))
    assert {p["batch"] for p in results["sweep"]} == {1, 16}
    assert all(0 < p["of_ceiling"] < 1 for p in results["sweep"])
    assert [p["settings"] for p in results["sampling"]] == [*sweeps.SAMPLING]
    assert all(p["of_plain"] > 0 and p["x_generate"] > 0 for p in results["sampling"])
    assert results["start_up"]["qwen3-toy"]["warm_s"] > 0
    (profile,) = results["profiles"]
    assert sum(profile["parts_us"].values()) == pytest.approx(profile["step_us"], rel=0.05)
    assert results["left_out"] == results["targets"] == []
    assert list(tmp_path.glob("*.png"))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rollouts"][0]["x_generate"] > 0


@pytest.mark.filterwarnings("error")
def test_the_command_knows_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    """And runs it in whatever process, with nothing to say about what was imported there before."""
    importlib.import_module("stoker.benchmarks.scoring")
    explained = (ROOT / "benchmarks" / "README.md").read_text()
    for file in (ROOT / "benchmarks").glob("*.py"):
        if '__name__ == "__main__"' in file.read_text():
            assert f"| `{file.stem}` |" in explained
            assert main(["bench", file.stem, "--help"]) == 0
            assert f"stoker bench {file.stem}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_an_unknown_program_is_refused_with_those_there_are(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "nothing"]) == 2
    assert "choose from" in capsys.readouterr().err


def test_grpo_steps_by_who_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    (found,) = run(tmp_path, "grpo")["grpo"]
    assert found["gate"]["max_abs_diff"] < found["gate"]["limit"]
    assert {"engine", "generate", "continuous, sized"} < set(found["ways"])
    for way in found["ways"].values():
        assert len(way["step_seconds"]) == len(way["rollout_seconds"]) == found["workload"]["steps"]
        assert 0 < way["rollout_share"] < 1 and 1 <= way["mean_length"] <= found["workload"]["cap"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["grpo"][0]["x_generate"] > 0


def test_rollouts_with_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = run(tmp_path, "images")["images"]
    assert found["gate"]["max_abs_diff"] < found["gate"]["limit"]
    assert set(found["engines"]) == {"stoker", "generate"}
    assert all(0 < engine["of_ceiling"] < 1 for engine in found["engines"].values())
    assert all(found["parts"][f"{part}_s"] > 0 for part in ("read", "encode", "prefill", "decode", "score"))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["images"][0]["x_generate"] > 0


def test_the_time_of_encoding_is_the_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has only begun when the call returns: what is left would count as prefill."""
    done: list[str] = []
    monkeypatch.setattr(ceilings, "synchronize", done.append)
    monkeypatch.setattr(image_reader, "encode", lambda number: done.append("encode") or number)
    with images.timed_encoding("cuda") as seconds:
        assert image_reader.encode(7) == 7  # type: ignore[arg-type, call-arg]
    assert done == ["cuda", "encode", "cuda"] and len(seconds) == 1


@torch.inference_mode()
def test_generate_gets_the_images_the_engine_gets() -> None:
    """Padded on the left, one for each sample."""
    work = replace(images.SCENARIOS["cpu", True][0].workload, samples=2)
    rows = work.with_images(images.TOY.config, 0)
    peer = images.GenerateWithImages(images.TOY, work, "cpu", torch.float32)
    model = peer.model
    together = model(**peer.inputs(rows)).logits[:, -1]
    for row, prompt in enumerate(rows):
        torch.testing.assert_close(together[row], model(**prompt).logits[0, -1], rtol=0, atol=1e-5)
    assert rows[0] is rows[1] and len({id(prompt) for prompt in rows}) == work.prompts
    other = work.with_images(images.TOY.config, 1)[0]
    assert other["input_ids"].shape == rows[0]["input_ids"].shape
    assert not torch.equal(other["pixel_values"], rows[0]["pixel_values"])


def test_updates_of_weights_need_no_peft_but_for_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("weights", "lora"):
        monkeypatch.delitem(sys.modules, f"stoker.benchmarks.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "peft", None)
    weights = importlib.import_module("stoker.benchmarks.weights")
    found = weights.of_adapter(weights.SCENARIOS["cpu", True][0], "cpu")
    assert {way["skipped"] for way in found.values()} == {"peft is not installed"}
    gathered = {"ranks": 1, "promised_extra_bytes": 0, "skipped": "no time"}
    run = {"model": {"name": "", "dtype": "", "parameters": 0, "bytes": 0}, "copy_bandwidth": 0}
    assert "peft is not installed" in weights.table(run | {"ways": found | {"gathered": gathered}})[2]


def test_updates_of_an_adapter_are_timed() -> None:
    weights = pytest.importorskip("stoker.benchmarks.weights")
    pytest.importorskip("peft", reason="PEFT is not installed")
    found = weights.of_adapter(weights.SCENARIOS["cpu", True][0], "cpu")
    assert found["adapter, live"]["bytes"] == 0 < found["adapter, merge and push"]["bytes"]
    assert all(min(way["seconds"]) > 0 for way in found.values())


def test_a_token_behind_a_new_adapter_is_timed_on_the_engine_that_got_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update leaves to the next rollout to look at all weights, which is a part of what it takes."""
    lora = pytest.importorskip("stoker.benchmarks.lora", reason="PEFT is not installed", exc_type=ImportError)
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    smaller = []  # by which nothing but the time changes
    for scenario in lora.SCENARIOS["cpu", True]:
        fields = {k: v for k, v in scenario.spec.config.to_dict().items() if k != "layer_types"}
        config = type(scenario.spec.config).from_dict(fields | sizes)
        smaller.append(replace(scenario, spec=replace(scenario.spec, config=config)))
    monkeypatch.setitem(lora.SCENARIOS, ("cpu", True), smaller)
    found, _ = run(tmp_path, "lora")["lora"]
    assert all(found["updates"][way]["token_s"] > 0 for way in ("live", "merge and push"))


def test_partial_rounds_against_whole_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = run(tmp_path, "partial")["partial"]
    whole, partial = found["ways"]["wait for all"], found["ways"]["partial"]
    assert whole["over_an_update"] == 0 < partial["over_an_update"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["partial"][0]["x_waiting"] > 0


def test_windows_against_all_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = run(tmp_path, "windows")["windows"]
    windows, whole = found["ways"]["windows"], found["ways"]["all keys"]
    assert windows["at_a_time"] > whole["at_a_time"] and sum(windows["preemptions"]) <= sum(whole["preemptions"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["windows"][0]["x_at_a_time"] > 1


@pytest.mark.parametrize("name", ["scoring", "rollout"])
def test_a_model_that_no_scenario_has_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, "--quick", "--only", "70b", "--output", str(tmp_path)]) == 2
    assert "no model's name contains '70b'" in capsys.readouterr().err
    assert not list(tmp_path.glob("*"))


@pytest.mark.parametrize("name", ["scoring", "rollout", "step_profile"])
def test_wrong_flags_are_refused_before_anything_is_measured(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    bad = [("--output", str(tmp_path / "file")), ("--output", str(tmp_path / "file" / "below"))]
    bad += (
        [("--batch", "0"), ("--steps", "0"), ("--adapters", "-1")] if name == "step_profile" else [("--threads", "0")]
    )
    bad += [] if torch.cuda.is_available() else [("--device", "cuda")]
    for flag in bad:
        assert main(["bench", name, *flag]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"stoker bench {name}: error: argument {flag[0]}: "), error
