"""The model: there, supported, whole, with a tokenizer; or what the hub has of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec

from cluster.doctor.finding import Finding, note, ok, problem
from cluster.doctor.subject import Wanted
from cluster.local.start_report import size
from cluster.models import hub, models
from engine.model_config.checkpoint import Shards, load_config, read_shards
from engine.model_config.config import ModelConfig
from protocol.errors import StartupError

_HUB_S = 2.0


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """``problems``: all that was wrong with it. ``to_fetch``: what the hub would send, when it is
    not here; ``disk_free``: bytes where that would go."""

    id: str = ""
    path: Path | None = None
    problems: tuple[str, ...] = ()
    config: ModelConfig | None = None
    shards: Shards | None = None
    chat_template: bool = False
    to_fetch: hub.Listing | None = None
    disk_free: int = 0


def collect(wanted: Wanted) -> ModelFacts:
    facts, repo = _locate(wanted)
    return facts if repo is None else _on_hub(repo)


def here(wanted: Wanted) -> ModelFacts:
    """Without a look at the hub: empty for a model that is only there."""
    return _locate(wanted)[0]


def _locate(wanted: Wanted) -> tuple[ModelFacts, hub.Repo | None]:
    try:
        found = models.locate(wanted.model)
    except StartupError as error:
        return ModelFacts(problems=(str(error),)), None
    if found.path is None:
        return ModelFacts(id=found.id), found.repo
    return look_at(found.path, found.id), None


def _on_hub(repo: hub.Repo) -> ModelFacts:
    cache = hub.cache_folder()
    place = next(p for p in (cache, *cache.parents) if p.is_dir())
    try:
        listing = hub.look(repo, _HUB_S)
    except StartupError as error:
        return ModelFacts(id=str(repo), problems=(str(error),))
    return ModelFacts(id=str(repo), to_fetch=listing, disk_free=shutil.disk_usage(place).free)


def look_at(path: Path, model_id: str) -> ModelFacts:
    """A folder, by its configs and the headers of its weights."""
    problems: list[str] = []
    config: ModelConfig | None = None
    shards: Shards | None = None
    try:
        models.check(path)
        config = load_config(path)
        shards = read_shards(path)
    except StartupError as error:
        problems.append(str(error))
    if (path / "tokenizer.json").is_file() and (text := _tokenizer_problem(path)):
        problems.append(text)
    return ModelFacts(
        id=model_id,
        path=path,
        problems=tuple(problems),
        config=config,
        shards=shards,
        chat_template=_has_chat_template(path),
    )


def _tokenizer_problem(path: Path) -> str:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises Exception itself
        return f"{path}/tokenizer.json: not a usable tokenizer: {error}"
    return ""


def _has_chat_template(path: Path) -> bool:
    if (path / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((path / "tokenizer_config.json").read_text()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def judge(facts: ModelFacts, wanted: Wanted) -> list[Finding]:
    if facts.problems:
        remedy = _remedy(wanted) if facts.path is not None or not facts.id else ""
        return [problem("model", text, remedy) for text in facts.problems]
    if facts.to_fetch is not None:
        return [_fetch(facts, facts.to_fetch)]
    assert facts.config is not None and facts.shards is not None
    weights = sum(facts.shards.elements.values())
    text = f"{facts.id}, {facts.config.architecture}, {weights / 1e6:.0f} M parameters"
    findings = [ok("model", text)]
    if not facts.chat_template:
        text = "has no chat template: no /v1/chat/completions"
        findings.append(note("model", text))
    longest = facts.config.max_positions
    asked = max((pool.engine.max_model_len or 0 for pool in wanted.pools), default=0)
    if asked > longest:
        text = f"--max-model-len {asked} is beyond its {longest} positions"
        findings.append(note("model", text, f"{longest} is what it gets"))
    return findings


def _remedy(wanted: Wanted) -> str:
    if wanted.model is None:
        return "the demo model is damaged: check the installation out again"
    return "--model takes a folder or a hub id owner/name; without it the demo model is served"


def _fetch(facts: ModelFacts, listing: hub.Listing) -> Finding:
    text = f"{facts.id}: {size(listing.bytes)} to download in {listing.files} files"
    if listing.bytes > facts.disk_free:
        return problem(
            "model", f"{text}, {size(facts.disk_free)} free", "make room, or set HF_HOME elsewhere"
        )
    return note("model", text, "`baton up` does it")
