"""What the model that is served makes of chats, formats and tools: built once."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from router.api.fields import GenerationBody
from router.chat.check import GrammarChecker
from router.chat.plan import OutputPlan, Planner
from router.chat.syntax import detect
from router.chat.template import ChatTemplate, load_template
from router.chat.tools import ToolWish
from router.chat.vocabulary import AddedTokens


class Formats:
    """``template``: None where the model has none. ``close`` at the end."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, model_path: str
    ) -> None:
        self.template = template
        syntax = detect(template.source if template else "")
        self._planner = Planner(AddedTokens.of(tokenizer), syntax)
        self.checker = GrammarChecker(Path(model_path).absolute() / "tokenizer.json")

    async def plan(
        self, body: GenerationBody, tenant: str, wish: ToolWish | None = None
    ) -> OutputPlan:
        """What the output must be like. Raises ApiError: 400 for what no grammar can hold, 429
        where there is no time for this tenant's grammar."""
        field, structured = body.structured
        plan = self._planner.plan(wish, body.response_format, structured, field)
        return await self.checker.check(plan, tenant)

    def close(self) -> None:
        self.checker.close()


def load_formats(tokenizer: Tokenizer, model_path: str) -> Formats:
    """Raises StartupError for a chat template that cannot be used."""
    return Formats(tokenizer, load_template(model_path, tokenizer), model_path)
