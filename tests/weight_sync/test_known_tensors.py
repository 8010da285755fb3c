"""What a source knows of a model's tensors from an earlier look, and that whatever becomes of them is noticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from families import make_model
from mirrored import PARAMS, PROMPT, assert_matches, engine_on
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from tree_changes import CHANGES, changeable, set_data

from stoker.kernels.triton_ops import TRITON
from stoker.rollout import UnsupportedModelError, WeightsMismatchError
from stoker.weight_sync import checksum, shards
from stoker.weight_sync.aliased_source import AliasedSource
from stoker.weight_sync.held import Held
from stoker.weight_sync.mirrored_source import MirroredSource


def plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """As torch has them, without PEFT's names and tensors."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name.replace("base_layer.", ""): t for name, t in named if "lora_" not in name}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_mirror_reads_what_the_model_has_now(change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = changeable()
    source = MirroredSource(model, torch.float64, None)
    source.tensors()
    source.pull()
    with monkeypatch.context() as patch:
        patch.setattr(shards, "walk", None)
        known = source._read()
    change(model)
    held, now = source._read(), plain_tensors(model)
    assert held is not known and held.full.keys() == now.keys() and not held.aliases
    assert all(held.full[name] is tensor for name, tensor in now.items())
    assert held.shapes == {name: tensor.shape for name, tensor in now.items()}
    assert held.dtypes == {name: tensor.dtype for name, tensor in now.items()}
    assert held.parameters == {name for name, tensor in now.items() if isinstance(tensor, nn.Parameter)}
    assert source._read() is held, "and once only"


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_borrowed_tensors_are_not_taken_for_those_that_were_bound(change: Callable[[Any], None]) -> None:
    model = changeable()
    source = AliasedSource(model)
    source.bind()
    assert source.bound.keys() == plain_tensors(model).keys() and not source.moved(model)
    change(model)
    assert source.moved(model) == (change.__name__ != "child_added")  # which has no tensors
    assert source.moved(changeable()), "which is another model"


def all_elsewhere(model: Any) -> None:
    for p in model.parameters():
        p.data = 1.1 * p.data


def assigned(model: Any) -> None:
    model.load_state_dict({n: 1.1 * t for n, t in model.state_dict().items()}, assign=True)


def masters_in_another_dtype(model: Any) -> None:
    model.to(torch.float64)
    all_elsewhere(model)


def memory_given_back(model: Any) -> None:
    """And taken again, as trainers do that offload their weights for a rollout."""
    for p in model.parameters():
        kept, nbytes = 1.1 * p.detach(), p.untyped_storage().nbytes()
        p.untyped_storage().resize_(0)
        p.untyped_storage().resize_(nbytes)
        p.data.copy_(kept)


def transposed(model: Any) -> None:
    weight = model.model.layers[1].self_attn.q_proj.weight
    weight.data = weight.data.t()


def frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq = 1.5 * model.model.rotary_emb.inv_freq


def layers_exchanged(model: Any) -> None:
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    first.up_proj, second.up_proj = second.up_proj, first.up_proj


def registry_exchanged(model: Any) -> None:
    norm = model.model.norm
    norm._parameters = {"weight": nn.Parameter(2 * norm.weight.detach())}


def adapted(model: Any) -> None:
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))  # as yet it adds nothing
    model.model.layers[1].self_attn.q_proj.base_layer.weight.data.mul_(1.5)


SAME_SHAPES = [
    all_elsewhere, assigned, masters_in_another_dtype, memory_given_back, transposed, frequencies, layers_exchanged,
    registry_exchanged, adapted,
]  # fmt: skip


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("change", SAME_SHAPES, ids=lambda change: change.__name__)
def test_a_mirror_follows_a_model_it_has_looked_at(change: Callable[[Any], None], announced: bool) -> None:
    model: Any = make_model("llama", hidden_size=64)
    with engine_on(model) as engine:
        assert engine.update_weights() == 1 and assert_matches(engine, model) == {1}
        change(model)
        if announced:
            assert engine.update_weights() == 2
        assert assert_matches(engine, model) == {2} and engine.verify_weights().ok
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        assert engine.update_weights() == 3 and assert_matches(engine, model) == {3}


def test_a_model_that_no_longer_fits_its_mirror_is_refused_until_it_does() -> None:
    """Each time, and not only where it is looked at first."""
    model = make_model("llama", tie_word_embeddings=True)
    with engine_on(model) as engine:
        assert engine.update_weights() == 1
        tied = model.lm_head.weight
        model.lm_head.weight = nn.Parameter(tied.detach().clone())
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="shares other tensors"):
                engine.update_weights()
        model.tie_weights()
        norm = model.model.norm.weight
        model.model.norm.weight = nn.Parameter(torch.ones(5))
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="another shape"):
                engine.update_weights()
        model.model.norm.weight = norm
        assert engine.update_weights() == 2 and assert_matches(engine, model) == {2}


def test_numbers_out_of_range_are_refused_in_tensors_that_are_known() -> None:
    model = make_model("llama")
    with engine_on(model, "float16") as engine:
        assert engine.update_weights() == 1
        for _ in range(2):
            model.model.norm.weight.data[3] = 7e4
            with pytest.raises(WeightsMismatchError, match=r"model\.norm\.weight has values up to"):
                engine.update_weights()
        model.model.norm.weight.data[3] = 1
        assert engine.update_weights() == 2


def test_a_model_that_is_sharded_after_it_was_looked_at(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model: Any = make_model("llama")
        with engine_on(model) as engine:
            assert engine.update_weights() == 1
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
            for version in (2, 3):
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(1.1)
                assert engine.update_weights() == version and engine.verify_weights().ok
                (c,) = engine.generate_batch([PROMPT], PARAMS)[0].completions
                expected = oracle.logprobs(model, PROMPT, c.token_ids)
                torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)
                assert {*c.weight_versions} == {version}, "under the hooks' gathered parameters nothing is read"
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", ["auto", "float64"])
def test_memory_that_the_trainer_lets_go_is_not_kept_by_what_is_known(dtype: str) -> None:
    """Until the next look it may need it for something else."""
    model: Any = make_model("llama")
    with engine_on(model, dtype) as engine:
        assert engine.update_weights() == 1 and assert_matches(engine, model) == {1}
        weight = model.lm_head.weight
        memory = StorageWeakRef(weight.untyped_storage())
        weight.data = weight.data.clone()
        assert memory.expired()
        assert_matches(engine, model)


def test_what_moves_while_it_is_read_is_seen_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread of the trainer, say."""
    model: Any = make_model("llama")
    read, weight = shards.read, model.lm_head.weight
    source = MirroredSource(model, torch.float64, None)
    source.tensors()

    def read_too_early(model: Any) -> Held:
        held = read(model)
        model.lm_head.weight = nn.Parameter(2 * weight.detach())
        return held

    set_data(model)  # so that it is read anew
    with monkeypatch.context() as patch:
        patch.setattr(shards, "read", read_too_early)
        source.pull()
    assert torch.equal(source.tensors()["lm_head.weight"], weight.double())
    source.pull()
    assert torch.equal(source.tensors()["lm_head.weight"], 2 * weight.double())


def test_a_mirror_that_is_let_go_leaves_no_memory_behind() -> None:
    model: Any = make_model("llama")
    source = MirroredSource(model, torch.float64, None)
    for _ in range(3):
        source.tensors()
        for p in model.parameters():
            p.data.mul_(1.5)
        source.pull()
    memory = StorageWeakRef(source.mirror.data.untyped_storage())
    source.release()
    assert memory.expired()


def test_a_mirror_that_has_slept_is_written_to_where_it_lies_now() -> None:
    model: Any = make_model("llama")
    with engine_on(model) as engine:
        mirror, places = engine._binding.source.mirror, []
        for version in range(1, 7):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.1)
            assert engine.update_weights() == version and engine.verify_weights().ok
            assert assert_matches(engine, model) == {version}
            places.append((mirror.data.data_ptr(), mirror.data.clone()))  # which takes the memory that is given back
            if version % 2:
                engine.sleep(level=2)
                places.append((0, torch.empty_like(mirror.data)))
                engine.wake_up()
        assert len({place for place, _ in places if place}) > 1


def test_kernels_that_know_addresses_write_to_a_mirror_where_it_lies_now(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(40, 30)
    monkeypatch.setattr(checksum, "ops_for", lambda _: TRITON)
    source = MirroredSource(model, torch.float16, None)
    places: dict[int, list[torch.Tensor]] = {}
    for _ in range(3):
        for _ in range(3):
            model.weight.data.mul_(1.5)
            tensors = source.tensors()
            source.pull()
            assert all(torch.equal(tensors[name], p.half()) for name, p in model.named_parameters())
        mirror = source.mirror
        assert mirror is not None
        place, nbytes = mirror.data.data_ptr(), mirror.nbytes
        source.give_back(drop=False)
        places[place] = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(9)]  # which take what was given back
        source.take_again()
    assert len(places) > 1
