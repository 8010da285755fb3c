"""Parameters that a user has made one, or laid in one memory: the engine follows them, and they are trained as without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from families import make_model
from small_training import CONFIG, assert_matches, assert_same, snapshot, train
from torch import nn
from transformers import PreTrainedModel

from stoker.rollout import RolloutEngine
from stoker.weight_sync.aliased_source import AliasedSource

Change = Callable[[PreTrainedModel], None]


def key_of_another_layer(model: PreTrainedModel) -> None:
    first, second, *_ = model.model.layers
    second.self_attn.k_proj.weight = first.self_attn.k_proj.weight


def key_of_the_layer_after(model: PreTrainedModel) -> None:
    first, second, *_ = model.model.layers
    first.self_attn.k_proj.weight = second.self_attn.k_proj.weight


def values_that_are_keys(model: PreTrainedModel) -> None:
    attention = model.model.layers[0].self_attn
    attention.v_proj.weight = attention.k_proj.weight


def gate_that_is_up(model: PreTrainedModel) -> None:
    mlp = model.model.layers[1].mlp
    mlp.gate_proj.weight = mlp.up_proj.weight


def memory_of_keys_and_values(model: PreTrainedModel) -> None:
    attention = model.model.layers[0].self_attn
    attention.v_proj.weight.data = attention.k_proj.weight.data


def memory_of_keys_of_two_layers(model: PreTrainedModel) -> None:
    first, second, *_ = model.model.layers
    first.self_attn.k_proj.weight.data = second.self_attn.k_proj.weight.data


def layers_of_one_mlp(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


@pytest.mark.parametrize("early", [True, False], ids=["before the engine", "under the engine"])
@pytest.mark.parametrize(
    "share",
    [
        key_of_another_layer,
        key_of_the_layer_after,
        values_that_are_keys,
        gate_that_is_up,
        memory_of_keys_and_values,
        memory_of_keys_of_two_layers,
        layers_of_one_mlp,
    ],
)
def test_shared_parameters(share: Change, early: bool) -> None:
    model, alone = make_model("llama"), make_model("llama")
    share(alone)
    if early:
        share(model)
    engine = RolloutEngine(model, config=CONFIG)
    assert_matches(engine, model)
    if not early:
        share(model)
        assert_matches(engine, model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone))
    for told in (False, True):
        train(model, ours)
        train(alone, theirs)
        if told:
            engine.update_weights()
        assert_matches(engine, model)
        assert engine.verify_weights().ok
        assert_same(model, snapshot(alone))
    engine.close()
    train(model, ours)
    train(alone, theirs)
    assert_same(model, snapshot(alone))


@pytest.mark.parametrize("given", ["state_dict", "detached", "another model"])
def test_tensors_in_the_memory_of_parameters_stay_there(given: str) -> None:
    """Whoever has them reads what is trained, as without an engine; and so does one on the model that was given them."""
    model, other = make_model("llama"), make_model("llama", seed=3)

    def give() -> list[torch.Tensor]:
        if given == "another model":
            other.load_state_dict(model.state_dict(), assign=True)
            return list(other.parameters())
        return list(model.state_dict().values()) if given == "state_dict" else [p.detach() for p in model.parameters()]

    held = give()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RolloutEngine(other if given == "another model" else model, config=CONFIG) as engine:
        train(model, optimizer)
        assert all(map(torch.equal, held, model.parameters()))
        assert_matches(engine, model)
    with RolloutEngine(model, config=CONFIG):
        held = give()
        model.model.layers[0].self_attn.q_proj.weight.data = torch.zeros(1).expand_as(held[1]).contiguous()
    train(model, optimizer)
    moved = [a.data_ptr() != b.data_ptr() for a, b in zip(held, model.parameters(), strict=True)]
    assert moved.count(True) == 1, "the one that was replaced"


def test_layers_whose_weights_are_all_their_own_stay_fused_beside_one_that_shares(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="stoker")
    model = make_model("llama")
    with RolloutEngine(model, config=CONFIG) as engine:
        before = len(engine._binding.wholes)
        values_that_are_keys(model)
        assert_matches(engine, model)
        assert len(engine._binding.wholes) == before - 1
    told = [m for m in caplog.messages if "side by side" in m]
    assert told and all(m.startswith(f"1 of {before} groups of weights, model.layers.0.self_attn.q_proj") for m in told)


def test_a_parameter_of_two_groups_stays_in_the_first() -> None:
    """Also when it is looked at again, as a parameter that may be moved: the first group's tensor would be left behind."""
    model = nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in "abc"})
    source, first = AliasedSource(model), ("a.weight", "b.weight")
    for _ in range(2):
        fused = source.rehome([first, ("b.weight", "c.weight")])
        assert fused.keys() == {first}
        assert fused[first].data_ptr() == model.get_parameter("a.weight").data_ptr()
        assert fused[first][2:].data_ptr() == model.get_parameter("b.weight").data_ptr()
