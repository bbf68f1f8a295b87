"""Bad configurations: each mistake with its place, all of them at once, and never a secret."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.config import keys, show_config
from cluster.config.mistakes import ConfigError
from cluster.config.resolve import CommandFlags, resolve_config
from cluster.config.schema import REMOVED_KEYS, RemovedKey

EXAMPLE = Path(__file__).parents[3] / "deploy" / "baton.yaml"
SECRET = "hunter2"

BAD = {
    # text of the file: line, key and text of its one mistake
    "not a mapping": ("- 1\n", (1, "", "got a list; expected a mapping of cluster, drain_s")),
    "a word": ("baton\n", (1, "", "got a single value; expected a mapping")),
    "not YAML": (
        "router:\n  port: [1\n",
        (2, "", "not YAML: expected ',' or ']', but"),
    ),
    "a tab": ("router:\n\tport: 1\n", (2, "", "not YAML")),
    "two documents": ("cluster: a\n---\ncluster: b\n", (2, "", "not YAML")),
    "an unknown alias": ("cluster: *nobody\n", (1, "", "not YAML")),
    "a control character": ("cluster: a\nrouter: \x01\n", (2, "", "control character")),
    "far too deep": ("cluster: " + "[" * 3000 + "\n", (1, "", "nested too deeply")),
    "unknown section": ("roter: {}\n", (1, "roter", "did you mean router?")),
    "unknown key": ("router:\n  prt: 1\n", (2, "router.prt", "did you mean router.port?")),
    "key elsewhere": ("port: 8000\n", (1, "port", "did you mean router.port?")),
    "key of another section": (
        "router: {kv_tokens: 64}\n",
        (1, "router.kv_tokens", "did you mean worker.kv_tokens?"),
    ),
    "a flag for a key": ("kv-precision: fp8\n", (1, "kv-precision", "did you mean kv.precision?")),
    "nothing near": ("kv:\n  zzzzzz: 1\n", (2, "kv.zzzzzz", "one of precision")),
    "a merge key": ("kv:\n  <<: {precision: fp8}\n", (2, "kv.<<", "merging is not supported")),
    "a number for a key": ("3: 4\n", (1, "3", "unknown key")),
    "a list for a key": ("? [a]\n: 4\n", (1, "?", "unknown key")),
    "twice": ("cluster: a\ndrain_s: 1\ncluster: b\n", (3, "cluster", "first in line 1")),
    "section twice": ("kv: {}\nkv: {}\n", (2, "kv", "is given twice; first in line 1")),
    "text for a number": (
        'router: {port: "8000"}\n',
        (1, "router.port", "got '8000'; expected an integer from 1 to 65535"),
    ),
    "number for text": ("model: {id: 17}\n", (1, "model.id", "put it in quotes")),
    "yes for a number": ("router: {port: yes}\n", (1, "router.port", "got yes; expected")),
    "fraction": ("worker: {max_batch: 1.5}\n", (1, "worker.max_batch", "got 1.5; expected an")),
    "nothing": ("router:\n  port:\n", (2, "router.port", "got nothing; expected an integer")),
    "list for a value": (
        "kv:\n  precision:\n  - fp8\n",
        (3, "kv.precision", "got a list; expected exact"),
    ),
    "mapping for a value": (
        "drain_s: {a: 1}\n",
        (1, "drain_s", "got a mapping; expected"),
    ),
    "section without sections": ("pools: 3\n", (1, "pools", "a mapping of prefill, decode")),
    "a tag": ("cluster: !!python/name:os.system a\n", (1, "cluster", "got a value with a tag")),
    "no date": ("cluster: 2026-99-99\n", (1, "cluster", "got a value with a tag")),
    "port 0": ("router: {port: 0}\n", (1, "router.port", "from 1 to 65535")),
    "port 65536": ("router: {port: 65536}\n", (1, "router.port", "from 1 to 65535")),
    "no decode": ("pools: {decode: {workers: 0}}\n", (1, "pools.decode.workers", "of at least 1")),
    "fewer than none": (
        "pools: {prefill: {workers: -1}}\n",
        (1, "pools.prefill.workers", "least 0"),
    ),
    "infinite": ("drain_s: .inf\n", (1, "drain_s", "got .inf; expected a number")),
    "not a number": ("router: {ttft_slo_ms: .nan}\n", (1, "router.ttft_slo_ms", "got .nan")),
    "unlimited": ("limits: {max_body_bytes: 9999999999}\n", (1, "limits.max_body_bytes", "from")),
    "unknown choice": ("kv: {precision: fp16}\n", (1, "kv.precision", "did you mean fp8?")),
    "cluster name": ("cluster: ../x\n", (1, "cluster", "got ../x; expected a cluster name")),
    "cpu with a tail": ("worker: {device: cpuX}\n", (1, "worker.device", "got cpuX; expected cpu")),
    "no GPU number": ("worker: {device: 'cuda:'}\n", (1, "worker.device", "cuda or cuda:N")),
    "a GPU and a half": ("worker: {gpu_share: 1.5}\n", (1, "worker.gpu_share", "1.5; expected")),
    "device": ("worker: {device: tpu}\n", (1, "worker.device", "expected cpu, cuda or cuda:N")),
    "host": ("router: {host: http://a}\n", (1, "router.host", "a host name or an IP address")),
    "a collector without a scheme": (
        "router: {otlp_endpoint: 'localhost:4318'}\n",
        (1, "router.otlp_endpoint", "expected the URL of a collector"),
    ),
    "a collector with a password": (
        "router: {otlp_endpoint: 'http://me:secret@host:4318'}\n",
        (1, "router.otlp_endpoint", "expected the URL of a collector"),
    ),
    "a collector with a query": (
        "router: {otlp_endpoint: 'http://host:4318/?a=b'}\n",
        (1, "router.otlp_endpoint", "expected the URL of a collector"),
    ),
    "a collector at no port": (
        "router: {otlp_endpoint: 'http://host:99999'}\n",
        (1, "router.otlp_endpoint", "expected the URL of a collector"),
    ),
    "an origin with a path": (
        "api: {cors_origins: 'https://a.example, https://b.example/'}\n",
        (1, "api.cors_origins", "expected origins separated by commas"),
    ),
    "no file": ("security:\n  api_keys: nowhere\n", (2, "security.api_keys", "is not a file")),
    "a removed policy": ("router: {policy: cost}\n", (1, "", "router.policy is gone: routers")),
    "a removed codec": (
        "kv:\n  precision: exact\n  codec: fp8\n",
        (3, "", "kv.codec is gone: the codec follows from kv.precision"),
    ),
    "a removed pool": ("kv: {pool: fp8}\n", (1, "", "kv.pool is gone: the storage follows from")),
    "n-grams with a model": (
        "speculation:\n  model: m\n  method: ngram\n",
        (3, "speculation.method", "takes no model, and speculation.model is 'm'; expected auto"),
    ),
    "no speculation with a model": (
        "speculation: {model: m, method: off}\n",
        (1, "speculation.method", "off takes no model"),
    ),
    "a draft without a model": (
        "model: {path: m}\nspeculation:\n  method: draft\n",
        (3, "speculation.method", "takes a model beside 'm', and speculation.model is null"),
    ),
    "false for off": (
        "speculation: {method: false}\n",
        (1, "speculation.method", "got false; expected auto or off or"),
    ),
    "too many drafted": ("speculation: {max_tokens: 17}\n", (1, "speculation.max_tokens", "16")),
    "resubmission after the end": (
        "limits:\n  next_token_timeout_s: 5\n  resubmit_wait_s: 6\n",
        (3, "limits.resubmit_wait_s", "more than limits.next_token_timeout_s, which is 5 s"),
    ),
    "refused while good": (
        "router: {ttft_slo_ms: 500, admission_ttft_ms: 400}\n",
        (1, "router.admission_ttft_ms", "less than the objective"),
    ),
    "more to begin with than there may be": (
        "pools: {decode: {workers: 9}}\nautoscaler:\n  mode: act\n",
        (1, "pools.decode.workers", "9 at the start; expected 1 to 8, as autoscaler.decode_min"),
    ),
    "none to begin with": (
        "pools: {prefill: {workers: 0}}\nautoscaler: {mode: act, prefill_min: 0}\n",
        (1, "pools.prefill.workers", "0 at the start; expected 1 to 8"),
    ),
    "limits the wrong way round": (
        "autoscaler: {decode_max: 2, decode_min: 3}\n",
        (1, "autoscaler.decode_min", "3 is more than autoscaler.decode_max, which is 2"),
    ),
    "fewer GPUs than workers": (
        "autoscaler: {gpus: 1}\n",
        (1, "autoscaler.gpus", "1 are less than the 2 workers that there are at least"),
    ),
    "no URL of a Prometheus": (
        f"autoscaler: {{prometheus_url: 'htp://{SECRET}'}}\n",
        (1, "autoscaler.prometheus_url", "got a hidden value; expected http://[user:password@]"),
    ),
    "two on a port": (
        "router: {port: 9000, metrics_port: 9000}\n",
        (1, "router.metrics_port", "9000 is router.port already"),
    ),
    "Redis on the router's port": (
        "router: {port: 6379}\nredis: {url: redis://localhost}\n",
        (1, "router.port", "6379 is the port of the Redis"),
    ),
    "open to the network": ("router: {host: 0.0.0.0}\n", (1, "router.host", "Missing: ")),
    "workers open to the network": ("worker: {host: 10.0.0.1}\n", (1, "worker.host", "need TLS")),
    "half of TLS": (
        "security: {tls: {ca: file.yaml, cert: file.yaml}}\n",
        (1, "security.tls.key", "missing; expected ca, cert, key or none"),
    ),
    "a name, and nothing to prove it with": (
        "security: {tls: {name: baton.cluster}}\n",
        (1, "security.tls.name", "no certificate to prove it with; expected ca, cert and key"),
    ),
    "an address for a name": (
        "security: {tls: {name: 10.0.0.5}}\n",
        (1, "security.tls.name", "expected a DNS name, as baton.cluster"),
    ),
    "half of HTTPS": (
        "security: {http_tls: {key: file.yaml}}\n",
        (1, "security.http_tls.cert", "missing; expected cert, key or none"),
    ),
    "no Redis URL": (
        f"redis:\n  url: http://:{SECRET}@h\n",
        (2, "redis.url", "got a hidden value"),
    ),
    "a short secret": (f"security: {{secret: {SECRET}}}\n", (1, "security.secret", "hex digits")),
    "a secret of no type": (f"security: {{token: [{SECRET}]}}\n", (1, "security.token", "a list")),
    "a secret with a tag": (f"security: {{token: !{SECRET} x}}\n", (1, "security.token", "a tag")),
    "a shown secret": ("security: {token: <hidden>}\n", (1, "security.token", "does not show it")),
    "a shown URL": ("redis: {url: <hidden>}\n", (1, "redis.url", "does not show it")),
    "a secret in bad YAML": (f"redis: {{url: '{SECRET}\n", (1, "", "not YAML")),
}


def mistakes_of(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        resolve_config(CommandFlags(path), {})
    return raised.value


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file(name: str, tmp_path: Path) -> None:
    text, (line, key, part) = BAD[name]
    path = tmp_path / "file.yaml"
    path.write_text(text)
    path.chmod(0o600)
    error = mistakes_of(path)
    assert SECRET not in str(error)
    assert len(error.mistakes) == 1, error
    [mistake] = error.mistakes
    assert (mistake.origin.text, mistake.key) == (f"{path}:{line}", key), error
    assert part in mistake.text


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "cannot be read: No such file"),
        (b"a: \xff", "not UTF-8"),
        (b"#" * (1 << 21), "larger"),
    ],
)
def test_a_file_that_is_no_text(content: bytes | None, part: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    if content is not None:
        path.write_bytes(content)
    assert part in str(mistakes_of(path))


PIECES = (
    *(
        "null",
        "[",
        "]",
        "{",
        "}",
        "'",
        '"',
        "&a ",
        "*a",
        "!x ",
        "<<: ",
        "\t",
        "\n",
        ": ",
        "- ",
        "? ",
        "|",
    ),
    *("%", "1e400", ".nan", "2020-01-01", "\x00", "9" * 400, "1:60", "yes", "~nobody/", "#", ", "),
)


@given(
    cuts=st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 9), st.sampled_from(PIECES)), max_size=4
    )
)
def test_no_file_ends_otherwise(
    cuts: list[tuple[float, int, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The example, spoilt: it is good or it has mistakes, and the secret in it is not shown."""
    text = EXAMPLE.read_text().replace("url: null", f"url: redis://:{SECRET}@localhost")
    for where, length, piece in cuts:
        at = int(where * len(text))
        text = text[:at] + piece + text[at + length :]
    path = tmp_path_factory.mktemp("spoilt") / "file.yaml"
    path.write_text(text)
    path.chmod(0o600)
    try:
        show_config.render_config(resolve_config(CommandFlags(path), {}).values, color=False)
    except ConfigError as error:
        assert error.mistakes and SECRET not in str(error)


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(
        "\n".join(BAD[name][0] for name in ("unknown section", "infinite", "no decode"))
    )
    port = keys.KEYS_BY_PATH["router", "port"]
    environ = {"BATON_THREADS": "0", "BATON_ALLOW_PLAIN_HTTP": "perhaps"}
    with pytest.raises(ConfigError) as raised:
        resolve_config(CommandFlags(path, {port: ("--port", "many")}), environ)
    shown = str(raised.value).splitlines()
    assert shown[0] == "6 mistakes in the configuration"
    assert [line.strip().partition(": ")[0] for line in shown[1:]] == [
        *(f"{path}:1", f"{path}:3", f"{path}:5"),
        *("environment BATON_ALLOW_PLAIN_HTTP", "environment BATON_THREADS", "flag --port"),
    ]


@pytest.mark.parametrize("old", REMOVED_KEYS, ids=lambda old: old.name)
def test_a_removed_key_is_refused_with_its_replacement(old: RemovedKey) -> None:
    environment = CliRunner().invoke(app, ["config"], env={old.variable: "8"})
    flag = CliRunner().invoke(app, ["config", old.flag, "8"])
    for result, origin in (
        (environment, f"environment {old.variable}"),
        (flag, f"flag {old.flag}"),
    ):
        assert result.exit_code == 2
        assert f"{origin}: {old.name} is gone: " in result.output
        assert old.replacement in result.output


def test_a_mistake_counts_where_a_flag_wins_over_it(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("router: {port: 0}\n")
    with pytest.raises(ConfigError, match="from 1 to 65535"):
        resolve_config(
            CommandFlags(path, {keys.KEYS_BY_PATH["router", "port"]: ("--port", "8001")}), {}
        )


def test_a_variable_that_kubernetes_sets() -> None:
    with pytest.raises(ConfigError, match="enableServiceLinks"):
        resolve_config(CommandFlags(), {"BATON_PORT": "tcp://10.0.0.1:8000"})


def test_a_file_with_secrets_is_nobody_elses_to_read(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(f"redis: {{url: 'redis://:{SECRET}@localhost'}}\n")
    path.chmod(0o644)
    error = mistakes_of(path)
    assert "mode 0644): chmod 600" in str(error) and SECRET not in str(error)
    path.chmod(0o600)
    resolve_config(CommandFlags(path), {})
    path.write_text("redis: {url: redis://localhost}\n")  # nothing to hide
    path.chmod(0o644)
    resolve_config(CommandFlags(path), {})
