"""Attention of text: what transformers' ``AttentionInterface`` calls in the engine, and a check of the model's masks.

The engine makes no masks. Its attention is given a window and a chunk instead, which have to say exactly what the model's masks
let each token see. That is checked once, when the model's layers are probed: transformers then makes its masks, and the
functions of positions that define them are kept and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from stoker.kernels.errors import NotKeptError, UnsupportedModelError
from stoker.kernels.reference.attention_plan import Visibility

if TYPE_CHECKING:
    from stoker.engine.step_context import ShapeProbe, StepContext

PAGED, PROBED = "stoker_paged", "stoker_probed"  # attention implementations, as a config names them

_FIRST, _SPREAD = 16, 16  # queries that are compared: so many at the start, and so many spread evenly over the rest


@contextmanager
def attending_by(config: Any, implementation: str) -> Iterator[None]:
    """Context manager: text attends, and masks are made, by ``implementation`` (a name, as configs have it)."""
    before: str = config._attn_implementation
    route_text(config, implementation)
    try:
        yield
    finally:
        route_text(config, before)


def route_text(config: Any, implementation: str) -> None:
    """Set by what text attends and by what its masks are made. Other parts of a model stay as they are."""
    text = config.get_text_config(decoder=True)
    config._attn_implementation = {"": implementation} if config.sub_configs else implementation  # not of its parts
    for part in (getattr(config, key, None) for key in config.sub_configs):
        if part is not None and part.get_text_config(decoder=True) is text:
            route_text(part, implementation)


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Stands in for a mask. visible: a function of integer tensors (batch, head, query, key), true where the query sees the key."""

    visible: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def __getitem__(self, part: Any) -> MaskRule:
        """The rule for some of the queries, which is the same: Gemma 4's last layers may run on these alone."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise NotKeptError(f"it computes with masks, by their {name}, and the engine makes none")

    def first_difference(self, told: Visibility, length: int, device: torch.device) -> int | None:
        """The first query below ``length`` whose mask and attention see different keys; None where there is none."""
        zero, keys = torch.zeros((), dtype=torch.long, device=device), torch.arange(length, device=device)

        def differ(queries: list[int]) -> list[bool]:
            at = torch.tensor(queries, device=device)[:, None]
            return list((self.visible(zero, zero, at, keys) == told.hidden(at, keys)).any(1).tolist())

        tried = sorted({*range(min(_FIRST, length)), *(n * (length - 1) // _SPREAD for n in range(_SPREAD + 1))})
        found = differ(tried)
        if True not in found:
            return None
        place = found.index(True)
        first: int = tried[place]
        same = tried[place - 1] if place else -1
        while first - same > 1:
            middle = (same + first) // 2
            same, first = (same, middle) if any(differ([middle])) else (middle, first)
        return first


CAUSAL = MaskRule(causal_mask_function)  # in a step, for layers that take their mask apart
EVERY_KEY = object()  # stands in for indices of chosen keys


def check_masks(name: str, probe: ShapeProbe, length: int, device: torch.device) -> None:
    """Raise ``UnsupportedModelError`` where a layer's mask and its attention let a token see different keys."""
    for layer, rule in probe.masks.items():
        try:
            at = rule.first_difference(probe.told[layer], length, device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of any kind: it is the model's own code
            raise UnsupportedModelError(
                f"{name}: the mask of layer {layer} is no function of positions alone ({error}): use model.generate for it"
            ) from error
        if at is not None:
            shorter = f"set EngineConfig(max_model_len={at}), or " if at > 1 else ""
            raise UnsupportedModelError(
                f"{name}: the mask of layer {layer} shows token {at} other keys than its attention is told of, which is "
                f"all that the engine knows: {shorter}use model.generate for it"
            )


def _paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskRule | None,
    *,
    scaling: float,
    stoker_context: StepContext,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: object = None,
    block_indices: object = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Called by transformers with [1, heads, T, dim]; returns [1, T, heads, dim]."""
    layer: Any = module.layer_idx
    if (attention_mask is not None and attention_mask is not CAUSAL) or not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"layer {layer} is not plain causal attention: {type(module).__name__}")
    if any(chosen is not None and chosen is not EVERY_KEY for chosen in (indices, block_indices)):
        raise UnsupportedModelError(f"layer {layer} attends to chosen keys: {type(module).__name__}")
    out = stoker_context.attend(
        layer,
        *(t[0].transpose(0, 1) for t in (query, key, value)),
        scale=scaling,
        visibility=Visibility(window=sliding_window, chunk=_chunk(module.config, layer)),
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


def _probed(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """As ``_paged``, in a ``ShapeProbe``, which keeps the mask's rule."""
    if "stoker_context" not in options:
        raise UnsupportedModelError(f"{type(module).__name__} does not pass the forward's keywords on to its attention")
    if isinstance(attention_mask, MaskRule):
        options["stoker_context"].masks[module.layer_idx] = attention_mask
        attention_mask = None
    return _paged(module, query, key, value, attention_mask, **options)


def _keep_rule(*_: Any, mask_function: Callable[..., Tensor], **__: Any) -> MaskRule:
    return MaskRule(mask_function)


def _chunk(config: Any, layer: int) -> int | None:
    types = getattr(config, "layer_types", None)
    return config.attention_chunk_size if types and types[layer] == "chunked_attention" else None


AttentionInterface.register(PAGED, _paged)
AttentionInterface.register(PROBED, _probed)
AttentionMaskInterface.register(PROBED, _keep_rule)  # without one for PAGED, transformers makes no masks
