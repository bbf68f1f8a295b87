"""Plans the output of a request: its grammar, its parser, and the tools that the template shows."""

from __future__ import annotations

from typing import Any, NamedTuple

from router.common.errors import invalid
from router.openai.bodies.grammar_source import GrammarSource
from router.openai.bodies.output_formats import (
    ResponseFormat,
    StructuredOutputs,
    response_format_source,
    structured_outputs_source,
)
from router.openai.bodies.tools import ToolMode, ToolOptions, decide_tool_choice
from router.openai.reasoning.reasoning_parser import ReasoningParser
from router.openai.reasoning.reasoning_plan import ReasoningPlan
from router.openai.tool_calls.added_tokens import AddedTokenVocabulary
from router.openai.tool_calls.call_grammar import MAX_CALLS, ToolCallGrammar, callable_tool
from router.openai.tool_calls.families.hermes import HERMES
from router.openai.tool_calls.tool_parser import ToolParser
from router.openai.tool_calls.tool_syntax import CallableTool, ToolCallSyntax


class OutputPlan(NamedTuple):
    """The constraints on one request's output; the default is free text."""

    grammar: str = ""  # for SamplingParams.grammar
    sources: tuple[GrammarSource, ...] = ()  # parts of the grammar, to name the field of an error
    tools: tuple[dict[str, Any], ...] = ()  # for ChatTemplate.prompt
    mode: ToolMode = "none"
    syntax: ToolCallSyntax | None = None  # where tool calls are possible
    callable_tools: tuple[CallableTool, ...] = ()
    show_special: bool = False  # special tokens are markers, so they must not be skipped
    reasoning: ReasoningPlan | None = None  # None: no text is reasoning

    def new_parser(self) -> ToolParser | None:
        """Return a parser for one choice; None: all text is content."""
        if self.syntax is None:
            return None
        schemas = {tool.name: tool.schema for tool in self.callable_tools}
        return self.syntax.new_parser(schemas, forced=self.mode in ("required", "named"))

    def new_reasoning_parser(self) -> ReasoningParser | None:
        """Return a parser for one choice; None: no text is reasoning."""
        if self.reasoning is None or self.reasoning.start == "closed":
            return None
        return ReasoningParser(self.reasoning.syntax, self.reasoning.start, (self.opener,))

    @property
    def opener(self) -> str:
        """Return the text with which a tool call begins; empty where there is none."""
        return self.syntax.trigger if self.syntax else ""

    @property
    def hides_reasoning(self) -> bool:
        return self.reasoning is not None and self.reasoning.hidden

    def finish_reason(self, reason: str, *, called: bool) -> str:
        """Return OpenAI's finish reason: "tool_calls", unless ``tool_choice`` named the
        function."""
        calls = called and reason == "stop" and self.mode != "named"
        return "tool_calls" if calls else reason


class OutputPlanner:
    """Plans outputs for one model, which writes tool calls in ``syntax``."""

    def __init__(self, vocabulary: AddedTokenVocabulary, syntax: ToolCallSyntax = HERMES) -> None:
        self._vocabulary = vocabulary
        self._syntax = syntax

    def plan(
        self,
        options: ToolOptions | None = None,
        response_format: ResponseFormat | None = None,
        structured: StructuredOutputs | None = None,
        field: str = "structured_outputs",
    ) -> OutputPlan:
        """Plan the output; ``field``: the name by which ``structured`` was sent. Raises ApiError
        (400) for options that contradict each other."""
        options = options or ToolOptions()
        decision = decide_tool_choice(options)
        content = _content_source(response_format, structured, field)
        if decision.mode == "none":
            # Tools that must not be called are not shown: the model would call them in plain text.
            return OutputPlan(content.grammar, (content,)) if content else OutputPlan()
        tools = tuple(callable_tool(options.tools[i], i) for i in decision.callable)
        max_calls = MAX_CALLS if options.parallel and decision.mode != "named" else 1
        grammar = ToolCallGrammar(self._syntax, self._vocabulary, tools)
        sources = tuple(tool.source for tool in tools)
        if decision.mode == "auto":
            if content is not None:
                self._check_combination(content)
                sources = (content, *sources)
            text = grammar.auto(max_calls=max_calls, content=content)
        else:
            text = grammar.required(max_calls=max_calls)
        marks = self._syntax.marks
        return OutputPlan(
            grammar=text,
            sources=sources,
            tools=tuple(tool.for_template() for tool in options.tools),
            mode=decision.mode,
            syntax=self._syntax,
            callable_tools=tools,
            show_special=any(token in marks for token in self._vocabulary.special),
        )

    def _check_combination(self, content: GrammarSource) -> None:
        if content.lark is None:
            raise invalid(
                f"{content.field} with a regex or a grammar is not supported together with tools;"
                " use a JSON schema, or tool_choice 'none' or 'required'",
                content.field,
                "unsupported_parameter",
            )
        if not self._syntax.trigger:
            raise invalid(
                f"{content.field} is not supported together with tools that may be called: this"
                " model's calls begin as JSON does; use tool_choice 'none' or 'required'",
                content.field,
                "unsupported_parameter",
            )


def _content_source(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None, field: str
) -> GrammarSource | None:
    source = None if response_format is None else response_format_source(response_format)
    if structured is None:
        return source
    if source is not None:
        message = f"{field} is only allowed without response_format"
        raise invalid(message, field)
    return structured_outputs_source(structured, field)
