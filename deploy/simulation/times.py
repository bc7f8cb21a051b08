"""Measured times of one model on one kind of GPU, as a file holds them.

A file is a JSON object with the fields of `Times`. `tests/benchmarks/measure_times.py` writes one on a GPU. Times are
milliseconds, contexts and histories are tokens per sequence.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from ...metadata.errors import ConfigError

KEPT = Path(__file__).parent / "measured"  # files that come with Baton


class RoundPoint(Struct, frozen=True, forbid_unknown_fields=True):
    """A decode round without drafts of `batch` sequences, each with `context` tokens."""

    batch: int
    context: int
    ms: float


class ChunkPoint(Struct, frozen=True, forbid_unknown_fields=True):
    """A chunk of `tokens` prompt tokens that belong to `prompts` prompts in equal parts, each behind `history` tokens
    that are computed already."""

    tokens: int
    ms: float
    prompts: int = 1
    history: int = 0


class MixedPoint(Struct, frozen=True, forbid_unknown_fields=True):
    """The time by which a round of `batch` sequences is longer if its forward pass also computes `tokens` prompt
    tokens."""

    batch: int
    tokens: int
    ms: float


class HandoffPoint(Struct, frozen=True, forbid_unknown_fields=True):
    """The time from the end of a prompt on the prefill node until the decode node can run the sequence."""

    tokens: int
    ms: float


class StatedError(Struct, frozen=True, forbid_unknown_fields=True):
    """The largest differences between simulated and real runs of this model, as shares of the real values."""

    compared_with: str
    ttft_p50: float
    tpot_p99: float


class Times(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that was measured of one model on one kind of GPU."""

    model: str
    device: str
    sources: tuple[str, ...]  # where each figure comes from
    context_len: int  # tokens of prompt and answer that a node takes
    pool_tokens: int  # whose KV one node holds
    router_ms: float  # added to the time to first token by client, router and node, without any waiting
    rounds: tuple[RoundPoint, ...]
    chunks: tuple[ChunkPoint, ...]
    handoffs: tuple[HandoffPoint, ...]
    joints: tuple[MixedPoint, ...] = ()  # of mixed batches; files that exist have this name
    tail_sequences: int | None = None  # whose tail pages a node holds beside pool_tokens; None: the model has none
    tail_bytes: int | None = None  # of the tail pages of one sequence
    error: StatedError | None = None


def names() -> list[str]:
    """Return the names of the files that come with Baton."""
    return sorted(path.stem for path in KEPT.glob("*.json"))


def find(model: str) -> Path:
    """Return the file of times for a model: a file, a directory that holds times.json, or the name of a file that comes
    with Baton. Raises ConfigError that says how to measure times."""
    path = Path(model)
    if path.is_file():
        return path
    if (path / "times.json").is_file():
        return path / "times.json"
    if model in names():
        return KEPT / f"{model}.json"
    directory = str(path) if path.is_dir() else "DIR"
    missing = "it holds no times.json" if path.is_dir() else "there is no such file, directory or known name"
    raise ConfigError(
        f"--model {model}: {missing} (known names: {', '.join(names())}); to measure a model's times on a GPU, run "
        f"`python tests/benchmarks/measure_times.py --model {directory} --out {directory}/times.json` in a clone of "
        "the repository"
    )


def read(path: Path) -> Times:
    """Read a file of times. Raises ConfigError that names the wrong value."""
    try:
        times = msgspec.json.decode(path.read_bytes(), type=Times)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no file of times: {error}") from None
    if fault := _fault(times):
        raise ConfigError(f"{path} is no file of times: {fault}")
    return times


def _fault(times: Times) -> str | None:
    """Return what is wrong with the values, None if nothing is."""
    lists = {"rounds": times.rounds, "chunks": times.chunks, "handoffs": times.handoffs, "joints": times.joints}
    for name, points in lists.items():
        for point in points:
            if point.ms <= 0 or not point.ms < 1e9:
                return f"{name} has {point.ms} ms; it must be more than 0"
            sizes = [value for field, value in msgspec.structs.asdict(point).items() if field not in ("ms", "history")]
            if min(sizes) < 1 or getattr(point, "history", 0) < 0:
                return f"{name} has {point}; its sizes must be 1 or more"
    if len({point.batch for point in times.rounds}) < 2:
        return "rounds must hold two batch sizes or more"
    if len({point.tokens for point in times.chunks if point.prompts == 1 and not point.history}) < 2:
        return "chunks must hold two lengths or more of one prompt without a history"
    if not times.handoffs:
        return "handoffs must hold one length or more"
    if times.error is not None and min(times.error.ttft_p50, times.error.tpot_p99) < 0:
        return "error must hold shares of 0 or more"
    if times.router_ms < 0 or min(times.pool_tokens, times.context_len) < 1:
        return "router_ms must be 0 or more, pool_tokens and context_len 1 or more"
    if times.tail_sequences is not None and times.tail_sequences < 1:
        return "tail_sequences must be 1 or more"
    if times.tail_bytes is not None and times.tail_bytes < 1:
        return "tail_bytes must be 1 or more"
    return None
