"""``create_app``: the router as an ASGI application with its routes.

    startup     tokenizer, directory, a link to every decode worker (``router.http.state``)
    request     read and checked (``router.http.intake``), then answered: a streamed token is sent
                to its client by ``GenerationResponse._send_stream`` (``router.http.response``)
    shutdown    links and directory closed

Served by ``router.http.server``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from router.anthropic.models import VERSION_HEADER, model_entry, model_page
from router.common import errors
from router.common.errors import ApiError
from router.common.request_body import ClientDisconnected
from router.http import ui_routes
from router.http.anthropic_routes import MESSAGES, install_message_routes, write_error
from router.http.dialect import CHATS, COMPLETIONS, Body, Dialect, check_served_model
from router.http.edge.cors import CorsPolicy
from router.http.edge.head_checks import HeadChecks
from router.http.edge.request_edge import RequestEdge
from router.http.intake import accept_request
from router.http.responses_routes import RESPONSES, install_response_routes
from router.http.state import RouterState, open_router_state
from router.http.token_routes import install_token_routes
from router.openai.answers.wire_json import ModelCard
from router.openapi.document import openapi_document
from router.settings import RouterSettings
from router.tenants.key_store import authorization_of
from router.tenants.tenant import KeyScope
from router.workers.pool import ListWorkers


def create_app(settings: RouterSettings, list_workers: ListWorkers | None = None) -> FastAPI:
    """Return the application, which holds nothing until its lifespan starts.

    ``list_workers`` replaces the directory in Redis.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_router_state(settings, list_workers) as state:
            app.state.router = state
            yield

    no_pages: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    app = FastAPI(title="Baton", lifespan=lifespan, redirect_slashes=False, **no_pages)
    # Inside the next one, so that its errors have an id, too.
    app.add_middleware(HeadChecks, hosts=settings.checked_hosts, write=write_error)
    origins = settings.cors_origins
    policy = None if origins is None else CorsPolicy(origins)
    app.add_middleware(RequestEdge, cors=policy, write=write_error)
    errors.install_error_handlers(app, write_error)
    app.add_exception_handler(ClientDisconnected, disconnected)
    app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", chats, methods=["POST"])
    app.add_api_route("/v1/messages", messages, methods=["POST"])
    install_message_routes(app)
    app.add_api_route("/v1/responses", responses, methods=["POST"])
    install_response_routes(app)
    install_token_routes(app)
    app.add_api_route("/v1/models", models, methods=["GET", "HEAD"])
    app.add_api_route("/v1/models/{name:path}", model, methods=["GET", "HEAD"])
    app.add_api_route("/version", version, methods=["GET", "HEAD"])
    app.add_api_route("/load", load, methods=["GET", "HEAD"])
    app.add_api_route("/openapi.json", openapi, methods=["GET", "HEAD"])
    app.add_api_route("/health", health, methods=["GET", "HEAD"])
    app.add_api_route("/ready", ready, methods=["GET", "HEAD"])
    app.add_api_route("/metrics", metrics, methods=["GET", "HEAD"])
    app.add_api_route("/sd", sd, methods=["GET", "HEAD"])
    ui_routes.install_ui_routes(app)
    return app


def _state(request: Request) -> RouterState:
    state = request.app.state.router
    assert isinstance(state, RouterState)
    return state


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def completions(request: Request) -> Response:
    return await _generate(request, COMPLETIONS)


async def chats(request: Request) -> Response:
    return await _generate(request, CHATS)


async def messages(request: Request) -> Response:
    return await _generate(request, MESSAGES)


async def responses(request: Request) -> Response:
    return await _generate(request, RESPONSES)


async def _generate(request: Request, dialect: Dialect[Body]) -> Response:
    state = _state(request)
    try:
        return await accept_request(state, request, dialect)
    except ApiError as error:
        state.metrics.count_request(str(error.status))
        return dialect.error_response(error, request.state.request_id)
    except ClientDisconnected:
        state.metrics.count_request("cancelled")
        raise
    except Exception:
        state.metrics.count_request("500")
        raise


async def disconnected(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # is not sent: the connection is closed


def _card(state: RouterState, name: str) -> ModelCard:
    known = state.pool.model
    limit = known.max_model_len if known else None
    root = state.settings.model_id
    return ModelCard(id=name, root=root, created=state.started, max_model_len=limit)


def _authenticate(request: Request, scope: KeyScope | None = None) -> None:
    """Raises ApiError: 401, or 403 for an API key without ``scope``; None: any key will do."""
    _state(request).tenants.authenticate(authorization_of(request.headers), scope)


async def models(request: Request) -> Response:
    _authenticate(request)
    state = _state(request)
    cards = [_card(state, name) for name in state.settings.model_names]
    if VERSION_HEADER in request.headers:
        return _json(model_page([model_entry(card.id, card.created) for card in cards]))
    return _json({"object": "list", "data": cards})


async def model(request: Request, name: str) -> Response:
    _authenticate(request)
    state = _state(request)
    card = _card(state, check_served_model(state, name))
    if VERSION_HEADER in request.headers:
        return _json(model_entry(card.id, card.created))
    return _json(card)


async def version(request: Request) -> Response:
    _authenticate(request)
    return _json({"version": metadata.version("baton")})


async def load(request: Request) -> Response:
    """Count the requests for generated tokens that are in this router."""
    _authenticate(request)
    return _json({"server_load": sum(_state(request).admission.inside.values())})


async def openapi(request: Request) -> Response:
    _authenticate(request)
    settings = _state(request).settings
    return _json(
        openapi_document(
            settings.model_names,
            keys=settings.api_keys is not None,
            closed=settings.unknown_fields == "refuse",
        )
    )


async def health() -> Response:
    """This process is alive, whatever the state of the workers is."""
    return _json({"status": "ok"})


async def ready(request: Request) -> Response:
    """A request would find a decode worker."""
    state = _state(request)
    attached = state.pool.attached
    if not attached:
        raise errors.unavailable(
            f"no decode worker for {state.settings.model_id!r} is connected to this router"
        )
    return _json({"status": "ready", "decode_workers": attached})


async def metrics(request: Request) -> Response:
    _authenticate(request, "monitor")
    page = _state(request).metrics_page()
    return Response(page, headers={"content-type": CONTENT_TYPE_LATEST})


async def sd(request: Request) -> Response:
    """List the metrics addresses of all processes (Prometheus ``http_sd_configs``)."""
    _authenticate(request, "monitor")
    return _json(await _state(request).scrape_targets())
