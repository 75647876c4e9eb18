"""`python -m services.gateway.keys`: make, list and revoke API keys. A key is shown once, when it is made."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.errors import SettingsError
from paceline.model_card import write_whole
from services.gateway.tenants import KeyEntry, KeysFile, digest, new_key, read_keys

SHOWN = 10
"""Digits of a key's hash that are enough to name it."""


def add(path: Path, tenant: str, admin: bool) -> str:
    """Make a key for `tenant`, append its hash to the file, and return it."""
    key = new_key()
    entry = msgspec.convert({"tenant": tenant, "sha256": digest(key), "admin": admin}, KeyEntry)
    _write(path, (*_existing(path).keys, entry))
    return key


def revoke(path: Path, name: str) -> int:
    """Take out the keys whose hash begins with `name`, or all of a tenant of that name. The number taken out."""
    keys = read_keys(path).keys
    kept = tuple(entry for entry in keys if entry.tenant != name and not _named(entry, name))
    if len(kept) < len(keys):
        _write(path, kept)
    return len(keys) - len(kept)


def listed(path: Path) -> list[str]:
    return [f"{e.sha256[:SHOWN]}  {e.tenant}{'  admin' if e.admin else ''}" for e in read_keys(path).keys]


def _named(entry: KeyEntry, name: str) -> bool:
    return len(name) >= SHOWN and entry.sha256.startswith(name)


def _existing(path: Path) -> KeysFile:
    return read_keys(path) if path.exists() else KeysFile()


def _write(path: Path, keys: Sequence[KeyEntry]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks = ["\n".join(["[[keys]]", *_lines(entry)]) for entry in keys]
    write_whole(path, ("\n\n".join(blocks) + "\n").encode() if blocks else b"")


def _lines(entry: KeyEntry) -> list[str]:
    lines = [f'tenant = "{entry.tenant}"', f'sha256 = "{entry.sha256}"']
    return [*lines, "admin = true"] if entry.admin else lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m services.gateway.keys", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("add", "list", "revoke"):
        command = commands.add_parser(name)
        command.add_argument("--file", type=Path, required=True, help="the keys file (PACELINE_KEYS_FILE)")
        if name == "add":
            command.add_argument("--tenant", required=True)
            command.add_argument("--admin", action="store_true", help="may also drain verifiers")
        if name == "revoke":
            command.add_argument("name", help="a tenant, or the first digits that `list` shows")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.command == "add":
            sys.stdout.write(add(options.file, options.tenant, options.admin) + "\n")
        elif options.command == "list":
            sys.stdout.writelines(line + "\n" for line in listed(options.file))
        else:
            sys.stdout.write(f"{revoke(options.file, options.name)} revoked\n")
    except (SettingsError, msgspec.ValidationError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
