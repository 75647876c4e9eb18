"""Whether anybody still waits for a session. Pure.

Presence is soft state: the gateway says every 0.5 s that it heard the client. Without fresh word for `ttl_s` the
session is parked (nothing is verified), after `parked_ttl_s` more it is cancelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["present", "parked", "expired"]


@dataclass(slots=True)
class Presence:
    """Of one session. Times are local monotonic seconds, except where `unix` says otherwise.

    `heard` None: nobody yet (a session taken over from another batcher starts so), parked from `since` on.
    """

    ttl_s: float
    parked_ttl_s: float
    since: float
    heard: float | None = None
    connection: int = 0

    def hear(self, connection: int, t_sent_unix: float, *, now: float, unix_now: float) -> bool:
        """Word of the client; False when it counts for nothing: a lower connection's, or older than `ttl_s`."""
        age = max(0.0, unix_now - t_sent_unix)
        if connection < self.connection or age > self.ttl_s:
            return False
        self.connection = connection
        self.heard = max(self.heard if self.heard is not None else now - age, now - age)
        return True

    def bind(self, connection: int, now: float) -> None:
        """A client opened or resumed the session just now."""
        self.connection = max(connection, self.connection)
        self.heard = now

    def state(self, now: float) -> State:
        if self.heard is not None and now - self.heard <= self.ttl_s:
            return "present"
        parked_at = self.since if self.heard is None else self.heard + self.ttl_s
        return "expired" if now - parked_at > self.parked_ttl_s else "parked"
