"""``GemmaCallParser``: parses calls in Gemma 4's notation, and writes their arguments as JSON.

    FREE --<|tool_call>call:NAME{--> KEY --":"--> VALUE --> STRING or BARE --> KEY ... "}"--> AFTER

Strings go out as they come; numbers and words go out whole, cast by the tool's schema. The result
is JSON for every text that ends its outer braces, because what does not belong is skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from router.openai.tool_calls.argument_cast import cast_text, json_string_piece
from router.openai.tool_calls.argument_schema import TYPES, ArgumentSchema
from router.openai.tool_calls.tool_parser import (
    NAME,
    SPACE,
    CallParser,
    State,
    partial_pattern,
    spelled,
    trigger_prefix_length,
)

CALL, END_CALL, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MAX_KEY = 256
"""Characters in a key."""
MAX_DEPTH = 64
"""Objects and arrays in one another."""

_HEAD = partial_pattern(
    [*spelled(CALL), SPACE, *spelled("call:"), NAME, SPACE, r"\{"],
    [*spelled(CALL), SPACE, ":", NAME, SPACE, r"\{"],  # some checkpoints leave out the word
)
_KEY = partial_pattern(
    [f"([^:,{{}}\\[\\]<]{{1,{MAX_KEY}}})", ":"],
    [*spelled(QUOTE), f"([^<]{{0,{MAX_KEY}}})", *spelled(QUOTE), SPACE, ":"],
)
_NO_KEY = re.compile(f"[^:,{{}}\\[\\]<]{{1,{MAX_KEY}}}")
_QUOTE = partial_pattern(spelled(QUOTE))
_END = partial_pattern([SPACE, *spelled(END_CALL)])
_SEPARATORS = re.compile(r"[\s,]*")
_BARE_END = re.compile(r"[,{}\[\]<]")
_CLOSING = {"}": "{", "]": "["}


class _Container:
    """An object or an array that is being written. ``schema``: of its value, None for any."""

    def __init__(self, opening: str, schema: Any, *, muted: bool) -> None:
        self.opening = opening
        self.schema = schema
        self.muted = muted  # not sent: the value of a repeated key
        self.keys: set[str] = set()
        self.count = 0
        self.key_schema: Any = None  # of the value that the last key announces
        self.awaits_key = opening == "{"
        self.mutes_value = muted


class GemmaCallParser(CallParser):
    """The parser of one choice; ``schemas``: of the arguments of each tool."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], *, forced: bool = False) -> None:
        super().__init__([CALL], forced=forced)
        self._schemas = schemas
        self._schema = ArgumentSchema({})
        self._stack: list[_Container] = []
        self._types: frozenset[str] = frozenset()  # of the value that is being read
        self._pieces: list[str] = []  # of a value that goes out whole

    # ---- states ---------------------------------------------------------------------------------

    def _call_head(self, otherwise: State) -> bool:
        found = _HEAD.full.match(self._text, self._at)
        if not found:
            if _HEAD.partial.match(self._text, self._at):
                return self._wait()
            return otherwise()
        name = found[1] or found[2]
        self._begin_call(found.end(), name)
        self._schema = ArgumentSchema(self._schemas.get(name, {}))
        self._stack = []
        self._open("{", self._schema.root)
        return True

    def _structure(self) -> bool:
        """Between values: expect a key, a value, or the end of a container."""
        found = _SEPARATORS.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        top = self._stack[-1]
        if "," in found[0] and top.opening == "{" and not top.awaits_key:
            self._send("null")  # a key without a value
            top.awaits_key = True
        if self._at == len(self._text):
            return False
        text, at = self._text, self._at
        if _END.full.match(text, at):
            while self._stack:
                self._close()
        elif _END.partial.match(text, at) and not _QUOTE.partial.match(text, at):
            return self._wait()
        elif text[at] in _CLOSING:
            self._at += 1
            if _CLOSING[text[at]] == top.opening:
                self._close()
        elif top.awaits_key:
            return self._key(top)
        else:
            return self._begin_value(top)
        return True

    def _key(self, top: _Container) -> bool:
        found = _KEY.full.match(self._text, self._at)
        if not found:
            if _KEY.partial.match(self._text, self._at):
                return self._wait()
            run = _NO_KEY.match(self._text, self._at)
            self._at += max(1, len(run[0]) if run else 0)  # what does not belong
            return True
        self._at = found.end()
        key = (found[1] or found[2] or "").strip()
        top.mutes_value = top.muted or key in top.keys
        if not top.mutes_value:
            top.keys.add(key)
            separator = ", " if len(top.keys) > 1 else ""
            self._arguments_text(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        top.key_schema = self._schema.property_schema(top.schema, key)
        top.awaits_key = False
        return True

    def _begin_value(self, top: _Container) -> bool:
        text, at = self._text, self._at
        schema = top.key_schema if top.opening == "{" else self._schema.item_schema(top.schema)
        quoted = _QUOTE.full.match(text, at)
        if not quoted and _QUOTE.partial.match(text, at):
            return self._wait()
        too_deep = text[at] in "{[" and len(self._stack) == MAX_DEPTH
        if not quoted and (too_deep or text[at] == "<"):
            self._at += 1  # what does not belong
            return True
        if top.opening == "[":
            self._send(", " if top.count else "")
        top.count += 1
        if text[at] in "{[":
            self._at += 1
            self._open(text[at], schema)
            return True
        self._types = self._schema.types(schema)
        self._pieces = []
        if not quoted:
            self._state = self._bare
            return True
        self._at = quoted.end()
        self._state = self._typed_string
        if not self._types or "string" in self._types:
            self._send('"')
            self._state = self._string
        return True

    def _string(self) -> bool:
        piece, ended = self._quoted_piece()
        self._send(json_string_piece(piece))
        if ended:
            self._send('"')
            self._value_ended()
        return ended

    def _typed_string(self) -> bool:
        """Read a quoted value of which the schema says that it is no string."""
        piece, ended = self._quoted_piece()
        self._pieces.append(piece)
        if ended:
            self._send(cast_text("".join(self._pieces), self._types))
            self._value_ended()
        return ended

    def _quoted_piece(self) -> tuple[str, bool]:
        """Return the text up to the closing quote, and whether it stands there."""
        start = self._at
        end = self._text.find(QUOTE, start)
        if end >= 0:
            self._at = end + len(QUOTE)
            return self._text[start:end], True
        self._at = len(self._text) - trigger_prefix_length(self._text, start, [QUOTE])
        return self._text[start : self._at], False

    def _bare(self) -> bool:
        found = _BARE_END.search(self._text, self._at)
        end = found.start() if found else len(self._text)
        self._pieces.append(self._text[self._at : end])
        self._at = end
        if found:
            self._end_bare()
        return found is not None

    def _end_bare(self) -> None:
        text = "".join(self._pieces).strip()
        self._send(cast_text(text, self._types or TYPES))
        self._value_ended()

    def _after(self) -> bool:
        found = _END.full.match(self._text, self._at)
        if not found and _END.partial.match(self._text, self._at):
            return self._wait()
        if found:
            self._at = found.end()
        self._state = self._free
        return True

    # ---- containers -----------------------------------------------------------------------------

    def _open(self, opening: str, schema: Any) -> None:
        muted = self._stack[-1].mutes_value if self._stack else False
        self._stack.append(_Container(opening, schema, muted=muted))
        self._send(opening)
        self._state = self._structure

    def _close(self) -> None:
        top = self._stack[-1]
        if top.opening == "{" and not top.awaits_key:
            self._send("null")  # a key without a value
        if not top.muted:
            self._arguments_text("}" if top.opening == "{" else "]")
        self._stack.pop()
        if self._stack:
            self._value_ended()
        else:
            self.has_open_call = False
            self._state = self._after

    def _value_ended(self) -> None:
        top = self._stack[-1]
        top.awaits_key = top.opening == "{"
        self._state = self._structure

    def _send(self, text: str) -> None:
        """Send JSON for a value of the innermost container."""
        if not (self._stack and self._stack[-1].mutes_value):
            self._arguments_text(text)
