"""``PythonicCallParser``: parses calls written as Python, and writes their arguments as JSON.

    HEAD --[name(--> KEY --key=--> VALUE --> STRING, BARE or a container --> KEY ... ")"--> AFTER

The whole answer is calls, or none is. Strings go out as they come, words and numbers go out whole.
Values may be Python or JSON: ``True`` and ``true`` are both true. What does not belong is skipped.
"""

from __future__ import annotations

import json
import re

from router.openai.tool_calls.argument_cast import cast_text, json_string_piece
from router.openai.tool_calls.tool_parser import (
    NAME,
    SPACE,
    CallParser,
    PartialPattern,
    State,
    partial_pattern,
    spelled,
)

PYTHON_TAG = "<|python_tag|>"
MAX_KEY = 256
"""Characters in the name of an argument."""
MAX_DEPTH = 64
"""Containers in one another."""

_CALL = [SPACE, NAME, SPACE, r"\("]
_HEAD = partial_pattern([SPACE, r"\[", *_CALL], [SPACE, *spelled(PYTHON_TAG), SPACE, r"\[", *_CALL])
_NEXT = partial_pattern([SPACE, ",", *_CALL])
_END = partial_pattern([SPACE, r"\]"])
_KEY = partial_pattern([f"([a-zA-Z_][a-zA-Z0-9_.-]{{0,{MAX_KEY - 1}}})", SPACE, "="])
_SEPARATORS = re.compile(r"[\s,]*")
_BARE_END = re.compile(r"[,:(){}\[\]\n]")
_PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "\"'"}
_CLOSING = {")": "(", "]": "[", "}": "{"}
_BARE_TYPES = ("null", "number", "boolean")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_ESCAPES |= {"0": "\0", "\\": "\\", '"': '"', "'": "'", "/": "/"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile("[0-9a-fA-F]*")


class _Container:
    """The arguments, a dictionary, or a list or tuple that is being written."""

    def __init__(self, opening: str, *, named: bool = False) -> None:
        self.opening = opening
        self.named = named  # the arguments of the call: keys are words before "="
        self.is_object = named or opening == "{"
        self.awaits_key = self.is_object
        self.count = 0  # values or keys so far

    @property
    def lacks_value(self) -> bool:
        """Return whether a key has come whose value has not."""
        return self.is_object and not self.awaits_key


class PythonicCallParser(CallParser):
    """The parser of one choice."""

    def __init__(self, *, forced: bool = False) -> None:
        super().__init__([], forced=forced)
        self._stack: list[_Container] = []
        self._quote = ""
        self._is_key = False  # the string or word that is being read is a key
        self._pieces: list[str] = []  # of a word that goes out whole

    # ---- states ---------------------------------------------------------------------------------

    def _call_head(self, otherwise: State) -> bool:
        return self._begin(_HEAD, otherwise)

    def _begin(self, head: PartialPattern, otherwise: State) -> bool:
        found = head.full.match(self._text, self._at)
        if found:
            name = next(filter(None, found.groups()))
            self._begin_call(found.end(), name)
            self._stack = []
            self._open("(", named=True)
            return True
        may_follow = head.partial.match(self._text, self._at)
        if may_follow and (not self._ended or self._forced or self.called):
            return self._wait()
        return otherwise()

    def _structure(self) -> bool:
        """Between values: expect a key, a value, or the end of a container."""
        found = _SEPARATORS.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        top = self._stack[-1]
        if top.lacks_value and "," in found[0]:
            self._arguments_text("null")
            top.awaits_key = True
        if self._at == len(self._text):
            return False
        character = self._text[self._at]
        if character in _CLOSING:
            self._at += 1
            if _CLOSING[character] == top.opening:
                self._close()
            return True
        if top.awaits_key and top.named:
            return self._named_key()
        return self._begin_value(top, character)

    def _named_key(self) -> bool:
        found = _KEY.full.match(self._text, self._at)
        if not found:
            if _KEY.partial.match(self._text, self._at):
                return self._wait()
            self._at += 1  # what does not belong
            return True
        self._at = found.end()
        self._key_ended(json.dumps(found[1]))
        return True

    def _begin_value(self, top: _Container, character: str) -> bool:
        self._is_key = top.awaits_key
        if not top.awaits_key and not top.is_object and top.count:
            self._arguments_text(", ")
        if character in _PLAIN:
            self._at += 1
            self._quote = character
            separator = ", " if self._is_key and top.count else ""
            self._arguments_text(f'{separator}"')
            self._state = self._string
        elif character in "([{" and not self._is_key and len(self._stack) < MAX_DEPTH:
            self._at += 1
            self._open(character)
        else:
            self._pieces = []
            self._state = self._bare
            if _BARE_END.match(self._text, self._at):
                self._at += 1  # what does not belong
        return True

    def _string(self) -> bool:
        found = _PLAIN[self._quote].match(self._text, self._at)
        assert found is not None
        self._arguments_text(json_string_piece(found[0]))
        self._at = found.end()
        if self._at == len(self._text):
            return False
        if self._text[self._at] == "\\":
            return self._escape()
        self._at += 1
        self._arguments_text('"')
        if self._is_key:
            self._stack[-1].count += 1
            self._state = self._colon
        else:
            self._value_ended()
        return True

    def _escape(self) -> bool:
        """Write one escape sequence, which begins at ``_at``."""
        text, start = self._text, self._at + 2
        if len(text) < start:
            return self._wait()
        kind = text[start - 1]
        digits = _HEX_DIGITS.get(kind, 0)
        found = _HEX.match(text, start, start + digits)
        given = found[0] if found else ""
        if len(given) < digits and start + len(given) == len(text) and not self._ended:
            return self._wait()
        self._at = start
        if not digits or len(given) < digits:
            self._arguments_text(json_string_piece(_ESCAPES.get(kind, f"\\{kind}")))
            return True
        self._at += digits
        code = int(given, 16)
        if digits < 8:
            self._arguments_text(f"\\u{code:04x}")  # may be one half of a pair
        else:
            is_character = code < 0x110000 and not 0xD800 <= code < 0xE000
            self._arguments_text(json_string_piece(chr(code) if is_character else "\ufffd"))
        return True

    def _colon(self) -> bool:
        """After a key of a dictionary."""
        self._at += len(self._text[self._at :]) - len(self._text[self._at :].lstrip())
        if self._at == len(self._text):
            return False
        if self._text[self._at] == ":":
            self._at += 1
        self._arguments_text(": ")
        self._stack[-1].awaits_key = False
        self._state = self._structure
        return True

    def _bare(self) -> bool:
        found = _BARE_END.search(self._text, self._at)
        end = found.start() if found else len(self._text)
        self._pieces.append(self._text[self._at : end])
        self._at = end
        if not found:
            return False
        word = "".join(self._pieces).strip()
        if self._is_key:
            top = self._stack[-1]
            separator = ", " if top.count else ""
            self._arguments_text(separator + json.dumps(word, ensure_ascii=False))
            top.count += 1
            self._state = self._colon
        else:
            self._arguments_text(cast_text(word, _BARE_TYPES))
            self._value_ended()
        return True

    def _after(self) -> bool:
        return self._begin(_NEXT, otherwise=self._close_calls)

    def _close_calls(self) -> bool:
        found = _END.full.match(self._text, self._at)
        if not found and _END.partial.match(self._text, self._at):
            return self._wait()
        if found:
            self._at = found.end()
        self._state = self._free
        return True

    # ---- containers -----------------------------------------------------------------------------

    def _open(self, opening: str, *, named: bool = False) -> None:
        self._stack.append(_Container(opening, named=named))
        self._arguments_text("{" if self._stack[-1].is_object else "[")
        self._state = self._structure

    def _close(self) -> None:
        top = self._stack.pop()
        if top.lacks_value:
            self._arguments_text("null")
        self._arguments_text("}" if top.is_object else "]")
        if self._stack:
            self._value_ended()
        else:
            self.has_open_call = False
            self._state = self._after

    def _key_ended(self, key: str) -> None:
        top = self._stack[-1]
        self._arguments_text(f"{', ' if top.count else ''}{key}: ")
        top.count += 1
        top.awaits_key = False

    def _value_ended(self) -> None:
        top = self._stack[-1]
        if top.is_object:
            top.awaits_key = True
        else:
            top.count += 1
        self._state = self._structure
