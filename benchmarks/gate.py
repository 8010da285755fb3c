"""The correctness gate: no speed is reported for wrong log-probabilities."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from stoker.rollout import RolloutOutput


class GateError(Exception):
    """The engine's log-probabilities are not those of the model."""


def limit_of(dtype: torch.dtype) -> float:
    """By how much log-probabilities may differ where the same numbers are added up in another order."""
    return 1e-4 if dtype == torch.float32 else 0.25


def check(worst: float, limit: float, theirs: str) -> dict[str, float]:
    """Raise ``GateError`` where log-probabilities differ from ``theirs`` by more than the limit, or by NaN."""
    if not worst <= limit:
        raise GateError(f"log-probabilities differ from {theirs} by {worst:.2e}, allowed is {limit:.2e}")
    return {"max_abs_diff": worst, "limit": limit}


@torch.inference_mode()
def check_logprobs(model: PreTrainedModel, outputs: Sequence[RolloutOutput]) -> dict[str, float]:
    """Compare the first completion of each output with a teacher-forced plain forward in fp32.

    In fp32 they have to agree within 1e-4. A narrower dtype may be off by as much again as the plain forward in that
    dtype is itself. Raises ``GateError``.
    """
    exact = model if model.dtype == torch.float32 else copy.deepcopy(model).float()
    found, narrow, expected = [], [], []
    for output in outputs:
        completion = output.completions[0]
        ids = torch.tensor([output.prompt_token_ids + completion.token_ids], device=model.device)
        count = len(completion.token_ids)
        found.append(torch.tensor(completion.logprobs, device=model.device))
        expected.append(_teacher_forced(exact, ids, count))
        narrow.append(expected[-1] if exact is model else _teacher_forced(model, ids, count))
    worst, plain = ((torch.cat(x) - torch.cat(expected)).abs().max().item() for x in (found, narrow))
    figures = check(worst, max(1e-4, 2 * plain), "the fp32 forward's")
    return figures | {"plain_forward_max_abs_diff": plain, "tokens": sum(map(len, found))}


def _teacher_forced(model: PreTrainedModel, ids: torch.Tensor, count: int) -> torch.Tensor:
    """ids: [1, T]. Log-probabilities of the last ``count`` tokens, fp32 [count]."""
    logits: torch.Tensor = model(ids, use_cache=False, logits_to_keep=count + 1).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, -count:, None])[:, 0]
