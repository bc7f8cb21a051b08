"""Measure the engine on one CUDA GPU, or on several by tensor parallelism, and compare it with the limits of the GPUs.

    python tests/benchmarks/synthetic.py llama-3.2-1b models/1b
    python tests/benchmarks/bench_gpu.py --model models/1b [--drafter DIR] [--json FILE] [--only decode prefill]
    python tests/benchmarks/bench_gpu.py --model models/8b --tp 2 --only decode sampling prefill
    python tests/benchmarks/synthetic.py qwen3-30b-a3b models/30b --planted --config-only
    python tests/benchmarks/bench_gpu.py --model models/30b --load-format planted:maker --only decode
    python tests/benchmarks/synthetic.py gpt-oss-20b models/oss --planted --config-only                 # MXFP4
    python tests/benchmarks/synthetic.py llama-3.1-8b models/blocks --planted --config-only --fp8-blocks
    python tests/benchmarks/synthetic.py deepseek-v4-flash models/v4 --layers 32 --config-only --mtp    # random weights
    python tests/benchmarks/bench_gpu.py --model models/v4 --load-format dummy --page-size 128 --context-len 135168
        --drafter models/v4/mtp --speculative mtp --steps 3 --force-acceptance 0.79 0.65 0.37 --batches 1 8 64
        --only decode rounds prefill contexts

Prints one line per point, then Markdown tables, and writes JSON with --json FILE, and the main tables beside the best
peer's figures with --figures DIR. If the model is planted, the generated text is compared with the known text
(`checked_tokens` of it); a difference ends the program with an error. bench_all.py runs this program for all models and
heads.

Times are those of whole steps as a node runs them, by the host's clock. The floor of a step is the larger of two times:
its bytes at the measured read bandwidth, and its operations at the measured matrix rate.

With --tp every rank is a process that runs this program on its share of the model, from the same seeds. So all ranks do
the same work, and none has to be told. Rank 0 reports; its floor is that of all GPUs together.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import shared_paths  # noqa: F401
import torch
from bench_adaptive import adaptive
from bench_joint import joint
from bench_prompts import LENGTHS, small_prompt
from bench_sequences import CHUNK, Running, check, force_acceptance, row_of, run_rounds, start, start_long, stop, store
from gpu_figures import write_gpu_figures
from harness import heading, tables
from roofline import Limits, best_s, floor_s, measure_limits, state_flops, weight_bytes
from sampling_kinds import KINDS

from baton.engine.config import EngineConfig
from baton.engine.device import to_host
from baton.engine.engine import Engine
from baton.engine.pace.draft_length import DraftShape
from baton.engine.pace.mixed_sizes import CHUNK_SIZES
from baton.engine.progress import ProgressBar
from baton.engine.ranks.cuda_group import CudaGroup
from baton.engine.ranks.devices import orders, see
from baton.engine.ranks.group import START_TIMEOUT_S, CpuGroup
from baton.engine.ranks.ranks import ONE_RANK, Ranks
from baton.engine.rounds.device_executor import DeviceExecutor
from baton.engine.rounds.rounds import Rounds
from baton.engine.startup import tune_products
from baton.engine.state.mapped_blocks import MappedBlocks
from baton.engine.state.pages import Owner
from baton.engine.state.tail_pages import most_tails
from baton.engine.tuning.tuning import share_choices
from baton.metadata.config import ProcessConfig
from baton.metadata.garbage import Garbage
from baton.metadata.handoff.schema.schema import page_bytes
from baton.metadata.logs import setup_logging
from baton.metadata.wire.request import SamplingParams

BATCHES = (1, 8, 64, 256)
NUM_STEPS = 64  # of a timed run
TRACED_STEPS = 32
PAGE_SIZE = 64
LONG_PROMPTS = (65_536, 120_000)  # tokens
HOST_GAP_US = 4.0  # kernels of one graph follow each other faster


def main() -> None:
    options = _options()
    if options.tp == 1:
        _measure(options, ONE_RANK)
        return
    context = multiprocessing.get_context("spawn")
    gpus = orders(torch.cuda.device_count(), range(options.tp))
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        others = [
            context.Process(target=_run_rank, args=(options, rank, gpus[rank], meeting), daemon=True)
            for rank in range(1, options.tp)
        ]
        for each in others:
            each.start()
        _run_rank(options, 0, gpus[0], meeting)


def _run_rank(options: argparse.Namespace, rank: int, gpus: str, meeting: Path) -> None:
    see(gpus)
    host = CpuGroup(rank, options.tp, meeting, timeout_s=START_TIMEOUT_S)
    group = CudaGroup(host, MappedBlocks(host, torch.device("cuda", 0), START_TIMEOUT_S))
    options.json = None if rank else options.json
    with contextlib.redirect_stdout(io.StringIO()) if rank else contextlib.nullcontext():
        _measure(options, Ranks(group))
    group.check()
    host.sum(torch.zeros(1))  # all have ended


def _measure(options: argparse.Namespace, ranks: Ranks) -> None:
    setup_logging(ProcessConfig(log_level=options.log_level), "bench")
    torch.backends.cuda.matmul.allow_tf32 = False
    limits = measure_limits().of(options.tp)
    started = time.monotonic()
    engine = _load(options, ranks)
    if options.force_acceptance:
        force_acceptance(options.force_acceptance, engine.device)
    torch.cuda.synchronize()
    report: dict[str, Any] = {
        **heading(options.commit),
        "model": Path(options.model).name,
        "drafter": options.drafter and Path(options.drafter).name,
        "topk": options.topk,
        "forced_acceptance": options.force_acceptance,
        "weights_format": options.quantization,
        "KV_format": options.kv_dtype,
        "num_layers": engine.model_config.num_layers,
        "hidden_size": engine.model_config.hidden_size,
        "dtype": "bfloat16",
        "tp": options.tp,
        "page_size": options.page_size,
        "read_TB_per_s": limits.bytes_per_s / 1e12,
        "matrix_TFLOP_per_s": limits.flops_per_s / 1e12,
        "load_s": round(time.monotonic() - started, 2),
    }
    say(f"{report}")
    started = time.monotonic()
    executor = DeviceExecutor(engine, max(options.batches), buckets=options.batches)
    rounds = Rounds(executor)
    with ProgressBar("capturing round graphs") as progress:
        executor.warm_up(progress, expects_prompts="joint" in options.only)
    report["capture_s"] = round(time.monotonic() - started, 2)
    with ProgressBar("capturing prompt graphs") as progress:
        engine.capture_prompts(progress)
    Garbage()  # as a node
    parts = _parts(options, executor, rounds, limits)
    needs_drafter = {"rounds": True, "adaptive": True, "mixed": False}
    has_drafter = engine.drafter is not None
    chosen = [name for name in options.only if needs_drafter.get(name, has_drafter) == has_drafter]
    figures = {name: [shown(name, row) for row in parts[name]()] for name in chosen}
    report["checked_tokens"] = sum(row.get("checked_tokens", 0) for rows in figures.values() for row in rows)
    report |= figures
    report["peak_GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    say("\n" + tables({"engine": report}))
    if options.figures:
        write_gpu_figures(options.figures, [report], " ".join(["python", *sys.argv]))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1))


def _parts(
    options: argparse.Namespace, executor: DeviceExecutor, rounds: Rounds, limits: Limits
) -> dict[str, Callable[[], Iterable[dict[str, Any]]]]:
    """Return the parts of the measurement by name. Each returns its rows."""
    engine = executor.engine
    return {
        "decode": lambda: (decode(executor, rounds, batch, limits) for batch in options.batches),
        "sampling": lambda: (
            sampling(engine, rounds, batch, rounds.shape.with_steps(steps))
            for batch in options.batches
            if batch <= 64
            for steps in sorted({0, rounds.shape.num_steps})
        ),
        "mixed": lambda: (mixed(engine, rounds, batch, limits) for batch in options.batches if batch <= 64),
        "joint": lambda: (
            joint(engine, rounds, batch, num_tokens, rounds.shape.with_steps(steps))
            for batch in options.batches
            if batch <= 64
            for steps in sorted({0, rounds.shape.num_steps})
            for num_tokens in CHUNK_SIZES
        ),
        "idle": lambda: (idle(engine, rounds, batch) for batch in options.batches if batch <= 64),
        "kernels": lambda: (kernels(engine, rounds, batch) for batch in options.batches),
        "contexts": lambda: (context(engine, rounds, length, limits) for length in (8192, engine.context_len - 1024)),
        "rounds": lambda: (speculate(engine, rounds, batch) for batch in options.batches if batch <= 64),
        "adaptive": lambda: (
            {"kind": kind} | adaptive(engine, rounds, batch, params_of(kind))
            for kind in options.kinds
            for batch in options.batches
            if batch <= 64
        ),
        "prefill": lambda: (prefill(engine, limits, *each) for each in ((1, 1024), (1, 8192), (16, 2048))),
        "long": lambda: (long_prompt(engine, limits, num_tokens) for num_tokens in LONG_PROMPTS),
        "small-prompts": lambda: (small_prompt(engine, num_tokens) for num_tokens in LENGTHS),
        "turns": lambda: (turn(engine, num_tokens) for num_tokens in (16, 64, 256, 1024)),
        "offline": lambda: [offline(engine, rounds, 256, 1024, 256)],
        "long-offline": lambda: (offline(engine, rounds, max(options.batches), size, size) for size in (1000, 2048)),
    }


def _load(options: argparse.Namespace, ranks: Ranks) -> Engine:
    settings: dict[str, Any] = {"speculative": "none"}
    if options.drafter:
        drafting = {"speculative": options.speculative, "draft_model": options.drafter}
        settings = drafting | {"draft_steps": options.steps, "draft_topk": options.topk}
    config = EngineConfig(
        model=options.model,
        device="cuda",
        dtype="bfloat16",
        page_size=options.page_size,
        num_pages=options.num_tokens // options.page_size + 1,
        context_len=options.context_len,
        chunk_tokens=8192,
        prefix_cache=False,
        quantization=options.quantization,
        kv_dtype=options.kv_dtype,
        load_format=options.load_format,
        **settings,
    )
    with ProgressBar("loading weights", "MiB", 1 << 20) as progress:
        engine = Engine(config, progress, ranks)
    started = time.monotonic()
    if ranks.group.rank == 0:
        tune_products(engine, measures=not options.no_tune)
    share_choices(ranks)
    say(f"tuned in {time.monotonic() - started:.1f} s")
    return engine


def decode(executor: DeviceExecutor, rounds: Rounds, batch: int, limits: Limits) -> dict[str, Any]:
    """Time a step that decodes one token per sequence."""
    engine = executor.engine
    sequences = start(engine, rounds, batch, 4 * NUM_STEPS + 64)
    shape = rounds.shape.with_steps(0)
    run_rounds(rounds, sequences, shape, 8)
    step_s = statistics.median(run_rounds(rounds, sequences, shape, NUM_STEPS) for _ in range(3))
    length = len(sequences[0].token_ids) - 1.5 * NUM_STEPS
    graph_s = _graph_seconds(executor, rounds, sequences, shape)
    num_checked = stop(engine, rounds, sequences)
    floor = floor_s(engine, batch, int(batch * length), limits)
    return {
        "batch": batch,
        "step_ms": step_s * 1e3,
        "gpu_ms": graph_s * 1e3,
        "floor_ms": floor * 1e3,
        "x_floor": step_s / floor,
        "checked_tokens": num_checked,
    }


def sampling(engine: Engine, rounds: Rounds, batch: int, shape: DraftShape) -> dict[str, Any]:
    """Time rounds of every kind of sampling. `rates` are greedy rounds' time over theirs.

    Greedy rounds are timed first and last, and their tokens are compared with the known text.
    """
    times = dict[str, list[float]]()
    num_checked = 0
    for name in (*KINDS, "greedy"):
        params = params_of(name)
        sequences = start(engine, rounds, batch, (2 * NUM_STEPS + 16) * shape.num_slots, params=params)
        run_rounds(rounds, sequences, shape, 8)
        times.setdefault(name, []).extend(run_rounds(rounds, sequences, shape, NUM_STEPS // 2) for _ in range(3))
        num_checked += stop(engine, rounds, sequences)
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {
        "batch": batch,
        "steps": shape.num_steps,
        "greedy_ms": medians["greedy"] * 1e3,
        "rates": {name: medians["greedy"] / medians[name] for name in KINDS if name != "greedy"},
        "checked_tokens": num_checked,
    }


def mixed(engine: Engine, rounds: Rounds, batch: int, limits: Limits) -> dict[str, Any]:
    """Time the steps of `decode` with one sequence as long as the context allows."""
    longest = engine.context_len - 1024
    sequences = [start_long(engine, rounds, longest, 4 * NUM_STEPS + 64)]
    sequences += start(engine, rounds, batch - 1, 4 * NUM_STEPS + 64) if batch > 1 else []
    shape = rounds.shape.with_steps(0)
    run_rounds(rounds, sequences, shape, 8)
    step_s = statistics.median(run_rounds(rounds, sequences, shape, NUM_STEPS) for _ in range(3))
    kv_tokens = sum(len(each.token_ids) for each in sequences) - 1.5 * NUM_STEPS * batch
    num_checked = stop(engine, rounds, sequences)
    floor = floor_s(engine, batch, int(kv_tokens), limits)
    row = {"batch": batch, "longest": longest, "step_ms": step_s * 1e3, "floor_ms": floor * 1e3}
    row |= {"x_floor": step_s / floor, "checked_tokens": num_checked}
    return row


def _graph_seconds(executor: DeviceExecutor, rounds: Rounds, sequences: Sequence[Running], shape: DraftShape) -> float:
    """Time the graph of a round alone, replayed back to back."""
    work = rounds.make_round(sequences, shape, [shape.num_steps] * len(sequences))
    inputs = executor.buckets.fill_round(work)

    def several() -> None:
        for _ in range(16):
            executor.run_round(inputs, shape, work.needs)

    return best_s(several, 3) / 16


def idle(engine: Engine, rounds: Rounds, batch: int) -> dict[str, Any]:
    """Measure from a trace of decode steps how long the GPU was without work.

    Gaps longer than those between the kernels of one graph are the host's. `idle_share_between` names the kernels
    between which most idle time lies.
    """
    spans, num_checked = _trace(engine, rounds, batch)
    gaps: list[float] = []
    between: dict[str, float] = defaultdict(float)
    _, end, before = spans[0]
    for begin, until, name in spans[1:]:
        gaps.append(max(0.0, begin - end))
        between[f"{before}, {name}"] += gaps[-1]
        if until > end:
            end, before = until, name
    total = end - spans[0][0]
    most = sorted(between, key=lambda names: -between[names])[:6]
    return {
        "batch": batch,
        "idle_share": sum(gaps) / total,
        "idle_share_between_rounds": sum(gap for gap in gaps if gap > HOST_GAP_US) / total,
        "longest_gap_us": max(gaps),
        "idle_share_between": {names: round(between[names] / total, 4) for names in most},
        "checked_tokens": num_checked,
    }


def kernels(engine: Engine, rounds: Rounds, batch: int) -> dict[str, Any]:
    """Measure from a trace of decode steps which kernels take most time: microseconds and launches per step."""
    spans, num_checked = _trace(engine, rounds, batch)
    times, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    for begin, until, name in spans:
        times[name] += until - begin
        counts[name] += 1
    steps = 0.75 * TRACED_STEPS
    most = sorted(times, key=lambda name: -times[name])[:12]
    return {
        "batch": batch,
        "us_per_step": {name: (round(times[name] / steps, 1), round(counts[name] / steps)) for name in most},
        "checked_tokens": num_checked,
    }


def _trace(engine: Engine, rounds: Rounds, batch: int) -> tuple[list[tuple[float, float, str]], int]:
    """Return begin and end (us) and name of each kernel of the last three quarters of TRACED_STEPS decode steps, as the
    first find an idle device, and how many tokens were compared with the known text."""
    sequences = start(engine, rounds, batch, 2 * NUM_STEPS)
    shape = rounds.shape.with_steps(0)
    run_rounds(rounds, sequences, shape, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        run_rounds(rounds, sequences, shape, TRACED_STEPS)
    num_checked = stop(engine, rounds, sequences)
    spans = sorted(
        (event.time_range.start, event.time_range.end, re.split(r"[<(]", event.name)[0])
        for event in trace.events() or ()
        if str(event.device_type).endswith("CUDA")
    )
    return spans[len(spans) // 4 :], num_checked


def speculate(engine: Engine, rounds: Rounds, batch: int) -> dict[str, Any]:
    """Time a round with all steps against a step without drafts, and count tokens per second."""
    sequences = start(engine, rounds, batch, 8 * NUM_STEPS + 64)
    row: dict[str, Any] = {"batch": batch}
    run_rounds(rounds, sequences, rounds.shape.with_steps(0), 4)
    plain_s = run_rounds(rounds, sequences, rounds.shape.with_steps(0), 3 * NUM_STEPS // 8)
    row |= {"plain_ms": plain_s * 1e3, "checked_tokens": stop(engine, rounds, sequences)}
    for steps in sorted({1, 2, 3, rounds.shape.num_steps}):
        if steps not in rounds.shape.choices:
            continue
        shape, times, accepted = rounds.shape.with_steps(steps), list[float](), list[int]()
        for seed in range(-(-8 // batch)):  # texts differ in how often the head is right
            sequences = start(engine, rounds, batch, 8 * NUM_STEPS + 64, seed)
            run_rounds(rounds, sequences, shape, 4)
            times.append(run_rounds(rounds, sequences, shape, 5 * NUM_STEPS // 8))
            accepted += [number for each in sequences for number in each.num_accepted[4:]]
            row["checked_tokens"] += stop(engine, rounds, sequences)
        round_s, mean = statistics.median(times), statistics.mean(accepted)
        row |= {
            f"k{steps}_ms": round_s * 1e3,
            f"k{steps}_over_plain": round_s / plain_s,
            f"k{steps}_tokens_a_round": 1 + mean,
            f"k{steps}_speedup": (1 + mean) * plain_s / round_s,
        }
    return row


def context(engine: Engine, rounds: Rounds, length: int, limits: Limits) -> dict[str, Any]:
    """Time the prompt of one sequence of `length` tokens, and a step without drafts behind it. `MB`: what the sequence
    holds of the pools. `latents_MB`: as many layers of latents of 512 and 64 numbers in 16 bits, as DeepSeek-V3 has."""
    began = time.perf_counter()
    sequences = [start_long(engine, rounds, length, 4 * NUM_STEPS + 64)]
    prompt_s, shape = time.perf_counter() - began, rounds.shape.with_steps(0)
    run_rounds(rounds, sequences, shape, 8)
    step_s = statistics.median(run_rounds(rounds, sequences, shape, NUM_STEPS) for _ in range(3))
    num_checked = stop(engine, rounds, sequences)
    page_size, num_bytes = engine.pool.page_size, -(-length // engine.pool.page_size) * page_bytes(engine.schema)
    if engine.tail_window:
        most = most_tails(engine.held_window, rounds.shape.num_slots, page_size)
        num_bytes += most * page_bytes(engine.schema, of_tails=True)
    floor = floor_s(engine, 1, length, limits)
    row = {"context": length, "prompt_s": prompt_s, "step_ms": step_s * 1e3, "floor_ms": floor * 1e3}
    latents = engine.model_config.num_layers * 2 * (512 + 64) * length
    row |= {"x_floor": step_s / floor, "MB": num_bytes / 1e6, "latents_MB": latents / 1e6}
    return row | {"checked_tokens": num_checked}


def prefill(engine: Engine, limits: Limits, num_prompts: int, num_tokens: int) -> dict[str, Any]:
    """Compute `num_prompts` prompts at once, in chunks as a node does."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, engine.card.vocab_size, (num_prompts, num_tokens), generator=generator).tolist()
    num_pages = -(-num_tokens // engine.pool.page_size)
    pages = [engine.pool.allocate(num_pages, Owner.REQUEST) for _ in prompts]
    at_once = max(1, CHUNK // num_tokens)

    def run() -> list[int]:
        """Return the first tokens. Each chunk is submitted before the previous one is read, as a node does it."""
        tokens: list[torch.Tensor] = []
        for first in range(0, num_prompts, at_once):
            group = slice(first, first + at_once)
            rows = [row_of(engine, ids, 0, own) for ids, own in zip(prompts[group], pages[group], strict=True)]
            tokens.append(to_host(engine.compute(rows).logits.argmax(1)))
        torch.cuda.synchronize()
        return torch.cat(tokens).tolist()

    num_checked = sum(check(engine, ids, [token]) for ids, token in zip(prompts, run(), strict=True))
    seconds = _timed(run, 5)
    for own in pages:
        engine.pool.release(own)
    row = {"prompts": num_prompts} | _prompt_row(engine, limits, num_prompts, num_tokens, seconds)
    row["checked_tokens"] = num_checked
    return row


def long_prompt(engine: Engine, limits: Limits, num_tokens: int) -> dict[str, Any]:
    """Compute one long prompt in chunks, as a node does: each chunk is submitted before the previous one is read."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, engine.card.vocab_size, (num_tokens,), generator=generator).tolist()
    pages = engine.pool.allocate(-(-num_tokens // engine.pool.page_size), Owner.REQUEST)
    last = (num_tokens - 1) // CHUNK * CHUNK

    def run() -> list[int]:
        """Return the first token."""
        store(engine, ids[:last], pages)
        return engine.compute([row_of(engine, ids[last:], last, pages)]).logits.argmax(1).tolist()

    num_checked = check(engine, ids, run())
    seconds = _timed(run, 3)
    engine.pool.release(pages)
    return _prompt_row(engine, limits, 1, num_tokens, seconds) | {"checked_tokens": num_checked}


def _prompt_row(
    engine: Engine, limits: Limits, num_prompts: int, num_tokens: int, seconds: Sequence[float]
) -> dict[str, Any]:
    """Return the figures of prompts of `num_tokens` tokens each, which took these times."""
    took, total = statistics.median(seconds), num_prompts * num_tokens
    _, products = weight_bytes(engine.model_config, total)
    config = engine.model_config
    head = config.hidden_size * config.vocab_size
    windows = config.of_attention.sliding_window
    seen = sum(min(num_tokens / 2, window or num_tokens) for window in windows)  # by a query, per layer
    attention = 2 * 2 * num_prompts * num_tokens * seen * config.q_size + total * state_flops(config)
    floor = (2 * total * (products - head) + 2 * num_prompts * head + attention) / limits.flops_per_s
    return {
        "tokens": num_tokens,
        "ms": took * 1e3,
        "best_ms": min(seconds) * 1e3,
        "tokens_per_s": total / took,
        "x_floor": took / floor,
    }


def turn(engine: Engine, num_tokens: int) -> dict[str, Any]:
    """Compute the last `num_tokens` of a prompt as long as the context allows, with the other tokens already in pages.

    This is the next turn of a long conversation.
    """
    prefix = engine.context_len - 1024
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, engine.card.vocab_size, (prefix + num_tokens,), generator=generator).tolist()
    pages = engine.pool.allocate(-(-len(ids) // engine.pool.page_size), Owner.REQUEST)
    store(engine, ids[:prefix], pages)

    def run() -> list[int]:
        return engine.compute([row_of(engine, ids[prefix:], prefix, pages)]).logits.argmax(1).tolist()

    num_checked = check(engine, ids, run())
    took = statistics.median(_timed(run, 20))
    engine.pool.release(pages)
    return {"tokens": num_tokens, "prefix": prefix, "ms": took * 1e3, "checked_tokens": num_checked}


def _timed(run: Callable[[], object], times: int) -> list[float]:
    """Return the seconds of each call. A call waits for the device."""
    seconds: list[float] = []
    for _ in range(times):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return seconds


def offline(engine: Engine, rounds: Rounds, num_requests: int, prompt_len: int, num_new: int) -> dict[str, Any]:
    """Run requests of `prompt_len` prompt tokens and `num_new` new tokens, all at once, without speculation. If the
    pool does not hold all of them, run fewer."""
    num_pages = -(-(prompt_len + num_new + 64) // engine.pool.page_size)
    num_requests = min(num_requests, engine.pool.num_free // num_pages)
    started = time.perf_counter()
    sequences = start(engine, rounds, num_requests, num_new, prompt_len=prompt_len)
    prefill_s = time.perf_counter() - started
    began = time.perf_counter()
    run_rounds(rounds, sequences, rounds.shape.with_steps(0), num_new - 1)
    decode_s = time.perf_counter() - began
    num_checked = stop(engine, rounds, sequences)
    total_s = prefill_s + decode_s
    row = {"requests": num_requests, "prompt_len": prompt_len, "new_tokens": num_new}
    row |= {"prefill_s": prefill_s, "decode_s": decode_s, "total_s": total_s}
    row |= {"output_tokens_per_s": num_requests * num_new / total_s, "checked_tokens": num_checked}
    return row


def params_of(kind: str) -> SamplingParams:
    return SamplingParams(max_tokens=1 << 16, seed=7, **KINDS[kind])


def shown(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """Print a row as it comes."""
    words = (f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
    say(f"{name} {', '.join(words)}")
    return row


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", help="directory of an EAGLE-3 head")
    parser.add_argument("--speculative", default="eagle3")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--topk", type=int, default=1, help="branches of a node; more than 1: trees")
    forced = "accept the first, second, .. draft of a chain at this rate, if the one before is, whatever it is"
    parser.add_argument("--force-acceptance", type=float, nargs="+", metavar="RATE", help=forced)
    parser.add_argument("--quantization", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--kv-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--load-format", default="safetensors", help="dummy, or planted:maker")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["greedy"], help="of sampling, for adaptive")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--num-tokens", type=int, default=256 * 1600, help="KV tokens of the pool")
    parser.add_argument("--context-len", type=int, default=16384)
    parser.add_argument("--page-size", type=int, default=PAGE_SIZE)
    parser.add_argument("--log-level", choices=["debug", "info"], default="info")
    parser.add_argument("--no-tune", action="store_true", help="use measured kernels if there are any, measure none")
    names = [
        "decode",
        "sampling",
        "mixed",
        "joint",
        "idle",
        "kernels",
        "contexts",
        "rounds",
        "adaptive",
        "prefill",
        "long",
        "small-prompts",
        "turns",
        "offline",
        "long-offline",
    ]
    usual = [name for name in names if name not in ("long-offline", "contexts")]  # one takes minutes, one a long pool
    parser.add_argument("--only", nargs="+", choices=names, default=usual)
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--commit", help="of this tree, for the report (default: what git says)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="the main tables, as docs/figures holds them")
    options = parser.parse_args()
    # The works of these depend on the times of this process.
    if options.tp > 1 and (alone := sorted({"adaptive", "joint", "idle", "kernels"}.intersection(options.only))):
        parser.error(f"--only {' '.join(alone)} measures one GPU alone; leave it out, or --tp")
    return options


if __name__ == "__main__":
    main()
