"""Whose turn it is: which thread runs the core's next step, and which may change something between two steps.

The engine has no thread of its own. Whoever waits for a result runs steps, one thread at a time, and each step serves all
requests; nothing runs behind a trainer's back.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeVar

from stoker.engine.core import EngineCore
from stoker.engine.request import Request, Status
from stoker.kernels.errors import EngineStateError, InvalidRequestError, RequestFailedError
from stoker.rollout.progress import progress
from stoker.rollout.user_values import shown

_ENDED = RequestFailedError(
    "a step of the engine failed or was interrupted, which ended every request: submit it again"
)
_PATIENCE = 1.0  # seconds for which a thread waits for others before it looks for itself
_LONG_PAUSE = 60.0  # seconds after which whoever waits in one says so
_log = logging.getLogger("stoker")
_T = TypeVar("_T")


class _Signal:
    """A ``threading.Event`` without a lock of its own, which Ctrl-C in the middle of a call could leave locked."""

    def __init__(self) -> None:
        self._on = False
        self._waiting: list[threading.Lock] = []  # one each, locked until it is on

    def clear(self) -> None:
        self._on = False

    def set(self) -> None:
        self._on = True
        for lock in list(self._waiting):
            with suppress(RuntimeError):  # released by an earlier call
                lock.release()

    def wait(self, timeout: float) -> None:
        """Wait until it is on, or ``timeout`` seconds are over."""
        lock = threading.Lock()
        lock.acquire()
        self._waiting.append(lock)
        try:
            if not self._on:
                lock.acquire(timeout=timeout)
        finally:
            self._waiting.remove(lock)


class _Follower:
    """A thread that waits while another one runs steps. Its lock is its own, as in ``_Signal``."""

    def __init__(self, done: Callable[[], bool]) -> None:
        self.done = done
        self.found = False  # whether what it waits for has come, in a turn of another thread
        self.thread = threading.get_ident()
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        with suppress(RuntimeError):  # woken already
            self._lock.release()

    def wait(self, timeout: float) -> bool:
        return self._lock.acquire(timeout=timeout)


class _Pause(NamedTuple):
    by: threading.Thread  # not its ident, which a later thread may get
    since: float

    def __str__(self) -> str:
        ended = "" if self.by.is_alive() else ", which has ended"
        return f"{time.monotonic() - self.since:.0f} s ago by thread {self.by.name}{ended}"


class Loop:
    """The core, and the right to touch it."""

    def __init__(
        self, core: EngineCore, runnable: Callable[[Sequence[Request]], list[Request]], in_order: Callable[[], None]
    ) -> None:
        """runnable: given requests, returns those that can still start, and fails the others.

        in_order: makes the device run what is launched from now on after all that was launched before, in whatever stream.
        """
        self.core = core
        self._runnable, self._in_order = runnable, in_order
        self._gate = threading.RLock()
        self._turn = threading.Lock()
        self._owner: int | None = None  # the thread whose turn it is
        self._wanted: set[int] = set()  # threads that wait for theirs
        self._turn_over = _Signal()
        self._leader: int | None = None  # the thread that runs steps for all, as long as it waits for something itself
        self._steps = 0
        self._followers: list[_Follower] = []  # others that wait for something meanwhile
        self._pauses: dict[Hashable, _Pause] = {}  # by owner; nothing runs while there is one
        self._told = False  # whether a long pause was logged
        self._resumed = _Signal()
        self._resumed.set()
        self._unsound = False  # a change of the core did not come to its end
        self._abandoned: deque[Sequence[Request]] = deque()

    def gate(self, action: str) -> threading.RLock:
        """The lock to hold while requests start, and while what they start on changes: weights, memory, a pause.

        It is taken before a turn, so ``EngineStateError`` inside a step. action: as for ``do``.
        """
        self._refuse_inside_a_step(action)
        return self._gate

    def do(self, action: str, change: Callable[[], _T]) -> _T:
        """Change the core, between two steps. An exception within aborts every request and goes on to the caller.

        action: as in "the engine cannot ..."; ``EngineStateError`` inside a step, where a callback may ask for it.
        """
        self._refuse_inside_a_step(action)
        me = threading.get_ident()
        try:
            self._wanted.add(me)
            with self._turn:  # not in a context manager of our own, in which Ctrl-C could leave the lock taken
                self._owner = me  # first: a finalizer that aborts a request may run at any call, and looks at this
                try:
                    self._wanted.discard(me)
                    return self._change(change)
                finally:
                    try:
                        self._tell()
                    finally:
                        self._owner = None
        finally:
            self._wanted.discard(me)
            self._turn_over.set()

    def attempt(self, action: str, change: Callable[[], None]) -> None:
        """As ``do``, for changes that do not touch the requests under way: an exception within ends none of them."""

        failed: list[BaseException] = []  # and not in a variable: the error's frames would keep it, and it them

        def attempted() -> None:
            try:
                change()
            except BaseException as error:
                failed.append(error)

        self.do(action, attempted)
        if failed:
            raise failed.pop()

    def _change(self, change: Callable[[], _T]) -> _T:
        self._make_sound()
        self._unsound = True
        try:
            self._in_order()
            result = change()
        except BaseException:
            self.core.abort_all(_ENDED)
            self._unsound = False
            raise
        self._unsound = False
        return result

    def _tell(self) -> None:
        """Wake the followers that now have what they wait for."""
        for follower in list(self._followers):
            if not follower.found and follower.done():
                follower.found = True
                follower.wake()

    def _refuse_inside_a_step(self, action: str) -> None:
        if self._owner == threading.get_ident():
            raise EngineStateError(f"the engine cannot {action} inside a step of its own: wait until that is over")

    def _make_sound(self) -> None:
        if self._unsound:
            self.core.abort_all(_ENDED)
            self._unsound = False
        while self._abandoned:
            self._unsound = True
            self.core.abort(self._abandoned[0])
            self._abandoned.popleft()
            self._unsound = False

    def settle(self) -> None:
        """End requests whose handles were dropped; inside a step, that is done after it."""
        if self._abandoned and self._owner != threading.get_ident():
            self.do("end requests", lambda: None)

    def has_work(self, action: str) -> bool:
        """Whether a request is under way. Those whose handles were dropped are not."""
        return self.do(action, lambda: self.core.has_work)

    def check_idle(self, action: str) -> None:
        """Raise ``EngineStateError`` where requests are under way and not paused."""
        if self.has_work(action) and not self.is_paused:
            raise EngineStateError(
                f"the engine cannot {action} while requests are under way: wait for them, abort them, or pause() first"
            )

    @property
    def is_paused(self) -> bool:
        return bool(self._pauses)

    @property
    def pause_now(self) -> str | None:
        """Text that says since when the engine is paused, and by whom; None where it is not."""
        pauses = list(self._pauses.values())  # another thread may end one meanwhile
        return f"paused {' and '.join(map(str, pauses))}" if pauses else None

    def _tell_of_pause(self) -> None:
        """Log a long pause, once: whoever has paused may be gone, and nothing else would say why nothing happens."""
        first = min((pause.since for pause in list(self._pauses.values())), default=math.inf)
        if not self._told and time.monotonic() - first >= _LONG_PAUSE:
            self._told = True
            _log.warning("requests wait for resume(): the engine was %s", self.pause_now)

    @property
    def is_paused_elsewhere(self) -> bool:
        """Whether another thread than this one has paused the engine."""
        return any(pause.by is not threading.current_thread() for pause in list(self._pauses.values()))

    @staticmethod
    def check_owner(owner: Any) -> None:
        try:
            hash(owner)
        except TypeError as error:
            raise InvalidRequestError(f"owner={shown(owner)}: {error}, give a name") from error

    def goes_on_without(self, owner: Hashable) -> bool:
        """Whether nothing is paused any more once this owner resumes. None, the default, need not have paused."""
        return self._pauses.keys() <= {owner} and (owner is None or self.is_paused)

    def check_not_paused(self) -> None:
        """Raise ``EngineStateError`` where waiting would never end."""
        if any(pause.by is threading.current_thread() for pause in list(self._pauses.values())):
            raise EngineStateError("this thread has paused the engine: call resume() first")

    def add(self, call: str, requests: Sequence[Request]) -> None:
        self.do(call, lambda: self.core.add(self._runnable(requests)))

    def run(
        self,
        call: str,
        make: Callable[[], Sequence[Request]],
        *,
        progress_bar: bool,
        ended: Callable[[int], None] | None = None,
    ) -> None:
        """Run steps until the requests that ``make`` gives are done. After an interrupt none of them holds anything.

        ended: called with the number of each request, in order, between two steps, once it and all before it are done.
        """
        requests: Sequence[Request] = ()
        try:
            with self.gate(f"start {call}"):
                requests = make()
                self.add(f"start {call}", requests)
            self._finish(requests, progress_bar, ended)
        except BaseException:
            self.abort(requests)
            raise

    def _finish(self, requests: Sequence[Request], progress_bar: bool, ended: Callable[[int], None] | None) -> None:
        with progress(len(requests), shown=progress_bar) as show:
            left, told = list(requests[::-1]), 0

            def done() -> bool:  # asked after every step: looking at all requests would cost as much as the step
                while left and left[-1].status is Status.FINISHED:
                    left.pop()
                if progress_bar:
                    show(sum(r.status is Status.FINISHED for r in requests))
                return not left or (ended is not None and len(left) < len(requests) - told)

            while told < len(requests):
                self.drive(done)
                first, told = told, len(requests) - len(left)
                if ended is not None:
                    for row in range(first, told):
                        ended(row)

    def drive(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Step until ``done``; False where that took longer than ``timeout`` seconds.

        While another thread has paused the engine, this waits. Of several threads that wait, one leads and runs the steps; the
        others follow, and are woken when they have what they wait for. Were each to take turns, a thread would hear of its
        result many steps late.
        """
        me = threading.get_ident()
        end = None if timeout is None else time.monotonic() + min(timeout, threading.TIMEOUT_MAX)

        def step() -> bool:
            # Look at the pause first: it may end at any moment, which is all that some wait for, with nothing left to run.
            if not self.is_paused and not done():
                assert self.core.has_work, "a request that is waited for is nowhere"
                self.core.step()
                self._steps += 1
            return done()

        try:
            while True:
                self.check_not_paused()
                left = _PATIENCE if end is None else min(_PATIENCE, end - time.monotonic())
                if self._leader not in (None, me) and left > 0:
                    if self._follow(_Follower(done), left):
                        return True
                    continue
                if self.do("run requests", step):
                    return True
                self._tell_of_pause()
                left = _PATIENCE if end is None else min(_PATIENCE, end - time.monotonic())
                if left <= 0:
                    return False
                if self._leader is None:
                    self._leader = me
                if self.is_paused:  # but not for ever: an abort, or closing the engine, ends requests too
                    self._resumed.wait(left)
                self._give_way()
        finally:
            if self._leader == me:
                self._leader = None  # a thread that comes now leads by itself; else one of the followers does
                following = next((f for f in list(self._followers) if not f.found), None)
                if following is not None:
                    self._leader = following.thread
                    following.wake()

    def _give_way(self) -> None:
        """Let other threads have the turns they wait for: with the lock alone, this thread could get every turn."""
        others, end = set(self._wanted), time.monotonic() + _PATIENCE
        while others & self._wanted and (left := end - time.monotonic()) > 0:
            self._turn_over.clear()
            if others & self._wanted:
                self._turn_over.wait(left)

    def _follow(self, follower: _Follower, timeout: float) -> bool:
        """Wait while another thread steps, at most ``timeout`` seconds; returns whether the follower has what it waits for."""
        try:
            self._followers.append(follower)
            steps = self._steps
            # The leader may have left before it saw this follower, or been interrupted before it named another leader.
            unheard = self._leader not in (None, follower.thread) and not follower.wait(timeout)
            if unheard and steps == self._steps and not self.is_paused:
                self._leader = follower.thread
            return follower.found
        finally:
            with suppress(ValueError):  # interrupted before it was there
                self._followers.remove(follower)

    def pause(self, mode: Literal["keep", "wait", "abort"], owner: Hashable = None) -> None:
        def pause() -> None:
            if mode == "abort":
                self.core.abort_all()
            self.core.drain()
            self._resumed.clear()
            if self._pauses.keys() <= {owner}:
                self._told = False
            self._pauses[owner] = _Pause(threading.current_thread(), time.monotonic())

        while True:
            if mode == "wait":
                self.drive(lambda: not self.is_paused)  # outside of the gate, which ``resume`` needs
            with self.gate("pause"):  # no request begins within
                if mode == "wait":
                    if self.is_paused:
                        continue
                    self.drive(lambda: not self.core.has_work)
                self.do("pause", pause)
                return

    def resume(self, *, recompute: bool, owner: Hashable = None) -> None:
        goes_on = self.goes_on_without(owner)
        if not goes_on and owner not in self._pauses:
            return
        if recompute:
            self.do("resume", self.core.scheduler.preempt_all)
        if goes_on:
            self._resumed.set()  # first: after an interrupt in between the engine is still paused, and nobody waits for ever
        self._pauses.pop(owner, None)

    def abandon(self, requests: Sequence[Request]) -> None:
        """Abort before the next step. Takes no lock: a garbage collector may call it anywhere."""
        self._abandoned.append(requests)

    def abort(self, requests: Sequence[Request]) -> None:
        """Abort at once; where a callback inside a step asks for it, after that step."""
        self.abandon(requests)
        self.settle()
