"""Ports: free, or who has them."""

from __future__ import annotations

import contextlib
import ipaddress

import msgspec

from cluster.doctor.finding import Finding, note, ok, problem
from cluster.doctor.leftovers import running_url
from cluster.doctor.subject import Wanted
from cluster.local import ports


class Port(msgspec.Struct, frozen=True):
    """``owner``: None when free. ``next_free``: the port to take instead; None: none near."""

    number: int
    owner: str | None = None
    ours: str = ""  # the cluster of that name serves there
    next_free: int | None = None


class Listening(msgspec.Struct, frozen=True):
    problem: str  # with the address itself
    ports: tuple[Port, ...]


def collect(wanted: Wanted) -> Listening:
    bad = [number for number in wanted.ports if not 0 <= number <= 65535]
    if bad:
        return Listening(f"port must be in 1..65535, not {bad[0]}", ())
    if not _is_here(wanted.host):
        return Listening(f"host {wanted.host!r} is no address of this machine", ())
    serving = running_url(wanted.cluster)
    looked = [_look(wanted.host, n, serving, wanted.cluster) for n in wanted.ports if n]
    return Listening("", tuple(looked))


def _is_here(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return ports.is_free(host, 0)
    return False


def _look(host: str, number: int, serving: str | None, cluster: str) -> Port:
    if ports.is_free(host, number):
        return Port(number)
    ours = cluster if serving is not None and serving.endswith(f":{number}") else ""
    return Port(number, ports.owner(number), ours, _next_free(host, number))


def _next_free(host: str, number: int) -> int | None:
    near = range(number + 1, min(number + 100, 65536))
    return next((port for port in near if ports.is_free(host, port)), None)


def judge(facts: Listening, wanted: Wanted) -> list[Finding]:
    if facts.problem:
        remedy = "give --host an address of this machine and --port a number from 1 to 65535"
        return [problem("port", facts.problem, remedy)]
    return [_judge(port, wanted) for port in facts.ports]


def _judge(port: Port, wanted: Wanted) -> Finding:
    if port.owner is None:
        return ok("port", f"{port.number} is free")
    if port.ours:
        remedy = "`baton down` stops it; `--cluster NAME` starts another"
        return note("port", f"{port.number}: cluster {port.ours!r} serves there", remedy)
    text = f"{port.number} is taken by {port.owner}"
    if port.next_free is None:
        return problem("port", text, "stop it, or give another --port")
    if wanted.port_moves:
        return note("port", f"{text}; taking {port.next_free}")
    return problem("port", text, f"stop it, or give --port {port.next_free}, which is free")
