"""KV of a target, by the contract of paceline.engine: what a ledger holds, what is shared, who gives way."""

from __future__ import annotations

from dataclasses import replace

from engine_kit import LENGTH, STORY, Kit, Text, assert_failed, assert_same, feed, one, only_decided, plain, rule_for

from paceline.engine import Decided, Fed, TargetItem


class TestLedger:
    async def test_trim_and_release(self, kit: Kit) -> None:
        target = await kit.target()
        prompt = kit.encode(STORY)
        await feed(target, "a", prompt)
        assert target.held("a") == tuple(prompt)
        target.trim("a", 7)
        assert target.held("a") == tuple(prompt[:7])
        assert target.status().cells_used == 7
        target.trim("nobody", 1)
        target.release("nobody")
        target.release("a")
        assert target.status().sessions == 0

    async def test_history_that_differs_replaces_what_was_held(self, kit: Kit) -> None:
        target = await kit.target()
        one_way, other = kit.encode("The sky is blue and"), kit.encode("The sky is dark and the")
        await feed(target, "a", one_way)
        await feed(target, "a", other)
        assert target.held("a") == tuple(other)
        found = await plain(target, "a", other, rule_for(other), 8)
        assert_same(kit, found, await plain(target, "b", other, rule_for(other), 8))

    async def test_history_that_agrees_costs_nothing(self, kit: Kit) -> None:
        target = await kit.target()
        prompt = kit.encode(STORY)
        await feed(target, "a", prompt)
        fed = await one(target, TargetItem("a", "t", len(prompt), 0, tuple(prompt[:5])))
        assert fed == Fed("a", len(prompt))

    async def test_prefixes_are_shared_within_a_tenant_only(self, kit: Kit) -> None:
        target = await kit.target()
        prompt = kit.encode(STORY)
        expected = await plain(target, "a", prompt, rule_for(prompt), 8, tenant="red")
        used = target.status().cells_used
        await feed(target, "b", prompt, tenant="red")
        assert target.status().cells_used == used
        await feed(target, "c", prompt, tenant="blue")
        assert target.status().cells_used == used + len(prompt)
        target.release("a")
        for session, tenant in [("b", "red"), ("c", "blue"), ("d", "red")]:
            found = await plain(target, session, prompt, rule_for(prompt), 8, tenant=tenant)
            assert_same(kit, found, expected)

    async def test_sessions_of_one_batch_share_only_what_is_there(self, kit: Kit) -> None:
        """Four choices of one prompt opened in one step: nobody's KV exists yet, so nobody takes it."""
        target = await kit.target()
        prompt = tuple(kit.encode(STORY))
        rule = rule_for(prompt)
        items = [TargetItem(f"n{i}", "t", len(prompt), 0, prompt, rule=rule) for i in range(4)]
        tokens = {outcome.token for outcome in only_decided(await target.step(items))}
        assert len(tokens) == 1


class TestRoom:
    async def test_a_session_waits_while_another_one_runs(self, kit: Kit) -> None:
        target = await kit.target(cells=64)
        target.engine.ledgers.grace_s = 3600
        prompt = kit.encode(STORY)[:20]
        rule = rule_for(prompt)
        expected = await plain(target, "first", prompt, rule, LENGTH, tenant="x")
        full = TargetItem("second", "y", 30, 0, tuple(prompt + prompt[:10]))
        assert_failed(await one(target, full), "no_room")
        assert target.held("first") == tuple(prompt + expected.tokens)
        small = TargetItem("small", "y", 3, 0, tuple(prompt[:3]))
        failed, fed = await target.step([full, small])
        assert_failed(failed, "no_room")
        assert isinstance(fed, Fed)
        target.release("first")
        target.release("small")
        assert_same(kit, await plain(target, "second", prompt, rule, LENGTH, tenant="y"), expected)

    async def test_idle_sessions_make_room_and_come_back(self, kit: Kit) -> None:
        target = await kit.target(cells=64)
        target.engine.ledgers.grace_s = 0
        prompt = kit.encode(STORY)[:20]
        rule = rule_for(prompt)
        expected = await plain(target, "other", prompt, rule, LENGTH, tenant="z")
        target.release("other")
        committed = {"x": list(prompt), "y": list(prompt)}
        evictions = 0
        for _ in range(LENGTH):
            for session, tokens in committed.items():
                item = TargetItem(session, session, len(tokens), rule=rule)
                outcome = await one(target, item)
                if not isinstance(outcome, Decided):
                    evictions += 1
                    assert_failed(outcome, "need_history")
                    outcome = await one(target, replace(item, history=tuple(tokens)))
                assert isinstance(outcome, Decided)
                tokens.append(outcome.token)
        assert evictions > 3
        for tokens in committed.values():
            assert_same(kit, Text(tokens[len(prompt) :], []), expected)

    async def test_what_can_never_fit_says_so(self, kit: Kit) -> None:
        target = await kit.target(cells=64)
        tokens = tuple(kit.encode(STORY * 5)[:100])
        outcome = await one(target, TargetItem("a", "t", 100, 0, tokens))
        assert_failed(outcome, "no_room")
        assert "never" in outcome.message  # type: ignore[union-attr]
        assert target.status().cells_used == 0

    async def test_sequences_run_out_like_cells(self, kit: Kit) -> None:
        target = await kit.target(max_sessions=2)
        target.engine.ledgers.grace_s = 3600
        for session in "ab":
            await feed(target, session, [5, 6], tenant=session)
        assert_failed(await one(target, TargetItem("c", "t", 1, 0, (7,))), "no_room")
        target.release("a")
        assert isinstance(await one(target, TargetItem("c", "t", 1, 0, (7,))), Fed)
        assert target.held("a") == ()
