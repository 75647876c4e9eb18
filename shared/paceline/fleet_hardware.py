"""What the simulated fleet runs on: accelerators, models, edge devices, and what a step costs there. Pure.

Figures are from public data sheets and model cards; nothing here was measured. Bytes, floating-point operations, and
seconds. Speeds are the dense ones (no structured sparsity).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Gpu:
    """peak16 and peak8: dense operations per second with 16 and 8 bits. Without 8-bit arithmetic peak8 is peak16."""

    name: str
    bandwidth: float
    peak16: float
    peak8: float
    memory: float
    usd_per_hour: float
    source: str


@dataclass(frozen=True)
class Llm:
    """A decoder with grouped-query attention. `bits`: 16 or 8, of the weights; the KV cache has 16.

    attended: layers whose KV grows with the context (a drafting head has one, whatever its width)."""

    name: str
    parameters: float
    attended: int
    heads: int
    kv_heads: int
    head_size: int
    bits: int = 16

    @property
    def weights(self) -> float:
        return self.parameters * self.bits / 8

    @property
    def kv_per_token(self) -> float:
        return 2 * 2 * self.attended * self.kv_heads * self.head_size

    @property
    def attention_flops(self) -> float:
        """For one query token and one token of context: scores and weighted sum."""
        return 4.0 * self.attended * self.heads * self.head_size


@dataclass(frozen=True)
class Edge:
    """A device that drafts. draft_s: one token; a further row in the same pass costs `row` of that, and `paths` are
    drafted at once at most. acceptance: of its drafter, None leaves that of the trace."""

    name: str
    draft_s: float
    acceptance: float | None
    row: float = 0.35
    paths: int = 4


@dataclass(frozen=True)
class StepCost:
    """Roofline of one step: the layers' weights are read once or their arithmetic takes longer; then attention reads
    the KV cache of every session in the step, once however many of its tokens are verified.

    bandwidth_share and peak_share: what a good kernel reaches of the data sheet. overhead_s: scheduling, sampling and
    launches of a step."""

    gpu: Gpu
    llm: Llm
    bandwidth_share: float = 0.8
    peak_share: float = 0.6
    overhead_s: float = 0.0015

    @property
    def bandwidth(self) -> float:
        return self.gpu.bandwidth * self.bandwidth_share

    @property
    def peak(self) -> float:
        return (self.gpu.peak8 if self.llm.bits == 8 else self.gpu.peak16) * self.peak_share

    def step_s(self, tokens: float, context: float, per_session: float = 1.0) -> float:
        """`tokens` fed; `context`: KV tokens of all sessions in the step; `per_session`: tokens fed for each."""
        layers = max(self.llm.weights / self.bandwidth, 2 * self.llm.parameters * tokens / self.peak)
        attention = context * max(
            self.llm.kv_per_token / self.bandwidth,
            per_session * self.llm.attention_flops / (self.gpu.peak16 * self.peak_share),
        )
        return layers + attention + self.overhead_s

    @property
    def saturating_tokens(self) -> float:
        """Tokens a step up to which a further one costs nothing in the layers."""
        return self.llm.weights / self.bandwidth * self.peak / (2 * self.llm.parameters)

    def sessions(self, length: int, drafter: Llm | None = None, usable: float = 0.9) -> int:
        """Sessions of `length` tokens whose KV fits, beside the weights and that of a server's drafter."""
        weights, kv = self.llm.weights, self.llm.kv_per_token
        if drafter is not None:
            weights, kv = weights + drafter.weights, kv + drafter.kv_per_token
        return max(0, int((usable * self.gpu.memory - weights) / (kv * length)))


_NVIDIA = "NVIDIA data sheet"
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100-80", 2.039e12, 312e12, 312e12, 80e9, 1.79, f"{_NVIDIA}, A100 80GB SXM"),
        Gpu("L40S", 0.864e12, 362e12, 733e12, 48e9, 0.86, f"{_NVIDIA}, L40S"),
        Gpu("H200", 4.8e12, 989e12, 1979e12, 141e9, 3.79, f"{_NVIDIA}, H200 SXM"),
    )
}
"""usd_per_hour: an assumption, near what GPU clouds ask on demand; it scales the costs and no ratio."""

LLMS = {
    llm.name: llm
    for llm in (
        Llm("llama-8b", 8.03e9, 32, 32, 8, 128),
        Llm("llama-8b-fp8", 8.03e9, 32, 32, 8, 128, bits=8),
        Llm("qwen-32b-fp8", 32.8e9, 64, 64, 8, 128, bits=8),
        Llm("llama-70b-fp8", 70.6e9, 80, 64, 8, 128, bits=8),
    )
}
DRAFTERS = {
    "llama-8b": Llm("llama-1b", 1.24e9, 16, 32, 8, 64),
    "llama-8b-fp8": Llm("llama-1b-fp8", 1.24e9, 16, 32, 8, 64, bits=8),
    "qwen-32b-fp8": Llm("qwen-0.6b-fp8", 0.6e9, 28, 16, 8, 128, bits=8),
    "llama-70b-fp8": Llm("llama-1b-fp8", 1.24e9, 16, 32, 8, 64, bits=8),
}
"""The small model of the family that a server drafts with, by target."""


def drafting_head(target: Llm) -> Llm:
    """A head of one layer on the target's own states, as EAGLE-3 has: about a twentieth of an 8B target's weights."""
    share = 0.05 if target.parameters < 2e10 else 0.025
    return replace(target, name=f"{target.name}-head", parameters=share * target.parameters, attended=1)


HEAD_ACCEPTANCE = 0.75
"""Chance that a drafting head's next token fits (chains, not trees): an assumption in the range that is reported."""

EDGES = {
    edge.name: edge
    for edge in (
        Edge("phone", 0.060, 0.6, row=0.5),
        Edge("laptop CPU", 0.025, 0.75, row=0.35),
        Edge("desktop GPU", 0.008, 0.9, row=0.1),
    )
}
