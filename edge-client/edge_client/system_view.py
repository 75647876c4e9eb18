"""What `paceline status` shows, made for 80 columns."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paceline import wire

CURVE_POINTS = 4


def system(report: wire.SystemReport) -> RenderableType:
    return Group(_verifiers(report), *_steps(report), _batchers(report), _drafters(report), *_decisions(report))


def _verifiers(report: wire.SystemReport) -> Table:
    table = _table("verifiers", "name", "model", "state", "sessions", "busy", "KV cells", "steps")
    for item in report.verifiers:
        table.add_row(
            item.verifier, _model(item.model, item.simulated), _state(item.state, item.detail), str(item.sessions),
            f"{item.busy:.0%}", f"{item.cells_used}/{item.cells_total}", str(item.steps),
        )  # fmt: skip
    return table


def _steps(report: wire.SystemReport) -> list[Text]:
    """Beside the table: what "busy" is a share of, and what a step costs by its size."""
    if not report.verifiers:
        return []
    lines = ["busy: share of the last second spent in steps"]
    for item in report.verifiers:
        points = sorted(item.step_ms.items())[:CURVE_POINTS]
        curve = ", ".join(f"{tokens}: {ms:.0f} ms" for tokens, ms in points)
        lines += [f"{item.verifier}, a step by its tokens: {curve}"] if curve else []
    return [Text(line, "dim") for line in lines]


def _batchers(report: wire.SystemReport) -> Table:
    table = _table("\nbatchers", "name", "model", "sessions", "parked", "waiting", "committed", "accepted", "filled")
    for item in report.batchers:
        numbers = (item.sessions, item.parked, item.waiting, item.committed, item.accepted, item.filled)
        table.add_row(item.batcher, item.model, *map(str, numbers))
    return table


def _drafters(report: wire.SystemReport) -> Table:
    table = _table("\nhosted drafters", "name", "model", "state", "sessions", "drafted")
    for item in report.drafters:
        state = _state(item.state, item.detail)
        model = _model(item.model, item.simulated)
        table.add_row(item.drafter, model, state, str(item.sessions), str(item.drafted))
    return table


def _decisions(report: wire.SystemReport) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for item in report.decisions:
        lines.append(Text(f"\npolicy for {item.model}, version {item.version}", "italic"))
        lines += [Padding(Text(line), (0, 0, 0, 2), expand=False) for line in told(item)]
    return lines or [Text("\nno policy decision yet", "dim")]


def told(decision: wire.PolicyDecision) -> list[str]:
    """What was decided and why. A reason that begins with the decision itself stands for it."""
    fill = "on" if decision.fill else "off"
    decided = [
        f"fill {fill}, window cap {decision.window_cap}",
        f"new sessions go to {', '.join(decision.admit) or 'any ready verifier'}",
    ]
    whole = [next((reason for reason in decision.reasons if reason.startswith(line)), line) for line in decided]
    return whole + [reason for reason in decision.reasons if reason not in whole]


def _table(title: str, *columns: str) -> Table:
    """Names and headings are kept whole; a state's detail may wrap."""
    table = Table(title=title, title_justify="left", box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=column != "state", overflow="fold")
    return table


def _model(name: str, simulated: bool) -> str:
    return f"{name} (simulated)" if simulated else name


def _state(state: str, detail: str) -> Text:
    style = {"ready": "green", "loading": "yellow", "draining": "yellow"}.get(state, "red")
    return Text(f"{state} ({detail})" if detail else state, style)
