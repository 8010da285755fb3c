"""The HTTP server says how likely the tokens of prompts are: to teachers' pupils, and to those who evaluate."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from oracle import logits, logprobs_of_all
from server_setup import (  # noqa: F401 - fixtures among them
    CHAT,
    a_client,
    a_server,
    an_engine,
    client_of,
    post,
    text_engine,
    text_model,
    until,
)
from small_engine import EOS, TEXT_VOCAB, encode, tokenizer

from stoker.integrations import openai_api
from stoker.integrations.openai_answers import answer
from stoker.integrations.server import Server, serve
from stoker.rollout import LIVE, RequestFailedError, RolloutEngine, RolloutOutput, SamplingParams

TEXT = "Every word is likely."


def assert_said(positions: list[Any], prompt: list[int], table: torch.Tensor, top: int) -> None:
    """By id the token and the ``top`` likeliest, with their places among all, as vLLM's server gives it."""
    assert len(positions) == len(prompt) and positions[0] is None
    for token, position, row in zip(prompt[1:], positions[1:], table, strict=True):
        ids = row.argsort(descending=True)
        assert set(position) == {str(token)} | {str(i) for i in ids[:top].tolist()}
        for name, entry in position.items():
            assert set(entry) == {"logprob", "rank", "decoded_token"}
            assert entry["logprob"] == pytest.approx(row[int(name)].item(), abs=1e-4)
            assert ids[entry["rank"] - 1] == int(name)
            assert entry["decoded_token"] == tokenizer().decode([int(name)])
        assert sorted(entry["rank"] for entry in position.values())[:top] == list(range(1, top + 1))


@pytest.mark.parametrize("prompt", [TEXT, encode(TEXT)], ids=["text", "ids"])
@pytest.mark.parametrize(("top", "n", "max_tokens"), [(0, 1, 1), (3, 2, 4), (5, 1, 0)])
def test_log_probabilities_of_a_prompt(
    engine: RolloutEngine, client: Any, prompt: Any, top: int, n: int, max_tokens: int
) -> None:
    extra = {"prompt_logprobs": top, "return_token_ids": True}
    answer = client.completions.create(
        model="policy", prompt=prompt, n=n, max_tokens=max_tokens, temperature=0.7, seed=1, extra_body=extra
    )
    assert len(answer.choices) == n
    table = logprobs_of_all(engine.model, encode(TEXT), 0.7)
    for choice in answer.choices:
        assert_said(choice.prompt_logprobs, encode(TEXT), table, top)
        assert len(choice.token_ids) == max_tokens and choice.finish_reason == "length" and choice.logprobs is None
    assert answer.usage.prompt_tokens == len(TEXT) and answer.usage.completion_tokens == n * max_tokens
    if max_tokens:
        params = SamplingParams(n=n, max_tokens=max_tokens, temperature=0.7, seed=1)
        (output,) = engine.generate_batch([encode(TEXT)], params)
        assert [c.token_ids for c in answer.choices] == [c.token_ids for c in output.completions]
    else:
        assert answer.choices[0].text == "" and answer.choices[0].weight_versions == []


def test_prompts_of_one_and_two_tokens(engine: RolloutEngine, client: Any) -> None:
    asked = {"prompt_logprobs": 2, "logprobs_mode": "raw"}
    choices = client.completions.create(model="policy", prompt=[[5], [6, 7]], temperature=0.5, extra_body=asked).choices
    assert choices[0].prompt_logprobs == [None]
    assert_said(choices[1].prompt_logprobs, [6, 7], logprobs_of_all(engine.model, [6, 7]), 2)


def test_log_probabilities_of_a_chat(engine: RolloutEngine, client: Any) -> None:
    extra = {"prompt_logprobs": 1, "return_token_ids": True}
    answer = client.chat.completions.create(model="policy", messages=CHAT, max_tokens=3, extra_body=extra)
    (choice,) = answer.choices
    prompt = choice.prompt_token_ids
    assert_said(answer.prompt_logprobs, prompt, logprobs_of_all(engine.model, prompt), 1)
    assert len(choice.token_ids) == 3 and "prompt_logprobs" not in choice.model_extra


@pytest.mark.parametrize(
    "limits", [("max_tokens",), ("max_completion_tokens",), ("max_tokens", "max_completion_tokens")]
)
def test_a_chat_alone_by_either_of_the_names_for_a_limit(server: Server, limits: tuple[str, ...]) -> None:
    asked = {"messages": CHAT, "prompt_logprobs": 0}
    status, found = post(server, "/v1/chat/completions", asked | dict.fromkeys(limits, 0))
    assert (
        status == 200 and found["usage"]["completion_tokens"] == 0 and found["choices"][0]["message"]["content"] == ""
    )
    assert len(found["prompt_logprobs"]) == found["usage"]["prompt_tokens"]
    status, found = post(server, "/v1/chat/completions", asked | {"max_tokens": 0, "max_completion_tokens": 1})
    assert status == 400 and "max_tokens=0, max_completion_tokens=1: give one of them" in found["error"]["message"]


def test_an_echo(engine: RolloutEngine, client: Any) -> None:
    """As harnesses that evaluate ask for it: the tokens of prompt and completion in a row, the first without a log-probability."""
    texts = [TEXT, "Short."]
    answer = client.completions.create(
        model="policy", prompt=list(map(encode, texts)), max_tokens=1, temperature=0, logprobs=2, echo=True
    )
    for text, choice in zip(texts, answer.choices, strict=True):
        prompt, said = encode(text), choice.logprobs
        assert choice.text.startswith(text) and said.tokens == [*text, tokenizer().decode([said_last(engine, prompt)])]
        assert said.token_logprobs[0] is None and said.top_logprobs[0] is None
        whole = [*prompt, said_last(engine, prompt)]
        table = logprobs_of_all(engine.model, whole)
        for token, logprob, top, row in zip(
            whole[1:], said.token_logprobs[1:], said.top_logprobs[1:], table, strict=True
        ):
            assert logprob == pytest.approx(row[token].item(), abs=1e-4)
            assert max(top.values()) == pytest.approx(row.max().item(), abs=1e-4) and len(top) <= 2
            # The likeliest token's own number is the one among the likeliest: harnesses compare them.
            assert (logprob == max(top.values())) == (token == row.argmax())


def said_last(engine: RolloutEngine, prompt: list[int]) -> int:
    return int(logits(engine.model, prompt, [0])[0].argmax())


def test_an_echo_alone_and_with_others(client: Any) -> None:
    def asked(**more: Any) -> Any:
        return client.completions.create(
            **{"model": "policy", "prompt": TEXT, "seed": 3, "echo": True, **more}
        ).choices[0]

    plain = asked(max_tokens=4, echo=False, logprobs=1)
    choice = asked(max_tokens=4)
    assert choice.text == TEXT + plain.text and choice.logprobs is None and "prompt_logprobs" not in choice.model_extra
    choice = asked(max_tokens=0)
    assert choice.text == TEXT and choice.finish_reason == "length"
    choice = asked(max_tokens=0, logprobs=0)
    assert len(choice.logprobs.token_logprobs) == len(TEXT) and choice.logprobs.top_logprobs is None
    # An echo's alternatives are as many as it asked for, whatever is asked of the prompt besides.
    for of_prompt in (1, 5):
        choice = asked(max_tokens=4, logprobs=3, extra_body={"prompt_logprobs": of_prompt, "return_token_ids": True})
        assert choice.logprobs.token_logprobs[len(TEXT) :] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-5)
        assert {len(top) for top in choice.logprobs.top_logprobs[1:]} <= {
            1,
            2,
            3,
        }  # by text: parts of characters are alike
        assert {of_prompt, of_prompt + 1} >= {len(position) for position in choice.prompt_logprobs[1:]}
        assert choice.text == TEXT + plain.text and len(choice.token_ids) == 4


def test_tokens_by_their_ids(client: Any) -> None:
    """Text does not tell tokens apart that are parts of a character."""
    extra = {"return_tokens_as_token_ids": True, "return_token_ids": True, "prompt_logprobs": 0}
    (choice,) = client.completions.create(
        model="policy", prompt="é", max_tokens=3, logprobs=1, extra_body=extra
    ).choices
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    assert all(name.startswith("token_id:") for top in choice.logprobs.top_logprobs for name in top)
    assert next(iter(choice.prompt_logprobs[1].values()))["decoded_token"] == f"token_id:{encode('é')[1]}"
    answer = client.chat.completions.create(
        model="policy", messages=CHAT, max_tokens=2, logprobs=True, extra_body=extra
    )
    (choice,) = answer.choices
    assert [one.token for one in choice.logprobs.content] == [f"token_id:{token}" for token in choice.token_ids]


def test_without_a_tokenizer() -> None:
    with RolloutEngine(text_model()) as engine, serve(engine, port=0) as server:
        asked = {"prompt": [5, 6, 7], "echo": True, "logprobs": 1, "prompt_logprobs": 0, "max_tokens": 1}
        status, body = post(server, "/v1/completions", asked)
    (choice,) = body["choices"]
    assert (
        status == 200
        and choice["text"] == ""
        and choice["logprobs"]["tokens"][:3] == ["token_id:5", "token_id:6", "token_id:7"]
    )
    assert choice["prompt_logprobs"][2]["7"]["decoded_token"] == "token_id:7"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs with stream: what it asks for is not streamed"),
        ({"echo": True, "stream": True}, "echo with stream: what it asks for is not streamed"),
        ({"echo": "yes"}, "echo='yes': give true or false"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1"),
        ({"prompt_logprobs": "all"}, "prompt_logprobs='all'"),
        ({"prompt_logprobs": 1000}, "prompt 0: prompt_logprobs=1000 and the vocabulary has 264 tokens"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": False, "echo": True}, "max_tokens=False"),
        ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids=1: give true or false"),
    ],
    ids=str,
)
def test_what_cannot_be_said_of_a_prompt(server: Server, body: Any, message: str) -> None:
    status, found = post(server, "/v1/completions", {"prompt": "abc", **body})
    assert status == 400 and message in found["error"]["message"]


def test_an_echo_of_a_chat(server: Server) -> None:
    status, found = post(server, "/v1/chat/completions", {"messages": CHAT, "echo": True})
    assert status == 400 and "echo=True: the server does not do that for chats" in found["error"]["message"]


def test_so_many_log_probabilities(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of all would take all memory. They are counted before any work."""
    monkeypatch.setattr(openai_api, "_MOST_LOGPROBS", 2 * 2 * 3 * 4)
    asked = {"prompt": ["abc", [5, 6, 7]], "n": 2, "prompt_logprobs": 3}
    assert post(server, "/v1/completions", asked)[0] == 200
    for more in ({"prompt": ["abcd", [5, 6, 7]]}, {"n": 3}, {"prompt_logprobs": 4}, {"echo": True, "logprobs": 4}):
        status, found = post(server, "/v1/completions", {**asked, **more})
        assert status == 400 and "the server gives at most 48 in an answer; ask for fewer" in found["error"]["message"]
    status, found = post(server, "/v1/chat/completions", {"messages": CHAT, "prompt_logprobs": 3})
    assert status == 400 and "the server gives at most 48" in found["error"]["message"]


def asked_of(engine: RolloutEngine, body: Any) -> tuple[openai_api.Call, list[RolloutOutput]]:
    """A request as the server reads it, and what it answers from."""
    call = openai_api.read_call(body, engine, "policy", LIVE, chat=False)
    return call, list(engine.generate_batch(call.prompts, call.params))


def test_a_large_answer_is_put_together_once(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy of it would keep other threads waiting, and take memory; and to look up a token's text takes longest of all."""
    call, outputs = asked_of(engine, {"prompt": [[5] * 200], "prompt_logprobs": TEXT_VOCAB, "max_tokens": 0})
    answer(call, outputs, engine.tokenizer, 0)
    tracemalloc.start()
    try:
        whole = answer(call, outputs, engine.tokenizer, 0)
        assert tracemalloc.get_traced_memory()[1] < 2.5 * len(whole)  # in pieces, and as one
    finally:
        tracemalloc.stop()
    decode = Mock(side_effect=engine.tokenizer.decode)
    call, outputs = asked_of(engine, {"prompt": [[5] * 20], "echo": True, "logprobs": 9, "max_tokens": 0})
    answer(call, outputs, SimpleNamespace(decode=decode), 0)
    assert set(Counter(map(str, decode.call_args_list)).values()) == {1}


def test_so_many_alternatives_to_a_token(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """One who asks for all of them would have everybody wait: a step makes as many in each of its rows."""
    monkeypatch.setattr(openai_api, "_MOST_AT_A_TOKEN", 3)
    assert post(server, "/v1/completions", {"prompt": "a", "logprobs": 3, "prompt_logprobs": 264})[0] == 200
    status, found = post(server, "/v1/completions", {"prompt": "a", "logprobs": 4})
    assert status == 400 and "4 alternatives to a token: the server gives at most 3" in found["error"]["message"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": ["ab", "c"], "n": 3, "max_tokens": 4, "logprobs": 2}),
        ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 2, "max_tokens": 24}),
    ],
)
def test_so_many_alternatives(server: Server, monkeypatch: pytest.MonkeyPatch, path: str, asked: Any) -> None:
    monkeypatch.setattr(openai_api, "_MOST_ALTERNATIVES", 2 * 3 * 4 * 2)
    assert post(server, path, asked)[0] == 200
    for more in ({"n": 4}, {"max_tokens": 25}, {"max_tokens": None, "n": 1}):
        status, found = post(server, path, {**asked, **more})
        assert status == 400 and "the server gives at most 48 in an answer; ask for fewer" in found["error"]["message"]


def test_a_max_tokens_beyond_any_is_as_none(server: Server, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_api, "_MOST_ALTERNATIVES", 2 * engine.max_model_len)
    assert post(server, "/v1/completions", {"prompt": "ab", "logprobs": 2, "max_tokens": 10**9})[0] == 200


@torch.no_grad()
def test_a_prompt_that_the_model_has_no_numbers_for() -> None:
    model = text_model()
    model.model.embed_tokens.weight[encode("x")] = math.nan
    with text_engine(model) as engine, serve(engine, port=0) as server:
        status, found = post(server, "/v1/completions", {"prompt": "axb", "prompt_logprobs": 0})
        assert status == 500 and "NaN" in found["error"]["message"]
        assert post(server, "/v1/completions", {"prompt": "ab", "prompt_logprobs": 0})[0] == 200


def test_a_number_that_json_cannot_hold_is_an_error_even_where_sampling_went_on(engine: RolloutEngine) -> None:
    call, (output,) = asked_of(engine, {"prompt": "ab", "prompt_logprobs": 0})
    assert json.loads(answer(call, [output], engine.tokenizer, 0))["choices"][0]["prompt_logprobs"]
    failed = replace(output.prompt_logprobs, error=RequestFailedError("NaN"))
    with pytest.raises(RequestFailedError):
        answer(call, [replace(output, prompt_logprobs=failed)], engine.tokenizer, 0)


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}], ids=str)
def test_what_is_aborted_before_its_prompt_is_scored_may_be_sent_again(asked: Any) -> None:
    """As clients do where the status says so. They could make nothing of an answer without what they asked for."""
    with text_engine() as engine, serve(engine, port=0) as server, ThreadPoolExecutor(1) as pool:
        engine.pause()
        answered = pool.submit(post, server, "/v1/completions", {"prompt": TEXT, "max_tokens": 0, **asked})
        until(lambda: engine.core.has_work)
        engine.pause("abort")
        status, found = answered.result(60)
        assert status == 503 and "aborted before its prompt was scored" in found["error"]["message"]
        engine.resume()
        assert post(server, "/v1/completions", {"prompt": TEXT, "max_tokens": 0, **asked})[0] == 200


def test_an_echo_of_text_is_the_text(engine: RolloutEngine) -> None:
    """Without what a tokenizer puts before it."""
    call, (output,) = asked_of(engine, {"prompt": "ab", "echo": True, "max_tokens": 0})
    longer = replace(output, prompt_token_ids=[EOS, *output.prompt_token_ids])
    assert json.loads(answer(call, [longer], engine.tokenizer, 0))["choices"][0]["text"] == "ab"
