"""When alerts fire and when not, over days that promtool makes up; with the real windows."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.monitoring.files import RuleOptions, write_prometheus
from cluster.monitoring.prometheus import ScrapeConfig
from tests.cluster.promtool import judge
from tests.system import needs

needs("promtool")

OF = 'cluster="c", model="m"'
TTFT, TPOT, FAILURES = (f"Baton{each}BudgetBurns" for each in ("Ttft", "Tpot", "Failure"))


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rules")
    write_prometheus(folder, ScrapeConfig(("http://127.0.0.1:8000",)), RuleOptions())
    return folder


def weighed(slo: str, requests: str, met: str) -> dict[str, str]:
    """Counters of an objective at a router."""
    labels = f'{{{OF}, role="router", slo="{slo}"}}'
    return {f"baton_slo_requests_total{labels}": requests, f"baton_slo_met_total{labels}": met}


def up(replica: str, values: str, role: str = "decode") -> dict[str, str]:
    labels = f'{OF}, job="baton", role="{role}", replica="{replica}", instance="{replica}:1"'
    return {f"up{{{labels}}}": values}


ROUTER = up("r", "1x400", "router")


def test_an_hour_of_late_tokens_pages_and_ends_soon_after(rules: Path) -> None:
    """20% late from the second hour on: 14.4% of an hour's are when it lasts for 44 minutes."""
    late = weighed("ttft", "0+100x240", "0+100x60 6080+80x60 10900+100x120")
    page = {(TTFT, "page"), (TTFT, "ticket")}  # what three days allow is spent already
    expected = {"60m": set(), "80m": {(TTFT, "ticket")}, "110m": page, "119m": page}
    judge(rules, ROUTER | late, {**expected, "150m": {(TTFT, "ticket")}})


def test_six_hours_of_slow_tokens_page(rules: Path) -> None:
    slow = weighed("tpot", "0+200x200", "0+184x200")
    fires = {(TPOT, "page"), (TPOT, "ticket")}
    judge(rules, ROUTER | slow, {"390m": fires}, interval="2m")


def test_a_day_above_the_budget_is_a_ticket(rules: Path) -> None:
    """2% late: twice the budget, a burn rate of 2."""
    late = weighed("ttft", "0+1000x400", "0+980x400")
    judge(rules, ROUTER | late, {"1440m": {(TTFT, "ticket")}}, interval="4m")


@pytest.mark.parametrize("late", ["0+199x200", "0+200x200"])
def test_within_the_budget_nothing_fires(rules: Path, late: str) -> None:
    requests = weighed("ttft", "0+200x200", late)
    judge(rules, ROUTER | requests, {"30m": set(), "398m": set()}, interval="2m")


def test_few_requests_do_not_page(rules: Path) -> None:
    few = weighed("ttft", "0x5 1x25 2x25 3x25 4x25 5x50", "0x150")
    judge(rules, ROUTER | few, {"12m": set(), "66m": set(), "250m": set()}, interval="2m")


def test_refusals_and_errors_spend_a_budget_clients_do_not(rules: Path) -> None:
    def ended(status: str) -> str:
        return f'baton_requests_total{{{OF}, role="router", status="{status}"}}'

    failing = {(FAILURES, "page"), (FAILURES, "ticket")}
    judge(rules, ROUTER | {ended("ok"): "0+50x100", ended("429"): "0+40x100"}, {"90m": failing})
    judge(rules, ROUTER | {ended("ok"): "0+50x100", ended("503"): "0+40x100"}, {"90m": failing})
    own = {ended("ok"): "0+50x100", ended("400"): "0+90x100", ended("cancelled"): "0+9x100"}
    judge(rules, ROUTER | own, {"90m": set()})


def test_a_full_pool_matters_where_requests_wait(rules: Path) -> None:
    of = f'{{{OF}, role="decode", replica="d"}}'
    full = {f"baton_kv_cache_usage_ratio{of}": "0.3x10 0.97x30 0.2x20"}
    waiting = {f"baton_requests_waiting{of}": "2x60"}
    fires = {("BatonKvPoolFull", "ticket")}
    judge(rules, ROUTER | full | waiting, {"10m": set(), "20m": fires, "50m": set()})
    nobody = {f"baton_requests_waiting{of}": "0x60"}
    judge(rules, ROUTER | full | nobody, {"20m": set()})


def test_failing_transfers_fire(rules: Path) -> None:
    of = f'{OF}, role="decode", replica="d", transport="grpc", codec="raw"'
    whole = {f"baton_kv_transfer_seconds_count{{{of}}}": "0+60x60"}

    def failed(values: str) -> dict[str, str]:
        return {f"baton_kv_transfer_failures_total{{{of}}}": values}

    fires = {("BatonTransfersFail", "ticket")}
    judge(rules, ROUTER | whole | failed("0x20 0+5x40"), {"20m": set(), "30m": fires})
    judge(rules, ROUTER | whole | failed("0x20 2x40"), {"22m": set()})  # one death of a worker


def test_stale_index_fires(rules: Path) -> None:
    age = {f'baton_index_staleness_seconds{{{OF}, role="router"}}': "0x10 20 0x10 20+60x10"}
    fires = {("BatonIndexStale", "ticket")}
    judge(rules, ROUTER | age, {"11m": set(), "22m": set(), "24m": fires})


def test_restarting_engines_fire(rules: Path) -> None:
    name = f'baton_engine_restarts_total{{{OF}, role="decode", replica="d"}}'
    fires = {("BatonEngineRestarts", "ticket")}
    judge(rules, ROUTER | {name: "0x20 1x5 2x5 3x40"}, {"28m": set(), "33m": fires, "60m": set()})


def test_crash_loops_flap_updates_and_scaling_do_not(rules: Path) -> None:
    gone = "stale"
    before = up("a", f"1x40 {gone}") | up("b", f"1x41 {gone}") | up("c", f"1x42 {gone}")
    after = {k: v for n in "def" for k, v in up(n, f"_x{40 + ord(n) % 3} 1x60").items()}
    judge(rules, ROUTER | before | after, {"44m": set(), "60m": set()})  # an update
    judge(rules, ROUTER | before | up("s", "1x100"), {"44m": set(), "60m": set()})  # fewer
    judge(rules, ROUTER | up("s", "1x100") | after, {"44m": set(), "60m": set()})  # more
    looping = {
        k: v for i, n in enumerate("ghij") for k, v in up(n, f"_x{40 + 5 * i} 1x3 {gone}").items()
    }
    fires = {("BatonWorkerFlapping", "ticket")}
    judge(rules, ROUTER | up("s", "1x100") | looping, {"49m": set(), "56m": fires})


def test_what_is_replaced_while_prometheus_is_new_does_not_flap(rules: Path) -> None:
    """It came with the first look, as far as Prometheus knows."""
    for looks in (5, 15):
        old = {k: v for n in "abc" for k, v in up(n, f"_x5 1x{looks} stale").items()}
        new = {k: v for n in "def" for k, v in up(n, f"_x{5 + looks} 1x60").items()}
        router = up("r", "_x5 1x80", "router")
        judge(rules, router | old | new, {f"{m}m": set() for m in (22, 30, 36, 45, 60)})


def test_more_workers_for_a_while_do_not_flap(rules: Path) -> None:
    for_a_while = {k: v for n in "bcd" for k, v in up(n, "_x40 1x20 stale").items()}
    calm = {f"{m}m": set() for m in (45, 62, 65, 75, 89, 95)}
    judge(rules, ROUTER | up("a", "1x120") | for_a_while, calm)


def test_workers_that_are_lent_do_not_flap(rules: Path) -> None:
    at_home = {k: v for n in "bcd" for k, v in up(n, "1x40 stale _x4 1x60").items()}
    away = {k: v for n in "bcd" for k, v in up(n, "_x41 1x4 stale", "prefill").items()}
    calm = {f"{m}m": set() for m in (43, 46, 50, 60, 71, 90)}
    judge(rules, ROUTER | up("a", "1x120") | at_home | away, calm)


def test_a_crash_loop_that_prometheus_finds_flaps(rules: Path) -> None:
    """As soon as it has looked on for half an hour."""
    looping = {k: v for i in range(9) for k, v in up(f"w{i}", f"_x{5 * i} 1x3 stale").items()}
    fires = {("BatonWorkerFlapping", "ticket")}
    judge(rules, ROUTER | looping, {"20m": set(), "31m": fires, "44m": fires, "80m": set()})


def test_missing_workers_fire(rules: Path) -> None:
    here = f'{OF}, job="baton", role="router", replica="r", instance="r:1"'
    none = {f"baton_router_decode_workers{{{here}}}": "2x10 0x20"}
    fires = {("BatonNoDecodeWorker", "page")}
    judge(rules, ROUTER | none, {"10m": set(), "13m": fires})
    ready = f'baton_replicas{{{OF}, role="prefill", state="ready", replica="r"}}'
    fires = {("BatonNoPrefillWorker", "ticket")}
    judge(rules, ROUTER | {ready: "1x10 0x20"}, {"10m": set(), "15m": fires})
    judge(rules, ROUTER | {ready: "0x30"}, {"20m": set()})  # never had any: so it was wished for


def test_missing_router_and_targets_fire(rules: Path) -> None:
    router_down, target_down = ("BatonRouterDown", "page"), ("BatonTargetDown", "ticket")
    dead = up("r", "1x10 0x20", "router")
    judge(rules, dead, {"10m": set(), "12m": {router_down}, "15m": {router_down, target_down}})
    judge(rules, {}, {"5m": {router_down}})
    judge(rules, ROUTER | up("d", "1x10 0x20"), {"10m": set(), "15m": {target_down}})


def test_expiring_certificates_fire(rules: Path) -> None:
    """At 20 days after the epoch, which is when promtool's time begins."""
    here = f'{OF}, role="router", replica="r", use="https"'
    ends = {f"baton_certificate_not_after_seconds{{{here}}}": f"{20 * 86_400}x400"}
    ticket = ("BatonCertificateEnds", "ticket")
    page = ("BatonCertificateEnds", "page")
    expected = {"5d": set(), "7d": {ticket}, "19d": {ticket, page}}
    judge(rules, ROUTER | ends, expected, interval="4h")
