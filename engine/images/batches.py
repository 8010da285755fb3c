"""Joins prompts with images into one forward of the model, and takes its results apart again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stoker.engine.images.inputs import ImageInputs, is_by_token

_MOST_VALUES = 2**23  # of pixels and the like: some thousand patches, which bounds a vision tower's memory


def batches(prompts: Sequence[ImageInputs], most: int) -> Iterator[list[ImageInputs]]:
    """Batches of prompts whose inputs can be joined, of at most ``most`` tokens with padding. A larger prompt is alone."""
    alike: dict[object, list[ImageInputs]] = {}
    for images in prompts:
        alike.setdefault(_kind(images), []).append(images)
    for kind, group in alike.items():
        batch: list[ImageInputs] = []
        for images in group:
            longer = [*batch, images]
            width = max(len(one.tokens) for one in longer)
            fits = width * len(longer) <= most and sum(map(_values, longer)) <= _MOST_VALUES
            if batch and (kind is None or not fits):
                yield batch
                longer = [images]
            batch = longer
        yield batch


def _kind(images: ImageInputs) -> object:
    """Equal for prompts whose inputs differ only in their first dimension, that of images or patches; None if they have none."""
    if not all(tensor.dim() for tensor in images.inputs.values()):
        return None
    length = len(images.tokens)
    return tuple(
        (name, t.dtype, t.device, None if is_by_token(t, length) else t.shape[1:])
        for name, t in sorted(images.inputs.items())
    )


def _values(images: ImageInputs) -> int:
    return sum(tensor.numel() for tensor in images.inputs.values() if tensor.is_floating_point())


def joined(batch: Sequence[ImageInputs], text: int) -> dict[str, Tensor]:
    """The inputs of one forward over a batch. text: a token that stands for no image, with which shorter prompts are padded.

    Padding is on the right, where it needs no mask: nothing comes after it.
    """
    width = max(len(images.tokens) for images in batch)

    def rows(values: Sequence[Tensor], padding: int) -> Tensor:
        return torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1]), value=padding) for t in values])

    inputs = {"input_ids": rows([torch.tensor([images.tokens], device="cpu") for images in batch], text)}
    for name, first in batch[0].inputs.items():
        parts = [images.inputs[name] for images in batch]
        inputs[name] = rows(parts, 0) if is_by_token(first, len(batch[0].tokens)) else torch.cat(parts)
    return inputs


def row_of(given: Mapping[str, Any], row: int, rows: int, length: int) -> dict[str, Any]:
    """Of what a language model is called with for ``rows`` prompts, the part of one of them, of ``length`` tokens."""
    if rows == 1:
        return dict(given)

    def part(tensor: Tensor, at: int) -> Tensor:
        """at: the dimension of the rows. Where it has another size, the tensor is common to all rows."""
        return tensor.narrow(at, row, 1) if tensor.shape[at] == rows else tensor

    def mask(tensor: Any) -> Any:
        return part(tensor, 0)[..., :length, :length] if isinstance(tensor, Tensor) and tensor.dim() == 4 else None

    found = dict(given)
    found["inputs_embeds"] = part(given["inputs_embeds"], 0)[:, :length]
    if (positions := given.get("position_ids")) is not None:
        found["position_ids"] = (part(positions, -2) if positions.dim() > 1 else positions)[..., :length]
    masks = given.get("attention_mask")
    found["attention_mask"] = {k: mask(m) for k, m in masks.items()} if isinstance(masks, Mapping) else mask(masks)
    if (visual := given.get("visual_pos_masks")) is not None:
        found["visual_pos_masks"] = part(visual, 0)[:, :length]
        if deep := given.get("deepstack_visual_embeds"):
            counts = visual.sum(-1).tolist()
            begin = sum(counts[:row])
            found["deepstack_visual_embeds"] = [one[begin : begin + counts[row]] for one in deep]
    return found
