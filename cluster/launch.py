"""What `baton up` hands to the supervisor: a file of mode 0600 in the run folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cluster.state import write_private
from engine.kv_format import Precision, StorageChoice
from kvtransfer.codecs import Wanted
from protocol.directory import check_url
from protocol.errors import StartupError
from router.policies import PolicyName


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster to start, with everything that could be checked beforehand checked."""

    cluster: str
    model_path: str
    model_id: str
    run_dir: str
    events_path: str
    host: str = "127.0.0.1"
    port: int = 8000
    prefill: int = 1
    decode: int = 1
    redis_url: str | None = None
    threads: int | None = None
    kv_tokens: int | None = None
    max_batch: int = 64
    prefill_chunk: int = 512
    max_model_len: int | None = None
    step_budget_ms: float | None = None
    dtype: str | None = None
    kv_precision: Precision = "fp8"
    kv_pool: StorageChoice = "auto"
    kv_codec: Wanted = "auto"
    local_prefill_tokens: int = 64
    routing_policy: PolicyName = "cost"
    ttft_slo_ms: float = 2000.0
    tpot_slo_ms: float = 100.0
    admission_ttft_ms: float | None = None
    admission_queue_ms: float | None = None
    api_keys: str | None = None
    start_deadline_s: float = 180.0
    drain_s: float = 30.0

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def check(self) -> None:
        """Raises StartupError for what makes no cluster."""
        if self.prefill < 0:
            raise StartupError(f"--prefill must be at least 0, not {self.prefill}")
        if self.decode < 1:
            raise StartupError(f"--decode must be at least 1, not {self.decode}")
        if self.redis_url is not None:
            check_url(self.redis_url)

    def write(self) -> Path:
        path = Path(self.run_dir) / "launch.json"
        write_private(path, msgspec.json.encode(self))
        return path


def read_launch(path: Path) -> Launch:
    return msgspec.json.decode(path.read_bytes(), type=Launch)
