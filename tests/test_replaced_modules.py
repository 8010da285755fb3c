"""Modules that were replaced by others: what the shell follows, and what is refused by name."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from families import make_model
from peft import LoraConfig, get_peft_model
from torch import nn

from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams, UnsupportedModelError

CONFIG = EngineConfig(kv_cache_memory="1MiB", block_size=4, max_num_seqs=4)


class Other(nn.Module):
    """What stands in another module's place with the very same tensors."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._parameters, self.module = module._parameters, [module]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -self.module[0](x)


class Derived(nn.Linear):
    pass


def derived(linear: nn.Linear) -> Derived:
    found = Derived(linear.in_features, linear.out_features, bias=linear.bias is not None)
    found._parameters = linear._parameters
    return found


@pytest.mark.parametrize("dtype", ["auto", "float64"])
@pytest.mark.parametrize("where", ["model.norm", "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_module_of_another_class_with_the_same_tensors_is_refused_by_name(
    where: str, wrapped: bool, dtype: str
) -> None:
    inner: Any = make_model("llama")
    model = inner
    if wrapped:
        config = LoraConfig(target_modules=["q_proj"], r=2)
        model = nn.parallel.DataParallel(torch.compile(get_peft_model(inner, config)))
    with RolloutEngine(model, config=replace(CONFIG, dtype=dtype)) as engine:
        adapted = wrapped and "q_proj" in where
        parent, leaf = (inner.get_submodule(where), "base_layer") if adapted else halves(inner, where)
        original = getattr(parent, leaf)
        setattr(parent, leaf, Other(original))
        for call in (engine.update_weights, lambda: engine.generate_batch([[1]])) * 2:
            with pytest.raises(UnsupportedModelError, match=f"^{where} was a .* and is a Other now"):
                call()
        setattr(parent, leaf, original)
        assert engine.update_weights() == 1
        assert engine.generate_batch([[1]])[0].completions[0].weight_versions[0] == 1


def halves(model: Any, path: str) -> tuple[Any, str]:
    parent, _, leaf = path.rpartition(".")
    return model.get_submodule(parent), leaf


@pytest.mark.parametrize("told", [False, True])
def test_a_module_without_tensors_that_became_another_is_refused_but_for_what_does_nothing(told: bool) -> None:
    model: Any = make_model("llama")
    model.model.layers[0].mlp.drop = nn.Dropout(0.1)
    with RolloutEngine(model, config=CONFIG) as engine:
        call = engine.update_weights if told else lambda: engine.generate_batch([[1]])
        model.model.layers[0].mlp.drop = nn.Identity()
        call()
        model.model.layers[0].mlp.drop = nn.ReLU()
        with pytest.raises(UnsupportedModelError, match=r"^model.layers.0.mlp.drop was a Dropout, and is a ReLU now"):
            call()
        model.model.layers[0].mlp.drop = nn.Identity()
        model.model.layers[2].mlp.act_fn = nn.Tanh()
        with pytest.raises(UnsupportedModelError, match=r"^model.layers.2.mlp.act_fn was a .* and is a Tanh now"):
            call()


def test_a_class_that_derives_from_the_one_before_takes_its_place() -> None:
    """As FSDP2's do, and linears that train in 8 bits; and a model of another class has a shell of its own."""
    model: Any = make_model("llama")
    wrapper: Any = torch.compile(model)
    model.model.layers[2].mlp.up_proj = derived(model.model.layers[2].mlp.up_proj)
    with RolloutEngine(wrapper, config=CONFIG) as engine:
        up = model.model.layers[1].mlp.up_proj
        model.model.layers[1].mlp.up_proj = derived(up)
        assert engine.update_weights() == 1
        model.model.layers[1].mlp.up_proj = up
        model.model.layers[0] = make_model("llama", seed=3).model.layers[0]
        assert engine.update_weights() == 2
        up = model.model.layers[2].mlp.up_proj
        up.__class__ = nn.Linear
        model.model.layers[2].mlp.up_proj = copy.copy(up)
        assert engine.update_weights() == 3
        model.model.norm = Other(model.model.norm)  # which is of no interest any more
        wrapper._orig_mod = other = make_model("mistral", seed=4, sliding_window=None)
        assert engine.update_weights() == 4
        (completion,) = engine.generate_batch([[5, 4, 3]], SamplingParams(max_tokens=4))[0].completions
        expected = oracle.logprobs(other, [5, 4, 3], completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4)
        other.model.norm = Other(other.model.norm)
        with pytest.raises(UnsupportedModelError, match=r"^model.norm was a MistralRMSNorm, and is a Other now"):
            engine.generate_batch([[1]])
