"""One schema, and what must agree with it: flags, variables, settings, the example."""

from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import typer
import yaml

from cluster.cli.main import app
from cluster.config import assemble, keys, show
from cluster.config.schema import Config
from cluster.config.settle import Flags, settle
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.settings.worker_settings import WorkerSettings
from protocol.roles import ROLES
from router.settings import RouterSettings

EXAMPLE = Path(__file__).parents[3] / "deploy" / "baton.yaml"
NO_KEYS = {"--address", "--config", "--detach", "--help"}
"""What says where keys are, or what to do with them."""
NO_FLAGS = {"security.token", "security.secret"}
"""What every user of the machine could read on a command line."""


def flags_of(name: str) -> set[str]:
    command: Any = typer.main.get_command(app)
    options = command.commands[name].params
    return {flag for option in options for flag in option.opts} | {"--help"}


def test_every_flag_of_up_is_a_key_and_every_key_a_flag() -> None:
    assert len(keys.KEYS) > 50
    by_flag = {key.flag: key for key in keys.KEYS if key.flag}
    assert flags_of("up") - NO_KEYS == set(by_flag)
    assert {key.name for key in keys.KEYS} - {k.name for k in by_flag.values()} == NO_FLAGS
    assert flags_of("config") - {"--schema"} == flags_of("up") - {"--detach", "--address"}


def test_no_two_keys_share_a_flag_or_a_variable() -> None:
    assert len({key.variable for key in keys.KEYS}) == len(keys.KEYS)
    taken = {"BATON_CONFIG", "BATON_HOME", "BATON_API_KEY", "BATON_DIE_WITH_PARENT"}
    assert not taken & {key.variable for key in keys.KEYS}


def test_every_key_is_described() -> None:
    for key in keys.KEYS:
        assert key.field.description and key.field.description.endswith("."), key.name
        assert key.expected


def test_defaults_are_those_of_the_settings() -> None:
    config = Config()
    for role in ROLES:
        ours = assemble.worker(config, role)
        assert ours == WorkerSettings(
            role=role, cluster="default", redis_url="", token="", model_path="", model_id=""
        )
    assert assemble.router(config) == RouterSettings(
        cluster="default", redis_url="", token="", secret=b"", model_path="", model_id=""
    )
    expected = AutoscalerSettings(cluster="default", redis_url="", token="")
    assert assemble.autoscaler(config) == expected


def test_every_setting_has_a_key(tmp_path: Path) -> None:
    """A configuration in which no value is the default moves every setting, but for those that
    belong to one process."""
    config = Config.model_validate(unlike_the_defaults(tmp_path))
    worker, router = assemble.worker(config, "decode"), assemble.router(config)
    assert same(worker, assemble.worker(Config(), "decode")) == {
        *("role", "model_path", "port", "kv_port", "metrics_port"),
    }
    assert same(router, assemble.router(Config())) == {
        *("model_path", "refresh_s", "url"),
    }
    scaler = assemble.autoscaler(config)
    assert same(scaler, assemble.autoscaler(Config())) == {"metrics_host", "metrics_port"}


def same(one: msgspec.Struct, other: msgspec.Struct) -> set[str]:
    names = one.__struct_fields__
    return {name for name in names if getattr(one, name) == getattr(other, name)}


def unlike_the_defaults(folder: Path) -> dict[str, Any]:
    file = folder / "file"
    file.write_text("")
    special = {
        "cluster": "other",
        "worker.host": "localhost",
        "worker.device": "cpu",
        "worker.engine": "other.engine",
        "router.host": "localhost",
        "router.metrics_host": "localhost",
        "redis.url": "redis://localhost:1",
        "autoscaler.prometheus_url": "http://localhost:1",
        "autoscaler.log": "log",
        "security.tls.name": "baton.cluster",
        "security.token": "t0ken",
        "security.secret": "ab" * 16,
        "model.path": "m",
        "model.id": "m",
        "speculation.method": "draft",
        "speculation.model": "m",
    }
    tree: dict[str, Any] = {}
    for key in keys.KEYS:
        default = key.field.default
        value: Any = special.get(key.name)
        if value is None and key.is_file:
            value = str(file)
        elif value is None and key.choices:
            value = next(choice for choice in key.choices if choice != default)
        elif value is None:
            value = not default if isinstance(default, bool) else (default or 50) + 1
        section = tree
        for name in key.path[:-1]:
            section = section.setdefault(name, {})
        section[key.path[-1]] = value
    return tree


def test_the_example_is_complete_and_holds_the_defaults() -> None:
    given = yaml.safe_load(EXAMPLE.read_text())
    assert Config.model_validate(given) == Config()
    settled = settle(Flags(EXAMPLE), {})
    assert all(origin.rank == 1 for _, origin in settled.values.values())
    for line in EXAMPLE.read_text().splitlines():
        assert len(line) <= 100


def test_the_example_keeps_to_the_json_schema() -> None:
    schema = msgspec.json.decode(show.schema())
    given = yaml.safe_load(EXAMPLE.read_text())
    jsonschema.validate(given, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**given, "prot": 1}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**given, "router": {"port": 0}}, schema)
