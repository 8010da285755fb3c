"""Engines on a CPU that claims to be a device working by itself: plans are launched ahead, and decode steps replayed.

A replay calls what was captured again, with the tensors it was captured with. Whatever a step takes from the host, or from a
tensor that is not static, is then out of date, and shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from families import make_model
from family_fields import VOCAB
from torch import Tensor

from stoker.engine.device import CpuRuntime
from stoker.kernels.ops import REFERENCE, Ops
from stoker.kernels.reference import attention, attention_plan
from stoker.rollout import EngineConfig, RolloutBatch, RolloutEngine, SamplingParams, binding
from stoker.rollout import engine as engine_module


@dataclass(frozen=True)
class _StaticPlan:
    """Decode rows over the whole width of their tables; nothing in it but static tensors."""

    tables: attention_plan.Tables
    seq_lens: Tensor

    def next_step(self) -> None:
        pass


def plan_attention(
    query_lens: Sequence[int], key_lens: Sequence[int], block_tables: Tensor, seq_lens: Tensor, **options: Any
) -> Any:
    if all(n == 1 for n in query_lens):
        of_windows = options["window_tables"]
        return _StaticPlan(
            attention_plan.Tables(block_tables, block_tables if of_windows is None else of_windows), seq_lens
        )
    return attention_plan.plan_attention(query_lens, key_lens, block_tables, seq_lens, **options)


def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: Any, **options: Any) -> Tensor:
    if not isinstance(plan, _StaticPlan):
        return attention.paged_attention(query, key_cache, value_cache, plan, **options)
    table = plan.tables.of(options["visibility"])
    rows, width = table.shape[0], table.shape[1] * key_cache.shape[1]
    last = plan.seq_lens[:, None] - 1
    unseen = options["visibility"].hidden(last, torch.arange(width, device=query.device))
    group = query.shape[1] // key_cache.shape[2]
    key, value = (
        cache[table].view(rows, width, *cache.shape[2:]).masked_fill(unseen[:, :, None, None], 0)
        for cache in (key_cache, value_cache)
    )
    key, value = (t.transpose(1, 2).repeat_interleave(group, dim=1) for t in (key, value))
    hidden = unseen[:, None, None]
    scores = (query[:, :, None] @ key.transpose(-1, -2)) * options["scale"]
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    scores = scores.masked_fill(hidden, float("-inf"))
    if (sinks := options.get("sinks")) is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(rows, -1, -1, -1)), dim=-1)
    return (scores.softmax(-1)[..., :width] @ value)[:, :, 0]


STATIC = replace(REFERENCE, plan_attention=plan_attention, paged_attention=paged_attention, static_plans=True)


@dataclass(frozen=True)
class PretendDevice(CpuRuntime):
    ahead: int = 1
    graphs: bool = True

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            with torch.inference_mode():
                body()

        return replay


@contextmanager
def build(
    family: str | torch.nn.Module = "llama",
    ops: Ops = STATIC,
    runtime: type[CpuRuntime] = PretendDevice,
    num_layers: int | None = None,
    **fields: Any,
) -> Iterator[RolloutEngine]:
    settings = {"block_size": 4, "kv_cache_memory": "4MiB", "max_num_seqs": 12, "max_model_len": 96, "decode_window": 4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "runtime_for", runtime)
        patch.setattr(binding, "ops_for", lambda *_, **__: ops)
        fewer = {} if num_layers is None else {"num_hidden_layers": num_layers}
        model = make_model(family, **fewer) if isinstance(family, str) else family
        with RolloutEngine(model, config=EngineConfig(**(settings | fields))) as engine:
            yield engine


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def params(count: int) -> list[SamplingParams]:
    """Every way of sampling, and lengths that differ."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0},
        {"top_k": 5, "top_p": 0.9},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"stop_token_ids": list(range(0, VOCAB, 3)), "min_tokens": 5},
        {"stop_token_ids": list(range(0, VOCAB, 5)), "logprobs": 3},
        {"logprobs_mode": "raw", "temperature": 0.7},
        {"n": 3, "stop_token_ids": [1, 2, 3, 4, 5, 6, 7]},
        {"suppress_token_ids": list(range(0, VOCAB, 2)), "temperature": 0},
        {"logit_bias": {t: 3.0 - t % 5 for t in range(0, VOCAB, 3)}, "suppress_token_ids": [1]},
    ]
    return [
        SamplingParams(**kinds[i % len(kinds)], max_tokens=6 + (i * 7) % 23, seed=i, ignore_eos=i % 2 == 0)
        for i in range(count)
    ]


def results(batch: RolloutBatch) -> list[Any]:
    batch.raise_for_errors()
    fields = ("token_ids", "finish_reason", "stop_reason", "weight_versions")
    return [[[getattr(c, f) for f in fields] for c in output.completions] for output in batch]


def close(a: RolloutBatch, b: RolloutBatch) -> None:
    assert results(a) == results(b)
    for one, other in zip(a, b, strict=True):
        for c, d in zip(one.completions, other.completions, strict=True):
            torch.testing.assert_close(torch.tensor(c.logprobs), torch.tensor(d.logprobs), rtol=0, atol=2e-5)
            for x, y in zip(c.top_logprobs or [], d.top_logprobs or [], strict=True):
                assert x == pytest.approx(y, abs=2e-5)


def bits(batch: RolloutBatch) -> list[Any]:
    batch.raise_for_errors()
    return [[(c.token_ids, c.logprobs) for c in output.completions] for output in batch]
