"""Life of a node of either role: load, warm up, meet the router, loop, leave."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

from ..kernels.operations import captures
from ..metadata.bus.addresses import address_of_rank, any_port_of, host_towards, parse_address, require_keys
from ..metadata.bus.allow_list import RANK, is_router
from ..metadata.bus.curve import KeyPair
from ..metadata.bus.membership import Member, Membership
from ..metadata.bus.router_addresses import router_entries
from ..metadata.bus.sockets import new_epoch as new_epoch
from ..metadata.cache.kv_events import KvEvents
from ..metadata.errors import ConfigError, RankLost, Refused
from ..metadata.garbage import Garbage
from ..metadata.handoff.descriptor_inbox import user_directory
from ..metadata.handoff.endpoint import Endpoint
from ..metadata.handoff.schema.schema import further_pools, needed_protocol, pool_words
from ..metadata.handoff.transports.registry import TRANSPORTS
from ..metadata.service_manager import notify
from ..metadata.wire.membership import Hello
from ..metadata.wire.node_info import Capacity, Role
from ..metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN, fields_since
from .checkpoint.hub import commit_of
from .checkpoint.model_card import read_tokenizer
from .checkpoint.model_check import resolve_model
from .config import EngineConfig
from .device import choose_device, kind_of
from .engine import Engine, default_node_id, read_target, use_threads
from .progress import ProgressBar
from .ranks.processes import RankProcesses
from .ranks.ranks import ONE_RANK, Ranks
from .state.memory_share import fit_pools, memory_to_start, rehearsal_pages
from .tiers.opening import open_disk_tier
from .tuning.tuning import share_choices, tune, use_file

_GROUP_PROTOCOL = fields_since(Hello)["place"]  # a router of an older one would not know that ranks live together
_WILDCARDS = ("0.0.0.0", "::", "*")
logger = logging.getLogger(__name__)


class ServedNode(Member, Protocol):
    """A node that `serve` can run."""

    def step(self) -> bool:
        """Receive, compute, send. Returns whether there is more to compute at once."""
        ...


def load_engine(
    config: EngineConfig, rehearse: Callable[[Engine], None] = lambda _: None, ranks: Ranks = ONE_RANK
) -> Engine:
    """Load the model, or this rank's share of it, and run it once. On CUDA, its pools get what the node's share of the
    GPU leaves beside a node's other work, which `rehearse` runs; but not without graphs, since the work of service is
    then not known before. Raises ModelError and ConfigError."""
    started = time.monotonic()
    if config.shared_dir is not None:
        user_directory(config.shared_dir)  # raises before anything big is loaded
    use_threads(config)
    device = choose_device(config.device)
    fits = captures(device) and kind_of(device).is_apart and config.num_pages is None
    with memory_to_start():
        with ProgressBar("loading weights", "MiB", 1 << 20) as progress:
            engine = Engine(config, progress, ranks, num_pages=_rehearsal_pages(config, device.type) if fits else None)
        logger.info("speculation: %s", engine.speculation.describe(engine.model_dir))
        if ranks.group.rank == 0:
            tune_products(engine, measures=config.tune)
        share_choices(ranks)
        if fits:
            fit_pools(engine, config, rehearse)
        engine.warm_up(config.chunk(engine.device.type))
        if config.host_cache_gb is not None:
            has_files = config.disk_cache is not None
            is_shared = has_files and config.tp > 1 and ranks.group.rank > 0
            engine.open_tier(int(config.host_cache_gb * 1e9) // config.num_ranks, is_shared=is_shared)
            if has_files and config.tp == 1:  # otherwise rank 0 opens the files when it knows the slots of all
                open_disk_tier(engine, config)
    logger.info(
        "%s ready on %s in %s: %d pages of %d tokens, %.1f s",
        engine.card.name,
        engine.device.type,
        engine.dtype_name,
        engine.pool.num_usable,
        engine.pool.page_size,
        time.monotonic() - started,
    )
    return engine


def _rehearsal_pages(config: EngineConfig, device: str) -> int:
    page_size = read_target(resolve_model(config.model), config).page_size(config.page_size)
    return rehearsal_pages(config.chunk(device), page_size)


def tune_products(engine: Engine, *, measures: bool) -> None:
    """On CUDA, choose the kernels of small products: those that an earlier start measured, and, if `measures`, the
    fastest ones for shapes that none has measured. The next warm-up compiles them."""
    if not (engine.captures and engine.kind.is_apart):
        return
    if not measures:
        use_file(engine.device)
        return
    with ProgressBar("measuring products") as progress:
        tune(engine.model, engine.drafter, engine.padding_step, progress)


def serve(
    config: EngineConfig,
    name: str,
    role: Role,
    engine: Engine,
    keys: KeyPair | None,
    epoch: str,
    data_address: str,
    make_node: Callable[[Membership], ServedNode],
    ranks: RankProcesses | None = None,
    *,
    borrows: bool = False,
) -> int:
    """Meet the router and run the node until it is asked to leave. Returns the exit status. `ranks`: its other ranks.
    `borrows`: it borrows cached pages of other nodes. Raises RankLost if one of its ranks is lost."""
    membership = make_membership(config, name, role, engine, keys, epoch, data_address, ranks, borrows=borrows)
    with memory_to_start(), nullcontext() if ranks is None else ranks.guarded():
        node = membership.member = make_node(membership)
    garbage, steps = Garbage(), engine.group_steps
    events = None
    if config.kv_events is not None:
        events = KvEvents(config.kv_events, engine.cache, 0 if steps is None else steps.place.rank)
    membership.install_signals()
    membership.start()
    if ranks is not None:
        ranks.watch()
    if steps is not None:
        steps.begin_service()
    try:
        while not (membership.is_over if steps is None else steps.may_end(membership, is_idle=node.is_idle)):
            try:
                if ranks is not None:
                    ranks.check()
                with nullcontext() if ranks is None else ranks.surviving():
                    is_busy = node.step() if steps is None else steps.run(node.step, membership)
            except RankLost:
                if steps is None or not steps.board.is_over:
                    raise
                break  # a request came as the others left: it moves to another node
            membership.report()
            if events is not None:
                events.tell(time.monotonic())
            garbage.look(time.monotonic(), is_idle=node.is_idle)
            if not is_busy:
                membership.wait() if steps is None else steps.sleep(membership.wait)
    except Refused as error:
        logger.error("%s", error)
        notify(words=str(error))
        return error.exit_status
    finally:
        membership.close()
        node.links.close()
        engine.cache.close()
        if events is not None:
            events.close()
    return 0


def make_membership(
    config: EngineConfig,
    name: str,
    role: Role,
    engine: Engine,
    keys: KeyPair | None,
    epoch: str,
    data_address: str,
    ranks: RankProcesses | None = None,
    *,
    borrows: bool = False,
) -> Membership:
    """The node's Hello and its link to the router, not started yet."""
    place = None if engine.group_steps is None else engine.group_steps.place
    protocol = needed_protocol(engine.schema)
    if protocol > PROTOCOL_MIN:
        names = ", ".join(f"{name} {pool_words(pool)}" for name, pool in further_pools(engine.schema).items())
        logger.info("peers that do not know protocol %d cannot name pools of this model: %s", protocol, names)
    hello = Hello(
        role=role,
        node_id=name,
        epoch=epoch,
        protocol_min=protocol if place is None else max(protocol, _GROUP_PROTOCOL),
        protocol_max=PROTOCOL_MAX,
        layout=engine.schema,
        target_fingerprint=engine.fingerprints[0],
        draft_fingerprint=engine.fingerprints[1],
        model=engine.card,
        capacity=Capacity(
            num_pages=engine.pool.num_usable,
            page_size=engine.pool.page_size,
            max_running=config.max_running,
            num_ranks=engine.num_ranks // engine.num_nodes,
            num_tails=engine.pool.num_usable_tails,
            tier_pages=0 if engine.cache.tier is None else engine.cache.tier.most_pages,
        ),
        data_address=data_address,
        rounds_coarsely=engine.rounds_coarsely,
        place=place,
        commit=commit_of(engine.model_dir),
        borrows=borrows,
    )
    return Membership(
        hello,
        config.router,
        lambda: read_tokenizer(engine.model_dir),
        keys,
        config.drain_timeout_s,
        tuple if ranks is None else ranks.silences_s,
    )


def node_id(config: EngineConfig, role: Role) -> str:
    """The configured id, or what the allow-list calls the node's key, or role-host-pid. Raises ConfigError where a key
    or the list cannot be read."""
    if config.node_id is not None:
        return config.node_id
    keys = KeyPair.configured(config)
    return (keys.name if keys is not None else None) or default_node_id(role)


def rank_id(name: str, rank: int) -> str:
    """Return the node id of rank 1 or above of the group `name`."""
    return f"{name}{RANK}{rank}"


def load_keys(config: EngineConfig, *addresses: str) -> KeyPair | None:
    """Return the node's key pair, or None if no key is configured.

    Raises ConfigError if a file holds no keys or no list, if the allow-list has another name for the node, or if the
    router's address or one of `addresses` is malformed or needs keys. All this is checked before anything big is
    loaded.
    """
    keys = KeyPair.configured(config)
    name = keys.name if keys is not None else None
    if name is not None and config.node_id not in (None, name):
        raise ConfigError(
            f"--node-id {config.node_id}: allow-list {config.allow_list} calls this node's key {name!r}; call the key "
            f"{config.node_id} in the list (`baton keys --name {config.node_id} FILE` makes a new one), or use "
            f"--node-id {name}"
        )
    if name is not None and is_router(name):
        raise ConfigError(
            f"--keys {config.keys}: allow-list {config.allow_list} calls this key {name!r}, which is a router's; give "
            "this node a key of its own"
        )
    for address in (*router_entries(config.router), *addresses):
        require_keys(address, keys)
        parse_address(address)
    return keys


def check_bind_host(config: EngineConfig) -> None:
    """Raise ConfigError if other nodes cannot open data links to this one at its `bind_host`, or need keys that it does
    not have."""
    if parse_address(any_port_of(config.bind_host)).host in _WILDCARDS:
        raise ConfigError(
            f"bind_host {config.bind_host} is a wildcard: give the address at which other nodes reach this node"
        )
    ends = (address_of_rank(config.bind_host, rank) for rank in (0, config.num_ranks - 1))
    load_keys(config, *map(any_port_of, ends))


def address_for_peers(config: EngineConfig, address: str) -> str:
    """Return the address at which a decode node tells other nodes to borrow its pages. It is empty if the router is on
    another host and `address` is loopback, since nodes of other hosts would not reach it."""
    is_loopback, router = parse_address(address).is_loopback, host_towards(router_entries(config.router)[0])
    return "" if is_loopback and not parse_address(any_port_of(router)).is_loopback else address


def make_endpoint(
    config: EngineConfig,
    name: str,
    engine: Engine,
    keys: KeyPair | None,
    epoch: str,
    fingerprints: tuple[str, str | None] | None = None,
) -> Endpoint:
    """Return what the node, or this rank of it, brings to handoffs. `fingerprints`: those of rank 0; None: this is rank
    0, or the only one. Raises ConfigError if it can use no transport."""
    return Endpoint(
        node_id=name,
        epoch=epoch,
        schema=engine.schema,
        fingerprints=fingerprints or engine.fingerprints,
        memory=engine.memory,
        transports=transports(config, engine),
        device=engine.device_pool,
        shard=engine.shard,
        keys=keys,
        shared_dir=None if config.shared_dir is None else user_directory(config.shared_dir),
        own_host=host_towards(router_entries(config.router)[0]),
    )


def transports(config: EngineConfig, engine: Engine) -> tuple[str, ...]:
    """The transports that the node may use, best first. Raises ConfigError where it can use none."""
    if config.transport == "cuda" and not engine.kind.is_apart:
        raise ConfigError(f"transport cuda needs device cuda, this node is on {engine.device.type}; use auto")
    automatic = [name for name, each in TRANSPORTS.items() if each.is_automatic]
    chosen = automatic if config.transport == "auto" else [config.transport]
    names = tuple(name for name in chosen if engine.kind.is_apart or not TRANSPORTS[name].needs_device)
    allowed = tuple(name for name in names if _is_allowed(config, name))
    if any(TRANSPORTS[name].is_readable for name in allowed):
        logger.warning("--plain-pages: whoever sees the network between hosts can read pages, and so prompts")
    return allowed


def _is_allowed(config: EngineConfig, name: str) -> bool:
    """Return whether the keys and the operator's words let pages travel by this transport. Raises ConfigError if it is
    the only one that was asked for."""
    transport = TRANSPORTS[name]
    missing = "--keys FILE" if transport.needs_page_port and config.keys is None else ""
    if transport.is_readable and not config.plain_pages:
        missing = "--plain-pages on both nodes"
    missing = missing or transport.missing()
    if missing and config.transport == name:
        raise ConfigError(f"transport {name} needs {missing}; give it, or use auto")
    return not missing
