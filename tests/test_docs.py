"""Every Python block of the documentation and the README runs, on a tiny model, and links and quoted errors exist."""

from __future__ import annotations

import pkgutil
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trl_setup import PROMPTS, count_a, make_model, make_tokenizer

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").glob("*.md"))]
# What the pages show is for a GPU and a real run.
SMALLER = {
    "4GiB": "4MiB",
    '"path/or/hub-id"': "folder, processing_class=tokenizer",
    'AsyncGRPOConfig(output_dir="out"': 'AsyncGRPOConfig(dtype="float32", output_dir="out"',
    'output_dir="out"': 'output_dir="out", use_cpu=True, bf16=False, max_steps=1, max_completion_length=8, report_to="none"',
}
ROOMS = ("rollout", "engine", "weight_sync", "kernels", "integrations")


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """Line number and code of each block of Python; of a diff, what the code is after it."""
    for match in re.finditer(r"^```(python|diff)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        code = match[2]
        if match[1] == "diff":
            kept = [line for line in code.splitlines() if not line.startswith("-")]
            code = textwrap.dedent("\n".join(line[1:] for line in kept))
        yield text[: match.start()].count("\n") + 2, code


def surroundings() -> dict[str, Any]:
    """What the pages take for given: the reader's model, data and loss."""
    model, tokenizer = make_model(max_position_embeddings=1024), make_tokenizer()
    tokenizer.padding_side = "left"

    def ppo_loss(model: Any, prompt_ids: Any, completion_ids: Any, completion_mask: Any, old_logprobs: Any) -> Any:
        logits = model(torch.cat([prompt_ids, completion_ids], 1)).logits[:, prompt_ids.shape[1] - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, completion_ids[..., None])[..., 0]
        return -((logprobs - old_logprobs).exp() * completion_mask).mean()

    names: dict[str, Any] = {
        "model": model,
        "tokenizer": tokenizer,
        "reward": count_a,
        "torch": torch,
        "loader": [["abc", "d"], ["fed", "cab"]],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "ppo_loss": ppo_loss,
        "__name__": "docs",
    }
    return names


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """One process, where a page is for many."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_page(page: Path, names: dict[str, Any]) -> int:
    """Run the blocks of a page one after the other; returns how many there are."""
    found = list(blocks(page.read_text(encoding="utf-8")))
    for line, code in found:
        for shown, smaller in SMALLER.items():
            code = code.replace(shown, smaller)
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
    return len(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # trainers write where they are
    names, text = surroundings(), page.read_text(encoding="utf-8")
    if "import attach" in text:
        pytest.importorskip("trl")
        from datasets import Dataset

        names["dataset"] = Dataset.from_dict({"prompt": PROMPTS * 4})
    if "import AsyncGRPOTrainer" in text:
        pytest.importorskip("trl")
        import trl_async_setup
        from datasets import Dataset

        trl_async_setup.stand_in(monkeypatch)
        names["model"].save_pretrained(tmp_path / "model")
        names |= {"folder": str(tmp_path / "model"), "reward": trl_async_setup.count_a}
        names |= {"tokenizer": trl_async_setup.chat_tokenizer()}
        names["dataset"] = Dataset.from_dict({"prompt": [[{"role": "user", "content": c}] for c in PROMPTS]})
    group = process_group(tmp_path) if "import fully_shard" in text else nullcontext()
    with group:
        ran = run_page(page, names)
    assert ran == text.count("```python\n") + text.count("```diff\n")


def test_a_block_that_fails_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nx = 1\n```\n\n```diff\n-x = nothing\n+y = x + 1\n y += 1\n```\n")
    names: dict[str, Any] = {}
    assert run_page(page, names) == 2 and names["y"] == 3
    page.write_text("```python\nnothing\n```\n")
    with pytest.raises(NameError):
        run_page(page, {})


def test_troubleshooting_quotes_errors_that_exist() -> None:
    sources = "\n".join(file.read_text(encoding="utf-8") for room in ROOMS for file in (ROOT / room).rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # messages are split over lines
    quoted = re.findall(r"^### `(.+)`$", (ROOT / "docs/pages/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(quoted) >= 8
    assert [message for message in quoted if message not in sources] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "docs" / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES[1:] if f": {page.name}\n" not in navigation] == []


def test_every_name_of_the_reference_exists() -> None:
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs/pages/api.md").read_text(), re.MULTILINE)
    assert len(names) > 10
    for name in names:
        assert pkgutil.resolve_name(name) is not None
