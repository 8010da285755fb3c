"""The checksum of one tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.weight_sync.checksum import checksums

CPU = torch.device("cpu")


def checksum(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    return checksums([tensor], CPU, None if dtype is None else [dtype])[0]
