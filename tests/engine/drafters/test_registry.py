"""What a configuration and the model's directory make of the drafter, and of the schema that two nodes compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from handoff_nodes import make_client, make_server, named, peer_of, spin, unit
from heads import write_head

from baton.decode_node.config import DecodeConfig
from baton.engine.drafters.registry import read_speculation
from baton.engine.model_config import ModelConfig
from baton.metadata.handoff_client import TransferFailed
from baton.metadata.node_info import HandoffSchema, PoolLayout

Checkpoints = Callable[..., Path]


@pytest.fixture
def model(checkpoint: Checkpoints) -> Path:
    return checkpoint("llama", num_hidden_layers=3)


def frozen_schema(model: Path, directory: Path, layers: list[int]) -> HandoffSchema:
    """What a node with a frozen-KV head says when it meets another: all that differs is what its file names."""
    head = write_head(directory / f"frozen-{layers}", "frozen-kv-mtp", model, target_layers=layers)
    config = DecodeConfig(speculative="frozen-kv-mtp", draft_model=str(head))
    target = ModelConfig.from_dir(model)
    pool = PoolLayout(num_layers=3, num_kv_heads=target.num_kv_heads, head_dim=target.head_dim, dtype="float32")
    return read_speculation(config, model, target, "float32").schema(pool, 4, checksums=True)


def test_nodes_whose_heads_read_other_layers_refuse_each_other(model: Path, tmp_path: Path) -> None:
    """Same tensors, same settings: without the map in the schema they would pair, and draft from other layers."""
    here, there = (frozen_schema(model, tmp_path, layers) for layers in ([0, 2], [0, 1]))
    server, source = make_server(here)
    client, target = make_client(there)
    try:
        server.open(unit(), 1)
        client.claim(unit(), peer_of(server), 0, [3])
        events = spin([server, client], lambda events: named(events, TransferFailed), timeout_s=1.0)
        failed = named(events, TransferFailed)[0]
        assert failed.is_refused and "frozen_layers: 0, 2 here, 0, 1 there" in failed.reason, failed
    finally:
        for each in (*source, *target, server, client):
            each.close()
