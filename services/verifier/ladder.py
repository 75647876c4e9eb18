"""A first measurement of the step curve, before a verifier serves: a few steps of growing size by a session of its own.

It goes through the engine's port as any other session does, so it works on every engine, and leaves nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.engine import Decided, Rule, TargetEngine, TargetItem
from paceline.errors import EngineError
from paceline.wire import Sampling

RUNGS = (1, 2, 4, 8, 16)
FAST_RUNGS = (32, 64, 128, 256)
"""While a step takes less than FAST_S: an engine that is far from its roofline is measured further."""
FAST_S = 0.05
ROUNDS = 2
SLOW_S = 2.0
"""A rung that takes longer is the last one; no second round begins after this time."""
SESSION = "measurement"
PROMPT = 16
GREEDY = Sampling(temperature=0)

Learn = Callable[[int, int, float], None]
"""Tokens fed, tokens of context, milliseconds of one step."""


async def climb(
    engine: TargetEngine, vocabulary: int, learn: Learn, clock: Callable[[], float] = time.perf_counter
) -> None:
    """Tell `learn` of each step. What the engine has no room for is left out."""
    tokens = tuple((7 * index + 11) % vocabulary for index in range(PROMPT + FAST_RUNGS[-1]))
    started = clock()
    try:
        if await _step(engine, tokens, 0, history=tokens[:PROMPT]):  # its own time is that of a first step
            for _ in range(ROUNDS):
                await _round(engine, tokens, learn, clock)
                if clock() - started > SLOW_S:
                    return
    finally:
        engine.trim(SESSION, 0)
        engine.release(SESSION)


async def _round(engine: TargetEngine, tokens: tuple[int, ...], learn: Learn, clock: Callable[[], float]) -> None:
    for size in (*RUNGS, *FAST_RUNGS):
        before = clock()
        if not await _step(engine, tokens, size - 1):
            return
        seconds = clock() - before
        learn(size, PROMPT, 1000 * seconds)
        if seconds > SLOW_S or (size >= RUNGS[-1] and seconds > FAST_S):
            return


async def _step(engine: TargetEngine, tokens: tuple[int, ...], drafts: int, history: tuple[int, ...] = ()) -> bool:
    """One decision after the prompt with `drafts` tokens to verify; False when it did not come about."""
    item = TargetItem(
        session=SESSION,
        tenant="",
        at=PROMPT,
        history=history,
        draft=tokens[PROMPT : PROMPT + drafts],
        rule=Rule(GREEDY, seed=0, prompt_length=PROMPT),
    )
    try:
        (outcome,) = await engine.step([item])
    except EngineError:
        return False
    return isinstance(outcome, Decided)
