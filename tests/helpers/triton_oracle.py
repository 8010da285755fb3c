"""What the tests of Triton kernels have in common: dtypes, tolerances, and outputs that are poisoned until written."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from stoker.kernels import launch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter's bf16 arithmetic is wrong; `-m gpu` runs the same tests in it, compiled.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
# Largest error, relative to the largest value: a few roundings of the dtype.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


_P, _R = ParamSpec("_P"), TypeVar("_R")


def unwatched(oracle: Callable[_P, _R]) -> Callable[_P, _R]:
    """Its operations are no device's: who watches those sees none of it, and nothing of it stands between two launches."""

    @wraps(oracle)
    def compute(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _disable_current_modes():
            return oracle(*args, **kwargs)

    return compute


def randn(*size: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(size)).to(DEVICE, dtype)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """expected: fp64, from the same rounded inputs."""
    assert actual.dtype == dtype and actual.shape == expected.shape and expected.dtype == torch.float64
    assert not actual.isnan().any(), "an element that no kernel wrote"
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[dtype], f"relative error {error:.2e}"


@pytest.fixture(autouse=True)
def unwritten_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel leaves unwritten does not by chance hold the result of the kernel before."""
    empty: Callable[..., Tensor] = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() and out.device.type != "meta" else out

    monkeypatch.setattr(torch, "empty", poisoned)


def assert_early_starts_change_nothing(chain: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that come up while the one before ends give the bits of kernels that wait, launched or captured."""
    monkeypatch.undo()  # what fills memory with NaN would stand between the kernels
    early = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(20):
        graph.replay()
    monkeypatch.setattr(launch, "starts_early", lambda device: False)
    wanted = chain()
    assert wanted.isfinite().all() and torch.equal(early, wanted) and torch.equal(captured, wanted)
