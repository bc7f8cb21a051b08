"""`baton plan`: simulates a load on every ratio of prefill to decode nodes, and says which one serves it best.

The times come from measurements of one model on one kind of GPU (simulation/times.py). The answer names the error that
a comparison with real runs has shown.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..engine.checkpoint.hub import small_files
from ..engine.config import EngineConfig
from ..metadata.config import at_least, setting
from ..metadata.errors import ConfigError
from ..metadata.logs import size_in_words
from .simulation.cluster import ClusterShape, Outcome, simulate
from .simulation.figures import Slo, goodput, summary
from .simulation.times import Times, find, read
from .simulation.traffic import Arrival, from_trace, poisson
from .terminal import say

MAX_GPUS = 64
ORDINARY_MODEL = "llama-3.1-8b-h200"
ORDINARY_RATE = 8.0  # requests per second and GPU
_MOST_REQUESTS = 1_000_000
_ENOUGH = 0.9  # of all requests; fewer good ones mean that the load is too much
_SEED = 0
_QUIET_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingConfig:
    """Settings of `baton plan`: the GPUs, the model, the bounds to keep, and the load."""

    gpus: int = setting(2, "plan for this many GPUs, one node on each")
    model: str | None = setting(
        None,
        "take measured times from this file, from times.json in this directory or in ORG/NAME of the Hugging Face hub, "
        "or of this name that comes with Baton (llama-3.1-8b-h200)",
        metavar="TIMES",
    )
    slo: str = setting(
        "200,12",
        "count a request as good if its first token comes within TTFT milliseconds and further ones every TPOT "
        "milliseconds or faster on average",
        metavar="TTFT,TPOT",
    )
    rate: float | None = setting(None, "let this many requests per second arrive, independently of each other")
    prompt_len: int | None = setting(None, "with --rate: tokens of each prompt")
    tokens: int | None = setting(None, "with --rate: tokens of each answer")
    seconds: float = setting(600.0, "with --rate: seconds during which requests arrive")
    trace: str | None = setting(
        None,
        "instead of --rate, replay this file; each line is a JSON object with timestamp (milliseconds), input_length "
        "and output_length (tokens)",
        metavar="FILE",
    )
    max_running: int = setting(
        EngineConfig().max_running, "let each node compute at most this many sequences at once, as the nodes' own flag"
    )
    max_gap_ms: float | None = setting(
        None, "let decode nodes bound the gaps between tokens by this many milliseconds, as their own flag"
    )
    json: bool = setting(False, "print all figures as JSON")
    log_level: str = setting("warning", "debug shows a traceback with an error")

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= MAX_GPUS:
            raise ConfigError(f"--gpus {self.gpus}: must be 1 to {MAX_GPUS}")
        for name in ("prompt_len", "tokens", "max_running"):
            at_least(self, name, 1)
        for name in ("rate", "seconds", "max_gap_ms"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be more than 0")
        try:
            Slo.parse(self.slo)
        except ValueError as error:
            raise ConfigError(f"--slo {error}") from None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shape, and what the load came to on it."""

    shape: ClusterShape
    outcome: Outcome
    figures: dict[str, Any]  # as `summary` returns them
    slo: Slo

    def good_share(self, ttft: float = 1.0, tpot: float = 1.0) -> float:
        """Return the share of all requests that keep the SLO, if times are multiplied by these factors. A request that
        no node can hold keeps none."""
        bounds = Slo(self.slo.ttft_ms / ttft, self.slo.tpot_ms / tpot)
        outcome = self.outcome
        return goodput(bounds, outcome.records, len(outcome.records) + outcome.num_refused, outcome.took_s)[1]

    @property
    def goodput(self) -> float:
        """Good requests per second."""
        return goodput(self.slo, self.outcome.records, len(self.outcome.records), self.outcome.took_s)[0]

    @property
    def strain(self) -> float:
        """How near the slowest requests come to the bounds; of equal goodput the smallest is best."""
        ttft, tpot = self.figures.get("ttft_ms_p99", 0.0), self.figures.get("tpot_ms_p99", 0.0)
        return ttft / self.slo.ttft_ms + tpot / self.slo.tpot_ms


def run(config: SizingConfig) -> int:
    """Print the figures of all shapes and the best one. Raises ConfigError."""
    if config.model is None:
        raise ConfigError("--model is missing: name a file of measured times, such as llama-3.1-8b-h200")
    times, slo = read(find(small_files(config.model, say))), Slo.parse(config.slo)
    arrivals = load(config)
    found = shapes(config.gpus)
    candidates: list[Candidate] = []
    with Progress(len(found)) as progress:
        for shape in found:
            progress.begin(shape.name)
            candidates.append(_candidate(shape, times, arrivals, config))
    if not candidates[0].outcome.records:
        raise ConfigError(
            f"no node can hold any of the {len(arrivals)} requests: the model takes {times.context_len:,} tokens, and "
            f"a node holds {times.pool_tokens:,}"
        )
    if config.json:
        print(json.dumps(_report(candidates, times, arrivals, slo), indent=2))
    else:
        print("\n".join(_text(candidates, times, arrivals, slo)))
    return 0


def recommendation(num_gpus: int, model_dir: Path) -> str:
    """Return a line for `baton up`: the best shape of these GPUs for an ordinary load, and how to plan for another one.

    The times are those of the model if its directory has any, else those of an 8B model that come with Baton.
    """
    model = str(model_dir) if (model_dir / "times.json").is_file() else ORDINARY_MODEL
    config = SizingConfig(gpus=num_gpus, model=model, rate=ORDINARY_RATE * num_gpus, prompt_len=1024, tokens=256)
    times = read(find(model))
    arrivals = poisson(ORDINARY_RATE * num_gpus, 40 / num_gpus, 1024, 256, _SEED)
    shape = best([_candidate(each, times, arrivals, config) for each in shapes(num_gpus)]).shape
    load = f"--rate {config.rate:g} --prompt-len {config.prompt_len} --tokens {config.tokens}"
    return (
        f"{num_gpus} GPUs: for prompts of 1,024 and answers of 256 tokens, {config.rate:g} requests per second and the "
        f"times of {times.model}, the best shape is `baton up {shape.flags}`; for your load: "
        f"`baton plan --gpus {num_gpus} --model {model} {load}`"
    )


def _candidate(shape: ClusterShape, times: Times, arrivals: Sequence[Arrival], config: SizingConfig) -> Candidate:
    slo, max_gap_s = Slo.parse(config.slo), None if config.max_gap_ms is None else config.max_gap_ms / 1e3
    outcome = simulate(shape, times, arrivals, config.max_running, max_gap_s)
    return Candidate(shape, outcome, summary(outcome.records, outcome.took_s, [slo]), slo)


class Progress:
    """Says on stderr which shape is simulated: on a terminal in one line that is redrawn, else a line for each shape
    that is still simulated a second after the start."""

    def __init__(self, num_shapes: int) -> None:
        self._num_shapes, self._num_begun = num_shapes, 0
        self._is_terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def begin(self, name: str) -> None:
        """Say so at once on a terminal, else from a second after the start on, if the shape is not finished by then."""
        self._num_begun += 1
        age = time.monotonic() - self._started
        line = f"simulating {name}, shape {self._num_begun} of {self._num_shapes}"
        if self._is_terminal:
            print(f"\r\033[K{line}, after {age:.0f} s", end="", file=sys.stderr, flush=True)
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(max(0.0, _QUIET_S - age), print, (line,), {"file": sys.stderr, "flush": True})
        self._timer.daemon = True
        self._timer.start()


def shapes(num_gpus: int) -> list[ClusterShape]:
    """Return the shapes to compare: all GPUs decode and compute prompts too (`always`), or some of them are prefill
    nodes, with (`auto`) and without (`never`) prompts on decode nodes."""
    found = [ClusterShape(0, num_gpus, "always")]
    for num_prefill in range(1, num_gpus):
        found += [ClusterShape(num_prefill, num_gpus - num_prefill, mode) for mode in ("never", "auto")]
    return found


def best(candidates: Sequence[Candidate], ttft: float = 1.0, tpot: float = 1.0) -> Candidate:
    """Return the candidate with the most good requests, if measured times to the first token are multiplied by `ttft`,
    and those per token by `tpot`. If several differ by at most 0.1 % of all requests, return the least strained one."""
    shares = [each.good_share(ttft, tpot) for each in candidates]
    near = [each for each, share in zip(candidates, shares, strict=True) if share >= max(shares) - 1e-3]
    return min(near, key=lambda each: each.strain)


def load(config: SizingConfig) -> list[Arrival]:
    """Return the arrivals that the settings describe. Raises ConfigError."""
    sizes = {"--rate": config.rate, "--prompt-len": config.prompt_len, "--tokens": config.tokens}
    given = [flag for flag, value in sizes.items() if value is not None]
    if config.trace is not None:
        if given:
            raise ConfigError(
                f"--trace says when requests arrive and how long they are: leave out {' and '.join(given)}"
            )
        return from_trace(Path(config.trace))
    if missing := [flag for flag in sizes if flag not in given]:
        raise ConfigError(f"give --rate, --prompt-len and --tokens, or a --trace; missing: {', '.join(missing)}")
    assert config.rate is not None and config.prompt_len is not None and config.tokens is not None, sizes
    if config.rate * config.seconds > _MOST_REQUESTS:
        raise ConfigError(
            f"--rate {config.rate:g} for {config.seconds:g} seconds are more than {_MOST_REQUESTS:,} requests: lower "
            "--seconds"
        )
    arrivals = poisson(config.rate, config.seconds, config.prompt_len, config.tokens, _SEED)
    if not arrivals:
        raise ConfigError(f"no request arrives within {config.seconds:g} seconds: raise --seconds")
    return arrivals


def _text(candidates: Sequence[Candidate], times: Times, arrivals: Sequence[Arrival], slo: Slo) -> list[str]:
    first, num_gpus = best(candidates), candidates[0].shape.num_decode
    lines = [
        f"{times.model}, {times.device}; {num_gpus} GPUs, {len(arrivals):,} requests, {_rate(arrivals):.2f} per second",
        f"a node holds {_pool(times)}",
        f"good: first token within {slo.ttft_ms:g} ms, then at most {slo.tpot_ms:g} ms per token; times in ms",
        "",
        f"{'shape':<14}{'good/s':>9}{'good':>7}{'ttft p50':>11}{'p99':>9}{'tpot p50':>11}{'p99':>8}"
        f"{'gap p99':>10}{'local':>8}",
    ]
    lines += [_line(each) + ("   <- best" if each is first else "") for each in candidates]
    lines += ["", _advice(first, slo, times.model), *_doubts(candidates, first, times)]
    if first.outcome.num_refused:
        lines.append(f"{first.outcome.num_refused:,} requests are longer than the model or a node's memory takes.")
    return lines


def _pool(times: Times) -> str:
    """Return what a node's pool holds, in words."""
    kept = f"{times.pool_tokens:,} tokens of context"
    if times.tail_sequences is None:
        return kept
    size = "" if times.tail_bytes is None else f", {size_in_words(times.tail_bytes)} for each"
    return f"{kept}, and the tail pages of {times.tail_sequences:,} sequences{size}"


def _line(candidate: Candidate) -> str:
    figures, records = candidate.figures, candidate.outcome.records
    return (
        f"{candidate.shape.name:<14}{candidate.goodput:>9.2f}{candidate.good_share():>7.0%}"
        f"{figures['ttft_ms_p50']:>11.1f}{figures['ttft_ms_p99']:>9.1f}"
        f"{figures['tpot_ms_p50']:>11.1f}{figures['tpot_ms_p99']:>8.1f}{figures['gap_ms_p99']:>10.1f}"
        f"{candidate.outcome.num_local / len(records):>8.0%}"
    )


def _advice(first: Candidate, slo: Slo, model: str) -> str:
    shape = first.shape
    advice = f"Best: {shape.name}. Start it with `baton up --model DIR {shape.flags}`, where DIR holds {model}."
    if first.good_share() < _ENOUGH:
        ttft, tpot = first.figures["ttft_ms_p50"] / slo.ttft_ms, first.figures["tpot_ms_p50"] / slo.tpot_ms
        advice += (
            f" It keeps the bounds for only {first.good_share():.0%} of the requests, mostly because "
            f"{'first tokens' if ttft > tpot else 'tokens after the first'} come too late: use more GPUs, or let fewer "
            "requests in."
        )
    return advice


def _doubts(candidates: Sequence[Candidate], first: Candidate, times: Times) -> list[str]:
    """Return sentences on how sure the answer is."""
    error = times.error
    if error is None:
        return ["This is a simulation. Its file of times states no comparison with real runs, so its error is unknown."]
    lines = [
        f"This is a simulation. Compared with {error.compared_with}, its ttft p50 was off by up to "
        f"{error.ttft_p50:.0%} and its tpot p99 by up to {error.tpot_p99:.0%}."
    ]
    for word, sign in (("longer", 1), ("shorter", -1)):
        factors = (1 + error.ttft_p50) ** sign, (1 + error.tpot_p99) ** sign
        then = best(candidates, *factors)
        verb = "is still best" if then is first else "is best instead"
        share = then.good_share(*factors)
        lines.append(f"If all times are {word} by as much, {then.shape.name} {verb}: {share:.0%} good.")
    return lines


def _report(candidates: Sequence[Candidate], times: Times, arrivals: Sequence[Arrival], slo: Slo) -> dict[str, Any]:
    return {
        "model": times.model,
        "device": times.device,
        "is_simulated": True,
        "pool_tokens": times.pool_tokens,
        "tail_sequences": times.tail_sequences,
        "tail_bytes": times.tail_bytes,
        "error": None if times.error is None else msgspec.structs.asdict(times.error),
        "slo": slo._asdict(),
        "requests": len(arrivals),
        "rate": _rate(arrivals),
        "best": best(candidates).shape.name,
        "shapes": [
            {
                "shape": each.shape.name,
                "prefill": each.shape.num_prefill,
                "decode": each.shape.num_decode,
                "local_prefill": each.shape.local_prefill,
                "goodput": each.goodput,
                "good_share": each.good_share(),
                **each.figures,
                "took_s": each.outcome.took_s,
                "refused": each.outcome.num_refused,
                "local": each.outcome.num_local,
                "preemptions": each.outcome.num_preemptions,
            }
            for each in candidates
        ],
    }


def _rate(arrivals: Sequence[Arrival]) -> float:
    return len(arrivals) / max(arrivals[-1].at_s, 1e-9)
