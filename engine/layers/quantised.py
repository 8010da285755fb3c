"""Linear layers of a base in 4 or 8 bits (bitsandbytes), run on the trainer's own weights as its own layers run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_KINDS = {"Linear4bit", "Linear8bitLt"}
_COLUMNS = 1024  # of a weight made plain at a time


def is_quantised(module: nn.Module) -> bool:
    kinds = type(module).__mro__  # FSDP2 puts a class of its own in front
    return any(k.__module__.partition(".")[0] == "bitsandbytes" and k.__name__ in _KINDS for k in kinds)


def is_packed(weight: Tensor) -> bool:
    """Whether a weight is in 4 bits, which may be stored in a float's dtype."""
    return getattr(weight, "quant_state", None) is not None


class QuantisedLinear(nn.Module):
    """Stands in for the trainer's layer in a shell, so that the trainer's module gets no hooks.

    It computes what that layer does, on the tensors it is bound to: the trainer's, or whole copies of sharded ones. In 4 bits it
    calls the function beneath the layer, whose own forward would repack the trainer's weights on a CPU when not training; the
    weight brings its ``quant_state``. In 8 bits it calls the trainer's layer.
    """

    weight: Any
    bias: Any

    def __init__(self, module: Any, parameters: Mapping[str, Tensor | None]) -> None:
        """parameters: by their names in the layer."""
        super().__init__()
        self._trainer = (module,)  # in a tuple, so that it is no child of this module
        self.in_features: int = module.in_features
        self.out_features: int = module.out_features
        self._parameters.update(parameters)  # type: ignore[arg-type]

    @property
    def finds_outliers(self) -> bool:
        """Whether it looks for inputs that 8 bits do not hold, for which bitsandbytes waits for the device at every call."""
        (layer,) = self._trainer
        return type(layer).__name__ == "Linear8bitLt" and layer.state.threshold > 0

    def forward(self, x: Tensor) -> Tensor:
        (layer,) = self._trainer
        if type(layer).__name__ == "Linear8bitLt":
            return layer.forward(x)  # type: ignore[no-any-return]
        from bitsandbytes import matmul_4bit

        dtype = layer.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        out: Tensor = matmul_4bit(x.to(dtype), self.weight.t(), bias=bias, quant_state=self.weight.quant_state)
        return out.to(x.dtype)

    def adapted_norms(self, scale: float, b: Tensor, a: Tensor) -> Tensor:
        """Norms of the rows of ``W + scale * b @ a``, fp32 [N], as DoRA takes them; ``W`` a few columns at a time.

        The layer applied to unit vectors gives the columns, whatever the format is.
        """
        squares = torch.zeros(self.out_features, device=a.device, dtype=torch.float32)
        for first in range(0, self.in_features, _COLUMNS):
            count = min(_COLUMNS, self.in_features - first)
            units = torch.zeros(count, self.in_features, device=a.device, dtype=a.dtype)
            units[:, first : first + count].fill_diagonal_(1)
            columns = self.forward(units).float()
            if self.bias is not None:
                columns -= self.bias.float()
            adapted = columns.T + scale * (b.float() @ a[:, first : first + count].float())
            squares += adapted.square().sum(1)
        return squares.sqrt()


def finds_outliers(shell: nn.Module) -> bool:
    """Whether a layer of the shell looks for outliers, so that no step can be captured."""
    return any(module.finds_outliers for module in shell.modules() if isinstance(module, QuantisedLinear))


def take_over_quantised(shell: nn.Module, modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Put a ``QuantisedLinear`` in place of every linear of the shell that is quantised in the model.

    modules, tensors: the model's, by name. Only the weight has another shape than the class of the model gives it.
    """
    for path, module in modules.items():
        if is_quantised(module):
            parent, _, name = path.rpartition(".")
            plain = shell.get_submodule(path)._parameters
            weight = tensors.get(f"{path}.weight", plain["weight"])
            setattr(shell.get_submodule(parent), name, QuantisedLinear(module, plain | {"weight": weight}))
