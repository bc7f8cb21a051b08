"""Norms, gate, sampler and small-batch products in CUDA graphs: Triton kernels against torch and cuBLAS.

    python tests/benchmarks/kernel_times/bench_kernels_dense.py [--parts noise small linear chain] [--models 8b 1b]
                                                   [--rows 1 4 8 16 32 64] [--json FILE]

    noise    the bits of the noise on this GPU against those of the reference on the CPU, and draws against torch's
    small    norms, gate, argmax, top-k: microseconds; inputs stay in L2, as they do in a decode step
    linear   every product of a decode step with every candidate configuration: microseconds and TB/s of weights. Calls
             go round copies of the weights of over 400 MB, so that none is in L2
    chain    all norms, products and gates of a decode step (no attention), each layer with weights of its own, with
             the configurations that a node measured on this GPU before, or defaults: torch, Triton, Triton with
             dependent launch

A call's time is that of a graph of many calls over their number, the median of 7 replays. Each candidate's result is
compared with float32 before it is timed. The ceiling is the H200's measured read bandwidth, 4.7 TB/s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from baton.engine.layers.residual import Residual
from baton.engine.products.dense import DenseProduct
from baton.engine.products.linear import Linear
from baton.engine.tuning.tuning import use_file
from baton.kernels import gpu
from baton.kernels.products import triton_norm, triton_silu
from baton.kernels.products.linear_configs import ROW_CLASSES, Config, DoesNotFitError, ProductShape, candidates
from baton.kernels.products.norm import rms_norm_ref
from baton.kernels.products.silu import silu_mul_ref
from baton.kernels.products.triton_linear import gated_linear, linear
from baton.kernels.sampling import noise, triton_noise, triton_sample
from baton.kernels.sampling.filters import Filters
from baton.kernels.sampling.sample import Draws, perturbed_argmax_ref

PEAK = 4.7  # TB/s
ROTATED_BYTES = 400e6  # eight times the L2
REPLAY_BYTES = 4e9  # weights read by a replay: a millisecond
VOCAB_SIZE = 128256
DTYPE = torch.bfloat16
NUM_THREADS = 16  # that compile
Case = tuple[str, int, Callable[[], object], Callable[[], object]]  # name, bytes moved, kernel, torch


class Model(NamedTuple):
    """Shapes of the matrices of a model."""

    num_layers: int
    hidden_size: int
    mlp_size: int
    qkv_size: int
    vocab_size: int = VOCAB_SIZE

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        hidden = self.hidden_size
        return {
            "qkv": (self.qkv_size, hidden),
            "o": (hidden, hidden),
            "gate_up": (2 * self.mlp_size, hidden),
            "down": (hidden, self.mlp_size),
            "head": (self.vocab_size, hidden),
        }


MODELS = {"8b": Model(32, 4096, 14336, 6144), "1b": Model(16, 2048, 8192, 3072)}
MODELS["qwen3-8b"] = Model(36, 4096, 12288, 6144, 151936)


def microseconds(calls: list[Callable[[], object]], num_rounds: int = 1) -> float:
    """Time a call: the graph holds `calls` `num_rounds` times."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still make what the calls read
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_rounds):
            for call in calls:
                call()
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:]) * 1e3 / (len(calls) * num_rounds)


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype).mul_(scale)


def set_dependent_launch(is_on: bool) -> None:
    os.environ["BATON_DEPENDENT_LAUNCH"] = "1" if is_on else "0"
    gpu._has_dependent_launch.cache_clear()


# --- noise and the small kernels --------------------------------------------------------------------------------------


def torch_scores(logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> Tensor:
    """Sample as engine/sampling/sampling.py does without filters and processors, with torch operations only."""
    scores, temperature = logits.float(), temperatures.unsqueeze(1)
    is_greedy = temperature == 0
    perturbed = (scores - scores.amax(1, keepdim=True)).div_(temperature.masked_fill(is_greedy, 1.0))
    perturbed.add_(noise.gumbel_noise_ref(seeds, positions, logits.shape[1]))
    return torch.where(is_greedy, scores, perturbed)


def draw_columns(num_rows: int) -> Draws:
    seeds = torch.randint(0, 2**63 - 1, (num_rows,), device="cuda")
    positions = torch.randint(0, 2**31 - 1, (num_rows,), device="cuda")
    return Draws(seeds, positions, torch.full((num_rows,), 0.8, device="cuda"))


def filtered(draws: Draws, *, top_k: int = 2**31 - 1, top_p: float = 1.0) -> Draws:
    """Return the same draws, of tokens that filters keep."""
    off = torch.full_like(draws.temperatures, -torch.inf)
    shares = torch.full_like(draws.temperatures, top_p, dtype=torch.float64)
    return draws._replace(filters=Filters(off, torch.full_like(draws.seeds, top_k), shares))


def bench_noise() -> dict[str, Any]:
    bits = torch.randint(-(2**31), 2**31, (1 << 24,), dtype=torch.int64).to(torch.int32)
    on_cpu = noise.gumbel_from_bits_ref(bits).view(torch.int32)
    kernel = triton_noise.gumbel_from_bits(bits.cuda()).cpu().view(torch.int32)
    on_gpu = noise.gumbel_from_bits_ref(bits.cuda()).cpu().view(torch.int32)
    wrong, wrong_torch = (int((other != on_cpu).sum()) for other in (kernel, on_gpu))
    logits, columns = random(512, VOCAB_SIZE, scale=2.0), draw_columns(512)
    expected = torch.cat([
        torch_scores(rows.cpu(), *(c.cpu() for c in cut)).argmax(1)
        for rows, *cut in zip(logits.split(64), *(c.split(64) for c in columns[:3]), strict=True)
    ])  # fmt: skip
    tokens = triton_sample.perturbed_argmax(logits, columns).token_ids.cpu()
    wrong_tokens = int((tokens != expected).sum())
    print(f"noise: of {len(bits)} values {wrong} differ from the CPU's bits (torch on this GPU: {wrong_torch});")
    print(f"       of 512 draws from {VOCAB_SIZE} ids {wrong_tokens} differ from the CPU's")
    return {"wrong_bits": wrong, "wrong_bits_torch": wrong_torch, "wrong_tokens": wrong_tokens}


def bench_small() -> list[dict[str, Any]]:
    results = []
    for num_rows in (1, 8, 32, 256):
        cases = [case for size in (2048, 4096) for case in norm_cases(num_rows, size)]
        cases += [gate_case(num_rows, size) for size in (8192, 14336)]
        if num_rows <= 32:
            cases += sample_cases(num_rows)
        for name, num_bytes, kernel, reference in cases:
            ours, theirs = microseconds([kernel] * 20), microseconds([reference] * 20)
            result = {"name": name, "rows": num_rows, "us": ours, "torch_us": theirs, "tb_s": num_bytes / ours / 1e6}
            results.append(result)
            print(f"{name:32} {num_rows:4} rows {ours:8.2f} us ({result['tb_s']:.2f} TB/s), torch {theirs:8.2f} us")
    return results


def norm_cases(num_rows: int, size: int) -> Iterator[Case]:
    x, delta, weight = random(num_rows, size), random(num_rows, size, scale=0.0), random(size)

    def with_torch() -> Tensor:
        x.add_(delta)
        return rms_norm_ref(x, weight, 1e-5)

    torch.testing.assert_close(triton_norm.rms_norm(x, weight, 1e-5), rms_norm_ref(x, weight, 1e-5))
    num_bytes, args = 2 * x.numel() * x.element_size(), (weight, 1e-5)
    yield f"rms_norm {size}", num_bytes, lambda: triton_norm.rms_norm(x, *args), lambda: rms_norm_ref(x, *args)
    yield f"add_rms_norm_ {size}", 2 * num_bytes, lambda: triton_norm.add_rms_norm_(x, delta, *args), with_torch


def gate_case(num_rows: int, size: int) -> Case:
    gate_up = random(num_rows, 2 * size)
    torch.testing.assert_close(triton_silu.silu_mul(gate_up), silu_mul_ref(gate_up))
    num_bytes = 3 * num_rows * size * gate_up.element_size()
    return f"silu_mul {size}", num_bytes, lambda: triton_silu.silu_mul(gate_up), lambda: silu_mul_ref(gate_up)


def sample_cases(num_rows: int) -> Iterator[Case]:
    columns = draw_columns(num_rows)
    for dtype in (torch.float32, DTYPE):
        logits = random(num_rows, VOCAB_SIZE, scale=2.0, dtype=dtype)
        name, num_bytes = f"{VOCAB_SIZE} {str(dtype)[6:]}", logits.numel() * logits.element_size()

        def argmax(logits: Tensor = logits) -> object:
            return triton_sample.perturbed_argmax(logits, columns)

        def topk(logits: Tensor = logits) -> object:
            return triton_sample.perturbed_topk(logits, 8, columns)

        def topk_torch(logits: Tensor = logits) -> object:
            scores = torch_scores(logits, *columns[:3])
            return scores.topk(8).values - scores.logsumexp(1, keepdim=True)

        def greedy(logits: Tensor = logits) -> object:
            return triton_sample.perturbed_argmax(logits)

        yield f"greedy {name}", num_bytes, greedy, lambda logits=logits: logits.argmax(1)
        yield f"draw {name}", num_bytes, argmax, lambda logits=logits: torch_scores(logits, *columns[:3]).argmax(1)
        yield f"top 8 {name}", num_bytes, topk, topk_torch
        for words, draws in (("top_p 0.9", filtered(columns, top_p=0.9)), ("top_k 50", filtered(columns, top_k=50))):

            def kernel(logits: Tensor = logits, draws: Draws = draws) -> Tensor:
                return triton_sample.perturbed_argmax(logits, draws).token_ids

            def reference(logits: Tensor = logits, draws: Draws = draws) -> Tensor:
                return perturbed_argmax_ref(logits, draws).token_ids

            assert torch.equal(kernel(), reference()), words
            yield f"{words} {name}", num_bytes, kernel, reference


# --- products ---------------------------------------------------------------------------------------------------------


def bench_matrix(shape: tuple[int, int], row_counts: list[int], is_gated: bool) -> list[dict[str, Any]]:
    """Return the candidates by number of rows, fastest first. The configuration None is torch."""
    num_bytes = shape[0] * shape[1] * 2
    num_copies = max(2, -(-int(ROTATED_BYTES) // num_bytes))
    weights = [random(*shape, scale=shape[1] ** -0.5) for _ in range(num_copies)]
    num_rounds = -(-int(REPLAY_BYTES) // (num_copies * num_bytes))
    product = gated_linear if is_gated else linear
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    results = []
    for num_rows in row_counts:
        x = random(num_rows, shape[1])
        exact = F.linear(x.float(), weights[0].float())
        exact = silu_mul_ref(exact) if is_gated else exact

        def with_torch(weight: Tensor, x: Tensor = x) -> Tensor:
            y = F.linear(x, weight)
            return triton_silu.silu_mul(y) if is_gated else y

        def timed(config: Config | None, call: Callable[[Tensor], Tensor], exact: Tensor = exact) -> dict[str, Any]:
            error = (call(weights[0]).float() - exact).abs().max().item()
            us = microseconds([lambda weight=weight: call(weight) for weight in weights], num_rounds)
            return {"config": config, "us": us, "tb_s": num_bytes / us / 1e6, "error": error}

        configs = candidates(ProductShape.of(num_rows, *shape, is_gated=is_gated), num_sms)
        compile_all(configs, lambda c, x=x: product(x, weights[0], config=c))
        times = [timed(None, with_torch)]
        bound = 2 * times[0]["error"] + 1e-3  # as exact as cuBLAS, but for luck
        for config in configs:
            if config is None:
                continue
            try:
                times.append(timed(config, lambda weight, config=config, x=x: product(x, weight, config=config)))
            except DoesNotFitError:
                continue
            if times[-1]["error"] > bound:
                print(f"WRONG: {shape} {num_rows} rows {times[-1]}")
                times.pop()
        results.append({"rows": num_rows, "times": sorted(times, key=lambda each: each["us"])})
    return results


def compile_all(configs: Sequence[Config | None], launch: Callable[[Config | None], object]) -> None:
    """Compile all candidates in parallel, because compilation takes most of the time."""

    def attempt(config: Config | None) -> None:
        with contextlib.suppress(DoesNotFitError), torch.inference_mode():
            launch(config)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(attempt, configs))
    torch.cuda.synchronize()


def bench_linear(models: list[str], row_counts: list[int]) -> list[dict[str, Any]]:
    results = []
    for model in models:
        for name, shape in MODELS[model].matrices.items():
            for is_gated in (False, True) if name == "gate_up" else (False,):
                start, label = time.perf_counter(), f"{model} {name}{' gated' if is_gated else ''}"
                measured = bench_matrix(shape, row_counts, is_gated)
                print(f"{label} {shape}: {time.perf_counter() - start:.0f} s")
                for row in measured:
                    plain = next(each for each in row["times"] if each["config"] is None)
                    print(f"  {row['rows']:3} rows: cuBLAS {plain['us']:7.2f} us {plain['tb_s']:.2f} TB/s")
                    for each in row["times"][:4]:
                        share = each["tb_s"] / PEAK
                        print(
                            f"            {each['us']:7.2f} us {each['tb_s']:.2f} TB/s ({share:.0%}) {each['config']}"
                        )
                results.append({"name": label, "model": model, "shape": shape, "is_gated": is_gated, "rows": measured})
                torch.cuda.empty_cache()
    return results


# --- a decode step without attention ----------------------------------------------------------------------------------


def bench_chain(models: list[str], row_counts: list[int]) -> list[dict[str, Any]]:
    results = []
    for model in models:
        results += [{"model": model, **result} for result in bench_steps(MODELS[model], row_counts, model)]
        torch.cuda.empty_cache()
    return results


def bench_steps(model: Model, row_counts: list[int], name: str) -> Iterator[dict[str, Any]]:
    shapes = [shape for matrix, shape in model.matrices.items() if matrix != "head"]
    layers = [[matrix(shape) for shape in shapes] for _ in range(model.num_layers)]
    head, norm = matrix(model.matrices["head"]), random(model.hidden_size)
    num_bytes = 2 * (model.num_layers * sum(math.prod(shape) for shape in shapes) + math.prod(model.matrices["head"]))
    for num_rows in row_counts:
        hidden = random(num_rows, model.hidden_size)
        step_of = {"torch": torch_step, "triton": triton_step, "dependent": triton_step}
        times, outputs = {}, {}
        for mode, step in step_of.items():
            set_dependent_launch(mode == "dependent")
            outputs[mode] = step(hidden, layers, head, norm)
            times[mode] = microseconds([lambda step=step, hidden=hidden: step(hidden, layers, head, norm)])
        set_dependent_launch(False)
        difference = ((outputs["triton"] - outputs["torch"]).norm() / outputs["torch"].norm()).item()
        is_same = torch.equal(outputs["triton"], outputs["dependent"])
        line = ", ".join(f"{mode} {us:8.1f} us ({num_bytes / us / 1e6:.2f} TB/s)" for mode, us in times.items())
        print(f"{name} {num_rows:3} rows: {line}; relative difference {difference:.1e}, dependent the same: {is_same}")
        yield {"rows": num_rows, "difference": difference, "is_same": is_same, **times}


def matrix(shape: tuple[int, int]) -> Linear:
    return Linear.dense(random(*shape, scale=shape[1] ** -0.5))


def torch_step(hidden: Tensor, layers: list[list[Linear]], head: Linear, norm: Tensor) -> Tensor:
    hidden, delta = hidden.clone(), None
    for layer in layers:
        qkv, out, gate_up, down = (torch_product(linear) for linear in layer)
        hidden = hidden if delta is None else hidden.add_(delta)
        hidden.add_(out(qkv(rms_norm_ref(hidden, norm, 1e-5))[:, : hidden.shape[1]]))
        delta = down(silu_mul_ref(gate_up(rms_norm_ref(hidden, norm, 1e-5))))
    return torch_product(head)(rms_norm_ref(hidden.add_(delta), norm, 1e-5)).float()


def torch_product(linear: Linear) -> Callable[[Tensor], Tensor]:
    assert isinstance(linear.product, DenseProduct)
    weight = linear.product.weight
    return lambda x: F.linear(x, weight)


def triton_step(hidden: Tensor, layers: list[list[Linear]], head: Linear, norm: Tensor) -> Tensor:
    stream = Residual(hidden.clone(), 1e-5)
    for qkv, out, gate_up, down in layers:
        attended = qkv(stream.normed(norm))[:, : stream.hidden.shape[1]]
        stream.add(out, attended)
        stream.add(down, stream.gated_product(gate_up, norm))
    return head(stream.normed(norm)).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["noise", "small", "linear", "chain"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROW_CLASSES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    assert torch.cuda.is_available(), "these kernels are measured on a GPU"
    set_dependent_launch(False)
    use_file(torch.device("cuda"))
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    report["triton"] = triton.__version__
    runs = {
        "noise": bench_noise,
        "small": bench_small,
        "linear": lambda: bench_linear(args.models, args.rows),
        "chain": lambda: bench_chain(args.models, args.rows),
    }
    with torch.inference_mode():
        for part in args.parts:
            report[part] = runs[part]()
            if args.json:  # after each part, as the next may fail
                args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
