"""Model files on this machine: pull (fetch, quantise, check), find and verify the pairs of the catalog.

    MODELS_DIR/PAIR/target.gguf        and target.gguf.json: its record (paceline.model_files)
                    draft.gguf         and draft.gguf.json
                    card.json          the target's model card, the one that a gateway serves
                    draft-card.json

A file stands under its name only when it is whole, and a card only when it belongs to the files beside it. Whatever
was made once is kept: a second pull looks at sizes and times; `verify` reads every byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from paceline.errors import ModelError
from paceline.model_card import ModelCard, check_vocabularies
from paceline.model_catalog import Pair, Source, catalog, pair_named
from paceline.model_files import Record, link_or_copy, sha256
from paceline.model_sources import locate

__all__ = [
    "ModelCard", "Pair", "PulledPair", "Source", "catalog", "check_vocabularies", "find", "pair_named", "pull",
    "verify",
]  # fmt: skip

LOCK_TIMEOUT_S = 3600.0
Progress = Callable[[str], None]
"""Gets one line about each step that takes a while, as it begins."""


@dataclass(frozen=True)
class PulledPair:
    """Paths of one pair's files. A simulated pair has only `card`."""

    name: str
    target: Path
    draft: Path
    card: Path
    draft_card: Path
    simulated: bool = False

    @property
    def folder(self) -> Path:
        return self.card.parent


def find(name: str, models_dir: Path, *, extra: Path | None = None) -> PulledPair:
    """The files of a pair that was pulled; raises ModelError that says how to pull it. Fast: reads no model."""
    pair = pair_named(name, extra)
    pulled = _paths(pair, models_dir)
    if not _complete(pair, pulled):
        raise ModelError(f"the models of {name} are not (all) in {pulled.folder}: run `paceline models pull {name}`")
    return pulled


def pull(name: str, models_dir: Path, progress: Progress = lambda _: None, *, extra: Path | None = None) -> PulledPair:
    """Bring a pair to this machine; raises ModelError. What is there already is kept, so a second call is quick.

    `extra` is a further catalog file. Two pulls at once wait for each other. Blocks; call it from a thread.
    """
    pair = pair_named(name, extra)
    pulled = _paths(pair, models_dir)
    if _settled(pair, pulled):
        return pulled
    try:
        pulled.folder.mkdir(parents=True, exist_ok=True)
        with _locked(models_dir, progress):
            if not _settled(pair, pulled):
                _pull(pair, pulled, progress)
    except OSError as error:
        raise ModelError(f"cannot write the models of {name} below {models_dir}: {error}") from error
    return pulled


def verify(
    name: str, models_dir: Path, progress: Progress = lambda _: None, *, extra: Path | None = None
) -> PulledPair:
    """Read every byte of a pulled pair against its record, and make its cards anew to compare. Raises ModelError."""
    pair = pair_named(name, extra)
    pulled = find(name, models_dir, extra=extra)
    for file, _ in _parts(pair, pulled):
        progress(f"reading {file}")
        record = Record.of(file)
        if record is None or sha256(file) != record.sha256:
            raise ModelError(f"{file} is not the file that was pulled: remove it and run `paceline models pull {name}`")
    for path, card in _cards(pair, pulled, progress):
        if ModelCard.load(path) != card:
            raise ModelError(f"{path} does not fit its model: remove it and run `paceline models pull {name}`")
    return pulled


def _paths(pair: Pair, models_dir: Path) -> PulledPair:
    folder = models_dir / pair.name
    return PulledPair(
        name=pair.name,
        target=folder / "target.gguf",
        draft=folder / "draft.gguf",
        card=folder / "card.json",
        draft_card=folder / "draft-card.json",
        simulated=pair.simulated,
    )


def _parts(pair: Pair, pulled: PulledPair) -> list[tuple[Path, Source]]:
    both = ((pulled.target, pair.target), (pulled.draft, pair.draft))
    return [(file, source) for file, source in both if source is not None]


def _complete(pair: Pair, pulled: PulledPair) -> bool:
    return all(_fresh(*part) for part in _parts(pair, pulled)) and _cards_are_there(pair, pulled)


def _cards_are_there(pair: Pair, pulled: PulledPair) -> bool:
    """Whether the cards can be read and serve the context that the catalog asks for."""
    try:
        contexts = [ModelCard.load(card).context for card in (pulled.card, *_draft_card(pulled))]
    except ModelError:  # none yet, or of another version of Paceline: they are made anew
        return False
    return contexts[0] == pair.context


def _draft_card(pulled: PulledPair) -> list[Path]:
    return [] if pulled.simulated else [pulled.draft_card]


def _settled(pair: Pair, pulled: PulledPair) -> bool:
    """Whether a pull has nothing to do. A simulated card is made anew each time: it is cheap and follows the code."""
    return not pair.simulated and _complete(pair, pulled)


def _fresh(file: Path, source: Source) -> bool:
    record = Record.of(file)
    return record is not None and record.is_of(source) and record.fits(file)


def _pull(pair: Pair, pulled: PulledPair, progress: Progress) -> None:
    for card in (pulled.card, pulled.draft_card):
        card.unlink(missing_ok=True)
    for file, source in _parts(pair, pulled):
        if not _fresh(file, source):
            _make(file, source, progress)
    for path, made in _cards(pair, pulled, progress):
        made.save(path)


def _cards(pair: Pair, pulled: PulledPair, progress: Progress) -> list[tuple[Path, ModelCard]]:
    """The pair's cards, read from its files and checked against llama.cpp and each other."""
    if pair.simulated:
        from paceline.engine_simulated import toy_card

        return [(pulled.card, toy_card(pair.name, pair.context))]
    target = _card(pulled.target, pair, progress)
    if target.context < pair.context:
        raise ModelError(f"{pulled.target} allows {target.context} tokens, the catalog asks for {pair.context}")
    draft_name = f"{pair.name}-draft"
    if _same_origin(pulled):  # quantising copies the vocabulary: no need to read it a second time
        draft = msgspec.structs.replace(target, model=draft_name)
    else:
        draft = msgspec.structs.replace(_card(pulled.draft, pair, progress), model=draft_name)
    _check_card(pulled.target, target)
    _check_card(pulled.draft, draft)
    check_vocabularies(target, draft)
    return [(pulled.draft_card, draft), (pulled.card, target)]


def _card(file: Path, pair: Pair, progress: Progress) -> ModelCard:
    from paceline.gguf_card import card_from_gguf

    progress(f"reading the vocabulary of {file}")
    card = card_from_gguf(file, pair.name)
    return msgspec.structs.replace(card, context=min(pair.context, card.context))


def _same_origin(pulled: PulledPair) -> bool:
    records = [Record.of(file) for file in (pulled.target, pulled.draft)]
    origins = {record.source_sha256 if record else None for record in records}
    return len(origins) == 1 and None not in origins


def _check_card(file: Path, card: ModelCard) -> None:
    from paceline.gguf_card import check_card
    from paceline.llama_context import LlamaVocab

    with LlamaVocab(file) as vocabulary:
        check_card(card, vocabulary)


def _make(file: Path, source: Source, progress: Progress) -> None:
    """Put the model file in place, then its record: a record without its file is seen by size and time."""
    progress(f"looking for {source.source}")
    origin = locate(source.source)
    found = sha256(origin)
    if source.sha256 not in (None, found):
        raise ModelError(f"{origin} is not the file the catalog means: SHA-256 {found}, expected {source.sha256}")
    part = file.with_name(f".{file.name}.part")
    part.unlink(missing_ok=True)
    try:
        _write(part, origin, source, found, progress)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    Record.made(file, source, origin, found).save(file)


def _write(part: Path, origin: Path, source: Source, source_sha256: str, progress: Progress) -> None:
    twin = _twin(part.parent.parent, source, source_sha256)
    if source.quantize is None or twin is not None:
        progress(f"taking over {twin or origin}")
        link_or_copy(twin or origin, part)
    else:
        from paceline.llama_context import quantize

        progress(f"writing {origin.name} as {source.quantize} ({origin.stat().st_size >> 20} MiB to read)")
        quantize(origin, part, source.quantize)


def _twin(models_dir: Path, source: Source, source_sha256: str) -> Path | None:
    """A file of another pair that was made of the same bytes in the same way."""
    for path in sorted(models_dir.glob("*/*.gguf.json")):
        file = path.with_suffix("")
        record = Record.of(file)
        if record is None or not record.fits(file):
            continue
        if (record.source_sha256, record.source.quantize) == (source_sha256, source.quantize):
            return file
    return None


@contextmanager
def _locked(models_dir: Path, progress: Progress) -> Iterator[None]:
    lock = FileLock(models_dir / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"waiting for another pull into {models_dir}")
        try:
            lock.acquire(timeout=LOCK_TIMEOUT_S)
        except Timeout as error:
            raise ModelError(f"another pull has held {models_dir} for {LOCK_TIMEOUT_S:.0f} s") from error
    try:
        yield
    finally:
        lock.release()
