"""Replaces a shell's decoder layers by fused ones, made of few operations, for the structures that most decoders share.

A layer is replaced only where its fused form gives the same numbers on a probe; any other layer stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from stoker.engine.layers.experts import may_be_replaced
from stoker.engine.layers.fused_decoder import FusedDecoderLayer
from stoker.engine.layers.fused_forms import BranchMaker, FusedForms
from stoker.engine.layers.fused_model import FusedModel
from stoker.engine.layers.fused_moe import shared_mlps, take_over_mixtures
from stoker.engine.layers.layer_structure import Structure, structure_of
from stoker.engine.layers.probe import in_full_precision
from stoker.engine.layers.rotary import Rotary
from stoker.engine.model import ModelShell
from stoker.kernels.ops import Ops

_log = logging.getLogger("stoker")


def fusion_groups(shell: ModelShell) -> list[tuple[str, ...]]:
    """Groups of parameter names that would be one matmul if they lay side by side."""
    groups = []
    for path, _, _, layer, structure in _candidates(shell):
        for group in structure.groups:
            groups += _names_of(path, layer, group)
    for path, block, branch in shared_mlps(shell.module):
        groups += _names_of(path, block, branch.inputs)
    return groups


def layer_weights(shell: ModelShell, *, shared: bool = False) -> list[list[str]]:
    """Names of the weights that fused layers would multiply by, layer by layer.

    shared: also those of shared experts, and of experts that run on the operation only where their mixture does.
    """
    found, beside = [], list(shared_mlps(shell.module)) if shared else []
    for path, _, _, layer, structure in _candidates(shell):
        linears = [name for b in structure.branches if b.inputs for name in (*b.inputs, *b.inner, b.out)]
        names = [f"{path}.{name}.weight" for name in linears if name]
        for below, module in layer.named_modules():
            names += [f"{path}.{below}.{name}" for name in may_be_replaced(module, in_mixture=shared)]
        for block, _, branch in beside:
            if block == path or block.startswith(f"{path}."):
                names += [f"{block}.{name}.weight" for name in (*branch.inputs, branch.out) if name]
        found.append(names)
    return found


def _names_of(path: str, module: nn.Module, linears: tuple[str, ...]) -> list[tuple[str, ...]]:
    """For several linears below ``path``: the group of their weights' names, and that of their biases' if they have any."""
    kinds = [kind for kind in ("weight", "bias") if getattr(module.get_submodule(linears[0]), kind) is not None]
    return [tuple(f"{path}.{name}.{kind}" for name in linears) for kind in kinds if len(linears) > 1]


def fuse_layers(shell: ModelShell, ops: Ops, fused: Mapping[tuple[str, ...], Tensor]) -> tuple[int, bool]:
    """Replace the layers that agree with their fused form. Returns how many, and whether all of the model is fused.

    Where all layers are replaced, and the model is just embedding, layers, norm and head, its own forward is no longer used. It
    is then all fused, unless a layer keeps a module that runs its own code.
    """
    with torch.inference_mode(), torch.autocast(shell.device.type, enabled=False), in_full_precision():
        candidates, rotary, forms = list(_candidates(shell)), None, None
        maker = BranchMaker(shell, ops, fused)
        with suppress(Exception):  # of any kind: they depend on more than positions
            rotary = Rotary(shell)
        if rotary is not None:
            forms = FusedForms(shell, rotary, [(path, layer, structure) for path, _, _, layer, structure in candidates])
        take_over_mixtures(shell.module, ops, shell.lora, maker.shared_mlp)
        found = [] if forms is None else list(zip(candidates, forms.found(maker), strict=True))
        done = {replacement.index for _, replacement in found if replacement is not None}
        # If a layer stays as it is and takes another layer's keys, that one has to stay too: a fused layer hands out none.
        done -= {of for index, of in shell.same_keys.items() if index not in done}
        for (path, siblings, at, _, structure), replacement in found:
            if replacement is not None and replacement.index in done:
                siblings[at] = replacement
                shell.lora.replaced(path, replacement.adapted, [f"{path}.{name}" for name in structure.kept])
        layers = [m for m in shell.module.modules() if isinstance(m, FusedDecoderLayer)]
        if len(layers) < shell.num_layers:
            kept = shell.num_layers - len(layers)
            _log.info("%d of %d layers run as the model's own code, which is slower", kept, shell.num_layers)
        if rotary is None or len(layers) < shell.num_layers or not FusedModel.fits(shell):
            return len(layers), False
        fused_model = FusedModel(shell, ops, rotary)
        if not fused_model.agrees():
            return len(layers), False
        if fused_model.per_layer is not None:
            project = fused_model.per_layer.project
            shell.lora.replaced(project.paths[0], {project.paths: project.lora})
            shell.lora.replaced(fused_model.per_layer.norm_path, {})
        shell.hidden, shell.logits, shell.refresh = fused_model.hidden, fused_model.logits, fused_model.refresh
        shell.share_head = fused_model.share_head
    return len(layers), all(layer.runs_on_ops for layer in layers)


def release_weights(shell: ModelShell) -> None:
    """Let go of all weights, and of those that lie side by side. Nothing can run on the shell afterwards.

    Its modules are in reference cycles, and would keep them until garbage is collected.
    """
    shell.release()
    for layer in shell.module.modules():
        for branch in layer.branches if isinstance(layer, FusedDecoderLayer) else ():
            for group in branch.linears:
                group.weight = group.bias = None


def _candidates(shell: ModelShell) -> Iterator[tuple[str, nn.ModuleList, int, Any, Structure]]:
    """(path, list, index, layer, structure) of every decoder layer that has one."""
    of_text = set(shell.decoder.modules())
    for path, module in shell.module.named_modules():
        if isinstance(module, nn.ModuleList) and module in of_text:
            for index, layer in enumerate(module):
                structure = structure_of(layer)
                if structure is not None:
                    yield f"{path}.{index}", module, index, layer, structure
