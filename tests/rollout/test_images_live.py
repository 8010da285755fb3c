"""Prompts with images while weights and adapters change, requests wait, memory sleeps; and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import sharded_images
import torch
from image_engines import EXACT, GREEDY, LAYOUTS, SETTINGS, SOME, TEXT, check, engine_of, mixed, model_of, nudge, tokens
from live_setup import at_rest
from numpy.typing import NDArray
from vision import IMAGE, KINDS, Prompt, logprobs, make_model, make_prompt, token_ids

from stoker.engine.images import reader
from stoker.engine.images.inputs import ImageFeatures, image_rows
from stoker.engine.packed_inputs import arrays_in, place, tensors_in
from stoker.rollout import (
    EngineConfig,
    InvalidRequestError,
    RolloutBatch,
    RolloutEngine,
    SamplingParams,
    StokerError,
    UnsupportedModelError,
)

# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("where", ["text", "images"])
@pytest.mark.parametrize("kind", SOME)
def test_new_weights(kind: str, where: str, told: bool) -> None:
    model, prompts = make_model(kind), mixed(kind)
    with engine_of(model) as engine:
        before = engine.generate_batch(prompts, GREEDY)
        nudge(model, where)
        if told:
            engine.update_weights()
        batch = engine.generate_batch(prompts, GREEDY)
        check(model, prompts, batch, greedy=10)
        assert tokens(batch) != tokens(before)
        assert all(set(o.completions[0].weight_versions) == {engine.weight_version} for o in batch)
        for score, output in zip(engine.score(batch), batch, strict=True):
            torch.testing.assert_close(score.logprobs, torch.tensor(output.completions[0].logprobs), **EXACT)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("where", ["text", "images"])
@pytest.mark.parametrize("kind", SOME)
def test_new_weights_on_the_way(kind: str, where: str, recompute: bool) -> None:
    model, prompts = make_model(kind), mixed(kind)
    params = SamplingParams(temperature=0.7, max_tokens=24, seed=4)
    with engine_of(model, decode_window=2) as engine:
        handles = [engine.submit(prompt, params) for prompt in prompts]
        for handle in handles:
            next(iter(handle))
        engine.pause()
        nudge(model, where)
        engine.update_weights()
        engine.resume(recompute=recompute)
        fresh = engine.submit(prompts[0], params)
        for prompt, handle in zip(prompts, handles, strict=True):
            (completion,) = handle.result().completions
            seam = completion.weight_versions.index(1)
            assert 0 < seam < 24
            now = logprobs(model, prompt, completion.token_ids, 0.7)[seam:]
            worst = (torch.tensor(completion.logprobs[seam:]).double() - now).abs().max()
            if recompute:
                assert worst < EXACT["atol"], "embeddings of the old weights"
            elif where == "text":
                assert worst > EXACT["atol"], "the check can tell"
        check(model, [prompts[0]], RolloutBatch([fresh.result()]), 0.7)
        at_rest(engine)


@pytest.mark.parametrize("kind", SOME)
def test_weights_given_by_name(kind: str, tmp_path: Path) -> None:
    """Into an engine of a folder, the vision tower's among them."""
    model, prompts = make_model(kind), mixed(kind)
    model.save_pretrained(tmp_path)
    with RolloutEngine.from_pretrained(tmp_path, config=EngineConfig(**SETTINGS)) as engine:
        check(model, prompts, engine.generate_batch(prompts, GREEDY))
        nudge(model, "images")
        engine.update_weights(model.state_dict())
        check(model, prompts, engine.generate_batch(prompts, GREEDY))


@pytest.mark.parametrize("kind", SOME)
def test_in_another_dtype(kind: str) -> None:
    """The trainer's weights in fp64, the engine's in fp32."""
    model, prompts = make_model(kind).double(), mixed(kind)
    with engine_of(model, dtype="float32") as engine:
        for _ in range(2):
            check(model, prompts, engine.generate_batch(prompts, GREEDY))
            nudge(model, "images")
            nudge(model, "text")
            engine.update_weights()


@pytest.mark.parametrize(("how", "kind"), [("fsdp2", "qwen2_5_vl"), ("fsdp1", "llava"), ("ddp", "qwen3_vl")])
def test_sharded(how: str, kind: str) -> None:
    ranks.run(sharded_images.follow, 2, how, kind)


@pytest.mark.parametrize(("how", "kind"), [("fsdp2", "qwen3_vl"), ("ddp", "qwen2_vl")])
def test_ranks_that_run_one_model(how: str, kind: str) -> None:
    ranks.run(sharded_images.follow, 2, how, kind, True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_left_as_it_was(kind: str) -> None:
    """In training mode, with the same attributes and hooks, and trainable."""
    model, prompts = make_model(kind).train(), mixed(kind)
    inputs = {name: value for name, value in prompts[0].items() if name != "attention_mask"}

    def state() -> list[Any]:
        return [
            (
                name,
                type(m),
                m.training,
                {k: v for k, v in vars(m).items() if not k.startswith("_")},
                len(m._forward_hooks),
            )
            for name, m in model.named_modules()
        ]

    model(**inputs)  # some models keep what they found out of the last prompt
    before, grad = repr(state()), torch.is_grad_enabled()
    with engine_of(model) as engine:
        batch = engine.generate_batch([prompts[2], TEXT], GREEDY)
        assert torch.is_grad_enabled() == grad and repr(state()) == before
        check(model.eval(), [prompts[2], TEXT], batch)
        model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
        grads = [name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
        assert any("vision" in name or "visual" in name for name in grads)
        assert repr(state()) == before


def test_sleeping_in_between() -> None:
    kind = "qwen2_5_vl"
    model, prompts = make_model(kind), mixed(kind)
    with engine_of(model, enable_prefix_caching=True) as engine:
        for level in (1, 2):
            check(model, prompts, engine.generate_batch(prompts, GREEDY))
            with engine.sleeping(level):
                assert not engine.core.images._kept
                nudge(model, "images")
            engine.update_weights()
        check(model, prompts, engine.generate_batch(prompts, GREEDY))


@pytest.mark.parametrize("targets", ["text", "all"])
@pytest.mark.parametrize("kind", SOME)
def test_adapters(kind: str, targets: str) -> None:
    """The embeddings of images are of the adapter too, where it reaches the vision tower."""
    peft = pytest.importorskip("peft")
    from adapted import running, shake

    modules = r".*language_model.*\.(q_proj|v_proj|o_proj|down_proj)" if targets == "text" else "all-linear"
    model = peft.get_peft_model(make_model(kind), peft.LoraConfig(r=4, target_modules=modules)).eval()
    shake(model)
    prompt = make_prompt(kind, LAYOUTS[0])
    with engine_of(model) as engine:
        for seed in (2, 3):
            batch = engine.generate_batch([prompt] * 3, GREEDY, adapter=["default", None, "default"])
            for output, adapter in zip(batch, ["default", None, "default"], strict=True):
                with running(model, adapter):
                    check(model, [prompt], RolloutBatch([output]))
            assert tokens(batch)[0] != tokens(batch)[1]
            shake(model, seed)


@pytest.mark.parametrize("kind", ["gemma4", "qwen2_5_vl"])
def test_images_are_read_between_the_steps_of_other_threads(kind: str) -> None:
    """Which go through the same modules, some as they are, some in fused layers."""
    model = model_of(kind)
    prompts = [make_prompt(kind, LAYOUTS[0], seed) for seed in range(24)]
    with engine_of(model, enable_prefix_caching=False) as engine, ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda prompt: engine.submit(prompt, GREEDY).result(timeout=60), prompts)
        check(model, prompts, RolloutBatch(list(found)))
        with pytest.raises(InvalidRequestError, match="prompt 0"):
            handle = engine.submit(TEXT, GREEDY)
            engine.submit(prompts[0] | {"pixel_values": prompts[0]["pixel_values"][:, :-1]}, GREEDY)
        check(model, [TEXT], RolloutBatch([handle.result()]))  # what is refused ends nobody else's
        at_rest(engine)


# -- chats -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_chats(kind: str) -> None:
    """Of an engine that was given the model's processor: as what the processor makes of them."""
    pytest.importorskip("PIL")
    from processors import make_model, make_processor, picture

    model, processor = make_model(kind), make_processor(kind)
    image, text = {"type": "image", "image": picture(0, 16, 24)}, {"type": "text", "text": "abc"}
    other = {"type": "image", "image": picture(1, 24, 8)}
    chats = [[{"role": "user", "content": content}] for content in ([image, text], [text, image, text, other], [text])]
    inputs = [
        processor.apply_chat_template(
            [chat], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        for chat in chats
    ]
    params = SamplingParams(n=2, max_tokens=8, seed=1, suppress_token_ids=[model.config.image_token_id])
    with RolloutEngine(model, tokenizer=processor, config=EngineConfig(**SETTINGS)) as engine:
        batch = engine.generate_batch([*chats, "abc"], params)
        check(model, [*map(dict, inputs), processor.tokenizer("abc")["input_ids"]], batch)
        assert all(isinstance(c.text, str) for output in batch for c in output.completions)
        assert tokens(RolloutBatch([engine.submit(chats[1], params).result()])) == tokens(batch[1:2])
    with RolloutEngine(model, tokenizer=processor.tokenizer, config=EngineConfig(**SETTINGS)) as engine:
        with pytest.raises(InvalidRequestError, match="^prompt 0 is a chat with images, which a tokenizer cannot read"):
            engine.generate_batch(chats, params)
        at_rest(engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_step_takes_of_images_is_sent_with_one_copy(dtype: torch.dtype) -> None:
    """As ``Runtime.upload`` of a CUDA device packs it, from pinned memory."""
    copies = []

    def upload(*arrays: NDArray[Any]) -> list[torch.Tensor]:
        specs = [(array.dtype.type, array.shape) for array in arrays]
        block = np.zeros(place(specs)[1], dtype=np.uint8)
        for packed, array in zip(arrays_in(block, specs), arrays, strict=True):
            packed[:] = array
        copies.append(block.nbytes)
        return tensors_in(torch.from_numpy(block), specs)

    def features(*places: int) -> ImageFeatures:
        made = [torch.randn(len(places), 7).to(dtype) for _ in range(3)]
        return ImageFeatures(np.array(places), made[0], tuple(made[1:]), None, 0)

    first, second, beyond = features(1, 2, 3, 9), features(0, 4, 5), features(20)
    # Tokens 2 to 5 of the first, none of the images of the next, all of the last.
    rows = image_rows([(0, 2, 4, first), (4, 0, 6, beyond), (10, 0, 6, second)], upload)
    assert rows is not None and len(copies) == 1
    assert rows.at.tolist() == [0, 1, 10, 14, 15] and len(rows.deep) == 2
    pairs = zip((first.embeddings, *first.deep), (second.embeddings, *second.deep), strict=True)
    for found, (one, other) in zip((rows.embeddings, *rows.deep), pairs, strict=True):
        assert torch.equal(found, torch.cat([one[1:3], other]))
    assert image_rows([(0, 0, 6, beyond)], upload) is None and len(copies) == 1


# -- what is kept --------------------------------------------------------------------------------------------------------


def test_images_are_held_no_longer_than_their_requests() -> None:
    kind = "qwen2_5_vl"
    prompt = make_prompt(kind, LAYOUTS[0])
    pixels = weakref.ref(prompt["pixel_values"])
    with engine_of(model_of(kind)) as engine:
        batch = engine.generate_batch([prompt], GREEDY)
        engine.submit(prompt, GREEDY).result()
        del prompt, batch
        gc.collect()
        assert pixels() is None
        at_rest(engine)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("short of memory"), KeyboardInterrupt()], ids=repr)
def test_where_an_image_cannot_be_read_other_requests_go_on(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise error

    model, prompt = model_of("qwen2_5_vl"), make_prompt("qwen2_5_vl", LAYOUTS[0])
    with engine_of(model, decode_window=1) as engine:
        handle = engine.submit(TEXT, GREEDY)
        next(iter(handle))
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(reader, "encode", failing)
            engine.submit(prompt, GREEDY)
        check(model, [TEXT], RolloutBatch([handle.result()]), greedy=10)
        check(model, [prompt], engine.generate_batch([prompt], GREEDY), greedy=10)
        at_rest(engine)


def test_an_aborted_request() -> None:
    kind = "qwen3_vl"
    model, prompt = model_of(kind), make_prompt(kind, LAYOUTS[0])
    with engine_of(model) as engine:
        running, waiting = (engine.submit(prompt, SamplingParams(max_tokens=60, seed=seed)) for seed in (1, 2))
        next(iter(running))
        waiting.abort()
        running.abort()
        at_rest(engine)
        check(model, [prompt], engine.generate_batch([prompt], GREEDY))


# -- what is refused -----------------------------------------------------------------------------------------------------

Change = Callable[[Prompt], dict[str, Any]]


@pytest.fixture(scope="module")
def shared() -> Iterator[RolloutEngine]:
    with engine_of(model_of("qwen2_5_vl"), max_model_len=64) as engine:
        yield engine


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda p: {n: v[:, :-9] if v.shape == p["input_ids"].shape else v for n, v in p.items()}, "prompt 1"),
        (lambda p: p | {"input_ids": p["input_ids"][:, :-9]}, "prompt 1.*attention_mask"),
        (lambda p: p | {"pixel_values": p["pixel_values"][:-4]}, "prompt 1"),
        (lambda p: {n: v for n, v in p.items() if "pixel" not in n and "grid" not in n}, "prompt 1 has tokens of"),
        (lambda p: {n: v for n, v in p.items() if "grid" not in n}, "prompt 1"),
        (lambda p: {n: torch.cat([v, v]) for n, v in p.items()}, "prompt 1.*(one|batch)"),
        (lambda p: {n: v for n, v in p.items() if n != "input_ids"}, "prompt 1 is a dict"),
        (lambda p: p | {"input_ids": p["input_ids"].float()}, "prompt 1"),
        (lambda p: p | {"input_ids": p["input_ids"] + 1000}, "prompt 1.*position 0"),
        (lambda p: p | {"input_ids": p["input_ids"][:, :0]}, "prompt 1"),
        (lambda p: p | {"pixel_values": "an image"}, "prompt 1.*pixel_values"),
        (lambda p: p | {"pixel_values": p["pixel_values"] / 0}, "prompt 1 has pixel_values that holds NaN or Inf"),
        (lambda p: p | {"attention_mask": p["attention_mask"] * 0}, "prompt 1 is empty"),
        (lambda p: make_prompt("qwen2_5_vl", (5, (4, 4), 60)), "prompt 1 has 83 tokens and max_model_len is 64"),
    ],
    ids=[
        "fewer placeholders", "fewer ids", "fewer pixels", "no image", "no grid", "two", "no ids", "float ids", "vocabulary", "empty",
        "no tensor", "not finite", "masked", "long",
    ],
)  # fmt: skip
def test_bad_prompts_are_refused(shared: RolloutEngine, change: Change, match: str) -> None:
    good = make_prompt("qwen2_5_vl", LAYOUTS[1])
    bad = change(make_prompt("qwen2_5_vl", LAYOUTS[0]))
    before = shared.stats()
    with pytest.raises(InvalidRequestError, match=match):
        shared.generate_batch([good, bad], GREEDY)
    with pytest.raises(InvalidRequestError, match=match.replace("1", "0", 1)):
        shared.submit(bad, GREEDY)
    with pytest.raises(InvalidRequestError, match="sequence 0"):
        shared.score([bad])
    assert shared.stats() == before, "a refused call has done some work"
    check(model_of("qwen2_5_vl"), [good], shared.generate_batch([good], GREEDY))
    shared.update_weights()
    at_rest(shared)


def test_an_input_that_nobody_reads(shared: RolloutEngine) -> None:
    prompt = make_prompt("qwen2_5_vl", LAYOUTS[0])
    with pytest.raises(StokerError, match="prompt 0.*pixels"):
        shared.generate_batch([prompt | {"pixels": prompt["pixel_values"]}], GREEDY)


def test_pixels_for_a_model_of_text() -> None:
    from small_engine import llama

    prompt = make_prompt("llava", LAYOUTS[1])
    with RolloutEngine(llama(), config=EngineConfig(**SETTINGS)) as engine:
        with pytest.raises(StokerError, match=r"prompt 0.*(image|pixel_values)") as caught:
            engine.generate_batch([prompt], GREEDY)
        assert isinstance(caught.value, (UnsupportedModelError, InvalidRequestError))
        at_rest(engine)


def test_a_mapping_of_text_alone() -> None:
    """What a tokenizer or processor returns for a prompt without images."""
    kind = "qwen2_5_vl"
    model, prompt = model_of(kind), make_prompt(kind, (5, 6))
    assert IMAGE not in token_ids(prompt)
    with engine_of(model) as engine:
        batch = engine.generate_batch([prompt, make_prompt(kind, LAYOUTS[0])], GREEDY)
        check(model, [prompt, make_prompt(kind, LAYOUTS[0])], batch)
