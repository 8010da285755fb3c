"""Models whose base bitsandbytes holds in 4 or 8 bits, with adapters. Processes of ranks import it by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

FP32 = torch.float32
KINDS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


def save(path: Path) -> Path:
    """A model to be quantised while it is loaded."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attention_bias=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(path)
    return path


def quantised(folder: Path, kind: str, **more: Any) -> Any:
    """more: of its ``BitsAndBytesConfig``."""
    options: dict[str, Any] = KINDS[kind] | more
    if kind != "int8":
        options["bnb_4bit_compute_dtype"] = FP32
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**options), dtype=FP32
    ).eval()
    for module in model.modules():  # or, in evaluation on some CPUs, its forward would go over to bf16
        module.support_avx512bf16_for_cpu = False
    return model


def adapted(model: Any, seed: int = 1, **options: Any) -> Any:
    torch.manual_seed(seed)
    targets = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(**{"r": 4, "target_modules": targets, "init_lora_weights": False} | options)
    return get_peft_model(model, config).eval()
