"""Output under random schemas, with a decode worker killed under it: always an instance."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from bench.lib.oracle import BUSY_ROUTER, EXACT
from bench.lib.standalone import Standalone
from bench.structured import ROLES, Answer, Load, asked, disturbed, fault

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(150)]

REQUESTS = [asked(seed) for seed in range(48)]
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
async def calm(pool: Standalone) -> list[Answer]:
    return await Load(pool.url, REQUESTS, AT_ONCE).run()


def faults(got: list[Answer]) -> list[str]:
    return [why for r, a in zip(REQUESTS, got, strict=True) if (why := fault(r, a))]


async def test_every_output_is_an_instance_of_its_schema(calm: list[Answer]) -> None:
    assert faults(calm) == []


async def test_through_a_kill_they_are_the_same(pool: Standalone, calm: list[Answer]) -> None:
    hurt = await disturbed(pool, REQUESTS, seed=1, kills=1, at_once=AT_ONCE)
    assert faults(hurt) == []
    assert [a.text for a in hurt] == [a.text for a in calm]
    assert sum(a.attempts > 1 for a in hurt) > 0  # it did hurt
