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

_MOST_IDLE = 1 / 8  # of a window's rows, while requests wait: admitting one takes a step that is not captured
_Copies = tuple[dict[int, int], dict[int, int]]  # as ``BlockTables.reserve`` takes them


@dataclass(slots=True)
class Scheduler:
    """Plans steps over the requests that wait and run, and takes what they sampled."""

    num_blocks: int  # pages of KV
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    decode_window: int
    enable_prefix_caching: bool
    adapter_slots: AdapterSlots
    block_layout: BlockLayout = field(default_factory=BlockLayout)
    state_layout: StateLayout | None = None  # None: layers keep only keys and values
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)  # in order of arrival
    counters: Counters = field(default_factory=Counters)
    tables: BlockTables = field(init=False)
    states: StateCache = field(init=False)
    prefixes: PrefixReuse = field(init=False)
    _free_slots: list[int] = field(init=False)
    _filled: int = field(
        init=False
    )  # how many ran after the last plan, if that admitted some and left no slot free; else 0

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
                # Its cached prefix may lie scattered over so many slabs that the rest does not fit beside it.
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
            num_new = self._next(request, budget)  # 0 where it has to compute more at once than the budget allows
            if num_new and self._make_room(request, num_new, copies):
                take(request, num_new)

        # When all slots were just filled, run a window of decode steps before admitting more, rather than admitting at each end.
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
            # It only scores, so nothing follows its last token. The first of a group stops where the others can take over.
            shared = len(request.group) > 1 and request.computed < request.num_prompt
            left = (request.num_prompt if shared else request.total - 1) - request.computed
        elif left > 1 and request.ends_at_once:
            # It would finish, and give up its blocks, with the plan that completes its prompt. So leave one token to the
            # next plan, in which the samples that still wait can share the blocks.
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
            if request.scoring is not None:  # also of an aborted one: others may have borrowed its scores
                request.scoring.take(scores)
                faulty |= scores is not None and scores.has_nan
                self.counters.scored_tokens += 0 if scores is None else scores.end - scores.first
            if request.status is Status.FINISHED:  # by a token of an earlier plan
                continue
            done = samples > 0 and self._take(request, sampled, row, samples)
            # The last token's key and value are computed only in the next step.
            self.prefixes.offer(request, min(request.computed, len(request.tokens) - 1))
            if scores is not None and request.scoring is not None:
                self.prefixes.keep_scores(request, request.scoring, plan.starts[row])
                done = done or (request.scoring.complete and request.remaining == 0)
            if done:
                self._finish(request)
                finished.append(request)
                faulty |= request.error is not None
        if faulty:
            # Attention over a NaN gives NaN, however small its weight: so may what came before, which others begin with.
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
        """Take blocks for a running request's next tokens, preempting the latest if need be; False if it was preempted itself."""
        while not self.tables.reserve(request, num_new, copies):
            self._preempt(self.running[-1])
            if request.status is not Status.RUNNING:
                return False
        return True

    def _reserve_window(self, requests: Sequence[Request]) -> int:
        """How many decode steps can run in a row; allocates their blocks.

        A request that reaches its length within the window idles for the rest of it: that costs less than planning anew at
        every end. While other requests wait for slots, only a small share of the rows may idle.
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
        """Take everything from a running request. It waits for its turn, and then computes its tokens again."""
        self._release(request)
        # Put into one queue before it leaves the other: an exception in between must not lose the request.
        insort(self.waiting, request, key=lambda r: r.id)
        self.running.remove(request)
        request.computed, request.older_kv = 0, False
        request.status = Status.WAITING  # what it has pending still arrives
        self.counters.preemptions += 1

    # -- admission -----------------------------------------------------------------------------------------------

    def _admissible(self) -> Iterator[tuple[Request, Request | None]]:
        """Waiting requests in order of arrival, as long as there are slots for them and for their adapters.

        With each comes a running sample of the same prompt that has computed all of it, if there is one. A sample waits
        while another one computes their prompt; a slot is kept for it, so that later arrivals do not split the group.
        """
        candidates = list(islice(self.adapter_slots.admissible(self.waiting, self.running), len(self._free_slots)))
        samples: dict[int, list[Request]] = {}  # by group, those whose prompt may serve another
        for request in self.running if candidates else ():
            if not request.older_kv:
                samples.setdefault(id(request.group), []).append(request)
        for request in candidates:
            if request.pending or request.launched:  # it was preempted, and its last tokens have not arrived yet
                return
            mine = samples.setdefault(id(request.group), [])
            through = next(filter(_serves, mine), None)
            if not mine or through is not None:
                yield request, through
                if request.status is Status.RUNNING:
                    mine.append(request)

    def _admit(self, request: Request, other: Request | None, budget: int, copies: _Copies) -> int:
        """Start a waiting request from what is computed of it already, by ``other`` (see ``_admissible``) or in the cache.

        Returns the number of tokens it computes, 0 if it must wait.
        """
        *shared, computed, from_cache = self.prefixes.already_computed(request, other)
        request.computed = computed
        self.tables.hold(request, *shared)
        num_new = self._next(request, budget)
        # Each running request may still need a block: do not admit one that would be preempted at once.
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
        """Whether other samples of its prompt wait for this request, and no other, to compute it."""
        return _awaited(request) and not any(_serves(r) for r in self.running if r.group is request.group)

    # -- between steps ---------------------------------------------------------------------------

    def set_weight_version(self, version: int) -> None:
        """New weights: no KV computed before may serve a prefix. No step may be pending.

        Running requests go on with the KV they have, and share it with nobody; ``preempt_all`` has them compute it again. A
        request whose scores are incomplete begins again, so that they are all of the same weights.
        """
        self.outdate([*self.running, *self.waiting])
        self.prefixes.weight_version = version
        self.prefixes.forget()

    def outdate(self, requests: Sequence[Request]) -> None:
        """What these requests have computed is not what would be computed now. As ``set_weight_version`` for them alone."""
        for request in [r for r in requests if r.scoring is not None and not r.scoring.complete]:
            assert request.scoring is not None
            request.scoring.restart()
            if request.status is Status.RUNNING:
                self._preempt(request)
        for request in requests:
            assert not request.pending
            request.block_keys.clear()
            request.older_kv = request.computed > 0

    def preempt_all(self) -> None:
        """Preempt all requests: each computes its tokens again when its turn comes."""
        while self.running:
            self._preempt(self.running[-1])

    def abort(self, requests: Iterable[Request]) -> None:
        """End these requests; they keep the tokens they have."""
        for request in requests:
            if request.status is Status.FINISHED:
                continue
            queue: Any = self.running if request.status is Status.RUNNING else self.waiting
            request.end("abort")  # first: if an exception follows, its blocks must not be freed a second time
            if request in queue:  # it may never have been queued
                queue.remove(request)
            self._release(request)

    def abort_all(self, error: StokerError | None = None) -> None:
        """Start afresh, wherever an exception struck: every request ends, every block and slot is free."""
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
    others = (r for r in reversed(request.group) if r is not request)  # the latest are the most likely to wait
    return any(r.status is Status.WAITING for r in others)


def _serves(request: Request) -> bool:
    """Whether other samples of its prompt can go on from what it has computed."""
    through = request.computed >= request.num_prompt - request.ends_at_once
    return through and request.status is Status.RUNNING and not request.older_kv
