"""``MarkedCalls``: syntaxes that write each call's arguments as JSON between fixed marks.

begin OPEN name MIDDLE {arguments} CLOSE  between OPEN ... CLOSE  end

The arguments reach the client as the model writes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from router.openai.tool_calls.added_tokens import AddedTokenVocabulary
from router.openai.tool_calls.tool_parser import (
    NAME,
    SPACE,
    CallParser,
    PartialPattern,
    State,
    partial_pattern,
    spaced,
)
from router.openai.tool_calls.tool_syntax import CallableTool, ToolSchemas

CALL_ID = "{id}"
"""Place of a call's id in a further head."""

_CALL_START = r'\s*\{\s*"name"\s*:'
_ID = "([a-zA-Z0-9]{1,9})"


class MarkedCalls(NamedTuple):
    """The marks of one syntax. ``heads``: further pairs of OPEN and MIDDLE that its parser takes.
    ``signs``: texts of which a template that writes this syntax has all; ``without``: and none of
    these."""

    name: str
    trigger: str
    begin: str
    between: str
    end: str
    open: str = '{"name": "'
    middle: str = '", "arguments": '
    close: str = "}"
    before: str = ""
    short_ids: bool = False  # the template accepts only ids of nine letters and digits
    heads: tuple[tuple[str, str], ...] = ()
    signs: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def call_start(self) -> str:
        return rf"/{_CALL_START}(.|\n)*/"

    @property
    def marks(self) -> str:
        parts = (self.begin, self.open, self.middle, self.close, self.between, self.end)
        return "\n".join(parts)

    def is_written_by(self, template: str) -> bool:
        return all(sign in template for sign in self.signs or (self.trigger,)) and not any(
            sign in template for sign in self.without
        )

    def call_rules(
        self, rule: str, tool: CallableTool, vocabulary: AddedTokenVocabulary
    ) -> list[str]:
        head = vocabulary.literal(self.open + tool.name + self.middle)
        return [f"{rule}: {head} {tool.source.lark} {vocabulary.literal(self.close)}"]

    def shared_rules(self, vocabulary: AddedTokenVocabulary) -> list[str]:
        return []

    def new_parser(self, schemas: ToolSchemas, *, forced: bool = False) -> MarkedCallParser:
        return MarkedCallParser(self, forced=forced)


class MarkedCallParser(CallParser):
    """The parser of ``MarkedCalls``.

    FREE --trigger--> HEAD --name--> ARGUMENTS --"}"--> AFTER --> HEAD (next call) or FREE
    """

    def __init__(self, syntax: MarkedCalls, *, forced: bool = False) -> None:
        super().__init__([syntax.trigger], forced=forced, short_ids=syntax.short_ids)
        self._patterns = call_patterns(syntax)
        self._json = JsonObjectScanner()

    def _call_head(self, otherwise: State) -> bool:
        return self._begin(self._patterns.first, otherwise)

    def _begin(self, heads: Sequence[PartialPattern], otherwise: State) -> bool:
        for head in heads:
            if found := head.full.match(self._text, self._at):
                groups = found.groups()
                call_id = groups[1] if len(groups) > 1 else None
                self._begin_call(found.end(), groups[0], call_id)
                self._json = JsonObjectScanner()
                self._state = self._arguments
                return True
        may_follow = any(head.partial.match(self._text, self._at) for head in heads)
        # Text cannot begin as calls do (``MarkedCalls.call_start``): this one was cut.
        is_cut = re.compile(_CALL_START).match(self._text, self._at) is not None
        is_call = self._forced or self._triggers or self.called or is_cut
        if may_follow and (is_call or not self._ended):
            return self._wait()
        return otherwise()

    def _arguments(self) -> bool:
        end = self._json.scan(self._text, self._at)
        self._arguments_text(self._text[self._at : end])
        self._at = end
        if self._json.complete:
            self.has_open_call = False
            self._state = self._after
        return True

    def _after(self) -> bool:
        return self._begin(self._patterns.next, otherwise=self._close)

    def _close(self) -> bool:
        """Skip the marks after the last call; a model may leave out the last ones."""
        found = self._patterns.end.full.match(self._text, self._at)
        if not found and self._patterns.end.partial.match(self._text, self._at):
            return self._wait()
        found = found or self._patterns.close.full.match(self._text, self._at)
        if found:
            self._at = found.end()
        self._state = self._free
        return True


class JsonObjectScanner:
    """Finds the end of a JSON object that begins with the first character."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.complete = False

    def scan(self, text: str, start: int) -> int:
        """Return the end of the characters of ``text`` from ``start`` that belong to the object."""
        for at in range(start, len(text)):
            c = text[at]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = c == "\\"
                self._in_string = c != '"'
            elif c == '"':
                self._in_string = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.complete = True
                    return at + 1
        return len(text)


class CallPatterns(NamedTuple):
    """Where calls begin, continue and end in a text."""

    first: tuple[PartialPattern, ...]  # from the trigger to the arguments of the first call
    next: tuple[PartialPattern, ...]  # from the end of some arguments to those of the next call
    end: PartialPattern  # what follows the last arguments
    close: PartialPattern  # the same without the marks that end all calls


@lru_cache(maxsize=16)
def call_patterns(syntax: MarkedCalls) -> CallPatterns:
    """Compile the patterns of a syntax, which ignore white space in its marks."""
    heads = [_head(*head) for head in ((syntax.open, syntax.middle), *syntax.heads)]
    close, begin = spaced(syntax.close), spaced(syntax.begin)
    first = [partial_pattern([*begin, *head]) for head in heads]
    following = [partial_pattern([*close, *spaced(syntax.between), *head]) for head in heads]
    if syntax.trigger and syntax.begin != syntax.between:  # the closing mark was left out
        following += [partial_pattern([*close, *begin, *head]) for head in heads]
    end = partial_pattern([*close, *spaced(syntax.end)])
    return CallPatterns(tuple(first), tuple(following), end, partial_pattern(close))


def _head(opening: str, middle: str) -> list[str]:
    before, mark, after = middle.partition(CALL_ID)
    call_id = [SPACE, _ID] if mark else []
    return [
        *spaced(opening),
        SPACE,
        NAME,
        *spaced(before),
        *call_id,
        *spaced(after),
        SPACE,
        r"(?=\{)",
    ]
