"""``read_key_table``: the file of API keys, read and checked.

A YAML (or JSON) mapping from keys to tenants. A key is written as it is, or as ``sha256:<64 hex
digits>``, which is what Baton itself writes.

    sk-alpha: acme
    sha256:2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683:
      tenant: umbrella
      scopes: [generate]    # of generate, monitor, admin; [generate] by default
      priority: 10          # most urgent priority that the key may ask for; 0 by default
      weight: 2             # share of the cluster beside other tenants; 1 by default
      concurrency: 64       # choices in the cluster at once; no limit by default
      requests_per_minute: 600
      tokens_per_minute: 100000
    sk-beta: umbrella       # another key, the same weight and limits

Scopes and priority belong to the key, weight and limits to its tenant. Any one of a tenant's keys
may name them, and they hold for all; two keys that name different values are an error.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from protocol.errors import StartupError
from protocol.requests import PRIORITIES
from protocol.security.tls import check_private
from router.tenants.tenant import DEFAULT_PRIORITY, DEFAULT_SCOPES, SCOPES, Tenant, TenantLimits

MAX_NAME = 256
"""Characters in the name of a tenant."""

MAX_LIMIT = 10**12
MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3

_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})\Z")
_LIMITS = TenantLimits._fields
_FIELDS = ("tenant", "scopes", "priority", "weight", *_LIMITS)

# libyaml parses 10,000 keys in a tenth of the time; it is missing where PyYAML was built without.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

KeyTable = Mapping[bytes, Tenant]
"""Tenants by the SHA-256 digests of their keys."""


class _Entry(NamedTuple):
    """One key of the file, checked by itself."""

    place: str  # "FILE, line N", for messages, which must not contain the key
    digest: bytes
    is_plain: bool
    tenant: str
    fields: dict[str, Any]


def read_key_table(path: str) -> KeyTable:
    """Read the file. Raises StartupError, whose message contains no key."""
    entries = [_entry(*item) for item in _read_items(path)]
    if any(entry.is_plain for entry in entries):
        check_private(path, "api_keys")
    common = _common_fields(entries)
    table: dict[bytes, Tenant] = {}
    for entry in entries:
        if entry.digest in table:
            raise StartupError(f"{entry.place}: this key is given twice")
        table[entry.digest] = _tenant(entry, common[entry.tenant])
    return table


def _read_items(path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (place, key, entry) of each key. Nodes are read instead of a dict, because a dict would
    hide that a key occurs twice, and has no line numbers."""
    try:
        loader = _Loader(Path(path).read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise StartupError(f"cannot read API keys from {path}: {reason}") from None
    try:
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise StartupError(f"{path} must map API keys to tenants; {{}} accepts no key at all")
        for key, value in root.value:
            place = f"{path}, line {key.start_mark.line + 1}"
            yield place, loader.construct_object(key), loader.construct_object(value, deep=True)
    except (ValueError, TypeError, RecursionError, yaml.YAMLError):
        # The message must not quote the text: it may be a key.
        raise StartupError(f"cannot read API keys from {path}: it is not YAML") from None
    finally:
        loader.dispose()


def _entry(place: str, key: Any, entry: Any) -> _Entry:
    if not isinstance(key, str) or not key or not key.isprintable():
        raise StartupError(f"{place}: every key must be a printable string; put quotes around it")
    if not key.isascii():  # headers are: no client could send it
        raise StartupError(f"{place}: every key must be of ASCII characters only")
    match = _DIGEST.match(key)
    if match is None and key.startswith("sha256:"):
        raise StartupError(f"{place}: expected 64 hex digits after sha256:")
    digest = bytes.fromhex(match[1]) if match else hashlib.sha256(key.encode()).digest()
    fields = {"tenant": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict) or not fields.keys() <= set(_FIELDS):
        raise StartupError(
            f"{place}: expected the name of a tenant, or a mapping with {', '.join(_FIELDS)}"
        )
    name = fields.get("tenant")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise StartupError(f"{place}: tenant must be a name of 1 to {MAX_NAME} characters")
    _check_fields(place, fields)
    return _Entry(place, digest, match is None, name, fields)


def _check_fields(place: str, fields: Mapping[str, Any]) -> None:
    low, high = PRIORITIES
    priority, weight = fields.get("priority", DEFAULT_PRIORITY), fields.get("weight", 1)
    scopes = fields.get("scopes", [*DEFAULT_SCOPES])
    if type(priority) is not int or not low <= priority <= high:
        raise StartupError(f"{place}: priority must be an integer in [{low}, {high}]")
    if type(weight) not in (int, float) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise StartupError(f"{place}: weight must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
    if not isinstance(scopes, list) or not scopes or any(s not in SCOPES for s in scopes):
        raise StartupError(f"{place}: scopes must be a list of {', '.join(SCOPES)}")
    for name in _LIMITS:
        limit = fields.get(name)
        if limit is not None and (type(limit) is not int or not 1 <= limit <= MAX_LIMIT):
            raise StartupError(f"{place}: {name} must be an integer above 0, or null for no limit")


def _common_fields(entries: list[_Entry]) -> dict[str, dict[str, Any]]:
    """Return weight and limits by tenant. Raises StartupError where two keys contradict."""
    common: dict[str, dict[str, Any]] = {}
    named: dict[tuple[str, str], _Entry] = {}
    for entry in entries:
        values = common.setdefault(entry.tenant, {})
        for name in ("weight", *_LIMITS):
            if name not in entry.fields:
                continue
            first = named.setdefault((entry.tenant, name), entry)
            value = values.setdefault(name, entry.fields[name])
            if value != entry.fields[name]:
                raise StartupError(
                    f"{entry.place}: {name} of tenant {entry.tenant!r} is {entry.fields[name]}"
                    f" here, and {value} at {first.place}; it belongs to the tenant: give it"
                    " once, or the same value everywhere"
                )
    return common


def _tenant(entry: _Entry, common: Mapping[str, Any]) -> Tenant:
    scopes = frozenset(entry.fields.get("scopes", DEFAULT_SCOPES))
    return Tenant(
        entry.tenant,
        entry.fields.get("priority", DEFAULT_PRIORITY),
        float(common.get("weight", 1.0)),
        TenantLimits(*(common.get(name) for name in _LIMITS)),
        frozenset(SCOPES) if "admin" in scopes else scopes,
    )
