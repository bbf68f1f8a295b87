"""The tool parser (router/openai/chat/tool_parser.py) against one that reads the whole text.

However a text is cut into pieces, the content and the calls are the same, and no character that is
not part of a mark is lost.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from router.openai.tool_calls.tool_parser import (
    CallArgumentsDelta,
    CallStart,
    ContentDelta,
    ParsedDelta,
    ToolParser,
)
from router.openai.tool_calls.tool_syntax import SYNTAXES, ToolCallSyntax
from tests.fuzz.byte_reader import ByteReader, cut_text
from tests.fuzz.target import FuzzTarget

_SYNTAXES = list(SYNTAXES.values())


class ParsedText(NamedTuple):
    """Content and calls (name, arguments) of a whole text."""

    content: str
    calls: list[tuple[str, str]]


def fuzz_one(data: bytes) -> None:
    reader = ByteReader(data)
    syntax = _SYNTAXES[reader.number(len(_SYNTAXES))]
    cuts = ByteReader(reader.piece(64))
    text = reader.rest().decode("utf-8", "replace")
    pieces = cut_text(text, cuts)
    expected = parse_whole(syntax, text)
    for parts in (pieces, [text], [*text[:500], text[500:]]):
        assert _parsed(syntax, parts) == expected


def _parsed(syntax: ToolCallSyntax, pieces: list[str]) -> ParsedText:
    parser = ToolParser(syntax)
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


def _mark(text: str) -> str:
    """A pattern for a mark, with up to eight spaces before each of its words and signs."""
    return "".join(r"\s{0,8}" + re.escape(t) for t in re.findall(r"\w+|[^\w\s]", text))


def parse_whole(syntax: ToolCallSyntax, text: str) -> ParsedText:
    """Parse a whole text with regular expressions, from its first character to its last one."""
    name = _mark(syntax.open) + r"([a-zA-Z0-9_-]{1,64})" + _mark(syntax.middle) + r"\s{0,8}(?=\{)"
    first = re.compile(_mark(syntax.begin) + name)
    following = re.compile(_mark(syntax.close) + _mark(syntax.between) + name)
    end = re.compile(_mark(syntax.close) + _mark(syntax.end))
    content, calls, at = _Content(), [], 0
    searched = 0  # no call begins before
    while (start := text.find(syntax.trigger, searched)) >= 0:
        match = first.match(text, start)
        if match is None and not syntax.trigger:
            break
        searched = start + len(syntax.trigger)
        if match is None:
            continue
        content.add(text[at:start])
        content.drop_blank()
        while match is not None:
            at, complete = _end_of_object(text, match.end())
            calls.append((match[1], text[match.end() : at]))
            match = following.match(text, at) if complete else None
        if complete and (closed := end.match(text, at)):
            at = closed.end()
        searched = at
        if not syntax.trigger:
            break
    content.add(text[at:])
    return ParsedText(content.text(called=bool(calls)), calls)


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
