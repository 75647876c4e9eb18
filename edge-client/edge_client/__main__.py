"""`paceline`: runs a command and turns what goes wrong into one line for people and an exit code.

0 done, 1 it failed (the reason is on stderr), 2 wrong usage, 130 ended by Ctrl-C.
"""

from __future__ import annotations

import logging
import sys

import orjson
import structlog
from rich.console import Console

from edge_client.cli import app
from edge_client.drafts import NoDraftModel
from edge_client.faults import NoGateway
from edge_client.interrupts import EXIT_CODE
from paceline.errors import FatalError, PacelineError, RequestError, Unauthorized
from paceline.plain_log import console_renderer

_KEY_OF_UP = "export PACELINE_API_KEY=$(cat .state/key)"
_NO_KEY = ("`make up` on this machine makes one; after it:", _KEY_OF_UP)
_WRONG_KEY = ("for a gateway that `make up` started on this machine:", _KEY_OF_UP)
_NO_DRAFTS = ("without drafts from here: --hosted (the cloud drafts too)", "or --no-speculation")
_NO_GATEWAY = ("is the gateway running there?", "--gateway or PACELINE_GATEWAY_URL names another")


def main() -> None:
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.TimeStamper(), console_renderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        app()
    except PacelineError as error:
        _explain(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(EXIT_CODE)


def _explain(error: PacelineError) -> None:
    if "--json" in sys.argv:
        code = error.code if isinstance(error, RequestError) else "fatal" if isinstance(error, FatalError) else "error"
        status = error.status if isinstance(error, RequestError) else 500
        answer = {"error": {"code": code, "message": str(error), "status": status}}
        sys.stdout.write(orjson.dumps(answer).decode() + "\n")
    console = Console(stderr=True, highlight=False)
    console.print(f"error: {error}", style="red", markup=False, soft_wrap=not console.is_terminal)
    for line in _hint(error):
        console.print(f"       {line}", style="dim", markup=False, soft_wrap=True)


def _hint(error: PacelineError) -> tuple[str, ...]:
    """What to do about it, in lines that fit 80 columns; none where that is not known."""
    if isinstance(error, Unauthorized):
        return _NO_KEY if error.code == "missing_api_key" else _WRONG_KEY
    if isinstance(error, NoDraftModel):
        return _NO_DRAFTS
    return _NO_GATEWAY if isinstance(error, NoGateway) else ()


if __name__ == "__main__":
    main()
