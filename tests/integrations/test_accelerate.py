"""A training loop under accelerate: rollouts follow its steps, processes, precision and trackers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerated
import pytest
import ranks
import torch
import trl_setup
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from accelerated import PARAMS, PROMPTS, train_on
from torch.optim.optimizer import _global_optimizer_post_hooks
from trl_setup import LOGPROB_TOLERANCE, make_model, plain_logprobs

from stoker.integrations import accelerate as integration
from stoker.integrations.accelerate import AcceleratedEngine
from stoker.rollout import (
    EngineConfig,
    EngineStateError,
    InvalidConfigError,
    InvalidRequestError,
    RolloutEngine,
    SamplingParams,
)


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    assert not _global_optimizer_post_hooks  # nothing watches after a test


def prepared(**settings: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, **settings)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return accelerator, model, optimizer


def worst_difference(model: Any, batch: Any) -> float:
    """Of log-probabilities, from the plain forward of a model that autocast has no part in."""
    plain = make_model()
    plain.load_state_dict(model.state_dict())
    return trl_setup.worst_difference(plain, batch)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_every_rollout_is_of_the_weights_of_the_last_step(precision: str) -> None:
    accelerator, model, optimizer = prepared(mixed_precision=precision)
    with AcceleratedEngine(accelerator, model) as engine:
        first = engine.generate_batch(PROMPTS, PARAMS)
        assert worst_difference(model, first) < LOGPROB_TOLERANCE
        for round in (1, 2):
            train_on(accelerator, model, optimizer, [3, 4, 5, 6, 7])
            with accelerator.autocast():
                batch = engine.generate_batch(PROMPTS, PARAMS)
            assert engine.engine.weight_version == round and engine.engine.stats().last_update_seconds > 0
            assert worst_difference(model, batch) < LOGPROB_TOLERANCE
        assert worst_difference(model, first) > 100 * LOGPROB_TOLERANCE  # the check can tell
        assert all(p.dtype is torch.float32 for p in model.parameters())


def test_weights_are_taken_once_a_step_and_not_while_gradients_accumulate() -> None:
    accelerator, model, optimizer = prepared(gradient_accumulation_steps=2)
    with AcceleratedEngine(accelerator, model) as engine:
        versions = []
        for _ in range(4):
            train_on(accelerator, model, optimizer, [3, 4, 5])
            for _ in range(2):
                engine.generate_batch(PROMPTS, PARAMS)
            versions.append(engine.engine.weight_version)
        assert versions == [0, 1, 1, 2]


def test_a_checkpoint_that_is_loaded_is_like_a_step(tmp_path: Path) -> None:
    accelerator, model, _ = prepared()
    accelerator.save_state(str(tmp_path))
    with AcceleratedEngine(accelerator, model) as engine:
        engine.generate_batch(PROMPTS, PARAMS)
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
        engine.generate_batch(PROMPTS, PARAMS)
        accelerator.load_state(str(tmp_path))
        batch = engine.generate_batch(PROMPTS, PARAMS)
        assert engine.engine.weight_version == 2 and worst_difference(model, batch) < LOGPROB_TOLERANCE
        accelerator.load_state(str(tmp_path))  # the same weights: shards could not be looked at without the other ranks
        engine.generate_batch(PROMPTS, PARAMS)
        assert engine.engine.weight_version == 3
    assert not accelerator._load_model_state_pre_hook


def test_the_step_of_another_models_optimizer_is_none_of_ours() -> None:
    accelerator, model, _ = prepared()
    with AcceleratedEngine(accelerator, model) as engine:
        critic = torch.nn.Linear(2, 1)
        adam = accelerator.prepare(torch.optim.Adam(critic.parameters()))
        critic(torch.ones(1, 2)).sum().backward()
        adam.step()
        engine.generate_batch(PROMPTS, PARAMS)
        assert engine.engine.weight_version == 0
        # An optimizer made after the engine counts, prepared or not.
        assert engine.engine.stats().last_update_seconds == 0
        late = torch.optim.Adam([{"params": critic.parameters()}, {"params": model.parameters()}], lr=0.1)
        model(input_ids=torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss.backward()
        late.step()
        batch = engine.generate_batch(PROMPTS, PARAMS)
        assert engine.engine.weight_version == 1 and worst_difference(model, batch) < LOGPROB_TOLERANCE
        assert engine.engine.stats().last_update_seconds > 0, "told of it, as shards have to be"


def test_parameters_that_torch_swaps() -> None:
    """For an average, say; ``to`` does so with the parameters of a sharded model."""
    accelerator, model, optimizer = prepared()
    average = {name: torch.nn.Parameter(0.5 * p.detach()) for name, p in model.named_parameters()}
    with AcceleratedEngine(accelerator, model) as engine:
        for _ in range(2):
            train_on(accelerator, model, optimizer, [3, 4, 5, 6])
            assert worst_difference(model, engine.generate_batch(PROMPTS, PARAMS)) < LOGPROB_TOLERANCE
            for name, parameter in model.named_parameters():
                torch.utils.swap_tensors(parameter, average[name])
            assert worst_difference(model, engine.generate_batch(PROMPTS, PARAMS)) < LOGPROB_TOLERANCE


def test_a_step_whose_weights_were_refused_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is whole would be noticed by itself; of shards the next rollout would be on the old ones."""
    accelerator, model, optimizer = prepared()
    with AcceleratedEngine(accelerator, model) as engine:
        train_on(accelerator, model, optimizer, [3, 4, 5])
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(engine.engine, "update_weights", lambda: 1 // 0)
            engine.generate_batch(PROMPTS, PARAMS)
        engine.generate_batch(PROMPTS, PARAMS)
        assert engine.engine.stats().last_update_seconds > 0


def test_weights_that_the_loop_has_taken_itself_are_not_taken_again() -> None:
    """With requests under way nothing could take them, and of shards a process that generates alone would wait for the others."""
    accelerator, model, optimizer = prepared()
    with AcceleratedEngine(accelerator, model) as engine:
        handle = engine.engine.submit(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True))
        engine.engine.wait([handle], share=0)
        engine.engine.pause()
        train_on(accelerator, model, optimizer, [3, 4, 5])
        engine.engine.update_weights()
        engine.engine.resume()
        batch = engine.generate_batch(PROMPTS, PARAMS)
        assert engine.engine.weight_version == 1 and worst_difference(model, batch) < LOGPROB_TOLERANCE
        assert set(handle.result().completions[0].weight_versions) == {0, 1}

        train_on(accelerator, model, optimizer, [3, 4, 5])
        engine.engine.update_weights(make_model().state_dict())  # from elsewhere
        engine.generate_batch(PROMPTS, PARAMS)
        assert engine.engine.weight_version == 3, "they are not the step's"


def test_asleep_outside_of_rollouts() -> None:
    accelerator, model, optimizer = prepared()
    with AcceleratedEngine(accelerator, model, sleep=True) as engine:
        asleep = [engine.engine.is_sleeping]
        model.get_input_embeddings().weight.register_hook(lambda _: asleep.append(engine.engine.is_sleeping))
        for _ in range(2):
            engine.generate_batch(PROMPTS, PARAMS)
            train_on(accelerator, model, optimizer, [3, 4, 5])
        assert asleep == [True] * 3
        with pytest.raises(InvalidRequestError, match="prompt 0 is empty"):
            engine.generate_batch([[]])
        assert engine.engine.is_sleeping
        assert worst_difference(model, engine.generate_batch(PROMPTS, PARAMS)) < LOGPROB_TOLERANCE


def test_weights_are_taken_before_the_kv_cache_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, optimizer = prepared()
    config = EngineConfig(dtype="float64", kv_cache_memory="1MiB")  # with a copy of the weights, which sleeps too
    with AcceleratedEngine(accelerator, model, config=config, sleep=True) as engine:
        update, asleep = engine.engine.update_weights, []

        def look() -> int:
            asleep.append(list(engine.engine._memory.asleep))
            return update()

        monkeypatch.setattr(engine.engine, "update_weights", look)
        for _ in range(2):
            engine.generate_batch(PROMPTS, PARAMS)
            train_on(accelerator, model, optimizer, [3, 4, 5])
        assert worst_difference(model, engine.generate_batch(PROMPTS, PARAMS)) < LOGPROB_TOLERANCE
        assert asleep == [["kv_cache"]] * 2 and engine.engine.is_sleeping


def test_an_error_is_not_hidden_by_one_of_falling_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, _ = prepared()
    with AcceleratedEngine(accelerator, model, sleep=True) as engine:
        engine.engine.wake_up()
        handle = engine.engine.submit(PROMPTS[0], PARAMS)  # with it the engine does not sleep
        with pytest.raises(InvalidRequestError, match="prompt 0 is empty") as raised:
            engine.generate_batch([[]])
        assert any("the rollout engine is still awake" in note for note in raised.value.__notes__)
        with monkeypatch.context() as patch, pytest.raises(InvalidRequestError, match="prompt 0 is empty"):
            patch.setattr(engine.engine, "sleep", lambda **_: bytearray(2**62))  # MemoryError
            engine.generate_batch([[]])
        handle.abort()
        engine.generate_batch(PROMPTS, PARAMS)
        assert engine.engine.is_sleeping


def test_where_the_engine_cannot_fall_asleep_the_model_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, _ = prepared()

    def sleep(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RolloutEngine, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        AcceleratedEngine(accelerator, model, sleep=True)
    assert all(p.untyped_storage().resizable() for p in model.parameters()), "they own their memory again"


def test_a_rollout_is_not_lost_where_sleep_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, model, _ = prepared()
    with AcceleratedEngine(accelerator, model, sleep=True) as engine:
        engine.engine.wake_up()
        handle = engine.engine.submit(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
        batch = engine.generate_batch(PROMPTS, PARAMS)
        assert worst_difference(model, batch) < LOGPROB_TOLERANCE
        assert not engine.engine.is_sleeping and "cannot sleep while requests are under way" in caplog.text
        assert len(handle.result().completions[0].token_ids) == 100, "the request goes on"

        monkeypatch.setattr(engine.engine, "sleep", lambda **_: bytearray(2**62))  # MemoryError
        assert worst_difference(model, engine.generate_batch(PROMPTS, PARAMS)) < LOGPROB_TOLERANCE
        monkeypatch.undo()
        engine.generate_batch(PROMPTS, PARAMS)
        assert engine.engine.is_sleeping


def test_adapters_are_chosen_by_row() -> None:
    peft = pytest.importorskip("peft")
    accelerator = Accelerator(cpu=True)
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)  # it changes what is sampled
    policy = peft.get_peft_model(make_model(), config).eval()
    model, optimizer = accelerator.prepare(policy, torch.optim.SGD(policy.parameters(), lr=0.5))
    prompts = [PROMPTS[1]] * 3
    with AcceleratedEngine(accelerator, model) as engine:
        for _ in range(2):
            batch = engine.generate_batch(prompts, PARAMS, adapter=["default", None, "default"])
            for output, adapted in zip(batch, (True, False, True), strict=True):
                for c in output.completions:
                    with nullcontext() if adapted else policy.disable_adapter():
                        plain = plain_logprobs(policy, prompts[0], c.token_ids)
                    assert c.logprobs == pytest.approx(plain, abs=LOGPROB_TOLERANCE)
            train_on(accelerator, model, optimizer, [3, 4, 5])
            policy.eval()


class Tracker(GeneralTracker):  # type: ignore[misc]
    name = "kept"
    requires_logging_directory = False
    tracker = None

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[dict[str, Any], int | None]] = []

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        self.seen.append((values, step))
        self.more = more


def test_trackers_get_what_a_rollout_was_like() -> None:
    tracker = Tracker()
    accelerator, model, _ = prepared(log_with=tracker)
    accelerator.init_trackers("run")
    with AcceleratedEngine(accelerator, model) as engine:
        batch = engine.generate_batch(PROMPTS, [PARAMS, SamplingParams(max_tokens=2, ignore_eos=True)], step=7)
    ((values, step),) = tracker.seen
    assert step == 7 and set(values) == {
        "rollout/seconds", "rollout/tokens_per_second", "rollout/mean_length", "rollout/weight_version"
    }  # fmt: skip
    tokens = sum(len(c.token_ids) for output in batch for c in output.completions)
    assert tokens == 18 and values["rollout/mean_length"] == 6 and values["rollout/weight_version"] == 0
    assert values["rollout/tokens_per_second"] * values["rollout/seconds"] == pytest.approx(tokens)


def test_an_entry_without_a_step_leaves_the_loops_own_to_be_logged() -> None:
    """W&B counts on at each entry that is committed, and drops what is logged for a step behind."""
    tracker = Tracker()
    tracker.name = "wandb"
    accelerator, model, _ = prepared(log_with=tracker)
    accelerator.init_trackers("run")
    with AcceleratedEngine(accelerator, model) as engine:
        for step, more in ((None, {"commit": False}), (3, {})):
            engine.generate_batch(PROMPTS, PARAMS, step=step)
            assert tracker.seen[-1][1] == step and tracker.more == more


@pytest.mark.parametrize("main", [True, False])
def test_the_progress_bar_is_the_main_processs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], main: bool
) -> None:
    accelerator, model, _ = prepared()
    with AcceleratedEngine(accelerator, model) as engine:
        monkeypatch.setattr(Accelerator, "is_main_process", property(lambda _: main))
        engine.generate_batch(PROMPTS, PARAMS)
        assert not capsys.readouterr().err
        engine.generate_batch(PROMPTS, PARAMS, progress_bar=True)
        assert ("4/4" in capsys.readouterr().err) == main


def test_nothing_watches_after_close_or_when_dropped() -> None:
    accelerator, model, optimizer = prepared()
    engine = AcceleratedEngine(accelerator, model)
    assert len(_global_optimizer_post_hooks) == 1
    engine.close()
    assert not _global_optimizer_post_hooks
    with pytest.raises(EngineStateError, match="closed"):
        engine.generate_batch(PROMPTS)
    engine = AcceleratedEngine(accelerator, model)
    dropped = weakref.ref(engine)
    del engine
    gc.collect()
    assert dropped() is None and not _global_optimizer_post_hooks
    train_on(accelerator, model, optimizer, [3, 4])


def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, _ = prepared()
    with pytest.raises(InvalidConfigError, match="accelerator is a Qwen3ForCausalLM"):
        AcceleratedEngine(model, accelerator)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfigError, match=r"^model is a str: give what accelerator.prepare\(model\) returns$"):
        AcceleratedEngine(accelerator, "gpt2")  # type: ignore[arg-type]
    with pytest.raises(InvalidConfigError, match=r"^config is a dict: give EngineConfig\(...\)$"):
        AcceleratedEngine(accelerator, model, config={"seed": 1})  # type: ignore[arg-type]
    monkeypatch.setattr(Accelerator, "device", property(lambda _: torch.device("cuda:0")))
    with pytest.raises(InvalidConfigError, match=r"on cpu and the accelerator works on cuda:0.*prepare\(model\)"):
        AcceleratedEngine(accelerator, model)


def test_over_fp32_weights_in_mixed_precision_a_gpu_samples_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def build(model: Any, *, config: EngineConfig, tokenizer: Any) -> Any:
        found.append(config.dtype)
        raise EngineStateError("that is all")

    monkeypatch.setattr(integration, "_FollowedEngine", build)
    monkeypatch.setattr(integration, "is_sharded", lambda model: True)  # whose parts may be on the host
    accelerator, model = Accelerator(cpu=True), make_model()
    monkeypatch.setattr(Accelerator, "mixed_precision", "bf16")
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16)):
        monkeypatch.setattr(Accelerator, "device", torch.device(device))
        with pytest.raises(EngineStateError, match="that is all"):
            AcceleratedEngine(accelerator, model.to(dtype))
    assert found == ["auto", torch.bfloat16, "auto"]


def test_parts_in_host_memory() -> None:
    ranks.run(accelerated.offloaded, 2)


def test_two_processes() -> None:
    first, second = ranks.run(accelerated.follow_ddp, 2)
    assert first["wrapper"] == second["wrapper"] == "DistributedDataParallel"
    assert (first["seed"], second["seed"]) == (5, 6) and first["sampled"] != second["sampled"]
    for one in (first, second):
        assert one["version"] == 1 and one["difference"] < LOGPROB_TOLERANCE < one["moved"]
    assert all((array == second["weights"][name]).all() for name, array in first["weights"].items())


@pytest.mark.parametrize("together", [False, True])
def test_processes_that_compute_a_batch_together_sample_the_same(tmp_path: Path, together: bool) -> None:
    first, second = ranks.run(accelerated.share_a_batch, 2, str(tmp_path), together)
    assert first == second, "or the layers' parts would be computed on different tokens"
    assert first["source"] == "mirror" and first["difference"] < LOGPROB_TOLERANCE
