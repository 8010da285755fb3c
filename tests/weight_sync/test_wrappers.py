"""Whatever a trainer wraps its model in, or its layers, or both, the engine runs on the tensors within."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from families import make_model
from peft import LoraConfig, get_peft_model
from small_training import CONFIG, assert_matches
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from stoker.rollout import RolloutEngine

compiled = partial(torch.compile, backend="eager")


def within(model: Any, wrap: Callable[[nn.Module], Any]) -> Any:
    """Each layer wrapped, in place."""
    layers = model.get_submodule("model.layers")
    for i, layer in enumerate(layers):
        layers[i] = wrap(layer)
    return model


def lora(model: Any) -> Any:
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False))
    assert any("lora_A" in name for name, _ in adapted.named_parameters())
    return adapted


def within_adapted(adapted: Any) -> Any:
    within(adapted.get_base_model(), compiled)
    return adapted


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "layers checkpointed": lambda model: within(model, checkpoint_wrapper),
    "layers compiled": lambda model: within(model, compiled),
    "layers checkpointed and compiled": lambda model: within(model, lambda layer: compiled(checkpoint_wrapper(layer))),
    "layers compiled and checkpointed, all compiled": lambda model: compiled(
        within(model, lambda layer: checkpoint_wrapper(compiled(layer)))
    ),
    "in three": lambda model: compiled(checkpoint_wrapper(nn.DataParallel(within(model, checkpoint_wrapper)))),
    "adapters, compiled": lambda model: compiled(lora(model)),
    "adapters in layers checkpointed": lambda model: lora(within(model, checkpoint_wrapper)),
    "layers with adapters compiled, in two": lambda model: nn.DataParallel(compiled(within_adapted(lora(model)))),
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_tensors_within_are_the_engines(wrapper: str, family: str) -> None:
    plain = make_model(family, num_hidden_layers=2)
    names = {name for name, _ in (*plain.named_parameters(), *plain.named_buffers())}
    torch.manual_seed(0)
    twin: Any = lora(plain) if "adapters" in wrapper else plain
    torch.manual_seed(0)
    model = WRAPPERS[wrapper](make_model(family, num_hidden_layers=2))
    ours, theirs = list(model.parameters()), list(twin.parameters())
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))

    def change(factor: float) -> None:
        with torch.no_grad():
            for p in (*ours, *theirs):
                p.mul_(factor)

    with RolloutEngine(model, config=CONFIG) as engine:
        assert engine.stats().mirror_bytes == 0 and engine.stats().fused_layers == 2
        report = engine.verify_weights()
        of_adapters = sum("lora_" in name for name, _ in twin.named_parameters())
        assert report.ok and report.source == "aliased" and report.checked == len(names) + of_adapters
        assert engine._binding.source.names() - {"lm_head.weight"} == names - {"lm_head.weight"}
        assert set(assert_matches(engine, twin)) == {0}
        change(1.1)
        assert engine.update_weights() == 1 and engine.stats().last_update_bytes == 0
        assert set(assert_matches(engine, twin)) == {1}
        change(0.9)
        assert set(assert_matches(engine, twin)) == {2}, "noticed"
        for p in ours[::2]:
            p.data = 1.2 * p.data
        with torch.no_grad():
            for q in theirs[::2]:
                q.mul_(1.2)
        assert engine.update_weights() == 3 and engine.verify_weights().ok
        assert set(assert_matches(engine, twin)) == {3}


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, compiled], ids=["checkpointed", "compiled"])
def test_layers_wrapped_and_unwrapped_while_an_engine_is_there(wrap: Callable[[nn.Module], Any]) -> None:
    model, twin = make_model("llama", num_hidden_layers=2), make_model("llama", num_hidden_layers=2)
    layers = list(model.model.layers)
    with RolloutEngine(model, config=CONFIG) as engine:
        assert set(assert_matches(engine, twin)) == {0}
        within(model, wrap)
        assert engine.update_weights() == 1 and engine.verify_weights().ok
        assert set(assert_matches(engine, twin)) == {1}
        with torch.no_grad():
            for p in (*model.parameters(), *twin.parameters()):
                p.mul_(1.1)
        assert set(assert_matches(engine, twin)) == {2}
        for i, layer in enumerate(layers):
            model.model.layers[i] = layer
        assert engine.update_weights() == 3 and engine.verify_weights().ok
        assert set(assert_matches(engine, twin)) == {3}


def test_of_a_merged_adapter_nothing_is_left() -> None:
    model = lora(make_model("llama")).merge_and_unload()
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_matches(engine, model)


def test_a_model_that_is_compiled_as_torch_does_by_default() -> None:
    model = make_model("llama")
    with RolloutEngine(torch.compile(model), config=CONFIG) as engine:
        assert_matches(engine, model)
