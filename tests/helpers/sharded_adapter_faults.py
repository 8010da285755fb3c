"""What each rank does where a sharded adapter is refused, switched off, replaced or deleted. The processes import it by name."""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
import torch
from adapted import lora, running
from peft import PeftModel
from sharded import CONFIG, by_fsdp2
from sharded_adapters import GREEDY, PROMPT, adapted
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from stoker.rollout import (
    EngineStateError,
    RolloutEngine,
    UnsupportedModelError,
    WeightsMismatchError,
    WeightTransferError,
)


def refused(rank: int) -> None:
    """What is refused on one rank is on all, and nothing is sampled on a base and an adapter of two updates."""
    model, theirs = by_fsdp2(adapted("qwen3", {})), by_fsdp2(adapted("qwen3", {}, seed=7))
    whole, late = adapted("qwen3", {}, seed=8), by_fsdp2(adapted("qwen3", {}, seed=9))
    with RolloutEngine(model, config=replace(CONFIG, check_finite_weights=True)) as engine:
        with pytest.raises(UnsupportedModelError, match=r"the model has \['default'\], and no 'nobody'"):
            engine.load_adapter("theirs", (theirs, "nobody"))
        engine.load_adapter("theirs", theirs)
        engine.load_adapter("whole", whole)
        (before,) = engine.generate_batch([PROMPT], GREEDY, adapter="theirs")
        part = next(p for n, p in theirs.named_parameters() if "lora_A" in n).to_local()
        kept = part.detach().clone()
        if rank == 1:
            part.detach().fill_(torch.nan)
        with pytest.raises(WeightsMismatchError, match="holds NaN or Inf" if rank == 1 else "another rank refused"):
            engine.update_weights()
        with pytest.raises(EngineStateError, match="the weights are incomplete since an update failed"):
            engine.generate_batch([PROMPT], GREEDY)
        part.detach().copy_(kept)
        engine.update_weights()
        (after,) = engine.generate_batch([PROMPT], GREEDY, adapter="theirs")
        assert after.completions[0].token_ids == before.completions[0].token_ids
        theirs.delete_adapter("default")
        theirs.add_adapter("default", lora(r=2, target_modules=["q_proj"]))  # whole on every rank
        theirs.set_adapter("default")
        with pytest.raises(UnsupportedModelError, match=r"'theirs': .*lora_A.* was replaced on its model"):
            engine.generate_batch([PROMPT], GREEDY)
        assert any(name.startswith("theirs: ") for name in engine.verify_weights().mismatched)
        with pytest.raises(
            UnsupportedModelError, match=r"unload_adapter\('theirs'\), update the weights and load it again"
        ):
            engine.update_weights()
        engine.unload_adapter("theirs")
        engine.update_weights()
        engine.load_adapter("theirs", theirs)  # in a sharded base
        assert not engine._binding.adapters.nbytes
        by_fsdp2(whole)
        with pytest.raises(UnsupportedModelError, match="'whole' is of a model that was sharded"):
            engine.generate_batch([PROMPT], GREEDY)
        engine.unload_adapter("whole")
        engine.generate_batch([PROMPT], GREEDY, adapter="theirs")
        if rank == 0:  # alone
            with pytest.raises(
                WeightTransferError, match="did not call update_weights, verify_weights or load_adapter"
            ):
                engine.load_adapter("late", late)
            assert engine.adapters == ("default", "theirs")
            assert engine.generate_batch([PROMPT], GREEDY, adapter="theirs")


def odds_and_ends(rank: int) -> None:
    """Switched off, scrambled, another model's, added and deleted: as with whole adapters, or refused by name."""
    twin, model = adapted("qwen3", {}), by_fsdp2(adapted("qwen3", {}))
    with RolloutEngine(model, config=CONFIG) as engine:
        (with_adapter,) = engine.generate_batch([PROMPT], GREEDY)
        with running(twin, None):
            base = oracle.greedy(twin, PROMPT, GREEDY.max_tokens)
        with model.disable_adapter():
            assert engine.generate_batch([PROMPT], GREEDY)[0].completions[0].token_ids == base
        assert with_adapter.completions[0].token_ids != base
        (again,) = engine.generate_batch([PROMPT], GREEDY)
        assert again.completions[0].token_ids == with_adapter.completions[0].token_ids
        name, mirrored = next(iter(sorted(engine._binding.source.adapters.items())))
        mirrored.add_(1)
        assert engine.verify_weights().mismatched == (name,)
        engine.load_adapter("theirs", twin)
        (theirs,) = engine.generate_batch([PROMPT], GREEDY, adapter="theirs")
        assert theirs.completions[0].token_ids == with_adapter.completions[0].token_ids
        for one in (twin, model):
            torch.manual_seed(3)
            one.add_adapter("late", lora(r=2, init_lora_weights=False))  # which nothing has sharded
        engine.update_weights()
        (late,) = engine.generate_batch([PROMPT], GREEDY, adapter="late")
        with running(twin, "late"):
            assert late.completions[0].token_ids == oracle.greedy(twin, PROMPT, GREEDY.max_tokens)
        for module in [m for n, m in model.named_modules() if n.endswith(("lora_A.late", "lora_B.late"))]:
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))  # which the engine has no place for
        assert any("down_proj" in one for one in engine.verify_weights().mismatched)
        with pytest.raises(UnsupportedModelError, match=r"build a new engine.*late"):
            engine.update_weights()
        model.delete_adapter("default")
        with pytest.raises(UnsupportedModelError, match="build a new engine"):
            engine.update_weights()


def replaced(rank: int) -> None:
    """Another adapter under the name of a sharded one: nothing is sampled from copies of the old one with what is new."""
    for options in ({}, {"lora_alpha": 64}, {"r": 2, "target_modules": ["down_proj", "k_proj"]}):
        twin, model = adapted("qwen3", {}), by_fsdp2(adapted("qwen3", {}))
        with RolloutEngine(model, config=CONFIG) as engine:
            engine.generate_batch([PROMPT], GREEDY)
            for one in (twin, model):
                one.delete_adapter("default")
                torch.manual_seed(9)
                one.add_adapter("default", lora(init_lora_weights=False, **options))  # whole on every rank
                one.set_adapter("default")
            for _ in range(2):
                with pytest.raises(UnsupportedModelError, match=r"lora_A.* was replaced since the last update"):
                    engine.generate_batch([PROMPT], GREEDY)
                assert any("lora_A" in name for name in engine.verify_weights().mismatched)
                with pytest.raises(UnsupportedModelError, match="build a new engine"):
                    engine.update_weights()
            if not options:  # then a sharded one can take the old one's place
                for module in [m for n, m in model.named_modules() if n.endswith(("lora_A.default", "lora_B.default"))]:
                    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
                with pytest.raises(UnsupportedModelError, match="was replaced since the last update"):
                    engine.generate_batch([PROMPT], GREEDY)
                engine.update_weights()
                assert follows(engine, twin) and engine.verify_weights().ok
        with RolloutEngine(model, config=CONFIG) as engine:
            assert follows(engine, twin)


def follows(engine: RolloutEngine, twin: PeftModel) -> bool:
    (out,) = engine.generate_batch([PROMPT], GREEDY)
    return out.completions[0].token_ids == oracle.greedy(twin, PROMPT, GREEDY.max_tokens)
