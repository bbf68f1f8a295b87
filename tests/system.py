"""Programs and rights that a test needs of the machine: without them it skips, and says what to
install. CI installs them, and sets BATON_REQUIRE_SYSTEM_TESTS=1: there a test that skips fails."""

from __future__ import annotations

import os
import shutil

import pytest

REQUIRED = "BATON_REQUIRE_SYSTEM_TESTS"

_PACKAGES = {
    "chromedriver": "chromium-driver",
    "chromium": "chromium",
    "ip": "iproute2",
    "nft": "nftables",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "redis-server": "redis-server",
    "rsync": "rsync",
    "ssh": "openssh-client",
    "ss": "iproute2",
    "sshd": "openssh-server",
    "tc": "iproute2",
}
"""Program: Debian's package that has it."""

_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def program(name: str) -> str:
    """Path of a program; those that only root's PATH has, too. Raises LookupError if it is not
    installed."""
    path = shutil.which(name, path=_PATH)
    if path is None:
        raise LookupError(f"{name} is not installed: apt-get install {_PACKAGES.get(name, name)}")
    return path


def needs(*names: str, root: bool = False) -> None:
    """Skip the calling test (or fixture, or module) unless all programs are there and, if asked,
    the caller is root; where system tests are required, fail instead."""
    missing = lacking(*names, root=root)
    if missing and os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{REQUIRED}=1, but {missing}", pytrace=False)
    elif missing:
        pytest.skip(missing, allow_module_level=True)


def lacking(*names: str, root: bool = False) -> str:
    """What is missing, and how to get it, in one line; empty when nothing is."""
    absent = sorted({_PACKAGES.get(name, name) for name in names if not _there(name)})
    parts = [f"apt-get install {' '.join(absent)}"] if absent else []
    if root and os.geteuid() != 0:
        parts.append("run as root: it makes network namespaces")
    return "this test needs more of the machine: " + "; ".join(parts) if parts else ""


def _there(name: str) -> bool:
    return shutil.which(name, path=_PATH) is not None


HEED_INTERRUPTS = ("env", "--default-signal=INT")
"""Before a command: SIGINT ends it. Shells ignore it in the background, and every process that they
start inherits that. A ``preexec_fn`` would fork beside the threads of gRPC, which may end in the
child before the command starts."""
