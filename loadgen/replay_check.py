"""Proof that replayed drafts are the drafts of the model: real runs live, live again, and replayed.

The first runs are recorded and give the pace of a pass by the tokens that it feeds. The second ones draft live again:
wherever they come to a path that was recorded, the guess is compared with it (passes round differently with other rows
beside them). The third ones replay at that pace.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from loadgen.divergence import NEAR_TIE
from loadgen.figures import itl_ms
from loadgen.grid_plan import Terms
from loadgen.jobs import Drafting, Job, Run, Wave, Waved
from loadgen.modes import DEEP_ALT
from loadgen.pace import Pace
from loadgen.prompts import EVERYDAY, PromptSet
from loadgen.rig import Rig
from paceline.errors import FatalError

PROMPTS = 2
RTT_MS = 100.0
TEMPERATURES = (0.0, 0.8)
"""Of the prompts in turn."""
MAX_REPLAYS = 3
"""A replay explores other paths than the live run where verdicts come at other moments; it is repeated until nothing is
missing, as often as that."""


async def check_replay(
    rig: Rig, terms: Terms, pace: Pace | None = None, *, prompts: PromptSet = EVERYDAY
) -> dict[str, Any]:
    """Over RTT_MS of round trip, with the edge's present recording. `pace`: an earlier one, to be kept. `prompts`: the
    set that `terms` name."""
    await rig.at_distance(RTT_MS)
    jobs = [terms.job(i, DEEP_ALT, TEMPERATURES[i % len(TEMPERATURES)], terms.tokens, prompts) for i in range(PROMPTS)]
    live = [await rig.edge.wave(Wave((job,))) for job in jobs]
    again = [await rig.edge.wave(Wave((job,))) for job in jobs]
    learned = pace or Pace.learned(one for wave in [*live, *again] for one in wave.drafting.passes)
    if learned is None:
        raise FatalError("the edge drafted nothing, so there is nothing to replay")
    replayed = [await _replayed(rig, job, learned) for job in jobs]
    return {**outcome(live, again, replayed), "pair": rig.pair, "rtt_ms": RTT_MS, "pace_ms": dict(learned.ms)}


def pace_of(checks: Sequence[dict[str, Any]], pair: str) -> Pace | None:
    """The pace that an earlier check of the pair found."""
    for check in checks:
        if check["pair"] == pair:
            return Pace({int(tokens): float(ms) for tokens, ms in check["pace_ms"].items()})
    return None


def outcome(live: Sequence[Waved], again: Sequence[Waved], replayed: Sequence[Waved]) -> dict[str, Any]:
    """What the three showed. differing: guesses of the second live runs that were not as recorded, differing_gap the
    largest difference of scores there."""
    drafting = [wave.drafting for wave in replayed]
    total = Drafting(sum(one.guesses for one in drafting), sum(one.misses for one in drafting))
    return {
        "identical_text": _tokens(live) == _tokens(replayed) == _tokens(again),
        "guesses_live": sum(wave.drafting.guesses for wave in live),
        "guesses_again": sum(wave.drafting.again for wave in again),
        "differing": sum(wave.drafting.differing for wave in again),
        "differing_gap": max(wave.drafting.gap for wave in again),
        "guesses_replayed": total.guesses, "misses": total.misses,
        "itl_ms_live": statistics.fmean([itl_ms(_runs(live)), itl_ms(_runs(again))]),
        "itl_ms_replayed": itl_ms(_runs(replayed)),
    }  # fmt: skip


def verdict(check: dict[str, Any]) -> str:
    """One line."""
    good = check["identical_text"] and check["differing_gap"] <= NEAR_TIE and not check["misses"]
    gap = f" (by {check['differing_gap']:.2g} of a score at most)" if check["differing"] else ""
    text = "identical texts" if check["identical_text"] else "texts differ"
    return (
        f"[{'green' if good else 'yellow'}]{check['pair']}, replay against live: {text}; of {check['guesses_again']} "
        f"guesses made again live {check['differing']} differ{gap}; of {check['guesses_replayed']} replayed "
        f"{check['misses']} were not recorded; {check['itl_ms_live']:.1f} ms a token live, "
        f"{check['itl_ms_replayed']:.1f} replayed[/]"
    )


async def _replayed(rig: Rig, job: Job, pace: Pace) -> Waved:
    for _ in range(MAX_REPLAYS):
        wave = await rig.edge.wave(Wave((job,), "replay", dict(pace.ms)))
        if not wave.drafting.misses:
            break
    return wave


def _runs(waves: Sequence[Waved]) -> list[Run]:
    return [run for wave in waves for run in wave.runs]


def _tokens(waves: Sequence[Waved]) -> list[tuple[int, ...]]:
    return [run.tokens for run in _runs(waves)]
