"""Gets images encoded: each once for all prompts that share it, and again when weights change."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from stoker.engine.images.adapters import ImageAdapter
from stoker.engine.images.batches import batches
from stoker.engine.images.encoder import encode
from stoker.engine.images.inputs import ImageFeatures, ImageInputs
from stoker.engine.model import ModelShell
from stoker.engine.request import Adapter
from stoker.kernels.errors import InvalidRequestError, UnsupportedModelError

_MOST_BYTES = 2**29  # of features that no request holds


class ImageReader:
    """Encodes images, and keeps the features used last on the host: for a next turn, or for scores of what was sampled."""

    def __init__(self, image_adapter: Callable[[Adapter], ImageAdapter], most: int, *, alone: bool) -> None:
        """image_adapter: what an adapter does where only images go through. most: tokens that a step computes.

        alone: no prompt is read together with others, so that its features are the same to the last bit.
        """
        self._image_adapter, self._most, self._alone = image_adapter, most, alone
        self._weights = 0  # counts changes of the weights
        self._kept: OrderedDict[tuple[bytes, str | None], ImageInputs] = OrderedDict()  # those used last at the end
        self._bytes = 0

    def forget(self) -> None:
        """Drop all features that are kept. Requests keep theirs."""
        self._kept.clear()
        self._bytes = 0

    def renew(self) -> None:
        """Weights may have changed: no features are valid any more, requests' neither."""
        self._weights += 1
        self.forget()

    def begin(self, shell: ModelShell) -> Callable[[Sequence[ImageInputs], Adapter | None], None]:
        """A function that encodes the images of prompts under the present weights and an adapter. For use now.

        It raises ``InvalidRequestError`` or ``UnsupportedModelError`` where the model cannot take some images; others may
        have been encoded by then.
        """
        known: dict[Adapter | None, ImageAdapter] = {None: ImageAdapter()}

        def ensure(prompts: Sequence[ImageInputs], adapter: Adapter | None) -> None:
            key = None if adapter is None else adapter.key
            under = self._weights, key
            missing: dict[ImageInputs, _Part] = {}  # by the inputs that are left to encode
            for images in prompts:
                if images.features is not None and images.made_under == under:
                    continue
                if (found := self._find(images, key)) is not None:
                    images.features, images.made_under = found.features, under
                else:
                    part = _Part(images) if self._alone else self._beyond(images, key)
                    missing[part.rest or images] = part
            if missing and adapter is not None and adapter not in known:
                known[adapter] = self._image_adapter(adapter)
            for batch in batches(list(missing), 0 if self._alone else self._most):
                parts = [missing[images] for images in batch]
                for part, features in zip(parts, self._read(shell, parts, known[adapter]), strict=True):
                    part.images.features, part.images.made_under = features, under
                    self._keep(part.images, key)

        return ensure

    def _read(self, shell: ModelShell, parts: list[_Part], adapter: ImageAdapter) -> list[ImageFeatures]:
        try:
            read = encode(shell, [part.rest or part.images for part in parts], adapter, self._most)
        except (InvalidRequestError, UnsupportedModelError, torch.OutOfMemoryError):
            if len(parts) == 1 and parts[0].rest is None:
                raise
        else:
            return [part.whole(features) for part, features in zip(parts, read, strict=True)]
        return [features for part in parts for features in encode(shell, [part.images], adapter, self._most)]

    def _beyond(self, images: ImageInputs, adapter: str | None) -> _Part:
        """What is left to encode of a prompt that continues a known one, as the next turn of a conversation does."""
        digests: dict[object, bytes] = {}  # of this prompt's beginning, by its sizes: computed once for each
        for (digest, under), known in reversed(self._kept.items()):
            if under != adapter or (parts := images.beyond(known)) is None:
                continue
            begin, rest = parts
            size = tuple(tensor.shape for tensor in begin.values())
            if size not in digests:
                digests[size] = ImageInputs.of(images.tokens[: known.end], begin).digest
            if digests[size] == digest:
                return _Part(images, rest, known)
        return _Part(images)

    def _find(self, images: ImageInputs, adapter: str | None) -> ImageInputs | None:
        found = self._kept.get((images.digest, adapter))
        if found is None or not found.serves(images.tokens):
            return None
        self._kept.move_to_end((images.digest, adapter))
        return found

    def _keep(self, images: ImageInputs, adapter: str | None) -> None:
        key = images.digest, adapter
        if key in self._kept:
            self._bytes -= _bytes_of(self._kept.pop(key))
        tokens = images.tokens[: images.end + 1]  # the rest does not matter; and the list itself may be the user's
        self._kept[key] = replace(images, tokens=tokens, inputs={n: t.to("meta") for n, t in images.inputs.items()})
        self._bytes += _bytes_of(images)
        while self._bytes > _MOST_BYTES:
            self._bytes -= _bytes_of(self._kept.popitem(last=False)[1])


@dataclass(frozen=True, slots=True)
class _Part:
    """What is left to encode of a prompt. rest: what comes after ``known``; None: all of the prompt."""

    images: ImageInputs
    rest: ImageInputs | None = None
    known: ImageInputs | None = None

    def whole(self, read: ImageFeatures) -> ImageFeatures:
        """The features of the whole prompt. read: those of what was left to encode."""
        if self.known is None:
            return read
        assert self.known.features is not None
        return self.known.features.followed_by(read, self.known.end, self.known.salts)


def _bytes_of(images: ImageInputs) -> int:
    assert images.features is not None
    return sum(tensor.nbytes for tensor in (images.features.embeddings, *images.features.deep))
