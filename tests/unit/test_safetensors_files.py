"""Whether a folder that vLLM is to read has the model card's vocabulary. Needs neither vLLM nor torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from test_tokenizer import make_card
from tiny_model import vocabulary

from paceline.errors import ModelError
from paceline.model_card import ModelCard
from services.verifier.safetensors_files import check_folder

CARD = make_card(*vocabulary())


def folder_of(path: Path, card: ModelCard = CARD, size: int | None = None) -> Path:
    (path / "tokenizer.json").write_text(card.tokenizer)
    (path / "config.json").write_text(json.dumps({"vocab_size": card.vocabulary if size is None else size}))
    return path


def with_merge(card: ModelCard, left: str, right: str) -> ModelCard:
    tokenizer = json.loads(card.tokenizer)
    tokenizer["model"]["merges"].append([left, right])
    return replace(card, tokenizer=json.dumps(tokenizer))


@pytest.mark.parametrize("padding", [0, 5])
def test_the_same_vocabulary(tmp_path: Path, padding: int) -> None:
    """A model may have more rows than its tokenizer has tokens: nobody chooses those."""
    check_folder(folder_of(tmp_path, size=CARD.vocabulary + padding), CARD)


def test_another_vocabulary_is_refused_by_its_first_difference(tmp_path: Path) -> None:
    tokens, attributes = vocabulary()
    tokens[3] = "<instrument>"
    with pytest.raises(ModelError, match="token 3 is '<tool>' in the one and '<instrument>' in the other"):
        check_folder(folder_of(tmp_path, make_card(tokens, attributes)), CARD)


def test_a_vocabulary_that_splits_otherwise_is_refused_by_its_text(tmp_path: Path) -> None:
    """What a conversion may lose without a change to any id: here, that digits stand alone."""
    card, other = (with_merge(make_card(*vocabulary(["12"]), pre=pre), "1", "2") for pre in ("smollm", "gpt-2"))
    assert card.fingerprint == other.fingerprint
    check_folder(folder_of(tmp_path, card), card)
    with pytest.raises(ModelError, match=r"'12345 6\.78"):
        check_folder(folder_of(tmp_path, other), card)


def test_a_model_with_fewer_ids_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{CARD.vocabulary - 1} token ids.* {CARD.vocabulary}"):
        check_folder(folder_of(tmp_path, size=CARD.vocabulary - 1), CARD)


@pytest.mark.parametrize(
    ("file", "text"), [("tokenizer.json", None), ("tokenizer.json", "{"), ("config.json", None), ("config.json", "{}")]
)
def test_missing_and_damaged_files_are_named(tmp_path: Path, file: str, text: str | None) -> None:
    folder = folder_of(tmp_path)
    if text is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(text)
    with pytest.raises(ModelError, match=str(tmp_path / file)):
        check_folder(folder, CARD)
