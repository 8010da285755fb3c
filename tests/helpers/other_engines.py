"""Stand-ins for vLLM and LMDeploy: they accept what those accept, and nothing else.

vLLM: ``vllm/entrypoints/llm.py``. LMDeploy: ``lmdeploy/pipeline.py``, ``messages.py``, ``serve/core/async_engine.py``.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(kw_only=True)
class SamplingParams:
    temperature: float = 0.5
    max_tokens: int = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    detokenize: bool = True


class LLM:
    def __init__(
        self,
        model: str,
        *,
        skip_tokenizer_init: bool = False,
        dtype: str = "auto",
        seed: int = 0,
        kv_cache_memory_bytes: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool | None = None,
    ) -> None:
        self.settings = {k: v for k, v in locals().items() if k != "self"}
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.calls: list[str] = []

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True

    def generate(
        self, prompts: list[dict[str, list[int]]], sampling_params: Sequence[SamplingParams], *, use_tqdm: bool = True
    ) -> list[Any]:
        self.calls.append("generate")
        for params in sampling_params:
            assert (params.temperature, params.ignore_eos, params.logprobs, params.detokenize) == (1.0, True, 0, False)
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=(prompt["prompt_token_ids"][0],) * params.max_tokens)])
            for prompt, params in zip(prompts, sampling_params, strict=True)
        ]


@dataclass
class GenerationConfig:
    max_new_tokens: int = 512
    do_sample: bool = False
    top_p: float = 1.0
    top_k: int = 50
    temperature: float = 0.8
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass
class PytorchEngineConfig:
    dtype: str = "auto"
    session_len: int | None = None
    max_batch_size: int | None = None
    block_size: int = 64
    num_gpu_blocks: int = 0
    max_prefill_token_num: int = 4096
    enable_prefix_caching: bool = False

    def __post_init__(self) -> None:
        assert self.dtype in ("auto", "float16", "bfloat16")


@dataclass
class Pipeline:
    model_path: str
    backend_config: PytorchEngineConfig
    log_level: str = "WARNING"
    running: int = 0
    most_running: int = 0
    sessions: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        assert AutoTokenizer.from_pretrained(self.model_path).decode([3, 99]) == "3 99"
        self.async_engine = self
        loop = asyncio.new_event_loop()
        self.internal_thread = SimpleNamespace(loop=loop)
        self.thread = threading.Thread(target=loop.run_forever, daemon=True)
        self.thread.start()

    async def generate(
        self,
        messages: None,
        session_id: int,
        gen_config: GenerationConfig,
        stream_response: bool = True,
        input_ids: list[int] | None = None,
    ) -> AsyncIterator[Any]:
        assert messages is None and input_ids is not None and session_id not in self.sessions
        assert (gen_config.do_sample, gen_config.top_k, gen_config.top_p) == (True, 0, 1.0)
        assert (gen_config.temperature, gen_config.ignore_eos, gen_config.logprobs) == (1.0, True, 1)
        self.sessions.add(session_id)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        half = gen_config.max_new_tokens // 2
        for count in (half, gen_config.max_new_tokens - half, 0):
            yield SimpleNamespace(token_ids=input_ids[:1] * count)
        self.running -= 1

    def close(self) -> None:
        self.internal_thread.loop.call_soon_threadsafe(self.internal_thread.loop.stop)
        self.thread.join()


def modules() -> dict[str, ModuleType]:
    names: dict[str, dict[str, Any]] = {
        "vllm": {"LLM": LLM, "SamplingParams": SamplingParams},
        "lmdeploy": {
            "GenerationConfig": GenerationConfig,
            "PytorchEngineConfig": PytorchEngineConfig,
            "pipeline": Pipeline,
        },
    }
    found = {name: ModuleType(name) for name in names}
    for name, module in found.items():
        vars(module).update(names[name], __spec__=ModuleSpec(name, None), __version__="0")
    return found


@contextmanager
def installed() -> Iterator[None]:
    """Both can be imported within."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules().items():
            patch.setitem(sys.modules, name, module)
        yield
