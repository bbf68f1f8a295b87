"""The settings of a worker. They are frozen and picklable: Ray carries them to the replica."""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.settings.connection import check_connections, without_password
from engine.ipc.settings import EngineSettings
from kvtransfer.codec_choice import CodecChoice
from protocol.errors import StartupError
from protocol.roles import Role
from protocol.security.tls import TlsFiles


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one worker of either role. Port 0 lets the system choose a port.

    ``kv_codec`` and ``kv_carriers`` have no key: benchmarks and tests set them in code.
    """

    cluster: str
    redis_url: str
    token: str
    model_id: str
    host: str
    port: int = 0
    kv_port: int = 0  # KV over gRPC
    kv_tcp_port: int = 0  # KV over TCP
    metrics_port: int = 0
    kv_codec: CodecChoice = "auto"
    kv_carriers: tuple[str, ...] = ()  # those to use, beside gRPC; empty: all
    link_bytes_s: float  # declared bandwidth of the network link; 0: the best rate seen
    trusted_fabric: bool  # KV may travel in plain text, by carriers without authentication
    engine: EngineSettings
    engine_module: str  # run as the engine's process, see cluster.worker.engine_main
    tls: TlsFiles | None  # required beyond loopback

    @property
    def role(self) -> Role:
        """The role that the worker is started with."""
        return self.engine.role

    def with_model(self, path: str, model_id: str, **changes: Any) -> WorkerSettings:
        """Return these settings with a model; ``changes`` are further settings of the engine."""
        engine = msgspec.structs.replace(self.engine, model_path=path, **changes)
        return msgspec.structs.replace(self, model_id=model_id, engine=engine)

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown["token"] = "..."
        shown["redis_url"] = without_password(self.redis_url)
        return f"WorkerSettings({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def check(self) -> None:
        """Check the parts that the configuration schema does not check. Raises StartupError."""
        check_connections("a worker", self.token, self.redis_url, self.tls, self.host)
        for name in ("port", "kv_port", "kv_tcp_port", "metrics_port"):
            value = getattr(self, name)
            if not 0 <= value <= 65535:
                raise StartupError(f"{name} must be in 0..65535 (0: any free one), not {value}")
