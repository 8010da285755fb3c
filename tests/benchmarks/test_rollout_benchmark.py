"""Rollouts compared with other engines, what is left out for want of time or memory, and what the machine allows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import other_engines
import pytest
import torch

from stoker.benchmarks import ceilings, comparison, outside, peers, scoring, sweeps
from stoker.benchmarks.ceilings import Ceiling, best_time, kv_token_bytes, state_bytes
from stoker.benchmarks.scenarios import Scenario
from stoker.benchmarks.workloads import TOY, TOY_HYBRID, Workload

TINY = Workload(name="tiny", prompts=2, samples=3, prompt_tokens=(4, 9), median=6, sigma=0.7, cap=12, slots=4)


# -- other engines ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stoker() -> Iterator[peers.Stoker]:
    engine = peers.Stoker(TOY, TINY, "cpu", torch.float32)
    yield engine
    engine.close()


@pytest.fixture
def both_installed() -> Iterator[None]:
    with other_engines.installed():
        yield


def test_vllm_gets_the_same_weights_kv_cache_and_requests(stoker: peers.Stoker, both_installed: None) -> None:
    peer = outside.Vllm(TOY, TINY, "cpu", torch.float32)
    llm: Any = peer.llm
    for name, tensor in stoker.model.state_dict().items():
        assert torch.equal(llm.model.state_dict()[name], tensor)
    assert llm.settings["kv_cache_memory_bytes"] == stoker.engine.config.kv_cache_memory
    assert (llm.settings["max_num_seqs"], llm.settings["max_model_len"]) == (4, 21)
    assert llm.settings["enable_prefix_caching"] and llm.settings["skip_tokenizer_init"]
    prompts = TINY.draw(100, 0)
    for _ in range(2):
        with comparison.running(peer):
            found = peer.rollout(prompts, TINY.lengths)
    assert found == [[p[0]] * n for p, n in zip(prompts, TINY.lengths, strict=True)]
    assert llm.calls == ["reset", "generate", "reset", "generate"]
    peer.close()
    assert not hasattr(peer, "llm")


def test_lmdeploy_gets_the_same_kv_cache_and_requests_and_no_more_at_a_time_than_slots(both_installed: None) -> None:
    peer = outside.LMDeploy(TOY, TINY, "cpu", torch.bfloat16)
    pipeline: Any = peer.pipe
    config = pipeline.backend_config
    token_bytes = kv_token_bytes(TOY.config, torch.bfloat16)
    assert token_bytes == 2 * 4 * 2 * 16 * 2  # keys and values, layers, heads, head size, bytes
    assert 0 <= peers.kv_budget(TOY, TINY, torch.bfloat16) - config.num_gpu_blocks * 64 * token_bytes < 64 * token_bytes
    assert (config.max_batch_size, config.session_len, config.enable_prefix_caching) == (4, 21, True)
    prompts = TINY.draw(100, 0)
    for _ in range(2):
        with comparison.running(peer):
            found = peer.rollout(prompts, TINY.lengths)
    assert found == [[p[0]] * n for p, n in zip(prompts, TINY.lengths, strict=True)]
    assert pipeline.most_running == 4
    peer.close()


generate = other_engines.LLM.generate


def no_such_module(self: Any, **settings: Any) -> None:
    import stoker.nothing  # noqa: F401


def old_transformers(self: Any, **settings: Any) -> None:
    raise ImportError("cannot import name 'AutoModelForVision2Seq' from 'transformers'")


def three_rollouts(self: Any, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
    if self.calls.count("generate") == 3:  # a warm-up, and two rounds
        raise RuntimeError("out of memory\nat some line")
    return generate(self, prompts, params, use_tqdm=use_tqdm)


def one_short(self: Any, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
    params[0].max_tokens -= 1
    return generate(self, prompts, params, use_tqdm=use_tqdm)


@pytest.mark.parametrize(
    ("method", "replacement", "why"),
    [
        ("__init__", no_such_module, "ModuleNotFoundError: No module named 'stoker.nothing'"),
        ("__init__", old_transformers, "ImportError: cannot import name 'AutoModelForVision2Seq' from 'transformers'"),
        ("generate", three_rollouts, "RuntimeError: out of memory"),
        ("generate", one_short, "RuntimeError: vllm did not run every request to its length"),
        (None, None, "vllm is not installed"),
    ],
)
def test_an_engine_that_fails_is_left_out_and_the_others_go_on(
    stoker: peers.Stoker,
    method: str | None,
    replacement: Callable[..., Any],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if method:
        monkeypatch.setitem(sys.modules, "vllm", other_engines.modules()["vllm"])
        monkeypatch.setattr(other_engines.LLM, method, replacement)
    scenario = Scenario(spec=TOY, workload=TINY, repeats=4)
    engines = comparison.race(stoker, scenario, "cpu", torch.float32, ["vllm"])
    assert engines["vllm"]["skipped"] == why
    assert len(engines["stoker"]["seconds"]) == 4


def test_slow_engines_sit_out(stoker: peers.Stoker) -> None:
    slow = Scenario(spec=TOY, workload=TINY, repeats=3, peer_limit_s=1e-9, budget_s=0.0)
    patient = Scenario(spec=TOY, workload=TINY, repeats=3, budget_s=0.0)
    with other_engines.installed():
        engines = comparison.race(stoker, slow, "cpu", torch.float32, ["generate", "vllm"])
        assert "unfinished after 0 s" in engines["generate"]["skipped"]
        assert "its warm-up took" in engines["vllm"]["skipped"]
        assert len(engines["stoker"]["seconds"]) == 1
        engines = comparison.race(stoker, patient, "cpu", torch.float32, ["vllm"])
        assert len(engines["vllm"]["seconds"]) == len(engines["stoker"]["seconds"]) == 1
        assert engines["vllm"]["version"] == "0"


def test_decode_points_that_need_too_much_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    token_bytes = kv_token_bytes(TOY.config, torch.float32)
    # Nothing here is about how long anything takes.
    monkeypatch.setattr(ceilings, "best_time", lambda call, device, _=0: best_time(call, device, 0))
    monkeypatch.setattr(sweeps, "TOKENS", 24)
    monkeypatch.setattr(sweeps, "_MOST_KV_BYTES", 8 * (16 + sweeps.TOKENS) * token_bytes)
    monkeypatch.setattr(sweeps, "_REPEATS", 1)
    points = ((2, 16), (9, 16), (8, 16), (1, 32))
    found = list(sweeps.decode(TOY, "cpu", points, float("inf")))
    assert [(p["batch"], p["context"]) for p in found] == [(2, 16), (8, 16), (1, 32)]
    (narrow,) = sweeps.decode(TOY, "cpu", points[1:2], 0.0, kv_cache_dtype="fp8")
    assert narrow["batch"] == 9 and narrow["kv_cache_dtype"] == "fp8"
    plain, (rounded,) = found[0], sweeps.decode(TOY, "cpu", points[:1], 0.0, quantization="fp8")
    assert rounded["quantization"] == "fp8" and plain["quantization"] is None
    assert len(list(sweeps.decode(TOY, "cpu", points, 0.0))) == 1
    monkeypatch.setattr(sweeps, "room", lambda device, wanted, besides: wanted - besides - 1)
    assert [(p["batch"], p["context"]) for p in sweeps.decode(TOY, "cpu", points, 1e9)] == [(2, 16), (1, 32)]
    monkeypatch.setattr(sweeps, "room", lambda *_, **__: 0)
    with pytest.raises(MemoryError, match=r"none of 4 points fits into 0.0 GB"):
        list(sweeps.decode(TOY, "cpu", points, 1e9))


# -- what a machine allows --------------------------------------------------------------------------------------------


def test_a_step_reads_and_writes_the_states_of_all_its_rows() -> None:
    config = TOY_HYBRID.config
    assert kv_token_bytes(config, torch.bfloat16) == 2 * 2 * 16 * 2  # of the one layer that attends
    of_state, of_inputs = 4 * 16 * 16 * 4, 3 * (2 * 32 + 64) * 2  # a state a head, in fp32; three inputs a channel
    assert state_bytes(config, torch.bfloat16) == 3 * (of_state + of_inputs)
    assert state_bytes(TOY.config, torch.bfloat16) == 0

    sizes = {"weight_bytes": 10**6, "linear_params": 10**6, "head_params": 10**5, "kv_bytes": 128, "state_bytes": 5000}
    ceiling = Ceiling(bandwidth=1e9, flops=1e12, matmuls={}, **sizes)
    assert ceiling.step_s(8, 300) == pytest.approx(1e-9 * (10**6 + 300 * 128 + 8 * 2 * 5000))
    # A prompt, whose last logits give each of its samples a token; then steps of two sequences, and of one.
    prompt = 2 * (9 * 10**5 * 10 + 10**5) / 1e12
    assert ceiling.rollout_s([[7] * 10] * 2, [1, 1], 2) == pytest.approx(prompt)
    steps = [ceiling.step_s(2, 22), ceiling.step_s(1, 12)]
    assert ceiling.rollout_s([[7] * 10] * 3, [1, 3, 2], 2) == pytest.approx(prompt + sum(steps))
    scored = 2 * (9 * 10**5 * (10 + 1 + 3 - 2) + 10**5 * 4) / 1e12
    assert scoring.best_s(ceiling, [[7] * 10] * 2, [[5], [6] * 3]) == pytest.approx(scored)


def test_the_cache_of_a_hybrid_has_room_for_all_slots_and_their_states() -> None:
    peer = peers.Stoker(TOY_HYBRID, TINY, "cpu", torch.float32)
    found = peer.engine.stats()
    states = state_bytes(TOY_HYBRID.config, torch.float32)
    assert found.recurrent_state_bytes == (4 + 8 + 2) * states  # of slots, copies, padding and zeros
    assert found.kv_cache_bytes == peers.kv_budget(TOY_HYBRID, TINY, torch.float32)
    assert found.num_kv_blocks + 1 == 4 * (-(-TINY.max_len // 16) + 1)  # with that of padding
    peer.close()
