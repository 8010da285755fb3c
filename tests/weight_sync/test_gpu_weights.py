"""Weights on a CUDA device: borrowed, mirrored, sent from another process, given back and taken again."""

from __future__ import annotations

import copy
import multiprocessing
from typing import Any

import oracle
import pytest
import sender
import torch
from families import make_model

from stoker.kernels.errors import WeightTransferError
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams
from stoker.weight_sync.transport import SharedMemoryTransfer

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
PROMPT = [7, 3, 99, 14, 5, 62, 8, 31, 4, 4, 90, 17]
PARAMS = SamplingParams(max_tokens=8, seed=1)


def config(**fields: Any) -> EngineConfig:
    return EngineConfig(kv_cache_memory="8MiB", **fields)


def assert_holds(engine: RolloutEngine, model: Any, version: int) -> None:
    """The engine's weights are those of the model, in its own dtype, and rollouts carry the version."""
    tensors = engine._binding.source.tensors()
    wanted = {n: p.detach().to(tensors[n]) for n, p in model.named_parameters()}
    assert [n for n, p in wanted.items() if not torch.equal(tensors[n], p)] == []
    (completion,) = engine.generate_batch([PROMPT], PARAMS)[0].completions
    assert set(completion.weight_versions) == {version}


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    ids = torch.randint(1, 100, (2, 12), device=DEVICE)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_optimizer_steps_arrive(dtype: str) -> None:
    model = make_model("llama").to(DEVICE)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    with RolloutEngine(model, config=config(dtype=dtype)) as engine:
        for version in (1, 2, 3):
            step(model, optimizer)
            assert engine.update_weights() == version
            moved = 0 if dtype == "auto" else 2 * sum(p.numel() for p in model.parameters())
            assert engine.stats().last_update_bytes == moved
            assert_holds(engine, model, version)
            assert engine.verify_weights().ok
        assert engine.stats().fused_layers == engine.stats().num_layers
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_one_tensor_that_differs_is_named_and_moved_alone() -> None:
    model, name = make_model("llama").to(DEVICE), "model.layers.1.mlp.gate_proj.weight"
    with RolloutEngine(model, config=config(dtype="bfloat16")) as engine:
        mine = engine._binding.source.tensors()[name]
        mine.copy_(mine.flip(0).clone())
        assert engine.verify_weights().mismatched == (name,)
        mine.copy_(model.get_parameter(name))
        assert engine.verify_weights().ok
        with torch.no_grad():
            model.get_parameter("lm_head.weight")[5, 7] += 1
        assert engine.verify_weights().mismatched == ("lm_head.weight",)
        engine.update_weights()
        assert engine.stats().last_update_bytes == 2 * model.lm_head.weight.numel()
        assert_holds(engine, model, 1)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_rollout_waits_for_the_stream_of_the_trainers_step(dtype: str) -> None:
    """Which has hardly begun when the rollout is asked for, under another stream."""
    model, trainers = make_model("llama").to(DEVICE), torch.cuda.Stream()
    with RolloutEngine(model, config=config(dtype=dtype)) as engine:
        engine.generate_batch([PROMPT], PARAMS)
        for version in (1, 2):
            trainers.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(trainers):
                torch.cuda._sleep(200_000_000)  # some 0.1 s
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(1.1)
                assert engine.update_weights() == version
            (c,) = engine.generate_batch([PROMPT], PARAMS)[0].completions
            assert set(c.weight_versions) == {version}
            expected = oracle.logprobs(copy.deepcopy(model).cpu(), PROMPT, c.token_ids)
            close = 1e-3 if dtype == "auto" else 0.3
            torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=close)


def test_steps_under_several_streams_come_one_after_the_other() -> None:
    """The first of a request has hardly begun when the next is asked for, under another stream."""
    model, other = make_model("llama").to(DEVICE), torch.cuda.Stream()
    with RolloutEngine(model, config=config()) as engine:
        (expected,) = engine.generate_batch([PROMPT], PARAMS)[0].completions
        for _ in range(3):
            handle = engine.submit(PROMPT, PARAMS)
            with torch.cuda.stream(other):
                torch.cuda._sleep(200_000_000)
                engine.wait([handle], timeout=0)
            assert handle.result().completions[0].token_ids == expected.token_ids


@pytest.mark.parametrize("dies", [False, True])
def test_weights_from_another_process_on_the_same_device(dies: bool) -> None:
    context = multiprocessing.get_context("spawn")  # an import that looks at CUDA makes it unusable after a fork
    here, there = context.Pipe()
    process = context.Process(target=sender.share, args=(there, dies, DEVICE))
    transfer = SharedMemoryTransfer(here, timeout=60)
    with RolloutEngine(sender.trained(0).to(DEVICE), config=config()) as engine:
        assert_holds(engine, sender.trained(0), 0)  # which compiles what the sender would wait for
        assert engine.verify_weights().ok
        process.start()
        there.close()
        try:
            assert engine.update_weights(transfer) == 1
            assert_holds(engine, sender.trained(1), 1)
            assert transfer._shared is not None and transfer._shared.device.type == DEVICE
            place = transfer._shared.data_ptr()
            if dies:
                with pytest.raises(WeightTransferError, match=r"the sender is gone.*keeps the weights"):
                    engine.update_weights(transfer)
                assert_holds(engine, sender.trained(1), 1)
            else:
                assert engine.update_weights(transfer) == 2
                assert_holds(engine, sender.trained(2), 2)
                assert transfer._shared.data_ptr() == place, "opened once"
                assert (engine.update_weights(transfer), engine.stats().last_update_bytes) == (3, 0)
                assert_holds(engine, sender.trained(2), 3)
            del transfer
        finally:
            process.join(30)
            process.kill()


@pytest.mark.alone
def test_a_mirror_waits_in_pinned_memory_and_comes_back() -> None:
    model = make_model("llama", hidden_size=512, intermediate_size=2048).to(DEVICE)
    with RolloutEngine(model, config=config(dtype="bfloat16")) as engine:
        before = engine.generate_batch([PROMPT], PARAMS)[0].completions[0].token_ids
        mirror: Any = engine._binding.source.mirror  # type: ignore[attr-defined]
        pushed = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        engine.update_weights(pushed)  # from elsewhere, so that the model's own do not fill the mirror again
        for level in (2, 3, 2):
            free = torch.cuda.mem_get_info()[0]
            engine.sleep(level)
            assert torch.cuda.mem_get_info()[0] - free >= mirror.nbytes
            assert (mirror._host is None) == (level == 3)
            assert mirror._host is None or all(part.is_pinned() for part in mirror._host)
            engine.wake_up("weights")
            if level == 3:
                engine.update_weights(pushed)
            assert engine.verify_weights().ok
            engine.wake_up()
            assert engine.generate_batch([PROMPT], PARAMS)[0].completions[0].token_ids == before


@pytest.mark.alone
@pytest.mark.parametrize("fields", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "fp8"}])
def test_graphs_outlive_copies_of_weights_that_wait_in_host_memory(fields: dict[str, Any]) -> None:
    model = make_model("llama", hidden_size=512, intermediate_size=2048).to(DEVICE)
    with RolloutEngine(model, config=config(**fields)) as engine:
        before = engine.generate_batch([PROMPT], PARAMS)[0].completions[0].token_ids
        graphs = dict(engine.core.runner._graphs)  # type: ignore[attr-defined]
        assert graphs and all(graphs.values()) and engine._binding.stable_addresses
        for _ in range(3):
            free = torch.cuda.mem_get_info()[0]
            engine.sleep(tags=["weights", "kv_cache"])
            assert torch.cuda.mem_get_info()[0] - free >= engine.stats().mirror_bytes
            engine.wake_up()
            assert engine.generate_batch([PROMPT], PARAMS)[0].completions[0].token_ids == before
            assert engine.core.runner._graphs == graphs, "nothing was captured again"  # type: ignore[attr-defined]
        assert engine.verify_weights().ok
