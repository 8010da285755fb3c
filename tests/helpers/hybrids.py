"""Small engines on models with layers that keep a state. Processes of ranks import it by name."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import families
import oracle
import torch
from adapted import with_lora
from families import draw
from sharded import by_fsdp2, train
from transformers import PreTrainedModel

from stoker.rollout import EngineConfig, RolloutBatch, RolloutEngine, SamplingParams

if TYPE_CHECKING:
    from peft import PeftModel

CONFIG = EngineConfig(max_num_seqs=8, max_model_len=96, block_size=4, kv_cache_memory="4MiB", max_num_batched_tokens=16)
PARAMS = SamplingParams(max_tokens=8, seed=1, temperature=0.9)


PROMPTS = [draw(seed, length) for seed, length in ((1, 23), (2, 5), (3, 8), (4, 1))]


def make_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """As of ``families``, but for norms that blow up no small number: what a state gives may be all but rounding."""
    return families.make_model(family, seed, **{"rms_norm_eps": 1e-2} | overrides)


def peft_model(family: str, seed: int = 1, **options: Any) -> PeftModel:
    return with_lora(make_model(family), seed, **options)


def assert_like_plain(batch: RolloutBatch, model: PreTrainedModel, params: SamplingParams = PARAMS) -> None:
    """Every sampled token's log-probability is the plain forward's."""
    batch.raise_for_errors()
    for output in batch:
        for c in output.completions:
            expected = oracle.logprobs(model, output.prompt_token_ids, c.token_ids, params.temperature or 1.0)
            torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)


def check(engine: RolloutEngine, model: PreTrainedModel, version: int | None = None) -> RolloutBatch:
    """version: of every token; and then nothing that was kept of another one serves a prompt."""
    batch = engine.generate_batch(PROMPTS, PARAMS)
    assert_like_plain(batch, model)
    if version is not None:
        assert {v for o in batch for c in o.completions for v in c.weight_versions} == {version}
        assert [o.cached_tokens for o in batch] == [0] * len(batch)
    return batch


def step(model: Any, seed: int = 0, lr: float = 0.02) -> None:
    """Of the optimizer most use, on all that has a gradient."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    ids = torch.tensor([draw(seed, 16), draw(seed + 100, 16)])
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    model.zero_grad()


def follow_fsdp2(rank: int, family: str, adapted: bool) -> dict[str, Any]:
    """After every step of a sharded trainer the engine is what a twin is trained to be without any wrapper."""
    made = partial(peft_model, target_modules="all-linear") if adapted else make_model
    twin, model = made(family), by_fsdp2(made(family))
    theirs, ours = (torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (twin, model))
    with RolloutEngine(model, config=replace(CONFIG, gather_memory=2**16)) as engine:
        check(engine, twin, version=0)
        for number in (1, 2):
            train(twin, theirs, number)
            train(model, ours, number)
            behind = set(engine.verify_weights().mismatched)
            assert engine.update_weights() == number
            check(engine, twin, version=number)
            report = engine.verify_weights()
            assert report.ok and report.source == "mirror"
    return {"behind": behind, "trained": {name for name, p in twin.named_parameters() if p.grad is not None}}
