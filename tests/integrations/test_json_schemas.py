"""JSON schemas as patterns: what matches is JSON and fits the schema, and what cannot be held to is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from stoker.integrations.json_schemas import pattern_of
from stoker.kernels.errors import InvalidRequestError

pytest.importorskip("outlines_core")
INTEGER = {"type": "integer"}


def in_object(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": part}, "required": ["a"]}


@pytest.mark.parametrize("given", ["a|b", "^a|b$", "^(a|b)$", '^[^c-\\U0010ffff"\\\\\\x00-\\x60]$'])
@pytest.mark.parametrize("kinds", ["string", ["string", "null"]])
def test_all_of_a_strings_pattern_stands_between_its_quotes(given: str, kinds: Any) -> None:
    pattern = pattern_of("json", in_object({"type": kinds, "pattern": given}))
    for text, fits in (
        ('{"a":"a"}', True),
        ('{"a":"b"}', True),
        ('{"a":"a', False),
        ('b"}', False),
        ('{"a":"ab"}', False),
    ):
        assert bool(re.fullmatch(pattern, text)) == fits, text


def test_names_of_properties_are_no_words_of_a_schema() -> None:
    schema = {name: {"type": "string", "pattern": "x|y"} for name in ("pattern", "enum", "not", "type", "minimum")}
    pattern = pattern_of("json", {"type": "object", "properties": schema, "required": [*schema]})
    assert re.fullmatch(pattern, "{" + ",".join(f'"{name}":"x"' for name in schema) + "}")
    assert not re.fullmatch(pattern, "{" + ",".join(f'"{name}":"x' for name in schema) + "}")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({**INTEGER, "minimum": 0, "maximum": 9}, "minimum, maximum"),
        ({**INTEGER, "not": {"const": 3}}, "not"),
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "prefixItems": [INTEGER], "minItems": 2}, "minItems"),
        ({"type": "string", "pattern": "a+", "maxLength": 3}, "several of minLength, pattern and format"),
        ({"allOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "allOf of several"),
        ({**in_object(INTEGER), "anyOf": [in_object(INTEGER)]}, "anyOf beside properties"),
        ({**in_object(INTEGER), "required": ["a", "z"]}, "required 'z'"),
        ({"$ref": "#/$defs/s", "maxLength": 3, "$defs": {"s": {"type": "string"}}}, "maxLength beside \\$ref"),
        ({"$ref": "#/$defs/s", "$defs": {"s": {**INTEGER, "multipleOf": 2}}}, "multipleOf"),
        ({"type": "object", "additionalProperties": INTEGER, "maxProperties": 3}, "maxProperties"),
        (in_object({}), "of any kind"),
        ({"type": "string", "pattern": ".*"}, "may have quotes"),
        ({"type": "string", "format": "email"}, "may have quotes"),
    ],
)
def test_what_would_be_passed_over_is_refused(schema: dict[str, Any], words: str) -> None:
    for whole in (
        schema,
        {"type": "array", "items": schema, **({"$defs": schema["$defs"]} if "$defs" in schema else {})},
    ):
        with pytest.raises(InvalidRequestError, match=words):
            pattern_of("json", whole)


def test_what_only_describes_or_is_held_to_in_any_case_is_not() -> None:
    tags = {"type": "array", "prefixItems": [INTEGER, {"enum": ["x"], "type": "string"}], "minItems": 2, "maxItems": 2}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", "type": "object", "additionalProperties": False,
        "properties": {"n": {"anyOf": [INTEGER, {"type": "null"}], "default": None, "title": "N"}, "t": tags, "o": {"$ref": "#/$defs/o"}},
        "required": ["n", "t", "o"],
        "$defs": {"o": {"type": "object", "additionalProperties": INTEGER, "uniqueItems": False}},
    }  # fmt: skip
    assert re.fullmatch(pattern_of("json", schema), '{"n":null,"t":[3,"x"],"o":{"k":5}}')
