"""The static, padded tensors that steps read, and how each plan fills them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.engine.batch import NO_ATTENTION, Batch
from stoker.engine.constraints import Constraints
from stoker.engine.device import Runtime
from stoker.engine.images.inputs import ImagePart, image_rows, spans_within
from stoker.engine.packed_inputs import PackedInputs, Spec
from stoker.engine.plan import Plan
from stoker.engine.plan_arrays import PlanArrays
from stoker.engine.request import Request
from stoker.engine.sampler import SamplingRows
from stoker.engine.scorer import ScoreRows
from stoker.kernels.ops import Ops
from stoker.kernels.reference.lora import AdapterRows
from stoker.kernels.reference.recurrent import StateRows

_WIDE = 64  # ids in a list: up to so many cost nothing to send, also for requests that have fewer


class StepInputs:
    """Sampling parameters by slot on the host, written at admission, and static device buffers, filled by each plan."""

    _FIELDS = (
        ("inverse_temperature", np.float32),
        ("greedy", np.bool_),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("seed", np.int64),
        ("sample_index", np.int64),
        ("first_stop", np.int64),
        ("mode", np.int64),
    )
    _LISTS: tuple[tuple[str, type[np.generic]], ...] = (
        ("stop_ids", np.int64),
        ("biased", np.int64),
        ("bias", np.float32),
    )

    def __init__(
        self,
        ops: Ops,
        runtime: Runtime,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_blocks: int,
        block_size: int,
        token_bytes: int,
        vocab: int,
        beside: Sequence[int],
    ) -> None:
        """max_blocks: of one sequence. token_bytes: what one layer keeps of a token. vocab: one more than the largest id.
        beside: ``BlockLayout.beside``, for as many kinds of blocks as there are."""
        self.ops = ops
        self.runtime = runtime
        self.max_rows = max_num_seqs
        self.max_tokens = max(max_num_batched_tokens, max_num_seqs)
        self.block_size = block_size
        self.token_bytes = token_bytes
        # One row more than there are slots: the padding, greedy and without any request's ids.
        self._host: dict[str, NDArray[Any]] = {
            name: np.zeros(max_num_seqs + 1, dtype=kind) for name, kind in self._FIELDS
        }
        for name in ("inverse_temperature", "top_p", "repetition"):
            self._host[name][:] = 1
        self._host["greedy"][:] = True
        # Lists, each padded with its last entry; an empty list of stop ids holds an id that no token has.
        self._lists: dict[str, NDArray[Any]] = {
            name: np.full((max_num_seqs + 1, 1), vocab if name == "stop_ids" else 0, dtype=kind)
            for name, kind in self._LISTS
        }

        def static(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.long, device=runtime.device)

        self.constraints = Constraints(runtime, max_num_seqs)
        # One for each kind of block: all layers', or one of layers that see all keys and one of those with a window.
        self._beside = beside
        self._slots = static(len(self._beside), self.max_tokens)
        self._rope_deltas = static(3, self.max_tokens)
        self._block_tables = [static(max_num_seqs, max_blocks) for _ in self._beside]
        self._tables = [static(max_num_seqs + 1, max_blocks) for _ in self._beside]  # by slot
        self._sampled = static(max_num_seqs + 1)
        self._workspace: dict[str, Any] = {}  # attention's
        # Whether attention reads common beginnings of neighbours together: from the first time there are such, and from then on
        # always, as steps are captured for one of the two.
        self._shared = ops.shared_from is None
        self._packed = self._new_packed(self._lists)

    def _new_packed(self, lists: dict[str, NDArray[Any]]) -> PackedInputs:
        return PackedInputs(self._layout, (self.max_rows, self.max_tokens, *_widths(lists)), self.runtime.channel)

    @classmethod
    def _layout(cls, rows: int, tokens: int, *widths: int) -> dict[str, Spec]:
        by_row = ("slot_index", "kept_slots", "last_token", "seq_lens", "last_lens")
        by_token = ("token_ids", "positions", "token_rows", "adapter_slots")
        return {
            **{name: (kind, (rows,)) for name, kind in cls._FIELDS},
            **dict.fromkeys(by_row, (np.int64, (rows,))),
            "row_starts": (np.int64, (rows + 1,)),
            **{name: (kind, (rows, width)) for (name, kind), width in zip(cls._LISTS, widths, strict=True)},
            **dict.fromkeys(by_token, (np.int64, (tokens,))),
        }

    def fill(self, plan: Plan) -> Batch:
        """Write a plan's requests into the static buffers."""
        for request in plan.admitted:
            self._write_slot(request)
        self.constraints.start(
            (r.slot, r.spec.constraint, r.output if r.spec.constraint else (), r.num_prompt + r.spec.min_tokens)
            for r in plan.admitted
        )
        scored = self._upload(plan)
        step = PlanArrays.of(plan, self.max_rows, self.max_tokens)
        sent = self._send(plan, step)
        static = step.decode and self.ops.static_plans
        columns = self._tables[0].shape[1] if static else int(-(-step.last.max() // self.block_size))
        block_tables = self._take_tables(sent["slot_index"], step.rows, columns)
        window_tables = block_tables[1] if len(block_tables) == 2 else None
        if step.token_ids.min() < 0:  # sampled by a plan whose results were not read yet
            newest = self._sampled.index_select(0, sent["slot_index"])
            newest = newest if step.decode else newest.index_select(0, sent["token_rows"])
            torch.where(sent["token_ids"] < 0, newest, sent["token_ids"], out=sent["token_ids"])
        slots = self._place(sent, block_tables, len(step.positions), step.tokens)
        of_images = _images_of(plan, step)
        if static and not self._shared:
            self._shared = self._begin_alike(plan.requests)
        attention = self._plan_attention(plan, step, block_tables[0], window_tables, sent["seq_lens"], of_images)
        return Batch(
            num_rows=len(plan.requests),
            num_steps=plan.num_steps,
            decode=step.decode,
            token_ids=sent["token_ids"],
            positions=sent["positions"],
            slots=slots[0],
            window_slots=slots[-1],
            last_token=sent["last_token"],
            seq_lens=sent["seq_lens"],
            last_lens=sent["last_lens"],
            block_tables=block_tables[0],
            window_tables=window_tables,
            block_size=self.block_size,
            attention=attention,
            shared=self._shared,
            sampling=self._sampling(plan, sent),
            scoring=ScoreRows.of(plan, scored),
            any_sampled=any(plan.num_samples),
            adapters=AdapterRows(sent["adapter_slots"]) if step.adapters is not None else None,
            sampled=self._sampled,
            state_rows=StateRows(sent["slot_index"], sent["row_starts"], int(step.new.max())),
            images=image_rows(of_images, self.runtime.upload) if of_images else None,
            rope_deltas=self._put_rope_deltas(of_images, step.tokens),
        )

    def _plan_attention(
        self,
        plan: Plan,
        step: PlanArrays,
        block_tables: Tensor,
        window_tables: Tensor | None,
        seq_lens: Tensor,
        of_images: Sequence[ImagePart],
    ) -> Any:
        if not self.token_bytes:  # no layer attends
            return NO_ATTENTION
        return self.ops.plan_attention(
            plan.num_new,
            step.lengths.tolist(),
            block_tables,
            seq_lens,
            block_size=self.block_size,
            token_bytes=self.token_bytes,
            num_steps=plan.num_steps,
            shared=self._shared,
            spans=() if step.decode else spans_within(of_images),
            local_spans=any(features.local_spans for _, _, _, features in of_images),
            workspace=self._workspace,
            window_tables=window_tables,
        )

    def _upload(self, plan: Plan) -> list[Tensor]:
        """Send what is not static: new blocks, for the tables by slot, and ``ScoreRows.arrays``, which are returned."""
        new_blocks, *scored = self.runtime.upload(self._new_blocks(plan), *ScoreRows.arrays(plan))
        if new_blocks.numel():
            for table, blocks in zip(self._tables, new_blocks[2:], strict=True):
                table.index_put_((new_blocks[0], new_blocks[1]), blocks)
        return scored

    def _send(self, plan: Plan, step: PlanArrays) -> dict[str, Tensor]:
        """Write all arrays of the layout, padded, and send them to the device."""
        widths = _widths(self._lists)
        if max(widths) > _WIDE:  # some request's, which may not be in this plan
            longest = [max(counts) for counts in zip(*map(_counts_of, plan.requests), strict=True)]
            widths = [min(width, max(_WIDE, _power_of_two(n))) for width, n in zip(widths, longest, strict=True)]
        arrays, send = self._packed.open(step.rows, step.tokens, *widths)

        def put(name: str, values: NDArray[Any], padding: int = 0) -> None:
            arrays[name][: len(values)] = values
            arrays[name][len(values) :] = padding

        for name, column in self._host.items():
            # No slot is out of bounds. The default mode, "raise", would make a copy.
            np.take(column, step.slots, out=arrays[name], mode="clip")
        for (name, values), width in zip(self._lists.items(), widths, strict=True):
            np.take(values[:, :width], step.slots, axis=0, out=arrays[name], mode="clip")
        new, rows = step.new, step.rows
        put("slot_index", step.slots)
        put("kept_slots", np.where(plan.num_samples, step.slots[: len(new)], self.max_rows), self.max_rows)
        put("last_token", np.arange(rows) if step.decode else new.cumsum() - 1)
        put("row_starts", np.arange(rows + 1) if step.decode else np.concatenate(([0], new.cumsum())), int(new.sum()))
        # A row's seq_len counts the keys of its last token; padded rows see the one key they write to the null block.
        put("seq_lens", step.lengths, 1)
        put("last_lens", step.last, 1)
        put("token_ids", step.token_ids)
        put("positions", step.positions)
        put("token_rows", step.row_of)
        if step.adapters is not None:
            # Padding has the last token's adapter, so that a batch with one adapter is all of that.
            put("adapter_slots", step.adapters, step.adapters[-1])
        return send()

    def _take_tables(self, slots: Tensor, rows: int, columns: int) -> list[Tensor]:
        """The block tables of a plan's rows, int64 [rows, columns] each."""
        taken = [table[:rows, :columns] for table in self._block_tables]
        for own, by_slot in zip(taken, self._tables, strict=True):
            torch.index_select(by_slot[:, :columns], 0, slots, out=own)
        return taken

    def _place(self, sent: dict[str, Tensor], block_tables: Sequence[Tensor], count: int, tokens: int) -> Tensor:
        """Where each token's key and value go, int64 [kinds of blocks, tokens]; from ``count`` on into the null block."""
        where = self._slots[:, :tokens]
        for slots, table in zip(where, block_tables, strict=True):
            blocks = table[sent["token_rows"], sent["positions"] // self.block_size]
            torch.add(sent["positions"] % self.block_size, blocks, alpha=self.block_size, out=slots)
        where[:, count:] = 0
        return where

    def _put_rope_deltas(self, of_images: Sequence[ImagePart], tokens: int) -> Tensor | None:
        """Rotary positions minus places of a step's tokens; None where all are 0, one row where the three are equal."""
        if all(features.rope_deltas is None for _, _, _, features in of_images):
            return None
        rope_deltas = np.zeros((3, tokens), dtype=np.int64)
        for where, start, count, features in of_images:
            rope_deltas[:, where : where + count] = features.rope_deltas_of(start, count)
        static = self._rope_deltas[:, :tokens]
        static.copy_(self.runtime.upload(rope_deltas)[0])
        # Positions beyond the places, as videos have, are not among the precomputed rotary embeddings.
        return static if (rope_deltas != rope_deltas[0]).any() or rope_deltas.max() > 0 else static[0]

    def _begin_alike(self, requests: Sequence[Request]) -> bool:
        """Whether any two neighbours have a common beginning long enough for attention to read it once for both."""
        assert self.ops.shared_from is not None
        last = -(-self.ops.shared_from // self.block_size) - 1
        blocks = [r.block_ids[last] if last < len(r.block_ids) else None for r in requests]
        return any(block is not None and block == other for block, other in pairwise(blocks))

    def _new_blocks(self, plan: Plan) -> NDArray[np.int64]:
        """Slot, column and number of blocks the device does not know yet, int64 [3, n], or [4, n] with those of windows.

        Old entries need not be cleared: what a slot's last request, or a window that moved on, left behind is never read.
        """
        slots: list[int] = []
        columns: list[int] = []
        blocks: list[int] = []
        window_blocks: list[int] = []
        for request in plan.requests:
            first, end = request.first_new_block, len(request.block_ids)
            if first < end:
                slots += [request.slot] * (end - first)
                columns += range(first, end)
                blocks += request.block_ids[first:]
                window_blocks += request.window_ids[first:]
                request.first_new_block = end
        kinds = zip((blocks, window_blocks), self._beside, strict=False)
        return np.array([slots, columns, *(np.multiply(kind, beside) for kind, beside in kinds)], dtype=np.int64)

    def release_workspace(self) -> None:
        """Give back attention's workspace. There may be no graphs: they remember where it is."""
        self._workspace.clear()

    def _write_slot(self, request: Request) -> None:
        spec, slot, host = request.spec, request.slot, self._host
        host["inverse_temperature"][slot] = np.float32(1) / np.float32(spec.temperature or 1)
        host["greedy"][slot] = spec.temperature == 0.0
        host["top_k"][slot], host["top_p"][slot], host["min_p"][slot] = spec.top_k, spec.top_p, spec.min_p
        host["repetition"][slot] = spec.repetition_penalty
        host["presence"][slot], host["frequency"][slot] = spec.presence_penalty, spec.frequency_penalty
        host["seed"][slot], host["sample_index"][slot] = spec.seed, request.sample_index
        # With a constraint, that decides when a stop id may come.
        host["first_stop"][slot] = 0 if spec.constraint is not None else request.num_prompt + spec.min_tokens
        host["mode"][slot] = spec.logprobs_mode
        lists = dict(zip(self._lists, _lists_of(request), strict=True))
        self._widen({name: len(values) for name, values in lists.items()})
        for name, values in lists.items():
            row = self._lists[name][slot]
            row[: len(values)] = values
            row[len(values) :] = values[-1] if values else self._lists[name][-1, 0]

    def _widen(self, wanted: dict[str, int]) -> None:
        """Make room for so many ids in each list, rounded up to a power of two: steps are captured anew for each width."""
        wider = {
            name: np.pad(
                self._lists[name], ((0, 0), (0, _power_of_two(count) - self._lists[name].shape[1])), mode="edge"
            )
            for name, count in wanted.items()
            if count > self._lists[name].shape[1]
        }
        if not wider:
            return
        lists = self._lists | wider
        packed = self._new_packed(lists)  # first: where there is no memory for it, the lists stay as they are
        self.runtime.let_go(self._packed.static)
        self._lists, self._packed = lists, packed

    def _sampling(self, plan: Plan, sent: dict[str, Tensor]) -> SamplingRows:
        specs = [r.spec for r in plan.requests]
        return SamplingRows(
            **{name: sent[name] for name in self._host},
            **{name: sent[name] for name in self._lists},
            slots=sent["kept_slots"],
            any_random=any(s.temperature > 0 for s in specs),
            any_greedy=any(s.temperature == 0 for s in specs),
            any_truncated=any(s.truncated for s in specs),
            any_penalised=any(s.penalised for s in specs),
            any_min_tokens=any(s.min_tokens > r.num_output for r, s in zip(plan.requests, specs, strict=True)),
            any_biased=any(s.bias for s in specs),
            modes=tuple(sorted({s.logprobs_mode for s in specs})),
            top_logprobs=max(s.top_logprobs for s in specs),
            constraints=self.constraints.rows if any(s.constraint is not None for s in specs) else None,
        )


def _lists_of(request: Request) -> tuple[Sequence[float], ...]:
    """The request's lists, in the order of ``_LISTS``."""
    bias = request.spec.bias  # for a whole vocabulary, zip(*bias) would take half a second
    return sorted(request.spec.stop_ids), [token for token, _ in bias], [by for _, by in bias]


def _counts_of(request: Request) -> tuple[int, ...]:
    """The lengths of ``_lists_of``."""
    return len(request.spec.stop_ids), len(request.spec.bias), len(request.spec.bias)


def _images_of(plan: Plan, step: PlanArrays) -> list[ImagePart]:
    """The parts of a plan's tokens that requests with images have."""
    return [
        (int(step.new[:row].sum()), plan.starts[row], plan.num_new[row], request.images.features)
        for row, request in enumerate(plan.requests)
        if request.images is not None and request.images.features is not None
    ]


def _widths(lists: dict[str, NDArray[Any]]) -> list[int]:
    return [values.shape[1] for values in lists.values()]


def _power_of_two(count: int) -> int:
    return int(2 ** (count - 1).bit_length())
