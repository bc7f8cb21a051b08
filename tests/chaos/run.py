"""Run random fault scenarios for a given time.

    python tests/chaos/run.py --minutes 60 --seed 7 --out chaos.json

Each algorithm in turn gets a cluster of real processes for a few scenarios. The report is written after each scenario
as JSON, and at the end as a table too. Runs with different seeds can run in parallel, each with its own --out; tally.py
adds up their reports.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), *map(str, (Path(__file__).parents[1] / "support").glob("*"))]

from drawn_places import PLACES  # noqa: E402
from evidence import Evidence  # noqa: E402
from host_rig import TRANSPORTS, HostRig, flags_of  # noqa: E402
from models import ALGORITHMS, flags, known_answers, make_targets  # noqa: E402
from play import Play, Result  # noqa: E402
from rig import NODES, SHARINGS, Rig  # noqa: E402
from scenarios import KINDS, KINDS_OF_HOSTS, RANKS, Scenario, generate  # noqa: E402
from streams import Stream  # noqa: E402
from tally import Tally  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="how long to run (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the scenarios (default: 0)")
    parser.add_argument("--each", type=int, default=20, help="scenarios per cluster (default: 20)")
    parser.add_argument("--algorithms", nargs="*", default=list(ALGORITHMS), help="algorithms to play (default: all)")
    parser.add_argument("--kinds", nargs="*", help="kinds of faults (default: all)")
    parser.add_argument("--ranks", type=int, default=1, help="of one node per role; the other has one (default: 1)")
    parser.add_argument("--sharing", choices=SHARINGS, default="tp", help="how ranks share a model (default: tp)")
    parser.add_argument("--routers", type=int, default=1, help="that share the nodes, at most 2 (default: 1)")
    parser.add_argument("--hosts", action="store_true", help="give each process a host of its own, joined by a switch")
    parser.add_argument("--transports", nargs="*", help="of pages, by turns (default: all that the hosts can use)")
    parser.add_argument("--pause-file", type=Path, help="no scenario starts while this file exists")
    parser.add_argument("--work", type=Path, help="directory for checkpoints and logs (default: a temporary one)")
    parser.add_argument("--models", type=Path, help="directory written by models.py; several runs may share it")
    parser.add_argument("--out", type=Path, default=Path("chaos.json"), help="the report (default: chaos.json)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left behind
    work = args.work or Path(tempfile.mkdtemp(prefix="chaos-"))
    work.mkdir(parents=True, exist_ok=True)
    started, tally = time.monotonic(), Tally()
    tally.seeds.append(args.seed)
    kinds = args.kinds or (KINDS_OF_HOSTS if args.hosts else KINDS if args.ranks == 1 else (*KINDS, *RANKS))
    transports = args.transports or (TRANSPORTS if args.hosts else ("local", "zmq"))
    scenarios = generate(args.seed, NODES, tuple(kinds))
    until = started + 60 * args.minutes
    first = args.seed % len(args.algorithms)  # parallel runs start with different algorithms
    rotation = itertools.cycle([*args.algorithms[first:], *args.algorithms[:first]])
    for round_number, algorithm in enumerate(rotation):
        if time.monotonic() > until:
            break
        some = itertools.islice(scenarios, args.each)
        some = _paused(some, args.pause_file)
        more: dict[str, Any] = {"num_ranks": args.ranks, "sharing": args.sharing, "num_routers": args.routers}
        more["transport"] = transports[(args.seed + round_number) % len(transports)]
        make_rig = HostRig if args.hosts else Rig
        models = args.models or work
        run_cluster(work, models, algorithm, round_number, args.seed, some, until, tally, args.out, make_rig, **more)
    tally.seconds = time.monotonic() - started
    tally.write(args.out)
    args.out.with_suffix(".md").write_text(tally.table() + "\n")
    print(tally.table())
    print(json.dumps(tally.to_json(), indent=1))
    if args.work is None:
        shutil.rmtree(work, ignore_errors=True)
    return 1 if tally.defects else 0


def _paused(scenarios: Iterable[Scenario], pause_file: Path | None) -> Iterator[Scenario]:
    """Yield the scenarios, but wait while the file exists."""
    for scenario in scenarios:
        while pause_file is not None and pause_file.exists():
            time.sleep(1)
        yield scenario


def run_cluster(
    work, models, algorithm, number, seed, scenarios, until, tally, out, make_rig, *, transport, **more
) -> None:
    rng = random.Random(seed * 1000 + number)
    target = make_targets(models)[rng.random() < 0.5]
    answers = known_answers(target)
    directory = work / f"cluster-{number}-{algorithm}"
    places = [each for each in PLACES if each != "local" or make_rig is Rig]  # between hosts, pages travel
    place = rng.choice(places)
    node_flags = [*flags(algorithm, target), *flags_of(transport)]
    rig = make_rig(directory, target, node_flags, seed=seed * 1000 + number, place=place, has_tiers=True, **more)
    print(f"--- {algorithm}, {target.parent.name}, {transport}, {place} prompts, {directory}", flush=True)
    scenario: Scenario | None = None
    evidence = Evidence(directory)
    try:
        rig.begin()
        check_clean(rig, answers)
        for scenario in scenarios:
            if time.monotonic() > until:
                break
            play = Play(rig, answers, scenario)
            evidence = play.evidence
            result = play.run()
            tally.add(algorithm, result)
            tally.longest_orphan_s = max(tally.longest_orphan_s, rig.auditor.longest)
            _say(result)
            tally.write(out)
        rig.end()
    except (AssertionError, OSError, HTTPException, subprocess.TimeoutExpired) as error:
        traceback.print_exc()
        words = f"the cluster did not come back: {str(error)[:2000]}{evidence.of('')}"
        tally.defects.append(f"{algorithm}, {scenario}: {words}")
        tally.write(out)
    finally:
        rig.abandon()


def check_clean(rig: Rig, answers) -> None:
    """Assert that every answer is as expected if there is no fault."""
    for known in answers.values():
        for name, door in rig.doors.items():
            stream = Stream(door.connection, known, name)
            stream.thread.join(200)
            assert stream.outcome == "done" and not stream.problems, (known.name, stream.error, stream.problems)


def _say(result: Result) -> None:
    faults = ", ".join(f"{count} {kind}/{phase}" for (kind, phase), count in sorted(result.faults.items()))
    words = f"{result.seconds:5.1f} s  {result.scenario}: {faults or 'nothing'}; {dict(result.outcomes)}"
    print(words, *(f"\n    DEFECT {defect}" for defect in result.defects), flush=True)


if __name__ == "__main__":
    sys.exit(main())
