"""Runs a model on prompts with images, as far as its language model.

The forward is the model's own, stopped where it calls its language model. What it passes on there is all that images do:
embeddings in place of the placeholders', rotary positions, features for the first layers. That is kept on the host, and steps
that compute a placeholder take their part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from stoker.engine.attention import attending_by
from stoker.engine.images.adapters import ImageAdapter
from stoker.engine.images.batches import joined, row_of
from stoker.engine.images.inputs import ImageFeatures, ImageInputs
from stoker.engine.model import ModelShell
from stoker.kernels.errors import InvalidRequestError, UnsupportedModelError
from stoker.kernels.interrupts import uninterrupted

# Arguments of a language model that are used here, and those that do not matter. Any other may change its numbers.
_KNOWN = {"inputs_embeds", "position_ids", "attention_mask", "visual_pos_masks", "deepstack_visual_embeds"}
_KNOWN |= {"per_layer_inputs"}  # of Gemma 4, which makes them of the tokens alone, in every step
_OF_NO_MATTER = {"input_ids", "cache", "past_key_values", "cache_position", "use_cache", "return_dict"}
_OF_NO_MATTER |= {"logits_to_keep", "output_attentions", "output_hidden_states"}
_ROWS = 256  # of a mask, compared at a time


def encode(shell: ModelShell, batch: Sequence[ImageInputs], adapter: ImageAdapter, most: int) -> list[ImageFeatures]:
    """Run the model, with an adapter, on a batch of prompts, as far as its language model.

    batch: one of ``batches``. most: tokens that a step can compute.

    Raises ``InvalidRequestError`` for inputs that it does not take, ``UnsupportedModelError`` for a model whose images do
    more than the engine knows of.
    """
    device, name = shell.device, type(shell.module).__name__
    if shell.decoder is shell.module.base_model:
        raise UnsupportedModelError(f"{name} takes no images: give token ids alone, or another model")
    inputs = joined(batch, _token_of_text(shell))
    inputs = {key: t.to(device, non_blocking=True) for key, t in inputs.items()}
    dtype = shell.module.dtype
    inputs = {key: t.to(dtype) if key.startswith("pixel_values") else t for key, t in inputs.items()}
    shell.lora.rows = None
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        given = _handed_over(shell, inputs, adapter)
        plain = shell.module.get_input_embeddings()(inputs["input_ids"])
        window = getattr(shell.config, "sliding_window", None)
        found = [
            _features(name, row_of(given, row, len(batch), length), plain[row, :length], window)
            for row, length in enumerate(len(images.tokens) for images in batch)
        ]
    longest = max((end - begin for features in found for begin, end in features.spans), default=0)
    if longest > most:
        raise InvalidRequestError(
            f"{longest} tokens see each other, so that one step has to compute them all, and max_num_batched_tokens is "
            f"{most}: raise EngineConfig.max_num_batched_tokens"
        )
    return found


def _token_of_text(shell: ModelShell) -> int:
    """A token that stands for no image; the configuration names those that do."""
    settings = vars(shell.module.config).items()
    named = {value for name, value in settings if "token_i" in name and isinstance(value, int)}
    return next(token for token in range(shell.vocab) if token not in named)


class _HandedOver(Exception):
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


@contextmanager
def _intercepted(shell: ModelShell) -> Iterator[None]:
    """Context manager: the language model raises what it is called with, and masks are made as for torch's attention."""

    def stop(*_: Any, **arguments: Any) -> None:
        raise _HandedOver(arguments)

    shell.decoder.forward = stop
    try:
        with attending_by(shell.module.config, "sdpa"):
            yield
    finally:
        del shell.decoder.forward
        for module in shell.module.modules():
            if getattr(module, "rope_deltas", None) is not None:  # left for a next step, which never comes
                module.rope_deltas = None


def _handed_over(shell: ModelShell, inputs: Mapping[str, Any], adapter: ImageAdapter) -> dict[str, Any]:
    """The arguments that the model calls its language model with."""
    name = type(shell.module).__name__
    try:
        # An interrupt must not leave hooks or the like in the model: they would silently change later results.
        with uninterrupted(), _intercepted(shell), adapter.over(shell.module):
            given = {**inputs, "use_cache": False}
            if adapter.states:
                functional_call(shell.module, dict(adapter.states), (), given)
            else:  # ``functional_call`` goes through all parameters
                shell.module(**given)
    except _HandedOver as reached:
        return {key: value for key, value in reached.arguments.items() if value is not None}
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of any kind: the model's own complaints about its inputs
        raise InvalidRequestError(f"{name} does not take it ({type(error).__name__}: {error})") from error
    raise UnsupportedModelError(f"{name} does not run its language model on images: use model.generate for them")


def _features(name: str, given: Mapping[str, Any], plain: Tensor, window: int | None) -> ImageFeatures:
    """given: what the language model was called with. plain: embeddings of the tokens, [L, D]. window: the layers', if any."""
    unknown = sorted(
        key for key, value in given.items() if key not in _KNOWN | _OF_NO_MATTER and not isinstance(value, bool)
    )
    spans = _spans(given.get("attention_mask"), window)
    if unknown or spans is None:
        does = (
            f"gives its language model {', '.join(unknown)}" if unknown else "lets tokens see later ones in its own way"
        )
        raise UnsupportedModelError(f"{name} {does}, which the engine does not do: use model.generate for its images")
    embeddings: Tensor = given["inputs_embeds"][0]
    changed = (embeddings != plain).any(-1)
    visual = given.get("visual_pos_masks")
    if visual is not None:
        changed |= visual.view(-1)
    places = changed.nonzero().flatten()
    if not places.numel():
        raise InvalidRequestError(f"{name} does not take it: none of its tokens is an image's placeholder")
    deep = given.get("deepstack_visual_embeds") or ()
    if visual is not None and deep:
        order = visual.view(-1).nonzero().flatten()
        deep = [embeddings.new_zeros(embeddings.shape).index_copy(0, order, part.to(embeddings)) for part in deep]
        deep = [part.index_select(0, places) for part in deep]
    rope_deltas, shift = _rope_deltas(given.get("position_ids"), len(plain))
    # Not in pinned memory, which torch keeps: for a large batch these are gigabytes, as the processor's tensors are.
    on_host = [tensor.cpu() for tensor in (embeddings.index_select(0, places), *deep)]
    return ImageFeatures(places.cpu().numpy(), on_host[0], tuple(on_host[1:]), rope_deltas, shift, *spans)


def _spans(masks: Any, window: int | None) -> tuple[tuple[tuple[int, int], ...], bool] | None:
    """(spans of tokens, from and to, that see each other both ways; whether they do so only in layers with a window).

    None where masks let tokens see later ones in any other way. masks: of all kinds of layers.
    """
    kinds = masks if isinstance(masks, Mapping) else {"full_attention": masks}
    given = {kind: mask[0, 0] for kind, mask in kinds.items() if isinstance(mask, Tensor) and mask.dim() == 4}
    length, device = next(((len(mask), mask.device) for mask in given.values()), (0, None))
    pieces = [slice(start, start + _ROWS) for start in range(0, length, _ROWS)]
    at = torch.arange(length, device=device)

    def seen(mask: Tensor, rows: slice) -> Tensor:
        return mask[rows] if mask.dtype == torch.bool else mask[rows] >= 0

    def sees_later(mask: Tensor) -> bool:
        return any(bool((seen(mask, rows) & (at > at[rows, None])).any()) for rows in pieces)

    def sees(kind: str, newest: Tensor, near: int | None = None) -> bool:
        """Whether each token sees all from the first, or from ``near`` before itself on, up to its ``newest``."""
        for rows in pieces:
            wanted = at <= newest[rows, None]
            if near is not None:
                wanted &= at > at[rows, None] - near
            if not torch.equal(seen(given[kind], rows) if kind in given else at <= at[rows, None], wanted):
                return False
        return True

    later = next((mask for mask in given.values() if sees_later(mask)), None)
    if later is None:
        return (), False
    last = [length - 1 - n for rows in pieces for n in seen(later, rows).flip(-1).byte().argmax(-1).tolist()]
    newest, spans, place = at.clone(), [], 0
    while place < length:
        end = max(place, last[place]) + 1
        if end > place + 1:
            spans.append((place, end))
            newest[place:end] = end - 1
        place = end
    local = "sliding_attention" in given and sees("full_attention", at)
    for kind in kinds:
        near = window if kind == "sliding_attention" else None
        if not sees(kind, at if local and near is None else newest, near):
            return None
    return tuple(spans), local


def _rope_deltas(positions: Tensor | None, length: int) -> tuple[NDArray[np.int64] | None, int]:
    """Rotary positions minus places in the sequence, and the same for tokens after the prompt.

    positions: [.., L], of one row, of three (time, height, width), or of text and these three.
    """
    if positions is None:
        return None, 0
    rows = positions.reshape(-1, length)[-3:].cpu().numpy()
    rope_deltas = np.broadcast_to(rows, (3, length)) - np.arange(length)
    # In the forward of a whole sequence, text goes on from the last token's position. (Not from the largest one, as the
    # "rope delta" of a cache has it: a video may have that in its middle.)
    shift = int(rows[:, -1].max()) + 1 - length
    return (rope_deltas, shift) if rope_deltas.any() or shift else (None, 0)
