"""What a scheduler counts, from when it was built: tokens, preemptions, finished requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    preemptions: int = 0
    prompt_tokens: int = 0  # of prompts, and of sequences to score
    prefix_hit_tokens: int = 0  # prompt tokens not computed because the prefix cache had them
    shared_tokens: int = 0  # prompt tokens not computed because a sample of the same prompt had them
    generated_tokens: int = 0
    scored_tokens: int = 0
    finished_requests: int = 0
