"""Log lines for people."""

from __future__ import annotations

import structlog


def console_renderer() -> structlog.dev.ConsoleRenderer:
    """Its tracebacks show no local variables: they hold prompts and keys."""
    return structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
