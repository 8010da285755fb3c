"""Runs a decoder whose layers are all fused, in place of the forward of its class."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from stoker.engine.layers.layer_structure import norm_of
from stoker.engine.layers.linears import Linears
from stoker.engine.layers.probe import TOLERANCE, Recorder
from stoker.engine.layers.rotary import Rotary
from stoker.engine.model import ModelShell
from stoker.engine.parallel.tensor_parallel import TensorParallel
from stoker.kernels.ops import Ops
from stoker.kernels.reference.norm_rotary import Norm

_KEPT_BYTES = 64 * 2**20  # of a kind's rotary embeddings: 131,072 positions of a head of 128 in bf16
_POSITIONS = 16384  # rotary embeddings are computed for so many at a time
_LARGE = 1e3
_LAYERS = ("layers", "h")
_LAST_NORM = ("norm", "embedding_norm", "final_layernorm", "norm_f", "final_layer_norm", "ln_f")
_POSITION_EMBEDDINGS = "wpe"  # added to those of tokens (GPT-2)
_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")


def _layers(shell: ModelShell) -> Any:
    return next((getattr(shell.text, name) for name in _LAYERS if hasattr(shell.text, name)), None)


def _last_norm(shell: ModelShell) -> tuple[Any, Norm | None]:
    """The norm before the head, the module and what it is; either may be None."""
    found = (getattr(shell.text, name, None) for name in _LAST_NORM)
    module = next((norm for norm in found if norm is not None), None)
    like = shell.module.get_output_embeddings().weight
    return module, None if module is None else norm_of(module, like.shape[1], like)


class PerLayerInputs:
    """Inputs of each layer besides hidden states: other embeddings of the tokens, plus a projection of the usual ones (Gemma 4)."""

    def __init__(self, shell: ModelShell, ops: Ops) -> None:
        body = shell.text
        self.embed, self.ops = body.embed_tokens_per_layer, ops
        linear, width = body.per_layer_model_projection, body.hidden_size_per_layer_input
        paths = {module: name for name, module in shell.module.named_modules()}
        path, self.norm_path = (paths[module] for module in (linear, body.per_layer_projection_norm))
        self.project = Linears(ops, (path,), [linear], shell.lora.group((path,)), linear.weight, linear.bias)
        self.shape = -1, linear.out_features // width, width
        norm = norm_of(body.per_layer_projection_norm)
        assert norm is not None
        # A norm of scaled numbers is a norm of the numbers with another epsilon.
        self.norm = norm._replace(eps=norm.eps / body.per_layer_model_projection_scale**2)
        self.scale = linear.weight.new_tensor([body.per_layer_input_scale], dtype=torch.float32)

    def __call__(self, token_ids: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """token_ids: int64 [T]; x: their embeddings, with those of images in place, [T, D]. Returns [T, P] for each layer."""
        of_tokens, projected = (t.view(self.shape) for t in (self.embed(token_ids), self.project(x)))
        return self.ops.rms_norm(projected, *self.norm, residual=of_tokens, scale=self.scale).unbind(1)


class FusedModel:
    """Embedding, fused layers, norm, head: the forward of most decoders.

    Rotary embeddings depend on positions and frequencies only, so up to ``_KEPT_BYTES`` they are kept in tables: computing them
    would be a dozen kernels in every step.
    """

    def __init__(self, shell: ModelShell, ops: Ops, rotary: Rotary) -> None:
        """shell: one of which ``fits`` is true."""
        body: Any = shell.text
        self.last_norm, norm = _last_norm(shell)
        assert norm is not None
        self.shell, self.ops, self.norm = shell, ops, norm
        self.embed: Any = body.get_input_embeddings()
        self.multiplier: float = getattr(body, "embedding_multiplier", 1.0)
        self.embed_positions: Any = getattr(body, _POSITION_EMBEDDINGS, None)
        self.layers = list(zip(_layers(shell), rotary.kinds, strict=True))
        self.rotary = rotary
        self.kinds = rotary.tabled
        has_inputs = hasattr(body, "per_layer_model_projection")
        self.per_layer = PerLayerInputs(shell, ops) if has_inputs else None
        self.ids: Tensor | None = None  # by token, the one whose embedding is used; None: its own
        self.parallel: TensorParallel | None = None
        self.norms_first = False  # whether embeddings get the last norm, too (NanoChat)
        self.kept: dict[str | None, tuple[Tensor, ...]] | None = None
        if all(self._bytes(kind) <= _KEPT_BYTES for kind in self.kinds):
            self.kept, self.of = self._tables(), self._frequencies()
        self.head: nn.Linear = shell.module.get_output_embeddings()
        self.project = self._project if self._head_is_last() else shell.logits_through(self._project)

    @staticmethod
    def fits(shell: ModelShell) -> bool:
        """Whether a model has the parts that are run here. ``agrees`` tells whether it does nothing else."""
        return (
            _layers(shell) is not None
            and _last_norm(shell)[1] is not None
            and type(shell.module.get_output_embeddings()) is nn.Linear
            and not shell.has_wide_head
        )

    def _head_is_last(self) -> bool:
        """Whether the model returns just what its head gives. Tried with large numbers, as a softcap changes only those."""
        weight = self.head.weight
        generator = torch.Generator().manual_seed(0)
        x = _LARGE * torch.randn(4, weight.shape[1], generator=generator, device="cpu").to(weight)
        expected, actual = self.shell.module_logits(x).float(), self.head(x).float()
        return bool((expected - actual).abs().max() <= TOLERANCE.get(weight.dtype, 0.0) * actual.abs().max())

    def _rotary(self, positions: Tensor, kind: str | None) -> tuple[Tensor, ...]:
        """The tables of ``Rotary``, looked up where they are kept. positions: int64 [T]."""
        x = self.embed.weight[None, :1]  # as an example of its dtype
        found = self.rotary.at(x, positions, kind)
        assert found is not None
        return found

    def _bytes(self, kind: str | None) -> int:
        one = self._rotary(torch.zeros(1, dtype=torch.long, device=self.embed.weight.device), kind)
        return self.shell.max_model_len * sum(t.nbytes for t in one)

    def _tables(self) -> dict[str | None, tuple[Tensor, ...]]:
        count = max(self.shell.max_model_len, int(self.rotary.probed(self.shell.device).max()) + 1)
        pieces = torch.split(torch.arange(count, device=self.embed.weight.device), _POSITIONS)
        return {
            kind: tuple(torch.cat(parts) for parts in zip(*(self._rotary(p, kind) for p in pieces), strict=True))
            for kind in self.kinds
        }

    def _frequencies(self) -> Tensor:
        """All frequencies in one tensor, so that comparing them waits for the device only once."""
        module = self.rotary.module
        parts = [] if module is None else [buffer.flatten() for buffer in module.buffers()]
        return torch.cat(parts) if parts else torch.empty(0, device="cpu")

    def refresh(self) -> None:
        """Compute the kept tables anew, in place, if frequencies have changed."""
        if self.kept is None or torch.equal(self.of, frequencies := self._frequencies()):
            return
        with torch.inference_mode(), torch.autocast(self.embed.weight.device.type, enabled=False):
            for kind, tables in self._tables().items():
                for table, new in zip(self.kept[kind], tables, strict=True):
                    table.copy_(new)
        self.of = frequencies

    def hidden(self, token_ids: Tensor, positions: Tensor, context: Any) -> Tensor:
        """Hidden states before the last norm, which is left to those rows that need logits."""
        if self.ids is not None:
            token_ids = self.ids.index_select(0, token_ids)
        x = self.embed(token_ids)[None]
        images, places = context.images, positions if context.rotary is None else context.rotary
        if images is not None:
            x = x.index_copy(1, images.at, images.embeddings.to(x.dtype)[None])
        if self.multiplier != 1.0:
            x = x * self.multiplier
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        if self.norms_first:
            x = self.ops.rms_norm(x[0], *self.norm)[None]
        rotary: dict[str | None, tuple[Tensor, ...] | None]
        if self.kept is None or places.dim() > 1:
            rotary = {kind: self.rotary.at(x, places, kind) for kind in self.kinds}
        else:
            rotary = {
                kind: tuple(table.index_select(0, places) for table in tables) for kind, tables in self.kept.items()
            }
        deep = iter(() if images is None else images.deep)
        own: Iterable[Tensor | None] = repeat(None) if self.per_layer is None else self.per_layer(token_ids, x[0])
        for (layer, kind), per_layer in zip(self.layers, own, strict=False):
            x = layer.hidden(x, rotary.get(kind), context, per_layer, in_place=True)
            if (features := next(deep, None)) is not None:
                x.index_add_(1, images.at, features.to(x.dtype)[None])
        return x[0]  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        lora = self.shell.lora
        if lora.rows is not None and lora.has_hooks:
            return self.shell.module_logits(self.last_norm(hidden))
        return self.project(hidden)

    def share_head(self, parallel: TensorParallel) -> None:
        """Have each rank compute the logits of a part of the vocabulary, and put them together."""
        self.parallel = parallel

    def _project(self, hidden: Tensor) -> Tensor:
        weight, bias = self.head.weight, self.head.bias
        if self.parallel is None:
            return self.ops.linear(hidden, weight, bias, norm=self.norm)
        rows = self.parallel.share(len(weight))
        mine = self.ops.linear(hidden, weight[rows], None if bias is None else bias[rows], norm=self.norm)
        return self.parallel.side_by_side(mine, len(weight))

    def agrees(self) -> bool:
        """Whether the logits are those of the model's own forward, which may treat placeholders of images as padding."""
        shell, positions = self.shell, self.rotary.probed(self.shell.device)
        config = shell.module.config
        found = (getattr(config, name, None) for name in _PLACEHOLDERS)
        placeholders = [token for token in found if token is not None and 0 <= token < shell.vocab]
        tokens = torch.arange(positions.numel(), device="cpu") % shell.vocab
        tokens[1 : 1 + len(placeholders)] = torch.tensor(placeholders, dtype=torch.long, device="cpu")
        arguments = (tokens.to(shell.device), positions, Recorder(shell.same_keys))
        calls: list[Any] = []
        hook = self.last_norm.register_forward_pre_hook(lambda *called: calls.append(called))
        try:
            hidden = shell.hidden(*arguments)
        finally:
            hook.remove()
        self.norms_first = len(calls) > 1
        expected = shell.logits(hidden).float()
        tolerance = TOLERANCE.get(shell.module.dtype, 0.0) * expected.abs().max()
        ways: list[Tensor | None] = [None]
        if placeholders and (padding := shell.config.pad_token_id) is not None:
            ids = torch.arange(shell.vocab, device="cpu")
            ids[placeholders] = padding
            ways.append(ids.to(shell.device))
        for self.ids in ways:
            if bool((expected - self.logits(self.hidden(*arguments)).float()).abs().max() <= tolerance):
                return True
        return False
