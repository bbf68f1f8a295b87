"""The metrics of one worker, read from it at each scrape; nothing is counted twice.

Names follow vLLM where vLLM has one. All metrics have the labels ``model`` and ``role``; gauges
also have ``replica``, the worker. Counters of the engine come with its beats, up to 0.5 s old.

To add a metric of the engine, count it in ``engine.ipc.counters.EngineCounters``; everything else
is read through ``MetricSources``. Then yield its family from ``WorkerCollector.collect``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from cluster.worker.link_metrics import link_metrics
from cluster.worker.metric_families import (
    LABELS,
    counter,
    cumulative_buckets,
    gauge,
    histogram,
    labelled_counter,
    labelled_gauge,
)
from cluster.worker.utilisation import WorkerLimits
from engine.ipc.counters import (
    BATCH_SIZE,
    STEP_SECONDS,
    EngineCounters,
    SpeculationStatus,
    WorkDone,
)
from engine.kv_cache.kv_format import Codec
from engine.process.client import EngineClient
from kvtransfer.links import LinkRow
from kvtransfer.traffic import TRANSFER_SECONDS, CarrierTraffic, TrafficCounter
from protocol.registry.directory import WALLS, WorkerRecord, WorkerUtilisation

REPLICA_CHARS = 12  # of the instance id: enough to tell workers apart, and to read


@dataclass(frozen=True)
class MetricSources:
    """The parts of a worker that its metrics are read from. ``requests``: counts of the front."""

    record: Callable[[], WorkerRecord]
    engine: EngineClient
    traffic: TrafficCounter
    requests: Callable[[], dict[str, int]]
    machine: Callable[[], WorkerLimits | None]
    not_after: Callable[[], float | None] = lambda: None  # of the certificate, if any
    role_changes: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (from, to)
    links: Callable[[], Sequence[LinkRow]] = tuple  # by which KV is received


def make_registry(sources: MetricSources) -> CollectorRegistry:
    """Return a registry with the worker's metrics, and CPU and memory of its two processes."""
    made = CollectorRegistry()
    made.register(WorkerCollector(sources))
    ProcessCollector(registry=made)

    def engine_pid() -> int:
        session = sources.engine.current
        return session.process.pid if session is not None else -1  # -1: shown as absent

    ProcessCollector(namespace="baton_engine", pid=engine_pid, registry=made)
    return made


def render_page(made: CollectorRegistry) -> Callable[[], bytes]:
    return lambda: generate_latest(made)


class WorkerCollector(Collector):
    """Collects the metrics of one worker whose names begin with ``baton_``."""

    def __init__(self, sources: MetricSources) -> None:
        self._sources = sources

    def describe(self) -> Iterable[Metric]:
        return ()  # at registration the worker has no record yet

    def collect(self) -> Iterator[Metric]:
        record = self._sources.record()
        labels = [record.model.id, record.role]
        one = [*labels, record.instance[:REPLICA_CHARS]]
        yield from _load(record, one)
        yield from utilisation_metrics(record.walls, one)
        yield from ceiling_metrics(self._sources.machine(), record.kv_tokens_total, one)
        yield from self._front(labels, record.instance[:REPLICA_CHARS])
        yield from self._certificate(labels, record.instance[:REPLICA_CHARS])
        yield from self._engine(labels)
        if record.role == "decode":
            engine = self._sources.engine
            replica = record.instance[:REPLICA_CHARS]
            yield from speculation_metrics(engine.counters(), engine.speculation(), labels, replica)
        yield from _transfers(self._sources.traffic, labels)
        yield from link_metrics(self._sources.links(), one)
        yield _role_changes(self._sources.role_changes, record)

    def _certificate(self, labels: list[str], replica: str) -> Iterator[Metric]:
        ends = self._sources.not_after()
        if ends is not None:
            name, text = (
                "certificate_not_after_seconds",
                "Time at which the certificate expires, in seconds since the epoch",
            )
            yield labelled_gauge("use", name, text, [*labels, replica], [("cluster", ends)])

    def _front(self, labels: list[str], replica: str) -> Iterator[Metric]:
        for name, count in self._sources.requests().items():
            yield gauge(name, _FRONT[name], [*labels, replica], count)

    def _engine(self, labels: list[str]) -> Iterator[Metric]:
        done = self._sources.engine.counters()
        for name, text, count in (
            ("prefill_computed_tokens", "Prompt tokens computed", done.prefill_tokens),
            ("generation_tokens", "Tokens generated", done.generated_tokens),
            ("num_preemptions", "Preempted sequences", done.preemptions),
            (
                "prefix_cache_queries_tokens",
                "Prompt tokens looked up in the prefix cache",
                done.cache_queries,
            ),
            (
                "prefix_cache_hits_tokens",
                "Prompt tokens found in the prefix cache",
                done.cache_hits,
            ),
            ("engine_restarts", "Engines that were replaced", self._sources.engine.restarts),
        ):
            yield counter(name, text, labels, count)
        yield from work_metrics(done.done, labels)
        steps, sizes = (done.step_seconds, STEP_SECONDS), (done.batch_size, BATCH_SIZE)
        yield histogram("engine_step_seconds", "Duration of a step of the engine", labels, *steps)
        yield histogram("engine_batch_size", "Sequences in a step", labels, *sizes)


_FRONT = {
    "decode_jobs": "Requests owned by this worker, including those that are queued or prefilled"
    " elsewhere",
    "prefill_calls": "Prompts that this worker computes, or holds until they are fetched",
    "kv_slots_held": "Slots of shared memory that hold KV in transfer or are reserved for it",
}


def _load(record: WorkerRecord, labels: list[str]) -> Iterator[Metric]:
    used = record.kv_tokens_total - record.kv_tokens_free
    for name, text, value in (
        ("requests_running", "Sequences that decode", record.running),
        ("requests_waiting", "Sequences that wait: for prefill, KV or pages", record.waiting),
        ("queued_prefill_tokens", "Prompt tokens yet to be computed", record.queued_tokens),
        (
            "kv_cache_usage_ratio",
            "Share of the KV pages in use",
            used / max(1, record.kv_tokens_total),
        ),
        ("kv_cache_tokens", "Capacity of the KV pool in tokens", record.kv_tokens_total),
        ("draining", "1: accepts no new requests", int(record.draining)),
        ("engine_up", "1: the engine serves", int(record.engine_pid > 0)),
    ):
        yield gauge(name, text, labels, value)


def _transfers(traffic: TrafficCounter, labels: list[str]) -> Iterator[Metric]:
    """Yield the KV that this worker pulled; only the receiver counts a transfer."""
    names = [*LABELS, "transport", "codec"]
    bytes_ = CounterMetricFamily(
        "baton_kv_transfer_bytes", "KV received, in bytes on the wire", labels=names
    )
    raw = CounterMetricFamily(
        "baton_kv_transfer_raw_bytes", "KV received, in bytes before encoding", labels=names
    )
    failures = CounterMetricFamily("baton_kv_transfer_failures", "That broke", labels=names)
    seconds = HistogramMetricFamily(
        "baton_kv_transfer_seconds",
        "Duration of a transfer, from the request to the last frame",
        labels=names,
    )
    for carrier, codec in _links(traffic):
        of = [*labels, carrier, codec.name.lower()]
        one = traffic.by_carrier.get((carrier, codec), CarrierTraffic())
        bytes_.add_metric(of, one.bytes)
        raw.add_metric(of, one.raw_bytes)
        failures.add_metric(of, one.failures)
        seconds.add_metric(of, cumulative_buckets(one.seconds, TRANSFER_SECONDS), one.seconds.total)
    yield from (bytes_, raw, failures, seconds)


def _links(traffic: TrafficCounter) -> list[tuple[str, Codec]]:
    """Return the carriers and codecs to report. gRPC, which every worker has, is always there, so
    that its series begin at 0."""
    return sorted({*traffic.by_carrier, *(("grpc", codec) for codec in Codec)})


def _role_changes(changes: Mapping[tuple[str, str], int], record: WorkerRecord) -> Metric:
    """Return the role changes of the worker's life, under the role that it was started with."""
    family = CounterMetricFamily(
        "baton_role_flips", "Changes of the worker's role", labels=[*LABELS, "from", "to"]
    )
    for change in (("prefill", "decode"), ("decode", "prefill")):
        family.add_metric(
            [record.model.id, record.home or record.role, *change], changes.get(change, 0)
        )
    return family


def speculation_metrics(
    done: EngineCounters, now: SpeculationStatus, labels: list[str], replica: str
) -> Iterator[Metric]:
    """Yield the metrics of speculation; ``labels`` are model and role.

    A sequence gets 1 + num_accepted_tokens / decode_rows tokens per step on average."""
    spec = done.speculation
    yield counter(
        "decode_rows", "Decoding sequences, summed over all steps", labels, done.decode_rows
    )
    for name, text, count in (
        ("steps", "Steps with drafts", spec.steps),
        ("num_drafts", "Drafts: one for each sequence and step with proposed tokens", spec.drafts),
        ("num_draft_tokens", "Tokens proposed", spec.draft_tokens),
        ("num_accepted_tokens", "Tokens accepted", spec.accepted_tokens),
        ("draft_seconds", "Seconds spent on proposing tokens", spec.draft_seconds),
    ):
        yield counter(f"spec_decode_{name}", text, labels, count)
    name, text = "num_accepted_tokens_per_pos", "Accepted tokens, by their position in the draft"
    by_place = ((str(place), count) for place, count in enumerate(spec.accepted_beyond))
    yield labelled_counter("position", f"spec_decode_{name}", text, labels, by_place)
    drops = (("load", spec.load_failures), ("crash", spec.crashes))
    text = "Dropped proposers, which could not be loaded or failed later"
    yield labelled_counter("reason", "spec_decode_drops", text, labels, drops)
    if now.active:
        yield from _active(now, [*labels, replica])


def _active(now: SpeculationStatus, labels: list[str]) -> Iterator[Metric]:
    active = GaugeMetricFamily(
        "baton_spec_decode_active",
        "1: this proposer is in use",
        labels=[*LABELS, "replica", "proposer"],
    )
    active.add_metric([*labels, now.proposer], 1)
    yield active
    of = "Tokens per second of steps with drafts, over those of plain steps"
    yield gauge("spec_decode_predicted_speedup", f"{of}: predicted", labels, now.predicted_speedup)
    yield gauge("spec_decode_measured_speedup", f"{of}: measured", labels, now.measured_speedup)


def work_metrics(done: WorkDone, labels: list[str]) -> Iterator[Metric]:
    """Yield the work that the engine did; ``labels`` are model and role."""
    yield counter("engine_flops", "Floating point operations of steps", labels, done.flops)
    moved = (("weights", done.weight_bytes), ("kv", done.kv_bytes))
    yield labelled_counter(
        "kind", "engine_bytes", "Bytes that steps moved in memory", labels, moved
    )
    text = "Seconds in which the next sequence waited for pages of KV"
    yield counter("kv_starved_seconds", text, labels, done.starved_seconds)


def utilisation_metrics(now: WorkerUtilisation | None, labels: list[str]) -> Iterator[Metric]:
    """Yield the utilisation; ``labels`` are model, role and replica. It is 0 while unknown."""
    text = (
        "Share of the wall's ceiling that was used in the last seconds; compute and bandwidth:"
        " while steps ran"
    )
    ratio = GaugeMetricFamily(
        "baton_wall_utilization_ratio", text, labels=[*LABELS, "replica", "wall"]
    )
    for wall in WALLS:
        ratio.add_metric([*labels, wall], 0.0 if now is None else now.share_of(wall))
    yield ratio
    busy, waiting = (0.0, 0.0) if now is None else (now.busy, now.kv_wait)
    yield gauge("engine_busy_ratio", "Share of the last seconds in which steps ran", labels, busy)
    yield gauge("kv_transfers_awaited", "Sequences that wait only for KV", labels, waiting)


def ceiling_metrics(of: WorkerLimits | None, kv_tokens: int, labels: list[str]) -> Iterator[Metric]:
    """Yield the ceilings of the machine; an unknown ceiling has no series."""
    text = "Maximum of this worker, measured or declared"
    names = [*LABELS, "replica", "wall", "unit"]
    metric = GaugeMetricFamily("baton_ceiling", text, labels=names)
    flops, bytes_, link = (0.0, 0.0, 0.0)
    if of is not None:
        flops, bytes_, link = of.ceilings.flops, of.ceilings.bytes, of.link
    for wall, unit, value in (
        ("compute", "flop_per_second", flops),
        ("bandwidth", "bytes_per_second", bytes_),
        ("capacity", "tokens", float(kv_tokens)),
        ("network", "bytes_per_second", link),
    ):
        if value:
            metric.add_metric([*labels, wall, unit], value)
    yield metric
