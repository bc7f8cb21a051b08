"""Run a mixed load with cancels for a given time, and check that memory stays flat and the ledgers end empty.

    python tests/benchmarks/upkeep/soak.py --minutes 60 [--workers 4] [--pause-file PATH] [--json FILE] [NODE FLAGS ...]

The load: whole answers and streams, prompts with and without common beginnings, one to three choices, logprobs, stop
strings. Clients give up about a third of the requests at random times. The memory of each process is sampled every ten
seconds. Slopes are least-squares lines after a warm-up of a third of the run, in which caches, pools and allocators
fill. `anon` leaves out shared memory, which holds the KV pool. No request is sent while PATH exists.
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared_paths  # noqa: F401
from cluster import Cluster, held, wait_until

DEMO = Path(__file__).parents[3] / "deploy" / "demo"
SAMPLE_S = 10.0
WARM_UP = 1 / 3
PAGES = 600


class Load:
    """Workers that send requests until they are told to stop."""

    def __init__(self, cluster: Cluster, pause_file: Path | None, num_workers: int, seed: int) -> None:
        self._cluster, self._pause_file = cluster, pause_file
        self._model = cluster.model_name
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._is_over = threading.Event()
        rngs = [random.Random(seed * 1000 + place) for place in range(num_workers)]
        self._threads = [threading.Thread(target=self._work, args=(rng,), daemon=True) for rng in rngs]
        for thread in self._threads:
            thread.start()

    @property
    def is_paused(self) -> bool:
        return self._pause_file is not None and self._pause_file.exists()

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a request hangs"

    def _work(self, rng: random.Random) -> None:
        while not self._is_over.is_set():
            if self.is_paused:
                time.sleep(0.5)
                continue
            try:
                self.counts[self._ask(rng)] += 1
            except (OSError, http.client.HTTPException, KeyError, ValueError) as error:
                self.errors[f"{type(error).__name__}: {error}"] += 1
            time.sleep(rng.expovariate(5))

    def _body(self, rng: random.Random) -> dict[str, Any]:
        shared = "".join(f"def function_{i}(x):\n    return x * {i}\n\n\n" for i in range(rng.choice((0, 2, 5, 12))))
        own = "".join(rng.choice("abcdefgh_ (=.)\n") for _ in range(rng.randint(1, 200)))
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": shared + own,
            "max_tokens": rng.choice((1, 2, 16, 60, 200)),
            "temperature": rng.choice((0, 0.7, 1.0)),
            "n": rng.choice((1, 1, 1, 2, 3)),
            "stream": rng.random() < 0.7,
            "ignore_eos": rng.random() < 0.5,
        }
        if rng.random() < 0.2:
            body["logprobs"] = rng.randint(0, 5)
        if rng.random() < 0.2:
            body["stop"] = ["return", "\n\n\n"]
        if rng.random() < 0.2:
            body |= {"frequency_penalty": 0.5, "min_tokens": 1, "draft_steps": rng.randint(0, 3)}
        return body

    def _ask(self, rng: random.Random) -> str:
        body = self._body(rng)
        connection = http.client.HTTPConnection("127.0.0.1", self._cluster.http_port, timeout=120)
        gives_up = rng.random() < 0.35
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            if gives_up and (not body["stream"] or rng.random() < 0.3):
                time.sleep(rng.expovariate(10))  # before the first byte
                return "given up early"
            response = connection.getresponse()
            if response.status != 200:
                self.errors[f"{response.status}: {response.read(200)!r}"] += 1
                return "refused"
            if gives_up:
                for _ in range(rng.randint(1, 60)):
                    if not response.readline():
                        break
                return "given up in the middle"
            text = response.read()
            if body["stream"] and not text.endswith(b"data: [DONE]\n\n"):
                raise ValueError(f"a stream ended with {text[-80:]!r}")
            return "stream" if body["stream"] else "whole answer"
        finally:
            connection.close()


def sample(cluster: Cluster) -> dict[str, tuple[float, float]]:
    """Return the MiB of each process: resident memory, and its anonymous part."""
    sizes: dict[str, tuple[float, float]] = {}
    for name, process in cluster.processes.items():
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        sizes[name] = (int(fields["VmRSS"].split()[0]) / 1024, int(fields["RssAnon"].split()[0]) / 1024)
    return sizes


def slope(times: list[float], values: list[float]) -> float:
    """Return the slope of a least-squares line, in units per hour."""
    mean_t, mean_v = sum(times) / len(times), sum(values) / len(values)
    spread = sum((t - mean_t) ** 2 for t in times)
    return 3600 * sum((t - mean_t) * (v - mean_v) for t, v in zip(times, values, strict=True)) / spread


def report(samples: list[tuple[float, dict[str, tuple[float, float]]]]) -> dict[str, Any]:
    """Return for each process the MiB at the start, after warm-up and at the end, and MiB per hour after warm-up."""
    begin = samples[int(len(samples) * WARM_UP)][0]
    late = [entry for entry in samples if entry[0] >= begin]
    rows: dict[str, Any] = {}
    for name in samples[0][1]:
        rows[name] = {"start_mib": round(samples[0][1][name][0], 1)}
        for place, kind in enumerate(("rss", "anon")):
            values = [sizes[name][place] for _, sizes in late]
            rows[name] |= {
                f"{kind}_warm_mib": round(values[0], 1),
                f"{kind}_end_mib": round(values[-1], 1),
                f"{kind}_mib_per_hour": round(slope([at for at, _ in late], values), 2),
            }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--pause-file", type=Path)
    parser.add_argument("--json", type=Path)
    options, node_flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as directory:
        cluster = Cluster(Path(directory), options.model)
        cluster.exit_s = 60
        with cluster:
            flags = ["--num-pages", str(PAGES), "--log-level", "warning", *node_flags]
            cluster.start(prefill=1, decode=2, node_flags=flags, wait=False)
            cluster.wait_ready(num_nodes=3, timeout_s=300)
            result = soak(cluster, options)
    print(json.dumps(result, indent=1))


def soak(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    load = Load(cluster, options.pause_file, options.workers, options.seed)
    started = time.monotonic()
    samples: list[tuple[float, dict[str, tuple[float, float]]]] = []
    paused_s, result = 0.0, {}
    while time.monotonic() - started < 60 * options.minutes:
        time.sleep(SAMPLE_S)
        paused_s += SAMPLE_S if load.is_paused else 0
        samples.append((time.monotonic() - started, sample(cluster)))
        result = {
            "minutes": round((time.monotonic() - started) / 60, 1),
            "paused_minutes": round(paused_s / 60, 1),
            "requests": dict(load.counts),
            "errors": dict(load.errors),
            "memory": report(samples) if len(samples) > 5 else {},
            "anon_mib_every_5_min": {name: [sizes[name][1] for _, sizes in samples[::30]] for name in samples[0][1]},
            "machine": f"{platform.machine()}, Python {platform.python_version()}",
        }
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1))
    load.stop()
    wait_until(lambda: not held(cluster.ledger()), lambda: f"{held(cluster.ledger())}", 60)
    result["ledger_at_the_end"] = {
        name: {"pool": books["pool"], "requests": books["requests"], "tickets": books["tickets"]}
        for name, books in cluster.ledger()["nodes"].items()
    }
    result["steps"] = {name: books["stats"]["steps"] for name, books in cluster.ledger()["nodes"].items()}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
