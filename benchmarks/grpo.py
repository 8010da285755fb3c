"""A TRL GRPO step from end to end, by who samples its completions: ``python -m stoker.benchmarks.grpo``.

The same trainer five times over: with the engine (and, apart, with the importance-sampling correction TRL then turns on,
which costs a forward of its own), with ``model.generate``, and with transformers' continuous batching, as TRL calls it and
with a cache sized to the batch. Same model, prompts and settings; blocks of steps alternate. Completions end where the
sampler draws the end token, and their lengths are geometric: the model is random, and built so that this token always has
about the same probability. Writes one JSON file, prints a table and, last, one line of JSON. On a CPU only ratios of one
run mean anything: run it on a machine that does nothing else.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from stoker.benchmarks import ceilings, command, gate
from stoker.benchmarks.gate import GateError
from stoker.benchmarks.peers import PAGE_SIZE
from stoker.benchmarks.workloads import LLAMA_1B, TOY, ModelSpec, dtype_of
from stoker.integrations.trl import attach
from stoker.rollout import EngineConfig

PAD, EOS = 0, 1


@dataclass(frozen=True, kw_only=True)
class Scenario:
    spec: ModelSpec
    median: int  # completion tokens
    cap: int
    steps: int  # of a block
    blocks: int
    prompts: int = 8
    samples: int = 8
    prompt_tokens: tuple[int, int] = (16, 64)
    micro_batch: int = 64  # completions of one forward and backward
    as_called: bool = True  # time continuous batching with its default settings too, which are slow to set up

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @property
    def max_len(self) -> int:
        return self.prompt_tokens[1] + self.cap


SCENARIOS = {
    ("cpu", False): (
        Scenario(spec=TOY, median=60, cap=256, steps=4, blocks=5, prompts=4, micro_batch=32),
        Scenario(spec=TOY, median=60, cap=256, steps=4, blocks=5, prompts=2, micro_batch=16),
    ),
    ("cpu", True): (
        Scenario(spec=TOY, median=8, cap=16, steps=2, blocks=2, prompts=2, samples=4, micro_batch=8, as_called=False),
    ),
    ("cuda", False): (Scenario(spec=LLAMA_1B, median=250, cap=1024, steps=2, blocks=3, micro_batch=8),),
    ("cuda", True): (Scenario(spec=LLAMA_1B, median=60, cap=256, steps=1, blocks=1, micro_batch=8, as_called=False),),
}
# What is timed, and the arguments of the trainer. The first is what the others are compared with.
WAYS: dict[str, dict[str, Any]] = {
    "engine": {"vllm_importance_sampling_correction": False},
    "engine, corrected": {"vllm_importance_sampling_correction": True},
    "generate": {},
    "continuous": {"use_transformers_continuous_batching": True},
    "continuous, sized": {"use_transformers_continuous_batching": True},
}


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """One token a character, of planes of Unicode that have enough of them."""
    characters = [chr(0x20000 + i) for i in range(vocab_size - 2)]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(["<pad>", "<eos>", *characters])}))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left")


@torch.no_grad()
def build_model(scenario: Scenario, device: str) -> PreTrainedModel:
    """A random model that gives its end token the probability 1 - 2 ** (-1 / median) after about any text.

    The first hidden channel is the same for all tokens and no layer writes to it; only the end token's logit reads it.
    """
    config = copy.deepcopy(scenario.spec.config)
    config.tie_word_embeddings, config.eos_token_id, config.pad_token_id = False, EOS, PAD
    model: Any = replace(scenario.spec, config=config).build(device, dtype_of(device))
    head = model.lm_head.weight
    model.model.embed_tokens.weight[:, 0] = math.sqrt(config.hidden_size)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
    head[:, 0] = head[EOS] = 0
    text = torch.randint(2, config.vocab_size, (4, scenario.max_len), device=device)
    hidden = model.model(text).last_hidden_state
    end = 1 - 2 ** (-1 / scenario.median)
    others = (hidden @ head.T).float().logsumexp(-1).mean().item()
    head[EOS, 0] = (others + math.log(end / (1 - end))) / hidden[..., 0].float().mean().item()
    model.generation_config.update(eos_token_id=EOS, pad_token_id=PAD)
    return model.train().requires_grad_(True)


def variety(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text)) / max(1, len(text)) for text in completions]


@dataclass
class Times:
    steps: list[float] = field(default_factory=list)  # seconds
    rollouts: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # completion tokens


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
    """Notes how long it samples and what; the clock of whole steps is ``Clock``."""

    times: Times

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        device = self.accelerator.device.type
        ceilings.synchronize(device)
        start = time.perf_counter()
        out = super()._generate_single_turn(*args, **kwargs)
        ceilings.synchronize(device)
        self.times.rollouts.append(time.perf_counter() - start)
        self.times.lengths += map(len, out[0])
        return out


class Clock(TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: TimedTrainer) -> None:
        self.trainer, self.start = trainer, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        ceilings.synchronize(self.trainer.accelerator.device.type)
        self.trainer.times.steps.append(time.perf_counter() - self.start)


def build_trainer(
    scenario: Scenario, way: str, device: str, folder: str, tokenizer: PreTrainedTokenizerFast
) -> TimedTrainer:
    rng = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(scenario.prompts * scenario.steps):
        count = int(torch.randint(*scenario.prompt_tokens, (1,), generator=rng))
        rows.append(tokenizer.decode(torch.randint(2, len(tokenizer), (count,), generator=rng)))
    settings = dict(WAYS[way])
    if way == "continuous, sized":
        # By default it takes a share of all memory, and on a CPU most of its time is then spent on that.
        pages = -(-scenario.max_len // 32) * scenario.rows
        sized = {PAGE_SIZE: 32, "num_blocks": pages, "max_batch_tokens": 2 * scenario.rows}
        settings["transformers_continuous_batching_config"] = sized
    config = GRPOConfig(
        output_dir=folder,
        max_steps=1,
        per_device_train_batch_size=scenario.micro_batch,
        gradient_accumulation_steps=scenario.rows // scenario.micro_batch,
        num_generations=scenario.samples,
        max_completion_length=scenario.cap,
        learning_rate=1e-7,  # the lengths stay what the model was built for
        beta=0.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=device == "cpu",
        seed=0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    trainer = TimedTrainer(
        model=build_model(scenario, device),
        reward_funcs=variety,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": rows}),
        processing_class=tokenizer,
    )
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ == "PrinterCallback":
            trainer.remove_callback(callback)
    trainer.add_callback(Clock(trainer))
    trainer.times = Times()
    if way.startswith("engine"):
        attach(trainer, config=EngineConfig(max_num_seqs=scenario.rows, max_model_len=scenario.max_len))
    return trainer


def check(trainers: dict[str, TimedTrainer], dtype: torch.dtype) -> dict[str, Any]:
    """That all sample alike: mean lengths within four standard errors, the engine's log-probabilities the trainer's."""
    reference = trainers["engine"].times.lengths
    mean, error = statistics.fmean(reference), statistics.stdev(reference) / len(reference) ** 0.5
    for way, trainer in trainers.items():
        other = trainer.times.lengths
        limit = 4 * math.hypot(error, statistics.stdev(other) / len(other) ** 0.5)
        if abs(statistics.fmean(other) - mean) > limit:
            raise GateError(
                f"completions of {way} have {statistics.fmean(other):.1f} tokens in the mean, those of the engine "
                f"{mean:.1f}: more than chance allows, {limit:.1f}"
            )
    key = "sampling/sampling_logp_difference/max"
    worst = max(entry[key] for entry in trainers["engine, corrected"].state.log_history if key in entry)
    return gate.check(worst, gate.limit_of(dtype), "the trainer's")


def compare(scenario: Scenario, device: str) -> Iterator[dict[str, Any]]:
    """What is known after each block of each way; the gate is of all of them."""
    tokenizer = build_tokenizer(scenario.spec.config.vocab_size)
    trainers: dict[str, TimedTrainer] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:  # once, for what is made or captured at first
            if scenario.as_called or way != "continuous":
                trainers[way] = trainer = build_trainer(scenario, way, device, folder, tokenizer)
                trainer.train()
                trainer.times, trainer.args.max_steps = Times(), scenario.steps
        for block in range(scenario.blocks):
            for way, trainer in trainers.items():
                if block == 0 or way != "continuous":
                    trainer.train()
                    yield report(scenario, trainers)
    dtype = next(trainers["engine"].model.parameters()).dtype
    yield report(scenario, trainers) | {"gate": check(trainers, dtype)}


def report(scenario: Scenario, trainers: dict[str, TimedTrainer]) -> dict[str, Any]:
    """Of those that have taken steps."""
    timed = {way: trainer.times for way, trainer in trainers.items() if trainer.times.steps}
    medians = {way: statistics.median(times.steps) for way, times in timed.items()}
    parameters = list(trainers["engine"].model.parameters())
    return {
        "model": {
            "name": scenario.spec.name,
            "parameters": sum(p.numel() for p in parameters),
            "dtype": str(parameters[0].dtype).removeprefix("torch."),
        },
        "workload": {
            "prompts": scenario.prompts,
            "samples": scenario.samples,
            "prompt_tokens": list(scenario.prompt_tokens),
            "cap": scenario.cap,
            "median_length": statistics.median(timed["engine"].lengths),
            "steps": len(timed["engine"].steps),
            "micro_batch": scenario.micro_batch,
        },
        "ways": {
            way: {
                "step_seconds": times.steps,
                "rollout_seconds": times.rollouts,
                "median_step_s": medians[way],
                "median_rollout_s": statistics.median(times.rollouts),
                "rollout_share": sum(times.rollouts) / sum(times.steps),
                "times_engine": medians[way] / medians["engine"],
                "mean_length": statistics.fmean(times.lengths),
            }
            for way, times in timed.items()
        },
    }


def table(run: dict[str, Any]) -> list[str]:
    work = run["workload"]
    lines = [
        f"{run['model']['name']} ({run['model']['parameters']:,} parameters, {run['model']['dtype']}): "
        f"{work['prompts']} prompts x {work['samples']} samples, completions of {work['median_length']:.0f} tokens in the "
        f"median, at most {work['cap']}; log-probabilities within {run['gate']['max_abs_diff']:.1e} of the trainer's",
        f"  {'rollouts by':20}{'steps':>6}{'step s':>9}{'range':>18}{'rollout s':>11}{'its share':>11}"
        f"{'step / engine':>15}{'tokens':>8}",
    ]
    for name, way in run["ways"].items():
        low, high = min(way["step_seconds"]), max(way["step_seconds"])
        lines.append(
            f"  {name:20}{len(way['step_seconds']):6}{way['median_step_s']:9.3f}{f'{low:.3f} - {high:.3f}':>18}"
            f"{way['median_rollout_s']:11.3f}{way['rollout_share']:11.0%}{way['times_engine']:14.2f}x"
            f"{way['mean_length']:8.1f}"
        )
    return lines


def headline(run: dict[str, Any]) -> dict[str, float]:
    return {f"x_{name}": round(way["times_engine"], 2) for name, way in run["ways"].items() if name != "engine"}


def main() -> int:
    # TRL sets options that the installed transformers is about to rename; nothing a user of this script could act on.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning)
    return command.run("grpo", __doc__, SCENARIOS, compare, table, headline, quick="short completions")


if __name__ == "__main__":
    sys.exit(main())
