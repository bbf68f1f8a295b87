"""What values mean together: pure functions of a configuration, each about a few keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

from cluster.config.schema import Config
from engine.ipc.spec import WITH_MODEL
from protocol.errors import StartupError
from protocol.security.cluster_token import check_bind, check_http_bind, is_loopback


class Contradiction(NamedTuple):
    """``keys``: all that take part; the first is the one to look at."""

    keys: tuple[str, ...]
    text: str


def _kv(c: Config) -> Iterator[Contradiction]:
    for name, value in (("kv.pool", c.kv.pool), ("kv.codec", c.kv.codec)):
        if c.kv.precision == "exact" and value == "fp8":
            text = "fp8 rounds KV, and kv.precision is exact; expected auto, or kv.precision fp8"
            yield Contradiction((name, "kv.precision"), text)


def _speculation(c: Config) -> Iterator[Contradiction]:
    method, model = c.speculation.method, c.speculation.model
    if model is not None and method in ("off", "ngram"):
        text = f"{method} takes no model, and speculation.model is {model!r}; expected auto, draft,"
        text += " medusa or eagle, or no model"
        yield Contradiction(("speculation.method", "speculation.model"), text)
    if model is None and method in WITH_MODEL and c.model.path is not None:
        text = f"{method} takes a model beside {c.model.path!r}, and speculation.model is null;"
        text += " expected a folder or hub id there, or ngram"
        yield Contradiction(("speculation.method", "speculation.model", "model.path"), text)


def _tls(c: Config) -> Iterator[Contradiction]:
    for section, files in (("tls", c.security.tls), ("http_tls", c.security.http_tls)):
        given = files.model_dump(exclude={"name"})
        missing = [name for name, value in given.items() if value is None]
        if missing and len(missing) < len(given):
            keys = tuple(f"security.{section}.{name}" for name in (*missing, *given))
            yield Contradiction(keys, f"missing; expected {', '.join(given)} or none of them")
    if c.security.tls.name is not None and c.security.tls.ca is None:
        text = "no certificate to prove it with; expected ca, cert and key, too"
        yield Contradiction(("security.tls.name", "security.tls.ca"), text)


def _worker_host(c: Config) -> Iterator[Contradiction]:
    tls = c.security.tls
    try:
        check_bind(c.worker.host, tls=None not in (tls.ca, tls.cert, tls.key))
    except StartupError as e:
        keys = ("worker.host", "security.tls.ca", "security.tls.cert", "security.tls.key")
        yield Contradiction(keys, str(e))


def _router_host(c: Config) -> Iterator[Contradiction]:
    security, https = c.security, c.security.http_tls
    try:
        check_http_bind(
            c.router.host,
            api_keys=security.api_keys is not None,
            tls=None not in (https.cert, https.key),
            allow_plain_http=security.allow_plain_http,
        )
    except StartupError as e:
        keys = ("api_keys", "http_tls.cert", "http_tls.key", "allow_plain_http")
        yield Contradiction(("router.host", *(f"security.{key}" for key in keys)), str(e))


def _order(c: Config) -> Iterator[Contradiction]:
    longest = c.limits.request_timeout_s
    for name, value in (
        ("first_token_timeout_s", c.limits.first_token_timeout_s),
        ("resubmit_wait_s", c.limits.resubmit_wait_s),
    ):
        if value > longest:
            keys = (f"limits.{name}", "limits.request_timeout_s")
            text = f"{value:g} s is more than limits.request_timeout_s, which is {longest:g} s"
            yield Contradiction(keys, text)
    deadline = c.router.admission_ttft_ms
    if deadline is not None and deadline < c.router.ttft_slo_ms:
        keys = ("router.admission_ttft_ms", "router.ttft_slo_ms")
        text = f"{deadline:g} ms is less than the objective, router.ttft_slo_ms, which is "
        yield Contradiction(keys, f"{text}{c.router.ttft_slo_ms:g} ms")


def _ports(c: Config) -> Iterator[Contradiction]:
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


def _autoscaler(c: Config) -> Iterator[Contradiction]:
    own, least = c.autoscaler, 0
    for role, pool in (("prefill", c.pools.prefill), ("decode", c.pools.decode)):
        low, high = getattr(own, f"{role}_min"), getattr(own, f"{role}_max")
        names = f"autoscaler.{role}_min", f"autoscaler.{role}_max"
        least += low
        if low > high:
            yield Contradiction(names, f"{low} is more than {names[1]}, which is {high}")
        elif own.mode == "act" and not max(low, min(1, high)) <= pool.workers <= high:
            text = f"{pool.workers} to begin with; expected {max(low, min(1, high))} to {high},"
            text += f" as {' and '.join(names)} say"
            yield Contradiction((f"pools.{role}.workers", "autoscaler.mode", *names), text)
    if own.gpus is not None and own.gpus < least:
        text = f"{own.gpus:g} are less than the {least} workers that there are at least"
        keys = ("autoscaler.gpus", "autoscaler.prefill_min", "autoscaler.decode_min")
        yield Contradiction(keys, text)
    if own.window_s < own.interval_s:
        text = f"{own.window_s:g} s is less than autoscaler.interval_s, which is {own.interval_s:g}"
        yield Contradiction(("autoscaler.window_s", "autoscaler.interval_s"), f"{text} s")


_ALL: tuple[Callable[[Config], Iterator[Contradiction]], ...] = (
    *(_kv, _speculation, _tls, _worker_host, _router_host, _order, _ports, _autoscaler),
)


def find(config: Config) -> list[Contradiction]:
    return [contradiction for each in _ALL for contradiction in each(config)]
