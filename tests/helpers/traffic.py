"""Random requests for the scheduler's machine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from machine import FAULTY, VOCAB, Machine, Repeats, make_group, make_images, make_spec

from stoker.engine.images.inputs import ImageInputs
from stoker.engine.request import Adapter, Request, SamplingSpec

SPANS = (((1, 3),), ((2, 6), (6, 9)), ((0, 3), (5, 10)), ((3, 16),))  # of images


def half(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Of the combinations of one value of each, every other one, so that any two values occur together."""
    every = itertools.product(*(enumerate(each) for each in values))
    return [tuple(value for _, value in chosen) for chosen in every if sum(at for at, _ in chosen) % 2]


@dataclass(frozen=True)
class Traffic:
    """Random batches of prompts that often begin alike, some of them consecutive and equal.

    longest: tokens that may see each other both ways; below 2 there are no images.
    """

    rng: random.Random
    room: int  # tokens a request may grow to
    adapters: Sequence[Adapter | None] = (None,)
    longest: int = 0

    def run(self, machine: Machine, steps: int) -> list[Request]:
        """Step while batches arrive and weights change, until all requests have finished; returns these."""
        rng, scheduler = self.rng, machine.scheduler
        arrived: list[Request] = []
        finished: list[Request] = []
        for _ in range(steps):
            if rng.random() < 0.3 and len(scheduler.waiting) < 12:
                batch = self.batch(len(arrived))
                arrived += batch
                scheduler.add(batch)
            if not scheduler.running and not machine.launched and rng.random() < 0.3:
                scheduler.set_weight_version(scheduler.weight_version + 1)
            finished += machine.step()
        finished += machine.drain()
        assert sorted(r.id for r in finished) == list(range(len(arrived)))
        return arrived

    def batch(self, first_id: int) -> list[Request]:
        requests: list[Request] = []
        for _ in range(self.rng.randint(1, 3)):
            prompt = self._prompt()
            specs = [spec for _ in range(self.rng.randint(1, 2)) for spec in self._samples(len(prompt))]
            group = make_group(first_id + len(requests), prompt, specs)
            adapter, images = self.rng.choice(self.adapters), self._images(prompt)
            for request in group:
                request.adapter, request.images = adapter, images
            requests += group
        for request in requests:
            request.sample_index = self.rng.randrange(3)
            request.stop_string = Repeats() if self.rng.random() < 0.3 else None
        return requests

    def _prompt(self) -> list[int]:
        rng = self.rng
        begin = [(i * i + rng.choice((0, 0, 1))) % VOCAB for i in range(self.room)]
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 3))]
        return (begin[: rng.randint(0, self.room - 4)] + own)[: self.room - 1] or [0]

    def _images(self, prompt: list[int]) -> ImageInputs | None:
        fits = [s for s in SPANS if s[-1][1] <= len(prompt) and all(end - begin <= self.longest for begin, end in s)]
        if not fits or self.rng.random() < 0.3:
            return None
        spans = self.rng.choice(fits)
        return make_images(prompt, repr((spans, self.rng.randrange(2))).encode(), spans)

    def _samples(self, num_prompt: int) -> list[SamplingSpec]:
        rng = self.rng
        spec = make_spec(
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.choice((0, 1, 2, FAULTY)),
            max_tokens=rng.randint(1, self.room - num_prompt),
            min_tokens=rng.randint(0, 3),
            stop_ids=frozenset(rng.sample(range(VOCAB), rng.choice((0, 0, 1)))),
            top_logprobs=rng.randint(0, 1),
        )
        return [spec] * rng.randint(1, 4)
