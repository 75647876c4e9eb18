"""Fixtures for all tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

for _name in ("COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(_name, None)  # of the terminal that the tests run in: what they start has its own

for _folder in (".", "service", "integration"):
    sys.path.insert(0, str(Path(__file__).parent / _folder))

from servers import _nats, _redis, nats_server, own_nats, own_redis, redis_server  # noqa: E402, F401 - fixtures
