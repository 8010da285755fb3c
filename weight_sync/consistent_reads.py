"""Notices that files of weights were written to while they were read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from stoker.kernels.errors import WeightTransferError
from stoker.weight_sync.transport import OLD_STAYS

_OF_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_Stamp = tuple[tuple[int, int], tuple[int, int]]  # which file it is; its size and time


@contextmanager
def not_rewritten(path: str) -> Iterator[None]:
    """Context manager around reading ``path``, a file or a folder of weights: what was read is one version of it.

    Raises ``WeightTransferError`` where it may not be: a file was written to meanwhile, or some of several files were replaced. A
    single file may be replaced: then the old or the new one was read as a whole.
    """
    before = _stamps(path)
    yield
    after = _stamps(path)
    several = len(before.keys() | after.keys()) > 1
    changed = [name for name, stamp in before.items() if _differ(stamp, after.get(name), several)]
    changed += [name for name in after.keys() - before.keys() if several]
    if changed:
        raise WeightTransferError(
            f"{path} was written to while it was read ({', '.join(sorted(changed)[:4])}), so it may be in parts old and new: "
            f"write elsewhere, rename what is complete, and call update_weights again. {OLD_STAYS}"
        )


def _stamps(path: str) -> dict[str, _Stamp]:
    try:
        names = [name for name in os.listdir(path) if name.endswith(_OF_WEIGHTS)] if os.path.isdir(path) else [""]
    except OSError as error:
        raise WeightTransferError(
            f"{path} cannot be read: {error}. Give a folder that this process may read. {OLD_STAYS}"
        ) from error
    found: dict[str, _Stamp] = {}
    for name in names:
        try:
            stat = os.stat(os.path.join(path, name) if name else path)
        except OSError:  # it is gone; reading fails if that matters
            continue
        found[name or os.path.basename(path)] = (stat.st_dev, stat.st_ino), (stat.st_size, stat.st_mtime_ns)
    return found


def _differ(before: _Stamp, after: _Stamp | None, several: bool) -> bool:
    if after is None or before[0] != after[0]:
        return several
    return before[1] != after[1]
