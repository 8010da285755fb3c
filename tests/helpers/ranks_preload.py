"""Imported once by the server that test processes are forked from: importing takes seconds, forking does not."""

import contextlib
import gc
import os

import accelerated  # noqa: F401
import families  # noqa: F401
import peft  # noqa: F401
import sharded_faults  # noqa: F401
import sharded_gathers  # noqa: F401
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

import stoker.rollout  # noqa: F401

os.environ["DS_ACCELERATOR"] = "cpu"
with contextlib.suppress(ImportError):
    import deepspeed.runtime.zero.stage3  # noqa: F401
with contextlib.suppress(ImportError):
    from trl import GRPOTrainer  # noqa: F401

gc.freeze()  # DeepSpeed collects garbage often, and there is none in all this
