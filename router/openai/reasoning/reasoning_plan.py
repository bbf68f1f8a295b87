"""``ReasoningPlan``: where the output of one request has reasoning, and how much of it.

``ReasoningPlanner`` is created with the model's formats. Grammars constrain what follows the
reasoning (``reasoning_grammar``): they are planned first, and completed here once the end of the
rendered prompt has shown where the output begins.
"""

from __future__ import annotations

from typing import NamedTuple

from router.generation.reasoning_count import REASONING_IS_OFF, ReasoningMarks
from router.openai.bodies.reasoning_options import ReasoningOptions
from router.openai.reasoning.reasoning_grammar import ReasoningGrammar
from router.openai.reasoning.reasoning_syntax import (
    ReasoningStart,
    ReasoningSyntax,
    reasoning_start,
)
from router.openai.tool_calls.added_tokens import AddedTokenVocabulary


class ReasoningPlan(NamedTuple):
    """The reasoning of one request."""

    syntax: ReasoningSyntax
    start: ReasoningStart
    hidden: bool = False
    marks: ReasoningMarks = REASONING_IS_OFF  # how its tokens are counted


class ReasoningPlanner:
    """Plans the reasoning for one model, whose markers are those of ``syntax``."""

    def __init__(self, vocabulary: AddedTokenVocabulary, syntax: ReasoningSyntax) -> None:
        self._syntax = syntax
        self._grammar = ReasoningGrammar(syntax, vocabulary)
        self.show_special = not vocabulary.special.isdisjoint(self._grammar.marker_tokens)
        """Whether a detokenizer that skips special tokens would skip the markers."""

    @property
    def body_vocabulary(self) -> AddedTokenVocabulary:
        """Return the vocabulary of what follows the reasoning: text has no markers there."""
        vocabulary = self._grammar.vocabulary
        return vocabulary._replace(special=vocabulary.special | self._grammar.marker_tokens)

    def plan(self, options: ReasoningOptions, tail: str, opener: str = "") -> ReasoningPlan:
        """Return the plan for a prompt that ends with ``tail``; ``opener``: text with which a tool
        call begins, empty where none is possible."""
        start = reasoning_start(self._syntax, tail, is_over=options.is_over)
        marks = REASONING_IS_OFF if start == "closed" else self._marks(start == "open", opener)
        return ReasoningPlan(self._syntax, start, options.hidden, marks)

    def _marks(self, is_open: bool, opener: str) -> ReasoningMarks:
        begin, end = self._grammar.marker_ids
        ends = [] if end is None else [end, self._grammar.vocabulary.control.get(opener, end)]
        return ReasoningMarks(is_open, begin, frozenset(ends), self._syntax.end, self._syntax.begin)

    def constrain(
        self, grammar: str, plan: ReasoningPlan, options: ReasoningOptions, max_tokens: int
    ) -> str:
        """Return the grammar of the whole output; ``grammar`` constrains what follows the
        reasoning, and is empty where that is free. Raises ApiError (400) for a budget that cannot
        be enforced."""
        budget = options.budget
        if budget is not None and budget >= max_tokens:
            budget = None
        if plan.start == "closed" or not (grammar or budget is not None):
            return grammar
        return self._grammar.after_reasoning(grammar or self._grammar.free_text, plan.start, budget)
