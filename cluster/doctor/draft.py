"""Checks what decode workers draft with. Problems are only notes: workers serve without it."""

from __future__ import annotations

import msgspec

from cluster.doctor import model
from cluster.doctor.finding import Finding, note, ok
from cluster.doctor.subject import DoctorSubject
from cluster.local.start_report import format_size
from cluster.models import drafting, hub
from engine.ipc.settings import SpeculationSettings
from engine.model_config.checkpoint import load_config, read_shards
from engine.speculation.draft_source import (
    DRAFT_KIND_TEXT,
    DraftSource,
    check_vocabularies,
    resolve_draft_source,
)
from protocol.errors import StartupError

_HUB_S = 2.0
_REMEDY = "decode workers would run without it; --speculation-model selects another"


class DraftFacts(msgspec.Struct, frozen=True):
    """The draft that was found. ``source`` is None without speculation, or after an ``error``."""

    source: DraftSource | None = None
    parameters: int = 0
    to_fetch: str = ""  # repository and size of a download
    error: str = ""


_NO_DRAFTS = SpeculationSettings(method="off", model_path=None, max_tokens=1)


def requested_speculation(subject: DoctorSubject) -> SpeculationSettings:
    """Return the speculation settings of the decode pool, or disabled ones without a pool."""
    specs = [pool.engine.speculation for pool in subject.pools if pool.role == "decode"]
    return specs[0] if specs else _NO_DRAFTS


def collect(subject: DoctorSubject) -> DraftFacts:
    try:
        spec, repo = drafting.locate_draft(requested_speculation(subject), subject.model)
        if repo is not None:
            return DraftFacts(to_fetch=f"{repo}: {format_size(hub.list_files(repo, _HUB_S).bytes)}")
        return _look_at(resolve_draft_source(spec), subject)
    except StartupError as error:
        return DraftFacts(error=str(error))


def _look_at(found: DraftSource | None, subject: DoctorSubject) -> DraftFacts:
    if found is None or found.folder is None:
        return DraftFacts(found)
    target = model.local_model_facts(subject).path
    if found.method == "draft":
        load_config(found.folder)
        if target is not None:
            check_vocabularies(found.folder, target)
    return DraftFacts(found, sum(read_shards(found.folder).elements.values()))


def judge(facts: DraftFacts, subject: DoctorSubject) -> list[Finding]:
    if facts.error:
        return [note("draft", facts.error, _REMEDY)]
    if facts.to_fetch:
        return [note("draft", f"{facts.to_fetch} to download", "`baton up` does it")]
    found = facts.source
    if found is None:
        return []
    if found.folder is None:
        return [ok("draft", "n-grams of prompt and output")]
    kind = DRAFT_KIND_TEXT[found.method]
    text = f"{found.folder.name}: {kind}, {facts.parameters / 1e6:.1f} M parameters"
    return [ok("draft", text)]
