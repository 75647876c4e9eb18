"""The tree of drafted nodes: forks, verdicts along and beside the main chain, the tail that the batcher lost."""

from __future__ import annotations

import math

import pytest

from paceline.draft_tree import DraftTree, Lesson, Node
from paceline.engine import Guess

PROMPT = (1, 2, 3)


def guess(token: int, *runners: int) -> Guess:
    return Guess(token, 0.5, tuple((runner, 0.5 + 0.5 * index) for index, runner in enumerate(runners)))


def drafted(*tokens: int) -> DraftTree:
    """A main chain in which each choice has the runner-up token + 100."""
    tree = DraftTree(PROMPT)
    node = tree.tip
    for token in tokens:
        node = tree.extend(node, guess(token, token + 100), 0.8, [0.1], 0.0)
    return tree


def chains(tree: DraftTree) -> list[list[int]]:
    return [[node.token for node in chain] for chain in tree.branches()]


def fork_of(tree: DraftTree, node: Node, token: int, *further: int) -> Node:
    fork = end = tree.hang(node, token, 0.0)
    for other in further:
        end = tree.extend(end, guess(other, other + 100), 0.5, [0.2], 0.0)
    return fork


def test_the_path_to_any_node_and_its_survival():
    tree = drafted(4, 5, 6)
    fork = fork_of(tree, tree.ahead()[0], 105, 106)
    assert tree.tokens() == [1, 2, 3, 4, 5, 6]
    assert tree.path(fork) == [1, 2, 3, 4, 105]
    assert tree.path(fork.next) == [1, 2, 3, 4, 105, 106]
    assert tree.survival(tree.ahead()[-1]) == pytest.approx(0.8**3)
    assert tree.survival(fork.next) == pytest.approx(0.8 * 0.1 * 0.5)
    assert tree.depth(fork.next) == 3
    assert tree.size == 5
    assert {node.token for node in tree.live()} == {4, 5, 6, 105, 106}


def test_branches_come_after_the_chains_that_they_hang_under():
    tree = drafted(4, 5)
    outer = fork_of(tree, tree.tip, 104, 7, 8)
    fork_of(tree, outer, 107, 9)
    fork_of(tree, tree.ahead()[0], 105, 6)
    assert chains(tree) == [[104, 7, 8], [107, 9], [105, 6]]


def test_a_verdict_along_the_main_chain_leaves_it_and_kills_what_hangs_beside_it():
    tree = drafted(4, 5, 6)
    fork_of(tree, tree.tip, 104, 7)
    late = fork_of(tree, tree.ahead()[0], 105, 8)
    assert tree.commit(3, (4,), follow=False)
    assert (tree.generation, tree.taken, tree.forgotten, tree.size) == (0, 0, 2, 4)
    assert tree.survival(tree.ahead()[-1]) == pytest.approx(0.8**2)
    assert chains(tree) == [[105, 8]]
    assert late.alive


def test_a_fork_that_the_target_takes_becomes_the_main_chain():
    tree = drafted(4, 5, 6)
    fork = fork_of(tree, tree.ahead()[0], 105, 7, 8)
    nested = fork_of(tree, fork, 107, 9)
    main = tree.ahead()
    assert tree.commit(3, (4, 105), follow=False)
    assert [node.token for node in tree.ahead()] == [7, 8]
    assert chains(tree) == [[107, 9]]
    assert nested.alive
    assert not any(node.alive for node in main)
    assert (tree.generation, tree.taken, tree.size) == (1, 1, 4)
    assert tree.survival(tree.ahead()[-1]) == pytest.approx(0.25)


def test_a_token_that_nobody_named_leaves_nothing():
    tree = drafted(4, 5)
    fork_of(tree, tree.tip, 104, 6)
    assert tree.commit(3, (99, 98), follow=False)
    assert (tree.size, tree.forgotten, tree.ahead(), chains(tree)) == (0, 4, [], [])
    assert tree.tip.unread == 2, "the draft model has read the prompt"
    assert tree.path(tree.tip) == [1, 2, 3, 99, 98]


def test_every_decided_position_that_was_drafted_is_a_lesson():
    tree = drafted(4, 5, 6)
    tree.commit(3, (4, 105), follow=False)
    assert tree.lessons == [Lesson(0.5, 0.5, 0), Lesson(0.5, 0.5, 1)]
    tree.commit(5, (9,), follow=False)
    assert len(tree.lessons) == 2, "nothing was guessed after a runner-up that was not continued"
    tree = DraftTree(PROMPT)
    tree.extend(tree.tip, Guess(4, 1.0), 0.9, [], 0.0)
    tree.commit(3, (7,), follow=False)
    assert tree.lessons == [Lesson(1.0, math.inf, -1)]


def test_other_tokens_than_those_known_change_nothing():
    tree = drafted(4)
    assert not tree.commit(1, (2, 9), follow=False)
    assert tree.committed == [1, 2, 3]
    assert tree.size == 1


def test_the_tail_that_the_batcher_lost_stands_before_the_drafts():
    tree = drafted(4, 5, 6, 7)
    tree.commit(3, (4, 5), follow=False)
    assert tree.commit(3, (4,), follow=True)
    assert tree.root == 4
    assert [node.token for node in tree.main()] == [5, 6, 7]
    tree.rebase(1)
    assert [node.token for node in tree.main()] == [2, 3, 4, 5, 6, 7]
    assert [node.position for node in tree.main()] == [1, 2, 3, 4, 5, 6]
    tree.send_again()
    assert all(node.urgent for node in tree.main())
    assert [len(tree.path(node)) for node in tree.main()] == [2, 3, 4, 5, 6, 7]
    tree.rebase(5)
    assert [node.token for node in tree.main()] == [6, 7]
    assert tree.path(tree.ahead()[-1]) == [1, 2, 3, 4, 5, 6, 7]


def test_the_lost_tail_grows_with_what_is_committed():
    tree = drafted(4, 5, 6)
    tree.commit(3, (4,), follow=False)
    tree.rebase(3)
    tree.commit(4, (5,), follow=False)
    assert tree.root == 5
    assert [node.token for node in tree.main()] == [6]


def test_a_runner_up_named_twice_is_one():
    tree = DraftTree(PROMPT)
    tree.extend(tree.tip, Guess(4, 0.5, ((5, 0.1), (5, 0.2), (4, 0.3))), 0.5, [0.2, 0.1, 0.1], 0.0)
    assert [token for token, _ in tree.tip.runners] == [5]
