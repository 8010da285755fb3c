"""The flags of commands that run an engine, and the engine that they describe."""

from __future__ import annotations

import argparse
import os
from typing import Any

from stoker.integrations.jsonl import CommandError
from stoker.kernels.errors import InvalidConfigError

_MAX_RANK = 512  # of an adapter, the most the kernels are made for
_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]  # what is fetched of a hub repository


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="local folder of safetensors, or the id of a model on the hub")
    parser.add_argument("--adapter", metavar="FOLDER", help="a LoRA adapter over the model, as PEFT saves it")


def add_flags(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument("--device", default="auto", metavar="X", help="cpu, cuda, cuda:1, ... (CUDA if there is one)")
    engine.add_argument("--dtype", default="auto", metavar="X", help="bfloat16, float32, ... (that of the files)")
    engine.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="sequences at a time (%(default)s)")
    engine.add_argument(
        "--max-model-len", type=int, metavar="N", help="tokens of prompt and completion together (the model's)"
    )
    engine.add_argument(
        "--kv-cache-memory", default="auto", metavar="X", help="4GiB, say (what fits in part of the free memory)"
    )
    engine.add_argument("--kv-cache-dtype", default="auto", metavar="X", help="auto or fp8 (%(default)s)")
    engine.add_argument("--quantization", metavar="X", help="fp8 (weights as they are)")


def config_of(args: argparse.Namespace) -> Any:
    from stoker.rollout import EngineConfig

    try:
        return EngineConfig(
            device=args.device,
            dtype=args.dtype,
            max_num_seqs=args.max_num_seqs,
            max_model_len=args.max_model_len,
            kv_cache_memory=args.kv_cache_memory,
            kv_cache_dtype=args.kv_cache_dtype,
            quantization=args.quantization,
            max_lora_rank=_MAX_RANK,
        )
    except InvalidConfigError as error:
        args.parser.error(str(error))


def check_device(args: argparse.Namespace) -> None:
    import torch

    device = args.config.device
    if device != "auto" and device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise CommandError(
                f"--device {args.device}: torch {torch.__version__} sees no CUDA device here with that number, of {count}"
            )


def load(args: argparse.Namespace) -> Any:
    from stoker.rollout import RolloutEngine

    check_device(args)
    engine = RolloutEngine.from_pretrained(_folder(args.model), config=args.config)
    if getattr(args, "adapter", None) is not None:
        engine.load_adapter(args.adapter, args.adapter)
    return engine


def _folder(model: str) -> str:
    """The local folder of a model. A model on the hub is fetched, unless it is in the cache already."""
    if os.path.isdir(model):
        return model
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise CommandError(f"{model}: there is no such folder")
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(model, allow_patterns=_MODEL_FILES))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CommandError(f"{model} is neither a folder here nor a model that could be fetched: {reason}") from error
