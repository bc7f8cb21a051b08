"""The ranks of a node: rank 0's engine in this process, and the processes of the other ranks with theirs.

    rank 0: RankedEngine --frame--> rank i: run_rank

Every rank loads its share of the model and does the same start. Then ranks 1 and above do the work that they get, in
the same order as rank 0 (ranks/executor.py). Between two works they hand over pages (ranks/handoffs.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

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
from ..rounds.device_executor import DeviceExecutor
from ..rounds.graphs import graph_sizes
from ..startup import load_engine
from ..state.mapped_blocks import MappedBlocks
from ..work import Chunk, Forget, Round, WarmUp
from .cuda_group import CudaGroup
from .devices import check_devices, orders, see
from .dp_attention import check_dp_attention
from .group import START_TIMEOUT_S, TIMEOUT_S, CpuGroup, Group
from .handoff_line import RankHandoff
from .handoffs import begin
from .processes import ARRIVED, READY, RankProcesses
from .ranks import Ranks, check_shares
from .work_frames import HandoffOrder, Work, decode, encode
from .worker import RankWorker, serve_rank


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


def _rehearse_nothing(engine: Engine) -> None:
    del engine


def start_ranks(
    config: EngineConfig, *, num_slots: int, name: str, rehearse: Callable[[Engine], None] = _rehearse_nothing
) -> RankedEngine:
    """Start the ranks that the configuration asks for. Raises as `check_ranks`, `check_dp_attention` and
    `RankedEngine`."""
    if config.dp_attention > 1:
        check_dp_attention(config)
        return RankedEngine(
            config, config.dp_attention, num_slots=num_slots, name=name, divides_sequences=True, rehearse=rehearse
        )
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
        divides_sequences: bool = False,
        timeout_s: float = TIMEOUT_S,
        rehearse: Callable[[Engine], None] = _rehearse_nothing,
        devices: Sequence[int] | None = None,
    ) -> None:
        """Start the ranks, and wait until all have loaded their share of the model and run it once.

        `num_slots`: of rounds; 0 on a node that runs none. `name`: of the node, for the logs of its ranks.
        `divides_sequences`: every rank attends for sequences of its own. `timeout_s`: a collective operation or a
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
                    divides_sequences,
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
                self.ranks = Ranks(group, RankRows() if divides_sequences else None)
                self.engine = load_engine(config, rehearse, self.ranks)
            except RuntimeError as error:
                raise self.processes.end(f"rank 0 could not start: {error}") from error
            self.processes.wait_ready()
            self._stack = starting.pop_all()

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


def executor_of(engine: Engine, num_slots: int) -> DeviceExecutor:
    """Return the executor of one rank. All ranks have the same buckets, so they replay the same graphs."""
    return DeviceExecutor(engine, num_slots, graph_sizes(engine.kv, num_slots))


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


def run_rank(
    connection: Connection,
    reports: Connection,
    rank: int,
    name: str,
    size: int,
    meeting: str,
    config: EngineConfig,
    num_slots: int,
    divides_sequences: bool,
    rehearse: Callable[[Engine], None],
    gpu_orders: Sequence[str],
) -> None:
    """Run rank 1 or above: load the share of the model, then do work until the pipe is closed (EOFError)."""
    if gpu_orders:
        see(gpu_orders[rank])
    setup_logging(config, f"{name}/rank-{rank}")
    connection.send_bytes(ARRIVED)
    group = _meet(config, rank, size, meeting)
    rows = RankRows() if divides_sequences else None
    engine = load_engine(config, rehearse, Ranks(group, rows))
    Garbage()  # a full collection of what torch brings would hold up all ranks
    if rows is not None:
        worker = RankWorker(engine, num_slots, rows, graph_sizes(engine.kv, num_slots))
        connection.send_bytes(READY)
        serve_rank(connection, worker)
    executor, prompts = executor_of(engine, num_slots), Prompts(engine)
    connection.send_bytes(READY)
    handoff: RankHandoff | None = None
    num_under_way = 0
    while True:
        if handoff is not None:
            handoff.wait()
        match work := decode(connection.recv_bytes()):
            case BeginPulling() | BeginServing():
                handoff = begin(work, config, name, engine, connection, reports)
            case _ if isinstance(work, HandoffOrder):
                assert handoff is not None, work
                handoff.do(work)
            case Chunk():
                prompts.submit(work).draft()
            case Forget():
                prompts.forget(work.key)
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
