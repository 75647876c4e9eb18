"""The NATS table: one row a subject, bound to the wire types that travel on it.

`{model}`, `{partition}` and so on are filled by `SUBJECT.at(model=..., partition=...)`; a value that is no plain
subject token is escaped, so that a model name with dots or slashes stays one token.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from paceline import wire

PARTITIONS = 64
"""Sessions hash to this many partitions, each leased by one batcher."""


@dataclass(frozen=True)
class Subject:
    """pattern with {fields}; `carries` go to the listeners, `answers` come back to a request (none: publish only)."""

    pattern: str
    carries: tuple[type[wire.Message], ...]
    answers: tuple[type[wire.Message], ...] = ()
    queue: str | None = None
    """Listeners of one queue group share the messages: each goes to one of them."""

    def at(self, **fields: str | int) -> str:
        return self.pattern.format(**{name: token(str(value)) for name, value in fields.items()})


def token(value: str) -> str:
    """`value` as one subject token: anything outside [A-Za-z0-9_-] becomes =XX."""
    return re.sub(r"[^A-Za-z0-9_\-]", lambda match: "".join(f"={byte:02X}" for byte in match.group().encode()), value)


def partition_of(session: str) -> int:
    """The partition of a session: blake2b of its id, modulo PARTITIONS."""
    return int.from_bytes(hashlib.blake2b(session.encode(), digest_size=4).digest(), "little") % PARTITIONS


SESSION = Subject(
    "session.{model}.{partition}",
    (wire.SessionOpen, wire.SessionResume, wire.SessionClose, wire.Presence, wire.SessionMove),
    (wire.SessionOpened, wire.Refused, wire.Ack),
)
DRAFT = Subject("draft.{model}.{partition}", (wire.DraftBlock,))
VERDICT = Subject("verdict.{session}", (wire.Verdict,))
VERIFY = Subject("verify.{verifier}", (wire.VerifyBatch,), (wire.VerifyResult, wire.Refused))
RELEASE = Subject("release.{verifier}", (wire.VerifierRelease,))
PROBE = Subject("probe.{verifier}", (wire.Probe,), (wire.Ack,))
HOSTED_OPEN = Subject("hosted.open.{model}", (wire.HostedOpen,), (wire.Ack, wire.Refused), queue="drafters")
HOSTED_STOP = Subject("hosted.stop.{session}", (wire.HostedStop,))
VERIFIER_STATUS = Subject("status.verifier.{model}", (wire.VerifierStatus,))
STATUS_WANTED = Subject("status.wanted.{model}", (wire.StatusWanted,))
BATCHER_STATUS = Subject("status.batcher.{model}", (wire.BatcherStatus,))
DRAFTER_STATUS = Subject("status.drafter.{model}", (wire.DrafterStatus,))
POLICY = Subject("policy.{model}", (wire.PolicyDecision,))
DRAIN = Subject("migrate.drain", (wire.DrainRequest,), (wire.DrainReport, wire.Refused), queue="migrators")
DRAIN_STATE = Subject("verifier.drain.{verifier}", (wire.DrainRequest,), (wire.Ack,))
SLEEP = Subject("verifier.sleep.{verifier}", (wire.SleepRequest,), (wire.Ack, wire.Refused))
PLACEMENTS = Subject("placements.{batcher}", (wire.PlacementQuery,), (wire.PlacementList,))
SYSTEM = Subject("system.query", (wire.SystemQuery,), (wire.SystemReport,), queue="policies")

TABLE: dict[str, Subject] = {name: value for name, value in list(globals().items()) if isinstance(value, Subject)}
