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
import json
import statistics
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import shared_paths  # noqa: F401
from harness import table
from planted_text import PlantedText, planted_in

from baton.deploy.bench.client import Reply, Target, ask, open_session
from baton.deploy.bench.figures import percentiles
from baton.deploy.bench.load import Planned, RequestShape, Vocabulary, plan
from baton.deploy.bench.sender import Sender, SentRequest, run_on_uvloop
from baton.deploy.simulation.figures import Record, Slo, summary
from baton.deploy.simulation.traffic import Arrival, poisson, read_trace

_FIRST = 2**32 - 1  # seed of the request before all loads


class Answered(NamedTuple):
    """A request with the answer that it asked for."""

    turn: int
    rid: str
    record: Record


class Answers(NamedTuple):
    """All answers of a load, compared with what was asked for."""

    answered: list[Answered]
    num_failed: int
    num_wrong: int  # differ from the planted text
    num_checked: int  # tokens


_MOST_TRACED = 100  # requests
_BACKGROUND = Arrival(2.0, 64, 12_000)  # a stream beside those that are measured, and its start before them


async def send(planned: Sequence[Planned], options: argparse.Namespace, num_background: int, longest: int) -> Sender:
    """Send all requests beside other streams of up to `longest` tokens. Raises RuntimeError if one of these fails."""
    name = options.model_name or options.model.resolve().name
    fields = {"ignore_eos": True, "return_token_ids": True}
    target = Target(f"http://127.0.0.1:{options.port}", name, fields=fields)
    async with open_session(target) as session:
        replies = [Reply() for _ in range(num_background)]
        prompt, num_tokens = [7] * _BACKGROUND.prompt_len, min(_BACKGROUND.num_tokens, longest - _BACKGROUND.prompt_len)
        others = [asyncio.create_task(ask(session, target, prompt, num_tokens, reply)) for reply in replies]
        if others:
            await asyncio.sleep(_BACKGROUND.at_s)
        if failed := [reply.message for reply in replies if reply.error is not None]:
            raise RuntimeError(f"a stream beside the measured ones failed: {failed[0]}")
        sender = Sender(session, target, options.think_s)
        await sender.run(planned)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return sender


def look(asked: Sequence[SentRequest], text: PlantedText | None) -> Answers:
    """Look at the answers: whether they have the tokens that they should have. `text`: the planted one, if known."""
    answered: list[Answered] = []
    num_failed = num_wrong = num_checked = 0
    for each in asked:
        reply, num_tokens = each.reply, len(each.reply.ids)
        if reply.error is not None or num_tokens != each.num_tokens:
            num_failed += 1
            why = f"{num_tokens} tokens came, not {each.num_tokens}" if reply.error is None else reply.error
            print(f"a request failed: {why} {reply.message}", file=sys.stderr)
            continue
        answered.append(Answered(each.turn, reply.rid, reply.record))
        if text is not None:
            num_checked += num_tokens
            num_wrong += reply.ids != text.continuation(list(each.prompt), each.num_tokens)
    return Answers(answered, num_failed, num_wrong, num_checked)


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
    """Run one load and return its figures."""
    is_first = seed == _FIRST
    config = json.loads((options.model / "config.json").read_text())
    num_turns, turn_len = 1 if is_first else options.turns, (options.turn_len, options.turn_len)
    shape = RequestShape(num_turns=num_turns, turn_len=turn_len)
    planned = plan(arrivals, shape, Vocabulary(range(config["vocab_size"])), str(seed))
    num_background = 0 if is_first else options.background
    sender = run_on_uvloop(send(planned, options, num_background, config["max_position_embeddings"]))
    found = look(sender.asked, planted_in(config) if config.get("_planted") else None)
    row = {"rate": num_turns * len(arrivals) / max(arrivals[-1].at_s, 1e-9), "took_s": sender.took_s}
    row |= summary([each.record for each in found.answered], sender.took_s, options.slo)
    row |= {"failed": found.num_failed, "wrong": found.num_wrong, "checked_tokens": found.num_checked}
    traced = spans(options.port, [each.rid for each in found.answered[-_MOST_TRACED:]])
    row |= {"stages_ms_p50": stages(traced), "local_share": local_share(traced)}
    if num_turns > 1:
        row["turns"] = by_turn(found.answered, options.port)
    late = percentiles(each.late_s for each in sender.asked)
    return row | {"late_ms_p99": late.p99 if late is not None else 0.0}


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
