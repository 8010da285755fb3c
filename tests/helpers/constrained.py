"""Engines whose completions follow patterns; similar prompts with many of these, and what each gives alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from families import make_model
from pretend_device import build as build_pretended
from tokenizer_kinds import tokenizer
from transformers import PreTrainedModel

from stoker.rollout import Completion, EngineConfig, RolloutEngine, SamplingParams

TOKENIZER = tokenizer("byte-level")
EOS = TOKENIZER.eos_token_id
VOCAB = len(TOKENIZER) + 6
PROMPT = [40, 50, 60, 70]


@cache
def model() -> PreTrainedModel:
    return make_model("llama", vocab_size=VOCAB, num_hidden_layers=3)


def build(**settings: Any) -> RolloutEngine:
    fields = {"kv_cache_memory": "4MiB", "max_num_seqs": 16, "block_size": 4} | settings
    return RolloutEngine(model(), config=EngineConfig(**fields), tokenizer=TOKENIZER)


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


PATTERNS = [
    "yes|no|maybe",
    r"<answer>\n[ -~]{0,12}\n</answer>",
    r"[0-9]{4}-[0-9]{2}(-[0-9]{2})?",
    r'\{"name": "[a-z ]{1,6}", "age": [0-9]{1,3}\}',
    r"(?ia)(the|cat|sat| ){2,7}",
    r"[^0-9\x80-\U0010ffff]{1,9}[0-9]",
]


MIXED = [
    SamplingParams(regex=PATTERNS[i % len(PATTERNS)] if i % 3 else None, seed=i, max_tokens=20, n=1 + i % 2, **kind)
    for i, kind in enumerate(
        [
            {},
            {"temperature": 0},
            {"top_k": 5, "top_p": 0.9},
            {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
            {"min_tokens": 5, "logprobs": 3},
            {"logprobs_mode": "raw", "temperature": 0.7},
            {"suppress_token_ids": list(range(60, 90))},
            {"logprobs_mode": "processed"},
            {"stop": ["9"]},
        ]
        * 2
    )
]
ROWS = [PROMPT + [30 + i % 4] * (i % 7) for i in range(len(MIXED))]


def shown(completions: list[Completion]) -> list[Any]:
    return [(c.token_ids, c.finish_reason, c.stop_reason, [round(p, 3) for p in c.logprobs]) for c in completions]


@cache
def alone() -> list[Any]:
    """Each by itself."""
    with build() as engine:
        return [
            shown(engine.generate_batch([row], params)[0].completions) for row, params in zip(ROWS, MIXED, strict=True)
        ]


@contextmanager
def pretended(**settings: Any) -> Iterator[RolloutEngine]:
    """An engine whose decode steps are captured, and launched before what they go on from was read."""
    settings = {"max_num_seqs": 8, "kv_cache_memory": "1MiB", "max_model_len": None} | settings
    with build_pretended(model(), **settings) as engine:
        engine._requests.tokenizer = engine._requests.constraint.tokenizer = TOKENIZER
        engine._requests.find_eos_ids = lambda: frozenset([EOS])
        yield engine
