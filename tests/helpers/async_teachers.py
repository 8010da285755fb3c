"""TRL's AsyncDistillationTrainer on a CPU, and a teacher's server for it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl_async_setup import OPTIONS, Make, chat_tokenizer
from trl_setup import make_model

from stoker.rollout import EngineConfig

TOP_K = 3


def teacher_model(seed: int = 1) -> Any:
    """Other weights than the student's."""
    model = make_model().eval()
    torch.manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def prompt_logprobs(model: Any, ids: list[int], top_k: int, temperature: float) -> list[dict[str, Any] | None]:
    """As vLLM answers: at each position but the first the most likely tokens, and the one that is there."""
    logprobs = (model(torch.tensor([ids])).logits[0, :-1].float() / temperature).log_softmax(-1)
    answer: list[dict[str, Any] | None] = [None]
    for row, token in zip(logprobs, ids[1:], strict=True):
        ranked = row.argsort(descending=True).tolist()
        chosen = dict.fromkeys([token, *ranked[:top_k]])  # in no order of ranks
        answer.append({str(t): {"logprob": row[t].item(), "rank": ranked.index(t) + 1} for t in chosen})
    return answer


class Teacher:
    """What a server answers with, which a test may replace, and what it was asked."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.replies: Callable[[dict[str, Any]], tuple[int, Any]] = self.score
        self.introduces: Callable[[], tuple[int, Any]] = lambda: (200, {"data": [{"id": "the-teacher"}]})

    def score(self, body: dict[str, Any]) -> tuple[int, Any]:
        scored = prompt_logprobs(self.model, body["prompt"], body["prompt_logprobs"], body["temperature"])
        return 200, {"choices": [{"text": "", "prompt_logprobs": scored}]}


@contextmanager
def served(model: Any) -> Iterator[Teacher]:
    """A teacher's server, until the block ends."""
    teacher = Teacher(model)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(*teacher.introduces() if self.path == "/v1/models" else (200, {}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            teacher.asked.append(body)
            self.answer(*teacher.replies(body))

        def answer(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    teacher.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield teacher
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the GPU kernel of the trainer's forward, and the GPU's name."""
    from transformers import AutoModelForCausalLM
    from trl.experimental.async_distillation import async_distillation_trainer

    def load(name: str, **options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(name, **options | {"attn_implementation": "sdpa"})

    monkeypatch.setattr(async_distillation_trainer, "AutoModelForCausalLM", SimpleNamespace(from_pretrained=load))
    monkeypatch.setattr(async_distillation_trainer, "get_peak_flops_per_device", lambda *_: None)


@pytest.fixture(name="distil")
def distilling_trainers(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Builds trainers with their engine, and detaches in the end."""
    from datasets import Dataset
    from trl.experimental.async_distillation import AsyncDistillationConfig

    from stoker.integrations.trl_async import AsyncDistillationTrainer

    stand_in(monkeypatch)
    options = {name: value for name, value in OPTIONS.items() if name != "num_generations"}
    options |= {"output_dir": str(tmp_path), "token_budget": 0, "teacher_top_k": TOP_K, "vllm_server_timeout": 0.6}
    made: list[Any] = []

    def build(
        *teachers: Teacher, engine_config: EngineConfig | None = None, peft_config: Any = None, **settings: Any
    ) -> Any:
        rows = {"prompt": [[{"role": "user", "content": c}] for c in ("abc", "hg", "d")]}
        trainer = AsyncDistillationTrainer(
            model=folder,
            args=AsyncDistillationConfig(
                **options | {"teacher_server_urls": {f"t{i}": t.url for i, t in enumerate(teachers)} or None} | settings
            ),
            train_dataset=Dataset.from_dict(rows | {"teacher_id": ["t0", "t1", "t0"]}),
            processing_class=chat_tokenizer(),
            peft_config=peft_config,
            engine_config=engine_config or EngineConfig(kv_cache_memory="4MiB"),
        )
        made.append(trainer)
        return trainer

    yield build
    for trainer in made:
        if trainer.rollouts.engine is not None:
            trainer.rollouts.detach()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(1e-3)
