"""Modules whose output adapters replace: by that of weights of their own, or by trained rows of an embedding or the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stoker.engine.adapters.checks import is_router, states_of, with_tied
from stoker.kernels.reference.adapter_weights import AdapterWeights, TokenRows
from stoker.kernels.reference.lora import AdapterRows


class Replacements:
    """By slot, for tokens that have the adapter: modules that PEFT saves whole, biases and routers, and trainable tokens.

    Each such module has a forward hook, which stays.
    """

    def __init__(self, modules: Mapping[str, Any], device: torch.device) -> None:
        """modules: of a shell, by path."""
        self._modules, self._device = modules, device
        self.routers = {path for path, module in modules.items() if is_router(module)}
        self.rows: AdapterRows | None = None  # of the step that runs
        self._saved: dict[str, dict[int, Mapping[str, Tensor]]] = {}
        self._tokens: dict[str, dict[int, TokenRows]] = {}
        self._ids: dict[tuple[int, ...], Tensor] = {}
        self._merged: dict[tuple[str, int], Tensor] = {}

    @property
    def has_hooks(self) -> bool:
        return bool(self._saved or self._tokens)

    @property
    def places(self) -> list[object]:
        """What slots put in place of other tensors, with their addresses."""
        saved = [
            (path, slot, [t.data_ptr() for t in state.values()])
            for path, by_slot in self._saved.items()
            for slot, state in by_slot.items()
        ]
        tokens = [
            (path, slot, ids, rows.data_ptr())
            for path, by_slot in self._tokens.items()
            for slot, (ids, rows) in by_slot.items()
        ]
        return [*saved, *tokens]

    def put(self, slot: int, links: Sequence[AdapterWeights]) -> None:
        """Fill a slot, or empty it where there are no ``links``: adapters on top of each other."""
        states: dict[str, dict[str, Tensor]] = {}
        tokens: dict[str, TokenRows] = {}
        for link in links:
            states |= states_of(link, self._modules)
            tokens |= with_tied(link.tokens, self._modules)
        self._ids |= {ids: torch.tensor(ids, device=self._device) for ids, _ in tokens.values() if ids not in self._ids}
        for path, state in self._routers(slot, links).items():
            states.setdefault(path, {}).update(state)
        self._fill(self._saved, slot, states, self._after_saved)
        self._fill(self._tokens, slot, tokens, self._after_tokens)

    def _routers(self, slot: int, links: Sequence[AdapterWeights]) -> dict[str, dict[str, Tensor]]:
        """Weights of routers with their adapters, at one place for a slot: a captured step reads them there."""
        weights: dict[str, dict[str, Tensor]] = {}
        for link in links:
            for path in self.routers.intersection(link.linears):
                (a, b, scale, *_), module = link.linears[path], self._modules[path]
                if (path, slot) not in self._merged:
                    self._merged[path, slot] = torch.empty_like(module.weight)
                merged = self._merged[path, slot]
                before = merged if path in weights else module.weight
                weights[path] = {"weight": merged.copy_(before + scale * (b @ a))}
        return weights

    def _fill(self, known: dict[str, Any], slot: int, values: Mapping[str, Any], hook: Any) -> None:
        """known: what hooks of one kind do, by module and slot."""
        for path, by_slot in known.items():
            if path not in values:
                by_slot.pop(slot, None)
        for path, value in values.items():
            if path not in known:
                known[path] = {}
                # Before LoRA, which comes on top.
                self._modules[path].register_forward_hook(partial(hook, known[path]), prepend=True)
            known[path][slot] = value

    def _after_saved(
        self, by_slot: dict[int, Mapping[str, Tensor]], module: nn.Module, args: tuple[Tensor, ...], out: Any
    ) -> Any:
        """Run the module with each adapter's own weights too, and take the rows that have the adapter."""
        if (step := self.rows) is None:
            return out
        for slot, state in by_slot.items():
            # A mirror's dtype is not the trainer's.
            own = {f"module.{n}": t.to(attrgetter(n)(module).dtype) for n, t in state.items()}
            # The forward itself: the hooks would run this again.
            other = functional_call(_Bare(module), own, args)
            if isinstance(out, tuple):  # of a router
                out = tuple(
                    torch.where(_rows_of(step, slot, one), mine, one) for one, mine in zip(out, other, strict=True)
                )
            else:
                out = torch.where(_rows_of(step, slot, out), other, out)
        return out

    def _after_tokens(
        self, by_slot: dict[int, TokenRows], module: Any, args: tuple[Tensor, ...], out: Tensor
    ) -> Tensor:
        """Put the adapters' rows of an embedding, or their logits where it is the head, in place of the base's."""
        if (step := self.rows) is None:
            return out
        (x,) = args
        for slot, (numbers, rows) in by_slot.items():
            ids, rows, mine = self._ids[numbers], rows.to(out.dtype), _rows_of(step, slot, out)
            if isinstance(module, nn.Embedding):
                found = x[..., None] == ids
                other = rows[found.int().argmax(-1)] * getattr(module, "embed_scale", 1)
                out = torch.where(mine & found.any(-1, keepdim=True), other, out)
            else:
                out = out.index_copy(-1, ids, torch.where(mine, x @ rows.T, out.index_select(-1, ids)))
        return out


def _rows_of(step: AdapterRows, slot: int, out: Tensor) -> Tensor:
    """Which of ``out``, [T, N] or [1, T, ...], are of tokens with the slot's adapter."""
    before, behind = (1, out.dim() - 2) if out.dim() > 2 else (0, 1)
    return (step.slots == slot).view(*[1] * before, -1, *[1] * behind)


class _Bare(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        """Calls a module without its hooks."""
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module.forward(*args)
