"""A decoder layer of few operations, for the structures that most decoders share.

``h += mixer(h); h += mlp(h)``, or either alone, with norms before and after, the mixer attention or what stands in its
place. It replaces a shell's layer only where it gives the same numbers on a probe; any other layer stays what it is.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stoker.engine.fused_mixers import Mixer, mixers_of
from stoker.engine.layer_structure import Branch, Structure, norm_of, structure_of
from stoker.engine.lora import Adapted
from stoker.engine.model import ModelShell
from stoker.engine.plain_model import PlainModel, has_rotary, rotary_embedding, rotary_kinds
from stoker.engine.probe import POSITIONS, TOLERANCE, Recorder
from stoker.engine.routing import is_mixture, mixture_of, shared_mlps, take_over_mixtures
from stoker.kernels.ops import Ops
from stoker.kernels.reference.norm_rotary import Activation, Norm

_log = logging.getLogger("stoker")


class _Linears:
    """Linears that read the same input: one matmul where their weights lie side by side, else one each."""

    def __init__(
        self,
        ops: Ops,
        paths: tuple[str, ...],
        linears: Sequence[Any],
        lora: Adapted,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> None:
        self.ops = ops
        self.paths = paths
        self.lora = lora
        self.linears = linears
        self.weight = weight
        self.bias = bias

    def __call__(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        gated: Activation | None = None,
        residual: Tensor | None = None,
        scale: float = 1.0,
        in_place: bool = False,
    ) -> Tensor:
        """As ``Ops.linear``; adapters come after the projection and before all else."""
        rows = self.lora.rows
        if self.weight is not None and rows is None:
            options = {"norm": norm, "gated": gated, "residual": residual, "scale": scale, "in_place": in_place}
            return self.ops.linear(x, self.weight, self.bias, **options)
        x = x if norm is None else self.ops.rms_norm(x, *norm)
        # Adapters that only add may add to the residual as well.
        onto = residual if in_place and scale == 1.0 and gated is None and self.lora.layers.only_add else None
        if self.weight is not None:
            out = self.ops.linear(x, self.weight, self.bias, residual=onto, in_place=onto is not None)
        else:
            onto = None
            out = torch.cat([self.ops.linear(x, m.weight, m.bias) for m in self.linears], dim=-1)
        if rows is not None:
            out = self.lora.apply(x, out, rows, gated)
        elif gated is not None:
            out = self.ops.act_mul(out, gated)
        if residual is None or onto is not None:
            return out
        return torch.add(residual, out, alpha=scale, out=residual if in_place else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mixing:
    """Attention, what stands in its place, or an activation, between the linears before and after it."""

    inputs: _Linears
    mixer: Mixer
    out: _Linears
    scale: float
    in_scale: float

    own: ClassVar[bool] = False  # whether it is a module of the original's that is run as it is

    @property
    def linears(self) -> tuple[_Linears, ...]:
        return self.inputs, self.out

    def __call__(self, x: Tensor, norm: Norm | None, rotary: Any, context: Any, **add: Any) -> Tensor:
        """add: ``residual`` and what belongs to it, as of ``Ops.linear``."""
        return self.out(self.mixer(self.inputs(x, norm=norm), rotary, context), **add)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mlp:
    gate_up: _Linears
    act: Activation
    gate_scale: float
    down: _Linears
    scale: float

    in_scale: ClassVar[float] = 1.0
    own: ClassVar[bool] = False

    @property
    def linears(self) -> tuple[_Linears, ...]:
        return self.gate_up, self.down

    def __call__(
        self, x: Tensor, norm: Norm | None = None, rotary: Any = None, context: Any = None, **add: Any
    ) -> Tensor:
        if self.gate_scale == 1.0:
            return self.down(self.gate_up(x, norm=norm, gated=self.act), **add)
        ops = self.gate_up.ops
        return self.down(ops.act_mul(self.gate_up(x, norm=norm), self.act, self.gate_scale), **add)


@dataclass(frozen=True, slots=True)
class _Own:
    """A module of the original layer."""

    module: Any
    scale: float

    in_scale: ClassVar[float] = 1.0
    own: ClassVar[bool] = True
    linears: ClassVar[tuple[_Linears, ...]] = ()

    def __call__(
        self,
        x: Tensor,
        norm: Norm | None,
        rotary: Any,
        context: Any,
        *,
        residual: Tensor | None = None,
        scale: float = 1.0,
        in_place: bool = False,
    ) -> Tensor:
        assert norm is None
        if (mixture := mixture_of(self.module)) is not None:
            return mixture(x, residual=residual, scale=scale, in_place=in_place)[0]
        out = self.module(x[None])
        out = (out[0] if isinstance(out, tuple) else out)[0]  # some return what their router saw, too
        return out if residual is None else torch.add(residual, out, alpha=scale, out=residual if in_place else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """As ``layer_structure.Block``. It is held outside the module, so that reading it is cheap and no parameter is renamed."""

    norm: Norm | None
    branches: tuple[_Mixing | _Mlp | _Own, ...]
    post_norm: Norm | None

    @property
    def norm_is_read(self) -> bool:
        """Whether by other than one linear, which would do the norm on its way."""
        return len(self.branches) > 1 or any(branch.own or branch.in_scale != 1.0 for branch in self.branches)


class FusedDecoderLayer(nn.Module):
    """Stands in for one decoder layer of the shell. Refers to the original's parameters and owns none."""

    def __init__(self, layer: Any, index: int, blocks: Sequence[_Block], ops: Ops, returned: Any) -> None:
        """returned: by the original, whose model may take hidden states from a tuple."""
        super().__init__()
        vars(self).update((name, value) for name, value in vars(layer).items() if isinstance(value, str))  # its kind
        self.ops, self.index, self.blocks = ops, index, tuple(blocks)
        self.besides = (None,) * (len(returned) - 1) if isinstance(returned, tuple) else None

    @property
    def branches(self) -> list[_Mixing | _Mlp | _Own]:
        return [branch for block in self.blocks for branch in block.branches]

    @property
    def complete(self) -> bool:
        """Whether the layer runs nothing of the original's own."""
        return not any(branch.own for branch in self.branches)

    @property
    def runs_on_ops(self) -> bool:
        """Whether no module of the original's runs by its own code; without adapters, which may be over its router."""
        return all(is_mixture(branch.module) for branch in self.branches if isinstance(branch, _Own))

    @property
    def adapted(self) -> dict[tuple[str, ...], Adapted]:
        """The groups of linears that it runs."""
        return {linears.paths: linears.lora for branch in self.branches for linears in branch.linears}

    def forward(
        self,
        hidden_states: Tensor,
        *,
        stoker_context: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: Any,
    ) -> Any:
        """What the original returns, but for what attention saw."""
        out = self.hidden(hidden_states, position_embeddings, stoker_context)
        return out if self.besides is None else (out, *self.besides)

    def hidden(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        context: Any,
        *,
        in_place: bool = False,
    ) -> Tensor:
        """hidden_states: [1, T, D], which nobody reads afterwards if ``in_place``; position_embeddings: cos and sin, [1, T, R],
        of a model that has some."""
        x = hidden_states[0]
        for block in self.blocks:
            given, norm = x, block.norm
            if norm is not None and block.norm_is_read:
                given, norm = self.ops.rms_norm(x, *norm), None
            for branch in block.branches:
                scaled = given if branch.in_scale == 1.0 else given * branch.in_scale
                inputs = scaled, norm, position_embeddings, context
                if block.post_norm is None:
                    x = branch(*inputs, residual=x, scale=branch.scale, in_place=in_place)
                else:
                    x = self.ops.rms_norm(branch(*inputs), *block.post_norm, residual=x)
                in_place = True  # from here on it is the layer's own
        return x[None]


def fusion_groups(shell: ModelShell) -> list[tuple[str, ...]]:
    """Names of the parameters that would be one matmul if they lay side by side."""
    groups = []
    for path, _, _, layer, structure in _candidates(shell):
        for group in structure.groups:
            groups += _names_of(path, layer, group)
    for path, block, branch in shared_mlps(shell.module):
        groups += _names_of(path, block, branch.inputs)
    return groups


def _names_of(path: str, module: nn.Module, linears: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Of the weights of linears below ``path``, which together is one name, and of their biases."""
    kinds = [kind for kind in ("weight", "bias") if getattr(module.get_submodule(linears[0]), kind) is not None]
    return [tuple(f"{path}.{name}.{kind}" for name in linears) for kind in kinds if len(linears) > 1]


def fuse_layers(shell: ModelShell, ops: Ops, fused: Mapping[tuple[str, ...], Tensor]) -> tuple[int, bool]:
    """Replace the layers that agree with their fused form. Returns how many were, and whether that is all of the model.

    Where all layers were replaced, and embedding, layers, norm and head in a row are all there is to the model, its own
    forward is passed over. That is all of it unless a layer keeps an MLP that runs its own code.
    """
    with torch.inference_mode(), torch.autocast(shell.device.type, enabled=False):
        take_over_mixtures(shell.module, ops, shell.lora, partial(_mlp_of, shell, ops, fused))
        if not has_rotary(shell):
            return 0, False
        for path, siblings, index, layer, structure in list(_candidates(shell)):
            replacement = _fused(layer, structure, shell, ops, fused, path)
            if replacement is not None:
                siblings[index] = replacement
                own = next((f"{path}.{branch.path}" for branch in structure.branches if not branch.inputs), None)
                shell.lora.replaced(path, replacement.adapted, own)
        layers = [m for m in shell.module.modules() if isinstance(m, FusedDecoderLayer)]
        if len(layers) < shell.num_layers:
            kept = shell.num_layers - len(layers)
            _log.info("%d of %d layers run as the model's own code, which is slower", kept, shell.num_layers)
        if len(layers) < shell.num_layers or not PlainModel.is_plain(shell):
            return len(layers), False
        plain = PlainModel(shell, ops)
        if not plain.agrees():
            return len(layers), False
        shell.hidden, shell.logits, shell.refresh = plain.hidden, plain.logits, plain.refresh
    return len(layers), all(layer.runs_on_ops for layer in layers)


def _candidates(shell: ModelShell) -> Iterator[tuple[str, nn.ModuleList, int, Any, Structure]]:
    """(path, list, index, layer, structure) of every decoder layer that has one."""
    of_text = set(shell.decoder.modules())
    for path, module in shell.module.named_modules():
        if isinstance(module, nn.ModuleList) and module in of_text:
            for index, layer in enumerate(module):
                structure = structure_of(layer)
                if structure is not None:
                    yield f"{path}.{index}", module, index, layer, structure


def _linears_of(
    shell: ModelShell,
    ops: Ops,
    fused: Mapping[tuple[str, ...], Tensor],
    path: str,
    module: nn.Module,
    names: tuple[str, ...],
) -> _Linears:
    """Of a module and its path, the linears with these names."""
    modules: list[Any] = [module.get_submodule(name) for name in names]
    if len(names) == 1:
        weight, bias = modules[0].weight, modules[0].bias
    else:
        weight, bias = (fused.get(tuple(f"{path}.{n}.{kind}" for n in names)) for kind in ("weight", "bias"))
    paths = tuple(f"{path}.{name}" for name in names)
    return _Linears(ops, paths, modules, shell.lora.group(paths), weight, bias)


def _mlp_of(
    shell: ModelShell, ops: Ops, fused: Mapping[tuple[str, ...], Tensor], path: str, module: nn.Module, branch: Branch
) -> _Mlp:
    assert branch.act is not None
    gate_up, down = (_linears_of(shell, ops, fused, path, module, names) for names in (branch.inputs, (branch.out,)))
    return _Mlp(gate_up=gate_up, act=branch.act, gate_scale=branch.gate_scale, down=down, scale=branch.scale)


def _fused(
    layer: Any,
    structure: Structure,
    shell: ModelShell,
    ops: Ops,
    fused: Mapping[tuple[str, ...], Tensor],
    path: str,
) -> FusedDecoderLayer | None:
    """The fused form of a layer, or None where there is none that gives the same output on a few random tokens."""
    index = next((m.layer_idx for m in layer.modules() if hasattr(m, "layer_idx")), None)
    names = [name for block in structure.blocks for name in (block.norm, block.post_norm) if name is not None]
    norms = {name: norm_of(layer.get_submodule(name)) for name in names}
    if index is None or None in norms.values():
        return None
    like = layer.get_submodule(next((branch.out for branch in structure.branches if branch.out), names[0])).weight
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(1, POSITIONS.numel(), like.shape[0], generator=generator, device="cpu").to(like)
    positions, recorder = POSITIONS.to(like.device), Recorder()
    rotary = rotary_embedding(shell, x, positions, rotary_kinds(shell)[index])
    arguments = {"position_ids": positions[None], "position_embeddings": rotary, "stoker_context": recorder}
    try:
        with shell.recurrent.within(recorder):
            returned = layer(x, attention_mask=None, **arguments)
    except Exception:  # of any kind: it wants more than these
        return None
    expected = returned[0] if isinstance(returned, tuple) else returned
    # Relative to what the layer adds: next to a large residual a wrong layer would look right.
    added = (expected.float() - x.float()).abs().max()
    rounding = 4 * torch.finfo(like.dtype).eps * expected.float().abs().max()

    linears = partial(_linears_of, shell, ops, fused, path, layer)

    def ways(branch: Branch) -> Iterator[_Mixing | _Mlp | _Own]:
        """What a branch may be."""
        module = layer.get_submodule(branch.path)
        if not branch.inputs:
            yield _Own(module, branch.scale)
            return
        if branch.act is not None:
            yield _mlp_of(shell, ops, fused, path, layer, branch)
            return
        inputs, out = linears(branch.inputs), linears((branch.out,))
        mixers: Iterable[Mixer]
        if (act := branch.plain_act) is not None:
            mixers = [lambda x, *_: act(x)]
        else:
            widths = [m.out_features for m in inputs.linears], out.linears[0].in_features
            mixers = mixers_of(module, ops, *widths, recorder.options, rotates=rotary is not None)
        for mixer in mixers:
            yield _Mixing(inputs=inputs, mixer=mixer, out=out, scale=branch.scale, in_scale=branch.in_scale)

    for chosen in itertools.product(*map(ways, structure.branches)):
        branches = iter(chosen)
        blocks = [
            _Block(
                norm=norms[block.norm] if block.norm else None,
                branches=tuple(itertools.islice(branches, len(block.branches))),
                post_norm=norms[block.post_norm] if block.post_norm else None,
            )
            for block in structure.blocks
        ]
        out = FusedDecoderLayer(layer, index, blocks, ops, returned).eval()
        errors = (expected.float() - out.hidden(x, rotary, recorder).float()).abs().amax(-1).flatten()
        # One rounding may give a token other experts: of layers with an MLP of their own, most tokens have to agree.
        error = errors.max() if out.complete else errors.median()
        if error <= TOLERANCE.get(like.dtype, 0.0) * added + rounding:
            return out
    return None
