"""What can go wrong on the way to a gateway, in words for people."""

from __future__ import annotations

import errno
import os

import aiohttp

from paceline import wire
from paceline.errors import (
    NotFound,
    Overloaded,
    RequestError,
    TransientError,
    Unauthorized,
    Unavailable,
    request_error,
)


class LinkDown(TransientError):
    """There is no link at this moment; it is being dialled again."""


class NoGateway(Unavailable):
    """Nobody answers at the gateway's address, or something that is no gateway."""


def failure_of(refused: wire.Refused) -> RequestError:
    """The error that a Refused carries."""
    fault = refused.error
    error = request_error(fault.status, fault.code, fault.message, fault.param)
    if isinstance(error, Overloaded) and refused.retry_after_s:
        error.retry_after_s = refused.retry_after_s
    return error


def plain_cause(error: BaseException) -> str:
    """What the system says of a failed connection, without a library's wrapping."""
    inner = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(inner, OSError) and inner.errno in errno.errorcode:
        return os.strerror(inner.errno or 0).lower()
    if isinstance(inner, aiohttp.ClientResponseError):  # its text is a dump of what came
        return "what is there speaks no HTTP"
    return str(inner) or type(inner).__name__


class explained:
    """Turns what a dial may raise into errors for people."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, aiohttp.WSServerHandshakeError):
            raise _handshake_error(self._url, error.status) from error
        if isinstance(error, aiohttp.InvalidURL):
            raise NotFound(f"`{self._url}` is no gateway URL (expected http://host:port)") from error
        if isinstance(error, TimeoutError):
            raise NoGateway(f"the gateway at {self._url} did not answer in time") from error
        if isinstance(error, aiohttp.ClientError | OSError | LinkDown):
            raise NoGateway(f"no gateway answers at {self._url}: {plain_cause(error)}") from error


def _handshake_error(url: str, status: int) -> RequestError:
    if status == 401:
        return Unauthorized(f"the gateway at {url} refused the key")
    if status == 404:
        return NotFound(f"what answers at {url} is no Paceline gateway")
    return Unavailable(f"the gateway at {url} refused the link (HTTP {status})")
