"""The command ``stoker``: what it writes, how it goes on after a kill, and what it says when something is wrong."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import greedy
from trl_setup import EOS, make_model, make_tokenizer, plain_logprobs

from stoker.integrations.cli import main
from stoker.integrations.jsonl import CommandError, Line, ResumableWriter
from stoker.kernels.ops import REFERENCE, Ops
from stoker.rollout import InvalidRequestError, RolloutEngine, SamplingParams

TEMPLATE = "{% for m in messages %}h{{ m.content }}{% endfor %}{% if add_generation_prompt %}g{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(path)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return str(path)


def write(path: Path, lines: list[Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def read(path: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    lines = [
        {"prompt": "abc", "id": 7},
        {"messages": [{"role": "user", "content": "fed"}]},
        {"token_ids": [3, 4, 5], "completions": "replaced"},
    ]
    return write(tmp_path / "in.jsonl", lines), str(tmp_path / "out.jsonl")


# -- generate ----------------------------------------------------------------------------------------------------------


def test_greedy_completions_are_the_models(folder: str, files: tuple[str, str]) -> None:
    source, target = files
    assert main(["generate", folder, source, target, "--temperature", "0", "--max-tokens", "12", "--tokens"]) == 0
    model, tokenizer = make_model().eval(), make_tokenizer()
    prompts = [tokenizer(text)["input_ids"] for text in ("abc", "hfedg")] + [[3, 4, 5]]
    written = read(target)
    assert [set(record) for record in written] == [{"prompt", "id", "completions"}, {"messages", "completions"}, {"token_ids", "completions"}]  # fmt: skip
    assert written[0]["id"] == 7
    for prompt, record in zip(prompts, written, strict=True):
        (completion,) = record["completions"]
        assert completion["token_ids"] == greedy(model, prompt, 12)
        assert completion["text"] == tokenizer.decode(completion["token_ids"], skip_special_tokens=True)
        assert completion["finish_reason"] == ("stop" if completion["token_ids"][-1] == EOS else "length")
        plain = plain_logprobs(model, prompt, completion["token_ids"])
        assert completion["logprobs"] == pytest.approx(plain, abs=1e-4)


def test_flags_are_the_sampling_parameters(
    folder: str, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def submit(_: RolloutEngine, prompt: Any, params: SamplingParams, **__: Any) -> None:
        seen.append(params)
        raise InvalidRequestError("enough")

    monkeypatch.setattr(RolloutEngine, "submit", submit)
    given: dict[str, Any] = {
        "n": 2, "max_tokens": 5, "min_tokens": 3, "temperature": 0.7, "top_p": 0.8, "top_k": 4, "min_p": 0.1,
        "repetition_penalty": 1.2,
    }  # fmt: skip
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["generate", folder, *files, *flags, "--stop", "a", "--stop", "b", "--ignore-eos"]) == 1
    expected = SamplingParams(**given, stop=("a", "b"), ignore_eos=True)
    assert [replace(params, seed=None) for params in seen] == [expected] * 3
    assert len({params.seed for params in seen}) == 3  # each line has its own


def test_the_seed_decides_what_is_sampled(folder: str, files: tuple[str, str]) -> None:
    source, target = files
    flags = ["--n", "3", "--max-tokens", "6", "--top-k", "4", "--ignore-eos", "--seed", "5", "--stop", "zz"]
    assert main(["generate", folder, source, target, *flags]) == 0
    first = read(target)
    assert all(len(record["completions"]) == 3 for record in first)
    assert all(set(c) == {"text", "finish_reason"} for record in first for c in record["completions"])
    assert all(c["finish_reason"] == "length" for record in first for c in record["completions"])
    assert len({c["text"] for record in first for c in record["completions"]}) > 3
    assert main(["generate", folder, source, target, *flags, "--overwrite"]) == 0
    assert read(target) == first  # the same seed
    flags[flags.index("5")] = "6"
    assert main(["generate", folder, source, target, *flags, "--overwrite"]) == 0
    assert read(target) != first


def test_a_line_that_cannot_be_served_does_not_stop_the_others(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in", [{"token_ids": [3]}, {"token_ids": [3] * 40}, {"token_ids": [99]}, {"prompt": "a"}])
    target = tmp_path / "out"
    assert main(["generate", folder, source, str(target), "--max-model-len", "16", "--max-tokens", "4"]) == 1
    records = read(target)
    assert [set(record) & {"error", "completions"} for record in records] == [
        {"completions"}, {"error"}, {"error"}, {"completions"}
    ]  # fmt: skip
    assert "40 tokens" in records[1]["error"] and "99 at position 0" in records[2]["error"]
    assert "prompt 0" not in records[1]["error"]
    assert "2 of 4 lines failed" in capsys.readouterr().err


def test_more_lines_than_run_at_a_time(folder: str, tmp_path: Path) -> None:
    prompts = [[3 + i % 8] * (1 + i % 5) for i in range(30)]
    source = write(tmp_path / "in", [{"token_ids": prompt} for prompt in prompts])
    target = tmp_path / "out"
    flags = ["--max-num-seqs", "2", "--temperature", "0", "--max-tokens", "3", "--tokens"]
    assert main(["generate", folder, source, str(target), *flags]) == 0
    model = make_model().eval()
    expected = [greedy(model, prompt, 3) for prompt in prompts]
    assert [record["completions"][0]["token_ids"] for record in read(target)] == expected


# -- score -------------------------------------------------------------------------------------------------------------


def test_scores_are_the_models(folder: str, tmp_path: Path) -> None:
    ids = [3, 4, 5, 6, 7]
    lines = [{"text": "abcde"}, {"token_ids": ids, "start": 3, "logprobs": "replaced"}]
    source, target = write(tmp_path / "in", lines), tmp_path / "out"
    assert main(["score", folder, source, str(target), "--temperature", "0.7", "--entropy"]) == 0
    model = make_model().eval()
    distribution = (model(torch.tensor([ids])).logits[0].detach() / 0.7).log_softmax(-1)
    for record, start in zip(read(target), (1, 3), strict=True):
        assert record["scored_token_ids"] == ids[start:]
        assert record["logprobs"] == pytest.approx(plain_logprobs(model, ids[:start], ids[start:], 0.7), abs=1e-4)
        entropies = -(distribution.exp() * distribution).sum(-1)[start - 1 : -1]
        assert record["entropies"] == pytest.approx(entropies.tolist(), abs=1e-4)
    before = target.read_bytes()
    assert main(["score", "no/model/is/loaded", source, str(target)]) == 0 and target.read_bytes() == before


def test_a_line_that_cannot_be_scored_does_not_stop_the_others(folder: str, tmp_path: Path) -> None:
    lines = [{"token_ids": [3, 4]}, {"token_ids": [3]}, {"token_ids": [3, 99]}, {"token_ids": [3, 4], "start": 2}]
    source, target = write(tmp_path / "in", [*lines, {"text": "ab"}]), tmp_path / "out"
    assert main(["score", folder, source, str(target)]) == 1
    records = read(target)
    assert ["error" in record for record in records] == [False, True, True, True, False]
    assert "sequence 0" not in records[1]["error"] and "99 at position 1" in records[2]["error"]
    assert records[0]["logprobs"] == pytest.approx(records[4]["logprobs"])


@pytest.mark.parametrize("temperature", ["0", "1e-45", "nan"])
def test_a_temperature_that_scores_nothing(folder: str, files: tuple[str, str], temperature: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["score", folder, *files, "--temperature", temperature])
    assert exit_.value.code == 2


# -- interrupted runs --------------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_where_it_stopped(folder: str, tmp_path: Path) -> None:
    count = 60
    source = write(tmp_path / "in", [{"token_ids": [3 + i % 8, 4]} for i in range(count)])
    flags = ["--max-tokens", "48", "--ignore-eos", "--max-num-seqs", "2", "--n", "2"]
    whole, target = tmp_path / "whole", tmp_path / "out"
    assert main(["generate", folder, source, str(whole), *flags]) == 0

    code = "import sys; from stoker.integrations.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-P", "-c", code, "generate", folder, source, str(target), *flags]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    try:
        while (not target.exists() or target.read_bytes().count(b"\n") < 3) and process.poll() is None:
            time.sleep(0.002)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    killed = target.read_bytes()
    assert 3 <= killed.count(b"\n") < count
    target.write_bytes(killed + b'{"token_ids": [')  # as a kill in the middle of a line leaves it
    assert main(["generate", folder, source, str(target), *flags]) == 0
    assert target.read_bytes() == whole.read_bytes()


def test_a_complete_output_is_left_alone(
    files: tuple[str, str], folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = files
    assert main(["generate", folder, source, target, "--max-tokens", "2"]) == 0
    before = Path(target).read_bytes()
    assert main(["generate", "no/model/is/loaded", source, target]) == 0
    assert Path(target).read_bytes() == before and "complete" in capsys.readouterr().err


@pytest.mark.parametrize("kept", ['{"prompt": "other", "completions": []}\n', "[1]\n", "no JSON\n"])
def test_the_output_of_something_else_is_not_touched(
    files: tuple[str, str], folder: str, capsys: pytest.CaptureFixture[str], kept: str
) -> None:
    source, target = files
    Path(target).write_text(kept)
    assert main(["generate", folder, source, target]) == 1
    assert "line 1 is not of line 1" in capsys.readouterr().err and Path(target).read_text() == kept


def test_an_output_with_more_lines_than_the_input_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text('{"token_ids": [3]}\n' * 2)
    with pytest.raises(CommandError, match="line 2 is not of line 2"):
        ResumableWriter(path, [Line(1, {"token_ids": [3]}, [3])])


def test_a_full_disk_keeps_whole_lines(tmp_path: Path) -> None:
    """A file that may not grow further: writes go in part, then fail."""
    path, lines = tmp_path / "out", [Line(i + 1, {"i": i}, [3]) for i in range(50)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ResumableWriter(path, lines) as writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (95, hard))
        try:
            with pytest.raises(CommandError, match=r"cannot write .*; its 10 lines are kept.*run the same command"):
                for line in lines:
                    writer.write(line.fields)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read(path) == [line.fields for line in lines[:10]]
    with ResumableWriter(path, lines) as writer:
        assert writer.done == 10
        for line in lines[10:]:
            writer.write(line.fields)
    assert read(path) == [line.fields for line in lines]


def test_a_torn_line_is_cut_off_whatever_its_length(tmp_path: Path) -> None:
    path, lines = tmp_path / "out", [Line(1, {"i": 0}, [3]), Line(2, {"i": 1}, [3])]
    path.write_text('{"i": 0}\n{"i": 1, "text": "' + "x" * 500)
    with ResumableWriter(path, lines) as writer:
        assert writer.done == 1
        writer.write({"i": 1})
    assert path.read_text() == '{"i": 0}\n{"i": 1}\n'


def test_a_line_with_nan_is_known_again(tmp_path: Path) -> None:
    path, lines = tmp_path / "out", [Line(1, {"reward": float("nan")}, [3]), Line(2, {"reward": [float("nan")]}, [3])]
    for done, line in enumerate(lines):
        with ResumableWriter(path, lines) as writer:
            assert writer.done == done
            writer.write(line.fields | {"text": "a"})
    path.write_text(path.read_text().replace("[NaN]", "[1.0]"))
    with pytest.raises(CommandError, match="line 2 is not of line 2"):
        ResumableWriter(path, lines)


def test_windows_files_and_devices(folder: str, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes(b'\xef\xbb\xbf{"prompt": "abc"}\r\n\r\n{"prompt": "b"}\r\n')
    for _ in range(2):
        assert main(["generate", folder, str(source), "/dev/null", "--max-tokens", "2"]) == 0
    assert main(["generate", folder, str(source), str(tmp_path / "out"), "--max-tokens", "2"]) == 0
    assert [record["prompt"] for record in read(tmp_path / "out")] == ["abc", "b"]


def test_ctrl_c_keeps_what_is_done(
    folder: str, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = files
    write_line = ResumableWriter.write

    def interrupt(writer: ResumableWriter, record: dict[str, Any]) -> None:
        write_line(writer, record)
        raise KeyboardInterrupt

    monkeypatch.setattr(ResumableWriter, "write", interrupt)
    assert main(["generate", folder, source, target, "--max-tokens", "2"]) == 130
    assert len(read(target)) == 1 and "interrupted" in capsys.readouterr().err


# -- what users get wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
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


def test_blank_lines_are_none(folder: str, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text('\n{"token_ids": [3]}\n\n{"token_ids": [4]}\n')
    assert main(["generate", folder, str(source), str(target), "--max-tokens", "2"]) == 0
    assert [record["token_ids"] for record in read(target)] == [[3], [4]]


def test_files_and_models_that_are_not_there(
    folder: str, files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = files
    for arguments, message in (
        ([folder, str(tmp_path / "nothing"), target], "cannot read"),
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
def test_an_output_outlives_a_start_that_fails(tmp_path: Path, kept: str) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text('{"token_ids": [3]}\n{"token_ids": [4]}\n')
    target.write_text(kept)
    for flags in ([], ["--overwrite"]):
        assert main(["generate", str(tmp_path / "nothing"), str(source), str(target), *flags]) == 1
        assert target.read_text() == kept
    source.write_text("")  # nothing to do is no failure
    assert main(["generate", str(tmp_path / "nothing"), str(source), str(target), "--overwrite"]) == 0
    assert target.read_text() == ""


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


# -- info and help -----------------------------------------------------------------------------------------------------


def test_info_names_versions_device_and_operations(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", folder, "--device", "cpu", "--kv-cache-memory", "1MiB"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed and "cpu" in printed and "as asked for" in printed
    callables = [name for name in Ops.__dataclass_fields__ if callable(getattr(REFERENCE, name))]
    assert all(f"  {name} " in printed for name in callables)
    assert "2 of 2" in printed and "longest sequence      128 tokens" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error of a machine without CUDA")
def test_info_of_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--device", "cuda"]) == 1
    assert "sees no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["generate", "--help"], ["score", "--help"], ["info", "--help"], ["--version"]]
)
def test_help_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 0 and "stoker" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["info", "generate", "score"])
def test_every_argument_and_default_is_explained(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    printed = capsys.readouterr().out.partition("positional arguments:")[2]
    explained = re.findall(
        r"^  (-{0,2}[\w-]+)(?:,.*?)?(?: [A-Z]+)?\s{2,}\S", re.sub(r"\n {10,}", "  ", printed), re.MULTILINE
    )
    there = re.findall(r"^  (-{0,2}[\w-]+)", printed, re.MULTILINE)
    assert len(there) > 5 and explained == there
    assert "%(" not in printed


def test_no_command_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_an_adapter_over_the_model(folder: str, files: tuple[str, str], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model(), peft.LoraConfig(r=100, target_modules="all-linear")).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    common = ["--adapter", str(tmp_path / "adapter"), "--kv-cache-memory", "4MiB", "--overwrite"]
    assert main(["generate", folder, *files, *common, "--tokens", "--temperature", "0", "--max-tokens", "6"]) == 0
    completions = [record["completions"][0] for record in read(files[1])]
    prompts = [[3, 4, 5], [10, 8, 7, 6, 9], [3, 4, 5]]
    assert [c["token_ids"] for c in completions] == [greedy(model, prompt, 6) for prompt in prompts]
    sequences = [p + c["token_ids"] for p, c in zip(prompts, completions, strict=True)]
    lines = [{"token_ids": s, "start": len(p)} for s, p in zip(sequences, prompts, strict=True)]
    assert main(["score", folder, write(tmp_path / "given.jsonl", lines), files[1], *common]) == 0
    for record, prompt, completion in zip(read(files[1]), prompts, completions, strict=True):
        expected = plain_logprobs(model, prompt, completion["token_ids"])
        torch.testing.assert_close(record["logprobs"], expected, atol=1e-4, rtol=0)


def test_an_adapter_that_is_none(folder: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", folder, *files, "--adapter", folder, "--kv-cache-memory", "4MiB"]) == 1
    assert "adapter_config.json" in capsys.readouterr().err
