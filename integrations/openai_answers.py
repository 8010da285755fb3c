"""OpenAI's protocol: writes the answer to a request, whole or as a stream. Fields beyond OpenAI's are vLLM's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from stoker.integrations.openai_api import Call
from stoker.integrations.text_stream import TextStream
from stoker.rollout import Completion, RolloutChunk, RolloutOutput

_LEAST_LOGPROB = -9999.0  # JSON has no infinity


def answer(call: Call, outputs: Sequence[RolloutOutput], tokenizer: Any, created: int) -> dict[str, Any]:
    """The answer to a call that is not streamed. created: seconds since 1970."""
    choices = []
    for row, output in enumerate(outputs):
        for completion in output.completions:
            message = _parsed(call, output, completion, tokenizer) if call.chat else {}
            choice: dict[str, Any] = {"index": row * call.params.n + completion.index, **_end(completion, message)}
            if call.chat:
                choice["message"] = {"role": "assistant", **message}
            else:
                choice["text"] = completion.text or ""
            top = completion.top_logprobs
            choice["logprobs"] = _logprobs(call, completion.token_ids, completion.logprobs, top, tokenizer)
            if call.ids:
                choice["prompt_token_ids"] = output.prompt_token_ids
                choice |= {"token_ids": completion.token_ids, "weight_versions": completion.weight_versions}
            choices.append(choice)
    return {**_head(call, created, stream=False), "choices": choices, "usage": _usage(outputs)}


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


def _logprobs(
    call: Call, ids: list[int], logprobs: list[float], top: list[dict[int, float]] | None, tokenizer: Any
) -> dict[str, Any] | None:
    if not call.logprobs:
        return None

    def text(token: int) -> str:
        return f"token_id:{token}" if tokenizer is None else tokenizer.decode([token])

    def entry(token: int, logprob: float) -> dict[str, Any]:
        written = text(token)
        whole = "�" not in written  # or it is a part of a character
        return {
            "token": written,
            "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": list(written.encode()) if whole else None,
        }

    def by_text(others: dict[int, float]) -> dict[str, float]:  # the likeliest of those written alike
        return {text(token): max(logprob, _LEAST_LOGPROB) for token, logprob in reversed(others.items())}

    alternatives = top or [{}] * len(ids)
    if call.chat:
        rows = zip(ids, logprobs, alternatives, strict=True)
        return {
            "content": [
                {**entry(token, logprob), "top_logprobs": [entry(*item) for item in others.items()]}
                for token, logprob, others in rows
            ]
        }
    return {
        "tokens": [text(token) for token in ids],
        "token_logprobs": [max(logprob, _LEAST_LOGPROB) for logprob in logprobs],
        "top_logprobs": None if top is None else list(map(by_text, top)),
    }


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
