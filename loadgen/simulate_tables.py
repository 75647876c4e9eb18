"""The page that `simulate` writes, as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loadgen.simulate_cells import HEADLINE_MS

Row = Sequence[str]


def page(result: Mapping[str, Any]) -> str:
    objectives = sorted({entry["p99_itl_ms"] for cell in result["cells"] for entry in cell["goodput"]})
    parts = [
        "# Simulated: drafting devices and large accelerators",
        "",
        "Everything on this page is **simulated** in virtual time: step times are rooflines of data sheets, devices "
        "and links are made up, agreement of drafts and targets is resampled from recorded traces. Sessions, tries, "
        "draft trees, the choice of the batch, the fill rule, trust, calibration and price are the product's own code. "
        "Decoding only: prompts are in the KV cache. "
        f"Made by `{' '.join(result['command'])}`, commit {result['commit']}; all figures are in the JSON.",
        "",
        *assumptions(result["assumptions"]),
        "## Goodput",
        "",
        "The most tokens per second whose 99th percentile of inter-token latency, counted per token at the client, "
        "keeps the objective; over the number of sessions and what each scheme can be tuned by (JSON: `g`, `drafter`, "
        "`step_tokens`, `patience_ms`, which is PACELINE_FILL_WITHIN_S of a batcher). "
        "Co-located is the better of a small model and a drafting head on the same accelerator. In brackets: sessions.",
        "",
    ]
    for objective in objectives:
        parts += [f"### p99 of inter-token latency at most {objective:g} ms", "", *goodput(result, objective), ""]
    return "\n".join([*parts, *figures(result)]) + "\n"


def assumptions(given: Mapping[str, Any]) -> list[str]:
    gpus = "; ".join(
        f"{name} {gpu['bandwidth'] / 1e12:.3g} TB/s, {gpu['peak16'] / 1e12:g}/{gpu['peak8'] / 1e12:g} TFLOP/s "
        f"(16/8 bit), {gpu['memory'] / 1e9:g} GB, {gpu['usd_per_hour']:g} $/h"
        for name, gpu in given["gpus"].items()
    )
    edges = "; ".join(
        f"{name} {1000 * edge['draft_s']:g} ms a token, acceptance {edge['acceptance']:g}"
        for name, edge in given["edges"].items()
    )
    return [
        f"Accelerators ({given['bandwidth_share']:.0%} of the bandwidth and {given['peak_share']:.0%} of the peak "
        f"reached; prices are assumptions): {gpus}. Devices: {edges}. A server's small model drafts at the device's "
        f"acceptance, its drafting head at {given['head_acceptance']:g}; their weights and KV take room from sessions. "
        f"Links jitter by {given['jitter']:.0%} of the round trip.",
        "",
    ]


def goodput(result: Mapping[str, Any], objective: float) -> list[str]:
    schemes = ("plain", "co-located", "synchronous", "Paceline")
    ratios = ("over plain", "over co-located", "$ a million tokens: plain", "Paceline")
    head = ("accelerator", "model", "context", "device", "round trip ms", *schemes, *ratios)
    rows = []
    for cell in result["cells"]:
        entry = next(item for item in cell["goodput"] if item["p99_itl_ms"] == objective)
        rows.append(
            (
                cell["gpu"], cell["llm"], f"{cell['context']}", cell["edge"], f"{cell['rtt_ms']:g}",
                *(_run(entry[mode]) for mode in ("plain", "colocated", "sync", "paceline")),
                _ratio(entry.get("over_plain")), _ratio(entry.get("over_colocated")),
                *(_usd(entry[mode]) for mode in ("plain", "paceline")),
            )
        )  # fmt: skip
    return table(head, rows)


def figures(result: Mapping[str, Any]) -> list[str]:
    paces = ", ".join(f"{panel['t_d_over_t_1']:g}" for panel in result["break_even"])
    return [
        "## Figures",
        "",
        "Goodput over that of plain decoding; a missing bar: no load keeps the objective. Labels: accelerator, model, "
        "context in tokens, device, round trip.",
        "",
        f"![Goodput at {HEADLINE_MS:g} ms](simulate-goodput.png)",
        "",
        "The same from few sessions to many: throughput against the 99th percentile of inter-token latency.",
        "",
        "![Throughput against latency](simulate-latency.png)",
        "",
        f"One session on an otherwise idle verifier, by round trip and acceptance, for t_d / t_1 of {paces}; bubbles "
        "are filled. The line is where drafts alone (deep window, closed form) break even with plain decoding.",
        "",
        "![Break-even map](simulate-break-even.png)",
        "",
        "Price and chain length of a verifier on which up to 64 tokens a step are free, while sessions join and leave.",
        "",
        "![Price](simulate-price.png)",
    ]


def table(head: Row, rows: Iterable[Row]) -> list[str]:
    return [_line(head), _line(["---"] * len(head)), *(_line(row) for row in rows)]


def _line(cells: Row) -> str:
    return f"| {' | '.join(cells)} |"


def _run(run: Mapping[str, Any] | None) -> str:
    return "-" if run is None else f"{run['tokens_per_s']:.0f} ({run['sessions']})"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _usd(run: Mapping[str, Any] | None) -> str:
    return "-" if run is None else f"{run['usd_per_million']:.2f}"
