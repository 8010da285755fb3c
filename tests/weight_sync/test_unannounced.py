"""Weights that change without a word, where nothing has looked at them since they were last announced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import adapted
import oracle
import pytest
import torch
from families import make_model
from mirrored import step

from stoker.rollout import EngineConfig, RolloutEngine
from stoker.weight_sync.aliased_source import AliasedSource

PROMPTS = adapted.PROMPTS[2:3]
MIRROR = replace(adapted.CONFIG, dtype="float64")  # whose own weights do not change with the adapter's


def check_noticed(engine: RolloutEngine, model: Any, version: int) -> None:
    """No KV of the adapter as it was serves the prompt."""
    output = engine.generate_batch(PROMPTS, adapted.GREEDY)[0]
    (completion,) = output.completions
    assert output.cached_tokens == 0 and set(completion.weight_versions) == {version}
    expected = oracle.logprobs(model, PROMPTS[0], completion.token_ids)
    torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("config", [adapted.CONFIG, MIRROR], ids=["aliased", "mirror"])
def test_after_an_update_with_a_request_under_way(config: EngineConfig) -> None:
    model = adapted.peft_model()
    with RolloutEngine(model, config=config) as engine:
        handle = engine.submit(PROMPTS[0], adapted.GREEDY)
        engine.pause()
        engine.update_weights()
        engine.resume()
        assert set(handle.result().completions[0].weight_versions) == {1}
        adapted.shake(model, seed=2)
        check_noticed(engine, model, version=2)


@pytest.mark.parametrize("before", [True, False])
def test_of_the_live_adapter_where_another_is_loaded(before: bool) -> None:
    model, other = adapted.peft_model(), adapted.peft_model()
    with RolloutEngine(model, config=MIRROR) as engine:
        engine.generate_batch(PROMPTS, adapted.GREEDY)
        if before:
            adapted.shake(model, seed=2)
        engine.load_adapter("other", other)
        if not before:
            adapted.shake(model, seed=2)
        check_noticed(engine, model, version=1)
        engine.load_adapter("third", other)  # of itself changes nothing
        assert engine.generate_batch(PROMPTS, adapted.GREEDY)[0].cached_tokens and engine.weight_version == 1


@pytest.mark.parametrize("config", [adapted.CONFIG, MIRROR], ids=["aliased", "mirror"])
@pytest.mark.parametrize("before", [True, False])
def test_of_a_loaded_adapter_where_another_is_unloaded(config: EngineConfig, before: bool) -> None:
    """Unloading is of itself no change of the others, and hides none."""
    model, other = make_model("llama"), adapted.peft_model()
    with RolloutEngine(model, config=config) as engine:
        engine.load_adapter("a", other)
        engine.load_adapter("b", adapted.peft_model())
        first = engine.generate_batch(PROMPTS, adapted.GREEDY, adapter="a")
        if before:
            adapted.shake(other, seed=2)
        engine.unload_adapter("b")
        if not before:
            again = engine.generate_batch(PROMPTS, adapted.GREEDY, adapter="a")
            assert again[0].completions[0].token_ids == first[0].completions[0].token_ids
            assert again[0].cached_tokens and engine.weight_version == 0
            adapted.shake(other, seed=2)
        after = engine.generate_batch(PROMPTS, adapted.GREEDY, adapter="a")
        assert engine.weight_version == 1 and not after[0].cached_tokens
        assert after[0].completions[0].logprobs != first[0].completions[0].logprobs


def test_of_the_base_that_a_slots_magnitudes_were_made_of() -> None:
    model = adapted.peft_model(use_dora=True)
    with RolloutEngine(model, config=adapted.CONFIG) as engine:
        engine.generate_batch(PROMPTS, adapted.GREEDY)
        engine.update_weights()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("q_proj.base_layer.weight"):
                    parameter.mul_(2)
        check_noticed(engine, model, version=2)


@pytest.mark.parametrize("config", [MIRROR, replace(MIRROR, dtype="auto", quantization="fp8")], ids=["mirror", "fp8"])
def test_while_they_were_asleep_and_the_cache_was_not(config: EngineConfig) -> None:
    """What they are filled with again is not what the KV blocks were computed by."""
    model: Any = make_model("llama")
    with RolloutEngine(model, config=config) as engine:
        engine.generate_batch(PROMPTS, adapted.GREEDY)
        assert engine.generate_batch(PROMPTS, adapted.GREEDY)[0].cached_tokens > 0
        engine.sleep(tags=["weights"])
        step(model)
        engine.wake_up()
        output = engine.generate_batch(PROMPTS, adapted.GREEDY)[0]
        assert output.cached_tokens == 0 and set(output.completions[0].weight_versions) == {1}
        assert engine.verify_weights().ok


def test_after_weights_from_elsewhere_and_the_models_own_again() -> None:
    model: Any = make_model("llama")
    with RolloutEngine(model, config=MIRROR) as engine:
        engine.update_weights(make_model("llama", seed=5).state_dict())
        assert engine.update_weights() == 2
        check_noticed(engine, model, version=2)
        step(model)
        check_noticed(engine, model, version=3)


def test_nobody_else_has_a_model_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights change when the engine is given others, and are not all read before each request."""
    looks, checksums = [], AliasedSource.checksums
    monkeypatch.setattr(AliasedSource, "checksums", lambda source: (looks.append(source), checksums(source))[1])
    model, other = make_model("llama").eval(), make_model("llama", seed=5).eval()
    model.save_pretrained(tmp_path)
    with RolloutEngine.from_pretrained(tmp_path, tokenizer=None, config=adapted.CONFIG) as engine:
        for expected, version in ((model, 0), (other, 1)):
            check_noticed(engine, expected, version)
            engine.submit(PROMPTS[0], adapted.GREEDY).result()
            assert engine.generate_batch(PROMPTS, adapted.GREEDY)[0].cached_tokens
            if version == 0:
                engine.sleep()
                engine.wake_up()
                engine.update_weights(other.state_dict())
    assert not looks
    with RolloutEngine(model, config=adapted.CONFIG) as engine:
        engine.submit(PROMPTS[0], adapted.GREEDY).result()
    assert looks
