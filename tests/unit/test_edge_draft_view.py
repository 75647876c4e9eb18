"""What `--show-drafts` decides: which piece of text has which colour, which drafts are still open."""

from __future__ import annotations

import io
import re

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from edge_client.draft_view import Colours, DraftView, Pending, finished_length
from edge_client.events import Committed, Drafted, Finished
from edge_client.stats import Tally
from paceline.drafting import DraftEvent
from paceline.engine_simulated import toy_card
from paceline.tokenizer import Detokenizer, Tokenizer

TOKENIZER = Tokenizer(toy_card())


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20), st.lists(st.integers(1, 4), max_size=30))
def test_coloured_pieces_join_to_the_shown_text(text: str, cuts: list[int]) -> None:
    colours, shower = Colours(TOKENIZER), Detokenizer(TOKENIZER)
    rest, joined = text.encode(), ""
    for cut in [*cuts, len(rest)]:
        tokens, rest = tuple(rest[:cut]), rest[cut:]
        pieces = colours.feed(tokens, "e" * len(tokens), shower.feed(tokens))
        joined += "".join(piece for piece, _ in pieces)
    assert joined == text


def test_held_back_text_keeps_its_colour() -> None:
    colours = Colours(TOKENIZER)
    assert colours.feed(tuple(b"ab"), "ec", "a") == [("a", "e")]
    assert colours.feed(tuple(b"c"), "f", "bc") == [("b", "c"), ("c", "f")]


def test_pending_drafts_follow_verdicts() -> None:
    pending = Pending()
    for position, token in enumerate(b"abcd", start=10):
        pending.drafted(position, token)
    pending.committed(10, tuple(b"ab"))
    assert bytes(pending.tokens) == b"cd"
    pending.committed(12, tuple(b"X"))
    assert pending.tokens == []
    pending.drafted(13, ord("y"))
    pending.drafted(14, ord("z"))
    pending.forgotten(14)
    assert bytes(pending.tokens) == b"y"
    pending.committed(13, tuple(b"yes"))
    assert pending.tokens == []


def test_lines_let_go_are_whole() -> None:
    console = Console(width=20, file=io.StringIO())
    text = Text("one two three four five six seven eight\n\nnine ten")
    cut = finished_length(text, console, 2)
    assert text.plain[:cut] == "one two three four five six seven eight\n"
    assert finished_length(Text("short"), console, 6) == 0


def test_everything_is_on_the_screen_once_at_the_end() -> None:
    """On a terminal: the final picture holds every line of a long answer, in order, and no draft."""
    out = Console(file=io.StringIO(), force_terminal=True, width=40, height=12, legacy_windows=False)
    err = Console(file=io.StringIO())
    view = DraftView(out, err, TOKENIZER)
    answer = "".join(f"line {number:02d} of a long answer\n" for number in range(30))
    at = 5
    for line in answer.splitlines(keepends=True):
        view.on(Drafted(DraftEvent("drafted", at, ord("#"), 0.9), 0.0))
        tokens = tuple(line.encode())
        view.on(Committed(at, tokens, "e" * len(tokens), line, 0.0))
        at += len(tokens)
    view.on(Finished("stop", Tally(5, 0.0).stats(1.0), 1.0))
    written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.file.getvalue())  # type: ignore[attr-defined]
    final = [f"line {number:02d}" for number in range(30)]
    positions = [written.rindex(line) for line in final]
    assert positions == sorted(positions)
    assert "#" not in written[positions[0] :].split("line 29")[-1]
