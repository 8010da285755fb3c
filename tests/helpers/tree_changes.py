"""What may become of a model's modules and tensors between two looks at it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from families import make_model
from peft import LoraConfig, get_peft_model
from torch import nn


def changeable() -> Any:
    """A model that each of ``CHANGES`` can be made to."""
    model: Any = make_model("llama")
    model.model.layers[0].square = nn.Linear(8, 8, dtype=torch.float16)
    model.model.norm.scale = nn.Parameter(torch.ones(()))
    return model


def set_data(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.clone()


def other_strides(model: Any) -> None:
    """The same elements at the same address in another order."""
    weight = model.model.layers[0].self_attn.o_proj.weight
    weight.data = weight.data.t()


def square(model: Any) -> None:
    """Strides alone."""
    weight = model.model.layers[0].square.weight
    weight.data = weight.data.t()


def shortened(model: Any) -> None:
    weight = model.model.layers[0].square.weight
    weight.data = weight.data[:4]


def reinterpreted(model: Any) -> None:
    """The same bytes at the same address in another dtype."""
    weight = model.model.layers[0].square.weight
    weight.data = weight.data.view(torch.bfloat16)


def renamed(model: Any) -> None:
    norm = model.model.norm
    norm._parameters = OrderedDict((f"{name}_", p) for name, p in norm._parameters.items())


def renamed_in_place(model: Any) -> None:
    norm = model.model.norm
    norm._parameters["gain"] = norm._parameters.pop("weight")


def exchanged(model: Any) -> None:
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    first.up_proj, second.up_proj = second.up_proj, first.up_proj


def registry_replaced(model: Any) -> None:
    model.model.norm._parameters = {"weight": nn.Parameter(torch.ones(48))}


def parameter_replaced(model: Any) -> None:
    model.lm_head._parameters["weight"] = nn.Parameter(model.lm_head.weight.detach())


def scalar_replaced(model: Any) -> None:
    """By one that lies at the same place, and is equal to it."""
    model.model.norm.scale = nn.Parameter(model.model.norm.scale.data)


def bias_added(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.zeros(128))


def bias_taken_away(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.bias = None


def buffer_moved(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()


def layer_replaced(model: Any) -> None:
    model.model.layers[1] = make_model("llama", seed=3).model.layers[1]


def layer_dropped(model: Any) -> None:
    del model.model.layers[1]


def layer_added(model: Any) -> None:
    model.model.layers.append(make_model("llama", seed=3).model.layers[1])


def child_added(model: Any) -> None:
    model.model.norm.extra = nn.Identity()


def buffer_added(model: Any) -> None:
    model.model.norm.register_buffer("more", torch.zeros(1))


def lora(model: Any) -> None:
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))


def retyped(model: Any) -> None:
    model.to(torch.bfloat16)


CHANGES: list[Callable[[Any], None]] = [
    set_data, other_strides, square, shortened, reinterpreted, renamed, renamed_in_place, exchanged, registry_replaced,
    parameter_replaced, scalar_replaced, bias_added, bias_taken_away, buffer_moved, layer_replaced, layer_dropped, layer_added, child_added,
    lora, retyped, buffer_added,
]  # fmt: skip
