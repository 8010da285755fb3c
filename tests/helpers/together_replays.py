"""What each rank does where ranks that run a model together replay captured steps, sums over the ranks among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import together
import torch
from emulated_cuda import EmulatedCuda
from emulated_engine import as_one, on_cuda
from emulated_graph import CUDA, put
from families import make_model
from ranks import noted

from stoker.engine.parallel.tensor_parallel import TensorParallel
from stoker.rollout import SamplingParams

FAMILIES = ("gpt_oss",)


def _on_the_device(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Gloo's collectives know nothing of the emulated device, which takes each for one operation."""
    captured = as_one(operation)

    def call(*args: Any) -> Any:
        device = EmulatedCuda.now
        if device is None or device.capturing is not None:
            return captured(*args)
        with device.off():
            return put(operation(*args), CUDA)

    return call


def replay(rank: int) -> None:
    """New requests, other rows, weights changed in place, sleep, and adapters beside the bare base."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("add_up", "side_by_side"):
            patch.setattr(TensorParallel, name, _on_the_device(getattr(TensorParallel, name)))
        for family in (*FAMILIES, "adapters"):
            with noted(family):
                model = together.adapted("llama") if family == "adapters" else make_model(family)
                with on_cuda(model, tensor_parallel_size=2) as (engine, device):
                    for turn in range(4):
                        prompts = [[*together.SHARED, 20 + rank + row] for row in range(1 + (turn + rank) % 3)]
                        adapters = [
                            None if family == "adapters" and row else together.LIVE for row in range(len(prompts))
                        ]
                        before = device.replays
                        batch = engine.generate_batch(
                            prompts, SamplingParams(max_tokens=9, seed=turn), adapter=adapters
                        )
                        batch.raise_for_errors()
                        assert device.replays > before or not turn
                        with device.off():
                            for output, adapter in zip(batch, adapters, strict=True):
                                together.assert_of(output, model, adapter)
                        if turn == 1:
                            with torch.no_grad():
                                for parameter in model.parameters():
                                    parameter.mul_(1.01)
                            engine.update_weights()
                        elif turn == 2:
                            with engine.sleeping(2):
                                pass
