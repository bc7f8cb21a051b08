"""Configuration of a decode node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(EngineConfig):
    """A decode node computes prompts only after a preemption, while others wait for their next token."""

    CUDA_CHUNK_TOKENS: ClassVar[int] = 1024
