"""Output under random schemas, with a decode worker killed under it: always an instance."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from bench.lib.oracle import BUSY_ROUTER, EXACT
from bench.lib.standalone import Standalone
from bench.structured import (
    ROLES,
    RequestBatch,
    StructuredOutput,
    describe_fault,
    make_request,
    run_with_kills,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(150)]

REQUESTS = [make_request(seed) for seed in range(48)]
AT_ONCE = 24


@pytest.fixture(scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Standalone]:
    folder = tmp_path_factory.mktemp("forms")
    pool = Standalone(folder, ROLES, worker_options=EXACT, router_options=BUSY_ROUTER)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


@pytest.fixture(scope="module")
async def calm(pool: Standalone) -> list[StructuredOutput]:
    return await RequestBatch(pool.url, REQUESTS, AT_ONCE).run()


def faults(got: list[StructuredOutput]) -> list[str]:
    return [why for r, a in zip(REQUESTS, got, strict=True) if (why := describe_fault(r, a))]


async def test_every_output_is_an_instance_of_its_schema(calm: list[StructuredOutput]) -> None:
    assert faults(calm) == []


async def test_through_a_kill_they_are_the_same(
    pool: Standalone, calm: list[StructuredOutput]
) -> None:
    hurt = await run_with_kills(pool, REQUESTS, seed=1, kills=1, at_once=AT_ONCE)
    assert faults(hurt) == []
    assert [a.text for a in hurt] == [a.text for a in calm]
    assert sum(a.attempts > 1 for a in hurt) > 0  # it did hurt
