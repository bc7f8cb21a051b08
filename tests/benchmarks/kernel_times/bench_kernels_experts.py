"""Time the products of mixtures of experts on a GPU, the choice of experts, and the places of the pairs.

    python tests/benchmarks/kernel_times/bench_kernels_experts.py [--only 30b v2-lite 20b routes] [--rows 1 8 64 256]

Products have the shapes of Qwen3-30B-A3B, DeepSeek-V2-Lite and gpt-oss-20b. Rows choose their experts uniformly; eight
calls have different choices. Bytes are the weights of the experts that are chosen, the error is that of float32
products of some pairs. "both" is the whole mixture of one row, which is rounded already. `routes` is the choice alone,
the places alone, and both one after the other as a layer makes them, at the shapes of published mixtures.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from graph_times import Kernel, copies, each, measure, normal
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
from baton.kernels.experts.routes import Routing, routes_ref
from baton.kernels.experts.triton_places import place_experts
from baton.kernels.experts.triton_routes import routes
from baton.kernels.products.fp8 import dequantized, round_rows
from baton.kernels.products.silu import silu_mul_ref

NUM_CALLS = 8
TOLERANCE = {"bf16": 1e-2, "fp8": 2e-2, "mxfp4": 1e-2}
MIN_SAME = 0.99  # rows whose experts are those of the reference; in the others, two scores nearly tie


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


class Router(NamedTuple):
    num_experts: int
    hidden_size: int
    routing: Routing
    has_bias: bool = False


GROUPED = Routing(8, "sigmoid", True, 2.5, num_groups=8, num_active_groups=4, num_ranking=2)
ROUTERS = {
    "qwen3-30b": Router(128, 2048, Routing(8, sums_to_one=True)),
    "deepseek-v2-lite": Router(64, 2048, Routing(6)),
    "deepseek-v3": Router(256, 7168, GROUPED, has_bias=True),
    "glm-4.5": Router(160, 5120, Routing(8, "sigmoid", True, 2.5), has_bias=True),
    "gpt-oss-120b": Router(128, 2880, Routing(4, sums_to_one=True)),
}


def of_model(name: str, options: argparse.Namespace) -> Iterator[Kernel]:
    mixture = MODELS[name]
    for form in TOLERANCE:
        gate_up = weight_of(mixture.num_experts * 2 * mixture.inner_size, mixture.size, form)
        down = weight_of(mixture.num_experts * mixture.size, mixture.inner_size, form)
        for num_rows in options.rows:
            for part, weight in (("gate_up", gate_up), ("down", down)):
                case = Case.make(mixture, num_rows, form, weight, is_gated=part == "gate_up")
                label = f"{name} {form} {part}, {num_rows} rows"
                calls = each(case, range(NUM_CALLS))
                check = functools.partial(case.error, TOLERANCE[form])
                yield Kernel(label, calls, case.num_bytes(), case.num_flop(), check)
            if num_rows == 1:
                yield of_row(mixture, f"{name} {form} both, 1 row", form, gate_up, down)


def weight_of(num_rows: int, in_size: int, form: str) -> ExpertWeight:
    if form == "mxfp4":
        packed = torch.randint(256, (num_rows, in_size // 2), device="cuda", dtype=torch.uint8)
        scales = torch.randint(116, 120, (num_rows, in_size // GROUP), device="cuda", dtype=torch.uint8)
        return ExpertWeight(*from_checkpoint(packed, scales), GROUP)
    values = normal(num_rows, in_size, scale=in_size**-0.5)
    return ExpertWeight(*(round_rows(values, in_size) if form == "fp8" else (values, None)), in_size)


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
        x = normal(num_rows * (1 if is_gated else mixture.num_active), in_size)
        x, x_scales = round_rows(x, in_size) if form == "fp8" else (x, None)
        chosen = torch.rand(NUM_CALLS, num_rows, mixture.num_experts, device="cuda").topk(mixture.num_active).indices
        place = functools.partial(place_experts_ref, num_experts=mixture.num_experts, is_packed=weight.is_packed)
        return cls(weight, x, x_scales, tuple(place(one.contiguous()) for one in chosen), is_gated)

    def __call__(self, index: int) -> Tensor:
        by = triton_experts.gated_experts_linear if self.is_gated else triton_experts.experts_linear
        return by(self.x, self.x_scales, self.weight, self.places[index], torch.bfloat16)

    def error(self, tolerance: float) -> float:
        """Return the error of the first choice: the largest difference over the largest product. Raises AssertionError
        if it is too large."""
        out, places, expected, found = self(0), self.places[0], list[Tensor](), list[Tensor]()
        chosen, scales = places.chosen.flatten(), self.weight.scales
        out_size = len(self.weight.values) // places.num_experts
        for pair in range(0, len(chosen), max(1, len(chosen) // 24)):
            own = slice(int(chosen[pair]) * out_size, (int(chosen[pair]) + 1) * out_size)
            numbers = self.weight.values[own]
            if scales is not None:
                numbers = (unpacked if self.weight.is_packed else dequantized)(numbers, scales[own], self.weight.group)
            row = pair * len(self.x) // len(chosen)
            product = numbers.double() @ self.x[row].double()
            product = product if self.x_scales is None else product * self.x_scales[row].double()
            expected.append(silu_mul_ref(product[None])[0] if self.is_gated else product)
            found.append(out[pair])
        products = torch.stack(expected)
        error = float((torch.stack(found) - products).abs().max() / products.abs().max())
        assert error < tolerance, error
        return error

    def num_bytes(self) -> float:
        """Return the bytes of the weights of the experts that a call's rows choose."""
        distinct = sum(len(places.chosen.unique()) for places in self.places) / NUM_CALLS
        return distinct / self.places[0].num_experts * bytes_of(self.weight)

    def num_flop(self) -> float:
        out_size = len(self.weight.values) // self.places[0].num_experts
        return 2.0 * self.places[0].chosen.numel() * out_size * self.x.shape[1]


def bytes_of(weight: ExpertWeight) -> int:
    return weight.values.nbytes + (weight.scales.numel() if weight.is_packed and weight.scales is not None else 0)


def of_row(mixture: Mixture, name: str, form: str, gate_up: ExpertWeight, down: ExpertWeight) -> Kernel:
    x, shares = normal(1, mixture.size), torch.rand(1, mixture.num_active, device="cuda")
    chosen = torch.rand(NUM_CALLS, 1, mixture.num_experts, device="cuda").topk(mixture.num_active).indices

    def rounded(rows: Tensor) -> tuple[Tensor, Tensor | None]:
        return round_rows(rows, rows.shape[1]) if form == "fp8" else (rows, None)

    rows = rounded(x)

    def call(index: int) -> Tensor:
        own = (chosen[index], mixture.num_experts)
        inner = triton_expert_row.gated_experts_of_row(*rows, gate_up, *own, x.dtype)
        return triton_expert_row.experts_of_row(*rounded(inner), down, *own, shares, x.dtype)

    def check() -> float:
        own = [of_experts(weight, chosen[0, 0], mixture.num_experts) for weight in (gate_up, down)]
        places = torch.arange(mixture.num_active, device="cuda").unsqueeze(0), mixture.num_active
        inner = gated_experts_of_row_ref(*rows, own[0], *places, x.dtype)
        expected = experts_of_row_ref(*rounded(inner), own[1], *places, shares, x.dtype).float()
        error = float((call(0).float() - expected).abs().max() / expected.abs().max())
        assert error < TOLERANCE[form], error
        return error

    num_bytes = (bytes_of(gate_up) + bytes_of(down)) * mixture.num_active / mixture.num_experts
    return Kernel(name, each(call, range(NUM_CALLS)), num_bytes, check=check)


def of_experts(weight: ExpertWeight, experts: Tensor, num_experts: int) -> ExpertWeight:
    """Return the weights of some experts."""
    size = len(weight.values) // num_experts
    rows = (experts.unsqueeze(1) * size + torch.arange(size, device="cuda")).flatten()
    values = weight.values.view(torch.uint8).index_select(0, rows).view(weight.values.dtype)
    return weight._replace(values=values, scales=None if weight.scales is None else weight.scales[rows])


def of_routes(name: str, num_rows: int) -> Iterator[Kernel]:
    num_experts, size, routing, has_bias = ROUTERS[name]
    weights = [normal(num_experts, size, scale=0.02).float() for _ in range(copies(num_experts * size * 4))]
    bias, x = normal(num_experts, scale=0.1).float() if has_bias else None, normal(num_rows, size)
    ours = routes(x, weights[0], None, bias, routing)

    def choose(weight: Tensor) -> Tensor:
        return routes(x, weight, None, bias, routing).chosen

    def check() -> float:
        theirs = routes_ref(x, weights[0], None, bias, routing)
        is_same = (ours.chosen == theirs.chosen).all(1)
        share = is_same.float().mean().item()
        assert share >= MIN_SAME, share
        torch.testing.assert_close(ours.shares[is_same], theirs.shares[is_same], atol=1e-6, rtol=1e-4)
        placed, expected = place_experts(ours.chosen, num_experts), place_experts_ref(ours.chosen, num_experts)
        assert torch.equal(placed.pairs, expected.pairs) and torch.equal(placed.experts, expected.experts)
        return 1 - share

    at = f"{name}, {num_rows} rows"
    yield Kernel(f"routes of {at}", each(choose, weights), check=check)
    yield Kernel(f"places of {at}", [lambda: place_experts(ours.chosen, num_experts)] * 50)
    yield Kernel(f"both of {at}", each(lambda weight: place_experts(choose(weight), num_experts), weights))
    torchs = each(lambda weight: routes_ref(x, weight, None, bias, routing), weights[:20])
    yield Kernel(f"routes of {at}: torch", torchs)
    yield Kernel(f"places of {at}: torch", [lambda: place_experts_ref(ours.chosen, num_experts)] * 5)


if __name__ == "__main__":
    parts = {name: functools.partial(of_model, name) for name in MODELS}
    parts["routes"] = lambda options: (
        kernel for name in ROUTERS for num_rows in options.rows for kernel in of_routes(name, num_rows)
    )
    measure(__doc__, "expert-kernels", parts, rows=(1, 8, 64, 256, 1024, 8192))
