"""A trainer and an engine on its model, which do anything in any order, and the plain forward that every token has to come from.

A witness notes, plan by plan, under which weights each request's keys and values were computed. Where weights changed in
between and these were kept, the plain forward goes over the same tokens with a cache of its own, under the old weights and
then under the new ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import torch
from adapted import shake, state_dict, with_lora
from families import draw, make_model
from family_fields import VOCAB
from oracle import cache_of
from torch import Tensor

from stoker.engine.batch import Batch
from stoker.engine.plan import Plan
from stoker.engine.request import Request
from stoker.kernels.errors import EngineStateError
from stoker.kernels.reference.sampling import gumbel_noise
from stoker.rollout import LIVE, EngineConfig, RolloutEngine, RolloutHandle, RolloutOutput, SamplingParams

EOS = [1, 20]
CLOSE = {"rtol": 0, "atol": 3e-4}
LOADED = "loaded"  # an adapter that comes and goes beside the live one

Span = tuple[int, int, int]  # which weights, and from which token to which


class History:
    """The weights there have been, and a model of its own in fp32 that runs any of them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._twin = deepcopy(model).float().eval()
        self.base: list[dict[str, Tensor]] = []  # one object for as long as nothing changes
        self._loaded: list[dict[str, Tensor]] = []
        self.loaded: dict[str, Tensor] = {}  # the loaded adapter's tensors, by the names of the live one's

    def now(self) -> int:
        """The number of the weights as they are now."""
        same = bool(self.base) and self.unchanged()
        if not (same and self.loaded is self._loaded[-1]):
            new = {name: p.detach().clone() for name, p in self._model.named_parameters()}
            self.base.append(self.base[-1] if same else new)
            self._loaded.append(self.loaded)
        return len(self.base) - 1

    def unchanged(self) -> bool:
        """Whether the model has the weights that it had last."""
        return all(torch.equal(p, self.base[-1][name]) for name, p in self._model.named_parameters())

    @torch.no_grad()
    def logits(self, spans: list[Span], tokens: list[int], adapter: str | None) -> Tensor:
        """Of each token in the spans, float64 [tokens, vocabulary]."""
        found: list[Tensor] = []
        before: dict[str, Any] = {}
        bare = adapter is None and hasattr(self._twin, "peft_config")
        with self._twin.disable_adapter() if bare else nullcontext():
            for number, first, end in spans:
                weights = self.base[number] | (self._loaded[number] if adapter == LOADED else {})
                for name, parameter in self._twin.named_parameters():
                    parameter.copy_(weights[name])
                # One by one over a cache: not every family's own forward goes on from a state with several.
                for a, b in pairwise(range(first, end + 1) if before else [first, end]):
                    out = self._twin(torch.tensor([tokens[a:b]]), use_cache=True, **before)
                    before = cache_of(out)
                    found.append(out.logits[0].double())
        return torch.cat(found)


@dataclass
class Turn:
    """From where a request gets its blocks to where it loses them: what was computed, and the places that were sampled."""

    spans: list[Span]
    sampled: list[int] = field(default_factory=list)

    def upto(self, end: int) -> list[Span]:
        """The spans up to a token, those of the same weights in one."""
        found: list[Span] = []
        for number, first, last in self.spans:
            if found and found[-1][0] == number:
                number, first, _ = found.pop()
            if first < end:
                found.append((number, first, min(last, end)))
        return found


class Witness:
    """Sees every plan of an engine before it runs, and may interrupt it there."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.turns: dict[int, list[Turn]] = {}  # of requests
        self.weights = 0  # the number of those that run now
        self.interrupt_in = 0  # plans; 0: never
        self.added: list[Request] = []  # last
        self._fill, self._add = engine.core.inputs.fill, engine.core.add
        engine.core.inputs.fill, engine.core.add = self.fill, self.add  # type: ignore[method-assign]

    def add(self, requests: Iterable[Request]) -> None:
        self.added = list(requests)
        self._add(self.added)

    def fill(self, plan: Plan) -> Batch:
        self.interrupt_in -= 1
        if self.interrupt_in == 0:
            raise KeyboardInterrupt
        for request, first, new, samples in zip(
            plan.requests, plan.starts, plan.num_new, plan.num_samples, strict=True
        ):
            if request in plan.admitted:  # others have computed what it begins with, under the same weights
                spans = [(self.weights, 0, first)] if first else []
                self.turns.setdefault(request.id, []).append(Turn(spans))
            turn = self.turns[request.id][-1]
            assert first == (turn.spans[-1][2] if turn.spans else 0), "a token is left out, or computed again"
            turn.spans.append((self.weights, first, first + new + max(0, samples - 1)))
            turn.sampled += range(first + new, first + new + samples)
        return self._fill(plan)


@dataclass
class Asked:
    prompt: list[int]
    params: SamplingParams
    choice: Any
    adapter: str | None  # the one it means
    requests: list[Request] = field(default_factory=list)


class Day:
    """Random work of a trainer with one engine. ``step`` does something, and proves all that has ended since.

    dtype: of the trainer's parameters; the engine computes in fp32. adapted: it trains an adapter. fields: of the
    engine's configuration.
    """

    def __init__(self, seed: int, family: str, dtype: torch.dtype, adapted: bool, **fields: Any) -> None:
        self.rng = random.Random(seed)
        self.adapted, self.model = adapted, make_model(family, seed)
        self.model.generation_config.eos_token_id = EOS
        if adapted:
            self.model = with_lora(self.model, target_modules=["q_proj", "down_proj"], use_dora=seed % 2 == 1)
        self.model.to(dtype)
        small = {"block_size": 4, "max_num_batched_tokens": 12, "max_num_seqs": 4, "max_model_len": 48, "max_loras": 1}
        self.engine = RolloutEngine(self.model, config=EngineConfig(dtype=torch.float32, **(small | fields)))
        self.history, self.witness = History(self.model), Witness(self.engine)
        self.history.now()
        self.handles: list[tuple[RolloutHandle, Asked]] = []
        self.proved = self.kept = 0  # tokens, and those over keys and values of several weights
        self._of_version: dict[int, dict[str, Tensor]] = {}
        self._interrupted = False

    # -- what happens ------------------------------------------------------------------------------------------------

    def step(self) -> None:
        doings = [self.rollout, self.submit, self.submit, self.go_on, self.go_on, self.pause, self.pause, self.pause]
        doings += [self.score, self.train, self.abort, self.sleep, self.adapter, self.interrupt]
        self.rng.choice(doings)()
        self.prove_ended()
        assert self.history.unchanged(), "the engine has written to the model"
        self.engine.core.scheduler.check()
        if not self.engine.core.has_work:
            assert self.engine.stats().num_free_kv_blocks == self.engine.stats().num_kv_blocks

    def end(self) -> None:
        self.engine.wait([handle for handle, _ in self.handles])
        self.prove_ended()
        assert not self.handles
        self.engine.close()
        assert self.history.unchanged()

    def _ask(self) -> Asked:
        rng = self.rng
        params = SamplingParams(
            n=rng.choice((1, 1, 3)),
            temperature=rng.choice((0, 0.7, 1.0)),
            max_tokens=rng.randint(1, 14),
            logprobs_mode=rng.choice(("scaled", "raw")),
            seed=rng.choice((None, 7)),
        )
        choice = rng.choice([LIVE, None, *self.engine.adapters])
        return Asked(self._text(), params, choice, self._meant(choice))

    def _text(self) -> list[int]:
        begin = draw(self.rng.randrange(2), 20)[: self.rng.choice((1, 3, 12, 20))]
        return begin + draw(self.rng.randrange(99), self.rng.randint(1, 5))

    def _meant(self, choice: Any) -> str | None:
        return choice if choice is not LIVE else "default" if self.adapted else None

    def rollout(self) -> None:
        asked = [self._ask() for _ in range(self.rng.randint(1, 4))]
        prompts, params, choices = zip(*((a.prompt, a.params, a.choice) for a in asked), strict=True)
        batch = self.engine.generate_batch(list(prompts), params, adapter=choices)
        added = iter(self.witness.added)
        for output, one in zip(batch, asked, strict=True):
            one.requests = list(islice(added, one.params.n))
            self.prove(output, one)

    def interrupt(self) -> None:
        """Before one of a rollout's plans runs: that ends whatever is under way."""
        self.witness.interrupt_in, self._interrupted = self.rng.randint(1, 6), True
        with suppress(KeyboardInterrupt):
            self.rollout()
        self.witness.interrupt_in = 0
        self.prove_ended()
        self._interrupted = False

    def submit(self) -> None:
        asked = self._ask()
        handle = self.engine.submit(asked.prompt, asked.params, adapter=asked.choice)
        asked.requests = self.witness.added
        self.handles.append((handle, asked))

    def go_on(self) -> None:
        self.engine.wait([handle for handle, _ in self.handles], share=self.rng.choice((0, 0, 0, 0, 0.3)))

    def abort(self) -> None:
        for handle, _ in self.handles[:1]:
            handle.abort()
            assert handle.done

    def score(self) -> None:
        texts = [self._text() for _ in range(self.rng.randint(1, 3))]
        choice = self.rng.choice([LIVE, None, *self.engine.adapters])
        for text, scores in zip(texts, self.engine.score(texts, adapter=choice), strict=True):
            logits = self.history.logits([(self.witness.weights, 0, len(text))], text, self._meant(choice))
            expected = logits[:-1].log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0]
            torch.testing.assert_close(scores.logprobs.double(), expected, **CLOSE)

    def train(self) -> None:
        """With nothing under way: announced, or for the next call to notice."""
        self.engine.wait([handle for handle, _ in self.handles])
        self.change()
        if self.rng.random() < 0.5:
            self.engine.update_weights()

    def pause(self) -> None:
        """In the middle of something, and go on under other weights maybe."""
        self.submit()
        self.go_on()
        self.engine.pause(self.rng.choice(("keep", "keep", "keep", "wait", "abort")))
        doings = [self.change, self.change, self.change, self.engine.update_weights, self.submit, self.sleep]
        for _ in range(self.rng.randint(1, 2)):
            self.rng.choice(doings)()
        self.engine.resume(recompute=self.rng.random() < 0.3)

    @torch.no_grad()
    def change(self) -> None:
        for parameter in [p for p in self.model.parameters() if self.rng.random() < 0.4]:
            new = parameter * self.rng.choice((0.9, 1.1))
            if self.rng.random() < 0.3:
                parameter.data = new  # which the engine has to find
            else:
                parameter.copy_(new)
        self.witness.weights = self.history.now()

    def sleep(self) -> None:
        if self.engine.core.has_work and not self.engine.is_paused:
            return
        self.engine.sleep(self.rng.choice((1, 2)))
        for tag in self.rng.sample(("weights", "kv_cache"), 2):
            self.engine.wake_up(tag)

    def adapter(self) -> None:
        """Load one, in place of another of its name, or forget it; refused where requests use it."""
        if not self.adapted:
            return
        used = any(r.adapter is not None and r.adapter.name == LOADED for r in self.engine.core.under_way)
        with suppress(EngineStateError):
            if LOADED in self.engine.adapters and self.rng.random() < 0.3:
                self.engine.unload_adapter(LOADED)
            else:
                other = deepcopy(self.model)
                shake(other, self.rng.randrange(1000))
                self.engine.load_adapter(LOADED, (state_dict(other), other.peft_config["default"]))
                self.history.loaded = {n: p.detach().clone() for n, p in other.named_parameters() if "lora_" in n}
            assert not used
        self.witness.weights = self.history.now()

    # -- proof -------------------------------------------------------------------------------------------------------

    def prove_ended(self) -> None:
        for handle, asked in [pair for pair in self.handles if pair[0].done]:
            self.handles.remove((handle, asked))
            self.prove(handle.result(), asked)

    def prove(self, output: RolloutOutput, asked: Asked) -> None:
        """Every token of a result is of the weights that ran, and what its seed draws from these."""
        assert output.error is None or self._interrupted
        for completion, request in zip(output.completions, asked.requests, strict=True):
            tokens = asked.prompt + completion.token_ids
            places = list[int]()
            for turn in self.witness.turns.pop(request.id, []):
                mine = [place for place in turn.sampled if place < len(tokens)]
                if mine:
                    spans = turn.upto(len(tokens))
                    self._prove_tokens(spans, mine, tokens, completion, request, asked)
                    places += mine
            assert places == list(range(len(asked.prompt), len(tokens)))
            ended = [token in EOS for token in completion.token_ids]
            assert not any(ended[:-1])
            assert completion.finish_reason == "abort" or any(ended) == (completion.finish_reason == "stop")
            if completion.finish_reason == "length":
                assert len(completion.token_ids) == asked.params.max_tokens
            self.proved += len(places)

    def _prove_tokens(
        self, spans: list[Span], places: list[int], tokens: list[int], completion: Any, request: Any, asked: Asked
    ) -> None:
        params, at = asked.params, torch.tensor(places)
        logits = self.history.logits(spans, tokens, asked.adapter)[at - 1]
        chosen, scaled = torch.tensor(tokens)[at][:, None], logits / (params.temperature or 1.0)
        own = slice(places[0] - len(asked.prompt), places[-1] + 1 - len(asked.prompt))

        expected = (logits if params.logprobs_mode == "raw" else scaled).log_softmax(-1).gather(1, chosen)[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs[own]).double(), expected, **CLOSE)
        drawn = scaled
        if params.temperature:
            seed, sample = (torch.full_like(at, number) for number in (request.spec.seed, completion.index))
            drawn = scaled + gumbel_noise(seed, at, sample, VOCAB)[:, :VOCAB]
        assert (drawn.gather(1, chosen)[:, 0] > drawn.max(-1).values - 1e-3).all(), "another token was to be drawn"

        ran = [next(number for number, _, end in spans if end >= place) for place in places]
        for version, number in zip(completion.weight_versions[own], ran, strict=True):
            assert self._of_version.setdefault(version, self.history.base[number]) is self.history.base[number]
        self.kept += sum(number != spans[0][0] for number in ran)
