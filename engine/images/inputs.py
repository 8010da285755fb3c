"""Prompts with images: ``ImageInputs``, from the processor; ``ImageFeatures``, from the model; and what a step takes of these."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, sha256

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.engine.step_context import ImageRows

Salt = tuple[int, bytes]  # (first token whose KV depends on more than tokens, what else it depends on)


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """What a model makes of a prompt's images, on the host.

    Rotary positions are given relative to the places of the tokens; those after the prompt go on from its last one.
    """

    places: NDArray[np.int64]  # of the tokens whose embeddings are given, [n], ascending
    embeddings: Tensor  # [n, D]
    deep: tuple[Tensor, ...]  # added there after each of the first layers, [n, D] each
    rope_deltas: NDArray[np.int64] | None  # rotary positions (time, height, width) minus places, [3, L]; None: all zero
    shift: int  # the same of tokens after the prompt
    spans: tuple[tuple[int, int], ...] = ()  # of tokens (from, to), in order, that see each other both ways
    local_spans: bool = False  # whether they do so only in layers with a window
    known: tuple[Salt, ...] = ()  # the salts of the shorter prompt that this one continues, if it does
    since: int = 0  # then the first token whose KV depends on more than those and tokens

    def rope_deltas_of(self, start: int, count: int) -> NDArray[np.int64]:
        """The relative rotary positions of ``count`` tokens from ``start`` on, int64 [3, count]."""
        found = np.full((3, count), self.shift, dtype=np.int64)
        if self.rope_deltas is not None and start < self.rope_deltas.shape[1]:
            known = self.rope_deltas[:, start : start + count]
            found[:, : known.shape[1]] = known
        return found

    @property
    def first(self) -> int:
        """The first token whose KV depends on more than tokens and what is ``known``."""
        if self.known:
            return self.since
        first = int(self.places[0])
        if self.rope_deltas is not None:
            first = min(first, int(self.rope_deltas.any(axis=0).argmax()))
        return min(first, self.spans[0][0]) if self.spans else first

    def followed_by(self, rest: ImageFeatures, start: int, known: tuple[Salt, ...]) -> ImageFeatures:
        """The features of a longer prompt: these, and ``rest``, those of its tokens from ``start`` on.

        known: the salts of the prompt that these are of.
        """
        assert len(self.deep) == len(rest.deep)
        shift, rope_deltas = self.shift + rest.shift, None
        if self.rope_deltas is not None or rest.rope_deltas is not None:
            count = 0 if rest.rope_deltas is None else rest.rope_deltas.shape[1]
            rope_deltas = np.concatenate(
                [self.rope_deltas_of(0, start), self.shift + rest.rope_deltas_of(0, count)], axis=1
            )
        return ImageFeatures(
            np.concatenate([self.places, start + rest.places]),
            torch.cat([self.embeddings, rest.embeddings]),
            tuple(map(torch.cat, zip(self.deep, rest.deep, strict=True))),
            rope_deltas,
            shift,
            (*self.spans, *((start + begin, start + end) for begin, end in rest.spans)),
            self.local_spans or rest.local_spans,
            known,
            start + rest.first,
        )


@dataclass(eq=False, slots=True)
class ImageInputs:
    """A prompt's images as a processor made them, and what the model made of those.

    tokens: the prompt, with placeholders; a sequence may go on after it. inputs: what else the model's forward takes.
    digest: of the inputs; a prompt that continues another one without more images has the same.
    """

    tokens: list[int]
    inputs: Mapping[str, Tensor]
    digest: bytes
    features: ImageFeatures | None = None
    made_under: object = None  # weights and adapter that the features are of
    _salts: tuple[ImageFeatures, tuple[Salt, ...]] | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, tokens: list[int], inputs: Mapping[str, Tensor]) -> ImageInputs:
        digest = sha256()  # CPUs have instructions for it, and pixels are megabytes
        for name, tensor in sorted(inputs.items()):
            plain = tensor.detach().cpu().contiguous().flatten()
            size = tuple(tensor.shape)
            if is_by_token(tensor, len(tokens)):  # 0 at tokens of text
                plain, size = plain[: int(plain.nonzero().max()) + 1 if plain.any() else 0], ()
            digest.update(f"{name} {tensor.dtype} {size} ".encode())
            digest.update(plain.view(torch.uint8).numpy().data)
        return cls(tokens, inputs, digest.digest())

    @property
    def end(self) -> int:
        """The end of the last image: from this token on a sequence has none."""
        assert self.features is not None
        return int(self.features.places[-1]) + 1

    def serves(self, tokens: list[int]) -> bool:
        """Whether its features also fit another prompt with the same digest.

        They do if all tokens up to the last image are the same, and none after it stands for an image.
        """
        assert self.features is not None
        if tokens is self.tokens:
            return True
        images = {self.tokens[place] for place in self.features.places.tolist()}
        return self.tokens[: self.end] == tokens[: self.end] and images.isdisjoint(tokens[self.end :])

    def beyond(self, known: ImageInputs) -> tuple[dict[str, Tensor], ImageInputs] | None:
        """(inputs as far as ``known`` has them, the rest), if this prompt may be ``known`` with more images after it; else None.

        The caller still has to compare the digest of the former with that of ``known``, whose tensors need no content.
        """
        end = known.end
        if self.inputs.keys() != known.inputs.keys() or end == len(known.tokens):
            return None  # there has to be text right behind it, to separate it from more images
        begin: dict[str, Tensor] = {}
        rest: dict[str, Tensor] = {}
        for name, tensor in self.inputs.items():
            before = known.inputs[name]
            if is_by_token(tensor, len(self.tokens)):
                begin[name], rest[name] = tensor[:, :end], tensor[:, end:]
            elif (
                tensor.dim() == before.dim() > 0 and tensor.shape[1:] == before.shape[1:] and len(tensor) > len(before)
            ):
                begin[name], rest[name] = tensor[: len(before)], tensor[len(before) :]
            else:
                return None
        # With the same text right behind it: tokens of an image there would see those of the last one.
        alike = self.tokens[: end + 1] == known.tokens[: end + 1]
        return (begin, ImageInputs(self.tokens[end:], rest, b"")) if alike else None

    @property
    def salts(self) -> tuple[Salt, ...]:
        """What KV depends on besides tokens. Images that a shorter prompt has too come first, so that both share their KV."""
        assert self.features is not None
        if self._salts is None or self._salts[0] is not self.features:  # asked for at every block
            self._salts = self.features, self._salts_of(self.features)
        return self._salts[1]

    def _salts_of(self, features: ImageFeatures) -> tuple[Salt, ...]:
        own = self.digest
        if features.spans:
            own += blake2b(array("q", self.tokens[: features.spans[-1][1]]).tobytes(), digest_size=16).digest()
        return *features.known, (features.first, own)

    def around(self, place: int) -> tuple[int, int]:
        """The span that would be cut at a place; empty, (place, place), if there is none."""
        assert self.features is not None
        found = (span for span in self.features.spans if span[0] < place < span[1])
        return next(found, (place, place))

    def fitting(self, start: int, count: int, budget: int) -> int:
        """How many tokens to compute from ``start`` on, about ``count``, cutting no span; 0 where the budget is too small."""
        _, end = self.around(start + count)
        if end - start > budget:
            end, _ = self.around(start + budget)
        return max(0, end - start)


def is_by_token(tensor: Tensor, length: int) -> bool:
    """Whether an input has an integer for each token of a prompt, as token types are."""
    return tensor.shape == (1, length) and not tensor.is_floating_point()


# Of a step's row: the first token's place in the step, that in its sequence, how many there are, and their features.
ImagePart = tuple[int, int, int, ImageFeatures]


def image_rows(parts: Sequence[ImagePart], upload: Callable[..., list[Tensor]]) -> ImageRows | None:
    """The tokens of a step whose embeddings are images'; None where there are none. upload: as ``Runtime.upload``."""
    at: list[NDArray[np.int64]] = []
    given: list[Tensor] = []  # of each part its embeddings, then what is added after layers
    kinds = 0
    for where, start, count, features in parts:
        low, high = np.searchsorted(features.places, (start, start + count))
        if low < high:
            at.append(features.places[low:high] - start + where)
            of_part = [t[low:high] for t in (features.embeddings, *features.deep)]
            given, kinds = given + of_part, len(of_part)
    if not at:
        return None
    # As bytes: numpy has no bf16.
    places, *sent = upload(np.concatenate(at), *(t.view(torch.uint8).numpy() for t in given))
    there = [t.view(host.dtype) for t, host in zip(sent, given, strict=True)]
    embeddings, *deep = (torch.cat(there[kind::kinds]) for kind in range(kinds))
    return ImageRows(places, embeddings, tuple(deep))


def spans_within(parts: Sequence[ImagePart]) -> tuple[tuple[int, int], ...]:
    """The spans (from, to) of a step's tokens, in order, in which each token sees all up to the last one."""
    return tuple(
        (where + max(begin - start, 0), where + end - start)
        for where, start, count, features in parts
        for begin, end in features.spans
        if start < end - 1 and begin < start + count
    )
