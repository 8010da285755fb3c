"""A decoder layer made of few operations: ``h += mixer(h); h += mlp(h)``, or one of the two, with norms before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from stoker.engine.adapters.lora import Adapted
from stoker.engine.attention import EVERY_KEY
from stoker.engine.layers.fused_branches import Block, LayerInputs, MixerBranch, MlpBranch, OriginalBranch
from stoker.engine.layers.recurrent import RecurrentLayers
from stoker.engine.layers.rotary import Rotary
from stoker.kernels.ops import Ops
from stoker.kernels.reference.norm_rotary import Norm


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
        recurrent: RecurrentLayers,
        returned: Any,
    ) -> None:
        """scale: of its output, [1]; returned: what the original returned, which may be a tuple."""
        super().__init__()
        vars(self)["scale"] = scale  # not as a buffer of this module
        self.rotary, self.recurrent = rotary, recurrent
        vars(self).update(
            (name, value) for name, value in vars(layer).items() if isinstance(value, str)
        )  # such as its kind
        self.ops, self.index, self.blocks = ops, index, tuple(blocks)
        self.reads_per_layer = any(isinstance(b, MlpBranch) and b.per_layer for b in self.branches)
        others = returned[1:] if isinstance(returned, tuple) else None
        self.besides = others and tuple(one if one is EVERY_KEY else None for one in others)

    @property
    def branches(self) -> list[MixerBranch | MlpBranch | OriginalBranch]:
        return [branch for block in self.blocks for branch in block.branches]

    @property
    def complete(self) -> bool:
        """Whether the layer runs none of the original's modules."""
        return not any(isinstance(branch, OriginalBranch) for branch in self.branches)

    @property
    def runs_on_ops(self) -> bool:
        """Whether all of it runs on the engine's operations, as long as no adapter is over a router."""
        return all(branch.runs_on_ops for branch in self.branches if isinstance(branch, OriginalBranch))

    @property
    def adapted(self) -> dict[tuple[str, ...], Adapted]:
        """The groups of linears that it runs."""
        return {linears.paths: linears.lora for branch in self.branches for linears in branch.linears}

    def forward(
        self,
        hidden_states: Tensor,
        *others: Any,
        position_embeddings: Any = None,
        position_ids: Any = None,
        per_layer_input: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """As the original, without attention weights. others: ``per_layer_input`` first, in models that have it."""
        tables = self.rotary.tables(position_embeddings, position_ids, self.rotary.kinds[self.index])
        given: Any = next(iter(others), per_layer_input)
        per_layer = given[0] if self.reads_per_layer else None
        out = self.hidden(hidden_states, tables, self.recurrent.context, per_layer)
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
        """hidden_states: [1, T, D], which may be overwritten if ``in_place``; tables: of ``Rotary``; per_layer: [T, P]."""
        x, given = hidden_states[0], LayerInputs(tables, context, per_layer)
        for block in self.blocks:
            read, norm = x, None
            if block.norm is not None:
                if block.norm_is_read or block.norm.adapted:
                    read = block.norm(x)
                else:
                    norm = block.norm.norm
            # For all branches first, before one of them adds to ``x`` in place.
            reads = [_read(branch, x, read, norm) for branch in block.branches]
            added = None  # the branches' sum, where a norm comes after it
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


def _read(
    branch: MixerBranch | MlpBranch | OriginalBranch, x: Tensor, read: Tensor, norm: Norm | None
) -> tuple[Tensor, Norm | None]:
    """What a branch reads of a block's input ``x``, and the norm of that, if it is left to the branch's first linear.

    read, norm: the same for branches without a norm of their own.
    """
    if branch.norm is None:
        return read if branch.in_scale == 1.0 else read * branch.in_scale, norm
    return x if branch.norms_itself else branch.norm(x), None
