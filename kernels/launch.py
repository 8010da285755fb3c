"""How kernels are launched: on Hopper and later, a kernel starts while the one before it still runs.

This is CUDA's programmatic dependent launch. A step for few rows is a hundred kernels of some microseconds each. Between
two of them the chip would stand still for about one microsecond, until new programs have started and their first loads
have arrived. With this, a kernel's programs start as places become free, prefetch weights to L2, and then wait for their
turn. Captured steps keep it.

Three rules make every kernel see all that was written before it:

- Each program calls ``await_turn`` before it writes to device memory, or reads what the kernel before may write.
- No program of the next kernel starts before all programs of this one have called it.
- A kernel ends only after its own wait, so waiting for the kernel before is waiting for all earlier ones too. Programs that have
  nothing to do may end at once, as long as one waits.

So when a kernel starts, all but the one before it have ended, and what those wrote may be read before the wait. This is
done by shrinks and expands of adapters (``lora``), products that these run ahead of (``linear.streamed``), attention for its first
keys (``attention.decode``), rotary embedding for a step's angles and slots (``norm_rotary``, ``attention.latent``), and a decode
step's recurrences for the states that the step before left (``recurrent``). Weights may be read at any time.

Two kernels let the next one come up before they wait themselves (``let_next_up``, and then ``await_end``), each of them known to
the one after it: a shrink beside a product, and an expand ahead of one. That one starts while both before it may still run, and
before its wait it reads nothing that either of them writes. A product that adapters run ahead of also writes before its wait:
the sums of its splits, to memory that it alone has, allocated before the adapters were launched. Whoever had that memory before
has ended.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import threading
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
PROGRAM_SHARED = 1024  # bytes of shared memory that CUDA takes of each program
_ROOMY = set[int]()  # functions that ``leave_room`` was told of
_LINE_BITS = tl.constexpr(8 * 128)  # of a cache line


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of a device's multiprocessors; a few where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory of one multiprocessor of a device; an H100's where kernels are interpreted.

    From Ampere on, a program takes ``PROGRAM_SHARED`` on top of what it asks for.
    """
    if device.type != "cuda":
        return 228 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


@cache
def load_one_at_a_time() -> None:
    """Let kernels be compiled by several threads at a time, which then load them one after the other.

    Triton before 3.7 loads a launcher for each signature, all of them modules of one name, which Python keeps as one: a thread
    that looks for its launcher in there while another one loads its own gets that (seen: a call with the arguments of another
    kernel).
    """
    driver: Any = triton.runtime.driver.active
    load, lock = driver.launcher_cls, threading.Lock()

    def alone(*what: Any) -> Any:
        with lock:
            return load(*what)

    driver.launcher_cls = alone


@cache
def starts_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def copies_tiles(device: torch.device) -> bool:
    """Whether the chip copies tiles of a matrix to shared memory by itself (TMA, from Hopper on). Interpreters do."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def stream(device: torch.device) -> int:
    """The stream that kernels are launched on now. What is sent to a device without waiting is there for its own stream alone."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def options(device: torch.device, *, waits: bool = True, early: bool = True, fused: bool = True) -> dict[str, Any]:
    """The launch options of a kernel, always given: versions of Triton have different defaults.

    waits: it calls ``await_turn``. early: it may start before the kernel before it has ended. fused: ``a * b + c`` may be
    rounded once, as one FMA.
    """
    asked: dict[str, Any] = {"enable_fp_fusion": fused}
    if waits:
        asked["DEPENDENT"] = asked["launch_pdl"] = early and starts_early(device)
    return asked


def leave_room(launched: Any) -> None:
    """Let programs of a kernel, which its launch returns, share a multiprocessor with those of one that needs nearly all shared memory.

    How much of a multiprocessor's memory is shared changes only while no program is there. A kernel that needs little of it leaves
    it small, and a product that could start early waits until the last of these programs has ended (H200: 3 to 4 us). This asks
    for all of it, from the next launch on; a driver that does not know it loses nothing but that.
    """
    function = getattr(launched, "function", None)  # none where kernels are interpreted
    if not isinstance(function, int) or function in _ROOMY:
        return
    _ROOMY.add(function)
    try:
        from cuda.bindings import driver
    except ImportError:
        return
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    driver.cuFuncSetAttribute(driver.CUfunction(function), attribute, 100)


def in_rows(tensor: Tensor) -> Tensor:
    """The tensor with its last dimension contiguous, as kernels read it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@triton.jit
def await_turn(DEPENDENT: tl.constexpr):
    """Wait for the kernel before to end, and let the one after come up."""
    if DEPENDENT:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def let_next_up(DEPENDENT: tl.constexpr):
    """Let the kernel after come up, while those before may still run."""
    if DEPENDENT:
        cuda.gdc_launch_dependents()


@triton.jit
def await_end(DEPENDENT: tl.constexpr):
    """Wait for the kernel before to end; the one after was let up before."""
    if DEPENDENT:
        cuda.gdc_wait()


@triton.jit
def fetch(rows, COLUMNS: tl.constexpr, last=None):
    """The first COLUMNS of some rows, pointers to which are given, are on their way to L2; up to column ``last`` where there is one.

    Nothing is read: what a kernel before may still write there is in L2, too.
    """
    LINE: tl.constexpr = _LINE_BITS // rows.dtype.element_ty.primitive_bitwidth
    columns = tl.arange(0, triton.next_power_of_2(max(COLUMNS // LINE, 1))) * LINE
    columns = tl.minimum(columns, COLUMNS - 1 if last is None else last)
    lines = rows[:, None] + columns[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [lines.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def fetch_ahead(matrix, rows, stride, num_rows, depth, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr):
    """``fetch`` of some rows of a matrix [num_rows, depth]."""
    if DEPENDENT:
        fetch(matrix + tl.minimum(rows, num_rows - 1).to(tl.int64) * stride, COLUMNS, depth - 1)


@triton.jit
def fetch_part_ahead(vector, first, size, COUNT: tl.constexpr, DEPENDENT: tl.constexpr):
    """``fetch`` of COUNT numbers of a vector [size] from the first on."""
    at = tl.minimum(first, size - 1)
    fetch_ahead(vector + at, tl.arange(0, 1), 0, 1, size - at, COUNT, DEPENDENT)
