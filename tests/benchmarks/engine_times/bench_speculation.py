"""All figures of speculation: every drafter that ships with the demo models, against speculation off in the same run.

    python tests/benchmarks/engine_times/bench_speculation.py [--device cpu] [--dtype float32]
        [--drafters eagle ngram ...] [--quick]
        [--temperatures 0 1] [--streams 1 8] [--rounds N] [--minutes M] [--processes P] [--repeats R] [--control]
        [--only-speed] [--no-http] [--json FILE]

1. Accept length (tokens a round, the target's own included) of 64 prompts of 128 tokens of held-out code, 128 tokens
   after each, K fixed, at temperature 0 and 1, with its standard error over the prompts. Rounds in which max_tokens
   leaves no room for K drafts do not count.
2. Tokens per second of a decode node at 1 and 8 streams: speculation off, K fixed, K adaptive. A prefill and a decode
   node of each kind live in one thread, with their real sockets and no router. Counted are the seconds of the decode
   node's steps that run a round, messages and admission included; prefill and the first tokens are not. The three
   kinds take turns on the same requests, in reversed order every other round; a ratio is off's seconds of all rounds
   over the kind's, with its standard error over the rounds (the tokens are the same). A first round, which is not
   counted, warms up and lets K adapt. There are fewer rounds when time runs out.
3. Bytes that the handoff of a prompt of 1,024 tokens moves (metadata/handoff/schema/schema.py), and the time from the
   first token, known to the prefill node, to decode's first round. Both nodes take turns in one thread, so it is the
   work of both added up; pages of the prompt's earlier chunks were pulled before.
4. Over HTTP, router and nodes in processes of their own: off, and adaptive with the drafter that was best in 2.

Nodes that are equal differ by up to 5 % in one process, and the other way round in the next one, by where their weights
come to lie. So ratios near 1 take --repeats R, each drafter in R processes one after the other or at once: ratios are
the means of theirs then, with their standard error. --control adds a second node without speculation as a yardstick.

--only-speed leaves out 1, 3 and 4. --processes P runs P drafters at once, each in a process of its own with one thread:
for a machine with P idle cores; 4 is left out.

Tokens are compared with speculation off in every run of 1, 2 and 4. Streams that differ are counted, and among them
those that part where the target's two best scores are no tie (support/oracles/ties.py): one such, and the program ends
with status 1. Prints Markdown, writes JSON with --json FILE.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from baton.deploy.demo.training.corpus import read_corpus, standard_library
from baton.deploy.demo.training.evaluate import encode_documents

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared_paths  # noqa: F401
from harness import flags, heading, report, table
from http_pair import measure_http
from timed_pair import Case, Differences, Handoff, Judge, Run, TimedPair, params

DEMO = Path(__file__).parents[3] / "deploy" / "demo"
CASES = {
    case.name: case
    for case in (
        Case("ngram", DEMO, {"speculative": "ngram"}),
        Case("standalone", DEMO, {"speculative": "standalone"}),
        Case("eagle", DEMO, {"speculative": "eagle"}),
        Case("eagle-tree", DEMO, {"speculative": "eagle", "draft_topk": 2}),
        Case("eagle3", DEMO, {"speculative": "eagle3"}),
        Case("mtp3", DEMO, {"speculative": "mtp"}),
        Case("frozen-kv-mtp", DEMO, {"speculative": "frozen-kv-mtp"}),
    )
}
MODES = ("off", "control", "fixed", "adaptive")  # control: off once more
TEMPERATURES = (0.0, 1.0)
STREAMS = (1, 8)
PROMPT_LEN, LONG_PROMPT_LEN = 128, 1024
HTTP_S = 75.0  # kept for the processes
HELD_OUT_FRACTION = 0.02  # as the demo models were trained


def main() -> None:
    options = _options()
    started = time.perf_counter()
    torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    documents = _documents(options.source)
    prompts = _windows(documents, PROMPT_LEN, options.prompts)
    long_prompts = _windows(documents, LONG_PROMPT_LEN, 1 + options.handoffs)
    deadline = started + 60 * options.minutes - (HTTP_S if options.http else 0)
    figures: list[dict[str, Any]] = []
    if options.processes > 1 or options.repeats > 1:
        figures = _measure_apart(options)
    else:
        for num_left, name in zip(range(len(options.drafters), 0, -1), options.drafters, strict=True):
            at = time.perf_counter()
            until = at + (deadline - at) / num_left
            figures.append(_measure(CASES[name], prompts, long_prompts, until, options))
            print(f"{name}: {time.perf_counter() - at:.0f} s", file=sys.stderr)
    about = _about(options, documents)
    result: dict[str, Any] = {"about": about, "drafters": figures, "http": None}
    _write(result, options.json)
    if options.http:
        best = max(figures, key=lambda figure: math.prod(row["ratio"]["adaptive"] for row in figure["speed"]))
        case = CASES[best["drafter"]]
        judge = Judge(case.model, **_machine(options))
        result["http"] = measure_http(case, judge, prompts, long_prompts, STREAMS, options)
    about["seconds"] = round(time.perf_counter() - started)
    _write(result, options.json)
    options.json = None  # it is written, with more than the rows of the table
    report(options, "speculation", speeds(figures), unit="tokens/s")
    for rows in map(list, (acceptance(figures), handoffs(figures), over_http(result["http"]))):
        if rows:
            print("\n" + table(rows))
    rows = [*figures, *([result["http"]] if result["http"] else [])]
    sys.exit(any(row["differences"]["num_beyond_ties"] for row in rows))


def _measure_apart(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run this program once per drafter in its own process. Waiting drafters share the time with running ones."""
    minutes = options.minutes / -(-len(options.drafters) * options.repeats // options.processes)
    own = ["--no-http", "--minutes", str(minutes), "--processes", "1", "--repeats", "1"]  # the last ones count

    def measure(name: str, path: Path) -> dict[str, Any]:
        command = [sys.executable, __file__, *sys.argv[1:], *own, "--drafters", name, "--json", str(path / name)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)  # judged below
        return json.loads((path / name).read_text())["drafters"][0]

    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(options.processes) as pool:
        paths = [Path(directory) / str(index) for index in range(options.repeats)]
        for path in paths:
            path.mkdir()
        names = [name for name in options.drafters for _ in paths]
        done = list(pool.map(measure, names, paths * len(options.drafters)))
    return [_mean(done[start : start + len(paths)]) for start in range(0, len(done), len(paths))]


def _mean(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the reports of one drafter from several processes: ratios become the means of theirs."""
    if len(figures) == 1:
        return figures[0]
    speed: list[dict[str, Any]] = []
    for cell in zip(*(figure["speed"] for figure in figures), strict=True):
        ratios = {mode: [row["ratio"][mode] for row in cell] for mode in cell[0]["ratio"]}
        rates = {mode: statistics.mean(row["tokens_per_s"][mode] for row in cell) for mode in cell[0]["tokens_per_s"]}
        steps = sum((Counter(row["rounds_by_steps"]) for row in cell), Counter[str]())
        own = {
            "tokens_per_s": rates,
            "ratio": {mode: statistics.mean(each) for mode, each in ratios.items()},
            "standard_error": {mode: statistics.stdev(each) / math.sqrt(len(each)) for mode, each in ratios.items()},
            "median_ratio": {mode: statistics.median(each) for mode, each in ratios.items()},
            "ratios": {mode: [round(ratio, 3) for ratio in each] for mode, each in ratios.items()},
            "share_without_drafts": steps["0"] / steps.total(),
            "rounds_by_steps": {each: steps[each] for each in sorted(steps, key=int)},
        }
        speed.append(cell[0] | own)
    differences = {name: sum(figure["differences"][name] for figure in figures) for name in figures[0]["differences"]}
    return figures[0] | {"speed": speed, "differences": differences}


def _measure(
    case: Case, prompts: list[list[int]], long_prompts: list[list[int]], until: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure all figures of one drafter except those over HTTP."""
    machine = _machine(options)
    judge = Judge(case.model, **machine)
    with ExitStack() as stack:
        pairs = {
            mode: stack.enter_context(
                closing(
                    TimedPair(
                        case.model,
                        is_adaptive=mode == "adaptive",
                        **machine,
                        **({"speculative": "none"} if mode in ("off", "control") else case.settings),
                    )
                )
            )
            for mode in options.modes
        }
        acceptance: list[dict[str, Any]] = []
        handoff: dict[str, dict[str, Any]] = {}
        if not options.only_speed:
            acceptance = [_accept_length(pairs, judge, prompts, each, options) for each in options.temperatures]
            handoff = _handoff({mode: pairs[mode] for mode in ("off", "fixed")}, long_prompts)
        speed: list[dict[str, Any]] = []
        cells = list(itertools.product(options.temperatures, options.streams))
        for num_left, (temperature, num_streams) in zip(range(len(cells), 0, -1), cells, strict=True):
            now = time.perf_counter()
            share = now + (until - now) / num_left
            speed.append(_speed(pairs, judge, prompts, temperature, num_streams, share, options))
        differences = Differences.sum(row.pop("differences") for row in [*acceptance, *speed])
        return {
            "drafter": case.name,
            "target": case.model.resolve().name,
            "shape": pairs["fixed"].decode.rounds.shape._asdict(),
            "acceptance": acceptance,
            "speed": speed,
            "differences": differences._asdict(),
            "handoff": handoff,
        }


def _accept_length(
    pairs: dict[str, TimedPair], judge: Judge, prompts: list[list[int]], temperature: float, options: argparse.Namespace
) -> dict[str, Any]:
    each = _params(len(prompts), temperature, options.tokens)
    off, run = (pairs[mode].generate(prompts, each, len(prompts)) for mode in ("off", "fixed"))
    num_rounds, size = sum(each.count for each in run.rounds), len(run.rounds)
    mean = sum(each.num_accepted for each in run.rounds) / num_rounds
    spread = sum((each.num_accepted - mean * each.count) ** 2 for each in run.rounds)  # of a ratio of sums
    return {
        "temperature": temperature,
        "accept_length": 1 + mean,
        "standard_error": math.sqrt(spread * size / (size - 1)) / num_rounds,
        "num_rounds": num_rounds,
        "num_streams": size,
        "differences": judge.compare(prompts, each, run, off),
    }


def _speed(
    pairs: dict[str, TimedPair],
    judge: Judge,
    prompts: list[list[int]],
    temperature: float,
    num_streams: int,
    until: float,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Measure the modes by turns. Each round has new prompts as long as there are some.

    No round starts after `until`, but at least one runs.
    """
    modes = options.modes
    rounds: dict[str, list[Run]] = {mode: [] for mode in modes}
    parts: list[Differences] = []
    size = max(num_streams, options.alone)
    each = _params(size, temperature, options.tokens)
    for index in range(options.rounds + 1):  # the first one warms up
        if index > 1 and time.perf_counter() > until:
            break
        chosen = [prompts[(index * size + i) % len(prompts)] for i in range(size)]
        order = modes if index % 2 else modes[::-1]
        runs: dict[str, Run] = {mode: pairs[mode].generate(chosen, each, num_streams) for mode in order}
        parts += [judge.compare(chosen, each, runs[mode], runs["off"]) for mode in modes[1:]]
        if index:
            for mode in modes:
                rounds[mode].append(runs[mode])
    seconds = {mode: [run.seconds for run in rounds[mode]] for mode in modes}
    ratios = {mode: [a / b for a, b in zip(seconds["off"], seconds[mode], strict=True)] for mode in modes[1:]}
    steps = Counter(each for run in rounds["adaptive"] for each in run.steps)
    return {
        "temperature": temperature,
        "streams": num_streams,
        "tokens_per_s": {mode: sum(run.num_tokens for run in rounds[mode]) / sum(seconds[mode]) for mode in modes},
        "ratio": {mode: sum(seconds["off"]) / sum(seconds[mode]) for mode in ratios},
        "standard_error": {mode: _ratio_error(seconds["off"], seconds[mode]) for mode in ratios},
        "median_ratio": {mode: statistics.median(ratios[mode]) for mode in ratios},
        "ratios": {mode: [round(ratio, 3) for ratio in ratios[mode]] for mode in ratios},
        "share_without_drafts": steps[0] / steps.total(),
        "rounds_by_steps": {str(each): steps[each] for each in sorted(steps)},
        "differences": Differences.sum(parts),
    }


def _ratio_error(above: list[float], below: list[float]) -> float | None:
    """Return the standard error of sum(above) / sum(below), paired by index; None for a single pair."""
    size, ratio = len(above), sum(above) / sum(below)
    if size < 2:
        return None
    spread = sum((a - ratio * b) ** 2 for a, b in zip(above, below, strict=True))
    return math.sqrt(spread * size / (size - 1)) / sum(below)


def _handoff(pairs: dict[str, TimedPair], long_prompts: list[list[int]]) -> dict[str, dict[str, Any]]:
    """Return bytes and median milliseconds by mode. The first prompt warms up."""
    times: dict[str, list[Handoff]] = {mode: [] for mode in pairs}
    for prompt in long_prompts:
        for mode, pair in pairs.items():
            times[mode].append(pair.hand_over(prompt))

    def figures(mode: str) -> dict[str, Any]:
        size, each = pairs[mode].handoff_bytes(LONG_PROMPT_LEN), times[mode][1:]
        return {
            "prompt_len": LONG_PROMPT_LEN,
            "bytes": size._asdict() | {"total": size.total},
            "ms": 1e3 * statistics.median(one.seconds for one in each),
            "ms_in_prefill": 1e3 * statistics.median(one.prefill_s for one in each),
            "ms_in_decode": 1e3 * statistics.median(one.decode_s for one in each),
            "num_runs": len(each),
        }

    return {mode: figures(mode) for mode in pairs}


def speeds(figures: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each drafter, temperature and number of streams."""
    for figure in figures:
        for cell in figure["speed"]:
            row = {"drafter": figure["drafter"], "T": cell["temperature"], "streams": cell["streams"]}
            row |= cell["tokens_per_s"]
            for mode, ratio in cell["ratio"].items():
                row |= {f"{mode} / off": ratio, f"{mode}, standard error": cell["standard_error"][mode]}
            yield row | {"without drafts": f"{cell['share_without_drafts']:.0%}", "streams differ": _differ(figure)}


def acceptance(figures: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the accept lengths of each drafter."""
    for figure in figures:
        for cell in figure["acceptance"]:
            shape = ", ".join(f"{name} {value}" for name, value in figure["shape"].items())
            row = {"drafter": figure["drafter"], "target": figure["target"], "shape": shape, "T": cell["temperature"]}
            yield row | {"accept length": cell["accept_length"], "standard error": cell["standard_error"]}


def handoffs(figures: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield bytes and milliseconds of the handoff of each drafter, and without one."""
    for figure in figures:
        for mode, handoff in figure["handoff"].items():
            row = {"drafter": figure["drafter"] if mode == "fixed" else f"off ({figure['target']})"}
            times = {name: handoff[name] for name in ("ms", "ms_in_prefill", "ms_in_decode")}
            yield row | {f"{name}, bytes": size for name, size in handoff["bytes"].items()} | times


def over_http(http: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield tokens per second over HTTP, and when the chunks of a stream come."""
    for cell in http["speed"] if http else ():
        row = {"over HTTP": http["drafter"], "streams": cell["streams"]} | cell["tokens_per_s"]
        yield row | {"adaptive / off": cell["ratio"], "least": min(cell["ratios"]), "most": max(cell["ratios"])}
    for mode, times in http["chunks"].items() if http else ():
        yield {"over HTTP": f"{mode}, ms"} | times


def _differ(figure: dict[str, Any]) -> str:
    found = figure["differences"]
    return f"{found['num_differing']} of {found['num_streams']}, {found['num_beyond_ties']} beyond ties"


def _params(count: int, temperature: float, num_tokens: int) -> list[Any]:
    return [params(num_tokens, temperature=temperature, seed=seed) for seed in range(count)]


def _documents(source: Path) -> list[list[int]]:
    """Return the token ids of the held-out files."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    return [ids for ids, _ in encode_documents(tokenizer, read_corpus(source, HELD_OUT_FRACTION).held_out)]


def _windows(documents: list[list[int]], prompt_len: int, count: int) -> list[list[int]]:
    """Return windows that do not overlap and are spread evenly."""
    windows = [
        ids[start : start + prompt_len]
        for ids in documents
        for start in range(0, len(ids) - prompt_len + 1, prompt_len)
    ]
    if count > len(windows):
        raise SystemExit(f"the held-out files hold {len(windows)} windows of {prompt_len} tokens, not {count}")
    return [windows[index * len(windows) // count] for index in range(count)]


def _machine(options: argparse.Namespace) -> dict[str, Any]:
    return {"device": options.device, "dtype": options.dtype, "threads": options.threads}


def _about(options: argparse.Namespace, documents: list[list[int]]) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    return {
        **_machine(options),
        "device_name": device,
        **heading(options.commit),
        "python": platform.python_version(),
        "models": {DEMO.resolve().name: json.loads((DEMO / "config.json").read_text())},
        "source": f"{len(documents)} held-out files, {sum(map(len, documents))} tokens",
        "prompts": options.prompts,
        "prompt_len": PROMPT_LEN,
        "new_tokens": options.tokens,
        "rounds_at_most": options.rounds,
        "processes": options.processes,
        "prompts_alone_a_round": options.alone,
        "is_quick": options.quick,
    }


def _write(result: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1))


def _options() -> argparse.Namespace:
    parser = flags(__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--drafters", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--temperatures", nargs="+", type=float, default=list(TEMPERATURES), metavar="T")
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS), metavar="N")
    parser.add_argument("--only-speed", action="store_true", help="no accept length, no handoff, no HTTP")
    parser.add_argument("--processes", type=int, default=1, help="drafters measured at once, each in its own process")
    parser.add_argument("--repeats", type=int, default=1, help="processes of each drafter, whose ratios are averaged")
    parser.add_argument("--control", action="store_true", help="a second node without speculation, as if it were one")
    parser.add_argument("--source", type=Path, default=standard_library(), help="of 3.11.7, the library trained on")
    parser.add_argument("--rounds", type=int, help="default: 5 on CPU, 3 on CUDA")
    parser.add_argument("--minutes", type=float, help="after which rounds are left out; default: 13 on CPU, 7 on CUDA")
    parser.add_argument("--tokens", type=int, default=128, help="generated by each stream")
    parser.add_argument("--http", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--quick", action="store_true", help="does it all work? The figures say little")
    options = parser.parse_args()
    options.prompts, options.alone, options.handoffs = 64, 2, 9
    if options.quick:
        options.rounds, options.tokens, options.prompts, options.handoffs = 1, 32, 16, 3
    options.modes = tuple(mode for mode in MODES if mode != "control" or options.control)
    if options.only_speed or options.processes > 1 or options.repeats > 1:
        options.http = False
    on_cpu = options.device == "cpu"
    options.rounds = options.rounds or (5 if on_cpu else 3)
    options.minutes = options.minutes or (13 if on_cpu else 7)
    return options


if __name__ == "__main__":
    main()
