"""``Request``: one sequence being generated. Its state is two counters, of tokens computed and tokens there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from enum import Enum
from itertools import islice

from stoker.engine.constraints import Constraint
from stoker.engine.images.inputs import ImageInputs
from stoker.engine.request_scores import Scoring
from stoker.kernels.errors import RequestFailedError, StokerError


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSpec:
    """Sampling parameters lowered to numbers; the defaults do nothing. ``stop_ids`` holds every id that ends the completion."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    # (id, what is added to its logit), by id; -inf for ids that are never sampled.
    bias: tuple[tuple[int, float], ...] = ()
    constraint: Constraint | None = None  # the pattern the completion follows; it decides when stop ids may come
    seed: int = 0
    top_logprobs: int = 0
    logprobs_mode: int = 0  # index into sampler.LOGPROBS_MODES

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def truncated(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(eq=False, slots=True)
class Adapter:
    """An adapter as requests know it. A new one under an old name has another ``serial``; so has one whose dtype changes."""

    name: str
    serial: int
    slot: int = 0  # where its weights are while a request may use it, from 1 on; 0: in none

    @property
    def key(self) -> str:
        """What KV computed with it depends on."""
        return f"{self.serial}:{self.name}"


@dataclass(eq=False, slots=True)
class Request:
    """A sequence. ``computed`` of its tokens have their KV in the cache; that number catches up with ``total``, all there are.

    Both run ahead of the host: ``pending`` tokens are being sampled on the device and are not in ``tokens`` yet.

    stop_string: called with each new token; returns the stop string it completed, or None. scoring: the scores to compute of
    given tokens. A request that only scores has all its tokens from the start, and samples none: the ``given`` ones follow a
    ``prompt`` whose hidden states no score needs, so that a group can share it.
    """

    id: int
    prompt: list[int]
    spec: SamplingSpec
    sample_index: int = 0
    stop_string: Callable[[int], str | None] | None = None
    group: list[Request] = field(default_factory=list)  # requests with the same prompt, this one among them
    scoring: Scoring | None = None
    given: InitVar[Sequence[int]] = ()
    adapter: Adapter | None = None
    images: ImageInputs | None = None  # encoded, by the time the request is queued

    tokens: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    computed: int = 0
    pending: int = 0
    status: Status = Status.WAITING
    slot: int = -1  # row of the static inputs while running
    block_ids: list[int] = field(default_factory=list)
    window_ids: list[int] = field(default_factory=list)  # of layers with a window, 0 where it sees none any more
    unseen_blocks: int = 0  # how many of ``window_ids``, from the first on, are 0
    first_new_block: int = 0  # block ids from here on are not yet in the static block table
    block_keys: list[bytes] = field(default_factory=list)
    offered_blocks: int = 0  # full blocks the prefix cache has been told of
    older_kv: bool = False  # some of its KV was computed with earlier weights, or in another dtype
    started: bool = False  # has run at some time; it may be waiting again
    cached_tokens: int = 0  # prompt tokens found in the prefix cache

    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: StokerError | None = None

    def __post_init__(self, given: Sequence[int]) -> None:
        self.tokens, self.num_prompt = [*self.prompt, *given], len(self.prompt)

    @property
    def total(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def remaining(self) -> int:
        """How many tokens may still be sampled, pending ones included."""
        return self.spec.max_tokens - len(self.tokens) + self.num_prompt

    @property
    def ends_at_once(self) -> bool:
        """Whether it finishes with the plan that completes its prompt."""
        return self.spec.max_tokens == 1 and self.scoring is None

    @property
    def within_images(self) -> bool:
        """Whether tokens of images are left to compute, so that its next step is no plain decode step."""
        return self.images is not None and self.computed < self.images.end

    @property
    def launched(self) -> bool:
        """Whether nothing is left to compute: what it waits for is on its way from the device."""
        return self.remaining == self.pending and (self.scoring is None or self.scoring.launched)

    def fail(self, error: StokerError) -> None:
        """End a request that was not queued."""
        self.end("error", error)

    def end(self, reason: str | None = None, error: StokerError | None = None) -> None:
        """Finish. reason, error: where not set before. Its constraint is let go."""
        self.finish_reason, self.error = reason or self.finish_reason, error or self.error
        # Last of these: other threads, which take no lock, read the results once they see it.
        self.status = Status.FINISHED
        self.group = []  # which it is in itself: the cycle would wait for the garbage collector
        if self.spec.constraint is not None:
            self.spec = replace(self.spec, constraint=None)

    def take(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        top_logprobs: Sequence[dict[int, float]] | None,
        version: int,
        num_rows: int,
    ) -> bool:
        """Take what the steps of a plan sampled, up to a token that ends the completion; True where one did.

        A NaN log-probability fails the request. num_rows: how many requests ran with it, for the error to say.
        """
        if not math.isnan(sum(logprobs)) and self._take_all(tokens, logprobs, version):
            return False
        for step, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            if math.isnan(logprob):
                self.finish_reason = "error"
                self.error = RequestFailedError(
                    f"the model gave NaN logits at position {len(self.tokens)} under weight version {version}, in step "
                    f"{step + 1} of a plan of {num_rows} rows: check the weights and the learning rate; the engine and its "
                    "other requests go on"
                )
                return True
            if top_logprobs is not None and self.spec.top_logprobs:  # a step has as many as any of its rows asks for
                self.top_logprobs.append(dict(islice(top_logprobs[step].items(), self.spec.top_logprobs)))
            if self._append(token, logprob, version):
                return True
        return False

    def _take_all(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> bool:
        """Take all tokens at once where none of them can end the completion; else False, and nothing is taken."""
        if self.stop_string is not None or self.spec.top_logprobs or self.remaining <= len(tokens):
            return False
        if not self.spec.stop_ids.isdisjoint(tokens):
            return False
        self.tokens += tokens
        self.logprobs += logprobs
        self.weight_versions += [version] * len(tokens)
        return True

    def _append(self, token: int, logprob: float, version: int) -> bool:
        """Take a sampled token; True when it ends the completion."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.weight_versions.append(version)
        # A stop string is looked for at every token, so that the checker sees them all.
        matched = self.stop_string(token) if self.stop_string is not None else None
        may_stop = self.num_output > self.spec.min_tokens
        if (may_stop or self.spec.constraint is not None) and token in self.spec.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif may_stop and matched is not None:
            self.finish_reason, self.stop_reason = "stop", matched
        elif self.remaining <= 0:
            self.finish_reason = "length"
        return self.finish_reason is not None
