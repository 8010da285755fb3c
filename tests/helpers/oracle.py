"""What the engine has to reproduce: plain ``model.generate`` and the plain forward, one unpadded sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int], max_new_tokens: int, guess: list[int] | None = None) -> list[int]:
    """What ``generate`` gives. guess: what that may be, which takes one forward to tell, and not one for each token."""
    if guess is not None and is_greedy(model, guess, max_new_tokens, lambda: logits(model, prompt, guess)):
        return guess
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def is_greedy(
    model: PreTrainedModel, guess: list[int], max_new_tokens: int, logits_of: Callable[[], torch.Tensor]
) -> bool:
    """Whether ``generate`` gives that: each token is the likeliest after those before, and only the last ends it."""
    eos = model.generation_config.eos_token_id
    ends = [eos] if isinstance(eos, int) else eos or []
    over = [token in ends for token in guess]
    whole = 0 < len(guess) <= max_new_tokens and not any(over[:-1]) and (len(guess) == max_new_tokens or over[-1])
    return whole and logits_of().argmax(-1).tolist() == guess


def greedy_each(
    model: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int, guesses: list[list[int]]
) -> list[list[int]]:
    return [greedy(model, p, max_new_tokens, guess) for p, guess in zip(prompts, guesses, strict=True)]


@torch.no_grad()
def greedy_batch(model: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """The same for all prompts in one left-padded batch."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
    return out[:, width:].tolist()


@torch.no_grad()
def logits(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Logits that each completion token was drawn from, float32 [len(completion), vocabulary]."""
    out = model(torch.tensor([prompt + completion]), use_cache=False).logits[0]
    return out[len(prompt) - 1 : -1].float()


def cache_of(out: Any) -> dict[str, Any]:
    """The cache that a forward gave, as the next one takes it: transformers renamed it in 5.24; Mamba has it under its own name."""
    name = next(name for name in ("cache", "past_key_values", "cache_params") if name in out)
    return {name: out[name]}


def logprobs(
    model: PreTrainedModel, prompt: list[int], completion: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probability of each completion token under ``logits / temperature``, float64 [len(completion)]."""
    return _logprobs(logits(model, prompt, completion), completion, temperature)


def logprobs_of_all(model: PreTrainedModel, sequence: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of all tokens where each of a sequence is, from the second on, float32 [len(sequence) - 1, vocabulary]."""
    return (logits(model, sequence[:1], sequence[1:]) / temperature).log_softmax(-1)


def greedy_logprobs(model: PreTrainedModel, prompt: list[int], completion: list[int], max_new_tokens: int) -> Any:
    """As ``logprobs``, of a completion that has to be what ``generate`` gives."""
    found = logits(model, prompt, completion)
    if not is_greedy(model, completion, max_new_tokens, lambda: found):
        assert completion == greedy(model, prompt, max_new_tokens)
    return _logprobs(found, completion, 1.0)


def _logprobs(found: torch.Tensor, completion: list[int], temperature: float) -> torch.Tensor:
    scaled = (found.double() / temperature).log_softmax(-1)
    return scaled.gather(-1, torch.tensor(completion)[:, None])[:, 0]
