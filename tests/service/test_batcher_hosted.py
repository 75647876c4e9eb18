"""The batcher tells a hosted drafter that a session is over, also one that was late to listen."""

from __future__ import annotations

from typing import Any

import pytest
from batcher_kit import Stack, soon, stack

from paceline import subjects
from paceline.bus import Received
from paceline.wire import Ack, HostedOpen, HostedStop, Speculation

HOSTED = Speculation(hosted=True)


class Late:
    """Listens for stops, and answers if it does, only after `session` has finished in the store."""

    def __init__(self, made: Stack, *, answers: bool) -> None:
        self._made, self._answers = made, answers
        self.stops: list[str] = []

    async def start(self) -> Any:
        subject = subjects.HOSTED_OPEN
        return await self._made.bus.subscribe(subject.at(model="toy"), self._on_open, queue=subject.queue)

    async def _on_open(self, received: Received) -> None:
        request, store = received.message, self._made.store
        assert isinstance(request, HostedOpen)
        await soon(lambda: store._records[request.session].finish is not None)
        await self._made.bus.subscribe(subjects.HOSTED_STOP.at(session=request.session), self._on_stop, HostedStop)
        if self._answers:
            assert received.respond is not None
            await received.respond(Ack())

    async def _on_stop(self, received: Received) -> None:
        assert isinstance(received.message, HostedStop)
        self.stops.append(received.message.session)


@pytest.mark.parametrize("answers", [True, False])
async def test_a_session_that_ended_while_its_drafter_was_asked_is_stopped_after_the_answer(answers: bool) -> None:
    async with stack() as made:
        drafter = Late(made, answers=answers)
        await drafter.start()
        client = await made.client(speculation=HOSTED, max_tokens=3).open()
        await client.done()
        await soon(lambda: drafter.stops == [client.session])
