"""Contradictions between keys: pure functions of a configuration, called by ``resolve_config``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

from cluster.config.schema import Config
from engine.ipc.settings import METHODS_WITH_MODEL
from protocol.errors import StartupError
from protocol.security.listen_hosts import check_router_host, check_worker_host, is_loopback


class Contradiction(NamedTuple):
    """Values that cannot hold together. ``keys`` are all that take part; the first one is shown."""

    keys: tuple[str, ...]
    text: str


def find_contradictions(config: Config) -> list[Contradiction]:
    """Return every contradiction in ``config``."""
    return [contradiction for check in _CHECKS for contradiction in check(config)]


def _check_speculation(c: Config) -> Iterator[Contradiction]:
    method, model = c.speculation.method, c.speculation.model
    if model is not None and method in ("off", "ngram"):
        text = f"{method} takes no model, and speculation.model is {model!r}; expected auto, draft,"
        text += " medusa or eagle, or no model"
        yield Contradiction(("speculation.method", "speculation.model"), text)
    if model is None and method in METHODS_WITH_MODEL and c.model.path is not None:
        text = f"{method} takes a model beside {c.model.path!r}, and speculation.model is null;"
        text += " expected a folder or hub id there, or ngram"
        yield Contradiction(("speculation.method", "speculation.model", "model.path"), text)


def _check_tls_files(c: Config) -> Iterator[Contradiction]:
    for section, files in (("tls", c.security.tls), ("http_tls", c.security.http_tls)):
        given = files.model_dump(exclude={"name"})
        missing = [name for name, value in given.items() if value is None]
        if missing and len(missing) < len(given):
            keys = tuple(f"security.{section}.{name}" for name in (*missing, *given))
            yield Contradiction(keys, f"missing; expected {', '.join(given)} or none of them")
    if c.security.tls.name is not None and c.security.tls.ca is None:
        text = "no certificate to prove it with; expected ca, cert and key, too"
        yield Contradiction(("security.tls.name", "security.tls.ca"), text)


def _check_worker_host(c: Config) -> Iterator[Contradiction]:
    tls = c.security.tls
    try:
        check_worker_host(c.worker.host, tls=None not in (tls.ca, tls.cert, tls.key))
    except StartupError as e:
        keys = ("worker.host", "security.tls.ca", "security.tls.cert", "security.tls.key")
        yield Contradiction(keys, str(e))


def _check_router_host(c: Config) -> Iterator[Contradiction]:
    security, https = c.security, c.security.http_tls
    try:
        check_router_host(
            c.router.host,
            api_keys=security.api_keys is not None,
            tls=None not in (https.cert, https.key),
            allow_plain_http=security.allow_plain_http,
        )
    except StartupError as e:
        keys = ("api_keys", "http_tls.cert", "http_tls.key", "allow_plain_http")
        yield Contradiction(("router.host", *(f"security.{key}" for key in keys)), str(e))


def _check_limit_order(c: Config) -> Iterator[Contradiction]:
    wait_s, longest_s = c.limits.resubmit_wait_s, c.limits.next_token_timeout_s
    if wait_s > longest_s:
        keys = ("limits.resubmit_wait_s", "limits.next_token_timeout_s")
        text = f"{wait_s:g} s is more than limits.next_token_timeout_s, which is {longest_s:g} s"
        yield Contradiction(keys, text)
    deadline = c.router.admission_ttft_ms
    if deadline is not None and deadline < c.router.ttft_slo_ms:
        keys = ("router.admission_ttft_ms", "router.ttft_slo_ms")
        text = f"{deadline:g} ms is less than the objective, router.ttft_slo_ms, which is "
        yield Contradiction(keys, f"{text}{c.router.ttft_slo_ms:g} ms")


def _check_ports(c: Config) -> Iterator[Contradiction]:
    if c.router.port == c.router.metrics_port:
        text = f"{c.router.port} is router.port already; expected another, or 0 for any"
        yield Contradiction(("router.metrics_port", "router.port"), text)
    if c.redis.url is None:
        return
    parts = urlsplit(c.redis.url.get_secret_value())
    if parts.scheme == "unix" or not is_loopback(parts.hostname or "localhost"):
        return
    for name, port in (("port", c.router.port), ("metrics_port", c.router.metrics_port)):
        if port == (parts.port or 6379):
            text = f"{port} is the port of the Redis in redis.url; expected another"
            yield Contradiction((f"router.{name}", "redis.url"), text)


def _check_autoscaler(c: Config) -> Iterator[Contradiction]:
    own, least = c.autoscaler, 0
    for role, pool in (("prefill", c.pools.prefill), ("decode", c.pools.decode)):
        low, high = getattr(own, f"{role}_min"), getattr(own, f"{role}_max")
        names = f"autoscaler.{role}_min", f"autoscaler.{role}_max"
        least += low
        if low > high:
            yield Contradiction(names, f"{low} is more than {names[1]}, which is {high}")
        elif own.mode == "act" and not max(low, min(1, high)) <= pool.workers <= high:
            text = f"{pool.workers} at the start; expected {max(low, min(1, high))} to {high},"
            text += f" as {' and '.join(names)} say"
            yield Contradiction((f"pools.{role}.workers", "autoscaler.mode", *names), text)
    if own.gpus is not None and own.gpus < least:
        text = f"{own.gpus:g} are less than the {least} workers that there are at least"
        keys = ("autoscaler.gpus", "autoscaler.prefill_min", "autoscaler.decode_min")
        yield Contradiction(keys, text)
    if own.window_s < own.interval_s:
        text = f"{own.window_s:g} s is less than autoscaler.interval_s, which is {own.interval_s:g}"
        yield Contradiction(("autoscaler.window_s", "autoscaler.interval_s"), f"{text} s")


_CHECKS: tuple[Callable[[Config], Iterator[Contradiction]], ...] = (
    _check_speculation,
    _check_tls_files,
    _check_worker_host,
    _check_router_host,
    _check_limit_order,
    _check_ports,
    _check_autoscaler,
)
