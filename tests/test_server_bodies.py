"""What the HTTP server reads of requests: not more than a model has use for, and images from elsewhere not for ever."""

from __future__ import annotations

import base64
import io
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from server_setup import post

from stoker.integrations import image_urls
from stoker.integrations.server import Server, serve
from stoker.rollout import EngineConfig, RolloutEngine

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
    assert ("but no images were passed" if how == "images" else "no variable") in answer["error"]["message"]
