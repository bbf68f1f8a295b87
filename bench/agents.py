"""An agent's session of twenty turns over two pools: how much of each prompt is computed again?

    python -m bench.agents [--shape demo|100m] [--calls] [--sessions 5] [--prefill 1] [--decode 1]

The client keeps a conversation with ``/v1/responses`` as Codex does: instructions and tools, then
turn by turn what the model writes and the output of a tool. The models know no tools, so each turn
is a text of some words, which a bias makes them take; with ``--calls`` it is a forced call, whose
text such a model cuts into other tokens than its tokenizer does.

    cached share   cached tokens of turns 2 to 20, over the tokens of their last turns' prompts and
                   outputs: all that the cluster has computed
    TTFT           of turn 20, beside a prompt of its own that is as long as what turn 20 adds, and
                   beside the same turn without a cache; medians of sessions
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from bench.lib.engines import SHAPE_100M, make
from bench.lib.http_load import session
from bench.lib.local_cluster import local_cluster
from bench.lib.report import ResultRow, finish, median
from cluster.models.locate import demo_path
from router.text.vocabulary import load_tokenizer

INSTRUCTIONS_WORDS, RESULT_WORDS = 200, 80
OUTPUT_TOKENS, LAST_TOKENS, CALL_TOKENS = 24, 4, 64
ALONE = 3
"""Prompts with new tokens alone that are sent at the end of each session."""

WORDS = (
    *("class", "return", "self", "value", "index", "for", "in", "range", "list", "def", "import"),
    *("name", "print", "open", "read", "line", "path", "file", "data", "test", "None", "True"),
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": name,
        "description": f"Runs {name}.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"cmd": {"type": "string", "minLength": 8, "maxLength": 40}},
            "required": ["cmd"],
            "additionalProperties": False,
        },
    }
    for name in ("exec_command", "read_file")
]


class AgentServer(NamedTuple):
    """What the sessions are played against."""

    url: str
    model: str
    calls: bool
    bias: Mapping[str, float]  # token id -> what is added to its logit


class TurnFigures(NamedTuple):
    """What one answer has cost."""

    ttft_s: float
    prompt: int  # tokens
    cached: int
    output: int


class PlayedSession(NamedTuple):
    turns: list[TurnFigures]
    alone: list[TurnFigures]  # prompts that are as long as what the last turn adds
    uncached: TurnFigures  # the last turn again, under another salt


class AgentSession:
    """One conversation; ``seed`` draws its words, so that no two sessions share a prefix."""

    def __init__(self, http: aiohttp.ClientSession, server: AgentServer, seed: int) -> None:
        self._http, self._server = http, server
        self._random = random.Random(seed)
        self._instructions = self.text(INSTRUCTIONS_WORDS)
        self._items: list[dict[str, Any]] = [_user(self.text(RESULT_WORDS))]

    def text(self, words: int) -> str:
        return " ".join(self._random.choice(WORDS) for _ in range(words))

    async def turn(self) -> TurnFigures:
        """Let the model write, and append that and the output of a tool."""
        choice = "required" if self._server.calls else "auto"
        limit = CALL_TOKENS if self._server.calls else OUTPUT_TOKENS
        figures, written = await self._ask(self._turn(choice), limit)
        self._items += written
        result = self.text(RESULT_WORDS)
        for item in written:
            if item["type"] == "function_call":
                output = {"type": "function_call_output", "call_id": item["call_id"]}
                self._items.append({**output, "output": result})
            else:
                self._items.append(_user(result))
        return figures

    async def last_turn(self, **fields: Any) -> TurnFigures:
        """Let the model write text, whose first token is seen at once."""
        return (await self._ask({**self._turn("auto"), **fields}, LAST_TOKENS))[0]

    async def new_tokens_alone(self, tokens: int) -> TurnFigures:
        """Send a prompt of its own with at least ``tokens`` tokens and at most a few more."""
        words, count, body = 0, 0, dict[str, Any]()
        while count < tokens:
            words += max(1, (tokens - count) // 8)
            body = {"input": [_user(self.text(words))]}
            counted = msgspec.json.encode({**body, "model": self._server.model})
            async with self._http.post(
                f"{self._server.url}/v1/responses/input_tokens", data=counted
            ) as reply:
                count = (await reply.json())["input_tokens"]
        return (await self._ask(body, LAST_TOKENS))[0]

    def _turn(self, tool_choice: str) -> dict[str, Any]:
        return {
            "instructions": self._instructions,
            "input": self._items,
            "tools": TOOLS,
            "tool_choice": tool_choice,
            "parallel_tool_calls": False,
        }

    async def _ask(
        self, body: dict[str, Any], limit: int
    ) -> tuple[TurnFigures, list[dict[str, Any]]]:
        """Return the figures and the items. Raises RuntimeError for an answer that failed."""
        body = {"model": self._server.model, "temperature": 0, "stream": True, **body}
        if self._server.bias and body.get("tool_choice") != "required":
            body["logit_bias"] = self._server.bias
        data = msgspec.json.encode({**body, "max_output_tokens": limit})
        event: dict[str, Any] = {}
        began, first_s, items = time.perf_counter(), 0.0, []
        async with self._http.post(f"{self._server.url}/v1/responses", data=data) as response:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = msgspec.json.decode(line[6:])
                if event["type"] == "response.output_item.added" and not first_s:
                    first_s = time.perf_counter() - began
                elif event["type"] == "response.output_item.done":
                    items.append(event["item"])
        if event.get("type") not in ("response.completed", "response.incomplete"):
            raise RuntimeError(f"a turn ended with status {response.status} and {event}")
        usage = event["response"]["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        return TurnFigures(first_s, usage["input_tokens"], cached, usage["output_tokens"]), items


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def play(server: AgentServer, turns: int, seed: int) -> PlayedSession:
    """Play one session, which is alone on the cluster."""
    async with session() as http:
        agent = AgentSession(http, server, seed)
        played = [await agent.turn() for _ in range(turns - 1)]
        played.append(await agent.last_turn())
        new = played[-1].prompt - played[-2].prompt - played[-2].output
        alone = [await agent.new_tokens_alone(new) for _ in range(ALONE)]
        return PlayedSession(played, alone, await agent.last_turn(cache_salt=f"no cache {seed}"))


def rows(sessions: Sequence[PlayedSession]) -> list[ResultRow]:
    """Return the figures of all sessions."""
    turns = len(sessions[0].turns)
    past = sum(a.prompt + a.output for s in sessions for a in s.turns[:-1])
    cached = sum(t.cached for s in sessions for t in s.turns[1:])
    prompts = sum(t.prompt for s in sessions for t in s.turns[1:])
    last = median([s.turns[-1].ttft_s for s in sessions])
    alone = median([median([t.ttft_s for t in s.alone]) for s in sessions])
    uncached = median([s.uncached.ttft_s for s in sessions])
    each = len(sessions) * (turns - 1)
    at = f"TTFT of turn {turns}"
    return [
        ResultRow("prompt of the last turn", median([s.turns[-1].prompt for s in sessions]), "tok"),
        ResultRow("new in a turn", (prompts - past) / each, "tok"),
        ResultRow("computed in a turn", (prompts - cached) / each, "tok"),
        ResultRow("cached share", cached / past, "", "all that was computed", cached / past),
        ResultRow("TTFT of the new tokens alone", alone * 1e3, "ms"),
        ResultRow(at, last * 1e3, "ms", "new tokens alone", alone / last),
        ResultRow(f"{at} without a cache", uncached * 1e3, "ms", at, uncached / last),
    ]


def word_bias(model: Path) -> dict[str, float]:
    """Return a bias that lets a model write only words that are one token each: then the tokens of
    its text are those that the tokenizer finds."""
    tokenizer = load_tokenizer(str(model))
    ids = [tokenizer.encode(f" {word}", add_special_tokens=False).ids for word in WORDS]
    return {str(found[0]): 100.0 for found in ids if len(found) == 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=["demo", "100m"], default="demo")
    parser.add_argument("--calls", action="store_true", help="force a call in each turn")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--sessions", type=int, default=5, help="one after the other")
    parser.add_argument("--prefill", type=int, default=1, help="workers of the pool")
    parser.add_argument("--decode", type=int, default=1, help="workers of the pool")
    parser.add_argument("--url", help="play against this server instead of a cluster of its own")
    parser.add_argument("--model", default="baton-demo", help="name of the model, with --url")
    args = parser.parse_args()
    pools = ("--prefill", str(args.prefill), "--decode", str(args.decode))
    with contextlib.ExitStack() as stack:
        server = AgentServer(args.url, args.model, args.calls, {})
        if args.url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model = demo_path()
            if args.shape == "100m":
                model = make(folder / "random-100m", SHAPE_100M)
            cluster = stack.enter_context(
                local_cluster("--model", str(model), "--threads", "1", *pools)
            )
            bias = word_bias(model)
            server = AgentServer(cluster.url, cluster.state.model_id, args.calls, bias)
        asyncio.run(play(server, 3, 0))  # warm-up
        played = [asyncio.run(play(server, args.turns, n + 1)) for n in range(args.sessions)]
    finish("agents", rows(played))


if __name__ == "__main__":
    main()
