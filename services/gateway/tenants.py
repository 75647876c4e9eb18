"""Who may call: API keys per tenant, kept as SHA-256 only, in a TOML file that is read again whenever it changes.

    [[keys]]
    tenant = "demo"
    sha256 = "…64 hex digits…"
    admin = true            # may drain verifiers

Keys are 256 random bits, so a plain hash is as good as a slow one. A key that is taken out of the file is refused from
the next call on, and an open edge connection ends within REVOKED_S.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
from msgspec import Meta, Struct

from paceline.errors import RequestError, SettingsError, Unauthorized

log = structlog.get_logger(__name__)

REVOKED_S = 5.0
TenantName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_\-.]+$")]


class KeyEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    tenant: TenantName
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
    admin: bool = False


class KeysFile(Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[KeyEntry, ...] = ()


class Forbidden(RequestError):
    """The key is good, but not for this."""

    status, code, kind = 403, "forbidden", "permission_error"


@dataclass(frozen=True)
class Tenant:
    name: str
    admin: bool = False

    def require_admin(self) -> None:
        if not self.admin:
            raise Forbidden("this needs an admin key")


def new_key() -> str:
    return "pl-" + secrets.token_urlsafe(32)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def read_keys(path: Path) -> KeysFile:
    """Raises SettingsError naming the file and the fault; no fault shows a key or its hash."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=KeysFile)
    except OSError as error:
        hint = f"`python -m services.gateway.keys add --tenant NAME --file {path}` makes it"
        raise SettingsError(f"PACELINE_KEYS_FILE={path} cannot be read ({error.strerror}); {hint}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"PACELINE_KEYS_FILE={path}: {error}") from error


class Keyring:
    """The keys of one file. When it becomes unreadable later, its last good content holds and the log says so."""

    def __init__(self, path: Path | None) -> None:
        if path is None:
            hint = "`python -m services.gateway.keys add --tenant NAME --file FILE` makes one"
            raise SettingsError(f"PACELINE_KEYS_FILE is not set: it names the file of API keys; {hint}")
        self._path = path
        self._stamp = _stamp(path)
        self._tenants = _by_digest(read_keys(path))

    def identify(self, key: str | None) -> Tenant:
        """The tenant of `key`. Raises Unauthorized."""
        self._refresh()
        if not key:
            raise Unauthorized("no API key: send it as `Authorization: Bearer KEY`", code="missing_api_key")
        tenant = self._tenants.get(digest(key))
        if tenant is None:
            raise Unauthorized("the API key is not known here")
        return tenant

    def _refresh(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._tenants = _by_digest(read_keys(self._path))
            log.info("keys read again", count=len(self._tenants))
        except SettingsError as error:
            log.error("keys not read again; the last good ones hold", error=str(error))


def bearer(header: str | None) -> str | None:
    """The key in an Authorization header."""
    scheme, _, key = (header or "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def _by_digest(file: KeysFile) -> dict[str, Tenant]:
    return {entry.sha256: Tenant(entry.tenant, entry.admin) for entry in file.keys}


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
