"""Measure all figures of docs/performance.md that need GPUs, and check them.

    python tests/benchmarks/bench_all.py --models models --out figures [--only engine-1b system-8b] [--again]

Each part runs in its own process, whose output goes to OUT/NAME.log, on as many GPUs as it needs; the GPUs of the
machine work at the same time. Models are planted, and their loader makes the weights. A part succeeds if what it
generated or moved equals what is known; its figures are then in OUT/NAME.json. Parts with such a file are not run again
unless --again is given, so a run that was interrupted continues where it stopped. After each part, OUT/figures.json
and OUT/figures.md hold all figures so far, and OUT/figures the tables of docs/figures.

The exit status is 1 if a part failed. The other parts run anyway.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import shared_paths
from gpu_figures import write_gpu_figures
from harness import tables
from release_tables import write_release_tables

from baton.engine.gpus import visible_gpus

HERE = Path(__file__).parent
FIRST_PORT = 8100  # of the routers of parts
FP8 = ("8b", "30b")  # models that are measured with weights in FP8, too


class Model(NamedTuple):
    """A planted model whose weights the loader makes."""

    architecture: str
    heads: tuple[str, ...] = ()  # EAGLE-3, by the share of tokens that they propose right


MODELS = {
    "1b": Model("llama-3.2-1b"),
    "8b": Model("llama-3.1-8b", ("0.8", "0.2")),
    "30b": Model("qwen3-30b-a3b"),
    "v2-lite": Model("deepseek-v2-lite"),
    "oss": Model("gpt-oss-20b"),
}


ENGINES = [f"engine-{size}{suffix}" for size in MODELS for suffix in (("", "-fp8") if size in FP8 else ("",))]


class Part(NamedTuple):
    """A part of the measurement."""

    name: str
    command: list[str]  # arguments of Python; --commit and --json follow
    model: str | None = None  # which of MODELS it needs
    num_gpus: int = 1


def parts(models: Path, num_gpus: int, out: Path = Path()) -> list[Part]:
    """Return all parts that can be measured with this number of GPUs, those that need the most of them first."""
    eight = models / MODELS["8b"].architecture
    found = [*_shapes(eight, out), *_ranks(eight), *_speculation(eight)]
    for name in ENGINES:
        size = name.removeprefix("engine-").removesuffix("-fp8")
        flags = ["--only", "decode", "prefill", "offline", *(["--quantization", "fp8"] if name.endswith("fp8") else [])]
        found.append(Part(name, _engine(models / MODELS[size].architecture, *flags), size))
    long = ["--only", "long", "--context-len", "131072", "--num-tokens", "140000"]
    found.append(Part("long-8b", _engine(eight, *long), "8b"))
    able = [part for part in found if part.num_gpus <= num_gpus]
    return sorted(able, key=lambda part: -part.num_gpus)


def _engine(model: Path, *flags: str) -> list[str]:
    return [str(HERE / "bench_gpu.py"), "--model", str(model), "--load-format", "planted:maker", *flags]


def _shapes(model: Path, out: Path) -> list[Part]:
    """Return loads on clusters of several shapes. Each has its own port."""
    loads = {
        "never": ["4096", "1024", "idle-64", "idle-1024", "idle-8192", "busy-64"],
        "auto": ["4096", "1024"],
        "0p2d": ["4096", "1024"],
        "dp2": ["ranks-1024"],
    }
    loads |= {shape: ["ranks-4096", "ranks-1024"] for shape in ("dp4", "tp2-2d", "2p2d")}
    found: list[Part] = []
    for index, (shape, names) in enumerate(loads.items()):
        command = [str(HERE / "bench_shapes.py"), "--model", str(model), "--port", str(FIRST_PORT + index)]
        command += ["--out", str(out / f"loads-{shape}"), "--shapes", shape, "--loads", *names]
        num_gpus = 4 if shape in ("dp4", "tp2-2d", "2p2d") else 2
        found.append(Part(f"loads-{shape}", command, "8b", num_gpus))
    return found


def _ranks(model: Path) -> list[Part]:
    handoff = [str(HERE / "ranks" / "bench_handoff.py"), "--device", "cuda"]
    tensor = ["--only", "decode", "prefill", "--batches", "1", "8", "64"]
    return [
        Part("handoff", [*handoff, "--rounds", "15"]),
        Part("handoff-two-gpus", [*handoff, "--rounds", "15", "--devices", "0", "1"], None, 2),
        Part("engine-8b-tp1", _engine(model, *tensor), "8b"),
        Part("engine-8b-tp2", _engine(model, *tensor, "--tp", "2"), "8b", 2),
        Part("engine-8b-tp4", _engine(model, *tensor, "--tp", "4"), "8b", 4),
    ]


def _speculation(model: Path) -> list[Part]:
    system = [str(HERE / "serving" / "bench_system.py"), "--model", str(model), "--load-format", "planted:maker"]
    system += ["--prompt-len", "512", "--tokens", "768", "--kinds", "greedy", "top_p", "--no-engine"]
    heads = {share: str(model / f"eagle3-{share}") for share in MODELS["8b"].heads}
    drafts = ["--speculative", "eagle3", "--draft-model", heads["0.8"]]
    adaptive = ["--only", "adaptive", "--kinds", "greedy", "top_p", "--batches", "1", "16", "64"]
    grammar = [str(HERE / "engine_times" / "bench_grammar.py"), "--model", str(model), "--streams", "32"]
    grammar += ["--load-format", "planted:maker", "--draft-model", heads["0.8"]]
    sampling = ["--only", "sampling", "--batches", "64"]
    return [
        Part("system-8b", system, "8b"),
        Part("system-8b-eagle3", [*system, *drafts], "8b"),
        *(
            Part(f"adaptive-8b-{share}", _engine(model, "--drafter", head, *adaptive, "--num-tokens", "262144"), "8b")
            for share, head in heads.items()
        ),
        Part("sampling-8b", _engine(model, *sampling), "8b"),
        Part("sampling-8b-eagle3", _engine(model, "--drafter", heads["0.8"], *sampling), "8b"),
        Part("grammars-8b", grammar, "8b"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement. Returns the exit status."""
    gpus = visible_gpus()
    names = [part.name for part in parts(Path(), len(gpus))]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, metavar="DIR", help="of checkpoints, made where absent")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of figures, logs and tables")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--again", action="store_true", help="measure also what has been measured")
    parser.add_argument("--commit", help="of this tree, for the reports (default: what git says)")
    options = parser.parse_args(arguments)
    chosen = [part for part in parts(options.models, len(gpus), options.out) if part.name in (options.only or names)]
    failed = measure(chosen, options.models, options.out, gpus, again=options.again, commit=options.commit)
    for name in failed:
        print(f"failed: {name}, see {options.out / name}.log")
    return 1 if failed else 0


def measure(
    chosen: Sequence[Part],
    models: Path,
    out: Path,
    gpus: Sequence[str] = ("0",),
    *,
    again: bool = False,
    commit: str | None = None,
) -> list[str]:
    """Run the chosen parts in their order, each as soon as enough GPUs are free. Returns the names of those that
    failed."""
    out.mkdir(parents=True, exist_ok=True)
    free, changed, writing = list(gpus), threading.Condition(), threading.Lock()
    problems: dict[str, str | None] = {}

    def run(part: Part, taken: list[str]) -> None:
        started = time.monotonic()
        try:
            problems[part.name] = _run(part, out, taken, commit)
        finally:
            with changed:
                free.extend(taken)
                changed.notify()
        print(f"{part.name}: {problems[part.name] or 'done'}, {time.monotonic() - started:.0f} s", flush=True)
        with writing:
            write_figures(out)

    with ThreadPoolExecutor(len(gpus)) as threads:
        runs: list[Future[None]] = []
        for part in chosen:
            if (out / f"{part.name}.json").exists() and not again:
                print(f"{part.name}: measured before")
                continue
            if part.model is not None and not _make_model(part.model, models, out / f"{part.name}.log"):
                problems[part.name] = "its model could not be made"
                continue
            with changed:
                changed.wait_for(lambda needed=part.num_gpus: len(free) >= needed)
                taken = [free.pop(0) for _ in range(part.num_gpus)]
            runs.append(threads.submit(run, part, taken))
    for each in runs:
        each.result()
    write_figures(out)
    return [name for name, problem in problems.items() if problem]


def _run(part: Part, out: Path, gpus: Sequence[str], commit: str | None) -> str | None:
    """Run one part. Returns what went wrong, or None.

    The JSON file gets its final name only if the part succeeds, so a file with that name is complete and checked.
    """
    path, unchecked = out / f"{part.name}.json", out / f"{part.name}.json.unchecked"
    for old in (path, unchecked):
        old.unlink(missing_ok=True)
    commits = ["--commit", commit] if commit else []
    path_of_modules = os.pathsep.join([shared_paths.MADE_MODELS, os.environ.get("PYTHONPATH", "")])
    with (out / f"{part.name}.log").open("w") as log:
        status = subprocess.run(
            [sys.executable, *part.command, *commits, "--json", str(unchecked)],
            stdout=log, stderr=subprocess.STDOUT, check=False,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus), "PYTHONPATH": path_of_modules},
        ).returncode  # fmt: skip
    if status != 0:
        return f"exit status {status}"
    report = json.loads(unchecked.read_text())
    if not (report.get("checked_tokens") or report.get("checked_bytes")):
        return "it compared nothing with what is known"
    unchecked.rename(path)
    return None


def _make_model(size: str, models: Path, log: Path) -> bool:
    """Make a planted model and its heads if they are missing. The directory gets its name when it is complete."""
    model = MODELS[size]
    directory = models / model.architecture
    if directory.exists():
        return True
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    flags = ["--planted", "--config-only", *(["--acceptance", *model.heads] if model.heads else [])]
    command = [sys.executable, str(HERE / "synthetic.py"), model.architecture, str(partial), *flags]
    with log.open("w") as out:
        if subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode != 0:
            return False
    partial.rename(directory)
    return True


def write_figures(out: Path) -> None:
    """Write figures.json and figures.md from all reports in `out`."""
    paths = sorted(path for path in out.glob("*.json") if path.name != "figures.json")
    found = {path.stem: json.loads(path.read_text()) for path in paths}
    same = ("device", "torch", "commit", "date")
    reports: dict[str, dict[str, Any]] = {
        name: each for name, each in found.items() if isinstance(each, dict) and set(same) <= set(each)
    }
    about = {name: ", ".join(sorted({report[name] for report in reports.values()})) for name in same}
    (out / "figures.json").write_text(json.dumps(about | {"parts": reports}, indent=1) + "\n")
    head = "\n".join(f"{name}: {value}" for name, value in about.items())
    (out / "figures.md").write_text(f"{head}\n\n{tables(reports)}\n")
    command = "python tests/benchmarks/bench_all.py --models models --out figures"
    engines = [reports[name] for name in ENGINES if name in reports]
    if len({report["commit"] for report in engines}) == 1:
        write_gpu_figures(out / "figures", engines, f"{command} --only {' '.join(ENGINES)}")
    write_release_tables(out / "figures", reports, command)


if __name__ == "__main__":
    sys.exit(main())
