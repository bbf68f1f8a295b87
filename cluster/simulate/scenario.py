"""What is simulated: one YAML file, whose keys are these. Relative paths are of its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import yaml
from pydantic import Field, ValidationError, model_validator

from cluster.config.autoscaler import AutoscalerSection
from cluster.config.fields import Section
from cluster.simulate.machine_keys import MachinesSection, NotNegative, Positive
from cluster.simulate.traffic_keys import TrafficSection
from cluster.sizing.snapshot import Goals
from protocol.errors import StartupError
from protocol.roles import ROLES, Role
from router.policies import PolicyName

MOST_WORKERS = 10_000

Count: TypeAlias = Annotated[int, Field(ge=0, le=MOST_WORKERS)]


class PoolsSection(Section):
    prefill: Count = 1
    decode: Annotated[int, Field(ge=1, le=MOST_WORKERS)] = 1


class ObjectivesSection(Section):
    ttft_ms: Positive = 2000.0
    tpot_ms: Positive = 100.0


class RoutingSection(Section):
    policy: PolicyName = "cost"
    admission_ttft_ms: Positive | None = None  # None: 10 times the objective
    admission_queue_ms: Positive | None = None  # None: no bound
    path_ms: NotNegative = 4.0  # to a prefill worker and back


class ScalingSection(AutoscalerSection):
    """As the configuration's section `autoscaler`, and what the world makes of it."""

    start_spread: Annotated[float, Field(ge=0, lt=1)] = (
        0.0  # starts take start_s, more or less by this share
    )
    lend_after_s: NotNegative | None = None  # of Tuning; None: as the autoscaler has it
    down_share: Annotated[float | None, Field(gt=0, le=1)] = None

    @model_validator(mode="before")
    @classmethod
    def _off(cls, given: object) -> object:
        if isinstance(given, dict) and given.get("mode") is False:
            return {**given, "mode": "off"}  # the word off, which to YAML is false
        return given

    @model_validator(mode="after")
    def _ranges(self) -> ScalingSection:
        for role in ROLES:
            least, most = getattr(self, f"{role}_min"), getattr(self, f"{role}_max")
            if least > most:
                raise ValueError(f"{role}_min is {least}, more than {role}_max, which is {most}")
        return self


class EventSection(Section):
    """die: ``count`` workers of a pool, for whom others start where an autoscaler acts; slow_link:
    their links have ``share`` of their speed; slow_start: starts take ``start_s``; no_start: they
    fail, and are tried again; blind: no metrics; burst: requests of that while come ``times`` as
    often."""

    kind: Literal["die", "slow_link", "slow_start", "no_start", "blind", "burst"]
    at_s: NotNegative
    for_s: Positive = 60.0
    pool: Role = "decode"
    count: Annotated[int, Field(ge=1, le=MOST_WORKERS)] = 1
    share: Annotated[float, Field(gt=0, le=1)] = 0.1
    start_s: Positive = 600.0
    times: Annotated[int, Field(ge=2, le=1000)] = 3


class Scenario(Section):
    name: str = "scenario"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    seconds: Positive | None = None  # in which requests come; None: all of the trace
    warm_up_s: NotNegative = 0.0  # requests that arrive before count for nothing
    machines: MachinesSection
    pools: PoolsSection = PoolsSection()
    objectives: ObjectivesSection = ObjectivesSection()
    routing: RoutingSection = RoutingSection()
    traffic: TrafficSection
    autoscaler: ScalingSection = ScalingSection()
    drain_s: NotNegative = 30.0
    events: tuple[EventSection, ...] = ()

    @model_validator(mode="after")
    def _ends(self) -> Scenario:
        if self.seconds is None and self.traffic.trace is None:
            raise ValueError("seconds: expected, as there is no trace that ends")
        return self

    @property
    def goals(self) -> Goals:
        return Goals(ttft_s=self.objectives.ttft_ms / 1e3, tpot_s=self.objectives.tpot_ms / 1e3)


def read(path: Path) -> Scenario:
    """Raises StartupError that names every key that is wrong, and what was expected."""
    return parse(read_raw(path), str(path), path.parent)


def read_raw(path: Path) -> dict[str, Any]:
    """Raises StartupError for what is no mapping."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise StartupError(f"{path} cannot be read: {e.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise StartupError(f"{path}: not YAML: {e}") from None
    if not isinstance(raw, dict):
        raise StartupError(f"{path}: expected a mapping of {', '.join(Scenario.model_fields)}")
    return raw


def parse(raw: dict[str, Any], name: str = "scenario", folder: Path | None = None) -> Scenario:
    """``folder``: where relative paths begin. Raises StartupError."""
    try:
        found = Scenario.model_validate(raw)
    except ValidationError as e:
        lines = [f"  {'.'.join(map(str, d['loc'])) or '-'}: {_says(d)}" for d in e.errors()]
        raise StartupError("\n".join([f"{name}:", *lines])) from None
    if found.traffic.trace is None or folder is None:
        return found
    trace = str(folder / found.traffic.trace)
    return found.model_copy(update={"traffic": found.traffic.model_copy(update={"trace": trace})})


def _says(detail: Any) -> str:
    message = str(detail["msg"]).removeprefix("Value error, ")
    return "unknown key" if detail["type"] == "extra_forbidden" else message
