"""The registry of drafters. It reads a drafter's configuration first, for the handoff's schema, and loads it later."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from ...metadata.errors import ConfigError
from ...metadata.handoff.hidden_layout import HiddenDtype, HiddenLayout
from ...metadata.handoff.schema import make_schema
from ...metadata.wire.node_info import HandoffSchema, PoolLayout
from ..config import EngineConfig
from ..draft_shape import DraftShape
from ..model_config import ModelConfig
from ..models.decoder import DecoderModel
from ..models.frozen_kv import FrozenKvFile, FrozenKvHead, read_frozen_kv
from ..models.heads import HeadFile, load_head, read_head
from ..models.mtp import load_mtp
from ..models.registry import load_model
from ..progress import Progress
from ..weights import fingerprint
from .base import Drafter
from .choice import describe, find_drafter, settle
from .frozen_kv import FrozenKvDrafter
from .mtp_layers import MtpLayersDrafter
from .ngram import NgramDrafter
from .shifted import ShiftedDrafter
from .standalone import StandaloneDrafter

DEFAULT_STEPS = 5
MAX_STEPS = 15
MAX_TOPK = 16
MAX_TREE_TOKENS = 63
DRAFTS_TREES = ("eagle", "eagle3", "mtp", "frozen-kv-mtp")


@dataclass(frozen=True, slots=True)
class Speculation:
    """The joint configuration of target, draft and algorithm."""

    algorithm: str
    shape: DraftShape
    hidden: HiddenLayout
    draft: ModelConfig | None = None
    draft_dir: Path | None = None
    head: HeadFile | None = None
    frozen: FrozenKvFile | None = None
    aux_layers: tuple[int, ...] = ()  # target layers whose input states the drafter takes; none: the final state

    def schema(self, target: PoolLayout, page_size: int, *, checksums: bool) -> HandoffSchema:
        """Return the schema of the handoff with this drafter."""
        hands_proposal = self.head is not None  # the others propose from the bonus token
        pool = None if self.draft is None or self.frozen is not None else _pool(self.draft, target)
        return make_schema(
            target,
            pool,
            page_size,
            self.algorithm,
            self.hidden,
            draft_topk=self.shape.topk if hands_proposal else 0,
            draft_rows=self.hidden.num_mtp_layers,
            ranks_trees=hands_proposal and not self.shape.is_chain,
            frozen_layers=() if self.frozen is None else self.frozen.target_layers,
            checksums=checksums,
        )

    def describe(self, target_dir: Path) -> str:
        """Return the drafter in words for logs: "eagle, 5 steps, drafter eagle/"."""
        algorithm = self.algorithm.replace("_", "-")
        return describe(algorithm, self.shape.num_steps, self.shape.topk, self.draft_dir, target_dir)

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the draft's weights and the head's own settings (chained, auxiliary layers ...), or None."""
        if self.draft_dir is None:
            return None
        weights = fingerprint(self.draft_dir, self.draft)
        if self.head is None:
            return weights
        return xxhash.xxh3_128_hexdigest(json.dumps([weights, self.head.raw], sort_keys=True).encode())

    def load(
        self, target: DecoderModel, target_kv: torch.Tensor, kv: torch.Tensor | None, on_progress: Progress | None
    ) -> Drafter | None:
        """The drafter, its own KV in `kv`, where it has one. None without speculation."""
        if self.algorithm == "none":
            return None
        if self.algorithm == "ngram":
            return NgramDrafter(self.hidden, self.shape)
        if self.frozen is not None:
            return FrozenKvDrafter(FrozenKvHead(self.frozen, target), target_kv, self.hidden, self.shape)
        assert self.draft_dir is not None and self.draft is not None and kv is not None
        if self.head is not None and self.algorithm == "mtp":
            layers = load_mtp(self.head, target)
            if len(layers) == 1:
                return ShiftedDrafter(self.algorithm, layers[0], kv, self.hidden, self.shape)
            return MtpLayersDrafter(layers, kv, self.hidden, self.shape)
        if self.head is not None:
            return ShiftedDrafter(self.algorithm, load_head(self.head, target), kv, self.hidden, self.shape)
        model = load_model(self.draft_dir, self.draft, target.dtype, target.device, on_progress)
        return StandaloneDrafter(model, kv, self.hidden, self.shape)


def read_speculation(config: EngineConfig, target_dir: Path, target: ModelConfig, dtype: HiddenDtype) -> Speculation:
    """Raises ConfigError for settings that cannot work together, ModelError for a draft directory that is none."""
    config = settle(config, target_dir)
    algorithm, shape = config.speculative, _shape(config)
    draft_dir = find_drafter(config, target_dir)
    if draft_dir is None:
        return Speculation(algorithm, shape, HiddenLayout(algorithm=algorithm, target_hidden_size=target.hidden_size))
    if algorithm == "standalone":
        return _standalone(shape, target_dir, target, draft_dir)
    if algorithm == "frozen-kv-mtp":
        return _frozen_kv(shape, target, draft_dir, dtype)
    return _head(algorithm, shape, config.draft_steps is None, target, draft_dir, dtype)


def _shape(config: EngineConfig) -> DraftShape:
    """Raises ConfigError for numbers that make no chain or tree, or a tree that the algorithm cannot draft."""
    steps = DEFAULT_STEPS if config.draft_steps is None else config.draft_steps
    topk, algorithm = config.draft_topk, config.speculative
    tree = "" if topk == 1 else f" (draft_topk {topk} asks for a tree, which has at least one step)"
    if not 1 <= steps <= MAX_STEPS:
        raise ConfigError(f"draft_steps {steps} is out of range: use 1 to {MAX_STEPS}, or --speculative none{tree}")
    if not 1 <= topk <= MAX_TOPK:
        raise ConfigError(f"draft_topk {topk} is out of range: use 1 to {MAX_TOPK}")
    if topk == 1:
        if config.draft_tokens not in (None, steps):
            raise ConfigError(
                f"draft_tokens {config.draft_tokens}: a chain (draft_topk 1) of {steps} steps has {steps}"
            )
        return DraftShape(steps)
    if algorithm not in DRAFTS_TREES:
        raise ConfigError(f"speculative {algorithm} drafts chains only, but draft_topk is {topk}: use 1")
    most = min(DraftShape(steps, topk).max_drafts, MAX_TREE_TOKENS)
    tokens = min(2 * topk * steps, most) if config.draft_tokens is None else config.draft_tokens
    if not steps <= tokens <= most:
        raise ConfigError(
            f"draft_tokens {tokens} is out of range: a tree of draft_steps {steps} and draft_topk {topk} can have"
            f" {steps} to {most}"
        )
    return DraftShape(steps, topk, tokens)


def _frozen_kv(shape: DraftShape, target: ModelConfig, draft_dir: Path, dtype: HiddenDtype) -> Speculation:
    frozen = read_frozen_kv(draft_dir, target)
    hidden = HiddenLayout(
        algorithm="frozen_kv_mtp",
        target_hidden_size=target.hidden_size,
        target_dtype=dtype,
        draft_hidden_size=frozen.config.hidden_size,
        draft_dtype=dtype,
    )
    return Speculation("frozen_kv_mtp", shape, hidden, frozen.config, draft_dir, frozen=frozen)


def _standalone(shape: DraftShape, target_dir: Path, target: ModelConfig, draft_dir: Path) -> Speculation:
    draft = ModelConfig.from_dir(draft_dir)
    _check_vocabulary(target_dir, target, draft_dir, draft)
    hidden = HiddenLayout(algorithm="standalone", target_hidden_size=target.hidden_size)
    return Speculation("standalone", shape, hidden, draft, draft_dir)


def _head(
    algorithm: str, shape: DraftShape, is_default: bool, target: ModelConfig, draft_dir: Path, dtype: HiddenDtype
) -> Speculation:
    head = read_head(draft_dir, target)
    if head.algorithm != algorithm:
        raise ConfigError(f"{draft_dir} holds a head for {head.algorithm}, but speculative is {algorithm}")
    num_mtp_layers = head.num_mtp_layers
    if num_mtp_layers > 1 and not shape.is_chain:
        raise ConfigError(
            f"{draft_dir} has {num_mtp_layers} MTP layers, which draft chains only; draft_topk is {shape.topk}: use 1"
        )
    if num_mtp_layers > 1 and is_default:
        shape = DraftShape(num_mtp_layers)
    if 1 < num_mtp_layers < shape.num_steps:
        raise ConfigError(
            f"draft_steps is {shape.num_steps}, but {draft_dir} has {num_mtp_layers} MTP layers, each for one step:"
            f" use 1 to {num_mtp_layers}"
        )
    num_layers = target.num_layers
    aux_layers = ()
    if algorithm == "eagle3":
        aux_layers = head.aux_layers or (2, num_layers // 2, num_layers - 3)
        if len(aux_layers) != 3 or not all(0 <= layer <= num_layers for layer in aux_layers):
            raise ConfigError(f"EAGLE-3 takes three states of layers 0 to {num_layers}, {draft_dir} names {aux_layers}")
    hidden = HiddenLayout(
        algorithm=algorithm,
        target_hidden_size=target.hidden_size,
        target_dtype=dtype,
        draft_hidden_size=head.config.hidden_size,
        draft_dtype=dtype,
        hc_mult=target.hc_mult,
        hands_over_collapsed=target.hands_over_collapsed,
        draft_hc_mult=head.config.hc_mult,
        num_aux=len(aux_layers),
        num_mtp_layers=num_mtp_layers,
        is_chained=num_mtp_layers == 1 or head.is_chained,
    )
    draft = head.config
    return Speculation(algorithm, shape, hidden, draft, draft_dir, head, aux_layers=aux_layers)


def _pool(draft: ModelConfig, target: PoolLayout) -> PoolLayout:
    return PoolLayout(
        num_layers=draft.num_layers, num_kv_heads=draft.num_kv_heads, head_dim=draft.head_dim, dtype=target.dtype
    )


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
