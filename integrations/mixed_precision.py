"""The dtype of an engine beside a trainer whose forward runs in mixed precision."""

from __future__ import annotations

import logging
from collections.abc import Set
from dataclasses import replace

import torch
from accelerate import Accelerator

from stoker.rollout import EngineConfig

_log = logging.getLogger("stoker")


def as_the_forward(config: EngineConfig, accelerator: Accelerator, own: Set[torch.dtype]) -> EngineConfig:
    """The config with "auto" for its dtype replaced by bf16 where the forward multiplies in that on a GPU, over fp32 weights.

    In fp32 an engine would read twice as many bytes and multiply without tensor cores, and by rounding it would be about as far
    from the trainer's forward. On a CPU, where fp32 is not slower, it stays on the weights themselves.

    own: dtypes of the model's parameters.
    """
    wide = own == {torch.float32} and accelerator.mixed_precision == "bf16" and accelerator.device.type == "cuda"
    if not wide or config.dtype != "auto":
        return config
    _log.info(
        "the engine samples in bf16, as the trainer's forward multiplies, from a copy of the fp32 weights that takes half their "
        "memory; EngineConfig(dtype='float32') reads the weights themselves, and is slower"
    )
    return replace(config, dtype=torch.bfloat16)
