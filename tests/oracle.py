"""What the engine has to reproduce: plain ``model.generate`` and the plain forward, one unpadded sequence at a time."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


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


def logprobs(
    model: PreTrainedModel, prompt: list[int], completion: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probability of each completion token under ``logits / temperature``, float64 [len(completion)]."""
    scaled = (logits(model, prompt, completion).double() / temperature).log_softmax(-1)
    return scaled.gather(-1, torch.tensor(completion)[:, None])[:, 0]
