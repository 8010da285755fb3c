"""TRL's trainers on prompts with images: the engine sees what the trainer's own forward sees."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vision
from trl_setup import LOGPROB_TOLERANCE, MakeTrainer, logged, make_tokenizer, recorded, refused, replay, trainers

from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams, UnsupportedModelError

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("PIL", reason="Pillow is not installed")

from PIL import Image
from processors import FIRST, WORDS, make_model, make_processor, picture

from stoker.integrations.trl import attach, detach
from stoker.integrations.trl_images import with_images

KINDS = ["qwen2_5_vl", "qwen3_vl", "llava", "gemma3"]
CONFIG = EngineConfig(kv_cache_memory="4MiB", block_size=4)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


# Text, and images before it: one, two, and of several shapes.
ROWS = [("abc", [(16, 24)]), ("hgfe", [(8, 8), (24, 16)]), ("de", [(8, 16)]), ("abc", [(16, 24)])]


def make_dataset() -> Any:
    from datasets import Dataset

    images = [[picture(10 * row + i, *size) for i, size in enumerate(sizes)] for row, (_, sizes) in enumerate(ROWS)]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text, _ in ROWS], "images": images})


def count_a(completions: list[Any], **_: Any) -> list[float]:
    return [float(completion[0]["content"].count("a")) for completion in completions]


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    """Trainers of a kind on a model and processor ``of`` another."""

    def on_images(make: MakeTrainer, kind: str = "grpo", of: str = "qwen2_5_vl", **settings: Any) -> Any:
        data = make_dataset()
        more = {
            "processing_class": make_processor(of),
            "train_dataset": data,
            "eval_dataset": data.select([0, 1]),
            **({} if kind in ("distillation", "gold") else {"reward_funcs": count_a}),
        } | settings.pop("more", {})
        return make(kind, model=make_model(of), more=more, **settings)

    for make in trainers(str(tmp_path)):
        yield partial(on_images, make)


def prompts_of(processor: Any) -> tuple[list[list[int]], list[list[Any]], list[dict[str, torch.Tensor]]]:
    """Of each row its ids, its images and all that the processor makes of both, as the trainer's forward gets it."""
    from trl.data_utils import apply_chat_template, prepare_multimodal_messages

    ids, images, whole = [], [], []
    for row in make_dataset():
        messages = prepare_multimodal_messages(row["prompt"], images=row["images"])
        text = apply_chat_template({"prompt": messages}, processor)["prompt"]
        whole.append(processor(images=[row["images"]], text=[text], return_tensors="pt"))
        ids.append(whole[-1]["input_ids"][0].tolist())
        images.append(row["images"])
    return ids, images, whole


# -- what the engine is given --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava", "gemma3"])
def test_prompts_are_what_the_trainers_forward_gets(kind: str) -> None:
    processor = make_processor(kind)
    ids, images, whole = prompts_of(processor)
    found = with_images(processor, [*ids, [3, 4]], [*images, None])
    assert found.pop() == [3, 4]
    for one, expected in zip(found, whole, strict=True):
        assert one.keys() == expected.keys() - {"attention_mask"} and "pixel_values" in one
        for name, value in one.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
            assert value.dtype == expected[name].dtype


def test_images_of_a_group_are_processed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = make_processor()
    calls: list[int] = []
    process = type(processor.image_processor).__call__
    monkeypatch.setattr(
        type(processor.image_processor), "__call__", lambda self, *a, **k: (calls.append(1), process(self, *a, **k))[1]
    )
    ids, images, _ = prompts_of(processor)
    calls.clear()
    copies = [[image.copy() for image in images[0]] for _ in range(3)]
    other = [[Image.eval(image, lambda value: value ^ 1) for image in images[0]]]
    found = with_images(processor, [ids[0]] * 4 + [ids[1]], copies + other + [images[1]])
    assert len(calls) == 3 and len(found) == 5
    assert found[0] is found[2] is not found[3]
    one, both = with_images(
        processor, [ids[0]] * 2, [copies[0], copies[0] + other[0]]
    )  # alike as far as the first goes
    assert len(both["pixel_values"]) == 2 * len(one["pixel_values"])
    arrays = [[np.asarray(image) for image in given] for given in (copies[0], copies[1], other[0])]  # nobody compares
    found = with_images(processor, [ids[0]] * 3, arrays)
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())
    assert not torch.equal(found[0]["pixel_values"], found[2]["pixel_values"])
    first, second = with_images(processor, [ids[0], [*ids[0], 3]], copies[:2])
    assert first["pixel_values"] is second["pixel_values"] and second["input_ids"].shape[1] == len(ids[0]) + 1


def test_without_a_processor(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UnsupportedModelError, match="the prompts carry images.*processing_class"):
        with_images(make_tokenizer(), [[3]], [[picture(0, 8, 8)]])


# -- training ------------------------------------------------------------------------------------------------------------


def policy(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def check_sampling(trainer: Any, steps: int) -> None:
    differences = logged(trainer, "sampling/sampling_logp_difference/max")
    assert len(differences) == steps and max(differences) < LOGPROB_TOLERANCE
    for which in ("min", "mean", "max"):
        ratios = logged(trainer, f"sampling/importance_sampling_ratio/{which}")
        assert len(ratios) == steps and all(abs(ratio - 1) < 8 * LOGPROB_TOLERANCE for ratio in ratios)


def check_greedy(trainer: Any, engine: RolloutEngine) -> None:
    """The engine's log-probabilities are those of the trainer's model as it is now."""
    model = trainer.model.eval()
    ids, images, whole = prompts_of(trainer.processing_class)
    batch = engine.generate_batch(with_images(trainer.processing_class, ids, images), GREEDY)
    for inputs, output in zip(whole, batch, strict=True):
        (completion,) = output.completions
        expected = vision.logprobs(model, dict(inputs), completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=LOGPROB_TOLERANCE)


# Each trainer on each kind of model, in one of the two tests that follow.
ONE_HALF = [("grpo", "qwen2_5_vl"), ("grpo", "gemma3"), ("rloo", "qwen3_vl"), ("rloo", "llava")]
OTHER_HALF = [("rloo", "qwen2_5_vl"), ("rloo", "gemma3"), ("grpo", "qwen3_vl"), ("grpo", "llava")]


@pytest.mark.parametrize(("kind", "of"), ONE_HALF)
def test_trains_and_evaluates_on_the_engine(make_trainer: MakeTrainer, kind: str, of: str) -> None:
    trainer = make_trainer(kind, of, eval_strategy="steps", eval_steps=2)
    engine = attach(trainer, config=CONFIG)
    before = policy(trainer)
    trainer.train()
    after = policy(trainer)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("visual" in name or "vision" in name for name in moved), "the vision tower is trained too"
    assert engine.weight_version >= 3 and logged(trainer, "eval_reward")
    if kind == "grpo":
        check_sampling(trainer, 3)
        assert max(logged(trainer, "eval_sampling/sampling_logp_difference/max")) < LOGPROB_TOLERANCE
    check_greedy(trainer, engine)


@pytest.mark.parametrize(("kind", "of"), OTHER_HALF)
def test_of_the_same_samples_the_trainer_makes_the_same(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, kind: str, of: str
) -> None:
    """A trainer whose ``generate`` gives what another's engine has sampled: rewards, losses and weights are the other's."""
    settings = {"optim": "sgd", "learning_rate": 5e-3, "max_grad_norm": 0.0, "temperature": 0.7, "max_steps": 3}
    if of == "gemma3":  # whose gradients are so large that the weights would be too
        settings["learning_rate"] = 3e-4
    on_engine = make_trainer(kind, of, **settings)
    engine = attach(on_engine, config=CONFIG)
    rollouts = recorded(engine, monkeypatch)
    before = policy(on_engine)
    on_engine.train()
    detach(on_engine)

    plain = make_trainer(kind, of, **settings)
    replay(plain, rollouts, monkeypatch)
    for key, tolerance in (("reward", 0), ("reward_std", 0), ("loss", 1e-4), ("grad_norm", 1e-2)):
        found, expected = logged(on_engine, key), logged(plain, key)
        assert len(expected) == 3 and found == pytest.approx(expected, abs=tolerance, rel=1e-4), key
    after = policy(plain)
    for name, tensor in policy(on_engine).items():
        torch.testing.assert_close(tensor, after[name], rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert max((before[name] - tensor).abs().max() for name, tensor in after.items()) > 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        {"num_iterations": 2},
        {"steps_per_generation": 2, "vllm_importance_sampling_mode": "token_truncate"},
        {"vllm_enable_sleep_mode": True},
        {"gradient_checkpointing": False},
    ],
    ids=lambda s: "-".join(s),
)
def test_settings(make_trainer: MakeTrainer, settings: dict[str, Any]) -> None:
    trainer = make_trainer(max_steps=4, **settings)
    engine = attach(trainer, config=CONFIG)
    trainer.train()
    assert engine.is_sleeping == bool(settings.get("vllm_enable_sleep_mode"))
    check_sampling(trainer, len(logged(trainer, "sampling/sampling_logp_difference/max")) or 1)
    if engine.is_sleeping:
        engine.wake_up()
    check_greedy(trainer, engine)


@pytest.mark.parametrize(
    ("of", "targets"),
    [("llava", r".*language_model.*\.(q_proj|v_proj|down_proj)"), *((kind, "all-linear") for kind in KINDS)],
)
def test_training_an_adapter(make_trainer: MakeTrainer, of: str, targets: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets)
    trainer = make_trainer(of=of, more={"peft_config": config}, learning_rate=0.02)
    engine = attach(trainer, config=CONFIG)
    before = policy(trainer)
    assert before and all("lora_" in name for name in before)
    trainer.train()
    check_sampling(trainer, 3)
    after = policy(trainer)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    check_greedy(trainer, engine)


def test_distillation(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("distillation", more={"teacher_model": make_model(seed=1)})
    engine = attach(trainer, config=CONFIG)
    before = policy(trainer)
    trainer.train()
    after = policy(trainer)
    assert engine.weight_version >= 3 and any(not torch.equal(before[name], after[name]) for name in before)
    check_greedy(trainer, engine)


@pytest.mark.parametrize("of", ["qwen2_5_vl", "llava", "gemma3"])
def test_online_dpo_on_prompts_of_text(make_trainer: MakeTrainer, of: str) -> None:
    """Their template is the processor's, whose tokenizer has none."""
    text = make_dataset().remove_columns("images")
    more = {"ref_model": make_model(of), "train_dataset": text, "eval_dataset": None}
    trainer = make_trainer(
        "online_dpo", of, more=more, generation_kwargs={"do_sample": False}, per_device_train_batch_size=2
    )
    prompts = text["prompt"][:]
    plain = trainer._generate(trainer.model, prompts)
    attach(trainer, config=CONFIG)
    sampled = trainer._generate(trainer.model, prompts)
    assert all(torch.equal(a, b) for a, b in zip(plain[:4], sampled[:4], strict=True))
    trainer.train()


def test_what_a_model_of_images_has_nobody_sample(make_trainer: MakeTrainer) -> None:
    """Of a trainer that says nothing of it, whose samples are without the engine what the model's config leaves."""
    text = make_dataset().remove_columns("images")
    trainer = make_trainer(
        "online_dpo",
        more={"ref_model": make_model(), "train_dataset": text, "eval_dataset": None},
        generation_kwargs={"do_sample": False},
    )
    prompts = text["prompt"][:]
    whole = trainer._generate(trainer.model, prompts)[2]
    trainer.model.generation_config.suppress_tokens = whole[:, 0].unique().tolist()
    plain = trainer._generate(trainer.model, prompts)
    assert not torch.equal(plain[2], whole)
    attach(trainer, config=CONFIG)
    sampled = trainer._generate(trainer.model, prompts)
    assert all(torch.equal(a, b) for a, b in zip(plain[:4], sampled[:4], strict=True))


def test_gold_on_images_is_refused(make_trainer: MakeTrainer) -> None:
    """From a backend it takes text, and trains on a turn of the template's, which ends where nobody's completion did."""
    data = make_dataset().add_column("completion", [[{"role": "assistant", "content": "abc"}]] * len(ROWS))
    more = {"teacher_model": make_model(seed=1), "train_dataset": data, "eval_dataset": data}
    trainer = make_trainer("gold", more=more, max_length=None)
    refused(trainer, UnsupportedModelError, "^the prompts carry images.*a GOLDTrainer.*use DistillationTrainer")


def test_no_placeholder_is_sampled(make_trainer: MakeTrainer) -> None:
    """As without an engine: in the trainer's forward one more would stand for an image that is not there."""
    trainer = make_trainer(temperature=20.0, max_completion_length=48, max_steps=1)
    attach(trainer, config=CONFIG)
    ids, images, _ = prompts_of(trainer.processing_class)
    trainer.vllm_generation.sync_weights()
    _, completions, _, _ = trainer.vllm_generation.generate(ids * 4, images * 4, 1)
    said = {token for completion in completions for token in completion}
    assert FIRST not in said and {FIRST + 1, FIRST + 3, *range(3, FIRST)} <= said
    trainer.train()


def test_prompts_with_and_without_images(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    attach(trainer, config=CONFIG)
    ids, images, whole = prompts_of(trainer.processing_class)
    trainer.vllm_generation.sync_weights()
    given = [ids[0], ids[0], [3, 4, 5], ids[1]]
    found, completions, logprobs, _ = trainer.vllm_generation.generate(
        given, [images[0], images[0], None, images[1]], 1
    )
    assert found == given
    model = trainer.model.eval()
    prompts = [dict(whole[0]), dict(whole[0]), [3, 4, 5], dict(whole[1])]
    for prompt, completion, rows in zip(prompts, completions, logprobs, strict=True):
        expected = vision.logprobs(model, prompt, completion)
        torch.testing.assert_close(
            torch.tensor([row[0] for row in rows]).double(), expected, rtol=0, atol=LOGPROB_TOLERANCE
        )


def test_a_turn_after_a_tool_has_shown_an_image(make_trainer: MakeTrainer) -> None:
    """Prompt, completion and the tool's answer with one image more: the trainer hands over all of them together."""
    trainer = make_trainer()
    engine = attach(trainer, config=CONFIG)
    processor = trainer.processing_class
    ids, images, whole = prompts_of(processor)
    trainer.vllm_generation.sync_weights()
    _, said, _, _ = trainer.vllm_generation.generate(ids[:2], images[:2], 1)
    shown = picture(99, 8, 24)
    answer = processor(images=[[shown]], text=[f"{WORDS[1]}{WORDS[0]}{WORDS[2]}bad"], return_tensors="pt")
    turns = [[*ids[0], *said[0], *answer["input_ids"][0].tolist()], [*ids[1], *said[1], 3, 4]]
    found, completions, logprobs, _ = trainer.vllm_generation.generate(turns, [[*images[0], shown], images[1]], 1)
    assert found == turns
    expected = []
    for turn, first, more in zip(turns, whole[:2], ([answer], []), strict=True):
        inputs = {
            name: torch.cat([first[name], *(m[name] for m in more)]) for name in ("pixel_values", "image_grid_thw")
        }
        tokens = torch.tensor([turn])
        expected.append(inputs | {"input_ids": tokens, "mm_token_type_ids": (tokens == FIRST).long()})
    for prompt, completion, rows in zip(expected, completions, logprobs, strict=True):
        wanted = vision.logprobs(trainer.model.eval(), prompt, completion)
        torch.testing.assert_close(
            torch.tensor([row[0] for row in rows]).double(), wanted, rtol=0, atol=LOGPROB_TOLERANCE
        )
    assert engine.stats().prefix_cache_hit_tokens > 0, "the second has no image more"
