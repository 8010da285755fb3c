"""A machine for the scheduler to run on, without a model.

Instead of a KV cache there is a memory of marks. A token's mark is a hash of the token and of the mark of the token before it,
which is found through the block table. So a mark is right only if the whole sequence before it was, under the present weights.
Where tokens see each other both ways, all of them together count as one token. New tokens are drawn from marks: a wrong plan
shows in the marks, and in the results. Where the scheduler keeps states, a state is the mark of the last token, and has to
agree with the memory. Where layers with a window have blocks of their own, there is a second memory, and the marks that a
token's window sees have to be in both.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import accumulate, repeat
from typing import Any

import numpy as np
import torch

from stoker.engine.adapters.slots import AdapterSlots
from stoker.engine.images.inputs import ImageFeatures, ImageInputs
from stoker.engine.plan import Plan, Sampled
from stoker.engine.request import Adapter, Request, SamplingSpec, Status
from stoker.engine.scheduler import Scheduler

VOCAB = 5  # few, so that prompts share prefixes and samples meet again
FAULTY = 99


def root(version: int, adapter: Adapter | None) -> int:
    return hash((version,) if adapter is None else (version, adapter.serial))


def mark(before: int, token: int) -> int:
    return hash((before, token))


def content(request: Request, position: int, token: int) -> int:
    """What a token is to its mark: among tokens that see each other both ways, images and all of those."""
    for begin, end in _spans(request.images) if request.images else ():
        if begin <= position < end:
            assert request.images is not None
            number = int.from_bytes(request.images.digest, "little")  # whose hash is the same in every process
            return hash((token, number, *request.prompt[begin:end]))
    return token


def contents(request: Request, tokens: Sequence[int]) -> Sequence[int]:
    return (
        tokens
        if request.images is None
        else [content(request, position, token) for position, token in enumerate(tokens)]
    )


def _spans(images: ImageInputs) -> tuple[tuple[int, int], ...]:
    assert images.features is not None
    return images.features.spans


def make_images(prompt: list[int], digest: bytes, spans: tuple[tuple[int, int], ...]) -> ImageInputs:
    """Images that are ``digest``, whose tokens see each other both ways in ``spans``."""
    places = np.array([place for span in spans for place in range(*span)])
    return ImageInputs(prompt, {}, digest, ImageFeatures(places, torch.empty(0), (), None, 0, spans))


def draw(last: int, spec: SamplingSpec, sample_index: int) -> tuple[int, float]:
    """The model: a token and its log-probability, which under the seed FAULTY is NaN now and then."""
    token = hash((last,) if spec.temperature == 0 else (last, spec.seed, sample_index)) % VOCAB
    return token, math.nan if spec.seed == FAULTY and last % 23 == 0 else -(last % 1000) / 1000


class Repeats:
    """A stop string: the same token three times in a row. Right only if it sees every token, once."""

    def __init__(self) -> None:
        self.tail: list[int] = []

    def __call__(self, token: int) -> str | None:
        self.tail = [*self.tail, token][-3:]
        return str(token) * 3 if self.tail == [token] * 3 else None


def make_spec(**fields: Any) -> SamplingSpec:
    return SamplingSpec(**{"temperature": 1.0, "max_tokens": 8} | fields)


def make_group(first_id: int, prompt: list[int], specs: Iterable[SamplingSpec]) -> list[Request]:
    """Samples of one prompt, one for each spec."""
    group: list[Request] = []
    group.extend(Request(first_id + i, prompt, spec, i, None, group) for i, spec in enumerate(specs))
    return group


def make_scheduler(**fields: Any) -> Scheduler:
    defaults = {
        "num_blocks": 65,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "decode_window": 1,
        "enable_prefix_caching": True,
        "adapter_slots": AdapterSlots(2),
    }
    return Scheduler(**(defaults | fields))


def expected(request: Request, version: int) -> tuple[list[int], list[float], str]:
    """What the request gives alone; its tokens were sampled under its versions, the next one under ``version``."""
    spec, tokens, logprobs = request.spec, list(request.prompt), []
    checker = Repeats() if request.stop_string else lambda token: None
    versions = [*request.weight_versions, *repeat(version, spec.max_tokens)]
    last = 0
    for count in range(1, spec.max_tokens + 1):
        if count > 1 and versions[count - 1] == versions[count - 2]:
            last = mark(last, content(request, len(tokens) - 1, tokens[-1]))
        else:
            last = reduce(mark, contents(request, tokens), root(versions[count - 1], request.adapter))
        token, logprob = draw(last, spec, request.sample_index)
        if math.isnan(logprob):
            return tokens[request.num_prompt :], logprobs, "error"
        tokens.append(token)
        logprobs.append(logprob)
        matched = checker(token)
        if count > spec.min_tokens and (token in spec.stop_ids or matched):
            return tokens[request.num_prompt :], logprobs, "stop"
    return tokens[request.num_prompt :], logprobs, "length"


def until(condition: Callable[[], bool], step: Callable[[], object], most: int = 2000) -> None:
    for _ in range(most):
        if condition():
            return
        step()
    raise AssertionError(f"not so after {most} steps")


class Machine:
    """Runs plans on the memory of marks as a device would, and distrusts everything about them."""

    def __init__(self, scheduler: Scheduler, ahead: int = 0) -> None:
        self.scheduler = scheduler
        self.ahead = ahead
        self.launched: deque[tuple[Plan, Sampled]] = deque()
        self.sampled = [-1] * scheduler.max_num_seqs  # the newest token, by slot
        self.size = scheduler.block_size
        self.memory: list[int | None] = [None] * (scheduler.num_blocks * self.size)
        self.tables: list[list[int]] = [[] for _ in range(scheduler.max_num_seqs)]  # static block tables, by slot
        self.windowed = scheduler.block_layout.window_pages > 0
        self.window_memory = list(self.memory)
        self.window_tables: list[list[int]] = [[] for _ in range(scheduler.max_num_seqs)]
        self.adapters: dict[int, Adapter] = {}  # what is in which of their slots
        self.layout = scheduler.state_layout
        self.states: list[int | None] = [None] * (self.layout.num_rows if self.layout else 0)
        self.tokens_computed = 0
        self.copies = 0
        self._admitted: list[Request] = []  # by the last plan

    def step(self) -> list[Request]:
        """A plan is launched and the oldest one read, the books proved at every stage; returns what finished, proved too.

        What a plan samples is held back, as by a device that is still at it, until ``ahead`` later ones are launched.
        """
        s = self.scheduler
        had_running = next((r for r in s.running if r.remaining > r.pending), None)
        waited = list(s.waiting)
        for block in s.tables.pool.empty_pages:  # free, and nothing in it worth keeping
            for memory in (self.memory, self.window_memory):
                memory[block * self.size : (block + 1) * self.size] = [None] * self.size
        for row in s.states._free:
            self.states[row] = None
        plan = s.plan()
        s.check()
        if plan is None:
            assert self.launched or (not s.running and not s.waiting)
        else:
            assert had_running is None or had_running in plan.requests, "the oldest request stands still"
            self._check_plan(plan, waited)
            self.launched.append((plan, self.run(plan)))
        if not self.launched or (plan is not None and len(self.launched) <= self.ahead):
            return []
        finished = s.commit(*self.launched.popleft())
        s.check()
        self._check_marks()
        for request in finished:
            self._check_result(request)
        return finished

    def drain(self) -> list[Request]:
        """Run until nothing is left. Returns the finished requests in the order they finished in."""
        finished: list[Request] = []
        s = self.scheduler
        until(lambda: not s.running and not s.waiting and not self.launched, lambda: finished.extend(self.step()))
        return finished

    def run(self, plan: Plan) -> Sampled:
        self._copy(self.memory, plan.copies)
        self._copy(self.window_memory, plan.window_copies)
        self._begin_states(plan)
        self._admitted = plan.admitted
        for request in plan.admitted:
            self.tables[request.slot] = []
            if request.adapter is not None:
                self.adapters[request.adapter.slot] = request.adapter
        for request in plan.requests:
            row, window = self.tables[request.slot], self.window_tables[request.slot]
            row[request.first_new_block :] = request.block_ids[request.first_new_block :]
            window[request.first_new_block :] = request.window_ids[request.first_new_block :]
            request.first_new_block = len(request.block_ids)
            assert row == request.block_ids, "the static block table missed a change"
            assert window[request.unseen_blocks :] == request.window_ids[request.unseen_blocks :]
        last = [
            [self._write(r, p, r.tokens[p] if p < len(r.tokens) else self.sampled[r.slot]) for p in range(c, c + n)][-1]
            for r, c, n in zip(plan.requests, plan.starts, plan.num_new, strict=True)
        ]
        drawn = [[draw(m, r.spec, r.sample_index) for r, m in zip(plan.requests, last, strict=True)]]
        over: set[Request] = set()
        for step in range(1, plan.num_steps):
            # Whoever is past its length, or has sampled a stop id, sits the rest of the window out. Plans launched ahead
            # go on all the same, on what nobody has written.
            for r, c, n, (token, _) in zip(plan.requests, plan.starts, plan.num_samples, drawn[-1], strict=True):
                stops = token in r.spec.stop_ids and c + step >= r.num_prompt + r.spec.min_tokens
                if step >= n or (stops and not self.ahead):
                    over.add(r)
                    if self.layout:
                        self.states[r.slot] = None  # which goes on, with whatever it is given
            last = [
                mark(0, token) if r in over else self._write(r, c + step, token)
                for r, c, (token, _) in zip(plan.requests, plan.starts, drawn[-1], strict=True)
            ]
            drawn.append([draw(m, r.spec, r.sample_index) for r, m in zip(plan.requests, last, strict=True)])
        for request, (token, _) in zip(plan.requests, drawn[-1], strict=True):
            self.sampled[request.slot] = token
        for slot, row in plan.kept_states:
            self.states[row] = self.states[slot]
        self.tokens_computed += sum(plan.num_new) + (plan.num_steps - 1) * len(plan.requests)
        rows = list(zip(*drawn, strict=True))
        return Sampled(
            [[token for token, _ in row] for row in rows],
            [[logprob for _, logprob in row] for row in rows],
            [[{token: logprob} for token, logprob in row] for row in rows],
        )

    def _copy(self, memory: list[int | None], copies: list[tuple[int, int]]) -> None:
        size = self.size
        read = [memory[source * size : (source + 1) * size] for source, _ in copies]
        for (_, target), marks in zip(copies, read, strict=True):
            memory[target * size : (target + 1) * size] = marks
        self.copies += len(copies)

    def _begin_states(self, plan: Plan) -> None:
        if not self.layout:
            assert not plan.begun_states and not plan.kept_states
            return
        slots, zeros = self.layout.num_slots, self.layout.zeros
        begun = [target for _, target in plan.begun_states if target != self.layout.padding]
        assert begun == [r.slot for r in plan.admitted], "a state of the last request in the slot"
        assert all(row >= zeros for row, _ in plan.begun_states)
        assert all(slot < slots and row > zeros for slot, row in plan.kept_states)
        for row, target in plan.begun_states:
            self.states[target] = self.states[row]
            assert row == zeros or target == self.layout.padding or self.states[row] is not None, "never written"

    def _at(self, request: Request, position: int) -> int:
        return self.tables[request.slot][position // self.size] * self.size + position % self.size

    def _window_at(self, request: Request, position: int) -> int:
        return self.window_tables[request.slot][position // self.size] * self.size + position % self.size

    def _write(self, request: Request, position: int, token: int) -> int:
        adapter = request.adapter and self.adapters[request.adapter.slot]
        start = root(self.scheduler.weight_version, adapter)
        before = self.memory[self._at(request, position - 1)] if position else start
        assert before is not None, "reads what nobody wrote"
        if self.layout:
            assert self.states[request.slot] == (before if position else None), "the state of another place"
            self.states[request.slot] = mark(before, content(request, position, token))
        new, at = mark(before, content(request, position, token)), self._at(request, position)
        self._write_to(self.memory, at, new, request)
        if self.windowed:
            for seen in range(self.scheduler.block_layout.first_seen(position), position):
                assert self.window_memory[self._window_at(request, seen)] == self.memory[self._at(request, seen)], (
                    "a key of the window is gone, or another's"
                )
            self._write_to(self.window_memory, self._window_at(request, position), new, request)
        return new

    def _write_to(self, memory: list[int | None], at: int, new: int, request: Request) -> None:
        block = at // self.size
        if self.scheduler.tables.pool.refs(block) > 1 and memory[at] != new:
            # Who was admitted behind it by this very plan reads what it writes.
            others = [r for r in self.scheduler.running if block in (*r.block_ids, *r.window_ids) and r is not request]
            assert all(r in self._admitted and r.id > request.id for r in others), "writes to a block that others read"
        memory[at] = new

    def _check_plan(self, plan: Plan, waited: list[Request]) -> None:
        s = self.scheduler
        assert len(plan.requests) == len(plan.num_new) == len(set(plan.requests)) <= s.max_num_seqs
        assert set(plan.admitted) <= set(plan.requests) <= set(s.running)
        assert 0 < sum(plan.num_new) <= s.max_num_batched_tokens and min(plan.num_new) > 0
        assert s.running == sorted(s.running, key=lambda r: r.id)
        assert 1 <= plan.num_steps <= s.decode_window
        for r, start, n, samples in zip(plan.requests, plan.starts, plan.num_new, plan.num_samples, strict=True):
            assert r.computed == start + n + max(samples - 1, 0) < r.total + (not samples)
            assert samples <= min(plan.num_steps, r.pending) and r.pending <= r.remaining
            assert samples or r.computed < r.total
            assert r.images is None or r.images.around(start + n) == (start + n, start + n), "a span is cut"
            assert r.images is None or plan.num_steps == 1 or start >= r.images.end
        if plan.num_steps > 1:
            assert set(plan.num_new) == {1}
            assert plan.num_steps == max(plan.num_samples)
            idle = sum(plan.num_steps - n for n in plan.num_samples)
            assert not s.waiting or idle <= plan.num_steps * len(plan.requests) / 8, (
                "they wait for rows that stand idle"
            )
        targets = [target for _, target in plan.copies]
        assert len(targets) == len(set(targets))
        window_targets = [target for _, target in plan.window_copies]
        assert len(window_targets) == len(set(window_targets))
        for target in (*targets, *window_targets):  # which may fill up in this very plan, and serve who comes behind
            others = [r for r in plan.requests if target in (*r.block_ids, *r.window_ids)][1:]
            assert all(r in plan.admitted for r in others), "a copy is not its request's own"
        used = {r.adapter for r in s.running if r.adapter is not None}
        assert len(used) <= s.adapter_slots.count and {a.slot for a in used} <= set(range(1, s.adapter_slots.count + 1))
        # Only a sample whose prompt is being computed is overtaken, and who waits for an adapter's slot.
        full = len(used) == s.adapter_slots.count
        for request in s.waiting:
            if any(later.id > request.id for later in plan.admitted) and request in waited:
                computing = any(r.status is Status.RUNNING for r in request.group)
                assert computing or (full and request.adapter is not None), "overtaken"

    def _check_marks(self) -> None:
        for r in self.scheduler.running:
            start = root(self.scheduler.weight_version, r.adapter)
            known = min(r.computed, len(r.tokens))  # the rest is not known here yet
            right = list(accumulate(contents(r, r.tokens[:known]), mark, initial=start))[1:]
            assert [self.memory[self._at(r, p)] for p in range(known)] == right
            held = range(r.unseen_blocks * self.size, known) if self.windowed else range(0)
            assert [self.window_memory[self._window_at(r, p)] for p in held] == right[held.start : held.stop]

    def _check_result(self, r: Request) -> None:
        tokens, logprobs, reason = expected(r, self.scheduler.weight_version)
        assert (r.output, r.logprobs, r.finish_reason) == (tokens, logprobs, reason)
        assert r.status is Status.FINISHED and (r.error is not None) == (reason == "error")
        assert len(r.weight_versions) == len(tokens)
        top = [dict([pair]) for pair in zip(tokens, logprobs, strict=True)]
        assert r.top_logprobs == (top if r.spec.top_logprobs else [])
