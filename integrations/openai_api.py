"""OpenAI's protocol: reads what a request asks for. Fields beyond OpenAI's are vLLM's."""

from __future__ import annotations

import inspect
import json
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from stoker.integrations.image_urls import as_data
from stoker.integrations.json_schemas import pattern_of
from stoker.kernels.errors import InvalidRequestError, PromptTooLongError
from stoker.rollout import RolloutEngine, SamplingParams
from stoker.rollout.adapters import AdapterChoice
from stoker.rollout.prompts import read_chat, read_prompts, tokenizer_of
from stoker.rollout.user_values import is_int, shown

_SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "suppress_token_ids", "logit_bias", "seed",
    "logprobs_mode", "prompt_logprobs",
)  # fmt: skip
# Fields that change no completion.
_NO_MATTER = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "priority",
    "cache_salt", "spaces_between_special_tokens",
}  # fmt: skip
# Fields of what is not supported, with the values that do not ask for it.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
}
_MOST_SAMPLES = 16384  # more could take all memory
_MOST_LOGPROBS = 1 << 22  # of prompts' tokens, at 70 bytes of an answer each
_MOST_ALTERNATIVES = 1 << 24  # of sampled tokens, if completions become as long as they may
_MOST_AT_A_TOKEN = 1024  # of them: a step makes as many for all requests in it as the one that asks for most
_MOST_CHARACTERS = 128  # of text for each token there may be: as many as the longest tokens of large vocabularies have


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
    prompt_logprobs: int | None  # as SamplingParams has it; those of ``params`` may be for an echo
    echo: bool  # the prompt comes before the completion
    complete: bool  # False: the answer is of the prompt alone
    named_by_ids: bool  # tokens, where log-probabilities name them
    tools: list[Any] | None


def read_call(body: Any, engine: RolloutEngine, model: str, adapter: AdapterChoice, *, chat: bool) -> Call:
    """The call that a request's JSON makes. model: the name under which the engine is served, with ``adapter``.

    Raises ``InvalidRequestError`` for what is invalid, and for any field that would be ignored.
    """
    fields, asked = _fields(body, engine, model)
    tools = _tools(fields) if chat else None
    if fields.get("tool_choice") == "none":
        tools = None
    for name, neutral in _NEUTRAL.items():
        if (value := fields.pop(name, neutral[0])) not in neutral:
            raise InvalidRequestError(f"{name}={shown(value)}: the server does not do that; leave it out")
    stream, options = _flag(fields, "stream"), fields.pop("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise InvalidRequestError(f"stream_options={shown(options)}: there is include_usage")
    usage, ids = _flag(options, "include_usage"), _flag(fields, "return_token_ids")
    named_by_ids = _flag(fields, "return_tokens_as_token_ids")
    echo, complete = _of_prompts(fields, chat, stream)
    params, logprobs = _sampling(fields, chat)
    prompt_logprobs = params.prompt_logprobs
    if echo and logprobs:
        params = replace(params, prompt_logprobs=max(prompt_logprobs or 0, params.logprobs))
    prompts = [_chat(fields, engine, tools)] if chat else _prompts(fields, engine.max_model_len)
    if params.n * len(prompts) > _MOST_SAMPLES:
        of = f" of {len(prompts)} prompts" if len(prompts) > 1 else ""
        raise InvalidRequestError(
            f"n={params.n}{of}: the server makes at most {_MOST_SAMPLES} completions in a request"
        )
    _check_empty(fields)
    _check_logprobs(params, prompts, engine, chat)
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
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        complete=complete,
        named_by_ids=named_by_ids,
        tools=tools,
    )


def tokenised(body: Any, engine: RolloutEngine, model: str) -> dict[str, Any]:
    """The answer to a request for the token ids of a prompt or a chat, as vLLM's server gives it. Raises as ``read_call`` does."""
    fields, _ = _fields(body, engine, model)
    whole = True
    if "messages" in fields:
        prompts = [_chat(fields, engine, _tools(fields))]
    else:
        whole = _flag(fields, "add_special_tokens", default=True)  # without, it is text within a prompt
        prompts = _prompts(fields, engine.max_model_len)
        if len(prompts) > 1 or not isinstance(prompts[0], str):
            raise InvalidRequestError(f"prompt={shown(body['prompt'])}: give text, or messages")
    _check_empty(fields)
    ((ids, _),) = read_prompts(prompts, None, engine.processor)
    if not whole:
        ids = tokenizer_of(engine.processor)(prompts[0], add_special_tokens=False)["input_ids"]
    return {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids}


def _fields(body: Any, engine: RolloutEngine, model: str) -> tuple[dict[str, Any], str]:
    """What is given of a body's fields, and the name of the model that it is for."""
    if not isinstance(body, dict):
        raise InvalidRequestError("the body is no JSON object: give one, as OpenAI's clients do")
    fields = {name: value for name, value in body.items() if value is not None and name not in _NO_MATTER}
    asked = fields.pop("model", model)
    if asked != model and asked not in engine.adapters:
        raise UnknownModelError(f"model={shown(asked)}: there are {', '.join((model, *sorted(engine.adapters)))}")
    return fields, asked


def _check_empty(fields: dict[str, Any]) -> None:
    """Refuse fields that nobody has read."""
    if fields:
        raise InvalidRequestError(f"{shown(next(iter(fields)))} is no field the server knows: leave it out")


def _tools(fields: dict[str, Any]) -> list[Any] | None:
    tools = fields.pop("tools", [])
    # Templates would make anything of others, or raise errors that do not name the field.
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequestError(f"tools={shown(tools)}: give a list of objects, each with a type and a function")
    return tools or None


def _flag(fields: dict[str, Any], name: str, *, default: bool = False) -> bool:
    value = fields.pop(name, default)
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name}={shown(value)}: give true or false")
    return value


def _of_prompts(fields: dict[str, Any], chat: bool, stream: bool) -> tuple[bool, bool]:
    """Whether the answer repeats the prompts, and whether it has completions: not where it is of the prompts alone."""
    echo = _flag(fields, "echo")
    if echo and chat:
        raise InvalidRequestError("echo=True: the server does not do that for chats; leave it out")
    asked = "prompt_logprobs" if "prompt_logprobs" in fields else "echo" if echo else None
    if asked and stream:
        raise InvalidRequestError(f"{asked} with stream: what it asks for is not streamed; leave one of them out")
    limits = {"max_tokens", "max_completion_tokens"} & fields.keys()
    alone = asked is not None and bool(limits) and all(is_int(fields[name]) and fields[name] == 0 for name in limits)
    if alone:
        fields |= dict.fromkeys(limits, 1)  # a token that nobody is shown
    return echo, not alone


def _check_logprobs(params: SamplingParams, prompts: list[Any], engine: RolloutEngine, chat: bool) -> None:
    """Refuse more log-probabilities than an answer has room for."""
    longest = min(params.max_tokens or engine.max_model_len, engine.max_model_len)
    sampled = params.n * len(prompts) * longest
    if params.logprobs > _MOST_AT_A_TOKEN:
        raise InvalidRequestError(
            f"{params.logprobs} alternatives to a token: the server gives at most {_MOST_AT_A_TOKEN} to one that is sampled"
        )
    if sampled * params.logprobs > _MOST_ALTERNATIVES:
        raise InvalidRequestError(
            f"{params.logprobs} alternatives at each of up to {sampled} tokens: the server gives at most {_MOST_ALTERNATIVES} in an "
            "answer; ask for fewer, or for fewer or shorter completions"
        )
    if params.prompt_logprobs is None:
        return
    if chat:  # token ids, or with images more than that, which takes long to read
        lengths = [len(p) if isinstance(p, list) else engine.max_model_len for p in prompts]
    else:
        lengths = [len(ids) for ids, _ in read_prompts(prompts, None, engine.processor)]
    tokens = params.n * sum(lengths)
    if tokens * (params.prompt_logprobs + 1) > _MOST_LOGPROBS:
        raise InvalidRequestError(
            f"{params.prompt_logprobs} log-probabilities at each of {tokens} tokens of prompts, besides their own: the server gives "
            f"at most {_MOST_LOGPROBS} in an answer; ask for fewer, or send fewer prompts in a request"
        )


def _sampling(fields: dict[str, Any], chat: bool) -> tuple[SamplingParams, bool]:
    """Sampling parameters, and whether log-probabilities are asked for."""
    settings = {name: fields.pop(name) for name in _SAMPLING if name in fields}
    if settings.get("top_k") == -1:  # vLLM's "off"
        settings["top_k"] = 0
    if isinstance(bias := settings.get("logit_bias"), dict):  # JSON has no integers for names
        ids = {name: int(name) for name in bias if name.isdecimal() and len(name) < 19}
        settings["logit_bias"] = {ids.get(name, name): value for name, value in bias.items()}
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
            return pattern_of(name, schema)
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return pattern_of(name, schema)
        case {"type": "json_object"}:
            return pattern_of(name, {"type": "object"})
        case {"type": "text"}:
            return None
    raise InvalidRequestError(
        f"{name}={shown(asked)}: structured_outputs is a regex, a choice of strings or a json schema, and response_format a "
        "type of text, json_object or json_schema"
    )


def _prompts(fields: dict[str, Any], max_model_len: int) -> list[Any]:
    given = fields.pop("prompt", None)
    prompts = [given] if given != [] and _is_text_or_ids(given) else given
    # Not chats, though the engine would take them: their images could be paths of files on this machine.
    if not isinstance(prompts, list) or not prompts or not all(_is_text_or_ids(p) for p in prompts):
        raise InvalidRequestError(f"prompt={shown(given)}: give text, a list of token ids, or a list of such")
    for row, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            _check_length(f"prompt {row}", len(prompt), max_model_len)
    return prompts


def _check_length(name: str, characters: int, max_model_len: int) -> None:
    """Refuse text that cannot fit, before a tokenizer spends time and memory on it."""
    if characters > _MOST_CHARACTERS * max_model_len:
        raise PromptTooLongError(
            f"{name} has {characters} characters, more than {_MOST_CHARACTERS} for each of the {max_model_len} tokens of "
            "max_model_len: shorten it or raise EngineConfig.max_model_len"
        )


def _is_text_or_ids(prompt: Any) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(t, int) for t in prompt))


def _chat(fields: dict[str, Any], engine: RolloutEngine, tools: list[Any] | None) -> Any:
    messages = fields.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError(f"messages={shown(messages)}: give a list of messages")
    settings = fields.pop("chat_template_kwargs", {})
    if not isinstance(settings, dict):
        raise InvalidRequestError(f"chat_template_kwargs={shown(settings)}: give an object")
    for name in settings:
        if name in ("add_generation_prompt", "continue_final_message", "tools"):  # would lose to the field
            raise InvalidRequestError(f"chat_template_kwargs has {name}: give it as a field of the request")
        if name in _of_no_template(engine):
            raise InvalidRequestError(
                f"chat_template_kwargs has {shown(name)}, which is no variable of a template: leave it out"
            )
    go_on = _flag(fields, "continue_final_message")
    begin = _flag(fields, "add_generation_prompt", default=not go_on)
    settings = {**settings, "add_generation_prompt": begin, "continue_final_message": go_on}
    if tools:
        settings["tools"] = tools
    reads_images = engine.processor is not engine.tokenizer
    chat = [_message(at, message, reads_images) for at, message in enumerate(messages)]
    _check_length("messages", sum(map(_characters, chat)), engine.max_model_len)
    return read_chat("messages", chat, engine.processor, **settings)


def _of_no_template(engine: RolloutEngine) -> set[str]:
    """Parameters of the functions that apply templates. They are no variables of a template, and may change other things."""
    applying = (getattr(reader, "apply_chat_template", None) for reader in (engine.processor, engine.tokenizer))
    return {name for apply in applying if apply for name in inspect.signature(apply).parameters} - {"documents"}


def _characters(message: dict[str, Any]) -> int:
    content = message["content"]
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)


def _message(at: int, message: Any, reads_images: bool) -> dict[str, Any]:
    """A message as chat templates take it: text as text, images as transformers names them, arguments of tools as objects."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"messages[{at}] is {shown(message)}: give an object with role and content")
    found: dict[str, Any] = {"content": "", **{name: value for name, value in message.items() if value is not None}}
    content = found["content"]
    if not isinstance(content, str):
        if not isinstance(content, list):
            raise InvalidRequestError(f"messages[{at}] has content {shown(content)}: give text, or a list of parts")
        parts = [_part(at, part, reads_images) for part in content]
        text_alone = all(part["type"] == "text" for part in parts)
        found["content"] = "\n".join(part["text"] for part in parts) if text_alone else parts
    if isinstance(calls := found.get("tool_calls"), list):
        found["tool_calls"] = [_with_arguments(call) for call in calls]
    return found


def _part(at: int, part: Any, reads_images: bool) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            if url.startswith(("http://", "https://")) and reads_images:
                url = as_data(f"messages[{at}]", url)
            # No other URLs: they could be files on this machine.
            if url.startswith(("data:image/", "http://", "https://")):
                return {"type": "image", "url": url}
    raise InvalidRequestError(
        f"messages[{at}] has the part {shown(part)}: there are text, and image_url with a data: or http(s): URL"
    )


def _with_arguments(call: Any) -> Any:
    match call:
        case {"function": {"arguments": str(text)} as function}:
            # What a model has written is not always valid JSON.
            with suppress(ValueError, RecursionError):
                return {**call, "function": {**function, "arguments": json.loads(text)}}
    return call
