"""What every bus does with one message that came in: validate, hand over, answer. No client library here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from paceline import wire
from paceline.bus import Handler, Received
from paceline.errors import BadRequest, NoResponders, Overloaded, RequestError, TooLarge, request_error
from paceline.telemetry import BUS_REFUSED, Metrics, receiving

log = structlog.get_logger(__name__)

Respond = Callable[[wire.Message], Awaitable[None]]


class Delivery:
    """Runs `handler` for messages of the types in `carries` (any, if empty); see paceline.bus.Bus for the rules."""

    def __init__(self, handler: Handler, carries: tuple[type[wire.Message], ...], metrics: Metrics | None) -> None:
        self._handler = handler
        self._carries = carries
        self._metrics = metrics

    async def __call__(self, subject: str, data: bytes, headers: dict[str, str], respond: Respond | None) -> None:
        """Never raises, except for cancellation: one bad message must not end a subscription."""
        try:
            message = wire.decode(data, *self._carries)
        except BadRequest as error:
            self._count("malformed")
            log.warning("message refused", subject=subject, reason=error.message, bytes=len(data))
            await self._answer(respond, refusal(error))
            return
        try:
            with receiving(subject, headers):
                await self._handler(Received(subject, message, headers, respond))
        except RequestError as error:
            self._count("request_error")
            await self._answer(respond, refusal(error))
        except Exception as error:
            self._count("handler_failed")
            log.exception("handler failed", subject=subject, message_type=type(message).__name__)
            await self._answer(respond, refusal(RequestError(f"{type(error).__name__} in the handler of {subject}")))

    def _count(self, reason: str) -> None:
        if self._metrics is not None:
            self._metrics.add(BUS_REFUSED, reason=reason)

    async def _answer(self, respond: Respond | None, answer: wire.Refused) -> None:
        if respond is None:
            return
        try:
            await respond(answer)
        except Exception:
            log.exception("answer not sent")


def refusal(error: RequestError) -> wire.Refused:
    """The Refused that carries `error` over the bus or the WAN."""
    failure = wire.Failure(status=error.status, code=error.code, message=error.message, param=error.param)
    retry = error.retry_after_s if isinstance(error, Overloaded) else None
    return wire.Refused(error=failure, retry_after_s=retry)


def answered(answer: wire.Message) -> wire.Message:
    """The answer, unless it is a Refused: then raises what it carries."""
    if not isinstance(answer, wire.Refused):
        return answer
    failure = answer.error
    error = request_error(failure.status, failure.code, failure.message, failure.param)
    if isinstance(error, Overloaded) and answer.retry_after_s is not None:
        error.retry_after_s = answer.retry_after_s
    raise error


def fitting(subject: str, message: wire.Message, limit: int) -> bytes:
    """The encoded message. Raises TooLarge, naming both numbers."""
    data = wire.encode(message)
    if len(data) > limit:
        kind = message.__struct_config__.tag
        raise TooLarge(f"a message `{kind}` of {len(data)} bytes is over the bus's limit of {limit} bytes")
    return data


def nobody(subject: str) -> NoResponders:
    return NoResponders(f"nobody listens on {subject}")
