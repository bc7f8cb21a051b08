"""Types by which a drafter describes itself. Its module has a FAMILY: what the drafter needs and how it is loaded.

read    settings and the draft directory -> Speculation      before the schema of the handoff is made
load    Speculation, target, KV pools    -> Drafter          after the pools are allocated
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from ...metadata.handoff.schema.hidden_layout import TORCH_DTYPES, HiddenDtype, HiddenLayout, Source
from ...metadata.handoff.schema.schema import make_schema
from ...metadata.wire.node_info import HandoffSchema, PoolLayout
from ..checkpoint.fingerprint import fingerprint
from ..checkpoint.model_config import ModelConfig
from ..config import KvDtype
from ..models.decoder import DecoderModel
from ..models.target_ends import TargetEnds, ends_in
from ..pace.draft_length import DraftShape
from ..progress import Progress
from ..ranks.ranks import Ranks
from ..state.model_pools import ModelPools
from .base import Drafter
from .registry import describe


class Wanted(NamedTuple):
    """Settings that a drafter is read with."""

    algorithm: str
    shape: DraftShape
    is_default_steps: bool  # nobody asked for a number of steps
    target_dir: Path
    target: ModelConfig
    target_dtype: HiddenDtype
    draft_dir: Path  # of a drafter with files; else the target's
    draft_dtype: HiddenDtype

    def layout(
        self,
        draft: ModelConfig | None = None,
        *,
        extend: Source | None = None,
        recurrent: Source | None = None,
        num_target_rows: int = 0,
        num_aux: int = 0,
    ) -> HiddenLayout:
        """Return the hidden states of this target and `draft`, the configuration of the draft's own layers."""
        return HiddenLayout(
            algorithm=self.algorithm,
            extend=extend,
            recurrent=recurrent,
            num_target_rows=num_target_rows,
            target_hidden_size=self.target.hidden_size,
            target_dtype=self.target_dtype,
            hc_mult=self.target.hc_mult,
            hands_over_collapsed=self.target.hands_over_collapsed,
            draft_hidden_size=0 if draft is None else draft.hidden_size,
            draft_dtype=self.draft_dtype,
            draft_hc_mult=None if draft is None else draft.hc_mult,
            num_aux=num_aux,
        )


class Loading(NamedTuple):
    """Parts of a node that a drafter is made with."""

    shape: DraftShape
    hidden: HiddenLayout
    target: DecoderModel
    target_pools: ModelPools
    draft_pools: ModelPools | None  # the drafter's own, if it has some
    on_progress: Progress | None
    ranks: Ranks  # that share the draft

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the draft computes."""
        return TORCH_DTYPES[self.hidden.draft_dtype]

    @property
    def ends(self) -> TargetEnds:
        """The target's embedding and output matrix, in the draft's dtype."""
        return ends_in(self.dtype, self.target)

    @property
    def pools(self) -> ModelPools:
        """The drafter's own pools, which it must have."""
        assert self.draft_pools is not None
        return self.draft_pools


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The configuration of target, draft and algorithm. Not every drafter has the fields with defaults."""

    algorithm: str
    shape: DraftShape
    hidden: HiddenLayout
    make: Callable[[Loading], Drafter] | None = None  # None: no drafter
    draft_dir: Path | None = None
    draft: ModelConfig | None = None  # of the draft's own layers
    settings: Mapping[str, Any] | None = None  # config.json of a head whose settings change what it computes
    has_pool: bool = False  # the draft has KV of its own
    key_lookahead: int = 0  # on how many next tokens that KV at a position depends
    num_proposing: int = 0  # rows whose proposals are handed over; 0: it proposes from the bonus token
    frozen_layers: tuple[int, ...] = ()  # by draft layer: the target layer whose KV it attends to
    aux_layers: tuple[int, ...] = ()  # target layers whose input states the drafter takes; none: another state

    def schema(
        self, target: PoolLayout, page_size: int, *, checksums: bool, kv_dtype: KvDtype = "auto"
    ) -> HandoffSchema:
        """Return the schema of the handoff with this drafter. `kv_dtype`: of the draft's own pool. Raises ConfigError
        if the draft cannot have it."""
        return make_schema(
            target,
            self._pool(kv_dtype, page_size),
            page_size,
            self.algorithm,
            self.hidden,
            key_lookahead=self.key_lookahead,
            draft_topk=self.shape.topk if self.num_proposing else 0,
            draft_rows=max(1, self.num_proposing),
            ranks_trees=self.num_proposing > 0 and not self.shape.is_chain,
            frozen_layers=self.frozen_layers,
            checksums=checksums,
        )

    def describe(self, target_dir: Path) -> str:
        """Return the drafter in words for logs: "eagle, 5 steps, drafter eagle/"."""
        return describe(self.algorithm, self.shape.num_steps, self.shape.topk, self.draft_dir, target_dir)

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the draft's weights and the head's own settings (chained, auxiliary layers ...), or None."""
        if self.draft_dir is None:
            return None
        weights = fingerprint(self.draft_dir, self.draft)
        if self.settings is None:
            return weights
        return xxhash.xxh3_128_hexdigest(json.dumps([weights, self.settings], sort_keys=True).encode())

    def load(
        self,
        target: DecoderModel,
        target_pools: ModelPools,
        draft_pools: ModelPools | None,
        on_progress: Progress | None,
        ranks: Ranks,
    ) -> Drafter | None:
        """Return the drafter, or this rank's share of it, its own KV in `draft_pools` if it has any; None without
        speculation."""
        if self.make is None:
            return None
        return self.make(Loading(self.shape, self.hidden, target, target_pools, draft_pools, on_progress, ranks))

    def _pool(self, kv_dtype: KvDtype, page_size: int) -> PoolLayout | None:
        if not self.has_pool:
            return None
        assert self.draft is not None
        return self.draft.pool(self.hidden.draft_dtype, kv_dtype, page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A drafter's description of itself."""

    name: str  # the value of --speculative
    read: Callable[[Wanted], Speculation]  # raises ConfigError for what cannot work together, ModelError for no draft
    drafts_trees: bool = False
    recognises: Callable[[frozenset[str]], bool] | None = None  # a head, by its tensors' names; None: no such head
