"""What ``generate_batch``, ``score`` and ``submit`` do: read prompts, check them, run their requests, and return results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, chain, count
from typing import Any

from torch import Tensor

from stoker.engine.request import Request
from stoker.engine.request_scores import Scoring
from stoker.kernels.errors import InvalidRequestError
from stoker.rollout.adapters import AdapterChoice, Adapters
from stoker.rollout.config import check_alone
from stoker.rollout.engine_state import EngineState
from stoker.rollout.handles import RolloutHandle
from stoker.rollout.lockstep import Lockstep
from stoker.rollout.loop import Loop
from stoker.rollout.outputs import RolloutBatch, TokenLogprobs
from stoker.rollout.prompts import Prompt, Prompts, Read, read_prompts
from stoker.rollout.requests import RequestMaker, params_per_prompt, read_sequences, token_logprobs
from stoker.rollout.sampling_params import SamplingParams
from stoker.rollout.updates import WeightUpdates
from stoker.rollout.user_values import shown

_Made = tuple[list[Request], Scoring | None]


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
        ranks: Lockstep,
    ) -> None:
        self._requests, self._adapters, self._updates = requests, adapters, updates
        self._loop, self._state, self._processor, self._ranks = loop, state, processor, ranks
        self._version = updates.version  # of the weights when ranks last told each other of them

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        attention_mask: Tensor | None,
        adapter: AdapterChoice | Sequence[AdapterChoice],
        progress_bar: bool,
    ) -> RolloutBatch:
        made: list[_Made] = []
        mine = slice(0)

        def make() -> list[Request]:
            nonlocal mine
            self._state.check_ready()
            self._updates.before_requests()
            asked = read, params, self._adapters.chosen(adapter, len(read))
            everyones = self._exchange("generate_batch", asked)
            all_read, all_params, adapters = map(_joined, zip(*everyones, strict=True))
            made.extend(self._requests.for_generation(all_read, all_params, self._adapters.found(adapters)))
            mine = self._own(everyones)
            self._ranks.exchange("generate_batch", None)  # or one that could not make them would be waited for
            return [r for requests, _ in made for r in requests]

        with self._ranks.together("generate_batch"):
            self._state.check_ready()
            self._loop.check_not_paused()
            self._loop.settle()  # what requests hold whose handles were dropped counts no more
            read = read_prompts(prompts, attention_mask, self._processor)
            params = params_per_prompt(sampling_params, len(read))
            self._requests.check_prompts(read, params)
            self._loop.run("generate_batch", make, progress_bar=progress_bar)
        return RolloutBatch([self._requests.output(r, *of_r) for r, of_r in zip(read, made[mine], strict=True)])

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
        requests: list[Request] = []  # this rank's
        results: list[TokenLogprobs] = []

        def make() -> list[Request]:
            self._state.check_ready()
            self._updates.before_requests()
            asked = read, first, [variant] * len(read), self._adapters.chosen(adapter, len(read))
            everyones = self._exchange("score", asked)
            all_read, all_first, variants, adapters = map(_joined, zip(*everyones, strict=True))
            made = self._requests.for_scoring(all_read, all_first, variants, self._adapters.found(adapters))
            requests.extend(made[self._own(everyones)])
            self._ranks.exchange("score", None)
            return made

        def result(row: int) -> TokenLogprobs:
            request = requests[row]
            assert request.scoring is not None
            return token_logprobs(read[row][0], request.scoring, entropy=entropy, error=request.error)

        def ended(row: int) -> None:
            results.append(result(row))
            on_scored(row, results[row])  # type: ignore[misc]

        with self._ranks.together("score"):
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
            # Where ranks run it together none may break off, and an exception in ``on_scored`` would.
            follow = on_scored is not None and self._ranks.parallel is None
            self._loop.run("score", make, progress_bar=progress_bar, ended=ended if follow else None)
        if on_scored is not None and not follow:
            for row in range(len(requests)):
                ended(row)
        return results or [result(row) for row in range(len(requests))]

    def submit(self, prompt: Prompt, sampling_params: SamplingParams | None, adapter: AdapterChoice) -> RolloutHandle:
        check_alone(self._ranks.config, "calls of submit()")
        self._state.check_ready()
        self._loop.settle()
        read, params = read_prompts([prompt], None, self._processor), params_per_prompt(sampling_params, 1)
        self._requests.check_prompts(read, params)
        with self._loop.gate("submit"):
            self._state.check_ready()
            self._updates.before_requests(idle_only=True)
            ((requests, scoring),) = self._requests.for_generation(
                read, params, self._adapters.found(self._adapters.chosen(adapter, 1))
            )
            handle = RolloutHandle(self._loop, requests, partial(self._requests.output, read[0], requests, scoring))
            self._loop.add("submit", requests)
        return handle

    # -- ranks that run a model together -----------------------------------------------------------------------------

    def _exchange(self, call: str, asked: Any) -> list[Any]:
        """What every rank asks for; once, where all are to ask for the same.

        Afterwards all of them make the same plans, whatever one has forgotten by itself (asleep, say).
        """
        if self._ranks.parallel is None:
            return [asked]
        prefixes, requests = self._loop.core.scheduler.prefixes, self._requests
        alike: dict[str, Any] = {"tokenizer": type(requests.tokenizer).__name__}
        if call == "generate_batch":
            alike["tokens that end a completion"] = sorted(requests.eos_ids)
        known = prefixes.plans, sorted(self._adapters.outdated)
        numbers = self._updates.version, next(requests.prompts)
        said = self._ranks.exchange(call, (asked, known, numbers), last=False, **alike)
        versions, prompts = zip(*(numbers for *_, numbers in said), strict=True)
        # Where all have new weights, one may count more of them: it found some in a call that another one refused.
        self._ranks.check_alike("weight version", versions, ["new" if v != self._version else v for v in versions])
        if any(theirs != known for _, theirs, _ in said):
            self._loop.do(f"start {call}", prefixes.forget)
        self._adapters.outdated.clear()
        requests.prompts = count(max(prompts))
        self._version = max(versions)
        if self._updates.version != self._version:
            self._loop.do(f"start {call}", partial(self._loop.core.set_weight_version, self._version))
        if not self._ranks.same_prompts:
            return [asked for asked, *_ in said]
        if any(_prompts(other) != _prompts(asked) for other, *_ in said):
            raise InvalidRequestError(
                f"these {len(said)} ranks compute each batch together, and their prompts differ: give all of them the same"
            )
        return [said[0][0]]

    def _own(self, everyones: Sequence[tuple[Sequence[Any], ...]]) -> slice:
        """Which of everyone's rows are this rank's."""
        ends = list(accumulate((len(asked[0]) for asked in everyones), initial=0))
        number = min(self._ranks.rank, len(everyones) - 1)
        return slice(ends[number], ends[number + 1])


def _prompts(asked: tuple[Sequence[Read], ...]) -> list[tuple[list[int], bytes | None]]:
    """What prompts say; not the objects, of which each rank has its own."""
    return [(tokens, None if images is None else images.digest) for tokens, images in asked[0]]


def _joined(of_ranks: Iterable[Sequence[Any]]) -> list[Any]:
    return list(chain.from_iterable(of_ranks))
