"""The tool parsers (router/openai/tool_calls) of all families.

However a text is cut into pieces, the content and the calls are the same. Syntaxes whose arguments
are JSON between marks are compared with a parser that reads the whole text; arguments that a parser
writes itself are JSON for every call but the last, which may be cut.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import regex  # type: ignore[import-untyped]

from router.openai.tool_calls.families.syntaxes import SYNTAXES
from router.openai.tool_calls.marked_calls import CALL_ID, MarkedCalls
from router.openai.tool_calls.tool_parser import (
    CallArgumentsDelta,
    CallStart,
    ContentDelta,
    ParsedDelta,
)
from router.openai.tool_calls.tool_syntax import ToolCallSyntax
from tests.fuzz.byte_reader import ByteReader, cut_text
from tests.fuzz.target import FuzzTarget

_SYNTAXES = list(SYNTAXES.values())
_SCHEMA: dict[str, Any] = {
    "properties": {
        "a": {"type": "string"},
        "n": {"type": "integer"},
        "s": {"type": ["string", "null"]},
        "b": {"type": "boolean"},
        "o": {"type": "object", "properties": {"o": {"$ref": "#"}, "l": {"type": "array"}}},
    }
}
_SCHEMAS = {"f": _SCHEMA, "g": {"additionalProperties": {"anyOf": [{"type": "number"}, {}]}}}


class ParsedText(NamedTuple):
    """Content and calls (name, arguments) of a whole text."""

    content: str
    calls: list[tuple[str, str]]


def fuzz_one(data: bytes) -> None:
    reader = ByteReader(data)
    syntax = _SYNTAXES[reader.number(len(_SYNTAXES))]
    forced = bool(reader.number(2))
    cuts = ByteReader(reader.piece(64))
    text = reader.rest().decode("utf-8", "replace")
    whole = _parsed(syntax, [text], forced)
    for parts in (cut_text(text, cuts), [*text[:500], text[500:]]):
        assert _parsed(syntax, parts, forced) == whole
    if isinstance(syntax, MarkedCalls):
        expected = parse_whole(syntax, text, forced)
        assert whole == expected, (whole, expected)
    else:
        for _, arguments in whole.calls[:-1]:
            assert isinstance(json.loads(arguments), dict)


def _parsed(syntax: ToolCallSyntax, pieces: list[str], forced: bool) -> ParsedText:
    parser = syntax.new_parser(_SCHEMAS, forced=forced)
    deltas: list[ParsedDelta] = []
    for piece in pieces:
        deltas += parser.push(piece)
    deltas += parser.flush()
    assert parser.called == any(isinstance(delta, CallStart) for delta in deltas)
    return _joined(deltas)


def _joined(deltas: list[ParsedDelta]) -> ParsedText:
    content: list[str] = []
    calls: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
        elif isinstance(delta, CallStart):
            assert delta.call == len(calls)
            calls.append([delta.name])
        else:
            assert isinstance(delta, CallArgumentsDelta) and delta.call == len(calls) - 1
            calls[-1].append(delta.text)
    return ParsedText("".join(content), [(name, "".join(rest)) for name, *rest in calls])


_SPACE = r"\s{0,8}"
_NAME = "([a-zA-Z0-9_.-]{1,128})"


def _mark(text: str) -> str:
    """A pattern for a mark, with up to eight spaces before each of its words and signs."""
    return "".join(_SPACE + re.escape(t) for t in re.findall(r"\w+|[^\w\s]", text))


def _heads(syntax: MarkedCalls) -> str:
    """A pattern for what stands before a call's arguments; group 1 or later has the name."""
    heads = []
    for opening, middle in ((syntax.open, syntax.middle), *syntax.heads):
        between = (_SPACE + "[a-zA-Z0-9]{1,9}").join(map(_mark, middle.split(CALL_ID)))
        heads.append(_mark(opening) + _SPACE + _NAME + between)
    return f"(?:{'|'.join(heads)}){_SPACE}" + r"(?=\{)"


def parse_whole(syntax: MarkedCalls, text: str, forced: bool) -> ParsedText:
    """Parse a whole text with regular expressions, from its first character to its last one."""
    head = _heads(syntax)
    close, begin, between = map(_mark, (syntax.close, syntax.begin, syntax.between))
    again = f"(?:{between}|{begin})" if syntax.trigger else between
    first = re.compile(begin + head)
    following = re.compile(close + again + head)
    end = re.compile(close + _mark(syntax.end))
    close_alone = re.compile(close)
    content, calls, at = _Content(), [], 0
    searched = 0  # no call begins before
    cut = False
    while (start := text.find(syntax.trigger, searched)) >= 0:
        match = first.match(text, start)
        if match is None:
            cut = (bool(syntax.trigger) or forced) and _is_cut(first, text[start:])
            if cut:
                content.add(text[at:start])
            if cut or not syntax.trigger:
                break
            searched = start + len(syntax.trigger)
            continue
        content.add(text[at:start])
        content.drop_blank()
        while match is not None:
            at, complete = _end_of_object(text, match.end())
            calls.append((next(filter(None, match.groups())), text[match.end() : at]))
            match = following.match(text, at) if complete else None
        cut = complete and (_is_cut(following, text[at:]) or _is_cut(end, text[at:]))
        if cut:
            break
        if complete and (closed := end.match(text, at) or close_alone.match(text, at)):
            at = closed.end()
        searched = at
        if not syntax.trigger:
            break
    if not cut:
        rest = text[at:]
        if forced and syntax.trigger:
            rest = rest[: len(rest) - _partial_trigger(syntax.trigger, rest)]
        content.add(rest)
    return ParsedText(content.text(called=bool(calls)), calls)


def _is_cut(pattern: re.Pattern[str], text: str) -> bool:
    """Return whether ``text`` is a proper prefix of what the pattern matches.

    Every mark is spelled by one of these continuations if it is cut anywhere; a head is short.
    """
    if len(text) > 600 or pattern.match(text):
        return False
    return regex.fullmatch(pattern.pattern, text, partial=True) is not None  # re cannot do that


def _partial_trigger(trigger: str, text: str) -> int:
    return max(
        (size for size in range(1, len(trigger)) if text.endswith(trigger[:size])), default=0
    )


class _Content:
    """Content so far. White space before the first other content is dropped when a call follows,
    and where no other content follows the calls."""

    def __init__(self) -> None:
        self._text = self._blank = ""

    def add(self, text: str) -> None:
        if self._text or (self._blank + text).strip():
            self._text, self._blank = self._text + self._blank + text, ""
        else:
            self._blank += text

    def drop_blank(self) -> None:
        self._blank = ""

    def text(self, *, called: bool) -> str:
        return self._text + ("" if called else self._blank)


_BRACKETS = re.compile(r'"(?:\\.|[^"\\]|\\\Z)*+(?:"|\Z)|[\[{]|[\]}]', re.DOTALL)
"""A string, or a bracket outside of strings."""


def _end_of_object(text: str, at: int) -> tuple[int, bool]:
    """Return where the object that begins at ``at`` ends, and whether it does."""
    depth = 0
    for found in _BRACKETS.finditer(text, at):
        depth += (found[0] in "[{") - (found[0] in "]}") if len(found[0]) == 1 else 0
        if not depth and found[0] in "]}":
            return found.end(), True
    return len(text), False


TARGET = FuzzTarget("tool_calls", fuzz_one)
