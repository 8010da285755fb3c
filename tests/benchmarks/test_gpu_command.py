"""What `make gpu` asks of a CUDA host, tested without one: how it divides its time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from turns import in_turn

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / ".ci/gpu").is_file(), reason="in the checkout alone")


def given(tmp_path: Path, parts: str, *, also: str = "true", **settings: str) -> list[int]:
    """Seconds that each command of a run may take, none of which takes any. also: what else it does."""
    log = tmp_path / "log"
    notes = f'{also}; echo "$4" >> {log}; echo "$*" >> {tmp_path / "commands"}'
    for name, does in {"python": f'echo "$*" >> {tmp_path / "pythons"}', "timeout": notes, "nproc": "echo 16"}.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{does}\n")
        program.chmod(0o755)
    settings |= {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": "python",
        "OUT": str(tmp_path / "out"),
        "PARTS": parts,
    }
    subprocess.run(["bash", ROOT / ".ci/gpu"], env=os.environ | settings, check=True, timeout=60)
    return [int(line) for line in log.read_text().splitlines()]


def test_a_part_by_itself_has_the_time_of_the_other(tmp_path: Path) -> None:
    together = given(tmp_path, "tests benchmarks")
    (tmp_path / "log").unlink()
    tests = given(tmp_path, "tests")
    (tmp_path / "log").unlink()
    benchmarks = given(tmp_path, "benchmarks")
    assert len(together) == len(tests) + len(benchmarks)
    assert tests[0] > 2 * together[0] and sum(tests) <= 560
    assert benchmarks[0] > together[len(tests)] + 100 and benchmarks[0] + 15 * len(benchmarks[1:]) <= 560


def test_what_is_asked_for_is_given(tmp_path: Path) -> None:
    assert given(tmp_path, "tests", TEST_SECONDS="100", ALONE_SECONDS="30") == [100, 30]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="a system without /proc")
def test_nothing_that_a_part_leaves_behind_goes_on_while_the_next_is_measured(tmp_path: Path) -> None:
    """As the workers of tests whose own process had to be killed."""
    program, left = tmp_path / "leave", tmp_path / "left"
    program.write_text(f"#!/bin/sh\nsleep 300 &\necho $! >> {left}\n")
    program.chmod(0o755)
    given(tmp_path, "tests benchmarks", also=str(program), BENCHMARKS="scoring")
    for process in left.read_text().split():
        status = Path("/proc", process, "stat")
        assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"  # nobody waits for it
    assert len(left.read_text().split()) == 4


def test_kernels_of_benchmarks_are_compiled_while_tests_run(tmp_path: Path) -> None:
    given(tmp_path, "tests", also="sleep 1")
    assert "stoker.benchmarks.rollout --device cuda --quick --peers --output" in (tmp_path / "pythons").read_text()
    (tmp_path / "pythons").unlink()
    given(tmp_path, "benchmarks", also="sleep 1", BENCHMARKS=" ")
    assert "stoker.benchmarks" not in (tmp_path / "pythons").read_text()


def test_a_file_that_cannot_be_imported_costs_only_its_own_tests(tmp_path: Path) -> None:
    """As where a package is missing, or is another version: pytest would run none of the others."""
    given(tmp_path, "tests")
    (tmp_path / "test_bad.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "test_good.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_it(): pass\n")
    commands = (tmp_path / "commands").read_text().splitlines()
    options = [word for word in commands[0].split() if word.startswith("--continue")]
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(tmp_path)]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "1 passed, 1 error" in done.stdout, done.stdout


def test_outcomes_of_tests_stay_short_whatever_they_say(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("def test_it(): raise ValueError('begin' + 100_000 * 'x' + 'end')\n")
    outcomes = tmp_path / "outcomes.jsonl"
    run = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "conftest", f"--outcomes={outcomes}", str(test)]
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # no worker of this run
    env["PYTHONPATH"] = f"{env.get('PYTHONPATH', '')}:{ROOT / 'tests'}:{ROOT / 'tests/helpers'}"
    subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, timeout=60)
    (found,) = map(json.loads, outcomes.read_text().splitlines())
    assert found["outcome"] == "failed" and 5000 < len(found["error"]) < 11_000
    assert "def test_it" in found["error"] and "[...]" in found["error"]


def test_of_tests_that_are_cut_off_every_file_has_had_its_part() -> None:
    kernels, rollouts = [("kernels", n) for n in range(40)], [("rollouts", n) for n in range(8)]
    found = in_turn([*kernels, *rollouts, ("one", 0)], lambda test: test[0])
    assert [t for t in found if t[0] == "kernels"] == kernels and [t for t in found if t[0] == "rollouts"] == rollouts
    for part in (1, 2, 3):
        assert sum(t[0] == "rollouts" for t in found[: part * len(found) // 4]) in (
            2 * part - 1,
            2 * part,
            2 * part + 1,
        )
