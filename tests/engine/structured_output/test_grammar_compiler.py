"""Compiling off the loop, masks, and masks after drafts."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import pytest

from engine.ipc import messages as m
from engine.kv_cache.kv_format import Codec
from engine.structured_output import compiler as compiling
from engine.structured_output.compiler import Compiler, Outcome
from engine.structured_output.matcher import Matcher
from engine.structured_output.pending_commands import Parking
from protocol.errors import InvalidRequest, Unavailable
from protocol.requests import Request, Sampling
from tests.engine.grammars import Constrained, allowed, regex, save_tokenizer, schema


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def constrained(folder: Path) -> Constrained:
    return Constrained(folder, 320, (2,))


def taken(compiler: Compiler, count: int) -> dict[int, Outcome]:
    out: dict[int, Outcome] = {}
    until = time.monotonic() + 20
    while len(out) < count:
        assert time.monotonic() < until
        out |= dict(compiler.take())
        time.sleep(0.001)
    return out


def asked(handle: int, grammar: str) -> m.Generate:
    request = Request(id="r", prompt=(5,), sampling=Sampling(grammar=grammar))
    return m.Generate(handle, request)


# ---- compiling --------------------------------------------------------------------------------


def test_what_was_compiled_once_is_known(folder: Path) -> None:
    compiler = Compiler(folder, 320, [2])
    grammar = regex("ab")
    assert compiler.get(grammar) is None
    compiler.ask(1, grammar)
    compiler.ask(2, grammar)
    first, second = taken(compiler, 2).values()
    assert isinstance(first, Matcher) and isinstance(second, Matcher)
    known = compiler.get(grammar)
    assert known is not None
    a = allowed(known)
    assert first.advance(a[0]) and allowed(second) == a, "each has its own place"


def test_only_so_many_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "KEPT", 2)
    compiler = Compiler(folder, 320, [2])
    for i in range(4):
        compiler.ask(i, regex(f"a{{{i + 1}}}"))
        taken(compiler, 1)
        compiler.get(regex("a{1}"))
    assert [compiler.get(regex(f"a{{{i + 1}}}")) is not None for i in range(4)] == [
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
def test_a_wrong_grammar_says_what_is_wrong(folder: Path, grammar: str, says: str) -> None:
    compiler = Compiler(folder, 320, [2])
    compiler.ask(1, grammar)
    [problem] = taken(compiler, 1).values()
    assert isinstance(problem, InvalidRequest)
    assert (problem.param, problem.code) == ("response_format", "invalid_grammar")
    assert says in str(problem)
    assert compiler.get(grammar) is None


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_a_folder_without_a_tokenizer_refuses_grammars(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    compiler = Compiler(tmp_path, 320, [2])
    compiler.ask(1, regex("a"))
    [problem] = taken(compiler, 1).values()
    assert isinstance(problem, InvalidRequest)
    assert "tokenizer.json cannot be read" in str(problem)
    assert str(tmp_path) not in str(problem)


def test_many_characters_are_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "KEPT_CHARS", 100)
    compiler = Compiler(folder, 320, [2])
    for pattern in ("ab", "a" * 30, "b" * 90):
        compiler.ask(1, regex(pattern))
        taken(compiler, 1)
    known = [compiler.get(regex(p)) is not None for p in ("ab", "a" * 30, "b" * 90)]
    assert known == [False, False, False]


def test_nobody_waits_for_longer_than_the_deadline(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(Compiler, "_compile", lambda self, grammar: go_on.wait(20))
    now = 0.0
    compiler = Compiler(folder, 320, [2], clock=lambda: now)
    for handle in range(4):
        compiler.ask(handle, regex("a" * (handle + 1)))
    until = time.monotonic() + 20
    while sum(a.work.began is not None for a in compiler._asked.values()) < compiling.THREADS:
        assert time.monotonic() < until
        time.sleep(0.001)
    now = compiling.COMPILE_S - 0.1
    assert compiler.take() == []
    now = compiling.COMPILE_S
    slow = dict(compiler.take())
    now = compiling.DEADLINE_S
    behind = dict(compiler.take())
    go_on.set()
    assert sorted(slow) == [0, 1] and sorted(behind) == [2, 3]
    assert all(isinstance(problem, InvalidRequest) for problem in slow.values())
    assert all("within 5 s" in str(problem) for problem in slow.values())
    assert all(isinstance(problem, Unavailable) for problem in behind.values()), "not its fault"
    assert not compiler.busy


def test_a_bug_in_the_parser_costs_one_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        pass

    def panic(self: Compiler, grammar: str) -> Matcher:
        raise Panic

    monkeypatch.setattr(Compiler, "_compile", panic)
    compiler = Compiler(folder, 320, [2])
    compiler.ask(1, regex("a"))
    [problem] = taken(compiler, 1).values()
    assert isinstance(problem, InvalidRequest) and "failed with Panic" in str(problem)


# ---- parking ----------------------------------------------------------------------------------


def until_ready(parking: Parking) -> list[m.Command]:
    until = time.monotonic() + 20
    while not (ready := parking.take()):
        assert time.monotonic() < until
        time.sleep(0.001)
    [(_, commands, problem)] = ready
    assert problem is None
    return commands


def test_commands_wait_in_order_for_their_own_grammar_only(folder: Path) -> None:
    parking = Parking(Compiler(folder, 320, [2]))
    first = asked(1, regex("abc"))
    prefill = m.Prefill(1, first.request, 0, 1024, Codec.RAW)
    assert parking.keeps(prefill)
    assert parking.keeps(m.Grant(1, 3)) and parking.keeps(m.Grant(1, 4))
    assert not parking.keeps(asked(2, "")) and not parking.keeps(m.Grant(2, 3))
    assert not parking.keeps(m.SlotsFree([1]))
    assert until_ready(parking) == [prefill, m.Grant(1, 3), m.Grant(1, 4)]
    assert parking.matcher(1) is not None and parking.matcher(1) is None
    assert not parking.keeps(m.Grant(1, 5)) and not parking.busy
    again = msgspec.structs.replace(first, handle=3)
    assert not parking.keeps(again), "the grammar is known by now"
    assert parking.matcher(3) is not None


def test_who_is_dropped_waits_no_longer(folder: Path) -> None:
    parking = Parking(Compiler(folder, 320, [2]))
    assert parking.keeps(asked(1, regex("abc")))
    assert parking.keeps(m.Drop(1))
    assert not parking.busy and parking.take() == []
