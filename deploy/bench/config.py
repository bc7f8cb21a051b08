"""Settings of `baton bench`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...metadata.config import at_least, setting
from ...metadata.errors import ConfigError
from ..simulation.figures import Slo
from ..simulation.traffic import Arrival, from_trace
from .load import RequestShape, read_length, synthetic, times_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The server to measure, the load, the bounds to keep, and the files to write."""

    url: str = setting("http://127.0.0.1:8000", "measure the server with OpenAI's interface at this URL", metavar="URL")
    api_key: str | None = setting(
        None, "send this API key (default: $BATON_API_KEY, else $OPENAI_API_KEY)", metavar="KEY"
    )
    model: str | None = setting(None, "ask this model (default: the first that the server lists)", metavar="NAME")
    chat: bool = setting(False, "ask for chat completions instead of completions")
    rate: tuple[str, ...] = setting(
        (),
        "let this many requests per second arrive (default: 1); given several times, one after the other",
        metavar="N",
    )
    arrivals: Literal["poisson", "constant"] = setting(
        "poisson", "let requests arrive independently of each other, or at equal distances"
    )
    burstiness: float = setting(
        1.0, "shape of the gamma distribution of the times between arrivals; less than 1 makes bursts", metavar="X"
    )
    seconds: float = setting(30.0, "let requests arrive for this many seconds")
    prompt_len: str = setting("512", "tokens of each prompt; N, or a range A-B", metavar="N")
    tokens: str = setting("128", "tokens of each answer; N, or a range A-B", metavar="N")
    prefix_len: int = setting(0, "let prompts begin with this many tokens that others share")
    num_prefixes: int = setting(1, "with --prefix-len: number of different beginnings")
    turns: int = setting(1, "let each arrival be a conversation of this many requests, each with the whole history")
    turn_len: str = setting("64", "with --turns: tokens that each further turn adds; N, or a range A-B", metavar="N")
    think_s: float = setting(0.0, "with --turns: seconds from an answer to the next turn")
    trace: str | None = setting(
        None,
        "replay this file instead; each line is a JSON object with timestamp (milliseconds), input_length and "
        "output_length (tokens), and perhaps hash_ids or prompt. With --rate, requests arrive at that rate instead",
        metavar="FILE",
    )
    speed: float = setting(1.0, "with --trace: replay it this many times as fast")
    slo: tuple[str, ...] = setting(
        ("200,12",),
        "count a request as good if its first token comes within TTFT milliseconds and further ones every TPOT "
        "milliseconds or faster on average (default: 200,12); may be given several times",
        metavar="TTFT,TPOT",
    )
    repeat: int = setting(1, "send each load this many times, with other prompts; shows the noise to --compare")
    seed: int | None = setting(
        None,
        "draw arrivals, lengths and prompts with this seed (default: always the same arrivals and lengths, but prompts "
        "that no earlier run had, so that none is cached)",
    )
    timeout_s: float = setting(600.0, "give up a request after this many seconds")
    ignore_eos: bool = setting(True, "ask for answers of full length (the field ignore_eos, which some servers lack)")
    extra_body: str | None = setting(
        None, "add these fields to each request; null leaves a field out", metavar="'{\"name\": value}'"
    )
    json: str | None = setting(None, "write all figures to this file", metavar="FILE")
    svg: str | None = setting(None, "draw the figures in this file", metavar="FILE")
    log_level: str = setting("warning", "debug shows a traceback with an error")

    def __post_init__(self) -> None:
        for name in ("num_prefixes", "turns", "repeat"):
            at_least(self, name, 1)
        for name in ("prefix_len", "think_s"):
            at_least(self, name, 0)
        for name in ("burstiness", "seconds", "speed", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be more than 0")
        if self.burstiness != 1.0 and self.arrivals == "constant":
            raise ConfigError(f"--burstiness {self.burstiness:g} needs --arrivals poisson")
        if self.trace is not None and self.turns > 1:
            raise ConfigError("--turns: the requests of a --trace are no conversations; leave out one of both")
        if self.shape.prefix_len >= self.shape.prompt_len[0]:
            raise ConfigError(f"--prefix-len {self.prefix_len} must be less than --prompt-len {self.prompt_len}")
        for each in (self.json, self.svg):
            if each is not None and not Path(each).absolute().parent.is_dir():
                raise ConfigError(f"{each} cannot be written: there is no folder {Path(each).absolute().parent}")
        _ = self.rates, self.slos, self.extra_fields  # each raises for a wrong value

    @property
    def shape(self) -> RequestShape:
        """The lengths and turns of synthetic requests. Raises ConfigError."""
        return RequestShape(
            read_length("--prompt-len", self.prompt_len),
            read_length("--tokens", self.tokens),
            self.prefix_len,
            self.num_prefixes,
            self.turns,
            read_length("--turn-len", self.turn_len),
        )

    @property
    def rates(self) -> tuple[float, ...]:
        """The rates to measure. Raises ConfigError."""
        try:
            rates = tuple(map(float, self.rate or ("1",)))
        except ValueError:
            rates = (0.0,)
        if not all(0 < rate < 1e6 for rate in rates):
            raise ConfigError(f"--rate {' '.join(self.rate)}: use numbers of requests per second, more than 0")
        return rates

    @property
    def slos(self) -> tuple[Slo, ...]:
        """The bounds of good requests. Raises ConfigError."""
        try:
            return tuple(map(Slo.parse, self.slo))
        except ValueError as error:
            raise ConfigError(f"--slo {error}") from None

    @property
    def extra_fields(self) -> dict[str, Any]:
        """The fields of --extra-body. Raises ConfigError."""
        try:
            return msgspec.json.decode(self.extra_body or "{}", type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ConfigError(f"--extra-body {self.extra_body}: must be a JSON object ({error})") from None

    @property
    def key(self) -> str | None:
        """The API key to send."""
        return self.api_key or os.environ.get("OPENAI_API_KEY")

    def loads(self) -> Iterator[tuple[float, list[Arrival]]]:
        """Yield the requests of each load with their rate. Raises ConfigError."""
        burstiness = None if self.arrivals == "constant" else self.burstiness
        trace = None if self.trace is None else Path(self.trace)
        if trace is not None and not self.rate:
            arrivals = from_trace(trace, self.speed, None)
            yield len(arrivals) / max(arrivals[-1].at_s, 1e-9), arrivals
            return
        for rate in self.rates:
            times = times_of(rate, self.seconds, self.seed or 0, burstiness)
            yield rate, synthetic(times, self.shape, self.seed or 0) if trace is None else from_trace(trace, 1.0, times)
