"""Two tools, two vocabularies, and what comes out of wishes about them."""

# ruff: noqa: RUF001 - DeepSeek's marks
from __future__ import annotations

import asyncio
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from pydantic import TypeAdapter
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from tokenizers import decoders as token_decoders

from router.openai.bodies.output_formats import ResponseFormat
from router.openai.bodies.tools import ToolChoice, ToolOptions, Tools
from router.openai.chat.grammar_checker import GrammarChecker
from router.openai.chat.output_plan import OutputPlan, OutputPlanner
from router.openai.tool_calls.added_tokens import AddedTokenVocabulary
from router.openai.tool_calls.tool_syntax import ToolCallSyntax
from tests.router.openai.chat.toy import TEXT, byte_level
from tests.router.openai.tool_calls.writing import Calls, run


def bare() -> Tokenizer:
    """As the demo model's: the marks of calls are letters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = token_decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


class Vocab:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.eos = tokenizer.token_to_id("</s>")
        self.matching = LLTokenizer(tokenizer.to_str(), eos_token=self.eos)

    def fits(self, grammar: str, text: str) -> bool:
        matcher = LLMatcher(self.matching, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.encode(text).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def walk(self, grammar: str, rng: random.Random, begin: str = "", most: int = 3000) -> str:
        """``begin``, and then random tokens that the grammar allows, ended as soon as it may be."""
        matcher = LLMatcher(self.matching, grammar, log_level=0)
        ids: list[int] = self.tokenizer.encode(begin).ids
        assert matcher.consume_tokens(ids), matcher.get_error()
        while len(ids) < most:
            mask = matcher.compute_logit_bias()
            allowed = [i for i, bit in enumerate(mask) if bit]
            token = self.eos if self.eos in allowed else rng.choice(allowed)
            assert matcher.consume_token(token), matcher.get_error()
            if token == self.eos:
                break
            ids.append(token)
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


def checked(tokenizer: Tokenizer, plan: OutputPlan) -> OutputPlan:
    """Check a plan's grammar, if it has one, for a model with this tokenizer. Raises ApiError."""
    if not plan.grammar:
        return plan
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        tokenizer.save(str(path))
        checker = GrammarChecker(path)
        try:
            return asyncio.run(checker.check(plan))
        finally:
            checker.close()


MARKS = ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"]
MARKS += ["<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "[ARGS]", "<|python_tag|>"]
MARKS += ["<|tool_call>", "<tool_call|>", '<|"|>']


def with_marks() -> Tokenizer:
    """As models' whose marks of calls are tokens: those of DeepSeek, Mistral, Llama and Gemma are
    special, those of Qwen are not."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in MARKS])
    return tokenizer


VOCABS = {"tokens": Vocab(with_marks()), "letters": Vocab(bare())}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"enum": ["C", "F"]},
    },
    "required": ["city", "units"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "now", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "stop-all", "strict": True}},
]
SCHEMAS = {"weather": WEATHER, "stop-all": {"type": "object", "maxProperties": 0}}
ARGUMENTS = '{"city": "Bonn", "units": "C"}'


def wish(choice: Any = None, parallel: bool = True, tools: Any = TOOLS) -> ToolOptions:
    checked = TypeAdapter(Tools).validate_python(tools)
    return ToolOptions(
        checked, choice and TypeAdapter(ToolChoice).validate_python(choice), parallel
    )


def planned(
    syntax: ToolCallSyntax, vocab: str, choice: Any = None, parallel: bool = True, form: Any = None
) -> OutputPlan:
    planner = OutputPlanner(AddedTokenVocabulary.of(VOCABS[vocab].tokenizer), syntax)
    wanted = form and TypeAdapter(ResponseFormat).validate_python(form)
    plan = planner.plan(wish(choice, parallel), wanted)
    return checked(VOCABS[vocab].tokenizer, plan)


def parsed(plan: OutputPlan, text: str) -> tuple[str, Calls]:
    parser = plan.new_parser()
    assert parser is not None
    return run(parser, [text])


NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [NAMED]},
}
