"""The engines of a run behind one call: prompts and lengths in, token ids out.

Each engine has its own copy of the model, so that none changes what another one runs. All sample at temperature 1
without truncation, and each request ends after its own number of tokens, which no engine is told in any other way.
"""

from __future__ import annotations

import importlib.util
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from stoker.benchmarks import ceilings
from stoker.benchmarks.workloads import ModelSpec, Workload
from stoker.rollout import EngineConfig, RolloutBatch, RolloutEngine, SamplingParams

_PAGE = 16  # tokens
# Transformers 5.17 has blocks for pages, and never changes the attention by itself.
_HAS_PAGES = "page_size" in ContinuousBatchingConfig.__dataclass_fields__
PAGE_SIZE = "page_size" if _HAS_PAGES else "block_size"
_MOST_KV_BYTES = 16 * 2**30  # so that all engines of a run fit on one device


class TooSlowError(Exception):
    """A rollout passed its time limit."""


def kv_budget(spec: ModelSpec, workload: Workload, dtype: torch.dtype) -> int:
    """Bytes of the KV cache of every engine that has a paged one: all slots at full length, as far as memory allows.

    In it are states where a model has such: of each slot, and copies for the prompts of groups.
    """
    pages = workload.slots * (-(-workload.max_len // _PAGE) + 1)
    states = (workload.slots + max(workload.slots // 4, 8) + 2) * ceilings.state_bytes(spec.config, dtype)
    return min(states + pages * _PAGE * ceilings.kv_token_bytes(spec.config, dtype), _MOST_KV_BYTES)


class Peer(ABC):
    name: str
    settings: dict[str, Any]
    repeats: int | None = None  # fewer than the scenario's, for one that takes long
    module: str | None = None  # a package that need not be installed

    @abstractmethod
    def __init__(self, spec: ModelSpec, workload: Workload, device: str, dtype: torch.dtype) -> None: ...

    @abstractmethod
    def rollout(self, prompts: list[Any], lengths: Sequence[int], limit_s: float = float("inf")) -> Any:
        """Run every request to its length; returns the completions' token ids, one list a request.

        prompts: of token ids, or what a processor returned for each.
        """

    def warm_up(self, prompts: list[Any], lengths: Sequence[int], limit_s: float = float("inf")) -> None:
        self.rollout(prompts, lengths, limit_s)

    def start(self) -> None:  # noqa: B027 - most have nothing to start
        """Get ready for rollouts. Not timed."""

    def stop(self) -> None:  # noqa: B027
        """Leave the machine to the others until the next ``start``."""

    def close(self) -> None:  # noqa: B027
        """Give back what is held."""


class Stoker(Peer):
    name = "stoker"

    def __init__(self, spec: ModelSpec, workload: Workload, device: str, dtype: torch.dtype) -> None:
        config = EngineConfig(
            max_num_seqs=workload.slots,
            max_model_len=workload.max_len,
            block_size=_PAGE,
            kv_cache_memory=kv_budget(spec, workload, dtype),
        )
        self.model = spec.build(device, dtype)
        start = time.perf_counter()
        self.engine = RolloutEngine(self.model, config=config)
        self.start_up_s = time.perf_counter() - start
        self.batch: RolloutBatch | None = None
        self.settings = {
            name: getattr(config, name)
            for name in (
                *("max_num_seqs", "max_model_len", "max_num_batched_tokens", "block_size", "kv_cache_memory"),
                "decode_window",
            )
        }

    def start(self) -> None:
        self.engine.update_weights()  # as before any rollout of a training; it also empties the prefix cache

    def rollout(self, prompts: list[Any], lengths: Sequence[int], limit_s: float = float("inf")) -> list[list[int]]:
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
        self.batch = self.engine.generate_batch(prompts, params)
        return [c.token_ids for output in self.batch for c in output.completions]

    def close(self) -> None:
        self.engine.close()


class Generate(Peer):
    """``model.generate``: left-padded static batches of ``slots`` requests, each run to its longest request.

    It returns no log-probabilities here: asking for them would make it keep the logits of every step.
    """

    name = "generate"

    def __init__(self, spec: ModelSpec, workload: Workload, device: str, dtype: torch.dtype) -> None:
        self.model = spec.build(device, dtype)
        self.slots = workload.slots
        self.cache: str | None = None
        self.settings: dict[str, Any] = {}

    def warm_up(self, prompts: list[Any], lengths: Sequence[int], limit_s: float = float("inf")) -> None:
        """Take the static cache on CUDA, where it comes with compilation and this compiles; on a CPU the faster one."""
        pilot: dict[str | None, float] = {}
        for self.cache in ("static", None):
            if pilot and self.model.device.type == "cuda":
                break
            try:
                start = time.perf_counter()
                self.rollout(prompts, lengths, limit_s)
                pilot[self.cache] = time.perf_counter() - start
            except RuntimeError as error:
                if self.cache is None:
                    raise
                self.settings["static_cache_failed"] = str(error)[:200]
        self.cache = min(pilot, key=lambda name: pilot[name])
        self.settings.update(cache=self.cache or "dynamic", pilot_s={k or "dynamic": v for k, v in pilot.items()})

    def rollout(self, prompts: list[Any], lengths: Sequence[int], limit_s: float = float("inf")) -> list[list[int]]:
        out: list[list[int]] = []
        end = time.perf_counter() + limit_s
        for first in range(0, len(prompts), self.slots):
            rows, wanted = prompts[first : first + self.slots], lengths[first : first + self.slots]
            inputs = self.inputs(rows)
            width = inputs["input_ids"].shape[1]
            left = None if limit_s == float("inf") else max(0.0, end - time.perf_counter())
            config = _generation_config(max(wanted), cache_implementation=self.cache, max_time=left)
            tokens = self.model.generate(**inputs, generation_config=config)[:, width:].tolist()
            if time.perf_counter() > end:
                raise TooSlowError(
                    f"{len(prompts) - first} of {len(prompts)} requests were unfinished after {limit_s:.0f} s"
                )
            out += [row[:n] for row, n in zip(tokens, wanted, strict=True)]
        return out

    def inputs(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        """Prompts as the model takes them."""
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(r)) + r for r in rows], device=self.model.device)
        mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=self.model.device)
        return {"input_ids": ids, "attention_mask": mask}


class GenerateBatchAsCalled(Peer):
    """``model.generate_batch(prompts, generation_config)`` as its users call it: default settings, a manager each call.

    Its body is repeated here, because it takes one length for all requests.
    """

    name = "generate_batch"
    repeats = 1

    def __init__(self, spec: ModelSpec, workload: Workload, device: str, dtype: torch.dtype) -> None:
        self.model = spec.build(device, dtype)
        self.cap = workload.cap
        self.settings = {"attention": self.model.config._attn_implementation}

    def rollout(
        self, prompts: list[list[int]], lengths: Sequence[int], limit_s: float = float("inf")
    ) -> list[list[int]]:
        hints = WorkloadHints(
            max_prompt_length=max(map(len, prompts)), max_generated_length=self.cap, num_requests=len(prompts)
        )
        with self.model.continuous_batching_context_manager(
            generation_config=_generation_config(self.cap, eos_token_id=-1), timeout=5, workload_hints=hints
        ) as manager:
            return _collect(manager, prompts, lengths, limit_s)


class GenerateBatchTuned(Peer):
    """The same engine through a manager that is built once, with the settings found fastest here.

    On a CPU: ``sdpa`` (``paged|eager`` takes twice the time), no compilation (three times), a cache that holds every
    slot at full length, and small pages and steps, so that the first sample of a group has computed the prompt in time
    for the others to share it.
    """

    name = "generate_batch, tuned"

    def __init__(self, spec: ModelSpec, workload: Workload, device: str, dtype: torch.dtype) -> None:
        self.model = spec.build(device, dtype)
        page_bytes = _PAGE * ceilings.kv_token_bytes(spec.config, dtype)
        self.settings = {
            PAGE_SIZE: _PAGE,
            **({"auto_switch_to_flash": False} if _HAS_PAGES else {}),
            "num_blocks": kv_budget(spec, workload, dtype) // page_bytes,
            "max_batch_tokens": 1024 if device == "cuda" else max(128, 2 * workload.slots),
            "max_requests_per_batch": workload.slots,
            "allow_block_sharing": True,
            "return_logprobs": True,
        }
        has_flash = device == "cuda" and importlib.util.find_spec("flash_attn") is not None
        self.model.set_attn_implementation("flash_attention_2" if has_flash else "sdpa")
        self.manager = self.model.init_continuous_batching(
            generation_config=_generation_config(workload.cap, eos_token_id=-1),  # -1: no EOS
            continuous_batching_config=ContinuousBatchingConfig(**self.settings, seed=0),
        )
        self.settings["attention"] = self.model.config._attn_implementation
        self.manager.warmup()

    def start(self) -> None:
        self.manager.start()

    def stop(self) -> None:
        # Its thread has a pool of OpenMP threads; while that lives, OpenMP has more threads than cores and changes how
        # every other engine's threads wait.
        self.manager.stop(block=True, timeout=30, keep_for_next_session=True, hard_stop=True)

    def rollout(
        self, prompts: list[list[int]], lengths: Sequence[int], limit_s: float = float("inf")
    ) -> list[list[int]]:
        return _collect(self.manager, prompts, lengths, limit_s)

    def close(self) -> None:
        self.model.destroy_cached_continuous_batching_manager()
        self.manager.destroy()


def _collect(manager: Any, prompts: list[list[int]], lengths: Sequence[int], limit_s: float) -> list[list[int]]:
    """Hand all requests to a continuous-batching manager and wait for them."""
    end = time.perf_counter() + limit_s
    rows = {
        manager.add_request(prompt, max_new_tokens=n): row
        for row, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))
    }
    out: list[list[int]] = [[] for _ in prompts]
    while rows:
        result = manager.get_result(timeout=1)
        if result is not None and result.error is not None:
            raise RuntimeError(f"generate_batch: {result.error}")
        if result is not None:
            out[rows.pop(result.request_id)] = result.generated_tokens
        elif not manager.is_running():
            raise RuntimeError("generate_batch: its thread ended")
        if time.perf_counter() > end:
            raise TooSlowError(f"{len(rows)} of {len(prompts)} requests were unfinished after {limit_s:.0f} s")
    return out


def _generation_config(max_new_tokens: int, **settings: Any) -> GenerationConfig:
    # transformers' own top_k is 50.
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
        **settings,
    )
