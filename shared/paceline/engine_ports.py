"""TargetEngine and DraftEngine over a BatchEngine: what an item means in tokens, acceptance, and the guess.

The acceptance rule of the whole system is `verify`: a draft token is accepted iff it is the target's own choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import cast

import numpy as np

from paceline.coupling import Choice, choose, logprobs, needs_tokens, probability
from paceline.engine import Decided, EngineStatus, Failed, Guess, Outcome, Rule, TargetItem, TokenLogprob
from paceline.engine_batch import BatchEngine, Job
from paceline.errors import EngineError, NoRoom
from paceline.forward_pass import Kept, Logits, LogitsAt
from paceline.kv_ledger import common_prefix

ALTERNATIVES = 4
"""Runner-ups that a guess names."""
CATCH_UP = 16
"""A guess that feeds more tokens is a prefill, and waits for its turn."""


def verify(item: TargetItem, rule: Rule, path: Sequence[int], logits: LogitsAt) -> Kept:
    """Walks along the draft while the target's choice agrees; `path` is c[0..at) and the draft."""
    before = np.asarray(path, dtype=np.int64) if needs_tokens(rule.sampling) else range(len(path))
    margins: list[float] = []
    values: list[TokenLogprob] = []
    for j in range(len(item.draft) + 1):
        choice = choose(logits(j), rule, before[: item.at + j])
        margins.append(choice.margin)
        if item.logprobs is not None:
            values.append(logprobs(logits(j), choice.token, item.logprobs))
        if j == len(item.draft) or choice.token != item.draft[j]:
            return Kept(Decided(item.session, j, choice.token, tuple(margins), tuple(values)), j, choice.token)
    raise AssertionError("the loop returns at the end of the draft")


def job_of(item: TargetItem, ledger: Sequence[int], vocabulary: int, context: int) -> Job | Failed:
    """The tokens that an item means, given the session's ledger; or why it cannot be served."""
    end = item.start + len(item.history)
    refused = partial(Failed, item.session)
    if item.start > len(ledger):
        return refused("need_history", f"history starts at {item.start}, {len(ledger)} tokens are held")
    if bad := _bad_ids(item, vocabulary):
        return refused("bad_token", f"token ids {bad} are outside the vocabulary of {vocabulary}")
    agrees = tuple(ledger[item.start : end]) == item.history
    path = list(ledger[: item.at]) if agrees else [*ledger[: item.start], *item.history]
    if item.rule is None:
        return Job(item.session, item.tenant, path)
    if len(path) != item.at or not path:
        return refused("need_history", f"{len(path)} tokens are held, the decision is at {item.at}")
    if len(path) + len(item.draft) > context:
        return refused("step_failed", f"{len(path) + len(item.draft)} tokens are beyond the context of {context}")
    decide = partial(verify, item, item.rule, [*path, *item.draft])
    return Job(item.session, item.tenant, path, item.draft, decide, item.rule.prompt_length)


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
        planned = [job_of(item, self.held(item.session), vocabulary, self.engine.context) for item in items]
        jobs = [job for job in planned if isinstance(job, Job)]
        stepped = iter(await self.engine.submit(jobs) if jobs else [])
        return [cast(Outcome, next(stepped)) if isinstance(job, Job) else job for job in planned]

    def release(self, session: str) -> None:
        self.engine.release(session)

    def status(self) -> EngineStatus:
        return self.engine.status()

    async def close(self) -> None:
        await self.engine.close()


class BatchedDraft:
    """A DraftEngine. Guesses of several sessions that wait at the same time share a pass, with one prefill among them.

    chunk: most tokens of a prefill in one pass, which is what the others in it wait for.
    share_prefixes: sessions may reuse each other's KV for a common prefix. Only for sessions of one owner: the time
    that a guess takes would tell one tenant what another one asked.
    """

    def __init__(self, engine: BatchEngine, *, chunk: int = 256, share_prefixes: bool = False) -> None:
        self.engine = engine
        self._chunk = chunk
        self._share_prefixes = share_prefixes
        self._prefill = asyncio.Lock()

    @property
    def context(self) -> int:
        return self.engine.context

    @property
    def max_sessions(self) -> int:
        return self.engine.ledgers.sequences

    def status(self) -> EngineStatus:
        return self.engine.status()

    async def guess(self, session: str, path: Sequence[int], rule: Rule) -> Guess:
        if not 0 < len(path) <= self.context:
            raise NoRoom(f"a path of {len(path)} tokens is outside the draft model's context of {self.context}")
        held = self._held(session, path)
        if bad := [i for i in path[held:] if not 0 <= i < self.engine.memory.vocabulary]:
            raise EngineError(f"token ids {bad[:4]} are outside the draft model's vocabulary")
        owner = "" if self._share_prefixes else session
        while len(path) - held > self._chunk:  # others get their turn between chunks
            held += self._chunk
            await self._feed(Job(session, owner, path[:held]))
        decide = partial(self._decide, path, rule)
        job = Job(session, owner, path, (), decide, rule.prompt_length)
        outcome = await (self._feed(job) if len(path) - held > CATCH_UP else self._submit(job))
        assert isinstance(outcome, Guess)
        return outcome

    def _held(self, session: str, path: Sequence[int]) -> int:
        return common_prefix(self.engine.ledgers.held(session), path)

    async def _feed(self, job: Job) -> object:
        """A chunk, one session's at a time. Raises NoRoom where the session lost its KV while it waited: fed all at
        once, what is missing now would hold up everybody."""
        async with self._prefill:
            if len(job.path) - self._held(job.session, job.path) > self._chunk:
                raise NoRoom("the session's KV went to others during its prefill")
            return await self._submit(job)

    def release(self, session: str) -> None:
        self.engine.release(session)

    async def close(self) -> None:
        await self.engine.close()

    async def _submit(self, job: Job) -> object:
        (outcome,) = await self.engine.submit([job])
        if isinstance(outcome, Failed):
            raise (NoRoom if outcome.code == "no_room" else EngineError)(outcome.message)
        return outcome

    def _decide(self, path: Sequence[int], rule: Rule, logits: LogitsAt) -> Kept:
        values = logits(0)
        choice = choose(values, rule, path, ALTERNATIVES)
        return Kept(self.guessed(choice, values, path, rule), 0, None)

    def guessed(self, choice: Choice, logits: Logits, path: Sequence[int], rule: Rule) -> Guess:
        """The guess that a choice makes; simulated drafts disagree here."""
        return Guess(choice.token, probability(logits, choice.token), choice.runners)
