"""Cuts fused layers into the shares that ranks have of them: heads of attention, and the width of MLPs and experts.

A branch's first projection is cut by rows, its last one by columns, so that a rank's result is one term of a sum. Layers are found
and compared with their originals whole, on one rank; what is cut is known to compute what the model does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stoker.engine.layers.derived_weights import DerivedWeights, Wanted
from stoker.engine.layers.experts import activation_of, add_biases, biases_of, matrices, multiply_by
from stoker.engine.layers.fused_branches import LayerInputs, MixerBranch, MlpBranch, OriginalBranch
from stoker.engine.layers.fused_decoder import FusedDecoderLayer
from stoker.engine.layers.fused_mixers import Pointwise
from stoker.engine.layers.fused_moe import FusedMoe, mixture_of
from stoker.engine.layers.linears import Linears, matrix_of
from stoker.engine.model import ModelShell
from stoker.engine.parallel.cuts import Cut, Span
from stoker.engine.parallel.mixers import cut_mixer
from stoker.engine.parallel.shares import Remade, refused, share
from stoker.engine.parallel.tensor_parallel import TensorParallel
from stoker.kernels.reference.norm_rotary import Norm

_WIDTH = "width of an MLP"


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of a branch. It adds up what all ranks have, and then does what comes after a branch."""

    branch: MixerBranch | MlpBranch | OriginalBranch
    parallel: TensorParallel
    per_layer: Span | None = None  # which numbers of the layer's own input it reads, where it reads that

    def __getattr__(self, name: str) -> Any:
        return getattr(self.branch, name)

    def __call__(
        self,
        x: Tensor,
        norm: Norm | None,
        given: LayerInputs,
        *,
        residual: Tensor | None = None,
        scale: float = 1.0,
        in_place: bool = False,
    ) -> Tensor:
        if self.per_layer is not None and given.per_layer is not None:
            given = given._replace(per_layer=given.per_layer[:, slice(*self.per_layer)])
        out = self.parallel.add_up(self.branch(x, norm, given))
        return out if residual is None else torch.add(residual, out, alpha=scale, out=residual if in_place else None)


class CutWeights(DerivedWeights):
    """This rank's parts of the weights of fused layers, which these multiply by in place of the whole ones."""

    def __init__(
        self, shell: ModelShell, modules: Mapping[str, nn.Module], parallel: TensorParallel, passing: Collection[str]
    ) -> None:
        """Cut the layers of a shell, all of which are fused. modules: the shell's by name, from before they were.

        Raises ``UnsupportedModelError`` for what cannot be cut, before anything is.
        """
        self._parallel, self._lora = parallel, shell.lora
        self._cuts: dict[str, Cut] = {}
        self._biases: list[tuple[Linears, list[Tensor], list[Cut]]] = []  # which are cut as the weights' rows are
        self._small: Remade = []  # each cuts something small anew
        self._paths = {module: path for path, module in modules.items()}
        wanted: list[Wanted] = []
        then: list[Callable[[], None]] = []
        fused = {path: m for path, m in shell.module.named_modules() if isinstance(m, FusedDecoderLayer)}
        for path, layer in fused.items():
            then.append(partial(shell.lora.cut, path))
            blocks = []
            for block in layer.blocks:
                branches = []
                for branch in block.branches:
                    cut, of_branch = self._cut(branch, then)
                    wanted += of_branch
                    branches.append(Share(cut, parallel, self._per_layer(branch)))
                blocks.append(copy.copy(block))
                object.__setattr__(blocks[-1], "branches", tuple(branches))
            then.append(partial(setattr, layer, "blocks", tuple(blocks)))
        super().__init__(wanted, passing)
        for group, biases, cuts in self._biases:
            group.bias = torch.cat(_rows(biases, cuts))
            self._small.append(partial(_join, group.bias, biases, cuts))
        for act in then:
            act()
        self._besides += self._small

    def _make(self, name: str, source: Tensor, *made: Tensor) -> None:
        self._cuts[name].copy(source, *made)

    def release(self) -> None:
        super().release()
        self._biases.clear()
        self._small.clear()
        self._paths.clear()

    # -- branches ----------------------------------------------------------------------------------------------------

    def _cut(self, branch: Any, then: list[Callable[[], None]]) -> tuple[Any, list[Wanted]]:
        """The share of a branch, with the weights it wants. then: what is left to do once nothing can be refused any more."""
        if isinstance(branch, MlpBranch):
            return branch, list(self._of_mlp(branch))
        if isinstance(branch, MixerBranch):
            if isinstance(branch.mixer, Pointwise):
                return branch, list(self._of_mlp(branch))
            cut, by_rows, by_columns = cut_mixer(branch, self._parallel, self._small)
            wanted = [w for group in by_rows for w in self._of_linears(*group)]
            return cut, [*wanted, *(self._of_out(*group) for group in by_columns)]
        mixture = mixture_of(branch.module)
        if mixture is None:
            raise refused(f"{type(branch.module).__name__} runs its own code")
        return branch, list(self._of_mixture(mixture, then))

    def _of_mlp(self, branch: MlpBranch | MixerBranch) -> Iterator[Wanted]:
        first, out = branch.linears
        rows = sum(len(matrix_of(m)) for m in first.linears)
        parts = 2 if isinstance(branch, MlpBranch) and not branch.per_layer else 1
        spans = _of_width(rows // parts, parts, self._parallel)
        yield from self._of_linears(first, spans)
        yield self._of_out(out, spans[0])

    def _per_layer(self, branch: Any) -> Span | None:
        if not isinstance(branch, MlpBranch) or not branch.per_layer:
            return None
        return share(matrix_of(branch.down.linears[0]).shape[1], _WIDTH, self._parallel)

    def _of_mixture(self, mixture: FusedMoe, then: list[Callable[[], None]]) -> Iterator[Wanted]:
        experts, path = mixture.experts, self._paths[mixture.experts]
        (first, up), (second, down) = matrices(experts, in_mixture=True).items()
        gate, rows = activation_of(experts), up.shape[-2]
        parts = 2 if gate.gated else 1
        spans = _of_width(rows // parts, parts, self._parallel)
        columns = spans[0]
        if gate.gated and gate.interleaved:
            spans = [(2 * columns[0], 2 * columns[1])]
        for name, source, cut in (first, up, Cut(tuple(spans))), (second, down, Cut(columns=columns)):
            yield self._wanted([f"{path}.{name}"], [source.detach()], [cut], partial(multiply_by, experts, name))
        if biases := biases_of(experts):
            at = torch.cat([torch.arange(*span, device=up.device) for span in spans])
            mine = biases[first].detach().index_select(1, at)
            self._small.append(partial(torch.index_select, biases[first].detach(), 1, at, out=mine))
            then.append(partial(add_biases, experts, {first: mine, second: self._once(biases[second])}))
        if mixture.shared is not None:
            yield from self._cut(mixture.shared, then)[1]

    # -- linears -----------------------------------------------------------------------------------------------------

    def _of_linears(self, group: Linears, spans: Sequence[Span]) -> Iterator[Wanted]:
        """Linears that are cut by rows. spans: of the rows of all of them, one after the other."""
        matrices = [matrix_of(m).detach() for m in group.linears]
        cuts, start = [], 0
        for matrix in matrices:
            end = start + len(matrix)
            within = [(max(low, start) - start, min(high, end) - start) for low, high in spans]
            cuts.append(Cut(tuple(span for span in within if span[0] < span[1])))
            start = end
        biases = [m.bias for m in group.linears]
        if any(bias is not None for bias in biases):
            filled = [m.new_zeros(len(m)) if b is None else b.detach() for m, b in zip(matrices, biases, strict=True)]
            self._biases.append((group, filled, cuts))

        def give(weight: Tensor) -> None:
            group.weight, group.lora = weight, self._lora.share(group.paths, cuts, once=self._parallel.rank == 0)

        yield self._wanted(_names(group), matrices, cuts, give)

    def _of_out(self, group: Linears, columns: Span) -> Wanted:
        """The last linear of a branch, which is cut by columns."""

        cuts = [Cut(columns=columns)]

        def give(weight: Tensor) -> None:
            group.weight, group.bias = weight, self._once(group.linears[0].bias)
            group.lora = self._lora.share(group.paths, cuts, once=self._parallel.rank == 0)

        return self._wanted(_names(group), [matrix_of(group.linears[0]).detach()], cuts, give)

    def _once(self, bias: Tensor | None) -> Tensor | None:
        """The bias of a sum: one rank adds it."""
        return bias if self._parallel.rank == 0 else None

    def _wanted(self, names: list[str], sources: list[Tensor], cuts: list[Cut], give: Callable[..., None]) -> Wanted:
        self._cuts.update(zip(names, cuts, strict=True))
        parts = [((cut.size(t.shape), t.dtype),) for cut, t in zip(cuts, sources, strict=True)]
        return Wanted(names, sources, parts, give)


def _rows(biases: Sequence[Tensor], cuts: Sequence[Cut]) -> list[Tensor]:
    return [bias[low:high] for bias, cut in zip(biases, cuts, strict=True) for low, high in cut.rows or ()]


def _join(joined: Tensor, biases: Sequence[Tensor], cuts: Sequence[Cut]) -> None:
    torch.cat(_rows(biases, cuts), out=joined)


def _names(group: Linears) -> list[str]:
    return [f"{path}.weight" for path in group.paths]


def _of_width(width: int, parts: int, parallel: TensorParallel) -> list[Span]:
    """A rank's share of each of several parts of that width, side by side."""
    low, high = share(width, _WIDTH, parallel)
    return [(part * width + low, part * width + high) for part in range(parts)]
