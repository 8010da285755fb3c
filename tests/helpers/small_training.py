"""A small model in training with an engine beside it, and what both must agree on."""

import oracle
import torch
from family_fields import VOCAB
from torch import nn
from transformers import PreTrainedModel

from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

CONFIG = EngineConfig(kv_cache_memory="1MiB", block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
PROMPT = [7, 3, 99, 14, 5, 62, 8, 31, 4, 4, 90, 17]
PARAMS = SamplingParams(max_tokens=10, seed=1)


def assert_matches(engine: RolloutEngine, model: PreTrainedModel) -> list[int]:
    """The engine's log-probabilities are those of the model as it is now. Returns the weight versions."""
    batch = engine.generate_batch([PROMPT], PARAMS)
    batch.raise_for_errors()
    (c,) = batch[0].completions
    expected = oracle.logprobs(model, PROMPT, c.token_ids)
    torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)
    assert len(c.weight_versions) == len(c.token_ids)
    return c.weight_versions


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    ids = torch.randint(1, VOCAB, (2, 16), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids, labels=ids).loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}


def assert_same(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    now = snapshot(model)
    assert now.keys() == before.keys()
    assert [n for n in now if not torch.equal(now[n], before[n])] == []


@torch.no_grad()
def in_place(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.v_proj.weight.mul_(1.5)


def set_data(model: PreTrainedModel) -> None:
    for p in model.parameters():
        p.data = 1.1 * p.data
