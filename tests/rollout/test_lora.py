"""Adapters on a live PEFT model: what the engine samples and scores is what PEFT's own forward gives."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from adapted import (
    CONFIG,
    GREEDY,
    PROMPTS,
    assert_like_peft,
    expected_tokens,
    greedy_tokens,
    lora,
    peft_model,
    running,
    shake,
    tokens,
    two_adapters,
)
from safetensors.torch import load_file

from stoker.kernels.ops import REFERENCE
from stoker.kernels.reference import lora_stacks
from stoker.rollout import (
    LIVE,
    EngineConfig,
    RolloutEngine,
    SamplingParams,
    UnsupportedModelError,
    binding,
    shell_builder,
)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen3", {"use_rslora": True, "r": 16}),
        ("gemma2", {"use_dora": True}),
        ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}),
        ("llama", {"use_dora": True, "target_modules": "all-linear"}),
        ("qwen3", {"rank_pattern": {"layers.1.self_attn.q_proj": 9}, "alpha_pattern": {"layers.0.mlp.gate_proj": 31}}),
        ("llama", {"modules_to_save": ["lm_head", "embed_tokens"]}),
        ("cohere2", {"modules_to_save": ["norm"], "target_modules": ["q_proj"], "exclude_modules": r".*layers\.0.*"}),
        ("gemma2", {"modules_to_save": ["model.norm"], "target_modules": ["v_proj", "down_proj"]}),
        ("gemma3", {}),
        ("granite", {"target_modules": ["o_proj", "down_proj", "gate_proj"]}),
        ("olmo2", {}),
        ("glm4", {"target_modules": ["k_proj", "o_proj", "gate_up_proj"]}),
        ("phi", {"target_modules": "all-linear", "modules_to_save": ["layers.1.input_layernorm"], "use_dora": True}),
        ("gpt_neox", {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]}),
        # In what is fused of a layer, and in what is not.
        ("glm4_moe", {"target_modules": ["q_proj", "o_proj"], "modules_to_save": ["shared_experts"]}),
        ("mistral", {"target_modules": ["lm_head", "k_proj"]}),
        ("gpt_oss", {"target_modules": ["q_proj", "o_proj"]}),
        # Whose weights lie column by column.
        ("gpt2", {"target_modules": ["c_attn"]}),
        ("gpt2", {"target_modules": ["c_attn", "c_fc", "c_proj"], "use_rslora": True, "lora_bias": True}),
        ("gpt2", {"target_modules": ["c_attn", "c_fc", "c_proj"], "use_dora": True, "bias": "lora_only"}),
        ("gpt2", {"target_modules": ["c_proj", "wte"], "rank_pattern": {"mlp.c_proj": 9}, "bias": "all"}),
        ("gpt2", {"target_modules": ["c_fc"], "use_dora": True, "modules_to_save": ["ln_1", "wte"]}),
    ],
)
def test_like_peft(family: str, options: dict[str, Any]) -> None:
    model = peft_model(family, **options)
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_like_peft(engine, model, ["default", None, "default", None])
        assert tokens(engine) == expected_tokens(model) != expected_tokens(model, None)


def test_layers_that_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_builder, "fuse_layers", lambda *_: (0, False))
    monkeypatch.setattr("stoker.engine.adapters.lora._NORM_COLUMNS", 24)  # as where weights are wide
    for family, targets in (("llama", "all-linear"), ("gpt2", ["c_attn", "c_fc", "c_proj"])):
        model = peft_model(family, target_modules=targets, use_dora=True)
        with RolloutEngine(model, config=CONFIG) as engine:
            assert engine.stats().fused_layers == 0
            assert_like_peft(engine, model, ["default", None, "default", None])


def test_several_adapters_in_one_batch() -> None:
    model = two_adapters()
    prompts = [*PROMPTS, *PROMPTS[:3]]
    with RolloutEngine(model, config=CONFIG) as engine:
        assert engine.stats().fused_layers == 2
        assert_like_peft(engine, model, ["other", None, "default", "other", "default", "other", None], prompts)


def test_one_operation_for_a_projection_and_its_adapter_takes_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels have it. Several that are active at once come after the projection, each on top of the others."""
    taken = []

    def adapted_linear(x: Any, weight: Any, bias: Any, table: Any, rows: Any, *, gated: Any, **options: Any) -> Any:
        taken.append(table)
        return REFERENCE.lora(x, REFERENCE.linear(x, weight, bias, **options), table, rows, gated, settled=True)

    monkeypatch.setattr(binding, "ops_for", lambda *_, **__: replace(REFERENCE, adapted_linear=adapted_linear))
    model = two_adapters()
    with RolloutEngine(model, config=CONFIG) as engine:
        for names in (["other"], ["default", "other"]):
            model.base_model.set_adapter(names)
            assert tokens(engine) == greedy_tokens(model)
            assert taken, "o_proj has one in both"
            taken.clear()


def test_the_model_is_looked_at_as_often_for_many_prompts_as_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []
    look = binding.ModelBinding._is_as_seen
    monkeypatch.setattr(
        binding.ModelBinding, "_is_as_seen", lambda self, **how: looks.append(True) or look(self, **how)
    )
    with RolloutEngine(two_adapters(), config=CONFIG) as engine:
        counts = []
        for prompts, adapter in (([[1]], LIVE), ([[1], [2]] * 8, LIVE), ([[1], [2]] * 8, [LIVE, "other"] * 8)):
            engine.generate_batch(prompts, GREEDY, adapter=adapter)
            counts.append(len(looks))
            looks.clear()
    assert counts[0] > 0
    assert len(set(counts)) == 1


def test_copies_of_adapters_end_with_an_update_and_with_no_other_call() -> None:
    """While others run, and though nobody looked at the numbers since."""
    model = two_adapters()
    model.add_adapter("third", lora(r=2))
    config = EngineConfig(max_num_seqs=8, max_model_len=64, block_size=4, kv_cache_memory="8MiB", decode_window=1)
    with RolloutEngine(model, config=config) as engine:
        handles = [engine.submit(PROMPTS[0], GREEDY, adapter=a) for a in ("default", "other", "third")]
        stacks = engine._binding.shell.lora.stacks
        for _ in range(2):
            engine.core.step()
        assert stacks._slots
        engine.pause()
        engine.update_weights()
        assert not stacks._slots
        engine.resume()
        for _ in range(2):
            engine.core.step()
        version = stacks.version
        engine.score([PROMPTS[1]], adapter=None)
        assert stacks._slots and stacks.version == version
        assert all(len(h.result().completions[0].token_ids) == 9 for h in handles)


def test_copies_of_adapters_are_made_once_for_all_rollouts_between_two_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_adapters()
    written: list[Any] = []
    write = lora_stacks._write
    monkeypatch.setattr(lora_stacks, "_write", lambda *given: written.append(given) or write(*given))
    counts = []
    with RolloutEngine(model, config=CONFIG) as engine:
        for seed, change in enumerate((None, None, "announced", None, "silent", None), start=5):
            if change:
                shake(model, seed=seed)
            if change == "announced":
                engine.update_weights()
            assert_like_peft(engine, model, ["default", "other", "default", None], PROMPTS)
            counts.append(len(written))
            written.clear()
    assert [bool(count) for count in counts] == [True, False, True, False, True, False]
    assert len({*counts}) == 2


def test_one_prompt_with_each_adapter_is_no_group() -> None:
    """Not even where the cache knows the prompt."""
    model = two_adapters()
    prompts = [PROMPTS[2]] * 6
    with RolloutEngine(model, config=CONFIG) as engine:
        for _ in range(2):
            assert_like_peft(engine, model, [None, "default", "default", "other", "other", None], prompts)
        assert engine.stats().prefix_cache_hit_tokens > 0


def test_in_chunks_and_with_preemption() -> None:
    model = two_adapters()
    tight = EngineConfig(
        max_num_seqs=8, max_num_batched_tokens=8, max_model_len=24, block_size=2, kv_cache_memory=13 * 2 * 768
    )
    with RolloutEngine(model, config=tight) as engine:
        assert_like_peft(engine, model, ["other", None, "default", "other"])
        assert engine.stats().num_preemptions > 0


def test_many_adapters_over_two_slots() -> None:
    model = peft_model()
    for seed in range(1, 6):
        model.add_adapter(f"a{seed}", lora())
    shake(model, 3)
    names = ["default", *(f"a{seed}" for seed in range(1, 6)), None]
    config = EngineConfig(max_num_seqs=8, max_model_len=64, block_size=4, kv_cache_memory="8MiB", max_loras=2)
    with RolloutEngine(model, config=config) as engine:
        choices = [names[(3 * row) % 7] for row in range(21)]
        prompts = [PROMPTS[row % 4] for row in range(21)]
        together = engine.generate_batch(prompts, GREEDY, adapter=choices)
        scores = engine.score(together, adapter=choices)
        wanted = {name: expected_tokens(model, name) for name in names}
        for row, (output, score) in enumerate(zip(together, scores, strict=True)):
            (completion,) = output.completions
            assert completion.token_ids == wanted[choices[row]][row % 4]
            assert score.logprobs.tolist() == pytest.approx(completion.logprobs, abs=1e-4)
    assert len({str(t) for t in wanted.values()}) == 7


def test_a_slot_that_is_free_is_used_while_others_are_busy() -> None:
    model = peft_model()
    for name in ("a1", "a2"):
        model.add_adapter(name, lora())
    shake(model, 3)
    config = EngineConfig(
        max_num_seqs=8, max_model_len=64, block_size=4, kv_cache_memory="8MiB", max_loras=2, decode_window=1
    )
    with RolloutEngine(model, config=config) as engine:
        together: list[int] = []
        step = engine.core.step

        def watched() -> list[Any]:
            together.append(len(engine.core.scheduler.running))
            return step()

        engine.core.step = watched  # type: ignore[method-assign]
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (20, 2, 12)]
        engine.generate_batch([PROMPTS[0]] * 3, params, adapter=["default", "a1", "a2"])
        assert sum(n == 2 for n in together) >= 12, "the third begins when the second is over"


def test_nothing_of_the_trainers_is_written(tmp_path: Path) -> None:
    model = peft_model(use_dora=True, modules_to_save=["lm_head"])
    before = {n: t.clone() for n, t in model.state_dict().items()}
    storages = {n: p.data_ptr() for n, p in model.named_parameters() if "lora_" in n}
    with RolloutEngine(model, config=CONFIG) as engine:
        tokens(engine)
        engine.update_weights()
        tokens(engine, adapter=["default", None, LIVE, None])
        after = model.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[n], after[n]) for n in before)
        assert storages == {n: p.data_ptr() for n, p in model.named_parameters() if "lora_" in n}
        model.save_pretrained(tmp_path)
        del after  # or what it holds stays where it is, so that it follows what is trained
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert torch.equal(
        saved["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"],
        before["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"],
    )
    owners = [p.untyped_storage().resizable() for p in model.parameters()]
    assert all(owners)
    live = expected_tokens(model)
    merged = model.merge_and_unload()
    assert greedy_tokens(merged) == live


def test_a_live_adapter_of_nan_fails_its_own_requests_and_no_others() -> None:
    """Also where they go through one product, beside each other and beside rows without an adapter."""
    model = two_adapters()
    with RolloutEngine(model, config=CONFIG) as engine:
        names = ["default", "other", None, "other", "default", None]
        prompts = [PROMPTS[n % 4] for n in range(6)]
        with torch.no_grad():
            model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.fill_(torch.nan)
        handles = [engine.submit(p, GREEDY, adapter=name) for p, name in zip(prompts, names, strict=True)]
        for handle, prompt, name in zip(handles, prompts, names, strict=True):
            if name == "default":
                assert "NaN" in str(handle.result().error)
                continue
            with running(model, name):
                assert handle.result().completions[0].token_ids == oracle.greedy(model, prompt, GREEDY.max_tokens)


def test_what_a_captured_step_knows_changes_only_with_what_it_reads():
    model = peft_model()
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.generate_batch([[1, 2, 3]], SamplingParams(max_tokens=2))
        lora = engine._binding.shell.lora
        table = next(t for group, _ in lora._adapted.values() for t in group.tables if not t.empty)
        layout, pointers = lora.layout, table.pointers.clone()
        for _ in range(3):
            engine.update_weights()
        assert lora.layout == layout and torch.equal(table.pointers, pointers)
        for name, options, changes in (("same", {}, False), ("scales", {"use_dora": True}, True)):
            other = peft_model(seed=5, **options)
            engine.load_adapter(name, other)
            engine.generate_batch([[1, 2, 3]], GREEDY, adapter=name)
            assert (lora.layout != layout) == changes


def test_an_adapter_in_use_keeps_its_slot() -> None:
    """Though it is the one that was asked for first."""
    model, third = two_adapters(), peft_model(seed=9)
    config = EngineConfig(max_num_seqs=8, max_model_len=64, block_size=4, kv_cache_memory="8MiB", max_loras=2)
    with RolloutEngine(model, config=config) as engine:
        engine.load_adapter("third", third)
        kept = engine.submit(PROMPTS[0], GREEDY, adapter="default")
        engine.submit(PROMPTS[0], GREEDY, adapter="other").abort()
        last = engine.submit(PROMPTS[0], GREEDY, adapter="third")
        assert last.result().completions[0].token_ids == expected_tokens(third)[0]
        assert kept.result().completions[0].token_ids == expected_tokens(model)[0]


def test_deterministic_mode_takes_adapters_of_fused_layers_only(monkeypatch):
    monkeypatch.setattr(binding, "ops_for", lambda *_, **__: REFERENCE)  # what it would run on is not to be had here
    config = EngineConfig(**{f.name: getattr(CONFIG, f.name) for f in fields(CONFIG)} | {"deterministic": True})
    RolloutEngine(peft_model(), config=config).close()
    with pytest.raises(UnsupportedModelError, match=r"adapter 'default' changes lm_head.*not with deterministic=True"):
        RolloutEngine(peft_model(target_modules=["q_proj", "lm_head"]), config=config)
