"""TRL's AsyncDistillationTrainer with the engine as its student: the trainer is TRL's own, and so are loss and loop.

``async_teachers`` has the teacher's server, and the stand-ins for what the trainer wants of a GPU.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl_async_setup import Make, a_folder, asked_of, look_often, record, threads, weights_noted  # noqa: F401
from trl_setup import EOS, LOGPROB_TOLERANCE, logged, make_model, plain_logprobs

pytest.importorskip("trl", minversion="1.16", reason="asynchronous training needs TRL 1.16")

from async_teachers import TOP_K, distilling_trainers, served, teacher_model, until  # noqa: F401
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback
from trl.experimental.async_distillation.async_rollout_worker import _AsyncRolloutLoop

from stoker.integrations import trl_async
from stoker.integrations.trl_async import AsyncDistillationTrainer, AsyncRollouts
from stoker.rollout import (
    EngineConfig,
    EngineStateError,
    InvalidConfigError,
    InvalidRequestError,
    RolloutEngine,
    StokerError,
)


def completion_of(sample: Any) -> tuple[list[int], list[int]]:
    ids, first = sample.input_ids.tolist(), int(sample.completion_mask.argmax())
    assert sample.completion_mask.tolist() == [0] * first + [1] * (len(ids) - first)
    return ids[:first], ids[first:]


def assert_scored_by(model: Any, sample: Any, temperature: float = 1.0) -> None:
    """Each token of the completion, by the plain forward of a teacher: its most likely tokens, and the one that was sampled."""
    prompt, completion = completion_of(sample)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    assert (sample.teacher_topk_ids[: len(prompt)] == -1).all()
    rows = zip(sample.teacher_topk_ids[len(prompt) :], sample.teacher_topk_logprobs[len(prompt) :], strict=True)
    for token, plain, (ids, logprobs) in zip(completion, (logits / temperature).log_softmax(-1), rows, strict=True):
        kept = [t for t in ids.tolist() if t != -1]
        best = plain.topk(TOP_K).indices.tolist()
        assert kept[:TOP_K] == best and set(kept) == {*best, token}
        assert logprobs[: len(kept)].tolist() == pytest.approx(plain[kept].tolist(), abs=LOGPROB_TOLERANCE)


def test_samples_are_the_students_own_and_scored_by_the_teacher(distil: Make) -> None:
    teacher = teacher_model()
    with served(teacher) as server:
        # Of two teacher temperatures the one that is not the student's.
        trainer = distil(server, temperature=0.8, teacher_temperature=1.3, max_inflight_tasks=4, max_staleness=1)
        engine, rollouts = trainer.rollouts.engine, trainer.rollouts
        asked, samples = asked_of(engine), record(rollouts)
        weights, newest_at = weights_noted(trainer, rollouts)
        before = {n: t.detach().clone() for n, t in trainer.model.state_dict().items()}
        trainer.train()
    assert not threads() and engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks
    assert len(weights) == 4 == trainer.model_version and any(not torch.equal(weights[4][n], before[n]) for n in before)
    assert {body["prompt_logprobs"] for body in server.asked} == {TOP_K} and server.asked[0]["model"] == "the-teacher"

    outputs = [handle.result() for _, _, handle in asked if handle.done]
    student, of_one_version = make_model(), 0
    for sample in samples:
        assert_scored_by(teacher, sample, temperature=1.3)
        prompt, completion = completion_of(sample)
        same = [
            o.completions[0]
            for o in outputs
            if o.prompt_token_ids == prompt and o.completions[0].token_ids == completion
        ]
        assert max(c.weight_versions[0] for c in same) >= newest_at[sample.model_version]
        assert completion[-1] == EOS or len(completion) == 8
        for c in same:
            if len(set(c.weight_versions)) == 1:
                student.load_state_dict(weights[c.weight_versions[0]])
                plain = plain_logprobs(student, prompt, completion, temperature=0.8)
                assert c.logprobs == pytest.approx(plain, abs=LOGPROB_TOLERANCE)
                of_one_version += 1
    assert of_one_version and {s.model_version for s in samples} >= {1, 2, 3}


def test_the_divergence_is_that_of_the_two_models_and_falls(distil: Make) -> None:
    teacher, student = teacher_model(), make_model()
    with served(teacher) as server:
        trainer = distil(server, max_steps=20, max_staleness=1, teacher_top_k=11)  # of all tokens
        samples = record(trainer.rollouts)
        trainer.train()
    found = logged(trainer, "jsd")
    assert len(found) == 20 and sum(found[-5:]) < 0.4 * sum(found[:5])
    apart, tokens = 0.0, 0
    with torch.no_grad():
        for sample in samples[:8]:  # which the first step trains on
            prompt, completion = completion_of(sample)
            of = [
                m(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                for m in (teacher, student)
            ]
            apart += (of[0].exp() * (of[0] - of[1])).sum().item()
            tokens += len(completion)
    assert found[0] == pytest.approx(apart / tokens, rel=1e-3)


def test_each_of_several_teachers_scores_its_own_prompts(distil: Make) -> None:
    """Here they are engines in the same process, served over HTTP."""
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    from stoker.integrations.server import serve

    models, config = [teacher_model(seed) for seed in (1, 2)], EngineConfig(kv_cache_memory="4MiB")
    with ExitStack() as within:
        engines = [within.enter_context(RolloutEngine(model, config=config)) for model in models]
        trainer = distil(*(within.enter_context(serve(engine, port=0)) for engine in engines))
        samples = record(trainer.rollouts)
        trainer.train()
    assert {s.teacher_id for s in samples} == {"t0", "t1"}
    for sample in samples:
        assert (sample.teacher_id == "t1") == (sample.prompt[0]["content"] == "hg")
        assert_scored_by(models[sample.teacher_id == "t1"], sample)
    assert min(logged(trainer, "teacher_token_frac/t1")) > 0


def test_an_adapter_is_read_live_and_never_merged(distil: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    with served(teacher_model()) as server:
        trainer = distil(server, peft_config=config, learning_rate=0.1, max_steps=2)
        monkeypatch.setattr(type(trainer.model.base_model), "merge_adapter", lambda self: pytest.fail("merged"))
        engine, first = trainer.rollouts.engine, {n: t.detach().clone() for n, t in trainer.model.state_dict().items()}
        asked = asked_of(engine)
        trainer.train()
    now = trainer.model.state_dict()
    assert {n for n in now if not torch.equal(now[n], first[n])} == {n for n in now if "lora_" in n}
    oracle = get_peft_model(make_model(), config).eval()
    for weights, output in ((first, asked[0][2].result()), (now, engine.generate_batch([[3, 4, 5]])[0])):
        oracle.load_state_dict(weights)
        plain = plain_logprobs(oracle, output.prompt_token_ids, output.completions[0].token_ids)
        assert output.completions[0].logprobs == pytest.approx(plain, abs=LOGPROB_TOLERANCE)


def test_the_base_of_the_students_adapter_may_teach(distil: Make) -> None:
    """From the same engine: there is no other copy of the model."""
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    from stoker.integrations.server import serve

    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    trainer = distil(peft_config=config, learning_rate=0.05)
    samples = record(trainer.rollouts)
    with serve(trainer.rollouts.engine, port=0, adapter=None) as server:
        trainer.args.teacher_server_urls = dict.fromkeys(("t0", "t1"), server.url)
        trainer.train()
    base = make_model().eval()
    assert trainer.state.global_step == 3 and samples
    for sample in samples:
        assert_scored_by(base, sample)


def test_a_run_goes_on_where_its_checkpoint_stopped(distil: Make, tmp_path: Path) -> None:
    with served(teacher_model()) as server:
        trainer = distil(server, save_strategy="steps", save_steps=2, max_steps=2)
        asked = asked_of(trainer.rollouts.engine)
        trainer.train()
        first = len(asked)
        trainer.train()  # a second run starts from the first prompt
        trainer.rollouts.detach()
        state = tmp_path / "checkpoint-2" / "rollout_state.json"
        assert json.loads(state.read_text())["prompt_index"] > 0
        state.write_text(json.dumps({"prompt_index": 7, "model_version": 9}))  # of three prompts, so the second is next
        resumed = distil(server)
        later = asked_of(resumed.rollouts.engine)
        resumed.train(resume_from_checkpoint=str(state.parent))
    assert later[0][0] == resumed.processing_class("hg")["input_ids"] != asked[first][0] == asked[0][0]
    assert resumed.state.global_step == 3 and resumed.model_version == 11 and not threads()
    seeds = [params.seed for _, params, _ in asked + later]  # nothing is drawn twice, in whichever run
    assert None not in seeds and len(set(seeds)) == len(seeds)


def test_a_second_run_knows_nothing_of_the_first(distil: Make) -> None:
    with served(teacher_model()) as server:
        trainer = distil(server, max_steps=-1, num_train_epochs=2, per_device_train_batch_size=1)  # six steps
        rollouts = trainer.rollouts
        samples = record(rollouts)
        for _ in range(2):
            trainer.train()
            assert trainer.state.global_step >= 5 and 77 not in trainer._trained_prompts
            rollouts.rollout_buffer.queue.clear()
            rollouts.rollout_buffer.put(replace(samples[0], prompt_id=77, model_version=trainer.model_version))
            rollouts.metrics_queue.put({"late": 1.0})
    assert not logged(trainer, "late")


def answers(status: int, body: Any) -> Any:
    return lambda _: (status, body)


def unscored(answer: list[Any]) -> Any:
    return answers(200, {"choices": [{"text": "", "prompt_logprobs": answer}]})


@pytest.mark.parametrize(
    ("replies", "says"),
    [
        (
            answers(400, {"message": "too long for me"}),
            r"RequestFailedError: http\S+/v1/completions answered with status 400: .*too long for me",
        ),
        (answers(500, {"message": "out of memory"}), r"status 500: .*out of memory.*: it was waited for 0.6 s"),
        (answers(200, {"choices": [{"text": ""}]}), "answered without prompt_logprobs of every token"),
        (answers(200, {"object": "error"}), "answered without prompt_logprobs of every token"),
        (unscored([None]), "answered without prompt_logprobs of every token"),
        (
            lambda body: unscored([{"11": {"logprob": 0.0, "rank": 1}}] * len(body["prompt"]))(body),
            "token 11, and the student has 11",
        ),
    ],
    ids=["refuses", "fails", "does not score", "is another server", "scores less", "has more tokens"],
)
def test_a_teacher_that_does_not_score_ends_training_with_its_answer(distil: Make, replies: Any, says: str) -> None:
    with served(teacher_model()) as server:
        server.replies = replies
        trainer = distil(server, vllm_server_timeout=0.6 if "waited" in says else 240.0)
        look_often(trainer)
        began = time.monotonic()
        with pytest.raises(EngineStateError, match=rf"(?s)the rollouts have failed: .*{says}"):
            trainer.train()
    assert time.monotonic() - began < 10 and not threads() and not trainer.rollouts.engine.core.has_work


def test_a_teacher_that_is_away_is_waited_for(distil: Make, caplog: pytest.LogCaptureFixture) -> None:
    """While it loads its model, when there are no samples yet, the rollouts show signs of life all the same."""
    with served(teacher_model()) as server:
        trainer, loads, fails, signs = distil(server, vllm_server_timeout=30.0), [503, 503], [503, 429, 500], []
        introduces = server.introduces

        def load() -> tuple[int, Any]:
            signs.append(trainer.rollouts._heartbeat.value)
            return (loads.pop(), "not yet") if loads else introduces()

        server.introduces = load
        server.replies = lambda body: (fails.pop(), "not now") if fails else server.score(body)
        with caplog.at_level(logging.WARNING, "stoker"):
            trainer.train()
    assert len(signs) == 3 and signs[0] < signs[1] < signs[2]
    assert "in 0.25 s: " in caplog.text and "in 0.5 s: " in caplog.text
    assert trainer.state.global_step == 3 and (caplog.text.count("not yet"), caplog.text.count("not now")) == (2, 3)
    assert sum(filter(None, logged(trainer, "rollout/vllm_retry_total"))) == 5


def test_a_teacher_that_nobody_serves_ends_training(distil: Make) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        trainer = distil(SimpleNamespace(url=url))
        look_often(trainer)
        with pytest.raises(EngineStateError, match=r"/v1/models cannot be reached .* it was waited for 0.6 s"):
            trainer.train()
    assert not threads()


def test_a_teacher_that_hangs_keeps_nobody(distil: Make) -> None:
    goes_on = threading.Event()

    class UntilItHangs(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            server.replies = lambda body: goes_on.wait(60) and server.score(body)
            known = len(server.asked)
            until(lambda: len(server.asked) > known)
            raise KeyboardInterrupt

    with served(teacher_model()) as server:
        trainer = distil(server)
        trainer.add_callback(UntilItHangs())
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert not threads() and not trainer.rollouts.engine.core.has_work
        trainer.rollouts.detach()
        assert time.monotonic() - began < 20
        goes_on.set()


def test_the_loop_has_every_setting_of_the_trainer_that_there_is_one_for(
    distil: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "max_inflight_tasks": 5,
        "queue_maxsize": 77,
        "chat_template_kwargs": {"deep": True},
        "log_completions": True,
        "log_completions_steps": 3,
        "num_completions_to_print": 2,
        "teacher_server_urls": {"a": "http://b"},
        "teacher_top_k": 5,
        "teacher_temperature": 0.5,
        "request_timeout": 7,
    }
    of_the_student = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
    trainer = distil(**settings)
    taken, given, begin = signature(_AsyncRolloutLoop).parameters, dict[str, Any](), _AsyncRolloutLoop.__init__
    assert taken.keys() & vars(trainer.args).keys() == settings.keys() | of_the_student
    assert all(settings[name] != taken[name].default for name in settings), "or this shows nothing"
    noted = wraps(begin)(lambda self, **o: (given.update(o), begin(self, **o))[1])
    monkeypatch.setattr(_AsyncRolloutLoop, "__init__", noted)
    loop = trl_async._loop(trainer.rollouts, trainer, trainer.rollouts.engine)
    loop._steps.close()
    loop._loop.close()
    assert {name: given.get(name) for name in settings} == settings
    assert given["processing_class"] is trainer.processing_class and given["dataset"] is trainer.train_dataset
    assert given["eos_token_ids"] == trainer.eos_token_ids


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"top_p": 3.0}, InvalidRequestError, "top_p"),
        (
            {"teacher_temperature": 0.0},
            InvalidConfigError,
            "teacher_temperature=0, and the trainer's forward divides by it",
        ),
        ({"engine_config": EngineConfig(tensor_parallel_size=2)}, InvalidConfigError, "asynchronous rollouts"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(
    distil: Make, settings: dict[str, Any], error: type[StokerError], says: str
) -> None:
    with pytest.raises(error, match=says):
        distil(**settings)


def test_what_cannot_work_is_refused(distil: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rollout_worker", "weight_transfer"):
        with pytest.raises(InvalidConfigError, match=f"the engine takes the place of {name}: leave it out"):
            AsyncDistillationTrainer("model", **{name: AsyncRollouts()})
    trainer = distil(temperature=0.0)  # the student's, by which nothing divides
    with pytest.raises(EngineStateError, match="attached already"):
        trainer.rollouts.attach(trainer)
    trainer.rollouts.detach()
    with pytest.raises(EngineStateError, match=r"call attach\(trainer\) before trainer.train\(\)"):
        trainer.train()
    with pytest.raises(InvalidConfigError, match="has no reward functions, tools or environments"):
        AsyncRollouts(print).attach(trainer)
    for kind in ("is_fsdp_enabled", "is_deepspeed_enabled"):
        with monkeypatch.context() as patch, pytest.raises(InvalidConfigError, match="use DDP, or DistillationTrainer"):
            patch.setattr(trainer, kind, True)
            trainer.rollouts.attach(trainer)
