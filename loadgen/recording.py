"""Recorded drafts: what a draft model guessed after which path, and a draft engine that says it again.

A guess depends on the path before it and on the session's rule (sampling, seed, prompt length) alone. So the recording
of earlier runs, off the target's text too, gives the drafts that the model itself would give, and many edges can be
replayed on a machine that could not draft for them all. What it does not hold is guessed live, kept, and counted.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadgen.jobs import Drafting
from loadgen.pace import FedTokens, Pace
from paceline.engine import DraftEngine, Guess, Rule, WrappedDraft

FAR = 1e9
_LENGTH = struct.Struct("<I")
_Line = tuple[bytes, int, float, tuple[tuple[int, float], ...]]


def key_of(path: Sequence[int], rule: Rule) -> bytes:
    """16 bytes for everything that a guess depends on."""
    terms = msgspec.json.encode((rule.sampling, rule.seed, rule.prompt_length, rule.choice))
    return hashlib.blake2b(array("i", path).tobytes(), digest_size=16, key=hashlib.sha256(terms).digest()).digest()


class Recording:
    """Guesses by key_of. `file` (None: memory only) is read at the start and appended to by `save`; from the first
    record on that is damaged or cut short it is dropped."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._guesses: dict[bytes, Guess] = {}
        self._unsaved: list[bytes] = []
        if file is not None and file.exists():
            self._load(file)

    def __len__(self) -> int:
        return len(self._guesses)

    def find(self, key: bytes) -> Guess | None:
        return self._guesses.get(key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._guesses

    def keep(self, key: bytes, guess: Guess) -> None:
        """The first guess for a key stays."""
        if key not in self._guesses:
            self._guesses[key] = guess
            self._unsaved.append(key)

    def save(self) -> None:
        """Raises OSError with nothing added to the file; what was to be saved is saved the next time."""
        if self._file is None or not self._unsaved:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        rest = memoryview(b"".join(_record(key, self._guesses[key]) for key in self._unsaved))
        with self._file.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(size)
                raise
        self._unsaved.clear()

    def _load(self, file: Path) -> None:
        data, good = file.read_bytes(), 0
        for line, end in _lines(data):
            try:
                key, token, confidence, alternatives = msgspec.msgpack.decode(line, type=_Line)
            except msgspec.DecodeError:
                break
            self._guesses[key] = Guess(token, confidence, alternatives)
            good = end
        if good < len(data):
            with file.open("r+b") as cut:
                cut.truncate(good)


def _record(key: bytes, guess: Guess) -> bytes:
    line = msgspec.msgpack.encode((key, guess.token, guess.confidence, guess.alternatives))
    return _LENGTH.pack(len(line)) + line


def _lines(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Each whole record and where it ends."""
    at = 0
    while at + _LENGTH.size <= len(data):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(data, at)[0]
        if at > len(data):
            return
        yield data[start:at], at


class Said(NamedTuple):
    """A guess, and what it was made for."""

    path: tuple[int, ...]
    rule: Rule
    guess: Guess


def gap_to(token: int, guess: Guess) -> float:
    """By how much less a token scored than the guess; a large number when it is not among the runner-ups."""
    return dict(guess.alternatives).get(token, FAR)


class RecordedDraft(WrappedDraft):
    """A DraftEngine over `engine`. Without `pace` it guesses live and keeps what it guessed; with it, it replays: a
    pass takes as long as `pace` says for the tokens that a device of the session's own would feed in it."""

    def __init__(self, engine: DraftEngine, recording: Recording, pace: Pace | None = None) -> None:
        super().__init__(engine)
        self._recording, self._pace = recording, pace
        self._fed: dict[str, FedTokens] = {}
        self._passes: list[tuple[int, float]] = []
        self._said: list[Said] = []
        self._gap = 0.0
        self._guesses = self._misses = self._again = self._differing = 0
        self._begun = self._flying = 0

    @property
    def drafting(self) -> Drafting:
        """What was asked for up to here."""
        return Drafting(self._guesses, self._misses, self._again, self._differing, self._gap, tuple(self._passes))

    @property
    def live(self) -> DraftEngine:
        """The model itself."""
        return self._engine

    @property
    def said(self) -> list[Said]:
        """Every guess up to here."""
        return self._said

    async def guesses(self, session: str, paths: Sequence[Sequence[int]], rule: Rule) -> list[Guess | None]:
        keys = [key_of(path, rule) for path in paths]
        rows = self._fed.setdefault(session, FedTokens()).rows(paths)
        self._guesses += len(paths)
        if self._pace is None:
            return await self._live(session, paths, rule, keys, rows)
        due = time.monotonic() + self._pace(rows) / 1e3
        found = [self._recording.find(key) for key in keys]
        if missing := [i for i, guess in enumerate(found) if guess is None]:
            self._misses += len(missing)
            made = await self._ask(session, [paths[i] for i in missing], rule)
            for i, guess in zip(missing, made, strict=True):
                found[i] = guess
                self._keep(keys[i], guess)
        self._note(paths, rule, found)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        return found

    def release(self, session: str) -> None:
        self._fed.pop(session, None)
        super().release(session)

    async def _live(
        self, session: str, paths: Sequence[Sequence[int]], rule: Rule, keys: Sequence[bytes], rows: int
    ) -> list[Guess | None]:
        self._begun += 1
        number, alone, started = self._begun, self._flying == 0, time.perf_counter()
        self._flying += 1
        try:
            made = await self._ask(session, paths, rule)
        finally:
            self._flying -= 1
        if alone and number == self._begun:
            self._passes.append((rows, (time.perf_counter() - started) * 1e3))
        for key, guess in zip(keys, made, strict=True):
            before = self._recording.find(key)
            if before is not None and guess is not None:
                self._again += 1
                if before.token != guess.token:
                    self._differing += 1
                    self._gap = max(self._gap, gap_to(before.token, guess))
            self._keep(key, guess)
        self._note(paths, rule, made)
        return made

    def _note(self, paths: Sequence[Sequence[int]], rule: Rule, guesses: Sequence[Guess | None]) -> None:
        self._said += [Said(tuple(path), rule, guess) for path, guess in zip(paths, guesses, strict=True) if guess]

    async def _ask(self, session: str, paths: Sequence[Sequence[int]], rule: Rule) -> list[Guess | None]:
        if len(paths) == 1:
            return [await self._engine.guess(session, paths[0], rule)]
        return await self._engine.guesses(session, paths, rule)

    def _keep(self, key: bytes, guess: Guess | None) -> None:
        if guess is not None:
            self._recording.keep(key, guess)
