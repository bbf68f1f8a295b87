"""Whether NIXL is installed and of use. Nothing is imported: the mover alone loads the library."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_MODULES = ("nixl_cu12", "nixl_cu13")
"""One wheel for each CUDA. Slots are host memory, for which they do not differ."""

RDMA_DEVICES = Path("/sys/class/infiniband")
"""The RDMA devices of a host: InfiniBand, RoCE and EFA."""

INSTALL_HINT = "NIXL is not installed: pip install 'baton[nixl]'"


class NixlPackage(NamedTuple):
    """An installed wheel."""

    module: str  # to import
    version: str  # of the library; agents of one version understand each other


def find_nixl() -> NixlPackage | None:
    """Return the installed wheel, or None."""
    for module in _MODULES:
        if importlib.util.find_spec(module) is not None:
            try:
                return NixlPackage(module, importlib.metadata.version(module.replace("_", "-")))
            except importlib.metadata.PackageNotFoundError:
                continue  # a folder of that name, but no installed wheel
    return None


def is_of_use(env: Mapping[str, str]) -> bool:
    """Return whether NIXL has something that the other carriers have not: an RDMA device. Where the
    operator has named transports of UCX (``UCX_TLS``), they are used, whatever they are."""
    return "UCX_TLS" in env or (RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir()))
