"""A decoder layer of few operations, for the structures that most decoders share.

``h += attention(h); h += mlp(h)`` with norms before and after either. It replaces a shell's layer only where it gives the
same numbers on a probe; any other layer stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stoker.engine.fused_mixers import Attention, DeltaNet, mixers_of
from stoker.engine.layer_structure import Structure, norm_of, structure_of
from stoker.engine.lora import Adapted
from stoker.engine.model import ModelShell
from stoker.engine.plain_model import PlainModel, has_rotary, rotary_embedding, rotary_kinds
from stoker.engine.probe import POSITIONS, TOLERANCE, Recorder
from stoker.kernels.ops import Ops
from stoker.kernels.reference.norm_rotary import Activation, Norm


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
class _Parts:
    """What a fused layer reads, held outside the module so that reading it is cheap and no parameter is renamed."""

    qkv: _Linears
    out: _Linears
    gate_up: _Linears | None  # None: ``mlp`` is run as it is
    down: _Linears | None
    act: Activation | None
    mlp: Any
    norms: tuple[Norm | None, Norm | None, Norm | None, Norm | None]  # as ``Structure.norms``


class FusedDecoderLayer(nn.Module):
    """Stands in for one decoder layer of the shell. Refers to the original's parameters and owns none."""

    def __init__(self, layer: Any, parts: _Parts, mixer: Attention | DeltaNet, ops: Ops) -> None:
        super().__init__()
        self.ops, self.parts, self.mixer = ops, parts, mixer
        self.scale: float = getattr(layer, "residual_multiplier", 1.0)

    @property
    def complete(self) -> bool:
        """Whether the layer runs nothing of the original's own."""
        return self.parts.gate_up is not None

    @property
    def adapted(self) -> dict[tuple[str, ...], Adapted]:
        """The groups of linears that it runs."""
        w = self.parts
        return {linears.paths: linears.lora for linears in (w.qkv, w.out, w.gate_up, w.down) if linears is not None}

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        stoker_context: Any,
        in_place: bool = False,
        **_: Any,
    ) -> Tensor:
        """hidden_states: [1, T, D], which nobody reads afterwards if ``in_place``; position_embeddings: cos and sin, [1, T, R]."""
        w, x = self.parts, hidden_states[0]
        attention_norm, attention_post_norm, mlp_norm, mlp_post_norm = w.norms
        mixed = self.mixer(w.qkv(x, norm=attention_norm), position_embeddings, stoker_context)
        x = self._add(w.out, mixed, attention_post_norm, x, in_place)
        if w.gate_up is not None and w.down is not None:
            x = self._add(w.down, w.gate_up(x, norm=mlp_norm, gated=w.act), mlp_post_norm, x, True)
        else:
            normed = x if mlp_norm is None else self.ops.rms_norm(x, *mlp_norm)
            x = self._add(self._own_mlp, normed, mlp_post_norm, x, True)
        return x[None]

    def _add(
        self, project: Callable[..., Tensor], x: Tensor, norm: Norm | None, residual: Tensor, in_place: bool
    ) -> Tensor:
        if norm is None:
            return project(x, residual=residual, scale=self.scale, in_place=in_place)
        return self.ops.rms_norm(project(x), *norm, residual=residual)

    def _own_mlp(self, x: Tensor, residual: Tensor | None = None, scale: float = 1.0, in_place: bool = False) -> Tensor:
        out = self.parts.mlp(x[None])
        out = (out[0] if isinstance(out, tuple) else out)[0]  # some return what their router saw, too
        return out if residual is None else torch.add(residual, out, alpha=scale, out=residual if in_place else None)


def fusion_groups(shell: ModelShell) -> list[tuple[str, ...]]:
    """Names of the parameters that would be one matmul if they lay side by side."""
    groups = []
    for path, _, _, layer, structure in _candidates(shell):
        for group in structure.groups:
            for kind in ("weight", "bias"):
                if getattr(layer.get_submodule(group[0]), kind) is not None:
                    groups.append(tuple(f"{path}.{name}.{kind}" for name in group))
    return groups


def fuse_layers(shell: ModelShell, ops: Ops, fused: Mapping[tuple[str, ...], Tensor]) -> tuple[int, bool]:
    """Replace the layers that agree with their fused form. Returns how many were, and whether that is all of the model.

    Where all layers were replaced, and embedding, layers, norm and head in a row are all there is to the model, its own
    forward is passed over. That is all of it unless a layer keeps an MLP of its own.
    """
    with torch.inference_mode(), torch.autocast(shell.device.type, enabled=False):
        if not has_rotary(shell):
            return 0, False
        kinds = rotary_kinds(shell)
        for path, siblings, index, layer, structure in list(_candidates(shell)):
            layer_idx = layer.get_submodule(structure.mixer).layer_idx
            replacement = _fused(layer, structure, shell, ops, fused, path, kinds[layer_idx])
            if replacement is not None:
                siblings[index] = replacement
                kept = None if replacement.complete else f"{path}.mlp"
                shell.lora.replaced(path, replacement.adapted, kept)
        layers = [m for m in shell.module.modules() if isinstance(m, FusedDecoderLayer)]
        if len(layers) < shell.num_layers or not PlainModel.is_plain(shell):
            return len(layers), False
        plain = PlainModel(shell, ops)
        if not plain.agrees():
            return len(layers), False
        shell.hidden, shell.logits, shell.refresh = plain.hidden, plain.logits, plain.refresh
    return len(layers), all(layer.complete for layer in layers)


def _candidates(shell: ModelShell) -> Iterator[tuple[str, nn.ModuleList, int, Any, Structure]]:
    """(path, list, index, layer, structure) of every decoder layer that has one."""
    of_text = set(shell.decoder.modules())
    for path, module in shell.module.named_modules():
        if isinstance(module, nn.ModuleList) and module in of_text:
            for index, layer in enumerate(module):
                structure = structure_of(layer)
                if structure is not None:
                    yield f"{path}.{index}", module, index, layer, structure


def _fused(
    layer: Any,
    structure: Structure,
    shell: ModelShell,
    ops: Ops,
    fused: Mapping[tuple[str, ...], Tensor],
    path: str,
    kind: str | None,
) -> FusedDecoderLayer | None:
    """The fused form of a layer, or None where there is none that gives the same output on a few random tokens."""
    parts = _parts(layer, structure, shell, ops, fused, path)
    if parts is None:
        return None
    like, original = layer.get_submodule(structure.out).weight, layer.get_submodule(structure.mixer)
    generator = torch.Generator().manual_seed(original.layer_idx)
    x = torch.randn(1, POSITIONS.numel(), like.shape[0], generator=generator, device="cpu").to(like)
    positions, recorder = POSITIONS[None].to(like.device), Recorder()
    arguments = {
        "attention_mask": None,
        "position_ids": positions,
        "position_embeddings": rotary_embedding(shell, x, POSITIONS.to(like.device), kind),
        "stoker_context": recorder,
    }
    try:
        with shell.recurrent.within(recorder):
            expected = layer(x, **arguments)
    except Exception:  # of any kind: it wants more than these
        return None
    expected = expected[0] if isinstance(expected, tuple) else expected
    mixers = list(mixers_of(original, ops, [m.out_features for m in parts.qkv.linears], recorder.options))
    # Relative to what the layer adds: next to a large residual a wrong layer would look right.
    added = (expected.float() - x.float()).abs().max()
    rounding = 4 * torch.finfo(like.dtype).eps * expected.float().abs().max()
    for mixer in mixers:
        out = FusedDecoderLayer(layer, parts, mixer, ops).eval()
        errors = (expected.float() - out(x, **arguments).float()).abs().amax(-1).flatten()
        # One rounding may give a token other experts: of layers with an MLP of their own, most tokens have to agree.
        error = errors.max() if out.complete else errors.median()
        if error <= TOLERANCE.get(like.dtype, 0.0) * added + rounding:
            return out
    return None


def _parts(
    layer: Any,
    structure: Structure,
    shell: ModelShell,
    ops: Ops,
    fused: Mapping[tuple[str, ...], Tensor],
    path: str,
) -> _Parts | None:
    """What the fused form of a layer would read; None where a norm is of an unknown kind."""

    def linears(*names: str) -> _Linears:
        modules = [layer.get_submodule(name) for name in names]
        if len(names) == 1:
            weight, bias = modules[0].weight, modules[0].bias
        else:
            weight, bias = (fused.get(tuple(f"{path}.{n}.{kind}" for n in names)) for kind in ("weight", "bias"))
        paths = tuple(f"{path}.{name}" for name in names)
        return _Linears(ops, paths, modules, shell.lora.group(paths), weight, bias)

    norms = [None if name is None else norm_of(layer.get_submodule(name)) for name in structure.norms]
    if any(name is not None and norm is None for name, norm in zip(structure.norms, norms, strict=True)):
        return None
    return _Parts(
        qkv=linears(*structure.qkv),
        out=linears(structure.out),
        gate_up=linears(*structure.gate_up) if structure.gate_up else None,
        down=linears("mlp.down_proj") if structure.gate_up else None,
        act=structure.act,
        mlp=layer.mlp,
        norms=(norms[0], norms[1], norms[2], norms[3]),
    )
