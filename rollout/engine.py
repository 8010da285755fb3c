"""The rollout engine: what joins a live model, the engine core and the user's requests."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from stoker.engine.device import runtime_for
from stoker.kernels.errors import EngineStateError
from stoker.rollout import assembly, sizing
from stoker.rollout.adapters import LIVE, AdapterChoice, Adapters
from stoker.rollout.config import EngineConfig
from stoker.rollout.engine_state import EngineState
from stoker.rollout.generation import Generation
from stoker.rollout.handles import RolloutHandle, wait
from stoker.rollout.loading import load_model
from stoker.rollout.lockstep import Lockstep
from stoker.rollout.loop import Loop
from stoker.rollout.memory import TAGS, EngineMemory, check_tags, tags_of
from stoker.rollout.outputs import RolloutBatch, TokenLogprobs
from stoker.rollout.prompts import Prompt, Prompts, tokenizer_of
from stoker.rollout.sampling_params import SamplingParams
from stoker.rollout.stats import EngineStats, stats_of
from stoker.rollout.updates import WeightUpdates
from stoker.weight_sync.checksum import WeightReport
from stoker.weight_sync.rank_agreement import in_step
from stoker.weight_sync.receiving import NewWeights


class RolloutEngine:
    """Samples completions and their log-probabilities from a live model, on the model's own parameters.

    model: a transformers causal language model, plain, a ``PeftModel``, or as DDP, FSDP, DeepSpeed or ``torch.compile``
    wrap it. Where this rank holds all of its parameters, in the engine's dtype, the engine borrows them and copies
    none; the only change to the model is then where q, k, v and gate, up weights lie (side by side, so that they are
    one matmul each), and ``close`` undoes that. Of shards, and for another dtype, the engine keeps a copy of the
    weights. config: the engine's settings. tokenizer: for text and chat prompts, ``text`` and stop strings;
    a multimodal model's processor, for chats with images too.

    Raises ``UnsupportedModelError`` or ``InvalidConfigError``; the model is then as it was.
    """

    @torch.inference_mode(False)  # or the buffers made here could not be written to outside of the caller's
    def __init__(self, model: nn.Module, *, config: EngineConfig | None = None, tokenizer: Any = None) -> None:
        self.config = assembly.check_config(config) or EngineConfig()
        self._ranks = Lockstep(self.config)
        with self._ranks.together(assembly.BUILDING):
            assembly.check_arguments(model, tokenizer)
            self.processor, self.tokenizer = tokenizer, tokenizer_of(tokenizer)
        everyone = partial(assembly.on_all_ranks, model, self.config, self._ranks)
        try:
            with in_step(model):
                with everyone():
                    self._binding = assembly.bind(self.config, model, self._ranks)
                    self.runtime = runtime_for(self._binding.source.device)
                with everyone():
                    self.max_model_len = sizing.max_model_len(self.config, self._binding)
                    self._binding.build(self.max_model_len)
                self.config = assembly.settled(self.config, self._binding, self.runtime, self._ranks)
                with everyone():
                    self._build()
        except BaseException:  # an interrupt, say, up to the last line: nobody has the engine, to close it
            if hasattr(self, "_binding"):
                self._binding.release()
            raise

    def _build(self) -> None:
        self.config = sizing.with_room_for_states(self.config, self._binding, self.runtime, self.max_model_len)
        sized = sizing.with_rows_that_can_run(self.config, self._binding, self.runtime, self.max_model_len)
        self._kv = sizing.kv_cache(sized, self._binding, self.runtime, self.max_model_len)
        self._adapters = Adapters(self._binding)
        self.core = assembly.core(sized, self._binding, self.runtime, self._kv, self.max_model_len, self._adapters)
        self._loop = Loop(self.core, self._adapters.runnable, self._binding.in_order)
        self._updates = WeightUpdates(self._binding, self.core, self._adapters, self._loop)
        self._memory = EngineMemory(self.core, self._kv, self._binding, self._adapters)
        self._requests = assembly.requests(
            self.config, self._binding, self._kv, self.max_model_len, self.core, self._loop, self.tokenizer
        )
        self._state = EngineState(self._loop, self._memory)
        self._generation = Generation(
            self._requests, self._adapters, self._updates, self._loop, self._state, self.processor, self._ranks
        )
        self._binding.fuse()
        self.core.runner.bind(self._binding.shell)
        self._adapters.refresh()

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], *, config: EngineConfig | None = None, tokenizer: Any = "auto"
    ) -> Self:
        """An engine on ``path``, a local folder of a model's config and safetensors (one file or a sharded index).

        On a CPU the weights stay memory-mapped where ``config.dtype`` is that of the files; on CUDA they go straight to
        the device. tokenizer: ``"auto"`` loads the folder's own where it has one.
        """
        config = config or EngineConfig()
        model, tokenizer, config = load_model(path, config, tokenizer)
        engine = cls(model, config=config, tokenizer=tokenizer)
        # Nobody trains it: or each request that finds the engine idle would read all weights first.
        engine._binding.held_elsewhere = False
        return engine

    @property
    def model(self) -> nn.Module:
        """The live model, as it was given."""
        return self._binding.model

    # -- generation ----------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def generate_batch(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        attention_mask: Tensor | None = None,
        adapter: AdapterChoice | Sequence[AdapterChoice] = LIVE,
        progress_bar: bool = False,
    ) -> RolloutBatch:
        """Sample completions of every prompt.

        prompts: list of str, of token-id lists, of chats, or int64 [B, T] with ``attention_mask`` [B, T] (all tokens
        count without one); arrays and integers of numpy and torch count as lists and integers. A prompt with images is a
        chat, or a mapping of what the model's processor makes of it (``input_ids`` [1, T], ``pixel_values`` and so on, as
        the model's ``forward`` takes them). sampling_params: one for all, or one per prompt. adapter: ``LIVE`` for the
        model as the trainer would run it now, None for the bare base, or the name of an adapter; one for all, or one per
        prompt. progress_bar: of finished sequences, on stderr. Consecutive equal prompts are computed once. Weights that
        were changed or moved since the last call are noticed, as by ``update_weights``; those of a sharded model are not.

        Returns outputs in the order of the prompts. Raises before any work starts: ``InvalidRequestError`` naming the
        prompt, ``EngineStateError`` while asleep, closed or paused. A request that fails while running (NaN logits)
        carries its error in its output; the others go on. After an interrupt (Ctrl-C) the engine is usable and holds no
        block of the call.
        """
        return self._generation.generate(prompts, sampling_params, attention_mask, adapter, progress_bar)

    @torch.inference_mode(False)
    def score(
        self,
        sequences: Prompts | RolloutBatch,
        *,
        attention_mask: Tensor | None = None,
        start: int | Sequence[int] | Tensor = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        entropy: bool = False,
        adapter: AdapterChoice | Sequence[AdapterChoice] = LIVE,
        progress_bar: bool = False,
        on_scored: Callable[[int, TokenLogprobs], None] | None = None,
    ) -> list[TokenLogprobs]:
        """Log-probability of each given token from ``start`` on, under ``softmax(logits / temperature)``.

        sequences: list of str, of token-id lists, int64 [B, T] with ``attention_mask`` [B, T] (prompt and completion
        side by side, padded anywhere), of a processor's mappings where they have images, or a ``RolloutBatch``, whose
        completions are scored one after the other, each from its first token (one that was aborted before it has no
        scores). start: the first token scored, counted without padding; one for all or one per sequence
        (``prompt_mask.sum(1)``, say). The first token of a sequence has no log-probability. top_k: how many of the most
        likely tokens to give at each position; entropy: of the distribution at each position. adapter: as for
        ``generate_batch``, and progress_bar too. on_scored: called with each sequence's number and result, in order, as soon as
        it and those before it are scored, so that a long call can be followed; an exception in it ends the call.

        Consecutive sequences with the same tokens before ``start`` compute them once; with the prefix cache, so do any
        sequences with what they begin with, scores included. Tensors are on the host, in the order of the sequences;
        memory beyond the KV cache is bounded by ``EngineConfig.score_chunk_tokens``.

        Raises as ``generate_batch`` does, naming the sequence. Where the model gives NaN, that sequence has NaN there
        and carries an ``error``; the others do not.
        """
        return self._generation.score(
            sequences, attention_mask, start, temperature, top_k, entropy, adapter, progress_bar, on_scored
        )

    @torch.inference_mode(False)
    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        adapter: AdapterChoice = LIVE,
    ) -> RolloutHandle:
        """Queue one prompt and return at once; nothing runs until somebody waits for a result.

        Whoever waits (``RolloutHandle.result``, iteration, ``wait``, ``generate_batch``) steps the engine for all. Any
        thread may submit and wait. The beginning that a prompt shares with an earlier one is read from the prefix
        cache: a next turn, prompt and completion and tool output together, costs little more than its new tokens.
        sampling_params, adapter: as for ``generate_batch``. Raises as that does, before any work starts.
        """
        return self._generation.submit(prompt, sampling_params, adapter)

    def wait(
        self, handles: Iterable[RolloutHandle], *, share: float = 1.0, timeout: float | None = None
    ) -> tuple[list[RolloutHandle], list[RolloutHandle]]:
        """Step until ``share`` of the handles (0 to 1) has finished, or ``timeout`` seconds are over.

        Returns those that have, and those that have not; these keep their tokens and KV and go on at the next wait. A
        share of 0 is one step, and so is a ``timeout`` of 0. ``RolloutBatch([h.result() for h in finished])`` makes a
        batch of them.
        """
        return wait(self._loop, handles, share, timeout)

    def pause(self, mode: Literal["keep", "wait", "abort"] = "keep", *, owner: Hashable = None) -> None:
        """Stop between two steps, so that weights can be updated or memory be given back with requests under way.

        mode: "keep" leaves them where they are; "wait" lets them finish first, and no other begin meanwhile; "abort" ends
        them, with the tokens they have. New requests queue until ``resume``, and those of other threads do not look at the
        weights before it. owner: whose pause it is, where several parties pause: nothing runs before each of them has resumed.
        """
        self._state.check_open()
        self._ranks.check_pause(mode)
        self._loop.check_owner(owner)
        self._loop.pause(mode, owner)

    @torch.inference_mode(False)
    def resume(self, *, recompute: bool = False, owner: Hashable = None) -> None:
        """End this owner's pause, from any thread, and go on if no other owner has one.

        recompute: compute the KV of requests under way again, where weights changed; else they keep the old.

        Their next tokens are sampled under the new weights either way, as ``Completion.weight_versions`` shows; changes
        that nobody announced are noticed here. Raises ``EngineStateError`` where they find the engine asleep, or weights
        that are incomplete.
        """
        self._loop.check_owner(owner)
        with self._loop.gate("resume"):
            self._state.check_open()
            # Else somebody may be changing the weights.
            if self._loop.goes_on_without(owner) and self._loop.has_work("resume"):
                self._state.check_ready()
                self._binding.check_ready()
                self._updates.notice(recompute=recompute)
            self._loop.resume(recompute=recompute, owner=owner)

    @property
    def is_paused(self) -> bool:
        """Whether ``pause`` was called, by any thread for any owner, and ``resume`` not yet."""
        return self._loop.is_paused

    # -- weights -------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def update_weights(self, weights: NewWeights | None = None, *, version: int | None = None) -> int:
        """Take new weights into service; returns the new weight version.

        weights: None takes the model's as they are now. Where the engine runs on the trainer's tensors no byte moves,
        and parameters that were replaced or moved on their device are bound again; a mirror takes over what changed.
        Ranks of a sharded model call it together. Else: named tensors (all of them, in any floating-point dtype: a
        mapping, or (name, tensor) pairs, which may be made one by one), a safetensors file or a checkpoint folder, or a
        ``WeightTransfer`` from another process, which brings those that the engine does not hold. They are kept beside
        the weights in service until all have come, so whatever goes wrong half-way changes nothing, and then replace
        the engine's; where those are the model's own tensors, the model's. What other threads begin meanwhile goes on
        under them. version: a number above the present one; None counts up by one.

        The version goes up, cached prefixes are forgotten, in one step that an interrupt (Ctrl-C) does not cut in two.
        Raises ``WeightsMismatchError`` for what does not fit, ``WeightTransferError`` where weights did not arrive; the engine
        then keeps its weights and version (after a gather that broke off it refuses to generate until an update succeeds).
        ``WeightsMovedError`` or ``UnsupportedModelError`` where parameters changed dtype or device or the model can no longer
        be borrowed; the engine then refuses to generate. Of hundreds of modules it looks at some: whatever runs next looks
        at all, and takes what else was changed, under this version, or refuses it.
        """
        self._updates.update(weights, version, partial(self._state.check_weights, "update its weights"))
        return self.weight_version

    @property
    def weight_version(self) -> int:
        """Of the weights in service: 0 at first, and higher at every update and every change that was noticed."""
        return self.core.scheduler.weight_version

    @torch.inference_mode(False)
    def verify_weights(self) -> WeightReport:
        """Compare the weights the engine runs on with the model's as they are now, name by name, in the engine's dtype.

        By checksums made on the device, or by addresses where the engine runs on the trainer's tensors. Adapters that were
        loaded from other models are compared with these. Ranks of a sharded model, of the engine's or of another one with
        such an adapter, call it together. After an update from elsewhere it shows where that differs from the model in this
        process; weights that ``sleep(level=3)`` dropped are mismatched until a rollout or an update takes them anew.
        Raises ``EngineStateError`` while the weights sleep.
        """
        return self._updates.verify(partial(self._state.check_weights, "verify its weights"))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names that ``adapter=`` takes: those on the live model when it was last looked at, and those loaded."""
        return tuple(self._adapters.names)

    @torch.inference_mode(False)
    def load_adapter(self, name: str, source: Any) -> None:
        """Know one more adapter, or another one under the name of one loaded before; requests under way go on.

        source: a ``PeftModel`` with the same base (its active adapter), or ``(PeftModel, adapter name)``: its tensors
        are read where they are, and changes are seen as those of the engine's own model are. What it has in parts is
        gathered, now and at ``update_weights``, which ranks call together. ``(state dict, LoraConfig)``, or the folder
        of a saved adapter: copied, to the host where that is, and to the device while a request may use it.

        Raises ``UnsupportedModelError`` for what the engine does not run and what does not fit its model,
        ``EngineStateError`` where requests use the adapter of that name, and while the weights of a trainer that shards
        adapters sleep. Nothing is changed then.
        """
        self._updates.load_adapter(name, source, self._state.check_open)

    def unload_adapter(self, name: str) -> None:
        """Forget the adapter loaded as ``name``.

        Raises ``InvalidRequestError`` where there is none, ``EngineStateError`` while requests use it.
        """
        self._updates.unload_adapter(name, self._state.check_open)

    # -- memory --------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def sleep(self, level: int = 1, tags: str | Iterable[str] | None = None) -> None:
        """Give memory back to the trainer. What sleeps already: nothing happens.

        level: 1 gives back the KV cache, and attention's workspace and patterns' tables where no graph needs them; 2 also
        graphs (with these) and weights of the engine's own (weights that are the trainer's stay), of which those that
        waking cannot make anew from the model, of shards or from elsewhere, are kept in host memory, and copies of
        adapters that lie elsewhere; 3 drops those weights, which the next call takes from the model anew:
        ``update_weights`` for paused requests, shards and weights from elsewhere, any other for the rest. tags: any of
        "kv_cache", "weights", "graphs", in place of those of the level. Paused requests compute their KV again after waking.
        """
        chosen = tags_of(level, tags)
        with self._loop.gate("sleep"):
            self._state.check_open()
            self._loop.check_idle("sleep")
            self._loop.do("sleep", lambda: self._memory.sleep(chosen, drop_weights=level == 3))

    @torch.inference_mode(False)
    def wake_up(self, tags: str | Iterable[str] | None = None) -> None:
        """Take memory again: all of it, or what ``tags`` name, so that weights can be updated before the rest.

        Graphs are captured again when they are next used; where the KV cache keeps its addresses (CUDA) and only it
        slept, they still hold. Raises ``EngineStateError`` where memory is short; it can be tried again.
        """
        with self._loop.gate("wake up"):
            self._state.check_open()
            self._memory.wake(TAGS if tags is None else check_tags(tags))  # nothing runs while any of it sleeps

    @contextmanager
    def sleeping(self, level: int = 1) -> Iterator[None]:
        """Asleep within: ``with engine.sleeping(): trainer.step()``. level: of ``sleep``.

        An exception within goes on, whether waking works or not.
        """
        self.sleep(level)
        try:
            yield
        except BaseException as error:
            try:
                self.wake_up()
            except Exception as short:
                error.add_note(f"and the rollout engine is still asleep: {short}")
            raise
        self.wake_up()

    @property
    def is_sleeping(self) -> bool:
        """Whether anything sleeps, so that nothing can be generated."""
        return bool(self._memory.asleep)

    def stats(self) -> EngineStats:
        """A snapshot; costs nothing worth measuring. Requests whose handles were dropped hold nothing any more."""
        self._loop.settle()
        return stats_of(self._memory, self._updates)

    @torch.inference_mode(False)  # or the model could not be trained any more
    def close(self) -> None:
        """Free everything and give the model's weights storages of their own again. The engine is of no use after."""
        with self._loop.gate("close"):
            if not self._state.closed:
                self._loop.do("close", self.core.abort_all)
                self._memory.sleep(TAGS, drop_weights=True)
                self._state.closed = True
            self.core.release()  # or whoever keeps the engine would keep the memory that parameters lay in
            self._adapters.release()
            self._binding.release()  # which may break off, and goes on when called again

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise EngineStateError(
            "an engine cannot be copied, pickled or sent to another process, as it is bound to its model's memory: build another "
            "one where the other model is"
        )

    def __repr__(self) -> str:
        source = self._binding.source
        states = "asleep" if self.is_sleeping else None, self._loop.pause_now
        now = ["closed"] if self._state.closed else [state for state in states if state]
        what = [type(source.module).__name__, source.kind, str(source.device), f"weight version {self.weight_version}"]
        return f"{type(self).__name__}({', '.join([*what, *now])})"
