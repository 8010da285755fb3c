"""What an update sees of a large model at a glance, and what is seen before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from families import make_model
from peft import LoraConfig, get_peft_model
from torch import nn

from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams, UnsupportedModelError, WeightsMovedError
from stoker.weight_sync import module_tree as tree_module

CONFIG = EngineConfig(kv_cache_memory="1MiB", block_size=4, max_num_seqs=4)


@pytest.fixture
def short_glance(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if models were large."""
    monkeypatch.setattr(tree_module, "_GLANCE", 12)
    monkeypatch.setattr(tree_module, "_TOP", 4)


def unseen(engine: RolloutEngine, model: Any, kind: str) -> Any:
    """A linear of a layer that no glance falls on."""
    seen = engine._binding._seen
    assert seen is not None
    linears = [module for name, module in model.named_modules() if name.endswith(kind)]
    return next(m for m in linears if not any(m._parameters is registry for registry in seen[0]._some))


@pytest.mark.usefixtures("short_glance")
@pytest.mark.parametrize("kind", ["q_proj", "down_proj"])
def test_what_an_update_misses_of_a_large_model_is_taken_before_anything_is_sampled(kind: str) -> None:
    model: Any = make_model("llama")
    with RolloutEngine(model, config=CONFIG) as engine:
        params = SamplingParams(max_tokens=4, seed=1)
        for version in (1, 2):
            linear = unseen(engine, model, kind)
            linear.weight = nn.Parameter(1.5 * linear.weight.detach())
            assert engine.update_weights() == version
            (completion,) = engine.generate_batch([[5, 4, 3]], params)[0].completions
            assert set(completion.weight_versions) == {version}
            expected = oracle.logprobs(model, [5, 4, 3], completion.token_ids)
            torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4)
        unseen(engine, model, kind).weight.data.mul_(1.5)
        assert engine.generate_batch([[5, 4, 3]], params)[0].completions[0].weight_versions == [3] * 4, "unannounced"


@pytest.mark.usefixtures("short_glance")
def test_what_an_update_misses_is_verified_as_it_will_run() -> None:
    model: Any = make_model("llama")
    with RolloutEngine(model, config=CONFIG) as engine:
        linear = unseen(engine, model, "q_proj")
        linear.weight.data = linear.weight.data.clone()
        assert not engine.verify_weights().ok, "with no update, it says how things are"
        assert engine.update_weights() == 1 and engine.verify_weights().ok and engine.weight_version == 1
        linear = unseen(engine, model, "q_proj")
        linear.weight.data = linear.weight.data.double()
        assert engine.update_weights() == 2
        for call in (engine.verify_weights, lambda: engine.generate_batch([[1]])) * 2:
            with pytest.raises(WeightsMovedError, match=r"q_proj.weight is now torch.float64"):
                call()


WHOLE: dict[str, Callable[[Any], object]] = {
    "another dtype": lambda m: m.to(torch.float64),
    "assigned": lambda m: m.load_state_dict({n: t.double() for n, t in m.state_dict().items()}, assign=True),
    "merged": lambda m: m.merge_adapter(),
    "another model": lambda m: setattr(m.base_model, "model", make_model("llama", num_hidden_layers=2)),
    "other layers": lambda m: setattr(m.base_model.model.model, "layers", nn.ModuleList()),
}


@pytest.mark.usefixtures("short_glance")
@pytest.mark.parametrize("change", WHOLE)
def test_what_changes_a_large_model_as_a_whole_is_refused_by_the_update(change: str) -> None:
    model: Any = get_peft_model(make_model("llama", num_hidden_layers=8), LoraConfig(target_modules="all-linear", r=2))
    with RolloutEngine(model, config=CONFIG) as engine:
        assert engine._binding._seen is not None
        tree, switches = engine._binding._seen
        assert len(tree._some) == len(switches._merged) == 12
        WHOLE[change](model)
        for call in (engine.update_weights, lambda: engine.generate_batch([[1]])) * 2:
            with pytest.raises((WeightsMovedError, UnsupportedModelError)):
                call()
        assert engine.weight_version == 0
