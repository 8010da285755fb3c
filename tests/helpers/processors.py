"""Processors that need no torchvision, models of their vocabulary, and pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import vision
from PIL import Image
from transformers import PreTrainedModel, ProcessorMixin
from trl_setup import CHARACTERS, EOS, PAD, make_tokenizer

WORDS = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
FIRST = len(CHARACTERS) + 3
IDS = {
    "image_token_id": FIRST,
    "vision_start_token_id": FIRST + 1,
    "vision_end_token_id": FIRST + 2,
    "video_token_id": FIRST + 3,
}
IDS_OF_GEMMA = {"image_token_index": FIRST, "boi_token_index": FIRST + 1, "eoi_token_index": FIRST + 2}
TEMPLATE = (
    "{% for m in messages %}{% for part in m.content if m.content is not string %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}"
)


def make_processor(kind: str = "qwen2_5_vl") -> Any:
    """The kind's own, without its videos: those need torchvision."""
    from transformers import (
        CLIPImageProcessorPil,
        Gemma3ImageProcessorPil,
        Gemma3Processor,
        LlavaProcessor,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessorPil,
    )

    class Processor(Qwen2_5_VLProcessor):  # type: ignore[misc]
        def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
            self.image_token, self.video_token = WORDS[0], WORDS[-1]
            self.image_token_id, self.video_token_id = FIRST, FIRST + 3
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    tokenizer = make_tokenizer()
    tokenizer.add_tokens(WORDS, special_tokens=True)
    tokenizer.padding_side = "left"
    if kind == "llava":
        size = {"height": 8, "width": 8}
        images = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size=size)
        return LlavaProcessor(
            image_processor=images, tokenizer=tokenizer, chat_template=TEMPLATE, image_token=WORDS[0], patch_size=4,
            vision_feature_select_strategy="default", num_additional_image_tokens=1,
        )  # fmt: skip
    if kind == "gemma3":
        tokenizer.image_token, tokenizer.boi_token, tokenizer.eoi_token = WORDS[:3]
        tokenizer.image_token_id, tokenizer.boi_token_id, tokenizer.eoi_token_id = range(FIRST, FIRST + 3)
        template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|>")
        images = Gemma3ImageProcessorPil(size={"height": 8, "width": 8})
        return Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=1024)
    return Processor(images, tokenizer, TEMPLATE)


def make_model(kind: str = "qwen2_5_vl", **overrides: Any) -> PreTrainedModel:
    ids = {"llava": {"image_token_index": FIRST}, "gemma3": IDS_OF_GEMMA}.get(kind, IDS)
    settings = {"vocab_size": FIRST + 4, "pad_token_id": PAD, "eos_token_id": EOS, "num_hidden_layers": 2} | overrides
    if kind in ("qwen3_vl", "gemma3"):
        settings["num_hidden_layers"] = 3
    model = vision.make_model(kind, ids=ids, **settings)
    model.generation_config.eos_token_id = EOS
    return model


def picture(seed: int, height: int, width: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
