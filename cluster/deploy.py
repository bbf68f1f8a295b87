"""Puts Baton's applications on Serve, waits until they serve, and takes them away again."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from cluster import serve_app
from cluster.events import Waiting
from cluster.launch import Launch
from cluster.ray_runtime import logging_config
from cluster.settings import Role
from protocol.errors import StartupError

_POLL_S = 0.1
_SAY_S = 1.0
_CAUSES = ("StartupError: ", "EngineDied: ", "Error: ")


def run(launch: Launch, redis_url: str, gpus: int, say: Callable[[Waiting], None]) -> None:
    """Deploys all of it and returns when every replica runs; ``say``s now and then for which it
    waits.

    Raises StartupError with what a replica said, or with what is missing at the deadline.
    """
    share = serve_app.gpu_share(gpus, launch.prefill + launch.decode)
    pools: list[tuple[Role, int]] = [("prefill", launch.prefill), ("decode", launch.decode)]
    targets = []
    for role, count in pools:
        if count:
            settings = serve_app.worker_settings(launch, role, redis_url, cuda=gpus > 0)
            application = serve_app.pool_application(role, count, settings, share, launch)
            targets.append(_target(application, serve_app.POOL_APPS[role], None))
    router = serve_app.router_settings(launch, redis_url)
    application = serve_app.router_application(router, launch.drain_s)
    targets.append(_target(application, serve_app.ROUTER_APP, "/"))
    serve.run_many(
        targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
    )
    _wait_until_running([target.name for target in targets], launch.start_deadline_s, say)


def _target(application: Any, name: str, route_prefix: str | None) -> serve.RunTarget:
    return serve.RunTarget(application, name, route_prefix, logging_config())


def _wait_until_running(
    names: list[str], deadline_s: float, say: Callable[[Waiting], None]
) -> None:
    end = time.monotonic() + deadline_s
    said = 0.0
    while True:
        applications = serve.status().applications
        waiting = []
        for name in names:
            overview = applications.get(name)
            if overview is None or overview.status != ApplicationStatus.RUNNING:
                waiting.append(name)
            if overview is not None and overview.status == ApplicationStatus.DEPLOY_FAILED:
                raise StartupError(f"{name}: {_reason(overview)}")
        if not waiting:
            return
        if time.monotonic() > end:
            raise StartupError(f"still waiting for {', '.join(waiting)} after {deadline_s:.0f} s")
        said = _tell(say, waiting, end, said)
        time.sleep(_POLL_S)


def _tell(say: Callable[[Waiting], None], names: list[str], end: float, said: float) -> float:
    """Says, unless it has lately, for whom it waits; when it last did."""
    now = time.monotonic()
    if now - said < _SAY_S:
        return said
    say(Waiting(tuple(name.removeprefix("baton-") for name in names), max(0.0, end - now)))
    return now


def _reason(overview: ApplicationStatusOverview) -> str:
    """The line of a replica's traceback that says what was wrong."""
    texts = [deployment.message for deployment in overview.deployments.values()]
    lines = [line.strip() for text in [*texts, overview.message] for line in text.splitlines()]
    for cause in _CAUSES:
        for line in reversed(lines):
            if cause in line:
                return line[line.index(cause) + len(cause) :] if cause != "Error: " else line
    return lines[-1] if lines else "no reason given"


def wait_until_it_answers(launch: Launch, say: Callable[[Waiting], None]) -> int:
    """Waits for /ready, then streams one completion; returns the parts that came, 0 where a
    completion needs an API key."""
    end = time.monotonic() + launch.start_deadline_s
    said = time.monotonic()
    answer = ""
    while True:
        status, answer = _get(launch, "/ready")
        if status == 200:
            break
        if time.monotonic() > end:
            raise StartupError(f"the router is not ready: {answer[:500]}")
        said = _tell(say, [serve_app.ROUTER_APP], end, said)
        time.sleep(_POLL_S)
    if launch.router.api_keys is not None:
        return 0
    return _stream(launch, max(5.0, end - time.monotonic()))


def _connection(launch: Launch, timeout_s: float) -> http.client.HTTPConnection:
    """To the cluster's own front; its certificate, which names other hosts, is the one given."""
    tls = launch.router.http_tls
    if tls is None:
        return http.client.HTTPConnection(launch.host, launch.port, timeout=timeout_s)
    context = ssl.create_default_context(cafile=tls.cert)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return http.client.HTTPSConnection(launch.host, launch.port, timeout=timeout_s, context=context)


def _get(launch: Launch, path: str) -> tuple[int, str]:
    connection = _connection(launch, 5.0)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(10_000).decode(errors="replace")
    except (OSError, http.client.HTTPException) as e:
        return 0, f"{launch.url}{path} does not answer: {e}"
    finally:
        connection.close()


def _stream(launch: Launch, timeout_s: float) -> int:
    body = {"model": launch.model_id, "prompt": "def", "max_tokens": 4, "stream": True}
    connection = _connection(launch, timeout_s)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as e:
        raise StartupError(f"a test completion failed: {e}") from e
    finally:
        connection.close()
    parts = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    if response.status != 200 or not parts or parts[-1] != "[DONE]" or '"error"' in text:
        raise StartupError(f"a test completion failed: HTTP {response.status}: {text[:500]}")
    return len(parts) - 1


def drain() -> None:
    """Takes the router away when it has finished its requests, then the workers."""
    serve.delete(serve_app.ROUTER_APP)
    for name in serve_app.POOL_APPS.values():
        serve.delete(name, _blocking=False)
    while any(name in serve.status().applications for name in serve_app.POOL_APPS.values()):
        time.sleep(_POLL_S)
