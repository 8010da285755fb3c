"""OpenAI's protocol: writes the answer to a request, whole or as a stream. Fields beyond OpenAI's are vLLM's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from uuid import uuid4

from stoker.integrations.openai_api import Call
from stoker.integrations.text_stream import TextStream
from stoker.kernels.errors import EngineStateError
from stoker.rollout import Completion, RolloutChunk, RolloutOutput, TokenLogprobs

_LEAST_LOGPROB = -9999.0  # JSON has no infinity


def answer(call: Call, outputs: Sequence[RolloutOutput], tokenizer: Any, created: int) -> bytes:
    """The answer to a call that is not streamed, in JSON. created: seconds since 1970.

    Raises the error of a prompt for which the model gave NaN, and ``EngineStateError`` where a prompt is not scored.
    """
    if not call.complete:
        outputs = list(map(_of_prompt_alone, outputs))
    whole = {**_head(call, created, stream=False), "usage": _usage(outputs)}
    choices: list[bytes] = []
    for row, output in enumerate(outputs):
        given = {} if call.prompt_logprobs is None else {"prompt_logprobs": _prompt_logprobs(call, output, tokenizer)}
        for completion in output.completions:
            message = _parsed(call, output, completion, tokenizer) if call.chat else {}
            choice: dict[str, Any] = {"index": row * call.params.n + completion.index, **_end(completion, message)}
            if call.chat:
                choice["message"] = {"role": "assistant", **message}
            else:
                choice["text"] = _echo(call, row, output, tokenizer) + (completion.text or "")
            choice["logprobs"] = _logprobs(call, *_with_echo(call, output, completion), tokenizer)
            if call.ids:
                choice["prompt_token_ids"] = output.prompt_token_ids
                choice |= {"token_ids": completion.token_ids, "weight_versions": completion.weight_versions}
            choices += (b"," if choices else b"[", *_json(choice, {} if call.chat else given))
    of_chat = given if call.chat else {}  # as vLLM has it
    return b"".join(_json(whole, {"choices": [*choices, b"]"], **of_chat}))


def failure(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """What an error is answered with. code: one of OpenAI's own, where there is one for it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = message.encode(errors="backslashreplace").decode()  # may quote half a character, which no answer can hold
    return {"error": {"message": message, "type": kind, "param": None, "code": code or status}}


def _head(call: Call, created: int, *, stream: bool) -> dict[str, Any]:
    kind = "text_completion" if not call.chat else "chat.completion.chunk" if stream else "chat.completion"
    return {"id": call.id, "object": kind, "created": created, "model": call.model}


def _end(completion: Completion, message: Mapping[str, Any]) -> dict[str, Any]:
    calls = "tool_calls" in message and completion.finish_reason == "stop"
    reason = "tool_calls" if calls else completion.finish_reason
    return {"finish_reason": reason, "stop_reason": completion.stop_reason}


def _usage(outputs: Sequence[RolloutOutput]) -> dict[str, Any]:
    prompts = sum(len(o.prompt_token_ids) for o in outputs)
    sampled = sum(len(c.token_ids) for o in outputs for c in o.completions)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": sampled,
        "total_tokens": prompts + sampled,
        "prompt_tokens_details": {"cached_tokens": sum(o.cached_tokens for o in outputs)},
    }


def parses(tokenizer: Any) -> bool:
    """Whether the tokenizer knows how its model writes reasoning and calls of tools."""
    return getattr(tokenizer, "response_template", None) is not None


def _parsed(call: Call, output: RolloutOutput, completion: Completion, tokenizer: Any) -> dict[str, Any]:
    """The message, in the parts that its tokenizer can tell apart. If it has no known form, all is content."""
    unparsed = {"content": completion.text or ""}
    if not parses(tokenizer):
        return unparsed
    ids = completion.token_ids[:-1] if isinstance(completion.stop_reason, int) else completion.token_ids
    if not ids:  # it ended at once; the parser would not take that for an empty text
        return unparsed
    try:
        found = tokenizer.parse_response(ids, prefix=output.prompt_token_ids, tools=call.tools)
        message = {name: value for name, value in found.items() if name not in ("role", "tool_calls")}
        if calls := found.get("tool_calls"):
            if not all(isinstance(c["function"]["name"], str) for c in calls):
                return unparsed
            message["tool_calls"] = [_tool_call(c["function"]) for c in calls]
        if not message:
            return unparsed
        last = "content" if message.setdefault("content", None) else "reasoning_content"
        if isinstance(stop := completion.stop_reason, str) and (text := message.get(last)):
            # The stop string is parsed too, as it may end a call; but the message ends before it.
            message[last] = _before(stop, text, completion, tokenizer)
        json.dumps(message, ensure_ascii=False, allow_nan=False).encode()  # or no answer can hold it: half a character
    except Exception:  # parsers raise errors of many kinds over what a model may write
        return unparsed
    return message


def _before(stop: str, text: str, completion: Completion, tokenizer: Any) -> str:
    """A message's last part without the stop string that ended the completion, or without what the parser left of it."""
    decoded: str = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    left_out = decoded[len(completion.text or "") :]  # the stop string, and what its last token goes on with
    ends = (left_out, left_out.rstrip(), stop)  # the last where it names special tokens
    return next((text.removesuffix(end) for end in ends if end and text.endswith(end)), text)


def _tool_call(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": function["name"], "arguments": written}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


def _json(plain: Mapping[str, Any], written: Mapping[str, Iterable[bytes]]) -> Iterator[bytes]:
    """JSON of an object with ``plain`` fields, at least one, and others whose JSON is ``written`` already.

    All of it is in pieces, since each copy of hundreds of megabytes would keep other threads waiting.
    """
    yield json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))[:-1].encode()
    for name, pieces in written.items():
        yield f',"{name}":'.encode()
        yield from pieces
    yield b"}"


def _namer(call: Call, tokenizer: Any) -> Callable[[int], str]:
    """What a token is called where log-probabilities name it."""
    if tokenizer is None or call.named_by_ids:
        return "token_id:{}".format
    return cache(lambda token: str(tokenizer.decode([token])))


# -- prompts -------------------------------------------------------------------------------------------------------


def _of_prompt_alone(output: RolloutOutput) -> RolloutOutput:
    """As if nothing had been sampled."""
    empty: dict[str, Any] = {
        "token_ids": [],
        "logprobs": [],
        "weight_versions": [],
        "stop_reason": None,
        "_decode": None,
    }
    completions = [
        replace(c, **empty, top_logprobs=c.top_logprobs and [], finish_reason="length" if c.token_ids else "abort")
        for c in output.completions
    ]
    return replace(output, completions=completions)


def _echo(call: Call, row: int, output: RolloutOutput, tokenizer: Any) -> str:
    if not call.echo:
        return ""
    given = call.prompts[row]
    if isinstance(given, str):
        return given
    return "" if tokenizer is None else str(tokenizer.decode(output.prompt_token_ids))


def _with_echo(
    call: Call, output: RolloutOutput, completion: Completion
) -> tuple[list[int], Sequence[float | None], Sequence[dict[int, float] | None] | None]:
    """Tokens, their log-probabilities and the likeliest ones: of the completion, and before it of the prompt if it is echoed."""
    ids, logprobs, top = completion.token_ids, completion.logprobs, completion.top_logprobs
    if not (call.echo and call.logprobs):
        return ids, logprobs, top
    prompt = output.prompt_token_ids
    given = _scored(output)
    top_of_prompt = map(dict, _likeliest(given, call.params.logprobs))
    known: list[float | None] = [None, *given.logprobs.tolist(), *logprobs]  # None of the first token
    return prompt + ids, known, None if top is None else [None, *top_of_prompt, *top]


def _prompt_logprobs(call: Call, output: RolloutOutput, tokenizer: Any) -> list[bytes]:
    """Of each of a prompt's tokens, as vLLM gives them, in pieces of JSON: by id the token itself, and the likeliest ones.

    There may be millions, which are written position by position: ``json.dumps`` of them all would keep other threads waiting.
    """
    given = _scored(output)
    texts: dict[int, str] = {}  # in JSON
    name = _namer(call, tokenizer)
    pieces = [b"[null"]  # of the first token
    for token, logprob, rank, likeliest in zip(
        given.token_ids.tolist(),
        given.logprobs.tolist(),
        given.ranks.tolist(),
        _likeliest(given, call.prompt_logprobs or 0),
        strict=True,
    ):
        said = {token: (logprob, rank)} | {i: (value, r) for r, (i, value) in enumerate(likeliest, 1)}
        for i in said.keys() - texts.keys():
            texts[i] = json.dumps(name(i))
        entries = [
            f'"{i}":{{"logprob":{_held(value)},"rank":{r},"decoded_token":{texts[i]}}}'
            for i, (value, r) in said.items()
        ]
        pieces.append(f",{{{','.join(entries)}}}".encode())
    return [*pieces, b"]"]


def _likeliest(given: TokenLogprobs, count: int) -> Iterator[list[tuple[int, float]]]:
    """At each token the ``count`` likeliest ids, or as many as there are, with their log-probabilities."""
    if given.top_ids is None or given.top_logprobs is None:
        return iter([[]] * len(given.token_ids))
    rows = zip(given.top_ids[:, :count], given.top_logprobs[:, :count], strict=True)
    return (list(zip(ids.tolist(), values.tolist(), strict=True)) for ids, values in rows)


def _scored(output: RolloutOutput) -> TokenLogprobs:
    """What is known of a prompt's tokens, from the second on."""
    given = output.prompt_logprobs
    if given is None:  # an answer without it could be taken for that of a server that does not score
        raise EngineStateError("the request was aborted before its prompt was scored: send it again")
    if given.error is not None:
        raise given.error
    return given


# -- tokens --------------------------------------------------------------------------------------------------------


def _logprobs(
    call: Call,
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    top: Sequence[dict[int, float] | None] | None,
    tokenizer: Any,
) -> dict[str, Any] | None:
    """None in place of a log-probability: there is none."""
    if not call.logprobs:
        return None
    text = _namer(call, tokenizer)

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        written = text(token)
        whole = "�" not in written  # or it is a part of a character
        return {
            "token": written,
            "logprob": _held(logprob),
            "bytes": list(written.encode()) if whole else None,
        }

    def by_text(others: dict[int, float] | None) -> dict[str, float | None] | None:
        if others is None:
            return None
        return {
            text(token): _held(logprob) for token, logprob in reversed(others.items())
        }  # the likeliest of those alike

    if call.chat:
        rows = zip(ids, logprobs, top or [{}] * len(ids), strict=True)
        return {
            "content": [
                {**entry(token, logprob), "top_logprobs": [entry(*item) for item in (others or {}).items()]}
                for token, logprob, others in rows
            ]
        }
    return {
        "tokens": [text(token) for token in ids],
        "token_logprobs": list(map(_held, logprobs)),
        "top_logprobs": None if top is None else list(map(by_text, top)),
    }


def _held(logprob: float | None) -> float | None:
    """As JSON can hold it."""
    return None if logprob is None else max(logprob, _LEAST_LOGPROB)


class Stream:
    """The answer to a streamed prompt, event by event."""

    def __init__(self, call: Call, row: int, tokenizer: Any, created: int) -> None:
        self._call = call
        self._row = row
        self._tokenizer = tokenizer
        self._head = _head(call, created, stream=True)
        self._whole = call.chat and parses(tokenizer)  # a message's parts are known only at its end
        count = call.params.n
        self._texts = [TextStream(tokenizer, call.params.stop) for _ in range(count)]
        self._begun = [False] * count

    def event(self, chunk: RolloutChunk) -> dict[str, Any]:
        """The event for new tokens. Their text may come later, where characters are incomplete or may begin a stop string."""
        text = self._texts[chunk.index].add(chunk.token_ids)
        choice = self._choice(chunk.index, {} if self._whole else {"content": text})
        choice["logprobs"] = _logprobs(self._call, chunk.token_ids, chunk.logprobs, chunk.top_logprobs, self._tokenizer)
        if self._call.ids:
            choice |= {"token_ids": chunk.token_ids, "weight_versions": chunk.weight_versions}
        return {**self._head, "choices": [choice]}

    def ends(self, output: RolloutOutput) -> list[dict[str, Any]]:
        """The last event of each completion: what is left of its text, and how it ended."""
        events = []
        for completion in output.completions:
            if self._whole:
                message = _parsed(self._call, output, completion, self._tokenizer)
                if calls := message.get("tool_calls"):
                    message["tool_calls"] = [{"index": i, **one} for i, one in enumerate(calls)]
            else:
                message = {"content": self._texts[completion.index].rest(completion.text or "")}
            choice = {**self._choice(completion.index, message), **_end(completion, message), "logprobs": None}
            if self._call.ids:
                choice |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": [], "weight_versions": []}
            events.append({**self._head, "choices": [choice]})
        return events

    def usage(self, outputs: Sequence[RolloutOutput]) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": _usage(outputs)}

    def _choice(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": self._row * self._call.params.n + index, "finish_reason": None}
        if not self._call.chat:
            return {**choice, "text": message["content"]}
        if not self._begun[index]:
            self._begun[index] = True
            message = {"role": "assistant", **message}
        return {**choice, "delta": message}
