"""What decode workers are to speculate with. Whatever is wrong with it, they serve without."""

from __future__ import annotations

import msgspec

from cluster.doctor import model
from cluster.doctor.finding import Finding, note, ok
from cluster.doctor.subject import Wanted
from cluster.local.start_report import size
from cluster.models import drafting, hub
from engine.ipc.spec import SpeculationSpec
from engine.model_config.checkpoint import load_config, read_shards
from engine.speculation.draft_source import NAMES, Source, check_vocabularies, source
from protocol.errors import StartupError

_HUB_S = 2.0
_REMEDY = "decode workers would go on without it; --speculation-model names another"


class DraftFacts(msgspec.Struct, frozen=True):
    """``source`` is None where there is none, or ``error`` says why it is of no use."""

    source: Source | None = None
    parameters: int = 0
    to_fetch: str = ""  # what the hub would send
    error: str = ""


def wanted_by(wanted: Wanted) -> SpeculationSpec:
    """Of the pool that decodes; off where there is none."""
    specs = [pool.engine.speculation for pool in wanted.pools if pool.role == "decode"]
    return specs[0] if specs else SpeculationSpec()


def collect(wanted: Wanted) -> DraftFacts:
    try:
        spec, repo = drafting.located(wanted_by(wanted), wanted.model)
        if repo is not None:
            return DraftFacts(to_fetch=f"{repo}: {size(hub.look(repo, _HUB_S).bytes)}")
        return _look_at(source(spec), wanted)
    except StartupError as error:
        return DraftFacts(error=str(error))


def _look_at(found: Source | None, wanted: Wanted) -> DraftFacts:
    if found is None or found.folder is None:
        return DraftFacts(found)
    target = model.here(wanted).path
    if found.method == "draft":
        load_config(found.folder)
        if target is not None:
            check_vocabularies(found.folder, target)
    return DraftFacts(found, sum(read_shards(found.folder).elements.values()))


def judge(facts: DraftFacts, wanted: Wanted) -> list[Finding]:
    if facts.error:
        return [note("draft", facts.error, _REMEDY)]
    if facts.to_fetch:
        return [note("draft", f"{facts.to_fetch} to download", "`baton up` does it")]
    found = facts.source
    if found is None:
        return []
    if found.folder is None:
        return [ok("draft", "n-grams of prompt and output")]
    text = f"{found.folder.name}: {NAMES[found.method]}, {facts.parameters / 1e6:.1f} M parameters"
    return [ok("draft", text)]
