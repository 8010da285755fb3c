"""Weights in fp8 that are made of a mirror's: it keeps no plain copy of them, and they pass through it as often as they change."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_model
from mirrored import step
from rounding import assert_rounded, in_fp8, make, names_of
from sender import Counted, over_a_pipe, sending

from stoker.engine.layers import fused_forms
from stoker.kernels.errors import WeightsMismatchError
from stoker.kernels.host_memory import OffloadableMemory
from stoker.weight_sync.mirror import Mirror


def test_a_mirror_of_another_dtype_and_its_sleep() -> None:
    model = make_model("qwen3")
    with in_fp8(model, dtype="float64") as engine:
        assert_rounded(engine, model)
        step(model)
        assert_rounded(engine, model)  # which nobody announced
        step(model)
        engine.update_weights()
        for level in (1, 2, 3):
            with engine.sleeping(level):
                step(model)
            engine.update_weights()
            assert_rounded(engine, model)
            assert engine.verify_weights().ok


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma4", "qwen3_5"])
def test_a_mirror_has_no_plain_copy_of_what_is_rounded(family: str, device: str) -> None:
    model = make(family).bfloat16().to(device)
    with in_fp8(model, dtype="float32", kv_cache_memory="8MiB") as engine:
        rounded_names = names_of(engine)
        mirror = engine._binding.source.mirror  # type: ignore[attr-defined]
        assert engine._binding.source.passing == rounded_names
        assert mirror._room.untyped_storage().nbytes() == 0
        sizes = {name: t.numel() * 4 for name, t in model.named_parameters()}
        matrices = sum(sizes[name] for name in rounded_names)
        buffers = sum(b.numel() * 4 for b in model.buffers())
        assert engine.stats().mirror_bytes < 1.2 * (sum(sizes.values()) + buffers - matrices) + matrices // 2
        # Of what is in no memory there are checksums nonetheless, and what differs is named.
        name = sorted(rounded_names)[0]
        model.get_parameter(name).data[0] *= 3
        assert engine.verify_weights().mismatched == (name,)
        assert_rounded(engine, copy.deepcopy(model).cpu().float())
        for level in (2, 3):
            with engine.sleeping(level):
                assert not engine._binding.derived.resident  # type: ignore[union-attr]
            assert_rounded(engine, copy.deepcopy(model).cpu().float())
        engine._binding.derived.by_name[name].made[1][0] *= 2  # type: ignore[union-attr]
        report = engine.verify_weights()
        assert report.mismatched == (name,) and report.checked == len({*sizes, *dict(model.named_buffers())})
        model.get_parameter(name).data[0] *= 2  # only what has changed is rounded again
        engine.update_weights()
        _, made = engine._binding.derived.by_name[name]  # type: ignore[union-attr]
        assert engine.stats().last_update_bytes == sum(t.nbytes for t in made)
        assert engine.verify_weights().ok


def test_a_mirror_takes_weights_from_elsewhere(tmp_path: Path) -> None:
    model, other, third = (make_model("llama", seed=seed) for seed in (0, 3, 4))
    with in_fp8(model, dtype="float64") as engine:
        engine.update_weights(dict(other.named_parameters()))
        assert_rounded(engine, other)
        third.save_pretrained(tmp_path)
        engine.update_weights(tmp_path)
        assert_rounded(engine, third)
        with pytest.raises(WeightsMismatchError, match="missing model.layers.1.mlp.up_proj.weight"):
            engine.update_weights(
                {n: p for n, p in other.named_parameters() if n != "model.layers.1.mlp.up_proj.weight"}
            )
        assert_rounded(engine, third)
        engine.update_weights()
        assert_rounded(engine, model)


@pytest.mark.parametrize("family", ["llama", "gemma4"])  # the latter with layers that attend to others' keys
def test_a_mirror_keeps_the_weights_of_layers_that_cannot_be_fused(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agrees, make_memory = fused_forms._Trial.agrees, OffloadableMemory.__init__
    monkeypatch.setattr(fused_forms._Trial, "agrees", lambda trial, form: form.index != 1 and agrees(trial, form))

    def of_nan(memory: OffloadableMemory, *arguments: Any) -> None:
        make_memory(memory, *arguments)
        memory.data.fill_(
            255
        )  # as fresh memory may be: layers are compared with their fused form on the model's numbers

    monkeypatch.setattr(OffloadableMemory, "__init__", of_nan)
    model = make_model(family).to(torch.float64 if family == "gemma4" else torch.float32)
    with in_fp8(model, dtype="float32" if family == "gemma4" else "float64") as engine:
        assert engine.stats().fused_layers == engine.stats().num_layers // 2
        assert engine._binding.source.passing == names_of(engine)
        assert not any(".layers.1." in name for name in names_of(engine))
        assert_rounded(engine, model)
        step(model)
        assert_rounded(engine, model)
        assert engine.verify_weights().ok


def test_what_passes_through_a_mirror_comes_with_every_transfer() -> None:
    """Its numbers are nowhere that those of a sender could be compared with; what is kept comes once."""
    model, other = make_model("llama"), make_model("llama", seed=3)
    with in_fp8(model, dtype="float64") as engine:
        here, there = over_a_pipe()
        counted = Counted(here)
        for expected in ({*dict(other.named_parameters())}, {*engine._binding.source.passing}):
            with sending(there, dict(other.named_parameters()), 2**20) as sent:
                engine.update_weights(counted)
                sent.result(60)
            assert counted.coming == expected
            assert_rounded(engine, other)


@pytest.mark.parametrize("level", [2, 3])
def test_a_mirror_of_layers_that_share_their_weights(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tied is kept whole, and does not pass through: after waking it is rounded anew all the same."""
    restore = OffloadableMemory.restore

    def as_fresh_memory_may_be(memory: OffloadableMemory) -> None:
        memory.release()  # an engine that wakes has kept nothing of these
        restore(memory)
        memory.data.fill_(255)

    monkeypatch.setattr(OffloadableMemory, "restore", as_fresh_memory_may_be)
    model = make_model("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with in_fp8(model, dtype="float64") as engine:
        kept = names_of(engine) - engine._binding.source.passing
        assert len(kept) == 6 and all(".mlp." in name for name in kept)
        assert_rounded(engine, model)
        engine.sleep(level)
        engine.wake_up()
        assert_rounded(engine, model)
        assert engine.verify_weights().ok
        step(model)
        assert_rounded(engine, model)


def test_weights_that_are_not_kept_in_one_place_do_not_lie_side_by_side() -> None:
    """One that lies beside others already, that passes through, or that is tied."""
    shapes, dtypes = dict.fromkeys("abcd", torch.Size((2, 3))), dict.fromkeys("abcd", torch.float32)
    groups = [("a", "b"), ("b", "c"), ("c", "d"), ("c", "tied")]
    mirror = Mirror(shapes, dtypes, {"tied": "a"}, groups, torch.device("cpu"), [frozenset("d")], lambda *_: None)
    assert mirror.fused.keys() == {("a", "b")}
    mirror.write({name: torch.full((2, 3), float(i)) for i, name in enumerate("abc")})
    assert mirror.fused["a", "b"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2 and mirror.tensors["c"].eq(2).all()
