"""A room with a switch, and the machines that are plugged into it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from tests.e2e.hosts import files, namespaces
from tests.e2e.hosts.host import Host
from tests.system import program

SUBNET = "10.77.0"
_SWITCH = f"{SUBNET}.254"  # where a default route points; nothing is behind it
_PLACES = "/run/hosts"
_ROOM = f"""
mount -t proc proc /proc
mount -t tmpfs -o mode=755 hosts /run
mkdir {_PLACES}
exec sleep infinity
"""
_BURST = "tbf rate {rate} burst 64kb latency 100ms"
_BOOT_S = 10.0


class Network:
    """Machines 10.77.0.1, .2, ... in the order they were added, on one switch. Needs root."""

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._first = 0

    def __enter__(self) -> Network:
        self._process = namespaces.first_of_new(("net", "mount"), _ROOM)
        self._first = namespaces.first_process(self._process)
        places = self._inside(_PLACES)
        _until(places.is_dir, "the room")
        files.make_key(places / "key")
        self._ip("link add br0 type bridge", f"addr add {_SWITCH}/24 dev br0", "link set br0 up")
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        """The room's first process dies, and with it all the rest."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._first, signal.SIGKILL)
        assert self._process is not None
        self._process.wait(_BOOT_S)

    def add(self, name: str) -> Host:
        """A machine that is up and lets in who has the room's key, as every home does."""
        assert all(host.name != name for host in self.hosts)
        place = f"{_PLACES}/{name}"
        host = Host(name, f"{SUBNET}.{len(self.hosts) + 1}", self._first, place)
        files.furnish(self._inside(place), name, self._inside(f"{_PLACES}/key"))
        self.hosts.append(host)
        self.restart(host)
        return host

    def restart(self, host: Host) -> None:
        """Boots a machine that is off: its files are those it had, but for /tmp; nothing runs."""
        shutil.rmtree(self._inside(f"{_PLACES}/{host.name}/tmp"), ignore_errors=True)
        host.boot()
        port = f"to-{host.name}"
        card = (
            f"02:00:00:00:00:{self.hosts.index(host) + 1:02x}"  # its own for life: others know it
        )
        self._ip(
            f"link add {port} type veth peer name eth0 address {card} netns {host.pid}",
            f"link set {port} master br0 up",
        )
        lines = ("link set lo up", f"addr add {host.address}/24 dev eth0", "link set eth0 up")
        _ip(host.pid, *lines, f"route add default via {_SWITCH}")
        _until(lambda: _listens(host.pid, 22), f"sshd of {host.name}")

    def kill(self, host: Host) -> None:
        """Takes its power, and waits until the switch has noticed: nobody sends a last word."""
        self.cut(host)
        host.kill()
        with contextlib.suppress(RuntimeError):  # it goes by itself, sooner or later
            self._ip(f"link del to-{host.name}")

    def cut(self, host: Host) -> None:
        """Unplugs it: frames vanish both ways, connections hear nothing."""
        self._ip(f"link set to-{host.name} down")

    def heal(self, host: Host) -> None:
        """Plugs it in again."""
        self._ip(f"link set to-{host.name} up")

    def shape(self, host: Host, rate: str | None) -> None:
        """Limits its link, each way, to a rate of tc(8) like "100mbit"; None: no limit."""
        for pid, device in ((self._first, f"to-{host.name}"), (host.pid, "eth0")):
            what = f"replace dev {device} root {_BURST.format(rate=rate)}"
            words = what if rate else f"del dev {device} root"
            _call(namespaces.enter(pid, "n", program("tc"), "qdisc", *words.split()))

    def drop_ports(self, host: Host, ports: Iterable[int]) -> None:
        """Let the host's firewall drop what comes to these TCP ports; none: let everything in."""
        rules = ["add table inet filter", "delete table inet filter"]  # that there may be none
        if listed := ", ".join(map(str, ports)):
            rules += [
                "add table inet filter",
                "add chain inet filter input { type filter hook input priority 0; }",
                f"add rule inet filter input tcp dport {{ {listed} }} drop",
            ]
        _call(namespaces.enter(host.pid, "n", program("nft"), "; ".join(rules)))

    def listening_ports(self, host: Host, pid: int) -> set[int]:
        """Return the TCP ports on which a process of the host listens, by its number there."""
        lines = [line.split() for line in host.run(f"{program('ss')} -Htlnp").splitlines()]
        return {int(line[3].rpartition(":")[2]) for line in lines if f"pid={pid}," in line[-1]}

    def dialled_ports(self, host: Host, peer: Host) -> set[int]:
        """Return the TCP ports of ``peer`` to which the host has connections."""
        show = [program("ss"), "-Htn", "state", "established", "dst", peer.address]
        lines = _call(namespaces.enter(host.pid, "n", *show)).splitlines()
        return {int(line.split()[3].rpartition(":")[2]) for line in lines}

    def received(self, host: Host) -> int:
        """Bytes that its link has brought to it since it booted."""
        show = [program("ip"), "-json", "-statistics", "link", "show", "eth0"]
        link = json.loads(_call(namespaces.enter(host.pid, "n", *show)))[0]
        return int(link["stats64"]["rx"]["bytes"])

    async def arriving(self, host: Host, count: int, within_s: float = 20.0) -> None:
        """Until so many bytes more have come to it."""
        least = self.received(host) + count
        async with asyncio.timeout(within_s):
            while self.received(host) < least:
                await asyncio.sleep(0.02)

    def _inside(self, path: str) -> Path:
        """A path of the room, seen from here."""
        return Path(f"/proc/{self._first}/root{path}")

    def _ip(self, *lines: str) -> None:
        _ip(self._first, *lines)


def _ip(pid: int, *lines: str) -> None:
    """Lines of ip(8) in the network of ``pid``."""
    command = namespaces.enter(pid, "n", program("ip"), "-batch", "-")
    _call(command, "\n".join(lines) + "\n")


def _call(command: list[str], given: str = "") -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_BOOT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {given}{done.stdout}{done.stderr}")
    return done.stdout


def _listens(pid: int, port: int) -> bool:
    """Whether there is a listening TCP socket on the port in the network of ``pid``."""
    try:
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return False
    rows = [line.split() for line in lines]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


def _until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _BOOT_S
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} was not ready in {_BOOT_S} s")
        time.sleep(0.01)
