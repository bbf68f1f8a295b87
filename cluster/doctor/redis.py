"""Checks the cluster's Redis: reachable, new enough, fast, writable, and without eviction."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from cluster.doctor.finding import Finding, note, ok, problem
from cluster.doctor.subject import DoctorSubject
from cluster.local import redis_server
from cluster.settings.connection import without_password
from protocol.errors import StartupError
from protocol.registry.redis_client import check_url

OLDEST = (6, 2)
_SLOW_S = 0.02
_TIMEOUT_S = 1.0


class RedisFacts(msgspec.Struct, frozen=True):
    """``where`` is the URL without secrets, empty for the embedded Redis; ``error`` says why it
    cannot be used."""

    where: str = ""
    error: str = ""
    version: str = ""
    seconds: float = 0.0  # duration of a ping, the fastest of five
    policy: str = ""
    bounded: bool = False  # maxmemory is set
    replica: bool = False


def collect(subject: DoctorSubject) -> RedisFacts:
    if subject.redis_url is None:
        try:
            redis_server.redis_server_binary()
            return RedisFacts()
        except StartupError as error:
            return RedisFacts(error=str(error))
    where = without_password(subject.redis_url)
    try:
        check_url(subject.redis_url)
    except StartupError as error:
        return RedisFacts(where, str(error))
    return _query(subject.redis_url, where)


def _query(url: str, where: str) -> RedisFacts:
    import redis

    limits = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S}
    try:
        with redis.Redis.from_url(url, **limits) as client:
            client.ping()
            seconds = min(_seconds_of(client.ping) for _ in range(5))
            try:
                return _facts(where, seconds, client.info())
            except redis.exceptions.NoPermissionError:
                return RedisFacts(where, seconds=seconds)
    except (redis.RedisError, ValueError, OSError) as error:
        return RedisFacts(where, _error_text(error))


def _seconds_of(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _facts(where: str, seconds: float, info: Any) -> RedisFacts:
    return RedisFacts(
        where=where,
        version=str(info.get("redis_version", "")),
        seconds=seconds,
        policy=str(info.get("maxmemory_policy", "")),
        bounded=bool(info.get("maxmemory", 0)),
        replica=info.get("role") == "slave",
    )


def _error_text(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"


def judge(facts: RedisFacts, subject: DoctorSubject) -> list[Finding]:
    if subject.kind == "router" and facts.error.startswith(("ConnectionError", "TimeoutError")):
        text = f"{facts.where}: {facts.error}"
        return [note("redis", text, "the router starts, but finds no worker until Redis answers")]
    if facts.error:
        return [problem("redis", f"{facts.where or 'embedded'}: {facts.error}", _remedy(facts))]
    if not facts.where:
        return [ok("redis", "embedded")]
    ms = facts.seconds * 1000
    version = tuple(int(part) for part in facts.version.split(".")[:2] if part.isdigit())
    if version and version < OLDEST:
        text = f"{facts.where} is Redis {facts.version}, expected {OLDEST[0]}.{OLDEST[1]} or newer"
        return [problem("redis", text, "upgrade it, or leave --redis-url out for the embedded one")]
    if facts.replica:
        text = f"{facts.where} is a replica, which cannot be written to"
        return [problem("redis", text, "give --redis-url of the primary")]
    notes = []
    if facts.seconds > _SLOW_S:
        text = f"a ping takes {ms:.0f} ms, so routers learn late what workers have cached"
        notes.append(note("redis", text, "use a Redis with lower latency"))
    if facts.bounded and facts.policy not in ("", "noeviction"):
        text = f"maxmemory-policy {facts.policy} may evict the leases of running workers"
        notes.append(note("redis", text, "CONFIG SET maxmemory-policy noeviction"))
    version_text = f"Redis {facts.version}" if version else "version unknown"
    return [ok("redis", f"{facts.where}, {version_text}, ping {ms:.1f} ms"), *notes]


def _remedy(facts: RedisFacts) -> str:
    kind = facts.error.partition(":")[0]
    if kind in ("AuthenticationError", "AuthenticationWrongNumberOfArgsError", "ResponseError"):
        return "check user and password in --redis-url (BATON_REDIS_URL)"
    if "CERTIFICATE" in facts.error.upper() or "SSL" in facts.error.upper():
        return "check rediss:// and ?ssl_ca_certs=FILE in --redis-url"
    if not facts.where:
        return "pip install -r requirements.txt"
    return "start it, correct --redis-url, or leave it out for the embedded one"
