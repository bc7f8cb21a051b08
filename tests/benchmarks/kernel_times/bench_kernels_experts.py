"""Time the products of mixtures of experts on a GPU, at the shapes of Qwen3-30B-A3B, DeepSeek-V2-Lite and gpt-oss-20b.

    python tests/benchmarks/kernel_times/bench_kernels_experts.py [--rows 1 8 64 256 1024 8192]
        [--models 30b v2-lite 20b]
                                                     [--formats bf16 fp8 mxfp4] [--tiles]

Rows choose their experts uniformly. A time is that of a CUDA graph of eight calls with different choices, divided by
eight. GB/s are of the weights of the experts that are chosen, TFLOP/s of the products of all pairs. The error is the
largest difference from float32 products of some pairs, divided by the largest of those products. The floor is the time
to read those weights at 4.2 TB/s, or that of the products at 700 TFLOP/s. With --tiles, each product of MXFP4 is timed
with each of TILES.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import rooms  # noqa: F401
from bench_kernels_dense import microseconds
from torch import Tensor

from baton.kernels.experts import triton_expert_row, triton_experts
from baton.kernels.experts.experts import (
    ExpertWeight,
    Places,
    experts_of_row_ref,
    gated_experts_of_row_ref,
    place_experts_ref,
)
from baton.kernels.experts.mxfp4 import GROUP, from_checkpoint, unpacked
from baton.kernels.experts.triton_expert_packed import PackedTiles, packed_product
from baton.kernels.products.fp8 import dequantized, round_rows
from baton.kernels.products.silu import silu_mul_ref

NUM_CALLS = 8
NUM_THREADS = 16  # that compile
TOLERANCE = {"bf16": 1e-2, "fp8": 2e-2, "mxfp4": 1e-2}
READ, MULTIPLIED = 4.2e6, 700e6  # bytes and floating point operations per us of the floor


class Mixture(NamedTuple):
    """Sizes of a model's mixtures."""

    num_experts: int
    num_active: int
    size: int
    inner_size: int


MODELS = {
    "30b": Mixture(128, 8, 2048, 768),
    "v2-lite": Mixture(64, 6, 2048, 1408),
    "20b": Mixture(32, 4, 2880, 2880),
}

# By pairs of a block.
TILES = {
    16: (
        PackedTiles(64, 128, True, 2, 4, has_halves=True),
        PackedTiles(64, 128, True, 2, 4),
        PackedTiles(64, 128, True, 2, 3, has_halves=True),
        PackedTiles(32, 128, True, 2, 4, has_halves=True),
        PackedTiles(32, 128, True, 2, 6, has_halves=True),
        PackedTiles(32, 128, True, 1, 4, has_halves=True),
        PackedTiles(32, 256, True, 2, 3),
        PackedTiles(64, 64, True, 2, 6, has_halves=True),
        PackedTiles(128, 64, True, 4, 4, has_halves=True),
        PackedTiles(64, 128, True, 4, 4, has_halves=True),
        PackedTiles(128, 128, True, 4, 3, has_halves=True),
        PackedTiles(64, 128, False, 4, 4),
        PackedTiles(128, 128, False, 4, 3),
    ),
    32: (
        PackedTiles(64, 128, True, 2, 3),
        PackedTiles(64, 128, True, 2, 3, has_halves=True),
        PackedTiles(32, 128, True, 2, 4),
        PackedTiles(64, 128, False, 4, 3),
        PackedTiles(64, 128, True, 4, 3),
        PackedTiles(128, 128, True, 4, 3),
        PackedTiles(128, 64, True, 4, 4),
    ),
    64: (
        PackedTiles(128, 64, True, 4, 3),
        PackedTiles(128, 64, True, 4, 2),
        PackedTiles(128, 128, True, 8, 2),
        PackedTiles(256, 64, True, 8, 3),
        PackedTiles(128, 64, False, 4, 3),
    ),
    128: (
        PackedTiles(128, 64, True, 4, 2),
        PackedTiles(128, 64, True, 4, 2, has_halves=True),
        PackedTiles(128, 64, True, 4, 3),
        PackedTiles(128, 128, True, 8, 2),
        PackedTiles(128, 64, True, 8, 3),
        PackedTiles(256, 64, True, 8, 3),
        PackedTiles(128, 64, False, 4, 2),
        PackedTiles(256, 64, False, 8, 3),
    ),
}


class Case(NamedTuple):
    """A product of a mixture in one format, with rows that choose experts."""

    weight: ExpertWeight
    x: Tensor  # [num_rows or num_pairs, in_size]
    x_scales: Tensor | None
    places: tuple[Places, ...]
    is_gated: bool

    @classmethod
    def make(cls, mixture: Mixture, num_rows: int, form: str, weight: ExpertWeight, *, is_gated: bool) -> Case:
        in_size = mixture.size if is_gated else mixture.inner_size
        x = torch.randn(num_rows * (1 if is_gated else mixture.num_active), in_size, device="cuda").bfloat16()
        x, x_scales = round_rows(x, in_size) if form == "fp8" else (x, None)
        scores = torch.rand(NUM_CALLS, num_rows, mixture.num_experts, device="cuda")
        chosen = scores.topk(mixture.num_active).indices
        place = functools.partial(place_experts_ref, num_experts=mixture.num_experts, is_packed=weight.is_packed)
        places = tuple(place(each.contiguous()) for each in chosen)
        return cls(weight, x, x_scales, places, is_gated)

    def __call__(self, index: int = 0) -> Tensor:
        by = triton_experts.gated_experts_linear if self.is_gated else triton_experts.experts_linear
        return by(self.x, self.x_scales, self.weight, self.places[index], torch.bfloat16)

    def error(self, out: Tensor) -> float:
        """Return the error of a result of the first choice."""
        places, expected, found = self.places[0], list[Tensor](), list[Tensor]()
        chosen = places.chosen.flatten()
        out_size = len(self.weight.values) // places.num_experts
        for pair in range(0, len(chosen), max(1, len(chosen) // 24)):
            own = slice(int(chosen[pair]) * out_size, (int(chosen[pair]) + 1) * out_size)
            values, scales = self.weight.values[own], self.weight.scales
            if scales is None:
                numbers = values.float()
            else:
                by = unpacked if self.weight.is_packed else dequantized
                numbers = by(values, scales[own], self.weight.group)
            row = pair * len(self.x) // len(chosen)
            product = numbers.double() @ self.x[row].double()
            if self.x_scales is not None:
                product *= self.x_scales[row].double()
            expected.append(silu_mul_ref(product[None])[0] if self.is_gated else product)
            found.append(out[pair])
        products = torch.stack(expected)
        return float((torch.stack(found) - products).abs().max() / products.abs().max())

    def num_bytes(self) -> float:
        """Return the bytes of the weights of the experts that a call's rows choose."""
        distinct = sum(len(places.chosen.unique()) for places in self.places) / NUM_CALLS
        num_bytes = self.weight.values.nbytes
        if self.weight.is_packed and self.weight.scales is not None:
            num_bytes += self.weight.scales.numel()
        return distinct / self.places[0].num_experts * num_bytes

    def num_flop(self) -> float:
        out_size = len(self.weight.values) // self.places[0].num_experts
        return 2.0 * self.places[0].chosen.numel() * out_size * self.x.shape[1]

    def by_tiles(self, tiles: PackedTiles, index: int = 0) -> Tensor:
        places, out_size = self.places[index], len(self.weight.values) // self.places[0].num_experts
        size = out_size // 2 if self.is_gated else out_size
        out = torch.empty(places.chosen.numel(), size, device="cuda", dtype=torch.bfloat16)
        packed_product(self.x, None, self.weight, places, out, is_gated=self.is_gated, tiles=tiles)
        return out


def weight_of(num_rows: int, in_size: int, form: str) -> ExpertWeight:
    if form == "mxfp4":
        packed = torch.randint(256, (num_rows, in_size // 2), device="cuda", dtype=torch.uint8)
        scales = torch.randint(116, 120, (num_rows, in_size // GROUP), device="cuda", dtype=torch.uint8)
        return ExpertWeight(*from_checkpoint(packed, scales), GROUP)
    values = torch.randn(num_rows, in_size, device="cuda", dtype=torch.bfloat16).mul_(in_size**-0.5)
    if form == "fp8":
        return ExpertWeight(*round_rows(values, in_size), in_size)
    return ExpertWeight(values, None, in_size)


def timed(call: Callable[[int], object]) -> float:
    return microseconds([lambda index=index: call(index) for index in range(NUM_CALLS)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256, 1024, 8192])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--formats", nargs="+", choices=list(TOLERANCE), default=list(TOLERANCE))
    parser.add_argument("--tiles", action="store_true", help="time each of TILES, of MXFP4")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for name in args.models:
        for form in args.formats:
            mixture = MODELS[name]
            gate_up = weight_of(mixture.num_experts * 2 * mixture.inner_size, mixture.size, form)
            down = weight_of(mixture.num_experts * mixture.size, mixture.inner_size, form)
            for num_rows in args.rows:
                for part, weight, is_gated in (("gate_up", gate_up, True), ("down", down, False)):
                    case = Case.make(mixture, num_rows, form, weight, is_gated=is_gated)
                    error, us = case.error(case()), timed(case)
                    _print(name, form, part, num_rows, us, _rates(case, us), error)
                    if args.tiles and form == "mxfp4":
                        _bench_tiles(f"{name} {part} {num_rows} rows", case)
                if num_rows == 1:
                    _bench_row(name, form, gate_up, down)
                    if args.tiles and form == "mxfp4":
                        for tiles in TILES[16]:
                            if tiles.has_halves:
                                _bench_row(name, form, gate_up, down, tiles._replace(has_halves=False))


def _rates(case: Case, us: float) -> str:
    floor = max(case.num_bytes() / READ, case.num_flop() / MULTIPLIED)
    rates = f"{case.num_bytes() / us / 1e3:6.0f} GB/s {case.num_flop() / us / 1e6:6.1f} TFLOP/s"
    return f"{rates} {us / floor:5.2f} of the floor"


def _compile(calls: list[Callable[[], object]]) -> None:
    """Run the calls at once, whose kernels are compiled then. Failures are those of a later call as well."""

    def run(call: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):
            call()

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(run, calls))


def _bench_tiles(name: str, case: Case) -> None:
    """Time a product of MXFP4 with each of TILES. Tiles that fail are printed as well."""
    candidates = TILES[case.places[0].block]
    _compile([functools.partial(case.by_tiles, tiles) for tiles in candidates])
    for tiles in candidates:
        try:
            error = case.error(case.by_tiles(tiles))
            us = timed(functools.partial(case.by_tiles, tiles))
        except Exception as failure:
            print(f"    {name} {tuple(tiles)}: {failure!r:.200}", flush=True)
            continue
        print(f"    {name} {tuple(tiles)} {us:8.1f} us {_rates(case, us)}  error {error:.1e}", flush=True)


def _bench_row(
    name: str, form: str, gate_up: ExpertWeight, down: ExpertWeight, tiles: PackedTiles | None = None
) -> None:
    """Time the whole mixture of one row, which is rounded already, of MXFP4 with the `tiles`."""
    mixture = MODELS[name]
    if tiles is not None:
        print(f"    {tuple(tiles)}: ", end="")
    x, shares = torch.randn(1, mixture.size, device="cuda").bfloat16(), torch.rand(1, mixture.num_active, device="cuda")
    chosen = torch.rand(NUM_CALLS, 1, mixture.num_experts, device="cuda").topk(mixture.num_active).indices

    def rounded(rows: Tensor) -> tuple[Tensor, Tensor | None]:
        return round_rows(rows, rows.shape[1]) if form == "fp8" else (rows, None)

    rows = rounded(x)

    def call(index: int) -> Tensor:
        own = (chosen[index], mixture.num_experts)
        inner = triton_expert_row.gated_experts_of_row(*rows, gate_up, *own, x.dtype, tiles=tiles)
        return triton_expert_row.experts_of_row(*rounded(inner), down, *own, shares, x.dtype, tiles=tiles)

    own = [_of_experts(weight, chosen[0, 0], mixture.num_experts) for weight in (gate_up, down)]
    places = torch.arange(mixture.num_active, device="cuda").unsqueeze(0), mixture.num_active
    inner = gated_experts_of_row_ref(*rows, own[0], *places, x.dtype)
    expected = experts_of_row_ref(*rounded(inner), own[1], *places, shares, x.dtype).float()
    error = float((call(0).float() - expected).abs().max() / expected.abs().max())
    us = timed(call)
    num_bytes = sum(each.values.nbytes + (each.scales.numel() if each.is_packed else 0) for each in (gate_up, down))
    num_bytes *= mixture.num_active / mixture.num_experts
    rates = f"{num_bytes / us / 1e3:6.0f} GB/s" + " " * 15 + f"{us * READ / num_bytes:5.2f} of the floor"
    _print(name, form, "both", 1, us, rates, error)


def _of_experts(weight: ExpertWeight, experts: Tensor, num_experts: int) -> ExpertWeight:
    """Return the weights of some experts."""
    size = len(weight.values) // num_experts
    rows = (experts.unsqueeze(1) * size + torch.arange(size, device="cuda")).flatten()
    values = weight.values.view(torch.uint8).index_select(0, rows).view(weight.values.dtype)
    return weight._replace(values=values, scales=None if weight.scales is None else weight.scales[rows])


def _print(name: str, form: str, part: str, num_rows: int, us: float, rates: str, error: float) -> None:
    print(f"{name:8} {form} {part:7} {num_rows:5} rows {us:8.1f} us {rates}  error {error:.1e}", flush=True)
    assert error < TOLERANCE[form], (name, form, part, num_rows, error)


if __name__ == "__main__":
    main()
