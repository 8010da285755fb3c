"""Which tokens run next. Sees counters and block ids, never a tensor.

There is one rule: a request's computed tokens catch up with its total tokens. Prefill, a chunk of a prefill, decode, a
prefix-cache hit and the return of a preempted request differ only in how far apart the two counters are.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from stoker.engine.adapters.slots import AdapterSlots
from stoker.engine.cache.block_layout import BlockLayout
from stoker.engine.cache.block_tables import BlockTables
from stoker.engine.cache.prefix_reuse import PrefixReuse
from stoker.engine.cache.state_cache import StateCache, StateLayout
from stoker.engine.counters import Counters
from stoker.engine.plan import Plan, Sampled
from stoker.engine.request import Request, Status
from stoker.kernels.errors import StokerError

_MOST_IDLE = 1 / 8  # of a window's rows, while requests wait: to admit one costs a step that is not captured
_Copies = tuple[dict[int, int], dict[int, int]]  # as ``BlockTables.reserve`` takes them


@dataclass(slots=True)
class Scheduler:
    num_blocks: int  # pages of KV
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    decode_window: int
    enable_prefix_caching: bool
    adapter_slots: AdapterSlots
    block_layout: BlockLayout = field(default_factory=BlockLayout)
    state_layout: StateLayout | None = None  # None: layers keep keys and values alone
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)  # in order of arrival
    counters: Counters = field(default_factory=Counters)
    tables: BlockTables = field(init=False)
    states: StateCache = field(init=False)
    prefixes: PrefixReuse = field(init=False)
    _free_slots: list[int] = field(init=False)
    _filled: int = field(init=False)  # that ran after the last plan, where it admitted and left no slot free

    def __post_init__(self) -> None:
        self._reset_blocks(0)

    def _reset_blocks(self, weight_version: int) -> None:
        self.tables = BlockTables(self.num_blocks, self.block_size, self.block_layout)
        self.states = StateCache(self.state_layout, self.block_size)
        self.prefixes = PrefixReuse(self.tables, self.states, self.enable_prefix_caching, weight_version)
        self._free_slots = list(range(self.max_num_seqs - 1, -1, -1))
        self._filled = 0

    @property
    def weight_version(self) -> int:
        """The version of the weights that tokens are computed and sampled with."""
        return self.prefixes.weight_version

    # -- the step ------------------------------------------------------------------------------------------------

    def add(self, requests: Iterable[Request]) -> None:
        self.waiting.extend(requests)

    def plan(self) -> Plan | None:
        """The next step's work, with its blocks allocated; None where nothing can run now.

        Counters move on at once, as if the plan had run. It may be made before the plans before it were committed, as
        long as plans run in order on the device.
        """
        plan = self._plan()
        if plan is None and not self.running and self.waiting:
            first = self.waiting[0]
            if not (first.pending or first.launched):
                # What is cached of it lies so scattered over the slabs that it does not fit beside that.
                self.prefixes.forget()
                plan = self._plan()
        return plan

    def _plan(self) -> Plan | None:
        requests: list[Request] = []
        counts: list[int] = []  # of their tokens
        scored: list[range] = []
        admitted: list[Request] = []
        copies: _Copies = {}, {}
        budget = self.max_num_batched_tokens
        self.prefixes.begin_plan()

        def take(request: Request, num_new: int) -> None:
            nonlocal budget
            requests.append(request)
            counts.append(num_new)
            scored.append(self.prefixes.claim(request, num_new))
            budget -= num_new

        running = list(self.running)
        for request in running:
            if request.status is not Status.RUNNING or budget == 0 or request.launched:
                continue  # preempted for an earlier one, no budget left, or its last token is being sampled
            num_new = self._next(request, budget)  # 0: a budget for less than it has to compute at once
            if num_new and self._make_room(request, num_new, copies):
                take(request, num_new)

        # Places that have just been filled are filled again after a window, not at every step in which one of them ends.
        decodes_first = self._filled and sum(counts) == len(requests) > self._filled * (1 - _MOST_IDLE)
        if len(self.running) == len(running) and not decodes_first:  # none had to give way
            for request, other in self._admissible():
                if budget == 0 or not (num_new := self._admit(request, other, budget, copies)):
                    break
                admitted.append(request)
                take(request, num_new)
        self._filled = len(self.running) if admitted and not self._free_slots else 0

        if not requests:
            return None
        num_steps = 1
        work = list(zip(requests, counts, strict=True))
        if all(r.computed + n == r.total and n == 1 and not (r.within_images or self._leads(r)) for r, n in work):
            num_steps = self._reserve_window(requests)
        pairs, window_pairs = ([(source, target) for target, source in kind.items()] for kind in copies)
        starts = [r.computed for r in requests]
        num_samples = [self._advance(request, num_new, num_steps) for request, num_new in work]
        states = self.states.take()
        return Plan(requests, starts, counts, num_samples, scored, num_steps, admitted, pairs, window_pairs, *states)

    def _next(self, request: Request, budget: int) -> int:
        """How many tokens the request computes in this plan."""
        left, images = self._left(request), request.images
        return min(left, budget) if images is None else images.fitting(request.computed, left, budget)

    def _left(self, request: Request) -> int:
        """How many tokens the request could compute now."""
        left = request.total - request.computed
        if not request.remaining:
            # It only scores, so nothing follows its last token. The first of a group stops where the others can go on.
            shared = len(request.group) > 1 and request.computed < request.num_prompt
            left = (request.num_prompt if shared else request.total - 1) - request.computed
        elif left > 1 and request.ends_at_once:
            # It would finish, and give up its blocks, with the plan that completes its prompt: so one token is left for
            # the next plan, in which the samples that still wait can share them.
            left -= _awaited(request)
        border = self.states.border(request.num_prompt)  # where its state is to be kept
        return border - request.computed if request.computed < border else left

    @staticmethod
    def _advance(request: Request, num_new: int, num_steps: int) -> int:
        """Move the counters to where they are after the plan; returns how many tokens it samples."""
        request.computed += num_new
        if request.computed < request.total:
            return 0
        samples = min(num_steps, request.remaining - request.pending)
        request.computed += samples - 1
        request.pending += samples
        return samples

    def commit(self, plan: Plan, sampled: Sampled) -> list[Request]:
        """Give the requests what was sampled; returns those that finished."""
        finished, faulty = [], False
        for row, (request, samples) in enumerate(zip(plan.requests, plan.num_samples, strict=True)):
            request.pending -= samples
            scores = None if sampled.scores is None else sampled.scores[row]
            if request.scoring is not None:  # of one aborted too: others may have borrowed them
                request.scoring.take(scores)
                faulty |= scores is not None and scores.has_nan
                self.counters.scored_tokens += 0 if scores is None else scores.end - scores.first
            if request.status is Status.FINISHED:  # by a token of an earlier plan
                continue
            done = samples > 0 and self._take(request, sampled, row, samples)
            # The key and value of the last token are computed with the next one, of which nothing is known yet.
            self.prefixes.offer(request, min(request.computed, len(request.tokens) - 1))
            if scores is not None and request.scoring is not None:
                self.prefixes.keep_scores(request, request.scoring, plan.starts[row])
                done = done or (request.scoring.complete and request.remaining == 0)
            if done:
                self._finish(request)
                finished.append(request)
                faulty |= request.error is not None
        if faulty:
            # Attention over a NaN is NaN however little it weighs: so may be the tokens before it, which others begin with.
            self.prefixes.forget()
        if finished:
            self.running = [r for r in self.running if r.status is Status.RUNNING]
            self.counters.finished_requests += len(finished)
        return finished

    def _take(self, request: Request, sampled: Sampled, row: int, samples: int) -> bool:
        before = len(request.tokens)
        tokens, logprobs = sampled.tokens[row][:samples], sampled.logprobs[row][:samples]
        top = None if sampled.top is None else sampled.top[row]
        done = request.take(tokens, logprobs, top, self.weight_version, len(sampled.tokens))
        self.counters.generated_tokens += len(request.tokens) - before
        return done

    def _finish(self, request: Request) -> None:
        waiting = request.status is Status.WAITING  # preempted while its last token was being sampled
        request.end()
        if waiting:
            self.waiting.remove(request)
        self._release(request)

    # -- blocks --------------------------------------------------------------------------------------------------

    def _make_room(self, request: Request, num_new: int, copies: _Copies) -> bool:
        """Take blocks for a running request's next tokens, preempting the latest ones if need be; False where it was itself preempted."""
        while not self.tables.reserve(request, num_new, copies):
            self._preempt(self.running[-1])
            if request.status is not Status.RUNNING:
                return False
        return True

    def _reserve_window(self, requests: Sequence[Request]) -> int:
        """How many decode steps can run in a row; allocates their blocks.

        A request whose length ends within the window sits the rest of it out: that costs less than looking up at every
        end. Where others wait for its place, a small share of the rows may stand idle so.
        """
        remaining = [r.remaining - r.pending for r in requests]
        most = min(self.decode_window, max(remaining))
        if self.waiting:
            short = [left for left in remaining if left < most]
            while sum(max(0, most - left) for left in short) > most * len(requests) * _MOST_IDLE:
                most -= 1
        return self.tables.reserve_steps(requests, remaining, most)

    def _release(self, request: Request) -> None:
        self.tables.release(request)
        request.first_new_block, request.offered_blocks = 0, 0
        if request.slot >= 0:
            self._free_slots.append(request.slot)
            request.slot = -1

    def _preempt(self, request: Request) -> None:
        """Take everything from a running request; it comes back in its turn and computes its tokens again."""
        self._release(request)
        # Into one queue before out of the other: an exception in between must not lose the request.
        insort(self.waiting, request, key=lambda r: r.id)
        self.running.remove(request)
        request.computed, request.older_kv = 0, False
        request.status = Status.WAITING  # what it has pending still arrives
        self.counters.preemptions += 1

    # -- admission -----------------------------------------------------------------------------------------------

    def _admissible(self) -> Iterator[tuple[Request, Request | None]]:
        """Waiting requests in order of arrival, as long as there are slots, for them and for their adapters.

        With each comes a running sample of the same prompt that has computed all of it, if there is one. A sample whose
        prompt another one is computing right now waits for it; its slot is kept for it, so that later arrivals do not tear
        the group apart.
        """
        candidates = list(islice(self.adapter_slots.admissible(self.waiting, self.running), len(self._free_slots)))
        samples: dict[int, list[Request]] = {}  # by group, those whose prompt may serve another
        for request in self.running if candidates else ():
            if not request.older_kv:
                samples.setdefault(id(request.group), []).append(request)
        for request in candidates:
            if request.pending or request.launched:  # preempted, and what it waits for not known yet
                return
            mine = samples.setdefault(id(request.group), [])
            through = next(filter(_serves, mine), None)
            if not mine or through is not None:
                yield request, through
                if request.status is Status.RUNNING:
                    mine.append(request)

    def _admit(self, request: Request, other: Request | None, budget: int, copies: _Copies) -> int:
        """Start a waiting request with what is already computed of it, be it by ``other`` (as in ``_admissible``).
        Returns the tokens it computes, 0 if it must wait."""
        *shared, computed, from_cache = self.prefixes.already_computed(request, other)
        request.computed = computed
        self.tables.hold(request, *shared)
        num_new = self._next(request, budget)
        # Each running request may still take a block: do not admit what would be preempted at once.
        fits = not self.running or self.tables.fits(len(self.running) + -(-num_new // self.block_size))
        if not num_new or not fits or not self.tables.reserve(request, num_new, copies):
            self.tables.release(request)
            request.computed = 0
            return 0
        if not request.started:
            request.started = True
            self.counters.prompt_tokens += request.total
            if from_cache:
                request.cached_tokens = computed
                self.counters.prefix_hit_tokens += computed
            else:
                self.counters.shared_tokens += computed
        insort(self.running, request, key=lambda r: r.id)
        self.waiting.remove(request)
        request.status, request.slot = Status.RUNNING, self._free_slots.pop()
        self.states.begin(request.slot, request.block_keys[: computed // self.block_size])
        return num_new

    def _leads(self, request: Request) -> bool:
        """Whether other samples of its prompt can begin once it, and only it, has computed that."""
        return _awaited(request) and not any(_serves(r) for r in self.running if r.group is request.group)

    # -- what a user may do in between ---------------------------------------------------------------------------

    def set_weight_version(self, version: int) -> None:
        """New weights: no KV computed before may serve a prefix. Nothing may be pending.

        Requests that are running go on with the KV they have, and share it with nobody; ``preempt_all`` has them compute
        it again. One whose scores are not complete begins again: they are all of the same weights.
        """
        for request in [r for r in (*self.running, *self.waiting) if r.scoring is not None and not r.scoring.complete]:
            assert request.scoring is not None
            request.scoring.restart()
            if request.status is Status.RUNNING:
                self._preempt(request)
        self.prefixes.weight_version = version
        self.prefixes.forget()
        for request in (*self.running, *self.waiting):
            assert not request.pending
            request.block_keys.clear()
            request.older_kv = request.computed > 0

    def preempt_all(self) -> None:
        """Take everything from everyone; they compute it again in their turn."""
        while self.running:
            self._preempt(self.running[-1])

    def abort(self, requests: Iterable[Request]) -> None:
        """End these requests; they keep the tokens they have."""
        for request in requests:
            if request.status is Status.FINISHED:
                continue
            queue: Any = self.running if request.status is Status.RUNNING else self.waiting
            request.end("abort")  # first: what ends it after an exception in between must not free its blocks again
            if request in queue:  # it may never have got there
                queue.remove(request)
            self._release(request)

    def abort_all(self, error: StokerError | None = None) -> None:
        """Sound books again, wherever an exception struck: every request ends, every block and slot is free."""
        for request in (*self.running, *self.waiting):
            if request.status is not Status.FINISHED:
                request.end("abort", error)
            request.block_ids, request.window_ids, request.slot, request.pending = [], [], -1, 0
        self.running, self.waiting = [], deque()
        self._reset_blocks(self.weight_version)

    def check(self) -> None:
        """Prove the books after a step: blocks, slots and counters of every request. Raises AssertionError."""
        self.tables.check(self.running)
        slots = [r.slot for r in self.running] + self._free_slots
        assert sorted(slots) == list(range(self.max_num_seqs)), "slots are lost or held twice"
        self.states.check()
        for r in self.running:
            assert r.status is Status.RUNNING and r.computed < r.total
        for r in self.waiting:
            assert r.status is Status.WAITING and r.computed == 0 and not (r.block_ids or r.window_ids) and r.slot == -1


def _awaited(request: Request) -> bool:
    """Whether other samples of a request's prompt wait while it computes that."""
    if request.computed >= request.num_prompt or len(request.group) == 1:
        return False
    others = (r for r in reversed(request.group) if r is not request)  # the latest wait longest
    return any(r.status is Status.WAITING for r in others)


def _serves(request: Request) -> bool:
    """Whether other samples of its prompt can go on from what it has computed."""
    through = request.computed >= request.num_prompt - request.ends_at_once
    return through and request.status is Status.RUNNING and not request.older_kv
