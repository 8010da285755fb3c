"""Sleep and wake: gives back the memory that an engine holds, by tag, and takes it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from stoker.engine.cache.kv_cache import KVCache
from stoker.engine.core import EngineCore
from stoker.kernels.errors import EngineStateError, InvalidRequestError
from stoker.kernels.interrupts import uninterrupted
from stoker.rollout.adapters import Adapters
from stoker.rollout.binding import ModelBinding
from stoker.rollout.user_values import shown

TAGS = ("weights", "kv_cache", "graphs")  # in the order they are woken in
_LEVELS = {1: ("kv_cache",), 2: TAGS, 3: TAGS}


def tags_of(level: int, tags: str | Iterable[str] | None) -> list[str]:
    """The tags to send to sleep. Raises ``InvalidRequestError`` for a level or a tag there is not."""
    if level not in tuple(_LEVELS):  # which asks nothing of it
        raise InvalidRequestError(
            f"level={shown(level)}: give 1 (KV cache), 2 (all that is the engine's) or 3 (2, weights dropped)"
        )
    return list(_LEVELS[level]) if tags is None else check_tags(tags)


def check_tags(tags: str | Iterable[str]) -> list[str]:
    wanted = list(tags) if isinstance(tags, Iterable) and not isinstance(tags, str) else [tags]
    unknown = [tag for tag in wanted if tag not in TAGS]
    if unknown:
        raise InvalidRequestError(f"tags={unknown}: there are {', '.join(TAGS)}")
    return [tag for tag in TAGS if tag in wanted]


class EngineMemory:
    """The KV cache, the engine's own copies of weights, captured graphs, and attention's workspace.

    The workspace is freed whenever no graph is left, since graphs remember its address; tables of patterns are then freed with
    the KV cache. Interrupts wait until sleep or wake is done: in the middle of a driver's call nobody would know what is mapped.
    """

    def __init__(self, core: EngineCore, kv: KVCache, binding: ModelBinding, adapters: Adapters) -> None:
        self.core, self.kv, self.binding, self.adapters = core, kv, binding, adapters

    @property
    def asleep(self) -> list[str]:
        """The tags that have to be woken before anything can run; graphs wake by themselves."""
        weights = self.binding.resident and not self.adapters.emptied
        states = {"weights": weights, "kv_cache": bool(self.kv.layers)}
        return [tag for tag, awake in states.items() if not awake]

    @uninterrupted()
    def sleep(self, tags: Iterable[str], *, drop_weights: bool) -> None:
        """Give memory back while nothing runs. drop_weights: do not keep a mirror's numbers in host memory."""
        tags = set(tags)
        runner = self.core.runner
        self.core.drain()  # a step of requests that have ended may still be running
        self.core.images.forget()
        moving = {  # graphs remember addresses
            "kv_cache": not self.kv.stable_addresses or runner.sampler.penalties is not None,
            "weights": not self.binding.stable_addresses,
        }
        if "graphs" in tags or any(moving.get(tag) for tag in tags):
            runner.release_graphs()
        if not runner.has_graphs:
            self.core.inputs.release_workspace()
        if "kv_cache" in tags:
            self.core.scheduler.preempt_all()  # paused requests compute their KV again
            self.core.scheduler.prefixes.forget()
            runner.sampler.penalties = None
            if not runner.has_graphs:
                self.core.inputs.constraints.release()
            self.kv.release()
        if "weights" in tags:
            self.adapters.give_back()
            self.binding.give_back(drop=drop_weights)
        self.kv.runtime.release_memory()  # last, so that it includes what the weights have left in torch's allocator

    @uninterrupted()
    def wake(self, tags: Iterable[str]) -> None:
        """Take memory again. Raises ``EngineStateError`` where it is short; what was woken before that stays awake."""
        tags = set(tags)
        if "weights" in tags and "weights" in self.asleep:
            if not self.binding.resident:
                self._take("weights", self.binding.nbytes, self.binding.take_again)
            self._take("adapters", self.adapters.given_back, self.adapters.take_again)
            self.binding.woken()
        if "kv_cache" in tags and "kv_cache" in self.asleep:
            self._take("KV cache", self.kv.wanted_bytes, self.kv.allocate)

    def _take(self, what: str, nbytes: int, take: Callable[[], None]) -> None:
        self.kv.runtime.release_memory()  # or memory that torch's allocator holds unused could not be taken
        try:
            take()
        except (RuntimeError, MemoryError) as error:
            free = self.kv.runtime.free_memory()
            raise EngineStateError(
                f"no memory for the {what}: {nbytes} bytes wanted, {free} free. Free some and call wake_up() again"
            ) from error
        device = self.kv.runtime.device  # whoever generates under another stream finds it written
        torch.get_device_module(device).synchronize(device)
