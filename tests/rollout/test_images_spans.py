"""Images whose tokens see each other both ways, against transformers' own forward and generate.

A prompt is a list of token ids with None for an image.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from families import make_config, randomise
from family_fields import VOCAB, WINDOW
from machine import Machine, make_group, make_images, make_scheduler, make_spec
from pretend_device import STATIC, PretendDevice
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForImageTextToText, PreTrainedModel

from stoker.engine.images.encoder import _spans
from stoker.kernels.errors import InvalidRequestError
from stoker.kernels.ops import Ops
from stoker.kernels.triton_ops import TRITON
from stoker.rollout import EngineConfig, RolloutBatch, RolloutEngine, SamplingParams, binding
from stoker.rollout import engine as engine_module

IMAGE = 3  # the placeholder
# Tokens of an image: fewer than the window is wide, and more. In Gemma 4 they see each other in layers with a window alone.
SIZES = {"gemma3": 4, "gemma3-wide": 16, "gemma4": 4}
KINDS = list(SIZES)
Parts = list[int | None]


@cache
def model_of(kind: str) -> PreTrainedModel:
    if kind == "gemma4":
        own = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_bidirectional_attention": "vision"}
        config = make_config("gemma4+images", **own)
    else:
        config = make_config("gemma3+images")
        config.vision_config.patch_size, config.mm_tokens_per_image = int(28 / SIZES[kind] ** 0.5), SIZES[kind]
    config.image_token_id = IMAGE
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        randomise(model)
    model.generation_config.pad_token_id = 0
    return model


def types_of(kind: str) -> str:
    """What says which tokens are an image's."""
    return "mm_token_type_ids" if kind == "gemma4" else "token_type_ids"


def given(kind: str, parts: Parts, seed: int = 0) -> dict[str, torch.Tensor]:
    """What a processor makes of a prompt."""
    row = [token for part in parts for token in ([IMAGE] * SIZES[kind] if part is None else [part])]
    ids, count, generator = torch.tensor([row]), parts.count(None), torch.Generator().manual_seed(seed)
    if kind == "gemma4":  # 36 patches, nine of which are a token
        places = torch.cartesian_prod(torch.arange(6), torch.arange(6)).expand(count, -1, -1)
        images = {"pixel_values": torch.rand(count, 36, 588, generator=generator), "image_position_ids": places}
    else:
        images = {"pixel_values": torch.randn(count, 3, 28, 28, generator=generator)}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), types_of(kind): ids.eq(IMAGE).long(), **images}


@torch.no_grad()
def expected(kind: str, prompt: dict[str, torch.Tensor], completion: list[int]) -> torch.Tensor:
    """Log-probability of each token but the first, float64."""
    after = torch.tensor([completion], dtype=torch.long)
    inputs = dict(prompt)
    for name, value in (("input_ids", after), (types_of(kind), torch.zeros_like(after))):
        inputs[name] = torch.cat((inputs[name], value), 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    logprobs = model_of(kind)(**inputs).logits[0].double().log_softmax(-1)
    return logprobs[:-1].gather(1, inputs["input_ids"][0, 1:, None])[:, 0]


Known = dict[tuple[int, ...], torch.Tensor]


def check(kind: str, prompts: list[dict[str, torch.Tensor]], batch: RolloutBatch, known: Known | None = None) -> None:
    """known: what is expected of the same prompts, and is noted there, by a prompt's number and the tokens behind it."""
    known = {} if known is None else known
    for number, (prompt, output) in enumerate(zip(prompts, batch, strict=True)):
        assert output.error is None
        for completion in output.completions:
            key = (number, *completion.token_ids)
            if key not in known:
                known[key] = expected(kind, prompt, completion.token_ids)[-len(completion.token_ids) :]
            wanted = known[key]
            found = torch.tensor(completion.logprobs, dtype=torch.float64)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 6, "suppress_token_ids": [IMAGE]} | fields))


def engine_of(kind: str, **fields: Any) -> RolloutEngine:
    settings = {"kv_cache_memory": "4MiB", "max_model_len": 128, "block_size": 4}
    return RolloutEngine(model_of(kind), config=EngineConfig(**(settings | fields)))


TEXT = [(7 * i) % (VOCAB - 8) + 8 for i in range(40)]
PROMPTS: dict[str, Parts] = {
    "at the start": [None, 8, 9, 10],
    "in the middle": [5, 6, 7, None, 8, 9],
    "at the end": [5, 6, None],
    "two": [5, None, 6, 7, 8, None, 9],
    "side by side": [5, 6, 7, None, None, 8],
    "far beyond the window": [*TEXT[: WINDOW + 9], None, *TEXT[20:37]],
}


@pytest.mark.parametrize("kind", KINDS)
def test_as_generate_whole_and_in_pieces(kind: str) -> None:
    prompts = [given(kind, parts, seed) for seed, parts in enumerate(PROMPTS.values())]
    # As few as two images side by side need, and a little more.
    pieces: list[dict[str, Any]] = [{"max_num_batched_tokens": 2 * SIZES[kind] + more} for more in (0, 3)]
    greedy = {"do_sample": False, "max_new_tokens": 6, "suppress_tokens": [IMAGE]}
    wanted = [model_of(kind).generate(**prompt, **greedy)[0].tolist() for prompt in prompts]
    known: Known = {}
    for fields in ({}, *pieces, pieces[1] | {"max_num_seqs": 2, "enable_prefix_caching": False}):
        with engine_of(kind, **fields) as engine:
            batch = engine.generate_batch(prompts, params(temperature=0))
            check(kind, prompts, batch, known)
            assert [output.prompt_token_ids + output.completions[0].token_ids for output in batch] == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_right_behind_one_that_was_read_before(kind: str) -> None:
    """Its tokens and the first one's see each other, though the first one's features are known of a prompt without it."""
    two = given(kind, [5, None, None, 8, 9])
    one = given(kind, [5, None, 8, 9])
    one |= {name: two[name][:1] for name in ("pixel_values", "image_position_ids") if name in two}
    with engine_of(kind) as engine:
        for prompt in (one, two):
            check(kind, [prompt], engine.generate_batch([prompt], params(temperature=0)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_tells_both_ways_from_one(kind: str) -> None:
    """Else nothing here would show that tokens are seen which come later."""
    prompt = given(kind, PROMPTS["in the middle"])
    causal = prompt | {types_of(kind): torch.zeros_like(prompt[types_of(kind)])}
    difference = expected(kind, prompt, [8]) - expected(kind, causal, [8])
    assert difference[-1].abs() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("parts", "max_tokens"), [("in the middle", 9), ("at the end", 1), ("at the end", 9)])
def test_groups(parts: str, max_tokens: int, kind: str) -> None:
    """Samples of a prompt share what is computed of it, or compute the rest of what they cut; those of one token too."""
    prompts = [given(kind, PROMPTS[parts], 1), given(kind, PROMPTS[parts], 2)]
    known: Known = {}
    for fields in ({}, {"max_num_seqs": 2}, {"enable_prefix_caching": False}):
        with engine_of(kind, **fields) as engine:
            batch = engine.generate_batch(prompts, params(n=4, max_tokens=max_tokens, seed=1))
            check(kind, prompts, batch, known)


@pytest.mark.parametrize("kind", KINDS)
def test_hits_that_end_within_an_image(kind: str) -> None:
    prompts = [given(kind, [5, 6, None, *end]) for end in ([8, 9, 10], [8, 9, 10], [20, 21], [])]
    hits = []
    with engine_of(kind) as engine:
        for prompt in prompts:
            batch = engine.generate_batch([prompt], params())
            check(kind, [prompt], batch)
            hits.append(batch[0].cached_tokens)
    length = len(prompts[0]["input_ids"][0])
    whole, image = (length - 1) // 4 * 4, (2 + SIZES[kind]) // 4 * 4
    assert hits == [0, whole, image, image] and 2 < image < 2 + SIZES[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_are_preempted_compute_images_again(kind: str) -> None:
    prompts = [given(kind, PROMPTS["two"], seed) for seed in range(5)]
    length = len(prompts[0]["input_ids"][0])
    # Dimensions of all layers; keys and values, heads, bytes.
    token = sum([16, 16, 24, 24] if kind == "gemma4" else [16, 16, 16]) * 2 * 2 * 4
    with engine_of(kind, max_num_batched_tokens=length, kv_cache_memory=(2 * length + 20) * token) as engine:
        batch = engine.generate_batch(prompts, params(max_tokens=20))
        check(kind, prompts, batch)
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("kind", KINDS)
def test_scores(kind: str) -> None:
    """Of rollouts, of prompts themselves and with them, also where a prompt's last token sees the ones before it."""
    prompts = [given(kind, parts, seed) for seed, parts in enumerate(PROMPTS.values())]
    with engine_of(kind, max_num_batched_tokens=64) as engine:
        batch = engine.generate_batch(prompts, params(n=2, prompt_logprobs=0))
        check(kind, prompts, batch)
        scores = iter(engine.score(batch))
        for prompt, output in zip(prompts, batch, strict=True):
            assert output.prompt_logprobs is not None
            wanted = expected(kind, prompt, [])
            torch.testing.assert_close(output.prompt_logprobs.logprobs.double(), wanted, rtol=0, atol=1e-4)
            for completion in output.completions:
                wanted = expected(kind, prompt, completion.token_ids)[-len(completion.token_ids) :]
                torch.testing.assert_close(next(scores).logprobs.double(), wanted, rtol=0, atol=1e-4)
    for start in (1, 4):
        with engine_of(kind, max_num_batched_tokens=64) as engine:
            for prompt, score in zip(prompts * 2, engine.score(prompts * 2, start=start), strict=True):
                wanted = expected(kind, prompt, [])[start - 1 :]
                torch.testing.assert_close(score.logprobs.double(), wanted, rtol=0, atol=1e-4)


def test_new_weights_find_the_images_as_they_were() -> None:
    prompts = [given("gemma3", PROMPTS["two"])]
    model = model_of("gemma3")
    with engine_of("gemma3", max_num_batched_tokens=5) as engine:
        check("gemma3", prompts, engine.generate_batch(prompts, params()))
        with torch.no_grad():
            model.model.multi_modal_projector.mm_input_projection_weight.mul_(1.3)
        engine.update_weights()
        check("gemma3", prompts, engine.generate_batch(prompts, params()))


def test_more_tokens_that_see_each_other_than_a_step_computes_are_refused() -> None:
    with engine_of("gemma3", max_num_batched_tokens=7) as engine:
        prompts = [given("gemma3", PROMPTS[name]) for name in ("two", "side by side")]
        check("gemma3", prompts[:1], engine.generate_batch(prompts[:1], params()))
        with pytest.raises(InvalidRequestError, match="prompt 1: 8 tokens see each other.*max_num_batched_tokens"):
            engine.generate_batch(prompts, params())


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends to be a device")
@pytest.mark.parametrize("ops", [STATIC, TRITON], ids=["static", "triton"])
def test_on_a_device(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are launched ahead, decode steps replayed, and chunks with images among them go through the tile kernel."""
    monkeypatch.setattr(engine_module, "runtime_for", PretendDevice)
    monkeypatch.setattr(binding, "ops_for", lambda *_, **__: ops)
    prompts = [given("gemma3-wide", PROMPTS[name]) for name in ("at the end", "far beyond the window")]
    with engine_of("gemma3-wide", max_num_batched_tokens=24, decode_window=2) as engine:
        check("gemma3-wide", prompts, engine.generate_batch(prompts, params(n=2, max_tokens=4)))


def test_a_step_with_a_token_of_an_image_is_alone_in_its_window() -> None:
    """The one after it has none."""
    scheduler = make_scheduler(decode_window=4)
    machine, group = Machine(scheduler), make_group(0, [1, 2, 3, 4, 1], [make_spec(max_tokens=6)] * 2)
    for request in group:
        request.images = make_images(request.prompt, b"", ((3, 5),))
    scheduler.add(group)
    plans = []
    while (plan := scheduler.plan()) is not None:
        plans.append((plan.starts, plan.num_new, plan.num_steps))
        scheduler.commit(plan, machine.run(plan))
    # The second sample computes the prompt's last token, an image's, again.
    assert plans == [([0], [5], 1), ([5, 4], [1, 1], 1), ([6, 5], [1, 1], 4), ([9], [1], 1)]


def test_masks_that_say_anything_else_are_not_taken_for_spans() -> None:
    at, window = torch.arange(20), 5
    causal, near, newest = at <= at[:, None], at > at[:, None] - window, at.clone()
    newest[3:9], newest[9:11] = 8, 10
    both = at <= newest[:, None]
    hole, beyond = both.clone(), both.clone()
    hole[5, 7], beyond[5, 9] = False, True
    within = torch.zeros_like(both)
    within[3:9, 3:9] = True

    def found(full: torch.Tensor | None, sliding: torch.Tensor | None) -> Any:
        masks = {"full_attention": full, "sliding_attention": sliding}
        return _spans({kind: None if mask is None else mask[None, None] for kind, mask in masks.items()}, window)

    spans = ((3, 9), (9, 11))
    assert found(both, both & near) == _spans(both[None, None], window) == (spans, False)
    assert found(causal, both & near) == found(None, both & near) == (spans, True)
    added = torch.zeros(both.shape).masked_fill(~both, torch.finfo(torch.float32).min)[None, None]
    assert _spans(added, window) == (spans, False)
    assert found(causal, causal & near) == found(None, None) == _spans(None, window) == ((), False)
    others = [(causal, both), (both, causal & near), (both, None), (both, both), (causal & near, both & near)]
    others += [(hole, hole & near), (beyond, beyond & near), (both, both & near | within)]
    assert all(found(*masks) is None for masks in others)


class Made(TorchDispatchMode):
    """Bytes of the largest storage that operations make."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self._known, self.largest = {tensor.untyped_storage().data_ptr() for tensor in known}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self._known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_looking_at_masks_takes_memory_for_some_rows_of_them(dtype: torch.dtype) -> None:
    def mask(length: int) -> torch.Tensor:
        at = torch.arange(length)
        newest = at.clone()
        newest[length - 9 : length - 2] = length - 3
        both = at <= newest[:, None]
        return (both if dtype == torch.bool else torch.zeros(both.shape).masked_fill(~both, -1e9))[None, None]

    largest = []
    for length in (1000, 2000):
        given = mask(length)
        with Made(given) as made:
            assert _spans({"full_attention": given, "sliding_attention": given}, None) == (
                ((length - 9, length - 2),),
                False,
            )
        largest.append(made.largest)
    assert largest[1] == 2 * largest[0] > 0


def test_what_keys_depend_on_is_found_once_for_all_blocks() -> None:
    images = make_images([1, 2, 3, 4, 5, 6, 7], b"a", ((1, 3), (4, 6)))
    known = images.salts
    assert images.salts is known
    images.features = make_images(images.tokens, b"a", ((2, 3), (4, 5))).features
    assert images.salts != known and [first for first, _ in images.salts] == [2]


def test_keys_of_a_prefix_have_all_in_them_that_its_tokens_see() -> None:
    """The tokens up to the end of the last span, and not those after it."""
    first, other, longer = [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 9, 6, 7], [1, 2, 3, 4, 5, 6, 8, 9]
    salts = [make_images(prompt, b"", ((1, 3), (4, 6))).salts for prompt in (first, other, longer)]
    assert salts[0] == salts[2] != salts[1] and {first for ((first, _),) in salts} == {1}
