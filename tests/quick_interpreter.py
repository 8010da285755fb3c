"""Triton's interpreter without work that has no effect: for kernels as small as those of tests, most of what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from triton.runtime import interpreter


def make_quick() -> None:
    """Once in a process, in which kernels are interpreted and never compiled."""
    builder, patch_lang, done = interpreter.interpreter_builder, interpreter._patch_lang, set[int]()

    def patch_once(fn: Callable[..., Any]) -> Any:
        """Puts interpreted functions in place of the language's, which Triton repeats whenever a kernel calls a helper."""
        if id(fn.__globals__) not in done:
            done.add(id(fn.__globals__))
            patch_lang(fn)
        return interpreter._LangPatchScope()  # of no changes: they stay

    dtype_of, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def dtype_once(kind: Any) -> Any:
        """Looks up in a table that Triton builds anew at each call."""
        if kind.name not in dtypes:
            dtypes[kind.name] = dtype_of(kind)
        return dtypes[kind.name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, dtype_once
    # It computes sums and products of integers twice, to see whether they overflow, and looks at that in debug mode only.
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
