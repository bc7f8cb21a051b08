"""Draw goodput over the rate of requests, one panel per SLO and one line per file of `bench_load.py --json`.

    python tests/benchmarks/serving/plot_goodput.py auto.json never.json 0p2d.json --png goodput.png

A line is named after its file. Every load of a file must have goodput for the same SLOs as all others. This needs
matplotlib, which nothing else in Baton does: `pip install 'baton-serve[bench]'`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Curves = dict[str, dict[str, list[tuple[float, float]]]]  # by SLO and line: (rate, goodput), rising


def curves(files: Mapping[str, Sequence[dict[str, Any]]]) -> Curves:
    """Return the points of each line in each panel. `files`: the loads by the name of their line. Raises ValueError if
    the SLOs differ."""
    found: Curves = {}
    slos: list[str] | None = None
    for line, loads in files.items():
        for load in loads:
            own = [name for name in load if name.startswith("goodput_")]
            if slos is not None and own != slos:
                raise ValueError(f"{line} has goodput for {own}, others for {slos}: measure all with the same --slo")
            slos = own
            for name in own:
                ttft, tpot = name.split("_")[1:]
                points = found.setdefault(f"ttft at most {ttft} ms, tpot {tpot} ms", {}).setdefault(line, [])
                points.append((load["rate"], load[name]))
    return {slo: {line: sorted(points) for line, points in lines.items()} for slo, lines in found.items()}


def draw(panels: Curves, path: Path) -> None:
    """Write the chart as a PNG. The grey line is the rate: no system can be above it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, row = pyplot.subplots(1, len(panels), figsize=(4.5 * len(panels), 3.8), dpi=130, squeeze=False)
    for axes, (slo, lines) in zip(row[0], panels.items(), strict=True):
        most = max(rate for points in lines.values() for rate, _ in points)
        axes.plot([0, most], [0, most], color="0.8", linewidth=1)
        for line, points in lines.items():
            axes.plot(*zip(*points, strict=True), "o-", label=line, markersize=4)
        axes.set_title(slo, fontsize=9)
        axes.set_xlabel("requests per second")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    row[0][0].set_ylabel("good requests per second")
    row[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="of bench_load.py --json")
    parser.add_argument("--png", type=Path, required=True)
    options = parser.parse_args()
    try:
        draw(curves({path.stem: json.loads(path.read_text()) for path in options.files}), options.png)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
