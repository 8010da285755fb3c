"""Weights in fp8: the model that they make is the plain one with rounded weights, whatever happens to those they are made of.

The oracle is the plain Hugging Face forward of a copy of the model whose weights were rounded by other means than the
engine's.
"""

from __future__ import annotations

import copy
from typing import Any

import oracle
import pytest
import torch
from adapted import peft_model
from families import make_model
from mirrored import PARAMS, PROMPT, step
from pretend_device import build, close
from rounding import HYBRIDS, assert_rounded, in_fp8, make, names_of, rounded, rounded_base
from torch import Tensor

from stoker.engine.device import CpuRuntime
from stoker.kernels.errors import EngineStateError, InvalidConfigError, UnsupportedModelError
from stoker.kernels.ops import REFERENCE, ops_for
from stoker.kernels.triton_ops import DETERMINISTIC, TRITON
from stoker.rollout import EngineConfig, SamplingParams

# Of their weights, those that no fused layer multiplies by; of Llama 4 the experts, which run over every token elsewhere.
KEPT = [
    "embed",
    "per_layer_model",
    "lm_head",
    "router",
    ".gate.",
    "_bias",
    "conv",
    "shared_expert",
    "wte",
    "wpe",
    "A_log",
]


FAMILIES = ["llama", "qwen2", "gemma3", "gemma4", "gpt2", "deepseek_v3", "gpt_oss", "qwen3_moe", "llama4"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", [*FAMILIES, *sorted(HYBRIDS)])
def test_the_plain_forward_with_rounded_weights(family: str, device: str) -> None:
    model = make(family)
    with in_fp8(copy.deepcopy(model).to(device), max_num_batched_tokens=7, kv_cache_memory="8MiB") as engine:
        kept = {name for name, p in model.named_parameters() if p.dim() > 1} - names_of(engine)
        assert all(any(part in name for part in KEPT) or ("experts" in name and family == "llama4") for name in kept)
        assert engine.verify_weights().ok
        assert_rounded(engine, model, [PROMPT, PROMPT[3:], [5]])


def test_weights_whose_siblings_lie_apart_and_their_biases() -> None:
    """As in the flat buffers of a sharded optimizer, from which nothing is moved."""
    model = make_model("qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            parameters = [*layer.parameters()][::-1]  # or neighbours of a matmul would lie side by side
            flat = torch.cat([p.flatten() for p in parameters])
            for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                p.data = part.view(p.shape)
    with in_fp8(model) as engine:
        assert not engine._binding.wholes
        assert_rounded(engine, model)
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.bias += 1
            model.model.layers[1].self_attn.q_proj.bias -= 1
        assert_rounded(engine, model)


# -- what they are made of changes ------------------------------------------------------------------------------------


def test_an_optimizer_step_whether_it_is_announced_or_not() -> None:
    model = make_model("llama")
    with in_fp8(model) as engine:
        step(model)  # before anything has run
        assert_rounded(engine, model)
        step(model)
        engine.update_weights()
        written = sum(p.numel() + 4 * len(p) for name, p in model.named_parameters() if name in names_of(engine))
        assert engine.stats().last_update_bytes == written <= engine.stats().mirror_bytes < 1.01 * written
        assert_rounded(engine, model)
        assert engine.weight_version == 2
        step(model)
        assert_rounded(engine, model)
        engine.update_weights()
        weight = model.model.layers[1].mlp.down_proj.weight
        weight.data.mul_(-1)  # after an announcement, and past autograd's counters
        assert engine.verify_weights().mismatched == ("model.layers.1.mlp.down_proj.weight",)
        assert_rounded(engine, model)
        assert engine.verify_weights().ok


def test_parameters_that_are_replaced() -> None:
    model = make_model("llama")
    with in_fp8(model) as engine:
        for p in model.parameters():
            p.data = p.data.clone() * 1.1
        assert_rounded(engine, model)


def test_weights_from_elsewhere() -> None:
    model, other = make_model("llama"), make_model("llama", seed=3)
    with in_fp8(model) as engine:
        engine.update_weights(dict(other.named_parameters()))
        assert_rounded(engine, other)


def test_an_update_in_flight_shows_at_its_seam() -> None:
    model = make_model("llama")
    with in_fp8(model) as engine:
        handle = engine.submit(PROMPT, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
        engine.wait([handle], timeout=0)
        engine.pause()
        step(model)
        engine.update_weights()
        engine.resume(recompute=True)
        (c,) = handle.result().completions
        assert set(c.weight_versions) == {0, 1}
        at = c.weight_versions.index(1)
        expected = oracle.logprobs(rounded(model, names_of(engine)), PROMPT, c.token_ids)
        torch.testing.assert_close(torch.tensor(c.logprobs).double()[at:], expected[at:], rtol=0, atol=1e-4)


def test_a_scrambled_copy_is_named() -> None:
    model = make_model("qwen3_moe")
    with in_fp8(model) as engine:
        matrices = engine._binding.derived.by_name
        row = matrices["model.layers.0.self_attn.k_proj.weight"].made[0].view(torch.uint8)[3]
        row.copy_(row.flip(0))
        assert engine.verify_weights().mismatched == ("model.layers.0.self_attn.k_proj.weight",)
        engine.update_weights()
        assert engine.verify_weights().ok
        experts = next(name for name in matrices if name.endswith("experts.down_proj"))
        matrices[experts].made[1][1, 2] *= 2
        assert engine.verify_weights().mismatched == (experts,)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [2, 3])
def test_sleep_gives_their_memory_back(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    with in_fp8(model) as engine:
        data = engine._binding.derived._memory.data.untyped_storage()
        wanted = engine.generate_batch([PROMPT], PARAMS)[0].completions[0].logprobs
        assert data.nbytes() == engine.stats().mirror_bytes > 0
        engine.sleep(1)
        assert data.nbytes()
        engine.sleep(level)
        assert data.nbytes() == 0
        with pytest.raises(EngineStateError, match="asleep"):
            engine.update_weights()
        calls = []

        def short(*tensors: Tensor) -> None:
            calls.append(tensors)
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(engine._binding.derived, "_make", short, raising=False)
            with pytest.raises(EngineStateError, match="no memory for the weights"):
                engine.wake_up()
        assert calls and data.nbytes() == 0 and engine.is_sleeping
        engine.wake_up()
        assert engine.generate_batch([PROMPT], PARAMS)[0].completions[0].logprobs == wanted
        assert engine.verify_weights().ok


def test_weights_that_are_others_only_while_it_wakes() -> None:
    """As averaged ones are that a trainer puts in their place meanwhile: what was rounded then is rounded once more."""
    model = make_model("llama")
    with in_fp8(model) as engine:
        assert_rounded(engine, model)
        before = copy.deepcopy(model.state_dict())
        engine.sleep(level=2)
        step(model)
        engine.wake_up()
        model.load_state_dict(before)
        assert_rounded(engine, model)


def test_the_model_is_as_it_was() -> None:
    model = make_model("llama")
    before = {name: p.clone() for name, p in model.named_parameters()}
    with in_fp8(model) as engine:
        engine.generate_batch([PROMPT], PARAMS)
    assert all(torch.equal(p, before[name]) and p.requires_grad for name, p in model.named_parameters())
    step(model)


# -- adapters ---------------------------------------------------------------------------------------------------------


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "saved head": {"modules_to_save": ["lm_head"]},
    "dora": {"use_dora": True},
    "by column": {"family": "gpt2", "use_dora": True, "target_modules": ["c_attn", "c_proj", "c_fc"]},
}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, "auto") for kind in OPTIONS), *((kind, "float64") for kind in OPTIONS if kind != "by column")],
)
def test_adapters_over_a_rounded_base(kind: str, dtype: str) -> None:
    """Mixed with the base in one batch. The norms of DoRA are those of the rounded weights."""
    model = peft_model(**{"r": 4} | OPTIONS[kind])
    with in_fp8(model, dtype=dtype) as engine:
        batch = engine.generate_batch([PROMPT] * 2, PARAMS, adapter=["default", None])
        other = rounded_base(model, names_of(engine))
        for output, adapted in zip(batch, (True, False), strict=True):
            (c,) = output.completions
            if adapted:
                expected = oracle.logprobs(other, PROMPT, c.token_ids)
            else:
                with other.disable_adapter():
                    expected = oracle.logprobs(other, PROMPT, c.token_ids)
            torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)


# -- on a device ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("llama", {"num_hidden_layers": 1}), ("gpt_oss", {"num_hidden_layers": 1, "layer_types": None})],
    ids=["llama", "gpt_oss"],
)
def test_with_the_kernels_of_a_gpu(family: str, sizes: dict[str, Any]) -> None:
    """Captured steps follow an update: what is rounded stays where it is."""
    prompts, settings = [PROMPT, PROMPT[5:]], SamplingParams(max_tokens=4, seed=2, ignore_eos=True)
    with build(make_model(family, **sizes), ops=REFERENCE, runtime=CpuRuntime, quantization="fp8") as plain:
        expected = plain.generate_batch(prompts, settings)
    model = make_model(family, **sizes)
    with build(model, ops=TRITON, decode_window=1, quantization="fp8") as engine:
        close(engine.generate_batch(prompts, settings), expected)
        assert engine.core.runner.has_graphs and engine.verify_weights().ok


def test_deterministic_bits() -> None:
    with build("qwen3", ops=DETERMINISTIC, num_layers=1, quantization="fp8") as engine:
        settings = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
        together = engine.generate_batch([PROMPT[:4], PROMPT[2:9]], settings)
        alone = engine.generate_batch([PROMPT[2:9]], settings)
    assert together[1].completions[0].logprobs == alone[0].completions[0].logprobs


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["int8", "FP8", 8, True, torch.float8_e4m3fn])
def test_another_kind_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidConfigError, match=r"quantization=.*: give 'fp8', or None"):
        EngineConfig(quantization=wrong)  # type: ignore[arg-type]


def test_a_device_without_such_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(
        InvalidConfigError, match=r"quantization='fp8' needs a GPU of compute capability 8.9 .* has 8.0"
    ):
        ops_for(torch.device("cuda:0"), in_fp8=True)


def test_a_model_without_fused_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.rollout.shell_builder.fuse_layers", lambda *_: (0, False))
    model = make_model("llama")
    places = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(UnsupportedModelError, match="quantization='fp8' rounds the weights of fused layers"):
        in_fp8(model)
    step(model)
    assert len(places) == len({p.untyped_storage().data_ptr() for p in model.parameters()})
