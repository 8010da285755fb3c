"""``torch.distributed``'s collectives, as far as their names differ between versions."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# torch 2.13 renamed it, and warns of the older name.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
