"""Checks that the ports to listen on are free, or names the processes that have them."""

from __future__ import annotations

import contextlib
import ipaddress

import msgspec

from cluster.doctor.finding import Finding, note, ok, problem
from cluster.doctor.leftovers import running_url
from cluster.doctor.subject import DoctorSubject
from cluster.local import ports
from cluster.local.run_state import running_clusters
from cluster.local.start_snippets import baton_command


class PortState(msgspec.Struct, frozen=True):
    """One port. ``owner``: None when it is free. ``next_free``: a free port to use instead."""

    number: int
    owner: str | None = None
    ours: str = ""  # name of our cluster that serves there
    next_free: int | None = None


class PortFacts(msgspec.Struct, frozen=True):
    """Facts about the address. ``problem``: why it is invalid; empty if it is valid."""

    problem: str
    ports: tuple[PortState, ...]


def collect(subject: DoctorSubject) -> PortFacts:
    bad = [number for number in subject.ports if not 0 <= number <= 65535]
    if bad:
        return PortFacts(f"port must be in 1..65535, not {bad[0]}", ())
    if not _is_local_address(subject.host):
        return PortFacts(f"host {subject.host!r} is no address of this machine", ())
    serving = running_url(subject.cluster)
    looked = [_port_state(subject.host, n, serving, subject.cluster) for n in subject.ports if n]
    return PortFacts("", tuple(looked))


def _is_local_address(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return ports.is_port_free(host, 0)
    return False


def _port_state(host: str, number: int, serving: str | None, cluster: str) -> PortState:
    if ports.is_port_free(host, number):
        return PortState(number)
    ours = cluster if serving is not None and serving.endswith(f":{number}") else ""
    owner = _cluster_at(number) or ports.port_owner(number)
    return PortState(number, owner, ours, _next_free(host, number))


def _cluster_at(number: int) -> str | None:
    """Return the name of the cluster of this user that serves at a port, as text; None: none."""
    found = (name for name, state in running_clusters() if state.url.endswith(f":{number}"))
    return next((f"cluster {name!r} of this user" for name in found), None)


def _next_free(host: str, number: int) -> int | None:
    near = range(number + 1, min(number + 100, 65536))
    return next((port for port in near if ports.is_port_free(host, port)), None)


def judge(facts: PortFacts, subject: DoctorSubject) -> list[Finding]:
    if facts.problem:
        remedy = "give --host an address of this machine and --port a number from 1 to 65535"
        return [problem("port", facts.problem, remedy)]
    return [_judge(port, subject) for port in facts.ports]


def _judge(port: PortState, subject: DoctorSubject) -> Finding:
    if port.owner is None:
        return ok("port", f"{port.number} is free")
    if port.ours:
        down = baton_command("down", port.ours)
        remedy = f"`{down}` stops it; `--cluster NAME` starts another"
        return note("port", f"{port.number}: cluster {port.ours!r} serves there", remedy)
    text = f"{port.number} is taken by {port.owner}"
    if port.next_free is None:
        return problem("port", text, "stop it, or give another --port")
    if subject.port_moves:
        return note("port", f"{text}; taking {port.next_free}")
    return problem("port", text, f"stop it, or give --port {port.next_free}, which is free")
