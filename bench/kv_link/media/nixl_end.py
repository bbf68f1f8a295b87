"""NIXL over UCX: the sender writes one registered buffer into the other's.

The transports are those of the environment variable UCX_TLS. The process needs torch and
nixl-cu12 1.5.1.
"""

from __future__ import annotations

import base64
import importlib
import time
from typing import Any

import torch

from bench.kv_link.media.memory import LARGEST, MIB, digest, make_buffer

WAIT_S = 30.0
_DONE = b"done"


class NixlEnd:
    """The sender polls its own transfer, and the receiver NIXL's notification."""

    def __init__(self, sending: bool) -> None:
        self._sending = sending
        self._buffer = make_buffer(sending)
        self._data = torch.frombuffer(self._buffer, dtype=torch.uint8)
        api: Any = importlib.import_module("nixl_cu12._api")  # in NIXL's environment alone
        self._agent: Any = api.nixl_agent(
            "sender" if sending else "receiver", api.nixl_agent_config(backends=["UCX"])
        )
        self._agent.register_memory(self._data)
        self._remote: Any = None
        self._base = 0

    def open(self, options: dict[str, Any]) -> dict[str, Any]:
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": self._data.data_ptr()}

    def connect(self, other: dict[str, Any]) -> None:
        self._remote = self._agent.add_remote_agent(base64.b64decode(other["metadata"]))
        self._base = other["address"]

    def run(self, job: dict[str, Any]) -> None:
        if self._sending:
            self._write(job["bytes"])
        else:
            self._wait_for_notification()

    def _write(self, size: int) -> None:
        local, there = (
            self._agent.get_xfer_descs([(base, size, 0)], "DRAM")
            for base in (self._data.data_ptr(), self._base)
        )
        transfer = self._agent.initialize_xfer("WRITE", local, there, self._remote, _DONE)
        state = self._agent.transfer(transfer)
        deadline = time.monotonic() + WAIT_S
        while state != "DONE":
            if state == "ERR" or time.monotonic() > deadline:
                raise ConnectionError(f"the transfer ended in state {state}")
            state = self._agent.check_xfer_state(transfer)
        self._agent.release_xfer_handle(transfer)

    def _wait_for_notification(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while not any(_DONE in came for came in self._agent.get_new_notifs().values()):
            if time.monotonic() > deadline:
                raise ConnectionError(f"no notification within {WAIT_S:g} s")
            time.sleep(0.0002)

    def digest(self, job: dict[str, Any]) -> int:
        assert MIB <= job["bytes"] <= LARGEST
        return digest(self._buffer[: job["bytes"]])

    def close(self) -> None:
        pass  # the agent ends with its process
