"""What a request asks of its output: a grammar, a parser, the tools that the template shows."""

from __future__ import annotations

from typing import Any, NamedTuple

from router.common.errors import invalid
from router.openai.bodies.grammar_source import Source
from router.openai.bodies.output_formats import (
    ResponseFormat,
    StructuredOutputs,
    of_format,
    of_structured,
)
from router.openai.bodies.tools import Mode, ToolWish, decide
from router.openai.chat.call_grammar import HERMES, MAX_CALLS, CallGrammar, Syntax, parameters
from router.openai.chat.control_tokens import AddedTokens
from router.openai.chat.tool_parser import ToolParser


class OutputPlan(NamedTuple):
    """The default is that of a request without wishes."""

    grammar: str = ""  # for Sampling.grammar
    sources: tuple[Source, ...] = ()  # what it was made of, to say whose fault an error is
    tools: tuple[dict[str, Any], ...] = ()  # for ChatTemplate.prompt
    mode: Mode = "none"
    syntax: Syntax | None = None  # of tool calls, where there may be some
    show_special: bool = False  # the marks around calls are special tokens: do not skip these

    def new_parser(self) -> ToolParser | None:
        """One for each choice; None: the text is the content."""
        return ToolParser(self.syntax) if self.syntax else None

    def finish_reason(self, reason: str, *, called: bool) -> str:
        """As OpenAI has it: a function that was named is no reason of its own."""
        calls = called and reason == "stop" and self.mode != "named"
        return "tool_calls" if calls else reason


class Planner:
    """Of one model. ``syntax``: how it writes tool calls."""

    def __init__(self, vocabulary: AddedTokens, syntax: Syntax = HERMES) -> None:
        self._vocabulary = vocabulary
        self._syntax = syntax

    def plan(
        self,
        wish: ToolWish | None = None,
        response_format: ResponseFormat | None = None,
        structured: StructuredOutputs | None = None,
        field: str = "structured_outputs",
    ) -> OutputPlan:
        """``field``: by which name ``structured`` came. Raises ApiError (400) for wishes that
        contradict themselves or each other."""
        wish = wish or ToolWish()
        decision = decide(wish)
        content = _content(response_format, structured, field)
        if decision.mode == "none":
            # Tools that must not be called are not shown: the model would call them in plain text.
            return OutputPlan(content.grammar, (content,)) if content else OutputPlan()
        arguments = [
            (wish.tools[i].function.name, parameters(wish.tools[i], i)) for i in decision.callable
        ]
        most = MAX_CALLS if wish.parallel and decision.mode != "named" else 1
        grammar = CallGrammar(self._syntax, self._vocabulary, arguments)
        sources = tuple(source for _, source in arguments)
        if decision.mode == "auto":
            if content is not None:
                self._check_mix(content)
                sources = (content, *sources)
            text = grammar.auto(most=most, content=content)
        else:
            text = grammar.required(most=most)
        marks = self._syntax.begin + self._syntax.between + self._syntax.end
        return OutputPlan(
            grammar=text,
            sources=sources,
            tools=tuple(tool.shown() for tool in wish.tools),
            mode=decision.mode,
            syntax=self._syntax,
            show_special=any(token in marks for token in self._vocabulary.special),
        )

    def _check_mix(self, content: Source) -> None:
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
                " model's calls are JSON themselves; use tool_choice 'none' or 'required'",
                content.field,
                "unsupported_parameter",
            )


def _content(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None, field: str
) -> Source | None:
    source = of_format(response_format)
    if structured is None:
        return source
    if source is not None:
        message = f"{field} is only allowed without response_format"
        raise invalid(message, field)
    return of_structured(structured, field)
