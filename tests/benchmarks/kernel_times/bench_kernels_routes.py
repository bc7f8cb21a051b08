"""Time the choice of experts on a GPU, and the places of the pairs, at the shapes of published mixtures.

    python tests/benchmarks/kernel_times/bench_kernels_routes.py [--models qwen3-30b ...]
        [--rows 1 8 64 256 1024 8192] [--no-torch]

A time is the median replay of a CUDA graph, divided by its number of calls. Calls go round copies of the router's
weight of over 100 MB, so that none is in L2. "both" is a call of one after the other, as a layer makes them. Results
are compared with the references in the same run, which ends with an error if they differ.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import rooms  # noqa: F401
from bench_kernels_dense import microseconds, random, set_dependent_launch
from torch import Tensor

from baton.kernels.experts.experts import place_experts_ref
from baton.kernels.experts.routes import Routing, routes_ref
from baton.kernels.experts.triton_places import place_experts
from baton.kernels.experts.triton_routes import routes

COLD_BYTES = 100e6  # twice the L2 cache
MIN_SAME = 0.99  # rows whose experts are those of the reference; in the others, two scores nearly tie


class Mixture(NamedTuple):
    num_experts: int
    hidden_size: int
    routing: Routing
    has_bias: bool = False


GROUPED = Routing(8, "sigmoid", True, 2.5, num_groups=8, num_active_groups=4, num_ranking=2)
MODELS = {
    "qwen3-30b": Mixture(128, 2048, Routing(8, sums_to_one=True)),
    "deepseek-v2-lite": Mixture(64, 2048, Routing(6)),
    "deepseek-v3": Mixture(256, 7168, GROUPED, has_bias=True),
    "glm-4.5": Mixture(160, 5120, Routing(8, "sigmoid", True, 2.5), has_bias=True),
    "gpt-oss-120b": Mixture(128, 2880, Routing(4, sums_to_one=True)),
}


def bench(name: str, num_rows: int, *, has_torch: bool) -> None:
    num_experts, size, routing, has_bias = MODELS[name]
    num_copies = int(COLD_BYTES // (num_experts * size * 4)) + 1
    weights = [random(num_experts, size, scale=0.02).float() for _ in range(num_copies)]
    bias = random(num_experts, scale=0.1).float() if has_bias else None
    x = random(num_rows, size)

    def choose(weight: Tensor) -> Tensor:
        return routes(x, weight, None, bias, routing).chosen

    ours, theirs = routes(x, weights[0], None, bias, routing), routes_ref(x, weights[0], None, bias, routing)
    is_same = (ours.chosen == theirs.chosen).all(1)
    assert is_same.float().mean().item() >= MIN_SAME, is_same.float().mean()
    torch.testing.assert_close(ours.shares[is_same], theirs.shares[is_same], atol=1e-6, rtol=1e-4)
    placed, expected = place_experts(ours.chosen, num_experts), place_experts_ref(ours.chosen, num_experts)
    assert torch.equal(placed.pairs, expected.pairs) and torch.equal(placed.experts, expected.experts)
    times = {
        "routes": microseconds([lambda weight=weight: choose(weight) for weight in weights]),
        "places": microseconds([lambda: place_experts(ours.chosen, num_experts)] * 50),
        "both": microseconds([lambda weight=weight: place_experts(choose(weight), num_experts) for weight in weights]),
    }
    if has_torch:
        calls = [lambda weight=weight: routes_ref(x, weight, None, bias, routing) for weight in weights[:20]]
        times["torch routes"] = microseconds(calls)
        times["torch places"] = microseconds([lambda: place_experts_ref(ours.chosen, num_experts)] * 5)
    line = ", ".join(f"{part} {us:7.2f}" for part, us in times.items())
    print(f"{name:17} {num_rows:5} rows: {line} us; same {is_same.float().mean().item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 256, 1024, 8192])
    parser.add_argument("--no-torch", action="store_true", help="do not time the references")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    set_dependent_launch(True)
    with torch.inference_mode():
        for name in args.models:
            for num_rows in args.rows:
                bench(name, num_rows, has_torch=not args.no_torch)


if __name__ == "__main__":
    main()
