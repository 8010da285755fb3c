"""Receives new weights from another process, a file or named tensors: checked, and held until all have come."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence

from safetensors import SafetensorError, safe_open
from torch import Tensor

from stoker.kernels.errors import WeightsMismatchError, WeightTransferError
from stoker.weight_sync.consistent_reads import not_rewritten
from stoker.weight_sync.form import Form
from stoker.weight_sync.manifest import not_weights, spec_of
from stoker.weight_sync.staging import Known, Staging
from stoker.weight_sync.transport import OLD_STAYS, WeightTransfer, reason_of

NewWeights = WeightTransfer | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | str | os.PathLike[str]


def receive(
    weights: NewWeights,
    targets: Mapping[str, Tensor],
    optional: Collection[str],
    *,
    check_finite: bool,
    known: Known | None = None,
    passing: Collection[str] = (),
    places: object = None,
) -> Staging:
    """The new weights, checked, beside ``targets``, which are not touched. A transfer brings those that differ.

    known, passing: as for ``Staging``; what is known is for the next call. places: of the targets, for ``Form``. Raises
    ``WeightsMismatchError`` naming all that does not fit, ``WeightTransferError`` where they did not arrive.
    """
    known = Known() if known is None else known
    staging = Staging(targets, optional, check_finite, known, passing)
    if isinstance(weights, Mapping):
        weights = dict(weights)
        if known.form is not None and known.form.same(weights, targets, optional):
            known.form.places = places
            staging.hold_as_before(weights)
            return staging
        known.form = None
        _refuse(staging([spec_of(name, tensor) for name, tensor in weights.items()]))
        if staging.hold(weights):
            known.form = Form(weights, targets, optional, places)
    elif isinstance(weights, WeightTransfer):
        _from_transfer(weights, staging)
        return staging
    elif isinstance(weights, str | os.PathLike):
        _from_file(os.fspath(weights), staging)
    elif isinstance(weights, Iterable):
        for pair in weights:
            if not (isinstance(pair, Sequence) and len(pair) == 2):
                raise not_weights(pair)
            name, tensor = pair
            if staging.expect(spec_of(name, tensor)):
                staging.write(name, 0, tensor.detach().reshape(-1))
    else:
        raise not_weights(weights)
    staging.finish()
    return staging


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise WeightsMismatchError(problem)


def _from_file(path: str, staging: Staging) -> None:
    try:
        with not_rewritten(path), safe_open(path, framework="pt") as file:
            names = list(file.keys())
            specs = [spec_of(name, file.get_tensor(name)) for name in names]  # mapped, not read
            if (problem := staging(specs)) is not None:
                raise WeightsMismatchError(
                    f"{problem}. {path} has to have the names of the model's own tensors: where save_pretrained gave them "
                    "others, as of experts, give the folder"
                )
            for spec in specs:
                staging.expect(spec)
                staging.write(spec.name, 0, file.get_tensor(spec.name).reshape(-1))
    except (OSError, SafetensorError) as error:
        raise WeightTransferError(
            f"{path} cannot be read: {error}. Give a safetensors file that is whole, and that this process may read. {OLD_STAYS}"
        ) from error


def _from_transfer(transfer: WeightTransfer, staging: Staging) -> None:
    manifest = transfer.begin(judge=staging)
    try:
        _refuse(staging(manifest.specs))
        for spec in manifest.specs:  # those without elements too, which are in no bucket
            staging.expect(spec)
        for bucket in manifest.buckets():
            data, end = transfer.bucket(), 0
            if (due := sum(spec.dtype.itemsize * count for spec, _, count in bucket)) != data.numel():
                raise WeightTransferError(
                    f"a bucket has {data.numel()} bytes, and {due} were announced: the transfer lost some, or gave its "
                    f"buckets in another order. {OLD_STAYS}"
                )
            for spec, start, count in bucket:
                size = count * spec.dtype.itemsize
                staging.write(spec.name, start, data[end : end + size].view(spec.dtype))
                end += size
        staging.finish()  # first: whoever sends is told that they were taken
        transfer.finish()
    except BaseException as error:
        transfer.finish(reason_of(error))
        raise
