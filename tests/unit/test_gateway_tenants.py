"""API keys: hashed in a file, read again when it changes, made and revoked from the command line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.errors import RequestError, SettingsError, Unauthorized
from services.gateway.keys import add, listed, main, revoke
from services.gateway.tenants import Keyring, Tenant, bearer, digest


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sub" / "keys.toml"


def test_a_key_names_its_tenant_and_is_not_in_the_file(file: Path) -> None:
    key, admin = add(file, "TEN-A", False), add(file, "ops", True)
    ring = Keyring(file)
    assert ring.identify(key) == Tenant("TEN-A")
    assert ring.identify(admin) == Tenant("ops", admin=True)
    content = file.read_text()
    assert key not in content
    assert digest(key) in content
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("key", [None, "", "wrong", "\ud800", "a" * 10_000])
def test_any_other_key_is_refused(file: Path, key: str | None) -> None:
    add(file, "TEN-A", False)
    with pytest.raises(Unauthorized) as caught:
        Keyring(file).identify(key)
    assert caught.value.status == 401
    assert not key or key not in caught.value.message


def test_a_revoked_key_is_refused_and_a_new_one_served_without_a_restart(file: Path) -> None:
    old = add(file, "TEN-A", False)
    ring = Keyring(file)
    new = add(file, "TEN-B", False)
    assert ring.identify(new).name == "TEN-B"
    assert revoke(file, "TEN-A") == 1
    with pytest.raises(Unauthorized):
        ring.identify(old)
    assert ring.identify(new).name == "TEN-B"


def test_a_file_that_breaks_later_leaves_the_last_good_keys(file: Path) -> None:
    key = add(file, "TEN-A", False)
    ring = Keyring(file)
    file.write_text("[[keys]\n")
    assert ring.identify(key).name == "TEN-A"
    file.unlink()
    assert ring.identify(key).name == "TEN-A"


@pytest.mark.parametrize(
    "content",
    ["[[keys]", "[[keys]]\ntenant = 'x'\n", "[[keys]]\ntenant = 'x'\nsha256 = 'abc'\n", "[[kez]]\n", "keys = 3\n"],
)
def test_a_bad_file_is_refused_at_the_start_by_name(file: Path, content: str) -> None:
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(SettingsError, match=r"PACELINE_KEYS_FILE=.*keys\.toml"):
        Keyring(file)


def test_no_file_says_how_to_make_one(file: Path) -> None:
    for path in (file, None):
        with pytest.raises(SettingsError, match=r"services\.gateway\.keys add"):
            Keyring(path)


def test_admin_rights_are_asked_for() -> None:
    Tenant("ops", admin=True).require_admin()
    with pytest.raises(RequestError) as caught:
        Tenant("x").require_admin()
    assert (caught.value.status, caught.value.kind) == (403, "permission_error")


@pytest.mark.parametrize(
    ("header", "key"),
    [("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("Basic abc", None), ("Bearer", None), ("", None), (None, None)],
)
def test_the_key_is_in_the_authorization_header(header: str | None, key: str | None) -> None:
    assert bearer(header) == key


def test_the_command_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["add", "--tenant", "demo", "--file", os.fspath(file), "--admin"]) == 0
    key = capsys.readouterr().out.strip()
    assert Keyring(file).identify(key) == Tenant("demo", admin=True)
    assert main(["list", "--file", os.fspath(file)]) == 0
    shown = capsys.readouterr().out
    assert "demo  admin" in shown
    assert key not in shown
    assert main(["revoke", shown.split()[0], "--file", os.fspath(file)]) == 0
    assert capsys.readouterr().out == "1 revoked\n"
    assert listed(file) == []


def test_the_command_line_refuses_a_bad_name(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["add", "--tenant", 'x"\ny', "--file", os.fspath(file)]) == 1
    assert "tenant" in capsys.readouterr().err
    assert main(["list", "--file", os.fspath(file)]) == 1
