"""Images are read together where a model's forward takes several prompts, and once as long as the weights stay."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from image_engines import EXACT, GREEDY, LAYOUTS, SOME, TEXT, check, engine_of, model_of, nudge, tokens
from live_setup import at_rest
from vision import IMAGE, KINDS, Prompt, extended, logprobs, make_model, make_prompt, token_ids

from stoker.engine.images import reader as image_reader
from stoker.engine.images.adapters import ImageAdapter
from stoker.engine.images.batches import batches, joined
from stoker.engine.images.encoder import encode
from stoker.engine.images.inputs import ImageFeatures, ImageInputs
from stoker.kernels.ops import REFERENCE
from stoker.rollout import InvalidRequestError, RolloutBatch, SamplingParams, binding
from stoker.rollout.prompts import read_prompts


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts each run of a model read."""
    found: list[int] = []

    def counted(shell: Any, batch: Sequence[ImageInputs], *rest: Any) -> list[ImageFeatures]:
        found.append(len(batch))
        return encode(shell, batch, *rest)

    monkeypatch.setattr(image_reader, "encode", counted)
    return found


def images_of(prompts: Sequence[Prompt]) -> list[ImageInputs]:
    return [images for _, images in read_prompts(prompts, None, None) if images is not None]


# -- together ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "gemma3"])
def test_prompts_that_are_read_together_are_read_as_they_are_alone(kind: str) -> None:
    """Of several lengths, with images of several shapes, one or two."""
    layouts = [*LAYOUTS, LAYOUTS[0], LAYOUTS[2]]
    images = images_of([make_prompt(kind, layout, seed) for seed, layout in enumerate(layouts)])
    with engine_of(make_model(kind)) as engine:
        shell, together = engine.core.runner.model, list(batches(images, 512))
        assert max(map(len, together)) >= 2 and sum(map(len, together)) == len(images)
        for batch in together:
            for one, found in zip(batch, encode(shell, batch, ImageAdapter(), 512), strict=True):
                (alone,) = encode(shell, [one], ImageAdapter(), 512)
                assert found.places.tolist() == alone.places.tolist()
                assert found.rope_deltas_of(0, 99).tolist() == alone.rope_deltas_of(0, 99).tolist()
                assert (found.spans, found.local_spans) == (alone.spans, alone.local_spans)
                for a, b in zip((found.embeddings, *found.deep), (alone.embeddings, *alone.deep), strict=True):
                    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_batches_are_as_large_as_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    images = images_of([make_prompt("llava", LAYOUTS[1], seed) for seed in range(5)])
    length = len(images[0].tokens)

    def sizes(most: int) -> list[int]:
        return [len(batch) for batch in batches(images, most)]

    assert [sizes(5 * length), sizes(5 * length - 1), sizes(2 * length), sizes(0)] == [[5], [4, 1], [2, 2, 1], [1] * 5]
    monkeypatch.setattr("stoker.engine.images.batches._MOST_VALUES", 3 * images[0].inputs["pixel_values"].numel())
    assert sizes(1000) == [3, 2]


def test_shorter_prompts_are_padded_with_text() -> None:
    """A token of an image there would be one image too many."""
    together = images_of([make_prompt("llava", layout) for layout in LAYOUTS])
    rows = joined(together, 7)["input_ids"].tolist()
    longest = max(len(images.tokens) for images in together)
    assert rows == [images.tokens + [7] * (longest - len(images.tokens)) for images in together]


def test_a_call_s_images_are_read_together(read: list[int]) -> None:
    kind = "qwen3_vl"
    model, prompts = model_of(kind), [make_prompt(kind, layout) for layout in LAYOUTS]
    with engine_of(model) as engine:
        check(model, [TEXT, *prompts], engine.generate_batch([TEXT, *prompts], GREEDY))
        assert read == [4]


def test_bits_that_may_not_depend_on_neighbours_are_read_alone(
    read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "qwen2_5_vl"
    monkeypatch.setattr(binding, "ops_for", lambda *_, **__: REFERENCE)
    with engine_of(model_of(kind), deterministic=True) as engine:
        engine.generate_batch([make_prompt(kind, layout) for layout in LAYOUTS], GREEDY)
        assert read == [1] * 4


def test_one_that_is_refused_is_named(read: list[int]) -> None:
    kind = "qwen2_5_vl"
    model, prompts = model_of(kind), [make_prompt(kind, layout) for layout in LAYOUTS]
    prompts[2] = prompts[2] | {"pixel_values": prompts[2]["pixel_values"][:-4]}
    with engine_of(model) as engine:
        with pytest.raises(InvalidRequestError, match="^prompt 2: "):
            engine.generate_batch(prompts, GREEDY)
        assert read[0] == 4
        del prompts[2]
        check(model, prompts, engine.generate_batch(prompts, GREEDY))
        at_rest(engine)


def test_prompts_for_which_memory_is_short_together_are_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(shell: Any, batch: Sequence[ImageInputs], *rest: Any) -> list[ImageFeatures]:
        if len(batch) > 1:
            raise torch.OutOfMemoryError("short")
        return encode(shell, batch, *rest)

    kind = "qwen2_5_vl"
    model, prompts = model_of(kind), [make_prompt(kind, layout) for layout in LAYOUTS]
    monkeypatch.setattr(image_reader, "encode", short)
    with engine_of(model) as engine:
        check(model, prompts, engine.generate_batch(prompts, GREEDY))


# -- once --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SOME)
def test_scores_and_next_turns_find_images_read(kind: str, read: list[int]) -> None:
    model, prompt = model_of(kind), make_prompt(kind, LAYOUTS[0])
    with engine_of(model) as engine:
        batch = engine.generate_batch([prompt], GREEDY)
        (score,) = engine.score(batch)
        turn = extended(prompt, [*tokens(batch)[0], 40, 41, 42])
        check(model, [turn], engine.generate_batch([turn], GREEDY))
        assert read == [1]
        expected = logprobs(model, prompt, tokens(batch)[0])
        torch.testing.assert_close(score.logprobs.double(), expected, **EXACT)


def next_turn(prompt: Prompt, said: list[int], more: Prompt) -> Prompt:
    """What was said to a prompt, and what a next one adds to it."""
    length = prompt["input_ids"].shape

    def joined(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "input_ids":
            tensor = torch.cat([tensor, torch.tensor([said])], 1)
        elif tensor.shape == length:
            tensor = torch.nn.functional.pad(tensor, (0, len(said)), value=int(name == "attention_mask"))
        return torch.cat([tensor, more[name]], int(prompt[name].shape == length))

    return {name: joined(name, tensor) for name, tensor in prompt.items()}


LATER = [
    kind for kind in [*KINDS, "gemma3"] if kind not in ("idefics3", "smolvlm")
]  # all images of these are in one row


@pytest.mark.parametrize("kind", LATER)
def test_a_next_turn_with_more_images_has_these_alone_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two conversations that differ in their images; what is said is as if all had been read."""
    model, read = model_of(kind), []
    monkeypatch.setattr(image_reader, "encode", lambda shell, batch, *rest: (
        read.append([len(images.tokens) for images in batch]), encode(shell, batch, *rest))[1])  # fmt: skip
    turns = [make_prompt(kind, (5, (2, 3), 4, (1, 2), 6), seed) for seed in range(2)]
    with engine_of(model, max_model_len=192) as engine:
        said = tokens(engine.generate_batch(turns, GREEDY))
        for seed in (7, 8):
            more = make_prompt(kind, (3, (2, 3), 5), seed)
            read_before = [len(ids) - ids[::-1].index(IMAGE) for ids in map(token_ids, turns)]
            turns = [next_turn(turn, words, more) for turn, words in zip(turns, said, strict=True)]
            batch = engine.generate_batch(turns, SamplingParams(temperature=0, max_tokens=4))
            check(model, turns, batch)
            said = tokens(batch)
            assert read[-1] == [len(token_ids(turn)) - end for turn, end in zip(turns, read_before, strict=True)]
        assert len(read) == 3
        for images in images_of(turns):
            (whole,) = encode(engine.core.runner.model, [images], ImageAdapter(), 512)
            found = engine.core.images._kept[images.digest, None].features
            assert found is not None
            assert (found.spans, found.shift) == (whole.spans, whole.shift)
            assert found.places.tolist() == whole.places.tolist()
            assert found.rope_deltas_of(0, 128).tolist() == whole.rope_deltas_of(0, 128).tolist()
            for a, b in zip((found.embeddings, *found.deep), (whole.embeddings, *whole.deep), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("why", ["refused alone", "another image", "another text", "new weights", "bits"])
def test_a_next_turn_that_has_to_be_read_whole(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(shell: Any, batch: Sequence[ImageInputs], *rest: Any) -> list[ImageFeatures]:
        read.extend(len(images.tokens) for images in batch)
        if why == "refused alone" and len(read) == 2:
            raise InvalidRequestError("text has to come first")
        return encode(shell, batch, *rest)

    kind = "qwen2_5_vl"
    model, prompt = make_model(kind), make_prompt(kind, LAYOUTS[0])
    monkeypatch.setattr(image_reader, "encode", counted)
    with engine_of(model) as engine:
        engine.core.images._alone = why == "bits"
        engine.generate_batch([prompt], GREEDY)
        first = make_prompt(kind, LAYOUTS[0], seed=int(why == "another image"))
        if why == "another text":
            first["input_ids"][0, 0] += 1
        if why == "new weights":
            nudge(model, "images")
        turn = next_turn(first, [40, 41], make_prompt(kind, (3, (2, 2), 5)))
        check(model, [turn], engine.generate_batch([turn], GREEDY))
        assert read[-1] == len(token_ids(turn))


def test_other_text_before_images_has_them_read_again(read: list[int]) -> None:
    """Embeddings would be the same; which tokens they are of, and which see each other, would not."""
    kind = "qwen2_5_vl"
    model, prompt = model_of(kind), make_prompt(kind, LAYOUTS[0])
    other = prompt | {"input_ids": prompt["input_ids"].clone()}
    other["input_ids"][0, 1] += 1
    with engine_of(model) as engine:
        for given in (prompt, other):
            check(model, [given], engine.generate_batch([given], GREEDY))
        assert read == [1, 1]
        check(model, [prompt, other], engine.generate_batch([prompt, other], GREEDY))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_outputs_have_their_own_inputs_where_one_reading_serves_several(kind: str, read: list[int]) -> None:
    """What has an entry a token is as long as its prompt, for a trainer's forward and for scores."""
    model, prompt = model_of(kind), make_prompt(kind, LAYOUTS[0])
    prompts = [prompt, extended(prompt, [40, 41]), extended(prompt, [40, 42, 7])]
    with engine_of(model) as engine:
        batch = engine.generate_batch(prompts, GREEDY)
        handle = engine.submit(prompts[2], GREEDY)
        for given, output in zip([*prompts, prompts[2]], [*batch, handle.result()], strict=True):
            assert output.prompt_inputs is not None
            for name, tensor in output.prompt_inputs.items():
                assert torch.equal(tensor, given[name]), name
        for given, output, score in zip(prompts, batch, engine.score(batch), strict=True):
            expected = logprobs(model, given, output.completions[0].token_ids)
            torch.testing.assert_close(score.logprobs.double(), expected, **EXACT)
        assert read == [1]


def test_a_placeholder_in_a_next_turn_is_refused_whether_images_were_read_or_not() -> None:
    kind = "qwen2_5_vl"
    prompt = make_prompt(kind, LAYOUTS[0])
    turn = extended(prompt, [7, IMAGE, 8])
    with engine_of(model_of(kind)) as engine:
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="^prompt 0: "):
                engine.generate_batch([turn], GREEDY)
            with pytest.raises(InvalidRequestError, match="^prompt 1: "):
                engine.generate_batch([prompt, turn], GREEDY)
            engine.generate_batch([prompt], GREEDY)


@pytest.mark.parametrize("told", [True, False])
def test_new_weights_have_images_read_again(told: bool, read: list[int]) -> None:
    kind = "qwen3_vl"
    model, prompt = make_model(kind), make_prompt(kind, LAYOUTS[0])
    with engine_of(model) as engine:
        for _ in range(3):
            check(model, [prompt], engine.generate_batch([prompt], GREEDY))
            nudge(model, "images")
            if told:
                engine.update_weights()
            batch = engine.generate_batch([prompt], GREEDY)
            check(model, [prompt], batch)
            nudge(model, "images")
            if told:
                engine.update_weights()
            expected = logprobs(model, prompt, tokens(batch)[0])
            torch.testing.assert_close(engine.score(batch)[0].logprobs.double(), expected, **EXACT)
        assert read == [1] * 7


@pytest.mark.parametrize("recompute", [True, False])
def test_weights_that_change_after_an_update_and_before_a_resume(recompute: bool) -> None:
    """Another thread's images were read in between, and nothing has run on the weights they were read under."""
    kind = "qwen2_5_vl"
    model, prompt = make_model(kind), make_prompt(kind, LAYOUTS[0])
    with engine_of(model) as engine, ThreadPoolExecutor(1) as pool:
        engine.pause()
        engine.update_weights()
        handle = pool.submit(engine.submit, prompt, GREEDY).result(timeout=60)
        nudge(model, "images")
        engine.resume(recompute=recompute)
        check(model, [prompt], RolloutBatch([handle.result()]))
        check(model, [prompt], engine.generate_batch([prompt], GREEDY))


def test_adapters_have_features_of_their_own(read: list[int]) -> None:
    peft = pytest.importorskip("peft")
    from adapted import running, shake

    kind = "qwen2_5_vl"
    model = peft.get_peft_model(make_model(kind), peft.LoraConfig(r=4, target_modules="all-linear")).eval()
    prompt = make_prompt(kind, LAYOUTS[0])
    with engine_of(model) as engine:
        for seed in range(2):
            shake(model, seed)
            for adapter in ("default", None) * 2:
                batch = engine.generate_batch([prompt], GREEDY, adapter=adapter)
                with running(model, adapter):
                    check(model, [prompt], batch)
            assert read == [1] * 2 * (seed + 1)
        other = peft.get_peft_model(make_model(kind), peft.LoraConfig(r=4, target_modules="all-linear")).eval()
        for seed in (5, 6):
            shake(other, seed)
            engine.load_adapter("other", (peft.get_peft_model_state_dict(other), other.peft_config["default"]))
            check(other, [prompt], engine.generate_batch([prompt], GREEDY, adapter="other"))
        assert read == [1] * 6


# -- what is kept --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["update_weights", "sleep", "close"])
def test_what_was_read_is_forgotten(how: str) -> None:
    prompt = make_prompt("qwen2_5_vl", LAYOUTS[0])
    engine = engine_of(model_of("qwen2_5_vl"))
    engine.generate_batch([prompt], GREEDY)
    (kept,) = engine.core.images._kept.values()
    assert kept.features is not None and all(t.is_meta for t in kept.inputs.values()), "requests hold pixels"
    embeddings = weakref.ref(kept.features.embeddings)
    del kept
    getattr(engine, how)()
    gc.collect()
    assert embeddings() is None
    engine.close()


def test_no_more_is_kept_than_may_be(read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of images used longest ago nothing."""
    kind = "qwen2_5_vl"
    prompts = [make_prompt(kind, (5, (2, 3), 4), seed) for seed in range(3)]
    monkeypatch.setattr(image_reader, "_MOST_BYTES", 2 * 6 * 48 * 4)  # of two images, each of six tokens
    with engine_of(model_of(kind)) as engine:
        for row, wanted in ((0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4), (0, 4), (2, 5)):
            engine.generate_batch([prompts[row]], SamplingParams(max_tokens=1))
            assert len(read) == wanted and engine.core.images._bytes <= image_reader._MOST_BYTES
        assert engine.core.images._bytes == 2 * 6 * 48 * 4 and len(engine.core.images._kept) == 2


def test_prompts_with_equal_images_and_other_text_take_the_place_of_one(read: list[int]) -> None:
    kind = "qwen2_5_vl"
    prompt = make_prompt(kind, (5, (2, 3), 4))
    other = prompt | {"input_ids": prompt["input_ids"].clone()}
    other["input_ids"][0, 1] += 1
    with engine_of(model_of(kind)) as engine:
        for given in (prompt, other, prompt):
            engine.generate_batch([given], SamplingParams(max_tokens=1))
        assert len(read) == 3 and engine.core.images._bytes == 6 * 48 * 4
    assert token_ids(prompt) != token_ids(other)
