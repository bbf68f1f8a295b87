"""``ArgumentSchema``: a tool's JSON schema, as syntaxes need it that do not write JSON themselves.

Families whose arguments are text without types (XML tags, Gemma's notation) build their grammar
from it, and their parsers cast what comes to its types. It follows references and combinations of
schemas within bounds; what it does not understand allows any value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

MAX_VARIANTS = 32
"""Schemas that one schema is unfolded to: its references and the branches of its combinations."""

TYPES = frozenset({"null", "integer", "number", "boolean", "object", "array", "string"})

Schema = Mapping[str, Any]

_HINTS = {
    "properties": "object",
    "required": "object",
    "additionalProperties": "object",
    "items": "array",
    "prefixItems": "array",
    "minLength": "string",
    "maxLength": "string",
    "pattern": "string",
    "format": "string",
    "minimum": "number",
    "maximum": "number",
}
"""Keywords that tell the type where ``type`` is missing."""


class Property(NamedTuple):
    name: str
    schema: Any
    required: bool


class ObjectShape(NamedTuple):
    """The properties of an object; ``extra``: the schema of further ones, None where there are
    none."""

    properties: tuple[Property, ...]
    extra: Any = None


class ArgumentSchema:
    """The schemas within ``root``, which is the schema of a tool's arguments."""

    def __init__(self, root: Schema) -> None:
        self.root = root

    def variants(self, schema: Any) -> list[Schema]:
        """Return schemas without references and alternatives; a value of ``schema`` fits one of
        them. Empty: any value."""
        found: list[Schema] = []
        pending = deque([schema])
        for _ in range(4 * MAX_VARIANTS):
            if not pending or len(found) == MAX_VARIANTS:
                break
            one = pending.popleft()
            if not isinstance(one, Mapping):
                continue
            inner = [] if value_types(one) else self._alternatives(one)
            if not inner:
                found.append(one)
            pending.extendleft(reversed(inner[:MAX_VARIANTS]))
        return found

    def types(self, schema: Any) -> frozenset[str]:
        """Return the types that a value may have; empty: the schema does not tell."""
        types: set[str] = set()
        for one in self.variants(schema):
            types |= self.variant_types(one)
        return frozenset(types)

    def variant_types(self, variant: Schema) -> frozenset[str]:
        """Return the types that one of ``variants`` allows; empty: it does not tell."""
        if types := value_types(variant):
            return types
        parts = (self.types(one) for one in _branches(variant, "allOf")[:MAX_VARIANTS])
        return next(filter(None, parts), frozenset())

    def shape(self, schema: Any) -> ObjectShape:
        """Return the properties of an object; those of alternatives are not required."""
        found: dict[str, Property] = {}
        extra: Any = None
        says_extra = False
        for one, certain in self._in_place(schema):
            properties = _mapping(one, "properties")
            required = one.get("required") if certain else None
            names = [name for name in required or () if isinstance(name, str)]
            for name in dict.fromkeys([*properties, *names]):
                known = found.get(name)
                inner = properties.get(name, known.schema if known else {})
                needed = name in names or (known is not None and known.required)
                found[name] = Property(name, inner, needed)
            further = one.get("additionalProperties", one.get("patternProperties"))
            says_extra = says_extra or further is not None
            if extra is None and further is not None and further is not False:
                extra = {} if further is True or "patternProperties" in one else further
        if not says_extra and not found:
            extra = {}
        return ObjectShape(tuple(found.values()), extra)

    def property_schema(self, schema: Any, name: str) -> Any:
        """Return the schema of one property; None: any value."""
        further: Any = None
        for one, _ in self._in_place(schema):
            properties = _mapping(one, "properties")
            if name in properties:
                return properties[name]
            further = further or one.get("additionalProperties")
        return further if isinstance(further, Mapping) else None

    def item_schema(self, schema: Any) -> Any:
        """Return the schema of an array's items; None: any value."""
        items = (one.get("items") for one, _ in self._in_place(schema))
        return next((one for one in items if isinstance(one, Mapping)), None)

    def definitions_for(self, schema: Any) -> dict[str, Any]:
        """Return the definitions that ``schema`` refers to, by the keyword that holds them."""
        found: dict[str, dict[str, Any]] = {}
        pending = list(_references(schema))
        seen: set[str] = set()
        while pending:
            reference = pending.pop()
            if reference in seen:
                continue
            seen.add(reference)
            keyword, _, name = reference.removeprefix("#/").partition("/")
            name = _unescape(name.partition("/")[0])
            held = self.root.get(keyword)
            if isinstance(held, Mapping) and name in held:
                found.setdefault(keyword, {})[name] = held[name]
                pending += _references(held[name])
        return dict(found)

    def resolve(self, reference: Any) -> Any:
        """Return the schema that ``$ref`` names; None where there is none."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        at: Any = self.root
        for part in filter(None, reference[1:].split("/")):
            name = _unescape(part)
            at = at.get(name) if isinstance(at, Mapping) else None
        return at

    def _alternatives(self, schema: Schema) -> list[Any]:
        """Return schemas of which a value of ``schema`` fits one; none where it stands alone."""
        if "$ref" in schema:
            return [self.resolve(schema["$ref"])]
        every = _branches(schema, "allOf")
        return [*_branches(schema, "anyOf"), *_branches(schema, "oneOf")] or (
            every if len(every) == 1 else []
        )

    def _in_place(self, schema: Any) -> Iterator[tuple[Schema, bool]]:
        """Yield the schemas that describe the value of ``schema``, and whether they all hold."""
        pending = deque([(schema, True)])
        for _ in range(4 * MAX_VARIANTS):
            if not pending:
                return
            one, certain = pending.popleft()
            if not isinstance(one, Mapping):
                continue
            yield one, certain
            if "$ref" in one:
                pending.append((self.resolve(one["$ref"]), certain))
            for keyword in ("allOf", "anyOf", "oneOf"):
                branches = _branches(one, keyword)[:MAX_VARIANTS]
                holds = certain and (keyword == "allOf" or len(branches) == 1)
                pending.extend((branch, holds) for branch in branches)


def value_types(schema: Schema) -> frozenset[str]:
    """Return the types that a schema without combinations allows; empty: it does not tell."""
    if has_values(schema):
        return frozenset(map(type_of, values_of(schema)))
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    types = frozenset(name for name in names if isinstance(name, str)) & TYPES
    if types or given is not None:
        return types
    hints = (name for keyword, name in _HINTS.items() if keyword in schema)
    return frozenset({next(hints)}) if schema.keys() & _HINTS.keys() else frozenset()


def has_values(schema: Schema) -> bool:
    """Return whether the schema lists its values."""
    return "const" in schema or bool(values_of(schema))


def values_of(schema: Schema) -> list[Any]:
    """Return the listed values."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else []


def type_of(value: Any) -> str:
    """Return the JSON type of a Python value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def _mapping(schema: Schema, keyword: str) -> Mapping[str, Any]:
    value = schema.get(keyword)
    return value if isinstance(value, Mapping) else {}


def _branches(schema: Schema, keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _references(schema: Any) -> Iterator[str]:
    pending = [schema]
    while pending:
        one = pending.pop()
        if isinstance(one, Mapping):
            if isinstance(one.get("$ref"), str):
                yield one["$ref"]
            pending += one.values()
        elif isinstance(one, list):
            pending += one


def _unescape(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")
