"""The engine's own copy of the weights, and its upkeep: in another dtype, or whole where the trainer holds shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stoker.kernels.errors import UnsupportedModelError, WeightsMismatchError, WeightTransferError
from stoker.weight_sync.checksum import checksums, unfit
from stoker.weight_sync.gather import MEMORY_BYTES, agree, gather, plan
from stoker.weight_sync.naming import engine_dtypes, unwrap
from stoker.weight_sync.scales import give_state, with_scales
from stoker.weight_sync.shards import Held, Shards, read

_ALIGNMENT = 256  # bytes
_PINNED_BYTES = 2**28  # torch rounds each piece of pinned memory up to a power of two


class Mirror:
    """Named tensors in one storage, those of a group side by side, which can be given back and taken again.

    The tensors stay the same objects, and views of the storage, through all of ``offload``, ``release`` and ``restore``;
    their addresses need not. ``complete``: whether they hold one set of weights, and not none or parts of two.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        dtypes: Mapping[str, torch.dtype],
        aliases: Mapping[str, str],
        groups: Sequence[tuple[str, ...]],
        device: torch.device,
    ) -> None:
        """aliases: a tied tensor's other names, to the one in ``shapes``."""
        places: dict[str, int] = {}
        grouped: list[tuple[str, ...]] = []
        end = 0
        for group in groups:
            alike = all(name in shapes and name not in places for name in group)
            if alike and len({(dtypes[name], shapes[name][1:]) for name in group}) == 1 == len({*group}) // len(group):
                grouped.append(group)
                end = self._put(group, shapes, dtypes, places, end)
        for name in shapes:
            if name not in places:
                end = self._put((name,), shapes, dtypes, places, end)
        self._data = torch.empty(end, dtype=torch.uint8, device=device)
        self.nbytes = end
        self.tensors = {name: self._view(places[name], shapes[name], dtypes[name]) for name in shapes}
        self.tensors.update({other: self.tensors[first] for other, first in aliases.items()})
        self.fused = {
            group: self._view(
                places[group[0]],
                torch.Size((sum(shapes[name][0] for name in group), *shapes[group[0]][1:])),
                dtypes[group[0]],
            )
            for group in grouped
        }
        self.complete = False
        self._host: list[Tensor] | None = None

    @staticmethod
    def _put(
        group: tuple[str, ...],
        shapes: Mapping[str, torch.Size],
        dtypes: Mapping[str, torch.dtype],
        places: dict[str, int],
        end: int,
    ) -> int:
        end = -(-end // _ALIGNMENT) * _ALIGNMENT
        for name in group:
            places[name] = end
            end += math.prod(shapes[name]) * dtypes[name].itemsize
        return end

    def _view(self, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return self._data[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    @property
    def resident(self) -> bool:
        """Whether the weights are in the device's memory."""
        return self.nbytes == 0 or self._data.untyped_storage().nbytes() > 0

    def offload(self) -> None:
        """Move the weights to host memory (pinned, for a device), and give the device's back."""
        if self.resident:
            self._settle()
            pinned = self._data.device.type != "cpu"
            parts = torch.split(self._data, _PINNED_BYTES)
            host = [torch.empty(len(part), dtype=torch.uint8, device="cpu", pin_memory=pinned) for part in parts]
            for to, part in zip(host, parts, strict=True):
                to.copy_(part, non_blocking=True)
            self._settle()
            self._host = host
            self._data.untyped_storage().resize_(0)

    def _settle(self) -> None:
        """Wait for what was launched to write or read the weights, under whatever stream: their memory is given away."""
        torch.get_device_module(self._data.device).synchronize(self._data.device)

    def release(self) -> None:
        """Give all memory back. What was held is gone: after ``restore`` comes a complete update."""
        self._host, self.complete = None, False
        self._settle()
        self._data.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take the memory again, and what was offloaded back. Any exception leaves everything as it was."""
        if not self.resident:
            try:
                self._data.untyped_storage().resize_(self.nbytes)
                if self._host is not None:
                    for part, host in zip(torch.split(self._data, _PINNED_BYTES), self._host, strict=True):
                        part.copy_(host, non_blocking=True)
                    self._settle()
            except BaseException:  # an interrupt, say: memory without its numbers must not pass for weights
                self._settle()
                self._data.untyped_storage().resize_(0)
                raise
            self._host = None


class MirroredSource:
    """Keeps a mirror of what the trainer holds: whole tensors in another dtype or place, or shards of any kind.

    Of adapters it holds what is sharded, in the trainer's dtype; what is whole the engine reads where it is. Weights in 4
    bits it holds as they are packed, with their scales.

    A pull moves only tensors whose checksum changed since the last one: it reads what this rank holds, and writes what is
    new. Shards are gathered bucket by bucket straight into the mirror, one gather under way while the one before is put in
    place. Both take at most ``gather_bytes`` besides the mirror, Gloo's own buffers among them (a tensor that is sharded
    along another dimension than its first goes at least one row at a time); checksums are made before that, on a CPU with
    some 5 MiB. Ranks that find other tensors changed take part in each other's gathers. All that can be refused is refused
    before the first byte is written. A gather that fails half-way leaves the mirror in parts old and new: ``complete`` is
    False until a pull succeeds. (A second mirror would keep the old version, and double what this one takes.)
    """

    kind = "mirror"

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        device: torch.device | None,
        *,
        check_finite: bool = False,
        gather_bytes: int = MEMORY_BYTES,
    ) -> None:
        self.model = model
        self._gather_bytes = gather_bytes
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._wanted = dtype
        self._check_finite = check_finite
        held = self._read()
        self._shapes, self._aliases = held.shapes, held.aliases
        self._adapters, self._beside, self._packed = held.adapters, held.beside, held.states
        parameters = held.parameters - held.adapters  # these stay in the trainer's dtype
        self._dtypes = engine_dtypes(model, held.dtypes, parameters, dtype)
        kinds = {(held.dtypes[name], self._dtypes[name]) for name in parameters}
        self.wider = {own: wide for own, wide in kinds if own != wide == torch.promote_types(own, wide)}
        self.optional = held.optional
        own = [*(s.device for s in held.shards), *(t.device for t in held.full.values()), torch.device("cpu")][0]
        device = device or own
        self.converts = self._dtypes != held.dtypes or device.type != own.type  # so that it holds other bits
        self.device = torch.empty(0, device=device).device  # "cuda" has no index, and its tensors' device has
        sizes: dict[torch.dtype, int] = {}
        for name in parameters - self._packed.keys():  # packed ones say nothing of what they are computed in
            sizes[self._dtypes[name]] = sizes.get(self._dtypes[name], 0) + held.shapes[name].numel()
        self.dtype = max(sizes, key=lambda d: sizes[d], default=torch.float32)
        self.mirror: Mirror | None = None
        self._seen: dict[tuple[str, ...], int] = {}
        self._from_elsewhere = False

    @property
    def module(self) -> nn.Module:
        return unwrap(self.model)

    @property
    def nbytes(self) -> int:
        return self.mirror.nbytes if self.mirror is not None else 0

    @property
    def complete(self) -> bool:
        return self.mirror is not None and self.mirror.complete

    def names(self) -> set[str]:
        held = self._read()
        return held.names - held.beside

    def tensors(self, groups: Sequence[tuple[str, ...]] = ()) -> dict[str, Tensor]:
        """The mirror's, which is made at the first call with the layout that ``groups`` asks for."""
        if self.mirror is None:
            self.mirror = Mirror(self._shapes, self._dtypes, self._aliases, groups, self.device)
            self._give_states(self.mirror)
        return {name: tensor for name, tensor in self.mirror.tensors.items() if name not in self._beside}

    def _give_states(self, mirror: Mirror) -> None:
        for name, state in self._packed.items():
            give_state(mirror.tensors[name], with_scales(state, f"{name}.", mirror.tensors, self.device))

    @property
    def adapters(self) -> dict[str, Tensor]:
        return {name: self.mirror.tensors[name] for name in self._adapters} if self.mirror is not None else {}

    def rehome(self, groups: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], Tensor]:
        assert self.mirror is not None
        return {group: self.mirror.fused[group] for group in groups if group in self.mirror.fused}

    def bind(self) -> None:
        """Nothing to remember: what the trainer holds is read anew at every pull."""

    def moved(self, module: nn.Module) -> bool:
        return False

    def check(self) -> None:
        """Nothing that can move."""

    def overwritten(self) -> None:
        """The mirror has been filled from elsewhere: the model here is not looked at before the next pull."""
        assert self.mirror is not None
        if not self.mirror.complete:  # dropped: buffers that no checkpoint has did not come either
            full = self._read().full
            names = [name for name in self._shapes if name in self.optional and name in full]
            _copy([self.mirror.tensors[name] for name in names], [full[name] for name in names])
        self.mirror.complete |= not self._adapters  # which did not come, and may have been dropped
        self._from_elsewhere, self._seen = True, {}

    def catch_up(self) -> bool:
        held = self._read()
        return not held.shards and not self._from_elsewhere and self._pull(held) > 0

    def pull(self) -> int:
        return self._pull(self._read())

    @property
    def resident(self) -> bool:
        return self.mirror is not None and self.mirror.resident

    def give_back(self, *, drop: bool) -> None:
        assert self.mirror is not None
        if drop:
            self.mirror.release()
        else:
            self.mirror.offload()

    def take_again(self) -> None:
        assert self.mirror is not None
        self.mirror.restore()

    def release(self) -> None:
        """The trainer was never touched."""
        self.mirror, self._seen = None, {}

    # -- how it is done ----------------------------------------------------------------------------------------------

    def _read(self) -> Held:
        return read(self.model, self._group_of)

    def _group_of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        if sorted(ranks) == list(range(dist.get_world_size())):
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self._groups[ranks]

    def _pull(self, held: Held) -> int:
        mirror = self.mirror
        assert mirror is not None
        refusal = self._refusal(held, mirror)
        full = [name for name in held.full if name in mirror.tensors]
        whole: list[tuple[str, ...]] = [(name,) for name in full]
        now = dict(zip(whole, checksums([held.full[n] for n in full], self.device), strict=True))
        now.update(
            zip([s.names for s in held.shards], checksums([s.local for s in held.shards], self.device), strict=True)
        )
        before = self._seen if mirror.complete else {}
        changed = {names for names, number in now.items() if before.get(names) != number}
        if held.shards:
            refusal = self._agree(held.shards, changed, refusal)
        if refusal is not None:
            raise refusal
        self._packed = held.states
        self._give_states(mirror)
        full = [name for name in full if (name,) in changed]
        # Group by group: what a group agreed on then decides its buckets, whatever lies between and changed elsewhere only.
        groups = list(dict.fromkeys(s.group for s in held.shards))
        shards = [s for group in groups for s in held.shards if s.group is group and s.names in changed]
        if not changed:
            mirror.complete, self._from_elsewhere = True, False
            return 0
        mirror.complete = False
        _copy([mirror.tensors[name] for name in full], [held.full[name] for name in full])
        try:
            gather(plan(shards, self._dtypes, self._gather_bytes, self.device), mirror.tensors, self.device)
        except WeightTransferError as error:
            raise WeightTransferError(
                f"{error}. The weights are now in parts old and new: the engine refuses to generate until an update succeeds"
            ) from error
        mirror.complete, self._from_elsewhere, self._seen = True, False, now
        moved = [*full, *(name for s in shards for name in s.names)]
        return sum(mirror.tensors[name].nbytes for name in moved)

    def _refusal(self, held: Held, mirror: Mirror) -> Exception | None:
        if held.spoilt:
            return UnsupportedModelError(
                f"parameter {held.spoilt[0]} is sharded, and bitsandbytes' forward in eval() takes its parts for laid out as "
                "some CPUs like them: the model is spoilt. Load it anew, with support_avx512bf16_for_cpu = False on its layers"
            )
        if held.names == self._shapes.keys() | self._aliases.keys() and held.aliases != self._aliases:
            shared = sorted(name for name in held.names if held.aliases.get(name) != self._aliases.get(name))
            return UnsupportedModelError(
                f"the model shares other tensors than when the engine was built ({shared[:4]}), as after "
                "load_state_dict(assign=True): call tie_weights() on it, or build a new engine"
            )
        if held.shapes != self._shapes or held.aliases != self._aliases:
            names = held.shapes.keys() ^ self._shapes.keys() or {
                n for n in held.shapes if held.shapes[n] != self._shapes[n]
            }
            return UnsupportedModelError(
                f"the model has another shape than the engine was built for: build a new engine (tensors {sorted(names)[:4]})"
            )
        if not mirror.resident:
            return WeightsMismatchError("the weights are not in memory: wake them up before an update")
        wrong = list(unfit(held.numbers(self._dtypes), finite=self._check_finite))
        if wrong:
            return WeightsMismatchError(f"{'; '.join(wrong)}. No weight was changed: the engine keeps its version")
        return None

    def _agree(
        self, shards: list[Shards], changed: set[tuple[str, ...]], refusal: Exception | None
    ) -> Exception | None:
        """Add to ``changed`` what other ranks found changed; where one of them refuses, so does this one."""
        by_group: dict[dist.ProcessGroup, list[Shards]] = {}
        for s in shards:
            by_group.setdefault(s.group, []).append(s)
        flags = {
            group: torch.tensor([s.names in changed for s in of_group], dtype=torch.int64, device=self.device)
            for group, of_group in by_group.items()
        }
        failed = agree(by_group, flags, refusal is not None)
        for group, of_group in by_group.items():
            changed |= {s.names for s, flag in zip(of_group, flags[group].tolist(), strict=True) if flag}
        if failed and refusal is None:
            return WeightsMismatchError("another rank refused its weights; its error says why. No weight was changed")
        return refusal

    def mismatches(self) -> tuple[int, list[str]]:
        """How many tensors were compared, and the names of those that are not the trainer's, as the engine's dtype has them.

        A sharded trainer's ranks tell each other the checksums of their parts, so all of them call it together.
        """
        mirror, held = self.mirror, self._read()
        assert mirror is not None
        names = [name for name in held.full if name in mirror.tensors]
        theirs = checksums([held.full[n] for n in names], self.device, [self._dtypes[n] for n in names])
        ours = checksums([mirror.tensors[name] for name in names], self.device)
        wrong = [n for n, a, b in zip(names, theirs, ours, strict=True) if a != b]
        # Others came after the engine was built.
        shards = [s for s in held.shards if mirror.tensors.keys() >= {*s.names}]
        by_group: dict[dist.ProcessGroup, list[Shards]] = {}
        for s in shards:
            by_group.setdefault(s.group, []).append(s)
        flags = {group: torch.zeros(1, dtype=torch.int64, device=self.device) for group in by_group}
        agree(by_group, flags, False)  # only that every rank is here
        found: set[str] = set()
        for group, of_group in by_group.items():
            found.update(self._compare(group, of_group, mirror))
        count = len(names) + sum(len(s.names) for s in shards)
        return count, wrong + [name for s in shards for name in s.names if name in found]

    def _compare(self, group: dist.ProcessGroup, shards: list[Shards], mirror: Mirror) -> set[str]:
        rank = dist.get_rank(group)
        width = max(len(pieces) for s in shards for pieces in s.pieces)
        held = [(i, c, piece) for i, s in enumerate(shards) for c, piece in enumerate(s.pieces[rank])]
        parts = [shards[i].local[piece.start : piece.start + piece.rows] for i, _, piece in held]
        numbers = checksums(parts, self.device, [self._dtypes[piece.name] for *_, piece in held])
        table = torch.zeros(len(shards), width, dtype=torch.int64, device="cpu")
        for (i, column, _), number in zip(held, numbers, strict=True):
            table[i, column] = number
        mine = table.to(self.device)
        theirs = mine.new_empty(group.size(), *mine.shape)
        dist.all_gather_into_tensor(theirs.view(-1), mine.view(-1), group=group)
        table = theirs.cpu()
        pieces = [
            (r, i, c, p)
            for i, s in enumerate(shards)
            for r, of_rank in enumerate(s.pieces)
            for c, p in enumerate(of_rank)
        ]
        ours = checksums([p.view(mirror.tensors[p.name]) for *_, p in pieces], self.device)
        return {p.name for (r, i, c, p), number in zip(pieces, ours, strict=True) if table[r, i, c] != number}


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Cast-copies of like kind together, each of them one kernel on a device."""
    kinds: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        to, came = kinds.setdefault((target.dtype, source.dtype, source.device), ([], []))
        to.append(target)
        came.append(source)
    with torch.no_grad():
        for to, came in kinds.values():
            torch._foreach_copy_(to, came)
