"""Groups, turns, aborts and scores on models some of whose layers keep a state, each against the plain forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import oracle
import pytest
import scored
import torch
from hybrids import CONFIG, PARAMS, PROMPTS, assert_like_plain, draw, make_model
from small_engine import EOS, TEXT_VOCAB, encode, tokenizer
from transformers import PreTrainedModel

from stoker.rollout import EngineConfig, InvalidConfigError, RolloutEngine, RolloutOutput, SamplingParams

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

FAMILIES = ["qwen3_5", "lfm2", "lfm3", "granitemoehybrid", "kimi_linear", "jamba", "mamba2"]
BLOCK = CONFIG.block_size
NARROW = replace(CONFIG, max_num_seqs=3, decode_window=3)


def border(length: int) -> int:
    """Up to where a prompt's state is kept."""
    return (length - 1) // BLOCK * BLOCK


def ids(output: RolloutOutput) -> list[list[int]]:
    return [c.token_ids for c in output.completions]


def test_states_alone_may_take_all_the_memory_there_is() -> None:
    """Where no layer attends, tokens take none."""
    model = make_model("mamba")
    with RolloutEngine(model, config=CONFIG) as engine:
        states = engine.stats().recurrent_state_bytes
    with pytest.raises(InvalidConfigError, match=f"the states of max_num_seqs=8 sequences take {states}"):
        RolloutEngine(model, config=replace(CONFIG, kv_cache_memory=states - 1))
    with RolloutEngine(model, config=replace(CONFIG, kv_cache_memory=states)) as engine:
        assert_like_plain(engine.generate_batch(PROMPTS, PARAMS), model)
        assert engine.stats().kv_cache_bytes == states
    config = replace(CONFIG, max_num_seqs=64, max_model_len=10**6)  # of whose blocks the host holds a list
    with RolloutEngine(make_model("mamba", max_position_embeddings=10**6), config=config) as engine:
        assert engine.stats().num_kv_blocks < 2**20


# -- groups ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_samples_of_a_prompt_compute_it_once(family: str, narrow: bool) -> None:
    """Up to its last full block; prompts end below, at and above the end of one, and the shortest have none."""
    model = make_model(family)
    # Of seed 3 there is a token whose log-probability moves by 7e-5 where weights are rounded to fp32 otherwise.
    params = SamplingParams(n=8, seed=5, max_tokens=7)
    with RolloutEngine(model, config=NARROW if narrow else CONFIG) as engine:
        for length in (1, 15, 16, 17):
            prompt, before = draw(length, length), engine.stats()
            batch = engine.generate_batch([prompt], params)
            assert_like_plain(batch, model, params)
            assert len({tuple(t) for t in ids(batch[0])}) == 8
            stats = engine.stats()
            assert stats.prompt_tokens - before.prompt_tokens == 8 * length
            shared = stats.shared_prompt_tokens - before.shared_prompt_tokens
            assert shared + stats.prefix_cache_hit_tokens - before.prefix_cache_hit_tokens == 7 * border(length)
            assert stats.finished_requests - before.finished_requests == 8
            assert stats.num_free_kv_blocks == stats.num_kv_blocks
            engine.core.scheduler.check()
            alone = engine.generate_batch([prompt], replace(params, n=3))
            assert ids(alone[0]) == ids(batch[0])[:3] and alone[0].cached_tokens == border(length)


@pytest.mark.parametrize("caching", [False, True])
def test_groups_side_by_side_with_too_little_memory(caching: bool) -> None:
    """What is preempted begins anew, from a state that was kept or from none."""
    model, params = make_model("qwen3_5"), SamplingParams(n=4, seed=5, max_tokens=20)
    config = replace(CONFIG, enable_prefix_caching=caching)
    with RolloutEngine(model, config=config) as engine:
        expected = engine.generate_batch(PROMPTS, params)
        stats = engine.stats()
    assert_like_plain(expected, model, params)
    memory = 22 * stats.kv_block_bytes + stats.recurrent_state_bytes
    with RolloutEngine(model, config=replace(config, kv_cache_memory=memory)) as engine:
        batch = engine.generate_batch(PROMPTS, params)
        assert [ids(o) for o in batch] == [ids(o) for o in expected]
        assert_like_plain(batch, model, params)
        assert engine.stats().num_preemptions > 0
        engine.core.scheduler.check()


def test_a_group_whose_first_samples_are_aborted() -> None:
    """While they compute the prompt, while the others wait for it, and while they sample."""
    model, prompt = make_model("qwen3_5"), draw(8, 41)
    params = SamplingParams(n=8, seed=3, max_tokens=9)
    with RolloutEngine(model, config=NARROW) as engine:
        expected = ids(engine.generate_batch([prompt], params)[0])
        for steps in range(0, 9, 2):
            engine.update_weights()  # nothing that was kept of the prompt serves it again
            first, second = (engine.submit(prompt, params) for _ in range(2))
            for _ in range(steps):
                engine.wait([second], share=0)
            first.abort()
            batch = engine.generate_batch([prompt, prompt[:30]], params)
            assert ids(second.result()) == ids(batch[0]) == expected
            assert_like_plain(batch, model, params)
            for mine, other in zip(ids(first.result()), expected, strict=True):
                assert mine == other[: len(mine)]
            engine.core.scheduler.check()
            assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks


def test_handles_stream_what_they_end_with() -> None:
    model, params = make_model("lfm2"), SamplingParams(n=2, seed=6, max_tokens=10)
    with RolloutEngine(model, config=replace(CONFIG, decode_window=2)) as engine:
        handles = [engine.submit(p, params) for p in PROMPTS]
        streamed: list[list[list[int]]] = [[[], []] for _ in PROMPTS]
        for found, handle in zip(streamed, handles, strict=True):
            for chunk in handle:
                found[chunk.index] += chunk.token_ids
        outputs = [h.result() for h in handles]
        assert streamed == [ids(o) for o in outputs]
        for output in outputs:
            for c in output.completions:
                expected = oracle.logprobs(model, output.prompt_token_ids, c.token_ids)
                torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_that_go_on_where_another_has_ended(family: str) -> None:
    """A state is kept at the end of each prompt, so a turn computes again what the one before has sampled, and no more."""
    model, params = make_model(family), SamplingParams(temperature=0, max_tokens=6)
    prompt, before = draw(1, 14), 0
    with RolloutEngine(model, config=CONFIG) as engine:
        for turn in range(4):
            output = engine.submit(prompt, params).result()
            (c,) = output.completions
            assert c.token_ids == oracle.greedy(model, prompt, 6, c.token_ids)
            assert output.cached_tokens == before
            before, prompt = border(len(prompt)), prompt + c.token_ids + draw(turn, 5)
        branched = prompt[:20] + draw(7, 9)  # shares blocks with the others, and a state with the first turn alone
        output = engine.submit(branched, params).result()
        assert output.cached_tokens == border(14)
        assert ids(output) == [oracle.greedy(model, branched, 6)]


@pytest.mark.parametrize("family", FAMILIES)
def test_long_prompts_in_pieces_of_many_tokens(family: str) -> None:
    """Which go through layers with a state by chunks, and these end anywhere."""
    model, params = make_model(family), SamplingParams(n=2, seed=5, max_tokens=6)
    config = replace(CONFIG, max_model_len=256, max_num_batched_tokens=150, block_size=16)
    with RolloutEngine(model, config=config) as engine:
        for _ in range(2):
            batch = engine.generate_batch([draw(n, n) for n in (200, 65, 64, 129)], params)
            assert_like_plain(batch, model, params)
        assert [o.cached_tokens for o in batch] == [192, 64, 48, 128]


# -- how tokens are chosen, and where they end ----------------------------------------------------------------------------


@torch.no_grad()
def generated(model: PreTrainedModel, prompt: list[int], **options: Any) -> list[int]:
    out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, **options)
    return out[0, len(prompt) :].tolist()


def test_penalties_and_ends_are_those_of_generate() -> None:
    model = make_model("qwen3_5")
    prompt = draw(4, 18)
    penalised = generated(model, prompt, max_new_tokens=20, repetition_penalty=1.7)
    assert penalised != generated(model, prompt, max_new_tokens=20)
    with RolloutEngine(model, config=CONFIG) as engine:
        greedy = SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.7)
        assert ids(engine.generate_batch([prompt], greedy)[0]) == [penalised]
        end = penalised[9]
        (c,) = engine.generate_batch([prompt], replace(greedy, stop_token_ids=(end,)))[0].completions
        assert c.token_ids == penalised[: penalised.index(end) + 1] and c.finish_reason == "stop"
    model.generation_config.eos_token_id = end
    with RolloutEngine(model, config=CONFIG) as engine:
        assert ids(engine.generate_batch([prompt], greedy)[0]) == [penalised[: penalised.index(end) + 1]]


def test_stop_strings() -> None:
    model = make_model("lfm2", vocab_size=TEXT_VOCAB, eos_token_id=EOS)
    prompt = encode("some words to begin with")
    config = replace(CONFIG, max_model_len=64)
    with RolloutEngine(model, config=config, tokenizer=tokenizer()) as engine:
        params = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
        (whole,) = engine.generate_batch([prompt], params)[0].completions
        found = tokenizer().decode(whole.token_ids[5:6])
        for _ in range(2):  # the second time from the prompt's state
            (c,) = engine.generate_batch([prompt], replace(params, stop=(found,)))[0].completions
            at = whole.text.index(found) if whole.text else -1
            assert c.finish_reason == "stop" and c.stop_reason == found and c.text == (whole.text or "")[:at]
            assert c.token_ids == whole.token_ids[: len(c.token_ids)]
            again = engine.generate_batch([prompt, prompt[:9]], params)
            assert ids(again[0]) == [whole.token_ids]


# -- scores ---------------------------------------------------------------------------------------------------------------


SMALL_CHUNKS = replace(CONFIG, score_chunk_tokens=5, max_num_batched_tokens=11)


@pytest.mark.parametrize("config", [CONFIG, SMALL_CHUNKS, replace(SMALL_CHUNKS, enable_prefix_caching=False)])
@pytest.mark.parametrize("family", FAMILIES)
def test_scoring_what_was_sampled_gives_what_was_sampled(family: str, config: EngineConfig) -> None:
    model, params = make_model(family), SamplingParams(n=3, seed=2, max_tokens=9)
    with RolloutEngine(model, config=config) as engine:
        batch = engine.generate_batch(PROMPTS, params)
        assert_like_plain(batch, model, params)
        found = [x for o in batch for c in o.completions for x in c.logprobs]
        for _ in range(2):
            scores = engine.score(batch)
            torch.testing.assert_close(torch.cat([s.logprobs for s in scores]), torch.tensor(found), rtol=0, atol=1e-4)
        engine.core.scheduler.check()


@pytest.mark.parametrize("config", [CONFIG, SMALL_CHUNKS])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_groups_are_the_plain_forwards(family: str, config: EngineConfig) -> None:
    model = make_model(family)
    shared = draw(1, 21)
    sequences = [shared + draw(seed, 6 + seed) for seed in (2, 3, 4)] + [draw(5, 12), shared[:13], shared[:16]]
    starts = [21, 21, 21, 1, 5, 12]
    with RolloutEngine(model, config=config) as engine:
        for options in ({"start": starts}, {"start": 1}, {"start": starts}):
            scores = engine.score(sequences, temperature=0.8, top_k=3, entropy=True, **options)
            first = starts if options["start"] is starts else [1] * len(sequences)
            for score, sequence, at in zip(scores, sequences, first, strict=True):
                scored.check(score, model, sequence, at, temperature=0.8, top_k=3)
        engine.core.scheduler.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_logprobs_beside_samples(family: str) -> None:
    model = make_model(family)
    params = SamplingParams(n=2, seed=2, max_tokens=5, prompt_logprobs=2)
    with RolloutEngine(model, config=SMALL_CHUNKS) as engine:
        for _ in range(2):
            batch = engine.generate_batch(PROMPTS, params)
            assert_like_plain(batch, model, params)
            for output in batch:
                assert output.prompt_logprobs is not None
                scored.check(output.prompt_logprobs, model, output.prompt_token_ids, 1, top_k=2)


@pytest.mark.parametrize("max_tokens", [1, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_logprobs_again_go_on_from_the_state_that_is_kept(family: str, max_tokens: int) -> None:
    """Of prompts that end below, at and above the end of a block."""
    model = make_model(family)
    params = SamplingParams(seed=2, max_tokens=max_tokens, prompt_logprobs=2)
    prompts = [draw(length, length) for length in range(BLOCK, 2 * BLOCK + 2)]
    with RolloutEngine(model, config=CONFIG) as engine:
        found = [engine.generate_batch([prompt], params)[0] for prompt in prompts for _ in range(2)]
        for first, again in zip(found[::2], found[1::2], strict=True):
            assert again.cached_tokens == border(len(again.prompt_token_ids)) and ids(again) == ids(first)
            for output in (first, again):
                assert output.prompt_logprobs is not None
                scored.check(output.prompt_logprobs, model, output.prompt_token_ids, 1, top_k=2)
        engine.core.scheduler.check()


def test_scores_never_come_of_old_states() -> None:
    model = make_model("qwen3_5")
    sequence = draw(3, 27)
    change: list[Callable[[], None]] = [
        lambda: model.model.layers[0].linear_attn.A_log.data.add_(0.5),
        lambda: model.model.layers[2].linear_attn.conv1d.weight.data.mul_(0.5),
    ]
    with RolloutEngine(model, config=CONFIG) as engine:
        for told in (True, False):
            for alter in change:
                for _ in range(2):
                    (score,) = engine.score([sequence], start=9)
                    scored.check(score, model, sequence, 9)
                alter()
                if told:
                    engine.update_weights()
