"""An emulated CUDA device refuses what a real one does; engines on it, with CUDA's own runtime."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from adapted import lora, shake, state_dict
from emulated_cuda import EmulatedCuda, emulated_cuda
from emulated_engine import on_cuda, unasked
from emulated_graph import CUDA, HOST, DeviceFault
from families import make_model
from hybrid_fields import HYBRIDS
from hybrids import make_model as make_hybrid
from peft import get_peft_model
from pretend_device import STATIC, build, close, params, prompts
from tokenizer_kinds import tokenizer

from stoker.engine.device import CpuRuntime
from stoker.kernels.errors import UnsupportedModelError
from stoker.kernels.triton_ops import TRITON
from stoker.rollout import EngineConfig, RolloutBatch, RolloutEngine, SamplingParams, binding


@pytest.fixture
def device() -> Iterator[EmulatedCuda]:
    with emulated_cuda() as device:
        yield device


def captured(body: Callable[[], None]) -> Any:
    graph: Any = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        body()
    finally:
        graph.capture_end()
    return graph


# -- what the device refuses -----------------------------------------------------------------------------------------


def test_tensors_of_host_and_device_do_not_mix(device: EmulatedCuda) -> None:
    ours, theirs = torch.ones(3, device="cuda"), torch.ones(3)
    assert ours.device == CUDA and ours.is_cuda and ours[1:].device == CUDA and (ours + 1).device == CUDA
    assert theirs.device == HOST and theirs.to("cuda").is_cuda and ours.cpu().device == HOST
    assert (ours * torch.tensor(2.0)).device == CUDA  # as a single number may
    for wrong in (lambda: ours + theirs, lambda: torch.cat((ours, theirs)), lambda: theirs.add_(ours), ours.numpy):
        with pytest.raises(DeviceFault):
            wrong()


def test_who_makes_the_host_wait_is_noted(device: EmulatedCuda) -> None:
    ours = torch.arange(4, device="cuda")
    for wait in (
        ours.tolist,
        ours[0].item,
        ours.nonzero,
        lambda: ours[ours > 1],
        ours.cpu,
        lambda: bool((ours > 1).any()),
    ):
        before = len(device.waits)
        wait()
        assert len(device.waits) == before + 1
    before = len(device.waits)
    torch.empty(4, dtype=torch.long, pin_memory=True).copy_(ours, non_blocking=True)
    ours.index_select(0, ours).add_(1).sum()
    assert len(device.waits) == before


def test_a_copy_has_arrived_after_its_event_and_reads_until_then(device: EmulatedCuda) -> None:
    ours, host = torch.arange(4, device="cuda"), torch.empty(4, dtype=torch.long, pin_memory=True)
    host.copy_(ours, non_blocking=True)
    event: Any = torch.cuda.Event()
    event.record()
    assert host.tolist() == [-1] * 4
    ours.add_(1)  # comes after
    event.synchronize()
    assert host.tolist() == [0, 1, 2, 3]
    ours.copy_(host, non_blocking=True)
    host.zero_()
    with pytest.raises(DeviceFault, match="still reading"):
        torch.cuda.synchronize()


def test_a_graph_is_operations_on_the_memory_it_was_captured_with(device: EmulatedCuda) -> None:
    inputs, total, made = [torch.ones(2, device="cuda")], torch.zeros(2, device="cuda"), list[torch.Tensor]()

    def body() -> None:
        made.append(inputs[0] * 2)
        total.add_(made[0])

    graph = captured(body)
    assert total.tolist() == [0, 0] and made[0].isnan().all()  # nothing has run
    for n in range(1, 4):
        inputs[0].fill_(n)
        graph.replay()
        assert made[0].tolist() == [2 * n] * 2
    assert total.tolist() == [12, 12] and device.replays == 3
    inputs.clear()
    with pytest.raises(DeviceFault, match="another's"):
        graph.replay()


def test_a_graph_does_not_outlive_memory_that_was_given_back(device: EmulatedCuda) -> None:
    given, out = torch.ones(2, device="cuda"), torch.ones(2, device="cuda")
    graph = captured(lambda: out.copy_(given))
    given.untyped_storage().resize_(0)
    with pytest.raises(DeviceFault, match="given back"):
        graph.replay()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ours: ours.tolist(),
        lambda ours: ours[ours > 0],
        lambda ours: torch.tensor([1.0, 2.0], device="cuda"),
        lambda ours: ours.copy_(torch.ones(2).pin_memory(), non_blocking=True),  # the same numbers at every replay
        lambda ours: torch.cuda.synchronize(),
        lambda ours: torch.cuda.empty_cache(),
    ],
)
def test_no_host_in_a_capture(wrong: Callable[[torch.Tensor], Any], device: EmulatedCuda) -> None:
    ours = torch.ones(2, device="cuda")
    with pytest.raises(DeviceFault, match="in a capture"):
        captured(lambda: wrong(ours))


def test_memory_that_nothing_was_written_to_is_garbage(device: EmulatedCuda) -> None:
    """As a CPU's mostly is not: a new tensor of it is of zeros, where the system has just given its pages."""
    ours = torch.ones(3, device="cuda")
    for made in (torch.empty(3, device="cuda"), torch.empty_like(ours), ours.new_empty(3), torch.empty(3)):
        assert made.isnan().all()
    assert torch.empty(2, dtype=torch.long, pin_memory=True).tolist() == [-1, -1]
    graph = captured(lambda: ours.copy_(torch.empty(3, device="cuda")))
    graph.replay()
    assert ours.isnan().all()


def test_lists_are_copied_between_devices_one_after_the_other(device: EmulatedCuda) -> None:
    ours, theirs = [torch.zeros(2, device="cuda"), torch.zeros(3, device="cuda")], [torch.ones(2), torch.ones(3)]
    torch._foreach_copy_(ours, theirs)
    assert [each.tolist() for each in ours] == [[1, 1], [1, 1, 1]]


def test_kernels_are_given_tensors_of_the_device(device: EmulatedCuda) -> None:
    x, weight = torch.randn(2, 16), torch.randn(16)
    wanted = STATIC.rms_norm(x, weight, 1e-6)
    ours, theirs = x.to("cuda"), weight.to("cuda")
    torch.testing.assert_close(TRITON.rms_norm(ours, theirs, 1e-6).cpu(), wanted)
    with pytest.raises(DeviceFault, match="host's"):
        TRITON.rms_norm(ours, weight, 1e-6)


def test_kernels_are_captured_in_a_form_that_was_launched_before(device: EmulatedCuda) -> None:
    x, wide, weight = (torch.ones(size, device="cuda") for size in ((2, 16), (2, 24), (16,)))
    TRITON.rms_norm(x, weight, 1e-6)
    captured(lambda: TRITON.rms_norm(x[:1], weight, 1e-5))
    for other in (wide[:, :16], x.half()):  # a stride that is no multiple of 16, another dtype
        with pytest.raises(DeviceFault, match="_rms_norm_kernel is first launched so in a capture"):
            captured(lambda given=other: TRITON.rms_norm(given, weight, 1e-6))
        TRITON.rms_norm(other, weight, 1e-6)
        captured(lambda given=other: TRITON.rms_norm(given, weight, 1e-6))


# -- engines ---------------------------------------------------------------------------------------------------------


def as_the_model_says(batch: RolloutBatch, model: Any) -> None:
    for output in batch:
        (completion,) = output.completions
        tokens = torch.tensor([[*output.prompt_token_ids, *completion.token_ids]], device="cuda")
        with torch.no_grad():
            logprobs = model(tokens).logits[0].log_softmax(-1)[len(output.prompt_token_ids) - 1 : -1]
        chosen = logprobs.gather(1, tokens[0, len(output.prompt_token_ids) :, None])[:, 0].cpu()
        torch.testing.assert_close(torch.tensor(completion.logprobs), chosen, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "stable"),
    [("llama", True), ("llama", False), ("falcon_h1", True), ("kimi_linear", False), ("mamba2", False)],
)
def test_tokens_and_scores_are_those_of_a_cpu(family: str, stable: bool) -> None:
    """Also where memory comes back elsewhere (not stable), and graphs are captured again."""
    model, asked = (make_hybrid if family in HYBRIDS else make_model)(family), (prompts(10), params(10))
    with build(model, runtime=CpuRuntime) as engine:
        expected = engine.generate_batch(*asked)
        scores = engine.score(expected)
    with on_cuda(model, stable=stable) as (engine, device):
        engine.generate_batch([[1]])  # the first call looks at more
        for level in (1, 2, 1):
            device.waits.clear()
            close(engine.generate_batch(*asked), expected)
            assert not unasked(device) and device.replays
            engine.sleep(level)
            engine.wake_up()
        for one, other in zip(engine.score(expected), scores, strict=True):
            torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=2e-5)
        assert engine.verify_weights().ok


def test_all_that_a_step_launches_was_launched_before_it_is_captured() -> None:
    """By the kernels that a device has, of one row and of several."""
    with on_cuda(make_model("llama", num_hidden_layers=1), TRITON, decode_window=2) as (engine, _):
        for count in (1, 3):
            settings = [SamplingParams(max_tokens=3, seed=n, top_k=5 * (n % 2), ignore_eos=True) for n in range(count)]
            engine.generate_batch([prompt[:3] for prompt in prompts(count)], settings).raise_for_errors()
        graphs = engine.core.runner._graphs
        assert len(graphs) == 2 and None not in graphs.values()


@pytest.mark.parametrize(
    "fields", [{}, {"dtype": "float64"}, {"quantization": "fp8"}], ids=["aliased", "mirror", "fp8"]
)
def test_whatever_becomes_of_the_weights(fields: dict[str, Any]) -> None:
    model, sampling = make_model("qwen3"), SamplingParams(max_tokens=9, seed=3)
    with on_cuda(model, **fields) as (engine, device):
        for change in (
            lambda p: p.mul_(1.1),
            lambda p: p.add_(0.01 * torch.ones_like(p)),
            lambda p: setattr(p, "data", 0.9 * p.data),
            lambda p: setattr(p, "data", p.data.to("cpu").to("cuda")),
        ):
            with torch.no_grad():
                for parameter in model.parameters():
                    change(parameter)
            engine.update_weights()
            for _ in range(2):
                batch = engine.generate_batch(prompts(4), sampling)
                if "quantization" not in fields:
                    as_the_model_says(batch, model)
            assert engine.verify_weights().ok
            engine.sleep(2)
            engine.wake_up(["weights"])
            engine.wake_up()
        engine.update_weights({name: 1.02 * t.detach() for name, t in model.named_parameters()})
        engine.generate_batch(prompts(4), sampling)
        assert device.replays


@torch.no_grad()
def test_an_update_in_place_does_not_wait_for_the_trainers_step() -> None:
    """Which may still be under way on the device. What was kept of rotary frequencies is made anew before anything runs."""
    model: Any = get_peft_model(make_model("llama", num_hidden_layers=1), lora()).eval()
    with on_cuda(model) as (engine, device):
        as_the_model_says(engine.generate_batch(prompts(2), SamplingParams(max_tokens=5, seed=1)), model)
        for parameter in model.parameters():
            parameter.mul_(0.9)
        model.get_decoder().rotary_emb.inv_freq.mul_(0.7)
        device.waits.clear()
        engine.update_weights()
        assert not device.waits
        as_the_model_says(engine.generate_batch(prompts(2), SamplingParams(max_tokens=5, seed=1)), model)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@torch.no_grad()
def test_named_tensors_that_come_again_do_not_wait_for_the_device(dtype: str) -> None:
    """Be they those of the model, or of a mirror, before their copy is launched or after. Others are seen by their device, too."""
    model: Any = make_model("llama", num_hidden_layers=1).eval()
    with on_cuda(model, dtype=dtype) as (engine, device):
        new = {name: p.clone() for name, p in model.named_parameters()}
        for round_ in range(3):
            torch._foreach_mul_([*new.values()], 0.9)
            device.waits.clear()
            engine.update_weights(new)
            assert round_ == 0 or not device.waits
            now = engine._binding.source.tensors()
            assert all(torch.equal(now[name], tensor.to(now[name].dtype)) for name, tensor in new.items())
        name = next(iter(new))
        new[name] = new[name].mul(0.9).cpu()
        engine.update_weights(new)
        assert torch.equal(now[name].cpu(), new[name].to(now[name].dtype))


def test_adapters_that_come_and_change_and_go() -> None:
    """By the kernels that a device has for them."""
    model, other = (get_peft_model(make_model("llama", num_hidden_layers=1), lora()).eval() for _ in range(2))
    for seed, each in enumerate((model, other)):
        shake(each, seed)
    loaded, asked = (
        (state_dict(other), other.peft_config["default"]),
        (prompts(4), SamplingParams(max_tokens=5, seed=1)),
    )
    adapters = ["default", "b", None, "a"]

    def rollouts(engine: RolloutEngine) -> Iterator[RolloutBatch]:
        for name in ("a", "b"):
            engine.load_adapter(name, loaded)
        yield engine.generate_batch(*asked, adapter=adapters)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(0.7)
        engine.update_weights()
        yield engine.generate_batch(*asked, adapter=adapters)
        engine.unload_adapter("a")
        yield engine.generate_batch(*asked, adapter=[*adapters[:-1], None])

    start = copy.deepcopy(model.state_dict())
    with build(model, runtime=CpuRuntime, max_loras=2) as engine:
        wanted = list(rollouts(engine))
    model.load_state_dict(start)
    with on_cuda(model, replace(STATIC, lora=TRITON.lora), max_loras=2) as (engine, device):
        for batch, expected in zip(rollouts(engine), wanted, strict=True):
            close(batch, expected)
        assert device.replays


def test_adapters_in_numbers_that_kernels_do_not_take_are_refused_before_any_work() -> None:
    model: Any = get_peft_model(make_model("llama", num_hidden_layers=1), lora()).double()
    with (
        pytest.raises(UnsupportedModelError, match=r"'default' is in torch.float64, .* torch.float32: cast it"),
        on_cuda(model, TRITON, dtype="float32"),
    ):
        pass


def test_a_pattern_is_followed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    words, sampling = (
        tokenizer("byte-level"),
        [SamplingParams(regex="(ab|c)+d", max_tokens=20, seed=n) for n in range(3)],
    )
    monkeypatch.setattr(binding, "ops_for", lambda *_, **__: STATIC)
    with emulated_cuda() as device:
        model = device.adopt(make_model("llama", vocab_size=len(words)))
        config = EngineConfig(kv_cache_memory="4MiB", max_num_seqs=4, max_model_len=64)
        with RolloutEngine(model, tokenizer=words, config=config) as engine:
            engine.generate_batch([[1, 2, 3]] * 3, sampling)
            device.waits.clear()
            for output in engine.generate_batch([[1, 2, 3]] * 3, sampling):
                (completion,) = output.completions
                assert completion.finish_reason == "length" or re.fullmatch("(ab|c)+d", completion.text)
            assert not unasked(device) and device.replays


# What a step that was launched may still read, under another stream than that of who is given it next.


def let_go(device: EmulatedCuda) -> set[int]:
    return {memory.data_ptr() for memory in device.let_go}


def test_longer_lists_of_ids_do_not_give_away_what_a_step_reads() -> None:
    with on_cuda(make_model("llama", num_hidden_layers=1), STATIC) as (engine, device):
        before = engine.core.inputs._packed.static
        engine.generate_batch(prompts(4), SamplingParams(max_tokens=3))
        graphs = list(engine.core.runner._graphs.values())  # which read where the ids were
        assert graphs and {memory.data_ptr() for each in graphs for memory in each.outputs}.isdisjoint(let_go(device))
        engine.generate_batch(prompts(4), SamplingParams(max_tokens=3, stop_token_ids=range(5)))
        assert {memory.data_ptr() for each in graphs for memory in each.outputs} <= let_go(device)
        assert engine.core.inputs._packed.static is not before and before.data_ptr() in let_go(device)


def test_a_larger_pattern_does_not_give_away_what_a_step_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    words = tokenizer("byte-level")
    monkeypatch.setattr("stoker.engine.constraints._LEAST", 64)
    monkeypatch.setattr(binding, "ops_for", lambda *_, **__: STATIC)
    with emulated_cuda() as device:
        model = device.adopt(make_model("llama", num_hidden_layers=1, vocab_size=len(words)))
        config = EngineConfig(kv_cache_memory="4MiB", max_num_seqs=4, max_model_len=64)
        engine = RolloutEngine(model, tokenizer=words, config=config)
        engine.generate_batch([[1, 2]], SamplingParams(regex="a", max_tokens=3))
        rows = engine.core.inputs.constraints.rows
        assert rows is not None
        engine.generate_batch([[1, 2]], SamplingParams(regex="[ab]{99}", max_tokens=3))
        now = engine.core.inputs.constraints.rows
        assert now is not None and now.automata is not rows.automata and rows.automata.data_ptr() in let_go(device)


def test_an_adapter_that_leaves_its_slot_does_not_give_away_what_a_step_reads() -> None:
    model, narrow, wide = (get_peft_model(make_model("llama", num_hidden_layers=1), lora(r=r)) for r in (4, 4, 16))
    with on_cuda(model.eval(), replace(STATIC, lora=TRITON.lora), max_loras=1) as (engine, device):
        for name, each in (("a", narrow), ("b", wide)):  # of the host
            engine.load_adapter(name, (state_dict(each), each.peft_config["default"]))
        places = []
        for name in ("a", "b", "default"):  # more of it, and the live model's own, which lies where it is read
            engine.generate_batch(prompts(2), SamplingParams(max_tokens=2), adapter=name)
            places += [slab._memory.data_ptr() for slab in engine._adapters._slabs.values()]
        assert len(set(places)) == 2 and set(places) <= let_go(device)
