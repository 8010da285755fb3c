"""A decoder layer of few operations, for the structure that Llama, Mistral, Qwen and many others share.

``h += attention(norm(h)); h += mlp(norm(h))`` with separate q, k, v and gate, up projections. It replaces a shell's
layer only where it gives the same numbers on a probe; any other layer stays what it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stoker.engine.lora import Adapted, LoraLayers
from stoker.engine.model import ModelShell
from stoker.kernels.ops import Ops
from stoker.kernels.reference.attention import Visibility
from stoker.kernels.reference.norm_rotary import qk_norm_rotary

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
# Relative to the most a layer adds to its input: one rounding of the dtype, a few times over.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

_KEPT_POSITIONS = 16384
_PROBE_POSITIONS = torch.tensor([0, 1, 2, 5, 11, 30, 31])


class _Linears:
    """Linears that read the same input: one matmul where their weights lie side by side, else one each."""

    def __init__(
        self, ops: Ops, linears: Sequence[Any], lora: Adapted, weight: Tensor | None, bias: Tensor | None
    ) -> None:
        self.ops = ops
        self.lora = lora
        self.linears = linears
        self.weight = weight
        self.bias = bias

    def __call__(
        self,
        x: Tensor,
        *,
        norm: tuple[Tensor, float] | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """As ``Ops.linear``; adapters come after the projection and before all else."""
        rows = self.lora.rows
        if self.weight is not None and rows is None:
            return self.ops.linear(x, self.weight, self.bias, norm=norm, gated=gated, residual=residual)
        x = x if norm is None else self.ops.rms_norm(x, *norm)
        if self.weight is not None:
            out = self.ops.linear(x, self.weight, self.bias)
        else:
            out = torch.cat([self.ops.linear(x, m.weight, m.bias) for m in self.linears], dim=-1)
        if rows is not None:
            self.lora.apply(x, out, rows)
        out = self.ops.silu_mul(out) if gated else out
        return out if residual is None else out.add_(residual)


class FusedDecoderLayer(nn.Module):
    """Stands in for one decoder layer of the shell. Refers to the original's parameters and owns none."""

    def __init__(
        self, layer: Any, ops: Ops, fused: Mapping[tuple[str, ...], Tensor], prefix: str, lora: LoraLayers
    ) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.scale: float = attention.scaling
        window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
        self.visibility = Visibility(window=window)
        self.use_rope = bool(getattr(attention, "use_rope", True))
        self.adapted: dict[tuple[str, ...], Adapted] = {}

        def adapted(*names: str) -> Adapted:
            paths = tuple(f"{prefix}.{name}" for name in names)
            self.adapted[paths] = lora.group(paths)
            return self.adapted[paths]

        qkv, gate_up = (
            _Linears(
                ops,
                [m for _, m in group],
                adapted(*(name for name, _ in group)),
                *(_find(fused, prefix, group, kind) for kind in ("weight", "bias")),
            )
            for group in _groups(layer)
        )
        out, down = (
            _Linears(ops, [m], adapted(name), m.weight, m.bias)
            for name, m in (("self_attn.o_proj", attention.o_proj), ("mlp.down_proj", mlp.down_proj))
        )
        self.parts = _Parts(
            qkv,
            out,
            gate_up,
            down,
            _norm(layer.input_layernorm),
            _norm(layer.post_attention_layernorm),
            (attention.q_norm.weight, *_norm(attention.k_norm)) if hasattr(attention, "q_norm") else None,
        )

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        stoker_context: Any,
        **_: Any,
    ) -> Tensor:
        """hidden_states: [1, T, D]; position_embeddings: cos and sin, each [1, T, head_dim]."""
        w, x = self.parts, hidden_states[0]
        qkv = w.qkv(x, norm=w.input_norm).view(x.shape[0], -1, self.head_dim)
        cos_sin = (position_embeddings[0][0], position_embeddings[1][0]) if self.use_rope else None
        out = stoker_context.attend_projected(
            self.layer_idx,
            qkv,
            self.heads,
            self.kv_heads,
            w.qk_norm,
            cos_sin,
            scale=self.scale,
            visibility=self.visibility,
            softcap=None,
            sinks=None,
        )
        x = w.out(out.flatten(1), residual=x)
        return w.down(w.gate_up(x, norm=w.mlp_norm, gated=True), residual=x)[None]


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a fused layer reads, held outside the module so that reading it is cheap and no parameter is renamed."""

    qkv: _Linears
    out: _Linears
    gate_up: _Linears
    down: _Linears
    input_norm: tuple[Tensor, float]
    mlp_norm: tuple[Tensor, float]
    qk_norm: tuple[Tensor, Tensor, float] | None


def _norm(module: Any) -> tuple[Tensor, float]:
    return module.weight, module.variance_epsilon


def _groups(layer: Any) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """The linears of a layer that read the same input, with their names in the layer."""
    attention, mlp = layer.self_attn, layer.mlp
    return (
        [(f"self_attn.{n}", getattr(attention, n)) for n in ("q_proj", "k_proj", "v_proj")],
        [(f"mlp.{n}", getattr(mlp, n)) for n in ("gate_proj", "up_proj")],
    )


def _find(
    fused: Mapping[tuple[str, ...], Tensor], prefix: str, group: list[tuple[str, Any]], kind: str
) -> Tensor | None:
    return fused.get(tuple(f"{prefix}.{name}.{kind}" for name, _ in group))


def _has_common_structure(layer: Any) -> bool:
    if {name for name, _ in layer.named_children()} != _PARTS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    if hasattr(attention, "q_norm"):
        norms += [attention.q_norm, attention.k_norm]
    linears: list[Any] = [getattr(attention, n, None) for n in ("q_proj", "k_proj", "v_proj", "o_proj")]
    linears += [getattr(mlp, n, None) for n in ("gate_proj", "up_proj", "down_proj")]
    return (
        all(type(m) is nn.Linear for m in linears)
        and all(hasattr(m, "variance_epsilon") for m in norms)
        and len({m.bias is None for m in linears[:3]}) == 1
        and len({m.bias is None for m in linears[4:6]}) == 1
        and hasattr(attention, "head_dim")
    )


def _candidates(shell: ModelShell) -> list[tuple[str, nn.ModuleList, int, Any]]:
    """(name, list, index, layer) of every decoder layer with the common structure."""
    return [
        (f"{path}.{index}", module, index, layer)
        for path, module in shell.module.named_modules()
        if isinstance(module, nn.ModuleList)
        for index, layer in enumerate(module)
        if _has_common_structure(layer)
    ]


def fusion_groups(shell: ModelShell) -> list[tuple[str, ...]]:
    """Names of the parameters that would be one matmul if they lay side by side."""
    groups = []
    for name, _, _, layer in _candidates(shell):
        for group in _groups(layer):
            for kind in ("weight", "bias"):
                if getattr(group[0][1], kind) is not None:
                    groups.append(tuple(f"{name}.{linear}.{kind}" for linear, _ in group))
    return groups


def fuse_layers(shell: ModelShell, ops: Ops, fused: Mapping[tuple[str, ...], Tensor]) -> tuple[int, bool]:
    """Replace the layers that agree with their fused form. Returns how many were, and whether that is all of the model.

    It is where all layers were replaced, and embedding, layers, norm and head in a row are all there is to the model: its
    own forward is passed over then.
    """
    candidates = _candidates(shell)
    with torch.inference_mode(), torch.autocast(shell.device.type, enabled=False):
        for name, siblings, index, layer in candidates:
            replacement = FusedDecoderLayer(layer, ops, fused, name, shell.lora).eval()
            if _agree(layer, replacement, shell):
                siblings[index] = replacement
                shell.lora.replaced(name, replacement.adapted)
        count = sum(isinstance(m, FusedDecoderLayer) for m in shell.module.modules())
        body, head = shell.module.base_model, shell.module.get_output_embeddings()
        known = all(hasattr(body, name) for name in ("embed_tokens", "rotary_emb", "norm"))
        if (
            count < shell.num_layers
            or not known
            or not hasattr(body.norm, "variance_epsilon")
            or type(head) is not nn.Linear
        ):
            return count, False
        whole = _PlainModel(shell, ops)
        if whole.agrees(shell):
            shell.hidden, shell.logits, shell.refresh = whole.hidden, whole.logits, whole.refresh
    return count, shell.hidden == whole.hidden


class _PlainModel:
    """Embedding, fused layers, norm, head: the forward of most decoders without the layers of convenience around it.

    The rotary embedding depends on its frequencies alone, so up to ``_KEPT_POSITIONS`` it is looked up, not computed.
    """

    def __init__(self, shell: ModelShell, ops: Ops) -> None:
        body: Any = shell.module.base_model
        self.ops, self.embed, self.norm = ops, body.embed_tokens, _norm(body.norm)
        self.rotary: nn.Module = body.rotary_emb
        self.max_model_len = shell.max_model_len
        self.kept: tuple[Tensor, ...] | None = None
        if shell.max_model_len <= _KEPT_POSITIONS:
            self.kept, self.of = self._tables(), self._frequencies()
        self.layers = list(body.layers)
        self.head: nn.Linear = shell.module.get_output_embeddings()
        self.last_norm: nn.Module = body.norm
        self.lora = shell.lora

    def _tables(self) -> tuple[Tensor, ...]:
        device = self.embed.weight.device
        count = max(self.max_model_len, int(_PROBE_POSITIONS.max()) + 1)
        x = self.embed.weight[None, :1]  # as an example of its dtype
        return tuple(t[0].contiguous() for t in self.rotary(x, position_ids=torch.arange(count, device=device)[None]))

    def _frequencies(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self.rotary.buffers()]

    def refresh(self) -> None:
        """Make the kept tables again where the frequencies they are of have changed. They stay where they lie."""
        if self.kept is None or all(map(torch.equal, self.of, self.rotary.buffers())):
            return
        with torch.inference_mode(), torch.autocast(self.embed.weight.device.type, enabled=False):
            for table, new in zip(self.kept, self._tables(), strict=True):
                table.copy_(new)
        self.of = self._frequencies()

    def hidden(self, token_ids: Tensor, positions: Tensor, context: Any) -> Tensor:
        """Before the last norm, which only rows that are projected need."""
        x = self.embed(token_ids)[None]
        if self.kept is None:
            rotary = self.rotary(x, position_ids=positions[None])
        else:
            rotary = tuple(table.index_select(0, positions)[None] for table in self.kept)
        for layer in self.layers:
            x = layer.forward(x, position_embeddings=rotary, stoker_context=context)
        return x[0]  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        if self.lora.rows is not None and self.lora.has_hooks:
            return self.head(self.last_norm(hidden))  # type: ignore[no-any-return]
        return self.ops.linear(hidden, self.head.weight, self.head.bias, norm=self.norm)

    def agrees(self, shell: ModelShell) -> bool:
        device = shell.device
        tokens = torch.arange(_PROBE_POSITIONS.numel(), device=device) % shell.vocab
        arguments = (tokens, _PROBE_POSITIONS.to(device), _Recorder())
        expected, actual = (m.logits(m.hidden(*arguments)).float() for m in (shell, self))
        tolerance = _TOLERANCE.get(shell.module.dtype, 0.0)
        return bool((expected - actual).abs().max() <= tolerance * expected.abs().max())


class _Recorder:
    """Attention for a probe: mixes query, key and value so that a fault in any shows, and notes its options."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        self.options.append({"layer": layer, **options})
        group = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
        weights = torch.einsum("thd,shd->hts", query, key).mul(options["scale"]).softmax(-1)
        return torch.einsum("hts,shd->thd", weights, value)

    def attend_projected(
        self, layer: int, qkv: Tensor, heads: int, kv_heads: int, norm: Any, cos_sin: Any, **options: Any
    ) -> Tensor:
        return self.attend(layer, *qk_norm_rotary(qkv, heads, kv_heads, norm, cos_sin), **options)


def _agree(layer: Any, replacement: FusedDecoderLayer, shell: ModelShell) -> bool:
    """Same output and same attention options on a few random tokens."""
    weight = layer.input_layernorm.weight
    generator = torch.Generator().manual_seed(replacement.layer_idx)
    x = torch.randn(1, _PROBE_POSITIONS.numel(), weight.shape[0], generator=generator).to(weight)
    positions = _PROBE_POSITIONS[None].to(weight.device)
    rotary = getattr(shell.module.base_model, "rotary_emb", None)
    if rotary is None or "layer_type" in inspect.signature(rotary.forward).parameters:
        return False  # another rotary embedding for each type of layer
    recorder = _Recorder()
    arguments = {
        "attention_mask": None,
        "position_ids": positions,
        "position_embeddings": rotary(x, position_ids=positions),
        "stoker_context": recorder,
    }
    expected, actual = layer(x, **arguments), replacement(x, **arguments)
    expected = expected[0] if isinstance(expected, tuple) else expected
    if len(recorder.options) != 2 or recorder.options[0] != recorder.options[1]:
        return False
    # Relative to what the layer adds: next to a large residual a wrong layer would look right.
    added = (expected.float() - x.float()).abs().max()
    rounding = 4 * torch.finfo(weight.dtype).eps * expected.float().abs().max()
    error = (expected.float() - actual.float()).abs().max()
    return bool(error <= _TOLERANCE.get(weight.dtype, 0.0) * added + rounding)
