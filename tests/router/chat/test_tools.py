"""Tools: who may be called, what an output may be then, and what a parser makes of it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import TypeAdapter, ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers import decoders as token_decoders

from router.chat.check import GrammarChecker
from router.chat.parser import CallArguments, CallStart, Content, Delta
from router.chat.plan import OutputPlan, Planner
from router.chat.structured import ResponseFormat, StructuredOutputs
from router.chat.syntax import HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS, SYNTAXES, Syntax, detect
from router.chat.tools import ToolChoice, Tools, ToolWish
from router.chat.vocabulary import Vocabulary
from router.errors import ApiError
from tests.router.chat.toy import STYLES, TEXT, byte_level


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

    def walk(self, grammar: str, rng: random.Random, most: int = 400) -> str:
        """A text of random tokens that the grammar allows, ended as soon as it may be."""
        matcher = LLMatcher(self.matching, grammar, log_level=0)
        ids: list[int] = []
        while len(ids) < most:
            mask = matcher.compute_logit_bias()
            allowed = [i for i, bit in enumerate(mask) if bit]
            token = self.eos if self.eos in allowed else rng.choice(allowed)
            assert matcher.consume_token(token), matcher.get_error()
            if token == self.eos:
                break
            ids.append(token)
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


VOCABS = {"tokens": Vocab(byte_level()), "letters": Vocab(bare())}
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


def wish(choice: Any = None, parallel: bool = True, tools: Any = TOOLS) -> ToolWish:
    checked = TypeAdapter(Tools).validate_python(tools)
    return ToolWish(checked, choice and TypeAdapter(ToolChoice).validate_python(choice), parallel)


def planned(
    syntax: Syntax, vocab: str, choice: Any = None, parallel: bool = True, form: Any = None
) -> OutputPlan:
    planner = Planner(Vocabulary.of(VOCABS[vocab].tokenizer), syntax)
    wanted = form and TypeAdapter(ResponseFormat).validate_python(form)
    plan = planner.plan(wish(choice, parallel), wanted)
    checker = GrammarChecker()
    asyncio.run(checker.check(plan))
    checker.close()
    return plan


def written(syntax: Syntax, *calls: tuple[str, str]) -> str:
    bodies = [syntax.open + name + syntax.middle + given + syntax.close for name, given in calls]
    return syntax.begin + syntax.between.join(bodies) + syntax.end


def parsed(plan: OutputPlan, text: str) -> tuple[str, list[tuple[str, str]]]:
    parser = plan.new_parser()
    assert parser is not None
    return joined([*parser.push(text), *parser.flush()])


def joined(deltas: Sequence[Delta]) -> tuple[str, list[tuple[str, str]]]:
    content = "".join(d.text for d in deltas if isinstance(d, Content))
    names = [d.name for d in deltas if isinstance(d, CallStart)]
    given = [
        "".join(d.text for d in deltas if isinstance(d, CallArguments) and d.call == i)
        for i in range(len(names))
    ]
    return content, list(zip(names, given, strict=True))


NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [NAMED]},
}
everywhere = pytest.mark.parametrize("vocab", VOCABS)
each = pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=list(SYNTAXES))


@everywhere
@each
def test_what_each_choice_lets_through(syntax: Syntax, vocab: str) -> None:
    fits = VOCABS[vocab].fits
    one = written(syntax, ("weather", ARGUMENTS))
    two = written(syntax, ("stop-all", "{}"), ("weather", ARGUMENTS))
    wrong = written(syntax, ("weather", '{"city": "Bonn"}'))
    unknown = written(syntax, ("rain", "{}"))
    texts = ["", "Just text { with <marks> [", one, two, wrong, unknown, one + "text"]
    for choice, parallel, good in [
        (None, True, [0, 1, 2, 3]),
        ("auto", False, [0, 1, 2]),
        ("required", True, [2, 3]),
        ("required", False, [2]),
        (NAMED, True, [2]),
        (ALLOWED, True, [2]),
    ]:
        grammar = planned(syntax, vocab, choice, parallel).grammar
        assert [i for i, text in enumerate(texts) if fits(grammar, text)] == good, choice


@everywhere
@each
def test_free_text_before_calls(syntax: Syntax, vocab: str) -> None:
    plan = planned(syntax, vocab)
    call = written(syntax, ("weather", ARGUMENTS))
    if syntax.trigger:
        text = "<think>I look.</think>\n"
        assert VOCABS[vocab].fits(plan.grammar, text + call)
        assert VOCABS[vocab].fits(plan.grammar, text)
        assert parsed(plan, text + call) == (text, [("weather", ARGUMENTS)])
    assert not VOCABS[vocab].fits(plan.grammar, "a" + written(syntax, ("rain", "{}"))) or (
        not syntax.trigger
    )


@everywhere
@each
@pytest.mark.parametrize("choice", ["required", NAMED, None])
def test_whatever_a_grammar_lets_through_is_parsed(syntax: Syntax, vocab: str, choice: Any) -> None:
    plan = planned(syntax, vocab, choice)
    for seed in range(5):
        text = VOCABS[vocab].walk(plan.grammar, random.Random(seed))
        content, calls = parsed(plan, text)
        assert choice is None or (not content and calls)
        for name, given in calls:
            jsonschema.validate(json.loads(given), SCHEMAS[name])


@each
def test_one_text_is_read_whatever_its_white_space(syntax: Syntax) -> None:
    plan = planned(syntax, "letters")
    calls = [("weather", ARGUMENTS), ("stop-all", "{}")]
    tight = written(syntax, *calls).replace("\n", "").replace('": ', '":').replace(', "a', ',"a')
    tight = tight.replace('"units":', '"units": ').replace('"city":', '"city": ')
    assert parsed(plan, tight)[1] == calls
    assert parsed(plan, written(syntax, *calls) + "\n")[1] == calls


@everywhere
def test_a_format_for_the_content(vocab: str) -> None:
    form = {"type": "json_object"}
    plan = planned(HERMES, vocab, form=form)
    call = written(HERMES, ("weather", ARGUMENTS))
    good = ['{"a":1}', call]
    assert [VOCABS[vocab].fits(plan.grammar, t) for t in [*good, "text", "text" + call]] == [
        *(True, True),
        *(False, False),
    ]
    # A call that must come has no content; calls that must not come leave only the content.
    assert planned(HERMES, vocab, "required", form=form) == planned(HERMES, vocab, "required")
    assert planned(HERMES, vocab, "none", form=form).new_parser() is None
    with pytest.raises(ApiError, match="JSON themselves") as error:
        planned(LLAMA3_JSON, vocab, form=form)
    assert error.value.param == "response_format"
    with pytest.raises(ApiError, match="regex"):
        Planner(Vocabulary.of(VOCABS[vocab].tokenizer)).plan(
            wish(), structured=StructuredOutputs(regex="a")
        )


def test_special_tokens_are_shown_where_they_mark_calls() -> None:
    assert planned(MISTRAL, "tokens").show_special  # [TOOL_CALLS] is special
    assert not planned(HERMES, "tokens").show_special  # <tool_call> is not
    assert not planned(MISTRAL, "letters").show_special


def test_special_tokens_stay_out_of_the_text() -> None:
    grammar = planned(HERMES, "tokens").grammar
    assert not VOCABS["tokens"].fits(grammar, "a<|im_start|>b")


def test_tools_that_must_not_be_called_are_not_shown() -> None:
    assert planned(HERMES, "letters", "none") == OutputPlan()
    shown = planned(HERMES, "letters").tools
    assert [tool["function"] for tool in shown] == [TOOLS[0]["function"], {"name": "stop-all"}]
    # The choice among tools leaves what is shown as it is, and so a cached prompt.
    assert planned(HERMES, "letters", ALLOWED).tools == shown


@pytest.mark.parametrize(
    ("choice", "called", "reason", "told"),
    [
        (None, True, "stop", "tool_calls"),
        (None, False, "stop", "stop"),
        (None, True, "length", "length"),
        ("required", True, "stop", "tool_calls"),
        (NAMED, True, "stop", "stop"),
    ],
)
def test_finish_reasons(choice: Any, called: bool, reason: str, told: str) -> None:
    assert planned(HERMES, "letters", choice).finish_reason(reason, called=called) == told


def tool(parameters: Any = None, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


@pytest.mark.parametrize(
    ("given", "param", "why"),
    [
        (ToolWish(choice="auto"), "tool_choice", "only allowed with tools"),
        (wish({"type": "function", "function": {"name": "rain"}}),
         "tool_choice.function.name", "'rain' is not among tools"),
        (wish({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            NAMED, {"type": "function", "function": {"name": "rain"}}]}}),
         "tool_choice.allowed_tools.tools[1].function.name", "'rain'"),
        (wish(tools=[tool(), tool()]), "tools[1].function.name", "taken"),
        (wish(tools=[tool({"type": "string"})]), "tools[0].function.parameters", "'object'"),
        (wish(tools=[tool(), tool({"properties": {"a": {"type": "foo"}}}, "g")]),
         "tools[1].function.parameters", "foo"),
        (wish(tools=[tool({"not": {}}, strict=True)]), "tools[0].function.parameters", '"not"'),
    ],
)  # fmt: skip
def test_wishes_that_cannot_be_met(given: ToolWish, param: str, why: str) -> None:
    checker = GrammarChecker()
    with pytest.raises(ApiError, match=why) as error:
        asyncio.run(checker.check(Planner(Vocabulary.of(bare())).plan(given)))
    assert (error.value.status, error.value.param) == (400, param)
    checker.close()


def test_without_strict_a_keyword_that_no_grammar_holds_is_let_go() -> None:
    checker = GrammarChecker()
    loose = wish(tools=[tool({"not": {"required": ["a"]}, "properties": {"b": {}}})])
    asyncio.run(checker.check(Planner(Vocabulary.of(bare())).plan(loose)))
    checker.close()


@pytest.mark.parametrize(
    "tools", [[], [{}], [{"type": "custom", "custom": {"name": "f"}}], [tool(name="a b")],
              [tool(name="a" * 65)], [tool("x")], [tool()] * 129, [tool(code=1)]],
)  # fmt: skip
def test_tools_are_checked(tools: Any) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Tools).validate_python(tools)


@pytest.mark.parametrize("choice", ["any", 3, {}, {"type": "function"}, {"type": "custom"}])
def test_choices_are_checked(choice: Any) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(ToolChoice).validate_python(choice)


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        (STYLES["chatml"], HERMES),
        (STYLES["llama3"], LLAMA3_JSON),
        ("{{ '[AVAILABLE_TOOLS]' }}[TOOL_CALLS]", MISTRAL),
        ("[TOOL_CALLS]{{ name }}[ARGS]", MISTRAL_ARGS),
        ("", HERMES),
    ],
)
def test_the_template_shows_the_syntax(template: str, syntax: Syntax) -> None:
    assert detect(template) == syntax
