"""Parts of a PPO loop, for tensors as ``RolloutBatch.to_tensors`` makes them. ``examples/ppo.py`` is such a loop.

Everything is of shape [B, C], one column a completion token, and comes with a mask [B, C] (bool, or numbers of 0 and 1)
of the tokens that are the policy's own. What the mask leaves out, padding or the answer of a tool in the middle, has no
effect on any result, and is 0 in it. Results are float32, on the device of the arguments. ``InvalidRequestError`` names
shapes that do not agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from stoker.kernels.errors import InvalidRequestError
from stoker.rollout.user_values import shown


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and returns, both [B, C] (Schulman et al., arXiv:1506.02438, equation 16).

    rewards: of each token. values: the critic's estimate before each token. gamma: the discount. lam: lambda, which
    weighs later errors. An episode ends with its last token, so nothing is bootstrapped after it. Tokens the mask
    leaves out take no time: the one after follows the one before. Both are targets, through which no gradient flows.
    """
    keep = _mask(mask, rewards, values)
    rewards, values = rewards.detach().float(), values.detach().float()
    advantages = torch.zeros_like(rewards)
    advantage = next_value = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(keep[:, t], delta + gamma * lam * advantage, advantage)
        next_value = torch.where(keep[:, t], values[:, t], next_value)
        advantages[:, t] = advantage
    zero = torch.zeros_like(advantages)
    return torch.where(keep, advantages, zero), torch.where(keep, advantages + values, zero)


def kl_penalty(
    logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, *, kind: Literal["k1", "k3"] = "k1"
) -> Tensor:
    """Estimate of KL(policy, reference) at each token, [B, C], from log-probabilities [B, C] of the policy's samples.

    With r = reference / policy: "k1" is -log r, unbiased, and negative at times; "k3" is r - 1 - log r, unbiased too,
    never negative and of lower variance (J. Schulman, Approximating KL divergence, joschu.net/blog/kl-approx.html,
    2020).
    """
    keep = _mask(mask, logprobs, reference_logprobs)
    log_ratio = torch.where(keep, reference_logprobs.float() - logprobs.float(), 0.0)
    if kind == "k1":
        return -log_ratio
    if kind == "k3":
        return torch.where(keep, log_ratio.expm1() - log_ratio, 0.0)
    raise InvalidRequestError(f"kind={shown(kind)}: choose 'k1' or 'k3'")


def token_rewards(scores: Tensor | Sequence[float], kl: Tensor, mask: Tensor, *, kl_coefficient: float) -> Tensor:
    """Rewards [B, C]: minus ``kl_coefficient`` times the KL of each token, and ``scores`` [B] on the last one.

    The reward of Ouyang et al., arXiv:2203.02155, equation 2, spread over tokens. scores: one a row, a list of numbers or
    a tensor on any device. kl: of ``kl_penalty``. A row without a token of its own gets nothing.
    """
    keep = _mask(mask, kl)
    scores = torch.as_tensor(scores, dtype=torch.float32, device=kl.device)
    if scores.shape != kl.shape[:1]:
        raise InvalidRequestError(f"scores has shape {tuple(scores.shape)}: give one a row, [{kl.shape[0]}]")
    last = keep & (keep.flip(1).cumsum(1).flip(1) == 1)  # tokens after which the row has no more
    return torch.where(keep, -kl_coefficient * kl.float(), 0.0) + torch.where(last, scores[:, None], 0.0)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of values [B, C] over the tokens of the whole batch, a scalar; 0 where there is none. Gradients flow."""
    keep = _mask(mask, values)
    return torch.where(keep, values.float(), 0.0).sum() / keep.sum().clamp(min=1)


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Values [B, C] scaled to variance 1 over the tokens of the batch, and with ``shift_mean`` shifted to mean 0."""
    keep = _mask(mask, values)
    # First: NaN in values that the mask leaves out would make all gradients NaN.
    values = torch.where(keep, values.float(), 0.0)
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    white = (values - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(keep, white if shift_mean else white + mean, 0.0)


def _mask(mask: Tensor, *values: Tensor) -> Tensor:
    for tensor in (mask, *values):
        if tensor.dim() != 2 or tensor.shape != mask.shape:
            shapes = ", ".join(str(tuple(t.shape)) for t in (mask, *values))
            raise InvalidRequestError(f"mask and values have shapes {shapes}: give tensors of one shape [B, C]")
    return mask.bool()
