"""Finds the fused form of a decoder layer: among those that its parts allow, the one that computes what the layer does.

First with noise in place of the weights, in fp32. There a form that is only nearly right shows, and so does one that would differ
only with other weights: norms may still be ones, for example, or projections zeros. Then a probe with the weights themselves,
on their device, compares the numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stoker.engine.attention import EVERY_KEY
from stoker.engine.layers.experts import run_on
from stoker.engine.layers.fused_branches import Block, MixerBranch, MlpBranch, NormBefore, OriginalBranch
from stoker.engine.layers.fused_decoder import FusedDecoderLayer
from stoker.engine.layers.fused_mixers import Pointwise, mixers_of
from stoker.engine.layers.layer_structure import Branch, Structure, norm_of
from stoker.engine.layers.linears import Linears, matrix_of
from stoker.engine.layers.probe import FAR, POSITIONS, TOLERANCE, Recorder, clipping_within_reach, on_noise
from stoker.engine.layers.rotary import Rotary
from stoker.engine.model import ModelShell
from stoker.engine.step_context import PackedPositions, cache_name
from stoker.kernels.ops import REFERENCE, Ops
from stoker.kernels.reference.norm_rotary import Norm


@dataclass(frozen=True, slots=True)
class BranchMaker:
    """Makes the fused parts that run a shell's modules. fused: tensors in which weights lie side by side, by the weights' names."""

    shell: ModelShell
    ops: Ops
    fused: Mapping[tuple[str, ...], Tensor]

    def linears(self, path: str, module: nn.Module, names: tuple[str, ...]) -> Linears:
        """The linears with these names, of a module and its path."""
        modules: list[Any] = [module.get_submodule(name) for name in names]
        weight: Tensor | None
        if len(names) == 1:
            weight, bias = matrix_of(modules[0]), modules[0].bias
        else:
            weight, bias = (self.fused.get(tuple(f"{path}.{n}.{kind}" for n in names)) for kind in ("weight", "bias"))
            if bias is None and any(m.bias is not None for m in modules):
                weight = None  # one matmul would leave out biases that do not lie side by side
        paths = tuple(f"{path}.{name}" for name in names)
        return Linears(self.ops, paths, modules, self.shell.lora.group(paths), weight, bias)

    def mlp(
        self,
        path: str,
        module: nn.Module,
        branch: Branch,
        norm: NormBefore | None = None,
        post_norm: Norm | None = None,
    ) -> MlpBranch | MixerBranch:
        gate_up, down = (self.linears(path, module, names) for names in (branch.inputs, (branch.out,)))
        if branch.act is None:
            act = branch.plain_act
            assert act is not None
            return MixerBranch(
                inputs=gate_up,
                mixer=Pointwise(act),
                inner=(),
                out=down,
                scale=branch.scale,
                in_scale=branch.in_scale,
                norm=norm,
                post_norm=post_norm,
            )
        return MlpBranch(
            gate_up=gate_up,
            act=branch.act,
            gate_scale=branch.gate_scale,
            per_layer=branch.gates_per_layer,
            down=down,
            scale=branch.scale,
            norm=norm,
            post_norm=post_norm,
        )

    def shared_mlp(self, path: str, block: nn.Module, branch: Branch) -> MlpBranch | MixerBranch | None:
        """As ``mlp``, for the MLP in a mixture of experts that all tokens go through; None where it does something else."""
        module = block.get_submodule(branch.path)
        with on_noise(module, None):
            known = _computes(module, branch, BranchMaker(self.shell, REFERENCE, {}).mlp(path, block, branch))
        return self.mlp(path, block, branch) if known else None


def _computes(module: nn.Module, branch: Branch, part: MlpBranch | MixerBranch) -> bool:
    """Whether an MLP with noise for weights computes what a branch does. Inputs are so large that a bound inside would show."""
    generator, width = torch.Generator().manual_seed(0), matrix_of(part.linears[0].linears[0]).shape[1]
    x = FAR * torch.randn(POSITIONS.numel(), width, generator=generator, device="cpu", dtype=torch.float32)
    try:
        expected, actual = module(x[None])[0], branch.own_scale * part(x)
        return bool((expected - actual).abs().max() <= TOLERANCE[torch.float32] * expected.abs().max())
    except Exception:  # of any kind: it is the model's own code
        return False


class FusedForms:
    """The fused forms of the layers of one shell, by layer."""

    def __init__(self, shell: ModelShell, rotary: Rotary, layers: Sequence[tuple[str, Any, Structure]]) -> None:
        """layers: with their paths. Mixtures of experts must not be taken over yet."""
        self._shell, self._rotary, self._layers = shell, rotary, layers
        self._numbers: list[int | None] = []  # for each layer, the number of the form that fits; None: no form does
        shared, known = (
            dict[str, Any](),
            dict[str, int | None](),
        )  # shared: keys and values that layers take from others
        with clipping_within_reach(shell.module):
            for path, layer, structure in layers:
                kind = path if shell.same_keys else self._kind_of(layer, structure)
                if kind not in known:
                    with on_noise(layer, rotary.module), run_on(layer.modules(), REFERENCE):
                        trial = _Trial(BranchMaker(shell, REFERENCE, {}), rotary, shared, path, layer, structure)
                        forms = enumerate(trial.forms())
                        known[kind] = next(
                            (n for n, form in forms if trial.agrees(form) and trial.agrees_far(form)), None
                        )
                self._numbers.append(known[kind])

    def found(self, maker: BranchMaker) -> Iterator[FusedDecoderLayer | None]:
        """Each layer's fused form with its weights; None where no form gives the same output on a few random tokens."""
        shared = dict[str, Any]()
        with clipping_within_reach(self._shell.module):
            for (path, layer, structure), number in zip(self._layers, self._numbers, strict=True):
                if number is None:
                    yield None
                    continue
                trial = _Trial(maker, self._rotary, shared, path, layer, structure)
                form = next(itertools.islice(trial.forms(), number, None), None)
                yield form if form is not None and trial.agrees(form) else None

    def _kind_of(self, layer: Any, structure: Structure) -> str:
        """Text that is equal for layers which differ in nothing but the numbers in their tensors."""
        values, layers = vars(self._shell.config).values(), self._shell.num_layers
        lists = [value for value in values if isinstance(value, list) and len(value) == layers]
        numbers = [
            (name, type(m), key, value)
            for name, m in layer.named_modules()
            for key, value in vars(m).items()
            if key != "layer_idx" and isinstance(value, str | int | float | None)
        ]
        shapes = [(name, tensor.shape) for name, tensor in layer.state_dict().items()]
        index = _index_of(layer)
        of_index = None if index is None else (self._rotary.kinds[index], [values[index] for values in lists])
        return repr((structure, of_index, numbers, shapes))


def _index_of(layer: nn.Module) -> int | None:
    modules: Iterator[Any] = layer.modules()
    return next((m.layer_idx for m in modules if hasattr(m, "layer_idx")), None)


class _Trial:
    """A layer's own forward on a few random tokens, to compare forms with. It uses the tensors that the layer has now."""

    def __init__(
        self,
        maker: BranchMaker,
        rotary: Rotary,
        shared: dict[str, Any],
        path: str,
        layer: Any,
        structure: Structure,
    ) -> None:
        shell, self._ops = maker.shell, maker.ops
        self._shell, self._rotary, self._layer, self._structure = shell, rotary, layer, structure
        self._linears, self._mlp = partial(maker.linears, path, layer), partial(maker.mlp, path, layer)
        named = next((branch.out for branch in structure.branches if branch.out), structure.norms[0])
        like = matrix_of(layer.get_submodule(named))
        self._norms = {name: norm_of(layer.get_submodule(name), like.shape[0], like) for name in structure.norms}
        self._returned: Any = None
        index = _index_of(layer)
        if index is None or None in self._norms.values():
            return
        self._index = index
        generator = torch.Generator().manual_seed(index)
        positions, kind = rotary.probed(like.device), rotary.kinds[index]
        self._recorder = Recorder(shell.same_keys)
        self._x, self._per_layer = (
            torch.randn(1, positions.numel(), width, generator=generator, device="cpu").to(like)
            for width in (like.shape[0], _per_layer_width(layer, structure))
        )
        embeddings = rotary.given(self._x, positions, kind)
        self._tables = rotary.tables(embeddings, positions, kind)
        arguments = {"position_ids": positions[None], "position_embeddings": embeddings}
        arguments |= {"stoker_context": self._recorder, cache_name(type(layer).forward): PackedPositions(positions)}
        arguments |= {"shared_kv_states": shared, "prev_topk_indices": EVERY_KEY}
        if self._per_layer.numel():
            arguments["per_layer_input"] = self._per_layer
        try:
            with shell.recurrent.within(self._recorder):
                self._returned = layer(self._x, attention_mask=None, **arguments)
        except Exception:  # of any kind: it needs other arguments
            return
        expected = self._returned[0] if isinstance(self._returned, tuple) else self._returned
        self._expected = expected.float()
        # Relative to what the layer adds: next to a large residual a wrong layer would look right.
        added = (self._expected - self._x.float()).abs().max()
        rounding = 4 * torch.finfo(like.dtype).eps * self._expected.abs().max()
        self._tolerance = TOLERANCE.get(like.dtype, 0.0) * added + rounding

    def agrees(self, form: FusedDecoderLayer) -> bool:
        try:
            actual = form.hidden(self._x, self._tables, self._recorder, self._per_layer[0])
        except Exception:  # of any kind: sizes that do not fit together
            return False
        errors = (self._expected - actual.float()).abs().amax(-1).flatten()
        if form.complete:
            return bool(errors.max() <= self._tolerance)
        # One rounding may give a token other experts. So where the layer runs a module of its own, only most tokens have to
        # agree; and most of those whose queries have a factor, which may be just the last few.
        factor = torch.ones_like(errors) if self._tables is None or len(self._tables) < 3 else self._tables[2].flatten()
        parts = errors, errors[factor != 1]
        return all(bool(part.median() <= self._tolerance) for part in parts if part.numel())

    def agrees_far(self, form: FusedDecoderLayer) -> bool:
        """Whether MLPs agree on numbers so large that any bound would show."""
        return all(
            _computes(self._layer.get_submodule(branch.path), branch, part)
            for branch, part in zip(self._structure.branches, form.branches, strict=True)
            if isinstance(part, MlpBranch | MixerBranch) and branch.is_mlp
        )

    def forms(self) -> Iterator[FusedDecoderLayer]:
        """The forms that the layer may have. Their order does not depend on its tensors."""
        if self._returned is None:
            return
        structure = self._structure
        scale = None if structure.scale is None else getattr(self._layer, structure.scale)
        for chosen in itertools.product(*map(self._branches, structure.branches)):
            branches = iter(chosen)
            blocks = [
                Block(
                    norm=self._before(block.norm),
                    branches=tuple(itertools.islice(branches, len(block.branches))),
                    post_norm=self._norm(block.post_norm),
                )
                for block in structure.blocks
            ]
            yield FusedDecoderLayer(
                self._layer, self._index, blocks, scale, self._ops, self._rotary, self._shell.recurrent, self._returned
            ).eval()

    def _branches(self, branch: Branch) -> Iterator[MixerBranch | MlpBranch | OriginalBranch]:
        """The forms that a branch may have."""
        module = self._layer.get_submodule(branch.path)
        of_its_own: dict[str, Any] = {"norm": self._before(branch.norm), "post_norm": self._norm(branch.post_norm)}
        if not branch.inputs:
            router = None if branch.router is None else self._layer.get_submodule(branch.router)
            yield OriginalBranch(module, router, branch.scale, **of_its_own)
            return
        if branch.act is not None or branch.plain_act is not None:
            yield self._mlp(branch, **of_its_own)
            return
        inputs, out = self._linears(branch.inputs), self._linears((branch.out,))
        inner = tuple(self._linears((name,)) for name in branch.inner)
        linears_of = inputs.linears, inner, out.linears[0]
        mixers = mixers_of(
            module,
            self._ops,
            *linears_of,
            self._recorder.options,
            tables=self._tables or (),
            takes_keys=self._index in self._shell.same_keys,
        )
        of_its_own |= {"scale": branch.scale, "in_scale": branch.in_scale}
        for mixer in mixers:
            yield MixerBranch(inputs=inputs, mixer=mixer, inner=inner, out=out, **of_its_own)

    def _before(self, name: str | None) -> NormBefore | None:
        norm = self._norm(name)
        return None if name is None or norm is None else NormBefore(norm, self._layer.get_submodule(name), self._ops)

    def _norm(self, name: str | None) -> Norm | None:
        return None if name is None else self._norms[name]


def _per_layer_width(layer: Any, structure: Structure) -> int:
    """The width of the input that the layer gets besides hidden states; 0 where there is none."""
    outs = [branch.out for branch in structure.branches if branch.gates_per_layer]
    return int(layer.get_submodule(outs[0]).in_features) if outs else 0
