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
    ("operator_norm", None, "ffn_norm", None),  # LFM2
)
# What mixes tokens: the linears that read its input, and the one that makes its output.
_MIXERS: dict[str, tuple[tuple[tuple[str, ...], str], ...]] = {
    "self_attn": (
        (("q_proj", "k_proj", "v_proj"), "o_proj"),
        (("q_proj", "k_proj", "v_proj"), "out_proj"),
        (("qkv_proj",), "o_proj"),
    ),
    # A gated delta net: query, key and value, then the gate, beta and the decay.
    "linear_attn": (
        (("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "out_proj"),
        (("in_proj_qkvz", "in_proj_ba"), "out_proj"),
        (tuple(f"{name}_proj" for name in ("q", "k", "v", "g", "b", "a")), "o_proj"),
    ),
    "conv": ((("in_proj",), "out_proj"),),  # LFM2's short convolution
}
# Alike of MLPs: gate and up, then down.
_MLPS = ("mlp", "feed_forward")
_GATED = ((("gate_proj", "up_proj"), "down_proj"), (("gate_up_proj",), "down_proj"), (("w1", "w3"), "w2"))


@dataclass(frozen=True, slots=True)
class Branch:
    """A module of a layer, by its path, and paths of what it consists of."""

    path: str
    inputs: tuple[str, ...] = ()  # linears that read its input; none: it stays as it is, a mixture of experts say
    out: str = ""  # the linear that makes its output
    act: Activation | None = None  # of an MLP


@dataclass(frozen=True, slots=True)
class Block:
    """``h += post_norm(branches(norm(h)))``, either norm optional."""

    norm: str | None
    branches: tuple[Branch, ...]  # whose results are added
    post_norm: str | None


@dataclass(frozen=True, slots=True)
class Structure:
    """Names of modules in a layer. It holds on the meta device too."""

    blocks: tuple[Block, ...]

    @property
    def branches(self) -> list[Branch]:
        return [branch for block in self.blocks for branch in block.branches]

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Linears that would be one matmul if their weights lay side by side."""
        return [branch.inputs for branch in self.branches if len(branch.inputs) > 1]


def structure_of(layer: nn.Module) -> Structure | None:
    """The structure of a decoder layer, or None where it is not ``h += mixer(h); h += mlp(h)`` with known norms.

    The mixer is attention or what stands in its place.
    """
    names = {name for name, child in layer.named_children() if not isinstance(child, nn.Dropout | nn.Identity)}
    mixers, mlps = ([name for name in known if name in names] for known in (_MIXERS, _MLPS))
    norms = next((n for n in _NORM_NAMES if names == {*mixers, *mlps, *filter(None, n)}), None)
    if norms is None or len(mixers) != 1 or len(mlps) != 1:
        return None
    mixer = _mixer(layer, mixers[0])
    if mixer is None:
        return None
    return Structure((Block(norms[0], (mixer,), norms[1]), Block(norms[2], (_mlp(layer, mlps[0]),), norms[3])))


def _mixer(layer: nn.Module, name: str) -> Branch | None:
    module = layer.get_submodule(name)
    if name == "self_attn":
        if not hasattr(module, "head_dim"):
            return None
        if getattr(getattr(module, "config", None), "clip_qkv", None) is not None:
            return None  # a probe need not reach the bound
    return _through_linears(module, name, _MIXERS[name])


def _mlp(layer: nn.Module, name: str) -> Branch:
    module = layer.get_submodule(name)
    act = _activation_of(module)
    return (_through_linears(module, name, _GATED, act) if act is not None else None) or Branch(name)


def _through_linears(
    module: nn.Module, path: str, choices: tuple[tuple[tuple[str, ...], str], ...], act: Activation | None = None
) -> Branch | None:
    """By the first of the choices that a module has as plain linears, of which those that are read together have biases or
    have none."""
    for inputs, out in choices:
        if all(_is_linear(module, name) for name in (*inputs, out)):
            if len({getattr(module, name).bias is None for name in inputs}) > 1:
                return None
            return Branch(path, tuple(f"{path}.{name}" for name in inputs), f"{path}.{out}", act)
    return None


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
        return "silu" if hasattr(mlp, "w1") else None  # LFM2's, which calls a function
    x = torch.linspace(-6, 6, 64)
    expected = act(x)
    return next((name for name, f in ACTIVATIONS.items() if torch.allclose(f(x), expected, rtol=1e-5, atol=1e-5)), None)


def _is_linear(module: nn.Module, name: str) -> bool:
    return type(getattr(module, name, None)) is nn.Linear
