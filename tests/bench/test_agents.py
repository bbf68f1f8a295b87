"""The session of ``bench.agents`` against a router with a scripted model."""

from __future__ import annotations

from pathlib import Path

from bench.agents import ALONE, AgentServer, PlayedSession, TurnFigures, play, rows, word_bias
from cluster.models.locate import demo_path
from router.text.vocabulary import load_tokenizer
from tests.router.anthropic.agent_templates import Written
from tests.router.scripted_model import MODEL, scripted_router

CALL = Written("", "", [("exec_command", {"cmd": "ls -l /work"})])


async def test_a_session_replays_what_the_model_has_written(tmp_path: Path) -> None:
    async with scripted_router(tmp_path, [CALL, CALL, Written("", "Done.", [])]) as router:
        played = await play(AgentServer(router.url, MODEL, True, {}), 3, 1)
    prompts = [len(turn.prompt) for turn in router.turns]
    assert [turn.prompt for turn in played.turns] == prompts[:3]
    assert played.uncached.prompt == prompts[2]
    assert all(past == kept for past, kept in router.kept()[:2])
    new = prompts[2] - prompts[1] - played.turns[1].output
    assert [turn.prompt for turn in played.alone] == [len(turn.prompt) for turn in router.side]
    assert len(played.alone) == ALONE
    assert all(new <= turn.prompt < new + 16 for turn in played.alone)
    assert all(turn.ttft_s > 0 for turn in [*played.turns, *played.alone, played.uncached])


def test_figures() -> None:
    turns = [TurnFigures(1.0, 100, 0, 10), TurnFigures(0.5, 130, 99, 10)]
    session = PlayedSession(turns, [TurnFigures(0.4, 20, 0, 4)] * 3, TurnFigures(2.0, 130, 0, 4))
    found = rows([session, session])
    assert {row.name: row.value for row in found} == {
        "prompt of the last turn": 130,
        "new in a turn": 20,
        "computed in a turn": 31,
        "cached share": 0.9,
        "TTFT of the new tokens alone": 400,
        "TTFT of turn 2": 500,
        "TTFT of turn 2 without a cache": 2000,
    }
    assert [row.ratio for row in found if row.against] == [0.9, 0.8, 4]


def test_biased_words_are_tokens_of_their_own() -> None:
    tokenizer = load_tokenizer(str(demo_path()))
    ids = [int(token) for token in word_bias(demo_path())]
    assert len(ids) >= 8
    text = tokenizer.decode(ids)
    assert tokenizer.encode(text, add_special_tokens=False).ids == ids
