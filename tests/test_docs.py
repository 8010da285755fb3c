"""Every Python block of the documentation and the README runs, on a tiny model, and links and quoted errors exist."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import pkgutil
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trl_setup import PROMPTS, count_a, make_model, make_tokenizer

import stoker.rollout
from stoker.integrations import cli
from stoker.weight_sync.transport import WeightTransfer

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").glob("*.md"))]
RESULTS = ROOT / "benchmarks" / "results" / "README.md"
# What the pages show is for a GPU and a real run.
SMALLER = {
    "4GiB": "4MiB",
    "Accelerator()": "Accelerator(cpu=True)",
    '"path/or/hub-id"': "folder, processing_class=tokenizer",
    '"http://localhost:8001"': "teacher_url",
    'AsyncGRPOConfig(output_dir="out"': 'AsyncGRPOConfig(dtype="float32", output_dir="out"',
    'output_dir="out"': 'output_dir="out", use_cpu=True, bf16=False, max_steps=1, max_completion_length=8, report_to="none"',
}
ROOMS = ("rollout", "engine", "weight_sync", "kernels", "integrations")


# How many lines a loop adds to adopt the engine; updates of a sharded model are said, as all ranks make them together.
MOST_ADDED = {"sharded": 4, "trl-async": 4}


def blocks(text: str, kinds: str = "python|diff", without: str = "-") -> Iterator[tuple[int, str]]:
    """Line number and code of each block of Python; of a diff, what the code is after it (before it: without "+")."""
    for match in re.finditer(rf"^```({kinds})\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        code = match[2]
        if match[1] == "diff":
            kept = [line for line in code.splitlines() if not line.startswith(without)]
            code = textwrap.dedent("\n".join(line[1:] for line in kept))
        yield text[: match.start()].count("\n") + 2, code


def surroundings() -> dict[str, Any]:
    """What the pages take for given: the reader's model, data and loss, and how he sampled so far."""
    model, tokenizer = make_model(max_position_embeddings=1024), make_tokenizer()
    tokenizer.padding_side = "left"

    def sample(model: Any, prompts: list[str]) -> SimpleNamespace:
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        ids = getattr(model, "module", model).generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=True)
        width = inputs["input_ids"].shape[1]
        with torch.no_grad():
            logits = model(ids).logits[:, width - 1 : -1]
        completion_ids = ids[:, width:]
        logprobs = logits.log_softmax(-1).gather(-1, completion_ids[..., None])[..., 0]
        mask = torch.ones_like(completion_ids)
        return SimpleNamespace(
            prompt_ids=ids[:, :width], completion_ids=completion_ids, completion_mask=mask, logprobs=logprobs
        )

    def ppo_loss(model: Any, prompt_ids: Any, completion_ids: Any, completion_mask: Any, old_logprobs: Any) -> Any:
        logits = model(torch.cat([prompt_ids, completion_ids], 1)).logits[:, prompt_ids.shape[1] - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, completion_ids[..., None])[..., 0]
        return -((logprobs - old_logprobs).exp() * completion_mask).mean()

    names: dict[str, Any] = {
        "model": model,
        "teacher": make_model(tie_word_embeddings=True),
        "tokenizer": tokenizer,
        "reward": count_a,
        "torch": torch,
        "loader": [["abc", "d"], ["fed", "cab"]],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "ppo_loss": ppo_loss,
        "sample": sample,
        "__name__": "docs",
    }
    return names


def commands() -> list[str]:
    """Lines of the pages' shell blocks, without comments."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    shell = [
        b for kind, b in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if kind in ("", "sh")
    ]
    lines = [line.partition("  #")[0].strip() for block in shell for line in block.splitlines()]
    return [line for line in lines if line.startswith(("stoker ", "make ", "pip "))]


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """One process, where a page is for many."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_page(page: Path, names: dict[str, Any], *selection: str) -> int:
    """Run the blocks of a page one after the other; returns how many there are."""
    found = list(blocks(page.read_text(encoding="utf-8"), *selection))
    for line, code in found:
        for shown, smaller in SMALLER.items():
            code = code.replace(shown, smaller)
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
    return len(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # trainers write where they are
    names, text, within = surroundings(), page.read_text(encoding="utf-8"), ExitStack()
    if "import attach" in text:
        pytest.importorskip("trl")
        from datasets import Dataset

        names["dataset"] = Dataset.from_dict({"prompt": PROMPTS * 4})
    if "import AsyncGRPOTrainer" in text:
        pytest.importorskip("trl", minversion="1.16")
        import async_teachers
        import trl_async_setup
        from datasets import Dataset

        trl_async_setup.stand_in(monkeypatch)
        async_teachers.stand_in(monkeypatch)
        names["teacher_url"] = within.enter_context(async_teachers.served(async_teachers.teacher_model())).url
        names["model"].save_pretrained(tmp_path / "model")
        names |= {"folder": str(tmp_path / "model"), "reward": trl_async_setup.count_a}
        names |= {"tokenizer": trl_async_setup.chat_tokenizer()}
        names["dataset"] = Dataset.from_dict({"prompt": [[{"role": "user", "content": c}] for c in PROMPTS]})
    if page.stem == "server":
        monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        pytest.importorskip("openai")
        pytest.importorskip("uvicorn")
    if page.stem == "images":
        pytest.importorskip("PIL")
        import processors

        names |= {"model": processors.make_model(), "processor": processors.make_processor()}
        names["image"] = processors.picture(0, 16, 24)
    with within:
        if "import fully_shard" in text:
            within.enter_context(process_group(tmp_path))
        ran = run_page(page, names)
    assert ran == text.count("```python\n") + text.count("```diff\n")


@pytest.mark.parametrize("page", ["accelerate", "ppo", "sharded", "trl"])
def test_what_a_diff_starts_from_runs_too(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names, path = surroundings(), ROOT / "docs" / "pages" / f"{page}.md"
    if page == "trl":
        pytest.importorskip("trl")
        from datasets import Dataset

        names["dataset"] = Dataset.from_dict({"prompt": PROMPTS * 4})
    # transformers' continuous batching takes half a minute to set itself up.
    quick = tmp_path / path.name
    quick.write_text(path.read_text(encoding="utf-8").partition("## Coming from")[0], encoding="utf-8")
    with process_group(tmp_path) if page == "sharded" else nullcontext():
        assert run_page(quick, names, "diff", "+") == 1
    assert "engine" not in names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_diff_adds_few_lines(page: Path) -> None:
    diffs = re.findall(r"^```diff\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    added = [len(re.findall(r"^\+", diff, re.MULTILINE)) for diff in diffs]
    assert max(added, default=0) <= MOST_ADDED.get(page.stem, 3)


def test_commands_are_understood() -> None:
    found = commands()
    assert len(found) > 8
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for program, command, *arguments in (shlex.split(line) for line in found):
        if program == "make":
            assert command in targets
        elif program == "pip":
            assert all(extra in extras for extra in re.findall(r"\[(\w+)\]", " ".join(arguments)))
        elif command in cli._PROGRAMS:
            default, programs = cli._PROGRAMS[command]
            assert (arguments or [default])[0] in programs
        else:
            cli._parser().parse_args([command, *arguments])


def test_a_block_that_fails_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nx = 1\n```\n\n```diff\n-x = nothing\n+y = x + 1\n y += 1\n```\n")
    names: dict[str, Any] = {}
    assert run_page(page, names) == 2 and names["y"] == 3
    page.write_text("```python\nnothing\n```\n")
    with pytest.raises(NameError):
        run_page(page, {})


def templates(node: ast.expr) -> list[str]:
    """A message as it is written, in each of its forms, with a bar where a value comes in."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.IfExp):
        return templates(node.body) + templates(node.orelse)
    if isinstance(node, ast.FormattedValue):
        return templates(node.value) if isinstance(node.value, ast.IfExp) else ["|"]
    parts = (
        node.values
        if isinstance(node, ast.JoinedStr)
        else [node.left, node.right]
        if isinstance(node, ast.BinOp)
        else []
    )
    return ["".join(forms) for forms in itertools.product(*map(templates, parts))] if parts else ["|"]


def messages(node: ast.AST) -> list[str]:
    """What an error says that is made here, or an answer over HTTP, or argparse of a flag."""
    if not isinstance(node, ast.Call) or not node.args:
        return []
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    return templates(node.args[-1]) if name.endswith(("Error", "error")) else []


def sources() -> Iterator[tuple[str, ast.AST]]:
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            path = file.relative_to(ROOT)
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                yield f"{path}:{getattr(node, 'lineno', 0)}", node


def quoted_errors() -> list[str]:
    text = (ROOT / "docs/pages/troubleshooting.md").read_text(encoding="utf-8")
    keys = re.findall(r"^### `(.+)`$", text, re.MULTILINE)
    for first in re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE):
        keys += re.findall(r"`([^`]+)`", first)
    return keys


def test_troubleshooting_quotes_errors_that_exist() -> None:
    texts = [
        form for _, node in sources() if isinstance(node, ast.Constant | ast.JoinedStr) for form in templates(node)
    ]
    quoted = quoted_errors()
    assert len(quoted) > 100
    assert [key for key in quoted if not any(key in text for text in texts)] == []


def test_every_error_is_found_in_troubleshooting() -> None:
    """By words of the message that are the same each time."""
    quoted, lacking, seen = quoted_errors(), [], 0
    for place, node in sources():
        for message in messages(node):
            seen += 1
            words = max(map(len, message.split("|")))
            if words > 12 and not any(key in message for key in quoted):
                lacking.append(f"{place}: {message}")
    assert seen > 150
    assert lacking == [], "give docs/pages/troubleshooting.md an entry with words of these"


def test_tuning_has_every_setting_and_its_default() -> None:
    rows = re.findall(r"^\| (`.+?) \| (`.+?) \|", (ROOT / "docs/pages/tuning.md").read_text(), re.MULTILINE)
    said: dict[str, str] = {}
    for settings, defaults in rows:
        names, values = re.findall("`([^`]+)`", settings), re.findall("`([^`]+)`", defaults)
        said |= dict(zip(names, values * len(names) if len(values) == 1 else values, strict=True))
    is_so = {field.name: field.default for field in dataclasses.fields(stoker.rollout.EngineConfig)}
    assert {name: ast.literal_eval(value) for name, value in said.items()} == is_so


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The file that each relative link of a page leads to, and the heading in it, if it names one."""
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, heading = target.partition("#")
        yield ((page.parent / path).resolve() if path else page), heading


def headings(page: Path) -> set[str]:
    """As links name them."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize(
    "page", [*PAGES, RESULTS, RESULTS.parents[1] / "README.md"], ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_links_lead_somewhere(page: Path) -> None:
    assert [
        path for path, heading in links(page) if not path.exists() or (heading and heading not in headings(path))
    ] == []


def test_figures_of_the_readme_are_among_the_results() -> None:
    quoted, known = ({path for path, _ in links(page) if path.parent == RESULTS.parent} for page in (PAGES[0], RESULTS))
    assert len(quoted) > 10 and quoted - known == {RESULTS}


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "docs" / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES[1:] if f": {page.name}\n" not in navigation] == []


def reference() -> dict[str, Any]:
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs/pages/api.md").read_text(), re.MULTILINE)
    return {name: pkgutil.resolve_name(name) for name in names}


def test_the_reference_has_all_that_is_public() -> None:
    shown = list(reference().values())
    shown += [thing for module in shown if inspect.ismodule(module) for thing in vars(module).values()]
    missing = [n for n in stoker.rollout.__all__ if not any(getattr(stoker.rollout, n) is thing for thing in shown)]
    assert len(shown) > 20 and missing == []


def test_what_the_reference_has_is_documented() -> None:
    """Each public member by a docstring, or it would not be shown; each field of a result or a config by its class's."""
    lacking = []
    for name, thing in reference().items():
        if not inspect.isclass(thing) or issubclass(thing, WeightTransfer):  # these have the protocol's methods
            continue
        fields = [f.name for f in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else []
        fields += getattr(thing, "_fields", ())
        for member, value in vars(thing).items():
            shown = isinstance(value, property | FunctionType | classmethod) and not member.startswith("_")
            if shown and not inspect.getdoc(getattr(thing, member)):
                lacking.append(f"{name}.{member}")
        said = inspect.getdoc(thing) or ""
        lacking += [f"{name}: {f}" for f in fields if f[0] != "_" and not re.search(rf"\b{f}\b", said)]
    assert lacking == []
