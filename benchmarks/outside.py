"""Engines that are no part of torch or transformers, used where they are installed: vLLM and LMDeploy.

They read the model from a folder: the same seeded weights, saved once. Each gets a KV cache of the same size as the other
engines, its prefix cache on, and gives the log-probability of each sampled token.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import tempfile
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from stoker.benchmarks.ceilings import kv_token_bytes
from stoker.benchmarks.peers import Peer, kv_budget
from stoker.benchmarks.workloads import ModelSpec, Workload

_PAGE = 64  # LMDeploy's tokens a block


_saved: dict[tuple[str, torch.dtype], tempfile.TemporaryDirectory[str]] = {}


def checkpoint(spec: ModelSpec, device: str, dtype: torch.dtype) -> str:
    """The model as a folder of safetensors, with a tokenizer of one word a token: LMDeploy does not start without any.

    It is made on ``device``, as the other engines' copies are: another device draws other weights from the same seed.
    """
    if (spec.name, dtype) not in _saved:
        folder = _saved[spec.name, dtype] = tempfile.TemporaryDirectory(prefix=f"{spec.name}-")
        spec.build(device, dtype).save_pretrained(folder.name)
        words = {str(i): i for i in range(spec.config.vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder.name)
    return _saved[spec.name, dtype].name


class Vllm(Peer):
    """``LLM.generate``, on token ids."""

    name = "vllm"
    module = "vllm"

    def __init__(self, spec: ModelSpec, workload: Workload, device: str, dtype: torch.dtype) -> None:
        # It starts a process of its own, and a fork does not work after CUDA was used.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        if device == "cpu":  # as many processors as the others have: by itself it keeps some back
            processors = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, processors)))
        from vllm import LLM

        self.settings = {
            "max_num_seqs": workload.slots,
            "max_model_len": workload.max_len,
            "max_num_batched_tokens": 8192,
            "kv_cache_memory_bytes": kv_budget(spec, workload, dtype),
            "enable_prefix_caching": True,
            # It does not start where less of the device is free than this share; the KV cache has the bytes above.
            "gpu_memory_utilization": 0.3,
        }
        name = str(dtype).removeprefix("torch.")
        self.llm = LLM(
            model=checkpoint(spec, device, dtype), dtype=name, skip_tokenizer_init=True, seed=0, **self.settings
        )

    def start(self) -> None:
        self.llm.reset_prefix_cache()

    def rollout(
        self, prompts: list[list[int]], lengths: Sequence[int], limit_s: float = float("inf")
    ) -> list[list[int]]:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False)
            for n in lengths
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        del self.llm  # which ends its process, and gives its memory back
        gc.collect()


class LMDeploy(Peer):
    """LMDeploy's PyTorch engine, on token ids.

    Its prefix cache cannot be flushed, but no prompt of a repeat comes again in another.
    """

    name = "lmdeploy"
    module = "lmdeploy"

    def __init__(self, spec: ModelSpec, workload: Workload, device: str, dtype: torch.dtype) -> None:
        from lmdeploy import PytorchEngineConfig, pipeline

        self.settings = {
            "max_batch_size": workload.slots,
            "session_len": workload.max_len,
            "max_prefill_token_num": 8192,
            "block_size": _PAGE,
            "num_gpu_blocks": kv_budget(spec, workload, dtype) // (_PAGE * kv_token_bytes(spec.config, dtype)),
            "enable_prefix_caching": True,
        }
        name = str(dtype).removeprefix("torch.")
        config = PytorchEngineConfig(dtype=name, **self.settings)
        self.pipe = pipeline(checkpoint(spec, device, dtype), backend_config=config, log_level="ERROR")
        self.slots, self.sessions = workload.slots, itertools.count(1)

    def rollout(
        self, prompts: list[list[int]], lengths: Sequence[int], limit_s: float = float("inf")
    ) -> list[list[int]]:
        from lmdeploy import GenerationConfig

        async def one(slots: asyncio.Semaphore, prompt: list[int], length: int) -> list[int]:
            config = GenerationConfig(
                max_new_tokens=length, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, ignore_eos=True, logprobs=1
            )
            tokens: list[int] = []
            async with slots:
                async for output in self.pipe.async_engine.generate(
                    None, next(self.sessions), gen_config=config, input_ids=prompt, stream_response=False
                ):
                    tokens += output.token_ids
            return tokens

        async def every() -> list[list[int]]:
            slots = asyncio.Semaphore(self.slots)
            return await asyncio.gather(*(one(slots, p, n) for p, n in zip(prompts, lengths, strict=True)))

        # Its own `infer` takes texts alone.
        return asyncio.run_coroutine_threadsafe(every(), self.pipe.internal_thread.loop).result()

    def close(self) -> None:
        self.pipe.close()
