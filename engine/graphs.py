"""Decode windows as CUDA graphs: the whole step, sampler and stop detection included, captured once and replayed.

There is one graph for each number of rows (a bucket) and way of sampling. Decode steps read and write static buffers only, so a
graph serves all such batches, whatever their lengths, and the host just launches ``num_steps`` replays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stoker.engine.batch import Batch
from stoker.engine.cache.kv_cache import KVCache
from stoker.engine.model import ModelShell
from stoker.engine.runner import EagerStep, Pending
from stoker.engine.sampler import Sampler, SamplingRows
from stoker.kernels.reference.decode_window import Record

_log = logging.getLogger("stoker")
_Key = tuple[object, ...]
_MOST_GRAPHS = 256  # eight ways of sampling, each at all sizes of steps of 256 rows or fewer


@dataclass(frozen=True, slots=True)
class _Graph:
    replay: Callable[[], None]
    step: Tensor  # int64 [rows], the row of ``outputs`` that the next replay writes
    outputs: tuple[Tensor, ...]  # as ``Pending.copies``, [window, rows, ...] each


class GraphStep:
    """An ``EagerStep`` that replays decode windows.

    The first batch of a kind runs eagerly, which also compiles its kernels; then its step is captured. A step that cannot be
    captured, or for which memory is short, goes on running eagerly, and the log says so once. Graphs take memory: when there
    are too many, the one that was not replayed for longest is dropped.
    """

    def __init__(self, eager: EagerStep, window: int) -> None:
        self.eager = eager
        self.runtime = eager.runtime
        self.window = window
        self._graphs: dict[_Key, _Graph | None] = {}  # the most recently replayed last; None: capturing failed
        self._layout: int | None = None  # of adapters, when graphs with adapters were captured
        self._inputs = 0  # the address of the input buffer that captured steps read

    @property
    def model(self) -> ModelShell:
        return self.eager.model

    @property
    def sampler(self) -> Sampler:
        return self.eager.sampler

    @property
    def kv(self) -> KVCache:
        return self.eager.kv

    def bind(self, model: ModelShell) -> None:
        if model is not self.eager.model:
            self.release_graphs()
        self.eager.bind(model)

    @property
    def has_graphs(self) -> bool:
        return any(graph is not None for graph in self._graphs.values())

    def release_graphs(self) -> None:
        """Drop every graph and give its memory back; each is captured again when it is next needed."""
        self._forget(self._graphs)
        self.runtime.release_graph_memory()

    def _forget(self, keys: Iterable[_Key]) -> None:
        """Drop graphs. Memory that a launched replay writes to stays until that is over."""
        for key in list(keys):
            graph = self._graphs.pop(key)
            for memory in () if graph is None else (graph.step, *graph.outputs):
                self.runtime.let_go(memory)

    def __call__(self, batch: Batch) -> Pending:
        if not (batch.decode and batch.any_sampled) or batch.scoring is not None or batch.has_images:
            return self.eager(batch)
        inputs = batch.token_ids.untyped_storage().data_ptr()
        if inputs != self._inputs:  # moved, to fit a longer list of ids: captured steps read the old place
            self._forget(self._graphs)
            self._inputs = inputs
        adapters = None if batch.adapters is None else self.model.lora.layout
        if adapters is not None and adapters != self._layout:
            if self._layout is not None:  # graphs of other adapters are never replayed again
                self._forget(key for key in self._graphs if key[0] is not None)
            self._layout = adapters
        followed = batch.sampling.constraints
        automata = None if followed is None else followed.automata.data_ptr()  # moves when it grows
        key = (
            adapters,
            batch.shared,
            *_kind(batch.sampling, batch.token_ids.shape[0]),
            batch.rope_deltas is None,
            automata,
        )
        if key in self._graphs:
            graph = self._graphs[key] = self._graphs.pop(key)
            return self.eager(batch) if graph is None else self._replay(graph, batch)
        pending = self.eager(batch)
        if automata is not None:
            self._forget(key for key in self._graphs if key[-1] not in (None, automata))
        while len(self._graphs) >= _MOST_GRAPHS:
            self._forget([next(iter(self._graphs))])
        self._graphs[key] = self._capture(batch)
        return pending

    def _replay(self, graph: _Graph, batch: Batch) -> Pending:
        graph.step.zero_()
        for _ in range(batch.num_steps):
            graph.replay()
        results = (out[: batch.num_steps, : batch.num_rows] for out in graph.outputs)
        return Pending(tuple(self.runtime.to_host(t) for t in results))

    def _capture(self, batch: Batch) -> _Graph | None:
        rows, device = batch.token_ids.shape[0], batch.token_ids.device
        sizes: list[tuple[int, ...]] = [(self.window, rows)]
        if batch.sampling.top_logprobs:
            sizes.append((self.window, rows, batch.sampling.top_logprobs))
        outputs = tuple(
            torch.zeros(size, dtype=dtype, device=device) for size in sizes for dtype in (torch.long, torch.float32)
        )

        step = torch.zeros(rows, dtype=torch.long, device=device)
        record = Record(step, outputs[0], outputs[1], batch.sampled, batch.sampling.slots)

        def finish(results: Sequence[Tensor], record: Record) -> None:
            for output, result in zip(outputs[2:], results[2:], strict=True):
                output.index_copy_(0, step[:1], result[None])
            batch.advance(self.eager.ops, results[0], results[1], record)

        def body() -> None:
            (noise,) = self.sampler.noise(batch.sampling, batch.seq_lens, 1)
            finish(self.eager.step(batch, noise).columns, record)

        try:
            with torch.inference_mode(), torch.autocast(device.type, enabled=False):
                # A kernel's code cannot always be loaded during a capture, and a batch of a single step has not run this
                # part: so run it once first. It moves the batch one step too far, in buffers that every plan writes anew;
                # only of the newest tokens it gets a copy.
                finish([output[0].clone() for output in outputs], replace(record, newest=batch.sampled.clone()))
                return _Graph(self.runtime.capture(body), step, outputs)
        except RuntimeError as error:  # torch.OutOfMemoryError too
            _log.warning("decode steps of %d rows run without a CUDA graph: capturing one failed (%s)", rows, error)
            return None


def _kind(rows: SamplingRows, count: int) -> _Key:
    """What a captured step depends on besides the contents of its buffers."""
    return (
        count,
        rows.stop_ids.shape[1],  # longer lists of ids are in other buffers
        rows.biased.shape[1],
        rows.any_random,
        rows.any_greedy,
        rows.any_truncated,
        rows.any_penalised,
        rows.any_min_tokens,
        rows.any_biased,
        rows.modes,
        rows.top_logprobs,
    )
