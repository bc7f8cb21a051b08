"""The ranks of a node: rank 0's engine in this process, and the processes of the other ranks with theirs.

    rank 0: RankedEngine --frame--> rank i: run_rank

Every rank loads its share of the model and does the same start. Then ranks 1 and above do the work that they get, in
the same order as rank 0 (ranks/executor.py). Between two works they hand over pages (ranks/handoffs.py). The ranks of a
group (`--dp-attention`) get no work: each of them is a node of its own, which its role's package runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from ...metadata.errors import ConfigError, TransferError
from ...metadata.garbage import Garbage
from ...metadata.handoff.ranks.orders import BeginPulling, BeginServing
from ...metadata.logs import setup_logging
from ..checkpoint.model_check import resolve_model
from ..config import EngineConfig
from ..device import choose_device, choose_dtype, kind_of
from ..drafters.speculation import read_speculation
from ..engine import Engine, read_target
from ..products.ranked import RankRows
from ..prompts.prompts import Prompts
from ..rounds.device_executor import executor_of
from ..startup import load_engine, new_epoch, rank_id
from ..state.mapped_blocks import MappedBlocks
from ..tiers.cuda_copies import CudaCopies
from ..tiers.host_copies import HostCopies
from ..tiers.opening import open_disk_tier
from ..work import Chunk, Forget, LoadPages, Round, ShareSlots, StorePages, WarmUp
from .board import Board
from .cuda_group import CudaGroup
from .devices import check_devices, orders, see
from .group import START_TIMEOUT_S, TIMEOUT_S, CpuGroup, Group
from .handoff_line import RankHandoff
from .handoffs import begin
from .processes import ARRIVED, READY, REPORT, RankProcesses
from .rank_copies import RankCopies, SharedSlots, SlotPlaces, copy
from .ranks import Ranks, check_shares
from .steps import NUM_VALUES, GroupSteps
from .work_frames import HandoffOrder, Work, decode, encode


def check_ranks(config: EngineConfig, size: int) -> None:
    """Raise ConfigError if `size` ranks cannot serve with this configuration, before any of them starts."""
    device = choose_device(config.device)
    if kind_of(device).is_apart:
        check_devices(size, torch.cuda.device_count(), "--tp")
    model_dir = resolve_model(config.model)
    model = read_target(model_dir, config)
    check_shares(model, size, f"the model in {model_dir}")
    speculation = read_speculation(config, model_dir, model, choose_dtype(config.dtype, device, model.checkpoint_dtype))
    if speculation.draft is not None:
        check_shares(speculation.draft, size, f"the drafter in {speculation.draft_dir}")


ServeRank = Callable[[EngineConfig, int, str, Engine], None]  # runs the node of a rank, named so, until it leaves


def check_group(config: EngineConfig) -> None:
    """Raise ConfigError if the ranks of a group cannot divide the model, or have too few GPUs, before any of them
    starts."""
    size = config.dp_attention
    if kind_of(choose_device(config.device)).is_apart:
        check_devices(size, torch.cuda.device_count(), "--dp-attention")
    model_dir = resolve_model(config.model)
    check_shares(read_target(model_dir, config), size, f"the model in {model_dir}", has_all_heads=True)


def _rehearse_nothing(engine: Engine) -> None:
    del engine


def start_ranks(
    config: EngineConfig,
    *,
    num_slots: int,
    name: str,
    serve: ServeRank,
    rehearse: Callable[[Engine], None] = _rehearse_nothing,
) -> RankedEngine:
    """Start the ranks that the configuration asks for. `serve` runs the nodes of ranks 1 and above, if each rank is a
    node. Raises as `check_ranks`, `check_group` and `RankedEngine`."""
    if config.dp_attention > 1:
        check_group(config)
        return RankedEngine(config, config.dp_attention, num_slots=num_slots, name=name, serve=serve, rehearse=rehearse)
    check_ranks(config, config.tp)
    return RankedEngine(config, config.tp, num_slots=num_slots, name=name, rehearse=rehearse)


class RankedEngine:
    """Owns rank 0's engine and the processes of the other ranks. Context manager: leaving it ends them."""

    def __init__(
        self,
        config: EngineConfig,
        size: int,
        *,
        num_slots: int,
        name: str = "node",
        serve: ServeRank | None = None,
        timeout_s: float = TIMEOUT_S,
        rehearse: Callable[[Engine], None] = _rehearse_nothing,
        devices: Sequence[int] | None = None,
    ) -> None:
        """Start the ranks, and wait until all have loaded their share of the model and run it once.

        `num_slots`: of rounds; 0 on a node that runs none. `name`: of the node, for the logs of its ranks.
        `serve`: runs a node on each of ranks 1 and above, which has sequences of its own; it can be pickled. None: they
        do the work of this node. `timeout_s`: a collective operation or a
        report that takes longer in service raises RankLost. `rehearse`: as of `load_engine`; it can be pickled.
        `devices`: the GPU of each rank among those that this process sees, that of rank 0 being 0; None: one GPU per
        rank, in their order.

        Raises RankLost if a rank cannot start, and ConfigError and ModelError as `load_engine`."""
        self.size, self.num_slots = size, num_slots
        self._stack = ExitStack()
        with ExitStack() as starting:
            folder = starting.enter_context(tempfile.TemporaryDirectory(prefix="baton-ranks-"))
            meeting = str(Path(folder) / "meeting")
            self.processes = starting.enter_context(
                RankProcesses(
                    size,
                    run_rank,
                    name,
                    size,
                    meeting,
                    config,
                    num_slots,
                    serve,
                    rehearse,
                    _gpu_orders(config, devices or range(size)),
                    timeout_s=timeout_s,
                )
            )
            self.processes.wait_arrived()
            try:
                group = _meet(config, 0, size, meeting)
                starting.callback(group.close)
                self.processes.when_lost(group.abandon)
                self.processes.when_watched(partial(group.limit, timeout_s))
                self.ranks = _ranks(group, Path(folder), name, is_group=serve is not None)
                if self.ranks.steps is not None:
                    starting.callback(self.ranks.steps.board.close)
                    starting.callback(self.ranks.steps.board.end)
                    self.processes.when_lost(self.ranks.steps.board.end)
                self.engine = load_engine(config, rehearse, self.ranks)
            except RuntimeError as error:
                raise self.processes.end(f"rank 0 could not start: {error}") from error
            self.processes.wait_ready()
            if serve is None:
                self._join_tiers(config)
            self._stack = starting.pop_all()

    def _join_tiers(self, config: EngineConfig) -> None:
        """Let the host tiers of all ranks, if there are any, act as one, and write files if the config names some."""
        tier = self.engine.cache.tier
        if tier is None:
            return
        copies = tier.copies = RankCopies(tier.copies, self.send)
        if config.disk_cache is not None:
            self.send(ShareSlots())
            reports = [self.processes.report(rank) for rank in range(1, self.size)]
            copies.share([msgspec.msgpack.decode(each, type=SlotPlaces) for each in reports])
            open_disk_tier(self.engine, config)

    def __enter__(self) -> RankedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all other ranks and leave the group."""
        self._stack.close()

    def send(self, work: Work) -> None:
        """Send work to all other ranks."""
        frame = encode(work)
        for rank in range(1, self.size):
            self.processes.send(rank, frame)


def _ranks(group: Group, folder: Path, name: str, *, is_group: bool) -> Ranks:
    """Return what is divided among the ranks of this process's group. `is_group`: each rank is a node, and `name` is
    that of the group."""
    if not is_group:
        return Ranks(group)
    rows = RankRows()
    board = Board(folder, group.rank, group.size, NUM_VALUES, timeout_s=START_TIMEOUT_S)
    epoch = Ranks(group).tell(new_epoch().encode()).decode()  # every rank has a socket when it returns
    return Ranks(group, rows, GroupSteps(board, rows, name, epoch))


def _gpu_orders(config: EngineConfig, devices: Sequence[int]) -> list[str]:
    """Return the order in which each rank sees the GPUs. Empty: the ranks compute on CPUs."""
    if not kind_of(choose_device(config.device)).is_apart:
        return []
    return orders(torch.cuda.device_count(), devices)


def _meet(config: EngineConfig, rank: int, size: int, meeting: str) -> Group:
    """Return the group of this process, on its current device. All ranks must call it.

    Its operations may wait as long as those of a start. In service rank 0 waits less, and ends the other ranks."""
    host = CpuGroup(rank, size, Path(meeting), timeout_s=START_TIMEOUT_S)
    if not kind_of(choose_device(config.device)).is_apart:
        return host
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        return CudaGroup(host, MappedBlocks(host, device, START_TIMEOUT_S))
    except TransferError as error:
        raise ConfigError(f"the GPUs of rank {rank} and the others do not map each other's memory: {error}") from error


def _do_in_tier(
    work: ShareSlots | StorePages | LoadPages, engine: Engine, connection: Connection, shared: SharedSlots | None
) -> SharedSlots | None:
    """Do work in this rank's host tier. Return the slots that rank 0 maps, None if it maps none: `shared`, or new
    ones."""
    assert engine.cache.tier is not None, work
    copies = engine.cache.tier.copies
    if isinstance(work, ShareSlots):
        assert isinstance(copies, HostCopies | CudaCopies), work
        shared = SharedSlots(copies)
        connection.send_bytes(REPORT + msgspec.msgpack.encode(shared.places))
        return shared
    copy(copies, work)
    if shared is not None:
        shared.note_call()
    return shared


def run_rank(
    connection: Connection,
    reports: Connection,
    rank: int,
    name: str,
    size: int,
    meeting: str,
    config: EngineConfig,
    num_slots: int,
    serve: ServeRank | None,
    rehearse: Callable[[Engine], None],
    gpu_orders: Sequence[str],
) -> None:
    """Run rank 1 or above: load its share of the model. Then `serve`, or work until the pipe is closed (EOFError)."""
    if gpu_orders:
        see(gpu_orders[rank])
    setup_logging(config, rank_id(name, rank))
    connection.send_bytes(ARRIVED)
    group = _meet(config, rank, size, meeting)
    engine = load_engine(config, rehearse, _ranks(group, Path(meeting).parent, name, is_group=serve is not None))
    if serve is not None:
        connection.send_bytes(READY)
        serve(config, rank, rank_id(name, rank), engine)
        return
    Garbage()  # a full collection of what torch brings would hold up all ranks
    executor, prompts = executor_of(engine, num_slots), Prompts(engine)
    connection.send_bytes(READY)
    handoff: RankHandoff | None = None  # from the first order of a handoff on
    shared: SharedSlots | None = None  # if the node has files of pages
    num_under_way = 0
    while True:
        if handoff is not None:
            handoff.wait()
        match work := decode(connection.recv_bytes()):
            case BeginPulling() | BeginServing():
                handoff = handoff or RankHandoff(connection, reports)
                handoff.add(begin(work, config, name, engine, connection))
            case _ if isinstance(work, HandoffOrder):
                assert handoff is not None, work
                handoff.do(work)
            case Chunk():
                prompts.submit(work).draft()
            case Forget():
                prompts.forget(work.key)
            case ShareSlots() | StorePages() | LoadPages():
                shared = _do_in_tier(work, engine, connection, shared)
            case WarmUp() if num_slots:
                executor.warm_up(expects_prompts=work.expects_prompts)
            case WarmUp():
                prompts.warm_up()
            case Round():
                executor.submit(work)
                num_under_way += 1
            case _:
                executor.submit(work)
        if num_under_way > executor.runs_ahead:  # nobody asks for the tokens, which rank 0 has too
            executor.collect()
            num_under_way -= 1
