"""Traffic: when requests arrive, and how many tokens they have and ask for."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import NamedTuple


class Arrival(NamedTuple):
    """A request of the load."""

    at_s: float  # since the start
    prompt_len: int
    num_tokens: int  # of the answer


def poisson(rate: float, seconds: float, prompt_len: int, num_tokens: int, seed: int) -> list[Arrival]:
    """Return the arrivals of a Poisson process with `rate` requests per second."""
    draw, at_s, arrivals = random.Random(seed), 0.0, list[Arrival]()
    while (at_s := at_s + draw.expovariate(rate)) < seconds:
        arrivals.append(Arrival(at_s, prompt_len, num_tokens))
    return arrivals


def read_trace(lines: Iterable[str], speed: float = 1.0) -> list[Arrival]:
    """Return the arrivals of a trace, the first at 0. Each line is a JSON object with `timestamp` (milliseconds),
    `input_length` and `output_length` (tokens), as in the traces of Mooncake (arXiv:2407.00079). `speed` 2 replays it
    twice as fast. Raises ValueError for a line that is no request."""
    arrivals: list[Arrival] = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            arrival = Arrival(entry["timestamp"] / 1e3, entry["input_length"], entry["output_length"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"line {number} is {line.strip()[:60]!r}; it must be a JSON object with timestamp, input_length and "
                f"output_length ({error!r})"
            ) from None
        if not all(isinstance(each, int) for each in arrival[1:]):
            raise ValueError(f"line {number} has lengths of {arrival[1:]}; use whole numbers of tokens")
        if min(arrival.prompt_len, arrival.num_tokens) < 1:
            raise ValueError(
                f"line {number} asks for {arrival.prompt_len} + {arrival.num_tokens} tokens; use 1 or more"
            )
        arrivals.append(arrival)
    first = min((each.at_s for each in arrivals), default=0.0)
    return sorted(each._replace(at_s=(each.at_s - first) / speed) for each in arrivals)
