"""A grid's report as Markdown tables. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from loadgen.grid_figures import crossing
from loadgen.grid_plan import ALL_MODES
from loadgen.prompts import EVERYDAY

Cell = Mapping[str, Any]


def markdown(report: Mapping[str, Any], plots: Mapping[str, Sequence[str]] | None = None) -> str:
    """plots: file names by group title, shown under it."""
    parts = [_head(report), _summary(report["summary"])]
    for title, cells in groups(report["cells"]):
        shown = "\n\n".join(f"![{title}]({name})" for name in (plots or {}).get(title, ()))
        parts += [f"## {title}", _latency(cells), _work(cells), _crossings(cells), shown]
    return "\n\n".join(part for part in [*parts, _replays(report["replay_checks"])] if part) + "\n"


def groups(cells: Iterable[Cell]) -> list[tuple[str, list[Cell]]]:
    """Cells that differ in the round trip only, nearest first, under a title."""

    def key(cell: Cell) -> tuple[str, int, float]:
        return cell["pair"], cell["sessions"], cell["temperature"]

    ordered = sorted(cells, key=lambda cell: (*key(cell), cell["rtt_ms"]))
    return [(title_of(*values), list(group)) for values, group in groupby(ordered, key)]


def title_of(pair: str, sessions: int, temperature: float) -> str:
    return f"{pair}, {sessions} session{'s' if sessions > 1 else ''}, temperature {temperature:g}"


def _repeats(count: int) -> str:
    return "one repeat" if count == 1 else f"{count} interleaved repeats"


def modes_in(cells: Sequence[Cell]) -> list[str]:
    return [name for name in ALL_MODES if any(name in cell["modes"] for cell in cells)]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _head(report: Mapping[str, Any]) -> str:
    machine, terms = report["machine"], report["terms"]
    prompts = f"{terms['prompts']} prompts of the set `{terms.get('prompt_set', EVERYDAY.name)}`"
    simulated = " **The engine was simulated: no time here is a model's.**" if report["simulated"] else ""
    return (
        f"# Grid\n\nCommit {report['commit']}, {report['started']}, {machine['cores']} x {machine['cpu']}, "
        f"{machine['memory_gib']} GiB; {prompts} (one a session where there are more) x "
        f"{terms['tokens']} tokens, {_repeats(terms['repeats'])}.{simulated} "
        f"{_texts(report['divergences'])}\n\n"
        "Milliseconds a token, the median of the repeats; in brackets what the theory expects from quantities "
        "measured in the cell. `deep` and `deep_alt` are Paceline without fill, `edge` is the draft model alone and "
        "gives another text. How it is measured: docs/benchmarks.md."
    )


def _texts(divergences: Sequence[Mapping[str, Any]]) -> str:
    if not divergences:
        return "All texts were identical."
    known = [split["margin"] for split in divergences if split["margin"] is not None]
    largest = f", the largest margin {max(known):.2g}" if known else ""
    unknown = f", {len(divergences) - len(known)} of unknown margin" if len(known) < len(divergences) else ""
    return f"Texts were identical but for {len(divergences)} near ties{largest}{unknown}."


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    head = ["", "cells", "latency, Paceline / best baseline: worst", "throughput, Paceline / best baseline: least",
            "while all decode: least", "speed-up over sync"]  # fmt: skip
    return table(head, [_summary_row(row) for row in rows])


def _summary_row(row: Mapping[str, Any]) -> list[str]:
    speed_up = row["speed_up_over_sync"]
    return [
        title_of(row["pair"], row["sessions"], row["temperature"]),
        str(row["cells"]),
        f"{row['itl_ratio_worst']:.2f} at {row['itl_ratio_worst_at_ms']:g} ms",
        f"{row['tokens_per_s_ratio_least']:.2f} at {row['tokens_per_s_ratio_least_at_ms']:g} ms",
        _number(row.get("tokens_per_s_full_ratio_least"), ".2f"),
        "-" if speed_up is None else f"{speed_up[0]:.2f} to {speed_up[1]:.2f}",
    ]


def _latency(cells: Sequence[Cell]) -> str:
    modes = modes_in(cells)
    head = ["round trip ms", *modes, "best baseline", "Paceline / best"]
    return table(head, [_latency_row(cell, modes) for cell in cells])


def _latency_row(cell: Cell, modes: Sequence[str]) -> list[str]:
    ratios = cell["ratios"]
    best = ratios.get("best_baseline", "-")
    return [f"{cell['rtt_ms']:g}", *(_itl(cell, name) for name in modes), best, _number(ratios.get("itl"), ".2f")]


def _itl(cell: Cell, name: str) -> str:
    mode = cell["modes"].get(name)
    if mode is None:
        return "-"
    expected = cell["predicted"].get(name)
    block = f", g {mode['g']}" if "g" in mode else ""
    return f"{mode['itl_ms_mean']:.1f}" + (f" ({expected:.1f}{block})" if expected else f" (-{block})" if block else "")


def _work(cells: Sequence[Cell]) -> str:
    """What the verifier and the link do for it."""
    head = ["round trip ms", "mode", "tokens/s", "while all decode", "spread ms", "p99 ms", "first ms", "steps a token",
            "verified a token", "accepted of the verified", "bytes up", "bytes down", "not recorded"]  # fmt: skip
    rows = [_work_row(cell, name, cell["modes"][name]) for cell in cells for name in modes_in([cell])]
    return "<details><summary>throughput, verifier work, bytes</summary>\n\n" + table(head, rows) + "\n\n</details>"


def _work_row(cell: Cell, name: str, mode: Mapping[str, Any]) -> list[str]:
    low, high = mode["spread"]
    return [
        f"{cell['rtt_ms']:g}", name, _number(mode["tokens_per_s"], ".1f"),
        _number(mode.get("tokens_per_s_full"), ".1f"), f"{low:.1f}-{high:.1f}",
        _number(mode["itl_ms_p99"], ".0f"), _number(mode["ttft_ms_p50"], ".0f"),
        _number(mode["verifier_steps_per_token"], ".2f"), _number(mode["verifier_tokens_per_token"], ".2f"),
        _number(mode["acceptance"], ".0%"), _number(mode["bytes_up_per_drafted_token"], ".1f"),
        _number(mode["bytes_down_per_committed_token"], ".1f"), _number(mode.get("replay_misses"), ".1%"),
    ]  # fmt: skip


def _crossings(cells: Sequence[Cell]) -> str:
    """Break-even: the round trip at which a mode becomes slower than cloud-only decoding."""
    said = [f"{name} {crossed}" for name in ("sync", "deep", "deep_alt", "paceline")
            if (crossed := _crossed(cells, name))]  # fmt: skip
    return "Slower than cloud-only decoding from this round trip on: " + "; ".join(said) + "." if said else ""


def _crossed(cells: Sequence[Cell], name: str) -> str:
    points = [(float(cell["rtt_ms"]), over_cloud) for cell in cells if (over_cloud := against_cloud(cell, name))]
    if len(points) < 2:
        return ""
    at = crossing(points)
    if at is None:
        return f"none up to {points[-1][0]:g} ms"
    return f"{at:.0f} ms" if at > points[0][0] else f"at {at:g} ms already"


def against_cloud(cell: Cell, name: str) -> float | None:
    """Latency of a mode over that of cloud-only decoding."""
    modes = cell["modes"]
    if name not in modes or "cloud" not in modes:
        return None
    return float(modes[name]["itl_ms_mean"]) / float(modes["cloud"]["itl_ms_mean"])


def _replays(checks: Sequence[Mapping[str, Any]]) -> str:
    if not checks:
        return ""
    head = ["pair", "same text", "guesses made again live", "of them differing", "replayed", "not recorded",
            "ms a token live", "replayed ms", "pace of one token ms"]  # fmt: skip
    rows = [
        [
            check["pair"], "yes" if check["identical_text"] else "no", str(check["guesses_again"]),
            str(check["differing"]), str(check["guesses_replayed"]), str(check["misses"]),
            f"{check['itl_ms_live']:.1f}", f"{check['itl_ms_replayed']:.1f}", _pace(check["pace_ms"]),
        ]
        for check in checks
    ]  # fmt: skip
    return "## Replay against live drafts\n\n" + table(head, rows)


def _pace(ms: Mapping[Any, float]) -> str:
    return _number({int(tokens): value for tokens, value in ms.items()}.get(1), ".1f")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
