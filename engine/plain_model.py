"""A decoder of fused layers, run without the forward of its own class."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from stoker.engine.layer_structure import norm_of
from stoker.engine.model import ModelShell
from stoker.engine.probe import POSITIONS, TOLERANCE, Recorder
from stoker.kernels.ops import Ops

_KEPT_BYTES = 64 * 2**20  # of a kind's rotary embeddings: 131,072 positions of a head of 128 in bf16
_POSITIONS = 16384  # of which they are computed at a time
_LARGE = 1e3


_ROTARY = ("rotary_emb", "pos_emb")
_LAST_NORM = ("norm", "embedding_norm", "final_layernorm", "norm_f")


def _part(shell: ModelShell, names: tuple[str, ...]) -> Any:
    """What a decoder has by one of these names, or None."""
    return next((part for name in names if (part := getattr(shell.decoder, name, None)) is not None), None)


def rotary_kinds(shell: ModelShell) -> list[str | None]:
    """Of each layer, which of its model's rotary embeddings it takes; None where there is but one, or none."""
    rotary = _part(shell, _ROTARY)
    if rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters:
        return list(shell.config.layer_types)
    return [None] * shell.num_layers


def rotary_embedding(shell: ModelShell, x: Tensor, positions: Tensor, kind: str | None) -> tuple[Tensor, Tensor] | None:
    """cos and sin, each [1, T, R], in the dtype of ``x`` or fp32; None where the model has none. positions: int64 [T], or
    [3, T]."""
    rotary: Any = _part(shell, _ROTARY)
    if rotary is None:
        return None
    positions = positions.view(-1, 1, positions.shape[-1])
    # Of time, height and width, which are one for text.
    positions = positions.expand(3, -1, -1) if hasattr(rotary, "mrope_section") else positions[0]
    named = {} if kind is None else {"layer_type": kind}
    cos, sin = rotary(x, position_ids=positions, **named)
    return cos, sin


def has_rotary(shell: ModelShell) -> bool:
    """Whether positions alone give the model's rotary embeddings, or it has none."""
    like = shell.module.get_input_embeddings().weight[None, :1]
    try:
        for kind in {*rotary_kinds(shell)}:
            rotary_embedding(shell, like, POSITIONS.to(like.device), kind)
    except Exception:  # of any kind: they want more
        return False
    return True


class PlainModel:
    """Embedding, fused layers, norm, head: the forward of most decoders.

    The rotary embeddings depend on their frequencies alone, so up to ``_KEPT_BYTES`` they are looked up: computing them is
    a dozen kernels of every step.
    """

    def __init__(self, shell: ModelShell, ops: Ops) -> None:
        """shell: one of which ``is_plain`` is true."""
        body: Any = shell.decoder
        self.last_norm = _part(shell, _LAST_NORM)
        norm = norm_of(self.last_norm)
        assert norm is not None
        self.shell, self.ops, self.norm = shell, ops, norm
        self.embed: Any = body.get_input_embeddings()
        self.multiplier: float = getattr(body, "embedding_multiplier", 1.0)
        self.layers = list(zip(body.layers, rotary_kinds(shell), strict=True))
        self.rotary = _part(shell, _ROTARY)
        self.kinds = set() if self.rotary is None else {kind for _, kind in self.layers}
        self.kept: dict[str | None, tuple[Tensor, ...]] | None = None
        if all(self._bytes(kind) <= _KEPT_BYTES for kind in self.kinds):
            self.kept, self.of = self._tables(), self._frequencies()
        self.head: nn.Linear = shell.module.get_output_embeddings()
        self.project = self._project if self._head_is_last() else shell.logits_through(self._project)

    @staticmethod
    def is_plain(shell: ModelShell) -> bool:
        """Whether a model has the parts. That it has no more, ``agrees`` tells."""
        body, norm = shell.decoder, _part(shell, _LAST_NORM)
        return (
            hasattr(body, "layers")
            and norm is not None
            and norm_of(norm) is not None
            and type(shell.module.get_output_embeddings()) is nn.Linear
            and not shell.has_wide_head
        )

    def _head_is_last(self) -> bool:
        """Whether the model returns what its head does. Large numbers, for a softcap leaves small ones what they are."""
        weight = self.head.weight
        generator = torch.Generator().manual_seed(0)
        x = _LARGE * torch.randn(4, weight.shape[1], generator=generator, device="cpu").to(weight)
        expected, actual = self.shell.module_logits(x).float(), self.head(x).float()
        return bool((expected - actual).abs().max() <= TOLERANCE.get(weight.dtype, 0.0) * actual.abs().max())

    def _rotary(self, positions: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        """cos and sin, [T, R] each. positions: int64 [T]."""
        x = self.embed.weight[None, :1]  # as an example of its dtype
        found = rotary_embedding(self.shell, x, positions, kind)
        assert found is not None
        return found[0][0], found[1][0]

    def _bytes(self, kind: str | None) -> int:
        one = self._rotary(torch.zeros(1, dtype=torch.long, device=self.embed.weight.device), kind)
        return self.shell.max_model_len * sum(t.nbytes for t in one)

    def _tables(self) -> dict[str | None, tuple[Tensor, ...]]:
        count = max(self.shell.max_model_len, int(POSITIONS.max()) + 1)
        pieces = torch.split(torch.arange(count, device=self.embed.weight.device), _POSITIONS)
        return {
            kind: tuple(torch.cat(parts) for parts in zip(*(self._rotary(p, kind) for p in pieces), strict=True))
            for kind in self.kinds
        }

    def _frequencies(self) -> list[Tensor]:
        return [] if self.rotary is None else [buffer.clone() for buffer in self.rotary.buffers()]

    def refresh(self) -> None:
        """Make the kept tables again where the frequencies they are of have changed. They stay where they lie."""
        if self.kept is None or self.rotary is None or all(map(torch.equal, self.of, self.rotary.buffers())):
            return
        with torch.inference_mode(), torch.autocast(self.embed.weight.device.type, enabled=False):
            for kind, tables in self._tables().items():
                for table, new in zip(self.kept[kind], tables, strict=True):
                    table.copy_(new)
        self.of = self._frequencies()

    def hidden(self, token_ids: Tensor, positions: Tensor, context: Any) -> Tensor:
        """Before the last norm, which only rows that are projected need."""
        x = self.embed(token_ids)[None]
        images, places = context.images, positions if context.rotary is None else context.rotary
        if images is not None:
            x = x.index_copy(1, images.at, images.embeddings.to(x.dtype)[None])
        if self.multiplier != 1.0:
            x = x * self.multiplier
        rotary: dict[str | None, tuple[Tensor, ...] | None]
        if self.kept is None or places.dim() > 1:
            rotary = {kind: rotary_embedding(self.shell, x, places, kind) for kind in self.kinds}
        else:
            rotary = {
                kind: tuple(table.index_select(0, places)[None] for table in tables)
                for kind, tables in self.kept.items()
            }
        deep = iter(() if images is None else images.deep)
        for layer, kind in self.layers:
            x = layer.hidden(x, rotary.get(kind), context, in_place=True)
            if (features := next(deep, None)) is not None:
                x.index_add_(1, images.at, features.to(x.dtype)[None])
        return x[0]  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        lora = self.shell.lora
        if lora.rows is not None and lora.has_hooks:
            return self.shell.module_logits(self.last_norm(hidden))
        return self.project(hidden)

    def _project(self, hidden: Tensor) -> Tensor:
        return self.ops.linear(hidden, self.head.weight, self.head.bias, norm=self.norm)

    def agrees(self) -> bool:
        """Whether the logits are those of the model's own forward."""
        shell, device = self.shell, self.shell.device
        tokens = torch.arange(POSITIONS.numel(), device=device) % shell.vocab
        arguments = (tokens, POSITIONS.to(device), Recorder())
        expected, actual = (m.logits(m.hidden(*arguments)).float() for m in (shell, self))
        tolerance = TOLERANCE.get(shell.module.dtype, 0.0)
        return bool((expected - actual).abs().max() <= tolerance * expected.abs().max())
