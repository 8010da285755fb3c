"""A PPO loop in plain torch, its rollouts on the engine. The policy learns to name the largest digit of its prompt.

    python -m stoker.examples.ppo

A model made on the spot sees a few digits and answers with a few more; its reward is the share of these that are the
largest it was shown. It starts from random weights, so from about 0.1. Two minutes on two CPU cores at most.

What PPO (Schulman et al., arXiv:1707.06347) needs of a language model is all here and meant to be changed: a value head
on the policy's own trunk, a penalty for leaving the reference model, advantages from ``stoker.integrations.ppo``, and
both losses with clipping.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM

from stoker.integrations.ppo import gae, kl_penalty, masked_mean, token_rewards, whiten
from stoker.rollout import RolloutBatch, RolloutEngine, RolloutTensors, SamplingParams

DIGITS, PAD = 10, 10  # token ids 0 to 9 are digits; there is no end of text, answers have a fixed length


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="rollouts, each followed by --epochs passes over it")
    parser.add_argument("--prompts", type=int, default=64, help="prompts a rollout")
    parser.add_argument("--samples", type=int, default=4, help="completions of a prompt")
    parser.add_argument("--prompt-length", type=int, default=3, help="digits shown")
    parser.add_argument("--completion-length", type=int, default=4, help="digits asked for")
    parser.add_argument("--epochs", type=int, default=2, help="passes over a rollout")
    parser.add_argument("--minibatches", type=int, default=2, help="optimizer steps a pass")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=0.2, help="of the ratio, and of the change of the value")
    parser.add_argument("--kl-coefficient", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name in ("steps", "prompts", "samples", "prompt_length", "completion_length", "epochs", "minibatches"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} has to be at least 1")
    for name in ("learning_rate", "clip", "kl_coefficient"):
        if not 0 <= getattr(args, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} has to be a finite number of at least 0")
    if args.prompts * args.samples < args.minibatches:
        parser.error("--minibatches is larger than the completions of a rollout")
    return args


class Critic(nn.Module):
    """The value of each position, from the last hidden states of the policy's trunk."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        values: Tensor = self.head(hidden.float())
        return values[..., 0]


def evaluate_tokens(model: Any, critic: Critic, t: RolloutTensors) -> tuple[Tensor, Tensor]:
    """Log-probability of each completion token, and the value before it; both [B, C]."""
    ids, mask = torch.cat([t.prompt_ids, t.completion_ids], 1), torch.cat([t.prompt_mask, t.completion_mask], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(ids, attention_mask=mask, position_ids=positions, output_hidden_states=True, use_cache=False)
    before = slice(t.prompt_ids.shape[1] - 1, -1)  # each token is drawn from what the one before it has seen
    logprobs = out.logits[:, before].float().log_softmax(-1).gather(-1, t.completion_ids[..., None])[..., 0]
    return logprobs, critic(out.hidden_states[-1][:, before])


def reward(prompt: list[int], completion: list[int]) -> float:
    return sum(token == max(prompt) for token in completion) / len(completion)


def score(batch: RolloutBatch) -> Tensor:
    """The reward of each completion, [B], in the order of ``to_tensors``."""
    return torch.tensor([reward(o.prompt_token_ids, c.token_ids) for o in batch for c in o.completions])


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=DIGITS + 1, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=args.prompt_length + args.completion_length,
            bos_token_id=None, eos_token_id=None, pad_token_id=PAD,
        )
    )  # fmt: skip
    reference = RolloutEngine(copy.deepcopy(model).eval())
    critic = Critic(model.config.hidden_size)
    parameters = [*model.parameters(), *critic.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, weight_decay=0.0)
    engine = RolloutEngine(model)
    params = SamplingParams(n=args.samples, max_tokens=args.completion_length)

    def draw_prompts(count: int) -> list[list[int]]:
        return [[rng.randrange(DIGITS) for _ in range(args.prompt_length)] for _ in range(count)]

    held_out = draw_prompts(256)
    greedy = SamplingParams(temperature=0.0, max_tokens=args.completion_length)
    print(f"reward before: {score(engine.generate_batch(held_out, greedy)).mean():.3f}")
    start = time.perf_counter()
    progress = tqdm(range(args.steps), unit="step")
    for _ in progress:
        batch = engine.generate_batch(draw_prompts(args.prompts), params)
        scores, t = score(batch), batch.to_tensors(PAD)
        mask = t.completion_mask
        with torch.no_grad():
            _, old_values = evaluate_tokens(model, critic, t)
        reference_logprobs = pad_sequence([s.logprobs for s in reference.score(batch)], batch_first=True)
        kl = kl_penalty(t.logprobs, reference_logprobs, mask)
        rewards = token_rewards(scores, kl, mask, kl_coefficient=args.kl_coefficient)
        advantages, returns = gae(rewards, old_values, mask)
        advantages = whiten(advantages, mask)

        for _ in range(args.epochs):
            for rows in torch.randperm(len(scores)).chunk(args.minibatches):
                part, part_mask = RolloutTensors(*(x[rows] for x in t)), mask[rows]
                logprobs, values = evaluate_tokens(model, critic, part)
                ratio = (logprobs - part.logprobs).exp()  # the log-probabilities the engine sampled with
                clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
                gain = torch.minimum(ratio * advantages[rows], clipped * advantages[rows])
                near = old_values[rows] + (values - old_values[rows]).clamp(-args.clip, args.clip)
                error = torch.maximum((values - returns[rows]) ** 2, (near - returns[rows]) ** 2)
                loss = masked_mean(0.5 * error, part_mask) - masked_mean(gain, part_mask)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
        engine.update_weights()
        mean_kl = masked_mean(kl, mask)
        progress.set_postfix(reward=f"{scores.mean():.3f}", kl=f"{mean_kl:.3f}", refresh=False)

    print(f"reward after:  {score(engine.generate_batch(held_out, greedy)).mean():.3f}")
    print(f"{args.steps} steps in {time.perf_counter() - start:.0f} s")
    reference.close()
    engine.close()


if __name__ == "__main__":
    main()
