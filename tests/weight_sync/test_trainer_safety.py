"""The trainer is left alone: what it holds, computes and saves is what it would be without the engine."""

import copy
import random
from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch
from accelerate import Accelerator
from adapted import with_lora
from checksummed import checksum
from families import make_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_model
from small_training import (
    CONFIG,
    PARAMS,
    PROMPT,
    assert_matches,
    assert_same,
    in_place,
    loss_of,
    set_data,
    snapshot,
    train,
)
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from stoker.rollout import RolloutEngine, SamplingParams


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model("llama")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral", "llama4", "gemma4+experts", "deepseek_v32"])
def test_rollouts_write_to_nothing_of_the_trainer(family):
    model = make_model(family)
    model.train()
    model.model.layers[0].self_attn.o_proj.weight.requires_grad_(False)
    calls = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    loss_of(model).backward()
    calls.clear()
    attributes = {
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "training": [m.training for m in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "objects": [id(p) for p in model.parameters()],
        "modules": [id(m) for m in model.modules()],
        "generation": model.generation_config.to_dict(),
        "dictionaries": [sorted(vars(m)) for m in model.modules()],
    }
    before = snapshot(model)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    grad = torch.is_grad_enabled()

    with RolloutEngine(model, config=CONFIG) as engine:
        versions = [p._version for p in (*model.parameters(), *model.buffers())]
        for _ in range(2):
            engine.generate_batch([PROMPT, PROMPT[:5]] * 3, SamplingParams(n=2, max_tokens=8, top_p=0.9)).to_tensors(0)
            engine.sleep()
            engine.wake_up()
            engine.update_weights()
        assert [p._version for p in (*model.parameters(), *model.buffers())] == versions
        assert_same(model, before)

    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert calls == [] and torch.is_grad_enabled() == grad
    assert_same(model, before)
    assert model.config.to_dict() == attributes["config"]
    assert model.config._attn_implementation == attributes["attention"]
    assert [m.training for m in model.modules()] == attributes["training"]
    assert [p.requires_grad for p in model.parameters()] == attributes["requires_grad"]
    for p, g in zip(model.parameters(), attributes["grads"], strict=True):
        assert p.grad is g or torch.equal(p.grad, g)
    assert [id(p) for p in model.parameters()] == attributes["objects"]
    assert [id(m) for m in model.modules()] == attributes["modules"]
    assert model.generation_config.to_dict() == attributes["generation"]
    assert [sorted(vars(m)) for m in model.modules()] == attributes["dictionaries"]
    loss_of(model).backward()
    assert calls


@pytest.mark.parametrize("fields", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_training_is_bitwise_what_it_is_without_the_engine(family, fields):
    results = []
    for with_engine in (False, True):
        model = make_model(family).train()
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **fields)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
        engine = RolloutEngine(model, config=CONFIG) if with_engine else None
        for step in range(5):
            if engine is not None:
                assert set(assert_matches(engine, model.eval())) == {step}
                model.train()
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        if engine is not None:
            engine.close()
        results.append((loss.item(), snapshot(model), copy.deepcopy(optimizer.state_dict()["state"])))
    (loss, weights, state), (other_loss, other_weights, other_state) = results
    assert loss == other_loss
    assert all(torch.equal(weights[n], other_weights[n]) for n in weights)
    assert all(torch.equal(state[i][k], other_state[i][k]) for i in state for k in state[i])


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"attention_dropout": 0.9}),
        ("gpt2", {"embd_pdrop": 0.9, "attn_pdrop": 0.9, "resid_pdrop": 0.9}),
        ("gpt_neox", {"attention_dropout": 0.9, "hidden_dropout": 0.9}),
        ("phi", {"embd_pdrop": 0.9, "attention_dropout": 0.9, "resid_pdrop": 0.9}),
        ("starcoder2", {"embedding_dropout": 0.9, "attention_dropout": 0.9, "residual_dropout": 0.9}),
        ("mixtral", {"attention_dropout": 0.9, "router_jitter_noise": 0.9}),
        ("qwen3_next", {"attention_dropout": 0.9}),
    ],
)
def test_dropout_is_no_part_of_a_rollout(family, fields):
    """The model stays in the mode that its trainer has it in, and is sampled from as in ``eval()``."""
    targets = r".*\.(q_proj|query_key_value|c_attn)"
    model = with_lora(make_model(family, **fields), target_modules=targets, lora_dropout=0.9)
    expected = oracle.greedy(model, PROMPT, 6)
    model.train()
    with RolloutEngine(model, config=CONFIG) as engine:
        for _ in range(2):
            (output,) = engine.generate_batch([PROMPT], SamplingParams(temperature=0, max_tokens=6))
            assert output.completions[0].token_ids == expected
            assert all(module.training for module in model.modules())
        (scored,) = engine.score([PROMPT + expected], start=len(PROMPT))
        model.eval()
        torch.testing.assert_close(scored.logprobs, oracle.logprobs(model, PROMPT, expected).float(), atol=1e-4, rtol=0)


def test_a_rollout_between_forward_and_backward(model):
    plain = make_model("llama")
    loss_of(plain).backward()
    with RolloutEngine(model, config=CONFIG) as engine:
        loss = loss_of(model)
        assert_matches(engine, model)
        loss.backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_whatever_grad_mode_the_caller_is_in(model, mode):
    """An engine made, used, put to sleep or told of new weights in one mode works in every other."""
    with mode():
        engine = RolloutEngine(model, config=CONFIG)
        assert_matches(engine, model)
    penalised = SamplingParams(n=3, max_tokens=8, repetition_penalty=1.2, temperature=0)
    with mode():
        inside = engine.generate_batch([PROMPT], penalised)
    outside = engine.generate_batch([PROMPT], penalised)
    assert inside.outputs[0].completions == outside.outputs[0].completions
    train(model, torch.optim.SGD(model.parameters(), lr=0.01))
    set_data(model)
    with mode():
        engine.sleep()
        engine.wake_up()
        engine.update_weights()
    for _ in range(2):
        engine.generate_batch([PROMPT], SamplingParams(n=3, max_tokens=8)).raise_for_errors()
        assert_matches(engine, model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert_matches(engine, model)
    with mode():
        engine.close()
    train(model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert not any(p.is_inference() for p in model.parameters())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_parameters_replaced_in_a_pause_can_be_trained_whatever_mode_it_ends_in(model, mode):
    """They are laid side by side then, in storages of the engine's making."""
    with RolloutEngine(model, config=CONFIG) as engine:
        handle = engine.submit(PROMPT, PARAMS)
        next(iter(handle))
        engine.pause()
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight = nn.Parameter(layer.self_attn.q_proj.weight.detach().clone())
        with mode():
            engine.resume()
        handle.result()
        plain = copy.deepcopy(model)
        for trained in (model, plain):
            train(trained, torch.optim.SGD(trained.parameters(), lr=0.01))
        assert_same(model, snapshot(plain))
        assert_matches(engine, model)


def test_a_model_of_inference_tensors():
    with torch.inference_mode():
        model = make_model("llama")
        engine = RolloutEngine(model, config=CONFIG)
    assert_matches(engine, model)
    with torch.inference_mode():
        in_place(model)
    assert set(assert_matches(engine, model)) == {1}
    engine.close()


def test_autocast_and_default_dtype_of_the_caller_change_nothing(model):
    with RolloutEngine(model, config=CONFIG) as engine:
        expected = engine.generate_batch([PROMPT], PARAMS)[0].completions[0]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16), RolloutEngine(model, config=CONFIG) as engine:
            inside = engine.generate_batch([PROMPT], PARAMS)[0].completions[0]
    finally:
        torch.set_default_dtype(before)
    assert inside.token_ids == expected.token_ids and inside.logprobs == expected.logprobs


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_next", "falcon_h1"])
def test_the_default_device_of_the_caller_changes_nothing(family: str) -> None:
    model = make_model(family)
    with RolloutEngine(model, config=CONFIG) as engine:
        fused, batch = engine.stats().fused_layers, engine.generate_batch([PROMPT], PARAMS)
        (scored,) = engine.score(batch)
    torch.set_default_device("meta")
    try:
        with RolloutEngine(model, config=CONFIG) as engine:
            inside, found = engine.generate_batch([PROMPT], PARAMS), engine.stats().fused_layers
            (again,) = engine.score(inside)
    finally:
        torch.set_default_device(None)
    assert found == fused and inside[0].completions[0].token_ids == batch[0].completions[0].token_ids
    assert torch.equal(again.logprobs, scored.logprobs)


def test_checkpoints_of_a_model_under_an_engine(model, tmp_path):
    with RolloutEngine(model, config=CONFIG) as engine:
        train(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        before = snapshot(model)
        model.save_pretrained(tmp_path)
        assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), before)
        assert (tmp_path / "model.safetensors").stat().st_size < 1.1 * sum(p.nbytes for p in model.parameters()) + 8192

        torch.save(model.state_dict(), tmp_path / "state.pt")
        other = make_model("llama", seed=4)
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert_same(other, before)

        torch.save(model, tmp_path / "model.pt")
        assert_same(torch.load(tmp_path / "model.pt", weights_only=False), before)

        twin = copy.deepcopy(model)
        assert_same(twin, before)
        train(twin, torch.optim.AdamW(twin.parameters(), lr=0.01))
        assert_same(model, before)
        assert_matches(engine, model)
        with RolloutEngine(twin, config=CONFIG) as theirs:
            assert_matches(theirs, twin)


def test_training_goes_on_from_a_checkpoint_as_it_does_without_an_engine(tmp_path):
    """In the model that wrote it, and in a new one."""
    results, file = [], tmp_path / "checkpoint.pt"

    def start(model, with_engine):
        engine = RolloutEngine(model, config=CONFIG) if with_engine else None
        return model, torch.optim.AdamW(model.parameters(), lr=0.01), engine

    def steps(model, optimizer, engine):
        train(model, optimizer, 2)
        if engine is not None:
            assert_matches(engine, model)
        state = optimizer.state_dict()["state"]
        moments = {f"{i}.{k}": t.clone() for i, of in state.items() for k, t in of.items()}
        return {name: t.clone() for name, t in model.state_dict().items()} | moments

    for with_engine in (False, True):
        first = start(make_model("llama"), with_engine)
        steps(*first)
        torch.save({"model": first[0].state_dict(), "optimizer": first[1].state_dict()}, file)
        results.append(steps(*first))
        for model, optimizer, engine in (first, start(make_model("llama", seed=3), with_engine)):
            saved = torch.load(file, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            results.append(steps(model, optimizer, engine))
    assert len(results[0]) > 2 * len(list(first[0].parameters()))
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        assert [name for name, t in other.items() if not torch.equal(t, results[0][name])] == []


def test_thousands_of_rollouts_sleeps_and_adapters_leave_every_tensor_as_it_was():
    model = make_model("llama", num_hidden_layers=1)
    config = LoraConfig(target_modules=["q_proj", "up_proj"], r=2, init_lora_weights=False)
    adapter = get_peft_model(make_model("llama", num_hidden_layers=1), config)
    with RolloutEngine(model, config=replace(CONFIG, max_num_seqs=64, max_num_batched_tokens=256)) as engine:

        def state():
            tensors = (*model.named_parameters(), *model.named_buffers())
            return {name: (checksum(t), t._version, t.data_ptr(), t.grad_fn) for name, t in tensors}

        before, rollouts = state(), 0
        for cycle in range(16):
            engine.load_adapter("loaded", adapter)
            params = SamplingParams(n=16, max_tokens=2, seed=cycle, top_p=0.9)
            batch = engine.generate_batch([PROMPT] * 8, params, adapter=[None, "loaded"] * 4)
            batch.raise_for_errors()
            rollouts += sum(len(output.completions) for output in batch)
            engine.sleep(level=1 + cycle % 3)
            engine.wake_up()
            engine.update_weights()
            engine.score([PROMPT] * 2)
            engine.unload_adapter("loaded")
        assert rollouts > 2000 and state() == before


@pytest.mark.parametrize("how", ["save_state", "save_model", "safetensors"])
def test_checkpoints_written_while_an_engine_is_there_are_complete(how, tmp_path):
    """Savers take tensors of one storage for tied: accelerate drops all but one of them, safetensors refuses."""
    model, file = make_model("llama"), tmp_path / "model.safetensors"
    accelerator = Accelerator(cpu=True)
    with RolloutEngine(model, config=CONFIG) as engine:
        if how == "save_state":
            prepared = accelerator.prepare(model)
            accelerator.save_state(str(tmp_path))
        elif how == "save_model":
            accelerator.save_model(model, str(tmp_path))
        else:
            save_model(model, str(file))
        saved, before = load_file(file), snapshot(model)
        assert saved.keys() == model.state_dict().keys()
        assert all(torch.equal(saved[n], t) for n, t in model.state_dict().items())
        if how == "save_state":
            train(model, torch.optim.SGD(prepared.parameters(), lr=0.1))
            accelerator.load_state(str(tmp_path))
            assert_same(model, before)
            assert_matches(engine, model)


def _fewer_experts(model):
    model.config.num_experts_per_tok = 1


def _no_softcap(model):
    model.config.attn_logit_softcapping = None


def _other_scale(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.3


@pytest.mark.parametrize(
    ("family", "change", "dtype"),
    [
        ("qwen3_moe", _fewer_experts, "auto"),
        ("gemma2", _no_softcap, "auto"),
        ("llama", _other_scale, "auto"),
        ("llama", _other_scale, "float64"),
    ],
)
def test_settings_are_those_of_the_modules(family, change, dtype):
    """Which took them from the config when they were made, and may have been given others since."""
    model = make_model(family)
    change(model)
    with RolloutEngine(model, config=replace(CONFIG, dtype=dtype)) as engine:
        batch = engine.generate_batch([PROMPT], PARAMS)
        batch.raise_for_errors()
        (completion,) = batch[0].completions
        expected = oracle.logprobs(model, PROMPT, completion.token_ids, PARAMS.temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4)
