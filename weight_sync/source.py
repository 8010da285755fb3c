"""Where the engine's weights come from: the protocol of sources, and which one a live model gets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stoker.kernels.errors import UnsupportedModelError
from stoker.weight_sync.aliased_source import AliasedSource
from stoker.weight_sync.bitsandbytes_state import has_eight_bits
from stoker.weight_sync.form import Form
from stoker.weight_sync.mirror import Consumer
from stoker.weight_sync.mirrored_source import MirroredSource
from stoker.weight_sync.naming import engine_dtypes, named_tensors, unwrap, walk
from stoker.weight_sync.peft_adapters import check_adapters
from stoker.weight_sync.shards import has_units, is_shard, is_sharded


class WeightSource(Protocol):
    """Stands between a live model and the shell that the engine runs.

    An aliased source lends the trainer's own tensors; a mirror keeps copies of them. Only ``pull`` and ``mismatches``
    communicate, so all ranks of a sharded trainer call these together.
    """

    dtype: torch.dtype  # the engine's
    device: torch.device
    kind: str  # "aliased" or "mirror"

    @property
    def module(self) -> nn.Module:
        """The plain model, without wrappers."""

    def names(self) -> set[str]:
        """The names of the model's tensors as they are now."""

    @property
    def wider(self) -> Mapping[torch.dtype, torch.dtype]:
        """By dtype of the trainer, the wider one that its parameters have here, if any: it holds all of their numbers."""

    # -- what the shell is bound to --------------------------------------------------------------------------------

    def tensors(
        self, groups: Sequence[tuple[str, ...]] = (), layers: Sequence[Collection[str]] = ()
    ) -> dict[str, Tensor]:
        """The tensors by the names of the plain model; in a mirror, those of a group lie side by side.

        layers: sets of names that a mirror may let pass through (``passing``).
        """

    @property
    def adapters(self) -> Mapping[str, Tensor]:
        """Copies of the adapters' tensors that the trainer holds only in parts, by the names of ``walk_adapters``."""

    def replaced_adapters(self) -> list[str]:
        """The names of those among ``adapters`` that other modules have since the last pull: the copies are of what was there before."""

    def rehome(self, groups: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], Tensor]:
        """For each group that lies side by side, or could be laid so, one tensor over all its rows.

        An aliased source moves the trainer's parameters for that, its only change to the trainer.
        """

    def bind(self) -> None:
        """Remember where every tensor lies, so that ``moved`` can tell."""

    @property
    def bound(self) -> Mapping[str, Tensor]:
        """The tensors as of ``bind``, which are those of now unless they have ``moved``: what ``write`` writes to."""

    @property
    def places(self) -> object:
        """The same object as long as ``bound`` has the same tensors, and these lie where they did, unless they have ``moved``."""

    @property
    def optional(self) -> Collection[str]:
        """The names of buffers among them that no checkpoint has."""

    def moved(self, module: nn.Module) -> bool:
        """Whether borrowed tensors were added, removed, replaced or moved since ``bind``. module: the trainer's now."""

    def check(self) -> None:
        """Raise ``WeightsMovedError`` where a borrowed parameter changed its dtype or device."""

    # -- weights that pass through: a mirror keeps only what a consumer makes of them ------------------------------

    @property
    def passing(self) -> frozenset[str]:
        """The names of weights that pass through. Except while they are handed over, their tensors hold noise."""

    def keep(self, names: Collection[str]) -> None:
        """Let none of these pass through: the next ``tensors`` has them whole."""

    def hand_over(self, consumer: Consumer) -> None:
        """Give the numbers of ``passing`` weights to the consumer, now and whenever they change."""

    # -- new numbers -----------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether the tensors hold one set of weights, and not parts of two."""

    def pull(self, alike: Sequence[str] = ()) -> int:
        """Take the trainer's numbers as they are now; returns the bytes written. alike: as for ``agree``.

        Whatever can be refused is refused before the first byte is written, on all ranks alike.
        """

    def refuse(self, error: Exception) -> bool:
        """To be called in place of ``pull``: the other ranks refuse too, and do not wait. Returns whether there are any."""

    def catch_up(self) -> bool:
        """Take changes that nobody announced; returns whether there were any. It never communicates, and sees none in shards."""

    def write(self, new: Mapping[str, Tensor], form: Form | None = None) -> int:
        """Take tensors from elsewhere, by name; returns the bytes written. ``overwritten`` or ``spoil`` comes after it.

        form: theirs and that of ``bound``, where it is known to be that of now.
        """

    def overwritten(self) -> None:
        """Note that the tensors hold weights from elsewhere now, all of them."""

    def spoil(self) -> None:
        """Note that ``write`` failed half-way: the source is not ``complete`` before the next ``pull`` or ``write``."""

    def mismatches(self, alike: Sequence[str] = ()) -> tuple[int, list[str]]:
        """(number of tensors compared, names of those that differ from the trainer's)."""

    # -- memory of the source's own --------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the source's own."""

    @property
    def resident(self) -> bool:
        """Whether that memory is there."""

    @property
    def stable_addresses(self) -> bool:
        """Whether it has the same addresses when it is taken again."""

    @property
    def at_hand(self) -> bool:
        """Whether ``fill`` can make all of it anew from the trainer's weights, without other ranks."""

    def give_back(self, *, drop: bool) -> None:
        """Give the memory back. drop: do not keep its content in host memory."""

    def take_again(self) -> None:
        """Take the memory again, with the content that was kept."""

    def fill(self) -> bool:
        """Make all of it anew from the trainer's weights; returns whether these changed since the last look."""

    def release(self) -> None:
        """Leave the trainer as it was."""


def check_model(model: nn.Module) -> None:
    """Raise ``UnsupportedModelError`` where the weights cannot be taken, with the remedy."""
    module: Any = unwrap(model)
    what = type(module).__name__
    check_adapters(model)
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
    """The source for a live model: aliased where this rank holds full parameters in the engine's dtype and place; else a mirror.

    Ask for it anew whenever the trainer may have wrapped or replaced its model. Where there is a mirror already, keep it: the
    trainer may cast or offload its tensors only for a while.

    dtype: the engine's; None leaves every parameter its own. device: the engine's; None is where the parameters are.
    check_finite: refuse NaN and Inf at each ``pull``. options: ``gather_bytes``, the most memory that gathering shards takes
    besides the mirror, and others of ``MirroredSource``.

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
