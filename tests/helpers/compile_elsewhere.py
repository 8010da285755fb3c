"""Compiles, for GPUs other than an H200 and without one, what depends on the device most. Prints what each kernel takes."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent))
from compile_attention import GPUS, Recorder, as_on, build, launches
from compile_attention import launch as attend
from compile_layers import launch_ahead

from stoker.kernels import grouping, launch
from stoker.kernels.attention import paged as attention
from stoker.kernels.attention import plan as attention_plan
from stoker.kernels.experts import moe
from stoker.kernels.linear import cuts as linear_cuts
from stoker.kernels.linear import linear
from stoker.kernels.linear import streamed as linear_streamed
from stoker.kernels.lora import lora
from stoker.kernels.lora import tiles as lora_tiles
from stoker.kernels.reference.fp8 import FP8
from stoker.kernels.reference.moe import Gate
from stoker.kernels.reference.norm_rotary import Norm


def multiply(tokens: int, narrow: bool = False) -> None:
    """By a streamed weight of Llama 3.2 1B, in 16 bits or, if narrow, in fp8: the first cut."""
    weight = 2048, 8192
    cut = linear_cuts.cuts_to_try(tokens, weight, 2, False, launch.multiprocessors(torch.device("cpu")))[0]
    given = {"norm": None, "gated": None, "residual": None, "scale": 1.0, "cut": cut}
    make = partial(torch.empty, dtype=torch.bfloat16)
    scales = torch.empty(weight[0]) if narrow else None
    linear_streamed.streamed(
        make(tokens, weight[1]),
        make(*weight).to(FP8) if narrow else make(*weight),
        None,
        **given,
        row_scales=scales,
        arrived=torch.zeros(256, dtype=torch.int32),
    )


def multiply_few() -> None:
    """Four rows in fp32, after a norm."""
    norm = Norm(torch.empty(2304), 1e-6, offset=True)
    linear.linear(torch.empty(4, 2304), torch.empty(18432, 2304), norm=norm, gated="gelu_tanh")


def adapt() -> None:
    """As PEFT makes them, in fp32, ahead of a product in 16 bits."""
    cut = linear_cuts.Cut(64, 1, 1)
    launch_ahead(16, 2048, depth=2048, cuts=[cut], dtype=torch.float32, rank=64)


def mix(tokens: int) -> None:
    """Experts of Qwen3-30B-A3B."""
    make = partial(torch.empty, dtype=torch.bfloat16)
    weights = make(128, 1536, 2048), make(128, 2048, 768)
    ids = torch.zeros(tokens, 8, dtype=torch.long)
    moe.experts(make(tokens, 2048), ids, make(tokens, 8), *weights, gate=Gate())


if __name__ == "__main__":
    for module in (attention, attention_plan, grouping, linear, linear_streamed, lora, lora_tiles, moe):
        for name in [n for n in vars(module) if n.endswith("_kernel")]:
            setattr(module, name, Recorder(getattr(module, name)))
    gemma3, gemma4 = ((8, 4, 256, 256), (8, 1, 512, 512))  # the latter's layers that see everything
    forms = {
        80: [partial(attend, *gemma4, False, span=None), partial(multiply, 40)],
        86: [partial(mix, 512), multiply_few],
        89: [
            partial(attend, *gemma3, False),
            partial(attend, *gemma4, False, span=None),
            partial(multiply, 16, narrow=True),
            adapt,
        ],
        100: [partial(attend, 32, 8, 128, 128, False, span=None), partial(multiply, 16)],
        120: [partial(multiply, 40), partial(mix, 64)],
    }
    made = []
    for architecture, calls in forms.items():
        as_on(architecture)
        launches.clear()
        for call in calls:
            call()
        large = {
            "decode_kernel",
            "prefill_kernel",
            "_streamed_kernel",
            "_skinny_kernel",
            "_grouped_kernel",
            "shrink_kernel",
        }
        for kernel, grid, given in launches:
            if kernel.__name__ in large and not given.get("SPANS"):
                processors, shared = GPUS[architecture]
                limit = {"architecture": architecture, "processors": processors, "room": shared * 1024}
                made.append(build(kernel, grid, given, architecture) | limit)
    print(json.dumps(made))
