"""Fixtures of the contract tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from engine_kit import Kit, llama_kit, simulated_kit


@pytest.fixture(params=["simulated", pytest.param("llama", marks=pytest.mark.models)])
async def kit(request: pytest.FixtureRequest) -> AsyncIterator[Kit]:
    kit = await (simulated_kit() if request.param == "simulated" else llama_kit())
    yield kit
    await kit.close()
