"""The engine with the kernels of a CUDA device, in Triton's interpreter, and its deterministic mode."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from adapted import peft_model, state_dict, with_lora
from families import make_model
from pretend_device import STATIC, VOCAB, PretendDevice, bits, build, close, prompts, results
from tokenizer_kinds import tokenizer
from torch import Tensor

from stoker.engine.device import CpuRuntime
from stoker.engine.layers import fused_layers
from stoker.kernels.errors import InvalidConfigError, UnsupportedModelError
from stoker.kernels.lora import tiles as lora_tiles
from stoker.kernels.lora.tiles import tiles_by_slot
from stoker.kernels.ops import CPU, REFERENCE, Ops, ops_for
from stoker.kernels.triton_ops import DETERMINISTIC, TRITON
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams, binding

# A window's blocks of their own beside states, and gates of heads.
TWO_OF_KIMI = {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "dense"]}
THREE_OF_LFM3 = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "sliding_attention", "full_attention"],
    "sliding_window": 3,
}
# One that hands out its keys and values, and one that takes them.
TWO_OF_GEMMA4 = {"num_hidden_layers": 2, "num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2}


def few(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """As short as still makes chunks, windows and blocks: the interpreter takes 10 ms a program."""
    return [p[:9] for p in prompts(count)], [
        SamplingParams(seed=i, max_tokens=4, ignore_eos=True) for i in range(count)
    ]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gpt_oss", {"num_hidden_layers": 1, "layer_types": None}),
        ("deepseek_v3", {"num_hidden_layers": 2}),
        ("gemma4", TWO_OF_GEMMA4),
        ("llama4", {"num_hidden_layers": 2, "layer_types": None, "no_rope_layers": [1, 0]}),
        # Of which the window's blocks are given up within a few tokens.
        (
            "gemma3",
            {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_with_the_kernels_of_a_gpu_the_tokens_are_those_of_the_torch_operations(
    family: str, sizes: dict[str, Any]
) -> None:
    with build(make_model(family, **sizes), ops=REFERENCE, runtime=CpuRuntime) as plain:
        expected = plain.generate_batch(*few(3))
    model = make_model(family, **sizes)
    with build(model, ops=TRITON, decode_window=1) as engine:  # the second step is captured, the third replayed
        assert engine.stats().fused_layers == engine.stats().num_layers
        close(engine.generate_batch(*few(3)), expected)
        assert engine.core.runner.has_graphs


def test_with_the_kernels_of_a_gpu_parameters_of_sampling_are_those_of_the_torch_operations() -> None:
    """In captured steps, whose rows they are for change from one to the next."""
    asked: list[dict[str, Any]] = [
        {"top_k": 5, "repetition_penalty": 1.4},
        {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.4},
        {"top_p": 0.7, "temperature": 0.6, "logprobs_mode": "processed", "logprobs": 2},
        {"min_tokens": 3, "stop_token_ids": [t for t in range(VOCAB) if t not in (5, 9)], "ignore_eos": False},
        {"logit_bias": {7: 9.0, 8: 9.0, 11: -9.0}, "repetition_penalty": 1.8, "logprobs_mode": "raw"},
        {"min_p": 0.2, "logit_bias": {3: 2.0}},
    ]
    fields = {"max_tokens": 6, "ignore_eos": True}
    settings = [SamplingParams(**(fields | {"seed": i} | each)) for i, each in enumerate(asked)]
    given = [p[:9] for p in prompts(len(settings))], settings
    with build(make_model("llama", num_hidden_layers=1), ops=REFERENCE, runtime=CpuRuntime) as plain:
        expected = plain.generate_batch(*given)
    assert [len(output.completions[0].token_ids) for output in expected] == [6, 6, 6, 4, 6, 6]
    with build(make_model("llama", num_hidden_layers=1), ops=TRITON, decode_window=1) as engine:
        close(engine.generate_batch(*given), expected)
        assert engine.core.runner.has_graphs


def test_with_the_kernels_of_a_gpu_a_pattern_is_followed_as_with_the_torch_operations() -> None:
    one = tokenizer("byte-level")
    model = make_model("llama", vocab_size=len(one) + 6, num_hidden_layers=1)
    settings = [SamplingParams(regex=r, max_tokens=5, seed=1) for r in ("(yes|no), [0-9]{2}", None, r"\w+", "no")]
    found = []
    for ops, runtime in ((REFERENCE, CpuRuntime), (TRITON, PretendDevice)):
        with build(model, ops=ops, runtime=runtime, decode_window=2) as engine:
            engine._requests.tokenizer = engine._requests.constraint.tokenizer = one
            engine._requests.find_eos_ids = lambda: frozenset([one.eos_token_id])
            found.append(engine.generate_batch([[5, 6, 7]] * 4, settings))
    close(*found)
    assert found[0][3].completions[0].text == "no"


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        # Two layers with a state, of a family that attends and of one that does not; of others one layer of each kind.
        *(("qwen3_5", {}), ("mamba", {"num_hidden_layers": 2})),
        *(("bamba", {"num_hidden_layers": 2}), ("falcon_h1", {"num_hidden_layers": 1})),
        ("nemotron_h", {"num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "moe"]}),
        ("kimi_linear", TWO_OF_KIMI | {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}),
        ("jamba", {"num_hidden_layers": 2}),
        ("lfm3", THREE_OF_LFM3),
        ("glm4_moe", {"num_hidden_layers": 2}),
        ("qwen3_5_moe", {"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_with_the_kernels_of_a_gpu_layers_with_states_or_experts_give_what_the_plain_forward_does(
    family: str, sizes: dict[str, Any]
) -> None:
    model = make_model(family, **sizes)
    with build(model, runtime=CpuRuntime) as plain:
        expected = plain.generate_batch(*few(3))
    with build(model, ops=TRITON, decode_window=1) as engine:
        assert engine.stats().fused_layers == engine.stats().num_layers
        batch = engine.generate_batch(*few(3))
        assert results(batch) == results(expected)
        assert engine.core.runner.has_graphs
    for output in batch:
        (c,) = output.completions
        logprobs = oracle.logprobs(make_model(family, **sizes), output.prompt_token_ids, c.token_ids)
        torch.testing.assert_close(torch.tensor(c.logprobs).double(), logprobs, rtol=0, atol=1e-4)


def test_what_a_layer_of_its_own_code_just_made_is_not_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba's D and bias in fp32, in a step of one row, whose other inputs lie right. Every test here is watched for that."""
    monkeypatch.setattr(fused_layers, "structure_of", lambda layer: None)
    model = make_model("mamba", num_hidden_layers=1).bfloat16()
    params = SamplingParams(max_tokens=2, seed=1, ignore_eos=True)
    found = []
    for ops, runtime in ((REFERENCE, CpuRuntime), (TRITON, PretendDevice)):
        with build(model, ops=ops, runtime=runtime, decode_window=1) as engine:
            assert engine.stats().fused_layers == 0
            found.append(results(engine.generate_batch([[5]], params)))
    assert found[0] == found[1]


@pytest.mark.parametrize("ops", [TRITON, CPU], ids=["triton", "cpu"])
def test_what_goes_to_the_device_is_made_on_the_host_whatever_a_trainer_s_default_is(ops: Ops) -> None:
    prompts = [[1, 2, 3]]
    settings = SamplingParams(n=2, seed=1, max_tokens=2, repetition_penalty=1.2, top_k=5, logprobs=2, ignore_eos=True)
    with build(ops=ops, num_layers=1, block_size=2) as engine:
        expected, scores = bits(engine.generate_batch(prompts, settings)), engine.score(prompts, top_k=2)
        engine.update_weights()
        torch.set_default_device("meta")
        try:
            found, again = bits(engine.generate_batch(prompts, settings)), engine.score(prompts, top_k=2)
        finally:
            torch.set_default_device(None)
        assert found == expected
        for one, other in zip(again, scores, strict=True):
            for name in ("token_ids", "logprobs", "ranks", "top_ids"):
                assert torch.equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("ops", [DETERMINISTIC, TRITON], ids=["deterministic", "not"])
def test_deterministic_bits_do_not_depend_on_the_batch(ops: Ops) -> None:
    several, settings = few(3)
    with build("qwen3", ops=ops, num_layers=1, max_num_batched_tokens=8) as engine:  # prompts in chunks
        together = bits(engine.generate_batch(several, settings))
        hit = bits(engine.generate_batch(several, settings))
        engine.update_weights()
        scored = engine.score(
            [p + t[0][0] for p, t in zip(several, together, strict=True)], start=[len(p) for p in several]
        )
    with build("qwen3", ops=ops, num_layers=1, enable_prefix_caching=False) as engine:
        alone = [bits(engine.generate_batch([p], [s]))[0] for p, s in zip(several[1:], settings[1:], strict=True)]
    rescored = [[(t[0][0], s.logprobs.tolist())] for t, s in zip(together, scored, strict=True)]
    same = (together[1:] == alone, together == hit, together == rescored)
    assert same == (True, True, True) if ops is DETERMINISTIC else not all(same)
    assert [[c[0] for c in row] for row in together[1:]] == [[c[0] for c in row] for row in alone]


def test_deterministic_bits_survive_preemption() -> None:
    """What is computed a second time, now as a prompt, gives the bits of the first."""
    several, settings = few(2)
    settings = [replace(s, max_tokens=7) for s in settings]
    with build("qwen3", ops=DETERMINISTIC, num_layers=1) as engine:
        undisturbed = bits(engine.generate_batch(several, settings))
        block_bytes = engine.stats().kv_block_bytes
    with build("qwen3", ops=DETERMINISTIC, num_layers=1, kv_cache_memory=8 * block_bytes) as engine:
        assert bits(engine.generate_batch(several, settings)) == undisturbed
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gemma2", {"num_hidden_layers": 1}),
        ("gpt_neox", {"num_hidden_layers": 1}),
        ("gemma4", TWO_OF_GEMMA4),
        # One layer of each kind: that states are those of their layer is looked at above.
        ("qwen3_5", {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}),
        ("bamba", {"num_hidden_layers": 2}),
        ("lfm3", THREE_OF_LFM3),
        ("llama4", {"num_hidden_layers": 1, "no_rope_layers": [1], "moe_layers": [0]}),
        ("gemma4+experts", {"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
        ("nemotron_h", {"num_hidden_layers": 2, "layers_block_type": ["attention", "moe"]}),
        ("kimi_linear", {"num_hidden_layers": 2, **TWO_OF_KIMI}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_others_are_deterministic_too(family: str, sizes: dict[str, Any]) -> None:
    """Norms after the projections, GeGLU, softcaps and inputs of each layer; LayerNorms of attention and MLP side by side;
    layers with states, and gates; experts."""
    several, settings = few(2)
    with build(make_model(family, **sizes), ops=DETERMINISTIC, max_num_batched_tokens=8) as engine:
        together = bits(engine.generate_batch(several, settings))
        assert together[1] == bits(engine.generate_batch(several[1:2], settings[1:2]))[0]
        scored = engine.score(
            [p + t[0][0] for p, t in zip(several, together, strict=True)], start=list(map(len, several))
        )
        assert [[(t[0][0], s.logprobs.tolist())] for t, s in zip(together, scored, strict=True)] == together
    with build(make_model(family, **sizes), runtime=CpuRuntime) as plain:
        expected = plain.generate_batch(several, settings)
    assert [[c[0] for c in row] for row in together] == [[c.token_ids for c in o.completions] for o in expected]


def test_deterministic_bits_do_not_depend_on_the_adapters_of_others() -> None:
    """Also where what a layer adds to the residual is scaled."""
    source = with_lora(make_model("granite", num_hidden_layers=1))
    several, settings = few(2)
    with build("granite", ops=DETERMINISTIC, num_layers=1) as engine:
        engine.load_adapter("a", (state_dict(source), source.peft_config["default"]))
        alone = bits(engine.generate_batch(several[1:], settings[1:2], adapter=None))
        beside = bits(engine.generate_batch(several, settings, adapter=["a", *[None] * len(several[1:])]))
    assert beside[1:] == alone


def test_a_replayed_step_puts_its_own_tokens_in_tiles_of_their_adapters() -> None:
    """Not those of the step that was captured. Once a step for each height of tiles, for all of its layers."""
    sources = {f"{seed}": peft_model(seed=seed, target_modules=["q_proj", "gate_proj"]) for seed in (1, 2)}
    adapters: list[list[str | None]] = [["1", "2", None, "1"], [None, "1", "2", "2"]]
    tokens, sorted_ = [[3], [5], [6], [8]], Counter[int]()

    def by_slot(slots: Tensor, num_slots: int, height: int) -> Any:
        sorted_[height] += 1
        return tiles_by_slot(slots, num_slots, height)

    found = []
    for ops, runtime in ((REFERENCE, CpuRuntime), (replace(STATIC, lora=TRITON.lora), PretendDevice)):
        with build(ops=ops, runtime=runtime, decode_window=1) as engine, pytest.MonkeyPatch.context() as patch:
            patch.setattr(lora_tiles, "tiles_by_slot", by_slot)
            for name, model in sources.items():
                engine.load_adapter(name, (state_dict(model), model.peft_config["default"]))
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            found.append([engine.generate_batch(tokens, params, adapter=names) for names in adapters])
            assert engine.core.runner.has_graphs == bool(sorted_)
    for one, other in zip(*found, strict=True):
        close(one, other)
    assert sorted_ == dict.fromkeys((8, 16), 3 * len(adapters))  # low ones are the gated projection's


def test_deterministic_is_refused_where_it_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfigError, match="deterministic=True needs CUDA kernels, and the model is on cpu"):
        RolloutEngine(make_model("llama"), config=EngineConfig(deterministic=True))
    monkeypatch.setattr(binding, "ops_for", lambda *_, **__: DETERMINISTIC)
    # The one's weights lie column by column, and of the other's layers all but experts in a space of their own are fused.
    for model in (make_model("gpt2"), make_model("nemotron_h", moe_latent_size=16)):
        with pytest.raises(
            UnsupportedModelError, match=f"{type(model).__name__} has layers that run their own matmuls"
        ):
            RolloutEngine(model, config=EngineConfig(deterministic=True))


def test_a_layer_that_the_kernels_cannot_run_has_torch_attention(caplog: pytest.LogCaptureFixture) -> None:
    cuda = torch.device("cuda")
    table = ops_for(cuda, [(64, 64, torch.bfloat16), (576, 512, torch.float16)])
    assert table.paged_attention is TRITON.paged_attention and table.static_plans
    assert ops_for(cuda, [(64, 64, torch.bfloat16)], deterministic=True) is DETERMINISTIC
    table = ops_for(cuda, [(64, 64, torch.bfloat16), (1024, 64, torch.bfloat16)])
    assert (
        table.paged_attention is REFERENCE.paged_attention
        and table.rms_norm is TRITON.rms_norm
        and not table.static_plans
    )
    assert len(caplog.records) == 1 and "1024" in caplog.text and "slow" in caplog.text
    with pytest.raises(InvalidConfigError, match=r"deterministic=True cannot be had: .*float64"):
        ops_for(cuda, [(64, 64, torch.float64)], deterministic=True)
