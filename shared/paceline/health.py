"""/healthz, /readyz and /metrics, for the gateway's server and for the small server of every other process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from paceline.errors import PortTaken

if TYPE_CHECKING:
    from paceline.service import Service

ADDRESS_IN_USE = (98, 48)
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def health_routes(service: Service) -> list[web.RouteDef]:
    """Liveness is 200 while the event loop turns; readiness 503 names the components that are not ready."""

    async def healthz(_request: web.Request) -> web.Response:
        return _json(200, {"status": "ok", "service": service.name, "instance": service.instance})

    async def readyz(_request: web.Request) -> web.Response:
        waiting = service.not_ready()
        body = {"status": "ready" if not waiting else "not ready", "not_ready": waiting, "instance": service.instance}
        return _json(503 if waiting else 200, body)

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=service.metrics.text(), headers={"Content-Type": METRICS_TYPE})

    return [web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)]


@asynccontextmanager
async def listening(app: web.Application, host: str, port: int, variable: str) -> AsyncIterator[int]:
    """Serve `app`; yields the port (a free one for 0). Raises PortTaken, naming the port and its variable. A request's
    body is what was sent: whoever reads one looks at its Content-Encoding."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, auto_decompress=False)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await _start(site, host, port, variable)
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def _start(site: web.TCPSite, host: str, port: int, variable: str) -> None:
    try:
        await site.start()
    except OSError as error:
        if error.errno in ADDRESS_IN_USE:
            raise PortTaken(f"port {port} on {host} is in use; set {variable} to a free one") from error
        raise


def _json(status: int, body: object) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")
