"""``ModelFormats`` knows how a model's chats, prompts and outputs are written.

Each router has one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from router.openai.bodies.chat_body import ChatBody
from router.openai.bodies.generation_body import GenerationBody
from router.openai.bodies.reasoning_options import ReasoningOptions, template_options
from router.openai.bodies.tools import ToolOptions
from router.openai.chat.grammar_checker import GrammarChecker, check_grammar_size
from router.openai.chat.output_plan import OutputPlan, OutputPlanner
from router.openai.chat.template import ChatTemplate
from router.openai.chat.template_files import load_template
from router.openai.parser_names import ReasoningParserName, ToolParserName
from router.openai.prompts.prompt_encoder import PromptEncoder
from router.openai.reasoning.reasoning_plan import ReasoningPlanner
from router.openai.reasoning.reasoning_syntax import find_reasoning
from router.openai.tool_calls.added_tokens import AddedTokenVocabulary
from router.openai.tool_calls.families.syntaxes import find_syntax


class ModelFormats:
    """Prompts, chat template and grammars of the served model; closed with its router.

    ``template`` is None where the model has none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        model_path: str,
        *,
        reasoning_parser: ReasoningParserName = "auto",
        tool_parser: ToolParserName = "auto",
    ) -> None:
        self.template = template
        source = template.source if template else ""
        vocabulary = AddedTokenVocabulary.of(tokenizer)
        reasoning = find_reasoning(reasoning_parser, source)
        self._efforts = reasoning.efforts if reasoning else ()
        self._reasoning = reasoning and ReasoningPlanner(vocabulary, reasoning)
        if self._reasoning:
            vocabulary = self._reasoning.body_vocabulary
        self._planner = OutputPlanner(vocabulary, find_syntax(tool_parser, source))
        self.prompts = PromptEncoder(tokenizer, template, Path(model_path))
        self.checker = GrammarChecker(Path(model_path).absolute() / "tokenizer.json")

    def template_options(self, body: ChatBody) -> dict[str, Any]:
        """Return the variables of the chat template for this request."""
        return template_options(body.reasoning_effort, body.chat_template_kwargs, self._efforts)

    async def plan(
        self, body: GenerationBody, tenant: str, tools: ToolOptions | None = None
    ) -> OutputPlan:
        """Return what constrains the output.

        Raises ApiError: 400 for what no grammar can express, 429 where there is no time for this
        tenant's grammar.
        """
        field, structured = body.structured
        plan = self._planner.plan(tools, body.response_format, structured, field)
        return await self.checker.check(plan, tenant) if plan.grammar else plan

    def plan_reasoning(
        self, plan: OutputPlan, options: ReasoningOptions, tail: str, max_tokens: int
    ) -> OutputPlan:
        """Return ``plan`` with the reasoning of a chat whose rendered prompt ends with ``tail``.

        Raises ApiError (400) for a budget that cannot be enforced, or a grammar that is too large.
        """
        if self._reasoning is None:
            return plan
        reasoning = self._reasoning.plan(options, tail, plan.opener)
        grammar = self._reasoning.constrain(plan.grammar, reasoning, options, max_tokens)
        shows = plan.show_special or self._reasoning.show_special
        plan = plan._replace(grammar=grammar, reasoning=reasoning, show_special=shows)
        check_grammar_size(plan)
        return plan

    def close(self) -> None:
        self.prompts.close()
        self.checker.close()


def load_model_formats(
    tokenizer: Tokenizer,
    model_path: str,
    *,
    reasoning_parser: ReasoningParserName = "auto",
    tool_parser: ToolParserName = "auto",
) -> ModelFormats:
    """Load the formats of a model's folder; the parsers are named as in the configuration.

    Raises StartupError for a chat template that cannot be used.
    """
    template = load_template(model_path, tokenizer)
    return ModelFormats(
        tokenizer,
        template,
        model_path,
        reasoning_parser=reasoning_parser,
        tool_parser=tool_parser,
    )
