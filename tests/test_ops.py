"""The table of operations is complete: each has a reference, a Triton kernel, and tests that name it."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from stoker.kernels.ops import DETERMINISTIC, REFERENCE, TRITON, Ops

TESTS = Path(__file__).parent
# An operation leaves this list with its kernel.
WITHOUT_KERNEL = {
    "plan_attention": "attention is the torch reference on every device",
    "write_kv": "attention is the torch reference on every device",
    "paged_attention": "attention is the torch reference on every device",
    "gumbel_noise": "sampling is the torch reference on every device",
    "sample": "sampling is the torch reference on every device",
    "token_logprobs": "sampling is the torch reference on every device",
    "score_tokens": "sampling is the torch reference on every device",
    "truncate": "sampling is the torch reference on every device",
}
# And this one with its tests.
WITHOUT_TESTS = {"score_tokens"}
OPERATIONS = [f.name for f in fields(Ops) if callable(getattr(REFERENCE, f.name))]


def test_the_list_of_exceptions_is_of_operations() -> None:
    assert set(OPERATIONS) >= WITHOUT_KERNEL.keys()


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_a_reference(name: str) -> None:
    assert getattr(REFERENCE, name).__module__.startswith("stoker.kernels.reference.")


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_a_kernel_or_a_reason(name: str) -> None:
    kernel, reference = getattr(TRITON, name), getattr(REFERENCE, name)
    assert (kernel is reference) == (name in WITHOUT_KERNEL)
    if kernel is not reference:
        assert not kernel.__module__.startswith("stoker.kernels.reference.")
        assert not getattr(DETERMINISTIC, name).__module__.startswith("stoker.kernels.reference.")


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_tests(name: str) -> None:
    """Of its reference, and of its kernel through the table."""
    modules = {path.name: path.read_text() for path in TESTS.glob("test_*.py") if path.name != Path(__file__).name}
    assert any(re.search(rf"\b{name}\b", text) for text in modules.values()) == (name not in WITHOUT_TESTS)
    if name not in WITHOUT_KERNEL:
        assert any(re.search(rf"\b(TRITON|ops)\.{name}\(", text) for text in modules.values() if "TRITON" in text)
