"""Scores under adapters: no sequence takes what was computed or said under another adapter, or under an older one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from adapted import CONFIG, lora, peft_model, running, shake, state_dict, two_adapters
from families import draw, make_model
from peft import PeftModel
from scored import check

from stoker.rollout import RequestFailedError, RolloutEngine

IDS = draw(1, 30)


def check_all(
    engine: RolloutEngine, model: PeftModel, sequences: list[list[int]], adapters: Sequence[str | None], start: int = 1
) -> None:
    scores = engine.score(sequences, start=start, adapter=adapters, temperature=0.8, top_k=2, entropy=True)
    for one, ids, adapter in zip(scores, sequences, adapters, strict=True):
        with running(model, adapter):
            check(one, model, ids, start, 0.8, 2)


@pytest.mark.parametrize("start", [1, 20])
def test_the_same_text_under_each_adapter(start: int) -> None:
    """In one call, and again on what the cache kept; those of one adapter share."""
    model = two_adapters()
    adapters = [None, "default", "default", "other", None, "other", "default"]
    with RolloutEngine(model, config=CONFIG) as engine:
        for _ in range(2):
            check_all(engine, model, [IDS + draw(2 + row % 2, 6) for row in range(7)], adapters, start)
        assert engine.stats().prefix_cache_hit_tokens > 0


@pytest.mark.parametrize("tell", [True, False])
def test_an_update_in_place_changes_kept_scores(tell: bool) -> None:
    model = two_adapters()
    adapters = ["default", None, "other"]
    with RolloutEngine(model, config=CONFIG) as engine:
        for seed in range(6, 9):
            check_all(engine, model, [IDS] * 3, adapters)
            shake(model, seed)
            if tell:
                engine.update_weights()


def test_an_adapter_that_was_loaded_again_has_no_scores_of_the_one_before() -> None:
    first, second = peft_model(seed=7), peft_model(seed=8)
    with RolloutEngine(make_model("llama"), config=CONFIG) as engine:
        for model in (first, second, first):
            engine.load_adapter("a", (state_dict(model), model.peft_config["default"]))
            (scores,) = engine.score([IDS], adapter="a")
            check(scores, model, IDS, 1)


def test_more_adapters_than_slots() -> None:
    model = peft_model()
    for number in range(4):
        model.add_adapter(f"a{number}", lora(r=2 + number))
    shake(model, 3)
    names = ["default", *(f"a{number}" for number in range(4)), None]
    with RolloutEngine(model, config=replace(CONFIG, max_loras=2)) as engine:
        for _ in range(2):
            adapters = [names[5 * row % 6] for row in range(12)]
            check_all(engine, model, [IDS[: 9 + row] for row in range(12)], adapters)


def test_an_adapter_of_nan_fails_the_sequences_it_scores_and_no_others() -> None:
    model = two_adapters()
    adapters = ["default", "other", None, "default", "other"]
    with RolloutEngine(model, config=CONFIG) as engine:
        with torch.no_grad():
            model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.fill_(torch.nan)
        for adapter, one in zip(adapters, engine.score([IDS] * 5, adapter=adapters), strict=True):
            if adapter == "default":
                assert isinstance(one.error, RequestFailedError) and "NaN logits" in str(one.error)
            else:
                with running(model, adapter):
                    check(one, model, IDS, 1)
        with torch.no_grad():
            model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.zero_()
        check_all(engine, model, [IDS] * 5, adapters)
