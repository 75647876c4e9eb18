"""The catalog: which pairs there are and where their files come from. Pure but for reading the TOML files."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from paceline.errors import ModelError

Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Uri = Annotated[str, Meta(pattern=r"^(file|hf|package):.+")]
PairName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]*$", max_length=64)]


class Source(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One GGUF file: where it comes from, and what is made of it."""

    source: Uri
    """file:PATH | hf:OWNER/REPO/FILE[@REVISION] | package:NAME[@VERSION]/FILE"""
    sha256: Sha256 | None = None
    """Of the file at the source, before any quantising."""
    quantize: Literal["F16", "Q4_0", "Q4_1", "Q8_0"] | None = None
    """Tensor format to make of it; None: as it is."""


class _Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    licence: str
    context: Annotated[int, Meta(ge=16)]
    description: str = ""
    simulated: bool = False
    target: Source | None = None
    draft: Source | None = None


class Pair(Struct, frozen=True, kw_only=True):
    """A target and the draft model that goes with it. `context` (tokens) is what is served, at most what the target's
    file allows. A simulated pair has no files, only a model card."""

    name: str
    licence: str
    context: int
    target: Source | None
    draft: Source | None
    simulated: bool = False
    description: str = ""


def catalog(extra: Path | None = None) -> dict[str, Pair]:
    """The pairs that come with Paceline and those of the file `extra`, which win. Raises ModelError."""
    pairs = _read(Path(__file__).with_name("catalog.toml"))
    return pairs if extra is None else pairs | _read(extra)


def pair_named(name: str, extra: Path | None = None) -> Pair:
    pairs = catalog(extra)
    if name not in pairs:
        raise ModelError(f"no model pair {name!r} in the catalog; there are {', '.join(sorted(pairs))}")
    return pairs[name]


def _read(path: Path) -> dict[str, Pair]:
    try:
        entries = msgspec.convert(tomllib.loads(path.read_text()), dict[PairName, _Entry])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ModelError(f"the model catalog {path} cannot be used: {error}") from error
    return {name: _pair(name, entry, path) for name, entry in entries.items()}


def _pair(name: str, entry: _Entry, path: Path) -> Pair:
    for part in ("target", "draft"):
        if (getattr(entry, part) is None) != entry.simulated:
            needs = "must not have" if entry.simulated else "needs"
            raise ModelError(f"the model catalog {path}: {name} {needs} a table [{name}.{part}]")
    return Pair(
        name=name,
        licence=entry.licence,
        context=entry.context,
        target=_anchored(entry.target, path.parent),
        draft=_anchored(entry.draft, path.parent),
        simulated=entry.simulated,
        description=entry.description,
    )


def _anchored(source: Source | None, folder: Path) -> Source | None:
    """Relative `file:` paths count from the catalog's own folder."""
    if source is None or not source.source.startswith("file:"):
        return source
    path = Path(source.source.removeprefix("file:")).expanduser()
    return msgspec.structs.replace(source, source=f"file:{(folder / path).resolve()}")
