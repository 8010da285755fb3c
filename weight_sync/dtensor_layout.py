"""The layout of a DTensor: over which ranks a mesh cuts it, and which box of the whole tensor each of them holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from stoker.kernels.errors import UnsupportedModelError

Box = tuple[tuple[int, int], ...]
FLAT = (-1,)  # the shape of a tensor that is flattened
# Groups that were made for meshes over part of the world, by world and ranks. A process keeps those of the present world.
_GROUPS: dict[tuple[dist.ProcessGroup, tuple[int, ...]], dist.ProcessGroup] = {}


@dataclass(frozen=True)
class Layout:
    """Where the parts of tensors with one shape, placement and mesh are.

    boxes: by group rank, boxes of the tensor seen in ``shape`` (empty: its own). part: the shape of this rank's box.
    """

    group: dist.ProcessGroup | None  # None: every rank has the whole
    local: tuple[int, ...]  # the shape of this rank's local tensor
    boxes: tuple[Box, ...] = ()
    shape: tuple[int, ...] = ()
    part: tuple[int, ...] = ()


def device_of(mesh: DeviceMesh, of_parts: torch.device) -> torch.device:
    """The device on which a trainer computes with parts. These may be kept in host memory."""
    kind = mesh.device_type
    if kind == of_parts.type:
        return of_parts
    return torch.empty(0, device=kind).device  # the current device of that kind


def _splits(mesh: DeviceMesh, placements: Sequence[Any]) -> list[int]:
    """The dimensions of a mesh that shard; along the others there are equal copies."""
    return [i for i, p in enumerate(placements) if isinstance(p, Shard | _StridedShard) and mesh.size(i) > 1]


def group_over(mesh: DeviceMesh, placements: Sequence[Any]) -> dist.ProcessGroup | None:
    """The group of ranks with whose parts this rank's makes the whole; None where it has the whole, or is not in the mesh."""
    sharded, coordinate = _splits(mesh, placements), mesh.get_coordinate()
    if not sharded or coordinate is None:
        return None
    index = tuple(slice(None) if i in sharded else coordinate[i] for i in range(mesh.ndim))
    ranks = tuple(mesh.mesh[index].flatten().tolist())
    if len(sharded) > 1:
        return _group_of(ranks)
    group = mesh.get_group(sharded[0])
    if {*dist.get_process_group_ranks(group)} != {*ranks}:  # torch finds it by a name that is another world's now
        raise UnsupportedModelError(
            f"the model was sharded over the ranks {[*ranks]}, and the group of processes was made anew since, of others: load "
            "and shard it anew, and build a new engine"
        )
    return group


def layout_of(name: str, mesh: DeviceMesh, placements: Sequence[Any], shape: torch.Size) -> Layout:
    sizes = [mesh.size(i) for i in range(mesh.ndim)]
    known = all(isinstance(p, Shard | _StridedShard) or p.is_replicate() for p in placements)
    cuts = _cuts(shape, sizes, placements) if known else None
    if cuts is None or mesh.get_coordinate() is None:
        raise UnsupportedModelError(
            f"{name} is placed as {placements} on {mesh}, of which this rank cannot gather it: shard or replicate "
            "parameters over meshes that every rank of the engine is in"
        )
    places = _places(mesh)
    own = [high - low for low, high in cuts.box(sizes, places[dist.get_rank()])]
    local = cuts.as_sharded(own)
    sharded, group = _splits(mesh, placements), group_over(mesh, placements)
    if group is None:
        return Layout(None, local)
    of_group = [places[rank] for rank in dist.get_process_group_ranks(group)]
    if len({tuple(place[i] for i in sharded) for place in of_group}) < len(of_group):
        raise UnsupportedModelError(  # torch itself has lost the missing parts
            f"{name}, placed as {placements}, is not whole on the ranks {mesh.mesh.tolist()}, which are out of "
            "order: give its mesh ascending ones"
        )
    boxes = [cuts.box(sizes, place) for place in of_group]
    if all(box[1:] == boxes[0][1:] for box in boxes):
        # Flattened it can be cut anywhere. (A row of a layer's experts would be a whole matrix.)
        row = math.prod(shape[1:])
        boxes = [((low * row, high * row),) for (low, high), *_ in boxes]
        return Layout(group, local, tuple(boxes), FLAT, (math.prod(local),))
    return Layout(group, local, tuple(boxes), cuts.shape if cuts.packed else (), tuple(own))


def _group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    if sorted(ranks) == list(range(dist.get_world_size())):
        return world
    for key in [key for key in _GROUPS if key[0] is not world]:
        del _GROUPS[key]  # or it would keep threads and sockets of a world that is gone
    if (world, ranks) not in _GROUPS:
        # Since torch 2.15 its type allows for the number that a rank outside the group gets; this rank is within.
        made: Any = dist.new_group(list(ranks), use_local_synchronization=True)
        _GROUPS[world, ranks] = made
    return _GROUPS[world, ranks]


def _places(mesh: DeviceMesh) -> dict[int, list[int]]:
    """For each rank and each dimension of the mesh, the number of the part it has.

    That is its rank in the dimension's group. Torch sorts groups, so in a mesh in another order it is not its coordinate.
    """
    ranks = mesh.mesh
    places = [ranks.argsort(dim).argsort(dim).flatten() for dim in range(mesh.ndim)]
    return dict(zip(ranks.flatten().tolist(), torch.stack(places, dim=1).tolist(), strict=True))


@dataclass(frozen=True)
class _Cuts:
    """How a mesh cuts a tensor, seen in ``shape``.

    turns: (dimension of the mesh, dimension of the tensor that it cuts into chunks of rounded-up length), in order. packed: the
    dimensions of the tensor's own shape that are two here, with the number of parts in the first of these.
    """

    shape: tuple[int, ...]
    turns: tuple[tuple[int, int], ...]
    packed: Mapping[int, int]

    def box(self, sizes: Sequence[int], places: Sequence[int]) -> Box:
        """The box that the rank with these ``places`` holds."""
        box = [(0, n) for n in self.shape]
        for i, dim in self.turns:
            low, high = box[dim]
            length = -(-(high - low) // sizes[i])
            begin = min(low + length * places[i], high)
            box[dim] = (begin, min(begin + length, high))
        return tuple(box)

    def as_sharded(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """The lengths of a box in the tensor's own dimensions."""
        left = iter(lengths)
        found: list[int] = []
        while len(found) + len(self.packed) < len(self.shape):
            parts = next(left) if len(found) in self.packed else 1
            found.append(parts * next(left))
        return tuple(found)


def _cuts(shape: Sequence[int], sizes: Sequence[int], placements: Sequence[Any]) -> _Cuts | None:
    """How placements cut a tensor; None where that is not known.

    Mesh dimensions cut a tensor dimension from left to right, each the chunks of the one before. There are two kinds of strided
    placement. Where its factor is the number of parts that the dimensions to its right make (FSDP over tensor parallelism), it
    comes after these. Where it is alone, it cuts each of that many equal parts, such as gate and up packed into one tensor.
    """
    splits = [
        (isinstance(p, _StridedShard), i, p.dim % len(shape))
        for i, p in enumerate(placements)
        if isinstance(p, Shard | _StridedShard) and sizes[i] > 1
    ]
    packed: dict[int, int] = {}
    for strided, i, dim in splits:
        others = [other for _, other, of in splits if of == dim and other != i]
        if strided and (factor := int(placements[i].split_factor)) != math.prod(sizes[j] for j in others if j > i):
            if others or shape[dim] % factor:
                return None
            packed[dim] = factor
    whole: list[int] = []
    place = []
    for dim, length in enumerate(shape):
        if dim in packed:
            whole.append(packed[dim])
        place.append(len(whole))
        whole.append(length // packed.get(dim, 1))
    turns = sorted((strided, -i if strided else i, place[dim]) for strided, i, dim in splits)
    return _Cuts(tuple(whole), tuple((abs(i), dim) for _, i, dim in turns), packed)
