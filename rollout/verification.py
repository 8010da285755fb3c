"""Compares the weights that the engine runs on with the trainer's, name by name: ``verify_weights``."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.kernels.reference.adapter_weights import AdapterWeights
from stoker.rollout.binding import ModelBinding
from stoker.weight_sync.checksum import WeightReport
from stoker.weight_sync.staging import same_place


def verify(binding: ModelBinding, version: int, in_slots: Mapping[str, AdapterWeights]) -> WeightReport:
    """Compare all weights. in_slots: adapters as slots hold them. Ranks of a sharded trainer call this together."""
    binding.in_order()
    source, shell = binding.source, binding.shell
    with binding.adapters.telling():
        checked, other = source.mismatches(binding.adapters.gathered)
    more, of_adapters = binding.adapters.mismatches(in_slots, source)
    trainer, used = source.names(), shell.tensors()
    wrong = _lying_elsewhere(binding)
    if binding.derived is not None:
        wrong.update(binding.derived.mismatches())
    return WeightReport(
        source=source.kind,
        version=version,
        checked=checked + more,
        mismatched=tuple(sorted(wrong.union(other, of_adapters))),
        missing=tuple(sorted(trainer - used.keys())),
        extra=tuple(sorted(used.keys() - trainer)),
    )


def _lying_elsewhere(binding: ModelBinding) -> set[str]:
    """Names of the tensors in the shell, or in what its fused layers read, that are not the source's."""
    source, shell = binding.source, binding.shell
    expected = source.tensors()
    expected = expected | {name: expected[other] for name, other in shell.stood_for.items()}
    wrong = {
        name for name, tensor in shell.tensors().items() if name in expected and not same_place(tensor, expected[name])
    }
    for group, whole in binding.wholes.items():
        if source.passing.isdisjoint(group):  # layers with the other groups read rounded weights
            row = 0
            for name in group:
                rows = expected[name].shape[0]
                if row + rows > whole.shape[0] or not same_place(whole[row : row + rows], expected[name]):
                    wrong.add(name)
                row += rows
    return wrong
