"""Checks the model: found, supported, complete, with a tokenizer; or its size on the hub."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from cluster.doctor.finding import Finding, note, ok, problem
from cluster.doctor.subject import DoctorSubject
from cluster.local.start_report import format_size
from cluster.models import hub, locate
from engine.model_config.checkpoint import WeightShards, load_config, read_shards
from engine.model_config.config import ModelConfig
from protocol.errors import StartupError, UsageError
from protocol.json_file import MAX_TOKENIZER_BYTES, read_json_file

_HUB_S = 2.0


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the model. ``problems``: everything that is wrong with it. ``unnamed``: the
    option names no model.

    ``to_fetch``: the files of a download, if the model is not on this machine; ``disk_free``: free
    bytes where they would be stored."""

    id: str = ""
    path: Path | None = None
    problems: tuple[str, ...] = ()
    unnamed: bool = False
    config: ModelConfig | None = None
    shards: WeightShards | None = None
    chat_template: bool = False
    to_fetch: hub.HubListing | None = None
    disk_free: int = 0


def collect(subject: DoctorSubject) -> ModelFacts:
    facts, repo = _locate(subject)
    return facts if repo is None else _on_hub(repo, weights=subject.weights)


def local_model_facts(subject: DoctorSubject) -> ModelFacts:
    """Return the facts without asking the hub; they are empty for a model to download."""
    return _locate(subject)[0]


def _locate(subject: DoctorSubject) -> tuple[ModelFacts, hub.HubRepo | None]:
    try:
        found = locate.locate_model(subject.model, weights=subject.weights)
    except StartupError as error:
        return ModelFacts(problems=(str(error),), unnamed=isinstance(error, UsageError)), None
    if found.path is None:
        return ModelFacts(id=found.id), found.repo
    return inspect_model(found.path, found.id, weights=subject.weights), None


def _on_hub(repo: hub.HubRepo, *, weights: bool) -> ModelFacts:
    cache = hub.cache_folder()
    place = next(p for p in (cache, *cache.parents) if p.is_dir())
    try:
        listing = hub.list_files(repo, _HUB_S, locate.files_needed(weights=weights))
    except StartupError as error:
        return ModelFacts(id=str(repo), problems=(str(error),))
    return ModelFacts(id=str(repo), to_fetch=listing, disk_free=shutil.disk_usage(place).free)


def inspect_model(path: Path, model_id: str, *, weights: bool = True) -> ModelFacts:
    """Return the facts about a folder, from its configuration and its weights' headers, which are
    not looked at without ``weights``."""
    problems: list[str] = []
    config: ModelConfig | None = None
    shards: WeightShards | None = None
    try:
        locate.check_model_folder(path, weights=weights)
        config = load_config(path)
        shards = read_shards(path) if weights else None
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
    except Exception as error:  # the library raises plain Exception
        return f"{path}/tokenizer.json: not a usable tokenizer: {error}"
    return ""


def _has_chat_template(path: Path) -> bool:
    if (path / "chat_template.jinja").is_file():
        return True
    try:
        settings = read_json_file(path / "tokenizer_config.json", MAX_TOKENIZER_BYTES)
    except StartupError:
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))


def judge(facts: ModelFacts, subject: DoctorSubject) -> list[Finding]:
    if facts.problems:
        return [problem("model", text, _remedy(subject)) for text in facts.problems]
    if facts.to_fetch is not None:
        return [_fetch(facts, facts.to_fetch)]
    assert facts.config is not None
    text = f"{facts.id}, {facts.config.architecture}"
    if facts.shards is not None:
        text += f", {sum(facts.shards.elements.values()) / 1e6:.0f} M parameters"
    findings = [ok("model", text)]
    if not facts.chat_template:
        text = "has no chat template: no /v1/chat/completions"
        findings.append(note("model", text))
    longest = facts.config.max_positions
    asked = max((pool.engine.max_model_len or 0 for pool in subject.pools), default=0)
    if asked > longest:
        text = f"--max-model-len {asked} is beyond its {longest} positions"
        findings.append(note("model", text, f"{longest} is used instead"))
    return findings


def _remedy(subject: DoctorSubject) -> str:
    if subject.model is None:
        return "the demo model is damaged: check out the repository again"
    return "--model takes a folder or a hub id owner/name; without it the demo model is served"


def _fetch(facts: ModelFacts, listing: hub.HubListing) -> Finding:
    text = f"{facts.id}: {format_size(listing.bytes)} to download in {listing.files} files"
    if listing.bytes > facts.disk_free:
        return problem(
            "model",
            f"{text}, {format_size(facts.disk_free)} free",
            "make room, or set HF_HOME elsewhere",
        )
    return note("model", text, "`baton up` does it")
