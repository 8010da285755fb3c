"""Reads what a trainer that shards its model holds on this rank, and where each rank's part belongs in the full tensors.

FSDP2 and tensor parallelism have DTensors, FSDP1 flat parameters of many tensors, ZeRO-3 a flat piece of each tensor. All of
them become ``Shards``: a local tensor and, for every rank of its group, the boxes of full tensors that its rows fill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from stoker.kernels.errors import EngineStateError, UnsupportedModelError
from stoker.weight_sync.bitsandbytes_state import is_laid_out_for_cpu, scales_of, state_of
from stoker.weight_sync.dtensor_layout import FLAT, Box, Layout, device_of, group_over, layout_of
from stoker.weight_sync.naming import inside, plain_name, tensors_of, walk, walk_adapters


class Piece(NamedTuple):
    """Rows of a rank's part from ``start`` on, and the box of a tensor, seen in ``shape`` (empty: its own), that they fill."""

    name: str
    start: int
    box: Box
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.box[0][1] - self.box[0][0]

    @property
    def row_numel(self) -> int:
        return math.prod(high - low for low, high in self.box[1:])

    def within(self, low: int, high: int) -> Piece | None:
        """What of this piece lies in rows ``low`` to ``high`` of the rank's part."""
        first, last = max(low, self.start), min(high, self.start + self.rows)
        if first >= last or not self.row_numel:
            return None
        begin = self.box[0][0] - self.start
        return Piece(self.name, first, ((begin + first, begin + last), *self.box[1:]), self.shape)

    def view(self, full: Tensor) -> Tensor:
        target = full.view(self.shape) if self.shape else full
        for dim, (low, high) in enumerate(self.box):
            target = target.narrow(dim, low, high - low)
        return target


@dataclass(frozen=True)
class Shards:
    """Tensors whose parts are gathered together: ``local`` [rows, ...] is this rank's, ``pieces`` are by group rank.

    device: where the trainer computes with them; ``local`` may be kept in host memory.
    """

    names: tuple[str, ...]
    group: dist.ProcessGroup
    device: torch.device
    local: Tensor
    pieces: tuple[tuple[Piece, ...], ...]

    def of(self, wanted: Callable[[str], bool]) -> Shards:
        """The same with only the tensors whose names are wanted."""
        pieces = tuple(tuple(p for p in of_rank if wanted(p.name)) for of_rank in self.pieces)
        return replace(self, names=tuple(filter(wanted, self.names)), pieces=pieces)

    @cached_property
    def rows(self) -> int:
        """The most rows that a rank has."""
        return max((p.start + p.rows for pieces in self.pieces for p in pieces), default=0)

    @cached_property
    def even(self) -> bool:
        """Whether it is one flattened tensor, of which every rank has equally many elements, in the order of the ranks."""
        boxes = [((i * self.rows, (i + 1) * self.rows),) for i in range(len(self.pieces))]
        return all(len(p) == 1 and p[0][1:] == (0, box, FLAT) for p, box in zip(self.pieces, boxes, strict=True))

    @cached_property
    def row_numel(self) -> int:
        """The most elements in a row of any rank."""
        return max((p.row_numel for pieces in self.pieces for p in pieces), default=0)


@dataclass
class Held:
    """All that a trainer holds on this rank. full: its own whole tensors. shapes, dtypes: of all tensors, as if whole."""

    full: dict[str, Tensor] = field(default_factory=dict)
    shards: list[Shards] = field(default_factory=list)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)  # a tied tensor's other names, to its first
    parameters: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)  # buffers that no checkpoint has
    adapters: set[str] = field(default_factory=set)  # tensors of adapters, of which only sharded ones are read
    states: dict[str, Any] = field(default_factory=dict)  # of each weight in 4 bits; its scales are whole tensors
    scales: set[str] = field(default_factory=set)  # names of these scales: the weight's, then their own

    @property
    def names(self) -> set[str]:
        return self.shapes.keys() | self.aliases.keys()

    @property
    def spoilt(self) -> list[str]:
        """Sharded weights that a forward has laid out anew for a CPU, as their states say: the parts do not follow that."""
        return [n for n, state in self.states.items() if n not in self.full and is_laid_out_for_cpu(state)]

    @property
    def beside(self) -> set[str]:
        """Names of tensors that are not the plain model's."""
        return self.adapters | self.scales

    def numbers(self, dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor, torch.dtype]]:
        """All tensors here with the dtype they are to have, without packed weights, whose bits are no numbers."""
        yield from ((name, tensor, dtypes[name]) for name, tensor in self.full.items() if name not in self.states)
        for s in self.shards:
            if self.states.keys().isdisjoint(s.names):
                name = s.names[0] if len(s.names) == 1 else f"a tensor among {s.names[0]} to {s.names[-1]}"
                yield from ((name, s.local, dtype) for dtype in {dtypes[n] for n in s.names})
            else:
                pieces = (p for p in s.pieces[dist.get_rank(s.group)] if p.name not in self.states)
                yield from ((p.name, s.local[p.start : p.start + p.rows], dtypes[p.name]) for p in pieces)

    def of(self, wanted: Callable[[str], bool]) -> Held:
        """The same with only the tensors whose names are wanted. What is sharded over one rank is whole."""
        shards = [s for s in (s.of(wanted) for s in self.shards) if s.names]
        full = {name: tensor for name, tensor in self.full.items() if wanted(name)}
        names = full.keys() | {name for s in shards for name in s.names}
        return Held(
            full=full,
            shards=shards,
            shapes={name: shape for name, shape in self.shapes.items() if name in names},
            dtypes={name: dtype for name, dtype in self.dtypes.items() if name in names},
            aliases={other: first for other, first in self.aliases.items() if first in names},
            parameters=self.parameters & names,
        )

    def add(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shapes[name], self.dtypes[name] = torch.Size(shape), dtype


def is_unit(module: nn.Module) -> bool:
    """Whether a module is FSDP1's wrapper, which holds a flat parameter."""
    return isinstance(module, FullyShardedDataParallel)


def has_units(model: nn.Module) -> bool:
    return any(is_unit(module) for _, module in (*walk(model), *walk_adapters(model)))


def is_shard(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) or getattr(tensor, "ds_tensor", None) is not None


def is_sharded(model: nn.Module) -> bool:
    """Whether this rank keeps only parts of the parameters, so that reading them takes communication.

    A model under FSDP2 counts as sharded even while a forward has left it gathered, which may be until the backward.
    """
    for path, module in chain(walk(model), walk_adapters(model)):  # mostly the first one tells
        if is_unit(module) or isinstance(module, FSDPModule):
            return True
        if any(is_shard(tensor) for _, tensor, _ in tensors_of([(path, module)])):
            return True
    return False


def check_processes(model: nn.Module) -> None:
    """Raise ``EngineStateError`` where parts would have to be gathered over a group of processes that is gone."""
    if not dist.is_initialized() and is_sharded(model):
        raise EngineStateError(
            "the model is in shards, and the group of processes that would gather them is no more (destroy_process_group, "
            "accelerator.end_training): update the weights before that. Rollouts go on under those that there are"
        )


def by_group(shards: Iterable[Shards]) -> dict[dist.ProcessGroup, list[Shards]]:
    """The shards of each group. Groups come in the order of their first shard, which is the same on all ranks."""
    found: dict[dist.ProcessGroup, list[Shards]] = {}
    for one in shards:
        found.setdefault(one.group, []).append(one)
    return found


def groups_of(model: nn.Module) -> dict[dist.ProcessGroup, torch.device]:
    """The groups that gather a model's shards, in the order in which ``read`` finds them, with the device each computes on.

    It needs so little that it works even where ``read`` would fail: the other ranks will be waiting.
    """
    check_processes(model)
    modules = [*walk(model), *walk_adapters(model)]
    _reshard(modules)
    found: dict[dist.ProcessGroup, torch.device] = {}
    seen = set()  # as a model has many tensors and few kinds of them
    for _, module in modules:
        handle: Any = module._handle if is_unit(module) else None
        if handle is not None and handle.uses_sharded_strategy:
            found.setdefault(handle.process_group, handle.device)
    for _, tensor, _ in tensors_of(modules):
        if isinstance(tensor, DTensor):
            kind = tensor.device_mesh, tensor.placements
            if kind not in seen and (group := group_over(*kind)) is not None:
                found.setdefault(group, device_of(tensor.device_mesh, tensor.device))
            seen.add(kind)
        elif is_shard(tensor):
            sharded: Any = tensor
            found.setdefault(sharded.ds_process_group, sharded.device)
    return found


def _reshard(modules: Iterable[tuple[str, nn.Module]]) -> None:
    for _, module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()  # or what a forward has gathered would be taken for the parameters; nothing is lost


def read(model: nn.Module) -> Held:
    """What the trainer holds now on this rank. Communicates only where a group of ranks is made for the first time."""
    check_processes(model)
    modules, of_adapters = list(walk(model)), list(walk_adapters(model))
    _reshard([*modules, *of_adapters])
    held = Held()
    for path, module in (*modules, *of_adapters):
        if is_unit(module):
            _read_flat_parameter(held, path, module)
    seen: dict[int, str] = {}
    layouts: dict[Any, Layout] = {}
    sharded = (found for found in tensors_of(of_adapters) if is_shard(found[1]))
    for name, tensor, in_checkpoints in chain(tensors_of(modules), sharded):
        if name in held.shapes or name in held.aliases:
            continue  # FSDP1's views of its flat parameter
        if id(tensor) in seen:
            held.aliases[name] = seen[id(tensor)]
            continue
        seen[id(tensor)] = name
        if isinstance(tensor, nn.Parameter):
            held.parameters.add(name)
        if not in_checkpoints:
            held.optional.add(name)
        if isinstance(tensor, DTensor):
            _read_dtensor(held, name, tensor, layouts)
        elif is_shard(tensor):
            _read_zero3(held, name, tensor)
        else:
            if isinstance(tensor, nn.Parameter):
                _check_has_data(name, tensor)
            held.add(name, tensor.shape, tensor.dtype)
            held.full[name] = tensor
    for path, module in modules:
        if inside(module) is None and (state := state_of(module)) is not None:
            _read_scales(held, f"{path}.weight", state)
    paths = {path for path, _ in of_adapters}
    held.adapters = {name for name in held.names if name.rpartition(".")[0] in paths}
    return held


def _read_scales(held: Held, name: str, state: Any) -> None:
    held.states[name] = state
    for scale_name, scale in scales_of(state, f"{name}."):
        held.add(scale_name, scale.shape, scale.dtype)
        held.full[scale_name] = scale.detach()
        held.scales.add(scale_name)


def _check_has_data(name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise UnsupportedModelError(
            f"parameter {name} holds no data here (meta): give it its numbers before the engine is built or its weights are updated"
        )


# -- DTensor ---------------------------------------------------------------------------------------------------------


def _read_dtensor(held: Held, name: str, tensor: DTensor, layouts: dict[Any, Layout]) -> None:
    """Read a DTensor. layouts: those found so far, as a model has many tensors and few shapes."""
    mesh, placements = tensor.device_mesh, tensor.placements
    held.add(name, tensor.shape, tensor.dtype)
    with torch.no_grad():  # autograd would take most of the time
        local: Tensor = tensor.to_local().detach()
    _check_has_data(name, local)
    key = mesh, placements, tensor.shape
    layout = layouts.get(key)
    if layout is None:
        layout = layouts[key] = layout_of(f"parameter {name}", mesh, placements, tensor.shape)
    if layout.local != local.shape:
        raise UnsupportedModelError(
            f"parameter {name}, placed as {placements}, holds {tuple(local.shape)} of {tuple(tensor.shape)} here, and not "
            f"{layout.local}: its sharding is not understood"
        )
    if layout.group is None:
        held.full[name] = local
        return
    device = device_of(mesh, local.device)
    pieces = tuple((Piece(name, 0, box, layout.shape),) for box in layout.boxes)
    held.shards.append(Shards((name,), layout.group, device, local.reshape(layout.part), pieces))


# -- flat ones -------------------------------------------------------------------------------------------------------


def _read_flat_parameter(held: Held, path: str, module: nn.Module) -> None:
    """Read a flat parameter of FSDP1: tensors flattened into one, which is cut into equal parts and padded at the end."""
    handle: Any = module._handle
    if handle is None:
        return
    flat = handle.flat_param
    named = partial(plain_name, path, handle._fully_sharded_module)
    for fqn, layout in zip(flat._fqns, flat._param_extensions, strict=True):  # of the DTensor that it was, if any
        if layout is not None and any(not placement.is_replicate() for placement in layout.placements):
            raise UnsupportedModelError(
                f"parameter {named(fqn)} is cut by tensor parallelism and then by FSDP1, which is not gathered: use FSDP2 "
                "(fully_shard) over tensor parallelism"
            )
    spans: list[tuple[str, int, int]] = []
    names, offset = iter(range(len(flat._fqns))), 0
    padding = getattr(flat, "_is_padding_mask", None) or [False] * len(flat._numels_with_padding)
    for numel, is_padding in zip(flat._numels_with_padding, padding, strict=True):
        if not is_padding:
            i = next(names)
            name = named(flat._fqns[i])
            spans.append((name, offset, numel))
            held.add(name, flat._shapes[i], flat.dtype)
            held.parameters.add(name)
        offset += numel
    for leaf, _, of_module, primary_leaf, _, of_primary in flat._shared_param_infos:
        first, other = (named(f"{m}.{n}" if m else n) for m, n in ((of_primary, primary_leaf), (of_module, leaf)))
        held.aliases[other] = first
    local = getattr(flat, "_local_shard", flat).detach()
    if not handle.uses_sharded_strategy:
        for name, start, numel in spans:
            held.full[name] = local[start : start + numel].view(held.shapes[name])
        return
    group = handle.process_group
    pieces = _cut(spans, local.numel(), group.size())
    held.shards.append(Shards(tuple(name for name, _, _ in spans), group, handle.device, local, pieces))


def _read_zero3(held: Held, name: str, parameter: Any) -> None:
    """Read a parameter of DeepSpeed ZeRO-3: each is flattened, cut into equal parts, and padded at the end."""
    group = parameter.ds_process_group
    local, numel = parameter.ds_tensor.detach().view(-1), int(parameter.ds_numel)
    if local.numel() * group.size() < numel:
        raise UnsupportedModelError(
            f"parameter {name} is partitioned by ZeRO-3 and its part is not in memory (NVMe offload?): keep parameters in "
            "device or host memory"
        )
    if hasattr(parameter.ds_tensor, "ds_quant_scale"):
        raise UnsupportedModelError(
            f"parameter {name} is partitioned by ZeRO-3 and quantised: switch zero_quantized_nontrainable_weights off"
        )
    held.add(name, torch.Size(parameter.ds_shape), local.dtype)
    pieces = _cut([(name, 0, numel)], local.numel(), group.size())
    held.shards.append(Shards((name,), group, parameter.device, local, pieces))


def _cut(spans: Sequence[tuple[str, int, int]], length: int, ranks: int) -> tuple[tuple[Piece, ...], ...]:
    """For each rank, which of the ``spans`` (name, start, numel) of a flat tensor lie in its ``length`` elements."""

    def of(rank: int) -> Iterator[Piece]:
        low, high = rank * length, (rank + 1) * length
        for name, start, numel in spans:
            first, last = max(low, start), min(high, start + numel)
            if first < last:
                yield Piece(name, first - low, ((first - start, last - start),), FLAT)

    return tuple(tuple(of(rank)) for rank in range(ranks))
