"""Models whose layers have indexers: exact while these choose every key, refused where they would not."""

from __future__ import annotations

import functools
from typing import Any

import oracle
import pytest
import torch
from adapted import with_lora
from families import draw, make_model
from indexed_fields import INDEXED, KEPT
from small_training import train
from transformers import PreTrainedModel

from stoker.engine.layers import fused_layers
from stoker.kernels.errors import UnsupportedModelError
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

CONFIG = EngineConfig(kv_cache_memory="4MiB", block_size=4, max_num_batched_tokens=16, max_model_len=KEPT)
PROMPTS = [draw(length, length) for length in (5, 40, 1, KEPT - 1)]
TO_THE_END = SamplingParams(max_tokens=None, seed=1)
COUNTS = ("index_topk", "topk_blocks")
REFUSED = rf"keeps {KEPT} .* set EngineConfig\(max_model_len={KEPT}\) or less, or use model.generate for longer"


def indexed_model(family: str) -> PreTrainedModel:
    """A model that takes longer sequences than its indexers have all keys of."""
    return make_model(family, max_position_embeddings=256)


def keep(model: PreTrainedModel, count: int) -> None:
    for module in model.modules():
        vars(module).update(dict.fromkeys(vars(module).keys() & {*COUNTS}, count))


def assert_like_hugging_face(engine: RolloutEngine, model: PreTrainedModel) -> None:
    """Sequences as long as they may be, sampled and scored."""
    batch = engine.generate_batch(PROMPTS, TO_THE_END)
    batch.raise_for_errors()
    for prompt, output, score in zip(PROMPTS, batch, engine.score(batch), strict=True):
        (completion,) = output.completions
        assert len(prompt) + len(completion.token_ids) == KEPT
        expected = oracle.logprobs(model, prompt, completion.token_ids)
        for found in (completion.logprobs, score.logprobs):
            torch.testing.assert_close(torch.as_tensor(found).double(), expected, rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("family", INDEXED)
def test_the_limit_is_that_of_the_models_own_forward(family: str) -> None:
    """Up to it the logits are those of attention to all keys, and from the next token on they are others."""
    model, ids = indexed_model(family), torch.tensor([draw(1, KEPT + 4)])
    chosen, chosen_at_limit = (model(i, use_cache=False).logits[0] for i in (ids, ids[:, :KEPT]))
    keep(model, 256)
    plain, plain_at_limit = (model(i, use_cache=False).logits[0] for i in (ids, ids[:, :KEPT]))
    assert torch.equal(chosen_at_limit, plain_at_limit)
    torch.testing.assert_close(chosen[:KEPT], plain[:KEPT], rtol=0, atol=1e-4)
    beyond = (chosen[KEPT:] - plain[KEPT:]).abs().amax(-1)
    assert beyond[0] > 1e-3 and beyond.max() > 1e-2


@pytest.mark.parametrize("family", INDEXED)
def test_exact_up_to_what_indexers_keep_and_refused_beyond(family: str) -> None:
    model = indexed_model(family)
    places = [p.data_ptr() for p in model.parameters()]
    for longer in (KEPT + 1, None):
        with pytest.raises(UnsupportedModelError, match=REFUSED):
            RolloutEngine(model, config=EngineConfig(kv_cache_memory="4MiB", max_model_len=longer))
    assert [p.data_ptr() for p in model.parameters()] == places
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_like_hugging_face(engine, model)
        stats = engine.stats()
    of_known_structure = family in ("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl")
    assert stats.fused_layers == (stats.num_layers if of_known_structure else 0)


def test_a_layer_of_its_own_code_takes_what_a_fused_one_hands_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third layer wants the choice of the second one's indexer."""
    structure_of = fused_layers.structure_of

    def of_others(layer: Any) -> Any:
        return None if layer.self_attn.layer_idx == 2 else structure_of(layer)

    monkeypatch.setattr(fused_layers, "structure_of", of_others)
    model = indexed_model("glm_moe_dsa")
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_like_hugging_face(engine, model)
        assert engine.stats().fused_layers == engine.stats().num_layers - 1


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_an_indexer_leave_a_step_as_it_is() -> None:
    """No hook is put where nothing is called."""
    model = with_lora(make_model("deepseek_v32"), target_modules=["wq_b", "wk", "weights_proj", "kv_b_proj"])
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_like_hugging_face(engine, model)
        assert not engine._binding.shell.lora.has_hooks


@pytest.mark.parametrize("family", ["deepseek_v32", "hy_v4"])
def test_trained_weights_are_taken(family: str) -> None:
    model = indexed_model(family)
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_like_hugging_face(engine, model)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".indexer." in name:
                    parameter.mul_(1.5)
        engine.update_weights()
        assert_like_hugging_face(engine, model)
        report = engine.verify_weights()
        assert report.ok and report.source == "aliased"


def test_an_indexer_that_keeps_less_from_now_on_is_refused() -> None:
    model = indexed_model("deepseek_v32")
    with RolloutEngine(model, config=CONFIG) as engine:
        keep(model, KEPT - 1)
        with pytest.raises(UnsupportedModelError, match=rf"max_model_len={KEPT - 1}\)"):
            engine.generate_batch(PROMPTS[:1], TO_THE_END)
        keep(model, KEPT)
        assert_like_hugging_face(engine, model)


def leaves_one_out(forward: Any) -> Any:
    """Whatever it keeps, it is one key fewer."""

    @functools.wraps(forward)
    def changed(*args: Any, **given: Any) -> torch.Tensor:
        return forward(*args, **given)[..., 1:]

    return changed


def repeats_the_first(forward: Any) -> Any:
    @functools.wraps(forward)
    def changed(*args: Any, **given: Any) -> torch.Tensor:
        chosen: torch.Tensor = forward(*args, **given)
        return chosen[..., :1].expand_as(chosen)

    return changed


def caches_nothing(_: Any) -> Any:
    def changed(self: Any, hidden_states: torch.Tensor, *args: Any, **given: Any) -> torch.Tensor:
        return torch.arange(hidden_states.shape[1]).expand(1, hidden_states.shape[1], -1)

    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (leaves_one_out, "DeepseekV32Indexer chooses keys in a way that the engine does not know"),
        (repeats_the_first, "DeepseekV32Indexer chooses keys in a way that the engine does not know"),
        (caches_nothing, "layer 0 attends to chosen keys"),
    ],
)
def test_indexers_that_choose_in_another_way_are_refused(
    change: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("deepseek_v32")
    kind: Any = type(model.model.layers[0].self_attn.indexer)
    monkeypatch.setattr(kind, "forward", change(kind.forward))
    with pytest.raises(UnsupportedModelError, match=message):
        RolloutEngine(model, config=CONFIG)


def test_counts_that_are_not_what_an_indexer_keeps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads another number than the one by this name."""
    model = make_model("deepseek_v32")
    kind: Any = type(model.model.layers[0].self_attn.indexer)
    forward = kind.forward

    @functools.wraps(forward)
    def changed(self: Any, *args: Any, **given: Any) -> torch.Tensor:
        own, self.index_topk = self.index_topk, 40
        try:
            return forward(self, *args, **given)
        finally:
            self.index_topk = own

    monkeypatch.setattr(kind, "forward", changed)
    with pytest.raises(UnsupportedModelError, match="chooses keys in a way that the engine does not know"):
        RolloutEngine(model, config=CONFIG)


def test_a_mask_that_shows_an_indexer_fewer_keys_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.masking_utils import create_sliding_window_causal_mask
    from transformers.models.deepseek_v32 import modeling_deepseek_v32

    def windowed(*args: Any, allow_is_causal_skip: bool = True, **given: Any) -> Any:
        given["config"].sliding_window = 12
        return create_sliding_window_causal_mask(*args, **given)

    model = make_model("deepseek_v32")
    monkeypatch.setattr(modeling_deepseek_v32, "create_causal_mask", windowed)
    with pytest.raises(
        UnsupportedModelError, match=r"the mask of layer 0 shows token 12 other keys.*max_model_len=12\)"
    ):
        RolloutEngine(model, config=CONFIG)
