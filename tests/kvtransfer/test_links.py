"""Which carrier is offered to which worker."""

from __future__ import annotations

from kvtransfer.links import AVOID_S, FORGET_S, PROBE_S, LinkTable

NAMES = ("local", "tcp", "grpc")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def table(declared: float = 0.0) -> tuple[LinkTable, Clock]:
    clock = Clock()
    return LinkTable(NAMES, declared, clock), clock


def test_a_carrier_that_failed_is_avoided_and_then_probed_by_one_transfer() -> None:
    links, clock = table()
    assert links.offers("p") == list(NAMES)
    links.choose("p", "tcp", NAMES)
    links.failed("p", "tcp", "connection refused")
    assert links.offers("p") == ["local", "grpc"] and links.offers("q") == list(NAMES)
    clock.now += AVOID_S
    assert links.offers("p") == list(NAMES), "the probe"
    assert links.offers("p") == ["local", "grpc"], "others wait for it"
    links.failed("p", "tcp", "connection refused")
    clock.now += AVOID_S - 1
    assert "tcp" not in links.offers("p")
    clock.now += 1
    assert "tcp" in links.offers("p")
    links.succeeded("p", "tcp")
    assert links.offers("p") == links.offers("p") == list(NAMES)


def test_a_probe_that_does_not_come_back_blocks_no_other_for_long() -> None:
    links, clock = table()
    links.failed("p", "tcp", "gone")
    clock.now += AVOID_S
    assert "tcp" in links.offers("p") and "tcp" not in links.offers("p")
    clock.now += PROBE_S
    assert "tcp" in links.offers("p")
    links.choose("p", "local", NAMES)
    assert "tcp" in links.offers("p"), "the other worker took another carrier: no probe was made"


def test_whoever_asks_all_the_same_does_not_put_off_the_probe() -> None:
    clock = Clock()
    links = LinkTable(["grpc"], 0.0, clock)
    links.failed("p", "grpc", "gone")
    for _ in range(int(AVOID_S)):
        assert not links.usable("p") and links.offers("p") == ["grpc"]
        clock.now += 1.0
    assert links.usable("p") and links.offers("p") == ["grpc"]
    for _ in range(int(PROBE_S)):
        assert not links.usable("p") and links.offers("p") == ["grpc"], "the probe is under way"
        clock.now += 1.0
    assert links.usable("p")


def test_a_worker_whose_carriers_all_failed_is_passed_over() -> None:
    links, clock = table()
    for name in NAMES:
        assert links.usable("p")
        links.failed("p", name, "gone")
    assert not links.usable("p") and links.usable("q")
    assert links.offers("p") == ["grpc"], "whoever asks all the same gets the one that always is"
    far, _ = table()
    far.choose("q", "tcp", NAMES)  # "local" was offered, and q is on another host
    for name in ("tcp", "grpc"):
        assert far.usable("q")
        far.failed("q", name, "gone")
    assert not far.usable("q") and far.offers("q") == ["local", "grpc"]
    clock.now += AVOID_S
    assert links.usable("p")


def test_rates_are_measured_or_declared_or_assumed() -> None:
    links, _ = table(declared=3e9)
    assert links.known_bytes_s("p", "tcp") == 3e9
    assert links.known_bytes_s("p", "local") is None, "it is not on the network"
    assert links.expected_bytes_s("p", "local") > 3e9
    for rate in (1e9, 2e9, 1.5e9):
        links.measured("p", "tcp", rate)
    assert links.known_bytes_s("p", "tcp") == 2e9
    assert links.expected_bytes_s("p", "tcp") == 3e9, "waits contain the copies at both ends"
    links.carried("p", "tcp", 1e9)
    assert links.expected_bytes_s("p", "tcp") == 1e9
    links.measured("p", "grpc", 5e8)
    assert links.expected_bytes_s("p", "grpc") == 5e8
    assert table()[0].known_bytes_s("p", "tcp") is None


def test_rows_say_what_was_chosen_and_why() -> None:
    links, clock = table()
    links.failed("p", "tcp", "refused")
    offered = links.offers("p")
    links.choose("p", "grpc", offered)
    links.measured("p", "grpc", 5e8)
    grpc, tcp = links.rows()
    assert (grpc.carrier, grpc.chosen, grpc.transfers, grpc.bytes_s) == ("grpc", True, 1, 5e8)
    assert grpc.reason == "local: not available; tcp avoided: refused"
    assert (tcp.chosen, tcp.failures, tcp.avoided_s, tcp.reason) == (False, 1, AVOID_S, "refused")
    clock.now += FORGET_S
    assert links.rows() == []
