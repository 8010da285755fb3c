"""Whether what was drawn follows a distribution."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chi_square_critical(freedom: int) -> float:
    """The value that chi-square exceeds with probability 1e-4 (Wilson and Hilferty, 1931)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 3.719 * math.sqrt(part)) ** 3


def assert_follows(counts: Tensor, probs: Tensor) -> None:
    """Pearson's chi-square test at 1e-4; cells that expect fewer than five are one cell."""
    wanted = probs.double() * counts.sum()
    rare = wanted < 5
    observed = torch.cat((counts[~rare].double(), counts[rare].sum()[None].double()))
    wanted = torch.cat((wanted[~rare], wanted[rare].sum()[None]))
    assert observed[wanted == 0].sum() == 0, "what has no probability was drawn"
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) == 1:
        return
    statistic = ((observed - wanted).square() / wanted).sum().item()
    assert statistic < chi_square_critical(len(wanted) - 1)
