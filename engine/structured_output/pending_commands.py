"""Commands about sequences whose grammar is being compiled: they wait, and nobody else does.

opens a sequence, grammar known --------------------------------> go on
opens a sequence, grammar new --> parked --compiled--> go on, in order, with those after it
                                    |  wrong, or too late --> refused
                                    +--Drop--> forgotten
"""

from __future__ import annotations

from typing import NamedTuple

from engine.ipc import messages as m
from engine.structured_output.compiler import Compiler
from engine.structured_output.matcher import Matcher
from protocol.errors import InvalidRequest, Unavailable

LOOK_S = 0.002
"""Between two looks of an idle engine whether a grammar is ready."""


class Ready(NamedTuple):
    """A sequence that need not wait any longer, and what has been said of it meanwhile."""

    handle: int
    commands: list[m.Command]
    problem: InvalidRequest | Unavailable | None


class Parking:
    """Keeps the commands, and the matchers of sequences that are about to be opened."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._parked: dict[int, list[m.Command]] = {}
        self._matchers: dict[int, Matcher] = {}

    def keeps(self, command: m.Command) -> bool:
        """Whether the command is to wait; it is kept here then."""
        handle = getattr(command, "handle", None)
        if handle in self._parked:
            self._parked[handle].append(command)
            if isinstance(command, m.Drop):
                self._compiler.forget(handle)
                del self._parked[handle]
            return True
        if not isinstance(command, m.Generate | m.Prefill | m.Receive):
            return False
        grammar = command.request.sampling.grammar
        if not grammar:
            return False
        if (known := self._compiler.get(grammar)) is not None:
            self._matchers[command.handle] = known
            return False
        self._compiler.ask(command.handle, grammar)
        self._parked[command.handle] = [command]
        return True

    @property
    def busy(self) -> bool:
        return bool(self._parked)

    def take(self) -> list[Ready]:
        """Those that have waited for long enough."""
        out = []
        for handle, outcome in self._compiler.take():
            problem = None if isinstance(outcome, Matcher) else outcome
            if isinstance(outcome, Matcher):
                self._matchers[handle] = outcome
            out.append(Ready(handle, self._parked.pop(handle), problem))
        return out

    def matcher(self, handle: int) -> Matcher | None:
        """At the start of the grammar of a sequence that is opened now; only once."""
        return self._matchers.pop(handle, None)
