"""What the HTTP server reads of requests: not more than a model has use for, and images from elsewhere not for ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_setup import post

from stoker.integrations.server import Server, serve
from stoker.rollout import EngineConfig, RolloutEngine


@pytest.fixture(scope="module", name="images")
def a_server_with_images() -> Iterator[Server]:
    from processors import make_model, make_processor

    config = EngineConfig(kv_cache_memory="4MiB", max_model_len=128)
    with (
        RolloutEngine(make_model(), config=config, tokenizer=make_processor()) as engine,
        serve(engine, port=0) as server,
    ):
        yield server


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
