"""``stream_options``: when a stream has usage, and what it counts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.router.conftest import Cluster, Start
from tests.router.fake_worker import outputs


async def usages(cluster: Cluster, options: dict[str, Any] | None) -> list[Any]:
    body: dict[str, Any] = {"stream": True, "max_tokens": 3, "stream_options": options}
    text = (await cluster.chat(**body)).text
    events = text.removesuffix("\n\n").split("\n\n")[:-1]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    return [chunk.get("usage", "absent") for chunk in chunks]


async def test_the_chunk_with_the_role_counts_no_output(start: Start) -> None:
    cluster = await start(outputs())
    role, *others = await usages(cluster, {"include_usage": True, "continuous_usage_stats": True})
    assert role["completion_tokens"] == 0
    assert role["total_tokens"] == role["prompt_tokens"] > 0
    counts = [usage["completion_tokens"] for usage in others]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 3)


@pytest.mark.parametrize(
    "options",
    [
        None,
        {},
        {"include_usage": False},
        {"include_usage": None, "continuous_usage_stats": None},
        {"include_usage": False, "continuous_usage_stats": True},
    ],
)
async def test_no_usage_is_sent_unless_it_is_asked_for(
    start: Start, options: dict[str, Any] | None
) -> None:
    cluster = await start(outputs())
    assert set(await usages(cluster, options)) == {"absent"}
