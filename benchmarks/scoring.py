"""Scoring given tokens against the model's own forward, with this run's ceiling: ``python -m stoker.benchmarks.scoring``.

GRPO groups: every completion's log-probabilities, from token ids to host tensors. Writes one JSON file, prints a table
and, last, one line of JSON. On a CPU only ratios of one run mean anything: run it on a machine that does nothing else.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from stoker.benchmarks import ceilings, command, gate, report
from stoker.benchmarks.workloads import LLAMA_1B, QWEN_7B, SMALL, TOY, ModelSpec, Workload, dtype_of
from stoker.rollout import EngineConfig, RolloutEngine


@dataclass(frozen=True, kw_only=True)
class Scenario:
    spec: ModelSpec
    workload: Workload
    repeats: int
    micro_batch: int  # rows of one plain forward: whole groups, so that no prompt is padded


_CPU = Workload(name="grpo", prompts=8, samples=8, prompt_tokens=(64, 256), median=100, sigma=0.7, cap=256, slots=64)
_GPU = Workload(
    name="grpo", prompts=32, samples=8, prompt_tokens=(256, 1024), median=400, sigma=0.7, cap=2048, slots=256
)
_QUICK = Workload(name="quick", prompts=4, samples=8, prompt_tokens=(32, 64), median=26, sigma=0.7, cap=64, slots=32)
_QUICK_GPU = Workload(
    name="quick", prompts=16, samples=8, prompt_tokens=(256, 1024), median=300, sigma=0.5, cap=1024, slots=128
)

SCENARIOS = {
    ("cpu", False): (
        Scenario(spec=TOY, workload=_CPU, repeats=7, micro_batch=8),
        Scenario(spec=SMALL, workload=_CPU, repeats=5, micro_batch=8),
    ),
    ("cpu", True): (
        Scenario(spec=TOY, workload=_QUICK, repeats=3, micro_batch=8),
        Scenario(spec=SMALL, workload=_QUICK, repeats=1, micro_batch=8),
    ),
    ("cuda", False): (
        Scenario(spec=LLAMA_1B, workload=_GPU, repeats=5, micro_batch=8),
        Scenario(spec=QWEN_7B, workload=_GPU, repeats=3, micro_batch=8),
    ),
    ("cuda", True): (Scenario(spec=LLAMA_1B, workload=_QUICK_GPU, repeats=3, micro_batch=8),),
}


def draw(work: Workload, vocab: int, repeat: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and completions, one row a sequence; the samples of a prompt are consecutive."""
    rng = random.Random(f"completions/{repeat}")
    return work.draw(vocab, repeat), [[rng.randrange(1, vocab) for _ in range(n)] for n in work.lengths]


@torch.inference_mode()
def forward(model: Any, prompts: list[list[int]], completions: list[list[int]], rows: int) -> list[torch.Tensor]:
    """Log-probabilities by the plain forward: padded micro-batches, logits of the completions alone."""
    scores: list[torch.Tensor] = []
    for at in range(0, len(prompts), rows):
        pairs = list(zip(prompts[at : at + rows], completions[at : at + rows], strict=True))
        left, right = max(len(p) for p, _ in pairs), max(len(c) for _, c in pairs)
        ids = torch.zeros(len(pairs), left + right, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, completion) in enumerate(pairs):
            span = slice(left - len(prompt), left + len(completion))
            ids[row, span], mask[row, span] = torch.tensor(prompt + completion), 1
        ids, mask = ids.to(model.device), mask.to(model.device)
        logits = model(ids, attention_mask=mask, use_cache=False, logits_to_keep=right + 1).logits[:, :-1]
        chosen = logits.float().log_softmax(-1).gather(2, ids[:, left:, None])[..., 0].cpu()
        scores += [chosen[row, : len(c)] for row, (_, c) in enumerate(pairs)]
    return scores


def best_s(ceiling: ceilings.Ceiling, prompts: list[list[int]], completions: list[list[int]]) -> float:
    """Seconds of the matmuls alone: each different prompt once, completions but for their last tokens, the head for what is
    scored."""
    scored = sum(map(len, completions))
    computed = sum(len(p) for p in {tuple(p) for p in prompts}) + scored - len(completions)
    body = ceiling.linear_params - ceiling.head_params
    return 2 * (body * computed + ceiling.head_params * scored) / ceiling.flops


def compare(scenario: Scenario, device: str) -> dict[str, Any]:
    spec, work = scenario.spec, scenario.workload
    dtype = dtype_of(device)
    model = spec.build(device, dtype)
    ceiling = ceilings.measure(model, device, rows=(512, 4096), kv_tokens=0)
    config = EngineConfig(max_num_seqs=work.slots, max_model_len=work.max_len)
    with RolloutEngine(model, config=config) as engine:

        def score(prompts: list[list[int]], completions: list[list[int]]) -> list[torch.Tensor]:
            sequences = [p + c for p, c in zip(prompts, completions, strict=True)]
            return [s.logprobs for s in engine.score(sequences, start=[len(p) for p in prompts])]

        def plain(prompts: list[list[int]], completions: list[list[int]]) -> list[torch.Tensor]:
            return forward(model, prompts, completions, scenario.micro_batch)

        calls: dict[str, Callable[..., list[torch.Tensor]]] = {"stoker": score, "forward": plain}
        first = {name: torch.cat(call(*draw(work, spec.config.vocab_size, -1))) for name, call in calls.items()}
        worst = (first["stoker"] - first["forward"]).abs().max().item()
        checked = gate.check(worst, gate.limit_of(dtype), "the plain forward's")
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for repeat in range(scenario.repeats):
            batch = draw(work, spec.config.vocab_size, repeat)
            for name, call in calls.items():
                seconds[name].append(ceilings.timed(partial(call, *batch), device))
        prompts, completions = draw(work, spec.config.vocab_size, 0)
        ceiling_s = best_s(ceiling, prompts, completions)
        return {
            "model": {"name": spec.name, "dtype": str(dtype).removeprefix("torch.")},
            "workload": work.describe(),
            "micro_batch": scenario.micro_batch,
            "logits_bytes": 4 * config.score_chunk_tokens * spec.config.vocab_size,
            "gate": checked,
            "ceiling_s": ceiling_s,
            "engines": report.compared(seconds, sum(map(len, completions)), ceiling_s),
        }


def table(run: dict[str, Any]) -> list[str]:
    work = run["workload"]
    return [
        f"{run['model']['name']} ({run['model']['dtype']}): {work['prompts']} prompts x {work['samples']} samples, "
        f"{work['completion_tokens']} tokens scored; within {run['gate']['max_abs_diff']:.1e} of the plain forward",
        *report.comparison(run["engines"]),
    ]


def headline(run: dict[str, Any]) -> dict[str, float]:
    stoker, plain = run["engines"]["stoker"], run["engines"]["forward"]
    return {
        "tokens_per_s": round(stoker["tokens_per_s"]),
        "of_ceiling": round(stoker["of_ceiling"], 3),
        "x_forward": round(plain["times_stoker"], 2),
    }


def main() -> int:
    return command.run("scoring", __doc__, SCENARIOS, compare, table, headline)


if __name__ == "__main__":
    sys.exit(main())
