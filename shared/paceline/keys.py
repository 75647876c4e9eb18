"""The Redis table: one row a key, its writer, its time to live. All keys begin with `pl:`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Key:
    pattern: str
    kind: str
    writer: str
    ttl_s: int | None
    holds: str

    def at(self, **fields: str | int) -> str:
        return self.pattern.format(**fields)


FINISHED_TTL_S = 600
"""A finished session's record stays readable this long, so that a client can fetch what it missed."""
LIVE_TTL_S = 86_400
"""A live record is touched by every append; one that nobody touches for a day is gone."""
LEASE_TTL_S = 3

SESSION = Key(
    "pl:s:{{{session}}}:rec", "hash", "owning batcher", LIVE_TTL_S, "static record (JSON) and epoch, tip, finish"
)
TOKENS = Key("pl:s:{{{session}}}:tok", "string", "owning batcher", LIVE_TTL_S, "committed ids, uint32 LE, prompt first")
KINDS = Key("pl:s:{{{session}}}:kin", "string", "owning batcher", LIVE_TTL_S, "one letter a completion token")
LOGPROBS = Key(
    "pl:s:{{{session}}}:lp", "list", "owning batcher", LIVE_TTL_S, "one JSON entry a completion token, if asked for"
)
CONNECTION = Key("pl:s:{{{session}}}:con", "counter", "owning batcher", LIVE_TTL_S, "connection number")
PLACEMENT = Key(
    "pl:s:{{{session}}}:at", "hash", "owning batcher", LIVE_TTL_S, "verifier that holds the KV, and its counter"
)
SNAPSHOT = Key(
    "pl:s:{{{session}}}:kv", "hash", "migrator", LIVE_TTL_S, "KV snapshot metadata: verifier, length, prefix hash"
)
LIVE = Key("pl:live:{model}:{partition}", "set", "owning batcher", None, "unfinished sessions of a partition")
LEASE = Key("pl:lease:{model}:{partition}", "string", "batcher", LEASE_TTL_S, "owner of the partition now")
OWNER = Key("pl:owner:{model}:{partition}", "hash", "batcher", None, "last owner and its epoch, ordered by Redis TIME")
BATCHERS = Key("pl:batchers:{model}", "zset", "batcher", None, "live batchers by their last heartbeat, for fair shares")
DRAINING = Key("pl:draining:{model}", "set", "migrator", None, "verifiers that take no sessions")

TABLE: dict[str, Key] = {name: value for name, value in list(globals().items()) if isinstance(value, Key)}
