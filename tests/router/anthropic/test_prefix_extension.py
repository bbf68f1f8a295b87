"""Each prompt of an agent's session extends the last prompt and its output, token for token.

Then a prefix cache has everything but the new messages. A template that writes earlier turns anew
breaks this, whatever the router does; what that costs is measured here, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.anthropic.agent_templates import MODELS, Written
from tests.router.anthropic.sessions import Client, Server, common_prefix

words = st.text("abc é🦊<|{}\"\\'.", min_size=1, max_size=12)
texts = st.builds("T{}x".format, words)
arguments = st.dictionaries(
    words,
    st.one_of(texts, st.integers(-99, 99), st.booleans(), st.none(), st.lists(texts)),
    max_size=3,
)
calls = st.tuples(st.sampled_from(["Read", "Edit", "Bash"]), arguments)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    made = {name: Server(model, tmp_path_factory.mktemp(name)) for name, model in MODELS.items()}
    yield made
    for server in made.values():
        server.close()


class Session:
    """One conversation; ``turn`` returns how much of the last prompt and output the new one has."""

    def __init__(self, server: Server, name: str, client: Client) -> None:
        self.server, self.model, self.client = server, MODELS[name], client
        self.past: list[int] = []

    def turn(self, written: Written) -> tuple[int, int]:
        """Let the model answer. Return the tokens of the last prompt and output, and how many of
        them the prompt of this turn begins with."""
        ids, _, plan, request = self.server.prompt(self.client.body())
        kept, past = common_prefix(ids, self.past), len(self.past)
        text = self.model.write(written)
        self.past = ids + self.server.tokenizer.encode(text, add_special_tokens=False).ids
        shown = text.removesuffix("<|im_end|>")
        self.client.assistant(self.server.answer(plan, request, shown))
        return past, kept


def play(draw: st.DataObject, session: Session, *, new_queries: bool) -> Iterator[tuple[int, int]]:
    """Yield what each turn of a session keeps. ``new_queries``: the user speaks again."""
    model, client = session.model, session.client
    client.user(*draw.draw(st.lists(texts, min_size=1, max_size=2)))
    if draw.draw(st.booleans()):
        client.system(draw.draw(texts))
    for _ in range(draw.draw(st.integers(2, 5))):
        called = draw.draw(st.lists(calls, max_size=3)) if model.calls else []
        content = draw.draw(texts if not called else st.one_of(st.just(""), texts))
        if model.template == MODELS["demo"].template and called:
            content = content or "Tx"  # see test_the_demo_template_...
        reasoning = draw.draw(texts) if model.reasons else ""
        yield session.turn(Written(reasoning, content, called))
        reminder = draw.draw(st.sampled_from(["none", "before", "after"]))
        if reminder == "before":
            client.system(draw.draw(texts))
        if called:
            more = tuple(draw.draw(st.lists(texts, max_size=1))) if new_queries else ()
            client.results(
                [draw.draw(texts) for _ in called], more=more, failed=draw.draw(st.booleans())
            )
        elif new_queries:
            client.user(draw.draw(texts))
        else:
            return
        if reminder == "after":
            client.system(draw.draw(texts))


@settings(deadline=None, max_examples=40)
@given(st.data(), st.sampled_from(["chatml", "chatml_tools", "demo"]))
def test_each_prompt_extends_the_last_one(
    servers: dict[str, Server], data: st.DataObject, name: str
) -> None:
    client = Client(data.draw(st.lists(texts, max_size=2)), tools=MODELS[name].calls)
    session = Session(servers[name], name, client)
    for past, kept in play(data, session, new_queries=True):
        assert kept == past


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_reasoning_is_kept_while_tools_are_called(
    servers: dict[str, Server], data: st.DataObject
) -> None:
    client = Client(["Be brief."], tools=True, thinking={"type": "adaptive", "display": "omitted"})
    session = Session(servers["qwen3"], "qwen3", client)
    for past, kept in play(data, session, new_queries=False):
        assert kept == past


def turns(session: Session, *steps: Any) -> list[tuple[int, int]]:
    """Run steps: a ``Written`` is a turn of the model, a function is the client's."""
    kept = []
    for step in steps:
        if isinstance(step, Written):
            kept.append(session.turn(step))
        else:
            step(session.client)
    return kept


def reads(text: str) -> Written:
    return Written(f"Thought about {text}", f"Reading {text}", [("Read", {"path": text})])


def test_qwen3_forgets_reasoning_when_the_user_speaks_again(servers: dict[str, Server]) -> None:
    """Its template drops the reasoning before the last user message: the first turn that had some
    is computed anew, and all that follows."""
    server = servers["qwen3"]
    session = Session(server, "qwen3", Client(["Be brief."], tools=True))
    session.client.user("Fix it")
    first = len(server.prompt(session.client.body())[0])
    *loop, last = turns(
        session,
        reads("a.py"),
        lambda client: client.results(["a"]),
        reads("b.py"),
        lambda client: client.results(["b"]),
        Written("Done thinking", "Fixed", []),
        lambda client: client.user("Now test it"),
        reads("c.py"),
    )
    assert all(past == kept for past, kept in loop)
    assert last[1] == first, "all turns of the model since the first user message are lost"
    assert last[0] > first + 100


def test_qwen3_without_thinking_recomputes_the_last_turn(servers: dict[str, Server]) -> None:
    """Its generation prompt ends with an empty pair of marks, which no later prompt contains."""
    server = servers["qwen3"]
    client = Client([], tools=True, thinking={"type": "disabled"})
    session = Session(server, "qwen3", client)
    client.user("Fix it")
    read = Written("", "Reading", [("Read", {"path": "a.py"})])
    _, second, third = turns(
        session,
        read,
        lambda client: client.results(["a"]),
        read,
        lambda client: client.results(["b"]),
        Written("", "Done", []),
    )
    for past, kept in (second, third):
        assert past > kept > 0
    assert third[1] > second[0], "only the last turn of the model is lost each time"


def test_the_demo_template_recomputes_a_turn_of_calls_alone(servers: dict[str, Server]) -> None:
    """It writes no line break before calls without text, but one in the generation prompt."""
    session = Session(servers["demo"], "demo", Client([], tools=True))
    session.client.user("Fix it")
    _, (past, kept) = turns(
        session,
        Written("", "", [("Read", {"path": "a.py"})]),
        lambda client: client.results(["a"]),
        Written("", "Done", []),
    )
    assert past > kept
