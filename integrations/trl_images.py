"""Makes prompts from token ids and images, which TRL hands over separately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stoker.kernels.errors import UnsupportedModelError

_BY_TOKEN = ("mm_token_type_ids", "token_type_ids")


def with_images(processor: Any, prompts: Sequence[list[int]], images: Sequence[Any] | None) -> list[Any]:
    """Each prompt as its ids, or as ids and what ``processor`` makes of its images.

    images: for each prompt, the list of images that its ids have placeholders for, or None. Neighbours with equal images share
    what was made of them, and equal neighbours are one object: TRL repeats a prompt for each of its samples.

    Raises ``UnsupportedModelError`` where the trainer has no processor.
    """
    if images is None:
        return list(prompts)
    found: list[Any] = []
    before: Any = None
    for ids, shown in zip(prompts, images, strict=True):
        if not shown:
            found.append(ids)
            continue
        if before is None or not _same(shown, before):
            before, (inputs, types) = shown, _process(processor, list(shown))
            of: Any = None
        if ids != of:
            by_token = {
                name: torch.tensor([[kinds.get(t, 0) for t in ids]], device="cpu") for name, kinds in types.items()
            }
            of, whole = ids, {"input_ids": torch.tensor([ids], device="cpu"), **inputs, **by_token}
        found.append(whole)
    return found


def _process(processor: Any, images: list[Any]) -> tuple[dict[str, Tensor], dict[str, dict[int, int]]]:
    """What a model's forward takes for images, and the types of the tokens that stand for them.

    The processor gets a text of placeholders only; it does the same with images as in any prompt.
    """
    placeholder = getattr(processor, "image_token", None)
    if placeholder is None:
        raise UnsupportedModelError(
            f"the prompts carry images, and a {type(processor).__name__} makes nothing of them: build the trainer with the "
            "model's processor as processing_class"
        )
    made = processor(images=[images], text=[placeholder * len(images)], return_tensors="pt")
    tokens = made.pop("input_ids")[0].tolist()
    made.pop("attention_mask", None)
    types = {
        name: {token: kind for token, kind in zip(tokens, made.pop(name)[0].tolist(), strict=True) if kind}
        for name in _BY_TOKEN
        if name in made
    }
    return {name: value for name, value in made.items() if isinstance(value, Tensor)}, types


def _same(images: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether images have equal pixels: datasets give a new object for each repetition. False where that cannot be told."""
    return len(images) == len(others) and all(
        one is other or (one == other) is True for one, other in zip(images, others, strict=True)
    )
