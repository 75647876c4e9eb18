"""A few drafts before the first session: they tell how fast this drafter is, and what only a first pass has to do is
done."""

from __future__ import annotations

import structlog

from paceline.engine import Rule
from paceline.errors import EngineError
from paceline.wire import Sampling
from services.drafter.metered import MeteredDraft

log = structlog.get_logger("drafter")

SESSION = "warm-up"
PROMPT = 16
GUESSES = 6


async def warm_up(engine: MeteredDraft, vocabulary: int) -> None:
    """Counts for no drafts. Trouble shows when there is a session."""
    rule = Rule(Sampling(temperature=0), seed=0, prompt_length=PROMPT)
    path = [(7 * index + 11) % vocabulary for index in range(PROMPT)]
    try:
        for _ in range(GUESSES):
            path.append((await engine.guess(SESSION, path, rule)).token)
    except EngineError as error:
        log.warning("no warm-up", error=str(error))
    finally:
        engine.release(SESSION)
        engine.drafted, engine.trouble = 0, ""
