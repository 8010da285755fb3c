"""The command ``stoker``: what it writes, and what it says of itself."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from cli_setup import make_files, make_folder, read, write
from oracle import greedy
from trl_setup import EOS, make_model, make_tokenizer, plain_logprobs

from stoker.integrations.cli import main
from stoker.kernels import ops
from stoker.kernels.errors import InvalidConfigError
from stoker.kernels.ops import REFERENCE, Ops
from stoker.rollout import EngineConfig, InvalidRequestError, RolloutEngine, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    return make_files(tmp_path)


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


def test_completions_match_a_pattern(folder: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    source, target = files
    assert main(["generate", folder, source, target, "--regex", "[ab]{2,3}c", "--n", "3"]) == 0
    texts = [completion["text"] for record in read(target) for completion in record["completions"]]
    assert len(texts) == 9 and all(re.fullmatch("[ab]{2,3}c", text) for text in texts)
    with pytest.raises(SystemExit):
        main(["generate", folder, source, target, "--regex", "("])
    assert "is no regular expression" in capsys.readouterr().err


def test_flags_are_the_sampling_parameters(
    folder: str, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = RolloutEngine.submit

    def submit(engine: RolloutEngine, prompt: Any, params: SamplingParams, **kwargs: Any) -> Any:
        if params.seed is None:  # of no line: the flags are being checked
            return real(engine, prompt, params, **kwargs)
        seen.append(params)
        raise InvalidRequestError("enough")

    monkeypatch.setattr(RolloutEngine, "submit", submit)
    given: dict[str, Any] = {
        "n": 2, "max_tokens": 5, "min_tokens": 3, "temperature": 0.7, "top_p": 0.8, "top_k": 4, "min_p": 0.1,
        "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.25,
    }  # fmt: skip
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--stop", "a", "--stop", "b", "--ignore-eos", "--stop-token-id", "7", "--suppress-token-id", "3"]
    flags += ["--regex", "a*"]
    assert main(["generate", folder, *files, *flags]) == 1
    ids = {"stop_token_ids": (7,), "suppress_token_ids": (3,), "regex": "a*"}
    expected = SamplingParams(**given, **ids, stop=("a", "b"), ignore_eos=True)
    assert [replace(params, seed=None) for params in seen] == [expected] * 3
    assert len({params.seed for params in seen}) == 3  # each line has its own


@pytest.mark.parametrize("command", ["info", "generate", "score", "serve"])
def test_flags_are_the_engines_configuration(
    command: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def load(path: str, *, config: EngineConfig) -> RolloutEngine:
        seen.append(config)
        raise InvalidConfigError("enough")

    monkeypatch.setattr(RolloutEngine, "from_pretrained", load)
    given: dict[str, Any] = {
        "device": "cpu", "dtype": "bfloat16", "max_num_seqs": 3, "max_model_len": 40, "kv_cache_memory": "2MiB",
        "kv_cache_dtype": "fp8", "quantization": "fp8",
    }  # fmt: skip
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    if command in ("generate", "score"):
        flags += [write(tmp_path / "in", [{"token_ids": [3, 4]}]), str(tmp_path / "out")]
    flags += ["--port", "0"] if command == "serve" else []
    assert main([command, folder, *flags]) == 1
    assert seen == [EngineConfig(**given, max_lora_rank=512)]


@pytest.mark.parametrize("given", [True, False])
def test_flags_are_the_servers_arguments(
    given: bool, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, peft = pytest.importorskip("stoker.integrations.server"), pytest.importorskip("peft")
    adapter, seen = str(tmp_path / "adapter"), []
    peft.get_peft_model(make_model(), peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(adapter)

    def serve(engine: RolloutEngine, host: str, door: Any, *others: Any) -> None:
        seen.append((list(engine.adapters), host, *others))
        raise InvalidConfigError("enough")

    monkeypatch.setattr(server, "Server", serve)
    flags = ["--host", "localhost", "--name", "m", "--api-key", "k", "--control", "--adapter", adapter] if given else []
    assert main(["serve", folder, "--port", "0", "--kv-cache-memory", "1MiB", *flags]) == 1
    whole, bare = ([adapter], "localhost", "m", "k", True, adapter), ([], "127.0.0.1", folder, None, False, None)
    assert seen == [whole if given else bare]


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
    assert f'2 of 4 lines failed, see their "error" in {target}; --overwrite starts anew' in capsys.readouterr().err
    assert main(["score", folder, write(tmp_path / "in", [{"token_ids": [99]}]), "-"]) == 1
    assert capsys.readouterr().err.endswith("""1 of 1 lines failed, see their "error"\n""")  # nothing to start anew


@pytest.mark.parametrize("flags", [[], ["--overwrite"]])
def test_standard_input_and_output(folder: str, files: tuple[str, str], tmp_path: Path, flags: list[str]) -> None:
    """In a file that others write to, before and after."""
    source, target = files
    command = ["generate", folder, "--max-tokens", "3", "--seed", "4", *flags]
    assert main([*command, source, target]) == 0
    log = tmp_path / "log"
    before = [os.dup(0), os.dup(1)]
    with open(source) as given, open(log, "w") as taken:
        os.dup2(given.fileno(), 0)
        os.dup2(taken.fileno(), 1)
        try:
            os.write(1, b"before\n")
            assert main([*command, "-", "-"]) == 0
            os.write(1, b"after\n")
        finally:
            for number, descriptor in enumerate(before):
                os.dup2(descriptor, number)
                os.close(descriptor)
    assert log.read_text() == f"before\n{Path(target).read_text()}after\n"


def test_whoever_reads_the_output_may_go(
    folder: str, files: tuple[str, str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    before = os.dup(1)
    os.close(reader)
    os.dup2(writer, 1)
    try:
        with open(1, "w", closefd=False) as output:
            monkeypatch.setattr(
                sys, "stdout", output
            )  # pytest's is a file that it reads: what the command puts there cannot be
            assert main(["generate", folder, files[0], "-", "--max-tokens", "3"]) == 1
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(writer)
    assert "stoker:" not in capfd.readouterr().err


def test_more_lines_than_run_at_a_time(folder: str, tmp_path: Path) -> None:
    prompts = [[3 + i % 8] * (1 + i % 5) for i in range(30)]
    source = write(tmp_path / "in", [{"token_ids": prompt} for prompt in prompts])
    target = tmp_path / "out"
    flags = ["--max-num-seqs", "2", "--temperature", "0", "--max-tokens", "3", "--tokens"]
    assert main(["generate", folder, source, str(target), *flags]) == 0
    model = make_model().eval()
    expected = [greedy(model, prompt, 3) for prompt in prompts]
    assert [record["completions"][0]["token_ids"] for record in read(target)] == expected


def test_a_model_of_the_hub_is_fetched(folder: str, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def fetch(model: str, *, allow_patterns: list[str]) -> str:
        asked.append((model, allow_patterns))
        return folder

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert main(["generate", "someone/model", *files, "--max-tokens", "2"]) == 0
    ((name, patterns),) = asked
    assert name == "someone/model" and len(read(files[1])) == 3
    for file, wanted in [*((f.name, True) for f in Path(folder).iterdir()), ("model.bin", False), ("x.gguf", False)]:
        assert any(fnmatch(file, pattern) for pattern in patterns) == wanted, file


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


def test_lines_beside_one_that_cannot_be_scored_go_together_still(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"token_ids": [3, 4 + i % 5]} for i in range(64)]
    source, target, calls, score = tmp_path / "in", tmp_path / "out", [], RolloutEngine.score

    def counted(engine: RolloutEngine, sequences: list[Any], **kwargs: Any) -> Any:
        calls.append(len(sequences))
        return score(engine, sequences, **kwargs)

    monkeypatch.setattr(RolloutEngine, "score", counted)
    assert main(["score", folder, write(source, lines), str(target)]) == 0
    whole = read(target)
    lines[41] = {"token_ids": [99, 3]}
    assert main(["score", folder, write(source, lines), str(target), "--overwrite"]) == 1
    scored = read(target)
    assert "99 at position 0" in scored.pop(41)["error"]
    assert whole.pop(41) and [one["token_ids"] for one in scored] == [one["token_ids"] for one in whole]
    assert [one["logprobs"][0] for one in scored] == pytest.approx([one["logprobs"][0] for one in whole], abs=1e-5)
    assert calls == [64, 64, 32, 32, 16, 8, 8, 4, 2, 1, 1, 2, 4, 16]


@pytest.mark.parametrize("temperature", ["0", "1e-45", "nan"])
def test_a_temperature_that_scores_nothing(folder: str, files: tuple[str, str], temperature: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["score", folder, *files, "--temperature", temperature])
    assert exit_.value.code == 2


# -- info and help -----------------------------------------------------------------------------------------------------


def test_info_names_versions_device_and_operations(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", folder, "--device", "cpu", "--kv-cache-memory", "1MiB"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed and "cpu" in printed and "as asked for" in printed
    callables = [name for name in Ops.__dataclass_fields__ if callable(getattr(REFERENCE, name))]
    assert all(f"  {name} " in printed for name in callables)
    assert "2 of 2" in printed and "longest sequence      128 tokens" in printed and "states" not in printed


def test_info_says_of_a_gpu_that_no_engine_runs_on_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(device: torch.device) -> None:
        raise InvalidConfigError(f"{device} is too old")

    monkeypatch.setattr(ops, "check_gpu", refuse)
    assert main(["info", "--device", "cpu"]) == 1
    printed = capsys.readouterr()
    assert "cpu is too old" in printed.err and "device       cpu" in printed.out and "operations" not in printed.out


def test_info_tells_states_from_keys_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    families.make_model("qwen3_5").save_pretrained(tmp_path)
    options = ["--device", "cpu", "--kv-cache-memory", "4MiB", "--max-num-seqs", "3"]
    assert main(["info", str(tmp_path), *options]) == 0
    printed = capsys.readouterr().out
    (line,) = (line for line in printed.splitlines() if "of these states" in line)
    assert line.endswith(" bytes, 3 sequences at a time")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error of a machine without CUDA")
@pytest.mark.parametrize("command", ["info", "generate", "score"])
def test_a_device_that_is_not_there(
    command: str, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = write(tmp_path / "in", [{"token_ids": [3, 4]}]), tmp_path / "out"
    arguments = [] if command == "info" else [folder, source, str(target)]
    assert main([command, *arguments, "--device", "cuda"]) == 1
    assert "--device cuda: torch" in (said := capsys.readouterr().err) and "sees no CUDA device here" in said
    assert not target.exists()


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
