"""Where the engine's weights come from, decided by what the trainer holds now.

A ``WeightSource`` stands between a live model and the shell that the engine runs:

1. ``tensors(groups, layers)``: what the shell is bound to, by the names of the plain model. An aliased source gives the
   trainer's own tensors, a mirror its copies, those of a group side by side. Of names in ``layers``, sets of them, a mirror
   may have ``passing`` ones: noise, of which nothing is kept but what is made of them where they are handed over.
   ``adapters``: copies of what the trainer holds only in parts of adapters, by the names of ``walk_adapters``.
   ``wider``: of the trainer's dtypes, those whose parameters are in a dtype here that holds all their numbers and more.
2. ``rehome(groups)``: one tensor over the rows of each group that lies (or could be laid) side by side. For an aliased
   source this is the only change it makes to the trainer; a mirror has done it.
   ``hand_over(consumer)``, once: gives it the numbers of ``passing`` ones, now and whenever they change, a set at a time;
   returns the bytes written. ``keep(names)``, before: let the next ``tensors`` have no such one among them.
3. ``pull()`` at every ``update_weights``: take the trainer's numbers as they are now, and return the bytes written. It is
   the only method besides ``verify`` that may communicate, so all ranks of a sharded trainer call it together. Whatever
   can be refused is refused before the first byte is written, on all ranks alike. ``refuse(error)`` in its place has the
   others refuse too, who would wait for this rank, and says whether there are any.
   ``write(new)``: take those that came from elsewhere instead, by name, and return the bytes written. ``overwritten()``
   comes then, or ``spoil()`` where it failed half-way: the source is not ``complete`` before the next pull or write.
4. ``catch_up()`` before every rollout: the same for changes nobody announced, from what this rank can see by itself;
   True where there were any. It never communicates: a sharded source always says False.
5. ``give_back()`` and ``take_again()``: memory of the source's own, kept in host memory or dropped meanwhile. It lies where it
   lay then, where it has ``stable_addresses``. Where the trainer's weights are ``at_hand``, nothing needs to be kept: ``fill()``
   then makes all anew of them, without another rank, and says whether they are others than at the last look.
6. ``release()``: leave the trainer as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stoker.kernels.errors import UnsupportedModelError
from stoker.weight_sync.aliased_source import AliasedSource
from stoker.weight_sync.bitsandbytes_state import has_eight_bits
from stoker.weight_sync.mirror import Consumer
from stoker.weight_sync.mirrored_source import MirroredSource
from stoker.weight_sync.naming import engine_dtypes, named_tensors, unwrap, walk
from stoker.weight_sync.peft_adapters import check_adapters
from stoker.weight_sync.shards import has_units, is_shard, is_sharded


class WeightSource(Protocol):
    """See the module's text. ``dtype`` and ``device`` are the engine's; ``nbytes`` is memory of the engine's own."""

    dtype: torch.dtype
    device: torch.device
    kind: str

    @property
    def module(self) -> nn.Module: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def complete(self) -> bool: ...
    @property
    def optional(self) -> set[str]: ...
    def tensors(
        self, groups: Sequence[tuple[str, ...]] = (), layers: Sequence[Collection[str]] = ()
    ) -> dict[str, Tensor]: ...
    @property
    def passing(self) -> frozenset[str]: ...
    def keep(self, names: Collection[str]) -> None: ...
    def hand_over(self, consumer: Consumer) -> int: ...
    def write(self, new: Mapping[str, Tensor]) -> int: ...
    @property
    def adapters(self) -> Mapping[str, Tensor]: ...
    @property
    def wider(self) -> Mapping[torch.dtype, torch.dtype]: ...
    def rehome(self, groups: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], Tensor]: ...
    def bind(self) -> None: ...
    def moved(self, module: nn.Module) -> bool: ...
    def check(self) -> None: ...
    def pull(self, alike: Sequence[str] = ()) -> int: ...
    def refuse(self, error: Exception) -> bool: ...
    def catch_up(self) -> bool: ...
    def overwritten(self) -> None: ...
    def spoil(self) -> None: ...
    def mismatches(self, alike: Sequence[str] = ()) -> tuple[int, list[str]]: ...
    def names(self) -> set[str]: ...
    @property
    def resident(self) -> bool: ...
    @property
    def stable_addresses(self) -> bool: ...
    def give_back(self, *, drop: bool) -> None: ...
    def take_again(self) -> None: ...
    @property
    def at_hand(self) -> bool: ...
    def fill(self) -> bool: ...
    def release(self) -> None: ...


def check_model(model: nn.Module) -> None:
    """Raise ``UnsupportedModelError`` where the weights cannot be taken, with the remedy."""
    module: Any = unwrap(model)
    what = type(module).__name__
    check_adapters(module)
    method = getattr(module, "quantization_method", None)
    if method is not None and str(getattr(method, "value", method)) != "bitsandbytes":
        raise UnsupportedModelError(
            f"{what} is quantised by {getattr(method, 'value', method)}: the engine runs plain weights, and those of "
            "bitsandbytes in 4 or 8 bits"
        )
    named = [(name, tensor) for name, tensor, _ in named_tensors(model)]
    units = has_units(model)
    if not units and not any(isinstance(t, nn.Parameter) for _, t in named):
        raise UnsupportedModelError(f"{what} has no parameters")
    for name, tensor in named:
        if is_shard(tensor) or not isinstance(tensor, nn.Parameter):
            continue
        if tensor.is_meta or (tensor.numel() == 0 and not units):
            raise UnsupportedModelError(
                f"parameter {name} of {what} holds no data here (meta or offloaded): give a model with its parameters in "
                "memory"
            )
        if method is None and type(tensor.data) is not torch.Tensor:
            raise UnsupportedModelError(
                f"parameter {name} of {what} is a {type(tensor.data).__name__}: the engine runs plain weights, and those "
                "of bitsandbytes in 4 or 8 bits"
            )


def source_for(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    *,
    check_finite: bool = False,
    **options: Any,
) -> WeightSource:
    """The source for a live model. Resolve an aliased one anew whenever the trainer may have wrapped or replaced its model.

    A mirror stays one: a trainer that casts or offloads its tensors for a while would take them away again.

    Aliased where this rank holds full parameters in the engine's dtype on its device; else a mirror. dtype: the engine's;
    None leaves every parameter its own. device: the engine's; None is where the parameters are. check_finite: refuse NaN
    and Inf at each ``pull``. options: ``gather_bytes``, the most memory that gathering shards takes besides the mirror, and
    others of ``MirroredSource``.

    Raises ``UnsupportedModelError`` where the weights can be neither borrowed nor copied.
    """
    check_model(model)
    quantised = getattr(unwrap(model), "quantization_method", None) is not None
    if is_sharded(model):
        if quantised and any(has_eight_bits(module) for _, module in walk(model)):
            raise UnsupportedModelError(
                f"{type(unwrap(model)).__name__} is quantised to 8 bits and sharded, and only weights in 4 bits are gathered: "
                "quantise it to 4 bits, or keep it whole on each rank"
            )
        mirrored = MirroredSource(model, dtype, device, check_finite=check_finite, **options)
        if quantised and mirrored.converts:
            raise _as_it_is(model)
        return mirrored
    parameters = {name: t for name, t, _ in named_tensors(model) if isinstance(t, nn.Parameter)}
    own = {name: t.dtype for name, t in parameters.items()}
    devices = {t.device for t in parameters.values()}
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"{type(unwrap(model)).__name__} lies on several devices: {sorted(map(str, devices))}. Bring its parameters to "
            "one device"
        )
    elsewhere = device is not None and all(d.type != device.type for d in devices) and _exists(device)
    if elsewhere or engine_dtypes(model, own, own.keys(), dtype) != own:
        if quantised:
            raise _as_it_is(model)
        return MirroredSource(model, dtype, device, check_finite=check_finite, **options)
    return AliasedSource(model, check_finite=check_finite)


def _as_it_is(model: nn.Module) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(unwrap(model)).__name__} is quantised, and runs where it is as it is: leave dtype and device of "
        "EngineConfig on 'auto'"
    )


def _exists(device: torch.device) -> bool:
    return device.type == "cpu" or bool(torch.get_device_module(device).is_available())
