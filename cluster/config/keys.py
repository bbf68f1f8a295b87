"""Every key of the configuration, with the flag and the variable that set it.

router.port            --port                BATON_PORT
pools.decode.workers   --decode              BATON_DECODE
pools.decode.threads   --decode-threads      BATON_DECODE_THREADS
autoscaler.mode        --autoscaler-mode     BATON_AUTOSCALER_MODE
security.token         (none: it is secret)  BATON_TOKEN
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr, TypeAdapter
from pydantic.fields import FieldInfo

from cluster.config.schema import FLAG, Config, FileName, Section

Path: TypeAlias = tuple[str, ...]

_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
_METAVARS = {int: "N", float: "X", str: "TEXT"}
_BOUNDS = {"ge": "of at least", "gt": "above", "le": "and at most"}


@dataclass(frozen=True, eq=False)
class Key:
    """One key. ``kinds``: the types that its value may have, without None."""

    path: Path
    field: FieldInfo
    kinds: tuple[Any, ...]
    optional: bool
    adapter: TypeAdapter[Any]

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def flag(self) -> str | None:
        """None where there is none, lest other users read a secret."""
        extra = self.field.json_schema_extra
        if isinstance(extra, dict) and FLAG in extra:
            return str(extra[FLAG]) or None
        own = self.path[-1].replace("_", "-")
        if self.path[0] == "pools":
            return f"--{self.path[1]}" if own == "workers" else f"--{self.path[1]}-{own}"
        return f"--autoscaler-{own}" if self.path[0] == "autoscaler" else f"--{own}"

    @property
    def variable(self) -> str:
        return "BATON_" + (self.flag or self.path[-1]).strip("-").replace("-", "_").upper()

    @property
    def secret(self) -> bool:
        return SecretStr in [_plain(kind) for kind in self.kinds]

    @property
    def is_text(self) -> bool:
        return _plain(self.kinds[0]) in (str, SecretStr)

    @property
    def is_file(self) -> bool:
        return FileName in self.kinds

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a key that takes one of a few."""
        return tuple(v for k in self.kinds if get_origin(k) is Literal for v in get_args(k))

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        words = " or ".join(self.choices) or _WORDS.get(_plain(self.kinds[0]), "text")
        return f"{words}{self._range()}" + (", or null" if self.optional else "")

    def _range(self) -> str:
        bounds = {n: getattr(m, n) for m in self.field.metadata for n in _BOUNDS if hasattr(m, n)}
        if bounds.keys() == {"ge", "le"}:
            return f" from {bounds['ge']} to {bounds['le']}"
        return "".join(f" {_BOUNDS[name]} {bound}" for name, bound in bounds.items())

    @property
    def metavar(self) -> str:
        if self.is_file:
            return "FILE"
        return "|".join(self.choices) or _METAVARS.get(_plain(self.kinds[0]), "TEXT")


def _keys(model: type[BaseModel], path: Path) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _keys(kind, (*path, name))
            continue
        united = get_origin(kind) in (Union, UnionType)
        kinds = get_args(kind) if united else (kind,)
        yield Key(
            path=(*path, name),
            field=field,
            kinds=tuple(k for k in kinds if k is not NoneType),
            optional=NoneType in kinds,
            adapter=_adapter(kind, field),
        )


def _adapter(kind: Any, field: FieldInfo) -> TypeAdapter[Any]:
    return TypeAdapter(Annotated[kind, field])


def _plain(kind: Any) -> Any:
    """The type under its annotations."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


KEYS: tuple[Key, ...] = tuple(_keys(Config, ()))
BY_PATH: dict[Path, Key] = {key.path: key for key in KEYS}
SECTIONS: frozenset[Path] = frozenset(
    key.path[:depth] for key in KEYS for depth in range(len(key.path))
)


def of(*names: str) -> frozenset[Key]:
    """The keys of these names; a section stands for all of its keys."""
    paths = [tuple(name.split(".")) for name in names]
    assert all(path in BY_PATH or path in SECTIONS for path in paths)
    return frozenset(k for k in KEYS for path in paths if k.path[: len(path)] == path)


UP = frozenset(KEYS)
WORKER = of("cluster", "drain_s", "model", "pools", "worker", "kv", "speculation", "redis")
WORKER |= of("security.token", "security.tls")
ROUTER = of("cluster", "drain_s", "model.path", "model.id", "router", "limits", "redis", "security")
DOWN = of("cluster", "drain_s")
SCALE = of("cluster", "start_deadline_s")
AUTOSCALE = of("cluster", "autoscaler", "redis", "security.token", "security.tls")
AUTOSCALE |= of("router.ttft_slo_ms", "router.tpot_slo_ms")
NODE = of("redis.url", "security", "autoscaler.prometheus_url")
"""What is a node's own, on a cluster of hosts."""
