"""Configuration of a decode node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..engine.config import EngineConfig
from ..metadata.config import setting
from ..metadata.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(EngineConfig):
    """The settings of a decode node.

    While a decode node computes a chunk of a prompt, its other sequences wait. So its chunks are smaller than a prefill
    node's, and beside other sequences no longer than the bound on gaps allows. Raises ConfigError if a value is out of
    range."""

    CUDA_CHUNK_TOKENS: ClassVar[int] = 1024

    expect_prompts: bool = setting(
        True,
        "on cuda, capture graphs for prompts that this node computes; without them the start is shorter and takes less "
        "memory, but such prompts take longer and delay other sequences more (with baton up: no if --local-prefill is "
        "never)",
    )
    max_gap_ms: float | None = setting(
        None,
        "compute prompts beside running streams in chunks so short that 99 % of the gaps between tokens are at most "
        "this many milliseconds (default: 1.5 of the node's own rounds at the present batch; single gaps are longer if "
        "streams wait less in all then, if not even a short chunk fits in, or if prompts would wait for over 50 ms)",
    )

    @property
    def max_gap_s(self) -> float | None:
        """The operator's bound on gaps in seconds, None if there is none."""
        return None if self.max_gap_ms is None else self.max_gap_ms / 1000

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        if self.max_gap_ms is not None and self.max_gap_ms <= 0:
            raise ConfigError(f"max_gap_ms is {self.max_gap_ms}; it must be more than 0")
