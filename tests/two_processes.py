"""Runs a function of a test file in two processes that form a Gloo group, as ``torchrun`` would start them."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TIMEOUT_SECONDS = 120


def run_in_two_processes(function: Callable[[str], Any], folder: str) -> list[Any]:
    """What ``function(folder)`` returns in each process. A process that fails or hangs is an error."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    code = function.__code__  # type: ignore[attr-defined]
    command = [sys.executable, "-P", __file__, code.co_filename, function.__name__, folder]
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    try:
        for rank in ("0", "1"):
            environment = {**os.environ, **group, "RANK": rank, "LOCAL_RANK": rank}
            processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        errors = [process.communicate(timeout=TIMEOUT_SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [error for process, error in zip(processes, errors, strict=True) if process.returncode]
    assert not failed, "\n".join(failed)
    return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in (0, 1)]


def _main(file: str, function: str, folder: str) -> None:
    sys.path.insert(0, str(Path(file).parent))
    answer = getattr(importlib.import_module(Path(file).stem), function)(folder)
    torch.save(answer, Path(folder, f"{os.environ['RANK']}.pt"))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
