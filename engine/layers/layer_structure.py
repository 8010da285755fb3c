"""The parts of a decoder layer: where its norms are, which of its linears read the same input, its activation.

Modules are found by name, and what they compute by trying a few numbers. Whether the layer does nothing else is left to a probe
of the whole layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from stoker.engine.layers.probe import FAR, TOLERANCE, has_tensors
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
    ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),  # AFMoE
    ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),  # HyperCLOVA X
    ("input_layernorm", None, "pre_feedforward_layernorm", None),  # VaultGemma
    ("attention_layernorm", None, "feedforward_layernorm", None),  # Apertus
    ("operator_norm", None, "ffn_norm", None),  # LFM2
    ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),  # LFM3
    ("input_layernorm", None, "pre_ff_layernorm", None),  # Bamba, Falcon-H1
    ("ln_1", None, "ln_2", None),  # GPT-2
    ("input_layernorm", None, None, None),  # attention and MLP side by side: Cohere, Phi
)
# Gemma 4's experts beside the MLP: their router reads the block's input without norm, and they have norms of their own.
_EXPERTS = {
    "router",
    "experts",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
}
# The branch that Gemma 4 has last, for each layer's own input, and the factor of the whole output.
_PER_LAYER = {"act_fn", "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"}
_SCALE = "layer_scalar"
# What mixes tokens: the linears that read its input, and the one that makes its output.
_MIXERS: dict[str, tuple[tuple[tuple[str, ...], str], ...]] = {
    "self_attn": (
        (("q_proj", "k_proj", "v_proj", "g_proj"), "o_proj"),  # the last: a gate of what attention gives
        (("q_proj", "k_proj", "v_proj", "gate_proj"), "o_proj"),
        (("q_proj", "k_proj", "v_proj"), "o_proj"),
        (("q_proj", "k_proj", "v_proj"), "out_proj"),
        (("q_proj", "k_proj", "v_proj"), "dense"),
        (("qkv_proj",), "o_proj"),
        (("q_proj", "k_proj"), "o_proj"),  # keys are values
        (("q_proj",), "o_proj"),  # keys and values are those of another layer
    ),
    "attention": ((("query_key_value",), "dense"),),  # GPT-NeoX
    "attn": ((("c_attn",), "c_proj"),),  # GPT-2
    # A gated delta net: query, key and value, then the gate, beta and the decay.
    "linear_attn": (
        (("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "out_proj"),
        (("in_proj_qkvz", "in_proj_ba"), "out_proj"),
        (tuple(f"{name}_proj" for name in ("q", "k", "v", "g", "b", "a")), "o_proj"),
    ),
    "conv": ((("in_proj",), "out_proj"),),  # LFM2's short convolution
    "mamba": ((("in_proj",), "out_proj"),),  # Mamba-2
}
# Latent attention: the linears that read its input, those that make queries, keys and values from these, the output.
_LATENT = (
    (("q_proj", "kv_a_proj_with_mqa", "g_proj"), ("kv_b_proj",), "o_proj"),  # the last: a gate on each head
    (("q_a_proj", "kv_a_proj_with_mqa"), ("q_b_proj", "kv_b_proj"), "o_proj"),
    (("q_proj", "kv_a_proj_with_mqa"), ("kv_b_proj",), "o_proj"),
)
# Mamba, likewise: the input and the gate, and between what makes a step, B and C.
_MAMBA = ((("in_proj",), ("x_proj",), "out_proj"),)
# Kimi's delta attention, likewise: query, key and value, then beta, the decay and the gate, or latent vectors of these two.
_KIMI = (
    (
        ("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate.f_a_proj", "g_a_proj"),
        ("forget_gate.f_b_proj", "g_b_proj"),
        "o_proj",
    ),
    (("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate.f_proj", "g_proj"), (), "o_proj"),
)
# The same for MLPs: gate and up, then down; and for those without a gate.
_MLPS = ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp")
_GATED = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("input_linear",), "output_linear"),
)
_UNGATED = (
    (("up_proj",), "down_proj"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)
# What may be between the linears of the latter.
_PLAIN_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "relu2": lambda x: F.relu(x).square_()}
_PLAIN_ACTIVATIONS.update((str(name), act) for name, act in ACTIVATIONS.items())
_Name = TypeVar("_Name", bound=str)
_USUAL_EPS = 1e-5  # of a norm that has no attribute for it


@dataclass(frozen=True, slots=True)
class Branch:
    """A module of a layer, and its parts, all by path."""

    path: str  # empty: the layer itself
    inputs: tuple[
        str, ...
    ] = ()  # linears that read its input; none: the module stays as it is (a mixture of experts, say)
    inner: tuple[str, ...] = ()  # linears between these and the output, each of its own input
    out: str = ""  # the linear that makes its output
    act: Activation | None = None  # of an MLP with a gate
    plain_act: Callable[[Tensor], Tensor] | None = None  # of an MLP without; it may be the layer's own module
    scale: float = 1.0  # of what it adds
    own_scale: float = 1.0  # the part of ``scale`` that its module applies itself
    in_scale: float = 1.0  # of its input, after the norm
    gate_scale: float = 1.0  # of an MLP's gate, before the activation
    gates_per_layer: bool = False  # the gate is applied to the layer's own input, and not to a projection
    router: str | None = None  # of experts; it reads the block's input without norm
    norm: str | None = None  # of its own, in place of the block's
    post_norm: str | None = None  # of its own, before what other branches add

    @property
    def is_mlp(self) -> bool:
        """Whether its module is just linears and an activation."""
        return (self.act is not None or self.plain_act is not None) and not self.gates_per_layer


@dataclass(frozen=True, slots=True)
class Block:
    """``h += post_norm(branches(norm(h)))``. Both norms are optional, and a branch may have a norm of its own instead."""

    norm: str | None
    branches: tuple[Branch, ...]  # whose results are added
    post_norm: str | None


@dataclass(frozen=True, slots=True)
class Structure:
    """Names of modules in a layer. Can be found on the meta device too."""

    blocks: tuple[Block, ...]
    scale: str | None = None  # a tensor of one number, which the layer's output is multiplied by

    @property
    def norms(self) -> list[str]:
        parts: list[Block | Branch] = [*self.blocks, *self.branches]
        return [name for part in parts for name in (part.norm, part.post_norm) if name is not None]

    @property
    def kept(self) -> list[str]:
        """Modules that go on being called: those that stay as they are, and norms, for which adapters may bring their own."""
        modules = [name for b in self.branches if not b.inputs for name in (b.path, b.router)]
        parts: list[Block | Branch] = [*self.blocks, *self.branches]
        return [name for name in (*modules, *(part.norm for part in parts)) if name is not None]

    @property
    def branches(self) -> list[Branch]:
        return [branch for block in self.blocks for branch in block.branches]

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Linears that would be one matmul if their weights lay side by side."""
        return [branch.inputs for branch in self.branches if len(branch.inputs) > 1]


def structure_of(layer: nn.Module) -> Structure | None:
    """The structure of a decoder layer; None where it is not a known one.

    Known are ``h += mixer(h); h += mlp(h)``, one of the two alone, and ``h += mixer(h) + mlp(h)``, with known norms. The mixer is
    attention, what is in its place, or both side by side; there may be two MLPs, too.
    """
    if not {*layer._parameters, *layer._buffers} <= {_SCALE}:
        return None
    names = {name for name, child in layer.named_children() if not isinstance(child, nn.Dropout | nn.Identity)}
    if names == {"norm", "mixer"}:  # Nemotron-H
        kinds = {"conv1d": "mamba", "q_proj": "self_attn"}
        kind = next((of for name, of in kinds.items() if hasattr(layer.mixer, name)), None)
        branch = mlp_of(layer, "mixer") if kind is None else _mixer(layer, "mixer", kind)
        return None if branch is None else Structure((Block("norm", (branch,), None),))
    has_experts, has_input = names >= _EXPERTS, names >= _PER_LAYER
    names -= (_EXPERTS if has_experts else set()) | (_PER_LAYER if has_input else set())
    of_mixers, of_mlps = ([name for name in known if name in names] for known in (_MIXERS, _MLPS))
    norms = next((n for n in _NORM_NAMES if names == {*of_mixers, *of_mlps, *filter(None, n)}), None)
    if norms is None or not of_mixers or not of_mlps:
        return None
    found = [_mixer(layer, name, name) for name in of_mixers]
    mixers, mlps = tuple(filter(None, found)), tuple(mlp_of(layer, name) for name in of_mlps)
    if len(mixers) < len(found) or sum(not branch.inputs for branch in mlps) > 1:
        return None
    if any(len(branches) > 1 and post is not None for branches, post in ((mixers, norms[1]), (mlps, norms[3]))):
        return None
    if has_experts:
        before, after = "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"
        experts = Branch("experts", router="router", norm=before, post_norm=after)
        mlps = replace(mlps[0], post_norm="post_feedforward_layernorm_1"), experts
    blocks = [Block(norms[0], mixers, norms[1]), Block(norms[2], mlps, norms[3])]
    if norms[2:] == (None, None) or getattr(layer, "use_parallel_residual", False):
        if norms[1] is not None or norms[3] is not None:
            return None
        blocks = [Block(norms[0], (*mixers, *(replace(branch, norm=norms[2]) for branch in mlps)), None)]
    if has_input:
        gate, out, post = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"
        act = _activation_of(layer, ACTIVATIONS)
        if act is None or not all(_is_linear(layer, name) for name in (gate, out)):
            return None
        blocks.append(Block(None, (Branch("", inputs=(gate,), out=out, act=act, gates_per_layer=True),), post))
    if not hasattr(layer, _SCALE):
        return Structure(tuple(blocks))
    return None if blocks[-1].post_norm is None else Structure(tuple(blocks), _SCALE)


def _mixer(layer: nn.Module, name: str, kind: str) -> Branch | None:
    module = layer.get_submodule(name)
    by_name = {"kv_b_proj": _LATENT, "forget_gate": _KIMI, "x_proj": _MAMBA}
    with_inner = next((known for part, known in by_name.items() if hasattr(module, part)), None)
    if kind in ("self_attn", "attention", "attn"):
        if with_inner is None and head_dim_of(module) is None:
            return None
        scale, in_scale = _multiplier(layer, "attn_out"), _multiplier(layer, "attention_in")
    else:
        scale, in_scale = _multiplier(layer, "ssm_out"), _multiplier(module, "ssm_in")
    branch = Branch(name, scale=_multiplier(layer, "residual") * scale, in_scale=in_scale)
    if with_inner is None:
        return _through_linears(module, branch, _MIXERS[kind])
    for inputs, inner, out in with_inner:
        if all(_is_linear(module, path) for path in inner):
            found = _through_linears(module, branch, ((inputs, out),))
            if found is not None:
                return replace(found, inner=tuple(f"{name}.{path}" for path in inner))
    return None


def head_dim_of(attention: Any) -> int | None:
    return getattr(attention, "head_dim", getattr(attention, "head_size", None))


def mlp_of(layer: nn.Module, name: str) -> Branch:
    module = layer.get_submodule(name)
    own = Branch(name, scale=_multiplier(layer, "residual"))
    down = _multiplier(module, "down")
    scaled = replace(own, scale=own.scale * down, own_scale=down, gate_scale=_multiplier(module, "gate"))
    act = _activation_of(module, ACTIVATIONS)
    gated = None if act is None else _through_linears(module, replace(scaled, act=act), _GATED)
    if gated is not None:
        return gated
    plain = _PLAIN_ACTIVATIONS.get(_activation_of(module, _PLAIN_ACTIVATIONS) or "", getattr(module, "act_fn", None))
    if not callable(plain) or any(hasattr(module, gate) for gate in ("gate_proj", "gate_up_proj")):
        return own
    return _through_linears(module, replace(scaled, plain_act=plain), _UNGATED) or own


def _multiplier(module: Any, name: str) -> float:
    return float(getattr(module, f"{name}_multiplier", getattr(module, f"{name}_scale", 1.0)))


def _through_linears(
    module: nn.Module, branch: Branch, choices: tuple[tuple[tuple[str, ...], str], ...]
) -> Branch | None:
    """The branch with the first of the choices whose names a module has as plain linears.

    Those that read the same input have to have biases all, or none of them.
    """
    for inputs, out in choices:
        if all(_is_linear(module, name) for name in (*inputs, out)):
            if len({module.get_submodule(name).bias is None for name in inputs}) > 1:
                return None
            paths = tuple(f"{branch.path}.{name}" for name in inputs)
            return replace(branch, inputs=paths, out=f"{branch.path}.{out}")
    return None


def norm_of(module: nn.Module, width: int = 0, like: Tensor | None = None) -> Norm | None:
    """The RMS norm or LayerNorm that a module is, in either convention of its weight; None for any other.

    width: of its input, and like: a tensor of its dtype; for norms without weight.
    """
    weight: Any = getattr(module, "weight", None)
    bias = module._parameters.get("bias")
    eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", _USUAL_EPS))
    if eps is None or len(list(module.parameters())) != sum(t is not None for t in (weight, bias)):
        return None
    if weight is None:
        if like is None:
            return None
        weight = like.new_ones(width)
    if weight.ndim != 1:
        return None
    x = torch.linspace(-2, 3, weight.numel(), device="cpu").to(
        weight
    )  # its mean is not 0, or a LayerNorm would look like an RMS norm
    x = torch.stack((x, x * eps**0.5))  # small numbers show the epsilon
    expected = module(x).float()
    kinds = ((False, True), (True,) if bias is not None else (False, True))
    norms = [Norm(weight, float(eps), offset, centred, bias) for offset, centred in itertools.product(*kinds)]
    errors = [float((rms_norm(x, *norm).float() - expected).abs().max()) for norm in norms]
    best = min(errors)
    close = best <= TOLERANCE.get(weight.dtype, 0.0) * float(expected.abs().max())
    return norms[errors.index(best)] if close else None


def _activation_of(mlp: Any, known: Mapping[_Name, Callable[[Tensor], Tensor]]) -> _Name | None:
    acts = [getattr(mlp, name, None) for name in ("act_fn", "activation_fn", "activation", "act")]
    act = next(filter(callable, acts), F.silu if hasattr(mlp, "w1") else None)  # LFM2's calls that
    if act is None or has_tensors(act):
        return None
    x = torch.tensor([*(i / 5 for i in range(-30, 31)), -FAR, FAR], device="cpu")  # beyond any bound, too
    expected: Any = act(x)
    return next((name for name, f in known.items() if torch.allclose(f(x), expected, rtol=1e-5, atol=1e-5)), None)


def _is_linear(module: nn.Module, name: str) -> bool:
    """name: of a part, or of a part's part."""
    part: Any = module
    for step in name.split("."):
        part = getattr(part, step, None)
    return type(part) in (nn.Linear, Conv1D)
