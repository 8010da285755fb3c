"""Adapters of a model that is not the engine's: read where they are, or gathered into copies if that model is sharded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stoker.kernels.errors import UnsupportedModelError
from stoker.kernels.reference.adapter_weights import AdapterWeights
from stoker.weight_sync.held import Held
from stoker.weight_sync.mirrored_source import MirroredSource
from stoker.weight_sync.naming import named_tensors, unwrap
from stoker.weight_sync.peft_adapters import (
    active_adapters,
    biases_of,
    changes_base,
    check_adapters,
    live_adapters,
    mismatches,
    sum_of,
)
from stoker.weight_sync.shards import is_sharded

_REGISTRIES = "lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|modules_to_save"


class AdapterCopies(MirroredSource):
    """Whole copies of a sharded model's adapters, and of the biases that they train."""

    def __init__(
        self, name: str, model: nn.Module, names: Sequence[str], biases: bool, device: torch.device, **options: Any
    ) -> None:
        self._name = name
        of_one = "|".join(map(re.escape, names))
        pattern = rf".*\.({_REGISTRIES}|trainable_tokens_delta)\.({of_one})(\..*)?" + (
            r"|(.*\.)?bias" if biases else ""
        )
        self._is_wanted = re.compile(pattern).fullmatch
        super().__init__(model, None, device, **options)
        self.tensors()

    def _read(self) -> Held:
        return super()._read().of(lambda name: self._is_wanted(name) is not None)

    def _misfit(self, held: Held) -> Exception | None:
        if held.shapes != self._shapes or held.aliases != self._aliases:
            return UnsupportedModelError(
                f"adapter {self._name!r} is in other parts than when it was loaded: unload_adapter({self._name!r}), update the "
                "weights and load it again"
            )
        return super()._misfit(held)


class AdapterOfModel:
    """One adapter of a model, or several that are active together. options: of ``MirroredSource``.

    For a sharded model, all ranks make it together and then pull it together; before that it has no numbers. Raises
    ``UnsupportedModelError``.
    """

    def __init__(
        self, name: str, model: Any, theirs: str | None, device: torch.device, options: Mapping[str, Any]
    ) -> None:
        """name: in the engine. theirs: its name on the model; None: what is active there."""
        self._name, self._model = name, model
        self._names = (theirs,) if theirs is not None else active_adapters(unwrap(model))
        if not self._names:
            raise UnsupportedModelError(f"adapter {name!r}: the model has none that is active: name one")
        check_adapters(model)
        self.copies: AdapterCopies | None = None
        if is_sharded(model):
            trains_biases = any(self._biases(n) != "none" for n in self._names)
            self.copies = AdapterCopies(name, model, self._names, trains_biases, device, **options)

    def check_base(self, module: nn.Module) -> None:
        """Raise ``UnsupportedModelError`` where it only fits its own base, whose weights it changed. module: the engine's."""
        of_own_base = [name for name in self._names if changes_base(self._model.peft_config.get(name))]
        if not of_own_base:
            return
        wrong = self._changed_base(of_own_base, module)
        if wrong is not None:
            raise UnsupportedModelError(
                f"adapter {self._name!r} was made by {self._model.peft_config[of_own_base[0]].init_lora_weights}, which "
                f"changes the base's weights too, and {wrong} here is another: load it from a folder that "
                "save_pretrained(path_initial_model_for_weight_conversion=...) wrote"
            )

    def _changed_base(self, names: Sequence[str], module: nn.Module) -> str | None:
        """The first weight under these adapters that differs in ``module``, or may differ."""
        if is_sharded(self._model) or is_sharded(module):
            return "the base, of which there are parts,"
        found = live_adapters(unwrap(self._model), {})
        ours, theirs = ({n: t for n, t, _ in named_tensors(unwrap(m))} for m in (module, self._model))
        for weight in (f"{path}.weight" for name in names if name in found for path in found[name].linears):
            own = ours.get(weight)
            if own is None or not torch.equal(theirs[weight].to(own), own):
                return weight
        return None

    def _biases(self, name: str) -> str:
        return getattr(self._model.peft_config.get(name), "bias", "none")

    def read(self) -> AdapterWeights:
        """The adapter as it is now; gathered tensors as of the last pull. Never communicates."""
        check_adapters(self._model)
        if is_sharded(self._model) != (self.copies is not None):
            raise UnsupportedModelError(
                f"adapter {self._name!r} is of a model that was sharded, or made whole, since it was loaded: load it "
                "again"
            )
        whole, module = self._copied(), unwrap(self._model)
        found = live_adapters(module, whole)
        for wanted in self._names:
            if wanted not in found:
                raise UnsupportedModelError(f"adapter {self._name!r}: the model has {sorted(found)}, and no {wanted!r}")
        adapter = sum_of(self._names, found)
        for wanted in self._names:  # PEFT lets no two adapters have biases
            adapter.biases.update(biases_of(module, self._biases(wanted), whole))
        return adapter

    def mismatches(self, used: AdapterWeights, device: torch.device) -> tuple[int, list[str]]:
        """As ``mismatches`` of ``peft_adapters``. Sharded tensors are compared by ``copies``."""
        return mismatches(self._model, self.read(), used, self._copied(), device)

    def _copied(self) -> Mapping[str, Tensor]:
        return {} if self.copies is None else self.copies.tensors()
