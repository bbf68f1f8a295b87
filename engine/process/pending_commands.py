"""Commands of sequences whose grammar is being compiled, held without delay for other sequences.

    opens a sequence, grammar cached --------------------------------> passed on
    opens a sequence, grammar new --> held --compiled--> passed on, with the later commands
                                        |  invalid or too late --> refused
                                        +--Drop--> forgotten

``EngineServer`` creates one ``PendingCommands``, and asks it about commands with a grammar and,
while any is held, about every command.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.ipc import messages as m
from engine.structured_output.compiler import GrammarCompiler
from engine.structured_output.matcher import GrammarMatcher
from protocol.errors import InvalidRequest, Unavailable


class ReleasedCommands(NamedTuple):
    """The commands of a sequence that need not wait any longer, or the problem that ends it."""

    handle: int
    commands: list[m.Command]
    problem: InvalidRequest | Unavailable | None


class PendingCommands:
    """The held commands of one engine process, and the matchers of sequences that are about to be
    opened."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._held: dict[int, list[m.Command]] = {}  # by handle
        self._matchers: dict[int, GrammarMatcher] = {}

    def hold(self, command: m.Command) -> bool:
        """Return whether the command has to wait; it is held here then."""
        handle = getattr(command, "handle", None)
        if handle in self._held:
            self._held[handle].append(command)
            if isinstance(command, m.Drop):
                self._compiler.cancel(handle)
                del self._held[handle]
            return True
        if not isinstance(command, m.Generate | m.Prefill | m.Receive):
            return False
        grammar = command.request.sampling.grammar
        if not grammar:
            return False
        if (known := self._compiler.get_cached(grammar)) is not None:
            self._matchers[command.handle] = known
            return False
        self._compiler.submit(command.handle, grammar)
        self._held[command.handle] = [command]
        return True

    @property
    def busy(self) -> bool:
        """Whether any command is held."""
        return bool(self._held)

    def take_released(self) -> list[ReleasedCommands]:
        """Return, and forget, the commands of every sequence that need not wait any longer."""
        out = []
        for handle, result in self._compiler.take_finished():
            problem = None if isinstance(result, GrammarMatcher) else result
            if isinstance(result, GrammarMatcher):
                self._matchers[handle] = result
            out.append(ReleasedCommands(handle, self._held.pop(handle), problem))
        return out

    def take_matcher(self, handle: int) -> GrammarMatcher | None:
        """Return, only once, the matcher of a sequence that is opened now, at the grammar's
        start."""
        return self._matchers.pop(handle, None)
