"""The HTTP server: OpenAI's own client gets what the engine gives, whatever trains or goes away meanwhile."""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import two_adapters
from families import make_model
from small_engine import TEXT_VOCAB, only, tokenizer
from tokenizer_kinds import CORPUS, KINDS
from tokenizer_kinds import tokenizer as tokenizer_of_kind

from stoker.rollout import EngineConfig, InvalidConfigError, RolloutEngine, SamplingParams

pytest.importorskip("openai", reason="OpenAI's client is not installed")
pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")

import openai

from stoker.integrations import cli
from stoker.integrations.openai_api import TextStream
from stoker.integrations.server import Server, serve

CONFIG = EngineConfig(kv_cache_memory="4MiB", max_model_len=256, max_num_seqs=16)
CHAT = [{"role": "user", "content": "What is 2 + 2?"}]
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
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
LONG = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def engine() -> Iterator[RolloutEngine]:
    with RolloutEngine(make_model("llama", vocab_size=TEXT_VOCAB), config=CONFIG, tokenizer=tokenizer()) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: RolloutEngine) -> Iterator[Server]:
    with serve(engine, port=0) as server:
        yield server


def client_of(server: Server, **options: Any) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", **{"api_key": "-", "max_retries": 0, "timeout": 60} | options)


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return client_of(server)


def post(server: Server, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
    """Status and JSON of what the server answers."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(server.url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def until(holds: Any) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def idle(engine: RolloutEngine) -> bool:
    return not engine.core.has_work


# -- what is answered ---------------------------------------------------------------------------------------------------


def test_completions_are_the_engines(engine: RolloutEngine, client: Any) -> None:
    prompts: list[Any] = ["abc", "defg"]
    answer = client.completions.create(
        model="policy", prompt=prompts, max_tokens=12, n=2, seed=3, temperature=0.7, logprobs=2,
        extra_body={"return_token_ids": True, "top_k": 40},
    )  # fmt: skip
    params = SamplingParams(max_tokens=12, n=2, seed=3, temperature=0.7, logprobs=2, top_k=40)
    expected = engine.generate_batch(prompts, params)
    rows = [(o, c) for o in expected for c in o.completions]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice, (output, completion) in zip(answer.choices, rows, strict=True):
        assert choice.text == completion.text and choice.finish_reason == completion.finish_reason
        assert choice.token_ids == completion.token_ids and choice.prompt_token_ids == output.prompt_token_ids
        assert choice.weight_versions == completion.weight_versions
        assert choice.logprobs.token_logprobs == pytest.approx(completion.logprobs, abs=1e-5)
        assert choice.logprobs.tokens == [tokenizer().decode([t]) for t in completion.token_ids]
        for top, others in zip(choice.logprobs.top_logprobs, completion.top_logprobs, strict=True):
            assert max(top.values()) == pytest.approx(max(others.values()), abs=1e-5)
    usage = answer.usage
    assert usage.prompt_tokens == 7 and usage.completion_tokens == sum(len(c.token_ids) for _, c in rows)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("prompt", ["abc", [5, 6, 7], [[5, 6, 7], [8]], ["a", [5, 6]]], ids=str)
def test_prompts_of_every_form(engine: RolloutEngine, client: Any, prompt: Any) -> None:
    several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    answer = client.completions.create(model="policy", prompt=prompt, temperature=0)
    expected = engine.generate_batch(several, SamplingParams(temperature=0))
    assert [choice.text for choice in answer.choices] == [o.completions[0].text for o in expected]


def test_a_chat_is_the_engines(engine: RolloutEngine, client: Any) -> None:
    answer = client.chat.completions.create(
        model="policy", messages=CHAT, max_completion_tokens=9, seed=5, logprobs=True, top_logprobs=3
    )
    (choice,) = answer.choices
    expected = only(engine.generate_batch([CHAT], SamplingParams(max_tokens=9, seed=5, logprobs=3)))
    assert choice.message.role == "assistant" and choice.message.content == expected.text
    content = choice.logprobs.content
    assert [c.logprob for c in content] == pytest.approx(expected.logprobs, abs=1e-5)
    for one, others in zip(content, expected.top_logprobs, strict=True):
        assert [t.logprob for t in one.top_logprobs] == pytest.approx(list(others.values()), abs=1e-5)
    without_limit = client.chat.completions.create(model="policy", messages=CHAT, temperature=0)
    assert without_limit.usage.total_tokens == CONFIG.max_model_len or without_limit.choices[0].finish_reason == "stop"


def test_messages_as_templates_take_them(engine: RolloutEngine, client: Any) -> None:
    """Parts of text are text, no content is none, and arguments of tools are objects, as a template prints them."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}:{{ c.function.arguments.x }}{% endfor %}{% endfor %}{{ tools | length if tools else '' }}"
        "{{ mood }}{% if add_generation_prompt %}<bot>{% endif %}"
    )
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"x": 3}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    before, engine.tokenizer.chat_template = engine.tokenizer.chat_template, template
    try:
        for extra, expected in (
            ({"tools": TOOLS}, "<user>a\nb<assistant>add:3<tool>31<bot>"),
            ({"tools": TOOLS, "tool_choice": "none"}, "<user>a\nb<assistant>add:3<tool>3<bot>"),
            ({"extra_body": {"chat_template_kwargs": {"mood": "!"}}}, "<user>a\nb<assistant>add:3<tool>3!<bot>"),
            ({"extra_body": {"add_generation_prompt": False}}, "<user>a\nb<assistant>add:3<tool>3"),
            ({"extra_body": {"continue_final_message": True}}, "<user>a\nb<assistant>add:3<tool>3"),
        ):
            body = {"return_token_ids": True, **extra.pop("extra_body", {})}
            answer = client.chat.completions.create(
                model="policy", messages=messages, max_tokens=1, extra_body=body, **extra
            )
            assert engine.tokenizer.decode(answer.choices[0].prompt_token_ids) == expected
    finally:
        engine.tokenizer.chat_template = before


def test_a_stream_is_the_whole(client: Any) -> None:
    asked = {"model": "policy", "prompt": ["abc", "d"], "n": 2, "seed": 9, "max_tokens": 40}
    whole = client.completions.create(**asked, logprobs=0, extra_body={"return_token_ids": True})
    stream = client.completions.create(
        **asked, logprobs=0, stream=True, stream_options={"include_usage": True}, extra_body={"return_token_ids": True}
    )
    text, ids, logprobs, ends = [""] * 4, [[], [], [], []], [[], [], [], []], {}
    events = list(stream)
    for event in events[:-1]:
        (choice,) = event.choices
        text[choice.index] += choice.text
        ids[choice.index] += choice.token_ids
        if choice.logprobs is not None:
            logprobs[choice.index] += choice.logprobs.token_logprobs
        if choice.finish_reason is not None:
            ends[choice.index] = choice.finish_reason
    assert len(events) > 9 and events[-1].usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        assert text[choice.index] == choice.text and ids[choice.index] == choice.token_ids
        assert logprobs[choice.index] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-5)
        assert ends[choice.index] == choice.finish_reason


def test_a_streamed_chat_is_the_whole(client: Any) -> None:
    asked = {"model": "policy", "messages": CHAT, "seed": 2, "max_tokens": 30}
    whole = client.chat.completions.create(**asked)
    events = list(client.chat.completions.create(**asked, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content for event in events) == whole.choices[0].message.content
    assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [1, 3])
def test_text_as_it_grows(kind: str, step: int) -> None:
    """Pieces make the whole text, whatever a tokenizer does with spaces, bytes and special tokens."""
    made = tokenizer_of_kind(kind)
    draws = torch.Generator().manual_seed(step)
    pieces_of = [token for text in CORPUS[:10] for token in [made(text)["input_ids"]]]
    for _ in range(30):
        order = torch.randint(0, len(pieces_of), (6,), generator=draws).tolist()
        ids = [token for at in order for token in pieces_of[at]]
        if kind not in ("llama", "gemma"):  # whose bytes in a row are all lost where one of them is wrong
            ids += torch.randint(0, len(made), (60,), generator=draws).tolist()
        stream, pieces = TextStream(made, ["never there"]), []
        for at in range(0, len(ids), step):
            pieces.append(stream.add(ids[at : at + step]))
        whole = made.decode(ids, skip_special_tokens=True)
        assert "".join(pieces) == whole[: sum(map(len, pieces))]
        assert "".join(pieces) + stream.rest(whole) == whole
    assert sum(map(len, pieces)) > len(whole) // 2  # and not all of it at the end


def test_no_piece_of_a_stop_string_is_sent(engine: RolloutEngine, client: Any) -> None:
    asked = {"model": "policy", "prompt": "abc", "max_tokens": 30, "stop": ["789"]}
    events = list(
        client.completions.create(
            **asked, stream=True, extra_body={"structured_outputs": {"regex": "1234567890"}, "ignore_eos": False}
        )
    )
    assert "".join(event.choices[0].text for event in events) == "123456"
    assert events[-1].choices[0].finish_reason == "stop" and events[-1].choices[0].stop_reason == "789"


@pytest.mark.parametrize(
    ("outputs", "texts"), [({"regex": "(yes|no)!"}, {"yes!", "no!"}), ({"choice": ["a.b", "c|d"]}, {"a.b", "c|d"})]
)
def test_structured_outputs(client: Any, outputs: Any, texts: set[str]) -> None:
    body = {"structured_outputs": outputs}
    answer = client.completions.create(model="policy", prompt="abc", n=8, max_tokens=9, extra_body=body)
    assert {choice.text for choice in answer.choices} <= texts


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
    finally:
        del engine.tokenizer.response_template


def test_adapters_by_name() -> None:
    model = two_adapters()
    with RolloutEngine(model, config=CONFIG) as engine, serve(engine, port=0, name="live") as server:
        client = client_of(server)
        assert [m.id for m in client.models.list()] == ["live", *engine.adapters]
        params = SamplingParams(temperature=0, max_tokens=8)
        for name, adapter in (("live", "default"), ("default", "default"), ("other", "other")):
            answer = client.completions.create(
                model=name, prompt=[5, 6, 7], temperature=0, max_tokens=8, extra_body={"return_token_ids": True}
            )
            expected = only(engine.generate_batch([[5, 6, 7]], params, adapter=adapter))
            assert answer.choices[0].token_ids == expected.token_ids and answer.choices[0].text == ""
        status, body = post(server, "/v1/completions", {"prompt": "abc"})
        assert status == 400 and "need a tokenizer" in body["error"]["message"]


def test_images_in_a_chat() -> None:
    from processors import make_model, make_processor, picture

    image, data = picture(1, 16, 24), io.BytesIO()
    image.save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    words = {"type": "text", "text": "a"}
    config = EngineConfig(kv_cache_memory="4MiB", max_model_len=128)
    with (
        RolloutEngine(make_model(), config=config, tokenizer=make_processor()) as engine,
        serve(engine, port=0) as server,
    ):
        chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, words]}]
        answer = client_of(server).chat.completions.create(
            model="policy", messages=chat, max_tokens=6, temperature=0, logprobs=True
        )
        own = [{"role": "user", "content": [{"type": "image", "image": image}, words]}]
        expected = only(engine.generate_batch([own], SamplingParams(max_tokens=6, temperature=0)))
        got = [c.logprob for c in answer.choices[0].logprobs.content]
        assert answer.choices[0].message.content == expected.text
        assert got == pytest.approx(expected.logprobs, abs=1e-5)
        chat[0]["content"][0]["image_url"]["url"] = __file__  # a file of this machine
        status, body = post(server, "/v1/chat/completions", {"messages": chat})
        assert status == 400 and "image_url with a data:" in body["error"]["message"]


def test_clients_at_once_get_what_they_get_alone(engine: RolloutEngine, server: Server, client: Any) -> None:
    def ask(i: int) -> Any:
        asked = {"model": "policy", "prompt": "x" * i, "seed": i, "max_tokens": 4 + 3 * i}
        if i % 3:
            return client.completions.create(**asked).choices[0].text
        return "".join(event.choices[0].text for event in client.completions.create(**asked, stream=True))

    alone = {i: ask(i) for i in range(1, 25)}
    together: dict[int, str] = {}
    threads = [threading.Thread(target=lambda i=i: together.update({i: ask(i)})) for i in alone]
    for thread in threads:
        thread.start()
    own = engine.generate_batch(["abc"], SamplingParams(seed=1, max_tokens=30))  # of the trainer, in the same batch
    for thread in threads:
        thread.join(timeout=60)
    assert together == alone
    assert (
        only(own).text == client.completions.create(model="policy", prompt="abc", seed=1, max_tokens=30).choices[0].text
    )
    engine.core.scheduler.check()


# -- what is refused ----------------------------------------------------------------------------------------------------


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
        ({"prompt": "a" * 300}, 400, "prompt 0"),
        ({"prompt": "a", "model": "gpt"}, 404, "model='gpt': there are policy"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature=-1"),
        ({"prompt": "a", "n": 0}, 400, "n=0"),
        ({"prompt": "a", "max_tokens": "many"}, 400, "max_tokens='many'"),
        ({"prompt": "a", "best_of": 3}, 400, "best_of=3: the server does not do that"),
        ({"prompt": "a", "echo": True}, 400, "echo=True: the server does not do that"),
        ({"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias="),
        ({"prompt": "a", "stream": "yes"}, 400, "stream='yes': give true or false"),
        ({"prompt": "a", "stream": True, "logprobs": 2}, 400, "a stream has no top log-probabilities"),
        ({"prompt": "a", "stream_options": {"x": 1}}, 400, "stream_options="),
        ({"prompt": "a", "structured_outputs": {"json": {}}}, 400, "structured_outputs="),
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
        ({"messages": CHAT, "response_format": {"type": "json_object"}}, "response_format="),
        ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs without logprobs"),
        ({"messages": CHAT, "chat_template_kwargs": 3}, "chat_template_kwargs=3"),
        ({"messages": CHAT, "prompt": "a"}, "'prompt' is no field"),
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


def test_where_nothing_can_listen(engine: RolloutEngine, server: Server) -> None:
    for port in (int(server.url.rpartition(":")[2]), 70000, "http"):
        with pytest.raises(InvalidConfigError, match="nothing can listen at"):
            serve(engine, port=port)


def test_a_key(engine: RolloutEngine) -> None:
    with serve(engine, port=0, api_key="secret") as server:
        for key in (None, "another", "sécret"):
            status, body = post(server, "/v1/completions", {"prompt": "a"}, key)
            assert status == 401 and "API key" in body["error"]["message"]
        assert client_of(server, api_key="secret").completions.create(model="policy", prompt="a").choices


# -- what happens meanwhile ---------------------------------------------------------------------------------------------


def test_an_engine_that_sleeps_says_so(engine: RolloutEngine, server: Server, client: Any) -> None:
    with engine.sleeping():
        status, body = post(server, "/v1/completions", {"prompt": "a"})
        assert status == 503 and "the engine is asleep" in body["error"]["message"]
    patient = client_of(server, max_retries=5)
    engine.sleep()
    threading.Timer(0.5, engine.wake_up).start()
    assert patient.completions.create(model="policy", prompt="a").choices


@pytest.mark.parametrize("stream", [False, True])
def test_new_weights_under_way(stream: bool) -> None:
    """A pause holds requests; they go on under the new weights, and new ones wait."""
    model = make_model("llama", vocab_size=TEXT_VOCAB)
    with (
        RolloutEngine(model, config=CONFIG, tokenizer=tokenizer()) as engine,
        serve(engine, port=0) as server,
    ):
        answers: list[Any] = []

        def ask() -> None:
            body = {"ignore_eos": True, "return_token_ids": True}
            answer = client_of(server).completions.create(
                model="policy", prompt="abc", max_tokens=200, extra_body=body, stream=stream
            )
            events = list(answer) if stream else [answer]
            answers.append([v for event in events for v in event.choices[0].weight_versions])

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: any(r.num_output > 5 for r in engine.core.under_way))
        engine.pause()
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
        assert engine.update_weights() == 1
        time.sleep(0.1)
        assert thread.is_alive()
        engine.resume()
        thread.join(timeout=60)
        (versions,) = answers
        assert len(versions) == 200 and versions == sorted(versions) and set(versions) == {0, 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away(engine: RolloutEngine, server: Server, stream: bool) -> None:
    """Its request ends, and others go on."""
    body = json.dumps({"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": stream, "n": 16}).encode()
    before = engine.stats().finished_requests
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        until(lambda: any(r.num_output > 5 for r in engine.core.under_way))
    until(lambda: idle(engine))
    assert engine.stats().finished_requests - before < 16
    engine.core.scheduler.check()
    assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks


def test_a_request_that_fails() -> None:
    model = make_model("llama", vocab_size=TEXT_VOCAB)
    with (
        RolloutEngine(model, config=CONFIG, tokenizer=tokenizer()) as engine,
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


def test_closing(engine: RolloutEngine) -> None:
    """Whoever waits gets what there is, and nothing of the server is left."""
    answers: list[Any] = []
    before = set(threading.enumerate())
    server = serve(engine, port=0)

    def ask(stream: bool) -> None:
        answer = client_of(server).completions.create(model="policy", prompt="abc", n=16, stream=stream, **LONG)
        events = list(answer) if stream else [answer]
        answers.append([choice.finish_reason for choice in events[-1].choices])

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    until(lambda: sum(r.num_output > 2 for r in engine.core.under_way) >= 16 and len(engine.core.under_way) == 32)
    server.close()
    server.close()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(answers) == [["abort"], ["abort"] * 16]
    until(lambda: set(threading.enumerate()) <= before)
    assert idle(engine)
    engine.generate_batch(["abc"], SamplingParams(max_tokens=2)).raise_for_errors()


# -- control ------------------------------------------------------------------------------------------------------------


def test_control_is_not_served_unless_asked_for(server: Server) -> None:
    for path in ("/pause", "/sleep", "/update_weights", "/v1/load_lora_adapter"):
        request = urllib.request.Request(server.url + path, b"{}")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(request, timeout=60)


def test_a_trainer_elsewhere(tmp_path: Path) -> None:
    """It holds the requests, has new weights and adapters read from files, and gives the memory back and takes it."""
    model = make_model("llama", vocab_size=TEXT_VOCAB)
    other = make_model("llama", vocab_size=TEXT_VOCAB)
    with torch.no_grad():
        other.lm_head.weight.mul_(-1.0)
    other.save_pretrained(tmp_path / "new")
    peft = pytest.importorskip("peft")
    from adapted import lora, shake

    adapted = peft.get_peft_model(make_model("llama", vocab_size=TEXT_VOCAB), lora())
    shake(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    with (
        RolloutEngine(model, config=CONFIG, tokenizer=tokenizer()) as engine,
        serve(engine, port=0, control=True) as server,
    ):
        client = client_of(server)
        thread = threading.Thread(target=lambda: client.completions.create(model="policy", prompt="abc", **LONG))
        thread.start()
        until(lambda: any(r.num_output > 5 for r in engine.core.under_way))
        status, body = post(server, "/sleep", {})
        assert status == 409 and "under way" in body["error"]["message"]
        assert post(server, "/pause", {"mode": "keep"}) == (
            200,
            {"weight_version": 0, "is_sleeping": False, "is_paused": True},
        )
        assert post(server, "/update_weights", {"path": str(tmp_path / "new"), "version": 7})[1]["weight_version"] == 7
        assert thread.is_alive()
        assert post(server, "/resume", {"recompute": True})[1]["is_paused"] is False
        thread.join(timeout=60)
        assert (
            client.completions.create(model="policy", prompt="abc", temperature=0).choices[0].text
            == only(
                RolloutEngine(other, config=CONFIG, tokenizer=tokenizer()).generate_batch(
                    ["abc"], SamplingParams(temperature=0)
                )
            ).text
        )
        assert (
            post(server, "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": str(tmp_path / "adapter")})[0] == 200
        )
        assert client.completions.create(model="a", prompt="abc").choices
        assert post(server, "/v1/unload_lora_adapter", {"lora_name": "a"})[0] == 200
        assert post(server, "/v1/completions", {"model": "a", "prompt": "abc"})[0] == 404
        assert post(server, "/sleep", {"level": 2})[1]["is_sleeping"] is True and engine.is_sleeping
        assert post(server, "/v1/completions", {"prompt": "abc"})[0] == 503
        assert post(server, "/wake_up", {})[1]["is_sleeping"] is False
        for path, bad, message in (
            ("/update_weights", {"path": str(tmp_path / "nowhere")}, "give a safetensors file"),
            ("/update_weights", {}, "give a safetensors file"),
            ("/update_weights", {"path": str(tmp_path / "new"), "version": 3}, "version=3"),
            ("/pause", {"mode": "later"}, "mode='later'"),
            ("/pause", {"mood": "keep"}, "give an object with mode (str)"),
            ("/sleep", {"level": True}, "give an object with level (int)"),
            ("/v1/load_lora_adapter", {"lora_name": "policy", "lora_path": "x"}, "is the served model's"),
            ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "nowhere"}, "nowhere"),
            ("/v1/unload_lora_adapter", {"lora_name": "a"}, "adapter"),
        ):  # fmt: skip
            status, body = post(server, path, bad)
            assert 400 <= status < 500 and message in body["error"]["message"], body
        assert client.completions.create(model="policy", prompt="abc").choices


# -- stoker serve -------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    """It says where it listens, serves, and ends at Ctrl-C."""
    from cli_setup import make_folder

    code = "import sys; from stoker.integrations.cli import main; sys.exit(main())"
    command = ["serve", make_folder(tmp_path), "--port", "0", "--name", "m", "--kv-cache-memory", "1MiB"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, *command],
        env={**os.environ, "STOKER_API_KEY": "key"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening at http://127.0.0.1:")
        base_url = f"{line.split()[-1]}/v1"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=base_url, api_key="-").models.list()
        client = openai.OpenAI(base_url=base_url, api_key="key")
        assert client.chat.completions.create(model="m", messages=CHAT, max_tokens=4).usage.completion_tokens
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()


def test_the_command_without_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "stoker.integrations.server")
    assert cli.main(["serve", "nowhere"]) == 1
    assert "stoker serve needs uvicorn, which is not installed: pip install 'stoker[server]'" in capsys.readouterr().err
