"""PEFT's adapters on a live model, read where they are. PEFT itself is not imported: its layers are known by what they hold.

A target layer is replaced by one that keeps the original as ``base_layer``, matrices by adapter name in ``lora_A`` and
``lora_B``, and the scale, which covers alpha, rank and rsLoRA, in ``scaling``. A module that is saved whole is replaced by
one with ``original_module`` and its copies in ``modules_to_save``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stoker.kernels.errors import UnsupportedModelError
from stoker.kernels.reference.lora import AdapterWeights, LoraWeights
from stoker.weight_sync.checksum import checksums
from stoker.weight_sync.naming import walk

_VARIANTS = {"DoraLinearVariant"}


def _wrapped(model: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """(name in the base model, PEFT's module, attribute of the original) of all that PEFT replaced."""
    for name, module in walk(model):
        for inner in ("base_layer", "original_module"):
            if type(module).__module__.partition(".")[0] == "peft" and inner in module._modules:
                yield name, module, inner


def check_config(config: Any) -> None:
    """Raise ``UnsupportedModelError`` for options of a PEFT config that the engine does not run."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise UnsupportedModelError(f"a PEFT adapter of type {kind}: the engine runs LoRA, merge it")
    for option, remedy in (
        ("target_parameters", "target whole linear layers by target_modules"),
        ("trainable_token_indices", "train the embedding by modules_to_save"),
        ("layer_replication", "replicate no layers"),
        ("alora_invocation_tokens", "train plain LoRA"),
        ("lora_bias", "set lora_bias=False"),
    ):
        if getattr(config, option, None):
            raise UnsupportedModelError(f"the adapter uses {option}, which the engine does not run: {remedy}")
    if getattr(config, "bias", "none") != "none":
        raise UnsupportedModelError(
            f"the adapter trains biases of the base (bias={config.bias!r}), which the engine does not tell apart from the "
            "base's own: set bias='none'"
        )


def check_adapters(model: nn.Module) -> None:
    """Raise ``UnsupportedModelError`` for what PEFT did to the model that the engine does not run."""
    for config in getattr(model, "peft_config", {}).values():
        check_config(config)
    for name, module, inner in _wrapped(model):
        if inner == "original_module":
            continue
        if not hasattr(module, "lora_A"):
            raise UnsupportedModelError(f"{name} is a {type(module).__name__} of PEFT: the engine runs LoRA, merge it")
        if module.merged_adapters:
            raise UnsupportedModelError(
                f"adapter {module.merged_adapters[0]!r} is merged into {name}: call unmerge_adapter() first"
            )
        if module.lora_embedding_A:
            raise UnsupportedModelError(
                f"an adapter targets {name}, an embedding: leave it out of target_modules, or name it in modules_to_save"
            )
        for parameter in (*module.lora_A.parameters(), *module.lora_B.parameters()):
            if type(parameter.data) is not torch.Tensor or parameter.is_meta or not parameter.numel():
                raise UnsupportedModelError(
                    f"an adapter of {name} is sharded or not in memory: keep adapters whole, outside of FSDP and ZeRO-3"
                )
        for variant in getattr(module, "lora_variant", {}).values():
            if type(variant).__name__ not in _VARIANTS:
                raise UnsupportedModelError(
                    f"{name} has a {type(variant).__name__}: the engine runs LoRA, rsLoRA and DoRA, merge the adapter"
                )


def active_adapter(model: nn.Module) -> str | None:
    """What the model runs now: the name of its adapter, or None for the bare base.

    Raises ``UnsupportedModelError`` where several are active at once.
    """
    active: set[str] = set()
    for _, module, inner in _wrapped(model):
        if not module.disable_adapters:
            held = module.lora_A if inner == "base_layer" else module.modules_to_save
            active |= {name for name in module.active_adapters if name in held}
    if len(active) > 1:
        raise UnsupportedModelError(
            f"several adapters are active at once ({', '.join(sorted(active))}): activate one by set_adapter, or combine "
            "them by add_weighted_adapter"
        )
    return next(iter(active), None)


def live_adapters(model: nn.Module) -> dict[str, AdapterWeights]:
    """Every adapter on the model by name, active or not."""
    found: dict[str, AdapterWeights] = {}
    for path, module, inner in _wrapped(model):
        if inner == "original_module":
            for name, saved in module.modules_to_save.items():
                tensors = {**dict(saved.named_parameters()), **dict(saved.named_buffers())}
                adapter = found.setdefault(name, AdapterWeights({}, {}, {}))
                adapter.saved[path] = {n: t.detach() for n, t in tensors.items()}
            continue
        for name in module.lora_A:
            adapter = found.setdefault(name, AdapterWeights({}, {}, {}))
            a, b = module.lora_A[name].weight, module.lora_B[name].weight
            adapter.linears[path] = LoraWeights(a.detach(), b.detach(), float(module.scaling[name]))
            if name in module.lora_magnitude_vector:
                adapter.magnitudes[path] = module.lora_magnitude_vector[name].weight.detach()
    return found


def signature(adapters: dict[str, AdapterWeights], device: torch.device) -> object:
    """Equal to an earlier one where all adapters are the same tensors at the same place with the same numbers."""
    tensors: dict[tuple[str, ...], Tensor] = {}
    scales = {}
    for name, adapter in adapters.items():
        for path, weights in adapter.linears.items():
            tensors[name, path, "a"], tensors[name, path, "b"] = weights.a, weights.b
            scales[name, path] = weights.scale
        tensors.update({(name, path, "magnitude"): t for path, t in adapter.magnitudes.items()})
        tensors.update({(name, path, n): t for path, state in adapter.saved.items() for n, t in state.items()})
    places = {key: (t.data_ptr(), t.dtype, t.shape, t.stride()) for key, t in tensors.items()}
    return places, scales, checksums(tensors.values(), device) if tensors else []
