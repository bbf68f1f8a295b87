"""Which model a plan is for: a name, a folder, a hub id, or the numbers themselves."""

from __future__ import annotations

import difflib
import math
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from cluster import hub, models
from cluster.plan.shape import Shape, of_config, of_numbers
from engine.checkpoint import load_config
from engine.families import parse_config
from engine.kv_format import KVFormat, Precision
from protocol.errors import StartupError

FORM = "params=8e9,layers=32,kv_heads=8,head_dim=128[,heads=32][,active=8e9]"
_WANTED = ("params", "layers", "kv_heads", "head_dim")
_MAY = ("heads", "active")
_LARGEST = 1e15


@cache
def known() -> dict[str, dict[str, Any]]:
    """Configs of the data file, by name."""
    return tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))


def shape(text: str, precision: Precision, element_bytes: int = 2) -> Shape:
    """The model that ``text`` names: one of ``known``, ``FORM``, a folder or a hub id, of which the
    config alone is read. Raises StartupError."""
    if "=" in text:
        return _by_numbers(text, precision, element_bytes)
    for name, raw in known().items():
        if name.lower() == text.lower():
            return of_config(parse_config(raw, name), name, precision, element_bytes)
    found = _located(text)
    folder = found.path
    if folder is None:
        assert found.repo is not None
        folder = hub.download(found.repo, hub.CONFIGS, lambda _done, _total: None)
    return of_config(load_config(folder), found.id, precision, element_bytes)


def _located(text: str) -> models.Located:
    try:
        return models.locate(text)
    except StartupError as error:
        near = difflib.get_close_matches(text, known(), n=1, cutoff=0.5)
        hint = f"; is it {near[0]}?" if near else ""
        raise StartupError(
            f"--model: {error}{hint} Known by name: {', '.join(known())}; any other: {FORM}"
        ) from None


def _by_numbers(text: str, precision: Precision, element_bytes: int) -> Shape:
    numbers = _numbers(text)
    if numbers["heads"] % numbers["kv_heads"]:
        raise StartupError(
            f"--model: {numbers['heads']:g} heads cannot share {numbers['kv_heads']:g} kv_heads"
        )
    if numbers["active"] > numbers["params"]:
        raise StartupError(
            f"--model: {numbers['active']:g} active parameters of {numbers['params']:g}"
        )
    kv = KVFormat(
        precision=precision,
        storage="fp8" if precision == "fp8" else "wide",
        layers=int(numbers["layers"]),
        kv_heads=int(numbers["kv_heads"]),
        head_dim=int(numbers["head_dim"]),
        element_bytes=element_bytes,
    )
    name = f"a model of {numbers['params'] / 1e9:g} B parameters"
    heads = int(numbers["heads"])
    return of_numbers(name, numbers["params"], kv, active=numbers["active"], heads=heads)


def _numbers(text: str) -> dict[str, float]:
    """Each name of ``FORM`` with its number."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        found[name.strip()] = _number(name.strip(), number)
    if lacking := [name for name in _WANTED if name not in found]:
        raise StartupError(f"--model: {', '.join(lacking)} missing; expected {FORM}")
    return {"heads": found["kv_heads"], "active": found["params"], **found}


def _number(name: str, text: str) -> float:
    if name not in (*_WANTED, *_MAY):
        raise StartupError(f"--model: {name!r} is none of {', '.join((*_WANTED, *_MAY))}: {FORM}")
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    whole = name in ("params", "active") or number == int(number if math.isfinite(number) else 0)
    if not (1 <= number <= _LARGEST and whole):  # refuses NaN
        raise StartupError(f"--model: {name} must be a number from 1 on, not {text!r}; {FORM}")
    return number
