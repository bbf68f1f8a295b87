"""``ModelFormats`` knows how a model's chats, prompts and outputs are written.

Each router has one.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from router.openai.bodies.generation_body import GenerationBody
from router.openai.bodies.tools import ToolOptions
from router.openai.chat.grammar_checker import GrammarChecker
from router.openai.chat.output_plan import OutputPlan, OutputPlanner
from router.openai.chat.template import ChatTemplate
from router.openai.chat.template_files import load_template
from router.openai.prompts.prompt_encoder import PromptEncoder
from router.openai.tool_calls.call_grammar import AddedTokenVocabulary
from router.openai.tool_calls.tool_syntax import detect_syntax


class ModelFormats:
    """Prompts, chat template and grammars of the served model; closed with its router.

    ``template`` is None where the model has none.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, model_path: str
    ) -> None:
        self.template = template
        syntax = detect_syntax(template.source if template else "")
        self._planner = OutputPlanner(AddedTokenVocabulary.of(tokenizer), syntax)
        self.prompts = PromptEncoder(tokenizer, template, Path(model_path))
        self.checker = GrammarChecker(Path(model_path).absolute() / "tokenizer.json")

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

    def close(self) -> None:
        self.prompts.close()
        self.checker.close()


def load_model_formats(tokenizer: Tokenizer, model_path: str) -> ModelFormats:
    """Raises StartupError for a chat template that cannot be used."""
    return ModelFormats(tokenizer, load_template(model_path, tokenizer), model_path)
