"""`make test-compose`: build the images, compose up, stream answers, down and up again with all state kept.

Not part of `make test`: it needs a container engine. COMPOSE and BUILD name the commands (`docker compose`,
`docker build`); everything is taken down at the end, volumes included.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import openai

from paceline.processes import free_ports

ROOT = Path(__file__).resolve().parents[2]
IMAGES: dict[str, tuple[str, str]] = {
    "gateway": ("service", "gateway"),
    "batcher": ("service", "batcher"),
    "service": ("service", "service"),
    "verifier": ("model", "verifier"),
    "edge": ("edge", "edge"),
}
"""Image: (Dockerfile target, extras), as in docker-compose.yml."""
TAG = "test"
MODEL = "smollm2"
READY_S = 600.0
STARTED = time.monotonic()
SERVICES = ("gateway", "batcher", "verifier", "drafter", "policy", "migrator")
WITHOUT_LLAMA = ("gateway", "batcher", "policy", "migrator")
HAS_LLAMA = "import importlib.util as u, sys; sys.exit(u.find_spec('llama_cpp') is None)"
QUESTION = "Name three colours of the rainbow."
LENGTH = 48


@dataclass(frozen=True)
class Engine:
    """The commands of a container engine, and the environment that compose reads."""

    compose: str
    build: str
    environment: dict[str, str]

    def images(self) -> None:
        for image, (target, extras) in IMAGES.items():
            step(f"building paceline-{image}")
            arguments = ["--target", target, "--build-arg", f"EXTRAS={extras}", "-t", f"paceline-{image}:{TAG}", "."]
            self._run([*shlex.split(self.build), *arguments])

    def up(self) -> None:
        step("compose up")
        self._run([*shlex.split(self.compose), "up", "-d", "--no-build"])

    def down(self, *options: str) -> None:
        step(" ".join(["compose down", *options]))
        self._run([*shlex.split(self.compose), "down", *options])

    def logs(self) -> None:
        subprocess.run([*shlex.split(self.compose), "logs", "--tail", "40"], cwd=ROOT, env=self._all(), check=False)

    def inside(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a container; its exit code is the caller's to judge."""
        whole = [*shlex.split(self.compose), "exec", "-T", service, *command]
        return subprocess.run(whole, cwd=ROOT, env=self._all(), check=False, capture_output=True, text=True)

    def edge(self, key: str, *arguments: str) -> str:
        """What the edge image's command line prints."""
        whole = [*shlex.split(self.compose), "run", "--rm", "-T", "edge", *arguments]
        environment = {**self._all(), "PACELINE_API_KEY": key}
        return subprocess.run(whole, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout

    def _run(self, command: list[str]) -> None:
        subprocess.run(command, cwd=ROOT, env=self._all(), check=True)

    def _all(self) -> dict[str, str]:
        return {**os.environ, **self.environment}


def step(text: str) -> None:
    sys.stdout.write(f"--- {time.monotonic() - STARTED:5.0f} s  {text}\n")
    sys.stdout.flush()


def healthy(engine: Engine) -> None:
    """Every service passes its own health check. The gateway's, which `up` waits for, comes after most of them."""
    deadline = time.monotonic() + READY_S
    for service in SERVICES:
        while (said := engine.inside(service, "ready")).returncode:
            if time.monotonic() > deadline:
                raise SystemExit(f"{service} is not ready after {READY_S:.0f} s: {said.stderr or said.stdout}")
            time.sleep(1)
    step(f"healthy: {', '.join(SERVICES)}")


def wait_served(url: str) -> None:
    """Until the published port answers /readyz with 200."""
    deadline, said = time.monotonic() + READY_S, "nothing"
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return
        except urllib.error.HTTPError as error:
            said = error.read().decode()
        except OSError as error:
            said = str(error)
        time.sleep(1)
    raise SystemExit(f"not ready after {READY_S:.0f} s: {said}")


def by_openai(url: str, key: str) -> str:
    """One streamed answer, through the official client."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=120, max_retries=0) as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": QUESTION}], max_tokens=LENGTH, temperature=0, stream=True
        )
        parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    text = "".join(parts)
    step(f"openai, {len(parts)} chunks: {text!r}")
    return text


def by_curl(url: str, key: str) -> str:
    """The same, as a user without any library asks."""
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": MODEL, "stream": True, "max_tokens": LENGTH, "temperature": 0, "messages": messages}
    command = ["curl", "-sSN", "--fail-with-body", "--max-time", "120", f"{url}/v1/chat/completions"]
    headers = ["-H", f"Authorization: Bearer {key}", "-H", "Content-Type: application/json"]
    told = subprocess.run([*command, *headers, "-d", json.dumps(body)], check=True, stdout=subprocess.PIPE, text=True)
    events = [line.removeprefix("data: ") for line in told.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", told.stdout
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    step(f"curl, {len(events)} events: {text!r}")
    return text


def by_edge(engine: Engine, key: str) -> str:
    """The same from a device: the edge image drafts, the cloud verifies."""
    told = json.loads(engine.edge(key, "run", QUESTION, "--max-tokens", str(LENGTH), "--temperature", "0", "--json"))
    text = str(told["text"])
    step(f"edge: {text!r}")
    return text


def key_of(engine: Engine) -> str:
    """The API key that the stack made for itself; it is an admin's."""
    listed = engine.inside("gateway", "python", "-m", "services.gateway.keys", "list", "--file", "/keys/keys.toml")
    assert listed.stdout.split()[1:] == ["local", "admin"], listed
    return engine.inside("gateway", "cat", "/keys/key").stdout.strip()


def stored(engine: Engine) -> set[str]:
    """Sessions in Redis; finished ones stay for ten minutes."""
    return set(engine.inside("redis", "redis-cli", "--scan", "--pattern", "pl:s:*:rec").stdout.split())


def check(engine: Engine, url: str) -> None:
    engine.up()
    healthy(engine)
    wait_served(url)
    for service in WITHOUT_LLAMA:
        assert engine.inside(service, "python", "-c", HAS_LLAMA).returncode, f"llama.cpp is in the image of {service}"
    key = key_of(engine)
    text = by_openai(url, key)
    assert len(text) > 20, text
    assert by_curl(url, key) == text, "curl got another answer"
    assert by_edge(engine, key) == text, "the edge got another answer"
    before = stored(engine)
    engine.down()
    engine.up()
    healthy(engine)
    wait_served(url)
    assert before and before <= stored(engine), "Redis lost sessions"
    assert key_of(engine) == key, "the key did not survive"
    assert by_openai(url, key) == text, "the same question has another answer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compose", default="docker compose")
    parser.add_argument("--build", default="docker build")
    parser.add_argument("--no-images", action="store_true", help="use the images of the last time")
    chosen = parser.parse_args()
    http, nats, redis = free_ports(3)
    ports = {"HTTP_PORT": str(http), "NATS_PORT": str(nats), "REDIS_PORT": str(redis)}
    engine = Engine(
        chosen.compose, chosen.build, {**ports, "PACELINE_TAG": TAG, "COMPOSE_PROJECT_NAME": "paceline-test"}
    )
    try:
        if not chosen.no_images:
            engine.images()
        attempt(engine, lambda: check(engine, f"http://127.0.0.1:{http}"))
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"`{shlex.join(error.cmd)}` ended with code {error.returncode}") from None
    except FileNotFoundError as error:
        raise SystemExit(f"there is no command `{error.filename}`: COMPOSE and BUILD name the engine's") from None
    step("compose works: up, healthy, streamed, down and up again")


def attempt(engine: Engine, work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException:
        engine.logs()
        raise
    finally:
        engine.down("-v")


if __name__ == "__main__":
    main()
