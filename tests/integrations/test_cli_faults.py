"""The command ``stoker``: what it says when something is wrong, before any work."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from cli_setup import make_files, make_folder, read, write
from trl_setup import make_model

from stoker.integrations.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    return make_files(tmp_path)


def test_windows_files_and_devices(folder: str, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes(b'\xef\xbb\xbf{"prompt": "abc"}\r\n\r\n{"prompt": "b"}\r\n')
    for _ in range(2):
        assert main(["generate", folder, str(source), "/dev/null", "--max-tokens", "2"]) == 0
    assert main(["generate", folder, str(source), str(tmp_path / "out"), "--max-tokens", "2"]) == 0
    assert [record["prompt"] for record in read(tmp_path / "out")] == ["abc", "b"]


def test_a_name_that_standard_output_has_no_letters_for(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under PYTHONIOENCODING=ascii, or an old code page of Windows."""
    named = tmp_path / "modèle"
    named.symlink_to(folder)
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["stoker", "info", str(named)])
    assert main() == 0
    assert rb"mod\xe8le" in printed.getvalue()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[", "The file has to be JSON Lines, an object on each line"),
        ("9" * 5000, "line 2 is not JSON: Exceeds the limit"),
        ("[" * 200_000, "line 2 is not JSON: maximum recursion"),
        (r'{"prompt": "\ud83d"}', "line 2 is not JSON: 'utf-8' codec"),  # half a character
        ("[1]", "line 2 is a list"),
        ("{}", "line 2 needs exactly one of prompt, messages, token_ids, and has none"),
        ('{"prompt": "a", "token_ids": [1]}', "has prompt and token_ids"),
        ('{"prompt": ""}', "prompt has to be text"),
        ('{"prompt": [1]}', "prompt has to be text"),
        ('{"messages": ["a"]}', "messages has to be a list of messages"),
        ('{"messages": []}', "messages has to be a list of messages"),
        ('{"token_ids": [1.5]}', "token_ids has to be a list of integers"),
        ('{"token_ids": [true]}', "token_ids has to be a list of integers"),
    ],
)
def test_a_bad_line_is_named_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(f'{{"prompt": "a"}}\n{line}\n')
    assert main(["generate", "no/model/is/loaded", str(source), str(target)]) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and not target.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stop-token-id", "5000"], "stoker: stop_token_ids has an id outside 0 to"),
        (["--suppress-token-id", "5000"], "stoker: suppress_token_ids has an id outside 0 to"),
        (["--regex", "Ω"], "is matched by no sequence of tokens"),
        (["--max-tokens", "60", "--kv-cache-memory", "16KiB"], "and the KV cache holds"),
    ],
)
def test_flags_that_no_line_could_be_served_with_are_refused_at_once(
    folder: str, files: tuple[str, str], flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", folder, *files, *flags]) == 1
    assert message in capsys.readouterr().err
    assert not Path(files[1]).exists()


@pytest.mark.parametrize(
    ("data", "byte"),
    [(b'{"prompt": "\xff"}', "ff"), (b'{"prompt": "\xe4"}', "e4"), (b'{"prompt": "a"}\xed\xa0\x80', "ed")],
)
def test_a_line_of_another_encoding_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, byte: str
) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b'{"prompt": "a"}\n' * 4999 + data + b"\n")
    assert main(["generate", "no/model/is/loaded", str(source), str(target)]) == 1
    assert f"line 5000 is not UTF-8: it has the byte 0x{byte}. Save the file as UTF-8" in capsys.readouterr().err


def test_blank_lines_are_none(folder: str, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text('\n{"token_ids": [3]}\n\n{"token_ids": [4]}\n')
    assert main(["generate", folder, str(source), str(target), "--max-tokens", "2"]) == 0
    assert [record["token_ids"] for record in read(target)] == [[3], [4]]


def test_files_and_models_that_are_not_there(
    folder: str, files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source, target), there = files, tmp_path / "there"
    there.touch()
    for arguments, message in (
        ([folder, str(tmp_path / "nothing"), target], "cannot read"),
        ([folder, str(tmp_path / "nothing"), str(there)], "cannot read"),
        ([folder, source, str(tmp_path / "no" / "out")], "cannot write"),
        ([str(tmp_path / "nothing"), source, target], "no such folder"),
        ([str(tmp_path), source, target], "no config.json"),
        (["nobody/nothing", source, target], "nobody/nothing is neither a folder here nor a model"),
    ):
        assert main(["generate", *arguments]) == 1
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error
        assert not Path(target).exists(), "a run that failed at its start has left an empty output"


@pytest.mark.parametrize("kept", ["", '{"token_ids": [3], "completions": []}\n'])
def test_an_output_outlives_a_start_that_fails(tmp_path: Path, kept: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text('{"token_ids": [3]}\n{"token_ids": [4]}\n')
    target.write_text(kept)
    for flags in ([], ["--overwrite"]):
        assert main(["generate", str(tmp_path / "nothing"), str(source), str(target), *flags]) == 1
        assert target.read_text() == kept
    source.write_text("")  # nothing to do is no failure
    assert main(["generate", str(tmp_path / "nothing"), str(source), str(target), "--overwrite"]) == 0
    assert target.read_text() == "" and capsys.readouterr().err.endswith(f"{source} has no lines\n")
    target.unlink()
    assert main(["generate", str(tmp_path / "nothing"), str(source), str(target)]) == 0
    assert target.read_text() == ""


def test_a_link_to_an_output_that_is_not_there_yet_outlives_a_start_that_fails(tmp_path: Path) -> None:
    source, link, target = tmp_path / "in", tmp_path / "link", tmp_path / "out"
    source.write_text('{"token_ids": [3]}\n')
    link.symlink_to(target)
    assert main(["generate", str(tmp_path / "nothing"), str(source), str(link)]) == 1
    assert link.is_symlink() and not target.exists()


def test_images_of_chats_of_which_one_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    import processors

    model, processor, picture = processors.make_model(), processors.make_processor(), processors.picture(0, 16, 24)
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(
        "transformers.AutoProcessor.from_pretrained", lambda *_, **__: processor
    )  # a class of the tests
    picture.save(tmp_path / "cat.png")
    images = [{"type": "image", "path": str(tmp_path / name)} for name in ("cat.png", "dog.png")]
    lines = [{"messages": [{"role": "user", "content": [image, {"type": "text", "text": "abc"}]}]} for image in images]
    source, target = write(tmp_path / "in", lines), str(tmp_path / "out")
    flags = ["--temperature", "0", "--max-tokens", "6", "--tokens", "--kv-cache-memory", "4MiB"]
    assert main(["generate", str(tmp_path / "model"), source, target, *flags]) == 1
    inputs = processor(text=["<|vision_start|><|image_pad|><|vision_end|>abc"], images=[picture], return_tensors="pt")
    expected = model.eval().generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    seen, lacking = read(target)
    assert seen["completions"][0]["token_ids"] == expected.tolist() and "dog.png" in lacking["error"]


def test_a_model_without_tokenizer_takes_token_ids(
    tmp_path: Path, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = files
    make_model().save_pretrained(tmp_path / "bare")
    assert main(["generate", str(tmp_path / "bare"), source, target]) == 1
    assert "has no tokenizer: every line needs token_ids" in capsys.readouterr().err
    source = write(tmp_path / "ids", [{"token_ids": [3]}])
    assert main(["generate", str(tmp_path / "bare"), source, target, "--max-tokens", "2"]) == 0
    assert len(read(target)[0]["completions"][0]["token_ids"]) <= 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top-p", "3"], "top_p=3.0"),
        (["--max-num-seqs", "0"], "max_num_seqs=0"),
        (["--device", "toaster"], "'toaster' is no torch device"),
        (["--temperature", "hot"], "invalid float"),
    ],
)
def test_wrong_flags_exit_with_2(
    folder: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["generate", folder, *files, *flags])
    said = capsys.readouterr().err
    assert exit_.value.code == 2 and message in said and said.startswith("usage: stoker generate")
    assert not Path(files[1]).exists()


def test_the_input_is_not_overwritten(folder: str, files: tuple[str, str]) -> None:
    before = Path(files[0]).read_bytes()
    with pytest.raises(SystemExit) as exit_:
        main(["generate", folder, files[0], files[0], "--overwrite"])
    assert exit_.value.code == 2 and Path(files[0]).read_bytes() == before
