"""A Redis with a password on a machine, for all others."""

from __future__ import annotations

import secrets

from cluster.local.redis_server import redis_server_binary
from tests.e2e.hosts.host import Host

_CONFIG = """\
bind {address}
port 6379
requirepass {password}
save ""
appendonly no
"""


def start(host: Host) -> str:
    """Starts it, and waits until it answers; its URL."""
    password = secrets.token_hex(16)
    config = host.home / "redis.conf"
    config.write_text(_CONFIG.format(address=host.address, password=password))
    config.chmod(0o600)
    host.run(f"setsid {redis_server_binary()} ~/redis.conf > ~/redis.log 2>&1 < /dev/null &")
    host.wait_for("grep -q 'Ready to accept' ~/redis.log")
    return f"redis://:{password}@{host.address}:6379/0"
