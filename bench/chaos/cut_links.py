"""Cuts connections of this machine: packets are dropped, and neither end is told.

Packet filters need a network namespace of one's own. ``enter_namespace`` replaces this process by
the same program in a new user and network namespace, which needs no privileges where the kernel
allows it; without that the soak goes on and says that it cuts no links.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence

import psutil

_INSIDE = "BATON_CHAOS_NAMESPACE"
_TABLE = "baton_chaos"
_CHAIN = "{ type filter hook input priority 0 ; }"


def enter_namespace(module: str, arguments: Sequence[str]) -> str:
    """Start ``python -m module`` again in new namespaces; does not return if it can.

    Returns why links cannot be cut here; empty: this process is in its namespace."""
    if os.environ.get(_INSIDE):
        return _prepare()
    unshare = shutil.which("unshare")
    if unshare is None or shutil.which("nft") is None or shutil.which("ip") is None:
        return "unshare, ip or nft is not installed"
    command = [unshare, "--user", "--map-root-user", "--net"]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"no namespace can be made: {tried.stderr.strip()}"
    os.environ[_INSIDE] = "1"
    sys.stdout.flush()
    os.execv(unshare, [*command, sys.executable, "-m", module, *arguments])
    raise AssertionError("execv does not return")


def _prepare() -> str:
    for command in (
        ["ip", "link", "set", "lo", "up"],
        ["nft", f"add table inet {_TABLE}; add chain inet {_TABLE} cut {_CHAIN}"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{' '.join(command)}: {done.stderr.strip()}"
    return ""


class LinkCutter:
    """Drops packets between a process and an endpoint. The namespace must be prepared."""

    @contextlib.asynccontextmanager
    async def cut(self, pid: int, endpoint: str, draw: random.Random) -> AsyncIterator[None]:
        """Cut the connections of ``pid`` to ``endpoint`` while the body runs, in one direction or
        in both. New connections to it from any process are cut, too."""
        port = int(endpoint.rpartition(":")[2])
        rules = [f"tcp dport {port} tcp flags & (syn | ack) == syn drop"]
        directions = draw.choice([(True,), (False,), (True, False)])
        for local in _local_ports(pid, port):
            for to_endpoint in directions:
                source, target = (local, port) if to_endpoint else (port, local)
                rules.append(f"tcp sport {source} tcp dport {target} drop")
        _nft("; ".join(f"add rule inet {_TABLE} cut {rule}" for rule in rules))
        try:
            yield
        finally:
            _nft(f"flush chain inet {_TABLE} cut")


def _local_ports(pid: int, port: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        connections = psutil.Process(pid).net_connections("tcp")
        return [c.laddr.port for c in connections if c.raddr and c.raddr.port == port]
    return []


def _nft(commands: str) -> None:
    subprocess.run(["nft", commands], check=True, capture_output=True)
