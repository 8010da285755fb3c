"""Adapters of a shell's modules: which modules have them, and what each slot does.

A fused layer asks for the tables of each of its groups of linears. Any other module that an adapter changes gets a forward hook,
and experts ask when they run. All read ``rows``, which the runner sets for every step; a step without adapters costs only
the test for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from stoker.engine.adapters.checks import check_fits, check_parts, is_linear, shape_of
from stoker.engine.adapters.replacements import Replacements
from stoker.engine.layers.experts import adapt_experts, expert_tables, projection_of, with_biases
from stoker.engine.layers.quantised import QuantisedLinear
from stoker.engine.parallel.cuts import Cut
from stoker.kernels.errors import UnsupportedModelError
from stoker.kernels.ops import Ops
from stoker.kernels.reference.adapter_weights import AdapterWeights, LoraWeights
from stoker.kernels.reference.lora import AdapterRows, LoraTable, PointerBlock, kernel_rows
from stoker.kernels.reference.lora_stacks import Stacks
from stoker.kernels.reference.moe import ExpertAdapters
from stoker.kernels.reference.norm_rotary import Activation

_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_NORM_COLUMNS = 8192  # at a time: an embedding has 100,000 and more, which would take gigabytes in fp32


class Adapted:
    """Linears that run together, or one other module, and the tables of their adapters.

    There is one table, and another one for each further adapter that a slot has on top of the first.
    """

    def __init__(
        self, layers: LoraLayers, widths: Sequence[int], biases: Sequence[Tensor | None], experts: int = 1
    ) -> None:
        self.layers = layers
        self._empty = partial(LoraTable, widths, biases, layers.num_slots, layers.device, experts, layers.stacks)
        self.tables: list[LoraTable] = []
        self._active: list[LoraTable] = []  # the tables that are not empty
        self.reach(1)

    @property
    def rows(self) -> AdapterRows | None:
        """The adapters of the present step's tokens; None where none of them changes any of these modules."""
        return self.layers.rows if self._active else None

    def reach(self, length: int) -> None:
        """Have tables for ``length`` adapters on top of each other."""
        while len(self.tables) < length:
            self.tables.append(self._empty())
            self.layers.without_block.append(self.tables[-1])

    def parts(self, index: int, chain: Sequence[LoraWeights]) -> Iterator[tuple[tuple[LoraTable, int], LoraWeights]]:
        """((table, number of the linear in it), what to put there) for one of the linears. chain: adapters on top of each other."""
        self.reach(len(chain))
        return (((table, index), weights) for table, weights in zip(self.tables, chain, strict=False))

    def look(self) -> tuple[object, ...]:
        """Look at the tables as they are now; returns what a captured step depends on."""
        self._active = [table for table in self.tables if not table.empty]
        return tuple(t.traits for t in self.tables)

    def project(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: AdapterRows,
        gated: Activation | None,
        **options: Any,
    ) -> Tensor:
        """``Ops.linear`` of these linears, then ``apply``; in one operation where there is one for it."""
        ops = self.layers.ops
        if ops.adapted_linear is not None and len(self._active) == 1:
            return ops.adapted_linear(x, weight, bias, self._active[0], rows, gated=gated, **options)
        return self.apply(x, ops.linear(x, weight, bias, **options), rows, gated, settled=True)

    def apply(
        self, x: Tensor, out: Tensor, rows: AdapterRows, gated: Activation | None = None, *, settled: bool = False
    ) -> Tensor:
        """Add the adapters to the linears' output, as ``Ops.lora`` does. x: [T, D]; out: [T, N]; rows: ``self.rows``."""
        for table in self._active[:-1]:
            self.layers.ops.lora(x, out, table, rows, settled=settled)
        return self.layers.ops.lora(x, out, self._active[-1], rows, gated, settled=settled)


class Filling:
    """All that goes into a slot for one adapter. It is valid as long as the adapter's tensors stay where they are.

    Where some of it is ``derived`` from numbers, the adapter's or the base's, these must stay the same too. parts: by table and
    number of a linear. links: the adapter, and those on top of it, without what only images go through.
    """

    def __init__(
        self,
        layers: LoraLayers,
        adapter: AdapterWeights,
        links: Sequence[AdapterWeights],
        parts: Mapping[tuple[LoraTable, int], LoraWeights],
    ) -> None:
        self._of = layers, adapter
        self.links = links
        self.parts = {place: (weights, kernel_rows(weights)) for place, weights in parts.items()}
        # What the tables' settings depend on: they stay where a filling replaces another one of the same kind.
        self.kind = {place: (weights.a.dtype, *rows[1:]) for place, (weights, rows) in self.parts.items()}
        self.derived = layers.derives(adapter)

    def is_of(self, layers: LoraLayers, adapter: AdapterWeights | None) -> bool:
        return self._of[0] is layers and self._of[1] is adapter


class LoraLayers:
    """The adapters of one shell, by slot from 1 on."""

    def __init__(
        self,
        module: nn.Module,
        ops: Ops,
        num_slots: int,
        max_rank: int,
        device: torch.device,
        beside: Sequence[str],
        idle: Sequence[str],
    ) -> None:
        """module: the shell's, before any of its layers is replaced. beside: paths of modules that no text goes through.

        idle: paths of modules that compute nothing.
        """
        self.ops = ops
        self.max_rank = max_rank
        self.num_slots = num_slots
        self.device = device
        self.stacks = Stacks()
        self._rows: AdapterRows | None = None
        self._hooked = False
        self.rounded: Callable[[str], Tensor | None] = lambda name: (
            None
        )  # the rounded copy that is used in place of a weight
        self.layout = 0  # captured steps are valid as long as this stays the same
        self.only_add = False  # whether all known adapters only add to an output, without looking at it
        self.without_block: list[LoraTable] = []  # tables that are new
        self._blocks: list[PointerBlock] = []
        self._modules: dict[str, Any] = dict(module.named_modules())
        self._beside = beside
        self._idle = {name for name in self._modules if any(_at_or_below(name, path) for path in idle)}
        self._fused: set[str] = set()
        self._of_cut: set[str] = set()  # names of modules in layers that ranks have parts of
        self._cuts: dict[str, Cut] = {}  # by linear, where ranks have parts of them
        self._once = True  # whether this rank adds the biases of sums over ranks
        self._adapted: dict[str, tuple[Adapted, int]] = {}  # by module, or by 3-D parameter of experts
        self._replacements = Replacements(self._modules, device)
        self._held: dict[int, list[Filling]] = {}  # by slot: one, or none
        self._settings: list[object] = []  # of kernels, group by group
        self._last: object = None  # what a captured step knows: these, and what modules are replaced by

    @property
    def has_hooks(self) -> bool:
        """Whether modules have hooks. Some of these may be called with chosen rows, not with all of a step."""
        return self._hooked or self._replacements.has_hooks

    @property
    def rows(self) -> AdapterRows | None:
        """The adapters of the present step's tokens; None where no token has one."""
        return self._rows

    @rows.setter
    def rows(self, rows: AdapterRows | None) -> None:
        if rows is not None:
            rows.of_step.clear()
        self._rows = self._replacements.rows = rows

    def group(self, paths: Sequence[str]) -> Adapted:
        """What adapts linears that are to run together."""
        linears = [self._modules[path] for path in paths]
        return Adapted(self, [shape_of(m)[0] for m in linears], [m.bias for m in linears])

    def cut(self, path: str) -> None:
        """Note that this rank has a part of the layer at ``path``."""
        self._of_cut |= {name for name in self._modules if _at_or_below(name, path)}

    def share(self, paths: Sequence[str], cuts: Sequence[Cut], *, once: bool) -> Adapted:
        """What adapts linears that run together, and of which this rank has these parts. once: as for ``Cut.of_adapter``."""
        widths = [cut.size(torch.Size(shape_of(self._modules[path])))[0] for path, cut in zip(paths, cuts, strict=True)]
        group = Adapted(self, widths, [None] * len(widths))
        self._adapted |= {path: (group, index) for index, path in enumerate(paths)}
        self._cuts |= zip(paths, cuts, strict=True)
        self._once = once
        return group

    def replaced(self, path: str, groups: Mapping[tuple[str, ...], Adapted], kept: Sequence[str] = ()) -> None:
        """Note that modules at and below ``path`` are not called any more; the linears of ``groups`` are run by these.

        kept: modules among them that are called as before, with all below.
        """
        below = {name for name in self._modules if _at_or_below(name, path)}
        self._fused |= {name for name in below if not any(_at_or_below(name, other) for other in kept)}
        for paths, group in groups.items():
            self._adapted |= {linear: (group, index) for index, linear in enumerate(paths)}

    def _links(self, adapter: AdapterWeights) -> Iterator[AdapterWeights]:
        """The links of an adapter, without what is idle, and what only images go through (a multimodal model's vision tower)."""
        for link in adapter.links:
            link = link.where(lambda path: path not in self._idle) if self._idle else link
            yield link.where(lambda path: not self._is_beside(path)) if self._beside else link

    def _is_beside(self, path: str) -> bool:
        return any(_at_or_below(path, other) for other in self._beside)

    def beside(self, adapter: AdapterWeights) -> list[AdapterWeights]:
        """The links of an adapter, in order, with only what images go through and text does not."""
        links = [link.where(self._is_beside) for link in adapter.links] if self._beside else []
        return [link for link in links if any(True for _ in replace(link, then=None).tensors())]

    def know(self, adapters: Iterable[AdapterWeights]) -> None:
        """Note which adapters may come into slots.

        Whether all of them only add (all but DoRA do) changes how a step rounds. So it must not depend on which are in slots now.
        """
        before = self.only_add
        self.only_add = not any(link.magnitudes for adapter in adapters for link in self._links(adapter))
        self.layout += before != self.only_add

    def check(self, name: str, adapter: AdapterWeights) -> None:
        """Raise ``UnsupportedModelError`` naming what of an adapter does not fit this model."""
        if adapter.max_rank > self.max_rank:
            raise UnsupportedModelError(
                f"adapter {name!r} has rank {adapter.max_rank} and max_lora_rank={self.max_rank}: raise it in EngineConfig"
            )
        known = _DTYPES if self.ops.adapter_dtypes is None else self.ops.adapter_dtypes
        for link in self._links(adapter):
            for dtype in {matrix.dtype for matrix in link.matrices()} - known:
                names = ", ".join(sorted(map(str, known)))
                raise UnsupportedModelError(
                    f"adapter {name!r} is in {dtype}, and this device's kernels run adapters in {names}: cast it"
                )
            check_fits(name, link, self._modules, self._fused)
            if self._cuts:
                check_parts(name, link, self._of_cut - self._cuts.keys())

    def derives(self, adapter: AdapterWeights) -> bool:
        """Whether a slot holds numbers computed from the adapter's tensors, and not just these tensors."""
        return any(
            link.magnitudes
            or link.offsets
            or link.biases
            or not self._replacements.routers.isdisjoint(link.linears)
            or any(key != projection_of(key) for key in link.experts)
            or any(self._cuts[path].copies for path in self._cuts.keys() & link.linears.keys())
            for link in self._links(adapter)
        )

    def outside(self, adapter: AdapterWeights) -> list[str]:
        """Paths of modules that an adapter changes by hooks, as they are not in fused layers."""
        parts = (
            p
            for link in self._links(adapter)
            for p in (link.linears, link.biases, link.experts, link.tokens, link.saved)
        )
        return [path for part in parts for path in part if path not in self._fused]

    @torch.inference_mode(False)
    @torch.no_grad()
    def prepare(self, adapter: AdapterWeights) -> Filling:
        """Prepare an adapter for a slot. Its tensors are read where they are, for as long as they are there."""
        links = list(self._links(adapter))
        chains: dict[str, list[LoraWeights]] = {}
        for link in links:
            for path in dict.fromkeys((*link.linears, *link.biases)):
                if is_linear(self._modules[path]) or isinstance(self._modules[path], nn.Embedding):
                    weights = self.complete(path, link)
                    if (cut := self._cuts.get(path)) is not None:
                        weights = cut.of_adapter(weights, once=self._once)
                    chains.setdefault(path, []).append(weights)
            for key in dict.fromkeys(map(projection_of, link.experts)):
                experts = self._modules[key.rpartition(".")[0]]
                chains.setdefault(key, []).append(with_biases(experts, key, link.experts))
        parts: dict[tuple[LoraTable, int], LoraWeights] = {}
        for path, chain in chains.items():
            if path not in self._adapted:
                self._adapt(path)
            group, index = self._adapted[path]
            parts.update(group.parts(index, chain))
        return Filling(self, adapter, links, parts)

    @torch.inference_mode(False)
    @torch.no_grad()
    def put(self, slot: int, filling: Filling | None) -> None:
        """Fill a slot, or empty it. filling: of these layers."""
        if self.without_block:
            self._blocks.append(PointerBlock(self.without_block))
            self.without_block = []
        new = [] if filling is None else [filling]
        held = self._held.get(slot, [])
        self._held[slot] = [*held, *new]  # after an interrupt the slot may have parts of both
        alike = [one.kind for one in held] == [one.kind for one in new]
        if not alike:
            kept = {} if filling is None else filling.parts
            for table, linear in (place for one in held for place in one.parts if place not in kept):
                table.put(linear, slot, None)
        for one in new:
            for (table, linear), (weights, rows) in one.parts.items():
                table.put(linear, slot, weights, rows)
        for block in self._blocks:
            block.upload()
        self._replacements.put(slot, [] if filling is None else filling.links)
        if not alike:
            groups = dict.fromkeys(group for group, _ in self._adapted.values())
            self._settings = [group.look() for group in groups]
        before, self._last = self._last, (self._settings, self._replacements.places)
        self.layout += before != self._last
        self._held[slot] = new

    def complete(self, path: str, link: AdapterWeights) -> LoraWeights:
        """The matrices of a linear or an embedding, with gain and shift computed from magnitudes, biases and the base's weights.

        Valid until a weight changes.
        """
        module = self._modules[path]
        if (weights := link.linears.get(path)) is None:  # the adapter has only a bias here
            rows, columns = shape_of(module)
            empty = partial(torch.empty, device=self.device)
            weights = LoraWeights(empty(0, columns), empty(rows, 0), 1.0)
        gain, shift = None, None
        offset, bias = link.offsets.get(path), link.biases.get(path)
        if path in link.magnitudes:
            gain = link.magnitudes[path].float().flatten() / _norms(module, weights, self.rounded(f"{path}.weight"))
        if offset is not None:
            shift = weights.scale * offset.float()
        if bias is not None:
            shift = bias.float() - module.bias.float() + (0 if shift is None else shift)
        scale = weights.scale
        if not is_linear(module) and (factor := getattr(module, "embed_scale", None)) is not None:
            scale *= float(factor)
        return LoraWeights(weights.a, weights.b, scale, gain, shift)

    def _adapt(self, path: str) -> None:
        """Let a module that is not in a fused layer, or a parameter of experts, have adapters."""
        module = self._modules.get(path)
        if module is None:
            path = path.rpartition(".")[0]
            module = self._modules[path]
            groups = {
                name: Adapted(self, [width], [None], experts)
                for name, (experts, width, _) in expert_tables(module).items()
            }
            self._adapted |= {f"{path}.{name}": (group, 0) for name, group in groups.items()}
            adapt_experts(module, partial(self._expert_adapters, *groups.values()))
            return
        if isinstance(module, nn.Embedding):
            group = Adapted(self, [module.embedding_dim], [None])
            hook = self._after_embedding
        else:
            group, hook = self.group([path]), self._after_linear
        self._adapted[path] = group, 0
        self._hooked = True
        module.register_forward_hook(partial(hook, group))

    def _expert_adapters(self, first: Adapted, down: Adapted) -> ExpertAdapters | None:
        rows = first.rows or down.rows
        return None if rows is None else ExpertAdapters(first.tables, down.tables, rows.slots)

    def _after_linear(self, group: Adapted, _: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        if (rows := group.rows) is not None:
            group.apply(args[0].flatten(0, -2), out.view(-1, out.shape[-1]), rows)
        return out

    def _after_embedding(self, group: Adapted, _: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        if (rows := group.rows) is not None:
            for table in group.tables:
                self.ops.lora_embedding(args[0].flatten(), out.view(-1, out.shape[-1]), table, rows)
        return out


def _norms(module: Any, weights: LoraWeights, rounded: Tensor | None) -> Tensor:
    """Norms of the rows of a weight with its adapter, fp32 [N]. rounded: the copy that is used in place of the weight."""
    if isinstance(module, QuantisedLinear):
        return module.adapted_norms(weights.scale, weights.b, weights.a)
    base = module.weight if rounded is None else rounded
    if rounded is None and isinstance(module, nn.Embedding | Conv1D):  # which hold it column by column
        base = base.T
    squares = torch.zeros(base.shape[0], device=base.device, dtype=torch.float32)
    for columns, a in zip(*(torch.split(t, _NORM_COLUMNS, dim=1) for t in (base, weights.a)), strict=True):
        squares += (columns.float() + weights.scale * (weights.b.float() @ a.float())).square().sum(1)
    return squares.sqrt()


def _at_or_below(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")
