"""``stoker generate`` and ``stoker score``: process the lines of a JSON Lines file, and continue where an earlier run stopped."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from stoker.integrations.cli_engine import add_flags, add_model, load
from stoker.integrations.jsonl import STANDARD_OUTPUT, CommandError, Line, ResumableWriter, read_lines
from stoker.kernels.errors import InvalidRequestError, StokerError

GENERATE = """\
Sample completions of every line of a JSON Lines file.

Each line of INPUT is an object with exactly one of
  "prompt"     text
  "messages"   a chat, [{"role": "user", "content": "..."}, ...]; the model's chat template is applied
  "token_ids"  [1, 2, 3]
and whatever else you like. OUTPUT gets one line for each, in order: the same object with "completions" added, a list
of {"text", "finish_reason"} (with --tokens also "token_ids" and "logprobs"), or with "error" where a line could not be
served.

A run that was killed goes on where it stopped when the same command is run again, and ends with the output it would
have had, but for the last digits of log-probabilities: each line draws from --seed and its number alone. Give the same flags
but --overwrite, which starts anew.
"""
SCORE = """\
Log-probability of the tokens of every line of a JSON Lines file.

Each line of INPUT is an object with exactly one of "text" and "token_ids", perhaps with "start", the position of the
first token to score (1, the second token, where there is none: the first has no log-probability), and whatever else
you like. OUTPUT gets one line for each, in order: the same object with "scored_token_ids" and "logprobs", in nats and
one a token from "start" on, or with "error" where a line could not be scored.

Each line is written once it is scored. A run that was killed goes on where it stopped when the same command is run
again.
"""
_Write = Callable[[dict[str, Any]], None]  # the next line of the output


def add_generate(commands: Any, epilog: str) -> None:
    """commands: what ``add_subparsers`` returns."""
    generate = commands.add_parser(
        "generate",
        help="completions of a JSON Lines file; can be interrupted and taken up again",
        description=GENERATE,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_files(generate)
    generate.add_argument("--tokens", action="store_true", help="write token ids and log-probabilities too")
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is random (%(default)s)")
    sampling = generate.add_argument_group("sampling")
    sampling.add_argument("--n", type=int, default=1, metavar="N", help="completions of each prompt (%(default)s)")
    sampling.add_argument("--max-tokens", type=int, default=256, metavar="N", help="of a completion (%(default)s)")
    sampling.add_argument("--min-tokens", type=int, default=0, metavar="N", help="before it may end (%(default)s)")
    for flag, default, what in (
        ("--temperature", 1.0, "0 takes the most likely token (%(default)s)"),
        ("--top-p", 1.0, "only the most likely tokens that have this probability together (%(default)s: all)"),
        ("--min-p", 0.0, "only tokens with this share of the likeliest one's probability (%(default)s: all)"),
        ("--repetition-penalty", 1.0, "above 1 makes tokens that were there less likely (%(default)s)"),
        ("--presence-penalty", 0.0, "taken from the logits of tokens the completion has (%(default)s)"),
        ("--frequency-penalty", 0.0, "the same, times how often it has them (%(default)s)"),
    ):
        sampling.add_argument(flag, type=float, default=default, metavar="X", help=what)
    sampling.add_argument("--top-k", type=int, default=0, metavar="N", help="only so many tokens (%(default)s: all)")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends a completion; repeat for more"
    )
    sampling.add_argument(
        "--stop-token-id", type=int, action="append", default=[], metavar="N", help="the same, as a token id"
    )
    sampling.add_argument(
        "--suppress-token-id", type=int, action="append", default=[], metavar="N", help="never sampled; repeat for more"
    )
    sampling.add_argument("--regex", metavar="PATTERN", help="the whole text matches it, as by Python's re.fullmatch")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens, whatever the model says")
    add_flags(generate)
    generate.set_defaults(run=_generate, parser=generate)


def add_score(commands: Any, epilog: str) -> None:
    """As ``add_generate``."""
    score = commands.add_parser(
        "score",
        help="log-probabilities of a JSON Lines file; can be interrupted and taken up again",
        description=SCORE,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_files(score)
    score.add_argument(
        "--temperature", type=float, default=1.0, metavar="X", help="logits are divided by it (%(default)s)"
    )
    score.add_argument("--entropy", action="store_true", help='also "entropies", of the distribution at each position')
    add_flags(score)
    score.set_defaults(run=_score, parser=score)


def _add_files(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "input", metavar="INPUT", type=_path(Path("/dev/stdin")), help="JSON Lines file, or - for standard input"
    )
    parser.add_argument(
        "output", metavar="OUTPUT", type=_path(STANDARD_OUTPUT), help="the same; of a file, what is in it is kept"
    )
    parser.add_argument("--overwrite", action="store_true", help="start anew where OUTPUT is there already")


def _path(standard: Path) -> Callable[[str], Path]:
    return lambda name: standard if name == "-" else Path(name)


# -- files -------------------------------------------------------------------------------------------------------------


def _read(args: argparse.Namespace, kinds: tuple[str, ...], results: tuple[str, ...]) -> list[Line]:
    with suppress(OSError):  # opening the file will say what is wrong
        if args.output.is_file() and args.output.samefile(args.input):
            args.parser.error("INPUT and OUTPUT are the same file")
    return read_lines(args.input, kinds=kinds, results=results)


def _write(
    args: argparse.Namespace,
    lines: list[Line],
    run: Callable[[Any, list[Line], _Write], None],
    is_result: Callable[[dict[str, Any]], bool],
) -> int:
    """Have ``run(engine, lines, write)`` write the record of each line that is not done yet; returns the exit code.

    is_result: whether a record, read from an output, may be one of them.
    """
    from tqdm import tqdm

    with ResumableWriter(args.output, lines, overwrite=args.overwrite, is_result=is_result) as writer:
        first = writer.done
        if first == len(lines):
            done = f"{args.output} is complete: {first} lines" if lines else f"{args.input} has no lines"
            print(done, file=sys.stderr)
            return _failures(writer)
        if first:
            print(f"{args.output} has {first} of {len(lines)} lines: going on", file=sys.stderr)
        with load(args) as engine, tqdm(total=len(lines), initial=first, unit="line", disable=None) as progress:
            if engine.tokenizer is None and any(not isinstance(line.prompt[0], int) for line in lines):
                raise CommandError(f"{args.model} has no tokenizer: every line needs token_ids")

            def write(record: dict[str, Any]) -> None:
                writer.write(record)
                progress.update()

            run(engine, lines[first:], write)
    return _failures(writer)


def _failures(writer: ResumableWriter) -> int:
    """Say how many lines failed, in this run or before; returns the exit code."""
    if writer.failed:
        kept = writer.path != STANDARD_OUTPUT
        where = f" in {writer.path}; --overwrite starts anew" if kept else ""
        print(f'stoker: {writer.failed} of {writer.done} lines failed, see their "error"{where}', file=sys.stderr)
    return 1 if writer.failed else 0


# -- stoker generate ---------------------------------------------------------------------------------------------------


def _generate(args: argparse.Namespace) -> int:
    from stoker.rollout import SamplingParams

    try:
        params = SamplingParams(
            n=args.n,
            max_tokens=args.max_tokens,
            min_tokens=args.min_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            presence_penalty=args.presence_penalty,
            frequency_penalty=args.frequency_penalty,
            stop=args.stop,
            stop_token_ids=args.stop_token_id,
            suppress_token_ids=args.suppress_token_id,
            ignore_eos=args.ignore_eos,
            regex=args.regex,
        )
    except InvalidRequestError as error:
        args.parser.error(str(error))
    lines = _read(args, ("prompt", "messages", "token_ids"), ("completions", "error"))
    fields = {"text", "finish_reason", *(("token_ids", "logprobs") if args.tokens else ())}

    def is_result(record: dict[str, Any]) -> bool:
        made = record.get("completions")
        if not isinstance(made, list) or len(made) != params.n:
            return False
        return all(isinstance(one, dict) and fields <= one.keys() for one in made)

    return _write(args, lines, lambda engine, todo, write: _completions(engine, todo, write, params, args), is_result)


def _completions(engine: Any, lines: list[Line], write: _Write, params: Any, args: argparse.Namespace) -> None:
    """Write the output record of each line, in order; later lines run while earlier ones are waited for."""
    _check_flags(engine, params, args.adapter)
    tokens = args.tokens or engine.tokenizer is None
    ahead = max(1, 4 * args.max_num_seqs // args.n)
    todo = iter(lines)
    under_way: deque[tuple[Line, Any]] = deque()
    while True:
        for line in islice(todo, ahead - len(under_way)):
            seed = int.from_bytes(blake2b(f"{args.seed}:{line.number}".encode(), digest_size=7).digest(), "little")
            try:
                under_way.append((line, engine.submit(line.prompt, replace(params, seed=seed), adapter=args.adapter)))
            except InvalidRequestError as error:
                under_way.append((line, error))
        if not under_way:
            return
        line, request = under_way.popleft()
        if isinstance(request, InvalidRequestError):
            write({**line.fields, "error": _of_one(request, "prompt")})
            continue
        output = request.result()
        if output.error is not None:
            write({**line.fields, "error": str(output.error)})
            continue
        write({**line.fields, "completions": [_completion(c, tokens) for c in output.completions]})


def _check_flags(engine: Any, params: Any, adapter: str | None) -> None:
    """Refuse flags under which even the shortest prompt is refused: better now than in every line of the output."""
    try:
        engine.submit([0], params, adapter=adapter).abort()
    except InvalidRequestError as error:
        raise CommandError(_of_one(error, "prompt")) from error


def _completion(completion: Any, tokens: bool) -> dict[str, Any]:
    record = {"text": completion.text, "finish_reason": completion.finish_reason}
    if tokens:
        record |= {"token_ids": completion.token_ids, "logprobs": completion.logprobs}
    return record


# -- stoker score ------------------------------------------------------------------------------------------------------


def _score(args: argparse.Namespace) -> int:
    from stoker.rollout.sampling_params import LARGEST, SMALLEST

    if not SMALLEST <= args.temperature <= LARGEST:
        args.parser.error(f"--temperature {args.temperature}: it has to be from {SMALLEST} to {LARGEST:g}")
    lines = _read(args, ("text", "token_ids"), ("scored_token_ids", "logprobs", "entropies", "error"))
    made = ("scored_token_ids", "logprobs", *(("entropies",) if args.entropy else ()))
    return _write(
        args,
        lines,
        lambda engine, todo, write: _scores(engine, todo, write, args),
        lambda record: all(name in record for name in made),
    )


def _scores(engine: Any, lines: list[Line], write: _Write, args: argparse.Namespace) -> None:
    """Write the output record of each line, in order, as soon as it is scored; some hundred lines go together."""

    def score(some: list[Line]) -> None:
        engine.score(
            [line.prompt for line in some],
            start=[line.fields.get("start", 1) for line in some],
            temperature=args.temperature,
            entropy=args.entropy,
            adapter=args.adapter,
            on_scored=lambda row, one: write(_scored(some[row], one)),
        )

    todo = iter(lines)
    while some := list(islice(todo, 4 * args.max_num_seqs)):
        _halved(score, some, write)


def _scored(line: Line, one: Any) -> dict[str, Any]:
    if one.error is not None:
        return {**line.fields, "error": _of_one(one.error, "sequence")}
    record = {**line.fields, "scored_token_ids": one.token_ids.tolist(), "logprobs": one.logprobs.tolist()}
    if one.entropy is not None:
        record["entropies"] = one.entropy.tolist()
    return record


def _halved(score: Callable[[list[Line]], None], lines: list[Line], write: _Write) -> None:
    """Score each line. A line that is refused, before any work, is found by halving; the others stay together."""
    try:
        return score(lines)
    except InvalidRequestError as error:
        if len(lines) == 1:
            return write({**lines[0].fields, "error": _of_one(error, "sequence")})
    middle = len(lines) // 2
    _halved(score, lines[:middle], write)
    _halved(score, lines[middle:], write)


def _of_one(error: StokerError, what: str) -> str:
    """The message of a call with one ``what``, without its number."""
    return str(error).removeprefix(f"{what} 0: ").replace(f"{what} 0", f"the {what}")
