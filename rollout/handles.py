"""``RolloutHandle``, which ``submit`` returns: a request's results as they come, and waiting for many handles at once."""

from __future__ import annotations

import math
import numbers
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stoker.engine.request import Request, Status
from stoker.kernels.errors import EngineStateError, InvalidRequestError
from stoker.rollout.loop import Loop
from stoker.rollout.outputs import RolloutOutput
from stoker.rollout.user_values import is_real, shown


@dataclass(frozen=True, kw_only=True)
class RolloutChunk:
    """New tokens of one completion, in the order they were sampled.

    index: which of the prompt's ``n`` samples. token_ids, logprobs (in nats), weight_versions: one a token, and so
    top_logprobs where ``SamplingParams.logprobs`` asks for them.
    """

    index: int
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]] | None
    weight_versions: list[int]


class RolloutHandle:
    """A submitted prompt. Iterating gives its new tokens, ``RolloutChunk`` by chunk, until it has finished.

    A handle that is dropped before it has finished aborts its request.
    """

    def __init__(self, loop: Loop, requests: Sequence[Request], output: Callable[[], RolloutOutput]) -> None:
        self._loop = loop
        self._requests = requests
        self._output = output
        self._polled = [0] * len(requests)
        weakref.finalize(self, loop.abandon, requests)

    @property
    def status(self) -> Literal["waiting", "running", "finished"]:
        """ "waiting" for a place in the batch, KV blocks or its adapter's slot, "running", or "finished" (also by an abort)."""
        if self.done:
            return "finished"
        return "running" if any(r.status is Status.RUNNING for r in self._requests) else "waiting"

    @property
    def done(self) -> bool:
        """Whether every completion has finished, been aborted, or failed."""
        return all(r.status is Status.FINISHED for r in self._requests)

    def __repr__(self) -> str:
        tokens = ", ".join(str(r.num_output) for r in self._requests)
        return f"{type(self).__name__}({self.status}, {tokens} tokens)"

    def __reduce__(self) -> str:
        raise EngineStateError(
            "a handle cannot be copied, pickled or sent to another process, as its request ends with it: send what result() returns"
        )

    def result(self, timeout: float | None = None) -> RolloutOutput:
        """Step the engine until this prompt's completions are finished, and return them.

        timeout: seconds; ``TimeoutError`` then, and the request goes on at the next call. A request that failed carries
        its error in the output. Raises ``EngineStateError`` where this thread has paused the engine.
        """
        check_timeout(timeout)
        if not self.done and not self._loop.drive(lambda: self.done, timeout):
            raise TimeoutError(f"not finished after {timeout} s: call result() again, or abort()")
        return self._output()

    def abort(self) -> None:
        """End the request now; it keeps the tokens it has, with ``finish_reason="abort"``.

        Does nothing where it has finished.
        """
        self._loop.abort(self._requests)

    def poll(self) -> list[RolloutChunk]:
        """New tokens since the last poll, without stepping the engine: for callers that follow many handles at once.

        Where ``done`` was true before the poll, there will be no more.
        """
        return list(self._news(self._polled))

    def __iter__(self) -> Iterator[RolloutChunk]:
        sent = [0] * len(self._requests)

        def news() -> bool:
            return self.done or any(r.num_output > n for r, n in zip(self._requests, sent, strict=True))

        while True:
            if not news():
                self._loop.drive(news)
            last = self.done
            yield from self._news(sent)
            if last:
                return

    def _news(self, sent: list[int]) -> Iterator[RolloutChunk]:
        """What each request has beyond its ``sent`` tokens, which are counted up."""
        for i, r in enumerate(self._requests):
            first, end = sent[i], len(r.weight_versions)
            if end > first:
                sent[i] = end
                span = slice(first, end)
                yield RolloutChunk(
                    index=r.sample_index,
                    token_ids=r.output[span],
                    logprobs=r.logprobs[span],
                    top_logprobs=r.top_logprobs[span] if r.spec.top_logprobs else None,
                    weight_versions=r.weight_versions[span],
                )


def abort(handles: Iterable[RolloutHandle]) -> None:
    """Abort several handles in one turn: with a turn for each, those that go on would wait a step each time."""
    several = list(handles)
    for handle in several:
        handle._loop.abandon(handle._requests)
    for handle in several:
        handle._loop.settle()


def check_timeout(timeout: Any) -> None:
    """Raise ``InvalidRequestError`` for what is neither None nor a number of seconds."""
    if timeout is not None and (not isinstance(timeout, numbers.Real) or timeout != timeout):
        raise InvalidRequestError(f"timeout={shown(timeout)}: give seconds, or None to wait until the end")


def wait(
    loop: Loop, handles: Iterable[RolloutHandle], share: float, timeout: float | None
) -> tuple[list[RolloutHandle], list[RolloutHandle]]:
    """As ``RolloutEngine.wait``."""
    several = isinstance(handles, Iterable) and not isinstance(handles, RolloutHandle)
    all_handles = list(handles) if several else []
    if not several or not all(isinstance(h, RolloutHandle) for h in all_handles):
        raise InvalidRequestError("wait takes a list of handles, as submit returns them")
    if any(h._loop is not loop for h in all_handles):
        raise InvalidRequestError("wait takes a list of handles of this engine, and some are another engine's")
    if not is_real(share) or not 0 <= share <= 1:
        raise InvalidRequestError(f"share={shown(share)} is not between 0 and 1")
    check_timeout(timeout)
    enough = min(len(all_handles), max(1, math.ceil(share * len(all_handles) - 1e-9)))  # 0.07 * 100 is more than 7
    if share == 0:  # a share that has always finished; one step, or whoever asks in a loop would ask for ever
        enough, timeout = len(all_handles), 0.0
    left, most = list(all_handles), len(all_handles) - enough

    def reached() -> bool:  # asked after every step: it looks only at as many unfinished ones as it takes to say no
        found: list[RolloutHandle] = []
        while left and len(found) <= most:
            handle = left.pop()
            if not handle.done:
                found.append(handle)
        left.extend(found)
        return len(found) <= most

    if not reached():
        loop.drive(reached, timeout)
    return [h for h in all_handles if h.done], [h for h in all_handles if not h.done]
