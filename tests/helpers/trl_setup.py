"""TRL's trainers over a tiny model, for the tests of the integration."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from stoker.rollout import RolloutBatch, RolloutEngine, StokerError

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # TRL warns when its experimental trainers are imported

CHARACTERS = "abcdefgh"
PAD, EOS, END_OF_TURN = 0, 1, 2
# What two orders of summation in fp32 may differ by on these models.
LOGPROB_TOLERANCE = 1e-4
# Groups of several lengths, and one that spans more than a KV block.
PROMPTS = ["abc", "hgfedcba", "d", "ab" * 12, "cafe", "bad"]
KINDS = ("grpo", "rloo", "distillation", "sdft", "sdpo", "gold", "iw_opd", "online_dpo")


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<end>", *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<end>"))  # templates bring other letters
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<end>")


def make_model(**overrides: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=overrides.pop("vocab_size", len(CHARACTERS) + 3),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=overrides.pop("max_position_embeddings", 128),
        initializer_range=0.3,  # far from uniform, so that a wrong weight or position shows
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        **overrides,
    )
    return Qwen3ForCausalLM(config)


def frozen_copy(model: Any) -> Qwen3ForCausalLM:
    copied = make_model()  # not deepcopy: the trainer's forward hangs on the instance, bound to the original
    copied.load_state_dict(model.state_dict())
    return copied


def count_a(completions: list[str], **_: Any) -> list[float]:
    return [float(text.count("a")) for text in completions]


def build(kind: str, output_dir: str, *, model: Any = None, more: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A trainer of a kind. more: arguments of its constructor, on top of those every kind needs; settings: of its config."""
    from datasets import Dataset

    trainer_class, config_class = _classes(kind)
    arguments: dict[str, Any] = {
        "output_dir": output_dir,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    if kind in ("sdft", "sdpo"):
        arguments["distillation_topk"] = 4  # the default is more than there are tokens
    if kind in ("distillation", "server_distillation"):
        arguments["per_device_train_batch_size"] = 4  # samples prompts without repeating them, and drops an uneven rest
    arguments |= {"max_new_tokens": 8} if kind == "online_dpo" else {"max_completion_length": 8}
    if kind == "gkd":
        del arguments["max_completion_length"]
        arguments |= {"max_new_tokens": 8, "lmbda": 1.0, "max_length": 32, "gradient_checkpointing": False}
    if kind in ("grpo", "rloo", "sdft", "sdpo"):
        arguments["num_generations"] = 4
    if kind in ("gold", "iw_opd"):
        arguments |= {"num_generations": 2, "lmbda": 1.0, "max_length": 32}
    if kind == "gold":
        arguments |= {"use_uld_loss": False, "gradient_checkpointing": False}
        arguments["dataset_kwargs"] = {"skip_prepare_dataset": True}  # that wants a tokenizer of bytes
    if kind in ("grpo", "rloo"):
        arguments["beta"] = 0.0  # a reference model would be loaded by name, and this model has none
    columns: dict[str, list[Any]] = {"prompt": PROMPTS}
    if kind == "sdft":
        columns["privileged_context"] = ["a"] * len(PROMPTS)
    passed: dict[str, Any] = {
        "model": model or make_model(),
        "train_dataset": Dataset.from_dict(columns),
        "processing_class": make_tokenizer(),
    }
    if kind in ("gold", "iw_opd", "gkd"):
        messages = [[{"role": "user", "content": p}, {"role": "assistant", "content": "abc"}] for p in PROMPTS]
        passed["train_dataset"] = Dataset.from_dict({"messages": messages})
        passed["processing_class"].chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    if kind in ("distillation", "gold", "iw_opd", "gkd"):
        passed["teacher_model"] = make_model(tie_word_embeddings=True)
    elif kind not in ("sdft", "server_distillation"):
        passed["reward_funcs"] = count_a
    if kind in ("sdft", "sdpo"):
        arguments["teacher_model_kind"] = "live"  # others are loaded by name, like a reference model
    if kind == "iw_opd":  # it looks for the teacher's tokenizer beside the teacher
        teacher = os.path.join(output_dir, "teacher")
        passed["processing_class"].save_pretrained(teacher)
        passed["teacher_model"].config._name_or_path = teacher
    if kind in ("gold", "iw_opd", "gkd"):
        passed["eval_dataset"] = passed["train_dataset"]
    elif kind == "online_dpo":
        passed["ref_model"] = copy.deepcopy(passed["model"])
    else:
        passed["eval_dataset"] = Dataset.from_dict({name: rows[:2] for name, rows in columns.items()})
    return trainer_class(args=config_class(**arguments | settings), **passed | (more or {}))


def _classes(kind: str) -> tuple[Any, Any]:
    import trl

    if kind == "grpo":
        return trl.GRPOTrainer, trl.GRPOConfig
    if kind == "rloo":
        return trl.RLOOTrainer, trl.RLOOConfig
    if kind == "distillation":
        return trl.DistillationTrainer, trl.DistillationConfig
    if kind == "server_distillation":
        from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

        return ServerDistillationTrainer, ServerDistillationConfig
    if kind == "sdft":
        from trl.experimental.sdft import SDFTConfig, SDFTTrainer

        return SDFTTrainer, SDFTConfig
    if kind == "sdpo":
        from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

        return SDPOTrainer, SDPOConfig
    if kind == "gold":
        from trl.experimental.gold import GOLDConfig, GOLDTrainer

        return GOLDTrainer, GOLDConfig
    if kind == "iw_opd":
        from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

        return IWOPDTrainer, IWOPDConfig
    if kind == "gkd":
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        return GKDTrainer, GKDConfig
    if kind == "a2po":
        from trl.experimental.a2po import A2POConfig, A2POTrainer

        return A2POTrainer, A2POConfig
    assert kind == "online_dpo"
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    return OnlineDPOTrainer, OnlineDPOConfig


MakeTrainer = Callable[..., Any]


def trainers(output_dir: str) -> Iterator[MakeTrainer]:
    """For a fixture: builds trainers, and detaches in the end whatever is attached then."""
    from stoker.integrations.trl import detach

    made = []

    def make(kind: str = "grpo", **settings: Any) -> Any:
        made.append(build(kind, output_dir, **settings))
        return made[-1]

    yield make
    for trainer in made:
        if getattr(trainer, "use_vllm", False):  # some kinds have no other way than ``generate``
            detach(trainer)


def ask(trainer: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """Completions and log-probabilities as TRL gets them."""
    if trainer.state.global_step != trainer._last_loaded_step:
        trainer.vllm_generation.sync_weights()
    _, completions, logprobs, ids = trainer.vllm_generation.generate(prompts, None, 1)
    assert ids == [[[token] for token in c] for c in completions]
    return completions, [[row[0] for row in rows] for rows in logprobs]


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def check_parity(trainer: Any) -> None:
    """The engine's log-probabilities are the trainer's."""
    differences = logged(trainer, "sampling/sampling_logp_difference/max")
    assert differences and max(differences) < LOGPROB_TOLERANCE


def recorded(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> list[RolloutBatch]:
    """What an engine samples from now on, batch by batch."""
    sample = engine.generate_batch
    rollouts: list[RolloutBatch] = []

    def keep(prompts: Any, params: Any) -> RolloutBatch:
        rollouts.append(sample(prompts, params))
        return rollouts[-1]

    monkeypatch.setattr(engine, "generate_batch", keep)
    return rollouts


def replay(trainer: Any, rollouts: list[RolloutBatch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Train without an engine, on what one has sampled for another trainer."""
    asked = iter(rollouts)

    def generate(*, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        t = next(asked).to_tensors(PAD)
        assert torch.equal(input_ids, t.prompt_ids) and torch.equal(attention_mask, t.prompt_mask.long())
        return torch.cat([t.prompt_ids, t.completion_ids], dim=1)

    monkeypatch.setattr(trainer.model, "generate", generate)
    trainer.train()
    assert next(asked, None) is None


@torch.no_grad()
def plain_logprobs(model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> list[float]:
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1)[range(len(completion)), completion].tolist()


def worst_difference(model: Any, batch: RolloutBatch, temperature: float = 1.0) -> float:
    """Of a batch's log-probabilities, from those of the plain forward."""
    return max(
        abs(a - b)
        for output in batch
        for c in output.completions
        for a, b in zip(
            c.logprobs, plain_logprobs(model, output.prompt_token_ids, c.token_ids, temperature), strict=True
        )
    )


def refused(trainer: Any, error: type[StokerError], match: str) -> None:
    """Attaching is, and leaves the trainer as it was."""
    from stoker.integrations.trl import attach

    before = dict(vars(trainer))
    where = [p.data_ptr() for p in trainer.model.parameters()]
    with pytest.raises(error, match=match):
        attach(trainer)
    assert vars(trainer) == before
    assert [p.data_ptr() for p in trainer.model.parameters()] == where
