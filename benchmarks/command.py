"""What the benchmarks' command lines have in common: flags, the environment, one JSON file, one plot and one last line."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from stoker.benchmarks.gate import GateError

FOLDER = Path("outputs/benchmarks")  # where results go if no other folder is named


def flags(description: str | None, quick: str, parts: Sequence[str] = ()) -> argparse.ArgumentParser:
    """What every benchmark takes. quick: what ``--quick`` makes small. parts: of those that have some."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--quick", action="store_true", help=f"{quick}, to see that everything runs")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    if parts:
        parser.add_argument("--parts", nargs="+", choices=parts, help="only these")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The flags given. What would fail under way, or only once all is measured, is refused as argparse refuses a flag."""
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"argument --device: torch {torch.__version__} sees no CUDA device here")
    for name in ("threads", "batch", "context", "steps"):
        given = getattr(args, name, 1)
        if min(given if isinstance(given, list) else [given]) < 1:
            parser.error(f"argument --{name}: it has to be at least 1")
    if args.output is not None:
        try:
            args.output.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=args.output):
                pass
        except OSError as error:
            parser.error(f"argument --output: nothing can be written to {args.output} ({error.strerror}): name another")
    return args


def no_model(args: argparse.Namespace) -> int:
    """Say that ``--only`` leaves nothing; returns the exit code."""
    print(f"no model's name contains {args.only!r}", file=sys.stderr)
    return 2


class Results:
    """A run's one JSON file. Written whenever more is known, so that a run that is cut off leaves what it has found."""

    def __init__(self, name: str, args: argparse.Namespace, **configuration: Any) -> None:
        """Sets the threads, too. configuration: beside that of ``flags``."""
        torch.set_num_threads(args.threads)
        machine = environment(args.device)
        if (machine["load_average"] or 0) > 0.5:
            print(f"the machine is busy (load average {machine['load_average']:.1f})", file=sys.stderr)
        self.found: dict[str, Any] = {
            "environment": machine,
            "configuration": {"quick": args.quick, "only": args.only, **configuration},
        }
        self.path: Path = args.output / f"{name}-{args.device}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"

    def write(self) -> None:
        whole = self.path.with_suffix(".new")  # or a run that is killed here would leave half a file
        whole.write_text(json.dumps(self.found, indent=1) + "\n")
        whole.replace(self.path)

    def draw(self, figure: Callable[[Any], Any]) -> None:
        """With matplotlib, the plot beside the file: what ``figure`` makes, given pyplot."""
        if importlib.util.find_spec("matplotlib") is None:
            return
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        made, env = figure(pyplot), self.found["environment"]
        versions = ", ".join(f"{package} {number}" for package, number in env["versions"].items())
        made.suptitle(f"{env.get('gpu', env['cpu'])}, {versions}", fontsize=9)
        made.tight_layout()
        made.savefig(self.path.with_suffix(".png"), dpi=120)
        pyplot.close(made)


def run(
    name: str,
    description: str | None,
    scenarios: Mapping[tuple[str, bool], Sequence[Any]],
    measure: Callable[[Any, str], dict[str, Any] | Iterator[dict[str, Any]]],
    table: Callable[[dict[str, Any]], list[str]],
    headline: Callable[[dict[str, Any]], dict[str, Any]],
    figure: Callable[[Any, list[dict[str, Any]]], Any] | None = None,
    *,
    quick: str = "small workloads",
    parts: Sequence[str] = (),
) -> int:
    """Measure scenarios one after the other; returns the exit code.

    scenarios: by device and whether the run is a quick one, each with a ``spec``. measure: what one of them gives, or
    again and again what is known of it so far, which is written at once. table, headline: of one scenario, for a terminal
    and for the last line. figure: of all of them, given pyplot. A scenario that fails, or whose results are wrong, leaves what
    it had found, and why under ``failed``; the others go on. So does a part of one that says so in its own ``failed``.
    parts: what a scenario's ``parts`` may be, all where no flag says which.
    """
    args = parse(flags(description, quick, parts))
    chosen = {"parts": args.parts or parts} if parts else {}
    results = Results(name, args, **chosen)
    runs = results.found[name] = []
    whole, failed = list[dict[str, Any]](), list[str]()
    for scenario in scenarios[args.device, args.quick]:
        if args.only not in scenario.spec.name:
            continue
        try:
            made = measure(replace(scenario, **chosen) if chosen else scenario, args.device)
            for number, found in enumerate([made] if isinstance(made, dict) else made):
                runs[len(runs) - (number > 0) :] = [found]
                results.write()
        except Exception as error:  # of memory, say: what the other scenarios find is not lost
            if isinstance(error, GateError):
                print(f"gate: {error}; no more of {scenario.spec.name} is timed", file=sys.stderr)
            else:
                traceback.print_exc()
            failed.append(f"{scenario.spec.name}: {reason(error)}")
            results.found["failed"] = failed
            results.write()
            continue
        whole.append(runs[-1])
        print("", *table(runs[-1]), *runs[-1].get("failed", []), sep="\n", flush=True)
    if not whole and not failed:
        return no_model(args)
    if figure is not None and whole:
        results.draw(lambda pyplot: figure(pyplot, whole))
    print(f"\nwrote {results.path}")
    print(json.dumps({"device": args.device, name: [{"model": r["model"]["name"], **headline(r)} for r in whole]}))
    return int(any([failed, *(run.get("failed") for run in whole)]))


def reason(error: Exception) -> str:
    """Why there is no figure, in one line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"[:300]


def environment(device: str) -> dict[str, Any]:
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("stoker", "torch", "transformers")},
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "git_revision": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties("cuda")
        found["gpu"] = properties.name
        found["gpu_memory_bytes"] = properties.total_memory
        found["gpu_free_bytes"] = torch.cuda.mem_get_info("cuda")[0]
        found["gpu_multiprocessors"] = properties.multi_processor_count
        found["cuda"] = torch.version.cuda
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _git(*arguments: str) -> str | None:
    """What git says of the current folder, where that is this repository: what runs is installed from it."""
    if not Path("benchmarks/command.py").is_file():
        return None
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
