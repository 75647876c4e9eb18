"""Figures for people and for scripts: one session's, and the system's."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edge_client.stats import Stats
from paceline import wire

KIND_STYLES = {"e": "green", "h": "cyan", "l": "magenta", "c": "yellow", "b": "bright_white", "f": "blue"}
"""By wire.KINDS' letters."""
_NAMES = {"e": "from edge", "h": "from hosted", "l": "from look-up", "c": "corrected", "b": "bonus", "f": "filled"}
DRAFTED_STYLE = "dim italic"


def legend(kinds: dict[str, int]) -> Text:
    """What the colours mean, with counts."""
    parts = [Text.assemble((f"■ {name}", KIND_STYLES[kind]), f" {kinds.get(kind, 0)}") for kind, name in _seen(kinds)]
    return Text("  ").join([*parts, Text("■ drafted", DRAFTED_STYLE)])


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
    counters = stats.counters
    speed = f"{_n(stats.itl_ms)} ms a token, {_n(stats.tokens_per_s)} tokens/s, first after {_n(stats.ttft_ms, 0)} ms"
    steps = f"{counters.steps}, {_n(stats.steps_per_token, 2)} a token"
    up, down = stats.bytes_up_per_drafted_token, stats.bytes_down_per_committed_token
    rows = [
        ("tokens", f"{stats.prompt_tokens} prompt, {stats.completion_tokens} completion"),
        ("speed", speed),
        ("verify steps", steps),
        ("drafted", f"{stats.drafted}, accepted {stats.accepted}, acceptance {_percent(stats.acceptance)}"),
        ("bytes", f"{_n(up)} up a drafted token, {_n(down)} down a committed token"),
        ("link", f"{_n(stats.link_round_trip_ms, 0)} ms round trip, {stats.cuts} cuts"),
    ]
    if stats.draft_ms is not None:
        rows.append(("draft model", f"{_n(stats.draft_ms)} ms a token"))
    return rows


def stats_json(stats: Stats) -> dict[str, Any]:
    """Everything in Stats and what follows from it."""
    plain: dict[str, Any] = msgspec.to_builtins(stats)
    for name in ("drafted", "accepted", "acceptance", "steps_per_token"):
        plain[name] = getattr(stats, name)
    for name in ("bytes_up_per_drafted_token", "bytes_down_per_committed_token"):
        plain[name] = getattr(stats, name)
    return plain


def system(report: wire.SystemReport) -> RenderableType:
    """What `paceline status` shows."""
    return Group(_verifiers(report), _batchers(report), _drafters(report), *_decisions(report))


def _verifiers(report: wire.SystemReport) -> Table:
    table = _table("verifiers", "name", "model", "state", "engine", "sessions", "busy", "KV cells", "steps", "step ms")
    for item in report.verifiers:
        engine = _engine(item.engine, item.simulated)
        cells = f"{item.cells_used}/{item.cells_total}"
        table.add_row(
            item.verifier, item.model, _state(item.state, item.detail), engine, str(item.sessions),
            f"{item.busy:.0%}", cells, str(item.steps), _curve(item.step_ms),
        )  # fmt: skip
    return table


def _batchers(report: wire.SystemReport) -> Table:
    table = _table(
        "batchers", "name", "model", "sessions", "parked", "waiting", "partitions", "committed", "accepted", "filled"
    )
    for item in report.batchers:
        numbers = (
            item.sessions,
            item.parked,
            item.waiting,
            item.partitions,
            item.committed,
            item.accepted,
            item.filled,
        )
        table.add_row(item.batcher, item.model, *map(str, numbers))
    return table


def _drafters(report: wire.SystemReport) -> Table:
    table = _table("hosted drafters", "name", "model", "state", "engine", "sessions", "drafted")
    for item in report.drafters:
        engine = _engine(item.engine, item.simulated)
        state = _state(item.state, item.detail)
        table.add_row(item.drafter, item.model, state, engine, str(item.sessions), str(item.drafted))
    return table


def _decisions(report: wire.SystemReport) -> list[Text]:
    lines = []
    for item in report.decisions:
        admit = ", ".join(item.admit) or "any ready verifier"
        fill = "on" if item.fill else "off"
        head = f"policy for {item.model} (version {item.version}): fill {fill}, window cap {item.window_cap}, "
        lines.append(Text.assemble(("\n" + head, "bold"), f"new sessions to {admit}"))
        lines += [Text(f"  - {reason}") for reason in item.reasons]
    return lines or [Text("\nno policy decision yet", "dim")]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _engine(name: str, simulated: bool) -> str:
    return f"{name} (simulated)" if simulated and "simulated" not in name else name


def _state(state: str, detail: str) -> Text:
    style = {"ready": "green", "loading": "yellow", "draining": "yellow"}.get(state, "red")
    return Text(f"{state} ({detail})" if detail else state, style)


def _curve(step_ms: dict[int, float]) -> str:
    return " ".join(f"{tokens}:{ms:.0f}" for tokens, ms in sorted(step_ms.items())[:4])


def _n(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
