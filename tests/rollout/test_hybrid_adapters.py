"""Adapters over models some of whose layers keep a state, against PEFT's own forward; and TRL's trainers on them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from adapted import CONFIG as OPEN
from adapted import PROMPTS, assert_like_peft, expected_tokens, greedy_tokens, lora, running, shake, tokens
from hybrids import CONFIG, draw, make_model, peft_model, step
from peft import LoraConfig, get_peft_model
from quantised_bases import quantised
from torch import nn
from trl_setup import EOS, LOGPROB_TOLERANCE, PAD, MakeTrainer, logged, make_tokenizer, recorded, replay, trainers
from trl_setup import PROMPTS as TEXTS

from stoker.engine.layers import fused_layers
from stoker.integrations.ppo import gae, kl_penalty, masked_mean, token_rewards, whiten
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams, UnsupportedModelError, shell_builder

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

QWEN = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
VARIETIES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_5", {"target_modules": QWEN}),
    ("qwen3_5", {"target_modules": "all-linear"}),
    ("qwen3_5", {"target_modules": [*QWEN, "q_proj", "up_proj"], "use_dora": True, "use_rslora": True}),
    ("qwen3_5", {"target_modules": ["q_proj", "out_proj"], "modules_to_save": ["lm_head"]}),
    ("qwen3_5_moe", {"target_modules": ["in_proj_z"], "target_parameters": ["mlp.experts.gate_up_proj"]}),
    ("lfm2", {"target_modules": ["in_proj", "out_proj"]}),
    ("lfm2", {"target_modules": "all-linear", "modules_to_save": ["embed_tokens"]}),
    ("lfm2", {"target_modules": ["in_proj", "q_proj", "w1", "w2"], "use_dora": True}),
    ("lfm2_moe", {"target_modules": ["in_proj"], "target_parameters": ["feed_forward.experts.gate_up_proj"]}),
    ("lfm3", {"target_modules": "all-linear"}),
    ("lfm3", {"target_modules": ["g_proj", "v_proj", "w2"], "use_dora": True}),
    ("granitemoehybrid", {"target_modules": ["in_proj", "out_proj"]}),
    ("falcon_h1", {"target_modules": ["in_proj", "v_proj", "down_proj"]}),
    ("falcon_h1", {"target_modules": ["in_proj", "gate_proj", "o_proj"], "lora_bias": True}),
    ("nemotron_h", {"target_modules": ["in_proj", "q_proj", "up_proj"], "use_dora": True}),
    ("bamba", {"target_modules": "all-linear"}),
    ("jamba", {"target_modules": "all-linear"}),
    ("falcon_mamba", {"target_modules": ["in_proj", "x_proj"]}),
    ("jamba", {"target_modules": ["in_proj", "x_proj"], "use_dora": True}),
    ("kimi_linear", {"target_modules": "all-linear"}),
    ("kimi_linear", {"target_modules": ["f_a_proj", "g_b_proj", "kv_b_proj"], "use_dora": True}),
    ("bailing_hybrid", {"target_modules": ["f_proj", "g_proj", "b_proj"]}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "options"), VARIETIES, ids=str)
def test_like_peft(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The live adapter, rows of the base and one from a folder in one batch, in chunks; then after an optimizer step."""
    model, other = peft_model(family, **options), peft_model(family, seed=2, **options)
    other.save_pretrained(tmp_path)
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.load_adapter("folder", tmp_path)
        rows = ["default", None, "folder", "default"]
        assert_like_peft(engine, model, rows, others={"folder": other})
        before = tokens(engine), tokens(engine, adapter=None)
        assert before[0] != before[1]
        assert_like_peft(engine, model, [*rows[1:], rows[0]], others={"folder": other})
        step(model, lr=0.05)
        assert engine.update_weights() == 1 and engine.stats().last_update_bytes == 0
        assert_like_peft(engine, model, rows, others={"folder": other})
        shake(model, seed=5)  # and nobody is told
        assert tokens(engine) == expected_tokens(model) != before[0]
        engine.core.scheduler.check()


def test_several_adapters_of_one_model() -> None:
    model = peft_model("qwen3_5", target_modules=QWEN)
    model.add_adapter("other", lora(r=7, target_modules=["in_proj_qkv", "o_proj", "gate_proj"]))
    shake(model, seed=2)
    prompt = draw(4, 21)
    with RolloutEngine(model, config=CONFIG) as engine:
        for _ in range(2):  # the second time from each one's own state of the prompt
            names = ["default", "other", None, "other"]
            batch = engine.generate_batch([prompt] * 4, SamplingParams(seed=1, max_tokens=8), adapter=names)
            for name, output in zip(names, batch, strict=True):
                (c,) = output.completions
                with running(model, name):
                    expected = oracle.logprobs(model, prompt, c.token_ids)
                torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)
        assert [o.cached_tokens for o in batch] == [20] * 4
        model.base_model.set_adapter(["default", "other"])
        assert tokens(engine) == greedy_tokens(model)


@pytest.fixture
def layers_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is replaced by its fused form."""
    monkeypatch.setattr(fused_layers, "structure_of", lambda layer: None)


@pytest.mark.usefixtures("layers_as_they_are")
def test_modules_of_a_layer_that_are_saved_whole(tmp_path: Path) -> None:
    """What is called with tokens, a linear of a mixer among it, can be an adapter's own, where no fused layer runs it."""
    options = {"target_modules": ["q_proj"], "modules_to_save": ["feed_forward", "in_proj", "operator_norm"]}
    model, other = (peft_model("lfm2", seed=s, **options) for s in (1, 2))
    other.save_pretrained(tmp_path)
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.load_adapter("folder", tmp_path)
        for _ in range(2):
            assert_like_peft(engine, model, ["default", None, "folder", "default"], others={"folder": other})
            step(model)


@pytest.mark.filterwarnings("ignore")
def test_biases_of_linears_are_an_adapter_s_own(tmp_path: Path) -> None:
    model, other = (peft_model("lfm2", s, target_modules=["in_proj", "out_proj"], bias="lora_only") for s in (1, 2))
    other.save_pretrained(tmp_path)
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.load_adapter("folder", tmp_path)
        assert_like_peft(engine, model, ["default", "folder"] * 2, others={"folder": other})


@pytest.mark.parametrize("options", [{"modules_to_save": ["dt_proj"]}, {"bias": "lora_only"}], ids=str)
@pytest.mark.usefixtures("layers_as_they_are")
def test_a_linear_that_is_only_read_cannot_be_an_adapter_s_own(options: dict[str, Any], tmp_path: Path) -> None:
    targets = ["in_proj"] if "modules_to_save" in options else ["in_proj", "dt_proj"]
    peft_model("mamba", target_modules=targets, **options).save_pretrained(tmp_path)
    with (
        RolloutEngine(make_model("mamba"), config=OPEN) as engine,
        pytest.raises(UnsupportedModelError, match=r"saves backbone\.layers\.0\.mixer\.dt_proj.*not run as a module"),
    ):
        engine.load_adapter("folder", tmp_path)


@pytest.mark.usefixtures("layers_as_they_are")
def test_norms_of_heads_that_are_saved_whole() -> None:
    """As many tokens as heads in a step: rows are told apart by the token, and not by the head."""
    model = peft_model("lfm2", target_modules=["w1"], modules_to_save=["q_layernorm", "k_layernorm"])
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_like_peft(engine, model, ["default", None] * 2, prompts=[[5], [6], [7], [8]])
        assert_like_peft(engine, model, [None, "default"] * 2)


@pytest.mark.parametrize(
    ("family", "saved"),
    [
        ("qwen3_5", "conv1d"),
        ("qwen3_5", "linear_attn"),
        ("qwen3_5", "linear_attn.norm"),
        ("falcon_h1", "conv1d"),
        ("falcon_h1", "layers.0.feed_forward"),
        ("granitemoehybrid", "mamba"),
        ("granitemoehybrid", "mamba.norm"),
        ("lfm2", "conv.conv"),
        ("lfm2", "layers.0"),
        ("gemma2", "layers.0.post_attention_layernorm"),
        ("lfm2", "layers.0.conv.in_proj"),
        ("cohere2", "layers.0.self_attn"),
        ("cohere2", "layers.0"),
    ],
)
def test_modules_that_are_read_or_keep_a_state_cannot_be_saved(family: str, saved: str) -> None:
    model = peft_model(family, target_modules=["q_proj"], modules_to_save=[saved])
    with pytest.raises(UnsupportedModelError, match=r"saves model\.layers\.0.*not run as a module of its own"):
        RolloutEngine(model, config=OPEN)
    plain = make_model(family)
    with RolloutEngine(plain, config=OPEN) as engine:
        with pytest.raises(UnsupportedModelError, match=r"saves model\.layers\.0.*not run as a module of its own"):
            engine.load_adapter("other", model)
        assert engine.adapters == ()
        assert tokens(engine) == greedy_tokens(plain)


@pytest.mark.parametrize(("family", "saved"), [("qwen3_5", "conv1d"), ("lfm2", "conv.conv"), ("falcon_h1", "layers.0")])
def test_nor_where_no_layer_is_fused(family: str, saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_builder, "fuse_layers", lambda *_: (0, False))
    model = peft_model(family, target_modules=["q_proj"], modules_to_save=[saved])
    with pytest.raises(UnsupportedModelError, match=r"saves model\.layers\.0.*not run as a module of its own"):
        RolloutEngine(model, config=OPEN)


def test_the_bias_of_a_convolution_comes_with_the_base_and_with_no_other_adapter() -> None:
    model, other = (peft_model("lfm2", seed=s, target_modules=["out_proj"], bias="all") for s in (1, 2))
    with RolloutEngine(model, config=OPEN) as engine:
        assert_like_peft(engine, model, ["default"] * 4)
        with pytest.raises(UnsupportedModelError, match=r"saves model.layers.0.conv.conv"):
            engine.load_adapter("other", other)
        assert_like_peft(engine, model, ["default", None] * 2)


def test_an_adapter_over_a_convolution_is_refused_by_name() -> None:
    """PEFT itself has no effect there: the model reads the weight, and does not call the module."""
    channels = make_model("qwen3_5").model.layers[0].linear_attn.conv1d.in_channels
    for options in (
        {"target_modules": ["conv1d"], "r": channels},
        {"target_modules": ["q_proj"], "target_parameters": ["conv1d.weight"]},
    ):
        model = peft_model("qwen3_5", **options)
        with pytest.raises(UnsupportedModelError, match=r"targets model.layers.0.linear_attn.conv1d.*leave it out of"):
            RolloutEngine(model, config=replace(OPEN, max_lora_rank=channels))


# -- modules that a user replaced ------------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return -self.mixer(*args, **kwargs)


class Same(nn.Module):
    """Another class with the very same tensors."""

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self._parameters, self._modules = mixer._parameters, mixer._modules

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states


def test_mixers_that_were_wrapped_or_replaced() -> None:
    model: Any = make_model("qwen3_5")
    mixer = model.model.layers[0].linear_attn
    model.model.layers[0].linear_attn = Wrapped(mixer)
    with pytest.raises(UnsupportedModelError, match=r"linear_attn.mixer|linear_attn.A_log"):
        RolloutEngine(model, config=OPEN)
    model.model.layers[0].linear_attn = mixer
    with RolloutEngine(model, config=OPEN) as engine:
        model.model.layers[0].linear_attn = Same(mixer)
        with pytest.raises(
            UnsupportedModelError, match=r"layers.0.linear_attn was a .*GatedDeltaNet, and is a Same now"
        ):
            engine.generate_batch(PROMPTS)
        model.model.layers[0].linear_attn = make_model("qwen3_5", seed=4).model.layers[0].linear_attn
        assert tokens(engine) == greedy_tokens(model)


# -- a base in 4 bits -------------------------------------------------------------------------------------------------------


def test_an_adapter_over_a_base_in_4_bits(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    make_model("qwen3_5", **sizes).save_pretrained(tmp_path)
    base = quantised(tmp_path, "nf4")
    model = get_peft_model(base, lora(target_modules=QWEN)).eval()
    shake(model)
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_like_peft(engine, model, ["default", None] * 2)
        shake(model, seed=2)
        assert_like_peft(engine, model, ["default", None] * 2)
        assert engine.verify_weights().ok and engine.stats().mirror_bytes == 0


# -- TRL, and a loop of one's own -------------------------------------------------------------------------------------------


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    yield from trainers(str(tmp_path))


def speaker(family: str) -> Any:
    """A model of the tokens of ``trl_setup``."""
    fields = {"vocab_size": 11, "pad_token_id": PAD, "eos_token_id": EOS, "max_position_embeddings": 64}
    model = make_model(family, **fields)
    model.generation_config.eos_token_id = EOS
    return model


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("family", ["qwen3_5", "lfm3"])
def test_grpo_trains_on_the_engine_as_on_the_same_samples_without_it(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, family: str, adapted: bool
) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    from stoker.integrations.trl import attach, detach

    settings = {"optim": "sgd", "learning_rate": 2e-3, "max_grad_norm": 0.0, "temperature": 0.8, "max_steps": 3}
    config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")
    more = {"more": {"peft_config": config}} if adapted else {}

    def made() -> Any:
        torch.manual_seed(0)
        return make_trainer(model=speaker(family), **settings, **more)

    on_engine = made()
    engine = attach(on_engine)
    rollouts = recorded(engine, monkeypatch)
    before = {n: p.detach().clone() for n, p in on_engine.model.named_parameters() if p.requires_grad}
    on_engine.train()
    differences = logged(on_engine, "sampling/sampling_logp_difference/max")
    assert len(differences) == 3 and max(differences) < LOGPROB_TOLERANCE
    for which in ("min", "mean", "max"):
        ratios = logged(on_engine, f"sampling/importance_sampling_ratio/{which}")
        assert len(ratios) == 3 and all(abs(ratio - 1) < 8 * LOGPROB_TOLERANCE for ratio in ratios)
    assert set(rollouts[-1][0].completions[0].weight_versions) != {0}
    detach(on_engine)

    plain = made()
    replay(plain, rollouts, monkeypatch)
    for key, tolerance in (("reward", 0), ("loss", 1e-4), ("grad_norm", 1e-2)):
        found, expected = logged(on_engine, key), logged(plain, key)
        assert len(expected) >= 2 and found == pytest.approx(expected, abs=tolerance, rel=0), key
    after = dict(plain.model.named_parameters())
    for name, p in on_engine.model.named_parameters():
        torch.testing.assert_close(p, after[name], atol=1e-5, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
    assert max((before[n] - after[n]).abs().max() for n in before) > 1e-3


def test_a_loop_of_ppo() -> None:
    """Whose ratio is 1 where the policy has not moved yet, at every step."""
    model: Any = speaker("lfm3").train()
    reference = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    prompts = make_tokenizer()(TEXTS)["input_ids"]
    params = SamplingParams(n=4, max_tokens=6, ignore_eos=True)
    config = EngineConfig(kv_cache_memory="2MiB", block_size=4)
    moved = []
    with RolloutEngine(model, config=config) as engine, RolloutEngine(reference, config=config) as theirs:
        for _ in range(3):
            batch = engine.generate_batch(prompts, params)
            t = batch.to_tensors(PAD)
            expected = torch.stack([s.logprobs for s in theirs.score(batch)])
            kl = kl_penalty(t.logprobs, expected, t.completion_mask)
            moved.append(float(masked_mean(kl.abs(), t.completion_mask)))
            scores = torch.tensor([float(c.token_ids.count(3)) for o in batch for c in o.completions])
            rewards = token_rewards(scores, kl, t.completion_mask, kl_coefficient=0.05)
            advantages, _ = gae(rewards, torch.zeros_like(rewards), t.completion_mask)
            ids, mask = torch.cat([t.prompt_ids, t.completion_ids], 1), torch.cat([t.prompt_mask, t.completion_mask], 1)
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
            before = logits[:, t.prompt_ids.shape[1] - 1 : -1].log_softmax(-1)
            ratio = (before.gather(-1, t.completion_ids[..., None])[..., 0] - t.logprobs).exp()
            torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=LOGPROB_TOLERANCE)
            loss = -masked_mean(ratio * whiten(advantages, t.completion_mask), t.completion_mask)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.update_weights()
    assert moved[0] < LOGPROB_TOLERANCE < moved[1] < moved[2]
