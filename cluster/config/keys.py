"""Every key of the configuration, with the flag and the environment variable derived from it.

router.port            --port                BATON_PORT
pools.decode.workers   --decode              BATON_DECODE
pools.decode.threads   --decode-threads      BATON_DECODE_THREADS
autoscaler.mode        --autoscaler-mode     BATON_AUTOSCALER_MODE
security.token         (secret, no flag)     BATON_TOKEN

The key sets at the end say which keys a command takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr, TypeAdapter
from pydantic.fields import FieldInfo

from cluster.config.schema import FLAG, Config, FileName, Section

KeyPath: TypeAlias = tuple[str, ...]

_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
_METAVARS = {int: "N", float: "X", str: "TEXT"}
_BOUNDS = {"ge": "of at least", "gt": "above", "le": "and at most"}


@dataclass(frozen=True, eq=False)
class ConfigKey:
    """One key of the schema. ``kinds`` are the types that its value may have, without None."""

    path: KeyPath
    field: FieldInfo
    kinds: tuple[Any, ...]
    optional: bool
    adapter: TypeAdapter[Any]

    @property
    def name(self) -> str:
        """The path with dots."""
        return ".".join(self.path)

    @property
    def flag(self) -> str | None:
        """The command-line flag; None for secrets, because other users can read command lines."""
        extra = self.field.json_schema_extra
        if isinstance(extra, dict) and FLAG in extra:
            return str(extra[FLAG]) or None
        own = self.path[-1].replace("_", "-")
        if self.path[0] == "pools":
            return f"--{self.path[1]}" if own == "workers" else f"--{self.path[1]}-{own}"
        return f"--autoscaler-{own}" if self.path[0] == "autoscaler" else f"--{own}"

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "BATON_" + (self.flag or self.path[-1]).strip("-").replace("-", "_").upper()

    @property
    def secret(self) -> bool:
        """Whether the value must not be shown."""
        return SecretStr in [_base_type(kind) for kind in self.kinds]

    @property
    def is_text(self) -> bool:
        """Whether the value is text, so that a text from outside YAML is taken as it is."""
        return _base_type(self.kinds[0]) in (str, SecretStr)

    @property
    def is_file(self) -> bool:
        """Whether the value names a file that must exist."""
        return FileName in self.kinds

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of an enumeration; empty for other keys."""
        return tuple(v for k in self.kinds if get_origin(k) is Literal for v in get_args(k))

    @property
    def expected(self) -> str:
        """A description of valid values, for messages."""
        words = " or ".join(self.choices) or _WORDS.get(_base_type(self.kinds[0]), "text")
        return f"{words}{self._range()}" + (", or null" if self.optional else "")

    def _range(self) -> str:
        bounds = {n: getattr(m, n) for m in self.field.metadata for n in _BOUNDS if hasattr(m, n)}
        if bounds.keys() == {"ge", "le"}:
            return f" from {bounds['ge']} to {bounds['le']}"
        return "".join(f" {_BOUNDS[name]} {bound}" for name, bound in bounds.items())

    @property
    def metavar(self) -> str:
        """Placeholder of the value in the help of a command."""
        if self.is_file:
            return "FILE"
        return "|".join(self.choices) or _METAVARS.get(_base_type(self.kinds[0]), "TEXT")


def _keys(model: type[BaseModel], path: KeyPath) -> Iterator[ConfigKey]:
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _keys(kind, (*path, name))
            continue
        united = get_origin(kind) in (Union, UnionType)
        kinds = get_args(kind) if united else (kind,)
        yield ConfigKey(
            path=(*path, name),
            field=field,
            kinds=tuple(k for k in kinds if k is not NoneType),
            optional=NoneType in kinds,
            adapter=TypeAdapter(Annotated[kind, field]),
        )


def _base_type(kind: Any) -> Any:
    """Return a type without its annotations."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


CONFIG_KEYS: tuple[ConfigKey, ...] = tuple(_keys(Config, ()))
KEYS_BY_PATH: dict[KeyPath, ConfigKey] = {key.path: key for key in CONFIG_KEYS}
KEYS_BY_NAME: dict[str, ConfigKey] = {key.name: key for key in CONFIG_KEYS}
SECTIONS: frozenset[KeyPath] = frozenset(
    key.path[:depth] for key in CONFIG_KEYS for depth in range(len(key.path))
)


def select_keys(*names: str) -> frozenset[ConfigKey]:
    """Return the keys with these names; the name of a section selects all of its keys."""
    paths = [tuple(name.split(".")) for name in names]
    assert all(path in KEYS_BY_PATH or path in SECTIONS for path in paths)
    return frozenset(k for k in CONFIG_KEYS for path in paths if k.path[: len(path)] == path)


UP_KEYS = frozenset(CONFIG_KEYS)
WORKER_KEYS = select_keys(
    "cluster", "drain_s", "model", "pools", "worker", "kv", "speculation", "redis"
)
WORKER_KEYS |= select_keys("security.token", "security.tls")
WORKER_KEYS |= select_keys("router.ttft_slo_ms", "router.tpot_slo_ms")
ROUTER_KEYS = select_keys(
    "cluster", "drain_s", "model.path", "model.id", "router", "limits", "redis", "security"
)
DOWN_KEYS = select_keys("cluster", "drain_s")
SCALE_KEYS = select_keys("cluster", "start_deadline_s")
AUTOSCALE_KEYS = select_keys("cluster", "autoscaler", "redis", "security.token", "security.tls")
AUTOSCALE_KEYS |= select_keys("router.ttft_slo_ms", "router.tpot_slo_ms")
NODE_KEYS = select_keys("redis.url", "security", "autoscaler.prometheus_url")
"""Keys that each node of a cluster of hosts sets for itself."""
