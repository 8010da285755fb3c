"""Weights from elsewhere, a trainer in another process say: received beside those in service, and put in their place."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from stoker.kernels.errors import UnsupportedModelError, WeightTransferError
from stoker.rollout.binding import ModelBinding
from stoker.rollout.loading import checkpoint
from stoker.weight_sync.consistent_reads import not_rewritten
from stoker.weight_sync.receiving import NewWeights, receive
from stoker.weight_sync.staging import Known, Staging


class ExternalWeights:
    """The engine may run steps between ``receive`` and ``put_in_service``. Where the model changed meanwhile, what came is refused."""

    def __init__(self, binding: ModelBinding) -> None:
        self._binding = binding
        self._known = Known()

    def as_before(self, weights: Any) -> Callable[[], int] | None:
        """Of named tensors that were received before, and may hold other numbers now: puts them in service, and returns the bytes
        that were written. None for all else.

        The model may not have ``moved`` since it was bound, nor before the call. Little is asked of each tensor, while the device
        waits for this.
        """
        form, source = self._known.form, self._binding.source
        if form is None or form.places is not source.places or not isinstance(weights, dict):
            return None
        new = dict(weights)
        return partial(self._write, partial(source.write, new, form)) if form.fits(new) else None

    def receive(self, weights: NewWeights) -> Staging:
        """New weights from elsewhere, checked and complete, to be put in service by ``put_in_service``.

        The model may not have ``moved`` since it was bound.
        """
        binding, source = self._binding, self._binding.source
        if getattr(source.module, "quantization_method", None) is not None:
            raise UnsupportedModelError(
                "the model is quantised, and weights from elsewhere would have to be quantised anew: update the model "
                "itself, and call update_weights() without an argument"
            )
        binding.in_order()
        if not (isinstance(weights, str | os.PathLike) and os.path.isdir(weights)):
            return self._receive(weights)
        folder = os.fspath(weights)
        with not_rewritten(folder):  # until all is copied: files are mapped, and only read when that is done
            return self._receive(iter(checkpoint(type(binding.shell.module), folder).items()))

    def _receive(self, weights: NewWeights) -> Staging:
        source = self._binding.source
        return receive(
            weights,
            source.bound,
            source.optional,
            check_finite=self._binding.check_finite,
            known=self._known,
            passing=source.passing,
            places=source.places,
        )

    def put_in_service(self, staged: Staging) -> int:
        """Returns the bytes that were written.

        What did not come, being there, is looked at again: another thread may have had its turn since. Raises
        ``WeightTransferError`` where that has changed, and where the model
        has other tensors by now than those it was received for.
        """
        source = self._binding.source
        now = source.bound
        replaced = now is not staged.targets and any(now.get(name) is not t for name, t in staged.targets.items())
        if replaced or self._binding.moved():
            raise WeightTransferError(
                "the model's tensors were replaced or changed in this process while the other weights arrived: send again, "
                "and call update_weights again. What arrived was not taken"
            )
        staged.check_stays()
        return self._write(lambda: staged.commit(source.write))

    def _write(self, write: Callable[[], int]) -> int:
        source = self._binding.source
        try:
            written = write()
        except BaseException:
            source.spoil()
            raise
        source.overwritten()
        return written
