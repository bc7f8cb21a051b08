"""Compare decode steps over a pool that other processes can map with steps over a pool that torch allocated.

    python tests/benchmarks/synthetic.py llama-3.2-1b models/llama-3.2-1b --planted
    python tests/benchmarks/engine_times/bench_shared_pool.py --model models/llama-3.2-1b [--rounds 9] [--json FILE]

Two engines in one process differ only in how their KV pool was allocated. They take turns, and what each generates is
compared with the planted text. The ratio of a batch is the median of the ratios within rounds.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared_paths  # noqa: F401
from bench_sequences import run_rounds, start, stop
from harness import alternate, flags, ratio, report

from baton.engine import engine as engines
from baton.engine.config import EngineConfig
from baton.engine.rounds.device_executor import DeviceExecutor
from baton.engine.rounds.rounds import Rounds
from baton.engine.state import cuda_memory

BATCHES = (1, 16, 64)
NUM_STEPS = 64


def main() -> None:
    parser = flags(__doc__, rounds=9)
    parser.add_argument("--model", required=True, metavar="DIR")
    options = parser.parse_args()
    num_new = (options.rounds + 1) * NUM_STEPS + 64
    num_pages = max(BATCHES) * -(-(1024 + num_new + 64) // 64) + 8
    made = {name: _make(options.model, num_pages, is_shared=name == "shared") for name in ("torch's", "shared")}
    rows = (_compare(made, batch, num_new, options.rounds) for batch in BATCHES)
    report(options, "shared-pool", rows, unit="ms", about={"model": Path(options.model).name})


def _compare(
    made: dict[str, tuple[engines.Engine, Rounds]], batch: int, num_new: int, num_rounds: int
) -> dict[str, Any]:
    sequences = {name: start(*pair, batch, num_new) for name, pair in made.items()}

    def steps(name: str, rounds: Rounds) -> Callable[[int], float]:
        return lambda number: run_rounds(rounds, sequences[name], rounds.shape.with_steps(0), NUM_STEPS)

    times = alternate({name: steps(name, rounds) for name, (_, rounds) in made.items()}, num_rounds)
    checked = sum(stop(*pair, sequences[name]) for name, pair in made.items())
    row = {"batch": batch} | {name: statistics.median(each) * 1e3 for name, each in times.items()}
    return row | {"ratio": ratio(times["shared"], times["torch's"]), "checked tokens": checked}


def _make(model: str, num_pages: int, *, is_shared: bool) -> tuple[engines.Engine, Rounds]:
    assert torch.cuda.is_available(), "this needs a GPU"
    can_share = cuda_memory.can_share
    try:
        if not is_shared:
            cuda_memory.can_share = lambda _device: False
        config = EngineConfig(
            model=model,
            device="cuda",
            dtype="bfloat16",
            page_size=64,
            num_pages=num_pages,
            context_len=8192,
            chunk_tokens=8192,
            prefix_cache=False,
            speculative="none",
        )
        engine = engines.Engine(config)
    finally:
        cuda_memory.can_share = can_share
    assert engine.device_pool is not None and bool(engine.device_pool.shared) == is_shared
    rounds = Rounds(DeviceExecutor(engine, max(BATCHES), buckets=BATCHES))
    rounds.executor.warm_up()
    return engine, rounds


if __name__ == "__main__":
    main()
