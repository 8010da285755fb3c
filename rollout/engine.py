"""The rollout engine: what joins a live model, the engine core and the user's requests."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from tqdm import tqdm

from stoker.engine.core import EngineCore
from stoker.engine.device import runtime_for
from stoker.engine.kv_cache import KVCache
from stoker.engine.request import Request, SamplingSpec
from stoker.engine.runner import EagerStep
from stoker.engine.sampler import LOGPROBS_MODES, Sampler
from stoker.engine.scheduler import Scheduler
from stoker.engine.step_inputs import StepInputs
from stoker.kernels.errors import EngineStateError, InvalidConfigError, InvalidRequestError
from stoker.rollout.binding import ModelBinding
from stoker.rollout.config import EngineConfig
from stoker.rollout.outputs import Completion, EngineStats, RolloutBatch, RolloutOutput
from stoker.rollout.prompts import check_prompt, to_token_ids
from stoker.rollout.sampling_params import SamplingParams
from stoker.rollout.stop_strings import StopStringChecker, completion_text
from stoker.weight_sync.checksum import WeightReport
from stoker.weight_sync.transport import NewWeights
from stoker.weight_sync.version import uninterrupted

_SEED_MASK = 2**63 - 1


class RolloutEngine:
    """Samples completions and their log-probabilities from a live model, on the model's own parameters.

    model: a transformers causal language model in memory, plain or inside DDP or ``torch.compile``; the engine borrows
    its parameters and copies none. The only change to it is where q, k, v and gate, up weights lie (side by side, so
    that they are one matmul each); ``close`` undoes that. tokenizer: for text and chat prompts, ``text`` and stop
    strings.

    Raises ``UnsupportedModelError`` or ``InvalidConfigError``; the model is then as it was.
    """

    @torch.inference_mode(False)  # or the buffers made here could not be written to outside of the caller's
    def __init__(self, model: nn.Module, *, config: EngineConfig | None = None, tokenizer: Any = None) -> None:
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer
        self._closed = False
        self._busy = False
        self._interrupted = False
        self._last_update_seconds = 0.0
        self._last_update_bytes = 0
        self._requests_made = 0
        self._binding = ModelBinding(
            model, self.config.dtype, self.config.device, check_finite=self.config.check_finite_weights
        )
        self._check_config()
        self.runtime = runtime_for(self._binding.source.device)
        self.max_model_len = self._max_model_len()
        self._binding.build(self.max_model_len)
        self._eos_ids = self._find_eos_ids()
        self._block_bytes = KVCache.block_bytes(self._binding.shapes, self.config.block_size)
        num_blocks = self._num_blocks()
        try:
            self._kv = KVCache(self._binding.shapes, num_blocks, self.config.block_size, self.runtime)
        except (RuntimeError, MemoryError) as error:
            raise InvalidConfigError(
                f"{self._no_memory(num_blocks)}. Free some or set a smaller EngineConfig.kv_cache_memory"
            ) from error
        self.core = self._new_core()
        self._binding.fuse()

    def _new_core(self) -> EngineCore:
        binding = self._binding
        block_size, num_blocks = self.config.block_size, self._kv.num_blocks
        scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            decode_window=self.config.decode_window,
            enable_prefix_caching=self.config.enable_prefix_caching,
        )
        vocab = binding.shell.vocab
        inputs = StepInputs(
            binding.ops,
            self.runtime,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_blocks=min(-(-self.max_model_len // block_size), num_blocks),
            block_size=block_size,
            token_bytes=max(shape.token_bytes for shape in binding.shapes),
            vocab=vocab,
        )
        sampler = Sampler(binding.ops, self.config.max_num_seqs, vocab, binding.source.device)
        return EngineCore(scheduler, inputs, EagerStep(binding.shell, sampler, self._kv, binding.ops))

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], *, config: EngineConfig | None = None, tokenizer: Any = "auto"
    ) -> Self:
        """An engine on a local folder of safetensors (one file or a sharded index).

        On a CPU the weights stay memory-mapped where ``config.dtype`` is that of the files; on CUDA they go straight to
        the device. tokenizer: ``"auto"`` loads the folder's own where it has one.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        config = config or EngineConfig()
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise InvalidConfigError(f"{path} is no model folder (no config.json in it): give a local folder")
        device = config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                path, dtype=config.dtype, device_map={"": device}, local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise InvalidConfigError(f"{path} cannot be loaded: {error}") from error
        if info["missing_keys"]:
            lacking = ", ".join(sorted(info["missing_keys"])[:4])
            raise InvalidConfigError(f"{path} lacks {len(info['missing_keys'])} of the model's tensors: {lacking}")
        if tokenizer == "auto":
            has_one = any(os.path.isfile(os.path.join(path, f)) for f in ("tokenizer.json", "tokenizer_config.json"))
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True) if has_one else None
        return cls(model.eval(), config=config, tokenizer=tokenizer)

    # -- generation ----------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def generate_batch(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[dict[str, Any]]] | Tensor,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        attention_mask: Tensor | None = None,
        progress_bar: bool = False,
    ) -> RolloutBatch:
        """Sample completions of every prompt.

        prompts: list of str, of token-id lists, of chats, or int64 [B, T] with ``attention_mask`` [B, T] (all tokens
        count without one). sampling_params: one for all, or one per prompt. Consecutive equal prompts are computed
        once. Weights that were changed or moved since the last call are noticed, as by ``update_weights``.

        Returns outputs in the order of the prompts. Raises before any work starts: ``InvalidRequestError`` naming the
        prompt, ``EngineStateError`` while asleep, closed or inside another call. A request that fails while running
        (NaN logits) carries its error in its output; the others go on. After an interrupt (Ctrl-C) the engine is
        usable and holds no block of the call.
        """
        self._check_ready()
        ids = to_token_ids(prompts, attention_mask, self.tokenizer)
        params = self._params_per_prompt(sampling_params, len(ids))
        for row, (prompt, p) in enumerate(zip(ids, params, strict=True)):
            check_prompt(row, prompt, self._binding.shell.vocab, self.max_model_len)
            self._check_params(row, prompt, p)
        self._notice_changes()
        by_prompt = self._make_requests(ids, params)
        requests = [r for rs in by_prompt for r in rs]
        try:
            self._busy = True
            if self._interrupted:  # a second interrupt came before the first was dealt with
                self.core.scheduler.abort_all()
            self._interrupted = True
            self.core.add(requests)
            with tqdm(total=len(requests), unit="completion", disable=not progress_bar) as progress:
                while self.core.has_work:
                    progress.update(len(self.core.step()))
            self._interrupted = False
        except BaseException:
            self.core.scheduler.abort_all()
            self._interrupted = False
            raise
        finally:
            self._busy = False
        return RolloutBatch([self._output(prompt, rs) for prompt, rs in zip(ids, by_prompt, strict=True)])

    def _params_per_prompt(self, params: Any, count: int) -> list[SamplingParams]:
        params = SamplingParams() if params is None else params
        if isinstance(params, SamplingParams):
            return [params] * count
        if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
            raise InvalidRequestError("sampling_params: give one SamplingParams, or a list with one per prompt")
        if len(params) != count:
            raise InvalidRequestError(f"{len(params)} sampling_params for {count} prompts: give one, or one per prompt")
        return list(params)

    def _check_params(self, row: int, prompt: list[int], params: SamplingParams) -> None:
        vocab = self._binding.shell.vocab
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError(
                f"prompt {row}: stop strings need a tokenizer: RolloutEngine(model, tokenizer=...)"
            )
        if params.logprobs > vocab:
            raise InvalidRequestError(f"prompt {row}: logprobs={params.logprobs} and the vocabulary has {vocab} tokens")
        if any(not 0 <= t < vocab for t in params.stop_token_ids):
            raise InvalidRequestError(f"prompt {row}: stop_token_ids has an id outside 0 to {vocab - 1}")
        longest = min(len(prompt) + params.max_tokens, self.max_model_len)
        room = (self._kv.num_blocks - 1) * self.config.block_size
        if longest > room:
            raise InvalidRequestError(
                f"prompt {row} may grow to {longest} tokens and the KV cache holds {room}: raise "
                f"EngineConfig.kv_cache_memory (a token takes {self._block_bytes // self.config.block_size} bytes) or "
                "lower max_tokens"
            )

    def _make_requests(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[Request]]:
        made: list[list[Request]] = []
        group: list[Request] = []
        previous: list[int] | None = None
        for prompt, p in zip(prompts, params, strict=True):
            if prompt != previous:
                group, previous = [], prompt
            spec = self._lower(prompt, p)
            requests = []
            for index in range(p.n):
                checker = StopStringChecker(self.tokenizer, p.stop) if p.stop else None
                request = Request(self._requests_made, prompt, spec, index, checker, group)
                self._requests_made += 1
                requests.append(request)
            group.extend(requests)
            made.append(requests)
        return made

    def _lower(self, prompt: list[int], p: SamplingParams) -> SamplingSpec:
        # Without a seed of its own a request draws from the engine's seed and its number: new tokens at every call,
        # the same ones in every run.
        seed = p.seed
        if seed is None:
            name = f"{self.config.seed}:{self._requests_made}".encode()
            seed = int.from_bytes(blake2b(name, digest_size=8).digest(), "little")
        return SamplingSpec(
            temperature=p.temperature,
            top_p=p.top_p,
            top_k=p.top_k,
            min_p=p.min_p,
            repetition_penalty=p.repetition_penalty,
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
            max_tokens=min(p.max_tokens, self.max_model_len - len(prompt)),
            min_tokens=p.min_tokens,
            stop_ids=frozenset(p.stop_token_ids) | (frozenset() if p.ignore_eos else self._eos_ids),
            seed=seed & _SEED_MASK,
            top_logprobs=p.logprobs,
            logprobs_mode=LOGPROBS_MODES.index(p.logprobs_mode),
        )

    def _output(self, prompt: list[int], requests: list[Request]) -> RolloutOutput:
        completions = []
        for r in requests:
            decode = None
            if self.tokenizer is not None:
                decode = partial(completion_text, self.tokenizer, r.output, r.stop_reason)
            completions.append(
                Completion(
                    index=r.sample_index,
                    token_ids=r.output,
                    logprobs=r.logprobs,
                    top_logprobs=_most_likely(r.top_logprobs, r.spec.top_logprobs) if r.spec.top_logprobs else None,
                    finish_reason=r.finish_reason,  # type: ignore[arg-type]
                    stop_reason=r.stop_reason,
                    weight_versions=r.weight_versions,
                    _decode=decode,
                )
            )
        error = next((r.error for r in requests if r.error is not None), None)
        return RolloutOutput(
            prompt_token_ids=prompt, completions=completions, cached_tokens=requests[0].cached_tokens, error=error
        )

    # -- weights -------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def update_weights(self, weights: NewWeights | None = None, *, version: int | None = None) -> int:
        """Take new weights into service; returns the new weight version.

        weights: None takes the model's as they are now. Where the engine runs on the trainer's tensors no byte moves, and
        parameters that were replaced or moved on their device are bound again; a mirror takes over what changed. Ranks of a
        sharded model call it together. Else: named tensors (all of them, in any floating-point dtype: a mapping, or (name,
        tensor) pairs, which may be made one by one), a safetensors file or a checkpoint folder, or a ``WeightTransfer`` from
        another process. They are held beside the weights in service until all have come, so whatever goes wrong half-way
        changes nothing, and then replace the engine's; where those are the model's own tensors, the model's.
        version: a number above the present one; None counts up by one.

        The version goes up, cached prefixes are forgotten, in one step that an interrupt (Ctrl-C) does not cut in two. Raises
        ``WeightsMismatchError`` for names, shapes, dtypes or values that do not fit, ``WeightTransferError`` where weights
        did not arrive; the engine then keeps its weights and version (after a gather that broke off, where it says so, it
        refuses to generate until an update succeeds). ``WeightsMovedError`` or ``UnsupportedModelError`` where parameters
        changed dtype or device or the model can no longer be borrowed; the engine then refuses to generate.
        """
        self._check_idle("update its weights")
        if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
            raise InvalidRequestError(f"version={version!r} is not an integer")
        if version is not None and version <= self.weight_version:
            raise InvalidRequestError(f"version={version} is not above the present version {self.weight_version}")
        start = time.perf_counter()
        staged = None if weights is None else self._binding.receive(weights)
        with uninterrupted():
            moved = self._binding.refresh() if staged is None else self._binding.put_in_service(staged)
            self._new_version(version, moved)
        self._last_update_seconds = time.perf_counter() - start
        return self.weight_version

    def _new_version(self, version: int | None = None, moved_bytes: int = 0) -> None:
        self.core.runner.model = self._binding.shell
        self.core.scheduler.set_weight_version(self.weight_version + 1 if version is None else version)
        self._last_update_bytes = moved_bytes

    @property
    def weight_version(self) -> int:
        return self.core.scheduler.weight_version

    @torch.inference_mode(False)
    def verify_weights(self) -> WeightReport:
        """Compare the weights the engine runs on with the model's as they are now, name by name, in the engine's dtype.

        By checksums made on the device; where the engine runs on the trainer's tensors, by their addresses. Ranks of a
        sharded model call it together. After ``update_weights`` with weights from elsewhere it shows where they differ from
        the model in this process.
        """
        self._check_idle("verify its weights")
        return self._binding.verify(self.weight_version)

    def _notice_changes(self) -> None:
        with uninterrupted():
            if self._binding.notice():
                self._new_version()
        self._binding.check_ready()

    # -- memory --------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Give the KV cache's memory back; weights are the trainer's and stay. Asleep already: nothing happens."""
        self._check_idle("sleep")
        self.core.scheduler.prefix_cache.clear()
        self._kv.release()

    @torch.inference_mode(False)
    def wake_up(self) -> None:
        """Allocate the KV cache again. Raises ``EngineStateError`` where memory is short; it can be tried again."""
        self._check_open()
        if not self.is_sleeping:
            return
        try:
            self._kv.allocate()
        except (RuntimeError, MemoryError) as error:
            wanted = self._no_memory(self._kv.num_blocks)
            raise EngineStateError(f"{wanted}. Free some and call wake_up() again") from error

    def _no_memory(self, num_blocks: int) -> str:
        wanted, free = num_blocks * self._block_bytes, self.runtime.free_memory()
        return f"no memory for the KV cache: {wanted} bytes wanted, {free} free"

    @property
    def is_sleeping(self) -> bool:
        return not self._kv.layers

    def stats(self) -> EngineStats:
        """A snapshot; costs nothing worth measuring."""
        scheduler = self.core.scheduler
        counters = scheduler.counters
        return EngineStats(
            weight_version=self.weight_version,
            is_sleeping=self.is_sleeping,
            num_kv_blocks=self._kv.num_blocks - 1,
            num_free_kv_blocks=scheduler.pool.num_free,
            kv_block_bytes=self._block_bytes,
            kv_cache_bytes=self._kv.nbytes,
            num_preemptions=counters.preemptions,
            prompt_tokens=counters.prompt_tokens,
            prefix_cache_hit_tokens=counters.prefix_hit_tokens,
            shared_prompt_tokens=counters.shared_tokens,
            generated_tokens=counters.generated_tokens,
            finished_requests=counters.finished_requests,
            fused_layers=self._binding.fused_layers,
            num_layers=self._binding.shell.num_layers,
            last_update_seconds=self._last_update_seconds,
            last_update_bytes=self._last_update_bytes,
            mirror_bytes=self._binding.source.nbytes,
        )

    @torch.inference_mode(False)  # or the model could not be trained any more
    def close(self) -> None:
        """Free everything and give the model's weights storages of their own again. The engine is of no use after."""
        if not self._closed:
            self._check_idle("close")
            self._kv.release()
            self._binding.release()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- set-up --------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStateError("the engine is closed: build a new one")

    def _check_idle(self, action: str) -> None:
        self._check_open()
        if self._busy:
            raise EngineStateError(
                f"the engine cannot {action} inside generate_batch: wait until the call has returned"
            )

    def _check_ready(self) -> None:
        self._check_open()
        if self._busy:
            raise EngineStateError("generate_batch is running already: one call at a time")
        if self.is_sleeping:
            raise EngineStateError("the engine is asleep: call wake_up() first")

    def _check_config(self) -> None:
        device = self.config.device
        if device != "auto":
            wanted, actual = torch.device(device), self._binding.source.device
            if wanted.type != actual.type or wanted.index not in (None, actual.index or 0):
                raise InvalidConfigError(f"device={device} and the model is on {actual}: set device='auto'")

    def _max_model_len(self) -> int:
        limit = getattr(self._binding.source.module.config, "max_position_embeddings", None)
        if self.config.max_model_len is None:
            if limit is None:
                raise InvalidConfigError("the model's config has no max_position_embeddings: set max_model_len")
            return int(limit)
        if limit is not None and self.config.max_model_len > limit:
            raise InvalidConfigError(
                f"max_model_len={self.config.max_model_len} is beyond the model's {limit} positions"
            )
        return self.config.max_model_len

    def _num_blocks(self) -> int:
        """Blocks the configured memory holds, the null block included."""
        size = self.config.block_size
        needed = self.config.max_num_seqs * -(-self.max_model_len // size) + 1
        amount = self.config.kv_cache_memory
        if amount == "auto":
            return max(2, min(needed, int(0.3 * self.runtime.free_memory()) // self._block_bytes))
        assert isinstance(amount, int)
        if amount < 2 * self._block_bytes:
            raise InvalidConfigError(
                f"kv_cache_memory={amount} holds no block: two blocks of {size} tokens take {2 * self._block_bytes} bytes"
            )
        return amount // self._block_bytes

    def _find_eos_ids(self) -> frozenset[int]:
        """The ids that end a completion: the tokenizer's and the generation config's."""
        module: Any = self._binding.source.module
        found: set[int] = set()
        for owner in (self.tokenizer, getattr(module, "generation_config", None)):
            eos = getattr(owner, "eos_token_id", None)
            if eos is not None:
                found.update([eos] if isinstance(eos, int) else eos)
        return frozenset(t for t in found if 0 <= t < self._binding.shell.vocab)  # a tokenizer may know more tokens


def _most_likely(top: list[dict[int, float]], count: int) -> list[dict[int, float]]:
    """The first ``count`` of each: a step makes as many for every row as one of its rows wants."""
    return [dict(islice(one.items(), count)) for one in top]
