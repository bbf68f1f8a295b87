"""Prepares the nodes of a Ray cluster for a deployment, before anything is changed.

    check   the doctor's checks, on all nodes at once; a problem on any of them stops the deployment
    fetch   the model: one download per node, and only the tokenizer where no worker can run

Both are tasks of Ray that run on the node, in the environment of its replicas: the token of the hub
is the node's own, and does not travel through Ray. A download may take any time while bytes arrive.
`baton up --address` calls ``prepare_nodes``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec.structs import replace

from cluster.doctor import checks
from cluster.doctor.checks import PreflightFailed
from cluster.doctor.draft import requested_speculation
from cluster.doctor.finding import Finding, problems, run_checks
from cluster.doctor.subject import DoctorSubject, SubjectPool
from cluster.local.start_report import StageDone, StageNote, StageStarted, StartReporter
from cluster.models import drafting, locate
from cluster.serve import ray_nodes
from cluster.serve.ray_nodes import RayNode
from cluster.serve.replica_kinds import resource_name
from cluster.settings.launch_settings import LaunchSettings
from protocol.errors import StartupError
from protocol.roles import ROLES, Role

if TYPE_CHECKING:  # it imports Ray Serve, which the tasks on the nodes do not need
    from cluster.serve.applications import ReplicaLayout

SILENT_S = 60.0
"""Longest time in seconds that a node may say nothing; it reports once a second."""
_CHECK_S = 20.0  # the first check on a node imports what it needs, beside the other nodes' work
_POLL_S = 0.5
_REPORT_S = 1.0
_SHOWN_NODES = 3


class NodeReport(msgspec.Struct, frozen=True):
    """What a node says of its checks, or of its download so far, in bytes.

    ``notes``: about a draft model, without which workers serve, too. ``error``: why the model
    cannot be served there."""

    done: int = 0
    total: int = 0
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    error: str = ""


class NodeTaskRunner(Protocol):
    """Work that runs on several nodes; ``ray_nodes.NodeTasks`` is one."""

    @property
    def pending(self) -> Sequence[str]: ...

    def poll(self, timeout_s: float) -> list[tuple[str, NodeReport]]: ...


def prepare_nodes(
    launch: LaunchSettings, layout: ReplicaLayout, report: StartReporter, *, memory: bool
) -> None:
    """Check the nodes that take replicas, and fetch the model onto them; report by node.

    ``memory``: whether memory must be free, as no worker runs yet. Raises StartupError with the
    problems of all nodes."""
    found = [(node, node_subject(node, launch, layout)) for node in ray_nodes.living_nodes()]
    subjects = [(node, subject) for node, subject in found if subject is not None]
    report(StageStarted("nodes"))
    asked = [(node, (subject, memory)) for node, subject in subjects]
    checked = follow_nodes(ray_nodes.NodeTasks(check_node, asked), report)
    _judge(checked, report)
    fetched = follow_nodes(ray_nodes.NodeTasks(fetch_model, asked), report)
    _judge({each: _news(said, checked[each]) for each, said in fetched.items()}, report)
    workers = sum(subject.weights for _, subject in subjects)
    text = f"the model is on {workers} for workers, and its tokenizer on {len(subjects) - workers}"
    report(StageDone("nodes", f"{len(subjects)} checked; {text} more"))


# ---- on the nodes -------------------------------------------------------------------------------


def check_node(asked: tuple[DoctorSubject, bool]) -> Iterator[NodeReport]:
    """Run the doctor's checks on this node, with those of memory if the second value is true."""
    subject, memory = asked
    results = run_checks(checks.node_checks(subject, memory=memory), subject, _CHECK_S)
    yield NodeReport(findings=tuple(results.findings))


def fetch_model(asked: tuple[DoctorSubject, bool]) -> Iterator[NodeReport]:
    """Download the model to this node if it is missing; report once a second.

    The last report has the findings about a model that was missing: the first checks did not see
    it."""
    download = _NodeDownload(asked[0])
    threading.Thread(target=download.run, daemon=True, name="fetch-model").start()
    while not download.ended(_REPORT_S):
        yield download.report
    if download.fetched and not download.report.error:
        yield from (_with_findings(download.report, later) for later in check_node(asked))
    else:
        yield download.report


def _with_findings(report: NodeReport, later: NodeReport) -> NodeReport:
    return msgspec.structs.replace(report, findings=later.findings)


class _NodeDownload:
    """One download to this node; ``run`` is called in a thread, ``report`` by another one."""

    def __init__(self, subject: DoctorSubject) -> None:
        self.report = NodeReport()
        self.fetched = False
        self._subject = subject
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ended(self, timeout_s: float) -> bool:
        """Wait for the end, and return whether it has come."""
        try:
            self._end.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True

    def run(self) -> None:
        subject = self._subject
        try:
            here = locate.locate_model(subject.model, weights=subject.weights)
            self.fetched = here.path is None
            locate.resolve_model(subject.model, None, self.download, weights=subject.weights)
            drafting.resolve_draft(requested_speculation(subject), subject.model, self)
        except StartupError as error:
            self.report = msgspec.structs.replace(self.report, error=str(error))
        except Exception as error:  # the caller must get an answer
            text = f"{type(error).__name__}: {error}"
            self.report = msgspec.structs.replace(self.report, error=text)
        finally:
            self._end.put(None)

    def __call__(self, event: StageNote) -> None:
        notes = (*self.report.notes, event.text)
        self.report = msgspec.structs.replace(self.report, notes=notes)

    def download(self, done: int, total: int) -> None:
        self.report = msgspec.structs.replace(self.report, done=done, total=total)


# ---- where the command runs ---------------------------------------------------------------------


def follow_nodes(
    tasks: NodeTaskRunner, report: StartReporter, clock: Callable[[], float] = time.monotonic
) -> dict[str, NodeReport]:
    """Show the progress of all nodes until the last one has ended; return their last reports.

    There is no deadline in all. Raises StartupError for an error of a node, and for one that says
    nothing for ``SILENT_S``."""
    latest: dict[str, NodeReport] = {}
    heard = dict.fromkeys(tasks.pending, clock())
    while tasks.pending:
        for address, said in tasks.poll(_POLL_S):
            latest[address], heard[address] = said, clock()
            if said.error:
                raise StartupError(f"the node {address}: {said.error}")
        silent = [each for each in tasks.pending if clock() - heard[each] > SILENT_S]
        if silent:
            raise StartupError(
                f"the node {silent[0]} has not reported for {SILENT_S:.0f} s while it was checked"
                " or fetched the model: `ray status` shows whether it is alive"
            )
        _show_downloads(tasks.pending, latest, report)
    return latest


def _show_downloads(
    pending: Sequence[str], latest: Mapping[str, NodeReport], report: StartReporter
) -> None:
    loading = [each for each in pending if each in latest and latest[each].total]
    if loading:
        done = sum(latest[each].done for each in loading)
        total = sum(latest[each].total for each in loading)
        report.download(done, total, to=_named(loading))


def _judge(reports: Mapping[str, NodeReport], report: StartReporter) -> None:
    """Report the notes of all nodes, equal ones once. Raises PreflightFailed with the problems."""
    by_finding: dict[Finding, list[str]] = {}
    for address, said in sorted(reports.items()):
        for text in said.notes:
            report(StageNote(f"{address}: {text}"))
        for finding in said.findings:
            by_finding.setdefault(finding, []).append(address)
    placed = [
        msgspec.structs.replace(finding, check=f"{_named(addresses)}: {finding.check}")
        for finding, addresses in by_finding.items()
    ]
    if wrong := problems(placed):
        raise PreflightFailed(wrong)
    for finding in placed:
        if finding.level == "note":
            report(StageNote(f"{finding.check}: {finding.text}"))


def _news(later: NodeReport, earlier: NodeReport) -> NodeReport:
    """Return the later report without findings that the earlier one had."""
    new = tuple(finding for finding in later.findings if finding not in earlier.findings)
    return msgspec.structs.replace(later, findings=new)


def _named(addresses: Sequence[str]) -> str:
    shown = ", ".join(addresses[:_SHOWN_NODES])
    more = len(addresses) - _SHOWN_NODES
    return f"{shown} and {more} more" if more > 0 else shown


def node_subject(
    node: RayNode, launch: LaunchSettings, layout: ReplicaLayout
) -> DoctorSubject | None:
    """Return the subject of the checks on ``node``; None for one that takes no replicas.

    It has as many workers as may come to run there. A node with room for workers needs the model's
    weights, any other one its tokenizer only."""
    gpus = int(node.resources.get("GPU", 0))
    wanted = {"prefill": launch.prefill, "decode": launch.decode}
    counts: dict[Role, int] = {role: min(_slots(node, role), wanted[role]) for role in ROLES}
    while layout.cuda and sum(counts.values()) > gpus:  # Ray gives each worker a GPU of its own
        counts[max(ROLES, key=lambda role: counts[role])] -= 1
    engines = {role: launch.workers[role].engine for role in ROLES}
    device = engines["decode"].device or ("cuda" if layout.cuda else "cpu")
    pools = [
        SubjectPool(role, count, replace(engines[role], device=device))
        for role, count in counts.items()
        if count
    ]
    if not pools and not node.takes("router"):
        return None
    return DoctorSubject(
        kind="worker" if pools else "router",
        model=launch.model_path or None,
        cluster=launch.cluster,
        pools=tuple(pools),
        gpus=gpus,
    )


def _slots(node: RayNode, role: Role) -> int:
    return int(node.resources.get(resource_name(role), 0))
