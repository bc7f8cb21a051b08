"""Pools of a model outside an engine, for a single forward, and pages of a sequence outside a node."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.engine.checkpoint.model_config import VALUES, ModelConfig
from baton.engine.state.model_pools import ModelPools
from baton.engine.state.pages import Owner, PagePool
from baton.engine.state.tail_pages import TailPages
from baton.metadata.handoff.schema.kv_layout import KvLayout, planes_of, pool_of
from baton.metadata.wire.node_info import KvPlane


def pools_of(
    config: ModelConfig, page_size: int, num_pages: int, fill: float = 0.0, dtype: torch.dtype = torch.float32
) -> ModelPools:
    """Return the pools of `config`, full of `fill`."""
    name = "float32" if dtype is torch.float32 else "bfloat16"

    def pool(num_layers: int, planes: Sequence[KvPlane]) -> torch.Tensor:
        layout = KvLayout.of(pool_of(num_layers, name, planes), page_size)
        own = torch.float32 if planes[0].dtype == "float32" else dtype
        return torch.full(layout.stacked_shape(num_pages), fill, dtype=own)

    described = config.pool(name, page_size=page_size)
    further = {each.name: pool(each.num_layers, each.planes) for each in described.further}
    return ModelPools(
        pool(described.num_layers, planes_of(described)), values=further.pop(VALUES, None), further=further
    )


def pages_for(pool: PagePool, num_tokens: int) -> tuple[list[int], TailPages | None]:
    """Allocate pages for so many tokens. Return them, and the table of as many tail pages beside them; None: the model
    has none."""
    pages = pool.allocate(-(-num_tokens // pool.page_size), Owner.REQUEST)
    if not pool.num_tails:
        return pages, None
    tail = TailPages(pool.num_pages)
    tail.extend(len(pages), pool.allocate_tails(len(pages), Owner.REQUEST))
    return pages, tail
