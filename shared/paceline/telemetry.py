"""Every metric, span and attribute name, the set-up of logs, metrics and traces, and trace context in headers.

Metrics count events; rates and shares are made by queries. Label values come from closed lists: a value that is not
in the list is counted as `other`, so no text from outside can make a new time series.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from structlog.tracebacks import ExceptionDictTransformer

from paceline.plain_log import console_renderer

# --- spans and attributes ---

SPAN_REQUEST = "gateway.request"
SPAN_EDGE_SESSION = "gateway.edge_session"
SPAN_OPEN = "batcher.open"
SPAN_STEP = "batcher.step"
SPAN_VERIFY = "verifier.step"
SPAN_HOSTED = "drafter.session"
SPAN_DRAIN = "migrator.drain"
SPAN_RECEIVE = "bus.receive"

ATTR_SESSION = "paceline.session"
ATTR_TENANT = "paceline.tenant"
ATTR_MODEL = "paceline.model"
ATTR_VERIFIER = "paceline.verifier"
ATTR_DRAFTED = "paceline.drafted_tokens"
ATTR_ACCEPTED = "paceline.accepted_tokens"
ATTR_ITEMS = "paceline.batch_items"
ATTR_FINISH = "paceline.finish"
ATTR_SUBJECT = "messaging.destination.name"

# --- metrics ---

OTHER = "other"
_SOURCES = ("edge", "hosted", "lookup")
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Metric:
    """One row of the metrics table. The exposed name is paceline_<name>, with `_total` for counters."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Label name to its closed list of values."""
    buckets: tuple[float, ...] = _SECONDS


DRAFTED_TOKENS = Metric("drafted_tokens", "counter", "Draft nodes received, by source", {"source": _SOURCES})
VERIFIED_TOKENS = Metric(
    "verified_tokens", "counter", "Draft nodes put into verify steps, by source", {"source": _SOURCES}
)
ACCEPTED_TOKENS = Metric(
    "accepted_tokens", "counter", "Draft tokens that were accepted, by source", {"source": _SOURCES}
)
REJECTED_TOKENS = Metric("rejected_tokens", "counter", "First mismatches of verified chains")
PLACES = tuple(str(place) for place in range(1, 17))
VERIFIED_PLACES = Metric(
    "verified_places", "counter", "Verified chains that had a draft at this place of theirs (1: the first)",
    {"place": PLACES},
)  # fmt: skip
ACCEPTED_PLACES = Metric(
    "accepted_places", "counter", "Of those, the ones that were accepted up to and at this place", {"place": PLACES}
)
COMMITTED_TOKENS = Metric(
    "committed_tokens", "counter", "Completion tokens committed, by kind",
    {"kind": ("accepted", "corrected", "bonus", "filled")},
)  # fmt: skip
DROPPED_TOKENS = Metric(
    "dropped_tokens", "counter", "Draft nodes that were dropped, by reason",
    {"reason": ("stale", "duplicate", "overflow", "refused", "gap")},
)  # fmt: skip
VERIFY_STEPS = Metric("verify_steps", "counter", "Forward passes of the target")
STEP_TOKENS = Metric("step_tokens", "histogram", "Tokens fed in one forward pass", buckets=_TOKENS)
STEP_ITEMS = Metric("step_items", "histogram", "Sessions in one forward pass", buckets=_TOKENS)
STEP_SECONDS = Metric("step_seconds", "histogram", "Duration of one forward pass of the target")
DRAFT_SECONDS = Metric("draft_token_seconds", "histogram", "Time of the draft model for one token")
OVERHEAD_SECONDS = Metric("overhead_seconds", "histogram", "Draft block received to verify step started, verifier idle")
LOST_BATCHES = Metric(
    "lost_batches", "counter", "Verify batches given up, by reason",
    {"reason": ("no_responders", "reconnect", "timeout", "silent", "refused")},
)  # fmt: skip
DRAFTER_FAILURES = Metric(
    "drafter_failures", "counter", "Hosted drafts that were not to be had, by reason",
    {"reason": ("no_responders", "timeout", "refused", "engine", "no_room", "bus")},
)  # fmt: skip
SESSIONS = Metric("sessions", "gauge", "Sessions of this process, by state", {"state": ("live", "parked", "waiting")})
PARTITIONS = Metric("leased_partitions", "gauge", "Partitions that this batcher holds")
FINISHES = Metric(
    "finished_sessions", "counter", "Sessions that ended, by finish",
    {"finish": ("stop", "length", "cancelled", "error", "history_lost", "lost")},
)  # fmt: skip
KV_CELLS = Metric("kv_cells", "gauge", "KV cells of the target", {"state": ("total", "used")})
EVICTIONS = Metric("kv_evictions", "counter", "Sessions whose KV made room for others")
REQUESTS = Metric(
    "http_requests", "counter", "HTTP requests, by route and status class",
    {"route": ("chat_completions", "completions", "models", "edge", "system", "drain", "health"),
     "status": ("2xx", "4xx", "5xx", "gone")},
)  # fmt: skip
CONNECTIONS = Metric("connections", "gauge", "Open client connections, by kind", {"kind": ("http", "edge")})
PROMPT_TOKENS = Metric("prompt_tokens", "counter", "Prompt tokens of admitted sessions")
FIRST_TOKEN_SECONDS = Metric("first_token_seconds", "histogram", "Request received to first token sent")
TOKEN_SECONDS = Metric("token_seconds", "histogram", "Mean time per completion token after the first, a stream each")
CHUNK_GAP_SECONDS = Metric("chunk_gap_seconds", "histogram", "Time between two chunks of a stream")
REPAIRS = Metric(
    "stream_repairs", "counter", "Verdict gaps filled from the store", {"reason": ("gap", "stall", "epoch")}
)
WAN_BYTES = Metric("wan_bytes", "counter", "Payload bytes of edge frames", {"direction": ("up", "down")})
BUS_REFUSED = Metric(
    "bus_refused_messages", "counter", "Messages answered with a refusal, by reason",
    {"reason": ("malformed", "request_error", "handler_failed")},
)  # fmt: skip
BUS_DROPPED = Metric(
    "bus_dropped_messages", "counter", "Messages that a subscription lost, by reason", {"reason": ("slow_consumer",)}
)
BUS_RECONNECTS = Metric("bus_reconnects", "counter", "Connections to the bus that came back")
STORE_ERRORS = Metric("store_errors", "counter", "Store operations that failed")
STORE_SECONDS = Metric(
    "store_seconds", "histogram", "Duration of a store operation",
    {"operation": ("create", "load", "append", "adopt", "connection", "place", "live", "lease", "heartbeat", "draining",
                   "ping")},
)  # fmt: skip
POLICY_CHANGES = Metric("policy_changes", "counter", "Decisions that differ from the one before")
MOVED_SESSIONS = Metric("moved_sessions", "counter", "Sessions moved to another verifier")
READY = Metric("ready", "gauge", "1 when this process is ready, else 0")

TABLE: dict[str, Metric] = {name: value for name, value in list(globals().items()) if isinstance(value, Metric)}


class Metrics:
    """The metrics of one process, on a registry of its own. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._made: dict[str, Any] = {}
        for metric in TABLE.values():
            self._made[metric.name] = self._make(metric)

    def add(self, metric: Metric, amount: float = 1, **labels: str) -> None:
        """Counters: add; gauges: add or, with a negative amount, take away."""
        self._at(metric, labels).inc(amount)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        self._at(metric, labels).set(value)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        self._at(metric, labels).observe(value)

    def value(self, metric: Metric, **labels: str) -> float:
        """The current value; of a histogram, the number of observations."""
        suffix = {"counter": "_total", "histogram": "_count", "gauge": ""}[metric.kind]
        closed = _closed(metric, labels)
        return self.registry.get_sample_value(f"paceline_{metric.name}{suffix}", closed) or 0.0

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self.registry)

    def _make(self, metric: Metric) -> Any:
        name, names = f"paceline_{metric.name}", list(metric.labels)
        if metric.kind == "histogram":
            return Histogram(name, metric.help, names, registry=self.registry, buckets=metric.buckets)
        kind: Callable[..., Any] = Counter if metric.kind == "counter" else Gauge
        return kind(name, metric.help, names, registry=self.registry)

    def _at(self, metric: Metric, labels: Mapping[str, str]) -> Any:
        made = self._made[metric.name]
        closed = _closed(metric, labels)
        return made.labels(**closed) if closed else made


def _closed(metric: Metric, labels: Mapping[str, str]) -> dict[str, str]:
    if labels.keys() != metric.labels.keys():
        raise ValueError(f"{metric.name} has the labels {sorted(metric.labels)}, got {sorted(labels)}")
    return {name: value if value in metric.labels[name] else OTHER for name, value in labels.items()}


# --- traces ---

END_S = 4.0

_propagator = TraceContextTextMapPropagator()
"""W3C trace context only: baggage from outside is not read and not handed on."""
tracer = trace.get_tracer("paceline")


def outgoing_headers() -> dict[str, str]:
    """The current trace context as message headers; empty when nothing is traced."""
    headers: dict[str, str] = {}
    if trace.get_current_span().get_span_context().is_valid:
        _propagator.inject(headers)
    return headers


@contextmanager
def receiving(subject: str, headers: Mapping[str, str]) -> Iterator[None]:
    """A consumer span under the sender's, current inside the block; nothing when the sender does not trace."""
    if "traceparent" not in headers:
        yield
        return
    parent = _propagator.extract(dict(headers), otel_context.Context())
    with tracer.start_as_current_span(
        SPAN_RECEIVE, parent, kind=trace.SpanKind.CONSUMER, attributes={ATTR_SUBJECT: subject.partition(".")[0]}
    ):
        yield


def links(all_headers: list[Mapping[str, str]]) -> list[trace.Link]:
    """Links to the senders' spans, for work that serves several requests at once."""
    contexts = [_propagator.extract(dict(headers), otel_context.Context()) for headers in all_headers]
    spans = [trace.get_current_span(context).get_span_context() for context in contexts]
    return [trace.Link(span) for span in spans if span.is_valid]


def start_tracing(service: str, instance: str, endpoint: str | None) -> Callable[[], None]:
    """Export spans to an OTLP/HTTP collector when there is an endpoint. Returns what ends it, within END_S even when
    the collector is away (its exporter would go on trying for half a minute)."""
    if endpoint is None:
        return lambda: None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    resource = Resource.create({"service.name": f"paceline-{service}", "service.instance.id": instance})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=2)
    processor = BatchSpanProcessor(exporter, max_queue_size=4096, max_export_batch_size=512, export_timeout_millis=2000)
    provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)

    def stop() -> None:
        ending = threading.Thread(target=processor.shutdown, name="end tracing", daemon=True)
        ending.start()
        ending.join(END_S)

    return stop


# --- logs ---


def start_logs(service: str, instance: str, level: str, as_json: bool) -> None:
    """structlog and the standard library's logging, both to stderr, one format: JSON lines or for people."""
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: Any = structlog.processors.JSONRenderer()
    if not as_json:
        renderer = console_renderer()
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_exceptions(as_json), renderer],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    handler.addFilter(_Rarely("opentelemetry"))
    logging.basicConfig(handlers=[handler], level=number, force=True)
    for noisy in ("nats", "aiohttp.access", "opentelemetry", "asyncio"):
        logging.getLogger(noisy).setLevel(max(number, logging.WARNING))
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service, instance=instance)


class _Rarely(logging.Filter):
    """Lets one record of a chatty library through in EVERY_S: an exporter complains once a span."""

    EVERY_S = 60.0

    def __init__(self, library: str) -> None:
        super().__init__()
        self._library = library
        self._last = -self.EVERY_S

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(self._library):
            return True
        due = record.created - self._last >= self.EVERY_S
        self._last = record.created if due else self._last
        return due


def _exceptions(as_json: bool) -> list[Any]:
    """Without local variables: they hold prompts and keys."""
    if not as_json:
        return []
    return [structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False))]
