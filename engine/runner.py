"""Runs a batch: model, sampler, and on to the next step of the window; then one copy to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.engine.kv_cache import KVCache
from stoker.engine.model import ModelShell, StepContext
from stoker.engine.sampler import Sampler
from stoker.engine.scheduler import Sampled
from stoker.engine.step_inputs import Batch
from stoker.kernels.ops import Ops


class EagerStep:
    """One call runs all steps of a batch's window, op by op."""

    def __init__(self, model: ModelShell, sampler: Sampler, kv: KVCache, ops: Ops) -> None:
        self.model = model
        self.sampler = sampler
        self.kv = kv
        self.ops = ops

    def __call__(self, batch: Batch) -> Sampled:
        tokens: list[Tensor] = []
        logprobs: list[Tensor] = []
        tops: list[tuple[Tensor, Tensor]] = []
        with torch.inference_mode(), torch.autocast(self.model.device.type, enabled=False):
            context = StepContext(self.ops, self.kv.layers, batch.attention, batch.slots)
            # The position sampled for is the one after the row's last token.
            noise = self.sampler.noise(batch.sampling, batch.seq_lens, batch.num_steps)
            for step in range(batch.num_steps):
                if step:
                    batch.advance(tokens[-1])
                logits = self.model(batch.token_ids, batch.positions, batch.last_token, context)
                out = self.sampler(logits, batch.sampling, batch.seq_lens, noise[step])
                tokens.append(out.tokens)
                logprobs.append(out.logprobs)
                if out.top_ids is not None and out.top_logprobs is not None:
                    tops.append((out.top_ids, out.top_logprobs))
            n = batch.num_rows
            return Sampled(
                torch.stack(tokens)[:, :n].tolist(),
                torch.stack(logprobs)[:, :n].tolist(),
                [_rows(ids[:n], values[:n]) for ids, values in tops] if tops else None,
            )


def _rows(ids: Tensor, values: Tensor) -> list[dict[int, float]]:
    return [dict(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
