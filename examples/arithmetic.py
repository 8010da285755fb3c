"""The demo's world: addition problems, a character tokenizer, a small model, and its supervised start.

A problem is ``4073+0586=``. It can be answered at once, ``#4659``, or after column-wise working from the last digit on
(the digits of a column, then their sum with the carry): ``36:09,78:15,05:06,40:04#4659``. The supervised examples show
the working in a part of the cases only, and there are few of them. So the model half knows both ways and mostly guesses
an answer; that writing the working pays is for reinforcement learning to find out.
"""

from __future__ import annotations

import random
import zlib

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = "0123456789+=:,#"
MAX_DIGITS = 4


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of a few hundred thousand parameters, random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def working(a: str, b: str) -> str:
    """The columns of ``a + b`` from the last one on: both digits and the sum with the carry of the column before."""
    columns, carry = [], 0
    for x, y in zip(reversed(a), reversed(b), strict=True):
        total = int(x) + int(y) + carry
        columns.append(f"{x}{y}:{total:02d}")
        carry = total // 10
    return ",".join(columns)


def draw_problem(rng: random.Random, held_out: bool) -> dict[str, str]:
    """``prompt``, ``working`` and ``answer`` of a sum of two numbers with as many digits each.

    A checksum of the prompt decides whether a problem is one of the held-out fifth, so that no held-out problem is
    ever seen in pre-training or in training.
    """
    while True:
        digits = rng.randint(1, MAX_DIGITS)
        a, b = (f"{rng.randrange(10**digits):0{digits}d}" for _ in range(2))
        prompt = f"{a}+{b}="
        if (zlib.crc32(prompt.encode()) % 5 == 0) == held_out:
            return {"prompt": prompt, "working": working(a, b), "answer": str(int(a) + int(b))}


def draw_problems(seed: int, count: int, *, held_out: bool = False) -> list[dict[str, str]]:
    """``count`` different problems."""
    rng = random.Random(seed)
    problems: dict[str, dict[str, str]] = {}
    while len(problems) < count:
        problem = draw_problem(rng, held_out)
        problems[problem["prompt"]] = problem
    return list(problems.values())


def pretrain(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    steps: int,
    seed: int,
    batch_size: int = 64,
    learning_rate: float = 3e-3,
    share_with_working: float = 0.4,
) -> None:
    """Next-token training on the completions of fresh problems; a progress bar shows the loss."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))
    model.train()
    with tqdm(total=steps, desc="pre-training", unit="step") as progress:
        for _ in range(steps):
            loss = model(**_batch(tokenizer, rng, batch_size, share_with_working)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            progress.update()


def _batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random, size: int, share: float) -> dict[str, torch.Tensor]:
    """Right-padded ``input_ids``, ``attention_mask`` and ``labels`` [size, T]; the loss is on the completion only."""
    prompts, completions = [], []
    for _ in range(size):
        problem = draw_problem(rng, held_out=False)
        shown = problem["working"] if rng.random() < share else ""
        prompts.append(tokenizer(problem["prompt"])["input_ids"])
        completions.append([*tokenizer(f"{shown}#{problem['answer']}")["input_ids"], tokenizer.eos_token_id])
    rows = [p + c for p, c in zip(prompts, completions, strict=True)]
    labels = [[-100] * len(p) + c for p, c in zip(prompts, completions, strict=True)]

    def pad(lists: list[list[int]], value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in lists], True, value)

    return {
        "input_ids": pad(rows, tokenizer.pad_token_id),
        "attention_mask": pad([[1] * len(row) for row in rows], 0),
        "labels": pad(labels, -100),
    }
