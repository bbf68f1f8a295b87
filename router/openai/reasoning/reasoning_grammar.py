"""Grammars whose first rule is the reasoning, so that they constrain only what follows it.

    open:     think END gap @body
    waiting:  (BEGIN think END gap)? @body

A matcher of such a grammar rolls back under speculation and is replayed after a hand-over or a
migration like any other, and it allows no end of the text before the end marker. Markers that are
one token are named by their ids; others are spelled.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from router.common.errors import invalid
from router.openai.reasoning.reasoning_syntax import ReasoningStart, ReasoningSyntax
from router.openai.tool_calls.added_tokens import AddedTokenVocabulary

BODY = "what_follows_reasoning"
"""Name of the grammar that the rules above refer to."""

_ANY = r"/(.|\n)*/"
_GAP = r"GAP: /\n{0,2}/"
"""Newlines that models write after the end marker; they are no part of the content."""


class ReasoningGrammar(NamedTuple):
    """Builds grammars for one model."""

    syntax: ReasoningSyntax
    vocabulary: AddedTokenVocabulary

    @property
    def free_text(self) -> str:
        """Return the grammar of any text without the markers."""
        ids = ",".join(map(str, self.vocabulary.visible_ids(without=self.marker_tokens)))
        return f"start: TEXT (<[{ids}]> TEXT)*\nTEXT: {_ANY}" if ids else f"start: {_ANY}"

    @property
    def marker_tokens(self) -> frozenset[str]:
        """Return the added tokens in the markers."""
        both = self.syntax.begin + self.syntax.end
        return frozenset(token for token in self.vocabulary.control if token in both)

    @property
    def marker_ids(self) -> tuple[int | None, int | None]:
        """Return the ids of the tokens that begin and end the reasoning, where they are tokens."""
        control, syntax = self.vocabulary.control, self.syntax
        begin = next((i for t, i in control.items() if syntax.begin.startswith(t)), None)
        return begin, control.get(syntax.end)

    def after_reasoning(self, body: str, start: ReasoningStart, budget: int | None) -> str:
        """Return the grammar that allows reasoning and then ``body``, which is a grammar in
        llguidance's form. ``budget``: most tokens of the reasoning; None: any number.

        Raises ApiError (400) for a budget with an end marker that is not one token: only a token
        can be forced.
        """
        if start == "closed":
            return body
        rules = [*self._reasoning_rules(budget), _GAP]
        if start == "open":
            rules.insert(0, f"start: reasoning GAP @{BODY}")
        else:
            begin = self.vocabulary.literal(self.syntax.begin)
            rules.insert(0, f"start: ({begin} reasoning GAP)? @{BODY}")
        return _nest("\n".join(rules) + "\n", body)

    def _reasoning_rules(self, budget: int | None) -> list[str]:
        end = self.vocabulary.literal(self.syntax.end)
        if budget == 0:
            return [f"reasoning: {end}"]
        if self.syntax.end not in self.vocabulary.control:
            if budget is not None:
                raise invalid(
                    "thinking_token_budget is not supported: this model's end of the reasoning is"
                    " not one token",
                    "thinking_token_budget",
                    "unsupported_parameter",
                )
            # Only a lazy lexeme ends at the first marker.
            return ["reasoning: head", f"head[lazy]: {_ANY} {end}"]
        limit = "" if budget is None else f"[max_tokens={budget}]"
        return [f"reasoning: think {end}", f"think{limit}: {_ANY}"]


def _nest(lark: str, body: str) -> str:
    """Return the grammar in Lark's notation that refers to ``body`` by the name BODY."""
    whole = json.loads(body) if body.lstrip().startswith("{") else {"grammars": [_lark(body)]}
    first, *others = whole["grammars"]
    grammars = [_lark(lark), {**first, "name": BODY}, *others]
    return json.dumps({**whole, "grammars": grammars}, ensure_ascii=False, separators=(",", ":"))


def _lark(text: str) -> dict[str, str]:
    return {"lark_grammar": text}
