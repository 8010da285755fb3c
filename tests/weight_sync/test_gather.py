"""Shards of every layout, cut into buckets of any size, come together as the whole tensors. No processes: a thread a rank."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from stoker.weight_sync import dtensor_layout
from stoker.weight_sync import gather as gathering
from stoker.weight_sync import shards as sharding
from stoker.weight_sync.held import Piece, Shards

CPU = torch.device("cpu")


@dataclass(eq=False)
class World:
    """Ranks that run in threads, and the groups they make."""

    size: int

    def __post_init__(self) -> None:
        self.local = threading.local()
        self.groups: dict[tuple[int, ...], Group] = {}
        self.failed: list[BaseException] = []

    @property
    def rank(self) -> int:
        return self.local.rank

    def group(self, ranks: Sequence[int]) -> Group:
        return self.groups.setdefault(key := tuple(sorted(ranks)), Group(self, key))

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        found: list[Any] = [None] * self.size

        def main(rank: int) -> None:
            self.local.rank = rank
            try:
                found[rank] = function(rank)
            except BaseException as error:
                self.failed.append(error)
                for group in self.groups.values():
                    group.barrier.abort()

        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        real = [error for error in self.failed if not isinstance(error, threading.BrokenBarrierError)]
        for error in real or self.failed:
            raise error
        return found


class Group:
    def __init__(self, world: World, ranks: tuple[int, ...]) -> None:
        self.world, self.ranks = world, ranks
        self.barrier = threading.Barrier(len(ranks), timeout=20)
        self.shares: dict[int, Tensor] = {}

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self.world.rank)

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: "nccl")


def all_gather(flat: Tensor, share: Tensor, *, group: Group, async_op: bool) -> Any:
    """What others sent is there once it is waited for, and not before."""
    assert async_op and flat.numel() == group.size() * share.numel()
    group.shares[group.rank()] = share.clone()
    group.barrier.wait()
    came = [group.shares[place] for place in range(group.size())]
    group.barrier.wait()
    others = flat.view(group.size(), -1)
    others[[place for place in range(group.size()) if place != group.rank()]] = 0xEE

    def wait() -> None:
        assert torch.equal(others[group.rank()], came[group.rank()]), "a share was written to while it was sent"
        torch.stack(came, out=others)

    return SimpleNamespace(wait=wait)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(8)
    monkeypatch.setattr(gathering, "all_gather", all_gather)
    calls = SimpleNamespace(
        get_rank=lambda: world.rank,
        get_process_group_ranks=lambda group: list(group.ranks),
        group=SimpleNamespace(WORLD=world.group(range(world.size))),
        get_world_size=lambda: world.size,
        new_group=lambda ranks, **_: world.group(ranks),
    )
    for module in (dtensor_layout, sharding):
        monkeypatch.setattr(module, "dist", calls)
    return world


class Mesh:
    """As torch's, whose groups go by ascending ranks."""

    def __init__(self, world: World, ranks: Any) -> None:
        self.world, self.mesh = world, torch.tensor(ranks)
        self.ndim = self.mesh.ndim

    def size(self, dim: int) -> int:
        return self.mesh.shape[dim]

    def get_coordinate(self) -> list[int] | None:
        found = (self.mesh == self.world.rank).nonzero()
        return found[0].tolist() if len(found) else None

    def along(self, dim: int) -> list[int]:
        at = [slice(None) if d == dim else c for d, c in enumerate(self.get_coordinate() or [])]
        return self.mesh[tuple(at)].tolist()

    def get_group(self, dim: int) -> Group:
        return self.world.group(self.along(dim))


def part_of(full: Tensor, mesh: Mesh, placements: Sequence[Any]) -> Tensor:
    """What this rank has of it, by ``torch.chunk``: strided shardings cut what the others left, or each of several parts."""
    split = [(isinstance(p, _StridedShard), dim, p) for dim, p in enumerate(placements) if hasattr(p, "dim")]
    alone = len({p.dim for _, _, p in split}) == len(split)
    for strided, mesh_dim, p in sorted(split, key=lambda s: s[:2]):
        place = sorted(mesh.along(mesh_dim)).index(mesh.world.rank)
        found = []
        for packed in full.chunk(p.split_factor, p.dim) if strided and alone else [full]:
            parts = packed.chunk(mesh.size(mesh_dim), p.dim)
            found.append(parts[place] if place < len(parts) else packed.narrow(p.dim, 0, 0))
        full = torch.cat(found, p.dim)
    return full


def by_layout(name: str, full: Tensor, mesh: Mesh, placements: Sequence[Any]) -> Shards | None:
    """None where it is whole on this rank."""
    layout = dtensor_layout.layout_of(name, mesh, placements, full.shape)
    local = part_of(full, mesh, placements)
    assert layout.local == tuple(local.shape)
    if layout.group is None:
        assert torch.equal(local, full)
        return None
    by_rows = not any(getattr(p, "dim", 0) for p in placements) and (
        len(placements) > 1 or type(placements[0]) is Shard
    )
    assert not by_rows or layout.shape == dtensor_layout.FLAT, "what is cut by rows alone can be cut anywhere"
    local = local.reshape(layout.part)
    pieces = tuple((Piece(name, 0, box, layout.shape),) for box in layout.boxes)
    return Shards((name,), layout.group, CPU, local.dtype, lambda: local.contiguous(), pieces)


def test_strided_shards_cut_from_right_to_left(world: World) -> None:
    """As torch defines them: each splits what the dimensions of the mesh to its right have left; FSDP over two others."""
    world.local.rank = 0
    mesh: Any = Mesh(world, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    placements = [_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)]
    found = dtensor_layout.layout_of("w", mesh, placements, torch.Size([8]))
    starts = [low for ((low, _),) in found.boxes]
    assert starts == [4 * c + 2 * b + a for a in (0, 1) for b in (0, 1) for c in (0, 1)]


def flat(names: Sequence[str], full: dict[str, Tensor], group: Group, gap: int) -> Shards:
    """Tensors flattened into one, with padding between them and at the end, cut into equal parts."""
    spans, content = [], []
    offset = 0
    for name in names:
        spans.append((name, offset, full[name].numel()))
        content += [full[name].flatten(), torch.full((gap,), -7.0)]
        offset += full[name].numel() + gap
    length = -(-offset // group.size())
    padded = torch.cat([*content, torch.full((length * group.size() - offset,), -9.0)])
    local = padded.view(group.size(), -1)[group.rank()]
    return Shards(tuple(names), group, CPU, local.dtype, lambda: local, sharding._cut(spans, length, group.size()))


LINE = (0, 1, 2, 3, 4, 5, 6, 7)
TABLE = ((0, 1, 2, 3), (4, 5, 6, 7))
CUBE = (((0, 1), (2, 3)), ((4, 5), (6, 7)))
KINDS: dict[str, tuple[Any, Sequence[Any]]] = {
    "rows": (LINE, [Shard(0)]),
    "columns": (LINE, [Shard(1)]),
    "rows of copies": (TABLE, [Replicate(), Shard(0)]),
    "columns of copies": (TABLE, [Shard(1), Replicate()]),
    "rows twice": (TABLE, [Shard(0), Shard(0)]),
    "rows and columns": (TABLE, [Shard(0), Shard(1)]),
    "columns and rows": (TABLE, [Shard(1), Shard(0)]),
    "rows over rows": (TABLE, [_StridedShard(0, split_factor=4), Shard(0)]),
    "around copies": (CUBE, [Shard(0), Replicate(), Shard(1)]),
    "packed rows": (LINE, [_StridedShard(0, split_factor=2)]),
    "rows and packed columns": (TABLE, [Shard(0), _StridedShard(1, split_factor=2)]),
    "packed columns of copies": (CUBE, [_StridedShard(1, split_factor=3), Replicate(), Replicate()]),
    "another order": ((2, 0, 7, 1, 3, 6, 5, 4), [Shard(0)]),
    "columns in another order": (((3, 0), (6, 1), (2, 7), (4, 5)), [Shard(1), Replicate()]),
    "copies": (TABLE, [Replicate(), Replicate()]),
}
SHAPES = [(6, 4), (7, 5), (13, 6, 2), (5, 7), (1, 9), (24, 3), (2, 1), (6, 6, 2)]
PACKED = [(6, 12), (24, 6), (12, 6, 2)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("seed", range(8))
def test_the_parts_of_every_layout_make_the_whole_again(world: World, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    names = [f"t{i}" for i in range(24)]
    full = {name: torch.randn(draw.choice(SHAPES)) for name in names}
    dtypes = {name: draw.choice(DTYPES) for name in names}
    kinds = {name: draw.choice([*KINDS, "alone", "flat", "flat"]) for name in names}
    full |= {name: torch.randn(draw.choice(PACKED)) for name in names if "packed" in kinds[name]}
    together = [name for name in names if kinds[name] == "flat"]
    left_out = set(draw.sample(names, 3))
    memory, gap = draw.choice([64, 700, 3000, 10**6]), draw.choice([0, 3])

    def is_gathered(name: str) -> bool:
        return name not in left_out and kinds[name] != "copies"

    def main(rank: int) -> dict[str, Tensor]:
        found: list[Shards | None] = []
        for name in names:
            if name in together[:1]:
                found += [flat(part, full, world.group(LINE), gap) for part in (together[:2], together[2:]) if part]
            elif kinds[name] == "alone":
                found.append(flat([name], full, world.group(LINE), 0))
            elif name not in together:
                mesh, placements = KINDS[kinds[name]]
                found.append(by_layout(name, full[name], Mesh(world, mesh), placements))
        shards = [s.of(lambda name: name not in left_out) for s in found if s is not None]
        assert {name for s in shards for name in s.names} == {name for name in names if is_gathered(name)}
        buckets = gathering.plan([s for s in shards if s.names], dtypes, memory, CPU)
        for bucket in buckets:
            row = len(bucket.parts) == 1 and bucket.parts[0].high == bucket.parts[0].low + 1
            least = 16 * bucket.group.size()
            assert row or 2 * bucket.share * bucket.group.size() <= max(memory * 31 // 32, 2 * least)
        tensors = {name: torch.full(full[name].shape, 5.0, dtype=dtypes[name]) for name in names}
        placed, told, count = list[int](), list[tuple[float, int]](), len(buckets)

        def meanwhile(share: float) -> None:
            told.append((share, len(placed)))

        buffers = gathering.buffers_for(buckets, CPU)
        assert gathering.gather(buckets, buffers, tensors, placed.append, meanwhile) is None
        assert placed == [*range(count)]
        assert told == [((i + 1) / count, max(0, i - 1)) for i in range(count)], "with two under way"
        return tensors

    for rank, tensors in enumerate(world.run(main)):
        for name, tensor in tensors.items():
            expected = full[name] if is_gathered(name) else torch.full_like(full[name], 5.0)
            assert torch.equal(tensor, expected.to(dtypes[name])), (rank, name, kinds[name])


def test_no_more_is_sent_than_is_wanted(world: World) -> None:
    """What is cast to a narrower dtype is so before; of a flat parameter only the rows go that have some of what is wanted."""
    full = {name: torch.randn(count) for name, count in {"first": 1140, "second": 60, "third": 1200}.items()}
    memory = 2 * 8 * 2 * 62 * 32 // 31  # two buckets of 62 bfloat16 from each of 8 ranks, which come as 56

    def main(rank: int) -> list[int]:
        shards = flat([*full], full, world.group(LINE), 0)
        sent = []
        for wanted in ({*full}, {"second"}):
            of_wanted = shards.of(lambda name, wanted=wanted: name in wanted)
            buckets = gathering.plan([of_wanted], dict.fromkeys(full, torch.bfloat16), memory, CPU)
            sent.append(sum(bucket.share for bucket in buckets))
        return sent

    for sent in world.run(main):
        # 300 rows, 56 at a time and then 20; of these the last 60 of the fourth rank. To a whole 16 bytes.
        assert sent == [5 * 112 + 48, 112 + 48]


@pytest.mark.parametrize("memory", [64, 10**6])
def test_what_is_wanted_may_end_before_the_parts_of_the_ranks_do(world: World, memory: int) -> None:
    full = {name: torch.randn(count) for name, count in {"first": 10, "second": 83, "third": 17}.items()}

    def main(rank: int) -> None:
        for wanted in ({name} for name in full):
            shards = flat([*full], full, world.group(LINE), 0).of(lambda name, wanted=wanted: name in wanted)
            buckets = gathering.plan([shards], dict.fromkeys(full, torch.float32), memory, CPU)
            tensors = {name: torch.zeros_like(full[name]) for name in full}
            assert gathering.gather(buckets, gathering.buffers_for(buckets, CPU), tensors, lambda _: None) is None
            for name, tensor in tensors.items():
                assert torch.equal(tensor, full[name] if name in wanted else torch.zeros_like(tensor)), name

    world.run(main)
