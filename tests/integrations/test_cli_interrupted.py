"""The command ``stoker``: runs that are killed, interrupted, out of disk or beside each other, and how the next one goes on."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
from cli_setup import killed_after, killed_at_step, make_files, make_folder, read, write

from stoker.integrations import jsonl
from stoker.integrations.cli import main
from stoker.integrations.jsonl import STANDARD_OUTPUT, CommandError, Line, ResumableWriter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    return make_files(tmp_path)


def killed_by(run: Callable[[int, list[str]], None], when: int, arguments: list[str], target: Path) -> bytes:
    """What a command that was killed in another process has left in its output."""
    process = ranks.context().Process(target=run, args=(when, arguments))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    return target.read_bytes()


def test_a_killed_run_goes_on_where_it_stopped(folder: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [{"token_ids": [3 + i % 8, 4]} for i in range(24)])
    flags = ["--max-tokens", "12", "--ignore-eos", "--max-num-seqs", "2", "--n", "2"]
    whole, target = tmp_path / "whole", tmp_path / "out"
    assert main(["generate", folder, source, str(whole), *flags]) == 0

    killed = killed_by(killed_after, 7, ["generate", folder, source, str(target), *flags], target)
    assert killed.count(b"\n") == 7
    target.write_bytes(killed + b'{"token_ids": [')  # as a kill in the middle of a line leaves it
    assert main(["generate", folder, source, str(target), *flags]) == 0
    assert target.read_bytes() == whole.read_bytes()


def test_a_killed_run_keeps_each_line_that_was_scored(folder: str, tmp_path: Path) -> None:
    """Not only the lines of parts that were scored to their end."""
    source = write(tmp_path / "in", [{"token_ids": [3 + i // 4, 4, 5 + i % 4], "start": 2} for i in range(24)])
    flags = ["--max-num-seqs", "8"]  # 4 times as many go together: all
    whole, target = tmp_path / "whole", tmp_path / "out"
    assert main(["score", folder, source, str(whole), *flags]) == 0

    killed = killed_by(killed_at_step, 3, ["score", folder, source, str(target), *flags], target)
    assert killed and whole.read_bytes().startswith(killed) and killed.count(b"\n") == 16
    assert main(["score", folder, source, str(target), *flags]) == 0
    assert target.read_bytes() == whole.read_bytes()


def test_a_complete_output_is_left_alone(
    files: tuple[str, str], folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = files
    assert main(["generate", folder, source, target, "--max-tokens", "2"]) == 0
    before = Path(target).read_bytes()
    assert main(["generate", "no/model/is/loaded", source, target]) == 0
    assert Path(target).read_bytes() == before and "complete" in capsys.readouterr().err


def test_a_run_that_goes_on_tells_of_the_lines_that_failed_before(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in", [{"token_ids": [99]}, {"token_ids": [3]}, {"token_ids": [4]}])
    target = tmp_path / "out"
    command = ["generate", folder, source, str(target), "--max-tokens", "2"]
    assert main(command) == 1
    whole = target.read_bytes()
    for done in (2, 3):
        target.write_bytes(b"".join(whole.splitlines(keepends=True)[:done]))
        capsys.readouterr()
        assert main(command) == 1
        assert "1 of 3 lines failed" in capsys.readouterr().err and target.read_bytes() == whole


@pytest.mark.parametrize("kept", ['{"prompt": "other", "completions": []}\n', "[1]\n", "no JSON\n"])
def test_the_output_of_something_else_is_not_touched(
    files: tuple[str, str], folder: str, capsys: pytest.CaptureFixture[str], kept: str
) -> None:
    source, target = files
    Path(target).write_text(kept)
    assert main(["generate", folder, source, target]) == 1
    assert "line 1 is not of line 1" in capsys.readouterr().err and Path(target).read_text() == kept


def test_the_output_of_another_command_or_other_flags_is_not_taken_for_done(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was complete, as far as the fields of the input go: so is a copy of that."""
    source, target = write(tmp_path / "in", [{"token_ids": [3, 4]}]), tmp_path / "out"
    runs = [
        ["score"],
        ["generate", "--max-tokens", "2"],
        ["generate", "--max-tokens", "2", "--n", "2"],
        ["generate", "--max-tokens", "2", "--n", "2", "--tokens"],
        ["score", "--entropy"],
    ]
    target.write_bytes(Path(source).read_bytes())
    for name, *flags in runs:
        before, command = target.read_bytes(), [name, folder, source, str(target), *flags]
        assert main(command) == 1 and target.read_bytes() == before
        assert "line 1 is not what this command with these flags writes" in capsys.readouterr().err
        assert main([*command, "--overwrite"]) == 0 == main(command)


def test_an_output_with_more_lines_than_the_input_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text('{"token_ids": [3]}\n' * 2)
    with pytest.raises(CommandError, match="line 2 is not of line 2"):
        ResumableWriter(path, [Line(1, {"token_ids": [3]}, [3])])


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_keeps_whole_lines(tmp_path: Path, overwrite: bool) -> None:
    """A file that may not grow further: writes go in part, then fail."""
    path, lines = tmp_path / "out", [Line(i + 1, {"i": i}, [3]) for i in range(50)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ResumableWriter(path, lines, overwrite=overwrite) as writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (95, hard))
        try:
            with pytest.raises(CommandError, match=r"cannot write .*; its 10 lines are kept.*same command") as raised:
                for line in lines:
                    writer.write(line.fields)
            assert ("without --overwrite" in str(raised.value)) == overwrite  # which would take these lines away
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read(path) == [line.fields for line in lines[:10]]
    with ResumableWriter(path, lines) as writer:
        assert writer.done == 10
        for line in lines[10:]:
            writer.write(line.fields)
    assert read(path) == [line.fields for line in lines]


@pytest.mark.parametrize(
    ("command", "where", "flags"),
    [
        ("--help", "pipe", []),
        ("--help", "/dev/full", []),
        ("info", "/dev/full", ["-u"]),
        ("info", "file", []),
    ],
)
def test_what_is_printed_where_nothing_can_be(command: str, where: str, flags: list[str], tmp_path: Path) -> None:
    """Exit code 1 and no traceback, also where Python would find out at its exit."""
    if where == "pipe":  # that nobody reads
        reader, output = os.pipe()
        os.close(reader)
    else:
        (full := tmp_path / "out").write_bytes(b" " * 1024)
        output = os.open(full if where == "file" else where, os.O_WRONLY | os.O_APPEND)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    run = [sys.executable, *flags, "-P", "-m", "stoker.integrations.cli", command]
    if where == "file":  # that may not grow, beside smaller ones that may
        run = ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *run]
    try:
        done = subprocess.run(run, stdout=output, stderr=subprocess.PIPE, env=environment, text=True, timeout=120)
    finally:
        os.close(output)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert ("make room" in done.stderr) == (where != "pipe")


def test_a_torn_line_is_cut_off_whatever_its_length(tmp_path: Path) -> None:
    path, lines = tmp_path / "out", [Line(1, {"i": 0}, [3]), Line(2, {"i": 1}, [3])]
    path.write_text('{"i": 0}\n{"i": 1, "text": "' + "x" * 500)
    with ResumableWriter(path, lines) as writer:
        assert writer.done == 1
        writer.write({"i": 1})
    assert path.read_text() == '{"i": 0}\n{"i": 1}\n'


def test_a_line_with_nan_is_known_again(tmp_path: Path) -> None:
    path, lines = tmp_path / "out", [Line(1, {"reward": float("nan")}, [3]), Line(2, {"reward": [float("nan")]}, [3])]
    for done, line in enumerate(lines):
        with ResumableWriter(path, lines) as writer:
            assert writer.done == done
            writer.write(line.fields | {"text": "a"})
    path.write_text(path.read_text().replace("[NaN]", "[1.0]"))
    with pytest.raises(CommandError, match="line 2 is not of line 2"):
        ResumableWriter(path, lines)


def test_a_full_disk_takes_nothing_from_the_file_that_standard_output_goes_to(tmp_path: Path) -> None:
    log, before, text = tmp_path / "log", os.dup(1), b"of the user\n" * 20
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open(log, "wb") as taken:
        os.dup2(taken.fileno(), 1)
        try:
            os.write(1, text)
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(text) + 30, hard))
            with pytest.raises(CommandError, match="cannot write"), ResumableWriter(STANDARD_OUTPUT, []) as writer:
                for number in range(9):
                    writer.write({"number": number})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            os.dup2(before, 1)
            os.close(before)
    assert log.read_bytes().startswith(text + b'{"number": 0}\n')


def test_where_there_are_no_locks_a_run_goes_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems, on Windows, and of what keeps no lines."""

    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with ResumableWriter(Path("/dev/null"), []), ResumableWriter(Path("/dev/null"), []):
        pass
    for number, patched in enumerate((SimpleNamespace(flock=none, LOCK_EX=2, LOCK_NB=4), None)):
        monkeypatch.setattr(jsonl, "fcntl", patched)
        with ResumableWriter(tmp_path / "out", [Line(1, {"i": 0}, [3])]) as writer:
            assert writer.done == number
            if not number:
                writer.write({"i": 0})
    assert read(tmp_path / "out") == [{"i": 0}]


def test_two_runs_do_not_write_to_one_output(
    folder: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = files
    with ResumableWriter(Path(target), []) as writer:
        made = [{"text": "d", "finish_reason": "length"}]
        writer.write({"prompt": "abc", "id": 7, "completions": made})
        kept = Path(target).read_bytes()
        for flags in ([], ["--overwrite"]):
            assert main(["generate", folder, source, target, "--max-tokens", "2", *flags]) == 1
            assert "another run writes to it" in capsys.readouterr().err and Path(target).read_bytes() == kept
    assert main(["generate", folder, source, target, "--max-tokens", "2"]) == 0
    assert len(read(target)) == 3 and Path(target).read_bytes().startswith(kept)


def test_ctrl_c_keeps_what_is_done(
    folder: str, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = files
    write_line = ResumableWriter.write

    def interrupt(writer: ResumableWriter, record: dict[str, Any]) -> None:
        write_line(writer, record)
        raise KeyboardInterrupt

    monkeypatch.setattr(ResumableWriter, "write", interrupt)
    assert main(["generate", folder, source, target, "--max-tokens", "2"]) == 130
    assert len(read(target)) == 1 and "interrupted" in capsys.readouterr().err


def test_ctrl_c_while_packages_are_imported_is_not_lost() -> None:
    """There Python may be in a callback, or in C, that lets no exception through."""
    code = """
import signal, sys

class Callback:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            Callback()

from stoker.integrations.cli import main
sys.meta_path.insert(0, Finder())
sys.argv[1:] = ["info"]
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 130 and done.stderr == "stoker: interrupted\n" and not done.stdout


def test_an_output_that_a_failing_run_takes_away_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a run that has opened it before, or its lines would go to a file that no folder has."""
    path, lines = tmp_path / "out", [Line(1, {"i": 0}, [3])]
    failing, flock = ResumableWriter(path, lines), fcntl.flock

    def fails_meanwhile(file: Any, how: int) -> None:
        monkeypatch.undo()
        failing.__exit__(CommandError, CommandError("no such folder"), None)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", fails_meanwhile)
    with ResumableWriter(path, lines) as writer:
        writer.write({"i": 0})
    assert read(path) == [{"i": 0}]
