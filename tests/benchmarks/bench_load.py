"""Measure latency and goodput of a running router under requests that arrive independently of the answers (open loop).

    baton up --model models/8b ...                                                # in another terminal
    python tests/benchmarks/bench_load.py --model models/8b --rates 2 4 6 --prompt-len 4096 --tokens 256
    python tests/benchmarks/bench_load.py --model models/8b --trace trace.jsonl --speed 2
    python tests/benchmarks/bench_load.py --model models/8b --rates 1 --prompt-len 2048 --turns 10 --turn-len 64

Arrivals are those of a Poisson process at each of `--rates` (requests per second) for `--seconds`, or those of a trace:
one JSON object per line with `timestamp` (milliseconds), `input_length` and `output_length` (tokens), as in the public
traces of Mooncake (arXiv:2407.00079). `--speed 2` replays a trace twice as fast. Prompts are random token ids, so no
prefix is cached; another `--seed` draws others. Answers are greedy and as long as asked for. `--background 32` keeps so
many other streams running, which are not measured.

    ttft      milliseconds from sending a request to its first token
    tpot      milliseconds per token after the first, the mean of a request
    second    milliseconds from the first token to the second, which another node computes
    gap       the largest time between two reads with tokens of a request, milliseconds
    goodput   requests per second with ttft and tpot within `--slo TTFT_MS,TPOT_MS`; there may be several

`stages_ms_p50` in the figures has the medians of the stages that `baton explain` shows for a request, and `local_share`
the share of prompts that a decode node computed.

With `--turns N` each arrival begins a conversation. A turn's prompt holds the whole history and `--turn-len` new random
tokens. It is sent `--think-s` after the answer before it. The figures then have all that by turn.

With a planted model (synthetic.py --planted) every answer is compared with the known text; the exit status is 1 if one
differs or if a request fails. All figures go to --json FILE.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import re
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import shared_paths  # noqa: F401
from bench_router import Stream, completion
from bench_system import tokens_of
from harness import table
from planted_text import PlantedText

from baton.deploy.simulation.figures import Record, Slo, summary
from baton.deploy.simulation.traffic import Arrival, poisson, read_trace

_FIRST = 2**32 - 1  # seed of the request before all loads


def record(sent_s: float, events: Sequence[tuple[float, list[int]]]) -> Record:
    """Return the times of one answer. `events`: when each part was read, and its token ids."""
    times = [at for at, ids in events if ids]
    num_tokens = sum(len(ids) for _, ids in events)
    gaps = np.diff(times)
    tpot_s = (times[-1] - times[0]) / (num_tokens - 1) if num_tokens > 1 else 0.0
    second_s, gap_s = (float(gaps[0]), float(gaps.max())) if len(gaps) else (0.0, 0.0)
    return Record(times[0] - sent_s, tpot_s, second_s, gap_s)


class Talk(NamedTuple):
    """Settings of all conversations of a load."""

    num_turns: int = 1
    turn_len: int = 64  # new tokens of each prompt but the first
    think_s: float = 0.0  # from the end of an answer to the next prompt


class Asked(NamedTuple):
    """A request whose answer is complete, as it was read."""

    turn: int  # from 1 on
    prompt: list[int]
    num_tokens: int
    sent_s: float
    stream: Stream


class Answered(NamedTuple):
    """A request with the answer that it asked for."""

    turn: int
    rid: str
    record: Record


_MOST_TRACED = 100  # requests
_RID = re.compile(r'"id": ?"(cmpl-[^"]+)"')
_BACKGROUND = Arrival(2.0, 64, 12_000)  # a stream beside those that are measured, and its start before them


class Client:
    """Sends requests at their times and keeps what came. It looks at answers when all of them are complete: to read and
    check one takes up to 40 ms, in which no other stream's tokens would be read."""

    def __init__(self, port: int, name: str, model: Path, seed: int, talk: Talk = Talk()) -> None:  # noqa: B008
        """`port` and `name` of the router and its model; `model` is the directory, for its vocabulary."""
        config = json.loads((model / "config.json").read_text())
        self._port, self._name, self._vocab_size = port, name, config["vocab_size"]
        self._context_len = config["max_position_embeddings"]
        self._text = PlantedText(self._vocab_size) if config.get("_planted") else None
        self._draw = np.random.default_rng(seed)
        self._talk = talk
        self._asked: list[Asked] = []
        self.answered: list[Answered] = []
        self.late_s: list[float] = []  # by which a request was sent after its time
        self.num_failed = self.num_wrong = self.num_checked = 0

    async def run(self, arrivals: Sequence[Arrival], num_background: int = 0) -> float:
        """Send all requests, wait for their answers, and return how long that took, in seconds. Meanwhile other
        streams run, which end with it. Raises RuntimeError if the router refuses one of these. `look` follows."""
        _, prompt_len, num_tokens = _BACKGROUND
        body = self._body([7] * prompt_len, min(num_tokens, self._context_len - prompt_len))
        loop = asyncio.get_running_loop()
        others = [
            await loop.create_connection(lambda: Stream(body), "127.0.0.1", self._port) for _ in range(num_background)
        ]
        if others:
            await asyncio.sleep(_BACKGROUND.at_s)
        try:
            for _, stream in others:
                if stream.done.done():
                    stream.done.result()
            return await self._measure(arrivals)
        finally:
            for transport, stream in others:
                stream.done.cancel()  # nobody waits for its end
                transport.close()

    async def _measure(self, arrivals: Sequence[Arrival]) -> float:
        prompts = [self._random(each.prompt_len) for each in arrivals]
        bodies = [self._body(prompt, each.num_tokens) for prompt, each in zip(prompts, arrivals, strict=True)]
        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for arrival, prompt, body in zip(arrivals, prompts, bodies, strict=True):
                await asyncio.sleep(started + arrival.at_s - time.perf_counter())
                self.late_s.append(time.perf_counter() - started - arrival.at_s)
                tasks.create_task(self._converse(prompt, arrival.num_tokens, body))
        return time.perf_counter() - started

    async def _converse(self, prompt: list[int], num_tokens: int, body: bytes) -> None:
        """Ask all turns of a conversation. It ends early if a request fails."""
        for turn in range(1, self._talk.num_turns + 1):
            asked = await self._ask(turn, prompt, num_tokens, body)
            if asked is None or turn == self._talk.num_turns:
                return
            answer = _ids(tokens_of(asked.stream))
            await asyncio.sleep(self._talk.think_s)
            prompt = [*prompt, *answer, *self._random(self._talk.turn_len)]
            body = self._body(prompt, num_tokens)

    def _random(self, num_tokens: int) -> list[int]:
        return self._draw.integers(0, self._vocab_size, num_tokens).tolist()

    def _body(self, prompt: list[int], num_tokens: int) -> bytes:
        fields = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return completion({"model": self._name, "prompt": prompt, "max_tokens": num_tokens, **fields})

    async def _ask(self, turn: int, prompt: list[int], num_tokens: int, request: bytes) -> Asked | None:
        """Wait for the answer and return it; None if the request fails."""
        sent_s = time.perf_counter()
        loop = asyncio.get_running_loop()
        try:
            transport, stream = await loop.create_connection(lambda: Stream(request), "127.0.0.1", self._port)
            try:
                await asyncio.wait_for(stream.done, 600)
            finally:
                transport.close()
        except (OSError, RuntimeError, TimeoutError) as error:
            self._fail(error)
            return None
        self._asked.append(Asked(turn, prompt, num_tokens, sent_s, stream))
        return self._asked[-1]

    def look(self) -> None:
        """Look at the answers: their times, and whether they have the tokens that they should have."""
        for turn, prompt, num_tokens, sent_s, stream in self._asked:
            try:
                events = tokens_of(stream)
                ids = _ids(events)
                assert len(ids) == num_tokens, f"{len(ids)} tokens came, not {num_tokens}"
            except AssertionError as error:
                self._fail(error)
                continue
            (rid, *_) = _RID.findall(b"".join(data for _, data in stream.reads).decode())
            self.answered.append(Answered(turn, rid, record(sent_s, events)))
            if self._text is not None:
                self.num_checked += len(ids)
                self.num_wrong += ids != self._text.continuation(prompt, num_tokens)
        self._asked.clear()

    def _fail(self, error: Exception) -> None:
        self.num_failed += 1
        print(f"a request failed: {error}", file=sys.stderr)


def _ids(events: Sequence[tuple[float, list[int]]]) -> list[int]:
    return [token for _, ids in events for token in ids]


def spans(port: int, rids: Sequence[str]) -> list[dict[str, float]]:
    """Return the milliseconds of each stage of each request, as the router at `port` traced them. Requests that it has
    forgotten are left out."""
    found: list[dict[str, float]] = []
    for rid in rids:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/debug/requests/{rid}", timeout=10) as answer:
            for request in json.load(answer)["requests"]:
                parts = request["choices"][0]["parts"]
                found.append({part["name"]: part.get("seconds", 0.0) * 1e3 for part in parts})
    return found


def stages(traced: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median milliseconds of each stage of requests."""
    names = dict.fromkeys(name for each in traced for name in each)
    return {name: round(statistics.median(each[name] for each in traced if name in each), 3) for name in names}


def by_turn(answered: Sequence[Answered], port: int) -> list[dict[str, Any]]:
    """Return the figures of each turn, the local share among the last prompts that the router at `port` has traced."""
    rows: list[dict[str, Any]] = []
    for turn in sorted({each.turn for each in answered}):
        those = [each for each in answered if each.turn == turn]
        traced = spans(port, [each.rid for each in those[-_MOST_TRACED:]])
        figures = summary([each.record for each in those], 1.0, [])
        rows.append({"turn": turn} | figures | {"local_share": local_share(traced)})
    return rows


def local_share(traced: Sequence[dict[str, float]]) -> float:
    """Return the share of requests whose prompt a decode node computed."""
    return sum("local prefill" in each for each in traced) / max(1, len(traced))


def measure(arrivals: Sequence[Arrival], options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Run one load and return its figures.

    No garbage is collected meanwhile: that would hold up all streams at once, and the figures would blame Baton."""
    gc.collect()
    gc.disable()
    talk = Talk() if seed == _FIRST else Talk(options.turns, options.turn_len, options.think_s)
    client = Client(options.port, options.model_name or options.model.resolve().name, options.model, seed, talk)
    took_s = asyncio.run(client.run(arrivals, 0 if seed == _FIRST else options.background))
    gc.enable()
    client.look()
    records = [each.record for each in client.answered]
    row = {"rate": talk.num_turns * len(arrivals) / max(arrivals[-1].at_s, 1e-9), "took_s": took_s}
    row |= summary(records, took_s, options.slo)
    row |= {"failed": client.num_failed, "wrong": client.num_wrong, "checked_tokens": client.num_checked}
    traced = spans(options.port, [each.rid for each in client.answered[-_MOST_TRACED:]])
    row |= {"stages_ms_p50": stages(traced), "local_share": local_share(traced)}
    if talk.num_turns > 1:
        row["turns"] = by_turn(client.answered, options.port)
    return row | {"late_ms_p99": float(np.percentile(client.late_s, 99)) * 1e3}


def row_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the main figures of a load, or of a turn, as a row of a table."""
    found = {name: row[name] for name in ("turn", "rate", "requests") if name in row}
    for column, name in (("first token", "ttft"), ("per token", "tpot"), ("second", "second"), ("largest gap", "gap")):
        found |= {f"{column} {at}": row[f"{name}_ms_{at}"] for at in ("p50", "p99") if f"{name}_ms_{at}" in row}
    goodputs = [name.split("_")[1:] for name in row if name.startswith("goodput_")]
    found |= {f"good at {ttft} / {tpot}, requests/s": row[f"goodput_{ttft}_{tpot}"] for ttft, tpot in goodputs}
    return found | {name: row[name] for name in ("local_share", "failed", "wrong") if name in row}


def main() -> None:
    options = _options()
    if options.trace:
        loads = [read_trace(options.trace.read_text().splitlines(), options.speed)]
    else:
        sizes = options.prompt_len, options.tokens
        loads = [poisson(rate, options.seconds, *sizes, seed) for seed, rate in enumerate(options.rates, options.seed)]
    if not all(loads):
        sys.exit("a load has no request: raise --rates or --seconds, or give a trace with lines")
    measure([Arrival(0.0, 16, 4)], options, _FIRST)  # connections, and kinds of kernels that nobody asked for
    rows = []
    for seed, arrivals in enumerate(loads, options.seed):
        rows.append(measure(arrivals, options, seed))
        print(json.dumps(rows[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    print(table([row_of(row) for row in rows]))
    for row in rows:
        if "turns" in row:
            print(f"\n{row['rate'] / options.turns:.2f} conversations per second:\n")
            print(table([row_of(turn) for turn in row["turns"]]))
    late = statistics.fmean(row["late_ms_p99"] for row in rows)
    print(f"requests were sent {late:.1f} ms late at p99: on a busy machine the client is part of what is measured")
    if any(row["failed"] or row["wrong"] for row in rows):
        sys.exit("some requests failed or had another text than the planted one")


def _slo(text: str) -> Slo:
    try:
        return Slo.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="its directory")
    parser.add_argument("--model-name", help="under which the router serves it (default: the directory's name)")
    parser.add_argument("--port", type=int, default=8000, help="of the router")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 4.0], help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which requests arrive")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=1, help="of each conversation")
    parser.add_argument("--turn-len", type=int, default=64, help="new tokens of each prompt but the first")
    parser.add_argument("--think-s", type=float, default=0.5, help="seconds from an answer to the next turn")
    parser.add_argument("--seed", type=int, default=0, help="of the first load's arrivals and prompts")
    parser.add_argument("--background", type=int, default=0, help="other streams that run meanwhile")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--speed", type=float, default=1.0, help="at which a trace is replayed")
    parser.add_argument("--slo", type=_slo, nargs="+", default=[Slo(200, 12)], metavar="TTFT_MS,TPOT_MS")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name in ("rates", "seconds", "prompt_len", "tokens", "speed", "turns", "turn_len"):
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) <= 0:
            parser.error(f"--{name.replace('_', '-')} is {value}; use more than 0")
    return options


if __name__ == "__main__":
    main()
