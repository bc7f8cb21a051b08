"""The pools of one model, by name."""

from __future__ import annotations

import torch

from baton.engine.state.model_pools import ModelPools


def test_all_pools_are_named_in_order_and_a_layer_has_its_part_of_each() -> None:
    kv, index = torch.arange(3.0), torch.arange(3.0) + 10
    pools = ModelPools(kv, {"index": index})
    assert pools.all == (kv, index) and ModelPools(kv).all == (kv,)
    second = pools.layer(1)
    assert [pool.tolist() for pool in second.all] == [[1.0], [11.0]] and list(second.further) == ["index"]
    assert ModelPools(kv).layer(2).further == {}


def test_layers_of_both_kinds_reach_the_pools_beside_that_of_kv() -> None:
    kv, window, index = (torch.full((1,), float(i)) for i in range(3))
    unbounded, windowed = ModelPools(kv, {"window": window, "index": index}).by_window
    assert (unbounded.kv, windowed.kv) == (kv, window)
    assert unbounded.further == windowed.further == {"index": index}
