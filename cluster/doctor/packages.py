"""Checks Python and the installed packages against Baton's requirements."""

from __future__ import annotations

import platform
from importlib import metadata

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from cluster.doctor.finding import Finding, ok, problem
from cluster.doctor.subject import DoctorSubject

_REMEDY = "run `make up` in a fresh checkout, or `pip install -r requirements.txt`"


class PackageFacts(msgspec.Struct, frozen=True):
    """``requirements``: as in pyproject.toml. ``installed``: versions, None if missing."""

    python: str
    requires_python: str
    requirements: tuple[str, ...]
    installed: dict[str, str | None]


def collect(_: DoctorSubject) -> PackageFacts:
    requires = metadata.requires("baton") or []
    requirements = tuple(text for text in requires if "extra ==" not in text)
    installed = {name: _version(name) for name in (Requirement(text).name for text in requirements)}
    needs = str(metadata.metadata("baton").json.get("requires_python", ""))
    return PackageFacts(platform.python_version(), needs, requirements, installed)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def judge(facts: PackageFacts, _: DoctorSubject) -> list[Finding]:
    findings = []
    if facts.python not in SpecifierSet(facts.requires_python):
        text = f"Python {facts.python}, expected {facts.requires_python}"
        findings.append(problem("python", text, "run with Python 3.11 or 3.12"))
    else:
        findings.append(ok("python", facts.python))
    checked = [_requirement_problem(text, facts.installed) for text in facts.requirements]
    if wrong := [text for text in checked if text]:
        findings.append(problem("packages", "; ".join(wrong), _REMEDY))
    else:
        findings.append(ok("packages", f"{len(facts.requirements)} as required"))
    return findings


def _requirement_problem(wanted: str, installed: dict[str, str | None]) -> str:
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
