"""Indexed attention: layers whose indexer chooses the keys that each query attends to (DeepSeek Sparse Attention and relatives).

An indexer keeps a fixed number of keys. As long as no sequence has more, it chooses all that a query may see, and the layer's
attention is plain causal attention. The engine runs no longer ones (``check_length``), so in the shell indexers compute nothing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from stoker.engine.attention import CAUSAL, EVERY_KEY, MaskRule
from stoker.engine.step_context import PackedPositions
from stoker.kernels.errors import UnsupportedModelError

_OF_CACHES = {"update_indexer", "update_index"}  # what indexers call to have their own keys cached
# Attributes that say how much an indexer keeps: keys; or blocks of keys, and the size of one.
_COUNTS = (("index_topk",), ("topk_blocks", "block_size"))


def keys_kept(module: nn.Module) -> int | None:
    """How many keys an indexer keeps for each query; None where the module is no indexer that is known."""
    counts = _counts(module)
    return math.prod(getattr(module, name) for name in counts) if counts else None


def _counts(module: nn.Module) -> tuple[str, ...]:
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType) or _OF_CACHES.isdisjoint(forward.__code__.co_names):
        return ()
    found = (names for names in _COUNTS if all(type(getattr(module, name, None)) is int for name in names))
    return next(found, ())


class IndexedLayers:
    """Has all indexers of a shell choose every key. No module is renamed and no tensor touched."""

    def __init__(self, module: nn.Module) -> None:
        self._trying = False
        self.paths: list[str] = []  # of indexers
        for path, attention in module.named_modules():
            for name, indexer in attention.named_children():
                if _counts(indexer):
                    self.paths.append(f"{path}.{name}")
                    vars(indexer)["forward"] = partial(self._choose, indexer)
                    attention.register_forward_pre_hook(_give_mask, with_kwargs=True)

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Context manager: indexers that are called run their own code, too, which has to choose every key if it keeps so many.

        Otherwise ``UnsupportedModelError`` is raised.
        """
        self._trying = True
        try:
            yield
        finally:
            self._trying = False

    def _choose(self, indexer: Any, *args: Any, **given: Any) -> object:
        if self._trying:
            _try(indexer, args, given)
        return EVERY_KEY


def _give_mask(_: nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Layers take the mask apart for their indexer, and in a step there is none."""
    if given.get("attention_mask", CAUSAL) is None:
        given = given | {"attention_mask": CAUSAL}
    return args, given


def _try(indexer: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Have the indexer keep one key, and then every one. args, given: what it is called with, for tokens of one sequence."""
    x: Tensor = given["hidden_states"] if "hidden_states" in given else args[0]
    tokens = x.shape[1]
    visible = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
    mask = torch.zeros(1, tokens, tokens, dtype=x.dtype, device=x.device)
    mask = mask.masked_fill(~visible, torch.finfo(x.dtype).min)

    def real(value: Any) -> Any:
        if isinstance(value, MaskRule):
            return mask
        return None if isinstance(value, PackedPositions) else value

    args, given = tuple(map(real, args)), {name: real(value) for name, value in given.items()}
    counts = _counts(indexer)
    own = {name: getattr(indexer, name) for name in counts}
    try:
        for kept in (1, tokens):
            vars(indexer).update(dict.fromkeys(counts, 1) | {counts[0]: kept})
            chosen: Tensor = type(indexer).forward(indexer, *args, **given)
            found = (chosen[..., None] == torch.arange(tokens, device=x.device)).any(-2)  # [..., queries, keys]
            every = bool((found | ~visible).all())
            if chosen.shape[-1] != kept or every != (kept == tokens):
                raise UnsupportedModelError(
                    f"{type(indexer).__name__} chooses keys in a way that the engine does not know"
                )
    finally:
        vars(indexer).update(own)
