"""Compiling off the loop, masks, and masks after drafts."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import pytest

from engine.ipc import messages as m
from engine.kv_cache.kv_format import Codec
from engine.process.pending_commands import PendingCommands
from engine.structured_output import compiler as compiling
from engine.structured_output.compiler import CompileResult, GrammarCompiler
from engine.structured_output.matcher import GrammarMatcher
from protocol.errors import InvalidRequest, Unavailable
from protocol.requests import Request
from protocol.sampling_params import SamplingParams
from tests.engine.grammars import Constrained, allowed, regex, save_tokenizer, schema


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def constrained(folder: Path) -> Constrained:
    return Constrained(folder, 320, (2,))


def wait_for_results(compiler: GrammarCompiler, count: int) -> dict[int, CompileResult]:
    out: dict[int, CompileResult] = {}
    until = time.monotonic() + 20
    while len(out) < count:
        assert time.monotonic() < until
        out |= dict(compiler.take_finished())
        time.sleep(0.001)
    return out


def generate_command(handle: int, grammar: str) -> m.Generate:
    request = Request(id="r", prompt=(5,), sampling=SamplingParams(grammar=grammar))
    return m.Generate(handle, request)


# ---- compiling --------------------------------------------------------------------------------


def test_compiled_grammar_is_cached(folder: Path) -> None:
    compiler = GrammarCompiler(folder, 320, [2])
    grammar = regex("ab")
    assert compiler.get_cached(grammar) is None
    compiler.submit(1, grammar)
    compiler.submit(2, grammar)
    first, second = wait_for_results(compiler, 2).values()
    assert isinstance(first, GrammarMatcher) and isinstance(second, GrammarMatcher)
    known = compiler.get_cached(grammar)
    assert known is not None
    a = allowed(known)
    assert first.advance(a[0]) and allowed(second) == a, "each has its own place"


def test_cache_evicts_the_least_recently_used_grammar(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "MAX_CACHED_GRAMMARS", 2)
    compiler = GrammarCompiler(folder, 320, [2])
    for i in range(4):
        compiler.submit(i, regex(f"a{{{i + 1}}}"))
        wait_for_results(compiler, 1)
        compiler.get_cached(regex("a{1}"))
    assert [compiler.get_cached(regex(f"a{{{i + 1}}}")) is not None for i in range(4)] == [
        *(True, False, False, True)
    ]


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ("{", "EOF while parsing"),
        ('{"grammars": [{"lark_grammar": "start: foo"}]}', "unknown name"),
        (schema({"type": "nonsense"}), "Invalid type"),
        (schema({"type": "string", "minLength": 5, "maxLength": 2}), "Unsatisfiable"),
        (regex("(a"), "regex parse error"),
    ],
)
def test_invalid_grammar_is_refused_with_the_reason(folder: Path, grammar: str, says: str) -> None:
    compiler = GrammarCompiler(folder, 320, [2])
    compiler.submit(1, grammar)
    [problem] = wait_for_results(compiler, 1).values()
    assert isinstance(problem, InvalidRequest)
    assert (problem.param, problem.code) == ("response_format", "invalid_grammar")
    assert says in str(problem)
    assert compiler.get_cached(grammar) is None


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_a_folder_without_a_tokenizer_refuses_grammars(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    compiler = GrammarCompiler(tmp_path, 320, [2])
    compiler.submit(1, regex("a"))
    [problem] = wait_for_results(compiler, 1).values()
    assert isinstance(problem, InvalidRequest)
    assert "tokenizer.json cannot be read" in str(problem)
    assert str(tmp_path) not in str(problem)


def test_cache_is_bounded_by_characters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MAX_CACHED_CHARS", 100)
    compiler = GrammarCompiler(folder, 320, [2])
    for pattern in ("ab", "a" * 30, "b" * 90):
        compiler.submit(1, regex(pattern))
        wait_for_results(compiler, 1)
    known = [compiler.get_cached(regex(p)) is not None for p in ("ab", "a" * 30, "b" * 90)]
    assert known == [False, False, False]


def test_slow_and_queued_grammars_end_at_their_deadlines(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(GrammarCompiler, "_compile", lambda self, grammar: go_on.wait(20))
    now = 0.0
    compiler = GrammarCompiler(folder, 320, [2], clock=lambda: now)
    for handle in range(4):
        compiler.submit(handle, regex("a" * (handle + 1)))
    until = time.monotonic() + 20
    while (
        sum(w.job.began is not None for w in compiler._waiting.values()) < compiling.COMPILE_THREADS
    ):
        assert time.monotonic() < until
        time.sleep(0.001)
    now = compiling.MAX_COMPILE_S - 0.1
    assert compiler.take_finished() == []
    now = compiling.MAX_COMPILE_S
    slow = dict(compiler.take_finished())
    now = compiling.COMPILE_DEADLINE_S
    behind = dict(compiler.take_finished())
    go_on.set()
    assert sorted(slow) == [0, 1] and sorted(behind) == [2, 3]
    assert all(isinstance(problem, InvalidRequest) for problem in slow.values())
    assert all("within 5 s" in str(problem) for problem in slow.values())
    assert all(isinstance(problem, Unavailable) for problem in behind.values()), "not its fault"
    assert not compiler._waiting


def test_a_panic_of_the_parser_refuses_one_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        pass

    def panic(self: GrammarCompiler, grammar: str) -> GrammarMatcher:
        raise Panic

    monkeypatch.setattr(GrammarCompiler, "_compile", panic)
    compiler = GrammarCompiler(folder, 320, [2])
    compiler.submit(1, regex("a"))
    [problem] = wait_for_results(compiler, 1).values()
    assert isinstance(problem, InvalidRequest) and "failed with Panic" in str(problem)


# ---- pending ----------------------------------------------------------------------------------


def wait_until_released(pending: PendingCommands) -> list[m.Command]:
    until = time.monotonic() + 20
    while not (ready := pending.take_released()):
        assert time.monotonic() < until
        time.sleep(0.001)
    [(_, commands, problem)] = ready
    assert problem is None
    return commands


def test_commands_are_held_in_order_for_their_own_grammar_only(folder: Path) -> None:
    pending = PendingCommands(GrammarCompiler(folder, 320, [2]))
    first = generate_command(1, regex("abc"))
    prefill = m.Prefill(1, first.request, 1024, Codec.RAW)
    assert pending.hold(prefill)
    assert pending.hold(m.Reserve(1)) and pending.hold(m.Join(1, 3, 4))
    assert not pending.hold(generate_command(2, "")) and not pending.hold(m.Reserve(2))
    assert not pending.hold(m.TakeRole("prefill"))
    assert wait_until_released(pending) == [prefill, m.Reserve(1), m.Join(1, 3, 4)]
    assert pending.take_matcher(1) is not None and pending.take_matcher(1) is None
    assert not pending.hold(m.Reserve(1)) and not pending.busy
    again = msgspec.structs.replace(first, handle=3)
    assert not pending.hold(again), "the grammar is known by now"
    assert pending.take_matcher(3) is not None


def test_drop_forgets_held_commands(folder: Path) -> None:
    pending = PendingCommands(GrammarCompiler(folder, 320, [2]))
    assert pending.hold(generate_command(1, regex("abc")))
    assert pending.hold(m.Drop(1))
    assert not pending.busy and pending.take_released() == []
