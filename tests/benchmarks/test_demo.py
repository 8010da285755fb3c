"""The demo script, cut short: it runs, writes its report, and refuses bad input before any work."""

from __future__ import annotations

import json
import sys

import pytest
from ranks import run_script

pytest.importorskip("trl")
pytest.importorskip("datasets")


def run(*arguments: str) -> str:
    """What it prints, as a program of its own."""
    return run_script(
        "import runpy; runpy.run_module('stoker.examples.grpo_arithmetic', run_name='__main__')", *arguments
    )


def test_a_short_run_writes_its_report(tmp_path):
    short = ["--pretraining-steps", "5", "--steps", "2", "--batch-size", "16", "--eval-problems", "8"]
    run("--output", str(tmp_path), "--compare-prompts", "0", *short)
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["rewards"]) == 2 and report["after"]["problems"] == 8
    assert report["logprob_difference"]["max"] < 1e-3
    assert (tmp_path / "report.png").is_file()


def test_an_adapter_is_trained_and_its_updates_are_timed(tmp_path):
    pytest.importorskip("peft")
    short = ["--pretraining-steps", "5", "--steps", "2", "--batch-size", "16", "--eval-problems", "8"]
    printed = run("--output", str(tmp_path), "--lora", "4", "--compare-prompts", "0", *short)
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["rewards"]) == 2
    assert report["logprob_difference"]["max"] < 1e-3
    live, pushed = report["adapter_updates"]["live"], report["adapter_updates"]["merge and push"]
    assert live["bytes"] == 0 < pushed["bytes"]
    assert live["seconds"] > 0 and pushed["seconds"] > 0
    assert "changed adapter, live" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-generations", "3"], "multiple of --num-generations"),
        (["--model", "nowhere"], "go together"),
        (["--output", "/proc"], "/proc"),  # which is there, and takes no files
        (["--model", "nowhere", "--dataset", "nothing.jsonl"], "nowhere"),
    ],
)
def test_bad_flags_are_refused(arguments, message, tmp_path, capsys, monkeypatch):
    from stoker.examples.grpo_arithmetic import main

    monkeypatch.setattr(sys, "argv", ["demo", "--output", str(tmp_path / "out"), *arguments])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_dataset_with_any_text(tmp_path):
    from stoker.examples.grpo_arithmetic import read_problems

    problems = [{"prompt": "a\u2028b\x85c", "answer": "\u2029"}, {"prompt": "two", "answer": "2"}]
    path = tmp_path / "problems.jsonl"
    path.write_bytes("\r\n".join(json.dumps(p, ensure_ascii=False) for p in problems).encode("utf-8-sig"))
    assert read_problems(path) == problems
