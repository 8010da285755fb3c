"""Adapters in a shell: which of its linears have them, and what each slot does to them.

Fused layers ask for a table of each of their groups; any other module that an adapter changes gets a forward hook. Both
read ``rows``, which the runner sets for every step; without it nothing but that test is added to a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stoker.engine.quantised import QuantisedLinear
from stoker.kernels.errors import UnsupportedModelError
from stoker.kernels.ops import Ops
from stoker.kernels.reference.lora import AdapterRows, AdapterWeights, LoraTable, LoraWeights


class Adapted:
    """Linears that a fused layer runs together, and the table of their adapters."""

    def __init__(self, layers: LoraLayers, paths: Sequence[str], table: LoraTable) -> None:
        self.layers = layers
        self.paths = paths
        self.table = table

    @property
    def rows(self) -> AdapterRows | None:
        """Of the step that runs, where it has adapters and they change any of these linears."""
        return None if self.table.empty else self.layers.rows


class LoraLayers:
    """The adapters of one shell, by slot from 1 on."""

    def __init__(self, module: nn.Module, ops: Ops, num_slots: int, max_rank: int, device: torch.device) -> None:
        """module: the shell's, before any of its layers is replaced."""
        self.ops = ops
        self.max_rank = max_rank
        self.num_slots = num_slots
        self.device = device
        self.rows: AdapterRows | None = None  # of the step that runs; None where no token has an adapter
        self.has_hooks = False  # on modules, of which some may be called with chosen rows
        self.layout = 0  # a captured step holds as long as this stays
        self._modules: dict[str, nn.Module] = dict(module.named_modules())
        self._fused: set[str] = set()
        self._tables: dict[str, tuple[LoraTable, int]] = {}
        self._saved: dict[str, dict[int, Mapping[str, Tensor]]] = {}
        self._last: object = None

    def group(self, paths: Sequence[str]) -> Adapted:
        """Linears that would be run together."""
        linears: list[Any] = [self._modules[path] for path in paths]
        widths, biases = [m.out_features for m in linears], [m.bias for m in linears]
        return Adapted(self, paths, LoraTable(widths, biases, self.num_slots, self.device))

    def replaced(self, path: str, groups: Sequence[Adapted], kept: str | None = None) -> None:
        """The modules at and below ``path`` are not called any more; those of ``groups`` are run by these.

        kept: one of them that is called as before, with all below it.
        """
        self._fused |= {
            name for name in self._modules if _at_or_below(name, path) and not (kept and _at_or_below(name, kept))
        }
        for group in groups:
            self._tables |= {linear: (group.table, index) for index, linear in enumerate(group.paths)}

    def check(self, name: str, adapter: AdapterWeights, dtype: torch.dtype) -> None:
        """Raise ``UnsupportedModelError`` naming what of an adapter does not fit this model. dtype: of all adapters."""
        if adapter.max_rank > self.max_rank:
            raise UnsupportedModelError(
                f"adapter {name!r} has rank {adapter.max_rank} and max_lora_rank={self.max_rank}: raise it in EngineConfig"
            )
        for path, weights in adapter.linears.items():
            module = self._modules.get(path)
            if module is None:
                raise UnsupportedModelError(
                    f"adapter {name!r} targets {path}, which the model does not have: it is for another base"
                )
            if type(module) not in (nn.Linear, QuantisedLinear):
                raise UnsupportedModelError(
                    f"adapter {name!r} targets {path}, a {type(module).__name__}: only linear layers take adapters, "
                    "leave it out of target_modules, or merge the adapter"
                )
            if not weights.a.dtype == weights.b.dtype == dtype:
                raise UnsupportedModelError(
                    f"adapter {name!r} has {weights.a.dtype} and {weights.b.dtype} for {path}, and this engine's adapters "
                    f"are in {dtype}: cast it to that"
                )
            rank, wanted = weights.a.shape[0], (module.out_features, module.in_features)
            if weights.a.shape != (rank, wanted[1]) or weights.b.shape != (wanted[0], rank):
                raise UnsupportedModelError(
                    f"adapter {name!r} has A {tuple(weights.a.shape)} and B {tuple(weights.b.shape)} for {path}, whose "
                    f"weight is {wanted}: it is for another base, or its file is damaged"
                )
            magnitude = adapter.magnitudes.get(path)
            if magnitude is not None and magnitude.numel() != wanted[0]:
                raise UnsupportedModelError(
                    f"adapter {name!r} has {magnitude.numel()} magnitudes for {path}'s {wanted[0]} rows"
                )
        for path, state in adapter.saved.items():
            module = self._modules.get(path)
            if module is None or path in self._fused:
                raise UnsupportedModelError(
                    f"adapter {name!r} saves {path}, which the engine does not run as a module of its own: modules_to_save "
                    "may name embeddings, the last norm and the head"
                )
            own: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            wrong = sorted(n for n in state if n not in own or own[n].shape != state[n].shape)
            if wrong:
                raise UnsupportedModelError(
                    f"adapter {name!r} saves {path} with {wrong[:3]} of another shape than the base"
                )

    def outside(self, adapter: AdapterWeights) -> list[str]:
        """What an adapter changes outside of the layers that were replaced, by hooks on the model's own modules."""
        return [path for path in (*adapter.linears, *adapter.saved) if path not in self._fused]

    def put(self, slot: int, adapter: AdapterWeights | None) -> None:
        """Fill a slot, or empty it. The tensors are read where they lie for as long as they are there."""
        linears = adapter.linears if adapter is not None else {}
        saved = adapter.saved if adapter is not None else {}
        for path, (table, index) in self._tables.items():
            if path not in linears:
                table.put(index, slot, None)
        for path, weights in linears.items():
            if path not in self._tables:
                self._tables[path] = self.group([path]).table, 0
                self.has_hooks = True
                self._modules[path].register_forward_hook(partial(self._after_linear, self._tables[path][0]))
            assert adapter is not None
            if path in adapter.magnitudes:
                weights = weights._replace(gain=self._gain(path, weights, adapter.magnitudes[path]))
            table, index = self._tables[path]
            table.put(index, slot, weights)
        for path, by_slot in self._saved.items():
            if path not in saved:
                by_slot.pop(slot, None)
        for path, state in saved.items():
            if path not in self._saved:
                self._saved[path] = {}
                self.has_hooks = True
                self._modules[path].register_forward_hook(partial(self._after_saved, self._saved[path]))
            self._saved[path][slot] = state
        before, self._last = self._last, self._captured()
        self.layout += before != self._last

    def _captured(self) -> object:
        """What a captured step knows of the adapters: kernels' settings, and what modules are replaced by."""
        saved = {
            path: {slot: [t.data_ptr() for t in state.values()] for slot, state in by_slot.items()}
            for path, by_slot in self._saved.items()
        }
        return [(t.max_rank, t.dtype, t.empty) for t, _ in self._tables.values()], saved

    def _gain(self, path: str, weights: LoraWeights, magnitude: Tensor) -> Tensor:
        """DoRA's magnitude over the norm of the adapted rows; fp32 [N]. Holds until a weight changes."""
        module: Any = self._modules[path]
        if isinstance(module, QuantisedLinear):
            norms = module.adapted_norms(weights.scale, weights.b, weights.a)
        else:
            norms = (module.weight.float() + weights.scale * (weights.b.float() @ weights.a.float())).norm(dim=1)
        gain: Tensor = magnitude.detach().float().flatten() / norms
        return gain

    def _after_linear(self, table: LoraTable, _: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        if self.rows is None or table.empty:
            return out
        x = args[0]
        self.ops.lora(x.flatten(0, -2), out.view(-1, out.shape[-1]), table, self.rows)
        return out

    def _after_saved(
        self, by_slot: dict[int, Mapping[str, Tensor]], module: nn.Module, args: tuple[Tensor, ...], out: Tensor
    ) -> Tensor:
        """Run the module with each adapter's own weights too, and take the rows that have the adapter."""
        if self.rows is None:
            return out
        for slot, state in by_slot.items():
            mine = (self.rows.slots == slot).view(*(1 for _ in range(out.dim() - 2)), -1, 1)
            # The forward itself: the hooks would run this again.
            out = torch.where(
                mine, functional_call(_Bare(module), {f"module.{n}": t for n, t in state.items()}, args), out
            )
        return out


def _at_or_below(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


class _Bare(nn.Module):
    """A module without its hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module.forward(*args)
