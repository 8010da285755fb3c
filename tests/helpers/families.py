"""Tiny random fp32 models of every supported family: what the engine is compared with, and what it must refuse.

``family_fields`` says what they consist of. Weights are drawn wide enough that generations vary, and one-dimensional
parameters are moved off their defaults, so a wrong norm convention or a dropped bias shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from family_fields import COMMON, FAMILIES, OTHERS, VOCAB
from hybrid_fields import HYBRIDS, REFUSED
from indexed_fields import INDEXED
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

_LATER = {
    "lfm3",
    "lara_mini",
    "kimi_linear",
    "bailing_hybrid",
    "dots3_note",
    "mistral_large4+images",
}  # than the oldest transformers that pyproject.toml allows
# Those whose own forward raises in a version of transformers, be it on text.
_BROKEN = {"5.24.0": {"llama4+images"}}

_TEXT_MODEL_TYPES = {family: f"{family}_text" for family in ("gemma3", "llama4", "gemma4", "qwen3_5", "qwen3_5_moe")}
_TEXT_MODEL_TYPES |= {
    "gemma4+experts": "gemma4_text",
    "dots3_note": "dots3_note_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
}
_IMAGE_MODEL_TYPES = {
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "mistral": "mistral3",
    "qwen3": "qwen3_vl",
    "qwen3_5": "qwen3_5",
    "llama4": "llama4",
    "mistral_large4": "mistral_large4",
}
_OF_ITS_OWN = {"qwen3", "mistral_large4"}  # text models of models of images, which are no family's


def skip_where_broken(family: str) -> None:
    if family in _BROKEN.get(transformers.__version__, ()):
        pytest.skip(f"the forward of {family} raises in this version of transformers")


def make_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """Of a family that is newer than the transformers there is, or that this cannot run itself, the test is skipped."""
    skip_where_broken(family)
    if family in _LATER and family.removesuffix("+images") not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    if family.endswith("+images"):
        return _image_config(family, **overrides)
    fields = COMMON | (FAMILIES | INDEXED | HYBRIDS | REFUSED | OTHERS)[family] | overrides
    config = AutoConfig.for_model(_TEXT_MODEL_TYPES.get(family, family), **fields)
    config.eos_token_id = fields["eos_token_id"]  # glm4 puts its own ids where it is None
    return config


def _image_config(family: str, **overrides: Any) -> PreTrainedConfig:
    of_text = family.removesuffix("+images")
    fields = dict((FAMILIES | INDEXED | HYBRIDS)[family])
    rest = {"vision_config": fields.pop("vision_config")}
    if of_text in _OF_ITS_OWN:
        text = COMMON | fields | overrides
    elif of_text in HYBRIDS:
        text = COMMON | HYBRIDS[of_text] | fields | overrides | {"model_type": _TEXT_MODEL_TYPES[of_text]}
    else:
        text = COMMON | FAMILIES[of_text] | overrides | {"model_type": _TEXT_MODEL_TYPES.get(of_text, of_text)}
        rest |= fields
    config = AutoConfig.for_model(_IMAGE_MODEL_TYPES[of_text], text_config=text, **rest)
    config.eos_token_id = config.text_config.eos_token_id = text["eos_token_id"]
    return config


def make_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model in eval mode, on the CPU, in fp32. It has no EOS: set ``generation_config.eos_token_id`` to have one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = AutoModelForImageTextToText if family.endswith("+images") else AutoModelForCausalLM
        model = kind.from_config(make_config(family, **overrides), dtype=torch.float32).eval()
        randomise(model)
    return model


def draw(seed: int, length: int) -> list[int]:
    """Token ids of a prompt."""
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def experts_modules(model: torch.nn.Module) -> list[Any]:
    return [m for m in model.modules() if hasattr(type(m), "_apply_gate")]


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """Draw every parameter and persistent buffer anew."""
    embeddings = model.get_input_embeddings().weight
    for name, tensor in model.named_parameters():
        if name.endswith("A_log"):
            # States that last for some ten tokens, so that what is wrong in one shows. One that is gone at once leaves next to
            # nothing, and a norm after it makes that nothing's rounding large.
            tensor.copy_(0.5 * torch.randn_like(tensor) - 2)
        elif tensor is embeddings:
            tensor.copy_(model.config.get_text_config().initializer_range * torch.randn_like(tensor))
        elif tensor.ndim == 1:  # norm weights about their default of 0 or 1, biases and sinks about 0
            tensor.add_(0.25 * torch.randn_like(tensor))
        else:
            tensor.copy_(1.5 * tensor.shape[-1] ** -0.5 * torch.randn_like(tensor))
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            buffer.add_(0.25 * torch.randn_like(buffer))
