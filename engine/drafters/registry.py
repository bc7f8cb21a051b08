"""The drafters that exist, one line each. Imports neither torch nor a drafter: flags and `baton up` read the names
alone, and speculation.py imports the module of the one that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Line(NamedTuple):
    """The place of a drafter: its module, and the name of its directory."""

    module: str  # in this folder; its FAMILY describes the drafter
    shipped_as: str | None = None  # how the name of its directory inside the target's begins; None: it has no files


DRAFTERS = {  # by the value of --speculative
    "ngram": Line("ngram"),
    "standalone": Line("standalone", "standalone"),
    "eagle": Line("eagle", "eagle"),
    "eagle3": Line("eagle3", "eagle3"),
    "mtp": Line("mtp", "mtp"),
    "frozen-kv-mtp": Line("frozen_kv", "frozen_kv_mtp"),
}
ALGORITHMS = ("none", *DRAFTERS)


def describe(algorithm: str, num_steps: int | None, topk: int, drafter: Path | None, model_dir: Path) -> str:
    """Return the choice in words for logs: "eagle, 5 steps, drafter eagle/"."""
    words = [algorithm]
    if algorithm in DRAFTERS and num_steps is not None:
        words.append("1 step" if num_steps == 1 else f"{num_steps} steps")
    if topk > 1:
        words.append(f"{topk} branches")
    if drafter == model_dir:
        words.append("by the model's own layers")
    elif drafter is not None:
        words.append(f"drafter {drafter.name if drafter.parent == model_dir else drafter}/")
    return ", ".join(words)
