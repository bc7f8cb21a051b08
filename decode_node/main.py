"""`baton decode`: load the model, join the router, pull the pages of prompts and generate."""

from __future__ import annotations

from ..engine.device_executor import DeviceExecutor
from ..engine.engine import Engine
from ..engine.graphs import graph_sizes
from ..engine.startup import load_engine, load_keys, make_endpoint, node_id, serve
from ..metadata.bus.membership import Membership
from ..metadata.bus.sockets import new_epoch
from ..metadata.handoff.client import HandoffClient
from .config import DecodeConfig
from .node import DecodeNode


def run(config: DecodeConfig) -> int:
    """Run until SIGTERM or SIGINT and return the exit status. Raises ConfigError and ModelError before it serves."""
    name = node_id(config, "decode")
    keys = load_keys(config)
    epoch = new_epoch()

    def make_executor(engine: Engine) -> DeviceExecutor:
        return DeviceExecutor(engine, config.max_running, graph_sizes(engine.kv, config.max_running))

    engine = load_engine(config, lambda engine: make_executor(engine).rehearse())
    handoff = HandoffClient(make_endpoint(config, name, engine, keys, epoch))

    def make_node(membership: Membership) -> DecodeNode:
        return DecodeNode(
            make_executor(engine),
            engine.cache,
            membership,
            handoff,
            config.max_running,
            config.chunk(engine.device.type),
            is_adaptive=config.draft_adaptive,
            max_gap_s=config.max_gap_s,
        )

    return serve(config, name, "decode", engine, keys, epoch, "", make_node)
