"""What a trainer does to the weights of models some of whose layers keep a state, each against the plain forward."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import ranks
import torch
from hybrids import CONFIG, PARAMS, PROMPTS, assert_like_plain, check, draw, follow_fsdp2, make_model, step
from torch import nn
from transformers import AutoModelForCausalLM

from stoker.kernels.ops import REFERENCE
from stoker.rollout import (
    EngineConfig,
    RolloutEngine,
    SamplingParams,
    UnsupportedModelError,
    WeightsMismatchError,
    binding,
)

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

FAMILIES = ["qwen3_5", "lfm2", "falcon_h1", "mamba2"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
A_LOG = "model.layers.2.linear_attn.A_log"
CONV = "model.layers.0.linear_attn.conv1d.weight"
DT_BIAS = "model.layers.0.linear_attn.dt_bias"


def named(model: nn.Module, name: str) -> torch.Tensor:
    return dict(model.named_parameters())[name].data


# -- what the trainer holds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_an_optimizer_step_moves_no_byte_and_every_parameter_counts(family: str) -> None:
    model = make_model(family)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with RolloutEngine(model, config=CONFIG) as engine:
        check(engine, model, version=0)
        for version in (1, 2):
            step(model, version)
            assert engine.update_weights() == version and engine.stats().last_update_bytes == 0
            check(engine, model, version=version)
            report = engine.verify_weights()
            assert report.ok and report.source == "aliased" and engine.stats().mirror_bytes == 0
        own = [n for n in before if "conv" in n or n.endswith(("A_log", "dt_bias", ".D"))]
        assert own and all(not torch.equal(before[n], p) for n, p in model.named_parameters())
        for version, name in enumerate(own, start=3):  # one after the other, and nobody is told
            dict(model.named_parameters())[name].data.mul_(1.5)
            check(engine, model, version=version)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainers_model_is_as_it_was_while_attached_and_afterwards(family: str) -> None:
    model, twin = make_model(family), make_model(family)
    kept = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    code = sys.modules[type(model).__module__]
    functions = {n: f for n, f in vars(code).items() if callable(f)}
    config = model.config.to_dict()

    def untouched() -> None:
        for path, module in model.named_modules():
            assert "forward" not in vars(module), path
            assert not module._forward_hooks and not module._forward_pre_hooks, path
        assert {n: f for n, f in vars(code).items() if callable(f)} == functions
        assert model.config.to_dict() == config and not model.training
        assert {n: id(p) for n, p in model.named_parameters()} == {n: i for n, (i, _) in kept.items()}

    with RolloutEngine(model, config=CONFIG) as engine:
        check(engine, model)
        untouched()
        for m in (model, twin):  # gradients flow through the modules as ever
            m(input_ids=torch.tensor([PROMPTS[0]]), labels=torch.tensor([PROMPTS[0]])).loss.backward()
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert p.grad is not None and torch.equal(p.grad, q.grad), name
    untouched()
    for name, p in model.named_parameters():
        assert torch.equal(p, kept[name][1]) and p.untyped_storage().resizable(), name
        assert p.untyped_storage().nbytes() == p.nbytes, name
    assert oracle.greedy(model, PROMPTS[0], 8) == oracle.greedy(twin, PROMPTS[0], 8)


@pytest.mark.parametrize("name", [A_LOG, CONV, DT_BIAS])
def test_verifying_names_the_one_that_differs(name: str) -> None:
    model = make_model("qwen3_5")
    with RolloutEngine(model, config=replace(CONFIG, dtype="float64")) as engine:
        check(engine, model, version=0)
        assert engine.verify_weights().ok
        named(model, name)[0] += 0.5
        assert engine.verify_weights().mismatched == (name,)
        assert engine.update_weights() == 1 and engine.stats().last_update_bytes == 8 * named(model, name).numel()
        assert engine.verify_weights().ok
        check(engine, model, version=1)
        engine._binding.source.mirror.tensors[name][-1] -= 0.5  # type: ignore[attr-defined]
        assert engine.verify_weights().mismatched == (name,)


@pytest.mark.parametrize("family", [*FAMILIES, "granitemoehybrid", "nemotron_h", "kimi_linear", "jamba", "mamba"])
def test_a_mirror_in_bf16_is_the_model_that_transformers_loads_in_bf16(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    with RolloutEngine(model, config=replace(CONFIG, dtype="bfloat16")) as engine:
        for version in (0, 1):
            batch = engine.generate_batch(PROMPTS, PARAMS)
            found = engine._binding.source.tensors()
            for name, p in plain.named_parameters():
                assert found[name].dtype == p.dtype and torch.equal(found[name], p), name
            theirs, exact = (
                torch.cat([oracle.logprobs(m, o.prompt_token_ids, o.completions[0].token_ids, 0.9) for o in batch])
                for m in (plain, model)
            )
            ours = torch.tensor([x for o in batch for x in o.completions[0].logprobs]).double()
            rounding = (theirs - exact).abs().median()  # of transformers' own
            assert (ours - theirs).abs().median() < 2 * rounding and (ours - exact).abs().median() < 2 * rounding
            assert {v for o in batch for v in o.completions[0].weight_versions} == {version}
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.01)
            model.save_pretrained(tmp_path)
            plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
            engine.update_weights()


def test_parameters_of_the_state_that_a_trainer_keeps_in_fp32() -> None:
    """As some do for what is in an exponent: the rest of the model is in bf16, and transformers runs it as it is."""
    model = make_model("qwen3_5").bfloat16()
    for name, module in model.named_modules():
        if name.endswith("linear_attn"):
            module.A_log.data, module.dt_bias.data = module.A_log.data.float(), module.dt_bias.data.float()
    with RolloutEngine(model, config=CONFIG) as engine:
        batch = engine.generate_batch(PROMPTS, PARAMS)
        batch.raise_for_errors()
        assert engine.verify_weights().source == "aliased"
    exact = make_model("qwen3_5")
    theirs, wide = (
        torch.cat([oracle.logprobs(m, o.prompt_token_ids, o.completions[0].token_ids, 0.9) for o in batch])
        for m in (model, exact)
    )
    ours = torch.tensor([x for o in batch for x in o.completions[0].logprobs]).double()
    assert (ours - theirs).abs().median() < 2 * (theirs - wide).abs().median()


@pytest.mark.parametrize(
    ("family", "adapted"), [("qwen3_5", False), ("qwen3_5", True), ("lfm2", False), ("kimi_linear", True)]
)
def test_shards_of_fsdp2_are_gathered(family: str, adapted: bool) -> None:
    for found in ranks.run(follow_fsdp2, 2, family, adapted):
        assert found["trained"] and (adapted or found["behind"] == found["trained"])


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_from_a_folder_and_by_name(family: str, tmp_path: Path) -> None:
    model, other = make_model(family), make_model(family, seed=5)
    model.save_pretrained(tmp_path / "a")
    other.save_pretrained(tmp_path / "b")
    with RolloutEngine.from_pretrained(tmp_path / "a", config=CONFIG) as engine:
        check(engine, model, version=0)
        engine.update_weights(tmp_path / "b")
        check(engine, other, version=1)
        engine.update_weights(model.state_dict())
        check(engine, model, version=2)
    with RolloutEngine(model, config=replace(CONFIG, dtype="float64")) as engine:
        engine.update_weights(list(other.state_dict().items()))
        check(engine, other, version=1)
        bad = dict(other.state_dict())
        bad[next(n for n in bad if "conv" in n)] = torch.zeros(3)
        with pytest.raises(WeightsMismatchError, match="conv"):
            engine.update_weights(bad)
        check(engine, other)


def test_checkpoints_that_are_saved_while_attached(tmp_path: Path) -> None:
    model, twin = make_model("qwen3_5"), make_model("qwen3_5")
    with RolloutEngine(model, config=CONFIG) as engine:
        for m in (model, twin):
            step(m)
        engine.update_weights()
        check(engine, model)
        model.save_pretrained(tmp_path / "a")
        twin.save_pretrained(tmp_path / "b")
        torch.save(model.state_dict(), tmp_path / "state")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert files[0] == files[1]
    again = torch.load(tmp_path / "state")
    assert again.keys() == twin.state_dict().keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in twin.state_dict().items())


# -- updates with requests under way ----------------------------------------------------------------------------------


@torch.no_grad()
def cached(old: Any, new: Any, prompt: list[int], completion: list[int], switch: int) -> torch.Tensor:
    """Log-probabilities where transformers' own cache is carried from one model to another after so many tokens."""
    out = old(torch.tensor([prompt]), use_cache=True)
    rows = [out.logits[0, -1]]
    for number, token in enumerate(completion[:-1], start=1):
        model = old if number < switch else new
        out = model(torch.tensor([[token]]), use_cache=True, **oracle.cache_of(out))
        rows.append(out.logits[0, -1])
    return torch.stack(rows).double().log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_under_way_at_an_update(family: str, recompute: bool) -> None:
    """They go on with the states they have, as transformers' cache would, or compute them again under the new weights."""
    model, old = make_model(family), make_model(family)
    params = SamplingParams(max_tokens=14, seed=4)
    with RolloutEngine(model, config=replace(CONFIG, decode_window=2)) as engine:
        handles = [engine.submit(p, replace(params, seed=i)) for i, p in enumerate(PROMPTS)]
        next(iter(handles[0]))
        engine.wait(handles, share=0)
        engine.pause("keep")
        step(model)
        assert engine.update_weights() == 1
        engine.resume(recompute=recompute)
        outputs = [h.result() for h in handles]
        switched = 0
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            (c,) = output.completions
            at = c.weight_versions.count(0)
            assert c.weight_versions == [0] * at + [1] * (len(c.token_ids) - at)
            switched += 0 < at < len(c.token_ids)
            if recompute or not at:
                before, after = (oracle.logprobs(m, prompt, c.token_ids) for m in (old, model))
                expected = torch.cat((before[:at], after[at:]))
            else:
                expected = cached(old, model, prompt, c.token_ids, at)
            torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)
        assert switched >= 2
        batch = engine.generate_batch(PROMPTS, PARAMS)  # nothing that old states went into serves a prompt
        assert_like_plain(batch, model)
        assert_like_plain(engine.generate_batch(PROMPTS, PARAMS), model)
        engine.core.scheduler.check()


def test_states_of_a_prompt_never_serve_another_version() -> None:
    model = make_model("qwen3_5")
    prompt, border = draw(9, 22), 20
    with RolloutEngine(model, config=CONFIG) as engine:
        for version in range(4):
            first, again = (engine.generate_batch([prompt], PARAMS) for _ in range(2))
            assert (first[0].cached_tokens, again[0].cached_tokens) == (0, border)
            assert first[0].completions == again[0].completions
            assert_like_plain(first, model)
            assert set(first[0].completions[0].weight_versions) == {version}
            for name in (A_LOG, CONV):
                named(model, name).mul_(0.7)
            if version % 2:
                engine.update_weights()


# -- memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_wakes_is_as_it_was_whatever_memory_holds(family: str, level: int) -> None:
    model = make_model(family)
    with RolloutEngine(model, config=replace(CONFIG, dtype="float64")) as engine:
        first = engine.generate_batch(PROMPTS, PARAMS)
        assert_like_plain(first, model)
        states = engine.stats().recurrent_state_bytes
        for _ in range(3):
            engine.sleep(level)
            assert engine.stats().recurrent_state_bytes == engine.stats().kv_cache_bytes == 0
            engine.wake_up()
            assert engine.stats().recurrent_state_bytes == states > 0
            again = engine.generate_batch(PROMPTS, PARAMS)
            assert [o.completions for o in again] == [o.completions for o in first]
            assert [o.cached_tokens for o in again] == [0] * len(PROMPTS)
        handle = engine.submit(PROMPTS[0], GREEDY)
        next(iter(handle))
        engine.pause()
        engine.sleep(level)
        engine.wake_up()
        engine.resume()
        assert handle.result().completions[0].token_ids == oracle.greedy(model, PROMPTS[0], GREEDY.max_tokens)


_CYCLES = """
import gc, os
from families import make_model
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

model = make_model("qwen3_5")
params = SamplingParams(temperature=0, max_tokens=3, n=2)
config = EngineConfig(kv_cache_memory="32MiB", max_num_seqs=64, block_size=4, dtype="float64")
with RolloutEngine(model, config=config) as engine:
    assert engine.stats().recurrent_state_bytes > 2**19
    expected, sizes = None, []
    for cycle in range(90):
        tokens = [c.token_ids for o in engine.generate_batch([[1, 2, 3], [9] * 20], params) for c in o.completions]
        expected = expected or tokens
        assert tokens == expected
        engine.sleep(level=1 + cycle % 2)
        engine.wake_up()
        if cycle % 10 == 0:
            gc.collect()
        sizes.append(resident())
    drift = max(sizes[-20:]) - max(sizes[20:40])
    assert drift < 2**21, (drift, sizes[::10])
"""


def test_cycles_of_sleep_wake_and_rollout_leave_nothing_behind() -> None:
    ranks.run_script(_CYCLES)


def test_copies_of_states_give_way_to_new_ones_and_what_is_lost_is_computed_again() -> None:
    """More prompts than there is room for their states: the oldest begin anew, and all are right."""
    model = make_model("qwen3_5")
    prompts = [draw(seed, 9) for seed in range(20)]
    with RolloutEngine(model, config=CONFIG) as engine:
        rows = engine._kv.state_layout.num_kept  # type: ignore[union-attr]
        assert rows < len(prompts)
        for _ in range(2):
            assert_like_plain(engine.generate_batch(prompts, PARAMS), model)
        again = engine.generate_batch(prompts[-rows:], PARAMS)
        assert [o.cached_tokens for o in again] == [8] * rows
        assert_like_plain(again, model)
        engine.core.scheduler.check()


# -- bad input --------------------------------------------------------------------------------------------------------------


def test_memory_without_room_for_the_states_says_so() -> None:
    with pytest.raises(
        Exception, match=r"two blocks of 16 tokens .* the states of max_num_seqs=256 sequences take \d+"
    ):
        RolloutEngine(make_model("qwen3_5"), config=EngineConfig(kv_cache_memory="64KiB"))


@pytest.mark.parametrize(
    ("family", "fields"), [("nemotron_h", {"moe_latent_size": 24}), ("qwen3_moe", {"hidden_act": "mish"})]
)
def test_deterministic_mode_is_refused_where_layers_run_their_own_matmuls(
    family: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts between projections, or with an activation that is not known."""
    monkeypatch.setattr(binding, "ops_for", lambda *_, **__: REFERENCE)  # what it would run on is not to be had here
    model = make_model(family, **fields)
    with pytest.raises(
        UnsupportedModelError, match=r"run their own matmuls, .*deterministic=True cannot be had for it"
    ):
        RolloutEngine(model, config=EngineConfig(deterministic=True, kv_cache_memory="32MiB"))
    assert all(p.untyped_storage().resizable() for p in model.parameters())


def test_scores_that_two_requests_have_of_each_other() -> None:
    """The first stops where its state is kept, the other goes on in its place, and both are to begin again."""
    model = make_model("qwen3_5")
    prompts = [[5 + i % 90 for i in range(length)] for length in (24, 60)]
    params = SamplingParams(max_tokens=3, seed=1, prompt_logprobs=0)
    config = replace(CONFIG, block_size=4, max_num_batched_tokens=64, max_model_len=128)
    with RolloutEngine(model, config=config) as engine:
        expected = [engine.generate_batch([p], params)[0].prompt_logprobs for p in prompts]
        for steps in range(1, 5):
            engine.update_weights()
            handles = [engine.submit(p, params) for p in prompts]
            for _ in range(steps):
                engine.wait(handles, share=0)
            engine.pause()
            engine.resume(recompute=True)
            for handle, wanted in zip(handles, expected, strict=True):
                found = handle.result().prompt_logprobs
                assert found is not None and wanted is not None
                torch.testing.assert_close(found.logprobs, wanted.logprobs, rtol=0, atol=1e-4)
