"""Simulated engines (landing)."""
from paceline.simulated_world import toy_card
__all__ = ["toy_card"]
