"""What the HTTP server reads of a request: no more than a model can use, and it does not wait for images for ever."""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from server_setup import a_client, a_server, an_engine, post  # noqa: F401 - fixtures

from stoker.integrations import http_requests, image_urls
from stoker.integrations import server as server_module
from stoker.integrations.server import Server, serve
from stoker.rollout import EngineConfig, RolloutEngine

MOST = 2000


def address(server: Server) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def ask(server: Server, body: Any, **headers: str) -> tuple[int, str]:
    """body: in chunks, of unannounced length, where it is a list."""
    with closing(http.client.HTTPConnection(*address(server), timeout=60)) as connection:
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        return answer.status, json.load(answer).get("error", {}).get("message")


def test_a_body_may_be_so_long(server: Server, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Announced or not, and whatever is in it; to its last byte it is taken, beyond that not even parsed."""
    monkeypatch.setattr(server_module, "most_bytes", lambda *_, **__: MOST)
    longest = b'{"prompt": "a"}'.ljust(MOST)
    for headers in ({}, {"connection": "close"}):
        for body in (longest, [longest[:500], longest[500:]]):
            assert ask(server, body, **headers)[0] == 200
        for body in (longest + b" ", b"{" * 10**6, [b"{" * 1000, b"{" * 1001], [longest] * 500):
            status, message = ask(server, body, **headers)
            assert status == 413 and "the body has more than 2000 bytes" in message
    assert client.completions.create(model="policy", prompt="a", max_tokens=1).choices


def test_who_asks_before_sending_is_told_before(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "most_bytes", lambda *_, **__: MOST)
    for length, line in ((MOST, b"HTTP/1.1 100 "), (MOST + 1, b"HTTP/1.1 413 ")):
        with socket.create_connection(address(server), timeout=60) as connection:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\nExpect: 100-continue\r\n\r\n"
            )
            connection.sendall(head.encode())
            assert connection.recv(100).startswith(line)


def test_a_body_has_room_for_the_longest_prompt() -> None:
    assert http_requests.most_bytes(4096, images=False) == 32 * 2**20
    assert http_requests.most_bytes(10**7, images=False) == 64 * 10**7
    assert http_requests.most_bytes(4096, images=True) == 96 * 2**20


def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(server: Server) -> None:
    """Which takes a hundred times its memory."""
    text, words = "a" * (128 * 256 + 1), "characters, more than 128 for each of the 256 tokens of max_model_len"
    status, body = post(server, "/v1/completions", {"prompt": ["a", text]})
    assert status == 400 and f"prompt 1 has 32769 {words}" in body["error"]["message"]
    for content in (text, [{"type": "text", "text": "a"}, {"type": "text", "text": text}]):
        status, body = post(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
        assert status == 400 and "messages has 327" in body["error"]["message"] and words in body["error"]["message"]
    status, body = post(server, "/v1/completions", {"prompt": text[1:]})
    assert status == 400 and "prompt 0 has 32768 tokens" in body["error"]["message"]


def test_so_many_prompts(server: Server) -> None:
    """Each costs some kilobytes of memory, and its request some bytes."""
    status, body = post(server, "/v1/completions", {"prompt": ["a"] * 16385})
    assert status == 400 and "n=1 of 16385 prompts: the server makes at most 16384" in body["error"]["message"]


def test_answers_are_made_beside_the_loop_that_others_wait_for(
    server: Server, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a thousand tokens with their likeliest alternatives one takes seconds."""
    made, answer = [], server_module.answer

    def noting(*args: Any) -> Any:
        made.append(threading.current_thread())
        return answer(*args)

    monkeypatch.setattr(server_module, "answer", noting)
    assert client.completions.create(model="policy", prompt="a", max_tokens=1).choices
    assert len(made) == 1 and made[0] is not server._thread


# -- images from elsewhere -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="images")
def a_server_with_images() -> Iterator[Server]:
    from processors import make_model, make_processor

    config = EngineConfig(kv_cache_memory="4MiB", max_model_len=128)
    with (
        RolloutEngine(make_model(), config=config, tokenizer=make_processor()) as engine,
        serve(engine, port=0) as server,
    ):
        yield server


@contextmanager
def host(data: bytes, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/picture"
        finally:
            server.shutdown()


def see(server: Server, url: str) -> tuple[int, Any]:
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    body = {"messages": chat, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    status, answer = post(server, "/v1/chat/completions", body)
    return status, answer["error"]["message"] if status != 200 else answer["choices"][0]["token_ids"]


def test_an_image_by_its_url_is_the_image(images: Server) -> None:
    from processors import picture

    image = io.BytesIO()
    picture(1, 16, 24).save(image, "PNG")
    with host(image.getvalue()) as url:
        status, tokens = see(images, url)
    data = base64.b64encode(image.getvalue()).decode()
    assert status == 200 and (status, tokens) == see(images, f"data:image/png;base64,{data}")


def test_an_image_that_cannot_be_fetched(images: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with host(b"", 404) as url:
        status, message = see(images, url)
    assert status == 400 and "messages[0] has an image at" in message and "404" in message
    with monkeypatch.context() as patch, host(b"x" * 1001) as url:
        patch.setattr(image_urls, "_MOST", 1000)
        status, message = see(images, url)
    assert status == 400 and "it has more than 1000 bytes" in message
    for url in ("http://", "http://127.0.0.1:x/", "http://a b/"):
        status, message = see(images, url)
        assert status == 400 and "that cannot be fetched" in message


def test_hosts_that_do_not_answer_yet_keep_others_waiting_for_nothing(images: Server) -> None:
    url = {"type": "image_url", "image_url": {"url": ""}}
    with socket.create_server(("127.0.0.1", 0)) as silent, ExitStack() as stack:
        silent.settimeout(60)
        url["image_url"]["url"] = f"http://127.0.0.1:{silent.getsockname()[1]}/"  # type: ignore[index]
        body = json.dumps({"messages": [{"role": "user", "content": [url]}]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        for _ in range(40):
            stack.enter_context(socket.create_connection(address(images), timeout=60)).sendall(head.encode() + body)
            stack.enter_context(silent.accept()[0])
        status, _ = post(images, "/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert status == 200


def test_a_host_of_images_that_never_answers_keeps_nobody_waiting(
    images: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads in which prompts are read would come to wait for it, and nobody would be served any more."""
    monkeypatch.setattr(image_urls, "_WITHIN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        status, message = see(images, f"http://127.0.0.1:{silent.getsockname()[1]}/")
    assert status == 400 and "that cannot be fetched" in message and "timed out" in message


@pytest.mark.parametrize("how", ["images", "processor_kwargs"])
def test_settings_of_the_template_are_no_settings_of_the_processor(
    images: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Which reads images by their paths: files of the server's machine."""
    from PIL import Image
    from processors import WORDS, picture

    private = tmp_path / "private.png"
    picture(1, 16, 24).save(private)
    opened, real = [], Image.open
    monkeypatch.setattr(Image, "open", lambda *args, **options: opened.append(args) or real(*args, **options))
    content = f"{WORDS[1]}{WORDS[0]}{WORDS[2]}a"
    settings = {"images": [str(private)]} if how == "images" else {how: {"images": [str(private)]}}
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "chat_template_kwargs": settings}
    status, answer = post(images, "/v1/chat/completions", body)
    assert status == 400 and not opened
    assert ("no images" if how == "images" else "no variable") in answer["error"]["message"]
