"""Measure on one GPU the times from which `baton plan` simulates a model, and write them to a file.

    python tests/benchmarks/measure_times.py --model models/8b --out models/8b/times.json

Rounds and chunks are measured by bench_gpu.py. Router and handoff are measured by bench_system.py, with one stream of
two tokens through a prefill and a decode process on the GPU. Each runs in a process of its own, and they have the GPU
one after the other. How many tokens a node's pool holds is estimated: what MEMORY_SHARE of the GPU leaves beside the
weights and WORKING_BYTES.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from baton.deploy.simulation.times import ChunkPoint, HandoffPoint, MixedPoint, RoundPoint, Times, read
from baton.engine.checkpoint.model_config import ModelConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.config import MEMORY_SHARE, EngineConfig
from baton.engine.state.pages import pages_in
from baton.engine.state.tail_pages import most_tails, tails_beside
from baton.metadata.handoff.schema.schema import make_schema, page_bytes, tail_window

HERE = Path(__file__).parent
LENGTHS = (64, 1024, 8192)  # tokens of the prompts that are handed over
PARTS = ("decode", "mixed", "prefill", "small-prompts", "turns", "joint")  # of bench_gpu.py
CHUNK, CONTEXT, GENERATED = 8192, 1024, 64  # tokens of chunks, and of sequences in bench_gpu.py
_NUM_NEW = 3  # tokens of two rounds without drafts, and the one before
WORKING_BYTES = 3 << 30  # of a node: graphs, working memory, the CUDA context


class Pool(NamedTuple):
    """The memory of a node, as `Times` has it."""

    tokens: int
    tail_sequences: int | None
    tail_bytes: int | None = None  # of the tail pages of one sequence


def times_of(
    engine: Mapping[str, Any], systems: Mapping[int, Mapping[str, Any]], context_len: int, pool: Pool
) -> Times:
    """Return the times in a report of bench_gpu.py, and in one row of bench_system.py for each prompt length."""
    context = CONTEXT + GENERATED
    rounds = [RoundPoint(row["batch"], context, row["step_ms"]) for row in engine["decode"]]
    rounds += [
        RoundPoint(1, row["longest"] + GENERATED, row["step_ms"]) for row in engine["mixed"] if row["batch"] == 1
    ]
    chunks = [ChunkPoint(row["tokens"], row["wall_ms"]) for row in engine["small-prompts"]]
    known = {chunk.tokens for chunk in chunks}
    for row in engine["prefill"]:
        at_once = min(row["prompts"], max(1, CHUNK // row["tokens"]))
        if at_once > 1 or row["tokens"] not in known:
            ms = row["ms"] * at_once / row["prompts"]
            chunks.append(ChunkPoint(at_once * row["tokens"], ms, prompts=at_once))
    chunks += [ChunkPoint(row["tokens"], row["ms"], history=row["prefix"]) for row in engine["turns"]]
    alone = {chunk.tokens: chunk.ms for chunk in chunks if chunk.prompts == 1 and not chunk.history}
    first_round = min(rounds, key=lambda point: (point.batch, point.context))
    handoffs = [
        HandoffPoint(tokens, max(0.01, row["itl_ms_p50"] - first_round.ms)) for tokens, row in sorted(systems.items())
    ]
    shared = sorted(set(systems) & set(alone))
    routers = sorted(systems[tokens]["ttft_ms_p50"] - alone[tokens] for tokens in shared)
    joints = [
        MixedPoint(row["batch"], row["tokens"], max(0.01, row["joint_ms"] - row["round_ms"]))
        for row in engine.get("joint", ())
        if row["is_mixed"] and not row["steps"]
    ]
    about = f"at {engine['commit']} on {engine['date']}"
    return Times(
        model=f"{engine['model']}, {engine['dtype']}, no drafts",
        device=f"one {engine['device']} per node",
        sources=(
            f"rounds, chunks, joints: tests/benchmarks/bench_gpu.py {about}",
            f"handoffs, router_ms: tests/benchmarks/serving/bench_system.py, one stream, nodes on one GPU, {about}",
            f"pool_tokens: estimated, {MEMORY_SHARE} of the GPU without weights and {WORKING_BYTES >> 30} GiB",
        ),
        context_len=context_len,
        pool_tokens=pool.tokens,
        tail_sequences=pool.tail_sequences,
        tail_bytes=pool.tail_bytes,
        router_ms=max(0.0, routers[len(routers) // 2]) if routers else 0.0,
        rounds=tuple(rounds),
        chunks=tuple(chunks),
        handoffs=tuple(handoffs),
        joints=tuple(joints),
    )


def pool_of(gpu_bytes: int, weight_bytes: int, model: ModelConfig) -> Pool:
    """Return an estimate of what a node holds in bfloat16, without drafts."""
    page_size = model.page_size(None)
    num_bytes = int(MEMORY_SHARE * gpu_bytes - weight_bytes - WORKING_BYTES)
    schema = make_schema(model.with_tail().pool("bfloat16", page_size=page_size), None, page_size)
    kept, tail, window = page_bytes(schema), page_bytes(schema, of_tails=True), tail_window(schema)
    settings = {"num_new": _NUM_NEW, "chunk_len": CHUNK, "max_running": EngineConfig().max_running}

    def num_tails(num_pages: int) -> int:
        return tails_beside(num_pages, window, page_size, **settings, relative_size=tail / kept) if window else 0

    num_pages = pages_in(max(0, num_bytes), lambda num: num * kept + num_tails(num) * tail)
    if not window:
        return Pool(max(1, num_pages * page_size), None)
    of_one = most_tails(window, _NUM_NEW, page_size)
    return Pool(max(1, num_pages * page_size), max(1, num_tails(num_pages) // of_one), of_one * tail)


def _run(script: str, arguments: Sequence[str], out: Path) -> dict[str, Any]:
    subprocess.run([sys.executable, str(HERE / script), *arguments, "--json", str(out)], check=True)
    return json.loads(out.read_text())


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="its directory")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("times are measured on a CUDA GPU, and torch finds none here")
    config = read_model_config(options.model)
    weight_bytes = sum(path.stat().st_size for path in options.model.glob("*.safetensors"))
    pool = pool_of(torch.cuda.get_device_properties(0).total_memory, weight_bytes, config)
    with tempfile.TemporaryDirectory() as directory:
        out, model = Path(directory) / "report.json", ["--model", str(options.model)]
        engine = _run("bench_gpu.py", [*model, "--only", *PARTS], out)
        systems = {}
        for tokens in LENGTHS:
            load = ["--streams", "1", "--prompt-len", str(tokens), "--tokens", "2", "--rounds", "15"]
            systems[tokens] = _run("serving/bench_system.py", [*model, *load], out)["system"][0]
    times = times_of(engine, systems, config.context_len, pool)
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(times), indent=2) + b"\n")
    read(options.out)
    print(f"wrote {options.out}; use it: baton plan --model {options.out} ...")


if __name__ == "__main__":
    main()
