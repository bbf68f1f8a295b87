"""Random JSON schemas with short instances: strings and arrays have bounds and no type recurs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

DEPTH = 3
PATTERNS = (
    "^[a-z]{2,6}@[a-z]{1,5}\\.(com|org)$",
    "^[A-Z]{3}-[0-9]{1,4}$",
    "^(\\+[0-9]{2} )?[0-9]{3,6}$",
    '^[^"\\\\]{0,5}!$',
    "^(red|green|blue)( and (red|green))?$",
)
NAMES = (
    "name",
    "id",
    "größe",
    "two words",
    'quo"ted',
    "日本",
    "a/b",
    "x_1",
    "$id",
    "tab\tbed",
    "n",
)
VALUES: tuple[Any, ...] = (
    0,
    -7,
    3.5,
    "",
    "yes",
    "no\n",
    "ünï",
    'a "b"',
    True,
    False,
    None,
    [1, 2],
    {"k": "v"},
    [],
)
FORMATS = ("date", "ipv4", "uuid")  # times may have decimals without end


class SchemaGenerator:
    """Draws schemas from one random source; ``defs`` holds the definitions that they refer to."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.defs: dict[str, Schema] = {}

    def any(self, depth: int) -> Schema:
        deep: list[Callable[[int], Schema]] = [self.object, self.array, self.any_of, self.ref]
        flat: list[Callable[[int], Schema]] = [
            *(self.string, self.pattern, self.integer, self.number, self.enum, self.const),
            *(self.formatted, self.nullable, self.trivial),
        ]
        kinds = flat + 2 * deep if depth else flat
        return self._draw.choice(kinds)(depth - 1)

    def object(self, depth: int) -> Schema:
        names = self._draw.sample(NAMES, self._draw.randint(1, 4))
        drawn: Schema = {
            "type": "object",
            "properties": {name: self.any(max(depth, 0)) for name in names},
            "required": [name for name in names if self._draw.random() < 0.7],
            "additionalProperties": False,
        }
        if self._draw.random() < 0.2:
            drawn["description"] = "something"
        return drawn

    def array(self, depth: int) -> Schema:
        least = self._draw.randint(0, 2)
        drawn: Schema = {"type": "array", "minItems": least}
        if self._draw.random() < 0.3:
            drawn["prefixItems"] = [
                self.any(max(depth, 0)) for _ in range(self._draw.randint(1, 2))
            ]
        drawn["items"] = self.any(max(depth, 0))
        drawn["maxItems"] = max(least, 1) + self._draw.randint(0, 2)
        return drawn

    def any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.any(max(depth, 0)) for _ in range(self._draw.randint(2, 3))]}

    def ref(self, depth: int) -> Schema:
        """Draw a reference to a new definition or to an earlier one."""
        if not self.defs or self._draw.random() < 0.6:
            drawn = self.any(max(depth, 0))
            self.defs[f"d{len(self.defs)}"] = drawn
        return {"$ref": f"#/$defs/{self._draw.choice(list(self.defs))}"}

    def string(self, _: int) -> Schema:
        least = self._draw.randint(0, 5)
        return {"type": "string", "minLength": least, "maxLength": least + self._draw.randint(0, 9)}

    def pattern(self, _: int) -> Schema:
        return {"type": "string", "pattern": self._draw.choice(PATTERNS)}

    def formatted(self, _: int) -> Schema:
        return {"type": "string", "format": self._draw.choice(FORMATS)}

    def integer(self, _: int) -> Schema:
        low = self._draw.randint(-2000, 2000)
        drawn = {"type": "integer", "minimum": low, "maximum": low + self._draw.randint(2, 5000)}
        if self._draw.random() < 0.3:
            drawn["exclusiveMaximum"] = drawn.pop("maximum")
        return drawn

    def number(self, _: int) -> Schema:
        """Draw a number with ``multipleOf``, without which it may have endless decimals."""
        low = self._draw.randint(-200, 200) / 4
        high = low + self._draw.randint(1, 99)
        step = self._draw.choice([0.25, 0.5])
        return {"type": "number", "minimum": low, "maximum": high, "multipleOf": step}

    def enum(self, _: int) -> Schema:
        return {"enum": self._draw.sample(VALUES, self._draw.randint(2, 5))}

    def const(self, _: int) -> Schema:
        return {"const": self._draw.choice(VALUES)}

    def nullable(self, _: int) -> Schema:
        return {"type": ["string", "null"], "maxLength": self._draw.randint(1, 9)}

    def trivial(self, _: int) -> Schema:
        return {"type": self._draw.choice(["boolean", "null"])}


def random_schema(seed: int) -> Schema:
    """Draw the schema with this seed; most are schemas of objects."""
    draw = random.Random(seed)
    drawn = SchemaGenerator(draw)
    root = drawn.object(DEPTH) if draw.random() < 0.8 else drawn.any(DEPTH)
    return {**root, "$defs": drawn.defs} if drawn.defs else root
