"""The rooms and floors: who may import whom, what gets installed, and that no room hides somebody else's package."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def import_names(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement, maxsplit=1)[0].replace("-", "_") for requirement in requirements}


FLOORS = {"kernels": 1, "engine": 2, "weight_sync": 2, "rollout": 3, "integrations": 4, "benchmarks": 5, "examples": 5}
# Outside packages: what pyproject.toml declares, triton only at the bottom and the extras only at the top.
CORE = import_names(PROJECT["dependencies"]) - {"triton"}
EXTRAS = [group for group in PROJECT["optional-dependencies"] if group not in ("dev", "docs", "plot")]
EVERYTHING = CORE.union(*(import_names(PROJECT["optional-dependencies"][group]) for group in EXTRAS))
OUTSIDE = {  # cuda.bindings comes with torch's CUDA builds, bitsandbytes with a model's layers
    "kernels": {"torch", "triton", "cuda"},
    "engine": CORE | {"cuda", "bitsandbytes"},
    "weight_sync": CORE,
    "rollout": CORE,
    "integrations": EVERYTHING,
    "benchmarks": EVERYTHING | {"matplotlib", "tokenizers", "vllm", "lmdeploy"},  # the last two where they are there
    "examples": EVERYTHING | {"matplotlib", "tokenizers"},
}


def imported_names(source: str, package: str) -> Iterator[str]:
    """The absolute dotted name of everything that a module of `package` imports, wherever in the module it does so."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def forbidden_imports(source: str, package: str) -> list[str]:
    """What a module of `package` ("stoker.engine") imports and must not: rooms beside and above its own, and outside
    packages its room has no business with. A room's bare name counts as an outside package."""
    room = package.split(".")[1]

    def allowed(name: str) -> bool:
        top, _, rest = name.partition(".")
        if top == "stoker":
            target = rest.partition(".")[0]
            return target == room or FLOORS.get(target, sys.maxsize) < FLOORS[room]
        return top in sys.stdlib_module_names or top in OUTSIDE[room]

    return [name for name in imported_names(source, package) if not allowed(name)]


def room_files(folder: Path) -> dict[str, bytes]:
    """Contents by relative path of all that belongs in an installed room."""
    files = [*folder.rglob("*.py"), *folder.rglob("py.typed")]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def run_python_at_the_root(*arguments: str) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    run = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("room", FLOORS)
def test_imports_keep_to_the_floors(room: str) -> None:
    found = {}
    for file in (ROOT / room).rglob("*.py"):
        path = file.relative_to(ROOT)
        if names := forbidden_imports(file.read_text(), ".".join(["stoker", *path.parent.parts])):
            found[path.as_posix()] = names
    assert not found


@pytest.mark.parametrize(
    "guide",
    [
        "rollout/__init__.py",
        "engine/__init__.py",
        "engine/adapters/__init__.py",
        "engine/cache/__init__.py",
        "engine/images/__init__.py",
        "engine/layers/__init__.py",
        "engine/parallel/__init__.py",
        "weight_sync/__init__.py",
        "integrations/__init__.py",
        "kernels/ops.py",
    ],
)
def test_a_folder_says_what_its_files_are_for(guide: str) -> None:
    """Its guide names every file and folder, and none that is not there."""
    path = ROOT / guide
    text = ast.get_docstring(ast.parse(path.read_text())) or ""

    def entries(folder: Path) -> Iterator[Path]:
        yield from (p for p in folder.iterdir() if p.suffix == ".py" or (p.is_dir() and any(p.glob("*.py"))))

    found = [p for p in entries(path.parent) if p != path]
    if path.parent.name == "kernels":  # the folders in it have no guides, as they have no __init__.py; see below
        found += [p for folder in found if folder.is_dir() and folder.name != "reference" for p in entries(folder)]
    there = {p.stem for p in found}
    assert set(re.findall(r"``(\w+)``", text)) == there


@pytest.mark.parametrize(
    ("package", "statement"),
    [
        ("stoker.kernels", "import transformers"),
        ("stoker.kernels", "from stoker.engine import core"),
        ("stoker.kernels.reference", "from ...engine.core import Core"),
        ("stoker.engine", "import stoker.weight_sync.source"),
        ("stoker.engine", "from stoker import weight_sync"),
        ("stoker.engine", "from .. import weight_sync"),
        ("stoker.engine", "from stoker import *"),
        ("stoker.engine", "def f():\n    from ..rollout.config import EngineConfig"),
        ("stoker.engine", "import triton.language as tl"),
        ("stoker.weight_sync", "from ..engine.core import Core"),
        ("stoker.weight_sync", "import peft"),
        ("stoker.rollout", "from stoker.integrations.trl import rollout"),
        ("stoker.rollout", "import trl"),
        ("stoker.integrations", "import kernels"),
        ("stoker.integrations", "from engine.core import Core"),
        ("stoker.integrations", "import stoker"),
        ("stoker.integrations", "from tests import families"),
        ("stoker.integrations", "from stoker.benchmarks import report"),
        ("stoker.examples", "from stoker.benchmarks import report"),
    ],
)
def test_the_check_finds_a_forbidden_import(package: str, statement: str) -> None:
    assert forbidden_imports(statement, package)


@pytest.mark.parametrize(
    ("package", "statement"),
    [
        ("stoker.kernels", "from .reference import attention"),
        ("stoker.kernels.reference", "from ..errors import StokerError"),
        ("stoker.engine", "from __future__ import annotations\nimport os.path"),
        ("stoker.engine", "from . import block_pool"),
        ("stoker.engine", "from stoker.kernels.errors import StokerError"),
        ("stoker.weight_sync", "from ..kernels.errors import StokerError"),
        ("stoker.rollout", "from stoker import engine, weight_sync"),
        ("stoker.integrations", "import trl.trainer\nfrom ..rollout.config import EngineConfig"),
    ],
)
def test_the_check_lets_a_permitted_import_pass(package: str, statement: str) -> None:
    assert not forbidden_imports(statement, package)


def test_every_code_folder_is_a_declared_package() -> None:
    folders = {file.parent.relative_to(ROOT) for room in FLOORS for file in (ROOT / room).rglob("*.py")}
    assert {".".join(["stoker", *folder.parts]) for folder in folders} == set(
        PYPROJECT["tool"]["setuptools"]["packages"]
    )


@pytest.mark.parametrize("room", FLOORS)
def test_the_installed_room_is_the_repository_s(room: str) -> None:
    spec = importlib.util.find_spec(f"stoker.{room}")
    assert spec is not None and spec.submodule_search_locations
    installed = room_files(Path(next(iter(spec.submodule_search_locations))))
    assert "py.typed" in installed
    assert installed == room_files(ROOT / room)


# `python -m`, `python -c` and notebooks put the current folder on sys.path, ahead of everything installed. At the root,
# `import kernels` still finds Hugging Face's package, because our folder has no __init__.py: Python takes such a folder
# only if no entry of the path has a real package of that name, and then transformers reads it as "not installed".


def test_kernels_has_no_init() -> None:
    assert not list((ROOT / "kernels").rglob("__init__.py"))


HUGGING_FACE_KERNELS_WINS = """
import os, sys
assert "" in sys.path or os.getcwd() in sys.path
import kernels, stoker.kernels.errors
from importlib.metadata import distribution
assert os.path.samefile(kernels.__file__, distribution("kernels").locate_file("kernels/__init__.py"))
from kernels import LayerRepository, get_kernel
"""
needs_hugging_face_kernels = pytest.mark.skipif(
    getattr(importlib.util.find_spec("kernels"), "origin", None) is None, reason="needs Hugging Face's kernels package"
)


@needs_hugging_face_kernels
def test_hugging_face_kernels_is_not_hidden_from_python_at_the_root() -> None:
    # transformers imports the package only within a range of versions of its own.
    run_python_at_the_root("-c", "import transformers.integrations.hub_kernels\n" + HUGGING_FACE_KERNELS_WINS)


@needs_hugging_face_kernels
def test_hugging_face_kernels_is_not_hidden_from_python_m_pytest_at_the_root(tmp_path: Path) -> None:
    test = tmp_path / "test_kernels.py"
    test.write_text("def test():" + HUGGING_FACE_KERNELS_WINS.replace("\n", "\n    "))
    run_python_at_the_root("-m", "pytest", "-q", "-p", "no:cacheprovider", str(test))
