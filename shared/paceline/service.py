"""The frame of a process: connections, readiness, signals, supervised tasks, a bounded way down."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, TypeVar

import structlog
from aiohttp import web

from paceline import telemetry
from paceline.bus import Bus
from paceline.errors import FatalError, PacelineError, TransientError
from paceline.health import health_routes, listening
from paceline.settings import Settings, unknown_variables
from paceline.store import LeaseStore, SessionStore

log = structlog.get_logger(__name__)
T = TypeVar("T")

RETRY_S = 0.5
CANCEL_AGAIN_S = 0.5
CANCELS = 6
WATCH_S = 1.0


class Service:
    """What a body gets: its connections, and the means to run tasks and to say whether it is ready."""

    def __init__(  # noqa: PLR0917 - the parts that every service has
        self,
        name: str,
        settings: Settings,
        bus: Bus,
        sessions: SessionStore,
        leases: LeaseStore,
        metrics: telemetry.Metrics | None = None,
        stopping: asyncio.Event | None = None,
    ) -> None:
        self.name = name
        self.instance = settings.instance
        self.settings = settings
        self.bus = bus
        self.sessions = sessions
        self.leases = leases
        self.metrics = metrics or telemetry.Metrics()
        self.stopping = stopping or asyncio.Event()
        self.failure: BaseException | None = None
        """What ended the process, if not a signal."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._components: dict[str, tuple[bool, str]] = {}

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """A referenced task. One that ends by an exception nobody expected ends the process, with a log line."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def set_ready(self, component: str, ok: bool, detail: str = "") -> None:
        """Until every named component is ready the process is not; `detail` says why, for /readyz."""
        before = self._components.get(component, (None, ""))[0]
        self._components[component] = (ok, detail)
        if before is not None and before != ok:
            log.info("readiness", component=component, ready=ok, detail=detail)
        self.metrics.set(telemetry.READY, float(not self.not_ready()))

    def not_ready(self) -> dict[str, str]:
        """Component to the reason why it is not ready; empty: ready."""
        waiting = {name: detail or "not ready" for name, (ok, detail) in self._components.items() if not ok}
        return {**waiting, "process": "stopping"} if self.stopping.is_set() else waiting

    async def stop(self) -> None:
        """Cancel every task that still runs, and wait for it. A cancellation that a library swallowed is asked for
        again; what will not end is left behind, with a log line."""
        self.stopping.set()
        running = {task for task in self._tasks if task is not asyncio.current_task()}
        for _ in range(CANCELS):
            if not running:
                return
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
        if running:
            log.error("tasks that do not end", tasks=sorted(task.get_name() for task in running))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if isinstance(error, FatalError) and error.__cause__ is None:  # says what there is to know
            log.error("cannot go on", task=task.get_name(), error=str(error), kind=type(error).__name__)
        else:
            log.error("task failed", task=task.get_name(), exc_info=error)
        self.failure = self.failure or error
        self.stopping.set()


Body = Callable[[Service], AbstractAsyncContextManager[None]]


async def serve(name: str, body: Body, settings: Settings | None = None) -> int:
    """Run one process until SIGTERM or SIGINT; the exit code: 0 after a signal, 1 after a failure.

    `body` is entered once NATS and Redis answer, and left within settings.drain_s after the signal.
    """
    try:
        settings = settings or Settings.load()
    except FatalError as error:
        sys.stderr.write(f"paceline {name}: {error}\n")
        return 1
    telemetry.start_logs(name, settings.instance, settings.log_level, settings.log_json)
    for variable, hint in unknown_variables().items():
        log.warning("unknown setting", variable=variable, hint=hint)
    end_tracing = telemetry.start_tracing(name, settings.instance, settings.otlp_endpoint)
    try:
        return await _run(name, body, settings)
    except FatalError as error:
        log.error("cannot go on", error=str(error), kind=type(error).__name__)
        return 1
    except Exception:
        log.exception("failed")
        return 1
    finally:
        await asyncio.to_thread(end_tracing)


def main(name: str, body: Body) -> None:
    """What `python -m services.<name>` calls."""
    sys.exit(asyncio.run(serve(name, body)))


async def _run(name: str, body: Body, settings: Settings) -> int:
    stopping = asyncio.Event()
    async with AsyncExitStack() as stack:
        stack.enter_context(_signals(stopping))
        service = await _connected(stack, name, settings, stopping)
        if service is None:
            return 0
        if settings.health_port:
            app = web.Application()
            app.add_routes(health_routes(service))
            port = listening(app, settings.health_host, settings.health_port, "PACELINE_HEALTH_PORT")
            await stack.enter_async_context(port)
        service.spawn(_watch(service), "watch connections")
        await _hold(body, service)
        return 1 if service.failure else 0
    raise AssertionError("unreachable")


async def _hold(body: Body, service: Service) -> None:
    """Enter the body, wait for the end, leave it within drain_s. A signal while it is being entered cancels that."""
    entered = asyncio.Event()
    holder = asyncio.create_task(_entered(body, service, entered), name="body")
    signalled = asyncio.create_task(service.stopping.wait())
    await asyncio.wait({holder, signalled}, return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    if not entered.is_set():
        holder.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await holder


async def _entered(body: Body, service: Service, entered: asyncio.Event) -> None:
    drain_s = service.settings.drain_s
    try:
        async with asyncio.timeout(None) as limit, body(service):
            entered.set()
            log.info("serving", service=service.name)
            await service.stopping.wait()
            log.info("stopping", reason="failure" if service.failure else "signal")
            limit.reschedule(asyncio.get_running_loop().time() + drain_s)
    except TimeoutError:
        if not limit.expired():
            raise
        log.warning("not drained in time", drain_s=drain_s)


async def _connected(stack: AsyncExitStack, name: str, settings: Settings, stopping: asyncio.Event) -> Service | None:
    """The service with its connections, which `stack` closes; None when the signal came first."""
    from paceline.bus_nats import NatsBus
    from paceline.store_redis import RedisStore

    metrics = telemetry.Metrics()
    client = f"{name}-{settings.instance}"
    store = await _first(lambda: RedisStore.connect(settings.redis_url, metrics), "redis", settings, stopping)
    if store is None:
        return None
    stack.push_async_callback(store.close)
    bus = await _first(lambda: NatsBus.connect(settings.nats_url, client, metrics), "nats", settings, stopping)
    if bus is None:
        return None
    stack.push_async_callback(bus.close)
    service = Service(name, settings, bus, store, store, metrics, stopping)
    stack.push_async_callback(service.stop)
    return service


async def _first(
    connect: Callable[[], Coroutine[Any, Any, T]], what: str, settings: Settings, stopping: asyncio.Event
) -> T | None:
    """Connect, again and again for connect_s; None when the signal came first."""
    deadline = time.monotonic() + settings.connect_s
    while not stopping.is_set():
        try:
            return await connect()
        except TransientError as error:
            if time.monotonic() > deadline:
                raise FatalError(f"{what} did not answer for {settings.connect_s:g} s: {error}") from error
            log.warning("waiting", what=what, error=str(error))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S):  # wait_for may swallow a cancellation on Python 3.11
                await stopping.wait()
    return None


async def _watch(service: Service) -> None:
    """Readiness of the two connections, once a second."""
    while True:
        service.set_ready("nats", service.bus.connected, "not connected")
        try:
            await service.sessions.ping()
            service.set_ready("redis", True)
        except PacelineError as error:
            service.set_ready("redis", False, str(error))
        await asyncio.sleep(WATCH_S)


@contextlib.contextmanager
def _signals(stopping: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stopping`; a second one ends the process at once."""
    loop = asyncio.get_running_loop()

    def received(number: int) -> None:
        if stopping.is_set():
            loop.remove_signal_handler(number)
            signal.raise_signal(number)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received, number)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
