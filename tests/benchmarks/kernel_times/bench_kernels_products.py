"""Norms, gates, sampler and products in CUDA graphs, in 16 bits and in FP8: our kernels against torch and cuBLAS.

    python tests/benchmarks/kernel_times/bench_kernels_products.py [--only small layer fp8 fp8-blocks fp8-layer]
                                                                   [--rows 1 8 64]

    small       norms, gate, argmax, top-k; inputs stay in L2, as they do in a decode step
    layer       norms, products and gates of 8 layers of Llama-3.1-8B (no attention), each with weights of its own, with
                the configurations that a node measured on this GPU before, or defaults: torch, ours, ours with
                dependent launch; per layer
    fp8         the kernels that round rows, and every product of such a layer, with one scale per row; "parts" has
                float32 sums, which the next kernel adds up. The error is the norm of the difference from float64 over
                that of the result; bfloat16 alone gives 1.7e-3
    fp8-blocks  the same with scales for blocks of 128 x 128 and groups of 128 columns, as DeepSeek-V3
    fp8-layer   as `layer`

A node's own tuning measures every candidate configuration of a product (engine/tuning).
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from graph_times import Kernel, close, copies, each, measure, normal, relative
from torch import Tensor

from baton.engine.layers.decoder import Residual
from baton.engine.products.dense import DenseProduct
from baton.engine.products.fp8 import Fp8Product, RowRounding
from baton.engine.products.linear import Linear
from baton.engine.tuning.tuning import use_file
from baton.kernels import gpu
from baton.kernels.products import triton_norm, triton_silu
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
from baton.kernels.products.norm import rms_norm_ref
from baton.kernels.products.silu import silu_mul_ref
from baton.kernels.sampling import noise, triton_sample
from baton.kernels.sampling.filters import Filters
from baton.kernels.sampling.sample import Draws, perturbed_argmax_ref

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
NUM_LAYERS, SIZE, VOCAB_SIZE = 8, 4096, 128256
DTYPE = torch.bfloat16


def set_dependent_launch(is_on: bool) -> None:
    os.environ["BATON_DEPENDENT_LAUNCH"] = "1" if is_on else "0"
    gpu._has_dependent_launch.cache_clear()


# --- norms, gate and sampler ------------------------------------------------------------------------------------------


def small(options: argparse.Namespace) -> Iterator[Kernel]:
    for num_rows in (rows for rows in options.rows if rows <= 256):
        for size in (2048, 4096):
            yield from norms(num_rows, size)
        for size in (8192, 14336):
            gate_up = normal(num_rows, 2 * size)
            yield from beside_torch(
                f"silu_mul {size}, {num_rows} rows",
                lambda gate_up=gate_up: triton_silu.silu_mul(gate_up),
                lambda gate_up=gate_up: silu_mul_ref(gate_up),
                3 * num_rows * size * 2,
            )
        if num_rows <= 32:
            yield from samplers(num_rows)


def beside_torch(
    name: str, ours: Callable[[], Tensor], theirs: Callable[[], Tensor], num_bytes: int, *, compares: bool = True
) -> Iterator[Kernel]:
    yield Kernel(name, [ours] * 20, num_bytes, check=close(ours, theirs) if compares else None)
    yield Kernel(f"{name}: torch", [theirs] * 20, num_bytes)


def norms(num_rows: int, size: int) -> Iterator[Kernel]:
    x, delta, weight = normal(num_rows, size), normal(num_rows, size, scale=0.0), normal(size)
    num_bytes, args, at = 2 * x.nbytes, (weight, 1e-5), f"{size}, {num_rows} rows"

    def with_torch() -> Tensor:
        x.add_(delta)
        return rms_norm_ref(x, weight, 1e-5)

    yield from beside_torch(
        f"rms_norm {at}", lambda: triton_norm.rms_norm(x, *args), lambda: rms_norm_ref(x, *args), num_bytes
    )
    yield from beside_torch(
        f"add_rms_norm_ {at}", lambda: triton_norm.add_rms_norm_(x, delta, *args), with_torch, 2 * num_bytes
    )


def torch_scores(logits: Tensor, draws: Draws) -> Tensor:
    """Sample as engine/sampling/sampling.py does without filters and processors, with torch operations only."""
    scores, temperature = logits.float(), draws.temperatures.unsqueeze(1)
    perturbed = (scores - scores.amax(1, keepdim=True)).div_(temperature)
    return perturbed.add_(noise.gumbel_noise_ref(draws.seeds, draws.positions, logits.shape[1]))


def samplers(num_rows: int) -> Iterator[Kernel]:
    seeds = torch.randint(0, 2**63 - 1, (num_rows,), device="cuda")
    positions = torch.randint(0, 2**31 - 1, (num_rows,), device="cuda")
    draws = Draws(seeds, positions, torch.full((num_rows,), 0.8, device="cuda"))
    off = torch.full_like(draws.temperatures, -torch.inf)
    shares = torch.ones_like(draws.temperatures, dtype=torch.float64)
    kinds = {
        "top_p 0.9": draws._replace(filters=Filters(off, torch.full_like(seeds, 2**31 - 1), shares * 0.9)),
        "top_k 50": draws._replace(filters=Filters(off, torch.full_like(seeds, 50), shares)),
    }
    logits = normal(num_rows, VOCAB_SIZE, scale=2.0)
    at, num_bytes = f"of {VOCAB_SIZE}, {num_rows} rows", logits.nbytes
    yield Kernel(f"greedy {at}", [lambda: triton_sample.perturbed_argmax(logits)] * 20, num_bytes)
    yield Kernel(f"greedy {at}: torch", [lambda: logits.argmax(1)] * 20, num_bytes)
    yield Kernel(f"draw {at}", [lambda: triton_sample.perturbed_argmax(logits, draws)] * 20, num_bytes)
    yield Kernel(f"draw {at}: torch", [lambda: torch_scores(logits, draws).argmax(1)] * 20, num_bytes)
    yield Kernel(f"top 8 {at}", [lambda: triton_sample.perturbed_topk(logits, 8, draws)] * 20, num_bytes)
    for name, kind in kinds.items():
        yield from beside_torch(
            f"{name} {at}",
            lambda kind=kind: triton_sample.perturbed_argmax(logits, kind).token_ids,
            lambda kind=kind: perturbed_argmax_ref(logits, kind).token_ids,
            num_bytes,
        )


# --- products of FP8 --------------------------------------------------------------------------------------------------


def weight_of(out_size: int, in_size: int, *, has_blocks: bool = False) -> Fp8Weight:
    values = torch.randn(out_size, in_size, device="cuda").mul_(100).clamp_(-448, 448).to(E4M3)
    group = BLOCK if has_blocks else in_size
    shape = out_size // BLOCK if has_blocks else out_size, in_size // group
    return Fp8Weight(values, torch.rand(shape, device="cuda").add_(0.5).mul_(0.01 / math.sqrt(in_size)), group)


def fp8(options: argparse.Namespace, *, has_blocks: bool = False) -> Iterator[Kernel]:
    for num_rows in () if has_blocks else options.rows:
        for size in (4096, 14336):
            x, gate_up, norm = normal(num_rows, size), normal(num_rows, 2 * size), normal(size)
            at = f"{size}, {num_rows} rows"
            yield Kernel(f"round {at}", [lambda x=x, size=size: round_rows(x, size)] * 20)
            norms = [lambda x=x, norm=norm, size=size: add_rms_norm_round_(x, x, norm, 1e-5, size)] * 20
            yield Kernel(f"norm and round {at}", norms)
            gates = [lambda gate_up=gate_up, size=size: silu_mul_round(gate_up, size)] * 20
            yield Kernel(f"gate and round {at}", gates)
    for name, (out_size, in_size) in SHAPES.items():
        num_bytes = out_size * in_size
        weights = [weight_of(out_size, in_size, has_blocks=has_blocks) for _ in range(copies(num_bytes))]
        for num_rows in options.rows:
            rows = round_rows(normal(num_rows, in_size), weights[0].group)
            ways: dict[str, Callable[[Fp8Weight], Tensor]] = {"": lambda w, rows=rows: fp8_linear(rows, w, None, DTYPE)}
            if fp8_linear_parts(rows, weights[0], DTYPE).ndim == 3:
                ways[" parts"] = lambda w, rows=rows: fp8_linear_parts(rows, w, DTYPE)
            if name == "gate_up" and gates_fp8(rows, weights[0]):
                ways[" gated"] = lambda w, rows=rows: fp8_gated_linear(rows, w, DTYPE)
            for way, run in ways.items():

                def first(
                    run: Callable[[Fp8Weight], Tensor] = run, way: str = way, own: Fp8Weight = weights[0]
                ) -> Tensor:
                    return (run(own).sum(0) if way == " parts" else run(own))[:256]

                def exact(rows: RoundedRows = rows, way: str = way, own: Fp8Weight = weights[0]) -> Tensor:
                    product = exact_product(rows, own)
                    return silu_mul_ref(product) if way == " gated" else product

                check, num_flop = relative(first, exact, 2e-2), 2.0 * num_rows * num_bytes
                yield Kernel(f"{name}{way}, {num_rows} rows", each(run, weights), num_bytes, num_flop, check)


def exact_product(rows: RoundedRows, weight: Fp8Weight) -> Tensor:
    """Return the product of the first 256 rows, float64."""
    assert rows.scales is not None
    wide = rows.values[:256].double() * spread(rows.scales[:256], weight.group, rows.values.shape[1]).double()
    return wide @ dequantized(*weight).double().T


# --- layers without attention -----------------------------------------------------------------------------------------


def fp8_matrix(shape: tuple[int, int]) -> Linear:
    weight = weight_of(*shape)
    return Linear(Fp8Product(weight, RowRounding(weight.group, False, None), None, shape[1], shape[0], DTYPE))


def matrix(shape: tuple[int, int]) -> Linear:
    return Linear.dense(normal(*shape, scale=shape[1] ** -0.5))


def layer(options: argparse.Namespace) -> Iterator[Kernel]:
    use_file(torch.device("cuda"))
    layers = [[matrix(shape) for shape in SHAPES.values()] for _ in range(NUM_LAYERS)]
    for num_rows, hidden, norm in ((rows, normal(rows, SIZE), normal(SIZE)) for rows in options.rows if rows <= 1024):
        args = (hidden, layers, norm)
        check = relative(lambda args=args: our_step(*args), lambda args=args: torch_step(*args), 2e-2)
        for is_on in (False, True):
            set_dependent_launch(is_on)
            name = f"a layer, {num_rows} rows{', dependent launch' * is_on}"
            yield of_layer(name, lambda args=args: our_step(*args), check, 2)
        set_dependent_launch(False)
        yield of_layer(f"a layer, {num_rows} rows: torch", lambda args=args: torch_step(*args), None, 2)


def fp8_layer(options: argparse.Namespace) -> Iterator[Kernel]:
    layers = [[fp8_matrix(shape) for shape in SHAPES.values()] for _ in range(NUM_LAYERS)]
    for num_rows, hidden, norm in ((rows, normal(rows, SIZE), normal(SIZE)) for rows in options.rows if rows <= 1024):
        args = (hidden, layers, norm.abs())
        yield of_layer(f"a layer, {num_rows} rows", lambda args=args: our_step(*args), None, 1)


def of_layer(name: str, step: Callable[[], object], check: Callable[[], float] | None, item_bytes: int) -> Kernel:
    """Return the kernel of NUM_LAYERS layers: its time is the step's over their number."""
    num_bytes = item_bytes * sum(math.prod(shape) for shape in SHAPES.values())
    calls: list[Callable[[], object]] = [step, *[lambda: None] * (NUM_LAYERS - 1)]
    return Kernel(name, calls, num_bytes, check=check)


def our_step(hidden: Tensor, layers: list[list[Linear]], norm: Tensor) -> Tensor:
    stream = Residual(hidden.clone(), 1e-5)
    for qkv, out, gate_up, down in layers:
        stream.add(out, qkv(stream.normed_for(qkv, norm))[:, :SIZE].contiguous())  # in place of attention
        stream.add(down, stream.gated_product(gate_up, norm, down))
    return stream.normed(norm)


def torch_step(hidden: Tensor, layers: list[list[Linear]], norm: Tensor) -> Tensor:
    hidden = hidden.clone()
    for qkv, out, gate_up, down in (map(plain, matrices) for matrices in layers):
        hidden.add_(out(qkv(rms_norm_ref(hidden, norm, 1e-5))[:, :SIZE]))
        hidden.add_(down(silu_mul_ref(gate_up(rms_norm_ref(hidden, norm, 1e-5)))))
    return rms_norm_ref(hidden, norm, 1e-5)


def plain(linear: Linear) -> Callable[[Tensor], Tensor]:
    assert isinstance(linear.product, DenseProduct)
    return lambda x, weight=linear.product.weight: F.linear(x, weight)


if __name__ == "__main__":
    parts = {
        "small": small,
        "layer": layer,
        "fp8": fp8,
        "fp8-blocks": lambda options: fp8(options, has_blocks=True),
        "fp8-layer": fp8_layer,
    }
    measure(__doc__, "product-kernels", parts, rows=(1, 8, 16, 32, 64, 128, 256, 1024, 8192))
