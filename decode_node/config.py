"""Configuration of a decode node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..engine.config import EngineConfig
from ..metadata.config import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(EngineConfig):
    """The settings of a decode node.

    While a decode node computes a chunk of a prompt, its other sequences wait. So its chunks are smaller than a prefill
    node's."""

    CUDA_CHUNK_TOKENS: ClassVar[int] = 1024

    expect_prompts: bool = setting(
        True,
        "on cuda, prepare at the start for prompts that this node computes beside its rounds; without it, the start is "
        "shorter, and such prompts delay other sequences more (with baton up: no if --local-prefill is never)",
    )
