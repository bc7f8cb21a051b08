"""Compare tokens per second of the whole system over HTTP with transformers `generate`, by turns in one run.

    python tests/benchmarks/bench_serve.py [--model DIR] [--device cpu] [--dtype float32] [--threads 1] [--streams 1 8]
        [--speculative eagle --draft-topk 2 --no-draft-adaptive ...]

Both use the same model, dtype, device, threads and prompts, and generate greedily without a stop. Outputs are compared
token for token in the same run (for ties see support/oracles/ties.py). On a shared CPU, only the ratios mean something.
Prints a table and writes JSON with --json FILE.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = map(str, (Path(__file__).parents[1] / "support").glob("*"))

from cluster import Cluster
from ties import Reference

DEMO = Path(__file__).parents[2] / "deploy" / "demo"
TEXT = "import os\nimport sys\n\n\ndef main(argv):\n    "


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = Reference(options.model, dtype=options.dtype, device=options.device)
    flags = ["--device", options.device, "--dtype", options.dtype, "--threads", str(options.threads)]
    flags += _speculation_flags(options)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory, Cluster(Path(directory), options.model) as cluster:
        cluster.gpu_share = 0.6  # the reference is in this process
        cluster.start(node_flags=flags)
        tokenizer = _tokenizer(options.model)
        for num_streams in options.streams:
            prompts = [tokenizer.encode(f"{TEXT}# {i}\n").ids for i in range(num_streams)]
            length = min(len(prompt) for prompt in prompts)
            prompts = [prompt[-length:] for prompt in prompts]  # one length: transformers needs no padding
            rows.append(_compare(cluster, reference, prompts, options))
    _report(rows, reference, options)


def _compare(
    cluster: Cluster, reference: Reference, prompts: list[list[int]], options: argparse.Namespace
) -> dict[str, Any]:
    ours_s: list[float] = []
    theirs_s: list[float] = []
    for round_index in range(options.rounds + 1):
        seconds, ours = complete_all(cluster, prompts, max_tokens=options.tokens, temperature=0)
        their_seconds, theirs = _theirs(reference, prompts, options.tokens)
        if round_index == 0:
            for prompt, mine, other in zip(prompts, ours, theirs, strict=True):
                reference.assert_greedy(prompt, mine, other)
        else:  # the first round warms up
            ours_s.append(seconds)
            theirs_s.append(their_seconds)
    total = len(prompts) * options.tokens
    return {
        "streams": len(prompts),
        "baton_tokens_per_s": total / statistics.median(ours_s),
        "transformers_tokens_per_s": total / statistics.median(theirs_s),
        "ratio": statistics.median(b / a for a, b in zip(ours_s, theirs_s, strict=True)),
        "ratios": [round(b / a, 2) for a, b in zip(ours_s, theirs_s, strict=True)],
    }


def complete_all(cluster: Cluster, prompts: list[list[int]], **fields: Any) -> tuple[float, list[list[int]]]:
    """Send all requests at once; request i has seed i. Returns the seconds until all are complete, and their tokens."""
    fields = {"ignore_eos": True, "return_token_ids": True, "model": cluster.model_name, **fields}

    def one(seed: int) -> list[int]:
        body = {**fields, "prompt": prompts[seed], "seed": seed}
        status, answer = cluster.post("/v1/completions", body, timeout_s=600)
        assert status == 200, answer
        return answer["choices"][0]["token_ids"]

    with ThreadPoolExecutor(len(prompts)) as threads:
        started = time.perf_counter()
        outputs = list(threads.map(one, range(len(prompts))))
        return time.perf_counter() - started, outputs


def _theirs(reference: Reference, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
    started = time.perf_counter()
    outputs = reference.generate_batch(prompts, num_tokens)
    return time.perf_counter() - started, outputs


def _report(rows: list[dict[str, Any]], reference: Reference, options: argparse.Namespace) -> None:
    device = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    print(f"model {options.model.resolve().name}, {options.dtype}, {device}, {options.threads} thread(s),", end=" ")
    print(f"{' '.join(_speculation_flags(options))},", end=" ")
    print(f"{options.tokens} tokens a stream, torch {torch.__version__}, ties {reference.num_ties}")
    print(f"{'streams':>8} {'baton tok/s':>12} {'transformers':>13} {'ratio':>6}  ratios of the rounds")
    for row in rows:
        print(
            f"{row['streams']:>8} {row['baton_tokens_per_s']:>12.0f} {row['transformers_tokens_per_s']:>13.0f}"
            f" {row['ratio']:>6.2f}  {row['ratios']}"
        )
    if options.json:
        about = {"device": device, "dtype": options.dtype, "flags": _speculation_flags(options)}
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1))


def _speculation_flags(options: argparse.Namespace) -> list[str]:
    """Return the speculation flags given, for the nodes."""
    flags = ["--speculative", options.speculative]
    for name in ("draft_model", "draft_steps", "draft_topk", "draft_tokens"):
        if (value := getattr(options, name)) is not None:
            flags += ["--" + name.replace("_", "-"), str(value)]
    return flags if options.draft_adaptive else [*flags, "--no-draft-adaptive"]


def _tokenizer(model: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model / "tokenizer.json"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--speculative", default="none", help="this and the flags of drafts: as of `baton up`")
    parser.add_argument("--draft-model", type=Path)
    parser.add_argument("--draft-steps", type=int)
    parser.add_argument("--draft-topk", type=int)
    parser.add_argument("--draft-tokens", type=int)
    parser.add_argument("--draft-adaptive", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
