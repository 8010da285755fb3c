"""Copies by one kernel equal torch's, however tensors lie, and autograd notices writes to what it has saved."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_oracle import DEVICE

from stoker.kernels import copies as by_triton
from stoker.kernels import launch
from stoker.kernels.ops import REFERENCE
from stoker.kernels.triton_ops import TRITON

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_of_any_dtypes_lengths_and_places(source: torch.dtype, target: torch.dtype) -> None:
    whole = by_triton.part_of(source)
    sizes = [0, 1, 7, 8, 4095, 4096, 4097, whole - 1, whole, 2 * whole + 5]
    sources = [torch.randn(n, device=DEVICE).mul(100).to(source) for n in sizes]
    sources += [torch.randn(60, 40, device=DEVICE).to(source).t(), torch.randn(2003, device=DEVICE).to(source)[3:]]
    room = [torch.zeros(t.numel() + 32, dtype=target, device=DEVICE) for t in sources]
    targets = [r[16:-16].view(t.shape) for r, t in zip(room, sources, strict=True)]
    targets[2], targets[4] = room[2][1:8], torch.zeros(4095, 2, dtype=target, device=DEVICE)[:, 0]
    TRITON.copy_each(targets, sources)
    again = [torch.zeros_like(t) for t in targets]
    REFERENCE.copy_each(again, sources)
    # The interpreter cuts off what does not fit into bf16, where a device rounds.
    rtol = 2**-7 if DEVICE.type == "cpu" and target is torch.bfloat16 and source is not target else 0
    for to, expected in zip(targets, again, strict=True):
        torch.testing.assert_close(to, expected, rtol=rtol, atol=0)
    others = [r for i, r in enumerate(room) if i not in (2, 4)]
    assert not any(torch.cat([r[:16], r[-16:]]).any() for r in others), "written beyond its end"


def test_all_of_a_kind_are_one_launch_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, grids, plans = by_triton._copies_kernel, [], []

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return kernel[grid]

    plan = by_triton._plan
    monkeypatch.setattr(by_triton, "_copies_kernel", Counted())
    monkeypatch.setattr(by_triton, "_plan", lambda *key: plans.append(plan(*key)) or plans[-1])
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    sources = [torch.randn(50 + 16 * i, device=DEVICE) for i in range(40)]
    targets = [torch.zeros_like(t, dtype=torch.float16) for t in sources]
    for _ in range(2):
        TRITON.copy_each(targets, sources)
        assert all(torch.equal(to, t.half()) for to, t in zip(targets, sources, strict=True))
        for t in sources:
            t.neg_()
    assert grids == [(40,)] * 2 and plans[0] is plans[1]
    sources[3] = sources[3].clone()
    TRITON.copy_each(targets, sources)
    assert plans[2] is not plans[1], "planned anew for what lies elsewhere"
    TRITON.copy_each([], [])
    TRITON.copy_each(targets[:1], [sources[0].new_zeros(50)])
    assert len(grids) == 4 and not targets[0].any()
    monkeypatch.setattr(launch, "stream", lambda device: 1)
    TRITON.copy_each(targets, sources)
    ((*_, owners, table),), ((*_, before, at),) = plans[4].by_kernel, plans[2].by_kernel
    assert owners is not before and table is not at, "another stream would not wait for them"


def test_a_backward_notices_that_what_it_saved_was_written_to() -> None:
    weight = torch.nn.Parameter(torch.randn(64, device=DEVICE))
    loss = (weight * weight).sum()
    TRITON.copy_each([weight], [torch.ones(64, device=DEVICE)])
    assert torch.equal(weight, torch.ones(64, device=DEVICE)) and weight.requires_grad and weight.is_leaf
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_of_inference_tensors() -> None:
    with torch.inference_mode():
        target = torch.zeros(64, device=DEVICE)
    TRITON.copy_each([target], [torch.ones(64, device=DEVICE)])
    assert isinstance(target, Tensor) and target.eq(1).all()


def test_what_is_prepared_copies_other_numbers_and_keeps_nothing() -> None:
    sources = [torch.randn(n, device=DEVICE) for n in (50, 4097)] + [torch.randn(60, 40, device=DEVICE).t()]
    targets = [torch.zeros_like(t, dtype=torch.float16) for t in sources]
    for ops in (TRITON, REFERENCE):
        copy = ops.prepare_copies(targets, sources)
        for _ in range(2):
            for t in sources:
                t.normal_()
            copy(targets, sources)
            assert all(torch.equal(to, t.half()) for to, t in zip(targets, sources, strict=True))
    each = [weakref.ref(t) for t in (*targets, *sources)]
    del targets, sources, t
    assert not any(ref() is not None for ref in each)
