"""``ToolParser`` splits a model's text into content and tool calls while it is generated.

    FREE --trigger--> HEAD --name--> states of the family --end of the call--> FREE or HEAD

``CallParser`` has what the parsers of all families share. The result does not depend on how the
text is cut: the pieces join to the same content and calls. Text that turns out not to be a call, as
from a model without a grammar, is content. All work is linear in the length of the text.
"""

from __future__ import annotations

import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

_LETTERS = string.ascii_letters + string.digits

SPACE = r"\s{0,8}"
"""White space in patterns: bounded, so that text that is not a call is recognised early."""

NAME = "([a-zA-Z0-9_.-]{1,128})"
"""The name of a function, in patterns."""


SHORT_ID = 9
"""Length of the ids that Mistral's templates take."""


class ContentDelta(NamedTuple):
    text: str


class CallStart(NamedTuple):
    call: int  # index among the calls
    id: str
    name: str


class CallArgumentsDelta(NamedTuple):
    """A piece of a call's arguments; the pieces join to JSON."""

    call: int
    text: str


ParsedDelta = ContentDelta | CallStart | CallArgumentsDelta


class ToolParser(Protocol):
    """The parser of one choice: ``push`` for each text, then ``flush``."""

    @property
    def called(self) -> bool:
        """Return whether a call has begun."""

    @property
    def has_open_call(self) -> bool:
        """Return whether the last call is not complete."""

    def push(self, text: str) -> list[ParsedDelta]:
        """Return the deltas that ``text`` completes."""

    def flush(self, cut: str = "") -> list[ParsedDelta]:
        """Return the rest when no more text will come. ``cut``: replacement characters for a
        character of which the output has only the first bytes, perhaps those of a mark."""


State = Callable[[], bool]
"""Consumes text, and returns whether the next state should run."""


class CallParser(ABC):
    """Base of the parsers. ``triggers`` start calls within free text; with none, only the whole
    text can be calls. ``forced``: the output can only be calls."""

    def __init__(self, triggers: Sequence[str], *, forced: bool, short_ids: bool = False) -> None:
        self._triggers = tuple(filter(None, triggers))
        self._trigger_pattern = _any_of(self._triggers)
        firsts = {trigger[0] for trigger in self._triggers}
        self._first = firsts.pop() if len(firsts) == 1 else ""  # what every trigger begins with
        self._forced = forced
        self._short_ids = short_ids
        self._text = ""
        self._at = 0  # start of the text that is not yet classified
        self._blank: list[str] = []  # leading white space, dropped if calls follow
        self._has_content = False  # other than white space
        self._out: list[ParsedDelta] = []
        self._ended = self._drops_end = False
        self._calls = 0
        self.has_open_call = False
        self._ids: set[str] = set()
        self._state: State = self._free if self._triggers else self._start

    @abstractmethod
    def _call_head(self, otherwise: State) -> bool:
        """Expect the head of a call at ``_at``, where a trigger stands. The state is
        ``otherwise`` if there is none."""

    @property
    def called(self) -> bool:
        return self._calls > 0

    def push(self, text: str) -> list[ParsedDelta]:
        self._text = self._text[self._at :] + text if self._at < len(self._text) else text
        self._at = 0
        while self._at < len(self._text) and self._state():
            pass
        out, self._out = self._out, []
        return _joined(out) if len(out) > 1 else out

    def flush(self, cut: str = "") -> list[ParsedDelta]:
        self._ended = True
        out = self.push("")
        if cut and not (self._forced or self._drops_end or self.has_open_call):
            out += self.push(cut)
        self._end()
        out += self._out
        if self._blank and not self.called:
            out.append(ContentDelta("".join(self._blank)))
        return _joined(out)

    def _end(self) -> None:  # noqa: B027 - only some parsers have something to emit
        """Emit what the end of the output decides, after the states have seen it."""

    # ---- states ---------------------------------------------------------------------------------

    def _start(self) -> bool:
        """Start of a syntax without a trigger: the whole text is calls, or none is."""
        return self._call_head(otherwise=self._rest)

    def _rest(self) -> bool:
        self._state = self._rest
        self._content(len(self._text))
        return False

    def _free(self) -> bool:
        if not self._triggers:
            return self._rest()
        if self._text.find(self._first, self._at) < 0:  # the way of nearly every token
            self._content(len(self._text))
            return False
        found = self._trigger_pattern.search(self._text, self._at)
        if found:
            self._content(found.start())
            self._state = self._after_trigger
            return True
        keep = trigger_prefix_length(self._text, self._at, self._triggers)
        if self._ended and not self._forced:
            keep = 0
        self._content(len(self._text) - keep)
        return False

    def _after_trigger(self) -> bool:
        return self._call_head(otherwise=self._not_a_call)

    def _not_a_call(self) -> bool:
        found = self._trigger_pattern.match(self._text, self._at)
        assert found is not None
        self._content(found.end())
        self._state = self._free
        return True

    # ---- what the states of families use --------------------------------------------------------

    def _wait(self) -> bool:
        """Keep the text until more comes. At the end, what would be the start of a call is
        dropped: it is a call that the limit on tokens has cut."""
        if self._ended:
            self._at = len(self._text)
            self._drops_end = True
        return False

    def _begin_call(self, end: int, name: str, call_id: str | None = None) -> None:
        """Start a call whose head ends at ``end``."""
        self._at = end
        self._blank = []
        if call_id is None or len(call_id) != SHORT_ID or call_id in self._ids:
            call_id = new_call_id(short=self._short_ids)
        self._ids.add(call_id)
        self._out.append(CallStart(self._calls, call_id, name))
        self.has_open_call = True
        self._calls += 1

    def _arguments_text(self, text: str) -> None:
        if text:
            self._out.append(CallArgumentsDelta(self._calls - 1, text))

    def _content(self, end: int) -> None:
        """Emit the text up to ``end`` as content; leading white space only before other text."""
        text = self._text[self._at : end]
        self._at = end
        if self._has_content:
            if text:
                self._out.append(ContentDelta(text))
        elif not text.strip():
            self._blank.append(text)
        else:
            self._out.append(ContentDelta("".join([*self._blank, text])))
            self._blank = []
            self._has_content = True


def _joined(deltas: list[ParsedDelta]) -> list[ParsedDelta]:
    """Join adjacent deltas of one kind."""
    out: list[ParsedDelta] = []
    texts: list[str] = []
    for delta in deltas:
        last = out[-1] if out else None
        if isinstance(delta, CallStart) or type(delta) is not type(last):
            _replace_last(out, texts)
            out.append(delta)
            texts = []
        if not isinstance(delta, CallStart):
            texts.append(delta.text)
    _replace_last(out, texts)
    return out


def _replace_last(out: list[ParsedDelta], texts: list[str]) -> None:
    """Give the last delta the joined ``texts``."""
    if len(texts) > 1:
        last = out[-1]
        assert not isinstance(last, CallStart)
        out[-1] = last._replace(text="".join(texts))


class PartialPattern(NamedTuple):
    """A pattern, and another for texts that may still become a match: then the parser waits."""

    full: re.Pattern[str]
    partial: re.Pattern[str]


def partial_pattern(*variants: Sequence[str]) -> PartialPattern:
    """Compile variants of one pattern, each a sequence of atoms: patterns that match each prefix
    of what they match, or one character."""
    partials = []
    for atoms in variants:
        partial = ""
        for atom in reversed(atoms):
            partial = f"(?:{atom}{partial})?"
        partials.append(partial + r"\Z")
    fulls = ["".join(atoms) for atoms in variants]
    return PartialPattern(re.compile("|".join(fulls)), re.compile("|".join(partials)))


def spelled(mark: str) -> list[str]:
    """Return the atoms of a mark without tolerance for white space."""
    return [re.escape(character) for character in mark]


def spaced(mark: str) -> list[str]:
    """Return the atoms of a mark with bounded white space before each of its words and signs."""
    tokens = re.findall(r"\w+|[^\w\s]", mark)
    return [atom for token in tokens for atom in (SPACE, *spelled(token))]


def new_call_id(*, short: bool = False) -> str:
    """Return a random id; ``short``: of nine letters and digits, as Mistral's templates want."""
    if short:
        return "".join(secrets.choice(_LETTERS) for _ in range(SHORT_ID))
    return f"call_{secrets.token_hex(12)}"


def trigger_prefix_length(text: str, start: int, triggers: Sequence[str]) -> int:
    """Return the length of the longest end of ``text[start:]`` that is a proper prefix of one of
    the triggers, which are a model's and short."""
    longest = max(map(len, triggers)) - 1
    tail = text[max(start, len(text) - longest) :]
    if not any(trigger[0] in tail for trigger in triggers):
        return 0
    for size in range(min(len(text) - start, longest), 0, -1):
        end = text[-size:]
        if any(len(trigger) > size and trigger.startswith(end) for trigger in triggers):
            return size
    return 0


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)))
