"""Compare tokens per second of the whole system over HTTP with transformers `generate`, by turns in one run.

    python tests/benchmarks/serving/bench_serve.py [--model DIR] [--device cpu] [--dtype float32] [--threads 1]
        [--streams 1 8]
        [--speculative eagle --draft-topk 2 --no-draft-adaptive ...]

Both use the same model, dtype, device, threads and prompts, and generate greedily without a stop. Outputs are compared
token for token in the same run (for ties see support/oracles/ties.py). On a shared CPU, only the ratios mean something.
Prints a table and writes JSON with --json FILE.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared_paths  # noqa: F401
from cluster import Cluster
from harness import alternate, flags, report
from ties import Reference

DEMO = Path(__file__).parents[3] / "deploy" / "demo"
TEXT = "import os\nimport sys\n\n\ndef main(argv):\n    "


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = Reference(options.model, dtype=options.dtype, device=options.device)
    node_flags = ["--device", options.device, "--dtype", options.dtype, "--threads", str(options.threads)]
    node_flags += _speculation_flags(options)
    with tempfile.TemporaryDirectory() as directory, Cluster(Path(directory), options.model) as cluster:
        cluster.gpu_share = 0.6  # the reference is in this process
        cluster.start(node_flags=node_flags)
        tokenizer = _tokenizer(options.model)
        prompts = [tokenizer.encode(f"{TEXT}# {i}\n").ids for i in range(max(options.streams))]
        rows = (_compare(cluster, reference, prompts[:num], options) for num in options.streams)
        about = {
            "model": options.model.resolve().name,
            "dtype": options.dtype,
            "flags": node_flags,
            "tokens": options.tokens,
        }
        report(options, "cpu-serve", rows, unit="tokens/s", about=about)
    print(f"{' '.join(node_flags)}: ties {reference.num_ties}")


def _compare(
    cluster: Cluster, reference: Reference, prompts: list[list[int]], options: argparse.Namespace
) -> dict[str, Any]:
    length = min(len(prompt) for prompt in prompts)
    prompts = [prompt[-length:] for prompt in prompts]  # one length: transformers needs no padding
    outputs: dict[str, list[list[int]]] = {}

    def ours(number: int) -> float:
        seconds, outputs["ours"] = complete_all(cluster, prompts, max_tokens=options.tokens, temperature=0)
        return seconds

    def theirs(number: int) -> float:
        started = time.perf_counter()
        found = reference.generate_batch(prompts, options.tokens)
        seconds = time.perf_counter() - started
        for prompt, mine, other in zip(prompts, outputs["ours"], found, strict=True) if number == 0 else ():
            reference.assert_greedy(prompt, mine, other)
        return seconds

    found = alternate({"ours": ours, "theirs": theirs}, options.rounds)
    total, ratios = len(prompts) * options.tokens, [b / a for a, b in zip(*found.values(), strict=True)]
    return {
        "streams": len(prompts),
        "Baton": total / statistics.median(found["ours"]),
        "transformers": total / statistics.median(found["theirs"]),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
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


def _speculation_flags(options: argparse.Namespace) -> list[str]:
    """Return the speculation flags given, for the nodes."""
    found = ["--speculative", options.speculative]
    for name in ("draft_model", "draft_steps", "draft_topk", "draft_tokens"):
        if (value := getattr(options, name)) is not None:
            found += ["--" + name.replace("_", "-"), str(value)]
    return found if options.draft_adaptive else [*found, "--no-draft-adaptive"]


def _tokenizer(model: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model / "tokenizer.json"))


def _options() -> argparse.Namespace:
    parser = flags(__doc__, rounds=5)
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
    return parser.parse_args()


if __name__ == "__main__":
    main()
