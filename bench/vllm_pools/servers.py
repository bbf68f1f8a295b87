"""vLLM as one prefill and one decode server on this machine, with a proxy before them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from cluster.local.ports import free_ports
from protocol.roles import ROLES, Role

MODEL_NAME = "model"
START_S = 600.0
"""vLLM compiles the model at its first start."""
STOP_S = 20.0
TRANSFER = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
KV_ROLES: dict[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}


def server_command(vllm: Path, model: Path, port: int, role: Role) -> list[str]:
    """Return the command line of one server; ``vllm`` is the program of that name."""
    transfer = {**TRANSFER, "kv_role": KV_ROLES[role]}
    return [
        *(str(vllm), "serve", str(model), "--served-model-name", MODEL_NAME),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", "4096", "--max-num-seqs", "64", "--enable-prompt-tokens-details"),
        *("--kv-transfer-config", msgspec.json.encode(transfer).decode()),
    ]


def server_environment(side_port: int) -> dict[str, str]:
    """Return the environment of a server that computes with one thread. It is bound to no core:
    NIXL's own threads would share the core of the thread that computes, and slow it by 10x."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
    }


class VllmPools:
    """Both servers and the proxy; ``vllm_pools`` starts and stops them.

    ``url`` is the proxy's. ``pause`` stops all processes where they are, since their threads use
    processor time without any request, and ``resume`` lets them go on.
    """

    def __init__(self, url: str, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self.url = url
        self._processes = processes

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            os.killpg(process.pid, number)


@contextlib.contextmanager
def vllm_pools(vllm: Path, model: Path, folder: Path) -> Iterator[VllmPools]:
    """Start all three; their logs are in ``folder``. Raises RuntimeError with the end of the log
    where one ends early, or is not ready after START_S."""
    front, *ports = free_ports("127.0.0.1", 5)
    urls = [f"http://127.0.0.1:{port}" for port in ports[:2]]
    with contextlib.ExitStack() as stack:
        processes = []
        for number, role in enumerate(ROLES):
            command = server_command(vllm, model, ports[number], role)
            environment = server_environment(ports[2 + number])
            log = folder / f"{role}.log"
            processes.append(stack.enter_context(running(command, environment, log)))
        for process, role, url in zip(processes, ROLES, urls, strict=True):
            await_ready(process, f"{url}/health", folder / f"{role}.log")
        proxy = [sys.executable, "-m", "bench.vllm_pools.proxy", str(front), *urls]
        processes.append(
            stack.enter_context(running(proxy, dict(os.environ), folder / "proxy.log"))
        )
        await_ready(processes[-1], f"http://127.0.0.1:{front}/health", folder / "proxy.log")
        yield VllmPools(f"http://127.0.0.1:{front}", processes)


@contextlib.contextmanager
def running(
    command: Sequence[str], environment: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in a group of its own, and end the whole group.

    The group stays in this session. Linux shares the cores among sessions (autogroup), and a vLLM
    server with its spinning threads in a session of its own answered up to ten times later.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, process_group=0
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_S)


def await_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2.0):
            return
        time.sleep(0.5)
    end = log.read_text(errors="replace")[-2000:]
    raise RuntimeError(f"{log.stem} is not ready; its log ends with:\n{end}")
