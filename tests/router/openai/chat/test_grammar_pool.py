"""Hostile grammars, and what they cost: their own client a refusal, others nothing."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from router.common.child_pool import ROOT
from router.common.errors import ApiError
from router.openai.bodies.grammar_source import GrammarSource, schema_source
from router.openai.chat.grammar_checker import GrammarChecker
from router.openai.chat.grammar_child import CompileRequest, GrammarVerdict
from router.openai.chat.output_plan import OutputPlan
from router.openai.chat.verdict_cache import (
    MAX_CACHED_CHARS,
    MAX_TENANT_CHARS,
    MAX_VERDICTS,
    REFUSAL_TTL_S,
    VerdictCache,
)
from tests.router.openai.chat.toy import byte_level

BOUND_S = 8.0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    byte_level().save(str(path))
    return path


@pytest.fixture
def checker(saved: Path) -> Iterator[GrammarChecker]:
    checker = GrammarChecker(saved)
    yield checker
    checker.close()


def schema(value: dict[str, Any], field: str = "f") -> OutputPlan:
    source = schema_source(value, field)
    return OutputPlan(source.grammar, (source,))


def raw(text: str) -> OutputPlan:
    return OutputPlan(text, (GrammarSource("f", text, raw=True),))


def multiple(of: int) -> OutputPlan:
    return schema({"type": "integer", "multipleOf": of})


async def refused(checker: GrammarChecker, plan: OutputPlan, tenant: str = "") -> ApiError:
    with pytest.raises(ApiError) as error:
        await checker.check(plan, tenant)
    return error.value


def gone(pid: int) -> bool:
    """Or a zombie, whose parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def cpu_seconds(pid: int) -> float:
    """Processor time of a child: what else runs on the machine does not count."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def optional(keys: int) -> OutputPlan:
    properties = {f"key{i}": {"type": "string"} for i in range(keys)}
    return schema({"type": "object", "properties": properties})


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (multiple(9_999_991), "more than 1 s"),
        (multiple(1_000_003), "more than 1 s"),
        (raw("root ::= " + "\n" * 16_370), "more than 1 s"),
        (optional(600), "max is 2000"),
    ],
    ids=["multiple", "memory", "newlines", "optional"],
)
async def test_what_costs_too_much_is_refused_by_its_field(
    checker: GrammarChecker, plan: OutputPlan, says: str
) -> None:
    start = time.perf_counter()
    worst = 0.0
    asking = asyncio.create_task(refused(checker, plan))
    while not asking.done():
        before = time.perf_counter()
        await asyncio.sleep(0.005)
        worst = max(worst, time.perf_counter() - before)
    error = await asking
    assert (error.status, error.param, error.code) == (400, "f", "schema_too_large")
    assert says in error.message and "f is too complex" in error.message
    assert time.perf_counter() - start < BOUND_S
    assert worst < 1.0, "streams go on meanwhile"
    start = time.perf_counter()
    assert (await refused(checker, plan)).message == error.message
    assert time.perf_counter() - start < 0.5, "it is known by now: a trial takes twice that in CPU"
    assert (await checker.check(optional(3))).grammar


async def test_the_costly_one_of_many_is_named(checker: GrammarChecker) -> None:
    sources = (
        schema_source({"type": "object"}, "tools[0].function.parameters"),
        schema_source({"multipleOf": 9_999_991}, "tools[1].function.parameters"),
    )
    error = await refused(checker, OutputPlan("the whole is never reached", sources))
    assert error.param == "tools[1].function.parameters"


def leave_memory(pid: int, kib: int) -> None:
    """Beside what it has."""
    has = int(Path(f"/proc/{pid}/status").read_text().split("VmData:")[1].split()[0])
    resource.prlimit(pid, resource.RLIMIT_DATA, ((has + kib) << 10,) * 2)


async def test_memory_runs_out_for_the_child_alone(checker: GrammarChecker) -> None:
    await checker.check(optional(1))
    [pid] = checker.pool.pids
    leave_memory(pid, 1024)
    error = await refused(checker, multiple(20_011))
    assert (error.status, error.code) == (400, "schema_too_large") and "MiB" in error.message
    assert gone(pid)
    assert (await checker.check(multiple(20_021))).grammar, "as much as that is fine"


async def test_nobody_waits_behind_another_tenants_flood(checker: GrammarChecker) -> None:
    await checker.check(optional(1), "good")
    flood = [
        asyncio.create_task(checker.check(multiple(9_999_991 + 2 * i), "bad")) for i in range(6)
    ]
    await asyncio.sleep(0.1)
    waits = []
    for i in range(2, 6):
        start = time.perf_counter()
        await checker.check(optional(i), "good")
        waits.append(time.perf_counter() - start)
    errors = await asyncio.gather(*flood, return_exceptions=True)
    assert max(waits) < 3.0 and sorted(waits)[1] < 1.0, "a child to start at most"
    told = {error.status for error in errors if isinstance(error, ApiError)}
    assert len(errors) == 6 and told <= {400, 429} and 400 in told
    late = [e for e in errors if isinstance(e, ApiError) and e.status == 429]
    assert late and all(e.headers["retry-after"] for e in late), "5 s are no time for six"


async def test_a_killed_child_is_replaced(checker: GrammarChecker) -> None:
    await checker.check(optional(1))
    [idle] = checker.pool.pids
    os.kill(idle, signal.SIGKILL)
    assert (await checker.check(optional(2))).grammar, "between trials"
    [at_work] = checker.pool.pids
    asking = asyncio.create_task(checker.check(multiple(20_011)))  # some 0.1 s
    await asyncio.sleep(0.03)
    os.kill(at_work, signal.SIGKILL)
    assert (await asking).grammar, "in the middle"
    [again] = checker.pool.pids
    assert len({idle, at_work, again}) == 3 and gone(idle) and gone(at_work)


async def test_half_a_character_is_no_grammar(checker: GrammarChecker) -> None:
    error = await refused(checker, raw('start: "\ud800"'))
    assert (error.status, error.param) == (400, "f") and "surrogate" in error.message


async def test_close_leaves_no_child_and_nobody_waiting(checker: GrammarChecker) -> None:
    await checker.check(optional(1))
    asking = asyncio.create_task(refused(checker, multiple(9_999_991)))
    await asyncio.sleep(0.1)
    pids = checker.pool.pids
    assert pids
    checker.close()
    assert (await asking).status == 429
    assert all(gone(pid) for pid in pids) and not checker.pool.pids


def test_a_router_that_is_killed_leaves_no_child(saved: Path) -> None:
    code = (
        "import sys, pathlib, time\n"
        "from router.openai.chat.grammar_pool import CompilePool\n"
        "from router.openai.chat.grammar_child import CompileRequest\n"
        "trials = CompilePool(pathlib.Path(sys.argv[1]))\n"
        "trials.compile(CompileRequest(('{',)), 5.0)\n"
        "print(trials.pids[0], flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(saved)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as router:
        assert router.stdout is not None
        pid = int(router.stdout.readline())
        assert not gone(pid)
        router.kill()
    until = time.monotonic() + BOUND_S
    while not gone(pid):
        assert time.monotonic() < until
        time.sleep(0.01)


async def test_a_tokenizer_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    checker = GrammarChecker(tmp_path / "tokenizer.json")
    error = await refused(checker, optional(1))
    assert error.status == 400 and "the model's tokenizer" in error.message
    checker.close()


async def test_a_common_schema_costs_little(checker: GrammarChecker) -> None:
    await checker.check(optional(1))
    [pid] = checker.pool.pids
    before = cpu_seconds(pid)
    for i in range(2, 22):
        await checker.check(optional(i))
    assert checker.pool.pids == [pid]
    assert (cpu_seconds(pid) - before) / 20 < 0.02, "1 to 5 ms"


async def test_no_tenant_learns_what_another_has_sent(checker: GrammarChecker) -> None:
    """Neither by the time of an answer nor by a cached error."""
    compile_one, compiled = checker.pool.compile, 0

    def counted(request: CompileRequest, seconds: float) -> GrammarVerdict:
        nonlocal compiled
        compiled += 1
        return compile_one(request, seconds)

    checker.pool.compile = counted  # type: ignore[method-assign]
    for tenant in ("one", "other", "one", "other"):
        await checker.check(optional(2), tenant)
    assert compiled == 2


def test_verdicts_are_kept_within_bounds_and_bad_ones_for_a_while() -> None:
    now = 0.0
    known = VerdictCache(lambda: now)
    known.put("t", "bad", GrammarVerdict("no"))
    known.put("t", "good", GrammarVerdict())
    now = REFUSAL_TTL_S + 1
    assert known.get("t", "bad") is None and known.get("t", "good") == GrammarVerdict()
    for i in range(MAX_VERDICTS):
        known.put("t", str(i), GrammarVerdict())
    assert known.get("t", "good") is None and known.get("t", "0") is not None
    known.put("t", "x" * (MAX_TENANT_CHARS - 4096), GrammarVerdict())
    assert known.get("t", "1") is None
    assert known.get("t", "x" * (MAX_TENANT_CHARS - 4096)) is not None


def test_a_flood_of_one_tenant_drops_no_verdict_of_another() -> None:
    known = VerdictCache()
    known.put("small", "g", GrammarVerdict())
    for i in range(2 * MAX_CACHED_CHARS // MAX_TENANT_CHARS):
        known.put(f"large{i}", "x" * (MAX_TENANT_CHARS - 4096), GrammarVerdict())
        known.put("large0", f"{i}" * (256 << 10), GrammarVerdict())
    assert known.get("small", "g") is not None
    assert known._chars <= MAX_CACHED_CHARS
    assert known._chars == sum(each.chars for each in known._tenants.values())
    assert known.get("large1", "x" * (MAX_TENANT_CHARS - 4096)) is None
