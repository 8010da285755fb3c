"""Engines on an emulated CUDA device, their operations those of the reference, or Triton's, interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated_cuda import EmulatedCuda, emulated_cuda
from emulated_graph import CUDA, put
from families import make_model
from pretend_device import STATIC, build

from stoker.engine import device as device_module
from stoker.engine.layers import derived_weights
from stoker.kernels.ops import Ops
from stoker.kernels.reference.lora import AdapterRows
from stoker.rollout import RolloutEngine, binding
from stoker.weight_sync import checksum, staging

# Operations of the table that look at numbers on the host, where a device has a few kernels.
_AS_ONE = ("lora", "lora_embedding", "experts", "route", "causal_conv", "gated_delta_rule", "selective_scan")


def _of_these_rows(operation: Callable[..., Any]) -> Callable[..., Any]:
    """A CPU keeps what it has seen of the rows of a batch."""
    return lambda x, out, table, rows, *args, **given: operation(x, out, table, AdapterRows(rows.slots), *args, **given)


def as_one(operation: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        graph = EmulatedCuda.now and EmulatedCuda.now.capturing
        return operation(*args, **kwargs) if graph is None else graph.as_one(operation, args, kwargs)

    return call


GRAPHED: Ops = replace(STATIC, lora=_of_these_rows(STATIC.lora), lora_embedding=_of_these_rows(STATIC.lora_embedding))
GRAPHED = replace(GRAPHED, **{name: as_one(getattr(GRAPHED, name)) for name in _AS_ONE})


class _StableBuffer:
    """Comes back where it was, with NaN in it."""

    stable_addresses = True

    def __init__(self, nbytes: int) -> None:
        self.tensor = put(torch.full((nbytes,), 255, dtype=torch.uint8), CUDA)

    def release(self) -> None:
        self.tensor.fill_(255)

    def restore(self) -> None:
        pass


def _virtual_buffer(nbytes: int, device: torch.device) -> _StableBuffer | None:
    return _StableBuffer(nbytes) if device.type == "cuda" else None


@contextmanager
def on_cuda(
    model: str | torch.nn.Module = "llama", ops: Ops = GRAPHED, *, stable: bool = True, **fields: Any
) -> Iterator[tuple[RolloutEngine, EmulatedCuda]]:
    """An engine as ``build`` makes it, with CUDA's runtime. stable: memory comes back at the same addresses."""
    model = make_model(model) if isinstance(model, str) else model
    with emulated_cuda() as device, pytest.MonkeyPatch.context() as patch:
        for module in (checksum, staging):
            patch.setattr(module, "ops_for", lambda *_, **__: STATIC)
        for module in (device_module, derived_weights, binding) if stable else ():
            patch.setattr(module, "virtual_buffer", _virtual_buffer)
        with build(device.adopt(model), ops=ops, runtime=device_module.runtime_for, **fields) as engine:
            yield engine, device


def unasked(device: EmulatedCuda) -> list[str]:
    """Where a rollout waited, but for the one look at all weights at its beginning, and for references, which have numbers of
    the host."""
    asked = "tolist in stoker.weight_sync.aliased_source.checksums"
    return [each for each in device.waits if each != asked and "stoker.kernels.reference" not in each]
