"""The Triton attention against a dense softmax in float64 and against the torch reference.

Without a CUDA device kernels are interpreted, in fp32 and fp16; with one the same cases run compiled, in bf16 too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from cases_attention import DEVICE, Heads, Paged, Row
from families import make_model
from pretend_device import build
from test_attention import TOLERANCE
from torch import Tensor

from stoker.kernels.attention import attend, unsupported, workspace_bytes, write_kv
from stoker.kernels.attention_plan import UNIT_ROWS
from stoker.kernels.ops import REFERENCE
from stoker.kernels.reference.attention import Visibility
from stoker.kernels.triton_ops import TRITON
from stoker.rollout import SamplingParams

GPU_ONLY = [pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]  # the interpreter's bf16 arithmetic is wrong
GPU_PAGED = [pytest.param(16, torch.bfloat16, marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, *GPU_ONLY]
KERNELS = {
    *("decode_kernel", "prefill_kernel", "write_kernel"),
    *("work_list_kernel", "common_blocks_kernel", "units_kernel"),
}
PLAIN: dict[str, Any] = {"visibility": Visibility()}
FEATURES: list[dict[str, Any]] = [
    PLAIN,
    {"visibility": Visibility(window=1)},
    {"visibility": Visibility(window=17)},
    {"visibility": Visibility(window=150)},
    {"visibility": Visibility(chunk=16)},
    {"visibility": Visibility(window=40, chunk=135)},
    PLAIN | {"softcap": 2.0},
    PLAIN | {"sinks": True},
    {"visibility": Visibility(window=140), "sinks": True, "softcap": 3.0},
]
SMALL = Heads(2, 2, 16, 16)
NARROW = Heads(1, 2, 16, 16)
# Query heads to a key head from 1 to 16, and the dimensions of real models: few key heads, as each is worked on alike.
MODELS = [
    Heads(2, 4, 64, 64),  # Llama 3.2 1B
    Heads(1, 7, 128, 128),  # Qwen2.5 7B
    Heads(2, 1, 80, 80),  # Phi 2
    Heads(1, 3, 96, 96),  # Phi 3
    Heads(1, 16, 112, 112),
    Heads(1, 2, 256, 256),  # Gemma 2
    Heads(1, 5, 192, 128),  # DeepSeek V3, keys and values written out
    Heads(1, 24, 576, 512, latent=True),  # and in the latent form
    Heads(2, 2, 12, 6),
]
LENGTHS = [1, 16, 17, 129, 300]  # of decode rows, around the borders of blocks and splits
MIXED = [Row(9), Row(40, 40), Row(300), Row(150, 30), Row(33, 9), Row(140, 2), Row(1), Row(100, 64)]


def each_model(*dtypes: torch.dtype) -> list[Any]:
    """Models with the dtypes in turn, and all of them in bf16 on a GPU."""
    interpreted = [pytest.param(h, dtypes[i % len(dtypes)], id=h.name) for i, h in enumerate(MODELS)]
    compiled = [pytest.param(h, torch.bfloat16, id=f"{h.name}-bf16", marks=pytest.mark.gpu) for h in MODELS]
    return interpreted + compiled


def options_of(case: Paged, feature: dict[str, Any]) -> dict[str, Any]:
    options = {"scale": case.heads.key_dim**-0.5} | feature
    if "sinks" in options:
        heads = case.heads.kv_heads * case.heads.group
        options["sinks"] = torch.linspace(-1, 3, heads, dtype=case.dtype, device=DEVICE)
    return options


def check(case: Paged, plan: Any, feature: dict[str, Any], step: int = 0) -> Tensor:
    """Output and log-sum-exp of all real tokens; the padded ones are finite. Returns the output."""
    query, options = case.query(), options_of(case, feature)
    out, lse = attend(query, case.key_cache, case.value_cache, plan, with_lse=True, **options)
    wanted, wanted_lse = case.dense(query, step, **options)
    count = len(wanted)
    assert out.shape == (*query.shape[:2], case.heads.value_dim) and out.dtype == case.dtype and out.isfinite().all()
    atol = TOLERANCE[case.dtype]
    torch.testing.assert_close(out[:count].cpu().double(), wanted, rtol=0, atol=atol)
    assert lse is not None
    torch.testing.assert_close(lse[:count].cpu().double(), wanted_lse, rtol=1e-6, atol=atol)
    return out


@pytest.mark.parametrize(("block_size", "dtype"), [(16, torch.float32), (4, torch.float16), *GPU_PAGED])
def test_decode_rows_with_every_option(block_size: int, dtype: torch.dtype) -> None:
    case = Paged(NARROW, [Row(n) for n in LENGTHS], dtype, padded=1, block_size=block_size)
    plan = case.plan(TRITON)
    for feature in FEATURES:
        check(case, plan, feature)


@pytest.mark.parametrize(("heads", "dtype"), each_model(torch.float32, torch.float16))
def test_decode_of_real_models(heads: Heads, dtype: torch.dtype) -> None:
    case = Paged(heads, [Row(n) for n in (17, 200)], dtype, padded=1)
    plan = case.plan(TRITON)
    check(case, plan, PLAIN)
    check(case, plan, {"visibility": Visibility(window=33), "sinks": True})


@pytest.mark.parametrize("dtype", [torch.float32, *GPU_ONLY])
def test_chunks_of_prompts_beside_decode_rows_with_every_option(dtype: torch.dtype) -> None:
    case = Paged(NARROW, MIXED, dtype)
    plan = case.plan(TRITON)
    for feature in FEATURES:
        check(case, plan, feature)


@pytest.mark.parametrize(("heads", "dtype"), each_model(torch.float16, torch.float32))
def test_chunks_of_real_models(heads: Heads, dtype: torch.dtype) -> None:
    case = Paged(heads, [Row(20, 11), Row(65, 24)], dtype)
    check(case, case.plan(TRITON), {"visibility": Visibility(window=50), "softcap": 20.0})


@pytest.mark.parametrize("rows", [[Row(n) for n in LENGTHS], MIXED], ids=["decode", "mixed"])
def test_as_the_reference(rows: list[Row]) -> None:
    """What a padded decode row sees is the null block, the reference's as these kernels'."""
    case = Paged(NARROW, rows)
    plans = case.plan(TRITON), case.plan(REFERENCE)
    for feature in FEATURES[2::6]:
        query, options = case.query(), options_of(case, feature)
        found, wanted = (
            ops.paged_attention(query, case.key_cache, case.value_cache, plan, **options)
            for ops, plan in zip((TRITON, REFERENCE), plans, strict=True)
        )
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[torch.float32])


def test_a_batch_of_empty_and_single_rows() -> None:
    case = Paged(SMALL, [Row(300)], padded=0)
    check(case, case.plan(TRITON), PLAIN)
    case = Paged(SMALL, [Row(20), Row(300)], padded=0)
    case.seq_lens[0] = 0
    out, lse = attend(
        case.query(), case.key_cache, case.value_cache, case.plan(TRITON), with_lse=True, scale=1, **PLAIN
    )
    assert not out[0].any() and lse is not None and lse[0].eq(float("-inf")).all() and lse[1].isfinite().all()


def test_a_row_of_larger_splits() -> None:
    case = Paged(NARROW, [Row(1100)], padded=0)
    plan = case.plan(TRITON)
    check(case, plan, PLAIN)
    check(case, plan, {"visibility": Visibility(window=1030)})


@pytest.mark.parametrize(
    ("keys", "splits"),
    [(1, 1), (128, 1), (129, 2), (1024, 8), (1025, 5), (8192, 32), (8193, 17), (16385, 17), (500_000, 31)],
)
def test_splits_follow_from_the_length_and_fit_their_buffers(keys: int, splits: int) -> None:
    """With as many columns as the row needs, which is what buffers are sized by."""
    table = torch.ones(1, -(-keys // 16), dtype=torch.long, device=DEVICE)
    lens = torch.tensor([keys], device=DEVICE)
    plan = TRITON.plan_attention([1], [keys], table, lens, block_size=16, token_bytes=1)
    (lanes,) = plan.lanes
    assert lanes.work_list(Visibility()).counts[0] == splits
    for window in (keys - 1, keys // 2 + 1, 1000, 127):  # begin inside a split
        if window > 0:
            assert lanes.work_list(Visibility(window=window)).counts[0] <= lanes.buffers.max_parts
    assert splits <= lanes.buffers.max_parts


# -- rows that share a beginning ---------------------------------------------------------------------------------


def family(prefix: int, lengths: list[int], parent: int) -> list[Row]:
    """Samples of one prompt; the first of them stands at row ``parent``."""
    return [Row(lengths[0]), *(Row(n, parent=parent, shared=prefix) for n in lengths[1:])]


def units(case: Paged, plan: Any) -> list[tuple[int, int, int]]:
    """(first row, rows, keys shared) of each unit."""
    buffers = plan.lanes[0].buffers
    rows = buffers.unit_rows.tolist()[: case.size]
    return [(first, n, buffers.prefix[first].item()) for first, n in enumerate(rows) if n]


SHARED = {
    "one prompt": (family(304, [310, 320, 305, 350], 0), [(0, 4, 304)]),
    "two prompts": (family(144, [150, 190], 0) + family(304, [305, 310, 400], 2), [(0, 2, 144), (2, 3, 304)]),
    "with strangers": (
        [Row(200), *family(128, [129, 129, 129], 1), Row(20), Row(129), Row(150)],
        [(1, 3, 128)],
    ),
    "not enough": (family(112, [200, 130], 0), []),
    "unlike": ([Row(400), Row(400, parent=0, shared=320), Row(400, parent=1, shared=256)], [(0, 3, 256)]),
    "a system prompt": (
        [*family(320, [321, 330], 0), Row(340, parent=0, shared=128), Row(350, parent=2, shared=320)],
        [(0, 2, 320), (2, 2, 320)],
    ),
    "one table": ([Row(160), Row(160, parent=0, shared=160)], [(0, 2, 144)]),
    "many": (family(128, [129 + i // 4 for i in range(18)], 0), [(0, 16, 128), (16, 2, 128)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, *GPU_ONLY])
@pytest.mark.parametrize("rows", SHARED)
def test_rows_that_begin_alike_are_read_together(rows: str, dtype: torch.dtype) -> None:
    given, wanted = SHARED[rows]
    case = Paged(NARROW, given, dtype)
    plan = case.plan(TRITON)
    assert units(case, plan) == wanted
    check(case, plan, PLAIN | {"sinks": True, "softcap": 3.0})
    assert units(case, case.plan(TRITON, deterministic=True)) == wanted, "what was found stays; nobody looks at it"


def test_units_wider_than_a_tile() -> None:
    """Rows times heads that share a key are more queries than one tile holds."""
    case = Paged(Heads(1, 7, 64, 64), family(128, [129 + 3 * i for i in range(UNIT_ROWS)], 0), padded=0)
    plan = case.plan(TRITON)
    assert units(case, plan) == [(0, UNIT_ROWS, 128)]
    check(case, plan, PLAIN)


def test_shared_keys_come_from_the_first_row_alone() -> None:
    """If the tables of the others named other blocks there by now, nobody would read them."""
    case = Paged(SMALL, family(304, [310, 320, 305], 0))
    plan = case.plan(TRITON)
    case.table[1:3, :19] = 1
    check(case, plan, PLAIN)


def test_a_row_that_ended_in_a_window_disturbs_nobody() -> None:
    """It shrinks to one key, less than its unit shares."""
    case = Paged(SMALL, family(144, [150, 160, 170], 0), later=1)
    plan = case.plan(TRITON)
    case.advance(1)
    case.seq_lens[1] = 1
    plan.next_step()
    query, options = case.query(), options_of(case, PLAIN)
    out, _ = attend(query, case.key_cache, case.value_cache, plan, **options)
    wanted, _ = case.dense(query, 1, **options)
    assert out.isfinite().all()
    torch.testing.assert_close(out[[0, 2]].cpu().double(), wanted[[0, 2]], rtol=0, atol=TOLERANCE[torch.float32])


# -- plans --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_window_advances_as_fresh_plans_would(deterministic: bool) -> None:
    """Across the borders of blocks, splits and windows, with two kinds of layers taking turns."""
    case = Paged(NARROW, [*family(128, [129, 142], 0), Row(127), Row(15)], later=2, padded=1)
    plan = case.plan(TRITON, num_steps=3, deterministic=deterministic)
    options = [options_of(case, feature) for feature in (PLAIN, {"visibility": Visibility(window=127)})]
    for step in range(3):
        if step:
            case.advance(step)
            plan.next_step()
        query = case.query()
        found = [attend(query, case.key_cache, case.value_cache, plan, **o)[0] for o in options]
        fresh = case.plan(TRITON, deterministic=deterministic)
        for out, o in zip(found, options, strict=True):
            assert torch.equal(out, attend(query, case.key_cache, case.value_cache, fresh, **o)[0])
            wanted, _ = case.dense(query, step, **o)
            torch.testing.assert_close(out[: len(wanted)].cpu().double(), wanted, rtol=0, atol=TOLERANCE[torch.float32])


def test_a_plan_serves_what_its_buffers_are_refilled_with() -> None:
    """What a captured step would do: the first plan's tensors, after another batch was put in their place."""
    case = Paged(SMALL, [*family(144, [150, 160], 0), Row(300), Row(20)], spare_rows=0)
    other = Paged(SMALL, [Row(40), Row(280), *family(256, [270, 300], 2)], spare_rows=0)
    first = case.plan(TRITON)
    features = (PLAIN, {"visibility": Visibility(window=100)})
    for feature in features:
        check(case, first, feature)
    columns = min(case.table.shape[1], other.table.shape[1])
    case.table[:, :columns] = other.table[:, :columns]
    case.seq_lens.copy_(other.seq_lens)
    other.table, other.seq_lens, other.workspace = case.table, case.seq_lens, case.workspace
    assert units(other, other.plan(TRITON)) == [(2, 2, 256)]
    for feature in features:
        check(other, first, feature)


def test_the_workspace_is_made_once_and_as_large_as_it_says() -> None:
    case = Paged(NARROW, [Row(300), Row(20)], spare_rows=3)
    check(case, case.plan(TRITON), PLAIN)
    buffers = case.plan(TRITON).lanes[0].buffers
    partials = buffers.partials(2, 16)
    check(case, case.plan(TRITON, deterministic=True), {"visibility": Visibility(window=200)})
    assert all(a is b for a, b in zip(partials, buffers.partials(2, 16), strict=True)) and len(buffers._partials) == 1
    rows, columns = case.static_table.shape
    assert sum(t.nbytes for t in partials) == workspace_bytes(rows, columns, 16, heads=2, value_dim=16)


def test_buffers_live_as_long_as_their_workspace() -> None:
    case = Paged(SMALL, [Row(20)])
    buffers = case.plan(TRITON).lanes[0].buffers
    assert case.plan(TRITON, deterministic=True).lanes[0].buffers is buffers
    gone = weakref.ref(buffers.common)
    case.workspace.clear()
    del buffers
    assert gone() is None and case.plan(TRITON).lanes[0].buffers.rows == len(case.static_table)


# -- numbers that depend on a row alone ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, *GPU_ONLY])
def test_a_row_gets_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    heads = NARROW
    lengths = [300, *torch.randint(1, 30, (63,)).tolist(), 290]
    rows = [Row(n) for n in lengths]
    rows[1] = Row(310, parent=0, shared=288)  # a neighbour that begins like it
    case = Paged(heads, rows, dtype)
    query = case.query()
    options, attention = options_of(case, PLAIN | {"sinks": True}), (case.key_cache, case.value_cache)
    together, _ = attend(query, *attention, case.plan(TRITON, deterministic=True), **options)
    for row in (0, 64):
        table, lens = case.table[row : row + 1].clone(), case.seq_lens[row : row + 1].clone()
        plan = TRITON.plan_attention([1], [lengths[row]], table, lens, block_size=16, token_bytes=1)
        alone, _ = attend(query[row : row + 1], *attention, plan, **options)
        assert torch.equal(alone[0], together[row])
    both = TRITON.plan_attention([1] * 2, lengths[:2], case.table[:2], case.seq_lens[:2], block_size=16, token_bytes=1)
    regrouped, _ = attend(query[:2], *attention, both, **options)
    if dtype == torch.float32:  # rounded to bf16, they may be equal by chance
        assert not torch.equal(together[0], regrouped[0]), "sharing changes the bits, or this test shows nothing"


@pytest.mark.parametrize("dtype", [torch.float32, *GPU_ONLY])
def test_a_deterministic_query_gets_the_same_bits_in_a_chunk_as_in_a_decode_step(dtype: torch.dtype) -> None:
    """Also where the queries are more than the buffers have rows for."""
    chunk, before = 21, 120
    case = Paged(NARROW, [Row(before + chunk, chunk), Row(50)], dtype, padded=0, spare_rows=2)
    plan = case.plan(TRITON, deterministic=True)
    assert len(plan.lanes) == 6 and plan.chunks is None
    query, options = case.query(), options_of(case, PLAIN)
    together, _ = attend(query, case.key_cache, case.value_cache, plan, **options)
    wanted, _ = case.dense(query, **options)
    torch.testing.assert_close(together[: chunk + 1].cpu().double(), wanted, rtol=0, atol=TOLERANCE[dtype])
    table, lens = case.table[:1].clone(), torch.ones(1, dtype=torch.long, device=DEVICE)
    for token in (0, 7, 8, 20):
        lens[0] = before + token + 1
        one = TRITON.plan_attention([1], [1], table, lens, block_size=16, token_bytes=1, deterministic=True)
        alone, _ = attend(query[token : token + 1], case.key_cache, case.value_cache, one, **options)
        assert torch.equal(alone[0], together[token])


# -- the rest -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), [(2, 64, 64), (3, 12, 6), (1, 576, 512)])
def test_keys_and_values_go_to_their_slots_and_nowhere_else(
    heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    caches = [torch.randn(5, 4, heads, dim, device=DEVICE).to(dtype) for dim in (key_dim, value_dim)]
    new = [torch.randn(heads, 6, dim, device=DEVICE).to(dtype).transpose(0, 1) for dim in (key_dim, value_dim)]
    slots = torch.tensor([9, 0, 7, 19, 12, 11], device=DEVICE)
    wanted = [cache.clone() for cache in caches]
    REFERENCE.write_kv(*new, *wanted, slots)
    TRITON.write_kv(*new, *caches, slots)
    assert all(torch.equal(a, b) for a, b in zip(caches, wanted, strict=True))


def test_values_that_are_not_side_by_side_are_stored_too() -> None:
    cache = [torch.zeros(2, 4, 1, 6, device=DEVICE) for _ in range(2)]
    new = torch.randn(6, 1, 3, device=DEVICE).permute(2, 1, 0)
    write_kv(new, new, *cache, torch.tensor([5, 1, 4], device=DEVICE))
    assert torch.equal(cache[1].flatten(0, 1)[[5, 1, 4]], new)


def test_what_the_kernels_do_not_run_is_named() -> None:
    assert unsupported(128, 128, torch.bfloat16) is None and unsupported(576, 512, torch.float32) is None
    assert "float64" in (unsupported(64, 64, torch.float64) or "")
    assert "640" in (unsupported(640, 64, torch.float16) or "") and "513" in (
        unsupported(576, 513, torch.float16) or ""
    )


def test_compiled_for_an_h200_the_kernels_fit_it(tmp_path: Path) -> None:
    """The interpreter takes what the compiler refuses, and knows nothing of registers and shared memory."""
    script = Path(__file__).with_name("compile_attention.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-P", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    made = found["made"]
    # For any number of rows: the rows' own splits and the shared ones in decode steps; a chunk beside rows of their own.
    plan = {"work_list_kernel": 1, "common_blocks_kernel": 1, "units_kernel": 1}
    assert found["decode"] == plan | {"decode_kernel": 2}
    assert found["mixed"] == {"work_list_kernel": 1, "decode_kernel": 1, "prefill_kernel": 1}
    assert {m["kernel"] for m in made} == KERNELS
    for m in made:
        assert m["stack"] == 0, f"{m} spills registers"
        assert m["dependent"] == m["waits"] == (m["kernel"] in ("decode_kernel", "work_list_kernel")), m
        if m["kernel"] in ("decode_kernel", "prefill_kernel"):
            assert m["wide_loads"] and m["tensor_cores"], m
        if m["kernel"] == "decode_kernel":
            resident = m["programs"] // 132  # all programs run at once, or the last ones would run alone
            assert resident * (m["shared"] + 1024) <= 227 * 1024, m
            assert resident * m["threads"] * -(-m["registers"] // 8) * 8 <= 65536, m


@pytest.mark.gpu
def test_a_captured_step_serves_every_length_and_batch() -> None:
    case = Paged(Heads(2, 4, 64, 64), [*family(144, [150, 160], 0), Row(300), Row(20)], torch.bfloat16, later=3)
    plan, query, options = case.plan(TRITON), case.query(), options_of(case, PLAIN)
    attend(query, case.key_cache, case.value_cache, plan, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attend(query, case.key_cache, case.value_cache, plan, **options)
        case.seq_lens.add_(1)
        plan.next_step()
    for step in range(3):
        for number, row in enumerate(case.rows):
            case.write(number, row.keys + step, row.keys + step + 1)
        graph.replay()
        wanted, _ = case.dense(query, step, **options)
        torch.testing.assert_close(out[: len(wanted)].cpu().double(), wanted, rtol=0, atol=TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [[Row(300), Row(20)], [Row(300), Row(200, 90)]], ids=["decode", "mixed"])
def test_keys_beyond_two_to_the_31_elements_are_read(rows: list[Row]) -> None:
    """The same numbers at the end of a large cache give the same bits."""
    case = Paged(Heads(8, 2, 128, 128), rows, torch.bfloat16)
    query, options = case.query(), options_of(case, PLAIN)
    caches = case.key_cache, case.value_cache
    wanted, _ = attend(query, *caches, case.plan(TRITON), **options)
    beyond = 2**31 // caches[0][0].numel()
    large = [torch.empty(beyond + len(cache), *cache.shape[1:], dtype=cache.dtype, device=DEVICE) for cache in caches]
    for cache, small in zip(large, caches, strict=True):
        cache[beyond:] = small
    case.static_table += beyond
    found, _ = attend(query, *large, case.plan(TRITON), **options)
    assert torch.equal(found, wanted)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="pretends to be a device; tests of the engine run on the real one")
def test_an_engine_that_captures_its_steps_gives_the_tokens_of_generate() -> None:
    """The first window runs as it is and the second replays it, with a sliding window and capped scores."""
    prompts = [[5, 6, 7], list(range(1, 22))]
    with build("gemma2", ops=TRITON, max_num_seqs=2, decode_window=2) as engine:
        found = engine.generate_batch(prompts, SamplingParams(temperature=0, max_tokens=5))
    wanted = [oracle.greedy(make_model("gemma2"), prompt, 5) for prompt in prompts]
    assert [output.completions[0].token_ids for output in found] == wanted
