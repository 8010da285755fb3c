"""Where a completion ends: stop ids and EOS, stop strings, and the model's length."""

import copy
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
import tokenizer_kinds
import torch
from families import make_model
from family_fields import VOCAB
from small_engine import (
    EOS,
    GREEDY,
    NEEDLE,
    build,
    draw,
    encode,
    llama,
    only,
    successor_model,
    tokenizer,
    tokens,
)
from tokenizer_kinds import KINDS

from stoker.rollout import Completion, SamplingParams
from stoker.rollout.stop_strings import StopStringChecker, completion_text, special_tokens


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


def test_without_max_tokens_a_completion_takes_the_room_that_there_is():
    """In the KV cache, or up to the length of the model."""
    model = successor_model(list(range(10, 20)), vocab=64)
    with build(model) as engine:
        longest, block = engine.max_model_len, engine.stats().kv_block_bytes
    for blocks, room in ((4, 3 * 16), (64, longest)):  # of the blocks one holds nothing
        with build(model, kv_cache_memory=blocks * block) as engine:
            params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
            c = only(engine.generate_batch([[10]], params))
        assert c.token_ids == [10 + (i + 1) % 10 for i in range(room - 1)] and c.finish_reason == "length"


def test_min_tokens_keeps_stop_ids_from_being_sampled():
    stops = tuple(range(2, VOCAB, 2))
    with build() as engine:
        plain = SamplingParams(n=16, seed=1, stop_token_ids=stops, max_tokens=20)
        params = replace(plain, min_tokens=6, logprobs_mode="processed")
        early, late = engine.generate_batch([NEEDLE] * 2, [plain, params])
        assert min(len(c.token_ids) for c in early.completions) < 3
        for c in late.completions:
            assert len(c.token_ids) > 6 or c.finish_reason == "length"
            assert not set(c.token_ids[:6]) & set(stops) and c.token_ids[-1] in stops
        c = late.completions[0]
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


def test_the_first_token_of_a_vocabulary_may_be_its_eos() -> None:
    """As of GPT-NeoX."""
    model = successor_model([4, 3, 2, 1, 0], vocab=64)
    model.generation_config.eos_token_id = 0
    with build(model) as engine:
        c = only(engine.generate_batch([[4]], GREEDY))
        assert (c.token_ids, c.finish_reason, c.stop_reason) == ([3, 2, 1, 0], "stop", 0)
        assert c.token_ids == oracle.greedy(model, [4], 8)


def test_eos_ids_are_those_of_now():
    """A trainer may set them after the engine was built, as for a chat template that ends turns with another token."""
    model, one = successor_model([*encode("abcdef"), EOS]), copy.deepcopy(tokenizer())
    with build(model, tokenizer=one) as engine:

        def said(**options):
            return (
                engine.submit("a", SamplingParams(temperature=0, max_tokens=9, **options)).result().completions[0].text
            )

        assert said() == "bcdef"
        unknown = one.convert_tokens_to_ids(
            "<|end_of_turn|>"
        )  # as where the names of another family's tokens are listed
        model.generation_config.eos_token_id = [unknown, *np.array(encode("d"))]
        assert said() == only(engine.generate_batch(["a"], GREEDY)).text == "bcd"
        assert said(ignore_eos=True) == "bcdefabc"
        for several in (np.array([unknown, *encode("d")]), torch.tensor(encode("d")), {*encode("d")}):
            model.generation_config.eos_token_id = several
            assert said(ignore_eos=False) == "bcd" and said(ignore_eos=True) == "bcdefabc"
        model.generation_config.eos_token_id, one.eos_token = None, "c"
        assert said() == only(engine.generate_batch(["a"], GREEDY)).text == "bc"


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
        (("d", "bcd"), "bcd", "", "bcd"),
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
        (c,) = engine.generate_batch(["a"], SamplingParams(temperature=0, max_tokens=50, stop="c<bot>"))[0].completions
        assert (c.text, c.stop_reason, c.token_ids) == ("b", "c<bot>", encode("bc<bot>"))


def test_a_stop_string_matches_nothing_within_a_special_token():
    """What the text leaves out ends no completion in part, and parts nothing that the text has."""
    model = successor_model(encode("ab<bot>cd"))
    with build(model, tokenizer=tokenizer()) as engine:
        for stop in ("<bo", "bot>", "t>c", "b<"):
            c = only(engine.generate_batch(["a"], SamplingParams(temperature=0, max_tokens=9, stop=stop)))
            assert (c.text, c.finish_reason) == ("bcdabcd", "length"), stop
        c = only(engine.generate_batch(["a"], SamplingParams(temperature=0, max_tokens=9, stop=["<bot>d", "bc"])))
        assert (c.text, c.stop_reason, c.token_ids) == ("", "bc", encode("b<bot>c"))
        params = SamplingParams(temperature=0, max_tokens=9, min_tokens=4, stop=["<bot>cd", "d"])
        c = only(engine.generate_batch(["a"], params))
        assert (c.text, c.stop_reason, c.token_ids) == ("bcdab", "<bot>cd", encode("b<bot>cdab<bot>cd"))


def test_a_stop_string_in_a_token_that_begins_another_character():
    """As in " 😀", whose first token ends in the first half of the character."""

    class Bytes:
        pieces = (b" \xf0\x9f", b"\x98\x80", b"a", b"\xff")

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            decoded.append(len(ids))
            return b"".join(self.pieces[i] for i in ids).decode(errors="replace")

    decoded: list[int] = []

    def said(stop: str, ids: list[int]) -> list[str | None]:
        check = StopStringChecker(Bytes(), [stop], {})
        return [check(token) for token in ids]

    assert said(" ", [2, 0, 1, 2, 0]) == [None, " ", None, None, " "]  # each once: before min_tokens it is passed over
    assert said(" \N{GRINNING FACE}a", [0, 1, 2, 0, 1, 2]) == [None, None, " 😀a", None, None, " 😀a"]
    decoded.clear()
    said("a", [3] * 500)
    assert max(decoded) < 30, "however long a text of no characters is"
    assert said("a", [3] * 99 + [2])[-1] == "a"
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


def test_a_text_is_cut_before_the_stop_string_that_ended_it():
    """Not before one right in front of it, from before ``min_tokens``; and where one token is all that follows a special one."""
    own = copy.deepcopy(tokenizer())
    own.add_tokens(["!!"])
    (both,) = own.convert_tokens_to_ids(["!!"])
    assert completion_text(own, encode("aa"), "a") == "a"
    assert completion_text(own, [*encode("<bot>"), both], "<bot>!!") == ""
    assert completion_text(own, [*encode("a<bot>"), both], "<bot>!!") == "a"


@pytest.mark.parametrize("stops", [("<bot>c!", "!"), ("c!", "<bot>c!"), ("!", "c!")])
def test_of_stop_strings_that_one_token_ends_the_earliest_counts(stops):
    """Whether they name special tokens or not."""
    check = StopStringChecker(tokenizer(), stops, special_tokens(tokenizer()))
    assert [check(token) for token in encode("a<bot>c!")][-1] == max(stops, key=len)


def test_the_checker_sees_what_the_whole_text_shows():
    """Against a search in the texts decoded from scratch after every token, over random bytes and special tokens."""
    rng, special = random.Random(0), special_tokens(tokenizer())
    assert special == {EOS: "<eos>", EOS + 1: "<user>", EOS + 2: "<bot>"}
    pieces = [*map(encode, ("a", "b", "ab", "é", "€", "😀", "\n", "b€", "<bot>")), [EOS]]
    stops_of = {
        False: ["ab", "aba", "€", "é€", "😀a", "b€a", "\n\n", "bb", "<b", "t>a"],
        True: ["<eos>", "a<bot>", "<bot>b"],
    }
    matched = {False: 0, True: 0}
    for _ in range(400):
        ids = [t for _ in range(12) for t in rng.choice(pieces)]
        named = rng.random() < 0.4
        stops = rng.sample(stops_of[named], k=rng.randint(1, 3))
        check = StopStringChecker(tokenizer(), stops, special)
        for count, token in enumerate(ids, start=1):
            text = tokenizer().decode(ids[:count], skip_special_tokens=not named)
            whole = None if text.endswith("�") else min(((text.find(s), s) for s in stops if s in text), default=None)
            found = check(token)
            assert found == (whole[1] if whole else None), (ids[:count], stops)
            if found:
                rest = text[: whole[0]]
                for hidden in special.values():
                    rest = rest.replace(hidden, "")
                assert completion_text(tokenizer(), ids[:count], found) == rest
                matched[named] += 1
                break
    assert min(matched.values()) > 50


@pytest.mark.parametrize("kind", KINDS)
def test_the_checker_finds_what_the_text_has_whatever_tokens_make_of_it(kind):
    """Bytes that are no character by themselves, spaces that are left out or set between tokens."""
    made, draws = tokenizer_kinds.tokenizer(kind), random.Random(0)
    for text in ("日本語と英語 日本", "naïve café, déjà vu", "a b  c   d", "10 20 30 400 5000"):
        ids = made(text)["input_ids"]
        known = [made.decode(ids[:count], skip_special_tokens=True) for count in range(1, len(ids) + 1)]
        for _ in range(12):
            at = draws.randrange(len(known[-1]))
            stop = known[-1][at : at + draws.randint(1, 3)]
            check = StopStringChecker(made, [stop], special_tokens(made))
            found = next(count for count, token in enumerate(ids) if check(token) is not None)
            assert found == next(count for count, text in enumerate(known) if stop in text), (text, stop)
            assert completion_text(made, ids[: found + 1], stop) == known[found][: known[found].find(stop)]


def test_special_tokens_are_those_that_a_text_is_decoded_without():
    """Not all that were added to a vocabulary; and also of tokenizers that keep no list of what was added."""
    made = tokenizer_kinds.tokenizer("byte-level")
    assert made.convert_tokens_to_ids("<think>") not in special_tokens(made)
    assert "</s>" in special_tokens(made).values()
    bare = SimpleNamespace(all_special_ids=[3, 4], all_special_tokens=["<s>", ""])
    assert special_tokens(bare) == {3: "<s>"}, "every stop string has the text of one that has none"


@pytest.mark.parametrize("longest", [32, 35])  # whole blocks, and a part of one
def test_the_end_of_max_model_len(longest: int) -> None:
    with build(max_model_len=longest) as engine:
        prompts, counts = [draw(1, 31), draw(2, 20), draw(3, 5)], (longest - 31, longest - 20, 16)
        batch = engine.generate_batch(prompts, SamplingParams(temperature=0, max_tokens=16))
        assert [len(o.completions[0].token_ids) for o in batch] == [*counts]
        assert {o.completions[0].finish_reason for o in batch} == {"length"}
        assert tokens(batch) == [[oracle.greedy(llama(), p, n)] for p, n in zip(prompts, counts, strict=True)]


def test_the_whole_of_the_models_positions():
    with build() as engine:
        c = only(engine.generate_batch([draw(1, 240)], SamplingParams(temperature=0, max_tokens=1000)))
        assert len(c.token_ids) == 16 and c.finish_reason == "length"
        assert c.token_ids == oracle.greedy(llama(), draw(1, 240), 16)
