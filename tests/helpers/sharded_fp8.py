"""What each rank does in the tests of sharded models whose engine has weights in fp8. The processes import it by name."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import oracle
import pytest
import sharded
import torch
import torch.distributed as dist
from families import make_model
from ranks import noted
from rounding import names_of, rounded, rounded_base
from sharded import CONFIG, PARAMS, PROMPT, cut_as_zero3, train
from sharded_adapters import adapted
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedModel

from stoker.benchmarks.footprint import Peak, keep_nothing
from stoker.kernels.errors import EngineStateError, WeightTransferError
from stoker.kernels.reference import checksum
from stoker.rollout import RolloutEngine
from stoker.weight_sync import gather, rank_agreement

IN_FP8 = replace(CONFIG, quantization="fp8", gather_memory=2**16)
LAYERS, GATHER_BYTES = 12, 2**20  # of what is measured


def whole_in_one_flat_parameter(model: Any) -> Any:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


CASES: dict[int, dict[str, Any]] = {
    2: {
        "fsdp2": sharded.by_fsdp2,
        "fsdp2 of experts": sharded.by_fsdp2,
        "fsdp1": sharded.by_fsdp1,
        "fsdp1 of all layers together": whole_in_one_flat_parameter,
    },
    3: {"fsdp2, uneven, not resharded": partial(sharded.by_fsdp2, reshard=False)},
    4: {"fsdp2 on any dimension": sharded.by_fsdp2_on_any_dimension, "fsdp2 of tensor parallel": sharded.by_two_meshes},
}


def make(name: str) -> PreTrainedModel:
    family = "qwen3_moe" if "experts" in name else "llama"
    return make_model(family, num_hidden_layers=2)


def assert_rounded(engine: RolloutEngine, twin: PreTrainedModel) -> set[int]:
    (c,) = engine.generate_batch([PROMPT], PARAMS)[0].completions
    expected = oracle.logprobs(rounded(twin, names_of(engine)), PROMPT, c.token_ids)
    torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)
    plain = oracle.logprobs(twin, PROMPT, c.token_ids)
    assert (plain - expected).abs().max() > 1e-3, "what is rounded would not show"
    return {*c.weight_versions}


def follow_all(rank: int) -> None:
    for name, wrap in CASES[dist.get_world_size()].items():
        with noted(name):
            follow(rank, name, wrap)


def follow(rank: int, name: str, wrap: Any) -> None:
    """After every step the engine is the rounded model, and holds of a layer's matrices what is rounded and no more."""
    twin, model = make(name), wrap(make(name))
    theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin, model))
    with RolloutEngine(model, config=IN_FP8) as engine:
        assert assert_rounded(engine, twin) == {0}
        fp8, mirror = engine._binding.derived, engine._binding.source.mirror  # type: ignore[attr-defined]
        sizes = {n: p.nbytes for n, p in twin.named_parameters()}
        matrices = sum(sizes[n] for n in names_of(engine))
        buffers = sum(b.nbytes for b in twin.buffers())
        assert mirror.nbytes - buffers <= 1.2 * (sum(sizes.values()) - matrices) < matrices
        assert matrices // 4 < fp8.nbytes < matrices // 2
        assert mirror._room.untyped_storage().nbytes() == 0 < len(mirror._room) < matrices
        written = 0
        for step in (1, 2):
            train(twin, theirs, step)
            train(model, ours, step)
            assert engine.verify_weights().mismatched, "the engine lags behind until it is told"
            assert engine.update_weights() == step
            assert assert_rounded(engine, twin) == {step}
            report = engine.verify_weights()
            assert report.ok and report.checked == len(
                {n for n, _ in (*twin.named_parameters(), *twin.named_buffers())}
            )
            written = engine.stats().last_update_bytes
        assert written == sum(sizes.values()) - matrices + sum(
            t.nbytes for part in fp8.by_name.values() for t in part.made
        )
        assert engine.update_weights() == 3 and engine.stats().last_update_bytes == 0
        with torch.no_grad():
            for parameter in model.parameters():  # of a flat one a rank may have nothing
                getattr(parameter, "to_local", lambda p=parameter: p)().view(-1)[:64] += 1
        assert engine.verify_weights().mismatched
        engine.update_weights()
        assert engine.verify_weights().ok
        scrambled = sorted(names_of(engine))[-1]
        if rank == 0:
            values = fp8.by_name[scrambled].made[0].view(torch.uint8)
            values.copy_(values.flip(0))
        assert engine.verify_weights().mismatched == ((scrambled,) if rank == 0 else ())


def zero3(rank: int) -> None:
    """Pieces that end in the middle of a row."""
    twin, model = make(""), make("")
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    cut_as_zero3(model, twin)
    with RolloutEngine(model, config=IN_FP8) as engine:
        assert assert_rounded(engine, twin) == {0}
        train(twin, optimizer, 1)
        cut_as_zero3(model, twin)
        engine.update_weights()
        assert assert_rounded(engine, twin) == {1} and engine.verify_weights().ok


def adapters(rank: int) -> None:
    """Their steps move no more than A, B and magnitudes; DoRA's norms are those of what is rounded."""
    for options in ({"r": 4}, {"r": 5, "use_dora": True}):
        twin, model = adapted("qwen3", options), sharded.by_fsdp2(adapted("qwen3", options))
        theirs, ours = (torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (twin, model))
        with RolloutEngine(model, config=IN_FP8) as engine:
            for version in (0, 1):
                (c,) = engine.generate_batch([PROMPT], PARAMS)[0].completions
                expected = oracle.logprobs(rounded_base(twin, names_of(engine)), PROMPT, c.token_ids)
                torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)
                assert {*c.weight_versions} == {version} and engine.verify_weights().ok
                train(twin, theirs, version)
                train(model, ours, version)
                engine.update_weights()
                trained = sum(p.nbytes for p in twin.parameters() if p.requires_grad)
                assert engine.stats().last_update_bytes == trained


def sleep(rank: int) -> None:
    """What passes through is kept in host memory, or dropped, with the mirror."""
    twin, model = make(""), sharded.by_fsdp2(make(""))
    theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin, model))
    with RolloutEngine(model, config=IN_FP8) as engine:
        before = assert_rounded(engine, twin)
        storage = engine._binding.derived._memory.data.untyped_storage()  # type: ignore[union-attr]
        for level in (1, 2, 3):
            engine.sleep(level)
            assert (storage.nbytes() == 0) == (level > 1)
            engine.wake_up()
            if level < 3:
                assert assert_rounded(engine, twin) == before and engine.verify_weights().ok
            else:
                with pytest.raises(EngineStateError, match="incomplete"):
                    engine.generate_batch([PROMPT], PARAMS)
            train(twin, theirs, level)
            train(model, ours, level)
            engine.update_weights()
            before = assert_rounded(engine, twin)
            assert before == {level} and engine.verify_weights().ok


def set_after_a_forward(rank: int) -> None:
    """A setting that changes while FSDP2 has the model gathered is seen by all ranks, also by one that has generated since."""
    twin, model = make(""), sharded.by_fsdp2(make(""), reshard=False)
    with RolloutEngine(model, config=IN_FP8) as engine:
        for version in (1, 2):
            with torch.no_grad():
                model(input_ids=torch.tensor([PROMPT]))
            if rank == 0:
                engine.generate_batch([PROMPT], PARAMS)
            for layer in (*model.model.layers, *twin.model.layers):
                layer.self_attn.scaling *= 1.5
            assert engine.update_weights() == version and assert_rounded(engine, twin) == {version}


def fail_inside(rank: int) -> None:
    """A gather that fails at a layer leaves the engine refusing until the next one succeeds."""
    twin, model = make(""), sharded.by_fsdp2(make(""))
    theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin, model))
    with RolloutEngine(model, config=IN_FP8) as engine:
        room = engine._binding.source.mirror._room.untyped_storage()  # type: ignore[attr-defined]
        train(twin, theirs, 1)
        train(model, ours, 1)
        collective, calls = gather.all_gather, []

        def fail_at_the_fourth(*arguments: Any, **fields: Any) -> Any:
            calls.append(1)
            if len(calls) == 4:
                raise RuntimeError("the network is gone")
            return collective(*arguments, **fields)

        rank_agreement.GRACE_S = 0.1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gather, "all_gather", fail_at_the_fourth)
            with pytest.raises(WeightTransferError, match="in parts old and new"):
                engine.update_weights()
        assert room.nbytes() == 0
        with pytest.raises(EngineStateError, match="incomplete since an update failed"):
            engine.generate_batch([PROMPT], PARAMS)
        engine.update_weights()
        assert_rounded(engine, twin)
        assert engine.verify_weights().ok


def take_little(rank: int) -> tuple[int, int, int]:
    """What making an engine, and an update, take at the most besides what it holds; and what the matrices take plain."""
    keep_nothing()
    checksum._LOT_BYTES = 2**13
    size = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": LAYERS}
    model = sharded.by_fsdp2(make_model("llama", **size))
    # At first some things are made that stay, among them what oneDNN compiles for matrices of these sizes.
    small = sharded.by_fsdp2(make_model("llama", **size | {"num_hidden_layers": 1}))
    RolloutEngine(small, config=IN_FP8).close()
    peak = Peak("cpu")
    engine = RolloutEngine(model, config=replace(IN_FP8, gather_memory=GATHER_BYTES))
    built = peak.extra()
    held = engine.stats().mirror_bytes
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    peak = Peak("cpu")
    engine.update_weights()
    took = peak.extra()
    plain = sum(p.numel() * 4 for n, p in model.named_parameters() if n in names_of(engine))
    return built - held, took, plain
