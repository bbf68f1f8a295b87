"""The schema of a scenario's YAML file and its readers; paths are relative to the file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from cluster.config.schema import AutoscalerSection, Section
from cluster.sizing.snapshot import SloTargets
from cluster.workloads.distributions import FORMS, ArrivalKind, parse_length
from engine.kv_cache.kv_format import Precision
from protocol.errors import StartupError, UsageError
from protocol.performance.speculation_profile import SpeculationProfile
from protocol.performance.step_model import parse_step_model
from protocol.roles import ROLES, Role

LARGEST = 1e9
MAX_WORKERS = 10_000
SAMPLE = Path(__file__).parent / "data" / "sample.yaml"
_GPU_KEYS = (
    *("gpu", "model", "context", "compute", "bandwidth", "weight_bytes"),
    *("kv_precision", "draft"),
)

Positive: TypeAlias = Annotated[float, Field(gt=0, le=LARGEST)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0, le=LARGEST)]


def _parse_drafts(given: object) -> SpeculationProfile | None:
    try:
        found = msgspec.convert(given, SpeculationProfile | None)
    except msgspec.ValidationError as e:
        raise ValueError(f"expected the fields of a SpeculationProfile: {e}") from None
    if found is not None and not found.is_valid:
        raise ValueError("no worker has such a SpeculationProfile; check its ranges")
    return found


def _check_step(given: tuple[float, ...] | None) -> tuple[float, ...] | None:
    if given is not None and parse_step_model(given) is None:
        raise ValueError(
            "expected five coefficients from 0 to 60 s, or these and the rows, KV tokens and prompt"
            f" tokens of the largest step, not {list(given)}"
        )
    return given


Drafts: TypeAlias = Annotated[Any, BeforeValidator(_parse_drafts)]


def _check_unused(section: Section, names: tuple[str, ...], why: str) -> None:
    """Raise ValueError if one of the keys ``names`` is given, which has no effect."""
    for name in names:
        if name in section.model_fields_set and getattr(section, name) is not None:
            raise ValueError(f"{name} has no effect {why}")


class MachineSection(Section):
    """A machine by the fields of its ``StepModel``, the coefficients at least, as in the snapshots
    of an autoscaler's log, or by GPU and model, as for `baton plan`."""

    step: Annotated[tuple[float, ...] | None, AfterValidator(_check_step)] = None
    gpu: str | None = None
    model: str | None = None
    tp: Annotated[int, Field(ge=1, le=64)] = 1  # GPUs of a worker; step is of all of them together
    context: Positive = 2048.0  # tokens that a sequence holds while it decodes, with gpu and model
    compute: Annotated[float | None, Field(gt=0, le=1)] = None  # of the GPU's; as in baton plan
    bandwidth: Annotated[float | None, Field(gt=0, le=1)] = None
    weight_bytes: Literal[1, 2] = 2  # of a parameter, with gpu and model
    kv_precision: Precision = "fp8"  # likewise
    draft: str | None = None  # a model whose weights and KV take memory there, too; likewise
    chunk: Annotated[int | None, Field(ge=1, le=1_000_000)] = None  # 512; with gpu, as a worker's
    max_batch: Annotated[int | None, Field(ge=1, le=100_000)] = None  # 64; with gpu, likewise
    kv_tokens: Annotated[int | None, Field(ge=32, le=10**9)] = None
    kv_bytes: Positive | None = None
    link_gb_per_s: Positive | None = None
    speculation: Drafts = None  # a SpeculationProfile; None: nothing drafts

    @model_validator(mode="after")
    def _check_kind(self) -> MachineSection:
        if (self.step is None) == (self.gpu is None or self.model is None):
            raise ValueError("expected step (five coefficients in seconds), or gpu and model")
        if self.step is not None and (self.kv_tokens is None or self.kv_bytes is None):
            raise ValueError("step wants kv_tokens and kv_bytes beside it")
        if self.step is not None:
            _check_unused(self, _GPU_KEYS, "beside step, whose coefficients replace it")
        else:
            _check_unused(self, ("kv_bytes",), "beside model, from which it is computed")
        if self.step is not None and not any(self.step[:3]):
            raise ValueError("step: a step that decodes takes no time; expected one of 3 above 0")
        return self


class MachinesSection(Section):
    prefill: MachineSection
    decode: MachineSection | None = None  # as prefill's

    @model_validator(mode="after")
    def _check_kv_bytes(self) -> MachinesSection:
        prefill, decode = self.prefill, self.of("decode")
        sent, received = prefill.kv_bytes, decode.kv_bytes
        if sent is not None and received is not None and sent != received:
            raise ValueError(
                f"decode.kv_bytes: expected {sent:.15g}, as prefill sends, not {received:.15g}"
            )
        precision = prefill.kv_precision
        if prefill.model and decode.model and decode.kv_precision != precision:
            raise ValueError(f"decode.kv_precision: expected {precision}, as prefill sends")
        return self

    def of(self, role: Role) -> MachineSection:
        return self.decode or self.prefill if role == "decode" else self.prefill

    @property
    def gpus(self) -> dict[Role, int]:
        """Return the GPUs of a worker by its home."""
        return {role: self.of(role).tp for role in ROLES}


def _parse_tokens(given: object) -> object:
    try:
        return parse_length(str(given), "tokens")
    except StartupError:
        raise ValueError(f"expected {FORMS}, not {given!r}") from None


Tokens: TypeAlias = Annotated[Any, BeforeValidator(_parse_tokens)]


class RateSection(Section):
    """``rate`` requests a second from ``at_s`` on, until the next section."""

    at_s: NotNegative
    rate: NotNegative


class SineSection(Section):
    """A daily wave: rate * (1 + amplitude * sin(2 pi (t/period_s - phase - 1/4))), which is lowest
    at the beginning, or ``phase`` of a period later."""

    amplitude: Annotated[float, Field(ge=0, le=1)] = 0.5
    period_s: Positive = 86400.0
    phase: Annotated[float, Field(ge=0, le=1)] = 0.0


class MixSection(Section):
    """Requests of one kind, which arrive from ``from_s`` on for ``for_s`` seconds."""

    rate: NotNegative | None = None
    rates: tuple[RateSection, ...] = ()
    sine: SineSection | None = None
    arrivals: ArrivalKind = "poisson"
    burstiness: Positive = 1.0
    prompt: Tokens
    output: Tokens
    prefix: Tokens | None = None  # tokens at the beginning of a prompt, shared within a group
    groups: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    from_s: NotNegative = 0.0
    for_s: Positive | None = None

    @model_validator(mode="after")
    def _check_rates(self) -> MixSection:
        if (self.rate is None) == (not self.rates):
            raise ValueError("expected rate, or rates (a list of at_s and rate)")
        if any(a.at_s >= b.at_s for a, b in zip(self.rates, self.rates[1:], strict=False)):
            raise ValueError("rates: expected at_s in ascending order")
        return self


class TrafficSection(Section):
    """A trace in the format of Mooncake (.jsonl) or Azure (.csv), or mixes, or both."""

    trace: str | None = None
    speed: Positive = 1.0  # of the trace: 2 halves the time between requests
    copies: Annotated[int, Field(ge=1, le=100_000)] = 1  # of it, with prefixes of their own
    spread_s: NotNegative = 30.0  # the copies begin within so many seconds
    scale: Positive = 1.0  # of the trace's lengths
    mixes: tuple[MixSection, ...] = ()

    @model_validator(mode="after")
    def _check_source(self) -> TrafficSection:
        if self.trace is None and not self.mixes:
            raise ValueError("expected trace, or mixes")
        if self.trace is None:
            _check_unused(self, ("speed", "copies", "spread_s", "scale"), "without a trace")
        return self


Count: TypeAlias = Annotated[int, Field(ge=0, le=MAX_WORKERS)]


class ScenarioPoolsSection(Section):
    prefill: Count = 1
    decode: Annotated[int, Field(ge=1, le=MAX_WORKERS)] = 1


class ObjectivesSection(Section):
    ttft_ms: Positive = 2000.0
    tpot_ms: Positive = 100.0


class RoutingSection(Section):
    admission_ttft_ms: Positive | None = None  # None: as of a router
    admission_queue_ms: Positive | None = None  # None: as of a router
    path_ms: NotNegative = 4.0  # to a prefill worker and back
    routers: Annotated[int, Field(ge=1, le=64)] = 1  # requests go to them by turns
    load_age_ms: NotNegative = 0.0  # between reports of workers; 0: the only router knows all

    @model_validator(mode="after")
    def _check_reports(self) -> RoutingSection:
        if self.load_age_ms < 1 and (self.load_age_ms or self.routers > 1):
            raise ValueError("expected load_age_ms of at least 1, or 0 with a single router")
        return self


class ScalingSection(AutoscalerSection):
    """The configuration's section `autoscaler`, and how long starts take in the simulation."""

    start_spread: Annotated[float, Field(ge=0, lt=1)] = 0.0  # start_s varies by this share

    @model_validator(mode="before")
    @classmethod
    def _read_off(cls, given: object) -> object:
        if isinstance(given, dict) and given.get("mode") is False:
            return {**given, "mode": "off"}  # YAML reads the word off as false
        return given

    @model_validator(mode="after")
    def _check_limits(self) -> ScalingSection:
        for role in ROLES:
            least, most = getattr(self, f"{role}_min"), getattr(self, f"{role}_max")
            if least > most:
                raise ValueError(f"{role}_min is {least}, more than {role}_max, which is {most}")
        return self


class EventSection(Section):
    """An event at ``at_s``, most of which last ``for_s`` seconds.

    die: ``count`` workers of a pool die, and others start if an autoscaler acts. slow_link: their
    links have ``share`` of their speed. slow_start: starts take ``start_s``. no_start: starts fail
    and are tried again. blind: metrics are missing. burst: requests arrive ``times`` as often.
    """

    kind: Literal["die", "slow_link", "slow_start", "no_start", "blind", "burst"]
    at_s: NotNegative
    for_s: Positive = 60.0
    pool: Role = "decode"
    count: Annotated[int, Field(ge=1, le=MAX_WORKERS)] = 1
    share: Annotated[float, Field(gt=0, le=1)] = 0.1
    start_s: Positive = 600.0
    times: Annotated[int, Field(ge=2, le=1000)] = 3


class Scenario(Section):
    """One scenario file; `baton simulate` runs it."""

    name: str = "scenario"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    seconds: Positive | None = None  # in which requests come; None: all of the trace
    warm_up_s: NotNegative = 0.0  # requests that arrive before, and GPU-seconds, are not counted
    machines: MachinesSection
    pools: ScenarioPoolsSection = ScenarioPoolsSection()
    objectives: ObjectivesSection = ObjectivesSection()
    routing: RoutingSection = RoutingSection()
    traffic: TrafficSection
    autoscaler: ScalingSection = ScalingSection()
    drain_s: NotNegative = 30.0
    events: tuple[EventSection, ...] = ()

    @model_validator(mode="after")
    def _check_duration(self) -> Scenario:
        if self.seconds is None and self.traffic.trace is None:
            raise ValueError("seconds: expected, as there is no trace that ends")
        if self.seconds is None:
            return self
        if self.warm_up_s >= self.seconds:
            raise ValueError(
                f"warm_up_s is {self.warm_up_s:g}; expected less than seconds, {self.seconds:g}"
            )
        for number, event in enumerate(self.events):
            if event.at_s >= self.seconds:
                raise ValueError(
                    f"events.{number}: at_s is {event.at_s:g}; expected less than seconds,"
                    f" {self.seconds:g}"
                )
        return self

    @model_validator(mode="after")
    def _check_slow_links(self) -> Scenario:
        for number, event in enumerate(self.events):
            machine = self.machines.of(event.pool)
            is_unlimited = machine.step is not None and machine.link_gb_per_s is None
            if event.kind == "slow_link" and is_unlimited:
                raise ValueError(
                    f"events.{number}: slow_link has no effect on a link without a bound; expected"
                    f" link_gb_per_s beside the step of the machines of {event.pool}"
                )
        return self

    @property
    def goals(self) -> SloTargets:
        return SloTargets(
            ttft_s=self.objectives.ttft_ms / 1e3, tpot_s=self.objectives.tpot_ms / 1e3
        )


def _read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file. Raises UsageError if it cannot be read or is not a mapping."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"{path} cannot be read: {e.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise UsageError(f"{path}: not YAML: {e}") from None
    if not isinstance(raw, dict):
        raise UsageError(f"{path}: expected a mapping of {', '.join(Scenario.model_fields)}")
    return raw


def parse_scenario(
    raw: dict[str, Any], name: str = "scenario", folder: Path | None = None
) -> Scenario:
    """Validate a scenario; relative paths begin in ``folder``. Raises UsageError."""
    try:
        found = Scenario.model_validate(raw)
    except ValidationError as e:
        lines = [f"  {'.'.join(map(str, d['loc'])) or '-'}: {_explain(d)}" for d in e.errors()]
        raise UsageError("\n".join([f"{name}:", *lines])) from None
    if found.traffic.trace is None or folder is None:
        return found
    trace = str(folder / found.traffic.trace)
    return found.model_copy(update={"traffic": found.traffic.model_copy(update={"trace": trace})})


def _explain(detail: Any) -> str:
    """Say in plain words what is wrong with a value, from what pydantic reports."""
    kind, message = detail["type"], str(detail["msg"]).removeprefix("Value error, ")
    if kind in _PLAIN_WORDS:
        return _PLAIN_WORDS[kind]
    for ending in ("_parsing", "_type"):
        if (name := kind.removesuffix(ending)) in _KIND_WORDS:
            return f"expected {_KIND_WORDS[name]}, not {detail['input']!r}"
    if message.startswith("Input should be "):
        return f"must be {message.removeprefix('Input should be ')}, not {detail['input']!r}"
    return message


_PLAIN_WORDS = {"extra_forbidden": "unknown key", "missing": "missing"}
_KIND_WORDS = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "string": "text",
    "model": "a section",
    "model_attributes": "a section",
    "list": "a list",
    "tuple": "a list",
}


def load_scenario(path: Path | None, values: list[str], trace: Path | None) -> Scenario:
    """Read a scenario (None: the sample) with the command line's changes.

    ``values``: KEY=VALUE, set over the file's. A ``trace`` replaces the file's traffic. Raises
    UsageError.
    """
    path = path or SAMPLE
    raw = _read_yaml(path)
    if trace is not None:
        raw["traffic"] = {"trace": str(trace.absolute())}
        raw.pop("seconds", None)
    for text in values:
        _set(raw, text)
    return parse_scenario(raw, str(path), path.parent)


def _set(raw: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    *path, last = key.strip().split(".")
    if not equals or not all([*path, last]):
        raise UsageError(f"--set: expected KEY=VALUE, as in pools.decode=4, not {text!r}")
    section = raw
    for name in path:
        inner = section.setdefault(name, {})
        if inner is None:
            inner = section[name] = {}
        if not isinstance(inner, dict):
            raise UsageError(f"--set: {key}: {name} is no section")
        section = inner
    try:
        section[last] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise UsageError(f"--set: {key}: {value!r} is not YAML") from None
