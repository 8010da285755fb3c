"""What ranks tell each other that run one model together (``EngineConfig.tensor_parallel_size``).

Each gives its own prompts, and all of them run everybody's, so that their schedulers make the same plans. They talk twice before
each call, by one kind of message: what they ask for, and that they can begin. Where a rank cannot take part, it says so in place of
what it would have said.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from stoker.engine.parallel.tensor_parallel import TensorParallel
from stoker.kernels.errors import EngineStateError, InvalidConfigError, InvalidRequestError, StokerError, first_line
from stoker.kernels.interrupts import uninterrupted
from stoker.rollout.config import EngineConfig
from stoker.rollout.user_values import shown

_T = TypeVar("_T")
# By all processes and how many run a model together: this rank's place. Groups are made once, as nothing ever frees them.
_PLACES: WeakKeyDictionary[dist.ProcessGroup, dict[int, TensorParallel]] = WeakKeyDictionary()
# Of all processes: numbers for the engines that they build together.
_ENGINES: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
# Held while ranks do something together: what another thread sent meanwhile would be taken for it.
_TURN = threading.RLock()


class _Message(NamedTuple):
    refusal: str | None
    content: Any
    alike: Mapping[str, Any]  # has to be the same on all ranks


class Lockstep:
    """The ranks that run a model together: as many consecutive ones as the config says. With one, nothing is exchanged.

    All processes make one together. Raises ``InvalidConfigError`` where there are no such ranks.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.same_prompts = False  # whether all are given the same prompts, and are to have the same completions
        self.parallel = None if config.tensor_parallel_size == 1 else _place(config.tensor_parallel_size)
        self._number = 0 if self.parallel is None else next(_ENGINES.setdefault(_world(), count()))
        self._has_said = True

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        return 0 if self.parallel is None else self.parallel.rank

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Context manager around what all of them do at the same time, with an ``exchange`` in it, or several. It delays Ctrl-C.

        A rank that fails before the last one tells the others. doing: as in "cannot ...".
        """
        if self.parallel is None:
            yield
            return
        with _TURN, uninterrupted():
            self._has_said = False
            try:
                yield
            except Exception as error:
                if not self._has_said:
                    self._send(doing, pickle.dumps(_Message(first_line(error), None, {})))
                elif _is_lost(error):
                    raise self._lost(doing, error) from error
                raise
            finally:
                self._has_said = True

    def exchange(self, doing: str, content: _T, *, last: bool = True, **alike: Any) -> list[_T]:
        """What every rank brings, by rank. alike: has to be the same on all of them, by what it is called.

        last: whether none follows, before which a rank that fails would tell the others.

        Raises ``EngineStateError`` where another rank refused or is lost, or does something else.
        """
        if self.parallel is None:
            return [content]
        mine = _Message(None, content, {"call": doing, "engine": self._number} | alike)
        said = pickle.dumps(mine)
        self._has_said = True
        messages = self._send(doing, said)
        for rank, message in enumerate(messages, self._first):
            if message.refusal is not None:
                raise EngineStateError(
                    f"rank {rank}, which runs this model together with this one, cannot {doing}: {message.refusal}"
                )
        for name in messages[0].alike:
            self.check_alike(name, [message.alike.get(name) for message in messages])
        self._has_said = last
        return [message.content for message in messages]

    def check_alike(self, name: str, values: Sequence[Any], compared: Sequence[Any] | None = None) -> None:
        """Raise ``EngineStateError`` where what ranks have is not the same. All of them call it with the same values.

        compared: what to compare instead, and to say the values of.
        """
        compared = values if compared is None else compared
        if (other := next((r for r, one in enumerate(compared) if one != compared[0]), None)) is not None:
            raise EngineStateError(
                f"ranks {self._first} and {self._first + other} run a model together and differ in {name}: {values[0]} and "
                f"{values[other]}. Make the same calls on all of them, with the same settings; after a change of weights or adapters, "
                "update_weights() on all"
            )

    def check_pause(self, mode: Any) -> None:
        """Raise ``InvalidRequestError`` for a mode of ``RolloutEngine.pause`` that there is not, or not with several ranks."""
        if mode not in ("keep", "wait", "abort"):
            raise InvalidRequestError(f"mode={shown(mode)}: give 'keep', 'wait' or 'abort'")
        if mode == "abort" and self.parallel is not None:
            raise InvalidRequestError(
                "mode='abort': requests run on several ranks together, which would wait for this one: give 'keep' or 'wait'"
            )

    @property
    def _first(self) -> int:
        """The first of these ranks, counted among all processes."""
        assert self.parallel is not None
        return dist.get_global_rank(self.parallel.group, 0)

    def _send(self, doing: str, message: bytes) -> list[_Message]:
        """message: pickled, so that one that cannot be is known of before the others wait for it."""
        assert self.parallel is not None
        said = [message] * self.parallel.size
        try:
            dist.all_gather_object(said, message, group=self.parallel.group)
        except RuntimeError as error:
            raise self._lost(doing, error) from error
        return [pickle.loads(one) for one in said]

    def _lost(self, doing: str, error: Exception) -> EngineStateError:
        assert self.parallel is not None
        others = [r for r in dist.get_process_group_ranks(self.parallel.group) if r != dist.get_rank()]
        return EngineStateError(
            f"rank {dist.get_rank()} lost touch with ranks {others}, with which it runs a model, while they were to {doing}: "
            f"{first_line(error)}. One of them has failed, or did not make the same call. Start the processes again"
        )


def _is_lost(error: Exception) -> bool:
    """Whether a collective failed, of which each backend tells in its own way."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and not isinstance(error, StokerError) and "gloo" in str(error).lower()
    )


def _place(size: int) -> TensorParallel:
    if not dist.is_initialized():
        raise InvalidConfigError(
            f"tensor_parallel_size={size} takes {size} processes: start them with torchrun, accelerate launch or deepspeed, which "
            "make a group of processes (torch.distributed.init_process_group)"
        )
    world = dist.get_world_size()
    if world % size:
        raise InvalidConfigError(f"tensor_parallel_size={size} and there are {world} processes: give a divisor of that")
    places = _PLACES.setdefault(_world(), {})
    if size not in places:
        firsts, timeout, rank = range(0, world, size), _timeout(_world()), dist.get_rank()
        try:
            groups = [dist.new_group(list(range(first, first + size)), timeout=timeout) for first in firsts]
        except RuntimeError as error:
            raise EngineStateError(
                f"rank {rank} waited in vain for others to build an engine with tensor_parallel_size={size}: {first_line(error)}. "
                "Build engines in the same order on all ranks, with the same size, and start the processes again"
            ) from error
        places[size] = TensorParallel(groups[rank // size], rank % size, size)
    return places[size]


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """As ``init_process_group`` was told: torch gives groups made later its own default, up to half an hour. None: not known."""
    try:
        timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):  # a backend that keeps it elsewhere
        return None
    return timeout
