"""New weights and adapters, from wherever they come, taken into service between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

from stoker.engine.core import EngineCore
from stoker.engine.layers.fused_layers import release_weights
from stoker.kernels.errors import InvalidRequestError, StokerError
from stoker.kernels.interrupts import uninterrupted
from stoker.rollout.adapters import Adapters, deleted
from stoker.rollout.binding import ModelBinding
from stoker.rollout.external_weights import ExternalWeights
from stoker.rollout.loop import Loop
from stoker.rollout.user_values import as_int, is_int, shown
from stoker.rollout.verification import verify
from stoker.weight_sync.adapter_files import model_of
from stoker.weight_sync.checksum import WeightReport
from stoker.weight_sync.rank_agreement import in_step, ranks_of, telling
from stoker.weight_sync.receiving import NewWeights
from stoker.weight_sync.shards import is_sharded

_T = TypeVar("_T")


class WeightUpdates:
    """Brings what is derived from weights, adapters and the version in step with them."""

    def __init__(self, binding: ModelBinding, core: EngineCore, adapters: Adapters, loop: Loop) -> None:
        self._binding, self._core, self._adapters, self._loop = binding, core, adapters, loop
        self._external = ExternalWeights(binding)
        self._behind = False  # caches and version, of weights that a change which came to no end has left
        self._is_new = True  # nothing has looked at the weights yet
        self._told = False  # of changes that ``notice`` may still find: nothing has run under the version of an update
        self.last_seconds = 0.0
        self.last_bytes = 0

    @property
    def version(self) -> int:
        return self._core.scheduler.weight_version

    def update(self, weights: NewWeights | None, version: int | None, check: Callable[..., None]) -> None:
        """As ``RolloutEngine.update_weights``. check: raises where the engine's state forbids it, ``idle`` or not."""
        start = time.perf_counter()
        # Where ranks do this together, one that an interrupt takes out of the middle would be out of step with the others.
        with self._loop.gate("update its weights"), uninterrupted():
            with self._binding.together() if weights is None else nullcontext():
                check(idle=True)
                version = self._read_version(version)
            if weights is None:
                self._put_in_service(None, version)
            elif self._binding.moved():  # what arrives is to fit what there is now; the shell is another one then
                self._between_steps("update its weights", self._rebind)
            elif (write := self._external.as_before(weights)) is not None:  # all there: nothing else runs before
                self._put_in_service(write, version)
                weights = None
        if weights is not None:  # outside of the gate: while they come, others go on
            staged = self._external.receive(weights)
            with self._loop.gate("update its weights"), uninterrupted():
                check(idle=False)  # what has begun meanwhile goes on under these
                self._check_above(version)
                self._put_in_service(partial(self._external.put_in_service, staged), version)
        self.last_seconds = time.perf_counter() - start

    def _read_version(self, version: Any) -> int | None:
        """The version that a user gave, as an integer. Raises ``InvalidRequestError`` where weights cannot have it now."""
        version = as_int(version)
        if version is None:
            return None
        if not is_int(version):
            raise InvalidRequestError(f"version={shown(version)} is not an integer")
        if version >= 2**63:  # of what is still above the present one
            raise InvalidRequestError(f"version={shown(version)} does not fit the 64 bits of a token's weight version")
        self._check_above(version)
        return version

    def _check_above(self, version: int | None) -> None:
        if version is not None and version <= self.version:
            raise InvalidRequestError(f"version={version} is not above the present version {self.version}")

    def _put_in_service(self, write: Callable[[], int] | None, version: int | None) -> None:
        """write: puts weights from elsewhere in service, and returns the bytes written; None: the model's are."""

        def look() -> bool:
            if write is None:  # a glance: whatever starts afterwards calls ``notice`` first
                self.last_bytes = self._look(self._binding.refresh, together=True)
            else:
                self.last_bytes = self._look(write)
            # What is under way goes on under these weights, and what slots derive is made of them, before a call looks.
            derives = self._binding.shell.lora.derives
            now = self._core.has_work or any(map(derives, self._binding.adapters.weights.values()))
            if now:
                self._look(self._binding.notice)
            return now

        def take(now: bool) -> None:
            self._told = False
            number = self.version + 1 if version is None else version
            self.last_bytes += self._take(number, recompute=False, noticed=now)
            self._told = not now

        self._between_steps("update its weights", look, take)

    def _rebind(self) -> None:
        self._look(self._binding.rebind)

    def verify(self, check: Callable[[], None]) -> WeightReport:
        """As ``RolloutEngine.verify_weights``; after an update, for what runs next. check: as for ``update``."""
        with self._loop.gate("verify its weights"), uninterrupted():
            with self._binding.together():
                check()
                moved = self._told and self._binding.moved()  # which the update may have left to ``notice``
                if moved:
                    self._binding.check_alone()
            if moved:
                self._between_steps("verify its weights", self._rebind)
            return verify(self._binding, self.version, self._adapters.in_slots)

    def before_requests(self, *, idle_only: bool = False) -> None:
        """Look at the weights before requests are made, inside the loop's gate.

        Not while another thread has paused the engine, which may be changing them: what it finds then, ``resume`` notices.
        idle_only: nor while others' requests are under way.
        """
        if not self._loop.is_paused_elsewhere and not (idle_only and self._loop.has_work("look at its weights")):
            self.notice()

    def notice(self, *, recompute: bool = True) -> None:
        """Take over what was changed in the model without a word. Raises where the engine may not run on it.

        recompute: the KV of requests that are under way, too.
        """

        def look() -> bool:
            behind = self._behind
            return self._look(self._binding.notice) or behind or self._adapters.behind

        def take(changed: bool) -> None:
            if changed:
                self._take(self.version if self._told else self.version + 1, recompute=recompute)
            elif self._told or self._is_new:
                # What was made at the update, with the engine, or for another thread since, may be older than the weights.
                self._core.images.renew()
                self._adapters.refresh()
                self._binding.shell.refresh()
            self._behind = self._told = self._is_new = False

        with uninterrupted():
            self._between_steps("look at its weights", look, take)
        self._binding.check_ready()

    def _between_steps(self, action: str, look: Callable[[], _T], take: Callable[[_T], None] = lambda _: None) -> None:
        """Look at weights and take them in one turn: others' steps may be under way, and run on the old ones or the new.

        Where ``look`` fails, no request ends. To be called within ``uninterrupted``.
        """

        failed: list[BaseException] = []  # as in ``Loop.attempt``

        def change() -> None:
            try:
                seen = look()
            except BaseException as error:
                failed.append(error)
            else:
                take(seen)

        with self._loop.gate(action):
            self._loop.do(action, change)
        if failed:
            raise failed.pop()

    def _look(self, look: Callable[[], _T], *, together: bool = False) -> _T:
        """Take weights; caches and version are out of date from then on. What is refused has changed nothing.

        together: with other ranks, where the model is sharded. In whatever one of them fails, all refuse, and keep their version:
        nothing was written, or nothing runs before an update that succeeds.
        """
        behind, self._behind = self._behind, True
        try:
            return look()
        except Exception as error:
            if isinstance(error, StokerError) or (together and is_sharded(self._binding.model)):
                self._behind = behind
            raise

    def load_adapter(self, name: str, source: Any, check: Callable[[], None]) -> None:
        """As ``RolloutEngine.load_adapter``; it looks at the live model, too, which may have fewer by now. check: as for ``update``."""
        action, model = "load an adapter", model_of(source)

        def load() -> list[Exception]:
            self._core.drain()  # what is on its way was computed with the adapters as they are
            keys = [(request, request.adapter.key) for request in self._core.under_way if request.adapter is not None]
            refused = self._adapters.load(name, source, self._core.under_way)
            # A dtype that is new may have made others run in another one.
            self._core.scheduler.outdate([r for r, key in keys if r.adapter is not None and r.adapter.key != key])
            self._end_without_adapter()
            return refused

        with in_step(model):
            with telling(*ranks_of(model)):  # or the other ranks of a sharded model would wait
                if not isinstance(name, str) or not name:
                    raise InvalidRequestError(f"name={shown(name)}: give a name, which adapter= then takes")
                check()
                self._loop.gate(action)  # refuses inside a step
            self._change_adapters(action, load, check)

    def unload_adapter(self, name: str, check: Callable[[], None]) -> None:
        """As ``RolloutEngine.unload_adapter``. check: as for ``update``."""
        self._change_adapters("unload an adapter", lambda: self._adapters.unload(name, self._core.under_way), check)

    def _change_adapters(self, action: str, change: Callable[[], list[Exception]], check: Callable[[], None]) -> None:
        with self._loop.gate(action):
            check()
            refused = self._loop.do(action, change)
        if refused:  # which was not raised within: other requests go on
            raise refused.pop()

    def _end_without_adapter(self) -> None:
        for request in self._core.under_way:
            if not self._adapters.knows(request.adapter):
                request.error = deleted(request)
                self._core.abort([request])

    def _take(self, version: int, *, recompute: bool, noticed: bool = True) -> int:
        """Bring all that depends on weights in step with them; returns the bytes of copies of them that were written.

        noticed: ``notice`` has looked at them. Else it will before anything runs, and what is kept of rotary frequencies is left to
        it: to compare these waits for the device, which may still be at the trainer's step.
        """
        core = self._core
        core.drain()
        if recompute:
            core.scheduler.preempt_all()
        if noticed:
            self._binding.shell.refresh()
        written = self._binding.derive()
        before, shell = core.runner.model, self._binding.shell
        core.runner.bind(shell)
        if before is not shell:
            release_weights(before)  # or weights that were replaced would stay until garbage is collected
        self._adapters.refresh()
        self._end_without_adapter()
        core.set_weight_version(version)
        self._behind = False
        return written
