"""Settings every test runs under, made before torch, triton and transformers are first imported: they read them only then."""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import signal
from collections.abc import Iterator

import pytest

# Models this small are several times slower when their operations are split over threads, and where there are as many
# processes of tests as processors, those that a test starts are slower by more.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

# Imports make no garbage and tests little: to look for it every 700 objects takes a twentieth of the time.
gc.set_threshold(100_000)

HAS_CUDA = torch.cuda.is_available()
_MOST_ERROR = 5_000  # characters of one test, in the file of outcomes
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # the kernels run in triton's interpreter, on the CPU
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts tests in the background ignores it
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that needs the network is a bug
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # or tokenizers warns whenever a test starts a process


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--outcomes",
        metavar="=FILE",
        help="append the outcome of each test to FILE as it is known, one line of JSON each",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.outcomes and not IS_WORKER:
        config.pluginmanager.register(_Outcomes(config.option.outcomes))


class _Outcomes:
    """What is known of a run that is killed."""

    def __init__(self, path: str) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            found = {"test": report.nodeid, "outcome": report.outcome, "when": report.when, "seconds": report.duration}
            if report.failed:  # where all fail alike, as may be, the file is still one that can be sent
                error = report.longreprtext
                found["error"] = error if len(error) <= _MOST_ERROR else f"{error[:1000]}\n[...]\n{error[-4000:]}"
            with open(self.path, "a") as file:
                print(json.dumps(found), file=file)


@pytest.hookimpl(trylast=True)  # after the report went to the process that collects them
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Where the device answers no more, as after an illegal access, no later test of this process could pass."""
    if report.failed and HAS_CUDA and IS_WORKER:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)  # another worker takes its place


@pytest.hookimpl(wrapper=True)  # around what "-m gpu" chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        if HAS_CUDA:  # where the kernels' own tests run compiled
            if item.path.name.startswith("test_triton_"):
                item.add_marker(pytest.mark.gpu)
            continue
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))
    yield
    if HAS_CUDA:  # time on such a device is short, and whole rollouts would come after two thousand tests of kernels
        from turns import in_turn

        items[:] = in_turn(items, lambda item: item.path)


def pytest_collection_finish() -> None:
    """No collection of garbage goes through all that the modules of the tests import, of which nothing ever is."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or Triton 3.9 lists at the end all that it finds alive, as leaks


@pytest.fixture(autouse=True, scope="module")
def _settled() -> None:
    """Nor through what files before have left: trainers and benchmarks collect it several times in each of their tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Random tensors are the same whether a test runs alone or after others."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def unwritten_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys, values and states, when it is first had and at every waking: what is read before it is written shows."""
    from stoker.engine.virtual_memory import PlainBuffer

    monkeypatch.setattr(PlainBuffer, "tensor", property(lambda self: self._tensor.fill_(255)))


@pytest.fixture(autouse=True, scope="session")
def _factories_are_known() -> None:
    """torch notes at the first ``with torch.device`` which functions make tensors: not while a test has one replaced."""
    with torch.device("meta"):
        torch.empty(0)


@pytest.fixture(autouse=True, scope="session")
def _interpreted_quickly() -> None:
    if not HAS_CUDA:
        from quick_interpreter import make_quick

        make_quick()


@pytest.fixture(autouse=True)
def _sanitized(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where kernels are interpreted they are looked at for what would go wrong on a GPU only."""
    if HAS_CUDA or not request.path.name.startswith(("test_triton_", "test_interpreted_")):
        yield
        return
    from early_starts import early_starts
    from sanitizer import sanitized

    with sanitized() as found, early_starts() as starts:
        yield
    assert not (found or starts.faults)
