"""Compiles the attention kernels for an H200, without one, and prints what each takes.

It is a process of its own: tests without a CUDA device interpret Triton, and one process cannot do both.
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
from triton.tools.tensor_descriptor import TensorDescriptor

from stoker.kernels import launch as launching
from stoker.kernels.attention import paged as attention
from stoker.kernels.attention import plan as attention_plan
from stoker.kernels.reference.attention_plan import PLAIN, Visibility

NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
launches: list[tuple[Any, tuple[int, ...], dict[str, Any]]] = []


# Of an A100, an RTX 3090, an L4, an H200, a B200 and an RTX 5090: multiprocessors, and the KiB of shared memory that one has.
GPUS = {80: (108, 164), 86: (82, 100), 89: (58, 100), 90: (132, 228), 100: (148, 228), 120: (170, 100)}


def as_on(architecture: int) -> None:
    """Kernels are launched as there, also where tensors are a CPU's."""
    processors, shared = GPUS[architecture]
    launching.starts_early = launching.copies_tiles = lambda device: architecture >= 90  # type: ignore[assignment]
    launching.multiprocessors = lambda device: processors  # type: ignore[assignment]
    launching.shared_memory = lambda device: shared * 1024  # type: ignore[assignment]


class Recorder:
    """Stands in for a kernel: notes its launches and runs nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            launches.append((self.kernel, grid, dict(zip(self.kernel.arg_names, args, strict=False)) | options))

        return launch


def specialised(kernel: Any, given: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """What Triton compiles a kernel for: types, constants, and which arguments are multiples of 16."""
    signature, constants, aligned = {}, {}, {}
    for index, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = given[name]
        if isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{NAMES[value.base.dtype]}{list(value.block_shape)}>"
            continue
        is_tensor, is_integer = (
            isinstance(value, torch.Tensor),
            isinstance(value, int) and not parameter.do_not_specialize,
        )
        if parameter.is_constexpr or (is_integer and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = "*" + NAMES[value.dtype] if is_tensor else "fp32" if isinstance(value, float) else "i32"
        placed = is_tensor and value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment
        if placed or (is_integer and value % 16 == 0):
            aligned[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, aligned


def waiting_loops(ptx: str) -> list[int]:
    """Of loops with no other in them that read: how often their threads wait for each other, where they do."""
    lines = ptx.splitlines()
    begin = {name[1]: at for at, line in enumerate(lines) if (name := re.match(r"(\$L\w+):", line))}
    jumps = [
        (begin.get(to[1], at), at) for at, line in enumerate(lines) if (to := re.search(r"\bbra\S* \t?(\$L\w+)", line))
    ]
    loops = [(first, last) for first, last in jumps if first < last]
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    bodies = ("\n".join(lines[first:last]) for first, last in inner)
    return [body.count("bar.sync") for body in bodies if "ld.global" in body and "bar.sync" in body]


def build(kernel: Any, grid: tuple[int, ...], given: dict[str, Any], architecture: int = 90) -> dict[str, Any]:
    known = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl")
    options = {name: given.pop(name) for name in known if name in given}
    signature, constants, aligned = specialised(kernel, given)
    made = triton.compile(
        ASTSource(kernel, signature, constants, aligned), GPUTarget("cuda", architecture, 32), options
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    ptx, layouts = made.asm["ptx"], dict(re.findall(r"^(#\w+) = (.*)$", made.asm["ttgir"], re.MULTILINE))
    summed = re.findall(r"^ *\}\) : \((.*)\) -> ", made.asm["ttgir"], re.MULTILINE)
    # Reads and writes from the kernel's beginning; the first thing it does of them has to be to wait for the one before.
    accesses = re.findall(
        r"\b(griddepcontrol\.wait|(?:ld|st|atom|red)\.[a-z.]*global|cp\.async\.(?:c|bulk\.tensor))", ptx
    )
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()  # type: ignore[union-attr]
    return {
        "kernel": kernel.__name__,
        "programs": grid[0],
        "threads": 32 * made.metadata.num_warps,
        "registers": int(registers),
        "stack": int(stack),
        "shared": made.metadata.shared,
        "late": bool(constants.get("LATE")),
        "ranks": constants.get("BLOCK_R"),
        "fetches": ptx.count("prefetch.global.L2"),
        "narrow_loads": len(re.findall(r"\bld\.global\.b16", ptx)),
        "wide_loads": ptx.count("cp.async.cg.shared.global"),
        "single_casts": len(re.findall(r"\bcvt\.rn\.bf16\.f32", ptx)),
        "fp8_pairs": ptx.count("cvt.rn.f16x2.e4m3x2"),
        "fused": len(re.findall(r"\bfma\.rn", ptx)),
        "waiting_loops": waiting_loops(ptx),
        "barriers": ptx.count("bar.sync"),
        "wide_compares": len(re.findall(r"\bsetp\.\w+\.[su]64", ptx)),
        "sums": [re.sub(r"#\w+\b(?!\.)", lambda name: layouts[name[0]], tensor) for tensor in summed],
        "tensor_cores": len(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync", ptx)),
        "tiles_copied": ptx.count("cp.async.bulk.tensor"),
        "dependent": options.get("launch_pdl", False),
        "waits": accesses[0] == "griddepcontrol.wait",
        "before": sorted(
            {*accesses[: accesses.index("griddepcontrol.wait")]} if "griddepcontrol.wait" in accesses else {}
        ),
    }


def variants(queries: list[list[int]]) -> dict[str, int]:
    """How often each kernel is compiled for these batches. queries: of each batch, those of each of its rows."""
    launches.clear()
    table, lens = torch.zeros(64, 2048, dtype=torch.long), torch.full((64,), 2000)
    cache = torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16)
    for each in queries:
        rows, query = len(each), torch.zeros(sum(each), 8, 64, dtype=torch.bfloat16)
        plan = attention_plan.plan_attention(
            each, [2000] * rows, table[:rows], lens[:rows], block_size=16, token_bytes=1
        )
        attention.paged_attention(query, cache, cache, plan, scale=0.1, visibility=Visibility())
    found: dict[str, set[str]] = {}
    for kernel, _, given in launches:
        options = {name: value for name, value in given.items() if name not in kernel.arg_names}
        found.setdefault(kernel.__name__, set()).add(repr((*specialised(kernel, given), options)))
    return {name: len(different) for name, different in found.items()}


def launch(
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    latent: bool,
    kept: torch.dtype = torch.bfloat16,
    visibility: Visibility = PLAIN,
    span: bool | None = False,
) -> None:
    """A decode step and a chunk, which together launch every kernel.

    kept: dtype of the cache. span: whether the chunk has one, which takes about as many registers; None for no chunk.
    """

    def make(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.bfloat16)

    key_cache = make(4, 16, kv_heads, key_dim).to(kept)
    value_cache = key_cache[..., :value_dim] if latent else make(4, 16, kv_heads, value_dim).to(kept)
    table, lens = torch.zeros(64, 2048, dtype=torch.long), torch.full((64,), 2000)
    for queries in (1,) if span is None else (1, 64):
        rows = 64 if queries == 1 else 1
        options = {"block_size": 16, "token_bytes": 1, "window_tables": table.clone()}
        options["spans"] = [(0, 64)] if span and queries > 1 else []
        plan = attention_plan.plan_attention([queries] * rows, [2000] * rows, table, lens, **options)
        query = make(rows * queries, heads, key_dim)
        attention.paged_attention(query, key_cache, value_cache, plan, scale=0.1, visibility=visibility)
    new = make(64, kv_heads, key_dim), make(64, kv_heads, value_dim)
    attention.write_kv(*new, key_cache, value_cache, lens)


if __name__ == "__main__":
    for module in (attention, attention_plan):
        for name in [n for n in vars(module) if n.endswith("_kernel")]:
            setattr(module, name, Recorder(getattr(module, name)))
    as_on(90)
    launch(32, 8, 64, 64, latent=False)  # Llama 3.2 1B
    launch(32, 8, 128, 128, latent=False, span=True)  # Llama 3.1 8B
    launch(16, 1, 576, 512, latent=True, span=True)  # DeepSeek V2 Lite
    launch(32, 8, 128, 128, latent=False, kept=torch.float8_e4m3fn, span=True)
    launch(8, 4, 256, 256, latent=False, visibility=Visibility(window=1024))  # Gemma 3 4B
    launch(8, 1, 512, 512, latent=False, span=True)  # Gemma 4 E4B, where it sees everything
    launch(32, 4, 512, 512, latent=False, span=None)  # Gemma 4 31B; its chunks differ in how far apart heads are
    made = [build(*recorded) for recorded in launches]
    decode = variants([[1] * rows for rows in (2, 3, 8, 16, 24, 48, 64)])
    mixed = variants([[64, *[1] * rows] for rows in (2, 3, 4, 9, 16)])
    print(json.dumps({"made": made, "decode": decode, "mixed": mixed}))
