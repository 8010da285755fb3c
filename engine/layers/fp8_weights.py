"""Copies of a shell's decoder weights rounded to fp8, which its layers multiply by in place of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stoker.engine.device import runtime_for
from stoker.engine.layers.experts import matrices, multiply_in_fp8
from stoker.engine.layers.fused_decoder import FusedDecoderLayer
from stoker.engine.layers.linears import Linears, matrix_of
from stoker.engine.virtual_memory import virtual_buffer
from stoker.kernels.errors import UnsupportedModelError
from stoker.kernels.host_memory import OffloadableMemory
from stoker.kernels.ops import Ops
from stoker.kernels.reference.fp8 import FP8, dequantise_rows

_ALIGNMENT = 256  # bytes


class Rounded(NamedTuple):
    """A matrix, or one for each expert, and its copy in fp8."""

    source: Tensor
    values: Tensor  # [N, D] or [E, N, D]
    scales: Tensor  # [N] or [E, N]


# (names, tensors, a function that takes values and scales) of weights that become one matrix.
_Wanted = tuple[Sequence[str], Sequence[Tensor], Callable[[Tensor, Tensor], None]]


class Fp8Weights:
    """The rounded copies, made from the shell's tensors, and made anew by ``refresh`` when these have changed.

    They lie in one piece of memory, which can be given back and taken again. Embeddings, head, routers, norms and shared experts
    are not rounded, nor is anything in a layer that runs the model's own code.

    by_name: by the name of each weight that is rounded.
    """

    def __init__(self, shell: nn.Module, modules: Mapping[str, nn.Module], ops: Ops, passing: Collection[str]) -> None:
        """modules: the shell's by name, from before layers were fused. passing: names of weights that are in memory only for moments,
        in which ``refresh`` is called with them.

        Raises ``UnsupportedModelError`` where none has weights that can be rounded.
        """
        self._ops, self._passing = ops, passing
        self._biases: list[tuple[Tensor, list[Tensor]]] = []  # joined biases, and those they are made of
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
        self._memory = OffloadableMemory(end, wanted[0][1][0].device, virtual_buffer)
        self.by_name: dict[str, Rounded] = {}
        data = self._memory.data
        for (names, sources, give), (at, behind, shape) in zip(wanted, places, strict=True):
            values = data[at : at + math.prod(shape)].view(FP8).view(shape)
            scales = data[behind : behind + 4 * math.prod(shape[:-1])].view(torch.float32).view(shape[:-1])
            rows = (torch.split(t, [len(source) for source in sources]) for t in (values, scales))
            self.by_name.update(zip(names, map(Rounded, sources, *rows), strict=True))
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
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def resident(self) -> bool:
        return self._memory.resident

    @property
    def stable_addresses(self) -> bool:
        return self._memory.stable_addresses

    @torch.no_grad()
    def refresh(self, names: Collection[str] | None = None) -> int:
        """Round weights as they are now; returns the bytes that were written, 0 while the memory is given back.

        names: of passing weights that can be read now; None: all weights that do not pass.
        """
        if not self.resident:
            return 0
        written = 0
        for name in self._always if names is None else names:
            self._round(*self.by_name[name])
            written += sum(t.nbytes for t in self.by_name[name][1:])
        if names is None:
            for joined, biases in self._biases:
                torch.cat(biases, out=joined)
        return written

    @property
    def _always(self) -> list[str]:
        return [name for name in self.by_name if name not in self._passing]

    def release(self) -> None:
        """Let go of all tensors. Layers refer to this object, and to themselves in cycles, so it may live on for some time."""
        self.by_name.clear()
        self._biases.clear()

    def plain(self, name: str) -> Tensor | None:
        """A rounded weight, [N, D], in the dtype it was rounded from; None if it is not rounded."""
        if name not in self.by_name:
            return None
        source, values, scales = self.by_name[name]
        return dequantise_rows(values, scales, source.dtype)

    def _round(self, source: Tensor, values: Tensor, scales: Tensor) -> None:
        with runtime_for(source.device).chosen():
            if source.dim() == 3 and not source.is_contiguous():
                for of_expert in zip(source, values, scales, strict=True):
                    self._ops.quantise_rows(*of_expert)
            else:
                depth = source.shape[-1]
                self._ops.quantise_rows(source.view(-1, depth), values.view(-1, depth), scales.view(-1))

    def give_back(self, *, drop: bool) -> None:
        """Give the memory back, once nothing that was launched reads it. drop: without a copy in host memory."""
        if drop:
            self._memory.release()
        else:
            self._memory.offload()

    def take_again(self) -> None:
        """Take the memory again, and fill it. Any exception leaves everything as it was.

        Passing weights that were dropped have to be handed over again.
        """
        if not self.resident:
            try:
                self._memory.restore()
                self.refresh()
            except BaseException:  # an interrupt, say: memory that was not filled must not pass for weights
                self.give_back(drop=not self._passing)
                raise

    @torch.no_grad()
    def mismatches(self, names: Collection[str] | None = None) -> list[str]:
        """Names of the weights whose rounded copies are out of date. names: as for ``refresh``."""
        wrong = []
        for name in self._always if names is None else names:
            source, values, scales = self.by_name[name]
            expected, factors = torch.empty_like(values), torch.empty_like(scales)
            self._round(source, expected, factors)
            same = torch.equal(expected.view(torch.uint8), values.view(torch.uint8))
            if not (same and torch.equal(factors, scales)):
                wrong.append(name)
        return wrong


def _of_experts(modules: Mapping[str, nn.Module]) -> Iterator[_Wanted]:
    for path, module in modules.items():
        for name, source in matrices(module).items():
            yield [f"{path}.{name}"], [source.detach()], partial(multiply_in_fp8, module, name)


def _aligned(end: int) -> int:
    return -(-end // _ALIGNMENT) * _ALIGNMENT
