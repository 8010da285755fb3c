"""The table of operations is complete: each has a reference, a Triton kernel, and tests that name it."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from stoker.kernels.ops import REFERENCE, Ops
from stoker.kernels.triton_ops import DETERMINISTIC, TRITON

TESTS = Path(__file__).parent
OPERATIONS = [f.name for f in fields(Ops) if callable(getattr(REFERENCE, f.name))]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_a_reference(name: str) -> None:
    assert getattr(REFERENCE, name).__module__.startswith("stoker.kernels.reference.")


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_a_kernel(name: str) -> None:
    for table in (TRITON, DETERMINISTIC):
        assert not getattr(table, name).__module__.startswith("stoker.kernels.reference.")


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_tests(name: str) -> None:
    """Of its reference, and of its kernel through the table."""
    modules = {path.name: path.read_text() for path in TESTS.glob("test_*.py") if path.name != Path(__file__).name}
    assert any(re.search(rf"\b{name}\b", text) for text in modules.values())
    assert any(re.search(rf"\b(TRITON|ops)\.{name}\(", text) for text in modules.values() if "TRITON" in text)
