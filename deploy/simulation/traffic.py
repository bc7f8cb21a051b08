"""Traffic: when requests arrive, and how many tokens they have and ask for."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...metadata.errors import ConfigError

_CHARS_PER_TOKEN = 4  # of a prompt that is given as text, estimated


class Arrival(NamedTuple):
    """A request of the load."""

    at_s: float  # since the start
    prompt_len: int
    num_tokens: int  # of the answer
    hash_ids: tuple[int, ...] = ()  # one per block of the prompt; requests with equal ones begin alike
    text: str | None = None  # of the prompt, if the trace has it


def arrival_times(rate: float, seconds: float, seed: int, burstiness: float | None = 1.0) -> list[float]:
    """Return times with `rate` requests per second. The gaps have a gamma distribution of shape `burstiness`: 1 is a
    Poisson process, smaller values make bursts. None: all gaps are equal."""
    draw, at_s, times = random.Random(seed), 0.0, list[float]()
    while True:
        if burstiness is None:
            at_s = (len(times) + 1) / rate
        elif burstiness == 1.0:
            at_s += draw.expovariate(rate)
        else:
            at_s += draw.gammavariate(burstiness, 1 / (rate * burstiness))
        if at_s >= seconds:
            return times
        times.append(at_s)


def poisson(rate: float, seconds: float, prompt_len: int, num_tokens: int, seed: int) -> list[Arrival]:
    """Return the arrivals of a Poisson process with `rate` requests per second."""
    return [Arrival(at_s, prompt_len, num_tokens) for at_s in arrival_times(rate, seconds, seed)]


def from_trace(path: Path, speed: float = 1.0, times: Sequence[float] | None = None) -> list[Arrival]:
    """Return the requests of a trace file, at its own times or, with `times`, at those, from the first line again when
    there are more times than lines. Raises ConfigError."""
    try:
        arrivals = read_trace(path.read_text(encoding="utf-8").splitlines(), speed, is_timed=times is None)
    except OSError as error:
        raise ConfigError(f"--trace {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--trace {path}: {error}") from None
    if not arrivals:
        raise ConfigError(f"--trace {path} holds no request")
    if times is None:
        return arrivals
    return [arrivals[index % len(arrivals)]._replace(at_s=at_s) for index, at_s in enumerate(times)]


def read_trace(lines: Iterable[str], speed: float = 1.0, *, is_timed: bool = True) -> list[Arrival]:
    """Return the requests of a trace in the order of their times, the first at 0.

    Each line is a JSON object with `timestamp` (milliseconds), `input_length` and `output_length` (tokens), as in the
    traces of Mooncake (arXiv:2407.00079). It may have `hash_ids`, or `prompt` with the text; the length of a text may
    be left out. `speed` 2 replays the trace twice as fast. Without `is_timed`, timestamps are ignored. Raises
    ValueError for a line that is no request."""
    arrivals: list[Arrival] = []
    for number, line in enumerate(lines, 1):
        try:
            arrival = _arrival(json.loads(line), is_timed=is_timed)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"line {number} is {line.strip()[:60]!r}; it must be a JSON object with timestamp, input_length and "
                f"output_length ({error!r})"
            ) from None
        if not all(isinstance(each, int) for each in (*arrival[1:3], *arrival.hash_ids)):
            raise ValueError(f"line {number} has lengths of {arrival[1:3]}; use whole numbers of tokens")
        if min(arrival.prompt_len, arrival.num_tokens) < 1:
            raise ValueError(
                f"line {number} asks for {arrival.prompt_len} + {arrival.num_tokens} tokens; use 1 or more"
            )
        arrivals.append(arrival)
    first = min((each.at_s for each in arrivals), default=0.0)
    shifted = [each._replace(at_s=(each.at_s - first) / speed) for each in arrivals]
    return sorted(shifted, key=lambda each: each.at_s)


def _arrival(entry: Mapping[str, Any], *, is_timed: bool) -> Arrival:
    text = entry.get("prompt")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"prompt is no text: {text!r}")
    prompt_len = entry["input_length"] if text is None else entry.get("input_length", -(-len(text) // _CHARS_PER_TOKEN))
    at_s = entry["timestamp"] / 1e3 if is_timed else 0.0
    return Arrival(at_s, prompt_len, entry["output_length"], tuple(entry.get("hash_ids", ())), text)
