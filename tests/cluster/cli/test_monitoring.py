"""The folder that Prometheus starts with, as its own tool judges it."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.credentials import certificates
from cluster.monitoring import prometheus
from cluster.monitoring.alerts import alert_rules
from cluster.monitoring.files import RuleOptions, write_prometheus
from cluster.monitoring.prometheus import ScrapeConfig
from cluster.monitoring.rules import Windows, recording_rules
from tests.cluster.promtool import promtool
from tests.system import needs
from tests.test_docs import ROOT, anchors

NAME = "baton.cluster"
KEY = "sk-nobody-else-is-to-read-this"


def run(*arguments: str, key: str | None = None) -> tuple[int, str]:
    """Status and output of `baton monitoring`."""
    done = CliRunner().invoke(app, ["monitoring", *arguments], env={"BATON_API_KEY": key})
    return done.exit_code, done.output


def test_committed_rules_are_up_to_date(tmp_path: Path) -> None:
    made = write_prometheus(tmp_path, ScrapeConfig(("http://127.0.0.1:8000",)), RuleOptions())
    for path in made:
        committed = ROOT / "deploy/prometheus" / path.relative_to(tmp_path)
        assert committed.read_text() == path.read_text(), "make dashboards"


def test_every_alert_has_its_paragraph() -> None:
    for alert in alert_rules(Windows()):
        page, _, anchor = alert.runbook.partition("#")
        assert anchor in anchors(ROOT / page), alert.name


def test_windows_are_scaled_and_names_are_not() -> None:
    plain, scaled = (
        prometheus.recording_file(w)["groups"][0]["rules"] for w in (Windows(), Windows(0.05))
    )
    assert [rule["record"] for rule in plain] == [rule["record"] for rule in scaled]
    assert {w for rule in scaled for w in re.findall(r"\[(\w+)\]", rule["expr"])} == {
        *("15000ms", "90000ms", "180000ms", "1080000ms", "12960000ms")
    }


def test_configuration_for_remote_routers_with_tls(tmp_path: Path) -> None:
    """HTTPS, API keys, mutual TLS by the cluster's name."""
    needs("promtool")
    certificates.create_ca(tmp_path / "certs", [NAME])
    ca, cert, secret = (
        str(tmp_path / "certs" / f) for f in ("ca.pem", f"{NAME}.pem", f"{NAME}.key")
    )
    status, said = run(
        str(tmp_path / "watch"),
        *("--url", "https://10.0.0.1:8000/", "--url", "https://10.0.0.2:8000"),
        *("--tls-ca", ca, "--tls-cert", cert, "--tls-key", secret, "--tls-name", NAME),
        *("--http-tls-cert", cert, "--http-tls-key", secret),
        *("--alertmanager", "127.0.0.1:9093", "--interval", "5", "--slo-target", "0.995"),
        key=KEY,
    )
    assert status == 0, said
    assert KEY not in said and f"{tmp_path}/watch/prometheus.yml" in said
    promtool("check", "config", str(tmp_path / "watch/prometheus.yml"))
    text = (tmp_path / "watch/prometheus.yml").read_text()
    assert KEY not in text
    [job] = yaml.safe_load(text)["scrape_configs"]
    assert job["tls_config"] == {
        "ca_file": ca,
        "cert_file": cert,
        "key_file": secret,
        "server_name": NAME,
    }
    assert [sd["url"] for sd in job["http_sd_configs"]] == [
        "https://10.0.0.1:8000/sd",
        "https://10.0.0.2:8000/sd",
    ]
    for sd in job["http_sd_configs"]:
        assert sd["tls_config"] == {"ca_file": ca, "server_name": NAME}
        assert sd["authorization"] == {"type": "Bearer", "credentials_file": "api-key"}
    held = tmp_path / "watch/api-key"
    assert held.read_text().strip() == KEY
    assert held.stat().st_mode & 0o777 == 0o600
    assert "> 14.4 * 0.005" in (tmp_path / "watch/rules/alerts.yml").read_text()


def test_a_router_whose_certificate_is_of_another_ca(tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.write_text("")
    arguments = ("--url", "https://api.example", "--ca-file", str(other))
    status, said = run(str(tmp_path / "watch"), *arguments)
    assert status == 0 and "BATON_API_KEY is not set" in said
    [job] = yaml.safe_load((tmp_path / "watch/prometheus.yml").read_text())["scrape_configs"]
    assert "tls_config" not in job  # between processes there is none
    assert job["http_sd_configs"][0]["tls_config"] == {"ca_file": str(other)}


def test_grafana_files_are_written(tmp_path: Path) -> None:
    status, said = run(str(tmp_path), "--url", "http://127.0.0.1:8000", "--interval", "5")
    assert status == 0, said
    own = tmp_path / "grafana"
    settings = configparser.ConfigParser()
    settings.read(own / "grafana.ini")
    assert settings["server"]["http_addr"] == "127.0.0.1"
    provisioning = Path(settings["paths"]["provisioning"])
    [source] = yaml.safe_load((provisioning / "datasources/baton.yaml").read_text())["datasources"]
    assert source["url"] == "http://127.0.0.1:9090"
    assert source["jsonData"]["timeInterval"] == "5s"
    [found] = yaml.safe_load((provisioning / "dashboards/baton.yaml").read_text())["providers"]
    boards = {path.name: path.read_text() for path in Path(found["options"]["path"]).iterdir()}
    assert boards.keys() == {"service.json", "pools.json", "planner.json"}
    home = Path(settings["dashboards"]["default_home_dashboard_path"])
    assert home.read_text() == boards["service.json"]
    assert all(source["uid"] in text for text in boards.values())


def test_existing_files_are_replaced(tmp_path: Path) -> None:
    for port in (8000, 8001):
        status, said = run(str(tmp_path), "--url", f"http://127.0.0.1:{port}", key=KEY)
        assert status == 0, said
        assert f":{port}/sd" in (tmp_path / "prometheus.yml").read_text()
        assert "kill -HUP" in said


def test_api_key_file_is_removed_without_a_key(tmp_path: Path) -> None:
    folder = tmp_path / "deep/watch"
    for key in (KEY, None):
        status, said = run(str(folder), "--url", "http://127.0.0.1:8000", key=key)
        assert status == 0, said
        assert (folder / "api-key").exists() == (key is not None)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert "api-key" not in (folder / "prometheus.yml").read_text()


def test_api_key_file_that_cannot_be_removed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "api-key/in-the-way").mkdir(parents=True)
    status, said = run(str(tmp_path), "--url", "http://127.0.0.1:8000")
    assert status == 1
    assert f"cannot remove {tmp_path}/api-key: Is a directory" in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--url", "10.0.0.1:8000"), "--url 10.0.0.1:8000: the scheme is missing; give http://"),
        (("--url", "me:secret@h:1"), "--url must be http://HOST:PORT"),
        (("--url", "http://me:secret@h:1"), "--url must be http://HOST:PORT"),
        (("--url", "http://h:1/v1"), "--url: give the URL without a path: http://h:1"),
        (("--alertmanager", "http://h:9093"), "--alertmanager must be HOST:PORT"),
        (("--ca-file", "/nowhere.pem", "--url", "http://h:1"), "there is no file /nowhere.pem"),
        (("--cluster", "none-of-this-name"), "no cluster 'none-of-this-name' runs here"),
    ],
)
def test_invalid_options_are_named(
    tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    status, said = run(str(tmp_path / "x"), *arguments)
    assert status == (2 if expected.startswith(("--", "there is no file")) else 1)
    assert expected in said and "secret" not in said
    assert not (tmp_path / "x").exists()


def test_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, said = run(str(tmp_path / "file/watch"), "--url", "http://127.0.0.1:8000")
    assert status == 1
    assert f"cannot make {tmp_path}/file/watch: Not a directory" in said


def test_series_that_the_docs_name_are_recorded() -> None:
    named = set(re.findall(r"`(baton:[\w:]+)", (ROOT / "docs/operations.md").read_text()))
    assert named and named <= {rule.record for rule in recording_rules(Windows())}
