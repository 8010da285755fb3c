"""Reads prompts in every accepted form (text, ids, chats, tensors, processors' output) into lists of token ids, and checks them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.engine.images.inputs import ImageInputs, is_by_token
from stoker.kernels.errors import InvalidRequestError
from stoker.rollout.user_values import as_ints, holds_integers, shown

# Text, token ids, a chat, or all that a processor makes of a prompt with images.
Prompt = str | Sequence[int] | Sequence[dict[str, Any]] | Tensor | NDArray[Any] | Mapping[str, Any]
Prompts = Sequence[Prompt] | Tensor | NDArray[Any]  # the latter two with a row each

_SETTINGS = ("add_generation_prompt", "continue_final_message", "tools", "documents")  # of templates of every kind


Read = tuple[list[int], ImageInputs | None]  # token ids, and what a prompt has besides


def read_prompts(prompts: Any, attention_mask: Tensor | None, tokenizer: Any, what: str = "prompt") -> list[Read]:
    """Token ids of each prompt, and its images; ``what`` names one in messages.

    prompts: list of str | list of token-id lists | list of chats (lists of ``{"role", "content"}``) | int64 [B, T],
    of which ``attention_mask`` [B, T] says what is no padding. Chats get the template's generation prompt. A list may
    also be an array, or hold arrays or numpy's and torch's integers, or mappings of what a processor makes of one prompt.
    A tensor that is padded and has no mask is refused: padding would count as text.
    """
    if attention_mask is not None and not isinstance(prompts, Tensor):
        raise InvalidRequestError(f"attention_mask goes with {what}s given as a tensor [B, T]; lists need none")
    if isinstance(prompts, Tensor):
        return [(ids, None) for ids in _from_tensor(prompts, attention_mask, tokenizer, what)]
    if isinstance(prompts, np.ndarray):
        prompts = list(prompts)
    if isinstance(prompts, Mapping) and "input_ids" in prompts:  # all that a tokenizer returns
        raise InvalidRequestError(
            f"{what}s is one {type(prompts).__name__}: give its input_ids, and of tensors its attention_mask too; of one prompt "
            f"with images, [{what}]"
        )
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
        raise InvalidRequestError(f"{what}s is one {type(prompts).__name__}: give a list of {what}s")
    found: list[Read] = []
    before: Any = None
    for row, prompt in enumerate(prompts):
        # Equal prompts, as in a group, are tokenised once: that takes longer than all else that is done with a prompt here.
        again = row > 0 and (
            prompt is before or (isinstance(prompt, str) and isinstance(before, str) and prompt == before)
        )
        found.append((list(found[-1][0]), found[-1][1]) if again else _one(f"{what} {row}", prompt, tokenizer))
        before = prompt
    return found


def _one(name: str, prompt: Any, tokenizer: Any) -> Read:
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        return _of_processor(name, prompt)
    if isinstance(prompt, str):
        _check_characters(name, prompt)  # tokenizers raise a TypeError, about something else
        ids = tokenizer_of(_tokenizer(tokenizer, "text prompts"))(prompt)["input_ids"]
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(m, dict) for m in prompt):
        prompt = read_chat(name, prompt, tokenizer)
        if isinstance(prompt, Mapping):
            return _of_processor(name, prompt)
        ids = prompt
    elif isinstance(prompt, (Tensor, np.ndarray)):
        if prompt.ndim != 1 or not holds_integers(prompt):
            raise InvalidRequestError(f"{name} is a {prompt.dtype} tensor of shape {tuple(prompt.shape)}: give ids [T]")
        ids = prompt.tolist()
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        ids = prompt
    else:
        raise InvalidRequestError(
            f"{name} is a {type(prompt).__name__}: give text, a list of token ids, or a list of chat messages; "
            f"one alone goes in a list, [{name.split()[0]}]"
        )
    return as_ints(ids), None


def _check_characters(name: str, value: Any) -> None:
    """Refuse half a character in text, or in what holds text: it was cut within a pair of UTF-16, say."""
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False, skipkeys=True, default=str)
        except (ValueError, RecursionError):  # it refers to itself, or is nested too deep
            return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{name} holds half a character: {error}") from error


def read_chat(name: str, chat: Sequence[dict[str, Any]], tokenizer: Any, /, **settings: Any) -> Any:
    """Token ids of a chat, or where it has images all that the processor makes of it.

    settings: of the chat template, over those that end it with what begins an answer.
    """
    of_images = any(map(_has_image, chat))
    processor = _tokenizer(tokenizer, "chat prompts")
    own = tokenizer_of(processor)
    if of_images and processor is own:
        raise InvalidRequestError(
            f"{name} is a chat with images, which a tokenizer cannot read: give the model's processor, "
            "RolloutEngine(model, tokenizer=AutoProcessor.from_pretrained(...))"
        )
    # Of some processors the tokenizer has no template.
    whole = of_images or (processor is not own and not getattr(own, "chat_template", None))
    read = processor if whole else own
    try:
        if whole:
            settings = {
                name: value for name, value in settings.items() if name in _SETTINGS or name in _variables(read)
            }
        options = {"add_generation_prompt": True, **({"return_tensors": "pt"} if whole else {}), **settings}
        made = read.apply_chat_template(list(chat), tokenize=True, return_dict=True, **options)
    except Exception as error:  # no template, or one that refuses this chat: templates raise errors of many kinds
        _check_characters(name, [chat, settings])  # or tokenizers speak of something else
        raise InvalidRequestError(f"{name}: {error}") from error
    return made if whole else made["input_ids"]


def _variables(processor: Any) -> Collection[str]:
    """The variables of its chat template. Other names it would take for settings of its own, such as files to read images from."""
    from transformers.utils.chat_template_utils import _get_template_variables  # private: only such a chat needs it

    template = processor.chat_template
    return _get_template_variables(template.get("default") if isinstance(template, dict) else template)  # type: ignore[no-any-return]


def tokenizer_of(tokenizer: Any) -> Any:
    """The tokenizer of a multimodal processor; any other object is one itself."""
    return getattr(tokenizer, "tokenizer", tokenizer)


def _has_image(message: dict[str, Any]) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
    return any(isinstance(part, Mapping) and part.get("type", "text") != "text" for part in parts)


def _of_processor(name: str, prompt: Mapping[str, Any]) -> Read:
    """What a processor makes of one prompt: ``input_ids`` [1, T] or [T], and what the model's forward takes besides."""
    fields = {key: _as_tensor(name, key, value) for key, value in prompt.items() if value is not None}
    ids = fields.pop("input_ids")
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.shape[0] != 1 or not holds_integers(ids):
        raise InvalidRequestError(
            f"{name} has input_ids of shape {tuple(ids.shape)} and {ids.dtype}: give what the processor makes of one prompt, "
            "integers [1, T]"
        )
    length = ids.shape[1]
    fields = {
        key: t[None] if tuple(t.shape) == (length,) and not t.is_floating_point() else t for key, t in fields.items()
    }
    mask = fields.pop("attention_mask", torch.ones_like(ids))
    if tuple(mask.shape) != (1, length):
        raise InvalidRequestError(f"{name} has an attention_mask of shape {tuple(mask.shape)} for {length} tokens")
    text = _text(f"{name} has an attention_mask that", mask[0])
    fields = {key: t[:, text] if is_by_token(t, length) else t for key, t in fields.items()}
    tokens: list[int] = ids[0, text].tolist()
    has_images = any(t.is_floating_point() for t in fields.values())
    if not has_images and any(fields[key].any() for key in ("mm_token_type_ids", "token_type_ids") if key in fields):
        raise InvalidRequestError(
            f"{name} has tokens of images, and no images: give all that the processor returns, pixel_values among it"
        )
    for key, t in fields.items():  # a NaN would reach all that is computed with it in one step, a shared beginning too
        if t.is_floating_point() and not t.isfinite().all():
            raise InvalidRequestError(
                f"{name} has {key} that holds NaN or Inf: process the image again, from finite numbers"
            )
    return tokens, ImageInputs.of(tokens, fields) if has_images else None


def _as_tensor(name: str, key: str, value: Any) -> Tensor:
    try:
        return value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequestError(
            f"{name} has {key} that is no tensor ({error}): process it with return_tensors='pt'"
        ) from error


def _from_tensor(prompts: Tensor, attention_mask: Tensor | None, tokenizer: Any, what: str) -> list[list[int]]:
    if prompts.dim() != 2 or not holds_integers(prompts):
        raise InvalidRequestError(
            f"{what}s is a {prompts.dtype} tensor of shape {tuple(prompts.shape)}: give ids [B, T]"
        )
    if attention_mask is None:
        pad = getattr(tokenizer, "pad_token_id", None)
        means_more = pad in (getattr(tokenizer, "eos_token_id", None), getattr(tokenizer, "bos_token_id", None))
        if pad is not None and not means_more and prompts.numel() and bool((prompts[:, [0, -1]] == pad).any()):
            raise InvalidRequestError(
                f"{what}s is a tensor with padding (token {pad}), and without an attention_mask that would count as "
                "text: give its attention_mask, or torch.ones_like(ids) where it is meant"
            )
        return prompts.tolist()
    if not isinstance(attention_mask, Tensor):
        raise InvalidRequestError(f"attention_mask is a {type(attention_mask).__name__}: give a tensor [B, T]")
    if attention_mask.shape != prompts.shape:
        raise InvalidRequestError(
            f"attention_mask has shape {tuple(attention_mask.shape)} and {what}s {tuple(prompts.shape)}: they must agree"
        )
    text = _text("attention_mask", attention_mask)
    return [ids[mask].tolist() for ids, mask in zip(prompts, text, strict=True)]


def _text(name: str, mask: Tensor) -> Tensor:
    """Where a mask has text, bool. Refuses other kinds of masks: those added to attention (0 for text), or with document numbers."""
    other = mask[(mask != 0) & (mask != 1)]
    if len(other):
        raise InvalidRequestError(f"{name} holds {other[0].item():g}: give 1 for text and 0 for padding")
    return mask.bool()


def _tokenizer(tokenizer: Any, what: str) -> Any:
    if tokenizer is None:
        raise InvalidRequestError(f"{what} need a tokenizer: RolloutEngine(model, tokenizer=...), or give token ids")
    return tokenizer


def check_ids(name: str, ids: list[int], vocab: int, embedded: int) -> None:
    """Raise ``InvalidRequestError`` for ids that are no sequence of this vocabulary.

    embedded: how many ids have an embedding, also where the head has no output for them.
    """
    if not ids:
        raise InvalidRequestError(f"{name} is empty: give at least one token (a BOS token, say)")
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocab:
        at, token = next((at, t) for at, t in enumerate(ids) if type(t) is not int or not 0 <= t < vocab)
        if isinstance(token, Sequence):  # most often several prompts where one goes, as in ``submit``
            raise InvalidRequestError(
                f"{name} has a {type(token).__name__} of length {len(token)} at position {at}: give one flat list of "
                f"token ids, integers from 0 to {vocab - 1}"
            )
        hint = ""
        if type(token) is int and vocab <= token < embedded:
            hint = f": the model has embeddings of {embedded} tokens, and outputs for {vocab}, which prompts have to keep to"
        elif type(token) is int and token >= vocab:
            hint = " (the model's vocabulary; is the tokenizer its own?)"
        raise InvalidRequestError(
            f"{name} has {shown(token)} at position {at}: token ids are integers from 0 to {vocab - 1}{hint}"
        )
