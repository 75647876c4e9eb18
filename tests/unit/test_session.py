"""The session's promise: whatever happens to draft blocks, the committed tokens are those of plain decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.ends import Ends
from paceline.errors import BadRequest
from paceline.session import MOST_NAMED, Session
from paceline.store import SessionRecord
from paceline.trie import REMEMBERED_POSITIONS
from paceline.wire import Bounds, Chain, DraftBlock, Failure, SessionOpen

VOCABULARY = 7
PROMPT = (1, 2, 3)
LIMIT = 24
END = 6


def target(prefix: list[int], seed: int) -> int:
    """A scripted target: the next token is a function of the prefix alone."""
    return hash((seed, len(prefix), tuple(prefix[-3:]))) % VOCABULARY


def plain(seed: int, limit: int = LIMIT, end_ids: tuple[int, ...] = ()) -> list[int]:
    tokens = list(PROMPT)
    while len(tokens) - len(PROMPT) < limit:
        tokens.append(target(tokens, seed))
        if tokens[-1] in end_ids:
            break
    return tokens


def make(limit: int = LIMIT, end_ids: tuple[int, ...] = (), stops: tuple[str, ...] = (), held: int = 128) -> Session:
    opened = SessionOpen(model="m", fingerprint="f", tokens=PROMPT)
    record = SessionRecord(
        session="s", tenant="t", opened=opened, secret="x", seed=0, prompt_length=len(PROMPT), max_tokens=limit,
        epoch=1, tokens=PROMPT,
    )  # fmt: skip
    ends = Ends(lambda token: b"abcdefg"[token : token + 1], end_ids, stops, limit)
    return Session(record, ends, vocabulary=VOCABULARY, bounds=Bounds(held=held))


def block(*chains: Chain, source: str = "edge", incarnation: int = 1) -> DraftBlock:
    return DraftBlock(session="s", source=source, incarnation=incarnation, chains=chains)  # type: ignore[arg-type]


def step(session: Session, seed: int, limit: int = 8) -> None:
    """What a verifier does with one plan."""
    plan = session.plan(limit)
    prefix = list(session.committed)
    accepted = 0
    while accepted < len(plan.tokens) and plan.tokens[accepted] == target(prefix, seed):
        prefix.append(plan.tokens[accepted])
        accepted += 1
    session.decide(plan, accepted, target(prefix, seed))


class Drafter:
    """A source that drafts right or wrong, numbers its nodes, and can send any of them again."""

    def __init__(self, source: str) -> None:
        self.source, self.incarnation, self.next_id = source, 1, 1
        self.sent: list[DraftBlock] = []
        self.path: list[int] = []
        self.last: int | None = None

    def draft(self, session: Session, seed: int, rights: list[bool], stale_by: int, go_on: bool) -> DraftBlock:
        if not (go_on and self.last is not None):
            base = session.committed[: max(1, session.tip - stale_by)]
            self.path, self.last = list(base), None
        position = len(self.path)
        tokens = []
        for right in rights:
            wanted = target(self.path, seed)
            tokens.append(wanted if right else (wanted + 1) % VOCABULARY)
            self.path.append(tokens[-1])
        at = position if self.last is None else None
        chain = Chain(first=self.next_id, position=position, tokens=tuple(tokens), after=self.last, at=at)
        self.next_id += len(tokens)
        self.last = self.next_id - 1
        made = block(chain, source=self.source, incarnation=self.incarnation)
        self.sent.append(made)
        return made

    def renew(self) -> None:
        self.incarnation, self.next_id, self.last = self.incarnation + 1, 1, None


sources = st.sampled_from(["edge", "hosted", "lookup"])
rights = st.lists(st.booleans(), min_size=1, max_size=6)
action = st.one_of(
    st.tuples(
        st.just("draft"), st.sampled_from(["edge", "hosted", "lookup"]), rights, st.integers(0, 4), st.booleans()
    ),
    st.tuples(st.just("lose"), st.sampled_from(["edge", "hosted"]), rights, st.integers(0, 4), st.booleans()),
    st.tuples(st.just("again"), st.integers(0, 40)),
    st.tuples(st.just("renew"), st.sampled_from(["edge", "hosted"])),
    st.tuples(st.just("step"), st.integers(0, 8)),
    st.tuples(st.just("lost_step")),
    st.tuples(st.just("cut"), st.integers(0, 40), st.integers(1, 5)),
)


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 50), actions=st.lists(action, max_size=60), end=st.booleans(), held=st.sampled_from([3, 128])
)
def test_any_order_loss_and_cutting_of_blocks_commits_the_plain_tokens(seed, actions, end, held) -> None:
    end_ids = (END,) if end else ()
    session, wanted = make(end_ids=end_ids, held=held), plain(seed, end_ids=end_ids)
    drafters = {source: Drafter(source) for source in ("edge", "hosted", "lookup")}
    every: list[DraftBlock] = []
    for kind, *rest in actions:
        if kind in ("draft", "lose") and session.finish is None:
            made = drafters[rest[0]].draft(session, seed, rest[1], rest[2], rest[3])
            every.append(made)
            if kind == "draft":
                session.offer(made)
        elif kind == "again" and every:
            session.offer(every[rest[0] % len(every)])
        elif kind == "cut" and every:
            whole = every[rest[0] % len(every)]
            chain = whole.chains[0]
            part = replace_chain(chain, rest[1])
            session.offer(block(part, source=whole.source, incarnation=whole.incarnation))
        elif kind == "renew":
            drafters[rest[0]].renew()
        elif kind == "step" and session.finish is None:
            step(session, seed, rest[0])
        elif kind == "lost_step" and session.finish is None:
            session.plan(4)
            session.forget()
        assert session.committed == wanted[: session.tip]
        assert 0 <= session.held <= 3 * held
        assert all(node.position >= session.tip for node in session.trie.best_chain(64))
    while session.finish is None:
        step(session, seed)
    assert session.committed == wanted
    assert len(session.kinds) == len(wanted) - len(PROMPT)
    accepted = sum(session.kinds.count(letter) for letter in "ehl")
    assert accepted == sum(session.counters.accepted.values()) <= session.counters.verified


def replace_chain(chain: Chain, keep: int) -> Chain:
    return Chain(first=chain.first, position=chain.position, tokens=chain.tokens[:keep], after=chain.after, at=chain.at)


def test_a_correct_chain_is_accepted_whole_and_credited_to_the_first_source() -> None:
    session, seed = make(), 4
    good = plain(seed)[3:8]
    session.offer(block(Chain(first=1, position=3, tokens=tuple(good[:4]), at=3)))
    late = session.offer(block(Chain(first=1, position=3, tokens=tuple(good), at=3), source="hosted"))
    assert late.duplicate == 4
    step(session, seed)
    assert session.kinds == "eeeehb"
    assert session.counters.accepted == {"edge": 4, "hosted": 1}


def test_a_block_before_its_predecessor_is_a_gap_and_told_once() -> None:
    session = make()
    offer = session.offer(block(Chain(first=5, position=7, tokens=(1, 2), after=4)))
    assert offer.gap and session.held == 0
    assert session.take_gaps() == ("edge",)
    assert session.take_gaps() == ()
    assert session.seen["edge"] == (1, 0)


def test_a_prefix_beyond_the_tip_is_a_gap() -> None:
    assert make().offer(block(Chain(first=1, position=9, tokens=(1,), at=9))).gap


def test_drafts_under_a_pruned_node_are_stale_and_counted() -> None:
    session, seed = make(), 4
    wanted = plain(seed)
    wrong = (wanted[3] + 1) % VOCABULARY
    session.offer(block(Chain(first=1, position=3, tokens=(wrong, 0), at=3)))
    step(session, seed)
    offer = session.offer(block(Chain(first=3, position=5, tokens=(1, 2, 3), after=2)))
    assert offer.stale == 3 and session.held == 0
    assert session.seen["edge"] == (1, 5)
    assert session.counters.stale == 3


def test_an_alternative_held_under_the_tip_survives_the_rejection_of_the_main_chain() -> None:
    session, seed = make(), 4
    wanted = plain(seed)
    wrong = (wanted[3] + 1) % VOCABULARY
    main = Chain(first=1, position=3, tokens=(wrong, 1), at=3, conf=bytes([250, 250]))
    other = Chain(first=3, position=3, tokens=tuple(wanted[3:6]), at=3, conf=bytes([20, 200, 200]))
    session.offer(block(main, other))
    step(session, seed)
    assert session.kinds == "c" and session.held == 2
    step(session, seed)
    assert session.kinds == "ceeb"


def test_a_lower_incarnation_is_ignored_and_a_higher_one_starts_afresh() -> None:
    session = make()
    session.offer(block(Chain(first=1, position=3, tokens=(1, 2), at=3), incarnation=7))
    assert session.offer(block(Chain(first=1, position=3, tokens=(1,), at=3), incarnation=6)).ignored
    assert session.offer(block(Chain(first=9, position=3, tokens=(1,), at=3), incarnation=8)).gap
    assert session.seen["edge"] == (8, 0)


def test_blocks_of_an_older_connection_are_ignored() -> None:
    session = make()
    session.connection = 3
    old = DraftBlock(
        session="s", source="edge", incarnation=1, chains=(Chain(first=1, position=3, tokens=(1,), at=3),), connection=2
    )
    assert session.offer(old).ignored


def test_an_overflow_is_unprocessed_so_that_the_source_can_send_it_again() -> None:
    session, seed = make(held=2), 4
    wanted = tuple(plain(seed)[3:8])
    offer = session.offer(block(Chain(first=1, position=3, tokens=wanted, at=3)))
    assert (offer.attached, offer.overflow, session.seen["edge"]) == (2, 3, (1, 2))
    step(session, seed)
    assert session.kinds == "eeb"
    again = session.offer(block(Chain(first=1, position=3, tokens=wanted, at=3)))
    assert (again.history, again.attached, session.seen["edge"]) == (1, 2, (1, 5))


@pytest.mark.parametrize(
    ("chain", "code"),
    [
        (Chain(first=1, position=3, tokens=(VOCABULARY,), at=3), "token_out_of_range"),
        (Chain(first=2, position=9, tokens=(1,), after=1), "position_mismatch"),
    ],
)
def test_a_bad_block_is_refused_by_name_and_changes_nothing(chain: Chain, code: str) -> None:
    session = make()
    session.offer(block(Chain(first=1, position=3, tokens=(1,), at=3)))
    before = (session.seen.copy(), session.held, session.counters)
    with pytest.raises(BadRequest) as error:
        session.offer(block(chain))
    assert error.value.code == code
    assert (session.seen, session.held, session.counters) == before


def test_a_stop_inside_a_block_wins_over_the_limit_behind_it_and_a_tie_is_a_stop() -> None:
    seed = 4
    wanted = plain(seed)
    for limit, stop_at, finish, count in [(6, 4, "stop", 4), (6, 7, "length", 6), (6, 6, "stop", 6)]:
        stop_text = "".join("abcdefg"[token] for token in wanted[3 : 3 + stop_at])
        session = make(limit=limit, stops=(stop_text,))
        session.offer(block(Chain(first=1, position=3, tokens=tuple(wanted[3:10]), at=3)))
        while session.finish is None:
            step(session, seed)
        assert (session.finish, session.completion) == (finish, count)
        assert len(session.kinds) == count


def test_nothing_is_verified_behind_an_end_token_and_it_counts_as_accepted() -> None:
    session = make(end_ids=(2,))
    session.offer(block(Chain(first=1, position=3, tokens=(1, 2, 5, 5), at=3)))
    plan = session.plan(8)
    assert plan.tokens == (1, 2)
    commit = session.decide(plan, 2, 0)
    assert commit is not None
    assert (commit.tokens, commit.kinds, commit.finish) == ((1, 2), "ee", "stop")


def test_acceptance_counters_follow_the_delivered_tokens() -> None:
    """Rounds of (drafted, accepted, emitted) 4,4,5; 4,1,2; 4,0,1; 2,2,2 where the last accepted one ends the text."""
    session = make(limit=100, end_ids=(END,))
    next_id = 1
    for drafted, accepted, ends in [(4, 4, False), (4, 1, False), (4, 0, False), (2, 2, True)]:
        tokens = (1, END) if ends else (1,) * drafted
        session.offer(block(Chain(first=next_id, position=session.tip, tokens=tokens, at=session.tip)))
        next_id += drafted
        session.decide(session.plan(8), accepted, 2)
    counters = session.counters
    assert (counters.verified, counters.accepted, counters.steps) == (14, {"edge": 7}, 4)
    assert session.completion / counters.steps == 2.5
    assert session.finish == "stop"


def test_a_late_answer_is_dropped() -> None:
    session = make()
    plan = session.plan(0)
    session.forget()
    newer = session.plan(0)
    assert session.decide(plan, 0, 1) is None
    assert session.decide(newer, 0, 1) is not None
    assert session.decide(newer, 0, 1) is None


def test_the_store_s_history_replaces_ours_when_it_differs() -> None:
    session, seed = make(), 4
    wanted = plain(seed)
    step(session, seed)
    assert not session.adopt(3, session.committed[3:], session.kinds, None)
    session.offer(block(Chain(first=1, position=4, tokens=(1, 2), at=4)))
    plan = session.plan(4)
    assert session.adopt(3, wanted[3:7], "ffff", None)
    assert session.decide(plan, 0, 5) is None
    assert session.committed == wanted[:7] and session.held == 0
    assert session.take_gaps() == ("edge",)
    while session.finish is None:
        step(session, seed)
    assert session.committed == wanted


def test_ends_once() -> None:
    session = make()
    failure = Failure(status=500, code="step_failed", message="x")
    assert session.cancel().finish == "cancelled"
    assert session.fail(failure).finish == "cancelled"
    assert session.offer(block(Chain(first=1, position=3, tokens=(1,), at=3))).ignored


def test_a_session_that_was_stored_in_mid_answer_goes_on_with_limit_and_stops_counted_over_the_whole() -> None:
    seed = 4
    wanted = plain(seed)
    stop = "".join("abcdefg"[token] for token in wanted[6:9])
    record = replace(make().record, tokens=tuple(wanted[:7]), kinds="ffff")
    ends = Ends(lambda token: b"abcdefg"[token : token + 1], (), (stop,), LIMIT)
    session = Session(record, ends, vocabulary=VOCABULARY)
    while session.finish is None:
        step(session, seed)
    assert session.finish == "stop"
    assert session.committed == wanted[:9]


def test_what_was_verified_and_rejected_is_counted_by_source() -> None:
    session, seed = make(), 4
    good = plain(seed)
    wrong = (good[5] + 1) % VOCABULARY
    session.offer(block(Chain(first=1, position=3, tokens=tuple(good[3:5]), at=3)))
    session.offer(block(Chain(first=1, position=3, tokens=(good[3], good[4], wrong, 0), at=3), source="hosted"))
    step(session, seed)
    assert session.kinds == "eec"
    assert (session.counters.verified, session.counters.verified_by) == (4, {"edge": 2, "hosted": 2})
    assert (session.counters.rejected, session.counters.rejected_by) == (1, {"hosted": 1})


def test_a_second_source_adds_its_word_and_changes_no_credit() -> None:
    session, seed = make(), 4
    good = plain(seed)[3:5]
    session.offer(block(Chain(first=1, position=3, tokens=tuple(good), at=3, conf=bytes([51, 51]))))
    for _ in range(2):
        session.offer(block(Chain(first=1, position=3, tokens=(good[0],), at=3, conf=b"\xff"), source="hosted"))
    plan = session.plan(8)
    assert plan.claims == ((("edge", 0.2), ("hosted", 1.0)), (("edge", 0.2),))
    assert plan.sources == ("edge", "edge")


def test_a_guess_of_the_batcher_s_own_is_verified_like_any_draft_and_named_by_nobody() -> None:
    session, seed = make(), 4
    good = plain(seed)[3:7]
    chain = session.guess(good, (2.0, 3.0, 4.0))
    assert [node.token for node in chain] == good[:3]
    assert (session.held, session.sent, session.seen) == (3, 0, {})
    assert session.counters.drafted == {"lookup": 3}
    plan = session.plan(2, chain)
    assert plan.claims == ((("lookup", 2.0),), (("lookup", 3.0),))
    session.decide(plan, 2, good[2])
    assert session.kinds == "llb"
    assert session.held == 0, "the bonus was the third"
    assert session.counters.accepted == {"lookup": 2}


def test_a_guess_ends_with_the_completion_s_room_and_behind_an_end_token() -> None:
    assert len(make(limit=3).guess((1, 2, 3, 4), (2.0,) * 4)) == 2
    assert [node.token for node in make(end_ids=(END,)).guess((1, END, 3), (2.0,) * 3)] == [1, END]


def test_the_best_chain_is_the_one_that_its_chances_say() -> None:
    session = make()
    session.offer(block(Chain(first=1, position=3, tokens=(1, 2), at=3, conf=b"\xff\xff")))
    session.offer(block(Chain(first=1, position=3, tokens=(4, 5), at=3, conf=b"\x80\x80"), source="hosted"))
    assert [node.token for node in session.chain(8)] == [1, 2]
    doubted = {"edge": 0.1, "hosted": 0.9}
    assert [node.token for node in session.chain(8, lambda node: doubted[node.source])] == [4, 5]


def test_who_is_refuted_is_told_whether_it_was_verified_or_not() -> None:
    seed = 4
    good = plain(seed)[3:7]
    wrong = (good[0] + 1) % VOCABULARY
    for limit, chains, refuted in [
        (8, [Chain(first=1, position=3, tokens=(wrong, 1), at=3)], {"edge"}),
        (0, [Chain(first=1, position=3, tokens=(wrong, 1), at=3)], {"edge"}),
        (0, [Chain(first=1, position=3, tokens=tuple(good[:2]), at=3)], set()),
        (8, [Chain(first=1, position=3, tokens=tuple(good[:2]), at=3)], set()),
        (8, [Chain(first=1, position=3, tokens=(good[0], (good[1] + 1) % VOCABULARY), at=3)], {"edge"}),
        (0, [Chain(first=1, position=3, tokens=(wrong,), at=3), Chain(first=2, position=3, tokens=(good[0],), at=3)],
         {"edge"}),
    ]:  # fmt: skip
        session = make()
        session.offer(block(*chains))
        prefix = list(session.committed)
        plan = session.plan(limit)
        accepted = 0
        while accepted < len(plan.tokens) and plan.tokens[accepted] == target(prefix, seed):
            prefix.append(plan.tokens[accepted])
            accepted += 1
        commit = session.decide(plan, accepted, target(prefix, seed))
        assert commit is not None
        assert commit.refuted == refuted


@pytest.mark.parametrize(
    ("at", "tokens"), [(3, (1, 2, 3, 4)), (0, PROMPT), (0, (*PROMPT, 5))], ids=["held", "old", "both"]
)
def test_who_says_the_same_again_and_again_under_new_numbers_is_bounded_and_waits(at: int, tokens) -> None:
    session, first = make(limit=2 * MOST_NAMED), 1
    overflow = 0
    for _ in range(MOST_NAMED):
        offer = session.offer(block(Chain(first=first, position=at, at=at, tokens=tokens)))
        overflow += offer.overflow
        first = session.seen["edge"][1] + 1
        assert session.trie.named_by("edge") <= MOST_NAMED
    assert overflow
    assert session.trie.named_by("edge") > MOST_NAMED // 2
    while session.trie.named_by("edge") and session.finish is None:
        step(session, seed=1)
    assert session.completion <= 2 + REMEMBERED_POSITIONS
    tip = session.tip
    assert session.offer(block(Chain(first=first, position=tip, at=tip, tokens=(1,)))).attached == 1


def test_an_honest_source_is_never_told_to_wait_for_names() -> None:
    """Every position drafted once, late as often as in time, without a new incarnation."""
    session, first = make(limit=4 * REMEMBERED_POSITIONS), 1
    while session.finish is None:
        base = max(1, session.tip - (first % 5))
        path = list(session.committed[:base])
        for _ in range(8):
            path.append(target(path, 1))
        offer = session.offer(block(Chain(first=first, position=base, at=base, tokens=tuple(path[base:]))))
        assert not offer.overflow
        first += 8
        step(session, seed=1)


@pytest.mark.parametrize("apart", [REMEMBERED_POSITIONS - 1, REMEMBERED_POSITIONS, REMEMBERED_POSITIONS + 1])
def test_old_numbers_that_run_out_take_none_of_the_new_incarnation_with_them(apart: int) -> None:
    """Node 1 of each incarnation is committed, the second one `apart` positions after the first."""
    session = make(limit=4 * REMEMBERED_POSITIONS)

    def drafted(incarnation: int) -> None:
        chain = Chain(first=1, position=session.tip, at=session.tip, tokens=(target(session.committed, 1),))
        assert session.offer(block(chain, incarnation=incarnation)).attached == 1
        assert session.plan(1).tokens == chain.tokens
        session.decide(session.in_flight, 1, target([*session.committed, *chain.tokens], 1))

    drafted(1)
    while session.tip < len(PROMPT) + apart:
        session.decide(session.plan(0), 0, target(session.committed, 1))
    drafted(2)
    late = Chain(first=2, position=session.tip - 1, after=1, tokens=(session.committed[-1],))
    assert session.offer(block(late, incarnation=2)).history == 1
