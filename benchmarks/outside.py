"""Engines that are no part of torch or transformers, used where they are installed: vLLM and LMDeploy.

They read the model from a folder: the same seeded weights, saved once. Each gets the KV cache that every slot at its full
length needs, as the other engines do, and gives the log-probability of each sampled token.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stoker.benchmarks.peers import Peer
from stoker.benchmarks.workloads import ModelSpec, Workload

_PAGE = 64  # LMDeploy's tokens a block


_saved: dict[tuple[str, torch.dtype], tempfile.TemporaryDirectory[str]] = {}


def checkpoint(spec: ModelSpec, dtype: torch.dtype) -> str:
    """The model as a folder of safetensors, with a tokenizer of one word a token: ``"7 12"`` is ``[7, 12]``."""
    if (spec.name, dtype) not in _saved:
        folder = _saved[spec.name, dtype] = tempfile.TemporaryDirectory(prefix=f"{spec.name}-")
        spec.build("cpu", dtype).save_pretrained(folder.name)
        words = {str(i): i for i in range(spec.config.vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder.name)
    return _saved[spec.name, dtype].name


class Vllm(Peer):
    """``LLM.generate``, on token ids."""

    name = "vllm"
    module = "vllm"

    def __init__(self, spec: ModelSpec, workload: Workload, device: str, dtype: torch.dtype) -> None:
        # It starts a process of its own, and a fork does not work after CUDA was used.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        from vllm import LLM

        self.settings = {
            "max_num_seqs": workload.slots,
            "max_model_len": workload.max_len,
            "max_num_batched_tokens": 8192,
            "kv_cache_memory_bytes": workload.slots * workload.max_len * kv_token_bytes(spec, dtype),
            "enable_prefix_caching": True,
        }
        name = str(dtype).removeprefix("torch.")
        self.llm = LLM(model=checkpoint(spec, dtype), dtype=name, skip_tokenizer_init=True, seed=0, **self.settings)

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


class LMDeploy(Peer):
    """LMDeploy's PyTorch engine through its pipeline."""

    name = "lmdeploy"
    module = "lmdeploy"

    def __init__(self, spec: ModelSpec, workload: Workload, device: str, dtype: torch.dtype) -> None:
        from lmdeploy import PytorchEngineConfig, pipeline

        self.settings = {
            "max_batch_size": workload.slots,
            "session_len": workload.max_len,
            "max_prefill_token_num": 8192,
            "block_size": _PAGE,
            "num_gpu_blocks": workload.slots * (-(-workload.max_len // _PAGE) + 1),
            "enable_prefix_caching": True,
        }
        name = str(dtype).removeprefix("torch.")
        config = PytorchEngineConfig(dtype=name, **self.settings)
        self.pipe = pipeline(checkpoint(spec, dtype), backend_config=config, log_level="ERROR")

    def rollout(
        self, prompts: list[list[int]], lengths: Sequence[int], limit_s: float = float("inf")
    ) -> list[list[int]]:
        from lmdeploy import GenerationConfig

        configs = [
            GenerationConfig(
                max_new_tokens=n, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, ignore_eos=True, logprobs=1
            )
            for n in lengths
        ]
        texts = [" ".join(map(str, prompt)) for prompt in prompts]
        return [list(r.token_ids) for r in self.pipe.infer(texts, gen_config=configs, do_preprocess=False)]

    def close(self) -> None:
        self.pipe.close()


def kv_token_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """What the KV cache keeps of a token, in bytes."""
    c = spec.config
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return int(2 * c.num_hidden_layers * c.num_key_value_heads * dim * dtype.itemsize)
