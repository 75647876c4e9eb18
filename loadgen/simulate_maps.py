"""Beside the cells of `simulate`: where drafting pays for one session, and the price under a changing load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loadgen.simulate_cells import LONGEST_CHAIN
from paceline import fleet_traces, theory
from paceline.fleet import Fleet, Scenario
from paceline.fleet_hardware import Edge
from paceline.fleet_meter import Link
from paceline.wire import Speculation

MAP_PLAIN_S, MAP_TOKEN_S = 0.030, 0.0003
"""The break-even map's verifier, and what each token adds: far from its roofline."""


@dataclass(frozen=True)
class Map:
    rtts_ms: tuple[float, ...]
    acceptances: tuple[float, ...]
    tokens: int


def break_even(asked: Map, pace: float) -> dict[str, Any]:
    """One session on an otherwise idle verifier, by round trip and acceptance: plain time over Paceline's."""
    edge = Edge("map", pace * MAP_PLAIN_S, None)
    plain_s = map_step_s(1, 0, 1)
    return {
        "label": f"break-even map, t_d / t_1 = {pace:g}",
        "simulated": True,
        "t_d_over_t_1": pace,
        "t_1_ms": 1000 * plain_s,
        "points": [
            _point(rtt_ms, acceptance, edge, plain_s, asked.tokens)
            for rtt_ms in asked.rtts_ms
            for acceptance in asked.acceptances
        ],
    }


def _point(rtt_ms: float, acceptance: float, edge: Edge, plain_s: float, tokens: int) -> dict[str, float]:
    """speedup: over plain decoding. unfilled: the same with nothing in the bubbles, so that the drafts alone carry it.
    busy: verifier seconds a token, in plain steps."""
    figures = {}
    for fill in (True, False):
        scenario = Scenario(
            step_s=map_step_s,
            trace=fleet_traces.load("smollm2-t0.8").at(acceptance),
            edge=edge,
            link=Link(rtt_ms / 1000),
            speculation=Speculation(max_draft=LONGEST_CHAIN, fill=fill),
            endless=True,
        )
        figures[fill] = Fleet(scenario).measured(60, tokens)
    deep_ms = theory.deep(acceptance, 1000 * edge.draft_s, rtt_ms, 1000 * map_step_s(4, 0, 4))
    return {
        "rtt_ms": rtt_ms,
        "acceptance": acceptance,
        "speedup": plain_s * figures[True].tokens_per_s,
        "unfilled": plain_s * figures[False].tokens_per_s,
        "busy": figures[True].busy / (figures[True].tokens_per_s * plain_s),
        "theory_deep": 1000 * plain_s / deep_ms,
    }


def map_step_s(tokens: float, context: float, per_session: float) -> float:
    return MAP_PLAIN_S + MAP_TOKEN_S * tokens


def price_trace(loads: tuple[tuple[float, int], ...], until_s: float) -> dict[str, Any]:
    """Price and chain length while the load jumps, on a verifier that arithmetic bounds soon."""
    scenario = Scenario(
        step_s=price_step_s,
        trace=fleet_traces.load("smollm2-t0.8").at(0.8),
        edge=Edge("e", 0.01, 0.8),
        link=Link(0.06, 0.003),
        load=loads,
        speculation=Speculation(max_draft=8),
        endless=True,
    )
    fleet = Fleet(scenario)
    fleet.run(until_s=until_s)
    steps = [
        {"s": moment.at, "price": moment.price, "smoothed": moment.smoothed, "sessions": moment.running,
         "chain": moment.drafts / max(1, moment.sessions)}
        for moment in fleet.moments
    ]  # fmt: skip
    every = max(1, len(steps) // 250)
    return {"label": "price under a changing load", "simulated": True, "loads": loads, "steps": steps[::every]}


def price_step_s(tokens: float, context: float, per_session: float) -> float:
    """20 ms up to 64 tokens, then arithmetic."""
    return 0.020 * max(1.0, tokens / 64)
