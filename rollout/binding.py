"""Binds a live model to the shell that runs on its weights, and keeps them together: where weight_sync and engine meet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stoker.engine.cache.kv_cache import LayerShape
from stoker.engine.layers.derived_weights import DerivedWeights
from stoker.engine.layers.fused_layers import release_weights
from stoker.engine.model import ModelShell
from stoker.engine.parallel.mixers import share_of
from stoker.engine.parallel.tensor_parallel import TensorParallel
from stoker.engine.supported_models import check_experts, check_supported
from stoker.engine.virtual_memory import virtual_buffer
from stoker.kernels.errors import (
    EngineStateError,
    StokerError,
    UnsupportedModelError,
    WeightsMovedError,
)
from stoker.kernels.ops import Ops, check_gpu, ops_for
from stoker.rollout.adapter_sources import AdapterSources
from stoker.rollout.shell_builder import ShellBuilder
from stoker.weight_sync.aliased_source import AliasedSource
from stoker.weight_sync.mirrored_source import MirroredSource
from stoker.weight_sync.module_tree import Tree
from stoker.weight_sync.naming import check_kinds, kinds, unwrap
from stoker.weight_sync.peft_adapters import Switches, active_adapters
from stoker.weight_sync.rank_agreement import ALONE, Ranks, agree, ranks_of, refuse, telling
from stoker.weight_sync.shards import is_sharded
from stoker.weight_sync.source import WeightSource, source_for


class ModelBinding:
    """Keeps a shell bound to the model as it is now, through whatever the trainer does to it.

    dtype, device: the engine's (``torch.dtype``, ``torch.device``); "auto" is the model's. kv_dtype: of the KV cache; None is
    the dtype in which the model computes keys and values. in_fp8: fused layers multiply by rounded weights. parallel: the ranks
    that run the model together, if there are several. Raises ``UnsupportedModelError`` where the weights can be neither borrowed
    nor copied. The model is not changed before ``fuse``.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: Any,
        device: Any,
        *,
        check_finite: bool,
        gather_bytes: int,
        kv_dtype: torch.dtype | None,
        in_fp8: bool,
        parallel: TensorParallel | None,
        deterministic: bool,
        max_loras: int,
        max_lora_rank: int,
    ) -> None:
        self.model = model
        self.deterministic, self.kv_dtype, self.check_finite = deterministic, kv_dtype, check_finite
        copying: dict[str, Any] = {"check_finite": check_finite, "gather_bytes": gather_bytes, "stable": virtual_buffer}
        self.adapters = AdapterSources(model, deterministic=deterministic, gathering=copying)
        self.max_loras = max_loras
        dtype, self._device = (None if option == "auto" else option for option in (dtype, device))
        self._source_now = partial(source_for, model, dtype, self._device, **copying)
        self.source: WeightSource = self._source_now()
        check_gpu(self.source.device)
        check_supported(self.source.module)
        check_experts(self.source.module, self.source.dtype)
        self.shell: ModelShell
        self.shapes: list[LayerShape]
        self.ops: Ops
        self._in_fp8, self.parallel = in_fp8, parallel
        self._shells = ShellBuilder(
            in_fp8=in_fp8,
            parallel=parallel,
            deterministic=deterministic,
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
        )
        self.fused_layers = 0
        self.free_memory: int | None = None  # the least that a rank had which runs the model too, when it was built
        self.wholes: dict[tuple[str, ...], Tensor] = {}
        self.derived: DerivedWeights | None = None
        self._seen: tuple[Tree, Switches] | None = None  # the model when last looked at, where it is whole
        self._kinds: dict[str, type] = kinds(self.source.module)
        self._refill = False  # whether waking fills weights that slept from the model, and not from host memory
        self._changed = False  # weights changed, and ``notice`` has not said so yet
        self.held_elsewhere = True  # whether somebody else has the model, and may train it without telling the engine
        self._stream: Any = None  # the stream in which the weights were last used

    def build(self, max_model_len: int) -> None:
        """Make the shell, and find what its layers store for a token. Ranks of a sharded trainer call this together."""
        self.shell = self._shells.make(self.source, max_model_len)
        self.in_order()
        self.source.pull()
        try:
            shapes = self.shell.layer_shapes()
        except UnsupportedModelError as error:
            dtypes = {str(t.dtype) for t in self.source.tensors().values() if isinstance(t, nn.Parameter)}
            if len(dtypes) > 1:
                raise UnsupportedModelError(
                    f"{error}. Its parameters have several dtypes, {sorted(dtypes)}, which do not run together without "
                    "autocast: set EngineConfig(dtype=...) to one of them"
                ) from error
            raise
        layers = [(shape.key_dim, shape.value_dim, shape.dtype) for shape in shapes if shape.heads]
        self.ops = ops_for(
            self.source.device,
            layers,
            kv_dtype=self.kv_dtype,
            in_fp8=self._in_fp8,
            deterministic=self.deterministic,
        )
        self.shapes = self._as_kept(shapes)

    def _as_kept(self, shapes: Sequence[LayerShape]) -> list[LayerShape]:
        """The shapes with the KV cache's dtype, and of several ranks with this one's heads."""
        kept = [replace(s, dtype=self.kv_dtype) if s.heads and self.kv_dtype else s for s in shapes]
        return kept if self.parallel is None else [share_of(s, self.parallel) for s in kept]

    def fuse(self) -> None:
        """Lay weights side by side and replace layers by their fused form. After an exception ``release`` undoes it."""
        self.shell, self.fused_layers, self.wholes, self.derived = self._shells.fuse(self.shell, self.source, self.ops)
        self._look_at_adapters()
        self._remember()
        self._watch()

    def refresh(self) -> int:
        """Take the weights as they are now; returns the bytes that were written.

        This takes a quick look (``Tree.looks_same``, ``Switches.looks_same``); what that misses is left to ``notice``, which has
        to come before anything runs. Raises ``WeightsMovedError`` or ``UnsupportedModelError`` where the engine cannot run on
        the weights; the binding then keeps the old shell, and goes on failing.
        """
        with self.together():
            same = self._looks_as_seen()
            moved = not same and self._has_moved()
            anew = self._made_anew() if moved else None
            if anew and anew[0] is self.source:
                self._succeed(*anew)
                self._changed = True  # or nobody would be told, should a later line raise
            elif not moved:
                self._look_at_adapters(same=same)
                self._remember()
        with self.adapters.telling():
            written = (self.source if anew is None else anew[0]).pull(self.adapters.gathered)
            if anew and anew[0] is not self.source:
                self._succeed(*anew, ranks_of(self.model, self._device))
        written += self.adapters.pull()
        self._changed = False
        return written

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context manager for what comes before a gather: where this rank fails, the others fail too, and do not wait for it."""
        try:
            yield
        except Exception as error:
            if not self.source.refuse(error):
                refuse(*ranks_of(self.model, self._device), error)  # it may be sharded now
                self.adapters.refuse(error)
            raise

    def rebind(self) -> None:
        """Take the weights as they are now, where the model has ``moved``, without help of other ranks.

        Raises ``WeightsMovedError`` as ``check_alone``.
        """
        self.check_alone()
        source, shell = self._made_anew()
        if source is not self.source:
            source.pull()
            if isinstance(self.source, AliasedSource) and not self.source.complete:
                source.spoil()  # they are partly old and partly new, until an update says that they are right
        self._succeed(source, shell)

    def check_alone(self) -> None:
        """Raise ``WeightsMovedError`` where a model that has ``moved`` cannot be taken without another rank."""
        if self._needs_new_source() and (is_sharded(self.model) or not self.source.at_hand):
            raise WeightsMovedError(
                "the model is sharded now, or a setting of it has changed, and its weights, of which not all are kept, were "
                "gathered or came from elsewhere: call update_weights() on every rank once"
            )

    def _made_anew(self) -> tuple[WeightSource, ModelShell]:
        """A source of the model as it is now, from which nothing was pulled yet, and a shell over it."""
        if not is_sharded(self.model):  # then these parameters are not its any more
            self.source.check()
        source = self._source_now() if self._needs_new_source() else self.source
        (dtype, device), before = (source.dtype, source.device), (self.source.dtype, self.source.device)
        if (dtype, device) != before:
            raise WeightsMovedError(
                f"the model is {dtype} on {device} now; the engine was built for {before[0]} on {before[1]}, and keeps to these "
                "where EngineConfig(dtype=..., device=...) names them. Move the model back, or build a new engine on it"
            )
        shell = self._shells.make(source, self.shell.max_model_len)
        if self._as_kept(shell.layer_shapes()) != self.shapes or shell.vocab != self.shell.vocab:
            raise UnsupportedModelError("the model has another shape than the engine was built for: build a new engine")
        return source, shell

    def _succeed(self, source: WeightSource, shell: ModelShell, ranks: Ranks = ALONE) -> None:
        """Run on this source and shell from now on. ranks: those that call this together; where one of them fails, all do."""
        kept, dropped = self.source, source
        try:
            with telling(*ranks):  # the others may be gathering meanwhile
                if isinstance(source, AliasedSource) and isinstance(self.source, AliasedSource):
                    source.succeed(self.source)
                fused = self._shells.fuse(shell, source, self.ops)
                self._seen = None
                self.adapters.look(fused.shell, source, announced=True)
            agree(*ranks)
            kept, dropped = source, self.source
        finally:
            if isinstance(dropped, AliasedSource) and dropped is not kept:
                dropped.superseded() if isinstance(kept, AliasedSource) else dropped.release()
        self.source, self._kinds = source, kinds(source.module)
        self.shell, self.fused_layers, self.wholes, self.derived = fused
        self._remember()

    def moved(self) -> bool:
        """Whether any borrowed tensor of the model was added, replaced or moved since it was bound, or a setting changed."""
        return self.shell.settings.changed or self.source.moved(unwrap(self.model))

    def _needs_new_source(self) -> bool:
        """Whether what has ``moved`` takes a new source.

        A changed setting alone does not: another copy of the weights would take as much memory again, and lack those that came
        from elsewhere. But it does where not all weights are there, since fused layers are compared with their originals on them.
        """
        source = self.source
        return source.moved(unwrap(self.model)) or bool(source.passing) or not source.complete

    def _has_moved(self) -> bool:
        """``moved``, and a check that the modules still are of the classes that the shell was made for."""
        if unwrap(self.model) is self.source.module:
            check_kinds(self.source.module, self._kinds)
        return self.moved()

    def notice(self) -> bool:
        """Take changes that nobody announced; returns whether there were any.

        Raises ``WeightsMovedError`` where that needs other ranks: the model was sharded since the last update, or one of its
        settings has changed and its weights are not all there.
        """
        same = self._is_as_seen()
        moved = not same and self._has_moved()
        if moved:
            self.rebind()
        self._look_at_adapters(announced=False, same=same)
        self._remember()
        changed = self._changed
        if self.held_elsewhere or not isinstance(self.source, AliasedSource):
            changed |= self.source.catch_up()
        self._changed = False
        return self.adapters.take_changed() or moved or changed

    def _is_as_seen(self) -> bool:
        """Whether the model is as it was at the last look. Quick: numbers in tensors are not compared."""
        return self._seen is not None and all(part.same() for part in self._seen) and not self.shell.settings.changed

    def _looks_as_seen(self) -> bool:
        """As ``_is_as_seen``, quicker still: it may miss details, but for a sharded model, which no rank may refuse alone later."""
        if self._seen is None or self._seen[0].has_parts:
            return self._is_as_seen()
        return all(part.looks_same() for part in self._seen)

    def _remember(self) -> None:
        """Remember the model as it is now, where the shell is known to be bound to it."""
        # Not while adapters are being switched. Nor what a forward has gathered, or puts elsewhere each time.
        if self._seen is None and self.adapters.active is not None and self._lies_still():
            self._seen = Tree(self.model), Switches(self.model)

    def _lies_still(self) -> bool:
        """Whether modules hold what they will hold after the next forward, too."""
        as_read = isinstance(self.source, MirroredSource) and self.source.lies_as_read()
        return as_read or not is_sharded(self.model)

    def _look_at_adapters(self, *, announced: bool = True, same: bool = False) -> None:
        """As ``AdapterSources.look``."""
        if not same:
            self._seen = None
        self.adapters.look(self.shell, self.source, announced=announced, same=same)

    def load_adapter(self, name: str, source: Any) -> None:
        """As ``AdapterSources.load``."""
        self._seen = None
        self.adapters.load(name, source, self.shell, self.source)

    def active_adapter(self) -> str | None:
        """What the trainer would run now: the name of its adapter, or several names with "+" between; None for the base."""
        seen = self._seen is not None and self._seen[0].looks_same() and self._seen[1].same()
        active = self.adapters.active if seen else None
        return self.adapters.name_of(active_adapters(unwrap(self.model)) if active is None else active)

    @property
    def _keepers(self) -> list[WeightSource | AdapterSources | DerivedWeights]:
        """The parts that hold memory which is the engine's own."""
        return [self.source, self.adapters] if self.derived is None else [self.derived, self.source, self.adapters]

    @property
    def resident(self) -> bool:
        """Whether all weights are in the device's memory."""
        return all(keeper.resident for keeper in self._keepers)

    @property
    def stable_addresses(self) -> bool:
        """Whether the engine's own copies of weights keep their addresses when their memory is taken again."""
        return all(keeper.stable_addresses for keeper in self._keepers)

    @property
    def nbytes(self) -> int:
        """Bytes of the engine's own copies of weights."""
        return sum(keeper.nbytes for keeper in self._keepers)

    def derive(self) -> int:
        """Make anew what is derived of weights that have changed; returns the bytes that were written."""
        if self.derived is None:
            return 0
        self._watch()
        return self.derived.refresh()

    def _watch(self) -> None:
        """Have ``notice`` see every change of the trainer's tensors from now on: what is derived of them does not follow by itself."""
        if self.derived is not None and isinstance(self.source, AliasedSource):
            self.source.catch_up()

    def give_back(self, *, drop: bool) -> None:
        """Free the memory of the engine's own weights.

        Those that ``take_again`` could not fill from the model are kept in host memory, unless ``drop``.
        """
        self._refill = not drop and self.source.at_hand
        self._give_back_weights(drop=drop or self._refill)
        self.adapters.give_back(drop=drop)

    def _give_back_weights(self, *, drop: bool) -> None:
        if self.derived is not None:
            self.derived.give_back(drop=drop)
        self.source.give_back(drop=drop)

    def take_again(self) -> None:
        """Take the weights' memory again. Adapters in it are the same, and may lie at other addresses."""
        self.in_order()
        self.source.take_again()
        self.adapters.take_again()
        self.adapters.lie_elsewhere()
        if self.derived is not None:
            self.derived.take_again()
        if self._refill:
            try:
                self._changed |= self.source.fill()
                if self.derived is not None and not isinstance(self.source, AliasedSource):
                    self.derived.refresh()  # some was made before its weights were there again
            except BaseException:  # an interrupt, say: memory that was not filled must not pass for weights
                self._give_back_weights(drop=True)
                raise

    def woken(self) -> None:
        """Look whether weights changed while they slept, for ``notice`` to tell: what waking derived is of the new ones."""
        if (self.derived is not None or self.adapters.weights) and self.resident:
            with suppress(StokerError):  # the next look raises it again
                self._changed |= isinstance(self.source, AliasedSource) and self.source.catch_up()
                self._look_at_adapters(announced=False, same=self._is_as_seen())

    def check_ready(self) -> None:
        """Raise ``EngineStateError`` where the weights are incomplete: dropped, or partly old and partly new."""
        if not (self.source.complete and self.adapters.complete):
            raise EngineStateError(
                "the weights are incomplete since an update failed or sleep(level=3) dropped them: call update_weights()"
            )

    def in_order(self) -> None:
        """Order streams: whatever is launched from now on runs after all earlier reads and writes of these weights.

        Every turn at the engine begins with this, since steps and updates may come under different streams. The trainer's steps
        are in the stream of the update that follows them.
        """
        stream: Any = torch.get_device_module(self.source.device).current_stream(self.source.device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def release(self) -> None:
        """Give the model's parameters storages of their own again, and let go of those they had. Nothing can run afterwards."""
        self.adapters.release()
        if self.derived is not None:
            self.derived.release()
        self.wholes, self.derived = {}, None
        if (shell := vars(self).pop("shell", None)) is not None:
            release_weights(shell)
        self.source.release()  # last: from here on each piece of memory lives as long as the parameters in it
