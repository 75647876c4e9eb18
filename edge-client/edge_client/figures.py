"""Figures for people and for scripts: one session's, and the system's."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from edge_client.stats import Stats

KIND_STYLES = {"e": "green", "h": "cyan", "l": "magenta", "c": "yellow", "b": "bright_white", "f": "blue"}
"""By wire.KINDS' letters."""
_NAMES = {"e": "from edge", "h": "from hosted", "l": "from look-up", "c": "corrected", "b": "bonus", "f": "filled"}
DRAFTED_STYLE = "dim italic"


def legend(kinds: dict[str, int], width: int) -> Text:
    """What the colours mean, with counts. A line ends between two entries, never within one."""
    parts = [Text.assemble((f"■ {name}", KIND_STYLES[kind]), f" {kinds.get(kind, 0)}") for kind, name in _seen(kinds)]
    lines = [Text()]
    for part in [*parts, Text("■ drafted", DRAFTED_STYLE)]:
        if lines[-1] and lines[-1].cell_len + 2 + part.cell_len > width:
            lines.append(Text())
        lines[-1].append("  " if lines[-1] else "").append_text(part)
    return Text("\n").join(lines)


def _seen(kinds: dict[str, int]) -> list[tuple[str, str]]:
    always = ("e", "c", "b", "f")
    return [(kind, name) for kind, name in _NAMES.items() if kinds.get(kind) or kind in always]


def figures(stats: Stats) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    for name, value in _rows(stats):
        table.add_row(name, value)
    return table


def _rows(stats: Stats) -> list[tuple[str, str]]:
    up, down = stats.bytes_up_per_drafted_token, stats.bytes_down_per_committed_token
    rows = [
        ("tokens", f"{stats.prompt_tokens} prompt, {stats.completion_tokens} completion"),
        ("speed", _known((stats.itl_ms, "{:.1f} ms a token"), (stats.tokens_per_s, "{:.1f} tokens/s"),
                         (stats.ttft_ms, "first after {:.0f} ms"))),
        ("verify steps", _known((stats.counters.steps, "{}"), (stats.steps_per_token, "{:.2f} a token"))),
        ("drafted", _drafts(stats)),
        ("bytes", _known((up, "{:.1f} up a drafted token"), (down, "{:.1f} down a committed token"))),
        ("link", _known((stats.link_round_trip_ms, "{:.0f} ms round trip"), (counted(stats.cuts, "cut"), "{}"))),
        ("draft model", _known((stats.draft_ms, "{:.1f} ms a token"))),
        ("branches", _branches(stats)),
    ]  # fmt: skip
    return [(name, value) for name, value in rows if value]


def _drafts(stats: Stats) -> str:
    """The rate is named by what it is a share of: few of the drafts are verified when they come too late."""
    rate = "" if stats.acceptance is None else f" ({stats.acceptance:.0%} of the verified)"
    return f"{stats.drafted}, verified {stats.verified}, accepted {stats.accepted}{rate}"


def _branches(stats: Stats) -> str:
    if stats.drafting is None or not stats.drafting.branched:
        return ""
    return f"{stats.drafting.branched} of the drafts beside the main chain, {stats.drafting.taken} taken"


def _known(*parts: tuple[Any, str]) -> str:
    """The parts that are known, formatted; others are left out."""
    return ", ".join(form.format(value) for value, form in parts if value is not None)


def counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def stats_json(stats: Stats) -> dict[str, Any]:
    """Everything in Stats and what follows from it."""
    plain: dict[str, Any] = msgspec.to_builtins(stats, str_keys=True)
    for name in ("drafted", "verified", "accepted", "acceptance", "by_source", "steps_per_token"):
        plain[name] = getattr(stats, name)
    for name in ("bytes_up_per_drafted_token", "bytes_down_per_committed_token"):
        plain[name] = getattr(stats, name)
    return plain
