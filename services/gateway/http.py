"""What every HTTP route shares: the caller's tenant, errors in OpenAI's shape, counting, one span a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import structlog
from aiohttp import web
from opentelemetry import trace

from paceline import telemetry
from paceline.errors import BadRequest, NotFound, Overloaded, RequestError, TooLarge, TransientError, Unavailable
from services.gateway.answers import error_body
from services.gateway.encodings import decoded
from services.gateway.stream import ClientGone
from services.gateway.tenants import Keyring, Tenant, bearer

log = structlog.get_logger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ROUTES = {
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "completions",
    "/v1/models": "models",
    "/v1/edge": "edge",
    "/v1/system": "system",
    "/v1/system/drain": "drain",
    "/healthz": "health",
    "/readyz": "health",
    "/metrics": "health",
}
BODY_S = 60.0
GONE = 499
"""What a client that left is counted as."""


class BodyTimeout(RequestError):
    status, code, kind = 408, "request_timeout", "invalid_request_error"


class MethodNotAllowed(RequestError):
    status, code, kind = 405, "method_not_allowed", "invalid_request_error"


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json", headers=headers)


def error_response(error: RequestError) -> web.Response:
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(error.retry_after_s)
    elif isinstance(error, Unavailable):
        headers["Retry-After"] = "1"
    return json_response(error_body(error), error.status, headers)


def identified(request: web.Request, keyring: Keyring) -> Tenant:
    """Raises Unauthorized."""
    tenant = keyring.identify(bearer(request.headers.get("Authorization")))
    trace.get_current_span().set_attribute(telemetry.ATTR_TENANT, tenant.name)
    return tenant


async def body_of(request: web.Request) -> bytes:
    """Decompressed. Raises TooLarge, naming both numbers, before a body is read that says its length; BodyTimeout;
    BadRequest for one that is not what its Content-Encoding says."""
    limit = request.client_max_size
    if request.content_length is not None and request.content_length > limit:
        raise TooLarge(f"a body of {request.content_length} bytes is over the limit of {limit} bytes")
    try:
        async with asyncio.timeout(BODY_S):
            data = await request.read()
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {BODY_S:g} s") from None
    except web.HTTPRequestEntityTooLarge as error:
        raise TooLarge(f"a body of more than {limit} bytes is over the limit of {limit} bytes") from error
    encoding = request.headers.get("Content-Encoding", "")
    return await asyncio.to_thread(decoded, data, encoding, limit) if encoding else data


def as_request_error(error: Exception, request: web.Request) -> RequestError:
    """Any exception as what the client is told; only what nobody expected is logged as an error."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, web.HTTPException):
        return _of_http(error, request)
    if isinstance(error, TransientError):
        log.warning("request failed", path=request.path, error=str(error))
        return Unavailable(str(error))
    log.error("request failed", path=request.path, exc_info=error)
    return RequestError("internal error; the gateway's log has the details")


def _of_http(error: web.HTTPException, request: web.Request) -> RequestError:
    if error.status == 404:
        return NotFound(f"there is no {request.method} {request.path}", code="unknown_url")
    if error.status == 405:
        return MethodNotAllowed(f"{request.path} does not take {request.method}")
    if error.status == 413:
        return TooLarge(error.text or "the body is too large")
    return BadRequest(error.text or error.reason, code="bad_request")


def guard(metrics: telemetry.Metrics) -> Any:
    """The middleware around every route."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        with telemetry.tracer.start_as_current_span(telemetry.SPAN_REQUEST, kind=trace.SpanKind.SERVER) as span:
            status = GONE
            try:
                response = await _answered(request, handler)
                status = response.status
            finally:  # also of a handler that is cancelled because its client left
                span.set_attribute("http.response.status_code", status)
                _count(metrics, request, status)
            return response

    return guarded


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ClientGone:
        return web.Response(status=GONE)
    except Exception as error:
        return error_response(as_request_error(error, request))


def _count(metrics: telemetry.Metrics, request: web.Request, status: int) -> None:
    route = ROUTES.get(request.path) or ("models" if request.path.startswith("/v1/models/") else telemetry.OTHER)
    shown = "gone" if status == GONE else "2xx" if status < 400 else f"{status // 100}xx"
    metrics.add(telemetry.REQUESTS, route=route, status=shown)
