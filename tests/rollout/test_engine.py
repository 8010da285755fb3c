"""What comes out of ``generate_batch``: every form of prompt and parameter, whatever the scheduler does meanwhile."""

import os
import random

import oracle
import pytest
import torch
from families import make_model
from small_engine import (
    CROWD,
    CROWD_PARAMS,
    EOS,
    GREEDY,
    NEEDLE,
    NEEDLE_PARAMS,
    TEXT_VOCAB,
    build,
    draw,
    encode,
    in_another_process,
    llama,
    needle_alone,
    only,
    successor_model,
    tokenizer,
    tokens,
)

from stoker.rollout import SamplingParams

# -- forms of prompts and parameters -----------------------------------------------------------------------------


def test_every_form_of_prompt_gives_the_same_tokens():
    model = make_model("llama", vocab_size=TEXT_VOCAB)
    with build(model, tokenizer=tokenizer()) as engine:
        texts = ["hello", "a longer prompt, ünïcode"]
        ids = [encode(t) for t in texts]
        expected = [[oracle.greedy(model, p, 8)] for p in ids]
        assert tokens(engine.generate_batch(texts, GREEDY)) == expected
        assert tokens(engine.generate_batch(ids, GREEDY)) == expected
        assert tokens(engine.generate_batch(tuple(map(tuple, ids)), GREEDY)) == expected
        assert tokens(engine.generate_batch([torch.tensor(p) for p in ids], GREEDY)) == expected
        assert tokens(engine.generate_batch([texts[0], ids[1]], GREEDY)) == expected

        width = max(map(len, ids))
        left = torch.tensor([[7] * (width - len(p)) + p for p in ids])
        left_mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in ids])
        right = torch.tensor([p + [7] * (width - len(p)) for p in ids])
        right_mask = torch.tensor([[1] * len(p) + [0] * (width - len(p)) for p in ids])
        for prompts, mask in ((left, left_mask), (right, right_mask), (left.int(), left_mask.bool())):
            batch = engine.generate_batch(prompts, GREEDY, attention_mask=mask)
            assert tokens(batch) == expected
            assert [o.prompt_token_ids for o in batch] == ids
        whole = engine.generate_batch(left, GREEDY)
        assert [o.prompt_token_ids for o in whole] == left.tolist()
        assert tokens(whole)[1] == expected[1] and tokens(whole)[0] != expected[0]


def test_chats_go_through_the_template():
    chat = [{"role": "user", "content": "hi"}, {"role": "bot", "content": "yes?"}, {"role": "user", "content": "sum"}]
    model = make_model("llama", vocab_size=TEXT_VOCAB)
    with build(model, tokenizer=tokenizer()) as engine:
        batch = engine.generate_batch([chat, chat[:1]], GREEDY)
        assert [o.prompt_token_ids for o in batch] == [
            encode("<user>hi<bot>yes?<user>sum<bot>"),
            encode("<user>hi<bot>"),
        ]
        assert tokens(batch)[1] == [oracle.greedy(model, encode("<user>hi<bot>"), 8)]


def test_a_group_is_tokenised_once_and_each_output_has_ids_of_its_own():
    calls = []
    bytewise = tokenizer()

    def counting(text):
        calls.append(text)
        return bytewise(text)

    counting.eos_token_id = bytewise.eos_token_id
    with build(make_model("llama", vocab_size=TEXT_VOCAB), tokenizer=counting) as engine:
        first, again, other = "hello", "".join(["he", "llo"]), "you"
        batch = engine.generate_batch([first, again, other, first], GREEDY)
    assert calls == ["hello", "you", "hello"]
    prompts = [output.prompt_token_ids for output in batch]
    assert prompts == [encode("hello"), encode("hello"), encode("you"), encode("hello")]
    prompts[0].append(0)
    assert prompts[1] == encode("hello")


def test_parameters_per_prompt_and_order_of_results():
    prompts = [draw(i, 3 + i) for i in range(6)]
    params = [SamplingParams(temperature=0, max_tokens=1 + i, n=1 + i % 3) for i in (5, 0, 3, 1, 4, 2)]
    with build() as engine:
        batch = engine.generate_batch(prompts, params)
        assert len(batch) == 6
        for prompt, p, output in zip(prompts, params, batch, strict=True):
            assert output.prompt_token_ids == prompt
            assert [c.index for c in output.completions] == list(range(p.n))
            greedy = oracle.greedy(llama(), prompt, p.max_tokens)
            assert [c.token_ids for c in output.completions] == [greedy] * p.n
            assert {c.finish_reason for c in output.completions} == {"length"}
        assert engine.generate_batch(prompts, [GREEDY] * 6)[2].completions[0].token_ids == oracle.greedy(
            llama(), prompts[2], 8
        )


@pytest.mark.parametrize("flag", ["return_dict", "output_hidden_states", "output_attentions", "use_cache"])
def test_what_the_models_config_asks_to_return_changes_nothing(flag):
    model = make_model("llama", **{flag: flag not in ("return_dict", "use_cache")})
    with build(model) as engine:
        assert tokens(engine.generate_batch([NEEDLE], GREEDY)) == [[oracle.greedy(llama(), NEEDLE, 8)]]


def test_defaults_are_sixteen_sampled_tokens():
    with build() as engine:
        completion = only(engine.generate_batch([draw(1, 5)]))
        assert len(completion.token_ids) == 16 and completion.text is None and completion.top_logprobs is None


def test_tensors_end_to_end():
    prompts = [draw(1, 7), draw(2, 3)]
    with build() as engine:
        params = [SamplingParams(n=2, max_tokens=5, seed=1), SamplingParams(n=2, max_tokens=3, seed=2)]
        batch = engine.generate_batch(prompts, params)
        t = batch.to_tensors(0)
        assert t.prompt_ids.tolist() == [prompts[0]] * 2 + [[0] * 4 + prompts[1]] * 2
        assert t.prompt_mask.sum(1).tolist() == [7, 7, 3, 3]
        assert t.completion_mask.tolist() == [[1] * 5] * 2 + [[1, 1, 1, 0, 0]] * 2
        assert t.completion_ids[3].tolist() == [*batch[1].completions[1].token_ids, 0, 0]
        assert t.weight_versions.tolist() == [[0] * 5] * 2 + [[0, 0, 0, -1, -1]] * 2
        # What a trainer does with them: its own forward over the padded batch gives the same log-probabilities.
        ids, mask = torch.cat((t.prompt_ids, t.completion_ids), 1), torch.cat((t.prompt_mask, t.completion_mask), 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = llama()(ids, attention_mask=mask, position_ids=positions).logits[:, 6:-1]
        expected = logits.log_softmax(-1).gather(-1, t.completion_ids[..., None])[..., 0] * t.completion_mask
        torch.testing.assert_close(t.logprobs, expected, rtol=0, atol=1e-4)


def test_text_and_progress_bar(capsys):
    model = successor_model([*encode("hey u!"), EOS])
    with build(model, tokenizer=tokenizer()) as engine:
        engine.generate_batch(["h"] * 3, GREEDY)
        assert capsys.readouterr().err == ""
        completion = only(engine.generate_batch(["h"], SamplingParams(temperature=0), progress_bar=True))
        assert "1/1" in capsys.readouterr().err
        assert completion.text == "ey u!"
        assert completion.token_ids == [*encode("ey u!"), EOS]


# -- a request's tokens are its own ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 3, "max_num_seqs": 7},
        {"block_size": 4, "kv_cache_memory": "blocks:32"},
        {"block_size": 1},
        {"block_size": 7, "decode_window": 3},
        {"decode_window": 1},
        {"max_num_seqs": 3},
        {"max_num_seqs": 1},
        {"enable_prefix_caching": False},
        {"max_model_len": 200, "block_size": 64},
    ],
    ids=lambda c: ",".join(f"{k}={v}" for k, v in c.items()) or "default",
)
def test_a_needle_in_a_haystack(config):
    config = dict(config)
    crowded = str(config.get("kv_cache_memory", "")).startswith("blocks:")
    if crowded:
        with build(block_size=config["block_size"]) as probe:
            config["kv_cache_memory"] = int(config["kv_cache_memory"][7:]) * probe.stats().kv_block_bytes
    at = random.randrange(64)
    with build(**config) as engine:
        batch = engine.generate_batch(
            [*CROWD[:at], NEEDLE, *CROWD[at:]], [*CROWD_PARAMS[:at], NEEDLE_PARAMS, *CROWD_PARAMS[at:]]
        )
        batch.raise_for_errors()
        assert (engine.stats().num_preemptions > 0) == crowded
        engine.core.scheduler.check()
        assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks
    for ours, expected in zip(batch[at].completions, needle_alone()[0].completions, strict=True):
        assert ours.token_ids == expected.token_ids, f"at place {at}"
        torch.testing.assert_close(ours.logprobs, expected.logprobs, rtol=0, atol=1e-5)
        assert [list(t) for t in ours.top_logprobs] == [list(t) for t in expected.top_logprobs]
    assert all(len(c.token_ids) == len(c.logprobs) > 0 for o in batch for c in o.completions)


def test_without_a_prefix_cache_nothing_is_found_in_it() -> None:
    with build(block_size=4, enable_prefix_caching=False) as engine:
        for _ in range(2):
            assert engine.generate_batch([NEEDLE], NEEDLE_PARAMS)[0].cached_tokens == 0
        assert engine.stats().prefix_cache_hit_tokens == 0


def test_a_prefix_hit_and_a_partial_one_change_nothing():
    with build(block_size=4) as engine:
        engine.generate_batch([NEEDLE[:11] + draw(8, 9)], GREEDY)
        for cached in (8, 20):
            batch = engine.generate_batch([NEEDLE], NEEDLE_PARAMS)
            assert batch[0].cached_tokens == cached
            assert tokens(batch) == tokens(needle_alone())


def test_sample_i_draws_from_seed_and_i():
    with build() as engine:

        def samples(n: int, seed: int = 5) -> list[list[int]]:
            return tokens(engine.generate_batch([NEEDLE], SamplingParams(n=n, seed=seed, max_tokens=12)))[0]

        eight = samples(8)
        assert samples(4) == eight[:4] and samples(1) == eight[:1]
        assert len(set(map(tuple, eight))) == 8
        assert not set(map(tuple, samples(8, seed=6))) & set(map(tuple, eight))
        greedy = tokens(engine.generate_batch([NEEDLE], SamplingParams(n=3, temperature=0, max_tokens=12)))[0]
        assert greedy == [oracle.greedy(llama(), NEEDLE, 12)] * 3


def test_equal_prompts_with_and_without_a_seed():
    with build() as engine:
        seeded = tokens(engine.generate_batch([NEEDLE] * 3, SamplingParams(seed=3, n=2)))
        assert seeded[0] == seeded[1] == seeded[2]
        unseeded = engine.generate_batch([NEEDLE] * 8, SamplingParams())
        assert len({tuple(o.completions[0].token_ids) for o in unseeded}) == 8
        assert engine.stats().shared_prompt_tokens > 0


def test_unseeded_calls_differ_and_every_engine_repeats_them():
    runs = []
    for _ in range(2):
        with build(seed=11) as engine:
            runs.append([tokens(engine.generate_batch([NEEDLE], SamplingParams(n=2))) for _ in range(3)])
    assert runs[0] == runs[1]
    assert len({str(call) for call in runs[0]}) == 3
    with build(seed=12) as engine:
        assert tokens(engine.generate_batch([NEEDLE], SamplingParams(n=2))) != runs[0][0]


_UNSEEDED = """
from families import make_model
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

def unseeded():
    engine = RolloutEngine(make_model("llama"), config=EngineConfig(kv_cache_memory="1MiB"))
    params = SamplingParams(n=3, stop_token_ids=(3, 90, 41, 7), min_tokens=2)
    return [[c.token_ids for c in o.completions] for o in engine.generate_batch([[1, 2, 3], [4, 5]], params)]
"""


def test_every_process_draws_the_same():
    here: dict = {}
    exec(_UNSEEDED, here)
    other_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = in_another_process(_UNSEEDED + "print(unseeded())", PYTHONHASHSEED=other_seed)
    assert there == f"{here['unseeded']()}\n"
