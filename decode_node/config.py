"""Configuration of a decode node."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(EngineConfig):
    """Nothing of its own yet beyond what both kinds of node have."""
