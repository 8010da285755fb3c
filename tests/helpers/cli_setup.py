"""A folder with a small model, and JSON Lines files, for the tests of the command line."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from trl_setup import make_model, make_tokenizer

from stoker.engine.core import EngineCore
from stoker.integrations.cli import main
from stoker.integrations.jsonl import ResumableWriter

TEMPLATE = "{% for m in messages %}h{{ m.content }}{% endfor %}{% if add_generation_prompt %}g{% endif %}"


def write(path: Path, lines: list[Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def read(path: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def make_folder(path: Path) -> str:
    make_model().save_pretrained(path)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return str(path)


def make_files(path: Path) -> tuple[str, str]:
    """An input of every kind of line, and an output that is not there."""
    lines = [
        {"prompt": "abc", "id": 7},
        {"messages": [{"role": "user", "content": "fed"}]},
        {"token_ids": [3, 4, 5], "completions": "replaced"},
    ]
    return write(path / "in.jsonl", lines), str(path / "out.jsonl")


def killed_after(lines: int, command: list[str]) -> None:
    """For a process of its own, which is killed as soon as it has written so many lines."""
    write_line, left = ResumableWriter.write, iter(range(lines - 1, -1, -1))

    def write_and_die(writer: ResumableWriter, record: dict[str, Any]) -> None:
        write_line(writer, record)
        if not next(left):
            os.kill(os.getpid(), signal.SIGKILL)

    ResumableWriter.write = write_and_die  # type: ignore[method-assign]
    main(command)


def killed_at_step(number: int, command: list[str]) -> None:
    """The same, as soon as its engine begins the step of that number, counted from 1."""
    step, left = EngineCore.step, iter(range(number - 1, -1, -1))

    def die_or_step(core: EngineCore) -> Any:
        if not next(left):
            os.kill(os.getpid(), signal.SIGKILL)
        return step(core)

    EngineCore.step = die_or_step  # type: ignore[method-assign]
    main(command)
