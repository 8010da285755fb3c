"""OpenAI's protocol: what a request asks of the engine, and what it is answered. Fields beyond OpenAI's are vLLM's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from stoker.integrations.text_stream import TextStream
from stoker.kernels.errors import InvalidRequestError
from stoker.rollout import Completion, RolloutChunk, RolloutEngine, RolloutOutput, SamplingParams
from stoker.rollout.adapters import AdapterChoice
from stoker.rollout.messages import shown
from stoker.rollout.prompts import read_chat

_SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "suppress_token_ids", "seed", "logprobs_mode",
)  # fmt: skip
# What changes no completion.
_NO_MATTER = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
}  # fmt: skip
# Fields of what is not done here, and the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
}
_MOST_SAMPLES = 16384  # a request that asks for more would have the memory of all
_LEAST_LOGPROB = -9999.0  # JSON has no infinity


class UnknownModelError(InvalidRequestError):
    """A name that is neither the served model's nor an adapter's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One request, as the engine takes it."""

    id: str
    model: str  # the name it was asked under
    prompts: list[Any]
    params: SamplingParams
    adapter: Any
    chat: bool
    stream: bool
    usage: bool  # at the end of a stream
    ids: bool  # also token ids and weight versions
    logprobs: bool
    tools: list[Any] | None


# -- what is asked -----------------------------------------------------------------------------------------------------


def read_call(body: Any, engine: RolloutEngine, model: str, adapter: AdapterChoice, *, chat: bool) -> Call:
    """The call that a request's JSON makes. model: the name under which the engine is served, with ``adapter``.

    Raises ``InvalidRequestError`` for what cannot be, and for any field whose meaning would be dropped.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("the body is no JSON object: give one, as OpenAI's clients do")
    fields = {name: value for name, value in body.items() if value is not None and name not in _NO_MATTER}
    asked = fields.pop("model", model)
    if asked != model and asked not in engine.adapters:
        raise UnknownModelError(f"model={shown(asked)}: there are {', '.join((model, *sorted(engine.adapters)))}")
    tools = fields.pop("tools", None) if chat else None
    if fields.get("tool_choice") == "none":
        tools = None
    for name, neutral in _NEUTRAL.items():
        if (value := fields.pop(name, neutral[0])) not in neutral:
            raise InvalidRequestError(f"{name}={shown(value)}: the server does not do that; leave it out")
    stream, options = _flag(fields, "stream"), fields.pop("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage"}:
        raise InvalidRequestError(f"stream_options={shown(options)}: there is include_usage")
    usage, ids = _flag(options, "include_usage"), _flag(fields, "return_token_ids")
    params, logprobs = _sampling(fields, chat)
    if params.n > _MOST_SAMPLES:
        raise InvalidRequestError(f"n={params.n}: the server makes at most {_MOST_SAMPLES} completions of a prompt")
    prompts = [_chat(fields, engine, tools)] if chat else _prompts(fields)
    if fields:
        raise InvalidRequestError(f"{shown(next(iter(fields)))} is no field the server knows: leave it out")
    return Call(
        id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}",
        model=asked,
        prompts=prompts,
        params=params,
        adapter=adapter if asked == model else asked,
        chat=chat,
        stream=stream,
        usage=usage,
        ids=ids,
        logprobs=logprobs,
        tools=tools,
    )


def _flag(fields: dict[str, Any], name: str, *, default: bool = False) -> bool:
    value = fields.pop(name, default)
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name}={shown(value)}: give true or false")
    return value


def _sampling(fields: dict[str, Any], chat: bool) -> tuple[SamplingParams, bool]:
    """Sampling parameters, and whether log-probabilities are asked for."""
    settings = {name: fields.pop(name) for name in _SAMPLING if name in fields}
    if settings.get("top_k") == -1:  # vLLM's "off"
        settings["top_k"] = 0
    if chat:
        limits = [settings.pop("max_tokens", None), fields.pop("max_completion_tokens", None)]
        given = [limit for limit in limits if limit is not None]
        if len(given) > 1 and given[0] != given[1]:
            raise InvalidRequestError(
                f"max_tokens={shown(given[0])}, max_completion_tokens={shown(given[1])}: give one of them"
            )
        settings["max_tokens"] = given[0] if given else None
        wanted = _flag(fields, "logprobs")
        settings["logprobs"] = fields.pop("top_logprobs", 0)
    else:
        wanted = "logprobs" in fields
        settings["logprobs"] = fields.pop("logprobs", 0)
    if settings["logprobs"] and not wanted:
        raise InvalidRequestError("top_logprobs without logprobs: give logprobs=true")
    given = [name for name in ("structured_outputs", "response_format") if name in fields]
    patterns = [pattern for name in given if (pattern := _pattern(name, fields.pop(name))) is not None]
    if len(patterns) > 1:
        raise InvalidRequestError("structured_outputs and response_format both bind the text: give one of them")
    return SamplingParams(**settings, regex=patterns[0] if patterns else None), wanted


def _pattern(name: str, asked: Any) -> str | None:
    """The regular expression that ``structured_outputs`` or ``response_format`` stands for."""
    match asked:
        case {"regex": str(pattern), **others} if not others:
            return pattern
        case {"choice": [*choices], **others} if not others and choices and all(isinstance(c, str) for c in choices):
            return "|".join(map(re.escape, choices))
        case {"json": dict(schema), **others} if not others:
            return _of_schema(name, schema)
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return _of_schema(name, schema)
        case {"type": "json_object"}:
            return _of_schema(name, {"type": "object"})
        case {"type": "text"}:
            return None
    raise InvalidRequestError(
        f"{name}={shown(asked)}: structured_outputs is a regex, a choice of strings or a json schema, and response_format a "
        "type of text, json_object or json_schema"
    )


def _of_schema(name: str, schema: dict[str, Any]) -> str:
    try:
        from outlines_core.json_schema import build_regex_from_schema
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            f"{name}: JSON schemas need the package outlines_core where the server runs: pip install outlines_core"
        ) from error
    try:
        return str(build_regex_from_schema(json.dumps(schema)))
    except (ValueError, TypeError) as error:  # the latter where its parser takes less than Python's: half characters
        raise InvalidRequestError(f"{name}: {error}") from error


def _prompts(fields: dict[str, Any]) -> list[Any]:
    given = fields.pop("prompt", None)
    one = isinstance(given, str) or (isinstance(given, list) and given and all(isinstance(t, int) for t in given))
    prompts = [given] if one else given
    # No chats, which the engine would take too: the paths of their images are files of this machine.
    if not isinstance(prompts, list) or not prompts or not all(_is_text_or_ids(p) for p in prompts):
        raise InvalidRequestError(f"prompt={shown(given)}: give text, a list of token ids, or a list of such")
    return prompts


def _is_text_or_ids(prompt: Any) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(t, int) for t in prompt))


def _chat(fields: dict[str, Any], engine: RolloutEngine, tools: list[Any] | None) -> Any:
    messages = fields.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError(f"messages={shown(messages)}: give a list of messages")
    settings = fields.pop("chat_template_kwargs", {})
    if not isinstance(settings, dict):
        raise InvalidRequestError(f"chat_template_kwargs={shown(settings)}: give an object")
    go_on = _flag(fields, "continue_final_message")
    begin = _flag(fields, "add_generation_prompt", default=not go_on)
    settings = {**settings, "add_generation_prompt": begin, "continue_final_message": go_on}
    if tools:
        settings["tools"] = tools
    return read_chat("messages", [_message(at, m) for at, m in enumerate(messages)], engine.processor, **settings)


def _message(at: int, message: Any) -> dict[str, Any]:
    """As chat templates take it: text as text, images as transformers names them, arguments of tools as objects."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"messages[{at}] is {shown(message)}: give an object with role and content")
    found: dict[str, Any] = {"content": "", **{name: value for name, value in message.items() if value is not None}}
    content = found["content"]
    if not isinstance(content, str):
        if not isinstance(content, list):
            raise InvalidRequestError(f"messages[{at}] has content {shown(content)}: give text, or a list of parts")
        parts = [_part(at, part) for part in content]
        text_alone = all(part["type"] == "text" for part in parts)
        found["content"] = "\n".join(part["text"] for part in parts) if text_alone else parts
    if isinstance(calls := found.get("tool_calls"), list):
        found["tool_calls"] = [_with_arguments(call) for call in calls]
    return found


def _part(at: int, part: Any) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            # And no other, which would be a file of this machine.
            if url.startswith(("data:image/", "http://", "https://")):
                return {"type": "image", "url": url}
    raise InvalidRequestError(
        f"messages[{at}] has the part {shown(part)}: there are text, and image_url with a data: or http(s): URL"
    )


def _with_arguments(call: Any) -> Any:
    match call:
        case {"function": {"arguments": str(text)} as function}:
            with suppress(
                ValueError, RecursionError
            ):  # what a model has written is not always JSON, or any that is read
                return {**call, "function": {**function, "arguments": json.loads(text)}}
    return call


# -- what is answered --------------------------------------------------------------------------------------------------


def answer(call: Call, outputs: Sequence[RolloutOutput], tokenizer: Any, created: int) -> dict[str, Any]:
    """Of a call that is not streamed. created: seconds since 1970."""
    choices = []
    for row, output in enumerate(outputs):
        for completion in output.completions:
            choice: dict[str, Any] = {"index": row * call.params.n + completion.index, **_end(call, completion)}
            if call.chat:
                message = _parsed(call, output, completion, tokenizer)
                choice["message"] = {"role": "assistant", **message}
                if "tool_calls" in message and completion.finish_reason == "stop":
                    choice["finish_reason"] = "tool_calls"
            else:
                choice["text"] = completion.text or ""
            top = completion.top_logprobs
            choice["logprobs"] = _logprobs(call, completion.token_ids, completion.logprobs, top, tokenizer)
            if call.ids:
                choice["prompt_token_ids"] = output.prompt_token_ids
                choice |= {"token_ids": completion.token_ids, "weight_versions": completion.weight_versions}
            choices.append(choice)
    return {**_head(call, created, stream=False), "choices": choices, "usage": _usage(outputs)}


def _head(call: Call, created: int, *, stream: bool) -> dict[str, Any]:
    kind = "text_completion" if not call.chat else "chat.completion.chunk" if stream else "chat.completion"
    return {"id": call.id, "object": kind, "created": created, "model": call.model}


def _end(call: Call, completion: Completion) -> dict[str, Any]:
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}


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
    """The message, in the parts its tokenizer tells apart. What a model has written in no known form is content."""
    unparsed = {"content": completion.text or ""}
    if not parses(tokenizer):
        return unparsed
    ids = completion.token_ids[:-1] if isinstance(completion.stop_reason, int) else completion.token_ids
    try:
        found = tokenizer.parse_response(ids, prefix=output.prompt_token_ids, tools=call.tools)
        message = {name: value for name, value in found.items() if name not in ("role", "tool_calls")}
        if calls := found.get("tool_calls"):
            message["tool_calls"] = [_tool_call(c["function"]) for c in calls]
        if not message:
            return unparsed
        last = "content" if message.setdefault("content", None) else "reasoning_content"
        if isinstance(completion.stop_reason, str) and (text := message.get(last)):
            # Parsed with the stop string, which may be what ends a call; the text ends before it.
            message[last] = text.rpartition(completion.stop_reason)[0] or text
    except (ValueError, TypeError, KeyError):
        return unparsed
    return message


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
    """What a streamed prompt is answered, event by event."""

    def __init__(self, call: Call, row: int, tokenizer: Any, created: int) -> None:
        self._call = call
        self._row = row
        self._tokenizer = tokenizer
        self._head = _head(call, created, stream=True)
        self._whole = call.chat and parses(tokenizer)  # what a message consists of is known at its end
        count = call.params.n
        self._texts = [TextStream(tokenizer, call.params.stop) for _ in range(count)]
        self._begun = [False] * count

    def event(self, chunk: RolloutChunk) -> dict[str, Any]:
        """New tokens. Their text may come later, where characters are incomplete or may begin a stop string."""
        text = self._texts[chunk.index].add(chunk.token_ids)
        choice = self._choice(chunk.index, {} if self._whole else {"content": text})
        choice["logprobs"] = _logprobs(self._call, chunk.token_ids, chunk.logprobs, chunk.top_logprobs, self._tokenizer)
        if self._call.ids:
            choice |= {"token_ids": chunk.token_ids, "weight_versions": chunk.weight_versions}
        return {**self._head, "choices": [choice]}

    def ends(self, output: RolloutOutput) -> list[dict[str, Any]]:
        """Of each completion, what is left of its text, and how it ended."""
        events = []
        for completion in output.completions:
            if self._whole:
                message = _parsed(self._call, output, completion, self._tokenizer)
                if calls := message.get("tool_calls"):
                    message["tool_calls"] = [{"index": i, **one} for i, one in enumerate(calls)]
            else:
                message = {"content": self._texts[completion.index].rest(completion.text or "")}
            choice = {**self._choice(completion.index, message), **_end(self._call, completion), "logprobs": None}
            if "tool_calls" in message and completion.finish_reason == "stop":
                choice["finish_reason"] = "tool_calls"
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
