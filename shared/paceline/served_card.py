"""The card of the model that a process serves, by its settings. Needs no model library."""

from __future__ import annotations

from paceline.errors import ModelError
from paceline.model_card import ModelCard
from paceline.settings import Settings

TOY = "toy"


def served_card(settings: Settings) -> ModelCard:
    """Raises ModelError when the model was not pulled (says how to), or the card is another model's. The toy model
    needs no pulling."""
    path = settings.models_dir / settings.model / "card.json"
    if settings.model == TOY and not path.exists():
        from paceline.engine_simulated import toy_card

        return toy_card()
    card = ModelCard.load(path)
    if card.model != settings.model:
        raise ModelError(f"{path} is the card of {card.model!r}, not of {settings.model!r}")
    return card
