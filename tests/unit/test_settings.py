"""Settings: read from the environment, loud on bad values, handed on to children exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from paceline.errors import SettingsError
from paceline.settings import Settings, StackSettings, child_environment, unknown_variables


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*Settings.model_fields, *StackSettings.model_fields]:
        monkeypatch.delenv(f"PACELINE_{name.upper()}", raising=False)


def test_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = Settings.load()
    assert settings.model == "smollm2"
    assert settings.models_dir == tmp_path / "paceline" / "models"
    assert settings.http_host == "127.0.0.1"
    assert settings.health_port == 0
    assert settings.api_key is None


def test_the_environment_is_read_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HTTP_PORT", "9090")
    monkeypatch.setenv("PACELINE_MODEL", "toy")
    monkeypatch.setenv("PACELINE_LOG_JSON", "true")
    monkeypatch.setenv("PACELINE_OTLP_ENDPOINT", "")
    settings = Settings.load(model="other")
    assert (settings.http_port, settings.model, settings.log_json) == (9090, "other", True)
    assert settings.otlp_endpoint is None, "an empty value counts as not set"


def test_options_of_vllm_are_a_json_object_and_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"tensor_parallel_size": 2, "dtype": "bfloat16", "compilation_config": {"level": 0}}
    monkeypatch.setenv("PACELINE_VLLM_OPTIONS", json.dumps(given))
    settings = Settings.load()
    assert settings.vllm_options == given
    assert json.loads(settings.environment()["PACELINE_VLLM_OPTIONS"]) == given


def test_options_of_vllm_that_are_no_object_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_VLLM_OPTIONS", "[1]")
    with pytest.raises(SettingsError, match=r"PACELINE_VLLM_OPTIONS=\[1\]: Input should be a valid dictionary"):
        Settings.load()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PACELINE_HTTP_PORT", "70000"),
        ("PACELINE_HTTP_PORT", "eighty"),
        ("PACELINE_ENGINE", "cuda"),
        ("PACELINE_VLLM_OPTIONS", "{dtype: half}"),
        ("PACELINE_LEASE_TTL_S", "0"),
        ("PACELINE_CHUNK_TOKENS", "-1"),
        ("PACELINE_INSTANCE", "a b"),
        ("PACELINE_LOG_LEVEL", "loud"),
    ],
)
def test_a_bad_value_names_the_variable_and_the_value(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as caught:
        Settings.load()
    assert variable in str(caught.value)
    assert repr(value) in str(caught.value)


def test_every_bad_value_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HTTP_PORT", "x")
    monkeypatch.setenv("PACELINE_CELLS", "y")
    with pytest.raises(SettingsError, match=r"PACELINE_HTTP_PORT='x'.*PACELINE_CELLS='y'"):
        Settings.load()


def test_a_field_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SettingsError, match="PACELINE_MODLE"):
        Settings.load(modle="toy")


def test_the_key_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "pl-secret")
    monkeypatch.setenv("PACELINE_HTTP_PORT", "x")
    with pytest.raises(SettingsError) as caught:
        Settings.load()
    monkeypatch.delenv("PACELINE_HTTP_PORT")
    assert "pl-secret" not in f"{caught.value} {Settings.load()!r}"


def test_settings_are_frozen() -> None:
    settings = Settings.load()
    with pytest.raises(ValidationError):
        settings.model = "other"  # type: ignore[misc]


def test_instances_are_never_the_same_twice() -> None:
    assert Settings.load().instance != Settings.load().instance


def test_misspelt_variables_are_found() -> None:
    names = {"PACELINE_MODLE": "x", "PACELINE_MODEL": "y", "PACELINE_NATS_PORT": "1", "HOME": "/"}
    assert unknown_variables(names) == {"PACELINE_MODLE": "PACELINE_MODEL is meant, perhaps"}
    assert unknown_variables({"PACELINE_WHATEVER_ELSE": ""}) == {"PACELINE_WHATEVER_ELSE": "no such setting"}


def test_a_child_gets_exactly_the_settings_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_MODEL", "from the parent's environment")
    monkeypatch.setenv("PACELINE_THREADS", "7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    given = Settings.of(model="toy", http_port=1, log_json=True, keys_file=Path("/k"), api_key="pl-1", instance="v-0")
    assert (given.model, given.threads) == ("toy", 1), "the environment is left aside"
    environment = child_environment(given.environment(), EXTRA="1")
    assert environment["EXTRA"] == "1"
    assert environment["NCCL_SOCKET_IFNAME"] == "eth7", "what libraries of the child read"
    assert environment["PACELINE_API_KEY"] == "pl-1"
    for name in [name for name in environment if name.startswith("PACELINE_")]:
        monkeypatch.setenv(name, environment[name])
    assert Settings.load() == given
