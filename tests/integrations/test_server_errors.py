"""What the HTTP server refuses, and by which status; requests and steps that fail."""

from __future__ import annotations

import json
import logging
import re
import socket
import urllib.request
from typing import Any

import pytest
import torch
from server_setup import (  # noqa: F401 - fixtures among them
    CHAT,
    a_client,
    a_server,
    an_engine,
    client_of,
    openai,
    post,
    text_engine,
    text_model,
)
from small_engine import TEXT_VOCAB

from stoker.integrations.server import Server, serve
from stoker.rollout import InvalidConfigError, RolloutEngine


def nested(levels: int) -> dict[str, Any]:
    """A schema whose pattern has some 2 ** levels characters."""
    return {"type": "array", "items": nested(levels - 1)} if levels else {"type": "string"}


def tangled(ways: int) -> dict[str, Any]:
    """One that refers to itself in so many ways, some gigabytes of pattern."""
    return {"type": "object", "properties": {f"p{i}": {"$ref": "#"} for i in range(ways)}}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "the body is no JSON"),
        (b"\xff", 400, "the body is no JSON"),
        ([], 400, "the body is no JSON object"),
        ({}, 400, "prompt=None: give text"),
        ({"prompt": ""}, 400, "prompt 0 is empty"),
        ({"prompt": ["a", ""]}, 400, "prompt 1 is empty"),
        ({"prompt": [1, TEXT_VOCAB]}, 400, "prompt 0 has 264 at position 1"),
        ({"prompt": "a", "model": "gpt"}, 404, "model='gpt': there are policy"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature=-1"),
        ({"prompt": "a", "n": 0}, 400, "n=0"),
        ({"prompt": "a", "n": 2**70}, 400, "the server makes at most 16384 completions"),
        ({"prompt": ["a", "b", "c"], "n": 5462}, 400, "n=5462 of 3 prompts: the server makes at most 16384"),
        ({"prompt": "a", "max_tokens": "many"}, 400, "max_tokens='many'"),
        ({"prompt": "a", "best_of": 3}, 400, "best_of=3: the server does not do that"),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix='b': the server does not do that"),
        ({"prompt": "a", "logit_bias": {"5": "1"}}, 400, "logit_bias={5: '1'}: give a mapping of token ids"),
        ({"prompt": "a", "logit_bias": {"five": 1}}, 400, "logit_bias={'five': 1}: give a mapping of token ids"),
        ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, 400, "logit_bias="),
        ({"prompt": "a", "logit_bias": {"999999": 1}}, 400, "prompt 0: logit_bias has an id outside"),
        ({"prompt": "a", "stream": "yes"}, 400, "stream='yes': give true or false"),
        ({"prompt": "a", "stream_options": {"x": 1}}, 400, "stream_options="),
        ({"prompt": "a", "structured_outputs": {"json": 5}}, 400, "structured_outputs={'json': 5}: structured_outputs is a"),
        ({"prompt": "a", "structured_outputs": {"json": {"type": "?"}}}, 400, "structured_outputs: Unsupported type"),
        ({"prompt": "a", "structured_outputs": {"json": {"const": "\ud800"}}}, 400, "structured_outputs: Expected a valid"),
        ({"prompt": "a", "structured_outputs": {"json": nested(30)}}, 400, "structured_outputs: the schema's pattern would have more"),
        ({"prompt": "a", "structured_outputs": {"json": tangled(40)}}, 400, "structured_outputs: the schema's pattern would have more"),
        ({"prompt": "a", "structured_outputs": {"json": nested(200)}}, 400, "structured_outputs: "),
        ({"prompt": "a", "structured_outputs": {"regex": "a" * 300_001}}, 400, "has 300001 characters, and at most 300000 are read"),
        ({"prompt": "a", "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, 400, "both bind"),
        ({"prompt": "a", "structured_outputs": {"regex": "("}}, 400, "regex="),
        ({"prompt": "a", "tempature": 1}, 400, "'tempature' is no field the server knows"),
    ],
)  # fmt: skip
def test_bad_requests(server: Server, client: Any, body: Any, status: int, message: str) -> None:
    code, found = post(server, "/v1/completions", body)
    assert code == status and message in found["error"]["message"] and found["error"]["code"] == status
    assert client.completions.create(model="policy", prompt="a", max_tokens=1).choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "messages=None: give a list of messages"),
        ({"messages": []}, "messages=[]: give a list"),
        ({"messages": ["a"]}, "messages[0] is 'a'"),
        ({"messages": [*CHAT, {"role": "user", "content": 5}]}, "messages[1] has content 5"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0] has the part"),
        ({"messages": CHAT, "tool_choice": "required"}, "tool_choice='required'"),
        ({"messages": CHAT, "tools": 1}, "tools=1: give a list of objects"),
        ({"messages": CHAT, "tools": ["add"]}, "tools=['add']: give a list of objects"),
        ({"messages": CHAT, "skip_special_tokens": False}, "skip_special_tokens=False: the server does not do that"),
        ({"messages": [{"role": "user", "content": "cut \ud83d"}]}, "messages holds half a character"),
        (
            {"messages": CHAT, "response_format": {"type": "xml"}},
            "response_format={'type': 'xml'}: structured_outputs is",
        ),
        ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs without logprobs"),
        ({"messages": CHAT, "chat_template_kwargs": 3}, "chat_template_kwargs=3"),
        (
            {"messages": CHAT, "chat_template_kwargs": {"add_generation_prompt": False}},
            "chat_template_kwargs has add_generation_prompt: give it as a field",
        ),
        *(
            (
                {"messages": CHAT, "chat_template_kwargs": {name: True}},
                f"chat_template_kwargs has '{name}', which is no",
            )
            for name in ("truncation", "padding", "max_length", "tokenizer_kwargs", "chat_template", "return_tensors")
        ),
        ({"messages": CHAT, "prompt": "a"}, "'prompt' is no field"),
        ({"messages": CHAT, "parallel_tool_calls": False}, "parallel_tool_calls=False: the server does not do that"),
        (
            {"messages": CHAT, "max_tokens": 5, "max_completion_tokens": 4},
            "max_tokens=5, max_completion_tokens=4: give one",
        ),
    ],
)
def test_bad_chats(server: Server, body: Any, message: str) -> None:
    code, found = post(server, "/v1/chat/completions", body)
    assert code == 400 and message in found["error"]["message"]


def test_what_changes_no_completion_may_be_there(client: Any) -> None:
    client.completions.create(model="policy", prompt="a", user="me", best_of=1, echo=False, logit_bias={})
    client.chat.completions.create(
        model="policy", messages=CHAT, max_tokens=1, store=False, parallel_tool_calls=True, tool_choice="auto"
    )
    defaults = {"skip_special_tokens": True, "include_stop_str_in_output": False, "length_penalty": 1.0, "priority": 0}
    others = {"spaces_between_special_tokens": False, "stream_options": {"include_obfuscation": False}}
    client.completions.create(model="policy", prompt="a", max_tokens=1, extra_body=defaults | others)


@pytest.mark.parametrize("text", ["a" * 300, "a" * 40_000])  # before it is tokenised
def test_a_conversation_that_is_too_long_has_openais_code(client: Any, text: str) -> None:
    """By which an agent tells that from a fault of its own."""
    for ask in (
        lambda: client.completions.create(model="policy", prompt=text),
        lambda: client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}]),
    ):
        with pytest.raises(openai.BadRequestError, match="max_model_len") as refused:
            ask()
        assert refused.value.code == "context_length_exceeded"


def test_where_nothing_can_listen(engine: RolloutEngine, server: Server) -> None:
    for port in (int(server.url.rpartition(":")[2]), 70000, "http"):
        with pytest.raises(InvalidConfigError, match="nothing can listen at"):
            serve(engine, port=port)
    with pytest.raises(InvalidConfigError, match="give another host or port"):
        serve(engine, host="192.0.2.1", port=0)  # an address of documents, and no machine's


def test_an_ipv6_address(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine has none: what would be asked of its system."""
    asked: list[Any] = []

    def create_server(address: Any, family: int) -> socket.socket:
        asked.append((address[0], family))
        return listen(("127.0.0.1", address[1]), family=socket.AF_INET)

    listen = socket.create_server
    monkeypatch.setattr(socket, "create_server", create_server)
    with serve(engine, host="::1", port=0) as server:
        assert asked == [("::1", socket.AF_INET6)] and re.fullmatch(r"http://\[::1\]:\d+", server.url)


def test_what_is_no_engine() -> None:
    with pytest.raises(
        InvalidConfigError, match=r"^serve takes a RolloutEngine, and this is a Llama.*attach\(trainer\)"
    ):
        serve(text_model(), port=0)


@pytest.mark.parametrize("key", ["", " ", "secret\n", "sécret", 5])
def test_a_key_that_no_request_could_bring(engine: RolloutEngine, key: Any) -> None:
    with pytest.raises(InvalidConfigError, match="^api_key is empty, or has") as error:
        serve(engine, port=0, api_key=key)
    assert "secret" not in str(error.value)


def test_a_key(engine: RolloutEngine) -> None:
    with serve(engine, port=0, api_key="secret") as server:
        for key in (None, "another", "sécret"):
            status, body = post(server, "/v1/completions", {"prompt": "a"}, key)
            assert status == 401 and "API key" in body["error"]["message"]
        assert client_of(server, api_key="secret").completions.create(model="policy", prompt="a").choices
        with urllib.request.urlopen(f"{server.url}/health", timeout=60) as answer:
            assert not json.load(answer)["is_sleeping"]


def test_what_is_not_served(server: Server, client: Any) -> None:
    """In the form of OpenAI's errors."""
    with pytest.raises(openai.NotFoundError, match="model='gpt': there are policy"):
        client.models.retrieve("gpt")
    for path, status in (("/v1/embeddings", 404), ("/v1/models", 405)):
        code, found = post(server, path, {})
        assert code == found["error"]["code"] == status and path in found["error"]["message"]


def test_a_request_that_fails() -> None:
    model = text_model()
    with (
        text_engine(model) as engine,
        serve(engine, port=0) as server,
    ):
        with torch.no_grad():
            model.lm_head.weight.fill_(float("nan"))
        status, body = post(server, "/v1/completions", {"prompt": "a"})
        assert status == 500 and "NaN" in body["error"]["message"]
        with pytest.raises(openai.APIError, match="NaN"):
            list(client_of(server).completions.create(model="policy", prompt="a", stream=True))


def test_a_step_that_fails(
    engine: RolloutEngine, server: Server, client: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "stoker"):
        patched.setattr(engine.core, "_launch", fail)
        status, body = post(server, "/v1/completions", {"prompt": "a"})
    assert status == 500 and "submit it again" in body["error"]["message"]
    assert any("out of luck" in record.getMessage() for record in caplog.records)
    assert client.completions.create(model="policy", prompt="a").choices
