"""Tiny random models of images with prompts that use them, and what Hugging Face makes of these prompts.

Each kind of model has its own way of laying images out: patches with a grid, tiles, padded images with their sizes. What
a processor would return is made here by hand, from random pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from families import randomise, skip_where_broken
from family_fields import COMMON, FAMILIES, VOCAB, rope
from hybrid_fields import DELTA_RULE, EXPERTS, HYBRIDS
from oracle import is_greedy
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig, PreTrainedModel

IMAGE, BEGIN, END, BREAK, VIDEO = range(VOCAB - 5, VOCAB)  # tokens no text below has
TEXT = range(3, VOCAB - 5)

Prompt = dict[str, torch.Tensor]
Layout = Sequence[int | tuple[int, int]]  # so many tokens of text, or an image of so many by so many merged patches
Pixels = Callable[[list[tuple[int, int]], torch.Generator], tuple[list[list[int]], Prompt]]

# With a patch of 4 pixels a side, 2 x 2 of which are merged into what stands for one token.
_PATCH = {"patch_size": 4, "num_heads": 4, "depth": 2}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4}
_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
_QWEN_IDS = _IDS | {"vision_start_token_id": BEGIN, "vision_end_token_id": END}


def _noise(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def _grid(sizes: list[tuple[int, int]], generator: torch.Generator) -> tuple[list[list[int]], Prompt]:
    """Patches in a row and the grid of each image (Qwen-VL, GLM-V)."""
    grids = torch.tensor([[1, 2 * h, 2 * w] for h, w in sizes])
    pixels = _noise(generator, int(grids.prod(-1).sum()), 3 * 2 * 4 * 4)
    tokens = [[BEGIN, *[IMAGE] * (h * w), END] for h, w in sizes]
    return tokens, {"pixel_values": pixels, "image_grid_thw": grids}


def _square(tokens: int, *, outer: bool = False, mask: bool = False) -> Pixels:
    """Images of 8 x 8 pixels, each of as many tokens; more of them, tiles say, for a larger image."""

    def make(sizes: list[tuple[int, int]], generator: torch.Generator) -> tuple[list[list[int]], Prompt]:
        tiles = [h * w for h, w in sizes]
        pixels = _noise(generator, sum(tiles), 3, 8, 8)
        inputs = {"pixel_values": pixels[None] if outer else pixels}
        if mask:
            inputs["pixel_attention_mask"] = torch.ones(1, sum(tiles), 8, 8, dtype=torch.long)
        return [[BEGIN, *[IMAGE] * (tokens * n), END] for n in tiles], inputs

    return make


def _padded(sizes: list[tuple[int, int]], generator: torch.Generator) -> tuple[list[list[int]], Prompt]:
    """Images padded to the largest, with their sizes; a token ends each row of patches (Mistral 3)."""
    height, width = (8 * max(size[i] for size in sizes) for i in (0, 1))
    pixels = torch.zeros(len(sizes), 3, height, width)
    for image, (h, w) in zip(pixels, sizes, strict=True):
        image[:, : 8 * h, : 8 * w] = _noise(generator, 3, 8 * h, 8 * w)
    tokens = [[*(([IMAGE] * w + [BREAK]) * h)[:-1], END] for h, w in sizes]
    return tokens, {"pixel_values": pixels, "image_sizes": torch.tensor(sizes) * 8}


def _packed(sizes: list[tuple[int, int]], generator: torch.Generator) -> tuple[list[list[int]], Prompt]:
    """Rows of patches padded to the longest, with their shapes (LFM2-VL)."""
    shapes = torch.tensor(sizes) * 2
    lengths = shapes.prod(-1)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    pixels = _noise(generator, *mask.shape, 3 * 4 * 4) * mask[:, :, None]
    tokens = [[BEGIN, *[IMAGE] * (h * w), END] for h, w in sizes]
    return tokens, {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask.long()}


def _placed(sizes: list[tuple[int, int]], generator: torch.Generator) -> tuple[list[list[int]], Prompt]:
    """Rows of patches padded to the longest, with the place of each patch in its image (Gemma 4)."""
    longest = 4 * max(h * w for h, w in sizes)
    pixels = torch.zeros(len(sizes), longest, 3 * 4 * 4)
    places = torch.full((len(sizes), longest, 2), -1)
    for image, place, (h, w) in zip(pixels, places, sizes, strict=True):
        image[: 4 * h * w] = _noise(generator, 4 * h * w, 3 * 4 * 4)
        place[: 4 * h * w] = torch.cartesian_prod(torch.arange(2 * h), torch.arange(2 * w)).flip(-1)
    tokens = [[BEGIN, *[IMAGE] * (h * w), END] for h, w in sizes]
    return tokens, {"pixel_values": pixels, "image_position_ids": places}


@dataclass(frozen=True)
class Kind:
    """text, vision, rest: of the config. per_token: the name of what tells image tokens from text, where the forward
    wants one."""

    text: dict[str, Any]
    vision: dict[str, Any]
    pixels: Pixels
    rest: dict[str, Any] = field(default_factory=lambda: _IDS)
    per_token: str | None = None


def _qwen(text: dict[str, Any], vision: dict[str, Any]) -> Kind:
    return Kind(text, _PATCH | vision, _grid, _QWEN_IDS, "mm_token_type_ids")


_LLAMA = FAMILIES["llama"] | {"model_type": "llama"}
_QWEN3_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}

KINDS: dict[str, Kind] = {
    "qwen2_vl": _qwen(
        {"rope_parameters": rope(mrope_section=[2, 2, 2])}, {"embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2}
    ),
    "qwen2_5_vl": _qwen(
        {"rope_parameters": rope(mrope_section=[2, 2, 2])},
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 48,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    ),
    "qwen3_vl": _qwen(
        {"head_dim": 16, "rope_parameters": rope(mrope_section=[4, 2, 2], mrope_interleaved=True)}, _QWEN3_TOWER
    ),
    "qwen3_vl_moe": _qwen(
        {
            "head_dim": 16,
            "rope_parameters": rope(mrope_section=[4, 2, 2], mrope_interleaved=True),
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        _QWEN3_TOWER,
    ),
    "qwen3_5": _qwen(
        DELTA_RULE
        | {"rope_parameters": rope(partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True)},
        {name: value for name, value in _QWEN3_TOWER.items() if not name.startswith("deepstack")},
    ),
    "qwen3_5_moe": _qwen(
        DELTA_RULE
        | EXPERTS
        | {"rope_parameters": rope(partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True)},
        {name: value for name, value in _QWEN3_TOWER.items() if not name.startswith("deepstack")},
    ),
    "glm4v": Kind(
        {"rope_parameters": rope(partial_rotary_factor=0.5, mrope_section=[1, 1, 1])},
        _PATCH | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 48, "image_size": 16},
        _grid,
        _IDS | {"image_start_token_id": BEGIN, "image_end_token_id": END},
        "mm_token_type_ids",
    ),
    "llava": Kind(
        _LLAMA,
        _TOWER | {"model_type": "clip_vision_model", "image_size": 8, "projection_dim": 32},
        _square(4),
        {"image_token_index": IMAGE, "vision_feature_layer": -2},
    ),
    "mistral3": Kind(
        FAMILIES["mistral"] | {"model_type": "mistral"},
        _TOWER | {"model_type": "pixtral", "head_dim": 8, "image_size": 64},
        _padded,
        {"image_token_index": IMAGE, "spatial_merge_size": 2},
    ),
    "internvl": Kind(
        FAMILIES["qwen2"] | {"model_type": "qwen2"},
        _TOWER | {"model_type": "internvl_vision", "image_size": [8, 8], "patch_size": [4, 4], "use_qk_norm": True},
        _square(1),
    ),
    "idefics3": Kind(_LLAMA, _TOWER | {"image_size": 8}, _square(1, outer=True, mask=True), _IDS | {"scale_factor": 2}),
    "smolvlm": Kind(_LLAMA, _TOWER | {"image_size": 8}, _square(1, outer=True, mask=True), _IDS | {"scale_factor": 2}),
    "llama4": Kind(
        FAMILIES["llama4"] | {"model_type": "llama4_text"},
        _TOWER
        | {
            "image_size": 8,
            "intermediate_size": 128,
            "pixel_shuffle_ratio": 0.5,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        _square(1),
        {"image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END},
    ),
    "gemma4": Kind(
        FAMILIES["gemma4"] | {"model_type": "gemma4_text"},
        _TOWER | {"num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2, "position_embedding_size": 16},
        _placed,
        _IDS | {"boi_token_id": BEGIN, "eoi_token_id": END, "audio_token_id": BREAK},
        "mm_token_type_ids",
    ),
    "lfm2_vl": Kind(
        HYBRIDS["lfm2"] | {"model_type": "lfm2"},
        _TOWER | {"model_type": "siglip2_vision_model", "num_patches": 16},
        _packed,
        {"image_token_id": IMAGE, "downsample_factor": 2, "projector_hidden_size": 32},
    ),
}

# Models whose image tokens see what comes after them.
BIDIRECTIONAL: dict[str, Kind] = {
    "gemma3": Kind(
        FAMILIES["gemma3"] | {"model_type": "gemma3_text"},
        _TOWER | {"model_type": "siglip_vision_model", "image_size": 8, "vision_use_head": False},
        _square(4),
        {
            "image_token_index": IMAGE,
            "boi_token_index": BEGIN,
            "eoi_token_index": END,
            "mm_tokens_per_image": 4,
        },
        "token_type_ids",
    ),
    "paligemma": Kind(
        {"model_type": "gemma", "head_dim": 16},
        _TOWER | {"model_type": "siglip_vision_model", "image_size": 8, "vision_use_head": False},
        _square(4),
        {"image_token_index": IMAGE, "projection_dim": 48},
        "token_type_ids",
    ),
}


def make_model(kind: str, seed: int = 0, *, ids: dict[str, int] | None = None, **overrides: Any) -> PreTrainedModel:
    """In eval mode, on the CPU, in fp32, without EOS.

    ids: other ones for what has to do with images; overrides: of the text config.
    """
    skip_where_broken(f"{kind}+images")
    made = (KINDS | BIDIRECTIONAL)[kind]
    text = COMMON | made.text | overrides
    config = AutoConfig.for_model(kind, text_config=text, vision_config=made.vision, **made.rest | (ids or {}))
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = text["tie_word_embeddings"]
    config.eos_token_id = config.text_config.eos_token_id = text["eos_token_id"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        randomise(model)
    with torch.no_grad():  # greedy decoding is not to say what stands for an image
        model.get_output_embeddings().weight[config.image_token_id :] = 0
    return model


def make_prompt(kind: str, layout: Layout, seed: int = 0) -> Prompt:
    """What a processor returns for one prompt: text and images in the order of ``layout``, drawn from ``seed``.

    The text is that of the layout and its place in it, so prompts of one layout differ in their images alone.
    """
    made = (KINDS | BIDIRECTIONAL)[kind]
    sizes = [part for part in layout if not isinstance(part, int)]
    images, inputs = made.pixels(sizes, torch.Generator().manual_seed(seed)) if sizes else ([], {})
    words = torch.Generator().manual_seed(len(layout))
    ids: list[int] = []
    for part in layout:
        ids += text(part, words) if isinstance(part, int) else images.pop(0)
    inputs["input_ids"] = torch.tensor([ids])
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if made.per_token is not None:
        inputs[made.per_token] = (inputs["input_ids"] == IMAGE).long()
    return inputs


def make_video_prompt(kind: str, frames: int, size: tuple[int, int], seed: int = 0) -> Prompt:
    """Text, a video of so many frames by so many merged patches, and text (Qwen-VL)."""
    h, w = size
    generator = torch.Generator().manual_seed(seed)
    frame = [VIDEO] * (h * w)
    if kind.startswith("qwen2"):
        video = [BEGIN, *frame * frames, END]
    else:  # each frame after its time, in words
        video = [token for number in range(frames) for token in (5, 10 + number, BEGIN, *frame, END)]
    ids = torch.tensor([[*text(5, generator), *video, *text(6, generator)]])
    prompt = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": 2 * (ids == VIDEO).long(),
        "pixel_values_videos": _noise(generator, 4 * frames * h * w, 3 * 2 * 4 * 4),
        "video_grid_thw": torch.tensor([[frames, 2 * h, 2 * w]]),
    }
    return prompt | ({"second_per_grid_ts": torch.tensor([2.0])} if kind == "qwen2_5_vl" else {})


def text(length: int, generator: torch.Generator) -> list[int]:
    return torch.randint(TEXT.start, TEXT.stop, (length,), generator=generator).tolist()


def token_ids(prompt: Mapping[str, torch.Tensor] | list[int]) -> list[int]:
    return list(prompt) if isinstance(prompt, list) else prompt["input_ids"].flatten().tolist()


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: Prompt | list[int], max_new_tokens: int) -> list[int]:
    """As ``oracle.greedy``."""
    inputs = _inputs(model, prompt, [])
    out = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@torch.no_grad()
def logprobs(
    model: PreTrainedModel, prompt: Prompt | list[int], completion: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probability of each completion token under ``logits / temperature``, float64 [len(completion)]."""
    return _logprobs(_logits(model, prompt, completion), completion, temperature)


@torch.no_grad()
def greedy_logprobs(
    model: PreTrainedModel, prompt: Prompt | list[int], completion: list[int], max_new_tokens: int
) -> torch.Tensor:
    """As ``logprobs``, of a completion that has to be what ``generate`` gives: mostly the same forward can tell."""
    found = _logits(model, prompt, completion)
    is_text = all(token in TEXT for token in completion)
    if not (is_text and is_greedy(model, completion, max_new_tokens, lambda: found)):
        assert completion == greedy(model, prompt, max_new_tokens)
    return _logprobs(found, completion, 1.0)


def _logprobs(found: torch.Tensor, completion: list[int], temperature: float) -> torch.Tensor:
    scaled = (found.double() / temperature).log_softmax(-1)
    return scaled.gather(-1, torch.tensor(completion)[:, None])[:, 0]


def _logits(model: PreTrainedModel, prompt: Prompt | list[int], completion: list[int]) -> torch.Tensor:
    out = model(**_inputs(model, prompt, completion), use_cache=False).logits[0]
    return out[len(token_ids(prompt)) - 1 : -1]


@torch.no_grad()
def logprobs_within(model: PreTrainedModel, prompt: Prompt | list[int]) -> torch.Tensor:
    """Log-probability of each of the prompt's tokens from the second on, float64 [T - 1]."""
    inputs = _inputs(model, prompt, [])
    found = model(**inputs, use_cache=False).logits[0, :-1].double().log_softmax(-1)
    return found.gather(-1, inputs["input_ids"][0, 1:, None])[:, 0]


@torch.no_grad()
def logprobs_by_cache(
    model: PreTrainedModel, prompt: Prompt, completion: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """As ``logprobs``, with the images in a forward of their own, so that the completion may hold any token."""
    config = GenerationConfig(max_new_tokens=len(completion), do_sample=True, return_dict_in_generate=True)
    forced = iter(completion)

    def force(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        seen.append((logits[0].double() / temperature).log_softmax(-1))
        return torch.full_like(logits, -torch.inf).index_fill_(1, torch.tensor([next(forced)]), 0)

    seen: list[torch.Tensor] = []
    out = model.generate(**_inputs(model, prompt, []), generation_config=config, logits_processor=[force])
    assert out.sequences[0, -len(completion) :].tolist() == completion
    return torch.stack(seen).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def extended(prompt: Prompt | list[int], completion: list[int]) -> Any:
    """A prompt that goes on with a completion, as a sequence to score."""
    if isinstance(prompt, list):
        return prompt + completion
    return prompt | _with(prompt, completion)


def _with(prompt: Prompt, completion: list[int]) -> Prompt:
    """What has an entry a token."""
    ids = torch.tensor([token_ids(prompt) + completion])
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in prompt:
            found[name] = torch.nn.functional.pad(prompt[name], (0, len(completion)))
    return found


def _inputs(model: PreTrainedModel, prompt: Prompt | list[int], completion: list[int]) -> Prompt:
    """Of the forward on prompt and completion, which is text."""
    whole = {"input_ids": torch.tensor([prompt])} if isinstance(prompt, list) else prompt
    whole = whole | _with(whole, completion)
    return {name: v.to(model.dtype) if v.is_floating_point() else v for name, v in whole.items()}
