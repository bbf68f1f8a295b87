"""Output under a grammar: it fits, it depends on the request alone, and it ends."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits

from bench.lib.engines import engine_config
from engine.execution.engine import Engine
from engine.execution.stepper import TokenOut
from engine.model.decoder import DecoderModel
from engine.scheduling.step_policy import plan_decode_step
from engine.structured_output.matcher import GrammarMatcher
from protocol.errors import InvalidRequest
from protocol.requests import Finish, Request
from tests.engine.conftest import drain, load_model, request
from tests.engine.families import save
from tests.engine.grammars import Constrained, regex, save_tokenizer, schema, schemas

DEMO = Path("engine/demo/target")
EOS = 2
Make = Callable[..., Engine]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "yy", "zzz"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_p": 0.5},
    {"top_k": 3},
    {"min_p": 0.2, "temperature": 2.0},
    {"frequency_penalty": 2.0, "repetition_penalty": 1.5},
    {"logit_bias": ((EOS, 50.0), (64, -100.0))},
    {"min_tokens": 30, "ignore_eos": False},
    {"logprobs": 3},
    {"ignore_eos": False, "stop_token_ids": (EOS,)},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save(tmp_path_factory.mktemp("grammar")))


@pytest.fixture(scope="module")
def model(folder: Path) -> DecoderModel:
    return load_model(folder)


@pytest.fixture(scope="module")
def constrained(folder: Path) -> Constrained:
    return Constrained(folder, 320, (EOS,))


@pytest.fixture
def make(model: DecoderModel) -> Make:
    def build(**changes: Any) -> Engine:
        sizes = {"pages": 64, "max_batch": 8, "chunk": 64, "max_model_len": 1024, **changes}
        return Engine(model, engine_config(**sizes), plan_decode_step)

    return build


def wish(name: str, wanted: dict[str, Any], prompt: list[int] | None = None, **s: Any) -> Request:
    options = {"temperature": 1.0, "max_tokens": 300, "grammar": schema(wanted), **s}
    return request(name, prompt or [5, 6, 7], **options)


def finishes(engine: Engine) -> dict[int, tuple[list[int], Finish]]:
    out: dict[int, tuple[list[int], Finish]] = {}
    while step := engine.plan():
        for t in engine.run(step):
            tokens, _ = out.get(t.handle, ([], Finish.NONE))
            out[t.handle] = ([*tokens, t.token], t.finish)
    return out


def assert_fits(constrained: Constrained, tokens: list[int], wanted: dict[str, Any]) -> None:
    assert tokens[-1] == EOS
    jsonschema.validate(json.loads(constrained.decode(tokens[:-1])), wanted)


@given(wanted=schemas, seed=st.integers(0, 2**63 - 1), kind=st.sampled_from(KINDS))
def test_output_matches_random_schemas(
    model: DecoderModel,
    constrained: Constrained,
    wanted: dict[str, Any],
    seed: int,
    kind: dict[str, Any],
) -> None:
    engine = Engine(model, engine_config(pages=64, max_model_len=1024), plan_decode_step)
    constrained.generate(engine, 0, wish("r", wanted, seed=seed, **kind))
    tokens, finish = finishes(engine)[0]
    assert finish is Finish.STOP
    assert_fits(constrained, tokens, wanted)


def test_demo_model_output_matches_a_schema() -> None:
    model = load_model(DEMO, 512)
    constrained = Constrained(DEMO, 4096, (1,))
    engine = Engine(model, engine_config(pages=64, max_model_len=512), plan_decode_step)
    prompt = constrained.text.encode("def person():\n    return ").ids
    for i, kind in enumerate(k for k in KINDS if "stop_token_ids" not in k):
        constrained.generate(engine, i, wish(f"r{i}", PERSON, prompt, seed=i, **kind))
    for tokens, finish in finishes(engine).values():
        assert (finish, tokens[-1]) == (Finish.STOP, 1)
        jsonschema.validate(json.loads(constrained.decode(tokens[:-1])), PERSON)


# ---- identity ---------------------------------------------------------------------------------


def mixed() -> list[Request]:
    """Requests of every kind under a grammar, and as many without one."""
    draw = random.Random(7)
    out = []
    for i in range(2 * len(KINDS)):
        prompt = [draw.randrange(3, 320) for _ in range(draw.choice([1, 31, 33, 90]))]
        base = {"seed": i, **KINDS[i % len(KINDS)]}
        if i < len(KINDS):
            out.append(wish(f"r{i}", PERSON, prompt, **base))
        else:
            out.append(request(f"r{i}", prompt, **{"temperature": 1.0, "max_tokens": 40, **base}))
    return out


def alone(make: Make, constrained: Constrained, r: Request) -> list[int]:
    engine = make()
    constrained.generate(engine, 0, r)
    return drain(engine)[0]


@pytest.mark.parametrize(
    "sizes", [{}, {"pages": 14, "chunk": 32}, {"chunk": 16}], ids=["batch", "preempted", "chunked"]
)
def test_constrained_text_does_not_depend_on_batching_or_speculation(
    make: Make, constrained: Constrained, sizes: dict[str, int]
) -> None:
    engine = make(**sizes)
    for i, r in enumerate(mixed()):
        constrained.generate(engine, i, r)
    together = drain(engine)
    assert bool(engine.scheduler.counters.preemptions) == ("pages" in sizes)
    for i, r in enumerate(mixed()):
        assert together[i] == alone(make, constrained, r)


def test_constrained_text_resumes_identically_at_any_token(
    make: Make, constrained: Constrained
) -> None:
    for kind in ({}, {"temperature": 0.0}, {"min_tokens": 20, "ignore_eos": False}):
        r = wish("r", PERSON, seed=11, **kind)
        whole = alone(make, constrained, r)
        engine = make()
        for cut in (*range(8), *range(8, len(whole), 5)):
            constrained.generate(engine, cut, r.resumed(whole[:cut]))
            assert drain(engine)[cut] == whole[cut:]


def test_text_without_a_grammar_is_unchanged(make: Make, constrained: Constrained) -> None:
    """A grammar that allows everything draws what no grammar draws, up to the end."""
    anything = regex(r"(?s:.*)")
    r = request("r", [5, 6, 7], temperature=1.0, max_tokens=60, seed=3, logit_bias=ASCII)
    free = alone(make, constrained, r)
    bound = request(
        "r", [5, 6, 7], temperature=1.0, max_tokens=60, seed=3, logit_bias=ASCII, grammar=anything
    )
    assert alone(make, constrained, bound) == free


ASCII = tuple((t, 40.0) for t in range(36, 90))
"""Bias towards tokens that are a character each."""


# ---- ends and refusals ------------------------------------------------------------------------


def test_grammar_ends_the_text_under_ignore_eos(make: Make, constrained: Constrained) -> None:
    engine = make()
    asked = {"ignore_eos": True, "min_tokens": 50, "stop_token_ids": (EOS,)}
    constrained.generate(engine, 0, wish("r", {"enum": ["ab"]}, **asked))
    tokens, finish = finishes(engine)[0]
    assert finish is Finish.STOP
    assert constrained.decode(tokens[:-1]) == '"ab"'


def test_min_tokens_holds_if_the_grammar_allows_it(make: Make, constrained: Constrained) -> None:
    engine = make()
    bias = ((EOS, 100.0),)
    r = request("r", [5], grammar=regex("a+"), min_tokens=9, max_tokens=20, logit_bias=bias)
    constrained.generate(engine, 0, r)
    tokens, finish = finishes(engine)[0]
    assert (constrained.decode(tokens[:-1]), finish) == ("a" * 9, Finish.STOP)


def test_logprobs_under_a_grammar_are_those_of_the_model(
    make: Make, constrained: Constrained
) -> None:
    def first(grammar: str) -> TokenOut:
        engine = make()
        r = request("r", [5, 6, 7], logprobs=20, max_tokens=1, grammar=grammar)
        constrained.generate(engine, 0, r)
        step = engine.plan()
        return engine.run(step)[0]

    free, bound = first(""), first(regex("zz"))
    assert free.logprobs is not None and bound.logprobs is not None
    assert bound.logprobs.top_logprobs == pytest.approx(free.logprobs.top_logprobs, abs=1e-5)
    assert bound.token != free.token and bound.logprobs.rank > 1


def test_emitted_tokens_outside_the_grammar_are_refused(
    make: Make, constrained: Constrained
) -> None:
    engine = make()
    r = wish("r", {"enum": ["ab"]}).resumed((50, 51))
    with pytest.raises(InvalidRequest, match="do not match the grammar") as caught:
        constrained.generate(engine, 0, r)
    assert caught.value.param == "response_format"
    assert not engine.scheduler.sequences


def test_first_token_outside_the_grammar_is_refused(make: Make, constrained: Constrained) -> None:
    engine = make()
    r = wish("r", {"enum": ["ab"]})
    engine.receive(0, r, constrained.of(r))
    engine.reserve(0)
    engine.plan()
    with pytest.raises(InvalidRequest, match="do not match the grammar"):
        engine.join(0, 50)
    assert engine.manager.available == 64


def test_grammar_without_any_allowed_token_ends_only_its_own_request(
    make: Make, constrained: Constrained
) -> None:
    """A text that the grammar lets end there ends instead."""
    engine = make()
    grammars = {0: regex("[ab]c"), 1: regex("([ab]c)?")}
    for handle, grammar in grammars.items():
        only = (200, 201)
        r = request(f"r{handle}", [5], max_tokens=5, grammar=grammar, allowed_token_ids=only)
        constrained.generate(engine, handle, r)
    other = request("o", [5, 6], max_tokens=5)
    constrained.generate(engine, 2, other)
    assert drain(engine) == {1: [EOS], 2: alone(make, constrained, other)}
    [(handle, problem)] = engine.take_refused()
    assert (handle, problem.param) == (0, "allowed_token_ids")
    assert engine.manager.available == 64


def test_too_complex_grammar_ends_only_its_own_request(
    make: Make, constrained: Constrained
) -> None:
    engine = make()
    deep = 'start: a\na: "x" a | "y" a | b "c" |\nb: a a "z"'
    limits = LLParserLimits(step_max_items=1, verbose_errors=False)
    inner = LLMatcher(
        constrained.inner, LLMatcher.grammar_from_lark(deep), log_level=0, limits=limits
    )
    r = request("r", [5], grammar=LLMatcher.grammar_from_lark(deep))
    engine.generate(0, r, GrammarMatcher(inner, constrained.inner.vocab_size))
    other = request("o", [5, 6], max_tokens=5)
    constrained.generate(engine, 1, other)
    assert drain(engine) == {1: alone(make, constrained, other)}
    [(handle, problem)] = engine.take_refused()
    assert (handle, problem.param) == (0, "response_format")
    assert "Too many items" in str(problem)
    assert engine.manager.available == 64
