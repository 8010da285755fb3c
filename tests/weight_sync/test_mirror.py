"""The engine's own copy of the weights: another dtype than the trainer's, what is moved, kept, given back."""

from __future__ import annotations

import oracle
import pytest
import torch
from checksummed import checksum
from families import make_model
from mirrored import PARAMS, PROMPT, SMALL, assert_matches, copies, engine_on, step
from peft import LoraConfig, get_peft_model
from torch import nn

from stoker.engine.layers.fused_decoder import FusedDecoderLayer
from stoker.kernels import host_memory
from stoker.rollout import (
    EngineConfig,
    EngineStateError,
    RolloutEngine,
    UnsupportedModelError,
    WeightsMismatchError,
)
from stoker.weight_sync.mirror import Mirror
from stoker.weight_sync.mirrored_source import MirroredSource
from stoker.weight_sync.source import source_for

# -- another dtype ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "mixtral", "deepseek_v3", "deepseek_v32", "gemma4", "llama4"]
)
def test_the_engine_runs_a_cast_of_the_model(family, tmp_path):
    """In bfloat16 its log-probabilities are those of the cast model, buffers and kept parameters as they are."""
    model = make_model(family)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)  # which may keep routers in fp32
    dtypes = {name: parameter.dtype for name, parameter in loaded.named_parameters()}
    with engine_on(model, "bfloat16") as engine:
        ours = copies(engine)
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        assert ours.keys() >= parameters.keys() | buffers.keys()
        assert all(torch.equal(ours[n], p.to(dtypes[n])) and ours[n].dtype == dtypes[n] for n, p in parameters.items())
        assert all(torch.equal(ours[n], b) and ours[n].dtype == b.dtype for n, b in buffers.items())
        (c,) = engine.generate_batch([PROMPT], PARAMS)[0].completions
        expected = oracle.logprobs(model, PROMPT, c.token_ids)
        assert (torch.tensor(c.logprobs).double() - expected).abs().median() < 0.1
        assert engine.verify_weights().ok
        assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_what_the_model_keeps_in_float32_is_kept():
    model = make_model("llama")
    model._keep_in_fp32_modules_strict = {"norm"}  # as transformers sets it when a model is made
    source = source_for(model, torch.bfloat16)
    kept = {n for n, t in source.tensors().items() if t.dtype == torch.float32}
    assert kept == {n for n, _ in model.named_parameters() if "norm" in n} | dict(model.named_buffers()).keys()
    assert source.dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_weights_lie_side_by_side_in_the_mirror_and_nowhere_twice(family):
    model = make_model(family)
    places = [p.data_ptr() for p in model.parameters()]
    with engine_on(model) as engine:
        layers = [m for m in engine._binding.shell.module.modules() if isinstance(m, FusedDecoderLayer)]
        assert len(layers) == len(model.model.layers)
        for fused, layer in zip(layers, model.model.layers, strict=True):
            attention = layer.self_attn
            whole = torch.cat([m.weight for m in (attention.q_proj, attention.k_proj, attention.v_proj)])
            assert torch.equal(fused.branches[0].linears[0].weight, whole.double())
        weights = 8 * sum(p.numel() for p in model.parameters())
        assert weights <= engine.stats().mirror_bytes < 1.2 * weights
        storages = {t.untyped_storage().data_ptr() for t in copies(engine).values()}
        assert len(storages) == 1
        assert [p.data_ptr() for p in model.parameters()] == places, "the trainer's tensors stay where they are"


def test_mixed_dtypes_run_as_they_are_or_in_the_one_asked_for():
    model = make_model("llama")
    model.model.norm.to(torch.bfloat16)
    with RolloutEngine(model, config=EngineConfig(**SMALL)) as engine:
        assert engine.verify_weights().source == "aliased"
        assert_matches(engine, model)
    model = make_model("llama").bfloat16()
    model.model.norm.float()
    with pytest.raises(UnsupportedModelError, match=r"several dtypes.*set EngineConfig\(dtype"):
        RolloutEngine(model, config=EngineConfig(**SMALL))
    with engine_on(model, "bfloat16") as engine:
        model.model.norm.bfloat16()
        assert_matches(engine, model, atol=0.15)


# -- updates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [False, True])
def test_only_what_changed_is_moved(told):
    model = make_model("llama")
    with engine_on(model) as engine:
        assert assert_matches(engine, model) == {0}
        before = {n: t.clone() for n, t in copies(engine).items()}
        weight = model.model.layers[1].self_attn.v_proj.weight
        weight.data.mul_(1.5)
        if told:
            assert engine.update_weights() == 1
            assert engine.stats().last_update_bytes == 8 * weight.numel()
        assert assert_matches(engine, model) == {1}
        assert assert_matches(engine, model) == {1} and engine.stats().prefix_cache_hit_tokens > 0
        assert [n for n, t in copies(engine).items() if not torch.equal(t, before[n])] == [
            "model.layers.1.self_attn.v_proj.weight"
        ]
        step(model, fused=True)
        if told:
            engine.update_weights()
            assert engine.stats().last_update_bytes == 8 * sum(p.numel() for p in model.parameters())
        assert assert_matches(engine, model) == {2}


@pytest.mark.parametrize("kind", ["data", "parameter", "assign", "half", "layer"])
def test_whatever_the_trainer_does_to_its_tensors_is_followed(kind):
    model, other = make_model("llama"), make_model("llama", seed=4)
    with engine_on(model) as engine:
        layer, theirs = model.model.layers[0], other.model.layers[0]
        if kind == "data":
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                p.data = q.data.clone()
        elif kind == "parameter":
            layer.mlp.up_proj.weight = nn.Parameter(theirs.mlp.up_proj.weight.detach().clone())
        elif kind == "assign":
            model.load_state_dict(other.state_dict(), assign=True)
        elif kind == "half":
            model.bfloat16().float()
        else:
            model.model.layers[0] = theirs
        assert engine.update_weights() == 1
        assert assert_matches(engine, model) == {1}
        model.lm_head = nn.Linear(48, 64, bias=False)
        for call in (engine.update_weights, lambda: engine.generate_batch([PROMPT])):
            with pytest.raises(UnsupportedModelError, match=r"another shape.*lm_head.weight"):
                call()
        assert engine.weight_version == 1


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_that_are_tied_or_no_more_are_refused_with_the_remedy(tied):
    """A mirror has a place for each; ``load_state_dict(assign=True)`` makes two of one."""
    model = make_model("qwen3")
    if not tied:
        model.lm_head.weight = nn.Parameter(1.1 * model.lm_head.weight.detach())
    with engine_on(model) as engine:
        assert assert_matches(engine, model) == {0}
        kept = model.lm_head.weight
        if tied:
            model.load_state_dict({n: 1.1 * t for n, t in model.state_dict().items()}, assign=True)
        else:
            model.lm_head.weight = model.model.embed_tokens.weight
        for call in (engine.update_weights, lambda: engine.generate_batch([PROMPT])):
            with pytest.raises(UnsupportedModelError, match=r"shares other tensors .*lm_head.weight.*tie_weights\(\)"):
                call()
        if tied:
            model.tie_weights()
        else:
            model.lm_head.weight = kept
        assert engine.update_weights() == 1
        assert assert_matches(engine, model) == {1}


def test_a_mirror_stays_one_whatever_dtype_the_trainer_has_for_a_while():
    """Or a trainer that casts back would have taken away what the engine borrowed."""
    model = make_model("llama")
    with engine_on(model) as engine:
        for version, dtype in enumerate((torch.float64, torch.float32, torch.float64), start=1):
            step(model)
            model.to(dtype)
            assert engine.update_weights() == version and engine.verify_weights().source == "mirror"
            assert assert_matches(engine, model) == {version}
        assert not {p.data_ptr() for p in model.parameters()} & {t.data_ptr() for t in copies(engine).values()}


def test_the_trainer_is_never_written_to():
    model = make_model("llama")
    before = {n: (checksum(p), p._version, p.data_ptr()) for n, p in model.named_parameters()}
    with engine_on(model, "bfloat16") as engine:
        for _ in range(20):
            engine.generate_batch([PROMPT] * 2, PARAMS)
            engine.update_weights()
            engine.verify_weights()
    assert {n: (checksum(p), p._version, p.data_ptr()) for n, p in model.named_parameters()} == before


# -- values that cannot be taken -------------------------------------------------------------------------------------


def test_values_beyond_the_range_of_float16_are_refused_by_name():
    model = make_model("llama")
    with engine_on(model, "float16") as engine:
        before = {n: t.clone() for n, t in copies(engine).items()}
        model.model.layers[1].mlp.down_proj.weight.data[3, 5] = 7e4
        model.model.embed_tokens.weight.data.mul_(2)
        for call in (engine.update_weights, lambda: engine.generate_batch([PROMPT])):
            with pytest.raises(
                WeightsMismatchError, match=r"^model.layers.1.mlp.down_proj.weight has values up to 7e\+04"
            ):
                call()
        assert engine.weight_version == 0
        assert all(torch.equal(t, before[n]) for n, t in copies(engine).items()), "nothing was written"
        model.model.layers[1].mlp.down_proj.weight.data[3, 5] = 6e4
        assert engine.update_weights() == 1
        assert engine.verify_weights().ok


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_weights_that_are_not_finite_are_refused_where_asked(value, dtype):
    model = make_model("llama")
    with engine_on(model, dtype, check_finite_weights=True) as engine:
        weight = model.model.layers[1].self_attn.k_proj.weight
        engine.generate_batch([PROMPT], PARAMS)
        kept, weight.data[1, 2] = float(weight.data[1, 2]), value
        with pytest.raises(WeightsMismatchError, match=r"^model.layers.1.self_attn.k_proj.weight holds NaN or Inf"):
            engine.update_weights()
        weight.data[1, 2] = kept
        assert engine.generate_batch([PROMPT], PARAMS)[0].cached_tokens > 0 == engine.weight_version, "as it was"
        weight.data[1, 2] = 0
        assert engine.update_weights() == 1


def test_weights_from_elsewhere_in_8_bits_are_looked_at_too():
    model = make_model("llama")
    name = "model.layers.1.self_attn.k_proj.weight"
    state = {n: t.to(torch.float8_e4m3fn) if t.dim() > 1 else t for n, t in model.state_dict().items()}
    with engine_on(model, "bfloat16", check_finite_weights=True) as engine:
        assert engine.update_weights(state) == 1
        assert torch.equal(copies(engine)[name], state[name].bfloat16())
        spoilt = torch.full_like(state[name], torch.nan)
        with pytest.raises(WeightsMismatchError, match=f"{name} holds NaN or Inf"):
            engine.update_weights(state | {name: spoilt})


# -- memory of its own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [2**28, 1000])
def test_a_mirror_gives_its_memory_back_and_takes_it_again(piece, monkeypatch):
    monkeypatch.setattr(host_memory, "_PINNED_BYTES", piece)
    model = make_model("llama")
    with engine_on(model) as engine:
        mirror: Mirror = engine._binding.source.mirror
        expected = engine.generate_batch([PROMPT], PARAMS)[0].completions[0].logprobs
        objects = {n: (id(t), t.clone()) for n, t in mirror.tensors.items()}
        storage = next(iter(mirror.tensors.values())).untyped_storage()
        for _ in range(2):
            mirror.offload()
            assert not mirror.resident and storage.nbytes() == 0
            assert max(len(part) for part in mirror._host) <= piece
            assert sum(len(part) for part in mirror._host) == mirror.nbytes
            with pytest.raises(EngineStateError, match=r"weights are asleep: call wake_up\(\['weights'\]\)"):
                engine.update_weights()
            mirror.restore()
            assert mirror.resident and mirror.complete
            assert all(id(t) == objects[n][0] and torch.equal(t, objects[n][1]) for n, t in mirror.tensors.items())
            assert engine.generate_batch([PROMPT], PARAMS)[0].completions[0].logprobs == expected
        mirror.release()
        assert storage.nbytes() == 0 and not mirror.complete
        mirror.restore()
        next(iter(mirror.tensors.values())).fill_(float("nan"))
        assert engine.update_weights() == 1
        assert engine.stats().last_update_bytes >= 8 * sum(p.numel() for p in model.parameters()), "all of it anew"
        assert engine.generate_batch([PROMPT], PARAMS)[0].completions[0].logprobs == expected


def test_memory_is_given_away_when_nothing_under_way_can_touch_it(monkeypatch):
    """Whatever stream it was launched under: the device is waited for before, and after copies to and from the host."""
    with engine_on(make_model("llama"), "float64") as engine:
        mirror: Mirror = engine._binding.source.mirror
        seen: list[tuple[bool, bool]] = []
        wait = lambda device=None: seen.append((mirror.resident, mirror._host is not None))  # noqa: E731
        monkeypatch.setattr(torch.cpu, "synchronize", wait)
        mirror.offload()
        assert seen == [(True, False), (True, False)]
        mirror.restore()
        assert seen[2:] == [(True, True)]
        mirror.release()
        assert seen[3:] == [(True, False)]


def test_released_weights_are_not_generated_from():
    model = make_model("llama")
    with engine_on(model, "float64") as engine:
        source: MirroredSource = engine._binding.source
        source.overwritten()  # so that nothing is taken from the model on its own
        source.mirror.release()
        source.mirror.restore()
        with pytest.raises(EngineStateError, match=r"incomplete.*update_weights"):
            engine.generate_batch([PROMPT])
        engine.update_weights()
        assert_matches(engine, model)


@pytest.mark.parametrize("told", [False, True])
def test_weights_that_were_dropped_are_taken_from_the_model_anew(told):
    model = make_model("llama")
    with engine_on(model) as engine:
        assert assert_matches(engine, model) == {0}
        engine.sleep(level=3)
        step(model)
        engine.wake_up()
        for t in copies(engine).values():
            t.view(torch.uint8).fill_(255)  # as fresh memory may be
        if told:
            assert engine.update_weights() == 1
        assert assert_matches(engine, model) == {1} and engine.verify_weights().ok


def test_a_model_that_is_as_it_was_takes_the_place_of_weights_from_elsewhere():
    model, other = make_model("llama"), make_model("llama", seed=5)
    with engine_on(model) as engine:
        assert assert_matches(engine, model) == {0}
        assert engine.update_weights(other.state_dict()) == 1
        assert assert_matches(engine, other) == {1}
        assert engine.update_weights() == 2
        assert assert_matches(engine, model) == {2} and engine.verify_weights().ok


@pytest.mark.parametrize("way", ["mirror", "fp8", "dora of a mirror", "copies of an adapter"])
@pytest.mark.parametrize("level", [2, 3])
def test_weights_that_are_others_while_it_wakes_and_the_old_ones_after(way, level):
    """As those of an average that is evaluated meanwhile. What was made of them at waking is not what is to run."""
    model = make_model("llama")
    if "of a" in way:
        config = LoraConfig(target_modules=["q_proj", "up_proj"], r=2, use_dora="dora" in way, init_lora_weights=False)
        model = get_peft_model(model, config)
    part = "lora" if way.startswith("copies") else ""
    own = {n: p.detach().clone() for n, p in model.named_parameters() if part in n}
    average = {n: p * (1 + 0.2 * torch.rand_like(p)) for n, p in own.items()}
    fields = {"quantization": "fp8"} if way == "fp8" else {}
    with engine_on(model, "auto" if way == "fp8" else "float64", **fields) as engine:
        (before,) = engine.generate_batch([PROMPT], PARAMS)[0].completions
        engine.sleep(level)
        model.load_state_dict(average, strict=False)
        engine.wake_up()
        model.load_state_dict(own, strict=False)
        (after,) = engine.generate_batch([PROMPT], PARAMS)[0].completions
        assert after.token_ids == before.token_ids and after.logprobs == pytest.approx(before.logprobs, abs=1e-6)
        assert engine.verify_weights().ok
        engine.sleep(2)
        engine.wake_up()
        version = engine.weight_version
        engine.generate_batch([PROMPT], PARAMS)
        assert engine.weight_version == version, "nothing was changed"


@pytest.mark.parametrize("dtype", ["auto", "float64"])
def test_weights_from_elsewhere_that_break_off_while_they_are_written(dtype, monkeypatch):
    """Nothing runs on a part of them and a part of the old ones."""
    model, copy_all = make_model("llama"), torch._foreach_copy_
    with engine_on(model, dtype) as engine:
        assert assert_matches(engine, model) == {0}
        old = {name: p.detach().clone() for name, p in model.named_parameters()}

        def half(targets, sources, *rest):
            copy_all(targets[::2], sources[::2], *rest)
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
            patch.setattr(torch, "_foreach_copy_", half)
            engine.update_weights({name: 1.5 * p for name, p in old.items()})
        if dtype == "auto":  # they are the trainer's own tensors
            with pytest.raises(EngineStateError, match=r"incomplete since an update failed .* call update_weights\(\)"):
                engine.generate_batch([PROMPT], PARAMS)
            model.model.norm.variance_epsilon *= 2  # so that the model is bound again, as it is
            with pytest.raises(EngineStateError, match="incomplete since an update failed"):
                engine.generate_batch([PROMPT], PARAMS)
            engine.update_weights(old)
        assert max(assert_matches(engine, model)) > 0 and engine.verify_weights().ok


# -- with other engines, and asleep ----------------------------------------------------------------------------------


def test_two_engines_on_one_model_one_of_them_in_another_dtype():
    model = make_model("llama")
    with RolloutEngine(model, config=EngineConfig(**SMALL)) as first, engine_on(model) as second:
        for version in range(3):
            assert assert_matches(first, model) == {version}
            assert assert_matches(second, model) == {version}
            step(model)
        first.close()
        assert assert_matches(second, model) == {3}


def test_an_update_while_asleep():
    model = make_model("llama")
    with engine_on(model) as engine:
        engine.sleep()
        step(model)
        assert engine.update_weights() == 1
        engine.wake_up()
        assert assert_matches(engine, model) == {1}
