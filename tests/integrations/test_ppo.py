"""The parts of a PPO loop against recursions written out by hand, and the loop itself."""

from __future__ import annotations

import math
import re
import runpy
import sys

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from trl_setup import PROMPTS, make_model, make_tokenizer

from stoker.integrations.ppo import gae, kl_penalty, masked_mean, token_rewards, whiten
from stoker.rollout import EngineConfig, InvalidRequestError, RolloutEngine, SamplingParams

# Rows that end early, that have holes (a tool's answer), one token, and none at all.
MASK = torch.tensor(
    [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 0, 1, 1, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
)


def random_values(seed: int) -> torch.Tensor:
    """Values [5, 6] that are NaN and infinite where the mask is 0: nothing may come of those."""
    values = torch.randn(MASK.shape, generator=torch.Generator().manual_seed(seed))
    values[MASK == 0] = torch.tensor([math.nan, math.inf] * 8 + [math.nan])
    return values


def own(row: torch.Tensor, mask: torch.Tensor) -> list[float]:
    return [float(x) for x, keep in zip(row, mask, strict=True) if keep]


def check_rows(result: torch.Tensor, expected: list[list[float]]) -> None:
    """Row by row on the tokens the mask keeps; 0 on the others."""
    assert result.dtype is torch.float32 and result.shape == MASK.shape
    for row, mask, values in zip(result, MASK, expected, strict=True):
        assert own(row, mask) == pytest.approx(values, abs=1e-5)
    assert (result[MASK == 0] == 0).all()


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.9, 0.0), (0.9, 1.0)])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_gae_is_the_sum_of_its_definition(gamma: float, lam: float, dtype: torch.dtype) -> None:
    rewards, values = random_values(1), random_values(2)
    expected, returns = [], []
    for row in range(len(MASK)):
        r, v = own(rewards[row], MASK[row]), own(values[row], MASK[row])
        deltas = [r[t] + gamma * (v[t + 1] if t + 1 < len(r) else 0.0) - v[t] for t in range(len(r))]
        sums = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(r))) for t in range(len(r))]
        expected.append(sums)
        returns.append([a + b for a, b in zip(sums, v, strict=True)])
    advantages, actual_returns = gae(rewards, values, MASK.to(dtype), gamma=gamma, lam=lam)
    check_rows(advantages, expected)
    check_rows(actual_returns, returns)


def test_estimates_are_targets_of_no_gradient() -> None:
    values = random_values(2).requires_grad_()
    assert not any(each.requires_grad for each in gae(random_values(1), values, MASK))


def test_with_lambda_1_returns_are_the_discounted_rewards() -> None:
    rewards, values = random_values(1), random_values(2)
    _, returns = gae(rewards, values, MASK, gamma=0.9, lam=1.0)
    expected = []
    for row in range(len(MASK)):
        r = own(rewards[row], MASK[row])
        expected.append([sum(0.9 ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))])
    check_rows(returns, expected)


def test_kl_penalties_at_each_token() -> None:
    policy, reference = random_values(3), random_values(4)
    rows = range(len(MASK))
    pairs = [list(zip(own(policy[i], MASK[i]), own(reference[i], MASK[i]), strict=True)) for i in rows]
    check_rows(kl_penalty(policy, reference, MASK), [[p - q for p, q in row] for row in pairs])
    k3 = [[math.exp(q - p) - 1 - (q - p) for p, q in row] for row in pairs]
    check_rows(kl_penalty(policy, reference, MASK, kind="k3"), k3)
    halves = policy.bfloat16(), reference.bfloat16()  # whose difference is not rounded to as few digits
    assert torch.equal(kl_penalty(*halves, MASK), kl_penalty(halves[0].float(), halves[1].float(), MASK))
    with pytest.raises(InvalidRequestError, match="'k1' or 'k3'"):
        kl_penalty(policy, reference, MASK, kind="k4")  # type: ignore[arg-type]


def test_both_estimators_have_the_kl_for_their_mean() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = float((p * (p / q).log()).sum())
    for kind in ("k1", "k3"):
        estimates = kl_penalty(p.log()[None], q.log()[None], torch.ones(1, 3), kind=kind)  # type: ignore[arg-type]
        assert float((p * estimates[0]).sum()) == pytest.approx(exact, abs=1e-6)


def test_a_score_is_the_reward_of_the_last_token() -> None:
    kl, scores = random_values(5), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    expected = []
    for row in range(len(MASK)):
        rewards = [-0.1 * x for x in own(kl[row], MASK[row])]
        if rewards:
            rewards[-1] += float(scores[row])
        expected.append(rewards)
    for given in (scores, scores.tolist(), scores.double()):  # a reward function returns a list
        check_rows(token_rewards(given, kl, MASK, kl_coefficient=0.1), expected)
        elsewhere = token_rewards(given, kl.to("meta"), MASK.to("meta"), kl_coefficient=0.1)
        assert elsewhere.device.type == "meta"


def test_whitening_is_over_the_tokens_of_the_batch() -> None:
    values = random_values(6)
    kept = values[MASK.bool()]
    expected = (kept - kept.mean()) / kept.std(correction=0)
    assert masked_mean(values, MASK) == pytest.approx(float(kept.mean()))
    torch.testing.assert_close(whiten(values, MASK)[MASK.bool()], expected)
    torch.testing.assert_close(whiten(values, MASK, shift_mean=False)[MASK.bool()], expected + kept.mean())
    assert (whiten(values, MASK)[MASK == 0] == 0).all()
    assert masked_mean(values, torch.zeros_like(MASK)) == 0


def test_gradients_through_whitening_are_of_the_tokens_alone() -> None:
    values = torch.randn(MASK.shape)
    gradients = []
    for outside in (0.0, torch.nan):
        given = torch.where(MASK.bool(), values, outside).requires_grad_()
        (whiten(given, MASK) ** 3).sum().backward()
        gradients.append(given.grad)
    assert gradients[0] is not None and gradients[0].any()
    torch.testing.assert_close(*gradients)


def test_the_mean_of_a_loss_has_a_gradient() -> None:
    values = torch.randn(MASK.shape, requires_grad=True)
    masked_mean(values**2, MASK).backward()
    torch.testing.assert_close(values.grad, 2 * values.detach() * MASK / MASK.sum())


def test_a_batch_without_a_token_gives_nothing() -> None:
    """Completions that were aborted before their first one, as ``to_tensors`` gives them."""
    nothing = torch.zeros(2, 0)
    penalty = kl_penalty(nothing, nothing, nothing)
    rewards = token_rewards(torch.ones(2), penalty, nothing, kl_coefficient=0.1)
    for tensor in (penalty, rewards, *gae(rewards, nothing, nothing), whiten(rewards, nothing)):
        assert tensor.shape == (2, 0)
    assert masked_mean(rewards, nothing) == 0


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    values = torch.zeros(2, 3)
    with pytest.raises(InvalidRequestError, match=r"\(2, 4\), \(2, 3\), \(2, 3\)"):
        gae(values, values, torch.ones(2, 4))
    with pytest.raises(InvalidRequestError, match=r"\[B, C\]"):
        masked_mean(torch.zeros(3), torch.ones(3))
    with pytest.raises(InvalidRequestError, match=r"scores has shape \(3,\).*\[2\]"):
        token_rewards(torch.zeros(3), values, torch.ones(2, 3), kl_coefficient=0.1)


# -- the loop ----------------------------------------------------------------------------------------------------------


def run_example(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["ppo", *arguments])
    runpy.run_module("stoker.examples.ppo", run_name="__main__")


def test_a_student_learns_its_teachers_distribution() -> None:
    """On-policy distillation, as the documentation has it: minus the reverse KL of each token is its advantage."""
    torch.manual_seed(1)
    student, teacher = make_model(), make_model(tie_word_embeddings=True)
    config, reads = EngineConfig(kv_cache_memory="4MiB"), make_tokenizer()
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    divergences = []
    with (
        RolloutEngine(student, config=config, tokenizer=reads) as engine,
        RolloutEngine(teacher, config=config, tokenizer=reads) as teachers,
    ):
        for _ in range(20):
            batch = engine.generate_batch(PROMPTS, SamplingParams(n=8, max_tokens=8))
            t = batch.to_tensors(reads.pad_token_id)
            told = pad_sequence([s.logprobs for s in teachers.score(batch)], batch_first=True)
            advantages = -kl_penalty(t.logprobs, told, t.completion_mask)
            divergences.append(-masked_mean(advantages, t.completion_mask).item())
            ids, seen = torch.cat([t.prompt_ids, t.completion_ids], 1), torch.cat([t.prompt_mask, t.completion_mask], 1)
            positions = (seen.cumsum(1) - 1).clamp(min=0)
            logits = student(ids, attention_mask=seen, position_ids=positions).logits[:, t.prompt_ids.shape[1] - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(-1, t.completion_ids[..., None])[..., 0]
            ratio = (logprobs - t.logprobs).exp()
            (-masked_mean(ratio * advantages, t.completion_mask)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert sum(divergences[-5:]) < 0.5 * sum(divergences[:5]), divergences


def test_the_example_learns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--steps", "30", "--prompt-length", "1", "--completion-length", "2", "--learning-rate", "3e-3"]
    run_example(monkeypatch, *small)
    printed = capsys.readouterr().out
    found = re.search(r"reward before: (\S+)\nreward after:  (\S+)\n", printed)
    assert found and float(found[2]) > float(found[1]) + 0.3, printed


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--steps", "0", "has to be at least 1"),
        ("--learning-rate", "nan", "has to be a finite"),
        ("--clip", "-1", "has to be a finite"),
    ],
)
def test_the_example_refuses_bad_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, value: str, message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run_example(monkeypatch, flag, value)
    assert exit_.value.code == 2 and f"{flag} {message}" in capsys.readouterr().err
