"""Text through models that take images too: their text part runs, and what is beside it is left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from families import make_model, randomise
from family_fields import FAMILIES
from hybrid_fields import HYBRIDS
from indexed_fields import INDEXED
from trl_setup import EOS, LOGPROB_TOLERANCE, PROMPTS, MakeTrainer, make_tokenizer, trainers

from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

IMAGE_FAMILIES = [family for family in FAMILIES | INDEXED | HYBRIDS if family.endswith("+images")]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
CONFIG = EngineConfig(kv_cache_memory="4MiB", block_size=4, max_model_len=64)
IDS = [[5, 6, 7, 8, 9, 4, 3], [11, 3], list(range(20, 35))]


def check(engine: RolloutEngine, model: Any) -> None:
    for output in engine.generate_batch(IDS, GREEDY):
        (completion,) = output.completions
        expected = oracle.logprobs(model, output.prompt_token_ids, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4)


def vision(model: Any) -> dict[str, torch.Tensor]:
    text = {id(p) for p in [*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()]}
    return {name: p for name, p in model.named_parameters() if id(p) not in text}


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_the_rest_of_the_model_is_neither_moved_nor_run(family: str) -> None:
    model = make_model(family)
    places = {name: (p.data_ptr(), p._version) for name, p in vision(model).items()}
    assert places
    for parameter in vision(model).values():
        parameter.data.fill_(torch.nan)
    with RolloutEngine(model, config=CONFIG) as engine:
        check(engine, model)
        report = engine.verify_weights()
        assert not report.missing and not report.extra and places.keys() <= dict(model.named_parameters()).keys()
    assert places == {name: (p.data_ptr(), p._version) for name, p in vision(model).items()}


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_in_another_dtype(family: str) -> None:
    model = make_model(family).double()
    model.set_experts_implementation("eager")  # others have no products in fp64
    with RolloutEngine(model, config=EngineConfig(dtype="float32", kv_cache_memory="4MiB", max_model_len=64)) as engine:
        check(engine, model)
        with torch.no_grad():
            next(model.get_decoder().parameters()).mul_(1.2)
            model.get_output_embeddings().weight.mul_(1.1)
        engine.update_weights()
        check(engine, model)
        assert engine.verify_weights().ok


@pytest.mark.parametrize("family", ["gemma3+images", "mistral+images", "qwen3+images", "qwen3_5+images"])
def test_an_adapter_over_all_linear_layers(family: str) -> None:
    """Those of the vision tower among them, of which some are of kinds that take none in the engine."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model(family), peft.LoraConfig(r=4, target_modules="all-linear")).eval()
    assert any("vision" in name or "visual" in name for name, _ in model.named_parameters() if "lora_" in name)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    with RolloutEngine(model, config=CONFIG) as engine:
        check(engine, model)
        shell = engine._binding.shell
        beside = [m for path in shell.beside_text for m in shell.module.get_submodule(path).modules()]
        assert beside and not any(m._forward_hooks for m in beside), "modules that do not run were given adapters"
        assert not shell.lora.has_hooks or family in HYBRIDS


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_from_a_folder(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path)
    with RolloutEngine.from_pretrained(tmp_path, config=CONFIG) as engine:
        assert type(engine._binding.source.module) is type(model)
        check(engine, model)
        engine.update_weights(tmp_path)
        check(engine, model)


def make_processor() -> Any:
    from transformers import CLIPImageProcessor, LlavaProcessor

    return LlavaProcessor(image_processor=CLIPImageProcessor(), tokenizer=make_tokenizer(), image_token="<end>")


def test_a_processor_brings_its_tokenizer() -> None:
    model = make_model("qwen3+images")
    with RolloutEngine(model, config=CONFIG, tokenizer=make_processor()) as engine:
        (output,) = engine.generate_batch(["abc"], GREEDY)
        assert output.prompt_token_ids == make_tokenizer()("abc")["input_ids"]
        assert isinstance(output.completions[0].text, str)


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    yield from trainers(str(tmp_path))


@pytest.mark.parametrize("kind", ["grpo", "rloo", "online_dpo"])
def test_training_on_text_with_a_processor(make_trainer: MakeTrainer, kind: str) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    from stoker.integrations.trl import attach

    model = make_model("qwen3+images", vocab_size=11, pad_token_id=0, eos_token_id=EOS)
    model.generation_config.eos_token_id = EOS
    trainer = make_trainer(kind, model=model, more={"processing_class": make_processor()})
    engine = attach(trainer)
    before = {name: p.detach().clone() for name, p in model.get_decoder().named_parameters()}
    trainer.train()
    assert any(not torch.equal(before[name], p) for name, p in model.get_decoder().named_parameters())
    for output in engine.generate_batch(PROMPTS, GREEDY):
        (completion,) = output.completions
        expected = oracle.logprobs(model.eval(), output.prompt_token_ids, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=LOGPROB_TOLERANCE)


def test_sound_in_a_prompt() -> None:
    """Goes the way of images: the model's own forward says what stands at its placeholders."""
    from transformers import VoxtralConfig, VoxtralForConditionalGeneration

    audio, sound = {"num_mel_bins": 8, "max_source_positions": 32, "num_hidden_layers": 1}, 100
    audio |= {"hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 4}
    text = FAMILIES["llama"] | {"model_type": "llama", "vocab_size": 128, "hidden_size": 48, "intermediate_size": 64}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = VoxtralConfig(text_config=text, audio_config=audio, audio_token_id=sound)
    torch.manual_seed(0)
    model = VoxtralForConditionalGeneration._from_config(config, dtype=torch.float32).eval()
    randomise(model)
    prompt = {"input_ids": torch.tensor([[5, 6, *[sound] * 8, 7, 8]]), "input_features": torch.randn(1, 8, 64)}
    params = SamplingParams(temperature=0, max_tokens=8, suppress_token_ids=[sound], ignore_eos=True)
    with RolloutEngine(model, config=CONFIG) as engine:
        (c,) = engine.generate_batch([[3, 4], prompt], params)[1].completions
    said = torch.tensor([c.token_ids])
    with torch.no_grad():
        whole = torch.cat([prompt["input_ids"], said], 1)
        expected, deaf = (
            model(input_ids=whole, input_features=heard)
            .logits[0, 11:-1]
            .double()
            .log_softmax(-1)
            .gather(1, said.T)[:, 0]
            for heard in (prompt["input_features"], 0 * prompt["input_features"])
        )
    torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)
    assert (expected - deaf).abs().max() > 1e-2
