"""How models mark their reasoning. The chat template shows which markers a model was trained on.

The end of the rendered prompt tells where the output begins (``reasoning_start``):

    prompt ends with the begin marker  ->  "open"     the output begins with reasoning
    ... with the end marker            ->  "closed"   reasoning is off, all is content
    ... with neither                   ->  "waiting"  the model may write the begin marker first
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from router.openai.parser_names import ReasoningParserName

PROMPT_TAIL = 256
"""Characters of a rendered prompt that ``reasoning_start`` is given."""

ReasoningStart = Literal["open", "closed", "waiting"]


class ReasoningSyntax(NamedTuple):
    """The markers around the reasoning in one model family's output."""

    name: str
    begin: str
    end: str
    newlines: bool = True  # newlines next to a marker belong to it, as the template writes them
    assume_open: bool = False  # where the prompt does not tell
    efforts: tuple[str, ...] = ()  # that the templates know, the highest last; empty: all


DEEPSEEK_R1 = ReasoningSyntax("deepseek_r1", "<think>", "</think>", assume_open=True)
"""DeepSeek R1 and its distillations, by configuration: some prompts do not show the marker that the
model leaves out."""

QWEN3 = ReasoningSyntax("qwen3", "<think>", "</think>")
"""Qwen 3, 3.5 and most others, among them DeepSeek with a template that writes the marker."""

MISTRAL = ReasoningSyntax(
    "mistral", "[THINK]", "[/THINK]", newlines=False, efforts=("none", "high")
)

GEMMA4 = ReasoningSyntax("gemma4", "<|channel>thought\n", "<channel|>", newlines=False)

REASONING_SYNTAXES = {s.name: s for s in (DEEPSEEK_R1, QWEN3, MISTRAL, GEMMA4)}


def detect_reasoning(template: str) -> ReasoningSyntax | None:
    """Return the syntax whose markers the template writes or removes; None where it has none."""
    for syntax in (GEMMA4, MISTRAL, QWEN3):
        if syntax.end in template:
            return syntax
    return None


def find_reasoning(name: ReasoningParserName, template: str) -> ReasoningSyntax | None:
    """Return the syntax for a value of ``api.reasoning_parser``: ``auto``, ``none``, or a name."""
    if name == "auto":
        return detect_reasoning(template)
    return None if name == "none" else REASONING_SYNTAXES[name]


def reasoning_start(syntax: ReasoningSyntax, tail: str, *, is_over: bool = False) -> ReasoningStart:
    """Return where the output begins; ``tail``: the last characters of the rendered prompt;
    ``is_over``: they are a text that the output continues.

    Only markers at the very end count: a client may write the same text in its messages.
    """
    end = tail.rstrip()
    if end.endswith(syntax.begin.rstrip()):
        return "open"
    if end.endswith(syntax.end):
        return "closed"
    return "open" if syntax.assume_open and not is_over else "waiting"
