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
from edge_client.interrupts import EXIT_CODE
from paceline.errors import FatalError, ModelError, PacelineError, RequestError, Unauthorized, Unavailable

_HINTS: dict[type[PacelineError], str] = {
    Unauthorized: "the key comes from --key or PACELINE_API_KEY; `python -m services.gateway.keys add` makes one",
    ModelError: "without drafts from here: --hosted (the cloud drafts too) or --no-speculation",
    Unavailable: "is the gateway running there? --gateway or PACELINE_GATEWAY_URL names another",
}


def main() -> None:
    structlog.configure(
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
    console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
    hint = next((text for kind, text in _HINTS.items() if isinstance(error, kind)), None)
    if hint is not None:
        console.print(f"       {hint}", style="dim", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
