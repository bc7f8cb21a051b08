"""Configuration of a decode node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(EngineConfig):
    """The settings of a decode node.

    While a decode node computes a chunk of a prompt, its other sequences wait. So its chunks are smaller than a prefill
    node's."""

    CUDA_CHUNK_TOKENS: ClassVar[int] = 1024
