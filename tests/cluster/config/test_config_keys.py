"""One schema, and what must agree with it: flags, variables, settings, the example."""

from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import typer
import yaml
from pydantic import ValidationError

from cluster.cli.main import app
from cluster.config import assemble, keys, show_config
from cluster.config.resolve import CommandFlags, resolve_config
from cluster.config.schema import REMOVED_KEYS, Config
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.settings.launch_settings import LaunchSettings
from cluster.settings.worker_settings import WorkerSettings
from engine.ipc.settings import EngineSettings
from router.settings import RouterSettings

EXAMPLE = Path(__file__).parents[3] / "deploy" / "baton.yaml"
NO_KEYS = {"--yes", "-y", "--address", "--config", "--detach", "--help"}
"""What says where keys are, or what to do with them."""
NO_FLAGS = {"security.token", "security.secret"}
"""What every user of the machine could read on a command line."""


def flags_of(name: str) -> set[str]:
    command: Any = typer.main.get_command(app)
    options = command.commands[name].params
    return {flag for option in options for flag in option.opts} | {"--help"}


def test_every_flag_of_up_is_a_key_and_every_key_a_flag() -> None:
    assert len(keys.CONFIG_KEYS) > 50
    by_flag = {key.flag: key for key in keys.CONFIG_KEYS if key.flag}
    removed = {old.flag for old in REMOVED_KEYS}
    assert flags_of("up") - NO_KEYS - removed == set(by_flag)
    assert removed <= flags_of("up") and removed.isdisjoint(by_flag)
    assert {key.name for key in keys.CONFIG_KEYS} - {k.name for k in by_flag.values()} == NO_FLAGS
    assert flags_of("config") - {"--schema"} == flags_of("up") - {
        "--detach",
        "--address",
        "--yes",
        "-y",
    }


def test_no_two_keys_share_a_flag_or_a_variable() -> None:
    assert len({key.variable for key in keys.CONFIG_KEYS}) == len(keys.CONFIG_KEYS)
    taken = {"BATON_CONFIG", "BATON_HOME", "BATON_API_KEY", "BATON_DIE_WITH_PARENT"}
    assert not taken & {key.variable for key in keys.CONFIG_KEYS}


def test_every_key_is_described() -> None:
    for key in keys.CONFIG_KEYS:
        assert key.field.description and key.field.description.endswith("."), key.name
        assert key.expected


WITHOUT_A_KEY = {
    WorkerSettings: {
        *("port", "kv_port", "kv_tcp_port", "metrics_port"),
        *("kv_codec", "kv_carriers"),
    },
    EngineSettings: {"kv_storage", "arena"},
    RouterSettings: {"refresh_s", "url"},
    AutoscalerSettings: {"metrics_host", "metrics_port"},
    LaunchSettings: set[str](),
}
"""Settings of one process, or that only benchmarks change."""


@pytest.mark.parametrize("settings", WITHOUT_A_KEY)
def test_only_settings_without_a_key_have_a_default(settings: type[msgspec.Struct]) -> None:
    fields = msgspec.structs.fields(settings)
    assert {field.name for field in fields if not field.required} == WITHOUT_A_KEY[settings]


def test_every_setting_has_a_key(tmp_path: Path) -> None:
    """A configuration in which no value is the default changes every setting with a key."""
    config = Config.model_validate(unlike_the_defaults(tmp_path))
    worker, router = assemble.worker_settings(config, "decode"), assemble.router_settings(config)
    default = assemble.worker_settings(Config(), "decode")
    assert same(worker, default) == WITHOUT_A_KEY[WorkerSettings]
    without = {"role", "model_path", *WITHOUT_A_KEY[EngineSettings]}
    assert same(worker.engine, default.engine) == without
    assert not same(worker.engine.speculation, default.engine.speculation)
    assert not same(worker.engine.ceilings, default.engine.ceilings)
    without = {"model_path", *WITHOUT_A_KEY[RouterSettings]}
    assert same(router, assemble.router_settings(Config())) == without
    scaler = assemble.autoscaler_settings(config)
    default_scaler = assemble.autoscaler_settings(Config())
    assert same(scaler, default_scaler) == WITHOUT_A_KEY[AutoscalerSettings]


def test_engines_know_the_objectives_of_the_routers() -> None:
    config = Config.model_validate({"router": {"ttft_slo_ms": 500.0, "tpot_slo_ms": 25.0}})
    engine = assemble.worker_settings(config, "decode").engine
    assert (engine.ttft_slo_s, engine.tpot_slo_s) == (0.5, 0.025)
    assert keys.select_keys("router.ttft_slo_ms", "router.tpot_slo_ms") < keys.WORKER_KEYS


def test_only_decode_workers_speculate() -> None:
    config = Config.model_validate({"speculation": {"method": "draft", "model": "/d"}})
    decode, prefill = (
        assemble.worker_settings(config, role).engine.speculation for role in ("decode", "prefill")
    )
    assert (decode.method, decode.model_path) == ("draft", "/d")
    assert (prefill.method, prefill.model_path) == ("off", None)
    assert assemble.worker_settings(Config(), "decode").engine.speculation.method == "auto"


@pytest.mark.parametrize(
    ("section", "wrong"),
    [
        ("worker", {"max_batch": 0}),
        ("worker", {"kv_tokens": -1}),
        ("worker", {"step_budget_ms": -1.0}),
        ("worker", {"step_budget_ms": float("nan")}),
        ("worker", {"peak_tflops": 0.0}),
        *(("worker", {"engine": bad}) for bad in ("", "-c", "a b", "a..b", "x/y", "a.", "e" * 129)),
        ("speculation", {"max_tokens": 17}),
        ("speculation", {"max_tokens": 0}),
        ("router", {"ttft_slo_ms": 0.0}),
        ("limits", {"max_requests": 0}),
    ],
)
def test_the_schema_refuses_values_that_cannot_work(section: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as raised:
        Config.model_validate({section: wrong})
    assert [error["loc"] for error in raised.value.errors()] == [(section, *wrong)]


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
        "worker.gpu_share": 0.5,
        "worker.engine": "other.engine",
        "router.host": "localhost",
        "router.metrics_host": "localhost",
        "router.usage_log": "usage",
        "router.access_log": "access",
        "router.otlp_endpoint": "http://localhost:4318",
        "api.cors_origins": "https://chat.example",
        "api.model_aliases": "small, gpt-5",
        "redis.url": "redis://localhost:1",
        "autoscaler.prometheus_url": "http://localhost:1",
        "autoscaler.log": "log",
        "security.allowed_hosts": "baton.example, other",
        "security.tls.name": "baton.cluster",
        "security.token": "t0ken",
        "security.secret": "ab" * 16,
        "model.path": "m",
        "model.id": "m",
        "speculation.method": "draft",
        "speculation.model": "m",
    }
    tree: dict[str, Any] = {}
    for key in keys.CONFIG_KEYS:
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
    settled = resolve_config(CommandFlags(EXAMPLE), {})
    assert all(origin.rank == 1 for _, origin in settled.values.values())
    for line in EXAMPLE.read_text().splitlines():
        assert len(line) <= 100


def test_the_example_keeps_to_the_json_schema() -> None:
    schema = msgspec.json.decode(show_config.json_schema())
    given = yaml.safe_load(EXAMPLE.read_text())
    jsonschema.validate(given, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**given, "prot": 1}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**given, "router": {"port": 0}}, schema)
