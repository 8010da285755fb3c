"""The sampler: penalties, min_tokens and log-probabilities, where each row asks for something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from stoker.engine.device import CpuRuntime
from stoker.engine.sampler import LOGPROBS_MODES, Sampler, SamplerOutput, SamplingRows
from stoker.kernels.cpu import sampling as cpu_sampling
from stoker.kernels.ops import CPU, REFERENCE
from stoker.kernels.reference.adjustments import IN_PROMPT, SAMPLED

VOCAB = 300
SLOTS = 6
SCALED, RAW, PROCESSED = range(3)
DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "greedy": False,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition": 1.0,
    "presence": 0.0,
    "frequency": 0.0,
    "seed": 0,
    "sample_index": 0,
    "first_stop": 0,
    "stops": (),
    "bias": {},
    "mode": SCALED,
    "slot": SLOTS,  # the spare one
}


def make_rows(*requests: dict[str, Any], top_logprobs: int = 0) -> SamplingRows:
    """Rows of these requests, and the flags as the engine sets them: what any row needs."""
    full = [DEFAULTS | r for r in requests]
    width = max(len(r["stops"]) for r in full)
    names = ("greedy", "top_k", "top_p", "min_p", "repetition", "presence", "frequency", "seed")
    return SamplingRows(
        **{name: torch.tensor([r[name] for r in full]) for name in (*names, "sample_index", "first_stop", "mode")},
        inverse_temperature=1 / torch.tensor([r["temperature"] for r in full]),
        stop_ids=torch.tensor([[*r["stops"], *[VOCAB] * (width - len(r["stops"]))] for r in full], dtype=torch.long),
        biased=torch.tensor([([*r["bias"]] or [0]) * (2 // max(len(r["bias"]), 1)) for r in full]),
        bias=torch.tensor([([*r["bias"].values()] or [0.0]) * (2 // max(len(r["bias"]), 1)) for r in full]),
        slots=torch.tensor([r["slot"] for r in full]),
        any_random=any(not r["greedy"] for r in full),
        any_greedy=any(r["greedy"] for r in full),
        any_truncated=any(r["top_k"] > 0 or r["top_p"] < 1 or r["min_p"] > 0 for r in full),
        any_penalised=any(r["repetition"] != 1 or r["presence"] or r["frequency"] for r in full),
        any_min_tokens=width > 0,
        any_biased=any(r["bias"] for r in full),
        modes=tuple(sorted({r["mode"] for r in full})),
        top_logprobs=top_logprobs,
    )


@pytest.fixture(params=[REFERENCE, CPU], ids=["reference", "cpu"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return Sampler(request.param, CpuRuntime(torch.device("cpu")), SLOTS, VOCAB)


def positions(count: int, start: int = 40) -> Tensor:
    return torch.arange(start, start + count)


def sample(sampler: Sampler, logits: Tensor, rows: SamplingRows, at: Tensor) -> SamplerOutput:
    (noise,) = sampler.noise(rows, at, 1)
    return sampler(logits, rows, at, noise)


def chosen(logprobs: Tensor, tokens: Tensor) -> Tensor:
    return logprobs.gather(1, tokens[:, None])[:, 0]


def assert_logprobs(actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=1e-5)


# -- penalties ---------------------------------------------------------------------------------------------------


def penalised(logits: Tensor, prompt: list[int], output: list[int], r: dict[str, Any]) -> Tensor:
    """Repetition over prompt and completion, as transformers has it; then, over the completion, OpenAI's and vLLM's
    ``logit - count * frequency - (count > 0) * presence``."""
    out = RepetitionPenaltyLogitsProcessor(r["repetition"])(torch.tensor([prompt + output]), logits[None].clone())[0]
    for token in set(output):
        out[token] -= output.count(token) * r["frequency"] + r["presence"]
    return out


PENALISED = [
    {"repetition": 1.7},
    {"repetition": 0.6},
    {"presence": 0.8},
    {"frequency": 0.3},
    {"repetition": 1.3, "presence": -0.5, "frequency": 0.7},
    {},
]


def test_penalties_are_those_of_transformers_and_openai(sampler: Sampler) -> None:
    prompts = [torch.randint(VOCAB, (20,)).tolist() for _ in PENALISED]
    outputs = [torch.randint(VOCAB, (n,)).tolist() + [7, 7, 9, 7] * (n > 0) for n in (0, 1, 5, 30, 30, 30)]
    for slot, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        sampler.start_penalties(slot, prompt, output)
    order = torch.randperm(len(PENALISED)).tolist()  # rows need not be in the order of the slots
    rows = make_rows(*(PENALISED[slot] | {"slot": slot} for slot in order))
    logits = torch.randn(len(order), VOCAB) * 4
    out = sampler.adjusted(logits, rows, positions(len(order)))
    wanted = [penalised(x, prompts[s], outputs[s], DEFAULTS | PENALISED[s]) for x, s in zip(logits, order, strict=True)]
    torch.testing.assert_close(out, torch.stack(wanted), rtol=1e-6, atol=1e-6)
    # Nothing asked, nothing changed: to the bit.
    free = order.index(5)
    assert torch.equal(out[free], logits[free])


def test_counts_follow_what_is_sampled_through_preemption(sampler: Sampler) -> None:
    """Two greedy requests, one of which loses its slot for a while and goes on in another; a third uses it meanwhile."""
    requests = [{"greedy": True, "frequency": 0.9, "presence": 0.4}, {"greedy": True, "repetition": 1.5}]
    prompts = [[1, 2, 3], [4, 5, 5]]
    outputs: list[list[int]] = [[], []]
    slots = [0, 1]
    logits = torch.randn(2, VOCAB)  # the same at every step: only the penalties make the tokens differ
    for request, prompt in enumerate(prompts):
        sampler.start_penalties(slots[request], prompt, [])
    for step in range(40):
        running = [0, 1]
        if 10 <= step < 20:
            running = [0]
            if step == 10:
                sampler.start_penalties(1, [9], [8, 8])  # somebody else's
        elif step == 20:
            slots[1] = 3
            sampler.start_penalties(3, prompts[1], outputs[1])
        elif step == 30:  # preempted and back at once, in the same slot
            sampler.start_penalties(0, prompts[0], outputs[0])
        padding = {"greedy": True}
        rows = make_rows(*(requests[i] | {"slot": slots[i]} for i in running), padding, padding)
        given = torch.cat((logits[running], torch.zeros(2, VOCAB)))
        tokens = sample(sampler, given, rows, positions(len(given))).tokens.tolist()
        for i, token in zip(running, tokens, strict=False):
            wanted = penalised(logits[i], prompts[i], outputs[i], DEFAULTS | requests[i])
            assert token == wanted.argmax().item()
            outputs[i].append(token)
    assert all(len(set(output)) > 3 for output in outputs), "the penalties did nothing"
    assert max(map(outputs[0].count, outputs[0])) > 1


def test_what_a_row_samples_for_nobody_is_not_counted(sampler: Sampler) -> None:
    """A chunk of a prompt that is not its last samples a token too; its row points to the spare slot."""
    sampler.start_penalties(2, [1], [])
    assert sampler.penalties is not None
    request = {"frequency": 1.0, "greedy": True}
    sample(sampler, torch.randn(2, VOCAB), make_rows(request, request), positions(2))
    seen = sampler.penalties.seen
    assert seen[:SLOTS].sum() == seen[2, 1] == IN_PROMPT and seen[SLOTS].sum() == 2 * SAMPLED


def test_a_slot_starts_clean(sampler: Sampler) -> None:
    sampler.start_penalties(0, [1, 2, 3], [4, 4, 5])
    sampler.start_penalties(0, [6], [])
    assert sampler.penalties is not None
    assert sampler.penalties.seen[0].nonzero().flatten().tolist() == [6]
    assert sampler.penalties.seen[0, 6] == IN_PROMPT


def test_the_tokens_of_a_penalised_request_are_sent_in_one_copy() -> None:
    """Pinned, as ``upload`` does it: from other memory the device would be waited for."""
    sent: list[list[list[int]]] = []

    class Noting(CpuRuntime):
        def upload(self, *arrays: NDArray[Any]) -> list[Tensor]:
            sent.append([array.tolist() for array in arrays])
            return super().upload(*arrays)

    sampler = Sampler(REFERENCE, Noting(torch.device("cpu")), SLOTS, VOCAB)
    sampler.start_penalties(1, [3, 4], [])
    sampler.start_penalties(2, [5], [6, 6])
    assert sent == [[[3, 4], []], [[5], [6, 6]]]
    assert sampler.penalties is not None and sampler.penalties.seen[2, 6] == 2 * SAMPLED


# -- min_tokens --------------------------------------------------------------------------------------------------


def test_stop_ids_are_not_sampled_before_min_tokens(sampler: Sampler) -> None:
    logits = torch.randn(4, VOCAB)
    logits[:, [3, VOCAB - 1]] = 30.0
    rows = make_rows(
        {"stops": (3, VOCAB - 1), "first_stop": 42},
        {"stops": (3,), "first_stop": 42},
        {"stops": (3, VOCAB - 1), "first_stop": 43, "greedy": True},
        {},
    )
    for at, banned in ((41, (True, True, True)), (42, (False, False, True)), (43, (False, False, False))):
        tokens = sample(sampler, logits, rows, torch.full((4,), at)).tokens.tolist()
        assert (tokens[0] not in (3, VOCAB - 1)) == banned[0]
        assert tokens[1] == VOCAB - 1 if banned[1] else tokens[1] in (3, VOCAB - 1)
        assert (tokens[2] not in (3, VOCAB - 1)) == banned[2]
        assert tokens[3] in (3, VOCAB - 1)


def test_suppressed_ids_are_never_sampled_and_stay_in_the_policy(sampler: Sampler) -> None:
    logits = torch.randn(4, VOCAB)
    logits[:, [3, VOCAB - 1]] = 30.0
    never = float("-inf")
    rows = make_rows(
        {"bias": {3: never, VOCAB - 1: never}},
        *({"bias": {3: never}, **r} for r in ({"greedy": True}, {"mode": 2})),
        {},
    )
    out = sample(sampler, logits, rows, torch.full((4,), 7))
    tokens = out.tokens.tolist()
    assert tokens[0] not in (3, VOCAB - 1) and tokens[1] == tokens[2] == VOCAB - 1 and tokens[3] in (3, VOCAB - 1)
    processed = logits[2].index_fill(0, torch.tensor([3]), float("-inf"))
    expected = [(processed if row == 2 else logits[row]).log_softmax(0)[t] for row, t in enumerate(tokens)]
    torch.testing.assert_close(out.logprobs, torch.stack(expected))


# -- log-probabilities -------------------------------------------------------------------------------------------


def processed_logits(logits: Tensor, r: dict[str, Any], prompt: list[int], output: list[int], at: int) -> Tensor:
    """What a request's token is drawn from, temperature included; one row, plainly."""
    biased = logits.clone()
    for token, bias in r["bias"].items():
        biased[token] += bias
    out = penalised(biased, prompt, output, r)
    if at < r["first_stop"]:
        out[list(r["stops"])] = float("-inf")
    out = out / r["temperature"]
    if r["top_k"]:
        out[out < out.sort(descending=True).values[r["top_k"] - 1]] = float("-inf")
    probs, order = out.softmax(0).sort(descending=True)
    outside = probs.cumsum(0) - probs >= r["top_p"]
    if r["top_p"] < 1:
        out[order[outside]] = float("-inf")
    out[out.softmax(0) < r["min_p"] * out.softmax(0).max()] = float("-inf")
    return out


PROCESSINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "greedy": {"greedy": True},
    "truncated": {"temperature": 1.4, "top_k": 30, "top_p": 0.8, "min_p": 0.05},
    "penalised": {"temperature": 0.8, "repetition": 1.4, "presence": 0.5, "frequency": 0.2},
    "min tokens": {"stops": (5, 6), "first_stop": 100},
    "biased": {"bias": {5: -6.0, 9: 5.5}, "temperature": 0.7},
    "all": {
        "temperature": 1.2,
        "top_p": 0.7,
        "repetition": 0.8,
        "frequency": 0.4,
        "stops": (5, 6, 7),
        "first_stop": 60,
        "bias": {5: float("-inf"), 8: 3.0},
    },
}


def run(sampler: Sampler, names: list[str], modes: list[int], top: int = 0) -> tuple[SamplerOutput, list[Tensor]]:
    """The sampler's output, and what log-probabilities each row should have, over the vocabulary, in float64."""
    logits = torch.randn(len(names), VOCAB) * 3
    logits[:, 5] += 4
    histories = [(torch.randint(VOCAB, (9,)).tolist(), torch.randint(VOCAB, (6,)).tolist()) for _ in names]
    requests = [
        PROCESSINGS[name] | {"mode": mode, "slot": slot % SLOTS, "seed": slot}
        for slot, (name, mode) in enumerate(zip(names, modes, strict=True))
    ]
    for slot, (prompt, output) in enumerate(histories[:SLOTS]):
        sampler.start_penalties(slot, prompt, output)
    out = sample(sampler, logits, make_rows(*requests, top_logprobs=top), positions(len(names)))
    wanted = []
    for row, request in enumerate(requests):
        full = DEFAULTS | request
        bases = (
            logits[row] / full["temperature"],
            logits[row],
            processed_logits(logits[row], full, *histories[row % SLOTS], 40 + row),
        )
        wanted.append(bases[full["mode"]].double().log_softmax(0))
        assert bases[PROCESSED][out.tokens[row]].isfinite(), "drew what was taken away"
        drawn = bases[PROCESSED][None]
        (noise,) = sampler.noise(make_rows(request), positions(1, 40 + row), 1)
        (token,) = REFERENCE.sample(drawn, torch.ones(1), None, noise)[0]
        assert out.tokens[row] == token, "drew by other chances"
    return out, wanted


@pytest.mark.parametrize("mode", [SCALED, RAW, PROCESSED])
@pytest.mark.parametrize("name", PROCESSINGS)
def test_logprobs_of_one_mode(name: str, mode: int, sampler: Sampler) -> None:
    out, wanted = run(sampler, [name] * SLOTS, [mode] * SLOTS)
    assert out.top_ids is None and out.top_logprobs is None
    assert_logprobs(out.logprobs, chosen(torch.stack(wanted), out.tokens))


@pytest.mark.parametrize(
    "names",
    [["plain", "temperature", "greedy"], ["truncated", "temperature", "penalised"], ["biased", "plain"], ["all"]],
)
def test_modes_mix_in_a_batch(names: list[str], sampler: Sampler) -> None:
    assert LOGPROBS_MODES == ("scaled", "raw", "processed")
    rows = [(name, mode) for name in names for mode in (SCALED, RAW, PROCESSED)][:SLOTS]
    out, wanted = run(sampler, *map(list, zip(*rows, strict=True)), top=4)
    assert_logprobs(out.logprobs, chosen(torch.stack(wanted), out.tokens))
    assert out.top_ids is not None and out.top_logprobs is not None
    values, ids = torch.stack(wanted).topk(4)
    assert torch.equal(out.top_ids, ids)
    assert_logprobs(out.top_logprobs, values)
    row, column = (ids == out.tokens[:, None]).nonzero(as_tuple=True)
    assert len(row) and torch.equal(out.top_logprobs[row, column], out.logprobs[row]), "two numbers for one token"


def test_a_row_does_not_depend_on_what_its_neighbours_ask(sampler: Sampler) -> None:
    logits = torch.randn(4, VOCAB) * 3
    mine = [{"seed": 11}, {"temperature": 0.7, "seed": 12}, {"greedy": True}]
    other = PROCESSINGS["all"] | {"slot": 0, "mode": PROCESSED}
    sampler.start_penalties(0, [1, 2], [3])
    crowd = sample(sampler, logits, make_rows(*mine, other, top_logprobs=3), positions(4))
    for row, request in enumerate(mine):
        alone = sample(sampler, logits[row : row + 1], make_rows(request), positions(4)[row : row + 1])
        assert torch.equal(alone.tokens, crowd.tokens[row : row + 1])
        torch.testing.assert_close(alone.logprobs, crowd.logprobs[row : row + 1], rtol=0, atol=2e-6)


def test_noise_of_a_window_is_that_of_its_steps(sampler: Sampler) -> None:
    rows = make_rows({"seed": 3}, {"seed": 2**62 + 1, "sample_index": 4}, {"greedy": True})
    window = sampler.noise(rows, positions(3), 5)
    assert len(window) == 5
    for step, noise in enumerate(window):
        alone = REFERENCE.gumbel_noise(rows.seed, positions(3) + step, rows.sample_index, VOCAB)
        assert noise is not None and torch.equal(noise, alone)
    assert sampler.noise(make_rows({"greedy": True}), positions(1), 2) == [None, None]


def test_greedy_and_random_rows_mix(sampler: Sampler) -> None:
    logits = torch.randn(64, VOCAB)
    rows = make_rows(*({"greedy": i % 2 == 0, "seed": i} for i in range(64)))
    hits = sample(sampler, logits, rows, positions(64)).tokens.eq(logits.argmax(-1))
    assert hits[::2].all() and hits[1::2].sum() < 8


def test_greedy_takes_the_most_likely_of_what_is_left(sampler: Sampler) -> None:
    logits = torch.randn(2, VOCAB)
    best = logits.topk(2).indices
    sampler.start_penalties(0, [], [best[0, 0].item()])
    rows = make_rows(
        {"greedy": True, "presence": 50.0, "slot": 0},
        {"greedy": True, "stops": (best[1, 0].item(),), "first_stop": 100, "top_k": 1},
    )
    assert torch.equal(sample(sampler, logits, rows, positions(2)).tokens, best[:, 1])


# -- some rows at a time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_logprobs", [0, 3])
def test_rows_are_sampled_a_few_at_a_time(top_logprobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a device says so: with the bits of all at once, and each token counted once."""
    asked = [
        {"temperature": 0.7, "top_p": 0.8, "repetition": 1.4, "slot": 0},
        {"greedy": True, "frequency": 0.5, "slot": 3},
        {"bias": {3: 4.0, 9: -9.0}, "mode": RAW, "min_p": 0.02},
        {"stops": (1, 2, 3), "first_stop": 43, "top_k": 9, "mode": PROCESSED, "slot": 5},
        {"presence": 0.9, "repetition": 0.8, "seed": 5, "slot": 1},
        {"top_k": 200, "top_p": 0.99, "sample_index": 2},
        {"seed": 8},
    ]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    logits, at = torch.randn(len(asked), VOCAB) * 2, positions(len(asked))
    logits[3, 1] = 30.0  # which may come by now
    rows = make_rows(*asked, top_logprobs=top_logprobs)
    found = []
    for numbers in (1 << 18, 1):
        monkeypatch.setattr(cpu_sampling, "_CACHED", numbers)
        sampler = Sampler(CPU, CpuRuntime(torch.device("cpu")), SLOTS, VOCAB)
        for slot, output in ((0, [4]), (3, [5, 5]), (5, []), (1, [7, 8])):
            sampler.start_penalties(slot, [1, 2], output)
        found.append([sample(sampler, logits, rows, at) for _ in range(3)])
        assert sampler.penalties is not None
        found[-1].append(sampler.penalties.seen)
    assert cpu_sampling.rows_together(VOCAB) == 2
    for whole, parts in zip(*found, strict=True):
        columns = [(whole, parts)] if isinstance(whole, Tensor) else zip(whole.columns, parts.columns, strict=True)
        assert all(torch.equal(a, b) for a, b in columns)
