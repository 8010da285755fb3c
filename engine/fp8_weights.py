"""The weights of a shell's decoder layers rounded to fp8, which these then multiply by, beside the tensors they are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stoker.engine.experts import matrices, multiply_in_fp8
from stoker.engine.fused_layers import FusedDecoderLayer
from stoker.engine.linears import Linears, matrix_of
from stoker.kernels.errors import UnsupportedModelError
from stoker.kernels.ops import Ops
from stoker.kernels.reference.fp8 import FP8

_ALIGNMENT = 256  # bytes


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix in fp8, or one of each expert, and the tensors of which it has the rows, with their names."""

    names: Sequence[str]
    sources: Sequence[Tensor]
    values: Tensor  # [N, D] or [E, N, D]
    scales: Tensor  # [N] or [E, N]

    def parts(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """(name, source, values, scales) of each."""
        sizes = [len(source) for source in self.sources]
        rows = torch.split(self.values, sizes), torch.split(self.scales, sizes)
        yield from zip(self.names, self.sources, *rows, strict=True)


# The names and the tensors of what becomes one matrix, and who gets it.
_Wanted = tuple[Sequence[str], Sequence[Tensor], Callable[[Tensor, Tensor], None]]


class Fp8Weights:
    """Made of the shell's own tensors, wherever those are, and made anew by ``refresh`` when these have changed.

    They are in one storage, which can be given back and taken again. Embeddings, head, routers, norms and shared experts
    stay as they are, and so does all of a layer that runs the model's own code.
    """

    def __init__(self, shell: nn.Module, modules: Mapping[str, nn.Module], ops: Ops) -> None:
        """modules: the shell's by name, as they were before layers were fused.

        Raises ``UnsupportedModelError`` where none has weights that can be rounded.
        """
        self._ops = ops
        self._biases: list[tuple[Tensor, list[Tensor]]] = []  # joined ones, and what of
        wanted = [*self._of_linears(shell), *_of_experts(modules)]
        if not wanted:
            raise UnsupportedModelError(
                f"quantization='fp8' rounds the weights of fused layers, and {type(shell).__name__} has none: leave it out"
            )
        places: list[tuple[int, int, torch.Size]] = []
        end = 0
        for _, sources, _ in wanted:
            shape = torch.Size((sum(len(source) for source in sources), *sources[0].shape[1:]))
            at = _aligned(end)
            behind = _aligned(at + math.prod(shape))
            end = behind + 4 * math.prod(shape[:-1])
            places.append((at, behind, shape))
        self._data = torch.empty(end, dtype=torch.uint8, device=wanted[0][1][0].device)
        self.nbytes = end
        self._matrices: list[_Matrix] = []
        for (names, sources, give), (at, behind, shape) in zip(wanted, places, strict=True):
            values = self._data[at : at + math.prod(shape)].view(FP8).view(shape)
            scales = self._data[behind : behind + 4 * math.prod(shape[:-1])].view(torch.float32).view(shape[:-1])
            self._matrices.append(_Matrix(names, sources, values, scales))
            give(values, scales)
        self.refresh()

    def _of_linears(self, shell: nn.Module) -> Iterator[_Wanted]:
        for layer in shell.modules():
            for branch in layer.branches if isinstance(layer, FusedDecoderLayer) else ():
                for group in branch.linears:
                    names = [f"{path}.weight" for path in group.paths]
                    yield names, [matrix_of(m).detach() for m in group.linears], partial(self._give, group)

    def _give(self, group: Linears, values: Tensor, scales: Tensor) -> None:
        biases: list[Any] = [m.bias for m in group.linears]
        if group.weight is None and biases[0] is not None:  # they lie apart
            group.bias = torch.cat(biases).detach()
            self._biases.append((group.bias, biases))
        group.weight, group.row_scales = values, scales

    @property
    def resident(self) -> bool:
        return self._data.untyped_storage().nbytes() > 0

    @torch.no_grad()
    def refresh(self) -> int:
        """Round the weights as they are now; returns the bytes that were written, none where the memory was given back."""
        if not self.resident:
            return 0
        for matrix in self._matrices:
            for _, *tensors in matrix.parts():
                self._round(*tensors)
        for joined, biases in self._biases:
            torch.cat(biases, out=joined)
        return self.nbytes

    def _round(self, source: Tensor, values: Tensor, scales: Tensor) -> None:
        if source.dim() == 3 and not source.is_contiguous():
            for of_expert in zip(source, values, scales, strict=True):
                self._ops.quantise_rows(*of_expert)
        else:
            depth = source.shape[-1]
            self._ops.quantise_rows(source.view(-1, depth), values.view(-1, depth), scales.view(-1))

    def release(self) -> None:
        """Give the memory back, once nothing that was launched reads it."""
        torch.get_device_module(self._data.device).synchronize(self._data.device)
        self._data.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take the memory again, and fill it. Any exception leaves everything as it was."""
        if not self.resident:
            try:
                self._data.untyped_storage().resize_(self.nbytes)
                self.refresh()
            except BaseException:  # an interrupt, say: memory without its numbers must not pass for weights
                self._data.untyped_storage().resize_(0)
                raise

    @torch.no_grad()
    def mismatches(self) -> list[str]:
        """Names of the weights that are not rounded as they are now."""
        wrong = []
        for matrix in self._matrices:
            for name, source, values, scales in matrix.parts():
                expected, factors = torch.empty_like(values), torch.empty_like(scales)
                self._round(source, expected, factors)
                same = torch.equal(expected.view(torch.uint8), values.view(torch.uint8))
                if not (same and torch.equal(factors, scales)):
                    wrong.append(name)
        return wrong


def _of_experts(modules: Mapping[str, nn.Module]) -> Iterator[_Wanted]:
    for path, module in modules.items():
        found = matrices(module)
        given: list[tuple[Tensor, Tensor]] = []

        def give(values: Tensor, scales: Tensor, module: Any = module, given: Any = given) -> None:
            given.append((values, scales))
            if len(given) == 2:
                multiply_in_fp8(module, *given)

        for name, source in found.items():
            yield [f"{path}.{name}"], [source.detach()], give


def _aligned(end: int) -> int:
    return -(-end // _ALIGNMENT) * _ALIGNMENT
