"""The only reader of the environment: frozen settings, units in the names, loud on bad values.

Every field is the variable PACELINE_<FIELD IN CAPITALS>; an empty value counts as not set.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, JsonValue, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from paceline.errors import SettingsError

PREFIX = "PACELINE_"

Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/paceline, else ~/.cache/paceline."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def unique_instance() -> str:
    """host-pid-xxxx: readable, and never the same twice, as leases and epochs need."""
    host = "".join(c if c.isalnum() or c in "-_" else "-" for c in socket.gethostname())[:40]
    return f"{host}-{os.getpid()}-{secrets.token_hex(2)}"


def _object(value: object) -> object:
    """An environment variable is text."""
    return json.loads(value) if isinstance(value, str) else value


class _Base(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=True, protected_namespaces=()
    )

    @classmethod
    def load(cls, **values: Any) -> Self:
        """From the environment, `values` winning over it. Raises SettingsError naming each variable and its value."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise SettingsError("; ".join(_explain(item) for item in error.errors())) from None

    @classmethod
    def of(cls, **values: Any) -> Self:
        """From `values` and the defaults alone, whatever the environment says."""
        plain = _isolated(cls).load(**values)
        return cls.model_construct(**{name: getattr(plain, name) for name in cls.model_fields})

    def environment(self) -> dict[str, str]:
        """The variables that give a child process these settings (values that are not set left out)."""
        plain = self.model_dump(exclude_none=True)
        return {PREFIX + name.upper(): _text(value) for name, value in plain.items()}


class Settings(_Base):
    """Of one process. Each service reads what concerns it."""

    nats_url: str = "nats://127.0.0.1:4222"
    redis_url: str = "redis://127.0.0.1:6379/0"
    instance: Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,64}$")] = Field(default_factory=unique_instance)
    """Name of this process on the bus; two live processes must never share one."""

    model: str = "smollm2"
    models_dir: Path = Field(default_factory=lambda: cache_dir() / "models")
    catalog_file: Path | None = None
    engine: Literal["llama", "vllm", "simulated"] = "llama"
    """Of the target; a hosted drafter beside vllm drafts with llama."""
    vllm_model: Path | None = None
    """Folder that vLLM reads (config.json, safetensors, tokenizer.json); None: made of the pair's GGUF target."""
    vllm_options: Annotated[dict[str, JsonValue], NoDecode, BeforeValidator(_object)] = Field(default_factory=dict)
    """Engine arguments of vLLM as a JSON object: tensor_parallel_size, pipeline_parallel_size, dtype,
    distributed_executor_backend ("ray"), ..."""
    simulated_file: Path | None = None
    """JSON that describes the simulated engine (paceline.engine_simulated)."""

    http_host: str = "127.0.0.1"
    http_port: Port = 8080
    health_host: str = "127.0.0.1"
    health_port: Port = 0
    """Port of /healthz, /readyz and /metrics; 0: none. The gateway serves them on http_port."""
    keys_file: Path | None = None
    keepalive_s: Seconds = 10
    max_body_bytes: Positive = 8 << 20

    threads: Positive = 1
    context_tokens: Positive | None = None
    """None: what the model was trained for."""
    cells: Positive | None = None
    """KV cells of the target, shared by all sessions; None: four contexts, on vLLM what there is room for."""
    draft_cells: Positive | None = None
    """KV cells of the hosted drafter, shared by all sessions; None: two contexts. A session that finds no room there
    goes on without drafts."""
    chunk_tokens: Positive = 64
    """Longest prefill chunk in one step, of the target or the hosted drafter: what another session waits for at
    most."""
    max_step_tokens: Positive = 256
    """Draft and decode tokens in one verify step, prefill chunk not counted."""
    max_sessions: Positive = 256
    fill_within_s: Annotated[float, Field(ge=0)] | None = None
    """A session that waits for drafts is filled after this time at the latest, even where its verifier's time would
    earn more elsewhere: latency bought with throughput. None: where that costs others no more than it brings."""

    lease_ttl_s: Seconds = 3
    presence_ttl_s: Seconds = 2
    parked_ttl_s: Seconds = 60
    drain_s: Seconds = 10
    connect_s: Seconds = 60
    """How long a starting process waits for NATS and Redis before it gives up."""

    gateway_url: str = "http://127.0.0.1:8080"
    api_key: SecretStr | None = None
    """Of the edge client."""
    draft_threads: Positive = 1

    otlp_endpoint: str | None = None
    """Base URL of an OTLP/HTTP collector; None: no tracing."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool = False


class StackSettings(_Base):
    """Of `python -m paceline.stack`: ports of the servers (0: any free one) and how many of each."""

    state_dir: Path = Path(".state")
    nats_port: Port = 4222
    redis_port: Port = 6379
    http_port: Port = 8080
    verifiers: Annotated[int, Field(ge=0, le=64)] = 1
    vllm_python: Path | None = None
    """Interpreter of an environment with vLLM: the verifiers run in it, on vLLM. None: on llama.cpp, in this one."""


B = TypeVar("B", bound=_Base)


def _isolated(kind: type[B]) -> type[B]:
    """The same class without the environment as a source."""
    sources = classmethod(lambda _cls, _kind, init_settings, *_rest, **_named: (init_settings,))
    return type(kind.__name__, (kind,), {"settings_customise_sources": sources, "__doc__": kind.__doc__})


def unknown_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """PACELINE_ variables that nobody reads, most likely misspelt, with a word on what may have been meant."""
    names = os.environ if environment is None else environment
    known = {PREFIX + field.upper() for kind in (Settings, StackSettings) for field in kind.model_fields}
    unknown = sorted(name for name in names if name.startswith(PREFIX) and name not in known)
    return {name: _meant(get_close_matches(name, known, 1, cutoff=0.8)) for name in unknown}


def _meant(similar: Sequence[str]) -> str:
    return f"{similar[0]} is meant, perhaps" if similar else "no such setting"


def child_environment(settings: Mapping[str, str], **extra: str) -> dict[str, str]:
    """The environment of a child process: ours (PATH, VLLM_LOGGING_LEVEL, NCCL_SOCKET_IFNAME, ...), then `settings`,
    then `extra`. PACELINE_ variables of this process are not handed on: a child has exactly the settings it was
    given."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return {**base, **settings, **extra}


def _text(value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _explain(item: Any) -> str:
    field = str(item["loc"][0]) if item["loc"] else "settings"
    shown = "***" if field == "api_key" else repr(item.get("input"))
    return f"{PREFIX}{field.upper()}={shown}: {item['msg']}"
