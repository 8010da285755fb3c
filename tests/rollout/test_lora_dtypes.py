"""Adapters of several dtypes beside each other: all run in the widest, which changes none of their numbers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from adapted import (
    CONFIG,
    GREEDY,
    assert_kernels_find,
    assert_like_peft,
    lora,
    peft_model,
    shake,
    state_dict,
    tokens,
    two_adapters,
)
from families import draw
from peft import PeftModel
from pretend_device import STATIC, build

from stoker.rollout import LIVE, RolloutEngine, SamplingParams, UnsupportedModelError, binding

CHOICES = ["default", None, "other", "default"]
ONE_BY_ONE: dict[str, Any] = {"decode_window": 1, "max_num_seqs": 2}
LONG = draw(3, 23)  # five full blocks and some tokens


def in_dtype(model: PeftModel, adapter: str, dtype: torch.dtype) -> None:
    for name, parameter in model.named_parameters():
        if f".{adapter}." in name:
            parameter.data = parameter.data.to(dtype)


def as_wide(model: PeftModel) -> PeftModel:
    return copy.deepcopy(model).float()


def of_two_dtypes() -> PeftModel:
    """As TRL leaves a QLoRA model that came with an adapter: what is trained is in bf16, and the reference is not."""
    model = two_adapters()
    in_dtype(model, "default", torch.bfloat16)
    return model


@pytest.mark.parametrize("dtype", ["auto", "float64"])
@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("tell", [True, False])
def test_both_run_and_follow_the_trainer(dtype: str, slots: int, tell: bool) -> None:
    model = of_two_dtypes()
    dtypes = [p.dtype for p in model.parameters()]
    with RolloutEngine(model, config=replace(CONFIG, dtype=dtype, max_loras=slots)) as engine:
        for seed in (3, 4):
            assert_like_peft(engine, as_wide(model), CHOICES)
            assert engine.verify_weights().ok
            shake(model, seed)
            if tell:
                engine.update_weights()
        model.base_model.set_adapter(["default", "other"])
        both = as_wide(model)
        with RolloutEngine(both, config=CONFIG) as wide:
            assert tokens(engine) == tokens(wide)
        assert [p.dtype for p in model.parameters()] == dtypes


@pytest.mark.parametrize("how", ["tensors", "model"])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}])
def test_one_that_comes_in_another_dtype(how: str, options: dict[str, Any]) -> None:
    """In a wider or a narrower one, while others have slots, and where none of them is the live model's."""
    model, other = peft_model(**options), peft_model(seed=2, **options)
    in_dtype(model, "default", torch.bfloat16)
    half = copy.deepcopy(other)
    in_dtype(half, "default", torch.float16)
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.generate_batch([[7]], GREEDY)  # it has a slot, in its own dtype
        for name, each in (("other", other), ("half", half)):
            source = each if how == "model" else (state_dict(each), each.peft_config["default"])
            engine.load_adapter(name, source)
            rows = ["default", None, name, name]
            assert_like_peft(engine, as_wide(model), rows, others={name: as_wide(each)})
        engine.unload_adapter("half")
        engine.unload_adapter("other")
        shake(model, seed=3)
        assert_like_peft(engine, as_wide(model), ["default", None, "default", None])
        model.add_adapter("more", lora(), autocast_adapter_dtype=False)
        in_dtype(model, "more", torch.bfloat16)
        tokens(engine)
        if not options:  # of one dtype all are read where they lie
            matrices = [p for n, p in model.named_parameters() if "lora_" in n and ".default." in n]
            assert_kernels_find(engine, engine._adapters._known["default"].slot, matrices)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
def test_what_kernels_read_as_fp32_is_in_fp32(options: dict[str, Any]) -> None:
    model = peft_model("qwen2", target_modules=["q_proj", "o_proj"], **options).bfloat16()
    with RolloutEngine(model, config=CONFIG) as engine:
        tokens(engine)
        tables = {t for group, _ in engine._binding.shell.lora._adapted.values() for t in group.tables}
        weights = [w for table in tables for by_slot in table.weights for w in by_slot.values()]
        assert {w.a.dtype for w in weights if w.rank} == {torch.bfloat16}
        found = [t for w in weights for t in (w.gain, w.shift) if t is not None]
        assert found and all(t.dtype == torch.float32 and t.dim() == 1 for t in found)


def test_a_load_that_is_refused_leaves_all_as_they_were() -> None:
    model, other = of_two_dtypes(), peft_model("qwen3")
    in_dtype(other, "default", torch.float64)
    with RolloutEngine(model, config=CONFIG) as engine:
        before = tokens(engine, adapter=CHOICES)
        for source in (other, ({n: t.long() for n, t in state_dict(model).items()}, model.peft_config["default"])):
            with pytest.raises(UnsupportedModelError, match=r"for another base|is in torch.int64, .*: cast it"):
                engine.load_adapter("more", source)
            assert tokens(engine, adapter=CHOICES) == before


def test_deterministic_mode_refuses_a_second_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what is loaded would change the bits of those that are there."""
    monkeypatch.setattr(binding, "ops_for", lambda *_, **__: STATIC)
    model, other = peft_model(), peft_model(seed=2)
    in_dtype(other, "default", torch.bfloat16)
    with RolloutEngine(model, config=replace(CONFIG, deterministic=True)) as engine:
        before = tokens(engine, adapter=LIVE)
        with pytest.raises(
            UnsupportedModelError, match=r"'other' .*bfloat16 and torch.float32: not with deterministic"
        ):
            engine.load_adapter("other", other)
        assert tokens(engine) == before and engine.adapters == ("default",)


def _half_and_wide(family: str = "llama") -> tuple[PeftModel, PeftModel]:
    """Models with an adapter in bf16, and with one in fp32, over the same base."""
    half, wide = (peft_model(family, seed) for seed in (1, 2))
    in_dtype(half, "default", torch.bfloat16)
    return half, wide


def _run(engine: RolloutEngine, adapter: str | None) -> tuple[int, list[float]]:
    """How many tokens of a prompt were cached, and the log-probabilities of what follows."""
    (output,) = engine.generate_batch([LONG], GREEDY, adapter=adapter)
    return output.cached_tokens, output.completions[0].logprobs


def _cached(engine: RolloutEngine, *adapters: str | None) -> list[int]:
    return [_run(engine, adapter)[0] for adapter in adapters]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_prompt_computed_in_another_dtype_is_computed_again(family: str) -> None:
    """Not that of the base, nor of an adapter that runs as before."""
    model, wide = _half_and_wide(family)
    third = copy.deepcopy(model)
    with RolloutEngine(model, config=CONFIG) as engine, RolloutEngine(model, config=CONFIG) as both:
        both.load_adapter("wide", wide)
        alone, beside = _run(engine, "default"), _run(both, "default")
        assert alone[0] == beside[0] == 0 and alone[1] != beside[1]
        assert _cached(engine, "default", None) == [20, 0]
        engine.load_adapter("wide", wide)  # its neighbour runs in fp32 from now on
        assert _run(engine, "default") == beside
        assert _cached(engine, "default", None, "wide") == [20, 20, 0]
        engine.load_adapter("wide again", wide)  # which changes nothing for the others
        assert _cached(engine, "default", None, "wide") == [20, 20, 20]
        engine.unload_adapter("wide")
        engine.unload_adapter("wide again")
        engine.load_adapter("third", third)  # all of them are in bf16 now
        assert _run(engine, "default") == alone
        assert _cached(engine, "default", None) == [20, 20]
        assert engine.weight_version == 0


def test_requests_under_way_go_on_and_lend_nothing_of_the_other_dtype() -> None:
    """What they have of it stays theirs, as at an update; the base's is lent as before."""
    model, wide = _half_and_wide()
    with RolloutEngine(model, config=replace(CONFIG, decode_window=1)) as engine:
        handles = [
            engine.submit(LONG, SamplingParams(max_tokens=12, seed=1), adapter=each) for each in ("default", None)
        ]
        for _ in range(4):
            engine.wait(handles, share=0)
        engine.load_adapter("wide", wide)
        assert _cached(engine, "default", None) == [0, 20]
        turns = [LONG + handle.result().completions[0].token_ids for handle in handles]
        params = SamplingParams(max_tokens=1)
        turned = engine.generate_batch([[*turn, 5] for turn in turns], params, adapter=["default", None])
        assert [output.cached_tokens for output in turned] == [20, 32]  # the one's prompt again, the other's all
        engine.core.scheduler.check()


@pytest.mark.parametrize("how", ["", "preempted", "launched ahead"])
def test_a_sample_that_begins_later_shares_nothing_of_the_other_dtype(how: str) -> None:
    """With those of its group that began before, nor with what these leave behind."""
    model, wide = _half_and_wide()
    config = replace(CONFIG, **ONE_BY_ONE)
    params = SamplingParams(n=3, max_tokens=12, seed=1)
    with RolloutEngine(model, config=config) as both:
        both.load_adapter("wide", wide)
        expected = both.generate_batch([LONG], params, adapter="default")[0].completions[2]
    ahead = how == "launched ahead"
    with build(model, **ONE_BY_ONE) if ahead else RolloutEngine(model, config=config) as engine:
        handle = engine.submit(LONG, params, adapter="default")
        for _ in range(4):
            engine.wait([handle], share=0)
        assert [r.pending for r in engine.core.under_way] == [ahead, ahead, 0]
        engine.load_adapter("wide", wide)
        if how == "preempted":
            engine.core.scheduler.preempt_all()
        found = handle.result().completions[2]
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_scores_under_way_are_all_of_one_dtype() -> None:
    model, wide = _half_and_wide()
    sequences = [draw(seed, 40) for seed in range(4)]
    with (
        RolloutEngine(model, config=CONFIG) as other,
        RolloutEngine(model, config=replace(CONFIG, max_num_batched_tokens=50)) as engine,
    ):
        other.load_adapter("wide", wide)

        def load(row: int, _: object) -> None:
            if row == 0:  # and the second is under way
                assert [r.computed for r in engine.core.under_way] == [11, 0, 0]
                engine.load_adapter("wide", wide)

        found = engine.score(sequences, adapter="default", on_scored=load)
        expected = other.score(sequences, adapter="default")
        for mine, theirs in zip(found[1:], expected[1:], strict=True):
            torch.testing.assert_close(mine.logprobs, theirs.logprobs, atol=1e-4, rtol=0)
