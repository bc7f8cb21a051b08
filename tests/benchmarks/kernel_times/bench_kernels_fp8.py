"""FP8 products in CUDA graphs, by shape and number of rows: microseconds, TB/s of weights, TFLOP/s, and the error.

    python tests/benchmarks/kernel_times/bench_kernels_fp8.py [--parts rounding products chain]
        [--rows 1 8 64 256 8192] [--blocks]

    rounding   the kernels that round rows: alone, behind a norm, behind a gate
    products   every product of a layer of Llama-3.1-8B. Calls go round copies of the weights of over 200 MB, so that
               none is in L2. The error is the norm of the difference from float64, relative to that of the result;
               bfloat16 alone gives 1.7e-3. "parts" has float32 sums, which the next kernel adds up
    chain      norms, products and gates of 8 layers (no attention), each with weights of its own: microseconds per
               layer. "floor" is the time of reading the weights at 4.4 TB/s

A call's time is that of a graph of many calls over their number, the median of 5 replays. `--blocks`: scales for blocks
of 128 x 128 and groups of 128 columns, as DeepSeek-V3; otherwise for whole rows.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import rooms  # noqa: F401
from bench_kernels_dense import microseconds
from torch import Tensor

from baton.engine.layers.residual import Residual
from baton.engine.products.fp8 import Fp8Product, RowRounding
from baton.engine.products.linear import Linear
from baton.kernels.products.fp8 import (
    BLOCK,
    E4M3,
    Fp8Weight,
    RoundedRows,
    add_rms_norm_round_,
    dequantized,
    fp8_gated_linear,
    fp8_linear,
    fp8_linear_parts,
    gates_fp8,
    round_rows,
    silu_mul_round,
    spread,
)
from baton.kernels.products.silu import silu_mul_ref

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROTATED_BYTES = 200e6  # four times the L2
REPLAY_BYTES = 1e9  # weights read by a replay
NUM_LAYERS = 8
READ_TB_S = 4.4  # of an H200
DTYPE = torch.bfloat16


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE).mul_(scale)


def weight_of(out_size: int, in_size: int, *, has_blocks: bool) -> Fp8Weight:
    values = torch.randn(out_size, in_size, device="cuda").mul_(100).clamp_(-448, 448).to(E4M3)
    group = BLOCK if has_blocks else in_size
    shape = out_size // BLOCK if has_blocks else out_size, in_size // group
    return Fp8Weight(values, torch.rand(shape, device="cuda").add_(0.5).mul_(0.01 / math.sqrt(in_size)), group)


def bench_rounding(row_counts: list[int]) -> None:
    for num_rows in row_counts:
        for size in (4096, 14336):
            x, gate_up, norm = random(num_rows, size), random(num_rows, 2 * size), random(size)
            times = {
                "round": microseconds([lambda x=x, size=size: round_rows(x, size)] * 20),
                "norm": microseconds([lambda x=x, norm=norm: add_rms_norm_round_(x, x, norm, 1e-5, len(norm))] * 20),
                "gate": microseconds([lambda gate_up=gate_up, size=size: silu_mul_round(gate_up, size)] * 20),
            }
            print(f"{num_rows:5} rows of {size:5}: " + ", ".join(f"{name} {us:.2f} us" for name, us in times.items()))


def bench_products(row_counts: list[int], *, has_blocks: bool) -> None:
    for name, (out_size, in_size) in SHAPES.items():
        num_bytes = out_size * in_size
        num_copies = max(2, -(-int(ROTATED_BYTES) // num_bytes))
        weights = [weight_of(out_size, in_size, has_blocks=has_blocks) for _ in range(num_copies)]
        num_rounds = -(-int(REPLAY_BYTES) // (num_copies * num_bytes))
        for num_rows in row_counts:
            rows = round_rows(random(num_rows, in_size), weights[0].group)
            expected = exact(rows, weights[0])
            ways: dict[str, Callable[[Fp8Weight], Tensor]] = {"": lambda w, rows=rows: fp8_linear(rows, w, None, DTYPE)}
            if fp8_linear_parts(rows, weights[0], DTYPE).ndim == 3:
                ways["parts"] = lambda w, rows=rows: fp8_linear_parts(rows, w, DTYPE)
            if name == "gate_up" and gates_fp8(rows, weights[0]):
                ways["gated"] = lambda w, rows=rows: fp8_gated_linear(rows, w, DTYPE)
            for way, run in ways.items():
                y = run(weights[0])[..., :256, :] if way != "parts" else run(weights[0]).sum(0)[:256]
                true = silu_mul_ref(expected) if way == "gated" else expected
                error = float((y - true).norm() / true.norm())
                us = microseconds([lambda w=w, run=run: run(w) for w in weights], num_rounds if num_rows < 512 else 1)
                flops = 2 * num_rows * num_bytes / us / 1e6
                speed = f"{num_bytes / us / 1e6:.2f} TB/s, {flops:5.0f} TFLOP/s, error {error:.1e}"
                print(f"{name + ' ' + way:13} {num_rows:5} rows: {us:8.2f} us, {speed}", flush=True)


def exact(rows: RoundedRows, weight: Fp8Weight) -> Tensor:
    """Return the product of the first 256 rows, float64."""
    assert rows.scales is not None
    wide = rows.values[:256].double() * spread(rows.scales[:256], weight.group, rows.values.shape[1]).double()
    return wide @ dequantized(*weight).double().T


def bench_chain(row_counts: list[int], *, has_blocks: bool) -> None:
    layers = [[linear(*shape, has_blocks=has_blocks) for shape in SHAPES.values()] for _ in range(NUM_LAYERS)]
    norm, floor = random(4096).abs_(), sum(math.prod(shape) for shape in SHAPES.values()) / READ_TB_S / 1e6
    for num_rows in row_counts:
        hidden = random(num_rows, 4096)

        def step(hidden: Tensor = hidden) -> Tensor:
            stream = Residual(hidden.clone(), 1e-5)
            for qkv, out, gate_up, down in layers:
                stream.add(out, qkv(stream.normed_for(qkv, norm))[:, :4096].contiguous())  # in place of attention
                stream.add(down, stream.gated_product(gate_up, norm, down))
            return stream.normed(norm)

        us = microseconds([step]) / NUM_LAYERS
        print(
            f"a layer {num_rows:5} rows: {us:8.2f} us (floor {floor:.2f}), sum {step().float().sum():.4f}", flush=True
        )


def linear(out_size: int, in_size: int, *, has_blocks: bool) -> Linear:
    weight = weight_of(out_size, in_size, has_blocks=has_blocks)
    return Linear(Fp8Product(weight, RowRounding(weight.group, False, None), None, in_size, out_size, DTYPE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["rounding", "products", "chain"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 32, 64, 128, 256, 1024, 8192])
    parser.add_argument("--blocks", action="store_true")
    args = parser.parse_args()
    assert torch.cuda.is_available(), "these kernels are measured on a GPU"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    torch.manual_seed(0)
    with torch.inference_mode():
        if "rounding" in args.parts:
            bench_rounding(args.rows)
        if "products" in args.parts:
            bench_products(args.rows, has_blocks=args.blocks)
        if "chain" in args.parts:
            bench_chain([rows for rows in args.rows if rows <= 1024], has_blocks=args.blocks)


if __name__ == "__main__":
    main()
