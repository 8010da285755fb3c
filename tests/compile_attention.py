"""Compiles the attention kernels for an H200, as they would be launched there, without one. Prints what each takes.

A process of its own: where there is no CUDA device the tests have Triton interpret, and it cannot do both.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stoker.kernels import attention, attention_plan
from stoker.kernels.reference.attention import Visibility

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
launches: list[tuple[Any, tuple[int, ...], dict[str, Any]]] = []


class Recorder:
    """Stands in for a kernel: notes its launches and runs nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            launches.append((self.kernel, grid, dict(zip(self.kernel.arg_names, args, strict=False)) | options))

        return launch


def build(kernel: Any, grid: tuple[int, ...], given: dict[str, Any]) -> dict[str, Any]:
    options = {name: given.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in given}
    signature, constants, aligned = {}, {}, {}
    for index, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = given[name]
        specialised = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or (specialised and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + NAMES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        placed = isinstance(value, torch.Tensor) and not parameter.do_not_specialize_on_alignment
        if placed or (specialised and value % 16 == 0):
            aligned[(index,)] = [["tt.divisibility", 16]]
    aligned = {at: attribute for at, attribute in aligned.items() if kernel.arg_names[at[0]] not in constants}
    made = triton.compile(ASTSource(kernel, signature, constants, aligned), GPUTarget("cuda", 90, 32), options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()  # type: ignore[union-attr]
    return {
        "kernel": kernel.__name__,
        "programs": grid[0],
        "threads": 32 * made.metadata.num_warps,
        "registers": int(registers),
        "stack": int(stack),
        "shared": made.metadata.shared,
        "wide_loads": made.asm["ptx"].count("cp.async.cg.shared.global"),
        "tensor_cores": len(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync", made.asm["ptx"])),
    }


def launch(heads: int, kv_heads: int, key_dim: int, value_dim: int, latent: bool) -> None:
    """A decode step and a chunk, which launch every kernel."""

    def make(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.bfloat16)

    key_cache = make(4, 16, kv_heads, key_dim)
    value_cache = key_cache[..., :value_dim] if latent else make(4, 16, kv_heads, value_dim)
    table, lens = torch.zeros(64, 2048, dtype=torch.long), torch.full((64,), 2000)
    for queries in (1, 64):
        rows = 64 if queries == 1 else 1
        plan = attention.plan_attention([queries] * rows, [2000] * rows, table, lens, block_size=16, token_bytes=1)
        query = make(rows * queries, heads, key_dim)
        attention.paged_attention(query, key_cache, value_cache, plan, scale=0.1, visibility=Visibility())
    new = make(64, kv_heads, key_dim), make(64, kv_heads, value_dim)
    attention.write_kv(*new, key_cache, value_cache, lens)


if __name__ == "__main__":
    for module in (attention, attention_plan):
        for name in [n for n in vars(module) if n.endswith("_kernel")]:
            setattr(module, name, Recorder(getattr(module, name)))
    attention.num_sms = lambda device: 132
    launch(32, 8, 128, 128, latent=False)  # Llama 3.1 8B
    launch(16, 1, 576, 512, latent=True)  # DeepSeek V2 Lite
    print(json.dumps([build(*recorded) for recorded in launches]))
