"""``XmlCallParser``: parses calls written in tags, and writes their arguments as JSON.

    FREE --<tool_call>, <function=NAME>--> PARAMETERS --</function>--> AFTER --> next call or FREE
                                            |      ^
                              <parameter=KEY>      end of the value
                                            v      |
                                             VALUE-'

Strings go out as they come; values of other types go out whole, cast by the tool's schema. A model
may leave out closing tags or the ``<tool_call>`` around a function. A tag inside a value ends it
only where what follows continues the call, so that values may hold such tags themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from router.openai.tool_calls.argument_cast import cast_text, json_string_piece
from router.openai.tool_calls.argument_schema import ArgumentSchema
from router.openai.tool_calls.tool_parser import (
    NAME,
    SPACE,
    CallParser,
    PartialPattern,
    State,
    partial_pattern,
    spelled,
)

MAX_KEY = 256
"""Characters in the name of a parameter."""

_KEY = f"([^>\n]{{1,{MAX_KEY}}})"
_CALL, _END_CALL = spelled("<tool_call>"), spelled("</tool_call>")
_FUNCTION, _END_FUNCTION = spelled("<function="), spelled("</function>")
_PARAMETER, _END_PARAMETER = spelled("<parameter="), spelled("</parameter>")

_HEAD = partial_pattern(
    [*_CALL, SPACE, *_FUNCTION, NAME, SPACE, ">"], [*_FUNCTION, NAME, SPACE, ">"]
)
_BEGIN_VALUE = partial_pattern([SPACE, *_PARAMETER, _KEY, ">"])
_END_ARGUMENTS = partial_pattern([SPACE, *_END_FUNCTION])
_NO_END_ARGUMENTS = partial_pattern(
    *([SPACE, rf"(?={''.join(mark)})"] for mark in (_END_CALL, _CALL, _FUNCTION))
)
_NEXT_MARK = partial_pattern(*([SPACE, *mark] for mark in (_END_CALL, _CALL, _FUNCTION)))
_AFTER_CALL = partial_pattern([SPACE, *_END_CALL])
_NEXT_CALL = partial_pattern([SPACE, *_CALL, SPACE, *_FUNCTION], [SPACE, *_FUNCTION])
_NULLS = ("null", "None")
_MAX_NULL = 16  # characters of a null with white space around it


class _ValueEnd(NamedTuple):
    """One way in which a value ends: ``mark``, if ``whole`` matches, too. ``taken``: whether the
    mark is a part of the end."""

    mark: PartialPattern
    whole: PartialPattern
    taken: bool = False


def _value_end(mark: list[str], *following: list[str], taken: bool = False) -> _ValueEnd:
    variants = ([*newline, *mark, SPACE, *one] for one in following for newline in (["\n"], []))
    return _ValueEnd(partial_pattern(["\n?", *mark]), partial_pattern(*variants), taken)


_VALUE_ENDS = (
    _value_end(_END_PARAMETER, _PARAMETER, _END_FUNCTION, _END_CALL, _CALL, _FUNCTION, taken=True),
    _value_end(_END_FUNCTION, _END_CALL, _CALL, _FUNCTION),
    _value_end(_END_CALL, _CALL),
)
_NEXT_PARAMETER = partial_pattern(["\n", *_PARAMETER, _KEY, ">"])
_CANDIDATE = re.compile(r"\n?<|\n\Z")


class XmlCallParser(CallParser):
    """The parser of one choice; ``schemas``: of the arguments of each tool."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], *, forced: bool = False) -> None:
        super().__init__(["<tool_call>", "<function="], forced=forced)
        self._schemas = schemas
        self._schema = ArgumentSchema({})
        self._keys: set[str] = set()  # of the current call
        self._declared: set[str] | None = None  # keys of its schema; None: not yet looked at
        self._value = _Value(None, "")

    # ---- states ---------------------------------------------------------------------------------

    def _call_head(self, otherwise: State) -> bool:
        found = _HEAD.full.match(self._text, self._at)
        if found:
            # Without a wrapper, it is a call only if there is such a tool.
            name = found[1] or found[2]
            if found[1] or name in self._schemas:
                return self._begin(found.end(), name)
        elif _HEAD.partial.match(self._text, self._at):
            return self._wait()
        return otherwise()

    def _begin(self, end: int, name: str) -> bool:
        self._begin_call(end, name)
        self._schema = ArgumentSchema(self._schemas.get(name, {}))
        self._keys, self._declared = set(), None
        self._arguments_text("{")
        self._state = self._parameters
        return True

    def _parameters(self) -> bool:
        text, at = self._text, self._at
        if found := _BEGIN_VALUE.full.match(text, at):
            self._begin_value(found[1].strip())
            self._at = found.end()
            self._state = self._first_newline
        elif found := _END_ARGUMENTS.full.match(text, at) or _NO_END_ARGUMENTS.full.match(text, at):
            self._at = found.end()
            self._arguments_text("}")
            self.has_open_call = False
            self._state = self._after
        elif any(p.partial.match(text, at) for p in (_BEGIN_VALUE, _END_ARGUMENTS, _NEXT_MARK)):
            return self._wait()
        else:  # text where none belongs
            after = text.find("<", at + 1)
            self._at = after if after >= 0 else len(text)
        return True

    def _begin_value(self, key: str) -> None:
        repeated = key in self._keys
        schema = self._schema.property_schema(self._schema.root, key)
        name = json.dumps(key, ensure_ascii=False)
        before = f"{', ' if self._keys else ''}{name}: "
        self._value = _Value(None if repeated else self._schema.types(schema), before)
        self._keys.add(key)

    def _first_newline(self) -> bool:
        if self._text[self._at] == "\n":
            self._at += 1
        self._state = self._read_value
        return True

    def _read_value(self) -> bool:
        for candidate in _CANDIDATE.finditer(self._text, self._at):
            end = self._end_of_value(candidate.start())
            if end is None:
                continue
            self._arguments_text(self._value.add(self._text[self._at : candidate.start()]))
            self._at = candidate.start()
            if end < 0:
                return self._wait()
            self._at = end
            self._arguments_text(self._value.end())
            self._state = self._parameters
            return True
        self._arguments_text(self._value.add(self._text[self._at :]))
        self._at = len(self._text)
        return False

    def _end_of_value(self, at: int) -> int | None:
        """Return where the text continues if the value ends at ``at``; None if it does not; -1 if
        that depends on text to come."""
        text = self._text
        for one in _VALUE_ENDS:
            mark = one.mark.full.match(text, at)
            may_end = one.whole.partial.match(text, at) is not None
            if mark and (one.whole.full.match(text, at) or (self._ended and may_end)):
                return mark.end() if one.taken else at
            if may_end:
                return -1
        if found := _NEXT_PARAMETER.full.match(text, at):
            return at if self._is_next_key(found[1].strip()) else None
        return -1 if _NEXT_PARAMETER.partial.match(text, at) else None

    def _is_next_key(self, key: str) -> bool:
        if self._declared is None:
            shape = self._schema.shape(self._schema.root)
            self._declared = {one.name for one in shape.properties}
        return key in self._declared and key not in self._keys

    def _after(self) -> bool:
        """Skip closing tags, and begin a call that follows."""
        text, at = self._text, self._at
        if found := _AFTER_CALL.full.match(text, at):
            self._at = found.end()
            return True
        if found := _NEXT_CALL.full.match(text, at):
            self._at = at + len(found[0]) - len(found[0].lstrip())
            self._state = self._after_trigger
            return True
        if _AFTER_CALL.partial.match(text, at) or _NEXT_CALL.partial.match(text, at):
            return self._wait()
        self._state = self._free
        return True

    # ---- arguments ------------------------------------------------------------------------------

    def _end(self) -> None:
        """Close the arguments of a call whose last value is complete. A value that was cut stays
        open, so that no client takes it for whole."""
        if self.has_open_call and self._state == self._parameters:
            self._arguments_text("}")


class _Value:
    """One value, written as JSON. ``types``: what its schema allows, empty for text; None for a
    value that is not sent, because its parameter was given before."""

    def __init__(self, types: frozenset[str] | None, before: str) -> None:
        self._types = types
        self._before = before  # JSON before the value
        self._pieces: list[str] = []  # of a value that goes out whole
        self._size = 0
        self._is_text = types is not None and not types  # and of one that goes out as it comes
        self._has_begun = False

    def add(self, text: str) -> str:
        """Return JSON for a further piece of the text."""
        if self._types is None or not text:
            return ""
        if self._is_text:
            return self._begin() + json_string_piece(text)
        self._pieces.append(text)
        self._size += len(text)
        if not self._types <= {"string", "null"} or self._may_be_null():
            return ""
        self._is_text = True
        whole, self._pieces = "".join(self._pieces), []
        return self._begin() + json_string_piece(whole)

    def end(self) -> str:
        """Return the rest of the JSON."""
        if self._types is None:
            return ""
        if self._is_text:
            return self._begin() + '"'
        types = self._types
        return self._before + cast_text("".join(self._pieces), types)

    def _may_be_null(self) -> bool:
        if self._types is None or "null" not in self._types or self._size > _MAX_NULL:
            return False
        so_far = "".join(self._pieces).strip()
        return any(one.startswith(so_far) for one in _NULLS)

    def _begin(self) -> str:
        if self._has_begun:
            return ""
        self._has_begun = True
        return self._before + '"'
