"""Adapters whose tensors are not on the device: what a slot holds after swaps, and how many copies that takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from adapted import (
    CONFIG,
    GREEDY,
    PROMPTS,
    assert_kernels_find,
    assert_like_peft,
    expected_tokens,
    lora,
    peft_model,
    shake,
    state_dict,
    tokens,
    two_adapters,
    with_lora,
)
from families import make_model
from peft import set_peft_model_state_dict
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.engine.adapters.slab import Slab, pack
from stoker.engine.device import runtime_for
from stoker.kernels.errors import EngineStateError
from stoker.kernels.reference.adapter_weights import AdapterWeights, LoraWeights, TokenRows
from stoker.kernels.reference.lora import LoraTable, PointerBlock
from stoker.rollout import EngineConfig, RolloutEngine, adapter_sources, adapters
from stoker.weight_sync.naming import unwrap
from stoker.weight_sync.peft_adapters import live_adapters

CPU = torch.device("cpu")
LOADED: dict[str, dict[str, Any]] = {
    "plain": {},
    "ranks": {"rank_pattern": {"layers.1.self_attn.q_proj": 9, "down_proj": 2}, "r": 7},
    "dora": {"use_dora": True, "r": 3},
    "bias": {"lora_bias": True, "target_modules": ["q_proj", "up_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "v_proj", "lm_head"]},
    "saved": {"modules_to_save": ["lm_head"], "r": 2},
    "rows": {"trainable_token_indices": [3, 5, 9], "r": 5},
}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No adapter lies on the device, as far as the engine knows, though it is a CPU."""
    for module in (adapters, adapter_sources):
        monkeypatch.setattr(module, "lies_on", lambda adapter, device: False)


class Copies(TorchDispatchMode):
    """Counts copies."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten.cat.out)
        return func(*args, **(kwargs or {}))


def weights_of_all_kinds(linears: int = 3, seed: int = 0) -> AdapterWeights:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    shared = randn(5, 3)
    return AdapterWeights(
        linears={f"l{n}": LoraWeights(randn(n + 1, 6), randn(9, n + 1), 0.5 * n) for n in range(linears)}
        | {
            "columns": LoraWeights(randn(6, 4).T, randn(2, 9).T, 1.0),
            "none": LoraWeights(randn(0, 3), randn(5, 0), 1.0),
        },
        magnitudes={"l0": randn(9, dtype=torch.float32)},
        offsets={"l1": randn(9)},
        experts={"e.down": LoraWeights(randn(2, 3, 4), randn(7, 3, 2).permute(2, 0, 1), 2.0)},
        tokens={"embed": TokenRows((1, 4), randn(2, 3))},
        saved={"head": {"weight": shared, "steps": torch.tensor([3])}},
        then=AdapterWeights(linears={"l0": LoraWeights(randn(2, 6), randn(9, 2), 3.0)}, biases={"b": shared[0]}),
    )


def assert_equal(found: AdapterWeights, expected: AdapterWeights) -> None:
    pairs = zip(found.named_tensors(), expected.named_tensors(), strict=True)
    for (name, mine), (other, theirs) in pairs:
        assert name == other and mine.dtype == theirs.dtype and torch.equal(mine, theirs), name
    for mine_link, link in zip(found.links, expected.links, strict=True):
        for path, weights in link.linears.items():
            assert mine_link.linears[path].scale == weights.scale
        assert {p: t.ids for p, t in mine_link.tokens.items()} == {p: t.ids for p, t in link.tokens.items()}


def test_a_slab_holds_what_it_was_filled_with_last() -> None:
    runtime = runtime_for(CPU)
    slab = Slab(runtime)
    all_kinds = [weights_of_all_kinds(linears, seed) for seed, linears in enumerate((3, 8, 3, 2))]
    packed = [pack(weights, runtime) for weights in all_kinds]
    before = [[t.clone() for t in weights.tensors()] for weights in all_kinds]
    for index in (0, 1, 3, 1, 2, 0):
        here = slab.fill(packed[index])
        assert_equal(here, all_kinds[index])
        assert_equal(packed[index].adapter, all_kinds[index])
        start, size = slab._memory.data_ptr(), len(slab._memory)
        places = [(t.data_ptr() - start, t.nbytes) for t in here.tensors() if t.nbytes]
        assert all(0 <= at <= at + nbytes <= size and at % 256 == 0 for at, nbytes in places)
        for t in here.tensors():
            t.zero_()  # it is nobody else's
    for weights, tensors in zip(all_kinds, before, strict=True):
        assert all(torch.equal(mine, then) for mine, then in zip(weights.tensors(), tensors, strict=True))


def test_adapters_of_one_layout_are_at_the_same_addresses() -> None:
    runtime = runtime_for(CPU)
    slab = Slab(runtime)
    first, second = (
        [t.data_ptr() for t in slab.fill(pack(weights_of_all_kinds(4, seed), runtime)).tensors()] for seed in (1, 2)
    )
    assert first == second


@pytest.mark.parametrize("linears", [2, 40])
def test_a_swap_is_one_copy(linears: int) -> None:
    runtime = runtime_for(CPU)
    slab = Slab(runtime)
    packed = pack(weights_of_all_kinds(linears), runtime)
    with Copies() as copies:
        slab.fill(packed)
    assert copies.count == 1


def test_packing_takes_one_copy_for_each_dtype() -> None:
    model = peft_model()
    weights = live_adapters(unwrap(model), {})["default"]
    with Copies() as copies:
        pack(weights, runtime_for(CPU))
    assert copies.count == 1


def test_rows_of_addresses_go_to_the_device_together() -> None:
    """There is none here but the host, which reads what is written: as many tables as there are, one block."""
    tables = [LoraTable([4, 2], [None, None], 3, CPU), LoraTable([5], [None], 3, CPU, experts=2)]
    block = PointerBlock(tables)
    where = [t.pointers.data_ptr() for t in tables]
    assert where[1] - where[0] == tables[0].pointers.nbytes
    a, b = torch.randn(2, 7), torch.randn(4, 2)
    tables[0].put(0, 2, LoraWeights(a, b, 0.5))
    assert block.changed
    block.upload()
    rows = tables[0].pointers
    assert (
        rows[0, 2].tolist()[:2] == [a.data_ptr(), b.data_ptr()] and not rows[1].any() and not rows[0, [0, 1, 3]].any()
    )
    tables[0].put(0, 2, LoraWeights(a, b, 0.5))
    assert not block.changed, "nothing is"
    tables[0].put(0, 2, None)
    assert block.changed and not tables[0].pointers.any() and not tables[1].pointers.any()
    assert where == [t.pointers.data_ptr() for t in tables]


@pytest.mark.usefixtures("elsewhere")
def test_swaps_of_adapters_of_all_kinds() -> None:
    """Eight over two slots, in an order that has each follow others, and several at once."""
    model = peft_model()
    others = {name: peft_model(seed=n + 2, **options) for n, (name, options) in enumerate(LOADED.items())}
    config = EngineConfig(max_num_seqs=8, max_model_len=64, block_size=4, kv_cache_memory="8MiB", max_loras=2)
    with RolloutEngine(model, config=config) as engine:
        for name, other in others.items():
            engine.load_adapter(name, (state_dict(other), other.peft_config["default"]))
        wanted = {name: expected_tokens(other) for name, other in others.items()}
        wanted["default"] = expected_tokens(model)
        assert len({str(t) for t in wanted.values()}) == 8
        for name in [*others, "dora", "plain", "saved", "default", "rows", "bias"]:
            assert tokens(engine, adapter=name) == wanted[name], name
        together = ["saved", None, "dora", "default", "plain"]
        assert_like_peft(engine, model, together, [*PROMPTS, PROMPTS[0]], others)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("options", [{}, {"use_dora": True}])
def test_a_live_adapter_that_is_copied_is_copied_anew(options: dict[str, Any]) -> None:
    """When it was announced and when not, while one that was loaded stays what it was, and with the base changed too."""
    model, other = peft_model(**options), peft_model(seed=7, use_dora=True)
    before = {name: t.clone() for name, t in other.state_dict().items()}
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.load_adapter("other", (state_dict(other), other.peft_config["default"]))
        for change in range(3):
            assert_like_peft(engine, model, ["default", "other", None, "other"], others={"other": other})
            shake(model, seed=10 + change)
            if change:
                with torch.no_grad():
                    for model_of_both in (model, other):
                        model_of_both.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.mul_(1.5)
            if change < 2:
                engine.update_weights()
        assert_like_peft(engine, model, ["default", "other", None, "other"], others={"other": other})
        for name, weights in engine._adapters.in_slots.items():  # which a device reads nowhere else
            slot = engine._adapters._known[name].slot
            assert_kernels_find(engine, slot, weights.matrices())
            at = {t.untyped_storage().data_ptr() for t in weights.tensors()}
            assert at == {engine._adapters._slabs[slot]._memory.data_ptr()}
    assert all(torch.equal(t, before[name]) or "q_proj" in name for name, t in other.state_dict().items())


def test_an_adapter_that_leaves_the_device_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that its owner offloads: slots read it where it lies, or a copy of it."""
    other, here = peft_model(seed=7), True
    monkeypatch.setattr(adapters, "lies_on", lambda adapter, device: here)
    with RolloutEngine(make_model("llama"), config=CONFIG) as engine:
        engine.load_adapter("other", other)
        for here in (True, False, True):
            for p in other.parameters():
                p.data = p.data.clone()
            assert tokens(engine, adapter="other") == expected_tokens(other)
            assert bool(engine._adapters._slabs) != here


def test_what_lies_on_the_device_is_not_copied() -> None:
    """Neither at an update, nor where one takes another's slot."""
    model = two_adapters()
    with RolloutEngine(model, config=CONFIG) as engine:
        tokens(engine)
        shake(model)
        mine, other = (engine._adapters._known[name] for name in ("default", "other"))
        other.slot = mine.slot
        with Copies() as copies:
            engine.update_weights()
            engine._adapters.place(other)
            engine._adapters.place(mine)
        assert copies.count == 0 and not engine._adapters._slabs
        assert tokens(engine) == expected_tokens(model)


@pytest.mark.usefixtures("elsewhere")
def test_a_swap_in_an_engine_is_one_copy() -> None:
    """Of however many layers, with ranks that differ."""
    model, counts = make_model("llama"), []
    for targets in (["q_proj"], ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]):
        other = peft_model(seed=7, rank_pattern={"q_proj": 9}, target_modules=targets)
        with RolloutEngine(model, config=CONFIG) as engine:
            for name in ("a", "b"):
                engine.load_adapter(name, (state_dict(other), lora(rank_pattern={"q_proj": 9}, target_modules=targets)))
                engine.generate_batch([[1, 2]], GREEDY, adapter=name)
            engine._adapters._placed.clear()
            with Copies() as copies:
                engine._adapters.place(engine._adapters._known["a"])
            counts.append(copies.count)
    assert counts == [1, 1]


@pytest.mark.parametrize("here", [True, False])
def test_what_was_loaded_stays_what_it_was_where_an_adapter_in_a_wider_dtype_comes(
    here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a slot, in its own dtype, and has to run in the wider one."""
    for module in (adapters, adapter_sources):
        monkeypatch.setattr(module, "lies_on", lambda adapter, device: here)
    narrow, wide = peft_model(), peft_model(seed=2)
    loaded = {name: t.bfloat16() for name, t in state_dict(narrow).items()}
    narrow.load_state_dict({n: t.bfloat16().float() if "lora_" in n else t for n, t in narrow.state_dict().items()})
    with RolloutEngine(make_model("llama"), config=CONFIG) as engine:
        engine.load_adapter("narrow", (loaded, narrow.peft_config["default"]))
        engine.generate_batch([[7]], GREEDY, adapter="narrow")
        engine.load_adapter("wide", (state_dict(wide), wide.peft_config["default"]))
        rows = ["narrow", None, "wide", "narrow"]
        assert_like_peft(engine, narrow, rows, others={"narrow": narrow, "wide": wide})


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_copies_sleep_with_the_weights(dtype: str) -> None:
    """Nothing refers to them while they do; a request that was paused goes on with its adapter, its KV kept or not."""
    # Of three layers: of two, numbers of bf16 tie where requests beside them round otherwise.
    model, other = (
        with_lora(make_model("llama", num_hidden_layers=3), **options)
        for options in ({}, {"seed": 7, "use_dora": True, "modules_to_save": ["lm_head"]})
    )
    with RolloutEngine(model, config=replace(CONFIG, dtype=dtype, decode_window=1)) as engine:
        engine.load_adapter("other", (state_dict(other), other.peft_config["default"]))
        wanted = {name: tokens(engine, adapter=name) for name in ("default", "other", None)}
        assert len({str(t) for t in wanted.values()}) == 3
        for change in (1, 2, ["weights"]):
            running = {name: engine.submit(PROMPTS[0], GREEDY, adapter=name) for name in wanted}
            for _ in range(3):
                engine.core.step()
            engine.pause()
            copies = [StorageWeakRef(slab._memory.untyped_storage()) for slab in engine._adapters._slabs.values()]
            assert len(copies) == 2
            engine.sleep(change) if isinstance(change, int) else engine.sleep(tags=change)
            assert all(copy.expired() == (change != 1) for copy in copies)
            assert engine.is_sleeping
            if change == 2:
                engine.load_adapter("late", (state_dict(other), other.peft_config["default"]))
                assert not engine._adapters._slabs  # nor is one made before they wake
                engine.unload_adapter("late")
                engine.wake_up(["kv_cache"])
                with pytest.raises(EngineStateError, match=r"asleep \(weights\)"):
                    engine.generate_batch(PROMPTS, GREEDY)
            engine.wake_up()
            assert not engine.is_sleeping
            engine.resume()
            for name, handle in running.items():
                assert [handle.result().completions[0].token_ids] == wanted[name][:1]
            assert {name: tokens(engine, adapter=name) for name in wanted} == wanted
        copies = [StorageWeakRef(slab._memory.untyped_storage()) for slab in engine._adapters._slabs.values()]
        engine.unload_adapter("other")
        assert sorted(copy.expired() for copy in copies) == [False, True], "nor to that of one that was unloaded"


@pytest.mark.usefixtures("elsewhere")
def test_copies_of_what_another_model_holds_only_while_they_wake_are_made_anew() -> None:
    model, other = make_model("llama"), peft_model(seed=7)
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.load_adapter("other", other)
        assert tokens(engine, adapter="other") == expected_tokens(other)
        before = {name: t.clone() for name, t in state_dict(other).items()}
        engine.sleep(level=2)
        shake(other, seed=8)
        engine.wake_up()
        set_peft_model_state_dict(other, before)
        assert tokens(engine, adapter="other") == expected_tokens(other)
