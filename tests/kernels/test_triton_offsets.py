"""Tensors that reach beyond 2^31 elements give the numbers of small ones. Only what is written of them takes memory."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable

import pytest
import torch
from lora_oracle import make_table
from torch import Tensor
from triton_oracle import DEVICE

from stoker.kernels.linear.cuts import Cut
from stoker.kernels.linear.streamed import streamed
from stoker.kernels.reference.adjustments import Banned, Bias, Penalties
from stoker.kernels.reference.attention_plan import Visibility
from stoker.kernels.reference.constraints import FIRST, HEADER, REFUSED, ConstraintRows
from stoker.kernels.reference.fp8 import FP8
from stoker.kernels.reference.lora import AdapterRows
from stoker.kernels.reference.moe import Gate
from stoker.kernels.reference.recurrent import StateRows
from stoker.kernels.triton_ops import DETERMINISTIC, TRITON

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda" or sys.platform != "linux", reason="takes pages of a Linux host as they are written"
)
NO_RESERVE = 0x4000  # mmap(2): addresses that are not counted as memory


def far(tensor: Tensor) -> Tensor:
    """The same numbers, what lies along the first dimension 2^31 elements and more apart from first to last."""
    apart = 2 ** math.ceil(math.log2(2**31 / (len(tensor) - 1)))
    size = ((len(tensor) - 1) * apart + tensor[0].numel()) * tensor.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    whole = torch.frombuffer(pages, dtype=torch.uint8).view(tensor.dtype)
    return whole.as_strided(tensor.shape, (apart, *tensor.stride()[1:])).copy_(tensor)


Same = Callable[[Tensor], Tensor]


def norms_and_activations(same: Same) -> list[Tensor]:
    weight, x = torch.ones(64), same(torch.randn(4, 64))
    return [TRITON.rms_norm(x, weight, 1e-6, residual=x), TRITON.act_mul(x, "silu")]


def gates(same: Same) -> list[Tensor]:
    weight, ones = torch.ones(32), torch.ones(2)
    x, a = same(torch.randn(4, 2, 32)), same(torch.randn(4, 2))
    return [TRITON.gated_rms_norm(x, x, weight, 1e-6), *TRITON.delta_gates(a, a, ones, ones)]


def weights(same: Same) -> list[Tensor]:
    weight, arrived, found = same(torch.randn(6, 64)), torch.zeros(1, dtype=torch.int32), []
    for residual in (None, same(torch.randn(4, 6))):
        x = same(torch.randn(4, 64))
        options = {"norm": None, "gated": None, "residual": residual, "scale": 1.0}
        found += [
            TRITON.linear(x[:1], weight, residual=None if residual is None else residual[:1]),
            TRITON.linear(x, weight, residual=residual),
            streamed(x, weight, None, cut=Cut(32, 2, 1), arrived=arrived, **options),  # type: ignore[arg-type]
            DETERMINISTIC.linear(x, weight, residual=residual),
        ]
    for given in (weight, same(torch.randn(64, 6)).t()):
        values, scales = torch.zeros(6, 64).to(FP8), torch.zeros(6)
        TRITON.quantise_rows(given, values, scales)
        found += [values.float(), scales]
    return found


def logits(same: Same) -> list[Tensor]:
    scores, ones, ids = same(torch.randn(4, 300)), torch.ones(4), torch.tensor([1, 2, 3, 299])
    noise = same(TRITON.gumbel_noise(ids, ids, ids, 300))
    cut = ones, torch.tensor([5, 0, 0, 3]), torch.tensor([1.0, 0.9, 1.0, 0.5]), torch.tensor([0.0, 0.0, 0.1, 0.0])
    automaton = torch.cat([torch.full((HEADER,), 2), ids[0] * torch.randint(2, (300,)), torch.tensor([FIRST, REFUSED])])
    at = torch.zeros(4, dtype=torch.long)
    constraints = ConstraintRows(automaton.short(), at, torch.full_like(at, FIRST), at)
    seen, listed = torch.randint(4, (9, 300)).int(), torch.tensor([[1, 2], [3, 3], [0, 5], [299, 1]])
    penalties = Penalties(seen, torch.tensor([8, 7, 1, 0]), *(ones * by for by in (1.5, 0.25, 0.5)))
    TRITON.count(seen, ids[:1] + 7, ids[:1])
    return [
        TRITON.adjust(scores, Bias(same(listed), same(listed.float())), penalties, Banned(same(listed), ids, ids - 1)),
        seen,
        TRITON.constrain(scores, constraints, torch.arange(4), ids),
        *TRITON.score_tokens(scores, ones, ids),
        *TRITON.sample(scores, ones, None, noise),
        TRITON.truncate(scores, *cut),
    ]


def keys_and_values(same: Same) -> list[Tensor]:
    caches = [same(torch.randn(80, 16, 2, 64)) for _ in range(2)]
    table, lens = torch.tensor([[70, 71, 72, 79], [3, 78, 5, 66]]), [50, 33]
    new, slots = torch.randn(3, 2, 64), torch.tensor([79 * 16 + 3, 64 * 16, 5])
    TRITON.write_kv(new, new, *caches, slots)
    out = [cache[[79, 64, 0]] for cache in caches]
    for queries in ([1, 1], [20, 1]):  # decode steps, and a chunk
        query = torch.randn(sum(queries), 4, 64)
        plan = TRITON.plan_attention(queries, lens, table, torch.tensor(lens), block_size=16, token_bytes=1)
        out.append(TRITON.paged_attention(query, *caches, plan, scale=0.1, visibility=Visibility()))
    return out


def projected_heads(same: Same) -> list[Tensor]:
    """Slots of a cache lie side by side, so its blocks are as large as they are many."""
    qkv, slots = same(torch.randn(4, 6, 16)), torch.tensor([5, 1, 9, 15])
    caches = [same(torch.zeros(16, 2, 16)).unflatten(0, (4, 4)) for _ in range(2)]
    query = TRITON.qk_norm_rotary_write(qkv, 2, 2, None, None, *caches, slots)
    angles = (torch.rand(4, 8), torch.rand(4, 8))
    latents = [same(torch.zeros(16, 2, dim)).unflatten(0, (4, 4)) for dim in (16, 12)]
    parts = same(torch.randn(4, 2, 16)), same(torch.randn(4, 2, 20)), same(torch.randn(4, 8))
    return [query, *caches, TRITON.latent_heads_write(*parts, angles, *latents, slots), *latents]


def adapters(same: Same) -> list[Tensor]:
    table, rows = make_table([24, 40], 64, {1: 4, 2: 8}, torch.float32), AdapterRows(torch.tensor([1, 2, 0, 1]))
    return [TRITON.lora(same(torch.randn(4, 64)), same(torch.randn(4, 64)), table, rows)]


def experts(same: Same) -> list[Tensor]:
    ids, shares = torch.tensor([[0, 3], [3, 2], [1, 3], [2, 0]]), torch.rand(4, 2)
    gate_up, down = same(torch.randn(4, 32, 64)), same(torch.randn(4, 64, 16))
    return [TRITON.experts(torch.randn(4, 64), ids, shares, gate_up, down, gate=Gate())]


def states_of_sequences(same: Same) -> list[Tensor]:
    by_token = {"dt": same(torch.randn(4, 2)), "B": same(torch.randn(4, 1, 16)), "C": same(torch.randn(4, 1, 16))}
    values, decay, beta = same(torch.randn(4, 2, 8)), same(-torch.rand(4, 2)), same(torch.rand(4, 2))
    query, key, channels = same(torch.randn(4, 1, 16)), same(torch.randn(4, 1, 16)), same(torch.randn(4, 16))
    given = {"A": -torch.ones(2), "D": None, "dt_bias": None, "dt_limit": (0.0, 1.0)}
    found = []
    for starts in ([0, 3, 4], [0, 1, 2, 3, 4]):  # pieces of prompts, and a decode step
        rows = StateRows(
            torch.tensor([3, 1, 0, 2])[: len(starts) - 1], torch.tensor(starts), 1 if len(starts) == 5 else 3
        )
        kept = [same(torch.randn(4, *size)) for size in ((3, 16), (2, 16, 8), (2, 8, 16))]
        found += [
            TRITON.causal_conv(channels, torch.randn(16, 4), None, kept[0], rows),
            TRITON.gated_delta_rule(query, key, values, decay, beta, kept[1], rows, normalise=True),
            TRITON.selective_scan(values, **by_token, **given, state=kept[2], rows=rows),
            *kept,
        ]
    return found


@pytest.mark.parametrize(
    "run",
    [
        norms_and_activations,
        gates,
        weights,
        logits,
        keys_and_values,
        projected_heads,
        adapters,
        experts,
        states_of_sequences,
    ],
)
def test_the_numbers_are_the_same(run: Callable[[Same], list[Tensor]]) -> None:
    found = []
    for same in (far, lambda tensor: tensor):
        torch.manual_seed(0)
        found.append(run(same))
    for large, small in zip(*found, strict=True):
        assert torch.equal(large, small)
