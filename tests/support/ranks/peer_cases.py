"""Operations of ranks on GPUs with inputs that every rank can make for all ranks, so that each result can be checked.

On a CPU, ranks are processes that share memory, and kernels run in Triton's interpreter.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton_device
from forked import fork_context
from torch import Tensor

from baton.engine.ranks.cuda_group import CudaGroup
from baton.engine.ranks.group import OneRank
from baton.kernels.ranks.all_reduce import (
    BLOCK_BYTES,
    CONTROL,
    NUM_LANES,
    PeerBlocks,
    all_gather_columns_ref,
    all_max_ref,
    all_reduce_norm_ref_,
    all_reduce_ref,
)

EPS = 1e-5


class Case(NamedTuple):
    """An operation. `shape` is that of a rank's input."""

    kind: str  # a method of the group
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    num_parts: int = 0  # summands of a delta; 0: it is whole
    num_lanes: int = NUM_LANES

    def num_columns(self, size: int) -> int:
        """Return the columns that are wanted of all: the last rank has some that are not."""
        return size * self.shape[1] - 3

    def input(self, rank: int, seed: int = 0) -> Tensor:
        """Return the input of a rank on the CPU: values whose sum depends on the order of its terms."""
        generator = torch.Generator().manual_seed(1 + rank + 100 * seed)
        if self.dtype == torch.bool:
            return torch.rand(self.shape, generator=generator) < 0.5
        if not self.dtype.is_floating_point:
            return torch.randint(-(1 << 40), 1 << 40, self.shape, generator=generator, dtype=self.dtype)
        if self.num_parts:
            return torch.randn(self.num_parts, *self.shape, generator=generator)
        return (torch.randn(self.shape, generator=generator) * 10.0**rank).to(self.dtype)

    def hidden(self, seed: int = 0) -> Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(77 + seed)).to(self.dtype)

    @property
    def weight(self) -> Tensor:
        return torch.randn(self.shape[-1], generator=torch.Generator().manual_seed(99)).to(self.dtype)

    def equal_lens(self, size: int) -> list[int]:
        """Return equal numbers of rows for the ranks, together those of the input."""
        assert self.shape[0] % size == 0, (self.shape, size)
        return [self.shape[0] // size] * size

    def lens(self, size: int) -> list[int]:
        """Return unlike numbers of rows for the ranks, together at most those of the input."""
        return [self.shape[0] >> (rank + 1) for rank in range(size)]


class NoMemory:
    """Blocks that need no unmapping (engine/ranks/cuda_group.py: Blocks). Keeps the memory of all ranks."""

    def __init__(self, blocks: PeerBlocks, memory: Sequence[Tensor]) -> None:
        self.blocks, self._memory = blocks, memory

    def close(self) -> None:
        self.blocks.control[CONTROL.has_failed] = 1


class _Host(OneRank):
    """The rank of a group whose host numbers nobody asks for."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size  # type: ignore[misc]


def local_group(rank: int, blocks: Sequence[Tensor], limit: int) -> CudaGroup:
    """Return the group of a rank, given the blocks of all ranks as this process has them. `limit`: as of `Control`."""
    device = blocks[0].device
    control = torch.zeros(len(CONTROL), dtype=torch.int64, pin_memory=device.type == "cuda")
    control[CONTROL.limit] = limit
    addresses = torch.tensor([block.data_ptr() for block in blocks], device=device)
    return CudaGroup(_Host(rank, len(blocks)), NoMemory(PeerBlocks(rank, addresses, blocks[rank], control), blocks))


def new_blocks(size: int, device: str = "cpu") -> list[Tensor]:
    return [torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device=device) for _ in range(size)]


def run(case: Case, group: CudaGroup, device: str, seed: int = 0) -> list[Tensor]:
    """Return the results of a rank, on the CPU."""
    return [each.cpu() for each in results(case, group, Tensors.of(case, group.rank, device, seed))]


class Tensors(NamedTuple):
    """What a case works on, on the device."""

    x: Tensor
    hidden: Tensor | None
    weight: Tensor | None

    @classmethod
    def of(cls, case: Case, rank: int, device: str, seed: int = 0) -> Tensors:
        x = case.input(rank, seed).to(device)
        if "norm" not in case.kind:
            return cls(x, None, None)
        return cls(x, case.hidden(seed).to(device), case.weight.to(device))

    def fill(self, case: Case, rank: int, seed: int) -> None:
        """Write the inputs of another seed in place."""
        self.x.copy_(case.input(rank, seed))
        if self.hidden is not None:
            self.hidden.copy_(case.hidden(seed))


def results(case: Case, group: CudaGroup, tensors: Tensors) -> list[Tensor]:
    with mock.patch("baton.kernels.ranks.triton_all_reduce.NUM_LANES", case.num_lanes):
        return _results(case, group, tensors)


def _results(case: Case, group: CudaGroup, tensors: Tensors) -> list[Tensor]:
    x, hidden, weight = tensors
    if hidden is not None and weight is not None and case.kind == "sum_norm_":
        return [group.sum_norm_(hidden, x, weight, EPS), hidden]
    if hidden is not None and weight is not None:
        lens = case.equal_lens(group.size)
        own = hidden[: lens[0]]
        return [group.reduce_scatter_norm_(own, x, weight, EPS, lens), own]
    if case.kind in ("sum", "max"):
        return [getattr(group, case.kind)(x)]
    lens = case.lens(group.size)
    if case.kind == "gather":
        return [group.gather(x[: lens[group.rank]], lens)]
    if case.kind == "gather_columns":
        return [group.gather_columns(x, case.num_columns(group.size))]
    if case.kind == "equal_scatter":
        return [group.reduce_scatter(x, case.equal_lens(group.size))]
    if case.kind == "exchange_columns":
        return [group.exchange_columns(x[: sum(lens)], lens, case.num_columns(group.size))]
    if case.kind == "reduce_scatter":
        return [group.reduce_scatter(x[: sum(lens)], lens)]
    assert case.kind == "all_to_all"
    return [group.all_to_all(x[: sum(lens)], [lens] * group.size)]


def expected(case: Case, rank: int, size: int, seed: int = 0) -> list[Tensor]:
    """Return what `run` should return on `rank`."""
    xs, lens = [case.input(each, seed) for each in range(size)], case.lens(size)
    if case.kind == "sum_norm_":
        hidden = case.hidden(seed)
        deltas = [_in_order(x).to(case.dtype) if case.num_parts else x for x in xs]
        return [all_reduce_norm_ref_(hidden, deltas, case.weight, EPS), hidden]
    if case.kind == "reduce_scatter_norm_":
        equal = case.equal_lens(size)
        hidden = case.hidden(seed)[: equal[0]]
        deltas = [_in_order(x).to(case.dtype) if case.num_parts else x for x in xs]
        own = [delta.split(equal)[rank] for delta in deltas]
        return [all_reduce_norm_ref_(hidden, own, case.weight, EPS), hidden]
    if case.kind == "sum":
        return [all_reduce_ref(xs) if case.dtype.is_floating_point else torch.stack(xs).sum(0)]
    if case.kind == "max":
        return [all_max_ref(xs)]
    if case.kind == "gather":
        return [torch.cat([x[:num_rows] for x, num_rows in zip(xs, lens, strict=True)])]
    if case.kind == "gather_columns":
        return [all_gather_columns_ref(xs, case.num_columns(size))]
    if case.kind == "equal_scatter":
        return [all_reduce_ref(xs).split(case.equal_lens(size))[rank]]
    if case.kind == "exchange_columns":
        whole = all_gather_columns_ref([x[: sum(lens)] for x in xs], case.num_columns(size))
        return [whole.split(lens)[rank]]
    if case.kind == "reduce_scatter":
        each = [x[: sum(lens)] for x in xs]
        total = all_reduce_ref(each) if case.dtype.is_floating_point else torch.stack(each).sum(0)
        return [total.split(lens)[rank]]
    return [torch.cat([x[: sum(lens)].split(lens)[rank] for x in xs])]


def check(case: Case, rank: int, size: int, actual: Sequence[Tensor], seed: int = 0) -> None:
    """Compare results. Sums and copies must have the bits of the specification; a norm may round to the next number."""
    for place, (ours, theirs) in enumerate(zip(actual, expected(case, rank, size, seed), strict=True)):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, (case, ours.shape, ours.dtype)
        if "norm" in case.kind and place == 0:
            torch.testing.assert_close(ours, theirs, rtol=2 * triton_device.ULP[case.dtype], atol=1e-6, msg=str(case))
        else:
            assert torch.equal(ours, theirs), (case, place, (ours != theirs).nonzero()[:5], ours, theirs)


def _in_order(parts: Tensor) -> Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total


def run_process(rank: int, blocks: Sequence[Tensor], cases: Sequence[Case], limit: int, answers: Any) -> None:
    """Run a rank in a process of its own that shares `blocks` with the others."""
    torch.set_num_threads(1)
    triton_device.quicken_interpreter()
    _sleep_between_looks()
    group = local_group(rank, blocks, limit)
    values: list[Any] = []
    try:
        for case in cases:
            values.append([each.numpy() for each in run(case, group, "cpu")])
            group.check()
    except Exception as error:
        values.append(repr(error))
    answers.put((rank, values))


def _sleep_between_looks() -> None:
    """Leave the processor to the rank that is waited for. A look at a flag is an atomic operation."""
    from triton.runtime.interpreter import interpreter_builder

    look = interpreter_builder.create_atomic_rmw

    def rested(*operands: Any) -> Any:
        time.sleep(1e-4)
        return look(*operands)

    interpreter_builder.create_atomic_rmw = rested


def run_processes(size: int, cases: Sequence[Case], limit: int = 1 << 40) -> dict[int, list[Any]]:
    """Return the results of all ranks, each in a process of its own, by rank. `limit`: looks."""
    context = fork_context()
    answers = context.Queue()
    blocks = [block.share_memory_() for block in new_blocks(size)]
    ranks = [
        context.Process(target=run_process, args=(rank, blocks, cases, limit, answers), daemon=True)
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    try:
        return dict(answers.get(timeout=120) for _ in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
