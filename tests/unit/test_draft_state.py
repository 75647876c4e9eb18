"""Property test of the draft state against the batcher's real session: whatever happens on the way between them, the
committed tokens stay right, every block keeps the protocol's rules, and once the link is well both agree again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft_state import DraftState
from paceline.ends import Ends
from paceline.engine import Guess
from paceline.session import Session
from paceline.store import SessionRecord
from paceline.wire import Bounds, DraftBlock, Sampling, SessionOpen, Speculation, Timing, Verdict, decode, encode

VOCABULARY = 100
PROMPT = 3
LENGTH = 120
TRUTH = [(7 * i * i + 3 * i) % 90 for i in range(LENGTH)]
OPENED = SessionOpen(model="m", fingerprint="f", tokens=tuple(TRUTH[:PROMPT]), sampling=Sampling())


def record(tokens: list[int], epoch: int) -> SessionRecord:
    return SessionRecord(
        session="s",
        tenant="t",
        opened=OPENED,
        secret="x",
        seed=1,
        prompt_length=PROMPT,
        max_tokens=LENGTH - PROMPT,
        epoch=epoch,
        tokens=tuple(tokens),
        kinds="f" * (len(tokens) - PROMPT),
        connection=1,
    )


def fresh_session(tokens: list[int], epoch: int, bounds: Bounds) -> Session:
    ends = Ends(lambda token: bytes([token]), (), (), LENGTH - PROMPT)
    return Session(record(tokens, epoch), ends, vocabulary=VOCABULARY, bounds=bounds)


class Rules:
    """Every block that was ever sent, checked against the protocol as a foreign batcher would read it."""

    def __init__(self) -> None:
        self.incarnation = -1
        self.paths: dict[int, list[int]] = {}

    def check(self, block: DraftBlock, told_tip: int, state: DraftState, bounds: Bounds) -> None:
        assert decode(encode(block), DraftBlock) == block
        assert block.incarnation >= self.incarnation
        if block.incarnation > self.incarnation:
            self.incarnation, self.paths = block.incarnation, {}
        live = {tuple(state.tree.path(node)) for node in state.tree.live() if state.tree.depth(node) > 0}
        live |= {tuple(state.committed[:length]) for length in range(len(state.committed) + 1)}
        for chain in block.chains:
            assert len(chain.tokens) <= bounds.chain
            assert 1 <= chain.first <= len(self.paths) + 1, "ids are consecutive"
            if chain.after is not None:
                before = self.paths[chain.after]
                assert len(before) == chain.position, "a chain follows its parent's position"
            else:
                assert chain.at is not None
                assert chain.at <= told_tip, "never hangs under what the batcher was not known to have"
                before = TRUTH[: chain.at]
            for index, token in enumerate(chain.tokens):
                before = [*before, token]
                identity = chain.first + index
                assert identity in self.paths or tuple(before) in live, "only live nodes get an id"
                assert self.paths.setdefault(identity, before) == before, "an id means the same node for ever"
        assert sum(1 for node in state.tree.live() if node.id) < bounds.held


@dataclass
class World:
    """A source, a batcher and two links. `up` and `down` hold what is on the way."""

    speculation: Speculation
    bounds: Bounds
    now: float = 100.0
    epoch: int = 10
    connection: int = 1
    told_tip: int = PROMPT
    up: deque[DraftBlock] = field(default_factory=deque)
    down: deque[Verdict] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.rules = Rules()
        self.session = fresh_session(TRUTH[:PROMPT], self.epoch, self.bounds)
        self.state = DraftState(
            source="edge",
            session="s",
            connection=1,
            tokens=TRUTH[:PROMPT],
            speculation=self.speculation,
            bounds=self.bounds,
            limit=LENGTH,
            longest_path=LENGTH,
        )

    # --- the source ---

    def draft(self, rank: int, confidence: float) -> None:
        """One pass. rank: 0, the choice after a right path is right; k, its k-th runner-up is; -1, none is."""
        drafted = self.state.next_pass(self.now, 4)
        if drafted is None:
            return
        assert len(drafted.paths) <= 4
        assert all(len(path) < LENGTH - 1 for path in drafted.paths)
        guesses = [self.guess(path, rank, confidence) for path in drafted.paths]
        self.state.take_pass(drafted, guesses, 0.01, self.now)
        self.emit()

    def guess(self, path: list[int], rank: int, confidence: float) -> Guess:
        truth = TRUTH[len(path)]
        names = [(truth + 1 + i) % 90 for i in range(4)]
        if rank >= 0:
            names[rank] = truth
        gap = 0.3 if confidence < 0.9 else 4.0
        return Guess(names[0], confidence, tuple((name, gap + i) for i, name in enumerate(names[1:])))

    def emit(self) -> None:
        for block in self.state.due(self.now):
            self.rules.check(block, self.told_tip, self.state, self.bounds)
            self.up.append(block)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.emit()
        pause = self.state.next_due(self.now)
        assert pause is None or pause > 0 or self.state.ended

    # --- the links ---

    def deliver_up(self, copies: int = 1) -> None:
        if not self.up:
            return
        block = self.up.popleft()
        for _ in range(copies):
            offer = self.session.offer(replace_connection(block, self.connection))
            if offer.gap:
                self.verdict((), "")

    def lose_up(self) -> None:
        if self.up:
            self.up.popleft()

    def deliver_down(self, copies: int = 1) -> None:
        if not self.down:
            return
        verdict = self.down.popleft()
        for _ in range(copies):
            self.receive(verdict)

    def lose_down(self) -> None:
        if self.down:
            self.down.popleft()

    def receive(self, verdict: Verdict) -> None:
        end = verdict.at + len(verdict.tokens)
        if self.state.epoch is None or verdict.epoch >= self.state.epoch:
            higher = self.state.epoch is not None and verdict.epoch > self.state.epoch
            self.told_tip = end if higher else max(end, self.told_tip)
        if not self.state.on_verdict(verdict, self.now):
            at = len(self.state.committed)
            self.state.adopt(at, self.session.committed[at:])
            self.told_tip = max(self.told_tip, self.session.tip)
        self.check()
        self.emit()

    # --- the batcher ---

    def step(self, limit: int) -> None:
        if self.session.finish is not None:
            return
        plan = self.session.plan(limit)
        accepted = 0
        while accepted < len(plan.tokens) and plan.tokens[accepted] == TRUTH[plan.at + accepted]:
            accepted += 1
        commit = self.session.decide(plan, accepted, TRUTH[plan.at + accepted])
        assert commit is not None
        self.verdict(commit.tokens, commit.kinds)

    def verdict(self, tokens: tuple[int, ...], kinds: str) -> None:
        self.down.append(
            Verdict(
                session="s",
                epoch=self.epoch,
                at=self.session.tip - len(tokens),
                tokens=tokens,
                kinds=kinds,
                seen=dict(self.session.seen),
                gap=self.session.take_gaps(),
                finish=self.session.finish,  # type: ignore[arg-type]
                timing=Timing(t_sent=int(1000 * self.now) - 60, wait_ms=5.0, step_ms=15.0),
            )
        )

    def new_owner(self, lost: int) -> None:
        """Another batcher takes over; its store may lack the last tokens."""
        self.epoch += 1
        kept = max(PROMPT, self.session.tip - lost)
        self.session = fresh_session(self.session.committed[:kept], self.epoch, self.bounds)
        self.session.connection = self.connection
        self.up.clear()
        self.verdict((), "")

    def reconnect(self) -> None:
        self.connection += 1
        self.session.connection = self.connection
        self.up.clear()
        self.down.clear()
        self.told_tip = self.session.tip
        self.state.on_reconnected(self.connection, self.session.tip, self.now)
        at = len(self.state.committed)
        if self.session.tip > at:
            missed = tuple(self.session.committed[at:])
            self.receive(Verdict(session="s", epoch=self.epoch, at=at, tokens=missed, kinds="f" * len(missed)))
        self.verdict((), "")
        self.emit()

    # --- what must hold ---

    def check(self) -> None:
        committed = self.state.committed
        assert committed == TRUTH[: len(committed)]
        assert self.state.failure is None
        assert self.state.tree.size == len(list(self.state.tree.live())) - len(self.state.tree.trunk)

    def settle(self) -> None:
        """No more losses: after some time the batcher has all that the source has, and nothing else is on its way."""
        self.verdict((), "")  # the next one that is not lost
        for _ in range(40):
            while self.up or self.down:
                self.deliver_up()
                self.deliver_down()
            self.tick(self.state.pace.patience_s(20))
        self.verdict((), "")
        self.deliver_down()
        self.check()
        assert not self.state.behind
        tree = self.state.tree
        assert tree.root == self.session.tip
        if self.session.finish is None:
            sent = [node for node in tree.live() if node.id]
            assert sent or not tree.ahead() or self.speculation.depth, "the batcher is not left without what there is"
            for node in sent:
                assert self.holds(tree.path(node)[tree.root :])
            assert self.speculation.alternatives or not any(tree.branches())

    def holds(self, path: list[int]) -> bool:
        node = self.session.trie.root
        for token in path:
            if token not in node.children:
                return False
            node = node.children[token]
        return True


def replace_connection(block: DraftBlock, connection: int) -> DraftBlock:
    """What the gateway does."""
    return msgspec.structs.replace(block, connection=connection)


ACTIONS = st.one_of(
    st.tuples(st.just("draft"), st.integers(-1, 3), st.sampled_from([0.1, 0.6, 0.95])),
    st.tuples(st.just("draft"), st.just(0), st.just(0.95)),
    st.tuples(st.just("draft"), st.integers(1, 2), st.just(0.2)),
    st.tuples(st.just("tick"), st.sampled_from([0.003, 0.03, 0.2, 2.0])),
    st.tuples(st.just("deliver_up"), st.integers(1, 2)),
    st.tuples(st.just("deliver_up"), st.just(1)),
    st.tuples(st.just("deliver_down"), st.integers(1, 2)),
    st.tuples(st.just("deliver_down"), st.just(1)),
    st.tuples(st.just("lose_up")),
    st.tuples(st.just("lose_down")),
    st.tuples(st.just("step"), st.integers(0, 8)),
    st.tuples(st.just("new_owner"), st.integers(0, 6)),
    st.tuples(st.just("reconnect")),
)
SPECULATIONS = st.builds(
    Speculation,
    max_draft=st.integers(1, 8),
    depth=st.sampled_from([0, 0, 0, 1, 3]),
    fill=st.booleans(),
    alternatives=st.sampled_from([True, True, False]),
)
BOUNDS = st.builds(
    Bounds, held=st.sampled_from([5, 24, 256]), chain=st.sampled_from([3, 64]), chains=st.sampled_from([2, 16])
)


@settings(max_examples=300, deadline=None)
@given(SPECULATIONS, BOUNDS, st.lists(ACTIONS, max_size=120))
def test_any_interleaving_keeps_committed_right_and_blocks_valid(speculation, bounds, actions):
    world = World(speculation, bounds)
    for name, *arguments in actions:
        getattr(world, name)(*arguments)
        world.check()
    world.settle()


@settings(max_examples=60, deadline=None)
@given(SPECULATIONS, st.lists(st.booleans(), min_size=20, max_size=200))
def test_a_session_runs_to_its_end_on_a_lossy_link(speculation, losses):
    world = World(speculation, Bounds())
    for turn in range(1, 2000):
        lost = losses[turn % len(losses)] and turn % 3 == 0
        world.draft(rank=0 if turn % 5 else 1, confidence=0.6)
        world.lose_up() if lost else world.deliver_up()
        if turn % 3 == 0:
            world.step(speculation.max_draft)
        world.lose_down() if lost and turn % 2 else world.deliver_down()
        world.tick(0.01)
        if world.state.ended:
            break
    world.verdict((), "")  # what a follower reads from the store when the last verdict was lost
    while world.down:
        world.deliver_down()
    assert world.session.finish == world.state.finish == "length"
    assert world.state.committed == TRUTH
    assert not world.state.due(world.now)
