"""Measure all figures of docs/performance.md that need a GPU, and check them.

    python tests/benchmarks/bench_all.py --models models --out figures [--only engine-1b system-1b] [--again]

Each part runs in its own process, whose output goes to OUT/NAME.log. If a part needs a planted checkpoint that is not
in --models, the checkpoint is made first. A part succeeds if what it generated or moved equals what is known; its
figures are then in OUT/NAME.json. Parts with such a file are not run again unless --again is given, so a run that was
interrupted continues where it stopped. After each part, OUT/figures.json and OUT/figures.md hold all figures so
far, and OUT/figures the main tables.

The exit status is 1 if a part failed. The other parts run anyway.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import shared_paths  # noqa: F401
from gpu_figures import write_gpu_figures
from harness import tables

HERE = Path(__file__).parent


class Model(NamedTuple):
    """A planted checkpoint."""

    architecture: str
    heads: tuple[str, ...] = ()  # EAGLE-3, by the share of tokens that they propose right
    is_made: bool = False  # it has no files of weights: the loader makes them

    @property
    def name(self) -> str:
        """The name of its directory."""
        return f"{self.architecture}-made" if self.is_made else self.architecture


MODELS = {
    "1b": Model("llama-3.2-1b"),
    "8b": Model("llama-3.1-8b", ("0.8", "0.6", "0.2")),
    "8b-made": Model("llama-3.1-8b", is_made=True),
    "30b-made": Model("qwen3-30b-a3b", is_made=True),
}


class Part(NamedTuple):
    """A part of the measurement."""

    name: str
    command: list[str]  # arguments of Python; --commit and --json follow
    model: str | None = None  # which of MODELS it needs


def parts(models: Path, num_gpus: int) -> list[Part]:
    """Return all parts that can be measured with this number of GPUs."""
    handoff = [str(HERE / "ranks" / "bench_handoff.py"), "--device", "cuda"]
    found = [
        Part("handoff", [*handoff, "--rounds", "15"]),
        Part("handoff-pages-of-16", [*handoff, "--rounds", "9", "--page-size", "16"]),
    ]
    if num_gpus > 1:
        found.append(Part("handoff-two-gpus", [*handoff, "--rounds", "15", "--devices", "0", "1"]))
    for size, model in MODELS.items():
        directory = models / model.name
        engine = [str(HERE / "bench_gpu.py"), "--model", str(directory)]
        if model.is_made:
            engine += ["--load-format", "planted:maker", "--only", "decode", "prefill", "offline"]
            found += [Part(f"engine-{size}", engine, size)]
            found += [Part(f"engine-{size}-fp8", [*engine, "--quantization", "fp8"], size)]
            continue
        found.append(Part(f"engine-{size}", engine, size))
        found.append(
            Part(f"system-{size}", [str(HERE / "serving" / "bench_system.py"), "--model", str(directory)], size)
        )
        only = ["--only", "rounds", "adaptive", "--batches", "1", "8", "32", "64", "--num-tokens", "260000"]
        for share in model.heads:
            head = [*engine, "--drafter", str(directory / f"eagle3-{share}"), *only]
            found.append(Part(f"rounds-{size}-{share}", head, size))
        for share in model.heads[:1]:
            tree = ["--drafter", str(directory / f"eagle3-{share}"), "--topk", "3", "--steps", "4"]
            few = ["--only", "rounds", "--batches", "1", "8", "32"]
            found.append(Part(f"rounds-{size}-{share}-trees", [*engine, *tree, *few], size))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement. Returns the exit status."""
    import torch

    num_gpus = torch.cuda.device_count()
    names = [part.name for part in parts(Path(), num_gpus)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, metavar="DIR", help="of checkpoints, made where absent")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of figures, logs and tables")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--again", action="store_true", help="measure also what has been measured")
    parser.add_argument("--commit", help="of this tree, for the reports (default: what git says)")
    options = parser.parse_args(arguments)
    chosen = [part for part in parts(options.models, num_gpus) if part.name in (options.only or names)]
    failed = measure(chosen, options.models, options.out, again=options.again, commit=options.commit)
    for name in failed:
        print(f"failed: {name}, see {options.out / name}.log")
    return 1 if failed else 0


def measure(
    chosen: Sequence[Part], models: Path, out: Path, *, again: bool = False, commit: str | None = None
) -> list[str]:
    """Run the chosen parts. Returns the names of those that failed."""
    out.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    for part in chosen:
        if (out / f"{part.name}.json").exists() and not again:
            print(f"{part.name}: measured before")
        else:
            started = time.monotonic()
            problem = _run(part, models, out, commit)
            print(f"{part.name}: {problem or 'done'}, {time.monotonic() - started:.0f} s", flush=True)
            failed += [part.name] if problem else []
        write_figures(out)
    return failed


def _run(part: Part, models: Path, out: Path, commit: str | None) -> str | None:
    """Run one part. Returns what went wrong, or None.

    The JSON file gets its final name only if the part succeeds, so a file with that name is complete and checked.
    """
    path, unchecked = out / f"{part.name}.json", out / f"{part.name}.json.unchecked"
    for old in (path, unchecked):
        old.unlink(missing_ok=True)
    commits = ["--commit", commit] if commit else []
    with (out / f"{part.name}.log").open("w") as log:
        if part.model is not None and not _make_model(part.model, models, log):
            return "its model could not be made"
        status = subprocess.run(
            [sys.executable, *part.command, *commits, "--json", str(unchecked)],
            stdout=log, stderr=subprocess.STDOUT, check=False,
        ).returncode  # fmt: skip
    if status != 0:
        return f"exit status {status}"
    report = json.loads(unchecked.read_text())
    if not (report.get("checked_tokens") or report.get("checked_bytes")):
        return "it compared nothing with what is known"
    unchecked.rename(path)
    return None


def _make_model(size: str, models: Path, log: Any) -> bool:
    """Make a planted checkpoint and its heads if they are missing. The directory gets its name when it is complete."""
    model = MODELS[size]
    directory = models / model.name
    if directory.exists():
        return True
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    flags = ["--planted", *(["--config-only"] if model.is_made else [])]
    flags += ["--acceptance", *model.heads] if model.heads else []
    command = [sys.executable, str(HERE / "synthetic.py"), model.architecture, str(partial), *flags]
    if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode != 0:
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
    write_gpu_figures(out / "figures", list(reports.values()), f"python tests/benchmarks/bench_all.py --out {out}")


if __name__ == "__main__":
    sys.exit(main())
