"""Checks of single values beyond types and ranges, used as validators by the schema.

Each returns the value, or raises ValueError with what was expected; no message repeats a secret.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from pydantic import SecretStr

from protocol.errors import StartupError

MASK = "<hidden>"
"""Replaces a secret where the configuration is shown."""

MAX_MODEL_NAMES = 64

_CLUSTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_DEVICE = re.compile(r"(cpu|cuda(:[0-9]{1,3})?)\Z")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9.:\[\]_-]{1,253}\Z")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}\Z")
_NAME = re.compile(r"(?=.{1,253}\Z)(?!-)[A-Za-z0-9_-]{1,63}(\.(?!-)[A-Za-z0-9_-]{1,63})*\Z")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9.:_%-]{1,253}\Z")


def cluster_name(text: str) -> str:
    if not _CLUSTER.match(text):
        raise ValueError("a cluster name of at most 64 letters, digits, '.', '_' and '-'")
    return text


def host(text: str) -> str:
    if not _HOST.match(text):
        raise ValueError("a host name or an IP address")
    return text


def dns_name(text: str) -> str:
    if not _NAME.match(text) or text.replace(".", "").isdigit():
        raise ValueError("a DNS name, as baton.cluster")
    return text


def split_host_names(text: str) -> tuple[str, ...]:
    """Return the names of a list separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def collector_url(text: str) -> str:
    if not _is_http_url(text) or any(mark in text for mark in "@?#"):
        raise ValueError("the URL of a collector, as http://localhost:4318")
    return text


def origins(text: str) -> str:
    names = split_host_names(text)
    if not names or not all(name == "*" or _ORIGIN.match(name) for name in names):
        raise ValueError("origins separated by commas, as https://chat.example:8443, or *")
    return text


def model_names(text: str) -> str:
    names = split_host_names(text)
    if not 1 <= len(names) <= MAX_MODEL_NAMES or not all(map(_MODEL.match, names)):
        expected = f"up to {MAX_MODEL_NAMES} names of models separated by commas, as small, gpt-5"
        raise ValueError(expected)
    return text


def host_names(text: str) -> str:
    names = split_host_names(text)
    if not names or not all(_NAME.match(name) for name in names):
        raise ValueError("DNS names without ports, separated by commas, as baton.example, gpu1")
    return text


def device(text: str) -> str:
    if not _DEVICE.match(text):
        raise ValueError("cpu, cuda or cuda:N")
    return text


def module_name(text: str) -> str:
    if text == "cluster.engine_main":  # the default of earlier versions
        raise ValueError("cluster.worker.engine_main, its name now")
    if len(text) > 128 or not _MODULE.match(text):  # `python -m` takes nothing as an option
        raise ValueError("the dotted name of a Python module")
    return text


def redis_url(secret: SecretStr) -> SecretStr:
    from protocol.registry.redis_client import check_url

    unmasked(secret)
    try:
        check_url(secret.get_secret_value())
    except StartupError as e:
        raise ValueError(str(e).partition("it must be ")[2]) from None
    return secret


def http_url(secret: SecretStr) -> SecretStr:
    # The URL is a secret because it may contain a password.
    if not _is_http_url(unmasked(secret).get_secret_value()):
        raise ValueError("http://[user:password@]host[:port][/path], or https://...")
    return secret


def _is_http_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return good and text.isascii() and text.isprintable() and " " not in text


def token(secret: SecretStr) -> SecretStr:
    text = unmasked(secret).get_secret_value()
    if not text or not text.isascii() or not text.isprintable() or text != text.strip():
        raise ValueError("printable ASCII characters, with no space at the ends")
    return secret


def hex_secret(secret: SecretStr) -> SecretStr:
    text = unmasked(secret).get_secret_value()
    if not re.fullmatch(r"([0-9a-fA-F]{2}){16,64}", text):
        raise ValueError("32 to 128 hex digits, two for each byte")
    return secret


def unmasked(secret: SecretStr) -> SecretStr:
    """Refuse the text that `baton config` shows in place of a secret."""
    if secret.get_secret_value() == MASK:
        raise ValueError("the secret itself: `baton config` does not show it")
    return secret
