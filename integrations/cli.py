"""The command ``stoker``: its subcommands, and ``stoker info``, which says what will run here and why."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version

from stoker.integrations.cli_engine import add_flags, add_model, check_device, config_of, load
from stoker.integrations.cli_files import add_generate, add_score
from stoker.integrations.jsonl import CommandError
from stoker.kernels.errors import StokerError

# Errors of a write for which there is no room: a full disk, a quota, a limit on the size of files.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
EPILOG = "Exit codes: 0 all well, 1 something failed (the message says what), 2 wrong flags, 130 interrupted."
# Programs with their own flags: (the default, all by name).
_BENCHMARKS = {
    name: f"stoker.benchmarks.{name}"
    for name in (
        "rollout",
        "images",
        "scoring",
        "lora",
        "weights",
        "memory",
        "grpo",
        "partial",
        "windows",
        "step_profile",
    )
}
_PROGRAMS = {
    "bench": ("rollout", _BENCHMARKS),
    "demo": ("grpo", {"grpo": "stoker.examples.grpo_arithmetic", "ppo": "stoker.examples.ppo"}),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. Wrong flags raise ``SystemExit(2)``, as argparse does."""
    if arguments is None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error: a folder's name may have any letters
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else list(arguments), alone=arguments is None)
        except StokerError as error:
            print(f"stoker: {error}", file=sys.stderr)
            return 1
        finally:
            if sys.stdout is not None:  # closed
                sys.stdout.flush()  # here: an error at Python's exit would have Python's own message and exit code
    except KeyboardInterrupt:
        print("stoker: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, *_NO_ROOM):
            raise
        if error.errno != errno.EPIPE:  # after EPIPE nobody reads the output any more
            print(f"stoker: {error}: make room", file=sys.stderr)
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        return 1


def _run(arguments: list[str], *, alone: bool) -> int:
    """alone: nothing else runs in this process."""
    parser = _parser()
    if arguments and arguments[0] in _PROGRAMS:
        return _run_program(*arguments, alone=alone)
    args = parser.parse_args(arguments)
    with _ends_at_once(alone):
        args.config = config_of(args)  # which imports torch
    return int(args.run(args))


@contextmanager
def _ends_at_once(alone: bool) -> Iterator[None]:
    """Context manager: Ctrl-C ends the process at once. For imports that take seconds, when nothing else has begun.

    An exception could be raised in one of their callbacks, or in C, and be lost.
    """

    def end(*_: object) -> None:
        os.write(2, b"stoker: interrupted\n")
        os._exit(130)

    # Otherwise the signal is ignored, as in the background, or somebody else handles it.
    if not alone or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stoker", description="The rollout engine from the command line.", epilog=EPILOG
    )
    parser.add_argument("--version", action="version", version=f"stoker {version('stoker')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    info = commands.add_parser("info", help="versions, device, operations and why", epilog=EPILOG)
    info.add_argument("model", nargs="?", help="also load this model (folder or hub id) and say how it will run")
    add_flags(info)
    info.set_defaults(run=_info, parser=info)

    add_generate(commands, EPILOG)
    add_score(commands, EPILOG)
    serve = commands.add_parser(
        "serve",
        help="an HTTP server in OpenAI's protocol, until Ctrl-C",
        description="Serve a model over HTTP, in OpenAI's protocol, until Ctrl-C.",
        epilog=EPILOG,
    )
    add_model(serve)
    serve.add_argument("--host", default="127.0.0.1", metavar="X", help="address to listen at (%(default)s)")
    serve.add_argument("--port", type=int, default=8000, metavar="N", help="0 is any free one (%(default)s)")
    serve.add_argument("--name", metavar="X", help="of the model, in requests (MODEL as given)")
    serve.add_argument(
        "--control",
        action="store_true",
        help="also serve pause, sleep, update_weights, adapters, and whoever names files",
    )
    serve.add_argument(
        "--api-key", metavar="X", help="what requests have to bring (the environment's STOKER_API_KEY, or none)"
    )
    add_flags(serve)
    serve.set_defaults(run=_serve, parser=serve)

    commands.add_parser("bench", help=f"a benchmark: {', '.join(_BENCHMARKS)} (bench NAME --help)")
    demos = ", ".join(_PROGRAMS["demo"][1])
    commands.add_parser("demo", help=f"a model made on the spot and trained, in minutes: {demos} (demo NAME --help)")
    return parser


def _run_program(command: str, *flags: str, alone: bool) -> int:
    """Run a program of the package under its own name and flags; returns its exit code."""
    default, programs = _PROGRAMS[command]
    name, flags = (flags[0], flags[1:]) if flags and not flags[0].startswith("-") else (default, flags)
    if name not in programs:
        print(f"stoker {command}: there is no {name}; choose from {', '.join(programs)}", file=sys.stderr)
        return 2
    before, sys.argv = sys.argv, [f"stoker {command} {name}", *flags]
    try:
        with _ends_at_once(alone):
            program = importlib.import_module(programs[name])
        return int(program.main() or 0)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise CommandError(
            f"stoker {command} {name} needs {package}, which is not installed: pip install {package}"
        ) from error
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    finally:
        sys.argv = before


# -- stoker info -------------------------------------------------------------------------------------------------------


def _info(args: argparse.Namespace) -> int:
    import torch

    from stoker.kernels.ops import check_gpu, ops_for

    for package in ("stoker", "torch", "triton", "transformers", "trl", "peft", "accelerate"):
        try:
            found = version(package) if package != "torch" else torch.__version__  # which names the build
        except PackageNotFoundError:
            found = "not installed"
        print(f"{package:13}{found}")
    print(f"{'python':13}{platform.python_version()}")

    check_device(args)
    device = torch.device(args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    why = "as asked for"
    if args.device == "auto":
        why = "CUDA is there" if device.type == "cuda" else "torch sees no CUDA device"
    if device.type == "cuda":
        described = (
            f"{torch.cuda.get_device_name(device)}, {torch.cuda.get_device_properties(device).total_memory:,} bytes"
        )
    else:
        described = f"{platform.machine()}, {torch.get_num_threads()} threads"
    print(f"{'device':13}{device} ({described}): {why}")
    check_gpu(device)
    print(f"operations on {device.type}:")
    ops = ops_for(device)
    for operation in fields(ops):
        function = getattr(ops, operation.name)
        if callable(function):
            print(f"  {operation.name:22}{function.__module__.removeprefix('stoker.kernels.')}")
    if args.model:
        with load(args) as engine:
            stats = engine.stats()
            print(f"model {args.model}:")
            print(f"  fused layers          {stats.fused_layers} of {stats.num_layers}")
            print(f"  longest sequence      {engine.max_model_len} tokens")
            tokens = stats.num_kv_blocks * engine.config.block_size
            print(f"  KV cache              {stats.kv_cache_bytes:,} bytes, {tokens:,} tokens")
            if states := stats.recurrent_state_bytes:
                print(f"  of these states       {states:,} bytes, {engine.config.max_num_seqs} sequences at a time")
    return 0


# -- stoker serve ------------------------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    try:
        from stoker.integrations.server import Server, check_key, listen
    except ModuleNotFoundError as error:
        raise CommandError(
            f"stoker serve needs {error.name}, which is not installed: pip install 'stoker[server]'"
        ) from error
    key = os.environ.get("STOKER_API_KEY") if args.api_key is None else args.api_key
    check_key(key)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends a service: as Ctrl-C
    with (
        listen(args.host, args.port) as door,  # first: a model takes minutes to load, and the port may be taken
        load(args) as engine,
        Server(engine, args.host, door, args.name or args.model, key, args.control, args.adapter) as server,
    ):
        print(f"listening at {server.url}", flush=True)
        threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
