"""``ToolCallSyntax``: the interface of a model family's way to write tool calls.

    free text  begin CALL  between CALL  ...  end

Each family is a module in ``families``, and an entry in ``families.syntaxes``. The grammar of an
output asks it for the rules of a call, and the parser of an output is made by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from router.openai.bodies.grammar_source import GrammarSource
from router.openai.tool_calls.added_tokens import AddedTokenVocabulary
from router.openai.tool_calls.tool_parser import ToolParser

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""Name of each callable tool -> the JSON schema of its arguments, which is one of an object."""


class CallableTool(NamedTuple):
    """A tool that the model may call."""

    name: str
    schema: Mapping[str, Any]  # of the arguments; its objects take declared keys only
    source: GrammarSource  # the same schema, checked alone to name the field of an error


class ToolCallSyntax(Protocol):
    """How one model family writes tool calls."""

    @property
    def name(self) -> str:
        """The value of ``api.tool_parser``."""

    @property
    def trigger(self) -> str:
        """What starts calls within free text; empty: only a whole text can be calls."""

    @property
    def begin(self) -> str:
        """The text before the first call; it starts with the trigger."""

    @property
    def between(self) -> str: ...

    @property
    def end(self) -> str: ...

    @property
    def before(self) -> str:
        """A control token that a model may write before calls; empty: none."""

    @property
    def call_start(self) -> str:
        """A terminal of Lark for the texts that are calls, where ``trigger`` is empty."""

    @property
    def marks(self) -> str:
        """All texts that mark calls and their parts. Control tokens among them must not be skipped
        in the output, and are no part of free text."""

    def is_written_by(self, template: str) -> bool:
        """Return whether a chat template writes calls in this syntax."""

    def call_rules(
        self, rule: str, tool: CallableTool, vocabulary: AddedTokenVocabulary
    ) -> list[str]:
        """Return Lark rules for a call of ``tool``: that of ``rule`` first, then rules whose names
        begin with it. Without a trigger, ``begin`` and the name of the first call must be one
        terminal, so that free text ends there: ``rule``_first is that of a call with ``begin``.
        Raises ApiError (400) for a schema that the syntax cannot write."""

    def shared_rules(self, vocabulary: AddedTokenVocabulary) -> list[str]:
        """Return rules to which those of all calls refer."""

    def new_parser(self, schemas: ToolSchemas, *, forced: bool = False) -> ToolParser:
        """Return the parser of one choice. ``forced``: the output can only be calls, so the start
        of a call that is cut is not content."""
