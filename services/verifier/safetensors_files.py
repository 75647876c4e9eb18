"""A target in the format that vLLM reads, made of its GGUF file by transformers and kept beside it.

    MODELS_DIR/PAIR/target.gguf
                    target.safetensors/    config.json, model.safetensors and its record, tokenizer.json

What was made, and what an operator brings, must be of the model card's vocabulary: ids mean the same at the edge.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock
from msgspec.structs import replace

from paceline.errors import ModelError
from paceline.gguf_card import PROBES
from paceline.model_card import ModelCard, check_vocabularies, entries, fingerprint, parse_tokenizer, write_whole
from paceline.model_catalog import Source
from paceline.model_files import Record, sha256
from paceline.tokenizer import Tokenizer

LOCK_TIMEOUT_S = 1800.0


class _Config(msgspec.Struct):
    vocab_size: int


def safetensors_of(gguf: Path, card: ModelCard, progress: Callable[[str], None] = lambda _: None) -> Path:
    """The folder; made where there is none of this very file (half a minute for a small model). Raises ModelError.

    Weights are those of the GGUF file, in float16 where that holds them exactly, else in float32.
    """
    folder = gguf.with_suffix(".safetensors")
    source = Source(source=f"file:{gguf}")
    try:
        if not _ready(folder, source, card):
            with FileLock(gguf.with_suffix(".safetensors.lock"), timeout=LOCK_TIMEOUT_S):
                _bring(gguf, folder, source, card, progress)
    except OSError as error:  # filelock's Timeout is one, too
        raise ModelError(f"{folder} cannot be written: {error}") from error
    check_folder(folder, card)
    return folder


def _bring(gguf: Path, folder: Path, source: Source, card: ModelCard, progress: Callable[[str], None]) -> None:
    if not _fresh(folder, source):
        progress(f"writing {folder} from {gguf.name}")
        _make(gguf, folder, source)
    # Not what transformers makes of a GGUF file, which splits digits otherwise.
    write_whole(folder / "tokenizer.json", card.tokenizer.encode(), mode=0o644)


def _ready(folder: Path, source: Source, card: ModelCard) -> bool:
    tokenizer = folder / "tokenizer.json"
    return _fresh(folder, source) and tokenizer.exists() and tokenizer.read_text() == card.tokenizer


def check_folder(folder: Path, card: ModelCard) -> None:
    """Raises ModelError, naming what differs first, unless the folder's tokenizer has the card's vocabulary and makes
    the same ids of all PROBES."""
    size = _vocabulary(folder / "config.json")
    if size < card.vocabulary:
        raise ModelError(f"the model in {folder} has {size} token ids, the card of {card.model} has {card.vocabulary}")
    text = _text(folder / "tokenizer.json")
    try:
        theirs = parse_tokenizer(text)
    except ModelError as error:
        raise ModelError(f"{folder / 'tokenizer.json'}: {error}") from error
    size = max(size, 1 + max(theirs.get_vocab().values(), default=-1))
    found_print = fingerprint(entries(theirs, size)[: card.vocabulary])
    check_vocabularies(card, replace(card, model=str(folder), vocabulary=size, tokenizer=text, fingerprint=found_print))
    ours = Tokenizer(card)
    for text in (*PROBES, *(f"{spelling} hi" for spelling in ours.control.values())):
        expected = ours.encode(text, special=True, start=False)
        found = theirs.encode(text, add_special_tokens=False).ids
        if found != expected:
            raise ModelError(f"{text!r} is {found} by {folder} and {expected} by the card of {card.model}")


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}, which vLLM needs, cannot be read: {error}") from error


def _vocabulary(config: Path) -> int:
    try:
        return int(msgspec.json.decode(_text(config), type=_Config).vocab_size)
    except msgspec.DecodeError as error:
        raise ModelError(f"{config} is no model's configuration: {error}") from error


def _fresh(folder: Path, source: Source) -> bool:
    weights = folder / "model.safetensors"
    record = Record.of(weights)
    return record is not None and record.is_of(source) and record.fits(weights)


def _make(gguf: Path, folder: Path, source: Source) -> None:
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        _write(gguf, part)
        Record.made(part / "model.safetensors", source, gguf, sha256(gguf)).save(part / "model.safetensors")
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    except Exception as error:  # of three libraries, of many kinds
        raise ModelError(f"{gguf} could not be converted for vLLM: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write(gguf: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    tied = set(model.all_tied_weights_keys)
    weights = {name: _compact(value) for name, value in model.state_dict().items() if name not in tied}
    config = model.config
    del config.quantization_config
    config.architectures = [type(model).__name__]
    halves = all(value.dtype == torch.float16 for value in weights.values())
    config.dtype = torch.float16 if halves else torch.float32  # what vLLM computes in where a device has no other wish
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _compact(weight: Any) -> Any:
    half = weight.half()
    return half.contiguous() if half.float().equal(weight) else weight.contiguous()
