"""Runs a function on several ranks of a Gloo group, and raises what any of them raised.

The processes are forked from one that has imported everything.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist


@contextmanager
def noted(case: str) -> Iterator[None]:
    """Within, an error says of which of several cases it is."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"({case})")
        raise


def context() -> Any:
    """For processes that are forked from one that has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks_preload"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # or Python 3.11 finds no preload, and says nothing
        forkserver.ensure_running()
    return context


def run_script(code: str, *arguments: str) -> str:
    """What the code prints, as a program of its own with those arguments."""
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder, "printed")
        process = context().Process(target=_script, args=(code, arguments, str(printed)))
        process.start()
        process.join(300)
        process.kill()
        process.join()
        said = printed.read_text()
    assert process.exitcode == 0, f"exit code {process.exitcode}: {said[-3000:]}"
    return said


def _script(code: str, arguments: tuple[str, ...], printed: str) -> None:
    sys.argv = ["-c", *arguments]
    with open(printed, "w", buffering=1) as file, redirect_stdout(file):
        try:
            exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc(file=file)
            raise


def run(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 60.0, dead: int = 0
) -> list[Any]:
    """What ``function(rank, *arguments)`` returned on each rank. dead: how many ranks are meant to vanish."""
    processes_of = context()
    with tempfile.TemporaryDirectory() as folder:
        results = processes_of.SimpleQueue()
        processes = [
            processes_of.Process(
                target=_main,
                args=(function, rank, world_size, os.path.join(folder, "store"), arguments, timeout, results),
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            found: dict[int, Any] = {}
            while len(found) < world_size - dead:
                if results.empty():
                    if not any(p.is_alive() for p in processes) and results.empty():
                        break
                    processes[0].join(0.02)
                    continue
                rank, value, error = results.get()
                assert error is None, f"rank {rank}: {error}"
                found[rank] = value
        finally:
            for process in processes:
                process.join(5 if len(found) == world_size - dead else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
    assert len(found) == world_size - dead, f"only ranks {sorted(found)} came to an end"
    return [found.get(rank) for rank in range(world_size)]


def _main(
    function: Callable[..., Any], rank: int, world_size: int, store: str, arguments: Any, timeout: float, results: Any
) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # threads that wait for others would take the processors of other ranks
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        dist.barrier()  # a rank that is through, and closes its connections, may find another one still making its own
        results.put((rank, function(rank, *arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
