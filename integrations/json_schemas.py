"""Turns JSON schemas into regular expressions by ``outlines_core``, and refuses schemas that these would not enforce."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from stoker.kernels.errors import InvalidRequestError
from stoker.rollout.regex import DEAD, byte_automaton

_MOST_CHARACTERS = 2**24  # of a pattern; far fewer make more states than an automaton may have
_ANYTHING = 14_000  # characters of the pattern for any value at all
_SHORT = ("string", "integer", "number", "boolean", "null")  # types with short patterns
_REFERENCES = 3  # how deep outlines_core follows references within references
# Keywords that outlines_core ignores, so that what is sampled might not fit the schema.
_PASSED_OVER = (
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "uniqueItems", "contains", "minProperties",
    "maxProperties", "patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "not", "if",
)  # fmt: skip
# Of these it reads only the first that is there, and then ignores most other keywords.
_FIRST = ("properties", "allOf", "anyOf", "oneOf", "prefixItems", "enum", "const", "$ref")
_BESIDE = {"properties": ("required",), "prefixItems": ("minItems", "maxItems", "items")}
_NOT_IN_QUOTES = [*range(0x20), ord('"'), ord("\\")]  # bytes that JSON writes otherwise in a string


def pattern_of(name: str, schema: dict[str, Any]) -> str:
    """The regular expression that matches what fits a schema. name: of the field, for messages. Raises ``InvalidRequestError``."""
    try:
        from outlines_core.json_schema import build_regex_from_schema
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            f"{name}: JSON schemas need the package outlines_core where the server runs: pip install outlines_core"
        ) from error
    try:
        own = json.loads(json.dumps(schema))
        # First of all: a pattern repeats its parts, and so do these. A few hundred bytes could become gigabytes.
        if _length(own, own, 0, {}) > _MOST_CHARACTERS:
            raise InvalidRequestError(
                f"{name}: the schema's pattern would have more than {_MOST_CHARACTERS} characters: nest less deep, refer to "
                "what contains the reference less often, or have properties required"
            )
        texts = [part for part in _parts(own) if _is_text(part)]
        for part in texts:
            if isinstance(given := part.get("pattern"), str):  # put it in a group, as it may have alternatives
                part["pattern"] = f"(?:{given[1:-1] if given.startswith('^') and given.endswith('$') else given})"
        pattern = str(build_regex_from_schema(json.dumps(own)))
        if unheld := list(dict.fromkeys(_unheld(own))):
            raise InvalidRequestError(
                f"{name}: what is sampled would not be held to {', '.join(unheld)} of the schema: leave that out, and look "
                "at the answer for it"
            )
        for part in texts:
            if "pattern" in part or "format" in part:
                _check_quoted(name, part, str(build_regex_from_schema(json.dumps({**part, "type": "string"}))))
        return pattern
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        # TypeError where its parser takes less than Python's: half characters.
        raise error if isinstance(error, InvalidRequestError) else InvalidRequestError(f"{name}: {error}") from error


def _check_quoted(name: str, part: dict[str, Any], pattern: str) -> None:
    """Raise ``InvalidRequestError`` where a string's pattern may match quotes and the like: it is put between quotes as it is."""
    within = pattern.removeprefix("(").removesuffix(")")[1:-1]
    if (byte_automaton(within).following[:, _NOT_IN_QUOTES] != DEAD).any():
        raise InvalidRequestError(
            f"{name}: strings of {json.dumps({n: part[n] for n in ('pattern', 'format') if n in part})} may have quotes, "
            "backslashes or control characters, which JSON writes otherwise: give a pattern without them, as [a-z], or "
            '[^"\\\\\\x00-\\x1f] in place of .'
        )


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema, and all schemas within it that apply to values."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name in ("properties", "$defs", "definitions"):
        values = schema.get(name)
        for part in values.values() if isinstance(values, Mapping) else ():
            yield from _parts(part)
    for name in ("allOf", "anyOf", "oneOf", "prefixItems"):
        values = schema.get(name)
        for part in values if isinstance(values, list) else ():
            yield from _parts(part)
    for name, beside in (("items", "prefixItems"), ("additionalProperties", "properties")):
        if beside not in schema:  # next to which nothing of the other kind is sampled
            yield from _parts(schema.get(name))


def _is_text(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type")
    return not any(name in schema for name in _FIRST) and ("string" in (kinds if isinstance(kinds, list) else [kinds]))


def _unheld(schema: Any) -> Iterator[str]:
    """What a schema asks for that ``outlines_core`` leaves out of the pattern, or makes match what is no JSON."""
    for part in _parts(schema):
        yield from (name for name in _PASSED_OVER if part.get(name) is not None and part[name] is not False)
        first, *others = [name for name in _FIRST if name in part] or [""]
        yield from (f"{name} beside {first}" for name in others)
        if first:
            bound = {"minLength", "maxLength", "pattern", "required", "minItems", "maxItems", "items"} - {
                *_BESIDE.get(first, ())
            }
            yield from (f"{name} beside {first}" for name in sorted(bound & {*part}))
        yield from (f"required {name!r}" for name in part.get("required", ()) if name not in part.get("properties", ()))
        if len(part.get("allOf", ())) > 1:
            yield "allOf of several"
        if first == "prefixItems":
            count = len(part[first])
            if not part.get("minItems", 0) <= count <= part.get("maxItems", count):
                yield "minItems and maxItems beside prefixItems"
        if (
            _is_text(part)
            and ("minLength" in part or "maxLength" in part) + ("pattern" in part) + ("format" in part) > 1
        ):
            yield "several of minLength, pattern and format"
        within = [*part.get("properties", {}).values(), *part.get("prefixItems", ())]
        if any(one == {} for one in within):
            yield "a property or item of any kind ({})"


def _length(schema: Any, root: Any, references: int, known: dict[tuple[int, int], int]) -> int:
    """About how many characters a schema's pattern has, and hardly fewer than it has.

    references: how many led here. known: of what was asked for before, by identity and these.
    """
    if not isinstance(schema, Mapping):
        return 1
    key = id(schema), references
    if key in known:
        return known[key]

    def lengths(several: Any) -> int:
        values = several.values() if isinstance(several, Mapping) else several if isinstance(several, list) else ()
        return sum(_length(one, root, references, known) + 20 for one in values)

    if "$ref" in schema:
        target = _target(str(schema["$ref"]), root)
        found = _length(target, root, references + 1, known) if references <= _REFERENCES else 1
    else:
        properties = schema.get("properties", {})
        # Once for each that may be the last one, where all may be left out; an array's items as its first and as those behind.
        times = 1 if schema.get("required") else len(properties) // 2 + 1
        found = lengths(properties) * times + len(str(list(properties)))
        found += 2 * lengths([schema[name] for name in ("items", "additionalProperties") if name in schema])
        found += sum(lengths(schema.get(name)) for name in ("anyOf", "oneOf", "allOf", "prefixItems"))
        found += sum(len(json.dumps(schema[name])) for name in ("enum", "const", "pattern") if name in schema)
        found += 150 if schema.get("type") in _SHORT or found > 2 else _ANYTHING
    known[key] = found
    return found


def _target(reference: str, root: Any) -> Any:
    for part in reference.removeprefix("#").removeprefix("/").split("/"):
        if part:
            root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root
