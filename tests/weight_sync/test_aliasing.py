"""No weight exists twice: parameters laid side by side in the trainer's model, and models from a folder."""

import gc
import math
import weakref
from dataclasses import replace
from functools import cache

import oracle
import pytest
import torch
from families import make_model
from small_training import CONFIG, PARAMS, PROMPT, assert_matches, assert_same, snapshot, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from stoker.engine.layers.fused_decoder import FusedDecoderLayer
from stoker.rollout import EngineConfig, RolloutEngine, WeightsMovedError
from stoker.weight_sync.aliased_source import _WHOLES, AliasedSource


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture
def only_new_objects():
    """What there was before is not walked through again and again: a million objects, in the middle of all tests."""
    gc.collect()
    gc.freeze()  # for good: so it is with all that is imported


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
            (qkv, out), (gate_up, down) = (branch.linears for branch in fused.branches)
            for ours, theirs in (
                (qkv, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (gate_up, (mlp.gate_proj, mlp.up_proj)),
                (out, (attention.o_proj,)),
                (down, (mlp.down_proj,)),
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
    assert len(shared) == 2 * (2 * 3 + 2 * 2)  # q, k, v and gate, up of both layers, weights and biases
    model.model.layers[0].mlp.gate_proj.weight.data = model.model.layers[0].mlp.gate_proj.weight.detach().clone()
    engine.update_weights()
    engine.close()
    assert all(p.untyped_storage().resizable() for p in model.parameters())
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(list(model.parameters()))
    assert_same(model, before)
    train(model, optimizer, 2)
    assert all(not torch.equal(before[n], p) for n, p in model.named_parameters())


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_close_that_breaks_off_can_be_tried_again(model, error, monkeypatch):
    before, clone, calls = snapshot(model), torch.Tensor.clone, []

    def failing(tensor, **options):
        calls.append(tensor.shape)
        if len(calls) == 5:
            raise error
        return clone(tensor, **options)

    engine = RolloutEngine(model, config=CONFIG)
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(torch.Tensor, "clone", failing)
        engine.close()
    engine.close()
    assert all(p.untyped_storage().resizable() for p in model.parameters())
    assert_same(model, before)


def test_a_close_needs_no_memory_for_a_second_model(model, monkeypatch):
    """What parameters lay side by side in goes with the last of them, and not at the end."""
    gc.collect()
    before, clone, left = len(_WHOLES), torch.Tensor.clone, []

    def cloned(tensor, **options):
        left.append(len(_WHOLES) - before)
        return clone(tensor, **options)

    engine = RolloutEngine(model, config=CONFIG)
    monkeypatch.setattr(torch.Tensor, "clone", cloned)
    engine.close()
    assert left[0] > 2 and left[-1] == 1 and left == sorted(left, reverse=True)


def test_an_engine_after_one_that_was_never_closed(model):
    engine = RolloutEngine(model, config=CONFIG)
    addresses = [p.data_ptr() for p in model.parameters()]
    del engine
    gc.collect()
    with RolloutEngine(model, config=CONFIG) as engine:
        assert [p.data_ptr() for p in model.parameters()] == addresses  # they lie side by side already
        assert len(engine._binding.wholes) == 2 * 4  # q, k, v and gate, up of both layers, weights and biases
        assert_matches(engine, model)


@pytest.mark.parametrize("replaced", [0, 1, 2])
def test_rows_of_which_one_lies_elsewhere_now_are_not_taken_for_the_whole(model, replaced):
    """Where the others still lie in what they were laid side by side in."""
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    parts = [model.get_parameter(name) for name in names]
    (whole,) = AliasedSource(model).rehome([tuple(names)]).values()
    assert torch.equal(whole, torch.cat(parts)) and parts[0].data_ptr() == whole.data_ptr()
    assert AliasedSource(model).rehome([tuple(names)])[tuple(names)] is whole
    assert AliasedSource(model).rehome([tuple(names[:2])]) == {}, "a part of it is not the whole"
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
            assert engine.stats().fused_layers == 2 and len(engine._binding.wholes) == 2 * 4
            assert set(assert_matches(engine, model)) == {version}
        assert len(engine._binding.source._rehomed) == 2 * (2 * 3 + 2 * 2)
        now = snapshot(model)
    assert all(p.untyped_storage().resizable() for p in model.parameters())
    assert {name: p.shape for name, p in model.named_parameters()} == before
    assert_same(model, now)


def test_parameters_that_the_trainer_has_replaced_are_let_go(model):
    """But for one that somebody still has: it gets a storage of its own again."""
    with RolloutEngine(model, config=CONFIG) as engine:
        kept = model.model.layers[0].self_attn.q_proj.weight
        before = [weakref.ref(p) for p in model.parameters()]
        model.load_state_dict({name: 1.1 * tensor for name, tensor in model.state_dict().items()}, assign=True)
        engine.update_weights()
        assert_matches(engine, model)
        gc.collect()
        assert_matches(engine, model)
        assert [p for ref in before if (p := ref()) is not None] == [kept]
        assert not kept.untyped_storage().resizable()
    assert kept.untyped_storage().resizable()


@pytest.mark.parametrize("change", ["dtype", "columns", "buffer"])
def test_weights_that_do_not_go_together_are_not_laid_side_by_side(change):
    flat, other, own = torch.randn(12, 6), torch.randn(12, 6), torch.randn(8, 6)
    model = nn.ModuleDict({"a": nn.Linear(6, 4, bias=False), "b": nn.Linear(6, 8, bias=False)})
    model["a"].weight.data = flat[:4].clone() if change == "dtype" else flat[:4]
    model["b"].weight.data = {"dtype": own.bfloat16(), "columns": flat[4:8].view(8, 3), "buffer": other[4:]}[change]
    before = [(p.data_ptr(), p.dtype) for p in model.parameters()]
    assert AliasedSource(model).rehome([("a.weight", "b.weight")]) == {}
    assert [(p.data_ptr(), p.dtype) for p in model.parameters()] == before


@pytest.mark.parametrize("linear", ["self_attn.k_proj", "mlp.up_proj"])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_biases_that_lie_apart_where_the_weights_lie_side_by_side(model, linear, quantization):
    """One matmul of these would leave the biases out, which does not show while they are zeros."""
    bias = model.model.layers[0].get_submodule(linear).bias
    bias.data = torch.zeros(3 + bias.numel())[3:]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    config = replace(CONFIG, quantization=quantization)
    with RolloutEngine(model, config=config) as engine:
        assert engine.stats().fused_layers == 2
        before = engine.generate_batch([PROMPT], PARAMS)[0].completions[0].logprobs
        with torch.no_grad():
            bias.add_(1.0)
        after = engine.generate_batch([PROMPT], PARAMS)[0].completions[0].logprobs
        assert after != before
        if quantization is None:
            assert_matches(engine, model)


def test_weights_that_other_processes_have_open_stay_where_they_are(model):
    model.share_memory()
    addresses = [p.data_ptr() for p in model.parameters()]
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_matches(engine, model)
        assert engine.stats().fused_layers == 2
    assert [p.data_ptr() for p in model.parameters()] == addresses and all(p.is_shared() for p in model.parameters())


@pytest.mark.parametrize("kind", ["with more behind it", "column by column"])
def test_a_weight_that_does_not_fill_its_memory_row_by_row_stays_where_it_is(model, kind):
    """A sharding library's buffer with padding, say, whose other views would not follow the weight."""
    weights = [p for p in model.parameters() if p.dim() == 2]
    for p in weights:
        padded = torch.cat([p.detach().flatten(), p.new_zeros(8)])
        p.data = padded[:-8].view(p.shape) if kind == "with more behind it" else p.detach().T.contiguous().T
    places = [(p.data_ptr(), p.stride()) for p in weights]
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_matches(engine, model)
        assert [(p.data_ptr(), p.stride()) for p in weights] == places
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight.mul_(1.5)
        assert_matches(engine, model)


@pytest.mark.parametrize("by_column", [False, True])
def test_weights_that_follow_each_other_in_a_librarys_buffer(by_column):
    """One matmul of a layer's takes these rows from the middle of it, and no columns for rows."""
    model = make_model("llama", attention_bias=False, mlp_bias=False)  # or biases would lie between
    weights = [p for p in model.parameters() if p.dim() == 2]
    flat = torch.cat([(p.detach().T if by_column else p.detach()).flatten() for p in weights])
    for p, part in zip(weights, flat.split([p.numel() for p in weights]), strict=True):
        p.data = part.view(p.T.shape).T if by_column else part.view(p.shape)
    places = [(p.data_ptr(), p.stride()) for p in weights]
    with RolloutEngine(model, config=CONFIG) as engine:
        assert engine.stats().fused_layers == 2
        assert len(engine._binding.wholes) == (0 if by_column else 2 * 2)  # q, k, v and gate, up
        assert_matches(engine, model)
        flat.mul_(1.1)
        assert_matches(engine, model)
        assert [(p.data_ptr(), p.stride()) for p in weights] == places


def test_what_a_library_laid_elsewhere_since_is_left_there(model):
    """Given memory of its own when the engine is closed, it would not follow the library's buffer any more."""
    with RolloutEngine(model, config=CONFIG):
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(vector, model.parameters())  # as views
    vector.mul_(1.1)
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), vector)


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
    assert second.verify_weights().ok
    assert [p.data_ptr() for p in model.parameters()] == addresses, "what the second runs on lies where it lay"
    assert_matches(second, model)
    assert second.stats().fused_layers == 2 and second.weight_version == 1
    train(model, optimizer)
    third = RolloutEngine(model, config=CONFIG)
    for engine in (second, third):
        assert_matches(engine, model)
    for engine in (second, third):
        engine.close()
    assert all(p.untyped_storage().resizable() for p in model.parameters())


# -- from_pretrained ---------------------------------------------------------------------------------------------


@cache
def saved_model(family: str) -> PreTrainedModel:
    return make_model(family)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma4", "deepseek_v32"])
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
        assert engine.stats().fused_layers == model.config.num_hidden_layers


def test_from_pretrained_in_another_dtype(tmp_path):
    model = saved_model("llama")
    model.save_pretrained(tmp_path)
    config = EngineConfig(dtype="bfloat16", kv_cache_memory="1MiB")
    with RolloutEngine.from_pretrained(tmp_path, config=config) as engine:
        loaded = engine._binding.source.module
        assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
        assert engine.stats().kv_block_bytes == 16 * 2 * 2 * 2 * 16 * 2
        (c,) = engine.generate_batch([PROMPT], PARAMS)[0].completions
        assert math.isclose(c.logprobs[0], oracle.logprobs(model, PROMPT, c.token_ids)[0], abs_tol=0.2)


def test_what_an_exception_keeps_alive_uses_no_weights():
    """An error of a look at the model holds what the engine ran on then; the weights are given back all the same."""
    model = make_model("llama")
    engine = RolloutEngine(model, config=EngineConfig(kv_cache_memory="1MiB"))
    model.model.norm.double()  # all others lie where they lay
    with pytest.raises(WeightsMovedError) as raised:
        engine.update_weights()
    model.model.norm.float()
    engine.update_weights()
    assert not all(p.untyped_storage().resizable() for p in model.parameters()), "they lie side by side"
    engine.close()
    assert all(p.untyped_storage().resizable() for p in model.parameters())
    assert raised.value.__traceback__ is not None


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_a_look_that_failed_has_moved_is_given_back(goes_on, monkeypatch):
    """Be it lost with what moved it, or kept alive by the error."""
    model = make_model("llama")
    engine = RolloutEngine(model, config=EngineConfig(kv_cache_memory="1MiB"))
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(model.model.layers[0].self_attn, name).weight
        weight.data = weight.detach().clone()

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory") as raised:
        patch.setattr(engine._binding.adapters, "look", fails)
        engine.generate_batch([PROMPT])
    if goes_on:
        engine.generate_batch([PROMPT])
    assert not all(p.untyped_storage().resizable() for p in model.parameters()), "they lie side by side"
    engine.close()
    assert all(p.untyped_storage().resizable() for p in model.parameters())
    assert raised.value.__traceback__ is not None


def test_weights_are_given_back_when_a_copy_takes_their_place(tmp_path):
    """As of those that are not among the shards of a model that is sharded in part."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = make_model("llama")
        with RolloutEngine(model, config=EngineConfig(kv_cache_memory="1MiB")) as engine:
            fully_shard(model.model.norm, mesh=init_device_mesh("cpu", (1,)))
            engine.update_weights()
            assert engine.verify_weights().source == "mirror"
            assert all(p.untyped_storage().resizable() for p in model.parameters() if not isinstance(p, DTensor))
    finally:
        torch.distributed.destroy_process_group()
