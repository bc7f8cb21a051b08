"""What torch offers in place of two parts of Baton: attention of prompts over pages, and memory that ranks map.

    python tests/benchmarks/bench_libraries.py [--only attention|memory]

    attention   `torch.nn.attention.varlen.varlen_attn` with a block table beside the kernels that a prefill node runs,
                at the shapes of an 8B model (32 query heads, 8 key heads of 128, bfloat16). Times are medians of
                replays of a CUDA graph. The library reads Baton's pages as a strided view
                (a release without block tables gets contiguous keys, whose making is not timed)
    memory      torch's symmetric memory beside `MappedBlocks`: two processes on one GPU allocate a block each, map the
                other's and sum over both with Baton's kernel

An error is the largest difference from `paged_attention_ref`, divided by 1 + the value, on the first and last rows. The
run ends with exit status 1 if one of Baton's own results is wrong. A refusal of the library is printed and is no
failure.
"""

from __future__ import annotations

import argparse
import inspect
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import shared_paths  # noqa: F401
import torch
import torch.distributed as dist
from torch import Tensor

# isort: split
from bench_kernels_attention import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, TOLERANCE, per_layer
from quantized import fp8_pool

from baton.kernels.attention import history, prompt_attention
from baton.kernels.attention.attention import paged_attention_ref
from baton.kernels.attention.paged_plan import PagedPlan
from baton.kernels.attention.triton_extend import extend_attention
from baton.kernels.ranks.all_reduce import BLOCK_BYTES, CONTROL, PeerBlocks

CHUNKS, HISTORIES = (512, 2048, 8192), (0, 4096, 32_768)
PAGE_SIZES = (16, 64, 256)  # of the library; Baton's pages have 64 tokens
NUM_LAYERS, CHECKED_ROWS, WINDOW = 2, 32, 512
MEET_S = 60.0
OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch refuses two ranks on one GPU without it


class Chunk(NamedTuple):
    """New tokens of sequences behind others, with all KV in scattered pages."""

    qkv: Tensor  # [num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM] bfloat16
    kv: Tensor  # [NUM_LAYERS, num_pages, 2, NUM_KV_HEADS, page_size, HEAD_DIM] bfloat16 or e4m3
    block_table: Tensor  # [num_seqs, max_pages] int64
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]  # with the new tokens

    @classmethod
    def make(cls, query_lens: Sequence[int], seq_lens: Sequence[int], page_size: int) -> Chunk:
        num_pages = -(-max(seq_lens) // page_size)
        shape = (NUM_LAYERS, len(seq_lens) * num_pages + 1, 2, NUM_KV_HEADS, page_size, HEAD_DIM)
        kv = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        table = torch.randperm(len(seq_lens) * num_pages, device="cuda").view(len(seq_lens), -1) + 1
        width = NUM_HEADS + 2 * NUM_KV_HEADS
        qkv = torch.randn(sum(query_lens), width, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        chunk = cls(qkv, kv, table, tuple(query_lens), tuple(seq_lens))
        if len(seq_lens) == 1:  # the heads of new tokens as they lie in the pages of layer 0
            planes = kv[0][table[0]].permute(1, 0, 3, 2, 4).flatten(1, 2)  # [2, num_slots, NUM_KV_HEADS, HEAD_DIM]
            qkv[:, NUM_HEADS:] = planes[:, seq_lens[0] - query_lens[0] : seq_lens[0]].transpose(0, 1).flatten(1, 2)
        return chunk

    @property
    def q(self) -> Tensor:
        """[num_tokens, NUM_HEADS, HEAD_DIM], strided by token."""
        return self.qkv[:, :NUM_HEADS]

    @property
    def starts(self) -> Tensor:
        """[num_seqs + 1] int32, the first token of each sequence, and the end."""
        return _ints([0, *torch.tensor(self.query_lens).cumsum(0).tolist()])

    def contiguous(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer without pages, sequences end to end, [num_keys, NUM_KV_HEADS, HEAD_DIM]."""
        planes = self.kv[layer][self.block_table].permute(2, 0, 1, 4, 3, 5).flatten(2, 3)
        parts = [planes[:, seq, :seq_len] for seq, seq_len in enumerate(self.seq_lens)]
        k, v = torch.cat(parts, 1).contiguous().unbind(0)
        return k, v

    def of(self, seq: int) -> Chunk:
        """Return one sequence alone."""
        first = sum(self.query_lens[:seq])
        rows = self.qkv[first : first + self.query_lens[seq]]
        return Chunk(rows, self.kv, self.block_table[seq : seq + 1], (len(rows),), (self.seq_lens[seq],))

    def cut(self, size: int) -> list[Chunk]:
        """Return the chunks of `size` tokens that a single sequence is computed in."""
        first = self.seq_lens[0] - self.query_lens[0]
        return [
            Chunk(rows, self.kv, self.block_table, (len(rows),), (first + size * i + len(rows),))
            for i, rows in enumerate(self.qkv.split(size))
        ]


class Library:
    """torch's attention over pages, with the arguments that this release has."""

    def __init__(self) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self._call, self._has = varlen_attn, set(inspect.signature(varlen_attn).parameters)
        print("varlen_attn takes", ", ".join(sorted(self._has)))

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """The sizes of pages to try. A release that reads no pages gets contiguous keys: one size shows its speed."""
        return PAGE_SIZES if {"block_table", "seqused_k"} <= self._has else PAGE_SIZES[-1:]

    def prepared(self, chunk: Chunk, window: int | None = None, **asked: Any) -> Callable[[int], Any]:
        """Return the attention of a chunk as a function of the layer, which a CUDA graph can hold."""
        wanted = {"block_table": chunk.block_table.int(), "seqused_k": _ints(chunk.seq_lens), "enable_gqa": True}
        wanted |= {"window_size": (-1 if window is None else window - 1, 0), **asked}
        given = {name: value for name, value in wanted.items() if name in self._has}
        lens = _ints([0, *torch.tensor(chunk.seq_lens).cumsum(0).tolist()])
        sizes = chunk.starts, lens, max(chunk.query_lens), max(chunk.seq_lens)
        if "block_table" in given:
            # [num_pages, page_size, NUM_KV_HEADS, HEAD_DIM], strided
            layers = [layer.transpose(2, 3).unbind(1) for layer in chunk.kv]
        else:
            layers = [chunk.contiguous(layer) for layer in range(len(chunk.kv))]
        return lambda layer: self._call(chunk.q, *layers[layer], *sizes, **given)

    def attend(self, chunk: Chunk, window: int | None = None, **asked: Any) -> Any:
        """Return the attention of a chunk in layer 0. Raises what the library raises."""
        return self.prepared(chunk, window, **asked)(0)


def ours(chunk: Chunk, plan: PagedPlan | None = None, layer: int = 0, **options: Any) -> Tensor:
    """Return the attention of a chunk by the kernel that a prefill node takes for it."""
    num_tokens, num_before = chunk.query_lens[0], chunk.seq_lens[0] - chunk.query_lens[0]
    kind = chunk.q.device, chunk.q.dtype, HEAD_DIM
    if len(chunk.query_lens) == 1 and not options:
        if num_before == 0 and prompt_attention.whole_part(num_tokens) == num_tokens and prompt_attention.serves(*kind):
            return prompt_attention.prompt_attention(chunk.q, *chunk.qkv[:, NUM_HEADS:].split(NUM_KV_HEADS, 1))
        if history.takes(num_tokens, num_before) and history.serves(*kind):
            return history.history_attention(chunk.q, chunk.kv[layer], chunk.block_table, 0, num_before)
    return extend_attention(chunk.q, chunk.kv[layer], plan or plan_of(chunk), **options)


def plan_of(chunk: Chunk) -> PagedPlan:
    lens = torch.tensor(chunk.seq_lens, device="cuda")
    return PagedPlan.ragged(chunk.block_table, lens, chunk.starts, len(chunk.qkv), chunk.kv.shape[4])


def error_of(out: Tensor, chunk: Chunk, window: int | None = None, sinks: Tensor | None = None) -> float:
    """Return the largest difference from the specification on the first and the last rows of the last sequence."""
    seq = len(chunk.seq_lens) - 1
    alone, rows = chunk.of(seq), out[len(out) - chunk.query_lens[seq] :]
    first = alone.seq_lens[0] - len(rows)
    worst = 0.0
    for start in (0, len(rows) - CHECKED_ROWS):
        part = slice(start, start + CHECKED_ROWS)
        found = paged_attention_ref(
            alone.q[part], chunk.kv[0], alone.block_table, (CHECKED_ROWS,), (first + start + CHECKED_ROWS,), window,
            sinks=sinks,
        )  # fmt: skip
        difference = (rows[part].float() - found.float()).abs() / (1 + found.float().abs())
        worst = max(worst, float(difference.max()))
    return worst


class Report:
    """Prints results, and remembers Baton's wrong ones."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def own(self, name: str, error: float) -> str:
        """Return the error of one of Baton's results as text."""
        if not error <= TOLERANCE:
            self.wrong.append(f"{name}: error {error:.3g}, more than {TOLERANCE}")
        return f"{error:.4f}"

    def tried(self, call: Callable[[], object]) -> object:
        """Return what the library's call returns, or its refusal in one line."""
        try:
            return call()
        except (RuntimeError, ValueError, TypeError, ImportError) as error:
            torch.cuda.synchronize()
            return f"refused: {str(error).strip().splitlines()[0][:110]}"


def bench_times(library: Library, report: Report) -> None:
    print(f"\n{'chunk behind history':24}{'ours us':>10}{'error':>8}  library, by the size of a page")
    for num_tokens in CHUNKS:
        for num_before in HISTORIES:
            name, seq_len = f"{num_tokens} behind {num_before}", num_tokens + num_before
            chunk = Chunk.make((num_tokens,), (seq_len,), 64)
            plan, error = plan_of(chunk), error_of(ours(chunk), chunk)
            seconds = per_layer(lambda layer, c=chunk, p=plan: ours(c, p, layer), NUM_LAYERS)
            cells = [f"{name:24}{seconds * 1e6:10.1f}{report.own(name, error):>8}"]
            for page_size in library.page_sizes:
                paged = Chunk.make((num_tokens,), (seq_len,), page_size)
                cells.append(f"{page_size}: {report.tried(partial(_library_cell, library, paged, seconds))}")
            print("  ".join(cells), flush=True)


def _library_cell(library: Library, chunk: Chunk, own_s: float) -> str:
    attend = library.prepared(chunk)
    error = error_of(attend(0), chunk)
    seconds = per_layer(attend, NUM_LAYERS)
    return f"{seconds * 1e6:.1f} us (x{seconds / own_s:.2f}) error {error:.4f}"


def bench_exactness(library: Library, report: Report) -> None:
    print("\nSame bits, in pages of 256 tokens")
    one_split = {"num_splits": 1}
    whole = Chunk.make((8192,), (8192,), 256)
    mixed = Chunk.make((512, 2048, 1024, 2048), (4608, 2048, 33_792, 6144), 256)
    for size in (512, 2048):
        parts = whole.cut(size)
        own = _equal(torch.cat([ours(part) for part in parts]), ours(whole))
        for asked in ({}, one_split):
            found = report.tried(lambda p=parts, a=asked: _cut_equal(library, whole, p, a))
            print(f"8192 tokens in chunks of {size:5} {asked or ''!s:22} ours {own}   library {found}", flush=True)
    together = ours(mixed)
    firsts = [sum(mixed.query_lens[:seq]) for seq in range(len(mixed.query_lens))]
    spans = [slice(first, first + num) for first, num in zip(firsts, mixed.query_lens, strict=True)]
    own = [_equal(ours(mixed.of(seq)), together[span]) for seq, span in enumerate(spans)]
    print(f"ours, four sequences together and alone (error {report.own('together', error_of(together, mixed))}): {own}")
    for asked in ({}, one_split):
        found = report.tried(lambda a=asked: _company_equal(library, mixed, spans, a))
        print(f"library {asked or ''}: {found}", flush=True)


def _cut_equal(library: Library, whole: Chunk, parts: Sequence[Chunk], asked: dict[str, int]) -> str:
    return _equal(torch.cat([library.attend(part, **asked) for part in parts]), library.attend(whole, **asked))


def _company_equal(library: Library, mixed: Chunk, spans: Sequence[slice], asked: dict[str, int]) -> list[str]:
    together = library.attend(mixed, **asked)
    return [_equal(library.attend(mixed.of(seq), **asked), together[span]) for seq, span in enumerate(spans)]


def bench_kinds(library: Library, report: Report) -> None:
    print("\nWindows, sinks and pages in FP8: 2048 tokens behind 4096, pages of 256 tokens")
    chunk = Chunk.make((2048,), (6144,), 256)
    sinks = torch.randn(NUM_HEADS, device="cuda")
    own = report.own("window", error_of(ours(chunk, window=WINDOW), chunk, WINDOW))
    found = report.tried(lambda: f"{error_of(library.attend(chunk, window=WINDOW), chunk, WINDOW):.4f}")
    print(f"window {WINDOW}: error of ours {own}, of the library {found}")
    own = report.own("sinks", error_of(ours(chunk, sinks=sinks), chunk, None, sinks))
    found = report.tried(lambda: f"{error_of(_with_sinks(library, chunk, sinks), chunk, None, sinks):.4f}")
    print(f"sinks: error of ours {own}; the library has no argument for them, by its log-sum-exp {found}")
    chunk = chunk._replace(kv=fp8_pool(chunk.kv))
    own = report.own("fp8", error_of(ours(chunk, plan=plan_of(chunk)), chunk))
    print(f"e4m3 pages: error of ours {own}; library {report.tried(lambda: library.attend(chunk).shape)}", flush=True)


def _with_sinks(library: Library, chunk: Chunk, sinks: Tensor) -> Tensor:
    from torch.nn.attention.varlen import AuxRequest

    out, lse = library.attend(chunk, return_aux=AuxRequest(lse=True))
    lse = lse if lse.shape == out.shape[:2] else lse.transpose(0, 1)
    return (out * torch.sigmoid(lse - sinks).unsqueeze(-1)).to(out.dtype)


def bench_memory(report: Report) -> None:
    print(f"\nBlocks of {BLOCK_BYTES / 2**20:.0f} MiB that two processes on one GPU map")
    print("MappedBlocks:", result := _pair(_own_rank, ""))
    if not result.startswith(("sum right", "not run")):
        report.wrong.append(f"MappedBlocks: {result}")
    for backend in ("gloo", "nccl"):
        for allows in ("0", "1"):
            print(
                f"symmetric memory, {backend}, {OVERLAP}={allows}:", _pair(_library_rank, backend, allows), flush=True
            )


def _pair(rank_of: Callable[..., None], *args: str) -> str:
    """Return what the first rank of a pair answers, or why there is no answer."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=rank_of, args=(rank, f"{folder}/meeting", answers, *args)) for rank in range(2)]
        for each in ranks:
            each.start()
        try:
            found = [answers.get(timeout=MEET_S) for _ in ranks]
        except Exception as error:
            found = [f"no answer in {MEET_S:.0f} s ({type(error).__name__})"]
        for each in ranks:
            each.join(5)
            if each.is_alive():
                each.kill()
                each.join()
    return "; ".join(sorted(set(found)))


def _own_rank(rank: int, meeting: str, answers: Any, _: str) -> None:
    def allocate() -> PeerBlocks:
        from baton.engine.ranks.group import CpuGroup
        from baton.engine.state.mapped_blocks import MappedBlocks

        return MappedBlocks(CpuGroup(rank, 2, Path(meeting)), torch.device("cuda:0"), MEET_S).blocks

    _answer(answers, rank, allocate)


def _library_rank(rank: int, meeting: str, answers: Any, backend: str, allows: str) -> None:
    os.environ[OVERLAP] = allows
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"

    def allocate() -> PeerBlocks:
        import torch.distributed._symmetric_memory as memory

        torch.cuda.set_device(0)
        store = dist.FileStore(meeting, 2)
        dist.init_process_group(backend, store=store, rank=rank, world_size=2)
        own = memory.empty(BLOCK_BYTES, dtype=torch.uint8, device="cuda:0")
        handle = memory.rendezvous(own, dist.group.WORLD.group_name)
        own.zero_()
        torch.cuda.synchronize()
        handle.barrier()
        torch.cuda.synchronize()
        control = torch.zeros(len(CONTROL), dtype=torch.int64, pin_memory=True)
        control[CONTROL.limit] = int(MEET_S * 1e9)
        return PeerBlocks(rank, torch.tensor(list(handle.buffer_ptrs), device="cuda"), own, control)

    _answer(answers, rank, allocate)


def _answer(answers: Any, rank: int, allocate: Callable[[], PeerBlocks]) -> None:
    """Answer with the result of a sum over both ranks' blocks. The process ends without cleaning up."""
    try:
        torch.zeros(1, device="cuda")
        started = time.perf_counter()
        blocks = allocate()
        seconds = time.perf_counter() - started
        from baton.kernels.ranks.triton_all_reduce import all_reduce

        total = all_reduce(torch.full((3, 4096), 1.0 + rank, device="cuda", dtype=torch.bfloat16), blocks)
        torch.cuda.synchronize()
        said = "right" if bool((total == 3).all()) and not blocks.control[CONTROL.has_failed] else "WRONG"
        answers.put(f"sum {said}, rank {rank} met in {seconds:.2f} s")
    except ImportError as error:
        answers.put(f"not run: {error}")
    except Exception as error:
        answers.put(f"refused: {type(error).__name__}: {str(error).strip().splitlines()[0][:160]}")
    time.sleep(2.0)  # the other rank reads this one's block
    answers.close()
    answers.join_thread()
    os._exit(0)


def _equal(first: Tensor, second: Tensor) -> str:
    if torch.equal(first, second):
        return "same bits"
    return f"differ by up to {float((first.float() - second.float()).abs().max()):.4f}"


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device="cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("attention", "memory"))
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    report = Report()
    if args.only != "memory":
        library = Library()
        bench_times(library, report)
        bench_exactness(library, report)
        bench_kinds(library, report)
    if args.only != "attention":
        bench_memory(report)
    print("\n" + ("Baton's results are right" if not report.wrong else "WRONG: " + "; ".join(report.wrong)))
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
