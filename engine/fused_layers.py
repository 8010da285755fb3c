"""A decoder layer of few operations, for the structures that most decoders share.

``h += mixer(h); h += mlp(h)``, or either alone, with norms before and after, the mixer attention or what stands in its
place. It replaces a shell's layer only where it gives the same numbers on a probe; any other layer stays what it is.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stoker.engine.experts import may_be_rounded
from stoker.engine.fused_branches import Block, Given, Mixing, Mlp, NormBefore, Own
from stoker.engine.fused_mixers import mixers_of
from stoker.engine.layer_structure import Branch, Structure, norm_of, structure_of
from stoker.engine.linears import Linears, matrix_of
from stoker.engine.lora import Adapted
from stoker.engine.model import ModelShell
from stoker.engine.plain_model import PlainModel
from stoker.engine.probe import TOLERANCE, Recorder, clipping_within_reach, in_full_precision
from stoker.engine.rotary import Rotary
from stoker.engine.routing import shared_mlps, take_over_mixtures
from stoker.engine.step_context import PackedPositions
from stoker.kernels.ops import Ops
from stoker.kernels.reference.norm_rotary import Norm

_log = logging.getLogger("stoker")


class FusedDecoderLayer(nn.Module):
    """Stands in for one decoder layer of the shell. Refers to the original's parameters and owns none."""

    def __init__(
        self,
        layer: Any,
        index: int,
        blocks: Sequence[Block],
        scale: Tensor | None,
        ops: Ops,
        rotary: Rotary,
        returned: Any,
    ) -> None:
        """scale: of its output, [1]; returned: by the original, whose model may take hidden states from a tuple."""
        super().__init__()
        vars(self)["scale"] = scale  # not a buffer of this
        self.rotary = rotary
        vars(self).update((name, value) for name, value in vars(layer).items() if isinstance(value, str))  # its kind
        self.ops, self.index, self.blocks = ops, index, tuple(blocks)
        self.reads_per_layer = any(isinstance(b, Mlp) and b.per_layer for b in self.branches)
        self.besides = (None,) * (len(returned) - 1) if isinstance(returned, tuple) else None

    @property
    def branches(self) -> list[Mixing | Mlp | Own]:
        return [branch for block in self.blocks for branch in block.branches]

    @property
    def complete(self) -> bool:
        """Whether the layer runs nothing of the original's own."""
        return not any(branch.own for branch in self.branches)

    @property
    def runs_on_ops(self) -> bool:
        """Whether no module of the original's runs by its own code; without adapters, which may be over a router."""
        return all(branch.runs_on_ops for branch in self.branches if isinstance(branch, Own))

    @property
    def adapted(self) -> dict[tuple[str, ...], Adapted]:
        """The groups of linears that it runs."""
        return {linears.paths: linears.lora for branch in self.branches for linears in branch.linears}

    def forward(
        self,
        hidden_states: Tensor,
        *others: Any,
        stoker_context: Any,
        position_embeddings: Any = None,
        position_ids: Any = None,
        per_layer_input: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """What the original returns, but for what attention saw. others: ``per_layer_input``, or what is no matter."""
        tables = self.rotary.tables(position_embeddings, position_ids, self.rotary.kinds[self.index])
        given: Any = next(iter(others), per_layer_input)
        per_layer = given[0] if self.reads_per_layer else None
        out = self.hidden(hidden_states, tables, stoker_context, per_layer)
        return out if self.besides is None else (out, *self.besides)

    def hidden(
        self,
        hidden_states: Tensor,
        tables: tuple[Tensor, ...] | None,
        context: Any,
        per_layer: Tensor | None = None,
        *,
        in_place: bool = False,
    ) -> Tensor:
        """hidden_states: [1, T, D], which nobody reads afterwards if ``in_place``; tables: of ``Rotary``; per_layer: [T, P]."""
        x, given = hidden_states[0], Given(tables, context, per_layer)
        for block in self.blocks:
            read, norm = x, None
            if block.norm is not None:
                if block.norm_is_read or block.norm.adapted:
                    read = block.norm(x)
                else:
                    norm = block.norm.norm
            # Of all branches, before one adds to it in place.
            reads = [_read(branch, x, read, norm) for branch in block.branches]
            added = None  # by its branches, where there is a norm of that
            for branch, own in zip(block.branches, reads, strict=True):
                inputs = *own, given
                if branch.post_norm is not None:
                    added = self.ops.rms_norm(branch(*inputs), *branch.post_norm, residual=added)
                elif block.post_norm is not None:
                    added = branch(*inputs)
                else:
                    x = branch(*inputs, residual=x, scale=branch.scale, in_place=in_place)
                    in_place = True  # from here on it is the layer's own
            if block.post_norm is not None:
                assert added is not None
                last = self.scale if block is self.blocks[-1] else None
                x = self.ops.rms_norm(added, *block.post_norm, residual=x, scale=last)
                in_place = True
        return x[None]


def _read(branch: Mixing | Mlp | Own, x: Tensor, read: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
    """What a branch reads of a block's input ``x``, and a norm of it that is left to the branch.

    read, norm: the same of branches without a norm of their own.
    """
    if branch.norm is None:
        return read if branch.in_scale == 1.0 else read * branch.in_scale, norm
    return x if branch.norms_itself else branch.norm(x), None


def _per_layer_width(layer: Any, structure: Structure) -> int:
    """Of what the layer is given besides hidden states; 0 where it is given nothing."""
    outs = [branch.out for branch in structure.branches if branch.gates_per_layer]
    return int(layer.get_submodule(outs[0]).in_features) if outs else 0


def fusion_groups(shell: ModelShell) -> list[tuple[str, ...]]:
    """Names of the parameters that would be one matmul if they lay side by side."""
    groups = []
    for path, _, _, layer, structure in _candidates(shell):
        for group in structure.groups:
            groups += _names_of(path, layer, group)
    for path, block, branch in shared_mlps(shell.module):
        groups += _names_of(path, block, branch.inputs)
    return groups


def layer_weights(shell: ModelShell) -> list[list[str]]:
    """Names of the weights that fused layers would multiply by, layer by layer."""
    found = []
    for path, _, _, layer, structure in _candidates(shell):
        linears = [name for b in structure.branches if b.inputs for name in (*b.inputs, *b.inner, b.out)]
        names = [f"{path}.{name}.weight" for name in linears if name]
        for below, module in layer.named_modules():
            names += [f"{path}.{below}.{name}" for name in may_be_rounded(module)]
        found.append(names)
    return found


def _names_of(path: str, module: nn.Module, linears: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Of the weights of linears below ``path``, which together is one name, and of their biases."""
    kinds = [kind for kind in ("weight", "bias") if getattr(module.get_submodule(linears[0]), kind) is not None]
    return [tuple(f"{path}.{name}.{kind}" for name in linears) for kind in kinds if len(linears) > 1]


def fuse_layers(shell: ModelShell, ops: Ops, fused: Mapping[tuple[str, ...], Tensor]) -> tuple[int, bool]:
    """Replace the layers that agree with their fused form. Returns how many were, and whether that is all of the model.

    Where all layers were replaced, and embedding, layers, norm and head in a row are all there is to the model, its own
    forward is passed over. That is all of it unless a layer keeps an MLP that runs its own code.
    """
    with torch.inference_mode(), torch.autocast(shell.device.type, enabled=False), in_full_precision():
        take_over_mixtures(shell.module, ops, shell.lora, partial(_mlp_of, shell, ops, fused))
        try:
            rotary = Rotary(shell)
        except Exception:  # of any kind: positions alone do not give them
            return 0, False
        shared: dict[str, Any] = {}  # keys and values that layers take of others
        with clipping_within_reach(shell.module):
            found = [
                (candidate, _fused(*candidate[3:], shell, ops, fused, candidate[0], rotary, shared))
                for candidate in _candidates(shell)
            ]
        done = {replacement.index for _, replacement in found if replacement is not None}
        # A layer that stays as it is takes keys of one that does, too: a fused layer hands out none.
        done -= {of for index, of in shell.same_keys.items() if index not in done}
        for (path, siblings, at, _, structure), replacement in found:
            if replacement is not None and replacement.index in done:
                siblings[at] = replacement
                shell.lora.replaced(path, replacement.adapted, [f"{path}.{name}" for name in structure.kept])
        layers = [m for m in shell.module.modules() if isinstance(m, FusedDecoderLayer)]
        if len(layers) < shell.num_layers:
            kept = shell.num_layers - len(layers)
            _log.info("%d of %d layers run as the model's own code, which is slower", kept, shell.num_layers)
        if len(layers) < shell.num_layers or not PlainModel.is_plain(shell):
            return len(layers), False
        plain = PlainModel(shell, ops, rotary)
        if not plain.agrees():
            return len(layers), False
        if plain.per_layer is not None:
            project = plain.per_layer.project
            shell.lora.replaced(project.paths[0], {project.paths: project.lora})
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
) -> Linears:
    """Of a module and its path, the linears with these names."""
    modules: list[Any] = [module.get_submodule(name) for name in names]
    weight: Tensor | None
    if len(names) == 1:
        weight, bias = matrix_of(modules[0]), modules[0].bias
    else:
        weight, bias = (fused.get(tuple(f"{path}.{n}.{kind}" for n in names)) for kind in ("weight", "bias"))
    paths = tuple(f"{path}.{name}" for name in names)
    return Linears(ops, paths, modules, shell.lora.group(paths), weight, bias)


def _mlp_of(
    shell: ModelShell,
    ops: Ops,
    fused: Mapping[tuple[str, ...], Tensor],
    path: str,
    module: nn.Module,
    branch: Branch,
    norm: NormBefore | None = None,
    post_norm: Norm | None = None,
) -> Mlp | Mixing:
    gate_up, down = (_linears_of(shell, ops, fused, path, module, names) for names in (branch.inputs, (branch.out,)))
    if branch.act is None:
        act = branch.plain_act
        assert act is not None
        of_its_own: dict[str, Any] = {"norm": norm, "post_norm": post_norm}
        of_its_own |= {"scale": branch.scale, "in_scale": branch.in_scale}
        return Mixing(inputs=gate_up, mixer=lambda x, *_: act(x), inner=(), out=down, **of_its_own)
    return Mlp(
        gate_up=gate_up,
        act=branch.act,
        gate_scale=branch.gate_scale,
        per_layer=branch.gates_per_layer,
        down=down,
        scale=branch.scale,
        norm=norm,
        post_norm=post_norm,
    )


def _fused(
    layer: Any,
    structure: Structure,
    shell: ModelShell,
    ops: Ops,
    fused: Mapping[tuple[str, ...], Tensor],
    path: str,
    rotary: Rotary,
    shared: dict[str, Any],
) -> FusedDecoderLayer | None:
    """The fused form of a layer, or None where there is none that gives the same output on a few random tokens."""
    index = next((m.layer_idx for m in layer.modules() if hasattr(m, "layer_idx")), None)
    like = matrix_of(
        layer.get_submodule(next((branch.out for branch in structure.branches if branch.out), structure.norms[0]))
    )
    norms = {name: norm_of(layer.get_submodule(name), like.shape[0], like) for name in structure.norms}
    if index is None or None in norms.values():
        return None
    generator = torch.Generator().manual_seed(index)
    positions, recorder, kind = rotary.probed(like.device), Recorder(shell.same_keys), rotary.kinds[index]
    x, per_layer = (
        torch.randn(1, positions.numel(), width, generator=generator, device="cpu").to(like)
        for width in (like.shape[0], _per_layer_width(layer, structure))
    )
    embeddings = rotary.given(x, positions, kind)
    tables = rotary.tables(embeddings, positions, kind)
    arguments = {"position_ids": positions[None], "position_embeddings": embeddings, "stoker_context": recorder}
    arguments |= {"past_key_values": PackedPositions(positions), "shared_kv_states": shared}
    if per_layer.numel():
        arguments["per_layer_input"] = per_layer
    try:
        with shell.recurrent.within(recorder):
            returned = layer(x, attention_mask=None, **arguments)
    except Exception:  # of any kind: it wants more than these
        return None
    expected = returned[0] if isinstance(returned, tuple) else returned
    # Relative to what the layer adds: next to a large residual a wrong layer would look right.
    added = (expected.float() - x.float()).abs().max()
    rounding = 4 * torch.finfo(like.dtype).eps * expected.float().abs().max()

    def before(name: str | None) -> NormBefore | None:
        norm = norm_by(name)
        return None if name is None or norm is None else NormBefore(norm, layer.get_submodule(name), ops)

    def norm_by(name: str | None) -> Norm | None:
        return None if name is None else norms[name]

    linears = partial(_linears_of, shell, ops, fused, path, layer)

    def ways(branch: Branch) -> Iterator[Mixing | Mlp | Own]:
        """What a branch may be."""
        module = layer.get_submodule(branch.path)
        if not branch.inputs:
            router = None if branch.router is None else layer.get_submodule(branch.router)
            yield Own(module, router, branch.scale, before(branch.norm), norm_by(branch.post_norm))
            return
        of_its_own: dict[str, Any] = {"norm": before(branch.norm), "post_norm": norm_by(branch.post_norm)}
        if branch.act is not None or branch.plain_act is not None:
            yield _mlp_of(shell, ops, fused, path, layer, branch, **of_its_own)
            return
        inputs, out = linears(branch.inputs), linears((branch.out,))
        inner = tuple(linears((name,)) for name in branch.inner)
        linears_of = inputs.linears, inner, out.linears[0]
        takes = index in shell.same_keys
        mixers = mixers_of(module, ops, *linears_of, recorder.options, tables=tables or (), takes_keys=takes)
        of_its_own |= {"scale": branch.scale, "in_scale": branch.in_scale}
        for mixer in mixers:
            yield Mixing(inputs=inputs, mixer=mixer, inner=inner, out=out, **of_its_own)

    for chosen in itertools.product(*map(ways, structure.branches)):
        branches = iter(chosen)
        blocks = [
            Block(
                norm=before(block.norm),
                branches=tuple(itertools.islice(branches, len(block.branches))),
                post_norm=norm_by(block.post_norm),
            )
            for block in structure.blocks
        ]
        scale = None if structure.scale is None else getattr(layer, structure.scale)
        out = FusedDecoderLayer(layer, index, blocks, scale, ops, rotary, returned).eval()
        try:
            actual = out.hidden(x, tables, recorder, per_layer[0])
        except Exception:  # of any kind: sizes that do not fit together
            continue
        errors = (expected.float() - actual.float()).abs().amax(-1).flatten()
        # One rounding may give a token other experts: of layers with an MLP of their own, most tokens have to agree.
        error = errors.max() if out.complete else errors.median()
        if error <= TOLERANCE.get(like.dtype, 0.0) * added + rounding:
            return out
    return None
