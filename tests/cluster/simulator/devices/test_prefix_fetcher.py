"""Fetches of cached prefixes: links of 1 MB/s, and 1 kB a token."""

from __future__ import annotations

import pytest

from cluster.simulator.devices.request import SimulatedRequest
from cluster.simulator.devices.transfer import PrefixFetcher
from cluster.simulator.devices.worker import SimulatedWorker
from cluster.simulator.simulation import Simulation
from cluster.simulator.traffic import scenario_requests
from router.placement.snapshot import PrefixFetch
from tests.cluster.simulator.scenarios import mix, scenario

PREFIX = 5120
WAIT_S = 0.5


class FetchWorld:
    """A source that has the prefix of all requests, and three workers that do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, link_gb_per_s: float = 0.001) -> None:
        of = scenario(
            mix(10, prompt=6000, prefix=PREFIX),
            machine={"link_gb_per_s": link_gb_per_s},
            pools={"prefill": 4, "decode": 1},
        )
        world = Simulation(of)
        self.clock, self.network = world.clock, world.network
        self.source, *self.workers, self.decode = world.fleet.workers
        self.requests = scenario_requests(of)
        self.source.cache.insert(self.requests[0].blocks)
        for request in self.requests:
            request.router, request.decode = world.routers[0], self.decode
        self.submitted: dict[SimulatedRequest, float] = {}
        monkeypatch.setattr(SimulatedWorker, "submit", self._submit)
        self._fetcher = PrefixFetcher(self.clock, self.network)

    def _submit(self, request: SimulatedRequest) -> None:
        self.submitted[request] = self.clock.now

    def fetch(self, number: int) -> SimulatedRequest:
        request = self.requests[number]
        fetch = PrefixFetch(self.source.name, PREFIX, 9.0, WAIT_S)
        self._fetcher.fetch(request, self.workers[number], self.source, fetch)
        return request

    def run(self) -> None:
        self.clock.run_before(100.0)
        assert not any((*self.network._in.values(), *self.network._out.values()))


def test_fetches_from_one_worker_share_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = FetchWorld(monkeypatch)
    request = alone.fetch(0)
    alone.run()
    assert alone.submitted[request] == pytest.approx(WAIT_S + 5.12)
    shared = FetchWorld(monkeypatch)
    both = [shared.fetch(0), shared.fetch(1)]
    shared.run()
    assert [shared.submitted[r] for r in both] == pytest.approx([WAIT_S + 10.24] * 2, abs=1.0)
    assert [r.fetched for r in (request, *both)] == [PREFIX] * 3


def test_only_what_the_worker_lacks_goes_over_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    world = FetchWorld(monkeypatch)
    world.workers[0].cache.insert(world.requests[0].blocks[:6])
    request = world.fetch(0)
    world.run()
    assert world.submitted[request] == pytest.approx(WAIT_S + 5.12 - 6 * 0.512)
    assert request.fetched == PREFIX


def test_a_prefix_that_the_source_no_longer_has_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = FetchWorld(monkeypatch)
    world.source.cache.clear()
    request = world.fetch(0)
    world.run()
    assert (world.submitted[request], request.fetched) == (WAIT_S, 0)


@pytest.mark.parametrize("dies", [True, False])
def test_what_has_come_is_used_when_a_fetch_ends_early(
    dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that dies, and a link on which the whole prefix takes longer than the limit."""
    world = FetchWorld(monkeypatch, 0.001 if dies else 0.0001)
    request = world.fetch(0)
    world.clock.run_before(2.0)
    if dies:
        world.source.state = "gone"
    world.run()
    assert world.submitted[request] == pytest.approx(2.5 if dies else 20.5)
    assert request.fetched == 2000 // 32 * 32


def test_a_request_that_has_gone_elsewhere_leaves_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    world = FetchWorld(monkeypatch)
    request = world.fetch(0)
    world.clock.run_before(2.0)
    request.begin_attempt()
    world.run()
    assert not world.submitted
