"""Whether a model file is still the one that was pulled: a record beside each file, and how to read it."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from paceline.model_card import write_whole
from paceline.model_catalog import Source


class Record(Struct, frozen=True, kw_only=True):
    """What a model file was made of and how to see that it has not changed since. size and source_size in bytes."""

    source: Source
    source_sha256: str
    source_size: int
    source_mtime_ns: int
    sha256: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, file: Path) -> Self | None:
        """The record beside a file; None when there is none that can be read."""
        try:
            return msgspec.json.decode(record_path(file).read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return None

    @classmethod
    def made(cls, file: Path, source: Source, origin: Path, origin_sha256: str) -> Self:
        """The record of `file` as it is now, made of `origin`; reads the whole file."""
        from_facts, facts = origin.stat(), file.stat()
        return cls(
            source=source,
            source_sha256=origin_sha256,
            source_size=from_facts.st_size,
            source_mtime_ns=from_facts.st_mtime_ns,
            sha256=sha256(file),
            size=facts.st_size,
            mtime_ns=facts.st_mtime_ns,
        )

    def fits(self, file: Path) -> bool:
        """By size and time: whether the file is still the one that was recorded."""
        return stamp(file) == (self.size, self.mtime_ns)

    def is_of(self, source: Source) -> bool:
        """Whether the source is still the one that was used. A local file without a checksum counts as changed when
        its size or time has; one that is gone counts as unchanged."""
        if self.source != source:
            return False
        if source.sha256 is not None or not source.source.startswith("file:"):
            return True
        return stamp(Path(source.source.removeprefix("file:"))) in (None, (self.source_size, self.source_mtime_ns))

    def save(self, file: Path) -> None:
        write_whole(record_path(file), msgspec.json.format(msgspec.json.encode(self)), mode=0o644)


def record_path(file: Path) -> Path:
    return file.with_name(f"{file.name}.json")


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def stamp(file: Path) -> tuple[int, int] | None:
    """Size in bytes and modification time in ns; None when there is no such file to look at."""
    try:
        facts = file.stat()
    except OSError:
        return None
    return facts.st_size, facts.st_mtime_ns


def link_or_copy(origin: Path, copy: Path) -> None:
    """The same content under a second name, without the cost of a copy where the file system allows it."""
    try:
        os.link(origin, copy)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(origin, copy)
