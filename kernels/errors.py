"""Errors a user can meet. They are here because both engine and weight_sync raise them. Messages name cause and remedy."""

from __future__ import annotations


class StokerError(Exception):
    """Base of every error raised on purpose by this package."""


def first_line(error: BaseException) -> str:
    """The first line of another library's error, cut to what a message has room for."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class InvalidConfigError(StokerError, ValueError):
    """A configuration that cannot work, found before any work starts."""


class InvalidRequestError(StokerError, ValueError):
    """A prompt or a sampling parameter that cannot be served; no request of the call has been started."""


class PromptTooLongError(InvalidRequestError):
    """A prompt that leaves no room for a completion under ``max_model_len``."""


class UnsupportedModelError(StokerError, ValueError):
    """A model whose architecture, wrapper or dtype this engine does not run."""


class NotKeptError(UnsupportedModelError, AttributeError):
    """What a model's code asks a stand-in of the engine for, and the engine does not have. For ``hasattr`` it is not there."""


class WeightsMovedError(StokerError, RuntimeError):
    """The trainer's parameters are no longer the tensors the engine was bound to."""


class WeightsMismatchError(StokerError, ValueError):
    """New weights that do not fit: names, shapes, dtypes or values. The weights in service are as they were."""


class WeightTransferError(StokerError, RuntimeError):
    """Weights that did not arrive: another rank or process failed, or was not heard of in time."""


class EngineStateError(StokerError, RuntimeError):
    """The engine is asleep, closed or busy."""


class RequestFailedError(StokerError, RuntimeError):
    """A request that failed while running; its output carries this error, other requests went on."""
