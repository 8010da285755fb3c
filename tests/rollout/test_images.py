"""Prompts with images: what the engine makes of them is what Hugging Face makes of them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import vision
from image_engines import (
    BLOCK,
    EXACT,
    GREEDY,
    LAYOUTS,
    MORE,
    SOME,
    TEXT,
    check,
    engine_of,
    mixed,
    model_of,
    tokens,
)
from live_setup import at_rest
from vision import (
    BREAK,
    IMAGE,
    KINDS,
    VIDEO,
    Prompt,
    extended,
    greedy,
    logprobs,
    make_model,
    make_prompt,
    make_video_prompt,
    token_ids,
)

from stoker.engine.images import reader as image_reader
from stoker.engine.images.encoder import encode
from stoker.rollout import (
    RolloutBatch,
    SamplingParams,
    UnsupportedModelError,
)

# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_images_change_what_is_said(kind: str) -> None:
    """What all other tests rest on: the oracle sees the images, and where in the prompt they are."""
    model, layout = model_of(kind), LAYOUTS[0]
    prompt, other = make_prompt(kind, layout), make_prompt(kind, layout, seed=1)
    assert token_ids(prompt) == token_ids(other) and IMAGE in token_ids(prompt)
    said = greedy(model, prompt, 10)
    assert IMAGE not in said and said != greedy(model, other, 10)
    assert (logprobs(model, prompt, said) - logprobs(model, other, said)).abs().max() > 100 * EXACT["atol"]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_and_logprobs(kind: str) -> None:
    model, prompts = model_of(kind), mixed(kind)
    with engine_of(model) as engine:
        batch = engine.generate_batch(prompts, GREEDY)
        check(model, prompts, batch, greedy=10)
        at_rest(engine)


@pytest.mark.parametrize("kind", MORE)
def test_sampled_groups(kind: str) -> None:
    model, prompts = model_of(kind), mixed(kind)
    params = SamplingParams(n=4, temperature=0.7, max_tokens=8, seed=3, min_tokens=4)
    with engine_of(model, max_num_seqs=16) as engine:
        batch = engine.generate_batch(prompts, params)
        check(model, prompts, batch, 0.7)
        assert all(len({tuple(c.token_ids) for c in output.completions}) > 1 for output in batch)
        shared = engine.stats().shared_prompt_tokens
        if engine.stats().recurrent_state_bytes:  # states are shared at whole blocks
            assert shared > 2 * sum(len(token_ids(prompt)) for prompt in prompts)
        else:
            assert shared == 3 * sum(len(token_ids(prompt)) - 1 for prompt in prompts)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_smaller_than_an_image(kind: str) -> None:
    model, prompts = model_of(kind), mixed(kind)
    with engine_of(model) as whole, engine_of(make_model(kind), max_num_batched_tokens=5, max_num_seqs=4) as chunked:
        batch = chunked.generate_batch(prompts, GREEDY)
        check(model, prompts, batch)
        assert tokens(batch) == tokens(whole.generate_batch(prompts, GREEDY))


@pytest.mark.parametrize("kind", SOME)
def test_preempted(kind: str) -> None:
    model = model_of(kind)
    prompts = [make_prompt(kind, LAYOUTS[0], seed) for seed in range(4)] + [TEXT]
    with engine_of(model) as engine:
        block = engine.stats().kv_block_bytes
        states = engine.stats().recurrent_state_bytes
        few = 12 if engine.core.scheduler.tables.windowed else 20
    params = SamplingParams(temperature=0, max_tokens=24)
    memory = states + few * block
    with engine_of(model, kv_cache_memory=memory, max_num_batched_tokens=16, max_model_len=64) as engine:
        batch = engine.generate_batch(prompts, params)
        assert engine.stats().num_preemptions > 0
        check(model, prompts, batch, greedy=24)
        at_rest(engine)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_an_image_of_one_token_among_larger_ones(kind: str) -> None:
    """Its rotary positions are those of text."""
    model = model_of(kind)
    prompts = [make_prompt(kind, (5, size, 6)) for size in ((1, 1), (2, 3), (1, 1))]
    with engine_of(model) as engine:
        batch = engine.generate_batch(prompts, GREEDY)
        check(model, prompts, batch, greedy=10)


def test_placeholders_of_other_kinds_are_what_they_are_without_neighbours() -> None:
    """Gemma 4 takes each for padding, whether a step has images or not."""
    model = model_of("gemma4")
    text, image = [7, VIDEO, 9, BREAK, 81, IMAGE, 16, 5], make_prompt("gemma4", LAYOUTS[0])
    with engine_of(model, enable_prefix_caching=False) as engine:
        for prompts in ([text], [text, image], [image, text]):
            check(model, prompts, engine.generate_batch(prompts, GREEDY))


@pytest.mark.parametrize("kind", SOME)
def test_a_request_does_not_depend_on_its_neighbours(kind: str) -> None:
    model, prompts = model_of(kind), mixed(kind)
    params = [SamplingParams(temperature=1.0, max_tokens=8, seed=seed) for seed in range(len(prompts))]
    with engine_of(model, enable_prefix_caching=False) as engine:
        together = engine.generate_batch(prompts, params)
        alone = [engine.generate_batch([p], [s])[0] for p, s in zip(prompts, params, strict=True)]
        assert tokens(together) == tokens(RolloutBatch(alone))


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_videos(kind: str) -> None:
    model = model_of(kind)
    prompts = [make_video_prompt(kind, frames, (2, 3), seed) for frames, seed in ((3, 0), (3, 1), (1, 0))]
    prompts.append(make_prompt(kind, LAYOUTS[0]))
    params = SamplingParams(temperature=0, max_tokens=10, suppress_token_ids=[IMAGE, VIDEO])
    with engine_of(model, max_num_batched_tokens=16) as engine:
        for _ in range(2):
            batch = engine.generate_batch(prompts, params)
            check(model, prompts, batch)
        assert len({tuple(found) for found in tokens(batch)}) == len(prompts)
        assert batch[1].cached_tokens > 0
        for score, output in zip(engine.score(batch), batch, strict=True):
            torch.testing.assert_close(score.logprobs, torch.tensor(output.completions[0].logprobs), **EXACT)


def test_forms_of_one_prompt() -> None:
    """What processors return: ids with or without a dimension for the batch, with a mask or without, of any mapping."""
    from transformers import BatchFeature

    model, prompt = model_of("qwen2_5_vl"), make_prompt("qwen2_5_vl", LAYOUTS[0])
    flat = {name: value for name, value in prompt.items() if name != "attention_mask"}
    flat["input_ids"] = prompt["input_ids"][0]
    with engine_of(model) as engine:
        expected = tokens(engine.generate_batch([prompt], GREEDY))
        for form in (flat, BatchFeature(prompt), flat | {"input_ids": token_ids(prompt)}):
            assert tokens(engine.generate_batch([form], GREEDY)) == expected
            assert tokens(RolloutBatch([engine.submit(form, GREEDY).result()])) == expected


def test_outputs_are_copied_compared_and_sent() -> None:
    kind = "qwen2_5_vl"
    with engine_of(model_of(kind), enable_prefix_caching=False) as engine:
        batch, again = (engine.generate_batch([make_prompt(kind, LAYOUTS[0])], GREEDY) for _ in range(2))
        assert batch == again and "pixel_values" not in repr(batch)
        for copied in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
            assert copied == batch
            found, expected = (engine.score(b)[0].logprobs for b in (copied, batch))
            torch.testing.assert_close(found, expected, **EXACT)


def test_tensors_to_train_on() -> None:
    kind = "qwen3_vl"
    prompts = mixed(kind)
    with engine_of(model_of(kind)) as engine:
        batch = engine.generate_batch(prompts, SamplingParams(n=2, max_tokens=6, seed=1))
        t = batch.to_tensors(pad_token_id=0)
        found = [ids[mask.bool()].tolist() for ids, mask in zip(t.prompt_ids, t.prompt_mask, strict=True)]
        assert found == [token_ids(prompt) for prompt in prompts for _ in range(2)]


# -- scoring -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MORE)
def test_what_was_sampled_scores_as_it_was_sampled(kind: str) -> None:
    model, prompts = model_of(kind), mixed(kind)
    params = SamplingParams(n=2, max_tokens=6, seed=5, prompt_logprobs=2)
    with engine_of(model, max_num_batched_tokens=16, score_chunk_tokens=5) as engine:
        batch = engine.generate_batch(prompts, params)
        scores = engine.score(batch, entropy=True)
        for score, completion in zip(scores, [c for o in batch for c in o.completions], strict=True):
            assert score.error is None and score.token_ids.tolist() == completion.token_ids
            torch.testing.assert_close(score.logprobs, torch.tensor(completion.logprobs), **EXACT)
        for prompt, output in zip(prompts, batch, strict=True):
            of_prompt = vision.logprobs_within(model, prompt)
            torch.testing.assert_close(output.prompt_logprobs.logprobs.double(), of_prompt, **EXACT)
        at_rest(engine)


@pytest.mark.parametrize("kind", SOME)
def test_given_sequences(kind: str) -> None:
    model, prompts = model_of(kind), mixed(kind)
    completion = [8, 9, 60, 8, 3]
    whole = [extended(prompt, completion) for prompt in prompts]
    starts = [len(token_ids(prompt)) for prompt in prompts]
    with engine_of(model, max_num_batched_tokens=16, score_chunk_tokens=5) as engine:
        for _ in range(2):  # computed, then with what the cache has
            for prompt, score in zip(prompts, engine.score(whole, start=starts), strict=True):
                torch.testing.assert_close(score.logprobs.double(), logprobs(model, prompt, completion), **EXACT)
        assert engine.stats().prefix_cache_hit_tokens > 0


@pytest.mark.parametrize("kind", SOME)
def test_images_of_a_group_to_score_are_read_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = model_of(kind), [make_prompt(kind, LAYOUTS[0], seed) for seed in range(2)]
    completions = [[8, 9, 60, 8, 3], [7, 11], [3, 4, 5, 6, 7, 8, 9]]
    whole = [extended(prompt, completion) for prompt in prompts for completion in completions]
    read = []
    monkeypatch.setattr(image_reader, "encode", lambda *given: (read.extend(given[1]), encode(*given))[1])
    with engine_of(model, max_num_batched_tokens=16) as engine:
        scores = iter(engine.score(whole, start=len(token_ids(prompts[0]))))
        assert len(read) == len(prompts)
    for prompt in prompts:
        for completion in completions:
            expected = logprobs(model, prompt, completion)
            torch.testing.assert_close(next(scores).logprobs.double(), expected, **EXACT)


@pytest.mark.parametrize("kind", SOME)
def test_a_sampled_placeholder_is_a_token_like_any_other(kind: str) -> None:
    """It stands for no image: after the prompt there are none."""
    model, prompt = model_of(kind), make_prompt(kind, LAYOUTS[0])
    params = SamplingParams(n=8, temperature=50.0, max_tokens=40, seed=2)
    with engine_of(model) as engine:
        batch = engine.generate_batch([prompt], params)
        completions = [c for c in batch[0].completions if IMAGE in c.token_ids[:-1]]
        assert completions
        scores = engine.score(batch, temperature=50.0)
        for completion in completions:
            expected = vision.logprobs_by_cache(model, prompt, completion.token_ids, 50.0)
            torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, **EXACT)
            torch.testing.assert_close(scores[completion.index].logprobs.double(), expected, **EXACT)


# -- what is shared ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MORE)
def test_the_same_text_with_another_image_is_another_prompt(kind: str) -> None:
    model, layout = model_of(kind), (9, (2, 3), 8)
    prompts = [make_prompt(kind, layout, seed) for seed in (0, 1, 0)]
    assert len({tuple(token_ids(prompt)) for prompt in prompts}) == 1
    with engine_of(model) as engine:
        for together in (True, False):
            engine.update_weights()
            if together:
                batch = engine.generate_batch(prompts, GREEDY)
            else:
                batch = RolloutBatch([engine.generate_batch([prompt], GREEDY)[0] for prompt in prompts])
                again, length = batch[2].cached_tokens, len(token_ids(prompts[2]))
                assert again >= (length - 1) // BLOCK * BLOCK, "an equal image in other memory is the same image"
            check(model, prompts, batch, greedy=10)
            assert batch[1].cached_tokens <= 9, "keys and values of another image"


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava"])
def test_the_text_before_images_is_shared(kind: str) -> None:
    model, layout = model_of(kind), (9, (2, 3), 8)
    prompts = [make_prompt(kind, layout, seed) for seed in range(2)]
    with engine_of(model) as engine:
        first, second = (engine.generate_batch([prompt], GREEDY)[0] for prompt in prompts)
        assert (first.cached_tokens, second.cached_tokens) == (0, 8)
        check(model, prompts, RolloutBatch([first, second]))


def test_an_image_under_other_text_of_one_call() -> None:
    """Of a kind whose processor does not say which tokens stand for it: all that it made is the same."""
    model = model_of("llava")
    prompts = [make_prompt("llava", (before, (2, 3), 8)) for before in (9, 4, 9)]
    with engine_of(model) as engine:
        check(model, prompts, engine.generate_batch(prompts, GREEDY), greedy=10)


@pytest.mark.parametrize("kind", SOME)
def test_a_next_turn_begins_with_what_the_last_one_computed(kind: str) -> None:
    """The prompt, its completion and an answer; the images are those of the first turn, or one more."""
    model, layout = model_of(kind), LAYOUTS[0]
    prompt = make_prompt(kind, layout)
    with engine_of(model) as engine:
        first = engine.generate_batch([prompt], GREEDY)
        said = tokens(first)[0]
        turn = extended(prompt, [*said, 40, 41, 42])
        second = engine.generate_batch([turn], GREEDY)
        check(model, [turn], second, greedy=10)
        assert second[0].cached_tokens >= (len(token_ids(prompt)) - 1) // BLOCK * BLOCK
        more = make_prompt(kind, (*layout, (2, 2), 5))
        third = engine.generate_batch([more], GREEDY)
        check(model, [more], third)


@pytest.mark.parametrize("kind", [*SOME, "llava", "gemma3", "gemma4"])
def test_turns_with_images_of_their_own_begin_with_what_the_last_one_computed(kind: str) -> None:
    """As an agent's that is shown the screen at every step; and what another image follows is shared as far as that."""
    model = model_of(kind)
    params = SamplingParams(temperature=0, max_tokens=6, suppress_token_ids=range(vision.TEXT.stop, vision.VOCAB))
    first = make_prompt(kind, (5, (2, 3), 4))
    with engine_of(model, max_num_batched_tokens=128, max_model_len=224) as engine:
        turn, had = first, 0
        for seed in range(4):
            batch = engine.generate_batch([turn, turn], params)
            check(model, [turn, turn], batch)
            assert batch[0].cached_tokens >= had
            had = (len(token_ids(turn)) - 1) // BLOCK * BLOCK
            turn = joined(extended(turn, tokens(batch)[0]), make_prompt(kind, (5, (2, 3), 4), seed + 1))
        others = [joined(first, make_prompt(kind, (5, (2, 3), 4), seed)) for seed in (8, 9)]
        scores = engine.score([extended(other, [7]) for other in others], start=[len(token_ids(o)) for o in others])
        for other, score in zip(others, scores, strict=True):
            torch.testing.assert_close(score.logprobs.double(), logprobs(model, other, [7]), **EXACT)
        batch = engine.generate_batch(others, params)
        check(model, others, batch)
        assert all(had >= (len(token_ids(first)) - 1) // BLOCK * BLOCK for had in (o.cached_tokens for o in batch))


def joined(first: Prompt, second: Prompt) -> Prompt:
    """One prompt after another, as a processor makes it of images of one size."""
    return {
        name: torch.cat([tensor, second[name]], dim=int(tensor.shape == first["input_ids"].shape))
        for name, tensor in first.items()
    }


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"])
def test_the_shape_of_an_image_is_a_part_of_it(kind: str) -> None:
    """The same ids, the same numbers, in a grid that lies the other way."""
    model = model_of(kind)
    upright = make_prompt(kind, (5, (3, 2), 6))
    lying = upright | {"image_grid_thw": upright["image_grid_thw"][:, [0, 2, 1]]}
    with engine_of(model) as engine:
        for prompt in (upright, lying):
            batch = engine.generate_batch([prompt], GREEDY)
            check(model, [prompt], batch, greedy=10)
        batch = engine.generate_batch([upright, lying], GREEDY)
        check(model, [upright, lying], batch)


@pytest.mark.parametrize("kind", SOME)
def test_equal_neighbours_are_computed_once(kind: str) -> None:
    """As TRL asks: each prompt as often as there are generations, some processed more than once."""
    model = model_of(kind)
    prompts = [make_prompt(kind, LAYOUTS[0], seed) for seed in (0, 0, 0, 1, 1, 1)]
    params = [SamplingParams(max_tokens=6, seed=seed) for seed in range(6)]
    with engine_of(model) as engine:
        seen: list[int] = []
        features = type(model.model).get_image_features
        hook = model.model.register_forward_pre_hook(lambda *_: seen.append(1))
        try:
            batch = engine.generate_batch(prompts, params)
        finally:
            hook.remove()
        check(model, prompts, batch)
        assert features and len(seen) <= 2, "images of a group are looked at once"
        stats, length = engine.stats(), len(token_ids(prompts[0]))
        had = stats.shared_prompt_tokens + stats.prefix_cache_hit_tokens
        assert had >= 4 * ((length - 1) // BLOCK * BLOCK)


# -- what is refused -----------------------------------------------------------------------------------------------------


def test_a_model_that_reads_whole_prompts_both_ways() -> None:
    with pytest.raises(UnsupportedModelError, match="^PaliGemma.*use model.generate for it"):
        engine_of(make_model("paligemma"))
