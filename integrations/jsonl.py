"""Reads JSON Lines, checking every line, and writes them so that a run that was killed can be continued."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stoker.kernels.errors import StokerError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


STANDARD_OUTPUT = Path("/dev/stdout")


class CommandError(StokerError):
    """What a user of the command line can mend; printed without a traceback."""


class Line:
    """One line of the input: its number in the file, counted from 1, and its object."""

    def __init__(self, number: int, fields: dict[str, Any], prompt: Any) -> None:
        self.number = number
        self.fields = fields
        self.prompt = prompt  # text, chat messages, or token ids


def read_lines(path: Path, *, kinds: tuple[str, ...], results: tuple[str, ...]) -> list[Line]:
    """All lines but blank ones. kinds: fields, of which each line has to have exactly one. results: fields that are left out,
    since the output has fields of those names; so an output can be used as input.

    Raises ``CommandError`` naming the first line that cannot be used.
    """
    lines = []
    try:
        # Bytes that are not UTF-8 come through as surrogates, so that the error can name the line.
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    fields = _parse(text, f"{path} line {number}")
                    prompt = _prompt(fields, kinds, f"{path} line {number}")
                    kept = {name: value for name, value in fields.items() if name not in results}
                    lines.append(Line(number, kept, prompt))
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error}") from error
    return lines


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) - 0xDC00  # as ``surrogateescape`` writes it
        raise CommandError(f"{where} is not UTF-8: it has the byte 0x{byte:02x}. Save the file as UTF-8") from error
    try:
        fields = json.loads(text)
        if "\\u" in text:  # may be half a character, which neither a tokenizer nor the output takes
            json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CommandError(
            f"{where} is not JSON: {error}. The file has to be JSON Lines, an object on each line"
        ) from error
    if not isinstance(fields, dict):
        raise CommandError(f"{where} is a {type(fields).__name__}: each line has to be an object")
    return fields


def _prompt(fields: dict[str, Any], kinds: tuple[str, ...], where: str) -> Any:
    present = [kind for kind in kinds if kind in fields]
    if len(present) != 1:
        found = " and ".join(present) if present else "none of them"
        raise CommandError(f"{where} needs exactly one of {', '.join(kinds)}, and has {found}")
    kind = present[0]
    value = fields[kind]
    items: list[Any] | str = value if isinstance(value, list) else []
    if kind == "messages":
        good, wanted = all(isinstance(m, dict) for m in items), "a list of messages, objects with role and content"
    elif kind == "token_ids":
        good, wanted = all(type(token) is int for token in items), "a list of integers"
    else:
        items = value if isinstance(value, str) else ""
        good, wanted = True, "text"
    if not good or not items:
        raise CommandError(f"{where}: {kind} has to be {wanted}, and not empty")
    return value


def _same(a: Any, b: Any) -> bool:
    return json.dumps(a) == json.dumps(b)  # as text, where NaN is itself


class ResumableWriter:
    """Writes one object for each input line, in order, each completely before the next.

    If the output exists, it counts as what an earlier run with this input has done: its complete lines are kept, a torn last one
    is cut off, and ``done`` says how many there are, ``failed`` how many of these have an error. With ``overwrite`` they are
    removed when the first new line is written. Raises ``CommandError`` where the output belongs to another input, or to another
    command (as ``is_result`` says of lines without an error), or cannot be written. What was written stays; a run that fails
    before it has written anything leaves no file. Standard output is only written to, wherever it goes.
    """

    def __init__(
        self,
        path: Path,
        inputs: list[Line],
        *,
        overwrite: bool = False,
        is_result: Callable[[dict[str, Any]], bool] = lambda _: True,
    ) -> None:
        self.path = path
        self._is_result = is_result
        self._overwrite = overwrite
        self.done = 0
        self.failed = 0
        self._end = 0
        self._open()
        if not self._is_there():
            self._file.close()
            self._open()
        self._leftover = overwrite and self._keeps_lines
        if self._keeps_lines and not overwrite:
            try:
                self._skip_done(inputs)
            except BaseException:
                self._file.close()
                raise

    def _open(self) -> None:
        path = self.path
        try:
            self._is_new = not path.exists()
            # Unbuffered: a line is with the system once it is written, whatever happens to this process.
            where, mode = (os.dup(1), "wb") if path == STANDARD_OUTPUT else (path, "ab")
            self._file = open(where, mode, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise CommandError(f"cannot write {path}: {error}") from error
        regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        self._keeps_lines = regular and path != STANDARD_OUTPUT  # as a pipe or device does not
        self._be_alone()

    def _is_there(self) -> bool:
        """Whether the file is still there: another run that failed before it wrote anything may have removed it."""
        if not self._keeps_lines:
            return True
        with suppress(OSError):
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        return False

    def _be_alone(self) -> None:
        """Refuse to write where another run is still writing: the lines of both would mix."""
        if fcntl is None or not self._keeps_lines:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
        except BlockingIOError as error:
            self._file.close()
            raise CommandError(
                f"cannot write {self.path}: another run writes to it, wait for that or end it"
            ) from error
        except OSError:  # some network file systems have no locks
            pass

    def _skip_done(self, inputs: list[Line]) -> None:
        with open(self.path, "rb") as kept:
            for number, text in enumerate(kept, start=1):
                if not text.endswith(b"\n"):
                    break
                mine = inputs[number - 1].fields if number <= len(inputs) else None
                try:
                    found = json.loads(text)
                except (ValueError, RecursionError):
                    found = None
                if mine is None or not isinstance(found, dict) or not _same({k: found.get(k) for k in mine}, mine):
                    raise CommandError(
                        f"{self.path} line {number} is not of line {number} of this input: name another output, or "
                        "start anew with --overwrite"
                    )
                if "error" not in found and not self._is_result(found):
                    raise CommandError(
                        f"{self.path} line {number} is not what this command with these flags writes: give those of the run "
                        "that wrote it, name another output, or start anew with --overwrite"
                    )
                self.done, self._end = number, self._end + len(text)
                self.failed += "error" in found
        self._file.truncate(self._end)

    def write(self, record: dict[str, Any]) -> None:
        """Append one line. On an error what was written of it is taken back."""
        data = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        try:
            self._drop_leftover()
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        except BrokenPipeError:  # whoever read it has gone
            raise
        except OSError as error:
            if self._keeps_lines:
                with suppress(OSError):
                    self._file.truncate(self._end)
            again = "again, without --overwrite" if self._overwrite and self.done else "again"
            raise CommandError(
                f"cannot write {self.path}: {os.strerror(error.errno or 0)}; its {self.done} lines are kept: make room "
                f"and run the same command {again}"
            ) from error
        self.done, self._end = self.done + 1, self._end + len(data)
        self.failed += "error" in record

    def _drop_leftover(self) -> None:
        if self._leftover:
            self._file.truncate(0)
            self._leftover = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._drop_leftover()
        if fcntl is None:  # Windows cannot remove an open file
            self._file.close()
        if kind is not None and self._is_new and not self.done and self._keeps_lines:
            # While it is locked, or another run might have begun to write. A link to it is left, as it is the user's.
            self.path.resolve().unlink(missing_ok=True)
        self._file.close()
