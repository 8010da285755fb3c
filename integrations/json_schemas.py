"""JSON schemas as regular expressions, by ``outlines_core``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stoker.kernels.errors import InvalidRequestError

_MOST_CHARACTERS = 2**24  # of a pattern; far fewer make more states than an automaton may have
_ANYTHING = 14_000  # characters of the pattern of a value that a schema says nothing of
_SHORT = ("string", "integer", "number", "boolean", "null")  # the pattern of one of these is not
_REFERENCES = 3  # within each other, as far as outlines_core follows them


def pattern_of(name: str, schema: dict[str, Any]) -> str:
    """The regular expression of all that fits. name: of who asks, in messages. Raises ``InvalidRequestError``."""
    try:
        from outlines_core.json_schema import build_regex_from_schema
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            f"{name}: JSON schemas need the package outlines_core where the server runs: pip install outlines_core"
        ) from error
    try:
        written = json.dumps(schema)
        # First, as a pattern has its parts several times over, and so has each of these: gigabytes, of a few hundred bytes.
        if _length(schema, schema, 0, {}) > _MOST_CHARACTERS:
            raise InvalidRequestError(
                f"{name}: the schema's pattern would have more than {_MOST_CHARACTERS} characters: nest less deep, refer to "
                "what contains the reference less often, or have properties required"
            )
        return str(build_regex_from_schema(written))
    except (ValueError, TypeError, RecursionError) as error:
        # TypeError where its parser takes less than Python's: half characters.
        raise error if isinstance(error, InvalidRequestError) else InvalidRequestError(f"{name}: {error}") from error


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
