"""A served engine, OpenAI's client of it, and bare requests, for the tests of the HTTP server."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from families import make_model
from small_engine import TEXT_VOCAB, tokenizer

from stoker.rollout import EngineConfig, RolloutEngine

pytest.importorskip("openai", reason="OpenAI's client is not installed")
pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")

import openai

from stoker.integrations.server import Server, serve

CONFIG = EngineConfig(kv_cache_memory="4MiB", max_model_len=256, max_num_seqs=16)
CHAT = [{"role": "user", "content": "What is 2 + 2?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
LONG = {"max_tokens": 240, "extra_body": {"ignore_eos": True}}


def text_engine(model: Any = None) -> RolloutEngine:
    return RolloutEngine(model or text_model(), config=CONFIG, tokenizer=tokenizer())


def text_model() -> Any:
    return make_model("llama", vocab_size=TEXT_VOCAB)


def client_of(server: Server, **options: Any) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", **{"api_key": "-", "max_retries": 0, "timeout": 60} | options)


@pytest.fixture(scope="module", name="engine")
def an_engine() -> Iterator[RolloutEngine]:
    with text_engine() as engine:
        yield engine


@pytest.fixture(scope="module", name="server")
def a_server(engine: RolloutEngine) -> Iterator[Server]:
    with serve(engine, port=0) as server:
        yield server


@pytest.fixture(scope="module", name="client")
def a_client(server: Server) -> Any:
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


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
