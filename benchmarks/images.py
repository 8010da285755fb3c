"""Rollouts with an image in each prompt against ``model.generate``: ``python -m stoker.benchmarks.images``.

GRPO groups, from what a processor returns to token ids. Both run the same vision tower on the same ``pixel_values``, the
engine once for a group. The engine's time is split into reading prompts, encoding images, prefill and decode, and scoring
what was sampled is timed too. Writes one JSON file, prints a table and, last, one line of JSON. On a CPU only ratios of
one run mean anything: run it on a machine that does nothing else.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from stoker.benchmarks import ceilings, command, gate, overhead, report
from stoker.benchmarks.comparison import timed
from stoker.benchmarks.peers import Generate, Peer, Stoker
from stoker.benchmarks.workloads import ModelSpec, Workload, dtype_of
from stoker.engine.images import reader as image_reader
from stoker.rollout import RolloutBatch

Prompt = dict[str, torch.Tensor]  # what a processor returns for it


def _spec(name: str, vocab_size: int, text: dict[str, Any], vision: dict[str, Any]) -> ModelSpec:
    """Qwen3-VL: 2 x 2 patches of 16 x 16 pixels are a token. The last ids of the vocabulary are those of images."""
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = Qwen3VLConfig(
        text_config=text | {"vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": None},
        vision_config=vision | {"out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=True,
        **{token: vocab_size - 4 + number for number, token in enumerate(ids)},
    )
    return ModelSpec(name=name, model_class=Qwen3VLForConditionalGeneration, config=config)


def _rope(*section: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 5e6, "mrope_section": list(section), "mrope_interleaved": True}


TOY = _spec(
    "qwen3-vl-toy",
    100,
    {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
        "rope_parameters": _rope(4, 2, 2),
    },
    {
        "hidden_size": 32,
        "intermediate_size": 64,
        "depth": 4,
        "num_heads": 2,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1, 2, 3],
    },
)
SMALL = _spec(
    "qwen3-vl-40m",
    8192,
    {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_parameters": _rope(12, 10, 10),
    },
    {
        "hidden_size": 192,
        "intermediate_size": 768,
        "depth": 8,
        "num_heads": 4,
        "num_position_embeddings": 576,
        "deepstack_visual_indexes": [2, 4, 6],
    },
)
QWEN3_VL_2B = _spec(
    "qwen3-vl-2b",
    151936,
    {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rope_parameters": _rope(24, 20, 20),
    },
    {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "depth": 24,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
)


@dataclass(frozen=True, kw_only=True)
class ImageWorkload(Workload):
    """``prompt_tokens`` counts the text around an image of ``sides`` tokens a side."""

    sides: tuple[int, int]

    @property
    def max_len(self) -> int:
        return super().max_len + self.sides[1] ** 2 + 2

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"image_sides": list(self.sides)}

    def with_images(self, config: Any, repeat: int) -> list[Prompt]:
        """The prompts of one repeat, one a request; those of the samples of a prompt are one object."""
        rng = random.Random(f"images/{self.seed}")  # sizes stay, in every repeat
        noise = torch.Generator().manual_seed(repeat + 1)
        vision, found = config.vision_config, list[Prompt]()
        values = 3 * vision.temporal_patch_size * vision.patch_size**2
        for text in self.draw(config.image_token_id, repeat)[:: self.samples]:
            height, width = (rng.randint(*self.sides) for _ in range(2))
            image = [config.vision_start_token_id, *[config.image_token_id] * (height * width)]
            half = len(text) // 2
            ids = torch.tensor([[*text[:half], *image, config.vision_end_token_id, *text[half:]]])
            prompt = {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "mm_token_type_ids": (ids == config.image_token_id).long(),
                "pixel_values": torch.randn(4 * height * width, values, generator=noise),
                "image_grid_thw": torch.tensor([[1, 2 * height, 2 * width]]),
            }
            found += [prompt] * self.samples
        return found


def token_ids(prompts: Sequence[Prompt]) -> list[list[int]]:
    return [prompt["input_ids"][0].tolist() for prompt in prompts]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    spec: ModelSpec
    workload: ImageWorkload
    repeats: int


_CPU = ImageWorkload(
    name="images", prompts=8, samples=8, prompt_tokens=(16, 64), sides=(6, 12), median=100, sigma=0.7, cap=256, slots=64
)
_CPU_SHORT = ImageWorkload(
    name="images, shorter", prompts=4, samples=8, prompt_tokens=(16, 64), sides=(6, 12), median=50, sigma=0.7, cap=128, slots=32
)  # fmt: skip
_GPU = ImageWorkload(
    name="images", prompts=16, samples=8, prompt_tokens=(32, 256), sides=(12, 28), median=200, sigma=0.7, cap=512, slots=128
)  # fmt: skip
_QUICK = ImageWorkload(
    name="quick", prompts=4, samples=4, prompt_tokens=(8, 16), sides=(3, 6), median=16, sigma=0.7, cap=32, slots=16
)

SCENARIOS = {
    ("cpu", False): (
        Scenario(spec=TOY, workload=_CPU, repeats=5),
        Scenario(spec=SMALL, workload=_CPU_SHORT, repeats=3),
    ),
    ("cpu", True): (Scenario(spec=TOY, workload=_QUICK, repeats=2),),
    ("cuda", False): (Scenario(spec=QWEN3_VL_2B, workload=_GPU, repeats=5),),
    ("cuda", True): (Scenario(spec=QWEN3_VL_2B, workload=_QUICK, repeats=3),),
}


class GenerateWithImages(Generate):
    """As a trainer calls it: every sample of a prompt brings its image."""

    def inputs(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        made = super().inputs(token_ids(rows))
        width, device = made["input_ids"].shape[1], self.model.device
        types = [prompt["mm_token_type_ids"][0] for prompt in rows]
        made["mm_token_type_ids"] = torch.stack([nn.functional.pad(t, (width - len(t), 0)) for t in types]).to(device)
        return made | {
            name: torch.cat([prompt[name] for prompt in rows]).to(device) for name in ("pixel_values", "image_grid_thw")
        }


@contextmanager
def timed_encoding(device: str) -> Iterator[list[float]]:
    """Seconds of every run of the vision tower within, and of what joins it to the text, until the device is through."""
    seconds: list[float] = []
    original: Any = vars(image_reader)["encode"]

    def encode(*args: Any) -> Any:
        made: list[Any] = []
        seconds.append(ceilings.seconds(lambda: made.append(original(*args)), device))
        return made[0]

    with patch.object(image_reader, "encode", encode):
        yield seconds


def parts(stoker: Stoker, prompts: list[Prompt], lengths: Sequence[int], device: str) -> dict[str, float]:
    """Seconds of the parts of one rollout, of the prompts alone, and of scoring what was sampled."""
    stoker.start()
    with timed_encoding(device) as encoding, overhead.timed_steps(stoker.engine) as times:
        whole = ceilings.timed(lambda: stoker.rollout(prompts, [1] * len(prompts)), device)
    steps = sum(step.total for step in times.steps)
    found = {"read_s": whole - steps - sum(encoding), "encode_s": sum(encoding), "prefill_s": steps}
    stoker.start()
    found["decode_s"] = max(0.0, ceilings.timed(lambda: stoker.rollout(prompts, lengths), device) - whole)
    assert stoker.batch is not None
    with timed_encoding(device) as encoding:
        found["score_s"] = ceilings.timed(partial(stoker.engine.score, stoker.batch), device)
    return found | {"encode_to_score_s": sum(encoding)}


@torch.inference_mode()
def check(model: PreTrainedModel, prompts: Sequence[Prompt], batch: RolloutBatch) -> dict[str, float]:
    """Log-probabilities against the plain forward's, as far as a completion has no token that stands for an image."""
    placeholders, worst = range(model.config.image_token_id, model.config.image_token_id + 4), 0.0
    for prompt, output in zip(prompts, batch, strict=True):
        (completion,) = output.completions
        said = completion.token_ids
        count = next((at for at, token in enumerate(said) if token in placeholders), len(said))
        if not count:
            continue
        inputs = {name: tensor.to(model.device) for name, tensor in prompt.items()}
        more = inputs["input_ids"].new_tensor([said[:count]])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], more], 1)
        inputs["mm_token_type_ids"] = nn.functional.pad(inputs["mm_token_type_ids"], (0, count))
        del inputs["attention_mask"]
        logits = model(**inputs, use_cache=False, logits_to_keep=count + 1).logits[0, :-1].float()
        expected = logits.log_softmax(-1).gather(1, more.T)[:, 0].cpu()
        worst = max(worst, (expected - torch.tensor(completion.logprobs[:count])).abs().max().item())
    return gate.check(worst, gate.limit_of(model.dtype), "the plain forward's")


def best_s(ceiling: ceilings.Ceiling, model: Any, prompts: list[Prompt], lengths: list[int], slots: int) -> float:
    """Seconds that matmuls and bandwidth allow, with the tower's blocks once for each different image."""
    tower = sum(m.weight.numel() for m in model.model.visual.blocks.modules() if isinstance(m, nn.Linear))
    patches = sum(prompt["pixel_values"].shape[0] for prompt in {id(prompt): prompt for prompt in prompts}.values())
    return 2 * tower * patches / ceiling.flops + ceiling.rollout_s(token_ids(prompts), lengths, slots)


def compare(scenario: Scenario, device: str) -> dict[str, Any]:
    spec, work = scenario.spec, scenario.workload
    dtype, lengths, config = dtype_of(device), work.lengths, spec.config
    stoker, generate = Stoker(spec, work, device, dtype), GenerateWithImages(spec, work, device, dtype)
    kv_tokens = work.slots * work.max_len // 2
    ceiling = ceilings.measure(stoker.model, device, rows=(work.slots, 8 * work.slots), kv_tokens=kv_tokens)
    peers: tuple[Peer, ...] = (stoker, generate)
    for peer in peers:
        peer.warm_up(work.with_images(config, -1), lengths)
    assert stoker.batch is not None
    checked = check(stoker.model, work.with_images(config, -1), stoker.batch)
    seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for repeat in range(scenario.repeats):
        prompts = work.with_images(config, repeat)
        for peer in peers:
            seconds[peer.name].append(timed(peer, prompts, lengths, device))
    split = [parts(stoker, work.with_images(config, 1000 + n), lengths, device) for n in range(scenario.repeats)]
    prompts = work.with_images(config, 0)
    ceiling_s = best_s(ceiling, stoker.model, prompts, lengths, work.slots)
    engines = report.compared(seconds, sum(lengths), ceiling_s)
    stoker.close()
    return {
        "model": {"name": spec.name, "dtype": str(dtype).removeprefix("torch."), "parameters": _sizes(stoker.model)},
        "workload": work.describe() | {"longest_prompt": max(map(len, token_ids(prompts)))},
        "gate": checked,
        "ceiling_s": ceiling_s,
        "engines": {peer.name: {"settings": peer.settings, **engines[peer.name]} for peer in peers},
        "parts": {name: statistics.median(one[name] for one in split) for name in split[0]},
    }


def _sizes(model: Any) -> dict[str, int]:
    tower = sum(p.numel() for p in model.model.visual.parameters())
    return {"text": sum(p.numel() for p in model.parameters()) - tower, "vision": tower}


def table(run: dict[str, Any]) -> list[str]:
    work, split = run["workload"], run["parts"]
    lines = [
        f"{run['model']['name']} ({run['model']['dtype']}): {work['prompts']} prompts of an image x {work['samples']} samples, "
        f"{work['completion_tokens']} tokens; within {run['gate']['max_abs_diff']:.1e} of the plain forward",
        *report.comparison(run["engines"]),
    ]
    of_rollout = {name: split[f"{name}_s"] for name in ("read", "encode", "prefill", "decode")}
    whole = sum(of_rollout.values())
    lines.append("  stoker: " + ", ".join(f"{name} {s / whole:.1%}" for name, s in of_rollout.items()))
    lines.append(
        f"  scoring it then takes {split['score_s'] / whole:.1%} of that, of which {split['encode_to_score_s'] / whole:.1%} encode"
    )
    return lines


def headline(run: dict[str, Any]) -> dict[str, float]:
    stoker, generate, split = run["engines"]["stoker"], run["engines"]["generate"], run["parts"]
    return {
        "tokens_per_s": round(stoker["tokens_per_s"]),
        "of_ceiling": round(stoker["of_ceiling"], 3),
        "x_generate": round(generate["times_stoker"], 2),
        "encode_over_decode": round(split["encode_s"] / split["decode_s"], 3),
    }


def main() -> int:
    return command.run("images", __doc__, SCENARIOS, compare, table, headline)


if __name__ == "__main__":
    sys.exit(main())
