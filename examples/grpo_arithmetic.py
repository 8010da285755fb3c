"""Train a language model with TRL's GRPO, its rollouts on the engine, and measure what the engine does.

    python -m stoker.examples.grpo_arithmetic --output outputs/demo

makes a small model on the spot, teaches it addition to a middling level (see ``arithmetic.py``), trains it on with
GRPO, and reports held-out accuracy before and after, the reward curve, rollout speed against the two ways TRL has
without an engine, the time of a weight update, and how far the engine's log-probabilities are from the trainer's. A few
minutes on two CPU cores. ``--lora 16`` trains an adapter of that rank, and also times what it takes until the engine samples
from a changed adapter, live and by merge-and-push. With a model and a dataset of your own it is a script to start from:

    python -m stoker.examples.grpo_arithmetic --model path/to/folder --dataset problems.jsonl --steps 500 --learning-rate 1e-6

Each line of the dataset is an object with the texts ``prompt`` and ``answer``; the reward is 1 where a completion's final
answer is that answer.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from stoker.examples import arithmetic, grpo_report
from stoker.integrations.trl import attach
from stoker.rollout import RolloutEngine, SamplingParams

Problem = dict[str, str]  # "prompt" and "answer"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"), help="folder of the report")
    parser.add_argument("--model", type=Path, help="local folder of a model and its tokenizer; goes with --dataset")
    parser.add_argument("--dataset", type=Path, help="local JSON Lines file of prompts and answers; goes with --model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of --model")
    parser.add_argument("--pretraining-steps", type=int, default=400, help="of the demo's own model")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of GRPO")
    parser.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="train an adapter of this rank; 0: all weights"
    )
    parser.add_argument("--learning-rate", type=float, help="default: 2e-4, or 2e-3 with --lora")
    parser.add_argument("--batch-size", type=int, default=128, help="completions a step")
    parser.add_argument("--num-generations", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--max-completion-length", type=int, default=32, help="in tokens")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--eval-problems", type=int, default=400, help="held-out problems, never trained on")
    parser.add_argument("--compare-prompts", type=int, default=32, help="prompts of the speed comparison; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    for name, value in vars(args).items():
        least = 0 if name in ("seed", "compare_prompts", "lora") else 1 if isinstance(value, int) else 1e-12
        if isinstance(value, int | float) and not value >= least:
            parser.error(f"--{name.replace('_', '-')} {value} is too small")
    args.learning_rate = args.learning_rate or (2e-3 if args.lora else 2e-4)
    if args.num_generations < 2:
        parser.error("--num-generations has to be at least 2: GRPO compares the completions of a prompt")
    if args.batch_size % args.num_generations:
        parser.error("--batch-size has to be a multiple of --num-generations")
    if (args.model is None) != (args.dataset is None):
        parser.error("--model and --dataset go together: the demo's own tokenizer knows sums only")
    if args.model and not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model} is no model folder: there is no config.json in it")
    try:
        args.problems = read_problems(args.dataset) if args.dataset else None
        args.output.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=args.output):  # or it would fail once the model is made
            pass
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    except ValueError as error:
        parser.error(f"--dataset {args.dataset}: {error}")
    return args


# -- model and data ----------------------------------------------------------------------------------------------------


def read_problems(path: Path) -> list[Problem]:
    problems = []
    text = path.read_text(encoding="utf-8-sig")
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines() would cut at U+2028 too
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is no JSON: {error.msg}") from None
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or "answer" not in row:
            raise ValueError(f"line {number} has to be an object with a text prompt, and an answer")
        problems.append({"prompt": row["prompt"], "answer": str(row["answer"])})
    if len(problems) < 2:
        raise ValueError("it holds fewer than two problems")
    return problems


def own_model(args: argparse.Namespace) -> tuple[Any, Any, list[Problem], list[Problem]]:
    """The folder's model and tokenizer; at most a fifth of the problems is held out."""
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype, local_files_only=True)
    problems = list(args.problems)
    random.Random(args.seed).shuffle(problems)
    count = min(args.eval_problems, max(1, len(problems) // 5))
    return model, tokenizer, problems[count:], problems[:count]


def demo_model(args: argparse.Namespace) -> tuple[Any, Any, list[Problem], list[Problem]]:
    """A small model that can add to a middling level."""
    torch.set_num_threads(1)  # operations this small gain little from more, and lose much where the machine is busy
    tokenizer = arithmetic.build_tokenizer()
    model = arithmetic.build_model(tokenizer, args.seed)
    arithmetic.pretrain(model, tokenizer, steps=args.pretraining_steps, seed=args.seed)
    count = min(2000, args.steps * args.batch_size // args.num_generations)
    train = arithmetic.draw_problems(args.seed + 1, count)
    return model, tokenizer, train, arithmetic.draw_problems(args.seed, args.eval_problems, held_out=True)


def final_answer(text: str) -> str:
    """What follows the last ``#``, else the last ``\\boxed{}``, else the last number, else the whole text; normalised."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    if "#" in text:
        text = text.rpartition("#")[2]
    elif boxed := re.findall(r"\\boxed\{([^{}]*)\}", text):
        text = boxed[-1]
    elif numbers:
        text = numbers[-1]
    text = text.strip().strip("$").rstrip(".").strip().casefold()
    return text.replace(",", "") if re.fullmatch(r"[-\d,.]+", text) else text


def is_right(completion: str, answer: str) -> bool:
    return final_answer(completion) == final_answer(answer)


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for a right final answer, else 0. Completions are texts, or one message each where prompts are chats."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(is_right(text, right)) for text, right in zip(texts, answer, strict=True)]


# -- training ----------------------------------------------------------------------------------------------------------


class Progress(TrainerCallback):  # type: ignore[misc]
    """A bar that shows the reward, in place of a printed line for each step."""

    def __init__(self, steps: int) -> None:
        self.bar = tqdm(total=steps, desc="GRPO", unit="step")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "reward" in logs:
            self.bar.set_postfix(reward=f"{logs['reward']:.2f}", refresh=False)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.close()


def build_trainer(args: argparse.Namespace, model: Any, tokenizer: Any, problems: list[Problem]) -> GRPOTrainer:
    """Plain TRL; nothing here knows of the engine."""
    rows = [{"prompt": as_prompt(tokenizer, p["prompt"]), "answer": p["answer"]} for p in problems]
    config = GRPOConfig(
        output_dir=str(args.output / "trainer"),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        num_generations=args.num_generations,
        max_completion_length=args.max_completion_length,
        temperature=args.temperature,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=False,  # the trainer's forward runs in the model's own dtype, as the engine's does
        gradient_checkpointing=args.model is not None,  # the demo's model is too small to need it
        use_cpu=not torch.cuda.is_available(),
        seed=args.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora_config(args.lora) if args.lora else None,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def lora_config(rank: int) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def as_prompt(tokenizer: Any, text: str) -> Any:
    return [{"role": "user", "content": text}] if tokenizer.chat_template else text


# -- held-out problems -------------------------------------------------------------------------------------------------


def measure_accuracy(args: argparse.Namespace, engine: RolloutEngine, problems: list[Problem]) -> dict[str, Any]:
    """Share of held-out problems answered rightly, decoded greedily on the engine, and the first few completions."""
    engine.update_weights()
    prompts = [as_prompt(engine.tokenizer, p["prompt"]) for p in problems]
    greedy = SamplingParams(temperature=0.0, max_tokens=args.max_completion_length)
    batch = engine.generate_batch(prompts, greedy)
    batch.raise_for_errors()
    texts = [output.completions[0].text or "" for output in batch]
    right = [is_right(text, p["answer"]) for text, p in zip(texts, problems, strict=True)]
    examples = [p["prompt"] + text for text, p in zip(texts[:3], problems, strict=False)]
    return {"accuracy": sum(right) / len(right), "problems": len(right), "examples": examples}


def main() -> int:
    args = parse_arguments()
    # TRL sets options that the installed transformers is about to rename; nothing a user of this script could act on.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning)
    report: dict[str, Any] = {
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "problems"}
    }
    start = time.perf_counter()
    trainer = None
    try:
        model, tokenizer, train, held_out = own_model(args) if args.model else demo_model(args)
        trainer = build_trainer(args, model, tokenizer, train)
        engine = attach(trainer)  # this is all it takes
        device = trainer.accelerator.device.type
        report["device"] = (
            torch.cuda.get_device_name() if device == "cuda" else f"CPU, threads: {torch.get_num_threads()}"
        )
        report["before"] = measure_accuracy(args, engine, held_out)
        grpo_report.write(args.output, report)

        trainer.add_callback(Progress(args.steps))
        trainer.train()
        report |= grpo_report.training_record(trainer)
        report["after"] = measure_accuracy(args, engine, held_out)
        report["update_seconds"] = statistics.median(grpo_report.seconds_of(engine.update_weights) for _ in range(20))
        if args.lora:
            report["adapter_updates"] = grpo_report.adapter_updates(engine, trainer)
        grpo_report.write(args.output, report)
        if args.compare_prompts:
            print("measuring rollout speed ...")
            texts = [as_prompt(tokenizer, p["prompt"]) for p in held_out[: args.compare_prompts]]
            report["tokens_per_second"] = speeds = {}
            for name, speed in grpo_report.rollout_speeds(trainer, texts):
                speeds[name] = speed
    except KeyboardInterrupt:
        report["interrupted"] = True
        if trainer is not None:
            report |= grpo_report.training_record(trainer)
    report["seconds"] = time.perf_counter() - start
    grpo_report.write(args.output, report)
    if "before" in report:
        grpo_report.show(report)
        grpo_report.plot(args.output, report)
    print(f"\nwritten to {args.output} after {report['seconds']:.0f} s")
    return 130 if report.get("interrupted") else 0


if __name__ == "__main__":
    sys.exit(main())
