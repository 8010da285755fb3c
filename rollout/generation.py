"""What ``generate_batch``, ``score`` and ``submit`` do: read prompts, check them, run their requests, and return results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from stoker.engine.request import Request
from stoker.engine.request_scores import Scoring
from stoker.kernels.errors import InvalidRequestError
from stoker.rollout.adapters import AdapterChoice, Adapters
from stoker.rollout.engine_state import EngineState
from stoker.rollout.handles import RolloutHandle
from stoker.rollout.loop import Loop
from stoker.rollout.outputs import RolloutBatch, TokenLogprobs
from stoker.rollout.prompts import Prompt, Prompts, read_prompts
from stoker.rollout.requests import RequestMaker, params_per_prompt, read_sequences, token_logprobs
from stoker.rollout.sampling_params import SamplingParams
from stoker.rollout.updates import WeightUpdates
from stoker.rollout.user_values import shown


class Generation:
    """The requests of one engine, from what a user gives to what a user gets. Each method is as ``RolloutEngine``'s."""

    def __init__(
        self,
        requests: RequestMaker,
        adapters: Adapters,
        updates: WeightUpdates,
        loop: Loop,
        state: EngineState,
        processor: Any,
    ) -> None:
        self._requests, self._adapters, self._updates = requests, adapters, updates
        self._loop, self._state, self._processor = loop, state, processor

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        attention_mask: Tensor | None,
        adapter: AdapterChoice | Sequence[AdapterChoice],
        progress_bar: bool,
    ) -> RolloutBatch:
        self._state.check_ready()
        self._loop.check_not_paused()
        self._loop.settle()  # what requests hold whose handles were dropped counts no more
        read = read_prompts(prompts, attention_mask, self._processor)
        params = params_per_prompt(sampling_params, len(read))
        self._requests.check_prompts(read, params)
        by_prompt: list[tuple[list[Request], Scoring | None]] = []

        def make() -> list[Request]:
            self._state.check_ready()
            self._updates.before_requests()
            by_prompt.extend(self._requests.for_generation(read, params, self._adapters.resolve(adapter, len(read))))
            return [r for requests, _ in by_prompt for r in requests]

        self._loop.run("generate_batch", make, progress_bar=progress_bar)
        return RolloutBatch([self._requests.output(r, *made) for r, made in zip(read, by_prompt, strict=True)])

    def score(
        self,
        sequences: Prompts | RolloutBatch,
        attention_mask: Tensor | None,
        start: int | Sequence[int] | Tensor,
        temperature: float,
        top_k: int,
        entropy: bool,
        adapter: AdapterChoice | Sequence[AdapterChoice],
        progress_bar: bool,
        on_scored: Callable[[int, TokenLogprobs], None] | None,
    ) -> list[TokenLogprobs]:
        self._state.check_ready()
        self._loop.check_not_paused()
        if on_scored is not None and not callable(on_scored):
            raise InvalidRequestError(
                f"on_scored={shown(on_scored)}: give a function of a sequence's number and its result"
            )
        if not isinstance(entropy, bool):
            raise InvalidRequestError(f"entropy={shown(entropy)}: give True or False")
        read, first = read_sequences(sequences, attention_mask, start, self._processor)
        variant = self._requests.variant(temperature, top_k)
        self._requests.check_sequences(read, first, isinstance(sequences, RolloutBatch))
        requests: list[Request] = []

        def make() -> list[Request]:
            self._state.check_ready()
            self._updates.before_requests()
            adapters = self._adapters.resolve(adapter, len(read))
            requests.extend(self._requests.for_scoring(read, first, variant, adapters))
            return requests

        results: list[TokenLogprobs] = []

        def result(row: int) -> TokenLogprobs:
            request = requests[row]
            assert request.scoring is not None
            return token_logprobs(read[row][0], request.scoring, entropy=entropy, error=request.error)

        def ended(row: int) -> None:
            results.append(result(row))
            on_scored(row, results[row])  # type: ignore[misc]

        self._loop.run("score", make, progress_bar=progress_bar, ended=ended if on_scored is not None else None)
        return results or [result(row) for row in range(len(requests))]

    def submit(self, prompt: Prompt, sampling_params: SamplingParams | None, adapter: AdapterChoice) -> RolloutHandle:
        self._state.check_ready()
        self._loop.settle()
        read, params = read_prompts([prompt], None, self._processor), params_per_prompt(sampling_params, 1)
        self._requests.check_prompts(read, params)
        with self._loop.gate("submit"):
            self._state.check_ready()
            self._updates.before_requests(idle_only=True)
            ((requests, scoring),) = self._requests.for_generation(read, params, self._adapters.resolve(adapter, 1))
            handle = RolloutHandle(self._loop, requests, partial(self._requests.output, read[0], requests, scoring))
            self._loop.add("submit", requests)
        return handle
