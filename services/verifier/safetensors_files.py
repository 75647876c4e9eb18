"""A target in the format that vLLM reads, made of its GGUF file by transformers and kept beside it.

    MODELS_DIR/PAIR/target.gguf
                    target.safetensors/    config.json, model.safetensors and its record, tokenizer.json

The vocabulary of what was made is compared with the model card's, so that ids mean the same at the edge.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from paceline.errors import ModelError
from paceline.model_card import ModelCard, entries, fingerprint, parse_tokenizer
from paceline.model_catalog import Source
from paceline.model_files import Record, sha256

LOCK_TIMEOUT_S = 1800.0


def safetensors_of(gguf: Path, card: ModelCard, progress: Callable[[str], None] = lambda _: None) -> Path:
    """The folder; made where there is none of this very file (half a minute for a small model). Raises ModelError.

    Weights are those of the GGUF file, in float16 where that holds them exactly, else in float32.
    """
    folder = gguf.with_suffix(".safetensors")
    source = Source(source=f"file:{gguf}")
    with FileLock(gguf.with_suffix(".safetensors.lock"), timeout=LOCK_TIMEOUT_S):
        if not _fresh(folder, source):
            progress(f"writing {folder} from {gguf.name}")
            _make(gguf, folder, source)
    _check(folder, card)
    return folder


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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    tied = set(model.all_tied_weights_keys)
    weights = {name: _compact(value) for name, value in model.state_dict().items() if name not in tied}
    config = model.config
    del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def _compact(weight: Any) -> Any:
    half = weight.half()
    return half.contiguous() if half.float().equal(weight) else weight.contiguous()


def _check(folder: Path, card: ModelCard) -> None:
    tokenizer = parse_tokenizer((folder / "tokenizer.json").read_text())
    if fingerprint(entries(tokenizer, card.vocabulary)) != card.fingerprint:
        raise ModelError(f"the vocabulary in {folder} is not the one of {card.model}'s model card")
