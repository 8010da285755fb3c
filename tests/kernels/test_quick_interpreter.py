"""What Triton's interpreter leaves out in tests changes no result."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import quick_interpreter
import triton.language as tl
from triton.runtime import interpreter

OPERATORS = quick_interpreter._OPERATORS


def operands() -> list[Any]:
    """Tensors of every kind of number and several shapes, addresses, and constants."""
    rng, found = np.random.default_rng(0), list[Any]()
    for dtype in (
        tl.int1,
        tl.int8,
        tl.int32,
        tl.int64,
        tl.uint32,
        tl.float16,
        tl.float32,
        tl.pointer_type(tl.bfloat16),
    ):
        for shape in ([], [4], [1, 4], [2, 1], [2, 4]):
            numbers = rng.integers(0, 3, shape or [1]).astype(interpreter._get_np_dtype(dtype))
            found.append(
                tl.tensor(interpreter.TensorHandle(numbers, dtype), tl.block_type(dtype, shape) if shape else dtype)
            )
    return [*found, 0, 2, -1, 2**31, 1.5, -0.0, float("inf"), True, tl.constexpr(2), tl.constexpr(0.5)]


def outcome(operate: Any, one: Any, other: Any, **options: Any) -> Any:
    try:
        found = operate(one, other, **options)
    except Exception as error:
        return type(error).__name__
    return (
        found.type,
        found.handle.data.dtype,
        found.handle.data.shape,
        str(found.handle.data.tolist()),
    )  # in which NaN is NaN


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_give_what_the_interpreter_s_own_do(name: str) -> None:
    now = getattr(tl.tensor, name)
    own = getattr(now, "thorough", None) or inspect.unwrap(now)
    semantic = {} if hasattr(now, "thorough") else {"_semantic": interpreter.interpreter_semantic}
    taken = list[Any]()

    def thorough(one: Any, other: Any) -> Any:
        taken.append((one, other))
        return own(one, other, **semantic)

    quick, compared, tensors = quick_interpreter._operator(name, thorough), 0, operands()
    for one in tensors:
        for other in tensors:
            if isinstance(one, tl.tensor):
                assert outcome(quick, one, other) == outcome(own, one, other, **semantic), (one.type, other)
                compared += 1
    assert len(taken) < compared, "none was quick"
