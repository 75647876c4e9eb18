"""Metrics have closed labels; trace context is carried and baggage is not; logs are one line of JSON each."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from opentelemetry import trace

from paceline.telemetry import (
    ACCEPTED_TOKENS,
    READY,
    STEP_SECONDS,
    TABLE,
    Metrics,
    links,
    outgoing_headers,
    receiving,
    start_tracing,
)

PARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


def test_unknown_label_values_become_other() -> None:
    metrics = Metrics()
    before = len(metrics.text().splitlines())
    for number in range(2000):
        metrics.add(ACCEPTED_TOKENS, source=f"user text {number}")
    metrics.add(ACCEPTED_TOKENS, 3, source="edge")
    assert metrics.value(ACCEPTED_TOKENS, source="edge") == 3
    assert metrics.value(ACCEPTED_TOKENS, source="anything") == 2000
    assert len(metrics.text().splitlines()) - before < 10


def test_unknown_label_names_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="accepted_tokens has the labels"):
        Metrics().add(ACCEPTED_TOKENS, tenant="x")


def test_every_row_is_exposed_under_its_name() -> None:
    metrics = Metrics()
    metrics.set(READY, 1)
    metrics.observe(STEP_SECONDS, 0.02)
    text = metrics.text().decode()
    for row in TABLE.values():
        assert f"# HELP paceline_{row.name}" in text
    assert metrics.value(STEP_SECONDS) == 1
    assert "paceline_ready 1.0" in text


def test_rows_that_measure_carry_their_unit() -> None:
    for row in TABLE.values():
        if row.kind == "histogram":
            assert row.name.rpartition("_")[2] in {"seconds", "tokens", "items", "bytes"}, row.name


def test_a_sender_s_trace_is_current_while_receiving() -> None:
    with receiving("draft.m.1", {"traceparent": PARENT}):
        assert f"{trace.get_current_span().get_span_context().trace_id:032x}" == PARENT.split("-")[1]
        headers = outgoing_headers()
    assert headers["traceparent"].split("-")[1] == PARENT.split("-")[1]
    assert outgoing_headers() == {}


@pytest.mark.parametrize("broken", ["", "x", "00-0-0-00", "ff" * 4000])
def test_a_broken_context_is_ignored(broken: str) -> None:
    with receiving("draft.m.1", {"traceparent": broken}):
        assert outgoing_headers() == {}


def test_baggage_is_neither_read_nor_handed_on() -> None:
    with receiving("draft.m.1", {"traceparent": PARENT, "baggage": "tenant=ten-b"}):
        assert "baggage" not in outgoing_headers()


def test_links_to_the_senders() -> None:
    assert [link.context.trace_id for link in links([{"traceparent": PARENT}, {}, {"traceparent": "x"}])] == [
        0x0123456789ABCDEF0123456789ABCDEF
    ]


def test_no_endpoint_no_exporter() -> None:
    start_tracing("test", "i", None)()
    assert not trace.get_current_span().get_span_context().is_valid


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)


def test_logs_are_json_lines_with_the_service_and_the_traceback() -> None:
    done = run("""
import logging, structlog
from paceline.telemetry import start_logs
start_logs("verifier", "v-0", "info", True)
structlog.get_logger().info("ready", step_ms=3)
structlog.get_logger().debug("hidden")
logging.getLogger("library").warning("from a %s", "library")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("failed")
""")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["ready", "from a library", "failed"]
    assert all((line["service"], line["instance"]) == ("verifier", "v-0") for line in lines)
    assert lines[0]["step_ms"] == 3
    assert "ZeroDivisionError" in json.dumps(lines[2])


@pytest.mark.parametrize("as_json", [True, False])
def test_a_traceback_shows_no_values(as_json: bool) -> None:
    """Prompts and keys are in local variables."""
    done = run(f"""
import structlog
from paceline.telemetry import start_logs
start_logs("verifier", "v-0", "info", {as_json})
def fail(prompt):
    raise ValueError("no row")
try:
    fail("mine " + "alone")
except ValueError:
    structlog.get_logger().exception("failed")
""")
    assert "no row" in done.stderr
    assert "in fail" in done.stderr or '"fail"' in done.stderr
    assert "mine alone" not in done.stderr


def test_a_collector_that_is_away_delays_nothing() -> None:
    done = run("""
import time
from paceline.telemetry import start_logs, start_tracing, tracer
start_logs("t", "i", "info", False)
end = start_tracing("t", "i", "http://127.0.0.1:9")
started = time.monotonic()
for _ in range(20_000):
    with tracer.start_as_current_span("x"):
        pass
serving, started = time.monotonic() - started, time.monotonic()
end()
print(serving, time.monotonic() - started)
""")
    serving, ending = map(float, done.stdout.split())
    assert serving < 5
    assert ending < 6
    assert len(done.stderr.splitlines()) <= 2
