"""Every supported family against the plain Hugging Face forward, under everything the scheduler does to a request."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import oracle
import pytest
import torch
from families import draw, make_model
from family_fields import FAMILIES
from hybrid_fields import HYBRIDS, REFUSED, WITHOUT_ATTENTION
from indexed_fields import INDEXED
from torch import nn
from transformers import PreTrainedModel

from stoker.kernels.errors import UnsupportedModelError
from stoker.rollout.config import EngineConfig
from stoker.rollout.engine import RolloutEngine
from stoker.rollout.outputs import RolloutBatch
from stoker.rollout.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

NEW_TOKENS = 12  # of which each request goes on through three ends of blocks
BLOCK = 4
BLOCKS = 20  # of 4 tokens: the longest request fills 13, all six would fill 44


PROMPTS = [draw(length, length) for length in (17, 40, 1, 28, 3, 9)]
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
SAMPLED = [
    SamplingParams(temperature=0.7 if i % 2 else 1.0, seed=i, max_tokens=NEW_TOKENS) for i in range(len(PROMPTS))
]


@cache
def model_of(family: str) -> PreTrainedModel:
    return make_model(family)


@cache
def padded(family: str) -> list[list[int]]:
    return oracle.greedy_batch(model_of(family), PROMPTS, NEW_TOKENS)


@cache
def greedy_of(family: str) -> list[list[int]]:
    """Of each prompt alone, by the plain forward, which can tell at once whether what the padded batch gives is it."""
    return oracle.greedy_each(model_of(family), PROMPTS, NEW_TOKENS, padded(family))


CONFIG = EngineConfig(block_size=BLOCK, kv_cache_memory="8MiB", max_num_batched_tokens=16, max_num_seqs=8)
BRANCH = PROMPTS[1][:30] + draw(99, 5)


class Alone(NamedTuple):
    """One request at a time, with room for all of them: what they give, how many tokens of earlier ones they began with."""

    batches: list[RolloutBatch]
    reused: int
    block_bytes: int
    state_bytes: int


@cache
def alone(family: str) -> Alone:
    with RolloutEngine(model_of(family), config=CONFIG) as engine:
        batches = [engine.generate_batch([prompt], GREEDY) for prompt in (PROMPTS[1], PROMPTS[1], BRANCH)]
        stats = engine.stats()
    return Alone(batches, stats.prefix_cache_hit_tokens, stats.kv_block_bytes, stats.recurrent_state_bytes)


def crowded_engine(family: str) -> RolloutEngine:
    """Prefill in chunks of at most 16 tokens, and a KV cache for under half of what the prompts need together."""
    blocks = 12 if family.startswith("llama4") else BLOCKS  # whose chunks leave much free: what they hide is given up
    found = alone(family)
    return RolloutEngine(
        model_of(family), config=replace(CONFIG, kv_cache_memory=blocks * found.block_bytes + found.state_bytes)
    )


def tokens(batch: RolloutBatch) -> list[list[int]]:
    batch.raise_for_errors()
    return [output.completions[0].token_ids for output in batch]


@pytest.mark.parametrize("family", [*FAMILIES, *INDEXED, *HYBRIDS])
def test_hugging_face_agrees_with_itself(family):
    """The oracle's own footing: its cached, its padded and its plain forward give the same tokens."""
    for prompt, completion in zip(PROMPTS, greedy_of(family), strict=True):
        assert oracle.logits(model_of(family), prompt, completion).argmax(-1).tolist() == completion
    assert oracle.greedy(model_of(family), PROMPTS[1], 5) == greedy_of(family)[1][:5]
    # Llama 4's temperature tuning counts the padding as positions, and MiniMax's blocks of keys begin with it.
    if not family.startswith(("llama4", "minimax_m3")):
        assert padded(family) == greedy_of(family)


@cache
def crowded(family: str) -> tuple[list[RolloutBatch], list[int]]:
    """What one engine gives greedily and then sampled, and how many requests were preempted by the end of each."""
    found = []
    with crowded_engine(family) as engine:
        for params in (GREEDY, SAMPLED):
            found.append((engine.generate_batch(PROMPTS, params), engine.stats().num_preemptions))
    return [batch for batch, _ in found], [preempted for _, preempted in found]


@pytest.mark.parametrize("family", [*FAMILIES, *INDEXED, *HYBRIDS])
def test_greedy_tokens_are_those_of_generate(family):
    (batch, _), (preempted, _) = crowded(family)
    assert tokens(batch) == greedy_of(family)
    assert [c.finish_reason for output in batch for c in output.completions] == ["length"] * len(PROMPTS)
    assert (preempted == 0) == (family in WITHOUT_ATTENTION)  # whose tokens take no memory


@pytest.mark.parametrize("family", [*FAMILIES, *INDEXED, *HYBRIDS])
def test_a_prefix_hit_changes_nothing(family):
    first, again, branched = alone(family).batches
    assert tokens(first) == tokens(again) == [greedy_of(family)[1]]
    assert first[0].cached_tokens == 0 and again[0].cached_tokens >= len(PROMPTS[1]) - BLOCK
    (found,) = tokens(branched)
    assert found == oracle.greedy(model_of(family), BRANCH, NEW_TOKENS, found)
    # A state serves from where it was kept alone, and that is the end of the other prompt.
    assert branched[0].cached_tokens == (0 if family in HYBRIDS else 30 // BLOCK * BLOCK)
    assert alone(family).reused == again[0].cached_tokens + branched[0].cached_tokens


@pytest.mark.parametrize("family", [*FAMILIES, *INDEXED, *HYBRIDS])
def test_logprobs_are_those_of_the_plain_forward(family):
    model = model_of(family)
    batches, preempted = crowded(family)
    assert family in WITHOUT_ATTENTION or preempted[1] > preempted[0] > 0
    for batch, params in zip(batches, ([GREEDY] * len(PROMPTS), SAMPLED), strict=True):
        batch.raise_for_errors()
        for prompt, output, p in zip(PROMPTS, batch, params, strict=True):
            (completion,) = output.completions
            assert len(completion.token_ids) == len(completion.logprobs) == NEW_TOKENS
            expected = oracle.logprobs(model, prompt, completion.token_ids, p.temperature or 1.0)
            torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4)


def test_layers_that_attend_to_the_keys_of_others_keep_none():
    kept = []
    for shared in (0, 2):
        model = make_model("gemma4", num_kv_shared_layers=shared)
        with RolloutEngine(model, config=EngineConfig(kv_cache_memory="1MiB")) as engine:
            kept.append(engine.stats().kv_block_bytes)
    assert kept[0] == 2 * kept[1]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "llama4"])
def test_sampled_tokens_do_not_depend_on_neighbours(family):
    with crowded_engine(family) as engine:
        together = tokens(engine.generate_batch(PROMPTS, SAMPLED))
    with RolloutEngine(model_of(family), config=EngineConfig(kv_cache_memory="64MiB")) as engine:
        alone = [tokens(engine.generate_batch([p], s))[0] for p, s in zip(PROMPTS, SAMPLED, strict=True)]
    assert alone == together
    assert len(set(map(tuple, together))) == len(PROMPTS)


def with_wide_head(family: str) -> PreTrainedModel:
    """fp16 layers under a head in fp32, and the embeddings tied to it too, as TRL's ``cast_lm_head_to_fp32`` makes them."""
    model = make_model(family).half()
    for module in model.modules():
        if type(module).__name__.endswith("TopkRouter"):
            module.float()  # as transformers has it from 5.24 on
    head, embeddings = model.lm_head.float(), model.model.embed_tokens
    if not model.config.tie_word_embeddings:
        head.weight.data += 30  # no token is any likelier for that, but for what fp16 would round away
    head.forward = lambda hidden: nn.functional.linear(hidden.float(), head.weight)
    embeddings.register_forward_hook(lambda _, inputs, output: output.half())
    return model


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "glm4_moe"])
def test_a_head_may_be_wider_than_the_layers(family):
    model = with_wide_head(family)
    tied = model.config.tie_word_embeddings
    assert model.lm_head.weight.dtype == torch.float32
    assert (model.model.embed_tokens.weight.dtype == torch.float32) == tied
    with RolloutEngine(model, config=EngineConfig(kv_cache_memory="1MiB", block_size=BLOCK)) as engine:
        for version in range(2):
            batch = engine.generate_batch(PROMPTS, SAMPLED)
            batch.raise_for_errors()
            for output, p, score in zip(batch, SAMPLED, engine.score(batch), strict=True):
                (c,) = output.completions
                for found, temperature in ((c.logprobs, p.temperature), (score.logprobs, 1.0)):
                    expected = oracle.logprobs(model, output.prompt_token_ids, c.token_ids, temperature)
                    torch.testing.assert_close(torch.as_tensor(found).double(), expected, rtol=0, atol=0.02)
                assert set(c.weight_versions) == {version}
            model.lm_head.weight.data *= 0.5
        report, stats = engine.verify_weights(), engine.stats()
        assert report.ok and report.source == "aliased" and stats.fused_layers == stats.num_layers


@pytest.mark.parametrize("how", ["mirror", "folder"])
def test_norms_that_stay_in_fp32_under_fp16(how, tmp_path):
    """As transformers has it for gpt_oss."""
    model = make_model("gpt_oss")
    config = EngineConfig(dtype="float16", kv_cache_memory="1MiB", block_size=BLOCK)
    if how == "folder":
        model.save_pretrained(tmp_path)
    with (
        RolloutEngine.from_pretrained(tmp_path, config=config)
        if how == "folder"
        else RolloutEngine(model, config=config) as engine
    ):
        batch = engine.generate_batch(PROMPTS, SAMPLED)
        batch.raise_for_errors()
        used = engine._binding.shell.tensors()
        names = {n for n, _ in model.named_parameters() if used[n].dtype == torch.float32}
        assert names == {n for n, _ in model.named_parameters() if "norm" in n}
        assert engine.verify_weights().source == ("mirror" if how == "mirror" else "aliased")
    for prompt, output, p in zip(PROMPTS, batch, SAMPLED, strict=True):
        (c,) = output.completions
        expected = oracle.logprobs(model, prompt, c.token_ids, p.temperature)
        assert (torch.tensor(c.logprobs).double() - expected).abs().median() < 0.02


@pytest.mark.parametrize("family", REFUSED)
def test_states_that_the_engine_does_not_know_are_refused(family):
    with pytest.raises(UnsupportedModelError, match="use model.generate for "):
        RolloutEngine(make_model(family), config=EngineConfig(kv_cache_memory="1MiB", max_num_seqs=4))
