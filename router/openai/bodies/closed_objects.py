"""``close_objects``: objects take the keys that a schema declares, and no others.

A schema as Pydantic writes it declares properties and says nothing about further ones. JSON Schema
allows them then; under a grammar a model would write keys that no client expects. So every object
that declares properties gets ``additionalProperties: false``, unless it says something about
further ones itself. An object that declares none stays free. xgrammar's strict mode, which vLLM
uses, does the same for declared properties.

Where several schemas describe one object (``allOf``, or ``anyOf`` beside properties), a key may be
declared by any of them, so only their common parent is closed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_IN_PLACE = ("allOf", "anyOf", "oneOf")
_CONDITIONS = ("if", "then", "else", "dependentSchemas")
_SAYS = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE = ("items", "additionalProperties", "contains", "if", "then", "else", "unevaluatedItems")
_LISTS = ("prefixItems", "items", *_IN_PLACE)
_MAX_REFERENCES = 256
"""References that are followed for the keys of one object; with more, it stays open."""


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a schema, whose nesting is bounded, with closed objects."""
    closed = _Closing(schema).close(schema)
    assert isinstance(closed, dict)
    return closed


class _Closing:
    """The copy of one schema. ``_parts`` are the ids of schemas that describe an object together
    with another one: they are not closed by themselves."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._parts: set[int] = set()
        self._references = 0
        for one in _schemas(root):
            if _combines(one):
                self._add_parts(one)

    def close(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        copy = {key: self._keyword(key, value) for key, value in schema.items()}
        if id(schema) in self._parts or any(key in schema for key in _SAYS):
            return copy
        keys = self._declared_together(schema) if _combines(schema) else schema.get("properties")
        if not isinstance(keys, Mapping | list):
            return copy
        own = copy.get("properties")
        properties = dict(own) if isinstance(own, dict) else {}
        required = schema.get("required")
        if isinstance(required, list):
            keys = [*keys, *(name for name in required if isinstance(name, str))]
        for key in keys:
            properties.setdefault(key, True)
        return {**copy, "properties": properties, "additionalProperties": False}

    def _add_parts(self, schema: Mapping[str, Any]) -> None:
        pending = self._members(schema)
        while pending:
            part = pending.pop()
            if id(part) not in self._parts:
                self._parts.add(id(part))
                pending += self._members(part)

    def _keyword(self, key: str, value: Any) -> Any:
        if key in _NAMED and isinstance(value, Mapping):
            return {name: self.close(inner) for name, inner in value.items()}
        if key in _LISTS and isinstance(value, list):
            return [self.close(inner) for inner in value]
        return self.close(value) if key in _SINGLE else value

    def _declared_together(self, schema: Mapping[str, Any]) -> list[str] | None:
        """Return the keys that ``schema`` and its parts declare; None where one of them says
        something about further keys, or none declares any."""
        keys: list[str] = []
        pending, seen = [schema], set()
        while pending:
            one = pending.pop(0)
            if id(one) in seen:
                continue
            seen.add(id(one))
            if any(key in one for key in _SAYS) or self._references > _MAX_REFERENCES:
                return None
            for key in ("properties", "required"):
                names = one.get(key)
                keys += names if isinstance(names, Mapping | list) else ()
            pending += self._members(one)
        return list(dict.fromkeys(key for key in keys if isinstance(key, str))) or None

    def _members(self, schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the schemas that describe the same value as ``schema``, without itself."""
        found = [inner for key in _CONDITIONS[:3] if isinstance(inner := schema.get(key), Mapping)]
        dependent = schema.get("dependentSchemas")
        found += dependent.values() if isinstance(dependent, Mapping) else ()
        for key in _IN_PLACE:
            branches = schema.get(key)
            found += branches if isinstance(branches, list) else ()
        if isinstance(reference := schema.get("$ref"), str):
            self._references += 1
            found.append(self._resolve(reference))
        return [one for one in found if isinstance(one, Mapping)]

    def _resolve(self, reference: str) -> Any:
        at: Any = self._root
        for part in filter(None, reference.removeprefix("#").split("/")):
            name = part.replace("~1", "/").replace("~0", "~")
            at = at.get(name) if isinstance(at, Mapping) else None
        return at if reference.startswith("#") else None


def _combines(schema: Mapping[str, Any]) -> bool:
    """Return whether several schemas describe one object, rather than alternatives of it."""
    every = schema.get("allOf")
    parts = len(every) if isinstance(every, list) else 0
    parts += any(key in schema for key in ("anyOf",))
    parts += any(key in schema for key in ("oneOf",))
    parts += any(key in schema for key in _CONDITIONS)
    parts += "$ref" in schema
    return parts > 1 or (parts == 1 and "properties" in schema)


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all schemas in a schema."""
    pending = [schema]
    while pending:
        one = pending.pop()
        if isinstance(one, list):
            pending += one
        if not isinstance(one, Mapping):
            continue
        yield one
        for key, value in one.items():
            if key in _NAMED and isinstance(value, Mapping):
                pending += value.values()
            elif key in _SINGLE or key in _LISTS:
                pending.append(value)
