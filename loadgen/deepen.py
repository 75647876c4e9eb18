"""Guesses beyond what a replayed wave asked for, so that the next one finds more of what it asks for recorded.

How far a chain is drafted before a verdict ends it depends on the moment, so no two runs ask for quite the same paths.
Where a wave missed some, its chains are drafted on from their ends, and so are likely alternatives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice

from loadgen.recording import Recording, Said, key_of
from paceline.engine import DraftEngine, Rule
from paceline.errors import EngineError

DEPTH = 8
"""Tokens beyond the ends of the chains."""
NEAR_GAP = 2.0
"""A first runner-up whose score is this close may be drafted on from."""
SESSION = "deepen"

Path = tuple[int, ...]


async def deepen(engine: DraftEngine, recording: Recording, said: Iterable[Said], most: int) -> int:
    """Record up to `most` further guesses; how many. An engine that has no room ends it."""
    made = 0
    ends = {(path, id(rule)): (path, rule) for one in said for path, rule in beyond(one)}
    frontier = list(ends.values())
    try:
        for _ in range(DEPTH):
            unknown = [(path, rule) for path, rule in frontier if key_of(path, rule) not in recording]
            frontier = []
            for rule, paths in _groups(unknown[: most - made], engine.max_paths):
                for path, guess in zip(paths, await engine.guesses(SESSION, paths, rule), strict=True):
                    if guess is not None:
                        recording.keep(key_of(path, rule), guess)
                        made += 1
                        frontier += [(end, rule) for end, _ in beyond(Said(path, rule, guess), alternatives=False)]
    except EngineError as error:
        print(f"the recording is not deepened further: {error}", file=sys.stderr)
    finally:
        engine.release(SESSION)
    return made


def beyond(said: Said, *, alternatives: bool = True) -> Iterator[tuple[Path, Rule]]:
    """The paths that may be asked for after a guess, as far as the answer goes (whose length is fixed)."""
    path, rule, guess = said
    if len(path) + 1 >= rule.prompt_length + rule.sampling.min_tokens:
        return
    yield (*path, guess.token), rule
    for token, gap in guess.alternatives[:1] if alternatives else ():
        if gap < NEAR_GAP:
            yield (*path, token), rule


def _groups(paths: Sequence[tuple[Path, Rule]], size: int) -> Iterator[tuple[Rule, list[Path]]]:
    """Paths of one rule that share most, side by side; at most `size`."""
    ordered = sorted(paths, key=lambda one: (id(one[1]), one[0]))
    for _, group in groupby(ordered, lambda one: id(one[1])):
        while several := list(islice(group, size)):
            yield several[0][1], [path for path, _ in several]
