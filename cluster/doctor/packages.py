"""Python and the installed packages, against what Baton was made for."""

from __future__ import annotations

import platform
from importlib import metadata

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from cluster.doctor.finding import Finding, ok, problem
from cluster.doctor.subject import Wanted

_REMEDY = "run `make up` in a fresh checkout, or `pip install -r requirements.txt`"


class Packages(msgspec.Struct, frozen=True):
    """``wanted``: requirements as pyproject.toml has them; ``installed``: None is missing."""

    python: str
    requires_python: str
    wanted: tuple[str, ...]
    installed: dict[str, str | None]


def collect(_: Wanted) -> Packages:
    requires = metadata.requires("baton") or []
    wanted = tuple(text for text in requires if "extra ==" not in text)
    installed = {name: _version(name) for name in (Requirement(text).name for text in wanted)}
    needs = str(metadata.metadata("baton").json.get("requires_python", ""))
    return Packages(platform.python_version(), needs, wanted, installed)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def judge(facts: Packages, _: Wanted) -> list[Finding]:
    findings = []
    if facts.python not in SpecifierSet(facts.requires_python):
        text = f"Python {facts.python}, expected {facts.requires_python}"
        findings.append(problem("python", text, "run with Python 3.11 or 3.12"))
    else:
        findings.append(ok("python", facts.python))
    wrong = [text for name in facts.wanted if (text := _wrong(name, facts.installed))]
    if wrong:
        findings.append(problem("packages", "; ".join(wrong), _REMEDY))
    else:
        findings.append(ok("packages", f"{len(facts.wanted)} as required"))
    return findings


def _wrong(wanted: str, installed: dict[str, str | None]) -> str:
    try:
        requirement = Requirement(wanted)
    except InvalidRequirement:
        return f"{wanted!r} cannot be understood"
    version = installed.get(requirement.name)
    if version is None:
        return f"{requirement.name} is missing"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} is {version}, expected {requirement.specifier}"
    return ""
