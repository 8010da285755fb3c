"""What a user touches: the engine, its configuration, sampling parameters and outputs.

Begin with ``engine``, the facade. ``assembly`` builds its parts from ``config``, and ``sizing`` decides how large they are. Its
methods hand on to ``generation``, ``updates`` and ``memory``; ``engine_state`` checks first that the engine is open and awake.

- Input: ``prompts``, ``sampling_params``, ``requests``, ``user_values``; ``stop_strings``; and for regular expressions
  ``constraints``, ``regex`` and ``token_texts``.
- Output: ``outputs``, ``handles``, ``stats``, ``progress``.
- Threads, and whose turn it is to run a step: ``loop``. Ranks that run one model together: ``lockstep``.
- Weights: ``binding``, ``shell_builder``, ``external_weights``, ``loading``, ``verification``.
- Adapters: ``adapters``, ``adapter_sources``.
"""

from stoker.kernels.errors import (
    EngineStateError,
    InvalidConfigError,
    InvalidRequestError,
    PromptTooLongError,
    RequestFailedError,
    StokerError,
    UnsupportedModelError,
    WeightsMismatchError,
    WeightsMovedError,
    WeightTransferError,
)
from stoker.rollout.adapters import LIVE
from stoker.rollout.config import EngineConfig
from stoker.rollout.engine import RolloutEngine
from stoker.rollout.handles import RolloutChunk, RolloutHandle
from stoker.rollout.outputs import Completion, RolloutBatch, RolloutOutput, RolloutTensors, TokenLogprobs
from stoker.rollout.sampling_params import SamplingParams
from stoker.rollout.stats import EngineStats
from stoker.weight_sync.checksum import WeightReport

__all__ = [
    "LIVE",
    "Completion",
    "EngineConfig",
    "EngineStateError",
    "EngineStats",
    "InvalidConfigError",
    "InvalidRequestError",
    "PromptTooLongError",
    "RequestFailedError",
    "RolloutBatch",
    "RolloutChunk",
    "RolloutEngine",
    "RolloutHandle",
    "RolloutOutput",
    "RolloutTensors",
    "SamplingParams",
    "StokerError",
    "TokenLogprobs",
    "UnsupportedModelError",
    "WeightReport",
    "WeightTransferError",
    "WeightsMismatchError",
    "WeightsMovedError",
]
