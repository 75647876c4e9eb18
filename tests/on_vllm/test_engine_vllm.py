"""The target engine's contract on vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from engine_kit import Kit
from test_engine_faults import TestFaults
from test_engine_outcomes import TestOutcomes
from test_engine_room import TestLedger, TestRoom
from test_engine_text import TestText
from vllm_kit import vllm_kit

__all__ = ["TestFaults", "TestLedger", "TestOutcomes", "TestRoom", "TestText"]


@pytest.fixture
async def kit() -> AsyncIterator[Kit]:
    kit = await vllm_kit()
    yield kit
    await kit.close()
