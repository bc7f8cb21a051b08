"""Configuration of a prefill node."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(EngineConfig):
    """The settings of a prefill node. It has only the settings that both roles share."""
