"""Measure clusters of several shapes under the same loads: `baton up` starts each, and bench_load.py sends requests.

    python tests/benchmarks/synthetic.py llama-3.1-8b models/8b --planted --config-only
    python tests/benchmarks/bench_shapes.py --model models/8b --out figures [--shapes never auto] [--loads idle-64]

`never` and `auto` are a prefill and a decode node, and say who computes prompts (--local-prefill); `0p2d` are two
decode nodes. `2p2d` and the shapes with ranks need four GPUs: `tp2-2d` is one prefill node of two ranks and two decode
nodes, `2p-tp2` the reverse, and `dp2` and `dp4` a group of two or four data-parallel ranks. Each node gets a
GPU if there are enough, and each rank one. Weights are made by the loader (--load-format). Figures go to
OUT/SHAPE-LOAD.json, tables to the output, and one table of all to DIR/FIGURE.json (--figures, --figure). A cluster that
does not become ready, a wrong answer or a failed request ends the program with an error.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench_load import row_of
from harness import flags, report
from shared_paths import MADE_MODELS

HERE = Path(__file__).parent
READY_S, STOP_S = 600.0, 60.0
FLAGS = ["--load-format", "planted:maker", "--speculative", "none", "--page-size", "64", "--max-running", "256"]
SHAPES = {
    "never": ["--local-prefill", "never"],
    "auto": ["--local-prefill", "auto"],
    "0p2d": ["--prefill", "0", "--decode", "2"],
    "2p2d": ["--prefill", "2", "--decode", "2"],
    "tp2-2d": ["--prefill", "1", "--prefill-tp", "2", "--decode", "2"],
    "2p-tp2": ["--prefill", "2", "--decode", "1", "--decode-tp", "2"],
    "dp2": ["--prefill", "0", "--decode", "1", "--decode-dp-attention", "2"],
    "dp4": ["--prefill", "0", "--decode", "1", "--decode-dp-attention", "4"],
}
_SLO = ["--slo", "200,12", "500,8", "1000,15"]


def second_token(prompt_len: int, *more: str) -> list[str]:
    """Return the arguments of a load that measures the second token."""
    return ["--rates", "2", "--seconds", "5", "--prompt-len", str(prompt_len), "--tokens", "24", *more]


LOADS = {f"idle-{size}": second_token(size) for size in (64, 256, 1024, 8192)}
LOADS |= {f"busy-{size}": second_token(size, "--background", "32") for size in (64, 256, 1024, 8192)}
LOADS |= {
    "4096": ["--rates", "2", "4", "6", "8", "10", "--seconds", "10", "--prompt-len", "4096", "--tokens", "256"],
    "1024": ["--rates", "8", "16", "24", "--seconds", "10", "--prompt-len", "1024", "--tokens", "512"],
    "ranks-4096": ["--rates", "6", "--seconds", "10", "--prompt-len", "4096", "--tokens", "256"],
    "ranks-1024": ["--rates", "12", "24", "--seconds", "10", "--prompt-len", "1024", "--tokens", "512"],
    "turns": ["--rates", "1", "--seconds", "5", "--prompt-len", "2048", "--turns", "10", "--tokens", "32"],
}


@contextmanager
def cluster(model: Path, flags: Sequence[str], port: int, log: Path) -> Iterator[None]:
    """Run `baton up`, and stop it at the end. Raises RuntimeError if it does not become ready."""
    command = [sys.executable, "-m", "baton.deploy.cli", "up", "--model", str(model), "--port", str(port), *flags]
    with log.open("w") as out:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([MADE_MODELS, os.environ.get("PYTHONPATH", "")])}
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        deadline = time.monotonic() + READY_S
        while "Ctrl-C" not in log.read_text() or not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"baton up did not become ready; the end of {log}:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield
    finally:
        process.send_signal(signal.SIGINT)  # no effect if it has ended
        process.wait(STOP_S)


def _answers(port: int) -> bool:
    with suppress(urllib.error.URLError, OSError):
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1).status == 200
    return False


def rows_of(out: Path, measured: Sequence[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each rate of each load on each shape, from the files that bench_load.py wrote."""
    for shape, load in measured:
        path = out / f"{shape}-{load}.json"
        for row in json.loads(path.read_text()) if path.exists() else ():
            yield {"shape": shape, "load": load} | row_of(row) | {"checked_tokens": row["checked_tokens"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure. Return the exit status."""
    parser = flags(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="its directory; planted")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of figures and logs")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help=", ".join(SHAPES))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help=", ".join(LOADS))
    parser.add_argument("--port", type=int, default=8000, help="of the router")
    parser.add_argument("--figure", default="loads", help="its name, such as load-two-gpus")
    own = "of the nodes, in place of the default ones; they come last"
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=FLAGS, help=own)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    for shape in options.shapes:
        own = [*SHAPES[shape], *options.flags]
        with cluster(options.model, own, options.port, options.out / f"{shape}.log"):
            for load in options.loads:
                name, client = f"{shape}-{load}", [sys.executable, str(HERE / "bench_load.py")]
                client += ["--model", str(options.model), "--port", str(options.port), *LOADS[load], *_SLO]
                client += ["--json", str(options.out / f"{name}.json")]
                client += ["--seed", str(100 * list(LOADS).index(load))]  # no prompt has the prefix of another load's
                found = subprocess.run(client, capture_output=True, text=True, check=False)
                lines = [line for line in found.stdout.splitlines() if line.startswith("|")]
                print(f"{name}:\n" + "\n".join(lines or [found.stderr[-1000:]]), flush=True)
                failed += [name] if found.returncode else []
    measured = [(shape, load) for shape in options.shapes for load in options.loads]
    rows = list(rows_of(options.out, measured))
    about = {"checked_tokens": sum(row.pop("checked_tokens") for row in rows)}
    report(options, options.figure, rows, unit="ms", about=about)
    print(f"failed: {', '.join(failed)}" if failed else "every answer was right")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
