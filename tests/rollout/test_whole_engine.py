"""Rollouts, scores, updates, pauses, naps, adapters and interrupts in a random order, on small caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from whole_engine import Day


@pytest.mark.parametrize(
    ("family", "seed", "dtype", "adapted", "fields"),
    [
        ("llama", 3, torch.float32, False, {"kv_cache_memory": 24_000, "decode_window": 3}),
        ("qwen2", 3, torch.float32, True, {"kv_cache_memory": "48KiB", "max_num_seqs": 3}),
        ("gemma3", 2, torch.bfloat16, False, {"kv_cache_memory": "64KiB", "decode_window": 2}),
        ("mistral", 2, torch.float64, True, {"kv_cache_memory": "48KiB"}),
        ("lfm2", 2, torch.float32, False, {"kv_cache_memory": "64KiB"}),
    ],
)
def test_every_token_is_of_the_weights_that_ran(
    family: str, seed: int, dtype: torch.dtype, adapted: bool, fields: dict[str, Any]
) -> None:
    day = Day(seed, family, dtype, adapted, **fields)
    for _ in range(40):
        day.step()
    assert day.proved > 50 and day.kept and day.engine.stats().num_preemptions
    day.end()
