"""What comes out of ``generate_batch``: every form of prompt and parameter, whatever the scheduler does meanwhile."""

import itertools
import math
import os
import random
import signal
import subprocess
import sys
from functools import cache

import oracle
import pytest
import torch
from families import VOCAB, make_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from stoker.engine.block_pool import BlockPool
from stoker.engine.runner import EagerStep
from stoker.engine.sampler import PenaltyState
from stoker.engine.scheduler import Scheduler
from stoker.engine.step_inputs import StepInputs
from stoker.kernels.errors import RequestFailedError
from stoker.rollout import Completion, EngineConfig, RolloutBatch, RolloutEngine, SamplingParams
from stoker.rollout.stop_strings import StopStringChecker, completion_text

EOS = 256
TEXT_VOCAB = 264


@cache
def llama() -> PreTrainedModel:
    return make_model("llama")


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, "<eos>" is 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<bot>"]})
    fast.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    )
    assert fast.eos_token_id == EOS
    return fast


def encode(text: str) -> list[int]:
    return tokenizer()(text)["input_ids"]


@torch.no_grad()
def successor_model(cycle: list[int], vocab: int = TEXT_VOCAB) -> PreTrainedModel:
    """Says the token that follows the last one in ``cycle``, with near certainty at temperature 1."""
    model = make_model(
        "llama", vocab_size=vocab, hidden_size=vocab, num_hidden_layers=1, attention_bias=False, mlp_bias=False
    )
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.model.norm.weight.fill_(1.0)
    model.model.embed_tokens.weight.copy_(torch.eye(vocab))
    model.lm_head.weight.zero_()
    assert len(set(cycle)) == len(cycle)
    for now, following in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        model.lm_head.weight[following, now] = 2.0
    return model


def build(model: PreTrainedModel | None = None, **config) -> RolloutEngine:
    fields = {"kv_cache_memory": "4MiB", "max_num_seqs": 64} | config
    with_text = fields.pop("tokenizer", None)
    return RolloutEngine(model or llama(), config=EngineConfig(**fields), tokenizer=with_text)


def draw(seed: int, length: int) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def only(batch: RolloutBatch) -> Completion:
    batch.raise_for_errors()
    ((completion,),) = [o.completions for o in batch]
    return completion


def tokens(batch: RolloutBatch) -> list[list[list[int]]]:
    batch.raise_for_errors()
    return [[c.token_ids for c in o.completions] for o in batch]


GREEDY = SamplingParams(temperature=0, max_tokens=8)


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

CROWD = [draw(100 + i, 1 + 5 * i % 37) for i in range(63)]
CROWD_PARAMS = [
    SamplingParams(
        max_tokens=4 + i % 21,
        temperature=(0.0, 0.7, 1.0, 1.5)[i % 4],
        top_k=(0, 5)[i % 2],
        top_p=(1.0, 0.9, 1.0)[i % 3],
        repetition_penalty=(1.0, 1.0, 1.2)[i % 3],
        min_tokens=i % 3,
        stop_token_ids=(i, 2 * i),
        seed=i,
        logprobs=i % 3,
    )
    for i in range(63)
]
NEEDLE = draw(7, 21)
NEEDLE_PARAMS = SamplingParams(n=2, max_tokens=24, seed=1234, logprobs=2)


@cache
def needle_alone() -> RolloutBatch:
    with build() as engine:
        return engine.generate_batch([NEEDLE], NEEDLE_PARAMS)


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


def in_another_process(code: str, **environment: str) -> str:
    """What the code prints. It finds the tests' modules."""
    env = os.environ | {"PYTHONPATH": os.path.dirname(os.path.abspath(__file__))} | environment
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


_UNSEEDED = """
import torch
torch.set_num_threads(1)
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


# -- log-probabilities -------------------------------------------------------------------------------------------


def test_logprobs_in_three_modes():
    prompt, temperature, top_k, repetition, presence, frequency = draw(3, 12), 0.7, 20, 1.3, 0.2, 0.1
    with build() as engine:
        for mode in ("scaled", "raw", "processed"):
            params = SamplingParams(
                temperature=temperature,
                top_k=top_k,
                repetition_penalty=repetition,
                presence_penalty=presence,
                frequency_penalty=frequency,
                max_tokens=20,
                seed=2,
                logprobs=3,
                logprobs_mode=mode,
            )
            c = only(engine.generate_batch([prompt], params))
            logits = oracle.logits(llama(), prompt, c.token_ids).double()
            if mode == "scaled":
                logits = logits / temperature
            elif mode == "processed":
                for at, row in enumerate(logits):
                    seen = torch.bincount(torch.tensor(c.token_ids[:at], dtype=torch.long), minlength=VOCAB)
                    either = (seen + torch.bincount(torch.tensor(prompt), minlength=VOCAB)) > 0
                    row[either] = torch.where(row > 0, row / repetition, row * repetition)[either]
                    row -= frequency * seen + presence * (seen > 0)
                    row /= temperature
                    row[row < row.topk(top_k).values[-1]] = -torch.inf
            expected = logits.log_softmax(-1)
            ours = torch.tensor(c.logprobs).double()
            torch.testing.assert_close(
                ours, expected.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0], rtol=0, atol=1e-4
            )
            for at, top in enumerate(c.top_logprobs):
                values, ids = expected[at].topk(3)
                assert list(top) == ids.tolist()
                torch.testing.assert_close(list(top.values()), values.tolist(), rtol=0, atol=1e-4)


def test_every_bit_of_a_seed_counts():
    seeds = [1, 1 + 2**31, 1 + 2**32, 1 + 2**48, 1 + 2**62]
    with build() as engine:
        batch = engine.generate_batch([NEEDLE] * 5, [SamplingParams(max_tokens=12, seed=seed) for seed in seeds])
        assert len({tuple(o.completions[0].token_ids) for o in batch}) == 5


def test_the_furthest_temperatures_and_penalties_give_numbers():
    """The lowest temperature is greedy, the highest uniform, and no combination leaves fp32's range."""
    far = [{"temperature": t, "seed": 1} for t in (1e-15, 1e15)]
    far += [one | {"repetition_penalty": r, "top_k": k} for one in far for r in (1e-15, 1e15) for k in (0, 5)]
    far += [one | {"presence_penalty": p, "frequency_penalty": p} for one in far for p in (-1e15, 1e15)]
    with build() as engine:
        batch = engine.generate_batch([NEEDLE] * len(far), [SamplingParams(max_tokens=6, **one) for one in far])
        assert all(math.isfinite(sum(o.completions[0].logprobs)) and o.error is None for o in batch)
        cold, hot = batch[0].completions[0], batch[1].completions[0]
        assert cold.token_ids == only(engine.generate_batch([NEEDLE], GREEDY)).token_ids[:6]
        assert cold.logprobs == [0.0] * 6 and hot.logprobs == pytest.approx([-math.log(VOCAB)] * 6)
        for temperature, expected in ((1e-15, 0.0), (1e15, -math.log(VOCAB))):
            (scores,) = engine.score([NEEDLE + cold.token_ids], start=len(NEEDLE), temperature=temperature)
            assert scores.logprobs.tolist() == pytest.approx([expected] * 6)


@pytest.mark.parametrize("mode", ["scaled", "raw", "processed"])
def test_greedy_logprobs_are_those_of_temperature_one(mode):
    with build() as engine:
        c = only(engine.generate_batch([NEEDLE], SamplingParams(temperature=0, logprobs_mode=mode)))
        expected = oracle.logprobs(llama(), NEEDLE, c.token_ids)
        torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)


def test_top_logprobs_are_as_many_as_asked_for_whatever_the_neighbours_want():
    params = [SamplingParams(logprobs=k, max_tokens=4, temperature=0) for k in (0, 1, 5, VOCAB)]
    with build() as engine:
        batch = engine.generate_batch([NEEDLE] * 4, params)
        for output, p in zip(batch, params, strict=True):
            (c,) = output.completions
            if p.logprobs == 0:
                assert c.top_logprobs is None
            else:
                assert [len(top) for top in c.top_logprobs] == [p.logprobs] * 4
                assert [next(iter(top)) for top in c.top_logprobs] == c.token_ids
                assert all(sorted(top.values(), reverse=True) == list(top.values()) for top in c.top_logprobs)


def test_prefill_equals_decode():
    """The engine's decode continues where its own prefill of prompt and completion would."""
    with build(enable_prefix_caching=False, block_size=4) as engine:
        long = only(engine.generate_batch([NEEDLE], SamplingParams(temperature=0, max_tokens=30)))
        prompts = [NEEDLE + long.token_ids[:k] for k in range(30)]
        batch = engine.generate_batch(prompts, SamplingParams(temperature=0, max_tokens=1))
        assert [o.completions[0].token_ids[0] for o in batch] == long.token_ids
        torch.testing.assert_close([o.completions[0].logprobs[0] for o in batch], long.logprobs, rtol=0, atol=1e-5)


def test_top_k_one_is_greedy_and_tiny_top_p_too():
    expected = oracle.greedy(llama(), NEEDLE, 12)
    with build() as engine:
        for p in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
            c = only(engine.generate_batch([NEEDLE], SamplingParams(max_tokens=12, temperature=1.5, seed=1, **p)))
            assert c.token_ids == expected


def test_repetition_penalty_is_that_of_generate():
    ids = torch.tensor([NEEDLE])
    out = llama().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, repetition_penalty=1.7
    )
    expected = out[0, len(NEEDLE) :].tolist()
    assert expected != oracle.greedy(llama(), NEEDLE, 24)
    for config in ({}, {"decode_window": 1}, {"max_num_batched_tokens": 4, "block_size": 4}):
        with build(**config) as engine:
            params = SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.7)
            batch = engine.generate_batch([NEEDLE, CROWD[0]], [params, GREEDY])
            assert tokens(batch)[0] == [expected]


def test_presence_and_frequency_penalties():
    cycle = [5, 6, 7, 8]
    with build(successor_model(cycle, vocab=32)) as engine:
        assert only(engine.generate_batch([[5]], GREEDY)).token_ids == [6, 7, 8, 5] * 2
        # Without penalty the cycle's next token has a lead of 2 * sqrt(32) over all others, which are equal.
        for name in ("presence_penalty", "frequency_penalty"):
            c = only(engine.generate_batch([[5]], SamplingParams(temperature=0, max_tokens=8, **{name: 12.0})))
            assert c.token_ids[:4] == [6, 7, 8, 5] and c.token_ids[4] not in (6, 7, 8, 5), name
        halves = SamplingParams(temperature=0, max_tokens=12, frequency_penalty=6.0)
        assert only(engine.generate_batch([[5]], halves)).token_ids[:9] == [6, 7, 8, 5, 6, 7, 8, 5, 0]
        never = SamplingParams(temperature=0, max_tokens=12, presence_penalty=6.0)
        assert only(engine.generate_batch([[5]], never)).token_ids == [6, 7, 8, 5] * 3


# -- where a completion ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 8])
def test_stop_ids_and_eos(window):
    cycle = list(range(10, 20))
    model = successor_model(cycle, vocab=64)
    model.generation_config.eos_token_id = [15, 18]
    with build(model, decode_window=window) as engine:

        def run(**fields) -> Completion:
            c = only(engine.generate_batch([[10]], SamplingParams(temperature=0, **{"max_tokens": 30} | fields)))
            assert len(c.token_ids) == len(c.logprobs) == len(c.weight_versions)
            return c

        def ending(c: Completion) -> tuple:
            return c.token_ids[-1], len(c.token_ids), c.finish_reason, c.stop_reason

        assert ending(run()) == (15, 5, "stop", 15)
        assert ending(run(stop_token_ids=(13,))) == (13, 3, "stop", 13)
        assert ending(run(stop_token_ids=(11,))) == (11, 1, "stop", 11)
        assert ending(run(ignore_eos=True)) == (10, 30, "length", None)
        assert ending(run(ignore_eos=True, stop_token_ids=(18,))) == (18, 8, "stop", 18)
        assert ending(run(max_tokens=5)) == (15, 5, "stop", 15)
        assert ending(run(max_tokens=4)) == (14, 4, "length", None)


def test_min_tokens_keeps_stop_ids_from_being_sampled():
    stops = tuple(range(2, VOCAB, 2))
    with build() as engine:
        early = engine.generate_batch([NEEDLE], SamplingParams(n=16, seed=1, stop_token_ids=stops, max_tokens=20))
        assert min(len(c.token_ids) for c in early[0].completions) < 3
        params = SamplingParams(
            n=16, seed=1, stop_token_ids=stops, max_tokens=20, min_tokens=6, logprobs_mode="processed"
        )
        late = engine.generate_batch([NEEDLE], params)
        for c in late[0].completions:
            assert len(c.token_ids) > 6 or c.finish_reason == "length"
            assert not set(c.token_ids[:6]) & set(stops) and c.token_ids[-1] in stops
        c = late[0].completions[0]
        logits = oracle.logits(llama(), NEEDLE, c.token_ids)
        logits[:6, list(stops)] = -torch.inf
        expected = logits.log_softmax(-1).gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, rtol=0, atol=1e-4)


def test_eos_of_the_tokenizer_counts_and_one_outside_the_vocabulary_does_no_harm():
    model = successor_model([*encode("abc"), EOS])
    with build(model, tokenizer=tokenizer()) as engine:
        assert only(engine.generate_batch(["a"], GREEDY)).token_ids == [*encode("bc"), EOS]
    small = make_model("llama", vocab_size=200)  # the tokenizer's EOS is beyond it
    with build(small, tokenizer=tokenizer()) as engine:
        c = only(engine.generate_batch(["a"], SamplingParams(temperature=0, min_tokens=3, max_tokens=8)))
        assert c.token_ids == oracle.greedy(small, encode("a"), 8)


@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.parametrize(
    ("stop", "matched", "text", "said"),
    [
        ("d", "d", "bc", "bcd"),
        ("cde", "cde", "b", "bcde"),
        ("fg€", "fg€", "bcde", "bcdefg€"),
        ("€", "€", "bcdefg", "bcdefg€"),
        (("xyz", "ijk", "hi"), "hi", "bcdefg€", "bcdefg€hi"),
        (("bcd", "d"), "bcd", "", "bcd"),
        ("nothing", None, "bcdefg€hijkl", "bcdefg€hijkl"),
    ],
)
def test_stop_strings(window, stop, matched, text, said):
    model = successor_model([*encode("abcdefg€hijkl"), EOS])
    with build(model, tokenizer=tokenizer(), decode_window=window) as engine:
        c = only(engine.generate_batch(["a"], SamplingParams(temperature=0, max_tokens=50, stop=stop)))
        ended = EOS if matched is None else matched
        assert (c.finish_reason, c.stop_reason, c.text) == ("stop", ended, text)
        assert c.token_ids == encode(said) + [EOS] * (matched is None)
        assert len(c.logprobs) == len(c.weight_versions) == len(c.token_ids)
        engine.core.scheduler.check()


def test_a_stop_string_may_be_a_special_token():
    model = successor_model(encode("abc<bot>d"))
    with build(model, tokenizer=tokenizer()) as engine:
        c = only(engine.generate_batch(["a"], SamplingParams(temperature=0, max_tokens=50, stop="<bot>")))
        assert (c.text, c.stop_reason, c.token_ids) == ("bc", "<bot>", encode("bc<bot>"))


def test_a_stop_string_in_a_token_that_begins_another_character():
    """As in " 😀", whose first token ends in the first half of the character."""

    class Bytes:
        pieces = (b" \xf0\x9f", b"\x98\x80", b"a", b"\xff")

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return b"".join(self.pieces[i] for i in ids).decode(errors="replace")

    def said(stop: str, ids: list[int]) -> list[str | None]:
        check = StopStringChecker(Bytes(), [stop])
        return [check(token) for token in ids]

    assert said(" ", [2, 0, 1, 2, 0]) == [None, " ", None, None, " "]  # each once: before min_tokens it is passed over
    assert said(" \N{GRINNING FACE}a", [0, 1, 2, 0, 1, 2]) == [None, None, " 😀a", None, None, " 😀a"]
    assert said("a", [3, 2, 3, 3, 2]) == [None, "a", None, None, "a"]  # after bytes that are no character
    assert said("a ", [3, 2, 0, 3, 1]) == [None, None, "a ", None, None]


def test_stop_strings_before_min_tokens_are_part_of_the_text():
    model = successor_model(encode("abcd"))
    with build(model, tokenizer=tokenizer()) as engine:
        for min_tokens, text in ((2, "b"), (3, "bcdab"), (6, "bcdab"), (7, "bcdabcdab")):
            params = SamplingParams(
                temperature=0, max_tokens=50, min_tokens=min_tokens, stop=("cd", "zzzzzzzzzzzz"), stop_token_ids=(0,)
            )
            c = only(engine.generate_batch(["a"], params))
            assert (c.text, c.stop_reason, c.token_ids) == (text, "cd", encode(f"{text}cd")), min_tokens


def test_the_checker_sees_what_the_whole_text_shows():
    """Against a search in the text decoded from scratch after every token, over random bytes."""
    rng = random.Random(0)
    pieces = [*map(encode, ("a", "b", "ab", "é", "€", "😀", "\n", "b€")), [EOS]]
    for _ in range(200):
        ids = [t for _ in range(12) for t in rng.choice(pieces)]
        stops = rng.sample(["ab", "aba", "€", "é€", "😀a", "b€a", "<eos>", "\n\n", "bb"], k=rng.randint(1, 3))
        check = StopStringChecker(tokenizer(), stops)
        for count, token in enumerate(ids, start=1):
            text = tokenizer().decode(ids[:count])
            whole = None if text.endswith("�") else min(((text.find(s), s) for s in stops if s in text), default=None)
            found = check(token)
            assert found == (whole[1] if whole else None), (ids[:count], stops)
            if whole and "<eos>" not in text:
                assert completion_text(tokenizer(), ids[:count], found) == text[: whole[0]]
            if found:
                break


def test_the_end_of_max_model_len():
    with build(max_model_len=32) as engine:
        prompts = [draw(1, 31), draw(2, 20), draw(3, 5)]
        batch = engine.generate_batch(prompts, SamplingParams(temperature=0, max_tokens=16))
        assert [len(o.completions[0].token_ids) for o in batch] == [1, 12, 16]
        assert {o.completions[0].finish_reason for o in batch} == {"length"}
        assert tokens(batch) == [[oracle.greedy(llama(), p, n)] for p, n in zip(prompts, (1, 12, 16), strict=True)]


def test_the_whole_of_the_models_positions():
    with build() as engine:
        c = only(engine.generate_batch([draw(1, 240)], SamplingParams(temperature=0, max_tokens=1000)))
        assert len(c.token_ids) == 16 and c.finish_reason == "length"
        assert c.token_ids == oracle.greedy(llama(), draw(1, 240), 16)


# -- what fails, and what an interrupt leaves --------------------------------------------------------------------


def test_nan_weights_fail_the_requests_and_a_repair_heals_the_engine():
    model = make_model("llama")
    with build(model) as engine:
        expected = tokens(engine.generate_batch(CROWD, GREEDY))
        good = model.model.layers[1].mlp.up_proj.weight.detach().clone()
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.fill_(torch.nan)
        batch = engine.generate_batch(CROWD, GREEDY)
        assert all(isinstance(o.error, RequestFailedError) for o in batch)
        assert {c.finish_reason for o in batch for c in o.completions} == {"error"}
        for call in (batch.raise_for_errors, lambda: batch.to_tensors(0)):
            with pytest.raises(
                RequestFailedError,
                match=r"^prompt 0: the model gave NaN logits at position 1 under .* in step 1 of a plan of \d+ rows",
            ):
                call()
        engine.core.scheduler.check()
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.copy_(good)
        assert tokens(engine.generate_batch(CROWD, GREEDY)) == expected


def test_one_bad_request_does_not_touch_the_others():
    poison = 5
    model = make_model("llama")
    prompts = [[t for t in p if t != poison] or [1] for p in CROWD[:20]]
    expected = [oracle.greedy(model, p, 8) for p in prompts]
    assert sum(poison in e for e in expected) < 10
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = torch.nan
    sick = [i for i in range(20) if poison in expected[i][:-1]]
    prompts[3] = [*prompts[3], poison, 9, 9]
    prompts[11] = [poison]
    for config in ({}, {"block_size": 4, "max_num_seqs": 4}, {"max_num_batched_tokens": 8, "decode_window": 1}):
        with build(model, **config) as engine:
            for _ in range(2):  # the second time among blocks that hold NaN
                batch = engine.generate_batch(prompts, GREEDY)
                for i, output in enumerate(batch):
                    if i in (3, 11) or i in sick:
                        assert isinstance(output.error, RequestFailedError)
                    else:
                        assert output.error is None and output.completions[0].token_ids == expected[i]
                with pytest.raises(RequestFailedError, match=rf"^prompt {min([3, *sick])}: "):
                    batch.to_tensors(0)
            assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks
            engine.core.scheduler.check()


def interrupt_at(call: int, function):
    """``function``, but KeyboardInterrupt in call number ``call``: before it has run if that is even, after if odd."""
    calls = itertools.count()

    def interrupted(*args, **kwargs):
        now = next(calls)
        if now == call and call % 2 == 0:
            raise KeyboardInterrupt
        result = function(*args, **kwargs)
        if now == call:
            raise KeyboardInterrupt
        return result

    return interrupted


@pytest.mark.parametrize("call", [0, 3, 8])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *((Scheduler, name) for name in ("plan", "commit", "_reserve", "_admit", "_take", "_release")),
        (BlockPool, "allocate"),
        (StepInputs, "fill"),
        (EagerStep, "__call__"),
        (PenaltyState, "start"),
        (PenaltyState, "add"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_after_an_interrupt_nothing_is_lost(owner, name, call, monkeypatch):
    with build(block_size=4, kv_cache_memory=120_000, max_num_batched_tokens=32, decode_window=2) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt_at(call, getattr(owner, name)))
            with pytest.raises(KeyboardInterrupt):
                engine.generate_batch(CROWD[:12], SamplingParams(n=2, seed=1, repetition_penalty=1.1))
        engine.core.scheduler.check()
        assert not engine.core.has_work
        assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks
        assert tokens(engine.generate_batch([NEEDLE], NEEDLE_PARAMS)) == tokens(needle_alone())
        engine.sleep()
        engine.wake_up()
        assert tokens(engine.generate_batch([NEEDLE], NEEDLE_PARAMS)) == tokens(needle_alone())


def test_an_interrupt_while_an_interrupt_is_dealt_with(monkeypatch):
    with build() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(EagerStep, "__call__", interrupt_at(2, EagerStep.__call__))
            patch.setattr(Scheduler, "_reset_blocks", interrupt_at(0, Scheduler._reset_blocks))
            with pytest.raises(KeyboardInterrupt):
                engine.generate_batch(CROWD[:12], SamplingParams(n=2, seed=1))
        assert tokens(engine.generate_batch([NEEDLE], NEEDLE_PARAMS)) == tokens(needle_alone())
        engine.core.scheduler.check()


def test_an_error_in_the_middle_of_a_batch_is_passed_on(monkeypatch):
    with build(make_model("llama", vocab_size=TEXT_VOCAB), tokenizer=tokenizer()) as engine:
        params = SamplingParams(stop="zzz", seed=1, max_tokens=30)
        expected = tokens(engine.generate_batch(["abc"] * 4, params))
        with monkeypatch.context() as patch:
            patch.setattr(StopStringChecker, "__call__", lambda self, token: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.generate_batch(["abc"] * 4, params)
        engine.core.scheduler.check()
        assert tokens(engine.generate_batch(["abc"] * 4, params)) == expected


_CTRL_C = """
import random, signal
import torch
torch.set_num_threads(1)
from families import make_model
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams
config = EngineConfig(kv_cache_memory=300_000, block_size=4, max_num_batched_tokens=64)
model = make_model("llama")
prompts = [[1 + (i * j) % 127 for j in range(1, 20)] for i in range(40)]
params = SamplingParams(seed=1, max_tokens=100, stop_token_ids=(3,), n=2)
needle = SamplingParams(seed=2, max_tokens=20)
expected = [o.completions for o in RolloutEngine(model, config=config).generate_batch(prompts[:4], needle)]
engine = RolloutEngine(model, config=config)
signal.signal(signal.SIGALRM, signal.default_int_handler)
rng, interrupts = random.Random(0), 0
for _ in range(12):
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0001, 0.15))
        engine.generate_batch(prompts, params)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupts += 1
    engine.core.scheduler.check()
    stats = engine.stats()
    assert stats.num_free_kv_blocks == stats.num_kv_blocks and not engine.core.has_work
    again = [o.completions for o in engine.generate_batch(prompts[:4], needle)]
    assert [[c.token_ids for c in o] for o in again] == [[c.token_ids for c in o] for o in expected]
print(interrupts)
"""


def test_ctrl_c_at_any_moment():
    assert int(in_another_process(_CTRL_C)) >= 6


def test_a_real_sigint_in_this_process():
    with build() as engine:
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        step = engine.core.step
        calls = iter(range(100))

        def kill_in_step():
            if next(calls) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return step()

        engine.core.step = kill_in_step
        try:
            with pytest.raises(KeyboardInterrupt):
                engine.generate_batch(CROWD, SamplingParams(max_tokens=100))
        finally:
            signal.signal(signal.SIGINT, previous)
            engine.core.step = step
        engine.core.scheduler.check()
        assert tokens(engine.generate_batch([NEEDLE], NEEDLE_PARAMS)) == tokens(needle_alone())


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_window_that_runs_past_an_end_leaves_the_cached_prefix_alone(block_size):
    model = make_model("llama")
    config = EngineConfig(block_size=block_size, kv_cache_memory="4MiB")
    prompts = [[5, 6, 7], [9, 8, 7, 6], [3], [11, 12, 13, 14, 15]]
    lengths = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 30, 4, 6)]
    after = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs_mode="raw")
    with RolloutEngine(model, config=config) as engine:
        for output in engine.generate_batch(prompts, lengths):
            again = output.prompt_token_ids + output.completions[0].token_ids
            (output,) = engine.generate_batch([again], after)
            assert output.cached_tokens >= len(again) - 1 - block_size
            (completion,) = output.completions
            assert completion.token_ids == oracle.greedy(model, again, 12)
            expected = oracle.logprobs(model, again, completion.token_ids)
            torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4)
