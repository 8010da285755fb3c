"""Reads PEFT's adapters on a live model, where they are. PEFT is not imported: its layers are recognised by their attributes.

PEFT replaces a target layer by one that has the original as ``base_layer``, the matrices by adapter name in ``lora_A`` and
``lora_B`` (of embeddings ``lora_embedding_A`` and ``_B``), and in ``scaling`` the scale, which covers alpha, rank and rsLoRA. A
layer over a single parameter has a ``parameter_name``; layers over several parameters of one module are nested. A module that
is saved whole is replaced by one with ``original_module``, and its copies in ``modules_to_save``; a module with trained tokens
by one with a ``token_adapter``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from stoker.kernels.errors import UnsupportedModelError
from stoker.kernels.reference.adapter_weights import AdapterWeights, LoraWeights, TokenRows
from stoker.weight_sync.checksum import checksums
from stoker.weight_sync.module_tree import at_a_glance
from stoker.weight_sync.naming import (
    beside,
    is_of_peft,
    named_tensors,
    tensors_of,
    unwrap,
    walk,
    walk_adapters,
)
from stoker.weight_sync.shards import has_units, is_shard
from stoker.weight_sync.staging import same_place

# MiCA trains only A, and runs like any other.
_VARIANTS = {"DoraLinearVariant", "DoraEmbeddingVariant", "MiCALinearVariant", "MiCAEmbeddingVariant"}
_REFUSED = (
    ("layer_replication", "replicate the layers in the base model itself"),
    ("alora_invocation_tokens", "train plain LoRA, which is on for every token"),
    ("use_bdlora", "train plain LoRA, which needs no block-diagonal matrices"),
    ("arrow_config", "combine the adapters by add_weighted_adapter"),
    ("use_qalora", "train plain LoRA over the quantised base"),
    ("kasa_config", "train plain LoRA"),
    ("monteclora_config", "train plain LoRA"),
    ("velora_config", "train plain LoRA"),
    ("megatron_config", "train the layers of transformers"),
)
# These also change the base's weights, so such an adapter does not fit another base, or the base as it was.
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def _wrapped(model: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """(name in the base model, PEFT's module, kind) of all modules that PEFT replaced.

    Kinds: "linear", "embedding", "parameter", "tokens", "saved", and "other" for methods that are not LoRA.
    """
    for name, module in walk(model):
        if not is_of_peft(type(module)):
            continue
        children = module._modules
        if "token_adapter" in children:
            yield name, module, "tokens"
        elif "original_module" in children:
            yield name, module, "saved"
        elif "base_layer" in children and not hasattr(module, "trainable_tokens_delta"):
            if not hasattr(module, "lora_A"):
                yield name, module, "other"
            elif hasattr(module, "parameter_name"):
                yield name, module, "parameter"
            else:
                yield name, module, "embedding" if isinstance(unwrap(module), nn.Embedding) else "linear"


def check_config(config: Any) -> None:
    """Raise ``UnsupportedModelError`` for options of a PEFT config that the engine does not run."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise UnsupportedModelError(
            f"a PEFT adapter of type {kind}: the engine runs LoRA; train that, or merge this one where PEFT can, by "
            "merge_and_unload()"
        )
    for option, remedy in _REFUSED:
        if getattr(config, option, None):
            raise UnsupportedModelError(f"the adapter uses {option}, which the engine does not run: {remedy}")


def changes_base(config: Any) -> bool:
    """Whether an adapter's initialisation changed the base's weights."""
    init = getattr(config, "init_lora_weights", None)
    return isinstance(init, str) and init.lower().startswith(_OTHER_BASE)


def check_adapters(model: nn.Module) -> None:
    """Raise ``UnsupportedModelError`` for what PEFT did to the model that the engine does not run.

    model: with all its wrappers.
    """
    _check_configs(_with_configs(model))
    for name, module, kind in _wrapped(model):
        if kind == "other":
            raise UnsupportedModelError(f"{name} is a {type(module).__name__} of PEFT: the engine runs LoRA, merge it")
        if kind == "saved":
            continue
        if kind == "parameter" and not hasattr(module, "_param_ndim"):  # whose matrices may lie otherwise
            raise UnsupportedModelError(
                f"the adapter is over a parameter of {name}, as PEFT before 0.21 has it: pip install 'peft>=0.21'"
            )
        layer = module.token_adapter if kind == "tokens" else module
        if layer.merged_adapters:
            raise UnsupportedModelError(
                f"adapter {layer.merged_adapters[0]!r} is merged into {name}: call unmerge_adapter() first"
            )
        for parameter in _parameters(layer):
            if is_shard(parameter):
                continue
            absent = type(parameter.data) is not torch.Tensor or parameter.is_meta or not parameter.numel()
            if absent and not has_units(model):  # whose tensors may be empty on a rank
                raise UnsupportedModelError(
                    f"an adapter of {name} holds no data here (meta or offloaded), or is a {type(parameter.data).__name__}: "
                    "keep it in memory, as a plain tensor"
                )
        for variant in getattr(module, "lora_variant", {}).values():
            if type(variant).__name__ not in _VARIANTS:
                raise UnsupportedModelError(
                    f"{name} has a {type(variant).__name__}: the engine runs LoRA, rsLoRA and DoRA, merge the adapter"
                )


_SWITCHES = ("_disable_adapters", "_active_adapter")
_TOKENS = ("merged_adapters", "token_indices")
_LORA = (*_SWITCHES, "merged_adapters", "scaling", "lora_variant")


def _copy(value: object) -> object:
    """A copy of a module's setting, with which later changes show. Variants are kept as they are."""
    if isinstance(value, dict):
        return {name: _copy(inner) for name, inner in value.items()}
    if isinstance(value, Tensor):  # a scale that is written to in place, where adapters are swapped under torch.compile
        return value.item()
    return list(value) if isinstance(value, list) else value


class Switches:
    """The settings of PEFT's modules as they are now: scales, and which adapters are active, merged or off.

    Like a ``Tree`` it can be compared with the model later, mostly in C: some 0.2 us a module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._configs = _with_configs(model)
        wrapped = [(module, kind) for _, module, kind in _wrapped(model)]
        of_kinds = (
            (_SWITCHES, [module for module, kind in wrapped if kind in ("tokens", "saved")]),
            (_TOKENS, [module.token_adapter for module, kind in wrapped if kind == "tokens"]),
            (_LORA, [module for module, kind in wrapped if kind not in ("tokens", "saved")]),
        )
        self._seen = [self._look(names, modules) for names, modules in of_kinds]
        self._merged = at_a_glance([module.merged_adapters for _, modules in of_kinds[1:] for module in modules])

    @staticmethod
    def _look(names: Sequence[str], modules: Sequence[Any]) -> tuple[Callable[[Any], Any], Sequence[Any], list[Any]]:
        """(a getter of these names in C, where to call it, what is there now, copied down to the lists of token ids)."""
        dictionaries = list(map(vars, modules))
        own = all(d.keys() >= set(names) for d in dictionaries)  # and not of their class
        read, where = (itemgetter(*names), dictionaries) if own else (attrgetter(*names), modules)
        state: list[Any] = []
        for now in map(read, where):  # most modules say the same: one copy for them is less memory to read
            state.append(state[-1] if state and state[-1] == now else tuple(map(_copy, now)))
        return read, where, state

    def looks_same(self) -> bool:
        """Whether, at a glance, no adapter is merged. Raises as ``check_adapters`` does for configs."""
        _check_configs(self._configs)
        return not any(self._merged)

    def same(self) -> bool:
        """Whether all is as it was, in the same tree of modules. Raises as ``check_adapters`` does for configs."""
        _check_configs(self._configs)
        try:
            return all(list(map(read, where)) == state for read, where, state in self._seen)
        except KeyError:  # an attribute was deleted, so that the class's counts
            return False


def _with_configs(model: nn.Module) -> list[Any]:
    """The modules that have PEFT's configs: its wrapper, which also knows of prompts and prefixes, or parts it was applied to."""
    of_class = {kind: hasattr(kind, "peft_config") for kind in set(map(type, model.modules()))}
    return [module for module in model.modules() if of_class[type(module)] or "peft_config" in vars(module)]


def _check_configs(modules: Sequence[Any]) -> None:
    for module in modules:
        for config in module.peft_config.values():
            check_config(config)


def _parameters(layer: Any) -> Iterator[nn.Parameter]:
    for name in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "trainable_tokens_delta"):
        if hasattr(layer, name):
            yield from getattr(layer, name).parameters()


def _held(module: Any, kind: str) -> Mapping[str, Any]:
    """What a module has for each adapter, by the adapter's name."""
    held: Mapping[str, Any]
    if kind == "tokens":
        held = module.token_adapter.trainable_tokens_delta
    elif kind == "saved":
        held = module.modules_to_save
    else:
        held = module.lora_embedding_A if kind == "embedding" else module.lora_A
    return held


def active_adapters(model: nn.Module) -> tuple[str, ...]:
    """The names of the adapters that the model runs now, in the order in which they are applied.

    Raises ``UnsupportedModelError`` where layers run different ones, or where one is over a module that another has saved whole.
    """
    seen = []
    order: Sequence[str] = ()  # the longest: modules that are saved whole know only their own adapters
    for name, module, kind in _wrapped(model):
        names, held = () if module.disable_adapters else tuple(module.active_adapters), _held(module, kind)
        if kind == "saved":
            _check_saved(name, {n: held[n] for n in names if n in held})
        order = max(order, names, key=len)
        seen.append((name, held, tuple(n for n in names if n in held)))
    active = tuple(n for n in order if any(n in on for _, _, on in seen))
    for name, held, on in seen:
        if on != tuple(n for n in active if n in held):
            raise UnsupportedModelError(
                f"{name} runs the adapters {list(on)}, and other layers {list(active)}: activate the same ones in all of "
                "them, by set_adapter on the model"
            )
    return active


def _check_saved(name: str, copies: Mapping[str, nn.Module]) -> None:
    """copies: of a module at ``name``, by the active adapters that have saved it whole."""
    for owner, module in copies.items():
        # A later adapter with "all-linear" is put over such copies, too.
        for _, layer, kind in _wrapped(module):
            over = next((a for a in layer.active_adapters if a in _held(layer, kind)), None)
            if over is not None:
                raise UnsupportedModelError(
                    f"{name} is saved whole by the adapter {owner!r}, and {over!r}, active too, is over that copy: leave "
                    "the module out of its target_modules, or activate one of the two"
                )


def sum_of(names: Sequence[str], adapters: Mapping[str, AdapterWeights]) -> AdapterWeights:
    """Several adapters as one, applied one after the other as PEFT does."""
    first, *others = names
    return replace(adapters[first], then=sum_of(others, adapters) if others else None)


def live_adapters(model: nn.Module, whole: Mapping[str, Tensor]) -> dict[str, AdapterWeights]:
    """All adapters on the model by name, active or not.

    whole: copies of sharded tensors, as ``WeightSource.adapters`` has them. The result does not have biases of the base that an
    adapter trains: PEFT keeps them in the base, whatever is active.
    """
    found: dict[str, AdapterWeights] = {}
    for path, module, kind in _wrapped(model):
        take = partial(_take, whole, beside(path, module))
        for name in _held(module, kind):
            adapter = found.setdefault(name, AdapterWeights())
            if kind == "saved":
                prefix = f"{path}.modules_to_save.{name}."
                state = {n: tensor.detach() for n, tensor, _ in named_tensors(module.modules_to_save[name])}
                state |= {n.removeprefix(prefix): tensor for n, tensor in whole.items() if n.startswith(prefix)}
                adapter.saved[path] = state
            elif kind == "tokens":
                layer = module.token_adapter
                rows = take(f"trainable_tokens_delta.{name}", layer.trainable_tokens_delta[name])
                adapter.tokens[path] = TokenRows(tuple(layer.token_indices[name]), rows)
            else:
                _take_lora(adapter, path, module, kind, name, take)
    return found


def _take(whole: Mapping[str, Tensor], prefix: str, name: str, own: Tensor) -> Tensor:
    """A tensor of a PEFT module, ``own``; or the copy of the whole where it is sharded."""
    return whole.get(f"{prefix}.{name}", own).detach()


def _take_lora(
    adapter: AdapterWeights, path: str, module: Any, kind: str, name: str, take: Callable[[str, Tensor], Tensor]
) -> None:
    if kind == "embedding":
        a = take(f"lora_embedding_A.{name}", module.lora_embedding_A[name])
        b = take(f"lora_embedding_B.{name}", module.lora_embedding_B[name])
    else:
        a = take(f"lora_A.{name}.weight", module.lora_A[name].weight)
        b = take(f"lora_B.{name}.weight", module.lora_B[name].weight)
        if module.lora_B[name].bias is not None:
            adapter.offsets[path] = take(f"lora_B.{name}.bias", module.lora_B[name].bias)
    weights = LoraWeights(a, b, float(module.scaling[name]))
    if kind == "parameter" and module._param_ndim == 3:
        adapter.experts[f"{path}.{module.parameter_name}"] = by_expert(weights, module.num_experts)
    elif kind == "parameter" and module.parameter_name != "weight":
        adapter.experts[f"{path}.{module.parameter_name}"] = weights
    else:
        adapter.linears[path] = weights
    if name in module.lora_magnitude_vector:
        magnitudes = module.lora_magnitude_vector[name].weight
        adapter.magnitudes[path] = take(f"lora_magnitude_vector.{name}.weight", magnitudes)


def by_expert(weights: LoraWeights, experts: int) -> LoraWeights:
    """A and B by expert, as views. PEFT has A as [E * r, D], with ranks side by side, and B as [N, r * E], with experts side by side."""
    a, b, scale, *_ = weights
    return LoraWeights(a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts).permute(2, 0, 1), scale)


def biases_of(model: nn.Module, kind: str, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The base's biases that an adapter with ``bias=kind`` trains, by module name. whole: copies of those in parts."""
    if kind == "none":
        return {}
    targets = {path for path, _, what in _wrapped(model) if what in ("linear", "embedding", "parameter")}
    found = {}
    for path, module in walk(model):
        bias = module._parameters.get("bias")
        if bias is not None and (kind == "all" or path in targets):
            found[path] = _take(whole, path, "bias", bias)
    return found


def layout(adapters: Mapping[str, AdapterWeights]) -> dict[str, object]:
    """By name, something that is equal as long as the adapter has the same scales, and the same tensors at the same places."""
    return {name: _layout(adapter) for name, adapter in adapters.items()}


def _layout(adapter: AdapterWeights) -> object:
    places = {key: (t.data_ptr(), t.dtype, t.shape, t.stride()) for key, t in adapter.named_tensors()}
    scales = {
        (number, path): weights.scale
        for number, link in enumerate(adapter.links)
        for path, weights in (*link.linears.items(), *link.experts.items())
    }
    return places, scales, {path: rows.ids for path, rows in adapter.tokens.items()}


def numbers(adapters: Mapping[str, AdapterWeights], device: torch.device) -> dict[str, list[int]]:
    """Checksums of all their tensors, by name."""
    tensors = {name: list(adapter.tensors()) for name, adapter in adapters.items()}
    sums = iter(checksums(chain.from_iterable(tensors.values()), device))
    return {name: list(islice(sums, len(several))) for name, several in tensors.items()}


def mismatches(
    model: nn.Module, held: AdapterWeights, used: AdapterWeights, copies: Mapping[str, Tensor], device: torch.device
) -> tuple[int, list[str]]:
    """How many tensors of an adapter on the model were compared, and the names of those that differ from what is used.

    held: the adapter as the model has it now; used: what runs on ``device``; they are compared in the latter's dtype. copies: of
    sharded tensors, by name; only their addresses are compared, and they are not counted. Names are those of ``walk_adapters``,
    and for biases of ``walk``.
    """
    everything = tensors_of(chain(walk(model), walk_adapters(model)))
    own = ((name, tensor) for name, tensor, _ in everything if not is_shard(tensor))
    at = {tensor.data_ptr(): name for name, tensor in chain(own, copies.items())}
    theirs, ours = dict(held.named_tensors()), dict(used.named_tensors())
    late = {key for key, tensor in theirs.items() if is_shard(tensor)}  # parts, of which there are no copies
    names = {key: at.get(tensor.data_ptr(), key) for key, tensor in theirs.items() if key not in late}
    apart = [key for key in names if key in ours and not same_place(ours[key], theirs[key])]
    as_run = [ours[key].dtype for key in apart]
    numbers = [checksums([tensors[key] for key in apart], device, as_run) for tensors in (theirs, ours)]
    wrong = [key for key, a, b in zip(apart, *numbers, strict=True) if a != b or theirs[key].shape != ours[key].shape]
    wrong += late | (theirs.keys() ^ ours.keys())
    return len({*names.values()} - copies.keys()), sorted({names.get(key, key) for key in wrong})
