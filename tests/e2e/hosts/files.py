"""What is on the disk of a new machine: its accounts, its sshd's files, a home with a key."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.e2e.hosts.host import HOME, USER
from tests.system import program

KEY = ".ssh/cluster.pem"
"""In a home: the private key that all machines of a room accept."""

_SSHD = f"""\
HostKey /run/etc/host_key
AuthorizedKeysFile /run/etc/authorized_keys
AuthenticationMethods publickey
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
UseDNS no
PidFile none
MaxStartups 100
MaxSessions 100
AllowUsers {USER}
"""


def furnish(place: Path, name: str, key: Path) -> None:
    """Makes the folder that is /run on the machine. ``key``: the room's private key."""
    etc, home = place / "etc", place / HOME.removeprefix("/run/")
    for folder in (etc, home / ".ssh", place / "sshd"):
        folder.mkdir(parents=True, mode=0o700)
    etc.chmod(0o755)
    (etc / "passwd").write_text(_passwd(Path("/etc/passwd").read_text()))
    (etc / "hosts").write_text(f"127.0.0.1 localhost {name}\n")
    (etc / "none").touch()
    (etc / "sshd_config").write_text(_SSHD)
    make_key(etc / "host_key")
    shutil.copy(f"{key}.pub", etc / "authorized_keys")
    shutil.copy(key, home / KEY)
    (home / KEY).chmod(0o600)


def make_key(path: Path) -> None:
    """A key pair of ssh(1), without a passphrase."""
    command = [program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True, timeout=10.0)


def _passwd(text: str) -> str:
    """The machine's accounts, but ours lives in its own home."""
    lines = [line for line in text.splitlines() if not line.startswith(f"{USER}:")]
    return "\n".join([f"{USER}:x:0:0::{HOME}:/bin/bash", *lines]) + "\n"
