"""Copies of a shell's decoder weights rounded to fp8, which its layers multiply by in place of the weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stoker.engine.device import runtime_for
from stoker.engine.layers.derived_weights import DerivedWeights, Wanted
from stoker.engine.layers.experts import matrices, multiply_by
from stoker.engine.layers.fused_decoder import FusedDecoderLayer
from stoker.engine.layers.linears import Linears, matrix_of
from stoker.kernels.errors import UnsupportedModelError
from stoker.kernels.ops import Ops
from stoker.kernels.reference.fp8 import FP8, dequantise_rows


class Fp8Weights(DerivedWeights):
    """Rounded copies: of a matrix [N, D], or one [E, N, D] for experts, its values in fp8 and a scale for each row.

    Embeddings, head, routers, norms and shared experts are not rounded, nor is anything in a layer that runs the model's own code.
    """

    def __init__(self, shell: nn.Module, modules: Mapping[str, nn.Module], ops: Ops, passing: Collection[str]) -> None:
        """modules: the shell's by name, from before layers were fused. passing: as for ``DerivedWeights``.

        Raises ``UnsupportedModelError`` where none has weights that can be rounded.
        """
        self._ops = ops
        biases: list[tuple[Tensor, list[Tensor]]] = []  # joined biases, and those they are made of
        wanted = [*_of_linears(shell, biases), *_of_experts(modules)]
        if not wanted:
            raise UnsupportedModelError(
                f"quantization='fp8' rounds the weights of fused layers, and {type(shell).__name__} has none: leave it out"
            )
        super().__init__(wanted, passing)
        self._besides += (partial(torch.cat, parts, out=joined) for joined, parts in biases)

    def plain(self, name: str) -> Tensor | None:
        """A rounded weight, [N, D], in the dtype it was rounded from; None if it is not rounded."""
        if name not in self.by_name:
            return None
        source, (values, scales) = self.by_name[name]
        return dequantise_rows(values, scales, source.dtype)

    def _make(self, name: str, source: Tensor, *made: Tensor) -> None:
        values, scales = made
        with runtime_for(source.device).chosen():
            if source.dim() == 3 and not source.is_contiguous():
                for of_expert in zip(source, values, scales, strict=True):
                    self._ops.quantise_rows(*of_expert)
            else:
                depth = source.shape[-1]
                self._ops.quantise_rows(source.view(-1, depth), values.view(-1, depth), scales.view(-1))


def _of_linears(shell: nn.Module, biases: list[tuple[Tensor, list[Tensor]]]) -> Iterator[Wanted]:
    for layer in shell.modules():
        for branch in layer.branches if isinstance(layer, FusedDecoderLayer) else ():
            for group in branch.linears:
                names = [f"{path}.weight" for path in group.paths]
                yield _wanted(names, [matrix_of(m).detach() for m in group.linears], partial(_give, group, biases))


def _give(group: Linears, joined: list[tuple[Tensor, list[Tensor]]], values: Tensor, scales: Tensor) -> None:
    biases: list[Any] = [m.bias for m in group.linears]
    if group.weight is None and biases[0] is not None:  # they lie apart
        group.bias = torch.cat(biases).detach()
        joined.append((group.bias, biases))
    group.weight, group.row_scales = values, scales


def _of_experts(modules: Mapping[str, nn.Module]) -> Iterator[Wanted]:
    for path, module in modules.items():
        for name, source in matrices(module).items():
            yield _wanted([f"{path}.{name}"], [source.detach()], partial(multiply_by, module, name))


def _wanted(names: Sequence[str], sources: Sequence[Tensor], give: Any) -> Wanted:
    return Wanted(names, sources, [((t.shape, FP8), (t.shape[:-1], torch.float32)) for t in sources], give)
