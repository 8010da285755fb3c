"""What GRPO offers around generation, with the engine attached: chats, tools, environments, ``rollout_func``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from trl_setup import (
    CHARACTERS,
    EOS,
    PAD,
    MakeTrainer,
    check_parity,
    logged,
    make_tokenizer,
    trainers,
)

from stoker.rollout import EngineConfig, InvalidRequestError, RolloutBatch, RolloutOutput

pytest.importorskip("trl", reason="TRL is not installed")

from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from stoker.integrations.trl import attach

IDS = {character: i + 3 for i, character in enumerate(CHARACTERS)}
BLOCK = 4


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    yield from trainers(str(tmp_path))


def record_calls(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> list[RolloutBatch]:
    """What every call of the engine gave."""
    calls: list[RolloutBatch] = []
    engine = trainer.vllm_generation.engine
    generate_batch = engine.generate_batch

    def record(prompts: list[list[int]], params: Any) -> RolloutBatch:
        calls.append(generate_batch(prompts, params))
        return calls[-1]

    monkeypatch.setattr(engine, "generate_batch", record)
    return calls


def check_kept(later: list[RolloutOutput], answer: list[int]) -> None:
    """Of a turn after the first nothing was computed but the answer, the token before it and a part of a block."""
    assert len(later) > 5
    for output in later:
        assert output.prompt_token_ids[-len(answer) :] == answer
        assert len(output.prompt_token_ids) - output.cached_tokens <= len(answer) + 1 + BLOCK


# -- chats and tools ---------------------------------------------------------------------------------------------------


class ToolTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]
    """Takes every completion with a "b" in it for a call of the tool ``lookup``."""

    def parse_response(self, ids: list[int], **_: Any) -> dict[str, Any]:
        text = self.decode(ids, skip_special_tokens=True)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if "b" in text:
            call = {"name": "lookup", "arguments": {"text": text}}
            message["tool_calls"] = [{"type": "function", "function": call}]
        return message


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ 'h' if m.role == 'user' else 'f' if m.role == 'tool' else 'g' }}"
    "{{ m.content }}{% for t in m.tool_calls or [] %}{{ t.function.name }}{{ t.function.arguments }}{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}g{% endif %}"
)
CHATS = [[{"role": "user", "content": text}] for text in ("abc", "d", "feed", "cab", "ha", "gag")]


def chat_arguments(tokenizer_class: type[Any] = PreTrainedTokenizerFast) -> dict[str, Any]:
    plain = make_tokenizer()
    tokenizer = tokenizer_class(
        tokenizer_object=plain._tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<end>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = "set"  # only asked for being there
    return {
        "processing_class": tokenizer,
        "train_dataset": Dataset.from_dict({"prompt": CHATS}),
        "reward_funcs": lambda completions, **_: [float(len(c[-1]["content"])) for c in completions],
    }


def test_chats_go_through_the_template(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(more=chat_arguments())
    attach(trainer)
    calls = record_calls(trainer, monkeypatch)
    trainer.train()
    check_parity(trainer)
    templated = {tuple(IDS[c] for c in f"h{chat[0]['content']}g") for chat in CHATS}
    assert {tuple(output.prompt_token_ids) for call in calls for output in call} <= templated


@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "sleeps"])
def test_tools_are_called_and_their_answers_continued(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, sleeps: bool
) -> None:
    asked: list[str] = []

    def lookup(text: str) -> str:
        """Look something up.

        Args:
            text: What to look up.
        """
        asked.append(text)
        if len(asked) % 5 == 0:
            raise ValueError("bad")  # a tool that raises: its error is the answer
        return "dad"

    trainer = make_trainer(
        more=chat_arguments(ToolTokenizer) | {"tools": [lookup]},
        max_completion_length=48,
        generation_kwargs={"max_new_tokens": 12},
        max_tool_calling_iterations=3,
        seed=4,  # under which the random model calls often enough
        vllm_enable_sleep_mode=sleeps,
    )
    engine = attach(trainer, config=EngineConfig(block_size=BLOCK, seed=trainer.args.seed))
    calls = record_calls(trainer, monkeypatch)
    asleep = []
    trainer.model.get_input_embeddings().weight.register_hook(lambda _: asleep.append(engine.is_sleeping))
    trainer.train()
    check_parity(trainer)
    assert asleep == [sleeps] * 3
    assert len(asked) > 10 and max(logged(trainer, "tools/call_frequency")) > 0
    assert max(logged(trainer, "tools/failure_frequency")) > 0
    sizes = [len(call) for call in calls]
    assert sizes.count(8) >= 3 and any(size < 8 for size in sizes)  # turns after the first have fewer rows
    answer = [IDS[c] for c in "fdadg"]
    check_kept([o for call in calls if len(call) < 8 for o in call if o.prompt_token_ids[-5:] == answer], answer)
    assert engine.weight_version == 3  # once a step, however many turns it has
    costs = zip(logged(trainer, "rollout/seconds"), logged(trainer, "rollout/tokens_per_second"), strict=True)
    spent = [(seconds, seconds * rate) for seconds, rate in costs]
    assert len(spent) == 3 and sum(n for _, n in spent) == pytest.approx(engine.stats().generated_tokens)


def test_environments_are_stepped(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Environment:
        def reset(self, **_: Any) -> str | None:
            self.asked = 0
            return None

        def lookup(self, text: str) -> str:
            """Look something up.

            Args:
                text: What to look up.
            """
            self.asked += 1
            return "dad"

        def get_reward(self) -> float:
            return float(self.asked)

    arguments = chat_arguments(ToolTokenizer) | {"reward_funcs": [], "environment_factory": Environment}
    trainer = make_trainer(
        more=arguments, max_completion_length=40, generation_kwargs={"max_new_tokens": 10}, vllm_enable_sleep_mode=True
    )
    engine = attach(trainer, config=EngineConfig(block_size=BLOCK, seed=trainer.args.seed))
    calls = record_calls(trainer, monkeypatch)
    trainer.train()
    check_parity(trainer)
    check_kept([o for call in calls if len(call) < 8 for o in call], [IDS[c] for c in "fdadg"])
    assert engine.is_sleeping and max(logged(trainer, "reward")) > 0


class CallingTokenizer(ToolTokenizer):
    """Takes every completion for a call."""

    def parse_response(self, ids: list[int], **_: Any) -> dict[str, Any]:
        return super().parse_response([*ids, IDS["b"]])


def chatty(**settings: Any) -> dict[str, Any]:
    """Arguments for a trainer whose tool answers at some length."""

    def lookup(text: str) -> str:
        """Look something up.

        Args:
            text: What to look up.
        """
        return "dad" * (2 + len(text) % 3)

    more = chat_arguments(CallingTokenizer) | {"tools": [lookup]}
    return {"more": more, "max_completion_length": 48, "max_tool_calling_iterations": 9} | settings


def test_a_tools_answer_that_does_not_fit_in_the_engine_is_dropped(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(**chatty(generation_kwargs={"max_new_tokens": 8}))
    attach(trainer, config=EngineConfig(max_model_len=40))  # of the model's 128
    calls = record_calls(trainer, monkeypatch)
    trainer.train()
    check_parity(trainer)
    assert len(calls) > 2 * 3 and max(len(o.prompt_token_ids) for call in calls for o in call) > 20  # some do fit


def test_later_turns_take_no_more_room_than_the_completion_may(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What TRL cuts off a turn is not sampled, so a KV cache that is enough for a first turn is for all of them."""
    trainer = make_trainer(**chatty(generation_kwargs={"min_new_tokens": 20}))
    longest = max(len(f"h{chat[0]['content']}g") for chat in CHATS) + 48
    blocks = -(-longest // BLOCK) + 1  # one holds what is not to be kept
    engine = attach(trainer, config=EngineConfig(block_size=BLOCK, kv_cache_memory=blocks * BLOCK * 256))
    assert engine.stats().num_kv_blocks == blocks - 1
    calls = record_calls(trainer, monkeypatch)
    trainer.train()
    check_parity(trainer)
    assert len(calls) > 3
    assert max(len(o.prompt_token_ids) + len(o.completions[0].token_ids) for call in calls for o in call) == longest


def test_turns_have_the_room_that_they_have_without_the_engine(make_trainer: MakeTrainer) -> None:
    """Each rollout is bounded by its own longest prompt: the second one's are of several lengths, and longer."""

    def completions(*, engine: bool) -> list[list[int]]:
        found: list[list[int]] = []

        def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
            found.extend(completion_ids)
            return [1.0] * len(completion_ids)

        arguments = chatty(generation_kwargs={"do_sample": False, "min_new_tokens": 20, "max_new_tokens": 30})
        chats = [[{"role": "user", "content": text}] for text in ("d", "ha", "feed" * 10, "c")]
        arguments["more"] |= {"reward_funcs": reward, "train_dataset": Dataset.from_dict({"prompt": chats})}
        trainer = make_trainer(**arguments, learning_rate=0.0, max_steps=2, shuffle_dataset=False)
        if engine:
            attach(trainer)
        trainer.train()
        return found

    assert completions(engine=True) == completions(engine=False)


def test_a_tool_that_asks_the_policy_gets_whole_completions(make_trainer: MakeTrainer) -> None:
    """What is left of the completion it is called in bounds the next turn of that, and not what the tool asks."""
    said: list[int] = []

    def lookup(text: str) -> str:
        """Look something up.

        Args:
            text: What to look up.
        """
        _, completions, _, _ = trainer.vllm_generation.generate([[3, 4, 5] * 20, [3, 4, 5]], None, 1)
        said.extend(map(len, completions))
        return "dad"

    more = chat_arguments(CallingTokenizer) | {"tools": [lookup]}
    trainer = make_trainer(more=more, max_completion_length=24, max_steps=1, generation_kwargs={"min_new_tokens": 20})
    attach(trainer)
    trainer.train()
    check_parity(trainer)
    assert said and min(said) >= 20


# -- rollout_func, truncation, over-long prompts -----------------------------------------------------------------------


def test_rollout_func_generates_on_the_engine(make_trainer: MakeTrainer) -> None:
    """Two turns with something in between that the policy did not write, masked out of the loss by ``env_mask``."""
    between = [IDS["h"], IDS["e"]]
    versions = []

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, Any]:
        versions.append(trainer.vllm_generation.engine.weight_version)
        ids = trainer._tokenizer(prompts)["input_ids"]
        generate = trainer.vllm_generation.generate
        _, first, first_logprobs, _ = generate(ids, None, 1)
        _, second, second_logprobs, _ = generate(
            [p + c + between for p, c in zip(ids, first, strict=True)], None, num_generations=1
        )
        return {
            "prompt_ids": ids,
            "completion_ids": [a + between + b for a, b in zip(first, second, strict=True)],
            "logprobs": [
                [*(row[0] for row in a), 0.0, 0.0, *(row[0] for row in b)]
                for a, b in zip(first_logprobs, second_logprobs, strict=True)
            ],
            "env_mask": [[1] * len(a) + [0, 0] + [1] * len(b) for a, b in zip(first, second, strict=True)],
        }

    trainer = make_trainer(more={"rollout_func": rollout_func})
    attach(trainer)
    trainer.train()
    check_parity(trainer)
    assert versions == [1, 2, 3]


def test_what_threads_of_a_rollout_func_do_at_once_is_counted_once(make_trainer: MakeTrainer) -> None:
    spent: list[float] = []
    tokens: list[int] = []

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = trainer._tokenizer(prompts)["input_ids"]
        with ThreadPoolExecutor(len(ids)) as threads:
            answers = list(threads.map(lambda p: trainer.vllm_generation.generate([p], None, 1), ids))
        tokens.append(sum(len(a[1][0]) for a in answers))
        logprobs = [[row[0] for row in a[2][0]] for a in answers]
        return {"prompt_ids": ids, "completion_ids": [a[1][0] for a in answers], "logprobs": logprobs}

    trainer = make_trainer(more={"rollout_func": rollout_func})
    attach(trainer)
    generate = trainer._generate

    def watched(prompts: Any) -> Any:
        begun = time.perf_counter()
        try:
            return generate(prompts)
        finally:
            spent.append(time.perf_counter() - begun)

    trainer._generate = watched
    trainer.train()
    check_parity(trainer)
    seconds, rates = logged(trainer, "rollout/seconds"), logged(trainer, "rollout/tokens_per_second")
    assert len(seconds) == 3 and all(s <= whole for s, whole in zip(seconds, spent, strict=True))
    assert [round(s * rate) for s, rate in zip(seconds, rates, strict=True)] == tokens


def test_truncated_completions_are_masked(make_trainer: MakeTrainer) -> None:
    """A row counts from its first token to the EOS the engine returns with it, or not at all."""
    trainer = make_trainer(mask_truncated_completions=True, max_steps=1, max_completion_length=16)
    engine = attach(trainer)
    sampled: list[list[int]] = []
    generate_batch = engine.generate_batch

    def keep(prompts: Any, params: Any) -> Any:
        batch = generate_batch(prompts, params)
        sampled.extend(output.completions[0].token_ids for output in batch)
        return batch

    engine.generate_batch = keep  # type: ignore[method-assign]
    inputs = [{"prompt": prompt} for prompt in ("abc", "d") for _ in range(4)]
    masks = trainer._generate_and_score_completions(inputs)["completion_mask"]
    whole = [ids[-1] in (EOS, PAD) for ids in sampled]  # TRL takes its padding for an ending too
    assert masks.sum(1).tolist() == [len(ids) if ends else 0 for ids, ends in zip(sampled, whole, strict=True)]
    assert any(whole) and not all(whole)


def test_an_overlong_prompt_of_the_dataset_stops_training_by_name(make_trainer: MakeTrainer) -> None:
    """By its place in the batch, and by how it ends: batches are shuffled, and rows may begin alike."""
    rows = ["abc" * 20 + end for end in ("cab", "feed")] + ["abc"] * 2
    trainer = make_trainer(more={"train_dataset": Dataset.from_dict({"prompt": rows})})
    attach(trainer, config=EngineConfig(max_model_len=64))
    with pytest.raises(InvalidRequestError, match=r"prompt [04] has 64 tokens and .*; it ends with '\w*abcfeed'$"):
        trainer.train()


# -- checkpoints -------------------------------------------------------------------------------------------------------
