"""Messages that the HTTP server makes of what a model wrote: content, reasoning, calls of tools."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
from server_setup import (  # noqa: F401 - fixtures among them
    CHAT,
    CONFIG,
    TOOLS,
    a_client,
    a_server,
    an_engine,
    client_of,
    text_model,
)
from small_engine import TEXT_VOCAB, tokenizer

from stoker.integrations.server import serve
from stoker.rollout import RolloutEngine

# As transformers tells reasoning and calls of tools from content.
RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<bot>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>", "content": "text"},
        "tool_calls": {
            "open": "<call>",
            "close_pattern": r"</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<eos>", "content": "text"},
    },
}


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_calls_of_tools(engine: RolloutEngine, client: Any, stream: bool) -> None:
    written = '<think>hm</think>so<call>{"name": "add", "arguments": {"x": 3}}</call>'
    engine.tokenizer.response_template = RESPONSES
    try:
        body = {"structured_outputs": {"choice": [written]}}
        answer = client.chat.completions.create(
            model="policy", messages=CHAT, tools=TOOLS, max_tokens=99, extra_body=body, stream=stream
        )
        events = list(answer) if stream else [answer]
        (choice,) = events[-1].choices
        message = choice.delta if stream else choice.message
        assert choice.finish_reason == "tool_calls"
        assert message.content == "so" and message.reasoning_content == "hm"
        (call,) = message.tool_calls
        assert call.function.name == "add" and json.loads(call.function.arguments) == {"x": 3} and call.id
        assert not any(event.choices[0].delta.content for event in events[:-1])
        cut = client.chat.completions.create(
            model="policy", messages=CHAT, tools=TOOLS, max_tokens=30, extra_body=body, stream=False
        )
        assert cut.choices[0].finish_reason == "length" and cut.choices[0].message.tool_calls is None
        longer = {"structured_outputs": {"choice": [f"{written}and more"]}}
        (choice,) = client.chat.completions.create(
            model="policy", messages=CHAT, tools=TOOLS, max_tokens=len(written) + 3, extra_body=longer, stream=False
        ).choices
        assert len(choice.message.tool_calls) == 1 and choice.finish_reason == "length", "more was to come"
        stops = ("o<", "s", "hm"), ("m</", None, "h"), ("</call>", "so", "hm"), ("so", "", "hm"), ("hm", None, "")
        for stop, content, reasoning in stops:
            told = client.chat.completions.create(
                model="policy", messages=CHAT, tools=TOOLS, max_tokens=99, stop=[stop], extra_body=body, stream=False
            )
            message = told.choices[0].message
            assert told.choices[0].stop_reason == stop and message.content == content, stop
            assert message.reasoning_content == reasoning and bool(message.tool_calls) == (stop == "</call>")
        twice = {"structured_outputs": {"choice": ['<call>{"name": "add", "arguments": {"x": 3}}</call>' * 2]}}
        answer = client.chat.completions.create(
            model="policy", messages=CHAT, tools=TOOLS, max_tokens=120, extra_body=twice, stream=stream
        )
        (choice,) = list(answer)[-1].choices if stream else answer.choices
        message = choice.delta if stream else choice.message
        assert message.content is None, "it is not said twice"
        first, second = message.tool_calls
        assert first.id != second.id and (not stream or (first.index, second.index) == (0, 1))
    finally:
        del engine.tokenizer.response_template


def test_a_message_ends_where_its_text_does() -> None:
    """Before the first of two stop strings in a token; one among the tokens before ``min_tokens`` stays."""
    own = deepcopy(tokenizer())
    own.add_tokens(["!!", "!? "])
    single, pair, user = own.convert_tokens_to_ids(["!", "!!", "<user>"])
    with RolloutEngine(text_model(), config=CONFIG, tokenizer=own) as engine, serve(engine, port=0) as server:
        ask_for = partial(client_of(server).chat.completions.create, model="policy", messages=CHAT, max_tokens=99)

        def ask(stop: str, **body: Any) -> Any:
            (choice,) = ask_for(stop=[stop], extra_body=body).choices
            assert choice.stop_reason == stop
            return choice.message

        def like(written: str) -> dict[str, Any]:
            return {"structured_outputs": {"choice": [written]}}

        for template in (None, RESPONSES):
            own.response_template = template
            assert ask("!", **like("no!!"), suppress_token_ids=[single]).content == "no"
            assert (
                ask("!", **like("no!? "), suppress_token_ids=[single]).content == "no"
            )  # a parser strips what it finds
            assert ask("!", **like("a!b!!"), suppress_token_ids=[pair], min_tokens=3).content == "a!b"
            assert ask("!", **like("!")).content == ""
            assert ask("<user>", suppress_token_ids=[t for t in range(TEXT_VOCAB) if t != user]).content == ""
        assert ask("!", **like("<think>hm!")).reasoning_content == "hm"


@pytest.mark.parametrize("stream", [False, True])
def test_what_no_parser_makes_a_message_of_is_content(
    engine: RolloutEngine, client: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """An end at once, a call by a name that is none, and text over which a parser gives up."""
    monkeypatch.setattr(engine.tokenizer, "response_template", RESPONSES, raising=False)

    def ask(**body: Any) -> Any:
        answer = client.chat.completions.create(
            model="policy", messages=CHAT, tools=TOOLS, max_tokens=99, stream=stream, extra_body=body
        )
        (choice,) = (list(answer) if stream else [answer])[-1].choices
        message = choice.delta if stream else choice.message
        assert choice.finish_reason == "stop" and not message.tool_calls
        return message.content

    eos = engine.tokenizer.eos_token_id
    assert ask(suppress_token_ids=[token for token in range(TEXT_VOCAB) if token != eos]) == ""
    for written in (
        r'<call>{"name": "\ud800", "arguments": {}}</call>',
        '<call>{"name": null, "arguments": {}}</call>',
        "<think> ",  # in which the parser finds a role alone
    ):
        assert ask(structured_outputs={"choice": [written]}) == written

    def parse_response(*_: Any, **__: Any) -> Any:
        raise RecursionError  # as over a thousand brackets

    monkeypatch.setattr(engine.tokenizer, "parse_response", parse_response, raising=False)
    assert ask(structured_outputs={"choice": ["<call>[[["]}) == "<call>[[["
