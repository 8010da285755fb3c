"""Whatever the trainer does to its weights is noticed, and every token carries the version it was sampled under."""

import time
from collections.abc import Callable
from contextlib import contextmanager

import oracle
import pytest
import torch
from families import make_model
from small_training import CONFIG, PARAMS, PROMPT, assert_matches, in_place, loss_of, set_data, train
from torch import nn
from transformers import PreTrainedModel

from stoker.engine.cache.prefix_cache import PrefixCache
from stoker.engine.device import CpuRuntime
from stoker.engine.layers.fused_layers import fuse_layers
from stoker.kernels.errors import InvalidRequestError, UnsupportedModelError
from stoker.rollout import RolloutEngine, SamplingParams, shell_builder
from stoker.weight_sync.aliased_source import AliasedSource


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model("llama")


def tied_model() -> PreTrainedModel:
    return make_model("qwen3")


# -- changes are noticed -----------------------------------------------------------------------------------------


def optimizer_step(make: Callable[..., torch.optim.Optimizer], **fields) -> Callable[[PreTrainedModel], None]:
    return lambda model: train(model, make(model.parameters(), lr=0.05, **fields))


class Replacing(torch.optim.Optimizer):
    """Gives every parameter new memory at every step."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


def through_data(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.up_proj.weight.data.mul_(-1.1)


@torch.no_grad()
def one_element(model: PreTrainedModel) -> None:
    model.model.norm.weight.data[3] += 2.0


def load_state_dict(model: PreTrainedModel) -> None:
    model.load_state_dict(make_model("llama", seed=5).state_dict())


def assigning_state_dict(model: PreTrainedModel) -> None:
    model.load_state_dict(make_model("llama", seed=5).state_dict(), assign=True)


def replace_parameters(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight = nn.Parameter(1.2 * layer.self_attn.q_proj.weight.detach())
        layer.mlp.down_proj.weight = nn.Parameter(1.2 * layer.mlp.down_proj.weight.detach())


@torch.no_grad()
def set_data_of_one(model: PreTrainedModel) -> None:
    """Of those that lie side by side; the first of them stays where it is."""
    for layer in model.model.layers:
        for linear in (layer.self_attn.k_proj, layer.mlp.up_proj):
            linear.weight.data = 1.4 * linear.weight.data


def replace_a_layer(model: PreTrainedModel) -> None:
    other = make_model("llama", seed=8)
    model.model.layers[1] = other.model.layers[1]
    model.lm_head = other.lm_head


def replace_a_buffer(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.7


def swap_in_a_flat_buffer(model: PreTrainedModel) -> None:
    """As a sharding library lays parameters out, and then updates them behind autograd's back."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    start = 0
    for p in model.parameters():
        p.data = flat[start : start + p.numel()].view(p.shape)
        start += p.numel()
    flat.mul_(1.1)


def vector_to_parameters(model: PreTrainedModel) -> None:
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(0.9 * flat, model.parameters())


@torch.inference_mode()
def under_inference_mode(model: PreTrainedModel) -> None:
    model.model.embed_tokens.weight.mul_(0.5)


CHANGES = {
    "adamw": optimizer_step(torch.optim.AdamW, foreach=False),
    "adamw foreach": optimizer_step(torch.optim.AdamW, foreach=True),
    "adamw fused": optimizer_step(torch.optim.AdamW, fused=True),
    "sgd foreach": optimizer_step(torch.optim.SGD, foreach=True),
    "sgd fused": optimizer_step(torch.optim.SGD, fused=True),
    "in place": in_place,
    "through .data": through_data,
    "one element": one_element,
    "load_state_dict": load_state_dict,
    "load_state_dict(assign=True)": assigning_state_dict,
    ".data = ...": set_data,
    ".data = ... of one among several": set_data_of_one,
    "an optimizer that replaces .data": optimizer_step(Replacing),
    "parameters replaced": replace_parameters,
    "a layer replaced": replace_a_layer,
    "a buffer replaced": replace_a_buffer,
    "a flat buffer": swap_in_a_flat_buffer,
    "vector_to_parameters": vector_to_parameters,
    "under inference_mode": under_inference_mode,
    "there and back again": lambda model: model.to(torch.float64).to(torch.float32),
}
SAME_VALUES = {"there and back again"}


@pytest.mark.parametrize("explicit", [False, True], ids=["noticed", "told"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_engine_runs_the_new_weights(model, change, explicit):
    with RolloutEngine(model, config=CONFIG) as engine:
        assert set(assert_matches(engine, model)) == {0}  # and fills the prefix cache
        before = oracle.logits(model, PROMPT, [1])
        CHANGES[change](model)
        changed = (before - oracle.logits(model, PROMPT, [1])).abs().max() > 0.01
        assert changed == (change not in SAME_VALUES)
        if explicit:
            assert engine.update_weights() == 1
        assert set(assert_matches(engine, model)) == {1}
        assert set(assert_matches(engine, model)) == {1}, "a change is counted once"
        assert engine.stats().prefix_cache_hit_tokens > 0
        train(model, torch.optim.AdamW(model.parameters(), lr=0.05, fused=True))
        assert set(assert_matches(engine, model)) == {2}


def test_layers_are_fused_on_the_models_device_which_need_not_be_the_current_one(model, monkeypatch):
    """At first, and when parameters that were moved are bound again: Triton launches on the current device."""
    chosen, seen = [], []

    class Chosen(CpuRuntime):
        @contextmanager
        def chosen(self):
            chosen.append(self.device)
            yield
            chosen.pop()

    def fuse(*args):
        seen.append(tuple(chosen))
        return fuse_layers(*args)

    monkeypatch.setattr(shell_builder, "runtime_for", Chosen)
    monkeypatch.setattr(shell_builder, "fuse_layers", fuse)
    with RolloutEngine(model, config=CONFIG) as engine:
        set_data(model)
        engine.update_weights()
        set_data(model)  # nothing was sampled yet from what version 1 was a moment ago
        assert set(assert_matches(engine, model)) == {1}
    assert seen == [(torch.device("cpu"),)] * 3 and not chosen


def test_nothing_changed_is_no_new_version(model):
    with RolloutEngine(model, config=CONFIG) as engine:
        for _ in range(3):
            assert set(assert_matches(engine, model)) == {0}
            loss_of(model).backward()
            model.zero_grad()
            model.train()
            model.requires_grad_(False).requires_grad_(True)
            model.to("cpu").to(torch.float32)
            model.tie_weights()
            model.state_dict()
        assert engine.generate_batch([PROMPT], PARAMS)[0].cached_tokens > 0


def test_rotary_frequencies_that_change_in_place(model):
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_matches(engine, model)
        with torch.no_grad():
            model.model.rotary_emb.inv_freq.mul_(0.7)
        assert set(assert_matches(engine, model)) == {1}


@pytest.mark.parametrize("updated", ["never", "before", "after"])
def test_rotary_frequencies_that_change_in_place_before_anything_runs(model, updated):
    with RolloutEngine(model, config=CONFIG) as engine:
        if updated == "before":
            engine.update_weights()
        with torch.no_grad():
            model.model.rotary_emb.inv_freq.mul_(0.7)
        if updated == "after":
            engine.update_weights()
        assert set(assert_matches(engine, model)) == {int(updated != "never")}


def test_tying_and_untying():
    model = tied_model()
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_matches(engine, model)
        model.lm_head.weight = nn.Parameter(-model.lm_head.weight.detach())
        assert set(assert_matches(engine, model)) == {1}
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(0.5)
        assert set(assert_matches(engine, model)) == {2}
        model.lm_head.weight = model.model.embed_tokens.weight
        assert set(assert_matches(engine, model)) == {3}
        assert engine._binding.shell.module.lm_head.weight is model.model.embed_tokens.weight
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert set(assert_matches(engine, model)) == {4}


def test_another_model_inside_the_wrapper():
    first, second = make_model("llama"), make_model("llama", seed=3)
    compiled = torch.compile(first)
    with RolloutEngine(compiled, config=CONFIG) as engine:
        assert_matches(engine, first)
        compiled._orig_mod = second
        assert set(assert_matches(engine, second)) == {1}
        compiled._orig_mod = make_model("llama", num_hidden_layers=3)
        for call in (lambda: engine.generate_batch([PROMPT]), engine.update_weights) * 2:
            with pytest.raises(UnsupportedModelError, match="another shape"):
                call()
        compiled._orig_mod = first
        assert set(assert_matches(engine, first)) == {2}
    for module in (first, second):
        assert all(p.untyped_storage().resizable() for p in module.parameters())


def test_without_the_checksums_a_fused_step_would_go_unnoticed(model, monkeypatch):
    """The inverse test: what guards the prefix cache is what the tests above see."""
    monkeypatch.setattr(AliasedSource, "checksums", lambda self: [])
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_matches(engine, model)
        train(model, torch.optim.AdamW(model.parameters(), lr=0.05, fused=True))
        with pytest.raises(AssertionError, match="not close"):
            assert_matches(engine, model)


def test_without_invalidation_the_cache_would_serve_stale_keys(model, monkeypatch):
    monkeypatch.setattr(PrefixCache, "clear", lambda self: None)
    monkeypatch.setattr(PrefixCache, "root", staticmethod(lambda version, adapter=None: b""))
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_matches(engine, model)
        in_place(model)
        with pytest.raises(AssertionError, match="not close"):
            assert_matches(engine, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.uint8])
def test_checksums_see_every_element(dtype):
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(2))
    flat = torch.randn(3 * 5 + 2).mul(100).to(dtype)
    module.register_buffer("odd", flat[1:16].view(3, 5))  # neither starts nor ends at a whole word
    module.register_buffer("strided", flat[2:14].view(3, 4).t())
    module.register_buffer("scalar", torch.tensor(1, dtype=dtype))
    module.register_buffer("empty", torch.empty(0, dtype=dtype))
    source = AliasedSource(module)
    source.bind()
    seen = source.checksums()
    assert len(seen) == 4 and source.checksums() == seen
    for tensor in (module.odd, module.strided.t(), module.scalar):
        for element in tensor.view(-1):
            before = element.clone()
            element.copy_(~before if dtype == torch.bool else before + 1)
            assert source.checksums() != seen
            element.copy_(before)
    assert source.checksums() == seen and not source.moved(module)


# -- versions ----------------------------------------------------------------------------------------------------


def test_every_token_carries_its_version(model):
    with RolloutEngine(model, config=CONFIG) as engine:
        assert set(assert_matches(engine, model)) == {0}
        began = time.perf_counter()
        assert engine.update_weights(version=10) == engine.weight_version == engine.stats().weight_version == 10
        assert 0 < engine.stats().last_update_seconds <= time.perf_counter() - began
        assert set(assert_matches(engine, model)) == {10}
        for version in (10, 3, 0):
            with pytest.raises(InvalidRequestError, match=rf"version={version} is not above the present version 10"):
                engine.update_weights(version=version)
        with pytest.raises(InvalidRequestError, match="does not fit the 64 bits of a token's weight version"):
            engine.update_weights(version=2**63)
        in_place(model)
        assert set(assert_matches(engine, model)) == {11}
        assert engine.update_weights(version=torch.tensor(12)) == 12
        tensors = engine.generate_batch([PROMPT] * 2, SamplingParams(max_tokens=3)).to_tensors(0)
        assert tensors.weight_versions.tolist() == [[12] * 3] * 2


def test_an_update_while_asleep(model):
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_matches(engine, model)
        engine.sleep()
        set_data(model)
        assert engine.update_weights() == 1
        in_place(model)  # nothing was sampled yet from what version 1 was a moment ago
        engine.wake_up()
        assert set(assert_matches(engine, model)) == {1}
