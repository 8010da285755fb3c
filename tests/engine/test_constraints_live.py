"""Completions that follow a pattern are the same beside others, in captured steps and through a pause as alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import regex as partial_regex
import torch
from constrained import (
    MIXED,
    PROMPT,
    ROWS,
    alone,
    build,
    pretended,
    shown,
)
from pretend_device import STATIC, PretendDevice

from stoker.engine.constraints import Constraint, Constraints
from stoker.engine.device import CpuRuntime
from stoker.rollout import RolloutEngine, SamplingParams


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"decode_window": 1},
        {"max_num_batched_tokens": 3, "max_num_seqs": 3},
        {"max_num_seqs": 2},
        {"enable_prefix_caching": False},
        {"block_size": 1, "max_num_batched_tokens": 7},
    ],
    ids=str,
)
def test_neighbours_windows_and_chunks_change_nothing(settings: dict[str, Any]) -> None:
    with build(**settings) as engine:
        assert [shown(o.completions) for o in engine.generate_batch(ROWS, MIXED)] == alone()


def test_the_state_comes_back_after_preemption() -> None:
    """A KV cache too small for all: requests lose what they have, and replay the tokens they know."""
    bytes_a_token = 3 * 2 * 2 * 16 * 4
    with build(kv_cache_memory=30 * 4 * bytes_a_token) as engine:
        assert [shown(o.completions) for o in engine.generate_batch(ROWS, MIXED)] == alone()
        assert engine.core.scheduler.counters.preemptions > 0


def automata_of(engine: RolloutEngine) -> set[int | None]:
    """Addresses of automata under which steps were captured, None for steps without."""
    return {key[-1] for key in engine.core.runner._graphs}  # type: ignore[attr-defined]


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("runtime", [CpuRuntime, PretendDevice])
def test_captured_windows_follow_as_steps_do(runtime: type[CpuRuntime], window: int) -> None:
    """Where plans are launched ahead, of tokens nobody has read, and new patterns come under graphs that are there."""
    with pretended(runtime=runtime, decode_window=window) as engine:
        for some in (
            slice(0, 6),
            slice(6, 12),
            slice(12, 18),
            slice(0, 18, 3),
            slice(0, 6),
        ):  # the fourth has no patterns
            found = engine.generate_batch(ROWS[some], MIXED[some])
            assert [shown(o.completions) for o in found] == alone()[some]
        if runtime is PretendDevice:
            assert None in automata_of(engine) and len(automata_of(engine)) > 1


def test_a_new_pattern_needs_no_new_graph_and_room_is_made_where_there_is_none() -> None:
    def run(patterns: list[str]) -> None:
        params = [SamplingParams(regex=pattern, max_tokens=12, seed=1) for pattern in patterns]
        for output, pattern in zip(engine.generate_batch([PROMPT] * len(patterns), params), patterns, strict=True):
            (completion,) = output.completions
            assert partial_regex.fullmatch(pattern, completion.text.rstrip("�"), partial=True)
            assert completion.finish_reason == "length" or re.fullmatch(pattern, completion.text)

    with pretended(max_num_seqs=4) as engine:
        for pattern in ("[ab]{2,9}", "[cd]{2,9}", "[ef]{3,8}", r"\d+"):
            run([pattern] * 2)
        before = automata_of(engine)
        assert len(before) == 1
        rows = engine.core.inputs.constraints.rows
        assert rows is not None
        room = len(rows.automata)
        for first in range(0, 60, 4):
            run([rf"[^\d]{{1,{10 + n}}}" for n in range(first, first + 4)])
        rows = engine.core.inputs.constraints.rows
        assert rows is not None and room < len(rows.automata) <= 1 << 20  # those that nothing follows are gone
        assert automata_of(engine) == {rows.automata.data_ptr()} != before
        for pattern in ("[ab]{2,9}", r"\d+"):  # which had made way, and are still known
            run([pattern] * 2)


def test_steps_without_a_constraint_are_what_they_were() -> None:
    launched: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        return lambda *args: launched.append(name) or getattr(STATIC, name)(*args)

    ops = replace(STATIC, constrain=noted("constrain"), follow=noted("follow"))
    with pretended(ops=ops) as engine:
        engine.generate_batch([PROMPT], SamplingParams(max_tokens=8))
        assert not launched and engine.core.inputs.constraints.rows is None
        engine.generate_batch([PROMPT], SamplingParams(regex="yes and no", max_tokens=8))
        assert set(launched) == {"constrain", "follow"}
        launched.clear()
        engine.generate_batch([PROMPT] * 3, SamplingParams(max_tokens=8))
        assert not launched


# -- requests that live longer than a step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [build, pretended], ids=["steps", "captured"])
@pytest.mark.parametrize("how", ["keep", "recompute", "sleep"])
def test_a_pause_changes_nothing(how: str, make: Callable[..., Any]) -> None:
    params = SamplingParams(regex=r"[a-z ]{30,60}", max_tokens=40, seed=5, n=3)
    with make(decode_window=2) as engine:
        (wanted,) = engine.generate_batch([PROMPT], params)
        handle = engine.submit(PROMPT, params)
        for _ in range(4):
            engine.wait([handle], share=0)
        engine.pause("keep")
        if how == "sleep":
            engine.sleep()
            assert engine.core.inputs.constraints.rows is None
            engine.wake_up()
        engine.update_weights()
        engine.resume(recompute=how == "recompute")
        assert shown(handle.result().completions) == shown(wanted.completions)


def test_where_a_pattern_found_no_memory_the_next_request_follows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was the first pattern of all, and where what was in its slot before ended in the middle of a pattern."""
    free = SamplingParams(seed=3, max_tokens=12)
    follows = SamplingParams(regex="[0-9]{9}", seed=1, max_tokens=4)
    other = replace(follows, regex="(yes|no){3}")
    with build() as engine:
        (expected,) = engine.generate_batch([PROMPT], free)
    with build(max_num_seqs=2) as engine:

        def find_no_memory(*params: SamplingParams) -> None:
            with monkeypatch.context() as patch, pytest.raises(MemoryError):
                patch.setattr(Constraints, "_place", lambda *_: (_ for _ in ()).throw(MemoryError))
                engine.generate_batch([PROMPT] * 2, params)

        find_no_memory(other, other)
        (found,) = engine.generate_batch([PROMPT], free)
        assert found.completions[0].token_ids == expected.completions[0].token_ids
        for beside in (other, free):
            engine.generate_batch([PROMPT] * 2, follows)
            find_no_memory(other, beside)
            found, _ = engine.generate_batch([PROMPT] * 2, [free, follows])
            assert found.completions[0].token_ids == expected.completions[0].token_ids


def test_automata_are_found_after_there_was_no_memory_to_lay_them_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Constraints(CpuRuntime(torch.device("cpu")), 2)
    first, second, third = (Constraint(np.full(size, size % 97, np.int16), 8) for size in (40_000, 40_001, 50))
    held.start([(0, first, [], 0)])
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(torch, "zeros", lambda *_, **__: (_ for _ in ()).throw(MemoryError))
        held.start([(1, second, [], 0)])
    for slot, one in ((1, third), (0, first), (1, second)):
        held.start([(slot, one, [], 0)])
        assert held.rows is not None
        base = int(held.rows.base[slot])
        assert held.rows.automata[base : base + len(one.table)].tolist() == one.table.tolist()


def test_a_next_turn_begins_anew() -> None:
    with build() as engine:
        params = SamplingParams(regex="(yes|no), [0-9]{2}", max_tokens=30, seed=1)
        (first,) = engine.generate_batch([PROMPT], params)
        turn = PROMPT + first.completions[0].token_ids + PROMPT
        (second,) = engine.generate_batch([turn], params)
        for output in (first, second):
            assert re.fullmatch("(yes|no), [0-9]{2}", output.completions[0].text)
