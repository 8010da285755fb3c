"""Settings every test runs under, made before triton and transformers are first imported: both read them only then."""

from __future__ import annotations

import os
import random
import signal

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
torch.set_num_threads(1)  # models this small are several times slower when their operations are split over threads

if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # the kernels run in triton's interpreter, on the CPU
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts tests in the background ignores it
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that needs the network is a bug
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # or tokenizers warns whenever a test starts a process


@pytest.hookimpl(tryfirst=True)  # before "-m gpu" makes its choice
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HAS_CUDA:  # where the kernels' own tests run compiled
            if item.path.name.startswith("test_triton_"):
                item.add_marker(pytest.mark.gpu)
            continue
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Random tensors are the same whether a test runs alone or after others."""
    random.seed(0)
    torch.manual_seed(0)
