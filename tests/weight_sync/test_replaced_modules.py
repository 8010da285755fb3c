"""Modules that were replaced by others, or compute with other settings: what the shell follows, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from families import make_model
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from stoker.kernels.errors import WeightsMismatchError, WeightsMovedError
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
    model.model.layers[0].mlp.drop, model.config.resid_pdrop = nn.Dropout(0.1), 0.1
    with RolloutEngine(model, config=CONFIG) as engine:
        call = engine.update_weights if told else lambda: engine.generate_batch([[1]])
        model.model.layers[0].mlp.drop = nn.Identity()
        call()
        model.model.layers[0].mlp.drop = nn.ReLU()
        with pytest.raises(UnsupportedModelError, match=r"^model.layers.0.mlp.drop was a Dropout, and is a ReLU now"):
            call()
        model.model.layers[0].mlp.drop = nn.Identity()
        model.model.layers[1].mlp.act_fn = nn.Tanh()
        with pytest.raises(UnsupportedModelError, match=r"^model.layers.1.mlp.act_fn was a .* and is a Tanh now"):
            call()


def test_a_class_that_derives_from_the_one_before_takes_its_place() -> None:
    """As FSDP2's do, and linears that train in 8 bits; and a model of another class has a shell of its own."""
    model: Any = make_model("llama", num_hidden_layers=3)
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


def scaled(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.01


def another_epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.5


def fewer_experts(model: Any) -> None:
    for router in (module for module in model.modules() if hasattr(module, "top_k")):
        router.top_k = 1


def another_softcap(model: Any) -> None:
    model.config.final_logit_softcapping = 0.1


def scaled_by_numpy(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = np.float32(0.01)


def scaled_by_a_tensor(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = torch.tensor(0.01)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "float64"])
@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", scaled),
        ("llama", scaled_by_numpy),
        ("llama", scaled_by_a_tensor),
        ("llama", another_epsilon),
        ("qwen3_moe", fewer_experts),
        ("gemma2", another_softcap),
    ],
)
def test_settings_that_change_are_followed(family: str, change: Any, dtype: str, told: bool) -> None:
    """What the trainer's next forward computes with, so does the engine, be it in a copy of the weights."""
    if family == "qwen3_moe" and dtype == "float64":
        dtype = "bfloat16"  # torch has no product of experts in float64
    model: Any = make_model(family)
    prompt, completion = [5, 6, 7, 8, 9], [3, 4, 5]
    tolerance = 0.1 if dtype == "bfloat16" else 1e-4
    with RolloutEngine(model, config=replace(CONFIG, dtype=dtype)) as engine:

        def check() -> torch.Tensor:
            (scores,) = engine.score([prompt + completion], start=len(prompt))
            expected = oracle.logprobs(model, prompt, completion)
            torch.testing.assert_close(scores.logprobs.double(), expected, rtol=0, atol=tolerance)
            return expected

        before = check()
        change(model)
        if told:
            engine.update_weights()
        assert (check() - before).abs().max() > 2 * tolerance
        assert engine.weight_version == 1, "what was computed before serves nobody"


@pytest.mark.parametrize("change", [scaled_by_numpy, scaled_by_a_tensor])
def test_one_number_of_numpy_s_or_torch_s_is_the_number_it_is(change: Any) -> None:
    model: Any = make_model("llama")
    change(model)
    with RolloutEngine(model, config=CONFIG) as engine:
        (scores,) = engine.score([[5, 6, 7, 8]])
        torch.testing.assert_close(scores.logprobs.double(), oracle.logprobs(model, [5], [6, 7, 8]), rtol=0, atol=1e-4)
        assert not engine._binding.shell.settings.changed


def test_an_array_in_place_of_a_number_is_refused_by_name() -> None:
    model: Any = make_model("llama")
    with RolloutEngine(model, config=CONFIG) as engine:
        before, model.model.layers[1].self_attn.scaling = model.model.layers[1].self_attn.scaling, torch.ones(4, 1, 1)
        for call in (lambda: engine.generate_batch([[1]]), lambda: RolloutEngine(model)) * 2:
            with pytest.raises(UnsupportedModelError, match=r"^model.layers.1.self_attn.scaling is an array of shape"):
                call()
        model.model.layers[1].self_attn.scaling = before
        engine.generate_batch([[1]])


def test_a_number_of_the_configuration_where_there_was_none_is_followed() -> None:
    model: Any = make_model("gemma2", final_logit_softcapping=None)
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.generate_batch([[1]])
        another_softcap(model)
        (scores,) = engine.score([[5, 6, 7, 8]])
        torch.testing.assert_close(scores.logprobs.double(), oracle.logprobs(model, [5], [6, 7, 8]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("told", [False, True])
def test_the_copy_of_the_weights_stays_when_a_setting_changes(told: bool) -> None:
    """Another one would take its memory again, and have the model's numbers in place of those that came from elsewhere."""
    model: Any = make_model("llama")
    elsewhere: Any = make_model("llama", seed=1)
    with RolloutEngine(model, config=replace(CONFIG, dtype="float64")) as engine:
        mirror = engine._binding.source.mirror  # type: ignore[attr-defined]
        engine.update_weights(elsewhere.state_dict())
        for one in (model, elsewhere):
            another_epsilon(one)
        if told:
            engine.update_weights(elsewhere.state_dict())
        (scores,) = engine.score([[5, 6, 7, 8]])
        expected = oracle.logprobs(elsewhere, [5], [6, 7, 8])
        torch.testing.assert_close(scores.logprobs.double(), expected, rtol=0, atol=1e-4)
        assert engine.update_weights() == engine.weight_version
        (scores,) = engine.score([[5, 6, 7, 8]])
        expected = oracle.logprobs(model, [5], [6, 7, 8])
        torch.testing.assert_close(scores.logprobs.double(), expected, rtol=0, atol=1e-4)
        assert engine._binding.source.mirror is mirror  # type: ignore[attr-defined]


def test_what_changed_before_an_update_that_is_refused_is_not_forgotten() -> None:
    """A setting, and what waking has taken from the model."""
    model: Any = make_model("llama")
    config = replace(CONFIG, dtype="float64", check_finite_weights=True)
    sequence, weight = [*range(5, 25)], model.model.norm.weight
    with RolloutEngine(model, config=config) as engine:

        def refused() -> None:
            before = weight.detach().clone()
            with torch.no_grad():
                weight.fill_(torch.nan)
                with pytest.raises(WeightsMismatchError, match="NaN"):
                    engine.update_weights()
                weight.copy_(before)

        def check() -> None:
            (scores,) = engine.score([sequence], start=16)
            expected = oracle.logprobs(model, sequence[:16], sequence[16:])
            torch.testing.assert_close(scores.logprobs.double(), expected, rtol=0, atol=1e-4)

        check()
        scaled(model)
        refused()
        check()
        engine.sleep(tags=["weights"])
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.mul_(-1)
        engine.wake_up()
        refused()
        check()


def test_weights_from_elsewhere_of_which_none_are_kept_are_not_replaced_by_the_model_s() -> None:
    """Layers in fp8 are made anew of weights that are gone."""
    model: Any = make_model("llama")
    config = replace(CONFIG, dtype="float64", quantization="fp8")
    with RolloutEngine(model, config=config) as engine:
        engine.update_weights(make_model("llama", seed=1).state_dict())
        engine.generate_batch([[1]])
        another_epsilon(model)
        for _ in range(2):
            with pytest.raises(WeightsMovedError, match="or a setting of it has changed"):
                engine.generate_batch([[1]])
        engine.update_weights()
        engine.generate_batch([[1]])


def test_a_setting_of_a_sharded_model_is_followed_by_each_rank_for_itself(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model: Any = fully_shard(make_model("llama"), mesh=init_device_mesh("cpu", (1,)))
        with RolloutEngine(model, config=CONFIG) as engine:
            (before,) = engine.score([[5, 6, 7, 8]])
            scaled(model)
            (scores,) = engine.score([[5, 6, 7, 8]])
            assert (scores.logprobs - before.logprobs).abs().max() > 1e-2
            expected = oracle.logprobs(model, [5], [6, 7, 8])
            torch.testing.assert_close(scores.logprobs.double(), expected, rtol=0, atol=1e-4)
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_that_is_sharded_in_another_dtype(tmp_path: Path) -> None:
    """As mixed precision has it. The engine keeps the one that it was told."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for dtype in ("auto", "bfloat16"):
            model: Any = make_model("llama").bfloat16()
            with RolloutEngine(model, config=replace(CONFIG, dtype=dtype)) as engine:
                fully_shard(model.float(), mesh=init_device_mesh("cpu", (1,)))
                if dtype == "auto":
                    with pytest.raises(
                        WeightsMovedError,
                        match="is torch.float32 on cpu now; the engine was built for torch.bfloat16 on",
                    ):
                        engine.update_weights()
                else:
                    assert engine.update_weights() == 1 and engine.verify_weights().ok
                    assert engine.generate_batch([[1]])[0].completions[0].weight_versions[0] == 1
    finally:
        torch.distributed.destroy_process_group()


def test_settings_of_training_alone_are_of_no_interest() -> None:
    """A shell is not made anew at each of them."""
    model: Any = make_model("llama")
    model.model.layers[0].mlp.drop, model.config.resid_pdrop = nn.Dropout(0.1), 0.1
    with RolloutEngine(model, config=CONFIG) as engine:
        shell = engine._binding.shell
        model.train()
        model.gradient_checkpointing_enable()
        model.model.layers[0].mlp.drop.p = 0.2
        model.model.layers[0].self_attn.attention_dropout = 0.2
        model.config.attention_dropout, model.config.use_cache, model.config.pad_token_id = 0.2, False, 3
        model.config.resid_pdrop, model.model.embed_tokens.padding_idx = 0.2, 3
        model.model.layers[0].mlp.up_proj.register_full_backward_hook(lambda *_: None)
        engine.generate_batch([[1]])
        assert engine._binding.shell is shell and engine.weight_version == 0


def test_a_setting_that_changes_what_layers_store_is_refused() -> None:
    model: Any = make_model("gemma2")
    with RolloutEngine(model, config=CONFIG) as engine:
        attention = next(m for m in model.modules() if getattr(m, "sliding_window", None) and hasattr(m, "q_proj"))
        before, attention.sliding_window = attention.sliding_window, 3
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="the mask of layer 0 shows token 3 other keys"):
                engine.generate_batch([[1]])
        attention.sliding_window = before
        engine.generate_batch([[1]])
