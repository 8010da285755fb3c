"""Reads what a trainer that shards its model holds on this rank, and where each rank's part belongs in the full tensors.

FSDP2 and tensor parallelism have DTensors, FSDP1 flat parameters of many tensors, ZeRO-3 a flat piece of each tensor. All of
them become ``Shards``: a local tensor and, for every rank of its group, the boxes of full tensors that its rows fill.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from stoker.kernels.errors import EngineStateError, UnsupportedModelError
from stoker.weight_sync.bitsandbytes_state import scales_of, state_of
from stoker.weight_sync.dtensor_layout import FLAT, Layout, device_of, group_over, layout_of
from stoker.weight_sync.held import Held, Piece, Shards, part_of
from stoker.weight_sync.module_tree import Tree
from stoker.weight_sync.naming import inside, plain_name, tensors_of, walk, walk_adapters


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


def lies_in_modules(model: nn.Module) -> bool:
    """Whether all tensors, or their parts, are what modules hold, as FSDP2 leaves them: FSDP1 and ZeRO-3 have their own places."""
    modules = [*walk(model), *walk_adapters(model)]
    own = (tensor for _, tensor, _ in tensors_of(modules) if not isinstance(tensor, DTensor))
    return not any(is_unit(module) for _, module in modules) and not any(map(is_shard, own))


def units_of(model: nn.Module) -> list[FSDPModule]:
    """The modules of a model that FSDP2 gathers and reshards by themselves."""
    return [module for _, module in (*walk(model), *walk_adapters(model)) if isinstance(module, FSDPModule)]


def reshard(units: Iterable[FSDPModule]) -> None:
    """Have modules hold their shards, or what a forward has gathered would be taken for the parameters; nothing is lost."""
    for unit in units:
        unit.reshard()


def check_processes(model: nn.Module) -> None:
    """Raise ``EngineStateError`` where parts would have to be gathered over a group of processes that is gone."""
    if not dist.is_initialized() and is_sharded(model):
        raise EngineStateError(
            "the model is in shards, and the group of processes that would gather them is no more (destroy_process_group, "
            "accelerator.end_training): update the weights before that. Rollouts go on under those that there are"
        )


def groups_of(model: nn.Module) -> dict[dist.ProcessGroup, torch.device]:
    """The groups that gather a model's shards, in the order in which ``read`` finds them, with the device each computes on.

    It needs so little that it works even where ``read`` would fail: the other ranks will be waiting.
    """
    check_processes(model)
    reshard(units_of(model))
    modules = [*walk(model), *walk_adapters(model)]
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


def read(model: nn.Module) -> Held:
    """What the trainer holds now on this rank. Communicates only where a group of ranks is made for the first time."""
    check_processes(model)
    reshard(units_of(model))
    modules, of_adapters = list(walk(model)), list(walk_adapters(model))
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
    homes = {path: ref(module) for path, module in of_adapters}
    held.homes = {name: homes[path] for name in held.names if (path := name.rpartition(".")[0]) in homes}
    held.adapters = {*held.homes}
    return held


class Reader:
    """Reads what a trainer holds, again and again: quickly where the model still has the same tensors at the same places.

    The parts of DTensors are not kept: a trainer may move them, and need the memory. The DTensors are: one that is replaced by
    another (``load_state_dict(assign=True)``) has its memory until the next read. FSDP1 and ZeRO-3 are read anew each time, and
    so are packed weights, whose scales lie in no module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tree: Tree | None = None  # as the model was
        self.held: Held | None = None  # what is remembered; None: nothing
        self._units: list[FSDPModule] = []
        self._world: dist.ProcessGroup | None = None

    @property
    def has_parts(self) -> bool:
        """Whether what is remembered is in parts."""
        return self._tree is not None and self._tree.has_parts

    def read(self) -> Held:
        """As ``shards.read``."""
        if (held := self.remembered()) is None:
            self.forget()
            units = units_of(self._model)
            reshard(units)
            # First, so that changes made meanwhile are seen the next time.
            tree = Tree(self._model) if lies_in_modules(self._model) else None
            held = read(self._model)
            if tree is not None and not held.states:
                self._tree, self.held, self._units, self._world = tree, held.without_parts(), units, _world()
        return held

    def remembered(self) -> Held | None:
        """What was read last, if it is still so; with its parts as they are now."""
        if self._tree is None or self.held is None or (self.has_parts and self._world is not _world()):
            return None
        reshard(self._units)
        return self.held.with_parts() if self._tree.same() else None

    def lies_as_read(self) -> bool:
        """Whether the model is as it was read, and remembered. It reshards nothing, and what is gathered is not as it was."""
        return self._tree is not None and self._tree.same()

    def forget(self) -> None:
        self._tree, self.held, self._units = None, None, []


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


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
    mesh, placements, local = tensor.device_mesh, tensor.placements, part_of(tensor)
    held.add(name, tensor.shape, tensor.dtype)
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
        held.full[name], held.whole[name] = local, tensor
        return
    device = device_of(mesh, local.device)
    pieces = tuple((Piece(name, 0, box, layout.shape),) for box in layout.boxes)
    shape = layout.part
    held.shards.append(
        Shards((name,), layout.group, device, local.dtype, lambda: part_of(tensor).reshape(shape), pieces)
    )


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

    def read() -> Tensor:
        local: Tensor = getattr(flat, "_local_shard", flat)
        return local.detach()

    local = read()
    if not handle.uses_sharded_strategy:
        for name, start, numel in spans:
            held.full[name] = local[start : start + numel].view(held.shapes[name])
        return
    group = handle.process_group
    pieces = _cut(spans, local.numel(), group.size())
    held.shards.append(Shards(tuple(name for name, _, _ in spans), group, handle.device, local.dtype, read, pieces))


def _read_zero3(held: Held, name: str, parameter: Any) -> None:
    """Read a parameter of DeepSpeed ZeRO-3: each is flattened, cut into equal parts, and padded at the end."""
    group = parameter.ds_process_group

    def read() -> Tensor:
        local: Tensor = parameter.ds_tensor.detach().view(-1)
        return local

    local, numel = read(), int(parameter.ds_numel)
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
    held.shards.append(Shards((name,), group, parameter.device, local.dtype, read, pieces))


def _cut(spans: Sequence[tuple[str, int, int]], length: int, ranks: int) -> tuple[tuple[Piece, ...], ...]:
    """For each rank, which of the ``spans`` (name, start, numel) of a flat tensor lie in its ``length`` elements."""

    def of(rank: int) -> Iterator[Piece]:
        low, high = rank * length, (rank + 1) * length
        for name, start, numel in spans:
            first, last = max(low, start), min(high, start + numel)
            if first < last:
                yield Piece(name, first - low, ((first - start, last - start),), FLAT)

    return tuple(tuple(of(rank)) for rank in range(ranks))
