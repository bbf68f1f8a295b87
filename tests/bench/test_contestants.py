"""The children of bench.engine: same prompts, same text, and a failure is a report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.engine.__main__ import EngineResults, against_peers, prompts
from bench.engine.contestants import (
    ENGINE,
    KINDS,
    ContestantJob,
    ContestantProcess,
    ContestantRun,
    steady_rate,
)
from tests.engine.families import save


def test_the_steady_rate_counts_only_while_all_decode() -> None:
    first = [1.0, 2.0, 3.0, 4.0, 5.0]
    second = [3.0, 4.0, 5.0, 6.0]
    assert steady_rate([first, second]) == pytest.approx(4 / 2.0)  # (3, 5]: two tokens each
    assert steady_rate([first]) == pytest.approx(1.0)
    assert steady_rate([[1.0, 2.0], [5.0, 6.0]]) == 0.0


@pytest.fixture(scope="module")
def children() -> Iterator[dict[str, ContestantProcess]]:
    found = {kind: ContestantProcess(kind, core=None) for kind in KINDS}
    yield found
    for child in found.values():
        child.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("contest"))


@pytest.mark.long
def test_all_say_the_same(children: dict[str, ContestantProcess], folder: Path) -> None:
    job = ContestantJob(prompts=prompts(3, vocab=320, seed=4), new_tokens=6)
    runs = {}
    for kind, child in children.items():
        assert child.ask(ContestantJob(load=str(folder))).error == ""
        runs[kind] = child.ask(job)
        assert runs[kind].error == "" and runs[kind].wall_s > 0 and runs[kind].decode_rate > 0
    assert [len(text) for text in runs[ENGINE].tokens] == [6] * 3
    ends = runs[ENGINE].tokens[0][2]
    found = EngineResults({kind: [run] for kind, run in runs.items()})
    assert [found.agreeing(kind) for kind in KINDS] == [(3, 3)] * 3
    # The same with an end token in the middle: nobody ends there, or pads from there on.
    for path in (folder / "config.json", folder / "generation_config.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    for kind, child in children.items():
        child.ask(ContestantJob(load=str(folder)))
        assert child.ask(job).tokens == runs[ENGINE].tokens, kind


def test_who_fails_is_out_and_says_why(
    children: dict[str, ContestantProcess], tmp_path: Path
) -> None:
    """The last test with these children."""
    for child in children.values():
        error = child.ask(ContestantJob(load=str(tmp_path / "none"))).error
        assert str(tmp_path / "none") in error
        assert child.ask(ContestantJob(prompts=[[3]], new_tokens=1)).error == error


def test_a_child_that_ends_is_reported() -> None:
    child = ContestantProcess("nobody", core=None)
    assert "KeyError: 'nobody'" in child.ask(ContestantJob(load="x")).error
    child.close()


def test_who_is_out_has_no_row() -> None:
    found = EngineResults({kind: [ContestantRun(error="gone")] for kind in KINDS})
    assert found.middle("generate", "decode_rate") == 0.0
    rows = list(against_peers("x", 10.0, {"generate": 4.0, "generate_batch": 5.0, "out": 0.0}))
    assert [row.against.split()[0] for row in rows] == ["generate_batch", "generate"]
    assert rows[0].ratio == pytest.approx(2.0)
