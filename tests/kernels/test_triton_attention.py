"""The Triton attention against a dense softmax in float64 and against the torch reference.

Without a CUDA device kernels are interpreted, in fp32 and fp16; with one the same cases run compiled, in bf16 too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from cases_attention import DEVICE, GPU_ONLY, NARROW, PLAIN, SMALL, Heads, Paged, Row, check, family, options_of
from compiling import compiled
from families import make_model
from paged_rows import TOLERANCE
from pretend_device import build

from stoker.kernels.attention.config import unsupported
from stoker.kernels.attention.paged import attend, write_kv
from stoker.kernels.ops import REFERENCE
from stoker.kernels.reference.attention import movable
from stoker.kernels.reference.attention_plan import Visibility
from stoker.kernels.reference.fp8 import FP8
from stoker.kernels.triton_ops import TRITON
from stoker.rollout import SamplingParams

GPU_PAGED = [pytest.param(16, torch.bfloat16, marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, *GPU_ONLY]
KERNELS = {
    *("decode_kernel", "prefill_kernel", "write_kernel"),
    *("work_list_kernel", "common_blocks_kernel", "units_kernel"),
}
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


@pytest.mark.parametrize(("block_size", "dtype"), [(16, torch.float32), (4, torch.float16), *GPU_PAGED])
def test_decode_rows_with_every_option(block_size: int, dtype: torch.dtype) -> None:
    case = Paged(NARROW, [Row(n) for n in LENGTHS], dtype, padded=1, block_size=block_size)
    plan = case.plan(TRITON)
    for feature in FEATURES:
        check(case, plan, feature)


@pytest.mark.parametrize("block_size", [1, 8, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, *GPU_ONLY])
def test_blocks_smaller_and_larger_than_a_tile(dtype: torch.dtype, block_size: int) -> None:
    """What is not there is not read from block 0 either, which holds nothing but NaN."""
    case = Paged(NARROW, [Row(n) for n in (17, 129, 200)], dtype, padded=0, block_size=block_size)
    case.key_cache[0], case.value_cache[0] = float("nan"), float("nan")
    for feature in (PLAIN, {"visibility": Visibility(window=150)}):
        case.workspace.clear()
        check(case, case.plan(TRITON), feature)


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


@pytest.mark.parametrize("rows", [[Row(n) for n in LENGTHS], MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(("block_size", "dtype"), [(16, torch.float32), (4, torch.float16), *GPU_PAGED])
def test_layers_with_a_window_read_their_own_table_and_nothing_that_is_not_seen(
    block_size: int, dtype: torch.dtype, rows: list[Row]
) -> None:
    """Numbers of blocks that were given up are another row's by now, or nobody's, as here: NaN."""
    case = Paged(NARROW, rows, dtype, padded=1, block_size=block_size)
    for feature in FEATURES:
        if feature["visibility"] != Visibility():
            case.workspace.clear()  # it belongs to one table
            check(case, case.plan_of_windows(TRITON, feature["visibility"]), feature)


# Of MIXED: in a prompt, side by side around the border of a tile of keys, within few queries, a row of two, a long one.
SPANS = [(1, 8), (42, 46), (46, 62), (64, 72), (75, 77), (81, 83), (86, 148)]


@pytest.mark.parametrize(("local", "deterministic"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("dtype", [torch.float32, *GPU_ONLY])
def test_spans_see_each_other_both_ways(dtype: torch.dtype, local: bool, deterministic: bool) -> None:
    case = Paged(NARROW, MIXED, dtype)
    plan = case.plan(TRITON, spans=SPANS, local_spans=local, deterministic=deterministic)
    for feature in FEATURES[:3] if local else FEATURES:
        check(case, plan, feature, spans=() if local and feature["visibility"].window is None else SPANS)


@pytest.mark.parametrize(("heads", "dtype"), each_model(torch.float16, torch.float32))
def test_chunks_of_real_models(heads: Heads, dtype: torch.dtype) -> None:
    case = Paged(heads, [Row(20, 11), Row(65, 24)], dtype)
    check(case, case.plan(TRITON), {"visibility": Visibility(window=50), "softcap": 20.0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *GPU_ONLY])
@pytest.mark.parametrize("rows", [[Row(n) for n in LENGTHS], [*family(48, [60, 70, 50], 0), *MIXED[1:4]]])
def test_a_cache_of_fp8(rows: list[Row], dtype: torch.dtype) -> None:
    case = Paged(NARROW, rows, dtype, kept=FP8)
    plan = case.plan(TRITON)
    for feature in FEATURES[::4]:
        check(case, plan, feature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *GPU_ONLY])
def test_writing_to_a_cache_of_fp8(dtype: torch.dtype) -> None:
    """Rounded to nearest, as torch does; the largest number stands for all beyond it.

    The interpreter, which loses the carry of 1.99 to 2 and has no subnormals, gets numbers that are to be rounded down.
    """
    if DEVICE.type == "cuda":
        new = torch.randn(640) * torch.logspace(-3, 3, 640)
    else:
        new = torch.arange(8, 127, dtype=torch.uint8).view(FP8).float().repeat(6)[:640] * 1.02
    new = torch.where(torch.rand(640) < 0.5, new, -new).view(4, 2, 80).to(DEVICE, dtype)
    new[0, 0, :2] = torch.tensor([6e4, -6e4])
    slots = torch.tensor([20, 3, 31, 7], device=DEVICE)
    for value_dim in (80, 48):
        caches = [torch.zeros(3, 16, 2, dim, device=DEVICE).to(FP8) for _ in range(2) for dim in (80, value_dim)]
        write_kv(new, new[..., :value_dim], *caches[:2], slots)
        REFERENCE.write_kv(new, new[..., :value_dim], *caches[2:], slots)
        for found, wanted in zip(caches[:2], caches[2:], strict=True):
            assert torch.equal(movable(found), movable(wanted)) and found.float().abs().max() == 448


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
    found = compiled("compile_attention", tmp_path)
    made = found["made"]
    # For any number of rows: the rows' own splits and the shared ones in decode steps; a chunk beside rows of their own.
    plan = {"work_list_kernel": 1, "common_blocks_kernel": 1, "units_kernel": 1}
    assert found["decode"] == plan | {"decode_kernel": 2}
    assert found["mixed"] == {"work_list_kernel": 1, "decode_kernel": 1, "prefill_kernel": 1}
    assert {m["kernel"] for m in made} == KERNELS
    for m in made:
        assert m["stack"] == 0, f"{m} spills registers"
        fetches = m["kernel"] == "decode_kernel" and m["before"] == ["ld.global"]  # by lists and tables that were there
        dependent = m["kernel"] in ("decode_kernel", "work_list_kernel")
        assert m["dependent"] == (m["waits"] or fetches) == dependent, m
        if m["kernel"] in ("decode_kernel", "prefill_kernel"):
            assert m["wide_loads"] and m["tensor_cores"], m
            assert not m["single_casts"], f"{m} casts keys or values one by one"
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
