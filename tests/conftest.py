"""Fixtures for all tests."""

from __future__ import annotations

import sys
from pathlib import Path

for _folder in (".", "service", "integration"):
    sys.path.insert(0, str(Path(__file__).parent / _folder))

from servers import _nats, _redis, nats_server, own_nats, own_redis, redis_server  # noqa: E402, F401 - fixtures
