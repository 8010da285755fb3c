"""The HTTP server while weights change, clients go away and the server is closed; its control, and the command."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from live_setup import held
from server_setup import (  # noqa: F401 - fixtures among them
    CHAT,
    CONFIG,
    LONG,
    a_client,
    a_server,
    an_engine,
    client_of,
    openai,
    post,
    text_engine,
    text_model,
    until,
)
from small_engine import only, tokenizer

from stoker.integrations import cli
from stoker.integrations.server import Server, serve
from stoker.rollout import RolloutEngine, SamplingParams


def idle(engine: RolloutEngine) -> bool:
    return not engine.core.has_work


def begun(engine: RolloutEngine, tokens: int = 5) -> int:
    """How many requests under way have more tokens."""
    return sum(r.num_output > tokens for r in engine.core.under_way)


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
    model = text_model()
    with (
        text_engine(model) as engine,
        serve(engine, port=0) as server,
    ):
        answers: list[Any] = []

        def ask() -> None:
            body = {"ignore_eos": True, "return_token_ids": True}
            answer = client_of(server).completions.create(
                model="policy", prompt="abc", max_tokens=240, extra_body=body, stream=stream
            )
            events = list(answer) if stream else [answer]
            answers.append([v for event in events for v in event.choices[0].weight_versions])

        thread = threading.Thread(target=ask)
        with held(engine, lambda: begun(engine) > 0):
            thread.start()
            until(lambda: begun(engine) > 0)
            engine.pause()
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
        assert engine.update_weights() == 1
        time.sleep(0.1)
        assert thread.is_alive()
        engine.resume()
        thread.join(timeout=60)
        (versions,) = answers
        assert len(versions) == 240 and versions == sorted(versions) and set(versions) == {0, 1}


@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "sleeps"])
def test_a_trl_trainer_whose_rollouts_come_over_http(tmp_path: Path, sleeps: bool) -> None:
    """The weights are the new ones at each, and the log-probabilities those of TRL's own forward."""
    trl_setup = pytest.importorskip("trl_setup")
    pytest.importorskip("trl")
    from concurrent.futures import ThreadPoolExecutor

    from stoker.integrations.trl import attach, detach

    versions = []

    def episode(prompt: str) -> tuple[list[int], list[int], list[float]]:
        answer = client.completions.create(
            model="policy", prompt=prompt, max_tokens=8, logprobs=0, extra_body={"return_token_ids": True}
        )
        (choice,) = answer.choices
        versions.append(set(choice.weight_versions))
        return choice.prompt_token_ids, choice.token_ids, choice.logprobs.token_logprobs

    def rollout_func(prompts: list[str], _: Any) -> dict[str, Any]:
        with ThreadPoolExecutor(4) as pool:
            columns = zip(*pool.map(episode, prompts), strict=True)
            return dict(zip(("prompt_ids", "completion_ids", "logprobs"), map(list, columns), strict=True))

    makes = trl_setup.trainers(str(tmp_path))
    trainer = next(makes)(vllm_enable_sleep_mode=sleeps, more={"rollout_func": rollout_func})
    asleep, backward = set[bool](), trainer.accelerator.backward

    def noting(*args: Any, **options: Any) -> None:
        asleep.add(engine.is_sleeping)
        backward(*args, **options)

    trainer.accelerator.backward = noting
    with serve(engine := attach(trainer), port=0) as server:
        client = client_of(server)
        trainer.train()
    assert asleep == {sleeps}
    differences = trl_setup.logged(trainer, "sampling/sampling_logp_difference/max")
    assert differences and max(differences) < trl_setup.LOGPROB_TOLERANCE
    assert {frozenset(v) for v in versions} == {frozenset({1}), frozenset({2}), frozenset({3})}
    detach(trainer)
    makes.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away(engine: RolloutEngine, server: Server, stream: bool) -> None:
    """Its request ends, and others go on."""
    body = json.dumps({"prompt": "abc", "max_tokens": 240, "ignore_eos": True, "stream": stream, "n": 16}).encode()
    before = engine.stats().finished_requests
    host, port = server.url.removeprefix("http://").split(":")
    with held(engine, lambda: begun(engine) > 0):
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            until(lambda: begun(engine) > 0)
        until(lambda: not server._steps._followed)
    until(lambda: idle(engine))
    assert engine.stats().finished_requests - before < 16
    engine.core.scheduler.check()
    assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks


def test_a_client_that_goes_away_in_the_middle_of_its_request(
    server: Server, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Is none of the server's errors: nothing is logged."""
    host, port = server.url.removeprefix("http://").split(":")
    for body in (b"", b'{"prompt": "a"'):
        with socket.create_connection((host, int(port))) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n" + body)
            time.sleep(0.1)
    assert client.completions.create(model="policy", prompt="a", max_tokens=1).choices
    assert not caplog.records


def test_closing(engine: RolloutEngine) -> None:
    """Whoever waits gets what there is, and nothing of the server is left."""
    answers: list[Any] = []
    before = set(threading.enumerate())
    server = serve(engine, port=0)

    def ask(stream: bool) -> None:
        answer = client_of(server).completions.create(model="policy", prompt="abc", n=16, stream=stream, **LONG)
        events = list(answer) if stream else [answer]
        answers.append([choice.finish_reason for choice in events[-1].choices])

    engine.pause("keep")  # or the first could be near its end when the second comes
    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    until(lambda: len(engine.core.under_way) == 32)
    with held(engine, lambda: begun(engine, 2) >= 16):
        engine.resume()
        until(lambda: begun(engine, 2) >= 16)
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


def test_a_trainer_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the requests, has new weights and adapters read from files, and gives the memory back and takes it."""
    model = text_model()
    other = text_model()
    with torch.no_grad():
        other.lm_head.weight.mul_(-1.0)
    other.save_pretrained(tmp_path / "new")
    peft = pytest.importorskip("peft")
    from adapted import lora, shake

    adapted = peft.get_peft_model(text_model(), lora())
    shake(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "junk").write_bytes(b"{" * 99)
    (tmp_path / "empty").mkdir()
    for folder in ("bare", "closed"):
        text_model().config.save_pretrained(tmp_path / folder)
    listdir = os.listdir

    def listed(path: Any = ".") -> list[str]:
        if path == str(tmp_path / "closed"):  # root would be let in
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", listed)
    with (
        text_engine(model) as engine,
        serve(engine, port=0, control=True) as server,
    ):
        client = client_of(server)
        thread = threading.Thread(target=lambda: client.completions.create(model="policy", prompt="abc", **LONG))
        with held(engine, lambda: begun(engine) > 0):
            thread.start()
            until(lambda: begun(engine) > 0)
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
            ("/update_weights", {"path": "x" * 10000}, "give a safetensors file"),
            ("/update_weights", {"path": str(tmp_path / "pipe")}, "give a safetensors file"),  # nobody writes to it
            ("/update_weights", {"path": str(tmp_path / "junk")}, "cannot be read: Error while deserializing header"),
            ("/update_weights", {"path": str(tmp_path / "empty")}, "cannot be loaded: no config.json in it"),
            ("/update_weights", {"path": str(tmp_path / "bare")}, "cannot be loaded: Error no file named"),
            ("/update_weights", {"path": str(tmp_path / "closed")}, "cannot be read: [Errno 13]"),
            ("/update_weights", {"path": str(tmp_path / "new"), "version": 3}, "version=3"),
            ("/pause", {"mode": "later"}, "mode='later'"),
            ("/pause", {"mood": "keep"}, "give an object with mode (str)"),
            ("/sleep", {"level": True}, "give an object with level (int)"),
            ("/sleep?level=2", {}, "'level=2' is in the URL: give it in the body"),
            ("/v1/load_lora_adapter", {"lora_name": "policy", "lora_path": "x"}, "is the served model's"),
            ("/v1/load_lora_adapter", {"lora_name": "\ud83d", "lora_path": str(tmp_path / "adapter")}, "or not printable"),
            ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "nowhere"}, "nowhere"),
            ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "\ud800"}, "\\ud800"),
            ("/v1/unload_lora_adapter", {"lora_name": "a"}, "adapter"),
        ):  # fmt: skip
            status, body = post(server, path, bad)
            assert 400 <= status < 500 and message in body["error"]["message"], body
        assert client.completions.create(model="policy", prompt="abc").choices


def test_a_pause_asked_for_over_http_ends_with_the_server() -> None:
    """Nobody could ask for its end, and the engine's owner would wait for ever; but the owner's own pause is the owner's."""
    with text_engine(text_model()) as engine:
        with serve(engine, port=0, control=True) as server:
            assert post(server, "/pause", {})[1]["is_paused"] is True
        assert engine.submit("abc", SamplingParams(max_tokens=2)).result(timeout=30).completions
        with serve(engine, port=0, control=True):
            engine.pause()
        assert engine.is_paused
        with serve(engine, port=0, control=True) as server:  # a request's pause within the owner's
            post(server, "/pause", {})
        assert engine.is_paused
        engine.resume()
        with serve(
            engine, port=0, control=True
        ) as server:  # one beside which the owner has ended one, and made another
            post(server, "/pause", {})
            engine.resume()
            engine.pause()
        assert engine.is_paused
        with serve(engine, port=0, control=True) as server:  # each ends only its own
            post(server, "/pause", {})
            assert post(server, "/resume", {})[1]["is_paused"] is True
            post(server, "/pause", {})
            engine.resume()
            assert engine.is_paused
            engine.close()


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


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--port", "TAKEN"], "nothing can listen at 127.0.0.1:"),
        (["--host", "192.0.2.1"], "nothing can listen at 192.0.2.1:"),  # an address of documents, and no machine's
        (["--port", "0", "--api-key", " "], "api_key is empty"),
    ],
)
def test_what_cannot_be_served_is_known_before_the_model_is_loaded(
    more: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That takes minutes, of a large one."""
    monkeypatch.setattr(cli, "load", lambda args: pytest.fail("the model is loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        more = [str(taken.getsockname()[1]) if word == "TAKEN" else word for word in more]
        assert cli.main(["serve", "nowhere", *more]) == 1
    assert f"stoker: {message}" in capsys.readouterr().err


def test_the_port_is_free_again_where_the_model_cannot_be_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    host = "127.0.0.1" if sys.platform == "darwin" else "127.53.17.1"  # where nobody else is given that port meanwhile
    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    for _ in range(2):
        assert cli.main(["serve", "./nowhere", "--host", host, "--port", str(port)]) == 1
        assert "there is no such folder" in capsys.readouterr().err


def test_an_empty_key_is_not_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--api-key "$KEY"``, where the variable is not set, served whoever came."""
    from cli_setup import make_folder

    assert cli.main(["serve", make_folder(tmp_path), "--port", "0", "--kv-cache-memory", "1MiB", "--api-key", ""]) == 1
    assert "stoker: api_key is empty" in capsys.readouterr().err


def test_the_command_without_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "stoker.integrations.server")
    assert cli.main(["serve", "nowhere"]) == 1
    assert "stoker serve needs uvicorn, which is not installed: pip install 'stoker[server]'" in capsys.readouterr().err
