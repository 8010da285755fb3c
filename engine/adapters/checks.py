"""Checks that an adapter fits the modules of a shell, and says which kinds of modules may have adapters."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from stoker.engine.layers.experts import as_run, bias_tables, expert_tables, repeats_tokens
from stoker.engine.layers.quantised import QuantisedLinear
from stoker.kernels.errors import UnsupportedModelError
from stoker.kernels.reference.adapter_weights import AdapterWeights, LoraWeights, TokenRows


def is_linear(module: Any) -> bool:
    return type(module) in (nn.Linear, QuantisedLinear, Conv1D)


def is_router(module: Any) -> bool:
    """Whether it has a matrix and is no linear, as a router. Its adapter is added to its weight, as its output may be a choice."""
    if is_linear(module) or isinstance(module, nn.Linear | nn.Embedding):
        return False
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2


def shape_of(module: Any) -> tuple[int, int]:
    """(outputs, inputs) of the module that an adapter's A and B are over."""
    if isinstance(module, nn.Linear | QuantisedLinear):
        return module.out_features, module.in_features
    rows, columns = module.weight.shape
    return (columns, rows) if isinstance(module, nn.Embedding | Conv1D) else (rows, columns)


def states_of(link: AdapterWeights, modules: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """The modules whose weights the adapter replaces: those it saves whole, and modules with a bias that are no linears."""
    states = {path: dict(state) for path, state in link.saved.items()}
    for path, bias in link.biases.items():
        if not is_linear(modules.get(path)):
            states.setdefault(path, {}).setdefault("bias", bias)
    return states


def with_tied(tokens: Mapping[str, TokenRows], modules: Mapping[str, Any]) -> dict[str, TokenRows]:
    """``tokens``, and the same for modules that share an embedding's weight, as PEFT has it; not the other way round."""
    found = dict(tokens)
    for path, rows in tokens.items():
        if isinstance(module := modules[path], nn.Embedding):
            tied = (p for p, m in modules.items() if getattr(m, "weight", None) is module.weight)
            found |= {p: rows for p in tied if p not in found}
    return found


def check_fits(name: str, link: AdapterWeights, modules: Mapping[str, Any], fused: Set[str]) -> None:
    """Raise ``UnsupportedModelError`` naming what of an adapter does not fit.

    modules: the model's, by path; fused: paths of those that are not called any more.
    """
    for path, weights in link.linears.items():
        module = _module(name, path, modules)
        if not is_linear(module) and not isinstance(module, nn.Embedding) and not is_router(module):
            raise UnsupportedModelError(
                f"adapter {name!r} targets {path}, a {type(module).__name__}: only plain linear layers, "
                "embeddings, experts and routers that are no linear layer take adapters, leave it out of target_modules, or merge the adapter"
            )
        wanted = shape_of(module)
        _check_matrices(name, path, weights, wanted)
        for what, tensors in (("magnitudes", link.magnitudes), ("biases of B", link.offsets)):
            if path in tensors and tensors[path].numel() != wanted[0]:
                raise UnsupportedModelError(
                    f"adapter {name!r} has {tensors[path].numel()} {what} for {path}'s {wanted[0]} rows: it is for another "
                    "base, or its file is damaged"
                )
    for key, weights in link.experts.items():
        path, _, leaf = key.rpartition(".")
        module = _module(name, path, modules)
        shapes: dict[str, tuple[int, ...]] = {**expert_tables(module), **bias_tables(module)}
        if leaf not in shapes:
            raise UnsupportedModelError(
                f"adapter {name!r} targets {key}, which the engine does not run as experts of its own: leave it out "
                "of target_parameters"
            )
        _check_matrices(name, key, as_run(module, weights), shapes[leaf])
    _check_states(name, link, modules, fused)


def check_parts(name: str, link: AdapterWeights, whole: Set[str]) -> None:
    """Raise ``UnsupportedModelError`` naming what cannot be shared out among the ranks that run a model together.

    whole: names of the modules that this rank has parts of, or whose results it has parts of, other than linears.
    """
    changed = (
        *link.linears,
        *link.biases,
        *link.saved,
        *link.tokens,
        *(key.rpartition(".")[0] for key in link.experts),
    )
    path = next((path for path in changed if path in whole), None)
    if path is not None or link.magnitudes:
        what = f"DoRA over {next(iter(link.magnitudes))}" if path is None else path
        raise UnsupportedModelError(
            f"adapter {name!r} changes {what}: with tensor_parallel_size adapters are LoRA over linear layers of attention and "
            "MLPs, over embeddings and the head. Leave it out, merge the adapter, or leave tensor_parallel_size at 1"
        )


def _module(name: str, path: str, modules: Mapping[str, Any]) -> Any:
    if path not in modules:
        raise UnsupportedModelError(
            f"adapter {name!r} targets {path}, which the model does not have: it is for another base"
        )
    return modules[path]


def _check_matrices(name: str, path: str, weights: LoraWeights, wanted: tuple[int, ...]) -> None:
    """wanted: shape of the weight, with the number of experts before it where there are any."""
    *experts, rows, columns = wanted
    if weights.a.shape != (*experts, weights.rank, columns) or weights.b.shape != (*experts, rows, weights.rank):
        raise UnsupportedModelError(
            f"adapter {name!r} has A {tuple(weights.a.shape)} and B {tuple(weights.b.shape)} for {path}, whose "
            f"weight is {wanted}: it is for another base, or its file is damaged"
        )


def not_run_alone(name: str, path: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"adapter {name!r} saves {path}, which the engine does not run as a module of its own: modules_to_save "
        "may name embeddings, norms before attention, MLP and head, and the head"
    )


def _check_states(name: str, link: AdapterWeights, modules: Mapping[str, Any], fused: Set[str]) -> None:
    for path, bias in link.biases.items():
        own_bias = getattr(_module(name, path, modules), "bias", None)
        if own_bias is None or own_bias.shape != bias.shape:
            raise UnsupportedModelError(
                f"adapter {name!r} has a bias of {path}, whose own has another shape: it is for another base"
            )
    for path, state in states_of(link, modules).items():
        module = modules.get(path)
        # Not attention, which would write its keys over the base's; nor what repeats tokens, whose rows are not those of tokens.
        attends = module is not None and any(hasattr(m, "is_causal") for m in module.modules())
        if module is None or path in fused or attends or repeats_tokens(module):
            raise not_run_alone(name, path)
        own: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        wrong = sorted(n for n in state if n not in own or own[n].shape != state[n].shape)
        if wrong:
            raise UnsupportedModelError(
                f"adapter {name!r} saves {path} with {wrong[:3]} of another shape than the base"
            )
    for path, weight in link.bases.items():
        own_weight = _module(name, path, modules).weight
        if not torch.equal(weight.to(own_weight), own_weight):
            raise UnsupportedModelError(
                f"adapter {name!r} comes with other weights of {path} than the base has: save it with "
                "save_embedding_layers=False, or name the module in modules_to_save"
            )
    for path, (ids, rows) in link.tokens.items():
        weight = _module(name, path, modules).weight
        if rows.shape[1] != weight.shape[1] or max(ids, default=0) >= weight.shape[0]:
            raise UnsupportedModelError(
                f"adapter {name!r} trains tokens that {path}, of shape {tuple(weight.shape)}, does not have: it is for "
                "another base"
            )
    for path in with_tied(link.tokens, modules):
        if path in fused or getattr(modules[path], "bias", None) is not None:
            raise UnsupportedModelError(
                f"adapter {name!r} trains tokens of {path}: the engine runs those of embeddings, and of a head without a "
                "bias, which PEFT would leave out. Name it in modules_to_save, or leave it out of trainable_token_indices"
            )
        # PEFT has both over one module where that is a head tied to an embedding with tokens, and then no DoRA.
        module = modules[path]
        tied = any(p != path and modules[p].weight is module.weight for p in link.tokens)
        if path in (link.magnitudes if tied and not isinstance(module, nn.Embedding) else link.linears):
            raise UnsupportedModelError(
                f"adapter {name!r} has {'DoRA' if path in link.magnitudes else 'LoRA'} over {path} and trains tokens of it, which "
                "PEFT does not run: leave it out of one of target_modules and trainable_token_indices"
            )
