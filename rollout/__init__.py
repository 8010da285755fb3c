"""What a user touches: the engine, its configuration, sampling parameters and outputs."""

from stoker.kernels.errors import (
    EngineStateError,
    InvalidConfigError,
    InvalidRequestError,
    RequestFailedError,
    StokerError,
    UnsupportedModelError,
    WeightsMovedError,
)
from stoker.rollout.config import EngineConfig
from stoker.rollout.engine import RolloutEngine
from stoker.rollout.outputs import Completion, EngineStats, RolloutBatch, RolloutOutput, RolloutTensors, TokenLogprobs
from stoker.rollout.sampling_params import SamplingParams

__all__ = [
    "Completion",
    "EngineConfig",
    "EngineStateError",
    "EngineStats",
    "InvalidConfigError",
    "InvalidRequestError",
    "RequestFailedError",
    "RolloutBatch",
    "RolloutEngine",
    "RolloutOutput",
    "RolloutTensors",
    "SamplingParams",
    "StokerError",
    "TokenLogprobs",
    "UnsupportedModelError",
    "WeightsMovedError",
]
