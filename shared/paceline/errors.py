"""Every error that Paceline raises, as one tree.

PacelineError
+-- RequestError          this request failed; the process is well. Carries an HTTP status and a code
|   +-- BadRequest            400, names the parameter
|   +-- ContextLengthExceeded 400, names both numbers
|   +-- Unauthorized          401
|   +-- NotFound              404, unknown model or session
|   +-- Conflict              409, a session of somebody else, a finished or lost history
|   +-- TooLarge              413, names both numbers
|   +-- Overloaded            429, carries retry_after_s
|   +-- Unavailable           503, names the component
+-- TransientError        worth a retry
|   +-- BusError
|   |   +-- NoResponders      nobody listens on the subject
|   |   +-- RequestTimeout    somebody may listen, nobody answered in time
|   +-- StoreError            the state store is away
+-- StaleEpoch            somebody else owns the session now; drop it, never retry
+-- EngineError           a step failed for the sessions concerned
|   +-- NoRoom                no free KV cell now; wait, or park and replay
+-- FatalError            this process is finished; says what to mend
    +-- SettingsError
    +-- ModelError        a model file is missing, damaged, or does not fit
    +-- PortTaken
"""

from __future__ import annotations


class PacelineError(Exception):
    """Root of the tree."""


class RequestError(PacelineError):
    """This request failed. `status` is the HTTP status, `code` a stable machine-readable word."""

    status = 500
    code = "internal_error"
    kind = "server_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.param = param


class BadRequest(RequestError):
    """A value that cannot be served; `param` names it."""

    status, code, kind = 400, "invalid_value", "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    """Prompt (plus completion) beyond the context; the message names both numbers."""

    code = "context_length_exceeded"


class Unauthorized(RequestError):
    """No key, or a wrong one."""

    status, code, kind = 401, "invalid_api_key", "authentication_error"


class NotFound(RequestError):
    """Unknown model, path or session."""

    status, code, kind = 404, "not_found", "invalid_request_error"


class Conflict(RequestError):
    """The session's history does not agree with the caller's (`history_lost`), or it belongs to somebody else."""

    status, code, kind = 409, "conflict", "invalid_request_error"


class TooLarge(RequestError):
    """A message beyond a stated bound; the message names both numbers."""

    status, code, kind = 413, "too_large", "invalid_request_error"


class Overloaded(RequestError):
    """A limit was hit; try again after `retry_after_s` whole seconds (at least 1)."""

    status, code, kind = 429, "overloaded", "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: int = 1, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = max(1, retry_after_s)


class Unavailable(RequestError):
    """A component is away; the message names it."""

    status, code, kind = 503, "unavailable", "server_error"


class TransientError(PacelineError):
    """May go away by itself; a retry is right."""


class BusError(TransientError):
    """The message bus refused or lost something."""


class NoResponders(BusError):
    """Nobody listens on this subject."""


class RequestTimeout(BusError):
    """No answer within the time allowed."""


class StoreError(TransientError):
    """The state store is away or answered with an error."""


class StaleEpoch(PacelineError):
    """A higher epoch exists: another batcher owns the session."""


class EngineError(PacelineError):
    """An engine step failed for the sessions concerned; the engine lives."""


class NoRoom(EngineError):
    """No KV cell is free for this session now."""


class FatalError(PacelineError):
    """The process cannot go on; the message says what to mend."""


class SettingsError(FatalError):
    """A setting is missing or out of range."""


class ModelError(FatalError):
    """A model file is missing, damaged, or does not fit the other model of the pair."""


class PortTaken(FatalError):
    """A port that was asked for is in use."""


REQUEST_ERRORS: dict[int, type[RequestError]] = {
    400: BadRequest, 401: Unauthorized, 404: NotFound, 409: Conflict, 413: TooLarge, 429: Overloaded, 503: Unavailable,
}  # fmt: skip


def request_error(status: int, code: str, message: str, param: str | None = None) -> RequestError:
    """The RequestError for a status, code and message that came over the bus or from a gateway."""
    kind = REQUEST_ERRORS.get(status, RequestError)
    error = kind(message, code=code)
    error.param = param
    return error
