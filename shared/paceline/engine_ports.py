"""TargetEngine and DraftEngine over a BatchEngine: what an item means in tokens, acceptance, and the guess.

The acceptance rule of the whole system is `verify`: a draft token is accepted iff it is the target's own choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import cast

import numpy as np

from paceline import kv_branches
from paceline.coupling import Choice, choose, logprobs, needs_tokens, probability
from paceline.engine import Decided, EngineStatus, Failed, Guess, Outcome, Rule, TargetItem, TokenLogprob
from paceline.engine_batch import BatchEngine, Job
from paceline.errors import EngineError, NoRoom
from paceline.forward_pass import Kept, Logits, LogitsAt
from paceline.kv_ledger import Known

ALTERNATIVES = 4
"""Runner-ups that a guess names."""
CATCH_UP = 16
"""A guess that feeds more tokens is a prefill, and waits for its turn; a branch that lacks more catches up by parts."""
FED_TWICE = 2
"""Rows of the main path that its branches may feed again in the same pass; more are fed before, in one of their own."""
MAX_PATHS = 4
"""Paths of one session in one pass: a further row of a small draft model costs about a third of the first."""


def accept(item: TargetItem, choices: Iterable[tuple[Choice, TokenLogprob | None]]) -> Kept:
    """Walks along the draft while the target's choice agrees. choices: at position `at`, and after each draft token."""
    margins: list[float] = []
    values: list[TokenLogprob] = []
    for j, (choice, value) in enumerate(choices):
        margins.append(choice.margin)
        if value is not None:
            values.append(value)
        if j == len(item.draft) or choice.token != item.draft[j]:
            return Kept(Decided(item.session, j, choice.token, tuple(margins), tuple(values)), j, choice.token)
    raise AssertionError("there is a choice for each draft token and one more")


def verify(item: TargetItem, rule: Rule, path: Sequence[int], logits: LogitsAt) -> Kept:
    """What the logits after c[0..at), which is `path`, and along the draft decide."""
    return accept(item, _choices(item, rule, path, logits))


def _choices(
    item: TargetItem, rule: Rule, path: Sequence[int], logits: LogitsAt
) -> Iterator[tuple[Choice, TokenLogprob | None]]:
    whole = len(path) + len(item.draft)
    before = np.asarray([*path, *item.draft], np.int64) if needs_tokens(rule.sampling) else range(whole)
    for j in range(len(item.draft) + 1):
        choice = choose(logits(j), rule, before[: item.at + j])
        yield choice, None if item.logprobs is None else logprobs(logits(j), choice.token, item.logprobs)


def job_of(item: TargetItem, ledger: Sequence[int], vocabulary: int, context: int) -> Job | Failed:
    """The tokens that an item means, given the session's ledger; or why it cannot be served."""
    end = item.start + len(item.history)
    refused = partial(Failed, item.session)
    if item.start > len(ledger):
        return refused("need_history", f"history starts at {item.start}, {len(ledger)} tokens are held")
    if bad := _bad_ids(item, vocabulary):
        return refused("bad_token", f"token ids {bad} are outside the vocabulary of {vocabulary}")
    agrees = tuple(ledger[item.start : end]) == item.history
    path = list(ledger[: item.at] if agrees else [*ledger[: item.start], *item.history])
    known = Known(ledger, len(path) if agrees else item.start)
    if item.rule is None:
        return Job(item.session, item.tenant, path, known=known)
    if len(path) != item.at or not path:
        return refused("need_history", f"{len(path)} tokens are held, the decision is at {item.at}")
    if len(path) + len(item.draft) > context:
        return refused("step_failed", f"{len(path) + len(item.draft)} tokens are beyond the context of {context}")
    decide = partial(verify, item, item.rule, path)
    return Job(item.session, item.tenant, path, item.draft, decide, item.rule.prompt_length, asked=item, known=known)


def _bad_ids(item: TargetItem, vocabulary: int) -> list[int]:
    ids = [*item.history, *item.draft]
    if item.rule is not None:
        ids += [*item.rule.sampling.logit_bias, *item.rule.sampling.end_ids]
    return [i for i in ids if not 0 <= i < vocabulary][:4]


class BatchedTarget:
    """A TargetEngine. Steps asked for at once run one after the other, in order."""

    def __init__(self, engine: BatchEngine) -> None:
        self.engine = engine

    def held(self, session: str) -> tuple[int, ...]:
        return self.engine.ledgers.held(session)

    def trim(self, session: str, length: int) -> None:
        self.engine.trim(session, length)

    async def step(self, items: Sequence[TargetItem]) -> list[Outcome]:
        vocabulary = self.engine.memory.vocabulary
        ledgers = self.engine.ledgers
        planned = [job_of(item, ledgers.tokens(item.session), vocabulary, self.engine.context) for item in items]
        jobs = [job for job in planned if isinstance(job, Job)]
        stepped = iter(await self.engine.submit(jobs) if jobs else [])
        return [cast(Outcome, next(stepped)) if isinstance(job, Job) else job for job in planned]

    def release(self, session: str) -> None:
        self.engine.release(session)

    async def sleep(self) -> None:
        raise EngineError(f"the {self.engine.name} engine cannot sleep")

    async def wake(self) -> None:
        raise EngineError(f"the {self.engine.name} engine cannot sleep")

    def status(self) -> EngineStatus:
        return self.engine.status()

    async def close(self) -> None:
        await self.engine.close()


class BatchedDraft:
    """A DraftEngine. Guesses of several sessions that wait at the same time share a pass, with one prefill among them.

    sessions: that are promised KV at the same time (None: one for each sequence); branches use what they leave.
    chunk: most tokens of a prefill in one pass, which is what the others in it wait for.
    share_prefixes: sessions may reuse each other's KV for a common prefix. Only for sessions of one owner: the time
    that a guess takes would tell one tenant what another one asked.
    """

    max_paths = MAX_PATHS

    def __init__(
        self, engine: BatchEngine, *, sessions: int | None = None, chunk: int = 256, share_prefixes: bool = False
    ) -> None:
        self.engine = engine
        self._sessions = min(sessions or engine.ledgers.sequences, engine.ledgers.sequences)
        self._chunk = chunk
        self._share_prefixes = share_prefixes
        self._prefill = asyncio.Lock()

    @property
    def context(self) -> int:
        return self.engine.context

    @property
    def max_sessions(self) -> int:
        return self._sessions

    def status(self) -> EngineStatus:
        return self.engine.status()

    async def guess(self, session: str, path: Sequence[int], rule: Rule) -> Guess:
        (guess,) = await self.guesses(session, (path,), rule)
        assert guess is not None
        return guess

    async def guesses(self, session: str, paths: Sequence[Sequence[int]], rule: Rule) -> list[Guess | None]:
        path = paths[0]
        if not 0 < len(path) <= self.context:
            raise NoRoom(f"a path of {len(path)} tokens is outside the draft model's context of {self.context}")
        held = kv_branches.held(self.engine.ledgers, session, path)
        if bad := self._bad(path[held:]):
            raise EngineError(f"token ids {bad[:4]} are outside the draft model's vocabulary")
        while len(path) - held > self._chunk:  # others get their turn between chunks
            held += self._chunk
            await self._feed(Job(session, self._owner(session), path[:held]))
        if (len(paths) - 1) * (len(path) - 1 - held) > FED_TWICE:  # branches can share only what is there
            await self._catch_up(Job(session, self._owner(session), path[:-1]), held)
            held = len(path) - 1
        jobs = {0: self._deciding(session, session, path, rule)}
        if len(paths) == 1:
            outcomes = await self._catch_up(jobs[0], held)
        else:
            jobs |= self._branches(session, paths[: self.max_paths], rule)
            outcomes = await self._submit(list(jobs.values()))
        found = dict(zip(jobs, outcomes, strict=True))
        return [guess if isinstance(guess := found.get(index), Guess) else None for index in range(len(paths))]

    def _branches(self, session: str, paths: Sequence[Sequence[int]], rule: Rule) -> dict[int, Job]:
        """By index, for each of paths[1:] that can be served: it decides, or catches up where it lacks too much."""
        jobs = {}
        slots = kv_branches.slots(self.engine.ledgers, session, paths[0], paths[1:])
        for index, (path, slot) in enumerate(zip(paths[1:], slots, strict=True), 1):
            end = min(len(path), slot.held + CATCH_UP)
            if not 0 < len(path) <= self.context or self._bad(path[slot.held : end]):
                continue
            if end < len(path):
                jobs[index] = Job(slot.key, self._owner(session), path[:end], branch_of=session)
            else:
                jobs[index] = self._deciding(slot.key, session, path, rule)
        return jobs

    def _deciding(self, key: str, session: str, path: Sequence[int], rule: Rule) -> Job:
        decide, branch_of = partial(self._decide, path, rule), session if key != session else ""
        return Job(key, self._owner(session), path, (), decide, rule.prompt_length, branch_of)

    def _owner(self, session: str) -> str:
        return "" if self._share_prefixes else session

    def _bad(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if not 0 <= token < self.engine.memory.vocabulary]

    async def _catch_up(self, job: Job, held: int) -> list[object]:
        return await (self._feed(job) if len(job.path) - held > CATCH_UP else self._submit([job]))

    async def _feed(self, job: Job) -> list[object]:
        """A chunk, one session's at a time. Raises NoRoom where the session lost its KV while it waited: fed all at
        once, what is missing now would hold up everybody."""
        async with self._prefill:
            if len(job.path) - kv_branches.held(self.engine.ledgers, job.session, job.path) > self._chunk:
                raise NoRoom("the session's KV went to others during its prefill")
            return await self._submit([job])

    def release(self, session: str) -> None:
        self.engine.release(session)

    async def close(self) -> None:
        await self.engine.close()

    async def _submit(self, jobs: Sequence[Job]) -> list[object]:
        """Outcomes in order. Raises what the first one says; the others may have failed."""
        outcomes = await self.engine.submit(jobs)
        if isinstance(first := outcomes[0], Failed):
            raise (NoRoom if first.code == "no_room" else EngineError)(first.message)
        return outcomes

    def _decide(self, path: Sequence[int], rule: Rule, logits: LogitsAt) -> Kept:
        values = logits(0)
        choice = choose(values, rule, path, ALTERNATIVES)
        return Kept(self.guessed(choice, values, path, rule), 0, None)

    def guessed(self, choice: Choice, logits: Logits, path: Sequence[int], rule: Rule) -> Guess:
        """The guess that a choice makes; simulated drafts disagree here."""
        return Guess(choice.token, probability(logits, choice.token), choice.runners)
