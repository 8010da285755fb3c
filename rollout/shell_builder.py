"""Builds the engine's model, a ``ModelShell``, over the weights of a source, and fuses its layers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from stoker.engine.adapters.lora import LoraLayers
from stoker.engine.device import runtime_for
from stoker.engine.layers.derived_weights import DerivedWeights
from stoker.engine.layers.experts import take_over_experts
from stoker.engine.layers.fp8_weights import Fp8Weights
from stoker.engine.layers.fused_layers import fuse_layers, fusion_groups, layer_weights
from stoker.engine.model import ModelShell
from stoker.engine.parallel.layers import CutWeights
from stoker.engine.parallel.tensor_parallel import TensorParallel
from stoker.kernels.errors import UnsupportedModelError
from stoker.kernels.ops import Ops
from stoker.weight_sync.naming import walk
from stoker.weight_sync.source import WeightSource

_log = logging.getLogger("stoker")


class Fused(NamedTuple):
    """A shell, how many of its layers were fused, and what these read in place of some of its weights.

    wholes: by the names of weights that lie side by side, the one tensor that has them all; derived: the copies in fp8, or this
    rank's parts.
    """

    shell: ModelShell
    layers: int
    wholes: dict[tuple[str, ...], Tensor]
    derived: DerivedWeights | None


class ShellBuilder:
    """Makes shells over sources, and fuses them.

    in_fp8: fused layers multiply by rounded weights; parallel: by this rank's parts of them.
    """

    def __init__(
        self,
        *,
        in_fp8: bool,
        parallel: TensorParallel | None,
        deterministic: bool,
        max_loras: int,
        max_lora_rank: int,
    ) -> None:
        self._in_fp8, self._parallel, self._deterministic = in_fp8, parallel, deterministic
        self._max_loras, self._max_lora_rank = max_loras, max_lora_rank

    def make(self, source: WeightSource, max_model_len: int) -> ModelShell:
        shell = ModelShell(source.module, max_model_len)
        cut = self._parallel is not None
        layers = layer_weights(shell, shared=cut) if self._in_fp8 or cut else ()
        shell.bind(source.tensors(fusion_groups(shell), layers), dict(walk(source.module)))
        return shell

    def fuse(self, shell: ModelShell, source: WeightSource, ops: Ops) -> Fused:
        """Fuse the layers of this shell; or of a new one, where fp8 turns out to need weights that this one does not keep."""
        with runtime_for(source.device).chosen():  # comparing layers with their fused form launches kernels
            modules = dict(shell.module.named_modules())
            take_over_experts(shell.module, ops)
            options = self._max_loras, self._max_lora_rank, source.device, shell.beside_text, shell.indexed.paths
            shell.lora = LoraLayers(shell.module, ops, *options)
            # Of a model that is cut nothing whole is multiplied by, but while it is looked at.
            groups = fusion_groups(shell) if self._parallel is None else []
            wholes = source.rehome(groups)
            if apart := [group for group in groups if group not in wholes]:
                what = "%d of %d groups of weights, %s first, cannot be laid side by side and are multiplied one by one, which is slower"
                _log.info(what, len(apart), len(groups), apart[0][0])
            layers, all_fused = fuse_layers(shell, ops, wholes)
        if self._deterministic and not all_fused:
            raise UnsupportedModelError(
                f"{type(source.module).__name__} has layers that run their own matmuls, whose bits depend on the batch: "
                "deterministic=True cannot be had for it"
            )
        derived: DerivedWeights | None = None
        if self._parallel is not None:
            derived = self._cut(self._parallel, shell, source, modules, all_fused=all_fused)
        elif self._in_fp8:
            derived = rounded = Fp8Weights(shell.module, modules, ops, source.passing)
            if others := source.passing - rounded.by_name.keys():  # weights of layers that could not be fused
                source.keep(others)
                shell = self.make(source, shell.max_model_len)
                source.pull()
                shell.layer_shapes()
                return self.fuse(shell, source, ops)
            shell.lora.rounded = rounded.plain
        if derived is not None:
            source.hand_over(derived)
        source.bind()
        return Fused(shell, layers, wholes, derived)

    @staticmethod
    def _cut(
        parallel: TensorParallel,
        shell: ModelShell,
        source: WeightSource,
        modules: Mapping[str, nn.Module],
        *,
        all_fused: bool,
    ) -> CutWeights:
        """Have a shell run this rank's part of its layers. modules: its own by name, from before they were fused."""
        if shell.share_head is None or not all_fused:
            raise UnsupportedModelError(
                f"tensor_parallel_size={parallel.size}: {type(source.module).__name__} has layers that run the model's own code, "
                "and only fused ones can be cut: leave it at 1"
            )
        cut = CutWeights(shell, modules, parallel, source.passing)
        shell.share_head(parallel)
        return cut
