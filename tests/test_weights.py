"""Whose weights the engine runs: the trainer's, where they are and as they are now; and what the trainer keeps."""

import copy
import gc
import math
import random
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache

import numpy as np
import oracle
import pytest
import torch
from accelerate import Accelerator
from families import VOCAB, make_model
from safetensors.torch import load_file, save_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from stoker.engine.device import CpuRuntime
from stoker.engine.fused_layers import FusedDecoderLayer, fuse_layers
from stoker.engine.prefix_cache import PrefixCache
from stoker.kernels.errors import InvalidRequestError, UnsupportedModelError
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams, binding
from stoker.weight_sync.aliased import AliasedSource

CONFIG = EngineConfig(kv_cache_memory="1MiB", block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
PROMPT = [7, 3, 99, 14, 5, 62, 8, 31, 4, 4, 90, 17]
PARAMS = SamplingParams(max_tokens=10, seed=1)


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model("llama")


def tied_model() -> PreTrainedModel:
    return make_model("qwen3")


def assert_matches(engine: RolloutEngine, model: PreTrainedModel) -> list[int]:
    """The engine's log-probabilities are those of the model as it is now. Returns the weight versions."""
    batch = engine.generate_batch([PROMPT], PARAMS)
    batch.raise_for_errors()
    (c,) = batch[0].completions
    expected = oracle.logprobs(model, PROMPT, c.token_ids)
    torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)
    assert len(c.weight_versions) == len(c.token_ids)
    return c.weight_versions


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    ids = torch.randint(1, VOCAB, (2, 16), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids, labels=ids).loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}


def assert_same(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    now = snapshot(model)
    assert now.keys() == before.keys()
    assert [n for n in now if not torch.equal(now[n], before[n])] == []


# -- no second copy ----------------------------------------------------------------------------------------------


@pytest.fixture
def only_new_objects():
    """What there was before is not walked through again and again: a million objects, in the middle of all tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def live_bytes(model: nn.Module) -> int:
    """Of the model's tensors, and of others made since the test began."""
    gc.collect()
    new = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and not o.is_meta]
    tensors = [*model.parameters(), *model.buffers(), *new]
    nbytes, end = 0, 0
    for storage in sorted((t.untyped_storage() for t in tensors), key=lambda s: s.data_ptr()):  # some lie in others
        start = max(end, storage.data_ptr())
        end = max(end, storage.data_ptr() + storage.nbytes())
        nbytes += end - start if end > start else 0
    return nbytes


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "mixtral"])
def test_no_weight_exists_twice(family, only_new_objects):
    model = make_model(family, vocab_size=512, hidden_size=96, intermediate_size=160)
    weights = sum(p.nbytes for p in model.parameters())
    before = live_bytes(model)
    with RolloutEngine(model, config=CONFIG) as engine:
        grown = live_bytes(model) - before - engine.stats().kv_cache_bytes
        assert grown < 0.1 * weights, f"{grown} bytes besides the KV cache, and the weights have {weights}"
        ours = dict(engine._binding.shell.module.named_parameters(remove_duplicate=False))
        theirs = dict(model.named_parameters(remove_duplicate=False))
        assert all(p is theirs[name] for name, p in ours.items())
        assert engine.stats().num_layers == model.config.num_hidden_layers
        engine.generate_batch([PROMPT], PARAMS)
        engine.sleep()  # and gives back the KV cache and attention's workspace, most of which was never written to
        assert live_bytes(model) - before < 0.1 * weights


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "smollm3"])
def test_fused_weights_are_views_of_the_trainers(family):
    model = make_model(family)
    with RolloutEngine(model, config=CONFIG) as engine:
        layers = [m for m in engine._binding.shell.module.modules() if isinstance(m, FusedDecoderLayer)]
        assert len(layers) == engine.stats().fused_layers == model.config.num_hidden_layers
        for fused, layer in zip(layers, model.model.layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            for ours, theirs in (
                (fused.parts.qkv, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (fused.parts.gate_up, (mlp.gate_proj, mlp.up_proj)),
                (fused.parts.out, (attention.o_proj,)),
                (fused.parts.down, (mlp.down_proj,)),
            ):
                for kind in ("weight", "bias"):
                    whole, parts = getattr(ours, kind), [getattr(m, kind) for m in theirs]
                    assert (whole is None) == (parts[0] is None)
                    row = 0
                    for part in parts if whole is not None else ():
                        rows = whole[row : row + part.shape[0]]
                        assert rows.data_ptr() == part.data_ptr() and torch.equal(rows, part)
                        assert part.untyped_storage().nbytes() == part.nbytes  # or savers take it for tied
                        row += part.shape[0]
                    assert whole is None or row == whole.shape[0]


def test_close_gives_every_parameter_a_storage_of_its_own_again():
    model = make_model("llama")
    before = snapshot(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = RolloutEngine(model, config=CONFIG)
    shared = [p for p in model.parameters() if not p.untyped_storage().resizable()]
    assert len(shared) == 3 * (2 * 3 + 2 * 2)  # q, k, v and gate, up of three layers, weights and biases
    model.model.layers[0].mlp.gate_proj.weight.data = model.model.layers[0].mlp.gate_proj.weight.detach().clone()
    engine.update_weights()
    engine.close()
    assert all(p.untyped_storage().resizable() for p in model.parameters())
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(list(model.parameters()))
    assert_same(model, before)
    train(model, optimizer, 2)
    assert all(not torch.equal(before[n], p) for n, p in model.named_parameters())


@pytest.mark.parametrize("how", ["save_state", "save_model", "safetensors"])
def test_checkpoints_written_while_an_engine_is_there_are_complete(how, tmp_path):
    """Savers take tensors of one storage for tied: accelerate drops all but one of them, safetensors refuses."""
    model, file = make_model("llama"), tmp_path / "model.safetensors"
    accelerator = Accelerator(cpu=True)
    with RolloutEngine(model, config=CONFIG) as engine:
        if how == "save_state":
            prepared = accelerator.prepare(model)
            accelerator.save_state(str(tmp_path))
        elif how == "save_model":
            accelerator.save_model(model, str(tmp_path))
        else:
            save_model(model, str(file))
        saved, before = load_file(file), snapshot(model)
        assert saved.keys() == model.state_dict().keys()
        assert all(torch.equal(saved[n], t) for n, t in model.state_dict().items())
        if how == "save_state":
            train(model, torch.optim.SGD(prepared.parameters(), lr=0.1))
            accelerator.load_state(str(tmp_path))
            assert_same(model, before)
            assert_matches(engine, model)


def test_an_engine_after_one_that_was_never_closed(model):
    engine = RolloutEngine(model, config=CONFIG)
    addresses = [p.data_ptr() for p in model.parameters()]
    del engine
    gc.collect()
    with RolloutEngine(model, config=CONFIG) as engine:
        assert [p.data_ptr() for p in model.parameters()] == addresses  # they lie side by side already
        assert len(engine._binding._fused) == 3 * 4  # q, k, v and gate, up of three layers, weights and biases
        assert_matches(engine, model)


@pytest.mark.parametrize("replaced", [0, 1, 2])
def test_rows_of_which_one_lies_elsewhere_now_are_not_taken_for_the_whole(model, replaced):
    """Where the others still lie in what they were laid side by side in."""
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    parts = [model.get_parameter(name) for name in names]
    (whole,) = AliasedSource(model).rehome([tuple(names)]).values()
    assert torch.equal(whole, torch.cat(parts)) and parts[0].data_ptr() == whole.data_ptr()
    assert AliasedSource(model).rehome([tuple(names)])[tuple(names)] is whole
    parts[replaced].data = 1.4 * parts[replaced].data
    assert not torch.equal(whole, torch.cat(parts))
    assert AliasedSource(model).rehome([tuple(names)]) == {}, "they run by themselves"


@pytest.mark.parametrize("replaced", ["q_proj", "k_proj", "v_proj"])
def test_rows_are_laid_side_by_side_again_after_one_was_given_other_memory(model, replaced):
    before = {name: p.shape for name, p in model.named_parameters()}
    with RolloutEngine(model, config=CONFIG) as engine:
        for version in (1, 2, 3):
            weight = model.model.layers[1].self_attn.get_submodule(replaced).weight
            weight.data = 1.1 * weight.data
            assert engine.update_weights() == version
            assert engine.stats().fused_layers == 3 and len(engine._binding._fused) == 3 * 4
            assert set(assert_matches(engine, model)) == {version}
        assert len(engine._binding.source._rehomed) == 3 * (2 * 3 + 2 * 2)
        now = snapshot(model)
    assert all(p.untyped_storage().resizable() for p in model.parameters())
    assert {name: p.shape for name, p in model.named_parameters()} == before
    assert_same(model, now)


def test_several_engines_on_one_model(model):
    first, second = RolloutEngine(model, config=CONFIG), RolloutEngine(model, config=CONFIG)
    addresses = [p.data_ptr() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for engine in (first, second, first):
        assert_matches(engine, model)
        train(model, optimizer)
    assert_matches(second, model)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    first.close()
    assert_matches(second, model)
    assert second.stats().fused_layers == 3
    train(model, optimizer)
    third = RolloutEngine(model, config=CONFIG)
    for engine in (second, third):
        assert_matches(engine, model)
    for engine in (second, third):
        engine.close()
    assert all(p.untyped_storage().resizable() for p in model.parameters())


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


@torch.no_grad()
def in_place(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.v_proj.weight.mul_(1.5)


def through_data(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.up_proj.weight.data.mul_(-1.1)


@torch.no_grad()
def one_element(model: PreTrainedModel) -> None:
    model.model.norm.weight.data[3] += 2.0


def load_state_dict(model: PreTrainedModel) -> None:
    model.load_state_dict(make_model("llama", seed=5).state_dict())


def assigning_state_dict(model: PreTrainedModel) -> None:
    model.load_state_dict(make_model("llama", seed=5).state_dict(), assign=True)


def set_data(model: PreTrainedModel) -> None:
    for p in model.parameters():
        p.data = 1.1 * p.data


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

    monkeypatch.setattr(binding, "runtime_for", Chosen)
    monkeypatch.setattr(binding, "fuse_layers", fuse)
    with RolloutEngine(model, config=CONFIG) as engine:
        set_data(model)
        engine.update_weights()
        set_data(model)
        assert set(assert_matches(engine, model)) == {2}
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
        compiled._orig_mod = make_model("llama", num_hidden_layers=2)
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
        assert engine.update_weights(version=10) == engine.weight_version == engine.stats().weight_version == 10
        assert set(assert_matches(engine, model)) == {10}
        for version in (10, 3, 0):
            with pytest.raises(InvalidRequestError, match=rf"version={version} is not above the present version 10"):
                engine.update_weights(version=version)
        in_place(model)
        assert set(assert_matches(engine, model)) == {11}
        assert engine.update_weights(version=12) == 12
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


# -- the trainer is left alone -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral"])
def test_rollouts_write_to_nothing_of_the_trainer(family):
    model = make_model(family)
    model.train()
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    calls = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    loss_of(model).backward()
    calls.clear()
    attributes = {
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "training": [m.training for m in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "objects": [id(p) for p in model.parameters()],
        "modules": [id(m) for m in model.modules()],
        "generation": model.generation_config.to_dict(),
        "dictionaries": [sorted(vars(m)) for m in model.modules()],
    }
    before = snapshot(model)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    grad = torch.is_grad_enabled()

    with RolloutEngine(model, config=CONFIG) as engine:
        versions = [p._version for p in (*model.parameters(), *model.buffers())]
        for _ in range(2):
            engine.generate_batch([PROMPT, PROMPT[:5]] * 3, SamplingParams(n=2, max_tokens=8, top_p=0.9)).to_tensors(0)
            engine.sleep()
            engine.wake_up()
            engine.update_weights()
        assert [p._version for p in (*model.parameters(), *model.buffers())] == versions
        assert_same(model, before)

    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert calls == [] and torch.is_grad_enabled() == grad
    assert_same(model, before)
    assert model.config.to_dict() == attributes["config"]
    assert model.config._attn_implementation == attributes["attention"]
    assert [m.training for m in model.modules()] == attributes["training"]
    assert [p.requires_grad for p in model.parameters()] == attributes["requires_grad"]
    for p, g in zip(model.parameters(), attributes["grads"], strict=True):
        assert p.grad is g or torch.equal(p.grad, g)
    assert [id(p) for p in model.parameters()] == attributes["objects"]
    assert [id(m) for m in model.modules()] == attributes["modules"]
    assert model.generation_config.to_dict() == attributes["generation"]
    assert [sorted(vars(m)) for m in model.modules()] == attributes["dictionaries"]
    loss_of(model).backward()
    assert calls


@pytest.mark.parametrize("fields", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_training_is_bitwise_what_it_is_without_the_engine(family, fields):
    results = []
    for with_engine in (False, True):
        model = make_model(family).train()
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **fields)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
        engine = RolloutEngine(model, config=CONFIG) if with_engine else None
        for step in range(5):
            if engine is not None:
                assert set(assert_matches(engine, model.eval())) == {step}
                model.train()
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        if engine is not None:
            engine.close()
        results.append((loss.item(), snapshot(model), copy.deepcopy(optimizer.state_dict()["state"])))
    (loss, weights, state), (other_loss, other_weights, other_state) = results
    assert loss == other_loss
    assert all(torch.equal(weights[n], other_weights[n]) for n in weights)
    assert all(torch.equal(state[i][k], other_state[i][k]) for i in state for k in state[i])


def test_a_rollout_between_forward_and_backward(model):
    plain = make_model("llama")
    loss_of(plain).backward()
    with RolloutEngine(model, config=CONFIG) as engine:
        loss = loss_of(model)
        assert_matches(engine, model)
        loss.backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_whatever_grad_mode_the_caller_is_in(model, mode):
    """An engine made, used, put to sleep or told of new weights in one mode works in every other."""
    with mode():
        engine = RolloutEngine(model, config=CONFIG)
        assert_matches(engine, model)
    penalised = SamplingParams(n=3, max_tokens=8, repetition_penalty=1.2, temperature=0)
    with mode():
        inside = engine.generate_batch([PROMPT], penalised)
    outside = engine.generate_batch([PROMPT], penalised)
    assert inside.outputs[0].completions == outside.outputs[0].completions
    train(model, torch.optim.SGD(model.parameters(), lr=0.01))
    set_data(model)
    with mode():
        engine.sleep()
        engine.wake_up()
        engine.update_weights()
    for _ in range(2):
        engine.generate_batch([PROMPT], SamplingParams(n=3, max_tokens=8)).raise_for_errors()
        assert_matches(engine, model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert_matches(engine, model)
    with mode():
        engine.close()
    train(model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert not any(p.is_inference() for p in model.parameters())


def test_a_model_of_inference_tensors():
    with torch.inference_mode():
        model = make_model("llama")
        engine = RolloutEngine(model, config=CONFIG)
    assert_matches(engine, model)
    with torch.inference_mode():
        in_place(model)
    assert set(assert_matches(engine, model)) == {1}
    engine.close()


def test_autocast_and_default_dtype_of_the_caller_change_nothing(model):
    with RolloutEngine(model, config=CONFIG) as engine:
        expected = engine.generate_batch([PROMPT], PARAMS)[0].completions[0]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16), RolloutEngine(model, config=CONFIG) as engine:
            inside = engine.generate_batch([PROMPT], PARAMS)[0].completions[0]
    finally:
        torch.set_default_dtype(before)
    assert inside.token_ids == expected.token_ids and inside.logprobs == expected.logprobs


def test_checkpoints_of_a_model_under_an_engine(model, tmp_path):
    with RolloutEngine(model, config=CONFIG) as engine:
        train(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        before = snapshot(model)
        model.save_pretrained(tmp_path)
        assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), before)
        assert (tmp_path / "model.safetensors").stat().st_size < 1.1 * sum(p.nbytes for p in model.parameters()) + 8192

        torch.save(model.state_dict(), tmp_path / "state.pt")
        other = make_model("llama", seed=4)
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert_same(other, before)

        torch.save(model, tmp_path / "model.pt")
        assert_same(torch.load(tmp_path / "model.pt", weights_only=False), before)

        twin = copy.deepcopy(model)
        assert_same(twin, before)
        train(twin, torch.optim.AdamW(twin.parameters(), lr=0.01))
        assert_same(model, before)
        assert_matches(engine, model)
        with RolloutEngine(twin, config=CONFIG) as theirs:
            assert_matches(theirs, twin)


# -- from_pretrained ---------------------------------------------------------------------------------------------


@cache
def saved_model(family: str) -> PreTrainedModel:
    return make_model(family)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("shard", ["1GB", "50KB"])
def test_from_pretrained(family, shard, tmp_path):
    model = saved_model(family)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "50KB")
    with RolloutEngine.from_pretrained(str(tmp_path), config=CONFIG) as engine:
        assert engine.tokenizer is None
        assert_matches(engine, model)
        loaded = engine._binding.source.module
        assert_same(loaded, snapshot(model))
        assert not loaded.training
        tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert tied == model.config.tie_word_embeddings == (family == "qwen3")
        assert engine.stats().fused_layers == 3


def test_from_pretrained_in_another_dtype(tmp_path):
    model = saved_model("llama")
    model.save_pretrained(tmp_path)
    config = EngineConfig(dtype="bfloat16", kv_cache_memory="1MiB")
    with RolloutEngine.from_pretrained(tmp_path, config=config) as engine:
        loaded = engine._binding.source.module
        assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
        assert engine.stats().kv_block_bytes == 16 * 3 * 2 * 2 * 16 * 2
        (c,) = engine.generate_batch([PROMPT], PARAMS)[0].completions
        assert math.isclose(c.logprobs[0], oracle.logprobs(model, PROMPT, c.token_ids)[0], abs_tol=0.2)
