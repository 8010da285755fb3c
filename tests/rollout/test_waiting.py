"""Waiting for a share of requests under way."""

from __future__ import annotations

from typing import Any

import pytest
from live_setup import PROMPTS, at_rest, build, long, same

from stoker.kernels.errors import InvalidRequestError
from stoker.rollout import RolloutHandle, SamplingParams


def test_a_share_of_a_batch_and_then_its_tail() -> None:
    with build() as engine:
        lengths = [4, 6, 8, 90]
        expected = [engine.generate_batch([p], long(max_tokens=n))[0] for p, n in zip(PROMPTS, lengths, strict=True)]
        handles = [engine.submit(p, long(max_tokens=n)) for p, n in zip(PROMPTS, lengths, strict=True)]
        done, tail = engine.wait(handles, share=0.75)
        assert (done, tail) == (handles[:3], handles[3:]) and tail[0].status == "running"
        assert engine.wait(handles, timeout=0) == (done, tail)
        assert engine.wait(handles) == (handles, [])
        assert same([h.result() for h in handles], expected)
        assert engine.wait([]) == ([], [])


def test_a_share_is_counted_as_it_is_written() -> None:
    """0.07 * 100 is more than 7 in floating point."""
    with build(kv_cache_memory="8MiB", max_num_seqs=100) as engine:
        handles = [engine.submit([5, 6, 7 + i], long(max_tokens=1 if i < 7 else 40)) for i in range(100)]
        done, _ = engine.wait(handles, share=0.07)
        assert done == handles[:7]


@pytest.mark.parametrize(("share", "open_ends"), [(1.0, 0), (0.9, 3)])
def test_a_wait_looks_at_few_handles_after_each_step(
    share: float, open_ends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = 0
    done: Any = RolloutHandle.done

    def counted(handle: RolloutHandle) -> bool:
        nonlocal looked
        looked += 1
        return bool(done.fget(handle))

    with build(max_num_seqs=2) as engine:
        handles = [engine.submit([1, 2 + i], SamplingParams(max_tokens=1)) for i in range(30)]
        monkeypatch.setattr(RolloutHandle, "done", property(counted))
        finished, unfinished = engine.wait(handles, share=share)
        steps = engine.core._steps
        monkeypatch.undo()
        assert len(unfinished) <= open_ends and len(finished) + len(unfinished) == 30
        assert steps > 10
        assert looked <= 4 * len(handles) + 3 * steps * (1 + open_ends)


def test_a_share_of_nothing_is_a_step() -> None:
    with build() as engine:
        left = [engine.submit(p, long(max_tokens=n)) for p, n in zip(PROMPTS, (2, 5, 9, 14), strict=True)]
        counts = []
        while left:
            done, left = engine.wait(left, share=0)
            counts.append(len(done))
        assert sum(counts) == 4 and counts[0] == 0
        at_rest(engine)


def test_bad_waits() -> None:
    with build() as engine:
        handle = engine.submit(PROMPTS[0], long())
        for share in (2, -0.1, "a", None, float("nan"), True):
            with pytest.raises(InvalidRequestError, match=rf"^share={share!r} is not between 0 and 1$"):
                engine.wait([handle], share=share)  # type: ignore[arg-type]
        for timeout in ("1", float("nan"), [3]):
            with pytest.raises(InvalidRequestError, match="^timeout=.*: give seconds, or None to wait until the end$"):
                engine.wait([handle], timeout=timeout)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequestError, match="^timeout="):
                handle.result(timeout)  # type: ignore[arg-type]
        with build() as other, pytest.raises(InvalidRequestError, match="another engine's$"):
            engine.wait([handle, other.submit(PROMPTS[0])])
        for handles in (handle, [handle, 1], [handle.result], None, 3):
            with pytest.raises(InvalidRequestError, match="^wait takes a list of handles, as submit returns them$"):
                engine.wait(handles)  # type: ignore[arg-type]
        assert handle.status == "waiting"
