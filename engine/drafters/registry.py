"""Which drafter a configuration asks for: read first (widths for the handoff's schema), loaded once there is a pool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from ...metadata.errors import ConfigError
from ...metadata.hidden_layout import HiddenLayout
from ...metadata.node_info import HandoffSchema, PoolLayout
from ...metadata.schema import make_schema
from ..config import EngineConfig
from ..model_config import ModelConfig
from ..models.llama import LlamaModel
from ..models.registry import load_model
from ..weights import Progress, fingerprint
from .base import Drafter
from .ngram import NgramDrafter
from .standalone import StandaloneDrafter

DEFAULT_STEPS = 5


@dataclass(frozen=True, slots=True)
class Speculation:
    """The joint configuration of target, draft and algorithm."""

    algorithm: str
    num_steps: int  # K
    draft_dir: Path | None
    draft_config: ModelConfig | None
    pool: PoolLayout | None  # draft KV
    hidden: HiddenLayout

    def schema(self, target: PoolLayout, page_size: int, *, checksums: bool) -> HandoffSchema:
        """What the handoff carries."""
        hands_proposal = self.hidden.spec("recurrent") is not None
        return make_schema(
            target,
            self.pool,
            page_size,
            self.algorithm,
            self.hidden,
            draft_topk=1 if hands_proposal else 0,
            checksums=checksums,
        )

    @property
    def fingerprint(self) -> str | None:
        """Of the draft's weights; None where there are none."""
        return None if self.draft_dir is None else fingerprint(self.draft_dir)

    def load(self, target: LlamaModel, kv: torch.Tensor | None, on_progress: Progress | None) -> Drafter | None:
        """The drafter, its KV in `kv`. None without speculation."""
        if self.algorithm == "none":
            return None
        if self.algorithm == "ngram":
            return NgramDrafter(self.hidden, self.num_steps, target.device)
        assert self.draft_dir is not None and self.draft_config is not None and kv is not None
        model = load_model(self.draft_dir, self.draft_config, target.dtype, target.device, on_progress)
        return StandaloneDrafter(model, kv, self.hidden, self.num_steps)


def read_speculation(config: EngineConfig, target_dir: Path, target: ModelConfig, dtype: str) -> Speculation:
    """Raises ConfigError for settings that cannot work together, ModelError for a draft directory that is none."""
    steps = DEFAULT_STEPS if config.draft_steps is None else config.draft_steps
    algorithm = config.speculative
    if not 1 <= steps <= 15:
        raise ConfigError(f"draft_steps {steps} is out of range: use 1 to 15, or --speculative none")
    if algorithm in ("none", "ngram"):
        if config.draft_model is not None:
            raise ConfigError(f"speculative {algorithm} takes no draft_model, but {config.draft_model} was given")
        return Speculation(
            algorithm, steps, None, None, None, HiddenLayout(algorithm=algorithm, target_hidden_size=target.hidden_size)
        )
    if config.draft_model is None:
        raise ConfigError(f"speculative {algorithm} needs --draft-model DIR")
    draft_dir = Path(config.draft_model).expanduser()
    draft = ModelConfig.from_dir(draft_dir)
    _check_vocabulary(target_dir, target, draft_dir, draft)
    pool = PoolLayout(
        num_layers=draft.num_layers,
        num_kv_heads=draft.num_kv_heads,
        head_dim=draft.head_dim,
        dtype=dtype,  # type: ignore[arg-type]  # one of the Literal's values, checked by the engine
    )
    hidden = HiddenLayout(
        algorithm=algorithm, target_hidden_size=target.hidden_size, draft_hidden_size=draft.hidden_size
    )
    return Speculation(algorithm, steps, draft_dir, draft, pool, hidden)


def _check_vocabulary(target_dir: Path, target: ModelConfig, draft_dir: Path, draft: ModelConfig) -> None:
    if target.vocab_size != draft.vocab_size:
        raise ConfigError(
            f"a draft model must have the target's vocabulary: {target_dir} has {target.vocab_size} entries,"
            f" {draft_dir} has {draft.vocab_size}"
        )
    digests = {
        directory: xxhash.xxh3_64_hexdigest((directory / "tokenizer.json").read_bytes())
        for directory in (target_dir, draft_dir)
        if (directory / "tokenizer.json").is_file()
    }
    if len(set(digests.values())) > 1:
        raise ConfigError(f"a draft model must have the target's tokenizer: {target_dir} and {draft_dir} differ")
