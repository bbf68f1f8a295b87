"""Machines made of Linux namespaces, each with an address, a home, a /tmp and an sshd of its own.

    with Network() as net:                      a room: a bridge, and all that is plugged into it
        a = net.add("a")                        10.77.0.1; boots sshd as process 1
        a.run("hostname -I")                    as a login shell there
        net.shape(a, "100mbit"); net.cut(a); net.heal(a)
        a.kill(); a.restart()                   the power goes, and comes back; the disk stays

Everything lives in the namespaces of one process, the room's first: when that dies, with the test
or at its hands, the kernel takes away processes, links and mounts alike."""

from tests.e2e.hosts.host import Host
from tests.e2e.hosts.network import Network

__all__ = ["Host", "Network"]
