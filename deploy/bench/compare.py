"""Two reports side by side: ratios, and which differences are larger than the noise of repeated runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from ...metadata.errors import ConfigError
from .figures import LoadFigures, Report

_TIMES = tuple((name, column) for name in ("ttft", "tpot", "itl", "gap", "latency") for column in ("p50", "p99"))
_OUTSIDE = {"json", "svg", "url", "model", "repeat", "api_key", "log_level"}  # settings that do not change the load


class Difference(NamedTuple):
    """A figure of two reports, each the median of its repeats."""

    name: str
    a: float
    b: float
    verdict: str  # higher, lower, noise; empty if a report has one run

    @property
    def ratio(self) -> float:
        """The second figure as a share of the first."""
        return self.b / self.a if self.a else float("inf") if self.b else 1.0


def read_report(path: Path) -> Report:
    """Read what `baton bench --json` wrote. Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise ConfigError(f"--compare {path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"--compare {path} was not written by `baton bench --json`: {error}") from None


def compared_text(a: Report, b: Report) -> str:
    """Return the comparison as lines of at most 80 characters. Raises ConfigError if no rate is in both."""
    rates = sorted({load.rate for load in a.loads} & {load.rate for load in b.loads})
    if not rates:
        raise ConfigError(
            f"the files have no rate in common: {_rates(a)} requests/s in the first, {_rates(b)} in the second"
        )
    lines = [f"A: {_about(a)}", f"B: {_about(b)}"]
    unlike = [name for name in a.settings if name not in _OUTSIDE and a.settings[name] != b.settings.get(name)]
    if unlike:
        lines.append(f"WARNING: the loads differ: {', '.join('--' + name.replace('_', '-') for name in unlike)}")
    for rate in rates:
        ours, theirs = _runs(a, rate), _runs(b, rate)
        lines += ["", f"{f'{rate:.2f} requests/s':<22}{'A':>12}{'B':>12}{'B / A':>9}"]
        lines += [
            f"{each.name:<22}{each.a:>12,.2f}{each.b:>12,.2f}{each.ratio:>9.3f}  {each.verdict}".rstrip()
            for each in differences(ours, theirs)
        ]
        lines.append(_chance(len(ours), len(theirs)))
    return "\n".join(lines)


def differences(ours: Sequence[LoadFigures], theirs: Sequence[LoadFigures]) -> Iterator[Difference]:
    """Yield all figures that both have. A difference is noise if the ranges of the repeats overlap."""
    for name, values in _values(ours).items():
        others = _values(theirs).get(name)
        if not others:
            continue
        verdict = ""
        if min(len(values), len(others)) > 1:
            verdict = "lower" if max(others) < min(values) else "higher" if min(others) > max(values) else "noise"
        yield Difference(name, median(values), median(others), verdict)


def _values(loads: Sequence[LoadFigures]) -> dict[str, list[float]]:
    """Return each figure of all repeats by its name."""
    found: dict[str, list[float]] = {}
    for load in loads:
        for name, column in _TIMES:
            if (times := getattr(load, name)) is not None:
                found.setdefault(f"{name} {column}, ms", []).append(getattr(times, column))
        for good in load.goodput:
            found.setdefault(f"good at {good.ttft_ms:g} / {good.tpot_ms:g}, /s", []).append(good.per_s)
        found.setdefault("tokens/s", []).append(load.tokens_per_s)
        found.setdefault("failed", []).append(load.failed)
    return found


def _chance(num_a: int, num_b: int) -> str:
    if min(num_a, num_b) < 2:
        return "One run each shows no noise: --repeat 5 in both tells which differences are real."
    share = 2 / comb(num_a + num_b, num_a)
    return (
        f"noise: the runs of A and B overlap ({num_a} and {num_b}). Equal servers would seem\n"
        f"higher or lower by luck in {share:.1%} of the lines."
    )


def _runs(report: Report, rate: float) -> list[LoadFigures]:
    return [load for load in report.loads if load.rate == rate]


def _about(report: Report) -> str:
    return f"{report.server}, {report.model}, {report.started}"


def _rates(report: Report) -> str:
    return ", ".join(f"{rate:g}" for rate in sorted({load.rate for load in report.loads}))
