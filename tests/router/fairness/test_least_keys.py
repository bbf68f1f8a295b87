"""The least of many keys, and what a look costs where thousands of tenants wait."""

from __future__ import annotations

from random import Random

import pytest

from router.fairness.least_keys import LeastKeys
from router.tenants.tenant import Tenant
from tests.router.fairness.test_fair_queue import new_queue, waiting


def test_it_finds_what_sorting_finds() -> None:
    rng, keys = Random(1), dict[str, float]()
    least = LeastKeys(lambda name: keys[name])
    names = [f"t{number}" for number in range(50)]
    for _ in range(5000):
        name = rng.choice(names)
        if name not in keys:
            keys[name] = rng.random()
            least.add(name)
        elif rng.random() < 0.3:
            del keys[name]
            least.discard(name)
        else:
            keys[name] += rng.uniform(-1, 1)
            least.touch(name)
        least.touch("never added")
        count = rng.randrange(4)
        assert least.least(count) == sorted(keys, key=lambda name: keys[name])[:count]
    assert len(least._heap) <= 2 * len(names) + 32 + 1


def test_the_queue_looks_at_few_of_thousands_of_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = new_queue(*(waiting(Tenant(f"t{number}")) for number in range(4096)))
    queue.candidates(3)
    looks = 0
    value = queue.counters.value

    def counted(tenant: str) -> float:
        nonlocal looks
        looks += 1
        return value(tenant)

    monkeypatch.setattr(queue.counters, "value", counted)
    served = []
    for number in range(16):
        request = queue.candidates(3)[0]
        served.append(request.tenant.name)
        queue.remove(request)
        queue.begin(request)
        queue.counters.charge(request.tenant.name, request.service)
        queue.push(waiting(Tenant(f"new{number}")))
    assert served == [f"t{number}" for number in range(16)]
    assert looks < 200


def test_each_change_of_a_counter_is_seen() -> None:
    a, b, c = (Tenant(name) for name in "abc")
    queue = new_queue(waiting(a), waiting(b), waiting(c))
    for changes, expected in (({"a": 10}, "b"), ({"b": 20, "c": 30}, "a"), ({"c": -40}, "c")):
        for name, service in changes.items():
            queue.counters.charge(name, service)
        assert queue.candidates(1)[0].tenant.name == expected
    urgent = waiting(b, priority=-50)
    queue.push(urgent)
    assert queue.candidates(1) == [urgent]
    queue.remove(urgent)
    assert queue.candidates(1)[0].tenant is c
