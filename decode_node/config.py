"""Configuration of a decode node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(EngineConfig):
    """The settings of a decode node.

    It computes chunks of prompts while other sequences wait for their next token, so its chunks are smaller."""

    CUDA_CHUNK_TOKENS: ClassVar[int] = 1024
