"""The HTTP server: OpenAI's own client gets what the engine gives."""

from __future__ import annotations

import base64
import copy
import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from adapted import two_adapters
from server_setup import (  # noqa: F401 - fixtures among them
    CHAT,
    CONFIG,
    TOOLS,
    a_client,
    a_server,
    an_engine,
    client_of,
    openai,
    post,
    text_model,
)
from small_engine import encode, only, tokenizer
from tokenizers.processors import TemplateProcessing

from stoker.integrations.server import Server, serve
from stoker.rollout import EngineConfig, InvalidRequestError, RolloutEngine, SamplingParams


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


def test_what_cannot_be_sampled_has_a_log_probability_that_json_can_hold(client: Any) -> None:
    asked: dict[str, Any] = {
        "model": "policy",
        "max_tokens": 2,
        "extra_body": {"top_k": 1, "logprobs_mode": "processed"},
    }
    (choice,) = client.completions.create(prompt="abc", logprobs=2, **asked).choices
    assert [sorted(top.values()) for top in choice.logprobs.top_logprobs] == [[-9999, 0]] * 2
    (choice,) = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **asked).choices
    assert [[t.logprob for t in one.top_logprobs] for one in choice.logprobs.content] == [[0, -9999]] * 2


def test_a_token_that_is_part_of_a_character_has_no_bytes_of_another(client: Any) -> None:
    """Those of the sign that stands for it are none of the text's."""
    (choice,) = client.chat.completions.create(
        model="policy", messages=CHAT, logprobs=True, extra_body={"structured_outputs": {"choice": ["é"]}}
    ).choices
    assert choice.message.content == "é"
    assert [one.bytes for one in choice.logprobs.content] == [None, None, [*b"<eos>"]]


def test_messages_as_templates_take_them(engine: RolloutEngine, client: Any) -> None:
    """Parts of text are text, no content is none, and arguments of tools are objects, as a template prints them."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}:{{ c.function.arguments.x }}{% endfor %}{% endfor %}{{ tools | length if tools else '' }}"
        "{{ mood }}{{ name }}{{ chat }}{{ tokenizer }}{% if add_generation_prompt %}<bot>{% endif %}"
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
            # Also by names that functions on the way to the template have for arguments of theirs.
            (
                {"extra_body": {"chat_template_kwargs": {"mood": "", "name": "N", "chat": "C", "tokenizer": "T"}}},
                "<user>a\nb<assistant>add:3<tool>3NCT<bot>",
            ),
            ({"extra_body": {"add_generation_prompt": False}}, "<user>a\nb<assistant>add:3<tool>3"),
            ({"extra_body": {"continue_final_message": True}}, "<user>a\nb<assistant>add:3<tool>3"),
        ):
            body = {"return_token_ids": True, **extra.pop("extra_body", {})}
            answer = client.chat.completions.create(
                model="policy", messages=messages, max_tokens=1, extra_body=body, **extra
            )
            assert engine.tokenizer.decode(answer.choices[0].prompt_token_ids) == expected
        for written in ("{x: 3}", "1" * 5000, "[" * 100_000):  # no JSON, or none that Python reads: as it is
            call["function"]["arguments"] = written
            answer = client.chat.completions.create(
                model="policy", messages=messages, max_tokens=1, extra_body={"return_token_ids": True}
            )
            assert "<assistant>add:<tool>3" in engine.tokenizer.decode(answer.choices[0].prompt_token_ids)
    finally:
        engine.tokenizer.chat_template = before


def test_a_stream_is_the_whole(client: Any) -> None:
    asked = {"model": "policy", "prompt": ["abc", "d"], "n": 2, "seed": 9, "max_tokens": 40}
    whole = client.completions.create(**asked, logprobs=2, extra_body={"return_token_ids": True})
    stream = client.completions.create(
        **asked, logprobs=2, stream=True, stream_options={"include_usage": True}, extra_body={"return_token_ids": True}
    )
    text, ends, (ids, logprobs, top) = [""] * 4, {}, ([[], [], [], []] for _ in range(3))
    events = list(stream)
    for event in events[:-1]:
        (choice,) = event.choices
        text[choice.index] += choice.text
        ids[choice.index] += choice.token_ids
        if choice.logprobs is not None:
            logprobs[choice.index] += choice.logprobs.token_logprobs
            top[choice.index] += choice.logprobs.top_logprobs
        if choice.finish_reason is not None:
            ends[choice.index] = choice.finish_reason
    assert len(events) > 9 and events[-1].usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        assert text[choice.index] == choice.text and ids[choice.index] == choice.token_ids
        assert logprobs[choice.index] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-5)
        for one, other in zip(top[choice.index], choice.logprobs.top_logprobs, strict=True):
            assert one and one == pytest.approx(other, abs=1e-5)
        assert ends[choice.index] == choice.finish_reason


def test_a_streamed_chat_is_the_whole(client: Any) -> None:
    asked = {"model": "policy", "messages": CHAT, "seed": 2, "max_tokens": 30}
    whole = client.chat.completions.create(**asked)
    events = list(client.chat.completions.create(**asked, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content for event in events) == whole.choices[0].message.content
    assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_no_piece_of_a_stop_string_is_sent(engine: RolloutEngine, client: Any) -> None:
    asked = {"model": "policy", "prompt": "abc", "max_tokens": 30, "stop": ["789"]}
    events = list(
        client.completions.create(
            **asked, stream=True, extra_body={"structured_outputs": {"regex": "1234567890"}, "ignore_eos": False}
        )
    )
    assert "".join(event.choices[0].text for event in events) == "123456"
    assert events[-1].choices[0].finish_reason == "stop" and events[-1].choices[0].stop_reason == "789"


def test_text_goes_on_over_a_stop_string_before_min_tokens(client: Any) -> None:
    asked = {"model": "policy", "prompt": "abc", "max_tokens": 30, "stop": ["3"]}
    body = {"structured_outputs": {"regex": "12345678901234567890"}, "min_tokens": 5}
    events = list(client.completions.create(**asked, stream=True, extra_body=body))
    assert "".join(event.choices[0].text for event in events[:-1]) == "123456789012"
    assert events[-1].choices[0].text == "" and events[-1].choices[0].stop_reason == "3"


@pytest.mark.parametrize(
    ("outputs", "texts"), [({"regex": "(yes|no)!"}, {"yes!", "no!"}), ({"choice": ["a.b", "c|d"]}, {"a.b", "c|d"})]
)
def test_structured_outputs(client: Any, outputs: Any, texts: set[str]) -> None:
    body = {"structured_outputs": outputs}
    answer = client.completions.create(model="policy", prompt="abc", n=8, max_tokens=9, extra_body=body)
    assert {choice.text for choice in answer.choices} <= texts


@pytest.mark.parametrize("by", ["structured_outputs", "response_format"])
def test_json_of_a_schema(client: Any, by: str) -> None:
    pytest.importorskip("outlines_core")
    properties = {"x": {"type": "integer"}, "y": {"type": "string", "pattern": "^(a|b)$"}}
    schema = {"type": "object", "properties": properties, "required": ["x", "y"]}
    asked = (
        {"json": schema} if by == "structured_outputs" else {"type": "json_schema", "json_schema": {"schema": schema}}
    )
    answer = client.chat.completions.create(
        model="policy", messages=CHAT, n=6, max_tokens=100, seed=1, extra_body={by: asked, "top_k": 3}
    )
    ended = [choice.message.content for choice in answer.choices if choice.finish_reason == "stop"]
    assert ended
    for text in ended:
        found = json.loads(text)
        assert set(found) == {"x", "y"} and isinstance(found["x"], int) and found["y"] in "ab"


def test_adapters_by_name() -> None:
    model = two_adapters()
    with RolloutEngine(model, config=CONFIG) as engine, serve(engine, port=0, name="live") as server:
        client = client_of(server)
        assert [m.id for m in client.models.list()] == ["live", *sorted(engine.adapters)]
        params = SamplingParams(temperature=0, max_tokens=8)
        for name, adapter in (("live", "default"), ("default", "default"), ("other", "other")):
            answer = client.completions.create(
                model=name, prompt=[5, 6, 7], temperature=0, max_tokens=8, extra_body={"return_token_ids": True}
            )
            expected = only(engine.generate_batch([[5, 6, 7]], params, adapter=adapter))
            assert answer.choices[0].token_ids == expected.token_ids and answer.choices[0].text == ""
        status, body = post(server, "/v1/completions", {"prompt": "abc"})
        assert status == 400 and "need a tokenizer" in body["error"]["message"]


def test_the_model_with_an_adapter() -> None:
    with RolloutEngine(two_adapters(), config=CONFIG) as engine:
        params = SamplingParams(temperature=0, max_tokens=8)
        for adapter in ("other", None):
            with serve(engine, port=0, adapter=adapter) as server:
                answer = client_of(server).completions.create(
                    model="policy", prompt=[5, 6, 7], temperature=0, max_tokens=8, extra_body={"return_token_ids": True}
                )
            expected = only(engine.generate_batch([[5, 6, 7]], params, adapter=adapter))
            assert answer.choices[0].token_ids == expected.token_ids
        with pytest.raises(InvalidRequestError, match="adapter='third': there are default, other"):
            serve(engine, port=0, adapter="third")


def test_models_by_name(client: Any) -> None:
    model = client.models.retrieve("policy")
    assert model.id == "policy" and model.max_model_len == 256


def test_ids_are_those_that_a_request_samples_from(
    engine: RolloutEngine, server: Server, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, found = post(server, "/tokenize", {"model": "policy", "prompt": "abc"})
    assert status == 200 and found == {"count": 3, "max_model_len": 256, "tokens": encode("abc")}
    chat = {"messages": [*CHAT, {"role": "assistant", "content": "It is"}], "tools": TOOLS}
    for more in ({}, {"add_generation_prompt": False, "continue_final_message": True}):
        _, found = post(server, "/tokenize", chat | more)
        answer = client.chat.completions.create(
            model="policy", max_tokens=1, extra_body=more | {"return_token_ids": True}, **chat
        )
        assert found["tokens"] == answer.choices[0].prompt_token_ids
    assert post(server, "/tokenize", {"prompt": "a" * 300})[1]["count"] == 300  # more than fit
    own = copy.deepcopy(engine.tokenizer)
    own.backend_tokenizer.post_processor = TemplateProcessing(single="<bot> $A", special_tokens=[("<bot>", 258)])
    for name in ("tokenizer", "processor"):
        monkeypatch.setattr(engine, name, own)
    for given, ids in (({}, [258, *encode("a")]), ({"add_special_tokens": False}, encode("a"))):
        assert post(server, "/tokenize", {"prompt": "a"} | given)[1]["tokens"] == ids
    for wrong, message in (
        ({}, "prompt=None: give text"),
        ({"prompt": ["a", "b"]}, "prompt=['a', 'b']: give text, or messages"),
        ({"prompt": [1]}, "prompt=[1]: give text, or messages"),
        ({"prompt": "a", "n": 2}, "'n' is no field"),
        ({"prompt": "a", "model": "gpt"}, "model='gpt': there are policy"),
    ):
        assert message in post(server, "/tokenize", wrong)[1]["error"]["message"]


def test_a_chat_without_a_limit_ends_where_the_cache_does() -> None:
    config = EngineConfig(kv_cache_memory="64KiB", max_model_len=256, max_num_seqs=2)
    with RolloutEngine(text_model(), config=config, tokenizer=tokenizer()) as engine, serve(engine, port=0) as server:
        held = engine.stats().num_kv_blocks * engine.config.block_size
        answer = client_of(server).chat.completions.create(
            model="policy", messages=CHAT, extra_body={"ignore_eos": True}
        )
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens > 0 and held - 16 < answer.usage.total_tokens <= held < 256
        with pytest.raises(openai.BadRequestError, match="may grow to 256 tokens and the KV cache holds"):
            client_of(server).chat.completions.create(model="policy", messages=CHAT, max_tokens=1000)


def test_images_in_a_chat(tmp_path: Path) -> None:
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
        # Nor where a prompt is no chat, but the engine would take it for one.
        image.save(tmp_path / "private.png")
        part = {"type": "image", "path": str(tmp_path / "private.png")}
        status, body = post(server, "/v1/completions", {"prompt": [[{"role": "user", "content": [part, words]}]]})
        assert status == 400 and "give text, a list of token ids" in body["error"]["message"]


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
