"""What each rank does in the tests of sharded models on prompts with images. The processes import it by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import vision
from sharded import CONFIG, by_ddp, by_fsdp1, by_fsdp2

from stoker.rollout import RolloutEngine, SamplingParams

PARAMS = SamplingParams(max_tokens=6, seed=1, suppress_token_ids=[vision.IMAGE])
LAYOUTS = [(4, (2, 3), 5), ((1, 2), 3, (2, 2), 4), (6,)]
WRAPPERS = {"fsdp2": by_fsdp2, "fsdp1": by_fsdp1, "ddp": by_ddp}


def check(engine: RolloutEngine, model: Any, prompts: list[vision.Prompt]) -> None:
    for prompt, output in zip(prompts, engine.generate_batch(prompts, PARAMS), strict=True):
        (completion,) = output.completions
        expected = vision.logprobs(model, prompt, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4)


def follow(rank: int, how: str, kind: str, together: bool = False) -> None:
    """After every step, the vision tower's too, the engine is a twin without any wrapper; each rank on its own prompts.

    together: all ranks run one model.
    """
    twin = vision.make_model(kind, num_hidden_layers=2)
    model = WRAPPERS[how](vision.make_model(kind, num_hidden_layers=2))
    prompts = [vision.make_prompt(kind, layout, seed=rank) for layout in LAYOUTS[rank:]]
    batch = vision.make_prompt(kind, LAYOUTS[0], seed=9)
    theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin, model))
    size = dist.get_world_size() if together else 1
    with RolloutEngine(model, config=replace(CONFIG, gather_memory=2**16, tensor_parallel_size=size)) as engine:
        check(engine, twin, prompts)
        for _ in range(2):
            for wrapped, optimizer in ((twin, theirs), (model, ours)):
                optimizer.zero_grad()
                wrapped(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
                optimizer.step()
            assert any(p.grad is not None for name, p in twin.named_parameters() if "vis" in name)
            engine.update_weights()
            check(engine, twin, prompts)
        assert engine.verify_weights().ok
