"""`baton prefill`: load the model, join the router, compute prompts and serve their pages."""

from __future__ import annotations

from ..engine.prompts import Prompts
from ..engine.startup import load_engine, load_keys, make_endpoint, node_id, serve
from ..metadata.bus.addresses import any_port_of
from ..metadata.bus.membership import Membership
from ..metadata.bus.sockets import new_epoch
from ..metadata.errors import ConfigError
from ..metadata.handoff.server import HandoffServer
from .config import PrefillConfig
from .node import PrefillNode

_WILDCARDS = ("0.0.0.0", "::", "*")


def run(config: PrefillConfig) -> int:
    """Run until SIGTERM or SIGINT and return the exit status. Raises ConfigError and ModelError before it serves."""
    name = node_id(config, "prefill")
    if config.bind_host in _WILDCARDS:
        raise ConfigError(
            f"bind_host {config.bind_host} is a wildcard: give the address at which decode nodes reach this node"
        )
    keys = load_keys(config, any_port_of(config.bind_host))
    epoch = new_epoch()
    engine = load_engine(config, lambda engine: Prompts(engine).warm_up())
    endpoint = make_endpoint(config, name, engine, keys, epoch)
    handoff = HandoffServer(endpoint, config.bind_host, lease_s=engine.lease_s)

    def make_node(membership: Membership) -> PrefillNode:
        sizes = config.max_running, config.chunk(engine.device.type)
        return PrefillNode(Prompts(engine), engine.cache, membership, handoff, *sizes)

    return serve(config, name, "prefill", engine, keys, epoch, handoff.address, make_node)
