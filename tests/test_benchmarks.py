"""The benchmarks at their smallest: they run, write what they promise, and are all found by the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from stoker.benchmarks import rollout
from stoker.benchmarks.peers import Stoker
from stoker.benchmarks.workloads import TOY, Workload
from stoker.integrations.cli import main

ROOT = Path(__file__).resolve().parents[1]


def run(tmp_path: Path, name: str, *flags: str) -> dict:
    """What ``stoker bench NAME --quick`` writes to its one JSON file."""
    assert main(["bench", name, "--quick", "--output", str(tmp_path), *flags]) == 0
    (path,) = tmp_path.glob("*.json")
    return json.loads(path.read_text())


def test_rollouts_against_their_ceiling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run(tmp_path, "rollout", "--only", "toy", "--peers", "generate")
    (found,) = results["rollouts"]
    assert found["gate"]["max_abs_diff"] < found["gate"]["limit"]
    assert set(found["engines"]) == {"stoker", "generate"}
    assert all(0 < engine["of_ceiling"] < 1 for engine in found["engines"].values())
    assert list(tmp_path.glob("*.png"))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rollouts"][0]["x_generate"] > 0


class FakeVllm(ModuleType):
    """What the benchmark uses of vLLM, and what it was given."""

    def __init__(self) -> None:
        super().__init__("vllm")
        self.__spec__ = SimpleNamespace()  # type: ignore[assignment]
        fake = self
        self.flushes, self.calls = 0, []

        class LLM:
            def __init__(self, **settings: Any) -> None:
                assert "model.embed_tokens.weight" in load_file(f"{settings['model']}/model.safetensors")
                assert AutoTokenizer.from_pretrained(settings["model"])("7 12 99").input_ids == [7, 12, 99]
                fake.settings = settings

            def reset_prefix_cache(self) -> None:
                fake.flushes += 1

            def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
                fake.calls.append((prompts, params))
                rows = [SimpleNamespace(token_ids=(1,) * p.max_tokens) for p in params]
                return [SimpleNamespace(outputs=[row]) for row in rows]

        self.LLM, self.SamplingParams = LLM, lambda **settings: SimpleNamespace(**settings)


def race(*peers: str) -> dict[str, Any]:
    work = Workload(name="w", prompts=2, samples=3, prompt_tokens=(4, 9), median=5, sigma=0.5, cap=16, slots=4)
    scenario = rollout.Scenario(spec=TOY, workload=work, repeats=2)
    return rollout.race(Stoker(TOY, work, "cpu", torch.float32), scenario, "cpu", torch.float32, peers)


def test_vllm_is_a_peer_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = FakeVllm()
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    engines = race("vllm", "lmdeploy")
    assert engines["lmdeploy"]["skipped"] == "lmdeploy is not installed"
    assert len(engines["vllm"]["seconds"]) == len(engines["stoker"]["seconds"]) == 2
    assert vllm.flushes == len(vllm.calls) == 3
    for prompts, params in vllm.calls:
        assert len(prompts) == 6 and prompts[0] == prompts[1] == prompts[2] != prompts[3]
        assert all(p.ignore_eos and p.temperature == 1 and p.logprobs == 0 for p in params)
    assert vllm.settings["max_num_seqs"] == 4 and vllm.settings["dtype"] == "float32"
    # 4 slots of 25 tokens; 4 layers of 2 key heads of 16 dimensions, keys and values, 4 bytes each
    assert vllm.settings["kv_cache_memory_bytes"] == 4 * 25 * 1024


def test_a_peer_that_does_not_start_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = FakeVllm()
    del vllm.LLM
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    assert "cannot import name 'LLM'" in race("vllm")["vllm"]["skipped"]


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


def test_grpo_steps_by_who_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    found = run(tmp_path, "grpo")["grpo"]
    assert found["gate"]["max_abs_diff"] < found["gate"]["limit"]
    assert {"engine", "generate", "continuous, sized"} < set(found["ways"])
    for way in found["ways"].values():
        assert len(way["step_seconds"]) == len(way["rollout_seconds"]) == found["workload"]["steps"]
        assert 0 < way["rollout_share"] < 1 and 1 <= way["mean_length"] <= found["workload"]["cap"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["x_generate"] > 0


def test_partial_rounds_against_whole_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(tmp_path, "partial")["partial"]
    whole, partial = found["ways"]["wait for all"], found["ways"]["partial"]
    assert whole["over_an_update"] == 0 < partial["over_an_update"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["x_waiting"] > 0
