"""The section `autoscaler`: flags and variables have its name in front (``--autoscaler-mode``)."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import AfterValidator, SecretStr

from cluster.autoscale.mode import MOST, Mode
from cluster.config import values
from cluster.config.fields import Section, key

HttpUrl: TypeAlias = Annotated[SecretStr, AfterValidator(values.http_url)]


class AutoscalerSection(Section):
    mode: Mode = key(
        "off", "off; advise: say what would be done; act: do it (see docs/operations.md)."
    )
    prometheus_url: HttpUrl | None = key(
        None, "A Prometheus that watches the cluster; null: the processes are read themselves."
    )
    interval_s: float = key(5.0, "Seconds from one decision to the next.", ge=0.5, le=300)
    window_s: float = key(60.0, "Seconds of traffic that a decision is about.", ge=5, le=3600)
    prefill_min: int = key(1, "Prefill workers at least.", ge=0, le=MOST)
    prefill_max: int = key(8, "Prefill workers at most.", ge=0, le=MOST)
    decode_min: int = key(1, "Decode workers at least.", ge=1, le=MOST)
    decode_max: int = key(8, "Decode workers at most.", ge=1, le=MOST)
    gpus: float | None = key(None, "GPUs of all workers together at most; null: any.", gt=0)
    loans: bool = key(True, "Workers of one pool may serve in the other for a while.")
    loan_drain_s: float = key(
        2.0, "Seconds to finish requests before a decode worker turns to prefill.", ge=0, le=600
    )
    down_after_s: float = key(
        180.0, "Seconds for which less must have done before workers go.", ge=1, le=86400
    )
    down_every_s: float = key(20.0, "Seconds from one step down to the next.", ge=0, le=86400)
    warm_up_s: float = key(
        30.0, "Age in seconds before which a worker's speed is not counted on.", ge=0, le=3600
    )
    start_s: float = key(
        60.0,
        "Seconds that a start takes, until one was seen; workers stay as long.",
        gt=0,
        le=86400,
    )
    log: str | None = key(
        None, "File of decisions, JSON lines; null: decisions.jsonl in the folder of the run."
    )
