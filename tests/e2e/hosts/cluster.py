"""Baton on three machines, as it is set up from a fourth: `baton init`, `ray up`, `baton up`.

a   10.77.0.1   Ray's head, a router
b   10.77.0.2   prefill, a router
c   10.77.0.3   decode (three at most), a router
o   10.77.0.4   the operator: `ray`, the repository, Redis; clients are here, too
"""

from __future__ import annotations

import re
import shutil
import ssl
import sys
from pathlib import Path
from typing import Any

import msgspec
import yaml

from tests.e2e.hosts import redis
from tests.e2e.hosts.files import KEY
from tests.e2e.hosts.host import USER, Host
from tests.e2e.hosts.network import SUBNET, Network

REPOSITORY = Path(__file__).parents[3]
PORT = 8000
YAML = "deploy/ray-local.yaml"
TAKES = {"b": {"baton_prefill": 1, "baton_router": 1}, "c": {"baton_decode": 3, "baton_router": 1}}

_VENV = REPOSITORY / ".venv"
_BIN = Path(sys.prefix) / "bin"
PYTHON = _BIN / "python"
_PROGRAM = ("Makefile", "pyproject.toml", "requirements.txt")  # what set-up looks at

CONFIG: dict[str, Any] = {
    "drain_s": 10,
    "limits": {"first_token_timeout_s": 40, "next_token_timeout_s": 40},
    "model": {"max_len": 4096},
    "kv": {"precision": "exact"},
    "worker": {"threads": 1, "kv_tokens": 32768, "prefill_chunk": 128},
    # Chunks so small make prompts slow on decode workers: routers prefer the prefill worker.
    "pools": {"prefill": {"workers": 1}, "decode": {"workers": 2, "prefill_chunk": 4}},
    "router": {"port": PORT, "replicas": 3, "admission_ttft_ms": 600_000},
}
"""In fp32 with exact KV, the text is that of a single engine."""


class ListedWorker(msgspec.Struct, frozen=True):
    """A worker in the directory; its endpoint is host:port."""

    instance: str
    role: str
    endpoint: str
    pid: int

    @property
    def host(self) -> str:
        return self.endpoint.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])


class HostCluster:
    """up -> (hurt whom you like) -> down. ``key``: the API key of the clients."""

    def __init__(self, net: Network) -> None:
        self.net = net
        self.a, self.b, self.c, self.o = (net.add(name) for name in "abco")
        self.hosts = (self.a, self.b, self.c)
        self.key = ""

    @property
    def folder(self) -> Path:
        """The operator's, for this cluster."""
        return self.o.home / "repository/baton-cluster"

    def url(self, host: Host) -> str:
        """Of its router."""
        return f"https://{host.address}:{PORT}"

    def tls(self) -> ssl.SSLContext:
        """What a client trusts."""
        return ssl.create_default_context(cafile=str(self.folder / "ca.pem"))

    def prepare(self) -> None:
        """What is done by hand before `ray up`."""
        url = redis.start(self.o)
        for host in self.hosts:
            _install(host)
        (self.o.home / "repository/deploy").mkdir(parents=True)
        (self.o.home / "repository" / YAML).write_text(_edited((REPOSITORY / YAML).read_text()))
        hosts = " ".join(f"--host {host.address}" for host in self.hosts)
        said = self._operate(f"{_BIN}/baton init baton-cluster --redis-url {url} {hosts}", 30)
        found = re.search(r"\bsk-\S+", said)
        assert found is not None, said
        self.key = found[0]
        (self.folder / "node/src").mkdir()
        for name in _PROGRAM:
            shutil.copy2(
                REPOSITORY / name, self.folder / "node/src"
            )  # as old as it is: `make` asks
        self.configure(CONFIG)

    def configure(self, config: dict[str, Any]) -> None:
        (self.folder / "node/baton.yaml").write_text(yaml.safe_dump(config))

    def ray(self, line: str, within_s: float = 180.0) -> str:
        """A command of `ray`, by the operator."""
        return self._operate(f"{_BIN}/ray {line}", within_s)

    def baton(self, line: str, within_s: float = 180.0) -> str:
        """A command of `baton` on the head, by way of `ray exec`."""
        return self.ray(f"exec {YAML} '~/baton/run baton {line}'", within_s)

    def knock(self) -> dict[str, dict[str, str]]:
        """What workers say to callers of each kind (see ``knock``), by their endpoints."""
        return msgspec.json.decode(self._ask("knock"), type=dict[str, dict[str, str]])

    def workers(self) -> list[ListedWorker]:
        """Return the workers of the directory."""
        return msgspec.json.decode(self._ask("workers"), type=list[ListedWorker])

    def _ask(self, script: str) -> str:
        """Run one of this folder's scripts as a member of the cluster, on the operator's machine;
        return what it prints."""
        node = self.folder.relative_to(self.o.root) / "node"
        command = f"{PYTHON} -m tests.e2e.hosts.{script} /{node} 2>/dev/null"
        return self.o.run(f"set -a; . /{node}/node.env; set +a; cd {REPOSITORY}; {command}")

    def up(self) -> None:
        """Deploys, or updates, what ``configure`` has said."""
        config = "baton-cluster/node/baton.yaml"
        self.ray(f"rsync-up {YAML} {config} '~/baton/baton.yaml'")
        self.baton("up --address auto --config ~/baton/baton.yaml")

    def down(self) -> None:
        """Drains, ends Ray on the head, and on the others, which `ray down` leaves alone."""
        self.baton("down --address auto")
        self.ray(f"down -y {YAML}")
        ssh = f"ssh -o StrictHostKeyChecking=no -i ~/{KEY}"
        for host in self.hosts[1:]:
            self.o.run(f"{ssh} {USER}@{host.address} '~/baton/run ray stop --force'")

    def serving(self, host: Host) -> set[int]:
        """Our pids of its replicas and engines."""
        lines = host.processes().items()
        return {pid for pid, line in lines if "ServeReplica" in line or "engine_main" in line}

    def _operate(self, line: str, within_s: float) -> str:
        return self.o.run(f"cd ~/repository; {line}", within_s)


def _edited(text: str) -> str:
    """The file as a user edits it: addresses, account, what each host takes."""
    text = re.sub(r"\b10\.0\.0\.", f"{SUBNET}.", text).replace(
        "ssh_user: ubuntu", f"ssh_user: {USER}"
    )
    text = text.replace("~/.ssh/cluster.pem", f"~/{KEY}")
    for i, takes in enumerate(TAKES.values(), 2):
        wanted = msgspec.json.encode(takes).decode()
        text, count = re.subn(rf"({SUBNET}\.{i}\) takes=)'[^']*'", rf"\1'{wanted}'", text)
        assert count == 1, f"{YAML} does not say what {SUBNET}.{i} takes"
    return text


def _install(host: Host) -> None:
    """The environment that `make` would fill from an index, which these machines do not reach."""
    made = host.home / "baton/src/.venv"
    made.mkdir(parents=True)
    for path in _VENV.iterdir():
        if path.is_dir() or path.is_symlink() or path.name == "pyvenv.cfg":
            (made / path.name).symlink_to(path)
    stamps = ["created", *(path.name for path in _VENV.glob("torch-*")), "installed"]
    for name in stamps:
        (made / name).touch()
