"""A base in 4 or 8 bits, by bitsandbytes, under adapters: the trainer's own layers on the trainer's own weights (QLoRA)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from pretend_device import STATIC, PretendDevice
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM
from trl_setup import LOGPROB_TOLERANCE, build, logged

from stoker.engine.graphs import GraphStep
from stoker.engine.layers.quantised import QuantisedLinear
from stoker.kernels.ops import REFERENCE
from stoker.rollout import (
    EngineConfig,
    RolloutEngine,
    SamplingParams,
    UnsupportedModelError,
    WeightsMismatchError,
    WeightsMovedError,
    binding,
)
from stoker.rollout import engine as engine_module
from stoker.weight_sync.mirrored_source import MirroredSource

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

from bitsandbytes.nn.modules import has_avx512bf16
from peft import LoraConfig
from quantised_bases import KINDS, adapted, quantised, save

PROMPTS = [[3, 4, 5, 6], [9, 8, 7], list(range(1, 40)), [5]]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"))


def check(model: Any, batch: Any) -> None:
    """Tokens of ``generate``, and log-probabilities of the forward, of the model as it is."""
    for prompt, output in zip(PROMPTS, batch, strict=True):
        (completion,) = output.completions
        wanted = oracle.greedy_logprobs(model, prompt, completion.token_ids, 10)
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), wanted, rtol=0, atol=LOGPROB_TOLERANCE)


def contents(model: Any) -> dict[str, tuple[int, torch.Tensor]]:
    return {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}


# In 8 bits without DoRA: on a CPU, PEFT's own second forward of it fails.
DORA = {"use_dora": True, "use_rslora": True}


@pytest.mark.parametrize(
    ("kind", "options"),
    [("nf4", {}), ("nf4", DORA), ("fp4", DORA), ("int8", {})],
    ids=["nf4", "nf4-dora", "fp4-dora", "int8"],
)
def test_base_and_adapters_are_those_of_peft(folder: Path, kind: str, options: dict[str, Any]) -> None:
    model = adapted(quantised(folder, kind), **options)
    oracle.greedy(model, PROMPTS[0], 1)  # in 8 bits the first forward puts the weights in place
    before = contents(model)
    with RolloutEngine(model, config=EngineConfig(block_size=4, max_num_batched_tokens=16)) as engine:
        check(model, engine.generate_batch(PROMPTS, GREEDY))
        with model.disable_adapter():
            check(model, engine.generate_batch(PROMPTS, GREEDY, adapter=None))
        mixed = engine.generate_batch(PROMPTS * 2, GREEDY, adapter=["default", None] * 4)
        for row, output in enumerate(mixed):
            alone = engine.generate_batch(PROMPTS * 2, GREEDY, adapter="default" if row % 2 == 0 else None)[row]
            assert output.completions[0].token_ids == alone.completions[0].token_ids
        assert engine.verify_weights().ok and engine.stats().mirror_bytes == 0
        shell = engine.core.runner.model.module
        assert sum(isinstance(m, QuantisedLinear) for m in shell.modules()) == 14
    for name, (address, content) in contents(model).items():
        assert address == before[name][0] and torch.equal(content, before[name][1])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_an_optimizer_step_of_the_adapter_moves_no_byte(folder: Path, kind: str) -> None:
    model = adapted(quantised(folder, kind), use_dora=kind == "nf4")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    with RolloutEngine(model) as engine:
        first = engine.generate_batch(PROMPTS, GREEDY)
        for announced in (True, False):
            ids = torch.tensor([PROMPTS[2]])
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if announced:
                engine.update_weights()
                assert engine.stats().last_update_bytes == 0
            check(model, engine.generate_batch(PROMPTS, GREEDY))
        assert engine.weight_version == 2
        after = engine.generate_batch(PROMPTS, GREEDY)
        engine.sleep(level=2)
        engine.wake_up()
        check(model, engine.generate_batch(PROMPTS, GREEDY))
    assert [o.completions[0].logprobs for o in first] != [o.completions[0].logprobs for o in after]


@pytest.mark.parametrize(("kind", "threshold"), [("nf4", 6.0), ("int8", 6.0), ("int8", 0.0)])
def test_a_step_that_waits_for_the_device_is_not_captured(
    folder: Path, kind: str, threshold: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantised(folder, kind)
    for module in model.modules():
        if hasattr(module, "state"):
            module.state.threshold = threshold
    waits = kind == "int8" and threshold > 0
    monkeypatch.setattr(engine_module, "runtime_for", PretendDevice)
    monkeypatch.setattr(binding, "ops_for", lambda *_, **__: STATIC)
    with RolloutEngine(model, config=EngineConfig(block_size=4, max_model_len=64)) as engine:
        assert isinstance(engine.core.runner, GraphStep) == (not waits)
        assert ("llm_int8_threshold" in caplog.text) == waits


def test_scores_are_those_of_the_forward(folder: Path) -> None:
    model = adapted(quantised(folder, "nf4"))
    with RolloutEngine(model) as engine:
        batch = engine.generate_batch(PROMPTS, GREEDY)
        for score, output in zip(engine.score(batch), batch, strict=True):
            sampled = torch.tensor(output.completions[0].logprobs)
            torch.testing.assert_close(score.logprobs, sampled, rtol=0, atol=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_given_tokens_are_scored_with_the_prompt(folder: Path, kind: str) -> None:
    """By ``score`` and by ``prompt_logprobs``, with the adapter and without, as the model's forward has them."""
    model = adapted(quantised(folder, kind))
    prompt = PROMPTS[2]
    with RolloutEngine(model, config=EngineConfig(block_size=4, max_num_batched_tokens=16)) as engine:
        for adapter in ("default", None):
            with nullcontext() if adapter else model.disable_adapter():
                wanted = oracle.logprobs(model, prompt[:1], prompt[1:])
            (score,) = engine.score([prompt], adapter=adapter)
            params = SamplingParams(max_tokens=1, prompt_logprobs=0)
            (output,) = engine.generate_batch([prompt], params, adapter=adapter)
            asked = output.prompt_logprobs.logprobs
            for got in (score.logprobs, asked):
                torch.testing.assert_close(got.double(), wanted, rtol=0, atol=LOGPROB_TOLERANCE)


def test_a_loaded_adapter_beside_the_live_one(folder: Path, tmp_path: Path) -> None:
    model, other = adapted(quantised(folder, "nf4")), adapted(quantised(folder, "nf4"), r=7, use_dora=True, seed=5)
    other.save_pretrained(tmp_path)
    with RolloutEngine(model) as engine:
        engine.load_adapter("other", tmp_path)
        choices = ["default", "other", None]
        batch = engine.generate_batch(PROMPTS * 3, GREEDY, adapter=[c for c in choices for _ in PROMPTS])
        check(model, batch[:4])
        check(other, batch[4:8])
        with model.disable_adapter():
            check(model, batch[8:])
        engine.unload_adapter("other")
        check(model, engine.generate_batch(PROMPTS, GREEDY))


def test_a_merged_adapter_is_refused(folder: Path) -> None:
    model = adapted(quantised(folder, "nf4"))
    model.merge_adapter()
    with pytest.raises(UnsupportedModelError, match=r"is merged into .*: call unmerge_adapter"):
        RolloutEngine(model)


@pytest.mark.parametrize(("ran_before", "in_place"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_changed_are_seen(folder: Path, kind: str, ran_before: bool, in_place: bool) -> None:
    """Unannounced, and though the weights themselves are as they were: no prompt's KV of before is read again."""
    model = quantised(folder, kind)
    if ran_before:  # in 8 bits that is when scales go from the weight to its module
        oracle.greedy(model, PROMPTS[0], 1)
    with RolloutEngine(model, config=EngineConfig(block_size=4)) as engine:
        first = engine.generate_batch(PROMPTS, GREEDY)
        assert engine.generate_batch(PROMPTS, GREEDY)[2].cached_tokens > 0 and engine.weight_version == 0
        layer = model.model.layers[0].mlp.up_proj
        if kind == "int8":
            state, name = layer.state, "SCB"
        elif (nested := layer.weight.quant_state.state2) is not None:  # scales have a scale and an offset of their own
            state, name = (layer.weight.quant_state, "offset") if ran_before else (nested, "absmax")
        else:
            state, name = layer.weight.quant_state, "absmax"
        if in_place:
            getattr(state, name).mul_(3)
        else:
            setattr(state, name, getattr(state, name) * 3)
        after = engine.generate_batch(PROMPTS, GREEDY)
        check(model, after)
        assert engine.weight_version == 1 and engine.verify_weights().ok
    assert [o.completions[0].logprobs for o in first] != [o.completions[0].logprobs for o in after]


def test_scales_that_were_replaced_come_into_a_mirror(folder: Path) -> None:
    """Of a model that is whole again, say, while the engine was built on shards. Scales are in no registry of a module."""
    model = quantised(folder, "fp4")
    source = MirroredSource(model, None, None)
    source.tensors()
    source.pull()
    state = model.model.layers[0].mlp.up_proj.weight.quant_state
    state.absmax = 3 * state.absmax
    source.pull()
    held = source.tensors()["model.layers.0.mlp.up_proj.weight"].quant_state
    assert torch.equal(held.absmax, state.absmax) and held.absmax is not state.absmax


def test_weights_that_were_replaced_are_bound_again(folder: Path) -> None:
    model = quantised(folder, "fp4")
    with RolloutEngine(model) as engine:
        check(model, engine.generate_batch(PROMPTS, GREEDY))
        weight = model.model.layers[0].mlp.up_proj.weight
        weight.data = model.model.layers[1].mlp.up_proj.weight.data.clone()
        weight.quant_state = model.model.layers[1].mlp.up_proj.weight.quant_state
        check(model, engine.generate_batch(PROMPTS, GREEDY))
        assert engine.weight_version == 1


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_a_wide_head_over_bits_that_are_stored_as_floats(folder: Path, storage: torch.dtype) -> None:
    """TRL's ``cast_lm_head_to_fp32``. The same bits in integers give the same numbers."""
    found = []
    for stored in (torch.uint8, storage):
        model = quantised(folder, "nf4", bnb_4bit_quant_storage=stored)
        for name, parameter in model.named_parameters():
            if "lm_head" not in name and not hasattr(parameter, "quant_state"):
                parameter.data = parameter.data.bfloat16()
        with RolloutEngine(model) as engine:
            found.append([o.completions[0] for o in engine.generate_batch(PROMPTS, GREEDY)])
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs


@pytest.mark.skipif(not has_avx512bf16(), reason="this CPU does not compute in bfloat16")
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_weights_that_an_evaluation_lays_out_for_the_cpu(folder: Path, kind: str) -> None:
    model = quantised(folder, kind)
    for module in model.modules():
        module.support_avx512bf16_for_cpu = True
    with RolloutEngine(model) as engine:
        engine.generate_batch(PROMPTS, GREEDY)
        oracle.greedy(model, PROMPTS[0], 1)
        assert model.model.layers[0].mlp.up_proj.weight.quant_state.packing_format_for_cpu
        check(model, engine.generate_batch(PROMPTS, GREEDY))
        assert engine.weight_version == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dtype": "bfloat16"}, "is quantised, and runs where it is as it is: leave dtype and device"),
        ({"quantization": "fp8"}, "rounds the weights of fused layers, and LlamaForCausalLM has none: leave it out"),
    ],
)
def test_what_a_quantised_base_cannot_do_is_refused(folder: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        RolloutEngine(quantised(folder, "nf4"), config=EngineConfig(**config))


def test_deterministic_mode_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "ops_for", lambda *_, **__: REFERENCE)  # what it would run on is not to be had here
    model = quantised(folder, "nf4")
    owned = [p.untyped_storage().resizable() for p in model.parameters()]
    with pytest.raises(
        UnsupportedModelError, match=r"run their own matmuls, .*deterministic=True cannot be had for it"
    ):
        RolloutEngine(model, config=EngineConfig(deterministic=True))
    assert owned == [p.untyped_storage().resizable() for p in model.parameters()]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """Of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_base_in_8_bits_is_not_sharded(folder: Path, mesh: Any) -> None:
    """Refused at once, and in an engine on a model that is sharded later."""
    model = quantised(folder, "int8")
    with RolloutEngine(model) as engine:
        engine.generate_batch(PROMPTS, GREEDY)
        fully_shard(model.model.norm, mesh=mesh)
        for call in (lambda: RolloutEngine(model), engine.update_weights):
            with pytest.raises(UnsupportedModelError, match=r"to 8 bits and sharded, .* keep it whole on each rank"):
                call()


def test_a_base_in_4_bits_is_sharded_later(folder: Path, mesh: Any) -> None:
    """And whole tensors among shards that are bits stored as floats are not taken for numbers."""
    model, twin = (adapted(quantised(folder, "nf4", bnb_4bit_quant_storage=torch.bfloat16)) for _ in range(2))
    with RolloutEngine(model, config=EngineConfig(check_finite_weights=True)) as engine:
        check(twin, engine.generate_batch(PROMPTS, GREEDY))
        for layer in model.get_base_model().model.layers:
            fully_shard(layer, mesh=mesh)
        with pytest.raises(WeightsMovedError, match="the model is sharded now"):
            engine.generate_batch(PROMPTS, GREEDY)
        assert engine.update_weights() == 1
        check(twin, engine.generate_batch(PROMPTS, GREEDY))
        assert engine.verify_weights().source == "mirror"


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_bits_that_are_stored_as_floats_are_not_taken_for_numbers(folder: Path, storage: torch.dtype) -> None:
    model = adapted(quantised(folder, "nf4", bnb_4bit_quant_storage=storage))
    assert not all(p.isfinite().all() for p in model.parameters())
    with RolloutEngine(model, config=EngineConfig(check_finite_weights=True)) as engine:
        check(model, engine.generate_batch(PROMPTS, GREEDY))
        layer = model.get_base_model().model.layers[0]
        layer.input_layernorm.weight.data[0] = torch.nan
        with pytest.raises(WeightsMismatchError, match=r"layers.0.input_layernorm.weight holds NaN or Inf: "):
            engine.update_weights()


def test_weights_from_elsewhere_are_refused(folder: Path) -> None:
    model = quantised(folder, "nf4")
    with RolloutEngine(model) as engine:
        before = engine.generate_batch(PROMPTS, GREEDY)
        with pytest.raises(UnsupportedModelError, match="would have to be quantised anew"):
            engine.update_weights(str(folder))
        assert engine.weight_version == 0
        after = engine.generate_batch(PROMPTS, GREEDY)
    assert [o.completions[0].token_ids for o in before] == [o.completions[0].token_ids for o in after]


def test_other_quantisation_is_refused_by_name(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    model.quantization_method = "gptq"
    with pytest.raises(
        UnsupportedModelError, match=r"quantised by gptq: the engine runs plain weights, and those of bitsandbytes"
    ):
        RolloutEngine(model)


@pytest.fixture
def detached() -> Iterator[list[Any]]:
    from stoker.integrations.trl import detach

    trainers: list[Any] = []
    yield trainers
    for trainer in trainers:
        detach(trainer)


def test_trl_trains_an_adapter_on_a_quantised_base(folder: Path, tmp_path: Path, detached: list[Any]) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    from stoker.integrations.trl import attach

    model = quantised(folder, "nf4")
    more = {"peft_config": LoraConfig(r=4, target_modules="all-linear")}
    trainer = build("grpo", str(tmp_path), model=model, more=more, learning_rate=0.05)
    detached.append(trainer)
    attach(trainer)
    trainer.train()
    differences = logged(trainer, "sampling/sampling_logp_difference/max")
    assert len(differences) == 3 and max(differences) < LOGPROB_TOLERANCE
