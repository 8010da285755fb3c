"""What layers call during a step: attention over the KV cache, and recurrences, which move their states on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask

from stoker.engine.cache.kv_cache import LayerShape, StateShape
from stoker.kernels.errors import NotKeptError, UnsupportedModelError
from stoker.kernels.ops import Ops
from stoker.kernels.reference.attention_plan import PLAIN, Visibility
from stoker.kernels.reference.norm_rotary import QKNorm
from stoker.kernels.reference.recurrent import StateRows

if TYPE_CHECKING:
    from stoker.engine.attention import MaskRule


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Tokens of a step whose embeddings are of images."""

    at: Tensor  # int64 [n]
    embeddings: Tensor  # [n, D]
    deep: tuple[Tensor, ...]  # added there after each of the first layers, [n, D] each


@dataclass(frozen=True, slots=True)
class StepContext:
    """Operations, KV tensors by layer, attention's plan and where new keys go; states by layer, and whose rows they are.

    A layer's states are in the order of ``LayerShape.states``: of the convolution, then of what follows it. images: None where
    the step computes none. rotary: rotary positions where they differ from those in the sequence, int64 [T], or [3, T] (time,
    height, width); else None.
    """

    ops: Ops
    layers: Sequence[tuple[Tensor, Tensor]]
    plan: Any
    slots: Tensor
    window_slots: Tensor  # of layers with a window
    states: Sequence[tuple[Tensor, ...]]
    rows: StateRows
    images: ImageRows | None = None
    rotary: Tensor | None = None

    def _where(self, visibility: Visibility) -> Tensor:
        return self.slots if visibility == PLAIN else self.window_slots

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, visibility: Visibility, **options: Any
    ) -> Tensor:
        """query, key, value: [T, heads, dim]; returns [T, query heads, value dim]."""
        key_cache, value_cache = self.layers[layer]
        self.ops.write_kv(key, value, key_cache, value_cache, self._where(visibility))
        return self.ops.paged_attention(query, key_cache, value_cache, self.plan, visibility=visibility, **options)

    def attend_projected(
        self,
        layer: int,
        qkv: Tensor,
        heads: int,
        kv_heads: int,
        norm: QKNorm | None,
        cos_sin: tuple[Tensor, Tensor] | None,
        *,
        interleaved: bool,
        factor: Tensor | None,
        grouped: bool,
        visibility: Visibility,
        **options: Any,
    ) -> Tensor:
        """``attend`` from the projection, before norm and rotation, as ``Ops.qk_norm_rotary_write`` takes it."""
        caches, how = self.layers[layer], {"interleaved": interleaved, "factor": factor, "grouped": grouped}
        query = self.ops.qk_norm_rotary_write(
            qkv, heads, kv_heads, norm, cos_sin, *caches, self._where(visibility), **how
        )
        return self.ops.paged_attention(query, *caches, self.plan, visibility=visibility, **options)

    def attend_latent(
        self,
        layer: int,
        query: Tensor,
        key_value: Tensor,
        key_rotary: Tensor,
        cos_sin: tuple[Tensor, Tensor] | None,
        *,
        interleaved: bool,
        factor: Tensor | None,
        visibility: Visibility,
        **options: Any,
    ) -> Tensor:
        """``attend`` from the projections of latent attention, before rotation, as ``Ops.latent_heads_write`` takes them."""
        caches, rotation = self.layers[layer], {"interleaved": interleaved, "factor": factor}
        query = self.ops.latent_heads_write(
            query, key_value, key_rotary, cos_sin, *caches, self._where(visibility), **rotation
        )
        return self.ops.paged_attention(query, *caches, self.plan, visibility=visibility, **options)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        """As ``Ops.causal_conv``."""
        return self.ops.causal_conv(x, weight, bias, self.states[layer][0], self.rows, **options)

    def delta_rule(self, layer: int, *inputs: Tensor, normalise: bool) -> Tensor:
        """As ``Ops.gated_delta_rule``."""
        return self.ops.gated_delta_rule(*inputs, self.states[layer][1], self.rows, normalise=normalise)

    def scan(self, layer: int, *inputs: Tensor | None, **options: Any) -> Tensor:
        """As ``Ops.selective_scan``."""
        return self.ops.selective_scan(*inputs, self.states[layer][1], self.rows, **options)


@dataclass(frozen=True, slots=True)
class ShapeProbe:
    """Stands in for a context, to find what each layer would store. In it no token sees another."""

    images: ClassVar[None] = None
    rotary: ClassVar[None] = None

    attended: dict[int, LayerShape] = field(default_factory=dict)
    states: dict[int, list[StateShape]] = field(default_factory=dict)
    kept: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # kept alive, so that no other tensor gets their address
    masks: dict[int, MaskRule] = field(default_factory=dict)
    told: dict[int, Visibility] = field(default_factory=dict)  # what attention is told in place of these masks

    def shapes(self, num_layers: int) -> list[LayerShape]:
        """What every layer stores, also of those that store nothing."""
        found = ((self.attended.get(i, LayerShape()), self.states.get(i, ())) for i in range(num_layers))
        return [replace(shape, states=tuple(states)) for shape, states in found]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if layer in self.attended:
            raise UnsupportedModelError(f"layer {layer} attends more than once, and the cache holds one key a token")
        places = [t.data_ptr() for t in (key, value)]
        same_as = next((i for i, pair in self.kept.items() if [t.data_ptr() for t in pair] == places), None)
        self.kept[layer], self.told[layer] = (key, value), options["visibility"]
        self.attended[layer] = LayerShape(
            query_heads=query.shape[1],
            heads=key.shape[1],
            key_dim=key.shape[2],
            value_dim=value.shape[2],
            dtype=key.dtype,
            visibility=options["visibility"],
            same_as=same_as,
        )
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: Any) -> Tensor:
        self._found(layer, StateShape((weight.shape[1] - 1, x.shape[1]), x.dtype))
        return x

    def delta_rule(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *_: Tensor, normalise: bool) -> Tensor:
        self._found(
            layer, StateShape((value.shape[1], key.shape[2], value.shape[2]), torch.float32, "gated_delta_rule")
        )
        return value

    def scan(
        self, layer: int, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *_: Tensor | None, **options: Any
    ) -> Tensor:
        self._found(layer, StateShape((*x.shape[1:], B.shape[2]), torch.float32, "selective_scan"))
        return x

    def _found(self, layer: int, state: StateShape) -> None:
        states = self.states.setdefault(layer, [])
        if any(state.operation == other.operation for other in states):
            raise UnsupportedModelError(
                f"layer {layer} moves a state on more than once, and the cache holds one a sequence"
            )
        states.append(state)


@cache
def cache_name(forward: Callable[..., Any]) -> str:
    """The name of the parameter in which a forward takes its cache.

    Transformers renamed it in 5.24, and accepts the old name, with a warning, until 5.40. Other people's models may still use it.
    """
    before = "past_key_values"
    renamed = before not in inspect.signature(create_causal_mask).parameters
    return "cache" if renamed and before not in inspect.signature(forward).parameters else before


class PackedPositions:
    """In place of a cache, which holds nothing: for Llama 4, which reads positions from the cache's length, it has each token's.

    The rest is what layers call of a cache.
    """

    is_compileable = False
    is_initialized = True

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions

    def __getattr__(self, name: str) -> Any:
        raise NotKeptError(
            f"its cache would need {name!r}, for more than keys, values and the states of recurrences that the engine knows"
        )

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        return self.positions - torch.arange(self.positions.shape[0], device=self.positions.device)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.positions.shape[0], 0

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key, value

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        return None

    get_recurrent_state = get_conv_state

    def update_conv_state(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return inputs

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> None:
        return None
