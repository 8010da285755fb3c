"""What a model's tree notices at every update: whatever changes what is in the model, and nothing else."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from families import make_model
from peft import LoraConfig, get_peft_model
from torch import nn
from tree_changes import CHANGES, changeable

from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams, UnsupportedModelError
from stoker.weight_sync import naming, peft_adapters
from stoker.weight_sync.aliased_source import AliasedSource
from stoker.weight_sync.module_tree import Tree

CONFIG = EngineConfig(kv_cache_memory="1MiB", block_size=4, max_num_seqs=4)


MISSED_AT_A_GLANCE = {
    "other_strides", "square", "shortened", "reinterpreted", "renamed", "registry_replaced", "child_added", "buffer_added",
}  # fmt: skip


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_is_noticed(change: Callable[[Any], None], wrapped: bool) -> None:
    inner = changeable()
    model = nn.parallel.DataParallel(inner) if wrapped else inner
    tree = Tree(model)
    assert tree.same() and tree.looks_same()
    change(inner)
    assert not tree.same()
    assert tree.looks_same() == (change.__name__ in MISSED_AT_A_GLANCE)
    assert Tree(model).same(), "and once only"


def test_another_order_of_the_same_is_no_change() -> None:
    """PEFT takes the parameters of experts away for a forward, and puts them back behind the others."""
    model = make_model("qwen2")
    tree = Tree(model)
    for layer in model.model.layers:
        registry = layer.self_attn.q_proj._parameters
        registry["weight"] = registry.pop("weight")
        assert [*registry] == ["bias", "weight"] and tree.same()
    registry["weight"], registry["bias"] = registry["bias"], registry["weight"]
    assert not tree.same()


def test_strides_of_tensors_that_are_not_contiguous() -> None:
    model, memory = nn.Linear(6, 6), torch.zeros(6 * 18)
    model.register_buffer("strided", memory.as_strided((6, 6), (12, 2)))
    for strides in ((18, 3), (6, 1), (12, 2)):
        tree = Tree(model)
        assert tree.same()
        model.strided.data = memory.as_strided((6, 6), strides)
        assert not tree.same(), strides


@pytest.mark.parametrize("under_way", [False, True])
def test_another_layout_is_taken_before_anything_is_sampled(under_way: bool) -> None:
    """By the update itself where requests wait to go on, else by what starts next, and counted once."""
    model: Any = make_model("llama", hidden_size=64)
    with RolloutEngine(model, config=CONFIG) as engine:
        prompt, params = [5, 4, 3], SamplingParams(max_tokens=4, seed=1)
        handle = engine.submit(prompt, params) if under_way else None
        engine.pause()
        weight = model.model.layers[1].self_attn.q_proj.weight
        assert weight.shape[0] == weight.shape[1]
        weight.data = weight.data.t()
        assert engine.update_weights() == 1
        engine.resume(recompute=True)
        (completion,) = (handle.result() if handle else engine.generate_batch([prompt], params)[0]).completions
        assert set(completion.weight_versions) == {1}
        expected = oracle.logprobs(model, prompt, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4)


def test_parameters_that_are_others_at_one_update_and_those_from_before_at_the_next() -> None:
    """As where a trainer puts averaged weights in their place, and nothing is sampled with these."""
    model: Any = make_model("llama")
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.generate_batch([[5, 4, 3]])
        norm, before = model.model.norm, model.model.norm.weight
        for weight in (nn.Parameter(-2 * before.detach()), before):
            norm.weight = weight
            engine.update_weights()
        (completion,) = engine.generate_batch([[5, 4, 3]], SamplingParams(max_tokens=4))[0].completions
        expected = oracle.logprobs(model, [5, 4, 3], completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4)


def test_tensors_that_moved_before_an_adapter_was_loaded() -> None:
    model: Any = get_peft_model(make_model("llama"), LoraConfig(target_modules=["q_proj"], r=2))
    other: Any = get_peft_model(make_model("llama"), LoraConfig(target_modules=["q_proj"], r=2))
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.generate_batch([[5, 4, 3]])
        up = model.base_model.model.model.layers[0].mlp.up_proj
        up.weight = nn.Parameter(3 * up.weight.detach())
        engine.load_adapter("other", other)
        (completion,) = engine.generate_batch([[5, 4, 3]], SamplingParams(max_tokens=4))[0].completions
        expected = oracle.logprobs(model, [5, 4, 3], completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4)
        assert set(completion.weight_versions) == {1}


def test_what_another_model_does_to_an_adapter_that_was_loaded_from_it() -> None:
    """The engine's own model is as it was."""
    config = LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    model, other = make_model("llama"), get_peft_model(make_model("llama"), config)
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.load_adapter("other", other)
        for version in range(3):
            output = engine.generate_batch([[5, 4, 3, 9, 2]], SamplingParams(max_tokens=4), adapter="other")[0]
            (completion,) = output.completions
            assert output.cached_tokens == 0 and set(completion.weight_versions) == {version}
            expected = oracle.logprobs(other, [5, 4, 3, 9, 2], completion.token_ids)
            torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4)
            for name, p in other.named_parameters():
                if "lora_B" in name:
                    p.data = -2 * p.data if version else p.data.mul_(-2)


def test_a_tensor_that_went_to_the_next_module_under_its_name_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    model[1].register_parameter("more", nn.Parameter(torch.zeros(2)))
    tree = Tree(model)
    more = model[1]._parameters.pop("more")
    model[1].bias = model[0]._parameters.pop("bias")
    model[1].more = more
    assert not tree.same()
    model[0].bias = model[1]._parameters.pop("bias")
    assert tree.same()


def test_registries_of_a_class_of_their_own() -> None:
    class Registry(OrderedDict[str, Any]):
        pass

    model: Any = make_model("llama")
    for module in model.modules():
        module._parameters, module._buffers = Registry(module._parameters), Registry(module._buffers)
    tree = Tree(model)
    assert tree.same()
    model.model.norm._buffers["more"] = torch.zeros(1)
    assert not tree.same()


def test_what_training_does_is_no_change() -> None:
    model: Any = make_model("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tree = Tree(model)
    ids = torch.randint(1, 100, (2, 8))
    for _ in range(2):
        model.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval().requires_grad_(False).requires_grad_(True)
        model.to(torch.float32).tie_weights()
        model.load_state_dict(model.state_dict())
    assert tree.same()


def test_an_adapter_comes_and_goes() -> None:
    model: Any = make_model("llama")
    peft = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
    tree = Tree(model)
    peft.add_adapter("other", LoraConfig(target_modules=["q_proj"], r=2))
    assert not tree.same()
    tree = Tree(model)
    peft.delete_adapter("other")
    assert not tree.same()
    tree = Tree(model)
    a = next(p for name, p in model.named_parameters() if "lora_A" in name)
    a.data = a.data.clone()
    assert not tree.same()


@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_that_is_as_it_was_is_not_walked_over_again(adapted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make_model("llama")
    if adapted:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
    calls: list[str] = []
    with RolloutEngine(model, config=CONFIG) as engine:
        for owner, name in ((AliasedSource, "moved"), (naming, "walk"), (peft_adapters, "walk")):
            original = getattr(owner, name)

            def counted(*args: Any, original: Any = original, name: str = name) -> Any:
                calls.append(name)
                return original(*args)

            monkeypatch.setattr(owner, name, counted)
        assert engine.update_weights() == 1 and engine.update_weights() == 2
        engine.generate_batch([[1, 2, 3]], SamplingParams(max_tokens=2)).raise_for_errors()
        assert calls == [] and engine.weight_version == 2
        for p in model.parameters():
            p.data = p.data.clone()
        assert engine.update_weights() == 3 and "moved" in calls
        calls.clear()
        assert engine.update_weights() == 4 and calls == []


@pytest.mark.parametrize("look", [Tree.looks_same, Tree.same])
def test_an_interrupt_in_the_middle_of_a_look_leaves_torch_as_it_was(look: Callable[[Tree], bool]) -> None:
    """Whatever line it strikes: what torch's functions do is nothing to be changed for a moment."""
    tree = Tree(make_model("llama"))

    def struck(at: int) -> bool:
        left = [at]

        def trace(frame: Any, event: str, _: Any) -> Any:
            left[0] -= event in ("line", "return")
            if left[0] < 0:
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            assert look(tree)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    count = 0
    while struck(count):
        count += 1
        try:
            assert isinstance(torch.zeros(1), torch.Tensor)
        finally:
            while torch._C._len_torch_function_stack():
                torch._C._pop_torch_function_stack()
    assert count > 1


def test_the_active_adapter_is_that_of_now() -> None:
    """Also where nothing was looked at since it was chosen, as while requests are under way."""
    model: Any = get_peft_model(make_model("llama"), LoraConfig(target_modules=["q_proj"], r=2))
    model.add_adapter("other", LoraConfig(target_modules=["q_proj"], r=2))
    with RolloutEngine(model, config=CONFIG) as engine:
        binding = engine._binding
        assert binding.active_adapter() == "default"
        model.set_adapter("other")
        assert binding.active_adapter() == "other"
        with model.disable_adapter():
            assert binding.active_adapter() is None
        assert engine.update_weights() == 1 and binding.active_adapter() == "other"
        binding.notice()
        model.base_model.model = make_model("llama", seed=3)
        assert binding.active_adapter() is None


SWITCHES: dict[str, Callable[[Any], object]] = {
    "another scale": lambda m: m.base_model.model.model.layers[1].self_attn.q_proj.scaling.update(default=3.0),
    "another adapter": lambda m: m.set_adapter("other"),
    "several": lambda m: m.base_model.model.model.layers[0].self_attn.q_proj.set_adapter(["default", "other"]),
    "off": lambda m: m.base_model.disable_adapter_layers(),
    "one layer off": lambda m: m.base_model.model.model.layers[1].self_attn.q_proj.enable_adapters(False),
    "merged": lambda m: m.base_model.model.model.layers[0].self_attn.q_proj.merge(),
    "merged tokens": lambda m: m.base_model.model.model.embed_tokens.token_adapter.merge(),
    "other tokens": lambda m: m.base_model.model.model.embed_tokens.token_adapter.token_indices["default"].reverse(),
    "a variant": lambda m: m.base_model.model.model.layers[1].self_attn.q_proj.lora_variant.update(default=object()),
    "its class's": lambda m: delattr(m.base_model.model.model.layers[1].self_attn.q_proj, "_active_adapter"),
    "a saved module's": lambda m: m.base_model.model.lm_head.set_adapter("other"),
}


@pytest.mark.parametrize("change", SWITCHES)
def test_what_adapters_are_set_to_is_noticed(change: str) -> None:
    config = {"target_modules": ["q_proj"], "r": 2, "modules_to_save": ["lm_head"]}
    model: Any = get_peft_model(make_model("llama"), LoraConfig(**config, trainable_token_indices=[3, 5]))
    model.add_adapter("other", LoraConfig(**config))
    switches = peft_adapters.Switches(model)
    assert switches.same()
    SWITCHES[change](model)
    assert not switches.same()
    assert peft_adapters.Switches(model).same()


def test_a_config_that_becomes_one_that_is_not_run_is_refused() -> None:
    model: Any = get_peft_model(make_model("llama"), LoraConfig(target_modules=["q_proj"], r=2))
    with RolloutEngine(model, config=CONFIG) as engine:
        model.peft_config["default"].layer_replication = [[0, 1]]
        with pytest.raises(UnsupportedModelError, match="layer_replication"):
            engine.update_weights()
