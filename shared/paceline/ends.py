"""Where a completion ends: end tokens, stop strings, the limit. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.wire import Finish


class Ends:
    """Where a completion ends, in token order: an end token or a stop string (`stop`), else the limit (`length`); on a
    tie the stop wins. Stop strings are looked for in the completion's bytes, across token borders."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], end_ids: Sequence[int], stops: Sequence[str], limit: int
    ) -> None:
        self._token_bytes = token_bytes
        self.end_ids = frozenset(end_ids)
        self._stops = [stop.encode() for stop in stops if stop]
        self._keep = max((len(stop) for stop in self._stops), default=1) - 1
        self.limit = limit
        self._tail = b""
        self._count = 0

    def fresh(self) -> Ends:
        """The same ends, before the first token."""
        copy = Ends(self._token_bytes, (), (), self.limit)
        copy.end_ids, copy._stops, copy._keep = self.end_ids, self._stops, self._keep
        return copy

    def feed(self, token: int) -> Finish | None:
        """The finish that `token`, as the next of the completion, brings."""
        self._count += 1
        if token in self.end_ids or self._stopped(token):
            return "stop"
        return "length" if self._count >= self.limit else None

    def _stopped(self, token: int) -> bool:
        if not self._stops:
            return False
        text = self._tail + self._token_bytes(token)
        self._tail = text[max(0, len(text) - self._keep) :]
        return any(stop in text for stop in self._stops)
