"""Triton kernels as they are compiled for an H200, but for attention's: what only the compiler tells."""

from __future__ import annotations

from pathlib import Path

from compiling import compiled

from stoker.kernels import launch
from stoker.kernels.lora.lora import SHRINK_SHARED

# Of what comes up beside a product, or beside the shrink of its adapters: which tokens have which, these, and x. Of a product that
# adapters run ahead of: x and the weight, and the sums of its splits, which it writes, too.
# Of others: weights, or what is the same in all layers of a step, or the state that the step before left.
EARLY = {
    "shrink_kernel": {"ld.global", "cp.async.c"},
    "expand_kernel": {"ld.global"},
    "expand_gated_kernel": {"ld.global"},
    "expand_ahead_kernel": {"ld.global"},
    "_streamed_kernel": {"ld.global", "cp.async.bulk.tensor", "st.global", "atom.global"},
} | {
    f"_{name}_kernel": {"ld.global"}
    for name in (
        *("rms_norm", "qk_norm_rotary_write", "latent_heads_write"),
        *("gated_rms_norm", "delta_gates", "gated_delta_rule", "selective_scan"),
    )
}
SINGLY_ROUNDED = {"_thresholds", "_apply_thresholds", "_adjust_kernel", "_listed_kernel"}
WALKS = ["causal_conv", "gated_delta_rule", "selective_scan"]


def test_compiled_for_an_h200_the_kernels_spill_no_registers(tmp_path: Path) -> None:
    """The interpreter takes what the compiler refuses."""
    made = compiled("compile_layers", tmp_path)
    layers = ["rms_norm", "act_mul", "qk_norm_rotary_write", "single", "skinny", "streamed", "matmul", "add_segments"]
    layers += ["latent_heads_write", "quantise", "dequantise"]
    others = ["route", "order", "grouped", "weighted_sum"]
    others += ["logits", "noise", "adjust", "listed", "count", "constrain", "follow", "advance"]
    others += [*WALKS, "prepare", "chunks", "gated_rms_norm", "delta_gates"]
    dependent = {f"_{name}_kernel" for name in [*layers, *others]} | {"_sample_splits", "_sample_rows"}
    dependent |= {f"{name}_kernel" for name in ("tiles", "shrink", "expand_ahead", "expand", "expand_gated", "look_up")}
    assert {m["kernel"] for m in made} == dependent | {
        "_checksums_kernel",
        "_copies_kernel",
        "_thresholds",
        "_apply_thresholds",
    }
    for m in made:
        assert m["stack"] == 0 and m["shared"] <= 227 * 1024, m
        # A kernel that comes up before the one before has ended reads nothing until it has, but what was there before that began.
        begun = bool(m["before"]) and EARLY.get(m["kernel"], set()) >= {*m["before"]}
        assert m["dependent"] == (m["waits"] or begun) == (m["kernel"] in dependent), m
    assert {m["kernel"] for m in made if m["before"]} == {*EARLY}
    # The chip copies the tiles of a streamed weight by itself, and multiplies them where they then are.
    streamed = [m for m in made if m["kernel"] == "_streamed_kernel"]
    assert all(m["tiles_copied"] and m["tensor_cores"] for m in streamed)
    # Only those that adapters run ahead of read x before their turn.
    assert all(m["late"] == ("cp.async.bulk.tensor" in m["before"]) for m in streamed)
    assert {m["late"] for m in streamed if "st.global" in m["before"]} == {True}
    # Numbers of fp8 are made bf16 two at a time; what is cast one by one are outputs.
    in_fp8 = [m for m in made if m["fp8_pairs"]]
    assert {m["kernel"] for m in in_fp8} >= {f"_{n}_kernel" for n in ("skinny", "streamed", "single", "matmul")}
    assert all(m["single_casts"] <= 2 * m["fp8_pairs"] for m in in_fp8)
    shrinks = [m for m in made if m["kernel"] == "shrink_kernel"]
    # Beside a product, of few tokens: those that wait for it only to write, and those that it waits for, which fetch their matrices.
    few = [m for m in shrinks if m["fetches"] or "cp.async.c" in m["before"]]
    assert {m["fetches"] > 0 for m in few} == {True, False} and {m["ranks"] for m in few} == {16, 32, 64}
    assert all(m["shared"] + launch.PROGRAM_SHARED <= (SHRINK_SHARED if m["ranks"] <= 32 else 62 * 1024) for m in few)
    # A token has the same bits as one of a decode step and as one of a piece: sums are over the same numbers of the same threads.
    for name in ("gated_delta_rule", "selective_scan"):
        sums = [m["sums"] for m in made if m["kernel"] == f"_{name}_kernel"]
        assert all(sums) and sums[: len(sums) // 2] == sums[len(sums) // 2 :], name
    assert not any(m["fused"] for m in made if m["kernel"] in {f"_{name}_kernel" for name in WALKS})
    # A logit over its temperature is the same number in every pass, and with penalties that of torch.
    assert not any(m["fused"] for m in made if m["kernel"] in SINGLY_ROUNDED)
    # A row is read several times, and none of its threads waits for the others in between, but where a list is written: of
    # the row or of a list, by count or by mass. Of each token it computes no more than it has to.
    searches = [m for m in made if m["kernel"] == "_thresholds"]
    assert all(len(m["waiting_loops"]) <= 4 and m["wide_compares"] <= 16 for m in searches)
    # However the experts' weights lie, a thread reads several numbers of them together; not of weights of pairs.
    assert all(m["narrow_loads"] < 8 for m in made if m["kernel"] == "_grouped_kernel")
    # Of matrices that lie as a trainer allocates them, 16 bytes at a time: the first adapters are such ones.
    assert next(m["narrow_loads"] for m in made if m["kernel"] == "shrink_kernel") == 0
    # An expand's threads bring a shrink's splits together and add them: none of them waits for another one's sum.
    expands = [m for m in made if m["kernel"] in ("expand_kernel", "expand_gated_kernel")]
    assert max(m["barriers"] for m in expands) < 30
    # Deterministic ones, of few tokens and many, whatever the highest rank: in an order that the code gives, and not the compiler.
    assert not any("f32" in tensor for m in expands[:2] for tensor in m["sums"])
    # What a gated one multiplies is on its way before its turn, where it lies row after row.
    assert {m["fetches"] > 0 for m in expands if m["kernel"] == "expand_gated_kernel"} == {True, False}
