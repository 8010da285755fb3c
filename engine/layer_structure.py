"""What a decoder layer consists of: where its norms stand, which of its linears read the same input, its activation.

Modules are found by their names, and what they compute by trying it on a few numbers. Whether that is all there is to a
layer is for a probe of the whole to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stoker.engine.probe import TOLERANCE
from stoker.kernels.reference.norm_rotary import ACTIVATIONS, Activation, Norm, rms_norm

# Names of the norms before attention, after it, before the MLP and after it.
_NORM_NAMES: tuple[tuple[str | None, ...], ...] = (
    ("input_layernorm", None, "post_attention_layernorm", None),  # Llama and most others
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),  # OLMo 2
    (  # Gemma 2
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),  # GLM-4
)
# Linears that read the input of attention, and the one that makes its output.
_ATTENTION = (
    (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj"),
    (("self_attn.qkv_proj",), "self_attn.o_proj"),
)
# Likewise of a gated delta net: query, key and value, then the gate, beta and the decay.
_DELTA_NET = (
    (
        ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a"),
        "linear_attn.out_proj",
    ),
    (("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"), "linear_attn.out_proj"),
    (
        (*(f"linear_attn.{name}_proj" for name in "qkv"), *(f"linear_attn.{name}_proj" for name in "gba")),
        "linear_attn.o_proj",
    ),
)
_GATE_UP = (("mlp.gate_proj", "mlp.up_proj"), ("mlp.gate_up_proj",))


@dataclass(frozen=True, slots=True)
class Structure:
    """Names of modules in a layer. It holds on the meta device too."""

    norms: tuple[str | None, ...]  # before attention, after it, before the MLP, after it
    qkv: tuple[str, ...]  # and what else reads the input of attention, or of what stands in its place
    out: str
    gate_up: tuple[str, ...] = ()  # none: the MLP is of another kind, a mixture of experts say, and stays as it is
    act: Activation | None = None

    @property
    def mixer(self) -> str:
        """The module that mixes tokens."""
        return self.out.partition(".")[0]

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Linears that would be one matmul if their weights lay side by side."""
        return [group for group in (self.qkv, self.gate_up) if len(group) > 1]


def structure_of(layer: nn.Module) -> Structure | None:
    """The structure of a decoder layer, or None where it is not ``h += attention(h); h += mlp(h)`` with known norms.

    In place of attention there may be a gated delta net.
    """
    names = {name for name, child in layer.named_children() if not isinstance(child, nn.Dropout | nn.Identity)}
    mixer = "linear_attn" if "linear_attn" in names else "self_attn"
    norms = next((n for n in _NORM_NAMES if names == {mixer, "mlp", *filter(None, n)}), None)
    if norms is None:
        return None
    if mixer == "self_attn":
        if not hasattr(layer.self_attn, "head_dim"):
            return None
        if getattr(getattr(layer.self_attn, "config", None), "clip_qkv", None) is not None:
            return None  # a probe need not reach the bound
    choices = _ATTENTION if mixer == "self_attn" else _DELTA_NET
    found = [(inputs, output) for inputs, output in choices if _linears(layer, (inputs,)) and _is_linear(layer, output)]
    if not found:
        return None
    qkv, out = found[0]
    act = _activation_of(layer.get_submodule("mlp"))
    gate_up = _linears(layer, _GATE_UP) if act is not None and _is_linear(layer, "mlp.down_proj") else ()
    return Structure(norms, qkv, out, gate_up, act) if gate_up else Structure(norms, qkv, out)


def norm_of(module: nn.Module) -> Norm | None:
    """The RMS norm that a module is, in either convention of its weight; None for any other."""
    weight: Any = getattr(module, "weight", None)
    eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if eps is None or len(list(module.parameters())) != 1 or weight is None:
        return None
    x = torch.linspace(-2, 3, weight.numel()).to(weight)[None]  # its mean is not 0: a LayerNorm is another
    expected = module(x).float()
    norms = [Norm(weight, float(eps), offset) for offset in (False, True)]
    errors = [float((rms_norm(x, *norm).float() - expected).abs().max()) for norm in norms]
    best = min(errors)
    close = best <= TOLERANCE.get(weight.dtype, 0.0) * float(expected.abs().max())
    return norms[errors.index(best)] if close else None


def _activation_of(mlp: Any) -> Activation | None:
    act = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    if act is None:
        return None
    x = torch.linspace(-6, 6, 64)
    expected = act(x)
    return next((name for name, f in ACTIVATIONS.items() if torch.allclose(f(x), expected, rtol=1e-5, atol=1e-5)), None)


def _linears(layer: nn.Module, choices: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """The first of the choices that a layer has as plain linears, with biases or without; none where it has none."""
    for names in choices:
        if all(_is_linear(layer, name) for name in names):
            without_bias = {layer.get_submodule(name).bias is None for name in names}
            return names if len(without_bias) == 1 else ()
    return ()


def _is_linear(layer: nn.Module, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return type(getattr(layer.get_submodule(path), leaf, None)) is nn.Linear
