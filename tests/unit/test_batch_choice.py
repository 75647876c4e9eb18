"""Who gets into a verify step, with how much; and what one more token would be worth."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.batch_choice import Chosen, Share, Want, choose, fair_order, spread
from paceline.step_curve import StepTimes

CPU = StepTimes((1, 2, 3, 4, 6, 8, 16), (34, 48, 55, 62, 75, 85, 158))
"""Compute-bound: every token costs, the second one most."""
GPU = StepTimes((1, 256, 512), (20.0, 21.0, 42.0))
"""Memory-bound up to some 200 tokens."""

confidences = st.floats(0.0, 1.0)
want_lists = st.lists(
    st.builds(
        Want,
        session=st.uuids().map(str),
        tenant=st.sampled_from(["a", "b", "c"]),
        served=st.integers(0, 20),
        missing=st.integers(0, 600),
        decides=st.booleans(),
        chain=st.lists(confidences, max_size=12).map(tuple),
        context=st.integers(0, 4000),
        worth=st.one_of(st.just(1.0), st.just(0.0), confidences),
        joining=confidences,
        must=st.booleans(),
    ),
    max_size=24,
    unique_by=lambda item: item.session,
)
runnable = want_lists.map(lambda items: [item for item in items if item.missing or item.decides])
curves = st.sampled_from([None, CPU, GPU, StepTimes((1, 8), (30.0, 31.0), context_ms=0.002)])


@given(runnable, curves, st.integers(1, 64), st.integers(1, 256))
def test_both_budgets_are_kept(items: list[Want], times: StepTimes | None, step_tokens: int, chunk_tokens: int) -> None:
    chosen = choose(items, times=times, step_tokens=step_tokens, chunk_tokens=chunk_tokens)
    wanted = {item.session: item for item in items}
    assert sum(share.history for share in chosen.shares) <= chunk_tokens
    assert sum(share.decides + share.draft for share in chosen.shares) <= step_tokens
    assert len({share.session for share in chosen.shares}) == len(chosen.shares)
    assert chosen.left_out == len(items) - len(chosen.shares)
    for share in chosen.shares:
        item = wanted[share.session]
        assert share.history <= item.missing
        assert share.draft <= len(item.chain)
        assert share.history or share.decides
        assert not share.decides or (item.decides and share.history == item.missing)
        assert share.decides or not share.draft
    assert 0.0 <= chosen.price <= 1.0
    if times is None:
        assert (chosen.price, chosen.rate, chosen.predicted_ms) == (0.0, 0.0, None)
    else:
        rows = sum(share.history + share.draft + share.decides for share in chosen.shares)
        context = sum(wanted[share.session].context for share in chosen.shares)
        assert chosen.predicted_ms == pytest.approx(times.at(rows, context))


@given(runnable.filter(bool), curves, st.integers(1, 64), st.integers(1, 256))
def test_somebody_runs_wherever_a_step_is_worth_anything(
    items: list[Want], times: StepTimes | None, step_tokens: int, chunk_tokens: int
) -> None:
    chosen = choose(items, times=times, step_tokens=step_tokens, chunk_tokens=chunk_tokens)
    begins = {item.session for item in items if item.firm or item.worth > 0.0}
    assert bool(chosen.shares) == bool(begins)
    assert not chosen.shares or begins & {share.session for share in chosen.shares}


@given(runnable.filter(bool), st.integers(1, 64), st.integers(1, 256))
def test_room_is_not_wasted_while_no_times_are_known(items: list[Want], step_tokens: int, chunk_tokens: int) -> None:
    chosen = choose(items, times=None, step_tokens=step_tokens, chunk_tokens=chunk_tokens)
    chains = {item.session: len(item.chain) for item in items}
    spent = sum(share.decides + share.draft for share in chosen.shares)
    hungry = [share for share in chosen.shares if share.decides and share.draft < chains[share.session]]
    assert not hungry or spent == step_tokens


def serve(chosen: Chosen, items: list[Want], step: int) -> list[Want]:
    """The wants after a step: decode items come again, chunks get shorter."""
    shares = {share.session: share for share in chosen.shares}
    after = []
    for item in items:
        share = shares.get(item.session)
        if share is None:
            after.append(item)
        else:
            after.append(Want(item.session, item.tenant, step, item.missing - share.history, item.decides, item.chain))
    return after


@given(st.integers(1, 8), st.integers(1, 6), curves)
def test_a_tenant_with_many_sessions_gets_no_more_than_one_with_one(
    flood: int, step_tokens: int, times: StepTimes | None
) -> None:
    """While both have somebody runnable and the steps are full, both have their turns."""
    items = [Want(f"a{n}", "a") for n in range(flood + step_tokens)] + [Want("b0", "b")]
    turns: Counter[str] = Counter()
    for step in range(1, 41):
        chosen = choose(items, times=times, step_tokens=step_tokens, chunk_tokens=1)
        turns.update(share.session[0] for share in chosen.shares)
        items = serve(chosen, items, step)
    assert turns["b"] >= 40 // 2 if step_tokens == 1 else turns["b"] == 40


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=20), st.integers(1, 4), curves)
def test_nobody_starves(tenants: list[str], step_tokens: int, times: StepTimes | None) -> None:
    items = [Want(f"{tenant}{n}", tenant) for n, tenant in enumerate(tenants)]
    seen: set[str] = set()
    for step in range(1, 4 * len(items) + 4):
        chosen = choose(items, times=times, step_tokens=step_tokens, chunk_tokens=1)
        seen.update(share.session for share in chosen.shares)
        items = serve(chosen, items, step)
    assert seen == {item.session for item in items}


def test_least_recently_served_first_and_tenants_in_turn() -> None:
    items = [Want("a1", "a", served=3), Want("a2", "a", served=1), Want("b1", "b", served=9)]
    assert [item.session for item in fair_order(items)] == ["a2", "b1", "a1"]


def test_one_chunk_a_step_beside_everybody_elses_decode() -> None:
    items = [Want(f"d{n}", "t", served=n, chain=(0.9,) * 4) for n in range(3)]
    items += [Want("long", "t", missing=1000), Want("longer", "t", served=1, missing=2000)]
    chosen = choose(items, times=None, step_tokens=256, chunk_tokens=256)
    fed = {share.session: share.history for share in chosen.shares if share.history}
    assert fed == {"long": 256}
    assert [share.draft for share in chosen.shares if share.decides] == [4, 4, 4]


def test_a_short_history_rides_with_its_decision() -> None:
    chosen = choose([Want("s", "t", missing=5, chain=(0.9,) * 3)], times=None, step_tokens=8, chunk_tokens=256)
    assert chosen.shares == (Share("s", history=5, draft=3, decides=True),)


@pytest.mark.parametrize("times", [None, GPU])
def test_drafts_share_what_is_left_evenly(times: StepTimes | None) -> None:
    chains = {"s1": (0.9,) * 8, "s2": (0.99,) * 8, "s3": (0.9,)}
    items = [Want(name, tenant, chain=chains[name]) for name, tenant in zip(chains, "abc", strict=True)]
    chosen = choose(items, times=times, step_tokens=10, chunk_tokens=1)
    assert sorted(share.draft for share in chosen.shares) == [1, 3, 3]


def test_a_tenant_spends_its_part_on_its_best_drafts() -> None:
    items = [Want("a1", "a", chain=(0.9,) * 4), Want("a2", "a", chain=(0.5,) * 4), Want("b1", "b", chain=(0.6,) * 4)]
    chosen = choose(items, times=GPU, step_tokens=7, chunk_tokens=1)
    assert {share.session: share.draft for share in chosen.shares} == {"a1": 2, "a2": 0, "b1": 2}
    assert chosen.price == pytest.approx(0.9**3), "the best row that there was no room for"


def test_the_level_is_filled_evenly() -> None:
    assert spread([8, 8, 1], 7) == [3, 3, 1]
    assert spread([2, 9], 30) == [2, 9]
    assert spread([5, 5, 5], 4) == [2, 1, 1]


# --- what pays ---

CHAIN = (0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5)


def one(chain: tuple[float, ...], times: StepTimes, context: int = 0) -> Chosen:
    return choose([Want("s", "t", chain=chain, context=context)], times=times, step_tokens=512, chunk_tokens=256)


def test_a_lone_session_has_a_short_chain_where_tokens_cost_and_its_full_one_where_they_do_not() -> None:
    """Tokens per ms with n of the chain on the CPU: .0294 .0396 .0493 .0542 .0556 .0544 .0540 ...: four."""
    on_cpu = one(CHAIN, CPU)
    assert on_cpu.shares == (Share("s", 0, 4, True),)
    committed = 1 + 0.9 + 0.81 + 0.648 + 0.4536
    assert on_cpu.predicted_ms == 68.5
    assert on_cpu.rate == pytest.approx(committed / 68.5)
    assert on_cpu.price == pytest.approx(committed / 68.5 * 6.5)
    on_gpu = one(CHAIN, GPU)
    assert on_gpu.shares == (Share("s", 0, 8, True),)
    assert on_gpu.price < 0.01


def test_sixteen_sessions_on_a_cpu_have_only_near_certain_drafts_verified() -> None:
    """A further token costs 9.1 of 158 ms, in which the others commit .92 tokens."""
    items = [Want(f"s{n:02}", "t", chain=CHAIN) for n in range(14)]
    items += [Want("sure", "t", chain=(0.99, 0.98, 0.5)), Want("nearly", "t", chain=(0.96, 0.96))]
    chosen = choose(items, times=CPU, step_tokens=256, chunk_tokens=256)
    drafts = {share.session: share.draft for share in chosen.shares}
    assert {name: draft for name, draft in drafts.items() if draft} == {"sure": 2, "nearly": 1}
    committed = 16 + 0.99 + 0.99 * 0.98 + 0.96
    assert chosen.rate == pytest.approx(committed / (158 + 3 * 9.125))
    assert chosen.price == pytest.approx(committed / (158 + 3 * 9.125) * 9.125)
    assert 0.9 < chosen.price < 0.96
    gpu = choose(items, times=GPU, step_tokens=256, chunk_tokens=256)
    assert sum(share.draft for share in gpu.shares) == 14 * 8 + 3 + 2


def test_a_dear_row_is_taken_where_cheap_ones_behind_it_make_up_for_it() -> None:
    """The first draft alone lowers the rate, 1.8 / 60 against 1 / 30; seven of them raise it to 4.2 / 61."""
    steps = StepTimes((1, 2, 8), (30.0, 60.0, 61.0))
    assert one((0.8,), steps).shares[0].draft == 0
    assert one((0.8,) * 7, steps).shares[0].draft == 7


def test_drafts_of_a_chain_are_discounted_by_their_own_survival() -> None:
    """.6 * .99 is worth less than .8, however sure the source is of its second token."""
    steps = StepTimes((2, 3, 4), (100.0, 134.0, 180.0))
    items = [Want("a", "t", chain=(0.6, 0.99)), Want("b", "t", served=1, chain=(0.8,))]
    chosen = choose(items, times=steps, step_tokens=9, chunk_tokens=1)
    assert [(share.session, share.draft) for share in chosen.shares] == [("a", 0), ("b", 1)]


@given(
    st.lists(st.lists(confidences, max_size=6).map(tuple), min_size=1, max_size=5),
    st.lists(st.floats(0.0, 60.0), min_size=40, max_size=40),
)
def test_no_other_number_of_drafts_commits_more_per_millisecond(
    chains: list[tuple[float, ...]], increments: list[float]
) -> None:
    ms, total = [], 30.0
    for increment in increments:
        total += increment
        ms.append(total)
    times = StepTimes(tuple(range(1, 41)), tuple(ms))
    items = [Want(f"s{n}", "t", chain=chain) for n, chain in enumerate(chains)]
    chosen = choose(items, times=times, step_tokens=256, chunk_tokens=1)
    values = sorted((math.prod(chain[: n + 1]) for chain in chains for n in range(len(chain))), reverse=True)
    rates = [(len(items) + sum(values[:n])) / times.at(len(items) + n) for n in range(len(values) + 1)]
    assert chosen.rate == pytest.approx(max(rates))


def test_context_makes_steps_dearer_and_so_drafts_cheaper() -> None:
    times = StepTimes(CPU.tokens, CPU.ms, context_ms=0.1)
    assert one(CHAIN, times).shares[0].draft == 4
    assert one(CHAIN, times, context=4000).shares[0].draft == 7


def test_feeding_history_does_not_make_poor_drafts_pay() -> None:
    """The chunk's time is spent in any case; the drafts beside it still cost theirs."""
    items = [Want("s", "t", chain=(0.25, 0.9)), Want("new", "t", missing=500)]
    chosen = choose(items, times=CPU, step_tokens=256, chunk_tokens=256)
    assert chosen.shares == (Share("new", 256, 0, False), Share("s", 0, 0, True))
    assert chosen.rate == pytest.approx(1 / 34)
    assert chosen.predicted_ms == pytest.approx(CPU.at(257))


# --- plain steps that could wait ---


def test_while_others_are_read_drafts_are_measured_against_what_all_would_earn() -> None:
    """The first of many sessions that decodes does not lengthen the steps that read the others' prompts."""
    first = Want("first", "t", chain=(0.9, 0.8, 0.7), context=40)
    others = [Want(f"s{number}", "t", missing=40, context=40) for number in range(15)]
    limits = {"step_tokens": 256, "chunk_tokens": 80}

    def drafts(times: StepTimes, going_rate: float | None = None) -> int:
        chosen = choose([first, *others], times=times, going_rate=going_rate, **limits)
        return next(share.draft for share in chosen.shares if share.session == "first")

    assert choose([first], times=CPU, **limits).shares[0].draft > 0
    assert drafts(CPU) == drafts(CPU, going_rate=0.01) == 0
    assert drafts(GPU) == 3
    alone = [first, Want("last", "t", missing=40, context=40)]  # read in this step: nobody waits for the next one
    assert choose(alone, times=CPU, going_rate=0.01, **limits).shares[0].draft == 3


def test_a_plain_step_that_could_wait_joins_where_it_earns_its_time() -> None:
    """Beside one other the second row costs 14 of 48 ms: .41 of a token."""
    for worth, joins in ((0.3, False), (0.5, True)):
        items = [Want("busy", "t"), Want("fill", "t", served=1, worth=worth)]
        chosen = choose(items, times=CPU, step_tokens=16, chunk_tokens=1)
        assert ("fill" in {share.session for share in chosen.shares}) is joins
        assert chosen.left_out == (not joins)
    free = choose([Want("busy", "t"), Want("fill", "t", worth=0.05)], times=GPU, step_tokens=16, chunk_tokens=1)
    assert len(free.shares) == 2


def test_alone_or_when_it_must_it_always_joins() -> None:
    lone = choose([Want("fill", "t", worth=0.01)], times=CPU, step_tokens=16, chunk_tokens=1)
    assert lone.shares == (Share("fill", 0, 0, True),)
    assert lone.rate == pytest.approx(1 / 34)
    items = [Want(f"s{n}", "t") for n in range(8)] + [Want("fill", "t", worth=0.01, must=True)]
    assert not choose(items, times=CPU, step_tokens=16, chunk_tokens=1).left_out


def test_for_what_is_worth_nothing_by_itself_no_step_is_begun() -> None:
    waits = [Want("first", "t", worth=0.0, joining=1.0), Want("second", "t", worth=0.0, joining=0.9)]
    for times in (None, CPU):
        chosen = choose(waits, times=times, step_tokens=16, chunk_tokens=1)
        assert (chosen.shares, chosen.left_out, chosen.price) == ((), 2, 0.0)


@pytest.mark.parametrize(
    "busy", [Want("busy", "t"), Want("busy", "t", worth=0.0, must=True), Want("busy", "t", worth=0.01)]
)
def test_a_step_that_goes_on_anyway_is_joined_by_who_would_else_wait_for_its_end(busy: Want) -> None:
    """The second row costs .41 of a token."""
    for joining, joins in ((0.3, False), (0.5, True), (1.0, True)):
        items = [busy, Want("waits", "t", served=1, worth=0.0, joining=joining)]
        chosen = choose(items, times=CPU, step_tokens=16, chunk_tokens=1)
        assert ("waits" in {share.session for share in chosen.shares}) is joins
    reading = [Want("reads", "t", missing=40), Want("waits", "t", worth=0.0, joining=0.9)]
    chosen = choose(reading, times=CPU, step_tokens=16, chunk_tokens=8)
    assert {share.session for share in chosen.shares} == {"reads", "waits"}


def test_what_joins_brings_its_chain_at_the_same_discount() -> None:
    """Alone the discount is that of all it gets and changes nothing; beside others the drafts come after the step."""
    for worth in (1.0, 0.2):
        lone = choose([Want("s", "t", chain=CHAIN, worth=worth)], times=CPU, step_tokens=16, chunk_tokens=1)
        assert lone.shares == (Share("s", 0, 4, True),)
    items = [Want("busy", "t"), Want("fill", "t", served=1, worth=0.5, chain=(0.9, 0.2))]
    chosen = choose(items, times=CPU, step_tokens=16, chunk_tokens=1)
    assert chosen.shares == (Share("busy", 0, 0, True), Share("fill", 0, 1, True))
    assert chosen.rate == pytest.approx((2 + 0.45) / 55)


def test_history_is_fed_though_the_decision_waits() -> None:
    items = [Want(f"s{n}", "t") for n in range(8)] + [Want("fill", "t", worth=0.1, missing=3)]
    shares = {share.session: share for share in choose(items, times=CPU, step_tokens=16, chunk_tokens=8).shares}
    assert shares["fill"] == Share("fill", 3, 0, False)


def test_where_rows_are_short_the_price_is_what_was_refused() -> None:
    items = [Want(f"s{n}", "t", chain=(0.9,)) for n in range(4)]
    assert choose(items, times=GPU, step_tokens=3, chunk_tokens=1).price == 1.0
    assert choose(items, times=GPU, step_tokens=6, chunk_tokens=1).price == 0.9
    assert choose(items, times=GPU, step_tokens=8, chunk_tokens=1).price < 0.05


def test_many_sessions() -> None:
    """On a memory-bound step a thousand sessions keep what is likely; each tenant's rows are its own."""
    items = [Want(f"s{n:04}", f"t{n % 7}", chain=CHAIN, context=500) for n in range(1000)]
    flat = StepTimes((1, 16384), (20.0, 22.0))
    chosen = choose(items, times=flat, step_tokens=16384, chunk_tokens=256)
    drafts = {share.draft for share in chosen.shares}
    assert len(chosen.shares) == 1000
    assert drafts == {8}
    steep = StepTimes((1, 512, 4096), (20.0, 22.0, 160.0))
    drafts = {share.draft for share in choose(items, times=steep, step_tokens=16384, chunk_tokens=256).shares}
    assert max(drafts) <= 2
