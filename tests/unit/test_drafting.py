"""The draft loop around a scripted engine, and the pace that decides its window."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import pytest

from paceline import drafting
from paceline.control import Pace
from paceline.drafting import DraftEvent, DraftLoop
from paceline.engine import Guess, Rule
from paceline.errors import BusError, EngineError
from paceline.pass_costs import PassCosts
from paceline.wire import Bounds, DraftBlock, Sampling, Source, Speculation, Timing, Verdict

PROMPT = (1, 2, 3)
TRUTH = tuple(range(1, 201))
END = 190


class Script:
    """Says what the target will say; `fail_next` calls fail first. `asked` are the lengths of the main paths."""

    max_paths = 4

    def __init__(self, context: int = 1000) -> None:
        self.context = context
        self.asked: list[int] = []
        self.released: list[str] = []
        self.fail_next = 0
        self.wrong_at: set[int] = set()
        self.max_sessions = 1

    async def guess(self, session: str, path: Sequence[int], rule: Rule) -> Guess:
        self.asked.append(len(path))
        await asyncio.sleep(0)
        if self.fail_next:
            self.fail_next -= 1
            raise EngineError("the step failed")
        wrong = 7 if len(path) in self.wrong_at else 0
        return Guess(TRUTH[len(path)] + wrong, 0.9)

    async def guesses(self, session: str, paths: Sequence[Sequence[int]], rule: Rule) -> list[Guess | None]:
        return [await self.guess(session, paths[0], rule), *([None] * (len(paths) - 1))]

    def release(self, session: str) -> None:
        self.released.append(session)

    async def close(self) -> None: ...


class Rig:
    """A loop with its engine; what it sends lies in `blocks`."""

    def __init__(self, engine: Script | None = None, *, source: Source = "edge", limit: int = 200, **options) -> None:
        self.engine = engine or Script()
        self.blocks: list[DraftBlock] = []
        self.events: list[DraftEvent] = []
        self.send_error: Exception | None = None
        speculation = options.pop("speculation", Speculation())
        self.loop = DraftLoop(
            engine=self.engine,
            source=source,
            session="s",
            connection=options.pop("connection", 4),
            tokens=PROMPT,
            rule=Rule(Sampling(temperature=0, end_ids=(END,)), seed=1, prompt_length=3),
            speculation=speculation,
            bounds=options.pop("bounds", Bounds()),
            limit=limit,
            send=options.pop("send", self.send),
            on_draft=self.events.append,
            **options,
        )

    async def send(self, block: DraftBlock) -> None:
        self.blocks.append(block)
        if self.send_error is not None:
            raise self.send_error

    async def __aenter__(self) -> Rig:
        self.task = asyncio.create_task(self.loop.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.loop.stop()
        await asyncio.wait_for(self.task, 2)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.001)

    async def quiet(self) -> None:
        """Until nothing is drafted any more."""
        before = -1
        while before != len(self.engine.asked):
            before = len(self.engine.asked)
            await asyncio.sleep(0.06)

    def verdict(self, at: int, count: int, **fields) -> bool:
        tokens = TRUTH[at : at + count]
        return self.loop.on_verdict(Verdict(session="s", epoch=5, at=at, tokens=tokens, kinds="f" * count, **fields))

    @property
    def sent(self) -> list[int]:
        return [len(chain.tokens) for block in self.blocks for chain in block.chains]


async def test_synchronous_sends_one_block_and_waits_for_its_verdict():
    async with Rig(speculation=Speculation(depth=1, max_draft=6)) as rig:
        await rig.quiet()
        assert rig.sent == [6]
        assert rig.engine.asked == [3, 4, 5, 6, 7, 8]
        rig.verdict(3, 7, seen={"edge": (4 << 16, 6)})
        await rig.quiet()
        assert rig.sent == [6, 6]
        assert rig.blocks[1].chains[0].at == 10
        assert rig.blocks[1].chains[0].first == 7


async def test_synchronous_block_that_is_decided_in_parts_stays_in_flight():
    async with Rig(speculation=Speculation(depth=1, max_draft=6)) as rig:
        await rig.quiet()
        rig.verdict(3, 2)
        await rig.quiet()
        assert rig.sent == [6]


async def test_deep_sends_several_blocks_without_a_verdict_and_stops_at_the_window():
    async with Rig() as rig:
        await rig.quiet()
        assert sum(rig.sent) == rig.loop.stats.window == 16
        assert len(rig.sent) >= 2
        first, second = (block.chains[0] for block in rig.blocks[:2])
        assert (first.first, first.at, first.after) == (1, 3, None)
        assert (second.first, second.after) == (len(first.tokens) + 1, len(first.tokens))
        assert second.position == 3 + len(first.tokens)


async def test_verdict_along_the_path_keeps_the_drafts_and_another_one_re_roots():
    engine = Script()
    engine.wrong_at = {6}
    async with Rig(engine) as rig:
        await rig.quiet()
        rig.verdict(3, 2)
        assert rig.loop.stats.forgotten == 0
        rig.verdict(5, 3)
        assert rig.loop.stats.forgotten > 0
        assert rig.events[-1] == DraftEvent("forgotten", 8)
        before = len(rig.blocks)
        await rig.quiet()
        assert rig.blocks[before].chains[0].at == 8
        assert rig.loop.committed == list(TRUTH[:8])


class Doubtful(Script):
    """Wrong at `wrong_at`, where its first runner-up is right; a third of its choices are worth nothing. Serves
    `paths` paths in a pass and notes how many it was asked for."""

    def __init__(self, paths: int = 4) -> None:
        super().__init__()
        self.paths = paths
        self.rows: list[int] = []

    async def guesses(self, session: str, paths: Sequence[Sequence[int]], rule: Rule) -> list[Guess | None]:
        self.rows.append(len(paths))
        self.asked.append(len(paths[0]))
        await asyncio.sleep(0)
        served = [self.answer(len(path)) for path in paths[: self.paths]]
        return [*served, *([None] * (len(paths) - len(served)))]

    def answer(self, length: int) -> Guess:
        right, other = TRUTH[length], TRUTH[length] + 300
        if length in self.wrong_at:
            return Guess(other, 0.3, ((right, 0.05), (other + 1, 2.0)))
        return Guess(right, 0.95, ((other, 4.0), (other + 1, 5.0)))


async def test_a_runner_up_is_held_and_taken_without_drafting_it_again():
    engine = Doubtful()
    engine.wrong_at = {5}
    async with Rig(engine) as rig:
        await rig.quiet()
        chains = [chain for block in rig.blocks for chain in block.chains]
        branch = next(chain for chain in chains if chain.tokens[0] == TRUTH[5])
        assert (branch.position, branch.after) == (5, 2)
        assert branch.tokens == TRUTH[5 : 5 + len(branch.tokens)]
        assert len(branch.tokens) >= 2
        passes, shown = len(engine.rows), len(rig.events)
        rig.verdict(3, 3)
        assert (rig.loop.stats.taken, rig.loop.stats.branches) == (1, len(rig.loop.state.tree.ahead()) + 1)
        events = rig.events[shown:]
        assert events[0] == DraftEvent("forgotten", 6)
        assert [(event.position, event.token) for event in events[1:3]] == [(6, TRUTH[6]), (7, TRUTH[7])]
        held = len(rig.loop.state.tree.tokens())
        assert held > 6
        await rig.quiet()
        assert engine.asked[passes] == held


async def test_without_alternatives_one_path_is_asked_for():
    engine = Doubtful()
    engine.wrong_at = {5}
    async with Rig(engine, speculation=Speculation(alternatives=False)) as rig:
        await rig.quiet()
        assert set(engine.rows) == {1}
        assert rig.loop.stats.branched == 0


async def test_an_engine_without_room_for_branches_is_left_alone_with_them():
    engine = Doubtful(paths=1)
    engine.wrong_at = {5}
    async with Rig(engine) as rig:
        await rig.quiet()
        assert sum(rows > 1 for rows in engine.rows) == 1
        assert rig.loop.stats.branches == 0
        rig.verdict(3, 3)
        await rig.quiet()
        assert rig.loop.state.tree.tokens()[: 3 + 4] == list(TRUTH[:7])


async def test_beyond_the_draft_models_context_it_goes_on_without_drafts():
    async with Rig(Script(context=9)) as rig:
        await rig.quiet()
        assert max(rig.engine.asked) == 9
        assert sum(rig.sent) == 7
        rig.verdict(3, 12)
        await rig.quiet()
        assert max(rig.engine.asked) == 9
        rig.verdict(15, 1, finish="length")
        await asyncio.wait_for(rig.task, 1)
        assert rig.loop.finish == "length"
        assert rig.loop.committed == list(TRUTH[:16])


async def test_nothing_is_drafted_for_the_last_position_nor_behind_an_end_token():
    async with Rig(limit=9) as rig:
        await rig.quiet()
        assert rig.engine.asked == [3, 4, 5, 6, 7]
        assert sum(rig.sent) == 5
    async with Rig() as rig:
        rig.verdict(3, END - 4)
        await rig.quiet()
        assert rig.engine.asked[-1] == END - 1
        assert rig.blocks[-1].chains[0].tokens[-1] == END


async def test_without_speculation_nothing_is_drafted():
    async with Rig(speculation=Speculation(enabled=False)) as rig:
        await asyncio.sleep(0.02)
        assert rig.engine.asked == []
        rig.verdict(3, 1, finish="stop")
        await asyncio.wait_for(rig.task, 1)
        assert rig.loop.finish == "stop"


async def test_an_engine_error_is_waited_out(monkeypatch):
    monkeypatch.setattr(drafting, "FIRST_PAUSE_S", 0.01)
    engine = Script()
    engine.fail_next = 2
    async with Rig(engine) as rig:
        await rig.until(lambda: sum(rig.sent) > 8)
        assert rig.loop.stats.engine_failures == 2
        assert engine.asked[:3] == [3, 3, 3]
    assert engine.released == ["s"]


async def test_a_block_that_could_not_be_sent_goes_out_again():
    now = [50.0]
    async with Rig(clock=lambda: now[0]) as rig:
        rig.send_error = BusError("away")
        await rig.until(lambda: sum(rig.sent) == 16)
        rig.send_error = None
        lost = len(rig.blocks)
        now[0] += 1.0
        rig.verdict(3, 0)
        await rig.until(lambda: len(rig.blocks) > lost)
        again = rig.blocks[lost].chains[0]
        assert (again.first, again.at, len(again.tokens)) == (1, 3, 16)
        assert rig.loop.stats.resends == 1


async def test_the_end_does_not_wait_for_a_send_that_hangs():
    async def hang(block: DraftBlock) -> None:
        await asyncio.Event().wait()

    rig = Rig(send=hang)
    async with rig:
        await rig.until(lambda: len(rig.engine.asked) == 16)
        rig.verdict(3, 0, finish="cancelled")
        await asyncio.wait_for(rig.task, 1)
    assert rig.loop.finish == "cancelled"


class Stuck(Script):
    """Reads a prompt that never ends."""

    async def guess(self, session: str, path: Sequence[int], rule: Rule) -> Guess:
        self.asked.append(len(path))
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


async def test_the_end_does_not_wait_for_a_guess_under_way():
    rig = Rig(Stuck())
    async with rig:
        await rig.until(lambda: rig.engine.asked == [3])
        rig.verdict(3, 1, finish="cancelled")
        await asyncio.wait_for(rig.task, 1)
    assert rig.loop.finish == "cancelled"
    assert rig.engine.released == ["s"]


async def test_a_loop_that_is_replaced_leaves_its_kv_to_the_next():
    rig = Rig(Stuck())
    task = asyncio.create_task(rig.loop.run())
    await rig.until(lambda: rig.engine.asked == [3])
    rig.loop.stop(keep=True)
    await asyncio.wait_for(task, 1)
    assert rig.engine.released == []


async def test_missed_tokens_are_repaired_or_reported():
    async def repair(position: int) -> Sequence[int]:
        return TRUTH[position:12]

    async with Rig(repair=repair) as rig:
        assert rig.verdict(9, 3) is False
        await rig.until(lambda: rig.loop.committed == list(TRUTH[:12]))
        await rig.until(lambda: 12 in rig.engine.asked)
    async with Rig() as rig:
        assert rig.verdict(9, 3, finish="length") is False
        assert rig.loop.finish is None
        assert rig.verdict(3, 6) is True
        assert rig.verdict(9, 3, finish="length") is True
        assert rig.loop.finish == "length"


async def test_tokens_that_differ_from_delivered_ones_end_the_session():
    rig = Rig()
    rig.verdict(3, 4)
    rig.loop.on_verdict(Verdict(session="s", epoch=6, at=4, tokens=(99,), kinds="f"))
    await asyncio.wait_for(rig.loop.run(), 1)
    assert rig.loop.finish == "error"
    assert rig.loop.failure is not None
    assert rig.loop.failure.code == "history_lost"


async def test_verdicts_below_the_highest_epoch_are_dropped():
    rig = Rig()
    rig.verdict(3, 2)
    rig.loop.on_verdict(Verdict(session="s", epoch=4, at=5, tokens=(99,), kinds="f", finish="error"))
    assert rig.loop.committed == list(TRUTH[:5])
    assert rig.loop.finish is None


async def test_a_gap_is_served_at_most_once_a_round_trip():
    now = [50.0]
    async with Rig(clock=lambda: now[0]) as rig:
        await rig.until(lambda: sum(rig.sent) == 16)
        before = len(rig.blocks)
        for _ in range(3):
            rig.verdict(3, 0, seen={"edge": (4 << 16, 2)}, gap=("edge",))
            await rig.quiet()
        assert len(rig.blocks) == before + 1
        assert rig.blocks[-1].chains[0].first == 3
        assert rig.blocks[-1].chains[0].after == 2
        now[0] += 0.2
        rig.verdict(3, 0, seen={"edge": (4 << 16, 2)}, gap=("edge",))
        await rig.until(lambda: len(rig.blocks) == before + 2)


async def test_a_reconnection_starts_a_higher_incarnation_and_sends_the_tail_the_cloud_lacks():
    async with Rig() as rig:
        await rig.quiet()
        rig.verdict(3, 5)
        await rig.quiet()
        before = len(rig.blocks)
        rig.loop.on_reconnected(connection=5, position=6)
        await rig.until(lambda: len(rig.blocks) > before)
        block = rig.blocks[before]
        assert block.incarnation >> 16 == 5
        assert (block.chains[0].first, block.chains[0].at) == (1, 6)
        assert block.chains[0].tokens[:2] == TRUTH[6:8]


@pytest.mark.parametrize("told", [9 << 16, (4 << 16) + 3])
async def test_a_source_told_of_a_higher_incarnation_takes_the_next(told):
    async with Rig() as rig:
        await rig.quiet()
        before = len(rig.blocks)
        rig.verdict(3, 0, seen={"edge": (told, 1)})
        await rig.until(lambda: len(rig.blocks) > before)
        assert rig.blocks[-1].incarnation == told + 1


async def test_a_hosted_source_gives_way_to_the_one_that_came_after_it():
    rig = Rig(source="hosted")
    async with rig:
        await rig.quiet()
        rig.verdict(3, 0, seen={"hosted": (4 << 16, 8)})
        rig.verdict(3, 0, seen={"hosted": (9 << 16, 1)})
        await asyncio.wait_for(rig.task, 1)
    assert rig.loop.finish is None


def test_window_follows_round_trip_verify_and_draft_time():
    pace = Pace(Speculation(max_draft=8), Bounds(held=64))
    assert pace.window == 16
    pace.on_timing(Timing(t_sent=1000, wait_ms=10, step_ms=30), now=1.140)
    pace.on_drafted(0.010)
    assert pace.round_trip_s == pytest.approx(0.100)
    assert pace.window == math.ceil((0.100 + 0.030) / 0.010) + 8
    pace.on_drafted(0.000)
    assert pace.window <= 63
    pace.window_cap = 5
    assert pace.window == 5
    pace.window_cap = 0
    assert pace.window == 0
    assert Pace(Speculation(max_draft=4, depth=2), Bounds()).window == 8


def test_a_jittery_link_widens_the_window():
    pace = Pace(Speculation(), Bounds())
    for index in range(40):
        sample = 0.100 if index % 4 else 0.300
        pace.on_timing(Timing(t_sent=1000, wait_ms=0, step_ms=0), now=1.0 + sample)
    assert pace.round_trip_s is not None
    assert 0.100 <= pace.round_trip_s < pace.round_trip
    steady = Pace(Speculation(), Bounds())
    for _ in range(40):
        steady.on_timing(Timing(t_sent=1000, wait_ms=0, step_ms=0), now=1.100)
    assert steady.round_trip == pytest.approx(0.100)


def test_what_is_decided_before_a_block_has_its_turn_counts_the_step_that_it_finds_under_way():
    pace = Pace(Speculation(), Bounds())
    assert pace.decided_before == 0
    pace.on_timing(Timing(t_sent=1000, wait_ms=0, step_ms=150), now=1.450)
    pace.on_verdict(filled(3), 2.0)
    pace.on_verdict(filled(4), 2.16)
    assert pace.token_s == pytest.approx(0.16)
    assert pace.decided_before == 2  # (300 + 150) / 160
    pace.on_timing(Timing(t_sent=1000, wait_ms=0, step_ms=150), now=1.450)
    pace.token_s = 1e-6
    assert pace.decided_before == Bounds().held


def filled(at: int, kinds: str = "f") -> Verdict:
    return Verdict(session="s", epoch=1, at=at, tokens=TRUTH[at : at + len(kinds)], kinds=kinds)


def test_the_lead_of_a_filling_cloud_and_the_gain_on_it():
    pace = Pace(Speculation(), Bounds())
    assert (pace.lead(1.0), pace.gain) == (None, 1.0)
    pace.on_timing(Timing(t_sent=1000, wait_ms=0, step_ms=0), now=1.100)
    pace.on_drafted(0.010)
    pace.on_verdict(filled(3), 2.00)
    pace.on_verdict(filled(4, "ff"), 2.08)
    assert pace.fill_s == pytest.approx(0.040)
    assert pace.lead(2.08) == pytest.approx(2.5)
    assert pace.lead(2.10) == pytest.approx(3.0)
    assert pace.lead(9.00) == pytest.approx(4.5), "a cloud that was silent for longer does not fill"
    assert pace.gain == pytest.approx(0.75)
    pace.on_verdict(filled(6, "eb"), 2.09)
    assert pace.fill_s == pytest.approx(0.040), "tokens of ours say nothing about filling"
    assert pace.token_s == pytest.approx(0.040 - 0.2 * 0.035)
    unfilled = Pace(Speculation(fill=False), Bounds())
    unfilled.on_verdict(filled(3), 2.00)
    unfilled.on_verdict(filled(4), 2.04)
    assert unfilled.lead(2.04) is None


def test_sessions_of_one_engine_share_what_its_passes_cost():
    costs = PassCosts()
    Pace(Speculation(), Bounds(), costs=costs).on_drafted(0.030)
    assert Pace(Speculation(), Bounds(), costs=costs).draft_s == pytest.approx(0.030)
    assert Pace(Speculation(), Bounds()).draft_s is None


def test_patience_doubles_and_is_bounded():
    pace = Pace(Speculation(), Bounds())
    pace.on_timing(Timing(t_sent=1000, wait_ms=0, step_ms=0), now=1.050)
    assert pace.patience_s(0) == pytest.approx(0.300)
    assert pace.patience_s(1) == pytest.approx(0.600)
    assert pace.patience_s(1000) == pytest.approx(5.0)
