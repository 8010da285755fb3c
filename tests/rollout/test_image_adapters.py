"""Adapters over what images go through, against PEFT's own forward."""

from __future__ import annotations

import signal
from itertools import count
from typing import Any

import pytest
import torch
import vision
from torch.utils.hooks import RemovableHandle
from vision import IMAGE, VIDEO, make_model, make_prompt

pytest.importorskip("peft", reason="PEFT is not installed")

from adapted import running, shake
from peft import LoraConfig, get_peft_model

from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams, UnsupportedModelError

CONFIG = EngineConfig(kv_cache_memory="4MiB", block_size=4, max_model_len=128, max_num_seqs=8)
GREEDY = SamplingParams(temperature=0, max_tokens=8, suppress_token_ids=[IMAGE, VIDEO])
LAYOUTS = [(5, (2, 3), 4, (1, 2), 6), ((2, 2), 7)]
OF_IMAGES = r".*(visual.blocks|visual.merger|vision_tower|multi_modal_projector).*(qkv|proj|fc1|linear_1|mlp.0)"


def adapted(kind: str, **options: Any) -> Any:
    model = get_peft_model(make_model(kind), LoraConfig(**{"r": 4} | options)).eval()
    shake(model)
    return model


def check(engine: RolloutEngine, model: Any, kind: str) -> None:
    """The adapter and the base, side by side on the same images."""
    prompts = [prompt for layout in LAYOUTS for prompt in [make_prompt(kind, layout)] * 2]  # one object, for both
    names = ["default", None] * len(LAYOUTS)
    said = engine.generate_batch(prompts, GREEDY, adapter=names)
    for prompt, name, output in zip(prompts, names, said, strict=True):
        (c,) = output.completions
        with running(model, name):
            expected = vision.logprobs(model, prompt, c.token_ids)
        torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)
        with running(model, None if name else "default"):
            other = vision.logprobs(model, prompt, c.token_ids)
        assert (expected - other).abs().max() > 1e-2


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": OF_IMAGES},
        {"target_modules": OF_IMAGES, "use_dora": True, "use_rslora": True},
        {"target_modules": OF_IMAGES, "lora_bias": True},
        {"target_modules": OF_IMAGES, "bias": "lora_only"},
        {"target_modules": ["q_proj"], "modules_to_save": ["merger", "multi_modal_projector"]},
    ],
    ids=["lora", "dora", "bias of b", "biases", "saved"],
)
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava"])
def test_an_adapter_over_the_tower_alone(kind: str, options: dict[str, Any]) -> None:
    model = adapted(kind, **options)
    with RolloutEngine(model, config=CONFIG) as engine:
        check(engine, model, kind)
        shake(model, seed=5)
        engine.update_weights()
        check(engine, model, kind)


@pytest.mark.parametrize(("owner", "name"), [(torch.nn.Module, "register_forward_hook"), (RemovableHandle, "remove")])
def test_after_an_interrupt_nothing_of_it_is_left_in_the_tower(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, own, calls = adapted("llava", target_modules=OF_IMAGES), getattr(owner, name), count()

    def interrupted(*args: Any) -> Any:
        if next(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return own(*args)

    with RolloutEngine(model, config=CONFIG) as engine:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupted)
            engine.generate_batch([make_prompt("llava", LAYOUTS[0])], GREEDY)
        check(engine, model, "llava")


def test_it_is_read_once_for_all_images(monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.rollout.adapters import Adapters

    read = []
    own = Adapters.over_images
    monkeypatch.setattr(
        Adapters, "over_images", lambda self, adapter: (read.append(adapter.name), own(self, adapter))[1]
    )
    model = adapted("qwen2_5_vl", target_modules=OF_IMAGES)
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.generate_batch([make_prompt("qwen2_5_vl", LAYOUTS[0], seed) for seed in range(3)], GREEDY)
    assert read[0] == "default" and len(read) <= 2  # when they are queued, and never again


def test_images_read_by_an_adapter_in_another_dtype_are_read_again() -> None:
    """As they are once one in fp32 is loaded beside it, also for what was asked for before."""
    model, wide = (adapted("llava", target_modules=OF_IMAGES) for _ in range(2))
    prompt = make_prompt("llava", LAYOUTS[0])
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.bfloat16()
    with RolloutEngine(model, config=CONFIG) as engine, RolloutEngine(model, config=CONFIG) as both:
        both.load_adapter("wide", wide)
        alone, beside = (each.generate_batch([prompt], GREEDY)[0] for each in (engine, both))
        handle = engine.submit(prompt, GREEDY)  # the features are those of the call before
        engine.load_adapter("wide", wide)
        late = handle.result()
        assert late.cached_tokens == 0
        first, second, third = (torch.tensor(o.completions[0].logprobs) for o in (alone, beside, late))
        torch.testing.assert_close(third, second, atol=1e-5, rtol=0)
        assert (first - second).abs().max() > 1e-3


def test_a_tower_in_4_bits(tmp_path: Any) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

    make_model("llava").save_pretrained(tmp_path)
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForImageTextToText.from_pretrained(tmp_path, quantization_config=quantised, dtype=torch.float32)
    for module in base.modules():  # or, in evaluation on some CPUs, its forward would go over to bf16
        module.support_avx512bf16_for_cpu = False
    model = get_peft_model(base.eval(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).eval()
    assert any("vision" in name for name, _ in model.named_parameters() if "lora_" in name)
    shake(model)
    with RolloutEngine(model, config=CONFIG) as engine:
        check(engine, model, "llava")


def test_what_cannot_have_one_is_named() -> None:
    model = adapted("llava", target_modules=["position_embedding", "q_proj"])
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.generate_batch([[5, 6]], GREEDY)
        message = r"^prompt 1: adapter 'default' changes .*position_embedding, which only images go through"
        with pytest.raises(UnsupportedModelError, match=message):
            engine.generate_batch([[5, 6], make_prompt("llava", LAYOUTS[1])], GREEDY)
        engine.generate_batch([make_prompt("llava", LAYOUTS[1])], GREEDY, adapter=None)
