"""Models that Liger has put its kernels into, which only run on a GPU: the engine computes what the classes were written to."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import oracle
import pytest
import torch
from families import make_config, make_model
from torch import nn
from transformers import Qwen3ForCausalLM

from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams, UnsupportedModelError

monkey_patch = pytest.importorskip("liger_kernel.transformers.monkey_patch", reason="liger-kernel is not installed")
CONFIG = EngineConfig(kv_cache_memory="1MiB", block_size=4, max_num_seqs=4, max_model_len=32)
PROMPT, PARAMS = [3, 5, 7, 11, 2, 9, 4], SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """What Liger changes, it changes for good: afterwards transformers' modules and their classes are as they were."""
    patched = [m for name, m in sys.modules.items() if name.startswith("transformers.models.") and ".modeling_" in name]
    owners: list[Any] = [nn, nn.functional, *patched]
    owners += [v for m in patched for v in vars(m).values() if isinstance(v, type) and issubclass(v, nn.Module)]
    before = [(owner, dict(vars(owner))) for owner in owners]
    yield
    for owner, attributes in before:
        for name, value in attributes.items():
            if vars(owner)[name] is not value:
                setattr(owner, name, value)


def greedy(model: Any) -> tuple[list[int], torch.Tensor]:
    """What a model says by its own forward, and the log-probabilities: to be asked before Liger is in it."""
    ids = oracle.greedy(model, PROMPT, PARAMS.max_tokens)
    return ids, oracle.logprobs(model, PROMPT, ids)


def assert_same(engine: RolloutEngine, expected: tuple[list[int], torch.Tensor]) -> None:
    (found,) = engine.generate_batch([PROMPT], PARAMS)[0].completions
    assert list(found.token_ids) == expected[0]
    torch.testing.assert_close(torch.tensor(found.logprobs).double(), expected[1], rtol=0, atol=1e-4)
    assert engine.stats().fused_layers == engine.stats().num_layers


# A family with images finds its text model by the configuration, and not by a name in its own module.
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi3", "mixtral", "gemma4+images"])
def test_in_a_model_and_in_all_that_are_built_later(family: str) -> None:
    model = make_model(family)
    expected = greedy(model)
    monkey_patch._apply_liger_kernel_to_instance(model=model)
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_same(engine, expected)
    later = make_model(family)
    assert any(type(part).__module__.startswith("liger_kernel") for part in later.modules())
    with RolloutEngine(later, config=CONFIG) as engine:
        assert_same(engine, expected)


def test_in_a_model_that_an_engine_runs_on() -> None:
    """As under TRL, whose ``train`` does so after ``attach``; then the weights lie elsewhere."""
    model, other = make_model("qwen3"), make_model("qwen3", seed=1)
    expected, of_other = greedy(model), greedy(other)
    with RolloutEngine(model, config=CONFIG) as engine:
        monkey_patch._apply_liger_kernel_to_instance(model=model)
        assert_same(engine, expected)
        model.load_state_dict(other.state_dict(), assign=True)
        engine.update_weights()
        assert_same(engine, of_other)


class Derived(Qwen3ForCausalLM):
    pass


def test_under_a_class_derived_from_transformers() -> None:
    model = Derived(make_config("qwen3")).eval()
    expected = greedy(model)
    monkey_patch._apply_liger_kernel_to_instance(model=model)
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_same(engine, expected)


def test_in_place_of_what_is_torchs_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As some vision towers have it."""
    monkeypatch.setattr(nn, "LayerNorm", monkey_patch.LigerLayerNorm)
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel is built of Liger's modules \(LigerLayerNorm\)"):
        RolloutEngine(make_model("gpt2"), config=CONFIG)
