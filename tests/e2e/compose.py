"""`make test-compose`: build the images, compose up, stream an answer, down and up again, the same answer.

Not part of `make test`: it needs a container engine. COMPOSE and BUILD name the commands (`docker compose`,
`docker build`); everything is taken down at the end, volumes included.
"""

from __future__ import annotations

import argparse
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
QUESTION = "Name three colours of the rainbow."


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

    def key(self) -> str:
        """The API key that the stack made for itself."""
        command = [*shlex.split(self.compose), "exec", "-T", "gateway", "cat", "/keys/key"]
        return subprocess.run(
            command, cwd=ROOT, env=self._all(), check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()

    def _run(self, command: list[str]) -> None:
        subprocess.run(command, cwd=ROOT, env=self._all(), check=True)

    def _all(self) -> dict[str, str]:
        return {**os.environ, **self.environment}


def step(text: str) -> None:
    sys.stdout.write(f"--- {text}\n")
    sys.stdout.flush()


def wait_ready(url: str) -> None:
    """Until /readyz says 200. The image's health check asks the same."""
    deadline, said = time.monotonic() + READY_S, "nothing"
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
                step(f"ready: {answer.read().decode()}")
                return
        except urllib.error.HTTPError as error:
            said = error.read().decode()
        except OSError as error:
            said = str(error)
        time.sleep(1)
    raise SystemExit(f"not ready after {READY_S:.0f} s: {said}")


def answer(url: str, key: str) -> str:
    """One streamed answer, through the official client."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=120, max_retries=0) as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": QUESTION}], max_tokens=48, temperature=0, stream=True
        )
        parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    text = "".join(parts)
    step(f"{len(parts)} chunks: {text!r}")
    return text


def check(engine: Engine, url: str) -> None:
    engine.up()
    wait_ready(url)
    key = engine.key()
    first = answer(url, key)
    assert len(first) > 20, first
    engine.down()
    engine.up()
    wait_ready(url)
    assert engine.key() == key, "the key did not survive"
    assert answer(url, key) == first, "the same question has another answer"


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
    if not chosen.no_images:
        engine.images()
    attempt(engine, lambda: check(engine, f"http://127.0.0.1:{http}"))
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
